"""Functions that are compositions of others: each step has a rule of its own."""

from __future__ import annotations

from functools import reduce
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tessel.core.shared import anchored_zeros
from tessel.tensor.rules.batched import holds_anywhere, whole_of
from tessel.tensor.rules.pointwise import pointwise
from tessel.tensor.rules.reductions import argument, dims_of
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_autocast,
    as_spread,
    held_layouts,
    made,
    moved,
    named,
    outlines,
    rule,
    unsupported,
)
from tessel.tensor.windowed import tuple_of

_ALIASES: dict[str, Any] = {
    "special_softmax": torch.softmax,
    "special_log_softmax": torch.log_softmax,
    "special_logsumexp": torch.logsumexp,
    "linalg_matmul": torch.matmul,
    "chain_matmul": lambda *matrices: torch.linalg.multi_dot(matrices),
    "inverse": torch.linalg.inv,
    "det": torch.linalg.det,
    "slogdet": torch.linalg.slogdet,
    "matrix_power": torch.linalg.matrix_power,
}


@rule(*_ALIASES, plain=True)
def alias(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A function with two names in torch."""
    return _ALIASES[name](*args, **kwargs)


@rule("linalg_diagonal")
def matrix_diagonal(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`diagonal`, by default of the last two dimensions."""
    return torch.diagonal(args[0], **{"offset": 0, "dim1": -2, "dim2": -1} | kwargs)


@rule("diagflat")
def diagflat(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    return args[0].flatten().diag(argument(args, kwargs, 1, "offset", 0))


@rule("linalg_multi_dot", plain=True)
def multi_dot(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Matrix products from left to right."""
    given = list(args[0])
    ndims = [each.dim() for each in given]
    if len(given) < 2 or {*ndims[1:-1]} - {2} or {ndims[0], ndims[-1]} - {1, 2}:
        raise RuntimeError(
            f"multi_dot(): expected at least two matrices, of which the first and the last may be "
            f"vectors, got tensors of {ndims} dimensions"
        )
    return reduce(torch.matmul, given)


@rule("linalg_matrix_power")
def matrix_power(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Powers by repeated squares, one for each binary digit of the exponent."""
    x, power = args[0], argument(args, kwargs, 1, "n")
    if power < 0:
        x, power = torch.linalg.inv(x), -power
    outlines(func, (x, power), {})  # torch's own error
    if power == 1:
        return x.clone()
    # x⁰ as a sum with x, so that it has the layout of x
    found = x - x + torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) if not power else None
    while power:
        if power % 2:
            found = x if found is None else found @ x
        x, power = x @ x if power > 1 else x, power // 2
    return found


@rule("linalg_vecdot", plain=True)
def vecdot(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Σ conj(x) y along a dimension."""
    x, y = as_autocast(args[0]), as_autocast(argument(args, kwargs, 1, "y"))
    outlines(func, (x, y), kwargs)  # torch's own error
    with torch.autocast(x.device.type, enabled=False):  # operands are cast already
        return (x.conj() * y if x.is_complex() else x * y).sum(kwargs.get("dim", -1))


@rule("linalg_cross", "cross", plain=True)
def cross(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """z_i = x_{i+1} y_{i+2} - x_{i+2} y_{i+1}, with indices modulo 3."""
    x, y = args[0], argument(args, kwargs, 1, "other")
    usual = -1 if name == "linalg_cross" else None
    dim = argument(args, kwargs, 2, "dim", usual)
    outlines(func, (x, y), {"dim": dim})  # torch's own error
    if dim is None:  # the first dimension of length three
        dim = list(x.shape).index(3)
    dim = dim if dim < 0 else dim - x.dim()  # from the end: the operands may be broadcast
    return x.roll(-1, dim) * y.roll(-2, dim) - x.roll(-2, dim) * y.roll(-1, dim)


@rule("kron", plain=True)
def kron(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Each element of the first tensor times the second tensor."""
    x, y = args[0], argument(args, kwargs, 1, "other")
    ndim = max(x.dim(), y.dim())
    rows = [(1,) * (ndim - each.dim()) + tuple(each.shape) for each in (x, y)]
    shape = [n * m for n, m in zip(*rows, strict=True)]
    left = x.reshape(list(chain(*((n, 1) for n in rows[0]))))
    right = y.reshape(list(chain(*((1, n) for n in rows[1]))))
    return (left * right).reshape(shape)


@rule("vander")
def vander(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The powers of each value, in a row."""
    x, n = args[0], argument(args, kwargs, 1, "N")
    is_increasing = argument(args, kwargs, 2, "increasing", False)
    outlines(func, args, kwargs)  # torch's own error
    n = x.shape[0] if n is None else n
    x = x if x.is_floating_point() or x.is_complex() else x.long()
    ones = torch.ones_like(x[:, None])
    rows = torch.cat([ones, x[:, None].expand(-1, n - 1)], 1).cumprod(1) if n > 1 else ones[:, :n]
    return rows if is_increasing else rows.flip(1)


@rule("pdist")
def pdist(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The distances of all pairs of rows, once."""
    x, p = args[0], argument(args, kwargs, 1, "p", 2.0)
    outlines(func, args, kwargs)  # torch's own error
    if x.shape[0] < 2:
        return x.sum(1)[:0]
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    # a product of matrices, which torch's pdist does not use either, rounds short distances off
    return torch.cdist(x, x, p, "donot_use_mm_for_euclid_dist")[first, second]


@rule("linalg_norm")
def any_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The norm of vectors, of matrices, or of all values."""
    x, order = args[0], argument(args, kwargs, 1, "ord")
    dim, keepdim = argument(args, kwargs, 2, "dim"), argument(args, kwargs, 3, "keepdim", False)
    kind = {"dtype": kwargs.get("dtype")}
    outlines(func, args, kwargs)  # torch's own error
    if order is None or (dim is None and x.dim() == 1) or isinstance(dim, int):
        order = 2 if order is None else order
        return torch.linalg.vector_norm(x, order, dim, keepdim, **kind)
    dims = tuple(dim) if dim is not None else (-2, -1)
    if len(dims) == 1:
        return torch.linalg.vector_norm(x, order, dims, keepdim, **kind)
    return torch.linalg.matrix_norm(x, order, dims, keepdim, **kind)


@rule("linalg_matrix_norm")
def matrix_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Norms without singular values: Frobenius, and extreme sums of rows or columns."""
    x, order = args[0], argument(args, kwargs, 1, "ord", "fro")
    dims = argument(args, kwargs, 2, "dim", (-2, -1))
    keepdim, dtype = argument(args, kwargs, 3, "keepdim", False), kwargs.get("dtype")
    outlines(func, args, kwargs)  # torch's own error
    if order == "fro":
        return torch.linalg.vector_norm(x, 2, dims, keepdim, dtype=dtype)
    if order not in (1, -1, float("inf"), -float("inf")):
        raise unsupported(name, f"a norm of kind {order!r} needs singular values", x._layout)
    rows, columns = (dim % x.dim() for dim in dims)
    summed, other = (rows, columns) if abs(order) == 1 else (columns, rows)
    sums = (x if dtype is None else x.to(dtype)).abs().sum(summed, True)
    found = sums.amax(other, True) if order > 0 else sums.amin(other, True)
    return found if keepdim else found.squeeze((rows, columns))


@rule("sum_to_size")
def sum_to_size(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The adjoint of `expand`."""
    x = args[0]
    shape = tuple(outlines(func, args, kwargs).shape)
    first = x.dim() - len(shape)
    dims = [d for d, n in enumerate(x.shape) if d < first or (n != 1 and shape[d - first] == 1)]
    if not shape:  # which torch sums, also where there is one value
        return x.sum()
    return x.sum(dims, True).reshape(shape) if dims else x.reshape(shape)


@rule("renorm")
def renorm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Scale down slices along a dimension whose norm is too large."""
    given = dict(zip(("p", "dim", "maxnorm"), args[1:], strict=False)) | kwargs
    x, most = args[0], given["maxnorm"]
    outlines(func, args, kwargs)  # torch's own error
    (dim,) = dims_of(given["dim"], x._layout)
    others = [d for d in range(x.dim()) if d != dim]
    norms = torch.linalg.vector_norm(x, given["p"], others, keepdim=True)
    return x * torch.where(norms > most, most / (norms + 1e-7), 1.0)  # torch's own constant


@rule("cov")
def cov(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Products of rows minus their means."""
    x = args[0]
    given = dict(zip(("correction", "fweights", "aweights"), args[1:], strict=False)) | kwargs
    if given.get("fweights") is not None or given.get("aweights") is not None:
        raise unsupported(name, "weights are not supported", x._layout)
    func(x._part.new_empty([1] * x.dim()))  # torch's own errors
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    offsets = rows - rows.mean(1, True)
    conjugate = offsets.conj() if x.is_complex() else offsets
    found = offsets @ conjugate.mT / max(0, rows.shape[1] - given.get("correction", 1))
    return found if rows.shape[0] != 1 else found.reshape(())  # a single variance, as in torch


@rule("corrcoef")
def corrcoef(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Covariances divided by standard deviations."""
    x = args[0]
    if x.is_complex():
        raise unsupported(name, "complex numbers are not supported", x._layout)
    covariances = torch.cov(x)
    if not covariances.dim():
        return covariances / covariances
    deviations = covariances.diagonal().sqrt()
    return (covariances / deviations[:, None] / deviations).clip(-1, 1)


@rule("block_diag", plain=True)
def block_diag(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Matrices below each other, each padded to the total width."""
    given = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    outlines(func, tuple(given), {})  # torch's own error
    matrices = [torch.atleast_2d(each) for each in given]
    width, before, rows = sum(each.shape[1] for each in matrices), 0, []
    for each in matrices:
        rows.append(F.pad(each, (before, width - before - each.shape[1])))
        before += each.shape[1]
    return torch.cat(rows)


@rule("cartesian_prod", plain=True)
def cartesian_prod(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """All pairs, triples, … of values."""
    given = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    if len(given) == 1:
        return given[0]
    return torch.stack([each.flatten() for each in torch.meshgrid(*given, indexing="ij")], 1)


@rule("select_scatter", "slice_scatter", plain=True)
def scatter_slice(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A copy with other values at an index, or a slice, of a dimension."""
    names = ("src", "dim", "index") if name.startswith("select") else _SLICE
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    outlines(func, args, kwargs)  # torch's own error
    x = args[0].clone()
    dim = given.get("dim", 0) % x.dim()
    key: Any = given.get("index")
    if name == "slice_scatter":
        key = slice(given.get("start"), given.get("end"), given.get("step", 1))
    if not held_layouts(x):
        x = x + 0 * given["src"].sum()  # to make it spread, too
    x[(*[slice(None)] * dim, key)] = given["src"]
    return x


_SLICE = ("src", "dim", "start", "end", "step")


@rule("local_response_norm")
def local_response_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Values divided by those of neighbouring channels: x / (k + α mean x²)^β."""
    given = dict(zip(("size", "alpha", "beta", "k"), args[1:], strict=False)) | kwargs
    x, size = args[0], given["size"]
    outlines(func, args, kwargs)  # torch's own error
    if not x.numel():
        return x
    around = (*[0, 0] * (x.dim() - 2), size // 2, (size - 1) // 2)
    squares = F.pad(x.square(), around).unfold(1, size, 1).mean(-1)
    base = squares * given.get("alpha", 1e-4) + given.get("k", 1.0)
    return x / base.pow(given.get("beta", 0.75))


@rule("isin", plain=True)
def isin(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Whether each element is one of the test elements, which all workers have."""
    elements = argument(args, kwargs, 0, "elements")
    values = whole_of(argument(args, kwargs, 1, "test_elements"))
    rest = {key: value for key, value in kwargs.items() if "elements" not in key}
    if not held_layouts(elements):
        raise unsupported(name, "elements must be spread", *held_layouts(args, kwargs))
    return pointwise(name, lambda x: func(x, values, **rest), (elements,), {})


@rule("conv_tbc")
def convolve_times_first(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A convolution of (times, batch, channels)."""
    given = named(args, kwargs, weight=None, bias=None, pad=0)
    outlines(func, args, kwargs)  # torch's own error
    x, weight = args[0].permute(1, 2, 0), given["weight"].permute(2, 1, 0)
    return F.conv1d(x, weight, given["bias"], padding=given["pad"]).permute(2, 0, 1)


@rule("lp_pool1d", "lp_pool2d", "lp_pool3d")
def power_average_pool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Norms of windows, by means of powers."""
    given = named(args, kwargs, norm_type=2.0, kernel_size=1, stride=None, ceil_mode=False)
    D, p = int(name[-2]), given["norm_type"]
    sizes = {key: given[key] for key in ("kernel_size", "stride", "ceil_mode")}
    if abs(p) == float("inf"):
        sign = 1 if p > 0 else -1
        return sign * getattr(F, f"max_pool{D}d")(sign * args[0].abs(), **sizes)
    mean = getattr(F, f"avg_pool{D}d")(args[0].pow(p), **sizes)
    count = prod(tuple_of(given["kernel_size"], D))
    return (mean.sign() * mean.abs().relu()).mul(count).pow(1.0 / p)


@rule("max_unpool1d", "max_unpool2d", "max_unpool3d")
def unpool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Put values at any positions of an image, which must be whole; batches may be split."""
    names = ["kernel_size", "stride", "padding", "output_size"]
    if func is not getattr(F, name):  # the C++ function, which F's calls for a plain input
        names = ["output_size", "stride", "padding"]
    given = named(args, kwargs, **dict.fromkeys(["indices", *names]))
    x, indices, D = args[0], given.pop("indices"), int(name[-2])
    layout = x._layout
    space = tuple(range(len(layout.shape) - D, len(layout.shape)))
    if tuple(indices.shape) != layout.shape:
        raise ValueError(
            f"`{name}`: expected indices of the shape of the input, {layout.shape}, got "
            f"{tuple(indices.shape)}"
        )
    there = layout.hosted(space)
    if given["output_size"] is None:  # the size of an image whose pool has the size of the input
        kernel, pads = tuple_of(given["kernel_size"], D), tuple_of(given["padding"] or 0, D)
        steps = kernel if given["stride"] is None else tuple_of(given["stride"], D)
        sizes = zip(layout.shape[-D:], steps, pads, kernel, strict=True)
        size = tuple((n - 1) * step - 2 * pad + length for n, step, pad, length in sizes)
    else:
        size = tuple(given["output_size"])[-D:]
    shape = (*layout.shape[:-D], *size)
    if holds_anywhere((indices < 0) | (indices >= prod(size))):
        raise ValueError(f"`{name}`: an index is out of bounds for an output of size {size}")
    places = moved(as_spread(indices, layout.partition), there)
    given = {key: each for key, each in given.items() if each is not None} | {"output_size": size}
    part, target = moved(x, there), there.reshaped_along(shape, space)
    y = func(part, places, **given) if part.numel() else anchored_zeros(target.local_shape, part)
    return made(y, target).move_to(layout.split_like(shape))
