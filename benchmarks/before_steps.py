"""The side of a state of the library in benchmarks/before.py: it waits for commands, gives samples.

It is run by torchrun, on each worker, with the folder that holds a pipe for each, and uses
nothing that an older state of the library does not have.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tessel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "common"))
import models  # (the same models as in the tests)

Step = Callable[[], object]


def grid(*shape: int) -> tessel.Partition:
    return tessel.world().create_cartesian_topology_partition(shape)


def training(model: torch.nn.Module, x: torch.Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> object:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def model(name: str, shape: list[int], alone: bool, *arguments: int) -> Step:
    """A training step on this worker's part; or, `alone`, of torch's own model."""
    P = grid(1, 1, tessel.world().size, *[1] * (len(shape) - 3))
    made = getattr(models, name)(*arguments)
    if not alone:
        made = tessel.nn.distribute_module(made, P)
    return training(made, torch.randn(tessel.Layout.balanced(P, shape).local_shape))


def differentiated(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Step:
    """The layer, and its adjoint applied to the result."""
    x.requires_grad_()

    def step() -> object:
        y = layer(x)
        return torch.autograd.grad(y, x, y.detach())

    return step


def all_reduce(length: int) -> Step:
    return differentiated(tessel.nn.AllSumReduce(tessel.world(), [0]), torch.ones(length))


def repartition(shape: list[int]) -> Step:
    P, Q = grid(tessel.world().size, 1), grid(1, tessel.world().size)
    x = torch.ones(tessel.Layout.balanced(P, shape).local_shape)
    return differentiated(tessel.nn.Repartition(P, Q), x)


def halo(shape: list[int]) -> Step:
    P = grid(tessel.world().size, 1)
    x = torch.ones(tessel.Layout.balanced(P, shape).local_shape)
    return differentiated(tessel.nn.HaloExchange(P, [(1, 1), (0, 0)]), x)


def convolution(shape: list[int]) -> Step:
    P = grid(1, 1, tessel.world().size, 1)
    layer = tessel.nn.DistributedConv2d(P, shape[1], shape[1], 3, padding=1)
    return training(layer, torch.randn(tessel.Layout.balanced(P, shape).local_shape))


def transform(size: int) -> Step:
    axes = [tessel.ParDFT(torch.complex64, size) for _ in range(3)]
    F = tessel.distribute(tessel.kron(*axes), [tessel.world().size, 1, 1], "anywhere")
    layout = tessel.Layout.balanced(grid(tessel.world().size, 1, 1), [size] * 3)
    x = torch.ones(layout.local_shape, dtype=torch.complex64).reshape(-1)
    return lambda: F.H * (F * x)


def head(batch: int, features: int, classes: int) -> Step:
    """Two parallel layers and a loss whose classes are split."""
    column = tessel.nn.ParallelLinear(features, features, dim=-1)
    row = tessel.nn.ParallelLinear(features, features, dim=0)
    last = tessel.nn.ParallelLinear(features, classes, dim=-1)
    loss = tessel.nn.ParallelCrossEntropyLoss()
    x, labels = torch.ones(batch, features), torch.arange(batch) % classes

    def step() -> object:
        found = loss(last(row(torch.relu(column(x)))), labels)
        found.backward()
        return found

    return step


def fno(size: int) -> Step:
    P = grid(1, 1, tessel.world().size, 1, 1)
    x = torch.randn(tessel.Layout.balanced(P, [1, 1, size, size, size]).local_shape)
    return training(tessel.models.FNO(P, 1, 1, 8, 6, 2), x)


class Blur:
    """A mean over a window of an image, across its borders."""

    padding = "circular"

    def __init__(self, width: int) -> None:
        self.filter = torch.full((1, 1, width, width), width**-2.0)

    def A(self, x: torch.Tensor) -> torch.Tensor:
        edge = [self.filter.shape[-1] // 2] * 4
        window = self.filter.expand(x.shape[1], 1, -1, -1)
        padded = torch.nn.functional.pad(x, edge, mode="circular")
        return torch.nn.functional.conv2d(padded, window, groups=x.shape[1])

    A_adjoint = A  # windows are symmetric


def reconstruction(size: int) -> Step:
    """A plug-and-play iteration on an image in parts: four blurs, and a small denoiser."""
    from tessel.imaging import DistributedContext, FactoryConfig, TilingConfig, make_distrib_bundle

    shape, blurs = (1, 3, size, size), [Blur(width) for width in (3, 5, 7, 9)]
    pairs = (3, 16), (16, 16), (16, 3)
    layers = (torch.nn.Conv2d(m, n, 3, padding=1) for m, n in pairs)
    denoiser = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.ReLU())))
    y = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    context = DistributedContext().__enter__()  # for as long as this process measures
    bundle = make_distrib_bundle(
        context,
        factory_config=FactoryConfig(physics=blurs, measurements=[blur.A(y) for blur in blurs]),
        signal_shape=shape,
        prior=denoiser.requires_grad_(False),
        tiling=TilingConfig(patch_size=size // 4, receptive_field_size=4),
        partition=(tessel.world().size, 1),
    )

    def step() -> object:
        with torch.no_grad():
            x = bundle.signal.data
            return bundle.prior.prox(x - 0.5 * bundle.data_fidelity.grad(x))

    return step


STEPS: dict[str, Callable[..., Step]] = {
    each.__name__: each
    for each in (
        *(all_reduce, repartition, halo, convolution, transform, head, fno, reconstruction),
        model,
    )
}


def setup(settings: dict[str, Any], alone: bool) -> Step:
    torch.manual_seed(0)
    arguments = settings["arguments"]
    if settings["step"] == "model":
        name, shape, *rest = arguments
        return model(name, shape, alone, *rest)
    return STEPS[settings["step"]](*arguments)


def samples(step: Step, repeats: int, calls: int) -> list[float]:
    """The seconds of a call on the slowest worker."""
    group = tessel.world().group
    found = []
    for _ in range(repeats):
        group.share_words([0])  # begin together
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        found.append((time.perf_counter() - begin) / calls)
    return [max(each) for each in zip(*group.share_objects(found), strict=True)]


def serve(folder: Path, alone: bool) -> None:
    world = tessel.world()
    known: Any = None
    step: Step | None = None
    with (folder / str(world.rank)).open() as commands:
        for line in commands:
            if not line.strip():
                break
            asked = json.loads(line)
            if asked["settings"] != known:
                step = None  # what it holds is let go first
                step, known = setup(asked["settings"], alone), asked["settings"]
            assert step is not None
            found = samples(step, asked["repeats"], asked["calls"])
            if world.rank == 0:
                print(json.dumps({"samples": found, "parts": {}}), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), "alone" in sys.argv[2:])
