"""Worlds and partitions: any workers, in any order, active or not.

Tests `core/partition.py`, `transport/mesh.py`.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tessel
from registry import MAKERS, WORLDS, Case
from scripts import python
from tessel import Layout, Partition

# The world.


def describe(P: Partition) -> tuple[Any, ...]:
    return P.ranks, P.shape, P.size, P.dim, P.active, P.rank, P.index


def describe_world() -> tuple[Any, ...]:
    return (*describe(tessel.world()), dist.is_initialized())


@pytest.mark.parametrize("nprocs", WORLDS)
def test_world(run: Any, nprocs: int) -> None:
    ranks = tuple(range(nprocs))
    for rank, found in enumerate(run(describe_world, nprocs=nprocs)):
        assert found == (ranks, (nprocs,), nprocs, 1, True, rank, (rank,), nprocs > 1)


def clean_environment() -> dict[str, str]:
    """That of a plain shell: no launcher has told the process who it is."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }


ALONE = """
import numpy as np, torch, tessel
import torch.distributed as dist

P = tessel.world()
assert (P.size, P.ranks, P.rank, P.index, P.active) == (1, (0,), 0, (0,), True)
grid = P.create_partition_inclusive(np.arange(1)).create_cartesian_topology_partition([1, 1])
union = grid.create_partition_union(P)
assert union == P
x = torch.arange(6, dtype=torch.float64).reshape(2, 3).requires_grad_()
layers = [
    tessel.nn.Broadcast(P, grid), tessel.nn.SumReduce(grid, P), tessel.nn.AllSumReduce(P, [0]),
    tessel.nn.AllGather(grid, 1, 0), tessel.nn.ReduceScatter(grid, 0, 1),
    tessel.nn.Repartition(grid, grid), tessel.nn.HaloExchange(grid, [(1, 2), (0, 1)]),
    lambda x: tessel.scatter(x, grid), lambda x: tessel.gather(x, grid),
    lambda x: tessel.all_gather(x, grid),
    tessel.Move(tessel.Layout.balanced(grid, (2, 3)), tessel.Layout.whole(P, (2, 3), shared=True)),
]
for layer in layers:
    y = layer(x)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr(), layer
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(grad, 2 * x), layer
assert not dist.is_initialized()
print("all is well")
"""


def test_plain_process_is_a_world_of_one(tmp_path: Path) -> None:
    """Everything works there, without a process group."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = python(script, env=clean_environment())
    assert done.stdout == "all is well\n", done.stderr


UNDER_TORCHRUN = """
import os, torch, tessel
import torch.distributed as dist

