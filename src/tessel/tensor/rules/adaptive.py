"""Adaptive pools: windows of unequal size, as many as the output has places.

A worker either fetches the inputs that its outputs read, or pools what it has and lets those parts
of an output meet where the output lies. Which one, along each dimension, is what moves the fewest
bytes: a pool to a small output sends one value for each part, and not the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, product
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
Maxima = tuple[Tensor, Tensor]  # values and their places in the whole tensor, row by row
_AVERAGES: tuple[Any, ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_MAXIMA: tuple[Any, ...] = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
_FIXED_MAXIMA: tuple[Any, ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
PoolSpans = Callable[[Tensor, Sequence["Spans"]], tuple[Tensor, ...]]
_INDEX_BYTES = 8
_FEW = 64  # calls of torch's own pool that cost less than making windows of unequal sizes equal
_MANY = torch.iinfo(torch.int64).max


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def average_pool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The mean of each window."""
    x, layout = opened(args[0])
    num_dims = int(name[-2])
    sizes = hashable(argument(args, kwargs, 1, "output_size"))
    shape = _pooled_shape(_AVERAGES[num_dims - 1], layout.shape, x.dtype, sizes)
    return made(*average(x, layout, shape, num_dims))


_MAX_POOLS = ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")


@rule(*_MAX_POOLS, *(f"{name}_with_indices" for name in _MAX_POOLS))
def maximum_pool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The largest value of each window, and its place in the whole tensor if that is wanted."""
    x, layout = opened(args[0])
    num_dims = int(name[len("adaptive_max_pool")])
    given = dict(zip(("output_size", "return_indices"), args[1:], strict=False)) | kwargs
    with_places = name.endswith("_with_indices") or given.get("return_indices", False)
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
    """The shape of the whole output; torch's own error if the tensor cannot be pooled."""
    if dtype not in (torch.float32, torch.float64):  # whether torch knows it shows only on values
        pool(torch.ones((1,) * len(shape), dtype=dtype), sizes)
    x = outline(shape) if math.prod(shape) else torch.empty(shape)  # whose errors say more
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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        for dim, spans in enumerate(way.spans, x.ndim - num_dims):
            if not spans.fits:
                # windows made equally long, one after the other: each is a row to be summed
                rows = wide.index_select(dim, constant(spans.indices, torch.int64, x.device))
                rows = rows * _along(constant(spans.weights, wide.dtype, x.device), dim, x.ndim)
                wide = rows.unflatten(dim, (-1, spans.longest)).sum(dim + 1)
        y = _fitting_average(wide, way.spans)[0].to(x.dtype)
    return (way.sum.apply(y) if any(way.partial) else y), way.target


