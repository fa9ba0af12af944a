"""Operators in one process: every leaf and combination against its dense matrix.

Tests `operators/algebra.py`, `operators/leaf.py`, `operators/matrices.py`,
`operators/restriction.py`, `operators/space.py`, `operators/parameters.py`, `operators/tasks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from operator_cases import (
    DTYPES,
    H,
    Spec,
    add,
    build,
    check_local,
    complex_of,
    compose,
    dft,
    diagonal,
    draw,
    identity,
    inv,
    kron,
    matrix,
    multilinear,
    parameters,
    restriction,
    scale,
    subtract,
    values,
)
from parity import close
from tessel import ParDFT, ParDiagonal, ParIdentity, ParMatrix, ParMultilinear, ParRestriction
from tessel.operators import Parameters, ParOperator, distribute, gradient, init, vec
from tessel.testing import count_memory

F32, F64, C64, C128 = DTYPES
LENGTHS = (1, 2, 3, 5, 7, 8)
# even and odd ones in single precision, in which the same code computes
lengths_and_types = pytest.mark.parametrize(
    ("n", "T"),
    [
        pytest.param(n, T, id=f"{n}-{T}")
        for T in DTYPES
        for n in (LENGTHS if T in (torch.float64, torch.complex128) else (2, 5, 7))
    ],
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Small tensors: threads cost more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def half(n: int, T: torch.dtype) -> int:
    """The length of a transform."""
    return n if T.is_complex else n // 2 + 1


# -- every operator is its matrix -----------------------------------------------------------------


def square_leaves(n: int, T: torch.dtype) -> list[Spec]:
    return [
        identity(n, T),
        matrix(n, n, T),
        diagonal(n, T),
        dft(n, T),
        restriction(n, (0, n), T=T),
        multilinear(2, 2, n, T=T),
        multilinear(2, 2, 2, n, T=T),
        multilinear(3, 3, T=T),
    ]


def other_leaves(n: int, T: torch.dtype) -> list[Spec]:
    return [
        matrix(n + 1, n, T),
        matrix(1, n, T),
        restriction(n + 2, (0, 1), (n, n + 2), T=T),
        restriction(n, (n - 1, n), T=T),
        multilinear(2, 3, n, T=T),
        multilinear(3, 1, n, 2, T=T),
    ]


@lengths_and_types
def test_leaves(n: int, T: torch.dtype) -> None:
    for spec in (*square_leaves(n, T), *other_leaves(n, T)):
        check_local(spec)
        check_local(H(spec))
        check_local(H(H(spec)), second=False)


@lengths_and_types
def test_inverses(n: int, T: torch.dtype) -> None:
    for spec in square_leaves(n, T):
        for each in (inv(spec), H(inv(spec)), inv(H(spec))):
            check_local(each)
        check_local(inv(inv(spec)), second=False)
        check_local(inv(H(inv(spec))), second=False)


@pytest.mark.parametrize("T", DTYPES, ids=str)
def test_combinations(T: torch.dtype) -> None:
    C, h = complex_of(T), half(5, T)
    F, there = kron(dft(5, T), dft(4, C)), kron(dft(3, C), dft(5, T), dft(4, C))
    round_trip = compose(inv(dft(5, T)), diagonal(h, C), dft(5, T))
    A, B = matrix(3, 4, T, 1), matrix(4, 2, T, 2)
    total = add(matrix(3, 2, T, 3), scale(0.5, matrix(3, 2, T, 4)))
    cases: list[Spec] = [
        kron(dft(5, T), dft(3, C), dft(4, C)),
        there,
        H(there),
        inv(there),
        H(inv(there)),
        kron(matrix(2, 3, T), dft(5, T), diagonal(4, C)),
        kron(compose(A, B), total, restriction(5, (1, 3), T=T)),
        H(kron(compose(A, B), total, restriction(5, (1, 3), T=T))),
        scale(2, dft(4, T)),
        scale(2 - 1j, dft(4, T)),
        H(scale(2 - 1j, dft(4, T))),
        inv(scale(2 - 1j, dft(4, T))),
        kron(scale(2 - 1j, dft(4, T)), matrix(2, 2, C)),
        H(kron(scale(2 - 1j, dft(4, T)), matrix(2, 2, C))),
        round_trip,
        H(round_trip),
        inv(round_trip),
        compose(H(F), F),
        compose(inv(F), F),
        compose(inv(F), kron(diagonal(h, C, 1), diagonal(4, C, 2)), F),
        kron(round_trip, matrix(3, 2, T)),
        kron(matrix(3, 2, T), round_trip, matrix(2, 3, T)),
        kron(dft(3, T), round_trip),
        subtract(A, scale(0.5, matrix(3, 4, T, 2))),
        subtract(compose(A, B), total),
        H(subtract(compose(A, B), total)),
        compose(total, H(total)),
        compose(matrix(3, 3, T, 1), matrix(3, 3, T, 1)),
        compose(matrix(3, 3, T, 1), H(matrix(3, 3, T, 1)), inv(matrix(3, 3, T, 1))),
        kron(matrix(3, 3, T, 1), matrix(3, 3, T, 1)),
        scale(0, A),
        scale(-1.5, scale(2, A)),
        kron(multilinear(2, 3, 4, T=T), matrix(2, 5, T)),
        kron(matrix(2, 5, T), multilinear(2, 3, 4, T=T)),
        compose(kron(matrix(2, 3, T, 1), identity(4, T)), kron(identity(3, T), matrix(4, 5, T, 2))),
        add(kron(matrix(2, 3, T, 1), identity(4, T)), kron(matrix(2, 3, T, 2), identity(4, T))),
        kron(kron(matrix(2, 3, T, 1), identity(2, T)), kron(diagonal(3, T), dft(4, T))),
        kron(matrix(2, 3, T)),
    ]
    for spec in cases:
        check_local(spec)


@pytest.mark.parametrize("T", [F64, F32], ids=str)
def test_what_is_linear_for_real_factors_only(T: torch.dtype) -> None:
    """A real transform there and back again between complex numbers."""
    C = complex_of(T)
    odd = compose(dft(5, T), inv(dft(5, T)))
    half_turn = scale(1j, odd)
    cases: list[Spec] = [
        odd,
        half_turn,
        H(half_turn),
        inv(scale(0.5 - 1j, odd)),
        compose(H(half_turn), half_turn),
        compose(half_turn, H(half_turn)),
        kron(odd, matrix(2, 3, T)),
        kron(matrix(2, 3, T), H(half_turn), matrix(3, 2, T)),
        compose(kron(odd, identity(2, T)), kron(identity(3, C), matrix(2, 2, C))),
        compose(kron(identity(3, C), matrix(2, 2, C)), kron(odd, identity(2, T))),
        compose(kron(add(odd, half_turn), identity(2, T)), kron(identity(3, C), matrix(2, 2, C))),
        compose(kron(identity(3, C), matrix(2, 2, C)), kron(add(odd, half_turn), identity(2, T))),
        kron(odd, dft(4, T)),
        H(kron(odd, dft(4, T), matrix(2, 2, T))),
        kron(matrix(2, 3, T), dft(4, T), half_turn),
        scale(1j, add(odd, H(odd))),
        H(scale(1j, add(odd, H(odd)))),
    ]
    for spec in cases:
        check_local(spec)


def test_a_sum_that_goes_there_and_back_comes_before_a_real_transform() -> None:
    round_trip = compose(inv(dft(5, F64)), diagonal(3, C128), dft(5, F64))
    check_local(kron(add(round_trip, matrix(5, 5)), dft(4, F64)))
    check_local(kron(dft(4, F64), add(round_trip, matrix(5, 5))))
    check_local(H(kron(dft(4, F64), add(round_trip, matrix(5, 5)))))


def test_transforms_along_one_dimension_are_not_one_call() -> None:
    check_local(compose(dft(4), dft(4)))
    check_local(compose(dft(4), dft(6, F64)))
    check_local(H(compose(dft(4), dft(6, F64))))
    check_local(kron(compose(dft(4), dft(4)), dft(3)))


def test_the_matrix_of_an_operator_with_dimensions_of_length_one() -> None:
    A = tessel.kron(ParMatrix(F64, 1, 1), ParMatrix(F64, 3, 1))
    theta = init(A)
    first, second = theta.values()
    close("matrix", A.to_dense(theta), torch.kron(first, second))


def test_adjoints_of_transforms_are_not_their_inverses() -> None:
    F = ParDFT(C128, 6)
    close("complex", F.H.to_dense(), 6 * F.inv.to_dense())
    R = ParDFT(F64, 6)
    x, y = values((6,), F64, 1), values((4,), C128, 2)
    close("there", R * x, torch.fft.rfft(x))
    close("inverse", R.inv * y, torch.fft.irfft(y, n=6))
    left = torch.vdot((R * x).resolve_conj(), y).real
    close("real inner product", torch.dot(x, R.H * y), left)
    close("undone", R.inv * (R * x), x)


def test_the_laws_of_the_algebra() -> None:
    A, B = ParMatrix(C128, 3, 4), ParMatrix(C128, 4, 2)
    s, t = init(A), init(B)
    both = Parameters({**s, **t})
    a, b = A.to_dense(s), B.to_dense(t)
    close("product", (A @ B).to_dense(both), a @ b)
    close("adjoint", (A @ B).H.to_dense(both), b.mH @ a.mH)
    close("multiple", ((2 - 1j) * A).H.to_dense(s), (2 + 1j) * a.mH)
    close("from the right", (A * 3.0).to_dense(s), 3 * a)
    close("quotient", (A / 4).to_dense(s), a / 4)
    close("opposite", (-A).to_dense(s), -a)
    close("difference", (A - A).to_dense(s), 0 * a)
    assert A.H.H is A and (A @ B).domain == B.domain and (A @ B).codomain == A.codomain
    D = ParDiagonal(F64, 3)
    assert D.inv.inv is D and D.H.inv is D.inv.H and D.inv.H.H is D.inv
    assert ParIdentity(F64, 3).order == ()


# -- forms of tensors -----------------------------------------------------------------------------


def bound(spec: Spec) -> tuple[ParOperator, Tensor]:
    """An operator with parameters and its matrix."""
    known: Any = {}
    A = build(spec, known)
    theta = parameters(draw(spec), known)
    return (A(theta) if theta else A), A.to_dense(theta)


FORMS = kron(matrix(4, 3, C128), dft(5), restriction(4, (1, 3), T=C128))


def test_tensors_vectors_and_batches() -> None:
    A, M = bound(FORMS)
    x = values((3, 5, 4), C128, 1)
    y = (M @ vec(x)).reshape(4, 5, 2)
    close("tensor", A * x, y)
    close("call", A(x), y)
    close("vec", A * vec(x), vec(y))
    for batch in ((1,), (2,), (2, 3), (1, 1, 2), (0,), (2, 0)):
        X = values((60, *batch), C128, 2)
        Y = (M @ X.reshape(60, -1)).reshape(40, *batch) if X.numel() else X.new_empty(40, *batch)
        got = A * X
        assert got.shape == (40, *batch)
        close(f"vectors {batch}", got, Y)
        got = A * X.reshape(3, 5, 4, *batch)
        assert got.shape == (4, 5, 2, *batch)
        close(f"tensors {batch}", got, Y.reshape(4, 5, 2, *batch))


def test_any_strides() -> None:
    A, M = bound(FORMS)
    base = values((4, 5, 3), C128, 3)
    inputs = {
        "transposed": base.permute(2, 1, 0),
        "conjugate view": values((3, 5, 4), C128, 4).conj(),
        "expanded": values((3, 1, 4), C128, 5).expand(3, 5, 4),
        "strided": values((6, 5, 8), C128, 6)[::2, :, ::2],
        "expanded batch": values((3, 5, 4, 1), C128, 7).expand(3, 5, 4, 6),
        "negative view": torch.complex(values((3, 5, 4), F64, 8), values((3, 5, 4), F64, 9))
        .conj()
        .imag.to(C128),
    }
    for name, x in inputs.items():
        before = x.clone()
        rows = x.reshape(60, -1)
        y = A * x
        close(name, y.reshape(40, -1), M @ rows)
        assert torch.equal(before, x), f"{name}: the input was changed"
        y = A.H * (A * x)
        close(f"{name}, adjoint", y.reshape(60, -1), M.mH @ M @ rows)


@pytest.mark.parametrize(
    "spec",
    [
        identity(4),
        restriction(4, (0, 4)),
        compose(identity(4), identity(4)),
        kron(identity(2), identity(2)),
        restriction(4, (1, 3)),
        scale(1, identity(4)),
    ],
    ids=str,
)
def test_gradients_of_operators_that_do_little(spec: Spec) -> None:
    A, M = bound(spec)
    x = values((4,), F64, 1).requires_grad_()
    (A * x).sum().backward()
    close("gradient", x.grad, M.sum(0))


def test_wrong_tensors_are_refused() -> None:
    A = tessel.kron(ParDFT(F32, 4), ParDFT(C64, 3))
    for wrong in (torch.ones(4, 4), torch.ones(11), torch.ones(3, 4), torch.tensor(1.0)):
        with pytest.raises(
            ValueError, match=r"expected a tensor of shape \(4, 3\), or its vec"
        ) as e:
            A * wrong
        assert str(tuple(wrong.shape)) in str(e.value)
    for dtype in (F64, C64, C128, torch.int64, torch.float16):
        with pytest.raises(ValueError, match=r"expected a tensor of torch.float32, got torch\."):
            A * torch.ones(4, 3, dtype=dtype)
    for nonsense in ([1.0], None, "x", 1.5):
        with pytest.raises((ValueError, TypeError)):
            A(nonsense)


# -- parameters -----------------------------------------------------------------------------------


def test_equal_seeds_draw_equal_parameters() -> None:
    A = tessel.kron(ParMatrix(F64, 2, 3), ParDiagonal(C128, 4), ParMultilinear(F64, 2, 2, [3]))
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(list(init(A).values()))
    assert [tuple(each.shape) for each in drawn[0]] == [(2, 3), (4,), (2, 2, 3)]
    assert [each.dtype for each in drawn[0]] == [F64, C128, F64]
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(drawn[0], drawn[2], strict=True))
    assert all(each.requires_grad and each.is_leaf for each in drawn[0])
    assert not any(each.requires_grad for each in init(A, requires_grad=False).values())


def test_parameters_have_the_size_that_keeps_results() -> None:
    """A matrix of n columns draws numbers of variance 1/n, also more of them than one chunk has."""
    A = ParMatrix(F64, 700, 400)
    (value,) = init(A).values()
    value = value.detach()
    assert 0.99 < float(value.var()) * 400 < 1.01 and abs(float(value.mean())) < 1e-3


def test_one_operator_used_twice_has_one_parameter() -> None:
    A, B = ParMatrix(F64, 3, 3), ParMatrix(F64, 3, 3)
    S = A.H @ B @ A + 2 * tessel.kron(A)
    assert S.leaves == (A, B) and len(init(S)) == 2 and len(list(S.parameters())) == 2
    theta = init(A)
    twice = gradient(lambda each: (A @ A)(each).to_dense().sum(), theta)[A]
    a = theta[A].detach()
    ones = torch.ones(3, 3, dtype=F64)
    close("gradient", twice, ones @ a.mT + a.mT @ ones)


def test_an_optimizer_trains_an_operator() -> None:
    torch.manual_seed(0)
    S = tessel.kron(ParMatrix(F64, 2, 3), ParDiagonal(F64, 4))
    true_values = draw(kron(matrix(2, 3), diagonal(4)))
    M = torch.kron(*[v if v.dim() == 2 else torch.diag(v) for v in true_values.values()])
    X = values((12, 40), F64, 3)
    optimizer = torch.optim.Adam(S.parameters(), lr=0.05)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = (S * X - M @ X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 1e-3 * losses[0], losses[::50]
    assert [id(each) for each in S.parameters()] == [id(each) for each in S.parameters()]


def test_an_operator_is_a_module() -> None:
    S = tessel.kron(ParMatrix(F64, 2, 3), ParDiagonal(F64, 4))
    other = tessel.kron(ParMatrix(F64, 2, 3), ParDiagonal(F64, 4))
    module, copy = S.module(), other.module()
    x = values((3, 4), F64, 1)
    close("module", module(x), S * x)
    assert not torch.equal(module(x), copy(x))
    assert copy.load_state_dict(module.state_dict())
    close("loaded", copy(x), module(x))
    close("the operator has what its module has", other * x, S * x)
    assert len(module.state_dict()) == 2
    model = torch.nn.Sequential(module, torch.nn.Tanh())
    model(x).sum().backward()
    assert all(each.grad is not None for each in S.parameters())


def test_gradients_by_function() -> None:
    S = tessel.kron(ParMatrix(F64, 2, 3), ParDiagonal(F64, 4))
    theta = init(S)
    x = values((3, 4), F64, 1)
    found = gradient(lambda each: (S(each) * vec(x)).sum(), theta)
    loss = (S(theta) * x).sum()
    loss.backward()
    assert isinstance(found, Parameters) and list(found) == list(theta)
    for leaf, value in theta.items():
        close("gradient", found[leaf], value.grad)
    at = gradient(lambda point: (S(theta) * point).square().sum(), x)
    M = S.to_dense(theta).detach()
    close("gradient of x", vec(at), 2 * M.mT @ M @ vec(x))


def test_gradients_pass_torch_s_checks() -> None:
    """First and second order, by finite differences, of x and θ."""
    known: Any = {}
    round_trip = compose(inv(dft(4, F64)), diagonal(3, C128), dft(4, F64))
    spec = kron(round_trip, inv(matrix(2, 2)))
    A = build(spec, known)
    theta = draw(spec)
    leaves = [known[leaf] for leaf in theta]

    def function(x: Tensor, *given: Tensor) -> Tensor:
        return A(Parameters(zip(leaves, given, strict=True))) * x

    points = [values((4, 2), F64, 1), *theta.values()]
    for each in points:
        each.requires_grad_()
    assert torch.autograd.gradcheck(function, points)
    assert torch.autograd.gradgradcheck(function, points)


def test_parameters_are_found_by_whatever_has_only_them() -> None:
    A, D = ParMatrix(F64, 3, 3), ParDiagonal(F64, 4)
    S = tessel.kron(A.H @ A, D)
    theta = init(S)
    values_of_a = [theta[key] for key in (A, A.H, A.inv, A.H @ A, 2 * A, distribute(A))]
    assert all(each is values_of_a[0] for each in values_of_a)
    assert theta.get(distribute(D, [1])) is theta[D]
    assert A.inv in theta and distribute(A) in theta and S not in theta
    assert ParMatrix(F64, 3, 3) not in theta and "A" not in theta and theta.get(S) is None
    replacement = torch.ones(3, 3, dtype=F64)
    theta[distribute(A)] = replacement
    assert theta[A] is replacement and len(theta) == 2
    theta.update({A.H: 2 * replacement})
    theta |= {distribute(D): torch.ones(4, dtype=F64)}
    assert len(theta) == 2 and theta[A][0, 0] == 2
    for wrong, text in {
        S: "has 2 parameters, ask for one of ParMatrix",
        ParDFT(C128, 3): "has no parameters",
        ParMatrix(F64, 3, 3): "θ has no value for ParMatrix",
        "A": "θ is indexed by operators",
    }.items():
        with pytest.raises(KeyError, match=text):
            theta[wrong]
    with pytest.raises(KeyError, match="has 2 parameters"):
        theta[S] = replacement
    with pytest.raises(ValueError, match="a parameter is given two values"):
        Parameters({A: replacement, A.H: replacement})
    assert theta.pop(distribute(A)) is not None and A not in theta
    del theta[distribute(D)]
    assert not theta


def test_parameters_of_an_expression_are_those_of_its_parts() -> None:
    S1, S2, F = ParMatrix(F64, 2, 3), ParDiagonal(F64, 4), ParDFT(F64, 4)
    A = tessel.kron(S1, F.inv @ F @ S2)
    theta = init(A)
    x, y = values((3,), F64, 1), values((4,), F64, 2)
    close("part", S1(theta) * x, theta[S1] @ x)
    close("adjoint", S1.H(theta) * values((2,), F64, 1), theta[S1].mT @ values((2,), F64, 1))
    close("a part without parameters", F(theta) * y, torch.fft.rfft(y))
    bound = S1(theta)
    assert list(bound.parameters()) == [theta[S1]]
    other = init(A)  # each part from another θ
    both = tessel.kron(S1(theta), S2(other))
    close("two", both * torch.outer(x, y), torch.outer(theta[S1] @ x, other[S2] * y))
    close("one after the other", (S2.H @ S2)(theta)(theta) * y, theta[S2] ** 2 * y)
    slope = gradient(lambda each: (S1(each) * x).sum(), theta)
    close("gradient", slope[S1], x.expand(2, 3))
    assert slope[S2].count_nonzero() == 0, "nothing depends on it"
    with pytest.raises(ValueError, match="θ has no value for ParMatrix"):
        (S1 @ ParMatrix(F64, 3, 3))(theta)


def test_factors_in_the_order_of_julia() -> None:
    A, B, C = ParMatrix(F64, 2, 3), ParMatrix(F64, 4, 5), ParMatrix(F64, 3, 2)
    theta = init(tessel.kron(A, B, C))
    x = values((3, 5, 2), F64, 1)
    expected = torch.einsum("ai,bj,ck,ijk->abc", theta[A], theta[B], theta[C], x)
    one = tessel.kron(C, B, A, order="julia")
    nested = tessel.kron(tessel.kron(C, B, order="julia"), A, order="julia")
    mixed = tessel.kron(A, tessel.kron(C, B, order="julia"))
    for S in (tessel.kron(A, B, C), tessel.kron(A, B, C, order="tensor"), one, nested, mixed):
        assert S.domain.shape == (3, 5, 2)
        close("on a tensor", S(theta) * x, expected)
        close("on a vec", S(theta) * vec(x), vec(expected))
    bound = tessel.kron(C(theta), B(theta), A(theta), order="julia")
    close("bound", bound * x, expected)
    close("adjoint", one(theta).H * expected, tessel.kron(A, B, C)(theta).H * expected)
    assert tessel.kron(A, order="julia") is A
    other = tessel.kron(C, B, A)(theta) * vec(x)  # is taken, and is another operator
    assert (other - vec(expected)).norm() > 0.1 * expected.norm()
    for wrong in ("Julia", "fortran", "", None, 1):
        with pytest.raises(ValueError, match='order is "tensor" or "julia", got'):
            tessel.kron(A, B, order=wrong)  # type: ignore[arg-type]


def test_an_explanation_tells_the_order_of_factors() -> None:
    Fx, Fy = ParDFT(F64, 10), ParDFT(C128, 20)
    note = "dimensions: 0 of length 10, 1 of length 20; kron has its factors in this order"
    for S in (tessel.kron(Fx, Fy), 2 * tessel.kron(Fx, Fy), tessel.kron(Fx, Fy).inv.inv):
        assert note in str(explained := distribute(S, [1, 1]).explain())  # type: ignore[attr-defined]
        assert len(explained.notes) == 1
    for S in (tessel.kron(Fy, Fy), Fx):
        assert distribute(S, [1] * len(S.domain.shape)).explain().notes == ()  # type: ignore[attr-defined]


def test_parameters_that_do_not_fit_are_refused() -> None:
    A, B = ParMatrix(F64, 2, 3), ParMatrix(F64, 2, 3)
    x = torch.ones(3, dtype=F64)
    with pytest.raises(ValueError, match=r"has parameters: apply the operator S as S\(θ\) \* x"):
        A * x
    with pytest.raises(ValueError, match="θ belongs to another operator"):
        A(init(B))
    with pytest.raises(ValueError, match="θ has no value for ParMatrix"):
        (A.H @ B)(init(A))
    with pytest.raises(ValueError, match=r"expected torch.float64 of shape \(2, 3\), got"):
        A(Parameters({A: torch.ones(3, 2, dtype=F64)}))
    with pytest.raises(ValueError, match=r"got torch\.float32 of shape"):
        A(Parameters({A: torch.ones(2, 3)}))
    with pytest.raises(ValueError, match="takes a tensor, or parameters"):
        A({A: torch.ones(2, 3, dtype=F64)})
    with pytest.raises(ValueError, match="bound to two values"):
        A(init(A)).H @ A(init(A))
    with pytest.raises(ValueError, match="has parameters"):
        A.H(init(A)) @ B * x


def test_bound_operators_combine() -> None:
    A, B = ParMatrix(F64, 2, 3), ParMatrix(F64, 4, 2)
    s, t = init(A), init(B)
    a, b = s[A].detach(), t[B].detach()
    x = values((3,), F64, 1)
    close("product", (B(t) @ A(s)) * x, b @ a @ x)
    close("adjoint", (B(t) @ A(s)).H * (b @ a @ x), a.mT @ b.mT @ b @ a @ x)
    close("sum", (A(s) + 2 * A(s)) * x, 3 * a @ x)
    close("kron", tessel.kron(A(s), B(t)).to_dense(), torch.kron(a, b))
    close("with one that is not bound", ((B @ A(s))(t)) * x, b @ a @ x)
    close("difference", (A(s) - A(s)) * x, 0 * a @ x)
    close("opposite", -A(s) * x, -a @ x)
    square = ParMatrix(F64, 3, 3)
    u = init(square)
    close("inverse", square(u).inv * (square(u) * x), x)
    close("its adjoint", square(u).inv.H * (square(u).H * x), x)
    assert (A(s)).domain == A.domain and "θ" in repr(A(s))


# -- order and size -------------------------------------------------------------------------------


def order(A: ParOperator) -> list[list[str]]:
    return [[type(task.actor).__name__ for task in group] for group in A.order]


def test_a_real_transform_comes_first_wherever_it_stands() -> None:
    for place in range(3):
        factors: list[ParOperator] = [ParDFT(C64, 8), ParDFT(C64, 6)]
        factors.insert(place, ParDFT(F32, 10))
        A = tessel.kron(*factors)
        (group,) = A.order  # one call does them all
        assert group[0].dims == (place,) and len(group) == 3
        (group,) = A.H.order
        assert group[-1].dims == (place,), "its adjoint comes last"


def test_restrictions_come_as_early_as_they_may() -> None:
    R = [ParRestriction(C64, 8, [range(2)]), ParRestriction(C64, 9, [range(3)])]
    F = tessel.kron(ParDFT(C64, 8), ParDFT(C64, 9))
    there = tessel.kron(*R) @ F
    assert order(there) == [["ParDFT"], ["ParRestriction"]] * 2
    assert order(there.H) == [["ParRestriction"], ["ParDFT"]] * 2, "zeros come late"
    along = tessel.kron(ParMatrix(C64, 8, 8), R[1])
    assert order(along) == [["ParRestriction"], ["ParMatrix"]]
    assert order(along.H) == [["ParMatrix"], ["ParRestriction"]]


def test_matrices_that_shrink_come_first_and_those_that_grow_last() -> None:
    A = tessel.kron(ParMatrix(F64, 9, 3), ParDiagonal(F64, 4), ParMatrix(F64, 2, 8))
    assert [group[0].dims for group in A.order] == [(2,), (1,), (0,)]
    assert [group[0].dims for group in A.H.order] == [(0,), (1,), (2,)]


def test_a_kronecker_product_never_forms_the_big_matrix() -> None:
    n = 32
    A = tessel.kron(*(ParMatrix(F32, n, n) for _ in range(3)))
    theta = init(A)
    x = torch.ones(n, n, n)
    with torch.no_grad(), count_memory() as memory:
        A(theta) * x
    assert memory.peak <= 4 * x.nbytes, "the matrix has n³ times as many numbers as x"
    with count_memory() as memory:
        gradient(lambda each: (A(each) * x).sum(), theta)
    assert memory.peak <= 12 * x.nbytes


def test_a_restriction_of_a_transform_keeps_little() -> None:
    n = 48
    R = tessel.kron(*(ParRestriction(C64, n, [range(2)]) for _ in range(3)))
    F = tessel.kron(*(ParDFT(C64, n) for _ in range(3)))
    x = torch.ones(n, n, n, dtype=C64)
    with count_memory() as memory:
        (R @ F) * x
    assert memory.peak < 2 * x.nbytes, "only the first of three transforms is of all values"


# -- what is refused when it is built -------------------------------------------------------------

A32, A64 = ParMatrix(F32, 3, 4), ParMatrix(F64, 3, 4)
Z = ParMatrix(C64, 3, 4)
Refusal = tuple[Callable[[], Any], str]

REFUSED: dict[str, Refusal] = {
    "sizes in a product": (lambda: A32 @ A32, r"takes float32 4, .* gives float32 3"),
    "kinds in a product": (lambda: Z @ A32.H, r"takes complex64 4, .* gives float32 4"),
    "precision in a product": (lambda: A64 @ A32.H, r"takes float64 4, .* gives float32 4"),
    "dimensions in a product": (
        lambda: ParIdentity(F32, 12) @ tessel.kron(A32, A32.H),
        r"takes float32 12, .* gives float32 3×4",
    ),
    "sizes in a sum": (lambda: A32 + A32.H, r"maps float32 4 to float32 3.*float32 3 to float32 4"),
    "kinds in a sum": (lambda: A32 + Z, r"float32 4 to float32 3.*complex64 4 to complex64 3"),
    "sizes in a difference": (lambda: A32 - A32.H, "cannot add"),
    "precision in kron": (lambda: tessel.kron(A32, A64), r"torch.float32, .* torch.float64"),
    "precision in kron, complex": (
        lambda: tessel.kron(A64, Z),
        r"torch.float64, .*torch.complex64",
    ),
    "two real transforms": (
        lambda: tessel.kron(ParDFT(F32, 4), ParDFT(F32, 4)),
        "both map real to complex numbers; only one may, the others need torch.complex64",
    ),
    "two real adjoints": (
        lambda: tessel.kron(ParDFT(F32, 4).H, ParDFT(F32, 4).inv),
        "both map complex to real",
    ),
    "there and back at once": (
        lambda: tessel.kron(ParDFT(F32, 4), ParDFT(F32, 4).inv),
        "maps real to complex numbers, .* complex to real",
    ),
    "a round trip beside complex numbers": (
        lambda: tessel.kron(ParDFT(F32, 4) @ ParDFT(F32, 4).inv, ParDFT(C64, 4)),
        "only real-linear",
    ),
    "sums of round trips beside complex numbers": (
        lambda: tessel.kron(2 * (ParDFT(F32, 4) @ ParDFT(F32, 4).inv) + ParIdentity(C64, 3), Z),
        "only real-linear",
    ),
    "nothing in kron": (lambda: tessel.kron(), "at least one"),
    "no operator in kron": (lambda: tessel.kron(A32, torch.ones(2, 2)), "kron takes operators"),
    "a class in kron": (lambda: tessel.kron(ParIdentity), "kron takes operators"),  # type: ignore[arg-type]
    "no length": (lambda: ParDFT(F32, 0), "n must be an integer of at least 1, got 0"),
    "a negative length": (lambda: ParIdentity(F32, -1), "n must be an integer"),
    "half a length": (lambda: ParDiagonal(F32, 1.5), "n must be an integer"),
    "a word as length": (lambda: ParDiagonal(F32, "3"), "n must be an integer"),
    "a truth as length": (lambda: ParDiagonal(F32, True), "n must be an integer"),
    "no rows": (lambda: ParMatrix(F32, 0, 3), "m must be an integer"),
    "no columns": (lambda: ParMatrix(F32, 3, 0), "n must be an integer"),
    "no modes": (lambda: ParMultilinear(F32, 2, 2, [3, 0]), "modes must be an integer"),
    "an integer dtype": (lambda: ParMatrix(torch.int64, 2, 2), "T must be one of torch.float16"),
    "complex bfloat16": (lambda: ParDFT(torch.bfloat16, 2), "no complex numbers of bfloat16"),
    "no dtype": (lambda: ParIdentity(float, 2), "T must be one of"),
    "numbers swapped": (lambda: ParMatrix(3, 3, F32), "T must be one of"),
    "a range too long": (
        lambda: ParRestriction(F32, 4, [range(2, 5)]),
        "not a range of indices below 4",
    ),
    "a negative range": (lambda: ParRestriction(F32, 4, [range(-1, 2)]), "not a range of indices"),
    "an empty range": (lambda: ParRestriction(F32, 4, [range(2, 2)]), "not a range of indices"),
    "ranges that overlap": (
        lambda: ParRestriction(F32, 4, [(0, 2), (1, 3)]),
        "ascending and disjoint",
    ),
    "ranges that descend": (
        lambda: ParRestriction(F32, 4, [(2, 3), (0, 1)]),
        "ascending and disjoint",
    ),
    "no ranges": (lambda: ParRestriction(F32, 4, []), "at least one range"),
    "steps": (lambda: ParRestriction(F32, 4, [range(0, 4, 2)]), "steps of one"),
    "a number as ranges": (lambda: ParRestriction(F32, 4, 2), "ranges"),  # type: ignore[arg-type]
    "numbers as ranges": (lambda: ParRestriction(F32, 4, [0, 2]), "ranges"),  # type: ignore[list-item]
    "halves as ranges": (lambda: ParRestriction(F32, 4, [(0.5, 2)]), "ranges"),  # type: ignore[list-item]
    "triples as ranges": (lambda: ParRestriction(F32, 4, [(0, 2, 1)]), "ranges"),  # type: ignore[list-item]
    "the inverse of a rectangle": (lambda: A32.inv, "has no inverse"),
    "the inverse of a sum": (
        lambda: (ParIdentity(F32, 3) + ParIdentity(F32, 3)).inv,
        "has no inverse",
    ),
    "the inverse of a restriction": (
        lambda: ParRestriction(F32, 4, [range(3)]).inv,
        "has no inverse",
    ),
    "the inverse of its adjoint": (
        lambda: ParRestriction(F32, 4, [range(3)]).H.inv,
        "has no inverse",
    ),
    "the inverse of nothing": (lambda: (0 * ParIdentity(F32, 3)).inv, "has no inverse"),
    "the inverse of a product": (lambda: (A32.H @ A32).inv, "has no inverse"),
    "the inverse in kron": (lambda: tessel.kron(ParIdentity(F32, 3), A32).inv, "has no inverse"),
    "the inverse of weights": (lambda: ParMultilinear(F32, 2, 3, [4]).inv, "has no inverse"),
    "a complex multiple": (lambda: 1j * A32, "is real: it cannot be multiplied by 1j"),
    "a complex quotient": (lambda: A32 / 2j, "is real: it cannot be multiplied"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_is_refused_when_it_is_built(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        make()


def test_what_is_no_algebra_is_a_type_error() -> None:
    for make in (
        lambda: A32 + 1,
        lambda: A32 @ torch.ones(4),
        lambda: A32 * A32.H,
        lambda: A32 * "x",
        lambda: "x" * A32,
        lambda: A32 - None,
        lambda: A32 / A32,
    ):
        with pytest.raises(TypeError):
            make()


def test_zero_is_no_divisor() -> None:
    with pytest.raises(ZeroDivisionError):
        A32 / 0


def test_operators_print_themselves() -> None:
    assert (
        repr(A32.H @ A32) == "ParMatrix(float32 4 → float32 3).H @ ParMatrix(float32 4 → float32 3)"
    )
    assert repr(ParDFT(F32, 4).inv.H).endswith(".inv.H")
    assert repr(2 * (A32 + A32)).startswith("2 * (")
