"""Explanations: the steps of a plan, and what they cost each worker."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tessel.core.layout import Layout
from tessel.operators.algebra import Kronecker, ParOperator
from tessel.operators.cost import Cost, Counter, ExplainedStep, lines_of
from tessel.operators.layouts import examined
from tessel.operators.leaf import Leaf
from tessel.operators.picture import draw_steps
from tessel.operators.planning import OperatorPlan
from tessel.operators.rates import Machine, known_machine
from tessel.operators.space import Shape
from tessel.operators.units import num_bytes, num_flops, num_seconds

MOST_ROWS = 4  # for one step
WIDTH = 150


@dataclass(frozen=True)
class Explanation:
    """The steps of a plan and their costs.

    It prints as a table; a row describes workers with equal numbers. `save` draws it.

    Attributes:
        lines: the steps.
        workers: the workers that were examined: all, or some that represent many.
        costs: for each step the cost of each of them.
        num_workers: the number of workers.
        machine: the model that predicts the times.
        notes: further remarks for the reader.
    """

    lines: tuple[ExplainedStep, ...]
    workers: tuple[int, ...]
    costs: tuple[tuple[Cost, ...], ...]
    num_workers: int
    machine: Machine
    notes: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all workers were examined."""
        return len(self.workers) == self.num_workers

    @cached_property
    def totals(self) -> tuple[Cost, ...]:
        """The cost of all steps for each worker."""
        return tuple(
            sum((step[k] for step in self.costs), Cost()) for k in range(len(self.workers))
        )

    @property
    def time(self) -> float:
        """The predicted seconds: each step takes as long as its slowest worker."""
        steps = sum(max(cost.time for cost in step) for step in self.costs)
        return self.machine.rates_for(self.num_workers).call + steps

    @property
    def memory(self) -> int:
        """The bytes of the worker that needs the most."""
        return max(total.memory for total in self.totals)

    @property
    def bytes_sent(self) -> int:
        """The bytes sent by the worker that sends the most."""
        return max(total.bytes_sent for total in self.totals)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw the steps into a file: PNG, PDF or SVG. Needs matplotlib."""
        figure = draw_steps(self.lines, self.costs, self.summary)
        figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.3)

    def __rich__(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for title in ("step", "layout", "workers", "local shape"):
            table.add_column(title, no_wrap=title != "step")
        for title in ("flops", "messages", "bytes sent", "peak memory", "time"):
            table.add_column(title, justify="right", no_wrap=True)
        for number, (line, costs) in enumerate(zip(self.lines, self.costs, strict=True), 1):
            shapes = [line.after.shape_on(worker) for worker in self.workers]
            name = Text(f"{number} {line.title}", style="magenta" if line.is_transfer else "cyan")
            for row, (who, shape, cost) in enumerate(self._rows(shapes, costs)):
                labels = (name, line.layout) if not row else ("", "")
                table.add_row(*labels, who, "×".join(map(str, shape)), *_numbers(cost))
        table.add_section()
        for row, (who, _, total) in enumerate(self._rows([()] * len(self.workers), self.totals)):
            table.add_row("" if row else "total", "", who, "", *_numbers(total), style="bold")
        below = self.summary, f"machine: {self.machine.origin}", *self.notes
        return Group(table, *map(Text, below))

    @property
    def summary(self) -> str:
        """The most important numbers in a line."""
        transfers = sum(line.is_transfer for line in self.lines)
        return (
            f"{transfers} transfer{'s' * (transfers != 1)}; predicted: {num_seconds(self.time)}, "
            f"at most {num_bytes(self.memory)} of memory and {num_bytes(self.bytes_sent)} sent "
            f"by a worker"
        ) + ("" if self.is_complete else f"; only some of {self.num_workers} workers were examined")

    def _rows(
        self, shapes: Sequence[Shape], costs: Sequence[Cost]
    ) -> Iterable[tuple[str, Shape, Cost]]:
        """Workers grouped by equal numbers; of many groups the largest and the smallest."""
        alike: dict[tuple[Shape, Cost], list[int]] = {}
        for worker, shape, cost in zip(self.workers, shapes, costs, strict=True):
            alike.setdefault((shape, cost), []).append(worker)
        if len(alike) == 1:
            who = "all" if self.is_complete else "all looked at"
            return [(who, *next(iter(alike)))]
        rows = [(row, sorted(workers)) for row, workers in alike.items()]
        if len(rows) > MOST_ROWS or not self.is_complete:
            by_size = sorted(rows, key=lambda row: (row[0][1].memory, row[0][1].bytes_sent))
            ends = (("largest", by_size[-1]), ("smallest", by_size[0]))
            return [(f"{name}: {_listing(workers)}", *row) for name, (row, workers) in ends]
        return [(_listing(workers), *row) for row, workers in rows]

    def __str__(self) -> str:
        stream = io.StringIO()
        Console(file=stream, width=WIDTH, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def explain(operator: Any, *, columns: int = 1, machine: Machine | None = None) -> Explanation:
    """The steps of a distributed operator, and what each of them costs each worker.

    Args:
        operator: a distributed operator.
        columns: the length of the batch on each worker.
        machine: the model that predicts times; by default the one stored for this machine.

    >>> import tessel, torch
    >>> F = tessel.distribute(tessel.ParDFT(torch.complex64, 8), [1])
    >>> explanation = explain(F)
    >>> [line.title for line in explanation.lines], explanation.bytes_sent
    (['ParDFT along 0'], 0)
    """
    explanation = explain_plan(
        operator.plan, operator.domain.dtype, operator.storage, columns, machine
    )
    products = [each for each in _parts_of(operator.expression) if isinstance(each, Kronecker)]
    factors = [[repr(factor) for factor in each.factors] for each in products]
    if all(each == each[::-1] for each in factors):
        return explanation
    # The order of factors matters, and a `vec` fits another order as well.
    lengths = ", ".join(f"{dim} of length {n}" for dim, n in enumerate(operator.domain.shape))
    note = (
        f"dimensions: {lengths}; kron has its factors in this order, those written as "
        f'Fz ⊗ Fy ⊗ Fx need kron(Fz, Fy, Fx, order="julia")'
    )
    return replace(explanation, notes=(note,))


def _parts_of(operator: ParOperator) -> Iterator[ParOperator]:
    yield operator
    for child in operator.children():
        yield from _parts_of(child)


def explain_plan(
    plan: OperatorPlan,
    dtype: torch.dtype,
    storage: Mapping[Leaf, Layout],
    columns: int = 1,
    machine: Machine | None = None,
    workers: Sequence[int] | None = None,
) -> Explanation:
    """`explain` for a plan, whose workers need not exist, or for some of its workers."""
    if columns < 1:
        raise ValueError(f"a batch must have at least one column, got {columns}")
    machine = known_machine() if machine is None else machine
    P = plan.source.partition
    workers = examined(P) if workers is None else workers
    lines = tuple(lines_of(plan, dtype))
    counter = Counter(machine.rates_for(P.size), storage, columns, machine.network)
    costs = tuple(zip(*(counter.costs(lines, at) for at in workers), strict=True))
    return Explanation(lines, tuple(workers), costs, P.size, machine)


def _numbers(cost: Cost) -> tuple[str, ...]:
    return (
        num_flops(cost.flops),
        str(cost.num_messages),
        num_bytes(cost.bytes_sent),
        num_bytes(cost.memory),
        num_seconds(cost.time),
    )


def _listing(workers: Sequence[int]) -> str:
    """A short list of workers.

    >>> _listing([0, 1, 2, 5])
    '0–2, 5'
    """
    starts = [workers[0], *(b for a, b in pairwise(workers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(workers) if b != a + 1), workers[-1]]
    runs = [f"{a}–{b}" if a != b else str(a) for a, b in zip(starts, ends, strict=True)]
    return ", ".join(runs) if len(runs) <= 3 else f"{runs[0]}, {runs[1]}, … {runs[-1]}"
