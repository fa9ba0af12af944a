"""Spectra in converted models: they stay where they were computed, and few values travel.

Tests `tensor/rules/fourier.py`, `tensor/rules/hosting.py`, `tensor/unfinished.py`.
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


HALF = (2, 4, 16, 7)  # the shape of a real transform


def corners(x: Tensor) -> Tensor:
    """What the first Fourier neural operators did."""
    spectrum, out = torch.fft.rfft2(x), torch.zeros(HALF, dtype=torch.complex128)
    mixing = values((4, 4), 5).to(spectrum.dtype)
    out[:, :, :3, :4] = torch.einsum("bixy,io->boxy", spectrum[:, :, :3, :4], mixing)
    out[:, :, -3:, :4] = torch.einsum("bixy,io->boxy", spectrum[:, :, -3:, :4], mixing.T)
    return torch.fft.irfft2(out, s=x.shape[-2:])


def taken_and_used_whole(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), torch.zeros(HALF, dtype=torch.complex128)
    few = spectrum[..., :3]
    shifted = torch.fft.fftshift(spectrum)
    out[..., :3] = few
    out[..., 2:4] = spectrum[..., 4:6] * shifted[..., 4:6]  # over one of these
    return torch.fft.irfft2(out) * spectrum.abs().mean() + shifted.abs()[:, :, 3, 3, None, None]


def changed(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), torch.zeros(HALF, dtype=torch.complex128)
    spectrum[..., :3] *= 2
    spectrum[:, :, 2:4] += 1
    out[..., :3] = spectrum[..., :3]
    out *= 3
    return torch.fft.irfft2(out)


def written_after_a_shift(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.fft2(x), torch.zeros(SHAPE, dtype=torch.complex128)
    out[:, :, :5, 3:8] = spectrum[:, :, 2:7, 3:8]
    shifted = torch.fft.ifftshift(out)
    shifted[:, :, 1:3] = spectrum[:, :, 1:3]
    return (torch.fft.ifft2(shifted, norm="ortho") * torch.fft.ifft2(out)).real


def of_some_channels(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), torch.zeros(HALF, dtype=torch.complex128)
    out[:, 1:3, :4, :4] = spectrum[:, :2, :4, :4]
    return torch.fft.irfft2(out)


def of_no_modes(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), torch.zeros(HALF, dtype=torch.complex128)
    out[:, :, :0, :4] = spectrum[:, :, :0, :4]
    torch.fft.rfft2(x)  # which nobody asks for
    return torch.fft.irfft2(out) + x


def summed(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), torch.zeros(HALF, dtype=torch.complex128)
    out[:, :, :5, :4] = spectrum[:, :, :5, :4]
    assert not out.requires_grad or spectrum.requires_grad
    return torch.fft.irfft(out.sum(2).abs() + out[:, :, 1].real)[:, :, None] * x


def with_steps(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(x)
    return spectrum[:, :, ::2, 1:5:2].abs() + spectrum[:, 0:1, ::2, None, 3].real


def of_three_in_corners(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfftn(x, dim=(1, 2, 3))
    out = torch.zeros(HALF, dtype=torch.complex128)
    for rows in (slice(0, 4), slice(-4, None)):
        for channels in (slice(0, 1), slice(-1, None)):
            out[:, channels, rows, :4] = spectrum[:, channels, rows, :4] * 2
    return torch.fft.irfftn(out, s=(4, 16, 12), dim=(1, 2, 3))


def on_a_finer_grid(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), torch.zeros(2, 4, 20, 10, dtype=torch.complex128)
    out[:, :, :4, :4] = spectrum[:, :, :4, :4]
    return torch.fft.irfft2(out, s=(20, 18))


FUNCTIONS = [
    *(modes, filtered, in_another_order, of_three, longer, hermitian, turned, corners),
    *(taken_and_used_whole, changed, written_after_a_shift, of_some_channels, of_no_modes),
    *(summed, with_steps, of_three_in_corners, on_a_finer_grid),
]


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
        # Sums cancel to little: what they are exact to is their largest value.
        scale = max(1.0, float(theirs.detach().abs().max()))
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("grid", [(1, 1, 2, 1), (1, 1, 1, 3), (1, 1, 2, 2), (2, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_spectra_in_models(run: Run, function: Any, grid: Any) -> None:
    run(compared, function, grid, nprocs=grid[0] * grid[1] * grid[2] * grid[3])


def sent(function: Any, grid: tuple[int, ...]) -> int:
    P = tessel.world().create_cartesian_topology_partition(grid)
    model = tessel.nn.distribute_module(Function(function), P, fallback="raise")
    x = tessel.spread(values(SHAPE, 1), P)
    with torch.no_grad():
        model(x)
        with count_traffic() as traffic:
            model(x)
    return traffic.bytes_sent


@pytest.mark.parametrize("function", [modes, corners])
def test_only_modes_that_are_taken_travel(run: Run, function: Any) -> None:
    modes = 16 * 2 * 4 * 6 * 4  # bytes of six frequencies of rows, and four of columns
    # Half of the terms there, and half of the modes back.
    assert run(sent, function, (1, 1, 2, 1), nprocs=2) == [modes] * 2


def test_of_more_modes_lines_travel(run: Run) -> None:
    """Where they are less than terms: half of all lines of the columns that are taken."""
    line = 16 * 2 * 4 * 8  # bytes of a frequency of columns along the half of the rows
    assert run(sent, of_more_modes, (1, 1, 2, 1), nprocs=2) == [4 * line] * 2


def of_more_modes(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), torch.zeros(HALF, dtype=torch.complex128)
    out[:, :, 1:11, :4] = spectrum[:, :, 1:11, :4]
    return torch.fft.irfft2(out)


def alone_in_a_model(function: Callable[[Tensor], Any]) -> None:
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 1))
    model = tessel.nn.distribute_module(Function(function), P, fallback="raise")
    model(tessel.spread(values(SHAPE, 1), P))


def shown_by_one(x: Tensor) -> Tensor:
    spectrum: Any = torch.fft.rfft2(x)
    if tessel.world().rank == 0:  # nothing is sent
        assert "not computed yet" in repr(spectrum) and spectrum.requires_grad
    return spectrum[..., :3].abs()


def with_gradients_of_spectra(x: Tensor) -> Tensor:
    first, second = torch.fft.rfft2(x), torch.fft.rfft2(x)
    first.retain_grad()
    loss = first[..., :3].abs().sum() + second[..., :3].abs().sum()
    loss.backward(retain_graph=True)
    torch.testing.assert_close(
        first.grad.full()[..., :3],  # type: ignore[union-attr]
        torch.sgn(first.detach()[..., :3].full()),
    )
    assert not first.grad.full()[..., 3:].any()  # type: ignore[union-attr]
    for ask in (
        second.retain_grad,
        lambda: second.register_hook(print),
        lambda: torch.autograd.grad(loss, second),
        lambda: loss.backward(inputs=[second]),
    ):
        with pytest.raises(ValueError, match="before taking the first slice"):
            ask()
    return x


def changed_by_a_view(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(x)
    few = spectrum[..., :3]
    few *= 2
    with pytest.raises(ValueError, match="changed in place through a view"):
        spectrum.abs()
    return x


def kept_from_changes(x: Tensor) -> Tensor:
    """Changes of what it was made of come too late for a spectrum."""
    y = x * 2
    spectrum, expected = torch.fft.rfft2(y), torch.fft.rfft2(x * 2).abs().clone()
    y.zero_()
    torch.testing.assert_close(spectrum.abs().full(), expected.full())
    out = torch.zeros(HALF, dtype=torch.complex128)
    few = torch.fft.rfft2(x)[..., :3].clone()
    out[..., :3] = few
    with torch.no_grad():
        few.zero_()
    assert out.abs().sum() > 0
    return x


def without_gradients(x: Tensor) -> Tensor:
    """Where a spectrum is finished says nothing of its gradient."""
    spectrum = torch.fft.rfft2(x)
    with torch.no_grad():
        apart = torch.fft.rfft2(x)
        spectrum.abs()
    with torch.inference_mode():
        third = torch.fft.rfft2(x)
    assert spectrum.abs().requires_grad and not apart.abs().requires_grad
    assert not third.abs().requires_grad
    return spectrum[..., :2].abs() + apart[..., :2].abs() + third[..., :2].abs()


@pytest.mark.parametrize(
    "function",
    [
        *(shown_by_one, with_gradients_of_spectra, changed_by_a_view, kept_from_changes),
        without_gradients,
    ],
)
def test_uses_of_unfinished_spectra(run: Run, function: Any) -> None:
    run(alone_in_a_model, function, nprocs=2)


def half() -> Tensor:
    return torch.zeros((*SHAPE[:-1], SHAPE[-1] // 2 + 1), dtype=torch.complex128)


def by_way_of_a_slice(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), half()
    out[:, :, 8:9, :4] = spectrum[:, :, 8:9, :4]
    out[:, :, :4][..., :3] = spectrum[:, :, :4, :3]
    return torch.fft.irfft2(out, s=SHAPE[-2:])


def read_before_a_write(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), half()
    out[:, :, :2, :4] = spectrum[:, :, :2, :4]
    view = out[:, :, :4]
    out[:, :, 2:4, :4] = spectrum[:, :, 2:4, :4]
    return view.abs()


def read_before_a_product(x: Tensor) -> Tensor:
    spectrum, out = torch.fft.rfft2(x), half()
    out[:, :, :2, :4] = spectrum[:, :, :2, :4]
    view = out[:, :, :4]
    out *= 3
    return view.abs()


def written_twice(x: Tensor) -> Tensor:
    """The values of a slice for another one, and a slice that is changed and put back."""
    spectrum, out = torch.fft.rfft2(x), half()
    out[:, :, :3, :4] = spectrum[:, :, :3, :4]
    out[:, :, -3:, :4] = out[:, :, :3, :4]
    out[:, :, :4] *= 2
    return torch.fft.irfft2(out, s=SHAPE[-2:])


def looked_at_first(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(x)
    with torch.no_grad():
        scale = spectrum[:, :, :3].abs().mean()
    return spectrum[:, :, :3].abs() * scale + spectrum.abs().sum() * scale


def shared_before(x: Tensor) -> Tensor:
    """A value that all workers have is written first."""
    spectrum, out = torch.fft.rfft2(x), half()
    out[:, :, 8:9, :4] = torch.complex(x.sum(), x.sum() * 2)
    out[:, :, :3, :4] = spectrum[:, :, :3, :4]
    return torch.fft.irfft2(out, s=SHAPE[-2:])


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def check_changes(dim: int) -> None:
    P = tessel.world().create_cartesian_topology_partition([3 if d == dim else 1 for d in range(4)])
    for function in (written_twice, looked_at_first, shared_before):
        one = values(SHAPE, 1).requires_grad_()
        root = values(SHAPE, 1).requires_grad_()
        x = tessel.spread(root, tessel.Layout.split(P, SHAPE, [0, 1, 2, 3]))
        y = tessel.nn.distribute_module(Calls(function), P)(x)
        expected = function(one)
        whole = y.full() if isinstance(y, tessel.Tensor) else y
        assert torch.allclose(whole, expected, 1e-11, 1e-11), function
        (got,) = torch.autograd.grad(y.square().sum(), root)
        (gradient,) = torch.autograd.grad(expected.square().sum(), one)
        assert torch.allclose(got, gradient, 1e-10, 1e-10), function
    for function in (by_way_of_a_slice, read_before_a_write, read_before_a_product):
        x = tessel.spread(values(SHAPE, 1), tessel.Layout.split(P, SHAPE, [0, 1, 2, 3]))
        with pytest.raises((ValueError, NotImplementedError), match="where torch has a view"):
            tessel.nn.distribute_module(Calls(function), P)(x)


@pytest.mark.parametrize("dim", [2, 3])
def test_changes_of_spectra_that_are_not_finished(run: Run, dim: int) -> None:
    run(check_changes, dim, nprocs=3, timeout=60)
