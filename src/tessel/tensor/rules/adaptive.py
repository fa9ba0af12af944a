"""Adaptive pools: windows of unequal size, one for each index of the output.

A worker either fetches the inputs that its outputs read, or pools its own inputs and sends these
partial results to the worker of the output. Along each dimension, the way that sends the fewest
bytes is chosen: a pool to a small output sends one value for each part instead of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, product
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core import boxes
from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.move import Move
from tessel.core.numbers import constant
from tessel.core.shared import anchored_zeros
from tessel.core.windows import AdaptiveWindow, reads
from tessel.tensor.rules.pools import global_places
from tessel.tensor.rules.reductions import argument
from tessel.tensor.table import Arguments, Settings, made, opened, rule
from tessel.tensor.windowed import Numbers, ReceptiveFields, Windowed, hashable, leading, outline
from tessel.transport import kept_in_job

Sizes = int | None | tuple[int | None, ...]
Maxima = tuple[Tensor, Tensor]  # values and their flat indices in the whole tensor
_AVERAGES: tuple[Any, ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_MAXIMA: tuple[Any, ...] = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
_FIXED_MAXIMA: tuple[Any, ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
PoolSpans = Callable[[Tensor, Sequence["Spans"]], tuple[Tensor, ...]]
_INDEX_BYTES = 8
_FEW = 64  # so many calls of torch's own pool are faster than windows extended to equal sizes
_MANY = torch.iinfo(torch.int64).max


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def average_pool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Pool to the mean of each window."""
    x, layout = opened(args[0])
    num_dims = int(name[-2])
    sizes = hashable(argument(args, kwargs, 1, "output_size"))
    shape = _pooled_shape(_AVERAGES[num_dims - 1], layout.shape, x.dtype, sizes)
    return made(*average(x, layout, shape, num_dims))


_MAX_POOLS = ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")


@rule(*_MAX_POOLS, *(f"{name}_with_indices" for name in _MAX_POOLS))
def maximum_pool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Pool to the largest value of each window, optionally with its flat index in the tensor."""
    x, layout = opened(args[0])
    num_dims = int(name[len("adaptive_max_pool")])
    given = dict(zip(("output_size", "return_indices"), args[1:], strict=False)) | kwargs
    with_places = name.endswith("_with_indices") or given.get("return_indices", False)
    with_places |= isinstance(func, BuiltinFunctionType)  # torch's own below F, in exported graphs
    sizes = hashable(given["output_size"])
    pool = _MAXIMA[num_dims - 1]
    shape = _pooled_shape(pool, layout.shape, x.dtype, sizes)
    way = best_way(layout, shape, num_dims, (x.element_size(), _INDEX_BYTES))
    x = way.fetch.fetch(x)
    if way.stays_whole:
        values, places = pool(x, sizes, return_indices=True)
    else:
        values, places = _maximum(x, way, with_places)
    if any(way.partial):
        values, places = way.stack.largest(values, places)
    if not with_places:
        return made(values, way.target)
    return made(values, way.target), made(places, way.target)


@lru_cache(maxsize=1024)
def _pooled_shape(pool: Any, shape: Shape, dtype: torch.dtype, sizes: Sizes) -> Shape:
    """The shape of the whole output; raises torch's own error if the tensor cannot be pooled."""
    if dtype not in (torch.float32, torch.float64):  # torch rejects dtypes only if there are values
        pool(torch.ones((1,) * len(shape), dtype=dtype), sizes)
    x = outline(shape) if math.prod(shape) else torch.empty(shape)  # for its more precise errors
    return tuple(pool(x, sizes).shape)


