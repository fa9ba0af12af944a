"""Functions of layouts for planning: equal parts on other grids, and the values that a move sends.

Pure integers, and nothing is listed by worker: a plan for many workers costs as little as one for
a few. Dimensions have `Balanced` parts, which are equal to listed ones and need no memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from math import gcd, prod

import numpy as np

from tessel.core import boxes
from tessel.core.boxes import Balanced, Box, Interval
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.partition import Partition

ANYWHERE = "anywhere"  # where the last step leaves the result
MOST_WORKERS = 128  # the largest number of workers that are counted one by one
StridesAndSizes = tuple[
    tuple[int, int], ...
]  # (stride, size): place p has position p // stride % size


def split_along(partition: Partition, shape: Shape, axes: Iterable[Sequence[int]]) -> Layout:
    """The layout with balanced parts along several axes of the grid, the first changing slowest.

    Workers that differ along other axes have columns of their own in a batch.
    """
    cuts = (
        balanced_cut(partition, length, along) for length, along in zip(shape, axes, strict=True)
    )
    return Layout(partition, shape, tuple(cuts))


def balanced_cut(partition: Partition, length: int, axes: Sequence[int]) -> Cut:
    """The cut of a dimension in balanced parts along these axes of the grid."""
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


def undivided(layout: Layout, dim: int) -> bool:
    """Whether no worker has only a part of a dimension: one place along its axes has all of it."""
    cut, length = layout.cuts[dim], layout.shape[dim]
    if isinstance(cut.intervals, Balanced):  # several parts are meant to be several
        return cut.intervals.parts == 1
    return _whole_part(cut, length) is not None


@lru_cache(maxsize=1024)
def _whole_part(cut: Cut, length: int) -> int | None:
    """The index of the listed part that is the whole dimension, or None."""
    lengths = [stop - start for start, stop in cut.intervals]
    return lengths.index(length) if length in lengths else None


def with_length(layout: Layout, dim: int, length: int) -> Layout:
    """The layout with another length of a dimension that is whole."""
    cut = layout.cuts[dim]
    if isinstance(cut.intervals, Balanced):
        return layout.recut(dim, Cut(cut.axes, Balanced(length, len(cut.intervals))), length)
    full = _whole_part(cut, layout.shape[dim])
    intervals = tuple((0, length) if k == full else (0, 0) for k in range(len(cut.intervals)))
    return layout.recut(dim, Cut(cut.axes, intervals), length)


def with_batch(layout: Layout, columns: Sequence[int] | None) -> Layout:
    """The layout with the batch as a last dimension, split along the axes that are left.

    Without columns, the layout itself.
    """
    if columns is None:
        return layout
    batch = Cut(layout.separate, boxes.consecutive(columns))
    return replace(layout, shape=(*layout.shape, sum(columns)), cuts=(*layout.cuts, batch))


def runs(grid: Shape, axes: Sequence[int]) -> StridesAndSizes:
    """Axes as runs of places, which mean the same on every grid; adjacent axes are one run.

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


def position(along: StridesAndSizes, place: int) -> int:
    """The position of a place along some runs, the first of which changes slowest.

    >>> position(((3, 2), (1, 3)), 5), position(((1, 3),), 5)
    (5, 2)
    """
    found = 0
    for stride, size in along:
        found = found * size + place // stride % size
    return found


def batch_runs(layout: Layout) -> StridesAndSizes:
    """The axes along which workers have columns of their own."""
    return runs(layout.partition.shape, layout.separate)


def num_different(some: Layout, other: Layout) -> int:
    """The number of dimensions that are split differently, on any grids of the same workers."""
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
    """Whether every worker has the same part, on any grids of the workers.

    >>> from tessel.core.partition import HypotheticalPartition as Workers
    >>> a = split_along(Workers((2, 3)), (12, 5), [(0, 1), ()])
    >>> alike(a, split_along(Workers((3, 2)), (12, 5), [(0, 1), ()]))
    True
    """
    if some is other:
        return True
    # Runs of places mean the same on every grid; the numbers of axes only on one.
    same_workers = some.partition.ranks == other.partition.ranks
    return same_workers and len(some.shape) == len(other.shape) and not num_different(some, other)


