"""Matrices of parameters along one dimension."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from tessel.operators.leaf import Leaf
from tessel.operators.memory import inverse_of, order_of
from tessel.operators.space import Shape, TensorSpace, checked_dtype, checked_length


class ParMatrix(Leaf):
    """A dense matrix of parameters, from length `n` to length `m`.

    >>> import tessel, torch
    >>> A = tessel.ParMatrix(torch.float64, 2, 3)
    >>> A.domain, A.codomain
    (float64 3, float64 2)
    """

    def __init__(self, T: Any, m: int, n: int) -> None:
        dtype = checked_dtype("ParMatrix", T)
        self.target = TensorSpace((checked_length("ParMatrix", "m", m),), dtype)
        self.source = TensorSpace((checked_length("ParMatrix", "n", n),), dtype)
        self.std = self.source.numel**-0.5

    @property
    def is_invertible(self) -> bool:
        return self.source == self.target

    @property
    def parameter_shape(self) -> Shape:
        return self.target.numel, self.source.numel

    parameter_dims = (None, None)

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        """As it lies in memory, the tensor is (before, n, behind), and so is the result."""
        assert value is not None
        matrix = (value.mH if self.is_adjoint else value).to(x.dtype)
        order = order_of(x)
        rows, at = x.permute(order), order.index(first)
        before, behind = rows.shape[:at], rows.shape[at + 1 :]
        flat = rows.reshape(before.numel(), rows.shape[at], behind.numel())
        if self.is_inverse:
            result = torch.linalg.solve_ex(matrix, flat).result  # no error on one worker only
        elif not behind.numel() > 1:
            result = (flat.squeeze(-1) @ matrix.mT).unsqueeze(-1)
        else:
            result = matrix @ flat
        result = result.reshape(*before, result.shape[1], *behind)
        return result.permute(inverse_of(order))

    def miniature(self) -> Leaf:
        return self._shrunk(ParMatrix(self.source.dtype, 1, 1))

    def flops(self, shape: Shape, dims: tuple[int, ...]) -> float:
        n, m = self.domain.numel, self.codomain.numel
        columns = prod(shape) / max(1, shape[dims[0]])
        return 2.0 * m * n * columns * (4 if self.source.is_complex else 1)
