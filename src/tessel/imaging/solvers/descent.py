"""Methods that follow gradients: gradient descent, and regularization by denoising."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tessel.imaging.solvers.method import (
    Arguments,
    Method,
    Schedule,
    Values,
    arguments_at,
    at,
    check_not_negative,
    check_positive,
)
from tessel.imaging.solvers.space import Space


@dataclass(frozen=True)
class GradientDescent(Method):
    """Go down the gradient of a data fidelity, and of a prior if there is one.

    x ← x - step (∇f(x) + weight ∇g(x))

    Args:
        fidelity: f, with `grad`.
        step: below 2 / L for gradients of Lipschitz constant L, see `lipschitz`; or a function of
            the iteration.
        prior: g, with `grad`.
        weight: of the prior.
        prior_arguments: keywords for the prior, or a function of the iteration that gives them.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Distance:
    ...     def grad(self, x):
    ...         return x - 1
    >>> method = solvers.GradientDescent(Distance(), step=0.5)
    >>> solvers.solve(method, torch.zeros(2), max_iterations=2).x
    tensor([0.7500, 0.7500])
    """

    fidelity: Any
    step: Schedule = 1.0
    prior: Any = None
    weight: float = 1.0
    prior_arguments: Arguments = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(self, step=self.step)
        check_not_negative(self, weight=self.weight)

    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        x = values["x"]
        gradient = self.fidelity.grad(x)
        if self.prior is not None:
            gradient = gradient + self.weight * self.prior_gradient(x, iteration)
        return {"x": x - at(self.step, iteration, self, "step") * gradient}

    def prior_gradient(self, x: Tensor, iteration: int) -> Tensor:
        """The gradient of the prior."""
        gradient: Tensor = self.prior.grad(x, **arguments_at(self.prior_arguments, iteration))
        return gradient


class RED(GradientDescent):
    """Regularization by denoising: what a denoiser takes away stands for a prior's gradient.

    x ← x - step (∇f(x) + weight (x - D(x)))

    Args:
        fidelity: f, with `grad`.
        step: a number, or a function of the iteration.
        prior: its `prox` is the denoiser D.
        weight: of the prior.
        prior_arguments: keywords for the denoiser, or a function of the iteration that gives them.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Zero:
    ...     def grad(self, x):
    ...         return 0 * x
    ...     def prox(self, x, sigma):
    ...         return x - sigma
    >>> method = solvers.RED(Zero(), 1.0, Zero(), prior_arguments={"sigma": 0.25})
    >>> solvers.solve(method, torch.ones(2), max_iterations=2).x
    tensor([0.5000, 0.5000])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is None:
            raise ValueError("RED: a prior with `prox`, the denoiser, is needed, got None")

    def prior_gradient(self, x: Tensor, iteration: int) -> Tensor:
        """What the denoiser takes away."""
        gradient: Tensor = x - self.prior.prox(x, **arguments_at(self.prior_arguments, iteration))
        return gradient
