"""Convolutions over partitioned tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.boxes import Interval
from tessel.layout import Layout, Shape
from tessel.nn import strips
from tessel.nn.blocks import Weighted, WeightGrid, check_numbers
from tessel.nn.layer import Result
from tessel.nn.padding import Wrapped, wrapped
from tessel.shared import nothing
from tessel.tensor.windowed import Windowed, outline, tuple_of
from tessel.transport import kept_in_job
from tessel.windows import Groups, Mirrored, Reach, Window

Numbers = tuple[int, ...]
Widths = tuple[Interval, ...]  # how much is put before and behind each dimension
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Settings:
    """What a convolution is, but for the values of its weight."""

    weight: Shape  # (outputs, inputs of a group, *kernel)
    stride: Numbers
    dilation: Numbers
    widths: Widths
    mode: str
    groups: int

    @property
    def num_dims(self) -> int:
        return len(self.stride)

    @property
    def channels(self) -> Groups:
        return Groups(self.groups, self.weight[1] * self.groups, self.weight[0])

    def windows(self, before: Numbers) -> tuple[Window, ...]:
        each = zip(self.weight[2:], self.stride, self.dilation, before, strict=True)
        return tuple(Window(*numbers) for numbers in each)


@lru_cache(maxsize=1024)
def convolved(shape: Shape, settings: Settings) -> Shape:
    """The shape of the whole output; torch's own error if there is none."""
    x = outline(shape)
    widths = [width for pair in reversed(settings.widths) for width in pair]
    if settings.mode != "zeros" and any(width < 0 for width in widths):
        raise NotImplementedError(
            f"a negative padding, which cuts off the tensor, is not supported: "
            f"got {settings.widths}"
        )
    check_numbers(settings.weight[2:], settings.stride, settings.dilation, widths)
    if any(widths):
        x = F.pad(x, widths, "constant" if settings.mode == "zeros" else settings.mode)
    channel = len(shape) - settings.num_dims - 1
    if channel in (0, 1) and shape[channel] != settings.channels.inputs:
        raise RuntimeError(
            f"Given groups={settings.groups}, weight of size {list(settings.weight)}, expected "
            f"input{list(shape)} to have {settings.channels.inputs} channels, but got "
            f"{shape[channel]} channels instead"
        )
    convolve = _CONVOLUTIONS[settings.num_dims - 1]
    weight = outline(settings.weight)
    y = convolve(x, weight, None, settings.stride, 0, settings.dilation, settings.groups)
    return tuple(y.shape)


@dataclass(frozen=True)
class Plan:
    """How a worker comes from its part of the input to its part of the output.

    Attributes:
        wraps: first, dimensions that wrap around are continued.
        windowed: then every worker fetches what its windows read; zeros beyond the border of a
            dimension that is split come along.
        places: then dimensions that are mirrored at the border are put in this order, if any.
        padding: then torch pads the dimensions that are whole, and convolves.
    """

    wraps: tuple[Wrapped, ...]
    windowed: Windowed
    places: tuple[tuple[int, Numbers], ...]
    padding: Numbers

    def fetch(self, x: Tensor) -> Tensor:
        """What this worker convolves."""
        for wrap in self.wraps:
            x = wrap.apply(x)
        x = self.windowed.fetch(x)
        for dim, places in self.places:
            x = x.index_select(dim, torch.tensor(places, device=x.device))
        return x


