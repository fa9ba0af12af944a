"""The fifth demo: the reconstruction of a noisy picture from three blurs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch

from tessel.cli.demos.movements import grid
from tessel.cli.demos.report import (
    Report,
    Say,
    TableColumns,
    as_share,
    largest,
    of_processes,
    sizes_of_parts,
)
from tessel.core.partition import world
from tessel.examples import deblur
from tessel.imaging import DistributedContext
from tessel.operators.units import num_bytes
from tessel.testing import count_memory, count_traffic

TITLE = "a reconstruction"
LIMIT = 1e-10  # of the error: sums in another order, over iterations
ITERATIONS = 15
STEPS = (TITLE,) * ITERATIONS


def run(size: int, note: Say) -> list[Report]:
    """Run on every worker; return the report on the first."""
    length = max(64, size)  # large enough to see something
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
        # One more iteration, to count bytes and memory, which takes time.
        with count_traffic() as traffic, count_memory() as memory, torch.no_grad():
            x = bundle.signal.data
            bundle.prior.prox(x - bundle.data_fidelity.grad(x))
        parts = ctx.partition.group.share_objects((memory.peak, traffic.bytes_sent))
        if ctx.rank != 0:
            return []
        peaks, sent = zip(*parts, strict=True)
        begin = time.perf_counter()
        expected = deblur.in_plain_torch(settings)
        before = time.perf_counter() - begin
        blurs, measured = deblur.problem(settings)
        with count_memory() as memory:  # of one iteration, as for the workers
            deblur.iterate_in_plain_torch(expected, blurs, measured, settings)
        sizes, all_peaks = sizes_of_parts(bundle.signal.layout), (memory.peak, *peaks)
    rows = [(part, peak, peak / memory.peak) for part, peak in zip(sizes, all_peaks, strict=True)]
    columns: TableColumns = {"part": str, "in an iteration": num_bytes, "share": as_share}
    first, *_, last = result.psnr
    legend = (
        "in an iteration: peak memory of tensors that it creates; time of all iterations\n"
        f"PSNR {first:.1f} dB of the first measurement, {last:.1f} dB after {ITERATIONS} "
        f"iterations; "
    )
    return [
        Report(
            TITLE,
            f"of a picture of {sizes[0]} from {len(deblur.WIDTHS)} blurs",
            {"picture": largest(result.reconstruction - expected)},
            LIMIT,
            *of_processes(columns, rows[0], rows[1:], sent, (before, result.seconds)),
            legend,
            is_wrong=not last > first,  # no better than the measurement
            draw=partial(draw, result),
        )
    ]


def draw(result: deblur.Result, folder: Path) -> tuple[Path, str]:
    """Save the measurement, the reconstruction and the truth, side by side."""
    path = folder / "deblur.png"
    deblur.draw(result, path, dpi=150)
    return path, "The measurements, the reconstruction by the workers, and the ground truth."
