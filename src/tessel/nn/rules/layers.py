"""Layers that a model calls as functions."""

from __future__ import annotations

from typing import Any

import torch

from tessel.nn.adaptive import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
)
from tessel.nn.layer import Layer, used
from tessel.nn.ledger import note
from tessel.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from tessel.nn.rules.book import (
    Arguments,
    Settings,
    check_whole,
    gathered,
    is_split,
    moved,
    noted,
    rule,
    unsupported,
    whole,
)
from tessel.nn.upsample import DistributedUpsample

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
    x, layout = args[0], whole(args[0])
    if name.endswith("_with_indices"):
        name, kwargs = name.removesuffix("_with_indices"), {**kwargs, "return_indices": True}
    if name.startswith("max_pool"):
        args, kwargs = (x,), dict(zip(_MAX_POOL, args[1:], strict=False)) | kwargs
    y, target = _POOLS[name](layout.partition, *args[1:], **kwargs).compute(x, layout)
    return note(y, target)


_INTERPOLATE = (
    *("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias"),
)


@rule("interpolate", "upsample")
def interpolate(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    x, layout = args[0], whole(args[0])
    settings = dict(zip(_INTERPOLATE, args[1:], strict=False)) | kwargs
    if settings.pop("antialias", False):
        raise unsupported(name, "antialias is not known", layout)
    y, target = DistributedUpsample(layout.partition, **settings).compute(x, layout)
    return note(y, target)


@rule("linear")
def linear(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """All features of a row on one worker; those who have the same row do the same."""
    x, layout = args[0], whole(args[0])
    last = len(layout.shape) - 1
    if is_split(layout, last):
        x, layout = moved(x, gathered(layout, (last,))), gathered(layout, (last,))
    given = dict(zip(("weight", "bias"), args[1:], strict=False)) | kwargs
    check_whole(name, given)
    weight, bias = used(given["weight"], layout), used(given.get("bias"), layout)
    assert weight is not None
    y = torch.nn.functional.linear(x, weight, bias)
    return noted(y, _with_last(layout, y.shape[-1]))


def _with_last(layout: Any, length: int) -> Any:
    kept = layout.resized((*layout.shape[:-1], length))
    return type(layout)(
        layout.partition, kept.shape, (*layout.cuts[:-1], kept.cuts[-1]), layout.shared
    )
