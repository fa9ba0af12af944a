"""Functions that combine runs of tensors: joining, rolling, flipping, padding.

Each worker's part of the result consists of runs of the operands. It reads an interval of each,
which a `Move` brings, and the runs are joined where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tessel.core.layout import Cut, Layout
from tessel.core.shared import anchored_zeros
from tessel.tensor.rules.reductions import argument, dims_of
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_spread,
    check_together,
    held_layouts,
    made,
    moved,
    opened,
    outlines,
    parts,
    rule,
)
from tessel.tensor.tensor import Tensor


def joined(runs: Sequence[tuple[Tensor, int, int]], dim: int, target: Layout) -> Tensor:
    """Runs of tensors, one after the other along a dimension.

    Args:
        runs: tensors with the target's lengths except along `dim`, with bounds along it.
        dim: the dimension.
        target: the layout of the result.
    """
    cut = target.cuts[dim]
    found, offset = [], 0  # the offset is the position of a run in the result
    for x, start, stop in runs:
        # What a worker reads of the run, clipped to it: nothing if its part is elsewhere.
        reads = tuple(
            (min(max(a - offset, 0) + start, stop), min(max(b - offset, 0) + start, stop))
            for a, b in cut.intervals
        )
        found.append(moved(x, target.recut(dim, Cut(cut.axes, reads), x._layout.shape[dim])))
        offset += stop - start
    if len(target.shape) > 1:
        return made(torch.cat(found, dim), target)
    # the derivative of torch.cat is a constant for empty 1-d tensors, but not for such 2-d ones
    return made(torch.cat([run.unsqueeze(0) for run in found], 1).squeeze(0), target)


@rule("cat", "concat", "concatenate")
def cat(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The result has the layout of the operand with most parts; each worker reads its runs."""
    given: Sequence[torch.Tensor] = args[0]
    dim = argument(args, kwargs, 1, "dim", 0)
    outline = outlines(torch.cat, (list(given), dim), {})
    shape = tuple(outline.shape)
    dim %= len(shape)
    # torch accepts empty 1-d tensors beside any others
    operands = [each for each in given if tuple(each.shape) != (0,) or len(shape) == 1]
    layouts = held_layouts(operands)
    check_together(name, held_layouts(given))
    if not layouts:  # only tensors that are left out were spread
        return as_spread(torch.cat(parts(list(given)), dim), held_layouts(given)[0].partition)
    # prefer the layout with more parts, then that of the larger operand
    most = max(layouts, key=lambda x: (prod(len(c.intervals) for c in x.cuts), prod(x.shape)))
    target = most.split_like(shape)
    found = [as_spread(each.to(outline.dtype), target.partition) for each in operands]
    return joined([(x, 0, x.shape[dim]) for x in found], dim, target)


