"""Linear algebra of operators: conjugate gradients, least squares, and power iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tessel.core import Layout, LinearOperator
from tessel.imaging.parameters import anchor_of, depending_on
from tessel.imaging.signal import local_data
from tessel.imaging.solvers.method import (
    Iterates,
    Method,
    Space,
    check_count,
    check_not_negative,
    check_positive,
)

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

    def begin(self, x: Tensor, space: Space) -> Iterates:
        rest = self.rhs - self.operator(x)
        return _begun(x, {"rest": rest}, rest, self.rhs, space)

    def iterate(self, values: Iterates, iteration: int, space: Space) -> Iterates:
        x, rest, along, square = (values[name] for name in ("x", "rest", "along", "square"))
        image = self.operator(along)
        length = space.inner(along, image)
        found = float(length.detach())
        if not self.is_definite and found <= 0:  # only rounding errors are left of the direction
            return {**values, "residual": torch.zeros_like(square)}
        if found < 0 or (found == 0 and float(square.detach()) > 0):
            raise ValueError(
                f"{self.name}: the operator must be positive, but ⟨p, H p⟩ is {found:g} for a "
                "direction p; for least squares use A_adjoint_A, or CGLS"
            )
        by = _ratio(square, length)
        rest = rest - by * image
        return _advanced(values, x + by * along, rest, rest, space)


@dataclass(frozen=True)
class CGLS(Method):
    """Solve least squares, min ‖A x - y‖² + damping ‖x‖², by conjugate gradients.

    The history has `residual`, ‖Aᴴ(y - A x) - damping x‖ / ‖Aᴴ y‖. The difference y - A x is
    updated in the space of measurements, which is more accurate than conjugate gradients with Aᴴ A.

    Args:
        physics: an object with `A` and `A_adjoint`; one of Tessel's, or one that every worker has
            whole.
        measurements: y, as `physics.A` returns it: those of this worker, or `bundle.measurements`.
        damping: 0 or more.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> double = SimpleNamespace(A=lambda x: 2 * x, A_adjoint=lambda y: 2 * y)
    >>> method = solvers.CGLS(double, torch.tensor([2.0, 4.0]))
    >>> solvers.solve(method, torch.zeros(2), max_iterations=1).x
    tensor([1., 2.])
    """

    reports = ("residual",)
    physics: Any
    measurements: Any
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(self, damping=self.damping)
        if hasattr(self.physics, "spread"):
            # Stacked physics, whose measurements every worker has: ‖A p‖² is summed over workers,
            # so that each continues with those of its own operators.
            object.__setattr__(self, "measurements", self.physics.own(self._measured))
            object.__setattr__(self, "physics", self.physics.spread)

    def complete(self, values: Iterates, space: Space) -> Iterates:
        return {**values, "rest": self._rest(values["x"])}

    def begin(self, x: Tensor, space: Space) -> Iterates:
        rest = self._rest(x)
        back = self.physics.A_adjoint(rest) - self.damping * x
        return _begun(x, {"rest": rest}, back, self.physics.A_adjoint(self._measured), space)

    def iterate(self, values: Iterates, iteration: int, space: Space) -> Iterates:
        x, rest, along, square = (values[name] for name in ("x", "rest", "along", "square"))
        image = self.physics.A(along)
        # ‖A p‖² over all measurements, each of which a distributed physics has on one worker.
        # Through the anchor, a worker without measurements also takes part in the backward pass of
        # the sum.
        share = depending_on(x.real.new_zeros(()), anchor_of(image))
        for part in [image] if isinstance(image, Tensor) else list(image):
            share = share + torch.vdot(part.reshape(-1), part.reshape(-1)).real
        square_of_image = space.total(share) if self._is_spread else share
        length = square_of_image + self.damping * space.inner(along, along)
        by = _ratio(square, length)
        # Each worker uses the step for its own measurements: gradients through it are summed.
        apart = space.apart(by) if self._is_spread else by
        x, rest = x + by * along, _plus(rest, -apart, image)
        back = self.physics.A_adjoint(rest) - self.damping * x
        return _advanced(values, x, rest, back, space)

    def _rest(self, x: Tensor) -> Any:
        """The difference y - A x."""
        return _plus(self._measured, -1.0, self.physics.A(x))

    @property
    def _measured(self) -> Any:
        return getattr(self.measurements, "local", self.measurements)

    @property
    def _is_spread(self) -> bool:
        """Whether each worker has measurements of its own."""
        return hasattr(self.physics, "ctx")


class _SemidefiniteCG(CG):
    """Conjugate gradients for an operator with a null space, to which b is orthogonal."""

    is_definite = False


def solved(
    method: CG | CGLS, x: Tensor, space: Space, tolerance: float, max_iterations: int
) -> Iterates:
    """The values of a method when its relative residual reaches a tolerance, or at the end.

    This is `solve` without criteria, metrics, progress and checkpoints.
    """
    values = method.begin(x, space)
    for iteration in range(max_iterations):
        if float(values["residual"].detach()) <= tolerance:
            break
        values = method.iterate(values, iteration, space)
    return values


def default_tolerance(dtype: torch.dtype) -> float:
    """The default relative residual at which conjugate gradients stop."""
    # Well above the rounding errors, 2e-16 and 1e-7, below which no true residual falls.
    return 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-6


class NormalInverse(LinearOperator):
    """The pseudo-inverse (AᵀA)⁺ of an operator's normal equations, which is its own adjoint.

    Args:
        normal: x ↦ AᵀA x.
        layout: the layout of the image.
        tol: stop when the residual falls to this, relative to the first one.
        max_iter: the largest number of steps.
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


