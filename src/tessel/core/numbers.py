"""Small constant tensors, kept on the devices that asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tessel.core.context import is_compiling


@contextmanager
def to_keep() -> Iterator[None]:
    """Make constants that are plain and differentiable, wherever they are first asked for."""
    with torch.inference_mode(False), unset_fake_temporarily():
        yield


def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor on a device, which nobody may change.

    They are copied to a GPU once: otherwise the host would wait each time until the GPU is idle.
    A graph has its own.
    """
    if is_compiling():
        return torch.tensor(numbers, dtype=dtype, device=device)
    return _kept(numbers, dtype, device)


@lru_cache(maxsize=4096)
def _kept(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with to_keep():
        return torch.tensor(numbers, dtype=dtype, device=device)
