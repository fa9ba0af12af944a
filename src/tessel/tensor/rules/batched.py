"""Functions that mix some dimensions of several tensors, and are independent along others.

As in `products`, each dimension has a letter, and a letter is split by the axes that split it in
the largest operand that has it. Letters that the function mixes are whole on each worker:
distances between rows, samples of an image at points, attention of queries to keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tessel.core.layout import Layout
from tessel.core.shared import anchored_zeros, used
from tessel.tensor.rules.products import Contraction, planned
from tessel.tensor.table import check_together, made, moved, outlines, outlining
from tessel.tensor.tensor import Tensor

Letters = tuple[tuple[str, ...], str]


def batched(
    name: str,
    equation: Letters,
    whole: str,
    operands: Sequence[torch.Tensor],
    func: Callable[..., torch.Tensor],
    settings: Mapping[str, Any] | None = None,
) -> Tensor:
    """Apply a function to tensors, of which some are spread, and plain ones are on all workers.

    Args:
        name: the name of the function.
        equation: the letters of the operands, and those of the result.
        whole: the letters that the function mixes or adds.
        operands: the tensors.
        func: the function of the operands, or of parts of them with whole dimensions of these
            letters. Outlines of torch's functions are cached; that of `grid_sample` takes 10 ms.
        settings: its other arguments, by name.
    """
    given = dict(settings or {})
    whole_result = outlines(func, tuple(operands), given)
    plan = plan_of(name, equation, whole, operands)
    assert plan.result.shape == tuple(whole_result.shape), (plan.result, whole_result.shape)
    part = applied(partial(func, **given), operands, plan, whole_result.dtype)
    return made(part, plan.result)


def plan_of(
    name: str, equation: Letters, whole: str, operands: Sequence[torch.Tensor]
) -> Contraction:
    """The layouts of operands and result; mixed dimensions that are split go to hosts."""
    indices, output = equation
    layouts = tuple(
        x._layout.hosted(tuple(dim for dim, letter in enumerate(letters) if letter in whole))
        if isinstance(x, Tensor)
        else None
        for x, letters in zip(operands, indices, strict=True)
    )
    partition = check_partition(name, operands)
    shapes = tuple(tuple(x.shape) for x in operands)
    return planned(partition, indices, output, shapes, layouts)


def check_partition(name: str, operands: Sequence[torch.Tensor]) -> Any:
    """The partition of all spread operands."""
    layouts = [each._layout for each in operands if isinstance(each, Tensor)]
    check_together(name, layouts)
    return layouts[0].partition


def applied(
    compute: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    plan: Contraction,
    kind: torch.dtype,
) -> torch.Tensor:
    """Apply a function to parts; without values, return zeros that depend on the operands.

    Torch rejects some functions of empty tensors, and treats others as constants in derivatives.
    """
    parts = [part_of(*each) for each in zip(operands, plan.inputs, strict=True)]
    shape = plan.result.local_shape
    if all(part.numel() for part in parts) and 0 not in shape:
        return compute(*parts)
    if all(each.numel() for each in operands):  # the whole has values, and this worker has none
        real = [each for each in parts if each.is_floating_point() or each.is_complex()]
        return anchored_zeros(shape, *(real or parts)).to(kind)
    return compute(*parts)  # of an empty whole torch says what comes out, or what is wrong


def part_of(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This worker's part of an operand in a layout; a plain operand is on all workers."""
    if isinstance(value, Tensor):
        return moved(value, layout)
    part = used(value, layout)
    box = layout.box()
    assert part is not None and box is not None
    for dim, (start, stop) in enumerate(box):
        if layout.is_split(dim):
            part = part.narrow(dim, start, stop - start)
    return part


def whole_of(value: Any) -> Any:
    """A small operand as a plain tensor on all workers."""
    return value.full() if isinstance(value, Tensor) else value


@torch.no_grad()
def holds_anywhere(condition: torch.Tensor) -> bool:
    """Whether a condition holds anywhere in a tensor; all workers know, and raise alike.

    A worker outside of the tensor's partition, which has no values, does not know: False.
    """
    if outlining.get():
        return False
    return bool(condition.any())