@dataclass(frozen=True)
class Way:
    """How a tensor in the layout `source` is pooled to balanced parts of another shape.

    Along a dimension that is `partial`, workers pool the inputs that they have, and the outputs
    meet later; along the others they first fetch the inputs that their outputs read.

    Args:
        source: where the input lies.
        target: where the output shall lie, on the same grid.
        field: the window along each dimension, or none.
        partial: for each dimension, which of the two it is.
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
        """What brings every worker the inputs that it pools."""
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
        """The outputs that every worker has a part of, as separate values."""
        cuts = list(self.target.cuts)
        for dim, (field, length) in enumerate(zip(self.field, self.target.shape, strict=True)):
            if self.partial[dim]:
                # Which outputs read something of a part: the same rule from outputs to inputs.
                have = self.source.cuts[dim]
                inverse = None
                if isinstance(field, AdaptiveWindow):
                    inverse = AdaptiveWindow(inputs=field.outputs, outputs=field.inputs)
                touched = tuple(reads(inverse, part, length) for part in have.intervals)
                cuts[dim] = Cut(have.axes, touched)
        return replace(self.target, cuts=tuple(cuts))

    @cached_property
    def sum(self) -> Move:
        """What adds the parts of each output."""
        return Move(self.pooled, self.target)

    @cached_property
    def stack(self) -> Stack:
        """What brings the parts of each output together, side by side."""
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
        """Whether torch's own adaptive pool gives this worker's outputs in a few calls."""
        return math.prod(len(spans.runs) for spans in self.spans) <= _FEW

    def num_bytes(self, width: int, extra: int) -> int:
        """How many bytes it sends: of values, and what more travels with a part of an output."""
        fetched = width * traffic(self.source, self.fetch.read)
        if not any(self.partial):
            return fetched
        if not extra:
            return fetched + width * traffic(self.pooled, self.target)
        return fetched + (width + extra) * traffic(self.stack.source, self.stack.target)


@kept_in_job
def best_way(source: Layout, shape: Shape, num_dims: int, widths: tuple[int, int]) -> Way:
    """The way that sends the fewest bytes; of equal ones, that with the fewest partial dimensions.

    Args:
        source: where the input lies.
        shape: the global shape of the output.
        num_dims: how many of the last dimensions are pooled.
        widths: how many bytes a value takes, and how many more travel with a part of an output.
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
    """How many values go from one worker to another, where both lie alike on one grid."""
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
    """Windows along one dimension, clipped to what a worker holds.

    Attributes:
        windows: from where to where each output reads, counted from the first held index.
        counts: how many inputs each output reads in the whole tensor.
        held: the inputs that the worker holds.
    """

    windows: tuple[Interval, ...]
    counts: Numbers
    held: Interval

    @classmethod
    def of(cls, window: AdaptiveWindow, held: Interval, outputs: Interval) -> Spans:
        """Those of some outputs of the whole tensor."""
        hulls = [window.hull((i, i + 1)) for i in range(*outputs)]
        windows = [boxes.overlap(hull, held) or (held[0], held[0]) for hull in hulls]
        return cls(
            tuple(boxes.shift(each, -held[0]) for each in windows),
            tuple(stop - start for start, stop in hulls),
            held,
        )

    @cached_property
    def fits(self) -> bool:
        """Whether torch's own adaptive pool, on what is held, has the same windows."""
        local = AdaptiveWindow(self.held[1] - self.held[0], len(self.windows))
        return all(local.hull((i, i + 1)) == span for i, span in enumerate(self.windows))

    @cached_property
    def runs(self) -> tuple[Spans, ...]:
        """The windows in groups of neighbours that fit, long ones from the left."""
        if self.fits:
            return (self,)
        runs, start = [], 0
        while start < len(self.windows):
            stop = start + 1  # one window is all that it holds: it fits
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
        """All windows one after the other, made equally long: the last index is repeated."""
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
        """Those that make a sum over `indices` the share of a mean; none is zero."""
        return tuple(
            1 / count / (1 if start + t < stop - 1 else self.longest - (stop - 1 - start))
            for (start, stop), count in zip(self.windows, self.counts, strict=True)
            for t in range(self.longest)
        )

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Which part of each output's inputs is held."""
        return tuple(
            (stop - start) / count
            for (start, stop), count in zip(self.windows, self.counts, strict=True)
        )

    @cached_property
    def holds_less(self) -> bool:
        """Whether a part of some window is not held."""
        return any(share != 1 for share in self.shares)


def _joined(x: Tensor, all_spans: Sequence[Spans], pool: PoolSpans) -> tuple[Tensor, ...]:
    """What `pool` gives for all groups of windows that fit, put together."""
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
    """Along dimensions whose windows fit; others have their means already."""
    D = len(all_spans)
    y = _AVERAGES[D - 1](x, tuple(len(spans.windows) for spans in all_spans))
    for dim, spans in enumerate(all_spans, x.ndim - D):
        if spans.fits and spans.holds_less:
            y = y * _along(constant(spans.shares, y.dtype, x.device), dim, x.ndim)
    return (y,)


def _along(values: Tensor, dim: int, ndim: int) -> Tensor:
    """Values along one dimension, to be used for all indices of the others."""
    return values.view([-1 if each == dim else 1 for each in range(ndim)])


def _maximum(x: Tensor, way: Way, with_places: bool) -> Maxima:
    """The largest values of this worker's windows; places only if asked for or needed later."""
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
        else:  # torch's pool over adjacent windows, so that it takes the same of ties
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
    """How the parts of outputs, which overlap, come to where the outputs lie without being added.

    The boxes of `pooled` are put one behind the other along each partial dimension.

    Args:
        pooled: the parts.
        outputs: the outputs, on the same grid.
        partial: along which dimensions there are parts.
    """

    pooled: Layout
    outputs: Layout
    partial: tuple[bool, ...]

    @cached_property
    def source(self) -> Layout:
        """The parts, disjoint."""
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
        """From the first to the last part that the outputs of each worker have."""
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
        """For each dimension, where in what was gathered the parts of each output lie.

        All outputs have equally many, one after the other: the last is repeated.
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
        """The parts of each output, which were gathered, along a new last dimension."""
        for dim, table in reversed(list(enumerate(self.tables))):
            if table is not None:
                indices, most = table
                x = x.index_select(dim, constant(indices, torch.int64, x.device))
                x = x.unflatten(dim, (-1, most)).movedim(dim + 1, -1)
        return x.flatten(len(self.tables))

    def largest(self, values: Tensor, places: Tensor) -> Maxima:
        """Of the parts of each output, the one that torch would take of the whole window.

        That is the first of equal values, and the last of those that are not a number.
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
    """Where the parts of each output are when all parts are put one behind the other."""
    lengths = (stop - start for start, stop in parts.intervals)
    laid = list(zip(parts.intervals, boxes.consecutive(lengths), strict=True))
    return [
        [begin + output - start for (start, stop), (begin, _) in laid if start <= output < stop]
        for output in range(*outputs)
    ]
