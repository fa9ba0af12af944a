"""Arrangements: how the dimensions of a tensor lie on a grid of workers, as plans see it.

Pure integers, and nothing is listed for each worker: a plan for many workers costs what one for
few does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import gcd, prod

from tessel import boxes
from tessel.boxes import Box, Interval
from tessel.layout import Cut, Layout
from tessel.operators.space import Shape
from tessel.partition import Partition


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


@dataclass(frozen=True)
class Arrangement:
    """All dimensions of a tensor on a grid.

    Axes that split none of them belong to the batch: workers there have columns of their own.
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

    @property
    def shape(self) -> Shape:
        return tuple(part.length for part in self.parts)

    @cached_property
    def batch_axes(self) -> tuple[int, ...]:
        taken = {axis for part in self.parts for axis in part.axes}
        return tuple(axis for axis in range(len(self.grid)) if axis not in taken)

    def place(self, dim: int, coordinates: Sequence[int]) -> int:
        axes = self.parts[dim].axes
        if len(axes) < 2:
            return coordinates[axes[0]] if axes else 0
        return boxes.ravel([coordinates[a] for a in axes], [self.grid[a] for a in axes])

    def box(self, coordinates: Sequence[int]) -> Box:
        """What the worker at these coordinates has."""
        at = tuple(coordinates)
        if at not in self._boxes:
            self._boxes[at] = tuple(
                part.interval(self.place(dim, at)) for dim, part in enumerate(self.parts)
            )
        return self._boxes[at]

    @cached_property
    def _boxes(self) -> dict[Shape, Box]:
        return {}  # those that were asked for

    def local_shape(self, coordinates: Sequence[int]) -> Shape:
        return boxes.extent(self.box(coordinates))

    def with_part(self, dim: int, part: Parts) -> Arrangement:
        parts = list(self.parts)
        parts[dim] = part
        return replace(self, parts=tuple(parts))

    def layout(self, partition: Partition, columns: tuple[int, ...] | None) -> Layout:
        """As a layout; with columns, their numbers along the axes of the batch, behind the rest."""
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


def numel_sent(before: Arrangement, after: Arrangement, coordinates: Sequence[int]) -> int:
    """How many values a worker sends when a tensor is rearranged."""
    own, new = before.box(coordinates), after.box(coordinates)
    common = [boxes.overlap(a, b) for a, b in zip(own, new, strict=True)]
    stays = 0 if None in common else boxes.volume(tuple(each for each in common if each))
    return boxes.volume(own) - stays


def num_messages(before: Arrangement, after: Arrangement, coordinates: Sequence[int]) -> int:
    """How many others get something of a worker then."""
    own = before.box(coordinates)
    if not boxes.volume(own):
        return 0
    takers = 1
    for part, interval in zip(after.parts, own, strict=True):
        takers *= _num_meeting(part, interval)
    kept = boxes.volume(own) - numel_sent(before, after, coordinates)
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


def axes_in(grid: Shape, fine: Shape) -> tuple[tuple[int, ...], ...]:
    """Which axes of a refinement each axis of a grid stands for."""
    found, at = [], 0
    for size in grid:
        axes: tuple[int, ...] = ()
        while prod(fine[axis] for axis in axes) < size:
            axes, at = (*axes, at), at + 1
        found.append(axes)
    return tuple(found)
