"""AllSumReduce: the sum over slices of a partition, on every worker of the slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tessel.core.agreement import same
from tessel.core.layout import Layout, Shape
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.primitives.slices import SliceMovement


class AllSumReduce(SliceMovement):
    """Sum the tensors of workers that differ only along some axes of a partition.

    Forward:  y_(i,k) = Σ_l x_(i,l) for all k.    The operator is its own adjoint.

    The copies of the sum are separate values: in the backward pass, their gradients are summed over
    the workers. The input is never changed, and never returned itself.

    Args:
        P_x: the workers.
        reduce_dims: the axes of the partition to sum over; tensors may have any dimensions.

    >>> import tessel, torch
    >>> tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, P_x: Partition, reduce_dims: Iterable[int]) -> None:
        super().__init__(P_x, reduce_dims)

    @property
    def reduce_dims(self) -> tuple[int, ...]:
        """The axes over which tensors are summed."""
        return self._axes

    def slice_operator(self, row: Partition, shapes: Mapping[int, Shape]) -> Move:
        shape = same({worker: shapes[worker] for worker in row.ranks}, "shape", repr(self))
        # From separate copies to separate copies: each new copy is the sum of all old ones.
        copies = Layout.whole(row, shape)
        return Move(copies, copies)

    @property
    def H(self) -> AllSumReduce:
        """The adjoint, which is the same."""
        return self
