"""Random movements between random workers, of tensors of random shapes: every law holds.

Cases are drawn here, many at a time, and sent to the workers; the draws are the same in every run.
A failure names its case, which can be built again from its name.

Tests `core/move.py`, `core/plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from covering import repeats
from registry import (
    KINDS,
    Case,
    Grid,
    Side,
    all_gather_all_case,
    all_gather_case,
    all_sum_reduce_case,
    broadcast_case,
    even,
    gather_case,
    halo_case,
    move_case,
    parts,
    reduce_scatter_case,
    repartition_case,
    scatter_case,
    sum_reduce_case,
)
from test_laws import assert_laws

BATCH = 25  # cases in one call to the workers

Spec = tuple[Callable[..., Case], tuple[Any, ...]]  # a constructor and its arguments but the name

by_draw = settings(
    max_examples=repeats(5),
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def build(specs: Iterable[Spec]) -> Iterable[Case]:
    for make, arguments in specs:
        yield make(str(arguments), *arguments)


def grids(n: int, dims: int) -> st.SearchStrategy[Grid]:
    """Any of the workers in any order on a grid."""

    def arrange(size: int) -> st.SearchStrategy[Grid]:
        shapes = [s for s in product(range(1, n + 1), repeat=dims) if math.prod(s) == size]
        ranks = st.permutations(range(n)).map(lambda order: tuple(order[:size]))
        return st.builds(Grid, ranks, st.sampled_from(shapes))

    return st.integers(1, n if dims else 1).flatmap(arrange)


def shapes(dims: int, longest: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, longest)] * dims)


def lengths(grid: Grid) -> st.SearchStrategy[Any]:
    """Parts of any lengths, or balanced ones."""
    free = st.tuples(*(st.lists(st.integers(0, 3), min_size=p, max_size=p) for p in grid.shape))
    return free | shapes(len(grid.shape)).map(lambda shape: even(shape, grid.shape))


@st.composite
def broadcasts(draw: st.DrawFn, n: int) -> tuple[Any, ...]:
    Y = draw(grids(n, draw(st.integers(1, 3))))
    sizes = [draw(st.sampled_from([1, p])) for p in Y.shape]
    while len(sizes) > 1 and sizes[0] == 1 and draw(st.booleans()):
        del sizes[0]
    ranks = draw(st.permutations(range(n)))[: math.prod(sizes)]
    X = Grid(tuple(ranks), tuple(sizes))
    return X, Y, {rank: draw(shapes(2, 3)) for rank in X.ranks}


@st.composite
def slices(draw: st.DrawFn, n: int) -> tuple[Grid, tuple[int, ...], dict[int, tuple[int, ...]]]:
    """A grid, some of its axes, and a shape for each of the rows along them."""
    X = draw(grids(n, draw(st.integers(1, 3))))
    axes = tuple(axis for axis in range(len(X.shape)) if draw(st.booleans()))
    dims = draw(st.integers(0, 3))
    found: dict[int, tuple[int, ...]] = {}
    for rank in X.ranks:
        first = X.row_of(rank, axes)[0]
        found[rank] = found[first] if first in found else draw(shapes(dims, 4))
    return X, axes, found


@st.composite
def along_dim(draw: st.DrawFn, n: int, free: bool) -> tuple[Any, ...]:
    """A grid, an axis of it, a dimension, and shapes that fit along this axis."""
    X, _, _ = draw(slices(n))
    axis = draw(st.integers(-len(X.shape), len(X.shape) - 1))
    dims = draw(st.integers(1, 3))
    dim = draw(st.integers(-dims, dims - 1))
    found: dict[int, tuple[int, ...]] = {}
    for rank in X.ranks:
        first = X.row_of(rank, [axis])[0]
        shape = list(found[first] if first in found else draw(shapes(dims, 4)))
        shape[dim] = draw(st.integers(0, 3)) if free else shape[dim]
        found[rank] = tuple(shape)
    return X, axis, dim, found


@st.composite
def repartitions(draw: st.DrawFn, n: int) -> tuple[Any, ...]:
    dims = draw(st.integers(0, 3))
    X, Y = draw(grids(n, dims)), draw(grids(n, dims))
    return X, Y, draw(lengths(X))


@st.composite
def halos(draw: st.DrawFn, n: int) -> tuple[Any, ...]:
    X = draw(grids(n, draw(st.integers(1, 3))))
    halo = tuple(draw(st.tuples(st.integers(0, 4), st.integers(0, 4))) for _ in X.shape)
    return X, halo, draw(lengths(X))


@st.composite
def grids_and_lengths(draw: st.DrawFn, n: int) -> tuple[Any, ...]:
    X = draw(grids(n, draw(st.integers(1, 3))))
    return X, draw(lengths(X))


@st.composite
def moves(draw: st.DrawFn, n: int) -> tuple[Side, Side]:
    shape = draw(shapes(2))
    source, target = (
        Side(draw(st.sampled_from(KINDS)), draw(grids(n, 2)), shape) for _ in range(2)
    )
    return source, target


def movements(n: int) -> st.SearchStrategy[Spec]:
    """Any movement on some of n workers."""
    drawn = [
        (broadcast_case, broadcasts(n)),
        (sum_reduce_case, broadcasts(n).map(lambda drawn: (drawn[1], drawn[0], drawn[2]))),
        (all_sum_reduce_case, slices(n)),
        (all_gather_case, along_dim(n, free=True)),
        (reduce_scatter_case, along_dim(n, free=False)),
        (repartition_case, repartitions(n)),
        (halo_case, halos(n)),
        (gather_case, grids_and_lengths(n)),
        (all_gather_all_case, grids_and_lengths(n)),
        (scatter_case, grids_and_lengths(n).map(lambda d: (d[0], tuple(map(sum, d[1]))))),
    ]
    return st.one_of(*(st.tuples(st.just(make), strategy) for make, strategy in drawn))


def batches(strategy: st.SearchStrategy[Spec]) -> st.SearchStrategy[list[Spec]]:
    return st.lists(strategy, min_size=BATCH, max_size=BATCH)


@pytest.mark.parametrize("nprocs", [2, 4, 6])
def test_any_movement(run: Any, nprocs: int) -> None:
    @by_draw
    @given(batches(movements(nprocs)))
    def check(specs: list[Spec]) -> None:
        assert_laws(run, build, specs, torch.float64, nprocs)

    check()


@pytest.mark.parametrize("nprocs", [3, 4, 6])
def test_any_move(run: Any, nprocs: int) -> None:
    @by_draw
    @given(batches(st.tuples(st.just(move_case), moves(nprocs))))
    def check(specs: list[Spec]) -> None:
        assert_laws(run, build, specs, torch.complex128, nprocs)

    check()


def test_the_split_is_balanced() -> None:
    """The split of the reference itself: n // p, the first n % p parts one longer."""
    for length, count in product(range(20), range(1, 8)):
        expected = [length // count + (k < length % count) for k in range(count)]
        assert parts(length, count) == expected
