"""The laws of a linear operator, checked on the workers that run this."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from tessel import transport
from tessel.core.layout import Cut, Layout
from tessel.core.linop import LinearOperator
from tessel.core.move import Move


def check_adjoint(
    operator: LinearOperator, dtype: torch.dtype = torch.float64, seed: int = 0
) -> None:
    """Raise AssertionError unless A is linear, ⟨A x, y⟩ = ⟨x, A.H y⟩ and A.H.H = A.

    It is tested on random tensors. Shapes must be those of the layouts, copies of a shared value
    must be equal, and the input must not change. All workers of the operator call this together,
    and all raise or none.

    Args:
        operator: any `LinearOperator`.
        dtype: the dtype of the input.
        seed: the seed of the random tensors.

    >>> import tessel
    >>> layout = tessel.Layout.balanced(tessel.world(), (3,))
    >>> tessel.testing.check_adjoint(tessel.Move(layout, layout))
    """
    x, direction = (random_in(operator.domain, dtype, seed + k) for k in (0, 1))
    before = x.clone()
    image = operator(x)
    _check_shape(operator, "A x", operator.codomain, image)
    # With the dtype of the image: an operator may map real numbers to complex ones.
    y = random_in(operator.codomain, image.dtype, seed + 2)
    back = operator.H(y)
    _check_shape(operator, "A.H y", operator.domain, back)
    left = operator.codomain.local_inner(image, y)
    right = operator.domain.local_inner(x, back)
    scale = _norm(operator, image) * _norm(operator, y) + _norm(operator, x) * _norm(operator, back)
    _check_number(operator, "⟨A x, y⟩", left, "⟨x, A.H y⟩", right, scale)
    factor = 2 - 3j if x.is_complex() else 2
    combined = operator(x + factor * direction)
    _check_equal(operator, "A (x + c d)", combined, image + factor * operator(direction))
    _check_equal(operator, "A.H.H x", operator.H.H(x), image)
    _check_equal(operator, "x after A x", x, before)
    _check_copies(operator, "A x", operator.codomain, image)
    _check_copies(operator, "A.H y", operator.domain, back)


def check_gradient(
    operator: LinearOperator, dtype: torch.dtype = torch.float64, seed: int = 0
) -> None:
    """Raise AssertionError unless the gradient of A is A.H, in first and second order.

    The gradient of ½|A x|² is A.H A x, and that of ½|A.H A x|² is (A.H A)² x. The derivatives along
    a direction d, which only need A, must be ⟨A x, A d⟩ and ⟨A A.H A x, A d⟩. The forward-mode
    derivative of A is A. All workers of the operator call this together, and all raise or none.

    Args:
        operator: any `LinearOperator`.
        dtype: the dtype of the input.
        seed: the seed of the random tensors.

    >>> import tessel
    >>> layout = tessel.Layout.balanced(tessel.world(), (3,))
    >>> tessel.testing.check_gradient(tessel.Move(layout, layout))
    """
    x = random_in(operator.domain, dtype, seed).requires_grad_()
    direction = random_in(operator.domain, dtype, seed + 1)
    image, along = operator(x), operator(direction)
    first = _gradient(_half_square(image), x, create_graph=True)
    second = _gradient(_half_square(first), x)
    first = first.detach()
    for what, gradient, forward in (
        ("½|A x|²", first, image.detach()),
        ("½|A.H A x|²", second, operator(first)),
    ):
        derivative = operator.domain.local_inner(gradient, direction).real
        expected = operator.codomain.local_inner(forward, along).real
        scale = _norm(operator, gradient) * _norm(operator, direction)
        _check_number(
            operator, f"the derivative of {what}", derivative, "⟨A x, A d⟩", expected, scale
        )
    normal = operator.H(image.detach())
    _check_equal(operator, "the gradient of ½|A x|²", first, normal)
    twice = operator.H(operator(normal))
    _check_equal(operator, "the gradient of ½|A.H A x|²", second, twice)
    with forward_ad.dual_level():
        dual = operator(forward_ad.make_dual(x.detach(), direction))
        tangent = forward_ad.unpack_dual(dual).tangent
    # A tangent of zeros may be none at all.
    tangent = torch.zeros_like(dual) if tangent is None else tangent
    _check_equal(operator, "the derivative of A x", tangent, along)


def random_in(layout: Layout, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """A random tensor in a layout: shared copies are equal, separate ones are not.

    >>> import tessel
    >>> tessel.testing.random_in(tessel.Layout.balanced(tessel.world(), (3,))).shape
    torch.Size([3])
    """
    coordinates = layout.partition.index
    if coordinates is None:
        return torch.empty(0, dtype=dtype)
    holder = min(layout.holders(coordinates))  # workers with the same copies draw the same numbers
    # A factor above any number of workers: no two seeds share a generator.
    generator = torch.Generator().manual_seed(1_000_003 * seed + holder)
    return torch.randn(layout.local_shape, dtype=dtype, generator=generator)


def _gradient(loss: Tensor, x: Tensor, create_graph: bool = False) -> Tensor:
    """The gradient, or zero if the loss does not depend on x."""
    if not loss.requires_grad:
        return torch.zeros_like(x)
    found = torch.autograd.grad(loss, x, create_graph=create_graph, allow_unused=True)[0]
    return torch.zeros_like(x) if found is None else found


def _half_square(y: Tensor) -> Tensor:
    return 0.5 * torch.vdot(y.reshape(-1), y.reshape(-1)).real


def _check_copies(operator: LinearOperator, what: str, layout: Layout, value: Tensor) -> None:
    """Check that shared copies are equal: n of them add up to n times each."""
    if not layout.shared:
        return
    copies = len(layout.holders((0,) * layout.partition.dim))
    # Separate copies become different indices, along one more dimension.
    count = prod(layout.partition.shape[axis] for axis in layout.separate)
    places = Cut(layout.separate, tuple((k, k + 1) for k in range(count)))
    cuts = (places, *layout.cuts)
    apart = Layout(layout.partition, (count, *layout.shape), cuts, layout.shared)
    total = Move(replace(apart, shared=()), apart)(value.reshape(apart.local_shape))
    _check_equal(operator, f"the copies of {what}", total.reshape(value.shape), copies * value)


def _check_shape(operator: LinearOperator, what: str, layout: Layout, value: Tensor) -> None:
    wrong = tuple(value.shape) != layout.local_shape
    if _total(operator, torch.tensor(float(wrong))) != 0:
        raise AssertionError(
            f"{operator}: {what} does not have the shape of {layout}: expected "
            f"{layout.local_shape} on this worker, got {tuple(value.shape)}"
        )


def _check_equal(operator: LinearOperator, what: str, got: Tensor, expected: Tensor) -> None:
    difference = _norm(operator, got - expected)
    if not difference <= _tolerance(got.dtype) * max(_norm(operator, expected), 1.0):
        raise AssertionError(f"{operator}: {what} is wrong by {difference:.3g} in norm")


def _check_number(
    operator: LinearOperator, what: str, got: Tensor, other: str, expected: Tensor, scale: float
) -> None:
    """Two sums over all workers are equal; if one of them is real, in their real parts."""
    left, right = _total(operator, got), _total(operator, expected)
    if not (got.is_complex() and expected.is_complex()):
        left, right = complex(left.real), complex(right.real)
    if not abs(left - right) <= _tolerance(got.dtype) * max(scale, 1.0):
        raise AssertionError(f"{operator}: {what} = {left}, but {other} = {right}")


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-12 if dtype in (torch.float64, torch.complex128) else 100 * torch.finfo(dtype).eps


def _norm(operator: LinearOperator, value: Tensor) -> float:
    return abs(_total(operator, value.detach().abs().square().sum())) ** 0.5


def _total(operator: LinearOperator, mine: Tensor) -> complex:
    """The sum of a number over all workers of the operator, the same on each."""
    if transport.this_worker() not in operator.group.workers:
        return 0j
    return complex(operator.group.sum(mine.detach().to(torch.complex128).reshape(1)).item())
