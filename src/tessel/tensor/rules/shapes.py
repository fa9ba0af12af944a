"""Functions that only move elements: reshaping, permuting, slicing, joining, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch

from tessel.boxes import Interval
from tessel.layout import Cut, Layout, Shape
from tessel.shared import nothing
from tessel.tensor.rules.pointwise import broadcast
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_spread,
    gathered,
    is_split,
    made,
    moved,
    note_view,
    opened,
    outlines,
    rule,
    unsupported,
)
from tessel.tensor.tensor import Tensor, move, open_part
from tessel.transport import kept_in_job

Block = tuple[tuple[int, ...], tuple[int, ...]]  # dims before, and dims after


@lru_cache(maxsize=1024)
def _blocks(before: Shape, after: Shape) -> tuple[Block, ...]:
    """Which dimensions become which when a tensor is reshaped: the finest way to say it.

    >>> _blocks((2, 3, 4), (2, 12))
    (((0,), (0,)), ((1, 2), (1,)))
    """
    if 0 in before:
        return ((tuple(range(len(before))), tuple(range(len(after)))),)
    blocks: list[Block] = []
    i = j = 0
    while i < len(before) or j < len(after):
        if j == len(after) or (i < len(before) and before[i] == 1 != after[j]):
            blocks.append(((i,), ()))
            i += 1
        elif i == len(before) or after[j] == 1 != before[i]:
            blocks.append(((), (j,)))
            j += 1
        else:
            stop, end = i + 1, j + 1
            while (n := prod(before[i:stop])) != (m := prod(after[j:end])):
                stop, end = (stop + 1, end) if n < m else (stop, end + 1)
            blocks.append((tuple(range(i, stop)), tuple(range(j, end))))
            i, j = stop, end
    return tuple(blocks)


@rule(
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"),
    "ravel",
)
def reshape(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Dimensions that stay keep their parts; those that are merged or split become whole."""
    x, layout = args[0], args[0]._layout
    if any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
        raise unsupported(name, "it cannot take values as those of another type", layout)
    after = tuple(outlines(func, args, kwargs).shape)
    loose, target = _reshaped(layout, after)
    y = made(moved(x, loose).reshape(target.local_shape), target)
    return note_view(y, x, copied=loose != layout)


@kept_in_job
def _reshaped(layout: Layout, after: Shape) -> tuple[Layout, Layout]:
    """First, what becomes whole; then, what it is after."""
    blocks = _blocks(layout.shape, after)
    mixed = [dim for dims, new in blocks if (len(dims), len(new)) != (1, 1) for dim in dims]
    loose = gathered(layout, tuple(dim for dim in mixed if is_split(layout, dim)))
    cuts: list[Cut] = [Cut((), ((0, length),)) for length in after]
    axes = {axis for cut in loose.cuts for axis in cut.axes}
    for dims, new in blocks:
        if (len(dims), len(new)) == (1, 1):
            cuts[new[0]] = loose.cuts[dims[0]]
            axes -= set(loose.cuts[dims[0]].axes)
    shared = tuple(sorted({*loose.shared, *axes}))
    return loose, replace(loose, shape=after, cuts=tuple(cuts), shared=shared)


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