assert not dist.is_initialized()
P = tessel.world()
assert dist.is_initialized() and P == tessel.world()
assert (P.rank, P.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
y = tessel.nn.AllSumReduce(P, [0])(torch.tensor([1.0 + P.rank]))
x = tessel.scatter(torch.arange(3.0) if P.rank == 0 else tessel.zero_volume_tensor(), P)
print(f"{P.rank} of {P.size}: {y.tolist()} {x.tolist()}")
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """The world joins the job that the environment describes."""
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script
    done = python(*command, env=clean_environment() | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "0 of 2: [3.0] [0.0, 1.0]" in done.stdout
    assert "1 of 2: [3.0] [2.0]" in done.stdout


# Making partitions.


def make_partitions() -> dict[str, Any]:
    world = tessel.world()
    odd = world.create_partition_inclusive([3, 1])
    again = odd.create_partition_inclusive([1])
    grid = world.create_partition_inclusive(np.array([5, 0, 3, 2, 1, 4]))
    grid = grid.create_cartesian_topology_partition(np.array([2, 3]))
    union = odd.create_partition_union(world.create_partition_inclusive([0, 3, 4]))
    single = world.create_partition_inclusive([2]).create_cartesian_topology_partition([])
    return {
        "odd": describe(odd),
        "places count in the partition": describe(again),
        "grid": describe(grid),
        "union": describe(union),
        "single": describe(single),
    }


def test_any_workers_in_any_order(run: Any) -> None:
    order = [5, 0, 3, 2, 1, 4]
    for me, found in enumerate(run(make_partitions, nprocs=6)):
        place = {3: 0, 1: 1}.get(me)
        index = None if place is None else (place,)
        assert found["odd"] == ((3, 1), (2,), 2, 1, place is not None, place, index)
        assert found["places count in the partition"][0] == (1,)
        at = order.index(me)
        assert found["grid"] == (tuple(order), (2, 3), 6, 2, True, at, divmod(at, 3))
        assert found["union"][:2] == ((3, 1, 0, 4), (4,))
        assert found["single"][:5] == ((2,), (), 1, 0, me == 2)
        assert found["single"][6] == (() if me == 2 else None)


def use_inactive() -> list[Any]:
    """On a partition of other workers every method works, and gives the same as on its own."""
    world = tessel.world()
    P = world.create_partition_inclusive([3, 1]).create_cartesian_topology_partition([2, 1])
    layout = Layout.balanced(P, (3, 2))
    results = [
        P.ranks, P.shape, P.dim, P.size, repr(P), hash(P), P.axes([-1, 0]), P.rows([0]),
        [Q.ranks for Q in P.slices([1])], P.worker_at((1, 0)), P.coordinates(1), P.coordinates(0),
        P.create_partition_inclusive([1]).ranks, P.create_partition_union(world).ranks,
        P.create_cartesian_topology_partition([1, 2]).shape, pickle.loads(pickle.dumps(P)) == P,
        layout.box(3), layout.box(0), layout.shape_on(1), layout == Layout.balanced(P, (3, 2)),
    ]  # fmt: skip
    mine = [P.active, P.rank, P.index, layout.local_shape, layout.box()]
    x = torch.ones(layout.local_shape)
    mine += [layout.inner(x, x).item(), layout.local_part(torch.ones(3, 2)).shape]
    return [results, mine]


def test_inactive_partitions(run: Any) -> None:
    everyones, mine = zip(*run(use_inactive, nprocs=4), strict=True)
    assert all(found == everyones[0] for found in everyones)
    assert everyones[0][:4] == [(3, 1), (2, 1), 2, 2]
    assert everyones[0][9:14] == [1, (1, 0), None, (1,), (3, 1, 0, 2)]
    for me in (0, 2):
        assert mine[me] == [False, None, None, (0,), None, 0.0, (0,)]
    assert mine[3] == [True, 0, (0, 0), (2, 2), ((0, 2), (0, 2)), 6.0, (2, 2)]
    assert mine[1] == [True, 1, (1, 0), (1, 2), ((2, 3), (0, 2)), 6.0, (1, 2)]


def compare() -> list[bool]:
    world = tessel.world()
    P, Q = world.create_partition_inclusive([0, 1]), world.create_partition_inclusive([1, 0])
    grid = P.create_cartesian_topology_partition([2, 1])
    return [
        world.create_partition_inclusive([0, 1]) == P,
        hash(P) == hash(world.create_partition_inclusive([0, 1])),
        len({P, Q, grid, Partition((0, 1), (2,))}) == 3,
        P != Q,
        grid != P,
        Q.group is P.group,  # the same workers talk through the same group
        world.create_partition_union(P) == world,
        P.create_partition_union(Q) == P,
    ]


def test_partitions_compare_by_workers_and_grid(run: Any) -> None:
    assert all(all(found) for found in run(compare, nprocs=3))


def change_partition() -> None:
    with pytest.raises(FrozenInstanceError):
        tessel.world().ranks = (0,)  # type: ignore[misc]


def test_partitions_are_frozen(run: Any) -> None:
    run(change_partition, nprocs=1)


def grid_methods(ranks: list[int], shape: list[int]) -> list[Any]:
    P = tessel.world().create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)
    return [
        [P.rows(axes), [(Q.ranks, Q.shape) for Q in P.slices(axes)]] for axes in ([], [0], [2, 0])
    ]


def test_rows_and_slices(run: Any) -> None:
    """Row by row, each in the order of the grid."""
    ranks = [7, 6, 5, 4, 3, 2, 1, 0]
    for found in run(grid_methods, ranks, [2, 2, 2], nprocs=8):
        (none, _), (first, slices), (two, deep) = found
        assert none == tuple((rank,) for rank in ranks)
        assert first == ((7, 3), (6, 2), (5, 1), (4, 0))
        assert slices == [(row, (2,)) for row in first]
        assert two == ((7, 6, 3, 2), (5, 4, 1, 0))
        assert deep == [(row, (2, 2)) for row in two]


# Mistakes.

MISTAKES = {
    "named twice": (lambda P: P.create_partition_inclusive([0, 1, 0]), "only once"),
    "rank too large": (lambda P: P.create_partition_inclusive([0, 3]), "rank 3 is out of range"),
    "rank below zero": (lambda P: P.create_partition_inclusive([-1]), "rank -1 is out of range"),
    "worker too large": (lambda P: Partition((0, 3), (2,)), "there are 3 workers"),
    "no workers": (lambda P: P.create_partition_inclusive([]), "at least one worker"),
    "too few": (lambda P: P.create_cartesian_topology_partition([2, 2]), "needs 4 workers, got 3"),
    "too many": (lambda P: P.create_cartesian_topology_partition([2]), "needs 2 workers, got 3"),
    "zero": (lambda P: P.create_cartesian_topology_partition([0, 3]), "at least one worker"),
    "below zero": (lambda P: P.create_cartesian_topology_partition([-1, -3]), "at least one"),
    "axis too large": (lambda P: tessel.nn.AllSumReduce(P, [1]), "axis 1 is out of range"),
    "axis too small": (lambda P: tessel.nn.AllSumReduce(P, [-2]), "axis -2 is out of range"),
    "axis twice": (lambda P: tessel.nn.AllSumReduce(P, [0, -1]), "named twice"),
    "gather axis": (lambda P: tessel.nn.AllGather(P, 2, 0), "axis 2 is out of range"),
}


def make_mistakes() -> dict[str, str]:
    texts = {}
    for name, (mistake, _) in MISTAKES.items():
        try:
            mistake(tessel.world())
            texts[name] = "no error"
        except ValueError as error:
            texts[name] = str(error)
    tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(1))  # and all goes on
    return texts


