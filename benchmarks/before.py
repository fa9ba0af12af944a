"""Steps of every kind beside those of another state of the library.

Training steps of converted models (forward, backward and SGD of a ResNet-18 and of a 3-D U-Net, in
slabs along the first dimension of space), and one step for each claim of benchmarks/claims.toml:
movements, a convolution, a Fourier transform, parallel layers, a Fourier neural operator, a
reconstruction; on 1, 2 and 4 workers of one thread. Both states take turns in one run; on one
worker torch's own model does, too. After that: what a pointwise function of a spread tensor costs
beyond that of a plain one.

    git worktree add build/before COMMIT && python benchmarks/before.py build/before/src

The other state uses the compiled engine of its own folder, if it is there.
"""

from __future__ import annotations

import sys
import timeit
from pathlib import Path
from typing import Any

import torch
from harness.claim import TESSEL, Case, Claim
from harness.command import parser, run
from harness.contenders import OfSource

import tessel

BEFORE, ALONE = "before", "torch"
MODELS: dict[str, list[Any]] = {
    "ResNet-18 8×3×128×128": ["ResNet18", [8, 3, 128, 128], 64, 1000],
    "3-D U-Net 48×48×48": ["UNet", [1, 1, 48, 48, 48], 3, 16],
}
OTHERS: dict[str, tuple[str, list[Any]]] = {
    "all-reduce of 1 KiB, and adjoint": ("all_reduce", [256]),
    "all-reduce of 4 MiB, and adjoint": ("all_reduce", [1 << 20]),
    "repartition of 4 MiB, and adjoint": ("repartition", [[1024, 1024]]),
    "halo exchange of 4 KiB, and adjoint": ("halo", [[1024, 1024]]),
    "convolution layer 1×16×256×256, step": ("convolution", [[1, 16, 256, 256]]),
    "convolution layer 1×4×16×16, step": ("convolution", [[1, 4, 16, 16]]),
    "Fourier transform 64×64×64, and adjoint": ("transform", [64]),
    "parallel layers and loss, 64×256×4096, step": ("head", [64, 256, 4096]),
    "Fourier neural operator 32×32×32, step": ("fno", [32]),
    "plug-and-play iteration 256×256": ("reconstruction", [256]),
}


def cases() -> list[Case]:
    def of(name: str, workers: int, step: str, arguments: list[Any]) -> Case:
        aims = {BEFORE: 1.03, ALONE: 1.03}
        settings = {"step": step, "arguments": arguments}
        text = f"{name}, {workers} worker{'s' * (workers > 1)}"
        heavy = step == "model"
        seconds, most = (0.5, 8) if heavy else (0.3, 40)
        return Case(text, workers, settings, aims=aims, seconds=seconds, most=most)

    return [
        *(of(name, n, "model", given) for n in (1, 2, 4) for name, given in MODELS.items()),
        *(of(name, n, *given) for n in (1, 2, 4) for name, given in OTHERS.items()),
    ]


def is_alone(case: Case) -> bool:
    return case.workers == 1 and case.settings["step"] == "model"


def claim(before: Path) -> Claim:
    script = "before_steps.py"
    return Claim(
        "before",
        f"steps beside those of {before}",
        cases(),
        [
            OfSource(TESSEL, script),
            OfSource(BEFORE, script, source=before),
            OfSource(ALONE, script, covers=is_alone, arguments=("alone",)),
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
