"""The way of DistDL in benchmarks/repartition.py: messages between pairs, packed by slices.

For each pair of processes whose slabs overlap there is a buffer, made once. A step posts all
receives, copies each slice that leaves into its buffer and sends it, copies what stays, and copies
each message out of its buffer when it arrives. The gradient goes the same way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness.serve import serve
from mpi4py import MPI

comm = MPI.COMM_WORLD
Box = tuple[slice, ...]
torch.set_num_threads(1)


def slab(length: int, dim: int, rank: int) -> Box:
    """The balanced part of a cube that a process holds."""
    bounds = [(length * k) // comm.size for k in (rank, rank + 1)]
    return tuple(slice(*bounds) if each == dim else slice(0, length) for each in range(3))


def overlap(a: Box, b: Box) -> Box:
    return tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )


def within(part: Box, box: Box) -> Box:
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(part, box, strict=True))


def extent(box: Box) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in box)


class Exchange:
    """One direction: where slices leave and arrive, and a buffer for each."""

    def __init__(self, length: int, source: int, target: int) -> None:
        mine, goal = slab(length, source, comm.rank), slab(length, target, comm.rank)
        self.shape = extent(goal)
        self.sends, self.receives = [], []
        for peer in range(comm.size):
            leaves = within(overlap(mine, slab(length, target, peer)), mine)
            arrives = within(overlap(goal, slab(length, source, peer)), goal)
            if peer == comm.rank:
                self.kept = (leaves, arrives)
                continue
            self.sends.append((peer, leaves, np.empty(extent(leaves), np.float32)))
            self.receives.append((peer, arrives, np.empty(extent(arrives), np.float32)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        given = x.detach().numpy()
        result = torch.empty(self.shape)
        y = result.numpy()
        coming = [comm.Irecv(buffer, peer) for peer, _, buffer in self.receives]
        going = []
        for peer, leaves, buffer in self.sends:
            np.copyto(buffer, given[leaves])
            going.append(comm.Isend(buffer, peer))
        leaves, arrives = self.kept
        np.copyto(y[arrives], given[leaves])
        for _ in coming:
            number = MPI.Request.Waitany(coming)
            _, arrives, buffer = self.receives[number]
            np.copyto(y[arrives], buffer)
        MPI.Request.Waitall(going)
        return result


class Repartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forth: Exchange, back: Exchange) -> torch.Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0].contiguous()), None, None


def cube(box: Box) -> torch.Tensor:
    i, j, k = (torch.arange(each.start, each.stop) for each in box)
    return (31 * i[:, None, None] + 7 * j[:, None] + k).remainder(1009).float()


def setup(settings: dict[str, Any]) -> Callable[[], object]:
    length, dim, with_backward = settings["length"], settings["dim"], settings["with_backward"]
    forth, back = Exchange(length, 0, dim), Exchange(length, dim, 0)
    x, y = cube(slab(length, 0, comm.rank)), cube(slab(length, dim, comm.rank))
    x.requires_grad_(with_backward)

    def forward() -> torch.Tensor:
        return forth(x)

    def with_gradient() -> torch.Tensor:
        x.grad = None
        moved = Repartition.apply(x, forth, back)
        moved.backward(y)
        return moved.detach()

    step = with_gradient if with_backward else forward
    assert torch.equal(step(), y), "a repartition gave wrong values"
    assert not with_backward or torch.equal(x.grad, x.detach()), "a gradient is wrong"
    return step


if __name__ == "__main__":
    serve(setup)
