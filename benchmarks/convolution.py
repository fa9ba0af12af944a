"""What the exchange of a distributed convolution costs.

Two workers of one thread convolve a tensor that is split along its rows, in three ways, in turn:
each its own part, with nothing exchanged (which gives wrong values at the seam, and is the least
that it can cost); by strips, where the part stays where it lies and is convolved while its
surroundings travel; and by a copy of the part into a larger tensor, with what lies around it.
Medians over the rounds, in milliseconds, of the slower worker, and ratios to the first.

    python benchmarks/convolution.py [--rounds 15] [--channels 16 64] [--size 512]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tessel
from tessel.nn import strips
from tessel.testing import WorkerPool

WAYS = ("nothing exchanged", "by strips", "by a copy")


def steps(channels: int, size: int, backward: bool) -> list[Callable[[], None]]:
    """One for each way."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])
    layer = tessel.nn.DistributedConv2d(P, channels, channels, 3, padding=1)
    shape = tessel.Layout.balanced(P, (1, channels, size, size)).local_shape
    x = torch.randn(shape, requires_grad=backward)
    layer.requires_grad_(backward)
    grad = torch.ones(shape)

    def run(convolve: Callable[[Tensor], Tensor]) -> None:
        y = convolve(x)
        if backward:
            y.backward(grad)
            x.grad = None
            layer.zero_grad()

    def alone() -> None:
        run(lambda x: F.conv2d(x, layer.weight, layer.bias, padding=1))

    def spread(least: int) -> Callable[[], None]:
        def step() -> None:
            strips.LEAST_VALUES = least
            run(layer)

        return step

    return [alone, spread(0), spread(1 << 60)]


def measure(channels: int, size: int, backward: bool, rounds: int) -> list[float]:
    """Median milliseconds of each way on this worker."""
    ways = steps(channels, size, backward)
    times: list[list[float]] = [[] for _ in ways]
    meet = tessel.nn.AllSumReduce(tessel.world(), [0])
    for _ in range(rounds + 2):
        for step, found in zip(ways, times, strict=True):
            meet(torch.ones(1))  # begin together
            begin = time.perf_counter()
            step()
            found.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(each[2:]) for each in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--size", type=int, default=512)
    args = parser.parse_args()
    table = Table("convolution 3 × 3", title=f"2 workers, {args.size} × {args.size}, float32")
    for way in WAYS:
        table.add_column(way, justify="right")
    with WorkerPool(2, threads=1, timeout=600) as pool:
        for channels in args.channels:
            for backward in (False, True):
                results = pool.run(measure, channels, args.size, backward, args.rounds)
                least, *others = (max(each) for each in zip(*results, strict=True))
                table.add_row(
                    f"{channels} channels, {'with backward' if backward else 'forward'}",
                    f"{least:.1f} ms",
                    *(f"{other:.1f} ms, {other / least:.2f}" for other in others),
                )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
