"""Products with sparse matrices that all workers have, such as the adjacency of a graph.

Each worker fetches the rows that its own rows of the matrix read, each once, and torch's own kernel
multiplies them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.core import boxes
from tessel.core.layout import Cut, Layout
from tessel.core.shared import anchored_zeros
from tessel.tensor.row_exchange import RowExchange, owners, place_of
from tessel.tensor.rules.reductions import argument
from tessel.tensor.rules.rows import has_rows
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_autocast,
    check_dtypes,
    check_fits,
    held_layouts,
    made,
    opened,
    outlining,
    rule,
    unsupported,
)
from tessel.tensor.tensor import Tensor as SpreadTensor


def is_sparse(value: Any) -> bool:
    """Whether this is a plain tensor that stores only some of its values."""
    is_plain = isinstance(value, Tensor) and not isinstance(value, SpreadTensor)
    return is_plain and value.layout != torch.strided


# functions that multiply by a sparse matrix, and the dimensions of their other operand
_DIMS = {"matmul": (1, 2), "__matmul__": (1, 2), "mv": (1,)} | dict.fromkeys(
    ("mm", "_sparse_mm", "_sparse_addmm"), (2,)
)


@rule("_sparse_mm", plain=True)
def multiply_sparse(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    if args[2:] or kwargs.keys() - {"mat2"}:
        raise unsupported(name, "other reductions are not supported", *held_layouts(args, kwargs))
    return sparse_product(name, args[0], argument(args, kwargs, 1, "mat2"))


@rule("_sparse_addmm", plain=True)
def add_sparse_product(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """β · input + α · A @ x."""
    product = sparse_product(name, *args[1:3])
    check_fits(tuple(product.shape), tuple(args[0].shape))
    check_dtypes(product, args[0], None)
    found = kwargs.get("alpha", 1) * product
    beta = kwargs.get("beta", 1)
    return found if beta == 0 else beta * args[0] + found


def sparse_product(name: str, a: Any, b: Any) -> Any:
    """A @ x or x @ A, of a sparse matrix and a spread matrix or vector.

    Args:
        name: the name of torch's function.
        a: the left operand.
        b: the right operand.
    """
    is_right = is_sparse(b)
    matrix, x = (b, a) if is_right else (a, b)
    if (
        not (is_sparse(matrix) and isinstance(x, SpreadTensor))
        or matrix.dim() != 2
        or matrix.dense_dim()
        or x.dim() not in _DIMS.get(name, ())
    ):
        why = "a sparse matrix and a spread matrix or vector are needed"
        raise unsupported(name, why, *held_layouts(a, b))
    if matrix.requires_grad and torch.is_grad_enabled():
        why = "the gradient of a sparse matrix needs all rows"
        raise unsupported(name, why, *held_layouts(x))
    if a.shape[-1] != b.shape[0]:
        raise RuntimeError(
            f"`{name}`: tensors of shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit"
        )
    if is_right:
        matrix = matrix.mT
    if x.dim() == 1:
        return _multiplied(matrix, x.unsqueeze(1)).squeeze(1)
    return _multiplied(matrix, x.mT).mT if is_right else _multiplied(matrix, x)


def _multiplied(a: Tensor, x: SpreadTensor) -> SpreadTensor:
    """A @ x: each worker multiplies its rows of the matrix with the rows of x that these read."""
    if not has_rows(x._layout, 0):
        x = x.move_to(x._layout.gathered((0,)))
    part, layout = opened(x)
    rows = layout.cuts[0]
    targets = rows  # of the same graph; else balanced
    if a.shape[0] != a.shape[1]:
        targets = Cut(rows.axes, boxes.balanced(a.shape[0], len(rows.intervals)))
    target = Layout(
        layout.partition, (a.shape[0], layout.shape[1]), (targets, layout.cuts[1]), layout.shared
    )
    entries = a.detach().to_sparse_coo().coalesce()
    check_dtypes(part, entries.values(), None)
    if outlining.get():  # no rows come here
        return made(as_autocast(anchored_zeros(target.local_shape, part)), target)
    row, column = entries.indices()
    reader = owners(row, targets.intervals)
    exchange, read = RowExchange.known(layout.partition, rows, reader, column, distinct=True)
    table = exchange.read(part, layout, 0)
    place = place_of(layout.partition, rows.axes)
    start, stop = targets.intervals[place]
    mine = reader == place
    if stop == start or not table.numel():
        if entries.values().numel() and 0 not in target.shape:
            _check_dtypes_of_values(entries.values(), table)
        return made(as_autocast(anchored_zeros(target.local_shape, table)), target)
    here = torch.stack([row[mine] - start, torch.searchsorted(read, column[mine])])
    matrix = torch.sparse_coo_tensor(
        here, entries.values()[mine], (stop - start, len(read)), is_coalesced=True
    )
    return made(torch.sparse.mm(matrix, table), target)


@torch.no_grad()
def _check_dtypes_of_values(entries: Tensor, table: Tensor) -> None:
    """Raise what torch raises of dtypes where there are values, as only other workers may have."""
    place = torch.zeros(2, 1, dtype=torch.int64, device=entries.device)
    one = torch.sparse_coo_tensor(place, entries.new_ones(1), (1, 1))
    torch.sparse.mm(one, table.new_ones(1, 1))
