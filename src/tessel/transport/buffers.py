"""Buffers: the tensors of one exchange, with the workers that receive or send them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SendBuffer(NamedTuple):
    """A tensor for a worker: with any strides; it must not change before the exchange is over."""

    worker: int
    tensor: Tensor


class ReceiveBuffer(NamedTuple):
    """A place for a tensor from a worker: with any strides; overwritten, or added to."""

    worker: int
    place: Tensor
    adds: bool = False

    def put(self, values: Tensor) -> None:
        """Write received values to their place, or add them."""
        self.place.add_(values) if self.adds else self.place.copy_(values)
