"""Choices: the fastest partition of an operator's tensor for a number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from operator import index as as_int
from typing import Any

from rich.console import RenderableType

from tessel.core.partition import HypotheticalPartition
from tessel.operators.algebra import Bound, ParOperator
from tessel.operators.explanation import Explanation, explain_plan
from tessel.operators.layouts import ANYWHERE, on_common_grids, on_grid, representatives
from tessel.operators.planning import OperatorPlan, make_plan
from tessel.operators.rates import Machine, known_machine
from tessel.operators.space import Shape, TensorSpace, checked_length
from tessel.operators.storage import storage_of
from tessel.operators.units import num_bytes, num_seconds, ranking

MOST_TASKS = 800  # in all plans that are compared, so that this takes less than a second


@dataclass(frozen=True)
class Candidate:
    """A partition, with its predicted costs.

    Attributes:
        partition: the number of workers along each dimension, as `distribute` takes it.
        time: seconds.
        memory: the bytes of the worker that needs the most.
        bytes: the bytes sent by the worker that sends the most.
        plan: the steps, in order.
    """

    partition: Shape
    time: float
    memory: int
    bytes: int
    plan: OperatorPlan

    @classmethod
    def of(
        cls,
        operator: ParOperator,
        grid: Shape,
        out: Shape | str | None,
        columns: int,
        machine: Machine,
    ) -> Candidate:
        """The prediction for a grid, and for a result with a layout as in `distribute`."""
        plan = plan_on(operator, grid, out)
        # A few workers represent all: counting for thousands would take longer than planning.
        some = representatives(plan.source.partition)
        dtype, storage = operator.domain.dtype, storage_of(plan)
        found = explain_plan(plan, dtype, storage, columns, machine, some)
        return cls(grid, found.time, found.memory, found.bytes_sent, plan)


@dataclass(frozen=True)
class Choice:
    """The best partition, and the others that were compared.

    Attributes:
        operator: the operator.
        workers: the number of workers.
        candidates: the partitions, the fastest first.
        machine: the model that predicts the times.
        columns: the length of the batch on each worker.
    """

    operator: ParOperator
    workers: int
    candidates: tuple[Candidate, ...]
    machine: Machine
    columns: int = 1

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def partition(self) -> list[int]:
        """The number of workers along each dimension, as `distribute` takes it."""
        return list(self.best.partition)

    @property
    def time(self) -> float:
        """The predicted seconds."""
        return self.explanation.time

    @property
    def memory(self) -> int:
        """The bytes of the worker that needs the most."""
        return self.explanation.memory

    @property
    def bytes(self) -> int:
        """The bytes sent by the worker that sends the most."""
        return self.explanation.bytes_sent

    @cached_property
    def explanation(self) -> Explanation:
        """The steps of the best partition."""
        plan, dtype = self.best.plan, self.operator.domain.dtype
        return explain_plan(plan, dtype, storage_of(plan), self.columns, self.machine)

    def __rich__(self) -> RenderableType:
        titles = "predicted time", "memory per worker", "bytes sent per worker", "transfers"
        rows = [
            (
                "×".join(map(str, each.partition)),
                num_seconds(each.time),
                num_bytes(each.memory),
                num_bytes(each.bytes),
                str(each.plan.num_transfers),
            )
            for each in self.candidates
        ]
        return ranking("partition", *titles, rows=rows)

    def __repr__(self) -> str:
        return f"Choice({self.partition} of {len(self.candidates)}, {num_seconds(self.time)})"


def best_partition(
    operator: ParOperator,
    workers: int,
    *,
    partition_out: Sequence[int] | str | None = None,
    columns: int = 1,
    machine: Machine | None = None,
    partition: Sequence[int] | None = None,
) -> Choice:
    """The partition with the least predicted time for an operator on a number of workers.

    Nothing is executed, and the workers need not exist. If there are very many partitions, only
    those whose largest parts are the smallest are compared.

    Args:
        operator: any operator that is not distributed.
        workers: the number of workers.
        partition_out: as in `distribute`: by default the result has the layout of the input, a
            number of workers for each dimension specifies another one, and `"anywhere"` leaves it
            where the last step ends.
        columns: the length of the batch on each worker.
        machine: the model that predicts times; by default the one stored for this machine.
        partition: the only partition to look at; by default all are compared.

    >>> import tessel, torch
    >>> F = tessel.kron(*(tessel.ParDFT(torch.complex64, 64) for _ in range(3)))
    >>> choice = best_partition(F, 1)
    >>> choice.partition, choice.bytes
    ([1, 1, 1], 0)
    """
    workers = checked_length("best_partition", "workers", workers)
    columns = checked_length("best_partition", "columns", columns)
    if isinstance(operator, Bound):
        operator = operator.operator
    if hasattr(operator, "plan") or not isinstance(operator, ParOperator):
        raise ValueError(f"expected an operator that is not distributed, got {operator!r}")
    if operator.reductions:
        raise ValueError(f"{operator} already sums over workers and cannot be distributed")
    out: Shape | str | None = ANYWHERE
    if partition_out != ANYWHERE:
        wanted = f"partition_out must be None, {ANYWHERE!r}, or"
        out = _checked_grid(wanted, partition_out, workers, operator.codomain)
    given = _checked_grid("partition must be", partition, workers, operator.domain)
    grids = candidate_grids(operator, workers) if given is None else [given]
    machine = known_machine() if machine is None else machine
    candidates = [Candidate.of(operator, grid, out, columns, machine) for grid in grids]
    ranked = sorted(candidates, key=lambda each: (each.time, each.memory, each.bytes))
    return Choice(operator, workers, tuple(ranked), machine, columns)


def _checked_grid(wanted: str, given: Any, workers: int, space: TensorSpace) -> Shape | None:
    """The numbers of workers along dimensions, if given; ValueError if they are invalid."""
    if given is None:
        return None
    ndim = len(space.shape)
    try:
        grid = tuple(as_int(size) for size in given)
    except TypeError:
        grid = ()
    if len(grid) != ndim or min(grid) < 1 or prod(grid) != workers:
        raise ValueError(
            f"{wanted} numbers of workers along {ndim} dimensions, {workers} in all; got {given!r}"
        )
    return grid


def candidate_grids(operator: ParOperator, workers: int) -> list[Shape]:
    """The grids to compare: if there are very many, those whose largest parts are the smallest."""
    shape = operator.domain.shape
    # Only those on which all workers have a part, if there are any.
    grids = factorings(workers, shape) or factorings(workers, (workers,) * len(shape))

    def rank(grid: Shape) -> tuple[int, int]:
        largest = prod(ceil(length / parts) for length, parts in zip(shape, grid, strict=True))
        # among equals, the one that splits fewer dimensions
        return largest, sum(n > 1 for n in grid)

    # Planning time grows with the number of tasks and grids: large expressions try fewer grids.
    num_tasks = max(1, sum(1 for _ in operator.expand(0)))
    return sorted(grids, key=rank)[: max(16, MOST_TASKS // num_tasks)]


def plan_on(operator: ParOperator, grid: Shape, out: Shape | str | None = None) -> OperatorPlan:
    """The plan of an operator on a grid of workers, with a result as in `distribute`."""
    source = on_grid(HypotheticalPartition(grid), operator.domain.shape)
    if out == ANYWHERE:
        return make_plan(operator, source, None)
    assert not isinstance(out, str)
    workers = HypotheticalPartition(grid if out is None else out)
    end = on_grid(workers, operator.codomain.shape)
    return make_plan(operator, *on_common_grids(source, end))


def factorings(number: int, most: Shape) -> list[Shape]:
    """All ways to write a number as a product of factors that are not larger than these."""
    if number > prod(most):
        return []
    if len(most) == 1:
        return [(number,)]
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    return [
        (factor, *rest)
        for factor in divisors
        if factor <= most[0]
        for rest in factorings(number // factor, most[1:])
    ]
