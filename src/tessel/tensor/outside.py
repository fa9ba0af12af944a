"""Functions of spread tensors on workers that are outside of their partition.

Such a worker has no values, but must know the layout of a result, which may be moved to it. So the
rule is followed without values, in the place of the partition's first worker, with torch's fake
tensors. The result is a spread tensor without a part, which depends on the operands, so that this
worker takes part in the backward passes of movements before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from tessel import transport
from tessel.core.context import setting
from tessel.core.layout import Layout
from tessel.core.linop import LinearOperator, operator_of
from tessel.core.partition import Outline, Partition
from tessel.core.shared import anchored_zeros
from tessel.tensor.aliases import become, note_view
from tessel.tensor.rules.pointwise import is_in_place, new_layout
from tessel.tensor.rules.sparse import is_sparse
from tessel.tensor.table import (
    Arguments,
    Settings,
    held_layouts,
    mapped,
    outlines,
    outlining,
    parts,
    tensors,
)
from tessel.tensor.tensor import Tensor, absent, nodes_of, open_part, open_plain
from tessel.transport import kept_in_job


def outlined(
    follow: Callable[..., Any], name: str, func: Any, args: Arguments, kwargs: Settings
) -> Any:
    """The result of a function on a worker that has no values of its operands.

    Args:
        follow: follows the rule of a function.
        name, func, args, kwargs: the function and its arguments.
    """
    if name.startswith("new_"):
        shape = tuple(outlines(func, args, kwargs).shape)
        # a plain result, which all workers have, needs no values of the first argument
        if name == "new_tensor" or new_layout(args[0]._layout, shape) is None:
            return func(*parts(args), **parts(kwargs))
    originals: dict[int, Tensor] = {}

    def without_values(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        layout = value._layout
        there = _with_partition(layout, Outline) if layout.is_outside else layout
        part = torch.empty(there.local_shape, dtype=value.dtype, device=value.device)
        held = open_part(value)
        part.requires_grad_(held.requires_grad)
        shadow = Tensor(part if held.is_leaf else part.clone(), there)  # to allow changes in place
        originals[id(shadow)] = value
        return shadow

    def with_history(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)]
        layout = _with_partition(value._layout, Partition)
        part = torch.empty(0, dtype=value._part.dtype, device=value._part.device)
        if value._part.requires_grad:
            part = part + anchor.to(part.dtype)
        return Tensor(part, layout)

    anchor = _anchor(args, kwargs)
    try:
        with setting(outlining, True), FakeTensorMode(allow_non_fake_inputs=True):
            given, settings = mapped(without_values, (args, kwargs))
            result = follow(name, func, given, settings)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        held = next(each for each in held_layouts(args, kwargs) if each.is_outside)
        raise absent(f"torch's `{name}`", held) from error
    target = next(tensors(args), None)
    if is_in_place(name) and isinstance(target, Tensor):
        there = _with_partition(given[0]._layout, Partition)
        if there != target._layout:  # its shape was changed
            target = become(target, note_view(Tensor(open_part(target), there), target))
    found = mapped(with_history, result)
    if is_in_place(name) and isinstance(target, Tensor) and given[0]._part.requires_grad:
        target._part.add_(anchor.to(target.dtype))
        with torch._C.DisableTorchFunctionSubclass():
            target.requires_grad_()
    return found


@kept_in_job
def _with_partition(layout: Layout, kind: type[Partition]) -> Layout:
    """The layout with its workers as an outline, where this one has a place, or as a partition."""
    partition = layout.partition
    return replace(layout, partition=kind(partition.ranks, partition.shape))


def _anchor(*values: Any) -> torch.Tensor:
    """An empty tensor that depends on all operands, as the results of other workers do."""
    found = []
    for value in tensors(*values):
        if isinstance(value, Tensor):
            found.append(open_part(value).reshape(-1)[:0])
            continue
        # A plain tensor computed from this worker's part of a spread one needs a gradient on all
        # workers that have it, and those outside of the partition get none for results inside.
        for node in nodes_of(value):
            operator = operator_of(node)
            if isinstance(operator, LinearOperator) and operator.takes_part:
                raise ValueError(
                    f"the result of {operator} on worker {transport.this_worker()} is combined "
                    "with a tensor on other workers, and would get no gradient here; move it "
                    "there as a spread tensor: x.move_to(...)"
                )
        plain = open_plain(value)
        if is_sparse(plain):  # it has no view without values, and all of it may be too large
            if not plain.requires_grad:
                continue
            plain = plain.to_dense()
        found.append(plain.reshape(-1)[:0])
    real = [each for each in found if each.is_floating_point() or each.is_complex()]
    return anchored_zeros((0,), *real) if real else torch.empty(0)
