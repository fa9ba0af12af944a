"""Least squares by conjugate gradients, and their derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.imaging.measurements import LocalTensors
from tessel.layout import Layout
from tessel.linop import LinearOperator


class NormalInverse(LinearOperator):
    """The pseudo-inverse (AᵀA)⁺ of an operator's normal equations, which is its own adjoint.

    Args:
        physics: the operators, with `A_adjoint_A`.
        layout: of the image.
        tol: stop when the residual fell to this, relative to the first.
        max_iter: at most so many steps.
    """

    def __init__(self, physics: Any, layout: Layout, tol: float, max_iter: int) -> None:
        self.domain = self.codomain = layout
        self.physics, self.tol, self.max_iter = physics, tol, max_iter

    def _apply(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self._solved(x.detach())

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        return self._apply(y)

    def _solved(self, b: Tensor) -> Tensor:
        inner = self.domain.inner
        x, rest, along = torch.zeros_like(b), b, b
        first = square = inner(b, b).real
        for _ in range(self.max_iter):
            if square.item() <= self.tol**2 * first.item():
                break
            image = self.physics.A_adjoint_A(along)
            length = inner(along, image).real
            if length.item() <= 0:
                break
            step = square / length
            x, rest = x + step * along, rest - step * image
            before, square = square, inner(rest, rest).real
            along = rest + square / before * along
        return x


@torch.no_grad()
def least_squares(
    physics: Any, ys: LocalTensors, slope: Tensor, layout: Layout, tol: float, max_iter: int
) -> tuple[Tensor, float]:
    """The smallest image that minimises ‖A x − y‖², by CGLS from zero, and ‖Aᵀ(A x − y)‖ / ‖Aᵀ y‖.

    Args:
        physics: the operators, with `A` and `A_adjoint`.
        ys: this worker's measurements.
        slope: the image Aᵀ y.
        layout: of the image.
        tol: stop when the gradient fell to this, relative to the first.
        max_iter: at most so many steps.
    """
    rest = ys.map(Tensor.detach)
    x, along = torch.zeros_like(slope), slope
    first = square = layout.inner(slope, slope).real
    for _ in range(max_iter):
        if square.item() <= tol**2 * first.item():
            break
        image = physics.A(along)
        length = _sum_of_squares(image, square, layout)
        if length.item() <= 0:
            break
        step = square / length
        x, rest = x + step * along, rest - image * step
        slope = physics.A_adjoint(rest)
        before, square = square, layout.inner(slope, slope).real
        along = slope + square / before * along
    return x, (square / first).sqrt().item() if first.item() > 0 else 0.0


def _sum_of_squares(ys: LocalTensors, like: Tensor, layout: Layout) -> Tensor:
    """That of the measurements of all workers."""
    share = torch.zeros_like(like)
    for y in ys:
        share = share + torch.vdot(y.reshape(-1), y.reshape(-1)).real
    partition = layout.partition
    return partition.group.sum(share) if partition.active else share
