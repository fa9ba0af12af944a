"""What planning asks of layouts: the same parts on other grids, and what a rearrangement sends.

Pure integers, and nothing is listed for each worker: a plan for many workers costs what one for few
does. Dimensions lie in `Balanced` parts, which are equal to listed ones and take no room.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod

from tessel.core import boxes
from tessel.core.boxes import Balanced, Box, Interval
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.partition import Partition

ANYWHERE = "anywhere"  # where the last step leaves the result
Runs = tuple[tuple[int, int], ...]  # (stride, size): along it place p counts p // stride % size


def split_along(partition: Partition, shape: Shape, axes: Iterable[Sequence[int]]) -> Layout:
    """Each dimension in balanced parts along several axes of the grid, the first changing slowest.

    Workers that differ along other axes have columns of their own of a batch.
    """
    cuts = (
        balanced_cut(partition, length, along) for length, along in zip(shape, axes, strict=True)
    )
    return Layout(partition, shape, tuple(cuts))


def balanced_cut(partition: Partition, length: int, axes: Sequence[int]) -> Cut:
    """A dimension in balanced parts along these axes of the grid."""
    return Cut(tuple(axes), Balanced(length, prod(partition.shape[axis] for axis in axes)))


def on_grid(partition: Partition, shape: Shape) -> Layout:
    """Axis d of a grid splits dimension d; further axes split the batch.

    >>> from tessel.core.partition import HypotheticalPartition
    >>> on_grid(HypotheticalPartition((1, 2, 4)), (6, 8)).separate
    (1,)
    """
    fine = without_ones(partition.shape)
    axes = axes_in(partition.shape, fine)[: len(shape)]
    return split_along(partition.create_cartesian_topology_partition(fine), shape, axes)


# -- cuts -----------------------------------------------------------------------------------------


def is_whole(layout: Layout, dim: int) -> bool:
    """Whether nobody has only a part of a dimension: one place along its axes has all of it."""
    cut, length = layout.cuts[dim], layout.shape[dim]
    if isinstance(
        cut.intervals, Balanced
    ):  # where there are several parts, it is meant to be split
        return cut.intervals.parts == 1
    return _whole_part(cut, length) is not None


@lru_cache(maxsize=1024)
def _whole_part(cut: Cut, length: int) -> int | None:
    """Which of the listed parts of a dimension has all of it, if one has."""
    lengths = [stop - start for start, stop in cut.intervals]
    return lengths.index(length) if length in lengths else None


def with_cut(layout: Layout, dim: int, cut: Cut, length: int) -> Layout:
    """With another cut of one dimension, and another length."""
    shape, cuts = list(layout.shape), list(layout.cuts)
    shape[dim], cuts[dim] = length, cut
    return replace(layout, shape=tuple(shape), cuts=tuple(cuts))


def with_length(layout: Layout, dim: int, length: int) -> Layout:
    """With another length of a dimension that is whole."""
    cut = layout.cuts[dim]
    if isinstance(cut.intervals, Balanced):
        return with_cut(layout, dim, Cut(cut.axes, Balanced(length, len(cut.intervals))), length)
    full = _whole_part(cut, layout.shape[dim])
    intervals = tuple((0, length) if k == full else (0, 0) for k in range(len(cut.intervals)))
    return with_cut(layout, dim, Cut(cut.axes, intervals), length)


def with_batch(layout: Layout, columns: Sequence[int] | None) -> Layout:
    """With the batch as a last dimension: its columns at each place along the axes that are left.

    Without columns, the same.
    """
    if columns is None:
        return layout
    batch = Cut(layout.separate, boxes.consecutive(columns))
    return replace(layout, shape=(*layout.shape, sum(columns)), cuts=(*layout.cuts, batch))


# -- grids ----------------------------------------------------------------------------------------


def runs(grid: Shape, axes: Sequence[int]) -> Runs:
    """Axes as runs of places, which say the same on every grid; adjacent axes are one run.

    >>> runs((2, 3, 4), (0, 1)), runs((6, 4), (0,))
    (((4, 6),), ((4, 6),))
    """
    found: list[tuple[int, int]] = []
    for axis in axes:
        stride, size = prod(grid[axis + 1 :]), grid[axis]
        if found and found[-1][0] == stride * size:
            found[-1] = (stride, found[-1][1] * size)
        elif size > 1:
            found.append((stride, size))
    return tuple(found)


def position(along: Runs, place: int) -> int:
    """Which of the positions along some runs a place has, the first run changing slowest.

    >>> position(((3, 2), (1, 3)), 5), position(((1, 3),), 5)
    (5, 2)
    """
    found = 0
    for stride, size in along:
        found = found * size + place // stride % size
    return found


def batch_runs(layout: Layout) -> Runs:
    """The axes along which workers have columns of their own."""
    return runs(layout.partition.shape, layout.separate)


def num_different(some: Layout, other: Layout) -> int:
    """How many dimensions lie in different ways, on whatever grids of the same workers."""
    grids = some.partition.shape, other.partition.shape
    return sum(
        length != another
        or a.intervals != b.intervals
        or (a.axes if grids[0] == grids[1] else runs(grids[0], a.axes))
        != (b.axes if grids[0] == grids[1] else runs(grids[1], b.axes))
        for length, another, a, b in zip(
            some.shape, other.shape, some.cuts, other.cuts, strict=True
        )
    )


def alike(some: Layout, other: Layout) -> bool:
    """Whether every worker has the same part, on whatever grids the workers are.

    >>> from tessel.core.partition import HypotheticalPartition as Workers
    >>> a = split_along(Workers((2, 3)), (12, 5), [(0, 1), ()])
    >>> alike(a, split_along(Workers((3, 2)), (12, 5), [(0, 1), ()]))
    True
    """
    if some is other:
        return True
    # Places along runs say the same on every grid; the numbers of axes do only on one.
    same_workers = some.partition.ranks == other.partition.ranks
    return same_workers and len(some.shape) == len(other.shape) and not num_different(some, other)


def refinement(some: Shape, others: Shape) -> Shape | None:
    """A grid of which both grids are groups of adjacent axes, if there is one.

    >>> refinement((1, 4), (2, 2)), refinement((2, 3), (3, 2))
    ((2, 2), None)
    """
    strides = {prod(grid[k:]) for grid in (some, others) for k in range(len(grid) + 1)}
    chain = sorted(strides, reverse=True)
    if any(gcd(a, b) != b for a, b in pairwise(chain)):
        return None
    return tuple(a // b for a, b in pairwise(chain))


def refined(layout: Layout, grid: Shape) -> Layout:
    """The same parts on a finer grid, of which the axes here are groups."""
    if grid == layout.partition.shape:
        return layout
    axes = axes_in(layout.partition.shape, grid)
    cuts = (
        replace(cut, axes=tuple(fine for axis in cut.axes for fine in axes[axis]))
        for cut in layout.cuts
    )
    partition = layout.partition.create_cartesian_topology_partition(grid)
    return replace(layout, partition=partition, cuts=tuple(cuts))


def on_common_grids(some: Layout, other: Layout) -> tuple[Layout, Layout]:
    """Both on one grid that is finer than theirs, if there is one; else each on its own.

    On one grid a plan can keep some dimensions as they lie and move the axes of others.
    """
    grids = some.partition.shape, other.partition.shape
    fine = refinement(*grids)
    if fine is None:
        return refined(some, without_ones(grids[0])), refined(other, without_ones(grids[1]))
    return refined(some, fine), refined(other, fine)


def without_ones(grid: Shape) -> Shape:
    """A grid without the axes that split nothing."""
    return tuple(size for size in grid if size > 1)


def axes_in(grid: Shape, fine: Shape) -> tuple[tuple[int, ...], ...]:
    """Which axes of a refinement each axis of a grid stands for."""
    found, at = [], 0
    for size in grid:
        axes: tuple[int, ...] = ()
        while prod(fine[axis] for axis in axes) < size:
            axes, at = (*axes, at), at + 1
        found.append(axes)
    return tuple(found)


# -- what is sent ---------------------------------------------------------------------------------


def box_of(layout: Layout, worker: int) -> Box:
    """What a worker of a layout stores."""
    box = layout.box(worker)
    assert box is not None
    return box


def common_numel(some: Box, other: Box) -> int:
    """How many indices two boxes share."""
    common = [boxes.overlap(a, b) for a, b in zip(some, other, strict=True)]
    return 0 if None in common else boxes.volume(tuple(each for each in common if each))


def numel_sent(before: Layout, after: Layout, worker: int) -> int:
    """How many values a worker sends when a tensor is rearranged."""
    own = box_of(before, worker)
    return boxes.volume(own) - common_numel(own, box_of(after, worker))


def num_messages(before: Layout, after: Layout, worker: int) -> int:
    """How many others get something of a worker then."""
    own = box_of(before, worker)
    if not boxes.volume(own):
        return 0
    takers = prod(_num_meeting(*each) for each in zip(after.cuts, own, strict=True))
    return takers - (common_numel(own, box_of(after, worker)) > 0)


def _num_meeting(cut: Cut, interval: Interval) -> int:
    """How many parts share an index with an interval."""
    start, stop = interval
    if isinstance(cut.intervals, Balanced):
        length, count = cut.intervals.length, cut.intervals.parts
        last = boxes.balanced_place(length, count, stop - 1)
        return last - boxes.balanced_place(length, count, start) + 1
    filled = _filled(cut)
    first = bisect_right(filled, start, key=lambda each: each[1])
    return bisect_left(filled, stop, key=lambda each: each[0]) - first


@lru_cache(maxsize=1024)
def _filled(cut: Cut) -> tuple[Interval, ...]:
    """The parts that are not empty, ascending."""
    return tuple(part for part in cut.intervals if part[0] < part[1])


def representatives(partition: Partition) -> list[int]:
    """Workers that stand for all: the first, which has the largest parts, the last, and between."""
    grid = partition.shape
    last = tuple(size - 1 for size in grid)
    some = [
        tuple(0 for _ in grid),
        last,
        tuple(size // 2 for size in grid),
        *(
            tuple(end if axis % 2 == turn else 0 for axis, end in enumerate(last))
            for turn in (0, 1)
        ),
    ]
    return list(dict.fromkeys(partition.worker_at(at) for at in some))
