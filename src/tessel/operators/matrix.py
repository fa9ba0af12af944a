"""Matrices of parameters along one dimension."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from tessel.operators.leaf import Leaf
from tessel.operators.space import Shape, Space, checked_dtype, checked_length
from tessel.operators.tasks import Order


class ParMatrix(Leaf):
    """A dense matrix of parameters, from length `n` to length `m`.

    >>> import tessel, torch
    >>> A = tessel.ParMatrix(torch.float64, 2, 3)
    >>> A.domain, A.codomain
    (float64 3, float64 2)
    """

    def __init__(self, T: Any, m: int, n: int) -> None:
        dtype = checked_dtype("ParMatrix", T)
        self.target = Space((checked_length("ParMatrix", "m", m),), dtype)
        self.source = Space((checked_length("ParMatrix", "n", n),), dtype)
        self.std = self.source.numel**-0.5

    @property
    def is_invertible(self) -> bool:
        return self.source == self.target

    @property
    def parameter_shape(self) -> Shape:
        return self.target.numel, self.source.numel

    parameter_dims = (None, None)

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        assert value is not None
        matrix = value.mH if self.is_adjoint else value
        rows = x.movedim(first, -1)
        matrix = matrix.to(x.dtype)
        if self.is_inverse:
            columns = rows.reshape(-1, rows.shape[-1]).mT
            result = torch.linalg.solve(matrix, columns).mT.reshape(rows.shape)
        else:
            result = rows @ matrix.mT
        return result.movedim(-1, first)

    def order_after(self, order: Order, dims: list[int]) -> Order:
        return (*(d for d in sorted(order) if d not in dims), *dims)

    def flops(self, shape: Shape, dims: tuple[int, ...]) -> float:
        n, m = self.domain.numel, self.codomain.numel
        columns = prod(shape) / max(1, shape[dims[0]])
        return 2.0 * m * n * columns * (4 if self.source.is_complex else 1)
