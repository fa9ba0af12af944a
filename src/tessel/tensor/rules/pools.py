"""Pools: the largest value or the mean of each window.

Each worker fetches the inputs that its windows read, and pools them by torch's own function.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.boxes import Interval
from tessel.core.context import is_compiling
from tessel.core.layout import Layout, Shape
from tessel.core.memory_format import is_channels_last, memory_format
from tessel.core.numbers import constant
from tessel.core.shared import anchored_zeros
from tessel.core.windows import Window
from tessel.tensor import interior_border
from tessel.tensor.table import Arguments, Settings, made, opened, rule
from tessel.tensor.windowed import (
    Numbers,
    Windowed,
    cropped,
    hashable,
    leading,
    outline,
    overhang,
    tuple_of,
    windowed,
)
from tessel.transport import kept_in_job

DtypeAndDevice = tuple[torch.dtype, str]  # the dtype and the type of device
_MAXIMA: tuple[Any, ...] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGES: tuple[Any, ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


@dataclass(frozen=True)
class Pool(ABC):
    """The arguments of a pool, as a value.

    Attributes:
        windows: the window along each of the last dimensions.
        ceil_mode: whether a last window may extend beyond the tensor.
    """

    windows: tuple[Window, ...]
    ceil_mode: bool

    @property
    @abstractmethod
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of torch's own pool after the input that determine the shape."""

    @property
    @abstractmethod
    def function(self) -> Any:
        """Torch's own pool."""

    @abstractmethod
    def whole(self, x: Tensor) -> Any:
        """The pool as one process computes it."""

    @abstractmethod
    def pool(self, x: Tensor, plan: Windowed, frame: Frame) -> Any:
        """This worker's outputs, at least one, from the inputs that its windows read."""

    @lru_cache(maxsize=1024)  # noqa: B019  (pools are values)
    def output_shape(self, shape: Shape, kind: DtypeAndDevice) -> Shape:
        """The shape of the whole output; raises torch's own error if it cannot be pooled."""
        if kind[0] not in (torch.float32, torch.float64):  # torch rejects dtypes only with values
            kernel = tuple(window.kernel for window in self.windows)
            least = (1,) * (len(shape) - len(kernel)) + kernel
            self.function(torch.ones(least, dtype=kind[0], device=kind[1]), kernel)
        return tuple(self.function(outline(shape), *self.arguments).shape)

    @kept_in_job
    def plan(self, layout: Layout, kind: DtypeAndDevice) -> Windowed:
        """The plan by which each worker reads the inputs of its balanced part of the output."""
        shape = self.output_shape(layout.shape, kind)
        return windowed(layout, shape, leading(len(shape), self.windows))

    def of_read(self, x: Tensor, plan: Windowed) -> Any:
        """This worker's outputs from the inputs that its windows read."""
        if plan.stays_whole:
            return self.whole(x)
        if not math.prod(plan.target.local_shape):
            return self.anchored_zeros(plan.target.local_shape, x)
        return self.pool(x, plan, Frame.of(plan, self.windows))

    def without_copy(self, x: Tensor, plan: Windowed) -> Tensor | None:
        """This worker's outputs without a copy of its inputs, if that is possible and faster."""
        return None

    def anchored_zeros(self, shape: Shape, x: Tensor) -> Any:
        """The empty outputs of a worker."""
        return anchored_zeros(shape, x)


def pooled(x: Any, pool: Pool) -> Any:
    """Pool a spread tensor."""
    part, layout = opened(x)
    plan = pool.plan(layout, (part.dtype, part.device.type))
    y = pool.without_copy(part, plan)
    y = pool.of_read(plan.fetch(part), plan) if y is None else y
    if isinstance(y, tuple):
        return tuple(made(each, plan.target) for each in y)
    return made(y, plan.target)


