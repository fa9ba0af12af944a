"""The first demo: data movements, their accuracy, and the bytes that they send."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from tessel import nn, viz
from tessel.cli.demos.report import Report, Say, as_text, largest, median_seconds, wave, worst_of
from tessel.core.layout import Layout
from tessel.core.partition import Partition, world
from tessel.operators.units import num_bytes, num_seconds
from tessel.testing import count_traffic

LIMIT = 1e-12  # of errors in float64: movements copy and add, with little rounding
REPEATS = 9  # repetitions of each movement, for its time

STEPS = ("all-sum-reduce", "broadcast", "repartition", "halo exchange")

Reference = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Case = tuple[Callable[[Tensor], Tensor], Sequence[Tensor], Reference]
# One worker's results for an operator A that all apply together: the largest differences of an
# output and of a gradient from the reference, its shares of ⟨Ax, y⟩ and ⟨x, Aᴴy⟩, and, for one
# application, the bytes and messages that it sent and the median time.
Seen = tuple[float, float, float, float, int, int, float]

_LEGEND = """\
dot-test   relative difference of ⟨Ax, y⟩ and ⟨x, Aᴴy⟩ over all workers
values     largest difference from what plain torch computes in one process
gradients  the same for the gradient of a loss over all outputs
sent       by all workers together, each time; time is the median\
"""


def together(seen: Sequence[Seen]) -> tuple[float, float, float, int, int, float]:
    """Combine the results of all workers for an operator.

    Returns:
        The errors of the dot-test, of values and of gradients, the bytes and messages of an
        application, and its time, that of the slowest worker.
    """
    values, gradients, forward, adjoint, sent, messages, seconds = zip(*seen, strict=True)
    left, right = sum(forward), sum(adjoint)
    dot_test = abs(left - right) / max(abs(left), abs(right), 1e-300)
    errors = dot_test, worst_of(values), worst_of(gradients)
    return *errors, sum(sent), sum(messages), max(seconds)


@dataclass(frozen=True)
class Movements(Report):
    """A report with a row for each movement, whose largest error counts."""

    @property
    def wrong(self) -> list[str]:
        return [name for name, error in self.errors.items() if not error <= self.limit]

    @property
    def text(self) -> str:
        return self.legend


def as_error(error: float) -> str:
    """An error, coloured by whether it is due to rounding."""
    return f"[{'green' if error <= LIMIT else 'bold red'}]{as_text(error)}[/]"


def draw(size: int, stripes: Layout, squares: Layout, folder: Path) -> tuple[Path, str]:
    """Save a picture of a repartition and a halo exchange.

    Args:
        size: the length of the tensor's sides.
        stripes: its layout on a column of workers.
        squares: its layout on the most square grid of workers.
        folder: the folder of the picture.
    """
    width = halo_width(size)
    before, after = (" × ".join(map(str, each.partition.shape)) for each in (stripes, squares))
    halo = "HaloExchange: each worker its part …", f"… and {width} rows and columns around it"
    moves = {
        (f"Repartition: {before} workers …", f"… to {after} workers"): (stripes, squares),
        halo: (squares, squares.grow([(width, width)] * 2)),
    }
    figure = viz.new_figure(10.5, 5.2 * len(moves))
    figure.suptitle("Layouts of the tensor, and what moves", fontsize=14, y=0.95)
    axes = figure.subplots(
        len(moves), 2, squeeze=False, gridspec_kw={"wspace": 0.28, "hspace": 0.24}
    )
    for (titles, (source, target)), (left, right) in zip(moves.items(), axes, strict=True):
        viz.draw_exchange(left, right, source, target, element_size=8, titles=titles)
    path = folder / "demo.png"
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.3)
    return path, (
        "Every worker has a colour. On the right, the colours inside each frame show\n"
        "which worker the values came from; the arrows are what was sent."
    )


def grid(workers: int) -> tuple[int, int]:
    """The most square grid of this number of workers.

    >>> from tessel.cli.demos.movements import grid
    >>> grid(4), grid(6), grid(5)
    ((2, 2), (2, 3), (1, 5))
    """
    rows = next(r for r in range(math.isqrt(workers), 0, -1) if workers % r == 0)
    return rows, workers // rows


def halo_width(size: int) -> int:
    """The width of the halo: wide enough to be visible in the picture."""
    return max(1, size // 16)


def run(size: int, note: Say) -> list[Report]:
    """Examine each movement of a `size` × `size` tensor, on every worker."""
    P = world()
    cases = (all_sum_reduce, broadcast, repartition, halo_exchange)
    mine = []
    for name, case in zip(STEPS, cases, strict=True):
        mine.append(examine(*case(P, size)))
        note(name)
    by_movement = zip(*P.group.share_objects(mine), strict=True)
    stripes, squares = (Layout.balanced(each, (size, size)) for each in _on_grids(P))
    if P.rank != 0:
        return []
    rows = {name: together(each) for name, each in zip(STEPS, by_movement, strict=True)}
    return [
        Movements(
            f"{P.size} workers,",
            f"tensors of {size} × {size} in float64",
            {name: worst_of(row[:3]) for name, row in rows.items()},
            LIMIT,
            {
                **{"movement": str, "dot-test": as_error, "values": as_error},
                **{"gradients": as_error, "sent": num_bytes, "messages": str, "time": num_seconds},
            },
            tuple((name, *row) for name, row in rows.items()),
            _LEGEND,
            draw=partial(draw, size, stripes, squares),
        )
    ]


def examine(
    operator: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], reference: Reference
) -> Seen:
    """Compare an operator on all workers with the result of one process, on every worker.

    Args:
        operator: maps this worker's input to this worker's output, together with the others.
        inputs: the inputs of all workers.
        reference: maps them to the outputs of all workers, in one process, with plain torch.
    """
    me = world().rank or 0
    x = inputs[me].clone().requires_grad_()
    with count_traffic() as traffic:
        y = operator(x)
    # In one process: all outputs, and the gradient of ½ Σ w y² over all of them.
    leaves = [each.clone().requires_grad_() for each in inputs]
    outputs = reference(leaves)
    weights = [wave(each.shape, phase=1.0 + worker) for worker, each in enumerate(outputs)]
    loss = sum((w * each * each).sum() / 2 for w, each in zip(weights, outputs, strict=True))
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
    expected = torch.zeros_like(x) if gradients[me] is None else gradients[me]
    # On the workers: Aᴴw for the dot-test, and the same gradient.
    (adjoint,) = torch.autograd.grad(y, x, weights[me], retain_graph=True)
    (gradient,) = torch.autograd.grad(y, x, weights[me] * y.detach())
    with torch.no_grad():  # the time of the movement, without preparing a backward pass
        seconds = median_seconds(lambda: operator(x), REPEATS)
    return (
        largest(y - outputs[me]),
        largest(gradient - expected),
        float((y.detach() * weights[me]).sum()),
        float((x.detach() * adjoint).sum()),
        traffic.bytes_sent,
        traffic.messages,
        seconds,
    )


def all_sum_reduce(P: Partition, size: int) -> Case:
    """The case in which every worker gets the sum of all tensors."""
    inputs = [wave((size, size), phase=worker) for worker in range(P.size)]
    return nn.AllSumReduce(P, [0]), inputs, lambda xs: [sum(xs, torch.zeros(()))] * P.size


def broadcast(P: Partition, size: int) -> Case:
    """The case in which every worker gets the tensor of the first."""
    nothing = torch.zeros(0, dtype=torch.float64)
    inputs = [wave((size, size)), *[nothing] * (P.size - 1)]
    first = P.create_partition_inclusive([0])
    return nn.Broadcast(first, P), inputs, lambda xs: [xs[0]] * P.size


def repartition(P: Partition, size: int) -> Case:
    """The case of a repartition from rows of workers to the most square grid."""
    rows, tiles = _on_grids(P)
    inputs = _split(wave((size, size)), *rows.shape)
    return (
        nn.Repartition(rows, tiles),
        inputs,
        lambda xs: _split(torch.cat(list(xs)), *tiles.shape),
    )


def halo_exchange(P: Partition, size: int) -> Case:
    """The case in which every worker gets the values around its tile."""
    tiles = _on_grids(P)[1]
    height, width = tiles.shape
    halo = halo_width(size)

    def reference(xs: Sequence[Tensor]) -> list[Tensor]:
        rows = [torch.cat(list(xs[r * width : (r + 1) * width]), 1) for r in range(height)]
        whole = torch.cat(rows)
        spans = product(_spans(size, height, halo), _spans(size, width, halo))
        return [whole[down, right] for down, right in spans]

    inputs = _split(wave((size, size)), height, width)
    return nn.HaloExchange(tiles, [(halo, halo)] * 2), inputs, reference


def _on_grids(P: Partition) -> tuple[Partition, Partition]:
    """The workers in a column, and on the most square grid."""
    return (
        P.create_cartesian_topology_partition((P.size, 1)),
        P.create_cartesian_topology_partition(grid(P.size)),
    )


def _split(whole: Tensor, rows: int, columns: int) -> list[Tensor]:
    return [part for row in whole.tensor_split(rows, 0) for part in row.tensor_split(columns, 1)]


def _spans(length: int, parts: int, halo: int) -> list[slice]:
    """The parts of `torch.tensor_split`, each with its halo; an empty one has none."""
    pieces = torch.arange(length).tensor_split(parts)
    return [
        slice(max(0, int(piece[0]) - halo), int(piece[-1]) + 1 + halo) if len(piece) else slice(0)
        for piece in pieces
    ]