def average(x: Tensor, layout: Layout, shape: Shape, num_dims: int) -> tuple[Tensor, Layout]:
    """The means of the windows of an adaptive pool to a global shape, and their layout."""
    way = best_way(layout, shape, num_dims, (x.element_size(), 0))
    x = way.fetch.fetch(x)
    if way.stays_whole:
        return _AVERAGES[num_dims - 1](x, shape[-num_dims:]), way.target
    # this worker's share of the means
    if not math.prod(way.pooled.local_shape):
        y = anchored_zeros(way.pooled.local_shape, x)
    elif way.in_few_runs:
        (y,) = _joined(x, way.spans, _fitting_average)
    else:
        # torch's own kernels, too, sum half precision in single precision
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        for dim, spans in enumerate(way.spans, x.ndim - num_dims):
            if not spans.fits:
                # windows extended to equal length, one after the other: each is a row to be summed
                rows = wide.index_select(dim, constant(spans.indices, torch.int64, x.device))
                rows = rows * _along(constant(spans.weights, wide.dtype, x.device), dim, x.ndim)
                wide = rows.unflatten(dim, (-1, spans.longest)).sum(dim + 1)
        y = _fitting_average(wide, way.spans)[0].to(x.dtype)
    return (way.sum.apply(y) if any(way.partial) else y), way.target


@dataclass(frozen=True)
class Way:
    """The way from a tensor in the layout `source` to a pooled one in balanced parts.

    Along a dimension that is `partial`, workers pool the inputs that they have, and the results are
    combined later; along the others they first fetch the inputs that their outputs read.

    Args:
        source: the layout of the input.
        target: the layout of the output, on the same grid.
        field: the window along each dimension, or None.
        partial: whether each dimension is partial.
    """

    source: Layout
    target: Layout
    field: ReceptiveFields
    partial: tuple[bool, ...]

    @cached_property
    def num_dims(self) -> int:
        return sum(field is not None for field in self.field)

    @cached_property
    def fetch(self) -> Windowed:
        """The plan that brings each worker the inputs that it pools."""
        cuts, shape, field = [], [], []
        for dim, partial in enumerate(self.partial):
            side = self.source if partial else self.target
            cuts.append(side.cuts[dim])
            shape.append(side.shape[dim])
            field.append(None if partial else self.field[dim])
        target = replace(self.target, shape=tuple(shape), cuts=tuple(cuts))
        return Windowed(self.source, target, tuple(field))

    @cached_property
    def pooled(self) -> Layout:
        """The layout of the outputs that each worker has a term of, as separate values."""
        cuts = list(self.target.cuts)
        for dim, (field, length) in enumerate(zip(self.field, self.target.shape, strict=True)):
            if self.partial[dim]:
                # The outputs that read a part are found by the window from outputs to inputs.
                have = self.source.cuts[dim]
                inverse = None
                if isinstance(field, AdaptiveWindow):
                    inverse = AdaptiveWindow(inputs=field.outputs, outputs=field.inputs)
                touched = tuple(reads(inverse, part, length) for part in have.intervals)
                cuts[dim] = Cut(have.axes, touched)
        return replace(self.target, cuts=tuple(cuts))

    @cached_property
    def sum(self) -> Move:
        """The movement that adds the terms of each output."""
        return Move(self.pooled, self.target)

    @cached_property
    def stack(self) -> Stack:
        """The movement that brings the terms of each output together, side by side."""
        return Stack(self.pooled, self.target, self.partial)

    @cached_property
    def stays_whole(self) -> bool:
        """Whether this worker pools whole dimensions, as one process would."""
        D = self.num_dims
        held, outputs = self.fetch.read.local_shape, self.target.local_shape
        if any(self.partial) or not math.prod(outputs):
            return False
        return held[-D:] == self.source.shape[-D:] and outputs[-D:] == self.target.shape[-D:]

    @cached_property
    def spans(self) -> tuple[Spans, ...]:
        """The windows of this worker's outputs, one for each pooled dimension."""
        held, outputs = self.fetch.read.box(), self.pooled.box()
        assert held is not None and outputs is not None
        return tuple(
            Spans.of(field, have, want)
            for field, have, want in zip(self.field, held, outputs, strict=True)
            if isinstance(field, AdaptiveWindow)
        )

    @cached_property
    def in_few_runs(self) -> bool:
        """Whether torch's own adaptive pool computes this worker's outputs in a few calls."""
        return math.prod(len(spans.runs) for spans in self.spans) <= _FEW

    def num_bytes(self, width: int, extra: int) -> int:
        """The number of bytes sent, with `width` for a value and `extra` more for a term."""
        fetched = width * traffic(self.source, self.fetch.read)
        if not any(self.partial):
            return fetched
        if not extra:
            return fetched + width * traffic(self.pooled, self.target)
        return fetched + (width + extra) * traffic(self.stack.source, self.stack.target)


