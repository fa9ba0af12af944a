"""Calls of torch functions on spread tensors: the rule of the function is found and followed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._C import _functorch as functorch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad

from tessel.tensor import attributes, autocasting
from tessel.tensor.aten import ELEMENTWISE, OPERATORS, below_autograd, of_values
from tessel.tensor.gathering import is_random, may_gather, of_whole, shared, without_rule
from tessel.tensor.grids import on_one_grid
from tessel.tensor.outside import outlined
from tessel.tensor.rules import (  # noqa: F401  (they enter rules)
    adaptive,
    attention,
    compositions,
    convolution,
    diagonals,
    differences,
    distances,
    embedding,
    fourier,
    indexing,
    interpolation,
    joins,
    lists,
    losses,
    masks,
    matrices,
    norms,
    pools,
    products,
    random,
    recurrent,
    reductions,
    scans,
    shapes,
    short_time,
    transposed,
)
from tessel.tensor.rules.pointwise import (
    OF_ELEMENTS,
    changed,
    check_change,
    is_in_place,
    is_pointwise,
    pointwise,
)
from tessel.tensor.shared_random import common_number, common_seed, seeded
from tessel.tensor.table import (
    FOUND,
    PLAIN,
    RULES,
    ApartError,
    Arguments,
    Rule,
    Settings,
    UnsupportedError,
    as_spread,
    check_not_nested,
    held_layouts,
    in_order,
    made,
    mapped,
    outlining,
    parts,
    spread_among,
    tensors,
    unsupported,
)
from tessel.tensor.tensor import Tensor, converters, is_spread, move, open_plain
from tessel.tensor.unfinished import EARLY, unfinished_of


def above(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call a torch function on spread tensors by its rule."""
    if torch._C._are_functorch_transforms_active() and any(
        is_spread(each) and not isinstance(each, Tensor) for each in tensors(args, kwargs)
    ):
        # An operand is spread inside of wrappers of a torch.func transform. Torch unwraps it and
        # calls `below`, as it does if all operands are wrapped.
        args, kwargs = mapped(_constant, args), mapped(_constant, kwargs)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    try:
        name, rule = FOUND[func]
    except KeyError:
        name = name_of(func)
        rule = rule_of(name)
        FOUND[func] = name, rule
    return rule(name, func, args, kwargs)


def _constant(value: Any) -> Any:
    """A spread tensor by which a transform does not differentiate, with its part unwrapped."""
    if not isinstance(value, Tensor):
        return value
    part = value._part
    while functorch.is_functorch_wrapped_tensor(part):
        if (
            not functorch.is_gradtrackingtensor(part)
            or part.requires_grad
            or forward_ad.unpack_dual(part).tangent is not None
        ):
            why = "of two spread tensors the parts of one and the whole of the other belong to a "
            raise unsupported("a function", f"{why}transform of torch.func", value._layout)
        part = functorch.get_unwrapped(part)
    return value if part is value._part else made(part, value._layout)


def name_of(func: Any) -> str:
    """The name of a torch function; for a property with `get`, `set` or `delete` before it.

    Scripted code has names that its users chose, which may be those of torch's functions.
    """
    if isinstance(func, _SCRIPTED):
        return f"scripted {func.name}"
    if isinstance(func, OpOverload | OpOverloadPacket) and "c10d" in str(func):  # functional too
        return f"collective {func.__name__}"
    if isinstance(func, OpOverload):
        return f"operator {func.name()}"
    if getattr(func, "__module__", None) == "torch.nn.init":  # some have names of methods
        return f"init {func.__name__}"
    module = getattr(func, "__module__", None) or ""  # operators like `&` have None
    if module.startswith("torch.distributed."):  # gather, scatter, …
        return f"collective {func.__name__}"
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return f"{func.__name__.strip('_')} {func.__self__.__name__}"
    return str(func.__name__)


_SCRIPTED = (torch._C.ScriptFunction, torch._C.ScriptMethod)


