"""The third act: a Fourier transform of a tensor in pencils, its plan, and a step of an FNO."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from tessel import viz
from tessel.cli.acts.act import wave
from tessel.cli.acts.movements import grid
from tessel.layout import Layout
from tessel.models import FNO
from tessel.operators import ANYWHERE, Distributed, ParDFT, distribute, kron
from tessel.operators.layouts import numel_sent
from tessel.operators.planning import Local, OperatorPlan, Transfer
from tessel.partition import Partition, world
from tessel.testing import count_traffic

TITLE = "a Fourier transform"
TITLE_OF_STEP = "a step of an FNO"
LIMIT = 1e-10  # of relative errors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A step of the plan: what is done, how the result lies, and what is sent for it."""

    name: str
    layout: str
    local_shapes: tuple[Shape, ...]
    bytes_sent: int


@dataclass(frozen=True)
class Transform:
    """What came of the transform.

    Args:
        shape: of the whole tensor.
        grid: of the workers.
        value_error: the largest difference from `torch.fft`, relative to the largest value.
        gradient_error: the same for the gradient of the input.
        inverse_error: the largest difference of what the inverse gives from the input.
        steps: the plan.
        transfers: how often data is rearranged if the result stays where it is, if it comes back,
            and for the transform and its inverse.
        bytes_sent: what all workers sent, as counted.
        seconds: the median time of one process, and of the workers.
    """

    shape: Shape
    grid: Shape
    value_error: float
    gradient_error: float
    inverse_error: float
    steps: tuple[Step, ...]
    transfers: tuple[int, int, int]
    bytes_sent: int
    seconds: tuple[float, float]

    @property
    def worst(self) -> float:
        """The largest of the three errors."""
        return _worst((self.value_error, self.gradient_error, self.inverse_error))

    @property
    def foretold(self) -> int:
        """The bytes that the plan says are sent."""
        return sum(step.bytes_sent for step in self.steps)


@dataclass(frozen=True)
class Training:
    """What came of a step of training.

    Args:
        layout: of the input.
        value_error: the largest difference of the output from that of one worker.
        parameter_error: the same for all parameters after two steps.
        stored: the bytes of parameters of one worker alone, and of each of several.
        sent: the bytes that each worker sent in a step.
        seconds: how long a step of one worker took, and of several.
    """

    layout: Layout
    value_error: float
    parameter_error: float
    stored: tuple[int, tuple[int, ...]]
    sent: tuple[int, ...]
    seconds: tuple[float, float]

    @property
    def worst(self) -> float:
        """The larger error."""
        return _worst((self.value_error, self.parameter_error))


@dataclass(frozen=True)
class Report:
    """Both, as the first worker knows them."""

    transform: Transform
    training: Training

    @property
    def wrong(self) -> list[str]:
        """What differs by too much, or does not send what its plan says."""
        transform = self.transform
        is_wrong = {
            TITLE: not transform.worst <= LIMIT or transform.foretold != transform.bytes_sent,
            TITLE_OF_STEP: not self.training.worst <= LIMIT,
        }
        return [title for title, wrong in is_wrong.items() if wrong]

    @property
    def worst(self) -> float:
        return _worst((self.transform.worst, self.training.worst))