@dataclass(frozen=True)
class Frame:
    """The arguments with which torch's own pool computes a worker's outputs.

    Torch pads both sides equally, and where windows extend beyond the right side only it counts at
    most one of them. So there may be superfluous outputs before, and values to append.

    Attributes:
        windows: the window along each pooled dimension.
        padding: the padding for torch's pool.
        outputs: the slices of this worker's outputs in the result of torch's pool.
        behind: the number of values to append, for each dimension.
    """

    windows: tuple[Window, ...]
    padding: Numbers
    outputs: tuple[slice, ...]
    behind: Numbers

    @classmethod
    def of(cls, plan: Windowed, windows: tuple[Window, ...]) -> Frame:
        D = len(windows)
        return cls.around(windows, plan.overhang[-D:], plan.target.local_shape[-D:])

    @classmethod
    def around(
        cls, windows: tuple[Window, ...], sides: Sequence[Interval], counts: Sequence[int]
    ) -> Frame:
        """The frame for `counts` outputs, whose windows extend beyond both sides by `sides`."""
        padding, outputs, behind = [], [], []
        for window, (before, after), count in zip(windows, sides, counts, strict=True):
            missing = after - before - window.stride  # in ceil mode torch counts windows up to this
            skipped = 0 if missing < 0 else missing // window.stride + 1
            wide = before + skipped * window.stride
            fits = wide <= window.before  # torch may reject a larger padding
            padding.append(wide if fits else before)
            outputs.append(slice(skipped, skipped + count) if fits else slice(0, count))
            behind.append(0 if fits else after - before)
        return cls(windows, tuple(padding), tuple(outputs), tuple(behind))

    def filled(self, x: Tensor, value: float, least: Numbers | None = None) -> Tensor:
        """The tensor with `value` appended, up to the lengths `least` at least."""
        sizes = x.shape[-len(self.behind) :]
        short = (
            [0] * len(sizes)
            if least is None
            else [n - m for n, m in zip(least, sizes, strict=True)]
        )
        behind = [max(a, b) for a, b in zip(self.behind, short, strict=True)]
        if not any(behind):
            return x
        return F.pad(x, [width for each in reversed(behind) for width in (0, each)], value=value)

    @property
    def kernel(self) -> Numbers:
        return tuple(window.kernel for window in self.windows)

    @property
    def stride(self) -> Numbers:
        return tuple(window.stride for window in self.windows)

    @property
    def dilation(self) -> Numbers:
        return tuple(window.dilation for window in self.windows)


@lru_cache(maxsize=1024)
def _windows(num_dims: int, *settings: int | Numbers) -> tuple[Window, ...]:
    """The windows by kernel, stride, dilation and padding, each a number or one per dimension."""
    each = zip(*(tuple_of(value, num_dims) for value in settings), strict=True)
    return tuple(Window(*numbers) for numbers in each)


