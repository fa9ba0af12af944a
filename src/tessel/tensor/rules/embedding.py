"""Lookups in tables and grids: each worker looks up its own indices or points."""

from __future__ import annotations

from dataclasses import replace
from string import ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tessel.core.layout import Cut
from tessel.core.shared import anchored_zeros
from tessel.tensor.rules.batched import batched, holds_anywhere, part_of, whole_of
from tessel.tensor.rules.pointwise import pointwise
from tessel.tensor.rules.products import contraction_of, operand, summed
from tessel.tensor.rules.reductions import argument
from tessel.tensor.rules.split_tables import EmbeddingOptions, look_up
from tessel.tensor.table import (
    Arguments,
    Settings,
    arguments_of,
    as_spread,
    held_layouts,
    made,
    opened,
    outlines,
    parts,
    rule,
    spread_among,
    unsupported,
)
from tessel.tensor.tensor import Tensor


@rule("embedding", plain=True)
def embedding(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Rows of a table, which all workers have, or which is split."""
    given = arguments_of(name, func, args, kwargs)
    indices, weight = given.pop("input"), given.pop("weight")
    indices = as_spread(indices, next(spread_among(indices, weight))._layout.partition)
    if holds_anywhere((indices < 0) | (indices >= weight.shape[0])):
        raise IndexError(f"index out of range: the table has {weight.shape[0]} rows")
    if given["sparse"] and isinstance(weight, Tensor) and weight.is_leaf and weight.requires_grad:
        raise NotImplementedError(
            "torch's `embedding` of a spread table with sparse=True: a spread tensor has no sparse "
            "gradient; leave it out, or take tessel.nn.ParallelEmbedding, whose shards have one"
        )
    if indices._layout.is_whole and isinstance(weight, Tensor) and not weight._layout.is_whole:
        outlines(func, (indices, weight), given)  # torch's own errors
        options = EmbeddingOptions(**given).counted_from_front(weight.shape[0])
        return made(*look_up(parts(indices), *opened(weight), options))
    for key in ("max_norm", "scale_grad_by_freq", "sparse"):
        if not given[key]:
            continue
        # the result, or the gradient, depends on all indices: each worker needs them
        layouts = held_layouts(indices, weight)
        if not all(each.is_whole for each in layouts):
            raise NotImplementedError(
                f"torch's `embedding` of spread tensors: {key}={given[key]} needs all indices, got "
                f"{', '.join(map(str, layouts))}; leave it out, or gather them first, by x.full()"
            )
        return as_spread(func(parts(indices), parts(weight), **given), layouts[0].partition)
    letters = ascii_lowercase[: indices.dim()]
    equation = ((letters, "XY"), letters + "Y")
    if isinstance(weight, Tensor) and weight._layout.is_split(0):
        return _of_rows(name, equation, indices, weight, given)
    return batched(name, equation, "X", (indices, weight), func, given)


def _of_rows(name: str, equation: Any, indices: Tensor, weight: Tensor, given: Settings) -> Tensor:
    """Look up a table whose rows are split: one worker has each row, and the others add zeros.

    This is the product of the table with ones at the indices.
    """
    plan = contraction_of(name, equation, (indices, weight))
    box = plan.inputs[1].box()
    assert box is not None
    start, stop = box[0]
    padding = given["padding_idx"]
    padding = None if padding is None else padding % weight.shape[0] - start
    own = padding if padding is not None and 0 <= padding < stop - start else None

    def look_up(i: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        inside = (i >= start) & (i < stop)
        if start == stop:  # no row to look up: zeros that depend on the table
            return anchored_zeros((*i.shape, rows.shape[1]), rows)
        found = F.embedding(torch.where(inside, i - start, 0), rows, own)
        return torch.where(inside.unsqueeze(-1), found, 0)

    return summed(look_up(*map(operand, (indices, weight), plan.inputs)), plan)


@rule("embedding_bag", plain=True)
def embedding_bag(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Sums, means or largest values of rows of a table, one for each row of indices."""
    given = arguments_of(name, func, args, kwargs)
    indices, weight = given.pop("input"), given.pop("weight")
    factors = given.pop("per_sample_weights")
    layouts = held_layouts(args, kwargs)
    if indices.dim() != 2:
        raise unsupported(name, "bags must be rows of indices", *layouts)
    for key in ("max_norm", "scale_grad_by_freq", "sparse"):
        if given[key]:
            raise unsupported(name, f"{key} needs all indices", *layouts)
    if holds_anywhere((indices < 0) | (indices >= weight.shape[0])):
        raise IndexError(f"index out of range: the table has {weight.shape[0]} rows")
    if factors is None:
        return batched(name, (("nl", "XY"), "nY"), "lX", (indices, weight), func, given)
    return batched(
        name,
        (("nl", "XY", "nl"), "nY"),
        "lXY",  # the derivative of the factors is a sum over all features
        (indices, weight, factors),
        lambda i, w, f: func(i, w, per_sample_weights=f, **given),
    )


@rule("one_hot")
def one_hot(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A new last dimension, which is whole, with a one at the index of the class."""
    part, layout = opened(args[0])
    count = argument(args, kwargs, 1, "num_classes", -1)
    if part.dtype != torch.int64:
        func(torch.empty(1, dtype=part.dtype), 1)  # torch's own error
    if args[0].numel():
        if holds_anywhere(args[0] < 0):
            raise RuntimeError("Class values must be non-negative.")
        if count != -1 and holds_anywhere(args[0] >= count):
            raise RuntimeError("Class values must be smaller than num_classes.")
        count = int(args[0].max()) + 1 if count == -1 else count
    else:
        func(torch.empty(0, dtype=torch.int64), count)  # torch's own error
    return made(func(part, count), layout.with_whole(len(layout.shape), count))


@rule("bucketize", plain=True)
def bucketize(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The interval between boundaries that contains each value; all workers have the boundaries."""
    boundaries = whole_of(argument(args, kwargs, 1, "boundaries"))
    if not isinstance(args[0], Tensor):
        partition = next(spread_among(args, kwargs))._layout.partition
        return as_spread(func(args[0], boundaries, **_without(kwargs, "boundaries")), partition)
    rest = _without(kwargs, "boundaries")
    return pointwise(name, lambda x: func(x, boundaries, **rest), args[:1], {})


@rule("searchsorted", plain=True)
def searchsorted(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The same for rows of values, with boundaries of their own or common ones."""
    sequence, x = args[0], argument(args, kwargs, 1, "input")
    if not isinstance(x, torch.Tensor):
        raise unsupported(name, "values must be a tensor", sequence._layout)
    rest = {**_without(kwargs, "input"), "sorter": None}
    sorter = kwargs.get("sorter")
    if sorter is not None:
        sequence = torch.take_along_dim(sequence, sorter, -1)
    rows = ascii_lowercase[: x.dim() - 1] if sequence.dim() > 1 else ""
    letters = ascii_lowercase[: x.dim() - 1] + "Y" if x.dim() else ""
    equation = ((rows + "X", letters), letters)
    return batched(name, equation, "X", (sequence, x), func, rest)


def _without(kwargs: Settings, name: str) -> Settings:
    return {key: value for key, value in kwargs.items() if key != name}


@rule("grid_sample", plain=True)
def grid_sample(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Values of images between their points: images are whole, points may be split."""
    given = arguments_of(name, func, args, kwargs)
    x, grid = given.pop("input"), given.pop("grid")
    if given["align_corners"] is None:
        outlines(func, (x, grid), given)  # torch's own warning
        given["align_corners"] = False
    space, points = ("XYZ"[: x.dim() - 2], "xyz"[: x.dim() - 2])
    equation = (("nc" + space, "n" + points + "k"), "nc" + points)
    whole = space + "k"
    return batched(name, equation, whole, (x, grid), func, given)


@rule("affine_grid")
def affine_grid(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The points of the affine map of each sample."""
    given = arguments_of(name, func, args, kwargs)
    theta, size, align = given["theta"], list(given["size"]), given["align_corners"]
    outlines(func, (theta, size), {"align_corners": align})
    layout = theta._layout
    there = layout.gathered([dim for dim in (1, 2) if layout.is_split(dim)])
    part = part_of(theta, there)
    target = replace(
        there,
        shape=(*size[:1], *size[2:], len(size) - 2),
        cuts=(there.cuts[0], *(Cut((), ((0, n),)) for n in (*size[2:], len(size) - 2))),
    )
    # map the points of the identity map, which also works for parts without samples
    one = torch.eye(len(size) - 2, len(size) - 1, dtype=part.dtype, device=part.device)
    base = F.affine_grid(one[None], [1, *size[1:]], bool(align)).flatten(0, -2)
    base = torch.cat([base, base.new_ones(len(base), 1)], 1)
    return made((base @ part.mT).reshape(target.local_shape), target)
