"""Facts: known cases in plain numbers, every dtype, every kind of view.

Tests `core/move.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tessel
from registry import (
    MAKERS,
    Case,
    Grid,
    all_gather_all_case,
    all_gather_case,
    all_sum_reduce_case,
    broadcast_case,
    even,
    gather_case,
    halo_case,
    random,
    reduce_scatter_case,
    repartition_case,
    row,
    same_shape,
    scatter_case,
    sum_reduce_case,
    uneven,
)
from tessel.nn import (
    AllGather,
    AllSumReduce,
    Broadcast,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from test_laws import assert_laws

# Cases that other libraries of this kind are known by.


def peer_cases(n: int) -> Iterator[Case]:
    block, twelve = Grid(range(4, 8), (2, 2, 1)), Grid(range(12), (2, 2, 3))
    few, three = Grid([4], (1,)), Grid(range(3), (1, 1, 3))
    pair, square = Grid([1, 2], (1, 2)), Grid(range(4), (2, 2))
    for name, X, Y in (
        ("2x2x1 on 4..7, 2x2x3 on 0..11", block, twelve),
        ("1 on 4, 1x1x3 on 0..2", few, three),
        ("1x2 on 1, 2, 2x2 on 0..3", pair, square),
    ):
        yield broadcast_case(name, X, Y, same_shape(X, (1, 7, 5)))
        yield sum_reduce_case(name, Y, X, same_shape(X, (1, 7, 5)))
    column, grid, shape = Grid(range(4, 8), (4, 1)), Grid(range(12), (3, 4)), (77, 55)
    yield repartition_case("4x1 on 4..7, 3x4", column, grid, even(shape, (4, 1)))
    yield repartition_case("4x1 on 4..7, 3x4, uneven", column, grid, uneven(shape, (4, 1)))
    yield repartition_case("3x4, 4x1 on 4..7", grid, column, even(shape, (3, 4)))
    yield repartition_case("identity 3x4", grid, grid, even(shape, (3, 4)))
    yield repartition_case("identity 3x4, uneven", grid, grid, uneven(shape, (3, 4)))
    for axes in (axes for count in range(4) for axes in combinations(range(3), count)):
        shapes = same_shape(twelve, (1, 7, 5))
        yield all_sum_reduce_case(f"2x2x3 over {axes}", twelve, axes, shapes)


def wide_peer_cases(n: int) -> Iterator[Case]:
    block, twelve = Grid(range(4), (2, 2, 1)), Grid(range(4, 16), (2, 2, 3))
    yield broadcast_case(
        "2x2x1 on 0..3, 2x2x3 on 4..15", block, twelve, same_shape(block, (1, 7, 5))
    )
    yield sum_reduce_case("2x2x3 on 4..15, 2x2x1", twelve, block, same_shape(block, (1, 7, 5)))
    one, grid = Grid([0], (1, 1)), Grid(range(2, 14), (3, 4))
    yield repartition_case("1x1 on 0, 3x4 on 2..13", one, grid, [[77], [55]])
    yield repartition_case("3x4 on 2..13, 1x1 on 0", grid, one, even((77, 55), (3, 4)))
    yield repartition_case("3x4 uneven, 1x1 on 0", grid, one, uneven((77, 55), (3, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [12])
def test_peer_cases(run: Any, nprocs: int) -> None:
    assert_laws(run, peer_cases, nprocs, torch.float64, nprocs)


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [16])
def test_peer_cases_on_sixteen_workers(run: Any, nprocs: int) -> None:
    assert_laws(run, wide_peer_cases, nprocs, torch.float64, nprocs)


def documented_all_sum_reduce() -> tuple[Tensor, Tensor]:
    P_world = tessel.world()
    P_x_base = P_world.create_partition_inclusive(np.arange(0, 12))
    P_x = P_x_base.create_cartesian_topology_partition([2, 2, 3])

    x_local_shape = np.array([7, 5])

    reduce_dims = (1, 2)
    layer = AllSumReduce(P_x, reduce_dims)

    x = tessel.zero_volume_tensor()
    if P_x.active:
        x = torch.rand(*x_local_shape)

    y = layer(x)
    return x, y


@pytest.mark.parametrize("nprocs", [12])
def test_documented_all_sum_reduce(run: Any, nprocs: int) -> None:
    """Each part of y is the sum of the parts of x from six workers."""
    x, y = zip(*run(documented_all_sum_reduce, nprocs=nprocs), strict=True)
    for worker in range(12):
        first = 0 if worker < 6 else 6
        torch.testing.assert_close(y[worker], sum(x[first : first + 6]))


def broadcast_of_ranks() -> tuple[Any, ...]:
    world = tessel.world()
    P_x = world.create_partition_inclusive([2, 0]).create_cartesian_topology_partition([2, 1])
    P_y = world.create_partition_inclusive([3, 2, 1, 0]).create_cartesian_topology_partition([2, 2])
    mine = torch.tensor([float(world.rank)], requires_grad=True)
    y = Broadcast(P_x, P_y)(mine if P_x.active else tessel.zero_volume_tensor())
    (y * (10.0**world.rank)).sum().backward()
    back = SumReduce(P_y, P_x)(y.detach())
    return y.tolist(), mine.grad.tolist() if P_x.active else None, back.tolist()


def test_broadcast_in_numbers(run: Any) -> None:
    """Workers 2 and 0 give; 3, 2 get the first's and 1, 0 the second's tensor."""
    values, grads, sums = zip(*run(broadcast_of_ranks, nprocs=4), strict=True)
    assert values == ([0.0], [0.0], [2.0], [2.0])
    assert grads == ([11.0], None, [1100.0], None)
    assert sums == ([0.0], [], [4.0], [])


def repartition_in_numbers() -> tuple[Any, ...]:
    world = tessel.world()
    whole = torch.arange(10).reshape(2, 5)
    P = world.create_cartesian_topology_partition([3, 1])
    x = whole if world.rank == 0 else tessel.zero_volume_tensor(dtype=torch.int64)
    y = tessel.scatter(x, P)
    back = tessel.gather(y, P)
    everywhere = tessel.all_gather(y, P)
    same = Repartition(P, P)(y)
    return y.tolist(), tuple(y.shape), tuple(back.shape), everywhere.tolist(), same.equal(y)


def test_repartition_in_numbers(run: Any) -> None:
    """(2, 5) onto three rows of workers leaves the last one empty."""
    rows, shapes, gathered, whole, same = zip(*run(repartition_in_numbers, nprocs=3), strict=True)
    assert rows == ([[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]], [])
    assert shapes == ((1, 5), (1, 5), (0, 5))
    assert gathered == ((2, 5), (0,), (0,))
    assert whole == ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],) * 3
    assert same == (True,) * 3


def halo_in_numbers() -> tuple[Any, ...]:
    world = tessel.world()
    lengths = [2, 1, 0, 3]
    start = sum(lengths[: world.rank])
    x = torch.arange(start, start + lengths[world.rank], dtype=torch.float64, requires_grad=True)
    y = HaloExchange(world, [(3, 1)])(x)
    y.sum().backward()
    return y.tolist(), x.grad.tolist()


def test_halo_in_numbers(run: Any) -> None:
    """Three to the left and one to the right, past short and empty neighbours."""
    values, grads = zip(*run(halo_in_numbers, nprocs=4), strict=True)
    assert values == ([0, 1, 2], [0, 1, 2, 3], [], [0, 1, 2, 3, 4, 5])
    assert grads == ([3, 3], [3], [], [2, 1, 1])


def reductions_in_numbers() -> tuple[Any, ...]:
    world = tessel.world()
    P = world.create_cartesian_topology_partition([1, 3])
    x = torch.tensor([1, 2, 3, 4]) * 10**world.rank
    part = ReduceScatter(P, 1, 0)(x)
    return part.tolist(), AllGather(P, 1, 0)(part).tolist(), AllSumReduce(P, [1])(x).tolist()


def test_reductions_in_numbers(run: Any) -> None:
    parts, wholes, sums = zip(*run(reductions_in_numbers, nprocs=3), strict=True)
    assert parts == ([111, 222], [333], [444])
    assert wholes == sums == ([111, 222, 333, 444],) * 3


# Every dtype.

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]


def copying_cases(n: int) -> Iterator[Case]:
    P, some = row(range(n)), row(range(n - 1, 0, -1))
    yield broadcast_case("", row([n - 1]), P, {n - 1: (2, 3)})
    yield broadcast_case("elsewhere", row([0]), some, {0: (2, 3)})
    yield all_gather_case("", P, 0, 1, {rank: (2, rank) for rank in P.ranks})
    yield repartition_case("", row([n - 1]), some, [[7]])
    yield repartition_case("spread", some, P, even((7,), some.shape))
    yield halo_case("", P, [(2, 1)], even((7,), P.shape))
    yield scatter_case("", some, (5,))
    yield gather_case("", some, even((5,), some.shape))
    yield all_gather_all_case("", P, [[3, *[1] * (n - 1)]])


def summing_cases(n: int) -> Iterator[Case]:
    P, some = row(range(n)), row(range(n - 1, 0, -1))
    yield sum_reduce_case("", P, row([n - 1]), {n - 1: (2, 3)})
    yield all_sum_reduce_case("", P, (0,), same_shape(P, (2, 3)))
    yield all_sum_reduce_case("some", some, (0,), same_shape(some, (4,)))
    yield reduce_scatter_case("", P, 0, 0, same_shape(P, (5, 2)))


def small_integers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Values that every dtype holds exactly, and their sums too."""
    return x.mul(2).round().abs().clamp(max=9).to(dtype)


