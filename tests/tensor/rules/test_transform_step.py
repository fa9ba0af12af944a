"""Spectra of one dimension in converted models: modes that are taken travel, and nothing else.

Tests `tensor/truncated_transform.py`, `tensor/rules/transform_step.py`, `tensor/unfinished.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessel
from parity import values
from tessel.tensor.truncated_transform import MOST_MODES, Waves
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
fft = torch.fft
MIXING = values((4, 4), 5)


def mixed(few: Tensor) -> Tensor:
    """What a layer does with its modes."""
    return torch.einsum("bix,io->box", few, MIXING.to(few.dtype))


def into_zeros(x: Tensor, length: int, *pieces: tuple[slice, Tensor]) -> Tensor:
    """Zeros, as layers make them, in which modes are."""
    out = torch.zeros(*x.shape[:-1], length, dtype=torch.complex128)
    for at, few in pieces:
        out[..., at] = few
    return out


def kept(x: Tensor, count: int = 5) -> Tensor:
    """What a Fourier neural operator of one dimension does."""
    n, first = x.shape[-1], slice(0, count)
    spectrum = fft.rfft(x)
    out = into_zeros(x, n // 2 + 1, (first, mixed(spectrum[..., first])))
    return fft.irfft(out, n=n) + x


def none_kept(x: Tensor) -> Tensor:
    return kept(x, 0)


def one_kept(x: Tensor) -> Tensor:
    return kept(x, 1)


def many_kept(x: Tensor) -> Tensor:
    return kept(x, x.shape[-1] // 2)


def all_kept(x: Tensor) -> Tensor:
    return kept(x, x.shape[-1] // 2 + 1)


def in_corners(x: Tensor) -> Tensor:
    """Complex numbers, and frequencies of both signs."""
    z = torch.complex(x, x.roll(1, -1))
    spectrum = fft.fft(z, dim=-1)
    low, high = slice(0, 3), slice(-2, None)
    out = into_zeros(x, x.shape[-1], (low, mixed(spectrum[..., low])), (high, spectrum[..., high]))
    return fft.ifft(out).imag * x


def of_real_numbers(x: Tensor) -> Tensor:
    spectrum = fft.fft(x, norm="ortho")
    out = into_zeros(x, x.shape[-1], (slice(1, 3), spectrum[..., 1:3]))
    return fft.ifft(out, norm="forward").real


def shifted(x: Tensor) -> Tensor:
    n = x.shape[-1]
    middle = slice(n // 2 - 2, n // 2 + 2)
    spectrum = fft.fftshift(fft.fft(x), dim=-1)
    out = into_zeros(x, n, (middle, mixed(spectrum[..., middle])))
    return fft.ifft(fft.ifftshift(out, dim=-1)).real


def longer(x: Tensor) -> Tensor:
    n = x.shape[-1]
    few = fft.rfft(x, n=n + 9, norm="ortho")[..., :4]
    return fft.irfft(into_zeros(x, n, (slice(1, 5), few)), n=n + 3, norm="ortho")


def shorter(x: Tensor) -> Tensor:
    n = x.shape[-1]
    few = fft.rfft(x, n=n - 5, norm="forward")[..., 1:4]
    # of these modes the last ones are left out
    return fft.irfft(into_zeros(x, n, (slice(2, 5), few)), n=7, norm="forward")


def by_another_name(x: Tensor) -> Tensor:
    n = x.shape[2]
    few = fft.rfftn(x, s=(n,), dim=(2,))[..., :4] + fft.fftn(x, dim=(-1,))[..., :4]
    return fft.irfftn(into_zeros(x, n // 2 + 1, (slice(0, 4), few)), s=(n,), dim=(-1,))


def hermitian(x: Tensor) -> Tensor:
    few = fft.ihfft(x)[..., :4]
    return fft.hfft(into_zeros(x, x.shape[-1] // 2 + 1, (slice(0, 4), few)), n=x.shape[-1])


def without_zeros(x: Tensor) -> Tensor:
    return fft.irfft(mixed(fft.rfft(x)[..., :4]), n=x.shape[-1])


def one_by_one(x: Tensor) -> Tensor:
    spectrum = fft.rfft(x)
    return sum((spectrum[..., k : k + 1].abs() for k in range(6)), torch.zeros(1, 1, 1))


def taken_and_used_whole(x: Tensor) -> Tensor:
    spectrum = fft.rfft(x)
    few = spectrum[..., :3]
    again = spectrum[..., :3]
    out = into_zeros(x, x.shape[-1] // 2 + 1, (slice(0, 3), few * again))
    return fft.irfft(out) * spectrum.abs().mean() + spectrum[..., 2:3].real


def filtered(x: Tensor) -> Tensor:
    n = x.shape[-1]
    return fft.irfft(fft.rfft(x) * values((n // 2 + 1,), 3), n=n) * x


def read_again(x: Tensor) -> Tensor:
    n = x.shape[-1]
    spectrum = fft.rfft(x)
    out = into_zeros(x, n // 2 + 1, (slice(0, 5), spectrum[..., 1:6]))
    out[..., 2:4] += spectrum[..., :2]
    return fft.irfft(out[..., 1:6], n=n) + out[..., 3:6].abs().sum(-1, keepdim=True)


def of_some_channels(x: Tensor) -> Tensor:
    out = torch.zeros(2, 4, x.shape[-1] // 2 + 1, dtype=torch.complex128)
    out[:, 1:3, :4] = fft.rfft(x)[:, :2, :4]
    return fft.irfft(out, n=x.shape[-1])


def of_another_dimension(x: Tensor) -> Tensor:
    few = fft.rfft(x, dim=1)[:, :2]
    return fft.irfft(few, n=4, dim=1) * x


def turned(x: Tensor) -> Tensor:
    """With channels last, where axis d of the grid does not split dimension d."""
    few = fft.rfft(x.mT, dim=1)[:, :4]
    return fft.irfft(few * 2, n=x.shape[-1], dim=1).mT * x


def back_first(x: Tensor) -> Tensor:
    return fft.fft(fft.ifft(x) * 2)[..., :4].abs()


def of_whole_numbers(x: Tensor) -> Tensor:
    return fft.rfft((x.detach() * 100).long())[..., :3].abs() + x[..., :3]


def in_a_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(kept, x, use_reentrant=False)


FUNCTIONS = [
    *(kept, none_kept, one_kept, many_kept, all_kept, in_corners, of_real_numbers, shifted),
    *(longer, shorter, by_another_name, hermitian, without_zeros, one_by_one),
    *(taken_and_used_whole, filtered, read_again, of_some_channels, of_another_dimension, turned),
    *(back_first, of_whole_numbers, in_a_checkpoint),
]


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(values((4, 1), 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def compared(grid: tuple[int, ...], length: int) -> None:
    P = tessel.world().create_cartesian_topology_partition(grid)
    for function in FUNCTIONS:
        whole = values((2, 4, length), 1).requires_grad_()
        alone = Function(function)
        expected = alone(whole)
        (expected * expected.detach().cos()).sum().backward()
        model = tessel.nn.distribute_module(Function(function), P, fallback="raise")
        for _ in range(2):  # of parameters, the second call sums gradients together
            model.zero_grad()
            x: Any = tessel.spread(whole.detach(), P).requires_grad_()
            found: Any = model(x)
            (found * found.detach().cos()).sum().backward()
        for mine, theirs in (
            (found.full(), expected),
            (x.grad.full(), whole.grad),
            (model.weight.grad, alone.weight.grad),
        ):
            scale = max(1.0, float(theirs.detach().abs().max()))  # sums cancel to little
            error = float((mine - theirs).detach().abs().max())
            assert mine.shape == theirs.shape and error <= 1e-12 * scale, (function, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "length"), [((1, 1, 2), 40), ((1, 1, 3), 37), ((2, 1, 2), 41)], ids=str
)
def test_spectra_in_models(run: Run, grid: Any, length: int) -> None:
    run(compared, grid, length, nprocs=grid[0] * grid[2])


def compared_with_empty_parts(grid: tuple[int, ...], length: int) -> None:
    """With more workers than points, or than samples."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    for function in (one_kept, without_zeros) if length > 6 else (one_kept,):
        whole = values((1, 4, length), 1).requires_grad_()
        alone = Function(function)
        expected = alone(whole)
        expected.square().sum().backward()
        model = tessel.nn.distribute_module(Function(function), P, fallback="raise")
        x: Any = tessel.spread(whole.detach(), P).requires_grad_()
        found: Any = model(x)
        found.square().sum().backward()
        torch.testing.assert_close(found.full(), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad.full(), whole.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.weight.grad, alone.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("grid", "length"), [((1, 1, 3), 2), ((2, 1, 2), 20)], ids=str)
