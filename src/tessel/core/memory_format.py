"""Memory formats: whether channels are the last dimension in memory, as GPUs prefer it."""

from __future__ import annotations

import torch
from torch import Tensor

from tessel.core.boxes import Shape

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def memory_format(x: Tensor) -> torch.memory_format:
    """The memory format of x, which may be a slice of a tensor with that format.

    A tensor that has both formats, such as one with one channel, counts as contiguous.

    >>> memory_format(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)[:, :, 1:])
    torch.channels_last
    """
    known = _LAST.get(x.dim())
    if known is None or x.is_contiguous():
        return torch.contiguous_format
    if x.is_contiguous(memory_format=known):
        return known
    # a slice has the strides of the whole: those of channels are the smallest, the rest in order
    shape, steps = x.shape, x.stride()
    order = [steps[0], *steps[2:], steps[1]]
    is_last = shape[1] > 1 == steps[1] and order == sorted(order, reverse=True)
    return known if is_last and order[-2] >= shape[1] else torch.contiguous_format


def is_channels_last(x: Tensor) -> bool:
    return memory_format(x) != torch.contiguous_format


def with_usual_strides(x: Tensor) -> Tensor:
    """A view of x in which dimensions of one index have the strides of its memory format.

    These strides are arbitrary, and torch's kernel for the gradient of batch norm takes a tensor
    with channels last for a contiguous one if the strides are small, and reads it in that order.

    >>> x = torch.ones(5, 4, 3).movedim(-1, 0).unsqueeze(0)
    >>> x.stride(), with_usual_strides(x).stride()
    ((3, 1, 12, 3), (60, 1, 12, 3))
    """
    known = _LAST.get(x.dim())
    if known is None or 1 not in x.shape or x.is_contiguous():
        return x
    if not x.is_contiguous(memory_format=known):
        return x
    steps, step = [0] * x.dim(), 1
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        steps[dim], step = step, step * x.shape[dim]
    return x.as_strided(x.shape, steps)


def room_like(x: Tensor, shape: Shape) -> Tensor:
    """Memory for a tensor of another shape, in the memory format of x."""
    known = memory_format(x) if len(shape) == x.dim() else torch.contiguous_format
    if known == torch.contiguous_format:
        return x.new_empty(shape)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=known)


def in_a_row(x: Tensor, channels_last: bool) -> Tensor:
    """All values of x in one row, in the order of memory if channels are last; else as usual."""
    return (x.movedim(1, -1) if channels_last else x).reshape(-1)


def from_a_row(row: Tensor, shape: Shape, channels_last: bool) -> Tensor:
    """The tensor of this shape whose values are stored in a row."""
    if not channels_last:
        return row.view(shape)
    return row.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
