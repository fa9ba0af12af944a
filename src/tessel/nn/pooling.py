"""Pools: the largest value or the mean of each window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.boxes import Interval
from tessel.layout import Layout, Shape
from tessel.nn import pieces
from tessel.nn.layer import ComputingLayer, Result
from tessel.nn.mixins import PoolingMixin
from tessel.nn.windowed import Windowed, leading, outline, overhang, tuple_of, windowed
from tessel.shared import nothing
from tessel.windows import Window

Numbers = tuple[int, ...]
Kind = tuple[torch.dtype, str]  # the dtype and the type of device
_MAXIMA = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGES = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


class DistributedPoolingBase(PoolingMixin, ComputingLayer):
    """A pool over a partitioned tensor: each worker fetches what its windows read, then pools.

    A subclass derives from this and from torch's own pool, whose arguments and defaults it has, and
    says how many dimensions its window has. The output lies on a partition of the same shape, in
    balanced parts.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.

    >>> import tessel
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> isinstance(tessel.nn.DistributedMaxPool1d(P, 2), tessel.nn.DistributedPoolingBase)
    True
    """

    num_dims: int  # of the window
    kernel_size: Any
    stride: Any
    padding: Any
    ceil_mode: bool

    def windows(self) -> tuple[Window, ...]:
        """The window along each of the last dimensions."""
        dilation = getattr(self, "dilation", 1)
        settings = self.kernel_size, self.stride, dilation, self.padding
        each = zip(*(tuple_of(value, self.num_dims) for value in settings), strict=True)
        return tuple(Window(*numbers) for numbers in each)

    def global_shape(self, shape: Shape, kind: Kind) -> Shape:
        """The shape of the whole output; torch's own error if it cannot be pooled."""
        raise NotImplementedError(f"{type(self).__name__} does not give the shape of its output")

    def pool(self, x: Tensor, plan: Windowed, frame: Frame) -> Tensor | tuple[Tensor, Tensor]:
        """This worker's outputs, at least one, from what its windows read."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it pools")

    def compute(self, x: Tensor, layout: Layout) -> Result:
        shape = self.global_shape(layout.shape, (x.dtype, x.device.type))
        windows = self.windows()
        plan = windowed(layout, shape, leading(len(shape), windows))
        y = self.without_copy(x, plan, windows)
        return self._pool(plan.fetch(x), plan, windows) if y is None else y, plan.target

    def without_copy(self, x: Tensor, plan: Windowed, windows: tuple[Window, ...]) -> Tensor | None:
        """This worker's outputs without a copy of its inputs, if that is possible and quicker."""
        return None

    def _pool(self, x: Tensor, plan: Windowed, windows: tuple[Window, ...]) -> Any:
        if plan.stays_whole:
            return self.torch_forward(x)
        if not math.prod(plan.target.local_shape):
            return self._empty(plan.target.local_shape, x)
        return self.pool(x, plan, Frame.of(plan, windows))

    def _empty(self, shape: Shape, x: Tensor) -> Any:
        return nothing(shape, x)


@dataclass(frozen=True)
class Frame:
    """How torch's own pool, on what a worker's windows read, gives that worker's outputs.

    Torch pads both sides alike, and where windows stick out on the right only it counts at most
    one of them. So there may be some outputs too many before, and values to add behind.

    Attributes:
        windows: one for each pooled dimension.
        padding: for torch's own argument.
        outputs: where this worker's outputs lie in what torch's pool gives.
        behind: how many values are to be put behind the tensor, for each dimension.
    """

    windows: tuple[Window, ...]
    padding: Numbers
    outputs: tuple[Any, ...]
    behind: Numbers

    @classmethod
    def of(cls, plan: Windowed, windows: tuple[Window, ...]) -> Frame:
        D = len(windows)
        return cls.around(windows, plan.overhang[-D:], plan.target.local_shape[-D:])

    @classmethod
    def around(
        cls, windows: tuple[Window, ...], sides: Sequence[Interval], counts: Sequence[int]
    ) -> Frame:
        """For so many outputs, whose windows stick out so far on both sides."""
        each = zip(windows, sides, counts, strict=True)
        padding, outputs, behind = zip(*(_frame(*numbers) for numbers in each), strict=True)
        return cls(windows, padding, (..., *outputs), behind)

    def filled(self, x: Tensor, value: float, least: Numbers | None = None) -> Tensor:
        """The tensor with `value` put behind it, so that it has also the lengths `least`."""
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


