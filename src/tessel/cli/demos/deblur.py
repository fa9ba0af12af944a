"""The fifth demo: a picture that was blurred in three ways and is noisy is reconstructed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from tessel import viz
from tessel.cli.demos.movements import grid
from tessel.cli.demos.report import (
    Note,
    Report,
    as_text,
    largest,
    sizes_of_parts,
    workers_table,
)
from tessel.core.layout import Layout
from tessel.core.partition import world
from tessel.examples import deblur
from tessel.imaging import DistributedContext
from tessel.testing import count_memory, count_traffic

TITLE = "a reconstruction"
LIMIT = 1e-10  # of the error: sums in another order, iterated
ITERATIONS = 15
STEPS = (TITLE,) * ITERATIONS


@dataclass(frozen=True)
class Reconstructed(Report):
    """What came of it.

    Args:
        error: the largest difference of the picture from that of one process.
        result: the pictures, and the PSNR of the first measurement and after each iteration.
        alone: the peak of the tensors' bytes in one process.
        peaks: the same on each worker.
        sent: the bytes that each worker sent in an iteration.
        seconds: how long one process took for all iterations, and the workers.
        layout: where the picture lay.
    """

    error: float
    result: deblur.Result
    alone: int
    peaks: tuple[int, ...]
    sent: tuple[int, ...]
    seconds: tuple[float, float]
    layout: Layout

    @property
    def worst(self) -> float:
        return self.error

    @property
    def wrong(self) -> list[str]:
        """The title, if the picture is another one, or no better than the measurement."""
        right = self.error <= LIMIT and self.result.psnr[-1] > self.result.psnr[0]
        return [] if right else [TITLE]

    def tables(self) -> list[tuple[Table, str]]:
        """One process and every worker, a line each."""
        sizes = sizes_of_parts(self.layout)
        title = f"{TITLE} of a picture of {sizes[0]} from {len(deblur.WIDTHS)} blurs"
        cells = [
            (size, viz.num_bytes(peak), f"{peak / self.alone:.0%}")
            for size, peak in zip(sizes, (self.alone, *self.peaks), strict=True)
        ]
        before, after = self.seconds
        times = f"{before:.2f} s", f"{after:.2f} s"
        columns = ("part", "in an iteration", "share")
        table = workers_table(title, columns, cells, self.sent, times)
        first, *_, last = self.result.psnr
        legend = (
            "in an iteration: peak memory of tensors that it creates; time of all "
            f"iterations\nPSNR {first:.1f} dB of the first measurement, {last:.1f} dB after "
            f"{len(self.result.psnr) - 1} iterations; largest difference from one process: "
            f"{as_text(self.error)}"
        )
        return [(table, legend)]

    def draw(self, folder: Path) -> list[tuple[Path, str]]:
        """The measurement, the reconstruction and the truth, side by side."""
        deblur.draw(self.result, folder / "deblur.png", dpi=150)
        text = "The measurements, the reconstruction by the workers, and the ground truth."
        return [(folder / "deblur.png", text)]


def run(size: int, note: Note) -> Reconstructed | None:
    """Run on every worker; the report on the first."""
    length = max(64, size)  # large enough for something to be seen
    settings = deblur.Settings(
        size=length,
        iterations=ITERATIONS,
        patch=length // 8,
        parts=grid(world().size),
        dtype=torch.float64,
    )
    with DistributedContext(seed=settings.seed, device_mode="cpu") as ctx:
        bundle = deblur.make_bundle(ctx, settings)
        result = deblur.reconstruct(
            ctx, bundle, settings, lambda _, psnr: note(f"{TITLE}: PSNR {psnr:.2f} dB")
        )
        # One more iteration, for what it sends and holds: to count takes time.
        with count_traffic() as traffic, count_memory() as memory, torch.no_grad():
            x = bundle.signal.data
            bundle.prior.prox(x - bundle.data_fidelity.grad(x))
        parts = ctx.partition.group.share_objects((memory.peak, traffic.bytes_sent))
        if ctx.rank != 0:
            return None
        peaks, sent = zip(*parts, strict=True)
        begin = time.perf_counter()
        expected = deblur.in_plain_torch(settings)
        before = time.perf_counter() - begin
        numbers = range(len(deblur.WIDTHS))
        blurs = [deblur.physics(settings, number) for number in numbers]
        measured = [deblur.measurement(settings, number) for number in numbers]
        with count_memory() as memory:  # of one iteration, as that of the workers is
            deblur.iterate_in_plain_torch(expected, blurs, measured, settings)
        return Reconstructed(
            error=largest(result.reconstruction - expected),
            result=result,
            alone=memory.peak,
            peaks=peaks,
            sent=sent,
            seconds=(before, result.seconds),
            layout=bundle.signal.layout,
        )
