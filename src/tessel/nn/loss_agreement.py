"""The agreement before a loss: tensors besides the input, and values for which torch raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tessel.core.agreement import NumbersByWorker, TensorMeta, entered
from tessel.core.checksum import checksum, is_dense, is_within, range_of
from tessel.core.layout import Layout, Shape
from tessel.tensor import Tensor as SpreadTensor

CLASSES = (torch.int64, torch.uint8)  # dtypes of classes that torch supports
Said = tuple[int, int]  # a fault of this worker's values, and a checksum where they are a copy
FINE: Said = (0, 0)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FAULTS: tuple[tuple[type[Exception], str], ...] = (  # by number, of which 0 is none
    (RuntimeError, "all elements of input should be between 0 and 1"),
    (RuntimeError, "all elements of target should be between 0 and 1"),
    (IndexError, "a target is out of bounds: it is none of the classes and not ignore_index"),
    (ValueError, "var has negative entry/entries"),
)


@dataclass(frozen=True)
class AgreedTarget:
    """The agreed description of a tensor that a loss takes besides the input.

    Attributes:
        loss: the name of the loss, for errors.
        name: the name of the tensor.
        shapes: the shapes of the parts, by worker.
        meta: dtype, device and derivatives of the parts.
        numbers: the statement of each worker on its values.
    """

    loss: Any
    name: str
    shapes: dict[int, Shape]
    meta: TensorMeta
    numbers: NumbersByWorker

    def check_parts(self, layout: Layout, expected: Layout) -> None:
        """Raise ValueError if the parts do not fit `expected`; `layout` is that of the input."""
        misfit = _misfit(tuple(self.shapes.items()), expected)
        if misfit is not None:
            worker, shape = misfit
            raise ValueError(
                f"{self.loss!r}: the {self.name} must have the layout of the input: worker "
                f"{worker} has an input of shape {layout.shape_on(worker)} and a {self.name} of "
                f"shape {shape}, "
                f"expected {expected.shape_on(worker)}"
            )

    def check_values(self) -> None:
        """Raise torch's error for invalid values, if any worker has some."""
        for worker, (fault, _) in self.numbers.items():
            if fault:
                kind, text = _FAULTS[fault - 1]
                raise kind(f"{self.loss!r}: {text}, on worker {worker}")

    def fitting(self, layout: Layout, expected: Layout | None = None) -> Layout:
        """The layout of valid parts: that of the input, unless `expected` is passed."""
        self.check_parts(layout, expected or layout)
        self.check_values()
        return expected or layout

    def check_copies(self, layout: Layout, axes: Sequence[int]) -> None:
        """Raise ValueError if workers along `axes` hold other values, by their checksums."""
        partition = layout.partition
        for worker, said in self.numbers.items():
            place = partition.coordinates(worker)
            assert place is not None
            first = partition.worker_at([0 if a in axes else at for a, at in enumerate(place)])
            if said != self.numbers[first]:
                raise ValueError(
                    f"{self.loss!r}: workers along axes {tuple(axes)} must hold the same "
                    f"{self.name}, but those of workers {first} and {worker} differ"
                )

    def spread(self, value: Tensor, layout: Layout) -> SpreadTensor:
        """Parts that fit: the tensor needs a gradient, or carries a tangent, here if it does so
        anywhere."""
        return SpreadTensor(entered(value, self.meta, not layout.is_outside), layout)


@lru_cache(maxsize=1024)
def _misfit(parts: tuple[tuple[int, Shape], ...], layout: Layout) -> tuple[int, Shape] | None:
    """The first worker whose part does not fit the layout, and its shape."""
    return next((each for each in parts if each[1] != layout.shape_on(each[0])), None)


def said_of_units(*given: Any, first: int = 1) -> Said:
    """A worker's statement on tensors that must be in [0, 1], numbered from `first`."""
    for number, x in enumerate(given, first):
        # on an accelerator torch's kernel itself checks
        if is_dense(x) and x.dtype in _FLOATS and x.device.type == "cpu" and x.numel():
            low, high = x.detach().aminmax()
            if not (low >= 0) & (high <= 1):
                return number, 0
    return 0, 0


def class_dim(ndim: int) -> int:
    """The dimension of the classes: 1, or 0 of an input without a batch."""
    return min(1, ndim - 1)


def samples_of(shape: Shape) -> Shape:
    """The shape of a target of classes for an input of this shape."""
    dim = class_dim(len(shape))
    return shape[:dim] + shape[dim + 1 :]


def said_of_classes(target: Any, num_classes: int, ignore_index: int, is_copy: bool) -> Said:
    """A worker's statement on its classes; nothing if it has probabilities."""
    if not is_copy and isinstance(target, Tensor) and target.device.type != "cpu":
        return FINE  # on an accelerator torch's kernel itself checks classes
    low, high, total = range_of(target, CLASSES, ignore_index, is_copy)
    return 0 if is_within(low, high, num_classes) else 3, total


def said_of_variance(var: Tensor, layout: Layout) -> Said:
    """A worker's statement on its variance."""
    if not (is_dense(var) and var.dtype in _FLOATS):
        return FINE
    fault = 4 if bool((var.detach() < 0).any()) else 0
    lengths = zip(var.shape, layout.cuts, strict=False)
    splits = (length == 1 and len(cut.intervals) > 1 for length, cut in lengths)
    # Parts with the layout of the input have different elements on each worker, copies the same.
    is_copy = var.ndim != len(layout.shape) or any(splits)
    return fault, checksum(var) if is_copy else 0


def narrow_dim(shapes: dict[int, Shape], layout: Layout) -> int | None:
    """Along which dimension a variance is the same for all of the input, if along any."""
    given = list(shapes.values())
    inputs = [layout.shape_on(worker) for worker in shapes]
    if given == [shape[:-1] for shape in inputs]:
        return len(layout.shape) - 1
    if given == inputs:  # also with one element each along a dimension: not distinguishable
        return None
    for dim in range(len(layout.shape)):
        if given == [(*shape[:dim], 1, *shape[dim + 1 :]) for shape in inputs]:
            return dim
    return None
