"""The fourth demo: a step of a classifier whose classes are split over the workers."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from rich.table import Table
from torch import Tensor

from tessel import viz
from tessel.cli.demos.report import Note, Report, as_text, largest, workers_table, worst_of
from tessel.core.partition import world
from tessel.encoding import encodable
from tessel.examples import classes
from tessel.nn import ParallelLinear
from tessel.testing import count_memory, count_traffic

TITLE = "a step of a classifier"
LIMIT = 1e-12  # of the loss, and of gradients relative to the largest
STEPS = (TITLE,)
FEATURES, SAMPLES = 64, 64


@encodable
@dataclass(frozen=True)
class Holding:
    """What a process has: its classes, the bytes of its head and of what a step makes, at most."""

    classes: int
    head: int
    peak: int


@dataclass(frozen=True)
class TrainingStep:
    """A step on one process: the loss, what it holds, what it sent, and how long it took."""

    loss: Tensor
    holding: Holding
    sent: int
    seconds: float


@dataclass(frozen=True)
class Classified(Report):
    """What came of the step.

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
        return worst_of([self.loss_error, self.gradient_error])

    @property
    def wrong(self) -> list[str]:
        """The title, if something differs by too much or the shards are not the whole head."""
        whole = sum(each.head for each in self.holdings)
        return [] if self.worst <= LIMIT and whole == self.alone.head else [TITLE]

    def tables(self) -> list[tuple[Table, str]]:
        """One process and every worker, a line each."""
        title = f"{TITLE} with {self.alone.classes} classes, of {SAMPLES} samples"
        cells = [
            (
                str(each.classes),
                viz.num_bytes(each.head),
                f"{each.head / self.alone.head:.1%}",
                viz.num_bytes(each.peak),
            )
            for each in (self.alone, *self.holdings)
        ]
        before, after = self.seconds
        times = f"{1e3 * before:.0f} ms", f"{1e3 * after:.0f} ms"
        columns = ("classes", "head", "share", "in a step")
        table = workers_table(title, columns, cells, self.sent, times)
        legend = (
            "in a step: peak memory of logits, gradients and all other tensors that it creates\n"
            f"largest difference from one process: loss {as_text(self.loss_error)}, gradients of "
            f"all parameters {as_text(self.gradient_error)}"
        )
        return [(table, legend)]


def run(size: int, note: Note) -> Classified | None:
    """Run on every worker; the report on the first."""
    P = world()
    settings = classes.Settings(
        classes=100 * size + 1,  # so many that the head is the largest of all, and no even number
        features=FEATURES,
        samples=SAMPLES,
        dtype=torch.float64,
    )
    x, target = classes.make_data(settings)
    alone = classes.make_model(x.shape[1], replace(settings, is_split=False))
    split = classes.make_model(x.shape[1], settings)
    # the first worker goes first while the others wait, so that it has the time of one process
    expected = _step(alone, x, target) if P.rank == 0 else None
    P.group.share_objects(None)
    expected = expected or _step(alone, x, target)
    found = _step(split, x, target)
    assert isinstance(split.head, ParallelLinear)
    layouts = {f"head.{name}": layout for name, layout in split.head.layouts.items()}
    errors = [0.0]  # of this worker's gradients, relative to the largest of each
    for (name, p), q in zip(split.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        part = layouts[name].local_part(q.grad) if name in layouts else q.grad
        errors.append(largest(p.grad - part) / largest(q.grad))
    mine = (
        largest(found.loss - expected.loss) / largest(expected.loss),
        worst_of(errors),
        found.holding,
        found.sent,
    )
    loss_errors, gradient_errors, holdings, sent = zip(*P.group.share_objects(mine), strict=True)
    note(TITLE)
    if P.rank != 0:
        return None
    return Classified(
        worst_of(loss_errors),
        worst_of(gradient_errors),
        expected.holding,
        holdings,
        sent,
        (expected.seconds, found.seconds),
    )


def _step(model: classes.Classifier, x: Tensor, target: Tensor) -> TrainingStep:
    """Forward and backward, twice, since the first time layouts are agreed on and kept."""
    for _ in range(2):
        model.zero_grad()
        begin = time.perf_counter()
        with count_traffic() as traffic:
            _, loss = model(x, target)
            loss.backward()
        seconds = time.perf_counter() - begin
    # Apart from the time, since to count takes some.
    model.zero_grad()
    with count_memory() as memory:
        model(x, target)[1].backward()
    weight, bias = model.head.parameters()
    holding = Holding(len(weight), weight.nbytes + bias.nbytes, memory.peak)
    return TrainingStep(loss.detach(), holding, traffic.bytes_sent, seconds)
