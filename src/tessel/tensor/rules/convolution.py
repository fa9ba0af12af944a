"""Convolutions: each worker fetches the inputs that its outputs read, and torch convolves them.

A convolution is a product of inputs and weights, summed over the channels of the input, whose
indices of space are read through windows. So with a weight in blocks it is planned like products:
each index is split as in the largest operand that has it, and sums over a split index are added by
one movement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.boxes import Interval
from tessel.core.context import is_compiling
from tessel.core.layout import Layout, Shape
from tessel.core.shared import anchored_zeros, used
from tessel.core.windows import Groups, Mirrored, ReceptiveField, TouchingWindow, Window
from tessel.tensor import overlapped_convolution, small_volumes
from tessel.tensor.padding import PeriodicHalo, periodic_halo
from tessel.tensor.pointwise_convolution import convolve_pointwise
from tessel.tensor.rules.products import Contraction, bias_of, operand, summed
from tessel.tensor.rules.products import planned as planned_product
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_autocast,
    check_dtypes,
    rule,
    whole_part,
)
from tessel.tensor.tensor import Tensor as SpreadTensor
from tessel.tensor.tensor import made, opened
from tessel.tensor.windowed import Numbers, Windowed, outline, tuple_of
from tessel.transport import kept_in_job

Widths = tuple[Interval, ...]  # the padding before and after each dimension
_CONVOLUTIONS: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)


@rule("conv1d", "conv2d", "conv3d")
def convolve(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`torch.nn.functional.conv*` with the blocks of a weight where they are, or with all of it."""
    given = dict(zip(_ARGUMENTS, args[1:], strict=False)) | kwargs
    layout = args[0]._layout
    weight, bias = given.pop("weight"), given.pop("bias", None)
    sizes = {k: tuple(each) if isinstance(each, list) else each for k, each in given.items()}
    settings = settings_of(weight.shape, **sizes)
    shape = convolved(layout.shape, settings)
    return convolve_with(weight, bias, args[0], shape, convolve_parts, settings)


_ARGUMENTS = ("weight", "bias", "stride", "padding", "dilation", "groups")


@kept_in_job
def _blocks_planned(
    x: Layout, weight: Layout, shape: Shape, groups: int, outputs_first: bool
) -> Contraction | None:
    """The plan of a convolution in blocks; None if each worker needs all of the weight.

    Args:
        x: the layout of the input.
        weight: the layout of the weight.
        shape: the shape of the whole output.
        groups: the number of groups of channels.
        outputs_first: whether the weight is (outputs, inputs, *kernel), or inputs come first.
    """
    if x.partition != weight.partition:
        return None
    num_dims = len(weight.shape) - 2
    channel = len(shape) - num_dims - 1
    inputs = "Z"
    weight = weight.gathered(range(2, len(weight.shape)))  # windows need whole kernels
    if groups > 1:
        size = weight.shape[0] // groups
        ends = [end for interval in weight.cuts[0].intervals for end in interval]
        if not outputs_first or any(end % size for end in ends):  # a block has parts of groups
            return None
        # Outputs read the inputs of their groups, which are not an index of the weight.
        x, weight, inputs = x.gathered([channel]), weight.gathered([1]), "G"
    lengths = (*x.shape[: channel + 1], *shape[channel + 1 :])
    cuts = (*x.cuts[: channel + 1], *x.resized(lengths).cuts[channel + 1 :])
    lead, space = ascii_lowercase[:channel], ascii_lowercase[channel : channel + num_dims]
    kernel = ascii_lowercase[-num_dims:]
    plan = planned_product(
        x.partition,
        (lead + inputs + space, ("YZ" if outputs_first else "ZY") + kernel),
        lead + "Y" + space,
        (lengths, weight.shape),
        (Layout(x.partition, lengths, cuts, x.shared), weight),
    )
    splits = any(map(plan.inputs[1].is_split, range(2)))
    return plan if splits else None  # x uses all axes of the weight for space and batch


