"""What a movement costs beyond the bare messages that it is made of.

For each movement and size, in one run, interleaved: the same messages written by hand with
`torch.distributed` into buffers made beforehand; the operator whose layouts are known
(`Move.apply`), which also packs, unpacks and makes its result; and the module, which agrees on the
shapes first. Medians over the rounds, averaged over the workers, in microseconds. "overhead" is the
time on the processor that `apply` takes in the calling thread beyond that of the bare messages:
unlike the wall clock it does not count who waits for whom.

    python benchmarks/movements.py [--workers 2 4] [--kib 1 64 1024 16384] [--rounds 100]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tessel
from tessel.plan import plan

Case = tuple[str, Callable[[], object], Callable[[], object], Callable[[], object]]


def all_reduce_by_hand(x: Tensor) -> Callable[[], object]:
    y = torch.empty_like(x)

    def run() -> Tensor:
        y.copy_(x)
        dist.all_reduce(y)
        return y

    return run


def messages_by_hand(sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]):
    def run() -> None:
        pending = [dist.irecv(buffer, peer) for peer, buffer in receives]
        pending += [dist.isend(buffer, peer) for peer, buffer in sends]
        for work in pending:
            work.wait()

    return run


def all_to_all_by_hand(gives: list[int], takes: list[int]) -> Callable[[], object]:
    send, receive = torch.ones(sum(gives)), torch.empty(sum(takes))
    return lambda: dist.all_to_all_single(receive, send, takes, gives)


def cases(kib: int) -> list[Case]:
    """Every movement on a tensor of about this size on each worker."""
    P = tessel.world()
    workers, me = P.size, P.rank
    rows = P.create_cartesian_topology_partition([workers, 1])
    columns = P.create_cartesian_topology_partition([1, workers])
    first = P.create_partition_inclusive([0])
    n = 16 * workers
    width = max(workers, kib * 1024 // 4 // 16)
    flat = torch.ones(kib * 256)

    slab = tessel.Layout.balanced(rows, (n, width))
    transposed = tessel.Layout.balanced(columns, (n, width))
    whole = tessel.Layout.whole(P, flat.shape)
    owned = tessel.Layout.whole(first, flat.shape)
    x = torch.ones(slab.local_shape)
    copy = flat.clone()
    mine = flat if me == 0 else tessel.zero_volume_tensor()
    neighbours = [peer for peer in (me - 1, me + 1) if 0 <= peer < workers]

    halo = messages_by_hand(
        [(peer, torch.ones(width)) for peer in neighbours],
        [(peer, torch.empty(width)) for peer in neighbours],
    )
    pieces = plan(slab, transposed, me)
    gives = {piece.peer: piece.numel for piece in pieces.gives}
    takes = {piece.peer: piece.numel for piece in pieces.arrives}
    swap = all_to_all_by_hand(
        [gives.get(k, 0) for k in range(workers)], [takes.get(k, 0) for k in range(workers)]
    )

    def row(name: str, bare: Callable[[], object], move: tessel.Move, layer, given: Tensor) -> Case:
        return name, bare, lambda: move.apply(given), lambda: layer(given)

    halo_layer = tessel.nn.HaloExchange(rows, [(1, 1), (0, 0)])
    return [
        row(
            "all-sum-reduce",
            all_reduce_by_hand(flat),
            tessel.Move(whole, whole),
            tessel.nn.AllSumReduce(P, [0]),
            flat,
        ),
        row(
            "broadcast",
            lambda: dist.broadcast(copy, 0),
            tessel.Move(owned, whole),
            tessel.nn.Broadcast(first, P),
            mine,
        ),
        row(
            "repartition",
            swap,
            tessel.Move(slab, transposed),
            tessel.nn.Repartition(rows, columns),
            x,
        ),
        row("halo exchange", halo, tessel.Move(slab, slab.grow([(1, 1), (0, 0)])), halo_layer, x),
    ]


def measure(kib: int, rounds: int) -> list[tuple[str, list[float]]]:
    """Median microseconds of the ways, on the wall and on the processor, over all workers."""
    results = []
    group = tessel.world().group
    for name, *ways in cases(kib):
        walls: list[list[float]] = [[] for _ in ways]
        processors: list[list[float]] = [[] for _ in ways]
        for _ in range(rounds):
            for way, wall, processor in zip(ways, walls, processors, strict=True):
                dist.barrier()
                start, busy = time.perf_counter(), time.thread_time()
                way()
                wall.append(1e6 * (time.perf_counter() - start))
                processor.append(1e6 * (time.thread_time() - busy))
        mine = torch.tensor([statistics.median(times) for times in walls + processors])
        results.append((name, (group.sum(mine) / group.size).tolist()))
    return results


def report(workers: int, kib: int, rows: list[tuple[str, list[float]]]) -> Table:
    table = Table(title=f"{workers} workers, {kib} KiB a worker, µs")
    table.add_column("movement", no_wrap=True)
    for heading in ("by hand", "apply", "ratio", "overhead", "module", "agreement"):
        table.add_column(heading, justify="right")
    for name, (bare, apply, module, bare_busy, apply_busy, _) in rows:
        table.add_row(
            name,
            f"{bare:.0f}",
            f"{apply:.0f}",
            f"{apply / bare:.2f}",
            f"{apply_busy - bare_busy:.0f}",
            f"{module:.0f}",
            f"{module - apply:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kib", type=int, nargs="+", default=[1, 64, 1024, 16384])
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    for workers in options.workers:
        for kib in options.kib:
            rounds = options.rounds if kib <= 1024 else max(5, options.rounds // 5)
            rows = tessel.launch(measure, workers, kib, rounds)[0]
            Console().print(report(workers, kib, rows))


if __name__ == "__main__":
    main()
