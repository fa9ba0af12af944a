"""Darcy flow: a Fourier neural operator learns the pressure in a porous medium.

The data are generated here. A random permeability a(x, y) is drawn, and a short solver computes the
pressure u with -∇·(a ∇u) = 1 on the unit square, zero at its border. The model learns the map from
a to u. It is trained on the given number of workers, each of which has a slab of all tensors; the
loss is the same on any number of them.

    python examples/darcy.py --workers 4
    python examples/darcy.py --workers 1 4        # one after the other, in one picture
    torchrun --nproc-per-node 4 examples/darcy.py
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import pi
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import tessel
from tessel import Layout, Partition, viz
from tessel.models import FNO

console = Console()


@dataclass(frozen=True)
class Settings:
    """The settings of the training and its data."""

    points: int = 32  # along each side
    num_train: int = 320
    num_test: int = 64
    width: int = 16
    modes: int = 8
    blocks: int = 3
    epochs: int = 20
    batch: int = 16
    rate: float = 6e-3
    seed: int = 0


@dataclass(frozen=True)
class Curves:
    """The result of training: the mean loss and the test error of each epoch, and an example."""

    workers: int
    losses: list[float]
    errors: list[float]
    seconds: float
    example: tuple[Tensor, Tensor, Tensor]  # permeability, pressure, prediction


# -- data -----------------------------------------------------------------------------------------


def permeability(count: int, points: int, generator: torch.Generator) -> Tensor:
    """The exponential of smooth random fields, (count, points, points)."""
    k = torch.arange(8, dtype=torch.float64)
    x = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    waves = torch.cos(pi * k[:, None] * x)  # (waves, points)
    decay = 2.5 / (9.0 + k[:, None] ** 2 + k**2)
    numbers = torch.randn(count, 8, 8, dtype=torch.float64, generator=generator)
    return torch.einsum("nkl,kx,ly->nxy", numbers * decay, waves, waves).exp()


def pressure(a: Tensor, tolerance: float = 1e-8) -> Tensor:
    """The solution u of -∇·(a ∇u) = 1 with u = 0 at the border, by conjugate gradients.

    Finite volumes: the flow through a face is the difference of its two cells, times the mean of
    their permeabilities. At the border it is the difference from zero, over half a cell.
    """
    u = torch.zeros_like(a)
    residual = torch.ones_like(a)
    direction = residual.clone()
    norm = _squares(residual)
    end = tolerance**2 * norm
    while (norm > end).any():
        flow = outflow(a, direction)
        step = norm / (direction * flow).sum((1, 2), keepdim=True)
        u += step * direction
        residual -= step * flow
        norm, before = _squares(residual), norm
        direction = residual + norm / before * direction
    return u


def outflow(a: Tensor, u: Tensor) -> Tensor:
    """The flow out of each cell, -∇·(a ∇u), for a square of side one."""
    total = torch.zeros_like(u)
    for dim in (1, 2):
        n = u.shape[dim]
        face = (a.narrow(dim, 1, n - 1) + a.narrow(dim, 0, n - 1)) / 2
        inner = face * u.diff(dim=dim)
        first = 2 * a.narrow(dim, 0, 1) * u.narrow(dim, 0, 1)
        last = -2 * a.narrow(dim, n - 1, 1) * u.narrow(dim, n - 1, 1)
        total -= torch.cat([first, inner, last], dim).diff(dim=dim) * n**2
    return total


def _squares(x: Tensor) -> Tensor:
    return x.square().sum((1, 2), keepdim=True)


def make_data(settings: Settings) -> tuple[Tensor, Tensor]:
    """Inputs (log a, x, y) and solutions u, both of order one: (sample, channel, x, y)."""
    generator = torch.Generator().manual_seed(settings.seed)
    a = permeability(settings.num_train + settings.num_test, settings.points, generator)
    u = pressure(a)[:, None]
    x = (torch.arange(settings.points, dtype=a.dtype) + 0.5) / settings.points
    places = torch.stack(torch.meshgrid(2 * x - 1, 2 * x - 1, indexing="ij"))
    inputs = torch.cat([a.log()[:, None], places.expand(len(a), -1, -1, -1)], 1)
    train = u[: settings.num_train]
    return inputs, u / train.std()


# -- training -------------------------------------------------------------------------------------


class RelativeError:
    """The mean over samples of |u - v| / |v|, for tensors in slabs.

    Each worker sums over its slab; `ParReduce` turns the sums of all into a value that every worker
    may differentiate.
    """

    def __init__(self, workers: Partition, dtype: torch.dtype) -> None:
        self._total = tessel.ParReduce(dtype, partition=workers)

    def __call__(self, u: Tensor, v: Tensor) -> Tensor:
        squares = torch.stack([(u - v).square().sum((1, 2, 3)), v.square().sum((1, 2, 3))])
        difference, size = self._total * squares
        return (difference / size).sqrt().mean()


def make_model(P_x: Partition, settings: Settings, dtype: torch.dtype) -> FNO:
    """A new model on some workers, whose values depend only on the seed, not on their number."""
    torch.manual_seed(settings.seed)
    return FNO(P_x, 3, 1, settings.width, settings.modes, settings.blocks, dtype=dtype)


def step(model: FNO, error: RelativeError, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Predict, and compute gradients of the error; return the prediction and the error."""
    predicted = model(x)
    loss = error(predicted, u)
    loss.backward()
    return predicted, loss


