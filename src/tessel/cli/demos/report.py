"""Report: what came of a demo, and how it is shown."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from tessel.core.layout import Layout
from tessel.operators.units import num_bytes

Note = Callable[[str], None]


class Report(ABC):
    """What came of a demo, as the first worker knows it."""

    @property
    @abstractmethod
    def worst(self) -> float:
        """The largest error, or NaN if there is one."""

    @property
    @abstractmethod
    def wrong(self) -> list[str]:
        """What differs from one process by more than it should."""

    @abstractmethod
    def tables(self) -> list[tuple[Table, str]]:
        """What is shown: tables, each with the text below it."""

    def draw(self, folder: Path) -> list[tuple[Path, str]]:
        """Save pictures in a folder; where they are, and what to look at."""
        return []


def wave(shape: Sequence[int], phase: float = 0.0) -> Tensor:
    """A tensor whose values are a function of the global index, so that every layout sees it.

    >>> from tessel.cli.demos.report import wave
    >>> wave((2, 2)).shape
    torch.Size([2, 2])
    """
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(0.7 * index + phase).reshape(tuple(shape))


def new_table(title: str, first: str, *others: str) -> Table:
    """A table whose first column has names, and the others numbers."""
    table = Table(title=title, box=SIMPLE_HEAD, title_style="bold", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def workers_table(
    title: str,
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    sent: Sequence[int],
    times: tuple[str, str],
) -> Table:
    """A line for one process and one for each worker.

    Args:
        title: what to write above.
        columns: the names of the cells.
        cells: those of one process, then those of each worker.
        sent: the bytes that each worker sent.
        times: of one process, and of the workers, which is the same for all of them.
    """
    table = new_table(title, "who", *columns, "sent", "time")
    alone, *others = cells
    table.add_row("one process", *alone, "", times[0])
    for place, (own, count) in enumerate(zip(others, sent, strict=True)):
        table.add_row(f"worker {place}", *own, num_bytes(count), "" if place else times[1])
    return table


def sizes_of_parts(layout: Layout) -> list[str]:
    """Height and width of the picture that a tensor holds, and of each worker's part of it."""
    shapes = [layout.shape, *(layout.shape_on(worker) for worker in layout.partition.ranks)]
    return [" × ".join(map(str, shape[2:])) for shape in shapes]


def largest(values: Tensor) -> float:
    """The largest absolute value; zero of an empty tensor.

    >>> from tessel.cli.demos.report import largest
    >>> largest(torch.tensor([1.0, -2.0])), largest(torch.zeros(0))
    (2.0, 0.0)
    """
    return float(values.detach().abs().max()) if values.numel() else 0.0


def worst_of(errors: Sequence[float]) -> float:
    """The largest, or NaN if there is one, which `max` would lose."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def as_text(error: float) -> str:
    """An error with one digit."""
    return "0" if error == 0 else f"{error:.0e}"


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """The median time of some calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
