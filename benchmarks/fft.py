"""A Fourier transform of three dimensions that is spread over workers, against its peers.

In each round of one run, in turn: Tessel on P workers of one thread, mpi4py-fft on P processes of
one thread, torch.fft in one process with P threads and with one. All transform single precision,
forward, and keep their input; the results of Tessel and mpi4py-fft stay where the last step leaves
them. mpi4py-fft plans with FFTW_MEASURE, in that order of axes that was the fastest in a first
round, and its result is a buffer that it keeps; all others give a new tensor. The allocator is set
alike for all: it keeps what is freed.

The slowest worker counts in each repetition. Times are medians over the rounds of the median over
the repetitions, ratios are medians of the rounds' ratios. Where time goes is the mean over the
workers: "local" is spent in transforms, "messages" in waiting for data, "agreement" in agreeing on
shapes before, and "packing" is all the rest, which is mostly copies into and out of messages. MPI
packs while it sends, so there the two are one.

Two workers have no grid of pencils that is not one of slabs. FFTW's plans are kept in build/mpi; to
plan anew, remove the files `*_wisdom_*` there.

    benchmarks/setup_mpi.sh   # once: MPI, FFTW and mpi4py-fft, into build/mpi
    python benchmarks/fft.py [--rounds 4] [--repeats 4] [--lengths 128 256] [--workers 2 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from allocator import KEEP, start_again_with
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import tessel
from tessel.testing import WorkerPool
from tessel.transport import Group
from tessel.transport.letter import Letter, Receipt

HERE = Path(__file__).resolve().parent
MPI = HERE.parent / "build" / "mpi"
PARTS = ("local", "packing", "messages", "agreement")


@dataclass(frozen=True)
class Case:
    """One transform: a cube of real or complex numbers on a grid of workers."""

    length: int
    is_real: bool
    grid: tuple[int, int, int]

    @property
    def workers(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.length,) * 3

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_real else torch.complex64

    def __str__(self) -> str:
        numbers = "real" if self.is_real else "complex"
        form = "slab" if self.grid[1] == 1 else "pencil"
        grid = "×".join(map(str, self.grid))
        return f"{self.length}³ {numbers}, {form} {grid}"


# --- Tessel


def distributed(case: Case) -> Any:
    n = case.length
    along = [tessel.ParDFT(torch.complex64, n) for _ in case.shape[1:]]
    return tessel.distribute(
        tessel.kron(*along, tessel.ParDFT(case.dtype, n)), case.grid, "anywhere"
    )


def check(case: Case, F: Any) -> None:
    """A wave has one coefficient."""
    i, j, k = (torch.arange(*each, dtype=torch.float64) for each in F.layout_in.box())
    turn = 2j * torch.pi / case.length
    rows, columns = ((1 * turn * i).exp()[:, None] * (2 * turn * j).exp()), (3 * turn * k).exp()
    wave = rows.to(torch.complex64)[:, :, None] * columns.to(torch.complex64)
    y = F * (wave.real.contiguous() if case.is_real else wave)
    mine = [float(y.abs().max()), float(y.abs().square().sum(dtype=torch.float64))]
    largest, total = zip(*tessel.world().group.share_objects(mine), strict=True)
    expected = case.length**3 / (2 if case.is_real else 1)
    assert abs(max(largest) / expected - 1) < 1e-4 and abs(sum(total) / expected**2 - 1) < 1e-3


class Clock:
    """Milliseconds that a worker spends in each part of the work."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._within: list[float] = []  # what parts within those that run now took

    def timing(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            self._within.append(0.0)
            try:
                result = function(*args, **kwargs)
            finally:
                took = 1e3 * (time.perf_counter() - begin)
                self.spent[part] += took - self._within.pop()
                if self._within:
                    self._within[-1] += took
            return self.timing(part, result) if callable(result) else result  # waits for messages

        return timed


@contextmanager
def clocked() -> Iterator[Clock]:
    """Time transforms and messages by their functions, which all data passes."""
    clock = Clock()
    targets: list[tuple[Any, str, str]] = [
        (Group, "share_words", "agreement"),
        (Group, "exchange", "messages"),
        (Letter, "write", "packing"),
        (Receipt, "read", "packing"),
    ]
    targets += [(torch.fft, name, "local") for name in ("fft", "fftn", "rfft", "rfftn")]
    before = [getattr(owner, name) for owner, name, _ in targets]
    for (owner, name, part), function in zip(targets, before, strict=True):
        setattr(owner, name, clock.timing(part, function))
    try:
        yield clock
    finally:
        for (owner, name, _), function in zip(targets, before, strict=True):
            setattr(owner, name, function)


@torch.no_grad()
def spread(case: Case, repeats: int, is_first: bool) -> list[tuple[float, dict[str, float]]]:
    """Milliseconds of each repetition on this worker, and of the parts of another one."""
    F = distributed(case)
    if is_first:
        check(case, F)
    x = torch.randn(F.layout_in.local_shape, dtype=case.dtype)
    meet = tessel.nn.AllSumReduce(tessel.world(), [0])
    found = []
    for _ in range(repeats + 1):
        meet(torch.ones(1))  # begin together
        plain = milliseconds(lambda: F * x)
        meet(torch.ones(1))
        with clocked() as clock:
            total = milliseconds(lambda: F * x)
        clock.spent["packing"] += total - sum(clock.spent.values())
        found.append((plain, clock.spent))
    return found[1:]


def milliseconds(function: Callable[[], Tensor]) -> float:
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)


