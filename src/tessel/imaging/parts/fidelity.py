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

from tessel.core.layout import Layout, Shape
from tessel.core.move import Move
from tessel.core.shared import anchored_zeros
from tessel.imaging.parameters import depending_on, known, learned
from tessel.imaging.parts.operators import PartOperator, Whole, gathering

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


_PLAIN = _Scaled()


@dataclass(frozen=True)
class PartFidelity:
    """A data fidelity f(x, y, physics) = d(A(x), y) on parts.

    Args:
        fidelity: called as `f(x, y, physics)`; it may have its own `grad(x, y, physics)`.
        device: where it computes.
    """

    fidelity: Any
    device: torch.device | str = "cpu"

    def loss(
        self,
        x: Tensor,
        y: Tensor,
        operator: PartOperator | Whole,
        batch: int,
        *args: Any,
        **settings: Any,
    ) -> Tensor:
        """This worker's share of f: of each image of the batch if f tells them apart, or a number.

        Args:
            x: this worker's part of the image.
            y: that of the measurement.
            operator: between them.
            batch: the number of images.
            args, settings: of f, for whole images only.
        """
        f = self.fidelity
        if isinstance(operator, Whole) and operator.is_alone:
            share: Tensor = f(x, y, operator.physics, *args, **settings)
            return share
        shape = (batch,) if self.is_batched else ()
        if isinstance(operator, Whole):
            return operator.computed(
                lambda image, y: f(image, y, operator.physics).reshape(shape),
                *(operator.gather(x), y),
                shape=shape,
                users=f,
            )
        u = operator.A(x)
        if not self.is_separable:
            gather = _gathering(operator.codomain)
            wholes = gather.apply(u), gather.apply(y)
            if not gather.codomain.partition.active:
                return self._nothing(shape, *wholes)
            return known(f(*wholes, _PLAIN), (), wholes).reshape(shape)
        if 0 in u.shape:
            return self._nothing(shape, u, y)
        share = known(f(u, y, _PLAIN), (), (u, y))
        if not shape:
            return share
        # Of the images of the batch this worker may have some: their numbers among those of all.
        box = operator.codomain.box()
        assert box is not None
        start, stop = box[0]
        return torch.nn.functional.pad(share, (start, batch - stop))

    def grad(
        self, x: Tensor, y: Tensor, operator: PartOperator | Whole, *args: Any, **settings: Any
    ) -> Tensor:
        """This worker's part of the gradient of f in x."""
        if isinstance(operator, Whole):
            found = operator.computed(
                lambda image, y: gradient(
                    self.fidelity, image, y, operator.physics, *args, **settings
                ),
                *(operator.gather(x), y),
                users=self.fidelity,
            )
            return operator.scatter(found)
        return operator.A_adjoint(self._distance_gradient(operator.A(x), y, operator.codomain))

    def _distance_gradient(self, u: Tensor, y: Tensor, layout: Layout) -> Tensor:
        """This worker's part of the gradient of d in its first argument."""
        if self.is_separable:
            if 0 in u.shape:
                return self._nothing(tuple(u.shape), u, y)
            return known(gradient(self.fidelity, u, y, _PLAIN), (), (u, y))
        gather = _gathering(layout)
        wholes = gather.apply(u), gather.apply(y)
        if not gather.codomain.partition.active:
            return gather.H.apply(self._nothing((0,), *wholes))
        return gather.H.apply(known(gradient(self.fidelity, *wholes, _PLAIN), (), wholes))

    def _nothing(self, shape: Shape, *given: Tensor) -> Tensor:
        """What a worker gives that has nothing to measure; it depends on the parameters of f."""
        parameters = learned(self.fidelity)
        anchor = anchored_zeros((), *parameters) if parameters else None
        return depending_on(anchored_zeros(shape, *given), anchor)

    @cached_property
    def problem(self) -> str:
        """What is wrong with it, as the end of a sentence: tried on small tensors."""
        x, y = _tried(self.device)
        try:
            # For A = 2, f(x) = d(2 x, y) has ∇f(x) = 2 ∇d(2 x). One that looks at x differs.
            expected = 2 * gradient(self.fidelity, 2 * x, y, _PLAIN)
            got = gradient(self.fidelity, x, y, _Scaled(2.0))
        except _MISFITS as error:
            reason = f"could not be tried on small tensors ({error})"
        else:
            if torch.allclose(got, expected, rtol=1e-4, atol=1e-6):
                return ""
            reason = "is not of the form d(A(x), y), which a fidelity of an image in parts must be"
        return f": {type(self.fidelity).__name__} {reason}; use a signal without partition"

    @cached_property
    def is_batched(self) -> bool:
        """Whether f gives one number for each image of a batch: tried on a batch of two.

        >>> PartFidelity(lambda x, y, physics: (physics.A(x) - y).square().sum()).is_batched
        False
        """
        u, y = _tried(self.device)
        try:  # a fidelity may need more than these tensors have: then it is taken to be one number
            return tuple(self.fidelity(u, y, _Scaled()).shape) == (len(u),)
        except _MISFITS:
            return False

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
        parts = torch.cat([gradient(f, *half, physics) for half in halves], dim)
        fits = torch.allclose(gradient(f, u, y, physics), parts, rtol=1e-4, atol=1e-6)
        shares = torch.stack([f(*half, physics).sum() for half in halves])
        return fits and torch.allclose(f(u, y, physics).sum(), shares.sum(), rtol=1e-4)


def gradient(fidelity: Any, x: Tensor, y: Tensor, physics: Any, *args: Any, **kw: Any) -> Tensor:
    """The gradient of one data fidelity at x, its own or by autograd."""
    if hasattr(fidelity, "grad"):
        return fidelity.grad(x, y, physics, *args, **kw)
    # Images of a batch do not depend on each other, so that the gradient of the sum of their losses
    # has the gradient of each.
    return torch.func.grad(lambda x: fidelity(x, y, physics, *args, **kw).sum())(x)


def _tried(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Two small positive tensors, as a distance of counts or intensities takes them."""
    generator = torch.Generator().manual_seed(3)
    # Two images, two channels, even sizes: both halves along each dimension have values.
    first, second = (0.1 + torch.rand((2, 2, 4, 6), generator=generator) for _ in range(2))
    return first.to(device), second.to(device)


def _gathering(layout: Layout) -> Move:
    """The whole measurement on the first worker."""
    return gathering(layout, layout.partition.ranks[0])
