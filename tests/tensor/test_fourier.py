"""Spectra in converted models: they stay where they were computed, and few values travel.

Tests `tensor/rules/fourier.py`, `tensor/rules/hosting.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tessel
from parity import values
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
SHAPE = (2, 4, 16, 12)
KEPT = (slice(None), slice(None), slice(5, 11), slice(None, 4))


def modes(x: Tensor) -> Tensor:
    """What a Fourier neural operator does."""
    spectrum = torch.fft.fftshift(torch.fft.rfftn(x, dim=(-2, -1)), dim=-2)
    out = torch.zeros(spectrum.shape, dtype=spectrum.dtype)
    mixed = torch.einsum("bixy,io->boxy", spectrum[KEPT], values((4, 4), 5).to(spectrum.dtype))
    out[KEPT] = mixed
    y: Tensor = torch.fft.irfftn(torch.fft.fftshift(out, dim=-2), s=x.shape[-2:], dim=(-2, -1))
    return y + x


def filtered(x: Tensor) -> Tensor:
    spectrum = torch.fft.fft2(x, norm="ortho")
    return torch.fft.ifft2(spectrum * values((16, 12), 3), norm="ortho").real * x


def in_another_order(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfftn(x, dim=(3, 2))
    return torch.fft.irfftn(spectrum.abs() * spectrum, s=(12, 15), dim=(3, 2))


def of_three(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfftn(x, dim=(1, 2, 3))
    return torch.fft.irfftn(spectrum * spectrum.abs().sum(0), s=(4, 16, 12), dim=(1, 2, 3))


def longer(x: Tensor) -> Tensor:
    return torch.fft.rfft2(x, s=(18, 14)).abs()


def hermitian(x: Tensor) -> Tensor:
    return torch.fft.hfftn(torch.fft.ihfftn(x, dim=(2, 3)) ** 2, s=(16, 12), dim=(2, 3)) + x


def turned(x: Tensor) -> Tensor:
    """With channels last, where axis d of the grid does not split dimension d."""
    y = x.permute(0, 2, 3, 1)
    spectrum = torch.fft.rfft2(y, dim=(1, 2))
    return torch.fft.irfft2(spectrum * 2, s=(16, 12), dim=(1, 2)).permute(0, 3, 1, 2) * x


FUNCTIONS = [modes, filtered, in_another_order, of_three, longer, hermitian, turned]


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(values((4, 1, 1), 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def compared(function: Any, grid: tuple[int, ...]) -> None:
    whole = values(SHAPE, 1).requires_grad_()
    alone = Function(function)
    expected = alone(whole)
    (expected * expected.detach().cos()).sum().backward()
    P = tessel.world().create_cartesian_topology_partition(grid)
    model = tessel.nn.distribute_module(Function(function), P, fallback="raise")
    x: Any = tessel.spread(whole.detach(), P).requires_grad_()
    found: Any = model(x)
    (found * found.detach().cos()).sum().backward()
    for mine, theirs in (
        (found.full(), expected),
        (x.grad.full(), whole.grad),
        (model.weight.grad, alone.weight.grad),
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grid", [(1, 1, 2, 1), (1, 1, 1, 3), (1, 1, 2, 2), (2, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_spectra_in_models(run: Run, function: Any, grid: Any) -> None:
    run(compared, function, grid, nprocs=grid[0] * grid[1] * grid[2] * grid[3])


def sent() -> int:
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 1))
    model = tessel.nn.distribute_module(Function(modes), P, fallback="raise")
    x = tessel.spread(values(SHAPE, 1), P)
    with torch.no_grad():
        model(x)
        with count_traffic() as traffic:
            model(x)
    return traffic.bytes_sent


def test_a_spectral_layer_sends_a_spectrum_there_and_back(run: Run) -> None:
    rows = 16 * 2 * 4 * 8  # bytes of one frequency of the half of the rows
    # Three of seven frequencies there; two of the four that are kept, and six of sixteen rows of
    # them, to the worker that has none; four back.
    assert max(run(sent, nprocs=2)) <= (3 + 4) * rows + 2 * rows * 6 // 8
