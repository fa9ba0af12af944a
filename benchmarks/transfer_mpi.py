"""The side of mpi4py-fft in benchmarks/repartition.py: its Transfer between two slabs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from harness.serve import serve
from mpi4py import MPI
from mpi4py_fft.pencil import Pencil, Subcomm


def cube(pencil: Pencil) -> Any:
    """This process's part of a cube of numbers that follow from their places."""
    i, j, k = (
        np.arange(start, start + n)
        for start, n in zip(pencil.substart, pencil.subshape, strict=True)
    )
    return ((31 * i[:, None, None] + 7 * j[:, None] + k) % 1009).astype(np.float32)


def setup(settings: dict[str, Any]) -> Callable[[], object]:
    length, dim, with_backward = settings["length"], settings["dim"], settings["with_backward"]
    processes = Subcomm(MPI.COMM_WORLD, [0, 1, 1])  # all of them along dim 0
    here = Pencil(processes, (length,) * 3, axis=dim)
    there = here.pencil(0)  # dim 0 whole, and `dim` split
    transfer = here.transfer(there, np.float32)
    x, goal = cube(here), cube(there)
    y, back = np.empty_like(goal), np.empty_like(x)

    def step() -> None:
        transfer.forward(x, y)
        if with_backward:
            transfer.backward(goal, back)

    step()
    assert np.array_equal(y, goal), "a transfer gave wrong values"
    assert not with_backward or np.array_equal(back, x), "a transfer back gave wrong values"
    return step


if __name__ == "__main__":
    serve(setup)
