"""Hosting: where a tensor goes whose split dimensions have to be whole for a while.

A function that mixes some dimensions needs them whole, and leaves the others alone. Instead of
giving every worker everything, the axes of the grid that split the mixed dimensions go over to
others that are long enough, their hosts: each worker sends and receives one part's worth, computes
its share, and no worker holds more than before. Where there is no host, workers along the axis do
the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tessel.core import boxes
from tessel.core.layout import Cut, Layout, Shape
from tessel.tensor.table import computed, made, moved, try_values
from tessel.tensor.tensor import Tensor
from tessel.transport import kept_in_job


@kept_in_job
def hosted(layout: Layout, dims: tuple[int, ...], first: tuple[int, ...] = ()) -> Layout:
    """A layout of the same tensor with some dimensions whole, on as many workers as it can be.

    The layout itself, if they are. Hosts are the longest dimensions, of those in `first` if one is
    long enough.

    >>> import tessel
    >>> layout = tessel.Layout.balanced(tessel.world(), (6,))
    >>> hosted(layout, (0,)) is layout
    True
    """
    if not any(map(layout.is_split, dims)):
        return layout
    sizes = layout.partition.shape
    cuts = list(layout.cuts)
    for dim in dims:
        cuts[dim] = Cut.whole(layout.shape[dim])
    shared = list(layout.shared)
    for axis in (axis for dim in dims for axis in layout.cuts[dim].axes):
        hosts = [
            dim
            for dim, cut in enumerate(cuts)
            if dim not in dims and layout.shape[dim] >= len(cut.intervals) * sizes[axis]
        ]
        if not hosts or sizes[axis] == 1:
            shared.append(axis)
            continue
        # the longest parts, so that what remains of them is even
        hosts = [dim for dim in hosts if dim in first] or hosts
        host = max(hosts, key=lambda dim: layout.shape[dim] / len(cuts[dim].intervals))
        axes = (*cuts[host].axes, axis)
        count = len(cuts[host].intervals) * sizes[axis]
        cuts[host] = Cut(axes, boxes.balanced(layout.shape[host], count))
    return replace(layout, cuts=tuple(cuts), shared=tuple(sorted(shared)))


@kept_in_job
def reshaped_along(layout: Layout, shape: Shape, dims: tuple[int, ...]) -> Layout:
    """The layout of a result whose whole dimensions `dims` have other lengths than the input's."""
    cuts = tuple(
        Cut(cut.axes, ((0, shape[dim]),)) if dim in dims else cut
        for dim, cut in enumerate(layout.cuts)
    )
    return replace(layout, shape=shape, cuts=cuts)


@kept_in_job
def split_like(layout: Layout, shape: Shape) -> Layout:
    """A tensor of another shape that lies as `layout` does, balanced where its lengths differ."""
    even = layout.resized(shape)
    cuts = tuple(
        old if n == m else new
        for old, new, n, m in zip(layout.cuts, even.cuts, layout.shape, shape, strict=True)
    )
    return replace(even, cuts=cuts)


def along(x: Tensor, dims: Sequence[int], compute: Callable[[torch.Tensor], Any]) -> Any:
    """What a function that mixes some dimensions, and keeps their number, makes of a tensor.

    Args:
        x: the tensor.
        dims: what is mixed; the others are treated one by one.
        compute: the function of a part in which these are whole; it gives one tensor, or a tuple.
    """
    mixed = tuple(dims)
    layout = x._layout
    there = hosted(layout, mixed)
    part = moved(x, there)
    try_values(compute, part, there)
    result = computed(compute, part)
    if isinstance(result, tuple):
        members = [_back(each, layout, there, mixed) for each in result]
        return tuple(members) if type(result) is tuple else type(result)(members)
    return _back(result, layout, there, mixed)


def _back(part: torch.Tensor, layout: Layout, there: Layout, dims: tuple[int, ...]) -> Tensor:
    """A result lies as the input did, also where dimensions have other lengths now."""
    shape = tuple(
        part.shape[dim] if dim in dims else length for dim, length in enumerate(layout.shape)
    )
    found = made(part, reshaped_along(there, shape, dims))
    return found.move_to(split_like(layout, shape))
