"""Windows: which input indices an output index reads, along one dimension. Pure integers.

A layer that slides a window over a tensor (a convolution, a pool, an interpolation) is, as far as
layouts are concerned, a rule that takes an interval of outputs to the interval of inputs that
they read. All such rules are in this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from tessel.core.boxes import Interval, overlap


class ReceptiveField(Protocol):
    """A rule for the inputs that outputs read."""

    def hull(self, outputs: Interval) -> Interval:
        """The inputs from the first to the last that non-empty `outputs` read, also outside of the
        tensor."""
        ...


def reads(field: ReceptiveField | None, outputs: Interval, length: int) -> Interval:
    """The inputs out of `length` that `outputs` read; without a rule, the same indices.

    >>> reads(Window(3, before=1), (0, 4), 8), reads(Window(3, before=1), (4, 4), 8)
    ((0, 5), (0, 0))
    """
    if outputs[0] == outputs[1]:
        return 0, 0
    hull = outputs if field is None else field.hull(outputs)
    # Outputs may read nothing but padding: an empty interval, too, must lie within the tensor.
    return overlap(hull, (0, length)) or (0, 0)


@dataclass(frozen=True)
class Window:
    """The window of a convolution or a pool: output i reads s·i − before + d·t for t < kernel.

    >>> Window(kernel=3, stride=2, before=1).hull((2, 4))
    (3, 8)
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0

    def first(self, output: int) -> int:
        """The leftmost input index that an output reads."""
        return self.stride * output - self.before

    def last(self, output: int) -> int:
        """The rightmost input index that an output reads."""
        return self.first(output) + self.dilation * (self.kernel - 1)

    def hull(self, outputs: Interval) -> Interval:
        return self.first(outputs[0]), self.last(outputs[1] - 1) + 1


@dataclass(frozen=True)
class TouchingWindow:
    """A window without the first and last values of its kernel that meet nothing but padding.

    These depend on the outputs: in an image that is small compared to the dilation, the outputs at
    one side read nothing at the other.

    Args:
        window: over inputs and the padding around them.
        inputs: without the padding.

    >>> field = TouchingWindow(Window(kernel=3, dilation=6), inputs=(6, 10))
    >>> field.taps((0, 2)), field.hull((0, 2)), field.taps((0, 4))
    ((1, 2), (6, 8), (1, 2))
    """

    window: Window
    inputs: Interval

    def taps(self, outputs: Interval) -> Interval:
        """The values of the kernel that non-empty `outputs` need; at least one."""
        start, stop = self.window.first(outputs[0]), self.window.first(outputs[1] - 1) + 1
        shifts = (self.window.dilation * tap for tap in range(self.window.kernel))
        touch = [bool(overlap((start + by, stop + by), self.inputs)) for by in shifts]
        if not any(touch):
            return 0, 1  # torch convolves with no kernel without values
        return touch.index(True), len(touch) - touch[::-1].index(True)

    def hull(self, outputs: Interval) -> Interval:
        first, stop = self.taps(outputs)
        by = self.window.dilation
        last = self.window.first(outputs[1] - 1) + by * (stop - 1)
        return self.window.first(outputs[0]) + by * first, last + 1


