"""DistributedLinearPhysics: linear operators of one image, their adjoint, inverse and norm."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessel.imaging.measurements import LocalTensors
from tessel.imaging.parameters import anchor_of
from tessel.imaging.physics import DistributedPhysics
from tessel.imaging.signal import Image, local_data
from tessel.imaging.solvers.linear import (
    CGLS,
    NormalInverse,
    default_tolerance,
    largest_eigenvalue,
    solved,
    wave_in,
)
from tessel.imaging.solvers.method import Space


class DistributedLinearPhysics(DistributedPhysics):
    """Linear operators of one image, spread over workers: A = (A_0; …; A_{N−1}).

    Forward:  y_i = A_i x.    Adjoint:  x = Σ_i A_iᵀ y_i.

    An operator has the methods `A` and `A_adjoint`.

    Args:
        ctx, num_ops, factory, shared, layout: those of `DistributedPhysics`.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import DistributedContext, DistributedLinearPhysics
    >>> def scale(i, device, shared):
    ...     return SimpleNamespace(A=lambda x: (i + 1) * x, A_adjoint=lambda y: (i + 1) * y)
    >>> with DistributedContext() as ctx:
    ...     physics = DistributedLinearPhysics(ctx, 2, scale)
    ...     physics.A_adjoint(physics.A(torch.ones(1)))
    tensor([5.])
    """

    methods = ("A", "A_adjoint")

    def A_adjoint(self, ys: Sequence[Tensor]) -> Tensor:
        """The image Σ_i A_iᵀ y_i, summed over all operators.

        Args:
            ys: one tensor for each of this worker's operators.
        """
        return self._summed("A_adjoint", None, ys)

    def A_vjp(self, x: Image, v: Sequence[Tensor]) -> Tensor:
        """The same as `A_adjoint(v)`, since the operators are linear."""
        return self.A_adjoint(v)

    def A_adjoint_A(self, x: Image, **settings: Any) -> Tensor:
        """The image Σ_i A_iᵀ A_i x."""
        return self._summed("A_adjoint_A", x, **settings)

    def A_A_adjoint(self, ys: Sequence[Tensor]) -> LocalTensors:
        """The measurements A_i Σ_j A_jᵀ y_j of this worker's operators."""
        return self.A(self.A_adjoint(ys))

    def A_dagger(
        self, ys: Sequence[Tensor], tol: float | None = None, max_iter: int = 1000
    ) -> Tensor:
        """The pseudo-inverse of the stacked operator: x = A⁺ y.

        It is the smallest image that minimises Σ_i ‖A_i x − y_i‖², found by conjugate gradients on
        the normal equations (CGLS) from zero. It has first derivatives with respect to the
        measurements, and to parameters that do not change the rank of operators.

        Args:
            ys: one tensor for each of this worker's operators.
            tol: stop when ‖Aᵀ(A x − y)‖ ≤ tol·‖Aᵀ y‖; None for 1e-12 in float64, 1e-6 in others.
            max_iter: the largest number of steps; a warning is given if they do not suffice.
        """
        self.check_call(f"{self._label}.A_dagger", ys)
        ys = LocalTensors(ys, anchor_of(ys))
        with torch.no_grad():  # the adjoint determines the shape and dtype of the image
            x = torch.zeros_like(self.A_adjoint(ys))
        if not self.active:
            return x
        layout = self.rows.of(x.shape).layout
        if tol is None:
            tol = default_tolerance(x.dtype)
        with torch.no_grad():
            space = Space(layout, layout.partition)
            found = solved(CGLS(self, ys.map(Tensor.detach)), x, space, tol, max_iter)
        x, reached = found["x"], float(found["residual"])
        if reached > tol:
            warnings.warn(
                f"{self!r}.A_dagger: the relative residual is {reached:.2g} after {max_iter} "
                f"steps, above tol = {tol:.2g}; increase max_iter or tol",
                stacklevel=2,
            )
        rest = self.A_adjoint(ys - self.A(x)) if torch.is_grad_enabled() else x
        if not rest.requires_grad:
            return x
        # AᵀA dx = d(Aᵀ(y − A x)) for a fixed x: the value of this term is zero, its derivative dx
        inverse = NormalInverse(self.A_adjoint_A, layout, tol, max_iter)
        return x + inverse.apply(rest - rest.detach())

    def norm(self, x0: Image, max_iter: int = 500, tol: float = 1e-8) -> Tensor:
        """The norm ‖A‖ = √λ_max(AᵀA) of the stacked operator, by power iteration.

        Args:
            x0: an image of the shape and dtype of the domain; its values do not matter. The
                iteration starts from an irregular image, the same for any number of workers.
            max_iter: the largest number of steps.
            tol: stop when the estimate changes by less than this, relative to it.
        """
        return self.compute_norm(x0, max_iter, tol, squared=False)

    def compute_norm(
        self, x0: Image, max_iter: int = 500, tol: float = 1e-8, squared: bool = True
    ) -> Tensor:
        """The largest eigenvalue ‖A‖² of AᵀA, or its root if not `squared`."""
        like = local_data(x0)
        layout = self.rows.of(like.shape).layout
        # A random start would differ between workers, and a constant may be in the kernel.
        x = wave_in(layout, like.dtype).to(self.ctx.device)
        value = x.new_zeros((), dtype=x.real.dtype)
        if self.active:
            space = Space(layout, layout.partition)
            value += largest_eigenvalue(self.A_adjoint_A, x, space, max_iter, tol)
        value = self.everywhere(value)
        return value if squared else value.sqrt()
