"""Proximal gradient methods: PGD (also known as ISTA), and FISTA."""

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


def prior_prox(
    prior: Any, x: Tensor, arguments: Arguments, iteration: int, gamma: float | None
) -> Tensor:
    """prox_(gamma g)(x); without `gamma` for a denoiser, which has none."""
    keywords = dict(arguments_at(arguments, iteration))
    if gamma is not None:
        keywords["gamma"] = gamma
    result: Tensor = prior.prox(x, **keywords)
    return result


@dataclass(frozen=True)
class ProximalMethod(Method):
    """A method that takes the prox of a prior, after a step of some length.

    Args:
        fidelity: f.
        prior: g, with `prox`.
        step: a number, or a function of the iteration.
        weight: of the prior, passed on as `gamma=step * weight`; None for a denoiser, which gets
            no `gamma`.
        prior_arguments: keywords for `prior.prox`, or a function of the iteration that gives them.
    """

    fidelity: Any
    prior: Any
    step: Schedule = 1.0
    weight: float | None = None
    prior_arguments: Arguments = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(self, step=self.step)
        if self.weight is not None:
            check_not_negative(self, weight=self.weight)

    def step_at(self, iteration: int) -> float:
        """The step of an iteration."""
        return at(self.step, iteration, self, "step")

    def denoise(self, x: Tensor, iteration: int) -> Tensor:
        """The prox of the prior."""
        gamma = None if self.weight is None else self.step_at(iteration) * self.weight
        return prior_prox(self.prior, x, self.prior_arguments, iteration, gamma)


@dataclass(frozen=True)
class PGD(ProximalMethod):
    """Proximal gradient descent: a step down the data fidelity, then the prior's prox.

    x ← prox_(step·weight·g)(x - step ∇f(x))

    With the ℓ1 norm as prior this is ISTA, with a denoiser it is plug-and-play.

    Args:
        fidelity: f, with `grad`.
        prior: g, with `prox`.
        step: a number, at most 1 / L for gradients of Lipschitz constant L, see `lipschitz`; or a
            function of the iteration.
        weight: of the prior, passed on as `gamma=step * weight`; None for a denoiser, which gets
            no `gamma`.
        prior_arguments: keywords for `prior.prox`, such as `{"sigma_denoiser": 0.05}`, or a
            function of the iteration that gives them.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Distance:
    ...     def grad(self, x):
    ...         return x - torch.tensor([3.0, 0.5])
    >>> class L1:
    ...     def prox(self, x, gamma):
    ...         return torch.nn.functional.softshrink(x, gamma)
    >>> solvers.solve(solvers.PGD(Distance(), L1(), weight=1.0), torch.zeros(2)).x
    tensor([2., 0.])
    """

    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        return {"x": self.descend(values["x"], iteration)}

    def descend(self, x: Tensor, iteration: int) -> Tensor:
        """A step and a prox."""
        return self.denoise(x - self.step_at(iteration) * self.fidelity.grad(x), iteration)


ISTA = PGD


@dataclass(frozen=True)
class FISTA(PGD):
    """PGD with momentum: the step begins beyond the last image.

    x' = prox_(step·weight·g)(z - step ∇f(z));    z ← x' + (k - 1)/(k + inertia) (x' - x)

    for k = 1, 2, …

    Args:
        fidelity: f, with `grad`.
        prior: g, with `prox`.
        step: a number, at most 1 / L; or a function of the iteration.
        weight: of the prior, as in `PGD`.
        prior_arguments: keywords for `prior.prox`, or a function of the iteration that gives them.
        inertia: above 2 the images converge, too, not only the values of f + g.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Distance:
    ...     def grad(self, x):
    ...         return x - torch.tensor([3.0, 0.5])
    >>> class L1:
    ...     def prox(self, x, gamma):
    ...         return torch.nn.functional.softshrink(x, gamma)
    >>> solvers.solve(solvers.FISTA(Distance(), L1(), weight=1.0), torch.zeros(2)).x
    tensor([2., 0.])
    """

    inertia: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inertia > 2 or self.inertia == float("inf"):
            raise ValueError(f"FISTA: inertia must be a number above 2, got {self.inertia!r}")

    def begin(self, x: Tensor, space: Space) -> Values:
        return {"x": x, "ahead": x}

    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        x = self.descend(values["ahead"], iteration)
        momentum = iteration / (iteration + 1 + self.inertia)
        return {"x": x, "ahead": x + momentum * (x - values["x"])}
