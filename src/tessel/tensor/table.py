"""The table: what torch's functions do with spread tensors.

A rule determines which layouts of the operands it needs, what is computed on the parts, and the
layout of the result. All movements are `Move`s, so every derivative is correct by construction. A
rule decides everything by layouts and plain values, which are the same on all workers: so they make
the same movements in the same order, and need not agree on anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from copy import copy
from functools import lru_cache
from inspect import signature
from types import FunctionType, MethodDescriptorType
from typing import Any

import torch

from tessel.core.layout import Layout, Shape
from tessel.core.linop import is_derived
from tessel.core.numbers import to_keep
from tessel.core.partition import Partition
from tessel.core.shared import anchored_zeros, shared_whole, used
from tessel.tensor.tensor import Tensor, made, move, open_part, opened  # noqa: F401
from tessel.tensor.windowed import outline

Arguments = tuple[Any, ...]
Settings = dict[str, Any]
Rule = Callable[[str, Any, Arguments, Settings], Any]

RULES: dict[str, Rule] = {}
FOUND: dict[Any, tuple[str, Rule]] = {}  # the names and rules of torch functions called before
PLAIN: set[str] = set()  # names of functions whose rules take a plain tensor as the first argument

# the workers of the converted model that is running
running: ContextVar[Partition | None] = ContextVar("running", default=None)

# whether a rule is followed on a worker without values
outlining: ContextVar[bool] = ContextVar("outlining", default=False)


def in_backward() -> bool:
    """Whether a backward pass is running, in which a checkpoint may recompute."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether a checkpoint is running, which will recompute the current calls."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")


def rule(*names: str, plain: bool = False) -> Callable[[Rule], Rule]:
    """Enter a rule for the torch functions of these names.

    Its first argument is a spread tensor, or a list with one; a plain tensor is first made a shared
    one, unless `plain` says that the rule accepts it.

    The name of a method, a function or an operator is its `__name__`; that of a property has `get`
    or `set` before it.
    """

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        PLAIN.update(names if plain else ())
        FOUND.clear()
        return function

    return enter


class UnsupportedError(NotImplementedError):
    """A function has no rule for the layouts of its operands."""


def unsupported(name: str, why: str, *layouts: Layout) -> UnsupportedError:
    """The error to raise for a function without a rule for these layouts."""
    held = ", ".join(map(str, layouts))
    place = "in a converted model" if running.get() is not None else "of a spread tensor"
    return UnsupportedError(
        f"torch's `{name}` {place}: {why}, got {held}; gather the tensor first with x.full(), use "
        "a layer of `tessel.nn`, or call it outside of the model"
    )


def check_not_nested(name: str, *values: Any) -> None:
    """Raise if any tensor is nested (`torch.nested`)."""
    if any(each.is_nested for each in tensors(*values)):
        raise NotImplementedError(
            f"torch's `{name}` of a spread tensor: nested tensors (torch.nested) have no shape "
            "that a layout could split; use padded tensors and a mask, or gather the spread "
            "tensor first with x.full()"
        )


