"""Splitting methods: ADMM and HQS, which take proxes of the data fidelity and of the prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessel.imaging.solvers.conjugate import CG, solved
from tessel.imaging.solvers.method import Values, check_count, check_positive
from tessel.imaging.solvers.proximal import ProximalMethod
from tessel.imaging.solvers.space import Space


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
    """prox_(gamma f)(x): that of the data fidelity itself, or by conjugate gradients.

    u = argmin gamma f(u) + ‖u - x‖² / 2. Where f is quadratic, this is u + gamma ∇f(u) = x, a
    linear equation, for which `fidelity.grad` is enough.

    Args:
        fidelity: f, with `prox(x, gamma=…)`, or quadratic and with `grad`.
        x: an image.
        gamma: the step.
        space: where the image lies.
        max_iterations: of conjugate gradients, at most.
        tolerance: of their relative residual; by default 1e-12 in double and 1e-6 in other
            precision.
        check: whether to find out, with one more gradient, if f is not quadratic.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Distance:
    ...     def grad(self, x):
    ...         return x - 1
    >>> x = torch.zeros(2)
    >>> solvers.fidelity_prox(Distance(), x, 1.0, solvers.Space.of(x))
    tensor([0.5000, 0.5000])
    """
    if hasattr(fidelity, "prox"):
        result: Tensor = fidelity.prox(x, gamma=gamma)
        return result
    if tolerance is None:
        tolerance = 1e-12 if x.dtype in (torch.float64, torch.complex128) else 1e-6
    origin = fidelity.grad(torch.zeros_like(x))
    method = CG(lambda v: v + gamma * (fidelity.grad(v) - origin), x - gamma * origin)
    values = solved(method, x, space, tolerance, max_iterations)
    # Of a function that is not quadratic, conjugate gradients give a number that is no prox.
    if check:
        _check_quadratic(fidelity, values, x, gamma, space)
    solution: Tensor = values["x"]
    return solution


def _check_quadratic(
    fidelity: Any, values: Values, x: Tensor, gamma: float | Tensor, space: Space
) -> None:
    """The rest that conjugate gradients believe in is the true one, if f is quadratic."""
    u = values["x"]
    wrong = (x - u - gamma * fidelity.grad(u)) - values["rest"]
    off, scale = space.numbers((wrong, wrong), (x, x)).tolist()
    scale = max(scale, float(values["scale"].detach()))
    if not off <= 1e-6 * scale:
        raise ValueError(
            f"{type(fidelity).__name__}: its gradient is not that of a quadratic function (off by "
            f"{(off / scale) ** 0.5:.1g}), so that its prox cannot be computed; give it a method "
            f"prox(x, gamma=...), or take a method that needs gradients only, such as PGD"
        )


@dataclass(frozen=True)
class HQS(ProximalMethod):
    """Half-quadratic splitting: the prox of the data fidelity, then that of the prior.

    x ← prox_(step·weight·g)(prox_(step·f)(x))

    With a denoiser of falling strength this is DPIR: `step` and `prior_arguments` may be functions
    of the iteration.

    Args:
        fidelity: f, with `prox`, or quadratic and with `grad`.
        prior: g, with `prox`.
        step: a number, or a function of the iteration.
        weight: of the prior, passed on as `gamma=step * weight`; None for a denoiser, which gets
            no `gamma`.
        prior_arguments: keywords for `prior.prox`, or a function of the iteration that gives them.
        inner_iterations: of conjugate gradients, at most.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Distance:
    ...     def grad(self, x):
    ...         return x - 1
    >>> class Same:
    ...     def prox(self, x):
    ...         return x
    >>> method = solvers.HQS(Distance(), Same(), step=1.0)
    >>> solvers.solve(method, torch.zeros(2), max_iterations=2).x
    tensor([0.7500, 0.7500])
    """

    inner_iterations: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, 1, inner_iterations=self.inner_iterations)

    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        near = self.fit(values["x"], iteration, space)
        return {"x": self.denoise(near, iteration)}

    def fit(self, x: Tensor, iteration: int, space: Space) -> Tensor:
        """The prox of the data fidelity."""
        return fidelity_prox(
            self.fidelity,
            x,
            self.step_at(iteration),
            space,
            max_iterations=self.inner_iterations,
            check=iteration == 0,
        )


@dataclass(frozen=True)
class ADMM(HQS):
    """The alternating direction method of multipliers.

    u ← prox_(step·f)(x - z);    x ← prox_(step·weight·g)(u + z);    z ← z + relaxation (u - x)

    Args:
        fidelity: f, with `prox`, or quadratic and with `grad`.
        prior: g, with `prox`.
        step: a number, or a function of the iteration.
        weight: of the prior, as in `HQS`.
        prior_arguments: keywords for `prior.prox`, or a function of the iteration that gives them.
        inner_iterations: of conjugate gradients, at most.
        relaxation: of the multipliers z.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Distance:
    ...     def grad(self, x):
    ...         return x - torch.tensor([3.0, 0.5])
    >>> class L1:
    ...     def prox(self, x, gamma):
    ...         return torch.nn.functional.softshrink(x, gamma)
    >>> method = solvers.ADMM(Distance(), L1(), weight=1.0)
    >>> solvers.solve(method, torch.zeros(2), stop=solvers.RelativeChange(1e-6)).x
    tensor([2.0000, 0.0000])
    """

    relaxation: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, relaxation=self.relaxation)

    def begin(self, x: Tensor, space: Space) -> Values:
        return {"x": x, "multipliers": torch.zeros_like(x)}

    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        z = values["multipliers"]
        near = self.fit(values["x"] - z, iteration, space)
        x = self.denoise(near + z, iteration)
        return {"x": x, "multipliers": z + self.relaxation * (near - x)}
