"""The sum over workers, as an operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

from torch import Tensor

from tessel.core.agreement import Agreement, TensorMeta, agree, entered, same
from tessel.core.layout import Layout
from tessel.core.linop import LinearOperator
from tessel.core.move import Move
from tessel.core.partition import Partition, world
from tessel.core.shared import Replicate
from tessel.operators.algebra import ParOperator
from tessel.operators.input_shape import InputShape
from tessel.operators.leaf import Leaf
from tessel.operators.parameters import Parameters
from tessel.operators.space import Shape, TensorSpace, checked_dtype, checked_length


class ParReduce(Leaf):
    """The sum of all workers' tensors as one shared value.

    Every worker has the sum and may differentiate it: the gradient of `sum(R * x)` is one
    everywhere, on any number of workers. The adjoint lets every worker use a shared value as its
    own, and moves nothing. The operator acts on each worker's tensor, also in products with
    operators that are not distributed: `R @ A` sums the results of A.

    Args:
        T: a dtype of torch.
        shape: the shape of the tensors; by default any, in a product that of the adjacent factor.
        partition: the workers; by default all of the job.

    >>> import tessel, torch
    >>> tessel.ParReduce(torch.float32) * torch.ones(2)
    tensor([1., 1.])
    """

    def __init__(
        self, T: Any, shape: Sequence[int] | None = None, partition: Partition | None = None
    ) -> None:
        self.is_sized = shape is not None
        lengths = tuple(checked_length("ParReduce", "each length", n) for n in shape or ())
        self.source = self.target = TensorSpace(lengths, checked_dtype("ParReduce", T))
        self.partition = world() if partition is None else partition
        self.partition.prepare()

    def __getstate__(self) -> dict[str, Any]:
        """The state without attributes of this process."""
        return {k: v for k, v in self.__dict__.items() if k != "_agreement"}

    def sized(self, shape: Shape) -> Self:
        if self.is_sized:
            return self
        new = type(self)(self.source.dtype, shape, self.partition)
        return new.H if self.is_adjoint else new

    @property
    def mixes(self) -> tuple[bool, ...]:
        return (False,) * len(self.source.shape)

    def apply(self, x: Tensor, theta: Parameters | None = None) -> Tensor:
        return super().apply(x, theta) if self.is_sized else self.act(x, 0, None)

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        if not self.partition.active:
            return x.clone()
        # Copies of a sum are one shared value: if some worker needs its gradient, all do.
        self.partition.prepare()  # for a copy
        operator, meta = self._agreement.agree_on(x)
        return operator.apply(entered(x, meta))

    def try_on(self, device: str) -> None:
        """Do nothing: torch adds all numbers that can be moved, and no message is sent to try."""

    @property
    def reductions(self) -> tuple[ParReduce, ...]:
        return (self,)

    def check_together(self, operator: ParOperator, x: Tensor) -> None:
        """Raise on all workers if the tensors for an operator that contains this one do not fit."""
        if not self.partition.active or not self.is_sized:
            return
        [(shapes, meta)], _ = agree(self.partition, f"{operator!r}", x)
        if meta.dtype != operator.domain.dtype:
            raise ValueError(
                f"{operator}: expected a tensor of {operator.domain.dtype}, got {meta.dtype}"
            )
        InputShape.of_shapes(operator, shapes, dict.fromkeys(shapes, operator.domain.shape))
        same(shapes, "shape", f"{operator}")

    @cached_property
    def _agreement(self) -> Agreement[tuple[LinearOperator, TensorMeta]]:
        def conclude(
            shapes: dict[int, Shape], meta: TensorMeta
        ) -> tuple[LinearOperator, TensorMeta]:
            if meta.dtype != self.source.dtype:
                raise ValueError(
                    f"{self}: expected tensors of {self.source.dtype}, got {meta.dtype}"
                )
            shape: Shape = same(shapes, "shape", f"{self}")
            separate = Layout.whole(self.partition, shape)
            shared = Layout.whole(self.partition, shape, shared=True)
            return Replicate(shared, separate) if self.is_adjoint else Move(separate, shared), meta

        return Agreement(self.partition.group, f"{self!r}", self.partition.ranks, conclude)

    def __repr__(self) -> str:
        size = f"{self.source}" if self.is_sized else f"{self.source.dtype}"
        return f"ParReduce({size}, {self.partition}){'.H' if self.is_adjoint else ''}"
