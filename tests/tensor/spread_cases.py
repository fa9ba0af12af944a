"""Functions for `test_spread.py`: each with the shapes of its operands.

Tests `tensor/rules/products.py`, `tensor/rules/reductions.py`, `tensor/rules/batched.py`,
`tensor/rules/diagonals.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parity import values

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A function, and what it is called with.

    Attributes:
        does: the function of the operands.
        shapes: of the operands; the first lies in all ways, the others in some.
        make: makes an operand from its shape and number, by default real numbers around zero.
        order: up to which order derivatives are compared; 1 where torch itself has no second.
        plain_others: whether all operands but the first are plain tensors.
        may_gather: whether operands may be gathered, with a warning.
        may_raise: whether it may be refused.
    """

    does: Callable[..., Any]
    shapes: tuple[Shape, ...] = ((4, 5, 6),)
    make: Callable[[Shape, int], Tensor] | None = None
    order: int = 2
    derives: bool = True
    plain_others: bool = False
    may_gather: bool = False
    may_raise: bool = False
    tolerance: float = 1e-11

    def operand(self, number: int) -> Tensor:
        shape = self.shapes[number]
        return values(shape, 3 + number) if self.make is None else self.make(shape, number)


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without torch's own warnings, of deprecated arguments and of sizes that differ."""

    def call(*operands: Any, **settings: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="torch")
            warnings.filterwarnings("ignore", message="Using a target size|reduction: 'mean'")
            warnings.filterwarnings(
                "ignore",
                message="size_average and reduce|Implicit dimension|.*chain_matmul|.*upsample",
            )
            return function(*operands, **settings)

    return call


def whole_numbers(shape: Shape, number: int) -> Tensor:
    """With many ties."""
    return (values(shape, 3 + number) * 2).round()


def positive(shape: Shape, number: int) -> Tensor:
    return values(shape, 3 + number).abs() + 0.5


