"""Sums with the same bits for every layout and number of workers, and with almost no error.

Tests `tensor/reproducible_sum.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tessel
from parity import values
from test_spread import grids, ways

Run = Callable[..., list[Any]]

SHAPE = (7, 4, 5)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64)
DIMS = (None, 0, -1, (0, 2))


def of_many_sizes(dtype: torch.dtype) -> Tensor:
    """Values of 20 orders of magnitude, so that every order of adding gives another result."""
    sizes = torch.exp(values(SHAPE, 4) * 8)
    real = values(SHAPE, 3) * sizes
    return torch.complex(real, real.flip(0)).to(dtype) if dtype.is_complex else real.to(dtype)


def check_bits() -> list[Tensor]:
    """The bits of each sum in all layouts, beside those of a plain tensor."""
    workers, sums = tessel.world().size, []
    for dtype in DTYPES:
        x = of_many_sizes(dtype)
        for dim in DIMS:
            expected = tessel.sum(x, dim, dim == 0, deterministic=True)
            assert expected.dtype == dtype
            sums.append(expected)
            for layout in (*ways(SHAPE, workers), *grids(SHAPE, workers)):
                got = tessel.sum(tessel.spread(x, layout), dim, dim == 0, deterministic=True)
                assert torch.equal(got.full(), expected), f"{dtype}, {dim} depends on {layout}"
    return sums


@pytest.mark.parametrize("nprocs", [1, 3])
def test_bits_are_those_of_one_process(run: Run, nprocs: int) -> None:
    here = check_bits()
    for there in run(check_bits, nprocs=nprocs):
        assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def check_a_worker_outside() -> None:
    inner = tessel.world().create_partition_inclusive([0, 1])
    x = of_many_sizes(torch.float32)
    spread = tessel.spread(x, inner.create_cartesian_topology_partition([2, 1, 1]))
    y = tessel.sum(spread, 0, deterministic=True)
    assert y.shape == (4, 5) and (y.local.numel() == 20) == inner.active


def test_a_worker_outside_of_the_partition_has_the_shape(run: Run) -> None:
    run(check_a_worker_outside, nprocs=3)


def check_gradients() -> None:
    for layout in ways(SHAPE, tessel.world().size):
        whole, spread = of_many_sizes(torch.float64), of_many_sizes(torch.float64)
        for x, where in ((whole.requires_grad_(), None), (spread.requires_grad_(), layout)):
            summed = x if where is None else tessel.spread(x, where)
            y = tessel.sum(summed, (0, 2), deterministic=True) / 1e6
            (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            (gradient**2).sum().backward()
        torch.testing.assert_close(spread.grad, whole.grad, rtol=1e-12, atol=0)


def test_derivatives_of_both_orders(run: Run) -> None:
    run(check_gradients, nprocs=2)
    x = values((5, 3), 1).requires_grad_()
    (gradient,) = torch.autograd.grad(tessel.sum(x, 0, deterministic=True)[1], x)
    assert torch.equal(gradient, torch.tensor([[0.0, 1.0, 0.0]]).double().expand(5, 3))


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(terms=st.lists(NUMBERS, min_size=1, max_size=40), order=st.randoms())
def test_errors_are_those_of_one_rounding(terms: list[float], order: Any) -> None:
    """Beside exact sums, also with subnormal terms and such as are almost too large."""
    shuffled = order.sample(terms, len(terms))
    x, y = (torch.tensor(each, dtype=torch.float64) for each in (terms, shuffled))
    got = tessel.sum(x, deterministic=True)
    assert torch.equal(got, tessel.sum(y, deterministic=True))
    try:
        exact = float(sum(map(Fraction, terms)))  # math.fsum overflows on its way to some of them
    except OverflowError:
        assert got.abs() >= torch.finfo(torch.float64).max
        return
    largest = max(map(abs, terms))
    assert abs(got.item() - exact) <= math.ulp(exact) + math.ulp(largest) / 2


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ([math.inf, 1.0], math.inf),
        ([-math.inf, 1e308, 1e308], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([1e308, 1e308, -1e308], 1e308),
        ([5e-324, 5e-324], 1e-323),
        ([0.0, -0.0], 0.0),
    ],
)
def test_what_is_not_finite_and_what_almost_is(terms: list[float], expected: float) -> None:
    x = torch.tensor([terms, [1.0] * len(terms)], dtype=torch.float64).requires_grad_()
    y = tessel.sum(x, 1, deterministic=True)
    wanted = torch.tensor([expected, len(terms)], dtype=x.dtype)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))  # type: ignore[arg-type]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_rest_is_torchs(deterministic: bool) -> None:
    """Whole numbers, dtypes, nothing at all, one number, and errors."""

    def summed(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tessel.sum(x, *args, **kwargs, deterministic=deterministic)

    whole = torch.arange(6).view(2, 3)
    for args in ((), (0,), ((0, 1), True), ([],), (-1, True)):
        assert torch.equal(summed(whole, *args), torch.sum(whole, *args))
        assert torch.equal(summed(whole.float(), *args), torch.sum(whole.float(), *args))
    assert torch.equal(
        summed(whole, 0, dtype=torch.float32), torch.sum(whole, 0, dtype=torch.float32)
    )
    assert torch.equal(summed(torch.zeros(0, 3), 0), torch.zeros(3))
    assert torch.equal(summed(torch.tensor(2.5)), torch.tensor(2.5))
    for wrong in (3, (0, 0)):
        with pytest.raises((IndexError, RuntimeError)):
            summed(whole.float(), wrong)