@kept_in_job
def best_way(source: Layout, shape: Shape, num_dims: int, widths: tuple[int, int]) -> Way:
    """The way that sends the fewest bytes; among equal ones, with the fewest partial dimensions.

    Args:
        source: the layout of the input.
        shape: the global shape of the output.
        num_dims: the number of last dimensions that are pooled.
        widths: the bytes of a value, and the additional bytes of a term of an output.
    """
    target = source.resized(shape)
    windows = [
        AdaptiveWindow(n, m)
        for n, m in zip(source.shape[-num_dims:], shape[-num_dims:], strict=True)
    ]
    choices = [(False, True) if len(cut.intervals) > 1 else (False,) for cut in source.cuts]
    field = leading(len(shape), windows)
    ways = [Way(source, target, field, partial) for partial in product(*choices)]
    return min(ways, key=lambda way: (way.num_bytes(*widths), sum(way.partial)))


def traffic(source: Layout, target: Layout) -> int:
    """The number of values that change workers, for layouts with the same axes on one grid."""
    # The overlap of two boxes is a product over dimensions, so the sum over all pairs of workers is
    # a product of sums: intervals are compared, never boxes.
    cuts = list(zip(source.cuts, target.cuts, strict=True))
    everything = (
        sum(_common(a, b) for a, b in product(have.intervals, want.intervals))
        for have, want in cuts
    )
    own = (
        sum(_common(a, b) for a, b in zip(have.intervals, want.intervals, strict=True))
        for have, want in cuts
    )
    return math.prod(everything) - math.prod(own)


def _common(a: Interval, b: Interval) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


@dataclass(frozen=True)
class Spans:
    """Windows along one dimension, clipped to the inputs that a worker holds.

    Attributes:
        windows: the interval that each output reads, counted from the first held index.
        counts: the number of inputs that each output reads in the whole tensor.
        held: the inputs that the worker holds.
    """

    windows: tuple[Interval, ...]
    counts: Numbers
    held: Interval

    @classmethod
    def of(cls, window: AdaptiveWindow, held: Interval, outputs: Interval) -> Spans:
        """The windows of an interval of outputs of the whole tensor."""
        hulls = [window.hull((i, i + 1)) for i in range(*outputs)]
        windows = [boxes.overlap(hull, held) or (held[0], held[0]) for hull in hulls]
        return cls(
            tuple(boxes.shift(each, -held[0]) for each in windows),
            tuple(stop - start for start, stop in hulls),
            held,
        )

    @cached_property
    def fits(self) -> bool:
        """Whether torch's own adaptive pool of the held inputs has the same windows."""
        local = AdaptiveWindow(self.held[1] - self.held[0], len(self.windows))
        return all(local.hull((i, i + 1)) == span for i, span in enumerate(self.windows))

    @cached_property
    def runs(self) -> tuple[Spans, ...]:
        """The windows in groups of adjacent ones that fit, each as long as possible."""
        if self.fits:
            return (self,)
        runs, start = [], 0
        while start < len(self.windows):
            stop = start + 1  # a single window spans all that it holds: it fits
            while stop < len(self.windows) and self._group(start, stop + 1).fits:
                stop += 1
            runs.append(self._group(start, stop))
            start = stop
        return tuple(runs)

    def _group(self, start: int, stop: int) -> Spans:
        windows = self.windows[start:stop]
        first, last = windows[0][0], windows[-1][1]
        return Spans(
            tuple(boxes.shift(each, -first) for each in windows),
            self.counts[start:stop],
            boxes.shift((first, last), self.held[0]),
        )

    @cached_property
    def longest(self) -> int:
        return max(stop - start for start, stop in self.windows)

    @cached_property
    def indices(self) -> Numbers:
        """All windows one after the other, extended to equal length by repeating the last index."""
        return tuple(
            min(start + t, stop - 1) for start, stop in self.windows for t in range(self.longest)
        )

    @cached_property
    def global_indices(self) -> Numbers:
        """The same in the whole tensor."""
        return tuple(self.held[0] + index for index in self.indices)

    @cached_property
    def inputs(self) -> Numbers:
        """All held indices, in the whole tensor."""
        return tuple(range(*self.held))

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """The weights that turn a sum over `indices` into this worker's term of a mean."""
        # the last index of a window is repeated: its weight is divided among the repetitions
        return tuple(
            1 / count / (1 if start + t < stop - 1 else self.longest - (stop - 1 - start))
            for (start, stop), count in zip(self.windows, self.counts, strict=True)
            for t in range(self.longest)
        )

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The fraction of each output's inputs that is held."""
        return tuple(
            (stop - start) / count
            for (start, stop), count in zip(self.windows, self.counts, strict=True)
        )

    @cached_property
    def holds_less(self) -> bool:
        """Whether any window is only held in part."""
        return any(share != 1 for share in self.shares)


