"""How fast each movement is between two workers of this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tessel import nn
from tessel.launch import launch
from tessel.layout import zero_volume_tensor
from tessel.partition import world
from tessel.testing import count_traffic

_SMALL, _LARGE = 2**8, 2**20  # elements of float32: 1 KiB and 4 MiB
_TIME_LIMIT = 60.0


@dataclass(frozen=True)
class Rate:
    """The speed of a movement between two workers.

    Args:
        movement: its name.
        latency: the seconds of one with a small message.
        bandwidth: the bytes a second that each worker sends in one with a large message.
        num_bytes: the size of the large message.
    """

    movement: str
    latency: float
    bandwidth: float
    num_bytes: int


@dataclass(frozen=True)
class _Times:
    """What one worker saw of a movement."""

    movement: str
    small: float
    large: float
    bytes_sent: int


def measure_rates() -> list[Rate]:
    """Start two workers and measure every movement.

    >>> [rate.movement for rate in measure_rates()]  # doctest: +SKIP
    ['all-sum-reduce', 'broadcast', 'repartition', 'halo exchange']
    """
    results = launch(_measure, 2, timeout=_TIME_LIMIT)
    return [_rate(*times) for times in zip(*results, strict=True)]


def _rate(a: _Times, b: _Times) -> Rate:
    sent = max(a.bytes_sent, b.bytes_sent)
    return Rate(a.movement, max(a.small, b.small), sent / max(a.large, b.large), sent)


def _measure() -> list[_Times]:
    cases = zip(_movements(_SMALL), _movements(_LARGE), strict=True)
    return [
        _Times(name, _median(module, x, 50)[0], *_median(same, large, 7))
        for (name, module, x), (_, same, large) in cases
    ]


def _median(module: torch.nn.Module, x: Tensor, repeats: int) -> tuple[float, int]:
    """The median time of an application, and the bytes that this worker sends in it."""
    times = []
    with torch.no_grad():
        with count_traffic() as traffic:
            module(x)
        for _ in range(repeats):
            begin = time.perf_counter()
            module(x)
            times.append(time.perf_counter() - begin)
    return statistics.median(times), traffic.bytes_sent


def _movements(length: int) -> Iterator[tuple[str, torch.nn.Module, Tensor]]:
    """Each movement of two workers with an input of which `length` elements travel."""
    P = world()
    first = P.create_partition_inclusive([0])
    rows, columns = (P.create_cartesian_topology_partition(shape) for shape in ((2, 1), (1, 2)))
    side = math.isqrt(length)
    x = torch.zeros(length)
    yield "all-sum-reduce", nn.AllSumReduce(P, [0]), x
    yield "broadcast", nn.Broadcast(first, P), x if first.active else zero_volume_tensor()
    yield "repartition", nn.Repartition(rows, columns), torch.zeros(side, 2 * side)
    yield "halo exchange", nn.HaloExchange(P, [(length, length)]), x
