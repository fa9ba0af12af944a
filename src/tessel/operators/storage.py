"""Storage: which part of each parameter a worker stores, and which a step needs."""

from __future__ import annotations

from itertools import product
from math import prod

from tessel import boxes
from tessel.operators.arrangement import Arrangement, common_numel
from tessel.operators.leaf import Leaf
from tessel.operators.planning import Local, Plan
from tessel.operators.space import Shape
from tessel.operators.tasks import Task, Terms

Storage = dict[Leaf, Arrangement]


def leaves_of(task: Task) -> tuple[Leaf, ...]:
    """The leaves with parameters that a task uses."""
    if isinstance(task.actor, Terms):
        return tuple(leaf for each in task.actor.operators for leaf in each.leaves)
    found: tuple[Leaf, ...] = getattr(task.actor, "leaves", ())
    return found


def whole(leaf: Leaf, here: Arrangement) -> Arrangement:
    """All of a parameter on every worker of a grid."""
    shape = leaf.parameter_shape
    assert shape is not None
    return here.following(shape, (None,) * len(shape))


def needed(leaf: Leaf, task: Task, here: Arrangement) -> Arrangement:
    """What workers need of a parameter to do a task on a tensor that lies so."""
    shape = leaf.parameter_shape
    assert shape is not None
    if isinstance(task.actor, Terms):
        return whole(leaf, here)
    dims = (None if dim is None else task.dims[dim] for dim in leaf.parameter_dims)
    return here.following(shape, tuple(dims))


def storage_of(plan: Plan) -> Storage:
    """Each parameter lies where it is needed first."""
    found: Storage = {}
    for step in plan.every_step():
        for task in step.group if isinstance(step, Local) else ():
            for leaf in leaves_of(task):
                if leaf not in found:
                    used = needed(leaf, task, step.before)
                    found[leaf] = used if _is_worth_splitting(used) else whole(leaf, used)
    return found


def _is_worth_splitting(used: Arrangement) -> bool:
    """Whether no worker would have all anyway."""
    return not all(part.is_whole or part.length == 1 for part in used.parts)


def parameters_sent(stored: Arrangement, used: Arrangement, place: int) -> tuple[int, int]:
    """How many values of a parameter a worker sends to those who need them, in how many messages.

    Workers that differ along other axes than those that split `stored` have copies, and each takes
    from the one beside it: so what is needed comes from workers along these axes only.
    """
    if stored == used:
        return 0, 0
    own = stored.box(place)
    takers, numel = (_on_one_grid if stored.grid == used.grid else _taken)(stored, used, place)
    stays = common_numel(own, used.box(place))
    return numel - stays, takers - (stays > 0)


def _on_one_grid(stored: Arrangement, used: Arrangement, place: int) -> tuple[int, int]:
    """How many take something of a worker's part, and how many values all in all.

    On one grid the dimensions can be counted one by one, which costs little on many workers.
    """
    grid, own = stored.grid, stored.box(place)
    along = {axis for part in stored.parts for axis in part.axes}
    split = {axis for part in used.parts for axis in part.axes}
    takers = numel = prod(grid[axis] for axis in along - split)
    for dim, part in enumerate(used.parts):
        free = [axis for axis in part.axes if axis in along]
        common = [
            boxes.overlap(own[dim], part.interval(used.part_at(dim, there)))
            for there in _neighbours(grid, place, free)
        ]
        lengths = [stop - start for start, stop in (each for each in common if each)]
        takers, numel = takers * len(lengths), numel * sum(lengths)
    return takers, numel


def _taken(stored: Arrangement, used: Arrangement, place: int) -> tuple[int, int]:
    """The same on any two grids, worker by worker."""
    along = [axis for part in stored.parts for axis in part.axes]
    own = stored.box(place)
    everyone = _neighbours(stored.grid, place, along)
    taken = [common_numel(own, used.box(there)) for there in everyone]
    return sum(numel > 0 for numel in taken), sum(taken)


def _neighbours(grid: Shape, place: int, axes: list[int]) -> list[int]:
    """The places of all workers that differ along these axes only, itself included."""
    coordinates = list(boxes.unravel(place, grid))
    found = []
    for at in product(*(range(grid[axis]) for axis in axes)):
        for axis, coordinate in zip(axes, at, strict=True):
            coordinates[axis] = coordinate
        found.append(boxes.ravel(coordinates, grid))
    return found
