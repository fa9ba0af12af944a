"""Lookups in a table whose rows or columns are split, of ids that all workers have."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.linalg import vector_norm

from tessel.core import boxes
from tessel.core.agreement import TensorMeta
from tessel.core.context import is_compiling
from tessel.core.layout import Cut, Layout
from tessel.core.shared import anchored_zeros
from tessel.tensor.rules.reductions import without
from tessel.tensor.table import outlining
from tessel.tensor.tensor import move

EPSILON = 1e-7  # torch adds it to a norm before it divides by the norm


@dataclass(frozen=True)
class EmbeddingOptions:
    """The arguments of torch's embedding other than tensors; `padding_idx` counts all rows."""

    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False

    def counted_from_front(self, rows: int) -> EmbeddingOptions:
        """The same with a `padding_idx` that is not negative."""
        padding = self.padding_idx
        return (
            self if padding is None or padding >= 0 else replace(self, padding_idx=padding + rows)
        )


def look_up(
    ids: Tensor,
    weight: Tensor,
    layout: Layout,
    options: EmbeddingOptions,
    meta: TensorMeta | None = None,
) -> tuple[Tensor, Layout]:
    """This worker's part of the rows of all ids, and the layout of these rows.

    Forward:  y[i, j] = Σ_k [worker k has row id_i and column j] · w_k[id_i, j].

    If rows of the table are split, each worker adds those that it has; columns stay where they are.
    Everything that depends on how often an id occurs is correct, since every worker has all ids.

    Args:
        ids: the ids, the same on all workers.
        weight: this worker's part of the table.
        layout: the layout of the whole table.
        options: torch's other arguments, with a `padding_idx` that is not negative.
        meta: the result of an agreement, if there was one.
    """
    flat = ids.reshape(-1)
    # The rows of ids replace those of the table. If these are split, workers have terms of a sum.
    separate, result = without(layout, (0,), False)
    for dim, length in enumerate(ids.shape):
        separate, result = separate.with_whole(dim, length), result.with_whole(dim, length)
    if layout.is_split(1) and options.max_norm is not None:
        if not outlining.get():  # there is no row to scale
            _renormalise(flat, weight, layout, options.max_norm, options.norm_type)
        options = replace(options, max_norm=None)
    if not layout.is_split(0):
        return _rows(flat, weight, options).view(result.local_shape), result
    box = layout.box()
    assert box is not None
    start, stop = box[0]
    # ids with rows in this part; without values their number is unknown
    is_mine = (flat >= start) & (flat < stop)
    padding = options.padding_idx
    if padding is not None:
        padding = padding - start if start <= padding < stop else None
    options = replace(options, padding_idx=padding)
    if is_compiling() and start == stop:
        share = anchored_zeros((len(flat), weight.shape[1]), weight)
    elif is_compiling():  # a graph has fixed lengths: any row replaces those of others, times zero
        rows = _rows((flat - start).clamp(0, stop - start - 1), weight, options)
        share = torch.where(is_mine.unsqueeze(1), rows, 0)
    else:
        mine = flat[:0] if outlining.get() else is_mine.nonzero().squeeze(1)
        rows = _rows(flat[mine] - start, weight, options)
        share = rows.new_zeros((flat.numel(), rows.shape[1])).index_copy(0, mine, rows)
    return move(separate, result).apply(share.view(separate.local_shape), meta), result


def _rows(ids: Tensor, weight: Tensor, options: EmbeddingOptions) -> Tensor:
    """Torch's own embedding, which has no second derivative for empty tensors."""
    shape = (len(ids), weight.shape[1])
    if 0 in shape and not options.sparse:
        return anchored_zeros(shape, weight)
    return F.embedding(ids, weight, *astuple(options))


def _renormalise(
    flat: Tensor, weight: Tensor, layout: Layout, max_norm: float, norm_type: float
) -> None:
    """Scale the rows of these ids to a norm of at most `max_norm`, in place, as torch does.

    The workers tell each other the norms of their columns of these rows.
    """
    with torch.no_grad():
        flat, table = flat.detach(), weight.detach()
        box = layout.box()
        assert box is not None
        inside: Any = slice(None)
        if layout.is_split(0):
            inside = ((flat >= box[0][0]) & (flat < box[0][1])).nonzero().squeeze(1)
            flat = flat - box[0][0]
        wide = torch.float32 if table.dtype in (torch.float16, torch.bfloat16) else table.dtype
        rows = table[flat[inside]].to(wide)
        if rows.shape[1]:
            mine = vector_norm(rows, norm_type, dim=1)
        else:  # without columns, a number that does not change the norm of others
            mine = rows.new_full((len(rows),), 0.0 if norm_type >= 0 else float("inf"))
        told = mine.new_zeros(len(flat))
        told[inside] = mine
        # For each id, the norms of all workers' columns are sent to all; if rows are split, too,
        # workers without the row send zeros, which are added.
        columns = layout.cuts[1]
        one_each = Cut(columns.axes, boxes.consecutive([1] * len(columns.intervals)))
        norms = Layout(
            layout.partition,
            (len(flat), len(columns.intervals)),
            (Cut.whole(len(flat)), one_each),
            layout.shared,
        )
        whole = norms.gathered((1,))
        added = tuple(sorted({*whole.shared, *layout.cuts[0].axes}))
        parts = move(norms, replace(whole, shared=added)).apply(told[:, None])[inside]
        # the norms for p = 0 are counts, which are added
        norm = parts.sum(1) if norm_type == 0 else vector_norm(parts, norm_type, dim=1)
        norm = norm.to(table.dtype)
        scale = max_norm / (norm.double() + EPSILON)
        scaled = (rows * scale.to(wide)[:, None]).to(table.dtype)
        kept = torch.where((norm.double() > max_norm)[:, None], scaled, table[flat[inside]])
        table[flat[inside]] = kept
