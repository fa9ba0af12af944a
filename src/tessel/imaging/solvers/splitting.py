"""Splitting methods: ADMM and HQS alternate proxes, primal-dual methods have total variation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tessel.core import Layout
from tessel.imaging.parts.operators import Differences
from tessel.imaging.solvers.linear import CG, default_tolerance, solved
from tessel.imaging.solvers.method import (
    Iterates,
    Method,
    PriorArguments,
    Space,
    arguments_at,
    check_count,
    check_not_negative,
    check_positive,
    check_prior,
    step_at,
)
from tessel.imaging.solvers.proximal import ProximalMethod
from tessel.transport import kept_in_job


def fidelity_prox(
    fidelity: Any,
    x: Tensor,
    gamma: float | Tensor,
    space: Space,
    *,
    max_iterations: int = 100,
    tolerance: float | None = None,
    check: bool = True,
) -> Tensor:
    """Compute prox_(gamma f)(x) by the data fidelity itself, or by conjugate gradients.

    u = argmin gamma f(u) + ‖u - x‖² / 2. If f is quadratic, this is the linear equation u + gamma
    ∇f(u) = x, which needs only `fidelity.grad`.

    Args:
        fidelity: f, with `prox(x, gamma=…)`, or quadratic and with `grad`.
        x: an image.
        gamma: the step.
        space: the space of the image.
        max_iterations: the largest number of conjugate gradient steps.
        tolerance: the relative residual at which they stop; by default 1e-12 in double precision
            and 1e-6 in others.
        check: whether to verify, with one more gradient, that f is quadratic.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> distance, x = SimpleNamespace(grad=lambda x: x - 1), torch.zeros(2)
    >>> solvers.fidelity_prox(distance, x, 1.0, solvers.Space.of(x))
    tensor([0.5000, 0.5000])
    """
    if hasattr(fidelity, "prox"):
        result: Tensor = fidelity.prox(x, gamma=gamma)
        return result
    if tolerance is None:
        tolerance = default_tolerance(x.dtype)
    origin = fidelity.grad(torch.zeros_like(x))
    method = CG(lambda v: v + gamma * (fidelity.grad(v) - origin), x - gamma * origin)
    values = solved(method, x, space, tolerance, max_iterations)
    u: Tensor = values["x"]
    # For a function that is not quadratic, the result of conjugate gradients is not the prox. If it
    # is quadratic, their residual is the true one.
    if check:
        wrong = (x - u - gamma * fidelity.grad(u)) - values["rest"]
        off, scale = space.numbers((wrong, wrong), (x, x)).tolist()
        scale = max(scale, float(values["scale"].detach()))
        # These are squares: a thousandth of the image. Rounding in float32 reaches 3e-4 of it if
        # gamma ∇f is ten thousand times as steep as ‖u - x‖² / 2, and less otherwise.
        if not off <= 1e-6 * scale:
            raise ValueError(
                f"{type(fidelity).__name__}: its gradient is not that of a quadratic function (off "
                f"by {(off / scale) ** 0.5:.1g}), so its prox cannot be computed; add a method "
                "prox(x, gamma=...) to it, or use a solver that needs only gradients, such as PGD"
            )
    return u


@dataclass(frozen=True)
class HQS(ProximalMethod):
    """Half-quadratic splitting: the prox of the data fidelity, then that of the prior.

    x ← prox_(step·weight·g)(prox_(step·f)(x))

    With a denoiser of falling strength this is DPIR: `step` and `prior_arguments` may be functions
    of the iteration.

    Args:
        fidelity: f, with `prox`, or quadratic and with `grad`.
        prior, step, weight, prior_arguments: those of `PGD`.
        inner_iterations: the largest number of conjugate gradient steps.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> distance, same = SimpleNamespace(grad=lambda x: x - 1), SimpleNamespace(prox=lambda x: x)
    >>> method = solvers.HQS(distance, same, step=1.0)
    >>> solvers.solve(method, torch.zeros(2), max_iterations=2).x
    tensor([0.7500, 0.7500])
    """

    inner_iterations: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, 1, inner_iterations=self.inner_iterations)

    def iterate(self, values: Iterates, iteration: int, space: Space) -> Iterates:
        near = self.fit(values["x"], iteration, space)
        return {"x": self.denoise(near, iteration)}

    def fit(self, x: Tensor, iteration: int, space: Space) -> Tensor:
        """The prox of the data fidelity."""
        return fidelity_prox(
            self.fidelity,
            x,
            step_at(self, iteration),
            space,
            max_iterations=self.inner_iterations,
            check=iteration == 0,
        )


@dataclass(frozen=True)
class ADMM(HQS):
    """The alternating direction method of multipliers.

    u ← prox_(step·f)(x - z);    x ← prox_(step·weight·g)(u + z);    z ← z + relaxation (u - x)

    Args:
        fidelity, prior, step, weight, prior_arguments, inner_iterations: those of `HQS`.
        relaxation: the relaxation of the multipliers z.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> distance = SimpleNamespace(grad=lambda x: x - torch.tensor([3.0, 0.5]))
    >>> l1 = SimpleNamespace(prox=lambda x, gamma: torch.nn.functional.softshrink(x, gamma))
    >>> method = solvers.ADMM(distance, l1, weight=1.0)
    >>> solvers.solve(method, torch.zeros(2), stop=solvers.RelativeChange(1e-6)).x
    tensor([2.0000, 0.0000])
    """

    relaxation: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, relaxation=self.relaxation)

    def begin(self, x: Tensor, space: Space) -> Iterates:
        return {"x": x, "multipliers": torch.zeros_like(x)}

    def iterate(self, values: Iterates, iteration: int, space: Space) -> Iterates:
        z = values["multipliers"]
        near = self.fit(values["x"] - z, iteration, space)
        x = self.denoise(near + z, iteration)
        return {"x": x, "multipliers": z + self.relaxation * (near - x)}


@kept_in_job
def differences(layout: Layout) -> Differences:
    """The finite differences of an image that is whole on every worker, or in parts.

    >>> import tessel, torch
    >>> from tessel.imaging.solvers import differences
    >>> layout = tessel.Layout.whole(tessel.world(), (1, 1, 2, 2), shared=True)
    >>> differences(layout).A(torch.eye(2)[None, None]).shape
    torch.Size([1, 1, 2, 2, 2])
    """
    return Differences(layout)


def total_variation(x: Tensor, space: Space) -> Tensor:
    """The sum of the lengths of all differences, over all parts of an image, without a gradient.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> x = torch.eye(2)[None, None]
    >>> round(solvers.total_variation(x, solvers.Space.of(x)).item(), 4)
    3.4142
    """
    lengths = torch.linalg.vector_norm(differences(space.layout).A(x), dim=-1)
    return space.numbers((lengths, torch.ones_like(lengths)))[0]


@dataclass(frozen=True)
class CondatVu(Method):
    """Minimise f(x) + g(x) + weight Σ_i ‖(K x)_i‖ with gradients of f.

    x' = prox_g(x - step (∇f(x) + Kᴴ z));    z ← P(z + dual_step K (2 x' - x))

    where P projects each vector z_i onto the ball of radius `weight`. By default K are the finite
    differences: this is total variation.

    Args:
        fidelity: f, with `grad`.
        step: at most 1 / L for gradients of Lipschitz constant L, see `lipschitz`.
        weight: the weight of the norm.
        operator: K, with `A` and `A_adjoint`; vectors are along the last dimension of its output.
        dual_step: at most (1 / step - L / 2) / ‖K‖²; required with `operator`.
        prior: g, with `prox`, if any.
        prior_arguments: keyword arguments of `prior.prox`, or a function of the iteration that
            returns them.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> y = torch.tensor([[[0.0, 0.0, 1.0, 1.0]]])
    >>> distance = SimpleNamespace(grad=lambda x: x - y)
    >>> method = solvers.CondatVu(distance, step=0.5, weight=0.2)
    >>> solvers.solve(method, torch.zeros(1, 1, 4), max_iterations=300).x
    tensor([[[0.1000, 0.1000, 0.9000, 0.9000]]])
    """

    fidelity: Any
    step: float = 1.0
    weight: float = 1.0
    operator: Any = None
    dual_step: float | None = None
    prior: Any = None
    prior_arguments: PriorArguments = field(default_factory=dict)

    def __post_init__(self) -> None:
        if callable(self.step):
            raise ValueError(f"{self.name}: step must be one number for all iterations")
        check_positive(self, step=self.step)
        check_not_negative(self, weight=self.weight)
        check_prior(self)
        if self.dual_step is not None:
            check_positive(self, dual_step=self.dual_step)
        elif self.operator is not None:
            raise ValueError(
                f"{self.name}: a custom operator needs a dual_step, which depends on its norm; "
                "see power_iteration"
            )

    def begin(self, x: Tensor, space: Space) -> Iterates:
        return {"x": x, "dual": torch.zeros_like(self.differ(space).A(x))}

    def iterate(self, values: Iterates, iteration: int, space: Space) -> Iterates:
        K, x, dual = self.differ(space), values["x"], values["dual"]
        new = self.descend(x, K.A_adjoint(dual), iteration, space)
        raised = dual + self.second_step(space) * K.A(2 * new - x)
        return {"x": new, "dual": projected(raised, self.weight)}

    def descend(self, x: Tensor, back: Tensor, iteration: int, space: Space) -> Tensor:
        """The new image, where `back` is Kᴴ z."""
        lower = x - self.step * (self.fidelity.grad(x) + back)
        if self.prior is None:
            return lower
        found: Tensor = self.prior.prox(lower, **arguments_at(self.prior_arguments, iteration))
        return found

    def differ(self, space: Space) -> Any:
        """The operator K."""
        return differences(space.layout) if self.operator is None else self.operator

    def second_step(self, space: Space) -> float:
        """The step of the dual variable; finite differences in d dimensions have ‖K‖² ≤ 4 d."""
        square = 4 * (len(space.layout.shape) - 2)
        # With L at most 1 / step, 1 / step - L / 2 is at least 1 / (2 step).
        return self.dual_step or 1 / (2 * self.step * square)


@dataclass(frozen=True)
class ChambollePock(CondatVu):
    """Minimise f(x) + weight Σ_i ‖(K x)_i‖ with the prox of f.

    x' = prox_(step·f)(x - step Kᴴ z);    z ← P(z + dual_step K (2 x' - x))

    The method converges for any step.

    Args:
        fidelity: f, with `prox`, or quadratic and with `grad`.
        step: any positive number.
        weight, operator: those of `CondatVu`.
        dual_step: at most 1 / (step ‖K‖²); required with `operator`.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> y = torch.tensor([[[0.0, 0.0, 1.0, 1.0]]])
    >>> distance = SimpleNamespace(prox=lambda x, gamma: (x + gamma * y) / (1 + gamma))
    >>> method = solvers.ChambollePock(distance, step=0.5, weight=0.2)
    >>> solvers.solve(method, torch.zeros(1, 1, 4), max_iterations=300).x
    tensor([[[0.1000, 0.1000, 0.9000, 0.9000]]])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is not None:
            raise ValueError("ChambollePock takes no prior; use CondatVu")

    def descend(self, x: Tensor, back: Tensor, iteration: int, space: Space) -> Tensor:
        lower = x - self.step * back
        return fidelity_prox(self.fidelity, lower, self.step, space, check=iteration == 0)

    def second_step(self, space: Space) -> float:
        return self.dual_step or 1 / (self.step * 4 * (len(space.layout.shape) - 2))


def projected(z: Tensor, most: float) -> Tensor:
    """The projection of each vector along the last dimension onto a ball of this radius."""
    lengths = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z * (most / lengths.clamp(min=most)) if most > 0 else torch.zeros_like(z)
