"""Moments: the mean and variance of what a worker has, and of what all have together."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.context import in_transform, is_compiling
from tessel.tensor.table import widened

try:
    import tessel.tensor.loops as loops
except ImportError:  # nobody compiled it
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
    # v = mean (x − c)² − (m − c)² for every constant c, and c = m rounds least. The second term is
    # zero there, and so is its first derivative; its second one is not.
    return mean, mean_square(x, centre) - (mean - centre).square()


# Values of a sample's channel from which on a loop over them is worth its beginning, and threads of
# torch that are slower together: its three functions read and write four times as much.
_LONG, _FEW_THREADS = 128, 2


def _can_be_read_once(x: Tensor) -> bool:
    """Whether the compiled loop may read a tensor's memory, and is faster than torch."""
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
        and not (torch.is_grad_enabled() and x.requires_grad)  # torch derives its own functions
        and torch.get_num_threads() <= _FEW_THREADS
    )


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
    return prod((x.shape[0], *x.shape[2:]))


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


@torch.no_grad()
def update_running(
    running: RunningMoments, mean: Tensor, variance: Tensor, count: int, momentum: float
) -> None:
    """Running statistics take in those of so many values; the new ones count `momentum`."""
    unbiased = momentum * count / (count - 1)
    for each, new, much in zip(running, (mean, variance), (momentum, unbiased), strict=True):
        assert each is not None
        each.mul_(1.0 - momentum).add_(new, alpha=much)
