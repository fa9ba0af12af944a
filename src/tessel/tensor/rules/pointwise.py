"""Pointwise functions: all operands are moved to the layout of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from tessel.core import boxes
from tessel.core.layout import Cut, Layout, Shape
from tessel.tensor.adoption import adopted
from tessel.tensor.aliases import (
    Aliases,
    apart,
    either,
    is_copy,
    may_go_back,
    note_view,
    outdate_copies,
    share_history,
    withhold_original,
)
from tessel.tensor.table import (
    Arguments,
    Settings,
    as_autocast,
    check_fits,
    check_together,
    check_whole,
    held_layouts,
    made,
    moved,
    opened,
    outlines,
    parts,
    rule,
    sliced,
    tensors,
    unsupported,
)
from tessel.tensor.tensor import Tensor, open_part
from tessel.transport import kept_in_job

# pointwise functions that torch does not tag as such
ALSO = frozenset(
    (
        *("hardswish", "leaky_relu", "softsign", "tanhshrink", "logsigmoid", "log_sigmoid"),
        *("_threshold", "fill", "zero", "floor_divide", "multiply", "subtract", "divide"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "less", "greater", "less_equal"),
        *("greater_equal", "not_equal", "negative", "absolute", "conj_physical", "isreal"),
        *("float_power", "complex", "polar", "isclose", "fix", "arccos", "arccosh", "arcsin"),
        *("arcsinh", "arctan", "arctan2", "arctanh"),
        *(f"special_{name}" for name in ("digamma", "erf", "erfc", "erfinv", "exp2", "expit")),
        *(f"special_{name}" for name in ("expm1", "gammainc", "gammaincc", "gammaln", "i0")),
        *(f"special_{name}" for name in ("log1p", "logit", "multigammaln", "ndtr", "polygamma")),
        *(f"special_{name}" for name in ("psi", "round", "sinc", "xlogy")),
    )
)

# views of complex numbers, and real numbers themselves
_OF_COMPLEX = frozenset(("real", "get real", "imag", "get imag", "conj", "resolve_conj"))
# functions that return the tensor itself if nothing changes
_ALREADY = _OF_COMPLEX | {
    *("type", "float", "double", "half", "bfloat16", "cfloat", "cdouble", "chalf", "int", "long"),
    *("short", "char", "byte", "bool", "cpu", "cuda", "contiguous", "resolve_neg"),
}

# functions that return a number or a boolean, for which a tensor must be whole
_NUMBERS = frozenset(("equal", "__bool__", "__float__", "__int__", "__index__", "__complex__"))


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether a torch function of this name is pointwise."""
    if name in _NUMBERS:
        return False
    plain = name.removesuffix("_")
    if name.startswith("__") and name.endswith("__"):  # an operator, possibly reflected
        plain = name[2:-2]
        is_whole_word = plain in ("invert", "rshift", "rdiv")
        plain = plain[1:] if plain[:1] in "ri" and not is_whole_word else plain
        plain = _OPERATORS.get(plain, plain)
    packet = getattr(torch.ops.aten, plain, None)  # an operator, or an attribute of the namespace
    tagged = isinstance(packet, torch._ops.OpOverloadPacket) and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
    return plain in ALSO or plain in _ALREADY or tagged


_OPERATORS = {"rdiv": "div", "truediv": "div", "rpow": "pow", "invert": "bitwise_not"}
_OPERATORS |= {"floordiv": "floor_divide", "pos": "positive"}
_OPERATORS |= {"lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift"}
_OPERATORS |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "mod": "remainder"}


@lru_cache(maxsize=1024)
def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in (
        *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__idiv__"),
        *("__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__"),
        *("__ilshift__", "__irshift__", "__setitem__"),
    )


