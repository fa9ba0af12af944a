"""Filtering on one worker: a filter over what it read, and the adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fft import irfftn, rfftn

LARGEST_DIRECT = 64  # values of a filter; a larger one is quicker by way of the Fourier transform

_FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_ADJOINT = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolve(x: Tensor, filter: Tensor, stride: int) -> Tensor:
    """The convolution where the filter lies within x, at every `stride`-th place.

    Forward:  y[i] = Σ_t f[t] x[s·i + k − 1 − t].

    Args:
        x: (batch, channels, *space).
        filter: (1 or batch, 1 or channels, *sizes).
        stride: how far apart outputs are.
    """
    if prod(filter.shape[2:]) > LARGEST_DIRECT:
        return _by_fourier(x, filter, stride)
    batch, groups, weight = _grouped(x, filter)
    y = _FORWARD[filter.dim() - 2](
        x.reshape(batch, groups, *x.shape[2:]), weight, stride=stride, groups=groups
    )
    return y.reshape(*x.shape[:2], *y.shape[2:])


def convolve_adjoint(y: Tensor, filter: Tensor, stride: int) -> Tensor:
    """The adjoint of `convolve` for an x that is just as long as the windows need."""
    if prod(filter.shape[2:]) > LARGEST_DIRECT:
        return _by_fourier_adjoint(y, filter, stride)
    batch, groups, weight = _grouped(y, filter.conj())
    x = _ADJOINT[filter.dim() - 2](
        y.reshape(batch, groups, *y.shape[2:]), weight, stride=stride, groups=groups
    )
    return x.reshape(*y.shape[:2], *x.shape[2:])


def _grouped(x: Tensor, filter: Tensor) -> tuple[int, int, Tensor]:
    """Batch, groups and weight of a convolution that filters each channel on its own."""
    batch, channels = x.shape[:2]
    # torch correlates: a convolution has the filter the other way round.
    weight = filter.flip(tuple(range(2, filter.dim())))
    # One filter for all images of the batch: channels are groups. One for each image: the batch is
    # folded into the channels, so that each image has groups of its own.
    if filter.shape[0] == 1:
        weight = weight.expand(1, channels, *weight.shape[2:])
        return batch, channels, weight.transpose(0, 1)
    weight = weight.expand(batch, channels, *weight.shape[2:])
    return 1, batch * channels, weight.reshape(batch * channels, 1, *weight.shape[2:])


def _by_fourier(x: Tensor, filter: Tensor, stride: int) -> Tensor:
    kept = tuple(
        slice(size - 1, n, stride) for size, n in zip(filter.shape[2:], x.shape[2:], strict=True)
    )
    y = _product(x, filter, x.shape[2:], False)[(slice(None), slice(None), *kept)]
    return _not_negative(y, x, filter)


def _by_fourier_adjoint(y: Tensor, filter: Tensor, stride: int) -> Tensor:
    sizes = filter.shape[2:]
    lengths = [stride * (n - 1) + size for n, size in zip(y.shape[2:], sizes, strict=True)]
    spaced = y.new_zeros((*y.shape[:2], *lengths))
    kept = tuple(slice(size - 1, n, stride) for size, n in zip(sizes, lengths, strict=True))
    spaced[(slice(None), slice(None), *kept)] = y
    x = _product(spaced, filter, lengths, True)
    return _not_negative(x[(slice(None), slice(None), *map(slice, lengths))], y, filter)


def _product(x: Tensor, filter: Tensor, lengths: Sequence[int], conjugate: bool) -> Tensor:
    """The product of Fourier transforms, transformed back.

    Windows that lie within x see nothing of what a transform wraps around.
    """
    there, back = (torch.fft.fftn, torch.fft.ifftn) if x.is_complex() else (rfftn, irfftn)
    sizes, dims = [_smooth(n) for n in lengths], tuple(range(2, x.dim()))
    spectrum = there(filter, sizes, dims)
    return back(there(x, sizes, dims) * (spectrum.conj() if conjugate else spectrum), sizes, dims)


def _not_negative(result: Tensor, x: Tensor, filter: Tensor) -> Tensor:
    """Rounding must not take sums of numbers without a negative one below zero: logarithms follow.

    The derivative is that of the sums.
    """
    if result.is_complex() or filter.is_complex():
        return result
    # As a tensor, not a number: reading it would wait for the GPU.
    least = torch.where((x.detach().min() >= 0) & (filter.detach().min() >= 0), 0.0, -torch.inf)
    least = least.to(result.dtype)
    if not torch.is_grad_enabled():
        return result.clamp_(min=least)
    # Clamping itself would stop the gradient where rounding went below zero.
    return result + (result.detach().clamp(min=least) - result.detach())


def _smooth(length: int) -> int:
    """The next number without prime factors above 5, of which transforms are fast.

    >>> _smooth(97)
    100
    """
    while True:
        rest = length
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return length
        length += 1
