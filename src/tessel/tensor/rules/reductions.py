"""Functions over some dimensions, also split ones: sums, extremes, moments, softmax, sorting.

If results of the parts can be combined, each worker reduces its part, and only these results are
sent. Other functions go through `hosting`.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tessel.core import boxes
from tessel.core.layout import Cut, Layout
from tessel.core.linop import is_derived
from tessel.core.shared import anchored_zeros, used
from tessel.tensor.rules.hosting import along
from tessel.tensor.rules.pointwise import fitted, pointwise
from tessel.tensor.table import (
    Arguments,
    Settings,
    computed,
    made,
    moved,
    opened,
    outlines,
    rule,
    try_values,
    unsupported,
    widened,
)
from tessel.tensor.tensor import Tensor, move
from tessel.tensor.windowed import outline
from tessel.transport import kept_in_job


def dims_of(given: Any, layout: Layout) -> tuple[int, ...]:
    """The given dimensions in ascending order; all if none are given."""
    ndim = len(layout.shape)
    if given is None or given == () or given == []:
        return tuple(range(ndim))
    dims = (given,) if isinstance(given, int) else tuple(given)
    for dim in dims:
        if not -max(ndim, 1) <= dim < max(ndim, 1):
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but "
                f"got {dim})"
            )
    if len({dim % max(ndim, 1) for dim in dims}) < len(dims):
        raise RuntimeError(f"a dimension appears multiple times in the list of dims {dims}")
    return tuple(sorted(dim % ndim for dim in dims)) if ndim else ()


def argument(args: Arguments, kwargs: Settings, place: int, name: str, usual: Any = None) -> Any:
    """An argument by its position or its name."""
    return args[place] if len(args) > place else kwargs.get(name, usual)


@kept_in_job
def without(layout: Layout, dims: tuple[int, ...], keepdim: bool) -> tuple[Layout, Layout]:
    """The layouts of each worker's term of a reduction, and of the result that all share."""
    axes = {axis for dim in dims for axis in layout.cuts[dim].axes}
    kept = [dim for dim in range(len(layout.shape)) if keepdim or dim not in dims]
    shape = tuple(1 if dim in dims else layout.shape[dim] for dim in kept)
    cuts = tuple(Cut.whole(1) if dim in dims else layout.cuts[dim] for dim in kept)
    separate = replace(layout, shape=shape, cuts=cuts)
    return separate, replace(separate, shared=tuple(sorted({*layout.shared, *axes})))


def _are_split(layout: Layout, dims: tuple[int, ...]) -> bool:
    return any(layout.is_split(dim) for dim in dims)


