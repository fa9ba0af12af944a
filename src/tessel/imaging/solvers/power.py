"""Power iteration: norms of operators, and Lipschitz constants of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tessel.core import Layout
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


def wave_in(layout: Layout, dtype: torch.dtype) -> Tensor:
    """An image without order, a function of the index alone: the same in whatever parts it lies.

    x[i] = cos(Σ_d φ_d[i_d]), or exp(√−1 Σ_d φ_d[i_d]) if it is complex, with random angles φ_d.

    >>> import tessel
    >>> wave_in(tessel.Layout.balanced(tessel.world(), (3,)), torch.float64).shape
    torch.Size([3])
    """
    box = layout.box()
    if box is None:
        return torch.empty(0, dtype=dtype)
    # One random number for each index of each dimension: every worker draws all of them, which are
    # few, and none depends on how the image is split.
    generator = torch.Generator().manual_seed(0)
    angle = torch.zeros((), dtype=torch.float64)
    for length, (start, stop) in zip(layout.shape, box, strict=True):
        turns = torch.rand(length, generator=generator, dtype=torch.float64)
        angle = angle.unsqueeze(-1) + 2 * math.pi * turns[start:stop]
    wave = torch.polar(torch.ones_like(angle), angle) if dtype.is_complex else angle.cos()
    return wave.to(dtype)
