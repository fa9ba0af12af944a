"""A converted model on several workers against the same model in one process.

Training steps (forward, backward, SGD) of a ResNet-18 and a 3-D U-Net. Every process has one
thread. Single process and workers take turns in one run; times are medians over the rounds, the
speed-up is the median of the rounds' ratios. Its ceiling is what the machine gives: two processes
that train torch's own model on a half each, at the same time, and exchange nothing.

Memory is the peak of a process's resident memory (parameters, gradients, momentum, activations,
messages) beyond what it had before the model was made, measured in fresh processes that have
trained a tiny model before, so that what torch loads is not counted; of several workers, that of
the largest. Parameters, gradients and momentum are whole on each worker: memory is measured where
activations are much larger. Beside it stands the ratio of the bytes of tensors alone.

The allocator is set alike for all. While time is measured it keeps what is freed, else the kernel
clears every large tensor anew. While memory is measured it gives back all that is larger than
4 MiB; by default glibc keeps what is smaller than the largest block that was ever freed, up to
32 MiB, which the smaller tensors of several workers are and those of one process are not.

    python benchmarks/training.py [--rounds 3] [--image 640] [--memory-image 1024] [--volume 128]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import resident
import torch
from allocator import GIVE_BACK, KEEP
from rich.console import Console
from rich.table import Table

import tessel
from tessel.testing import WorkerPool, count_memory, count_traffic

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import models  # (the same models as in the tests)

Shape = tuple[int, ...]


def grid(workers: int, shape: Shape) -> list[int]:
    """Workers in slabs along the first dimension of space."""
    return [1, 1, workers, *[1] * (len(shape) - 3)]


def train(
    name: str,
    args: tuple[int, ...],
    shape: Shape,
    steps: int,
    tiny: Shape | None = None,
    apart: bool = False,
) -> dict[str, float]:
    """Seconds of a step, the peak of memory and the bytes sent, on this worker.

    If `apart`, each worker trains a model of its own on its part.
    """
    if tiny is not None:
        train(name, args, tiny, 1)
        resident.forget_peak()
    before = resident.resident()
    P = tessel.world().create_cartesian_topology_partition(grid(tessel.world().size, shape))
    torch.manual_seed(0)
    model = getattr(models, name)(*args)
    if P.size > 1 and not apart:  # else it stays plain torch
        model = tessel.nn.distribute_module(model, P)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(tessel.Layout.balanced(P, shape).local_shape)
    seconds = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        with count_traffic() as traffic:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return {
        "seconds": statistics.median(seconds[1:]),
        "bytes": traffic.bytes_sent,
        "memory": resident.peak() - before,
    }


def speed(name: str, args: tuple[int, ...], shape: Shape, rounds: int) -> tuple[float, ...]:
    """Median seconds of one process and of two workers, and the medians of the ratios: of one
    process to two workers, and of one process to two on their own."""
    alone, spread, apart = [], [], []
    with WorkerPool(threads=1, timeout=900) as pool:
        for _ in range(rounds):
            alone.append(pool.run(train, name, args, shape, 2, nprocs=1)[0]["seconds"])
            for times, on_their_own in ((spread, False), (apart, True)):
                results = pool.run(train, name, args, shape, 2, None, on_their_own, nprocs=2)
                times.append(max(result["seconds"] for result in results))
    ratios = [
        statistics.median(a / b for a, b in zip(alone, times, strict=True))
        for times in (spread, apart)
    ]
    return statistics.median(alone), statistics.median(spread), *ratios


def memory(name: str, args: tuple[int, ...], shape: Shape, workers: int) -> tuple[float, float]:
    """The peak of a process and the bytes that it sends in a step, in fresh processes."""
    with WorkerPool(threads=1, timeout=900) as pool:
        tiny = (2, shape[1], *[32] * (len(shape) - 2))
        results = pool.run(train, name, args, shape, 1, tiny, nprocs=workers)
    return max(r["memory"] for r in results), max(r["bytes"] for r in results)


def bytes_of_tensors(name: str, args: tuple[int, ...], shape: Shape) -> int:
    """The most bytes of tensors that are alive at once in two steps, the model's own included."""
    with count_memory() as memory:
        train(name, args, shape, 1)
    return memory.peak


def tensors(name: str, args: tuple[int, ...], shape: Shape, workers: int) -> int:
    """The same, of the largest worker."""
    with WorkerPool(threads=1, timeout=900) as pool:
        return max(pool.run(bytes_of_tensors, name, args, shape, nprocs=workers))


def memories(name: str, args: tuple[int, ...], shape: Shape, rounds: int) -> tuple[float, ...]:
    """The memory of one process and of four workers, medians, and the bytes that one sends."""
    alone = statistics.median(memory(name, args, shape, 1)[0] for _ in range(rounds))
    spread = [memory(name, args, shape, 4) for _ in range(rounds)]
    return alone, statistics.median(peak for peak, _ in spread), spread[0][1]


MEASURES = {"speed": (speed, KEEP), "memories": (memories, GIVE_BACK)}


def measured(what: str, *case: Any) -> tuple[float, ...]:
    """A measure in a process of its own, since an allocator reads its settings at the start."""
    _, settings = MEASURES[what]
    result = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps([what, *case])],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return tuple(json.loads(result.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=640)
    parser.add_argument("--volume", type=int, default=128)
    parser.add_argument("--memory-image", type=int, default=1024, help="where memory is measured")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, name, args, shape, rounds = json.loads(options.measure)
        measure, _ = MEASURES[what]
        print(json.dumps(measure(name, tuple(args), tuple(shape), rounds)))
        return
    n, large, m = options.image, options.memory_image, options.volume
    images, volume = (options.batch, 3), (1, 1, m, m, m)
    cases = [
        ("ResNet18", (64, 1000), (*images, n, n), (*images, large, large)),
        ("UNet", (3, 16), volume, volume),
    ]
    table = Table("model, input", title="one thread a process")
    for column in (
        *("1 process s", "2 workers s", "speed-up", "ceiling"),
        *("1 process MiB", "4 workers MiB", "memory", "tensors", "MiB sent a step"),
    ):
        table.add_column(column, justify="right")
    for name, args, shape, larger in cases:
        one, two, ratio, ceiling = measured("speed", name, args, shape, options.rounds)
        alone, spread, sent = measured("memories", name, args, larger, options.rounds)
        held = tensors(name, args, larger, 4) / tensors(name, args, larger, 1)
        table.add_row(
            f"{name} {shape}" + (f", memory {larger}" if larger != shape else ""),
            *(f"{one:.2f}", f"{two:.2f}", f"{ratio:.2f}", f"{ceiling:.2f}"),
            *(f"{alone / 2**20:.0f}", f"{spread / 2**20:.0f}", f"{spread / alone:.2f}"),
            f"{held:.2f}",
            f"{sent / 2**20:.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
