"""Interpolation: values between those of a tensor, by the nearest, linear or cubic rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.boxes import Interval, shift
from tessel.core.context import is_compiling
from tessel.core.layout import Layout, Shape
from tessel.core.numbers import to_keep
from tessel.core.shared import anchored_zeros
from tessel.core.windows import Cubic, Interpolation, Linear, Nearest
from tessel.tensor.rules.adaptive import average
from tessel.tensor.rules.hosting import along
from tessel.tensor.table import Arguments, made, opened, outlines, rule
from tessel.tensor.windowed import Windowed, leading, outline, windowed

Taps = tuple[tuple[Tensor, Tensor | None], ...]  # indices and weights; none if all are 1
_REDUCED = (torch.float16, torch.bfloat16)
_NEAREST = ("nearest", "nearest-exact")
_SMALL = 128  # up to this sum of lengths torch uses other kernels for the nearest in 2 dimensions


class InterpolationSettings(NamedTuple):
    """The arguments of `torch.nn.functional.interpolate`."""

    size: Any
    scale_factor: Any
    mode: str
    align_corners: bool | None
    recompute_scale_factor: bool | None

    @classmethod
    def of(
        cls,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
    ) -> InterpolationSettings:
        """The settings with sequences in hashable form, and factors as torch's layer has them."""
        if isinstance(scale_factor, list | tuple):
            factor: Any = tuple(map(float, scale_factor))
        else:
            factor = None if scale_factor is None else float(scale_factor)
        size = tuple(size) if isinstance(size, list) else size
        return cls(size, factor, mode, align_corners, recompute_scale_factor)

    def scales(self, num_dims: int) -> Sequence[float | None]:
        """The given scale along each dimension, or None."""
        if self.scale_factor is None or self.recompute_scale_factor:
            return [None] * num_dims
        given = self.scale_factor
        return given if isinstance(given, tuple) else [given] * num_dims


