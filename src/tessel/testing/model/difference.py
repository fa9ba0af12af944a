"""Differences: by how much a value of the converted model is not that of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessel.encoding import encodable
from tessel.tensor import Tensor as SpreadTensor
from tessel.testing.drawing import plain

_EXACT = (int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@encodable
@dataclass(frozen=True)
class Difference:
    """By how much a tensor of the converted model differs from that of one process.

    Attributes:
        name: of an output, parameter, input, buffer or module.
        error: the largest difference of two values; infinite where they are of different kinds,
            not a number where one process has nothing to compare with.
        scale: the largest value in one process.
        dtype: of the tensor, as text.
        note: what else is different: a shape, a dtype.
        allowed: the error that rounding may make.
    """

    name: str
    error: float
    scale: float = 0.0
    dtype: str = ""
    note: str = ""
    allowed: float = 0.0

    @property
    def differs(self) -> bool:
        """Whether the error is more than rounding."""
        return bool(self.note) or self.error > self.allowed


def difference(name: str, got: Any, expected: Any) -> Difference:
    """By how much what a worker has differs from its part of what one process has."""
    got, expected = _numbers(got), _numbers(expected)
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        if type(got) is type(expected) and not isinstance(got, _EXACT):
            return Difference(f"{name}, a {type(got).__name__}, is not compared", math.nan)
        if type(got) is type(expected) and got == expected:
            return Difference(name, 0.0)
        return Difference(name, math.inf, note=f"{_short(got)} is not {_short(expected)}")
    expected = plain(expected)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return Difference(name, math.inf, note=f"{_short(got)} is not {_short(expected)}")
    expected = _dense(expected)
    # in double precision first: torch has no `abs` of truth values
    wide = torch.complex128 if expected.is_complex() else torch.float64
    finite = expected.detach().to(wide).abs().nan_to_num(nan=0.0, posinf=0.0)
    scale = float(finite.max()) if finite.numel() else 0.0
    if isinstance(got, SpreadTensor):
        # partial sums are summed first: a term by itself is not the value
        layout = got.layout.summed
        part, expected = got.move_to(layout).local, layout.local_part(expected)
    else:
        part = _dense(got)
    # In double precision the subtraction adds no rounding to that which is measured.
    part, expected = part.detach().to(wide), expected.detach().to(wide)
    # Where both have an infinity or no number, they are the same; elsewhere a NaN is an error.
    same = (part == expected) | (torch.isnan(part) & torch.isnan(expected))
    apart = torch.where(same, 0, (part - expected).abs()).nan_to_num(nan=math.inf)
    error = float(apart.max()) if apart.numel() else 0.0
    return Difference(name, error, scale, str(got.dtype))


def worst(name: str, differences: Sequence[Difference]) -> Difference:
    """One for several: the largest error, and the first note."""
    if not differences:
        return Difference(name, 0.0)
    largest = max(differences, key=lambda each: -1.0 if math.isnan(each.error) else each.error)
    scale = max(each.scale for each in differences)
    note = next((each.note for each in differences if each.note), "")
    return replace(largest, scale=scale, note=note)


def _numbers(value: Any) -> Any:
    """Numbers that are rounded, as tensors are; anything else as it is."""
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if isinstance(value, float | complex | np.number):
        kind = torch.complex128 if isinstance(value, complex) else torch.float64
        return torch.as_tensor(value, dtype=kind)
    return value


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.layout != torch.strided else x


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{value!r:.40}" if isinstance(value, int | float | str | None) else type(value).__name__
