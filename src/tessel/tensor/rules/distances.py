"""Distances and angles between vectors along one dimension."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

import torch

from tessel.tensor.rules.batched import batched
from tessel.tensor.rules.reductions import argument
from tessel.tensor.table import Arguments, Settings, outlines, rule


@rule("cosine_similarity", plain=True)
def cosine_similarity(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Σ x y / (‖x‖ ‖y‖) along a dimension, with norms of at least eps."""
    outlines(func, args, kwargs)  # torch's own errors
    x, y = args[0], argument(args, kwargs, 1, "x2")
    dim, eps = argument(args, kwargs, 2, "dim", 1), argument(args, kwargs, 3, "eps", 1e-8)
    ndim = max(x.dim(), y.dim())
    dim = dim % ndim - ndim  # from the end, as operands are broadcast
    length = torch.broadcast_shapes(x.shape, y.shape)[dim]
    return (_unit(x, dim, length, eps) * _unit(y, dim, length, eps)).sum(dim)


def _unit(x: torch.Tensor, dim: int, size: int, eps: float) -> torch.Tensor:
    """Vectors of `size` numbers, divided by their norms.

    Torch clamps these norms hidden from autograd.
    """
    if x.dim() < -dim:
        x = x.reshape(*[1] * (-dim - x.dim()), *x.shape)
    if x.shape[dim] != size:  # a number that is broadcast counts each time
        x = x.expand([size if d == dim % x.dim() else n for d, n in enumerate(x.shape)])
    length = torch.linalg.vector_norm(x, 2, dim, True)
    return x / torch.where(length < eps, length - length.detach() + eps, length)


@rule("pairwise_distance", plain=True)
def pairwise_distance(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """‖x - y + eps‖ along the last dimension."""
    outlines(func, args, kwargs)
    x, y = args[0], argument(args, kwargs, 1, "x2")
    p, eps = argument(args, kwargs, 2, "p", 2.0), argument(args, kwargs, 3, "eps", 1e-6)
    keepdim = argument(args, kwargs, 4, "keepdim", False)
    return torch.linalg.vector_norm(x - y + eps, p, -1, keepdim)


@rule("cdist", plain=True)
def cdist(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The distances of all rows of one tensor to all rows of another; both may be split."""
    x, y = args[0], argument(args, kwargs, 1, "x2")
    outlines(func, args, kwargs)
    batch = ascii_lowercase[: max(x.dim(), y.dim()) - 2]
    left, right = batch[len(batch) - x.dim() + 2 :], batch[len(batch) - y.dim() + 2 :]
    equation = ((left + "XZ", right + "YZ"), batch + "XY")
    rest = args[2:]
    settings = {key: value for key, value in kwargs.items() if key != "x2"}
    return batched(name, equation, "Z", (x, y), lambda a, b: func(a, b, *rest, **settings))
