"""Boxes of a global index space: pure integers, no tensors, no communication.

An interval is a half-open pair `(start, stop)`; a box is one interval for each dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any

Interval = tuple[int, int]
Box = tuple[Interval, ...]
Region = tuple[slice, ...]
Shape = tuple[int, ...]


def consecutive(lengths: Iterable[int]) -> tuple[Interval, ...]:
    """Intervals of these lengths, one after the other from zero.

    >>> consecutive([3, 0, 2])
    ((0, 3), (3, 3), (3, 5))
    """
    return tuple(pairwise([0, *accumulate(lengths)]))


def balanced(length: int, parts: int) -> tuple[Interval, ...]:
    """Split `length` into `parts` intervals; the first `length % parts` are one longer.

    >>> balanced(10, 4)
    ((0, 3), (3, 6), (6, 8), (8, 10))
    """
    short, longer = divmod(length, parts)
    return consecutive(short + (part < longer) for part in range(parts))


def chunked(length: int, parts: int) -> tuple[Interval, ...]:
    """Consecutive parts as `torch.chunk` and DTensor's `Shard` cut them: the last are shorter.

    >>> from tessel.core.boxes import chunked
    >>> chunked(10, 4)
    ((0, 3), (3, 6), (6, 9), (9, 10))
    """
    size = -(-length // parts)
    return tuple((min(length, k * size), min(length, (k + 1) * size)) for k in range(parts))


def balanced_part(length: int, parts: int, place: int) -> Interval:
    """One of the intervals of `balanced`.

    >>> balanced_part(10, 4, 1)
    (3, 6)
    """
    short, longer = divmod(length, parts)
    start = place * short + min(place, longer)
    return start, start + short + (place < longer)


def balanced_place(length: int, parts: int, index: int) -> int:
    """The number of the interval of `balanced` that contains an index.

    >>> balanced_place(10, 4, 5)
    1
    """
    short, longer = divmod(length, parts)
    long = longer * (short + 1)  # where the longer intervals end
    return index // (short + 1) if index < long else longer + (index - long) // short


@dataclass(frozen=True, eq=False, repr=False)
class Balanced(Sequence[Interval]):
    """The intervals of `balanced`, computed when they are needed.

    It is equal to the tuple that `balanced` returns. With it, plans for a hundred thousand workers
    cost as little as plans for two.

    >>> Balanced(10, 4)[2], Balanced(10, 4) == balanced(10, 4)
    ((6, 8), True)
    """

    length: int
    parts: int

    def __len__(self) -> int:
        return self.parts

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self[place] for place in range(*at.indices(self.parts)))
        if not -self.parts <= at < self.parts:
            raise IndexError(f"there are {self.parts} parts, got {at}")
        return balanced_part(self.length, self.parts, at % self.parts)

    def __iter__(self) -> Iterator[Interval]:
        return iter(balanced(self.length, self.parts))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Balanced):
            return (self.length, self.parts) == (other.length, other.parts)
        if not isinstance(other, tuple) or len(other) != self.parts:
            return False
        return all(self[place] == part for place, part in enumerate(other))

    def __hash__(self) -> int:
        return hash(tuple(self))  # as that of the tuple, to which it is equal

    def __repr__(self) -> str:
        return repr(tuple(self))


def balanced_as(intervals: Sequence[Interval], length: int) -> Sequence[Interval]:
    """As many balanced parts of another length, listed only if the intervals are."""
    split = Balanced if isinstance(intervals, Balanced) else balanced
    return split(length, len(intervals))


def shift(interval: Interval, offset: int) -> Interval:
    """Move an interval by `offset`."""
    return interval[0] + offset, interval[1] + offset


def overlap(a: Interval, b: Interval) -> Interval | None:
    """The indices that two intervals share, or None.

    >>> overlap((0, 5), (3, 9)), overlap((0, 3), (3, 9))
    ((3, 5), None)
    """
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def all_overlap(some: Sequence[Interval], others: Sequence[Interval]) -> bool:
    """Whether each interval of `some` shares an index with each of `others`.

    >>> all_overlap([(0, 2), (2, 4)], [(0, 4)]), all_overlap([(0, 2), (2, 4)], [(0, 2)])
    (True, False)
    """
    if any(start == stop for start, stop in (*some, *others)):
        return False
    # Two intervals overlap if each starts before the other stops. So the last start and the first
    # stop decide for all pairs, without a look at each.
    starts, stops = zip(*some, strict=True)
    other_starts, other_stops = zip(*others, strict=True)
    return max(starts) < min(other_stops) and max(other_starts) < min(stops)


def grow(interval: Interval, left: int, right: int, length: int) -> Interval:
    """Widen an interval on both sides, no further than `[0, length)`; an empty one stays empty.

    >>> grow((3, 5), 1, 2, 6), grow((3, 3), 1, 2, 6)
    ((2, 6), (3, 3))
    """
    start, stop = interval
    return (max(0, start - left), min(length, stop + right)) if start < stop else interval


def disjoint(intervals: Sequence[Interval]) -> bool:
    """Whether no index is in two of the intervals."""
    # in order, only neighbors can overlap, if those before them do not
    filled = sorted(interval for interval in intervals if interval[0] < interval[1])
    return all(a[1] <= b[0] for a, b in pairwise(filled))


def extent(box: Box) -> tuple[int, ...]:
    """The length of a box along each dimension."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """The number of indices in a box."""
    return math.prod(extent(box))


def intersection(a: Box, b: Box | None) -> Box | None:
    """The indices that two boxes share, or None; with nothing, nothing.

    >>> intersection(((0, 5), (0, 2)), ((3, 9), (1, 2)))
    ((3, 5), (1, 2))
    """
    parts = [] if b is None else list(map(overlap, a, b))
    return None if b is None or None in parts else tuple(part for part in parts if part)


def common_volume(a: Box, b: Box) -> int:
    """The number of indices that two boxes share.

    >>> common_volume(((0, 5), (0, 2)), ((3, 9), (1, 2)))
    2
    """
    pairs = zip(a, b, strict=True)
    return math.prod(max(0, min(p[1], q[1]) - max(p[0], q[0])) for p, q in pairs)


def within(part: Box, box: Box) -> Region:
    """The position of `part` in a tensor that stores `box`.

    >>> within(((4, 6),), ((3, 9),))
    (slice(1, 3, None),)
    """
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(part, box, strict=True)
    )


def runs(shape: Sequence[int], limit: int) -> tuple[Box, ...]:
    """Cut a tensor into boxes of at most `limit` indices, each contiguous in memory, in order.

    >>> runs((4, 3), 6)
    (((0, 2), (0, 3)), ((2, 4), (0, 3)))
    >>> runs((2, 3), 2)
    (((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3)))
    """
    # As many trailing dimensions as fit are taken whole; the one before them is cut into parts, and
    # those before that one are taken index by index.
    inner, dim = 1, len(shape)
    while dim and inner * shape[dim - 1] <= limit:
        inner *= shape[dim - 1]
        dim -= 1
    whole = [(0, length) for length in shape]
    if not dim or 0 in shape:
        return (tuple(whole),)
    length = shape[dim - 1]
    parts = balanced(length, -(-length // (limit // inner)))
    outer = product(*(range(length) for length in shape[: dim - 1]))
    return tuple(
        (*((at, at + 1) for at in place), part, *whole[dim:]) for place in outer for part in parts
    )


def ravel(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """The row-major position of `coordinates` on a grid of these sizes.

    >>> ravel((1, 2), (2, 3))
    5
    """
    position = 0
    for coordinate, size in zip(coordinates, sizes, strict=True):
        position = position * size + coordinate
    return position


def unravel(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The coordinates at a row-major `position`, the inverse of `ravel`.

    >>> unravel(5, (2, 3))
    (1, 2)
    """
    coordinates = []
    for size in reversed(sizes):
        position, coordinate = divmod(position, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))
