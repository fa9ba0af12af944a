"""Warnings about gathered operands say where in the model the function was called.

Tests `tensor/call_site.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessel
from tessel.tensor import gathering
from tessel.tensor.call_site import described
from tessel.tensor.gathering import GatherWarning, noted_gathers

Run = Callable[..., list[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + volume(x)


def volume(x: Tensor) -> Tensor:
    return torch.linalg.cond(x)[..., None, None]


class Net(nn.Module):
    """Blocks in a list that is not called itself, one of them twice, and one that is tied."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Identity(), Block()), Block()])
        self.tied = self.layers[1]
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer(x)
        return checkpoint(self.tied, x, use_reentrant=False) if self.again else self.tied(x)


def images() -> tuple[Any, tessel.Partition]:
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1])
    return (2 * torch.eye(4, dtype=torch.float64)).expand(1, 2, 4, 4), grid


def said(act: Callable[[], Any]) -> list[str]:
    """What warnings say of the place in the model."""
    gathering._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    found = [each for each in caught if issubclass(each.category, GatherWarning)]
    for each in found:
        assert each.filename == __file__ and "256 bytes" in str(each.message)
    return [str(each.message).partition(" has no rule")[0] for each in found]


def warn(how: str) -> list[str]:
    x, grid = images()
    model: Any = Net()
    if how == "converted":
        model = tessel.nn.distribute_module(model, grid)
        part = tessel.Layout.balanced(grid, x.shape).local_part(x)
        return said(lambda: [model(part) for _ in range(3)])
    y = tessel.spread(x, grid)
    if how == "unconverted":
        return said(lambda: [model(y) for _ in range(3)])
    if how == "forward":
        return said(lambda: model.forward(y))
    if how == "hooked":
        model.layers[1].register_forward_hook(lambda module, args, output: output * 1)
        model.register_full_backward_hook(lambda module, grads, outputs: None)
        return said(lambda: model(y))
    if how == "a part":
        return said(lambda: model.layers[0](y))
    if how == "no module":
        return said(lambda: volume(y))
    if how == "inside of another":
        return said(lambda: nn.Sequential(nn.Identity(), model)(y))
    if how == "a hook":
        model = nn.Sequential(nn.Sequential(nn.Identity()))
        model[0][0].register_forward_hook(lambda module, args, output: volume(output))
        return said(lambda: model(y))
    assert how == "checkpoint"
    model = Net(again=True)
    leaf = y.detach().requires_grad_()
    return said(lambda: model(leaf).sum().backward())


BLOCKS = [
    "torch's `linalg_cond` in `layers.0.1` (Block) of Net",
    "torch's `linalg_cond` in `layers.1` (Block) of Net",
]
SAID: dict[str, list[str]] = {
    "converted": BLOCKS,
    "unconverted": BLOCKS,
    "forward": BLOCKS,
    "hooked": BLOCKS,
    "a part": ["torch's `linalg_cond` in `1` (Block) of Sequential"],
    "no module": ["torch's `linalg_cond`"],
    "inside of another": [
        "torch's `linalg_cond` in `1.layers.0.1` (Block) of Sequential",
        "torch's `linalg_cond` in `1.layers.1` (Block) of Sequential",
    ],
    "a hook": ["torch's `linalg_cond` in `0.0` (Identity) of Sequential"],
    # which computes it again in the backward pass, where the model around it is not on the stack
    "checkpoint": [*BLOCKS, "torch's `linalg_cond` in Block"],
}


@pytest.mark.parametrize("how", SAID)
def test_the_module_is_named(run: Run, how: str) -> None:
    for found in run(warn, how, nprocs=2):
        assert found == SAID[how]


def note() -> list[tuple[Any, ...]]:
    x, grid = images()
    y, model = tessel.spread(x, grid), Net()
    first = said(lambda: model(y))
    with noted_gathers() as notes:
        again = said(lambda: model(y))  # noted, though they are said
    assert len(first) == 2 and again == []
    return [(each.name, each.num_bytes, each.place.module, str(each.place)) for each in notes]


def test_gathers_are_noted(run: Run) -> None:
    for notes in run(note, nprocs=2):
        modules = ["`layers.0.1` (Block) of Net", *["`layers.1` (Block) of Net"] * 2]
        assert [each[:3] for each in notes] == [("linalg_cond", 256, module) for module in modules]
        assert all(__file__ in each[3] and each[3].endswith(each[2]) for each in notes)


def test_names_of_modules() -> None:
    """Of a chain of calls; a module that belongs to nothing before it begins a new one."""
    net, stranger = Net(), Block()
    assert described([]) == ""
    assert described([net]) == "Net"
    assert described([net, net]) == "Net"  # `forward` of a subclass that calls that of its base
    assert described([net, net.layers[0], net.layers[0][1]]) == "`layers.0.1` (Block) of Net"
    assert described([net, net.layers[0], net.tied]) == "`layers.1` (Block) of Net"
    assert described([net, stranger, stranger.conv]) == "`conv` (Conv2d) of Block"
