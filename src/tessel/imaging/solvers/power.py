"""Power iteration: norms of operators, and Lipschitz constants of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tessel.core.layout import Layout
from tessel.imaging.solvers.method import check_count, check_positive
from tessel.imaging.solvers.space import Space


@torch.no_grad()
def power_iteration(
    operator: Callable[[Tensor], Tensor],
    start: Any,
    *,
    layout: Layout | None = None,
    max_iterations: int = 100,
    tolerance: float = 1e-4,
) -> float:
    """The largest eigenvalue of a self-adjoint positive operator, by its powers.

    λ = ⟨x, H x⟩ / ⟨x, x⟩ for x ← H x / ‖H x‖; it comes from below. The norm of A is the square
    root of that of AᴴA.

    Args:
        operator: x ↦ H x.
        start: a signal or a tensor that is not orthogonal to what is looked for, such as noise.
        layout: of a tensor, where there are several workers.
        max_iterations: at most so many.
        tolerance: the relative change of λ at which it ends.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> H = torch.tensor([3.0, 1.0])
    >>> round(solvers.power_iteration(lambda x: H * x, torch.ones(2)), 2)
    3.0
    """
    check_count("power_iteration", 1, max_iterations=max_iterations)
    check_positive("power_iteration", tolerance=tolerance)
    space = Space.of(start, layout)
    x = start if isinstance(start, Tensor) else start.data
    length = float(space.norm(x))
    if not 0 < length < float("inf"):
        raise ValueError(
            f"power_iteration: the start must be finite and not zero, its norm is {length}"
        )
    return largest_eigenvalue(operator, x, space, max_iterations, tolerance)


@torch.no_grad()
def largest_eigenvalue(
    operator: Callable[[Tensor], Tensor],
    x: Tensor,
    space: Space,
    max_iterations: int,
    tolerance: float,
) -> float:
    """That of a self-adjoint positive operator, from an image that is not zero."""
    x, found = x / float(space.norm(x)), 0.0
    for _ in range(max_iterations):
        image = operator(x)
        value, square = space.numbers((x, image), (image, image)).tolist()
        if square == 0:
            return 0.0
        # The estimate rises to the eigenvalue: two that are near each other are near to it.
        is_near, found = abs(value - found) <= tolerance * abs(value), value
        if is_near:
            break
        x = image / square**0.5
    return found


def lipschitz(fidelity: Any, start: Any, *, layout: Layout | None = None, **options: Any) -> float:
    """The Lipschitz constant of a quadratic data fidelity's gradient: steps of 1 / L are safe.

    Args:
        fidelity: with `grad`.
        start: a signal or a tensor, not zero, such as noise.
        layout: of a tensor, where there are several workers.
        options: those of `power_iteration`.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Distance:
    ...     def grad(self, x):
    ...         return 2 * (x - 1)
    >>> round(solvers.lipschitz(Distance(), torch.ones(3)), 4)
    2.0
    """
    x = start if isinstance(start, Tensor) else start.data
    with torch.no_grad():
        origin = fidelity.grad(torch.zeros_like(x))
    return power_iteration(lambda v: fidelity.grad(v) - origin, start, layout=layout, **options)
