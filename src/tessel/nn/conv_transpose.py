"""Transposed convolutions: the adjoints of convolutions, over partitioned tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.boxes import Interval
from tessel.layout import Layout, Shape
from tessel.nn.blocks import Weighted, WeightGrid, check_numbers
from tessel.nn.layer import Result
from tessel.shared import nothing
from tessel.tensor.windowed import Windowed, outline, tuple_of
from tessel.transport import kept_in_job
from tessel.windows import Groups, TransposedWindow

Numbers = tuple[int, ...]
_CONVOLUTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclass(frozen=True)
class Settings:
    """What a transposed convolution is, but for the values of its weight."""

    weight: Shape  # (inputs, outputs of a group, *kernel)
    stride: Numbers
    padding: Numbers
    output_padding: Numbers
    dilation: Numbers
    groups: int

    @property
    def num_dims(self) -> int:
        return len(self.stride)

    @property
    def channels(self) -> Groups:
        return Groups(self.groups, self.weight[0], self.weight[1] * self.groups)

    def windows(self) -> tuple[TransposedWindow, ...]:
        each = zip(self.weight[2:], self.stride, self.dilation, self.padding, strict=True)
        return tuple(TransposedWindow(*numbers) for numbers in each)


@lru_cache(maxsize=1024)
def convolved(shape: Shape, settings: Settings) -> Shape:
    """The shape of the whole output; torch's own error if there is none."""
    check_numbers(settings.weight[2:], settings.stride, settings.dilation, settings.padding)
    limits = [max(pair) for pair in zip(settings.stride, settings.dilation, strict=True)]
    if any(not 0 <= n < m for n, m in zip(settings.output_padding, limits, strict=True)):
        raise RuntimeError(
            f"output padding must be smaller than either stride or dilation, and not negative: got "
            f"{settings.output_padding} for {settings.stride} and {settings.dilation}"
        )
    channel = len(shape) - settings.num_dims - 1
    if channel in (0, 1) and shape[channel] != settings.weight[0]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(settings.weight)}, expected input"
            f"{list(shape)} to have {settings.weight[0]} channels, but got {shape[channel]} "
            f"channels instead"
        )
    return tuple(_as_torch(outline(shape), outline(settings.weight), None, settings).shape)


@kept_in_job
def planned(
    source: Layout, target: Layout, channels: Groups | None, settings: Settings
) -> Windowed:
    """Each worker reads the inputs that are written to its outputs."""
    lead = [None] * (len(source.shape) - settings.num_dims - 1)
    return Windowed(source, target, (*lead, channels, *settings.windows()))


