"""The side of heat in benchmarks/halo.py: `get_halo`, and the block with its halos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heat
import torch
from harness.serve import serve
from mpi4py import MPI
from neighbours import Neighbourhood

torch.set_num_threads(1)


def setup(settings: dict[str, Any]) -> Callable[[], object]:
    here = Neighbourhood(**settings, rank=MPI.COMM_WORLD.rank)
    (dim,) = (d for d, width in enumerate(here.halo) if width)
    i, j, k = (torch.arange(*each) for each in here.bounds)
    expected = (31 * i[:, None, None] + 7 * j[:, None] + k).remainder(1009).float()
    x = heat.array(expected[here.inner].clone(), is_split=dim)

    def step() -> torch.Tensor:
        x.get_halo(here.halo[dim])
        return x.array_with_halos

    assert torch.equal(step(), expected), "a halo exchange gave wrong values"
    return step


if __name__ == "__main__":
    serve(setup)
