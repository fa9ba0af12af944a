"""A halo exchange of 2 to 64 KiB against mpi4py point to point, Gloo, heat and PyLops-MPI.

Each worker holds a block of channels, rows and columns. In "rows" the workers split the rows, in
"grid" rows and columns, so that corners travel, too. The size is that of one edge. What is made is
the block with a border of one element from the neighbours, as a convolution needs it.

Tessel is `Move.apply` without gradients, which makes a new result each time. mpi4py packs with
numpy into buffers that were made before, has persistent messages to all neighbours at once,
corners included, and copies the interior while they travel; Gloo gets the same messages by hand
from torch.distributed. "mpi4py in place" is the exchange alone, of a block that lies in a bordered
array already: what a program does that needs no new tensor; "Tessel in place" does so by `out=`,
whose interior is the block. heat (`get_halo`) splits one dimension
only; PyLops-MPI is its MPIHalo, which pads with zeros at the border of the whole.

    benchmarks/setup_peers.sh   # once
    python benchmarks/halo.py [--rounds 6] [--quick] [--only TEXT] [--without-peers]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from harness.claim import Case, Claim, Settings
from harness.command import main
from harness.contenders import OnWorkers, UnderMpi
from neighbours import Neighbourhood
from torch import Tensor

import tessel

Step = Callable[[], object]
KIB = (2, 8, 32, 64)
AIMS = {"mpi4py": 0.65, "Gloo": 0.25}


def numbers(bounds: list[tuple[int, int]]) -> Tensor:
    """A part of a tensor of numbers that follow from their places."""
    i, j, k = (torch.arange(*each) for each in bounds)
    return (31 * i[:, None, None] + 7 * j[:, None] + k).remainder(1009).float()


def prepared(settings: Settings) -> tuple[Neighbourhood, Tensor, Tensor]:
    """Who exchanges what, this worker's block, and the block with its border."""
    here = Neighbourhood(**settings, rank=dist.get_rank())
    expected = numbers(here.bounds)
    return here, expected[here.inner].clone(), expected


def checked(step: Callable[[], Tensor], expected: Tensor) -> Step:
    assert torch.equal(step(), expected), "a halo exchange gave wrong values"
    return step


def layouts(here: Neighbourhood) -> tuple[tessel.Layout, tessel.Layout]:
    """Of blocks, and of blocks with their borders."""
    P = tessel.world().create_cartesian_topology_partition(here.grid)
    whole = [size * n for size, n in zip(here.grid, here.shape, strict=True)]
    blocks = tessel.Layout.balanced(P, whole)
    return blocks, blocks.grow([(h, h) for h in here.halo])


def by_tessel(settings: Settings) -> Step:
    here, x, expected = prepared(settings)
    move = tessel.Move(*layouts(here))

    @torch.no_grad()
    def step() -> Tensor:
        return move.apply(x)

    return checked(step, expected)


def by_tessel_in_place(settings: Settings) -> Step:
    here, x, expected = prepared(settings)
    blocks, grown = layouts(here)
    move, y = tessel.Move(blocks, grown), torch.zeros(here.grown)
    inner = y[here.inner].copy_(x)

    @torch.no_grad()
    def step() -> Tensor:
        return move.apply(inner, out=y)

    return checked(step, expected)


def by_gloo(settings: Settings) -> Step:
    here, x, expected = prepared(settings)
    y = torch.empty(here.grown)
    inner = y[here.inner]
    messages = [
        (rank, x[leaves], torch.empty_like(x[leaves]), torch.empty(y[arrives].shape), y[arrives])
        for rank, leaves, arrives in here.messages()
    ]

    def step() -> Tensor:
        pending = [dist.irecv(arriving, rank) for rank, _, _, arriving, _ in messages]
        for rank, edge, leaving, _, _ in messages:
            leaving.copy_(edge)
            pending.append(dist.isend(leaving, rank))
        inner.copy_(x)
        for each in pending:
            each.wait()
        for _, _, _, arriving, border in messages:
            border.copy_(arriving)
        return y

    return checked(step, expected)


def case(kib: int, workers: int, is_grid: bool) -> Case:
    """A block of 16 channels and 32 rows, or of 32 by 32 with more channels."""
    length = kib * 256
    settings = {
        "grid": [1, 2, workers // 2] if is_grid else [1, workers, 1],
        "shape": [length // 32, 32, 32] if is_grid else [16, 32, length // 16],
        "halo": [0, 1, 1] if is_grid else [0, 1, 0],
    }
    form = "grid" if is_grid else "rows"
    return Case(
        f"{form}, {kib} KiB, {workers} workers",
        workers,
        settings,
        AIMS,
        calls=10 if kib < 32 else 5,
        seconds=0.06,
        most=40,
    )


def has_one_split(case: Case) -> bool:
    return sum(case.settings["halo"]) == 1


CLAIM = Claim(
    "halo",
    "halo exchange of 2 to 64 KiB against mpi4py point to point and Gloo",
    [
        case(kib, workers, is_grid)
        for workers, is_grid in ((2, False), (4, False), (4, True))
        for kib in KIB
    ],
    [
        OnWorkers("Tessel", by_tessel, split=True),
        UnderMpi("mpi4py", "halo_mpi.py"),
        OnWorkers("Gloo", by_gloo),
        OnWorkers("Tessel in place", by_tessel_in_place),
        UnderMpi("mpi4py in place", "halo_mpi.py", arguments=("in place",)),
        UnderMpi("heat", "halo_heat_mpi.py", "peers", has_one_split),
        UnderMpi("PyLops-MPI", "halo_pylops_mpi.py", "peers"),
    ],
    rounds=6,
    note="""The result is the block with its border: Tessel (Move.apply), heat and PyLops-MPI make
    a new one each time, mpi4py and Gloo write into one that was made before; "in place" only the
    border is exchanged and nothing else is copied (Tessel with `out=`).""",
)

if __name__ == "__main__":
    main(CLAIM, __doc__)
