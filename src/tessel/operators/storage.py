"""Storage: which part of each parameter a worker stores, and which a step needs."""

from __future__ import annotations

from itertools import product
from math import prod

from tessel import boxes
from tessel.operators.arrangement import Arrangement, Parts
from tessel.operators.leaf import Leaf
from tessel.operators.planning import Local, Plan
from tessel.operators.space import Shape
from tessel.operators.tasks import Task, Terms

Storage = dict[Leaf, tuple[Parts, ...]]


def leaves_of(task: Task) -> tuple[Leaf, ...]:
    """The leaves with parameters that a task uses."""
    if isinstance(task.actor, Terms):
        return tuple(leaf for each in task.actor.operators for leaf in each.leaves)
    found: tuple[Leaf, ...] = getattr(task.actor, "leaves", ())
    return found


def needed(leaf: Leaf, task: Task, here: Arrangement) -> tuple[Parts, ...]:
    """What a worker needs of a parameter to do a task on a tensor that lies so."""
    shape = leaf.parameter_shape
    assert shape is not None
    if isinstance(task.actor, Terms):
        return tuple(Parts(length) for length in shape)
    return tuple(
        Parts(length) if dim is None else here.parts[task.dims[dim]]
        for length, dim in zip(shape, leaf.parameter_dims, strict=True)
    )


def storage_of(plan: Plan) -> Storage:
    """Each parameter lies where it is needed first."""
    found: Storage = {}
    for step in plan.every_step():
        for task in step.group if isinstance(step, Local) else ():
            for leaf in leaves_of(task):
                found.setdefault(leaf, _worth_splitting(needed(leaf, task, step.before)))
    return found


def _worth_splitting(parts: tuple[Parts, ...]) -> tuple[Parts, ...]:
    """The same, or whole parts if some worker would have all anyway."""
    if all(part.is_whole or part.length == 1 for part in parts):
        return tuple(Parts(part.length) for part in parts)
    return parts


def parameters_sent(
    grid: Shape, stored: tuple[Parts, ...], used: tuple[Parts, ...], coordinates: Shape
) -> tuple[int, int]:
    """How many values of a parameter a worker sends to those who need them, in how many messages.

    Workers that differ along other axes than those of `stored` have copies, and each takes from
    the one beside it: so what is needed comes from workers along these axes only.
    """
    if stored == used:
        return 0, 0
    along = {axis for part in stored for axis in part.axes}
    source, target = Arrangement(grid, stored), Arrangement(grid, used)
    own = source.box(coordinates)
    split = {axis for part in used for axis in part.axes}
    takers = numel = prod(grid[axis] for axis in along - split)
    for dim, part in enumerate(used):
        free = [axis for axis in part.axes if axis in along]
        common = [
            boxes.overlap(own[dim], part.interval(target.place(dim, there)))
            for there in _neighbours(grid, coordinates, free)
        ]
        lengths = [stop - start for start, stop in (each for each in common if each)]
        takers, numel = takers * len(lengths), numel * sum(lengths)
    kept = [boxes.overlap(a, b) for a, b in zip(own, target.box(coordinates), strict=True)]
    stays = 0 if None in kept else boxes.volume(tuple(each for each in kept if each))
    return numel - stays, takers - (stays > 0)


def _neighbours(grid: Shape, coordinates: Shape, axes: list[int]) -> list[Shape]:
    """The coordinates of all workers that differ along these axes only, itself included."""
    found = []
    for places in product(*(range(grid[axis]) for axis in axes)):
        there = list(coordinates)
        for axis, place in zip(axes, places, strict=True):
            there[axis] = place
        found.append(tuple(there))
    return found
