"""Under autocast functions give the dtypes of one process, on workers with any number of values.

Tests `tensor/rules/products.py`, `tensor/rules/fourier.py`, `tensor/overlapped_convolution.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tessel
from parity import values
from tessel import Layout

Run = Callable[..., list[Any]]
Compute = Callable[[Any], Any]


def shaped(shape: tuple[int, ...], seed: int = 1) -> Any:
    return values(shape, seed).float()


FUNCTIONS: dict[str, tuple[Compute, tuple[int, ...]]] = {
    # of one index torch multiplies elements, which autocast does not cast
    "einsum": (lambda x: torch.einsum("bij,bjk->bik", x, shaped((x.shape[0], 5, 2))), (3, 4, 5)),
    "einsum of one index": (lambda x: torch.einsum("bij,j->bi", x, shaped((1,))), (3, 4, 1)),
    "linear": (lambda x: F.linear(x, shaped((3, 6)), shaped((3,))), (1, 4, 6)),
    "addmm": (lambda x: torch.addmm(shaped((4, 3)), x, shaped((5, 3))), (4, 5)),
    "baddbmm": (lambda x: torch.baddbmm(shaped((2, 4, 3)), x, shaped((2, 5, 3))), (2, 4, 5)),
    "rfft": (lambda x: torch.fft.rfft(x, dim=-1).abs(), (3, 4, 6)),
    "fftn": (lambda x: torch.fft.fftn(x, dim=(0, 1)).abs(), (3, 4, 6)),
    # by strips, of which some workers have none
    "convolution": (lambda x: F.conv1d(x, shaped((3, 2, 2)), stride=2), (1, 2, 64)),
    "wide convolution": (
        lambda x: F.conv2d(x, shaped((4, 4, 3, 3)), padding=1),
        (1, 4, 64, 64),
    ),
}


def check(name: str) -> None:
    compute, shape = FUNCTIONS[name]
    world = tessel.world()
    for dtype in (torch.float32, torch.bfloat16):
        plain = shaped(shape).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            expected = compute(plain)
        expected.float().square().sum().backward()
        for dim in range(len(shape)):
            grid = world.create_cartesian_topology_partition([world.size])
            cuts = [0 if k == dim else None for k in range(len(shape))]
            x = tessel.spread(plain.detach(), Layout.split(grid, shape, cuts)).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                found = compute(x)
            assert found.dtype == found.local.dtype == expected.dtype, (dim, dtype, found.dtype)
            found.float().square().sum().backward()
            for mine, theirs in ((found, expected), (x.grad, plain.grad)):
                error = (mine.full().detach() - theirs.detach()).abs().max()
                assert error <= 0.05 * theirs.detach().abs().max(), (dim, dtype, float(error))


@pytest.mark.parametrize("nprocs", [1, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes_are_those_of_one_process(run: Run, name: str, nprocs: int) -> None:
    run(check, name, nprocs=nprocs)
