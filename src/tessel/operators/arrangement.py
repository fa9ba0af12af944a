"""Arrangements: how the dimensions of a tensor lie on a grid of workers, as plans see it.

Pure integers, and nothing is listed for each worker: a plan for many workers costs what one for
few does. Workers are known by their places, their numbers in the order of a partition. So tensors
on different grids of the same workers can be compared, and rearranged from one to the other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from math import gcd, prod
from typing import Any

from tessel import boxes
from tessel.boxes import Box, Interval
from tessel.layout import Cut, Layout
from tessel.operators.space import Shape
from tessel.partition import Partition

ANYWHERE = "anywhere"  # where the last step leaves it
Runs = tuple[tuple[int, int], ...]  # (stride, size): along it a place p counts p // stride % size


def position(runs: Runs, place: int) -> int:
    """Which of the positions along some runs a place has, the first run changing slowest.

    >>> position(((3, 2), (1, 3)), 5), position(((1, 3),), 5)
    (5, 2)
    """
    found = 0
    for stride, size in runs:
        found = found * size + place // stride % size
    return found


@dataclass(frozen=True)
class Parts:
    """One dimension: how long it is, and which axes of the grid split it.

    Attributes:
        length: of the dimension.
        axes: the axes of the grid, the first one changing slowest.
        count: the number of parts.
        bounds: the parts, where they are not balanced.
    """

    length: int
    axes: tuple[int, ...] = ()
    count: int = 1
    bounds: tuple[Interval, ...] | None = None

    def interval(self, place: int) -> Interval:
        if self.bounds is not None:
            return self.bounds[place]
        return boxes.balanced_part(self.length, self.count, place)

    @property
    def intervals(self) -> tuple[Interval, ...]:
        return boxes.balanced(self.length, self.count) if self.bounds is None else self.bounds

    @cached_property
    def filled(self) -> tuple[Interval, ...]:
        """The parts that are not empty, ascending."""
        return tuple(part for part in self.intervals if part[0] < part[1])

    @cached_property
    def _hash(self) -> int:
        return hash((self.length, self.axes, self.count, self.bounds))

    def __hash__(self) -> int:
        return self._hash  # of many bounds, once

    def __getstate__(self) -> dict[str, Any]:
        """Without what is derived: hashes differ between processes."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def is_whole(self) -> bool:
        """Whether one part has all."""
        if self.bounds is None:
            return self.count == 1
        return any(stop - start == self.length for start, stop in self.bounds)

    def resized(self, length: int) -> Parts:
        """Of another length, for a dimension that is whole."""
        if self.bounds is None:
            return replace(self, length=length)
        full = next(k for k, (a, b) in enumerate(self.bounds) if b - a == self.length)
        bounds = tuple((0, length) if k == full else (0, 0) for k in range(self.count))
        return replace(self, length=length, bounds=bounds)


