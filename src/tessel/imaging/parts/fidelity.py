"""Data fidelities on measurements in parts.

A fidelity whose distance is a sum over the values of a measurement is computed on each part. One
that is not, as a norm or a mean, is computed on the whole measurement, on one worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tessel.imaging.parts.operators import PartOperator, Whole
from tessel.layout import Layout
from tessel.move import Move
from tessel.partition import Partition
from tessel.shared import nothing
from tessel.transport import kept_in_job

_MISFITS = (ValueError, RuntimeError, TypeError, IndexError, AttributeError, NotImplementedError)


@dataclass(frozen=True)
class _Scaled:
    """Physics that measures the image times a number."""

    factor: float = 1.0

    def A(self, x: Tensor) -> Tensor:
        return x if self.factor == 1.0 else self.factor * x

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self.A(y)

    def A_vjp(self, x: Tensor, v: Tensor) -> Tensor:
        return self.A(v)


@dataclass(frozen=True)
class PartFidelity:
    """A data fidelity f(x, y, physics) = d(A(x), y) on parts.

    Args:
        fidelity: called as `f(x, y, physics)`; it may have its own `grad(x, y, physics)`.
        device: where it computes.
    """

    fidelity: Any
    device: torch.device | str = "cpu"

    def loss(self, x: Tensor, y: Tensor, operator: PartOperator | Whole) -> Tensor:
        """This worker's share of f."""
        if isinstance(operator, Whole):
            whole = operator.gather(x)
            if not operator.here:
                return nothing((), whole, y)
            return self.fidelity(whole, y, operator.physics).sum()
        u = operator.A(x)
        if self.is_separable:
            empty = 0 in u.shape
            return nothing((), u, y) if empty else self.fidelity(u, y, _Scaled()).sum()
        gather = _gather(operator.codomain)
        wholes = gather.apply(u), gather.apply(y)
        if not gather.codomain.partition.active:
            return nothing((), *wholes)
        return self.fidelity(*wholes, _Scaled()).sum()

    def grad(self, x: Tensor, y: Tensor, operator: PartOperator | Whole) -> Tensor:
        """This worker's part of the gradient of f in x."""
        if isinstance(operator, Whole):
            whole = operator.gather(x)
            here = operator.here
            slope = self._gradient(whole, y, operator.physics) if here else whole
            return operator.scatter(slope if here else nothing((0,), whole, y))
        return operator.A_adjoint(self._slope(operator.A(x), y, operator.codomain))

    def _slope(self, u: Tensor, y: Tensor, layout: Layout) -> Tensor:
        """This worker's part of the gradient of d in its first argument."""
        if self.is_separable:
            empty = 0 in u.shape
            shape = tuple(u.shape)
            return nothing(shape, u, y) if empty else self._gradient(u, y, _Scaled())
        gather = _gather(layout)
        wholes = gather.apply(u), gather.apply(y)
        here = gather.codomain.partition.active
        slope = self._gradient(*wholes, _Scaled()) if here else nothing((0,), *wholes)
        return gather.H.apply(slope)

    def _gradient(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        """The gradient of the fidelity in x: its own, or that of autograd."""
        if hasattr(self.fidelity, "grad"):
            return self.fidelity.grad(x, y, physics)
        return torch.func.grad(lambda x: self.fidelity(x, y, physics).sum())(x)

    @cached_property
    def problem(self) -> str:
        """What is wrong with it, as the end of a sentence: tried on small tensors."""
        x, y = _tried(self.device)
        try:
            expected = 2 * self._gradient(2 * x, y, _Scaled())
            got = self._gradient(x, y, _Scaled(2.0))
        except _MISFITS as error:
            reason = f"could not be tried on small tensors ({error})"
        else:
            if torch.allclose(got, expected, rtol=1e-4, atol=1e-6):
                return ""
            reason = "is not of the form d(A(x), y), which a fidelity of an image in parts must be"
        return f": {type(self.fidelity).__name__} {reason}; use a signal without partition"

    @cached_property
    def is_separable(self) -> bool:
        """Whether d is a sum over values: tried on halves of small measurements, each way.

        >>> class Square:
        ...     def __call__(self, x, y, physics):
        ...         return (physics.A(x) - y).square().sum()
        ...     def grad(self, x, y, physics):
        ...         return 2 * physics.A_vjp(x, physics.A(x) - y)
        >>> PartFidelity(Square()).is_separable
        True
        """
        u, y = _tried(self.device)
        try:
            return all(self._adds_up(u, y, dim) for dim in range(u.dim()))
        except _MISFITS:
            return False

    def _adds_up(self, u: Tensor, y: Tensor, dim: int) -> bool:
        """Whether d of two halves along a dimension gives that of the whole."""
        f, physics = self.fidelity, _Scaled()
        halves = list(zip(u.chunk(2, dim), y.chunk(2, dim), strict=True))
        slopes = torch.cat([self._gradient(*half, physics) for half in halves], dim)
        fits = torch.allclose(self._gradient(u, y, physics), slopes, rtol=1e-4, atol=1e-6)
        shares = torch.stack([f(*half, physics).sum() for half in halves])
        return fits and torch.allclose(f(u, y, physics).sum(), shares.sum(), rtol=1e-4)


def _tried(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Two small positive tensors, as a distance of counts or intensities takes them."""
    generator = torch.Generator().manual_seed(3)
    first, second = (0.1 + torch.rand((2, 2, 4, 6), generator=generator) for _ in range(2))
    return first.to(device), second.to(device)


@kept_in_job
def _gather(layout: Layout) -> Move:
    """The whole measurement on the first worker."""
    alone = Partition(layout.partition.ranks[:1], (1,))
    return Move(layout, Layout.whole(alone, layout.shape))