def test_mistakes_raise_everywhere(run: Any) -> None:
    """The same text on every worker, and the world is as good as before."""
    first, *others = run(make_mistakes, nprocs=3)
    assert all(texts == first for texts in others)
    for name, (_, words) in MISTAKES.items():
        assert words in first[name], f"{name}: {first[name]}"


def number_without_meaning() -> None:
    with pytest.raises(TypeError):
        tessel.world().create_partition_inclusive([0.5])
    with pytest.raises(TypeError):
        tessel.world().create_cartesian_topology_partition([1.0])


def test_only_integers_are_ranks(run: Any) -> None:
    run(number_without_meaning, nprocs=1)


# Groups are kept.


def count_new_groups() -> list[int]:
    """How many groups are made at first, and how many for the same workers again."""
    world, made, counts = tessel.world(), [], []
    new_group = dist.new_group
    dist.new_group = lambda *args, **kwargs: (made.append(args), new_group(*args, **kwargs))[1]
    try:
        for _ in range(3):
            P = world.create_partition_inclusive([3, 1, 0])
            world.create_partition_inclusive([0, 1, 3]).create_cartesian_topology_partition([3, 1])
            world.create_partition_inclusive([2])
            tessel.nn.Broadcast(world.create_partition_inclusive([1]), P)(torch.ones(2))
            layer = tessel.nn.AllSumReduce(world.create_cartesian_topology_partition([2, 2]), [0])
            copy.deepcopy(layer)(torch.ones(2))
            Layout.balanced(P, (4,))
            counts.append(len(made))
    finally:
        dist.new_group = new_group
    return counts


def test_groups_are_made_once(run: Any, pool: Any) -> None:
    run(describe_world, nprocs=2)  # so that the world of four below is a new one
    for first, second, third in run(count_new_groups, nprocs=4):
        assert first == second == third == 3  # {0, 1, 3} and the two columns of the 2×2 grid


# Copies.


def copies_of(item: Any) -> Iterator[Any]:
    yield copy.copy(item)
    yield copy.deepcopy(item)
    yield pickle.loads(pickle.dumps(item))


