"""The sum over workers, as an operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tessel import transport
from tessel.agreement import Claim, Meeting, Terms, admit
from tessel.layout import Layout
from tessel.linop import LinearOperator
from tessel.move import Move
from tessel.operators.space import Shape, checked_dtype
from tessel.partition import Partition, world
from tessel.shared import Spread, even
from tessel.transport import kept_in_job


class ParReduce:
    """The sum of all workers' tensors, of any shape, as one shared value.

    Every worker has the sum and may derive it: the gradient of `sum(R * x)` is one everywhere, on
    any number of workers. The adjoint lets every worker use a shared value as its own; nothing
    moves then.

    Args:
        T: a dtype of torch.
        partition: the workers; all of the job by default.

    >>> import tessel, torch
    >>> tessel.ParReduce(torch.float32) * torch.ones(2)
    tensor([1., 1.])
    """

    def __init__(self, T: Any, partition: Partition | None = None) -> None:
        self.dtype = checked_dtype("ParReduce", T)
        self.partition = world() if partition is None else partition
        self.is_adjoint = False
        self._group = transport.group_of(self.partition.ranks)
        self._meeting = Meeting(self._group, repr(self), self.partition.ranks, self._conclude)

    @property
    def H(self) -> ParReduce:
        other = ParReduce(self.dtype, self.partition)
        other.is_adjoint = not self.is_adjoint
        other._meeting = Meeting(self._group, repr(other), self.partition.ranks, other._conclude)
        return other

    def __mul__(self, x: Tensor) -> Tensor:
        return self(x)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.partition.active:
            return x.clone()
        operator, terms = self._meeting.reach(Claim.of(x))
        self._group.number_call()
        return operator.apply(even(admit(x, terms, True), terms))

    def _conclude(self, shapes: dict[int, Shape], terms: Terms) -> tuple[LinearOperator, Terms]:
        if terms.dtype != self.dtype:
            raise ValueError(f"{self}: expected tensors of {self.dtype}, got {terms.dtype}")
        first, expected = next(iter(shapes.items()))
        for worker, shape in shapes.items():
            if shape != expected:
                raise ValueError(
                    f"{self}: tensors of one shape are needed, worker {first} has {expected}, "
                    f"worker {worker} has {shape}"
                )
        return _reducing(self.partition, expected, self.is_adjoint), terms

    def __repr__(self) -> str:
        adjoint = ".H" if self.is_adjoint else ""
        return f"ParReduce({self.dtype}, {self.partition}){adjoint}"


@kept_in_job
def _reducing(partition: Partition, shape: Shape, is_adjoint: bool) -> LinearOperator:
    separate = Layout.whole(partition, shape)
    shared = Layout.whole(partition, shape, shared=True)
    return Spread(shared, separate) if is_adjoint else Move(separate, shared)
