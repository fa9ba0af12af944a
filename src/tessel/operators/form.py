"""Forms: how a user gives a tensor to an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.operators.space import Shape


class Form:
    """How a user gave a tensor: in the operator's dimensions or as a vector, with a batch or not.

    Args:
        is_vector: whether the operator's dimensions are one.
        batch: the shape of the batch.
        shape: the operator's dimensions, on this worker.
    """

    def __init__(self, is_vector: bool, batch: Shape, shape: Shape) -> None:
        self.is_vector, self.batch, self.shape = is_vector, batch, shape

    @classmethod
    def of(cls, operator: Any, x: Tensor, shape: Shape) -> Form:
        """ValueError if the tensor fits in no form."""
        space = operator.domain
        if x.dtype != space.dtype:
            raise ValueError(f"{operator}: expected a tensor of {space.dtype}, got {x.dtype}")
        return cls.of_shape(operator, tuple(x.shape), shape)

    @classmethod
    def of_shape(cls, operator: Any, given: Shape, shape: Shape) -> Form:
        numel = torch.Size(shape).numel()
        if given[: len(shape)] == shape:
            return cls(False, given[len(shape) :], shape)
        if given[:1] == (numel,):
            return cls(True, given[1:], shape)
        raise ValueError(
            f"{operator}: expected a tensor of shape {shape}, or its vec of length {numel}, with "
            f"any batch behind it; got {given}"
        )

    def folded(self, x: Tensor) -> Tensor:
        """The tensor in the operator's dimensions, and one more if there is a batch."""
        return x.reshape(*self.shape, -1) if self.columns is not None else x.reshape(self.shape)

    def unfolded(self, y: Tensor) -> Tensor:
        """A result in the form of the tensor that was given."""
        shape = y.shape if self.columns is None else y.shape[:-1]
        lead = (shape.numel(),) if self.is_vector else shape
        return y.reshape(*lead, *self.batch)

    @property
    def columns(self) -> int | None:
        """The number of columns, or None without a batch."""
        return torch.Size(self.batch).numel() if self.batch else None


def vec(x: Tensor) -> Tensor:
    """The values of a tensor in one dimension, the last index running fastest.

    >>> vec(torch.tensor([[1, 2], [3, 4]]))
    tensor([1, 2, 3, 4])
    """
    return x.reshape(-1)
