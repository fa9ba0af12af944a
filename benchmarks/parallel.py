"""Parallel layers against DTensor's tensor parallelism and against torch in one process.

Two models, forward and backward: a pair of linear layers, 4096 → 16384 → 4096 with a GELU between,
whose first layer is split in columns and whose second in rows; and a head of 100,000 classes with
its cross entropy. In each round of one run, in turn: Tessel on P workers of one thread; the same
workers with torch's ColwiseParallel, RowwiseParallel and loss_parallel; one process with as many
threads as there are workers, if there are cores for them, and with one, while the other workers
wait. All have the same weights, and the run begins with a check that they compute the same.

The slowest worker counts in each round. Times are medians over the rounds, with the 5th percentile
behind; ratios are medians of the rounds' ratios. The allocator keeps what is freed.

Memory is the peak of a process's resident memory in two steps beyond what it had before its layers
were made: weights, gradients, activations and messages. It is measured in fresh processes, which
have trained a tiny model before; the allocator gives back what is larger than 4 MiB.

The overhead is that of layers so small that nothing else counts: what a call takes forward beyond
torch's own function in the same process, in microseconds.

    python benchmarks/parallel.py [--workers 2 4] [--rounds 10] [--pair 4096 16384 16]
                                  [--head 512 100000 64]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import resident
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from allocator import GIVE_BACK, KEEP, start_again_with
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import tessel
from tessel.machine import usable_cores
from tessel.nn import ParallelCrossEntropyLoss, ParallelLinear
from tessel.testing import WorkerPool

PEERS = {
    "tessel": "Tessel",
    "dtensor": "DTensor",
    "threads": "torch, threads",
    "alone": "torch, 1 thread",
}
PARTS = ("forward", "backward", "both")
Times = dict[str, list[dict[str, float]]]  # of each peer, the milliseconds of the parts by round


@dataclass(frozen=True)
class Case:
    """A model and its input: a pair of layers, or a head with its loss."""

    name: str  # "pair" or "head"
    features: int
    inner: int  # features between the layers, or classes
    batch: int

    def __str__(self) -> str:
        if self.name == "pair":
            return f"{self.features} → {self.inner} → {self.features}, batch {self.batch}"
        return f"head {self.features} → {self.inner} with loss, batch {self.batch}"


TINY = {"pair": Case("pair", 16, 32, 4), "head": Case("head", 16, 32, 4)}


# --- the peers


@dataclass(frozen=True)
class Peer:
    """Layers, their input, and how a loss is made of them."""

    layers: nn.Module
    x: Tensor
    loss: Callable[[], Tensor]
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def step(self) -> dict[str, float]:
        """Milliseconds forward and backward, until the loss and the input's gradient are there."""
        self.layers.zero_grad()
        self.x.grad = None
        begin = time.perf_counter()
        with self.around():
            loss = self.loss()
            number(loss)
            middle = time.perf_counter()
            loss.backward()
        number(self.x.grad)
        end = time.perf_counter()
        spans = (middle - begin, end - middle, end - begin)
        return {part: 1e3 * span for part, span in zip(PARTS, spans, strict=True)}

    def outcome(self) -> tuple[float, Tensor]:
        """The loss, and the gradient of the input."""
        self.step()
        assert self.x.grad is not None
        with self.around():
            return number(self.loss().detach()), self.x.grad.clone()


def number(x: Tensor | None) -> float:
    """One element, for which all that is under way is waited for."""
    assert x is not None
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.flatten()[0].item()


def layers_of(case: Case, column: Callable[..., nn.Module], row: Callable[..., nn.Module]):
    torch.manual_seed(0)  # the same values for all peers
    first = column(case.features, case.inner)
    if case.name == "head":
        return nn.Sequential(first)
    return nn.Sequential(first, nn.GELU(), row(case.inner, case.features))


