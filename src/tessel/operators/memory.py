"""The order of a tensor's dimensions in memory, as planning sees it."""

from __future__ import annotations

from torch import Tensor

MemoryOrder = tuple[int, ...]  # dimensions, the last one with the smallest strides


def order_of(x: Tensor) -> MemoryOrder:
    """The order of a tensor's dimensions in memory.

    >>> import torch
    >>> order_of(torch.ones(2, 3, 4).movedim(0, -1))
    (2, 0, 1)
    """
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))


def inverse_of(order: MemoryOrder) -> MemoryOrder:
    """The inverse of an order.

    >>> inverse_of((2, 0, 1))
    (1, 2, 0)
    """
    return tuple(order.index(dim) for dim in range(len(order)))


def in_order(x: Tensor, order: MemoryOrder) -> Tensor:
    """The tensor with its dimensions in this order; the tensor itself if they are in it.

    Each view is a node of autograd's graph, which takes its time both forward and backward.
    """
    return x if order == tuple(range(x.dim())) else x.permute(order)


def in_shape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor in this shape; the tensor itself if it has it."""
    return x if x.shape == shape else x.reshape(shape)