class _ConvTranspose(Weighted):
    num_dims: int
    outputs_first = False
    weight: Tensor
    bias: Tensor | None
    kernel_size: Any
    stride: Any
    padding: Any
    output_padding: Any
    dilation: Any
    groups: int
    in_channels: int
    out_channels: int
    _output_padding: Any  # torch's own

    def whole_shapes(self) -> dict[str, Shape]:
        shapes = {"weight": self.settings().weight}
        return shapes if self.bias is None else {**shapes, "bias": (self.out_channels,)}

    def settings(self, output_padding: Numbers | None = None) -> Settings:
        """What this is, as a value."""
        D = self.num_dims
        shape = (self.in_channels, self.out_channels // self.groups, *tuple_of(self.kernel_size, D))
        widths = self.output_padding if output_padding is None else output_padding
        stride, padding, behind, dilation = (
            tuple_of(value, D) for value in (self.stride, self.padding, widths, self.dilation)
        )
        return Settings(shape, stride, padding, behind, dilation, self.groups)

    def compute(self, x: Tensor, layout: Layout, output_size: Any = None) -> Result:
        """The result; `output_size` is that of the whole tensor, as torch takes it."""
        self.check_dtype(x)
        settings = self.settings(self._widths(layout, output_size))
        shape = convolved(layout.shape, settings)
        grid = self.weight_grid(len(shape))
        target = layout.resized(shape) if grid is None else grid.split(shape, grid.out)
        weight, bias = self.use_parameters(layout)
        if grid is None and target.local_shape == shape and layout.local_shape == layout.shape:
            return self.onto_P_y(_as_torch(x, weight, bias, settings), target)
        plan = self._plan(layout, target, grid, settings)
        y = plan.fetch(x)
        if target.partition.active:
            y = self._convolve(y, weight, bias, plan, target, settings)
        else:
            y = nothing((0,), y, weight, bias)
        return self.onto_P_y(y, target)

    def _widths(self, layout: Layout, output_size: Any = None) -> Numbers:
        """How much longer than least the output is, which torch computes from `output_size`."""
        D = self.num_dims
        sizes = None if output_size is None else list(output_size)
        settings = (list(tuple_of(v, D)) for v in (self.stride, self.padding, self.kernel_size))
        dilation = list(tuple_of(self.dilation, D))
        return tuple(self._output_padding(outline(layout.shape), sizes, *settings, D, dilation))

    def _plan(
        self, layout: Layout, target: Layout, grid: WeightGrid | None, settings: Settings
    ) -> Windowed:
        if grid is None or self.groups > 1:
            return planned(layout, target, settings.channels, settings)
        channel = len(target.shape) - self.num_dims - 1
        inputs = (*target.shape[:channel], layout.shape[channel], *target.shape[channel + 1 :])
        return planned(layout, grid.split(inputs, grid.into), None, settings)

    def _convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Windowed,
        target: Layout,
        settings: Settings,
    ) -> Tensor:
        """This worker's outputs, cut out of all that its inputs are written to."""
        box = target.box()
        assert box is not None
        own = box[-self.num_dims - 1]
        if 0 in target.local_shape or 0 in x.shape:
            y = nothing(target.local_shape, x, weight, bias)
        else:
            y = self._own_channels(_trimmed(x, weight, plan, target, settings, own), own)
        if bias is None or 0 in y.shape:
            return y
        bias = bias if self.P_w is not None else bias[slice(*own)]
        return y + bias.reshape(-1, *[1] * self.num_dims)

    def _own_channels(self, y: Tensor, own: Interval) -> Tensor:
        channel, length = -self.num_dims - 1, own[1] - own[0]
        if y.shape[channel] == length:
            return y
        size = self.out_channels // self.groups
        return y.narrow(channel, own[0] % size, length)

    def check_grid(self, grid: WeightGrid) -> None:
        if self.groups > 1:
            raise NotImplementedError(
                f"a transposed convolution with {self.groups} groups has no weight grid; "
                f"leave P_w out, got {grid.partition}"
            )


