"""Neural operators inside of `torch.compile(fullgraph=True)`: only the modes that they keep travel.

Tests `tensor/adoption.py`, `core/graph.py`, `nn/convert.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tessel
from compilers import SECONDS, needs_compiler
from parity import values
from tessel.tensor.adoption import FreshTensors
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
fft = torch.fft


class Spectral(nn.Module):
    """A layer with weights for its modes, and a grid of positions that it computes once."""

    def __init__(self, *modes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            values((3, 3, *modes), seed).to(torch.complex128) for seed in (1, 2)
        )
        self.positions: Tensor | None = None
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None or self.length != x.shape[-1]:
            self.positions = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
            self.length = x.shape[-1]
        return x + self.mixed(x).sin() + self.positions

    def mixed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Line(Spectral):
    """As models of one dimension are."""

    def mixed(self, x: Tensor) -> Tensor:
        spectrum, n = fft.rfft(x), x.shape[-1]
        out = torch.zeros(2, 3, n // 2 + 1, dtype=torch.complex128, device=x.device)
        out[:, :, :3] = torch.einsum("bix,iox->box", spectrum[:, :, :3], self.weights[0])
        return fft.irfft(out, n=n)


class Corners(Spectral):
    """As the first models of two dimensions."""

    def mixed(self, x: Tensor) -> Tensor:
        spectrum, (rows, columns) = fft.rfft2(x), x.shape[-2:]
        out = torch.zeros(2, 3, rows, columns // 2 + 1, dtype=torch.complex128)
        for at, weight in zip((slice(0, 2), slice(-2, None)), self.weights, strict=True):
            out[:, :, at, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, at, :3], weight)
        return fft.irfft2(out, s=(rows, columns))


class Shifted(Spectral):
    """As neuraloperator has it."""

    def mixed(self, x: Tensor) -> Tensor:
        spectrum = fft.fftshift(fft.rfftn(x, dim=(-2, -1)), dim=-2)
        at = (
            slice(None),
            slice(None),
            slice(spectrum.shape[2] // 2 - 1, spectrum.shape[2] // 2 + 1),
        )
        at = (*at, slice(None, 3))
        out = torch.zeros(spectrum.shape, device=x.device, dtype=torch.complex128)
        out[at] = torch.einsum("bixy,ioxy->boxy", spectrum[at], self.weights[0])
        return fft.irfftn(fft.fftshift(out, dim=-2), s=x.shape[-2:], dim=(-2, -1))


MODELS = {
    "line": (lambda: nn.Sequential(Line(3), Line(3)), (2, 3, 31)),
    "corners": (lambda: nn.Sequential(Corners(2, 3), Corners(2, 3)), (2, 3, 13, 8)),
    "shifted": (lambda: nn.Sequential(Shifted(2, 3), Shifted(2, 3)), (2, 3, 13, 8)),
}


def step(model: Any, x: Tensor, weights: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * weights).sum().backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [y.detach(), x.grad, *gradients]  # type: ignore[list-item]


def compiled(name: str, backend: str, without_gradients: bool = True) -> None:
    torch._dynamo.reset()
    make, shape = MODELS[name]
    whole, weights = values(shape, 3), values(shape, 4)
    y, gradient, *gradients = step(make(), whole, weights)
    size = tessel.world().size
    P = tessel.world().create_cartesian_topology_partition([1, 1, size, 1][: len(shape)])
    layout = tessel.Layout.balanced(P, shape)
    x, own = layout.local_part(whole), layout.local_part(weights)
    expected = [layout.local_part(y), layout.local_part(gradient), *gradients]
    model = tessel.nn.distribute_module(make(), P, fallback="raise")
    fast = torch.compile(model, fullgraph=True, backend=backend)
    sent = []
    for call in (fast, fast, model, model):
        found = step(call, x, own)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    if without_gradients:
        for call in (fast, model):
            with torch.no_grad():
                call(x)
                with count_traffic() as traffic:
                    torch.testing.assert_close(call(x), expected[0], rtol=1e-11, atol=1e-11)
            sent.append(traffic.bytes_sent)
        assert sent[0] == sent[1] and (sent[0] > 0) == (size > 1)
        for layer in model.modules():  # what was kept in a trace has no values
            kept = getattr(layer, "positions", None)
            assert kept is None or bool((kept >= 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_as_in_one_process(run: Run, name: str, nprocs: int) -> None:
    run(compiled, name, "aot_eager", nprocs=nprocs, timeout=SECONDS)


@pytest.mark.slow
@needs_compiler
def test_with_inductor(run: Run) -> None:
    run(compiled, "line", "inductor", False, nprocs=2, timeout=2 * SECONDS)


class Written(nn.Module):
    """Parts are written into tensors that it makes, which others know in some cases."""

    def __init__(self, make: Callable[[Tensor], tuple[Tensor, Any]]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        y, other = self.make(x)
        y[..., :4] = x[..., :4] * 2
        return y + x if other is None else (y + x) * other.sum()


def ones(x: Tensor) -> tuple[Tensor, Any]:
    return torch.ones(x.shape, dtype=x.dtype), None


def filled(x: Tensor) -> tuple[Tensor, Any]:
    return torch.full(tuple(x.shape), 3.0, dtype=x.dtype), None


def zeros(x: Tensor) -> tuple[Tensor, Any]:
    y = torch.zeros(x.shape, dtype=x.dtype)
    assert y.shape == x.shape and y.dim() == 3 and not y.is_complex()
    return y, None


def changed(x: Tensor) -> tuple[Tensor, Any]:
    y = torch.zeros(x.shape, dtype=x.dtype)
    y[..., 1:] = 5.0
    return y, None


def viewed(x: Tensor) -> tuple[Tensor, Any]:
    y = torch.zeros(x.shape, dtype=x.dtype)
    return y, y[:1, :1, :3]


def turned(x: Tensor) -> tuple[Tensor, Any]:
    y = torch.zeros(x.shape, dtype=x.dtype)
    return y, y.mT


def write_into(names: list[str], fallback: str) -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size])
    whole = values((2, 3, 8), 1)
    layout = tessel.Layout.balanced(P, whole.shape)
    for name in names:
        torch._dynamo.reset()
        make = globals()[name]
        model = tessel.nn.distribute_module(Written(make), P, fallback=fallback)
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(layout.local_part(whole))
        expected = layout.local_part(Written(make)(whole))
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_tensors_that_only_the_model_knows(run: Run) -> None:
    run(write_into, ["ones", "filled", "zeros"], "raise", nprocs=2, timeout=SECONDS)


def test_tensors_that_others_know(run: Run) -> None:
    """They are written to as a whole, so that views have the values, too."""
    run(write_into, ["viewed", "turned", "changed"], "gather", nprocs=2, timeout=SECONDS)


def test_what_is_known_of_fresh_tensors() -> None:
    with FreshTensors() as known:
        x, y, z = torch.zeros(3), torch.zeros_like(torch.ones(3)), torch.ones(2).new_ones(2)
        assert known.are_zero(x) and known.are_zero(y) and known.are_zero(z) is False
        assert x.shape == (3,) and x.dtype == torch.float32 and known.are_zero(x)
        x[:1]
        y[0] = 1
        w = z + 1
    assert [known.are_zero(each) for each in (x, y, z, w)] == [None] * 4
