"""Rows at an index of a split dimension: read from the parts that have them, and written there.

Only rows of other workers are sent, each once for a worker that reads it, and as one sum for a
worker that adds to it. The index may be on all workers, or split like the values that belong to it.
Everything else stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tessel.core import boxes
from tessel.core.layout import Cut, Layout
from tessel.core.partition import Partition
from tessel.core.shared import anchored_zeros
from tessel.tensor.row_exchange import RowExchange, owners, place_of, told
from tessel.tensor.table import (
    as_spread,
    computed,
    made,
    moved,
    outlining,
    sliced,
)
from tessel.tensor.tensor import Tensor, open_part
from tessel.transport import kept_in_job

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def has_rows(layout: Layout, dim: int) -> bool:
    """Whether a dimension is split into parts with rows of their own."""
    return layout.is_split(dim) and layout.cuts[dim].is_consecutive(layout.shape[dim])


@kept_in_job
def _index_layout(rows: Cut, length: int, index: Layout) -> Layout:
    """The layout of an index for reading rows: split along one dimension like the rows."""
    split = [cut for cut in index.cuts if len(cut.intervals) > 1]
    if [cut.axes for cut in split] == [rows.axes] and index.owns_once:
        # axes of one worker may split other dimensions of the tensor
        pairs = zip(index.cuts, index.shape, strict=True)
        kept = (cut if len(cut.intervals) > 1 else Cut.whole(n) for cut, n in pairs)
        return Layout.of_cuts(index.partition, index.shape, tuple(kept))
    n = len(rows.intervals)
    if index.shape == (length,):
        return Layout.of_cuts(index.partition, index.shape, (rows,))
    # along the first dimension if it has an index for every worker, else along the longest
    first = index.shape[0] >= n
    dim = 0 if first else max(range(len(index.shape)), key=lambda d: index.shape[d])
    cuts = [Cut.whole(m) for m in index.shape]
    cuts[dim] = Cut(rows.axes, boxes.balanced(index.shape[dim], n))
    return Layout.of_cuts(index.partition, index.shape, tuple(cuts))


def rows_at(x: Tensor, dim: int, index: torch.Tensor, negative: bool = True) -> Tensor:
    """The rows of a split dimension at an index, whose dimensions replace it.

    Args:
        x: the tensor.
        dim: a dimension for which `has_rows` holds.
        index: the index, at least 1-d; spread, or the same on all workers.
        negative: whether it may count from the end.
    """
    layout = x._layout
    rows, length, partition = layout.cuts[dim], layout.shape[dim], layout.partition
    spread = as_spread(index, partition)
    lies = _index_layout(rows, length, spread._layout)
    shape = (*layout.shape[:dim], *index.shape, *layout.shape[dim + 1 :])
    target = Layout.of_cuts(
        partition, shape, (*layout.cuts[:dim], *lies.cuts, *layout.cuts[dim + 1 :])
    )
    part = open_part(x)
    if outlining.get():  # the rows are unknown, and none of them comes here
        return made(anchored_zeros(target.local_shape, part), target)
    exchange, order = _exchange_of(layout, dim, spread, lies, distinct=True, negative=negative)
    table = exchange.read(part, layout, dim)
    y = computed(lambda rows: rows.index_select(dim, order), table)
    return made(y.reshape(target.local_shape), target)


@torch.no_grad()
def _exchange_of(
    layout: Layout, dim: int, index: Tensor, lies: Layout, *, distinct: bool, negative: bool
) -> tuple[RowExchange, torch.Tensor]:
    """The exchange of the rows at an index, and the order of this worker's entries in it.

    Args:
        layout: the layout of the tensor with the rows.
        dim: the dimension of the rows.
        index: the rows; on all workers, or split.
        lies: the layout of the index by workers that read or write its rows.
        distinct: whether a row is sent once for a worker, even if several entries name it. Then the
            order gives for each entry the position of its row among those that are sent; else it
            gives the entries in the order in which they are sent.
        negative: whether the index may count from the end.
    """
    rows, length, partition = layout.cuts[dim], layout.shape[dim], layout.partition
    mine = moved(index, lies).reshape(-1).long()
    if index._layout.is_whole:
        whole = open_part(index).long()
        check_range(whole, dim, length, negative)
        # for each entry of the index, the place of the worker that reads it
        (split,) = (d for d in range(len(lies.shape)) if lies.is_split(d))
        places = torch.arange(lies.shape[split], device=whole.device)
        along = [-1 if d == split else 1 for d in range(len(lies.shape))]
        readers = owners(places, lies.cuts[split].intervals).view(along).expand(lies.shape)
        # Negative ones count from the end. If there are no rows, there are no indices, either.
        whole, mine = whole.reshape(-1) % max(1, length), mine % max(1, length)
        exchange, found = RowExchange.known(
            partition, rows, readers.reshape(-1), whole, distinct=distinct
        )
        if distinct:
            return exchange, torch.searchsorted(found, mine)
        return exchange, torch.argsort(owners(mine, rows.intervals), stable=True)
    check_told(partition, rows.axes, mine, dim, length, negative)
    mine = mine % max(1, length)
    owner = owners(mine, rows.intervals)
    starts = torch.tensor([start for start, _ in rows.intervals], device=mine.device)
    exchange, order = RowExchange.asked(
        partition, rows.axes, owner, mine - starts[owner], distinct=distinct
    )
    return exchange, order if distinct else torch.argsort(owner, stable=True)


def check_range(index: torch.Tensor, dim: int, length: int, negative: bool = False) -> None:
    """Raise on all workers if an index is out of range: torch would raise where it is used."""
    if index.numel() and index.device.type == "cpu" and not outlining.get():
        _check_bounds(int(index.amin()), int(index.amax()), dim, length, negative)


def check_told(
    partition: Partition,
    axes: tuple[int, ...],
    index: torch.Tensor,
    dim: int,
    length: int,
    negative: bool,
) -> None:
    """The same for a split index: workers tell each other its bounds."""
    bounds = index.new_tensor([0, -1])
    if index.numel():
        bounds = torch.stack(torch.aminmax(index))
    low, high = told(partition, axes, bounds).unbind(1)
    _check_bounds(int(low.amin()), int(high.amax()), dim, length, negative)


def _check_bounds(low: int, high: int, dim: int, length: int, negative: bool) -> None:
    if low < (-length if negative else 0) or high >= length:
        wrong = high if high >= length else low
        raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {length}")


@kept_in_job
def receiving(
    layout: Layout, dim: int, values: Layout | None, index: Layout | None
) -> tuple[Layout, Cut] | None:
    """The layout of a tensor whose rows are written to, and the cut of the values along the rows.

    Args:
        layout: the layout of the tensor.
        dim: the dimension of its rows.
        values: the layout of the values that are written, if they are spread.
        index: the layout of their index, likewise.

    Returns:
        None if neither the tensor nor the values are split along the dimension, or if an axis that
        splits one of them splits another dimension of the tensor.
    """
    cuts = [
        (each.cuts[at], each.shape[at])
        for each, at in ((layout, dim), (values, dim), (index, 0))
        if each is not None and each.shape and len(each.cuts[at].intervals) > 1
    ]
    if not cuts or not all(cut.is_consecutive(length) for cut, length in cuts):
        return None
    axes = cuts[0][0].axes
    if not layout.is_split(dim):
        taken = {a for d, cut in enumerate(layout.cuts) if d != dim for a in cut.axes}
        if taken & {*axes} or not {*axes} <= {*layout.shared, *layout.cuts[dim].axes}:
            return None
        n = len(cuts[0][0].intervals)
        whole = Cut(axes, boxes.balanced(layout.shape[dim], n))
        shared = tuple(axis for axis in layout.shared if axis not in axes)
        free = tuple(a for a in layout.cuts[dim].axes if a not in axes)
        layout = replace(
            layout,
            cuts=(*layout.cuts[:dim], whole, *layout.cuts[dim + 1 :]),
            shared=tuple(sorted({*shared, *free})),
        )
    return layout, cuts[0][0]


def written_rows(
    x: torch.Tensor,
    layout: Layout,
    dim: int,
    index: torch.Tensor,
    values: Any,
    write: Write,
    *,
    adds: bool,
    negative: bool = False,
) -> torch.Tensor:
    """A part with other values in the rows at an index.

    Args:
        x: this worker's part.
        layout: its layout, with rows of its own on each worker.
        dim: the dimension of the rows.
        index: the index, 1-d; spread, or the same on all workers.
        values: a row for each entry of the index, spread or plain, or one number for all of them.
        write: writes rows into a part: a function of the part, its rows, and values.
        adds: whether values for one row are added, so that each worker can add its own before they
            are sent.
        negative: whether the index may count from the end.
    """
    rows, length, partition = layout.cuts[dim], layout.shape[dim], layout.partition
    spread, given = as_spread(index, partition), None
    if isinstance(values, torch.Tensor) and values.dim():
        given = as_spread(values, partition)
    if outlining.get():
        return x + anchored_zeros((), x, *([] if given is None else [open_part(given)]))
    # with one number for all rows there are no rows to send: everybody gets the index instead
    if given is None and not spread._layout.is_whole:
        spread = as_spread(spread.full(), partition)
    if spread._layout.is_whole and (given is None or given._layout.is_whole):
        # every worker has all values, and takes those of its rows
        start, stop = rows.intervals[place_of(partition, rows.axes)]
        whole = open_part(spread).long()
        check_range(whole, dim, length, negative)
        whole = whole % max(1, length)
        mine = ((whole >= start) & (whole < stop)).nonzero().squeeze(1)
        if given is None:
            number = sliced(values, layout) if isinstance(values, torch.Tensor) else values
            return write(x, whole[mine] - start, number)
        # whole along the axes that split the rows, with separate copies
        there = layout.recut(dim, Cut.whole(given.shape[dim]), given.shape[dim])
        return write(x, whole[mine] - start, moved(given, there).index_select(dim, mine))
    assert given is not None
    length = given.shape[dim]
    # values are split along the rows as they are, as their index is, or evenly
    candidates = (given._layout.cuts[dim], length), (spread._layout.cuts[0], spread.shape[0])
    lies = next(
        (
            cut
            for cut, n in candidates
            if cut.axes == rows.axes and len(cut.intervals) > 1 and cut.is_consecutive(n)
        ),
        Cut(rows.axes, boxes.balanced(length, len(rows.intervals))),
    )
    part = moved(given, layout.recut(dim, lies, length))
    along = Layout.of_cuts(partition, (length,), (lies,))
    exchange, order = _exchange_of(layout, dim, spread, along, distinct=adds, negative=negative)
    if adds:  # values for one row travel as their sum
        count = sum(exchange.counts[exchange.place])
        sums = part.new_zeros([count if d == dim else n for d, n in enumerate(part.shape)])
        sent = sums.index_add(dim, order, part)
    else:
        sent = part.index_select(dim, order)
    return write(x, *exchange.write(sent, layout, dim))


def row_index(index: torch.Tensor, dim: int) -> torch.Tensor | None:
    """The index along one dimension, if it is equal along all others; None if it may not be.

    This is determined by strides, by which an index is expanded for `scatter`. Workers with parts
    of an index tell each other the result, since they must all do the same.
    """
    first = tuple(slice(None) if d == dim else 0 for d in range(index.dim()))
    others = [d for d in range(index.dim()) if d != dim]
    if not isinstance(index, Tensor) or index._layout.is_whole:
        part = open_part(index) if isinstance(index, Tensor) else index
        return part[first] if _is_expanded(part, others) else None
    layout, part = index._layout, open_part(index)
    if any(map(layout.is_split, others)):
        return None  # strides of a part do not describe the parts beside it
    alike = _is_expanded(part, others)
    if not outlining.get():
        partition = layout.partition
        every = tuple(range(partition.dim))
        alike = bool(told(partition, every, torch.tensor([alike], device=part.device)).all())
    along = Layout.of_cuts(layout.partition, (layout.shape[dim],), (layout.cuts[dim],))
    return made(part[first], along) if alike else None


def _is_expanded(part: torch.Tensor, dims: list[int]) -> bool:
    return 0 not in part.shape and all(part.shape[d] == 1 or part.stride(d) == 0 for d in dims)