def train(settings: Settings) -> Curves:
    """Train a model on all workers of the job."""
    begin = time.perf_counter()
    workers = tessel.world()
    P_x = workers.create_cartesian_topology_partition([1, 1, workers.size, 1])
    inputs, solutions = make_data(settings)  # the same on all workers; each takes its slab
    x = Layout.balanced(P_x, inputs.shape).local_part(inputs)
    u = Layout.balanced(P_x, solutions.shape).local_part(solutions)

    model = make_model(P_x, settings, x.dtype)
    error = RelativeError(workers, x.dtype)
    optimizer = torch.optim.Adam(model.parameters(), settings.rate)
    num_steps = settings.epochs * len(range(0, settings.num_train, settings.batch))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    order = torch.Generator().manual_seed(settings.seed)
    test = slice(settings.num_train, None)

    losses: list[float] = []
    errors: list[float] = []
    for _ in progress(range(settings.epochs), workers, losses, errors):
        total = 0.0
        for chosen in torch.randperm(settings.num_train, generator=order).split(settings.batch):
            optimizer.zero_grad()
            _, loss = step(model, error, x[chosen], u[chosen])
            optimizer.step()
            schedule.step()
            total += loss.item() * len(chosen)
        losses.append(total / settings.num_train)
        with torch.no_grad():
            errors.append(error(model(x[test]), u[test]).item())

    with torch.no_grad():
        predicted = tessel.all_gather(model(x[test][:1]), P_x)
    example = inputs[test][0, 0].exp(), solutions[test][0, 0], predicted[0, 0]
    return Curves(workers.size, losses, errors, time.perf_counter() - begin, example)


def progress(
    epochs: Iterable[int], workers: Partition, losses: list[float], errors: list[float]
) -> Iterator[int]:
    """Iterate over the epochs, with a progress bar on the first worker."""
    text = TextColumn("loss {task.fields[loss]:.4f}, test error {task.fields[error]:.2%}")
    title = TextColumn("{task.description} epoch {task.completed}/{task.total}")
    quiet = workers.rank != 0
    with Progress(
        title, BarColumn(), text, TimeRemainingColumn(), console=console, disable=quiet
    ) as bar:
        all_epochs = list(epochs)
        name = f"{workers.size} worker{'s' if workers.size > 1 else ''},"
        task = bar.add_task(name, total=len(all_epochs), loss=1.0, error=1.0)
        for epoch in all_epochs:
            yield epoch
            bar.update(task, advance=1, loss=losses[-1], error=errors[-1])


