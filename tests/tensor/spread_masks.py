"""Masks, whose values say how many results there are, for `test_spread.py`.

Tests `tensor/rules/masks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity import values
from spread_cases import Case

SHAPE = (4, 5, 6)
ROWS = torch.tensor([True, False, True, True])
COLUMNS = torch.tensor([False, True, False, False, True])
LAST = torch.tensor([True, True, False, False, False, True])
ALL = values(SHAPE, 8) > 0.1


def written(change: Callable[..., Any]) -> Callable[..., Tensor]:
    """A copy of the first operand, changed in place."""

    def does(x: Tensor, *others: Tensor) -> Tensor:
        y = x.clone()
        change(y, *others)
        return y

    return does


def assign(y: Tensor, key: Any, value: Any) -> None:
    y[key] = value


READING = {
    "mask of all": Case(lambda x: (x[x > 0], x[ALL], (x * 2)[x.abs() < 0.3])),
    "mask of nothing and of everything": Case(
        lambda x: (x[x > 99], x[x < 99], x[:, x[0, :, 0] > 9])
    ),
    "mask of rows": Case(lambda x: (x[x[:, 0, 0] > 0], x[ROWS], x[x.sum((1, 2)) > 0].mean(0))),
    "mask of two dims": Case(lambda x: (x[x[..., 0] > 0], x[:, x[0] > 0], x[ALL[..., 1]])),
    "mask of columns": Case(lambda x: (x[:, COLUMNS], x[..., LAST], x[:, x[0, :, 1] > 0])),
    "mask beside slices": Case(
        lambda x: (x[1:3, COLUMNS], x[ROWS, 2], x[0, :, LAST], x[None, ROWS, ::2], x[ROWS, ..., 1:])
    ),
    "mask as a list": Case(lambda x: (x[[True, False, False, True]], x[:, COLUMNS.tolist()])),
    "several masks": Case(lambda x: (x[ROWS, :, x[0, 0] > x[0, 0, :].sort()[0][2]],)),
    "mask and indices": Case(lambda x: (x[ROWS, torch.tensor([0, 2, 4])],)),
    "mask of a plain tensor": Case(
        lambda x, y: (y[x.detach() > 0], y[x.detach()[:, 0, 0] > 0]),
        (SHAPE, SHAPE),
        plain_others=True,
    ),
    "mask that lies elsewhere": Case(
        lambda x, y: (x[y > 0], x[y[:, 0, 0] > 0].sum()), (SHAPE, SHAPE)
    ),
    "masked_select": Case(
        lambda x: (x.masked_select(x > 0), torch.masked_select(x, LAST), x.masked_select(mask=ALL))
    ),
    "masked_select of a longer mask": Case(lambda x: torch.masked_select(x, ALL), ((5, 6),)),
    "masked_select of a plain tensor": Case(
        lambda x, y: torch.masked_select(y, x > 0), (SHAPE, SHAPE), plain_others=True
    ),
    "nonzero": Case(
        lambda x: (
            (x > 0).nonzero(),
            torch.nonzero((x * 2).round()),
            torch.argwhere(x > 99),
            *(x > 0).nonzero(as_tuple=True),
            *torch.nonzero(x[0, 0] > 0, as_tuple=True),
        )
    ),
    "where of a condition": Case(lambda x: (*torch.where(x > 0), x[torch.where(x > 0)])),
    "where of values": Case(lambda x, y: torch.where(x > 0, x, y), (SHAPE, SHAPE)),
    "loss of some": Case(
        lambda x, y: ((x - y)[y > 0].square().mean(), x[y > 0].softmax(0), x[y > 0] @ y[y > 0]),
        (SHAPE, SHAPE),
    ),
}

WRITING = {
    "one value at a mask": Case(written(lambda y: assign(y, y > 0, 1.5))),
    "one value at a mask of rows": Case(written(lambda y: assign(y, y.detach()[:, 0, 0] > 0, 1.5))),
    "one value at a mask of columns": Case(written(lambda y: assign(y, (..., LAST), -1.0))),
    "one value at a mask beside slices": Case(
        written(lambda y: (assign(y, (ROWS, 2), 3.0), assign(y, (slice(1, 3), COLUMNS), 4.0)))
    ),
    "values at a mask": Case(
        written(lambda y, z: assign(y, ALL, z[: int(ALL.sum())])), (SHAPE, (120,))
    ),
    "values of a mask at a mask": Case(
        written(lambda y, z: assign(y, z > 0, (z * z)[z > 0])), (SHAPE, SHAPE)
    ),
    "rows at a mask": Case(written(lambda y, z: assign(y, ROWS, z[:3])), (SHAPE, SHAPE)),
    "one row at a mask": Case(written(lambda y, z: assign(y, ROWS, z[1])), (SHAPE, SHAPE)),
    "columns at a mask": Case(
        written(lambda y, z: assign(y, (slice(None), COLUMNS), z[:, :2])), (SHAPE, SHAPE)
    ),
    "at a mask of nothing": Case(
        written(lambda y, z: assign(y, y.detach() > 99, z.reshape(-1)[:0])), (SHAPE, SHAPE)
    ),
    "one value at several masks": Case(
        written(lambda y: (assign(y, (ROWS, ..., LAST), 2.0), assign(y, (COLUMNS[:4], 1, LAST), 3)))
    ),
    "values at a mask and indices": Case(
        written(
            lambda y, z: (
                assign(y, (y.detach()[:, 0, 0] < 99, torch.tensor([0, 2, 2, 4])), z[:, 0]),
                assign(y, (slice(None), COLUMNS, torch.tensor([5, 1])), z[:, 1:3, 0]),
            )
        ),
        (SHAPE, SHAPE),
    ),
    "values that are added at masks": Case(
        lambda x, y: (
            x.index_put((ROWS,), y[:3], accumulate=True),
            x.index_put((ROWS, torch.tensor([1, 1, 0])), y[:3, 0], accumulate=True),
            x.index_put((x > 0,), y[0, 0, 0], accumulate=True),
        ),
        (SHAPE, SHAPE),
    ),
    "masked_scatter of several": Case(
        lambda x, y: (x.masked_scatter(x > 0, y), torch.masked_scatter(x, LAST, y)), (SHAPE, SHAPE)
    ),
    "masked_scatter_": Case(written(lambda y, z: y.masked_scatter_(ALL, z)), (SHAPE, (120,))),
    "index_put at masks": Case(
        lambda x, y: (x.index_put((ALL,), y), x.index_put((x > 0,), y), x.index_put((ROWS,), y)),
        (SHAPE, ()),
    ),
    "index_put_ at a mask": Case(
        written(lambda y, z: y.index_put_((ROWS,), z)), (SHAPE, (3, 5, 6))
    ),
}

FAMILIES = {"masks": READING, "writing at masks": WRITING}
