"""A model whose halos are known, and what they are when it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tessel


def convolutions() -> nn.Module:
    """Without a stride that would leave something out."""
    layers = (nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 5, padding=2, bias=False))
    return nn.Sequential(*layers)


def halo_bytes(grid: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """What this worker receives in a forward pass."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    model = tessel.nn.distribute_module(convolutions(), P)
    x: Any = tessel.spread(torch.ones(shape), P)
    with torch.no_grad():
        model(x)
        with tessel.testing.count_traffic() as traffic:
            model(x)
    return traffic.bytes_received
