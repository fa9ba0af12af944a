"""A classifier with 100,000 classes, whose head lies in shards on all workers.

A sample is the number of its class in ones and zeros, with noise. A small network, the same on all
workers, makes features of it; the head gives a logit for each class. Of the head, its gradient and
its momentum each worker has the part of its classes only, and of the logits, too: memory falls as
one over the number of workers. The loss is the same on any number of them.

    python examples/classes.py
    tessel run -n 4 examples/classes.py
    torchrun --nproc-per-node 2 examples/classes.py --classes 1000000 --features 32
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tessel
from tessel.nn import ParallelCrossEntropyLoss, ParallelLinear

console = Console(highlight=False)


@dataclass(frozen=True)
class Settings:
    """What is trained, and how."""

    classes: int = 100_000
    features: int = 64
    samples: int = 256
    batch: int = 64
    steps: int = 20
    rate: float = 0.5
    seed: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Holding:
    """Bytes that a worker has of the head: its parameters, gradients, momentum, and logits."""

    parameters: int
    gradients: int
    momentum: int
    logits: int


@dataclass(frozen=True)
class Report:
    """How training went: the loss of each step, and what each worker holds of the head."""

    losses: list[float]
    holdings: list[Holding]
    whole: int  # bytes of the parameters of a head that is not split


class Classifier(nn.Module):
    """Features that every worker computes, and a head of which each has its classes."""

    def __init__(self, num_inputs: int, features: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(num_inputs, features),
            nn.GELU(),
            nn.Linear(features, features),
            nn.LayerNorm(features),
        )
        self.head = ParallelLinear(features, num_classes, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def make_data(settings: Settings) -> tuple[Tensor, Tensor]:
    """Some classes, and noisy inputs from which they can be told: the same on all workers."""
    draw = torch.Generator().manual_seed(settings.seed)
    target = torch.randint(settings.classes, (settings.samples,), generator=draw)
    digits = torch.arange((settings.classes - 1).bit_length())
    bits = target[:, None] >> digits & 1
    noise = torch.randn(bits.shape, dtype=torch.float64, generator=draw)
    return (2.0 * bits - 1.0 + 0.1 * noise).to(settings.dtype), target


def train(settings: Settings, is_shown: bool = False) -> Report:
    """Train a classifier on all workers of the job."""
    x, target = make_data(settings)
    torch.manual_seed(settings.seed)
    model = Classifier(x.shape[1], settings.features, settings.classes).to(settings.dtype)
    measure = ParallelCrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), settings.rate, momentum=0.9)
    order = torch.Generator().manual_seed(settings.seed)

    losses = []
    for step in range(settings.steps):
        chosen = torch.randperm(settings.samples, generator=order)[: settings.batch]
        optimizer.zero_grad()
        logits = model(x[chosen])  # (batch, classes of this worker)
        loss = measure(logits, target[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if is_shown and tessel.world().rank == 0:
            console.print(f"step {step:3d}  loss {losses[-1]:8.4f}")

    row = 1 + settings.features
    whole = settings.classes * row * settings.dtype.itemsize
    return Report(losses, holdings(model.head, optimizer, logits), whole)


def holdings(head: nn.Module, optimizer: torch.optim.Optimizer, logits: Tensor) -> list[Holding]:
    """What each worker holds of the head."""
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
    """The bytes of every worker, and of a head that is not split."""
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


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description="Train a classifier whose head is split.")
    parser.add_argument("--classes", type=int, default=Settings.classes)
    parser.add_argument("--features", type=int, default=Settings.features)
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--rate", type=float, default=Settings.rate, help="of learning")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    asked = parser.parse_args()
    if min(asked.classes, asked.features, asked.batch, asked.steps) < 1:
        parser.error("classes, features, batch and steps must be 1 or more")
    return asked


def main() -> None:
    report = train(Settings(**vars(arguments())), is_shown=True)
    if tessel.world().rank == 0:
        console.print(table(report))


if __name__ == "__main__":
    main()
