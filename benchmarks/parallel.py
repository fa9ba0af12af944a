"""Parallel layers against DTensor's tensor parallelism, torchshard and torch in one process.

Two models, forward and backward: a pair of linear layers, 4096 → 16384 → 4096 with a GELU between,
whose first layer is split in columns and whose second in rows; and a head of 100,000 classes with
its cross entropy. DTensor has ColwiseParallel, RowwiseParallel and loss_parallel, as the pages of
torch make them; torchshard its ParallelLinear and ParallelCrossEntropyLoss, with the mark that it
needs after a GELU. A step ends when the loss and the input's gradient are there. All three work in
turn in the same processes and on the same weights: the same step can take several times as long in
another process, whoever makes it, most likely for where its weights lie in memory. The loss and the
gradient of the input of each are compared with those of torch in one process first.

Memory is the peak of a process's resident memory in two steps beyond what it had before its layers
were made: weights, gradients, activations and messages. It is measured in fresh processes, which
have trained a tiny model before; the allocator gives back what is larger than 4 MiB.

With --all memory is measured on 4 workers as well, and that of the classes with a batch of 64, and
"a call" of layers, forward, that are so small that nothing else counts.

    benchmarks/setup_peers.sh    # once
    python benchmarks/parallel.py [--rounds 4] [--all] [--quick] [--only TEXT] [--without-peers]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import resident
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from harness.claim import Case, Claim, Settings, is_counted, is_timed
from harness.command import parser, run
from harness.contenders import BUILD, Counted, InOneProcess, OnWorkers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from values import check_close

import tessel
from tessel.nn import ParallelCrossEntropyLoss, ParallelLinear

DTENSOR, SHARD = "DTensor", "torchshard"
THREADS = "torch, P threads"
PAIR = {"model": "pair", "features": 4096, "inner": 16384, "batch": 16}
HEAD = {"model": "head", "features": 512, "inner": 100_000, "batch": 64}
MODELS = {
    "4096 → 16384 → 4096, batch 16": PAIR,
    "100,000 classes with loss, batch 64": HEAD,
}
MEMORY_MODELS = {**MODELS, "100,000 classes with loss, batch 512": {**HEAD, "batch": 512}}
TINY = {"features": 16, "inner": 32, "batch": 4}
Around = Callable[[], AbstractContextManager[object]]
Key = tuple[tuple[str, Any], ...]


# --- the models


@dataclass(frozen=True)
class Model:
    """Layers, their input, and how a loss is made of them."""

    layers: nn.Module
    x: Tensor
    loss: Callable[[], Tensor]
    around: Around = nullcontext

    def step(self) -> float:
        """Forward and backward, until the loss and the input's gradient are there."""
        self.x.grad = None
        with self.around():
            loss = self.loss()
            loss.backward()
        number(self.x.grad)
        self.layers.zero_grad()  # now: who comes next finds this memory
        return number(loss)

    def check(self, settings: Settings) -> None:
        """The loss and the gradient of the input are those of torch, on the first worker."""
        loss = self.step()
        if tessel.world().rank == 0:
            alone = by_torch(settings)
            expected = alone.step()
            assert abs(loss / expected - 1) < 1e-5, f"a loss of {loss}, not {expected}"
            assert self.x.grad is not None and alone.x.grad is not None
            check_close("the input's gradient", self.x.grad, alone.x.grad, 1e-4)


def number(x: Tensor | None) -> float:
    """One element, for which all that is under way is waited for."""
    assert x is not None
    local = x.to_local() if isinstance(x, DTensor) else x
    return float(local.detach().flatten()[0].item())


def layers_of(
    settings: Settings,
    column: Callable[..., nn.Module],
    row: Callable[..., nn.Module],
    between: tuple[nn.Module, ...] = (),
) -> nn.Sequential:
    torch.manual_seed(0)  # the same values for all
    features, inner = settings["features"], settings["inner"]
    first = column(features, inner)
    if settings["model"] == "head":
        return nn.Sequential(first)
    return nn.Sequential(first, nn.GELU(), *between, row(inner, features))


def model_of(
    settings: Settings,
    layers: nn.Module,
    cross_entropy: Callable[..., Tensor],
    around: Around = nullcontext,
) -> Model:
    """With an input and classes that are the same on all workers."""
    draw = torch.Generator().manual_seed(1)
    batch, features, inner = (settings[name] for name in ("batch", "features", "inner"))
    x = torch.randn(batch, features, generator=draw).requires_grad_()
    target = torch.randint(inner, (batch,), generator=draw)
    if settings["model"] == "head":
        return Model(layers, x, lambda: cross_entropy(layers(x), target), around)
    return Model(layers, x, lambda: layers(x).square().mean())


def by_torch(settings: Settings) -> Model:
    return model_of(settings, layers_of(settings, nn.Linear, nn.Linear), F.cross_entropy)


