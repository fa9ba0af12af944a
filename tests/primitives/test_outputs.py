"""Movements with `out`: values as without it, the same memory again, errors on all workers.

Tests `primitives/movement.py`, `primitives/slices.py`, `primitives/repartition.py`, `core/move.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from movements import MOVEMENTS, assert_close, case, me, mine
from tessel import Layout, Move, nn

Run = Callable[..., list[Any]]


def twice(name: str, size: int) -> None:
    """New values in the same memory, each time."""
    movement = case(name, size)
    out = torch.full_like(movement.layer(mine(movement.inputs())), torch.nan)
    for seed in range(2):
        inputs = movement.inputs(seed=seed)
        expected = movement.reference(inputs)[me()]
        assert movement.layer(mine(inputs), out=out) is out
        assert_close(out, expected)


@pytest.mark.parametrize("size", [5, 30_000])  # small messages, and such as are read where they lie
@pytest.mark.parametrize("nprocs", [1, 3, 4])
@pytest.mark.parametrize("name", MOVEMENTS)
def test_values_are_written_to_the_same_memory(run: Run, name: str, nprocs: int, size: int) -> None:
    run(twice, name, size, nprocs=nprocs)


def allocated(name: str) -> int:
    """Bytes that torch allocates in a call, the largest piece of memory."""
    movement = case(name, 30_000)
    x = mine(movement.inputs())
    out = movement.layer(x)
    with torch.no_grad():
        movement.layer(x, out=out)
        with torch.profiler.profile(profile_memory=True, activities=_CPU) as seen:
            movement.layer(x, out=out)
    return max((event.cpu_memory_usage for event in seen.events()), default=0)


_CPU = [torch.profiler.ProfilerActivity.CPU]


@pytest.mark.parametrize("name", MOVEMENTS)
def test_nothing_of_the_size_of_the_output_is_allocated(run: Run, name: str) -> None:
    assert max(run(allocated, name, nprocs=2)) < 1000


def allocated_without() -> int:
    movement = case("AllSumReduce", 30_000)
    x = mine(movement.inputs())
    with torch.no_grad(), torch.profiler.profile(profile_memory=True, activities=_CPU) as seen:
        movement.layer(x)
    return max(event.cpu_memory_usage for event in seen.events())


def test_a_call_without_it_allocates_its_output(run: Run) -> None:
    """The test above would see it."""
    assert min(run(allocated_without, nprocs=2)) >= 30_000 * 3 * 8


def refused(name: str) -> str:
    movement = case(name)
    x = mine(movement.inputs())
    expected = movement.layer(x)
    wrong = expected[..., :-1] if me() == 0 else expected.clone()
    try:
        movement.layer(x, out=wrong)
    except ValueError as error:
        assert_close(movement.layer(x, out=torch.empty_like(expected)), expected)
        return str(error)
    return ""


@pytest.mark.parametrize("name", MOVEMENTS)
def test_all_workers_raise_where_one_output_does_not_fit(run: Run, name: str) -> None:
    texts = run(refused, name, nprocs=3)
    assert texts[0] and texts == texts[:1] * 3
    assert "worker 0 passed an `out` of shape" in texts[0]


def one_slice() -> list[str]:
    """In a grid of 2×2, one worker of one slice passes too little."""
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    said = []
    for movement in (nn.AllSumReduce(P, [1]), nn.AllGather(P, 1, 0), nn.ReduceScatter(P, 1, 0)):
        x = torch.ones(4)
        out = torch.empty_like(movement(x))
        try:
            movement(x, out=out[1:] if P.rank == 3 else out)
        except ValueError as error:
            said.append(str(error))
    return said


def test_slices_raise_for_each_other(run: Run) -> None:
    first, *others = run(one_slice, nprocs=4)
    assert len(first) == 3 and all(each == first for each in others)
    assert all("worker 3 passed an `out`" in text for text in first)


def outside() -> bool:
    """A worker outside of both partitions has back what it passed, unchanged."""
    world = tessel.world()
    movement = nn.Broadcast(*map(world.create_partition_inclusive, ([0], [0, 1])))
    out = torch.full((3,), -1.0)
    y = movement(torch.ones(3), out=out)
    return y is out and out.tolist() == [-1.0 if me() == 2 else 1.0] * 3


def test_a_worker_outside_keeps_what_it_passed(run: Run) -> None:
    assert run(outside, nprocs=3) == [True] * 3


def compiled() -> str:
    movement = case("AllSumReduce")
    x = mine(movement.inputs())
    try:
        torch.compile(movement.layer, backend="eager")(x, out=torch.empty_like(x))
    except Exception as error:  # of the compiler's, which quotes the cause
        return str(error)
    return ""


@pytest.mark.slow
def test_compilers_are_told_that_they_cannot(run: Run) -> None:
    assert all("with `out` cannot be compiled" in said for said in run(compiled, nprocs=2))


def halo(size: int) -> tuple[Move, Layout, Layout]:
    """One row of each neighbour beside this worker's rows."""
    world = tessel.world()
    rows = Layout.split(world, (4 * world.size, size), [0, None])
    grown = rows.grow([(1, 1), (0, 0)])
    return Move(rows, grown), rows, grown


