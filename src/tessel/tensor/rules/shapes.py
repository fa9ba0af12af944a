"""Functions that rearrange elements: reshaping, permuting, expanding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm, prod
from typing import Any

import torch

from tessel.core import boxes
from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.partition import Partition
from tessel.core.shared import anchored_zeros
from tessel.tensor.aliases import alone, become, either, note_view
from tessel.tensor.rules.hosting import along
from tessel.tensor.rules.pointwise import broadcast, common_layout, tells_strides
from tessel.tensor.rules.reductions import argument, dims_of
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_spread,
    computed,
    made,
    moved,
    opened,
    outlines,
    rule,
    shared_whole,
    unsupported,
)
from tessel.tensor.tensor import Tensor, open_part
from tessel.tensor.windowed import outline
from tessel.transport import kept_in_job

Block = tuple[tuple[int, ...], tuple[int, ...]]  # the dimensions before, and those after


@lru_cache(maxsize=1024)
def _blocks(before: Shape, after: Shape) -> tuple[Block, ...]:
    """The dimensions that become others when a tensor is reshaped, in the smallest blocks.

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
    """Reshape; parts stay if they are parts of the result, else as little moves as possible."""
    x, layout = args[0], args[0]._layout
    after = tuple(outlines(func, args, kwargs).shape)
    if any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
        # A view as another dtype; if its size differs, the last dimension must be whole.
        last = len(after) - 1
        if after != layout.shape and layout.is_split(last):
            y = along(x, (last,), lambda part: func(part.contiguous(), *args[1:], **kwargs))
            return note_view(y, x, copied=True)
        same = layout if after == layout.shape else layout.reshaped_along(after, (last,))
        return note_view(made(func(_usual_strides(opened(x)[0]), *args[1:], **kwargs), same), x)
    if name == "ravel":
        return x.contiguous().view(-1)
    if name == "flatten" and after == layout.shape:  # torch returns the tensor itself
        return x
    loose, target = _reshaped(layout, after)
    y = moved(x, loose).reshape(target.local_shape)
    if name in _COPYING and loose == layout and not _tells_copies(layout, after):
        return either(y, target, x)
    return note_view(made(y, target), x, copied=loose != layout)


_COPYING = frozenset(("reshape", "reshape_as", "flatten"))  # others raise instead


def _usual_strides(part: torch.Tensor) -> torch.Tensor:
    """View a contiguous part with the strides of a new tensor.

    To torch, a tensor without values is contiguous with any strides, and so is one of length one
    with any stride along it. Views as another dtype refuse some of these strides, and the worker
    with such a part would raise alone.
    """
    return part.view(-1).view(part.shape) if part.is_contiguous() else part


@kept_in_job
def _tells_copies(layout: Layout, after: Shape) -> bool:
    """Whether strides of merged dimensions of each part tell whether torch copies the whole."""
    for before, _ in _blocks(layout.shape, after):
        dims = tuple(dim for dim in before if layout.shape[dim] != 1)
        if len(dims) > 1 and not tells_strides(layout, dims):
            return False
    return True


