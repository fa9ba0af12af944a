"""Random numbers that depend on a seed and the number of an item, not on the worker."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tessel.core.layout import Layout

SHARED = -1  # in the place of an item: what all workers draw together


def seed_of(seed: int, item: int, call: int = 0) -> int:
    """One seed for an item, and for each time that numbers are drawn for it.

    >>> seed_of(42, 0) == seed_of(42, 0), seed_of(42, 0) == seed_of(42, 1)
    (True, False)
    """
    words = repr((seed, item, call)).encode()
    return zlib.crc32(words) << 32 | zlib.adler32(words)


@contextmanager
def drawing(seed: int, item: int, call: int, device: torch.device) -> Iterator[None]:
    """Let torch's generators draw for an item; after the block they go on as if nothing was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_of(seed, item, call))
        yield


def wave_in(layout: Layout, dtype: torch.dtype) -> Tensor:
    """An image without order, a function of the index alone: the same in whatever parts it lies.

    x[i] = cos(Σ_d φ_d[i_d]), or exp(√−1 Σ_d φ_d[i_d]) if it is complex, with random angles φ_d.

    >>> import tessel
    >>> wave_in(tessel.Layout.balanced(tessel.world(), (3,)), torch.float64).shape
    torch.Size([3])
    """
    box = layout.box()
    if box is None:
        return torch.empty(0, dtype=dtype)
    # One random number for each index of each dimension: every worker draws all of them, which are
    # few, and none depends on how the image is split.
    generator = torch.Generator().manual_seed(0)
    angle = torch.zeros((), dtype=torch.float64)
    for length, (start, stop) in zip(layout.shape, box, strict=True):
        turns = torch.rand(length, generator=generator, dtype=torch.float64)
        angle = angle.unsqueeze(-1) + 2 * math.pi * turns[start:stop]
    wave = torch.polar(torch.ones_like(angle), angle) if dtype.is_complex else angle.cos()
    return wave.to(dtype)
