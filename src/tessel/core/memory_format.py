"""Memory formats: whether the channels of a tensor lie last in its memory, as GPUs prefer it."""

from __future__ import annotations

import torch
from torch import Tensor

from tessel.core.boxes import Shape

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def memory_format(x: Tensor) -> torch.memory_format:
    """That of x; it may be a slice of what has this format.

    A tensor that lies in both ways, as one with one channel, counts as contiguous.

    >>> memory_format(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)[:, :, 1:])
    torch.channels_last
    """
    known = _LAST.get(x.dim())
    if known is None or x.is_contiguous():
        return torch.contiguous_format
    if x.is_contiguous(memory_format=known):
        return known
    # of a slice strides are as of the whole: those of channels are the smallest, the rest in order
    shape, steps = x.shape, x.stride()
    order = [steps[0], *steps[2:], steps[1]]
    is_last = shape[1] > 1 == steps[1] and order == sorted(order, reverse=True)
    return known if is_last and order[-2] >= shape[1] else torch.contiguous_format


def is_channels_last(x: Tensor) -> bool:
    return memory_format(x) != torch.contiguous_format


def room_like(x: Tensor, shape: Shape) -> Tensor:
    """Memory for a tensor of another shape, in the format of x."""
    known = memory_format(x) if len(shape) == x.dim() else torch.contiguous_format
    if known == torch.contiguous_format:
        return x.new_empty(shape)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=known)


def in_a_row(x: Tensor, channels_last: bool) -> Tensor:
    """All values of x, as they lie if its channels are last; else in the usual order."""
    return (x.movedim(1, -1) if channels_last else x).reshape(-1)


def from_a_row(row: Tensor, shape: Shape, channels_last: bool) -> Tensor:
    """The tensor of this shape whose values are in a row."""
    if not channels_last:
        return row.view(shape)
    return row.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
