"""Spaces: the shapes and dtypes of an operator's input and output, known before it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from operator import index as as_int
from typing import Any

import torch

from tessel.core.layout import Shape

COMPLEX_OF = {
    torch.float16: torch.complex32,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
REAL_OF = {complex_: real for real, complex_ in COMPLEX_OF.items()}
DTYPES = (*COMPLEX_OF, torch.bfloat16, *REAL_OF)  # torch has no complex bfloat16


@dataclass(frozen=True)
class TensorSpace:
    """Tensors of a shape and a dtype.

    >>> TensorSpace((10, 20), torch.float32)
    float32 10×20
    """

    shape: Shape
    dtype: torch.dtype

    numel: int = field(init=False, repr=False, compare=False)
    is_complex: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Read in every call: attributes, as compilers do not trace cached properties.
        object.__setattr__(self, "numel", prod(self.shape))
        object.__setattr__(self, "is_complex", self.dtype in REAL_OF)

    def __repr__(self) -> str:
        lengths = "×".join(map(str, self.shape)) or "1"
        return f"{str(self.dtype).removeprefix('torch.')} {lengths}"


def real_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of a number."""
    return REAL_OF.get(dtype, dtype)


def complex_of(dtype: torch.dtype) -> torch.dtype:
    """The complex dtype of the same precision."""
    return COMPLEX_OF.get(dtype, dtype)


def checked_dtype(name: str, dtype: Any) -> torch.dtype:
    """The dtype, if operators support it; ValueError for others."""
    if dtype not in DTYPES:
        known = ", ".join(str(each) for each in DTYPES)
        raise ValueError(f"{name}: T must be one of {known}, got {dtype!r}")
    return dtype


def checked_length(name: str, what: str, length: Any) -> int:
    """The length, if it is an integer of at least one; ValueError otherwise."""
    try:
        number = as_int(length)
    except TypeError:
        number = 0
    if number < 1 or isinstance(length, bool):
        raise ValueError(f"{name}: {what} must be an integer of at least 1, got {length!r}")
    return number
