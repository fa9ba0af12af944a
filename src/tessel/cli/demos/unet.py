"""The second demo: a converted U-Net on a picture that is too large for one worker."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tessel import tensor, viz
from tessel.cli.demos.movements import grid
from tessel.cli.demos.report import (
    Report,
    Say,
    TableColumns,
    largest,
    of_processes,
    sizes_of_parts,
    worst_of,
)
from tessel.core.layout import Layout
from tessel.core.partition import world
from tessel.examples import check
from tessel.nn import distribute_module
from tessel.testing import count_memory, count_traffic

TITLE = "a U-Net"
LIMIT = 1e-10  # of the error: sums over all pixels in another order
STEPS = (TITLE,)


def run(size: int, note: Say) -> list[Report]:
    """Run on every worker; return the report on the first."""
    P = world().create_cartesian_topology_partition((1, 1, *grid(world().size)))
    noisy, clean = check.pictures(1, max(4, 2 * size))
    torch.manual_seed(0)
    alone = check.UNet(width=8, dropout=0.0).double()
    converted = distribute_module(copy.deepcopy(alone), P)
    begin = time.perf_counter()
    with count_traffic() as traffic, count_memory() as memory:
        x = tensor.spread(noisy, P)
        y, _ = check.step(converted, x, clean)
    after = time.perf_counter() - begin
    parts = world().group.share_objects((memory.peak, traffic.bytes_sent))
    assert isinstance(y, tensor.Tensor)
    output = y.full().detach()
    note(TITLE)
    if world().rank != 0:
        return []
    # Dropout is off, and all workers made the same model, so the first has that of one process.
    begin = time.perf_counter()
    with count_memory() as memory:
        expected, _ = check.step(alone, noisy.clone(), clean)
    before = time.perf_counter() - begin
    peaks, sent = zip(*parts, strict=True)
    errors = []
    for p, q in zip(alone.parameters(), converted.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        errors.append(largest(p.grad - q.grad) / max(1.0, largest(p.grad)))
    # The budget of a worker: less than one process needs, more than each worker does.
    budget = memory.peak // 2
    whole, *sizes = sizes_of_parts(y.layout)
    column = f"of {viz.num_bytes(budget)}"
    columns: TableColumns = {"part": str, "tensors at most": viz.num_bytes, column: as_use}
    rows = [(part, peak, peak / budget) for part, peak in zip(sizes, peaks, strict=True)]
    both = of_processes(columns, (whole, memory.peak, 2.0), rows, sent, (before, after))
    return [
        Report(
            TITLE,
            f"on a picture of {whole}, forward and backward, float64",
            {"output": largest(output - expected), "gradients of all parameters": worst_of(errors)},
            LIMIT,
            *both,
            legend=f"agreements of the workers: {traffic.agreements}; ",
            is_wrong=exceeds(peaks, budget),
            draw=partial(draw, y.layout, noisy[0, 0], output[0, 0]),
        )
    ]


def exceeds(peaks: Sequence[int], budget: int) -> bool:
    """Whether a worker exceeds its budget."""
    # fewer than four workers do not halve the memory of one process: halos, copies of weights
    return len(peaks) >= 4 and max(peaks) > budget


def as_use(share: float) -> str:
    """The used share of a budget."""
    return f"[{'green' if share <= 1 else 'red'}]{share:.0%}[/]"


def draw(layout: Layout, given: Tensor, result: Tensor, folder: Path) -> tuple[Path, str]:
    """Save the input, the parts of the workers, and the output."""
    figure = viz.new_figure(12.0, 4.4)
    axes = figure.subplots(1, 3)
    titles = ("the picture", "the parts of the workers", "the output")
    for ax, image, title in zip(axes, (given, given, result), titles, strict=True):
        ax.imshow(image.numpy(), cmap="gray")
        ax.set_title(title)
        ax.set_axis_off()
    viz.mark_parts(axes[1], layout, (2, 3))
    path = folder / "unet.png"
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.2)
    return path, "The picture, the parts of the workers, and the output of the U-Net: no seams."