@rule("_is_all_true", "_is_any_true")
def truth(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The functions with which `torch.distributions` checks its arguments."""
    return args[0].all() if name == "_is_all_true" else args[0].any()


@rule("sum", "mean", "nansum", "nanmean")
def reduce(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The sum of the sums of all parts, for a mean divided by the number of all elements."""
    if name == "nansum":
        known = torch.where(torch.isnan(args[0]), 0, args[0])
        return known.sum(*args[1:], **kwargs)
    if name == "nanmean":
        outlines(func, args, kwargs)  # torch's own errors
        count = (~torch.isnan(args[0])).sum(*args[1:3], **{**kwargs, "dtype": None})
        return args[0].nansum(*args[1:], **kwargs) / count
    x, layout = opened(args[0])
    dims = dims_of(_reduced_dims(args, kwargs), layout)
    keepdim = argument(args, kwargs, 2, "keepdim", False)
    dtype = kwargs.get("dtype")
    separate, shared = without(layout, dims, keepdim)
    if name == "mean" and not (
        (dtype or x.dtype).is_floating_point or (dtype or x.dtype).is_complex
    ):
        func(x.reshape(-1)[:1])  # torch's own error
    if not _are_split(layout, dims) and x.numel():
        return made(func(x, *args[1:], **kwargs), shared)
    result = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    # Half precision is summed in float32, as in torch, and rounded once at the end.
    wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
    own = x.sum(dims, keepdim, dtype=wide) if dims else x.sum(dtype=wide)
    y = move(separate, shared).apply(own)
    y = y / prod(layout.shape[dim] for dim in dims) if name == "mean" else y
    return made(y.to(result), shared)


def _reduced_dims(args: Arguments, kwargs: Settings) -> Any:
    given = argument(args, kwargs, 1, "dim")
    return None if isinstance(given, bool) else given


@kept_in_job
def _results(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """The layout of the parts' results: along reduced dimensions one for each nonempty part."""
    cuts = list(layout.cuts)
    shape = list(layout.shape)
    for dim in dims:
        counts = [int(stop > start) for start, stop in layout.cuts[dim].intervals]
        shape[dim] = sum(counts)
        cuts[dim] = Cut(layout.cuts[dim].axes, boxes.consecutive(counts))
    return replace(layout, shape=tuple(shape), cuts=tuple(cuts))


def _cut(results: Layout) -> tuple[slice, ...]:
    """The slices of a worker's results to keep: none along a dimension without values."""
    return tuple(slice(0, length) for length in results.local_shape)


def _stages(
    x: torch.Tensor, layout: Layout, dims: tuple[int, ...], first: Any, second: Any, keepdim: bool
) -> Tensor:
    """Reduce the part, gather the results of all workers, and reduce these.

    Args:
        x: the part.
        layout: the layout of the tensor.
        dims: the dimensions that are reduced.
        first: reduces these dimensions of a part, and keeps them with length one.
        second: reduces the gathered results.
        keepdim: whether the result keeps these dimensions.
    """
    results = _results(layout, dims)
    own = first(filled(x, dims))
    if tuple(own.shape) != results.local_shape:  # no values, no result
        own = own[_cut(results)]
    everyones = move(results, results.gathered(dims)).apply(own)
    _, shared = without(layout, dims, keepdim)
    return made(second(everyones), shared)


def filled(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """A part with at least one value along some dimensions, so that it can be reduced.

    A worker without values reduces a zero and drops the result: its graph must be like those of the
    others, or its backward passes would skip their exchanges.
    """
    for dim in dims:
        if not x.shape[dim]:
            # not torch.cat, whose derivative is a constant for empty 1-d tensors
            x = F.pad(x, (*[0, 0] * (x.dim() - dim - 1), 0, 1))
    return x


def _of_nothing(x: Tensor, dims: tuple[int, ...], keepdim: bool, compute: Any) -> Tensor:
    """A reduction of an empty tensor, which can be gathered for free."""
    there = x._layout.gathered(dims)
    return made(compute(moved(x, there)), without(there, dims, keepdim)[1])


@rule("amax", "amin", "all", "any", "prod", "logsumexp")
def reduce_in_stages(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Associative reductions: first of the parts, then of their results."""
    x, layout = opened(args[0])
    dims = dims_of(_reduced_dims(args, kwargs), layout)
    keepdim = argument(args, kwargs, 2, "keepdim", False)
    dtype = kwargs.get("dtype")
    if not _are_split(layout, dims):
        _, shared = without(layout, dims, keepdim)
        return made(func(x, *args[1:], **kwargs), shared)
    if 0 in layout.shape:
        return _of_nothing(args[0], dims, keepdim, lambda y: func(y, *args[1:], **kwargs))
    if dtype is not None:
        x = x.to(dtype)
    stage = _STAGES[name]
    first = _finite_logsumexp if name == "logsumexp" else stage

    def in_stages(part: torch.Tensor) -> Tensor:
        return _stages(
            part,
            layout,
            dims,
            lambda y: first(y, dims, True),
            lambda y: stage(y, dims, keepdim),
            keepdim,
        )

    if name not in ("amax", "amin") or not is_derived(x):
        return in_stages(x) if dtype is None else in_stages(x).to(dtype)
    # The gradient of an extreme value is shared equally by all elements that have it, as in torch;
    # in stages it would be shared equally by all parts that have it.
    extreme, shape = in_stages(x.detach()), list(layout.shape)
    for dim in dims:
        shape[dim] = 1
    ties = args[0].detach() == extreme.reshape(shape)
    # Only the derivative of a mean of equal numbers is needed: the mean may be rounded, and their
    # sum may be infinite. So they are offsets from the extreme value, unless that is infinite.
    base = torch.where(extreme.isfinite(), extreme, 0)
    offsets = torch.where(ties, args[0] - base.reshape(shape), 0)
    return base + offsets.sum(dims, keepdim) / ties.sum(dims, keepdim)


def _finite_logsumexp(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    """The logsumexp of a part, which may only have -inf where other parts have values.

    Torch has no derivative there, but the derivative for the whole tensor exists: zero.
    """
    is_nothing = (x == -float("inf")).all(dims, keepdim=True)
    found = x.masked_fill(is_nothing, 0).logsumexp(dims, keepdim)
    return found.masked_fill(is_nothing if keepdim else is_nothing.squeeze(dims), -float("inf"))


def _each(function: Any) -> Any:
    """A function of one dimension, extended to several."""

    def over(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
        for dim in reversed(dims):
            x = function(x, dim, keepdim=keepdim)
        return x

    return over


_STAGES: dict[str, Any] = {
    "amax": lambda x, dims, keepdim: x.amax(dims, keepdim),
    "amin": lambda x, dims, keepdim: x.amin(dims, keepdim),
    "logsumexp": lambda x, dims, keepdim: x.logsumexp(dims, keepdim),
    "all": _each(torch.all),
    "any": _each(torch.any),
    "prod": _each(torch.prod),
}


@rule("max", "min")
def extremes(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The extreme of two tensors, of all values, or along a dimension with indices."""
    other = argument(args, kwargs, 1, "other")
    if isinstance(other, torch.Tensor):
        return pointwise(name, func, args, kwargs)
    x, layout = opened(args[0])
    dim = argument(args, kwargs, 1, "dim")
    if dim is None:
        dims = tuple(range(len(layout.shape)))
        if not _are_split(layout, dims):
            return made(func(x), without(layout, dims, False)[1])
        return args[0].amax(dims) if name == "max" else args[0].amin(dims)
    keepdim = argument(args, kwargs, 2, "keepdim", False)
    (dim,) = dims_of(dim, layout) or (0,)
    return _with_places(func, args[0], dim, keepdim)


def _with_places(func: Any, x: Tensor, dim: int, keepdim: bool) -> Any:
    """Extreme values and indices along a dimension: first of each part, then of the results."""
    part, layout = opened(x)
    if not layout.shape:  # a 0-d tensor, for which torch accepts dimension 0
        values, places = func(part, dim, keepdim)
        return _pair(func, made(values, layout), made(places, layout))
    _, shared = without(layout, (dim,), keepdim)
    if not layout.is_split(dim):
        values, places = func(part, dim, keepdim)
        return _pair(func, made(values, shared), made(places, shared))
    if layout.shape[dim] == 0:
        func(outline(layout.shape), dim, keepdim)  # torch's own error
    box = layout.box()
    assert box is not None
    results = _results(layout, (dim,))
    values, places = func(filled(part, (dim,)), dim, True)
    values, places = values[_cut(results)], places[_cut(results)] + box[dim][0]
    everyones = results.gathered((dim,))
    values = move(results, everyones).apply(values)
    places = move(results, everyones).apply(places)
    values, chosen = func(values, dim, True)
    places = places.gather(dim, chosen)
    if not keepdim:
        values, places = values.squeeze(dim), places.squeeze(dim)
    return _pair(func, made(values, shared), made(places, shared))


def _pair(func: Any, values: Tensor, places: Tensor) -> Any:
    kind = (
        torch.return_types.max if func in (torch.max, torch.Tensor.max) else torch.return_types.min
    )
    return kind((values, places))


@rule("argmax", "argmin")
def place_of_extreme(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The index along a dimension, or in the flattened tensor."""
    x = args[0]
    dim = argument(args, kwargs, 1, "dim")
    keepdim = argument(args, kwargs, 2, "keepdim", False)
    if dim is None:
        if keepdim:
            return getattr(x.flatten(), name)(0).reshape([1] * x.dim())
        return getattr(x.flatten(), name)(0)
    func(x._part.new_empty([1] * x.dim()), dim)  # torch's own errors
    extreme = torch.max if name == "argmax" else torch.min
    (dim,) = dims_of(dim, x._layout) or (0,)
    return _with_places(extreme, x, dim, keepdim)[1]


@rule("aminmax")
def both_extremes(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    x, dim = args[0], kwargs.get("dim")
    keepdim = kwargs.get("keepdim", False)
    return torch.return_types.aminmax((x.amin(dim, keepdim), x.amax(dim, keepdim)))


@rule("count_nonzero")
def count_nonzero(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    return (args[0] != 0).sum(argument(args, kwargs, 1, "dim"))


@rule("var", "std", "var_mean", "std_mean")
def moments(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The sum of squared distances from the mean of the whole tensor, divided by the number."""
    x, layout = args[0], args[0]._layout
    given, correction, keepdim = _moment_arguments(args, kwargs)
    dims = dims_of(given, layout)
    if not _are_split(layout, dims):
        part, _ = opened(x)
        result = func(part, *args[1:], **kwargs)
        _, shared = without(layout, dims, keepdim)
        if isinstance(result, tuple):
            return tuple(made(each, shared) for each in result)
        return made(result, shared)
    outlines(func, args, kwargs)  # torch's own errors
    # Half precision is computed in float32, as in torch, and rounded once at the end.
    kind, x = x.dtype, widened(x)
    mean = x.mean(dims, True)
    count = prod(layout.shape[dim] for dim in dims)
    spread = _squares(x - mean).sum(dims, keepdim) / max(0, count - correction)
    spread = _root(spread, 2) if name.startswith("std") else spread
    spread = spread.to(kind.to_real())
    if not name.endswith("_mean"):
        return spread
    return spread, (mean if keepdim else mean.reshape(spread.shape)).to(kind)


def _squares(x: torch.Tensor) -> torch.Tensor:
    """Squared magnitudes, which have derivatives of all orders also at zero."""
    return (x * x.conj()).real if x.is_complex() else x * x


def _root(total: torch.Tensor, p: float) -> torch.Tensor:
    """A root with derivative zero at zero, as in torch for norms and standard deviations."""
    is_zero = total == 0
    safe = total.masked_fill(is_zero, 1)
    root = safe.sqrt() if p == 2 else safe.pow(1 / p)
    return root.masked_fill(is_zero, 0)


def _moment_arguments(args: Arguments, kwargs: Settings) -> tuple[Any, float, bool]:
    """Dimensions, correction and keepdim, from the three forms that torch accepts."""
    rest = list(args[1:])
    if rest and isinstance(rest[0], bool):  # var(unbiased)
        kwargs = {"unbiased": rest.pop(0), **kwargs}
    dim = rest.pop(0) if rest else kwargs.get("dim")
    if rest:  # var(dim, unbiased, keepdim)
        kwargs = {"unbiased": rest.pop(0), **kwargs}
    keepdim = rest.pop(0) if rest else kwargs.get("keepdim", False)
    correction = kwargs.get("correction")
    if correction is None:
        correction = int(kwargs.get("unbiased", True))
    return dim, correction, keepdim


@rule("norm", "linalg_vector_norm", "vector_norm")
def norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The norm, computed from results of the parts."""
    x, layout = opened(args[0])
    first = "p" if name == "norm" else "ord"
    p = argument(args, kwargs, 1, first, 2)
    p = 2 if p in (None, "fro") else p
    dims = dims_of(argument(args, kwargs, 2, "dim"), layout)
    keepdim = argument(args, kwargs, 3, "keepdim", False)
    dtype = argument(args, kwargs, 5 if name == "norm" else 4, "dtype")
    if isinstance(p, str):
        raise unsupported(name, f"a norm of kind {p!r} is not supported", layout)
    if not _are_split(layout, dims):
        return made(func(x, *args[1:], **kwargs), without(layout, dims, keepdim)[1])

    def stage(values: torch.Tensor, keep: bool) -> torch.Tensor:
        return torch.linalg.vector_norm(values, p, dims, keep, dtype=dtype)

    if abs(p) == float("inf"):  # ties share the gradient
        size = args[0].abs() if dtype is None else args[0].to(dtype).abs()
        return size.amax(dims, keepdim) if p > 0 else size.amin(dims, keepdim)
    if p == 0:  # the number of nonzero values, which is summed
        separate, shared = without(layout, dims, keepdim)
        return made(move(separate, shared).apply(stage(x, keepdim)), shared)
    if 0 in layout.shape:
        return _of_nothing(args[0], dims, keepdim, lambda y: func(y, *args[1:], **kwargs))
    if p >= 2:
        # Not by norms of norms, which have no second derivative if all values of a part are zero.
        y = widened(args[0] if dtype is None else args[0].to(dtype))
        powers = _squares(y) if p == 2 else y.abs().pow(p)
        kind = func(x.new_zeros([1] * x.dim()), *args[1:], **kwargs).dtype
        return _root(powers.sum(dims, keepdim), p).to(kind)
    return _stages(
        x, layout, dims, lambda part: stage(part, True), lambda y: stage(y, keepdim), keepdim
    )


@rule("dist")
def distance(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    p = argument(args, kwargs, 2, "p", 2)
    return torch.linalg.vector_norm(args[0] - argument(args, kwargs, 1, "other"), p)


@rule("normalize")
def normalize(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    x = args[0]
    p, dim = argument(args, kwargs, 1, "p", 2.0), argument(args, kwargs, 2, "dim", 1)
    eps = argument(args, kwargs, 3, "eps", 1e-12)
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


@rule("softmax", "log_softmax", "softmin")
def softmax(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Softmax; along a split dimension only the largest value and the sum are sent."""
    x = args[0]
    dim = argument(args, kwargs, 1, "dim")
    part, layout = opened(x)
    if dim is None:  # with torch's own warning
        dim = F._get_softmax_dim(name, len(layout.shape), 5)  # type: ignore[attr-defined]
        args, kwargs = args[:1], {**kwargs, "dim": dim}
    (dim,) = dims_of(dim, layout) or (0,)
    if not layout.shape or not layout.is_split(dim):
        try_values(lambda values: func(values, *args[1:], **kwargs), part, layout)
        return made(func(part, *args[1:], **kwargs), layout)
    if 0 in layout.shape:  # there is no largest value
        return along(x, (dim,), lambda part: func(part, *args[1:], **kwargs))
    kind = func(part.new_zeros([1] * x.dim()), *args[1:], **kwargs).dtype  # torch's own errors
    # half precision in float32, as above
    x = widened(x.to(argument(args, kwargs, 2, "dtype") or x.dtype))
    x = -x if name == "softmin" else x
    offset = x - x.detach().amax(dim, True)  # it cancels out and needs no derivative
    if name == "log_softmax":
        return (offset - offset.exp().sum(dim, True).log()).to(kind)
    powers = offset.exp()
    return (powers / powers.sum(dim, True)).to(kind)


_ALONG = {  # the position of the dimension among the arguments, and its default
    "cumsum": (1, None), "cumprod": (1, None), "cummax": (1, None), "cummin": (1, None),
    "logcumsumexp": (1, None), "sort": (1, -1), "argsort": (1, -1), "msort": (1, 0),
    "topk": (2, -1), "glu": (1, -1), "diff": (2, -1), "kthvalue": (2, -1), "median": (1, None),
    "nanmedian": (1, None), "mode": (1, -1), "quantile": (2, None), "nanquantile": (2, None),
}  # fmt: skip


@rule("cummax", "cummin", "logcumsumexp", "sort", "argsort", "msort", "glu")
def mix_along(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Functions of whole lines along a dimension, which keep the others."""
    x = args[0]
    place, usual = _ALONG[name]
    kwargs = dict(kwargs)
    given = argument(args, kwargs, place, "dim", usual)
    if name in ("sort", "argsort") and isinstance(given, bool):
        given = -1  # sort(descending)
    (dim,) = dims_of(given, x._layout) or (0,)
    if not x._layout.shape:
        return _alone(x, func, args, kwargs)
    return along(x, (dim,), lambda part: func(part, *args[1:], **kwargs))


def _alone(x: Tensor, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Apply a function to a 0-d tensor."""
    part, layout = opened(x)
    result = func(part, *args[1:], **kwargs)
    if isinstance(result, tuple):
        return type(result)([made(each, layout) for each in result])
    return made(result, layout)


@rule("topk")
def topk(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The largest values along a dimension, and their indices."""
    x = args[0]
    if not x._layout.shape:
        return _alone(x, func, args, kwargs)
    (dim,) = dims_of(argument(args, kwargs, 2, "dim", -1), x._layout) or (0,)
    return along(x, (dim,), lambda part: func(part, *args[1:], **kwargs))


@rule("median", "nanmedian", "mode", "kthvalue")
def reduce_along(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """One value of each line along a dimension, which must be whole."""
    x = args[0]
    place, usual = _ALONG[name]
    given = argument(args, kwargs, place, "dim", usual)
    if given is None:
        layout = x._layout
        whole = layout.gathered(tuple(range(len(layout.shape))))
        return made(
            func(moved(x, whole)), without(whole, tuple(range(len(layout.shape))), False)[1]
        )
    if not x._layout.shape:  # of one value, along a dimension that torch lets it have
        return _alone(x, func, args, kwargs)
    (dim,) = dims_of(given, x._layout)
    there = x._layout.hosted((dim,))
    keepdim = argument(args, kwargs, place + 1, "keepdim", False)
    part = moved(x, there)
    try_values(lambda values: func(values, *args[1:], **kwargs), part, there)
    result = computed(lambda part: func(part, *args[1:], **kwargs), part)
    _, shared = without(there, (dim,), keepdim)
    return type(result)([made(each, shared) for each in result])


@rule("quantile", "nanquantile")
def quantile(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Quantiles of each line, which must be whole; several of them are a new first dimension."""
    x, q = args[0], argument(args, kwargs, 1, "q")
    dim, keepdim = argument(args, kwargs, 2, "dim"), argument(args, kwargs, 3, "keepdim", False)
    q = q.full() if isinstance(q, Tensor) else q
    settings = {key: kwargs[key] for key in ("interpolation",) if key in kwargs}
    func(x._part.new_empty([1] * x.dim()), q, dim, keepdim, **settings)  # torch's own errors
    if dim is None or not x.dim():
        found = func(x.flatten(), q, 0, **settings)
        return found.reshape([*found.shape, *[1] * x.dim()]) if keepdim else found
    (dim,) = dims_of(dim, x._layout) or (0,)
    there = x._layout.hosted((dim,))
    _, target = without(there, (dim,), keepdim)
    if isinstance(q, torch.Tensor) and q.dim():
        first = Cut.whole(len(q))
        target = replace(target, shape=(len(q), *target.shape), cuts=(first, *target.cuts))
    part = moved(x, there)
    if settings.get("interpolation", "linear") != "linear" and isinstance(q, torch.Tensor):
        q = q.detach()  # the result does not depend on it, even without rows
    # each worker uses q for its own rows: its gradient is a sum over workers
    q = used(q, there) if isinstance(q, torch.Tensor) else q
    if 0 in part.shape and 0 not in there.shape:  # torch rejects it
        levels = q if isinstance(q, torch.Tensor) else None
        return made(anchored_zeros(target.local_shape, part, levels), target)
    return made(func(part, q, dim, keepdim, **settings), target)


@rule("histc")
def histc(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The sum of the counts of all parts."""
    x, layout = args[0], args[0]._layout
    given = {"bins": 100, "min": 0, "max": 0} | dict(
        zip(("bins", "min", "max"), args[1:], strict=False)
    )
    given |= kwargs
    if given["min"] == given["max"] and x.numel():
        given |= {"min": float(x.min()), "max": float(x.max())}
    return _counted(func(x._part.detach(), **given), layout)


@rule("bincount")
def bincount(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The sum of the counts of all parts, up to the largest number."""
    x, layout = args[0], args[0]._layout
    outline = x._part.new_empty(0)
    weights, least = argument(args, kwargs, 1, "weights"), argument(args, kwargs, 2, "minlength", 0)
    func(outline, minlength=least)  # torch's own errors
    if x.numel() and int(x.min()) < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    count = max(least, int(x.max()) + 1 if x.numel() else 0)
    if weights is not None and tuple(weights.shape) != tuple(x.shape):
        raise RuntimeError("weights should be 1-d and have the same length as input")
    if weights is None:
        return _counted(func(x._part, None, count), layout)
    factors = fitted(weights, layout).detach()
    # for empty tensors torch returns integers, whatever the weights are
    kind = func(outline.new_zeros(1), factors.new_zeros(1)).dtype
    return _counted(func(x._part, factors, count).to(kind), layout)


def _counted(own: torch.Tensor, layout: Layout) -> Tensor:
    """The sum of the counts of all workers."""
    axes = {axis for cut in layout.cuts for axis in cut.axes if len(cut.intervals) > 1}
    shared = tuple(axis for axis in range(layout.partition.dim) if axis not in axes)
    shape = tuple(own.shape)
    separate = Layout(layout.partition, shape, tuple(Cut.whole(n) for n in shape), shared)
    return made(move(separate, separate.summed).apply(own), separate.summed)
