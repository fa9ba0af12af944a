"""Shardings of reshaped shards: the split dimension of a shard in its new shape.

A shard is reshaped to the lengths of this worker's part, not to those of the whole tensor, so the
table of `tessel.tensor` does not apply: the new place of the split dimension is read from the
lengths, and where these are ambiguous the sharding is lost.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from tessel.core import boxes
from tessel.distributed.shardings import Sharding, State
from tessel.distributed.torch_call import Shape, TorchCall


def reshaped(call: TorchCall, sharding: Sharding, shape: Shape, result: Tensor) -> State:
    """The other dimensions may change; the split one may be merged or split as the outer one."""
    if any(isinstance(each, torch.dtype) for each in call.args[1:]) and result.shape != shape:
        return call.lost("to a dtype of another width")
    new = tuple(result.shape)
    known, sizes = _regrouped(call, sharding, shape, new), call.rest("shape", "size")
    if isinstance(known, Sharding) or -1 not in sizes:
        return known
    # The split dimension goes where the length is given as -1: the other lengths are the same on
    # all workers. So shards of length 1, on some workers or on all, go where longer ones go.
    place = sizes.index(-1)
    lead = _common(shape[: sharding.dim], new[:place])
    before, inner = prod(shape[lead : sharding.dim]), prod(shape[sharding.dim + 1 :])
    unit = any(new[dim] == 1 and prod(new[lead:dim]) == before for dim in range(lead, place))
    if unit or prod(new[lead:place]) != before:
        return call.lost("where the split dimension may be one or another")
    return _resized(sharding.at(place), inner, prod(new[place + 1 :]))


def flattened(call: TorchCall, sharding: Sharding, shape: Shape, result: Tensor) -> State:
    """The split dimension may be the outer one of those that merge."""
    start, stop = (
        int(call.argument(position, name, default=default)) % len(shape)
        for position, name, default in ((1, "start_dim", 0), (2, "end_dim", -1))
    )
    if not start <= sharding.dim <= stop:
        return sharding.at(sharding.dim - (stop - start) * (sharding.dim > stop))
    if prod(shape[start : sharding.dim]) != 1:
        return call.lost("with dimensions before the one that is split")
    return _resized(sharding.at(start), prod(shape[sharding.dim + 1 : stop + 1]), 1)


def _regrouped(call: TorchCall, sharding: Sharding, shape: Shape, new: Shape) -> State:
    """The split dimension stays if all dimensions up to it do, or all from it on."""
    after, place = sharding.dim + 1, sharding.dim + len(new) - len(shape)
    if shape[sharding.dim] == 1:  # it could go anywhere, unless the ones around it stay as many
        start = sharding.dim - _ones_before(shape, sharding.dim)
        stop = after + _ones_before(shape[::-1], len(shape) - after)
        behind = len(shape) - start
        if shape[:stop] == new[:stop] and new[stop : stop + 1] != (1,):
            return sharding
        if shape[start:] == new[-behind:] and new[-behind - 1 : -behind] != (1,):
            return sharding.at(place)
        return call.lost("where the split dimension may be one or another")
    found = set()
    if shape[:after] == new[:after] and prod(shape[after:]) == prod(new[after:]):
        found.add(sharding.dim)
    ahead = place >= 0 and prod(shape[: sharding.dim]) == prod(new[:place])
    if ahead and shape[sharding.dim :] == new[place:]:
        found.add(place)
    if len(found) == 1:
        (place,) = found
        # A new dimension of length 1 may be the outer one of two, split over workers.
        is_outer = _ones_before(new, place) > _ones_before(shape, sharding.dim)
        inner = shape[sharding.dim]
        if is_outer and sharding.size is not None and inner:
            size = sharding.size / inner
            is_outer = size.is_integer() and _aligned(sharding, 1, int(size), inner)
        if not is_outer:
            return sharding.at(place)
    if found:
        return call.lost("where the split dimension may be one or another")
    lead, trail = (
        _common(shape[: sharding.dim], new),
        _common(shape[: sharding.dim : -1], new[::-1]),
    )
    old, rest = shape[lead : len(shape) - trail], new[lead : len(new) - trail]
    if 0 in old[: sharding.dim - lead] + old[sharding.dim - lead + 1 :]:
        return call.lost("of an empty tensor")
    # The split dimension is the outer one of those that merge, and of those into which it goes.
    dim = sharding.dim - lead
    begin = [k for k in range(len(rest)) if prod(rest[:k]) == prod(old[:dim])]
    is_empty = old[dim] == 0
    places = [k for k in begin if (rest[k] == 0 if is_empty else rest[k] != 1)]
    if len(places) != 1 or (not is_empty and any(rest[k] == 1 for k in begin)):
        return call.lost("where the split dimension may be one or another")
    (place,) = places
    return _resized(sharding.at(lead + place), prod(old[dim + 1 :]), prod(rest[place + 1 :]))


def _common(some: Shape, others: Shape) -> int:
    """The number of leading lengths that are equal."""
    pairs = zip(some, others, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))


def _ones_before(shape: Shape, place: int) -> int:
    count = 0
    while count < place and shape[place - 1 - count] == 1:
        count += 1
    return count


def _resized(sharding: Sharding, inner: int, new_inner: int) -> Sharding:
    """The sharding of a dimension that was merged with inner ones, or split from them.

    Where balanced parts of the old dimension are not balanced parts of the new one, the size is
    None.
    """
    if sharding.size is None:
        return sharding
    size = sharding.size * inner / max(new_inner, 1)
    aligned = size.is_integer() and _aligned(sharding, inner, int(size), new_inner)
    return Sharding(sharding.dim, sharding.partition, int(size) if aligned else None)


def _aligned(sharding: Sharding, inner: int, size: int, new_inner: int) -> bool:
    """Whether balanced parts of one length begin where those of the other do."""
    assert sharding.size is not None
    parts = sharding.partition.size
    old, new = boxes.balanced(sharding.size, parts), boxes.balanced(size, parts)
    return [a * inner for a, _ in old] == [a * new_inner for a, _ in new]


def unflattened(call: TorchCall, sharding: Sharding, shape: Shape, result: Tensor) -> State:
    dim = int(call.argument(1, "dim")) % len(shape)
    if dim != sharding.dim:
        return sharding.at(sharding.dim + (result.ndim - len(shape)) * (dim < sharding.dim))
    inner: int = prod(result.shape[dim + 1 : dim + 1 + result.ndim - len(shape)])
    return _resized(sharding, 1, inner)
