"""The side of mpi4py-fft in benchmarks/fft.py, which starts it under mpirun."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import numpy as np
from harness.serve import serve
from mpi4py import MPI
from mpi4py_fft import PFFT, fftw

comm = MPI.COMM_WORLD
WISDOM = f"wisdom_{comm.size}"  # FFTW's plans, in the working directory
WAVE = (1, 2, 3)  # its frequencies


def ways(grid: list[int], is_real: bool) -> list[Any]:
    """The orders of axes, in groups that are transformed together, that can be the fastest.

    The last group comes first, and a real transform is along its last axis. Of slabs, the order
    says which axis is split at the end.
    """
    if sum(size > 1 for size in grid) > 1:
        return [(0, 1, 2)]
    return [((0,), (1, 2)), (0, 1, 2) if is_real else ((0,), (2, 1))]


def planned(settings: dict[str, Any], axes: Any) -> PFFT:
    return PFFT(
        comm,
        (settings["length"],) * 3,
        axes=axes,
        dtype=settings["dtype"],
        grid=settings["grid"],
        planner_effort="FFTW_MEASURE",
        overwrite_input="FFTW_PRESERVE_INPUT",
    )


def check(transform: PFFT, settings: dict[str, Any]) -> None:
    """A wave has one coefficient."""
    given, start = transform.forward.input_array, transform.forward.input_pencil.substart
    turn = 2j * np.pi / settings["length"]
    i, j, k = (
        np.exp(turn * frequency * np.arange(s, s + n))
        for frequency, s, n in zip(WAVE, start, given.shape, strict=True)
    )
    wave = i[:, None, None] * j[:, None] * k
    given[...] = wave if np.iscomplexobj(given) else wave.real
    y = np.array(transform.forward(normalize=False))
    start, largest = transform.forward.output_pencil.substart, settings["length"] ** 3
    where = tuple(at - s for at, s in zip(WAVE, start, strict=True))
    if all(0 <= at < n for at, n in zip(where, y.shape, strict=True)):
        y[where] -= largest if np.iscomplexobj(given) else largest / 2
    error = float(np.abs(y).max(initial=0)) / largest
    limit = 1e-5 if y.dtype == np.complex64 else 1e-12
    assert error < limit, f"a wave is transformed with an error of {error:.1e}"


def timed(transform: PFFT) -> dict[str, float]:
    """Transform, and say how many seconds went into local transforms, and into all the rest.

    MPI packs while it sends, so that these two are one.
    """
    forward, local = transform.forward, 0.0
    begin = time.perf_counter()
    for number, step in enumerate(forward._xfftn):
        before = time.perf_counter()
        step(normalize=False)
        local += time.perf_counter() - before
        if number < len(forward._transfer):
            forward._transfer[number](step.output_array, forward._xfftn[number + 1].input_array)
    return {"local": local, "pack and move": time.perf_counter() - begin - local}


def seconds(transform: PFFT) -> float:
    """The least that a transform takes on the slowest process, the same on all."""
    found = []
    for _ in range(3):
        comm.Barrier()
        found.append(comm.allreduce(sum(timed(transform).values()), MPI.MAX))
    return min(found)


def setup(settings: dict[str, Any]) -> Any:
    """The transform in its fastest way."""
    with suppress(AssertionError, OSError):  # the first time there is none
        fftw.import_wisdom(WISDOM)
    noise = np.random.default_rng(comm.rank)
    fastest: PFFT | None = None
    for axes in ways(settings["grid"], not settings["dtype"].startswith("complex")):
        transform = planned(settings, axes)
        check(transform, settings)
        given = transform.forward.input_array
        given[...] = noise.standard_normal(given.shape)
        if fastest is None or seconds(transform) < seconds(fastest):
            fastest, transform = transform, fastest
        if transform is not None:
            transform.destroy()
    if comm.rank == 0:
        fftw.export_wisdom(WISDOM)
    return lambda: timed(fastest)


if __name__ == "__main__":
    serve(setup)
