"""The second demo: a picture that is too large for one worker goes through a converted U-Net."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from tessel import tensor, viz
from tessel.cli.demos.movements import grid
from tessel.cli.demos.report import (
    Note,
    Report,
    as_text,
    largest,
    sizes_of_parts,
    workers_table,
    worst_of,
)
from tessel.core.layout import Layout
from tessel.core.partition import world
from tessel.examples import check
from tessel.nn import distribute_module
from tessel.testing import count_memory, count_traffic

TITLE = "a U-Net"
LIMIT = 1e-10  # of the error: sums over all pixels, in another order
STEPS = (TITLE,)


@dataclass(frozen=True)
class Cleaned(Report):
    """What came of it.

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
        return worst_of([self.value_error, self.gradient_error])

    @property
    def wrong(self) -> list[str]:
        # fewer than four workers do not halve what one process needs: halos, copies of weights
        fits = len(self.peaks) < 4 or max(self.peaks) <= self.budget
        return [] if self.worst <= LIMIT and fits else [TITLE]

    def tables(self) -> list[tuple[Table, str]]:
        """One process and every worker, a line each."""
        sizes = sizes_of_parts(self.layout)
        title = f"{TITLE} on a picture of {sizes[0]}, forward and backward, float64"
        cells = []
        for size, peak in zip(sizes, (self.alone, *self.peaks), strict=True):
            share = peak / self.budget
            colour = "green" if share <= 1 else "red"
            cells.append((size, viz.num_bytes(peak), f"[{colour}]{share:.0%}[/]"))
        columns = ("part", "tensors at most", f"of {viz.num_bytes(self.budget)}")
        before, after = self.seconds
        times = f"{before:.2f} s", f"{after:.2f} s"
        table = workers_table(title, columns, cells, self.sent, times)
        legend = (
            f"largest difference from one process: output {as_text(self.value_error)}, "
            f"gradients of all parameters {as_text(self.gradient_error)}; "
            f"agreements of the workers: {self.agreements}"
        )
        return [(table, legend)]

    def draw(self, folder: Path) -> list[tuple[Path, str]]:
        """The input, who has which part of it, and the output."""
        figure = viz.new_figure(12.0, 4.4)
        axes = figure.subplots(1, 3)
        given, result = (each.numpy() for each in self.pictures)
        titles = ("the picture", "the parts of the workers", "the output")
        for ax, image, title in zip(axes, (given, given, result), titles, strict=True):
            ax.imshow(image, cmap="gray")
            ax.set_title(title)
            ax.set_axis_off()
        viz.mark_parts(axes[1], self.layout, (2, 3))
        path = folder / "unet.png"
        figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.2)
        text = "The picture, the parts of the workers, and the output of the U-Net: no seams."
        return [(path, text)]


def run(size: int, note: Note) -> Cleaned | None:
    """Run on every worker; the report on the first."""
    P = world().create_cartesian_topology_partition((1, 1, *grid(world().size)))
    noisy, clean = check.pictures(1, max(4, 2 * size))
    torch.manual_seed(0)
    alone = check.UNet(width=8, dropout=0.0).double()
    converted = distribute_module(copy.deepcopy(alone), P)
    begin = time.perf_counter()
    with count_traffic() as traffic, count_memory() as memory:
        x = tensor.spread(noisy, P)
        y, _ = check.step(converted, x, clean)
    seconds = time.perf_counter() - begin
    # Dropout is off, and all workers made one model, so that the first has what one process has.
    parts = world().group.share_objects((memory.peak, traffic.bytes_sent))
    assert isinstance(y, tensor.Tensor)
    output = y.full().detach()
    note(TITLE)
    if world().rank != 0:
        return None
    begin = time.perf_counter()
    with count_memory() as memory_alone:
        expected, _ = check.step(alone, noisy.clone(), clean)
    before = time.perf_counter() - begin
    peaks, sent = zip(*parts, strict=True)
    errors = []
    for p, q in zip(alone.parameters(), converted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        errors.append(largest(p.grad - q.grad) / max(1.0, largest(p.grad)))
    return Cleaned(
        value_error=largest(output - expected),
        gradient_error=worst_of(errors),
        alone=memory_alone.peak,
        peaks=peaks,
        sent=sent,
        agreements=traffic.agreements,
        seconds=(before, seconds),
        layout=y.layout,
        pictures=(noisy[0, 0], output[0, 0]),
    )
