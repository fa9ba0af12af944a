"""The four movements of tensor parallelism: copy, reduce, scatter and gather."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index as as_int

from torch import Tensor

from tessel.core.agreement import agree, same
from tessel.core.graph import eagerly
from tessel.core.layout import Layout, Shape
from tessel.core.linop import LinearOperator
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.core.shared import copying, shared_whole
from tessel.distributed.group import row_of
from tessel.distributed.shards import (
    Sharding,
    State,
    as_plain,
    as_shard,
    check_known,
    describe,
    state_of,
    traced_state,
)
from tessel.primitives.movement import Movement
from tessel.primitives.shard_layouts import layout_of_parts, shard_layout
from tessel.transport import kept_in_job


@eagerly
def copy(x: Tensor, partition: Partition | None = None) -> Tensor:
    """Let every worker use a shared value in a computation of its own.

    Forward:  y_k = x, nothing moves.    Adjoint:  x = Σ_k y_k, an all-reduce.

    Nothing is copied in memory: `y` is a view of `x`, so writing into one changes the other.

    Args:
        x: one value, stored by all workers of the group.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> tessel.distributed.copy(torch.ones(2))
    tensor([1., 1.])
    """
    return _sent_whole("copy", x, row_of(partition))


@eagerly
def reduce(x: Tensor, partition: Partition | None = None) -> Tensor:
    """Sum the values of all workers into one shared value.

    Forward:  y = Σ_k x_k, an all-reduce.    Adjoint:  x_k = y, nothing moves.

    Args:
        x: a tensor of the same shape on all workers of the group.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> tessel.distributed.reduce(torch.ones(2))
    tensor([1., 1.])
    """
    return _sent_whole("reduce", x, row_of(partition))


@eagerly
def scatter(x: Tensor, dim: int, partition: Partition | None = None) -> Tensor:
    """Keep this worker's shard of a shared value, registered as one.

    Forward:  y_k = x[part k], nothing moves.    Adjoint:  x = (y_0, y_1, …), an all-gather.

    Args:
        x: one value, stored by all workers of the group.
        dim: the dimension that is split into balanced parts.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> y = tessel.distributed.scatter(torch.ones(2, 3), dim=-1)
    >>> tuple(y.shape), tessel.distributed.get_parallel_dim(y)
    ((2, 3), 1)
    """
    row, state = row_of(partition), traced_state(x)
    along = _number_of("scatter", row, dim)
    y = _movement("scatter", row, along, state)(as_plain(x))
    if not row.active:
        return y
    place = along % x.ndim
    return as_shard(y, Sharding(place, row, x.shape[place]))


@eagerly
def gather(x: Tensor, dim: int | None = None, partition: Partition | None = None) -> Tensor:
    """Concatenate the shards of all workers to one shared value, which has no sharding.

    Forward:  y = (x_0, x_1, …), an all-gather.    Adjoint:  x_k = y[part k], nothing moves.

    The name is that of torchshard. `tessel.gather(x, P)` is a different function: it assembles the
    parts of a tensor on a grid on the first worker, and `tessel.all_gather(x, P)` on all.

    Args:
        x: this worker's shard; without a sharding, of any length along `dim`.
        dim: the dimension that is split; None for that of the sharding.
        partition: the workers; None for those of the sharding, else for the default group.

    >>> import tessel, torch
    >>> y = tessel.distributed.scatter(torch.ones(2, 3), dim=-1)
    >>> tessel.distributed.gather(y).shape
    torch.Size([2, 3])
    """
    if isinstance(dim, Partition):
        raise TypeError(
            "tessel.distributed.gather(x, dim, partition) joins shards along a dimension, but dim "
            "is a partition; pass it as partition=…, or call tessel.all_gather(x, P) for a tensor "
            "on a grid of workers"
        )
    state = state_of(x)
    if partition is None and state is not None:
        partition = state.partition
    row = row_of(partition)
    along = None if dim is None else _number_of("gather", row, dim)
    return _movement("gather", row, along, state)(as_plain(x))


def _number_of(name: str, row: Partition, dim: int) -> int:
    """A dimension as a number; on all workers an error if one has anything else."""
    try:
        return as_int(dim)
    except TypeError as error:
        call = f"tessel.distributed.{name}(x, dim={dim!r}) over {row}"
        agree(row, call)  # others have another text, and raise here too
        raise TypeError(f"{call}: expected dim to be an integer") from error


def _sent_whole(name: str, x: Tensor, row: Partition) -> Tensor:
    """Move a value of the same shape on all workers; a sharding over other workers is kept."""
    state = state_of(x)
    y = _movement(name, row, None, state)(as_plain(x))
    return y if state is None else as_shard(y, state)


class _TensorMovement(Movement):
    """A movement, within one group, of a tensor whose sharding all workers know."""

    def __init__(self, name: str, partition: Partition, dim: int | None, state: State) -> None:
        super().__init__(partition, partition)
        self.name, self.dim, self.state = name, dim, state

    def operator(self, shapes: Mapping[int, Shape]) -> LinearOperator:
        check_known(self.state, f"{self}")
        if self.name == "gather":
            sharding = self.state
            if self.dim is None and sharding is None:
                raise ValueError(f"{self}: the split dimension is unknown; pass it: gather(x, dim)")
            ndim = len(shapes[self.P_x.ranks[0]])
            dim, size = None if self.dim is None else self._place(ndim), None
            if isinstance(sharding, Sharding):
                dim, size = sharding.dim if dim is None else dim, sharding.size
                if (sharding.dim, sharding.partition.ranks) != (dim, self.P_x.ranks):
                    raise ValueError(
                        f"{self}: this contradicts the sharding of the tensor; gather along its "
                        "dimension and over its workers, or register another one with "
                        "tessel.register_parallel_dim"
                    )
            assert dim is not None
            return gathering(layout_of_parts(self.P_x, shapes, dim, size, f"{self}"))
        # all others move a value that must be whole on every worker
        if self.state is not None and not self._is_of_another_group:
            raise ValueError(
                f"{self}: expected a value that is whole on every worker; "
                "tessel.distributed.gather(x) gathers it"
            )
        if self.name == "scatter" and self.state is not None:
            raise ValueError(
                f"{self}: a tensor that is split over two groups has no single sharding; "
                "gather it first"
            )
        shape: Shape = same(dict(shapes), "shape", f"{self}")
        if self.name == "scatter":
            return scattering(self.P_x, shape, self._place(len(shape)))
        return (copying if self.name == "copy" else reducing)(self.P_x, shape)

    def _place(self, ndim: int) -> int:
        """The dimension, counted from the front."""
        assert self.dim is not None
        if not -ndim <= self.dim < ndim:
            raise ValueError(f"{self}: dim {self.dim} is out of range for {ndim} dimensions")
        return self.dim % ndim

    @property
    def _is_of_another_group(self) -> bool:
        """Whether the tensor is a shard over workers of which only this one takes part here."""
        assert isinstance(self.state, Sharding)
        theirs, ours = self.state.partition.ranks, self.P_x.ranks
        return theirs != ours and len({*theirs} & {*ours}) < 2

    def __repr__(self) -> str:
        dim = "" if self.dim is None else f", dim={self.dim}"
        what = describe(self.state)
        if isinstance(self.state, Sharding) and self._is_of_another_group:
            # Workers whose texts differ raise, and here each has a group of its own: so the text
            # names the part, and not the workers.
            row, size = self.state.partition, self.state.size
            part = f"part {row.rank} of {row.size} of {size}"
            what = f"a shard along dim {self.state.dim}, {part}, over another group"
        return f"tessel.distributed.{self.name}(x{dim}) over {self.P_x}, where x is {what}"


_movement = kept_in_job(_TensorMovement)


def reducing(partition: Partition, shape: Shape) -> LinearOperator:
    """The operator from separate values to their sum, a shared value: an all-reduce."""
    return copying(partition, shape).H


@kept_in_job
def scattering(partition: Partition, shape: Shape, dim: int) -> Move:
    """The operator from a whole shared value to balanced shards along a dimension."""
    return Move(shared_whole(partition, shape), shard_layout(partition, shape, dim))


@kept_in_job
def gathering(parts: Layout) -> Move:
    """The operator from parts to the whole, which all of their workers share: an all-gather."""
    return Move(parts, shared_whole(parts.partition, parts.shape))
