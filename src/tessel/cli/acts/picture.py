"""The second act: a picture that is too large for one worker goes through a converted U-Net."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from tessel import viz
from tessel.cli.acts.act import wave
from tessel.cli.acts.movements import grid
from tessel.layout import Layout
from tessel.move import Move
from tessel.nn import distribute_module
from tessel.partition import Partition, world
from tessel.testing import count_memory, count_traffic

TITLE = "a U-Net"
LIMIT = 1e-10  # of the error: sums over all pixels, in another order


@dataclass(frozen=True)
class Report:
    """What came of it, as the first worker knows it.

    Args:
        value_error: the largest difference of the output from that of one process.
        gradient_error: the same for the gradients of all parameters, relative to the largest.
        alone: the peak of the tensors' bytes in one process.
        peaks: the same on each worker.
        sent: the bytes that each worker sent, forward and backward.
        agreements: how often the workers agreed.
        seconds: how long one process took, and the workers.
        layout: where the picture lay.
        pictures: the input and the output.
    """

    value_error: float
    gradient_error: float
    alone: int
    peaks: tuple[int, ...]
    sent: tuple[int, ...]
    agreements: int
    seconds: tuple[float, float]
    layout: Layout
    pictures: tuple[Tensor, Tensor]

    @property
    def budget(self) -> int:
        """What a worker may use: less than one process needs, more than each worker does."""
        return self.alone // 2

    @property
    def worst(self) -> float:
        """The larger error."""
        return max(self.value_error, self.gradient_error)

    @property
    def fits(self) -> bool:
        """Whether every worker stays within the budget, if there are several."""
        return len(self.peaks) < 4 or max(self.peaks) <= self.budget


class UNet(nn.Module):
    """Plain torch: nothing in it knows of workers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = _twice(1, width)
        self.pool = nn.MaxPool2d(2)
        self.bottom = _twice(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = _twice(2 * width, width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = self.first(x)
        up = self.up(self.bottom(self.pool(across)))
        return x + self.last(self.merge(torch.cat([across, up], dim=1)))


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def side(size: int) -> int:
    """The length of the picture's sides: even, and at least four."""
    return max(4, 2 * size)


def picture(length: int) -> Tensor:
    """Rings and a slope, with noise on them."""
    across = torch.linspace(-1, 1, length, dtype=torch.float64)
    radius = (across[:, None] ** 2 + across[None, :] ** 2).sqrt()
    rings = torch.cos(9 * torch.pi * radius**1.5) + across[None, :]
    noise = wave((length, length)).mul(43758.5453).frac()
    return (rings + 0.6 * noise)[None, None]


def perform(size: int) -> Report | None:
    """Run on every worker; the report on the first."""
    P = world().create_cartesian_topology_partition((1, 1, *grid(world().size)))
    whole = picture(side(size))
    layout = Layout.balanced(P, whole.shape)
    torch.manual_seed(0)
    alone = UNet().double()
    spread = distribute_module(copy.deepcopy(alone), P)
    begin = time.perf_counter()
    x = layout.local_part(whole).clone()
    with count_traffic() as traffic, count_memory() as memory:
        y = spread(x)
        (y.square().sum() / whole.numel()).backward()
    seconds = time.perf_counter() - begin
    parts = world().group.share_objects((memory.peak, traffic.bytes_sent))
    output = _collected(y.detach(), layout.resized(whole.shape))
    if world().rank != 0:
        return None
    peaks, sent = zip(*parts, strict=True)
    found = _compared(alone, spread, whole, output, layout, seconds, peaks, sent)
    return replace(found, agreements=traffic.agreements)


def _collected(y: Tensor, layout: Layout) -> Tensor:
    """The whole output on the first worker."""
    first = Partition(world().ranks[:1], (1,) * layout.partition.dim)
    return Move(layout, Layout.balanced(first, layout.shape)).apply(y)


def _compared(
    alone: nn.Module,
    spread: nn.Module,
    whole: Tensor,
    output: Tensor,
    layout: Layout,
    seconds: float,
    peaks: tuple[int, ...],
    sent: tuple[int, ...],
) -> Report:
    """The same in one process, with plain torch, and how much it differs."""
    begin = time.perf_counter()
    with count_memory() as memory:
        y = alone(whole.clone())
        (y.square().sum() / whole.numel()).backward()
    before = time.perf_counter() - begin
    errors = []
    for p, q in zip(alone.parameters(), spread.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        scale = max(1.0, float(p.grad.abs().max()))
        errors.append(float((p.grad - q.grad).abs().max()) / scale)
    return Report(
        value_error=float((output - y.detach()).abs().max()),
        gradient_error=max(errors),
        alone=memory.peak,
        peaks=peaks,
        sent=sent,
        agreements=0,
        seconds=(before, seconds),
        layout=layout,
        pictures=(whole[0, 0], output[0, 0]),
    )


def table(report: Report) -> Table:
    """One process and every worker, a line each."""
    height, width = report.layout.shape[2:]
    title = f"{TITLE} on a picture of {height} × {width}, forward and backward, float64"
    found = Table(title=title, box=SIMPLE_HEAD, title_style="bold", pad_edge=False)
    found.add_column("who", no_wrap=True)
    for name in ("part", "tensors at most", f"of {viz.num_bytes(report.budget)}", "sent", "time"):
        found.add_column(name, justify="right", no_wrap=True)
    before, after = report.seconds
    found.add_row(
        "one process",
        f"{height} × {width}",
        viz.num_bytes(report.alone),
        f"[red]{report.alone / report.budget:.0%}[/]",
        "",
        f"{before:.2f} s",
    )
    for place, (peak, sent) in enumerate(zip(report.peaks, report.sent, strict=True)):
        rows, columns = report.layout.shape_on(report.layout.partition.ranks[place])[2:]
        share = peak / report.budget
        found.add_row(
            f"worker {place}",
            f"{rows} × {columns}",
            viz.num_bytes(peak),
            f"[{'green' if share <= 1 else 'red'}]{share:.0%}[/]",
            viz.num_bytes(sent),
            f"{after:.2f} s" if place == 0 else "",
        )
    return found


def legend(report: Report) -> str:
    """What the table says of exactness."""
    return (
        f"largest difference from one process: output {report.value_error:.0e}, "
        f"gradients of all parameters {report.gradient_error:.0e}; agreements of the workers: "
        f"{report.agreements}"
    )


def draw(report: Report, path: Path) -> None:
    """The input, who has which part of it, and the output."""
    figure = viz.new_figure(12.0, 4.4)
    axes = figure.subplots(1, 3)
    given, result = (each.numpy() for each in report.pictures)
    titles = ("the picture", "who has which part", "the output")
    for ax, image, title in zip(axes, (given, given, result), titles, strict=True):
        ax.imshow(image, cmap="gray")
        ax.set_title(title)
        ax.set_axis_off()
    viz.mark_parts(axes[1], report.layout, (2, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.2)
