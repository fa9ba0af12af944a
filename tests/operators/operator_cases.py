"""Operators to check: what they are in words, as Tessel's operators, and as dense matrices.

A case is a tree of frozen values. `build` makes the operator of it; `Reference` makes its matrix
from `torch.kron`, `torch.fft` of a unit matrix, index selection and products, without Tessel. Real
and complex numbers are told apart by two more dimensions of the matrix, so that an adjoint in the
real inner product is a transpose, whatever the operator does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import pi, prod
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import tessel
from parity import close
from tessel import Layout, Partition
from tessel.core.layout import Cut
from tessel.operators import Parameters, ParOperator
from tessel.operators.space import TensorSpace, complex_of, real_of

Shape = tuple[int, ...]
DOUBLE, SINGLE = 1e-12, 1e-5  # tolerances
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


# -- operators in words ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """A leaf by its name and arguments; leaves of one key are one operator."""

    name: str  # Identity, Matrix, Diagonal, DFT, DCT, DST, Restriction, Multilinear
    dtype: torch.dtype
    args: tuple[Any, ...]
    key: int = 0


@dataclass(frozen=True)
class Node:
    """An operator made of others."""

    kind: str  # kron, compose, add, subtract, scale, H, inv
    children: tuple[Spec, ...]
    number: complex = 1.0


Spec = Leaf | Node


def identity(n: int, T: torch.dtype = torch.float64) -> Leaf:
    return Leaf("Identity", T, (n,))


def matrix(m: int, n: int, T: torch.dtype = torch.float64, key: int = 0) -> Leaf:
    return Leaf("Matrix", T, (m, n), key)


def diagonal(n: int, T: torch.dtype = torch.float64, key: int = 0) -> Leaf:
    return Leaf("Diagonal", T, (n,), key)


def dft(n: int, T: torch.dtype = torch.complex128, padding: float | None = None) -> Leaf:
    return Leaf("DFT", T, (n,) if padding is None else (n, padding))


def dct(n: int, T: torch.dtype = torch.float64, type: int = 2, norm: str | None = None) -> Leaf:
    return Leaf("DCT", T, (n, type, norm))


def dst(n: int, T: torch.dtype = torch.float64, type: int = 2, norm: str | None = None) -> Leaf:
    return Leaf("DST", T, (n, type, norm))


def restriction(n: int, *ranges: tuple[int, int], T: torch.dtype = torch.float64) -> Leaf:
    return Leaf("Restriction", T, (n, ranges))


def multilinear(m: int, n: int, *modes: int, T: torch.dtype = torch.float64, key: int = 0) -> Leaf:
    return Leaf("Multilinear", T, (m, n, modes), key)


def kron(*children: Spec) -> Node:
    return Node("kron", children)


def compose(*children: Spec) -> Node:
    return Node("compose", children)


def add(*children: Spec) -> Node:
    return Node("add", children)


def subtract(left: Spec, right: Spec) -> Node:
    return Node("subtract", (left, right))


def scale(number: complex, child: Spec) -> Node:
    return Node("scale", (child,), number)


def H(child: Spec) -> Node:
    return Node("H", (child,))


def inv(child: Spec) -> Node:
    return Node("inv", (child,))


def leaves(spec: Spec) -> list[Leaf]:
    """The leaves of a tree, each once."""
    if isinstance(spec, Leaf):
        return [spec]
    return list(dict.fromkeys(leaf for child in spec.children for leaf in leaves(child)))


# -- as Tessel's operators ------------------------------------------------------------------------

Known = dict[Leaf, ParOperator]


def build(spec: Spec, known: Known) -> ParOperator:
    """The operator; `known` gets its leaves."""
    if isinstance(spec, Leaf):
        if spec not in known:
            known[spec] = getattr(tessel, f"Par{spec.name}")(spec.dtype, *spec.args)
        return known[spec]
    parts = [build(child, known) for child in spec.children]
    made = parts[0]
    if spec.kind == "kron":
        return tessel.kron(*parts)
    if spec.kind == "scale":
        return spec.number * made
    if spec.kind in ("H", "inv"):
        return cast(ParOperator, getattr(made, spec.kind))
    for part in parts[1:]:
        if spec.kind == "compose":
            made = made @ part
        else:
            made = made + part if spec.kind == "add" else made - part
    return made


# -- as dense matrices ----------------------------------------------------------------------------


class RefusedError(Exception):
    """No matrix does what is asked for."""


@dataclass(frozen=True)
class Dense:
    """A real-linear map as a tensor (rows, 1 or 2, columns, 1 or 2): a 2 stands for re and im."""

    table: Tensor

    @classmethod
    def of(cls, M: Tensor, domain_complex: bool, codomain_complex: bool) -> Dense:
        """From x ↦ M x, of which the real part is taken where the result is real."""
        re, im = (M.real, M.imag) if M.is_complex() else (M, torch.zeros_like(M))
        rows = [torch.stack([re, -im], -1), torch.stack([im, re], -1)]
        table = torch.stack(rows, 1)  # (m, 2, n, 2)
        return cls(table[:, : 1 + codomain_complex, :, : 1 + domain_complex])

    @property
    def is_complex(self) -> tuple[bool, bool]:
        """Of the domain and of the codomain."""
        return self.table.shape[3] == 2, self.table.shape[1] == 2

    @property
    def matrix(self) -> Tensor | None:
        """The complex or real matrix, if there is one that does the same."""
        table = self.table
        if self.is_complex == (False, False):
            return table[:, 0, :, 0]
        if self.is_complex == (True, False):
            return torch.complex(table[:, 0, :, 0], -table[:, 0, :, 1])
        found = torch.complex(table[:, 0, :, 0], table[:, 1, :, 0])
        same = torch.allclose(Dense.of(found, *self.is_complex).table, table, atol=1e-9)
        return found if same else None

    @property
    def square(self) -> Tensor:
        m, c, n, d = self.table.shape
        return self.table.reshape(m * c, n * d)

    def _like(self, square: Tensor, rows: Shape, columns: Shape) -> Dense:
        return Dense(square.reshape(*rows, *columns))

    @property
    def H(self) -> Dense:
        return Dense(self.table.permute(2, 3, 0, 1))

    @property
    def pinv(self) -> Dense:
        m, c, n, d = self.table.shape
        square = self.square
        is_regular = m * c == n * d == torch.linalg.matrix_rank(square.detach())
        inverse = torch.linalg.inv(square) if is_regular else torch.linalg.pinv(square)
        return self._like(inverse, (n, d), (m, c))

    def __matmul__(self, other: Dense) -> Dense:
        assert self.table.shape[2:] == other.table.shape[:2]
        return Dense(torch.tensordot(self.table, other.table, 2))

    def times(self, number: complex, is_early: bool | None = None) -> Dense:
        """A number times the result, or times the input, where the result is real or if asked."""
        if not isinstance(number, complex):
            return Dense(number * self.table)
        a, b = number.real, number.imag
        turn = torch.tensor([[a, -b], [b, a]], dtype=torch.float64)
        if not (is_early if is_early is not None else not self.is_complex[1]):
            return Dense(torch.einsum("ab,mbnd->mand", turn, self.table))
        return Dense(torch.einsum("mcna,ab->mcnb", self.table, turn))

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it to vectors, the columns of x."""
        parts = torch.stack([x.real, x.imag], -1) if x.is_complex() else x.unsqueeze(-1)
        y = torch.einsum("mcnd,nbd->mbc", self.table, parts)
        return torch.complex(y[..., 0], y[..., 1]) if y.shape[-1] == 2 else y[..., 0]


