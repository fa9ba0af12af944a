"""What Tessel costs beyond torch itself in a world of one: layers, operators and models.

Both have the same parameters and get the same tensor, forward and backward. They take turns in one
process of one thread, so that both find the same memory and caches; their results and gradients are
compared first. Where there is a GPU, inputs are larger on it, as they are for its users, and a
sample is ten steps, after which the device is waited for; those of the CPU are measured there as
well, but keep a large GPU waiting for Python, also that of torch: what they say is only reported.

    python benchmarks/overhead.py [--rounds 8] [--quick] [--only TEXT]
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fno import PlainFNO
from harness.claim import Case, Claim, Settings
from harness.command import main
from harness.contenders import InOneProcess
from torch import Tensor, nn
from values import check_close

import tessel
from tessel.models import FNO

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "common"))
import models  # (the same models as in the tests)

TORCH = "torch"
AIM = 1.03
Function = Callable[[Tensor], Tensor]
Pair = tuple[Function, Function, tuple[int, ...]]  # of Tessel and of torch, the input's shape

C = 16
LAYERS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "Conv2d": ("Conv2d", (C, C, 3), {"padding": 1}),
    "Conv2d, stride 2": ("Conv2d", (C, C, 3), {"stride": 2, "padding": 1}),
    "ConvTranspose2d": ("ConvTranspose2d", (C, C, 2), {"stride": 2}),
    "MaxPool2d": ("MaxPool2d", (2,), {}),
    "AvgPool2d": ("AvgPool2d", (3, 2, 1), {}),
    "AdaptiveAvgPool2d": ("AdaptiveAvgPool2d", (1,), {}),
    "BatchNorm2d": ("BatchNorm2d", (C,), {}),
    "InstanceNorm2d": ("InstanceNorm2d", (C,), {"affine": True}),
    "GroupNorm": ("GroupNorm", (4, C), {}),
    "Upsample": ("Upsample", (), {"scale_factor": 2, "mode": "bilinear"}),
}


def grid(*sizes: int) -> tessel.Partition:
    return tessel.world().create_cartesian_topology_partition(sizes)


def layer(name: str, device: str, batch: int) -> Pair:
    kind, args, settings = LAYERS[name]
    alone = getattr(nn, kind)(*args, **settings)
    spread = getattr(tessel.nn, f"Distributed{kind}")(grid(1, 1, 1, 1), *args, **settings)
    spread.load_state_dict(alone.state_dict())
    return spread.to(device), alone.to(device), (batch, C, 512, 512)


def parallel_linear(device: str, batch: int) -> Pair:
    alone, spread = nn.Linear(2048, 2048), tessel.nn.ParallelLinear(2048, 2048, dim=-1)
    spread.load_state_dict(alone.state_dict())
    return spread.to(device), alone.to(device), (64 * batch, 2048)


def cross_entropy(device: str, batch: int) -> Pair:
    classes = torch.arange(64 * batch, device=device) * 3
    mark = tessel.nn.RegisterParallelDim(-1)
    loss = tessel.nn.ParallelCrossEntropyLoss()

    def spread(x: Tensor) -> Tensor:
        return loss(mark(x), classes)

    return spread, lambda x: F.cross_entropy(x, classes), (64 * batch, 20_000)


def fourier(_: str, batch: int) -> Pair:
    """A real transform in three dimensions."""
    n, c = 128 if batch == 1 else 256, torch.complex64
    along = (tessel.ParDFT(c, n), tessel.ParDFT(c, n), tessel.ParDFT(torch.float32, n))
    operator = tessel.distribute(tessel.kron(*along), [1, 1, 1])
    return lambda x: operator * x, torch.fft.rfftn, (n, n, n)


def matrix(device: str, batch: int) -> Pair:
    """A product along the middle of three dimensions."""
    f, n, m = torch.float32, 256, 64 if batch == 1 else 256
    product = tessel.kron(
        tessel.ParIdentity(f, m), tessel.ParMatrix(f, n, n), tessel.ParIdentity(f, m)
    )
    operator = tessel.distribute(product, [1, 1, 1])
    theta = tessel.init(operator, requires_grad=False).to(device)
    (weight,) = theta.values()

    def spread(x: Tensor) -> Tensor:
        return operator(theta) * x

    return spread, lambda x: torch.einsum("ij,ajb->aib", weight, x), (m, n, m)


def fourier_operator(device: str, batch: int) -> Pair:
    spread = FNO(grid(1, 1, 1, 1, 1), 1, 1, width=8, modes=8)
    return spread.to(device), PlainFNO(spread.state_dict(), 8).to(device), (batch, 1, 64, 64, 64)


def resnet(device: str, batch: int) -> Pair:
    alone = models.ResNet18(32, 10)
    spread = tessel.nn.distribute_module(copy.deepcopy(alone), grid(1, 1, 1, 1))
    return spread.to(device), alone.to(device), (batch, 3, 256, 256)


MAKERS: dict[str, Callable[[str, int], Pair]] = {
    **{f"layer {name}": partial(layer, name) for name in LAYERS},
    "layer ParallelLinear": parallel_linear,
    "loss of 20,000 classes": cross_entropy,
    "operator ParDFT": fourier,
    "operator ParMatrix": matrix,
    "model FNO": fourier_operator,
    "model ResNet18": resnet,
}


# --- both in one process


@dataclass
class Prepared:
    """The present case of this process."""

    settings: Settings | None = None
    steps: tuple[Callable[[], object], ...] = ()


_PREPARED = Prepared()


def prepared(settings: Settings) -> tuple[Callable[[], object], ...]:
    """The steps of Tessel and of torch, made once."""
    if settings != _PREPARED.settings:
        _PREPARED.steps = ()  # what they hold goes first
        _PREPARED.steps, _PREPARED.settings = steps(settings), settings
    return _PREPARED.steps


def steps(settings: Settings) -> tuple[Callable[[], object], ...]:
    torch.manual_seed(0)
    spread, alone, shape = MAKERS[settings["what"]](settings["device"], settings["batch"])
    x = torch.randn(shape, device=settings["device"]).requires_grad_()
    ours, theirs = outcome(spread, x), outcome(alone, x)
    check_close("the result", ours[0], theirs[0], 1e-4)
    check_close("the input's gradient", ours[1], theirs[1], 1e-4)
    return step(spread, x), step(alone, x)


def outcome(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of the input."""
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]