def _begun(x: Tensor, kept: Iterates, rest: Tensor, whole: Tensor, space: Space) -> Iterates:
    square, scale = space.inners((rest, rest), (whole, whole)).unbind()
    residual = _ratio(square, scale).sqrt()
    return {"x": x, **kept, "along": rest, "square": square, "scale": scale, "residual": residual}


def _advanced(values: Iterates, x: Tensor, rest: Any, gradient: Tensor, space: Space) -> Iterates:
    """The values after a step, with the next direction, conjugate to those before."""
    new, scale = space.inner(gradient, gradient), values["scale"]
    return {
        "x": x,
        "rest": rest,
        "along": gradient + _ratio(new, values["square"]) * values["along"],
        "square": new,
        "scale": scale,
        "residual": _ratio(new, scale).sqrt(),
    }


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """The ratio a / b, or 0 where b is 0: then nothing is left to do."""
    # Autograd goes through both branches: a division by zero in one would turn zero gradients into
    # NaN.
    return torch.where(b != 0, a / torch.where(b != 0, b, 1), 0)


def _plus(a: Any, factor: float | Tensor, b: Any) -> Any:
    """The sum a + factor b, of single tensors or of lists, which may have their own addition."""
    if type(b) in (list, tuple):
        return [each + factor * other for each, other in zip(a, b, strict=True)]
    return b * factor + a


@torch.no_grad()
def power_iteration(
    operator: Map,
    start: Any,
    *,
    layout: Layout | None = None,
    max_iterations: int = 100,
    tolerance: float = 1e-4,
) -> float:
    """The largest eigenvalue of a self-adjoint positive operator, by power iteration.

    λ = ⟨x, H x⟩ / ⟨x, x⟩ for x ← H x / ‖H x‖, which converges from below. The norm of A is the
    square root of the largest eigenvalue of AᴴA.

    Args:
        operator: x ↦ H x.
        start: a signal or a tensor that is not orthogonal to the eigenvector, such as noise.
        layout: the layout of a tensor, required with several workers.
        max_iterations: the largest number of iterations.
        tolerance: the relative change of λ at which the iteration ends.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> H = torch.tensor([3.0, 1.0])
    >>> round(solvers.power_iteration(lambda x: H * x, torch.ones(2)), 2)
    3.0
    """
    check_count("power_iteration", 1, max_iterations=max_iterations)
    check_positive("power_iteration", tolerance=tolerance)
    space, x = Space.of(start, layout), local_data(start)
    length = float(space.norm(x))
    if not 0 < length < float("inf"):
        raise ValueError(
            f"power_iteration: the start must be finite and not zero, but its norm is {length}"
        )
    return largest_eigenvalue(operator, x, space, max_iterations, tolerance)


@torch.no_grad()
def largest_eigenvalue(
    operator: Map, x: Tensor, space: Space, max_iterations: int, tolerance: float
) -> float:
    """The largest eigenvalue of a self-adjoint positive operator, from a nonzero image."""
    x, found = x / float(space.norm(x)), 0.0
    for _ in range(max_iterations):
        image = operator(x)
        value, square = space.numbers((x, image), (image, image)).tolist()
        if square == 0:
            return 0.0
        # The estimate rises to the eigenvalue: two that are close to each other are close to it.
        is_near, found = abs(value - found) <= tolerance * abs(value), value
        if is_near:
            break
        x = image / square**0.5
    return found


def lipschitz(fidelity: Any, start: Any, *, layout: Layout | None = None, **options: Any) -> float:
    """The Lipschitz constant of a quadratic data fidelity's gradient: steps of 1 / L are safe.

    Args:
        fidelity: an object with `grad`.
        start: a signal or a tensor, not zero, such as noise.
        layout: the layout of a tensor, required with several workers.
        options: those of `power_iteration`.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> distance = SimpleNamespace(grad=lambda x: 2 * (x - 1))
    >>> round(solvers.lipschitz(distance, torch.ones(3)), 4)
    2.0
    """
    with torch.no_grad():
        origin = fidelity.grad(torch.zeros_like(local_data(start)))
    return power_iteration(lambda v: fidelity.grad(v) - origin, start, layout=layout, **options)


def wave_in(layout: Layout, dtype: torch.dtype) -> Tensor:
    """An irregular image that is a function of the index, and so the same in any layout.

    x[i] = cos(Σ_d φ_d[i_d]), or exp(√−1 Σ_d φ_d[i_d]) if it is complex, with random angles φ_d.

    >>> import tessel
    >>> wave_in(tessel.Layout.balanced(tessel.world(), (3,)), torch.float64).shape
    torch.Size([3])
    """
    box = layout.box()
    if box is None:
        return torch.empty(0, dtype=dtype)
    # One random number for each index of each dimension: every worker draws all of them, which are
    # few, so that none depends on how the image is split.
    generator = torch.Generator().manual_seed(0)
    angle = torch.zeros((), dtype=torch.float64, device="cpu")
    for length, (start, stop) in zip(layout.shape, box, strict=True):
        turns = torch.rand(length, generator=generator, dtype=torch.float64, device="cpu")
        angle = angle.unsqueeze(-1) + 2 * math.pi * turns[start:stop]
    wave = torch.polar(torch.ones_like(angle), angle) if dtype.is_complex else angle.cos()
    return wave.to(dtype)
