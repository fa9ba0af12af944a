"""Sums whose bits depend on the values alone, not on their order or on their distribution.

A sum of floating-point numbers depends on the order of its roundings, and a tensor in four parts is
added in another order than a whole one. Here nothing is rounded before the end. With σ a power of
two that is n times larger than every |x|, (x + σ) - σ is x without the digits for which σ has no
room: such numbers are multiples of one unit, and n of them add up without rounding, in any order.
The remainders are exact, too, and are added in the same way with a smaller σ, until no remainder
could matter; the few exact sums are added in a fixed order. (Rump, Ogita and Oishi use such steps
for accurate sums, Demmel and Nguyen for reproducible ones.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2, prod

import torch

from tessel.tensor.tensor import Tensor

_DIGITS = 53  # binary digits of float64, in which sums are computed


def sum(
    x: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """The sum over some dimensions, or all; optionally with equal bits on any number of workers.

    Forward:  y = Σ_i x_i.    Backward:  every x_i gets the gradient of y.

    Args:
        x: a spread tensor, in any layout, or a plain one.
        dim: the dimensions to sum over; None stands for all dimensions.
        keepdim: whether the result keeps these dimensions, with length one.
        dtype: the dtype of the result, to which x is converted first.
        deterministic: whether the bits of the result depend on the values and their number alone:
            equal for every layout, every number of workers, and a plain tensor. The error is that
            of one rounding of the result and of the largest |x|, whatever the number of terms. It
            takes a reduction for the largest value and then two to four sums, in float64. Without
            it this is `torch.sum`, whose bits are the same in every run with one layout.

    >>> import tessel, torch
    >>> x = torch.tensor([1e16, 1.0, -1e16])
    >>> tessel.sum(x.double(), deterministic=True), x.double().sum()
    (tensor(1., dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    if dtype is not None:
        x = x.to(dtype)
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.dim()))
    is_rounded = x.is_floating_point() or x.is_complex()
    is_elsewhere = isinstance(x, Tensor) and not x.layout.partition.active
    if not (deterministic and is_rounded and x.dim() and x.numel()) or is_elsewhere:
        return torch.sum(x, dims, keepdim) if x.dim() else torch.sum(x)
    if x.is_complex():
        return torch.complex(
            *(sum(part, dims, keepdim, deterministic=True) for part in (x.real, x.imag))
        )
    wide = x.to(torch.float64)
    largest = wide.detach().abs().amax(dims, keepdim=True)
    if not largest.isfinite().all():
        # Infinite values and NaN determine the results that they enter.
        is_finite = wide.isfinite()
        finite = torch.where(is_finite, wide, 0)
        others = torch.where(is_finite, 0, wide).sum(dims, keepdim)
        # Finite values do not change these results, but have derivatives: those of a zero.
        beside = others + (finite - finite.detach()).sum(dims, keepdim)
        found = torch.where(others == 0, sum(finite, dims, keepdim, deterministic=True), beside)
        return found.to(x.dtype)
    return _of_finite(wide, largest, dims, keepdim, torch.finfo(x.dtype).eps).to(x.dtype)


def _of_finite(
    x: torch.Tensor, largest: torch.Tensor, dims: tuple[int, ...], keepdim: bool, eps: float
) -> torch.Tensor:
    """The sum of finite float64 values, given the largest magnitudes."""
    count = prod(x.shape[dim] for dim in dims)
    room = (count + 1).bit_length()  # n terms are less than 2 ** room of the largest
    # Where σ would overflow, everything is scaled by a power of two, without rounding.
    scale = torch.where(largest > 2.0 ** (1020 - room), 2.0 ** -(room + 4), 1.0)
    x, largest = x * scale, torch.where(largest == 0, 1, largest * scale)
    # A number is its mantissa, in [1/2, 1), times a power of two; the quotient is that power.
    sigma = largest / torch.frexp(largest).mantissa * 2.0**room
    # so many steps that all terms together lose less than a quarter of eps of the largest one
    lost = 2 * room - _DIGITS
    steps = 1 + ceil(max(0, lost + 2 - int(log2(eps))) / (_DIGITS - room))
    sums = []
    for _ in range(steps):
        kept = (x + sigma) - sigma
        sums.append(kept.sum(dims, keepdim))
        # The first step has the whole derivative, the remainders have none.
        x = x.detach() - kept.detach()
        sigma = sigma * 2.0 ** (room - _DIGITS)
    total = sums.pop()
    while sums:
        total = total + sums.pop()
    return total / (scale if keepdim else scale.squeeze(dims))