@dataclass
class _SplitSlot:
    """The slot of a block where it can be split, before and after: its first dimensions.

    These vary slowest, so an interval of them is a run of the values. The run is one both before
    and after if its bounds are multiples of `before_step` and of `after_step`.
    """

    before: int
    after: int
    before_step: int
    after_step: int
    num_units: int  # the largest possible number of parts
    axes: tuple[int, ...] = ()
    intervals: tuple[Interval, ...] = ((0, 1),)  # of units

    @classmethod
    def of(cls, layout: Layout, after: Shape, block: Block) -> _SplitSlot | None:
        """The slot of a block, with the axes that split it now and can stay."""
        dims, new = block
        if not dims or not new:
            return None
        # leading dimensions of length one do not matter
        first = next((dim for dim in dims if layout.shape[dim] > 1), dims[0])
        then = next((dim for dim in new if after[dim] > 1), new[0])
        inner = prod(layout.shape[dim] for dim in dims if dim > first)
        inner_after = prod(after[dim] for dim in new if dim > then)
        unit = lcm(inner, inner_after)
        step = unit // inner
        units = layout.shape[first] // step
        slot = cls(first, then, step, unit // inner_after, units, (), ((0, units),))
        cut = layout.cuts[first]
        if all(a % step == 0 == b % step for a, b in cut.intervals if a < b):
            slot.axes = cut.axes
            slot.intervals = tuple(
                (a // step, b // step if a < b else a // step) for a, b in cut.intervals
            )
        return slot

    def can_take(self, size: int) -> bool:
        return self.num_units >= len(self.intervals) * size

    def take(self, axis: int, size: int) -> None:
        """Let another axis of the grid split this block, into balanced parts."""
        self.axes += (axis,)
        self.intervals = boxes.balanced(self.num_units, len(self.intervals) * size)

    def stay(self, axis: int, size: int, partition: Partition, cut: Cut) -> None:
        """Let another axis split this block so that the worker with its values keeps them.

        The cut is that of a dimension of length one: one of its intervals is not empty.
        """
        index = next(index for index, (a, b) in enumerate(cut.intervals) if a < b)
        places = boxes.unravel(index, [partition.shape[each] for each in cut.axes])
        owner = places[cut.axes.index(axis)]
        self.axes += (axis,)
        self.intervals = tuple(
            (a if k <= owner else b, b if k >= owner else a)
            for a, b in self.intervals
            for k in range(size)
        )

    def cut(self, step: int) -> Cut:
        return Cut(self.axes, tuple((step * a, step * b) for a, b in self.intervals))


@kept_in_job
def _reshaped(layout: Layout, after: Shape) -> tuple[Layout, Layout]:
    """A layout before the reshape whose parts are the parts of a layout after it.

    Axes of the grid that cannot stay, since they split a dimension within a block or at bounds that
    it cannot have, split blocks that are long enough, if possible their own. If there are none,
    values become shared along them. One worker along an axis has all of a dimension of length one,
    and keeps it in the block that the axis splits: nothing is sent.
    """
    partition = layout.partition
    if 0 in layout.shape:  # no values: any layout will do
        return layout, shared_whole(partition, after)
    blocks = _blocks(layout.shape, after)
    slots = {
        block: slot for block in blocks if (slot := _SplitSlot.of(layout, after, block)) is not None
    }
    for block in blocks:
        own = slots.get(block)
        kept = own.axes if own else ()
        for dim, axis in [(each, axis) for each in block[0] for axis in layout.cuts[each].axes]:
            size = partition.shape[axis]
            is_short = layout.shape[dim] == 1
            hosts = [slot for slot in slots.values() if is_short or slot.can_take(size)]
            if axis in kept or not hosts or size == 1:
                continue
            roomiest = max(hosts, key=lambda slot: slot.num_units / len(slot.intervals))
            host = own if own in hosts else roomiest
            if is_short:
                host.stay(axis, size, partition, layout.cuts[dim])
            else:
                host.take(axis, size)
    before = [Cut.whole(length) for length in layout.shape]
    behind = [Cut.whole(length) for length in after]
    for slot in slots.values():
        before[slot.before] = slot.cut(slot.before_step)
        behind[slot.after] = slot.cut(slot.after_step)
    loose, target = (
        Layout.of_cuts(partition, shape, tuple(cuts))
        for shape, cuts in ((layout.shape, before), (after, behind))
    )
    # The result is a view if each worker has the same box as before, or nothing in both.
    pairs = ((layout.box(worker), loose.box(worker)) for worker in partition.ranks)
    stays = all(a == b or not (boxes.volume(a) or boxes.volume(b)) for a, b in pairs if a and b)
    return (layout if stays else loose), target


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


@rule(
    *("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint"),
    *("get T", "get mT", "get H", "get mH"),
)
def permute(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Permute dimensions together with their cuts."""
    x, layout = opened(args[0])
    # Torch itself gives the order, by an outline with a different length for each dimension.
    sizes = _PRIMES[: len(layout.shape)]
    order = [sizes.index(n) for n in func(outline(sizes), *args[1:], **kwargs).shape]
    target = replace(
        layout,
        shape=tuple(layout.shape[dim] for dim in order),
        cuts=tuple(layout.cuts[dim] for dim in order),
    )
    return note_view(made(func(x, *args[1:], **kwargs), target), args[0])


@rule("unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "swapdims_", "t_")
def reshape_in_place(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Give the tensor the part and the layout of the result; its values stay."""
    x = args[0]
    if not torch.is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():  # reading it raises for some views
            if x.requires_grad:
                why = "with gradients disabled it would lose its history or its gradient"
                raise unsupported(name, why, x._layout)
    elif x.is_leaf and x.requires_grad:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    if open_part(x) is not x._part:
        raise unsupported(
            name, "it would change the result of a custom autograd function", x._layout
        )
    if x.requires_grad and not torch.is_grad_enabled():
        raise unsupported(
            name, "with gradients disabled it would lose its history or its gradient", x._layout
        )
    return become(x, getattr(torch.Tensor, name[:-1])(*args, **kwargs))


@rule("expand", "expand_as", "broadcast_to")
def expand(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Expand dimensions of length one, in the layout of a given tensor."""
    x, layout = args[0], args[0]._layout
    shape = tuple(outlines(func, args, kwargs).shape)
    like = args[1] if name == "expand_as" else None
    other = like._layout if isinstance(like, Tensor) else None
    if other is None:
        first = len(shape) - len(layout.shape)
        new = tuple(Cut.whole(n) for n in shape[:first])
        wider = replace(layout, shape=(*shape[:first], *layout.shape), cuts=(*new, *layout.cuts))
        other = wider.split_like(shape)
    y = moved(x, broadcast(layout, other)).expand(other.local_shape)
    return note_view(made(y, other), x, copied=True)


@rule("broadcast_tensors")
def broadcast_tensors(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Broadcast all tensors to one shape, in the layout of their sum."""
    given = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    outlines(torch.broadcast_tensors, tuple(given), kwargs)  # torch's own error
    target = common_layout(name, given)
    found = []
    for each in given:
        x = as_spread(each, target.partition)
        y = moved(x, broadcast(x._layout, target)).expand(target.local_shape)
        found.append(note_view(made(y, target), x, copied=True))
    return tuple(found)


@rule("meshgrid")
def meshgrid(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Expand each tensor along a dimension of its own."""
    given = list(args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args)
    shapes = [tuple(each.shape) for each in outlines(torch.meshgrid, tuple(given), kwargs)]
    partition = next(each._layout.partition for each in given if isinstance(each, Tensor))
    count = len(given)
    dims = list(range(count))
    if kwargs.get("indexing") == "xy" and count > 1:
        dims[:2] = 1, 0
    rows = (
        as_spread(each, partition).reshape([-1 if d == dim else 1 for d in range(count)])
        for each, dim in zip(given, dims, strict=True)
    )
    return tuple(row.expand(shape) for row, shape in zip(rows, shapes, strict=True))


@rule("atleast_1d", "atleast_2d", "atleast_3d")
def at_least(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Add dimensions of length one where torch does."""
    given = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    found = tuple(each.reshape(outlines(func, (each,), kwargs).shape) for each in given)
    return found[0] if len(args) == 1 and given is args else found


@rule("repeat", "tile")
def repeat(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Repeat along dimensions, which must be whole."""
    x = args[0]
    given = args[1:] or tuple(kwargs.values())
    counts = tuple(given[0]) if isinstance(given[0], list | tuple) else tuple(given)
    outlines(func, args, kwargs)  # torch's own error
    counts = (1,) * (x.dim() - len(counts)) + counts
    x = x.reshape((1,) * (len(counts) - x.dim()) + tuple(x.shape))
    # for zero repeats torch's derivative is a constant, and the graphs of workers would differ
    nothing_of = tuple(slice(0) if count == 0 else slice(None) for count in counts)
    some = [max(1, count) for count in counts]
    x = x[nothing_of] if 0 in counts else x
    return along(x, [d for d, count in enumerate(some) if count > 1], lambda y: y.repeat(some))


@rule("repeat_interleave")
def repeat_interleave(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Repeat each element in place: the parts grow."""
    x, count = args[0], argument(args, kwargs, 1, "repeats")
    dim = argument(args, kwargs, 2, "dim")
    if count is None:
        raise unsupported(name, "numbers of repeats without an input must be whole", x._layout)
    if isinstance(count, int):
        outlines(func, args, kwargs)  # torch's own error
    if dim is None:
        x, dim = x.reshape(-1), 0
    (dim,) = dims_of(dim, x._layout)
    if not isinstance(count, int):  # the counts are the same on all workers
        count = count.full() if isinstance(count, Tensor) else torch.as_tensor(count)
        places = torch.arange(x.shape[dim], device=count.device)
        return x.index_select(dim, places.repeat_interleave(count))
    part, layout = opened(x)
    target = _scaled(layout, dim, count)
    return made(computed(lambda y: y.repeat_interleave(count, dim), part), target)


def _scaled(layout: Layout, dim: int, factor: int) -> Layout:
    """The layout with a dimension, and its parts, `factor` times as long."""
    old = layout.cuts[dim]
    cut = Cut(old.axes, tuple((factor * a, factor * b) for a, b in old.intervals))
    return layout.recut(dim, cut, factor * layout.shape[dim])


@rule("rot90")
def rot90(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Rotate by flips and a transposition."""
    x, turns = args[0], argument(args, kwargs, 1, "k", 1) % 4
    first, second = argument(args, kwargs, 2, "dims", (0, 1))
    outlines(func, args, kwargs)  # torch's own error
    if turns == 1:
        return x.flip(second).transpose(first, second)
    if turns == 2:
        return x.flip((first, second))
    return x.flip(first).transpose(first, second) if turns else x.clone()


@rule("pixel_shuffle")
def pixel_shuffle(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Move channels into space: the parts grow in place."""
    x = args[0]
    *batch, channels, height, width = outlines(func, args, kwargs).shape
    factor = argument(args, kwargs, 1, "upscale_factor")
    k = len(batch)
    x = x.reshape(*batch, channels, factor, factor, *x.shape[-2:])
    x = x.permute(*range(k), k, k + 3, k + 1, k + 4, k + 2)
    return alone(*opened(x.reshape(*batch, channels, height, width)), args[0])


@rule("pixel_unshuffle")
def pixel_unshuffle(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Move space into channels: the parts shrink in place, if their bounds allow it."""
    x = args[0]
    *batch, channels, height, width = outlines(func, args, kwargs).shape
    factor = argument(args, kwargs, 1, "downscale_factor")
    k = len(batch)
    x = x.reshape(*batch, x.shape[-3], height, factor, width, factor)
    x = x.permute(*range(k), k, k + 2, k + 4, k + 1, k + 3)
    return alone(*opened(x.reshape(*batch, channels, height, width)), args[0])


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Interleave groups of channels."""
    x, groups = args[0], argument(args, kwargs, 1, "groups")
    outlines(func, args, kwargs)  # torch's own error
    y = x.unflatten(1, (groups, -1)).transpose(1, 2).reshape(x.shape)
    return alone(*opened(y), x)


@rule("view_as_real")
def view_as_real(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """View as real, with a new last dimension, which is whole."""
    x, layout = opened(args[0])
    y = func(x)
    # torch's derivative requires a gradient whose last stride is 1. `contiguous` keeps the strides
    # of an empty one, and this worker alone would raise.
    y = y if x.numel() else _usual_strides(y)
    return note_view(made(y, layout.with_whole(len(layout.shape), 2)), args[0])


@rule("view_as_complex")
def view_as_complex(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """View the last dimension, which must be whole, as real and imaginary part."""
    x, layout = args[0], args[0]._layout
    outlines(func, args, kwargs)  # torch's own error
    last = len(layout.shape) - 1
    there = layout.hosted((last,))
    shared = tuple(sorted({*there.shared, *there.cuts[-1].axes}))
    target = replace(there, shape=there.shape[:-1], cuts=there.cuts[:-1], shared=shared)
    part = moved(x, there)
    part = part if there is layout else part.contiguous()
    return note_view(made(func(_usual_strides(part)), target), x, copied=there is not layout)


@rule("unfold")
def unfold(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Windows along a dimension, or, by `torch.nn.functional.unfold`, of an image."""
    if func is torch.nn.functional.unfold:
        return _image_windows(name, func, args, kwargs)
    x, layout = args[0], args[0]._layout
    given = dict(zip(("dimension", "size", "step"), args[1:], strict=False)) | kwargs
    shape = tuple(outlines(func, args, kwargs).shape)
    if not layout.shape:
        return made(
            func(moved(x, layout), *args[1:], **kwargs), shared_whole(layout.partition, shape)
        )
    (dim,) = dims_of(given["dimension"], layout)
    size, step, count, old = given["size"], given["step"], shape[dim], layout.cuts[dim]
    reads, cut = layout, Cut(old.axes, ((0, count),))
    if layout.is_split(dim):  # windows in balanced parts, and the inputs of each worker's windows
        cut = Cut(old.axes, boxes.balanced(count, len(old.intervals)))
        wide = ((step * a, step * (b - 1) + size) if a < b else (0, 0) for a, b in cut.intervals)
        reads = layout.recut(dim, Cut(old.axes, tuple(wide)))
    target = layout.recut(dim, cut, count).with_whole(len(layout.shape), size)
    part = moved(x, reads)
    # torch rejects tensors that are shorter than a window
    is_empty = 0 in target.local_shape
    y = anchored_zeros(target.local_shape, part) if is_empty else part.unfold(dim, size, step)
    return note_view(made(y, target), x, copied=reads != layout)


def _image_windows(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Windows of an image, which must be whole; channels and batch may be split."""
    x = args[0]
    shape = tuple(outlines(func, args, kwargs).shape)
    if x.dim() == 3:
        return _image_windows(name, func, (x.unsqueeze(0), *args[1:]), kwargs).squeeze(0)
    layout = x._layout
    there = layout.hosted((2, 3))
    part = moved(x, there)
    grown = _scaled(there, 1, shape[1] // max(1, layout.shape[1])) if layout.shape[1] else there
    shared = tuple(sorted({*there.shared, *there.cuts[2].axes, *there.cuts[3].axes}))
    cuts = (*grown.cuts[:2], Cut.whole(shape[2]))
    target = replace(there, shape=shape, cuts=cuts, shared=shared)
    if not part.numel():
        return made(anchored_zeros(target.local_shape, part), target)
    return made(func(part, *args[1:], **kwargs), target)


@rule("fold")
def fold(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Add up windows, which must be whole; channels and batch may be split."""
    x = args[0]
    shape = tuple(outlines(func, args, kwargs).shape)
    if x.dim() == 2:
        return fold(name, func, (x.unsqueeze(0), *args[1:]), kwargs).squeeze(0)
    size = x.shape[1] // max(1, shape[1])  # values of a window for each channel
    # (batch, channel, value of the window, position): batch and channels may be split
    windows = x.reshape(x.shape[0], shape[1], size, x.shape[2])
    layout = windows._layout
    there = layout.hosted((2, 3))
    part = moved(windows, there)
    shared = tuple(sorted({*there.shared, *there.cuts[2].axes, *there.cuts[3].axes}))
    space = (Cut.whole(shape[2]), Cut.whole(shape[3]))
    target = replace(there, shape=shape, cuts=(*there.cuts[:2], *space), shared=shared)
    if not part.numel():
        return made(anchored_zeros(target.local_shape, part), target)
    return made(func(part.flatten(1, 2), *args[1:], **kwargs), target)