@lru_cache(maxsize=1)
def tessel_layers(settings: Key) -> nn.Sequential:
    """Tessel's layers, in whose memory the weights of the peers lie, too."""
    return layers_of(
        dict(settings),
        lambda *sizes: ParallelLinear(*sizes, dim=-1),
        lambda *sizes: ParallelLinear(*sizes, dim=0),
    )


def shards(settings: Settings) -> list[Tensor]:
    """The weights of this worker, without Tessel's mark."""
    layers = tessel_layers(tuple(settings.items()))
    return [each.detach().as_subclass(Tensor) for each in layers.parameters()]


def by_tessel(settings: Settings) -> Model:
    layers = tessel_layers(tuple(settings.items()))
    return model_of(settings, layers, ParallelCrossEntropyLoss())


def by_torchshard(settings: Settings, has_own: bool = False) -> Model:
    """With Tessel's weights, or its own."""
    shard = torchshard()
    layers = layers_of(
        settings,
        lambda *sizes: shard.nn.ParallelLinear(*sizes, dim=-1),
        lambda *sizes: shard.nn.ParallelLinear(*sizes, dim=0),
        between=(shard.nn.RegisterParallelDim(-1),),  # GELU gives a tensor without the mark
    )
    if not has_own:
        for each, mine in zip(layers.parameters(), shards(settings), strict=True):
            each.data = mine
    return model_of(settings, layers, shard.nn.ParallelCrossEntropyLoss())


def by_dtensor(settings: Settings) -> Model:
    mesh = init_device_mesh("cpu", (tessel.world().size,))
    with torch.device("meta"):
        layers = layers_of(settings, nn.Linear, nn.Linear)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if settings["model"] == "head":
        plan = {"0": ColwiseParallel(use_local_output=False)}
    layers = parallelize_module(layers, mesh, plan)
    mine = iter(shards(settings))
    for module in layers:
        for name, each in list(module.named_parameters()):
            local = DTensor.from_local(next(mine), mesh, each.placements, run_check=False)
            module.register_parameter(name, nn.Parameter(local))
    return model_of(settings, layers, F.cross_entropy, loss_parallel)


def torchshard() -> Any:
    """The library, from its own environment but on this one's torch; its group is all workers."""
    packages = str(site_packages())
    if packages not in sys.path:
        sys.path.append(packages)  # at the end: only what is not found here comes from there
    library = import_module("torchshard")
    library.distributed.destroy_process_group()  # that of the case before; nothing else is ended
    library.distributed.init_process_group(group_size=dist.get_world_size())
    return library


def site_packages() -> Path:
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return BUILD / "peers" / "lib" / python / "site-packages"


class NeedsTorchshard:
    """A contender that `benchmarks/setup_peers.sh` has to install."""

    def missing(self) -> str | None:
        if (site_packages() / "torchshard").exists():
            return None
        return f"{SHARD} needs build/peers: run benchmarks/setup_peers.sh once"


class TorchshardOnWorkers(NeedsTorchshard, OnWorkers):
    pass


class TorchshardCounted(NeedsTorchshard, Counted):
    pass


# --- time


def checked(make: Callable[[Settings], Model], settings: Settings) -> Callable[[], object]:
    model = make(settings)
    model.check(settings)
    return model.step


def time_tessel(settings: Settings) -> Callable[[], object]:
    return checked(by_tessel, settings)


def time_dtensor(settings: Settings) -> Callable[[], object]:
    return checked(by_dtensor, settings)


def time_torchshard(settings: Settings) -> Callable[[], object]:
    return checked(by_torchshard, settings)


def time_torch(settings: Settings) -> Callable[[], object]:
    return by_torch(settings).step


# --- memory


def peak(make: Callable[[Settings], Model], settings: Settings) -> int:
    """The peak of this process's resident memory in two steps, beyond that before the layers."""
    make({**settings, **TINY}).step()
    before = resident.resident()
    made = make(settings)  # the whole weights, from which shards are taken, are gone then
    resident.forget_peak()
    for _ in range(2):
        made.step()
    return resident.peak() - before


def memory_of_tessel(settings: Settings) -> int:
    return peak(by_tessel, settings)


def memory_of_dtensor(settings: Settings) -> int:
    return peak(by_dtensor, settings)


def memory_of_torchshard(settings: Settings) -> int:
    return peak(partial(by_torchshard, has_own=True), settings)


# --- a call

COLUMN, ROW, LOSS = "column-parallel linear", "row-parallel linear", "parallel cross entropy"


def call(settings: Settings, column: Any, row: Any, loss: Any, shard: Any) -> Callable[[], object]:
    """A layer of 8 features or classes a worker; `shard` makes one of what `column` gives."""
    x, target = torch.randn(2, 8), torch.tensor([1, 3])
    logits = shard(column(x).detach())
    calls: dict[str, Callable[[], Tensor]] = {
        COLUMN: lambda: column(x),
        ROW: lambda: row(logits),
        LOSS: lambda: loss(logits, target),
    }
    chosen = calls[settings["call"]]
    return lambda: number(chosen())