def tessel_round(pool: WorkerPool, case: Case, repeats: int, is_first: bool) -> dict[str, float]:
    by_worker = pool.run(spread, case, repeats, is_first, nprocs=case.workers)
    by_repeat = list(zip(*by_worker, strict=True))
    found = {"total": statistics.median(max(t for t, _ in each) for each in by_repeat)}
    for part in PARTS:
        means = [statistics.mean(spent[part] for _, spent in each) for each in by_repeat]
        found[part] = statistics.median(means)
    return found


# --- its peers


def mpi_run(case: Case, repeats: int, way: int | None) -> dict[str, Any]:
    """What mpi4py-fft says of one way, or of all."""
    asked = json.dumps({**asdict(case), "repeats": repeats, "way": way})
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [
            *("mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(case.workers)),
            *(str(MPI / "bin" / "python"), str(HERE / "fft_mpi.py"), asked),
        ],
        cwd=MPI,  # where FFTW's plans are kept
        env={**os.environ, **root, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def fastest_way(case: Case, repeats: int) -> int:
    found = mpi_run(case, repeats, None)
    return int(min(found, key=lambda way: min(found[way]["times"])))


def mpi_round(case: Case, repeats: int, way: int) -> dict[str, float]:
    found = mpi_run(case, repeats, way)[str(way)]
    total, local = (statistics.median(found[each]) for each in ("times", "local"))
    return {"total": total, "local": local}


@torch.no_grad()
def torch_round(case: Case, repeats: int, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    x = torch.randn(case.shape, dtype=case.dtype)
    transform = torch.fft.rfftn if case.is_real else torch.fft.fftn
    times = [milliseconds(lambda: transform(x)) for _ in range(repeats + 1)]
    return {"total": statistics.median(times[1:])}


# --- all of them


Results = dict[Case, dict[str, list[dict[str, float]]]]  # of each peer's rounds


def measure(cases: Sequence[Case], rounds: int, repeats: int, with_mpi: bool) -> Results:
    """All peers in turn, in each round."""
    ways = {}
    if with_mpi:
        for case in track(cases, "plans of FFTW"):
            ways[case] = fastest_way(case, 3)
    results: Results = {case: {} for case in cases}
    todo = [(number, case) for number in range(rounds) for case in cases]
    with WorkerPool(threads=1, timeout=300) as pool:
        for number, case in track(todo, "rounds"):
            found = {
                "tessel": tessel_round(pool, case, repeats, number == 0),
                "threads": torch_round(case, repeats, case.workers),
                "alone": torch_round(case, repeats, 1),
            }
            if with_mpi:
                found["mpi"] = mpi_round(case, repeats, ways[case])
            for name, result in found.items():
                results[case].setdefault(name, []).append(result)
    return results


def median(rounds: Sequence[dict[str, float]], what: str = "total") -> float:
    return statistics.median(each[what] for each in rounds)


def ratio(some: Sequence[dict[str, float]], others: Sequence[dict[str, float]]) -> float:
    return statistics.median(a["total"] / b["total"] for a, b in zip(some, others, strict=True))


def times_table(results: Results) -> Table:
    table = Table("transform", title="milliseconds, and how many times faster Tessel is")
    peers = {"mpi": "mpi4py-fft", "threads": "torch, P threads", "alone": "torch, 1 thread"}
    for heading in ("P", "Tessel", *(h for name in peers.values() for h in (name, "ratio"))):
        table.add_column(heading, justify="right")
    for case, found in results.items():
        cells = [str(case), str(case.workers), f"{median(found['tessel']):.1f}"]
        for name in peers:
            cells += (
                [f"{median(found[name]):.1f}", f"{ratio(found[name], found['tessel']):.2f}"]
                if name in found
                else ["–", "–"]
            )
        table.add_row(*cells)
    return table


def parts_table(results: Results) -> Table:
    table = Table("transform", title="where the time goes: milliseconds, mean over the workers")
    peer = ("mpi4py-fft local", "packing and messages")
    for heading in ("P", *(f"Tessel {PARTS[0]}", *PARTS[1:]), *peer):
        table.add_column(heading, justify="right")
    for case, found in results.items():
        cells = [str(case), str(case.workers)]
        cells += [f"{median(found['tessel'], part):.1f}" for part in PARTS]
        if "mpi" in found:
            local = median(found["mpi"], "local")
            cells += [f"{local:.1f}", f"{median(found['mpi']) - local:.1f}"]
        table.add_row(*cells)
    return table


def grids(workers: int) -> list[tuple[int, int, int]]:
    """Slabs, and the most square pencils if there are any."""
    side = max(k for k in range(1, workers + 1) if workers % k == 0 and k * k <= workers)
    return [(workers, 1, 1), *([(side, workers // side, 1)] if side > 1 else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--without-mpi", action="store_true")
    options = parser.parse_args()
    if not options.without_mpi and not (MPI / "bin" / "python").exists():
        parser.error("run benchmarks/setup_mpi.sh once, or give --without-mpi")
    start_again_with(KEEP)
    cases = [
        Case(length, is_real, grid)
        for length in options.lengths
        for is_real in (False, True)
        for workers in options.workers
        for grid in grids(workers)
    ]
    results = measure(cases, options.rounds, options.repeats, not options.without_mpi)
    console = Console(width=130)
    console.print(times_table(results))
    console.print(parts_table(results))


if __name__ == "__main__":
    main()