def convolve_with(
    weight: Tensor,
    bias: Tensor | None,
    x: SpreadTensor,
    shape: Shape,
    convolve_parts: Callable[..., tuple[Tensor, Layout]],
    settings: Any,
    outputs_first: bool = True,
) -> SpreadTensor:
    """Apply a convolution with the blocks of a weight where they are, or with all of it.

    Args:
        weight: the weight, spread or plain.
        bias: the bias, likewise.
        x: the input.
        shape: the shape of the whole output.
        convolve_parts: computes this worker's part, or with a plan its term of a sum.
        settings: the settings of the convolution.
        outputs_first: whether the weight is (outputs, inputs, *kernel), or inputs come first.
    """
    part, layout = opened(x)
    plan = None
    if isinstance(weight, SpreadTensor) and not weight._layout.is_whole:
        plan = _blocks_planned(layout, weight._layout, shape, settings.groups, outputs_first)
    outputs = settings.channels.outputs
    if bias is not None and bias.shape != (outputs,):  # torch may only see a part of it
        raise RuntimeError(
            f"Given weight of size {list(weight.shape)}, expected bias to be 1-dimensional with "
            f"{outputs} elements, but got bias of size {list(bias.shape)} instead"
        )
    if plan is None:
        if isinstance(weight, SpreadTensor) or isinstance(bias, SpreadTensor):
            weight, bias = whole_part(weight, layout), whole_part(bias, layout)
        return made(*convolve_parts(part, layout, weight, bias, settings))
    if bias is None or plan.terms is plan.result:
        return summed(convolve_parts(part, layout, weight, bias, settings, plan)[0], plan)
    # If the bias is added to the final sum, its gradient is not summed over the terms.
    y = summed(convolve_parts(part, layout, weight, None, settings, plan)[0], plan)
    found = y + bias.reshape(-1, *[1] * settings.num_dims).to(y.dtype)
    assert isinstance(found, SpreadTensor)
    return found


def check_numbers(
    kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], padding: Sequence[int]
) -> None:
    """Raise for settings that torch rejects only if there are values to convolve."""
    for what, numbers, least in (
        ("padding", padding, 0),
        ("stride", stride, 1),
        ("dilation", dilation, 1),
        ("kernel_size", kernel, 1),
    ):
        if any(number < least for number in numbers):
            raise RuntimeError(
                f"a {what} of at least {least} is required along each dimension, got "
                f"{tuple(numbers)}"
            )