def rule_of(name: str) -> Rule:
    """The rule or handler of a function of this name."""
    if name.startswith("scripted "):
        return scripted
    if name.startswith("operator "):
        return overload
    if name.startswith("init "):
        return random.initialize
    if name.startswith("collective "):
        return collective
    if name in attributes.OF_THE_WHOLE:
        return attributes.of_the_whole
    if name in attributes.OF_THE_PART:
        return attributes.of_the_part
    found = RULES.get(name)
    if found is not None and found.__module__ == attributes.__name__:
        return found
    if found is None and is_pointwise(name) and not is_in_place(name):
        return at_once
    if is_in_place(name) or autocasting.may_matter(name):
        return follow_cast
    return follow


def follow_cast(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Follow the rule of a function, after casting its operands as autocast would.

    Autocast is off in the rule if it is done, or would not touch the function: so it is with those
    that change a tensor.
    """
    device = autocasting.device_of(args, kwargs)
    if not device:
        return follow(name, func, args, kwargs)
    if not is_in_place(name):
        if autocasting.is_cast(name, device, args, kwargs):
            args, kwargs = autocasting.cast(name, device, args, kwargs)
        elif not autocasting.is_left_alone(name, device, args, kwargs):
            return follow(name, func, args, kwargs)
    with torch.autocast(device, enabled=False):
        return follow(name, func, args, kwargs)


def scripted(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call scripted code, which has no rule: on whole operands, with common random numbers."""
    args, kwargs = mapped(_summed, args), mapped(_summed, kwargs)
    layouts = held_layouts(args, kwargs)
    if not may_gather() and not all(each.is_whole for each in layouts):
        raise unsupported(name, "scripted code has no rule", *layouts)
    seed = common_seed(common_number(layouts[0].partition))
    with seeded(seed, *{each.device for each in spread_among(args, kwargs)}):
        return of_whole(name, func, args, kwargs)


def collective(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call a function of torch.distributed, which writes into its operands: only into whole ones.

    Its writes into the whole of a split tensor would be lost.
    """
    for each in spread_among(args, kwargs):
        attributes.check_values(each, f"torch.distributed's `{name.partition(' ')[2]}`")
    return func(*parts(args), **parts(kwargs))


_NAMESPACES = {"fft": torch.fft, "linalg": torch.linalg, "special": torch.special}


def overload(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call an operator by its own name, as exported graphs do, like its function.

    Torch's functions and methods in C++ are generated from the same schemas: with the same
    arguments they are the same operators.
    """
    result = by_operator(func, args, kwargs)
    if result is not NotImplemented:
        return result
    if func.namespace == "aten" and func.name() not in OPERATORS:
        own = func._schema.name.partition("::")[2]
        for place in (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase):
            if hasattr(place, own):
                return getattr(place, own)(*args, **kwargs)
        prefix, _, rest = own.partition("_")
        if prefix in _NAMESPACES and hasattr(_NAMESPACES[prefix], rest):
            return getattr(_NAMESPACES[prefix], rest)(*args, **kwargs)
    return follow(name, func, args, kwargs)


def by_operator(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The result of an operator by `tensor/aten.py`; NotImplemented to gather operands instead."""
    known = OPERATORS.get(func.name())
    if known is None:
        return NotImplemented
    try:
        return known(*args, **kwargs)
    except UnsupportedError:
        if not may_gather():
            raise
        return NotImplemented


def at_once(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call a pointwise function of tensors in the same layout, and numbers, as most calls are.

    This is `follow` without its decisions, in a few microseconds.
    """
    layout = None
    operands = []
    may_bypass = not torch.is_grad_enabled()  # in the forward pass of a user's autograd.Function
    with DisableTorchFunctionSubclass():
        for each in args:
            kind = type(each)
            if kind is Tensor:
                if layout is None:
                    layout = each._layout
                # a history between wrappers must be opened first, or is one to come
                if each._layout is not layout or each.grad_fn is not None:
                    break
                if may_bypass and each.requires_grad:
                    break
                operands.append(each._part)
            elif kind is float or kind is int:
                operands.append(each)
            else:
                break
        else:
            if layout is not None and layout.summed is layout:
                if not kwargs:
                    part = func(*operands)
                    if type(part) is torch.Tensor:
                        return Tensor(part, layout)
                # `inplace=True` for a tensor that is no copy: no other tensor is affected
                elif kwargs == _IN_PLACE and len(args) == 1 and not args[0]._originals:
                    if not (layout.is_outside or "_is_hooked" in args[0].__dict__):
                        func(*operands, inplace=True)
                        return changed(args[0])
                elif all([type(each) in _NUMBERS for each in kwargs.values()]):
                    if kwargs.get("inplace") is not True:
                        part = func(*operands, **kwargs)
                        if type(part) is torch.Tensor:
                            return Tensor(part, layout)
    return follow(name, func, args, kwargs)


_IN_PLACE = {"inplace": True}
_NUMBERS = frozenset((float, int, bool, str, type(None)))


def follow(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Follow the rule of a function; without one, do as `tessel.fallback` says."""
    if name in _SIZED and next(tensors(args[1:], kwargs), None) is not None:
        # here, since workers outside of the partition know plain values, too
        args, kwargs = (*args[:1], *mapped(_number, args[1:])), mapped(_number, kwargs)
    try:
        return _followed(name, func, args, kwargs)
    except (UnsupportedError, ApartError) as error:
        together = on_one_grid(name, args, kwargs)
        if together is not None:
            return follow(name, func, *together)
        if isinstance(error, ApartError):
            raise
        return without_rule(name, func, args, kwargs, error)
    except _OutsideError:
        return outlined(follow, name, func, args, kwargs)
    except (RuntimeError, AttributeError):  # perhaps of a nested operand, which rules do not expect
        check_not_nested(name, args, kwargs)
        raise


class _OutsideError(Exception):
    """This worker has no part of an operand."""


def by_rule(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The result of a function by its rule; UnsupportedError if it has none."""
    return _followed(name_of(func), func, args, kwargs)


def _followed(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    if _need_change(args) or (kwargs and _need_change(kwargs.values())):
        # a plain tensor that is only written to needs no preparation
        first = args[:1] if is_in_place(name) and type(args[0]) is torch.Tensor else ()
        args = (*first, *mapped(_prepared, args[len(first) :]))
        kwargs = mapped(_prepared, kwargs)
    if kwargs and kwargs.get("out") is not None:
        return _written(name, func, args, kwargs)
    rule = RULES.get(name)
    if rule is not None:
        if kwargs:
            args, kwargs = in_order(name, func, args, kwargs)
        if kwargs and not kwargs.keys().isdisjoint(_RENAMED):
            # by torch's main names, and the input by position: rules know no others
            kwargs = {_TORCHS.get(key, key): value for key, value in kwargs.items()}
            args = (kwargs.pop("input"), *args) if "input" in kwargs else args
        if not args and (key := next((each for each in _FIRST if each in kwargs), None)):
            args = (kwargs[key],)
            kwargs = {k: each for k, each in kwargs.items() if k != key}
        if not args:
            raise unsupported(name, "the tensor must be its first argument", *held_layouts(kwargs))
        first = args[0]
        if type(first) is not Tensor and name not in PLAIN and isinstance(first, torch.Tensor):
            args = (as_spread(first, _partition(args, kwargs)), *args[1:])
        if name in EARLY and unfinished_of(first) is not None:
            result = EARLY[name](name, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return rule(name, func, args, kwargs)
    if is_pointwise(name):
        return pointwise(name, func, args, kwargs)
    if (
        name[-1] == "_"
        and name[:-1] in RULES
        and name not in _RESHAPE_IN_PLACE
        and held_layouts(args[:1])
    ):
        return _written_back(name, args, kwargs)
    layouts = held_layouts(args, kwargs)
    if not all(each.is_whole for each in layouts):
        if name.startswith("_fused_") and is_in_place(name):
            why = "it changes a list of tensors; give torch's optimizer fused=False"
            raise unsupported(name, why, *layouts)
        raise unsupported(name, "it has no rule for tensors that are split", *layouts)
    if name in _RESHAPE_IN_PLACE:  # the part would change its shape, but not the wrapper
        raise unsupported(name, "a spread tensor cannot change its shape in place", *layouts)
    if is_random(name) and layouts[0].partition.size > 1:
        raise unsupported(name, "each worker would draw different numbers", *layouts)
    result = func(*parts(args), **parts(kwargs))
    check_not_nested(name, result)
    return shared(result, layouts[0].partition)


# names of first arguments other than "input"
_FIRST = ("query", "tensors", "condition", "input1", "x1", "anchor", "tensor")
# functions that also take sizes and shifts as 0-d tensors
_SIZED = frozenset(
    (
        *("view", "reshape", "expand", "broadcast_to", "repeat", "tile", "unflatten", "roll"),
        *("new_zeros", "new_ones", "new_empty", "split", "chunk", "pad"),
    )
)
_RESHAPE_IN_PLACE = frozenset(("as_strided_", "resize_", "resize_as_", "set_", "rename_"))


def _number(value: Any) -> Any:
    """The integer that a 0-d tensor holds; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return value
    is_other = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    return value if is_other else int(value)


def _written_back(name: str, args: Arguments, kwargs: Settings) -> Any:
    """Follow the rule of a function out of place, and copy the result into its operand."""
    x = args[0]
    check_change(name, x, held_layouts(args, kwargs))
    # of a copy, since derivatives may need the old values
    result = getattr(torch.Tensor, name[:-1])(x.clone(), *args[1:], **kwargs)
    if result.shape != x.shape or result.dtype != x.dtype:
        raise RuntimeError(
            f"`{name}` would write a result of shape {tuple(result.shape)} and {result.dtype} into "
            f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
        )
    return x.copy_(result)


def _written(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call a function and copy its results into the spread tensors of `out`, in their layouts."""
    rest = {key: value for key, value in kwargs.items() if key != "out"}
    out = kwargs["out"]
    targets = list(tensors(out))
    if not all(isinstance(each, Tensor) for each in targets):
        raise unsupported(name, "it cannot write to an `out` that is plain", *held_layouts(args))
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors(args, rest, out)):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, "
            f"but one of the arguments requires grad."
        )
    is_spread = next(spread_among(args, rest), None) is not None
    device = autocasting.device_of(args, kwargs)
    # autocast casts no operands of functions that write into `out`
    with torch.autocast(device, enabled=False) if device else nullcontext():
        result = follow(name, func, args, rest) if is_spread else func(*args, **rest)
    found = list(tensors(result))
    for each, target in zip(found, targets, strict=True):
        if each.shape != target.shape:
            raise ValueError(
                f"`{name}` returns a tensor of shape {tuple(each.shape)}, got an `out` of shape "
                f"{tuple(target.shape)}; a spread tensor cannot change its shape"
            )
        if not torch.can_cast(each.dtype, target.dtype):
            raise RuntimeError(
                f"result type {each.dtype} can't be cast to the desired output type {target.dtype}"
            )
    for each, target in zip(found, targets, strict=True):
        target.copy_(each)
    return out


def _partition(args: Arguments, kwargs: Settings) -> Any:
    return next(spread_among(args, kwargs))._layout.partition


def _need_change(values: Iterable[Any]) -> bool:
    """Whether a tensor has separate copies, has no part here, or is plain and has a history."""
    for value in values:
        kind = type(value)
        if kind is torch.Tensor:
            if value.grad_fn is not None:
                return True
        elif kind in _LEAVES or (kind is tuple and _LEAVES.issuperset(map(type, value))):
            continue
        elif kind is Tensor or isinstance(value, Tensor):
            layout = value._layout
            if layout.summed is not layout or layout.is_outside:
                return True
        elif isinstance(value, list | tuple):
            if _need_change(value):
                return True
        elif isinstance(value, dict) and _need_change(value.values()):
            return True
    return False


_LEAVES = frozenset((*_NUMBERS, torch.nn.Parameter, torch.Size))


def _prepared(value: Any) -> Any:
    """An argument as rules expect it: summed, and with its history in the graph of parts."""
    if type(value) is torch.Tensor and not outlining.get():
        return open_plain(value)
    return _summed(value)


def _summed(value: Any) -> Any:
    """An argument; the separate copies of a tensor, a sum that is not computed yet, are summed."""
    if not isinstance(value, Tensor):
        return value
    layout = value._layout
    if layout.is_outside:
        raise _OutsideError
    if layout.separate and (summed := layout.summed) is not layout:
        return made(move(layout, summed).apply(value.local), summed)
    return value


_TORCHS = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "tensors": "input"}
_RENAMED = frozenset((*_TORCHS, "input"))


def beside(func: Any, types: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call a torch function on spread tensors and tensors of kinds that can be converted."""
    if any(each not in converters and not issubclass(Tensor, each) for each in types):
        check_not_nested(name_of(func), args, kwargs)
        return NotImplemented
    partition = _partition(args, kwargs)

    def convert(value: Any) -> Any:
        known = converters.get(type(value))
        return value if known is None else known(value, partition)

    name = name_of(func)
    if name == "grad":  # its inputs must be the same tensors that its outputs were computed from
        return above(func, args, kwargs)
    if is_in_place(name) and type(args[0]) in converters:
        raise TypeError(
            f"`{name}` would write a spread tensor into a {type(args[0]).__name__}; write y.local, "
            "the part of the spread tensor, after moving it to the layout of that tensor with "
            "y.move_to(...)"
        )
    return above(func, mapped(convert, args), mapped(convert, kwargs))


def below(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Call an operator for code that bypasses torch's functions; a part never counts as the whole.

    Autograd, if it is on, has the wrappers in its graph already: only values are computed here, by
    the rule of the operator's function, if there is one (`tensor/aten.py`).
    """
    name = func._schema.name.partition("::")[2]
    check_not_nested(name, args, kwargs)
    found = list(spread_among(args, kwargs))
    first = found[0]
    if any(functorch.is_functorch_wrapped_tensor(each._part) for each in found):
        # the inner transform is not there any more, and the outer one would not see the part
        why = "forward mode around another transform of torch.func (jvp of grad) is not supported"
        raise NotImplementedError(
            f"torch's `{name}` of a spread tensor: {why}; put the jvp inside, as in "
            f"grad(lambda x: jvp(f, (x,), (v,))[1])(x), or derive in backward mode"
        )
    if (
        name in _ALIASES
        and len(found) == 1
        and (len(args) < 2 or tuple(args[1]) == first._layout.shape)
    ):
        part = first._part.detach() if name == "detach" else first._part
        return Tensor(part, first._layout, records=False)
    if func._schema.is_mutable:
        why = (
            "it would change a spread tensor by code that bypasses torch's functions, such as "
            "torch.func.vmap and C++ code"
        )
        raise unsupported(name, why, *held_layouts(found))
    if "c10d" in func.namespace:  # its schemas do not mark operands that are written to
        return collective(f"collective {name}", func, args, kwargs)
    is_of_elements = torch.Tag.pointwise in func.tags
    with below_autograd():
        args, kwargs = mapped(of_values, args), mapped(of_values, kwargs)
        if name in _LIKE and len(found) == 1:
            result = made(func(*parts(args), **parts(kwargs)), first._layout)
        elif is_of_elements or (name in ELEMENTWISE and func.namespace == "aten"):
            result = follow(OF_ELEMENTS, func, args, kwargs)
        else:
            result = by_operator(func, args, kwargs)
        if result is NotImplemented:
            error = unsupported(name, "it has no rule", *held_layouts(found))
            result = without_rule(name, func, args, kwargs, error)
    if isinstance(result, tuple) and len(func._schema.returns) == 1:  # torch expects a list here
        return list(result)
    return result


_ALIASES = frozenset(
    ("alias", "view", "view_as", "detach", "_unsafe_view", "reshape", "lift_fresh")
)
_LIKE = frozenset(("zeros_like", "ones_like", "empty_like", "full_like", "clone", "_to_copy"))


Tensor.above = staticmethod(above)
Tensor.beside = staticmethod(beside)
Tensor.below = staticmethod(below)
