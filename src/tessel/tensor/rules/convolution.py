"""Convolutions: each worker fetches what its outputs read, and torch convolves that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.boxes import Interval
from tessel.core.layout import Layout, Shape
from tessel.core.shared import anchored_zeros, used
from tessel.core.windows import Groups, Mirrored, ReceptiveField, Window
from tessel.tensor import overlapped_convolution
from tessel.tensor.padding import PeriodicHalo, periodic_halo
from tessel.tensor.rules.products import Contraction, bias_of, check_dtypes, operand
from tessel.tensor.rules.spread_weights import convolve_with
from tessel.tensor.table import Arguments, Settings, rule
from tessel.tensor.windowed import Windowed, outline, tuple_of
from tessel.transport import kept_in_job

Numbers = tuple[int, ...]
Widths = tuple[Interval, ...]  # how much is put before and behind each dimension
_CONVOLUTIONS: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)


@rule("conv1d", "conv2d", "conv3d")
def convolve(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`torch.nn.functional.conv*`: with a weight in blocks where they lie, else with all of it."""
    given = dict(zip(_ARGUMENTS, args[1:], strict=False)) | kwargs
    layout = args[0]._layout
    weight, bias = given.pop("weight"), given.pop("bias", None)
    settings = settings_of(
        tuple(weight.shape), **{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    )
    shape = convolved(layout.shape, settings)
    return convolve_with(weight, bias, args[0], shape, convolve_parts, settings)


_ARGUMENTS = ("weight", "bias", "stride", "padding", "dilation", "groups")


def check_numbers(
    kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], padding: Sequence[int]
) -> None:
    """Raise for settings that torch rejects only where there are values to convolve."""
    for what, numbers, least in (
        ("padding", padding, 0),
        ("stride", stride, 1),
        ("dilation", dilation, 1),
        ("kernel_size", kernel, 1),
    ):
        if any(number < least for number in numbers):
            raise RuntimeError(
                f"a {what} of at least {least} is needed along each dimension, got {tuple(numbers)}"
            )


@dataclass(frozen=True)
class ConvolutionSettings:
    """What a convolution is, but for the values of its weight."""

    weight: Shape  # (outputs, inputs of a group, *kernel)
    stride: Numbers
    dilation: Numbers
    widths: Widths
    mode: str
    groups: int

    @cached_property
    def num_dims(self) -> int:
        return len(self.stride)

    @cached_property
    def channels(self) -> Groups:
        return Groups(self.groups, self.weight[1] * self.groups, self.weight[0])

    def windows(self, before: Numbers) -> tuple[Window, ...]:
        each = zip(self.weight[2:], self.stride, self.dilation, before, strict=True)
        return tuple(Window(*numbers) for numbers in each)


