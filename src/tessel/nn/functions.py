"""Layers that are called as functions: what they do with spread tensors.

The layers over partitions know how to compute with parts. A call of `torch.nn.functional` is such a
layer, whose parameters are its arguments.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tessel.layout import Layout
from tessel.nn.adaptive import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
)
from tessel.nn.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from tessel.nn.convolution import DistributedConv1d, DistributedConv2d, DistributedConv3d
from tessel.nn.layer import Layer, spread_result
from tessel.nn.norm import (
    DistributedBatchNorm,
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from tessel.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from tessel.nn.upsample import DistributedUpsample
from tessel.nn.windowed import tuple_of
from tessel.partition import Partition
from tessel.shared import nothing
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.rules.batched import holds_anywhere
from tessel.tensor.rules.hosting import along, hosted, reshaped_along, split_like
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_spread,
    gathered,
    held_layouts,
    is_split,
    is_whole,
    made,
    moved,
    opened,
    outlines,
    parts,
    rule,
)
from tessel.tensor.use import used
from tessel.transport import kept_in_job


def _named(args: Arguments, kwargs: Settings, **defaults: Any) -> Settings:
    """The arguments behind the input by their names, in the order and with the defaults given."""
    return {**defaults, **dict(zip(defaults, args[1:], strict=False)), **kwargs}


def _computed(kind: type[Layer], name: str, x: Any, **attributes: Any) -> Any:
    """What a layer with these attributes computes of a spread tensor.

    Weights and statistics are whole on all workers, and no parameters of the layer: nothing is
    registered, and nothing has to be made equal.
    """
    part, layout = opened(x)
    layer: Any = object.__new__(kind)
    layer.__dict__.update(_blank(kind, layout.partition))
    layer.__dict__.update({key: _whole(each) for key, each in attributes.items()})
    return spread_result(*layer.compute(part, layout))


def _whole(value: Any) -> Any:
    """A weight that every worker has, and one that is spread, gathered: layers use all of it."""
    if isinstance(value, SpreadTensor):
        return parts(value) if is_whole(value._layout) else value.full()
    return value


@kept_in_job
def _blank(kind: type[Layer], partition: Partition) -> dict[str, Any]:
    """A layer on a partition, without parameters: what `torch.nn.Module` gives every module."""
    layer: Any = object.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.place_on(partition)
    return dict(layer.__dict__)


_CONVOLUTIONS: dict[str, type[Layer]] = {
    "conv1d": DistributedConv1d,
    "conv2d": DistributedConv2d,
    "conv3d": DistributedConv3d,
}


@rule(*_CONVOLUTIONS)
def convolve(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`torch.nn.functional.conv*`."""
    given = _named(args, kwargs, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1)
    D, (outputs, inputs, *kernel) = int(name[4]), given["weight"].shape
    padding = given["padding"]
    return _computed(
        _CONVOLUTIONS[name],
        name,
        args[0],
        **given
        | {
            "stride": tuple_of(given["stride"], D),
            "padding": padding if isinstance(padding, str) else tuple_of(padding, D),
            "dilation": tuple_of(given["dilation"], D),
        },
        padding_mode="zeros",
        in_channels=inputs * given["groups"],
        out_channels=outputs,
        kernel_size=tuple(kernel),
    )


_TRANSPOSED: dict[str, type[Layer]] = {
    "conv_transpose1d": DistributedConvTranspose1d,
    "conv_transpose2d": DistributedConvTranspose2d,
    "conv_transpose3d": DistributedConvTranspose3d,
}


