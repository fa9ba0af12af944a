"""Input that does not fit: the same error on every worker, before any data is sent, and no hang.

Tests `primitives/movement.py`, `primitives/slices.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tessel
from movements import COLUMNS, FROM_ONE, MOVEMENTS, SUMS, Case, Values, assert_close, case, me, mine
from tessel import nn
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]

SECONDS = 15  # far more than any of these takes; a hang ends here
MANY_GIVERS = [name for name in MOVEMENTS if name not in FROM_ONE]


@dataclass
class Outcome:
    """How a call ended on one worker."""

    kind: str
    text: str
    bytes_sent: int
    works_afterwards: bool


def attempt(call: Callable[[], object]) -> Outcome:
    """Make a call that should raise, then a right movement in the same world."""
    kind, text = "", ""
    with count_traffic() as traffic:
        try:
            call()
        except (ValueError, TypeError, NotImplementedError) as error:
            kind, text = type(error).__name__, str(error)
    return Outcome(kind, text, traffic.bytes_sent, world_works())


def world_works() -> bool:
    n = tessel.world().size
    total = nn.AllSumReduce(tessel.world(), [0])(torch.full((7,), float(me())))
    return torch.equal(total, torch.full((7,), n * (n - 1) / 2))


def assert_same_error(
    outcomes: Sequence[Outcome], *words: object, kind: str = "ValueError"
) -> None:
    """All workers raised the same and sent nothing; the text names all of `words`."""
    assert {outcome.kind for outcome in outcomes} == {kind}, outcomes
    assert len({outcome.text for outcome in outcomes}) == 1, outcomes
    assert all(outcome.bytes_sent == 0 for outcome in outcomes), outcomes
    assert all(outcome.works_afterwards for outcome in outcomes), outcomes
    for word in words:
        assert str(word) in outcomes[0].text, f"{word} is not in: {outcomes[0].text}"


def change_input(name: str, odd: int, change: str) -> Outcome:
    """Call a movement with a changed tensor on one worker (on all if `odd` is negative)."""
    movement = case(name)
    x = mine(movement.inputs())
    if odd in (me(), -1):
        x = CHANGES[change](x)
    return attempt(lambda: movement.layer(x))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "wider": lambda x: x.new_zeros(x.shape[0], COLUMNS + 1),
    "float32": lambda x: x.float(),
    "int64": lambda x: x.long(),
    "bool": lambda x: x > 0,
    "uint16": lambda x: x.abs().to(torch.uint16),
    "one dimension less": lambda x: x[:, 0],
    "one dimension more": lambda x: x[..., None],
    "eleven dimensions": lambda x: x[(..., *[None] * 9)],
    "sparse": lambda x: x.to_sparse(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "None": lambda x: None,
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "a number": lambda x: 1.0,
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("name", MANY_GIVERS)
def test_shapes_that_do_not_fit(run: Run, name: str, odd: int) -> None:
    outcomes = run(change_input, name, odd, "wider", nprocs=3, timeout=SECONDS)
    worker = "worker" if odd == 0 else f"worker {odd}"  # with two against one, either is named
    assert_same_error(outcomes, worker, COLUMNS, COLUMNS + 1)


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("name", MANY_GIVERS)
def test_dtype_differs_on_one_worker(run: Run, name: str, odd: int) -> None:
    outcomes = run(change_input, name, odd, "float32", nprocs=3, timeout=SECONDS)
    assert_same_error(outcomes, "dtype", f"worker {odd}", "torch.float32", "torch.float64")


@pytest.mark.parametrize("change", ["one dimension less", "one dimension more"])
@pytest.mark.parametrize("name", MANY_GIVERS)
def test_number_of_dimensions_differs(run: Run, name: str, change: str) -> None:
    outcomes = run(change_input, name, 1, change, nprocs=3, timeout=SECONDS)
    assert_same_error(outcomes, "dimensions", "worker 1", 2, 1 if "less" in change else 3)


@pytest.mark.parametrize("name", MOVEMENTS)
def test_too_many_dimensions_everywhere(run: Run, name: str) -> None:
    giver = 0 if name in FROM_ONE else -1
    outcomes = run(change_input, name, giver, "eleven dimensions", nprocs=2, timeout=SECONDS)
    assert_same_error(outcomes, 11)


@pytest.mark.parametrize("dtype", ["bool", "uint16"])
@pytest.mark.parametrize("name", SUMS)
def test_what_cannot_be_summed(run: Run, name: str, dtype: str) -> None:
    """`+` of booleans would be a silent "or"; torch has no sum of the wide unsigned integers."""
    outcomes = run(change_input, name, -1, dtype, nprocs=3, timeout=SECONDS)
    assert_same_error(outcomes, dtype)


ODD_OBJECTS = ["None", "a list", "an array", "a number", "sparse", "float8"]


@pytest.mark.parametrize("name", ["AllSumReduce", "Broadcast", "Move"])
@pytest.mark.parametrize("change", ODD_OBJECTS)
def test_one_worker_passes_no_tensor_that_can_move(run: Run, name: str, change: str) -> None:
    outcomes = run(change_input, name, 0, change, nprocs=3, timeout=SECONDS)
    assert_same_error(outcomes, "worker 0", kind=outcomes[0].kind)
    assert outcomes[0].kind


@pytest.mark.parametrize("change", ["None", "an array", "float8"])
def test_all_workers_pass_no_tensor_that_can_move(run: Run, change: str) -> None:
    outcomes = run(change_input, "AllSumReduce", -1, change, nprocs=2, timeout=SECONDS)
    assert_same_error(outcomes, kind=outcomes[0].kind)
    assert outcomes[0].kind


def test_a_taker_may_pass_anything_for_a_placeholder(run: Run) -> None:
    """Of those who give nothing, neither shape nor dtype counts."""
    assert all(run(broadcast_with_placeholders, nprocs=3, timeout=SECONDS))


def broadcast_with_placeholders() -> bool:
    layer = nn.Broadcast(tessel.world().create_partition_inclusive([0]), tessel.world())
    mine = [
        torch.ones(4, dtype=torch.complex64),
        torch.ones(2, 2),
        torch.ones((), dtype=torch.int8),
    ]
    return torch.equal(layer(mine[me()]), torch.ones(4, dtype=torch.complex64))


def misfit_on_a_grid(name: str) -> Outcome:
    world = tessel.world()
    P = world.create_cartesian_topology_partition([2, 2])
    column = world.create_partition_inclusive([0, 2]).create_cartesian_topology_partition([2, 1])
    flat = world.create_cartesian_topology_partition([1, 4])
    layers = {
        "Repartition": nn.Repartition(P, flat),
        "HaloExchange": nn.HaloExchange(P, [(1, 1), (1, 1)]),
        "SumReduce": nn.SumReduce(P, column),
        "AllSumReduce": nn.AllSumReduce(P, [1]),
        "AllGather": nn.AllGather(P, 1, 0),
        "ReduceScatter": nn.ReduceScatter(P, 1, 0),
    }
    shape = (2, 5) if me() == 3 else (2, 4)
    return attempt(lambda: layers[name](torch.ones(shape)))


@pytest.mark.parametrize(
    "name",
    ["Repartition", "HaloExchange", "SumReduce", "AllSumReduce", "AllGather", "ReduceScatter"],
)
def test_a_misfit_in_one_slice_raises_in_all(run: Run, name: str) -> None:
    outcomes = run(misfit_on_a_grid, name, nprocs=4, timeout=SECONDS)
    assert_same_error(outcomes, "worker 3", 4, 5)


def raise_from(name: str) -> Outcome:
    P = tessel.world()
    x = torch.ones(2, 3)
    return attempt(lambda: MISTAKES[name][0](P, x))


MISTAKES: dict[str, tuple[Callable[[Any, Tensor], object], tuple[object, ...]]] = {
    "axis of AllSumReduce": (lambda P, x: nn.AllSumReduce(P, [1]), ("axis 1", (3,))),
    "negative axis": (lambda P, x: nn.AllSumReduce(P, [-2]), ("axis -2", (3,))),
    "axis twice": (lambda P, x: nn.AllSumReduce(P, [0, -1]), ("twice", (0, -1))),
    "axis of AllGather": (lambda P, x: nn.AllGather(P, 2, 0), ("axis 2", (3,))),
    "axis of ReduceScatter": (lambda P, x: nn.ReduceScatter(P, 2, 0), ("axis 2", (3,))),
    "dim of AllGather": (lambda P, x: nn.AllGather(P, 0, 2)(x), ("dim 2", 2)),
    "negative dim": (lambda P, x: nn.AllGather(P, 0, -3)(x), ("dim -3", 2)),
    "dim of ReduceScatter": (lambda P, x: nn.ReduceScatter(P, 0, 2)(x), ("dim 2", 2)),
    "dim of no dimensions": (lambda P, x: nn.AllGather(P, 0, 0)(x[0, 0]), ("dim 0", 0)),
    "tensor of Repartition": (lambda P, x: nn.Repartition(P, P)(x), ("2 dimensions", "3")),
    "tensor of HaloExchange": (lambda P, x: nn.HaloExchange(P, [(1, 1)])(x), ("2 dimensions",)),
    "tensor of gather": (lambda P, x: tessel.gather(x, P), ("2 dimensions",)),
    "tensor of all_gather": (lambda P, x: tessel.all_gather(x, P), ("2 dimensions",)),
    "tensor of scatter": (lambda P, x: tessel.scatter(x, P), ("2 dimensions",)),
    "grid": (lambda P, x: P.create_cartesian_topology_partition([2, 2]), ((2, 2), 4, 3)),
    "empty grid": (lambda P, x: P.create_cartesian_topology_partition([3, 0]), ((3, 0),)),
    "negative grid": (lambda P, x: P.create_cartesian_topology_partition([-3, -1]), ((-3, -1),)),
    "Partition": (lambda P, x: tessel.Partition((0, 1), (3,)), ((3,), 2)),
    "worker of another job": (lambda P, x: tessel.Partition((0, 3), (2,)), ((0, 3), 3)),
    "rank": (lambda P, x: P.create_partition_inclusive([0, 3]), ("rank 3", 3)),
    "negative rank": (lambda P, x: P.create_partition_inclusive([-1]), ("rank -1", 3)),
    "rank twice": (lambda P, x: P.create_partition_inclusive([1, 1]), ((1, 1),)),
    "no rank": (lambda P, x: P.create_partition_inclusive([]), ("at least one",)),
    "too many pairs": (lambda P, x: nn.HaloExchange(P, [(1, 1)] * 2), (1, 2)),
    "too few pairs": (lambda P, x: nn.HaloExchange(P, []), (1, 0)),
    "not a pair": (lambda P, x: nn.HaloExchange(P, [(1,)]), ("pair",)),
    "negative halo": (lambda P, x: nn.HaloExchange(P, [(-1, 1)]), ("negative", -1)),
    "axes of Repartition": (
        lambda P, x: nn.Repartition(P, P.create_cartesian_topology_partition([1, 3])),
        ("Partition(3", "Partition(1×3"),
    ),
    "grids of Broadcast": (
        lambda P, x: nn.Broadcast(P.create_partition_inclusive([0, 1]), P),
        ("Partition(2", "Partition(3"),
    ),
    "axes of Broadcast": (
        lambda P, x: nn.Broadcast(P.create_cartesian_topology_partition([3, 1]), P),
        ("Partition(3×1", "Partition(3"),
    ),
    "grids of SumReduce": (
        lambda P, x: nn.SumReduce(P, P.create_partition_inclusive([0, 1])),
        ("Partition(2", "Partition(3"),
    ),
    "dimensions of a layout": (lambda P, x: tessel.Layout.balanced(P, (4, 4)), (2,)),
    "negative length": (lambda P, x: tessel.Layout.balanced(P, (-4,)), (-4,)),
    "shapes of Move": (
        lambda P, x: tessel.Move(
            tessel.Layout.balanced(P, (4,)), tessel.Layout.balanced(P, (5,))
        ),
        ("(4,)", "(5,)"),
    ),
    "factors of a product": (
        lambda P, x: (
            tessel.Move(tessel.Layout.whole(P, (4,)), tessel.Layout.whole(P, (4,)))
            @ tessel.Move(tessel.Layout.whole(P, (4,)), tessel.Layout.balanced(P, (4,)))
        ),
        ("cannot compose", "parts 4", "parts (2, 1, 1)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_arguments_out_of_range(run: Run, name: str) -> None:
    outcomes = run(raise_from, name, nprocs=3, timeout=SECONDS)
    assert_same_error(outcomes, *MISTAKES[name][1])


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_axis_out_of_range_on_grids(run: Run, dim: int) -> None:
    outcomes = run(axis_too_large, dim, nprocs=3, timeout=SECONDS)
    assert_same_error(outcomes, f"axis {dim}")


def axis_too_large(dim: int) -> Outcome:
    ranks, shape = ((0, 1, 2), (1,) * (dim - 1) + (3,)) if dim else ((1,), ())
    P = tessel.Partition(ranks, shape)
    return attempt(lambda: nn.AllSumReduce(P, [dim]))


def differ(name: str) -> Outcome:
    world = tessel.world()
    W, B = tessel.Layout.whole(world, (6,)), tessel.Layout.balanced(world, (6,))
    turned = tessel.Partition((2, 0, 1), (3,))
    V, C = tessel.Layout.whole(turned, (6,)), tessel.Layout.balanced(turned, (6,))
    square = world.create_cartesian_topology_partition([3, 1])
    x = torch.ones(6)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "movements": (
            lambda: nn.AllSumReduce(world, [0])(x),
            lambda: nn.ReduceScatter(world, 0, 0)(x),
        ),
        "a module and a Move": (
            lambda: nn.AllSumReduce(world, [0])(x),
            lambda: tessel.Move(W, W)(x),
        ),
        "halos": (
            lambda: nn.HaloExchange(world, [(1, 1)])(x),
            lambda: nn.HaloExchange(world, [(1, 2)])(x),
        ),
        "dims": (
            lambda: nn.AllGather(world, 0, 0)(x.view(2, 3)),
            lambda: nn.AllGather(world, 0, 1)(x.view(2, 3)),
        ),
        "targets": (
            lambda: nn.Repartition(square, square)(x.view(2, 3)),
            lambda: nn.Repartition(square, world.create_cartesian_topology_partition([1, 3]))(
                x.view(2, 3)
            ),
        ),
        "a Move and its adjoint": (lambda: tessel.Move(W, B)(x), lambda: tessel.Move(B, W)(x[:2])),
        "orders of workers": (lambda: tessel.Move(B, W)(x[:2]), lambda: tessel.Move(C, V)(x[:2])),
        "products": (
            lambda: (tessel.Move(W, W) @ tessel.Move(W, W))(x),
            lambda: (tessel.Move(B, W) @ tessel.Move(W, B))(x),
        ),
        "partitions": (
            lambda: world.create_partition_inclusive([0, 1]),
            lambda: world.create_partition_inclusive([1, 2]),
        ),
        "orders of partitions": (
            lambda: [world.create_partition_inclusive(ranks) for ranks in ([0, 2], [0, 1])],
            lambda: [world.create_partition_inclusive(ranks) for ranks in ([0, 1], [0, 2])],
        ),
        "slices": (
            lambda: nn.AllSumReduce(world.create_partition_inclusive([0, 1]), [0]),
            lambda: nn.AllSumReduce(world.create_partition_inclusive([0, 2]), [0]),
        ),
        "a partition and a movement": (
            lambda: world.create_partition_inclusive([0, 1]),
            lambda: nn.AllSumReduce(world, [0])(x),
        ),
    }
    return attempt(pairs[name][me() == 1])


@pytest.mark.parametrize(
    "name",
    [
        *("movements", "a module and a Move", "halos", "dims", "targets"),
        *("a Move and its adjoint", "orders of workers", "products"),
    ],
)
def test_workers_call_different_movements(run: Run, name: str) -> None:
    outcomes = run(differ, name, nprocs=3, timeout=SECONDS)
    assert_same_error(outcomes, "worker 0", "worker 1")


@pytest.mark.parametrize(
    "name", ["partitions", "orders of partitions", "slices", "a partition and a movement"]
)
def test_workers_make_different_partitions(run: Run, pool: Any, name: str) -> None:
    run(forget_groups, nprocs=2)  # a world in which no group is known
    outcomes = run(differ, name, nprocs=3, timeout=SECONDS)
    assert_same_error(outcomes, "worker 0", "worker 1")


def forget_groups() -> None:
    """A call on another number of workers: the world of the next call is a new one."""


def grids_differ() -> Outcome:
    shape = [4, 1] if me() == 3 else [2, 2]
    P = tessel.world().create_cartesian_topology_partition(shape)
    return attempt(lambda: nn.HaloExchange(P, [(1, 1), (1, 1)])(torch.ones(2, 2)))


def test_workers_make_grids_of_different_shape(run: Run) -> None:
    outcomes = run(grids_differ, nprocs=4, timeout=SECONDS)
    assert_same_error(outcomes, "worker 0", "worker 3", "2×2", "4×1")


def loss(worker: int, y: Tensor) -> Tensor:
    return (y**3).sum() * (worker + 1) + y.sum()


def gradients_on_some(name: str, subset: Sequence[int]) -> bool:
    """The gradients of the workers in `subset`, whose inputs alone need one."""
    movement = case(name)
    everyones = movement.leaves()
    x = mine(everyones).requires_grad_(me() in subset)
    y = movement.layer(x)
    if y.requires_grad:
        loss(me(), y).backward()
    if me() in subset:
        assert_close(x.grad, mine(movement.gradients(everyones, loss)))
    return y.requires_grad


@pytest.mark.parametrize("name", MOVEMENTS)
def test_only_some_inputs_need_a_gradient(run: Run, name: str) -> None:
    subsets = [s for count in range(4) for s in combinations(range(3), count)]
    for subset in subsets:
        needs = run(gradients_on_some, name, subset, nprocs=3, timeout=SECONDS)
        assert needs == [bool(subset)] * 3, subset


def weights_after_a_movement(name: str) -> tuple[bool, int, int]:
    """A first layer: the data needs no gradient, what comes after it does."""
    movement = case(name)
    y = movement.layer(mine(movement.inputs()))
    weight = torch.ones_like(y, requires_grad=True)
    with count_traffic() as traffic:
        (weight * y).sum().backward()
    return y.grad_fn is None, traffic.messages, traffic.agreements


@pytest.mark.parametrize("name", MOVEMENTS)
def test_nobody_needs_a_gradient(run: Run, name: str) -> None:
    outcomes = run(weights_after_a_movement, name, nprocs=3, timeout=SECONDS)
    assert outcomes == [(True, 0, 0)] * 3


def no_grad_on(name: str, workers: Sequence[int], need: Sequence[int]) -> Outcome:
    movement = case(name)
    x = mine(movement.inputs()).requires_grad_(me() in need)
    with torch.set_grad_enabled(me() not in workers):
        return attempt(lambda: movement.layer(x))


@pytest.mark.parametrize("name", ["AllSumReduce", "HaloExchange", "Move", "Broadcast"])
def test_no_grad_on_some_workers_while_others_need_a_gradient(run: Run, name: str) -> None:
    """The backward pass would wait forever for those that record nothing."""
    outcomes = run(no_grad_on, name, [1], [0, 1, 2], nprocs=3, timeout=SECONDS)
    assert_same_error(outcomes, "workers [0, 2]", "workers [1]", "no_grad")


@pytest.mark.parametrize(("workers", "need"), [([1], []), ([0, 1, 2], [0, 1]), ([0], [0])])
def test_no_grad_where_nobody_waits(run: Run, workers: list[int], need: list[int]) -> None:
    """Nobody needs a gradient, or nobody who needs one records: all is well."""
    for name in ("AllSumReduce", "Repartition", "Move"):
        outcomes = run(no_grad_on, name, workers, need, nprocs=3, timeout=SECONDS)
        assert [outcome.kind for outcome in outcomes] == [""] * 3
        assert all(outcome.works_afterwards for outcome in outcomes)


LOSSES: list[Callable[[Tensor], Tensor]] = [
    lambda y: 1.5 * y.sum(),
    lambda y: (y * y).sum(),
    lambda y: (y**3).sum(),
]


def second_order(name: str, orders: Sequence[int]) -> None:
    """Losses of another order on each worker, and again of their gradients."""
    movement = case(name)
    everyones = movement.leaves()
    expected = _second_order_reference(movement, everyones, orders)
    x = mine(everyones).requires_grad_()
    order = orders[me()]
    (first,) = torch.autograd.grad(LOSSES[order](movement.layer(x)), x, create_graph=True)
    LOSSES[(order + 1) % 3](first).backward()
    assert_close(torch.zeros_like(x) if x.grad is None else x.grad, mine(expected))


def _second_order_reference(movement: Case, everyones: Values, orders: Sequence[int]) -> Values:
    first = movement.gradients(everyones, lambda w, y: LOSSES[orders[w]](y))
    terms = [LOSSES[(orders[w] + 1) % 3](g) for w, g in enumerate(first)]
    terms += [0 * x.sum() for x in everyones]  # there may be nothing to derive
    total = torch.stack(terms).sum()
    return list(torch.autograd.grad(total, everyones))


@pytest.mark.parametrize("orders", [(0, 1, 2), (1, 0, 0), (2, 2, 0), (0, 0, 0)])
@pytest.mark.parametrize("name", MOVEMENTS)
def test_second_order_of_unequal_losses(run: Run, name: str, orders: Sequence[int]) -> None:
    """A worker whose gradient is constant must still take part in the second backward pass."""
    run(second_order, name, orders, nprocs=3, timeout=SECONDS)


def change_sizes(name: str, sizes: Sequence[int]) -> None:
    """Calls of one layer for tensors of many sizes, forward and backward."""
    layer = case(name).layer
    for size in sizes:
        movement = case(name, size)
        apply = movement.layer if name.startswith("Move") else layer
        everyones = movement.leaves()
        x = mine(everyones).requires_grad_()
        y = apply(x)
        assert_close(y.detach(), mine(movement.reference(everyones)))
        loss(me(), y).backward()
        assert_close(x.grad, mine(movement.gradients(everyones, loss)))


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("name", MOVEMENTS)
def test_a_size_that_changes_some_local_shapes(run: Run, name: str, nprocs: int) -> None:
    """5 → 6 over 2 workers changes the local shape of one of them."""
    run(change_sizes, name, [5, 6, 5, 5, 7, 6, 1, 0, 2, 6], nprocs=nprocs, timeout=SECONDS)


def product_over_some() -> None:
    """A chain from worker to worker: the groups of its factors are parts of its own."""
    world = tessel.world()
    on = [tessel.Layout.whole(world.create_partition_inclusive([k]), (4,)) for k in range(3)]
    chain = tessel.Move(on[1], on[2]) @ tessel.Move(on[0], on[1])
    x = torch.arange(4.0, requires_grad=True) if me() == 0 else tessel.zero_volume_tensor()
    y = chain(x)
    assert torch.equal(y.detach(), torch.arange(4.0) if me() == 2 else torch.empty(0))
    if me() < 3:
        (y * 3).sum().backward()
    if me() == 0:
        assert_close(x.grad, torch.full((4,), 3.0))


@pytest.mark.parametrize("nprocs", [3, 4])
def test_product_whose_factors_have_smaller_groups(run: Run, nprocs: int) -> None:
    run(forget_groups, nprocs=2)
    run(product_over_some, nprocs=nprocs, timeout=SECONDS)


def dense_product() -> None:
    world = tessel.world()
    left, right = world.create_partition_inclusive([0, 1]), world.create_partition_inclusive([1, 2])
    rows = tessel.Layout.balanced(left.create_cartesian_topology_partition([2, 1]), (4, 4))
    columns = tessel.Layout.balanced(left.create_cartesian_topology_partition([1, 2]), (4, 4))
    other = tessel.Layout.balanced(right.create_cartesian_topology_partition([1, 2]), (4, 4))
    whole = torch.arange(16.0).reshape(4, 4)
    y = (tessel.Move(columns, other) @ tessel.Move(rows, columns))(rows.local_part(whole))
    assert torch.equal(y, other.local_part(whole))


def test_product_with_a_transposition_among_some(run: Run) -> None:
    run(dense_product, nprocs=3, timeout=SECONDS)


def test_numpy_integers_are_integers(run: Run) -> None:
    assert run(with_numpy_integers, nprocs=2) == [True, True]


def with_numpy_integers() -> bool:
    P = tessel.world().create_partition_inclusive(np.arange(2))
    layer = nn.AllSumReduce(P.create_cartesian_topology_partition(np.array([2, 1])), np.array([0]))
    return torch.equal(layer(torch.ones(3)), torch.full((3,), 2.0))