@dataclass(frozen=True)
class ConvolutionSettings:
    """The arguments of a convolution except the values of its weight."""

    weight: Shape  # (outputs, inputs of a group, *kernel)
    stride: Numbers
    dilation: Numbers
    widths: Widths
    mode: str
    groups: int

    @cached_property
    def _hash(self) -> int:
        values = self.weight, self.stride, self.dilation, self.widths, self.mode, self.groups
        return hash(values)

    def __hash__(self) -> int:
        return self._hash  # computed once: settings are keys in every call

    @cached_property
    def num_dims(self) -> int:
        return len(self.stride)

    @cached_property
    def channels(self) -> Groups:
        return Groups(self.groups, self.weight[1] * self.groups, self.weight[0])

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether this is a 1-d or 2-d convolution with kernels of one value, in one group."""
        return self.num_dims < 3 and prod(self.weight[2:]) == 1 and self.groups == 1

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
    """The settings by torch's arguments, for a weight of this shape."""
    weight = tuple(weight)
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
    """The shape of the whole output; raises torch's own errors."""
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
    """The steps from a worker's part of the input to its part of the output.

    Attributes:
        wraps: first, circular dimensions are continued.
        windowed: then every worker fetches what its windows read, with zeros beyond the border
            along split dimensions. Mirrored dimensions are put in order.
        padding: then torch pads the dimensions that are whole, and convolves.
    """

    wraps: tuple[PeriodicHalo, ...]
    windowed: Windowed
    padding: Numbers

    def fetch(self, x: Tensor) -> Tensor:
        """Bring this worker the values that it convolves."""
        for wrap in self.wraps:
            x = wrap.apply(x)
        if self.reads_part:
            return x
        return self.windowed.in_order(self.windowed.fetch(x))

    @cached_property
    def taps(self) -> tuple[tuple[int, Interval], ...]:
        """The dimensions of the weight of which this worker needs an interval, and the interval."""
        box, fields = self.windowed.target.box(), self.windowed.fields
        if box is None:
            return ()
        return tuple(
            (dim, field.taps(part))
            for dim, (field, part) in enumerate(zip(fields, box, strict=True), -len(fields))
            if isinstance(field, TouchingWindow) and part[0] < part[1]
        )

    @cached_property
    def reads_part(self) -> bool:
        """Whether torch computes the same from this worker's part as from the inputs that it reads.

        With a stride, the windows may end before the part does: torch ignores the rest, and the
        gradient of a slice would be zeros of the size of the part and a copy.
        """
        plan = self.windowed
        own, wanted = plan.source.box(), plan.read.box()
        if own is None or wanted is None or plan.places:
            return False
        if plan.use is not None or plan.adds_zeros or not plan.is_silent:
            return False
        paddings = (0,) * (len(own) - len(self.padding)) + self.padding
        for mine, read, field, padding in zip(own, wanted, plan.fields, paddings, strict=True):
            if not isinstance(field, Window):
                if mine != read:
                    return False
                continue
            spare = 2 * padding - field.dilation * (field.kernel - 1) - 1
            counts = {(stop - start + spare) // field.stride for start, stop in (mine, read)}
            if mine[0] != read[0] or len(counts) > 1:
                return False
        return True


@kept_in_job
def planned(
    source: Layout, target: Layout, channels: Groups | None, settings: ConvolutionSettings
) -> ConvolutionPlan:
    """The plan for outputs in the layout `target`.

    Args:
        source: the layout of the input.
        target: the layout of the outputs.
        channels: the channels that an output reads; if None, `target` has the channels to read.
        settings: the settings of the convolution.
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
    for d, (left, right) in enumerate(zip(before, after, strict=True)):
        # the zeros of a padding wider than the tensor, as with large dilations, would be many
        # times as much as the tensor
        window = windows[d]
        if left + right > 0 and isinstance(window, Window) and window.dilation > 1:
            windows[d] = TouchingWindow(window, (left, source.shape[first + d] - right))
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
        layout: the layout of the input.
        weight: the weight, whole on all workers of the layout; with a plan, spread or plain.
        bias: the bias, likewise.
        settings: the settings of the convolution.
        plan: the plan of a convolution in blocks, or None; its result has the layout `plan.terms`,
            separate terms of a sum if inputs are split.
    """
    check_dtypes(x, weight, bias)
    if plan is not None:
        own, terms = operand(weight, plan.inputs[1]), plan.terms
        added = None if bias is None else bias_of(bias, terms, -settings.num_dims - 1)
        # Outputs of groups read the inputs of their groups; else the plan has the inputs' layout.
        in_groups = settings.groups > 1
        read_by = terms if in_groups else plan.inputs[0]
        there = planned(layout, read_by, settings.channels if in_groups else None, settings)
        part = there.fetch(x)
        if terms.is_outside:
            return anchored_zeros((0,), part, own, added), terms
        for dim, taps in there.taps:
            own = own.narrow(dim, taps[0], taps[1] - taps[0])
        return of_read(part, own, added, there.padding, terms, settings, in_blocks=True), terms
    # tests change these numbers, so they are part of the cache's key
    strips = overlapped_convolution
    least = strips.LEAST_VALUES_ON_GPU if x.is_cuda else strips.LEAST_VALUES
    way = _ConvolutionWay.of(layout, settings, least, strips.LEAST_RATIO, strips.LARGEST_SHARE)
    target, reads = way.target, way.reads
    weight, bias = used(weight, layout), used(bias, layout)
    if layout.is_outside:
        return anchored_zeros((0,), x, weight, bias), target
    if reads is None:
        if 0 in x.shape:  # of no samples torch has no second derivatives: other workers have
            return as_autocast(anchored_zeros(target.local_shape, x, weight, bias)), target
        widths, padding = settings.widths, tuple(before for before, _ in settings.widths)
        if settings.mode != "zeros" or any(before != after for before, after in widths):
            mode = "constant" if settings.mode == "zeros" else settings.mode
            x = F.pad(x, [width for pair in reversed(widths) for width in pair], mode)
            padding = (0,) * len(widths)
        return _convolved(x, weight, bias, padding, settings), target
    if way.strips is not None and not is_compiling():  # its messages are no nodes of a graph
        return _by_strips(x, way.strips, weight, bias, settings), target
    for dim, taps in reads.taps:
        weight = weight.narrow(dim, taps[0], taps[1] - taps[0])
    return of_read(reads.fetch(x), weight, bias, reads.padding, target, settings), target


@dataclass(frozen=True)
class _ConvolutionWay:
    """The computation of a convolution with a weight that all workers have.

    Attributes:
        target: the layout of the result.
        reads: the plan that brings workers their inputs; None if each has whole samples.
        strips: the convolution without a copy of the inputs, if it is possible and faster.
    """

    target: Layout
    reads: ConvolutionPlan | None
    strips: overlapped_convolution.Stripped | None

    @staticmethod
    @kept_in_job
    def of(
        layout: Layout,
        settings: ConvolutionSettings,
        least_values: int,
        least_ratio: int,
        largest_share: float,
    ) -> _ConvolutionWay:
        shape = convolved(layout.shape, settings)
        target = layout.resized(shape)
        channel = len(shape) - settings.num_dims - 1
        only_batch = not any(map(layout.is_split, range(channel, len(shape))))
        if layout.is_outside or (only_batch and layout.cuts[0] == target.cuts[0]):
            return _ConvolutionWay(target, None, None)
        strips = None
        if settings.mode == "zeros" and all(before == after for before, after in settings.widths):
            windows = settings.windows(tuple(before for before, _ in settings.widths))
            # The gradient of the weight is summed over the part and its strips, so a part must be
            # large beside the weight. With a least of 0, as in tests, strips are always used.
            least = least_values and max(least_values, least_ratio * prod(settings.weight))
            strips = overlapped_convolution.stripped(layout, target, windows, least, largest_share)
        return _ConvolutionWay(target, planned(layout, target, settings.channels, settings), strips)


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Numbers,
    settings: ConvolutionSettings,
    groups: int | None = None,
) -> Tensor:
    groups = settings.groups if groups is None else groups
    numbers = settings.stride, padding, settings.dilation
    convolve: Any = _CONVOLUTIONS[settings.num_dims - 1]
    if settings.is_pointwise and x.device.type == "cpu" and not any(padding):
        return convolve_pointwise(convolve, x, weight, bias, settings.stride)
    if settings.num_dims == 3 and groups == 1:
        found = small_volumes.convolved(convolve, x, weight, bias, numbers)
        if found is not None:
            return found
    y: Tensor = convolve(x, weight, bias, *numbers, groups)
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
        if settings.num_dims == 1 or strip.shape[dim] > 1 or some.shape[dim] > 1:
            return _convolved(strip, some, None, padding, settings)
        # one layer of values and one of the kernel: faster with a dimension less
        place = settings.num_dims + dim
        stride, padding, dilation = (
            (*each[:place], *each[place + 1 :])
            for each in (settings.stride, padding, settings.dilation)
        )
        flat = strip.squeeze(dim), some.squeeze(dim)
        convolve = _CONVOLUTIONS[settings.num_dims - 2]
        y: Tensor = convolve(*flat, None, stride, padding, dilation, settings.groups)
        return y.unsqueeze(dim)

    return plan.apply(x, of_part, of_strip)


