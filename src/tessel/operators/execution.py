"""Execution: a plan carried out on this worker's part of a tensor.

Some things that the steps of a plan need do not change from call to call: moves, the order
of dimensions in memory, the shapes of parts. So a plan becomes a list of functions once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from math import prod

from torch import Tensor

from tessel.core.layout import Layout
from tessel.core.linop import LinearOperator
from tessel.core.move import Move
from tessel.core.shared import Replicate, anchored_zeros
from tessel.operators import tasks
from tessel.operators.dft import JointTransform, ParDFT
from tessel.operators.layouts import alike, box_of, with_batch
from tessel.operators.memory import MemoryOrder, inverse_of
from tessel.operators.planning import Branches, Local, OperatorPlan, PlannedStep, Transfer
from tessel.operators.restriction import ParRestriction
from tessel.operators.storage import Storage, leaves_of, needed, whole
from tessel.operators.tasks import LeafValues
from tessel.transport import kept_in_job, this_worker

BatchColumns = tuple[int, ...] | None  # the columns of the batch, for each place along its axes
TensorFunction = Callable[[Tensor, LeafValues], Tensor]


def program(
    plan: OperatorPlan, storage: Storage, columns: BatchColumns, order: MemoryOrder
) -> list[TensorFunction]:
    """The steps of a plan as functions of this worker's part and the parameters.

    Args:
        plan: the plan.
        storage: the layouts of parameters.
        columns: the columns of a batch, which is then the last dimension.
        order: the order of the input's dimensions in memory. The plan knows their most likely order
            after each step, and data travels in that order: the same on all workers, whatever
            strides tensors really have.
    """
    functions = []
    for step, following in zip_longest(plan.steps, plan.steps[1:]):
        if isinstance(step, Transfer):
            functions.append(_transfer(step, columns, order, following))
        elif isinstance(step, Branches):
            functions.append(_sum(step, storage, columns, order))
            order = tuple(range(len(order)))
        else:
            functions.append(_local(step, storage))
            order = tasks.order_after(step.group, order)
    return functions


def _transfer(
    step: Transfer, columns: BatchColumns, order: MemoryOrder, following: PlannedStep | None
) -> TensorFunction:
    spaced = None
    if isinstance(following, Local) and isinstance(following.group[0].actor, ParDFT):
        # A transform along one dimension is faster if its slices do not share lines of the cache.
        spaced = order.index(following.group[0].dims[0]) if len(following.group) == 1 else None
    move, back = _move(step.before, step.after, columns, order, spaced), inverse_of(order)
    if back == tuple(range(len(order))):
        return lambda x, values: move.apply(x)

    def transfer(x: Tensor, values: LeafValues) -> Tensor:
        return move.apply(x.permute(order)).permute(back)

    return transfer


def _sum(
    step: Branches, storage: Storage, columns: BatchColumns, order: MemoryOrder
) -> TensorFunction:
    programs = [program(plan, storage, columns, order) for plan in step.plans]

    def add(x: Tensor, values: LeafValues) -> Tensor:
        total = None
        for functions in programs:
            y = x
            for function in functions:
                y = function(y, values)
            total = y if total is None else total + y
        assert total is not None
        return total

    return add


def _local(step: Local, storage: Storage) -> TensorFunction:
    before, after = step.before, step.after
    is_alone = before.partition.size == 1  # all parameters are where they are needed
    uses = [
        (leaf, storage[leaf], whole(leaf, before), needed(leaf, task, before))
        for task in step.group
        for leaf in leaves_of(task)
    ]
    shape, num_dims = after.local_shape, len(after.shape)
    act = _action(step)

    def local(x: Tensor, values: LeafValues) -> Tensor:
        used = values
        if uses and not is_alone:
            used = {}
            for leaf, stored, everything, use in uses:
                value = values[leaf]
                # No part is as large as the whole, on any worker, so all decide alike.
                given = everything if tuple(value.shape) == leaf.parameter_shape else stored
                used[leaf] = _using(given, use).apply(value)
        if not x.numel() or not prod(shape):
            # The graphs of all workers are alike, so that their backward passes meet.
            inputs = (used[leaf] for leaf, *_ in uses)
            result = anchored_zeros((*shape, *x.shape[num_dims:]), x, *inputs)
            return result.to(tasks.dtype_after(step.group, x.dtype))
        return act(x, used)

    return local


def _action(step: Local) -> TensorFunction:
    """The function of a step for a part that is not empty, by its tasks' own methods."""
    actor, dims = step.group[0].actor, step.group[0].dims
    if isinstance(actor, ParRestriction):
        longer = step.after if actor.is_swapped else step.before
        part = box_of(longer, this_worker())[dims[0]]
        return lambda x, values: actor.act_on_part(x, dims[0], part)
    if isinstance(actor, ParDFT) and not actor.is_padded:  # several, if they are of one kind
        joint = JointTransform((task.actor, task.dims[0]) for task in step.group)
        return lambda x, values: joint(x)
    return lambda x, values: tasks.perform_group(step.group, x, values)


@kept_in_job
def _move(
    before: Layout, after: Layout, columns: BatchColumns, order: MemoryOrder, spaced: int | None
) -> Move:
    """The move of a tensor and its batch with dimensions in another order."""

    def permuted(layout: Layout) -> Layout:
        shape = tuple(layout.shape[dim] for dim in order)
        return replace(layout, shape=shape, cuts=tuple(layout.cuts[dim] for dim in order))

    source, target = (permuted(with_batch(each, columns)) for each in (before, after))
    return Move(source, target, spaced)


@kept_in_job
def _using(stored: Layout, used: Layout) -> LinearOperator:
    """The operator from the stored layout of a parameter, with shared copies, to its use."""
    if alike(stored, used):
        return Replicate(used.summed, used)
    return Move(stored.summed, used)
