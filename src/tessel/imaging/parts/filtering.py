"""Filtering on one worker: convolutions of images, directly or by Fourier transforms."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tessel.core import Shape, in_forward_mode, is_compiling

LARGEST_DIRECT = 64  # values of a filter; a larger one is faster by Fourier transforms
# Bytes of a transform that is cached. Larger ones would use the memory that splitting saves.
LARGEST_KEPT = 1 << 25

_FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_ADJOINT = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class FilterSpectrum:
    """The Fourier transform of a filter, cached from one call to the next.

    A solver uses one filter several times in each iteration. The values of the filter are compared,
    not its version, which does not count changes through `filter.data` or through an array with the
    same memory: this costs little compared to a transform as long as the image.
    """

    def __init__(self) -> None:
        # the values of the filter, and its transforms by their lengths and kind
        self._kept: tuple[Tensor, dict[tuple[Shape, bool], Tensor]] | None = None

    def of(self, filter: Tensor, lengths: Shape, is_complex: bool) -> Tensor:
        """The transform of a filter that is padded with zeros to these lengths.

        Args:
            filter: (1 or batch, 1 or channels, *sizes).
            lengths: the lengths of the transform.
            is_complex: whether images are complex.
        """
        there = torch.fft.fftn if is_complex else torch.fft.rfftn
        dims = tuple(range(2, filter.dim()))
        # For derivatives the transform belongs to the call. On a GPU a comparison would
        # synchronize.
        if (
            (filter.requires_grad and torch.is_grad_enabled())
            or in_forward_mode()
            or filter.device.type != "cpu"
            or is_compiling()
            or torch._C._are_functorch_transforms_active()
            or _get_current_dispatch_mode() is not None
        ):
            return there(filter, lengths, dims)
        kept, form = self._kept, (lengths, is_complex)
        is_known = kept is not None and kept[0].dtype == filter.dtype
        if kept is None or not is_known or not torch.equal(kept[0], filter):
            # any later call may use it, with a gradient of its image or without
            with torch.inference_mode(False), torch.no_grad():
                kept = filter.clone(), {}
        spectrum = kept[1].get(form)
        if spectrum is None:
            with torch.inference_mode(False), torch.no_grad():
                spectrum = there(kept[0], lengths, dims)
            if spectrum.nbytes <= LARGEST_KEPT:
                kept[1][form] = spectrum
                self._kept = kept
        return spectrum

    def __reduce__(self) -> tuple[type[FilterSpectrum], tuple[()]]:
        return FilterSpectrum, ()  # a copy starts with an empty cache


def convolve(
    x: Tensor,
    filter: Tensor,
    stride: int,
    adjoint: bool = False,
    spectrum: FilterSpectrum | None = None,
) -> Tensor:
    """The valid convolution of x with a filter, at every `stride`-th place, or its adjoint.

    Forward:  y[i] = Σ_t f[t] x[s·i + k − 1 − t].    The adjoint returns an image that is exactly
    as long as the windows need.

    Args:
        x: (batch, channels, *space).
        filter: (1 or batch, 1 or channels, *sizes).
        stride: the distance between outputs.
        adjoint: whether the adjoint is applied.
        spectrum: the cache of the filter's transforms.
    """
    if prod(filter.shape[2:]) > LARGEST_DIRECT:
        return _by_fourier(x, filter, stride, adjoint, spectrum or FilterSpectrum())
    batch, channels = groups = x.shape[:2]
    # torch correlates: for a convolution the filter is flipped.
    weight = (filter.conj() if adjoint else filter).flip(tuple(range(2, filter.dim())))
    # With one filter for all images of the batch, channels are groups. With one for each image, the
    # batch is folded into the channels, so that each image has its own groups.
    if filter.shape[0] > 1:
        groups = torch.Size([1, batch * channels])
        weight = weight.expand(batch, channels, *weight.shape[2:]).flatten(0, 1).unsqueeze(1)
    else:
        weight = weight.expand(1, channels, *weight.shape[2:]).transpose(0, 1)
    function = (_ADJOINT if adjoint else _FORWARD)[filter.dim() - 2]
    y = function(x.reshape(*groups, *x.shape[2:]), weight, stride=stride, groups=groups[1])
    return y.reshape(batch, channels, *y.shape[2:])


def _by_fourier(
    x: Tensor, filter: Tensor, stride: int, adjoint: bool, known: FilterSpectrum
) -> Tensor:
    """The same by the product of Fourier transforms.

    The wrap-around of the transform does not affect windows within x.
    """
    given, (lengths, smooth, kept, whole) = x, _windows(x.shape, filter.shape, stride, adjoint)
    if adjoint:
        x = given.new_zeros((*given.shape[:2], *lengths))
        x[kept] = given
    there, back = torch.fft.rfftn, torch.fft.irfftn
    if x.is_complex():
        there, back = torch.fft.fftn, torch.fft.ifftn
    dims = tuple(range(2, x.dim()))
    spectrum = known.of(filter, smooth, x.is_complex())
    y = back(there(x, smooth, dims) * (spectrum.conj() if adjoint else spectrum), smooth, dims)
    y = y[whole if adjoint else kept]
    if y.is_complex() or filter.is_complex():
        return y
    # Rounding must not make sums of nonnegative numbers negative: logarithms may follow. The bound
    # is a tensor, not a number: reading it would synchronize with the GPU.
    least = torch.where((given.detach().min() >= 0) & (filter.detach().min() >= 0), 0.0, -torch.inf)
    least = least.to(y.dtype)
    if not torch.is_grad_enabled():
        return y.clamp_(min=least)
    # The derivative is that of the sums: that of the clamp would be zero below zero.
    return y + (y.detach().clamp(min=least) - y.detach())


@lru_cache(maxsize=1024)  # a solver has the same shapes in each iteration
def _windows(
    image: Shape, filter: Shape, stride: int, adjoint: bool
) -> tuple[Shape, Shape, tuple[slice, ...], tuple[slice, ...]]:
    """The lengths of an image and of its transform, the ends of windows, and the whole image."""
    lengths = image[2:]
    if adjoint:
        pairs = zip(lengths, filter[2:], strict=True)
        lengths = tuple(stride * (n - 1) + size for n, size in pairs)
    ends = zip(filter[2:], lengths, strict=True)
    channels = slice(None), slice(None)
    kept = (*channels, *(slice(size - 1, n, stride) for size, n in ends))
    return lengths, tuple(map(_smooth, lengths)), kept, (*channels, *map(slice, lengths))


def _smooth(length: int) -> int:
    """The next number without prime factors above 5, for which transforms are fast.

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