def given(case: Case) -> tuple[Tensor, Tensor]:
    """The input and the classes, the same on all workers."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(case.batch, case.features, generator=draw)
    return x.requires_grad_(), torch.randint(case.inner, (case.batch,), generator=draw)


def peer(case: Case, layers: nn.Module, measure: Callable[..., Tensor], around=nullcontext) -> Peer:
    x, target = given(case)
    if case.name == "head":
        return Peer(layers, x, lambda: measure(layers(x), target), around)
    return Peer(layers, x, lambda: layers(x).square().mean())


def by_torch(case: Case) -> Peer:
    return peer(case, layers_of(case, nn.Linear, nn.Linear), F.cross_entropy)


def by_tessel(case: Case) -> Peer:
    def column(*sizes: int) -> nn.Module:
        return ParallelLinear(*sizes, dim=-1)

    def row(*sizes: int) -> nn.Module:
        return ParallelLinear(*sizes, dim=0)

    return peer(case, layers_of(case, column, row), ParallelCrossEntropyLoss())


def by_dtensor(case: Case, like: Peer | None = None) -> Peer:
    """The layers as the documentation of torch makes them, with the shards of another peer."""
    mesh = init_device_mesh("cpu", (tessel.world().size,))
    with torch.device("meta"):
        layers = layers_of(case, nn.Linear, nn.Linear)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if case.name == "head":
        plan = {"0": ColwiseParallel(use_local_output=False)}
    layers = parallelize_module(layers, mesh, plan).to_empty(device="cpu")
    shards = [each.to_local() for each in layers.parameters()]
    with torch.no_grad():
        for shard in shards:
            shard.fill_(0.01)
        for shard, other in zip(shards, like.layers.parameters() if like else (), strict=False):
            shard.copy_(other)
    return peer(case, layers, F.cross_entropy, loss_parallel)


# --- time


def check(peers: dict[str, Peer]) -> None:
    """All give the same loss, and the same gradient of the input."""
    found = {name: each.outcome() for name, each in peers.items()}
    expected, gradient = found["tessel"]
    most = gradient.abs().max().item()
    for name, (loss, other) in found.items():
        assert abs(loss / expected - 1) < 1e-4, f"{name} computes a loss of {loss}, not {expected}"
        torch.testing.assert_close(other, gradient, rtol=1e-3, atol=1e-4 * most)


def measure(case: Case, rounds: int) -> Times:
    """The milliseconds of every peer, in turn, of the slowest worker."""
    mine = by_tessel(case)
    peers = {"tessel": mine, "dtensor": by_dtensor(case, mine)}
    threads = min(dist.get_world_size(), usable_cores())
    if dist.get_rank() == 0:
        peers |= dict.fromkeys(("threads", "alone"), by_torch(case))
    check(peers)
    times: Times = {name: [] for name in PEERS}
    order = list(PEERS)
    for _ in range(rounds + 1):
        for name in order:
            torch.set_num_threads(threads if name == "threads" else 1)
            dist.barrier()
            if name in peers:
                times[name].append(peers[name].step())
        order = order[1:] + order[:1]
    everyones = tessel.world().group.share_objects(times)
    return {name: [slowest(each) for each in of_rounds(everyones, name)] for name in PEERS}


def of_rounds(everyones: Sequence[Times], name: str) -> list[tuple[dict[str, float], ...]]:
    """For each round but the first the times of all workers that took part."""
    return list(zip(*(each[name] for each in everyones if each[name]), strict=True))[1:]


def slowest(workers: Sequence[dict[str, float]]) -> dict[str, float]:
    return {part: max(each[part] for each in workers) for part in PARTS}


def times_table(results: dict[tuple[Case, int], Times]) -> Table:
    table = Table("model", title="milliseconds, and how many times faster Tessel is")
    peers = {name: title for name, title in PEERS.items() if name != "tessel"}
    others = (heading for title in peers.values() for heading in (title, "ratio"))
    for heading in ("P", "", "Tessel", *others):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for (case, workers), times in results.items():
        for part in PARTS:
            mine = [each[part] for each in times["tessel"]]
            cells = [str(case), str(workers)] if part == PARTS[0] else ["", ""]
            cells += [part, summary(mine)]
            for name in peers:
                other = [each[part] for each in times[name]]
                ratio = statistics.median(b / a for a, b in zip(mine, other, strict=True))
                cells += [summary(other), f"{ratio:.2f}"]
            table.add_row(*cells)
        table.add_section()
    return table


def summary(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} ({low(times):.1f})"


def low(times: Sequence[float]) -> float:
    """The 5th percentile."""
    return float(torch.tensor(times, dtype=torch.float64).quantile(0.05))


# --- memory

MAKERS = {"tessel": by_tessel, "dtensor": by_dtensor, "alone": by_torch}


def peak_of(case: Case, name: str) -> int:
    """The peak of this process's resident memory in two steps, beyond that before the layers."""
    MAKERS[name](TINY[case.name]).step()
    before = resident.resident()
    made = MAKERS[name](case)  # the whole weights, from which shards are taken, are gone then
    resident.forget_peak()
    for _ in range(2):
        made.step()
    return resident.peak() - before


def peak(case: Case, name: str, workers: int) -> int:
    """The largest peak of all workers, in fresh processes."""
    with WorkerPool(threads=1, timeout=200) as pool:
        return max(pool.run(peak_of, case, name, nprocs=workers))


def print_peaks(cases: Sequence[Case], counts: Sequence[int]) -> None:
    """For each case that of one process, and those of Tessel and DTensor on so many workers."""
    ways = [("alone", 1), *((name, n) for n in counts for name in ("tessel", "dtensor"))]
    print(json.dumps([[peak(case, *way) for way in ways] for case in cases]))


