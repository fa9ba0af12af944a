"""Calls that models seldom make: a plain first operand, numbers as tensors, nothing to compute.

Tests `tensor/call.py`, `tensor/contractions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from parity import values
from tessel import Layout
from test_spread import Run, Verdict, derived, flat, partition

# a function, the shapes of its operands, and which of them are spread, along which dimension
Rare = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[int, int]]


def targets(x: Tensor) -> Tensor:
    """Numbers of classes up to 3."""
    return (x.detach().abs() * 7).long() % 3


def written(x: Tensor, key: Any, value: Tensor) -> Tensor:
    y = x + 0
    y[key] = value
    return y


CASES: dict[str, Rare] = {
    # torch's derivative refuses strides that the gradient of an empty part may have
    "view_as_real": (
        lambda x: torch.view_as_real(x.to(torch.complex128)).sum(-1),
        ((2, 3),),
        {0: 0},
    ),
    "diff of order 0": (lambda x, y: torch.diff(x, 0, 0, append=y), ((4, 3), (2, 3)), {1: 0}),
    "diff of order 0 with an end": (lambda x: x.diff(0, 0, x[:1]), ((4, 3),), {0: 0}),
    "a number at indices": (
        lambda x, y: x.index_fill(-1, torch.tensor([0, 2, 4]), y),
        ((5, 5), ()),
        {0: 1},
    ),
    "a number at indices in place": (
        lambda x, y: (x + 0).index_fill_(0, torch.tensor([3, 0]), y * 2),
        ((5, 2), ()),
        {0: 0},
    ),
    # numbers are taken first: the result is (rows, index), not (index, rows) as in NumPy
    "a number, rows and an index": (
        lambda x, y: written(x, (0, slice(None), torch.tensor([2, 0, 1])), y),
        ((2, 3, 3), (3, 3)),
        {0: 1},
    ),
    "a number, rows and a square index": (
        lambda x, y: written(x, (0, slice(None), torch.tensor([[0, 1], [1, 0]])), y),
        ((2, 3, 2), (3, 2, 2)),
        {0: 1},
    ),
    "prelu of a number": (F.prelu, ((), (1,)), {1: 0}),
    "products of whole numbers": (
        lambda x, y: torch.addmv(targets(x), targets(y), targets(x), beta=0.4, alpha=1.6),
        ((4,), (4, 4)),
        {1: 0},
    ),
    "covariances of whole numbers": (lambda x: torch.cov(targets(x)), ((2, 6),), {0: 1}),
    "angles to what is broadcast": (
        lambda x, y: F.cosine_similarity(x, y, -2),
        ((1, 2, 3), (2, 1, 3)),
        {0: 1, 1: 2},
    ),
    # its result does not depend on q, of which torch's own gradient is None
    "quantiles between two": (
        lambda x, q: x.quantile(q.sigmoid(), 1, interpolation="midpoint") + 0 * q.sum(),
        ((2, 5), (3,)),
        {0: 0},
    ),
    "cross_entropy with a spread weight": (
        lambda x, y, w: F.cross_entropy(x, y.softmax(1), w),
        ((2, 3), (2, 3), (3,)),
        {2: 0},
    ),
    "one group of one sample": (
        lambda x, w: F.group_norm(x, 1, w),  # of which some workers have one place
        ((1, 4, 4), (4,)),
        {0: 2},
    ),
    "determinants of no entries": (torch.linalg.slogdet, ((3, 0, 0),), {0: 0}),
    "tolerances": (
        lambda x, y: torch.linalg.pinv(x, rtol=y.detach().abs() / 1e6),
        ((3, 2, 2), (3,)),
        {0: 0},
    ),
    "one variance": (torch.cov, ((1, 6),), {0: 1}),
    "one correlation": (torch.corrcoef, ((1, 6),), {0: 1}),
    "multi_margin_loss of one sample": (
        lambda x, y: F.multi_margin_loss(x, targets(y)),
        ((5,), (1,)),
        {1: 0},
    ),
    "multi_margin_loss with a spread weight": (
        lambda x, w: F.multi_margin_loss(x, torch.tensor([0, 4]), weight=w.detach()),
        ((2, 5), (5,)),
        {1: 0},
    ),
    "lengths of ctc_loss": (
        lambda x, n: F.ctc_loss(
            x.log_softmax(2),
            torch.tensor([[1, 2], [2, 1]]),
            (n.detach() * 0).long() + 5,
            torch.tensor([2, 1]),
        ),
        ((5, 2, 3), (2,)),
        {1: 0},
    ),
    "pad of no samples": (lambda x: F.pad(x, (0, 2, 1, 1), "reflect"), ((0, 2, 3, 3),), {0: 1}),
    "a pool whose stride is ()": (
        lambda x: F.avg_pool2d(x, 2, ()) + F.max_pool2d(x, 2, ()),
        ((1, 2, 6, 4),),
        {0: 2},
    ),
    "take_along_dim from the end": (
        lambda x: torch.take_along_dim(x, torch.tensor([[-1, 0, -4]]), 1),
        ((3, 4),),
        {0: 1},
    ),
}
for _D in (1, 2, 3):
    CASES[f"max_unpool{_D}d of a plain input"] = (
        lambda x, y, D=_D: getattr(F, f"max_unpool{D}d")(
            x, getattr(F, f"max_pool{D}d")(y, 2, return_indices=True)[1], 2
        ),
        ((2, *[2] * _D), (2, *[4] * _D)),
        {1: 1},
    )


def check_rare_calls() -> list[str]:
    verdict, workers = Verdict(), tessel.world().size
    for name, (does, shapes, split) in CASES.items():
        found = []
        for spreads in (False, True):
            leaves = []
            for k, shape in enumerate(shapes):
                x = values(shape, 3 + k).clone()
                if spreads and k in split:
                    grid = partition([workers if d == split[k] else 1 for d in range(len(shape))])
                    x = tessel.spread(x, Layout.balanced(grid, shape))
                leaves.append(x.requires_grad_())
            outputs = flat(does(*leaves))
            found.append([*outputs, *derived(outputs, leaves, 1)])
        assert len(found[0]) == len(found[1]), name
        for k, (expected, got) in enumerate(zip(*found, strict=True)):
            verdict.compare(f"{name}, {k}", got, expected)
    return verdict.wrong


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_rare_calls(run: Run, nprocs: int) -> None:
    for wrong in run(check_rare_calls, nprocs=nprocs):
        assert not wrong, "\n".join(wrong)


def check_longer_operands() -> None:
    x = tessel.spread(values((4, 1), 3), partition([3, 1]))
    for y in (values((4, 5), 4), tessel.spread(values((4, 5), 4), partition([3, 1]))):
        for call in (Tensor.sub_, Tensor.clamp_, Tensor.copy_):
            with pytest.raises(RuntimeError, match=r"shape \[4, 1\] doesn't match .* \[4, 5\]"):
                call(x, y)
    assert torch.equal(x.full(), values((4, 1), 3))


def test_no_operand_makes_a_tensor_longer(run: Run) -> None:
    run(check_longer_operands, nprocs=3)


def check_no_derivative() -> None:
    x = tessel.spread(values((2, 3), 3), partition([3, 1]))  # nothing of it on the last worker
    w = values((3,), 4).requires_grad_()
    with pytest.raises(RuntimeError, match="'weight' is not implemented"):
        F.multi_margin_loss(x, torch.tensor([0, 2]), weight=w)
    for train in (False, True):
        with pytest.raises(RuntimeError, match="not differentiable with respect to running"):
            F.batch_norm(x, w, w, training=train)


def test_what_has_no_derivative_raises_everywhere(run: Run) -> None:
    run(check_no_derivative, nprocs=3)


def beside(function: Callable[..., Tensor], constants: Any, x: Tensor) -> Tensor:
    return function(x, *constants)


def check_torch_func() -> list[str]:
    """A spread tensor by which a transform derives, beside others by which it does not."""
    verdict, workers = Verdict(), tessel.world().size
    x, m, t = values((4, 6), 3), values((4, 6), 4), torch.tensor([1, 5, 0, 3])
    functions: dict[str, Callable[..., Tensor]] = {
        "cross_entropy": lambda x, m, t: F.cross_entropy(x, t, reduction="sum"),
        "gather": lambda x, m, t: x.gather(1, t[:, None]).square().sum(),
        "index": lambda x, m, t: x[:, t].pow(3).sum(),
        "where": lambda x, m, t: torch.where(m > 0, x, m).square().sum(),
        "mask": lambda x, m, t: x[m > 0].square().sum(),
        "product": lambda x, m, t: (m.mT @ x).square().sum() + (m * x).sum().square(),
        "cat": lambda x, m, t: torch.cat([m * 2, x]).square().sum(),
    }
    for split in range(2):
        grid = partition([workers if d == split else 1 for d in range(2)])
        constants = tessel.spread(m, grid), tessel.spread(t, partition([workers]))
        y = tessel.spread(x, grid)
        for name, f in functions.items():
            expected = torch.func.grad(f)(x, m, t)
            got = torch.func.grad(partial(beside, f, constants))(y)
            verdict.compare(f"{name}, {split}", got, expected)
    one = torch.tensor(2.0, dtype=torch.float64)  # plain, as what comes of the rest of a program
    _, pull = torch.func.vjp(F.mse_loss, x, m)
    _, pull_spread = torch.func.vjp(F.mse_loss, y, m)
    for expected, got in zip(pull(one), pull_spread(one), strict=True):
        verdict.compare("mse_loss", got, expected)
    return verdict.wrong


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_torch_func_beside_constants(run: Run, nprocs: int) -> None:
    for wrong in run(check_torch_func, nprocs=nprocs):
        assert not wrong, "\n".join(wrong)


def check_negative_eps() -> None:
    x = tessel.spread(values((2, 6, 4), 3), partition([1, 3, 1]))
    for call in (
        lambda: F.layer_norm(x[:, :2], (2, 4), eps=-0.5),  # nothing of it on the last worker
        lambda: F.rms_norm(x[:, :2], (2, 4), eps=-0.5),
        lambda: F.group_norm(x, 2, eps=-0.5),
    ):
        with pytest.raises(ValueError, match="eps must not be negative"):
            call()


def test_negative_eps(run: Run) -> None:
    run(check_negative_eps, nprocs=3)
