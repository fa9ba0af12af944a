"""Buffers: the tensors of one exchange, with the workers they go to and come from."""

from __future__ import annotations

from typing import NamedTuple

import torch
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
        write(self.place, values, self.adds)


def write(place: Tensor, values: Tensor, adds: bool) -> None:
    """Put values into a place, or add them to what is there, in whichever mode the place was made.

    What comes is written while a worker waits for anything else, perhaps outside of the inference
    mode in which it began the exchange, where torch would not write to a tensor of that mode.
    """
    if place.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            write(place, values, adds)
    else:
        place.add_(values) if adds else place.copy_(values)
