"""Shards as spread tensors: the same part and the same layout, with the shape of the whole."""

from __future__ import annotations

import torch

from tessel.core import boxes
from tessel.core.layout import Cut, Layout
from tessel.core.partition import Partition
from tessel.distributed.shardings import Sharding, check_known, state_of
from tessel.distributed.shards import Shard, unmarked
from tessel.tensor import Tensor
from tessel.tensor.create import owners
from tessel.tensor.tensor import converters
from tessel.transport import kept_in_job


def spread_of(shard: Shard, partition: Partition) -> Tensor:
    """The spread tensor of a shard, on a grid of the workers that have its others.

    Nothing is asked of the others: the mark says how long the whole is. A parameter that meets a
    spread tensor in a torch function takes part in this form.
    """
    sharding = state_of(shard)
    check_known(sharding, "a shard that meets a spread tensor")
    assert isinstance(sharding, Sharding)
    if sharding.partition.ranks != partition.ranks:
        raise ValueError(
            f"{sharding} meets a tensor that is spread on {partition}; both must be spread over "
            f"the same workers in the same order"
        )
    if sharding.size is None:
        raise ValueError(
            f"{sharding}, of which the length of the whole is not known, meets a spread tensor; "
            f"make it one first, by tessel.from_local(x)"
        )
    part = unmarked(shard)
    return Tensor(part, _layout(partition, sharding.dim, tuple(part.shape), sharding.size))


@kept_in_job
def _layout(partition: Partition, dim: int, shape: tuple[int, ...], size: int) -> Layout:
    """All axes of the grid split the dimension, one after the other: so workers stay in order."""
    every = tuple(range(partition.dim))
    cuts = [Cut((), ((0, length),)) for length in shape]
    cuts[dim] = Cut(every, boxes.balanced(size, partition.size))
    return Layout(partition, (*shape[:dim], size, *shape[dim + 1 :]), tuple(cuts))


def _owner(shard: torch.Tensor) -> tuple[torch.Tensor, Partition]:
    """The part of a shard, and the workers on a grid that splits its dimension."""
    sharding = state_of(shard)
    check_known(sharding, "tessel.from_local")
    assert isinstance(sharding, Sharding)
    sizes = [sharding.partition.size if dim == sharding.dim else 1 for dim in range(shard.ndim)]
    return unmarked(shard), sharding.partition.create_cartesian_topology_partition(sizes)


converters[Shard] = spread_of
owners[Shard] = _owner