def copied_values() -> list[bool]:
    """Partitions, layouts and moves are equal to their copies, before and after use."""
    world = tessel.world()
    P = world.create_partition_inclusive([2, 0]).create_cartesian_topology_partition([1, 2])
    layout = Layout.balanced(P, (3, 5))
    move = tessel.Move(layout, Layout.whole(P, (3, 5), shared=True).grow([(0, 0), (0, 0)]))
    product = move.H @ move
    x = layout.local_part(torch.arange(15.0).reshape(3, 5)).clone()
    found = []
    for _ in range(2):
        for item in (P, layout, move, product):
            found += [twin == item and hash(twin) == hash(item) for twin in copies_of(item)]
        for operator in (move, product):
            expected = operator(x)
            found += [torch.equal(twin(x), expected) for twin in copies_of(operator)]
            found += [
                torch.equal(twin.H(expected), operator.H(expected)) for twin in copies_of(operator)
            ]
    return found


def test_copies_of_partitions_layouts_and_moves(run: Any) -> None:
    assert all(all(found) for found in run(copied_values, nprocs=3))


def copied_modules() -> list[str]:
    """The names of all layers whose copies do something else."""
    world, wrong = tessel.world(), []
    names = ("broadcast", "sum_reduce", "all_sum_reduce", "all_gather", "reduce_scatter")
    for name in (*names, "repartition", "halo_exchange"):
        case: Case = next(iter(MAKERS[name](world.size)))
        layer, x = case.build(), case.input_of(world.rank)
        before = [*copies_of(layer)]
        expected = layer(x)
        model = torch.nn.Sequential(layer)
        for twin in (*before, *copies_of(layer), *copies_of(model)):
            y = twin(x.clone().requires_grad_())
            y.sum().backward()
            if not torch.equal(y, expected) or repr(twin).count("Partition") == 0:
                wrong.append(name)
    return wrong


@pytest.mark.parametrize("nprocs", [1, 4])
def test_copies_of_modules(run: Any, nprocs: int) -> None:
    assert run(copied_modules, nprocs=nprocs) == [[]] * nprocs


def unpickle_and_use(payload: bytes) -> list[float]:
    layer = pickle.loads(payload)
    return layer(torch.ones(1)).tolist()


def pickled_layer() -> bytes:
    world = tessel.world()
    return pickle.dumps(tessel.nn.AllSumReduce(world.create_partition_inclusive([2, 0]), [0]))


def test_modules_travel_to_another_job(run: Any) -> None:
    """The groups are made there, when the layer is first used, on all workers."""
    payload = run(pickled_layer, nprocs=3)[0]
    run(describe_world, nprocs=2)
    assert run(unpickle_and_use, payload, nprocs=3) == [[2.0], [1.0], [2.0]]


# Scatter, gather, all-gather.


def spread_and_collect(ranks: list[int], shape: list[int]) -> list[Any]:
    world = tessel.world()
    P = world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)
    whole = torch.arange(35, dtype=torch.float64).reshape(7, 5)
    first = world.rank == ranks[0]
    x = whole.clone().requires_grad_() if first else tessel.zero_volume_tensor()
    part = tessel.scatter(x, P)
    back = tessel.gather(part * part, P)
    if back.requires_grad:
        (back.sum() * 0.5).backward()
    found = [part.shape, back.shape, back.dtype if P.active else torch.float64]
    if first:
        found += [torch.equal(back, whole * whole), torch.equal(x.grad, whole)]
    mine = part.detach().requires_grad_()
    everywhere = tessel.all_gather(mine, P)
    if P.active:
        (everywhere * (1 + P.rank)).sum().backward()
        total = P.size * (P.size + 1) // 2
        found += [torch.equal(everywhere, whole), bool((mine.grad == total).all())]
    return found


@pytest.mark.parametrize(
    ("ranks", "shape"), [([2, 0, 3, 1], [2, 2]), ([3, 1], [2, 1]), ([1], [1, 1])]
)
def test_scatter_gather_and_all_gather(run: Any, ranks: list[int], shape: list[int]) -> None:
    results = run(spread_and_collect, ranks, shape, nprocs=4)
    rows, columns = (
        [len(part) for part in torch.arange(n).tensor_split(p)]
        for n, p in zip((7, 5), shape, strict=True)
    )
    expected = dict(zip(ranks, product(rows, columns), strict=True))
    for me, (part, back, dtype, *right) in enumerate(results):
        assert part == expected.get(me, (0,))
        assert back == ((7, 5) if me == ranks[0] else (0,))
        assert dtype is torch.float64
        assert all(right)
        assert len(right) == (me in ranks) * 2 + (me == ranks[0]) * 2
