"""The shape of a user's tensor for an operator: in its dimensions or as a vector."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.operators.space import Shape


class InputShape:
    """The form of a user's tensor: the operator's dimensions or a vector, with a batch or not.

    Args:
        is_vector: whether the operator's dimensions are one.
        batch: the shape of the batch.
        shape: the operator's dimensions, on this worker.

    Attributes:
        columns: the number of columns of the batch, or None without one.
    """

    def __init__(self, is_vector: bool, batch: Shape, shape: Shape) -> None:
        self.is_vector, self.batch, self.shape = is_vector, batch, shape
        self.columns = torch.Size(batch).numel() if batch else None

    @classmethod
    def of(cls, operator: Any, x: Tensor, shape: Shape) -> InputShape:
        """The form of a tensor; ValueError if it has none."""
        space = operator.domain
        if x.dtype != space.dtype:
            raise ValueError(f"{operator}: expected a tensor of {space.dtype}, got {x.dtype}")
        return cls.of_shapes(operator, {0: tuple(x.shape)}, {0: shape})[0]

    @classmethod
    def of_shapes(
        cls, operator: Any, given: dict[int, Shape], shapes: dict[int, Shape]
    ) -> dict[int, InputShape]:
        """The form for all workers: a small part alone may be ambiguous."""
        some: dict[int, InputShape] = {}
        for worker, shape in shapes.items():
            numel = torch.Size(shape).numel()
            has_dims, has_numel = (given[worker][: len(lead)] == lead for lead in (shape, (numel,)))
            if not has_dims and not has_numel:
                where = f", worker {worker}" if len(shapes) > 1 else ""
                raise ValueError(
                    f"{operator}{where}: expected a tensor of shape {shape}, or its vec of length "
                    f"{numel}, with any batch after it; got {given[worker]}"
                )
            some[worker] = cls(not has_dims, (), shape)
        # A part of shape (n, 1) looks like its vec with a batch of one: the other workers decide.
        is_vector = any(form.is_vector for form in some.values())
        for worker, shape in shapes.items():
            lead = 1 if is_vector else len(shape)
            if is_vector and given[worker][:1] != (torch.Size(shape).numel(),):
                raise ValueError(
                    f"{operator}: some workers pass a vec and others a tensor with its dimensions: "
                    f"{given}"
                )
            some[worker] = cls(is_vector, given[worker][lead:], shape)
        return some

    def folded(self, x: Tensor) -> Tensor:
        """The tensor in the operator's dimensions, and one more if there is a batch."""
        return x.reshape(*self.shape, -1) if self.columns is not None else x.reshape(self.shape)

    def unfolded(self, y: Tensor) -> Tensor:
        """A result in the form of the tensor that was given."""
        shape = y.shape if self.columns is None else y.shape[:-1]
        lead = (shape.numel(),) if self.is_vector else shape
        return y.reshape(*lead, *self.batch)


def vec(x: Tensor) -> Tensor:
    """The values of a tensor in one dimension, the last index running fastest.

    For an operator that was written for a `vec` whose first index runs fastest, pass its factors to
    `kron` with `order="julia"`; tensors and their `vec` stay as they are.

    >>> vec(torch.tensor([[1, 2], [3, 4]]))
    tensor([1, 2, 3, 4])
    """
    return x.reshape(-1)
