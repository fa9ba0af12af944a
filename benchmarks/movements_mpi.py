"""The side of mpi4py in benchmarks/movements.py: collectives and messages on numpy buffers.

Results are written into buffers that were made before. Only the repartition has to pack: what
arrives is the result. The halo's messages are persistent and go from the edge of the slab into the
border of the result, while its interior is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from harness.serve import serve
from mpi4py import MPI

comm = MPI.COMM_WORLD
me, P = comm.rank, comm.size
ROWS = 4  # of a worker's slab, as in movements.py
Step = Callable[[], object]


def flat(length: int, rank: int) -> Any:
    return np.tile(np.arange(256, dtype=np.float32) + np.float32(rank), length // 256)


def total(length: int) -> Any:
    found = flat(length, 0)
    found *= P
    found += P * (P - 1) // 2
    return found


def block(rows: tuple[int, int], columns: tuple[int, int]) -> Any:
    """A part of the whole matrix, whose numbers follow from their places."""
    along = (np.arange(*columns, dtype=np.int32) % 8191).astype(np.float32)
    return np.float32(16) * np.arange(*rows, dtype=np.float32)[:, None] + along


def broadcast(n: int) -> tuple[Step, Any, Any]:
    y = flat(n, 0) if me == 0 else np.empty(n, np.float32)
    return lambda: comm.Bcast(y, 0), y, flat(n, 0)


def sum_reduce(n: int) -> tuple[Step, Any, Any]:
    x, y = flat(n, me), np.empty(n, np.float32)
    is_root = me == 0
    step = lambda: comm.Reduce(x, y if is_root else None, MPI.SUM, 0)  # noqa: E731
    return step, y[: n * is_root], total(n)[: n * is_root]


def all_sum_reduce(n: int) -> tuple[Step, Any, Any]:
    x, y = flat(n, me), np.empty(n, np.float32)
    return lambda: comm.Allreduce(x, y, MPI.SUM), y, total(n)


def all_gather(n: int) -> tuple[Step, Any, Any]:
    x, y = np.split(flat(n, 0), P)[me].copy(), np.empty(n, np.float32)
    return lambda: comm.Allgather(x, y), y, flat(n, 0)


def reduce_scatter(n: int) -> tuple[Step, Any, Any]:
    x, y = flat(n, me), np.empty(n // P, np.float32)
    return lambda: comm.Reduce_scatter_block(x, y, MPI.SUM), y, np.split(total(n), P)[me]


def repartition(n: int) -> tuple[Step, Any, Any]:
    x = block((ROWS * me, ROWS * (me + 1)), (0, n // ROWS))
    width = x.shape[1] // P
    parts = x.reshape(ROWS, P, width).transpose(1, 0, 2)
    packed, y = np.empty((P, ROWS, width), np.float32), np.empty((P * ROWS, width), np.float32)

    def step() -> None:
        np.copyto(packed, parts)
        comm.Alltoall(packed, y)

    return step, y, block((0, ROWS * P), (width * me, width * (me + 1)))


def halo_exchange(n: int) -> tuple[Step, Any, Any]:
    x = block((ROWS * me, ROWS * (me + 1)), (0, n // ROWS))
    before, after = int(me > 0), int(me < P - 1)
    y = np.empty((before + ROWS + after, x.shape[1]), np.float32)
    inner = y[before : before + ROWS]
    requests = []
    for exists, peer, edge, border in (
        (before, me - 1, x[:1], y[:1]),
        (after, me + 1, x[-1:], y[-1:]),
    ):
        if exists:
            requests += [comm.Recv_init(border, peer), comm.Send_init(edge, peer)]

    def step() -> None:
        MPI.Prequest.Startall(requests)
        np.copyto(inner, x)
        MPI.Prequest.Waitall(requests)

    rows = max(0, ROWS * me - 1), min(ROWS * P, ROWS * (me + 1) + 1)
    return step, y, block(rows, (0, n // ROWS))


MOVEMENTS = {
    "broadcast": broadcast,
    "sum-reduce": sum_reduce,
    "all-sum-reduce": all_sum_reduce,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "repartition": repartition,
    "halo exchange": halo_exchange,
}


def setup(settings: dict[str, Any]) -> Step:
    step, y, expected = MOVEMENTS[settings["movement"]](settings["kib"] * 256)
    step()
    assert np.array_equal(y, expected), f"{settings} gave wrong values on process {me}"
    return step


if __name__ == "__main__":
    serve(setup)
