"""Each movement against raw mpi4py, and against the same messages by hand over Gloo, on one host.

The size is that of the largest tensor of a worker: what is broadcast, what each adds to a sum, the
result of an all-gather, the input of a reduce-scatter, the slab of a repartition from rows to
columns, and the slab of a halo exchange, a quarter of which goes to each neighbour.

Tessel is `Move.apply` of a tensor that needs no gradient: the layouts are known, it packs, moves,
unpacks and makes a new result each time. (Under `torch.no_grad()`, entered for each call, 2 µs more
would be torch's own.) mpi4py writes into numpy buffers that were made before, as does Gloo, whose
messages are written by hand with torch.distributed. The modules of `tessel.nn` agree on the shapes
first; they are shown for small tensors, where that counts. With `out=` Tessel also writes into a
tensor that was made before; it is shown for large ones.

A sample of a small movement is the mean of several that follow each other at once, so that who
gives only, as the root of a broadcast, may run ahead: all contenders may.

    benchmarks/setup_peers.sh   # once
    python benchmarks/movements.py [--rounds 4] [--quick] [--only TEXT] [--without-peers]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from harness.claim import Case, Claim, Settings
from harness.command import main
from harness.contenders import OnWorkers, UnderMpi
from torch import Tensor

import tessel
from tessel.machine import usable_cores

Step = Callable[[], object]
KIB = (1, 64, 1024, 16 * 1024, 64 * 1024)
SMALL, LARGE = 64, 16 * 1024  # KiB
ROWS = 4  # of a worker's slab
MOVEMENTS = (
    "broadcast",
    "sum-reduce",
    "all-sum-reduce",
    "all-gather",
    "reduce-scatter",
    "repartition",
    "halo exchange",
)


# --- the tensors, as movements_mpi.py has them


@dataclass(frozen=True)
class Tensors:
    """What a worker has and gets in each movement."""

    movement: str
    kib: int

    @property
    def length(self) -> int:
        return self.kib * 256

    @property
    def width(self) -> int:
        return self.length // ROWS

    def flat(self, rank: int) -> Tensor:
        """Numbers that all workers know, of one worker."""
        period = torch.arange(256, dtype=torch.float32).add(rank)
        return period.repeat(self.length // 256)

    def block(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """A part of the whole matrix, whose numbers follow from their places."""
        along = torch.arange(*columns, dtype=torch.int32).remainder_(8191).float()
        return 16.0 * torch.arange(*rows)[:, None] + along

    def given(self) -> Tensor:
        P = tessel.world()
        if self.movement == "broadcast":
            return self.flat(0) if P.rank == 0 else tessel.zero_volume_tensor()
        if self.movement == "all-gather":
            return self.flat(0).chunk(P.size)[P.rank].clone()
        if self.movement in ("repartition", "halo exchange"):
            return self.block((ROWS * P.rank, ROWS * (P.rank + 1)), (0, self.width))
        return self.flat(P.rank)

    def expected(self) -> Tensor:
        P = tessel.world()
        if self.movement in ("broadcast", "all-gather"):
            return self.flat(0)
        if self.movement == "repartition":
            part = self.width // P.size
            return self.block((0, ROWS * P.size), (part * P.rank, part * (P.rank + 1)))
        if self.movement == "halo exchange":
            rows = max(0, ROWS * P.rank - 1), min(ROWS * P.size, ROWS * (P.rank + 1) + 1)
            return self.block(rows, (0, self.width))
        total = self.flat(0).mul_(P.size).add_(P.size * (P.size - 1) // 2)
        if self.movement == "sum-reduce":
            return total if P.rank == 0 else torch.empty(0)
        return total.chunk(P.size)[P.rank] if self.movement == "reduce-scatter" else total


def checked(step: Callable[[], Tensor], expected: Tensor) -> Step:
    found = step()
    assert torch.equal(found.reshape(expected.shape), expected), "a movement gave wrong values"
    return step


# --- Tessel


def layouts(tensors: Tensors) -> tuple[tessel.Layout, tessel.Layout]:
    P = tessel.world()
    whole = tessel.Layout.whole(P, (tensors.length,))
    owned = tessel.Layout.whole(P.create_partition_inclusive([0]), (tensors.length,))
    parts = tessel.Layout.balanced(P, (tensors.length,))
    rows, columns = (
        tessel.Layout.balanced(
            P.create_cartesian_topology_partition(grid), (ROWS * P.size, tensors.width)
        )
        for grid in ([P.size, 1], [1, P.size])
    )
    return {
        "broadcast": (owned, whole),
        "sum-reduce": (whole, owned),
        "all-sum-reduce": (whole, whole),
        "all-gather": (parts, whole),
        "reduce-scatter": (whole, parts),
        "repartition": (rows, columns),
        "halo exchange": (rows, rows.grow([(1, 1), (0, 0)])),
    }[tensors.movement]


def by_apply(settings: Settings) -> Step:
    tensors = Tensors(**settings)
    move, x = tessel.Move(*layouts(tensors)), tensors.given()
    return checked(lambda: move.apply(x), tensors.expected())


def by_out(settings: Settings) -> Step:
    """The same into a tensor that was made before, as MPI does; a root's own is left in place."""
    tensors = Tensors(**settings)
    move, x = tessel.Move(*layouts(tensors)), tensors.given()
    is_root = tensors.movement == "broadcast" and tessel.world().rank == 0
    out = x if is_root else torch.empty(move.codomain.local_shape)

    @torch.no_grad()
    def step() -> Tensor:
        return move.apply(x, out=out)

    return checked(step, tensors.expected())


