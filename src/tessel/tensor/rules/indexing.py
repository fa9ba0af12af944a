"""Indexing: slices and integers, index tensors, assignment, and pieces along a dimension.

Slices and integers are the same on all workers, so each knows what the others read. Rows at an
index of a split dimension come from the parts that have them (`rows.py`). For other index tensors
the dimensions that they index become whole, through a host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import index as as_int
from typing import Any

import numpy as np
import torch

from tessel.core import boxes
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.linop import is_traced
from tessel.tensor.adoption import adopted, slices_of
from tessel.tensor.aliases import (
    apart,
    become_view,
    is_copy,
    may_go_back,
    note_view,
    outdate_copies,
    put_back,
)
from tessel.tensor.rules.batched import whole_of
from tessel.tensor.rules.masks import (
    indexed_lengths,
    is_mask,
    is_truth,
    masked_values,
    places_of,
    put_at_mask,
)
from tessel.tensor.rules.pointwise import changed, check_change, fitted, pointwise
from tessel.tensor.rules.reductions import argument, dims_of
from tessel.tensor.rules.rows import (
    Write,
    check_range,
    has_rows,
    receiving,
    row_index,
    rows_at,
    written_rows,
)
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_spread,
    check_fits,
    computed,
    held_layouts,
    made,
    moved,
    opened,
    outlines,
    outlining,
    parts,
    rule,
    shared_whole,
    unsupported,
)
from tessel.tensor.tensor import Tensor
from tessel.tensor.unfinished import Run, early, unfinished_of
from tessel.transport import kept_in_job

Pick = int | Run  # along one dimension


def _is_number(item: Any) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool | torch.Tensor)


def _without_arrays(key: Any) -> Any:
    """A key with arrays and lists of lists converted to tensors, as torch does.

    Torch treats a short list of anything but integers like a tuple, and a tensor of one integer
    without dimensions like that integer, with a view as the result.
    """
    is_short = isinstance(key, list) and len(key) < 32
    if isinstance(key, tuple) or (is_short and any(isinstance(each, _IN_KEYS) for each in key)):
        return tuple(map(_without_array, key))
    return _without_array(key)


def _on_device_of(x: torch.Tensor, key: Any) -> Any:
    """A key with its indices and masks on the device of a tensor; torch also takes those of a CPU.

    Those without dimensions are left, since they are read as numbers.
    """
    if x.device.type == "cpu":
        return key
    if isinstance(key, tuple):
        return tuple(_index_of(each, x.device) for each in key)
    return _index_of(key, x.device)


_CPU = torch.device("cpu")


def _index_of(item: Any, device: torch.device = _CPU) -> Any:
    """A list of integers, or a tensor on the CPU, as a tensor there; anything else as it is."""
    if isinstance(item, list | tuple | range) and all(map(_is_number, item)):
        return torch.tensor([as_int(each) for each in item], dtype=torch.int64, device=device)
    is_away = isinstance(item, torch.Tensor) and item.dim() > 0 and item.device.type == "cpu"
    return item.to(device) if is_away and device != _CPU else item


_SEQUENCES = (list, tuple, range, np.ndarray)
_IN_KEYS = (*_SEQUENCES, torch.Tensor, slice, type(None), type(...))


def _without_array(item: Any) -> Any:
    if isinstance(item, np.bool_):
        return bool(item)
    if isinstance(item, list | tuple) and any(isinstance(each, _SEQUENCES) for each in item):
        return torch.tensor(item)
    if isinstance(item, torch.Tensor) and not item.dim() and item.dtype in _WHOLE_NUMBERS:
        if outlining.get():  # which number it is plays no part where there are no values
            return 0
        return item if is_traced() else int(item)
    if not isinstance(item, np.ndarray):
        return item
    found = torch.as_tensor(item)
    if not found.dim():
        return _without_array(found)
    return found.long() if found.dtype in (torch.int8, torch.int16) else found


_WHOLE_NUMBERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _items(name: str, key: Any, layout: Layout) -> list[Any]:
    """The items of a key: one for each dimension, and None for new ones.

    Integers are counted from the start, slices have their bounds, lists are tensors.
    """
    items: list[Any] = []
    for item in key if isinstance(key, tuple) else [key]:
        item = _index_of(item)
        is_index = isinstance(item, torch.Tensor) and item.dtype in (torch.int64, torch.int32)
        is_plain = item is None or item is Ellipsis or isinstance(item, slice) or _is_number(item)
        if not is_index and not is_plain:
            kind = type(item).__name__
            raise unsupported(name, f"an index of type {kind} is not supported", layout)
        items.append(item)
    named = sum(each is not None and each is not Ellipsis for each in items)
    dots = [k for k, each in enumerate(items) if each is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if named > len(layout.shape):
        raise IndexError(f"too many indices for tensor of dimension {len(layout.shape)}")
    at = dots[0] if dots else len(items)
    rest = [slice(None)] * (len(layout.shape) - named)
    items = [*items[:at], *rest, *items[at + 1 :]]
    found: list[Any] = []
    dims = iter(enumerate(layout.shape))
    for item in items:
        if item is None:
            found.append(None)
            continue
        dim, length = next(dims)
        if isinstance(item, slice):
            start, stop, step = item.indices(length)
            if step < 1:
                raise ValueError("step must be greater than zero")
            item = start, max(start, stop), step
        elif not isinstance(item, torch.Tensor):
            item = as_int(item)
            if not -length <= item < length:
                raise IndexError(
                    f"index {item} is out of bounds for dimension {dim} with size {length}"
                )
            item %= length
        found.append(item)
    return found


@rule("__getitem__")
def getitem(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Slices, integers and new dimensions first, then masks or index tensors."""
    base = args[0]
    key = _on_device_of(base, _without_arrays(args[1]))
    given = key if isinstance(key, tuple) else (key,)
    masks = [k for k, each in enumerate(given) if is_mask(each)]
    if len(masks) > 1 or (masks and any(_is_index(each) for each in given)):
        return base[_with_places(given, base._layout)]
    if masks:
        rest, at = _beside_mask(given, masks[0], base.dim())
        return masked_values(name, base if rest is None else base[rest], given[masks[0]], at)
    items = _items(name, key, base._layout)
    picks = [
        (0, n, 1) if isinstance(each, torch.Tensor) else each
        for each, n in zip((i for i in items if i is not None), base._layout.shape, strict=True)
    ]
    news = tuple(k for k, each in enumerate(items) if each is None)
    y = _picked(base, tuple(picks), news)
    left = [each for each in items if not isinstance(each, int)]
    if not any(isinstance(each, torch.Tensor) for each in left):
        # by which x[1:] += 1 recognizes the items that it writes back
        y.__dict__["_taken"] = weakref.ref(base), items
        return y
    return _looked_up(
        name, y, {k: each for k, each in enumerate(left) if isinstance(each, torch.Tensor)}
    )


