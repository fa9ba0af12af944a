"""Convolutions that are computed while their halo is in transit, and completed by strips.

A convolution is linear in its input: the result is the convolution of a worker's own part, padded
with zeros, plus the convolution of the strips around it. So the part is not copied into a larger
tensor, and it is convolved while the strips are in transit. The strips only affect the outputs near
the border.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from tessel.core.boxes import Interval, overlap
from tessel.core.halo import AsyncHalo, Halo, HaloBox
from tessel.core.layout import Layout
from tessel.core.numbers import constant
from tessel.core.shared import anchored_zeros
from tessel.core.windows import ReceptiveField, Window
from tessel.tensor.windowed import Numbers, Windowed
from tessel.transport import kept_in_job

# the convolution of a part with a padding; that of a strip, also with the taps along a dimension
OfPart = Callable[[Tensor, Numbers], Tensor]
OfStrip = Callable[[Tensor, Numbers, int, Interval], Tensor]

LEAST_VALUES = 1 << 15  # in a worker's part; a smaller one is copied faster
# The strips take some fifteen launches more; in this time a GPU copies about as many values.
LEAST_VALUES_ON_GPU = 1 << 25
LEAST_RATIO = 4  # of a part's size to that of the weight, whose gradient is summed over strips
LARGEST_SHARE = 0.25  # of outputs that read strips


@dataclass(frozen=True)
class Edge:
    """One side of a part: the strip beside it, and the outputs that read the strip.

    Attributes:
        dim: the dimension, counted from the end.
        outputs: the outputs along it, counted on this worker.
        taps: the entries of the kernel along it that reach into the strip.
        strip: the box that is read.
        padding: the padding for torch's convolution of the strip.
    """

    dim: int
    outputs: Interval
    taps: Interval
    strip: HaloBox
    padding: Numbers


@dataclass(frozen=True)
class Stripped:
    """A convolution by strips.

    Attributes:
        padding: the padding for torch's convolution of this worker's own part.
        edges: the sides whose results are added.
        halo: the operator that fetches the strips.
    """

    padding: Numbers
    edges: tuple[Edge, ...]
    halo: Halo

    def apply(self, x: Tensor, of_part: OfPart, of_strip: OfStrip) -> Tensor:
        """This worker's outputs; only `of_part` adds the bias."""
        halo = AsyncHalo(self.halo)
        own, token = halo.start(x)
        y = of_part(own, self.padding)
        flat = halo.wait(token)
        for edge, strip in zip(self.edges, self.halo.split(flat), strict=True):
            rows = constant(tuple(range(*edge.outputs)), torch.int64, x.device)
            y = y.index_add_(edge.dim, rows, of_strip(strip, edge.padding, edge.dim, edge.taps))
        if not self.edges:  # others may still read this part: the result depends on the halo
            none = constant((), torch.int64, x.device)
            nothing = anchored_zeros((*y.shape[:-1], 0), flat).to(y.dtype)  # autocast may change it
            y = y.index_add_(-1, none, nothing)
        return y


@kept_in_job
def stripped(
    source: Layout, target: Layout, windows: tuple[Window, ...], least: int, share: float
) -> Stripped | None:
    """The convolution by strips; None if any worker cannot compute it, or if it is slower.

    Args:
        source: the layout of the input.
        target: the layout of the outputs.
        windows: the window along each dimension of space.
        least: the least number of values in a worker's part.
        share: the largest share of outputs that may read strips.
    """
    D = len(windows)
    lead = len(source.shape) - D
    if source.cuts[: lead - 1] != target.cuts[: lead - 1] or source.is_split(lead - 1):
        return None
    if prod(source.shape) < least * source.partition.size:
        return None
    split = [d for d in range(D) if source.is_split(lead + d)]
    sides = {
        d: [
            _side(windows[d], part, outputs, source.shape[lead + d])
            for part, outputs in zip(
                source.cuts[lead + d].intervals, target.cuts[lead + d].intervals, strict=True
            )
        ]
        for d in split
    }
    if not split or any(each is None for parts in sides.values() for each in parts):
        return None
    # the number of outputs that read values of others along each dimension
    concerned = {
        d: sum(stop - start for each in sides[d] if each for start, stop in (each.left, each.right))
        for d in split
    }
    if sum(concerned[d] / max(1, target.shape[lead + d]) for d in split) > share:
        return None
    field: tuple[ReceptiveField | None, ...] = (*[None] * (lead - 1), None, *windows)
    inputs = target.resized(
        (*target.shape[: lead - 1], source.shape[lead - 1], *target.shape[lead:])
    )
    read = Windowed(source, inputs, field).read
    geometry = _Geometry(source, target, read, windows)
    everyones = tuple(geometry.edges(worker) for worker in source.partition.ranks)
    halo = Halo(source, read, tuple(tuple(e.strip for e in each) for each in everyones))
    place = source.partition.rank
    assert place is not None
    worker = source.partition.ranks[place]
    return Stripped(geometry.padding(worker), everyones[place], halo)


