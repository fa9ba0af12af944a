"""Functions of each element on its own, and what takes no part in the values."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tessel.boxes import Interval
from tessel.layout import Cut, Layout
from tessel.nn.ledger import is_copy, note_view, tensors, written
from tessel.nn.rules.book import (
    Arguments,
    Settings,
    check_whole,
    held_layouts,
    is_whole,
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
            "leaky_relu",
            "softsign",
            "tanhshrink",
            "logsigmoid",
            "log_sigmoid",
            "_threshold",
            "contiguous",
            "detach",
            "type",
        ),
        *("float", "double", "half", "bfloat16", "int", "long", "bool", "cpu", "cuda"),
        *("fill", "zero", "floor_divide", "multiply", "subtract", "divide", "real", "imag"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "requires_grad"),
    )
)


# what gives a number or a truth value, for which a tensor must be whole
_NUMBERS = frozenset(("equal", "__bool__", "__float__", "__int__", "__index__", "__complex__"))


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether a torch function of this name treats each element on its own."""
    if name in _NUMBERS:
        return False
    plain = _plain(name)
    packet = getattr(torch.ops.aten, plain, None)
    tagged = packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
    return plain in ALSO or tagged


_OPERATORS = {"rdiv": "div", "truediv": "div", "rpow": "pow", "invert": "bitwise_not"}
_OPERATORS |= {"floordiv": "floor_divide", "pos": "positive"}
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
        *("__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__"),
        *("__ilshift__", "__irshift__"),
    )


def pointwise(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """All operands in the layout of the result, which that of the largest is."""
    in_place = is_in_place(name)
    if (in_place or kwargs.get("inplace")) and args:
        _check_change(name, args, kwargs)
    if in_place and written(args[0]) is None:
        return func(*args, **kwargs)
    target = whole(args[0]) if in_place else _target(name, args, kwargs)
    others = any(written(each) is None for each in tensors(args, kwargs))
    if others or any(layout is not target for layout in held_layouts(args, kwargs)):
        args = tuple(_fitted(each, target) for each in args)
        kwargs = {key: _fitted(each, target) for key, each in kwargs.items()}
    result = func(*args, **kwargs)
    if isinstance(result, str):  # the name of a type
        return result
    if not isinstance(result, Tensor):
        raise unsupported(name, "it does not give one tensor", target)
    return noted(result, target)


def _check_change(name: str, args: Arguments, kwargs: Settings) -> None:
    """Raise if a change in place would not reach all that torch lets it reach."""
    layouts = held_layouts(args, kwargs)
    if written(args[0]) is None and not all(map(is_whole, layouts)):
        raise unsupported(name, "it would put a part into a tensor that is whole", *layouts)
    if is_copy(args[0]):
        raise unsupported(
            name, "it would change a copy where torch has a view of another tensor", *layouts
        )


def _target(name: str, args: Arguments, kwargs: Settings) -> Layout:
    layouts = held_layouts(args, kwargs)
    shapes = [layout.shape for layout in layouts]
    shapes += [tuple(each.shape) for each in tensors(args, kwargs) if written(each) is None]
    shape = tuple(torch.broadcast_shapes(*shapes))
    fitting = [layout for layout in layouts if layout.shape == shape]
    if not fitting:
        raise unsupported(name, f"one operand must have the shape {shape} of the result", *layouts)
    return next((each for each in fitting if each.cuts == each.resized(shape).cuts), fitting[0])


def _fitted(value: Any, target: Layout) -> Any:
    """An operand, so that it can be combined with this worker's part of `target`."""
    if not isinstance(value, Tensor):
        return value
    layout = written(value)
    if layout is None:
        return sliced(value, target)
    return value if layout == target else moved(value, broadcast(layout, target))


@kept_in_job
def broadcast(layout: Layout, target: Layout) -> Layout:
    """Where an operand must lie: as the result, but dimensions of length one are everywhere."""
    first = len(target.shape) - len(layout.shape)
    cuts = tuple(
        cut if length > 1 else Cut(cut.axes, _everywhere(cut.intervals))
        for cut, length in zip(target.cuts[first:], layout.shape, strict=True)
    )
    return replace(target, shape=layout.shape, cuts=cuts)


def _everywhere(parts: tuple[Interval, ...]) -> tuple[Interval, ...]:
    return tuple((0, min(1, stop - start)) for start, stop in parts)


@rule("to", "type_as")
def convert(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """As another tensor is, whose layout plays no part."""
    layout = written(args[0])
    y = func(*args, **kwargs)
    return y if layout is None else noted(y, layout)


@rule("prelu")
def prelu(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    x, weight = args[0], kwargs["weight"] if len(args) == 1 else args[1]
    check_whole(name, weight)
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


@rule("get data", "detach")
def data(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    return note_view(noted(args[0].detach(), whole(args[0])), args[0])


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def new(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A tensor of its own, which all workers have whole."""
    check_whole(name, args[1:], kwargs)
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
    *("is_same_size", "is_conj", "is_neg", "is_inference", "get output_nr"),
)
def local_fact(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """What is the same for a part as for the whole."""
    return func(*args, **kwargs)
