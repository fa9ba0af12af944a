"""A progress bar on the first worker, with the newest numbers of the history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tessel.imaging.solvers.history import History

Advance = Callable[[History], None]


@contextmanager
def progress_bar(
    title: str, total: int, names: Sequence[str], console: Console | None
) -> Iterator[Advance]:
    """Show a bar on this console; what is given is called after each iteration."""
    if console is None:
        yield lambda history: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, numbers="")

        def advance(history: History) -> None:
            last = history.last()
            numbers = "  ".join(f"{name} {last[name]:.4g}" for name in names if name in last)
            bar.update(task, completed=history.iterations, numbers=numbers)

        yield advance