@dataclass(frozen=True, eq=False)
class Arrangement:
    """All dimensions of a tensor on a grid.

    Axes that split none of them belong to the batch: workers there have columns of their own.
    Arrangements are equal if every worker has the same part, on whatever grids they are.

    >>> rows = Parts(12, (0, 1), 6)
    >>> Arrangement((2, 3), (rows, Parts(5))) == Arrangement((3, 2), (rows, Parts(5)))
    True
    """

    grid: Shape
    parts: tuple[Parts, ...]

    @classmethod
    def of(cls, grid: Shape, shape: Shape, axes: Sequence[tuple[int, ...]]) -> Arrangement:
        """Balanced parts along these axes for each dimension."""
        parts = tuple(
            Parts(length, along, prod(grid[axis] for axis in along))
            for length, along in zip(shape, axes, strict=True)
        )
        return cls(grid, parts)

    @classmethod
    def on_grid(cls, grid: Shape, shape: Shape) -> Arrangement:
        """Axis d of a grid splits dimension d; further axes split the batch.

        >>> Arrangement.on_grid((1, 2, 4), (6, 8)).batch_axes
        (1,)
        """
        fine = without_ones(grid)
        return cls.of(fine, shape, axes_in(grid, fine)[: len(shape)])

    @property
    def shape(self) -> Shape:
        return tuple(part.length for part in self.parts)

    @cached_property
    def batch_axes(self) -> tuple[int, ...]:
        taken = {axis for part in self.parts for axis in part.axes}
        return tuple(axis for axis in range(len(self.grid)) if axis not in taken)

    def runs(self, axes: Sequence[int]) -> Runs:
        """Axes as runs of places, which say the same on every grid; neighbours are one run.

        >>> Arrangement((2, 3, 4), ()).runs((0, 1)), Arrangement((6, 4), ()).runs((0,))
        (((4, 6),), ((4, 6),))
        """
        found: list[tuple[int, int]] = []
        for axis in axes:
            stride, size = prod(self.grid[axis + 1 :]), self.grid[axis]
            if found and found[-1][0] == stride * size:
                found[-1] = (stride, found[-1][1] * size)
            elif size > 1:
                found.append((stride, size))
        return tuple(found)

    @cached_property
    def _runs(self) -> tuple[Runs, ...]:
        return tuple(self.runs(part.axes) for part in self.parts)

    @cached_property
    def batch_runs(self) -> Runs:
        """The axes of the batch, in the same words on every grid."""
        return self.runs(self.batch_axes)

    @cached_property
    def ways(self) -> tuple[Hashable, ...]:
        """For each dimension, how it lies, in the same words on every grid."""
        return tuple(
            (part.length, part.bounds, runs)
            for part, runs in zip(self.parts, self._runs, strict=True)
        )

    @cached_property
    def size(self) -> int:
        """The number of workers."""
        return prod(self.grid)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Arrangement):
            return NotImplemented
        return self is other or (self.size == other.size and self.ways == other.ways)

    @cached_property
    def _hash(self) -> int:
        return hash((self.size, self.ways))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def part_at(self, dim: int, place: int) -> int:
        """Which part of a dimension the worker at a place has."""
        return position(self._runs[dim], place)

    def box(self, place: int) -> Box:
        """What the worker at a place has."""
        if place not in self._boxes:
            self._boxes[place] = tuple(
                part.interval(self.part_at(dim, place)) for dim, part in enumerate(self.parts)
            )
        return self._boxes[place]

    @cached_property
    def _boxes(self) -> dict[int, Box]:
        return {}  # those that were asked for

    def local_shape(self, place: int) -> Shape:
        return boxes.extent(self.box(place))

    def following(self, shape: Shape, dims: tuple[int | None, ...]) -> Arrangement:
        """How a tensor lies each of whose dimensions follows one of these, or is whole."""
        key = shape, dims
        if key not in self._following:
            parts = (
                Parts(length) if dim is None else self.parts[dim]
                for length, dim in zip(shape, dims, strict=True)
            )
            self._following[key] = Arrangement(self.grid, tuple(parts))
        return self._following[key]

    @cached_property
    def _following(self) -> dict[Hashable, Arrangement]:
        return {}  # parameters ask for the same each time they are used

    def on(self, grid: Shape) -> Arrangement:
        """The same on a finer grid, of which the axes here are groups."""
        if grid == self.grid:
            return self
        axes = axes_in(self.grid, grid)
        parts = (
            replace(part, axes=tuple(a for axis in part.axes for a in axes[axis]))
            for part in self.parts
        )
        return Arrangement(grid, tuple(parts))

    def with_part(self, dim: int, part: Parts) -> Arrangement:
        parts = list(self.parts)
        parts[dim] = part
        return replace(self, parts=tuple(parts))

    def layout(self, partition: Partition, columns: tuple[int, ...] | None) -> Layout:
        """As a layout of these workers, on the grid that is meant here.

        With columns, their numbers along the axes of the batch, a dimension comes behind the rest.
        """
        if partition.shape != self.grid:
            partition = Partition(partition.ranks, self.grid)
        cuts = [Cut(part.axes, part.intervals) for part in self.parts]
        shape = self.shape
        if columns is not None:
            cuts.append(Cut(self.batch_axes, boxes.consecutive(columns)))
            shape = (*shape, sum(columns))
        return Layout(partition, shape, tuple(cuts))

    def __repr__(self) -> str:
        parts = " × ".join(
            f"{part.length}/{part.count}" if part.count > 1 else str(part.length)
            for part in self.parts
        )
        return f"[{parts}]"


def common_numel(some: Box, other: Box) -> int:
    """How many indices two boxes share."""
    common = [boxes.overlap(a, b) for a, b in zip(some, other, strict=True)]
    return 0 if None in common else boxes.volume(tuple(each for each in common if each))


def numel_sent(before: Arrangement, after: Arrangement, place: int) -> int:
    """How many values the worker at a place sends when a tensor is rearranged."""
    own = before.box(place)
    return boxes.volume(own) - common_numel(own, after.box(place))


def num_messages(before: Arrangement, after: Arrangement, place: int) -> int:
    """How many others get something of a worker then."""
    own = before.box(place)
    if not boxes.volume(own):
        return 0
    takers = 1
    for part, interval in zip(after.parts, own, strict=True):
        takers *= _num_meeting(part, interval)
    kept = common_numel(own, after.box(place))
    return takers - (kept > 0)


def _num_meeting(part: Parts, interval: Interval) -> int:
    """How many parts share an index with an interval."""
    if part.bounds is not None:
        first = bisect_right(part.filled, interval[0], key=lambda each: each[1])
        return bisect_left(part.filled, interval[1], key=lambda each: each[0]) - first
    return (
        boxes.balanced_place(part.length, part.count, interval[1] - 1)
        - (boxes.balanced_place(part.length, part.count, interval[0]))
        + 1
    )


def refinement(some: Shape, others: Shape) -> Shape | None:
    """A grid of which both grids are groups of neighbouring axes, if there is one.

    >>> refinement((1, 4), (2, 2)), refinement((2, 3), (3, 2))
    ((2, 2), None)
    """
    marks = {prod(grid[k:]) for grid in (some, others) for k in range(len(grid) + 1)}
    chain = sorted(marks, reverse=True)
    if any(gcd(a, b) != b for a, b in pairwise(chain)):
        return None
    return tuple(a // b for a, b in pairwise(chain))


def on_common_grids(some: Arrangement, other: Arrangement) -> tuple[Arrangement, Arrangement]:
    """Both on one grid that is finer than theirs, if there is one; else each on its own.

    On one grid a plan can keep some dimensions as they lie and move the axes of others.
    """
    fine = refinement(some.grid, other.grid)
    if fine is None:
        return some.on(without_ones(some.grid)), other.on(without_ones(other.grid))
    return some.on(fine), other.on(fine)


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


def representatives(grid: Shape) -> list[int]:
    """The places of workers that stand for all: the first, which has the largest parts, the last,
    and between."""
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
    return list(dict.fromkeys(boxes.ravel(at, grid) for at in some))
