"""What a torch function would do with spread tensors, without doing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F  # noqa: N812

from tessel.operators import explain as explain_operator
from tessel.operators.units import num_bytes
from tessel.tensor.rules.attention import named_operands, ways_of
from tessel.tensor.tensor import Tensor


@dataclass(frozen=True)
class AttentionExplanation:
    """The ways in which attention could be computed, the one that is taken first.

    Attributes:
        ways: the name of each, and the bytes that a worker receives, the one that receives most,
            in a forward and a backward pass together.
    """

    ways: tuple[tuple[str, int], ...]

    @property
    def way(self) -> str:
        """The one that is taken."""
        return self.ways[0][0]

    def __str__(self) -> str:
        first, *rest = (f"{name} ({num_bytes(count)})" for name, count in self.ways)
        others = f"; instead of {', '.join(rest)}" if rest else ""
        return f"attention by {first} received forward and backward{others}"


def explain(what: Any, *args: Any, **kwargs: Any) -> Any:
    """What a distributed operator does, step by step, or how attention would be computed.

    Args:
        what: a distributed operator, or `torch.nn.functional.scaled_dot_product_attention`.
        *args, **kwargs: for an operator `columns`, the length of the batch on each worker, and
            `machine`, the model that predicts times; for attention what it would be called with.

    >>> import tessel, torch
    >>> x = tessel.spread(torch.ones(1, 2, 6, 4), tessel.Partition((0,), (1, 1, 1, 1)))
    >>> tessel.explain(torch.nn.functional.scaled_dot_product_attention, x, x, x).way
    'local'
    >>> F = tessel.distribute(tessel.ParDFT(torch.complex64, 8), [1])
    >>> [line.title for line in tessel.explain(F).lines]
    ['ParDFT along 0']
    """
    if what is F.scaled_dot_product_attention:
        operands, is_causal, groups = named_operands(args, kwargs)
        if not any(isinstance(each, Tensor) for each in operands):
            raise ValueError("explain: attention of plain tensors is torch's own; pass spread ones")
        size = operands[0].element_size()
        ways = ways_of(operands, is_causal, groups)
        return AttentionExplanation(tuple((each.way, each.num_values * size) for each in ways))
    if callable(what) and not hasattr(what, "plan"):
        raise NotImplementedError(
            f"explain: expected a distributed operator or "
            f"torch.nn.functional.scaled_dot_product_attention, got {what}"
        )
    return explain_operator(what, *args, **kwargs)
