"""Primal-dual methods: for total variation, and other norms of a linear operator's output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tessel.core import Layout
from tessel.imaging.parts.operators import Differences
from tessel.imaging.solvers.method import (
    Arguments,
    Method,
    Values,
    check_not_negative,
    check_positive,
)
from tessel.imaging.solvers.proximal import prior_prox
from tessel.imaging.solvers.space import Space
from tessel.imaging.solvers.splitting import fidelity_prox
from tessel.transport import kept_in_job


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
    """Σ of the lengths of all differences, over all parts of an image: a number, no gradient.

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
        weight: of the norm.
        operator: K, with `A` and `A_adjoint`; vectors lie along the last dimension of its output.
        dual_step: at most (1 / step - L / 2) / ‖K‖²; needed if K is given.
        prior: g, with `prox`; None for none.
        prior_arguments: keywords for `prior.prox`, or a function of the iteration that gives them.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> y = torch.tensor([[[0.0, 0.0, 1.0, 1.0]]])
    >>> class Distance:
    ...     def grad(self, x):
    ...         return x - y
    >>> method = solvers.CondatVu(Distance(), step=0.5, weight=0.2)
    >>> solvers.solve(method, torch.zeros(1, 1, 4), max_iterations=300).x
    tensor([[[0.1000, 0.1000, 0.9000, 0.9000]]])
    """

    fidelity: Any
    step: float = 1.0
    weight: float = 1.0
    operator: Any = None
    dual_step: float | None = None
    prior: Any = None
    prior_arguments: Arguments = field(default_factory=dict)

    def __post_init__(self) -> None:
        if callable(self.step):
            raise ValueError(f"{self.name}: step must be one number for all iterations")
        check_positive(self, step=self.step)
        check_not_negative(self, weight=self.weight)
        if self.dual_step is not None:
            check_positive(self, dual_step=self.dual_step)
        elif self.operator is not None:
            raise ValueError(
                f"{self.name}: an operator of one's own needs a dual_step, which depends on its "
                f"norm; see power_iteration"
            )

    def begin(self, x: Tensor, space: Space) -> Values:
        return {"x": x, "dual": torch.zeros_like(self.differ(space).A(x))}

    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        K, x, dual = self.differ(space), values["x"], values["dual"]
        new = self.descend(x, K.A_adjoint(dual), iteration, space)
        raised = dual + self.second_step(space) * K.A(2 * new - x)
        return {"x": new, "dual": projected(raised, self.weight)}

    def descend(self, x: Tensor, back: Tensor, iteration: int, space: Space) -> Tensor:
        """The new image, where `back` is Kᴴ z."""
        lower = x - self.step * (self.fidelity.grad(x) + back)
        if self.prior is None:
            return lower
        return prior_prox(self.prior, lower, self.prior_arguments, iteration, None)

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

    Any step converges. By default K are the finite differences: this is total variation.

    Args:
        fidelity: f, with `prox`, or quadratic and with `grad`.
        step: any.
        weight: of the norm.
        operator: K, with `A` and `A_adjoint`; vectors lie along the last dimension of its output.
        dual_step: at most 1 / (step ‖K‖²); needed if K is given.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> y = torch.tensor([[[0.0, 0.0, 1.0, 1.0]]])
    >>> class Distance:
    ...     def prox(self, x, gamma):
    ...         return (x + gamma * y) / (1 + gamma)
    >>> method = solvers.ChambollePock(Distance(), step=0.5, weight=0.2)
    >>> solvers.solve(method, torch.zeros(1, 1, 4), max_iterations=300).x
    tensor([[[0.1000, 0.1000, 0.9000, 0.9000]]])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior is not None:
            raise ValueError("ChambollePock has no place for a prior; CondatVu takes one")

    def descend(self, x: Tensor, back: Tensor, iteration: int, space: Space) -> Tensor:
        lower = x - self.step * back
        return fidelity_prox(self.fidelity, lower, self.step, space, check=iteration == 0)

    def second_step(self, space: Space) -> float:
        return self.dual_step or 1 / (self.step * 4 * (len(space.layout.shape) - 2))


def projected(z: Tensor, most: float) -> Tensor:
    """The projection of each vector along the last dimension onto a ball of this radius."""
    lengths = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z * (most / lengths.clamp(min=most)) if most > 0 else torch.zeros_like(z)