@rule("interpolate", "upsample")
def interpolate(name: str, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """`torch.nn.functional.interpolate`: each worker fetches the inputs that its outputs read."""
    x, layout = opened(args[0])
    given = (
        dict(zip((*InterpolationSettings._fields, "antialias"), args[1:], strict=False)) | kwargs
    )
    if given.pop("antialias", False):  # the inputs of an output depend on the scale
        size = outlines(func, args, kwargs).shape[2:]

        def sampled(part: Tensor) -> Any:
            if not part.numel():  # torch rejects it
                return part.new_zeros((*part.shape[:2], *size))
            return func(part, *args[1:], **kwargs)

        return along(args[0], range(2, len(layout.shape)), sampled)
    settings = InterpolationSettings.of(**given)
    shape = global_shape(layout.shape, x.dtype, settings)
    if settings.mode == "area":
        return made(*average(x, layout, shape, len(shape) - 2))
    fields = interpolations(layout.shape, shape, x.dtype, settings, x.is_cpu)
    check_exact(layout, fields, x, settings.mode)
    plan = windowed(layout, shape, leading(len(shape), fields))
    return made(of_read(plan.fetch(x), plan, fields, settings), plan.target)


def of_read(
    x: Tensor, plan: Windowed, fields: tuple[Interpolation, ...], settings: InterpolationSettings
) -> Tensor:
    """This worker's outputs from the inputs that they read."""
    held, outputs = plan.read.local_shape, plan.target.local_shape
    if not math.prod(outputs):
        return anchored_zeros(outputs, x)
    if held[2:] == plan.source.shape[2:] and outputs[2:] == plan.target.shape[2:]:
        return _interpolated(x, settings)
    box, read = plan.target.box(), plan.read.box()
    assert box is not None and read is not None
    lines = Line.of_box(fields, read[2:], box[2:])
    dtype, own = x.dtype, x
    # by tables where torch's function would have other positions, then by torch's function
    if any(line.length is None for line in lines):
        x = _by_tables(x.float() if dtype in _REDUCED else x, lines)
    if all(line.stays for line in lines):
        return x.clone() if x is own else x.to(dtype)  # a tensor of its own, as torch's is
    corners = None if settings.mode in _NEAREST else settings.align_corners
    if any(line.scale is not None for line in lines):
        scales = tuple(1.0 if line.scale is None else line.scale for line in lines)
        y = F.interpolate(x, None, scales, settings.mode, corners)
    else:
        sizes = [line.length or have for line, have in zip(lines, x.shape[2:], strict=True)]
        y = F.interpolate(x, sizes, None, settings.mode, corners)
    return y[(slice(None), slice(None), *(line.wanted for line in lines))].to(dtype)


@lru_cache(maxsize=1024)
def global_shape(shape: Shape, dtype: torch.dtype, settings: InterpolationSettings) -> Shape:
    """The shape of the whole output; raises torch's own errors."""
    if dtype not in (torch.float32, torch.float64):  # torch rejects dtypes only if there are values
        ones = torch.ones((1, 1, *(2 for _ in shape[2:])), dtype=dtype)
        F.interpolate(ones, scale_factor=2.0, mode=settings.mode)
    x = outline(shape) if math.prod(shape) else torch.empty(shape)  # for its more precise errors
    return tuple(_interpolated(x, settings).shape)


def _interpolated(x: Tensor, settings: InterpolationSettings) -> Tensor:
    size, factor, mode, corners, recompute = settings
    return F.interpolate(x, size, factor, mode, corners, recompute)


def check_exact(layout: Layout, fields: tuple[Interpolation, ...], x: Tensor, mode: str) -> None:
    """Raise for special cases of torch along split dimensions, which the tables do not cover."""
    if mode in _NEAREST or all(len(cut.intervals) == 1 for cut in layout.cuts[2:]):
        return
    if not x.is_floating_point():
        raise NotImplementedError(
            f"interpolation of {x.dtype} in the mode {mode!r} along split dimensions is not "
            f"supported, got {layout}; convert the tensor to torch.float32, or split its first two "
            f"dimensions only"
        )
    equal = [each for each in fields if each.inputs == each.outputs]
    if not x.is_cpu and any(each.scale not in (None, 1.0) for each in equal):
        raise NotImplementedError(
            f"a scale other than 1 between equal lengths in the mode {mode!r} along split "
            f"dimensions is not supported on {x.device.type}, where torch ignores it at times, got "
            f"{layout}; pass the size, or recompute_scale_factor=True"
        )


@lru_cache(maxsize=1024)
def interpolations(
    inputs: Shape,
    outputs: Shape,
    dtype: torch.dtype,
    settings: InterpolationSettings,
    on_cpu: bool = True,
) -> tuple[Interpolation, ...]:
    """The receptive fields of dimensions after the first two, for these global shapes.

    Torch has several kernels for the nearest value, which compute positions differently; on a CPU
    these are the positions of the kernel for contiguous tensors.
    """
    double = dtype == torch.float64
    scales = settings.scales(len(outputs) - 2)
    each = list(zip(inputs[2:], outputs[2:], scales, strict=True))
    if settings.mode in _NEAREST:
        exact = settings.mode == "nearest-exact"
        small = len(outputs) == 4 and sum(outputs[2:]) <= _SMALL
        wide, shortcut = (double and not small, small) if on_cpu else (False, exact)
        return tuple(Nearest(*numbers, wide, exact, shortcut) for numbers in each)
    rule = Cubic if settings.mode == "bicubic" else Linear
    return tuple(rule(*numbers, double, bool(settings.align_corners)) for numbers in each)


@dataclass(frozen=True)
class Line:
    """The interpolation on a worker along one dimension.

    Attributes:
        field: the rule, in the whole tensor.
        read: the inputs that the worker has.
        outputs: the outputs to compute.
        length: the length of the output of torch's own function of these inputs whose positions are
            those in the whole tensor up to a shift; None if there is none.
        scale: the scale for this function, if the length does not determine it.
        skipped: the number of superfluous outputs that this function returns before those.
    """

    field: Interpolation
    read: Interval
    outputs: Interval
    length: int | None = None
    scale: float | None = None
    skipped: int = 0

    @classmethod
    def of(cls, field: Interpolation, read: Interval, outputs: Interval) -> Line:
        """The line of an interval of outputs, and of the inputs that it reads, of the whole."""
        length = read[1] - read[0]
        factor = field.outputs // field.inputs
        if factor * field.inputs < field.outputs or not _shifts(field, factor, read, outputs):
            whole = read == (0, field.inputs) and outputs == (0, field.outputs)
            if whole and not isinstance(field, Nearest):
                return cls(field, read, outputs, field.outputs, field.scale)
            return cls(field, read, outputs)
        scale = None if field.scale is None else float(factor)
        return cls(field, read, outputs, factor * length, scale, outputs[0] - factor * read[0])

    @staticmethod
    @lru_cache(maxsize=1024)
    def of_box(
        fields: tuple[Interpolation, ...], read: tuple[Interval, ...], box: tuple[Interval, ...]
    ) -> tuple[Line, ...]:
        """The lines along all dimensions."""
        lines = tuple(Line.of(*each) for each in zip(fields, read, box, strict=True))
        cubic = any(isinstance(field, Cubic) for field in fields)
        if cubic and any(line.length is None for line in lines):
            # torch's cubic function also interpolates lines that stay: use tables for all then
            return tuple(Line(line.field, line.read, line.outputs) for line in lines)
        return lines

    @property
    def stays(self) -> bool:
        """Whether torch's own function would change nothing; the cubic one always does."""
        same = self.length == self.read[1] - self.read[0] and not isinstance(self.field, Cubic)
        return self.length is None or same

    @property
    def wanted(self) -> slice:
        """The outputs in the result of torch's own function."""
        start, stop = self.outputs
        return slice(self.skipped, self.skipped + stop - start)


def _shifts(field: Interpolation, factor: int, read: Interval, outputs: Interval) -> bool:
    """Whether a part interpolated to `factor` times its length has the positions of the whole."""
    if field.scale not in (None, factor):
        return False
    if not isinstance(field, Nearest):
        return not getattr(field, "align_corners", False)
    length = read[1] - read[0]  # rounding may not change any position, here or there
    local = [Nearest(length, factor * length, None, wide, field.exact) for wide in (True, False)]
    return all(
        np.array_equal(each.table[0][0, slice(*part)], np.arange(*part) // factor)
        for each, part in [(field, outputs), *((each, (0, each.outputs)) for each in local)]
    )


def _by_tables(x: Tensor, lines: tuple[Line, ...]) -> Tensor:
    """Interpolate lines that torch's own function cannot, first those that become shorter.

    Among equal ones the last dimension comes first, with adjacent values, while there are fewest.
    """
    each = [(dim, line) for dim, line in enumerate(lines, 2) if line.length is None]
    each.sort(key=lambda entry: (entry[1].field.outputs / entry[1].field.inputs, -entry[0]))
    for dim, line in each:
        form = line.field, line.outputs, line.read, x.dtype, x.device
        taps = _taps(*form) if is_compiling() else _kept_taps(*form)
        result = None if taps else x
        for indices, weights in taps:  # Σ_t w_t · x[index_t] along this dimension
            values = x.index_select(dim, indices)
            if weights is None:
                result = values
                break
            along = weights.view([-1 if each == dim else 1 for each in range(x.ndim)])
            result = values * along if result is None else torch.addcmul(result, values, along)
        assert result is not None
        x = result
    return x


def _taps(
    field: Interpolation,
    outputs: Interval,
    read: Interval,
    dtype: torch.dtype,
    device: torch.device,
) -> Taps:
    """The taps of outputs in a tensor that holds `read`; none if the outputs are that tensor.

    They are cached; a compiled graph has its own.
    """
    indices, weights = (each[:, slice(*outputs)] for each in field.table)
    indices = indices - read[0]
    local = shift(read, -read[0])
    if len(indices) == 1 and np.array_equal(indices[0], np.arange(*local)):
        return ()
    return tuple(
        (
            torch.tensor(index, device=device),
            None if len(indices) == 1 else torch.tensor(weight, dtype=dtype, device=device),
        )
        for index, weight in zip(indices, weights, strict=True)
    )


@lru_cache(maxsize=1024)
def _kept_taps(*form: Any) -> Taps:
    with to_keep():
        return _taps(*form)
