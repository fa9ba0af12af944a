"""Reshaping of spread tensors: all small shapes, and what need not move."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import tessel
from parity import values
from tessel import Layout
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
Shape = tuple[int, ...]


def on_grid(grid: Shape, shape: Shape) -> tessel.Tensor:
    partition = tessel.world().create_cartesian_topology_partition(grid)
    return tessel.spread(values(shape, 1), partition).requires_grad_()


def factorizations(number: int, most: int) -> list[Shape]:
    """All shapes with `number` elements and at most so many dimensions, ones among them."""
    shapes = {()} if number == 1 else set()
    if most:
        for length in (n for n in range(1, number + 1) if number % n == 0):
            shapes |= {(length, *rest) for rest in factorizations(number // length, most - 1)}
    return sorted(shapes)


def reshape_all(grid: Shape) -> int:
    """Every shape to every other one: values and gradients are those of one process."""
    num_reshapes = 0
    for number in (1, 4, 6):
        all_shapes = factorizations(number, 4)
        for before in (shape for shape in all_shapes if len(shape) == len(grid)):
            for after in all_shapes:
                x = on_grid(grid, before)
                y = x.reshape(after)
                weight = values(after, 2)
                (y * y * weight).sum().backward()
                expected = values(before, 1)
                assert torch.equal(y.full(), expected.reshape(after)), (before, after)
                slope = 2 * expected * weight.reshape(before)
                assert x.grad is not None
                assert torch.allclose(x.grad.full(), slope, rtol=0, atol=1e-12), (before, after)
                num_reshapes += 1
    return num_reshapes


@pytest.mark.parametrize("grid", [(2, 2), (1, 4), (1, 2, 2), (1, 1, 2, 2)], ids=str)
def test_all_shapes(run: Run, grid: Shape) -> None:
    counts = run(reshape_all, grid, nprocs=prod(grid), timeout=120)
    assert counts[0] > 100


def keep() -> None:
    """Reshapes whose parts stay where they are move nothing: the results are views."""
    size = tessel.world().size
    shape = (2 * size, 3, 4)
    x = tessel.spread(values(shape, 1), Layout.split(tessel.world(), shape, [0, None, None]))
    before = x.full().clone()
    for y in (x.flatten(), x.flatten(1), x.flatten(0, 1), x.unflatten(0, (size, 2)), x.view(-1, 2)):
        y += 1
    assert torch.allclose(x.full(), before + 5)


def test_reshapes_that_need_not_move_are_views(run: Run) -> None:
    run(keep, nprocs=3, timeout=60)


SHORTER: dict[str, Callable[[tessel.Tensor], tessel.Tensor]] = {
    "flatten": lambda x: x.flatten(1),
    "squeeze": lambda x: x.squeeze(),
    "view": lambda x: x.view(2, 6),
    "reshape": lambda x: x.reshape(3, 4),
}


def shorten() -> None:
    """A dimension of length one lies on one worker along its axis, which keeps it: a view."""
    for name, function in SHORTER.items():
        x = on_grid((1, 1, 2, 2), (2, 6, 1, 1)).detach()
        with count_traffic() as traffic:
            y = function(x)
            y += 1
        assert traffic.messages == 0, name
        expected = values((2, 6, 1, 1), 1) + 1
        assert torch.equal(x.full(), expected), name
        assert torch.equal(y.full(), function(expected)), name


def test_dimensions_of_length_one_need_not_move(run: Run) -> None:
    run(shorten, nprocs=4, timeout=60)


def classify() -> tuple[int, int]:
    """Messages and bytes of the head of a classifier, forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).double()
    x = on_grid((1, 1, 2, 1), (2, 8, 4, 4))
    with count_traffic() as traffic:
        model(x).sum().backward()
    return traffic.messages, traffic.bytes_sent


def test_a_classifier_sends_its_pooled_features_once(run: Run) -> None:
    """To the worker that has the one pixel; from it to all; and back to those that pooled."""
    features = 2 * 8 * 8
    assert run(classify, nprocs=2, timeout=60) == [(2, 2 * features), (1, features)]
