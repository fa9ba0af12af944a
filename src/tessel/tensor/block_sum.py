"""Sums over blocks of columns, block after block: no worker has more than one at a time.

A row of workers computes Σ_j f(x, k_j), where x is a worker's operand for its own rows (queries)
and k_j is the j-th block of columns (keys), which is sent by the worker that has it while the
previous block is computed. Outputs with columns return the way that inputs came, by the adjoint
movements.

Such a sum keeps nothing but its inputs. Its derivative is also a sum over blocks, of derivatives of
f, which torch computes when a block arrives: derivatives of every order need one block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from tessel.core import boxes
from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout
from tessel.core.linop import Tensors, record_map
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.tensor.table import widened
from tessel.tensor.tensor import move
from tessel.transport import Group, kept_in_job, this_worker

BlockTerm = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Tile:
    """Some rows and a block of columns.

    Attributes:
        start: the first of the rows, counted in this worker's tensors.
        rows: the rows, counted in the whole.
        offset: the first of the columns, counted in the current block.
        columns: the columns, counted in the whole.
    """

    start: int
    rows: Interval
    offset: int
    columns: Interval


@dataclass(frozen=True)
class BlockSchedule:
    """The rows and columns that each worker combines in each step.

    Args:
        partition: the workers.
        axes: the axes along which workers have rows of their own.
        rows: for each place along these axes, the intervals of rows, one after the other.
        columns: the blocks of columns; if they are sent, one for each place.
        is_causal: whether a row sees only columns up to its own index.
    """

    partition: Partition
    axes: tuple[int, ...]
    rows: tuple[tuple[Interval, ...], ...]
    columns: tuple[Interval, ...]
    is_causal: bool = False

    @cached_property
    def place(self) -> int:
        """This worker's place along the axes."""
        return self.place_of(this_worker())

    def place_of(self, worker: int) -> int:
        """The place of a worker along the axes."""
        index = self.partition.coordinates(worker)
        assert index is not None
        sizes = [self.partition.shape[axis] for axis in self.axes]
        return boxes.ravel([index[axis] for axis in self.axes], sizes)

    def block(self, place: int, step: int) -> Interval:
        """The columns of the worker at a place in a step: first its own, then those of the next."""
        return self.columns[(place + step) % len(self.columns)]

    def tiles(self, place: int, step: int) -> list[Tile]:
        """The tiles of the worker at a place in a step, without those that it does not see."""
        found, start = [], 0
        (first, stop) = self.block(place, step)
        for row, bottom in self.rows[place]:
            top, columns = row, [(first, stop)]
            if self.is_causal:  # rows that see any columns: a tile left of the diagonal, one on it
                top = max(row, first)
                columns = [(first, min(top, stop)), (top, min(bottom, stop))]
            for left, right in columns:
                if top < bottom and left < right:
                    at = start + top - row
                    found.append(Tile(at, (top, bottom), left - first, (left, right)))
            start += bottom - row
        return found


@dataclass(frozen=True)
class Operand:
    """The layout of an input or output of a sum.

    Attributes:
        rows: whether its second to last dimension has this worker's rows.
        columns: its dimension of columns, from the end, or None.
        layout: the layout of its columns if they are sent. Axes that split nothing are shared:
            workers along them do not exchange anything.
    """

    rows: bool = False
    columns: int | None = None
    layout: Layout | None = None

    def piece(self, x: Tensor, tile: Tile) -> Tensor:
        """The piece of a tensor that belongs to a tile; if columns are sent, `x` has one block."""
        if self.columns is not None:
            start = tile.columns[0] if self.layout is None else tile.offset
            x = x.narrow(self.columns, start, tile.columns[1] - tile.columns[0])
        return x.narrow(-2, tile.start, tile.rows[1] - tile.rows[0]) if self.rows else x

    @kept_in_job
    def fetch(self, schedule: BlockSchedule, step: int) -> Move:
        """The movement that brings each worker the columns of a step, if it sees any of them."""
        assert self.layout is not None and self.columns is not None
        intervals = tuple(
            schedule.block(place, step) if schedule.tiles(place, step) else (0, 0)
            for place in range(len(schedule.rows))
        )
        dim = len(self.layout.shape) + self.columns
        return move(self.layout, self.layout.recut(dim, Cut(schedule.axes, intervals)))


def pieces_of(held: Sequence[Tensor | None], operands: Sequence[Operand], tile: Tile) -> list[Any]:
    """The pieces of all operands that belong to a tile; None for operands that are None."""
    both = zip(held, operands, strict=True)
    return [None if x is None else each.piece(x, tile) for x, each in both]


def visits(
    schedule: BlockSchedule, inputs: Sequence[Operand], xs: Sequence[Tensor | None]
) -> Iterator[tuple[int, list[Tensor | None], list[Tile]]]:
    """All steps: the number, the inputs with the current columns, and the tiles to combine.

    The columns of a step are sent before the previous step is computed.
    """
    moving = [k for k, each in enumerate(inputs) if each.layout is not None and xs[k] is not None]
    coming: dict[int, Callable[[], Tensor]] = {}
    for step in range(len(schedule.columns)):
        held = list(xs)
        for k in moving if step else ():
            held[k] = coming.pop(k)()
        for k in moving if step + 1 < len(schedule.columns) else ():
            x = xs[k]
            assert x is not None
            coming[k] = inputs[k].fetch(schedule, step + 1).start(x)
        yield step, held, schedule.tiles(schedule.place, step)
        held.clear()  # before memory is allocated for the block after the next


