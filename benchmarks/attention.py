"""Attention over a split sequence: time and memory, against one process and against gathering.

Workers of one thread have parts of the sequence of queries, keys and values, and compute
`F.scaled_dot_product_attention`, forward and backward. "one process" is torch's own function on one
thread, with everything; "all keys gathered" is what each worker does who first gets all keys and
values. Tessel chooses between several ways; "ring" is the one that never has more than one block of
them. Values and gradients are compared with those of one process first.

    python benchmarks/attention.py [--rounds 6] [--quick] [--only TEXT]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from harness.claim import Case, Claim, Settings, is_counted, is_timed
from harness.command import main
from harness.contenders import Counted, InOneProcess, OnWorkers
from torch import Tensor
from values import check_close, peak

import tessel
from tessel.tensor.rules import attention, attention_plan

ALONE, GATHERED = "one process", "all keys gathered"
TOLERANCE = 1e-4  # of float32, in sums of some thousand numbers
CHOSEN = attention.ways_of  # what Tessel does by itself


class Problem:
    """Queries, keys and values, and the gradient that comes back."""

    def __init__(self, settings: Settings, workers: int) -> None:
        self.shape = (1, settings["heads"], settings["length"], settings["features"])
        self.is_causal = settings["causal"]
        P = tessel.Partition(tuple(range(workers)), (1, 1, workers, 1))
        self.layout = tessel.Layout.balanced(P, self.shape)

    def whole(self, seed: int) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))

    def part(self, seed: int) -> Tensor:
        return self.layout.local_part(self.whole(seed)).clone()

    def attended(self, *operands: Any) -> Any:
        return F.scaled_dot_product_attention(*operands, is_causal=self.is_causal)

    def alone(self) -> Callable[[], list[Tensor]]:
        """A step of one process."""
        operands = [self.whole(seed).requires_grad_() for seed in range(3)]
        grad = self.whole(3)
        return lambda: self._step(self.attended, operands, grad)

    def spread(self) -> Callable[[], list[Tensor]]:
        """A step of a worker."""
        operands = [self.part(seed).requires_grad_() for seed in range(3)]
        grad = self.part(3)

        def attended(*parts: Tensor) -> Tensor:
            found: Any = self.attended(*(tessel.from_local(x, self.layout) for x in parts))
            return found.local

        return lambda: self._step(attended, operands, grad)

    @staticmethod
    def _step(
        attended: Callable[..., Tensor], operands: list[Tensor], grad: Tensor
    ) -> list[Tensor]:
        y = attended(*operands)
        return [y.detach(), *torch.autograd.grad(y, operands, grad)]

    def check(self) -> None:
        """Values and gradients are those of one process."""
        names = ("result", "queries' gradient", "keys' gradient", "values' gradient")
        for name, ours, theirs in zip(names, self.spread()(), self.alone()(), strict=True):
            check_close(name, ours, self.layout.local_part(theirs), TOLERANCE)


def _take(way: str | None) -> None:
    """Let Tessel take a way, or choose."""

    def ways_of(*args: Any, **settings: Any) -> Any:
        return tuple(sorted(CHOSEN(*args, **settings), key=lambda each: each.way != way))

    attention.ways_of = CHOSEN if way is None else ways_of
    attention_plan.GATHERED = 1 << (60 if way == "gather" else 16)


def _by(way: str | None, settings: Settings) -> Callable[[], object]:
    problem = Problem(settings, tessel.world().size)
    _take(way)
    problem.check()
    step = problem.spread()

    def taking() -> object:
        _take(way)
        return step()

    return taking


def by_tessel(settings: Settings) -> Callable[[], object]:
    return _by(None, settings)


def by_ring(settings: Settings) -> Callable[[], object]:
    return _by("ring", settings)


def by_gathering(settings: Settings) -> Callable[[], object]:
    return _by("gather", settings)


def by_one(settings: Settings) -> Callable[[], object]:
    return Problem(settings, 1).alone()


def memory_of_tessel(settings: Settings) -> int:
    return peak(by_tessel(settings))


def memory_of_ring(settings: Settings) -> int:
    return peak(by_ring(settings))


def memory_of_gathering(settings: Settings) -> int:
    return peak(by_gathering(settings))


def memory_of_one(settings: Settings) -> int:
    return peak(by_one(settings))


def cases() -> list[Case]:
    found = []
    sizes = [(1, 4096, False, 2), (1, 4096, True, 2), (8, 2048, False, 2), (8, 2048, True, 2)]
    for heads, length, causal, workers in sizes:
        settings = {"heads": heads, "length": length, "features": 64, "causal": causal}
        name = f"{heads} × {length} × 64{', causal' if causal else ''}"
        found.append(
            Case(f"{name}, {workers} workers", workers, settings, aims={ALONE: None}, seconds=0.5)
        )
    for heads in (1, 8):
        settings = {"heads": heads, "length": 4096, "features": 64, "causal": False}
        found.append(Case.counted(f"memory of {heads} × 4096 × 64, 4 workers", 4, settings))
    return found


CLAIM = Claim(
    "attention",
    "attention over a split sequence against one process and against gathering",
    cases(),
    [
        OnWorkers("Tessel", by_tessel, covers=is_timed, split=True),
        InOneProcess(ALONE, by_one, covers=is_timed, threads=1),
        OnWorkers(GATHERED, by_gathering, covers=is_timed),
        OnWorkers("Tessel by a ring", by_ring, covers=is_timed),
        Counted("Tessel", "attention", "memory_of_tessel", covers=is_counted),
        Counted(ALONE, "attention", "memory_of_one", workers=1, covers=is_counted),
        Counted(GATHERED, "attention", "memory_of_gathering", covers=is_counted),
        Counted("Tessel by a ring", "attention", "memory_of_ring", covers=is_counted),
    ],
    rounds=6,
    note="""float32, forward and backward. Memory is that of tensors that are alive at once on the
    worker that has most, without its operands and without what a kernel uses inside.""",
)

if __name__ == "__main__":
    main(CLAIM, __doc__)
