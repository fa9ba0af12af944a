"""Planning: the order in which the tasks of an operator are done on a grid of workers, and where.

A task needs the dimensions that it mixes whole. Tasks that are possible in the current layout come
first; then the tensor is rearranged so that as many as possible can follow, into the final layout
if that will do. So the number of rearrangements is minimal for Fourier transforms of slabs and
pencils, there and back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

from tessel.core.boxes import Balanced, Interval
from tessel.core.layout import Cut, Layout
from tessel.operators.layouts import (
    alike,
    balanced_cut,
    examined,
    hostings,
    num_different,
    numel_sent,
    undivided,
    unevenness,
    with_length,
)
from tessel.operators.restriction import ParRestriction
from tessel.operators.tasks import OperatorTask, Waiting, cheapest, grouped


@dataclass(frozen=True)
class _Step:
    """A step of a plan: an operation on a tensor, with its layouts before and after."""

    before: Layout
    after: Layout

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.before.brief} → {self.after.brief}"


@dataclass(frozen=True)
class Local(_Step):
    """Tasks that each worker does with its part, in one call."""

    group: tuple[OperatorTask, ...]


@dataclass(frozen=True)
class Transfer(_Step):
    """The tensor is rearranged."""


@dataclass(frozen=True)
class Branches(_Step):
    """The results of several plans are added."""

    plans: tuple[OperatorPlan, ...]


PlannedStep = Local | Transfer | Branches


@dataclass(frozen=True)
class OperatorPlan:
    """All steps of an operator on a grid."""

    source: Layout
    target: Layout
    steps: tuple[PlannedStep, ...]

    def __repr__(self) -> str:
        return f"Plan(source={self.source.brief}, target={self.target.brief})"

    @property
    def num_transfers(self) -> int:
        return sum(isinstance(step, Transfer) for step in self.every_step())

    def every_step(self) -> Iterator[PlannedStep]:
        """The steps, those of branches one branch after the other."""
        for step in self.steps:
            if isinstance(step, Branches):
                for plan in step.plans:
                    yield from plan.every_step()
            else:
                yield step


def make_plan(operator: Any, source: Layout, target: Layout | None) -> OperatorPlan:
    """Plan an operator on a tensor with this layout.

    Args:
        operator: the operator.
        source: the layout of its input.
        target: the layout of its result; None to leave it where the last step ends.
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
    """Plan tasks; if patient, nothing is padded before a transfer."""
    # Greedy: do all that is possible here, go where the most is possible next. A search over all
    # orders would find nothing better for slabs and pencils, and takes exponentially long.
    waiting = Waiting(tasks)
    steps: list[PlannedStep] = []
    here = source
    while True:
        here, done = _drain(waiting, here, target, patient)
        if patient and steps and not done:  # the tasks that wait here would wait forever
            return _plan(tasks, source, target, patient=False)
        steps += done
        if not waiting:
            break
        there = _next(waiting, here, target, patient)
        steps.append(Transfer(here, there))
        here = there
    if target is not None and not alike(here, target):
        steps.append(Transfer(here, target))
    # Tasks that enlarge a tensor come after its transfer, if possible.
    found: list[PlannedStep] = []
    for step in steps:
        found.append(step)
        if isinstance(step, Transfer):
            found = _transferred_earlier(found)
    return OperatorPlan(source, here if target is None else target, tuple(found))


def _transferred_earlier(steps: list[PlannedStep]) -> list[PlannedStep]:
    """Move the transfer at the end of some steps before those that can be done after it, if the
    tensor is smaller there."""
    there = steps[-1].after
    stay: list[Local] = []
    behind: list[Local] = []
    growth = most = 1.0
    # Backwards from the transfer: local steps go after it one by one, as long as they can be done
    # there and no step before needs them; the cut with the smallest tensor is kept.
    best: tuple[int, list[Local], list[Local], Layout] | None = None
    for number in range(len(steps) - 2, -1, -1):
        local = steps[number]
        if not isinstance(local, Local):
            break
        is_needed = any(
            task.follows(earlier)
            for later in stay
            for task in later.group
            for earlier in local.group
        )
        # After the transfer a task needs the dimensions whole that it mixes. So does a restriction:
        # the layout before it that leads to a given layout is known for whole dimensions only.
        fits = all(
            len(there.cuts[dim].intervals) == 1
            for task in local.group
            for dim in task.dims
            if dim in task.mixed or isinstance(task.actor, ParRestriction)
        )
        if is_needed or not fits:
            stay = [local, *stay]
            continue
        behind = [local, *behind]
        for task in reversed(local.group):  # the layout before the task, given the one after it
            lengths = zip(task.dims, task.source.shape, task.target.shape, strict=True)
            for dim, before, after in lengths:
                there = with_length(there, dim, before) if before != after else there
        growth *= prod(task.growth for task in local.group)
        if growth > most:
            most, best = growth, (number, stay, behind, there)
    if best is None:
        return steps
    number, stay, behind, there = best
    # The tasks are the same, but the layouts between them differ.
    first = _replayed(stay, steps[number].before)
    here = first[-1].after if first else steps[number].before
    moves = [Transfer(here, there)] if not alike(here, there) else []
    return [*steps[:number], *first, *moves, *_replayed(behind, there)]


def _replayed(steps: list[Local], here: Layout) -> list[Local]:
    """The same tasks on a tensor with this layout."""
    found = []
    for step in steps:
        after = here
        for task in step.group:
            after = _after(task, after)
        found.append(Local(here, after, step.group))
        here = after
    return found


