"""Filters whose Fourier transform is kept: never that of other values, and not for ever.

Tests `imaging/parts/filtering.py`.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tessel
from parity import close, values
from tessel.imaging.parts import Convolution, filtering

SHAPE, SIZES = (1, 1, 24, 20), (1, 1, 9, 9)  # of the image, and of a filter that is transformed


def operator_of(filter: Tensor | Callable[[], Tensor]) -> Convolution:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    return Convolution(tessel.Layout.balanced(P, SHAPE), filter, "circular")


@pytest.fixture
def transformed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of what is transformed."""
    found = []
    own = torch.fft.rfftn

    def counted(x: Tensor, *args: Any, **settings: Any) -> Tensor:
        found.append(tuple(x.shape))
        return own(x, *args, **settings)

    monkeypatch.setattr(torch.fft, "rfftn", counted)
    return found


def test_a_filter_is_transformed_once(transformed: list[Any]) -> None:
    operator, x = operator_of(values(SIZES, 1)), values(SHAPE, 2)
    for _ in range(3):
        operator.A_adjoint(operator.A(x))
    assert transformed.count(SIZES) == 1 and len(transformed) == 7


def in_place(filter: Tensor) -> None:
    filter.add_(1)


def by_data(filter: Tensor) -> None:
    filter.data.mul_(2)


def by_an_array(filter: Tensor) -> None:
    filter.numpy()[0, 0, 3, 4] = 7.0


def by_a_view(filter: Tensor) -> None:
    filter[0, 0, 1].zero_()


def by_other_memory(filter: Tensor) -> None:
    filter.data = values(SIZES, 9)


@pytest.mark.parametrize("change", [in_place, by_data, by_an_array, by_a_view, by_other_memory])
def test_a_filter_that_is_changed_is_the_new_one(change: Callable[[Tensor], None]) -> None:
    filter, x = values(SIZES, 1), values(SHAPE, 2)
    operator = operator_of(filter)
    before = operator.A(x)
    change(filter)
    new = operator_of(filter.clone())
    assert not torch.allclose(before, new.A(x))
    assert torch.equal(operator.A(x), new.A(x))
    assert torch.equal(operator.A_adjoint(x), new.A_adjoint(x))


def test_a_filter_that_is_assigned_anew() -> None:
    held, x = [values(SIZES, 1)], values(SHAPE, 2)
    operator = operator_of(lambda: held[0])
    operator.A(x)
    held[0] = values(SIZES, 3)
    assert torch.equal(operator.A(x), operator_of(held[0]).A(x))
    held[0] = held[0].float()
    assert operator.A(x.float()).dtype == torch.float32


def test_derivatives_go_through_the_filter() -> None:
    """Also after calls without one, whose transform is kept."""
    filter, x = values(SIZES, 1), values(SHAPE, 2)
    operator, weights = operator_of(filter), values(SHAPE, 3)
    with torch.inference_mode():
        operator.A(x)
    image = x.clone().requires_grad_()
    (weights * operator.A(image)).sum().backward()  # with what was transformed in inference mode
    assert image.grad is not None
    close("image", image.grad, operator.A_adjoint(weights), 1e-12)
    filter.requires_grad_()
    (weights * operator.A(x)).sum().backward()
    own = filter.detach().clone().requires_grad_()
    (weights * operator_of(own).A(x)).sum().backward()
    assert filter.grad is not None and own.grad is not None
    close("filter", filter.grad, own.grad, 1e-12)
    tangent = values(SIZES, 4)
    held = [filter.detach()]
    operator = operator_of(lambda: held[0])
    operator.A(x)
    with forward_ad.dual_level():
        held[0] = forward_ad.make_dual(filter.detach(), tangent)
        found = forward_ad.unpack_dual(operator.A(x)).tangent
    assert found is not None
    close("tangent", found, operator_of(tangent).A(x), 1e-10)


def test_what_is_kept_ends_with_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, x = operator_of(values(SIZES, 1)), values(SHAPE, 2)
    operator.A(x)
    assert operator._spectrum._kept is not None
    assert copy.deepcopy(operator._spectrum)._kept is None
    [kept] = operator._spectrum._kept[1].values()
    gone = weakref.ref(kept)
    del operator, kept
    gc.collect()
    assert gone() is None
    monkeypatch.setattr(filtering, "LARGEST_KEPT", 100)  # as if the image were large
    operator = operator_of(values(SIZES, 1))
    operator.A(x)
    assert operator._spectrum._kept is None