def _frame(window: Window, overhang: Interval, count: int) -> tuple[int, slice, int]:
    """Torch's padding, where the outputs lie then, and how many values must stand behind."""
    before, after = overhang
    missing = after - before - window.stride  # in ceil mode torch counts windows up to this
    skipped = 0 if missing < 0 else missing // window.stride + 1
    padding = before + skipped * window.stride
    if padding <= window.before:
        return padding, slice(skipped, skipped + count), 0
    return before, slice(0, count), after - before


class _AvgPool(DistributedPoolingBase):
    count_include_pad: bool
    divisor_override: int | None = None

    def global_shape(self, shape: Shape, kind: Kind) -> Shape:
        return _average_shape(shape, kind, self.windows(), self.ceil_mode)

    def pool(self, x: Tensor, plan: Windowed, frame: Frame) -> Tensor:
        least = frame.kernel if self.num_dims == 3 else None  # what torch's own asks for
        sums = _sums(frame.filled(x, 0.0, least), frame)[frame.outputs]
        divisor = self._divisor(plan, frame, x)
        if sums.is_floating_point():
            return sums / divisor
        return torch.div(sums, divisor, rounding_mode="trunc")

    def _divisor(self, plan: Windowed, frame: Frame, x: Tensor) -> Tensor | int:
        """How many values each output is the mean of, as a number if that is the same for all."""
        if self.divisor_override is not None:
            return self.divisor_override
        D = self.num_dims
        box = plan.target.box()
        assert box is not None
        counts = [
            _counts(window, part, length, self.count_include_pad)
            for window, part, length in zip(
                frame.windows, box[-D:], plan.source.shape[-D:], strict=True
            )
        ]
        if all(len(set(each)) == 1 for each in counts):
            return math.prod(each[0] for each in counts)
        tensors = [torch.tensor(each, dtype=x.dtype, device=x.device) for each in counts]
        return math.prod(torch.meshgrid(*tensors, indexing="ij"))


@lru_cache(maxsize=1024)
def _average_shape(shape: Shape, kind: Kind, windows: tuple[Window, ...], ceil_mode: bool) -> Shape:
    average = _AVERAGES[len(windows) - 1]
    settings = (
        tuple(window.kernel for window in windows),
        tuple(window.stride for window in windows),
        tuple(window.before for window in windows),
        ceil_mode,
    )
    if kind[0] not in (torch.float32, torch.float64):  # whether torch knows it shows on values only
        least = (1,) * (len(shape) - len(windows)) + settings[0]
        average(torch.ones(least, dtype=kind[0], device=kind[1]), settings[0])
    return tuple(average(outline(shape), *settings).shape)


def _sums(x: Tensor, frame: Frame) -> Tensor:
    """The sum over each window."""
    kernel, stride, padding = frame.kernel, frame.stride, frame.padding
    if len(kernel) == 1:  # torch's own in one dimension takes no divisor
        pooled = F.avg_pool2d(
            x.unsqueeze(-2), (1, *kernel), (1, *stride), (0, *padding), True, True, 1
        )
        return pooled.squeeze(-2)
    average = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
    return average(x, kernel, stride, padding, True, True, 1)


