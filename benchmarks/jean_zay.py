"""The planner against published times: PencilFFTs on Jean Zay, and how its machine model was made.

Means of a forward and an inverse real transform of 1024³ doubles, on 256 to 8192 processes, 40 on
each host (https://jipolanco.github.io/PencilFFTs.jl). The model has two numbers that are fitted, on
two times in the middle: the operations a second of a core in transforms, and the
bytes a second that all hosts together exchange. The others are facts of the hardware. The steps are
those that were measured: pencils, two transpositions each way. Nothing runs.

    python benchmarks/jean_zay.py [--pairs] [--write]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import combinations, pairwise

import torch
from rich.console import Console
from rich.table import Table

from tessel import Layout, ParDFT, ParIdentity, kron
from tessel.cli.plan import build
from tessel.core.partition import HypotheticalPartition
from tessel.operators.choose import best_partition
from tessel.operators.explanation import explain_plan
from tessel.operators.layouts import representatives
from tessel.operators.planning import OperatorPlan, make_plan
from tessel.operators.rates import MACHINES, Machine, Network, Rates, known_machine

PUBLISHED = {256: 517.6, 512: 290.7, 1024: 177.0, 2048: 122.1, 4096: 90.3, 8192: 40.6}  # ms
FITTED = (1024, 2048)  # the two that the model knows
# as square as can be, which MPI_Dims_create chose there
GRIDS = {P: (2 ** math.ceil(math.log2(P) / 2), 2 ** (int(math.log2(P)) // 2), 1) for P in PUBLISHED}
CORES = 40  # two Intel Xeon Gold 6248 of 20 cores
MEMORY = 12 * 2933e6 * 8 / CORES  # twelve channels of DDR4-2933, shared by all cores
OMNI_PATH = 100e9 / 8, 1e-6  # bytes a second of a host, and seconds of a message
NOTES = {
    "fitted": "rates[0].fft and fft_across (one number), network.bisection: on the published times "
    f"of {FITTED[0]} and {FITTED[1]} processes; benchmarks/jean_zay.py",
    "hardware": "two Xeon Gold 6248 a host, twelve channels of DDR4-2933 (281.6 GB/s, shared by 40 "
    "cores), a copy inside of a host reads and writes; Omni-Path 100 Gb/s, 1 µs",
    "ours": "call, step, matrix and weights are those of a small machine: no time here needs them",
}
TRANSFORM = build("rfft", (1024,) * 3, torch.float64)


def pencils(grid: tuple[int, ...]) -> list[OperatorPlan]:
    """The steps that were measured: along one dimension after the other, which is whole then."""
    real, spectrum = (1024, 1024, 1024), (1024, 1024, 513)
    P, D = HypotheticalPartition(grid[:2]), torch.complex128
    x, y, z = (ParIdentity(D, 1024), ParIdentity(D, 1024), ParIdentity(D, 513))
    F, last = ParDFT(D, 1024), ParDFT(torch.float64, 1024)
    whole_middle, whole_first = (
        Layout.split(P, spectrum, axes) for axes in ((0, None, 1), (None, 0, 1))
    )
    first = kron(ParIdentity(torch.float64, 1024), ParIdentity(torch.float64, 1024), last)
    return [
        make_plan(first, Layout.split(P, real, (0, 1, None)), whole_middle),
        make_plan(kron(x, F, z), whole_middle, whole_first),
        make_plan(kron(F, y, z), whole_first, whole_first),
    ]


PLANS = {P: pencils(grid) for P, grid in GRIDS.items()}


def machine(fft: float, bisection: float) -> Machine:
    rates = Rates(
        CORES,
        call=2e-5,
        step=2e-5,
        latency=1e-6,
        bandwidth=MEMORY / 2,
        memory=MEMORY,
        fft=fft,
        fft_across=fft,
        matrix=5e10,
        weights=2e9,
    )
    bandwidth, latency = OMNI_PATH
    network = Network(CORES, latency, bandwidth, bisection)
    return Machine(CORES, (rates,), "Jean Zay, 40 cores a host, Omni-Path: see notes", network)


def predicted(workers: int, model: Machine) -> float:
    """Milliseconds of a forward and an inverse transform, on the grid that was measured."""
    found = [
        explain_plan(plan, dtype, {}, 1, model, representatives(plan.source.partition)).time
        for plan, dtype in zip(
            PLANS[workers], (torch.float64, *[torch.complex128] * 2), strict=True
        )
    ]
    return 2e3 * sum(found)  # the inverse takes the same steps back


def fit(pair: tuple[int, int], rounds: int = 60) -> Machine:
    """The model that gives these two times: the smaller count says how fast cores are."""
    few, many = pair
    fft, bisection = 4e9, 1e12
    for _ in range(rounds):  # each number is set by the time that depends on it the most
        model = machine(fft, bisection)
        fft *= (predicted(few, model) / PUBLISHED[few]) ** 1.5
        model = machine(fft, bisection)
        bisection *= (predicted(many, model) / PUBLISHED[many]) ** 1.2
        bisection = min(bisection, 1e18)
    return machine(fft, bisection)


def factors(model: Machine) -> dict[int, float]:
    """Predicted against published."""
    return {P: predicted(P, model) / PUBLISHED[P] for P in PUBLISHED}


def worst(found: Mapping[int, float]) -> float:
    return max(max(each, 1 / each) for each in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", action="store_true", help="fit on every two of the times")
    parser.add_argument("--write", action="store_true", help="fit again, and write the model")
    args = parser.parse_args()
    console = Console(width=100)
    if args.pairs:
        for pair in combinations(PUBLISHED, 2):
            found = factors(fit(pair))
            falls = all(a > b for a, b in pairwise(found[P] * PUBLISHED[P] for P in PUBLISHED))
            print(
                pair, {P: round(each, 2) for P, each in found.items()}, f"{worst(found):.2f}", falls
            )
        return
    path = MACHINES / "jean-zay.json"
    if args.write:
        known = {key: value for key, value in asdict(fit(FITTED)).items() if value is not None}
        path.write_text(json.dumps({**known, "notes": NOTES}, indent=2, ensure_ascii=False) + "\n")
    model = known_machine(path)
    before = replace(model, network=None)
    table = Table(title=model.origin)
    titles = ("processes", "grid", "published", "predicted", "factor", "without network")
    for title in (*titles, "best partition", "predicted for it"):
        table.add_column(title, justify="right")
    for P, ratio in factors(model).items():
        best = best_partition(TRANSFORM, P, partition_out="anywhere", machine=model)
        table.add_row(
            f"{P}{'*' * (P in FITTED)}",
            "×".join(map(str, GRIDS[P][:2])),
            f"{PUBLISHED[P]} ms",
            f"{predicted(P, model):.1f} ms",
            f"{ratio:.2f}",
            f"{predicted(P, before):.1f} ms",
            "×".join(map(str, best.partition)),
            f"{2e3 * best.time:.1f} ms",
        )
    console.print(table)
    console.print(f"* fitted; the worst factor is {worst(factors(model)):.2f}")


if __name__ == "__main__":
    main()
