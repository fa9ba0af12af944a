"""How many of torch's kernels a training step calls on two workers, beside one process.

A GPU takes as long to launch a small kernel as to run it, so what counts there is their number.
`tests/cuda/test_launches.py` counts launches; this counts, without a GPU, calls of torch's
operators that compute or copy.

Tests `nn/convert.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import models
import tessel

Run = Callable[..., list[Any]]
# what only looks at memory, or asks for it
VIEWS = set(
    """
    _local_scalar_dense _reshape_alias _unsafe_view alias as_strided broadcast_tensors chunk
    contiguous detach diagonal empty empty_like empty_strided expand expand_as flatten
    is_same_size item lift_fresh narrow new_empty numel permute reshape resize_ resolve_conj
    resolve_neg result_type select set_ size slice split split_with_sizes squeeze stride t
    to transpose unbind unfold unsqueeze view view_as
    """.split()  # noqa: SIM905
)


def kernels(step: Callable[[], object]) -> Counter[str]:
    """How often a step, or autograd for it, calls each operator of torch."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    found: Counter[str] = Counter()
    for event in recorded.events():
        above = event.cpu_parent
        while above is not None and not above.name.startswith("aten::"):
            above = above.cpu_parent
        # what an operator calls itself, as to turn a number into a tensor, is not ours
        if above is None and event.name.startswith("aten::"):
            name = event.name.removeprefix("aten::")
            found[name] += name not in VIEWS
    return found


def step_of(kind: str, arguments: tuple[int, ...], shape: tuple[int, ...]) -> Callable[[], object]:
    world = tessel.world()
    torch.manual_seed(0)
    model, x = getattr(models, kind)(*arguments), torch.randn(shape)
    if world.size > 1:
        P = world.create_cartesian_topology_partition([1, 1, world.size, *[1] * (len(shape) - 3)])
        model = tessel.nn.distribute_module(model, P)
        x = tessel.Layout.balanced(P, shape).local_part(x).clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def counted(kind: str, arguments: tuple[int, ...], shape: tuple[int, ...]) -> Counter[str]:
    step = step_of(kind, arguments, shape)
    for _ in range(3):  # buckets are learned, plans made
        step()
    return kernels(step)


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (("ResNet18", (8, 10), (2, 3, 64, 64)), 2.6),  # nearly all of it in batch norms
        (("UNet", (2, 4), (1, 1, 16, 16)), 2.3),
    ],
)
def test_kernels_of_a_training_step(run: Run, case: Any, most: float) -> None:
    (alone,), spread = run(counted, *case, nprocs=1), run(counted, *case, nprocs=2)
    for each in spread:
        more = (each - alone).most_common(12)
        assert each.total() <= most * alone.total(), (each.total(), alone.total(), more)