@lru_cache(maxsize=1024)
def _counts(window: Window, outputs: Interval, length: int, include_pad: bool) -> Numbers:
    """How many values each output averages along one dimension.

    What sticks out beyond the padding, in ceil mode, is never counted.
    """
    border = window.before if include_pad else 0
    firsts = [window.first(i) for i in range(*outputs)]
    return tuple(
        min(first + window.kernel, length + border) - max(first, -border) for first in firsts
    )


class _MaxPool(DistributedPoolingBase):
    dilation: Any
    return_indices: bool

    def placeholder(self, x: Tensor) -> Any:
        return (x.clone(), x.new_empty(0, dtype=torch.int64)) if self.return_indices else x.clone()

    def global_shape(self, shape: Shape, kind: Kind) -> Shape:
        return _maximum_shape(shape, kind, self.windows(), self.ceil_mode)

    def without_copy(self, x: Tensor, plan: Windowed, windows: tuple[Window, ...]) -> Tensor | None:
        if self.return_indices:
            return None
        found = pieces.in_pieces(plan, windows, pieces.LEAST_VALUES)
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
            return _maximum(rows, frame, False)[frame.outputs]

        return found.apply(x, pool)

    def pool(self, x: Tensor, plan: Windowed, frame: Frame) -> Tensor | tuple[Tensor, Tensor]:
        x = frame.filled(x, _lowest(x.dtype))
        result = _maximum(x, frame, self.return_indices)
        if not self.return_indices:
            return result[frame.outputs]
        values, places = (each[frame.outputs] for each in result)
        return values, _global_places(places, x.shape, plan, self.num_dims)

    def _empty(self, shape: Shape, x: Tensor) -> Any:
        values = super()._empty(shape, x)
        return (values, values.detach().long()) if self.return_indices else values


@lru_cache(maxsize=1024)
def _maximum_shape(shape: Shape, kind: Kind, windows: tuple[Window, ...], ceil_mode: bool) -> Shape:
    maximum = _MAXIMA[len(windows) - 1]
    settings = (
        tuple(window.kernel for window in windows),
        tuple(window.stride for window in windows),
        tuple(window.before for window in windows),
        tuple(window.dilation for window in windows),
        ceil_mode,
    )
    if kind[0] not in (torch.float32, torch.float64):  # whether torch knows it shows on values only
        least = (1,) * (len(shape) - len(windows)) + settings[0]
        maximum(torch.ones(least, dtype=kind[0], device=kind[1]), settings[0])
    return tuple(maximum(outline(shape), *settings).shape)


def _maximum(x: Tensor, frame: Frame, indices: bool) -> Any:
    maximum: Any = _MAXIMA[len(frame.windows) - 1]
    return maximum(
        x, frame.kernel, frame.stride, frame.padding, frame.dilation, True, return_indices=indices
    )


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _global_places(places: Tensor, shape: Sequence[int], plan: Windowed, D: int) -> Tensor:
    """Places in a worker's tensor, counted row by row over D dimensions, in the whole tensor."""
    box = plan.read.box()
    assert box is not None
    result = torch.zeros_like(places)
    factor = 1
    for local, length, (start, _) in zip(
        reversed(shape[-D:]), reversed(plan.source.shape[-D:]), reversed(box[-D:]), strict=True
    ):
        result += (places % local + start) * factor
        places = places // local
        factor *= length
    return result


class DistributedAvgPool1d(_AvgPool, torch.nn.AvgPool1d):
    """The mean of each window of a tensor that is spread over `P_x`: `torch.nn.AvgPool1d`.

    Forward:  y[i] = (Σ_t x[s·i − p + t]) / n along the last dimension.
    n is the size of the window, or without padding the number of its values that exist.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        kernel_size: the size of the window.
        stride: how far apart windows are; by default the size of the window.
        padding: how far the first window begins before the tensor.
        ceil_mode: whether a last window may stick out.
        count_include_pad: whether padding counts as values of zero.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedAvgPool1d(P, 2)(torch.ones(1, 1, 4)).shape
    torch.Size([1, 1, 2])
    """

    num_dims = 1


