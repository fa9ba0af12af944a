"""Buffers: the tensors of one exchange, with the workers that receive or send them."""

from __future__ import annotations

from typing import NamedTuple

import torch
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
        write(self.place, values, self.adds)


def write(place: Tensor, values: Tensor, adds: bool) -> None:
    """Write values to a place, or add them, in whichever mode the place was made.

    Messages may be written while a worker waits for something else, perhaps outside of the
    inference mode in which it began the exchange, where torch refuses to write to tensors of that
    mode.
    """
    if place.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            write(place, values, adds)
    else:
        place.add_(values) if adds else place.copy_(values)
