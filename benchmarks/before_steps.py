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

MODELS = {"ResNet18": (64, 1000), "UNet": (3, 16)}  # and their arguments
Step = Callable[[], object]


def setup(settings: dict[str, Any], alone: bool) -> Step:
    """A training step on this worker's part; or, `alone`, of torch's own model."""
    torch.manual_seed(0)
    model = getattr(models, settings["model"])(*MODELS[settings["model"]])
    shape = settings["shape"]
    world = tessel.world()
    axes = [1, 1, world.size, *[1] * (len(shape) - 3)]
    P = world.create_cartesian_topology_partition(axes)
    if not alone:
        model = tessel.nn.distribute_module(model, P)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(tessel.Layout.balanced(P, shape).local_shape)

    def step() -> object:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


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
