"""The use of whole values together with shards, whose gradients would be parts of a sum.

A parameter that is whole on every worker and multiplies a shard gets, on each worker, only the
gradient of that worker's part. `tessel.distributed.copy` says so to autograd, and sums it; without
it the number would be wrong and nothing would tell.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.distributed.keeping import Call, Shape, is_pointwise
from tessel.distributed.mark import Mark, state_of
from tessel.linop import LinearOperator

_OF_WEIGHTS = frozenset(("linear", "layer_norm", "rms_norm"))


def check_uses(call: Call) -> None:
    """Raise if a value that is whole on all workers needs a gradient, of which each has a part."""
    mark, shape = _first_mark(call)
    if mark is None or mark.partition.size == 1 or not torch.is_grad_enabled():
        return
    for tensor, state in zip(call.tensors, call.states, strict=True):
        if state is not None or not tensor.requires_grad:
            continue
        if not _is_own_part(call, mark, shape, tuple(tensor.shape)) and _is_shared(tensor):
            raise ValueError(
                f"`{call.name}` of {mark} and a tensor of shape {tuple(tensor.shape)} that is "
                f"whole on every worker: each worker would compute a part of its gradient only; "
                f"write tessel.distributed.copy(tensor) for that tensor, which sums the parts"
            )


def _first_mark(call: Call) -> tuple[Mark | None, Shape]:
    for state, shape in zip(call.states, call.shapes, strict=True):
        if isinstance(state, Mark):
            return state, shape
    return None, ()


def _is_own_part(call: Call, mark: Mark, shape: Shape, other: Shape) -> bool:
    """Whether a tensor without a mark has the split dimension too, as long as it is here."""
    place = mark.dim - len(shape)  # from the end, as in broadcasting
    if call.base in _OF_WEIGHTS or not (is_pointwise(call.base) or place < -2):
        return False
    return -place <= len(other) and other[place] == shape[mark.dim]


def _is_shared(tensor: Tensor) -> bool:
    """Whether a gradient reaches a parameter, or an input, without being summed on its way."""
    if tensor.grad_fn is None:
        return True
    seen: set[Any] = set()
    nodes: list[Any] = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        operator = getattr(node, "operator", None)
        if isinstance(operator, LinearOperator):
            if operator.codomain.shared:
                return True
        elif hasattr(node, "variable"):
            if state_of(node.variable) is None:
                return True
        else:
            nodes += [source for source, _ in node.next_functions]
    return False