def test_empty_parts(run: Run, grid: Any, length: int) -> None:
    run(compared_with_empty_parts, grid, length, nprocs=grid[0] * grid[2])


def in_single_precision() -> None:
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2))
    whole = values((2, 4, 4000), 1).float()
    model = tessel.nn.distribute_module(nn.Sequential(Few()), P, fallback="raise")
    few = model(tessel.spread(whole, P))
    assert few.dtype == torch.complex64
    exact = fft.rfft(whole.double())[..., :6]
    # of what a fast transform of single precision has
    error = (few.full() - exact).abs().max() / exact.abs().max()
    assert error < 2e-7
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(tessel.spread(whole, P)).full(), few.full())


class Few(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return fft.rfft(x)[..., :6]


def test_products_are_exact(run: Run) -> None:
    run(in_single_precision, nprocs=2)


def sent(function: Any, grid: tuple[int, ...], length: int) -> tuple[int, int]:
    """Bytes there and back, and those of the backward pass beside the weight's."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    model = tessel.nn.distribute_module(Function(function), P, fallback="raise")
    model.requires_grad_(False)
    found = []
    for _ in range(2):
        x: Any = tessel.spread(values((2, 4, length), 1), P).requires_grad_()
        with count_traffic() as forward:
            y = model(x)
        loss = y.square().sum()
        with count_traffic() as backward:
            loss.backward()
        found = [forward.bytes_sent, backward.bytes_sent]
    return found[0], found[1]


def test_only_modes_that_are_taken_travel(run: Run) -> None:
    line = 2 * 4  # values at each point
    # Five modes of 16 bytes: a worker sends the terms of those that others keep, and gives its own.
    there, back = [2 * 16 * line, 3 * 16 * line], [3 * 16 * line, 2 * 16 * line]
    expected = [(a + b, a + b) for a, b in zip(there, back, strict=True)]
    assert run(sent, kept, (1, 1, 2), 40, nprocs=2) == expected
    assert run(sent, kept, (1, 1, 2), 4000, nprocs=2) == expected  # whatever the number of points
    # Corners of three and two modes, of which the workers keep two and one, and one each. What
    # else travels is the last point, by which the input is rolled.
    corners = 16 * line * ((1 + 1) + (2 + 1)) + 8 * line
    assert [f for f, _ in run(sent, in_corners, (1, 1, 2), 40, nprocs=2)] == [corners] * 2
    # Of many modes all points travel, once there and once back: 20 of 8 bytes, half of the lines.
    points = 20 * 8 * line // 2
    for function in (many_kept, all_kept, filtered):
        assert run(sent, function, (1, 1, 2), 40, nprocs=2) == [(2 * points, 2 * points)] * 2


class ChannelsLast(nn.Module):
    """Models that turn their input, and not back before the end."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.movedim(-1, 1)
        for _ in range(2):
            y = kept(y) if y.dim() == 3 else corners(y) + y
        return y.movedim(1, -1)


def corners(x: Tensor) -> Tensor:
    spectrum, (rows, columns) = fft.rfft2(x), x.shape[-2:]
    out = torch.zeros(2, 4, rows, columns // 2 + 1, dtype=torch.complex128)
    for at in (slice(0, 2), slice(-2, None)):
        out[:, :, at, :3] = spectrum[:, :, at, :3] * 2
    return fft.irfft2(out, s=(rows, columns))


def turned_model(grid: tuple[int, ...], shape: tuple[int, ...], cut: int) -> int:
    whole = values(shape, 1)
    P = tessel.world().create_cartesian_topology_partition(grid)
    lengths = [[n] if parts == 1 else [cut, n - cut] for n, parts in zip(shape, grid, strict=True)]
    layout = tessel.Layout.from_lengths(P, lengths)
    model = tessel.nn.distribute_module(ChannelsLast(), P, fallback="raise")
    x = tessel.spread(whole, layout)
    with count_traffic() as traffic:
        y: Any = model(x)
    assert y.layout.box() == layout.box()  # also where parts are uneven
    torch.testing.assert_close(y.full(), ChannelsLast()(whole), rtol=1e-12, atol=1e-12)
    return traffic.bytes_sent


def test_results_lie_as_what_was_transformed(run: Run) -> None:
    """Where axis d of the grid does not split dimension d, and points do not travel, either."""
    line = 16 * 2 * 4
    found = run(turned_model, (1, 2, 1), (2, 40, 4), 17, nprocs=2)
    assert found == [2 * 5 * line] * 2  # two layers of five modes, terms and modes
    found = run(turned_model, (1, 2, 1, 1), (2, 30, 8, 4), 11, nprocs=2)
    assert found == [2 * 4 * 3 * line] * 2


def alone_in_a_model(function: Callable[[Tensor], Any], grid: tuple[int, ...]) -> None:
    P = tessel.world().create_cartesian_topology_partition(grid)
    model = tessel.nn.distribute_module(Function(function), P, fallback="raise")
    model(tessel.spread(values((2, 4, 40), 1), P))


def shown_by_one(x: Tensor) -> Tensor:
    spectrum: Any = fft.rfft(x)
    out = into_zeros(x, 21, (slice(0, 3), spectrum[..., :3]))
    few: Any = out[..., :7]
    if tessel.world().rank == 0:  # nothing is sent
        assert "not computed yet" in repr(spectrum) and spectrum.requires_grad
        assert "not computed yet" in repr(few) and few.requires_grad and few.shape == (2, 4, 7)
    expected = fft.rfft(x.full())[..., :3]  # type: ignore[attr-defined]
    torch.testing.assert_close(few.full()[..., :3], expected)
    assert not few.full()[..., 3:].any()
    return spectrum.local.abs().sum()


def with_gradients(x: Tensor) -> Tensor:
    first, second = fft.rfft(x), fft.rfft(x)
    seen: list[Any] = []
    first.retain_grad()
    first.register_hook(seen.append)
    few = second[..., :3]
    few.retain_grad()
    loss = first[..., :3].abs().sum() + few.abs().sum()
    loss.backward(retain_graph=True)
    slope = torch.sgn(few.detach().full())  # type: ignore[attr-defined]
    torch.testing.assert_close(first.grad.full()[..., :3], slope)  # type: ignore[union-attr]
    torch.testing.assert_close(few.grad.full(), slope)  # type: ignore[union-attr]
    assert len(seen) == 1
    if tessel.world().size > 1:
        with pytest.raises(ValueError, match="before taking the first slice"):
            second.retain_grad()
    return x


def changed(x: Tensor) -> Tensor:
    """Changes of what it was made of come too late for a spectrum; those of views are refused."""
    y = x * 2
    spectrum, expected = fft.rfft(y), fft.rfft((x * 2).full())  # type: ignore[attr-defined]
    y.zero_()
    few: Any = spectrum[..., :3]
    torch.testing.assert_close(few.full(), expected[..., :3])
    few *= 2
    if tessel.world().size > 1:
        with pytest.raises(ValueError, match="changed in place through a view"):
            spectrum.abs()
    return x


def without_gradients(x: Tensor) -> Tensor:
    """Where a spectrum is finished says nothing of its gradient."""
    spectrum = fft.rfft(x)
    with torch.no_grad():
        apart = fft.rfft(x)
        assert not apart.requires_grad and not fft.rfft(x)[..., :2].requires_grad
        spectrum.abs()
    with torch.inference_mode():
        third = fft.rfft(x)
        few = fft.rfft(x)[..., :2]
    assert spectrum.abs().requires_grad and not apart.abs().requires_grad
    assert not third.abs().requires_grad
    return spectrum[..., :2].abs() + apart[..., :2].abs() + third[..., :2].abs() + few.abs()


def uses(grid: tuple[int, ...]) -> None:
    for function in (with_gradients, changed, without_gradients):
        alone_in_a_model(function, grid)
    if grid[-1] > 1:  # alone, zeros stay plain
        alone_in_a_model(shown_by_one, grid)


def test_uses_of_unfinished_spectra(run: Run) -> None:
    run(uses, (1, 1, 2), nprocs=2)
    run(uses, (1, 1, 1), nprocs=1)


@pytest.mark.parametrize("length", [1, 2, 7, 3000])
@pytest.mark.parametrize("norm", [None, "forward", "ortho"])
def test_waves_are_those_of_torch(length: int, norm: str | None) -> None:
    """In any parts of the points, some without any, for lengths of several blocks, too."""
    x, cuts = values((2, length, 3), 1), [0, length // 3, length // 3, length]
    modes = tuple(range(min(length, 5))) + ((length - 1,) if length > 5 else ())
    for kind in ("fft", "rfft", "ifft", "ihfft", "irfft", "hfft"):
        y = torch.complex(x, x.flip(1)) if kind in ("fft", "ifft", "irfft", "hfft") else x
        function = getattr(torch.fft, kind)
        parts = list(pairwise(cuts))
        if kind in ("irfft", "hfft"):
            n = max(1, 2 * length - 3)
            low = modes[: min(len(modes), n // 2 + 1)]
            z = torch.zeros_like(y)
            z[:, list(low)] = y[:, list(low)]
            expected = function(z, n=n, dim=1, norm=norm)
            ends = [0, n // 3, n]
            found = [
                Waves(kind, n, norm, low, (a, b)).synthesized(y[:, list(low)], 1)
                for a, b in pairwise(ends)
            ]
            got = torch.cat(found, 1)
        else:
            known = [k for k in modes if kind in ("fft", "ifft") or k <= length // 2]
            expected = function(y, dim=1, norm=norm)[:, known]
            waves = [Waves(kind, length, norm, tuple(known), each) for each in parts]
            got = sum(w.analyzed(y[:, slice(*w.points)], 1) for w in waves)  # type: ignore[misc]
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12 * scale)


def test_of_more_modes_points_travel(run: Run) -> None:
    """Where a product would take long."""
    line, most = 2 * 4, MOST_MODES
    (few, _), _ = run(sent, most_kept, (1, 1, 2), 4000, nprocs=2)
    (many, _), _ = run(sent, more_kept, (1, 1, 2), 4000, nprocs=2)
    assert few == 2 * 16 * line * most // 2 and many == 2 * 8 * line * 2000 // 2


def most_kept(x: Tensor) -> Tensor:
    return kept(x, MOST_MODES)


def more_kept(x: Tensor) -> Tensor:
    return kept(x, MOST_MODES + 1)
