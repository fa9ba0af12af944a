"""Checkpoints inside of checkpoints, and several of one checkpoint's output: as in one process.

Values, gradients, running statistics and how often each block is computed.
Tests `tensor/tensor.py`.
"""

from __future__ import annotations

import copy
import gc
import weakref
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


class Difference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x - 2 * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, -2 * grad


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

    def with_others(self, x: Tensor) -> Tensor:
        """With results and arguments that are no tensors, or have no gradient."""

        def both(y: Tensor, times: int, on: Tensor) -> tuple[Any, ...]:
            def inner(y: Tensor, on: Tensor) -> Tensor:
                return self.blocks[1](y) * on

            y = checkpoint(inner, y, on, use_reentrant=self.inner)
            return None, on > 0, (y * times).tanh(), y.square().mean()

        none, on, y, total = checkpoint(both, x, 3, torch.ones(5), use_reentrant=self.outer)
        assert none is None and on.dtype is torch.bool
        return self.blocks[3](self.blocks[2](y)) * on + total

    def beside_its_input(self, x: Tensor) -> Tensor:
        """A function of torch's kind gets what a checkpoint got, and what it gave."""
        x = x.sin()
        y = checkpoint(self.blocks[1], x, use_reentrant=self.outer)
        z = Difference.apply(x, y)
        return self.blocks[3](z) * self.blocks[2](z)

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


NESTED = ("nested", "inner_last", "inner_only", "thrice", "several", "two_results", "with_others")
SINGLE = ("chain", "second_result_alone", "beside_its_input")
KINDS = [(outer, inner) for outer in (False, True) for inner in (False, True)]
CASES = [(way, kinds) for way in NESTED for kinds in KINDS]
CASES += [(way, (outer, False)) for way in SINGLE for outer in (False, True)]


def pair(way: str, kinds: tuple[bool, bool]) -> tuple[nn.Module, nn.Module, Tensor, Layout]:
    """The model in one process and converted, an image, and how it lies."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 1])
    torch.manual_seed(0)
    alone = Nested(way, kinds).double()
    spread = tessel.nn.distribute_module(copy.deepcopy(alone), P)
    whole = values(2, 3, 6, 5)
    return alone, spread, whole, Layout.balanced(P, whole.shape)


def times(model: Any) -> list[int]:
    return [block.times for block in model.blocks]


def check(way: str, kinds: tuple[bool, bool]) -> None:
    alone, spread, whole, layout = pair(way, kinds)
    expected = told(alone, whole.clone().requires_grad_())
    got = told(spread, layout.local_part(whole).clone().requires_grad_())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name[2:] in ("x", "y"):
            value = layout.local_part(value)
        torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-11, msg=name)
    assert times(spread) == times(alone)


@pytest.mark.parametrize(("way", "kinds"), CASES)
def test_checkpoints_in_checkpoints(run: Run, way: str, kinds: tuple[bool, bool]) -> None:
    run(check, way, kinds, nprocs=2)


def check_passes() -> None:
    """A graph that is kept computes again in each pass; `torch.autograd.grad` raises as torch."""
    alone, spread, whole, layout = pair("several", (True, True))
    for model, x in ((alone, whole.clone()), (spread, layout.local_part(whole).clone())):
        y = model(x.requires_grad_())
        y.square().sum().backward(retain_graph=True)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            torch.autograd.grad(model(x).sum(), x)
        # what the pass that raised has left is not added to the next one
        model(x).sum().backward()
        model.seen = x.grad
    torch.testing.assert_close(spread.seen, layout.local_part(alone.seen), rtol=1e-11, atol=1e-11)
    for got, expected in zip(spread.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-11, atol=1e-11)


def test_passes_over_one_graph(run: Run) -> None:
    run(check_passes, nprocs=2)


def check_nothing_stays() -> None:
    """What checkpoints hold is let go with the graph, without a collection of garbage."""
    _, spread, whole, layout = pair("several", (True, True))
    held: list[Any] = []
    spread(layout.local_part(whole).clone())  # what a first call imports and works out may stay
    for derives in (False, True):
        x = layout.local_part(whole).clone().requires_grad_()
        entered = torch.nn.modules.module.register_module_forward_hook(
            lambda module, given, y: held.append(weakref.ref(y)) if type(module) is Block else None
        )
        gc.collect()
        gc.disable()
        try:
            y = spread(x)
            if derives:
                y.sum().backward()
            del y
            alive = [each for each in held if each() is not None]
        finally:
            gc.enable()
            entered.remove()
        assert held and not alive, (derives, len(alive), len(held))
        held.clear()


def test_nothing_stays(run: Run) -> None:
    run(check_nothing_stays, nprocs=2)
