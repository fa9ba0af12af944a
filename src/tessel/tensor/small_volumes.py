"""Small volumes: parts that torch would convolve slowly because of their shape.

For a single volume, torch uses oneDNN if the product of the number of channels and of all lengths
but the last is large, and otherwise copies windows into a matrix, which takes two to nine times as
long. Parts are below the limit more often than whole volumes: a slab of 8×96×96 with 16 channels
is. So oneDNN's function is called directly, and so is its gradient.

Where torch derives or traces the convolution itself, its own function is called. For a convolution,
any dimension can be the last one: with the shortest there, the product is largest, and thin slabs
are above the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from tessel.core.context import in_transform, is_compiling
from tessel.core.linop import Tensors, record_map
from tessel.core.memory_format import is_channels_last
from tessel.tensor.batch_norm import derived
from tessel.tensor.table import outlining
from tessel.tensor.windowed import Numbers

MOST_SLOW = 20480  # the product up to which torch does not use oneDNN (ATen's Convolution.cpp)
MOST_TAPS = 3  # of a kernel along a dimension
LEAST_PRODUCTS = 1 << 20  # of values and weights; for fewer, torch's way is faster
_PLAIN = (Tensor, torch.nn.Parameter)  # subclasses may convolve in another way
DimOrder = tuple[int, int, int]
T = TypeVar("T")


@dataclass(eq=False)  # made in each call, and a frozen one is slower to make
class SmallConvolution:
    """The convolution of one volume by oneDNN: (x, w, b) to y.

    Args:
        numbers: stride, padding and dilation.
        composed: the same convolution by torch's differentiable function.
    """

    numbers: tuple[Numbers, Numbers, Numbers]
    composed: Callable[..., Tensor]

    first_kept = 1  # y may be changed in place
    num_unread = 1  # no gradient depends on b
    group: Any = None  # it moves nothing

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor, ...]:
        x, weight, bias = xs
        assert x is not None and weight is not None
        stride, padding, dilation = self.numbers
        convolve: Any = torch.ops.aten.mkldnn_convolution
        # it reads the memory of the bias without its strides
        bias = None if bias is None else bias.contiguous()
        y: Tensor = convolve(
            x.contiguous(), weight.contiguous(), bias, padding, stride, dilation, 1
        )
        return (y,)

    def vjp(
        self, grads: Tensors, needs: Sequence[bool], xs: Tensors, ys: Sequence[Tensor]
    ) -> Tensors:
        """The gradients of x, w and b; by torch's function if they are differentiated again."""
        (grad,), (x, weight, bias) = grads, xs
        assert x is not None and weight is not None
        if grad is None:
            return [None] * len(xs)
        if torch.is_grad_enabled():
            return derived(self.composed, grad, needs, xs)
        stride, padding, dilation = self.numbers
        # torch chooses its way by the format of x; its own is faster for the gradient of a channel
        by_torch = (
            (needs[0] and x.shape[1] == 1)
            or not torch.backends.mkldnn.enabled
            or in_transform()
            or is_compiling()
        )
        given = x.contiguous() if by_torch else x.contiguous().to_mkldnn()
        backward: Any = torch.ops.aten.convolution_backward
        found: Sequence[Tensor | None] = backward(
            *(grad.contiguous(), given, weight.contiguous()),
            *(None if bias is None else bias.shape, stride, padding, dilation),
            *(False, (0,) * len(stride), 1, list(needs)),
        )
        return [
            each if each is None or each.layout == torch.strided else each.to_dense()
            for each in found
        ]


def convolved(
    convolve: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: tuple[Numbers, Numbers, Numbers],
) -> Tensor | None:
    """The convolution of a small volume without groups; None if torch is fast, or it is not one.

    Args:
        convolve: torch's function.
        x: the volume.
        weight: its kernels.
        bias: the bias.
        numbers: stride, padding and dilation.
    """
    if not (_is_slow(x) and _is_right(weight, *numbers[1:])):
        return None
    if _can_be_called(x, weight, bias) and _products(x, weight, *numbers) >= LEAST_PRODUCTS:

        def composed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = _in_other_order(convolve, x, weight, bias, numbers)
            return convolve(x, weight, bias, *numbers) if y is None else y

        return record_map(SmallConvolution(numbers, composed), x, weight, bias)[0]
    return _in_other_order(convolve, x, weight, bias, numbers)


def _is_slow(x: Tensor) -> bool:
    """Whether torch copies windows into a matrix, although oneDNN is there."""
    if x.dim() != 5 or len(x) != 1 or x.device.type != "cpu":
        return False  # the limit does not apply to several volumes, or other devices
    if x.dtype != torch.float32 or not torch.backends.mkldnn.enabled:
        return False
    return prod(x.shape[1:4]) <= MOST_SLOW


def _is_right(weight: Tensor, padding: Numbers, dilation: Numbers) -> bool:
    """Whether oneDNN is right for certain.

    Its gradient of a kernel may have values that were never written, and it may write beyond its
    memory: version 3.12 for kernels of 7 with strides, where the volume is no longer than the
    kernel, or the padding more than half of it. For kernels of three values, as most are, and a
    padding of at most half of them it was right in all of 75,000 random cases.
    """
    return max(weight.shape[2:]) <= MOST_TAPS and all(
        2 * width <= each * (kernel - 1)
        for width, each, kernel in zip(padding, dilation, weight.shape[2:], strict=True)
    )


def _can_be_called(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN's function can be called directly."""
    return not (
        outlining.get()
        or in_transform()
        or is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_autocast_enabled("cpu")
        or not torch.backends.mkldnn.is_available()
        or is_channels_last(x)
        or any(each is not None and type(each) not in _PLAIN for each in (x, weight, bias))
        or any(each is not None and each.dtype != torch.float32 for each in (weight, bias))
        or 0 in x.shape
    )


def _products(
    x: Tensor, weight: Tensor, stride: Numbers, padding: Numbers, dilation: Numbers
) -> int:
    """How often a value is multiplied by a weight; 0 if torch rejects the shapes."""
    outputs = [
        (length + 2 * width - each * (kernel - 1) - 1) // step + 1
        for length, kernel, step, width, each in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    if min(outputs) < 1 or x.shape[1] != weight.shape[1]:
        return 0
    return prod(outputs) * weight.numel()


def order_for(x: Tensor) -> DimOrder | None:
    """The order of a volume's three dimensions in which torch is fast; None to keep theirs."""
    _, channels, *lengths = x.shape
    last = min(range(3), key=lambda dim: lengths[dim])
    if channels * prod(lengths[:last] + lengths[last + 1 :]) <= MOST_SLOW:
        return None
    first, second = (dim for dim in range(3) if dim != last)
    return first, second, last


def in_order(values: tuple[T, ...], order: DimOrder) -> tuple[T, ...]:
    """Values for each dimension, in another order."""
    return tuple(values[dim] for dim in order)


def turned(x: Tensor, order: DimOrder) -> Tensor:
    """A tensor with its last three dimensions in another order."""
    return x.permute(0, 1, *(2 + dim for dim in order))


def turned_back(y: Tensor, order: DimOrder) -> Tensor:
    """A tensor with these dimensions in their own order, also in memory, for faster use later."""
    return y.permute(0, 1, *(2 + order.index(dim) for dim in range(3))).contiguous()


def _in_other_order(
    convolve: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: tuple[Numbers, Numbers, Numbers],
) -> Tensor | None:
    order = order_for(x)
    if order is None:
        return None
    y = convolve(
        turned(x, order), turned(weight, order), bias, *(in_order(each, order) for each in numbers)
    )
    return turned_back(y, order)