def _drain(
    waiting: Waiting, here: Layout, target: Layout | None, patient: bool
) -> tuple[Layout, list[PlannedStep]]:
    """Do everything that is possible in this layout."""
    early: set[OperatorTask] = set()
    if patient:
        # Tasks that would only add zeros, along dimensions with nothing else to do here.
        left = waiting.copy()
        tried = [task for task, *_ in _possible(left, here, None)]
        for number, task in enumerate(tried):
            is_used = any(later.follows(task) for later in tried[number + 1 :])
            if left and _adds_zeros(task) and not is_used:
                early.add(task)
    # The next task depends on the layout after the last one; which tasks are one
    # call is known only when all are in order. So layouts are kept for each task, and grouped
    # later.
    done = list(_possible(waiting, here, target, early))
    layouts = [here, *(after for _, after, _ in done)]
    steps: list[PlannedStep] = []
    number = 0
    for group in grouped(task for task, *_ in done):
        before, after = layouts[number], layouts[number + len(group)]
        steps.append(done[number][2] or Local(before, after, group))
        number += len(group)
    return layouts[-1], steps


def _possible(
    waiting: Waiting, here: Layout, target: Layout | None, without: Collection[OperatorTask] = ()
) -> Iterator[tuple[OperatorTask, Layout, Branches | None]]:
    """Tasks that are possible here, one after the other, with the layout after each.

    A sum along all dimensions comes with the plans of its terms.
    """
    state = here

    def is_possible(task: OperatorTask) -> bool:
        # A sum along all dimensions is possible anywhere: its terms are planned separately.
        is_sum = bool(task.terms) and len(task.dims) == len(state.shape)
        return task not in without and (_is_local(task, state) or is_sum)

    for task in cheapest(waiting, is_possible):
        branches = None
        if not _is_local(task, state):
            # The last sum can end in the final layout; others leave that to the next steps.
            # The first term decides the layout of all results: they are added there, part by part.
            plans = [make_plan(task.terms[0], state, None if waiting else target)]
            for operator in task.terms[1:]:
                plans.append(make_plan(operator, state, plans[0].target))
            branches = Branches(state, plans[0].target, tuple(plans))
        state = _after(task, state) if branches is None else branches.after
        yield task, state, branches


def _adds_zeros(task: OperatorTask) -> bool:
    return isinstance(task.actor, ParRestriction) and task.actor.is_swapped


def _is_local(task: OperatorTask, here: Layout) -> bool:
    if isinstance(task.actor, ParRestriction):
        return True
    return all(undivided(here, dim) for dim in task.mixed)


def _after(task: OperatorTask, here: Layout) -> Layout:
    """The layout of the result of a task."""
    for dim, before, after in zip(task.dims, task.source.shape, task.target.shape, strict=True):
        if isinstance(task.actor, ParRestriction) and not undivided(here, dim):
            # Each worker keeps its indices: parts become uneven, but nothing moves.
            here = here.recut(dim, _restricted(task.actor, here.cuts[dim]), after)
        elif before != after:
            here = with_length(here, dim, after)
    return here


@lru_cache(maxsize=1024)
def _restricted(actor: ParRestriction, cut: Cut) -> Cut:
    """The cut of the result of a restriction if each worker keeps its indices."""
    after, count = actor.codomain.numel, len(cut.intervals)
    is_balanced = isinstance(cut.intervals, Balanced)
    # the other workers have nothing
    filled = min(count, actor.domain.numel) if is_balanced else count
    intervals = actor.split(cut.intervals[:filled])
    return replace(cut, intervals=intervals + ((after, after),) * (count - filled))


def _next(waiting: Waiting, here: Layout, target: Layout | None, patient: bool) -> Layout:
    """The layout in which the most can be done before the next rearrangement."""
    # The final layout, or one with axes on other dimensions. If the final layout is on
    # another grid, axes of that one may be on other dimensions, too.
    candidates: Iterable[Layout] = hostings(here)
    changes_grid = target is not None and target.partition.shape != here.partition.shape
    if target is not None:
        goal = target.split_like(here.shape)
        candidates = chain([goal], hostings(goal) if changes_grid else (), candidates)
    workers = examined(here.partition)
    best: tuple[Any, Layout] | None = None
    for there in candidates:
        left = waiting.copy()
        end, done = _drain(left, there, target, patient)
        if not done:  # this layout would not help
            continue
        more = 2  # how often the tensor travels afterwards, as far as one step ahead shows
        if not left:
            more = int(target is not None and not alike(end, target))
        elif target is not None:
            last = left.copy()
            final, _ = _drain(last, target.split_like(end.shape), target, patient)
            more = 1 if not last and alike(final, target) else 2
        tasks = len(left.tasks) - len(waiting.tasks)
        sent = 0
        if target is not None and changes_grid:
            legs = (here, there), (there, target.split_like(there.shape))
            sent = sum(numel_sent(*leg, worker) for leg in legs for worker in workers)
        # Transfers cost the most, so few of them come first; then few values to send, then even
        # parts. On one grid the fewest dimensions with another cut mean the fewest values,
        # and are counted faster.
        key = more, tasks, sent, num_different(here, there), unevenness(there)
        if best is None or key < best[0]:
            best = key, there
    return best[1] if best is not None else _concentrated(waiting, here)


def _concentrated(waiting: Waiting, here: Layout) -> Layout:
    """A layout for the case that no dimensions are long enough: those of the next task are whole.

    Their axes go to the longest of the other dimensions, some of whose parts are then empty.
    If there are no others, one worker has everything.
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