def tensors(*values: Any) -> Iterator[torch.Tensor]:
    """All tensors in arguments, including those in lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(*value)
        elif isinstance(value, dict):
            yield from tensors(*value.values())


def spread_among(*values: Any) -> Iterator[Tensor]:
    """The spread tensors among arguments."""
    return (each for each in tensors(*values) if isinstance(each, Tensor))


def held_layouts(*values: Any) -> list[Layout]:
    """The layouts of all spread tensors among the arguments."""
    return [each._layout for each in spread_among(*values)]


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Map the members of nested lists, tuples and dictionaries, and of subclasses of these."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([mapped(change, each) for each in value])
    if kind is dict:
        return {name: mapped(change, each) for name, each in value.items()}
    if isinstance(value, list | tuple | dict) and kind is not torch.Size:
        old = list(value.values() if isinstance(value, dict) else value)
        new = [mapped(change, each) for each in old]
        # objects without changed members stay as they are, whatever their class
        same = all(a is b for a, b in zip(old, new, strict=True))
        return value if same else with_members(value, new)
    return change(value)


def with_members(value: Any, members: list[Any]) -> Any:
    """A copy of a list, tuple or dictionary, with its class and attributes, but other members.

    A class may have a constructor with any arguments, so instances are not made by calling it.
    """
    new: Any
    if isinstance(value, tuple):
        kind = type(value)
        if hasattr(kind, "n_sequence_fields"):  # one of torch's own, such as the result of `max`
            return kind(members)
        new = tuple.__new__(kind, members)
        if hasattr(value, "__dict__"):
            new.__dict__.update(value.__dict__)
        return new
    new = copy(value)
    if isinstance(value, dict):
        for name, member in zip(value, members, strict=True):
            dict.__setitem__(new, name, member)
    else:
        list.__setitem__(new, slice(None), members)
    return new


def named(args: Arguments, kwargs: Settings, **defaults: Any) -> Settings:
    """The arguments after the first by name, in the order and with the defaults given."""
    return {**defaults, **dict(zip(defaults, args[1:], strict=False)), **kwargs}


def check_fits(shape: Shape, other: Shape) -> None:
    """Raise, as torch does, if a change in place by an operand would make a tensor longer."""
    pairs = zip(reversed(other), reversed(shape), strict=False)
    if len(other) > len(shape) or any(n not in (1, m) for n, m in pairs):
        # raises torch's own error if they cannot be broadcast
        whole, _ = torch.broadcast_tensors(*(torch.zeros(()).expand(n) for n in (shape, other)))
        raise RuntimeError(
            f"output with shape {list(shape)} doesn't match the broadcast shape {list(whole.shape)}"
        )


def in_order(name: str, func: Any, args: Arguments, kwargs: Settings) -> tuple[Arguments, Settings]:
    """The same call with operands that are passed by name at their positions.

    Torch's functions in C++ accept either, and each rule would have to support both.
    """
    best = len(args)
    order: tuple[str, ...] = ()
    for names in _operands(name, func):  # the matching overload with the most operands
        stop = len(args)
        while stop < len(names) and names[stop] in kwargs:
            stop += 1
        if stop > best:
            best, order = stop, names
    if not order:
        return args, kwargs
    there = order[len(args) : best]
    rest = {key: each for key, each in kwargs.items() if key not in there}
    return (*args, *[kwargs[key] for key in there]), rest


@lru_cache(maxsize=1024)
def _operands(name: str, func: Any) -> tuple[tuple[str, ...], ...]:
    """The names of the tensors and numbers that come first, for each overload of a function."""
    if isinstance(func, FunctionType):  # Python functions order their operands themselves
        return ()
    found = []
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        names = []
        for each in schema.arguments:
            if each.kwarg_only or str(each.type) not in _OF_OPERANDS:
                break
            names.append("input" if each.name == "self" else each.name)
        if isinstance(func, MethodDescriptorType) and "input" in names:
            names.sort(key="input".__ne__)  # first, as in `x.where(condition, y)`
        found.append(tuple(names))
    return tuple(dict.fromkeys(found))


_OF_OPERANDS = frozenset(("Tensor", "Optional[Tensor]", "List[Tensor]", "number"))


@lru_cache(maxsize=64)
def _defaults(func: Any) -> Settings:
    """The arguments of a function in order, with their default values."""
    return {name: each.default for name, each in signature(func).parameters.items()}


def arguments_of(name: str, func: Any, args: Arguments, kwargs: Settings) -> Settings:
    """All arguments of a function of `torch.nn.functional` by name."""
    if func is not getattr(torch.nn.functional, name):
        raise unsupported(
            name,
            f"only torch.nn.functional.{name} is supported, and this function has other arguments",
            *held_layouts(args, kwargs),
        )
    defaults = _defaults(func)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def parts(value: Any) -> Any:
    """The arguments with spread tensors replaced by their parts."""
    return mapped(lambda each: open_part(each) if isinstance(each, Tensor) else each, value)


def computed(compute: Callable[[torch.Tensor], Any], part: torch.Tensor) -> Any:
    """Apply a differentiable function to a part; the result of an empty part depends on it.

    Torch's derivatives for empty tensors are constants in some cases. A worker whose graph or
    tangent ended there would skip exchanges that others make.
    """
    if part.numel() or not is_derived(part):
        return compute(part)
    result = compute(part.detach())
    if isinstance(result, torch.Tensor):
        return _attached(result, part)
    return type(result)([_attached(each, part) for each in result])


def try_values(compute: Callable[[torch.Tensor], Any], part: torch.Tensor, layout: Layout) -> None:
    """Raise torch's errors about values, such as unsupported dtypes, even if the part has none.

    Else only workers with values would raise, and the others would wait for them.
    """
    if not part.numel() and 0 not in layout.shape:
        with torch.no_grad():
            compute(part.new_ones([max(1, length) for length in part.shape]))


def _attached(result: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if result.is_floating_point() or result.is_complex():
        return anchored_zeros(tuple(result.shape), part).to(result.dtype)
    return result


def widened(x: torch.Tensor) -> torch.Tensor:
    """Half precision as float32, in which torch also sums and normalizes; others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def as_spread(value: torch.Tensor, partition: Partition) -> Tensor:
    """A tensor as a spread one; a plain tensor has the same values on all workers."""
    return (
        value if isinstance(value, Tensor) else Tensor(value, shared_whole(partition, value.shape))
    )


class ApartError(ValueError):
    """Tensors are on different workers or grids."""

    def __init__(self, name: str, layouts: Iterable[Layout | None]) -> None:
        held = ", ".join(str(each) for each in layouts if each is not None)
        super().__init__(
            f"`{name}` of tensors on different workers or grids: {held}; move them together with "
            "x.move_to(...)"
        )


