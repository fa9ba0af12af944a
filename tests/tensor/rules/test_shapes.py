"""Reshaping of spread tensors: all small shapes, and what need not move.

Tests `tensor/rules/shapes.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import tessel
from parity import values
from tessel import Layout
from tessel.core.agreement import tell
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


def reshape_all(grid: Shape, numbers: Sequence[int] = (1, 4, 6)) -> int:
    """Shapes to every other one: values and gradients are those of one process."""
    num_reshapes = 0
    for number in numbers:
        all_shapes = factorizations(number, 4)
        befores = [shape for shape in all_shapes if len(shape) == len(grid)]
        for k, (before, after) in enumerate(product(befores, all_shapes)):
            # of three dimensions and more every third, by turns: there are hundreds
            if len(grid) < 3 or (k + k // len(all_shapes)) % 3 == 0:
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


# every grid of three workers with up to four axes, and some of four, two of them along an axis
GRIDS = [
    tuple(3 if axis == place else 1 for axis in range(dims))
    for dims in range(1, 5)
    for place in range(dims)
]


@pytest.mark.slow
@pytest.mark.limit(300)
def test_all_shapes_on_all_grids(run: Run) -> None:
    counts = run(reshape_on_grids, GRIDS, nprocs=3, timeout=240)
    assert counts[0] > 500


def reshape_on_grids(grids: list[Shape]) -> int:
    return sum(reshape_all(grid, (1, 2 * prod(grid))) for grid in grids)


@pytest.mark.parametrize("grid", [(2, 2), (1, 4), (1, 1, 2, 2)], ids=str)
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


# A model in which dimensions of length one are merged with split ones, dropped or added: by name,
# the layers and the shape of the input.
HEADS: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "flatten": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 4)), (3, 1, 8)),
    "flatten one row": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 4)), (1, 1, 8)),
    "flatten the batch": (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(8, 4)), (1, 1, 8)),
    "features last": (lambda: nn.Linear(8, 4), (3, 1, 8)),
    "squeeze": (lambda: Lambda("squeeze", 1), (3, 1, 8)),
    "squeeze, linear": (lambda: nn.Sequential(Lambda("squeeze", 1), nn.Linear(8, 4)), (3, 1, 8)),
    "squeeze all": (lambda: nn.Sequential(Lambda("squeeze"), nn.Linear(8, 4)), (1, 1, 8)),
    "unsqueeze": (lambda: nn.Sequential(Lambda("unsqueeze", 1), nn.Linear(8, 4)), (2, 1, 8)),
    "view": (lambda: nn.Sequential(Lambda("view", 2, 8), nn.Linear(8, 4)), (2, 1, 8)),
    "reshape": (lambda: nn.Sequential(Lambda("reshape", 4, 4), nn.Linear(4, 4)), (2, 1, 8)),
    "one pixel": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(1, 4)), (2, 1, 1)),
}


class Lambda(nn.Module):
    """A method of the tensor, as a layer."""

    def __init__(self, name: str, *args: int) -> None:
        super().__init__()
        self.name, self.args = name, args

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(x, self.name)(*self.args)
        return found


def head_of(name: str, grid: Shape) -> None:
    """What users see: parts of what has the input's dimensions, and the whole of anything else.

    A plain loss of it, such as cross_entropy over all classes, is that of one process, and so are
    the gradients. If the batch is split, each worker has its rows.
    """
    make, shape = HEADS[name]
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), make()).double()
    P = tessel.world().create_cartesian_topology_partition(grid)
    model = tessel.nn.distribute_module(copy.deepcopy(alone), P)
    x = values(shape, 1)
    for _ in range(2):
        for each in (alone, model):
            each.zero_grad()
        expected = alone(x)
        for found in (model(Layout.balanced(P, shape).local_part(x)), model(tessel.spread(x, P))):
            model.zero_grad()
            alone.zero_grad()
            wanted, target = alone(x), values(expected.shape, 2)
            if isinstance(found, tessel.Tensor):
                assert torch.allclose(found.full(), wanted, rtol=0, atol=1e-12)
                ours = (found.softmax(-1) * target).sum()
                (wanted.softmax(-1) * target).sum().backward()
            else:
                if wanted.dim() == len(grid):
                    layout = Layout.balanced(P, wanted.shape)
                    wanted, target = layout.local_part(wanted), layout.local_part(target)
                elif grid[0] > 1:  # all workers ask: rows of a batch that is split, or the whole
                    lengths = list(tell(P, len(found)).values())
                    if sum(lengths) == len(wanted):
                        start = sum(lengths[: P.index[0]])
                        wanted, target = (y[start : start + len(found)] for y in (wanted, target))
                assert torch.allclose(found, wanted, rtol=0, atol=1e-12), (found, wanted)
                ours = (found * target).sum()
                full = values(expected.shape, 2)
                (alone(x) * full).sum().backward()
            ours.backward()
            for p, q in zip(alone.parameters(), model.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12), name


def heads_on_grids(num_workers: int) -> int:
    places = [tuple(num_workers if axis == place else 1 for axis in range(3)) for place in range(3)]
    for grid in places:
        for name in HEADS:
            try:
                head_of(name, grid)
            except AssertionError as error:
                raise AssertionError(f"{name} on {grid}: {error}") from error
    return len(places) * len(HEADS)


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore")
def test_heads_with_dimensions_of_length_one(run: Run) -> None:
    assert run(heads_on_grids, 3, nprocs=3, timeout=240)[0] == 33
