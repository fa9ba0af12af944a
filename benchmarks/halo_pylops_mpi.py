"""The side of PyLops-MPI in benchmarks/halo.py: its operator MPIHalo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from harness.serve import serve
from mpi4py import MPI
from neighbours import Neighbourhood
from pylops_mpi import DistributedArray, MPIHalo

comm = MPI.COMM_WORLD


def setup(settings: dict[str, Any]) -> Callable[[], object]:
    here = Neighbourhood(**settings, rank=comm.rank)
    i, j, k = (np.arange(*each) for each in here.bounds)
    expected = ((31 * i[:, None, None] + 7 * j[:, None] + k) % 1009).astype(np.float32)
    whole = tuple(size * n for size, n in zip(here.grid, here.shape, strict=True))
    widths = tuple(width for width in here.halo for _ in range(2))
    halo = MPIHalo(whole, widths, tuple(here.grid), comm, np.float32)
    size = int(np.prod(here.shape))
    sizes = [(size,)] * comm.size
    x = DistributedArray(size * comm.size, comm, local_shapes=sizes, dtype=np.float32)
    x[:] = expected[here.inner].ravel()

    def step() -> Any:
        return halo.matvec(x)

    found = step().local_array.reshape(
        [n + 2 * h for n, h in zip(here.shape, here.halo, strict=True)]
    )
    inside = tuple(
        slice(h - b, h + n + a)
        for h, b, n, a in zip(here.halo, here.before, here.shape, here.after, strict=True)
    )
    assert np.array_equal(found[inside], expected), "a halo exchange gave wrong values"
    return step


if __name__ == "__main__":
    serve(setup)