@lru_cache(maxsize=1024)
def settings_of(
    weight: Shape,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    mode: str = "zeros",
) -> ConvolutionSettings:
    """The settings that torch's arguments say, for a weight of this shape."""
    D = len(weight) - 2
    dilations = tuple_of(dilation, D)
    if padding == "valid":
        widths: Widths = ((0, 0),) * D
    elif padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, weight[2:], strict=True)]
        widths = tuple((total // 2, total - total // 2) for total in totals)
    else:
        widths = tuple((p, p) for p in tuple_of(padding, D))
    return ConvolutionSettings(weight, tuple_of(stride, D), dilations, widths, mode, groups)


@lru_cache(maxsize=1024)
def convolved(shape: Shape, settings: ConvolutionSettings) -> Shape:
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
class ConvolutionPlan:
    """How a worker comes from its part of the input to its part of the output.

    Attributes:
        wraps: first, dimensions that wrap around are continued.
        windowed: then every worker fetches what its windows read; zeros beyond the border of a
            dimension that is split come along. Dimensions that are mirrored are put in order.
        padding: then torch pads the dimensions that are whole, and convolves.
    """

    wraps: tuple[PeriodicHalo, ...]
    windowed: Windowed
    padding: Numbers

    def fetch(self, x: Tensor) -> Tensor:
        """What this worker convolves."""
        for wrap in self.wraps:
            x = wrap.apply(x)
        return self.windowed.in_order(self.windowed.fetch(x))


@kept_in_job
def planned(
    source: Layout, target: Layout, channels: Groups | None, settings: ConvolutionSettings
) -> ConvolutionPlan:
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
    wraps: list[PeriodicHalo] = []
    padding, before, after, kept = [0] * D, [0] * D, [0] * D, [0] * D
    for d, (left, right) in enumerate(settings.widths):
        if settings.mode == "circular" and left + right > 0:
            wraps.append(periodic_halo(source, first + d, left, right))
            source = wraps[-1].codomain
        elif settings.mode in ("reflect", "replicate"):
            kept[d] = left
        elif left == right and not split[d]:
            padding[d] = kept[d] = left
        else:
            before[d], after[d] = left, right
    none = [0] * first
    source = source.embedded([*none, *before], [*none, *after])
    windows: list[ReceptiveField] = list(settings.windows(tuple(kept)))
    if settings.mode in ("reflect", "replicate"):
        lengths = source.shape[first:]
        windows = [
            Mirrored(window, length, settings.mode)  # type: ignore[arg-type]
            for window, length in zip(windows, lengths, strict=True)
        ]
    field = (*([None] * (first - 1)), channels, *windows)
    return ConvolutionPlan(tuple(wraps), Windowed(source, target, field), tuple(padding))


def convolve_parts(
    x: Tensor,
    layout: Layout,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvolutionSettings,
    plan: Contraction | None = None,
) -> tuple[Tensor, Layout]:
    """This worker's part of the result, and its layout.

    Args:
        x: this worker's part of the input.
        layout: of the input.
        weight: whole on all workers of the layout; with a plan, spread or plain.
        bias: the same.
        settings: of the convolution.
        plan: where blocks of the weight are convolved with, if they are; the result is `plan.terms`
            then, separate terms of a sum where inputs are split.
    """
    check_dtypes(x, weight, bias)
    if plan is not None:
        return _in_blocks(x, layout, weight, bias, settings, plan), plan.terms
    # numbers that tests change: what is kept of a layout must follow them
    strips = overlapped_convolution
    way = _way(layout, settings, strips.LEAST_VALUES, strips.LEAST_RATIO, strips.LARGEST_SHARE)
    target, reads = way.target, way.reads
    weight, bias = used(weight, layout), used(bias, layout)
    if layout.is_outside:
        return anchored_zeros((0,), x, weight, bias), target
    if reads is None:
        widths, padding = settings.widths, tuple(before for before, _ in settings.widths)
        if settings.mode != "zeros" or any(before != after for before, after in widths):
            mode = "constant" if settings.mode == "zeros" else settings.mode
            x = F.pad(x, [width for pair in reversed(widths) for width in pair], mode)
            padding = (0,) * len(widths)
        return _convolved(x, weight, bias, padding, settings), target
    if way.strips is not None:
        return _by_strips(x, way.strips, weight, bias, settings), target
    return of_read(reads.fetch(x), weight, bias, reads.padding, target, settings), target


@dataclass(frozen=True)
class _Way:
    """How a convolution with a weight that all workers have is computed.

    Attributes:
        target: how the result lies.
        reads: how workers come by what they read; None if each has all samples of its own whole.
        strips: how they compute without a copy of their inputs, if that is possible and quicker.
    """

    target: Layout
    reads: ConvolutionPlan | None
    strips: overlapped_convolution.Stripped | None


@kept_in_job
def _way(
    layout: Layout,
    settings: ConvolutionSettings,
    least_values: int,
    least_ratio: int,
    largest_share: float,
) -> _Way:
    shape = convolved(layout.shape, settings)
    target = layout.resized(shape)
    channel = len(shape) - settings.num_dims - 1
    only_batch = not any(map(layout.is_split, range(channel, len(shape))))
    if layout.is_outside or (only_batch and layout.cuts[0] == target.cuts[0]):
        return _Way(target, None, None)
    strips = None
    if settings.mode == "zeros" and all(before == after for before, after in settings.widths):
        windows = settings.windows(tuple(before for before, _ in settings.widths))
        least = least_values and max(least_values, least_ratio * prod(settings.weight))
        strips = overlapped_convolution.stripped(layout, target, windows, least, largest_share)
    return _Way(target, planned(layout, target, settings.channels, settings), strips)


def _in_blocks(
    x: Tensor,
    layout: Layout,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvolutionSettings,
    plan: Contraction,
) -> Tensor:
    """This worker's part of the result, or a term of the sum that it is, by its block."""
    own = operand(weight, plan.inputs[1])
    added = None if bias is None else bias_of(bias, plan.terms, -settings.num_dims - 1)
    if settings.groups > 1:
        reads = planned(layout, plan.terms, settings.channels, settings)
    else:
        reads = planned(layout, plan.inputs[0], None, settings)
    part = reads.fetch(x)
    if plan.terms.is_outside:
        return anchored_zeros((0,), part, own, added)
    return of_read(part, own, added, reads.padding, plan.terms, settings, in_blocks=True)


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Numbers,
    settings: ConvolutionSettings,
    groups: int | None = None,
) -> Tensor:
    y: Tensor = _CONVOLUTIONS[settings.num_dims - 1](
        x,
        weight,
        bias,
        settings.stride,
        padding,
        settings.dilation,
        settings.groups if groups is None else groups,
    )
    return y


def _by_strips(
    x: Tensor,
    plan: overlapped_convolution.Stripped,
    weight: Tensor,
    bias: Tensor | None,
    settings: ConvolutionSettings,
) -> Tensor:
    """This worker's outputs without a copy of its inputs."""

    def of_part(part: Tensor, padding: Numbers) -> Tensor:
        return _convolved(part, weight, bias, padding, settings)

    def of_strip(strip: Tensor, padding: Numbers, dim: int, taps: Interval) -> Tensor:
        some = weight.narrow(dim, taps[0], taps[1] - taps[0])
        if settings.num_dims > 1 and strip.shape[dim] == some.shape[dim] == 1:
            return _convolve_flat(strip, some, padding, dim, settings)
        return _convolved(strip, some, None, padding, settings)

    return plan.apply(x, of_part, of_strip)


def _convolve_flat(
    x: Tensor, weight: Tensor, padding: Numbers, dim: int, settings: ConvolutionSettings
) -> Tensor:
    """The convolution of one layer with one: quicker with a dimension less."""
    place = settings.num_dims + dim
    stride, padding, dilation = (
        (*each[:place], *each[place + 1 :])
        for each in (settings.stride, padding, settings.dilation)
    )
    convolve = _CONVOLUTIONS[settings.num_dims - 2]
    flat = x.squeeze(dim), weight.squeeze(dim)
    y: Tensor = convolve(*flat, None, stride, padding, dilation, settings.groups)
    return y.unsqueeze(dim)


def of_read(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Numbers,
    target: Layout,
    settings: ConvolutionSettings,
    in_blocks: bool = False,
) -> Tensor:
    """This worker's outputs from exactly what they read: those of whole groups, of these its own.

    Args:
        x: what the outputs read.
        weight: whole, or the block of this worker's outputs and inputs.
        bias: the same.
        padding: zeros around `x`.
        target: how the outputs lie.
        settings: of the convolution.
        in_blocks: whether the parameters are blocks.
    """
    D = settings.num_dims
    if 0 in target.local_shape or 0 in x.shape:  # outputs that read no inputs
        y = anchored_zeros(target.local_shape, x, weight, bias)
        return y if bias is None or 0 in y.shape else y + bias.reshape(-1, *[1] * D)
    own = _own_channels(target, settings)
    if not in_blocks and own.groups < settings.groups:
        weight, bias = weight[own.rows], None if bias is None else bias[own.rows]
    y = _convolved(x, weight, bias, padding, settings, own.groups)
    if y.shape[-D - 1] == own.length:
        return y
    return y.narrow(-D - 1, own.start - own.rows.start, own.length)


class _Channels(NamedTuple):
    """The channels of a worker's outputs.

    Attributes:
        start: the first.
        length: how many there are.
        groups: how many groups they touch.
        rows: all channels of these groups.
    """

    start: int
    length: int
    groups: int
    rows: slice


@kept_in_job
def _own_channels(target: Layout, settings: ConvolutionSettings) -> _Channels:
    box = target.box()
    assert box is not None
    start, stop = box[-settings.num_dims - 1]
    size = settings.channels.size
    first, last = settings.channels.touched((start, stop))
    return _Channels(start, stop - start, last - first, slice(first * size, last * size))