def of_read(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Numbers,
    target: Layout,
    settings: ConvolutionSettings,
    in_blocks: bool = False,
) -> Tensor:
    """This worker's outputs from the inputs that they read: of whole groups, then its own.

    Args:
        x: the inputs that the outputs read.
        weight: the whole weight, or the block of this worker's outputs and inputs.
        bias: the bias, likewise.
        padding: the zeros around `x`.
        target: the layout of the outputs.
        settings: the settings of the convolution.
        in_blocks: whether the parameters are blocks.
    """
    D = settings.num_dims
    if 0 in target.local_shape or 0 in x.shape:  # outputs that read no inputs
        y = anchored_zeros(target.local_shape, x, weight, bias)
        return as_autocast(y if bias is None or 0 in y.shape else y + bias.reshape(-1, *[1] * D))
    own = _Channels.of(target, settings)
    if not in_blocks and own.groups < settings.groups:
        weight, bias = weight[own.rows], None if bias is None else bias[own.rows]
    y = _convolved(x, weight, bias, padding, settings, own.groups)
    if y.shape[-D - 1] == own.length:
        return y
    return y.narrow(-D - 1, own.start - own.rows.start, own.length)


class _Channels(NamedTuple):
    """The channels of a worker's outputs.

    Attributes:
        start: the first channel.
        length: the number of channels.
        groups: the number of groups that they touch.
        rows: all channels of these groups.
    """

    start: int
    length: int
    groups: int
    rows: slice

    @staticmethod
    @kept_in_job
    def of(target: Layout, settings: ConvolutionSettings) -> _Channels:
        box = target.box()
        assert box is not None
        start, stop = box[-settings.num_dims - 1]
        size = settings.channels.size
        first, last = settings.channels.touched((start, stop))
        return _Channels(start, stop - start, last - first, slice(first * size, last * size))
