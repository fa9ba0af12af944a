"""The public checks: they pass for right operators and fail, on every worker, for wrong ones.

Tests `testing/checks.py`, `testing/pool.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from movements import MOVEMENTS, case, me
from tessel import Layout, LinearOperator, Move, transport
from tessel.testing import check_adjoint, check_gradient, count_traffic

Run = Callable[..., list[Any]]

SECONDS = 15
DTYPES = [torch.float64, torch.complex128]
CHECKS: dict[str, Callable[..., None]] = {"adjoint": check_adjoint, "gradient": check_gradient}


class Local(LinearOperator):
    """An operator of a user, given by what it does to local tensors."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        domain: Layout | None = None,
        codomain: Layout | None = None,
    ) -> None:
        self.domain = balanced() if domain is None else domain
        self.codomain = self.domain if codomain is None else codomain
        self.forward, self.adjoint = forward, adjoint

    def _apply(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        return self.adjoint(y)


def balanced() -> Layout:
    """Seven numbers on all workers, uneven on more than one."""
    return Layout.balanced(tessel.world(), (7,))


def whole(shared: bool = False) -> Layout:
    return Layout.whole(tessel.world(), (4,), shared=shared)


def grown() -> Layout:
    return balanced().grow([(1, 1)])


def total(x: Tensor) -> Tensor:
    return Move(whole(), whole())._apply(x)


def fails(check: Callable[..., None], operator: LinearOperator, dtype: torch.dtype) -> bool:
    try:
        check(operator, dtype)
    except AssertionError:
        return True
    return False


def identity(x: Tensor) -> Tensor:
    return x.clone()


def _square(like: Tensor) -> Tensor:
    """A matrix of four rows that is not symmetric."""
    A = torch.arange(16.0).reshape(4, 4).to(like.dtype)
    return A + 1j * A.T if like.is_complex() else A


def right_operators() -> dict[str, LinearOperator]:
    some = tessel.world().create_partition_inclusive([0])
    halo = Move(balanced(), grown())
    return {
        "identity": Local(identity, identity),
        "zero": Local(torch.zeros_like, torch.zeros_like),
        "scale": Local(lambda x: 3 * x, lambda y: 3 * y),
        "a factor for each worker": Local(lambda x: (1 + me()) * x, lambda y: (1 + me()) * y),
        "matrix": Local(lambda x: _square(x) @ x, lambda y: _square(y).mH @ y, whole()),
        "sum of copies": Local(total, total, whole(), whole()),
        "sum to a shared value": Local(total, identity, whole(), whole(shared=True)),
        "use of a shared value": Local(identity, total, whole(shared=True), whole()),
        "product": halo.H @ Local(lambda x: 2 * x, lambda y: 2 * y, grown()) @ halo,
        "product with its adjoint": halo.H @ halo,
        "halo": halo,
        "on one worker": Local(lambda x: 2 * x, lambda y: 2 * y, Layout.whole(some, (3,))),
        "from one worker": Move(Layout.whole(some, (4,)), whole()),
        "nothing": Local(identity, identity, Layout.whole(tessel.world(), (0,))),
    }


def pass_all(dtype: torch.dtype) -> None:
    for operator in right_operators().values():
        for candidate in (operator, operator.H):
            check_adjoint(candidate, dtype)
            check_gradient(candidate, dtype)
            check_adjoint(candidate, dtype, seed=5)


@pytest.mark.parametrize("nprocs", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_operators_pass(run: Run, nprocs: int, dtype: torch.dtype) -> None:
    run(pass_all, dtype, nprocs=nprocs, timeout=SECONDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision_passes(run: Run, dtype: torch.dtype) -> None:
    run(pass_single, dtype, nprocs=2, timeout=SECONDS)


def pass_single(dtype: torch.dtype) -> None:
    for operator in (Move(balanced(), grown()), Move(grown(), balanced())):
        check_adjoint(operator, dtype)
        check_gradient(operator, dtype)


class TwiceIsAnother(Local):
    """The adjoint of its adjoint is not itself."""

    @property
    def H(self) -> LinearOperator:
        return Local(self.adjoint, lambda y: 2 * self.forward(y), self.codomain, self.domain)


class Detached(Local):
    """The right operator and adjoint, but autograd does not learn of them."""

    def apply(self, x: Tensor, terms: Any = None) -> Tensor:
        return super().apply(x.detach(), None)


def _change(x: Tensor) -> Tensor:
    return x.mul_(2)


def _bump(y: Tensor) -> Tensor:
    y = y.clone()
    if me() == 1:
        y[:1] *= 1.001
    return y


def _crop(y: Tensor) -> Tensor:
    """The inner part of a box with a halo, for three workers."""
    return y[1:-1] if me() == 1 else y[:-1] if me() == 0 else y[1:]


Makers = dict[str, Callable[[], LinearOperator]]

WRONG: Makers = {
    "an adjoint without the sum": lambda: Local(
        Move(balanced(), grown())._apply, _crop, balanced(), grown()
    ),
    "an all-reduce whose adjoint is nothing": lambda: Local(total, identity, whole(), whole()),
    "a shared value used without a sum": lambda: Local(
        identity, identity, whole(shared=True), whole()
    ),
    "a sum for a shared value too many": lambda: Local(total, total, whole(), whole(shared=True)),
    "a scaled adjoint": lambda: Local(lambda x: 3 * x, lambda y: 3.0001 * y),
    "the inverse for the adjoint": lambda: Local(lambda x: 2 * x, lambda y: y / 2),
    "an adjoint of the wrong sign": lambda: Local(identity, lambda y: -y),
    "a transposition left out": lambda: Local(
        lambda x: _square(x) @ x, lambda y: _square(y) @ y, whole()
    ),
    "wrong on one worker": lambda: Local(identity, _bump),
    "a forward that is not linear": lambda: Local(lambda x: x.abs() * x, identity),
    "a constant added": lambda: Local(lambda x: x + 1, identity),
    "random": lambda: Local(lambda x: x * torch.rand(()), identity),
    "not a number": lambda: Local(lambda x: x * math.nan, lambda y: y * math.nan),
    "not a number on one worker": lambda: Local(
        lambda x: x * (math.nan if me() == 1 else 1), identity
    ),
}
ADJOINT_ONLY: Makers = {
    "an adjoint whose adjoint is another": lambda: TwiceIsAnother(identity, identity),
    "copies of a shared value that differ": lambda: Local(
        lambda x: total(x) * (1 + me()), identity, whole(), whole(shared=True)
    ),
    "an adjoint whose shared copies differ": lambda: Local(
        identity, lambda y: total(y) * (1 + me()), whole(shared=True), whole()
    ),
    "an output of the wrong shape": lambda: Local(lambda x: x.repeat(2), lambda y: y.repeat(2)),
    "a wrong shape on one worker": lambda: Local(
        lambda x: x.repeat(2) if me() == 1 else x.clone(), identity
    ),
    "a wrong shape of the adjoint on one worker": lambda: Local(
        identity, lambda y: y[:1] if me() == 1 else y.clone()
    ),
    "an input that is changed": lambda: Local(_change, _change),
}

COMPLEX_ONLY: Makers = {
    "no conjugate": lambda: Local(lambda x: 1j * x, lambda y: 1j * y),
    "conjugation, which is not linear": lambda: Local(torch.conj_physical, torch.conj_physical),
    "the real part, which is not linear": lambda: Local(
        lambda x: x.real.to(x.dtype), lambda y: y.real.to(y.dtype)
    ),
}


def fail(name: str, check: str, dtype: torch.dtype) -> bool:
    makers = {**WRONG, **ADJOINT_ONLY, **COMPLEX_ONLY}
    return fails(CHECKS[check], makers[name](), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_check_adjoint_fails(run: Run, name: str, dtype: torch.dtype) -> None:
    assert all(run(fail, name, "adjoint", dtype, nprocs=3, timeout=SECONDS))


@pytest.mark.parametrize("name", ADJOINT_ONLY)
def test_check_adjoint_fails_for_what_it_alone_can_see(run: Run, name: str) -> None:
    assert all(run(fail, name, "adjoint", torch.float64, nprocs=3, timeout=SECONDS))


@pytest.mark.parametrize("name", COMPLEX_ONLY)
def test_check_adjoint_fails_for_complex_numbers(run: Run, name: str) -> None:
    assert all(run(fail, name, "adjoint", torch.complex128, nprocs=2, timeout=SECONDS))


@pytest.mark.parametrize("name", WRONG)
def test_check_gradient_fails(run: Run, name: str) -> None:
    """The gradient is compared with what the forward alone says, not with the given adjoint."""
    assert all(run(fail, name, "gradient", torch.float64, nprocs=3, timeout=SECONDS))


def detached_fails() -> list[bool]:
    return [
        fails(check_adjoint, Detached(identity, identity), torch.float64),
        fails(check_gradient, Detached(identity, identity), torch.float64),
    ]


def test_an_operator_that_autograd_does_not_see(run: Run) -> None:
    """The dot-test cannot see it; the gradient does."""
    assert run(detached_fails, nprocs=2, timeout=SECONDS) == [[False, True]] * 2


def message() -> str:
    with pytest.raises(AssertionError) as caught:
        check_adjoint(Local(lambda x: 2 * x, identity))
    return str(caught.value)


def test_the_failure_says_what_differs(run: Run) -> None:
    texts = run(message, nprocs=2, timeout=SECONDS)
    assert len(set(texts)) == 1
    assert "⟨A x, y⟩" in texts[0] and "Local" in texts[0]


def use_an_operator() -> None:
    """Call, adjoint, gradient, product: all of it from two methods."""
    halo = Move(balanced(), grown())
    double = Local(lambda x: 2 * x, lambda y: 2 * y, grown())
    A = double @ halo
    assert A.domain == balanced() and A.codomain == grown()
    whole_tensor = torch.arange(7.0, dtype=torch.float64)
    x = balanced().local_part(whole_tensor).clone().requires_grad_()
    y = A(x)
    assert torch.equal(y.detach(), 2 * grown().local_part(whole_tensor))
    y.sum().backward()
    expected = A.H(torch.ones_like(y))
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    assert torch.equal(A.H.H(x.detach()), y.detach())
    with pytest.raises(ValueError, match="expected a tensor of shape"):
        A(torch.ones(99))


def test_a_users_operator(run: Run) -> None:
    run(use_an_operator, nprocs=2, timeout=SECONDS)


def compose_misfits() -> str:
    with pytest.raises(ValueError) as caught:
        Move(balanced(), grown()) @ Move(balanced(), grown())
    return str(caught.value)


def test_a_product_of_misfits_prints_both_layouts(run: Run) -> None:
    texts = run(compose_misfits, nprocs=2, timeout=SECONDS)
    assert texts[0] == texts[1]
    assert "parts (4, 3)" in texts[0] and "parts (5, 4)" in texts[0]
    assert "Move(" in texts[0]  # the way out


def without_methods() -> None:
    class Empty(LinearOperator):
        domain = codomain = balanced()

    with pytest.raises(NotImplementedError, match="Empty"):
        Empty()(torch.ones(balanced().local_shape))
    with pytest.raises(NotImplementedError, match="Empty"):
        Empty().H(torch.ones(balanced().local_shape))


def test_an_operator_without_methods_names_itself(run: Run) -> None:
    run(without_methods, nprocs=2, timeout=SECONDS)


def counted() -> None:
    """Bytes of data only; nested blocks count on their own; an error inside still counts."""
    layer = tessel.nn.AllGather(tessel.world(), 0, 0)
    with count_traffic() as outer:
        layer(torch.ones(3))
        with count_traffic() as inner:
            layer(torch.ones(3, dtype=torch.float64))
    assert (inner.messages, inner.bytes_sent, inner.bytes_received) == (1, 24, 24)
    assert (outer.messages, outer.bytes_sent, outer.bytes_received) == (2, 36, 36)
    with pytest.raises(ZeroDivisionError), count_traffic() as broken:
        layer(torch.ones(3))
        raise ZeroDivisionError
    assert broken.bytes_sent == 12


def test_count_traffic(run: Run) -> None:
    run(counted, nprocs=2, timeout=SECONDS)


def checks_on_movements(name: str) -> None:
    """The operator inside of a movement passes."""
    layer = case(name).layer
    operator = layer if isinstance(layer, LinearOperator) else _operator_of(name)
    check_adjoint(operator)
    check_gradient(operator)


def _operator_of(name: str) -> LinearOperator:
    movement = case(name)
    givers = movement.layer.P_x.ranks  # type: ignore[attr-defined]
    shapes = {worker: movement.shapes[worker] for worker in givers}
    return movement.layer.operator(shapes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [n for n in MOVEMENTS if "ather" not in n[1:] and n != "scatter"])
def test_operators_of_movements(run: Run, name: str) -> None:
    run(checks_on_movements, name, nprocs=3, timeout=SECONDS)


def test_a_world_of_one_needs_no_workers() -> None:
    assert not transport.is_distributed()
    check_adjoint(Move(balanced(), grown()))
    check_gradient(Move(balanced(), grown()))
    assert fails(check_adjoint, Local(lambda x: 2 * x, identity), torch.float64)
