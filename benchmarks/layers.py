"""What a Tessel layer costs beyond torch's own in a world of one, forward and backward.

Both layers have the same parameters and get the same tensor, in turn, in one process of one
thread. Medians over the rounds, in milliseconds, and the median of the rounds' ratios.

    python benchmarks/layers.py [--shape 1 16 512 512] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tessel


def pairs(channels: int) -> list[tuple[str, nn.Module, nn.Module]]:
    """Layers of torch, and the same over a partition of one worker."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    C = channels
    layers: list[tuple[str, tuple[object, ...], dict[str, object]]] = [
        ("Conv2d", (C, C, 3), {"padding": 1}),
        ("Conv2d", (C, C, 3), {"stride": 2, "padding": 1}),
        ("ConvTranspose2d", (C, C, 2), {"stride": 2}),
        ("MaxPool2d", (2,), {}),
        ("AvgPool2d", (3, 2, 1), {}),
        ("AdaptiveAvgPool2d", (1,), {}),
        ("BatchNorm2d", (C,), {}),
        ("InstanceNorm2d", (C,), {"affine": True}),
        ("GroupNorm", (4, C), {}),
        ("Upsample", (), {"scale_factor": 2, "mode": "bilinear"}),
    ]
    found = []
    for name, args, settings in layers:
        alone = getattr(nn, name)(*args, **settings)
        spread = getattr(tessel.nn, f"Distributed{name}")(P, *args, **settings)
        spread.load_state_dict(alone.state_dict())
        given = ", ".join([*map(str, args), *(f"{k}={v}" for k, v in settings.items())])
        found.append((f"{name}({given})", alone, spread))
    return found


def step(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward."""
    grad = torch.ones_like(layer(x))

    def run() -> None:
        layer(x).backward(grad)
        x.grad = None
        layer.zero_grad()

    return run


def measure(alone: nn.Module, spread: nn.Module, x: Tensor, rounds: int) -> tuple[float, ...]:
    """The medians of both, in milliseconds, and that of their ratios, taken in turn."""
    steps = [step(alone, x), step(spread, x)]
    times: list[list[float]] = [[], []]
    for number in range(rounds + 2):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            begin = time.perf_counter()
            steps[which]()
            times[which].append(1e3 * (time.perf_counter() - begin))
    a, b = (each[2:] for each in times)
    ratio = statistics.median(y / x for x, y in zip(a, b, strict=True))
    return statistics.median(a), statistics.median(b), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", type=int, nargs=4, default=[1, 16, 512, 512])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(args.shape, requires_grad=True)
    table = Table("layer", title=f"world of one, {tuple(args.shape)} float32, one thread")
    for column in ("torch ms", "Tessel ms", "ratio"):
        table.add_column(column, justify="right")
    for name, alone, spread in pairs(args.shape[1]):
        a, b, ratio = measure(alone, spread, x, args.rounds)
        table.add_row(name, f"{a:.2f}", f"{b:.2f}", f"{ratio:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
