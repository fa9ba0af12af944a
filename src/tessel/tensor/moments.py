"""Moments: the mean and variance of what a worker has, and of what all have together."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.tensor.table import widened

Pair = tuple[Tensor | None, Tensor | None]
_LEAST_ROW = 256  # values of a sample's channel, below which torch's kernel for rows is slower


def local_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance over all dimensions but the second; zeros where there is no value."""
    x = widened(x)
    is_derived = torch.is_grad_enabled()
    if not is_derived and x.is_cpu and x.is_contiguous():
        length = prod(x.shape[2:])
        if x.numel() and length >= _LEAST_ROW:
            return _by_rows(x, length)
    mean = x.sum(_all_but_second(x)) / max(1, _count(x))
    centre = mean.detach()
    if not is_derived:
        return mean, mean_square(x, centre)
    # v = mean (x − c)² − (m − c)² for every constant c, and c = m rounds least. The second term is
    # zero there, and so is its slope; its second derivative is not.
    return mean, mean_square(x, centre) - (mean - centre).square()


def _by_rows(x: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """By torch's kernel for group norm: of each sample's channel, in one pass over its values.

    That of `mean_square` reads all of them twice, and writes and reads their squares.
    """
    num, channels = x.shape[:2]
    _, means, scales = torch.native_group_norm(x, None, None, num, channels, length, channels, 0.0)
    return combined(means, scales.square().reciprocal(), 1 / num)


def mean_square(x: Tensor, centre: Tensor) -> Tensor:
    """The mean of the squared distances from a constant centre.

    Its gradient is one pass over `x` and keeps nothing else.
    """
    target = centre.reshape(-1, *[1] * (x.dim() - 2)).expand_as(x)
    squares = F.mse_loss(x, target, reduction="none")
    return squares.sum(_all_but_second(x)) / max(1, _count(x))


def _all_but_second(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _count(x: Tensor) -> int:
    return prod(x.shape[dim] for dim in _all_but_second(x))


def combined(means: Tensor, variances: Tensor, shares: Tensor | float) -> tuple[Tensor, Tensor]:
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


@torch.no_grad()
def update_running(
    running: Pair, mean: Tensor, variance: Tensor, count: int, momentum: float
) -> None:
    """Running statistics take in those of so many values; the new ones count `momentum`."""
    unbiased = momentum * count / (count - 1)
    for each, new, much in zip(running, (mean, variance), (momentum, unbiased), strict=True):
        assert each is not None
        each.mul_(1.0 - momentum).add_(new, alpha=much)
