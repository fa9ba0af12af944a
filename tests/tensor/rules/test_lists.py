"""Functions of lists of tensors do at each place what the function of one tensor does.

Tests `tensor/rules/lists.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import tessel
from parity import values

Run = Callable[..., list[Any]]
SHAPES = (7, 3), (4, 2)

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda xs, **each: optim.SGD(
        xs, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1, **each
    ),
    "Adam": lambda xs, **each: optim.Adam(xs, 0.1, amsgrad=True, weight_decay=0.1, **each),
    "AdamW": lambda xs, **each: optim.AdamW(xs, 0.1, maximize=True, **each),
    "RMSprop": lambda xs, **each: optim.RMSprop(xs, momentum=0.9, centered=True, **each),
    "Adagrad": lambda xs, **each: optim.Adagrad(xs, 0.1, **each),
    "Adadelta": lambda xs, **each: optim.Adadelta(xs, **each),
    "NAdam": lambda xs, **each: optim.NAdam(xs, **each),
    "RAdam": lambda xs, **each: optim.RAdam(xs, 0.1, **each),
    "Adamax": lambda xs, **each: optim.Adamax(xs, **each),
    "Rprop": lambda xs, **each: optim.Rprop(xs, **each),
    "ASGD": lambda xs, **each: optim.ASGD(xs, **each),
}


def spread(x: Tensor) -> tessel.Tensor:
    P = tessel.world()
    return tessel.spread(x, P.create_cartesian_topology_partition([P.size, *[1] * (x.dim() - 1)]))


def trained(name: str, is_spread: bool) -> list[Tensor]:
    """Two tensors, and a plain one, after some steps."""
    leaves: list[Any] = [values(shape, k) for k, shape in enumerate(SHAPES)]
    leaves = [(spread(x) if is_spread else x).requires_grad_() for x in leaves]
    leaves.append(torch.ones(3, dtype=torch.float64, requires_grad=True))
    optimizer = OPTIMIZERS[name](leaves, foreach=True)
    for step in range(4):
        optimizer.zero_grad()
        x, y, scale = leaves
        loss = (x.exp() * scale).sum() + (y**4).sum() + (x @ scale).square().sum()
        loss.backward()
        if step == 2:
            torch.nn.utils.clip_grad_norm_(leaves, 0.5, foreach=True)
        optimizer.step()
    return [x.full() if isinstance(x, tessel.Tensor) else x for x in leaves]


def largest_difference(name: str) -> float:
    with tessel.fallback("raise"):
        pairs = zip(trained(name, False), trained(name, True), strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_lists_of_spread_tensors(run: Run, name: str) -> None:
    assert max(run(largest_difference, name, nprocs=3)) < 1e-12


def functions(xs: list[Any], ys: list[Any]) -> list[Any]:
    changed = [x.clone() for x in xs]
    same = torch._foreach_add_(changed, ys, alpha=3)
    assert same is None or all(a is b for a, b in zip(same, changed, strict=True))
    torch._foreach_mul_(changed, [0.5, 2.0])
    torch._foreach_addcmul_(changed, xs, ys, torch.tensor([0.5, 3.0], dtype=torch.float64))
    torch._foreach_addcdiv_(changed, xs, torch._foreach_exp(ys), value=0.3)
    torch._foreach_maximum_(changed, -0.4)
    torch._foreach_minimum_(changed, ys)
    torch._foreach_lerp_(changed, ys, [0.1, 0.2])
    return [
        *changed,
        *torch._foreach_addcmul(xs, ys, ys, [2.0, 3.0]),
        *torch._foreach_maximum(xs, [0.1, 0.2]),
        *torch._foreach_minimum(xs, ys),
        *torch._foreach_norm(xs, 1),
        *torch._foreach_norm(xs, float("inf")),
        *torch._foreach_pow(2.0, xs),
        *torch._foreach_pow(torch._foreach_abs(xs), [2.0, 0.5]),
        *torch._foreach_sub(xs, 1.0),
        *torch._foreach_max(xs),
    ]


def compare_functions() -> None:
    xs, ys = ([values(shape, seed + k) for k, shape in enumerate(SHAPES)] for seed in (3, 6))
    expected = functions(xs, ys)
    for first, second in ((spread, spread), (spread, lambda y: y), (lambda x: x, spread)):
        if first is not spread:  # what is plain cannot be written to
            with tessel.fallback("raise"):
                found = torch._foreach_mul([first(x) for x in xs], [second(y) for y in ys])
            assert all(torch.equal(a.full(), x * y) for a, x, y in zip(found, xs, ys, strict=True))
            continue
        found = functions([first(x) for x in xs], [second(y) for y in ys])
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and torch.allclose(a.full(), b, 1e-12, 1e-12)
    with pytest.raises(RuntimeError, match="the same length, got"):
        torch._foreach_add([spread(x) for x in xs], [1.0])


def test_functions_of_lists(run: Run) -> None:
    run(compare_functions, nprocs=3)
