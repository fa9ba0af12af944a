"""Finite differences and integrals along a dimension, from values that are next to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.tensor.rules.reductions import argument, dims_of
from tessel.tensor.table import Arguments, Settings, outlines, rule, unsupported


@rule("diff")
def diff(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Differences of adjacent values along a dimension."""
    x, n = args[0], argument(args, kwargs, 1, "n", 1)
    (dim,) = dims_of(argument(args, kwargs, 2, "dim", -1), x._layout)
    ends = argument(args, kwargs, 3, "prepend"), argument(args, kwargs, 4, "append")
    outlines(func, args, kwargs)  # torch's own error
    if n == 0:  # torch ignores both ends
        return x.clone()
    if any(each is not None for each in ends):
        x = torch.cat([each for each in (ends[0], x, ends[1]) if each is not None], dim)
    for _ in range(n):
        before, after = _neighbours(x, dim)
        x = after ^ before if x.dtype == torch.bool else after - before
    return x


@rule("gradient")
def gradient(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The slope of the parabola through each value and its two neighbours, for each dimension."""
    kwargs = _with_numbers(kwargs)
    x, spacing, dims = args[0], kwargs.get("spacing"), kwargs.get("dim")
    if not (x.is_floating_point() or x.is_complex()):
        raise unsupported(name, f"values of {x.dtype} are not supported", x._layout)
    outlines(func, args, kwargs)  # torch's own error
    dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    if not isinstance(spacing, list | tuple):
        spacing = [1 if spacing is None else spacing] * len(dims)
    order = kwargs.get("edge_order", 1)
    return tuple(
        _slope(x, dim % x.dim(), each, order) for dim, each in zip(dims, spacing, strict=True)
    )


def _slope(x: Tensor, dim: int, spacing: Any, edge_order: int) -> Tensor:
    """The mean of the quotients before and after each value, weighted by the width of the other.

    Args:
        x: the values, spread.
        dim: the dimension to derive by.
        spacing: the distance of adjacent values, or the coordinates of all of them.
        edge_order: 1 for lines through the first two and the last two values, 2 for parabolas.
    """
    n = x.shape[dim]
    ends: list[Tensor] = []
    widths = spacing
    if isinstance(spacing, Tensor):
        widths = spacing.diff().reshape([-1 if d == dim else 1 for d in range(x.dim())])
    quotients = x.diff(dim=dim) / widths

    def at(values: Any, place: int) -> Any:
        return values.narrow(dim, place, 1) if isinstance(values, Tensor) else values

    for place, inner in ((0, 1), (n - 2, n - 3)):
        end = at(quotients, place)
        if edge_order == 2:  # so that the mean with this one lies on the parabola
            share = at(widths, place) / (at(widths, place) + at(widths, inner))
            end = end + 2 * share * (end - at(quotients, inner))
        ends.append(end)
    before, after = _neighbours(torch.cat([ends[0], quotients, ends[1]], dim), dim)
    if not isinstance(widths, Tensor):
        return (before + after) / 2
    left, right = _neighbours(torch.cat([at(widths, 0), widths, at(widths, n - 2)], dim), dim)
    return (before * right + after * left) / (left + right)


@rule("trapezoid", "trapz", plain=True)
def trapezoid(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The integral of a line through adjacent values."""
    y, dim, widths = _integrand(name, func, args, kwargs)
    if not y.shape[dim]:
        return y.sum(dim, dtype=y.dtype)
    if isinstance(widths, Tensor):
        left, right = _neighbours(y, dim)
        return ((left + right) * widths).sum(dim) / 2
    return (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * widths


@rule("cumulative_trapezoid", plain=True)
def cumulative_trapezoid(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The integrals up to each value but the first."""
    y, dim, widths = _integrand(name, func, args, kwargs)
    left, right = _neighbours(y, dim)
    return (widths / 2 * (left + right)).cumsum(dim)


def _integrand(
    name: str, func: Any, args: Arguments, kwargs: Settings
) -> tuple[Tensor, int, Tensor | float]:
    """The values to integrate, the dimension, and the distances of adjacent values along it."""
    kwargs = _with_numbers(kwargs)
    y, x = args[0], argument(args, kwargs, 1, "x")
    outlines(func, args, kwargs)  # torch's own error
    dim = kwargs.get("dim", -1) % y.dim()
    if x is None:
        return y, dim, kwargs.get("dx", 1.0)
    if x.dim() > y.dim():
        raise unsupported(name, "x has more dimensions than y", x._layout)
    if x.dim() == 1:
        x = x.reshape([-1 if d == dim else 1 for d in range(y.dim())])
    x = x.reshape([1] * (y.dim() - x.dim()) + list(x.shape))
    left, right = _neighbours(x, dim)
    return y, dim, right - left


def _with_numbers(kwargs: Settings) -> Settings:
    """The arguments with numbers for tensors without dimensions, as torch takes them."""

    def number(value: Any) -> Any:
        return value.item() if isinstance(value, Tensor) and not value.dim() else value

    return {key: number(each) for key, each in kwargs.items()}


def _neighbours(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """All values but the last, and all but the first."""
    length = max(0, x.shape[dim] - 1)
    return x.narrow(dim, 0, length), x.narrow(dim, x.shape[dim] - length, length)
