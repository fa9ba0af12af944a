"""Pointwise convolutions, with kernels of one value, in the form that torch computes fastest.

With a stride s they read every s-th value. These are selected first and convolved without a stride,
since torch's input gradient of a strided convolution takes up to twice as long.

With one thread torch computes a matrix product for each sample. For small images with many channels
oneDNN's single product for all samples is faster. A dilation does not change the result of a kernel
of one value, but lets torch use oneDNN.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

# Measured with one thread, forward and backward: oneDNN takes 5 to 20 percent less time within
# these bounds, and more outside of them. From 16 samples on torch uses it anyway.
_LEAST_SAMPLES, _LEAST_CHANNELS, _MOST_POSITIONS = 4, 256, 128


def convolve_pointwise(
    function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...]
) -> Tensor:
    """The convolution with this stride, without padding and groups."""
    if max(stride) > 1:
        read: tuple[Any, ...] = (..., *(slice(None, None, step) for step in stride))
        x = x[read].contiguous()
    y: Tensor = function(x, weight, bias, dilation=2 if _is_for_onednn(x, weight) else 1)
    return y


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and bool(torch.backends.mkldnn.enabled)
        and torch.get_num_threads() == 1
        and x.dim() == weight.dim()  # else x is one sample, without that dimension
        and x.shape[0] >= _LEAST_SAMPLES
        and min(weight.shape[:2]) >= _LEAST_CHANNELS
        and prod(x.shape[2:]) <= _MOST_POSITIONS
    )