@kept_in_job
def planned(source: Layout, target: Layout, channels: Groups | None, settings: Settings) -> Plan:
    """The plan for outputs in the layout `target`.

    Args:
        source: where the input lies.
        target: where the outputs are computed.
        channels: which inputs an output reads; if None, `target` says it of the inputs.
        settings: of the convolution.
    """
    D = settings.num_dims
    first = len(source.shape) - D
    split = [len(cut.intervals) > 1 for cut in target.cuts[first:]]
    wraps: list[Wrapped] = []
    padding, before, after, kept = [0] * D, [0] * D, [0] * D, [0] * D
    for d, (left, right) in enumerate(settings.widths):
        if settings.mode == "circular" and left + right > 0:
            wraps.append(wrapped(source, first + d, left, right))
            source = wraps[-1].target
        elif settings.mode in ("reflect", "replicate"):
            kept[d] = left
        elif left == right and not split[d]:
            padding[d] = kept[d] = left
        else:
            before[d], after[d] = left, right
    none = [0] * first
    source = source.embedded([*none, *before], [*none, *after])
    windows: list[Reach] = list(settings.windows(tuple(kept)))
    if settings.mode in ("reflect", "replicate"):
        lengths = source.shape[first:]
        windows = [
            Mirrored(window, length, settings.mode)  # type: ignore[arg-type]
            for window, length in zip(windows, lengths, strict=True)
        ]
    reach = (*([None] * (first - 1)), channels, *windows)
    plan = Windowed(source, target, reach)
    return Plan(tuple(wraps), plan, _places(plan), tuple(padding))


def _places(plan: Windowed) -> tuple[tuple[int, Numbers], ...]:
    """For mirrored dimensions of which this worker sees the border: in which order they come."""
    outputs, inputs = plan.target.box(), plan.read.box()
    if outputs is None or inputs is None:
        return ()
    found = []
    for dim, (reach, part, (start, stop)) in enumerate(
        zip(plan.reach, outputs, inputs, strict=True)
    ):
        if isinstance(reach, Mirrored) and part[0] < part[1]:
            places = tuple(index - start for index in reach.places(part))
            if places != tuple(range(stop - start)):
                found.append((dim, places))
    return tuple(found)


