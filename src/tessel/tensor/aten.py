"""Rules for torch's operators below autograd: those of the functions that they implement.

Code that bypasses torch's functions (transforms of `torch.func`, backward formulas in C++) calls
operators of `aten`. Some are the same as a function with a rule, with the same or equivalent
arguments. They are listed here, each overload by its name; all others have no rule. Nothing is
concluded from a name alone: a wrong number is worse than a gather.

Backward formulas of functions that mix values are the derivatives of the function's rule, on the
graph of the parts: the function is computed once more, and no derivative is written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch._C import DispatchKey, _EnableTorchFunction, _ForceDispatchKeyGuard

from tessel.tensor.aliases import note_view
from tessel.tensor.table import as_spread, held_layouts, spread_among, unsupported
from tessel.tensor.tensor import Tensor

AtenFunction = Callable[..., Any]
OPERATORS: dict[
    str, AtenFunction
] = {}  # equivalent functions that have rules, by the names of overloads


def same(*names: str, of: Any = torch) -> None:
    """Enter overloads with the arguments of the Python function of their name."""
    for name in names:
        OPERATORS[f"aten::{name}"] = getattr(of, name.partition(".")[0])


def operator(*names: str) -> Callable[[AtenFunction], AtenFunction]:
    """Enter a function that is equivalent to some overloads, with their arguments."""

    def enter(function: AtenFunction) -> AtenFunction:
        OPERATORS.update({f"aten::{name}": function for name in names})
        return function

    return enter


def _of_dims(name: str) -> list[str]:
    """The overloads for one, two and three dimensions of space."""
    return [name.format(n) for n in (1, 2, 3)]


same("sum", "sum.dim_IntList", "mean", "mean.dim", "prod", "prod.dim_int", "amax", "amin")
same("max", "max.dim", "min", "min.dim", "argmax", "argmin", "logsumexp", "cumsum", "cumprod")
same("any", "any.dim", "all", "all.dim", "var.correction", "std.correction", "trace")
same("var_mean.correction", "std_mean.correction", "sort", "topk", "nansum", "logcumsumexp")
same("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "addbmm", "addr", "vdot")
same("t", "transpose.int", "permute", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims")
same("cat", "stack", "select.int", "flip", "roll", "unbind.int", "tril", "triu", "diagonal")
same("split.Tensor", "split_with_sizes", "gather", "index_select", "index_add", "diag_embed")
same("scatter.src", "scatter.value", "scatter_add", "masked_select", "view_as_real")
same("view_as_complex", "slice_scatter", "select_scatter", "diff", "index_copy", "take")
same("repeat", "unfold", "reshape", "new_zeros", "new_ones", "new_full", of=torch.Tensor)
OPERATORS["aten::linalg_vector_norm"] = torch.linalg.vector_norm
OPERATORS["aten::_conj"] = torch.conj_physical  # a wrapper has no conjugate bit

operator("alias")(lambda x: x.view(x.shape))
operator("expand")(lambda x, size, *, implicit=False: x.expand(size))
operator("constant_pad_nd")(lambda x, widths, value=0: F.pad(x, widths, "constant", value))
operator(*_of_dims("reflection_pad{}d"))(lambda x, widths: F.pad(x, widths, "reflect"))
operator(*_of_dims("replication_pad{}d"))(lambda x, widths: F.pad(x, widths, "replicate"))
operator("_softmax")(lambda x, dim, widens: x.softmax(dim, torch.float32 if widens else None))
operator("_log_softmax")(
    lambda x, dim, widens: x.log_softmax(dim, torch.float32 if widens else None)
)
operator("embedding")(
    lambda weight, indices, padding=-1, by_count=False, sparse=False: F.embedding(
        indices,
        weight,
        padding if padding >= 0 else None,
        scale_grad_by_freq=by_count,
        sparse=sparse,
    )
)
operator("max_pool2d_with_indices")(
    lambda x, size, stride=(), *rest: F.max_pool2d_with_indices(x, size, stride or None, *rest)
)
operator("_adaptive_avg_pool2d")(lambda x, size: F.adaptive_avg_pool2d(x, size))
operator("_adaptive_avg_pool3d")(lambda x, size: F.adaptive_avg_pool3d(x, size))
operator("im2col")(lambda x, *settings: F.unfold(x, *settings))
operator("col2im")(lambda x, *settings: F.fold(x, *settings))
operator(*_of_dims("upsample_nearest{}d.vec"))(
    lambda x, size, scales: F.interpolate(x, size, scales, mode="nearest")
)
operator(*_of_dims("_upsample_nearest_exact{}d.vec"))(
    lambda x, size, scales: F.interpolate(x, size, scales, mode="nearest-exact")
)
for _mode in ("bilinear", "bicubic"):
    operator(f"_upsample_{_mode}2d_aa.vec")(
        lambda x, size, align, scales, mode=_mode: F.interpolate(
            x, size, scales, mode, align, antialias=True
        )
    )
operator("upsample_bicubic2d.vec")(
    lambda x, size, align, scales: F.interpolate(x, size, scales, "bicubic", align)
)

# Exported graphs call these as they are: attributes, and functions whose arguments Python has
# otherwise.
operator("mT")(lambda x: x.mT)
operator("mH")(lambda x: x.mH)
operator("numpy_T")(lambda x: x.T)
operator("matrix_H")(lambda x: x.H)
operator("sym_size.int")(lambda x, dim: x.shape[dim])
operator("sym_numel")(lambda x: x.numel())
operator("einsum")(lambda equation, tensors, *, path=None: torch.einsum(equation, *tensors))
operator("tensordot")(lambda x, y, dims, others: torch.tensordot(x, y, (dims, others)))
operator("nonzero_numpy")(lambda x: x.nonzero(as_tuple=True))
operator("stft.center")(torch.stft)
operator("affine_grid_generator")(lambda x, size, align: F.affine_grid(x, size, align))


@operator("stft")
def uncentered_stft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    *args: Any,
    **named: Any,
) -> Any:
    """As torch.stft calls it, after padding: without `center` and `pad_mode`."""
    names = ("normalized", "onesided", "return_complex", "align_to_window")
    settings = {**dict(zip(names, args, strict=False)), **named}
    return torch.stft(x, n_fft, hop_length, win_length, window, center=False, **settings)


# a list of tensors where the function of this name takes many
for _name in ("block_diag", "broadcast_tensors", "cartesian_prod", "chain_matmul"):
    operator(_name)(lambda tensors, name=_name: getattr(torch, name)(*tensors))


@operator("_assert_tensor_metadata")
def check_kind(
    x: Tensor, size: Any = None, stride: Any = None, dtype: torch.dtype | None = None, **more: Any
) -> None:
    """Raise for another shape or dtype than that of the tensor for which a graph was made."""
    if (dtype or x.dtype) != x.dtype:
        raise RuntimeError(f"Tensor dtype mismatch! Expected: {dtype}, Got: {x.dtype}")
    if size is not None and tuple(size) != tuple(x.shape):
        raise RuntimeError(f"Tensor sizes mismatch! Expected: {size}, Got: {[*x.shape]}")


# elementwise functions that torch does not tag as pointwise
ELEMENTWISE = frozenset(
    (
        *("elu_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward"),
        *("leaky_relu_backward", "mish_backward", "softplus_backward", "masked_fill", "hardswish"),
        *("leaky_relu", "hardsigmoid", "hardtanh", "elu", "celu", "softplus", "mish", "silu"),
        *("complex", "polar", "_prelu_kernel"),
    )
)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Compute values for code that called an operator; the graph, if any, is recorded elsewhere.

    Autocast was applied before the operator was called. A pass that was started with torch's
    functions switched off is no reason to gather. Transforms of `torch.func` switch off the keys
    that resolve conjugated or negated tensors, and parts may be such tensors.
    """
    with (
        _reached(DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor),
        _EnableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
    ):
        yield


