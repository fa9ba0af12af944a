"""A repartition of a cube, from slabs along one dimension to those along another, against peers.

Forward is `Move.apply` without gradients; with backward, the same operator records the graph and
its adjoint brings a gradient back. The peers:

    DistDL's way  for each pair of processes a slice copied into a buffer, Isend and Irecv, and a
                  slice copied out of a buffer as each message arrives, on torch tensors under
                  mpi4py; the gradient by the adjoint. (DistDL itself has no package on PyPI.)
    DTensor       redistribute from Shard to Shard over Gloo
    mpi4py-fft    its Transfer, an Alltoallw of numpy arrays; backward is its own backward

All but mpi4py-fft, which writes into arrays that were made before, make a new result each time.

    benchmarks/setup_peers.sh   # once
    python benchmarks/repartition.py [--rounds 6] [--quick] [--only TEXT] [--without-peers]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness.claim import Case, Claim, Settings
from harness.command import main
from harness.contenders import OnWorkers, UnderMpi
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tessel

Step = Callable[[], object]
AIMS = {"DistDL's way": 0.55, "DTensor": 0.2, "mpi4py-fft": 1.0}


def layout(length: int, dim: int) -> tessel.Layout:
    P = tessel.world()
    grid = [P.size if each == dim else 1 for each in range(3)]
    return tessel.Layout.balanced(P.create_cartesian_topology_partition(grid), (length,) * 3)


def cube(length: int, along: tessel.Layout) -> Tensor:
    """This worker's part of a cube of numbers that follow from their places."""
    i, j, k = (torch.arange(*each) for each in along.box() or ())
    return (31 * i[:, None, None] + 7 * j[:, None] + k).remainder(1009).float()


def checked(length: int, dim: int, forth: Callable[[Tensor], Tensor], with_backward: bool) -> Step:
    """A step that brings a cube from slabs along dim 0 to slabs along another, checked once."""
    here, there = layout(length, 0), layout(length, dim)
    x, y = cube(length, here), cube(length, there)

    @torch.no_grad()
    def forward() -> Tensor:
        return forth(x)

    def with_gradient() -> Tensor:
        x.grad = None
        moved = forth(x)
        moved.backward(y)
        return moved.detach()

    x.requires_grad_(with_backward)
    step = with_gradient if with_backward else forward
    assert torch.equal(step(), y), "a repartition gave wrong values"
    assert not with_backward or torch.equal(x.grad, x.detach()), "a gradient is wrong"
    return step


def by_tessel(settings: Settings) -> Step:
    length, dim, with_backward = settings["length"], settings["dim"], settings["with_backward"]
    move = tessel.Move(layout(length, 0), layout(length, dim))
    return checked(length, dim, move.apply, with_backward)


def by_dtensor(settings: Settings) -> Step:
    length, dim, with_backward = settings["length"], settings["dim"], settings["with_backward"]
    mesh = init_device_mesh("cpu", (tessel.world().size,))

    def forth(x: Tensor) -> Tensor:
        spread = DTensor.from_local(x, mesh, [Shard(0)])
        return spread.redistribute(mesh, [Shard(dim)]).to_local()

    return checked(length, dim, forth, with_backward)


def case(length: int, dim: int, with_backward: bool, workers: int) -> Case:
    what = "with backward" if with_backward else "forward"
    return Case(
        f"{length}³, dim 0 to {dim}, {what}, {workers} workers",
        workers,
        {"length": length, "dim": dim, "with_backward": with_backward},
        AIMS,
        seconds=0.15,
    )


CLAIM = Claim(
    "repartition",
    "repartition of a cube of float32 between slabs, forward and with backward",
    [
        case(length, dim, with_backward, workers)
        for workers in (2, 4)
        for length, dim in ((128, 1), (256, 1), (256, 2))
        for with_backward in (False, True)
    ],
    [
        OnWorkers("Tessel", by_tessel, split=True),
        UnderMpi("DistDL's way", "repartition_mpi.py", "peers"),
        OnWorkers("DTensor", by_dtensor),
        UnderMpi("mpi4py-fft", "transfer_mpi.py"),
    ],
    rounds=6,
    note="""Tessel is Move.apply, which makes a new result each time, as DistDL's way and DTensor
    do; mpi4py-fft writes into arrays that were made before.""",
)

if __name__ == "__main__":
    main(CLAIM, __doc__)