class _Convolution(Weighted):
    num_dims: int
    weight: Tensor
    bias: Tensor | None
    kernel_size: Numbers
    stride: Numbers
    padding: str | Numbers
    dilation: Numbers
    groups: int
    padding_mode: Any
    in_channels: int
    out_channels: int
    _conv_forward: Any  # torch's own

    def whole_shapes(self) -> dict[str, Shape]:
        shapes = {"weight": self.settings().weight}
        return shapes if self.bias is None else {**shapes, "bias": (self.out_channels,)}

    def settings(self) -> Settings:
        """What convolution this is, as a value."""
        inputs = self.in_channels // self.groups
        shape = (self.out_channels, inputs, *tuple_of(self.kernel_size, self.num_dims))
        return Settings(
            shape,
            tuple_of(self.stride, self.num_dims),
            tuple_of(self.dilation, self.num_dims),
            self._widths(),
            self.padding_mode,
            self.groups,
        )

    def _widths(self) -> Widths:
        if self.padding == "valid":
            return ((0, 0),) * self.num_dims
        if self.padding == "same":
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return tuple((total // 2, total - total // 2) for total in totals)
        return tuple((p, p) for p in tuple_of(self.padding, self.num_dims))

    def compute(self, x: Tensor, layout: Layout) -> Result:
        self.check_dtype(x)
        settings = self.settings()
        shape = convolved(layout.shape, settings)
        grid = self.weight_grid(len(shape))
        target = layout.resized(shape) if grid is None else grid.split(shape, grid.out)
        weight, bias = self.use_parameters(layout)
        assert weight is not None
        channel = len(shape) - self.num_dims - 1
        if grid is None and _is_whole(layout, channel) and layout.cuts[0] == target.cuts[0]:
            if layout.partition.active:
                return self.onto_P_y(self._conv_forward(x, weight, bias), target)
            return self.onto_P_y(nothing((0,), x, weight, bias), target)
        if grid is None:
            y = self._by_strips(x, layout, target, weight, bias, settings)
            if y is not None:
                return self.onto_P_y(y, target)
        if grid is None or self.groups > 1:
            plan = planned(layout, target, settings.channels, settings)
        else:
            inputs = (*shape[:channel], layout.shape[channel], *shape[channel + 1 :])
            plan = planned(layout, grid.split(inputs, grid.into), None, settings)
        y = plan.fetch(x)
        if target.partition.active:
            y = self._convolve(y, weight, bias, plan, target)
        else:
            y = nothing((0,), y, weight, bias)
        return self.onto_P_y(y, target)

    def _by_strips(
        self,
        x: Tensor,
        layout: Layout,
        target: Layout,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
    ) -> Tensor | None:
        """This worker's outputs without a copy of its inputs, if that is possible and quicker."""
        widths = settings.widths
        if settings.mode != "zeros" or any(before != after for before, after in widths):
            return None
        windows = settings.windows(tuple(before for before, _ in widths))
        least = strips.LEAST_VALUES and max(
            strips.LEAST_VALUES, strips.LEAST_RATIO * prod(settings.weight)
        )
        plan = strips.stripped(layout, target, windows, least, strips.LARGEST_SHARE)
        if plan is None:
            return None
        convolve = _CONVOLUTIONS[self.num_dims - 1]

        def of_part(part: Tensor, padding: Numbers) -> Tensor:
            return convolve(part, weight, bias, self.stride, padding, self.dilation, self.groups)

        def of_strip(strip: Tensor, padding: Numbers, dim: int, taps: Interval) -> Tensor:
            some = weight.narrow(dim, taps[0], taps[1] - taps[0])
            if self.num_dims > 1 and strip.shape[dim] == some.shape[dim] == 1:
                return self._convolve_flat(strip, some, padding, dim)
            return convolve(strip, some, None, self.stride, padding, self.dilation, self.groups)

        return plan.apply(x, of_part, of_strip)

    def _convolve_flat(self, x: Tensor, weight: Tensor, padding: Numbers, dim: int) -> Tensor:
        """The convolution of one layer with one: quicker with a dimension less."""
        place = self.num_dims + dim
        stride, padding, dilation = (
            (*each[:place], *each[place + 1 :]) for each in (self.stride, padding, self.dilation)
        )
        convolve = _CONVOLUTIONS[self.num_dims - 2]
        x, weight = x.squeeze(dim), weight.squeeze(dim)
        return convolve(x, weight, None, stride, padding, dilation, self.groups).unsqueeze(dim)

    def _convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, target: Layout
    ) -> Tensor:
        """This worker's outputs: those of whole groups of channels, and of these its own."""
        if 0 in target.local_shape or 0 in x.shape:
            return _only_bias(target.local_shape, self.num_dims, x, weight, bias)
        box = target.box()
        assert box is not None
        channels, own = self.settings().channels, box[-self.num_dims - 1]
        first, stop = channels.touched(own)
        origin = own[0] if self.P_w is not None else first * channels.size
        if self.P_w is None and stop - first < channels.groups:
            rows = slice(origin, stop * channels.size)
            weight, bias = weight[rows], None if bias is None else bias[rows]
        convolve = _CONVOLUTIONS[self.num_dims - 1]
        y = convolve(x, weight, bias, self.stride, plan.padding, self.dilation, stop - first)
        length = own[1] - own[0]
        channel = -self.num_dims - 1
        return y if y.shape[channel] == length else y.narrow(channel, own[0] - origin, length)

    def check_grid(self, grid: WeightGrid) -> None:
        """Blocks of the weight must hold whole groups of outputs, and all of their inputs."""
        if self.groups == 1:
            return
        size = self.out_channels // self.groups
        parts = grid.weight((self.out_channels,), (grid.out,)).cuts[0].intervals
        split = grid.partition.shape[grid.into] > 1
        if split or any(start % size or stop % size for start, stop in parts):
            raise NotImplementedError(
                f"a grouped convolution on {grid.partition} needs whole groups in each block of "
                f"its weight: {self.groups} groups of {size} outputs lie in parts {parts}, and "
                f"inputs on {grid.partition.shape[grid.into]} workers; leave P_w out"
            )


def _is_whole(layout: Layout, first: int) -> bool:
    """Whether no dimension from `first` on is split."""
    return all(len(cut.intervals) == 1 for cut in layout.cuts[first:])


def _only_bias(shape: Shape, num_dims: int, *inputs: Tensor | None) -> Tensor:
    """Outputs that read no inputs."""
    bias = inputs[-1]
    y = nothing(shape, *inputs)
    return y if bias is None or 0 in shape else y + bias.reshape(-1, *[1] * num_dims)


class DistributedConv1d(_Convolution, torch.nn.Conv1d):
    """The convolution of a tensor that is spread over `P_x`: `torch.nn.Conv1d`.

    Forward:  y[o, i] = b[o] + Σ_c Σ_t w[o, c, t] x[c, s·i − p + d·t].

    Batch, channels and space may be split, in any mixture. Each worker fetches what its outputs
    read and computes them; parameters are whole on all workers. With `P_w`, a grid of (outputs,
    inputs, *space) or (batch, outputs, inputs, *space), each of its workers stores one block of
    the weight, and results are summed over the inputs.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        in_channels: of the whole input.
        out_channels: of the whole output.
        kernel_size: the size of the window.
        stride: how far apart windows are.
        padding: how far the first window begins before the tensor; "same" or "valid".
        dilation: the distance of the values of a window.
        groups: how many groups of channels are convolved on their own.
        bias: whether to add one.
        padding_mode: "zeros", "reflect", "replicate" or "circular", around the whole tensor.
        device: of the parameters.
        dtype: of the parameters.
        P_y: where the result shall lie, by default on `P_x`.
        P_w: where the blocks of the weight lie, if it is not whole on all workers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> layer = tessel.nn.DistributedConv1d(P, 3, 2, kernel_size=3, padding=1)
    >>> layer(torch.ones(1, 3, 4)).shape
    torch.Size([1, 2, 4])
    """

    num_dims = 1


class DistributedConv2d(_Convolution, torch.nn.Conv2d):
    """The convolution of a tensor that is spread over `P_x`: `torch.nn.Conv2d`.

    Forward:  y[o, i] = b[o] + Σ_c Σ_t w[o, c, t] x[c, s·i − p + d·t].

    Batch, channels and space may be split, in any mixture. Each worker fetches what its outputs
    read and computes them; parameters are whole on all workers. With `P_w`, a grid of (outputs,
    inputs, *space) or (batch, outputs, inputs, *space), each of its workers stores one block of
    the weight, and results are summed over the inputs.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        in_channels: of the whole input.
        out_channels: of the whole output.
        kernel_size: the size of the window.
        stride: how far apart windows are.
        padding: how far the first window begins before the tensor; "same" or "valid".
        dilation: the distance of the values of a window.
        groups: how many groups of channels are convolved on their own.
        bias: whether to add one.
        padding_mode: "zeros", "reflect", "replicate" or "circular", around the whole tensor.
        device: of the parameters.
        dtype: of the parameters.
        P_y: where the result shall lie, by default on `P_x`.
        P_w: where the blocks of the weight lie, if it is not whole on all workers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> layer = tessel.nn.DistributedConv2d(P, 3, 2, kernel_size=3, padding=1)
    >>> layer(torch.ones(1, 3, 4, 4)).shape
    torch.Size([1, 2, 4, 4])
    """

    num_dims = 2


class DistributedConv3d(_Convolution, torch.nn.Conv3d):
    """The convolution of a tensor that is spread over `P_x`: `torch.nn.Conv3d`.

    Forward:  y[o, i] = b[o] + Σ_c Σ_t w[o, c, t] x[c, s·i − p + d·t].

    Batch, channels and space may be split, in any mixture. Each worker fetches what its outputs
    read and computes them; parameters are whole on all workers. With `P_w`, a grid of (outputs,
    inputs, *space) or (batch, outputs, inputs, *space), each of its workers stores one block of
    the weight, and results are summed over the inputs.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        in_channels: of the whole input.
        out_channels: of the whole output.
        kernel_size: the size of the window.
        stride: how far apart windows are.
        padding: how far the first window begins before the tensor; "same" or "valid".
        dilation: the distance of the values of a window.
        groups: how many groups of channels are convolved on their own.
        bias: whether to add one.
        padding_mode: "zeros", "reflect", "replicate" or "circular", around the whole tensor.
        device: of the parameters.
        dtype: of the parameters.
        P_y: where the result shall lie, by default on `P_x`.
        P_w: where the blocks of the weight lie, if it is not whole on all workers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> layer = tessel.nn.DistributedConv3d(P, 3, 2, kernel_size=3, padding=1)
    >>> layer(torch.ones(1, 3, 4, 4, 4)).shape
    torch.Size([1, 2, 4, 4, 4])
    """

    num_dims = 3
