"""The side of mpi4py in benchmarks/halo.py: point to point with all neighbours at once.

mpirun -n P python halo_mpi.py FOLDER ["in place"]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from harness.serve import serve
from mpi4py import MPI
from neighbours import Neighbourhood

comm = MPI.COMM_WORLD
IS_IN_PLACE = "in place" in sys.argv[2:]


def numbers(bounds: list[tuple[int, int]]) -> Any:
    """A part of a tensor of numbers that follow from their places."""
    i, j, k = (np.arange(*each) for each in bounds)
    return ((31 * i[:, None, None] + 7 * j[:, None] + k) % 1009).astype(np.float32)


def setup(settings: dict[str, Any]) -> Callable[[], object]:
    here = Neighbourhood(**settings, rank=comm.rank)
    expected = numbers(here.bounds)
    y = np.full(here.grown, np.nan, np.float32)
    inner = y[here.inner]
    x = inner if IS_IN_PLACE else expected[here.inner].copy()
    inner[...] = expected[here.inner]
    leaving, arriving, requests = [], [], []
    for rank, leaves, arrives in here.messages():
        edge, border = x[leaves], y[arrives]
        out, into = np.empty_like(edge, order="C"), np.empty_like(border, order="C")
        leaving.append((out, edge))
        arriving.append((border, into))
        requests += [comm.Recv_init(into, rank), comm.Send_init(out, rank)]

    def step() -> None:
        for out, edge in leaving:
            np.copyto(out, edge)
        MPI.Prequest.Startall(requests)
        if not IS_IN_PLACE:
            np.copyto(inner, x)
        MPI.Prequest.Waitall(requests)
        for border, into in arriving:
            np.copyto(border, into)

    step()
    assert np.array_equal(y, expected), "a halo exchange gave wrong values"
    return step


if __name__ == "__main__":
    serve(setup)