@dataclass(frozen=True)
class TransposedWindow:
    """The adjoint of a window: input i is written to outputs s·i − before + d·t for t < kernel.

    >>> TransposedWindow(kernel=3, stride=2, before=1).hull((2, 4))
    (1, 3)
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0

    def hull(self, outputs: Interval) -> Interval:
        start, stop = outputs[0] + self.before, outputs[1] + self.before
        span = self.dilation * (self.kernel - 1)
        # Output o is written by input i with s·i = o + before − d·t: from t = kernel − 1, rounded
        # up, to t = 0, rounded down.
        return -((span - start) // self.stride), (stop - 1) // self.stride + 1

    def writes(self, inputs: Interval) -> Interval:
        """The outputs from the first to the last that non-empty `inputs` are written to."""
        window = Window(self.kernel, self.stride, self.dilation, self.before)
        return window.hull(inputs)


@dataclass(frozen=True)
class AdaptiveWindow:
    """The window of an adaptive pool: output i of m reads ⌊i·n/m⌋ to ⌈(i+1)·n/m⌉.

    >>> AdaptiveWindow(inputs=7, outputs=3).hull((1, 2))
    (2, 5)
    """

    inputs: int
    outputs: int

    def hull(self, outputs: Interval) -> Interval:
        start, stop = outputs
        return start * self.inputs // self.outputs, -(-stop * self.inputs // self.outputs)


@dataclass(frozen=True)
class Groups:
    """The channels of a grouped convolution: an output reads all inputs of its group.

    >>> Groups(2, inputs=4, outputs=6).hull((1, 4))
    (0, 4)
    """

    groups: int
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        """The number of outputs of a group."""
        return self.outputs // self.groups

    def touched(self, outputs: Interval) -> Interval:
        """The groups that have an output among `outputs`."""
        return outputs[0] // self.size, (outputs[1] - 1) // self.size + 1

    def hull(self, outputs: Interval) -> Interval:
        size = self.inputs // self.groups
        first, stop = self.touched(outputs)
        return first * size, stop * size


@dataclass(frozen=True)
class Mirrored:
    """A window over a tensor that is continued beyond its border: mirrored, constant, or periodic.

    >>> Mirrored(Window(3, before=1), 8, "reflect").places((0, 2))
    [1, 0, 1, 2]
    >>> Mirrored(Window(3, before=1), 8, "circular").places((0, 2))
    [7, 0, 1, 2]
    """

    window: Window
    length: int
    mode: str  # "reflect", "replicate" or "circular"

    def places(self, outputs: Interval) -> list[int]:
        """The input index for each position that the windows of non-empty `outputs` cover."""
        start, stop = self.window.hull(outputs)
        if self.mode == "circular":
            return [index % self.length for index in range(start, stop)]
        last = self.length - 1
        reflects = self.mode == "reflect"
        # |k| mirrors at the first index, and last − |last − k| at the last one
        mirrored = (last - abs(last - abs(k)) if reflects else k for k in range(start, stop))
        return [min(max(index, 0), last) for index in mirrored]

    def hull(self, outputs: Interval) -> Interval:
        places = self.places(outputs)
        return min(places), max(places) + 1


Table = tuple[np.ndarray, np.ndarray]  # indices and weights, both (tap, output)


@dataclass(frozen=True)
class Interpolation(ABC):
    """An interpolation along one dimension: y[i] = Σ_t w_t(i) · x[index_t(i)].

    Positions are computed in the arithmetic of torch's own kernels, step by step: a position that
    is between two inputs only because of rounding must fall to the same side.

    Args:
        inputs, outputs: the lengths.
        scale: how much longer the output is, if it was given; by default outputs / inputs.
        double: whether torch computes positions in double precision, as it does for double tensors.
    """

    inputs: int
    outputs: int
    scale: float | None = None
    double: bool = True

    @cached_property
    @abstractmethod
    def table(self) -> Table:
        """The inputs that each output reads, all within the tensor, and their weights."""

    def hull(self, outputs: Interval) -> Interval:
        indices = self.table[0][:, outputs[0] : outputs[1]]
        return int(indices.min()), int(indices.max()) + 1

    @property
    def precision(self) -> type[np.floating]:
        return np.float64 if self.double else np.float32

    @property
    def step(self) -> np.floating:
        """The distance between the positions of two outputs."""
        if self.scale is not None and self.scale > 0:
            return self.precision(1.0 / self.scale)
        return self.precision(self.inputs) / self.precision(self.outputs)

    def clipped(self, positions: np.ndarray) -> np.ndarray:
        """The input at or before each position; torch rounds to single precision first."""
        whole = np.floor(positions.astype(np.float32)).astype(np.int64)
        return np.minimum(whole, self.inputs - 1)

    @property
    def centers(self) -> np.ndarray:
        """The positions of the outputs among the inputs: one fused multiply-add, rounded once."""
        wide = np.longdouble if self.double else np.float64
        half = self.precision(0.5)
        exact = wide(self.step) * (self.places + half).astype(wide) - wide(0.5)
        return exact.astype(self.precision)

    @property
    def places(self) -> np.ndarray:
        """The indices of the outputs as floating-point numbers."""
        return np.arange(self.outputs).astype(self.precision)


@dataclass(frozen=True)
class Nearest(Interpolation):
    """The one input that lies nearest: ⌊i·n/m⌋, or with `exact` ⌊(i + ½)·n/m⌋.

    Some kernels of torch have a `shortcut` for equal and doubled lengths: they ignore the scale,
    and do not round ½ away from the center.

    >>> Nearest(3, 6).hull((1, 4)), Nearest(3, 2, exact=True).hull((0, 1))
    ((0, 2), (0, 1))
    """

    exact: bool = False
    shortcut: bool = False

    @cached_property
    def table(self) -> Table:
        if self.shortcut and self.exact:
            indices = self.clipped((np.arange(self.outputs) + 0.5) * np.float64(self.step))
        elif self.exact:
            indices = self.clipped(np.maximum(self.centers, 0) + self.precision(0.5))
        elif self.shortcut and self.outputs in (self.inputs, 2 * self.inputs):
            indices = np.arange(self.outputs) // (self.outputs // self.inputs)
        else:
            indices = self.clipped(self.places * self.step)
        return indices[None], np.ones((1, self.outputs), self.precision)


@dataclass(frozen=True)
class _Centered(Interpolation):
    """Positions on the line through the centers of the inputs.

    Args:
        align_corners: whether the first and the last input and output have the same positions.
    """

    align_corners: bool = False

    @property
    def positions(self) -> np.ndarray:
        if not self.align_corners:
            return self.centers
        if self.outputs == 1:
            return self.places
        step = self.precision(self.inputs - 1) / self.precision(self.outputs - 1)
        return step * self.places

    def split(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The input at or before each position, and the distance of the position from it."""
        first = self.clipped(positions)
        return first, np.clip(positions - first, 0, 1).astype(self.precision)


