"""Repartition: the same tensor in other boxes; scatter and gather are special cases."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tessel.core.layout import Layout, Shape
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.primitives.movement import Movement


class Repartition(Movement):
    """Move a tensor from one partition to another with as many axes, over any workers.

    Axis d of a partition splits dimension d of the tensor. The parts on `P_x` may be of any
    lengths, those on `P_y` are balanced. If both are the same, nothing is sent.

    Forward:  y_s[i] = x_owner(i)[i].    Adjoint:  the reverse movement.

    Args:
        P_x: the partition of the input.
        P_y: the partition of the output.

    >>> import tessel, torch
    >>> P = tessel.world()
    >>> tessel.nn.Repartition(P, P)(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        if P_x.dim != P_y.dim:
            raise ValueError(
                f"a repartition needs two partitions with as many axes, got {P_x} and {P_y}"
            )
        super().__init__(P_x, P_y)

    def operator(self, shapes: Mapping[int, Shape]) -> Move:
        # The global shape consists of sums of the parts' lengths, which all workers know.
        source = Layout.from_local_shapes(self.P_x, shapes)
        return Move(source, Layout.balanced(self.P_y, source.shape))

    @property
    def H(self) -> Repartition:
        """The adjoint, for parts of balanced lengths."""
        return Repartition(self.P_y, self.P_x)


def scatter(x: Tensor, P: Partition, *, out: Tensor | None = None) -> Tensor:
    """Scatter a whole tensor from the first worker of `P` in balanced parts to all of `P`.

    The other workers pass a zero-volume tensor. The adjoint is `gather`. With `out` parts are
    written there, as in all movements.

    >>> import tessel, torch
    >>> tessel.scatter(torch.ones(2), tessel.world())
    tensor([1., 1.])
    """
    return Repartition(_first(P), P)(x, out)


def gather(x: Tensor, P: Partition, *, out: Tensor | None = None) -> Tensor:
    """Assemble the parts of a tensor on the first worker of `P`; others get zero volume.

    The adjoint is `scatter`. With `out` the tensor is written there on the first worker, and the
    others pass `torch.empty(0)`. `tessel.distributed.gather(x, dim)` is a different function, named
    as in torchshard: it concatenates shards along one dimension on all workers of a group.

    >>> import tessel, torch
    >>> tessel.gather(torch.ones(2), tessel.world())
    tensor([1., 1.])
    """
    if not isinstance(P, Partition):
        raise TypeError(
            f"tessel.gather(x, P) puts the parts of a tensor on a grid of workers together and got "
            f"{P!r} for the partition; tessel.distributed.gather(x, dim) puts shards together"
        )
    return Repartition(P, _first(P))(x, out)


def all_gather(x: Tensor, P: Partition, *, out: Tensor | None = None) -> Tensor:
    """Assemble the parts of a tensor on every worker of `P`.

    The copies are separate values: the adjoint sums their gradients over the workers and returns
    each worker its part. With `out` the tensor is written there.

    >>> import tessel, torch
    >>> tessel.all_gather(torch.ones(2), tessel.world())
    tensor([1., 1.])
    """
    return _AllGatherAll(P, P)(x, out)


class _AllGatherAll(Movement):
    def operator(self, shapes: Mapping[int, Shape]) -> Move:
        source = Layout.from_local_shapes(self.P_x, shapes)
        return Move(source, Layout.whole(self.P_y, source.shape))


def _first(P: Partition) -> Partition:
    # on a grid with as many axes, as a repartition needs it
    return Partition(P.ranks[:1], (1,) * P.dim)
