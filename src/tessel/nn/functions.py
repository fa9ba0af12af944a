"""Layers that are called as functions: what they do with spread tensors.

The layers over partitions know how to compute with parts. A call of `torch.nn.functional` is such a
layer, whose parameters are its arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from tessel.layout import Layout
from tessel.nn.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from tessel.nn.convolution import DistributedConv1d, DistributedConv2d, DistributedConv3d
from tessel.nn.layer import Layer, spread_result
from tessel.partition import Partition
from tessel.tensor.table import (
    Arguments,
    Settings,
    check_whole,
    gathered,
    is_split,
    made,
    moved,
    opened,
    parts,
    rule,
)
from tessel.tensor.use import used
from tessel.tensor.windowed import tuple_of
from tessel.transport import kept_in_job


def _named(args: Arguments, kwargs: Settings, **defaults: Any) -> Settings:
    """The arguments behind the input by their names, in the order and with the defaults given."""
    return {**defaults, **dict(zip(defaults, args[1:], strict=False)), **kwargs}


def _computed(kind: type[Layer], name: str, x: Any, **attributes: Any) -> Any:
    """What a layer with these attributes computes of a spread tensor.

    Weights and statistics are whole on all workers, and no parameters of the layer: nothing is
    registered, and nothing has to be made equal.
    """
    check_whole(name, attributes)
    part, layout = opened(x)
    layer: Any = object.__new__(kind)
    layer.__dict__.update(_blank(kind, layout.partition))
    layer.__dict__.update(parts(attributes))
    return spread_result(*layer.compute(part, layout))


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


@rule("linear")
def linear(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """All features of a row on one worker; those who have the same row do the same."""
    x, layout = opened(args[0])
    last = len(layout.shape) - 1
    if is_split(layout, last):
        layout = gathered(layout, (last,))
        x = moved(args[0], layout)
    given = dict(zip(("weight", "bias"), args[1:], strict=False)) | kwargs
    check_whole(name, given)
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
