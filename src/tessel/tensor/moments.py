"""Moments: the mean and variance of what a worker has, and of what all have together."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn._reduction import get_enum

from tessel.tensor.table import widened

Pair = tuple[Tensor | None, Tensor | None]
_NO_REDUCTION = get_enum("none")


def local_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance over all dimensions but the second; zeros where there is no value."""
    x = widened(x)
    mean = x.sum(_all_but_second(x)) / max(1, _count(x))
    if not torch.is_grad_enabled():
        return mean, mean_square(x, mean)
    centre = mean.detach()
    # v = mean (x − c)² − (m − c)² for every constant c, and c = m rounds least. The second term is
    # zero there, and so is its slope; its second derivative is not.
    return mean, mean_square(x, centre) - (mean - centre).square()


def mean_square(x: Tensor, centre: Tensor) -> Tensor:
    """The mean of the squared distances from a constant centre.

    Its gradient is one pass over `x` and keeps nothing else.
    """
    target = centre.reshape(-1, *[1] * (x.dim() - 2)).expand_as(x)
    # what F.mse_loss calls when it has compared and broadcast shapes, which are alike here
    squares: Tensor = torch._C._nn.mse_loss(x, target, _NO_REDUCTION)  # type: ignore[arg-type]
    return squares.sum(_all_but_second(x)) / max(1, _count(x))


def _all_but_second(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _count(x: Tensor) -> int:
    return prod((len(x), *x.shape[2:]))


def combined(means: Tensor, variances: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance of all places from those of each (Chan's formula).

    Args:
        means: of each place, which are the first dimension.
        variances: the same.
        shares: what part of all values each place has.
    """
    mean = (shares * means).sum(0)
    offsets = means - mean
    variance = (shares * torch.addcmul(variances, offsets, offsets)).sum(0)
    return mean, variance


def update_running(
    running: Pair, mean: Tensor, variance: Tensor, count: int, momentum: float
) -> None:
    """Running statistics take in those of so many values; the new ones count `momentum`."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return update_running(running, mean, variance, count, momentum)
    unbiased = momentum * count / (count - 1)
    for each, new, much in zip(running, (mean, variance), (momentum, unbiased), strict=True):
        assert each is not None
        each.mul_(1.0 - momentum).add_(new, alpha=much)