def all_peaks() -> list[list[int]]:
    """What this script prints of memory in a process of its own, with another allocator."""
    done = subprocess.run(
        [sys.executable, *sys.argv, "--only-memory"],
        env={key: value for key, value in os.environ.items() if key not in KEEP} | GIVE_BACK,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=600,
    )
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory_table(cases: Sequence[Case], counts: Sequence[int]) -> Table:
    table = Table(
        "model", title="peak memory of a worker, MiB, and how many times more others take"
    )
    for heading in ("P", "Tessel", "DTensor", "ratio", "torch, 1 process", "ratio"):
        table.add_column(heading, justify="right")
    for case, (alone, *spread) in zip(cases, all_peaks(), strict=True):
        for workers, mine, other in zip(counts, spread[::2], spread[1::2], strict=True):
            cells = [str(case), str(workers), f"{mine / 2**20:.0f}"]
            for each in (other, alone):
                cells += [f"{each / 2**20:.0f}", f"{each / mine:.2f}"]
            table.add_row(*cells)
    return table


# --- overhead

Ways = dict[str, Callable[[], Tensor]]


def tiny_layers() -> dict[str, Ways]:
    """For each layer three ways to call it, on shards of 8 features or classes a worker."""
    workers = tessel.world().size
    mesh = init_device_mesh("cpu", (workers,))
    x, target = torch.randn(2, 8), torch.tensor([1, 3])
    plain, wide, high = nn.Linear(8, 8), (8, 8 * workers), (8 * workers, 8)
    column, row = ParallelLinear(*wide, dim=-1), ParallelLinear(*high, dim=0)
    loss, logits = ParallelCrossEntropyLoss(), column(x).detach()
    columns = parallelize_module(nn.Linear(*wide), mesh, ColwiseParallel())
    rows = parallelize_module(nn.Linear(*high), mesh, RowwiseParallel())
    shards = parallelize_module(nn.Linear(*wide), mesh, ColwiseParallel(use_local_output=False))
    spread = shards(x).detach()

    def loss_of_dtensor() -> Tensor:
        with loss_parallel():
            return F.cross_entropy(spread, target)

    def linear() -> Tensor:
        return F.linear(x, plain.weight, plain.bias)

    return {
        "linear, column": {
            "torch": linear,
            "tessel": lambda: column(x),
            "dtensor": lambda: columns(x),
        },
        "linear, row": {
            "torch": linear,
            "tessel": lambda: row(logits),
            "dtensor": lambda: rows(x),
        },
        "cross entropy": {
            "torch": lambda: F.cross_entropy(x, target),
            "tessel": lambda: loss(logits, target),
            "dtensor": loss_of_dtensor,
        },
    }


def overheads(rounds: int) -> dict[str, dict[str, list[float]]]:
    """The microseconds of each call, in turn, the mean over the workers by round."""
    found: dict[str, dict[str, list[float]]] = {}
    group = tessel.world().group
    for layer, ways in tiny_layers().items():
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 10):
            for name, way in ways.items():
                dist.barrier()
                begin = time.perf_counter()
                number(way())
                times[name].append(1e6 * (time.perf_counter() - begin))
        found[layer] = {
            name: (group.sum(torch.tensor(each[10:])) / group.size).tolist()
            for name, each in times.items()
        }
    return found


def overhead_table(results: dict[int, dict[str, dict[str, list[float]]]]) -> Table:
    table = Table("layer", title="a call forward, µs, and beyond torch's own function")
    for heading in ("P", "torch", "Tessel", "beyond", "DTensor", "beyond", "ratio"):
        table.add_column(heading, justify="right")
    for workers, layers in results.items():
        for layer, times in layers.items():
            own, mine, other = (statistics.median(times[n]) for n in ("torch", "tessel", "dtensor"))
            cells = [layer, str(workers), summary(times["torch"])]
            cells += [summary(times["tessel"]), f"{mine - own:.0f}"]
            cells += [summary(times["dtensor"]), f"{other - own:.0f}", f"{other / mine:.2f}"]
            table.add_row(*cells)
        table.add_section()
    return table


# --- all of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=10)
    sizes = {"nargs": 3, "type": int}
    parser.add_argument(
        "--pair", **sizes, default=[4096, 16384, 16], metavar=("WIDTH", "INNER", "BATCH")
    )
    parser.add_argument(
        "--head", **sizes, default=[512, 100_000, 64], metavar=("FEATURES", "CLASSES", "BATCH")
    )
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [Case("pair", *options.pair), Case("head", *options.head)]
    if options.only_memory:
        print_peaks(cases, options.workers)
        return
    start_again_with(KEEP)
    times: dict[tuple[Case, int], Times] = {}
    calls = {}
    with WorkerPool(threads=1, timeout=300) as pool:
        todo = [(case, workers) for workers in options.workers for case in cases]
        for case, workers in track(todo, "time"):
            times[case, workers] = pool.run(measure, case, options.rounds, nprocs=workers)[0]
        for workers in track(options.workers, "overhead"):
            calls[workers] = pool.run(overheads, 20 * options.rounds, nprocs=workers)[0]
    console = Console(width=150)
    console.print(times_table(times))
    console.print(memory_table(cases, options.workers))
    console.print(overhead_table(calls))


if __name__ == "__main__":
    main()
