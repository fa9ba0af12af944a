"""The third demo: a Fourier transform of a tensor in pencils, its plan, and a step of an FNO."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from tessel import viz
from tessel.cli.demos.movements import grid
from tessel.cli.demos.report import (
    Note,
    Report,
    as_text,
    largest,
    median_seconds,
    new_table,
    sizes_of_parts,
    wave,
    workers_table,
    worst_of,
)
from tessel.core.layout import Layout
from tessel.core.partition import Partition, world
from tessel.examples import darcy
from tessel.models import FNO
from tessel.operators import ANYWHERE, Distributed, ParDFT, ParOperator, distribute, kron
from tessel.operators.layouts import numel_sent
from tessel.operators.planning import Local, OperatorPlan, Transfer
from tessel.testing import count_traffic

TITLE = "a Fourier transform"
TITLE_OF_STEP = "a step of an FNO"
LIMIT = 1e-10  # of relative errors
STEPS = (TITLE,)
REPEATS = 5  # of the transform, for its time

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlanStep:
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
    steps: tuple[PlanStep, ...]
    transfers: tuple[int, int, int]
    bytes_sent: int
    seconds: tuple[float, float]

    @property
    def worst(self) -> float:
        """The largest of the three errors."""
        return worst_of((self.value_error, self.gradient_error, self.inverse_error))

    @property
    def foretold(self) -> int:
        """The bytes that the plan says are sent."""
        return sum(step.bytes_sent for step in self.steps)

    def table(self) -> tuple[Table, str]:
        """The plan, step by step, and what came of it."""
        lengths, workers = (" × ".join(map(str, each)) for each in (self.shape, self.grid))
        title = f"{TITLE} of {lengths} numbers on {workers} workers"
        table = new_table(title, "its plan", "layout", "local shapes", "sent")
        for number, step in enumerate(self.steps, 1):
            shapes = dict.fromkeys(" × ".join(map(str, shape)) for shape in step.local_shapes)
            table.add_row(
                f"{number} {step.name}",
                step.layout.replace("[", r"\["),
                "\n".join(shapes),
                viz.num_bytes(step.bytes_sent) if step.bytes_sent else "",
            )
        times = {0: "never", 1: "once", 2: "twice"}
        stays, returns, both = (times.get(n, f"{n} times") for n in self.transfers)
        before, after = (f"{1e3 * seconds:.2f} ms" for seconds in self.seconds)
        legend = (
            f"n/k is a length of n on k workers; the tensor is rearranged {stays}, {returns} if "
            f"the result comes back, {both} with the inverse\n"
            f"sent by all workers: {self.foretold} bytes by the plan, {self.bytes_sent} "
            f"counted; time {after}, one process {before}\n"
            f"largest difference from torch.fft in one process: values "
            f"{as_text(self.value_error)}, gradient {as_text(self.gradient_error)}, "
            f"inverse {as_text(self.inverse_error)}"
        )
        return table, legend


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
        return worst_of((self.value_error, self.parameter_error))

    def table(self) -> tuple[Table, str]:
        """One process and every worker, a line each."""
        sizes = sizes_of_parts(self.layout)
        alone, everyones = self.stored
        cells = [
            (size, viz.num_bytes(stored))
            for size, stored in zip(sizes, (alone, *everyones), strict=True)
        ]
        before, after = self.seconds
        times = f"{1e3 * before:.0f} ms", f"{1e3 * after:.0f} ms"
        title = f"{TITLE_OF_STEP} on fields of {sizes[0]}"
        table = workers_table(title, ("part", "parameters"), cells, self.sent, times)
        legend = (
            f"largest difference from one process: output {as_text(self.value_error)}, all "
            f"parameters after two steps {as_text(self.parameter_error)}"
        )
        return table, legend


@dataclass(frozen=True)
class Transformed(Report):
    """Both."""

    transform: Transform
    training: Training

    @property
    def worst(self) -> float:
        return worst_of((self.transform.worst, self.training.worst))

    @property
    def wrong(self) -> list[str]:
        """What differs by too much, or does not send what its plan says."""
        foretold, sent = self.transform.foretold, self.transform.bytes_sent
        is_wrong = {
            TITLE: not self.transform.worst <= LIMIT or foretold != sent,
            TITLE_OF_STEP: not self.training.worst <= LIMIT,
        }
        return [title for title, wrong in is_wrong.items() if wrong]

    def tables(self) -> list[tuple[Table, str]]:
        return [self.transform.table(), self.training.table()]


def run(size: int, note: Note) -> Transformed | None:
    """Run on every worker; the report on the first."""
    found = Transformed(transform(max(4, size // 4)), train_fno(max(16, size // 4) + 3))
    note(TITLE)
    return found if world().rank == 0 else None


# --- the transform


def transform(length: int) -> Transform:
    """Transform a tensor in pencils, and compare with `torch.fft` in one process."""
    P = world()
    # Three lengths, so that no two dimensions can be mistaken for each other, and uneven parts.
    shape = (length, length + 2, length + 5)
    along = [ParDFT(torch.complex128, n) for n in shape[:-1]]
    operator = kron(*along, ParDFT(torch.float64, shape[-1]))
    workers = (*grid(P.size), 1)
    F = _distributed(operator, workers, ANYWHERE)
    whole = wave(shape)
    x = F.layout_in.local_part(whole).clone().requires_grad_()
    with count_traffic() as traffic:
        y = F * x
    # Of the result, of the gradient of ½ Σ w |y|², and of the inverse, on this worker.
    X = whole.clone().requires_grad_()
    Y = torch.fft.rfftn(X)
    weights = wave(Y.shape, phase=1.0)
    (expected,) = torch.autograd.grad((weights * Y.abs().square()).sum() / 2, X)
    mine = F.layout_out.local_part(weights)
    (gradient,) = torch.autograd.grad((mine * y.abs().square()).sum() / 2, x)
    errors = (
        largest(y - F.layout_out.local_part(Y)) / largest(Y),
        largest(gradient - F.layout_in.local_part(expected)) / largest(expected),
        largest(F.inv * y.detach() - x),
    )
    parts = P.group.share_objects((*errors, traffic.bytes_sent))
    *worst, sent = zip(*parts, strict=True)
    value_error, gradient_error, inverse_error = map(worst_of, worst)
    with torch.no_grad():
        alone = median_seconds(lambda: torch.fft.rfftn(whole), REPEATS)
        spread = median_seconds(lambda: F * x, REPEATS)
    # The same transform, planned to bring its result back, and together with its inverse.
    returning, both = _distributed(operator, workers, None), F.inv @ F
    assert isinstance(both, Distributed)
    return Transform(
        shape,
        workers,
        value_error,
        gradient_error,
        inverse_error,
        steps=steps_of(F.plan),
        transfers=(F.plan.num_transfers, returning.plan.num_transfers, both.plan.num_transfers),
        bytes_sent=sum(sent),
        seconds=(alone, spread),
    )


def _distributed(operator: ParOperator, workers: Shape, end: str | None) -> Distributed:
    found = distribute(operator, workers, end)
    assert isinstance(found, Distributed)
    return found


def steps_of(plan: OperatorPlan) -> tuple[PlanStep, ...]:
    """The steps, for all workers."""
    workers = plan.source.partition.ranks
    found = []
    for step in plan.every_step():
        sent, name = 0, "rearrange"
        if isinstance(step, Local):
            dims = ", ".join(str(dim) for task in step.group for dim in task.dims)
            name = f"transform along {dims}"
        elif isinstance(step, Transfer):
            # Numbers travel as complex128: the real transform is done where the tensor lies.
            sent = 16 * sum(numel_sent(step.before, step.after, at) for at in workers)
        shapes = tuple(step.after.shape_on(worker) for worker in workers)
        found.append(PlanStep(name, step.after.brief, shapes, sent))
    return tuple(found)


# --- the step of an FNO


def train_fno(length: int) -> Training:
    """Train a model on all workers and on one, from the same parameters."""
    P = world()
    P_x = P.create_cartesian_topology_partition((1, 1, *grid(P.size)))
    me = Partition((P.rank or 0,), (1, 1, 1, 1))  # each worker is one process, for itself
    settings = darcy.Settings(
        points=length, num_train=2, num_test=0, width=8, modes=6, blocks=2, rate=0.1
    )
    inputs, solutions = darcy.make_data(settings)
    model, alone = (darcy.make_model(each, settings, inputs.dtype) for each in (P_x, me))
    alone.load_state_dict(model.state_dict())  # gathers what is in parts
    layout = Layout.balanced(P_x, inputs.shape)
    x, u = (Layout.balanced(P_x, each.shape).local_part(each) for each in (inputs, solutions))
    y, after, bytes_sent = _train(model, P, x.clone(), u, settings)
    expected, before, _ = _train(alone, me, inputs, solutions, settings)
    mine = Layout.balanced(P_x, expected.shape).local_part(expected)
    state, expected_state = model.state_dict(), alone.state_dict()
    parts = P.group.share_objects(
        (
            largest(y - mine) / largest(expected),
            worst_of([largest(value - expected_state[name]) for name, value in state.items()]),
            sum(each.nbytes for each in model.parameters()),
            bytes_sent,
        )
    )
    value_errors, parameter_errors, everyones, sent = zip(*parts, strict=True)
    return Training(
        layout,
        worst_of(value_errors),
        worst_of(parameter_errors),
        stored=(sum(each.nbytes for each in alone.parameters()), everyones),
        sent=sent,
        seconds=(before, after),
    )


def _train(
    model: FNO, workers: Partition, x: Tensor, u: Tensor, settings: darcy.Settings
) -> tuple[Tensor, float, int]:
    """Two steps, since the first one makes plans: the output, time and bytes sent of the second."""
    optimizer = torch.optim.SGD(model.parameters(), settings.rate)
    error = darcy.RelativeError(workers, x.dtype)
    for _ in range(2):
        optimizer.zero_grad()
        begin = time.perf_counter()
        with count_traffic() as traffic:
            y, _ = darcy.step(model, error, x, u)
        optimizer.step()
        seconds = time.perf_counter() - begin
    return y.detach(), seconds, traffic.bytes_sent
