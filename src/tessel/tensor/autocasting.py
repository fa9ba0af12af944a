"""Autocast: operands of functions that torch computes in float32, or in the widest dtype.

They are cast as torch casts them, before a rule moves or combines anything, and autocast is off
while it does. Otherwise torch would cast parts only where a worker has values; and a rule consists
of other functions, which are cast in other ways.

Functions that torch computes in a shorter dtype, such as products, are cast by their rules
(`table.as_autocast`). For those that it leaves as they are, autocast is off as well, since their
rules may consist of functions that it would cast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch._ops import OpOverloadPacket

from tessel.tensor.table import Arguments, Settings, mapped, named, tensors

# operators that autocast computes in its own dtype
_SHORTER = frozenset(
    (
        *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
        *(f"conv{dim}d" for dim in (1, 2, 3)),
        *(f"conv_transpose{dim}d" for dim in (1, 2, 3)),
        *("conv_tbc", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "matmul"),
        *("linear", "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "einsum", "prelu"),
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention"),
        *("_addmm_activation", "_native_multi_head_attention", "mkldnn_rnn_layer"),
        *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell"),
        *("rnn_relu_cell", "rnn_tanh_cell"),
    )
)
# operators that it computes in the widest dtype of their operands, by type of device; all others in
# float32
_WIDEST = {
    "cpu": frozenset(("bilinear", "cat", "index_copy", "stack")),
    "cuda": frozenset(
        (
            *("addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "grid_sampler"),
            *("index_copy", "index_put", "scatter_add", "stack", "tensordot", "vdot"),
        )
    ),
}
# operators that it leaves as they are on a device if the caller names a dtype
_OF_GIVEN_DTYPE = {
    "cuda": frozenset(
        (
            *("cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax"),
            *("norm", "prod", "softmax", "sum"),
        )
    )
}
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}  # keys of torch's dispatcher

# functions whose operators have other names
_OPERATORS: dict[str, str | Callable[..., str]] = {
    "grid_sample": "grid_sampler",
    "softmin": "softmax",
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
    "special_logsumexp": "logsumexp",
    "matrix_exp": "linalg_matrix_exp",
    "cross_entropy": "nll_loss",
    "linalg_norm": "linalg_vector_norm",
    "vector_norm": "linalg_vector_norm",
    "max_unpool1d": "max_unpool2d",
    "adaptive_max_pool3d_with_indices": "adaptive_max_pool3d",
    **{f"fractional_max_pool{dim}d_with_indices": f"fractional_max_pool{dim}d" for dim in (2, 3)},
    # they call other operators if they have weights: their rule determines the dtype
    **dict.fromkeys(("l1_loss", "mse_loss"), ""),
    **{f"fft_{name}": "fft_fftn" for name in ("hfft2", "hfftn", "ihfft2", "ihfftn")},
}
# functions whose kernels call operators that autocast casts, by type of device
_WITHIN = {
    "cuda": {
        "local_response_norm": "pow",
        **dict.fromkeys(("matrix_exp", "linalg_matrix_exp", "trace"), "sum"),
    }
}


def _of_arguments(function: Callable[..., str]) -> Callable[..., str]:
    """Enter a function that finds the operator of torch's function of its name by arguments."""
    _OPERATORS[function.__name__] = function
    return function


@_of_arguments
def pad(args: Arguments, kwargs: Settings) -> str:
    given = named(args, kwargs, pad=(), mode="constant", value=None)
    kinds = {"reflect": "reflection", "replicate": "replication"}
    return f"{kinds.get(given['mode'], given['mode'])}_pad{len(given['pad']) // 2}d"


@_of_arguments
def interpolate(args: Arguments, kwargs: Settings) -> str:
    given = named(args, kwargs, size=None, scale_factor=None, mode="nearest")
    if given["mode"] == "area":
        return f"adaptive_avg_pool{args[0].dim() - 2}d"
    of_one = {"nearest": "upsample_nearest1d", "nearest-exact": "_upsample_nearest_exact1d"}
    return of_one.get(given["mode"], "upsample_linear1d")  # others are cast as these


