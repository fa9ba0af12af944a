"""Diagonal matrices of parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tessel.operators.leaf import Leaf
from tessel.operators.space import Shape, TensorSpace, checked_dtype, checked_length


class ParDiagonal(Leaf):
    """A diagonal matrix of parameters: each value times a number of its own.

    Along a dimension that is split over workers its parameters are split, too.

    >>> import tessel, torch
    >>> tessel.ParDiagonal(torch.complex64, 4).H.domain
    complex64 4
    """

    def __init__(self, T: Any, n: int) -> None:
        length = checked_length("ParDiagonal", "n", n)
        self.source = self.target = TensorSpace((length,), checked_dtype("ParDiagonal", T))

    is_invertible = True
    mixes = (False,)

    @property
    def parameter_shape(self) -> Shape:
        return self.source.shape

    parameter_dims = (0,)

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        assert value is not None
        numbers = value.conj() if self.is_adjoint else value
        numbers = numbers.reshape(-1, *[1] * (x.dim() - first - 1)).to(x.dtype)
        return x / numbers if self.is_inverse else x * numbers

    def miniature(self) -> Leaf:
        return self._shrunk(ParDiagonal(self.source.dtype, 1))
