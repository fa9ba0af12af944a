"""Conjugate gradients: for equations with a positive operator, and for least squares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tessel.core import Layout, LinearOperator
from tessel.imaging.measurements import anchor_of
from tessel.imaging.parameters import depending_on
from tessel.imaging.solvers.method import Method, Values, check_not_negative
from tessel.imaging.solvers.space import Space

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CG(Method):
    """Solve H x = b for a self-adjoint positive H by conjugate gradients.

    The history has `residual`, ‖b - H x‖ / ‖b‖.

    Args:
        operator: x ↦ H x, such as `physics.A_adjoint_A`.
        rhs: b, in the layout of x.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> method = solvers.CG(lambda x: torch.tensor([2.0, 4.0]) * x, torch.tensor([2.0, 2.0]))
    >>> found = solvers.solve(method, torch.zeros(2), stop=solvers.Below("residual", 1e-6))
    >>> found.iterations
    2
    """

    reports = ("residual",)
    is_definite: ClassVar[bool] = True  # whether ⟨p, H p⟩ = 0 for p ≠ 0 is an error
    operator: Map
    rhs: Tensor

    def begin(self, x: Tensor, space: Space) -> Values:
        rest = self.rhs - self.operator(x)
        return _begun(x, {"rest": rest}, rest, self.rhs, space)

    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        x, rest, along, square = (values[name] for name in ("x", "rest", "along", "square"))
        image = self.operator(along)
        length = space.inner(along, image)
        found = float(length.detach())
        if not self.is_definite and found <= 0:  # rounding is all that is left of the direction
            return {**values, "residual": torch.zeros_like(square)}
        if found < 0 or (found == 0 and float(square.detach()) > 0):
            raise ValueError(
                f"{self.name}: the operator must be positive, and ⟨p, H p⟩ is {found:g} for a "
                f"direction p; for least squares take A_adjoint_A, or CGLS"
            )
        by = _ratio(square, length)
        rest = rest - by * image
        return _advanced(values, x + by * along, rest, rest, space)


@dataclass(frozen=True)
class CGLS(Method):
    """Solve least squares, min ‖A x - y‖² + damping ‖x‖², by conjugate gradients.

    The history has `residual`, ‖Aᴴ(y - A x) - damping x‖ / ‖Aᴴ y‖. The rest y - A x is kept in the
    space of measurements, which is more exact than conjugate gradients with Aᴴ A.

    Args:
        physics: with `A` and `A_adjoint`; one of Tessel's, or one that every worker has whole.
        measurements: y, as `physics.A` gives it: those of this worker, or `bundle.measurements`.
        damping: 0 or more.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Scale:
    ...     def A(self, x):
    ...         return 2 * x
    ...     A_adjoint = A
    >>> method = solvers.CGLS(Scale(), torch.tensor([2.0, 4.0]))
    >>> solvers.solve(method, torch.zeros(2), max_iterations=1).x
    tensor([1., 2.])
    """

    reports = ("residual",)
    physics: Any
    measurements: Any
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping)

    def complete(self, values: Values, space: Space) -> Values:
        return {**values, "rest": self._rest(values["x"])}

    def begin(self, x: Tensor, space: Space) -> Values:
        rest = self._rest(x)
        back = self.physics.A_adjoint(rest) - self.damping * x
        return _begun(x, {"rest": rest}, back, self.physics.A_adjoint(self._measured), space)

    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        x, rest, along, square = (values[name] for name in ("x", "rest", "along", "square"))
        image = self.physics.A(along)
        length = self._square(image, along, space) + self.damping * space.inner(along, along)
        by = _ratio(square, length)
        # Each worker uses the step for measurements of its own: gradients through it are summed.
        apart = space.apart(by) if self._is_spread else by
        x, rest = x + by * along, _plus(rest, -apart, image)
        back = self.physics.A_adjoint(rest) - self.damping * x
        return _advanced(values, x, rest, back, space)

    def _rest(self, x: Tensor) -> Any:
        """y - A x."""
        return _plus(self._measured, -1.0, self.physics.A(x))

    @property
    def _measured(self) -> Any:
        return getattr(self.measurements, "local", self.measurements)

    def _square(self, measured: Any, x: Tensor, space: Space) -> Tensor:
        """‖y‖² over all measurements, of which a distributed physics has each on one worker."""
        parts = [measured] if isinstance(measured, Tensor) else list(measured)
        share = depending_on(x.real.new_zeros(()), anchor_of(measured))
        for part in parts:
            share = share + torch.vdot(part.reshape(-1), part.reshape(-1)).real
        return space.total(share) if self._is_spread else share

    @property
    def _is_spread(self) -> bool:
        """Whether each worker has measurements of its own."""
        return hasattr(self.physics, "ctx")


class _SemidefiniteCG(CG):
    """Conjugate gradients for an operator with a null space, to which b is orthogonal."""

    is_definite = False


def solved(
    method: CG | CGLS, x: Tensor, space: Space, tolerance: float, max_iterations: int
) -> Values:
    """The values of a method after its relative residual fell to a tolerance, or at the end.

    This is `solve` without all that a user may want around it.
    """
    values = method.begin(x, space)
    for iteration in range(max_iterations):
        if float(values["residual"].detach()) <= tolerance:
            break
        values = method.iterate(values, iteration, space)
    return values


class NormalInverse(LinearOperator):
    """The pseudo-inverse (AᵀA)⁺ of an operator's normal equations, which is its own adjoint.

    Args:
        normal: x ↦ AᵀA x.
        layout: of the image.
        tol: stop when the residual fell to this, relative to the first.
        max_iter: at most so many steps.
    """

    def __init__(self, normal: Map, layout: Layout, tol: float, max_iter: int) -> None:
        self.domain = self.codomain = layout
        self.normal, self.tol, self.max_iter = normal, tol, max_iter

    def _apply(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            method = _SemidefiniteCG(self.normal, x.detach())
            space = Space(self.domain, self.domain.partition)
            found: Tensor = solved(method, torch.zeros_like(x), space, self.tol, self.max_iter)["x"]
            return found

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        return self._apply(y)


def _begun(x: Tensor, kept: Values, rest: Tensor, whole: Tensor, space: Space) -> Values:
    square, scale = space.inners((rest, rest), (whole, whole)).unbind()
    residual = _ratio(square, scale).sqrt()
    return {"x": x, **kept, "along": rest, "square": square, "scale": scale, "residual": residual}


def _advanced(values: Values, x: Tensor, rest: Any, slope: Tensor, space: Space) -> Values:
    """The values after a step, with the next direction, conjugate to those before."""
    new, scale = space.inner(slope, slope), values["scale"]
    return {
        "x": x,
        "rest": rest,
        "along": slope + _ratio(new, values["square"]) * values["along"],
        "square": new,
        "scale": scale,
        "residual": _ratio(new, scale).sqrt(),
    }


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is: nothing is left to do then."""
    # Autograd goes through both branches: a division by zero would make NaN of the other's zero.
    return torch.where(b != 0, a / torch.where(b != 0, b, 1), 0)


def _plus(a: Any, factor: float | Tensor, b: Any) -> Any:
    """a + factor b, for one tensor or for lists of them, which may know how to be added."""
    if type(b) in (list, tuple):
        return [each + factor * other for each, other in zip(a, b, strict=True)]
    return b * factor + a
