"""Plug-and-play reconstruction against deepinv.distributed and against deepinv in one process.

A picture of 1024 × 1024 in three colours, three blurs and a small DnCNN as denoiser. An iteration
is a step down the mean of the data fidelities, and the denoiser in patches. In each round of one
run, in turn: Tessel with the picture in parts and with the whole picture on every worker;
`deepinv.distributed` on the same workers; deepinv itself in one process with one thread, while the
other workers wait. All have the same blurs, measurements and weights, and the run begins with a
check that they compute the same; the denoiser of deepinv.distributed is another one near the
border, where it pads patches.

The slowest worker counts in each round. Times are medians over the rounds, with the 5th percentile
behind; ratios are medians of the rounds' ratios. The allocator keeps what is freed.

Bytes are those that a worker receives in an iteration, at most. Tessel's are counted; for the
others they are what the best algorithm for the collective receives: 2 (P - 1) / P of a tensor for
an all-reduce, the tensor for a broadcast.

Memory is the peak of a process's resident memory in two iterations beyond what it had before its
problem was made, in fresh processes that have solved a tiny problem before; the allocator gives
back what is larger than 4 MiB.

    python benchmarks/imaging.py [--workers 2 4] [--rounds 10] [--size 1024] [--patch 256]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import resident
import torch
import torch.distributed as dist
from allocator import GIVE_BACK, KEEP, start_again_with
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import tessel
from tessel.imaging import DistributedContext, FactoryConfig, TilingConfig, make_distrib_bundle
from tessel.testing import WorkerPool, count_traffic

PEERS = {
    "parts": "Tessel, parts",
    "whole": "Tessel, whole",
    "deepinv": "deepinv.distributed",
    "alone": "deepinv, 1 process",
}
GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}
DEPTH, WIDTH, SIGMA = 5, 16, 0.05
Times = dict[str, list[float]]  # of each peer, the milliseconds of an iteration by round


@dataclass(frozen=True)
class Case:
    """The side of the picture and of a patch."""

    size: int = 1024
    patch: int = 256


TINY = Case(64, 32)
_LIBRARIES: list[Any] = []


def import_deepinv() -> Any:
    """deepinv, also beside a torch for CPUs, where torchvision's CUDA builds lack two schemas."""
    if not hasattr(torch.ops.torchvision, "nms"):
        _LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _LIBRARIES[-1].define(f"{name}(Tensor dets, Tensor scores, float iou) -> Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepinv
    return deepinv


# --- the problem


def operators() -> list[Any]:
    deepinv = import_deepinv()
    blur = deepinv.physics.functional.blur.gaussian_blur
    kernels = [blur(sigma=(1.0, 1.0)), blur(sigma=(2.0, 2.0)), blur(sigma=(1.5, 3.0), angle=30)]
    return [deepinv.physics.Blur(filter=each, padding="circular") for each in kernels]


def denoiser() -> Any:
    """A small network with weights that make it no more than a little different from x."""
    torch.manual_seed(0)
    made = import_deepinv().models.DnCNN(3, 3, depth=DEPTH, nf=WIDTH, pretrained=None)
    with torch.no_grad():
        for each in made.parameters():
            each.mul_(0.5)
    return made.eval()


def picture(case: Case) -> Tensor:
    line = torch.linspace(-1, 1, case.size)
    rings = 0.5 + 0.5 * torch.cos(20 * (line[:, None] ** 2 + line[None, :] ** 2))
    return torch.stack([rings, rings.roll(case.size // 3, 0), 1 - rings])[None]


def measured(case: Case, blurs: Sequence[Any], i: int) -> Tensor:
    draw = torch.Generator().manual_seed(i)
    truth = picture(case)
    return blurs[i].A(truth) + 0.03 * torch.randn(truth.shape, generator=draw)


# --- the peers


@dataclass
class Peer:
    """An image, and what an iteration makes of it."""

    x: Tensor
    step: Callable[[Tensor], Tensor]
    whole: Callable[[Tensor], Tensor] = lambda x: x

    def iterate(self) -> float:
        """The milliseconds of an iteration."""
        begin = time.perf_counter()
        with torch.no_grad():
            self.x = self.step(self.x)
        return 1e3 * (time.perf_counter() - begin)


def by_tessel(case: Case, partition: tuple[int, int] | None) -> Peer:
    blurs = operators()
    deepinv = import_deepinv()
    ctx = DistributedContext(device_mode="cpu").__enter__()  # left with the process
    bundle = make_distrib_bundle(
        ctx,
        factory_config=FactoryConfig(
            physics=lambda i, device, shared: blurs[i],
            measurements=lambda i, device, shared: measured(case, blurs, i),
            data_fidelity=deepinv.optim.L2(),
            num_operators=len(blurs),
        ),
        signal_shape=(1, 3, case.size, case.size),
        prior=deepinv.optim.PnP(denoiser=denoiser()),
        tiling=TilingConfig(patch_size=case.patch, receptive_field_size=DEPTH),
        partition=partition,
    )
    fidelity, prior, signal = bundle.data_fidelity, bundle.prior, bundle.signal
    assert prior is not None

    def step(x: Tensor) -> Tensor:
        return prior.prox(x - fidelity.grad(x), sigma_denoiser=SIGMA)

    def whole(x: Tensor) -> Tensor:
        signal.update_(x)
        return signal.whole()

    return Peer(signal.data, step, whole)


def by_parts(case: Case) -> Peer:
    return by_tessel(case, GRIDS[tessel.world().size])


def by_whole(case: Case) -> Peer:
    return by_tessel(case, None)


def by_deepinv(case: Case) -> Peer:
    deepinv = import_deepinv()
    from deepinv.distributed import DistributedContext as TheirContext
    from deepinv.distributed import distribute

    blurs = operators()
    ctx = TheirContext(device_mode="cpu", cleanup=False).__enter__()
    physics = distribute(blurs, ctx, type_object="linear_physics")
    fidelity = distribute(deepinv.optim.L2(), ctx, num_operators=len(blurs))
    network = distribute(
        denoiser(),
        ctx,
        type_object="denoiser",
        tiling_dims=(-2, -1),
        patch_size=case.patch,
        overlap=DEPTH,
    )
    mine = ctx.local_indices(len(blurs))
    ys = [measured(case, blurs, i) if i in mine else torch.empty(0) for i in range(len(blurs))]

    def step(x: Tensor) -> Tensor:
        return network(x - fidelity.grad(x, ys, physics) / len(blurs), SIGMA)

    return Peer(torch.zeros_like(picture(case)), step)


def by_one(case: Case) -> Peer:
    blurs, network = operators(), denoiser()
    ys = [measured(case, blurs, i) for i in range(len(blurs))]

    def step(x: Tensor) -> Tensor:
        slope = sum(b.A_adjoint(b.A(x) - y) for b, y in zip(blurs, ys, strict=True))
        return network(x - slope / len(blurs), SIGMA)

    return Peer(torch.zeros_like(picture(case)), step)


MAKERS = {"parts": by_parts, "whole": by_whole, "deepinv": by_deepinv, "alone": by_one}


# --- time and bytes


def check(peers: dict[str, Peer], case: Case) -> None:
    """All make the same of a zero image, deepinv.distributed away from the border."""
    found = {}
    for name, each in peers.items():
        with torch.no_grad():
            found[name] = each.whole(each.step(torch.zeros_like(each.x)))
    torch.testing.assert_close(found["whole"], found["parts"], rtol=1e-4, atol=1e-5)
    inner = slice(2 * DEPTH, -2 * DEPTH)
    for name, other in found.items():
        ours, theirs = (x[..., inner, inner] for x in (found["parts"], other))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=f"{name} differs")


def measure(case: Case, rounds: int) -> tuple[Times, dict[str, int]]:
    """The milliseconds of every peer, in turn, of the slowest worker; the most bytes received."""
    torch.set_num_threads(1)
    peers = {name: MAKERS[name](case) for name in ("parts", "whole", "deepinv")}
    if dist.get_rank() == 0:
        peers["alone"] = by_one(case)
    check(peers, case)
    received = {name: bytes_of(name, peers[name]) for name in ("parts", "whole", "deepinv")}
    times: Times = {name: [] for name in PEERS}
    order = list(PEERS)
    for _ in range(rounds + 1):
        for name in order:
            dist.barrier()
            if name in peers:
                times[name].append(peers[name].iterate())
        order = order[1:] + order[:1]
    everyones = tessel.world().group.share_objects((times, received))
    slowest = {
        name: [max(each) for each in zip(*(t[name] for t, _ in everyones if t[name]), strict=True)]
        for name in PEERS
    }
    most = {name: max(r[name] for _, r in everyones) for name in received}
    return {name: each[1:] for name, each in slowest.items()}, most


def bytes_of(name: str, peer: Peer) -> int:
    """What this worker receives in an iteration."""
    if name == "deepinv":
        with count_collectives() as counted:
            peer.iterate()
        return sum(counted)
    with count_traffic() as traffic:
        peer.iterate()
    return traffic.bytes_received


@contextmanager
def count_collectives() -> Iterator[list[int]]:
    """The bytes that the calls of torch.distributed make a worker receive, at least."""
    counted: list[int] = []
    workers = dist.get_world_size()
    shares = {
        "all_reduce": lambda x: 2 * (workers - 1) * x.nbytes // workers,
        "broadcast": lambda x: x.nbytes,
    }
    kept = {name: getattr(dist, name) for name in shares}

    def counting(name: str) -> Callable[..., Any]:
        def call(x: Tensor, *args: Any, **settings: Any) -> Any:
            counted.append(shares[name](x))
            return kept[name](x, *args, **settings)

        return call

    for name in shares:
        setattr(dist, name, counting(name))
    try:
        yield counted
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def times_table(results: dict[int, tuple[Times, dict[str, int]]], case: Case) -> Table:
    title = f"{case.size} × {case.size} RGB, an iteration, ms; ratio: Tessel in parts to the other"
    table = Table("P", title=title)
    for name, heading in PEERS.items():
        table.add_column(heading, justify="right")
        if name != "parts":
            table.add_column("ratio", justify="right")
    for workers, (times, _) in results.items():
        cells = [str(workers)]
        for name in PEERS:
            cells.append(f"{statistics.median(times[name]):.0f} ({low(times[name]):.0f})")
            if name != "parts":
                pairs = zip(times["parts"], times[name], strict=True)
                cells.append(f"{statistics.median(a / b for a, b in pairs):.2f}")
        table.add_row(*cells)
    return table


def bytes_table(results: dict[int, tuple[Times, dict[str, int]]]) -> Table:
    table = Table("P", title="received by a worker in an iteration, at most, MB")
    for heading in ("Tessel, parts", "Tessel, whole", "ratio", "deepinv.distributed", "ratio"):
        table.add_column(heading, justify="right")
    for workers, (_, received) in results.items():
        mine = received["parts"]
        cells = [str(workers), f"{mine / 1e6:.2f}"]
        for name in ("whole", "deepinv"):
            cells += [f"{received[name] / 1e6:.2f}", f"{mine / received[name]:.3f}"]
        table.add_row(*cells)
    return table


def low(times: Sequence[float]) -> float:
    """The 5th percentile."""
    return float(torch.tensor(times, dtype=torch.float64).quantile(0.05))


# --- memory


def peak_of(case: Case, name: str) -> int:
    """The peak of this process's resident memory in two iterations, beyond that before."""
    torch.set_num_threads(1)
    tiny = replace(TINY, patch=min(TINY.patch, case.patch))
    MAKERS[name](tiny).iterate()
    before = resident.resident()
    peer = MAKERS[name](case)
    resident.forget_peak()
    for _ in range(2):
        peer.iterate()
    return resident.peak() - before


def peak(case: Case, name: str, workers: int) -> int:
    """The largest peak of all workers, in fresh processes."""
    with WorkerPool(threads=1, timeout=300) as pool:
        return max(pool.run(peak_of, case, name, nprocs=workers))


def print_peaks(case: Case, counts: Sequence[int]) -> None:
    """That of one process, and those of the others on so many workers."""
    spread = [[peak(case, name, n) for name in ("parts", "whole", "deepinv")] for n in counts]
    print(json.dumps([peak(case, "alone", 1), spread]))


def all_peaks() -> tuple[int, list[list[int]]]:
    """What this script prints of memory in a process of its own, with another allocator."""
    done = subprocess.run(
        [sys.executable, *sys.argv, "--only-memory"],
        env={key: value for key, value in os.environ.items() if key not in KEEP} | GIVE_BACK,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=1200,
    )
    alone, spread = json.loads(done.stdout.splitlines()[-1])
    return alone, spread


def memory_table(counts: Sequence[int]) -> Table:
    table = Table("P", title="peak memory of a worker, MiB; ratio: to one process")
    for heading in ("1 process", *(PEERS[name] for name in ("parts", "whole", "deepinv"))):
        table.add_column(heading, justify="right")
        if heading != "1 process":
            table.add_column("ratio", justify="right")
    alone, spread = all_peaks()
    for workers, peaks in zip(counts, spread, strict=True):
        cells = [str(workers), f"{alone / 2**20:.0f}"]
        for each in peaks:
            cells += [f"{each / 2**20:.0f}", f"{each / alone:.2f}"]
        table.add_row(*cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], choices=list(GRIDS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--size", type=int, default=Case.size)
    parser.add_argument("--patch", type=int, default=Case.patch)
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = Case(options.size, options.patch)
    if options.only_memory:
        print_peaks(case, options.workers)
        return
    start_again_with(KEEP)
    with WorkerPool(threads=1, timeout=600) as pool:
        results = {
            workers: pool.run(measure, case, options.rounds, nprocs=workers)[0]
            for workers in track(options.workers, "time")
        }
    console = Console(width=150)
    console.print(times_table(results, case))
    console.print(bytes_table(results))
    console.print(memory_table(options.workers))


if __name__ == "__main__":
    main()