def by_module(settings: Settings) -> Step:
    tensors = Tensors(**settings)
    P = tessel.world()
    first = P.create_partition_inclusive([0])
    rows, columns = (
        P.create_cartesian_topology_partition(grid) for grid in ([P.size, 1], [1, P.size])
    )
    makers: dict[str, Callable[[], torch.nn.Module]] = {
        "broadcast": lambda: tessel.nn.Broadcast(first, P),
        "sum-reduce": lambda: tessel.nn.SumReduce(P, first),
        "all-sum-reduce": lambda: tessel.nn.AllSumReduce(P, [0]),
        "all-gather": lambda: tessel.nn.AllGather(P, 0, 0),
        "reduce-scatter": lambda: tessel.nn.ReduceScatter(P, 0, 0),
        "repartition": lambda: tessel.nn.Repartition(rows, columns),
        "halo exchange": lambda: tessel.nn.HaloExchange(rows, [(1, 1), (0, 0)]),
    }
    module, x = makers[tensors.movement](), tensors.given()

    @torch.no_grad()
    def step() -> Tensor:
        found: Tensor = module(x)
        return found

    return checked(step, tensors.expected())


# --- the same messages, written by hand


def by_hand(settings: Settings) -> Step:
    tensors = Tensors(**settings)
    x = tensors.given()
    step = {
        "broadcast": broadcast_by_hand,
        "sum-reduce": reduce_by_hand,
        "all-sum-reduce": all_reduce_by_hand,
        "all-gather": all_gather_by_hand,
        "reduce-scatter": reduce_scatter_by_hand,
        "repartition": repartition_by_hand,
        "halo exchange": halo_by_hand,
    }[tensors.movement](x, tensors.length)
    return checked(step, tensors.expected())


def broadcast_by_hand(x: Tensor, length: int) -> Callable[[], Tensor]:
    y = x if dist.get_rank() == 0 else torch.empty(length)

    def step() -> Tensor:
        dist.broadcast(y, 0)
        return y

    return step


def reduce_by_hand(x: Tensor, length: int) -> Callable[[], Tensor]:
    y, none = torch.empty_like(x), torch.empty(0)

    def step() -> Tensor:  # it works in place, on other workers than the root too
        y.copy_(x)
        dist.reduce(y, 0)
        return y if dist.get_rank() == 0 else none

    return step


def all_reduce_by_hand(x: Tensor, length: int) -> Callable[[], Tensor]:
    y = torch.empty_like(x)

    def step() -> Tensor:
        y.copy_(x)
        dist.all_reduce(y)
        return y

    return step


def all_gather_by_hand(x: Tensor, length: int) -> Callable[[], Tensor]:
    y = torch.empty(length)
    parts = list(y.chunk(dist.get_world_size()))

    def step() -> Tensor:
        dist.all_gather(parts, x)
        return y

    return step


def reduce_scatter_by_hand(x: Tensor, length: int) -> Callable[[], Tensor]:
    y = torch.empty(length // dist.get_world_size())
    parts = list(x.chunk(dist.get_world_size()))

    def step() -> Tensor:
        dist.reduce_scatter(y, parts)
        return y

    return step


def repartition_by_hand(x: Tensor, length: int) -> Callable[[], Tensor]:
    P = dist.get_world_size()
    rows, width = x.shape
    packed, y = torch.empty(P, rows, width // P), torch.empty(P * rows, width // P)
    parts = x.view(rows, P, width // P).transpose(0, 1)

    def step() -> Tensor:
        packed.copy_(parts)
        dist.all_to_all_single(y.view(-1), packed.view(-1))
        return y

    return step


def halo_by_hand(x: Tensor, length: int) -> Callable[[], Tensor]:
    me, P = dist.get_rank(), dist.get_world_size()
    before, after = int(me > 0), int(me < P - 1)
    y = torch.empty(before + len(x) + after, x.shape[1])
    inner = y[before : before + len(x)]

    def step() -> Tensor:
        pending = [dist.irecv(y[:1], me - 1)] if before else []
        pending += [dist.irecv(y[-1:], me + 1)] if after else []
        pending += [dist.isend(x[:1], me - 1)] if before else []
        pending += [dist.isend(x[-1:], me + 1)] if after else []
        inner.copy_(x)
        for each in pending:
            each.wait()
        return y

    return step


# --- the claim


def case(movement: str, kib: int, workers: int) -> Case:
    size = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
    return Case(
        f"{movement}, {size}, {workers} workers",
        workers,
        {"movement": movement, "kib": kib},
        {"mpi4py": 2.5 if kib < SMALL else 1.0},
        calls=10 if kib <= SMALL else 3 if kib <= 1024 else 1,
        seconds=0.04,
        most=40,
    )


def is_small(case: Case) -> bool:
    return int(case.settings["kib"]) <= SMALL


def is_large(case: Case) -> bool:
    return int(case.settings["kib"]) >= LARGE


# on more cores, what grows with the number of workers: from and to one of them
MORE = [P for P in (8, 16) if usable_cores() >= P]
CLAIM = Claim(
    "movements",
    "each movement against mpi4py on the same host",
    [case(movement, kib, P) for P in (2, 4) for movement in MOVEMENTS for kib in KIB]
    + [case(movement, kib, P) for P in MORE for movement in MOVEMENTS[:2] for kib in KIB],
    [
        OnWorkers("Tessel", by_apply, split=True),
        UnderMpi("mpi4py", "movements_mpi.py"),
        OnWorkers("Gloo by hand", by_hand),
        OnWorkers("tessel.nn", by_module, covers=is_small),
        OnWorkers("Tessel, out=", by_out, covers=is_large),
    ],
    rounds=4,
    note="""Tessel is Move.apply of a tensor that needs no gradient, which makes a new result each
    time; mpi4py and Gloo write into buffers that were made before.""",
)

if __name__ == "__main__":
    main(CLAIM, __doc__)
