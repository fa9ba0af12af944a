"""Functions of single whole matrices: those of a batch are on several workers."""

from __future__ import annotations

from functools import partial
from string import ascii_lowercase
from typing import Any

import torch

from tessel.core.layout import Cut, Layout
from tessel.core.shared import anchored_zeros
from tessel.tensor.gathering import gathered, shared
from tessel.tensor.rules.batched import applied, holds_anywhere, plan_of
from tessel.tensor.rules.reductions import argument
from tessel.tensor.table import (
    Arguments,
    Settings,
    held_layouts,
    made,
    moved,
    outlines,
    rule,
    tensors,
    unsupported,
)


@rule(
    *("linalg_inv", "linalg_det", "linalg_slogdet", "linalg_cholesky", "linalg_qr", "linalg_svd"),
    *("linalg_svdvals", "linalg_eigh", "linalg_eigvalsh", "linalg_eig", "linalg_eigvals"),
    *("linalg_matrix_exp", "linalg_pinv", "logdet", "matrix_exp"),
)
def of_matrices(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Each worker computes with whole matrices, its share of the batch."""
    x, layout = args[0], args[0]._layout
    last = len(layout.shape) - 2
    if last < 1 and not layout.is_whole:
        raise unsupported(name, "it has no rule for tensors that are split", layout)
    if [*tensors(args[1:], kwargs)]:  # a number for each matrix would have to be split, too
        raise unsupported(name, "tolerances that are tensors are not supported", layout)
    whole = outlines(func, args, kwargs)  # torch's own error
    there = layout.hosted((last, last + 1))
    part = moved(x, there)
    members = whole if isinstance(whole, tuple) else (whole,)
    # Each result belongs to a matrix of the batch, and is on the same worker.
    targets = [
        Layout.of_cuts(there.partition, shape, (*there.cuts[:last], *map(Cut.whole, shape[last:])))
        for shape in (tuple(each.shape) for each in members)
    ]
    if part.numel() or 0 in layout.shape[last:]:  # matrices without entries have determinants, too
        attempt = func if name in _NEVER_FAIL else partial(_attempted, func)
        result = attempt(part, *args[1:], **kwargs)
    else:  # not all functions have derivatives for empty batches
        found = [
            anchored_zeros(target.local_shape, part).to(each.dtype)
            for each, target in zip(members, targets, strict=True)
        ]
        result = type(whole)(found) if isinstance(whole, tuple) else found[0]
    if name not in _NEVER_FAIL:
        batch = Layout.of_cuts(there.partition, layout.shape[:last], there.cuts[:last])
        if _fails(result is None, batch):
            return shared(func(*gathered(args), **kwargs), there.partition)
    if not isinstance(whole, tuple):
        return made(result, targets[0])
    return type(result)([made(each, target) for each, target in zip(result, targets, strict=True)])


_NEVER_FAIL = frozenset(
    ("linalg_det", "linalg_slogdet", "logdet", "linalg_qr", "linalg_matrix_exp", "matrix_exp")
)


def _attempted(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a function, or None if a matrix is singular, not definite, or not finite."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:  # not only LinAlgError: `eig` raises this if values are not finite
        return None


def _fails(here: bool, batch: Layout) -> bool:
    """Whether any worker has a matrix for which a function fails: then all raise the same."""
    return (
        here if batch.is_whole else holds_anywhere(made(torch.full(batch.local_shape, here), batch))
    )


@rule("linalg_solve", plain=True)
def solve(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Matrices and right-hand sides of one batch, which may have other layouts."""
    a, b = args[0], argument(args, kwargs, 1, "B")
    if a.dim() != b.dim() or a.dim() < 3 or not kwargs.get("left", True):
        why = "batches of matrices, and of right-hand sides, are needed"
        raise unsupported(name, why, *held_layouts(a, b))
    kind = outlines(func, (a, b), {}).dtype  # torch's own error
    batch = ascii_lowercase[: a.dim() - 2]
    equation = (batch + "XY", batch + "YZ"), batch + "YZ"
    plan = plan_of(name, equation, "XYZ", (a, b))
    failed: list[bool] = []

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = _attempted(torch.linalg.solve, x, y)
        failed.append(found is None)
        return y if found is None else found

    part = applied(compute, (a, b), plan, kind)
    if _fails(any(failed), plan.result):
        return shared(func(*gathered((a, b))), plan.result.partition)
    return made(part, plan.result)
