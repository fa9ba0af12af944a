"""Functions of the diagonals of matrices: triangles, diagonals, traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tessel.core.layout import Cut, Layout
from tessel.tensor.aliases import note_view
from tessel.tensor.rules.pointwise import changed, check_change
from tessel.tensor.rules.reductions import argument
from tessel.tensor.table import (
    Arguments,
    Settings,
    computed,
    made,
    moved,
    opened,
    outlines,
    rule,
)
from tessel.tensor.tensor import Tensor


@rule("tril", "triu", "tril_", "triu_")
def triangle(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Each worker takes its block's part of the triangle, by a shifted diagonal; nothing is sent.

    The block begins at row r and column c: j + c - (i + r) ≤ k is j - i ≤ k + r - c.
    """
    x, layout = opened(args[0])
    outlines(func, args, kwargs)  # torch's own error
    box = layout.box()
    assert box is not None
    diagonal = argument(args, kwargs, 1, "diagonal", 0) + box[-2][0] - box[-1][0]
    if not name.endswith("_"):
        return made(func(x, diagonal), layout)
    check_change(name, args[0], [layout])
    func(x, diagonal)
    return changed(args[0])


@rule("fill_diagonal_")
def fill_diagonal(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Each worker fills the diagonal in its part; nothing is sent."""
    x, layout = opened(args[0])
    check_change(name, args[0], [layout])
    outlines(func, args, kwargs)  # torch's own error
    box = layout.box()
    assert box is not None
    first, *rest = torch.meshgrid(
        *[torch.arange(a, b, device=x.device) for a, b in box], indexing="ij"
    )
    if argument(args, kwargs, 2, "wrap", False) and len(rest) == 1:
        first = first % (layout.shape[1] + 1)  # the diagonal restarts below each square
    is_on = torch.stack([first == each for each in rest]).all(0)
    x.masked_fill_(is_on, argument(args, kwargs, 1, "fill_value"))
    return changed(args[0])


@rule("diagonal", "diag", "trace")
def diagonal(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Each worker takes the diagonal's entries in its rows; columns, or rows, must be whole."""
    x = args[0]
    shape = tuple(outlines(func, args, kwargs).shape)
    if name == "trace":
        # on some devices autocast computes it in float32
        return x.diagonal().to(func(x._part.new_zeros(1, 1)).dtype).sum()
    first = "offset" if name == "diagonal" else "diagonal"
    offset = argument(args, kwargs, 1, first, 0)
    if name == "diag" and x.dim() == 1:
        return x.diag_embed(offset)
    rows = range(x.dim())[argument(args, kwargs, 2, "dim1", 0)]
    columns = range(x.dim())[argument(args, kwargs, 3, "dim2", 1)]
    if x._layout.is_split(columns) and not x._layout.is_split(rows):
        rows, columns, offset = columns, rows, -offset  # the same diagonal of the transpose
    layout = x._layout
    there = layout.hosted((columns,))
    part, box = moved(x, there), there.box()
    assert box is not None
    y = computed(lambda z: z.diagonal(offset + box[rows][0], rows, columns), part)
    # The diagonal is the last dimension, and is split like the rows, from its first row on.
    cut, first, length = there.cuts[rows], max(0, -offset), shape[-1]
    entries = tuple(
        (min(max(a - first, 0), length), min(max(b - first, 0), length)) for a, b in cut.intervals
    )
    kept = [each for dim, each in enumerate(there.cuts) if dim not in (rows, columns)]
    target = Layout.of_cuts(there.partition, shape, (*kept, Cut(cut.axes, entries)))
    return note_view(made(y, target), x, copied=there is not layout or name == "diag")


@rule("diag_embed")
def diag_embed(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Turn the last dimension, which must be whole, into a diagonal of two new ones."""
    x: Tensor = args[0]
    shape = tuple(outlines(func, args, kwargs).shape)
    new = {
        range(len(shape))[argument(args, kwargs, 2, "dim1", -2)],
        range(len(shape))[argument(args, kwargs, 3, "dim2", -1)],
    }
    layout, last = x._layout, len(x._layout.shape) - 1
    there = layout.hosted((last,))
    others = iter(there.cuts[:-1])
    cuts = tuple(Cut.whole(n) if d in new else next(others) for d, n in enumerate(shape))
    shared = tuple(sorted({*there.shared, *there.cuts[-1].axes}))
    target = replace(there, shape=shape, cuts=cuts, shared=shared)
    return made(computed(lambda part: func(part, *args[1:], **kwargs), moved(x, there)), target)
