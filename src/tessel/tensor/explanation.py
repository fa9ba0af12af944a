"""Explanations: how a torch function or an operator would compute, without computing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F  # noqa: N812

from tessel.operators import explain as explain_operator
from tessel.operators.units import num_bytes
from tessel.tensor.grids import common_grid, nearest_on
from tessel.tensor.rules.attention import named_operands, ways_between
from tessel.tensor.rules.attention_plan import missing
from tessel.tensor.rules.batched import check_partition
from tessel.tensor.table import spread_among
from tessel.tensor.tensor import Tensor


@dataclass(frozen=True)
class AttentionExplanation:
    """The ways in which attention could be computed, best first.

    Attributes:
        ways: the name of each, and the bytes that the worker that receives most receives in a
            forward and a backward pass together.
        before: for operands on different grids, the bytes that this worker receives in addition to
            bring them to one.
    """

    ways: tuple[tuple[str, int], ...]
    before: int = 0

    @property
    def way(self) -> str:
        """The way that is taken."""
        return self.ways[0][0]

    def __str__(self) -> str:
        first, *rest = (f"{name} ({num_bytes(count)})" for name, count in self.ways)
        others = f"; instead of {', '.join(rest)}" if rest else ""
        more = f", and {num_bytes(self.before)} to be on one grid" if self.before else ""
        return f"attention by {first} received forward and backward{more}{others}"


def explain(what: Any, *args: Any, **kwargs: Any) -> Any:
    """Explain the steps of a distributed operator, or how attention would be computed.

    Args:
        what: a distributed operator, or `torch.nn.functional.scaled_dot_product_attention`.
        *args, **kwargs: for an operator `columns`, the length of the batch on each worker, and
            `machine`, the model that predicts times; for attention its arguments.

    >>> import tessel, torch
    >>> x = tessel.spread(torch.ones(1, 2, 6, 4), tessel.Partition((0,), (1, 1, 1, 1)))
    >>> tessel.explain(torch.nn.functional.scaled_dot_product_attention, x, x, x).way
    'local'
    >>> F = tessel.distribute(tessel.ParDFT(torch.complex64, 8), [1])
    >>> [line.title for line in tessel.explain(F).lines]
    ['ParDFT along 0']
    """
    if what is F.scaled_dot_product_attention:
        return _of_attention(args, kwargs)
    if callable(what) and not hasattr(what, "plan"):
        raise NotImplementedError(
            f"explain: expected a distributed operator or "
            f"torch.nn.functional.scaled_dot_product_attention, got {what}"
        )
    return explain_operator(what, *args, **kwargs)


def _of_attention(args: Any, kwargs: Any) -> AttentionExplanation:
    operands, is_causal, groups = named_operands(args, kwargs)
    if not any(isinstance(each, Tensor) for each in operands):
        raise ValueError("explain: attention of plain tensors is torch's own; pass spread ones")
    name = "scaled_dot_product_attention"
    grid = common_grid(name, operands, {})
    if grid is None:
        check_partition(name, operands)
    layouts, num_moved = [], dict.fromkeys(next(spread_among(operands))._layout.partition.ranks, 0)
    for each in operands:
        layout = each._layout if isinstance(each, Tensor) else None
        if layout is not None and grid is not None and layout.partition != grid:
            there = nearest_on(grid, layout)
            for worker in num_moved:
                num_moved[worker] += missing((layout,), (there,), worker)
            layout = there
        layouts.append(layout)
    ways = ways_between([tuple(each.shape) for each in operands], layouts, is_causal, groups)
    size = operands[0].element_size()
    found = tuple((each.way, each.num_values * size) for each in ways)
    return AttentionExplanation(found, 2 * max(num_moved.values()) * size)