def _joined(x: Tensor, all_spans: Sequence[Spans], pool: PoolSpans) -> tuple[Tensor, ...]:
    """The concatenated results of `pool` for all groups of windows that fit."""
    misfit = next((at for at, spans in enumerate(all_spans) if not spans.fits), None)
    if misfit is None:
        return pool(x, all_spans)
    dim, spans = x.ndim - len(all_spans) + misfit, all_spans[misfit]
    parts = [
        _joined(
            x.narrow(dim, run.held[0] - spans.held[0], run.held[1] - run.held[0]),
            [*all_spans[:misfit], run, *all_spans[misfit + 1 :]],
            pool,
        )
        for run in spans.runs
    ]
    return tuple(torch.cat(each, dim) for each in zip(*parts, strict=True))


def _fitting_average(x: Tensor, all_spans: Sequence[Spans]) -> tuple[Tensor]:
    """The means along dimensions whose windows fit; along others they are computed already."""
    D = len(all_spans)
    y = _AVERAGES[D - 1](x, tuple(len(spans.windows) for spans in all_spans))
    for dim, spans in enumerate(all_spans, x.ndim - D):
        if spans.fits and spans.holds_less:
            y = y * _along(constant(spans.shares, y.dtype, x.device), dim, x.ndim)
    return (y,)


def _along(values: Tensor, dim: int, ndim: int) -> Tensor:
    """Values along one dimension, in a shape to be broadcast along the others."""
    return values.view([-1 if each == dim else 1 for each in range(ndim)])


def _maximum(x: Tensor, way: Way, with_places: bool) -> Maxima:
    """The largest values of this worker's windows, and their flat indices if these are needed."""
    shape = way.pooled.local_shape
    if not math.prod(shape):
        values = anchored_zeros(shape, x)
        return values, values.detach().long()
    with_places = with_places or any(way.partial)
    lengths = way.source.shape[-way.num_dims :]

    def pool(x: Tensor, all_spans: Sequence[Spans]) -> Maxima:
        fits = all(spans.fits for spans in all_spans)
        if fits:
            sizes = tuple(len(spans.windows) for spans in all_spans)
            result: Any = _MAXIMA[len(sizes) - 1](x, sizes, return_indices=with_places)
        else:  # torch's pool over adjacent windows, so that ties are resolved as in torch
            for dim, spans in enumerate(all_spans, x.ndim - len(all_spans)):
                x = x.index_select(dim, constant(spans.indices, torch.int64, x.device))
            kernel = tuple(spans.longest for spans in all_spans)
            pooled = _FIXED_MAXIMA[len(kernel) - 1]
            result = pooled(x, kernel, kernel, return_indices=with_places)
        if not with_places:
            return result, result.detach()
        values, places = result
        looked_up = [spans.inputs if fits else spans.global_indices for spans in all_spans]
        tables = [constant(indices, torch.int64, x.device) for indices in looked_up]
        local = [len(indices) for indices in looked_up]
        return values, global_places(places, local, lengths, [t.__getitem__ for t in tables])

    values, places = _joined(x, way.spans, pool) if way.in_few_runs else pool(x, way.spans)
    return values, places