class DistributedAvgPool2d(_AvgPool, torch.nn.AvgPool2d):
    """The mean of each window of a tensor that is spread over `P_x`: `torch.nn.AvgPool2d`.

    Forward:  y[i] = (Σ_t x[s·i − p + t]) / n along each of the last 2 dimensions.
    n is the size of the window, or without padding the number of its values that exist.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        kernel_size: the size of the window.
        stride: how far apart windows are; by default the size of the window.
        padding: how far the first window begins before the tensor.
        ceil_mode: whether a last window may stick out.
        count_include_pad: whether padding counts as values of zero.
        divisor_override: what to divide by, if not by the number of values.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedAvgPool2d(P, 2)(torch.ones(1, 1, 4, 4)).shape
    torch.Size([1, 1, 2, 2])
    """

    num_dims = 2


class DistributedAvgPool3d(_AvgPool, torch.nn.AvgPool3d):
    """The mean of each window of a tensor that is spread over `P_x`: `torch.nn.AvgPool3d`.

    Forward:  y[i] = (Σ_t x[s·i − p + t]) / n along each of the last 3 dimensions.
    n is the size of the window, or without padding the number of its values that exist.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        kernel_size: the size of the window.
        stride: how far apart windows are; by default the size of the window.
        padding: how far the first window begins before the tensor.
        ceil_mode: whether a last window may stick out.
        count_include_pad: whether padding counts as values of zero.
        divisor_override: what to divide by, if not by the number of values.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedAvgPool3d(P, 2)(torch.ones(1, 1, 4, 4, 4)).shape
    torch.Size([1, 1, 2, 2, 2])
    """

    num_dims = 3


class DistributedMaxPool1d(_MaxPool, torch.nn.MaxPool1d):
    """The largest value of each window of a tensor that is spread over `P_x`: `torch.nn.MaxPool1d`.

    Forward:  y[i] = max_t x[s·i − p + d·t] along the last dimension.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        kernel_size: the size of the window.
        stride: how far apart windows are; by default the size of the window.
        padding: how far the first window begins before the tensor.
        dilation: the distance of the values of a window.
        return_indices: whether to give the places of the largest values too, in the whole tensor.
        ceil_mode: whether a last window may stick out.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedMaxPool1d(P, 2)(torch.ones(1, 1, 4)).shape
    torch.Size([1, 1, 2])
    """

    num_dims = 1


class DistributedMaxPool2d(_MaxPool, torch.nn.MaxPool2d):
    """The largest value of each window of a tensor that is spread over `P_x`: `torch.nn.MaxPool2d`.

    Forward:  y[i] = max_t x[s·i − p + d·t] along each of the last 2 dimensions.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        kernel_size: the size of the window.
        stride: how far apart windows are; by default the size of the window.
        padding: how far the first window begins before the tensor.
        dilation: the distance of the values of a window.
        return_indices: whether to give the places of the largest values too, in the whole tensor.
        ceil_mode: whether a last window may stick out.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedMaxPool2d(P, 2)(torch.ones(1, 1, 4, 4)).shape
    torch.Size([1, 1, 2, 2])
    """

    num_dims = 2


class DistributedMaxPool3d(_MaxPool, torch.nn.MaxPool3d):
    """The largest value of each window of a tensor that is spread over `P_x`: `torch.nn.MaxPool3d`.

    Forward:  y[i] = max_t x[s·i − p + d·t] along each of the last 3 dimensions.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        kernel_size: the size of the window.
        stride: how far apart windows are; by default the size of the window.
        padding: how far the first window begins before the tensor.
        dilation: the distance of the values of a window.
        return_indices: whether to give the places of the largest values too, in the whole tensor.
        ceil_mode: whether a last window may stick out.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedMaxPool3d(P, 2)(torch.ones(1, 1, 4, 4, 4)).shape
    torch.Size([1, 1, 2, 2, 2])
    """

    num_dims = 3