@dataclass(frozen=True)
class Linear(_Centered):
    """The two inputs around a position, weighted by their distance.

    >>> Linear(4, 8).hull((2, 4)), Linear(4, 8).hull((0, 1))
    ((0, 3), (0, 2))
    """

    @cached_property
    def table(self) -> Table:
        if self.inputs == self.outputs:  # torch copies, whatever the scale is
            return np.arange(self.outputs)[None], np.ones((1, self.outputs), self.precision)
        first, behind = self.split(np.maximum(self.positions, 0))
        second = np.minimum(first + 1, self.inputs - 1)
        return np.stack([first, second]), np.stack([1 - behind, behind])


@dataclass(frozen=True)
class Cubic(_Centered):
    """The four inputs around a position, weighted by the cubic convolution kernel with a = −¾.

    >>> Cubic(8, 16).hull((8, 9))
    (2, 6)
    """

    @cached_property
    def table(self) -> Table:
        first, behind = self.split(self.positions)
        taps = first + np.arange(-1, 3)[:, None]
        ahead = 1 - behind
        weights = _outer(behind + 1), _inner(behind), _inner(ahead), _outer(ahead + 1)
        return np.clip(taps, 0, self.inputs - 1), np.stack(weights)


def _inner(distance: np.ndarray) -> np.ndarray:
    """The cubic convolution kernel up to a distance of 1."""
    # (a + 2) d³ − (a + 3) d² + 1
    return (1.25 * distance - 2.25) * distance * distance + 1


def _outer(distance: np.ndarray) -> np.ndarray:
    """The cubic convolution kernel for a distance of 1 to 2."""
    # a d³ − 5a d² + 8a d − 4a
    return ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