ROWS = Operand(rows=True)  # a row of numbers for each query


@dataclass(frozen=True)
class BlockSum:
    """Σ_j f(x, k_j), and for outputs with columns the sum of the terms of all workers.

    Args:
        schedule: the rows and blocks.
        term: f, in plain torch, of the pieces of all inputs that belong to a tile; it returns the
            pieces of the outputs.
        inputs: the layouts of the inputs.
        outputs: the layouts of the outputs.
        like: for each output, the input that has its shape and dtype.
    """

    schedule: BlockSchedule
    term: BlockTerm
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    like: tuple[int, ...] = ()

    first_kept = 0
    num_unread = 0

    def __post_init__(self) -> None:
        self.schedule.partition.prepare()

    @property
    def group(self) -> Group:
        return self.schedule.partition.group

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor, ...]:
        xs = tuple(None if x is None else x.detach() for x in xs)
        totals = [_zeros(xs[k]) for k in self.like]
        waits: list[Callable[[], None]] = []  # for outputs of the previous step, on their way back
        for step, held, tiles in visits(self.schedule, self.inputs, xs):
            # outputs with columns of another worker are returned to it
            back = [each.layout is not None and step > 0 for each in self.outputs]
            own = [None if goes else total for total, goes in zip(totals, back, strict=True)]
            found = self._summed(held, tiles, own)
            while waits:
                waits.pop(0)()
            for n, (each, k) in enumerate(zip(self.outputs, self.like, strict=True)):
                if back[n]:
                    part = found[n].to(_dtype(xs[k]))
                    waits.append(each.fetch(self.schedule, step).H.start_adding(part, totals[n]))
            del found
        for wait in waits:
            wait()
        return tuple(t.to(_dtype(xs[k])) for t, k in zip(totals, self.like, strict=True))

    def _summed(
        self, held: Sequence[Tensor | None], tiles: Sequence[Tile], own: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The sums over the tiles of a step, in the tensors that are given for some outputs.

        Another output is the term itself, if there is a single tile with all rows and columns.
        """
        found = list(own)
        for tile in tiles:
            pieces = pieces_of(held, self.inputs, tile)
            terms: list[Tensor | None] = list(self.term(tile, *pieces))
            for n, (each, k) in enumerate(zip(self.outputs, self.like, strict=True)):
                piece, like, total = terms[n], held[k], found[n]
                terms[n] = None  # free each term as soon as possible
                assert piece is not None and like is not None
                if total is None and len(tiles) == 1 and piece.shape == like.shape:
                    found[n] = widened(piece)
                    continue
                total = _zeros(like) if total is None else total
                each.piece(total, tile).add_(piece)
                found[n] = total
        return [_zeros(held[k]) if x is None else x for x, k in zip(found, self.like, strict=True)]

    def vjp(
        self, grads: Tensors, needs: Sequence[bool], xs: Tensors, ys: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """A sum over the same blocks, of torch's derivatives of a term."""
        grads = [
            torch.zeros_like(y) if grad is None else grad for grad, y in zip_longest(grads, ys)
        ]
        wanted = tuple(k for k, need in enumerate(needs) if need)
        derivative = BlockSum(
            self.schedule,
            derived(self.term, len(self.inputs), wanted),
            (*self.inputs, *self.outputs),
            tuple(self.inputs[k] for k in wanted),
            wanted,
        )
        found: list[Tensor | None] = [None] * len(xs)
        for k, each in zip(wanted, record_map(derivative, *xs, *grads), strict=True):
            found[k] = each
        return found


def derived(term: BlockTerm, count: int, wanted: tuple[int, ...]) -> BlockTerm:
    """The gradients of a term by some inputs: a function of inputs and of gradients of outputs."""

    def derivative(tile: Tile, *pieces: Tensor | None) -> Sequence[Tensor]:
        given, grads = list(pieces[:count]), pieces[count:]
        # pieces require gradients if this function is differentiated itself
        again = any(x is not None and x.requires_grad for x in pieces)
        with torch.enable_grad():
            for k in wanted:
                x = given[k]
                assert x is not None
                given[k] = x if x.requires_grad else x.detach().requires_grad_()
            found: Any = torch.autograd.grad(
                term(tile, *given),
                [x for k in wanted if (x := given[k]) is not None],
                grads,
                create_graph=again,
                allow_unused=True,
                materialize_grads=True,
            )
        return tuple(found)

    return derivative


def _dtype(x: Tensor | None) -> torch.dtype:
    assert x is not None
    return x.dtype


def _zeros(x: Tensor | None) -> Tensor:
    """Zeros of this shape to which terms are added, for half precision in float32."""
    assert x is not None
    return torch.zeros_like(widened(x), memory_format=torch.contiguous_format)
