"""Operators on numbers of 16 bits: what torch has of them, within what such numbers can hold.

Tests `operators/dft.py`, `operators/matrices.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import tessel
from operator_cases import text_of, values
from tessel import (
    Layout,
    ParDFT,
    ParDiagonal,
    ParIdentity,
    ParMatrix,
    ParMultilinear,
    ParReduce,
    ParRepartition,
    ParRestriction,
    distribute,
    init,
    vec,
)
from tessel.operators import ParOperator, gradient
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
HALF, BRAIN = torch.float16, torch.bfloat16
SIXTEEN = pytest.mark.parametrize("T", [HALF, BRAIN], ids=str)
WORKERS = pytest.mark.parametrize("nprocs", [1, 3, 4])

# Each factor of a product rounds its results once, products of matrices and sums over workers may
# round what they add up so far once more: no more than that many units of the sum of magnitudes.
ROUNDINGS = 8


def near(got: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Equal but for roundings; `magnitude` is the result for absolute values."""
    assert got.shape == expected.shape
    unit = torch.finfo(got.dtype).eps / 2
    error = (got.detach().double() - expected).abs()
    assert (error <= ROUNDINGS * unit * magnitude.abs() + torch.finfo(got.dtype).tiny).all(), (
        error.max()
    )


def small(shape: Any, T: torch.dtype, seed: int) -> Tensor:
    """Numbers that 16 bits hold exactly."""
    return (values(shape, torch.float64, seed).clamp(-3, 3) * 8).round().div(8).to(T)


def factors(T: torch.dtype) -> dict[str, ParOperator]:
    A, D = ParMatrix(T, 5, 6), ParDiagonal(T, 7)
    R = ParRestriction(T, 7, [(0, 2), (4, 7)])
    return {
        "identity": tessel.kron(ParIdentity(T, 6), ParIdentity(T, 7)),
        "matrix": tessel.kron(A, ParIdentity(T, 7)),
        "adjoint": tessel.kron(ParMatrix(T, 6, 4).H, ParIdentity(T, 7)),
        "diagonal": tessel.kron(ParIdentity(T, 6), D),
        "inverse": tessel.kron(ParIdentity(T, 6), ParDiagonal(T, 7).inv),
        "restriction": tessel.kron(ParIdentity(T, 6), R),
        "zeros": tessel.kron(ParIdentity(T, 6), ParRestriction(T, 9, [(1, 8)]).H),
        "modes": ParMultilinear(T, 3, 6, [7]),
        "product": tessel.kron(A, R @ D),
        "sum": tessel.kron(A, ParIdentity(T, 7)) + 2 * tessel.kron(ParMatrix(T, 5, 6), D),
    }


def in_64_bits(
    name: str, whole: dict[Any, Tensor], x: Tensor, weights: Tensor, absolute: bool
) -> list[Tensor]:
    """The result and the gradients of its inner product with `weights`, in one process.

    From the same values, or from their magnitudes: what adds up then is the most that can.
    """
    twin = factors(torch.float64)[name]

    def given(value: Tensor) -> Tensor:
        return value.detach().double().abs() if absolute else value.detach().double()

    point = given(x).requires_grad_()
    pairs = zip(twin.leaves, whole.values(), strict=True)
    theta = {leaf: given(value).requires_grad_() for leaf, value in pairs}
    y = (twin(tessel.operators.Parameters(theta)) if theta else twin) * point
    vjps = torch.autograd.grad((y * given(weights)).sum(), [point, *theta.values()])
    return [y.detach(), *vjps]


