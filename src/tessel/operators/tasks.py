"""Tasks: the steps of applying an operator, each along some dimensions.

A tree of operators becomes a list of tasks. Two of them may be swapped if they act along
different dimensions, unless one makes the numbers complex that the other needs: so each kind of
task is done when it costs the least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from tessel.operators.memory import MemoryOrder
from tessel.operators.space import Shape, TensorSpace

LeafValues = Mapping[Any, Tensor]  # of parameters, whole or this worker's parts, by leaf


@dataclass(frozen=True, eq=False)
class OperatorTask:
    """An action along `dims` of a tensor: a leaf, a number or a sum."""

    actor: Any  # Leaf, Scaling or OperatorSum
    dims: tuple[int, ...]

    @cached_property
    def terms(self) -> tuple[Any, ...]:
        """The operators whose results are added, if it is a sum."""
        return getattr(self.actor, "terms", ())

    @cached_property
    def source(self) -> TensorSpace:
        return self.actor.domain

    @cached_property
    def target(self) -> TensorSpace:
        return self.actor.codomain

    @cached_property
    def mixed(self) -> tuple[int, ...]:
        """The dimensions that must be whole."""
        if self.terms:
            return self.dims
        return tuple(dim for dim, mixes in zip(self.dims, self.actor.mixes, strict=True) if mixes)

    @property
    def turns(self) -> bool:
        """Whether it makes numbers complex, or real."""
        return self.source.is_complex != self.target.is_complex

    @cached_property
    def changes_numbers(self) -> bool:
        """Whether numbers become complex or real, even if only in between."""
        if self.terms:
            return any(task.changes_numbers for each in self.terms for task in each.expand(0))
        return self.turns

    @property
    def is_complex_linear(self) -> bool:
        if self.terms:
            return all(each.is_complex_linear for each in self.terms)
        return self.target.is_complex or not self.source.is_complex

    @cached_property
    def growth(self) -> float:
        """The bytes of the result for one byte of input."""
        ratio = self.target.numel / max(1, self.source.numel)
        width = self.target.dtype.itemsize / self.source.dtype.itemsize
        return ratio * (width if self.turns else 1.0)

    @cached_property
    def effort(self) -> float:
        """The number of operations for each number of the input, at least one."""
        if self.terms:
            return 1.0
        shape = self.source.shape
        flops: float = self.actor.flops(shape, tuple(range(len(shape))))
        return max(1.0, flops / max(1, self.source.numel))

    def flops(self, shape: Shape) -> float:
        """The number of operations on a local tensor of this shape."""
        if self.terms:
            return sum(count_flops(each.expand(self.dims[0]), shape) for each in self.terms)
        return self.actor.flops(shape, self.dims)

    def resized(self, shape: Shape) -> Shape:
        """The shape of the result for a tensor of this shape."""
        lengths = list(shape)
        for dim, before, after in zip(self.dims, self.source.shape, self.target.shape, strict=True):
            if before != after:
                lengths[dim] = after
        return tuple(lengths)

    def follows(self, earlier: OperatorTask) -> bool:
        """Whether an earlier task must stay earlier."""
        if set(self.dims) & set(earlier.dims):
            return True
        # All numbers of a tensor are real, or all are complex: a task that takes complex ones
        # cannot come before the one that makes them, along whatever dimension.
        if earlier.changes_numbers:
            return self.source.is_complex or self.changes_numbers
        return self.changes_numbers and earlier.source.is_complex


@dataclass(frozen=True, eq=False)
class Scaling:
    """A multiplication by a number."""

    number: complex
    domain: TensorSpace  # without dimensions

    @property
    def codomain(self) -> TensorSpace:
        return self.domain

    mixes = ()

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        return x * self.number

    def flops(self, shape: Shape, dims: tuple[int, ...]) -> float:
        return float(prod(shape))


def count_flops(tasks: Iterable[OperatorTask], shape: Shape) -> float:
    """The number of operations of consecutive tasks on a tensor of this shape."""
    total = 0.0
    for task in tasks:
        total += task.flops(shape)
        shape = task.resized(shape)
    return total


def ordered(tasks: Sequence[OperatorTask]) -> tuple[tuple[OperatorTask, ...], ...]:
    """All tasks in the order that computes the least, grouped by calls."""
    return grouped(cheapest(Waiting(tasks), lambda task: True))


class Waiting:
    """The tasks that are not done yet, with those that can be next."""

    def __init__(self, tasks: Sequence[OperatorTask]) -> None:
        self.tasks = list(tasks)
        self._after = {
            task: [earlier for earlier in self.tasks[:number] if task.follows(earlier)]
            for number, task in enumerate(self.tasks)
        }

    def __bool__(self) -> bool:
        return bool(self.tasks)

    def ready(self) -> list[OperatorTask]:
        """The tasks that wait for no other."""
        left = set(self.tasks)
        return [task for task in self.tasks if not left & set(self._after[task])]

    def prospect(self, task: OperatorTask) -> float:
        """The growth of a tensor per operation, by this task and some after it along its
        dims: among independent tasks, the one with the least is done first."""
        # The rule for jobs in chains: with growth g and effort e, doing chain A before B is cheaper
        # if (g_A - 1) / e_A is smaller; of a chain its best beginning counts.
        best, growth, effort = float("inf"), 1.0, 0.0
        for each in self.tasks[self.tasks.index(task) :]:
            if each is not task and not set(each.dims) & set(task.dims):
                continue
            if each.terms and each is not task:
                break  # its effort is unknown before its terms are planned
            effort += growth * each.effort
            growth *= each.growth
            best = min(best, (growth - 1) / effort)
        return best

    def done(self, task: OperatorTask) -> None:
        self.tasks.remove(task)

    def copy(self) -> Waiting:
        new = Waiting(())  # the dependencies stay the same, and take long to find
        new.tasks, new._after = list(self.tasks), self._after
        return new


def cheapest(
    waiting: Waiting, is_possible: Callable[[OperatorTask], bool]
) -> Iterator[OperatorTask]:
    """Do tasks in a possible order: those that shrink the tensor first, those that grow it last."""
    while True:
        possible = [task for task in waiting.ready() if is_possible(task)]
        if not possible:
            return
        # Among equal tasks the first written one: all workers must choose the same order.
        task = min(possible, key=lambda each: (waiting.prospect(each), each.growth))
        waiting.done(task)
        yield task


def grouped(tasks: Iterable[OperatorTask]) -> tuple[tuple[OperatorTask, ...], ...]:
    """Adjacent tasks that one call can do: Fourier transforms along several dimensions."""
    groups: list[tuple[OperatorTask, ...]] = []
    for task in tasks:
        join = getattr(task.actor, "joins", None)
        group = groups[-1] if groups else ()
        is_apart = not any(set(each.dims) & set(task.dims) for each in group)
        if group and join is not None and is_apart and join([each.actor for each in group]):
            groups[-1] = (*group, task)
        else:
            groups.append((task,))
    return tuple(groups)


def dtype_after(group: Iterable[OperatorTask], dtype: torch.dtype) -> torch.dtype:
    """The dtype of the numbers after tasks."""
    for task in group:
        if task.turns:
            dtype = task.target.dtype
    return dtype


def order_after(group: tuple[OperatorTask, ...], order: MemoryOrder) -> MemoryOrder:
    """The likely order of dimensions in memory after tasks, given the order before."""
    dims = [dim for task in group for dim in task.dims]
    after: Callable[[MemoryOrder, list[int]], MemoryOrder] | None = getattr(
        group[0].actor, "order_after", None
    )
    return order if after is None else after(order, dims)


def perform(groups: Iterable[tuple[OperatorTask, ...]], x: Tensor, values: LeafValues) -> Tensor:
    """Carry out tasks on a whole tensor."""
    for group in groups:
        x = perform_group(group, x, values)
    return x


def perform_group(group: tuple[OperatorTask, ...], x: Tensor, values: LeafValues) -> Tensor:
    """Carry out tasks that are one call."""
    actor, dims = group[0].actor, group[0].dims
    if len(group) > 1:
        return actor.act_together([(each.actor, each.dims[0]) for each in group], x)
    if group[0].terms:
        terms = (ordered(tuple(each.expand(dims[0]))) for each in group[0].terms)
        first, *others = [perform(groups, x, values) for groups in terms]
        return sum(others, first)
    value = values.get(actor.base) if hasattr(actor, "base") else None
    return actor.act(x, dims[0] if dims else 0, value)
