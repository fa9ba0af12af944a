"""Thin volumes: parts of a volume that torch would convolve slowly because of their shape.

For a single volume, torch uses oneDNN if the product of the number of channels and of all lengths
but the last is large, and otherwise copies windows into a matrix. A slab of 8×96×96 with 16
channels is below the limit, and takes three times as long as one of 16×96×96. For a convolution,
any dimension can be the last one: with the shortest there, the product is largest.
"""

from __future__ import annotations

from math import prod
from typing import TypeVar

import torch
from torch import Tensor

MOST_SLOW = 20480  # the product up to which torch does not use oneDNN (ATen's Convolution.cpp)
DimOrder = tuple[int, int, int]
T = TypeVar("T")


def order_for(x: Tensor, groups: int) -> DimOrder | None:
    """The order of a volume's three dimensions in which torch is fast; None to keep theirs."""
    if x.dim() != 5 or len(x) != 1 or groups != 1 or x.device.type != "cpu":
        return None  # the limit does not apply to several volumes, groups, or other devices
    if x.dtype != torch.float32 or not torch.backends.mkldnn.enabled:
        return None
    _, channels, *lengths = x.shape
    last = min(range(3), key=lambda dim: lengths[dim])
    if channels * prod(lengths[:2]) > MOST_SLOW:
        return None
    if channels * prod(lengths[:last] + lengths[last + 1 :]) <= MOST_SLOW:
        return None
    first, second = (dim for dim in range(3) if dim != last)
    return first, second, last


def in_order(values: tuple[T, ...], order: DimOrder) -> tuple[T, ...]:
    """Values for each dimension, in another order."""
    return tuple(values[dim] for dim in order)


def turned(x: Tensor, order: DimOrder) -> Tensor:
    """A tensor with its last three dimensions in another order."""
    return x.permute(0, 1, *(2 + dim for dim in order))


def turned_back(y: Tensor, order: DimOrder) -> Tensor:
    """A tensor with these dimensions in their own order, also in memory, for faster use later."""
    return y.permute(0, 1, *(2 + order.index(dim) for dim in range(3))).contiguous()
