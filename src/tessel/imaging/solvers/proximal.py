"""Gradient methods: gradient descent, RED, PGD (also known as ISTA), and FISTA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tessel.imaging.solvers.method import (
    Iterates,
    Method,
    PriorArguments,
    Schedule,
    Space,
    arguments_at,
    check_not_negative,
    check_positive,
    check_prior,
    step_at,
)


@dataclass(frozen=True)
class GradientDescent(Method):
    """Follow the gradient of a data fidelity, and of a prior if there is one.

    x ← x - step (∇f(x) + weight ∇g(x))

    Args:
        fidelity: f, with `grad`.
        step: below 2 / L for gradients of Lipschitz constant L, see `lipschitz`; or a function of
            the iteration.
        prior: g, with `grad`.
        weight: of the prior; needs one, as do `prior_arguments`.
        prior_arguments: keyword arguments of the prior, or a function of the iteration that returns
            them.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> distance = SimpleNamespace(grad=lambda x: x - 1)
    >>> method = solvers.GradientDescent(distance, step=0.5)
    >>> solvers.solve(method, torch.zeros(2), max_iterations=2).x
    tensor([0.7500, 0.7500])
    """

    fidelity: Any
    step: Schedule = 1.0
    prior: Any = None
    weight: float = 1.0
    prior_arguments: PriorArguments = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(self, step=self.step)
        check_not_negative(self, weight=self.weight)
        check_prior(self, self.weight)

    def iterate(self, values: Iterates, iteration: int, space: Space) -> Iterates:
        x = values["x"]
        gradient = self.fidelity.grad(x)
        if self.prior is not None:
            gradient = gradient + self.weight * self.prior_gradient(x, iteration)
        return {"x": x - step_at(self, iteration) * gradient}

    def prior_gradient(self, x: Tensor, iteration: int) -> Tensor:
        """The gradient of the prior."""
        gradient: Tensor = self.prior.grad(x, **arguments_at(self.prior_arguments, iteration))
        return gradient


class RED(GradientDescent):
    """Regularization by denoising: the noise that a denoiser removes replaces a prior's gradient.

    x ← x - step (∇f(x) + weight (x - D(x)))

    Args:
        prior: its `prox` is the denoiser D, which gets the `prior_arguments`; required.
        fidelity, step, weight, prior_arguments: those of `GradientDescent`.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> zero = SimpleNamespace(grad=lambda x: 0 * x, prox=lambda x, sigma: x - sigma)
    >>> method = solvers.RED(zero, 1.0, zero, prior_arguments={"sigma": 0.25})
    >>> solvers.solve(method, torch.ones(2), max_iterations=2).x
    tensor([0.5000, 0.5000])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is None:
            raise ValueError("RED: expected a prior with `prox`, the denoiser, got None")

    def prior_gradient(self, x: Tensor, iteration: int) -> Tensor:
        """The noise that the denoiser removes."""
        gradient: Tensor = x - self.prior.prox(x, **arguments_at(self.prior_arguments, iteration))
        return gradient


@dataclass(frozen=True)
class ProximalMethod(Method):
    """A method that applies the prox of a prior; see `PGD`."""

    fidelity: Any
    prior: Any
    step: Schedule = 1.0
    weight: float | None = None
    prior_arguments: PriorArguments = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(self, step=self.step)
        if self.weight is not None:
            check_not_negative(self, weight=self.weight)

    def denoise(self, x: Tensor, iteration: int) -> Tensor:
        """The prox of the prior."""
        keywords = dict(arguments_at(self.prior_arguments, iteration))
        if self.weight is not None:
            keywords["gamma"] = step_at(self, iteration) * self.weight
        result: Tensor = self.prior.prox(x, **keywords)
        return result


@dataclass(frozen=True)
class PGD(ProximalMethod):
    """Proximal gradient descent: a step down the data fidelity, then the prior's prox.

    x ← prox_(step·weight·g)(x - step ∇f(x))

    With the ℓ1 norm as prior this is ISTA, with a denoiser it is plug-and-play.

    Args:
        fidelity: f, with `grad`; for `HQS` and `ADMM` with `prox`, or quadratic and with `grad`.
        prior: g, with `prox`.
        step: a number, or a function of the iteration. Gradient methods need at most 1 / L for
            gradients of Lipschitz constant L, see `lipschitz`.
        weight: the weight of the prior, passed on as `gamma=step * weight`; None for a denoiser,
            which gets no `gamma`.
        prior_arguments: keyword arguments of `prior.prox`, such as `{"sigma_denoiser": 0.05}`, or a
            function of the iteration that returns them.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> distance = SimpleNamespace(grad=lambda x: x - torch.tensor([3.0, 0.5]))
    >>> l1 = SimpleNamespace(prox=lambda x, gamma: torch.nn.functional.softshrink(x, gamma))
    >>> solvers.solve(solvers.PGD(distance, l1, weight=1.0), torch.zeros(2)).x
    tensor([2., 0.])
    """

    def iterate(self, values: Iterates, iteration: int, space: Space) -> Iterates:
        return {"x": self.descend(values["x"], iteration)}

    def descend(self, x: Tensor, iteration: int) -> Tensor:
        """A step and a prox."""
        return self.denoise(x - step_at(self, iteration) * self.fidelity.grad(x), iteration)


ISTA = PGD


@dataclass(frozen=True)
class FISTA(PGD):
    """PGD with momentum: the step begins beyond the last image.

    x' = prox_(step·weight·g)(z - step ∇f(z));    z ← x' + (k - 1)/(k + inertia) (x' - x)

    for k = 1, 2, …

    Args:
        fidelity, prior, step, weight, prior_arguments: those of `PGD`.
        inertia: above 2; then the images also converge, not only the values of f + g.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> distance = SimpleNamespace(grad=lambda x: x - torch.tensor([3.0, 0.5]))
    >>> l1 = SimpleNamespace(prox=lambda x, gamma: torch.nn.functional.softshrink(x, gamma))
    >>> solvers.solve(solvers.FISTA(distance, l1, weight=1.0), torch.zeros(2)).x
    tensor([2., 0.])
    """

    inertia: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inertia > 2 or self.inertia == float("inf"):
            raise ValueError(f"FISTA: inertia must be a number above 2, got {self.inertia!r}")

    def begin(self, x: Tensor, space: Space) -> Iterates:
        return {"x": x, "ahead": x}

    def iterate(self, values: Iterates, iteration: int, space: Space) -> Iterates:
        x = self.descend(values["ahead"], iteration)
        momentum = iteration / (iteration + 1 + self.inertia)  # k = iteration + 1, from 1 on
        return {"x": x, "ahead": x + momentum * (x - values["x"])}