@dataclass(frozen=True)
class Stack:
    """The movement of overlapping terms of outputs to the workers of the outputs, without a sum.

    The boxes of `pooled` are concatenated along each partial dimension.

    Args:
        pooled: the layout of the terms.
        outputs: the layout of the outputs, on the same grid.
        partial: whether outputs are split into terms along each dimension.
    """

    pooled: Layout
    outputs: Layout
    partial: tuple[bool, ...]

    @cached_property
    def source(self) -> Layout:
        """The layout of the terms as disjoint boxes."""
        cuts = [
            Cut(cut.axes, boxes.consecutive(stop - start for start, stop in cut.intervals))
            if partial
            else cut
            for partial, cut in zip(self.partial, self.pooled.cuts, strict=True)
        ]
        shape = (
            cut.intervals[-1][1] if partial else length
            for partial, cut, length in zip(self.partial, cuts, self.pooled.shape, strict=True)
        )
        return replace(self.pooled, shape=tuple(shape), cuts=tuple(cuts))

    @cached_property
    def target(self) -> Layout:
        """The layout in which each worker has all terms of its outputs, from first to last."""
        cuts = list(self.outputs.cuts)
        for dim, want in enumerate(self.outputs.cuts):
            if self.partial[dim]:
                parts = self.pooled.cuts[dim]
                each = [list(chain(*_positions(parts, some))) for some in want.intervals]
                hulls = tuple((min(some), max(some) + 1) if some else (0, 0) for some in each)
                cuts[dim] = Cut(want.axes, hulls)
        return replace(self.source, cuts=tuple(cuts))

    @cached_property
    def move(self) -> Move:
        return Move(self.source, self.target)

    @cached_property
    def tables(self) -> tuple[tuple[Numbers, int] | None, ...]:
        """For each dimension, the positions of each output's terms among the gathered ones.

        All outputs have the same number of them, one after the other: the last is repeated.
        """
        outputs, gathered = self.outputs.box(), self.target.box()
        assert outputs is not None and gathered is not None
        found: list[tuple[Numbers, int] | None] = []
        for partial, parts, want, (start, _) in zip(
            self.partial, self.pooled.cuts, outputs, gathered, strict=True
        ):
            lists = _positions(parts, want) if partial else []
            most = max(map(len, lists), default=1)
            each = (some[min(k, len(some) - 1)] - start for some in lists for k in range(most))
            found.append((tuple(each), most) if partial else None)
        return tuple(found)

    def side_by_side(self, x: Tensor) -> Tensor:
        """The gathered terms of each output, along a new last dimension."""
        for dim, table in reversed(list(enumerate(self.tables))):
            if table is not None:
                indices, most = table
                x = x.index_select(dim, constant(indices, torch.int64, x.device))
                x = x.unflatten(dim, (-1, most)).movedim(dim + 1, -1)
        return x.flatten(len(self.tables))

    def largest(self, values: Tensor, places: Tensor) -> Maxima:
        """Among the terms of each output, the one that torch would choose in the whole window.

        It is the first of equal values, or the last NaN.
        """
        values, places = self.move.apply(values), self.move.apply(places)
        shape = self.outputs.local_shape
        if not math.prod(shape):
            return anchored_zeros(shape, values), places.new_empty(shape)
        values, places = self.side_by_side(values), self.side_by_side(places)
        with torch.no_grad():
            missing = values.isnan()
            first = places.where(values == values.amax(-1, keepdim=True), _MANY).argmin(-1, True)
            last = places.where(missing, -1).argmax(-1, True)
            winner = last.where(missing.any(-1, keepdim=True), first)
        return values.gather(-1, winner).squeeze(-1), places.gather(-1, winner).squeeze(-1)


def _positions(parts: Cut, outputs: Interval) -> list[list[int]]:
    """The positions of each output's terms after all terms are concatenated."""
    lengths = (stop - start for start, stop in parts.intervals)
    laid = list(zip(parts.intervals, boxes.consecutive(lengths), strict=True))
    return [
        [begin + output - start for (start, stop), (begin, _) in laid if start <= output < stop]
        for output in range(*outputs)
    ]
