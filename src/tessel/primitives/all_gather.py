"""AllGather and its adjoint, ReduceScatter."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index as as_int

from tessel.core.agreement import same
from tessel.core.layout import Layout, Shape
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.primitives.shard_layouts import layout_of_parts, shard_layout
from tessel.primitives.slices import SliceMovement


class _AlongDim(SliceMovement):
    """Slices along one axis of the partition, tensors along one dimension."""

    def __init__(self, P_x: Partition, axis: int, dim: int) -> None:
        super().__init__(P_x, [axis])
        self.dim = as_int(dim)

    @property
    def axis(self) -> int:
        """The axis of the partition."""
        return self._axes[0]

    def _dim(self, ndim: int) -> int:
        if not -ndim <= self.dim < ndim:
            raise ValueError(f"{self!r}: dim {self.dim} is out of range for {ndim} dimensions")
        return self.dim % ndim

    def extra_repr(self) -> str:
        return f"{self.P_x}, axis {self.axis}, dim {self.dim}"


class AllGather(_AlongDim):
    """Concatenate the tensors along an axis of the partition along a dimension, on every worker.

    Forward:  y_k = (x_0, x_1, …) for all k.    Adjoint:  a `ReduceScatter`.

    Args:
        P_x: the workers.
        axis: the axis of the partition whose workers hold the parts, of any lengths.
        dim: the dimension of the tensor along which the parts are concatenated.

    >>> import tessel, torch
    >>> tessel.nn.AllGather(tessel.world(), axis=0, dim=0)(torch.ones(2))
    tensor([1., 1.])
    """

    def slice_operator(self, row: Partition, shapes: Mapping[int, Shape]) -> Move:
        dim = self._dim(len(shapes[row.ranks[0]]))
        parts = layout_of_parts(row, shapes, dim, None, repr(self))
        return Move(parts, Layout.whole(row, parts.shape))

    @property
    def H(self) -> ReduceScatter:
        """The adjoint, for parts of balanced lengths."""
        return ReduceScatter(self.P_x, self.axis, self.dim)


class ReduceScatter(_AlongDim):
    """Sum the tensors along an axis of the partition; each worker keeps a balanced part of it.

    Forward:  y_k = (Σ_l x_l)[part k].    Adjoint:  an `AllGather`.

    Args:
        P_x: the workers.
        axis: the axis of the partition to sum over; tensors along it have the same shape.
        dim: the dimension along which the sum is split.

    >>> import tessel, torch
    >>> tessel.nn.ReduceScatter(tessel.world(), axis=0, dim=0)(torch.ones(2))
    tensor([1., 1.])
    """

    def slice_operator(self, row: Partition, shapes: Mapping[int, Shape]) -> Move:
        shape = same({worker: shapes[worker] for worker in row.ranks}, "shape", repr(self))
        # the adjoint of an all-gather of balanced parts, which sums the gradients of its copies
        return Move(shard_layout(row, shape, self._dim(len(shape))), Layout.whole(row, shape)).H

    @property
    def H(self) -> AllGather:
        """The adjoint."""
        return AllGather(self.P_x, self.axis, self.dim)
