"""Planning: in which order, and where, the tasks of an operator are done on a grid of workers.

A task needs the dimensions whole that it mixes. What can be done where the tensor lies is done
first; then the tensor is rearranged so that the most can be done next, to where it shall end if
that will do. So the number of rearrangements is the least for Fourier transforms of slabs and
pencils, there and back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

from tessel.core.boxes import Balanced, Interval
from tessel.core.layout import Cut, Layout
from tessel.operators.layouts import (
    alike,
    balanced_cut,
    is_whole,
    num_different,
    numel_sent,
    representatives,
    with_cut,
    with_length,
)
from tessel.operators.restriction import ParRestriction
from tessel.operators.tasks import OperatorTask, Summands, Waiting, cheapest, grouped

MOST_WORKERS = 128  # of more workers, some stand for all


class _Step:
    """What is done with a tensor, which lies in one way before it and in one afterwards."""

    before: Layout
    after: Layout

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.before.brief} → {self.after.brief}"


@dataclass(frozen=True)
class Local(_Step):
    """Tasks that each worker does with what it has, in one call."""

    before: Layout
    after: Layout
    group: tuple[OperatorTask, ...]


@dataclass(frozen=True)
class Transfer(_Step):
    """The tensor is rearranged."""

    before: Layout
    after: Layout


@dataclass(frozen=True)
class Branches(_Step):
    """The results of several plans are added."""

    before: Layout
    after: Layout
    plans: tuple[OperatorPlan, ...]


Step = Local | Transfer | Branches


@dataclass(frozen=True)
class OperatorPlan:
    """All steps of an operator on a grid."""

    source: Layout
    target: Layout
    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        return f"Plan(source={self.source.brief}, target={self.target.brief})"

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


def make_plan(operator: Any, source: Layout, target: Layout | None) -> OperatorPlan:
    """Plan an operator on a tensor that lies so.

    Args:
        operator: what to do.
        source: how its input lies.
        target: how its result shall lie; None to leave it where it is then.
    """
    tasks = tuple(operator.expand(0))
    plan = _plan(tasks, source, target, patient=False)
    # Padding late sends fewer zeros, but a dimension that is short for longer can host fewer
    # workers and may need one transfer more: so both are tried.
    if plan.num_transfers and any(_adds_zeros(task) for task in tasks):
        other = _plan(tasks, source, target, patient=True)
        plan = other if other.num_transfers <= plan.num_transfers else plan
    return plan


def _plan(
    tasks: tuple[OperatorTask, ...], source: Layout, target: Layout | None, patient: bool
) -> OperatorPlan:
    """Plan tasks; if patient, nothing is put among zeros that has to travel then."""
    # Greedy: do all that is possible here, go where the most is possible next. A search over all
    # orders would find nothing better for slabs and pencils, and takes exponentially long.
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
    if target is not None and not alike(here, target):
        steps.append(Transfer(here, target))
    end = here if target is None else target
    return OperatorPlan(source, end, tuple(_travelling_small(steps)))


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
    # From the transfer backwards: local steps go behind it one by one, as long as they can be done
    # there and nothing that stays needs them; kept is the cut at which the tensor is the smallest.
    best: tuple[int, list[Local], list[Local], Layout] | None = None
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
    # The tasks are the same, but the tensor lies in other ways between them.
    first = _replayed(stay, steps[number].before)
    here = first[-1].after if first else steps[number].before
    moves = [Transfer(here, there)] if not alike(here, there) else []
    return [*steps[:number], *first, *moves, *_replayed(behind, there)]


def _is_needed(local: Local, later: list[Local]) -> bool:
    """Whether some later tasks have to come after these."""
    return any(
        task.follows(earlier) for other in later for task in other.group for earlier in local.group
    )


def _replayed(steps: list[Local], here: Layout) -> list[Local]:
    """The same tasks on a tensor that lies so."""
    found = []
    for step in steps:
        after = here
        for task in step.group:
            after = _after(task, after)
        found.append(Local(here, after, step.group))
        here = after
    return found


def _can_follow(local: Local, end: Layout) -> bool:
    """Whether tasks can be done where they leave a tensor that lies so."""
    return all(
        len(end.cuts[dim].intervals) == 1
        for task in local.group
        for dim, mixes in zip(task.dims, task.actor.mixes, strict=True)
        if mixes or isinstance(task.actor, ParRestriction)
    )


def _before(local: Local, end: Layout) -> Layout:
    """How a tensor lies before tasks that leave it so."""
    for task in reversed(local.group):
        for dim, before, after in zip(task.dims, task.source.shape, task.target.shape, strict=True):
            if before != after:
                end = with_length(end, dim, before)
    return end


def _drain(
    waiting: Waiting, here: Layout, target: Layout | None, patient: bool
) -> tuple[Layout, list[Step]]:
    """Do all that can be done here."""
    early = _early(waiting.copy(), here) if patient else set()
    # Which task is next depends on how the tensor lies after the last one; which tasks are one
    # call is known only when all are in order. So layouts are kept for each task, grouped later.
    done = list(_possible(waiting, here, target, early))
    layouts = [here, *(after for _, after, _ in done)]
    steps: list[Step] = []
    number = 0
    for group in grouped(task for task, *_ in done):
        before, after = layouts[number], layouts[number + len(group)]
        steps.append(done[number][2] or Local(before, after, group))
        number += len(group)
    return layouts[-1], steps


def _possible(
    waiting: Waiting, here: Layout, target: Layout | None, without: Collection[OperatorTask] = ()
) -> Iterator[tuple[OperatorTask, Layout, Branches | None]]:
    """Tasks that can be done here, one after the other, and how the tensor lies after each.

    A sum along all dimensions comes with the plans of its terms.
    """
    state = here

    def is_possible(task: OperatorTask) -> bool:
        return task not in without and (_is_local(task, state) or _is_branching(task, state))

    for task in cheapest(waiting, is_possible):
        branches = None
        if not _is_local(task, state):
            # The last sum can end where the result shall lie; others leave that to what follows.
            branches = _branches(task, state, None if waiting else target)
        state = _after(task, state) if branches is None else branches.after
        yield task, state, branches


def _early(waiting: Waiting, here: Layout) -> set[OperatorTask]:
    """What would only add zeros, along dimensions with which nothing else can be done here."""
    done = [task for task, *_ in _possible(waiting, here, None)]
    return {
        task
        for number, task in enumerate(done)
        if waiting
        and _adds_zeros(task)
        and not any(later.follows(task) for later in done[number + 1 :])
    }


def _adds_zeros(task: OperatorTask) -> bool:
    return isinstance(task.actor, ParRestriction) and task.actor.is_swapped


def _is_local(task: OperatorTask, here: Layout) -> bool:
    if isinstance(task.actor, ParRestriction):
        return True
    return all(is_whole(here, dim) for dim in task.mixed)


def _is_branching(task: OperatorTask, here: Layout) -> bool:
    """Whether a sum acts along all dimensions: its terms are planned on their own."""
    return isinstance(task.actor, Summands) and len(task.dims) == len(here.shape)


def _branches(task: OperatorTask, here: Layout, target: Layout | None) -> Branches:
    plans: list[OperatorPlan] = []
    # The first term decides where all results lie: they are added there, part by part.
    for operator in task.actor.operators:
        plans.append(make_plan(operator, here, plans[0].target if plans else target))
    return Branches(here, plans[0].target, tuple(plans))


def _after(task: OperatorTask, here: Layout) -> Layout:
    """How the result of a task lies."""
    for dim, before, after in zip(task.dims, task.source.shape, task.target.shape, strict=True):
        if isinstance(task.actor, ParRestriction) and not is_whole(here, dim):
            # Each worker keeps what it has: parts become uneven, but nothing moves.
            here = with_cut(here, dim, _restricted(task.actor, here.cuts[dim]), after)
        elif before != after:
            here = with_length(here, dim, after)
    return here


@lru_cache(maxsize=1024)
def _restricted(actor: ParRestriction, cut: Cut) -> Cut:
    """How the result of a restriction lies where each worker keeps what it has of it."""
    after, count = actor.codomain.numel, len(cut.intervals)
    is_balanced = isinstance(cut.intervals, Balanced)
    filled = min(count, actor.domain.numel) if is_balanced else count  # the others have nothing
    intervals = actor.split(cut.intervals[:filled])
    return replace(cut, intervals=intervals + ((after, after),) * (count - filled))


def _next(waiting: Waiting, here: Layout, target: Layout | None, patient: bool) -> Layout:
    """Where to go so that the most can be done before the tensor has to be rearranged again."""
    best: tuple[Any, Layout] | None = None
    for there in _candidates(here, target):
        left = waiting.copy()
        end, done = _drain(left, there, target, patient)
        if not done:  # to go there would not help
            continue
        more = _further(left, end, target, patient)
        tasks = len(left.tasks) - len(waiting.tasks)
        # Transfers cost the most, so few of them come first; then few bytes, then even parts.
        sent, changed = _sent(here, there, target), num_different(here, there)
        key = more, tasks, sent, changed, _unevenness(there)
        if best is None or key < best[0]:
            best = key, there
    return best[1] if best is not None else _concentrated(waiting, here)


def _candidates(here: Layout, target: Layout | None) -> Iterator[Layout]:
    """Where the tensor may go: as the result shall lie, or with axes on other dimensions.

    Where the result shall lie on another grid, axes of that one may be on other dimensions, too.
    """
    if target is not None:
        there = _like(target, here)
        yield there
        if there.partition.shape != here.partition.shape:
            yield from _hostings(there)
    yield from _hostings(here)


def _further(left: Waiting, end: Layout, target: Layout | None, patient: bool) -> int:
    """How often the tensor travels after this, as far as one step ahead shows."""
    if not left:
        return int(target is not None and not alike(end, target))
    if target is None:
        return 2
    last = left.copy()
    final, _ = _drain(last, _like(target, end), target, patient)
    return 1 if not last and alike(final, target) else 2


def _like(target: Layout, here: Layout) -> Layout:
    """As the result shall lie, for a tensor whose dimensions still have other lengths."""
    cuts = tuple(
        cut if end == length else balanced_cut(target.partition, length, cut.axes)
        for cut, end, length in zip(target.cuts, target.shape, here.shape, strict=True)
    )
    return replace(target, shape=here.shape, cuts=cuts)


def _hostings(here: Layout) -> Iterator[Layout]:
    """The axes of the grid on some dimensions that are long enough for them, the others whole."""
    D = len(here.shape)
    axes = [axis for cut in here.cuts for axis in cut.axes]
    for count in range(1, min(len(axes), D) + 1):
        for hosts in combinations(range(D), count):
            if (there := _hosted(here, hosts, axes)) is not None:
                yield there


def _hosted(here: Layout, hosts: Sequence[int], axes: Sequence[int]) -> Layout | None:
    """With all axes on these dimensions; those that are there stay."""
    grid = here.partition.shape
    own = {dim: list(cut.axes) if dim in hosts else [] for dim, cut in enumerate(here.cuts)}
    sizes = {dim: prod(grid[axis] for axis in own[dim]) for dim in own}
    placed = {axis for each in own.values() for axis in each}
    for axis in axes:
        if axis in placed:  # moving it would send a dimension that could stay
            continue
        free = [dim for dim in hosts if sizes[dim] * grid[axis] <= here.shape[dim]]
        if not free:
            return None
        # A dimension that divides evenly leaves no worker waiting for another.
        dim = min(free, key=lambda d: (here.shape[d] % (sizes[d] * grid[axis]) > 0, d))
        own[dim].append(axis)
        sizes[dim] *= grid[axis]
    cuts = tuple(
        cut
        if list(cut.axes) == own[dim] and dim in hosts
        else Cut(tuple(own[dim]), Balanced(here.shape[dim], sizes[dim]))
        for dim, cut in enumerate(here.cuts)
    )
    return replace(here, cuts=cuts) if cuts != here.cuts else None


def _sent(here: Layout, there: Layout, target: Layout | None) -> int:
    """The values that travel on the way to another grid, by `there`; 0 on one grid.

    On one grid the fewest dimensions that lie in another way do as well, and cost less to count.
    """
    if target is None or target.partition.shape == here.partition.shape:
        return 0
    legs = (here, there), (there, _like(target, there))
    P = here.partition
    workers = P.ranks if P.size <= MOST_WORKERS else representatives(P)
    return sum(numel_sent(*leg, worker) for leg in legs for worker in workers)


def _unevenness(there: Layout) -> float:
    """The largest part against the mean."""
    ratio = 1.0
    for cut, length in zip(there.cuts, there.shape, strict=True):
        start, stop = cut.intervals[0]
        ratio *= (stop - start) * len(cut.intervals) / max(1, length)
    return ratio


def _concentrated(waiting: Waiting, here: Layout) -> Layout:
    """When no dimensions are long enough: those that the next task mixes whole, on few workers.

    Their axes go to the longest of the others, some of whose parts are empty then. If there are no
    others, one worker has all.
    """
    left = waiting.copy()
    for task in left.ready():
        if _adds_zeros(task):  # which can be done anywhere
            left.done(task)
    task = min(left.ready(), key=left.prospect)
    axes = [axis for dim in task.mixed for axis in here.cuts[dim].axes]
    cuts, P = list(here.cuts), here.partition
    others = [dim for dim in range(len(cuts)) if dim not in task.mixed]
    for dim in task.mixed:
        cuts[dim] = balanced_cut(P, here.shape[dim], ())
    if others:
        host = max(others, key=lambda dim: here.shape[dim] / len(cuts[dim].intervals))
        cuts[host] = balanced_cut(P, here.shape[host], (*cuts[host].axes, *axes))
    else:
        first, count = task.mixed[0], prod(P.shape[axis] for axis in axes)
        length = here.shape[first]
        intervals: tuple[Interval, ...] = ((0, length), *[(length, length)] * (count - 1))
        cuts[first] = Cut(tuple(axes), intervals)
    return replace(here, cuts=tuple(cuts))
