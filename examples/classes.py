"""A classifier with 100,000 classes, whose head is split into shards on all workers.

A sample is the binary number of its class, with noise. A small network, the same on all workers,
computes its features; the head computes a logit for each class. Each worker has only the part of
its classes of the head, its gradient and momentum, and the logits: memory is inversely proportional
to the number of workers. The loss is the same on any number of them.

    python examples/classes.py
    tessel run -n 4 examples/classes.py --output loss.png
    torchrun --nproc-per-node 2 examples/classes.py --classes 1000000 --features 32
    python examples/classes.py --whole            # torch's own layers, in one process
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tessel
from tessel import viz
from tessel.nn import ParallelCrossEntropyLoss, ParallelLinear

console = Console(highlight=False)


@dataclass(frozen=True)
class Settings:
    """The settings of the training."""

    classes: int = 100_000
    features: int = 64
    samples: int = 256
    batch: int = 64
    steps: int = 20
    rate: float = 0.5
    seed: int = 0
    dtype: torch.dtype = torch.float32
    is_split: bool = True  # else torch's own layers, in one process


@dataclass(frozen=True)
class Holding:
    """The bytes of the head on a worker: its parameters, gradients, momentum and logits."""

    parameters: int
    gradients: int
    momentum: int
    logits: int


@dataclass(frozen=True)
class Report:
    """The result of training: the loss of each step, and each worker's memory of the head."""

    losses: list[float]
    holdings: list[Holding]
    whole: int  # bytes of the parameters of a head that is not split


class Classifier(nn.Module):
    """Features that every worker computes, a head whose classes are split, and the loss."""

    def __init__(self, num_inputs: int, settings: Settings) -> None:
        super().__init__()
        features, num_classes = settings.features, settings.classes
        self.body = nn.Sequential(
            nn.Linear(num_inputs, features),
            nn.GELU(),
            nn.Linear(features, features),
            nn.LayerNorm(features),
        )
        self.head: nn.Module
        self.measure: nn.Module
        if settings.is_split:
            self.head = ParallelLinear(features, num_classes, dim=-1)
            self.measure = ParallelCrossEntropyLoss()
        else:
            self.head = nn.Linear(features, num_classes)
            self.measure = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of this worker's classes, and the loss, which every worker has."""
        logits = self.head(self.body(x))
        return logits, self.measure(logits, target)


def make_data(settings: Settings) -> tuple[Tensor, Tensor]:
    """Some classes, and noisy inputs that identify them: the same on all workers."""
    draw = torch.Generator().manual_seed(settings.seed)
    target = torch.randint(settings.classes, (settings.samples,), generator=draw)
    digits = torch.arange((settings.classes - 1).bit_length())
    bits = target[:, None] >> digits & 1
    noise = torch.randn(bits.shape, dtype=torch.float64, generator=draw)
    return (2.0 * bits - 1.0 + 0.1 * noise).to(settings.dtype), target


def make_model(num_inputs: int, settings: Settings) -> Classifier:
    """A new classifier, whose values depend only on the seed, not on the number of workers."""
    torch.manual_seed(settings.seed)
    return Classifier(num_inputs, settings).to(settings.dtype)


def step(model: Classifier, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Compute logits of this worker's classes, the loss, and its gradients."""
    logits, loss = model(x, target)  # (batch, classes of this worker)
    loss.backward()
    return logits, loss


def train(settings: Settings, is_shown: bool = False) -> Report:
    """Train a classifier on all workers of the job."""
    x, target = make_data(settings)
    model = make_model(x.shape[1], settings)
    optimizer = torch.optim.SGD(model.parameters(), settings.rate, momentum=0.9)
    order = torch.Generator().manual_seed(settings.seed)

    losses = []
    for number in range(settings.steps):
        chosen = torch.randperm(settings.samples, generator=order)[: settings.batch]
        optimizer.zero_grad()
        logits, loss = step(model, x[chosen], target[chosen])
        optimizer.step()
        losses.append(loss.item())
        if is_shown and tessel.world().rank == 0:
            console.print(f"step {number:3d}  loss {losses[-1]:8.4f}")

    row = 1 + settings.features
    whole = settings.classes * row * settings.dtype.itemsize
    return Report(losses, holdings(model.head, optimizer, logits), whole)


def holdings(head: nn.Module, optimizer: torch.optim.Optimizer, logits: Tensor) -> list[Holding]:
    """The memory of the head on each worker."""
    parameters = list(head.parameters())
    mine = [
        sum(each.nbytes for each in parameters),
        sum(each.grad.nbytes for each in parameters if each.grad is not None),
        sum(optimizer.state[each]["momentum_buffer"].nbytes for each in parameters),
        logits.nbytes,
    ]
    everyones = tessel.distributed.gather(torch.tensor([mine]), 0)
    return [Holding(*each) for each in everyones.tolist()]


def table(report: Report) -> Table:
    """A table of the bytes of every worker, and of a head that is not split."""
    title = f"bytes of the head; {report.whole} of parameters in all"
    found = Table("worker", title=title)
    for heading in ("parameters", "of the whole", "gradients", "momentum", "logits"):
        found.add_column(heading, justify="right")
    for worker, each in enumerate(report.holdings):
        found.add_row(
            str(worker),
            str(each.parameters),
            f"{each.parameters / report.whole:.2%}",
            *map(str, (each.gradients, each.momentum, each.logits)),
        )
    return found


def draw(report: Report, path: Path) -> None:
    """Save a picture of the loss, and of each worker's memory of the head."""
    figure = viz.new_figure(10, 3.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.3})
    left.plot(report.losses, color=viz.colour(0))
    left.set(xlabel="step", ylabel="loss", title="the same on any number of workers")
    sizes = [
        each.parameters + each.gradients + each.momentum + each.logits for each in report.holdings
    ]
    names = [f"worker {worker}" for worker in range(len(sizes))]
    colours = [viz.colour(worker) for worker in range(len(sizes))]
    mebibytes = [size / 2**20 for size in (sum(sizes), *sizes)]
    right.barh(["one process", *names], mebibytes, color=["#9ca3af", *colours])
    right.invert_yaxis()
    right.set(xlabel="MiB", title="the head, its gradient, momentum and logits")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description="Train a classifier whose head is split.")
    parser.add_argument("--classes", type=int, default=Settings.classes)
    parser.add_argument("--features", type=int, default=Settings.features)
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--rate", type=float, default=Settings.rate, help="of learning")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    whole = "torch's own layers, in one process"
    parser.add_argument("--whole", dest="is_split", action="store_false", help=whole)
    parser.add_argument("--output", type=Path, help="where to save a picture")
    asked = parser.parse_args()
    if not asked.is_split and tessel.world().size > 1:
        parser.error("--whole is for one process")
    if min(asked.classes, asked.features, asked.batch, asked.steps) < 1:
        parser.error("classes, features, batch and steps must be 1 or more")
    return asked


def main() -> None:
    asked = vars(arguments())
    output = asked.pop("output")
    report = train(Settings(**asked), is_shown=True)
    if tessel.world().rank == 0:
        console.print(table(report))
        if output is not None:
            draw(report, output)


if __name__ == "__main__":
    main()
