"""Report: the results of a demo, and how they are shown."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from tessel.core.layout import Layout
from tessel.operators.units import num_bytes, num_seconds

Say = Callable[[str], None]
TableColumns = dict[str, Callable[[Any], str]]  # names, and how their values are written
TableRows = tuple[tuple[Any, ...], ...]  # the values; None for empty cells


@dataclass(frozen=True)
class Report:
    """The results of a demo, on the first worker.

    Args:
        title: the title of the demo.
        subject: the rest of the title, above the table.
        errors: the largest differences from one process, by name.
        limit: the largest error that is due to rounding.
        columns, rows: the table.
        legend: the text below it, before the errors.
        is_wrong: whether something else is wrong.
        draw: saves a picture in a folder; returns its path, and what it shows.
    """

    title: str
    subject: str
    errors: Mapping[str, float]
    limit: float
    columns: TableColumns
    rows: TableRows
    legend: str = ""
    is_wrong: bool = False
    draw: Callable[[Path], tuple[Path, str]] | None = None

    @property
    def worst(self) -> float:
        """The largest error, or NaN if there is one."""
        return worst_of(self.errors.values())

    @property
    def wrong(self) -> list[str]:
        """The results that differ from one process by too much."""
        # Not "more than the limit", since a NaN is neither more nor less.
        return [] if self.worst <= self.limit and not self.is_wrong else [self.title]

    @property
    def table(self) -> Table:
        title = f"{self.title} {self.subject}"
        table = Table(title=title, box=SIMPLE_HEAD, title_style="bold", pad_edge=False)
        for number, name in enumerate(self.columns):
            table.add_column(name, no_wrap=True, justify="right" if number else "left")
        for row in self.rows:
            cells = zip(self.columns.values(), row, strict=True)
            table.add_row(*("" if value is None else write(value) for write, value in cells))
        return table

    @property
    def text(self) -> str:
        """The text below the table."""
        errors = ", ".join(f"{name} {as_text(error)}" for name, error in self.errors.items())
        return f"{self.legend}largest difference from one process: {errors}"


def of_processes(
    columns: TableColumns,
    alone: Sequence[Any],
    workers: Iterable[Sequence[Any]],
    sent: Sequence[int],
    seconds: tuple[float, float],
) -> tuple[TableColumns, TableRows]:
    """A table with a line for one process, and a line for each worker.

    Args:
        columns: the columns of each.
        alone: the values of one process.
        workers: the values of each worker.
        sent: the bytes that each worker sent.
        seconds: the time of one process, and that of all workers together.
    """
    rows = [("one process", *alone, None, seconds[0])]
    for place, (own, count) in enumerate(zip(workers, sent, strict=True)):
        rows.append((f"worker {place}", *own, count, None if place else seconds[1]))
    return {"who": str, **columns, "sent": num_bytes, "time": num_seconds}, tuple(rows)


def wave(shape: Sequence[int], phase: float = 0.0) -> Tensor:
    """A tensor whose values are a function of the global index, so that all layouts agree.

    >>> from tessel.cli.demos.report import wave
    >>> wave((2, 2)).shape
    torch.Size([2, 2])
    """
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(0.7 * index + phase).reshape(tuple(shape))


def sizes_of_parts(layout: Layout) -> list[str]:
    """Height and width of the picture in a tensor, and of each worker's part of it."""
    shapes = [layout.shape, *(layout.shape_on(worker) for worker in layout.partition.ranks)]
    return [" × ".join(map(str, shape[2:])) for shape in shapes]


def largest(values: Tensor) -> float:
    """The largest absolute value; zero for an empty tensor.

    >>> from tessel.cli.demos.report import largest
    >>> largest(torch.tensor([1.0, -2.0])), largest(torch.zeros(0))
    (2.0, 0.0)
    """
    return float(values.detach().abs().max()) if values.numel() else 0.0


def worst_of(errors: Iterable[float]) -> float:
    """The largest error, or NaN if there is one, which `max` would lose."""
    return float(torch.tensor([*errors], dtype=torch.float64).max())


def as_text(error: float) -> str:
    """An error with one digit."""
    return "0" if error == 0 else f"{error:.0e}"


def as_share(part: float) -> str:
    """A share in percent."""
    return f"{part:.1%}"


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """The median time of some calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
