"""Marks of reshaped shards: which dimension is split when a shard gets another shape.

A shard is given the lengths that it has here, not those of the whole tensor, so that the table of
`tessel.tensor` cannot be asked: where the split dimension went is read from the lengths, and where
they allow several readings the mark is lost.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from tessel.core import boxes
from tessel.distributed.call import Shape, TorchCall
from tessel.distributed.mark import Mark, State


def reshaped(call: TorchCall, mark: Mark, shape: Shape, result: Tensor) -> State:
    """Dimensions beside the split one may change; it may be split and merged as the outer one."""
    if any(isinstance(each, torch.dtype) for each in call.args[1:]) and result.shape != shape:
        return call.lost("to a dtype of another width")
    new = tuple(result.shape)
    regrouped = _regrouped_one if shape[mark.dim] == 1 else _regrouped
    known, sizes = regrouped(call, mark, shape, new), call.rest(1, "shape", "size")
    if isinstance(known, Mark) or -1 not in sizes:
        return known
    return _inferred(call, mark, shape, new, sizes.index(-1))


def flattened(call: TorchCall, mark: Mark, shape: Shape, result: Tensor) -> State:
    """The split dimension may be the outer one of those that merge."""
    start, stop = (
        int(call.argument(position, name, default=default)) % len(shape)
        for position, name, default in ((1, "start_dim", 0), (2, "end_dim", -1))
    )
    if not start <= mark.dim <= stop:
        return mark.at(mark.dim - (stop - start) * (mark.dim > stop))
    if prod(shape[start : mark.dim]) != 1:
        return call.lost("with dimensions before the one that is split")
    return _resized(mark.at(start), prod(shape[mark.dim + 1 : stop + 1]), 1)


def _regrouped_one(call: TorchCall, mark: Mark, shape: Shape, new: Shape) -> State:
    """A split dimension of length 1 could go anywhere, unless it stays among as many ones."""
    start = mark.dim - _ones_before(shape, mark.dim)
    stop = mark.dim + 1 + _ones_before(shape[::-1], len(shape) - 1 - mark.dim)
    behind = len(shape) - start
    if shape[:stop] == new[:stop] and new[stop : stop + 1] != (1,):
        return mark
    if shape[start:] == new[-behind:] and new[-behind - 1 : -behind] != (1,):
        return mark.at(mark.dim + len(new) - len(shape))
    return call.lost("where the split dimension may be one or another")


def _inferred(call: TorchCall, mark: Mark, shape: Shape, new: Shape, place: int) -> State:
    """The split dimension goes where the length is left open: numbers are the same on all workers.

    So shards that are 1 long, on some workers or on all, go where longer ones go.
    """
    lead = _common(shape[: mark.dim], new[:place])
    before, inner = prod(shape[lead : mark.dim]), prod(shape[mark.dim + 1 :])
    unit = any(new[dim] == 1 and prod(new[lead:dim]) == before for dim in range(lead, place))
    if unit or prod(new[lead:place]) != before:
        return call.lost("where the split dimension may be one or another")
    return _resized(mark.at(place), inner, prod(new[place + 1 :]))


def _regrouped(call: TorchCall, mark: Mark, shape: Shape, new: Shape) -> State:
    """Where all dimensions up to the split one are as before, or all from it on, so is that."""
    after, place = mark.dim + 1, mark.dim + len(new) - len(shape)
    found = set()
    if shape[:after] == new[:after] and prod(shape[after:]) == prod(new[after:]):
        found.add(mark.dim)
    ahead = place >= 0 and prod(shape[: mark.dim]) == prod(new[:place])
    if ahead and shape[mark.dim :] == new[place:]:
        found.add(place)
    if len(found) == 1 and not _may_be_outer(mark, shape, new, max(found)):
        return mark.at(found.pop())
    if found:
        return call.lost("where the split dimension may be one or another")
    lead, trail = _common(shape[: mark.dim], new), _common(shape[: mark.dim : -1], new[::-1])
    old, rest = shape[lead : len(shape) - trail], new[lead : len(new) - trail]
    if 0 in old[: mark.dim - lead] + old[mark.dim - lead + 1 :]:
        return call.lost("of an empty tensor")
    moved = _rescaled(call, mark.at(mark.dim - lead), old, rest)
    return moved.at(moved.dim + lead) if isinstance(moved, Mark) else moved


def _common(some: Shape, others: Shape) -> int:
    """How many of the first lengths are equal."""
    pairs = zip(some, others, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))


def _may_be_outer(mark: Mark, shape: Shape, new: Shape, place: int) -> bool:
    """Whether a new dimension of length 1 may be the outer one of two, split over workers."""
    appeared = _ones_before(new, place) > _ones_before(shape, mark.dim)
    inner = shape[mark.dim]
    if not appeared or mark.size is None or not inner:
        return appeared
    size = mark.size / inner
    return size.is_integer() and _aligned(mark, 1, int(size), inner)


def _ones_before(shape: Shape, place: int) -> int:
    count = 0
    while count < place and shape[place - 1 - count] == 1:
        count += 1
    return count


def _rescaled(call: TorchCall, mark: Mark, shape: Shape, new: Shape) -> State:
    """The split dimension is the outer one of those that merge, and of those into which it goes."""
    before, inner = prod(shape[: mark.dim]), prod(shape[mark.dim + 1 :])
    begin = [dim for dim in range(len(new)) if prod(new[:dim]) == before]
    empty = shape[mark.dim] == 0
    places = [dim for dim in begin if (new[dim] == 0 if empty else new[dim] != 1)]
    unit = not empty and any(new[dim] == 1 for dim in begin)
    if len(places) != 1 or unit:
        return call.lost("where the split dimension may be one or another")
    return _resized(mark.at(places[0]), inner, prod(new[places[0] + 1 :]))


def _resized(mark: Mark, inner: int, new_inner: int) -> Mark:
    """The mark of a dimension that was merged with what it contains, or split from it.

    Where balanced parts of the one are not those of the other, the size is not told.
    """
    if mark.size is None:
        return mark
    size = mark.size * inner / max(new_inner, 1)
    aligned = size.is_integer() and _aligned(mark, inner, int(size), new_inner)
    return Mark(mark.dim, mark.partition, int(size) if aligned else None)


def _aligned(mark: Mark, inner: int, size: int, new_inner: int) -> bool:
    """Whether balanced parts of one length begin where those of the other do."""
    assert mark.size is not None
    parts = mark.partition.size
    old, new = boxes.balanced(mark.size, parts), boxes.balanced(size, parts)
    return [a * inner for a, _ in old] == [a * new_inner for a, _ in new]


def unflattened(call: TorchCall, mark: Mark, shape: Shape, result: Tensor) -> State:
    dim = int(call.argument(1, "dim")) % len(shape)
    if dim != mark.dim:
        return mark.at(mark.dim + (result.ndim - len(shape)) * (dim < mark.dim))
    inner: int = prod(result.shape[dim + 1 : dim + 1 + result.ndim - len(shape)])
    return _resized(mark, 1, inner)