# -- pictures -------------------------------------------------------------------------------------


def draw_curves(runs: Sequence[Curves], path: Path) -> None:
    """Save a picture of loss and test error over the epochs, for each number of workers."""
    figure = viz.new_figure(7, 4)
    ax = figure.subplots()
    for number, run in enumerate(runs):
        below = number < len(runs) - 1  # a thick line, below that of the next run
        style: dict[str, Any] = {"color": viz.colour(number), "linewidth": 5.0 if below else 1.5}
        epochs = range(1, len(run.losses) + 1)
        name = f"{run.workers} worker{'s' if run.workers > 1 else ''}"
        ax.plot(epochs, run.losses, label=f"training, {name}", alpha=0.8, **style)
        ax.plot(epochs, run.errors, ":", label=f"test, {name}", **style)
    ax.axhline(0.03, color="#6b7280", linewidth=0.8)
    ax.annotate("3 %", (1, 0.03), (0, 3), textcoords="offset points", color="#6b7280")
    ax.set(xlabel="epoch", ylabel="relative error", yscale="log", title="Darcy flow")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def draw_example(run: Curves, path: Path) -> None:
    """Save a picture of a test permeability, its pressure, the prediction and the difference."""
    a, u, predicted = run.example
    pictures = {
        "permeability a": a,
        "pressure u": u,
        "prediction": predicted,
        "difference": predicted - u,
    }
    figure = viz.new_figure(14, 3.4)
    high = u.max().item()
    for ax, (title, values) in zip(figure.subplots(1, 4), pictures.items(), strict=True):
        most = values.abs().max().item()
        style: dict[str, dict[str, Any]] = {
            "permeability a": {"cmap": "cividis"},
            "difference": {"cmap": "RdBu", "vmin": -most, "vmax": most},
        }
        colours = style.get(title, {"cmap": "viridis", "vmin": 0.0, "vmax": high})
        image = ax.imshow(values.mT, origin="lower", extent=(0, 1, 0, 1), **colours)
        figure.colorbar(image, ax=ax, shrink=0.85)
        ax.set(title=title, xticks=[0, 1], yticks=[0, 1])
    figure.savefig(path, dpi=100, bbox_inches="tight")


# -- the script -----------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description="Train a Fourier neural operator on Darcy flow.")
    numbers = "numbers of workers; the model is trained once for each"
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help=numbers)
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--samples", type=int, default=Settings.num_train, help="to learn from")
    parser.add_argument("--points", type=int, default=Settings.points, help="along each side")
    parser.add_argument("--out", type=Path, default=Path("demo-output/darcy"), help="for pictures")
    return parser.parse_args()


def report(runs: Sequence[Curves], folder: Path) -> None:
    """Print the results, and save the pictures."""
    for run in runs:
        console.print(
            f"{run.workers} worker{'s' if run.workers > 1 else ''}: test error "
            f"{run.errors[-1]:.2%} after {len(run.losses)} epochs, {run.seconds:.0f} s"
        )
    for other in runs[1:]:
        pairs = zip(runs[0].losses, other.losses, strict=True)
        most = max(abs(a - b) / a for a, b in pairs)
        console.print(f"losses on {runs[0].workers} and {other.workers} workers: {most:.1e} apart")
    folder.mkdir(parents=True, exist_ok=True)
    draw_curves(runs, folder / "loss.png")
    draw_example(runs[-1], folder / "prediction.png")
    console.print(f"pictures: {folder / 'loss.png'}, {folder / 'prediction.png'}")


def main() -> None:
    asked = arguments()
    settings = Settings(epochs=asked.epochs, num_train=asked.samples, points=asked.points)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started the workers
        run = train(settings)
        if tessel.world().rank == 0:
            report([run], asked.out)
    else:
        counts = asked.workers  # one thread each: the tensors are small
        runs = [tessel.launch(train, n, settings, threads=1)[0] for n in counts]
        report(runs, asked.out)


if __name__ == "__main__":
    main()
