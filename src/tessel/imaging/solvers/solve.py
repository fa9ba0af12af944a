"""solve: iterate a method until a criterion is met, on whole or partitioned images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from tessel.imaging.solvers.checkpoint import Checkpoint, Progressed
from tessel.imaging.solvers.history import History
from tessel.imaging.solvers.method import Method, Values
from tessel.imaging.solvers.numbers import check_count
from tessel.imaging.solvers.progress import progress_bar
from tessel.imaging.solvers.space import Space
from tessel.imaging.solvers.stopping import Criterion
from tessel.layout import Layout

Metric = Callable[[Tensor], Any]
FULL = "the largest number of iterations"


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Args:
        x: the image, in the layout of the start.
        values: all that the method keeps, the image among them.
        history: numbers of all iterations.
        reason: why it ended.
        converged: whether it was a criterion that ended it.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> x = torch.ones(1)
    >>> found = solvers.solve(solvers.CG(lambda x: 2 * x, x), x, max_iterations=1)
    >>> found.x, found.iterations, found.converged
    (tensor([0.5000]), 1, False)
    """

    x: Tensor
    values: Values
    history: History
    reason: str
    converged: bool

    @property
    def iterations(self) -> int:
        """How many were made, those before a resume included."""
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
        max_iterations: at most so many, those before a resume included.
        layout: of a tensor, where there are several workers.
        stop: criteria, of which one is enough.
        metrics: functions of the image, by name, whose numbers go into the history: a `PSNR`, or a
            data fidelity. All workers call them.
        each: called on every worker with the number of iterations and the image.
        progress: a bar on the first worker.
        checkpoint: where to write the values, and to go on from.
        differentiable: whether gradients go through all iterations.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Distance:
    ...     def grad(self, x):
    ...         return x - torch.tensor([1.0, 2.0])
    >>> method = solvers.GradientDescent(Distance(), step=0.5)
    >>> found = solvers.solve(method, torch.zeros(2), stop=solvers.RelativeChange(1e-3))
    >>> found.iterations, found.reason
    (10, 'change below 0.001')
    """
    check_count("solve", 0, max_iterations=max_iterations)
    space = Space.of(start, layout, differentiable)
    x = start if isinstance(start, Tensor) else start.data
    _check_start(x, space)
    criteria = [stop] if callable(stop) else list(stop)
    run = _Run(method, space, criteria, dict(metrics or {}), each, checkpoint)
    console = _console(progress, space)
    names = (*method.reports, *run.metrics) or ("change",)
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        reached = run.begin(x)
        with progress_bar(method.name, max_iterations, names, console) as advance:
            reached, reason = run.iterate(reached, max_iterations, advance)
    found = Solution(
        reached.values["x"], reached.values, reached.history, reason, converged=reason != FULL
    )
    if not isinstance(start, Tensor):
        start.update_(found.x)
    return found


@dataclass(frozen=True)
class _Run:
    """A method, and all that goes on around its iterations."""

    method: Method
    space: Space
    criteria: list[Criterion]
    metrics: dict[str, Metric]
    each: Callable[[int, Tensor], None] | None
    checkpoint: Checkpoint | None

    def begin(self, x: Tensor) -> Progressed:
        values = self.method.begin(x, self.space)
        found = self.checkpoint and self.checkpoint.read(self.method, values, self.space)
        return found or Progressed(values)

    def iterate(
        self, reached: Progressed, most: int, advance: Callable[[History], None]
    ) -> tuple[Progressed, str]:
        begun = written = reached.iteration
        reason = self._reason(reached.history)
        while reason is None and reached.iteration < most:
            reached = self._next(reached)
            if self.each is not None:
                self.each(reached.iteration, reached.values["x"])
            advance(reached.history)
            if self.checkpoint and reached.iteration % self.checkpoint.every == 0:
                self.checkpoint.write(reached, self.method, self.space)
                written = reached.iteration
            reason = self._reason(reached.history)
        if self.checkpoint and max(written, begun) < reached.iteration:
            self.checkpoint.write(reached, self.method, self.space)
        return reached, reason or FULL

    def _next(self, reached: Progressed) -> Progressed:
        begin = time.perf_counter()
        before, k = reached.values["x"], reached.iteration
        values = self.method.iterate(reached.values, k, self.space)
        numbers = {"change": self._change(before, values["x"], k + 1)}
        numbers |= {name: float(values[name].detach()) for name in self.method.reports}
        numbers["seconds"] = time.perf_counter() - begin
        numbers |= self._measured(values["x"])
        reached.history.append(numbers)
        return Progressed(values, k + 1, reached.history)

    def _measured(self, x: Tensor) -> dict[str, float]:
        with torch.no_grad():
            return {name: _number(metric(x.detach())) for name, metric in self.metrics.items()}

    def _change(self, before: Tensor, after: Tensor, iteration: int) -> float:
        """The relative change; FloatingPointError on all workers if the image is not finite."""
        difference = (after - before).detach()
        moved, length = self.space.numbers((difference, difference), (after, after)).tolist()
        if not math.isfinite(moved + length):
            raise FloatingPointError(
                f"{self.method.name}: the image is not finite after iteration {iteration}; a "
                f"smaller step may help, or data without infinities and NaN"
            )
        return math.sqrt(moved / length) if length else float(moved > 0)

    def _reason(self, history: History) -> str | None:
        """The criterion that is met, as all workers see it."""
        if not history.iterations:
            return None
        met = self.space.agree([bool(criterion(history)) for criterion in self.criteria])
        reasons = (str(each) for each, is_met in zip(self.criteria, met, strict=True) if is_met)
        return next(reasons, None)


def _check_start(x: Tensor, space: Space) -> None:
    """Raise on all workers if the tensor of one is not its part of the image."""
    group = space.workers.group
    for worker, (shape, dtype) in zip(
        group.workers, group.share_objects((tuple(x.shape), x.dtype)), strict=True
    ):
        if shape != space.layout.shape_on(worker):
            raise ValueError(
                f"solve: worker {worker} starts from a tensor of shape {shape}, and its part of "
                f"{space.layout} has {space.layout.shape_on(worker)}"
            )
        if not dtype.is_floating_point and not dtype.is_complex:
            raise ValueError(
                f"solve: worker {worker} starts from numbers of {dtype}; floating point numbers "
                f"are needed"
            )


def _console(progress: bool | Console, space: Space) -> Console | None:
    if space.workers.rank != 0 or progress is False:
        return None
    return Console() if progress is True else progress


def _number(found: Any) -> float:
    """What a metric found; of a loss with a number for each image, the sum."""
    return float(found.sum() if isinstance(found, Tensor) else found)
