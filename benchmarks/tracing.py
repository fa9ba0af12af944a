"""What a trace costs while it is on: steps of a 3-D U-Net, traced and not, in turns.

Both are the same model and the same step, on the same workers; a trace is opened and closed around
a block of steps, and what is timed is inside of it. The claim is about the median over blocks of
the ratio of two neighbours, and of the processor time that this worker spent, which what else runs
on the machine changes less.

    python benchmarks/tracing.py [--workers 2] [--size 48] [--steps 4] [--blocks 12]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

import tessel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "common"))
import models  # (the same models as in the tests)

AIM = 1.03


def measure(size: int, steps: int, blocks: int, folder: str) -> list[tuple[float, float, bool]]:
    """Seconds and processor seconds of a step, for each block, and whether it was traced."""
    torch.manual_seed(0)
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1, 1])
    model = tessel.nn.distribute_module(models.UNet(3, 16), P)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    assert P.index is not None
    x = torch.randn(1, 1, size, size, size).tensor_split(P.shape[2], 2)[P.index[2]].contiguous()

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for block in range(-2, 2 * blocks):
        # one after the other, and each first as often
        traced = bool(block % 2) != bool(block // 2 % 2)
        with tessel.trace(f"{folder}/run.json") if traced else nullcontext():
            tessel.world().group.share_objects(None)
            begin, spent = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            seconds, used = time.perf_counter() - begin, time.process_time() - spent
        if block >= 0:
            found.append((seconds / steps, used / steps, traced))
    return found


def ratios(found: list[tuple[float, float, bool]], which: int) -> list[float]:
    """Traced against not, for each two neighbours."""
    pairs = zip(found[::2], found[1::2], strict=True)
    return [
        one[which] / other[which] if one[2] else other[which] / one[which] for one, other in pairs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = args.size, args.steps, args.blocks, folder
        found = tessel.launch(measure, args.workers, *given, timeout=900, threads=1)
    plain = statistics.median(each[0] for each in found[0] if not each[2])
    print(f"3-D U-Net {args.size}³ on {args.workers} workers: {1e3 * plain:.1f} ms a step untraced")
    for which, name in enumerate(("time", "processor time")):
        each = sorted(ratio for own in found for ratio in ratios(own, which))
        middle = statistics.median(each)
        print(
            f"{name}: traced / untraced {middle:.4f} in the median, {each[len(each) // 4]:.4f} to "
            f"{each[-len(each) // 4]:.4f} in the middle half; the aim is {AIM}"
        )


if __name__ == "__main__":
    main()