@early("__getitem__")
def getitem_early(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Slices of an unfinished tensor."""
    x, key = args
    unfinished, runs = unfinished_of(x), _runs(name, key, x._layout)
    y = None if unfinished is None or runs is None else unfinished.picked(runs)
    if y is None:
        return NotImplemented
    if y.requires_grad:
        x.__dict__["_was_cut"] = True  # gradients of the slice do not pass through x
    y.__dict__["_taken"] = weakref.ref(x), runs
    return note_view(y, x, copied=True)


@early("__setitem__")
def setitem_early(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Write values into slices of an unfinished tensor, which keeps them as pieces."""
    x, key, value = args
    unfinished, runs = unfinished_of(x), _runs(name, key, x._layout)
    if unfinished is None or runs is None or not isinstance(value, Tensor):
        return NotImplemented
    if is_copy(x):  # of a slice, which is a view in torch: its original would not be changed
        return NotImplemented
    filled = unfinished.filled(runs, value)
    if filled is None:
        return NotImplemented
    x.__dict__["_unfinished"] = filled
    if value.requires_grad and filled is not unfinished:
        with torch._C.DisableTorchFunctionSubclass():
            x.requires_grad_()
    outdate_copies(x)
    return None


def _runs(name: str, key: Any, layout: Layout) -> list[Run] | None:
    """The slices of a key that only has slices in steps of one; None for any other."""
    key = _without_arrays(key)
    given = key if isinstance(key, tuple) else (key,)
    if any(is_mask(each) or _is_index(each) or is_truth(each) for each in given):
        return None
    items = _items(name, key, layout)
    return items if all(isinstance(e, tuple) and e[2] == 1 for e in items) else None


def _is_index(item: Any) -> bool:
    return isinstance(item, torch.Tensor | list | range) and not is_mask(item)


def _with_places(given: Sequence[Any], layout: Layout) -> tuple[Any, ...]:
    """A key with masks replaced by the indices that they select, on all workers.

    Several tensors in a key are broadcast against each other, which requires indices.
    """
    shapes = [
        (tuple(each.shape) if isinstance(each, torch.Tensor) else (len(each),))
        if is_mask(each)
        else None
        for each in given
    ]
    lengths = [
        len(shape) if shape else each is not None and each is not Ellipsis
        for each, shape in zip(given, shapes, strict=True)
    ]
    at, found = 0, list[Any]()
    for each, shape, length in zip(given, shapes, lengths, strict=True):
        if shape and shape != layout.shape[at : at + length]:
            raise IndexError(
                f"The shape of the mask {list(shape)} at index {at} does not match the shape of "
                f"the indexed tensor {list(layout.shape)}"
            )
        found += places_of([each]) if shape else [each]
        at += len(layout.shape) - sum(lengths) if each is Ellipsis else length
    return tuple(found)


def _beside_mask(given: Sequence[Any], place: int, ndim: int) -> tuple[Any, int]:
    """A key with whole dimensions instead of a mask, or None if nothing else is in it.

    Also the first dimension that the mask covers, in the result of this key.
    """
    mask = given[place]
    covered = mask.dim() if isinstance(mask, torch.Tensor) else 1
    rest = [*given[:place], *[slice(None)] * covered, *given[place + 1 :]]
    named = sum(each is not None and each is not Ellipsis for each in rest)
    if named > ndim:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    if all((isinstance(each, slice) and each == slice(None)) or each is Ellipsis for each in rest):
        before = sum(each is not Ellipsis for each in rest[:place])
        return None, before + (ndim - named if Ellipsis in rest[:place] else 0)
    at = 0
    for each in rest[:place]:
        at += ndim - named if each is Ellipsis else not _is_number(each)
    return tuple(rest), at


def _picked(x: Tensor, picks: tuple[Pick, ...], news: tuple[int, ...]) -> Tensor:
    """Slices and integers; values at an integer of a split dimension are shared by all workers."""
    layout = x._layout
    reads, target = _reading(layout, picks, news)
    if reads != layout:
        # First crop whole dimensions, so that less is sent; an integer is a slice meanwhile.
        here: list[Run] = []
        left: list[Pick] = []
        for dim, (pick, n) in enumerate(zip(picks, layout.shape, strict=True)):
            if layout.is_split(dim):
                here.append((0, n, 1))
                left.append(pick)
            elif isinstance(pick, int):
                here.append((pick, pick + 1, 1))
                left.append(0)
            else:
                here.append(pick)
                left.append((0, len(range(*pick)), 1))
        if here != [(0, n, 1) for n in layout.shape]:
            return _picked(_picked(x, tuple(here), ()), tuple(left), news)
    local: list[Any] = []
    for dim, pick in enumerate(picks):
        if not layout.is_split(dim):
            local.append(pick if isinstance(pick, int) else slice(*pick))
        else:
            local.append(0 if isinstance(pick, int) else slice(None, None, pick[2]))
    for place in news:
        local.insert(place, None)
    y = moved(x, reads)[tuple(local)]
    return note_view(made(y, target), x, copied=reads != layout)


@kept_in_job
def _reading(
    layout: Layout, picks: tuple[Pick, ...], news: tuple[int, ...]
) -> tuple[Layout, Layout]:
    """The layout that workers read, and that of the result: balanced where it is shorter."""
    reads: list[Cut] = []
    found: list[tuple[int, Cut] | None] = []
    lost: set[int] = set()  # axes that split a dimension of which one index remains
    dropped: set[int] = set()
    for pick, cut, n in zip(picks, layout.cuts, layout.shape, strict=True):
        splits = len(cut.intervals) > 1
        if isinstance(pick, int):
            dropped |= {*cut.axes}
            lost |= {*cut.axes} if splits else set()
            reads.append(Cut((), ((pick, pick + 1),)) if splits else cut)
            found.append(None)
            continue
        start, _, step = pick
        length = len(range(*pick))
        if length == n or not splits:
            reads.append(cut)
            found.append((length, cut if length == n else Cut(cut.axes, ((0, length),))))
            continue
        intervals = boxes.balanced(length, len(cut.intervals))
        wide = tuple(
            (start + step * a, start + step * (b - 1) + 1) if a < b else (0, 0)
            for a, b in intervals
        )
        reads.append(Cut(cut.axes, wide))
        found.append((length, Cut(cut.axes, intervals)))
    kept: list[Any] = list(found)
    for place in news:
        kept.insert(place, (1, Cut.whole(1)))
    kept = [each for each in kept if each is not None]
    there = replace(layout, cuts=tuple(reads), shared=tuple(sorted({*layout.shared, *lost})))
    target = replace(
        layout,
        shape=tuple(length for length, _ in kept),
        cuts=tuple(cut for _, cut in kept),
        shared=tuple(sorted({*layout.shared, *dropped})),
    )
    return (layout if there.cuts == layout.cuts else there), target


def _looked_up(name: str, x: Tensor, indices: dict[int, torch.Tensor]) -> Tensor:
    """The values at index tensors along some dimensions, as in torch and numpy.

    The dimensions of the indices replace those that they index, or come first if these are not
    adjacent.
    """
    layout = x._layout
    shape = tuple(torch.broadcast_shapes(*(each.shape for each in indices.values())))
    if shape and [layout.is_split(dim) for dim in indices].count(True) == 1:
        merged = _merged(x, indices)
        if merged is not None:
            return rows_at(*merged)
    for dim, index in indices.items():
        check_range(index, dim, layout.shape[dim], negative=True)
    if len(indices) > 1:  # they are small compared to the result
        indices = {dim: whole_of(index) for dim, index in indices.items()}
    split = [each for each in held_layouts(list(indices.values())) if not each.is_whole]
    if split and split[0].partition != layout.partition:
        raise unsupported(name, "index tensors on other workers are not supported", layout, *split)
    if split:
        there = _beside(layout, tuple(indices), split[0])
        cuts = split[0].cuts
    else:
        there = layout.hosted(tuple(indices))
        cuts = tuple(Cut.whole(n) for n in shape)
    dims = sorted(indices)
    at = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    kept = [dim for dim in range(len(layout.shape)) if dim not in indices]
    lengths = [layout.shape[dim] for dim in kept]
    lying = [there.cuts[dim] for dim in kept]
    all_cuts = (*lying[:at], *cuts, *lying[at:])
    target = Layout.of_cuts(layout.partition, (*lengths[:at], *shape, *lengths[at:]), all_cuts)
    key = tuple(parts(indices[d]) if d in indices else slice(None) for d in range(x.dim()))
    y = made(computed(lambda part: part[key], moved(x, there)), target)
    if len(shape) == len(indices) == 1 and not split:  # one dimension replaces one: keep the layout
        return y.move_to(layout.split_like(target.shape))
    return y


def _merged(x: Tensor, indices: dict[int, torch.Tensor]) -> tuple[Tensor, int, torch.Tensor] | None:
    """A lookup along several dimensions, one of them split, as a lookup along their product.

    The product is split into the same parts, if the split dimension is its first.
    """
    layout = x._layout
    (split,) = (dim for dim in indices if layout.is_split(dim))
    partitions = {each._layout.partition for each in indices.values() if isinstance(each, Tensor)}
    if not has_rows(layout, split) or partitions - {layout.partition}:
        return None
    if len(indices) == 1:
        return x, split, indices[split]
    dims = sorted(indices)
    at = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    order = [split, *(dim for dim in dims if dim != split)]
    index: Any = 0
    for dim in order:
        length = layout.shape[dim]
        check_range(indices[dim], dim, length, negative=True)
        index = index * length + indices[dim] % max(1, length)
    places = range(at, at + len(order))
    merged: Any = x.movedim(order, tuple(places)).flatten(at, at + len(order) - 1)
    return merged, at, index


@kept_in_job
def _beside(layout: Layout, dims: tuple[int, ...], index: Layout) -> Layout:
    """The layout for a lookup by a split index: whole along its axes, with separate copies."""
    taken = {axis for cut in index.cuts for axis in cut.axes}
    whole = [dim for dim, cut in enumerate(layout.cuts) if dim in dims or taken & {*cut.axes}]
    there = layout.gathered(tuple(whole))
    return replace(there, shared=tuple(axis for axis in there.shared if axis not in taken))


@rule("narrow", "select")
def narrow(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A slice, or a single index, along a dimension."""
    x = args[0]
    names = ("dim", "start", "length") if name == "narrow" else ("dim", "index")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    given[names[1]] = as_int(given[names[1]])
    outlines(func, (x,), given)  # torch's own error
    dim = range(x.dim())[given["dim"]]
    picks: list[Pick] = [(0, n, 1) for n in x.shape]
    if name == "select":
        picks[dim] = given["index"] % x.shape[dim]
    else:
        start = given["start"]
        start = start + x.shape[dim] if start < 0 else start
        picks[dim] = (start, start + given["length"], 1)
    return _picked(x, tuple(picks), ())


@rule(
    *("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk"),
    "unsafe_split_with_sizes",
    *("hsplit", "vsplit", "dsplit", "unbind"),
)
def pieces(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Consecutive slices along a dimension; `unbind` drops it."""
    x = args[0]
    bounds = argument(args, kwargs, 1, "tensor_indices_or_sections")
    if isinstance(bounds, torch.Tensor):
        dim = argument(args, kwargs, 2, "dim", 0)
        return x.tensor_split(whole_of(bounds).tolist(), dim)
    outline = outlines(func, args, kwargs)
    if name in ("hsplit", "vsplit", "dsplit"):
        dim = {"hsplit": 0 if x.dim() == 1 else 1, "vsplit": 0, "dsplit": 2}[name]
    else:
        dim = range(x.dim())[argument(args, kwargs, 1 if name == "unbind" else 2, "dim", 0)]
    if name == "unbind":
        return tuple(x.select(dim, k) for k in range(x.shape[dim]))
    bounds = argument(args, kwargs, 1, "indices", kwargs.get("indices_or_sections"))
    if name.endswith("split") and name != "split" and isinstance(bounds, list | tuple):
        ends = [*bounds, x.shape[dim]]  # as in slices: also from the end, or out of order
        keys = [slice(*each) for each in zip([0, *bounds], ends, strict=True)]
    else:
        ends = list(accumulate(each.shape[dim] for each in outline))
        keys = [slice(*each) for each in zip([0, *ends], ends, strict=False)]
    return tuple(x[(*[slice(None)] * dim, key)] for key in keys)


@rule("__setitem__", plain=True)
def setitem(name: str, func: Any, args: Arguments, kwargs: Settings) -> None:
    """Each worker changes its part; a tensor of values is moved to where it is needed."""
    x, value = args[0], args[2]
    key = _on_device_of(x, _without_arrays(args[1]))
    if not isinstance(x, Tensor):
        layouts = held_layouts(args)
        if all(each.is_whole for each in layouts):
            func(*parts(args))
            return
        if not adopted(x, _around(name, x, key, value)):
            raise unsupported(name, "it would write a part into a whole tensor", *layouts)
        x[key] = value  # x is spread now
        return
    if is_truth(key):
        if not key:  # nothing is written
            check_fits((0, *x.shape), tuple(value.shape) if torch.is_tensor(value) else ())
            return
        key = None  # x[True] has one more dimension, and all values
    given = key if isinstance(key, tuple) else (key,)
    if "_withheld" in x.__dict__ and not any(map(is_mask, given)):
        put_back(x, _items(name, key, x._layout), value)
    check_change(name, x, held_layouts(args))
    if any(map(is_mask, given)):
        _assign_at_mask(name, x, given, value)
        return
    items = _items(name, key, x._layout)
    if not any(isinstance(each, torch.Tensor) for each in items):
        _assign(x, items, value)
        return
    layout = x._layout
    if any(each is None for each in items):
        raise unsupported(name, "new dimensions next to index tensors are not supported", layout)
    there, region, at = _places(x, items)
    value = apart(value, x, itself=True)
    if isinstance(value, torch.Tensor):
        value = fitted(value.reshape(indexed_lengths(value, region.shape)), region)
    else:
        value = x._part.new_empty(()).fill_(value)  # torch's own error, on all workers
    if there is layout:
        x._part[at] = value
        changed(x)
        return
    part = moved(x, there).clone()
    part[at] = value
    _replaced("__setitem_", x, made(part, there))


def _around(name: str, x: torch.Tensor, key: Any, value: Any) -> Layout | None:
    """The layout of a plain tensor after parts are written into slices; None for other keys.

    Each dimension is split as in the values, into balanced parts where it is longer.
    """
    given = key if isinstance(key, tuple) else (key,)
    if not isinstance(value, Tensor) or any(is_mask(each) or _is_index(each) for each in given):
        return None
    layout = value._layout
    items = _items(name, key, shared_whole(layout.partition, x.shape))
    return _around_region(layout, tuple(x.shape), tuple(items))


@kept_in_job
def _around_region(layout: Layout, shape: Shape, items: tuple[Pick | None, ...]) -> Layout | None:
    cuts = {}
    kept = [k for k, each in enumerate(items) if not isinstance(each, int)]
    dims = [sum(each is not None for each in items[:k]) for k in range(len(items))]
    # values are broadcast: their last dimensions correspond to the slices
    for k, cut, n in zip(kept[::-1], layout.cuts[::-1], layout.shape[::-1], strict=False):
        dim, count = dims[k], len(cut.intervals)
        # parts may be empty, but only where those of the values are
        if items[k] is not None and count > 1 and (n == shape[dim] or count <= shape[dim]):
            even = Cut(cut.axes, boxes.balanced(shape[dim], count))
            cuts[dim] = cut if n == shape[dim] else even
    whole = [Cut.whole(n) for n in shape]
    return Layout.of_cuts(
        layout.partition, shape, tuple(cuts.get(d, w) for d, w in enumerate(whole))
    )


def _assign_at_mask(name: str, x: Tensor, given: Sequence[Any], value: Any) -> None:
    """Write values at a mask; beside slices and integers, into their result, which is put back."""
    places = [k for k, each in enumerate(given) if is_mask(each)]
    if len(places) > 1 or any(_is_index(each) for each in given):
        x[_with_places(given, x._layout)] = value
        return
    (place,) = places
    rest, at = _beside_mask(given, place, x.dim())
    if not isinstance(value, torch.Tensor):
        value = x._part.new_empty(()).fill_(value)  # torch's own error, on all workers
    mask, value = given[place], apart(value, x, itself=True)
    if rest is None and not at and not value.dim() and isinstance(mask, torch.Tensor):
        # a single value where the mask holds, whose count no worker needs to know
        if tuple(mask.shape) != tuple(x.shape[: mask.dim()]):
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} does not match the shape of the indexed "
                f"tensor {list(x.shape)}"
            )
        x.masked_fill_(mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())), value)
        return
    y: Any = x if rest is None else x[rest].clone()
    put_at_mask(name, y, mask, value, at)
    if rest is not None:
        x[rest] = y