def check_factors(T: torch.dtype) -> None:
    n = tessel.world().size
    for name, A in factors(T).items():
        for grid in ([n, 1], [1, n]):
            S = cast(Any, distribute(A, grid))
            theta = init(S)
            for value in theta.values():
                value.data.add_(value.sign() / 2)  # away from zero, for the inverse
            x, weights = small(A.domain.shape, T, 1), small(A.codomain.shape, T, 2)
            point = S.layout_in.local_part(x).clone().requires_grad_()
            y = (S(theta) if theta else S) * point
            loss = (y * S.layout_out.local_part(weights)).sum()
            grads = torch.autograd.grad(loss, [point, *theta.values()])
            assert all(each.dtype == T for each in (y, *grads))
            boxes = [S.layout_out.box(), S.layout_in.box(), *(S.part_boxes[leaf] for leaf in theta)]
            whole = whole_values(S, theta)
            wide = (in_64_bits(name, whole, x, weights, absolute) for absolute in (False, True))
            for got, box, *expected in zip((y, *grads), boxes, *wide, strict=True):
                part = tuple(slice(*each) for each in box)
                near(got, *(each[part] for each in expected))


def whole_values(S: Any, theta: Any) -> dict[Any, Tensor]:
    found = {}
    for leaf, value in theta.items():
        layout = S.parameter_layout(leaf)
        move = tessel.Move(layout, Layout.whole(layout.partition, layout.shape))
        found[leaf] = move.apply(value.detach())
    return found


@WORKERS
@SIXTEEN
def test_values_and_gradients(run: Run, nprocs: int, T: torch.dtype) -> None:
    run(check_factors, T, nprocs=nprocs)


def dot_test(T: torch.dtype) -> None:
    """Re⟨A x, y⟩ = Re⟨x, A.H y⟩, as far as A x and A.H y are rounded."""
    n = tessel.world().size
    for name, A in factors(T).items():
        S = cast(Any, distribute(A, [1, n]))
        theta = init(S, requires_grad=False)
        bound = S(theta) if theta else S
        x = S.layout_in.local_part(small(A.domain.shape, T, 1)).clone()
        y = S.layout_out.local_part(small(A.codomain.shape, T, 2)).clone()
        image, back = bound * x, bound.H * y
        numbers = [torch.vdot(vec(a.double()), vec(b.double())) for a, b in ((image, y), (x, back))]
        sizes = [each.double().square().sum() for each in (image, y, x, back)]
        left, right, *squares = tessel.world().group.sum(torch.stack([*numbers, *sizes])).tolist()
        scale = (squares[0] * squares[1]) ** 0.5 + (squares[2] * squares[3]) ** 0.5
        assert abs(left - right) <= ROUNDINGS * torch.finfo(T).eps * scale, name


@pytest.mark.parametrize("nprocs", [1, 2, 4])
@SIXTEEN
def test_adjoints(run: Run, nprocs: int, T: torch.dtype) -> None:
    run(dot_test, T, nprocs=nprocs)


def movements(T: torch.dtype) -> None:
    """What only travels is not rounded; a sum of small whole numbers is exact in 16 bits, too."""
    n, rank = tessel.world().size, cast(int, tessel.world().rank)
    R = cast(Any, ParRepartition(T, (7, 5), [n, 1], [1, n]))
    x = values((7, 5), torch.float64, 1).to(T)
    mine, other = R.layout_in.local_part(x), R.layout_out.local_part(x)
    with count_traffic() as traffic:
        y = R * mine
    assert y.dtype == T and torch.equal(y, other) and torch.equal(R.H * other, mine)
    kept = mine.numel() - traffic.bytes_sent // 2  # two bytes each
    assert kept == mine.shape[0] * other.shape[1]
    total = ParReduce(T) * torch.full((9,), 1.0 + rank, dtype=T)
    assert total.dtype == T and total.tolist() == [n * (n + 1) / 2] * 9
    slope = gradient(lambda each: (ParReduce(T) * each).sum(), torch.ones(9, dtype=T))
    assert slope.dtype == T and slope.tolist() == [1.0] * 9


@WORKERS
@SIXTEEN
def test_movements_and_sums(run: Run, nprocs: int, T: torch.dtype) -> None:
    run(movements, T, nprocs=nprocs)


