"""The example of Darcy flow: shortened, on one and on several workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import darcy  # noqa: E402

Run = Callable[..., list[Any]]

SHORT = darcy.Settings(
    points=12, num_train=32, num_test=8, width=8, modes=4, blocks=2, epochs=8, batch=4
)


def dense(a: torch.Tensor) -> torch.Tensor:
    """The matrix of the flow, column by column."""
    n = a.shape[0] * a.shape[1]
    units = torch.eye(n, dtype=a.dtype).reshape(n, *a.shape)
    return darcy.outflow(a.expand_as(units), units).reshape(n, n).mT


def test_pressure_solves_the_equation() -> None:
    """As a direct solver does; the matrix is symmetric and positive, so it has one solution."""
    a = darcy.permeability(2, 7, torch.Generator().manual_seed(1))
    for each, u in zip(a, darcy.pressure(a), strict=True):
        matrix = dense(each)
        torch.testing.assert_close(matrix, matrix.mT)
        expected = torch.linalg.solve(matrix, torch.ones(49, dtype=a.dtype))
        torch.testing.assert_close(u.flatten(), expected, rtol=1e-6, atol=1e-9)  # CG stops at 1e-8


def test_pressure_of_an_even_medium() -> None:
    """The known solution of Poisson's equation on a square has 0.07367 in its middle."""
    u = darcy.pressure(torch.ones(1, 33, 33, dtype=torch.float64))
    assert abs(u[0, 16, 16].item() - 0.07367) < 2e-4  # of a grid of 33 points


@pytest.fixture(scope="module")
def alone(pool: Any) -> darcy.Curves:
    return pool.run(darcy.train, SHORT, nprocs=1)[0]


@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_darcy_learns_alike_on_any_number_of_workers(
    run: Run, alone: darcy.Curves, nprocs: int
) -> None:
    assert alone.losses[-1] < 0.7 * alone.losses[0]
    for curves in run(darcy.train, SHORT, nprocs=nprocs):
        assert curves.workers == nprocs
        assert curves.losses == pytest.approx(alone.losses, rel=1e-8)
        assert curves.errors == pytest.approx(alone.errors, rel=1e-8)
        for got, expected in zip(curves.example, alone.example, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)


def test_another_seed_gives_another_curve(run: Run, alone: darcy.Curves) -> None:
    """So that equal curves say something."""
    (other,) = run(darcy.train, replace(SHORT, seed=2, epochs=1), nprocs=1)
    assert other.losses != pytest.approx(alone.losses[:1], rel=1e-6)