def perform(size: int) -> Report | None:
    """Run on every worker; the report on the first."""
    transform, training = _transform(max(4, size // 4)), _training(max(16, size // 4))
    return Report(transform, training) if world().rank == 0 else None


# --- the transform


def _transform(length: int) -> Transform:
    P = world()
    shape = (length, length + 2, length + 5)
    along = [ParDFT(torch.complex128, n) for n in shape[:-1]]
    operator = kron(*along, ParDFT(torch.float64, shape[-1]))
    workers = (*grid(P.size), 1)
    F = _distributed(operator, workers, ANYWHERE)
    whole = wave(shape)
    x = F.layout_in.local_part(whole).clone().requires_grad_()
    with count_traffic() as traffic:
        y = F * x
    errors = _errors(F, whole, x, y)
    parts = P.group.share_objects((*errors, traffic.bytes_sent))
    *worst, sent = zip(*parts, strict=True)
    value_error, gradient_error, inverse_error = map(_worst, worst)
    with torch.no_grad():
        alone = _median_seconds(lambda: torch.fft.rfftn(whole))
        spread = _median_seconds(lambda: F * x)
    returning, both = _distributed(operator, workers, None), F.inv @ F
    assert isinstance(both, Distributed)
    return Transform(
        shape,
        workers,
        value_error,
        gradient_error,
        inverse_error,
        steps=_steps(F.plan),
        transfers=(F.plan.num_transfers, returning.plan.num_transfers, both.plan.num_transfers),
        bytes_sent=sum(sent),
        seconds=(alone, spread),
    )


def _distributed(operator: object, workers: Shape, end: str | None) -> Distributed:
    found = distribute(operator, workers, end)  # type: ignore[arg-type]
    assert isinstance(found, Distributed)
    return found


def _errors(F: Distributed, whole: Tensor, x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Of the result, of the gradient of ½ Σ w |y|², and of the inverse, on this worker."""
    X = whole.clone().requires_grad_()
    Y = torch.fft.rfftn(X)
    weights = wave(Y.shape, phase=1.0)
    (expected,) = torch.autograd.grad((weights * Y.abs().square()).sum() / 2, X)
    mine = F.layout_out.local_part(weights)
    (gradient,) = torch.autograd.grad((mine * y.abs().square()).sum() / 2, x)
    back = F.inv * y.detach()
    return (
        _largest(y.detach() - F.layout_out.local_part(Y.detach())) / _largest(Y.detach()),
        _largest(gradient - F.layout_in.local_part(expected)) / _largest(expected),
        _largest(back - x.detach()),
    )


def _worst(errors: Sequence[float]) -> float:
    """The largest, or NaN if there is one."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _median_seconds(function: Callable[[], Tensor], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _steps(plan: OperatorPlan) -> tuple[Step, ...]:
    """The steps, for all workers."""
    workers = plan.source.partition.ranks
    found = []
    for step in plan.every_step():
        sent, name = 0, "rearrange"
        if isinstance(step, Local):
            dims = ", ".join(str(dim) for task in step.group for dim in task.dims)
            name = f"transform along {dims}"
        elif isinstance(step, Transfer):
            sent = 16 * sum(numel_sent(step.before, step.after, at) for at in workers)
        shapes = tuple(step.after.shape_on(worker) for worker in workers)
        found.append(Step(name, step.after.brief, shapes, sent))
    return tuple(found)


# --- the step of an FNO


def _training(length: int) -> Training:
    P = world()
    P_x = P.create_cartesian_topology_partition((1, 1, *grid(P.size)))
    model, alone = (_model(each) for each in (P_x, Partition((P.rank or 0,), (1, 1, 1, 1))))
    alone.load_state_dict(model.state_dict())
    whole = wave((2, 1, length, length + 3))
    layout = Layout.balanced(P_x, whole.shape)
    y, after, bytes_sent = _train(model, layout.local_part(whole).clone(), whole.numel())
    expected, before, _ = _train(alone, whole, whole.numel())
    value_error = _largest(y - layout.local_part(expected)) / _largest(expected)
    expected_state = alone.state_dict()
    parameter_error = _worst(
        [_largest(value - expected_state[name]) for name, value in model.state_dict().items()]
    )
    stored = sum(each.nbytes for each in model.parameters())
    parts = P.group.share_objects((value_error, parameter_error, stored, bytes_sent))
    value_errors, parameter_errors, everyones, sent = zip(*parts, strict=True)
    return Training(
        layout,
        _worst(value_errors),
        _worst(parameter_errors),
        stored=(sum(each.nbytes for each in alone.parameters()), everyones),
        sent=sent,
        seconds=(before, after),
    )


def _model(P_x: Partition) -> FNO:
    return FNO(P_x, 1, 1, width=8, modes=6, blocks=2, dtype=torch.float64)


def _train(model: FNO, x: Tensor, numel: int) -> tuple[Tensor, float, int]:
    """Two steps, since the first one makes plans: the output, time and bytes sent of the second.

    The loss is the mean of all squares, of which each worker has a share.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        begin = time.perf_counter()
        with count_traffic() as traffic:
            y = model(x)
            (y.square().sum() / numel).backward()
        optimizer.step()
        seconds = time.perf_counter() - begin
    return y.detach(), seconds, traffic.bytes_sent


# --- what is shown


def tables(report: Report) -> list[Table]:
    """The plan of the transform, and the step of the FNO."""
    return [_plan_table(report.transform), _training_table(report.training)]


def _plan_table(transform: Transform) -> Table:
    lengths, workers = (" × ".join(map(str, each)) for each in (transform.shape, transform.grid))
    title = f"{TITLE} of {lengths} numbers on {workers} workers"
    table = _table(title, "its plan", ("layout", "local shapes", "sent"))
    for number, step in enumerate(transform.steps, 1):
        shapes = dict.fromkeys(" × ".join(map(str, shape)) for shape in step.local_shapes)
        table.add_row(
            f"{number} {step.name}",
            step.layout.replace("[", r"\["),
            "\n".join(shapes),
            viz.num_bytes(step.bytes_sent) if step.bytes_sent else "",
        )
    return table


def _training_table(training: Training) -> Table:
    height, width = training.layout.shape[2:]
    title = f"{TITLE_OF_STEP} on fields of {height} × {width}"
    table = _table(title, "who", ("part", "parameters", "sent", "time"))
    alone, everyones = training.stored
    before, after = training.seconds
    table.add_row(
        "one process", f"{height} × {width}", viz.num_bytes(alone), "", f"{1e3 * before:.0f} ms"
    )
    for place, (stored, sent) in enumerate(zip(everyones, training.sent, strict=True)):
        rows, columns = training.layout.shape_on(training.layout.partition.ranks[place])[2:]
        table.add_row(
            f"worker {place}",
            f"{rows} × {columns}",
            viz.num_bytes(stored),
            viz.num_bytes(sent),
            f"{1e3 * after:.0f} ms" if place == 0 else "",
        )
    return table


def _table(title: str, first: str, others: tuple[str, ...]) -> Table:
    found = Table(title=title, box=SIMPLE_HEAD, title_style="bold", pad_edge=False)
    found.add_column(first, no_wrap=True)
    for name in others:
        found.add_column(name, justify="right", no_wrap=True)
    return found


def legends(report: Report) -> list[str]:
    """What stands below each of the tables."""
    transform, training = report.transform, report.training
    stays, returns, both = transform.transfers
    before, after = (f"{1e3 * seconds:.2f} ms" for seconds in transform.seconds)
    return [
        f"n/k is a length of n on k workers; the tensor is rearranged {_times(stays)}, "
        f"{_times(returns)} if the result comes back, {_times(both)} with the inverse\n"
        f"sent by all workers: {transform.foretold} bytes by the plan, {transform.bytes_sent} "
        f"counted; time {after}, one process {before}\n"
        f"largest difference from torch.fft in one process: values {_error(transform.value_error)},"
        f" gradient {_error(transform.gradient_error)}, inverse {_error(transform.inverse_error)}",
        f"largest difference from one process: output {_error(training.value_error)}, all "
        f"parameters after two steps {_error(training.parameter_error)}",
    ]


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _error(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"
