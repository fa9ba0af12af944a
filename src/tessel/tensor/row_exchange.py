"""Rows that cross parts: workers read rows of a dimension from each other's parts, and write them.

An index selects the rows, so values decide here what is sent, and every worker must know how many
rows each of them sends to each other. If all workers have the whole index, each computes this by
itself. Else they tell each other how many rows they request, and then, only if there are any, which
ones.

The exchange is a sum over shifts: at shift s, the worker at place p reads rows of the one at place
p + s. Each term is a `Move` between two layouts of the rows, by owner and by reader, and its
adjoint returns rows to their owners. So the gradient of reading rows is adding rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessel.core import boxes
from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout
from tessel.core.move import Move
from tessel.core.numbers import constant
from tessel.core.partition import Partition
from tessel.tensor.tensor import move
from tessel.transport import kept_in_job, this_worker

Counts = tuple[tuple[int, ...], ...]


def owners(index: Tensor, intervals: Sequence[Interval]) -> Tensor:
    """The number of the interval, among consecutive ones, that contains each index."""
    stops = constant(tuple(stop for _, stop in intervals), torch.int64, index.device)
    # the first interval that ends behind an index: empty ones before it end at its start
    return torch.searchsorted(stops, index.contiguous(), right=True)


def place_of(partition: Partition, axes: tuple[int, ...]) -> int:
    """This worker's place along some axes."""
    at = partition.coordinates(this_worker())
    assert at is not None
    return boxes.ravel([at[axis] for axis in axes], [partition.shape[axis] for axis in axes])