@rule(*_TRANSPOSED)
def convolve_transposed(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`torch.nn.functional.conv_transpose*`."""
    given = _named(
        args,
        kwargs,
        weight=None,
        bias=None,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        dilation=1,
    )
    D, (inputs, outputs, *kernel) = int(name[-2]), given["weight"].shape
    numbers = {
        key: tuple_of(given[key], D) for key in ("stride", "padding", "output_padding", "dilation")
    }
    return _computed(
        _TRANSPOSED[name],
        name,
        args[0],
        **given | numbers,
        padding_mode="zeros",
        in_channels=inputs,
        out_channels=outputs * given["groups"],
        kernel_size=tuple(kernel),
    )


@rule("batch_norm")
def batch_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Over batch and space, of each channel; `torch.batch_norm` has an argument more."""
    given = _named(
        args,
        kwargs,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        training=False,
        momentum=0.1,
        eps=1e-5,
    )
    if func is torch.batch_norm:  # (input, weight, bias, mean, variance, training, …, cudnn)
        order = ("weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        given = dict(zip(order, args[1:], strict=False)) | kwargs
    given.pop("cudnn_enabled", None)
    return _computed(DistributedBatchNorm, name, args[0], **_tracking(given, args[0]))


@rule("instance_norm")
def instance_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Over space, of each channel of each sample."""
    given = _named(
        args,
        kwargs,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
    )
    if func is torch.instance_norm:
        order = (
            *("weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum"),
            "eps",
        )
        given = dict(zip(order, args[1:], strict=False)) | kwargs
    given.pop("cudnn_enabled", None)
    given["training"] = given.pop("use_input_stats")
    return _computed(DistributedInstanceNorm, name, args[0], **_tracking(given, args[0]))


def _tracking(given: Settings, x: Any) -> Settings:
    """What a norm with running statistics has besides."""
    if given["training"] and not all(
        map(is_whole, held_layouts(given["running_mean"], given["running_var"]))
    ):
        raise NotImplementedError(
            "running statistics that are split cannot be changed in place; every worker needs all "
            "of them, as plain tensors"
        )
    return given | {
        "num_features": x.shape[1],
        "affine": given["weight"] is not None,
        "track_running_stats": given["running_mean"] is not None,
        "num_batches_tracked": None,  # the module that calls the function counts
    }


@rule("group_norm")
def group_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Over groups of channels, and space, of each sample."""
    given = _named(args, kwargs, num_groups=1, weight=None, bias=None, eps=1e-5)
    given.pop("cudnn_enabled", None)
    affine = given["weight"] is not None
    return _computed(
        DistributedGroupNorm,
        name,
        args[0],
        **given,
        num_channels=args[0].shape[1],
        affine=affine,
        training=True,
    )


@rule("layer_norm", "rms_norm")
def layer_norm(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Over the last dimensions."""
    if name == "layer_norm":
        given = _named(args, kwargs, normalized_shape=(), weight=None, bias=None, eps=1e-5)
    else:
        given = _named(args, kwargs, normalized_shape=(), weight=None, eps=None)
    given.pop("cudnn_enable", None)
    given["normalized_shape"] = tuple(given["normalized_shape"])
    if name == "layer_norm" and given["weight"] is None and given["bias"] is not None:
        given["weight"] = args[0].new_ones(given["normalized_shape"])
    kind = DistributedLayerNorm if name == "layer_norm" else DistributedRMSNorm
    affine = given["weight"] is not None
    return _computed(kind, name, args[0], **given, elementwise_affine=affine, training=True)


_POOLS: dict[str, type[Layer]] = {
    "avg_pool1d": DistributedAvgPool1d,
    "avg_pool2d": DistributedAvgPool2d,
    "avg_pool3d": DistributedAvgPool3d,
    "max_pool1d": DistributedMaxPool1d,
    "max_pool2d": DistributedMaxPool2d,
    "max_pool3d": DistributedMaxPool3d,
    "adaptive_avg_pool1d": DistributedAdaptiveAvgPool1d,
    "adaptive_avg_pool2d": DistributedAdaptiveAvgPool2d,
    "adaptive_avg_pool3d": DistributedAdaptiveAvgPool3d,
    "adaptive_max_pool1d": DistributedAdaptiveMaxPool1d,
    "adaptive_max_pool2d": DistributedAdaptiveMaxPool2d,
    "adaptive_max_pool3d": DistributedAdaptiveMaxPool3d,
}
_MAX_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


@rule(*_POOLS, *(f"{name}_with_indices" for name in _POOLS if "max" in name))
def pool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The layer of the same name; torch orders the arguments of some functions otherwise."""
    x, layout = opened(args[0])
    if name.endswith("_with_indices"):
        name, kwargs = name.removesuffix("_with_indices"), {**kwargs, "return_indices": True}
    if name.startswith("max_pool"):
        args, kwargs = (x,), dict(zip(_MAX_POOL, args[1:], strict=False)) | kwargs
    layer = _POOLS[name](layout.partition, *args[1:], **kwargs)
    return spread_result(*layer.compute(x, layout))


@rule("lp_pool1d", "lp_pool2d", "lp_pool3d")
def power_average_pool(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Norms of windows, as means of powers."""
    given = _named(args, kwargs, norm_type=2.0, kernel_size=1, stride=None, ceil_mode=False)
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
    """Values go to places anywhere in an image, which is whole for that; others need not be."""
    given = _named(
        args, kwargs, indices=None, kernel_size=1, stride=None, padding=0, output_size=None
    )
    x, indices, D = args[0], given.pop("indices"), int(name[-2])
    layout = x._layout
    space = tuple(range(len(layout.shape) - D, len(layout.shape)))
    if tuple(indices.shape) != layout.shape:
        raise ValueError(
            f"`{name}`: indices of the shape of the input are needed, {layout.shape}, got "
            f"{tuple(indices.shape)}"
        )
    there = hosted(layout, space) if any(map(layout.is_split, space)) else layout
    size = _unpooled(layout.shape[-D:], D, **given)
    shape = (*layout.shape[:-D], *size)
    if holds_anywhere((indices < 0) | (indices >= prod(size))):
        raise ValueError(f"`{name}`: an index is outside of an output of size {size}")
    places = moved(as_spread(indices, layout.partition), there)
    given["output_size"] = size
    part, target = moved(x, there), reshaped_along(there, shape, space)
    y = func(part, places, **given) if part.numel() else nothing(target.local_shape, part)
    return made(y, target).move_to(split_like(layout, shape))


def _unpooled(
    lengths: tuple[int, ...], D: int, kernel_size: Any, stride: Any, padding: Any, output_size: Any
) -> tuple[int, ...]:
    """The size of an image whose pool has this one; torch's own check of what is asked for."""
    if output_size is not None:
        return tuple(output_size)[-D:]
    kernel = tuple_of(kernel_size, D)
    steps = kernel if stride is None else tuple_of(stride, D)
    return tuple(
        (n - 1) * step - 2 * pad + size
        for n, step, pad, size in zip(lengths, steps, tuple_of(padding, D), kernel, strict=True)
    )


_INTERPOLATE = (
    *("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias"),
)


@rule("interpolate", "upsample")
def interpolate(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """`torch.nn.functional.interpolate`, each worker what its outputs read."""
    x, layout = opened(args[0])
    settings = dict(zip(_INTERPOLATE, args[1:], strict=False)) | kwargs
    if settings.pop("antialias", False):  # what an output reads grows with the scale
        size = outlines(func, args, kwargs).shape[2:]

        def sampled(part: torch.Tensor) -> Any:
            if not part.numel():  # torch refuses it
                return part.new_zeros((*part.shape[:2], *size))
            return func(part, *args[1:], **kwargs)

        return along(args[0], range(2, len(layout.shape)), sampled)
    return spread_result(*DistributedUpsample(layout.partition, **settings).compute(x, layout))


@rule("linear")
def linear(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """All features of a row on one worker; those who have the same row do the same."""
    x, layout = opened(args[0])
    last = len(layout.shape) - 1
    if is_split(layout, last):
        layout = gathered(layout, (last,))
        x = moved(args[0], layout)
    given = dict(zip(("weight", "bias"), args[1:], strict=False)) | kwargs
    if not all(map(is_whole, held_layouts(given))):
        outlines(func, args, kwargs)  # torch's own error
        equation = "...i,oi->...o" if given["weight"].dim() == 2 else "...i,i->..."
        product = torch.einsum(equation, args[0], given["weight"])
        return product if given.get("bias") is None else product + given["bias"]
    given = parts(given)
    weight, bias = used(given["weight"], layout), used(given.get("bias"), layout)
    assert weight is not None
    y = torch.nn.functional.linear(x, weight, bias)
    return made(y, _with_last(layout, weight.shape[:-1]))


def _with_last(layout: Layout, last: tuple[int, ...]) -> Layout:
    """The layout of rows that have another last dimension, or none, if the weight is a vector."""
    kept = layout.resized((*layout.shape[:-1], *last, *[1] * (1 - len(last))))
    cuts = (*layout.cuts[:-1], *kept.cuts[-1:])[: len(layout.shape) - 1 + len(last)]
    shape = kept.shape[: len(cuts)]
    lost = () if last else layout.cuts[-1].axes
    return Layout(layout.partition, shape, cuts, tuple(sorted({*layout.shared, *lost})))
