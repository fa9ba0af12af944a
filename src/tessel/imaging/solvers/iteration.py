"""solve: iterate a method until a criterion is met, on whole or partitioned images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from tessel.core import Layout
from tessel.imaging.signal import local_data
from tessel.imaging.solvers.checkpoint import Checkpoint
from tessel.imaging.solvers.method import Criterion, History, Iterates, Method, Space, check_count

Advance = Callable[[History], None]


@contextmanager
def progress_bar(
    title: str, total: int, names: Sequence[str], shown: bool | Console
) -> Iterator[Advance | None]:
    """Show a progress bar if requested; call the yielded function after each iteration."""
    if shown is False:
        yield None
        return
    console = Console() if shown is True else shown
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


Metric = Callable[[Tensor], Any]
FULL = "the largest number of iterations"


@dataclass(frozen=True)
class Solution:
    """The result of a solver.

    Args:
        x: the image, in the layout of the start.
        values: all values of the method, including the image.
        history: the numbers of all iterations.
        reason: why the iteration ended.
        converged: whether a criterion ended it.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> x = torch.ones(1)
    >>> found = solvers.solve(solvers.CG(lambda x: 2 * x, x), x, max_iterations=1)
    >>> found.x, found.iterations, found.converged
    (tensor([0.5000]), 1, False)
    """

    x: Tensor
    values: Iterates
    history: History
    reason: str
    converged: bool

    @property
    def iterations(self) -> int:
        """The number of iterations, including those before a resume."""
        return self.history.iterations


def solve(
    method: Method,
    start: Any,
    *,
    max_iterations: int = 100,
    layout: Layout | None = None,
    stop: Criterion | Sequence[Criterion] = (),
    metrics: Mapping[str, Metric] | None = None,
    each: Callable[[int, Tensor], None] | None = None,
    progress: bool | Console = False,
    checkpoint: Checkpoint | None = None,
    differentiable: bool = False,
) -> Solution:
    """Iterate a method on all workers that have the image.

    Args:
        method: such as `PGD(fidelity, prior, step=1.0)`.
        start: a `DistributedSignal`, which holds the solution afterwards, or a tensor.
        max_iterations: the largest number of iterations, including those before a resume.
        layout: the layout of a tensor, required with several workers.
        stop: criteria, of which one suffices.
        metrics: functions of the image, by name, whose numbers are added to the history: a `PSNR`,
            or a data fidelity. All workers call them.
        each: a function that is called on every worker with the number of iterations and the image.
        progress: whether to show a bar on the first worker, or its console.
        checkpoint: where to write the values, and to resume from.
        differentiable: whether gradients go through all iterations.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> distance = SimpleNamespace(grad=lambda x: x - torch.tensor([1.0, 2.0]))
    >>> method = solvers.GradientDescent(distance, step=0.5)
    >>> found = solvers.solve(method, torch.zeros(2), stop=solvers.RelativeChange(1e-3))
    >>> found.iterations, found.reason
    (10, 'change below 0.001')
    """
    check_count("solve", 0, max_iterations=max_iterations)
    space, x = Space.of(start, layout, differentiable), local_data(start)
    space.check(x, "solve")
    criteria = [stop] if callable(stop) else list(stop)
    measures = dict(metrics or {})
    shown = progress if space.workers.rank == 0 else False
    names = (*method.reports, *measures) or ("change",)
    with (
        torch.set_grad_enabled(differentiable and torch.is_grad_enabled()),
        progress_bar(method.name, max_iterations, names, shown) as advance,
    ):
        values, done, history = method.begin(x, space), 0, History()
        if checkpoint is not None:
            values, done, history = checkpoint.read(method, values, space)
            if done > max_iterations:
                raise ValueError(
                    f"max_iterations={max_iterations}, but the checkpoint in {checkpoint.folder} "
                    f"is at iteration {done}; pass {done} or more, resume=False, or another folder"
                )
        # A metric that is new in a resumed run begins now: criteria may need its numbers.
        is_known = measures.keys() <= history.keys()
        reason = _reason(criteria, history, space) if is_known else None
        while reason is None and done < max_iterations:
            values, numbers = _iterated(method, values, done, space, measures)
            history.append(numbers)
            done += 1
            if each is not None:
                each(done, values["x"])
            if advance is not None:
                advance(history)
            reason = _reason(criteria, history, space)
            is_last = reason is not None or done == max_iterations
            if checkpoint is not None and (is_last or done % checkpoint.every == 0):
                checkpoint.write(values, done, history, method, space)
    if not isinstance(start, Tensor):
        start.update_(values["x"])
    return Solution(values["x"], values, history, reason or FULL, reason is not None)


def _iterated(
    method: Method, values: Iterates, done: int, space: Space, measures: Mapping[str, Metric]
) -> tuple[Iterates, dict[str, float]]:
    """The values after one more iteration, and its numbers with those of the metrics.

    FloatingPointError on all workers if the image is not finite.
    """
    began, before = time.perf_counter(), values["x"]
    values = method.iterate(values, done, space)
    after = values["x"]
    difference = (after - before).detach()
    # In one exchange, and before criteria are evaluated: values that are not finite must end all
    # workers.
    moved, length = space.numbers((difference, difference), (after, after)).tolist()
    if not math.isfinite(moved + length):
        raise FloatingPointError(
            f"{method.name}: the image is not finite after iteration {done + 1}; a smaller step "
            f"may help, or data without infinities and NaN"
        )
    numbers = {"change": math.sqrt(moved / length) if length else float(moved > 0)}
    for name in method.reports:
        numbers[name] = float(values[name].detach())
    numbers["seconds"] = time.perf_counter() - began  # without the metrics
    for name, metric in measures.items():
        with torch.no_grad():
            found = metric(after.detach())
        # The sum of a loss that has a number for each image of the batch.
        numbers[name] = float(found.sum() if isinstance(found, Tensor) else found)
    return values, numbers


def _reason(criteria: Sequence[Criterion], history: History, space: Space) -> str | None:
    """The criterion that is met, the same on all workers."""
    if not criteria or not history.iterations:
        return None
    # Clocks and users' numbers differ between workers: all stop when one of them would.
    met = space.agree([bool(criterion(history)) for criterion in criteria])
    return str(criteria[met.index(True)]) if any(met) else None