def dense_kron(factors: Sequence[Dense]) -> Dense:
    matrices = [each.matrix for each in factors]
    if any(each is None for each in matrices):
        return _kron_of_one_odd(factors, matrices)
    M = cast(Tensor, matrices[0])
    for each in matrices[1:]:
        M = _kron(M, cast(Tensor, each))
    turns = [each.is_complex for each in factors]
    domain = any(a for a, _ in turns) and (False, True) not in turns
    codomain = any(b for _, b in turns) and (True, False) not in turns
    return Dense.of(M, domain, codomain)


def _kron(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, b.dtype)
    table = torch.einsum("ij,kl->ikjl", a.to(dtype), b.to(dtype))
    return table.reshape(a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])


def _kron_of_one_odd(factors: Sequence[Dense], matrices: Sequence[Tensor | None]) -> Dense:
    """One factor that is linear for real numbers only; a real transform acts before or behind."""
    odd_ones = [k for k, each in enumerate(matrices) if each is None]
    turns = [each.is_complex for k, each in enumerate(factors) if k not in odd_ones]
    if len(odd_ones) > 1 or (True, True) in turns:
        raise RefusedError
    (odd,) = odd_ones
    if (False, True) in turns:
        first = [_unit(each, 2) if k == odd else each for k, each in enumerate(factors)]
        second = [each if k == odd else _unit(each, 0) for k, each in enumerate(factors)]
        return _kron_among_real(second, odd) @ dense_kron(first)
    if (True, False) in turns:
        first = [each if k == odd else _unit(each, 2) for k, each in enumerate(factors)]
        second = [_unit(each, 0) if k == odd else each for k, each in enumerate(factors)]
        return dense_kron(second) @ _kron_among_real(first, odd)
    return _kron_among_real(factors, odd)


def _unit(like: Dense, side: int) -> Dense:
    """The real identity on a side of a matrix."""
    return Dense.of(torch.eye(like.table.shape[side], dtype=torch.float64), False, False)


def _kron_among_real(factors: Sequence[Dense], odd: int) -> Dense:
    blocks = []
    for c, d in product(range(2), repeat=2):
        M = torch.ones(1, 1, dtype=torch.float64)
        for k, each in enumerate(factors):
            M = _kron(M, each.table[:, c, :, d] if k == odd else each.table[:, 0, :, 0])
        blocks.append(M)
    m, n = blocks[0].shape
    return Dense(torch.stack(blocks, -1).reshape(m, n, 2, 2).permute(0, 2, 1, 3))