@rule("stack")
def stack(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Tensors stacked along a new dimension, which is whole."""
    given = argument(args, kwargs, 1, "dim", 0)
    dim = range(outlines(torch.stack, (list(args[0]), given), {}).dim())[given]
    return torch.cat([each.unsqueeze(dim) for each in args[0]], dim)


@rule("hstack", "vstack", "dstack", "row_stack", "column_stack")
def stack_along(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Tensors joined along the dimension of the function's name."""
    given = list(args[0])
    outlines(func, (given,), kwargs)  # torch's own error
    if name in ("vstack", "row_stack"):
        return torch.cat([torch.atleast_2d(each) for each in given], 0)
    if name == "dstack":
        return torch.cat([torch.atleast_3d(each) for each in given], 2)
    if name == "column_stack":
        return torch.cat([each.reshape(-1, 1) if each.dim() < 2 else each for each in given], 1)
    wide = [torch.atleast_1d(each) for each in given]
    return torch.cat(wide, 0 if wide[0].dim() == 1 else 1)


@rule("roll")
def roll(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Values shifted beyond the end return at the start."""
    x = args[0]
    shifts = argument(args, kwargs, 1, "shifts")
    dims = argument(args, kwargs, 2, "dims", ())
    outlines(func, args, kwargs)  # torch's own error
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    if dims is None or dims == () or dims == []:
        return torch.roll(x.reshape(-1), shifts, 0).reshape(x.shape)
    for shift, dim in zip(shifts, (dims,) if isinstance(dims, int) else dims, strict=True):
        (dim,) = dims_of(dim, x._layout)
        part, layout = opened(x)
        if layout.is_split(dim):
            length = layout.shape[dim]
            start = -shift % max(1, length)
            x = joined([(x, start, length), (x, 0, start)], dim, layout)
        else:
            x = made(part.roll(shift, dim), layout)
    return x


@rule("flip", "fliplr", "flipud")
def flip(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Each worker reads the opposite interval, and flips it."""
    x, layout = args[0], args[0]._layout
    outlines(func, args, kwargs)  # torch's own error
    if not layout.shape:
        return x.clone()
    given = args[1:] or tuple(kwargs.values())
    named = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    dims = {"fliplr": (1,), "flipud": (0,)}.get(name) or tuple(
        dim % max(1, len(layout.shape)) for dim in named
    )
    opposite = layout
    for dim in dims:
        length, cut = layout.shape[dim], layout.cuts[dim]
        mirrored = tuple((length - b, length - a) for a, b in cut.intervals)
        opposite = opposite.recut(dim, Cut(cut.axes, mirrored))
    return made(moved(x, opposite).flip(dims), layout)


@rule("pad")
def pad(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Constants beyond the border, or values by the mode."""
    x, layout = args[0], args[0]._layout
    given = dict(zip(("pad", "mode", "value"), args[1:], strict=False)) | kwargs
    shape = tuple(outlines(func, args, kwargs).shape)
    widths = [int(width) for width in given["pad"]]
    pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (len(shape) - len(pairs)) + pairs
    touched = tuple(dim for dim, pair in enumerate(pairs) if pair != (0, 0))
    if not any(layout.is_split(dim) for dim in touched):
        part = moved(x, layout)
        target = layout.reshaped_along(shape, touched)
        if 0 in target.local_shape:  # torch rejects it, in some modes
            return made(anchored_zeros(target.local_shape, part), target)
        return made(func(part, *args[1:], **kwargs), target)
    mode = given.get("mode", "constant")
    if mode != "constant":
        for dim in touched:
            x = _BORDERS[mode](x, dim, *pairs[dim])
        return x
    reads, target = layout, layout.split_like(shape)
    for dim in touched:  # the interval that each worker reads for its part of the padded tensor
        (before, _), n, cut = pairs[dim], layout.shape[dim], target.cuts[dim]
        inside = (
            (min(max(a - before, 0), n), min(max(b - before, 0), n)) for a, b in cut.intervals
        )
        reads = reads.recut(dim, Cut(cut.axes, tuple(inside)))
    part, box, own = moved(x, reads), target.box(), reads.box()
    assert box is not None and own is not None
    widths = []
    # Each worker pads what it read to its part of the result; negative widths crop. From the last
    # dimension to the first, as `F.pad` takes them.
    for (a, b), (lo, hi), (before, _) in reversed(list(zip(box, own, pairs, strict=True))):
        left = lo + before - a if lo < hi else b - a
        widths += [left, b - a - left - (hi - lo)]
    return made(func(part, widths, value=given.get("value") or 0), target)


def _in_a_circle(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    length = x._layout.shape[dim]
    start, stop = max(-before, 0), length - max(-after, 0)  # negative widths crop first
    runs = [
        (x, stop - max(before, 0), stop),
        (x, start, stop),
        (x, start, start + max(after, 0)),
    ]
    return joined(runs, dim, _longer(x._layout, dim, before + length + after))


def _longer(layout: Layout, dim: int, length: int) -> Layout:
    return layout.split_like((*layout.shape[:dim], length, *layout.shape[dim + 1 :]))


def _by_places(places: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., Tensor]:
    """A border with values at other indices, given as a function of the index."""

    def border(x: Tensor, dim: int, before: int, after: int) -> Tensor:
        layout = x._layout
        length = layout.shape[dim]
        target = _longer(layout, dim, before + length + after)
        cut = target.cuts[dim]
        with unset_fake_temporarily():  # all workers have these numbers, even without values
            found = places(torch.arange(-before, length + after), length)
            reads = tuple(
                (int(found[a:b].min()), int(found[a:b].max()) + 1) if a < b else (0, 0)
                for a, b in cut.intervals
            )
        there = layout.recut(dim, Cut(cut.axes, reads))
        part = moved(x, there)
        box, own = target.box(), there.box()
        assert box is not None and own is not None
        chosen = found[slice(*box[dim])] - own[dim][0]
        return made(part.index_select(dim, chosen.to(part.device)), target)

    return border


_BORDERS: dict[str, Callable[..., Tensor]] = {
    "circular": _in_a_circle,
    # mirrored at the first value, and at the last: n − 1 + k reads the same as n − 1 − k
    "reflect": _by_places(lambda places, length: length - 1 - (length - 1 - places.abs()).abs()),
    "replicate": _by_places(lambda places, length: places.clamp(0, length - 1)),
}
