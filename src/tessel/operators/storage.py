"""Storage: the part of each parameter that a worker stores, and the part that a step needs."""

from __future__ import annotations

from itertools import product
from math import prod

from tessel.core import boxes
from tessel.core.layout import Cut, Layout
from tessel.core.partition import Partition
from tessel.operators.layouts import alike, box_of, undivided
from tessel.operators.leaf import Leaf
from tessel.operators.planning import Local, OperatorPlan
from tessel.operators.tasks import OperatorTask

Storage = dict[Leaf, Layout]


def leaves_of(task: OperatorTask) -> tuple[Leaf, ...]:
    """The leaves with parameters that a task uses."""
    return getattr(task.actor, "leaves", ())


def whole(leaf: Leaf, here: Layout) -> Layout:
    """The layout of a parameter that every worker of a grid has whole."""
    shape = leaf.parameter_shape
    assert shape is not None
    return Layout.whole(here.partition, shape)


def needed(leaf: Leaf, task: OperatorTask, here: Layout) -> Layout:
    """The layout in which workers need a parameter for a task on a tensor with this layout."""
    shape = leaf.parameter_shape
    assert shape is not None
    if task.terms:
        return whole(leaf, here)
    cuts = (
        Cut.whole(length) if dim is None else here.cuts[task.dims[dim]]
        for dim, length in zip(leaf.parameter_dims, shape, strict=True)
    )
    return Layout(here.partition, shape, tuple(cuts))


def storage_of(plan: OperatorPlan) -> Storage:
    """The layout of each parameter: the one in which it is needed first."""
    found: Storage = {}
    for step in plan.every_step():
        for task in step.group if isinstance(step, Local) else ():
            for leaf in leaves_of(task):
                if leaf not in found:  # later uses get it from there, by a movement
                    used = needed(leaf, task, step.before)
                    lengths = enumerate(used.shape)
                    # If some worker needs all of it anyway, splitting would only cost messages.
                    is_all = all(length == 1 or undivided(used, dim) for dim, length in lengths)
                    found[leaf] = whole(leaf, used) if is_all else used
    return found


def parameters_sent(stored: Layout, used: Layout, worker: int) -> tuple[int, int]:
    """The number of values of a parameter that a worker sends to others, and of messages.

    Workers that differ along other axes than those that split `stored` have copies, and each takes
    from the nearest one: so values come from workers along these axes only.
    """
    if alike(stored, used):
        return 0, 0
    own, P = box_of(stored, worker), used.partition
    along = [axis for cut in stored.cuts for axis in cut.axes]
    if stored.partition.shape == P.shape:
        # On one grid the dimensions can be counted one by one, which costs little on many workers.
        split = {axis for cut in used.cuts for axis in cut.axes}
        takers = numel = prod(P.shape[axis] for axis in {*along} - split)
        for dim, cut in enumerate(used.cuts):
            free = [axis for axis in cut.axes if axis in along]
            common = [
                boxes.overlap(own[dim], box_of(used, there)[dim])
                for there in _neighbours(P, worker, free)
            ]
            lengths = [stop - start for start, stop in (each for each in common if each)]
            takers, numel = takers * len(lengths), numel * sum(lengths)
    else:
        everyone = _neighbours(stored.partition, worker, along)
        taken = [boxes.common_volume(own, box_of(used, there)) for there in everyone]
        takers, numel = sum(count > 0 for count in taken), sum(taken)
    stays = boxes.common_volume(own, box_of(used, worker))
    return numel - stays, takers - (stays > 0)


def _neighbours(partition: Partition, worker: int, axes: list[int]) -> list[int]:
    """All workers that differ along these axes only, including this one."""
    coordinates = list(partition.coordinates(worker) or ())
    found = []
    for at in product(*(range(partition.shape[axis]) for axis in axes)):
        for axis, coordinate in zip(axes, at, strict=True):
            coordinates[axis] = coordinate
        found.append(partition.worker_at(coordinates))
    return found