def equal(shape: Shape, number: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def lowest(shape: Shape, number: int) -> Tensor:
    """As scores that are masked."""
    return torch.full(shape, torch.finfo(torch.float64).min, dtype=torch.float64)


def zeros_before(shape: Shape, number: int) -> Tensor:
    """Zeros in the first half of the first dimension, which may be all that a worker has."""
    x = values(shape, 3 + number).clone()
    x[: shape[0] // 2] = 0
    return x


def masked_before(shape: Shape, number: int) -> Tensor:
    """-inf in the first half of the first dimension, which may be all that a worker has."""
    x = values(shape, 3 + number).clone()
    x[: shape[0] // 2] = -float("inf")
    return x


def truths(shape: Shape, number: int) -> Tensor:
    return values(shape, 3 + number) > 0


REDUCTIONS = {
    "masked sums": Case(
        lambda x, y: (
            *(torch.masked.sum(x, 0, mask=y > 0), torch.masked.mean(x, (0, 2), mask=y > 0)),
            *(torch.masked.var(x, 1, mask=y > 0), torch.masked.norm(x, 2.0, 2, mask=y > 0)),
            *(torch.masked.amax(x, mask=y > 0), torch.masked.logsumexp(x, -1, mask=y > 0)),
        ),
        ((4, 5, 6), (4, 5, 6)),
    ),
    "masked softmax": Case(
        lambda x, y: (
            *(torch.masked.softmax(x, 0, mask=y > 0), torch.masked.log_softmax(x, 2, mask=y > 0)),
            *(torch.masked.cumsum(x, 1, mask=y > 0), torch.masked.normalize(x, 2.0, 0, mask=y > 0)),
        ),
        ((4, 5, 6), (4, 5, 6)),
    ),
    "checks of distributions": Case(
        # torch's compiler, once used, switches checks off in its process unless they are asked for
        lambda x: torch.distributions.Normal(x, x.square() + 1, validate_args=True).log_prob(x * 2)
    ),
    "truths for checks": Case(lambda x: (torch._is_all_true(x > 9), torch._is_any_true(x > 0))),
    "sum": Case(lambda x: x.sum()),
    "sum of one": Case(lambda x: x.sum(1)),
    "sum of two": Case(lambda x: x.sum((0, -1), keepdim=True)),
    "mean": Case(lambda x: x.mean((0, 2))),
    "nansum": Case(lambda x: torch.nansum(torch.where(x > 0, x, float("nan")), 1)),
    "nanmean": Case(lambda x: torch.nanmean(torch.where(x > -0.5, x, float("nan")), 2)),
    **{
        f"{name} over {dims}": Case(lambda x, name=name, dims=dims: getattr(x, name)(dims))
        for name in ("amax", "amin", "logsumexp", "var", "std", "norm_dims")
        for dims in (0, -1, (0, 2), (0, 1, 2))
        if name != "norm_dims"
    },
    "amax of ties": Case(lambda x: x.amax((0, 1)), make=whole_numbers),
    "amin of ties": Case(lambda x: x.amin(2, keepdim=True), make=whole_numbers),
    "max of ties": Case(lambda x: x.max() + x.min(), make=whole_numbers),
    "max": Case(lambda x: x.max()),
    "min": Case(lambda x: torch.min(x)),
    **{
        f"{name} along {dim}": Case(lambda x, name=name, dim=dim: tuple(getattr(x, name)(dim)))
        for name in ("max", "min")
        for dim in (0, 1, -1)
    },
    "max with keepdim": Case(lambda x: tuple(torch.max(x, dim=1, keepdim=True))),
    "max along of ties": Case(lambda x: tuple(x.max(1)), make=whole_numbers),
    "argmax": Case(lambda x: x.argmax()),
    "argmax with keepdim": Case(lambda x: (x.argmax(keepdim=True), x.argmin(keepdim=True))),
    "softmax of no named dimension": Case(lambda x: (quiet(F.softmax)(x), quiet(F.log_softmax)(x))),
    **{
        f"reductions of nothing in {shape}": Case(
            lambda x: (
                *(x.prod(), (x > 0).all(), (x > 0).any(1), x.sum(0), x.norm(), x.logsumexp(0)),
                *(x.prod(1), x.norm(dim=1), torch.linalg.vector_norm(x, 3, dim=0)),
            ),
            (shape,),
        )
        for shape in ((0, 4), (4, 0))
    },
    "argmin along": Case(lambda x: (x.argmin(0), x.argmin(1), x.argmin(2, keepdim=True))),
    # torch 2.11 has no derivative of it
    "aminmax": Case(lambda x: tuple(torch.aminmax(x, dim=1)), derives=False),
    "all and any": Case(lambda x: ((x > -2).all(), (x > 1).any(1), (x > 0).all(2), (x > 9).any())),
    "prod": Case(lambda x: (x.prod(), x.prod(1), x.prod(2, keepdim=True))),
    "count_nonzero": Case(lambda x: (x > 0).count_nonzero(1)),
    "var without correction": Case(lambda x: torch.var(x, (0, 1), correction=0, keepdim=True)),
    "var of all": Case(lambda x: torch.var(x) + torch.std(x, unbiased=False)),
    "var_mean": Case(lambda x: torch.var_mean(x, 1)),
    "std_mean": Case(lambda x: torch.std_mean(x, (0, 2), keepdim=True)),
    **{
        f"norm {p}": Case(lambda x, p=p: torch.linalg.vector_norm(x, p, dim=(0, 1)), make=positive)
        for p in (1, 2, 3, float("inf"), -float("inf"))
    },
    "norm 0": Case(lambda x: torch.linalg.vector_norm(x, 0, dim=(0, 1)), make=whole_numbers),
    "norms of zeros": Case(
        lambda x: (
            *(torch.linalg.vector_norm(x, p, dim=(0, 1)) for p in (2, 3, 4.5)),
            *(x.norm(dim=0), x.norm(), F.normalize(x, dim=0)),
        ),
        make=zeros_before,
    ),
    "std of equal values": Case(
        lambda x: (x.std(0), x.std((0, 1, 2)), *torch.std_mean(x, -1, keepdim=True)), make=equal
    ),
    # of squares that are too large for halves
    "moments of halves": Case(
        lambda x: ((300 * x.half()).std(0), *torch.std_mean((300 * x).half(), (1, 2))),
        derives=False,
        tolerance=1e-2,  # 16 bits
    ),
    "logsumexp of masked values": Case(
        lambda x: (x.logsumexp(0), x.logsumexp((0, 1), True), x.softmax(0)), make=masked_before
    ),
    "amax of the lowest numbers": Case(
        lambda x: (x.amax(0), x.amin((1, 2), True), x.max()), make=lowest
    ),
    "places in no dimension": Case(
        lambda x: (
            *(*x.max(0), *x.min(-1, True), x.argmax(0), x.argmin(-1, True)),
            *(*x.median(0), *x.mode(), *x.topk(1), *x.kthvalue(1, 0)),
            *(x.quantile(0.5, 0), x.flip(0)),
        ),
        ((),),
    ),
    "truths": Case(
        lambda x: (
            *(x.prod(0, dtype=torch.bool), x.prod(2), torch.diff(x, dim=1)),
            torch.diff(x, n=2, dim=0),
        ),
        make=truths,
    ),
    "norm of all": Case(lambda x: x.norm() + torch.norm(x, 1)),
    "norm along": Case(lambda x: x.norm(dim=1, keepdim=True) + x.norm(2, 2, True)),
    "dist": Case(lambda x, y: torch.dist(x, y), ((4, 5), (4, 5))),
    "normalize": Case(lambda x: F.normalize(x, dim=0) + F.normalize(x, p=1.0, dim=2)),
    **{
        f"{name} along {dim}": Case(lambda x, name=name, dim=dim: getattr(F, name)(x, dim=dim))
        for name in ("softmax", "log_softmax", "softmin")
        for dim in (0, 1, -1)
    },
    "softmax with type": Case(
        lambda x: (
            torch.softmax(x.float(), 1, dtype=torch.float64),
            x.float().softmax(0, torch.float64),
            torch.log_softmax(x.float(), -1, torch.float64),
            torch.special.softmax(x.long(), 0, torch.float64),
        )
    ),
    # whose sum of exponentials is too large for a half
    "softmax of many halves": Case(
        lambda x: x.half().expand(70_000, 3).softmax(0)[::7_000] * 1e4,
        ((1, 3),),
        derives=False,
        tolerance=1e-2,  # 16 bits
    ),
    **{
        f"{name} along {dim}": Case(lambda x, name=name, dim=dim: getattr(x, name)(dim))
        for name in ("cumsum", "cumprod", "logcumsumexp")
        for dim in (0, 1, -1)
    },
    "cumprod with zeros": Case(
        lambda x: ((x * (x.abs() > 0.5)).cumprod(0), (x * (x.abs() > 0.5)).cumprod(2))
    ),
    "cumsum of vectors": Case(
        lambda x: (
            x.cumsum(0),
            x.cumsum(0, dtype=torch.complex128).abs(),
            (x.detach() > 0).cumsum(0),
            (10 * x.detach()).to(torch.int32).cumsum(0, dtype=torch.int32),
            (10 * x.detach()).int().cumprod(0),
            torch.cumsum(input=x, dim=-1),
        ),
        ((7,),),
    ),
    "cumsum in place": Case(
        lambda x: ((x * 1).cumsum_(1), (x * 1).cumprod_(0), (x * 1).renorm_(2, -1, 1.0))
    ),
    "cummax": Case(lambda x: tuple(x.cummax(1))),
    "cummin": Case(lambda x: tuple(torch.cummin(x, dim=0))),
    "sort": Case(lambda x: (*x.sort(), *torch.sort(x, dim=0, descending=True))),
    "argsort": Case(lambda x: (x.argsort(1), torch.argsort(x, dim=-1, descending=True))),
    "msort": Case(lambda x: torch.msort(x)),
    "topk": Case(lambda x: (*x.topk(2), *torch.topk(x, 3, dim=0, largest=False))),
    "kthvalue": Case(lambda x: tuple(x.kthvalue(2, 1))),
    "median": Case(lambda x: (x.median(), *x.median(1), *x.median(dim=0, keepdim=True))),
    "nanmedian": Case(lambda x: (x.nanmedian(), *x.nanmedian(1), *torch.nanmedian(x, dim=-1))),
    "mode": Case(lambda x: tuple(x.mode(1)), make=whole_numbers),
    "diff": Case(lambda x: x.diff() + 0),
    "diff with ends": Case(
        lambda x, y: (torch.diff(x, prepend=y), torch.diff(x, append=y, dim=2, prepend=y)),
        ((4, 5, 6), (4, 5, 2)),
    ),
    "diff along": Case(lambda x: torch.diff(x, n=2, dim=1)),
    "glu": Case(lambda x: F.glu(x) + F.glu(x, -1)),
}

PRODUCTS = {
    "matmul": Case(lambda a, b: a @ b, ((4, 5), (5, 6))),
    "batched matmul": Case(lambda a, b: torch.matmul(a, b), ((3, 4, 5), (3, 5, 6))),
    "broadcast matmul": Case(lambda a, b: a @ b, ((3, 4, 5), (5, 6))),
    "matmul of more dims": Case(lambda a, b: a @ b, ((2, 1, 4, 5), (3, 5, 2))),
    "matrix and vector": Case(lambda a, b: a @ b, ((4, 5), (5,))),
    "vector and matrix": Case(lambda a, b: a @ b, ((5,), (5, 6))),
    "vectors": Case(lambda a, b: a @ b + torch.dot(a, b), ((7,), (7,))),
    "vector and batch": Case(lambda a, b: torch.matmul(a, b), ((5,), (3, 5, 4))),
    "mm": Case(lambda a, b: torch.mm(a, b) + a.mm(b), ((4, 5), (5, 6))),
    "mv": Case(lambda a, b: torch.mv(a, b), ((4, 5), (5,))),
    "bmm": Case(lambda a, b: torch.bmm(a, b), ((3, 4, 5), (3, 5, 6))),
    "outer": Case(lambda a, b: torch.outer(a, b), ((5,), (7,))),
    "inner": Case(lambda a, b: torch.inner(a, b), ((3, 5), (4, 5))),
    "einsum": Case(lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((3, 4, 5), (3, 5, 2))),
    "einsum with a sum": Case(
        lambda a, b: torch.einsum("bij,bjk->k", a, b), ((3, 4, 5), (3, 5, 2))
    ),
    "einsum implicit": Case(lambda a, b: torch.einsum("ij,jk", a, b), ((4, 5), (5, 3))),
    "einsum with dots": Case(
        lambda a, b: torch.einsum("...ij,jk->...ik", a, b), ((2, 3, 4, 5), (5, 3))
    ),
    "einsum of one": Case(lambda a: torch.einsum("ijk->kj", a), ((4, 5, 6),)),
    "einsum of diagonals": Case(
        lambda a, b: (torch.einsum("ii->i", b), torch.einsum("iij,ij->j", a, b)),
        ((4, 4, 4), (4, 4)),
    ),
    "einsum by numbers": Case(
        lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]), ((4, 5), (5, 3))
    ),
    "einsum of three": Case(
        lambda a, b, c: torch.einsum("bi,ij,bj->b", a, b, c), ((3, 4), (4, 5), (3, 5))
    ),
    "tensordot": Case(lambda a, b: torch.tensordot(a, b, 2), ((3, 4, 5), (4, 5, 2))),
    "tensordot by dims": Case(
        lambda a, b: torch.tensordot(a, b, dims=([0, 2], [1, 0])), ((3, 4, 5), (5, 3, 2))
    ),
    "addmm": Case(
        lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2), ((4, 6), (4, 5), (5, 6))
    ),
    "baddbmm": Case(lambda x, a, b: torch.baddbmm(x, a, b), ((3, 4, 6), (3, 4, 5), (3, 5, 6))),
    "addmv": Case(lambda x, a, b: torch.addmv(x, a, b, alpha=2), ((4,), (4, 5), (5,))),
    "addbmm": Case(lambda x, a, b: torch.addbmm(x, a, b), ((4, 6), (3, 4, 5), (3, 5, 6))),
    "addr": Case(lambda x, a, b: torch.addr(x, a, b, beta=0.5), ((4, 6), (4,), (6,))),
    "addr of truths": Case(
        lambda x, a, b: (
            torch.addr(x, a, b, beta=2),
            torch.addr(x, a, b, alpha=3),
            torch.addr(x, a, b, beta=0, alpha=2),
        ),
        ((4, 6), (4,), (6,)),
        make=truths,
    ),
    "ger": Case(lambda a, b: torch.ger(a, b), ((5,), (7,))),
    "vdot": Case(lambda a, b: torch.vdot(a, b), ((7,), (7,))),
    "vdot of complex vectors": Case(
        lambda a, b: torch.vdot(torch.complex(a, b), torch.complex(b, 2 * a)), ((7,), (7,))
    ),
    "matmul of a plain first": Case(lambda b: values((4, 5), 1) @ b, ((5, 6),)),
    "linear": Case(lambda x, w, b: F.linear(x, w, b), ((3, 4, 5), (6, 5), (6,)), plain_others=True),
    "bilinear": Case(lambda a, b, w: F.bilinear(a, b, w), ((4, 3), (4, 5), (2, 3, 5))),
}

FAMILIES: dict[str, dict[str, Case]] = {"reductions": REDUCTIONS, "products": PRODUCTS}
