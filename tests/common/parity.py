"""Parity: a layer over a partition against torch's own layer in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

import tessel
from tessel import Layout, Partition

TOLERANCE = 1e-12
Make = Callable[..., torch.nn.Module]


def group(size: int) -> Partition:
    """The group of this worker, of contiguous ones."""
    everyone = tessel.world().size
    groups = [
        tessel.world().create_partition_inclusive(range(start, start + size))
        for start in range(0, everyone, size)
    ]
    return next(each for each in groups if each.active)


class OnGrid:
    """Where the tensor of a case lies."""

    grid: tuple[int, ...]
    shape: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...] | None

    @property
    def workers(self) -> int:
        return prod(self.grid)

    def partition(self) -> Partition:
        """The first workers, as many as the case needs, on its grid."""
        row = tessel.world().create_partition_inclusive(range(self.workers))
        return row.create_cartesian_topology_partition(self.grid)

    def layout(self) -> Layout:
        if self.lengths is None:
            return Layout.balanced(self.partition(), self.shape)
        return Layout.from_lengths(self.partition(), self.lengths)


@dataclass(frozen=True)
class Case(OnGrid):
    """A layer by its name, its arguments, the grid, the global shape, and the parts if uneven."""

    name: str
    args: tuple[Any, ...]
    grid: tuple[int, ...]
    shape: tuple[int, ...]
    settings: tuple[tuple[str, Any], ...] = ()
    lengths: tuple[tuple[int, ...], ...] | None = None
    seed: int = 0
    second: bool = True

    def torch_layer(self) -> torch.nn.Module:
        torch.default_generator.manual_seed(self.seed)  # torch.manual_seed sees to all devices
        return getattr(torch.nn, self.name)(*self.args, **dict(self.settings)).double()

    def layer(self) -> torch.nn.Module:
        make = getattr(tessel.nn, f"Distributed{self.name}")
        return make(self.partition(), *self.args, **dict(self.settings)).double()


def values(shape: Sequence[int], seed: int) -> Tensor:
    """Random values, the same on every worker."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


def check_case(case: Case) -> None:
    """Raise AssertionError on the worker whose outputs or gradients differ from one process."""
    layout = case.layout()
    alone, spread = case.torch_layer(), case.layer()
    if list(alone.state_dict()):
        spread.load_state_dict(alone.state_dict())
    x = values(case.shape, case.seed)
    try:
        check_layers(alone, spread, x, layout, case.second)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


def check_layers(
    alone: torch.nn.Module,
    spread: torch.nn.Module,
    x: Tensor,
    layout: Layout,
    second: bool = True,
    tolerance: float = TOLERANCE,
) -> None:
    """Outputs, gradients of the input and of all parameters, and those of second order."""
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).clone().requires_grad_()
    expected, got = first(alone(whole)), first(spread(part))
    if not layout.partition.active:
        return
    out = layout.resized(expected.shape)
    close("output", got, out.local_part(expected), tolerance)
    weights = values(expected.shape, 99)
    for order in (1, 2) if second else (1,):
        expected = vjps(expected, weights, [whole, *alone.parameters()], order)
        got = vjps(got, out.local_part(weights), [part, *spread.parameters()], order)
        names = ["input", *(name for name, _ in alone.named_parameters())]
        for name, a, b in zip(names, got, expected, strict=True):
            b = layout.local_part(b) if name == "input" else b
            close(f"gradient of order {order} of the {name}", a, b, tolerance)
        expected, got, weights, out = expected[0], got[0], x, layout


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def vjps(y: Tensor, weights: Tensor, inputs: list[Tensor], order: int) -> list[Tensor]:
    """The gradients of Σ w·(y + y²), zero where there is none."""
    if not weights.numel() and not y.numel():
        weights = weights.reshape(y.shape)
    loss = (weights * (y + y.square())).sum()
    if not loss.requires_grad:
        return [torch.zeros_like(each) for each in inputs]
    grads = torch.autograd.grad(loss, inputs, create_graph=order == 1, allow_unused=True)
    return [
        torch.zeros_like(each) if grad is None else grad
        for each, grad in zip(inputs, grads, strict=True)
    ]


def close(what: str, got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    got, expected = got.detach(), expected.detach()
    if got.numel() == expected.numel() == 0:
        return
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} is not {tuple(expected.shape)}"
    if torch.equal(got, expected):
        return
    error = (got - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    assert error <= tolerance * scale, f"{what} is wrong by {error:.3g}"


def check_cases(cases: Sequence[Case]) -> int:
    """Check all cases, on the workers that each of them needs; how many."""
    for case in cases:
        check_case(case)
    return len(cases)
