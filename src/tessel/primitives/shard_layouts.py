"""Layouts of shards: tensors that a row of workers splits along one dimension."""

from __future__ import annotations

from collections.abc import Mapping

from tessel.core import boxes
from tessel.core.agreement import same
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.partition import Partition
from tessel.transport import kept_in_job


@kept_in_job
def shard_layout(partition: Partition, shape: Shape, dim: int) -> Layout:
    """Balanced shards along one dimension of a tensor of this global shape.

    On a grid all axes split the dimension, one after the other, so that workers stay in order.

    >>> import tessel
    >>> shard_layout(tessel.world(), (4, 6), 1).local_shape
    (4, 6)
    """
    cuts = [Cut.whole(length) for length in shape]
    cuts[dim] = Cut(tuple(range(partition.dim)), boxes.balanced(shape[dim], partition.size))
    return Layout(partition, shape, tuple(cuts))


def layout_of_parts(
    partition: Partition, shapes: Mapping[int, Shape], dim: int, size: int | None, label: str
) -> Layout:
    """The layout of a tensor that a row of workers splits along one dimension.

    Args:
        partition: the workers.
        shapes: the shapes of all parts, by worker.
        dim: the dimension that is split.
        size: the length of the whole along it if parts are balanced; None if they may have any
            lengths.
        label: the beginning of the ValueError if the parts do not fit together.
    """
    if size is not None:
        return layout_of_shards(partition, shapes, dim, size, label)
    others = {w: shapes[w][:dim] + shapes[w][dim + 1 :] for w in partition.ranks}
    same(others, f"shape (but for dim {dim})", label)
    intervals = boxes.consecutive(shapes[worker][dim] for worker in partition.ranks)
    first = shapes[partition.ranks[0]]
    cuts = [Cut((), ((0, length),)) for length in first]
    cuts[dim] = Cut((0,), intervals)
    return Layout(partition, (*first[:dim], intervals[-1][1], *first[dim + 1 :]), tuple(cuts))


def layout_of_shards(
    partition: Partition,
    shapes: Mapping[int, Shape],
    dim: int,
    size: int | None,
    label: str,
    name: str = "a tensor",
    unit: str = "in all",
) -> Layout:
    """The layout of balanced shards, whose lengths may determine that of the whole.

    Args:
        partition, shapes, dim, size, label: as for `layout_of_parts`.
        name: the name of the tensor in errors.
        unit: the unit of the size in errors.
    """
    layout = layout_of_parts(partition, shapes, dim, None, label)
    size = layout.shape[dim] if size is None else size
    parts = boxes.balanced(size, partition.size)
    if layout.cuts[dim].intervals != parts:
        expected, got = (
            [stop - start for start, stop in each] for each in (parts, layout.cuts[dim].intervals)
        )
        raise ValueError(
            f"{label}: expected balanced shards of {name}, {size} {unit}, {expected} on workers "
            f"{list(partition.ranks)}, got {got}"
        )
    return layout
