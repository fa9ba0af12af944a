"""Windowed: the layout of a layer's input in which each worker can compute its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from tessel.core import boxes
from tessel.core.boxes import Box, Interval
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.move import Move
from tessel.core.numbers import constant
from tessel.core.shared import Replicate, anchored_zeros
from tessel.core.windows import Mirrored, ReceptiveField, reads
from tessel.transport import kept_in_job

Numbers = tuple[int, ...]  # one for each dimension of a window
ReceptiveFields = tuple[ReceptiveField | None, ...]


@dataclass(frozen=True)
class Windowed:
    """The plan of a windowed function from the layout `source` to the layout `target`.

    Each worker reads the box that its outputs read, clipped to the tensor: `fields[d]` is the
    receptive field along dimension d; if it is None, outputs read inputs of the same index.

    Args:
        source: the layout of the input.
        target: the layout of the output, on the same grid.
        fields: the receptive field of each dimension.
    """

    source: Layout
    target: Layout
    fields: ReceptiveFields

    @cached_property
    def read(self) -> Layout:
        """The boxes that the workers read."""
        cuts = tuple(
            Cut(cut.axes, tuple(reads(field, part, length) for part in cut.intervals))
            for field, cut, length in zip(
                self.fields, self.target.cuts, self.source.shape, strict=True
            )
        )
        return replace(self.target, shape=self.source.shape, cuts=cuts)

    @cached_property
    def move(self) -> Move:
        """The single exchange that brings each worker what it reads."""
        return Move(self.source, self.read)

    @cached_property
    def stays(self) -> bool:
        """Whether each worker reads exactly its part."""
        return self.source == self.read

    @cached_property
    def use(self) -> Replicate | None:
        """The use of a shared value if each worker has what it reads; else None."""
        alike = self.source.partition == self.read.partition and self.source.cuts == self.read.cuts
        return Replicate(self.source, self.read) if alike and not self.stays else None

    @cached_property
    def is_silent(self) -> bool:
        """Whether nothing is sent, neither values nor gradients."""
        own, wanted = self.source.box(), self.read.box()
        # A shared value may be read without a message, but its gradient is still a sum.
        plans = (*self.move.route, *self.move.H.route)
        return own is not None and wanted is not None and all(plan.silent for plan in plans)

    def fetch(self, x: Tensor) -> Tensor:
        """Bring this worker what it reads, given its part of the input."""
        if self.stays:
            return x
        if self.use is not None:
            return self.use.apply(x)  # without a copy, which a move would make
        if not self.is_silent or self.adds_zeros:  # a move gives zeros, a slice cannot
            return self.move.apply(x)
        own, wanted = self.source.box(), self.read.box()
        assert own is not None and wanted is not None
        if 0 in self.read.local_shape:
            shape = self.read.local_shape
            return x if tuple(x.shape) == shape else anchored_zeros(shape, x)
        return cropped(x, boxes.within(wanted, own))

    @cached_property
    def adds_zeros(self) -> bool:
        """Whether any worker reads an index that none stores."""
        return any(
            part[0] < min(start for start, _ in source.intervals)
            or part[1] > max(stop for _, stop in source.intervals)
            for source, read in zip(self.source.cuts, self.read.cuts, strict=True)
            for part in read.intervals
            if part[0] < part[1]
        )

    @property
    def overhang(self) -> tuple[Interval, ...]:
        """How far the windows of this worker extend beyond the tensor, on both sides."""
        box = self.target.box()
        assert box is not None
        return tuple(
            (0, 0) if field is None or part[0] == part[1] else overhang(field.hull(part), length)
            for field, part, length in zip(self.fields, box, self.source.shape, strict=True)
        )

    @cached_property
    def places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The order of indices along mirrored dimensions of which this worker reads the border.

        Places are counted from the first value that it reads.
        """
        outputs, inputs = self.target.box(), self.read.box()
        if outputs is None or inputs is None:
            return ()
        found = []
        for dim, (field, part, (start, stop)) in enumerate(
            zip(self.fields, outputs, inputs, strict=True)
        ):
            if isinstance(field, Mirrored) and part[0] < part[1]:
                places = tuple(index - start for index in field.places(part))
                if places != tuple(range(stop - start)):
                    found.append((dim, places))
        return tuple(found)

    def in_order(self, x: Tensor) -> Tensor:
        """The values under the windows, given those that were read, also beyond the border."""
        for dim, places in self.places:
            x = x.index_select(dim, constant(tuple(places), torch.int64, x.device))
        return x

    @cached_property
    def stays_whole(self) -> bool:
        """Whether this worker reads and computes everything, as one process would."""
        return self.target.local_shape == self.target.shape and (
            self.read.local_shape == self.source.shape
        )


def cropped(x: Tensor, region: Sequence[slice]) -> Tensor:
    """A region of the last dimensions of a tensor, sliced only where it is shorter.

    The gradient of a slice is a tensor of zeros of the size of x and a copy: too much if nothing is
    cut off.
    """
    for dim, part in enumerate(region, start=x.dim() - len(region)):
        if part.stop - part.start < x.shape[dim]:
            x = x.narrow(dim, part.start, part.stop - part.start)
    return x


def overhang(hull: Interval, length: int) -> Interval:
    """How far an interval extends beyond a tensor of this length, on both sides."""
    return max(0, -hull[0]), max(0, hull[1] - length)


@kept_in_job
def windowed(source: Layout, shape: Shape, field: ReceptiveFields) -> Windowed:
    """The plan from `source` to balanced parts of an output of this shape."""
    return Windowed(source, source.resized(shape), field)


@kept_in_job
def reading(source: Layout, target: Layout) -> Windowed:
    """The plan by which each worker reads its box of `target` of the same tensor."""
    return Windowed(source, target, (None,) * len(source.shape))


def leading(ndim: int, fields: Sequence[ReceptiveField | None]) -> ReceptiveFields:
    """Receptive fields of the last dimensions, and None for those before."""
    return (None,) * (ndim - len(fields)) + tuple(fields)


def origin(box: Box | None) -> tuple[int, ...]:
    """The first index of a box in each dimension."""
    return () if box is None else tuple(start for start, _ in box)


def outline(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without values, by which torch computes the shape of a result, or raises."""
    return torch.empty(shape, dtype=dtype, device="meta")


@lru_cache(maxsize=1024)
def shape_of(function: Callable[..., Tensor], *shapes: Shape) -> Shape:
    """The shape of the result of torch's function for these shapes; raises torch's own errors."""
    return tuple(function(*map(outline, shapes)).shape)


def hashable(value: Any) -> Any:
    """An argument of a torch function in hashable form: a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def tuple_of(value: Any, length: int) -> tuple[int, ...]:
    """A number for each of `length` dimensions, from one number or as many."""
    if isinstance(value, int):
        return (value,) * length
    numbers = tuple(value)
    return numbers * length if len(numbers) == 1 else numbers
