"""How well the planner's times are predicted: measured against a model measured in the same run.

Fourier transforms in three dimensions, real and complex, of slabs and pencils, whose result comes
back to the partition of the input; and a spectral layer as in a Fourier neural operator. One
thread a worker. The measured time is that of the slowest worker, the lower quartile over the
rounds, in the best of some passes: what else runs on the machine makes it longer only. Memory that
is freed is kept, while the model is measured as well.

    python benchmarks/planner.py [--workers 1 2 4] [--sizes 64 128] [--rounds 15] [--passes 3]
                                  [--known]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from allocator import KEEP, start_again_with
from rich.console import Console
from rich.table import Table

import tessel
from tessel.cli.measure import best_of, measure_machine
from tessel.cli.plan import build
from tessel.operators.choose import plan_on
from tessel.operators.explanation import explain_plan
from tessel.operators.rates import known_machine
from tessel.operators.storage import storage_of

Case = tuple[str, int, tuple[int, ...]]  # the operator, its length, the partition

NAMES = ("fft", "rfft", "fno")


def operator(name: str, length: int) -> tessel.ParOperator:
    channels, modes = (8, (length // 8,)) if name == "fno" else (None, None)
    size = length // 2 if name == "fno" else length
    return build(name, (size,) * 3, torch.float32, channels, modes)


def partitions(name: str, workers: int) -> list[tuple[int, ...]]:
    """The slab along the first dimension in space, and the pencil."""
    slab = (workers, 1, 1)
    grids = [slab] if workers < 4 else [slab, (2, workers // 2, 1)]
    return [(1, *grid) if name == "fno" else grid for grid in grids]


def measure(case: Case, rounds: int) -> list[float]:
    """The seconds of each round, on this worker."""
    name, length, grid = case
    S = tessel.distribute(operator(name, length), grid)
    theta = tessel.init(S, requires_grad=False)
    x = torch.randn(S.layout_in.local_shape).to(S.domain.dtype)  # type: ignore[attr-defined]
    times = []
    with torch.no_grad():
        for _ in range(rounds + 2):
            start = time.perf_counter()
            S.apply(x, theta)
            times.append(time.perf_counter() - start)
    return times[2:]


def predict(case: Case, machine: tessel.operators.rates.Machine) -> float:
    name, length, grid = case
    S = operator(name, length)
    plan = plan_on(S, grid)
    return explain_plan(plan, S.domain.dtype, storage_of(plan), 1, machine).time


def all_cases(counts: list[int], sizes: list[int]) -> list[Case]:
    return [
        (name, size, grid)
        for workers in counts
        for name in NAMES
        for size in sizes
        for grid in partitions(name, workers)
    ]


def measured(cases: list[Case], rounds: int) -> dict[Case, float]:
    """For each case the seconds of the slowest worker."""
    found: dict[Case, float] = {}
    with tessel.testing.WorkerPool(threads=1) as pool:
        for case in cases:
            workers = torch.Size(case[2]).numel()
            times = zip(*pool.run(measure, case, rounds, nprocs=workers), strict=True)
            found[case] = statistics.quantiles([max(turn) for turn in times], n=4)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--known", action="store_true", help="use the model that is kept in a file")
    args = parser.parse_args()
    start_again_with(KEEP)
    cases = all_cases(args.workers, args.sizes)
    machines, passes = [], []
    for _ in range(args.passes):  # one after the other, so that both meet the same load
        machines.append(known_machine() if args.known else measure_machine(1))
        passes.append(measured(cases, args.rounds))
    machine = best_of(machines)
    table = Table(title=f"machine: {machine.origin}")
    for title in ("operator", "partition", "predicted", "measured", "ratio"):
        table.add_column(title, justify="left" if title in ("operator", "partition") else "right")
    worst = 1.0
    for case in cases:
        name, size, grid = case
        seconds = min(each[case] for each in passes)
        predicted = predict(case, machine)
        ratio = predicted / seconds
        worst = max(worst, ratio, 1 / ratio)
        numbers = f"{1e3 * predicted:.2f} ms", f"{1e3 * seconds:.2f} ms", f"{ratio:.2f}"
        table.add_row(f"{name} {operator(name, size).domain}", "×".join(map(str, grid)), *numbers)
    console = Console(width=100)
    console.print(table)
    console.print(f"the worst prediction is wrong by a factor of {worst:.2f}")


if __name__ == "__main__":
    main()
