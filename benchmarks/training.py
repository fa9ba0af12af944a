"""A converted model on several workers against the same model in one process.

Training steps (forward, backward, SGD) of a ResNet-18 and a 3-D U-Net. Every process has one
thread. Single process and workers take turns in one run; times are medians over the rounds, the
speed-up is the median of the rounds' ratios. Memory is the peak of a process's resident memory
(parameters, gradients, momentum, activations, messages) beyond what it had before the model was
made, measured in fresh processes that have trained a tiny model before, so that what torch loads is
not counted; of several workers, that of the largest. It holds what allocators keep and kernels use
for themselves; beside it stands the ratio of the bytes of tensors alone.

    python benchmarks/training.py [--rounds 3] [--batch 8] [--image 640] [--volume 128]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
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
    name: str, args: tuple[int, ...], shape: Shape, steps: int, tiny: Shape | None = None
) -> dict[str, float]:
    """Seconds of a step, the peak of memory and the bytes sent, on this worker."""
    if tiny is not None:
        train(name, args, tiny, 1)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident()
    P = tessel.world().create_cartesian_topology_partition(grid(tessel.world().size, shape))
    torch.manual_seed(0)
    model = getattr(models, name)(*args)
    if P.size > 1:  # else it stays plain torch
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
        "memory": peak() - before,
    }


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def speed(name: str, args: tuple[int, ...], shape: Shape, rounds: int) -> tuple[float, ...]:
    """Median seconds of one process and of two workers, and the median of the ratios."""
    alone, spread = [], []
    with WorkerPool(threads=1, timeout=900) as pool:
        for _ in range(rounds):
            alone.append(pool.run(train, name, args, shape, 2, nprocs=1)[0]["seconds"])
            results = pool.run(train, name, args, shape, 2, nprocs=2)
            spread.append(max(result["seconds"] for result in results))
    ratio = statistics.median(a / b for a, b in zip(alone, spread, strict=True))
    return statistics.median(alone), statistics.median(spread), ratio


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=640)
    parser.add_argument("--volume", type=int, default=128)
    options = parser.parse_args()
    n, m = options.image, options.volume
    cases = [
        ("ResNet18", (64, 1000), (options.batch, 3, n, n)),
        ("UNet", (3, 16), (1, 1, m, m, m)),
    ]
    table = Table("model, input", title="one thread a process")
    for column in (
        *("1 process s", "2 workers s", "speed-up"),
        *("1 process MiB", "4 workers MiB", "memory", "tensors", "MiB sent a step"),
    ):
        table.add_column(column, justify="right")
    for name, args, shape in cases:
        one, two, ratio = speed(name, args, shape, options.rounds)
        alone, _ = memory(name, args, shape, 1)
        spread, sent = memory(name, args, shape, 4)
        held = tensors(name, args, shape, 4) / tensors(name, args, shape, 1)
        table.add_row(
            f"{name} {shape}",
            *(f"{one:.2f}", f"{two:.2f}", f"{ratio:.2f}"),
            *(f"{alone / 2**20:.0f}", f"{spread / 2**20:.0f}", f"{spread / alone:.2f}"),
            f"{held:.2f}",
            f"{sent / 2**20:.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
