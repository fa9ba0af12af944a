"""Hosting: the layouts of tensors whose split dimensions must be whole for a while.

A function that mixes some dimensions needs them whole, and is independent along the others.
Instead of giving every worker everything, the axes of the grid that split the mixed dimensions
split others that are long enough, their hosts: each worker sends and receives one part's worth,
computes its share, and no worker holds more than before. Without a host, all workers along the axis
do the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessel.core.layout import Layout
from tessel.tensor.table import computed, made, moved, try_values
from tessel.tensor.tensor import Tensor


def along(x: Tensor, dims: Sequence[int], compute: Callable[[torch.Tensor], Any]) -> Any:
    """Apply a function that mixes some dimensions, and keeps their number, to a tensor.

    Args:
        x: the tensor.
        dims: the dimensions that are mixed; the function is independent along others.
        compute: the function of a part in which these are whole; it returns one tensor, or a tuple.
    """
    mixed = tuple(dims)
    layout = x._layout
    there = layout.hosted(mixed)
    part = moved(x, there)
    try_values(compute, part, there)
    result = computed(compute, part)
    if isinstance(result, tuple):
        members = [_back(each, layout, there, mixed) for each in result]
        return tuple(members) if type(result) is tuple else type(result)(members)
    return _back(result, layout, there, mixed)


def _back(part: torch.Tensor, layout: Layout, there: Layout, dims: tuple[int, ...]) -> Tensor:
    """Move a result back to the layout of the input, even if lengths have changed."""
    shape = tuple(
        part.shape[dim] if dim in dims else length for dim, length in enumerate(layout.shape)
    )
    found = made(part, there.reshaped_along(shape, dims))
    return found.move_to(layout.split_like(shape))