@contextmanager
def recorded() -> Iterator[None]:
    """Switch autograd on again below an operator, to record the graph of parts."""
    with (
        _reached(
            DispatchKey.AutogradFunctionality,
            DispatchKey.AutogradOther,
            DispatchKey.AutogradNestedTensor,
            DispatchKey.ADInplaceOrView,
        ),
        torch.enable_grad(),
    ):
        yield


def _reached(*keys: DispatchKey) -> _ForceDispatchKeyGuard:
    """Let calls pass through dispatch keys that are switched off on the way to an operator."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in keys:
        excluded = excluded.remove(key)
    return _ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def of_values(value: Any) -> Any:
    """A tensor without its history, which is not the history of the result's part."""
    if not isinstance(value, Tensor):
        return value
    y = Tensor(value._part.detach(), value._layout, records=False)
    return note_view(y, value, detached=True)


def pulled_back(function: AtenFunction, grad: Any, *operands: Any) -> Any:
    """The gradients of operands, by the graph of a function's rule."""
    if isinstance(grad, Tensor) and not held_layouts(operands):  # no rule applies to plain operands
        operands = (as_spread(operands[0], grad._layout.partition), *operands[1:])
    parts = (each._part for each in spread_among(grad, *operands))
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, parts)):
        layouts = held_layouts(grad, *operands)
        raise unsupported(function.__name__, "parts belong to a transform of torch.func", *layouts)
    with torch._C._DisableFuncTorch(), recorded():  # transforms do not apply here
        leaves = [each.detach().requires_grad_() for each in operands]
        found = torch.autograd.grad(function(*leaves), leaves, grad)
    return tuple(each.detach() for each in found)


