"""Torch functions of spread tensors: values and gradients of one process, on CPUs and by NCCL.

Tests `tensor/call.py`, `tensor/rules/indexing.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from parity import values

sys.path.append(str(Path(__file__).parents[1] / "tensor"))  # behind tests/common
from spread_cases import Case
from tessel import Layout
from test_nccl_ranks import SECONDS, over_nccl
from test_spread import CASES, flat

SHARES = 3  # tests of all functions, each with some of them
TOLERANCE = 1e-9
EXCEPT = [
    *(name for name, case in CASES.items() if case.may_raise or case.may_gather),
    "rows that are replaced at a spread index",  # some twice, of which a GPU writes any
]


def results_of(case: Case, operands: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Any]:
    """Outputs, and gradients of a weighted sum of them."""
    torch.manual_seed(0)
    outputs = flat(case.does(*operands))
    total: Any = 0
    for k, each in enumerate(outputs):
        if isinstance(each, Tensor) and each.requires_grad:
            weights = values(tuple(each.shape), 50 + k).to(each.device)
            total = total + (each.abs() if each.is_complex() else each).mul(weights).sum()
    wanted = [each for each in leaves if each.requires_grad]
    if not isinstance(total, Tensor) or not wanted or not case.derives:
        return outputs
    grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    return [*outputs, *grads]


def differs(got: Any, expected: Any) -> str:
    """How a result differs, or nothing."""
    if isinstance(got, tessel.Tensor):
        got = got.full()
    if not isinstance(expected, Tensor):
        return "" if got == expected else f"{got} is not {expected}"
    if (got.shape, got.dtype, got.device) != (expected.shape, expected.dtype, expected.device):
        return (
            f"{got.device} {got.dtype} {tuple(got.shape)} is not {expected.device} {expected.dtype}"
        )
    close = torch.allclose(
        got.detach(), expected.detach(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
    )
    return "" if close else "other values"


def check_functions(device: str, share: int) -> int:
    """How many functions one process computes there; all are compared."""
    wrong, count = [], 0
    for name in [each for each in CASES if each not in EXCEPT][share::SHARES]:
        case = CASES[name]
        plain = [case.operand(k).to(device) for k in range(len(case.shapes))]
        alone = [each.clone().requires_grad_(each.is_floating_point()) for each in plain]
        try:
            expected = results_of(case, alone, alone)
        except RuntimeError:  # as with constants on the CPU beside operands on a GPU
            continue
        count += 1
        shape = plain[0].shape
        for dim in {0, len(shape) - 1} if shape else ():
            there = Layout.split(
                tessel.world(), shape, [0 if k == dim else None for k in range(len(shape))]
            )
            roots = [each.clone().requires_grad_(each.is_floating_point()) for each in plain]
            what = f"{name}, split along {dim}"
            try:
                found = results_of(case, [tessel.spread(roots[0], there), *roots[1:]], roots)
            except Exception as error:
                wrong.append(f"{what}: {type(error).__name__}: {error}")
                continue
            for k, pair in enumerate(zip(found, expected, strict=True)):
                if said := differs(*pair):
                    wrong.append(f"{what}: result {k}: {said}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)
    return count


@pytest.mark.parametrize("share", range(SHARES))
def test_on_cpus(run: Callable[..., list[Any]], share: int) -> None:
    assert min(run(check_functions, "cpu", share, nprocs=2, timeout=100)) > len(CASES) / SHARES / 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.limit(SECONDS + 20.0)
@pytest.mark.parametrize("share", range(SHARES))
def test_on_nccl(share: int) -> None:
    assert min(over_nccl(check_functions, 2, "cuda", share)) > len(CASES) / SHARES / 2