@dataclass(frozen=True)
class AveragePool(Pool):
    """The mean of each window."""

    count_include_pad: bool
    divisor_override: int | None

    @classmethod
    def of(
        cls,
        num_dims: int,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> AveragePool:
        """The pool of torch's arguments."""
        stride = kernel_size if stride is None or stride in ([], ()) else stride
        sizes = hashable(kernel_size), hashable(stride), 1, hashable(padding)
        return cls(_windows(num_dims, *sizes), ceil_mode, count_include_pad, divisor_override)

    @property
    def function(self) -> Any:
        return _AVERAGES[len(self.windows) - 1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        each = ((window.kernel, window.stride, window.before) for window in self.windows)
        return (*zip(*each, strict=True), self.ceil_mode)

    def whole(self, x: Tensor) -> Tensor:
        last = () if len(self.windows) == 1 else (self.divisor_override,)
        arguments = (*self.arguments, self.count_include_pad, *last)
        return _averaged(self.function, x, any(each.before for each in self.windows), arguments)

    def pool(self, x: Tensor, plan: Windowed, frame: Frame) -> Tensor:
        least = frame.kernel if len(self.windows) == 3 else None  # torch's own pool requires it
        x = frame.filled(x, 0.0, least)
        kernel, stride, padding = frame.kernel, frame.stride, frame.padding
        if len(kernel) == 1:  # torch's own 1-d pool takes no divisor
            sizes = (1, *kernel), (1, *stride), (0, *padding)
            rows, settings = x.unsqueeze(-2), (*sizes, True, True, 1)
            sums = _averaged(F.avg_pool2d, rows, any(padding), settings).squeeze(-2)
        else:
            averaging = (kernel, stride, padding, True, True, 1)
            sums = _averaged(self.function, x, any(padding), averaging)
        sums = cropped(sums, frame.outputs)
        # the number of values averaged in each output, a single number if it is the same for all
        divisor: Any = self.divisor_override
        if divisor is None:
            D, box = len(self.windows), plan.target.box()
            assert box is not None
            sides = zip(frame.windows, box[-D:], plan.source.shape[-D:], strict=True)
            counts = [_counts(*side, self.count_include_pad) for side in sides]
            if all(len(set(each)) == 1 for each in counts):
                divisor = math.prod(each[0] for each in counts)
            else:
                tensors = [constant(tuple(each), x.dtype, x.device) for each in counts]
                divisor = math.prod(torch.meshgrid(*tensors, indexing="ij"))
        if sums.is_floating_point():
            return sums / divisor
        return torch.div(sums, divisor, rounding_mode="trunc")


def _averaged(function: Any, x: Tensor, pads: bool, arguments: tuple[Any, ...]) -> Tensor:
    """Torch's own pool, in the memory format of the input.

    On GPUs its gradient is wrong if it pads and channels are last in memory (up to torch 2.13, also
    for 1-d pools: https://github.com/pytorch/pytorch/issues/188344).
    """
    image = x if x.dim() > 3 else x.unsqueeze(-2)  # as torch computes 1-d pools
    is_wrong = pads and x.is_cuda and image.dim() == 4 and is_channels_last(image)
    result: Tensor = function(x.contiguous() if is_wrong else x, *arguments)
    if is_wrong and image is x:
        result = result.contiguous(memory_format=memory_format(x))
    return result


@lru_cache(maxsize=1024)
def _counts(window: Window, outputs: Interval, length: int, include_pad: bool) -> Numbers:
    """The number of values that each output averages along one dimension.

    Values beyond the padding, in ceil mode, are never counted.
    """
    border = window.before if include_pad else 0
    firsts = [window.first(i) for i in range(*outputs)]
    return tuple(
        min(first + window.kernel, length + border) - max(first, -border) for first in firsts
    )


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`torch.nn.functional.avg_pool*`."""
    return pooled(args[0], AveragePool.of(int(name[-2]), *args[1:], **kwargs))


@dataclass(frozen=True)
class MaximumPool(Pool):
    """The largest value of each window, optionally with its flat index in the whole tensor."""

    return_indices: bool

    @classmethod
    def of(
        cls,
        num_dims: int,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> MaximumPool:
        """The pool of torch's arguments."""
        stride = kernel_size if stride is None or stride in ([], ()) else stride
        sizes = map(hashable, (kernel_size, stride, dilation, padding))
        return cls(_windows(num_dims, *sizes), ceil_mode, return_indices)

    @property
    def function(self) -> Any:
        return _MAXIMA[len(self.windows) - 1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        each = ((w.kernel, w.stride, w.before, w.dilation) for w in self.windows)
        return (*zip(*each, strict=True), self.ceil_mode)

    def whole(self, x: Tensor) -> Any:
        return self.function(x, *self.arguments, return_indices=self.return_indices)

    def without_copy(self, x: Tensor, plan: Windowed) -> Tensor | None:
        if self.return_indices or is_compiling():  # a halo's messages are no nodes of a graph
            return None
        windows = self.windows
        border = interior_border  # for numbers that tests change
        least = border.LEAST_VALUES_ON_GPU if x.is_cuda else border.LEAST_VALUES
        found = border.in_interior_and_border(plan, windows, least)
        if found is None:
            return None
        sides = list(plan.overhang[-len(windows) :])
        counts = list(plan.target.local_shape[-len(windows) :])
        at = found.dim - len(plan.target.shape)

        def pool(rows: Tensor, outputs: Interval) -> Tensor:
            hull, length = found.window.hull(outputs), plan.source.shape[at]
            sides[at], counts[at] = overhang(hull, length), outputs[1] - outputs[0]
            frame = Frame.around(windows, sides, counts)
            rows = frame.filled(rows, _lowest(rows.dtype))
            return cropped(_maximum(rows, frame, False), frame.outputs)

        return found.apply(x, pool)

    def pool(self, x: Tensor, plan: Windowed, frame: Frame) -> Tensor | tuple[Tensor, Tensor]:
        x = frame.filled(x, _lowest(x.dtype))
        result = _maximum(x, frame, self.return_indices)
        if not self.return_indices:
            return cropped(result, frame.outputs)
        values, places = (cropped(each, frame.outputs) for each in result)
        D, box = len(self.windows), plan.read.box()
        assert box is not None
        at = [lambda index, start=start: index + start for start, _ in box[-D:]]
        return values, global_places(places, x.shape[-D:], plan.source.shape[-D:], at)

    def anchored_zeros(self, shape: Shape, x: Tensor) -> Any:
        values = super().anchored_zeros(shape, x)
        return (values, values.detach().long()) if self.return_indices else values


def _maximum(x: Tensor, frame: Frame, indices: bool) -> Any:
    maximum: Any = _MAXIMA[len(frame.windows) - 1]
    return maximum(
        x, frame.kernel, frame.stride, frame.padding, frame.dilation, True, return_indices=indices
    )


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def global_places(
    places: Tensor,
    local: Sequence[int],
    lengths: Sequence[int],
    at: Sequence[Callable[[Tensor], Tensor]],
) -> Tensor:
    """Flat indices in the whole tensor, from those in a worker's tensor.

    Args:
        places: the flat indices of some values in the worker's tensor.
        local: its lengths.
        lengths: the lengths of the whole.
        at: for each dimension, a function from the worker's indices to those in the whole.
    """
    result = torch.zeros_like(places)
    factor = 1
    for size, length, to_global in reversed(list(zip(local, lengths, at, strict=True))):
        result += to_global(places % size) * factor
        places = places // size
        factor *= length
    return result


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def maximum_pool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`torch.nn.functional.max_pool*`."""
    return pooled(args[0], MaximumPool.of(int(name[-2]), *args[1:], **kwargs))


@rule("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices")
def maximum_pool_with_places(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The same with the flat indices of these values."""
    kwargs = {**kwargs, "return_indices": True}
    return pooled(args[0], MaximumPool.of(int(name[8]), *args[1:], **kwargs))
