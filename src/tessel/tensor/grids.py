"""Operands on different grids of the same workers are moved to one of the grids."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

from tessel.core import boxes
from tessel.core.layout import Cut, Layout
from tessel.core.partition import Partition
from tessel.tensor.rules.pointwise import is_in_place
from tessel.tensor.table import Arguments, Settings, mapped, spread_among
from tessel.tensor.tensor import Tensor
from tessel.transport import kept_in_job


def on_one_grid(name: str, args: Arguments, kwargs: Settings) -> tuple[Arguments, Settings] | None:
    """The arguments with spread tensors moved to one grid; None if needless or impossible."""
    partition = common_grid(name, args, kwargs)
    if partition is None:
        return None

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or value._layout.partition == partition:
            return value
        return value.move_to(nearest_on(partition, value._layout))

    return mapped(moved, args), mapped(moved, kwargs)


def common_grid(name: str, args: Arguments, kwargs: Settings) -> Partition | None:
    """The grid to which spread tensors on different grids are moved: that of the largest tensor.

    None if there is one grid already, or if tensors are on different workers: then the user must
    choose. A tensor that a function writes into is not moved, since the copy would be changed.
    """
    if name in _WRITE_OTHERS or kwargs.get("out") is not None:
        return None
    in_place = is_in_place(name) or bool(kwargs.get("inplace"))
    found = list(spread_among(args, kwargs))
    partitions = {each._layout.partition for each in found}
    if len(partitions) == 1 or len({frozenset(each.ranks) for each in partitions}) > 1:
        return None
    if in_place and not isinstance(args[0], Tensor):
        return None
    first = args[0] if in_place else max(found, key=lambda each: prod(each._layout.shape))
    return first._layout.partition


_WRITE_OTHERS = frozenset(("batch_norm", "instance_norm"))  # they update running statistics


@kept_in_job
def nearest_on(partition: Partition, layout: Layout) -> Layout:
    """The layout on another grid of the same workers to which the fewest values move.

    None move if the layout can be expressed on the other grid: a dimension can be split in two
    along any axis of two workers.

    >>> import tessel
    >>> row = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> nearest_on(row, tessel.Layout.balanced(tessel.world(), (6,))).local_shape
    (6,)
    """
    axes = [axis for axis, size in enumerate(partition.shape) if size > 1]
    dims = range(len(layout.shape))
    options = []
    for chosen in product((None, *dims), repeat=len(axes)):  # the dimension that each axis splits
        along = [tuple(a for a, d in zip(axes, chosen, strict=True) if d == dim) for dim in dims]
        cuts = []
        for dim in dims:  # in the same parts as before if their number is the same, else balanced
            places = prod(partition.shape[axis] for axis in along[dim])
            intervals = layout.cuts[dim].intervals
            if len(intervals) != places:
                intervals = boxes.balanced(layout.shape[dim], places)
            cuts.append(Cut(along[dim], intervals))
        options.append(Layout.of_cuts(partition, layout.shape, tuple(cuts)))

    def changed(option: Layout) -> tuple[int, int]:
        """How many values workers gain and lose with this layout."""
        gained = lost = 0
        for worker in layout.partition.ranks:
            before, after = layout.box(worker), option.box(worker)
            assert before is not None and after is not None
            kept = boxes.common_volume(before, after)
            gained += boxes.volume(after) - kept
            lost += boxes.volume(before) - kept
        return gained, lost

    return min(options, key=changed)
