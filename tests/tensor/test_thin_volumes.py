"""Volumes that torch convolves quickly in another order of their dimensions.

Tests `tensor/thin_volumes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tessel
from tessel.tensor import thin_volumes

Run = Callable[..., list[Any]]
THIN = (1, 8, 4, 48, 56)  # 8·4·48 is small, 8·48·56 is not


def test_which_are_turned() -> None:
    assert thin_volumes.order_for(torch.empty(THIN), 1) == (1, 2, 0)
    assert thin_volumes.order_for(torch.empty(1, 8, 48, 4, 56), 1) == (0, 2, 1)
    for shape in ((1, 8, 48, 56, 4), (2, 8, 4, 48, 56), (1, 64, 40, 48, 56), (1, 1, 4, 8, 8)):
        assert thin_volumes.order_for(torch.empty(shape), 1) is None
    assert thin_volumes.order_for(torch.empty(THIN), 2) is None
    assert thin_volumes.order_for(torch.empty(THIN).double(), 1) is None
    assert thin_volumes.order_for(torch.empty(8, 4, 48, 56), 1) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
def test_turning_back(order: Any) -> None:
    x = torch.randn(1, 2, 3, 4, 5)
    turned = thin_volumes.turned(x, order)
    assert tuple(turned.shape[2:]) == thin_volumes.in_order((3, 4, 5), order)
    back = thin_volumes.turned_back(turned, order)
    assert back.equal(x) and back.is_contiguous()


SETTINGS = [
    {"padding": (1, 0, 2)},
    {"stride": (1, 2, 1), "padding": (1, 1, 0), "dilation": (1, 1, 2)},
]


def compare(settings: dict[str, Any], seed: int) -> int:
    """A volume in slabs, beside torch: the result and gradients; how many parts were turned."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 1, 1])
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(1, 8, 9, 48, 56, generator=generator)
    kernel = torch.randn(4, 8, 3, 1, 2, generator=generator)
    bias = torch.randn(4, generator=generator)
    count = 0
    turned = thin_volumes.turned_back

    def counted(*args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return turned(*args)

    from tessel.tensor.rules import convolution

    found = []
    convolution.turned_back = counted  # type: ignore[attr-defined]
    try:
        for spreads in (False, True):
            x: Any = tessel.spread(whole, P) if spreads else whole.clone()
            given = [each.clone().requires_grad_() for each in (kernel, bias)]
            y = F.conv3d(x.requires_grad_(), *given, **settings)
            loss = (y.sin() * y).sum()
            first = torch.autograd.grad(loss, [x, *given], create_graph=True)
            second = torch.autograd.grad(sum((g * g).sum() for g in first), [x, *given])
            found.append([y, *first, *second])
    finally:
        convolution.turned_back = turned  # type: ignore[attr-defined]
    for ours, theirs in zip(found[1], found[0], strict=True):
        ours = ours.full() if isinstance(ours, tessel.Tensor) else ours
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=1e-3, atol=2e-5)
    return count


@pytest.mark.parametrize("settings", SETTINGS)
def test_they_give_what_torch_gives(run: Run, settings: Any) -> None:
    assert all(count >= 1 for count in run(compare, settings, 3, nprocs=2, timeout=60))
