"""Buffers: the tensors of one exchange, with the workers they go to and come from."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SendBuffer(NamedTuple):
    """A tensor for a worker: any strides; it must not change before the exchange is over."""

    worker: int
    tensor: Tensor


class ReceiveBuffer(NamedTuple):
    """A place for what comes from a worker: any strides; written, or added to."""

    worker: int
    place: Tensor
    adds: bool = False

    def put(self, values: Tensor) -> None:
        """Put what came into its place."""
        self.place.add_(values) if self.adds else self.place.copy_(values)