Theta = dict[Leaf, Tensor]


def dense(spec: Spec, theta: Theta) -> Dense:
    """The matrix of an operator, in double precision; torch derives it by θ."""
    if isinstance(spec, Leaf):
        return _dense_leaf(spec, theta)
    if spec.kind == "inv":
        return _dense_inverse(spec.children[0], theta)
    parts = [dense(child, theta) for child in spec.children]
    made = parts[0]
    if spec.kind == "kron":
        return dense_kron(parts)
    if spec.kind == "H":
        return made.H
    if spec.kind == "scale":
        return made.times(spec.number)
    for part in parts[1:]:
        if spec.kind == "compose":
            made = made @ part
        else:
            made = Dense(made.table + part.table * (1 if spec.kind == "add" else -1))
    return made


def _dense_leaf(leaf: Leaf, theta: Theta) -> Dense:
    is_complex = leaf.dtype.is_complex
    kind = torch.complex128 if is_complex else torch.float64
    value = theta[leaf].to(kind) if leaf in theta else None
    n = leaf.args[0]
    if leaf.name == "DFT" and len(leaf.args) == 2:
        return Dense.of(padded_matrix(*leaf.args, is_complex), is_complex, True)
    if leaf.name == "DFT":
        unit = torch.eye(n, dtype=kind)
        M = torch.fft.fft(unit, dim=0) if is_complex else torch.fft.rfft(unit, dim=0)
        return Dense.of(M, is_complex, True)
    if leaf.name == "Identity":
        M = torch.eye(n, dtype=kind)
    elif leaf.name in ("DCT", "DST"):
        M = trigonometric_matrix(leaf.name == "DST", *leaf.args).to(kind)
    elif leaf.name == "Restriction":
        M = torch.eye(n, dtype=kind)[[i for a, b in leaf.args[1] for i in range(a, b)]]
    elif leaf.name == "Diagonal":
        assert value is not None
        M = torch.diag(value)
    elif leaf.name == "Matrix":
        assert value is not None
        M = value
    else:
        assert value is not None
        o, i, *modes = value.shape
        K = prod(modes)
        M = torch.diag_embed(value.reshape(o, i, K)).permute(0, 2, 1, 3).reshape(o * K, i * K)
    return Dense.of(M, is_complex, is_complex)


def trigonometric_matrix(is_sine: bool, n: int, type: int, norm: str | None) -> Tensor:
    """Cosines and sines, from the definitions in the documentation of scipy."""
    k = torch.arange(n, dtype=torch.float64)
    wave, shift = (torch.sin, 1) if is_sine else (torch.cos, 0)
    whole, halves = k + shift, k + 0.5
    period = 2 * (n + 2 * shift - 1) if type == 1 else 2 * n
    rows, columns = {
        1: (whole, whole),
        2: (whole, halves),
        3: (halves, whole),
        4: (halves, halves),
    }[type]
    M = 2 * wave(2 * pi / period * rows[:, None] * columns)
    ends = [0, -1] if type == 1 else [-1 if is_sine else 0]
    has_ends = type in (2, 3) or (type == 1 and not is_sine)
    if type != 2 and has_ends:
        M[:, ends] /= 2  # they are not repeated in the periodic sequence
    if norm == "ortho" and has_ends:
        if type in (1, 3):
            M[:, ends] *= 2**0.5
        if type in (1, 2):
            M[ends] /= 2**0.5
    return M / {None: 1, "backward": 1, "ortho": period**0.5, "forward": period}[norm]