def apply_all(make: Callable[[int], Iterator[Case]], dtype: torch.dtype) -> list[list[Tensor]]:
    """Everybody's output and, where there is one, gradient, in every case."""
    results, world = [], tessel.world()
    for case in make(world.size):
        x = case.input_of(world.rank)
        if world.rank in case.shapes:
            x = small_integers(x, dtype)
        differentiable = dtype.is_floating_point or dtype.is_complex
        y = case.build()(x.requires_grad_(differentiable))
        # torch cannot pickle the larger unsigned integers
        result = [y.detach() if y.dtype not in UNSIGNED else y.to(torch.int64)]
        if world.rank in case.shapes and differentiable:
            (grad,) = torch.autograd.grad(y.real.sum(), x)
            result.append(grad)
        elif differentiable:
            y.real.sum().backward()
        results.append(result)
    return results


def assert_dtype(run: Any, make: Callable[[int], Iterator[Case]], dtype: torch.dtype) -> None:
    everyones = run(apply_all, make, dtype, nprocs=4)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    for case, *results in zip(make(4), *everyones, strict=True):
        inputs = {w: small_integers(x, exact) for w, x in case.inputs().items()}
        outputs = case.outputs(inputs)
        leaves = {w: x.clone().requires_grad_() for w, x in inputs.items()}
        grads = case.gradients(leaves, lambda _, y: y.real.sum())
        for worker, (y, *grad) in enumerate(results):
            label = f"{case.name} {dtype} on worker {worker}"
            _assert_same(y, outputs.get(worker), dtype, label, worker in case.members)
            if grad:
                _assert_same(grad[0], grads[worker].detach(), dtype, f"gradient of {label}")