def sizes_of_call() -> tuple[tuple[int, int], tuple[int, int]]:
    """Features in and out, of the layer in columns and of that in rows."""
    return (8, 8 * tessel.world().size), (8 * tessel.world().size, 8)


def same(x: Tensor) -> Tensor:
    return x


def call_tessel(settings: Settings) -> Callable[[], object]:
    wide, high = sizes_of_call()
    layers = ParallelLinear(*wide, dim=-1), ParallelLinear(*high, dim=0)
    return call(settings, *layers, ParallelCrossEntropyLoss(), same)


def call_torchshard(settings: Settings) -> Callable[[], object]:
    nn_of_shard, (wide, high) = torchshard().nn, sizes_of_call()
    parallel, mark = nn_of_shard.ParallelLinear, nn_of_shard.RegisterParallelDim(-1)
    layers = parallel(*wide, dim=-1), parallel(*high, dim=0)
    return call(settings, *layers, nn_of_shard.ParallelCrossEntropyLoss(), mark)


def call_dtensor(settings: Settings) -> Callable[[], object]:
    mesh, (wide, high) = init_device_mesh("cpu", (tessel.world().size,)), sizes_of_call()
    local = settings["call"] != LOSS
    column = parallelize_module(nn.Linear(*wide), mesh, ColwiseParallel(use_local_output=local))
    row = parallelize_module(nn.Linear(*high), mesh, RowwiseParallel())

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        with loss_parallel():
            return F.cross_entropy(logits, target)

    return call(settings, column, row, loss, same)


def call_torch(settings: Settings) -> Callable[[], object]:
    """What each worker computes, with nothing exchanged."""
    return call(settings, nn.Linear(8, 8), nn.Linear(8, 8), F.cross_entropy, same)


# --- all of them


def is_step(case: Case) -> bool:
    return is_timed(case) and not is_call(case)


def is_step_on_two(case: Case) -> bool:
    return is_step(case) and case.workers == 2


def is_call(case: Case) -> bool:
    return "call" in case.settings


def step_case(name: str, settings: Settings, workers: int) -> Case:
    aims = {DTENSOR: 1.0, SHARD: 1.0}
    return Case(f"{name}, {workers} workers", workers, settings, aims, seconds=0.7)


def memory_case(name: str, settings: Settings, workers: int) -> Case:
    aims = {DTENSOR: 1.0, SHARD: 1.0}
    return Case.counted(f"memory: {name}, {workers} workers", workers, settings, aims)


def call_case(name: str, workers: int) -> Case:
    return Case(f"a call: {name}, {workers} workers", workers, {"call": name}, calls=20)


def cases(every: bool) -> list[Case]:
    counts = (2, 4)
    memory_counts = counts if every else counts[:1]
    measured = {k: v for k, v in MEMORY_MODELS.items() if every or v is not HEAD}
    calls = [call_case(name, n) for n in counts for name in (COLUMN, ROW, LOSS)]
    return [
        *(step_case(*model, n) for n in counts for model in MODELS.items()),
        *(memory_case(*each, n) for n in memory_counts for each in measured.items()),
        *(calls if every else []),
    ]


def claim(every: bool) -> Claim:
    timed = OnWorkers("Tessel", time_tessel, split=True, covers=is_step)
    return Claim(
        "parallel",
        "a parallel pair of linear layers and a loss of 100,000 classes "
        "against DTensor and torchshard",
        cases(every),
        [
            timed,
            OnWorkers(DTENSOR, time_dtensor, covers=is_step, beside=timed),
            TorchshardOnWorkers(SHARD, time_torchshard, covers=is_step, beside=timed),
            InOneProcess(THREADS, time_torch, covers=is_step_on_two),
            OnWorkers("Tessel", call_tessel, covers=is_call),
            OnWorkers(DTENSOR, call_dtensor, covers=is_call),
            TorchshardOnWorkers(SHARD, call_torchshard, covers=is_call),
            OnWorkers("torch's own function", call_torch, covers=is_call),
            Counted("Tessel", "parallel", "memory_of_tessel", covers=is_counted),
            Counted(DTENSOR, "parallel", "memory_of_dtensor", covers=is_counted),
            TorchshardCounted(SHARD, "parallel", "memory_of_torchshard", covers=is_counted),
        ],
        rounds=3,
        note="""Forward and backward, float32. torchshard 0.1.0 runs on this torch as it is and is
        right here; it takes `weight` and `ignore_index` of a cross entropy without a word and
        computes without them, and what workers do not divide evenly it cannot split.""",
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--all", action="store_true", help="memory of 4 workers, and small calls")
    chosen = options.parse_args()
    raise SystemExit(run(claim(chosen.all), chosen))


if __name__ == "__main__":
    main()
