"""Training steps of converted models on two workers against one process, one thread each.

A step is forward, backward and SGD, of a ResNet-18 and of a 3-D U-Net. "nothing exchanged" are two
processes that train torch's own model on a half each, at the same time, and exchange nothing: what
the machine gives at best. Before it is timed a converted model is compared with torch's own on a
small input: its output and all gradients.

Memory is the peak of a process's resident memory (parameters, gradients, momentum, activations,
messages) beyond what it had before the model was made, in fresh processes that have trained on a
tiny input before, so that what torch loads is not counted; of several workers, that of the largest.
The allocator gives back all that is larger than 4 MiB; by default glibc keeps what is smaller than
the largest block that was ever freed, up to 32 MiB, which the smaller tensors of several workers
are and those of one process are not. "tensors" are the bytes of tensors alone that are alive at
once. Parameters, gradients and momentum are whole on each worker.

    python benchmarks/training.py [--rounds 3] [--large] [--quick] [--only TEXT]

With --large inputs are larger (times on 8 images of 640² and a volume of 128³), memory is measured
of the ResNet as well (on 8 images of 1024²), and tensors and the bytes that a worker sends in a
step are counted; it takes half an hour.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import resident
import torch
from harness.claim import Case, Claim, Settings, is_timed
from harness.command import parser, run
from harness.contenders import Counted, InOneProcess, OnWorkers
from torch import Tensor, nn
from values import check_close

import tessel
from tessel.testing import count_memory, count_traffic

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "common"))
import models  # (the same models as in the tests)

ALONE, APART = "torch, 1 process", "nothing exchanged"
MODELS = {"ResNet18": (64, 1000), "UNet": (3, 16)}  # and their arguments


def partition(settings: Settings) -> tessel.Partition:
    """All workers on the grid of a case, or in slabs along the first dimension of space."""
    world, shape = tessel.world(), settings["shape"]
    slabs = [1, 1, world.size, *[1] * (len(shape) - 3)]
    grid = settings.get("grid", slabs) if world.size > 1 else slabs
    return world.create_cartesian_topology_partition(grid)


def plain(settings: Settings) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = getattr(models, settings["model"])(*MODELS[settings["model"]])
    return made


def converted(settings: Settings) -> nn.Module:
    """Over all workers; in a world of one it stays torch's own."""
    if tessel.world().size == 1:
        return plain(settings)
    return tessel.nn.distribute_module(plain(settings), partition(settings))


def tiny(settings: Settings) -> Settings:
    shape = settings["shape"]
    return {**settings, "shape": [2, shape[1], *[32] * (len(shape) - 2)]}


def check(settings: Settings) -> None:
    """Output and gradients are those of torch's own model, in double precision."""
    shape = tiny(settings)["shape"]
    layout = tessel.Layout.balanced(partition(settings), shape)
    alone, spread = plain(settings).double(), converted(settings).double()
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, found = alone(x), spread(layout.local_part(x))
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weights).sum().backward()
    if expected.dim() == len(shape):  # the output lies in parts
        where = layout.resized(expected.shape)
        expected, weights = where.local_part(expected), where.local_part(weights)
    else:  # classes, of the samples of this worker
        samples = layout.local_slice()[0]
        expected, weights = expected[samples], weights[samples]
    (found * weights).sum().backward()
    check_close("the output", found, expected, 1e-10)
    check_close("the gradient", gradient(spread), gradient(alone), 1e-10)


def gradient(model: nn.Module) -> Tensor:
    """Those of all parameters, as one vector."""
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def training(model: nn.Module, settings: Settings) -> Callable[[], object]:
    """A step on this worker's part of a batch."""
    shape = settings["shape"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(tessel.Layout.balanced(partition(settings), shape).local_shape)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def by_tessel(settings: Settings) -> Callable[[], object]:
    check(settings)
    return training(converted(settings), settings)


def by_torch(settings: Settings) -> Callable[[], object]:
    """Each worker trains a model of its own on its part; one process on all."""
    return training(plain(settings), settings)


def peak_of(settings: Settings) -> int:
    """The peak of this process's resident memory in two steps, beyond that before the model."""
    training(converted(settings), tiny(settings))()
    resident.forget_peak()
    before = resident.resident()
    two_steps(settings)
    return resident.peak() - before


def tensors_of(settings: Settings) -> int:
    """The most bytes of tensors that are alive at once in two steps, the model's own included."""
    with count_memory() as memory:
        two_steps(settings)
    return memory.peak


def two_steps(settings: Settings) -> None:
    step = training(converted(settings), settings)
    step()
    step()


def sent_of(settings: Settings) -> int:
    """The bytes that this worker sends in a step."""
    step = training(converted(settings), settings)
    with count_traffic() as traffic:
        step()
    return traffic.bytes_sent


def counts(function: str) -> Callable[[Case], bool]:
    return lambda case: case.settings.get("counted") == function


def named(model: str, shape: list[int]) -> str:
    return f"{model} {'×'.join(map(str, shape))}"


def timed_case(model: str, shape: list[int]) -> Case:
    settings = {"model": model, "shape": shape}
    name = f"{named(model, shape)}, 2 workers"
    return Case(name, 2, settings, aims={ALONE: 1 / 1.8})


def counted_case(what: str, function: str, model: str, shape: list[int], workers: int) -> Case:
    settings = {"model": model, "shape": shape, "counted": function}
    return Case.counted(f"{what}: {named(model, shape)}, {workers} workers", workers, settings)


def cases(large: bool) -> list[Case]:
    timed = {"ResNet18": [4, 3, 512, 512], "UNet": [1, 1, 96, 96, 96]}
    held = {"UNet": timed["UNet"]}
    if large:
        timed = {"ResNet18": [8, 3, 640, 640], "UNet": [1, 1, 128, 128, 128]}
        held = {"ResNet18": [8, 3, 1024, 1024], "UNet": [1, 1, 128, 128, 128]}
    counted = [("memory", "peak_of", 4)]
    if large:
        counted += [("tensors", "tensors_of", 4), ("sent in a step", "sent_of", 2)]
    return [
        *(timed_case(*each) for each in timed.items()),
        *(counted_case(w, f, *each, n) for w, f, n in counted for each in held.items()),
    ]


def claim(large: bool) -> Claim:
    return Claim(
        "training",
        "training steps of converted models on 2 workers against 1 process, one thread each",
        cases(large),
        [
            OnWorkers("Tessel", by_tessel, split=True, covers=is_timed),
            InOneProcess(ALONE, by_torch, threads=1, covers=is_timed),
            OnWorkers(APART, by_torch, covers=is_timed),
            Counted("Tessel", "training", "peak_of", covers=counts("peak_of")),
            Counted(ALONE, "training", "peak_of", covers=counts("peak_of"), workers=1),
            Counted("Tessel", "training", "tensors_of", covers=counts("tensors_of")),
            Counted(ALONE, "training", "tensors_of", covers=counts("tensors_of"), workers=1),
            Counted("Tessel", "training", "sent_of", covers=counts("sent_of")),
        ],
        rounds=3,
        note="""float32, SGD with momentum. The speed-up is one over the ratio; that over "nothing
        exchanged" is what exchanges cost. Memory is that of the largest worker; parameters,
        gradients and momentum are whole on each.""",
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--large", action="store_true", help="larger inputs, more is counted")
    chosen = options.parse_args()
    raise SystemExit(run(claim(chosen.large), chosen))


if __name__ == "__main__":
    main()
