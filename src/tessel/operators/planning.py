"""Planning: in which order, and where, the tasks of an operator are done on a grid of workers.

A task needs the dimensions whole that it mixes. What can be done where the tensor lies is done
first; then the tensor is rearranged so that the most can be done next, to where it shall end if
that will do. So the number of rearrangements is the least for Fourier transforms of slabs and
pencils, there and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

from tessel.boxes import Interval
from tessel.operators.arrangement import Arrangement, Parts, numel_sent, representatives
from tessel.operators.restriction import ParRestriction
from tessel.operators.tasks import Task, Terms, Waiting, cheapest, grouped

MOST_PLACES = 128  # of more workers, some stand for all


@dataclass(frozen=True)
class Local:
    """Tasks that each worker does with what it has, in one call."""

    before: Arrangement
    after: Arrangement
    group: tuple[Task, ...]


@dataclass(frozen=True)
class Transfer:
    """The tensor is rearranged."""

    before: Arrangement
    after: Arrangement


@dataclass(frozen=True)
class Branches:
    """The results of several plans are added."""

    before: Arrangement
    after: Arrangement
    plans: tuple[Plan, ...]


Step = Local | Transfer | Branches


@dataclass(frozen=True)
class Plan:
    """All steps of an operator on a grid."""

    source: Arrangement
    target: Arrangement
    steps: tuple[Step, ...] = field(repr=False)

    @property
    def num_transfers(self) -> int:
        return sum(isinstance(step, Transfer) for step in self.every_step())

    def every_step(self) -> Iterator[Step]:
        """The steps, those of branches one branch after the other."""
        for step in self.steps:
            if isinstance(step, Branches):
                for plan in step.plans:
                    yield from plan.every_step()
            else:
                yield step


def make_plan(operator: Any, source: Arrangement, target: Arrangement | None) -> Plan:
    """Plan an operator on a tensor that lies so.

    Args:
        operator: what to do.
        source: how its input lies.
        target: how its result shall lie; None to leave it where it is then.
    """
    tasks = tuple(operator.expand(0))
    plan = _plan(tasks, source, target, patient=False)
    if plan.num_transfers and any(_adds_zeros(task) for task in tasks):
        other = _plan(tasks, source, target, patient=True)
        plan = other if other.num_transfers <= plan.num_transfers else plan
    return plan


def _plan(
    tasks: tuple[Task, ...], source: Arrangement, target: Arrangement | None, patient: bool
) -> Plan:
    """Plan tasks; if patient, nothing is put among zeros that has to travel then."""
    waiting = Waiting(tasks)
    steps: list[Step] = []
    here = source
    while True:
        here, done = _drain(waiting, here, target, patient)
        if patient and steps and not done:  # what waits here would wait for ever
            return _plan(tasks, source, target, patient=False)
        steps += done
        if not waiting:
            break
        there = _next(waiting, here, target, patient)
        steps.append(Transfer(here, there))
        here = there
    if target is not None and here != target:
        steps.append(Transfer(here, target))
    end = here if target is None else target
    return Plan(source, end, tuple(_travelling_small(steps)))


def _travelling_small(steps: list[Step]) -> list[Step]:
    """The same steps, but what makes a tensor grow comes after it travelled, where it can."""
    found: list[Step] = []
    for step in steps:
        found.append(step)
        if isinstance(step, Transfer):
            found = _transferred_earlier(found)
    return found


def _transferred_earlier(steps: list[Step]) -> list[Step]:
    """With the transfer at the end of some steps before those that can be done behind it, if the
    tensor is smaller there."""
    there = steps[-1].after
    stay: list[Local] = []
    behind: list[Local] = []
    growth = most = 1.0
    best: tuple[int, list[Local], list[Local], Arrangement] | None = None
    for number in range(len(steps) - 2, -1, -1):
        local = steps[number]
        if not isinstance(local, Local):
            break
        if not _can_follow(local, there) or _is_needed(local, stay):
            stay = [local, *stay]
            continue
        there, behind = _before(local, there), [local, *behind]
        growth *= prod(task.growth for task in local.group)
        if growth > most:
            most, best = growth, (number, stay, behind, there)
    if best is None:
        return steps
    number, stay, behind, there = best
    first = _replayed(stay, steps[number].before)
    here = first[-1].after if first else steps[number].before
    moves = [Transfer(here, there)] if here != there else []
    return [*steps[:number], *first, *moves, *_replayed(behind, there)]


def _is_needed(local: Local, later: list[Local]) -> bool:
    """Whether some later tasks have to come after these."""
    return any(
        task.follows(earlier) for other in later for task in other.group for earlier in local.group
    )


def _replayed(steps: list[Local], here: Arrangement) -> list[Local]:
    """The same tasks on a tensor that lies so."""
    found = []
    for step in steps:
        after = here
        for task in step.group:
            after = _after(task, after)
        found.append(Local(here, after, step.group))
        here = after
    return found


def _can_follow(local: Local, end: Arrangement) -> bool:
    """Whether tasks can be done where they leave a tensor that lies so."""
    return all(
        end.parts[dim].count == 1
        for task in local.group
        for dim, mixes in zip(task.dims, task.actor.mixes, strict=True)
        if mixes or isinstance(task.actor, ParRestriction)
    )


def _before(local: Local, end: Arrangement) -> Arrangement:
    """How a tensor lies before tasks that leave it so."""
    for task in reversed(local.group):
        for dim, before, after in zip(task.dims, task.source.shape, task.target.shape, strict=True):
            if before != after:
                end = end.with_part(dim, end.parts[dim].resized(before))
    return end


def _drain(
    waiting: Waiting, here: Arrangement, target: Arrangement | None, patient: bool
) -> tuple[Arrangement, list[Step]]:
    """Do all that can be done here."""
    early = _early(waiting.copy(), here) if patient else set()
    done: list[Task] = []
    arrangements = [here]
    branches: dict[int, Branches] = {}
    state = here

    def is_possible(task: Task) -> bool:
        return task not in early and (_is_local(task, state) or _is_branching(task, state))

    for task in cheapest(waiting, is_possible):
        if _is_local(task, state):
            state = _after(task, state)
        else:
            branching = _branches(task, state, None if waiting else target)
            branches[len(done)] = branching
            state = branching.after
        done.append(task)
        arrangements.append(state)
    steps: list[Step] = []
    number = 0
    for group in grouped(done):
        before, after = arrangements[number], arrangements[number + len(group)]
        steps.append(branches.get(number) or Local(before, after, group))
        number += len(group)
    return state, steps


def _early(waiting: Waiting, here: Arrangement) -> set[Task]:
    """What would only add zeros, along dimensions with which nothing else can be done here."""
    done: list[Task] = []
    state = here

    def is_possible(task: Task) -> bool:
        return _is_local(task, state) or _is_branching(task, state)

    for task in cheapest(waiting, is_possible):
        local = _is_local(task, state)
        state = _after(task, state) if local else _branches(task, state, None).after
        done.append(task)
    return {
        task
        for number, task in enumerate(done)
        if waiting
        and _adds_zeros(task)
        and not any(later.follows(task) for later in done[number + 1 :])
    }


def _adds_zeros(task: Task) -> bool:
    return isinstance(task.actor, ParRestriction) and task.actor.is_swapped


def _is_local(task: Task, here: Arrangement) -> bool:
    if isinstance(task.actor, ParRestriction):
        return True
    return all(here.parts[dim].is_whole for dim in task.mixed)


def _is_branching(task: Task, here: Arrangement) -> bool:
    """Whether a sum acts along all dimensions: its terms are planned on their own."""
    return isinstance(task.actor, Terms) and len(task.dims) == len(here.parts)


def _branches(task: Task, here: Arrangement, target: Arrangement | None) -> Branches:
    plans: list[Plan] = []
    for operator in task.actor.operators:
        plans.append(make_plan(operator, here, plans[0].target if plans else target))
    return Branches(here, plans[0].target, tuple(plans))


def _after(task: Task, here: Arrangement) -> Arrangement:
    """How the result of a task lies."""
    for dim, before, after in zip(task.dims, task.source.shape, task.target.shape, strict=True):
        part = here.parts[dim]
        if isinstance(task.actor, ParRestriction) and not part.is_whole:
            here = here.with_part(dim, _restricted(task.actor, part))
        elif before != after:
            here = here.with_part(dim, part.resized(after))
    return here


@lru_cache(maxsize=1024)
def _restricted(actor: ParRestriction, part: Parts) -> Parts:
    """How the result of a restriction lies where each worker keeps what it has of it."""
    after = actor.codomain.numel
    filled = part.count if part.bounds is not None else min(part.count, part.length)
    intervals = tuple(part.interval(place) for place in range(filled))
    bounds = actor.split(intervals) + ((after, after),) * (part.count - filled)
    return replace(part, length=after, bounds=bounds)


def _next(
    waiting: Waiting, here: Arrangement, target: Arrangement | None, patient: bool
) -> Arrangement:
    """Where to go so that the most can be done before the tensor has to be rearranged again."""
    best: tuple[Any, Arrangement] | None = None
    for there in _candidates(here, target):
        left = waiting.copy()
        end, done = _drain(left, there, target, patient)
        if not done:
            continue
        more = _further(left, end, target, patient)
        tasks = len(left.tasks) - len(waiting.tasks)
        key = more, tasks, _sent(here, there, target), _moved(here, there), _unevenness(there)
        if best is None or key < best[0]:
            best = key, there
    return best[1] if best is not None else _concentrated(waiting, here)


def _candidates(here: Arrangement, target: Arrangement | None) -> Iterator[Arrangement]:
    """Where the tensor may go: as the result shall lie, or with axes on other dimensions.

    Where the result shall lie on another grid, axes of that one may be on other dimensions, too.
    """
    if target is not None:
        there = _like(target, here)
        yield there
        if there.grid != here.grid:
            yield from _hostings(there)
    yield from _hostings(here)


def _further(left: Waiting, end: Arrangement, target: Arrangement | None, patient: bool) -> int:
    """How often the tensor travels after this, as far as one step ahead shows."""
    if not left:
        return int(target is not None and end != target)
    if target is None:
        return 2
    last = left.copy()
    final, _ = _drain(last, _like(target, end), target, patient)
    return 1 if not last and final == target else 2


def _like(target: Arrangement, here: Arrangement) -> Arrangement:
    """As the result shall lie, for a tensor whose dimensions still have other lengths."""
    parts = tuple(
        end if end.length == part.length else Parts(part.length, end.axes, end.count)
        for end, part in zip(target.parts, here.parts, strict=True)
    )
    return replace(target, parts=parts)


def _hostings(here: Arrangement) -> Iterator[Arrangement]:
    """The axes of the grid on some dimensions that are long enough for them, the others whole."""
    D = len(here.parts)
    axes = [axis for part in here.parts for axis in part.axes]
    for count in range(1, min(len(axes), D) + 1):
        for hosts in combinations(range(D), count):
            if (there := _hosted(here, hosts, axes)) is not None:
                yield there


def _hosted(here: Arrangement, hosts: Sequence[int], axes: Sequence[int]) -> Arrangement | None:
    """With all axes on these dimensions; those that are there stay."""
    grid = here.grid
    own = {dim: list(part.axes) if dim in hosts else [] for dim, part in enumerate(here.parts)}
    sizes = {dim: _product(grid, own[dim]) for dim in own}
    placed = {axis for each in own.values() for axis in each}
    for axis in axes:
        if axis in placed:
            continue
        free = [dim for dim in hosts if sizes[dim] * grid[axis] <= here.parts[dim].length]
        if not free:
            return None
        dim = min(free, key=lambda d: (here.parts[d].length % (sizes[d] * grid[axis]) > 0, d))
        own[dim].append(axis)
        sizes[dim] *= grid[axis]
    parts = tuple(
        part
        if list(part.axes) == own[dim] and dim in hosts
        else Parts(part.length, tuple(own[dim]), sizes[dim])
        for dim, part in enumerate(here.parts)
    )
    return replace(here, parts=parts) if parts != here.parts else None


def _product(grid: Sequence[int], axes: Sequence[int]) -> int:
    total = 1
    for axis in axes:
        total *= grid[axis]
    return total


def _sent(here: Arrangement, there: Arrangement, target: Arrangement | None) -> int:
    """The values that travel on the way to another grid, by `there`; 0 on one grid.

    On one grid the fewest dimensions that lie in another way do as well, and cost less to count.
    """
    if target is None or target.grid == here.grid:
        return 0
    legs = (here, there), (there, _like(target, there))
    places = range(here.size) if here.size <= MOST_PLACES else representatives(here.grid)
    return sum(numel_sent(*leg, place) for leg in legs for place in places)


def _moved(here: Arrangement, there: Arrangement) -> int:
    """How many dimensions lie in another way."""
    return sum(a != b for a, b in zip(here.ways, there.ways, strict=True))


def _unevenness(there: Arrangement) -> float:
    """The largest part against the mean."""
    ratio = 1.0
    for part in there.parts:
        start, stop = part.interval(0)
        ratio *= (stop - start) * part.count / max(1, part.length)
    return ratio


def _concentrated(waiting: Waiting, here: Arrangement) -> Arrangement:
    """When no dimensions are long enough: those that the next task mixes whole, on few workers.

    Their axes go to the longest of the others, some of whose parts are empty then. If there are no
    others, one worker has all.
    """
    left = waiting.copy()
    for task in left.ready():
        if _adds_zeros(task):  # which can be done anywhere
            left.done(task)
    task = min(left.ready(), key=left.prospect)
    axes = [axis for dim in task.mixed for axis in here.parts[dim].axes]
    parts = list(here.parts)
    others = [dim for dim in range(len(parts)) if dim not in task.mixed]
    for dim in task.mixed:
        parts[dim] = Parts(parts[dim].length)
    if others:
        host = max(others, key=lambda dim: parts[dim].length / parts[dim].count)
        along = (*parts[host].axes, *axes)
        parts[host] = Parts(parts[host].length, along, _product(here.grid, along))
    else:
        first, count = task.mixed[0], _product(here.grid, axes)
        length = parts[first].length
        bounds: tuple[Interval, ...] = ((0, length), *[(length, length)] * (count - 1))
        parts[first] = Parts(length, tuple(axes), count, bounds)
    return replace(here, parts=tuple(parts))
