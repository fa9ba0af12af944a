"""Identities, and matrices of parameters: diagonal, dense, and one for each mode."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from tessel.operators.leaf import Leaf
from tessel.operators.memory import in_order, in_shape, inverse_of, order_of
from tessel.operators.space import Shape, TensorSpace, checked_dtype, checked_length


class ParIdentity(Leaf):
    """The identity on tensors of length `n`.

    Args:
        T: a dtype of torch, such as float32.
        n: the length.

    >>> import tessel, torch
    >>> tessel.ParIdentity(torch.float32, 2) * torch.ones(2)
    tensor([1., 1.])
    """

    def __init__(self, T: Any, n: int) -> None:
        length = checked_length("ParIdentity", "n", n)
        self.source = self.target = TensorSpace((length,), checked_dtype("ParIdentity", T))

    is_invertible = True
    is_nothing = True
    mixes = (False,)

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        return x


class ParDiagonal(Leaf):
    """A diagonal matrix of parameters: each value is multiplied by its own number.

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
        """The product; in memory the tensor is (before, n, behind), and so is the result."""
        assert value is not None
        matrix = (value.mH if self.is_adjoint else value).to(x.dtype)
        order = order_of(x)
        rows, at = in_order(x, order), order.index(first)
        before, behind = rows.shape[:at], rows.shape[at + 1 :]
        flat = in_shape(rows, (before.numel(), rows.shape[at], behind.numel()))
        if self.is_inverse:
            # `solve` would raise for a singular matrix, maybe on one worker alone.
            result = torch.linalg.solve_ex(matrix, flat).result
        elif not behind.numel() > 1:  # one product, where a batch of vectors would be many
            result = (flat.squeeze(-1) @ matrix.mT).unsqueeze(-1)
        else:
            result = matrix @ flat
        result = in_shape(result, (*before, result.shape[1], *behind))
        return in_order(result, inverse_of(order))

    def miniature(self) -> Leaf:
        return self._shrunk(ParMatrix(self.source.dtype, 1, 1))

    def flops(self, shape: Shape, dims: tuple[int, ...]) -> float:
        n, m = self.domain.numel, self.codomain.numel
        columns = prod(shape) / max(1, shape[dims[0]])
        return 2.0 * m * n * columns * (4 if self.source.is_complex else 1)


class ParMultilinear(Leaf):
    """A dense matrix for each index of the dimensions after the first.

    y[o, k] = Σ_i W[o, i, k] x[i, k], where k runs over the modes. Along modes that are split over
    workers its parameters are split, too.

    Args:
        T: a dtype of torch.
        m, n: the lengths of the first dimension of a result and of a tensor.
        modes: the lengths of the other dimensions.

    >>> import tessel, torch
    >>> tessel.ParMultilinear(torch.complex64, 2, 3, [4, 5]).domain
    complex64 3×4×5
    """

    def __init__(self, T: Any, m: int, n: int, modes: Sequence[int]) -> None:
        dtype = checked_dtype("ParMultilinear", T)
        self.modes = tuple(checked_length("ParMultilinear", "each of modes", k) for k in modes)
        self.target = TensorSpace((checked_length("ParMultilinear", "m", m), *self.modes), dtype)
        self.source = TensorSpace((checked_length("ParMultilinear", "n", n), *self.modes), dtype)
        self.std = (m * n) ** -0.5

    @property
    def is_invertible(self) -> bool:
        return self.source == self.target

    @property
    def mixes(self) -> tuple[bool, ...]:
        return True, *(False for _ in self.modes)

    @property
    def parameter_shape(self) -> Shape:
        return self.target.shape[0], self.source.shape[0], *self.modes

    @property
    def parameter_dims(self) -> tuple[int | None, ...]:
        return None, None, *range(1, 1 + len(self.modes))

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        """The modes become the batch of a matrix product."""
        assert value is not None
        D = len(self.modes)
        weights = value.to(x.dtype).permute(*range(2, 2 + D), 0, 1)  # modes × m × n
        if self.is_adjoint:
            weights = weights.mH
        behind = range(first + 1, first + 1 + D)
        others = [d for d in range(x.dim()) if d != first and d not in behind]
        columns = x.permute(*behind, first, *others)  # modes × n × all others
        rest = columns.shape[D + 1 :]
        flat = columns.reshape(*columns.shape[: D + 1], prod(rest))
        result = torch.linalg.solve_ex(weights, flat).result if self.is_inverse else weights @ flat
        result = result.reshape(*result.shape[: D + 1], *rest)
        back = [0] * x.dim()
        for place, dim in enumerate((*behind, first, *others)):
            back[dim] = place
        order = order_of(x)  # the result has the memory order of the tensor
        return result.permute(back).permute(order).contiguous().permute(inverse_of(order))

    def miniature(self) -> Leaf:
        modes = [1] * len(self.modes)
        return self._shrunk(ParMultilinear(self.source.dtype, 1, 1, modes))

    def flops(self, shape: Shape, dims: tuple[int, ...]) -> float:
        m, columns = self.codomain.shape[0], prod(shape)
        return 2.0 * m * columns * (4 if self.source.is_complex else 1)