def _assign(x: Tensor, items: list[Any], value: Any) -> None:
    """Write values into a region, each worker into its part."""
    if isinstance(value, Tensor) and not value._originals and "_taken" in value.__dict__:
        base, taken = value.__dict__["_taken"]
        if base() is x and taken == items:  # a view of x, which `x[items] += y` puts back
            changed(x)
            return
    value = apart(value, x, itself=True)
    picks = tuple(each for each in items if each is not None)
    part, layout = x._part, x._layout
    region = _region(layout, picks)
    box, own = region.box(), layout.box()
    assert box is not None and own is not None
    local = []
    for pick, (first, end), (start, _) in zip(picks, box, own, strict=True):
        begin, step = (pick, 1) if isinstance(pick, int) else (pick[0], pick[2])
        offset = begin - start
        local.append(
            slice(offset + step * first, offset + step * (end - 1) + 1, step)
            if first < end
            else slice(0, 0)
        )
    if not isinstance(value, torch.Tensor):
        value = part.new_empty(()).fill_(value)  # torch's own error, on all workers
    # values with a dimension for each integer, and none for new ones, like the region
    kept = [each for each in items if not isinstance(each, int)]
    lengths = indexed_lengths(value, [1 if each is None else len(range(*each)) for each in kept])
    lengths = [1] * (len(kept) - len(lengths)) + lengths
    named = iter(n for n, each in zip(lengths, kept, strict=True) if each is not None)
    like_region = [1 if isinstance(each, int) else next(named) for each in picks]
    new = fitted(value.reshape(like_region), region)
    if not (part.requires_grad and torch.is_grad_enabled()):
        part[tuple(local)].copy_(new)
    else:
        # torch records another graph for a slice of everything, as it may be on some workers
        inside = torch.zeros(part.shape, dtype=torch.bool, device=part.device)
        inside[tuple(local)] = True
        values = torch.zeros_like(part, requires_grad=False)
        values[tuple(local)].copy_(new)
        part.copy_(torch.where(inside, values, part))
    changed(x)


