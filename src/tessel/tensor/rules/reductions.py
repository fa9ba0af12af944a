"""Functions over whole dimensions: sums and means of split ones, anything of whole ones."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from tessel.layout import Cut, Layout
from tessel.tensor.rules.pointwise import pointwise
from tessel.tensor.table import (
    Arguments,
    Settings,
    is_split,
    made,
    opened,
    rule,
    unsupported,
)
from tessel.tensor.tensor import move
from tessel.transport import kept_in_job


def _dims(layout: Layout, args: Arguments, kwargs: Settings) -> tuple[int, ...]:
    """The dimensions that are named, all if none is."""
    given = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    ndim = len(layout.shape)
    if given is None or isinstance(given, bool) or given == () or given == []:
        return tuple(range(ndim))
    dims = (given,) if isinstance(given, int) else tuple(given)
    for dim in dims:
        if not -ndim <= dim < ndim:
            raise IndexError(f"dimension {dim} is out of range for {ndim} dimensions")
    return tuple(sorted(dim % ndim for dim in dims))


@kept_in_job
def _without(layout: Layout, dims: tuple[int, ...], keepdim: bool) -> tuple[Layout, Layout]:
    """Each worker's own share of a reduction, and the result that all of them share."""
    axes = {axis for dim in dims for axis in layout.cuts[dim].axes}
    whole_cut = Cut((), ((0, 1),))
    kept = [dim for dim in range(len(layout.shape)) if keepdim or dim not in dims]
    shape = tuple(1 if dim in dims else layout.shape[dim] for dim in kept)
    cuts = tuple(whole_cut if dim in dims else layout.cuts[dim] for dim in kept)
    separate = replace(layout, shape=shape, cuts=cuts)
    return separate, replace(separate, shared=tuple(sorted({*layout.shared, *axes})))


@rule("sum", "mean")
def reduce(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The sum of the workers' own sums, for a mean divided by the number of all elements."""
    x, layout = opened(args[0])
    dims = _dims(layout, args, kwargs)
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    dtype = kwargs.get("dtype")
    separate, shared = _without(layout, dims, keepdim)
    if name == "mean" and not (dtype or x.dtype).is_floating_point:
        func(x.reshape(-1)[:1])  # torch's own error
    if not any(is_split(layout, dim) for dim in dims) and x.numel():
        return made(func(x, *args[1:], **kwargs), shared)
    result = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    own = x.sum(dims, keepdim, dtype=wide) if dims else x.sum(dtype=wide)
    y = move(separate, shared).apply(own)
    y = y / prod(layout.shape[dim] for dim in dims) if name == "mean" else y
    return made(y.to(result), shared)


@rule(
    *("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "flip", "sort", "argsort"),
    *("logcumsumexp", "normalize", "roll", "glu"),
)
def along(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """What needs all elements along some dimensions, which must be whole."""
    x, layout = opened(args[0])
    position = {"roll": 2, "normalize": 2}.get(name, 1)
    usual = {"normalize": 1, "glu": -1, "sort": -1, "argsort": -1}.get(name)
    given = args[position] if len(args) > position else kwargs.get("dim", kwargs.get("dims", usual))
    if name == "flip" and isinstance(given, int):
        given = args[position:]
    dims = _dims(layout, (None, given), {})
    if any(is_split(layout, dim) for dim in dims):
        raise unsupported(name, f"dimensions {dims} must be whole", layout)
    result = func(x, *args[1:], **kwargs)
    if name == "glu":
        halved = tuple(n // 2 if dim in dims else n for dim, n in enumerate(layout.shape))
        cuts = tuple(
            Cut(cut.axes, ((0, n),)) if dim in dims else cut
            for dim, (cut, n) in enumerate(zip(layout.cuts, halved, strict=True))
        )
        return made(result, replace(layout, shape=halved, cuts=cuts))
    if isinstance(result, tuple):
        return rebuilt(result, [made(each, layout) for each in result])
    return made(result, layout)


@rule(
    *("amax", "amin", "max", "min", "argmax", "argmin", "logsumexp", "var", "std", "prod", "all"),
    *("any", "norm", "var_mean", "std_mean", "median", "count_nonzero", "aminmax", "mode"),
)
def over_whole_dims(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """What reduces some dimensions, which must be whole."""
    if len(args) > 1 and isinstance(args[1], Tensor):
        return pointwise(name, func, args, kwargs)
    x, layout = opened(args[0])
    if name == "norm":  # its second argument is an exponent
        dims = _dims(layout, (None, *args[2:3]), kwargs)
    else:
        dims = _dims(layout, args, kwargs)
    if any(is_split(layout, dim) for dim in dims):
        raise unsupported(name, f"dimensions {dims} must be whole", layout)
    result = func(x, *args[1:], **kwargs)
    first = result[0] if isinstance(result, tuple) else result
    _, shared = _without(layout, dims, first.dim() == len(layout.shape))
    if isinstance(result, tuple):
        return rebuilt(result, [made(each, shared) for each in result])
    return made(result, shared)


def rebuilt(result: Any, members: list[Any]) -> Any:
    """A tuple, or a named tuple as torch has them, with other members."""
    return tuple(members) if type(result) is tuple else type(result)(members)