@dataclass(frozen=True)
class RowExchange:
    """The rows that each worker reads from, or writes to, the part of each other.

    Attributes:
        partition: the workers.
        axes: the axes along which they have rows of their own.
        counts: for each place along the axes, the numbers of rows that it reads from each place.
        given: for each place, the rows of this worker's part that it reads, counted in the part.
    """

    partition: Partition
    axes: tuple[int, ...]
    counts: Counts
    given: tuple[Tensor, ...]

    @classmethod
    def known(
        cls,
        partition: Partition,
        rows: Cut,
        reader: Tensor,
        index: Tensor,
        *,
        distinct: bool,
    ) -> tuple[RowExchange, Tensor]:
        """The exchange for an index that all workers have, and the rows that this one reads.

        Args:
            partition: the workers.
            rows: the cut of the rows; parts must be consecutive.
            reader: the place of the reading worker, for each entry of the index.
            index: the rows, counted in the whole, a 1-d tensor.
            distinct: whether a worker reads a row once, even if it requests it several times. If
                not, rows are in the order of the index for each owner.
        """
        n, place = len(rows.intervals), place_of(partition, rows.axes)
        owner = owners(index, rows.intervals)
        if distinct:
            length = max(1, rows.intervals[-1][1])
            # sorted by reader, and for each by row, and so by owner, as rows are consecutive
            key = torch.unique(reader * length + index)
            reader, index = key // length, key % length
            owner = owners(index, rows.intervals)
        else:
            order = torch.argsort(reader * n + owner, stable=True)
            reader, index, owner = reader[order], index[order], owner[order]
        counts = torch.bincount(reader * n + owner, minlength=n * n).view(n, n).tolist()
        mine = owner == place
        start = rows.intervals[place][0]
        asked_of_me = index[mine] - start
        given = asked_of_me.split([row[place] for row in counts])
        exchange = cls(partition, rows.axes, tuple(map(tuple, counts)), tuple(given))
        return exchange, index[reader == place]

    @classmethod
    def asked(
        cls,
        partition: Partition,
        axes: tuple[int, ...],
        owner: Tensor,
        row: Tensor,
        *,
        distinct: bool,
    ) -> tuple[RowExchange, Tensor]:
        """The exchange for the rows that each worker requests, and the order in which they arrive.

        Args:
            partition: the workers.
            axes: the axes along which workers have rows of their own; along others their requests
                are equal.
            owner: the place of the owner of each row that this worker requests.
            row: the same rows, counted in the part of the owner.
            distinct: whether to read a row once, even if this worker requests it several times.

        Returns:
            The exchange, and for each request the position of its row among those that arrive.
        """
        one_each = _one_each(partition, axes)
        (n,), place = one_each.shape, place_of(partition, axes)
        if distinct:
            length = int(row.max()) + 1 if row.numel() else 1
            key, order = torch.unique(owner * length + row, return_inverse=True)
            owner, row = key // length, key % length
        else:
            sorts = torch.argsort(owner, stable=True)
            owner, row = owner[sorts], row[sorts]
            order = torch.empty_like(sorts)
            order[sorts] = torch.arange(len(sorts), device=sorts.device)
        mine = torch.bincount(owner, minlength=n)
        counts: list[list[int]] = told(partition, axes, mine).tolist()
        exchange = cls(partition, axes, tuple(map(tuple, counts)), ())
        pieces = row.split(counts[place])
        given = [row[:0]] * n
        given[place] = pieces[place]
        # requests go the ways of rows in the opposite direction, from readers to owners
        for shift, there, back in exchange._shifts():
            request = exchange._move(one_each, 0, shift).H
            given[back] = request.apply(pieces[there])
        return cls(partition, axes, exchange.counts, tuple(given)), order

    @property
    def place(self) -> int:
        """This worker's place along the axes."""
        return place_of(self.partition, self.axes)

    def read(self, part: Tensor, layout: Layout, dim: int) -> Tensor:
        """The rows that this worker requested, by owner, from its part and those of others.

        Args:
            part: this worker's part.
            layout: the layout of the tensor; its dimension `dim` is split along the axes.
            dim: the dimension of the rows.
        """
        # its own rows, in all places: where others come they are replaced, elsewhere left out
        found = [part.index_select(dim, self.given[self.place])] * len(self.given)
        for shift, owner, reader in self._shifts():
            rows = part.index_select(dim, self.given[reader])
            found[owner] = self._move(layout, dim, shift).apply(rows)
        return _joined([found[k] for k in range(len(found)) if self._comes(self.place, k)], dim)

    def write(self, values: Tensor, layout: Layout, dim: int) -> tuple[Tensor, Tensor]:
        """The rows that all workers write to this worker's part: their indices there, and the rows.

        Args:
            values: the rows that this worker writes, in the order in which it would read them.
            layout: the layout of the tensor that rows are written to.
            dim: the dimension of the rows.
        """
        pieces = values.split(self.counts[self.place], dim)
        found = [pieces[self.place]] * len(pieces)
        for shift, owner, writer in self._shifts():
            found[writer] = self._move(layout, dim, shift).H.apply(pieces[owner])
        come = [k for k in range(len(found)) if self._comes(k, self.place)]
        rows = torch.cat([self.given[k] for k in come])
        return rows, _joined([found[k] for k in come], dim)

    def _comes(self, reader: int, owner: int) -> bool:
        """Whether there is a tensor of rows that one reads from another, or from itself."""
        return reader == owner or self._lengths((owner - reader) % len(self.counts)) is not None

    def _shifts(self) -> Iterator[tuple[int, int, int]]:
        """The shifts at which anything is sent, each with the places of the owner and the reader.

        All workers know all counts, so they skip the same shifts.
        """
        n = len(self.counts)
        for shift in range(1, n):
            if self._lengths(shift) is not None:
                yield shift, (self.place + shift) % n, (self.place - shift) % n

    def _lengths(self, shift: int) -> tuple[int, ...] | None:
        """The number of rows that each place reads at a shift; None if there are none."""
        n = len(self.counts)
        lengths = tuple(self.counts[k][(k + shift) % n] for k in range(n))
        return lengths if any(lengths) else None

    def _move(self, layout: Layout, dim: int, shift: int) -> Move:
        """The movement of rows from their owners to their readers at a shift."""
        lengths = self._lengths(shift)
        assert lengths is not None
        return _shifted(layout, dim, self.axes, lengths, shift)


def _joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The concatenation; torch's derivative of `cat` is a constant for empty 1-d tensors."""
    return torch.cat([each.unsqueeze(-1) for each in pieces], dim).squeeze(-1)


@kept_in_job
def _shifted(
    layout: Layout, dim: int, axes: tuple[int, ...], lengths: tuple[int, ...], shift: int
) -> Move:
    by_reader = boxes.consecutive(lengths)
    n = len(lengths)
    by_owner = tuple(by_reader[(k - shift) % n] for k in range(n))
    source, target = (
        layout.recut(dim, Cut(axes, intervals), sum(lengths)) for intervals in (by_owner, by_reader)
    )
    return move(source, target)


@kept_in_job
def _one_each(partition: Partition, axes: tuple[int, ...]) -> Layout:
    """The layout of one number for each place along some axes."""
    n = 1
    for axis in axes:
        n *= partition.shape[axis]
    return Layout.of_cuts(partition, (n,), (Cut(axes, tuple((k, k + 1) for k in range(n))),))


@torch.no_grad()
def told(partition: Partition, axes: tuple[int, ...], numbers: Tensor) -> Any:
    """All-gather a row of numbers of each worker along some axes."""
    one_each = _one_each(partition, axes)
    (n,), (cut,) = one_each.shape, one_each.cuts
    rows = Layout.of_cuts(partition, (n, len(numbers)), (cut, Cut.whole(len(numbers))))
    return move(rows, rows.gathered((0,))).apply(numbers.reshape(1, -1))
