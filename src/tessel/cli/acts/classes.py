"""The fourth act: a step of a classifier whose classes are split over the workers."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from tessel import viz
from tessel.cli.acts.act import wave
from tessel.nn.parallel.cross_entropy import ParallelCrossEntropyLoss
from tessel.nn.parallel.linear import ParallelLinear
from tessel.partition import world
from tessel.testing import count_memory, count_traffic

TITLE = "a step of a classifier"
LIMIT = 1e-12  # of the loss, and of gradients relative to the largest
INPUTS, FEATURES, SAMPLES = 32, 64, 64


@dataclass(frozen=True)
class Holding:
    """What a process has: its classes, the bytes of its head and of what a step makes, at most."""

    classes: int
    head: int
    peak: int


@dataclass(frozen=True)
class Step:
    """A step on one process: the loss, what it holds, what it sent, and how long it took."""

    loss: Tensor
    holding: Holding
    sent: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """What came of the step, as the first worker knows it.

    Args:
        loss_error: the largest difference of the loss from that of one process, relative to it.
        gradient_error: the same for the gradients of all parameters, relative to the largest of
            each.
        alone: what one process holds.
        holdings: what each worker holds.
        sent: the bytes that each worker sent, forward and backward.
        seconds: how long one process took, and the workers.
    """

    loss_error: float
    gradient_error: float
    alone: Holding
    holdings: tuple[Holding, ...]
    sent: tuple[int, ...]
    seconds: tuple[float, float]

    @property
    def worst(self) -> float:
        """The larger error, or NaN if there is one."""
        return _worst([self.loss_error, self.gradient_error])

    @property
    def wrong(self) -> list[str]:
        """The title, if something differs by too much or the shards are not the whole head."""
        whole = sum(each.head for each in self.holdings)
        right = self.worst <= LIMIT and whole == self.alone.head
        return [] if right else [TITLE]


class Classifier(nn.Module):
    """Plain torch: nothing in it knows of workers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.GELU())
        self.head = nn.Linear(FEATURES, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


def num_classes(size: int) -> int:
    """So many that the head is the largest of all, and no even number."""
    return 100 * size + 1


def perform(size: int) -> Report | None:
    """Run on every worker; the report on the first."""
    P = world()
    torch.manual_seed(0)
    alone = Classifier(num_classes(size)).double()
    spread = copy.deepcopy(alone)
    head = ParallelLinear.convert_parallel_linear(spread.head, dim=-1)
    assert isinstance(head, ParallelLinear)
    spread.head = head
    x = wave((SAMPLES, INPUTS))
    target = torch.arange(SAMPLES) * 7919 % num_classes(size)
    expected = _one_by_one(lambda: _step(alone, nn.CrossEntropyLoss(), x, target))
    found = _step(spread, ParallelCrossEntropyLoss(), x, target)
    mine = (
        float((found.loss - expected.loss).abs() / expected.loss),
        _gradient_error(spread, alone),
        found.holding,
        found.sent,
    )
    loss_errors, gradient_errors, holdings, sent = zip(*P.group.share_objects(mine), strict=True)
    if P.rank != 0:
        return None
    return Report(
        _worst(loss_errors),
        _worst(gradient_errors),
        expected.holding,
        holdings,
        sent,
        (expected.seconds, found.seconds),
    )


def _step(model: Classifier, measure: nn.Module, x: Tensor, target: Tensor) -> Step:
    """Forward and backward, twice, since the first time layouts are agreed on and kept."""
    for _ in range(2):
        model.zero_grad()
        begin = time.perf_counter()
        with count_traffic() as traffic:
            loss = measure(model(x), target)
            loss.backward()
        seconds = time.perf_counter() - begin
    model.zero_grad()
    with count_memory() as memory:
        measure(model(x), target).backward()
    head = sum(each.nbytes for each in model.head.parameters())
    holding = Holding(len(model.head.weight), head, memory.peak)
    return Step(loss.detach(), holding, traffic.bytes_sent, seconds)


def _one_by_one(step: Callable[[], Step]) -> Step:
    """The first worker's step while the others wait, so that it has the time of one process."""
    P = world()
    found = step() if P.rank == 0 else None
    P.group.share_objects(None)
    return step() if found is None else found


def _gradient_error(spread: Classifier, alone: Classifier) -> float:
    """The largest difference of this worker's gradients, relative to the largest of each."""
    assert isinstance(spread.head, ParallelLinear)
    layouts = {f"head.{name}": layout for name, layout in spread.head.layouts.items()}
    errors = [0.0]
    for (name, p), q in zip(spread.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        expected = layouts[name].local_part(q.grad) if name in layouts else q.grad
        if expected.numel():
            errors.append(float((p.grad - expected).abs().max() / q.grad.abs().max()))
    return _worst(errors)


def _worst(errors: list[float] | tuple[float, ...]) -> float:
    """The largest, or NaN if there is one."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


# --- what is shown


def tables(report: Report) -> list[Table]:
    """One process and every worker, a line each."""
    alone = report.alone
    title = f"{TITLE} with {alone.classes} classes, of {SAMPLES} samples"
    found = Table(title=title, box=SIMPLE_HEAD, title_style="bold", pad_edge=False)
    found.add_column("who", no_wrap=True)
    for name in ("classes", "head", "share", "in a step", "sent", "time"):
        found.add_column(name, justify="right", no_wrap=True)
    before, after = (f"{1e3 * seconds:.0f} ms" for seconds in report.seconds)
    found.add_row("one process", *_cells(alone, alone), "", before)
    for place, (each, sent) in enumerate(zip(report.holdings, report.sent, strict=True)):
        cells = _cells(each, alone)
        found.add_row(f"worker {place}", *cells, viz.num_bytes(sent), "" if place else after)
    return [found]


def _cells(holding: Holding, alone: Holding) -> tuple[str, ...]:
    return (
        str(holding.classes),
        viz.num_bytes(holding.head),
        f"{holding.head / alone.head:.1%}",
        viz.num_bytes(holding.peak),
    )


def legends(report: Report) -> list[str]:
    """What the table says of exactness."""
    return [
        "in a step: bytes of logits, gradients and all else that it makes, at most at once\n"
        f"largest difference from one process: loss {_error(report.loss_error)}, gradients of all "
        f"parameters {_error(report.gradient_error)}"
    ]


def _error(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"
