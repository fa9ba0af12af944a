"""Functions of each element on its own, and what takes no part in the values."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tessel.boxes import Interval
from tessel.layout import Cut, Layout
from tessel.nn.ledger import layout_of, tensors
from tessel.nn.rules.book import (
    Arguments,
    Settings,
    held_layouts,
    moved,
    noted,
    rule,
    sliced,
    unsupported,
    whole,
)
from tessel.transport import kept_in_job

# pointwise functions that torch does not tag so
ALSO = frozenset(
    (
        *(
            "hardswish",
            "softsign",
            "tanhshrink",
            "logsigmoid",
            "contiguous",
            "detach",
            "to",
            "type",
        ),
        *("type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "cpu", "cuda"),
        *("fill", "zero", "floor_divide", "multiply", "subtract", "divide", "real", "imag"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "requires_grad"),
    )
)


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether a torch function of this name treats each element on its own."""
    plain = _plain(name)
    packet = getattr(torch.ops.aten, plain, None)
    tagged = packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
    return plain in ALSO or tagged


_OPERATORS = {"rdiv": "div", "truediv": "div", "rpow": "pow", "invert": "bitwise_not"}
_OPERATORS |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "mod": "remainder"}


def _plain(name: str) -> str:
    """The name of an operator or an in-place function without what says so."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        name = name[1:] if name[:1] in "ri" and name not in ("invert", "rshift", "rdiv") else name
        return _OPERATORS.get(name, name)
    return name.removesuffix("_")


def is_in_place(name: str) -> bool:
    """Whether a function changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in (
        *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__idiv__"),
    )


def pointwise(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """All operands in the layout of the result, which that of the largest is."""
    target = whole(args[0]) if is_in_place(name) else _target(name, args, kwargs)
    if all(layout is target for layout in held_layouts(args, kwargs)) and not _others(args, kwargs):
        return noted(func(*args, **kwargs), target)
    args = tuple(_fitted(each, target) for each in args)
    kwargs = {key: _fitted(each, target) for key, each in kwargs.items()}
    return noted(func(*args, **kwargs), target)


def _others(args: Arguments, kwargs: Settings) -> bool:
    """Whether there are tensors that are no numbers and of no known layout."""
    return any(layout_of(each) is None and Tensor.dim(each) for each in tensors(args, kwargs))


def _target(name: str, args: Arguments, kwargs: Settings) -> Layout:
    layouts = held_layouts(args, kwargs)
    shapes = [layout.shape for layout in layouts]
    shapes += [tuple(each.shape) for each in tensors(args, kwargs) if layout_of(each) is None]
    shape = tuple(torch.broadcast_shapes(*shapes))
    fitting = [layout for layout in layouts if layout.shape == shape]
    if not fitting:
        raise unsupported(name, f"one operand must have the shape {shape} of the result", *layouts)
    return next((each for each in fitting if each.cuts == each.resized(shape).cuts), fitting[0])


def _fitted(value: Any, target: Layout) -> Any:
    """An operand, so that it can be combined with this worker's part of `target`."""
    if not isinstance(value, Tensor):
        return value
    layout = layout_of(value)
    if layout is None:
        return sliced(value, target) if value.dim() else value
    return value if layout == target else moved(value, _broadcast(layout, target))


@kept_in_job
def _broadcast(layout: Layout, target: Layout) -> Layout:
    """Where an operand must lie: as the result, but dimensions of length one are everywhere."""
    first = len(target.shape) - len(layout.shape)
    cuts = tuple(
        cut if length > 1 else Cut(cut.axes, _everywhere(cut.intervals))
        for cut, length in zip(target.cuts[first:], layout.shape, strict=True)
    )
    return replace(target, shape=layout.shape, cuts=cuts)


def _everywhere(parts: tuple[Interval, ...]) -> tuple[Interval, ...]:
    return tuple((0, min(1, stop - start)) for start, stop in parts)


@rule("prelu")
def prelu(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    x, weight = args
    layout = whole(x)
    if weight.numel() > 1:
        weight = sliced(weight.reshape(-1, *[1] * (len(layout.shape) - 2)), layout)
        return noted(torch.where(x >= 0, x, weight * x), layout)
    return noted(func(x, sliced(weight, layout)), layout)


@rule("size")
def size(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    shape = torch.Size(whole(args[0]).shape)
    rest = (*args[1:], *kwargs.values())
    return shape[rest[0]] if rest and rest[0] is not None else shape


@rule("get shape")
def shape(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    return torch.Size(whole(args[0]).shape)


@rule("get data")
def data(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    return noted(args[0].detach(), whole(args[0]))


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def new(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A tensor of its own, which all workers have whole."""
    return func(*args, **kwargs)


@rule("numel", "nelement")
def numel(name: str, func: Any, args: Arguments, kwargs: Settings) -> int:
    return torch.Size(whole(args[0]).shape).numel()


@rule("__len__")
def length(name: str, func: Any, args: Arguments, kwargs: Settings) -> int:
    return whole(args[0]).shape[0]


@rule(
    *("get dtype", "get device", "get ndim", "get requires_grad", "get is_cuda", "get is_leaf"),
    *("get grad_fn", "get layout", "get itemsize", "get is_mps", "get is_xpu", "get is_sparse"),
    *("get is_quantized", "get is_meta", "get is_nested", "get grad", "dim", "ndimension"),
    *("is_floating_point", "is_complex", "get_device", "element_size", "is_contiguous", "__hash__"),
    *("register_hook", "retain_grad", "is_signed", "get_default_dtype", "__repr__", "__format__"),
    *("is_same_size", "is_conj", "is_neg", "is_inference"),
)
def local_fact(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """What is the same for a part as for the whole."""
    return func(*args, **kwargs)