@dataclass(frozen=True)
class _Side:
    """For one part, along one dimension: torch's padding, and the outputs that read other parts."""

    padding: int
    left: Interval
    right: Interval


def _side(window: Window, part: Interval, outputs: Interval, length: int) -> _Side | None:
    """The sides of a part; None if torch's convolution of it has another number of outputs."""
    (a, b), (i, j) = part, outputs
    padding = a - window.first(i)
    span = window.dilation * (window.kernel - 1) + 1
    if i == j or padding < 0 or b - a + 2 * padding < span:
        return None
    if (b - a + 2 * padding - span) // window.stride + 1 != j - i:
        return None
    first = max(i, ceil((b - window.last(0)) / window.stride))  # the first that reads b or more
    stop = min(j, ceil((a - window.first(0)) / window.stride))  # after the last that reads below a
    left = (i, stop) if a > 0 and stop > i else (i, i)
    right = (first, j) if b < length and first < j else (j, j)
    return _Side(padding, left, right)


@dataclass(frozen=True)
class _Geometry:
    source: Layout
    target: Layout
    read: Layout
    windows: tuple[Window, ...]

    @property
    def lead(self) -> int:
        return len(self.source.shape) - len(self.windows)

    def side(self, worker: int, d: int) -> _Side:
        own, outputs = self.source.box(worker), self.target.box(worker)
        assert own is not None and outputs is not None
        dim = self.lead + d
        side = _side(self.windows[d], own[dim], outputs[dim], self.source.shape[dim])
        assert side is not None
        return side

    def padding(self, worker: int) -> Numbers:
        """The padding for torch's convolution of a worker's own part."""
        return tuple(
            self.side(worker, d).padding if self._is_split(d) else window.before
            for d, window in enumerate(self.windows)
        )

    def _is_split(self, d: int) -> bool:
        return self.source.is_split(self.lead + d)

    def edges(self, worker: int) -> tuple[Edge, ...]:
        """The edges of a worker, dimension by dimension.

        The strip of an edge spans the own part along earlier dimensions, and along later ones
        everything that the worker reads.
        """
        found = []
        for d in range(len(self.windows)):
            if self._is_split(d):
                side = self.side(worker, d)
                for outputs in (side.left, side.right):
                    if outputs[0] < outputs[1]:
                        found.append(self._edge(worker, d, outputs, outputs is side.right))
        return tuple(found)

    def _edge(self, worker: int, d: int, outputs: Interval, is_right: bool) -> Edge:
        own, read, out = (each.box(worker) for each in (self.source, self.read, self.target))
        assert own is not None and read is not None and out is not None
        padding = list(self.padding(worker))
        taps = (0, 0)
        box: list[Interval] = list(own)
        covered: list[Interval] = list(own)  # the box with zeros around it
        for e in range(d, len(self.windows)):
            dim = self.lead + e
            if e == d:
                halo = (own[dim][1], read[dim][1]) if is_right else (read[dim][0], own[dim][0])
                window = self.windows[e]
                first, last = (window.first(output) for output in (outputs[0], outputs[1] - 1))
                # the entries of the kernel that reach beyond the part for some of these outputs
                if is_right:
                    taps = max(0, ceil((own[dim][1] - last) / window.dilation)), window.kernel
                else:
                    reach = ceil((own[dim][0] - first) / window.dilation)
                    taps = 0, min(window.kernel, reach)
                # the inputs of these outputs through these entries of the kernel
                covered[dim] = (
                    first + window.dilation * taps[0],
                    last + window.dilation * (taps[1] - 1) + 1,
                )
                box[dim] = overlap(halo, covered[dim]) or (halo[0], halo[0])
                padding[e] = 0
            elif self._is_split(e):
                box[dim], covered[dim] = read[dim], self.windows[e].hull(out[dim])
                padding[e] = 0
        strip = HaloBox(
            tuple(start for start, _ in covered),
            tuple(stop - start for start, stop in covered),
            tuple(box),
        )
        begin = out[self.lead + d][0]
        local = (outputs[0] - begin, outputs[1] - begin)
        return Edge(d - len(self.windows), local, taps, strip, tuple(padding))
