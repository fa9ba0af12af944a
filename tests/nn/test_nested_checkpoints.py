"""Checkpoints inside of checkpoints, and several of one checkpoint's output: as in one process.

Values, gradients, running statistics and how often each block is computed.
Tests `tensor/tensor.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessel
from tessel import Layout

Run = Callable[..., Any]


class Block(nn.Module):
    """It counts how often it is computed, beside the running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        return self.norm(self.conv(x)).tanh()


class Nested(nn.Module):
    """Checkpoints in the way of the name, with or without reentrance, the inner as the outer."""

    def __init__(self, way: str, kinds: tuple[bool, bool]) -> None:
        super().__init__()
        self.way, (self.outer, self.inner) = way, kinds
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.way)(self.blocks[0](x))

    def nested(self, x: Tensor) -> Tensor:
        def both(y: Tensor) -> Tensor:
            y = checkpoint(self.blocks[1], y, use_reentrant=self.inner)
            return self.blocks[2](y)

        return self.blocks[3](checkpoint(both, x, use_reentrant=self.outer))

    def inner_last(self, x: Tensor) -> Tensor:
        def both(y: Tensor) -> Tensor:
            return checkpoint(self.blocks[2], self.blocks[1](y), use_reentrant=self.inner)

        return self.blocks[3](checkpoint(both, x, use_reentrant=self.outer))

    def inner_only(self, x: Tensor) -> Tensor:
        def both(y: Tensor) -> Tensor:
            y = checkpoint(self.blocks[1], y, use_reentrant=self.inner)
            return checkpoint(self.blocks[2], y, use_reentrant=self.inner)

        return self.blocks[3](checkpoint(both, x, use_reentrant=self.outer))

    def thrice(self, x: Tensor) -> Tensor:
        def middle(y: Tensor) -> Tensor:
            return checkpoint(self.blocks[1], y, use_reentrant=self.inner) * 2

        def both(y: Tensor) -> Tensor:
            return self.blocks[2](checkpoint(middle, y, use_reentrant=self.inner))

        return self.blocks[3](checkpoint(both, x, use_reentrant=self.outer))

    def several(self, x: Tensor) -> Tensor:
        y = checkpoint(self.blocks[1], x, use_reentrant=self.outer)
        a = checkpoint(self.blocks[2], y, use_reentrant=self.inner)
        b = checkpoint(self.blocks[3], y, use_reentrant=self.inner)
        return a * b + y

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=self.outer)
        return x

    def two_results(self, x: Tensor) -> Tensor:
        def both(y: Tensor) -> tuple[Tensor, Tensor]:
            y = self.blocks[1](y)
            return y, y.square().mean((2, 3))

        y, mean = checkpoint(both, x, use_reentrant=self.outer)
        z = checkpoint(self.blocks[2], y, use_reentrant=self.inner)
        return self.blocks[3](z) * mean[:, :, None, None] + y

    def second_result_alone(self, x: Tensor) -> Tensor:
        def both(y: Tensor) -> tuple[Tensor, Tensor]:
            y = self.blocks[1](y)
            return y, self.blocks[2](y)

        return self.blocks[3](checkpoint(both, x, use_reentrant=self.outer)[1])


def values(*shape: int) -> Tensor:
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (n * 0.7 + 0.2).sin().reshape(shape)


def told(model: nn.Module, x: Any) -> dict[str, Any]:
    """What two steps leave behind."""
    found: dict[str, Any] = {}
    for step in range(2):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        found |= {f"{step} y": y, f"{step} x": x.grad}
        found |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        x.grad = None
    found |= {f"buffer {name}": each.clone() for name, each in model.named_buffers()}
    return found


WAYS = ("nested", "inner_last", "inner_only", "thrice", "several", "chain", "two_results")
WAYS += ("second_result_alone",)


def check(way: str, kinds: tuple[bool, bool]) -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 1])
    torch.manual_seed(0)
    alone = Nested(way, kinds).double()
    spread = tessel.nn.distribute_module(copy.deepcopy(alone), P)
    whole = values(2, 3, 6, 5)
    expected = told(alone, whole.clone().requires_grad_())
    layout = Layout.balanced(P, whole.shape)
    got = told(spread, layout.local_part(whole).clone().requires_grad_())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name[2:] in ("x", "y"):
            value = layout.local_part(value)
        torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-11, msg=name)
    times = [[block.times for block in each.blocks] for each in (spread, alone)]
    assert times[0] == times[1], times


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inner", (False, True))
@pytest.mark.parametrize("outer", (False, True))
def test_nested(run: Run, way: str, outer: bool, inner: bool) -> None:
    run(check, way, (outer, inner), nprocs=2)