def refinement(some: Shape, others: Shape) -> Shape | None:
    """A grid whose adjacent axes can be grouped to both grids, or None.

    >>> refinement((1, 4), (2, 2)), refinement((2, 3), (3, 2))
    ((2, 2), None)
    """
    strides = {prod(grid[k:]) for grid in (some, others) for k in range(len(grid) + 1)}
    chain = sorted(strides, reverse=True)
    if any(gcd(a, b) != b for a, b in pairwise(chain)):
        return None
    return tuple(a // b for a, b in pairwise(chain))


def refined(layout: Layout, grid: Shape) -> Layout:
    """The same parts on a finer grid, whose axes can be grouped to those of this one."""
    if grid == layout.partition.shape:
        return layout
    axes = axes_in(layout.partition.shape, grid)
    cuts = (
        replace(cut, axes=tuple(fine for axis in cut.axes for fine in axes[axis]))
        for cut in layout.cuts
    )
    partition = layout.partition.create_cartesian_topology_partition(grid)
    return replace(layout, partition=partition, cuts=tuple(cuts))


def on_common_grids(
    some: Layout, other: Layout, also: Iterable[Layout] = ()
) -> tuple[Layout, Layout]:
    """Both layouts on one grid that is finer than theirs, if it exists; else each on its own.

    On one grid a plan can keep the split of some dimensions and move the axes of others. The grid
    is finer than those of further layouts, too, if such a grid exists: if not, some arrangements of
    a tensor are left out, and none that is necessary.
    """
    grids = some.partition.shape, other.partition.shape
    fine = refinement(*grids)
    if fine is None:
        return refined(some, without_ones(grids[0])), refined(other, without_ones(grids[1]))
    for each in also:
        fine = refinement(fine, each.partition.shape) or fine
    return refined(some, fine), refined(other, fine)


def without_ones(grid: Shape) -> Shape:
    """A grid without the axes that split nothing."""
    return tuple(size for size in grid if size > 1)


def axes_in(grid: Shape, fine: Shape) -> tuple[tuple[int, ...], ...]:
    """The axes of a refinement that each axis of a grid stands for."""
    found, at = [], 0
    for size in grid:
        axes: tuple[int, ...] = ()
        while prod(fine[axis] for axis in axes) < size:
            axes, at = (*axes, at), at + 1
        found.append(axes)
    return tuple(found)


def hostings(here: Layout) -> Iterator[Layout]:
    """Layouts with all axes of the grid on some long dimensions, and the others whole."""
    D = len(here.shape)
    axes = [axis for cut in here.cuts for axis in cut.axes]
    for count in range(1, min(len(axes), D) + 1):
        for hosts in combinations(range(D), count):
            if (there := _placed(here, hosts, axes)) is not None:
                yield there


def _placed(here: Layout, hosts: Sequence[int], axes: Sequence[int]) -> Layout | None:
    """The layout with all axes on these dimensions; axes that are there already stay.

    None if the dimensions are too short, or if the layout is the same.
    """
    grid = here.partition.shape
    own = {dim: list(cut.axes) if dim in hosts else [] for dim, cut in enumerate(here.cuts)}
    sizes = {dim: prod(grid[axis] for axis in own[dim]) for dim in own}
    placed = {axis for each in own.values() for axis in each}
    for axis in axes:
        if axis in placed:  # moving it would send a dimension that could stay
            continue
        free = [dim for dim in hosts if sizes[dim] * grid[axis] <= here.shape[dim]]
        if not free:
            return None
        # If a dimension divides evenly, no worker waits for another.
        dim = min(free, key=lambda d: (here.shape[d] % (sizes[d] * grid[axis]) > 0, d))
        own[dim].append(axis)
        sizes[dim] *= grid[axis]
    cuts = tuple(
        cut
        if list(cut.axes) == own[dim] and dim in hosts
        else Cut(tuple(own[dim]), Balanced(here.shape[dim], sizes[dim]))
        for dim, cut in enumerate(here.cuts)
    )
    return replace(here, cuts=cuts) if cuts != here.cuts else None


def unevenness(there: Layout) -> float:
    """The ratio of the largest part, the first one of a balanced split, to the mean."""
    ratio = 1.0
    for cut, length in zip(there.cuts, there.shape, strict=True):
        start, stop = cut.intervals[0]
        ratio *= (stop - start) * len(cut.intervals) / max(1, length)
    return ratio


def box_of(layout: Layout, worker: int) -> Box:
    """The box of a worker."""
    box = layout.box(worker)
    assert box is not None
    return box


def numel_sent(before: Layout, after: Layout, worker: int) -> int:
    """The number of values that a worker sends when a tensor is rearranged."""
    own = box_of(before, worker)
    return boxes.volume(own) - boxes.common_volume(own, box_of(after, worker))


def num_messages(before: Layout, after: Layout, worker: int) -> int:
    """The number of workers that get something from a worker then."""
    own = box_of(before, worker)
    if not boxes.volume(own):
        return 0
    takers = 1
    for cut, (start, stop) in zip(after.cuts, own, strict=True):  # parts that meet the own interval
        if isinstance(cut.intervals, Balanced):
            length, count = cut.intervals.length, cut.intervals.parts
            last = boxes.balanced_place(length, count, stop - 1)
            takers *= last - boxes.balanced_place(length, count, start) + 1
        else:
            filled = _filled(cut)
            first = bisect_right(filled, start, key=lambda each: each[1])
            takers *= bisect_left(filled, stop, key=lambda each: each[0]) - first
    return takers - (boxes.common_volume(own, box_of(after, worker)) > 0)


@lru_cache(maxsize=1024)
def share_inside(before: Layout, after: Layout, workers_per_host: int) -> float:
    """The share of the values sent by the workers of a host that stays inside of it.

    It is the smallest among the first host, one in the middle and the last one: the others wait
    for it.
    """
    last = (after.partition.size - 1) // workers_per_host
    shares = []
    for host in {0, last // 2, last}:
        first = host * workers_per_host
        here = range(first, min(first + workers_per_host, after.partition.size))
        # (worker, dim, start and stop): the share of a worker's values that another gets
        has, gets = (np.array([box_of(at, each) for each in here]) for at in (before, after))
        starts = np.maximum(has[:, None, :, 0], gets[None, :, :, 0])
        stops = np.minimum(has[:, None, :, 1], gets[None, :, :, 1])
        common = np.prod(np.maximum(stops - starts, 0), -1)
        kept = np.trace(common)
        sent = np.prod(has[..., 1] - has[..., 0], -1).sum() - kept
        shares.append(min(1.0, float(common.sum() - kept) / float(sent)) if sent else 1.0)
    return min(shares)


@lru_cache(maxsize=1024)
def _filled(cut: Cut) -> tuple[Interval, ...]:
    """The intervals that are not empty, in ascending order."""
    return tuple(part for part in cut.intervals if part[0] < part[1])


def examined(partition: Partition) -> Sequence[int]:
    """The workers whose costs are counted: all, or some that represent many."""
    return partition.ranks if partition.size <= MOST_WORKERS else representatives(partition)


def representatives(partition: Partition) -> list[int]:
    """Workers that represent all: the first, with the largest parts, the last, and some between."""
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