def _assert_same(
    got: Tensor, expected: Tensor | None, dtype: torch.dtype, label: str, member: bool = True
) -> None:
    if not member:
        assert got.shape == (0,), label
        return
    assert got.dtype is (torch.int64 if dtype in UNSIGNED else dtype), label
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.empty(0, dtype=wide) if expected is None else expected
    if dtype is torch.bool:
        expected = expected.bool().to(wide)
    assert torch.equal(got.to(wide), expected), f"{label}: {got} instead of {expected}"


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *INTEGERS, *UNSIGNED, torch.bool], ids=str)
def test_copies_of_every_dtype(run: Any, dtype: torch.dtype) -> None:
    assert_dtype(run, copying_cases, dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *INTEGERS], ids=str)
def test_sums_of_every_dtype(run: Any, dtype: torch.dtype) -> None:
    assert_dtype(run, summing_cases, dtype)


def sum_truth_values() -> list[str | None]:
    world = tessel.world()
    layout, copies = tessel.Layout.balanced(world, (4,)), tessel.Layout.whole(world, (4,))
    layers = [case.build() for case in summing_cases(world.size)]
    return [_error(layer) for layer in [*layers, tessel.Move(copies, layout)]]


def _error(layer: Any) -> str | None:
    try:
        layer(torch.ones(4, dtype=torch.bool))
    except ValueError as error:
        return str(error)
    return None