def padded_matrix(n: int, padding: float, is_complex: bool) -> Tensor:
    """n/m of the sums over m points with e^{-ikx}; n/2 and -n/2 are one if n is even and m > n."""
    m = int(padding * n + 1e-9)
    x = 2 * pi / m * torch.arange(m, dtype=torch.float64)
    modes = [k - n * (2 * k > n - 1 and is_complex) for k in range(n if is_complex else n // 2 + 1)]

    def wave(k: int) -> Tensor:
        return torch.polar(torch.ones_like(x), -k * x)

    both = [wave(k) + (wave(-k) if 2 * abs(k) == n and m > n else 0) for k in modes]
    return n / m * torch.stack(both)


def _dense_inverse(spec: Spec, theta: Theta) -> Dense:
    """Inverses of parts, as that of a real transform is one-sided."""
    if isinstance(spec, Leaf):
        return _dense_leaf(spec, theta).pinv
    parts = [_dense_inverse(child, theta) for child in spec.children]
    if spec.kind == "compose":
        made = parts[-1]
        for part in reversed(parts[:-1]):
            made = made @ part
        return made
    if spec.kind == "kron":
        return dense_kron(parts)
    if spec.kind == "scale":
        return parts[0].times(1 / spec.number, is_early=parts[0].is_complex[0])
    if spec.kind == "H":
        return parts[0].H
    assert spec.kind == "inv"
    return dense(spec.children[0], theta)


# -- parameters and values ------------------------------------------------------------------------


def values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random values, the same on every worker and in every precision."""
    generator = torch.Generator().manual_seed(seed)
    double = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(tuple(shape), dtype=double, generator=generator).to(dtype)


def draw(spec: Spec, seed: int = 0) -> Theta:
    """Parameters far from those that have no inverse."""
    found: Theta = {}
    for number, leaf in enumerate(leaves(spec)):
        if leaf.name in ("Matrix", "Diagonal", "Multilinear"):
            found[leaf] = _well_conditioned(leaf, seed + 7 * number + 1)
    return found


def _well_conditioned(leaf: Leaf, seed: int) -> Tensor:
    if leaf.name == "Diagonal":
        value = values(leaf.args, leaf.dtype, seed)
        return (value + 2 * value.sgn()) / 2
    m, n, *rest = leaf.args
    modes = rest[0] if rest else ()
    value = values((m, n, *modes), leaf.dtype, seed) / 2
    unit = torch.eye(m, n, dtype=leaf.dtype).reshape(m, n, *[1] * len(modes))
    return value / n**0.5 + 1.5 * unit


def parameters(theta: Theta, known: Known) -> Parameters:
    """The same for an operator that was built."""
    return Parameters({known[leaf].base: value for leaf, value in theta.items()})  # type: ignore[attr-defined]


def tolerance(dtype: torch.dtype) -> float:
    return DOUBLE if real_of(dtype) == torch.float64 else SINGLE


def in_double(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


# -- vjps ---------------------------------------------------------------------------------------


def loss_of(y: Tensor, weights: Tensor) -> Tensor:
    """A real function, not linear, of real or complex values: Re⟨w, y⟩ + |y|²/2."""
    return ((weights.conj() * y).real + 0.5 * (y * y.conj()).real).sum()


def vjps(y: Tensor, weights: Tensor, inputs: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
    """The gradients of the loss, zero where there is none."""
    loss = loss_of(y, weights)
    grads = torch.autograd.grad(loss, inputs, create_graph=create_graph, allow_unused=True)
    return [
        torch.zeros_like(each) if grad is None else grad
        for each, grad in zip(inputs, grads, strict=True)
    ]


@dataclass(frozen=True)
class Expected:
    """What one process gets from the dense matrix: results and gradients of two orders."""

    y: Tensor
    first: list[Tensor]  # of x and of each parameter
    second: list[Tensor]

    @property
    def sizes(self) -> tuple[float, float]:
        """The largest gradient of each order."""
        return tuple(  # type: ignore[return-value]
            max([1.0, *(float(each.abs().max()) for each in grads if each.numel())])
            for grads in (self.first, self.second)
        )


class Reference:
    """The dense matrix of a case, and what follows from it, in double precision."""

    def __init__(self, spec: Spec, theta: Theta, operator: ParOperator) -> None:
        self.spec, self.operator = spec, operator
        self.theta = {leaf: value.detach().clone() for leaf, value in theta.items()}
        self.matrix = dense(spec, self.theta)

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(self.matrix, in_double(x))

    def adjoint(self, y: Tensor) -> Tensor:
        domain, codomain = self.operator.domain.shape, self.operator.codomain.shape
        return _applied(self.matrix.H, in_double(y), codomain, domain)

    def _apply(self, matrix: Dense, x: Tensor) -> Tensor:
        return _applied(matrix, x, self.operator.domain.shape, self.operator.codomain.shape)

    def vjps(self, x: Tensor, weights: Tensor, seconds: Tensor | None) -> Expected:
        """By torch's own derivatives of the dense matrix; of second order if asked."""
        point = in_double(x).detach().requires_grad_()
        theta = {leaf: in_double(each).requires_grad_() for leaf, each in self.theta.items()}
        inputs = [point, *theta.values()]
        y = self._apply(dense(self.spec, theta), point)
        first = vjps(y, in_double(weights), inputs, seconds is not None)
        second = [] if seconds is None else vjps(first[0], in_double(seconds), inputs, False)
        return Expected(y.detach(), [each.detach() for each in first], second)


def _applied(matrix: Dense, x: Tensor, domain: Shape, codomain: Shape) -> Tensor:
    batch = x.shape[len(domain) :]
    return matrix(x.reshape(prod(domain), prod(batch))).reshape(*codomain, *batch)


# -- checks in one process ------------------------------------------------------------------------


def check_local(spec: Spec, seed: int = 0, second: bool = True) -> None:
    """Matrices, adjoint, dot-test and gradients against the dense matrix."""
    known: Known = {}
    A = build(spec, known)
    theta = draw(spec, seed)
    reference = Reference(spec, theta, A)
    near = tolerance(A.domain.dtype)
    mine = parameters({k: v.clone().requires_grad_() for k, v in theta.items()}, known)
    _check_matrix(A, mine, reference.matrix, near)
    bound = A(mine) if theta else A
    x, y = (
        values(A.domain.shape, A.domain.dtype, seed),
        values(A.codomain.shape, A.codomain.dtype, 9),
    )
    close("A x", in_double(bound * x), reference(x), near)
    close("A.H y", in_double(bound.H * y), reference.adjoint(y), near)
    assert (bound * x).dtype == A.codomain.dtype and (bound.H * y).dtype == A.domain.dtype
    check_dot(bound, x, y, near)
    if second:
        _check_slopes(bound, mine, reference, x, y, near)


def _check_matrix(A: ParOperator, theta: Parameters, matrix: Dense, near: float) -> None:
    expected = matrix.matrix
    if A.domain.is_complex and A.codomain.is_complex and not A.is_complex_linear:
        with pytest.raises(ValueError, match="no complex matrix"):
            A.to_dense(theta)
        return
    assert expected is not None
    close("A.to_dense()", in_double(A.to_dense(theta)), expected.to(_double(A)), near)
    adjoint = A.H.to_dense(theta)
    close("A.H.to_dense()", in_double(adjoint), expected.mH.to(_double(A)), near)


def _double(A: ParOperator) -> torch.dtype:
    either = A.domain.is_complex or A.codomain.is_complex
    return torch.complex128 if either else torch.float64


def check_dot(A: ParOperator, x: Tensor, y: Tensor, near: float) -> None:
    """Re⟨A x, y⟩ = Re⟨x, A.H y⟩."""
    with torch.no_grad():
        left, right = real_inner(A * x, y), real_inner(x, A.H * y)
        size = float(((A * x).abs().square().sum() * y.abs().square().sum()).sqrt())
    assert abs(left - right) <= near * max(1.0, size), f"dot-test: {left} is not {right}"


def real_inner(a: Tensor, b: Tensor) -> float:
    return float((in_double(a).conj() * in_double(b)).real.sum())


def _check_slopes(
    A: ParOperator,
    theta: Parameters,
    reference: Reference,
    x: Tensor,
    weights: Tensor,
    near: float,
) -> None:
    seconds = values(x.shape, x.dtype, 5)
    expected = reference.vjps(x, weights, seconds)
    point = x.clone().requires_grad_()
    inputs = [point, *theta.values()]
    first = vjps(A * point, weights, inputs, True)
    again = vjps(first[0], seconds, inputs, False)
    names = ["x", *map(str, reference.theta)]
    close_together("gradient", names, first, expected.first, near)
    close_together("second gradient", names, again, expected.second, 10 * near)


def close_together(
    what: str,
    names: Sequence[str],
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    near: float,
    size: float = 0.0,
) -> None:
    """Gradients of x and θ, measured by the largest of them: small ones are sums of large ones."""
    size = max([size, 1.0, *(float(each.abs().max()) for each in expected if each.numel())])
    for name, a, b in zip(names, got, expected, strict=True):
        a = in_double(a.detach())
        assert a.shape == b.shape or not a.numel() + b.numel(), f"{what} of {name}: {a.shape}"
        if a.numel():
            error = float((a - b).abs().max())
            assert error <= near * size, f"{what} of {name} is wrong by {error:.3g} of {size:.3g}"


# -- checks on workers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A case on workers: the tree, the grids, and a batch.

    Args:
        grid: the number of workers along each dimension, and further ones along the batch.
        out: the grid of the result, None for the same, "anywhere".
        batch: the numbers of columns for each place along the further axes; None without a batch.
        ranks: the workers; the first ones by default.
        whole: whether parameters are given whole; else as they are stored.
        vector: whether tensors are given as vectors.
        second: whether to check gradients of second order.
        fixed: whether the input needs no gradient.
    """

    spec: Spec
    grid: Shape
    out: Any = None
    batch: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    whole: bool = False
    vector: bool = False
    seed: int = 0
    second: bool = True
    fixed: bool = False

    @property
    def partition(self) -> Partition:
        ranks = tuple(range(prod(self.grid))) if self.ranks is None else self.ranks
        return Partition(ranks, self.grid)

    def distribute(self, A: ParOperator) -> ParOperator:
        out = self.out
        if out not in (None, "anywhere"):
            out = Partition(self.partition.ranks, out)
        return tessel.distribute(A, self.partition, out)


def check_spread(case: Spread) -> None:
    """Raise AssertionError, with the case, on the worker whose numbers differ from dense ones."""
    try:
        _check_spread(case)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


def check_spreads(cases: Sequence[Spread]) -> int:
    for case in cases:
        check_spread(case)
    return len(cases)


def plan_of(A: ParOperator) -> Any:
    return cast(Any, A).plan


def num_transfers(A: ParOperator) -> int:
    found: int = plan_of(A).num_transfers
    return found


class Sides:
    """How the input and the result of a case lie, worked out from the grids alone."""

    def __init__(self, case: Spread, A: ParOperator, spread: ParOperator) -> None:
        self.case = case
        self.columns = case.batch
        P = case.partition
        self.source = self._layout(P, A.domain.shape, case.grid)
        if case.out == "anywhere":
            self.target = self._with_batch(cast(Any, spread).layout_out)
        else:
            grid = case.grid if case.out is None else case.out
            self.target = self._layout(Partition(P.ranks, grid), A.codomain.shape, grid)

    def _layout(self, P: Partition, shape: Shape, grid: Shape) -> Layout:
        ndim = len(shape)
        extra = tuple(range(ndim, len(grid)))
        axes: list[int | None] = list(range(ndim))
        layout = Layout.split(P, shape, axes)
        return self._with_batch(layout, extra)

    def _with_batch(self, layout: Layout, extra: tuple[int, ...] | None = None) -> Layout:
        if self.columns is None:
            return layout
        axes = layout.separate if extra is None else extra
        starts = [sum(self.columns[:k]) for k in range(len(self.columns) + 1)]
        intervals = tuple(pairwise(starts))
        cut = Cut(axes, intervals)
        total = sum(self.columns)
        return Layout(layout.partition, (*layout.shape, total), (*layout.cuts, cut))


def _check_spread(case: Spread) -> None:
    known: Known = {}
    A = build(case.spec, known)
    theta = draw(case.spec, case.seed)
    S = case.distribute(A)
    sides = Sides(case, A, S)
    reference = Reference(case.spec, theta, A)
    near = tolerance(A.domain.dtype)
    batch = () if case.batch is None else (sum(case.batch),)
    x = values((*A.domain.shape, *batch), A.domain.dtype, case.seed)
    w = values((*A.codomain.shape, *batch), A.codomain.dtype, case.seed + 1)
    v = values(x.shape, x.dtype, case.seed + 2)
    active = case.partition.active
    mine = _given(case, S, theta, known)
    bound = S(mine) if theta else S
    point = _local(sides.source, x, case).requires_grad_(not case.fixed)
    y = bound * point
    if not active:
        assert y.numel() == 0
        bound.H * torch.empty(0, dtype=A.codomain.dtype)
        return
    assert y.dtype == A.codomain.dtype
    expected = reference.vjps(x, w, v if case.second else None)
    close("A x", in_double(y), _local(sides.target, expected.y, case), near)
    _check_gradients(case, S, sides, (point, mine, y), (w, v), expected, known)
    with torch.no_grad():
        back = bound.H * _local(sides.target, w, case)
    close("A.H y", in_double(back), _local(sides.source, reference.adjoint(w), case), near)
    _check_dot(sides, (y, _local(sides.target, w, case)), (point, back), near)


def _check_dot(
    sides: Sides, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], near: float
) -> None:
    """Re⟨A x, y⟩ = Re⟨x, A.H y⟩, summed over the workers."""
    group = sides.source.partition.group
    mine = [
        layout.local_inner(*(in_double(each.detach()) for each in pair)).real
        for layout, pair in ((sides.target, left), (sides.source, right))
    ]
    sizes = [in_double(each.detach()).abs().square().sum() for each in left]
    a, b, *squares = group.sum(torch.stack([*mine, *sizes])).tolist()
    scale = max(1.0, prod(squares) ** 0.5)
    assert abs(a - b) <= near * scale, f"dot-test: {a} is not {b}"


def _check_gradients(
    case: Spread,
    S: ParOperator,
    sides: Sides,
    graph: tuple[Tensor, Parameters, Tensor],
    weights: tuple[Tensor, Tensor],
    expected: Expected,
    known: Known,
) -> None:
    """Of the input and of all parameters, on this worker."""
    (point, mine, y), (w, v) = graph, weights
    theta = [leaf for leaf in known if known[leaf] in mine]
    inputs = [*([] if case.fixed else [point]), *mine.values()]
    if not inputs:
        return
    near, sizes = tolerance(y.dtype), expected.sizes

    def parts(whole: list[Tensor]) -> list[Tensor]:
        pairs = zip(theta, whole[1:], strict=True)
        stored = [_stored(case, S, leaf, known, value) for leaf, value in pairs]
        return [*([] if case.fixed else [_local(sides.source, whole[0], case)]), *stored]

    second = case.second and not case.fixed
    grads = vjps(y, _local(sides.target, w, case), inputs, second)
    names = [*([] if case.fixed else ["x"]), *map(str, theta)]
    close_together("gradient", names, grads, parts(expected.first), near, sizes[0])
    if second:
        again = vjps(grads[0], _local(sides.source, v, case), inputs, False)
        wanted = parts(expected.second)
        close_together("second gradient", names, again, wanted, 10 * near, sizes[1])


def _local(layout: Layout, whole: Tensor, case: Spread) -> Tensor:
    """This worker's part as a user gives it."""
    part = layout.local_part(whole).clone()
    if not case.vector or not layout.partition.active:
        return part
    if case.batch is None:
        return part.reshape(-1)
    return part.reshape(prod(part.shape[:-1]), part.shape[-1])


def _given(case: Spread, S: ParOperator, theta: Theta, known: Known) -> Parameters:
    parts = {leaf: _stored(case, S, leaf, known, value) for leaf, value in theta.items()}
    return parameters({k: v.clone().requires_grad_() for k, v in parts.items()}, known)


def _stored(case: Spread, S: ParOperator, leaf: Leaf, known: Known, value: Tensor) -> Tensor:
    if case.whole:
        return value
    box = cast(Any, S).part_boxes[known[leaf]]
    return value[tuple(slice(a, b) for a, b in box)]


# -- random trees ---------------------------------------------------------------------------------

LONGEST, VOLUME = 7, 90


class Growing:
    """Trees that grow from the space that they take, so that all parts fit.

    Parameters are new for each leaf, or now and then those of an earlier leaf.
    """

    def __init__(self, rng: Random, precision: torch.dtype) -> None:
        self.rng, self.precision = rng, precision
        self.keys = 0

    def dtype(self, is_complex: bool) -> torch.dtype:
        return complex_of(self.precision) if is_complex else self.precision

    def space(self, dims: int) -> TensorSpace:
        shape = tuple(self.rng.randint(1, LONGEST) for _ in range(dims))
        while prod(shape) > VOLUME:
            shape = tuple(self.rng.randint(1, LONGEST) for _ in range(dims))
        return TensorSpace(shape, self.dtype(self.rng.random() < 0.5))

    def key(self) -> int:
        self.keys += self.rng.random() < 0.85
        return self.keys

    def tree(self, space: TensorSpace, depth: int) -> Spec:
        """An operator that takes this space."""
        kinds = ["kron"] if len(space.shape) > 1 else ["leaf"]
        if depth > 0:
            kinds += ["kron", "compose", "compose", "add", "scale", "back"]
        return cast(Spec, getattr(self, f"_{self.rng.choice(kinds)}")(space, depth))

    def _leaf(self, space: TensorSpace, depth: int) -> Spec:
        (n,) = space.shape
        T, key = space.dtype, self.key()
        m = self.rng.randint(1, LONGEST)
        longer = n + self.rng.randint(0, 3)
        choices: list[Spec] = [
            identity(n, T),
            matrix(m, n, T, key),
            diagonal(n, T, key),
            dft(n, T),
            self._restriction(n, T),
            H(matrix(n, m, T, key)),
            inv(matrix(n, n, T, key)),
            inv(diagonal(n, T, key)),
            H(self._restriction(longer, T, n)),
            self._trigonometric(n, T),
            self._trigonometric(n, T),
        ]
        modes = [k for k in range(1, n + 1) if int(1.5 * k) == n]
        choices += [dft(k, T, 1.5) for k in modes]
        if space.is_complex:
            choices += [H(dft(n, T)), inv(dft(n, T)), H(inv(dft(n, T)))]
            half = self.rng.choice([2 * n - 1, max(1, 2 * n - 2)])
            choices += [H(dft(half, self.precision)), inv(dft(half, self.precision))]
            choices += [H(dft(n, T, 1.5)), inv(dft(n, T, 1.5)), inv(dft(half, self.precision, 1.5))]
        else:
            choices.append(H(inv(dft(n, T))))
        return self.rng.choice(choices)

    def _trigonometric(self, n: int, T: torch.dtype) -> Spec:
        make, type = self.rng.choice([dct, dst]), self.rng.randint(1, 4)
        if make is dct and n == 1:
            type = max(2, type)
        leaf = make(n, T, type, self.rng.choice([None, "ortho", "forward"]))
        return self.rng.choice([leaf, H(leaf), inv(leaf), H(inv(leaf))])

    def _restriction(self, n: int, T: torch.dtype, kept: int | None = None) -> Leaf:
        count = self.rng.randint(1, n) if kept is None else kept
        indices = sorted(self.rng.sample(range(n), count))
        return restriction(n, *((i, i + 1) for i in indices), T=T)

    def _kron(self, space: TensorSpace, depth: int) -> Spec:
        """Factors on groups of dimensions; real ones act on complex numbers, too."""
        shape = space.shape
        if len(shape) == 1:
            return self._leaf(space, depth)
        for _ in range(20):
            made = kron(*self._factors(space, depth))
            if build(made, {}).domain == space:
                return made
        return kron(*(self._leaf(TensorSpace((n,), space.dtype), 0) for n in shape))

    def _factors(self, space: TensorSpace, depth: int) -> list[Spec]:
        groups = self._groups(space.shape)
        turning = None  # the group of a real transform, beside which others may be complex
        if not space.is_complex and self.rng.random() < 0.4:
            turning = self.rng.randrange(len(groups))
        some_complex = space.is_complex or turning is not None
        found: list[Spec] = []
        for number, group in enumerate(groups):
            if number == turning and len(group) == 1:
                found.append(dft(group[0], self.precision))
                continue
            is_complex = some_complex and number != turning and self.rng.random() < 0.7
            inner = TensorSpace(group, self.dtype(is_complex))
            found.append(self._factor(inner, depth - 1))
        return found

    def _groups(self, shape: Shape) -> list[Shape]:
        cuts = sorted(self.rng.sample(range(1, len(shape)), self.rng.randint(1, len(shape) - 1)))
        bounds = [0, *cuts, len(shape)]
        return [shape[a:b] for a, b in pairwise(bounds)]

    def _factor(self, space: TensorSpace, depth: int) -> Spec:
        if len(space.shape) > 1 and self.rng.random() < 0.3:
            m, n = self.rng.randint(1, 4), space.shape[0]
            return multilinear(m, n, *space.shape[1:], T=space.dtype, key=self.key())
        return self.tree(space, max(0, depth))

    def _compose(self, space: TensorSpace, depth: int) -> Spec:
        first = self.tree(space, depth - 1)
        return compose(self.tree(build(first, {}).codomain, depth - 1), first)

    def _back(self, space: TensorSpace, depth: int) -> Spec:
        """There and back, with the same parameters or others."""
        there = self.tree(space, depth - 1)
        other = self._varied(there) if self.rng.random() < 0.5 else there
        ways: list[Spec] = [H(other)]
        if has_inverse(other):
            ways += [inv(other)] * 2
        back = self.rng.choice(ways)
        if self.rng.random() < 0.3:
            inner = build(there, {}).codomain
            middle = [diagonal(n, inner.dtype, self.key()) for n in inner.shape]
            return compose(back, kron(*middle), there)
        return compose(back, there)

    def _add(self, space: TensorSpace, depth: int) -> Spec:
        term = self.tree(space, depth - 1)
        other = self._varied(term)
        multiple = scale(self._number(other), other)
        return add(term, multiple) if self.rng.random() < 0.5 else subtract(term, multiple)

    def _scale(self, space: TensorSpace, depth: int) -> Spec:
        inner = self.tree(space, depth - 1)
        return scale(self._number(inner), inner)

    def _number(self, spec: Spec) -> complex:
        made = build(spec, {})
        if made.domain.is_complex or made.codomain.is_complex:
            return self.rng.choice([2.0, -0.5, 0.5 - 1j, 1j])
        return self.rng.choice([3, 2.0, -0.5])

    def _varied(self, spec: Spec) -> Spec:
        """Another tree between the same spaces."""
        if isinstance(spec, Node):
            return replace(spec, children=tuple(self._varied(child) for child in spec.children))
        if spec.name in ("Identity", "Diagonal"):
            n = spec.args[0]
            other = [identity(n, spec.dtype), diagonal(n, spec.dtype, self.key())]
            return self.rng.choice([*other, matrix(n, n, spec.dtype, self.key())])
        return replace(spec, key=self.key()) if spec.key else spec


def has_inverse(spec: Spec) -> bool:
    """Whether `inv` is defined."""
    try:
        build(inv(spec), {})
    except ValueError:
        return False
    return True


def random_spec(rng: Random, precision: torch.dtype, dims: int, depth: int) -> Spec:
    """A tree that Tessel takes: what it refuses in kron is drawn again."""
    while True:
        growing = Growing(rng, precision)
        try:
            spec = growing.tree(growing.space(dims), depth)
            spec = rng.choice([spec, spec, H(spec)])
            made = build(spec, {})
            dense(spec, draw(spec))
        except RefusedError:
            continue
        except ValueError as error:
            assert "cannot combine in kron" in str(error), error
            continue
        if 1 <= max(made.domain.numel, made.codomain.numel) <= 4 * VOLUME:
            return spec


def grids(size: int, dims: int) -> Iterator[Shape]:
    """All grids of a number of workers."""
    yield from (g for g in product(range(1, size + 1), repeat=dims) if prod(g) == size)


def random_spread(rng: Random, workers: int, depth: int = 3) -> Spread:
    """A random tree on a random grid of some of the workers."""
    precision = rng.choice([torch.float64, torch.float64, torch.float64, torch.float32])
    dims = rng.randint(1, 3)
    spec = random_spec(rng, precision, dims, depth)
    made = build(spec, {})
    ndim = len(made.domain.shape)
    size = rng.choice([workers, workers, rng.randint(1, workers)])
    extra = rng.choice([0, 0, 1])
    grid = rng.choice(list(grids(size, ndim + extra)))
    batch: tuple[int, ...] | None = None
    if extra:
        batch = tuple(rng.randint(0, 3) for _ in range(grid[-1]))
    elif rng.random() < 0.3:
        batch = (rng.randint(0, 3),)
    ranks = tuple(rng.sample(range(workers), size))
    same_axes = grid[ndim:]
    outs = [(*g, *same_axes) for g in grids(prod(grid[:ndim]), ndim)]
    out = rng.choice([None, None, "anywhere", rng.choice(outs)])
    return Spread(
        spec,
        grid,
        out,
        batch,
        ranks,
        whole=rng.random() < 0.4,
        vector=batch != (1,) and set(batch or (2,)) != {1} and rng.random() < 0.2,
        seed=rng.randrange(1000),
        second=rng.random() < 0.5 and precision == torch.float64,
        fixed=rng.random() < 0.15,
    )


def text_of(function: Callable[[], Any]) -> str:
    """The text of the ValueError."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"
