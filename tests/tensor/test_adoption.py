"""Tensors that models make and write parts into become spread, or stay plain and exact.

Tests `tensor/adoption.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessel
from tessel.tensor.adoption import slices_of
from tessel.tensor.gathering import noted_gathers

Run = Callable[..., list[Any]]
SHAPE = (2, 4, 6, 7)


def made_like(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape or x.shape, dtype=x.dtype)


def modes(x: Tensor) -> Tensor:
    """What Fourier neural operators do."""
    spectrum = torch.fft.fftshift(torch.fft.rfftn(x, dim=(-2, -1)), dim=-2)
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    kept = (slice(None), slice(None), slice(1, 5), slice(None, 3))
    out[kept] = spectrum[kept] * 2
    back: Tensor = torch.fft.irfftn(torch.fft.fftshift(out, dim=-2), s=x.shape[-2:], dim=(-2, -1))
    return back


def padded(x: Tensor) -> Tensor:
    y = made_like(x, 2, 4, 9, 9)
    y[..., 1:7, 1:8] = x * 3
    return y[..., 2:, 1:-1] * y[..., :-2, 1:-1]


def strided(x: Tensor) -> Tensor:
    y = made_like(x, 2, 4, 12, 14)
    y[:, :, ::2, 1::2] = x * 2
    return y + 1


def numbered(x: Tensor) -> Tensor:
    y = made_like(x, 3, *SHAPE)
    for k in range(3):
        y[k] = x * k
    return y.sum(0)


def joined(x: Tensor) -> Tensor:
    y = made_like(x, 2, 4, 12, 7)
    y[:, :, :6] = x
    y[:, :, 6:] = x.sin()
    return y.cos()


def with_new_dimensions(x: Tensor) -> Tensor:
    y = made_like(x)
    y[:, None] = x[:, None].exp()
    return y * x


def broadcast(x: Tensor) -> Tensor:
    y = made_like(x)
    y[..., 2:] = x[:1, :1, :, :1] * 2
    return y * x


def under_another_name(x: Tensor) -> Tensor:
    y = made_like(x)
    kept = [y]
    y[1:] = x[1:] * 3
    return kept[0] + x


def added(x: Tensor) -> Tensor:
    y = torch.ones(x.shape, dtype=x.dtype)
    y += x * 2
    y.mul_(x)
    return y


def copied(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    y.copy_(x * 2)
    return y.tanh()


def batched(x: Tensor) -> Tensor:
    """What torchvision's detectors do with pictures of several sizes."""
    y = x[0].new_full((2, 4, 8, 8), 0.5)
    for k in range(2):
        y[k, : x.shape[1], : x.shape[2], : x.shape[3]].copy_(x[k] * 3)
    return y.tanh()


def copied_into_a_view_that_stays(x: Tensor) -> Tensor:
    y = made_like(x, 2, 4, 12, 7)
    view = y[1, :, 1::2]
    returned = view.copy_(x[0])
    return torch.stack([returned, view * 2, y[0, :, 6:].cos(), y[1, :, :6]])


def filled_by_mask(x: Tensor) -> Tensor:
    y = torch.ones(x.shape, dtype=x.dtype)
    y.masked_fill_(x > 0, 5.0)
    return y * x


SPREAD = [
    *(modes, padded, strided, numbered, joined, with_new_dimensions, broadcast),
    *(under_another_name, added, copied, filled_by_mask),
    *(batched, copied_into_a_view_that_stays),
]


def with_a_view(x: Tensor) -> Tensor:
    y = made_like(x)
    first = y[0]
    y[:, 1:] = x[:, 1:] * 2
    return first + x


def of_a_view(x: Tensor) -> Tensor:
    y = torch.zeros(x.numel(), dtype=x.dtype).view(x.shape)
    y[:, 1:] = x[:, 1:] * 2
    return y + x


def beside_its_data(x: Tensor) -> Tensor:
    y = made_like(x)
    data = y.data
    y[:, 1:] = (x * 2).detach()[:, 1:]
    return data * x


def beside_an_array(x: Tensor) -> Tensor:
    y = made_like(x)
    array = y.numpy()
    y[:, 1:] = (x * 2).detach()[:, 1:]
    return torch.from_numpy(array) * x


def seen_by_one_worker(x: Tensor) -> Tensor:
    """Where garbage that is not collected yet has a view, say."""
    y = made_like(x)
    view = y[0] if tessel.world().rank == 1 else None
    y[:, 1:] = x[:, 1:] * 2
    del view
    return y + x


def beside_another_view(x: Tensor) -> Tensor:
    y = made_like(x)
    first = y[0]
    y[:, 1:].copy_(x[:, 1:] * 2)
    return first + x


def of_a_view_of_a_view(x: Tensor) -> Tensor:
    y = made_like(x)
    first = y[0]
    first[1:].copy_(x[0, 1:])
    return first + x


def turned(x: Tensor) -> Tensor:
    y = torch.zeros(x.transpose(2, 3).shape, dtype=x.dtype)
    y.transpose(2, 3).copy_(x * 2)
    return y.transpose(2, 3) + x