_OPERATORS["upsample"] = interpolate


@_of_arguments
def local_response_norm(args: Arguments, kwargs: Settings) -> str:
    return f"avg_pool{2 if args[0].dim() < 4 else 3}d"


@cache
def _touched(device: str) -> frozenset[str]:
    """The operators whose operands autocast casts in some way, on a type of device."""
    key = _KEYS.get(device)
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key) if key else ()
    return frozenset(each.removeprefix("aten::").partition(".")[0] for each in found)


@cache
def _known(device: str) -> frozenset[str]:
    """The operators that autocast casts to float32, or to the widest dtype, on a type of device."""
    # torch multiplies the operands of bilinear elementwise, which autocast does not touch
    return _touched(device) - _SHORTER | {"bilinear"}


def is_shortened(name: str, device: str) -> bool:
    """Whether autocast computes an operator in its own, shorter dtype, on a type of device."""
    return name in _SHORTER and name in _touched(device)


@cache
def may_matter(name: str) -> bool:
    """Whether operands of a function may be cast before its rule, or autocast be off in it."""
    return (
        name in _OPERATORS
        or _is_one_kernel(name)
        or any(name in _known(device) for device in _KEYS)
    )


@cache
def _is_one_kernel(operator: str) -> bool:
    """Whether torch has an operator of this name that does not consist of others."""
    packet = getattr(torch.ops.aten, operator, None)  # or a method that all objects have
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else []
    # those with names of dimensions always consist of others
    return bool(overloads) and not any(
        _consists_of_others(f"aten::{operator}.{each}".removesuffix(".default"))
        for each in overloads
        if "names" not in each
    )


def _consists_of_others(overload: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd")
    except RuntimeError:  # only TorchScript has it
        return False


def device_of(args: Arguments, kwargs: Settings) -> str:
    """The type of device of a call's operands if autocast is on for it, else ""."""
    if not torch._C._is_any_autocast_enabled():
        return ""
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    device = (next(tensors(args, kwargs)) if first is None else first).device.type
    return device if torch.is_autocast_enabled(device) else ""


def is_cast(name: str, device: str, args: Arguments, kwargs: Settings) -> bool:
    """Whether autocast casts the operands of a call to float32, or to the widest dtype."""
    operator = _operator(name, device, args, kwargs)
    if kwargs.get("dtype") is not None and operator in _OF_GIVEN_DTYPE.get(device, ()):
        return False
    return operator in _known(device) and kwargs.get("out") is None


def is_left_alone(name: str, device: str, args: Arguments, kwargs: Settings) -> bool:
    """Whether autocast touches neither a function's operands nor anything that it consists of."""
    operator = _operator(name, device, args, kwargs)
    return operator not in _touched(device) and _is_one_kernel(operator)


def _operator(name: str, device: str, args: Arguments, kwargs: Settings) -> str:
    found = _WITHIN.get(device, {}).get(name) or _OPERATORS.get(name, name)
    return found if isinstance(found, str) else found(args, kwargs)


def cast(name: str, device: str, args: Arguments, kwargs: Settings) -> tuple[Arguments, Settings]:
    """The arguments of a call as torch would cast them; float64 stays."""
    dtype = torch.float32
    if _operator(name, device, args, kwargs) in _WIDEST.get(device, ()):
        dtypes = [each.dtype for each in tensors(args, kwargs) if _is_castable(each, device)]
        dtype = reduce(torch.promote_types, dtypes) if dtypes else dtype

    def as_torch(value: Any) -> Any:
        return value.to(dtype) if _is_castable(value, device) else value

    return mapped(as_torch, args), mapped(as_torch, kwargs)


def _is_castable(value: Any, device: str) -> bool:
    is_there = isinstance(value, torch.Tensor) and value.device.type == device
    return is_there and value.dtype in (torch.float16, torch.bfloat16, torch.float32)
