"""Kernels of one value, in the forms that torch computes fastest, beside torch's own.

Tests `tensor/pointwise_convolution.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tessel
from tessel.tensor import pointwise_convolution

# each: the shape of the input, outputs, settings, and dilations of the calls on two workers
CASES: list[tuple[tuple[int, ...], int, dict[str, Any], set[int]]] = [
    ((4, 3, 7, 5), 2, {"stride": (2, 3)}, {1}),
    ((2, 3, 1, 4), 2, {"stride": 2}, {1}),  # a worker has no outputs
    ((3, 9), 2, {"stride": 2}, {1}),  # one sample, without its dimension
    ((4, 256, 5, 2), 256, {"stride": (2, 1)}, {2}),
    ((4, 256, 9, 3), 257, {}, {2}),
    ((4, 4, 6), 4, {"groups": 2, "stride": 2}, set()),
    ((4, 3, 6, 5), 2, {"padding": 1, "stride": 2}, set()),
]


def compare(case: int) -> set[int]:
    """The result and gradients of both orders in parts, beside torch's; dilations of calls."""
    shape, outputs, settings, _ = CASES[case]
    num_dims = 2 if len(shape) == 4 else 1
    split = [1] * len(shape)
    split[len(shape) - num_dims] = 2
    P = tessel.world().create_cartesian_topology_partition(split)
    generator = torch.Generator().manual_seed(case)
    inputs = shape[-num_dims - 1] // settings.get("groups", 1)
    kernel = torch.randn(outputs, inputs, *[1] * num_dims, generator=generator) / inputs**0.5
    bias, whole = torch.randn(outputs, generator=generator), torch.randn(shape, generator=generator)
    asked = pointwise_convolution._is_for_onednn
    seen: set[int] = set()

    def noted(x: torch.Tensor, weight: torch.Tensor) -> bool:
        seen.add(2 if asked(x, weight) else 1)
        return asked(x, weight)

    convolve: Callable[..., Any] = F.conv2d if num_dims == 2 else F.conv1d
    found = []
    pointwise_convolution._is_for_onednn = noted
    try:
        for spreads in (False, True):
            x: Any = tessel.spread(whole, P) if spreads else whole.clone()
            given = [x.requires_grad_(), *(p.clone().requires_grad_() for p in (kernel, bias))]
            y = convolve(*given, **settings)
            first = torch.autograd.grad((y.sin() * y).sum(), given, create_graph=True)
            second = torch.autograd.grad(sum((g * g).sum() for g in first), given)
            found.append([y, *first, *second])
    finally:
        pointwise_convolution._is_for_onednn = asked
    for ours, theirs in zip(found[1], found[0], strict=True):
        ours = ours.full() if isinstance(ours, tessel.Tensor) else ours
        scale = float(theirs.abs().max())  # float32, of which torch sums up to a thousand
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=1e-3, atol=2e-5)
    return seen


@pytest.mark.parametrize("case", range(len(CASES)))
def test_it_is_the_convolution(run: Callable[..., Any], case: int) -> None:
    assert set().union(*run(compare, case, nprocs=2)) == CASES[case][3]