PLAIN = [with_a_view, of_a_view, beside_its_data, beside_an_array, seen_by_one_worker]


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], way: str = "") -> None:
        super().__init__()
        self.function, self.way = function, way
        self.weight = nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64).view(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.way:
            return self.function(x * self.weight)
        y: Tensor = checkpoint(
            lambda z: self.function(z * self.weight), x, use_reentrant=self.way == "reentrant"
        )
        return y


def compared(function: Any, grid: tuple[int, ...], way: str = "") -> list[str]:
    """What is gathered; results and gradients are those of one process."""
    whole = torch.arange(336, dtype=torch.float64).reshape(SHAPE).sin().requires_grad_()
    alone = Function(function, way)
    expected = alone(whole)
    (expected * expected.detach().cos()).sum().backward()
    P = tessel.world().create_cartesian_topology_partition(grid)
    model = tessel.nn.distribute_module(Function(function, way), P)
    x = tessel.spread(whole.detach(), P).requires_grad_()
    with noted_gathers() as gathers:
        found: Any = model(x)
        (found * found.detach().cos()).sum().backward()
    assert found.shape == expected.shape
    for mine, theirs in (
        (found.full(), expected),
        (x.grad.full(), whole.grad),  # type: ignore[union-attr]
        (model.weight.grad, alone.weight.grad),
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    return [each.name for each in gathers]


@pytest.mark.parametrize("grid", [(1, 1, 2, 1), (1, 1, 1, 4), (2, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("function", SPREAD)
def test_what_parts_are_written_into_is_spread(run: Run, function: Any, grid: Any) -> None:
    num_workers = grid[0] * grid[1] * grid[2] * grid[3]
    assert run(compared, function, grid, nprocs=num_workers) == [[]] * num_workers


COPIED = [beside_another_view, of_a_view_of_a_view, turned]


@pytest.mark.parametrize("function", [*PLAIN, *COPIED])
def test_what_others_refer_to_stays_plain(run: Run, function: Any) -> None:
    for gathered in run(compared, function, (1, 1, 2, 1), nprocs=2):
        assert gathered == ["copy_" if function in COPIED else "__setitem__"]


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("function", [modes, numbered, added])
def test_checkpoints_compute_the_same_again(run: Run, function: Any, way: str) -> None:
    assert run(compared, function, (1, 1, 2, 1), way, nprocs=2) == [[], []]


class Holder(nn.Module):
    """Writes into what it keeps, or what it is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("buffer", torch.zeros(SHAPE))
        self.attribute = torch.zeros(SHAPE)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        target = given if self.kind == "given" else getattr(self, self.kind)
        target[:, 1:] = x[:, 1:, :, :, None] if target.dim() == 5 else x[:, 1:]
        return x + 1


def held(kind: str) -> tuple[bool, bool]:
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 1))
    x = torch.arange(336.0).reshape(SHAPE)
    model = tessel.nn.distribute_module(Holder(kind), P)
    given = torch.zeros(*SHAPE, 1)  # with other dimensions than the grid has it is whole
    with noted_gathers():
        model(tessel.spread(x, P), given)
    target: Any = given if kind == "given" else getattr(model, kind)
    return type(target) is Tensor, torch.equal(target.reshape(SHAPE)[:, 1:], x[:, 1:])


@pytest.mark.parametrize("kind", ["buffer", "attribute", "given"])
def test_what_a_model_keeps_or_is_given_stays_plain(run: Run, kind: str) -> None:
    assert run(held, kind, nprocs=2) == [(True, True)] * 2


def outside_of_a_model() -> bool:
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 1))
    y = torch.zeros(SHAPE)
    with noted_gathers():
        y[1:] = tessel.ones(SHAPE, where=P)[1:]
    return type(y) is Tensor and float(y.sum()) == 168


def test_tensors_of_programs_stay_plain(run: Run) -> None:
    assert run(outside_of_a_model, nprocs=2) == [True, True]


@pytest.mark.parametrize("shape", [(3, 4), (1, 1, 3), (2, 1, 3, 1), (4, 3, 2)], ids=str)
def test_slices_of_views(shape: tuple[int, ...]) -> None:
    """They give the same view; of views that are no slices there are none."""
    picks = [0, -1, slice(None), slice(1, None), slice(None, None, 2), slice(0, 1), slice(0, 0)]
    y = torch.arange(math.prod(shape)).view(shape).clone()
    for key in itertools.product(picks, repeat=len(shape)):
        view = y[key]
        found = slices_of(view)
        assert (found is None) == (view.numel() == 0), key
        if found is not None:
            same = y[found]
            assert same.shape == view.shape and torch.equal(same, view), key
            assert same.data_ptr() == view.data_ptr() and same.stride() == view.stride(), key
    assert slices_of(y.flatten().unfold(0, 2, 1)) is None
    assert slices_of(y.diagonal()) is None or min(y.shape[:2]) == 1
    assert slices_of(y) is None