def test_truth_values_cannot_be_summed(run: Any) -> None:
    """All who take part raise, with the same text."""
    first, *others = run(sum_truth_values, nprocs=3)
    for k, texts in enumerate(zip(*others, strict=True)):
        assert len(set(texts)) == 1 and texts[0] is not None and "bool" in texts[0]
        assert first[k] == (None if k == 2 else texts[0])  # worker 0 is not among some of them


# Every kind of view, as input and as gradient.


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x


def strided(x: Tensor) -> Tensor:
    if not x.dim():
        return x
    room = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), 9, dtype=x.dtype)
    room[..., 3::2] = x
    return room[..., 3::2]


def expanded(x: Tensor) -> Tensor:
    """One value at stride 0."""
    if not x.numel():
        return x
    return x.reshape(-1)[0].expand(x.shape)


def expanded_rows(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if x.dim() and x.numel() else x


def conjugate(x: Tensor) -> Tensor:
    return x.conj() if x.is_complex() else x


def negative(x: Tensor) -> Tensor:
    """Minus the values, which are negated when they are read."""
    return torch._neg_view(x)


VIEWS = [transposed, strided, expanded, expanded_rows, conjugate, negative]


def viewed_cases(n: int) -> Iterator[Case]:
    P, column = Grid(range(n), (1, n)), Grid(range(n), (n, 1))
    yield from copying_cases(n)
    yield from summing_cases(n)
    yield repartition_case("columns, rows", P, column, even((5, 7), P.shape))
    yield repartition_case("identity", P, P, even((5, 7), P.shape))
    yield halo_case("columns", P, [(0, 0), (1, 1)], even((5, 7), P.shape))
    yield all_gather_case("last dim", P, 1, 1, same_shape(P, (3, 2)))
    yield all_sum_reduce_case("no axes", P, (), same_shape(P, (3, 2)))
    yield all_sum_reduce_case("0-dim", P, (1,), same_shape(P, ()))


def apply_to_view(view: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Any]:
    results, world = [], tessel.world()
    for case in viewed_cases(world.size):
        layer = case.build()
        x = case.input_of(world.rank, dtype).requires_grad_()
        before = view(x)
        keep = before.detach().clone()
        y = layer(before)
        if world.rank not in case.members:
            results.append(None)
            continue
        weight = random(y.shape, y.dtype, 5 + world.rank)
        (grad,) = torch.autograd.grad(y, before, view(weight))
        unchanged = torch.equal(before, keep)
        results.append([y.detach().resolve_conj(), grad.resolve_conj(), unchanged])
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_as_input_and_gradient(run: Any, view: Any, dtype: torch.dtype) -> None:
    everyones = run(apply_to_view, view, dtype, nprocs=3)
    for case, *results in zip(viewed_cases(3), *everyones, strict=True):
        inputs = {w: view(x).clone() for w, x in case.inputs(dtype).items()}
        outputs = case.outputs(inputs)
        weights = {w: view(random(y.shape, dtype, 5 + w)).clone() for w, y in outputs.items()}
        leaves = {w: x.requires_grad_() for w, x in inputs.items()}
        grads = case.gradients(leaves, lambda w, y, g=weights: (y.conj() * g[w]).real.sum())
        for worker in case.members:
            y, grad, unchanged = results[worker]
            label = f"{case.name}, {view.__name__} on worker {worker}"
            assert unchanged, label
            if worker in outputs:
                torch.testing.assert_close(y, outputs[worker].detach(), rtol=1e-12, atol=1e-12)
            if worker in grads:
                torch.testing.assert_close(grad, grads[worker].detach(), rtol=1e-12, atol=1e-12)


# Who takes part, and who does not.


def apply_outside() -> list[Any]:
    """Worker 3 is in no partition, 2 only gives, 0 and 1 only take."""
    world = tessel.world()
    layer = Repartition(
        world.create_partition_inclusive([2]), world.create_partition_inclusive([0, 1])
    )
    x = torch.arange(4, dtype=torch.float64, requires_grad=True)
    y = layer(x if world.rank in (2, 3) else tessel.zero_volume_tensor())
    y.sum().backward()
    grad = None if x.grad is None else x.grad.tolist()
    return [y.tolist(), y.dtype, tuple(y.shape), y is x, y.data_ptr() == x.data_ptr(), grad]


def test_workers_outside(run: Any) -> None:
    results = run(apply_outside, nprocs=4)
    assert results[0][:3] == [[0.0, 1.0], torch.float64, (2,)]
    assert results[1][:3] == [[2.0, 3.0], torch.float64, (2,)]
    assert results[2][:3] == [[], torch.float64, (0,)]
    assert results[3] == [[0.0, 1.0, 2.0, 3.0], torch.float64, (4,), False, False, [1.0] * 4]
    assert results[2][5] == [1.0] * 4


def placeholders(dtype: torch.dtype) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Workers 1 and 2 have nothing to give, and say so with a tensor of any dtype and shape."""
    world = tessel.world()
    P = world.create_partition_inclusive([0])
    empty = torch.empty(0, 3, dtype=torch.int8 if world.rank == 1 else torch.complex64)
    results = []
    for layer in (Repartition(P, P), Broadcast(P, world), Repartition(P, world)):
        y = layer(torch.ones(3, dtype=dtype) if P.active else empty)
        results.append((y.dtype, tuple(y.shape)))
    return results


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.bool], ids=str)
def test_placeholders_take_the_dtype_of_the_data(run: Any, dtype: torch.dtype) -> None:
    first, *others = run(placeholders, dtype, nprocs=3)
    assert first == [(dtype, (3,)), (dtype, (3,)), (dtype, (1,))]
    for own, other in zip(others, (torch.int8, torch.complex64), strict=True):
        assert own == [(other, (0, 3)), (dtype, (3,)), (dtype, (1,))]


def clone_over_no_axes() -> list[bool]:
    world = tessel.world()
    P = world.create_cartesian_topology_partition([1, world.size])
    x = torch.ones(3)
    y = AllSumReduce(P, [])(x)
    z = AllSumReduce(P, [0])(x)  # one worker along this axis
    y += 1
    return [
        torch.equal(x, torch.ones(3)),
        y.data_ptr() != x.data_ptr(),
        z.data_ptr() != x.data_ptr(),
    ]


@pytest.mark.parametrize("nprocs", [1, 2])
def test_sum_over_no_axes_is_a_clone(run: Any, nprocs: int) -> None:
    assert all(all(promises) for promises in run(clone_over_no_axes, nprocs=nprocs))


def twice_backward(maker: str) -> int:
    """The same layer in one graph several times: gradients add up as in one process."""
    world, count = tessel.world(), 0
    for case in MAKERS[maker](world.size):
        layer = case.build()
        if world.rank not in case.members:
            continue
        x = case.input_of(world.rank).requires_grad_()
        y = layer(x) + 2 * layer(3 * x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        (once,) = torch.autograd.grad(layer(x).sum(), x)
        torch.testing.assert_close(grad, 7 * once, rtol=1e-12, atol=1e-12)
        count += 1
    return count


@pytest.mark.parametrize("maker", ["broadcast", "repartition", "halo_exchange"])
def test_layers_used_again_in_one_graph(run: Any, maker: str) -> None:
    assert min(run(twice_backward, maker, nprocs=3)) > 5
