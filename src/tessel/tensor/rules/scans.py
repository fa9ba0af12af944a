"""Scans: sums and products of each value and all before it along a dimension."""

from __future__ import annotations

from typing import Any

import torch

from tessel.core.boxes import consecutive
from tessel.core.layout import Cut, Layout
from tessel.core.shared import anchored_zeros
from tessel.tensor.row_exchange import place_of
from tessel.tensor.rules.reductions import argument, dims_of, mix_along
from tessel.tensor.table import Arguments, Settings, computed, made, opened, rule, try_values
from tessel.tensor.tensor import move


@rule("cumsum", "cumprod")
def scan(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Each worker scans its part, and combines it with the totals of all parts before.

    y_i = (Σ_{parts before} Σ_j x_j) + Σ_{j ≤ i in the part} x_j, or with products.
    """
    x, shape = args[0], args[0]._layout.shape
    (dim,) = dims_of(argument(args, kwargs, 1, "dim"), x._layout) or (0,)
    cut = x._layout.cuts[dim] if shape else None
    if cut is None or len(cut.intervals) < 2 or not cut.is_consecutive(shape[dim]):
        return mix_along(name, func, args, kwargs)

    def compute(part: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = func(part, *args[1:], **kwargs)
        return found

    part, layout = opened(x)
    try_values(compute, part, layout)
    y = computed(compute, part)
    before = _totals_before(y, layout, dim, 1 if name == "cumprod" else 0)
    if name == "cumprod":
        return made(y * before.prod(dim, True, dtype=y.dtype), layout)
    return made(y + before.sum(dim, True, dtype=y.dtype), layout)


def _totals_before(y: torch.Tensor, layout: Layout, dim: int, neutral: int) -> torch.Tensor:
    """The last values of all parts before this worker's, of which there may be none.

    Args:
        y: this worker's part, in which each value is combined with those before it in the part.
        layout: its layout.
        dim: the dimension.
        neutral: the total of a part without values.
    """
    if y.shape[dim]:
        last = y.narrow(dim, y.shape[dim] - 1, 1)
    else:
        last = anchored_zeros((*y.shape[:dim], 1, *y.shape[dim + 1 :]), y) + neutral
    cut = layout.cuts[dim]
    count = len(cut.intervals)
    each = layout.recut(dim, Cut(cut.axes, consecutive([1] * count)), count)
    # separate copies, of which each worker uses other totals: their gradients are summed
    totals = move(each, each.recut(dim, Cut.whole(count))).apply(last)
    return totals.narrow(dim, 0, place_of(layout.partition, cut.axes))