@kept_in_job
def _region(layout: Layout, picks: tuple[Pick, ...]) -> Layout:
    """The layout of the indices that a key selects, in place; integers have length one."""
    cuts, lengths = [], []
    for pick, cut in zip(picks, layout.cuts, strict=True):
        start, stop, step = (pick, pick + 1, 1) if isinstance(pick, int) else pick
        length = len(range(start, stop, step))
        # the number of indices of the run before each bound
        counts = ((min(max(-((start - k) // step), 0), length) for k in ab) for ab in cut.intervals)
        cuts.append(Cut(cut.axes, tuple((a, b) for a, b in counts)))
        lengths.append(length)
    return replace(layout, shape=tuple(lengths), cuts=tuple(cuts))


def _places(x: Tensor, items: list[Any]) -> tuple[Layout, Layout, tuple[Any, ...]]:
    """The layout with indexed dimensions whole, that of the selected values, and the key there."""
    layout = x._layout
    for dim, each in enumerate(items):
        if isinstance(each, torch.Tensor):
            check_range(each, dim, layout.shape[dim], negative=True)
    everything = [(0, length, 1) for length in layout.shape]  # slices of whole dimensions
    named = tuple(
        dim
        for dim, each in enumerate(items)
        if not isinstance(each, tuple) or each != everything[dim]
    )
    there = layout.hosted(named)
    key = tuple(
        slice(None)
        if dim not in named
        else slice(*each)
        if isinstance(each, tuple)
        else _whole_index(each, layout)
        if isinstance(each, torch.Tensor)
        else each
        for dim, each in enumerate(items)
    )
    # Torch applies integers first: index tensors before and after one are adjacent.
    left = [each for each in items if not isinstance(each, int)]
    picked = [k for k, each in enumerate(left) if isinstance(each, torch.Tensor)]
    shape = torch.broadcast_shapes(*(e.shape for e in items if isinstance(e, torch.Tensor)))
    kept = [
        (len(range(*each)), Cut.whole(len(range(*each))) if dim in named else there.cuts[dim])
        for dim, each in enumerate(items)
        if isinstance(each, tuple)
    ]
    neighbours = picked == list(range(picked[0], picked[-1] + 1))
    at = picked[0] if neighbours else 0
    found = [*kept[:at], *((n, Cut.whole(n)) for n in shape), *kept[at:]]
    region = Layout.of_cuts(
        layout.partition, tuple(n for n, _ in found), tuple(cut for _, cut in found)
    )
    return there, region, key


@rule("index_put", "index_put_")
def index_put(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Write values at indices of the first dimensions, or add them."""
    x, layout = args[0], args[0]._layout
    given = dict(zip(("indices", "values", "accumulate"), args[1:], strict=False)) | kwargs
    given["indices"] = _on_device_of(x, tuple(given["indices"]))
    if any(map(is_mask, given["indices"])) and given.get("accumulate", False):
        given["indices"] = _with_places(given["indices"], layout)
    if any(map(is_mask, given["indices"])):
        y = x if name.endswith("_") else x.clone()
        y[tuple(slice(None) if each is None else each for each in given["indices"])] = given[
            "values"
        ]
        return y
    items = _items(name, given["indices"], layout)
    if not any(isinstance(each, torch.Tensor) for each in items):
        raise unsupported(name, "index tensors are needed", layout)
    there, region, key = _places(x, items)
    value = given["values"]
    value = fitted(value.reshape(indexed_lengths(value, region.shape)), region)
    indices = tuple(each for each in key if isinstance(each, torch.Tensor))
    origin = _origin(name, x, there)
    y = made(origin.index_put(indices, value, given.get("accumulate", False)), there)
    return _replaced(name, x, y.move_to(layout))


@rule("copy_", plain=True)
def copy(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Copy the values of another tensor, moved to the layout of this one.

    `y[key].copy_(x)` writes into y like `y[key] = x`: if y is a plain tensor to which nothing but
    this view refers, or a spread one, of which this slice is a copy here.
    """
    view, value = args[0], argument(args, kwargs, 1, "src", None)
    is_fit = isinstance(value, torch.Tensor) and value.dim() <= view.dim()
    if is_fit and isinstance(view, Tensor) and may_go_back(view):
        find_base, taken = view.__dict__["_taken"]  # the tensor of which this is a slice
        base = find_base()
        if base is not None:
            items = tuple(slice(*each) if isinstance(each, tuple) else each for each in taken)
            # A change that is not recorded keeps the view in the graph, as it keeps the base.
            is_recorded = torch.is_grad_enabled() or view._part.requires_grad
            base[items] = value  # removes the part of the view
            with torch.set_grad_enabled(is_recorded):
                again: Any = base[items]
            view._part, view._layout = again._part, again._layout
            if view._part.requires_grad:
                with torch._C.DisableTorchFunctionSubclass():
                    view.requires_grad_()
            return view
    elif is_fit and isinstance(value, Tensor) and type(view) is torch.Tensor and view._is_view():
        plain: Any = view._base
        found = slices_of(view)
        if found and adopted(plain, _around("__setitem__", plain, found, value), view):
            plain[found] = value
            become_view(view, plain[found])
            return view
    return pointwise(name, func, args, kwargs)


def _replaced(name: str, x: Tensor, result: Tensor) -> Tensor:
    """The result of a function, copied into its first operand if the name ends in `_`."""
    if not name.endswith("_"):
        return result
    check_change(name, x, [x._layout])
    x._part.copy_(moved(result, x._layout))
    return changed(x)


def _origin(name: str, x: Tensor, there: Layout) -> torch.Tensor:
    """The part that a function reads; a copy if the part will change and a derivative reads it."""
    part = moved(x, there)
    changes = name.endswith("_") and part is x._part and torch.is_grad_enabled()
    return part.clone() if changes else part


def _out_of_place(name: str) -> Any:
    return getattr(torch, name.removesuffix("_"))


def _rows_replaced(
    name: str,
    x: Tensor,
    dim: int,
    along: Callable[[torch.Tensor, int], torch.Tensor | None],
    index: torch.Tensor,
    source: Any,
    write: Write,
    adds: bool,
    negative: bool = False,
) -> Tensor | None:
    """The result of a function that writes rows, each on the worker that has it.

    None if nothing is split along the dimension, or if the index does not select rows alone.
    """
    layout = x._layout
    named = isinstance(source, torch.Tensor) and source.dim() > 0
    if any(each.partition != layout.partition for each in held_layouts((index, source))):
        return None
    if not any(
        each.is_split(dim) for each in held_layouts((x, source if named else None))
    ) and not (isinstance(index, Tensor) and index._layout.shape and index._layout.is_split(0)):
        return None
    rows = along(index, dim)
    if rows is None:
        return None
    if isinstance(source, torch.Tensor) and not named:
        source = whole_of(source)
    found = receiving(
        layout,
        dim,
        source._layout if isinstance(source, Tensor) else None,
        rows._layout if isinstance(rows, Tensor) else None,
    )
    if found is None:
        return None
    there, _ = found
    part = _origin(name, x, there)
    adds = adds and part.dtype != torch.bool
    y = written_rows(part, there, dim, rows, source, write, adds=adds, negative=negative)
    return _replaced(name, x, made(y, there).move_to(layout))


def _whole_index(index: torch.Tensor, layout: Layout) -> torch.Tensor:
    spread = as_spread(index, layout.partition)
    return moved(spread, shared_whole(layout.partition, index.shape))


@rule("index_select")
def index_select(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Rows at indices of a dimension, in the given order."""
    x = args[0]
    dim, index = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index")
    outlines(func, args, kwargs)  # torch's own error
    if not x.dim():
        return made(func(opened(x)[0], dim, _whole_index(index, x._layout)), x._layout)
    (dim,) = dims_of(dim, x._layout)
    if _are_rows(x._layout, dim, index):
        return rows_at(x, dim, index.reshape(-1), negative=False)
    check_range(index, dim, x.shape[dim])
    return x[(*[slice(None)] * dim, index.reshape(-1))]


def _are_rows(layout: Layout, dim: int, index: torch.Tensor) -> bool:
    """Whether an index on the same workers selects rows of a split dimension."""
    apart = isinstance(index, Tensor) and index._layout.partition != layout.partition
    return has_rows(layout, dim) and not apart


@rule("take")
def take(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Values at indices of the flattened tensor."""
    outlines(func, args, kwargs)  # torch's own error
    index = argument(args, kwargs, 1, "index")
    # never a number, of which there would be a view
    return args[0].reshape(-1)[index.reshape(-1)].reshape(index.shape)


@rule("gather")
def gather(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """y[i][j] = x[index[i][j]][j]: whole along the dimension, else both have the same layout."""
    x = args[0]
    dim, index = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index")
    outlines(func, args, kwargs)  # torch's own error
    if kwargs.get("sparse_grad"):
        raise unsupported(name, "gradients of spread tensors are not sparse", x._layout)
    if not x.dim():
        index = _whole_index(index, x._layout)
        return made(func(opened(x)[0], dim, index), shared_whole(x._layout.partition, index.shape))
    (dim,) = dims_of(dim, x._layout)
    shape = tuple(index.shape) or (1,)
    corner = tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(shape))
    row = row_index(index, dim) if index.dim() and _are_rows(x._layout, dim, index) else None
    if row is not None:
        y = rows_at(x[corner], dim, row, negative=False)
        return y.move_to(index._layout) if isinstance(index, Tensor) else y
    check_range(index, dim, x.shape[dim])
    origin = x._layout
    x = x[corner]
    there = x._layout.hosted((dim,))
    places = there.reshaped_along(shape, (dim,))
    spread = as_spread(index.reshape(shape), there.partition)
    chosen = moved(spread, places)
    y = made(computed(lambda part: part.gather(dim, chosen), moved(x, there)), places)
    y = y.move_to(spread._layout if isinstance(index, Tensor) else origin.split_like(shape))
    return y.reshape(index.shape)


@rule("take_along_dim")
def take_along_dim(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`gather` for tensors that are broadcast against each other."""
    x, index = args[0], argument(args, kwargs, 1, "indices")
    dim = argument(args, kwargs, 2, "dim")
    outlines(func, args, kwargs)  # torch's own error
    if dim is None:
        return x.reshape(-1).gather(0, index.reshape(-1))
    (dim,) = dims_of(dim, x._layout)
    index = torch.where(index < 0, index + x.shape[dim], index)  # from the end, unlike `gather`
    # along the dimension both keep their lengths, along others they are broadcast
    rest = [[1 if d == dim else n for d, n in enumerate(each.shape)] for each in (x, index)]
    lengths = list(torch.broadcast_shapes(*rest))
    x = x.expand(*lengths[:dim], x.shape[dim], *lengths[dim + 1 :])
    index = index.expand(*lengths[:dim], index.shape[dim], *lengths[dim + 1 :])
    return x.gather(dim, index)


@rule(
    *("scatter", "scatter_add", "scatter_reduce", "scatter_", "scatter_add_", "scatter_reduce_"),
)
def scatter(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """x[index[i][j]][j] = src[i][j]: whole along the dimension, else all have the same layout."""
    x = args[0]
    names = ("dim", "index", "src", "reduce")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    dim, index = given.pop("dim"), given.pop("index")
    source = given.pop("src", given.pop("value", None))
    function = _out_of_place(name)
    outlines(function, (x, dim, index, source), given)  # torch's own error
    layout = x._layout
    if not layout.shape or not index.dim():
        raise unsupported(name, "tensors without dimensions are not supported", layout)
    (dim,) = dims_of(dim, layout)
    shape = tuple(index.shape)
    if isinstance(source, torch.Tensor):
        source = source[tuple(slice(n) for n in shape)]
    if all(n == m for d, (n, m) in enumerate(zip(shape, layout.shape, strict=True)) if d != dim):

        def write(part: torch.Tensor, rows: torch.Tensor, values: Any) -> torch.Tensor:
            lengths = [len(rows) if d == dim else n for d, n in enumerate(part.shape)]
            at = rows.view([-1 if d == dim else 1 for d in range(part.dim())]).expand(lengths)
            found: torch.Tensor = function(part, dim, at, values, **given)
            return found

        adds = name.startswith("scatter_add") or given.get("reduce") in ("sum", "add")
        y = _rows_replaced(name, x, dim, row_index, index, source, write, adds)
        if y is not None:
            return y
    check_range(index, dim, layout.shape[dim])
    there = x._layout.hosted((dim,))
    places = there  # the layout of the index: the first indices of x, but along `dim` its own
    for d, (cut, n) in enumerate(zip(there.cuts, shape, strict=True)):
        clipped = tuple((min(a, n), min(b, n)) for a, b in cut.intervals)
        places = places.recut(d, Cut(cut.axes, ((0, n),) if d == dim else clipped), n)
    chosen = moved(as_spread(index, there.partition), places)
    if isinstance(source, torch.Tensor):
        source = moved(as_spread(source, there.partition), places)
    y = made(function(_origin(name, x, there), dim, chosen, source, **given), there)
    return _replaced(name, x, y.move_to(layout))


@rule(
    *("index_add", "index_copy", "index_fill", "index_reduce"),
    *("index_add_", "index_copy_", "index_fill_", "index_reduce_"),
)
def index_write(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Write slices at indices of a dimension, which is whole meanwhile."""
    x, layout = args[0], args[0]._layout
    last = "value" if name.startswith("index_fill") else "source"
    given = dict(zip(("dim", "index", last, "reduce"), args[1:], strict=False)) | kwargs
    dim, index, source = given.pop("dim"), given.pop("index"), given.pop(last)
    function = _out_of_place(name)
    outlines(function, (x, dim, index, source), given)  # torch's own error
    if not layout.shape:
        raise unsupported(name, "tensors without dimensions are not supported", layout)
    (dim,) = dims_of(dim, layout)

    def write(part: torch.Tensor, rows: torch.Tensor, values: Any) -> torch.Tensor:
        found: torch.Tensor = function(part, dim, rows, values, **given)
        return found

    adds, counts_back = name.startswith("index_add"), last == "value"
    y = _rows_replaced(
        name, x, dim, lambda i, _: i.reshape(-1), index, source, write, adds, counts_back
    )
    if y is not None:
        return y
    check_range(index, dim, layout.shape[dim], negative=counts_back)
    there = x._layout.hosted((dim,))
    if isinstance(source, torch.Tensor) and source.dim():
        lying = there.reshaped_along(tuple(source.shape), (dim,))
        source = moved(as_spread(source, there.partition), lying)
    elif isinstance(source, torch.Tensor):
        source = fitted(source, there)
    origin = _origin(name, x, there)
    y = made(function(origin, dim, _whole_index(index, layout), source, **given), there)
    return _replaced(name, x, y.move_to(layout))
