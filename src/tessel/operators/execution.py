"""Execution: a plan carried out on this worker's part of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from tessel.layout import Layout
from tessel.linop import LinearOperator
from tessel.move import Move
from tessel.operators import tasks
from tessel.operators.dft import ParDFT
from tessel.operators.layouts import alike, with_batch
from tessel.operators.leaf import Leaf
from tessel.operators.memory import Order, inverse_of
from tessel.operators.planning import Branches, Local, Plan, Step, Transfer
from tessel.operators.restriction import ParRestriction
from tessel.operators.storage import Storage, leaves_of, needed, whole
from tessel.operators.tasks import Task
from tessel.partition import Partition
from tessel.shared import Spread, nothing
from tessel.transport import kept_in_job

Columns = tuple[int, ...] | None  # of the batch, for each place along its axes


@dataclass(frozen=True)
class Execution:
    """What steps need beside the tensor.

    Attributes:
        partition: the workers.
        storage: how parameters lie.
        values: of the parameters, whole or this worker's parts.
        columns: of a batch, which is the last dimension then.
    """

    partition: Partition
    storage: Storage
    values: Mapping[Leaf, Tensor]
    columns: Columns

    def run(self, plan: Plan, x: Tensor, order: Order | None = None) -> Tensor:
        """All steps of a plan.

        The plan knows in which order dimensions most likely lie in memory after each step. Data
        travels in that order: on all workers the same, whatever strides tensors really have.
        """
        order = tuple(range(x.dim())) if order is None else order
        for number, step in enumerate(plan.steps):
            if isinstance(step, Transfer):
                dim = _transformed(plan.steps[number + 1 : number + 2])
                x = self._transfer(step, x, order, dim)
            elif isinstance(step, Branches):
                x = self._add(step, x, order)
                order = tuple(range(x.dim()))
            else:
                x = self._perform(step, x)
                order = tasks.order_after(step.group, order)
        return x

    def _transfer(self, step: Transfer, x: Tensor, order: Order, spaced: int | None) -> Tensor:
        at = None if spaced is None else order.index(spaced)
        move = _move(step.before, step.after, self.columns, order, at)
        return move.apply(x.permute(order)).permute(inverse_of(order))

    def _add(self, step: Branches, x: Tensor, order: Order) -> Tensor:
        y = self.run(step.plans[0], x, order)
        for plan in step.plans[1:]:
            y = y + self.run(plan, x, order)
        return y

    def _perform(self, step: Local, x: Tensor) -> Tensor:
        actor, dims = step.group[0].actor, step.group[0].dims
        used = {
            leaf: self._used(leaf, each, step.before)
            for each in step.group
            for leaf in leaves_of(each)
        }
        shape = (*step.after.local_shape, *x.shape[len(step.after.shape) :])
        if not x.numel() or not prod(shape):
            return nothing(shape, x, *used.values()).to(tasks.dtype_after(step.group, x.dtype))
        if isinstance(actor, ParRestriction):
            longer = step.after if actor.is_swapped else step.before
            box = longer.box()
            assert box is not None
            return actor.act_on_part(x, dims[0], box[dims[0]])
        return tasks.perform_group(step.group, x, used)

    def _used(self, leaf: Leaf, task: Task, here: Layout) -> Tensor:
        """A parameter, given whole or as it is stored, for use where the tensor lies so."""
        value = self.values[leaf]
        if self.partition.size == 1:
            return value
        stored = self.storage[leaf]
        if tuple(value.shape) == leaf.parameter_shape:  # no part is as large, on no worker
            stored = whole(leaf, here)
        return _using(stored, needed(leaf, task, here)).apply(value)


@kept_in_job
def _move(
    before: Layout, after: Layout, columns: Columns, order: Order, spaced: int | None
) -> Move:
    source, target = (_permuted(with_batch(each, columns), order) for each in (before, after))
    return Move(source, target, spaced)


def _permuted(layout: Layout, order: Order) -> Layout:
    """The same with its dimensions in another order."""
    shape = tuple(layout.shape[dim] for dim in order)
    return replace(layout, shape=shape, cuts=tuple(layout.cuts[dim] for dim in order))


def _transformed(following: tuple[Step, ...]) -> int | None:
    """The dimension along which the next step does a Fourier transform, if only along one."""
    for step in following:
        if isinstance(step, Local) and isinstance(step.group[0].actor, ParDFT):
            return step.group[0].dims[0] if len(step.group) == 1 else None
    return None


@kept_in_job
def _using(stored: Layout, used: Layout) -> LinearOperator:
    """From where a parameter is stored, shared by those who have the same, to a use of it."""
    if alike(stored, used):
        return Spread(used.summed, used)
    return Move(stored.summed, used)
