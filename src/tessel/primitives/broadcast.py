"""Broadcast and its adjoint, SumReduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessel.core.agreement import same
from tessel.core.layout import Layout, Shape
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.primitives.movement import Movement


class Broadcast(Movement):
    """Copy the tensor of each worker of `P_x` to all workers of `P_y` in its slice.

    The shape of `P_x`, padded with ones on the left, equals that of `P_y` along each axis, or is 1
    there: along these axes `P_y` gets copies. The workers of the two partitions may be the same,
    different or overlapping; the shape of tensors may differ between slices.

    Forward:  y_(i,k) = x_i for all k.    Adjoint:  x_i = Σ_k y_(i,k), a `SumReduce`.

    Args:
        P_x: the workers that send.
        P_y: the workers that receive.

    >>> import tessel, torch
    >>> P = tessel.world()
    >>> tessel.nn.Broadcast(P, P)(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        _kept_axes(P_x, P_y)  # raises unless the partitions fit
        super().__init__(P_x, P_y)

    def operator(self, shapes: Mapping[int, Shape]) -> Move:
        return _broadcast(self.P_x, self.P_y, [shapes[worker] for worker in self.P_x.ranks])

    @property
    def H(self) -> SumReduce:
        """The adjoint."""
        return SumReduce(self.P_y, self.P_x)


class SumReduce(Movement):
    """Sum the tensors of each slice of `P_x` onto one worker of `P_y`: Broadcast's adjoint.

    The shape of `P_y`, padded with ones on the left, equals that of `P_x` along each axis, or is 1
    there: over these axes tensors are summed, so they must have the same shape.

    Forward:  y_i = Σ_k x_(i,k).    Adjoint:  x_(i,k) = y_i for all k, a `Broadcast`.

    Args:
        P_x: the workers that send.
        P_y: the workers that receive the sums.

    >>> import tessel, torch
    >>> P = tessel.world()
    >>> tessel.nn.SumReduce(P, P)(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        _kept_axes(P_y, P_x)  # raises unless the partitions fit
        super().__init__(P_x, P_y)

    def operator(self, shapes: Mapping[int, Shape]) -> Move:
        kept = _kept_axes(self.P_y, self.P_x)
        summed = [axis for axis in range(self.P_x.dim) if axis not in kept]
        rows = self.P_x.rows(summed)
        # Each slice has a sum of its own, and all of its workers the same shape.
        common = [same({w: shapes[w] for w in row}, "shape", repr(self)) for row in rows]
        return _broadcast(self.P_y, self.P_x, common).H

    @property
    def H(self) -> Broadcast:
        """The adjoint."""
        return Broadcast(self.P_y, self.P_x)


def _broadcast(P_x: Partition, P_y: Partition, shapes: Sequence[Shape]) -> Move:
    """The operator that copies a tensor of `shapes[k]` from the k-th worker of `P_x`."""
    # Tensors of different slices may have different shapes, so the only common index space is the
    # one in which they follow each other.
    source = Layout.blocks_along(P_x, tuple(range(P_x.dim)), shapes)
    return Move(source, Layout.blocks_along(P_y, _kept_axes(P_x, P_y), shapes))


def _kept_axes(P_x: Partition, P_y: Partition) -> tuple[int, ...]:
    """The axes of `P_y` that `P_x` has as well; along the others tensors are copied."""
    sizes = (1,) * (P_y.dim - P_x.dim) + P_x.shape
    if len(sizes) != P_y.dim or any(a not in (1, b) for a, b in zip(sizes, P_y.shape, strict=True)):
        raise ValueError(
            f"cannot broadcast {P_x} to {P_y}: the first shape, filled up with ones from the "
            f"left, must be 1 or equal to the second along each axis"
        )
    return tuple(axis for axis, size in enumerate(sizes) if size > 1)
