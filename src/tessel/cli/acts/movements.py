"""The first act: data movements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from tessel import nn
from tessel.cli.acts.act import Act, Reference, Share, Sketch, examine, wave
from tessel.layout import Layout
from tessel.partition import Partition, world

Case = tuple[Callable[[Tensor], Tensor], Sequence[Tensor], Reference]


def grid(workers: int) -> tuple[int, int]:
    """The most square grid of so many workers.

    >>> from tessel.cli.acts.movements import grid
    >>> grid(4), grid(6), grid(5)
    ((2, 2), (2, 3), (1, 5))
    """
    rows = next(r for r in range(math.isqrt(workers), 0, -1) if workers % r == 0)
    return rows, workers // rows


def halo_width(size: int) -> int:
    """The width of the halo: wide enough to be seen in the picture."""
    return max(1, size // 16)


def perform(size: int) -> Iterator[Share]:
    """Examine each movement of a `size` × `size` tensor."""
    P = world()
    for case in (_all_sum_reduce, _broadcast, _repartition, _halo_exchange):
        yield examine(*case(P, size))


def sketch(size: int) -> list[Sketch]:
    """A repartition and a halo exchange, before and after."""
    rows, tiles = _on_grids(world())
    width = halo_width(size)
    stripes, squares = (Layout.balanced(P, (size, size)) for P in (rows, tiles))
    grown = squares.grow([(width, width)] * 2)
    shapes = [" × ".join(map(str, P.shape)) for P in (rows, tiles)]
    return [
        Sketch(
            (f"Repartition: {shapes[0]} workers …", f"… to {shapes[1]} workers"),
            stripes,
            squares,
            8,
        ),
        Sketch(
            ("HaloExchange: each worker its part …", f"… and {width} rows and columns around it"),
            squares,
            grown,
            8,
        ),
    ]


def _all_sum_reduce(P: Partition, size: int) -> Case:
    inputs = [wave((size, size), phase=worker) for worker in range(P.size)]
    return nn.AllSumReduce(P, [0]), inputs, lambda xs: [sum(xs, torch.zeros(()))] * P.size


def _broadcast(P: Partition, size: int) -> Case:
    nothing = torch.zeros(0, dtype=torch.float64)
    inputs = [wave((size, size)), *[nothing] * (P.size - 1)]
    first = P.create_partition_inclusive([0])
    return nn.Broadcast(first, P), inputs, lambda xs: [xs[0]] * P.size


def _repartition(P: Partition, size: int) -> Case:
    rows, tiles = _on_grids(P)
    inputs = _split(wave((size, size)), *rows.shape)
    return (
        nn.Repartition(rows, tiles),
        inputs,
        lambda xs: _split(torch.cat(list(xs)), *tiles.shape),
    )


def _halo_exchange(P: Partition, size: int) -> Case:
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
    """The workers one below the other, and on the most square grid."""
    return (
        P.create_cartesian_topology_partition((P.size, 1)),
        P.create_cartesian_topology_partition(grid(P.size)),
    )


def _split(whole: Tensor, rows: int, columns: int) -> list[Tensor]:
    return [part for row in whole.tensor_split(rows, 0) for part in row.tensor_split(columns, 1)]


def _spans(length: int, parts: int, halo: int) -> list[slice]:
    """The parts that `torch.tensor_split` makes, each with its halo; an empty one has none."""
    pieces = torch.arange(length).tensor_split(parts)
    return [
        slice(max(0, int(piece[0]) - halo), int(piece[-1]) + 1 + halo) if len(piece) else slice(0)
        for piece in pieces
    ]


ACT = Act(
    title="data movements",
    rows=("all-sum-reduce", "broadcast", "repartition", "halo exchange"),
    perform=perform,
    sketch=sketch,
)