@operator("view", "_unsafe_view")
def view(x: Tensor, size: Sequence[int]) -> Any:
    """Reshape: wrappers are contiguous for torch, so any shape is a view; parts may need a copy."""
    return x.reshape(size)


@operator("slice.Tensor")
def slice_of(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    picks = [slice(None)] * x.dim()
    picks[dim] = slice(start, end, step)
    return x[tuple(picks)]


@operator("index.Tensor")
def index(x: Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    return x[tuple(slice(None) if each is None else each for each in indices)]


@operator("index_put")
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    if any(each is None for each in indices):  # torch.index_put does not support None
        if accumulate:
            why = "nothing is added without an index"
            raise unsupported("index_put", why, *held_layouts(x, indices, values))
        y = x.clone()
        y[tuple(slice(None) if each is None else each for each in indices)] = values
        return y
    return torch.index_put(x, tuple(indices), values, accumulate)


@operator("index_put_")
def index_put_in_place(
    x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    if not any(each is None for each in indices):
        return x.index_put_(tuple(indices), values, accumulate)
    if accumulate:
        why = "nothing is added without an index"
        raise unsupported("index_put_", why, *held_layouts(x, indices, values))
    x[tuple(slice(None) if each is None else each for each in indices)] = values
    return x


@operator("_to_copy")
def to_copy(x: Tensor, *, dtype: Any = None, device: Any = None, **others: Any) -> Any:
    """Convert; the other arguments concern memory, and a wrapper has none."""
    return x.to(device=device or x.device, dtype=dtype or x.dtype, copy=True)


@operator("copy")
def copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    return source.expand(x.shape).to(device=x.device, dtype=x.dtype, copy=True)


@operator("select_backward")
def select_backward(grad: Any, size: Sequence[int], dim: int, index: int) -> Any:
    return _within(grad.unsqueeze(dim), size, range(len(size))[dim], index % size[dim])


@operator("slice_backward")
def slice_backward(
    grad: Any, size: Sequence[int], dim: int, start: int, end: int, step: int
) -> Any:
    """Zeros where nothing was read: between the indices that were, before and after them."""
    dim = range(len(size))[dim]
    picked = range(size[dim])[start:end:step]
    if not picked:
        return grad.new_zeros(size)
    if step > 1:
        widths = [*[0, 0] * (len(size) - 1 - dim), 0, step - 1]
        apart = F.pad(grad.unsqueeze(dim + 1), widths).flatten(dim, dim + 1)
        grad = apart.narrow(dim, 0, picked[-1] - picked[0] + 1)
    return _within(grad, size, dim, picked[0])


def _within(grad: Any, size: Sequence[int], dim: int, start: int) -> Any:
    """A tensor with zeros before and after it along a dimension."""
    behind = size[dim] - start - grad.shape[dim]
    return F.pad(grad, [*[0, 0] * (len(size) - 1 - dim), start, behind])


@operator("_softmax_backward_data")
def softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Any:
    """gᵀ J = y (g - ⟨g, y⟩), from the result y of softmax."""
    product = grad * y
    return (product - y * product.sum(dim, keepdim=True)).to(dtype)


@operator("_log_softmax_backward_data")
def log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Any:
    return (grad - y.exp() * grad.sum(dim, keepdim=True)).to(dtype)


@operator("_cdist_forward")
def distances(x: Any, y: Any, p: float, mode: int | None) -> Any:
    modes = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist")
    return torch.cdist(x, y, p, (*modes, "donot_use_mm_for_euclid_dist")[mode or 0])


# the divisor of Fourier transforms: one, the root of the number of values, that number
_FORWARD = ("backward", "ortho", "forward")
_INVERSE = _FORWARD[::-1]


@operator("_fft_c2c")
def fourier(x: Any, dims: Sequence[int], norm: int, forward: bool) -> Any:
    if forward:
        return torch.fft.fftn(x, dim=tuple(dims), norm=_FORWARD[norm])
    return torch.fft.ifftn(x, dim=tuple(dims), norm=_INVERSE[norm])


@operator("_fft_r2c")
def fourier_of_reals(x: Any, dims: Sequence[int], norm: int, onesided: bool) -> Any:
    function = torch.fft.rfftn if onesided else torch.fft.fftn
    return function(x, dim=tuple(dims), norm=_FORWARD[norm])


@operator("_fft_c2r")
def fourier_to_reals(x: Any, dims: Sequence[int], norm: int, length: int) -> Any:
    lengths = [*(x.shape[dim] for dim in dims[:-1]), length]
    return torch.fft.irfftn(x, lengths, tuple(dims), _INVERSE[norm])


@operator("convolution")
def convolution(
    x: Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    num_dims = x.dim() - 2
    if transposed:
        function = getattr(F, f"conv_transpose{num_dims}d")
        return function(x, weight, bias, stride, padding, output_padding, groups, dilation)
    function = getattr(F, f"conv{num_dims}d")
    return function(x, weight, bias, stride, padding, dilation, groups)


@operator("convolution_backward")
def convolution_backward(
    grad: Tensor,
    x: Any,
    weight: Any,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Any:
    def convolved(*chosen: Any) -> Any:
        found = iter(chosen)
        x_or, weight_or = (next(found) if m else v for m, v in zip(mask, (x, weight), strict=False))
        return convolution(
            x_or, weight_or, None, stride, padding, dilation, transposed, output_padding, groups
        )

    operands = [each for each, m in zip((x, weight), mask, strict=False) if m]
    grads = iter(pulled_back(convolved, grad, *operands) if operands else ())
    bias = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
    return next(grads) if mask[0] else None, next(grads) if mask[1] else None, bias


@operator("native_layer_norm")
def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, Any, Any]:
    """The norm with means and reciprocals of deviations, as torch returns them."""
    _check_long(x, weight)
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    deviation = (variance + eps).rsqrt()
    y = (x - mean) * deviation
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, deviation


@operator("native_layer_norm_backward")
def layer_norm_backward(
    grad: Tensor,
    x: Any,
    shape: Sequence[int],
    mean: Any,
    deviation: Any,
    weight: Any,
    bias: Any,
    mask: Sequence[bool],
) -> Any:
    """The gradients by the given means and deviations, whose eps is not among the arguments."""
    _check_long(x, weight)
    rows, dims = tuple(range(x.dim() - len(shape))), tuple(range(x.dim() - len(shape), x.dim()))
    y = (x - mean) * deviation
    of_x = None
    if mask[0]:
        g = grad if weight is None else grad * weight
        across = g.mean(dims, keepdim=True) + y * (g * y).mean(dims, keepdim=True)
        of_x = (g - across) * deviation
    of_weight = (grad * y).sum(rows) if rows and mask[1] else grad * y if mask[1] else None
    of_bias = grad.sum(rows) if rows and mask[2] else grad if mask[2] else None
    return of_x, of_weight, of_bias


@operator("native_group_norm")
def group_norm(
    x: Tensor,
    weight: Any,
    bias: Any,
    samples: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Any, Any, Any]:
    """The norm with means and reciprocals of deviations of groups, as torch returns them."""
    _check_long(x, weight)
    grouped = x.unflatten(1, (groups, channels // groups))
    dims = tuple(range(2, grouped.dim()))
    variance, mean = torch.var_mean(grouped, dims, correction=0, keepdim=True)
    deviation = (variance + eps).rsqrt()
    y = _scaled(((grouped - mean) * deviation).flatten(1, 2), weight, bias)
    return y, mean.reshape(samples, groups), deviation.reshape(samples, groups)


@operator("_native_batch_norm_legit_no_training")
def batch_norm_in_evaluation(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """The norm with statistics, as torch returns them, which are empty here."""
    y = F.batch_norm(x, mean, variance, weight, bias, False, momentum, eps)
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return y, empty, empty.clone()


@operator("_native_batch_norm_legit.no_stats")
def batch_norm(
    x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """The norm by the statistics of the batch, which are also returned."""
    variance, mean = _moments_of_channels(x, weight)
    deviation = (variance + eps).rsqrt()
    return _scaled((x - mean) * deviation, weight, bias), mean.flatten(), deviation.flatten()


@operator("_native_batch_norm_legit_functional")
def batch_norm_with_averages(
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """The same with averages over batches, which are returned as well."""
    if not training:
        raise unsupported("batch_norm", "not in evaluation by this operator", *held_layouts(x))
    found = _moments_of_channels(x, weight)
    deviation = (found[0] + eps).rsqrt()
    y = _scaled((x - found[1]) * deviation, weight, bias)
    count = x.numel() // max(1, x.shape[1])
    unbiased = found[0].flatten() * (count / max(1, count - 1))
    averages = (
        ((1 - momentum) * old + momentum * new.detach())
        for old, new in ((mean, found[1].flatten()), (variance, unbiased))
    )
    return y, found[1].flatten(), deviation.flatten(), *averages


def _moments_of_channels(x: Tensor, weight: Any) -> tuple[Any, Any]:
    """The variance and the mean of each channel."""
    _check_long(x, weight)
    dims = tuple(dim for dim in range(x.dim()) if dim != 1)
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return variance, mean


def _scaled(y: Any, weight: Any, bias: Any) -> Any:
    """Channels times a weight, plus a bias."""
    shape = (-1, *[1] * (y.dim() - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _check_long(*values: Any) -> None:
    """Raise for half precision, for which torch returns some results in float32."""
    for each in values:
        if each is not None and each.dtype not in (torch.float32, torch.float64):
            raise unsupported("norm", "not with such numbers", *held_layouts(values))


@operator("max_pool2d_with_indices_backward")
def max_pool2d_backward(
    grad: Any, x: Any, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: Any
) -> Any:
    def pooled(x: Any) -> Any:
        return F.max_pool2d(x, size, stride or None, padding, dilation, ceil)

    return pulled_back(pooled, grad, x)[0]


@operator("avg_pool2d")
def avg_pool2d(x: Any, size: Any, stride: Any = (), *rest: Any) -> Any:
    return F.avg_pool2d(x, size, stride or None, *rest)


@operator("avg_pool2d_backward")
def avg_pool2d_backward(grad: Any, x: Any, *settings: Any) -> Any:
    return pulled_back(lambda x: avg_pool2d(x, *settings), grad, x)[0]


@operator("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad: Any, x: Any) -> Any:
    return pulled_back(lambda x: F.adaptive_avg_pool2d(x, grad.shape[-2:]), grad, x)[0]


@operator("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def sampled(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    return F.grid_sample(x, grid, modes[mode], paddings[padding], align_corners)


_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@operator(*(f"upsample_{mode}{n}d.vec" for n, mode in _LINEAR.items()))
def upsample_linearly(x: Any, size: Any, align_corners: bool, scales: Any) -> Any:
    return F.interpolate(x, size, scales, _LINEAR[x.dim() - 2], align_corners)


@operator(*_of_dims("upsample_nearest{}d"))
def upsample_to(x: Any, size: Any, *scales: Any) -> Any:
    _check_by_size(x, scales)
    return F.interpolate(x, size, mode="nearest")


@operator(*(f"upsample_{mode}{n}d" for n, mode in _LINEAR.items()))
def upsample_linearly_to(x: Any, size: Any, align_corners: bool, *scales: Any) -> Any:
    _check_by_size(x, scales)
    return F.interpolate(x, size, mode=_LINEAR[x.dim() - 2], align_corners=align_corners)


def _check_by_size(x: Any, scales: Sequence[Any]) -> None:
    """Raise for scales beside sizes: they need not agree, and change which inputs are read."""
    if any(each is not None for each in scales):
        raise unsupported("interpolate", "not with sizes and scales at once", *held_layouts(x))


@operator("embedding_dense_backward")
def embedding_backward(grad: Any, indices: Any, length: int, padding: int, by_count: bool) -> Any:
    def embedded(weight: Any) -> Any:
        return F.embedding(indices, weight, padding if padding >= 0 else None)

    if by_count:
        raise unsupported("embedding_dense_backward", "not by counts", *held_layouts(grad, indices))
    table = torch.zeros(length, grad.shape[-1], dtype=grad.dtype, device=grad.device)
    return pulled_back(embedded, grad, table)[0]


_REDUCTIONS = ("none", "mean", "sum")  # by torch's numbers


@operator("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(x: Any, target: Any, weight: Any, reduction: int, ignored: int) -> Any:
    """The loss with the sum of the weights of all targets, the divisor of a mean."""
    y = _nll(x, target, weight, reduction, ignored)
    if reduction == 0:
        return y, x.new_zeros(())
    counts = target != ignored
    if weight is None:
        return y, counts.sum().to(x.dtype)
    return y, (F.embedding(target * counts, weight[:, None])[..., 0] * counts).sum()


def _nll(x: Any, target: Any, weight: Any, reduction: int, ignored: int) -> Any:
    return F.nll_loss(x, target, weight, ignore_index=ignored, reduction=_REDUCTIONS[reduction])


@operator("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> Any:
    return pulled_back(lambda x: _nll(x, target, weight, reduction, ignored), grad, x)[0]


def loss_of_elements(name: str, *settings: str) -> None:
    """Enter an elementwise loss and its backward formula, with the names of its settings."""
    own = getattr(F, name)

    def loss(x: Any, target: Any, reduction: int = 1, *given: Any, **named: Any) -> Any:
        named |= dict(zip(settings, given, strict=False))
        return own(x, target, reduction=_REDUCTIONS[reduction], **named)

    def pulled(grad: Any, x: Any, target: Any, *given: Any) -> Any:
        return pulled_back(lambda x: loss(x, target, *given), grad, x)[0]

    operator(name)(loss)
    operator(f"{name}_backward")(pulled)


loss_of_elements("mse_loss")
loss_of_elements("huber_loss", "delta")
loss_of_elements("smooth_l1_loss", "beta")


def loss_with_settings(function: AtenFunction, name: str, overload: str = "default") -> None:
    """Enter a loss whose reduction is a number, the mean by default.

    Torch's own bindings of these operators have no reduction by default.
    """
    found = getattr(getattr(torch.ops.aten, name), overload)
    names = [each.name for each in found._schema.arguments]

    def loss(*args: Any, **named: Any) -> Any:
        given = {"reduction": 1, **dict(zip(names, args, strict=False)), **named}
        given["reduction"] = _REDUCTIONS[given["reduction"]]
        if "self" in given:
            given["input"] = given.pop("self")
        return function(**given)

    operator(found.name().partition("::")[2])(loss)


for _name in (
    *("l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    *("poisson_nll_loss", "soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss"),
    *("cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("multilabel_margin_loss", "nll_loss"),
):
    loss_with_settings(getattr(F, _name), _name)
for _name in ("nll_loss2d", "nll_loss_nd"):
    loss_with_settings(F.nll_loss, _name)
loss_with_settings(F.cross_entropy, "cross_entropy_loss")
for _overload in ("IntList", "Tensor"):
    loss_with_settings(F.ctc_loss, "ctc_loss", _overload)
