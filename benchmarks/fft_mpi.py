"""The side of mpi4py-fft in benchmarks/fft.py, which starts it under mpirun.

    mpirun -n P build/mpi/bin/python benchmarks/fft_mpi.py '{"length": 128, ...}'

Prints one line of JSON: for each way that was asked for, milliseconds of each repetition, of the
slowest process, and the mean over the processes of what went into local transforms. The input is
kept, as torch and Tessel keep theirs; nothing is copied in or out, and no result is allocated.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py_fft import PFFT, fftw

comm = MPI.COMM_WORLD


def ways(grid: list[int], is_real: bool) -> list[Any]:
    """The orders of axes, in groups that are transformed together, that can be the fastest.

    The last group comes first, and a real transform is along its last axis. Of slabs, the order
    says which axis is split at the end.
    """
    if sum(size > 1 for size in grid) > 1:
        return [(0, 1, 2)]
    return [((0,), (1, 2)), (0, 1, 2) if is_real else ((0,), (2, 1))]


def fill(transform: PFFT, values: Any) -> None:
    """Put a function of the global indices, or random numbers, into its input."""
    array = transform.forward.input_array
    start = transform.forward.input_pencil.substart
    index = [np.arange(s, s + n) for s, n in zip(start, array.shape, strict=True)]
    array[...] = values(*np.meshgrid(*index, indexing="ij", sparse=True))


def check(transform: PFFT, length: int, is_real: bool) -> None:
    """A wave has one coefficient."""

    def wave(i: Any, j: Any, k: Any) -> Any:
        turn = 2j * np.pi / length
        first, second, third = (np.exp(turn * each) for each in (i, 2 * j, 3 * k))
        found = first.astype("F") * second.astype("F") * third.astype("F")
        return found.real if is_real else found

    fill(transform, wave)
    found = np.abs(transform.forward(normalize=False))
    largest = comm.allreduce(float(found.max(initial=0)), MPI.MAX)
    total = comm.allreduce(float((found.astype(np.float64) ** 2).sum()), MPI.SUM)
    expected = length**3 / (2 if is_real else 1)
    assert abs(largest / expected - 1) < 1e-4 and abs(total / expected**2 - 1) < 1e-3


def timed(transform: PFFT) -> tuple[float, float]:
    """Milliseconds of the slowest process, and of local transforms on the average."""
    forward, local = transform.forward, 0.0
    comm.Barrier()
    begin = time.perf_counter()
    for number, step in enumerate(forward._xfftn):
        before = time.perf_counter()
        step(normalize=False)
        local += time.perf_counter() - before
        if number < len(forward._transfer):
            forward._transfer[number](step.output_array, forward._xfftn[number + 1].input_array)
    total = time.perf_counter() - begin
    slowest = comm.allreduce(total, MPI.MAX)
    return 1e3 * slowest, 1e3 * comm.allreduce(local, MPI.SUM) / comm.size


def measure(axes: Any, case: dict[str, Any]) -> dict[str, Any]:
    length, is_real = case["length"], case["is_real"]
    transform = PFFT(
        comm,
        (length,) * 3,
        axes=axes,
        dtype="f" if is_real else "F",
        grid=case["grid"],
        planner_effort="FFTW_MEASURE",
        overwrite_input="FFTW_PRESERVE_INPUT",
    )
    if case["way"] is None:
        check(transform, length, is_real)
    noise = np.random.default_rng(comm.rank)
    fill(transform, lambda *_: noise.standard_normal(transform.forward.input_array.shape))
    results = [timed(transform) for _ in range(case["repeats"] + 1)][1:]
    times, local = zip(*results, strict=True)
    transform.destroy()
    return {"times": times, "local": local}


def main() -> None:
    case = json.loads(sys.argv[1])
    wisdom = f"wisdom_{comm.size}"
    with suppress(AssertionError, OSError):  # the first time there is none
        fftw.import_wisdom(wisdom)
    every = ways(case["grid"], case["is_real"])
    chosen = range(len(every)) if case["way"] is None else [case["way"]]
    found = {str(number): measure(every[number], case) for number in chosen}
    if case["way"] is None:
        fftw.export_wisdom(wisdom)
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
