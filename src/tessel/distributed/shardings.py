"""Sharding: the property of a tensor that is one worker's shard of a larger one.

Shards keep it in torch's functions; if the sharding of a result does not follow from the function,
it is lost: the result has an `UnknownSharding`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from tessel.core import boxes
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.primitives.shard_layouts import shard_layout
from tessel.transport import kept_in_job

ATTRIBUTE = "_tessel_sharding"


@dataclass(frozen=True)
class Sharding:
    """The sharding of a shard: worker k of `partition` has the k-th part along dimension `dim`.

    Args:
        dim: the dimension that is split, counted from the front.
        partition: the workers, in one row.
        size: the length of the dimension of the whole tensor, split into balanced parts; None if
            unknown.
    """

    dim: int
    partition: Partition
    size: int | None = None

    @classmethod
    @kept_in_job  # each call of a parallel layer asks for it
    def of(cls, layout: Layout) -> Sharding | None:
        """The sharding of balanced parts over a row of workers; None if nothing is split."""
        dim = next((dim for dim, cut in enumerate(layout.cuts) if cut.axes), None)
        return None if dim is None else cls(dim, layout.partition, layout.shape[dim])

    @property
    def interval(self) -> boxes.Interval | None:
        """The interval of this worker's part, or None if the size is unknown or it has no part."""
        place = self.partition.rank
        if self.size is None or place is None:
            return None
        return boxes.balanced_part(self.size, self.partition.size, place)

    def layout(self, shape: Shape, partition: Partition | None = None) -> Layout:
        """The layout of the whole tensor, of which this worker has a shard of this shape.

        Args:
            shape: the shape of the shard.
            partition: the same workers in the same order, on any grid; None for the row of them.
        """
        workers = self.partition if partition is None else partition
        if workers.ranks != self.partition.ranks:
            raise ValueError(
                f"{self} cannot be combined with a tensor spread over {workers}; both must be "
                "spread over the same workers in the same order"
            )
        if self.size is None:
            raise ValueError(
                f"{self} cannot be combined with a spread tensor, since the length of the whole "
                "is unknown; convert it first, with x.spread() or tessel.spread(x, where)"
            )
        whole = (*shape[: self.dim], self.size, *shape[self.dim + 1 :])
        layout = shard_layout(workers, whole, self.dim)
        if workers.active and layout.local_shape != shape:
            raise ValueError(
                f"{self} has {layout.local_shape[self.dim]} of them on worker "
                f"{workers.ranks[workers.rank or 0]}, got a tensor of shape {shape}; register its "
                "sharding with tessel.register_parallel_dim(x, dim)"
            )
        return layout

    def merged(self, other: Sharding) -> Sharding | None:
        """The sharding of a tensor that has both; None if they contradict each other."""
        known = self if self.size is not None else other
        sizes = {self.size, other.size} - {None}
        alike = self.dim == other.dim and self.partition.ranks == other.partition.ranks
        return known if alike and len(sizes) < 2 else None

    def at(self, dim: int) -> Sharding:
        """The same sharding along another dimension."""
        return self if dim == self.dim else replace(self, dim=dim)

    def after(self, layout: Layout) -> Sharding | None:
        """The sharding of a result in this layout, over as many workers; None if not split."""
        split = (dim for dim, cut in enumerate(layout.cuts) if len(cut.intervals) > 1)
        dim = next(split, None)
        if dim is None:
            return None
        if self.size is None or self.partition.rank is None:
            return Sharding(dim, self.partition)
        if self.partition.size == 1:
            return Sharding(dim, self.partition, layout.local_shape[dim])
        size = layout.shape[dim]
        # the size alone determines where parts begin, so they must be balanced
        balanced = layout.cuts[dim].intervals == boxes.balanced(size, self.partition.size)
        return Sharding(dim, self.partition, size if balanced else None)

    def __str__(self) -> str:
        size = "" if self.size is None else f", {self.size} long as a whole,"
        return f"a shard along dim {self.dim}{size} over workers {self.partition.listing}"


@dataclass(frozen=True)
class UnknownSharding:
    """The state of a tensor that was computed from shards in a way that left its sharding unknown.

    Args:
        function: the name of the function that lost the sharding.
        why: the reason, as the end of a sentence, or an empty string.
        partition: the workers of the shards.
    """

    function: str
    why: str = ""
    partition: Partition | None = None

    def __str__(self) -> str:
        return f"of a sharding that was lost in {self._where}"

    @property
    def _where(self) -> str:
        return f"`{self.function}` {self.why}" if self.why else f"`{self.function}`"

    @property
    def remedy(self) -> str:
        """What happened, and what the user can write instead."""
        return (
            f"its sharding was lost in {self._where}, so it is unknown whether it is a shard, and "
            "along which dimension; write x = tessel.register_parallel_dim(x, dim) after that, "
            "with dim=None if it is whole on every worker or a number of this worker alone, or x "
            "= tessel.distributed.gather(x) before"
        )


State = Sharding | UnknownSharding | None
ShardingValues = tuple[int | str, str | tuple[int, ...], int | tuple[int, ...] | None]


def in_values(state: Sharding | UnknownSharding) -> ShardingValues:
    """A state as numbers and strings, as files that torch loads by default may contain."""
    if isinstance(state, Sharding):
        return state.dim, state.partition.ranks, state.size
    return state.function, state.why, None if state.partition is None else state.partition.ranks


def of_values(values: ShardingValues) -> Sharding | UnknownSharding:
    """The state that was written as these values; its workers need not exist."""
    first, second, third = values
    if isinstance(first, int):
        assert isinstance(second, tuple) and not isinstance(third, tuple)
        return Sharding(first, silent_row(second), third)
    assert isinstance(second, str)
    return UnknownSharding(first, second, silent_row(third) if isinstance(third, tuple) else None)


def silent_row(ranks: Iterable[int]) -> Partition:
    """A row of workers that never communicates: no group is made, and they need not exist."""
    ranks = tuple(ranks)
    partition = Partition.__new__(Partition)
    partition.__setstate__({"ranks": ranks, "shape": (len(ranks),)})
    return partition


def state_of(x: Any) -> State:
    """The sharding of a tensor, possibly unknown, or None for a tensor without one."""
    state: State = getattr(x, ATTRIBUTE, None)
    if state is not None or not torch._C._are_functorch_transforms_active() or not is_wrapped(x):
        return state
    # the wrapper that a transform puts around a tensor has no attributes; the tensor inside has
    state = state_of(functorch.get_unwrapped(x))
    if not isinstance(state, Sharding) or not functorch.is_batchedtensor(x):
        return state
    batch = functorch.maybe_get_bdim(x)  # a dimension that the wrapper hides
    if batch == state.dim:
        return UnknownSharding("vmap", "over the dimension that is split", state.partition)
    return state.at(state.dim - (batch < state.dim))


def is_wrapped(x: Any) -> bool:
    """Whether a tensor is the wrapper of a transform of `torch.func` around another."""
    return isinstance(x, Tensor) and (
        functorch.is_gradtrackingtensor(x) or functorch.is_batchedtensor(x)
    )


def describe(state: State) -> str:
    """Describe a state in words, for errors."""
    return "not registered as a shard" if state is None else str(state)


def check_known(state: State, label: str) -> None:
    """Raise ValueError, beginning with `label`, if a sharding was lost."""
    if isinstance(state, UnknownSharding):
        raise ValueError(f"{label}: {state.remedy}")