def pointwise(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Combine all operands in the layout of the result, that of the largest."""
    if is_in_place(name) or bool(kwargs.get("inplace")):  # in the layout of the first
        first, layouts = args[0], held_layouts(args, kwargs)
        if not isinstance(first, Tensor):
            if all(each.is_whole for each in layouts):
                return func(*parts(args), **parts(kwargs))
            if not isinstance(first, torch.Tensor) or not adopted(
                first, common_layout(name, [*args, *kwargs.values()])
            ):
                raise unsupported(name, "it would put a part into a tensor that is whole", *layouts)
        # `x[1:] += y` puts the changed view back into x, so it may be a copy
        goes_back = name in _AUGMENTED and may_go_back(first)
        if not goes_back:
            check_change(name, first, layouts)
        for each in tensors(args[1:], kwargs):
            other = each._layout.shape if isinstance(each, Tensor) else tuple(each.shape)
            check_fits(first._layout.shape, other)
        others = [fitted(apart(each, first), first._layout) for each in args[1:]]
        settings = {key: fitted(apart(e, first), first._layout) for key, e in kwargs.items()}
        func(first._part, *others, **settings)
        if goes_back:
            withhold_original(first)
        return changed(first)
    target = common_layout(name, [*args, *kwargs.values()] if kwargs else args)
    result = func(
        *[fitted(each, target) for each in args],
        **{key: fitted(each, target) for key, each in kwargs.items()},
    )
    if isinstance(result, str):  # the name of a tensor type, from `type`
        return result
    if result is NotImplemented:  # for x == "text": torch turns this error into the same answer
        raise TypeError(f"`{name}` of a tensor and {[type(each).__name__ for each in args[1:]]}")
    if name == "frexp":
        return type(result)([made(each, target) for each in result])
    if not isinstance(result, torch.Tensor):
        raise unsupported(name, "it does not give one tensor", target)
    return made(result, target)


OF_ELEMENTS = "operator of elements"  # not the name of any function or operator


@rule(OF_ELEMENTS, plain=True)
def of_elements(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A pointwise operator, called by code that bypasses torch's functions."""
    return pointwise(name, func, args, kwargs)


def check_change(name: str, target: Tensor, layouts: Sequence[Layout]) -> None:
    """Raise if a change in place would not reach all tensors that it reaches in torch."""
    if is_copy(target):
        raise unsupported(
            name, "it would change a copy where torch has a view of another tensor", *layouts
        )
    if open_part(target) is not target._part:
        raise unsupported(name, "it would change what a function of its own gave", *layouts)
    if "_is_hooked" in target.__dict__:
        keep_hooks(name, target, layouts)


def keep_hooks(name: str, target: Tensor, layouts: Sequence[Layout]) -> None:
    """Keep the hooks of a tensor whose part is about to be changed, even if the part is a view.

    Torch drops hooks of a view that is changed in place. A tensor that is not a view in one process
    may have a part that is one, for example of a convolution that computes a superfluous row. So a
    copy of the part is changed.
    """
    part, aliases = target._part, Aliases.of(target)
    if not part._is_view() or not aliases.begin_with(target):  # else torch drops them, too
        return
    if any(each is not target for each in aliases):
        raise unsupported(name, "it would change views of a tensor that has hooks", *layouts)
    target._part = part.clone()


# functions that torch calls for `+=` and the like
_AUGMENTED = frozenset(
    (
        *("add_", "sub_", "mul_", "div_", "pow_", "floor_divide_", "remainder_"),
        *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"),
        *("__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__"),
        *("__ilshift__", "__irshift__", "bitwise_and_", "bitwise_or_", "bitwise_xor_"),
    )
)


def changed(target: Tensor) -> Tensor:
    """Update a tensor whose part was changed in place: it requires a gradient if its part does."""
    part = target._part
    if part.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            target.requires_grad_()
        if not part.numel() and "_aliases" in target.__dict__ and torch.is_grad_enabled():
            share_history(target)
    outdate_copies(target)
    return target


def common_layout(name: str, values: Sequence[Any]) -> Layout:
    """The layout in which tensors that are broadcast against each other are combined."""
    operands = list(tensors(*values))
    first = next(each._layout for each in operands if isinstance(each, Tensor))
    if all(isinstance(each, Tensor) and each._layout is first for each in operands):
        return first
    layouts = tuple(each._layout for each in operands if isinstance(each, Tensor))
    plain = tuple(tuple(each.shape) for each in operands if not isinstance(each, Tensor))
    check_together(name, layouts)
    return _common(layouts, plain)


@kept_in_job
def _common(layouts: tuple[Layout, ...], plain: tuple[Shape, ...]) -> Layout:
    """The layout of an operand of the whole shape; else the cuts of several operands combined."""
    shape = tuple(torch.broadcast_shapes(*plain, *(each.shape for each in layouts)))
    fitting = [layout for layout in layouts if layout.shape == shape]
    if fitting:
        # A tensor that all workers have whole need not move: prefer the layout of another one.
        fitting = [each for each in fitting if not each.is_whole] or fitting
        balanced = (each for each in fitting if each.cuts == each.resized(shape).cuts)
        return next(balanced, fitting[0])
    cuts = [Cut.whole(length) for length in shape]
    taken: set[int] = set()
    for layout in sorted(layouts, key=lambda each: -torch.Size(each.shape).numel()):
        first = len(shape) - len(layout.shape)
        for dim, cut in enumerate(layout.cuts, first):
            is_free = not cuts[dim].axes and not taken & {*cut.axes}
            if len(cut.intervals) > 1 and layout.shape[dim - first] == shape[dim] and is_free:
                cuts[dim] = cut
                taken |= {*cut.axes}
    return Layout.of_cuts(layouts[0].partition, shape, tuple(cuts))


def fitted(value: Any, target: Layout) -> Any:
    """An operand in a form to be combined with this worker's part of `target`."""
    if isinstance(value, Tensor):
        layout = value._layout
        if layout is target or layout == target:
            return open_part(value)
        return moved(value, broadcast(layout, target))
    if isinstance(value, torch.Tensor):
        return sliced(value, target)
    if type(value) in (list, tuple):
        return type(value)([fitted(each, target) for each in value])
    return value


@kept_in_job
def broadcast(layout: Layout, target: Layout) -> Layout:
    """The layout of an operand: that of the result, but dimensions of length one are everywhere."""
    first = len(target.shape) - len(layout.shape)
    cuts = tuple(
        cut
        if length > 1  # else one value on each worker with a part of the target
        else Cut(cut.axes, tuple((0, min(1, stop - start)) for start, stop in cut.intervals))
        for cut, length in zip(target.cuts[first:], layout.shape, strict=True)
    )
    return replace(target, shape=layout.shape, cuts=cuts)


@rule("to", "type_as", "positive", *_ALREADY, plain=True)
def convert(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Convert the part; the layout of another tensor does not matter, and no change returns `x`."""
    y = func(*parts(args), **parts(kwargs))
    if not isinstance(args[0], Tensor) or not isinstance(y, torch.Tensor):
        return y
    x, layout = args[0], args[0]._layout
    if name == "contiguous" and not tells_strides(layout):
        return either(y, layout, x)
    if y is open_part(x):
        return x
    found = made(y, layout)
    return note_view(found, x) if name in _OF_COMPLEX and y._is_view() else found


@kept_in_job
def tells_strides(layout: Layout, dims: tuple[int, ...] = ()) -> bool:
    """Whether strides of each part tell those of the whole; those of a single index do not.

    Args:
        layout: the layout of the whole.
        dims: the dimensions whose strides count, by default all.
    """
    pairs = [(layout.shape[dim], layout.cuts[dim]) for dim in dims or range(len(layout.shape))]
    return all(b - a > 1 or b - a == n for n, cut in pairs for a, b in cut.intervals)


@rule("prelu")
def prelu(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A leaky ReLU with a slope for all channels, or for each."""
    weight = as_autocast(kwargs["weight"] if len(args) == 1 else args[1])
    args = as_autocast(args[0]), weight
    if not all(each.is_whole for each in held_layouts(weight)):
        ones = [1] * (args[0].dim() - 2)
        slopes = weight.reshape((-1, *ones) if weight.numel() > 1 else ())
        return torch.where(args[0] >= 0, args[0], slopes * args[0])
    (x, layout), weight = opened(args[0]), parts(weight)
    if weight.numel() > 1:
        weight = sliced(weight.reshape(-1, *[1] * (len(layout.shape) - 2)), layout)
        return made(torch.where(x >= 0, x, weight * x), layout)
    return made(func(x, sliced(weight, layout)), layout)


@rule("get data", "detach")
def detach(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The same part without history."""
    x = args[0]
    # autograd does not track changes of `data`
    part = x._part.data if name == "get data" else x._part.detach()
    return note_view(made(part, x._layout), x, detached=True)


@rule("new_tensor")
def new_tensor(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A new tensor, which all workers have whole."""
    check_whole(name, args[1:], kwargs)
    return func(*parts(args), **parts(kwargs))


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def new(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """A new tensor, in the layout of this one if dimensions that are not split have equal lengths.

    So values that are written there, such as sums of messages to the nodes of a graph, stay split.
    Any other tensor, or one too short to be split, is whole on all workers.
    """
    check_whole(name, args[1:], kwargs)
    x = args[0]
    there = new_layout(x._layout, tuple(outlines(func, args, kwargs).shape))
    if there is None:
        return func(*parts(args), **parts(kwargs))
    # the arguments without the size: the value, and keywords
    rest = args[2:] if name == "new_full" else ()
    settings = {key: each for key, each in parts(kwargs).items() if key != "size"}
    return made(func(x._part, there.local_shape, *parts(rest), **settings), there)


@kept_in_job
def new_layout(layout: Layout, shape: Shape) -> Layout | None:
    """The layout of a new tensor like an existing one except for its rows; None if it is plain.

    `x.new_zeros(x.shape)` means the same as `torch.zeros_like(x)`. A tensor for random numbers of
    each sample, `x.new_empty(len(x), 1, 1)`, is plain however x is split: otherwise the numbers
    would depend on the split.
    """
    if shape == layout.shape:
        return layout
    if len(shape) != len(layout.shape) or layout.is_whole:
        return None
    pairs = list(zip(layout.cuts, shape, strict=True))
    split = [len(cut.intervals) > 1 for cut in layout.cuts]
    if any(n < len(cut.intervals) for cut, n in pairs if len(cut.intervals) > 1):
        return None
    if any(n != m for n, m, rows in zip(shape, layout.shape, split, strict=True) if not rows):
        return None
    cuts = tuple(
        cut if n == m else Cut(cut.axes, boxes.balanced(n, len(cut.intervals)))
        for (cut, n), m in zip(pairs, layout.shape, strict=True)
    )
    return Layout.of_cuts(layout.partition, shape, cuts)
