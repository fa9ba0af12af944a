"""Moments: the mean and variance of a worker's part, and of all parts together."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.context import in_transform, is_compiling
from tessel.tensor.table import widened

try:
    import tessel.tensor.loops as loops
except ImportError:  # it was not compiled
    loops = None  # type: ignore[assignment]

RunningMoments = tuple[Tensor | None, Tensor | None]


def local_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance over all dimensions but the second; zeros where there is no value."""
    x = widened(x)
    if _can_be_read_once(x):
        found = x.new_empty(2, x.shape[1])
        sizes = x.shape[0], x.shape[1], prod(x.shape[2:]), x.itemsize
        loops.moments(x.data_ptr(), found.data_ptr(), *sizes)
        return found[0], found[1]
    mean = x.sum(_all_but_second(x)) / max(1, _count(x))
    if not torch.is_grad_enabled():
        return mean, mean_square(x, mean)
    centre = mean.detach()
    # v = mean (x − c)² − (m − c)² for every constant c; rounding errors are smallest for c = m. The
    # second term and its first derivative are zero there, but not its second derivative.
    return mean, mean_square(x, centre) - (mean - centre).square()


# The compiled loop is faster for at least this many values of a sample's channel, and at most this
# many threads of torch, whose three functions read and write four times as much.
_LONG, _FEW_THREADS = 128, 2


def _can_be_read_once(x: Tensor) -> bool:
    """Whether the compiled loop can read a tensor's memory, and is faster than torch."""
    return (
        loops is not None
        and not (is_compiling() or in_transform() or torch._C._len_torch_dispatch_stack())
        and type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.shape[0] > 0
        and prod(x.shape[2:]) >= _LONG
        and x.is_contiguous()
        and not (x.is_neg() or not x.data_ptr())  # a lazy sign, or zeros without memory
        and not (torch.is_grad_enabled() and x.requires_grad)  # torch differentiates only its own
        and torch.get_num_threads() <= _FEW_THREADS
    )


def mean_square(x: Tensor, centre: Tensor) -> Tensor:
    """The mean of the squared distances from a constant centre.

    Its gradient takes one pass over `x`, and nothing else is kept for it.
    """
    target = centre.reshape(-1, *[1] * (x.dim() - 2)).expand_as(x)
    squares = F.mse_loss(x, target, reduction="none")
    return squares.sum(_all_but_second(x)) / max(1, _count(x))


def _all_but_second(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _count(x: Tensor) -> int:
    return prod((x.shape[0], *x.shape[2:]))


def combined(means: Tensor, variances: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance of all places from those of each (Chan's formula).

    Args:
        means: the means of all places, along the first dimension.
        variances: their variances, likewise.
        shares: the fraction of all values that each place has.
    """
    mean = (shares * means).sum(0)
    offsets = means - mean
    variance = (shares * torch.addcmul(variances, offsets, offsets)).sum(0)
    return mean, variance


@torch.no_grad()
def update_running(
    running: RunningMoments, mean: Tensor, variance: Tensor, count: int, momentum: float
) -> None:
    """Update running statistics by those of `count` values, with the weight `momentum`."""
    unbiased = momentum * count / (count - 1)
    for each, new, much in zip(running, (mean, variance), (momentum, unbiased), strict=True):
        assert each is not None
        each.mul_(1.0 - momentum).add_(new, alpha=much)