def step(function: Function, x: Tensor) -> Callable[[], object]:
    """Forward and backward, with no gradient left."""
    grad = torch.ones_like(function(x))
    held = [x, *(function.parameters() if isinstance(function, nn.Module) else ())]

    def once() -> None:
        function(x).backward(grad)
        for each in held:
            each.grad = None

    def ten_times() -> None:
        for _ in range(10):
            once()
        torch.cuda.synchronize()

    return ten_times if x.is_cuda else once


def by_tessel(settings: Settings) -> Callable[[], object]:
    return prepared(settings)[0]


def by_torch(settings: Settings) -> Callable[[], object]:
    return prepared(settings)[1]


def cases() -> list[Case]:
    places = [("cpu", 1)] + [("cuda", batch) for batch in (32, 1) if torch.cuda.is_available()]
    return [
        Case(
            f"{what}, {device}, batch {batch}",
            1,
            {"what": what, "device": device, "batch": batch},
            {TORCH: AIM if (device, batch) != ("cuda", 1) else None},
        )
        for device, batch in places
        for what in MAKERS
    ]


TESSEL = InOneProcess("Tessel", by_tessel, threads=1)
CLAIM = Claim(
    "overhead",
    "layers, operators and models in a world of one against torch itself",
    cases(),
    [TESSEL, InOneProcess(TORCH, by_torch, threads=1, beside=TESSEL)],
    rounds=8,
    note="""Forward and backward, float32, one thread. FNO in torch is written as it usually is. On
    a GPU a sample is ten steps, and a batch of 1 is about the time until kernels are started.""",
)

if __name__ == "__main__":
    main(CLAIM, __doc__)