@rule(
    *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint"),
    *("get T", "get mT", "get H", "get mH"),
)
def permute(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    x, layout = opened(args[0])
    sizes = _PRIMES[: len(layout.shape)]
    order = [
        sizes.index(n) for n in func(torch.empty(sizes, device="meta"), *args[1:], **kwargs).shape
    ]
    target = replace(
        layout,
        shape=tuple(layout.shape[dim] for dim in order),
        cuts=tuple(layout.cuts[dim] for dim in order),
    )
    return note_view(made(func(x, *args[1:], **kwargs), target), args[0])


@rule("cat", "concat", "concatenate")
def cat(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Along a whole dimension each worker joins its own parts; else, a sum of embeddings."""
    given: Sequence[torch.Tensor] = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = next(each for each in given if isinstance(each, Tensor))._layout
    shape = tuple(outlines(func, (list(given), dim), {}).shape)
    dim %= len(shape)
    # torch lets empty tensors of one dimension join any others
    tensors = [
        as_spread(each, first.partition)
        for each in given
        if tuple(each.shape) != (0,) or len(shape) == 1
    ]
    target = first.resized(shape)
    if not is_split(first, dim):
        aligned = [moved(each, target.resized(_with(shape, dim, each))) for each in tensors]
        return made(torch.cat(aligned, dim), target)
    starts = [0, *accumulate(each._layout.shape[dim] for each in tensors)]
    total: Any = None
    for start, each in zip(starts, tensors, strict=False):
        layout = each._layout
        before = [start if d == dim else 0 for d in range(len(shape))]
        after = [n - m - b for n, m, b in zip(shape, layout.shape, before, strict=True)]
        placed = move(layout.embedded(before, after), target).apply(open_part(each))
        total = placed if total is None else total + placed
    return made(total, target)


def _with(shape: Shape, dim: int, each: Tensor) -> Shape:
    return (*shape[:dim], each._layout.shape[dim], *shape[dim + 1 :])


@rule("__getitem__")
def getitem(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Slices of step one; whole numbers on whole dimensions; new dimensions."""
    base, key = args
    x, layout = opened(base)
    items = list(key) if isinstance(key, tuple) else [key]
    if not all(each is None or each is Ellipsis or isinstance(each, int | slice) for each in items):
        raise unsupported(name, "only whole numbers and slices are known", layout)
    named = sum(each is not None and each is not Ellipsis for each in items)
    fill = [slice(None)] * (len(layout.shape) - named)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items = [*items[:at], *fill, *items[at + 1 :]]
    picks = [each for each in items if each is not None]
    parts = [_interval(each, n) for each, n in zip(picks, layout.shape, strict=True)]
    for dim, (pick, part) in enumerate(zip(picks, parts, strict=True)):
        if is_split(layout, dim) and (part is None or isinstance(pick, int)):
            raise unsupported(name, f"dimension {dim} is split and can only be sliced", layout)
    cropped, x = _cropped(x, layout, parts)
    rest = [None if each is None else _rest(each, part) for each, part in _pairs(items, parts)]
    y = x[tuple(rest)]
    y = made(y, _indexed(cropped, rest, tuple(y.shape)))
    return note_view(y, base, copied=cropped is not layout)


def _pairs(items: list[Any], parts: list[Interval | None]) -> list[tuple[Any, Interval | None]]:
    left = iter(parts)
    return [(each, None if each is None else next(left)) for each in items]


def _interval(pick: Any, length: int) -> Interval | None:
    """What a slice of step one keeps; None for any other pick."""
    if isinstance(pick, int):
        return None
    start, stop, step = pick.indices(length)
    return (start, max(start, stop)) if step == 1 else None


def _rest(pick: Any, part: Interval | None) -> Any:
    """What remains to pick once slices of step one are cut out."""
    return pick if part is None else slice(None)


def _cropped(
    x: torch.Tensor, layout: Layout, parts: list[Interval | None]
) -> tuple[Layout, torch.Tensor]:
    """The tensor between the bounds, in balanced parts where a split dimension got shorter."""
    bounds = [part or (0, n) for part, n in zip(parts, layout.shape, strict=True)]
    if all(bound == (0, n) for bound, n in zip(bounds, layout.shape, strict=True)):
        return layout, x
    target = _shortened(layout, tuple(bounds))
    before = [start for start, _ in bounds]
    after = [n - stop for n, (_, stop) in zip(layout.shape, bounds, strict=True)]
    return target, move(layout, target.embedded(before, after)).apply(x)


def _shortened(layout: Layout, bounds: tuple[Interval, ...]) -> Layout:
    shape = tuple(stop - start for start, stop in bounds)
    even = layout.resized(shape)
    cuts = tuple(
        old if n == m else new
        for old, new, n, m in zip(layout.cuts, even.cuts, layout.shape, shape, strict=True)
    )
    return replace(even, cuts=cuts)


def _indexed(layout: Layout, rest: list[Any], local: Shape) -> Layout:
    """The layout after picks that concern whole dimensions only."""
    cuts: list[Cut] = []
    lengths: list[int] = []
    lost: tuple[int, ...] = ()
    dim = 0
    for each in rest:
        if each is None:
            cuts.append(Cut((), ((0, 1),)))
            lengths.append(1)
            continue
        cut, length = layout.cuts[dim], layout.shape[dim]
        dim += 1
        if isinstance(each, int):
            lost += cut.axes
            continue
        length = len(range(*each.indices(length)))
        cuts.append(cut if each == slice(None) else Cut(cut.axes, ((0, length),)))
        lengths.append(length)
    shared = tuple(sorted({*layout.shared, *lost}))
    return replace(layout, shape=tuple(lengths), cuts=tuple(cuts), shared=shared)


@rule("chunk", "split", "tensor_split", "unbind", "split_with_sizes")
def chunk(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Pieces along a whole dimension."""
    x, layout = opened(args[0])
    default = 0
    position = 1 if name == "unbind" else 2
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    dim %= len(layout.shape)
    if is_split(layout, dim):
        raise unsupported(name, f"dimension {dim} is split", layout)
    pieces = func(x, *args[1:], **kwargs)
    shapes = [tuple(each.shape) for each in outlines(func, args, kwargs)]
    if name == "unbind":
        keep = [d for d in range(len(layout.shape)) if d != dim]
        axes = tuple(sorted({*layout.shared, *layout.cuts[dim].axes}))
        rest = replace(
            layout,
            shape=tuple(layout.shape[d] for d in keep),
            cuts=tuple(layout.cuts[d] for d in keep),
            shared=axes,
        )
        return tuple(note_view(made(each, rest), args[0]) for each in pieces)
    return tuple(
        note_view(made(each, _shortened(layout, tuple((0, n) for n in shape))), args[0])
        for each, shape in zip(pieces, shapes, strict=True)
    )


@rule("narrow", "select")
def narrow(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A slice, or one index, along a dimension."""
    names = ("dim", "start", "length") if name == "narrow" else ("dim", "index")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    dim = range(len(args[0]._layout.shape))[given["dim"]]
    if name == "narrow":
        outlines(func, args, kwargs)  # torch's own error
        start = given["start"] % max(1, args[0]._layout.shape[dim])
        pick: Any = slice(start, start + given["length"])
    else:
        pick = given["index"]
    return getitem(name, Tensor.__getitem__, (args[0], (*[slice(None)] * dim, pick)), {})


@rule("stack")
def stack(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Tensors one beside the other along a new dimension, which is whole."""
    tensors: Sequence[torch.Tensor] = args[0] if args else kwargs["tensors"]
    given = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    dim = range(outlines(func, (list(tensors), given), {}).dim())[given]
    wider = [each.unsqueeze(dim) for each in tensors]
    return cat("cat", torch.cat, (wider, dim), {})


@rule("expand", "expand_as", "broadcast_to")
def expand(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Dimensions of length one become longer, and lie as those of the tensor that is named."""
    x, layout = args[0], args[0]._layout
    shape = tuple(outlines(func, args, kwargs).shape)
    like = args[1] if name == "expand_as" else None
    other = like._layout if isinstance(like, Tensor) else None
    if other is None:
        first = len(shape) - len(layout.shape)
        new = tuple(Cut((), ((0, n),)) for n in shape[:first])
        wider = replace(layout, shape=(*shape[:first], *layout.shape), cuts=(*new, *layout.cuts))
        other = wider.resized(shape)
    y = moved(x, broadcast(layout, other)).expand(other.local_shape)
    return note_view(made(y, other), x, copied=True)


@rule("pad")
def pad(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Zeros beyond the border of split dimensions; whole dimensions as torch has it."""
    x, layout = opened(args[0])
    shape = tuple(outlines(func, args, kwargs).shape)
    changed = [dim for dim, n in enumerate(layout.shape) if shape[dim] != n]
    widths = list(args[1] if len(args) > 1 else kwargs["pad"])
    touched = [len(shape) - 1 - k // 2 for k, width in enumerate(widths) if width]
    if not any(is_split(layout, dim) for dim in (*changed, *touched)):
        target = _shortened(layout, tuple((0, n) for n in shape))
        if 0 in x.shape and 0 not in layout.shape:  # torch refuses it, in some modes
            return made(nothing(target.local_shape, x), target)
        return made(func(x, *args[1:], **kwargs), target)
    rest = dict(zip(("mode", "value"), args[2:], strict=False)) | kwargs
    if rest.get("mode", "constant") != "constant" or rest.get("value") not in (None, 0):
        raise unsupported(name, "split dimensions can be padded with zeros only", layout)
    pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (len(shape) - len(pairs)) + pairs
    source = layout.embedded([max(a, 0) for a, _ in pairs], [max(b, 0) for _, b in pairs])
    target = layout.resized(shape)
    inside = target.embedded([max(-a, 0) for a, _ in pairs], [max(-b, 0) for _, b in pairs])
    return made(move(source, inside).apply(x), target)


@rule("pixel_shuffle")
def pixel_shuffle(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Channels become space where they are: every part grows."""
    x, layout = opened(args[0])
    if is_split(layout, -3):
        raise unsupported(name, "the channels are split", layout)
    shape = tuple(outlines(func, args, kwargs).shape)
    factor = shape[-1] // layout.shape[-1]
    cuts = list(_shortened(layout, tuple((0, n) for n in shape)).cuts)
    for dim in (-1, -2):
        parts = tuple((factor * a, factor * b) for a, b in layout.cuts[dim].intervals)
        cuts[dim] = Cut(layout.cuts[dim].axes, parts)
    target = replace(layout, shape=shape, cuts=tuple(cuts))
    if 0 in x.shape:
        return made(nothing(target.local_shape, x), target)
    return made(func(x, *args[1:], **kwargs), target)
