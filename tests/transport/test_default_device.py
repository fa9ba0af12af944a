"""`torch.set_default_device` is for the users' tensors: Tessel's own stay on the CPU.

With "meta" as the default, whatever of Tessel's own were made there would have no values.

Tests `transport/group.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional

import stress
import tessel
from tessel import nn
from tessel.state import clip_grad_norm_


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.MaxPool2d(2),
        torch.nn.GroupNorm(2, 8),
        torch.nn.Upsample(scale_factor=2, mode="bilinear"),
        torch.nn.Dropout(0.3),
        torch.nn.Conv2d(8, 4, 1),
    )


def all_kinds() -> dict[str, Any]:
    """Results that are the same with any default device."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])
    torch.manual_seed(1)
    found: dict[str, Any] = {}
    model = small_model()
    part = tessel.Layout.balanced(P, (2, 3, 10, 8)).local_part(torch.randn(2, 3, 10, 8))
    spread = tessel.from_local(part, P)
    values = torch.arange(5.0, requires_grad=True)
    for name in ("cpu", "meta"):
        torch.manual_seed(2)
        with torch.device(name):
            total = nn.AllSumReduce(tessel.world(), [0])(values)
            values.grad = None
            total.square().sum().backward()
            converted = nn.distribute_module(copy.deepcopy(model), P)
            y = converted(part)
            y.square().mean().backward()
            norm = clip_grad_norm_(converted.parameters(), 1.0)
            others = [
                functional.pad(spread, (1, 1, 1, 1), mode="reflect").std(),
                functional.interpolate(spread, size=(7, 5), mode="bicubic").sum(),
                functional.adaptive_avg_pool2d(spread, 3).square().sum(),
                spread.roll(1, 2)[:, :, 1:4].cumsum(2).sum(),
                functional.scaled_dot_product_attention(spread, spread, spread).square().sum(),
                spread.sort(2).values[:, :, 3].sum(),
                functional.dropout(spread, 0.4).sum(),
            ]
        results = [values.grad, y, norm, *(each.full() for each in others)]
        found[name] = [each.detach().clone() for each in results]
    return found


def with_default(transport: str) -> list[bool]:
    with stress.afresh(TESSEL_TRANSPORT=transport):
        found = all_kinds()
    return [torch.equal(a, b) for a, b in zip(found["cpu"], found["meta"], strict=True)]


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_results_do_not_depend_on_the_default_device(run: Any, transport: str) -> None:
    assert run(with_default, transport, nprocs=3) == [[True] * 10] * 3
