"""Transposed convolutions: the adjoints of convolutions.

Each worker fetches the inputs that contribute to its outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.boxes import Interval
from tessel.core.layout import Layout, Shape
from tessel.core.shared import anchored_zeros, used
from tessel.core.windows import Groups, TransposedWindow
from tessel.tensor.rules.convolution import check_numbers, convolve_with
from tessel.tensor.rules.products import Contraction, bias_of, operand
from tessel.tensor.table import Arguments, Settings, as_autocast, check_dtypes, rule
from tessel.tensor.windowed import Numbers, Windowed, hashable, outline, tuple_of
from tessel.transport import kept_in_job

_CONVOLUTIONS: tuple[Any, ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolve(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`torch.nn.functional.conv_transpose*`, with blocks of a weight or with all of it."""
    given = dict(zip(_ARGUMENTS, args[1:], strict=False)) | kwargs
    layout = args[0]._layout
    weight, bias = given.pop("weight"), given.pop("bias", None)
    sizes = {key: hashable(value) for key, value in given.items()}
    settings = settings_of(tuple(weight.shape), **sizes)
    shape = convolved(layout.shape, settings)
    return convolve_with(
        weight, bias, args[0], shape, convolve_parts, settings, outputs_first=False
    )


_ARGUMENTS = ("weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


@dataclass(frozen=True)
class TransposedSettings:
    """The arguments of a transposed convolution except the values of its weight."""

    weight: Shape  # (inputs, outputs of a group, *kernel)
    stride: Numbers
    padding: Numbers
    output_padding: Numbers
    dilation: Numbers
    groups: int

    @cached_property
    def num_dims(self) -> int:
        return len(self.stride)

    @cached_property
    def channels(self) -> Groups:
        return Groups(self.groups, self.weight[0], self.weight[1] * self.groups)

    def windows(self) -> tuple[TransposedWindow, ...]:
        each = zip(self.weight[2:], self.stride, self.dilation, self.padding, strict=True)
        return tuple(TransposedWindow(*numbers) for numbers in each)


@lru_cache(maxsize=1024)
def settings_of(
    weight: Shape,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> TransposedSettings:
    """The settings by torch's arguments, for a weight of this shape."""
    D = len(weight) - 2
    steps, widths, behind, dilations = (
        tuple_of(value, D) for value in (stride, padding, output_padding, dilation)
    )
    return TransposedSettings(weight, steps, widths, behind, dilations, groups)


@lru_cache(maxsize=1024)
def convolved(shape: Shape, settings: TransposedSettings) -> Shape:
    """The shape of the whole output; raises torch's own errors."""
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
    result = tuple(_as_torch(outline(shape), outline(settings.weight), None, settings).shape)
    if 0 in result[channel + 1 :] and 0 not in shape:  # torch says so of values alone
        sizes = (" x ".join(map(str, each[channel + 1 :])) for each in (shape, result))
        raise RuntimeError(
            "Given input size per channel: ({}). Calculated output size per channel: ({}). Output "
            "size is too small".format(*sizes)
        )
    return result


@kept_in_job
def planned(
    source: Layout, target: Layout, channels: Groups | None, settings: TransposedSettings
) -> Windowed:
    """The plan by which each worker reads the inputs that contribute to its outputs."""
    lead = [None] * (len(source.shape) - settings.num_dims - 1)
    return Windowed(source, target, (*lead, channels, *settings.windows()))


def convolve_parts(
    x: Tensor,
    layout: Layout,
    weight: Tensor,
    bias: Tensor | None,
    settings: TransposedSettings,
    plan: Contraction | None = None,
) -> tuple[Tensor, Layout]:
    """This worker's part of the result, and its layout: see `rules.convolution.convolve_parts`."""
    check_dtypes(x, weight, bias)
    shape = convolved(layout.shape, settings)
    if plan is not None:
        own = operand(weight, plan.inputs[1])
        added = None if bias is None else bias_of(bias, plan.terms, -settings.num_dims - 1)
        target, reads = plan.terms, planned(layout, plan.inputs[0], None, settings)
    else:
        own, added = used(weight, layout), used(bias, layout)
        target = layout.resized(shape)
        if layout.is_outside:
            return anchored_zeros((0,), x, own, added), target
        if target.local_shape == target.shape and layout.local_shape == layout.shape:
            return _as_torch(x, own, added, settings), target
        reads = planned(layout, target, settings.channels, settings)
    part = reads.fetch(x)
    if target.is_outside:
        return anchored_zeros((0,), part, own, added), target
    return of_read(part, own, added, reads, target, settings, plan is not None), target


def of_read(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Windowed,
    target: Layout,
    settings: TransposedSettings,
    in_blocks: bool = False,
) -> Tensor:
    """This worker's outputs, cropped from all outputs of its inputs."""
    D = settings.num_dims
    box = target.box()
    assert box is not None
    own = box[-D - 1]
    if 0 in target.local_shape or 0 in x.shape:
        y = as_autocast(anchored_zeros(target.local_shape, x, weight, bias))
    else:
        y = _trimmed(x, weight, plan, target, settings, own)
        length = own[1] - own[0]
        if y.shape[-D - 1] != length:  # those of whole groups
            y = y.narrow(-D - 1, own[0] % settings.weight[1], length)
    if bias is None or 0 in y.shape:
        return y
    bias = bias if in_blocks else bias[slice(*own)]
    return as_autocast(y + bias.reshape(-1, *[1] * D))


def _as_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: TransposedSettings
) -> Tensor:
    y: Tensor = _CONVOLUTIONS[settings.num_dims - 1](
        x,
        weight,
        bias,
        settings.stride,
        settings.padding,
        settings.output_padding,
        settings.groups,
        settings.dilation,
    )
    return y


def _trimmed(
    x: Tensor,
    weight: Tensor,
    plan: Windowed,
    target: Layout,
    settings: TransposedSettings,
    own: Interval,
) -> Tensor:
    """The outputs of all groups that the channels `own` touch, in this worker's box of space."""
    D = settings.num_dims
    box, inputs = target.box(), plan.read.box()
    assert box is not None and inputs is not None
    channels = settings.channels
    first, stop = channels.touched(own)
    if plan.fields[-D - 1] is not None and stop - first < channels.groups:
        size = settings.weight[0] // channels.groups
        weight = weight[first * size : stop * size]
    padding, behind, rest = [0] * D, [0] * D, [0] * (2 * D)
    sides = zip(settings.windows(), inputs[-D:], box[-D:], strict=True)
    for d, (window, read, outputs) in enumerate(sides):
        written = window.writes(read)
        before, after = outputs[0] - written[0], written[1] - outputs[1]  # superfluous outputs
        if before >= after and 0 <= before < after + window.stride:
            padding[d], behind[d] = before, before - after  # torch itself leaves them out
        else:  # torch's padding is equal on both sides: the rest is cropped, or added, afterwards
            padding[d] = cut = max(0, min(before, after))
            rest[2 * (D - d) - 2 : 2 * (D - d)] = cut - before, cut - after  # as F.pad has it
    convolve = _CONVOLUTIONS[D - 1]
    y = convolve(x, weight, None, settings.stride, padding, behind, stop - first, settings.dilation)
    return F.pad(y, rest) if any(rest) else y