def check_together(name: str, layouts: Sequence[Layout]) -> None:
    """Raise if tensors are on different workers or grids."""
    if any(each.partition != layouts[0].partition for each in layouts):
        raise ApartError(name, layouts)


def check_dtypes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise for different dtypes as torch does, also on workers that compute nothing."""
    with torch._C.DisableTorchFunctionSubclass():  # or reading each attribute is a call
        dtype = x.dtype
        if weight.dtype == dtype and (bias is None or bias.dtype == dtype):
            return
        if torch.is_autocast_enabled(x.device.type):
            return
        for name, each in (("weight", weight), ("bias", bias)):
            if each is not None and each.dtype != dtype:
                raise RuntimeError(
                    f"input and {name} must have the same dtype, got {x.dtype} and {each.dtype}"
                )


def as_autocast(x: torch.Tensor) -> torch.Tensor:
    """Cast to the dtype in which autocast, if it is on, computes products and convolutions.

    Torch does not cast where it computes nothing, and dtypes would differ between workers.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def check_whole(name: str, *values: Any) -> None:
    """Raise if operands that must be whole are split."""
    layouts = held_layouts(values)
    if not all(each.is_whole for each in layouts):
        raise unsupported(name, "all but its first argument must be whole", *layouts)


def whole_part(value: Any, x: Layout) -> Any:
    """All of a spread tensor as a plain one, as workers use the weights of layers.

    Args:
        value: a weight, or any other argument of the function, which is returned as it is.
        x: the layout of the input; the weight must be on the same workers.
    """
    if not isinstance(value, Tensor):
        return value
    layout = value._layout
    if {*layout.partition.ranks} != {*x.partition.ranks}:
        raise ValueError(
            f"the weight is on other workers than the input: {layout} and {x}; move one of them "
            "with x.move_to(...)"
        )
    return open_part(value) if layout.is_whole else value.full()


def moved(x: Tensor, target: Layout) -> torch.Tensor:
    """The part of a spread tensor after a move to another layout."""
    part = open_part(x)
    return part if x._layout == target else move(x._layout, target).apply(part)


def sliced(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This worker's part of a tensor that all workers have whole, to combine it with other parts.

    The tensor is broadcast against `layout`: its dimensions are the last ones.
    """
    part = used(value, layout)
    box = layout.box()
    assert part is not None and box is not None
    for dim in range(-value.dim(), 0):
        if value.shape[dim] > 1 and layout.is_split(dim):
            start, stop = box[dim]
            part = part.narrow(dim, start, stop - start)
    return part


def outlines(func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The result of a function for meta tensors of the global shapes; raises torch's own errors.

    It takes torch up to a millisecond for functions in Python: results of torch's functions are
    cached, since models call these again with the same shapes.
    """
    try:
        key = func, torch.get_default_dtype(), _known_by(args), _known_by(kwargs)
        result = _OUTLINES.get(key)
    except TypeError:  # a function or an argument that is not compared by value
        return _outlined(func, args, kwargs)
    if result is None:
        with to_keep():
            result = _outlined(func, args, kwargs)
        if func in FOUND:  # others may be closures of one call, and hold its tensors
            if len(_OUTLINES) >= _MOST_OUTLINES:
                _OUTLINES.clear()
            _OUTLINES[key] = result
    return result


_OUTLINES: dict[Any, Any] = {}
_MOST_OUTLINES = 4096
# types whose values are all that torch's functions read
_PLAIN_KINDS = frozenset(
    (
        *(int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device),
        *(torch.memory_format, torch.layout),
    )
)


def _known_by(value: Any) -> Any:
    """A key for the result without values; with types of numbers, since 1 equals 1.0."""
    kind = type(value)
    if kind is tuple or kind is list or kind is torch.Size:
        return kind, tuple([_known_by(each) for each in value])
    if kind is dict:
        return tuple([(name, _known_by(each)) for name, each in value.items()])
    if kind in _PLAIN_KINDS:
        return kind, value
    if isinstance(value, torch.Tensor):
        return _shape_and_dtype(value)
    raise TypeError(f"a {kind.__name__} cannot be compared by its value")


def _shape_and_dtype(x: torch.Tensor) -> tuple[Shape, torch.dtype]:
    with torch._C.DisableTorchFunctionSubclass():
        return x._layout.shape if isinstance(x, Tensor) else tuple(x.shape), x.dtype


def _outlined(func: Any, args: Arguments, kwargs: Settings) -> Any:
    def outlined(value: Any) -> Any:
        return outline(*_shape_and_dtype(value)) if isinstance(value, torch.Tensor) else value

    return func(*mapped(outlined, args), **mapped(outlined, kwargs))
