"""What a training step asks of a GPU, as benchmarks/launches.py counts it.

Tests `nn/convert.py`, `core/move.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import tessel
from tessel.nn import buckets

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # behind tests/common
import launches

import models

SECONDS = 200.0
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.limit(2 * SECONDS + 20.0),
]


def exchanges_of_a_step(kind: str, arguments: tuple[int, ...], num_dims: int) -> int:
    """One for each halo and each statistic in each direction, and one for each gradient bucket.

    On CPU workers: what a model exchanges does not depend on how large images are.
    """
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, *[1] * (num_dims - 1)])
    model = tessel.nn.distribute_module(getattr(models, kind)(*arguments), P)
    channels = next(each.shape[1] for each in model.parameters() if each.dim() > 1)
    layout = tessel.Layout.balanced(P, (2, channels, *[32] * num_dims))
    x = torch.ones(layout.local_shape)
    model(x).square().mean().backward()  # in which it learns its buckets
    once = 0
    for module in model.modules():
        kernel, stride = (getattr(module, each, 1) for each in ("kernel_size", "stride"))
        # a window that reads more than it steps over; those of this model's split dimension
        first, step = (each[0] if isinstance(each, tuple) else each for each in (kernel, stride))
        once += first > step
        once += isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    heads = sum(isinstance(each, torch.nn.AdaptiveAvgPool2d) for each in model.modules())
    schedule = buckets._schedule_of(model)
    assert schedule is not None
    # The gradient of the images themselves is not asked for. A head's mean is summed, and then told
    # to all, who each have a copy of its gradient.
    return 2 * once - 1 + 3 * heads + len(schedule.plan(list(model.parameters())))


@pytest.mark.parametrize("name", ["ResNet-18", "3-D U-Net"])
def test_a_step_of_a_model(name: str) -> None:
    (case,) = (each for each in launches.MODELS if each.startswith(name))
    kind, arguments, shape = launches.MODELS[case]
    described = kind, arguments, len(shape) - 2
    most_nccl, _ = tessel.launch(
        exchanges_of_a_step, 2, *described, timeout=SECONDS, backend="gloo"
    )
    found = [
        tessel.launch(
            launches.on_worker,
            workers,
            case,
            workers == 1,
            timeout=SECONDS,
            backend="cpu:gloo,cuda:nccl",
        )[0][0]
        for workers in (1, 2)
    ]
    alone, spread = found
    assert spread["waits"] == 0, found
    assert spread["NCCL"] <= most_nccl, found
    assert spread["launches"] <= 1.6 * alone["launches"], found