def _as_torch(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    convolve = _CONVOLUTIONS[settings.num_dims - 1]
    return convolve(
        x,
        weight,
        bias,
        settings.stride,
        settings.padding,
        settings.output_padding,
        settings.groups,
        settings.dilation,
    )


def _trimmed(
    x: Tensor, weight: Tensor, plan: Windowed, target: Layout, settings: Settings, own: Interval
) -> Tensor:
    """The outputs of all groups that `own` channels touch, of this worker's box of space."""
    D = settings.num_dims
    box, inputs = target.box(), plan.read.box()
    assert box is not None and inputs is not None
    channels = settings.channels
    first, stop = channels.touched(own)
    if plan.reach[-D - 1] is not None and stop - first < channels.groups:
        size = settings.weight[0] // channels.groups
        weight = weight[first * size : stop * size]
    sides = zip(settings.windows(), inputs[-D:], box[-D:], strict=True)
    trims = [_trim(window, read, part) for window, read, part in sides]
    padding = tuple(trim.padding for trim in trims)
    behind = tuple(trim.behind for trim in trims)
    convolve = _CONVOLUTIONS[D - 1]
    y = convolve(x, weight, None, settings.stride, padding, behind, stop - first, settings.dilation)
    if not any(trim.rest != (0, 0) for trim in trims):
        return y
    return F.pad(y, [width for trim in reversed(trims) for width in trim.rest])


@dataclass(frozen=True)
class _Trim:
    """How much torch takes away on both sides and adds behind, and what then remains to add."""

    padding: int
    behind: int
    rest: Interval


def _trim(window: TransposedWindow, read: Interval, outputs: Interval) -> _Trim:
    written = window.writes(read)
    before, after = outputs[0] - written[0], written[1] - outputs[1]
    if before >= after and 0 <= before < after + window.stride:
        return _Trim(before, before - after, (0, 0))
    padding = max(0, min(before, after))
    return _Trim(padding, 0, (padding - before, padding - after))


class DistributedConvTranspose1d(_ConvTranspose, torch.nn.ConvTranspose1d):
    """The transposed convolution of a tensor over `P_x`: `torch.nn.ConvTranspose1d`.

    Forward:  y[o, j] = b[o] + Σ w[c, o, t] x[c, i] over all c, i, t with s·i − p + d·t = j.

    Batch, channels and space may be split, in any mixture. `P_w` is a grid of workers that store
    blocks of the weight, as for a convolution: (outputs, inputs, *space), or batch before them.
    The layer may be called with an `output_size`, as torch's, which is that of the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        in_channels: of the whole input.
        out_channels: of the whole output.
        kernel_size: the size of the window.
        stride: how far apart windows are.
        padding: how much is cut off on both sides.
        output_padding: how much longer the output is behind.
        groups: how many groups of channels are convolved on their own.
        bias: whether to add one.
        dilation: the distance of the values of a window.
        padding_mode: "zeros".
        device: of the parameters.
        dtype: of the parameters.
        P_y: where the result shall lie, by default on `P_x`.
        P_w: where the blocks of the weight lie, if it is not whole on all workers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> layer = tessel.nn.DistributedConvTranspose1d(P, 3, 2, kernel_size=2, stride=2)
    >>> layer(torch.ones(1, 3, 4)).shape
    torch.Size([1, 2, 8])
    """

    num_dims = 1


class DistributedConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d):
    """The transposed convolution of a tensor over `P_x`: `torch.nn.ConvTranspose2d`.

    Forward:  y[o, j] = b[o] + Σ w[c, o, t] x[c, i] over all c, i, t with s·i − p + d·t = j.

    Batch, channels and space may be split, in any mixture. `P_w` is a grid of workers that store
    blocks of the weight, as for a convolution: (outputs, inputs, *space), or batch before them.
    The layer may be called with an `output_size`, as torch's, which is that of the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        in_channels: of the whole input.
        out_channels: of the whole output.
        kernel_size: the size of the window.
        stride: how far apart windows are.
        padding: how much is cut off on both sides.
        output_padding: how much longer the output is behind.
        groups: how many groups of channels are convolved on their own.
        bias: whether to add one.
        dilation: the distance of the values of a window.
        padding_mode: "zeros".
        device: of the parameters.
        dtype: of the parameters.
        P_y: where the result shall lie, by default on `P_x`.
        P_w: where the blocks of the weight lie, if it is not whole on all workers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> layer = tessel.nn.DistributedConvTranspose2d(P, 3, 2, kernel_size=2, stride=2)
    >>> layer(torch.ones(1, 3, 4, 4)).shape
    torch.Size([1, 2, 8, 8])
    """

    num_dims = 2


class DistributedConvTranspose3d(_ConvTranspose, torch.nn.ConvTranspose3d):
    """The transposed convolution of a tensor over `P_x`: `torch.nn.ConvTranspose3d`.

    Forward:  y[o, j] = b[o] + Σ w[c, o, t] x[c, i] over all c, i, t with s·i − p + d·t = j.

    Batch, channels and space may be split, in any mixture. `P_w` is a grid of workers that store
    blocks of the weight, as for a convolution: (outputs, inputs, *space), or batch before them.
    The layer may be called with an `output_size`, as torch's, which is that of the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        in_channels: of the whole input.
        out_channels: of the whole output.
        kernel_size: the size of the window.
        stride: how far apart windows are.
        padding: how much is cut off on both sides.
        output_padding: how much longer the output is behind.
        groups: how many groups of channels are convolved on their own.
        bias: whether to add one.
        dilation: the distance of the values of a window.
        padding_mode: "zeros".
        device: of the parameters.
        dtype: of the parameters.
        P_y: where the result shall lie, by default on `P_x`.
        P_w: where the blocks of the weight lie, if it is not whole on all workers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> layer = tessel.nn.DistributedConvTranspose3d(P, 3, 2, kernel_size=2, stride=2)
    >>> layer(torch.ones(1, 3, 4, 4, 4)).shape
    torch.Size([1, 2, 8, 8, 8])
    """

    num_dims = 3
