"""Shards as spread tensors: the same part and the same layout, with the shape of the whole."""

from __future__ import annotations

import torch

from tessel.core import boxes
from tessel.core.agreement import agree, entered
from tessel.core.layout import Layout
from tessel.distributed.group import row_of
from tessel.distributed.shardings import Sharding, UnknownSharding
from tessel.primitives.shard_layouts import layout_of_parts
from tessel.tensor import Tensor
from tessel.tensor.create import Where


def agreed_part(part: torch.Tensor, sharding: Sharding, call: str) -> Tensor:
    """The spread tensor of a shard, after the workers have exchanged their lengths.

    If the length of the whole is unknown, these may be any. If it is known, a shard can also be
    spread without a message: `Tensor(part, sharding.layout(part.shape))`.

    Args:
        part: the shard as a plain tensor.
        sharding: its sharding.
        call: the call in the words of its user.
    """
    row = sharding.partition
    label = f"{call} of {sharding}"
    [(shapes, meta)], _ = agree(row, label, part)
    layout = layout_of_parts(row, shapes, sharding.dim, sharding.size, label)
    part = entered(part, meta)
    return Tensor(part.view_as(part), layout)


def grid_of(part: torch.Tensor, sharding: Sharding) -> Where:
    """The layout or grid of a shard for `tessel.from_local`: a grid that splits its dimension."""
    if sharding.size is not None:
        return sharding.layout(tuple(part.shape))
    sizes = [sharding.partition.size if dim == sharding.dim else 1 for dim in range(part.ndim)]
    return sharding.partition.create_cartesian_topology_partition(sizes)


def contradiction(state: Sharding | UnknownSharding, where: Where | None) -> str:
    """Why a tensor cannot be the part that its user says it is; an empty string if it can."""
    if isinstance(state, UnknownSharding):
        return f"tessel.from_local: {state.remedy}"
    if where is None:
        return ""
    partition = where.partition if isinstance(where, Layout) else where
    if isinstance(where, Layout):
        split = [dim for dim, cut in enumerate(where.cuts) if len(cut.intervals) > 1]
    else:
        split = [axis for axis, size in enumerate(partition.shape) if size > 1]
    if partition.ranks == state.partition.ranks and {*split} <= {state.dim}:
        return ""
    return (
        f"tessel.from_local over {where} of {state}, which says otherwise; leave out `where`, and "
        f"write x.spread().move_to(where) to have it there"
    )


def sharding_within(layout: Layout) -> Sharding | None:
    """The sharding of the part of a spread tensor over a row of its workers; None if whole.

    Parts that are no shards raise ValueError on all workers, since all know the layout.
    """
    row = row_of(layout.partition)
    split = [dim for dim, cut in enumerate(layout.cuts) if len(cut.intervals) > 1]
    if row.size == 1:  # the axis tells which dimension would be split over more workers
        split = [dim for dim, cut in enumerate(layout.cuts) if cut.axes]
        split = split if len(split) == 1 else []
    if not split and layout.is_whole:
        return None
    axes = [axis for axis, size in enumerate(layout.partition.shape) if size > 1]
    for dim in split if len(split) == 1 else ():
        cut, size = layout.cuts[dim], layout.shape[dim]
        in_order = [axis for axis in cut.axes if axis in axes] == axes
        if in_order and cut.intervals == boxes.balanced(size, row.size):
            return Sharding(dim, row, size)
    raise ValueError(
        f"x.shard() of {layout}: a shard is split along one dimension, into balanced parts, over "
        "all workers in their order; move it to such a layout first, with "
        "x.move_to(tessel.Layout.split(P, x.shape, [0, None, ...])) on a row P of these workers"
    )