def complex_numbers_travel() -> None:
    n = tessel.world().size
    R = cast(Any, ParRepartition(torch.complex32, (6, 5), [n, 1], [1, n]))
    x = values((6, 5), torch.complex64, 1).to(torch.complex32)
    got = R * R.layout_in.local_part(x)
    assert torch.equal(torch.view_as_real(got), torch.view_as_real(R.layout_out.local_part(x)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_numbers_of_32_bits_travel(run: Run) -> None:
    run(complex_numbers_travel, nprocs=2)


# -- what torch does not have ---------------------------------------------------------------------


def refused() -> tuple[dict[str, str], int]:
    """Errors before anything is sent, and the bytes that are sent meanwhile."""
    n = tessel.world().size
    C = torch.complex32
    transform = tessel.kron(ParDFT(HALF, 8), ParDFT(C, 6))
    inverse = tessel.kron(ParMatrix(BRAIN, 4, 4).inv, ParIdentity(BRAIN, 6))
    inside = transform + 2 * transform
    found = {}
    with count_traffic() as traffic:
        for name, A in {"transform": transform, "sum": inside, "solve": inverse}.items():
            S = cast(Any, distribute(A, [1, n]))
            theta = init(S)
            bound = S(theta) if theta else S
            x = torch.ones(S.layout_in.local_shape, dtype=A.domain.dtype)
            found[name] = text_of(lambda bound=bound, x=x: bound * x)
        complex_matrix = distribute(ParMatrix(C, 3, 3))
        theta = init(complex_matrix)
        found["matrix"] = text_of(lambda: complex_matrix(theta) * torch.ones(3, dtype=C))
    return found, traffic.bytes_sent


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("nprocs", [1, 3])
def test_what_torch_lacks_is_told_on_all_workers(run: Run, nprocs: int) -> None:
    results = run(refused, nprocs=nprocs)
    found, _ = results[0]
    assert results == [(found, 0)] * nprocs
    for name, text in {
        "transform": "ParDFT(float16 8 → complex32 5): torch does not support float16 on cpu",
        "sum": "ParDFT(float16 8 → complex32 5): torch does not support float16 on cpu",
        "solve": "ParMatrix(bfloat16 4 → bfloat16 4).inv: torch does not support bfloat16 on cpu",
        "matrix": "ParMatrix(complex32 3 → complex32 3): torch does not support complex32 on cpu",
    }.items():
        assert text in found[name], found[name]
        assert "use float32 or complex64" in found[name]


def test_an_adjoint_is_tried_on_its_own() -> None:
    """That A can be done does not mean that its inverse can."""
    A = ParMatrix(HALF, 2, 2)
    theta = init(A)
    A(theta) * torch.ones(2, dtype=HALF)
    A.H(theta) * torch.ones(2, dtype=HALF)
    for other in (A.inv, A.inv.H):
        with pytest.raises(ValueError, match="torch does not support float16 on cpu"):
            other(theta) * torch.ones(2, dtype=HALF)


def test_precisions_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="cannot combine in kron"):
        tessel.kron(ParIdentity(HALF, 2), ParIdentity(BRAIN, 2))
    with pytest.raises(
        ValueError, match=r"expected a tensor of torch\.float16, got torch\.bfloat16"
    ):
        ParIdentity(HALF, 2) * torch.ones(2, dtype=BRAIN)
    with pytest.raises(ValueError, match="no complex numbers of bfloat16"):
        ParDFT(BRAIN, 4)
    assert ParIdentity(HALF, 3).to_dense().dtype == HALF


def test_parameters_are_drawn_alike_on_any_number_of_workers(run: Run) -> None:
    expected = drawn()
    for nprocs in (1, 2, 4):
        for part in run(drawn, nprocs=nprocs):
            assert all(torch.equal(a, b) for a, b in zip(part, expected, strict=True))


def drawn() -> list[Tensor]:
    found = []
    for T in (HALF, BRAIN):
        torch.manual_seed(5)
        found += list(init(distribute(ParMatrix(T, 3, 4)), requires_grad=False).values())
    return found