def interior(y: Tensor, rows: Layout, grown: Layout) -> Tensor:
    (start, stop), (first, _) = rows.box()[0], grown.box()[0]  # type: ignore[index]
    return y[start - first : stop - first]


def again_and_again(size: int) -> None:
    """A halo into one tensor, in place and from elsewhere, in turns and in every kind of memory."""
    move, rows, grown = halo(size)
    shape = grown.local_shape
    wide = torch.zeros(shape[0], 2 * size, dtype=torch.float64)
    spare = torch.zeros(2 * shape[0] * size + 7, dtype=torch.float64)
    shifted = spare[7 : 7 + shape[0] * size].view(shape)  # inputs that it overlaps, not in place
    outs = {
        "contiguous": torch.zeros(shape, dtype=torch.float64),
        "columns": wide[:, ::2],
        "transposed": torch.zeros(shape[::-1], dtype=torch.float64).T,
        "shifted": shifted,
    }
    for turn in range(3):
        for name, out in outs.items():
            for kind in ("in place", "elsewhere", "overlapping", "float32", "gradient", "in place"):
                whole = torch.arange(4.0 * tessel.world().size * size, dtype=torch.float64)
                whole = (whole + 100 * turn).view(-1, size)
                own, expected = rows.local_part(whole), grown.local_part(whole)
                y, x = out, own.clone()
                if kind == "in place":
                    y.zero_()
                    x = interior(y, rows, grown).copy_(own)
                elif kind == "overlapping":
                    if name != "shifted":
                        continue
                    x = spare[: own.numel()].view(own.shape).copy_(own)
                elif kind == "float32":
                    y, x, expected = torch.zeros(shape), x.float(), expected.float()
                elif kind == "gradient":
                    with pytest.raises(ValueError, match="automatic differentiation"):
                        move.apply(x.requires_grad_(), out=y)
                    continue
                version = y._version
                assert move.apply(x, out=y) is y
                assert y._version > version
                assert torch.equal(y, expected), (turn, name, kind)
    with pytest.raises(ValueError, match="expected"):
        move.apply(rows.local_part(whole)[:1], out=outs["contiguous"])


@pytest.mark.parametrize("size", [3, 3000])
@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_moves_that_are_made_again_into_a_tensor(run: Run, nprocs: int, size: int) -> None:
    run(again_and_again, size, nprocs=nprocs)


def copied() -> None:
    """Copies of a move that knows how tensors lie."""
    move, rows, grown = halo(5)
    out = torch.zeros(grown.local_shape)
    for each in (move, copy.copy(move), copy.deepcopy(move), pickle.loads(pickle.dumps(move))):
        for _ in range(2):
            each.apply(torch.ones(rows.local_shape), out=out.zero_())
            assert torch.equal(out, torch.ones(grown.local_shape))


def test_copies_of_such_moves(run: Run) -> None:
    run(copied, nprocs=2)
