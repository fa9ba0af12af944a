"""The laws of a linear operator, checked on the workers that run this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple

import torch
from torch import Tensor

from tessel import transport
from tessel.layout import Layout
from tessel.linop import LinearOperator

_TOLERANCE = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5}


@contextmanager
def count_traffic() -> Iterator[transport.Traffic]:
    """What this worker sends and receives inside of the `with` block, once it has ended.

    >>> import tessel, torch
    >>> layer = tessel.nn.AllSumReduce(tessel.world(), [0])
    >>> with tessel.testing.count_traffic() as traffic:
    ...     y = layer(torch.ones(3))
    >>> traffic.bytes_sent
    0
    """
    before = astuple(transport.traffic())
    counted = transport.Traffic()
    yield counted
    after = astuple(transport.traffic())
    counted.messages, counted.bytes_sent, counted.bytes_received, counted.agreements = (
        b - a for a, b in zip(before, after, strict=True)
    )


def check_adjoint(
    operator: LinearOperator, dtype: torch.dtype = torch.float64, seed: int = 0
) -> None:
    """Raise AssertionError unless ⟨A x, y⟩ = ⟨x, A.H y⟩ for random x and y, and A.H.H is A.

    All workers of the operator call this together, and all raise or none.

    Args:
        operator: any `LinearOperator`.
        dtype: of the random tensors.
        seed: of the random tensors.

    >>> import tessel
    >>> layout = tessel.Layout.balanced(tessel.world(), (3,))
    >>> tessel.testing.check_adjoint(tessel.Move(layout, layout))
    """
    x = random_in(operator.domain, dtype, seed)
    y = random_in(operator.codomain, dtype, seed + 1)
    left = _total(operator, operator.codomain.local_inner(operator(x), y))
    right = _total(operator, operator.domain.local_inner(x, operator.H(y)))
    _check_close(operator, "⟨A x, y⟩", left, "⟨x, A.H y⟩", right, _scale(operator, x, y))
    twice = operator.H.H(x) - operator(x)
    _check_close(operator, "|A.H.H x - A x|", _total(operator, twice.abs().sum()), "0", 0.0, 1.0)


def check_gradient(
    operator: LinearOperator, dtype: torch.dtype = torch.float64, seed: int = 0
) -> None:
    """Raise AssertionError unless autograd of A gives A.H, in first and second order.

    All workers of the operator call this together, and all raise or none. For y = A x and the
    loss ½|A x|², the gradient is A.H A x; the gradient of ½|A.H A x|² in turn is (A.H A)² x. The
    forward-mode derivative of A is A.

    >>> import tessel
    >>> layout = tessel.Layout.balanced(tessel.world(), (3,))
    >>> tessel.testing.check_gradient(tessel.Move(layout, layout))
    """
    x = random_in(operator.domain, dtype, seed).requires_grad_()
    direction = random_in(operator.domain, dtype, seed + 1)

    def normal(v: Tensor) -> Tensor:
        return operator.H(operator(v))

    (first,) = torch.autograd.grad(_half_square(operator(x)), x, create_graph=True)
    (second,) = torch.autograd.grad(_half_square(first), x)
    _check_equal(operator, "gradient of ½|A x|²", first.detach(), normal(x.detach()))
    expected = normal(normal(x.detach()))
    _check_equal(operator, "gradient of ½|A.H A x|²", second, expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), direction)
        tangent = torch.autograd.forward_ad.unpack_dual(operator(dual)).tangent
    assert tangent is not None
    _check_equal(operator, "derivative of A x", tangent, operator(direction))


def random_in(layout: Layout, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """A random tensor in a layout: shared copies are equal, separate ones are not."""
    generator = torch.Generator().manual_seed(seed)
    worker = transport.this_worker()
    mine = torch.empty(0, dtype=dtype)
    coordinates = layout.partition.index
    if coordinates is not None:
        holder = min(layout.holders(coordinates))
        generator.manual_seed(1_000_003 * seed + holder)
        mine = torch.randn(layout.shape_on(worker), dtype=dtype, generator=generator)
    return mine


def _half_square(y: Tensor) -> Tensor:
    return 0.5 * torch.vdot(y.reshape(-1), y.reshape(-1)).real


def _total(operator: LinearOperator, mine: Tensor) -> complex:
    return complex(operator.group.sum(mine.detach().to(torch.complex128).reshape(1)).item())


def _scale(operator: LinearOperator, x: Tensor, y: Tensor) -> float:
    squares = (x.abs().square().sum(), y.abs().square().sum())
    a, b = (abs(_total(operator, square)) for square in squares)
    return max(1.0, (a * b) ** 0.5)


def _check_equal(operator: LinearOperator, what: str, got: Tensor, expected: Tensor) -> None:
    difference = _total(operator, (got - expected).abs().sum())
    scale = max(1.0, abs(_total(operator, expected.abs().sum())))
    _check_close(operator, f"|{what} - expected|", difference, "0", 0.0, scale)


def _check_close(
    operator: LinearOperator, name: str, got: complex, other: str, expected: complex, scale: float
) -> None:
    tolerance = 1e-12
    if abs(got - expected) > tolerance * scale:
        raise AssertionError(
            f"{operator}: {name} = {got} but {other} = {expected} (scale {scale:.3g})"
        )
