"""Training steps of converted models beside those of another state of the library.

A step is forward, backward and SGD of a ResNet-18 and of a 3-D U-Net, on 1, 2 and 4 workers of one
thread, in slabs along the first dimension of space. Both states take turns in one run; on one
worker torch's own model does, too. After that: what a pointwise function of a spread tensor costs
beyond that of a plain one.

    git worktree add build/before COMMIT && python benchmarks/before.py build/before/src

The other state uses the compiled engine of its own folder, if it is there.
"""

from __future__ import annotations

import sys
import timeit
from pathlib import Path

import torch
from harness.claim import TESSEL, Case, Claim
from harness.command import parser, run
from harness.contenders import OfSource

import tessel

BEFORE, ALONE = "before", "torch"
SHAPES = {"ResNet18": [8, 3, 128, 128], "UNet": [1, 1, 48, 48, 48]}


def case(model: str, shape: list[int], workers: int) -> Case:
    name = f"{model} {'×'.join(map(str, shape))}, {workers} worker{'s' * (workers > 1)}"
    aims = {BEFORE: 1.03, ALONE: 1.03}
    settings = {"model": model, "shape": shape}
    return Case(name, workers, settings, aims=aims, seconds=0.5, most=8)


def claim(before: Path) -> Claim:
    script = "before_steps.py"
    return Claim(
        "before",
        f"steps of converted models beside {before}",
        [case(*each, workers) for workers in (1, 2, 4) for each in SHAPES.items()],
        [
            OfSource(TESSEL, script),
            OfSource(BEFORE, script, source=before),
            OfSource(ALONE, script, covers=lambda each: each.workers == 1, arguments=("alone",)),
        ],
        rounds=12,
    )


def pointwise() -> str:
    """What `relu` costs of a spread tensor, of its part, and the difference."""
    x = tessel.ones(8, where=tessel.world())
    part = x.local

    def micros(value: torch.Tensor) -> float:
        return min(timeit.repeat(lambda: torch.relu(value), number=2000, repeat=20)) / 2e-3

    spread, plain = micros(x), micros(part)
    more = f"{spread - plain:.1f} µs more; aim: at most 10 µs"
    return f"relu of 8 numbers: spread {spread:.1f} µs, plain {plain:.1f} µs, {more}"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("before", type=Path, help="the folder src of another state")
    given = arguments.parse_args()
    code = run(claim(given.before), given)
    print(pointwise())
    return code


if __name__ == "__main__":
    sys.exit(main())
