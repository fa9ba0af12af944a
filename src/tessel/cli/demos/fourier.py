"""The third demo: a Fourier transform of a tensor in pencils, its plan, and a step of an FNO."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from rich.markup import escape
from torch import Tensor

from tessel.cli.demos.movements import grid
from tessel.cli.demos.report import (
    Report,
    Say,
    TableColumns,
    largest,
    median_seconds,
    of_processes,
    sizes_of_parts,
    wave,
    worst_of,
)
from tessel.core.layout import Layout
from tessel.core.partition import Partition, world
from tessel.examples import darcy
from tessel.models import FNO
from tessel.operators import ANYWHERE, Distributed, ParDFT, ParOperator, distribute, kron
from tessel.operators.units import num_bytes, num_seconds
from tessel.testing import count_traffic

TITLE = "a Fourier transform"
TITLE_OF_STEP = "a step of an FNO"
LIMIT = 1e-10  # of relative errors
STEPS = (TITLE,)
REPEATS = 5  # repetitions of the transform, for its time


def run(size: int, note: Say) -> list[Report]:
    """Run on every worker; return the reports on the first."""
    found = [transform(max(4, size // 4)), train_fno(max(16, size // 4) + 3)]
    note(TITLE)
    return found if world().rank == 0 else []


def transform(length: int) -> Report:
    """Transform a tensor in pencils by a plan, and compare with `torch.fft` in one process."""
    # Three lengths, so that no two dimensions can be mistaken for each other, and uneven parts.
    shape = (length, length + 2, length + 5)
    along = [ParDFT(torch.complex128, n) for n in shape[:-1]]
    operator = kron(*along, ParDFT(torch.float64, shape[-1]))
    workers = (*grid(world().size), 1)
    F, returning = (distributed(operator, workers, end) for end in (ANYWHERE, None))
    errors, sent, seconds = compared_with_torch(F, wave(shape))
    explained, both = F.explain(), F.inv @ F
    assert isinstance(both, Distributed)
    rows = []
    for number, (line, costs) in enumerate(zip(explained.lines, explained.costs, strict=True), 1):
        shapes = dict.fromkeys(line.after.shape_on(worker) for worker in explained.workers)
        step_sent = sum(cost.bytes_sent for cost in costs)
        rows.append((f"{number} {line.title}", line.layout, tuple(shapes), step_sent or None))
    foretold = sum(total.bytes_sent for total in explained.totals)
    times = {0: "never", 1: "once", 2: "twice"}
    counts = (each.plan.num_transfers for each in (F, returning, both))
    stays, returns, inverts = (times.get(count, f"{count} times") for count in counts)
    before, after = map(num_seconds, seconds)
    legend = (
        f"n/k is a length of n on k workers; the tensor is rearranged {stays}, {returns} if "
        f"the result comes back, {inverts} with the inverse\n"
        f"sent by all workers: {foretold} bytes by the plan, {sent} counted; time {after}, one "
        f"process {before}\n"
    )
    return Report(
        TITLE,
        "of {} numbers on {} workers".format(*map(as_shape, (shape, workers))),
        errors,
        LIMIT,
        {"its plan": str, "layout": escape, "local shapes": as_shapes, "sent": num_bytes},
        tuple(rows),
        legend,
        is_wrong=foretold != sent,
    )


def compared_with_torch(
    F: Distributed, whole: Tensor
) -> tuple[dict[str, float], int, tuple[float, float]]:
    """Compare a distributed transform with `torch.fft`.

    Returns:
        The largest differences, the bytes that all workers sent, and the seconds of one process and
        of the workers.
    """
    x = F.layout_in.local_part(whole).clone().requires_grad_()
    with count_traffic() as traffic:
        y = F * x
    # The result, the gradient of ½ Σ w |y|², and the inverse, on this worker.
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
    parts = world().group.share_objects((*errors, traffic.bytes_sent))
    *worst, sent = zip(*parts, strict=True)
    with torch.no_grad():
        alone = median_seconds(lambda: torch.fft.rfftn(whole), REPEATS)
        spread = median_seconds(lambda: F * x, REPEATS)
    names = ("values", "gradient", "inverse")
    return dict(zip(names, map(worst_of, worst), strict=True)), sum(sent), (alone, spread)


def distributed(operator: ParOperator, workers: Sequence[int], end: str | None) -> Distributed:
    """Distribute an operator that is neither bound nor combined."""
    found = distribute(operator, workers, end)
    assert isinstance(found, Distributed)
    return found


def as_shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def as_shapes(shapes: Sequence[Sequence[int]]) -> str:
    return "\n".join(map(as_shape, shapes))


def train_fno(length: int) -> Report:
    """Train a model on all workers and on one, with the same initial parameters."""
    P = world()
    P_x = P.create_cartesian_topology_partition((1, 1, *grid(P.size)))
    me = Partition((P.rank or 0,), (1, 1, 1, 1))  # each worker as a single process
    settings = darcy.Settings(
        points=length, num_train=2, num_test=0, width=8, modes=6, blocks=2, rate=0.1
    )
    inputs, solutions = darcy.make_data(settings)
    model, alone = (darcy.make_model(each, settings, inputs.dtype) for each in (P_x, me))
    alone.load_state_dict(model.state_dict())  # gathers parts
    x, u = (Layout.balanced(P_x, each.shape).local_part(each) for each in (inputs, solutions))
    y, after, bytes_sent = train(model, P, x.clone(), u, settings)
    expected, before, _ = train(alone, me, inputs, solutions, settings)
    mine = Layout.balanced(P_x, expected.shape).local_part(expected)
    state, expected_state = model.state_dict(), alone.state_dict()
    stored, all_stored = (sum(p.nbytes for p in each.parameters()) for each in (model, alone))
    parts = P.group.share_objects(
        (
            largest(y - mine) / largest(expected),
            worst_of([largest(value - expected_state[name]) for name, value in state.items()]),
            stored,
            bytes_sent,
        )
    )
    of_values, of_parameters, everyones, sent = zip(*parts, strict=True)
    whole, *sizes = sizes_of_parts(Layout.balanced(P_x, inputs.shape))
    columns: TableColumns = {"part": str, "parameters": num_bytes}
    rows = list(zip(sizes, everyones, strict=True))
    return Report(
        TITLE_OF_STEP,
        f"on fields of {whole}",
        {"output": worst_of(of_values), "all parameters after two steps": worst_of(of_parameters)},
        LIMIT,
        *of_processes(columns, (whole, all_stored), rows, sent, (before, after)),
    )


def train(
    model: FNO, workers: Partition, x: Tensor, u: Tensor, settings: darcy.Settings
) -> tuple[Tensor, float, int]:
    """Train two steps; return output, time and bytes sent of the second, which makes no plans."""
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
