"""Tiling: the windows through which a prior sees a large image. Pure integers.

A window has a core, which it answers for, and a box that it reads: the core and a halo around it,
which covers the receptive field of the prior. At the border of the image windows are shifted
inwards, never padded, so that the prior sees the true border, as it does in the whole image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tessel.core import boxes
from tessel.core.boxes import Box, Interval

Pair = tuple[Interval, Interval]  # a core and what is read for it


@dataclass(frozen=True)
class PriorWindow:
    """What one call of a prior answers for, and what it reads for that.

    Args:
        core: the box of the image that the window answers for; cores cover the image once.
        read: the box that it reads, which holds the core.
    """

    core: Box
    read: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it reads."""
        return boxes.extent(self.read)

    @property
    def inside(self) -> boxes.Region:
        """Where the core lies in what is read."""
        return boxes.within(self.core, self.read)


def tiles(
    shape: Sequence[int],
    patch: Sequence[int],
    halo: Sequence[int],
    stride: Sequence[int],
) -> list[PriorWindow]:
    """Windows with cores of the size `patch`, row by row; those at the end may be smaller.

    All windows of a dimension read equally many indices, `patch + 2·halo` or all there are,
    unless its length is no multiple of the stride: then those at the end read a few more or less.

    Args:
        shape: of the image.
        patch: the length of a core in each dimension.
        halo: read on each side of it.
        stride: windows start at multiples of this, and end there or with the image.

    >>> [window.read for window in tiles((10,), (4,), (1,), (1,))]
    [((0, 6),), ((3, 9),), ((4, 10),)]
    """
    along = [tiles_along(*numbers) for numbers in zip(shape, patch, halo, stride, strict=True)]
    return crossed(along)


def parts(shape: Sequence[int], counts: Sequence[int], halo: Sequence[int]) -> list[PriorWindow]:
    """Windows whose cores are balanced parts, read with a halo that ends at the border.

    >>> [window.read for window in parts((10,), (2,), (1,))]
    [((0, 6),), ((4, 10),)]
    """
    along = [
        [(core, boxes.grow(core, edge, edge, length)) for core in boxes.balanced(length, count)]
        for length, count, edge in zip(shape, counts, halo, strict=True)
    ]
    return crossed(along)


def tiles_along(length: int, patch: int, halo: int, stride: int) -> list[tuple[Interval, Interval]]:
    """The cores and what is read for them, along one dimension."""
    slack = 0 if patch % stride == halo % stride == 0 else stride - 1  # lost by aligned starts
    width = -(-(patch + 2 * halo + slack) // stride) * stride  # rounded up to a multiple
    found = []
    for start in range(0, length, patch):
        core = start, min(start + patch, length)
        begin = _down(max(start - halo, 0), stride)
        # At the border the window is shifted inwards, not made smaller: all windows have one shape
        # and go to the prior in one batch, and it sees the border as it is in the whole image.
        if begin + width >= length:
            read = _down(max(length - width, 0), stride), length
        else:
            read = begin, begin + width
        found.append((core, read))
    return found


def crossed(along: Sequence[Sequence[Pair]]) -> list[PriorWindow]:
    """The windows of all dimensions together, from those along each."""
    return [
        PriorWindow(tuple(core for core, _ in chosen), tuple(read for _, read in chosen))
        for chosen in product(*along)
    ]


def ramps(reads: Sequence[Interval], length: int) -> list[list[float]]:
    """Weights of windows along one dimension, which sum to one at each index.

    The weight of a window falls towards those of its ends that lie inside of the image, in
    proportion to the distance: w_k(i) = d_k(i) / Σ_j d_j(i).

    >>> ramps([(0, 3), (1, 4)], 4)
    [[1.0, 0.6666666666666666, 0.3333333333333333], [0.3333333333333333, 0.6666666666666666, 1.0]]
    """
    sums = [0] * length
    for read in reads:
        for i, distance in enumerate(_distances(read, length), read[0]):
            sums[i] += distance
    return [
        [distance / sums[i] for i, distance in enumerate(_distances(read, length), read[0])]
        for read in reads
    ]


def _distances(read: Interval, length: int) -> list[int]:
    start, stop = read
    before = [length if start == 0 else i - start + 1 for i in range(start, stop)]
    after = [length if stop == length else stop - i for i in range(start, stop)]
    return [min(pair) for pair in zip(before, after, strict=True)]


def _down(index: int, stride: int) -> int:
    return index // stride * stride
