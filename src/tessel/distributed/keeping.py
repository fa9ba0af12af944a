"""Which mark a result has that torch computes from shards.

A function is looked up by its name. Where the shard's dimension of the result can be told, it is;
for everything else the result's mark is *unknown*, and says which function lost it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tessel import boxes
from tessel.distributed.mark import Mark, State, Unknown, state_of

Shape = tuple[int, ...]

# attributes and methods that give no tensor, or nothing of a tensor's values
QUESTIONS = frozenset(
    (
        *("shape", "size", "dim", "ndim", "numel", "nelement", "dtype", "device", "layout"),
        *("requires_grad", "is_leaf", "grad_fn", "stride", "is_contiguous", "is_cuda", "is_cpu"),
        *("element_size", "itemsize", "nbytes", "data_ptr", "storage_offset", "untyped_storage"),
        *("is_floating_point", "is_complex", "item", "tolist", "numpy", "__len__", "__bool__"),
        *("__repr__", "__format__", "__hash__", "__reduce_ex__", "register_hook", "retain_grad"),
        *("is_inference", "is_pinned", "is_shared", "get_device", "retains_grad", "is_set_to"),
        *("equal", "allclose", "is_same_size", "sparse_dim", "dense_dim", "_backward_hooks"),
        *("register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks"),
        *("output_nr", "_version", "names", "is_sparse", "is_meta", "is_nested", "is_quantized"),
    )
)

# functions of lists of tensors: those that treat each place by itself, and steps of optimizers
EACH = "_foreach_"
OF_LISTS = (EACH, "_fused_", "_amp_")

# what takes nothing but the shape or the dtype of its second argument
_LIKE_ANOTHER = frozenset(("to", "type_as", "view_as", "reshape_as", "expand_as"))


@dataclass(frozen=True)
class Call:
    """A call of a torch function, with what its tensors were before it."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    shapes: tuple[Shape, ...]
    states: tuple[State, ...]

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        found = tuple(tensors_in(args[:1] if name in _LIKE_ANOTHER else (args, kwargs)))
        shapes = tuple(tuple(each.shape) for each in found)
        return cls(name, args, kwargs, found, shapes, tuple(map(state_of, found)))

    @cached_property
    def base(self) -> str:
        """The name of the function, of which this may be an operator or an in-place version."""
        return plain_name(self.name)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by its position or by one of its names."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def rest(self, position: int, *names: str) -> tuple[Any, ...]:
        """All arguments from a position on, which may also be given as one sequence."""
        given = self.args[position:] or tuple(self.kwargs[n] for n in names if n in self.kwargs)
        sequence = len(given) == 1 and isinstance(given[0], tuple | list)
        return tuple(given[0]) if sequence else given

    @property
    def subject(self) -> tuple[Mark, Shape] | None:
        """The mark and the shape of the first argument, if it is the only tensor with a mark."""
        first = self.args[0] if self.args else self.kwargs.get("input")
        shards = [k for k, state in enumerate(self.states) if state is not None]
        if len(shards) != 1 or self.tensors[shards[0]] is not first:
            return None
        mark = self.states[shards[0]]
        assert isinstance(mark, Mark)
        return mark, self.shapes[shards[0]]

    def lost(self, why: str = "") -> Unknown:
        """The state of a result of which this function does not tell what it is."""
        marks = (state for state in self.states if isinstance(state, Mark))
        return Unknown(self.name, why, next((mark.partition for mark in marks), None))


Rule = Callable[[Call, Mark, Shape, Tensor], State]


def common_mark(name: str, args: tuple[Any, ...], kwargs: Any) -> Mark | None:
    """The mark of the result of the most frequent calls; None for all others, which `Call` tells.

    These are pointwise functions of shards with one mark and one shape, and of values beside them
    that need no gradient.
    """
    if not _is_always_pointwise(name) or type(state_of(args[0] if args else None)) is not Mark:
        return None
    mark, shape, derives = state_of(args[0]), args[0].shape, torch.is_grad_enabled()
    for each in args[1:]:
        if isinstance(each, Tensor):
            state = state_of(each)
            if each.shape != shape and (each.ndim or state is not None):
                return None
            if state is None:
                if derives and each.requires_grad:
                    return None
            elif state is not mark and state != mark:
                return None
        elif isinstance(each, tuple | list):
            return None
    if kwargs and any(isinstance(each, Tensor | tuple | list) for each in kwargs.values()):
        return None
    assert isinstance(mark, Mark)
    return mark


@lru_cache(maxsize=1024)
def _is_always_pointwise(name: str) -> bool:
    """Whether a function of this name is pointwise, whatever arguments it has."""
    base = plain_name(name)
    several = base in _REDUCTIONS or base in _OF_SEVERAL or base in ("where", "data", "set")
    return is_pointwise(base) and not several


def state_after(call: Call, result: Tensor) -> State:
    """The state of a result of a call."""
    known = [state for state in call.states if state is not None]
    lost = next((state for state in known if isinstance(state, Unknown)), None)
    if lost is not None or not known:
        return lost
    if call.base in _OF_SEVERAL:
        return _OF_SEVERAL[call.base](call, result)
    if is_pointwise(call.base) and not _is_other(call):
        return _pointwise(call, result)
    rule, subject = _RULES.get(call.base), call.subject
    if rule is None or subject is None:
        return call.lost()
    return rule(call, *subject, result)


def targets(call: Call) -> tuple[Tensor, ...]:
    """The tensors that a call writes into."""
    operator = call.name.startswith("__")
    if "out" in call.kwargs:
        return tuple(tensors_in(call.kwargs["out"]))
    if operator and not (call.name == "__setitem__" or call.name.startswith("__i")):
        return ()
    if operator or call.name.endswith("_"):
        return tuple(tensors_in(call.args[:1]))
    return ()


def state_after_writing(call: Call) -> Mark | Unknown:
    """The state of a tensor of which `x[index] = value` has changed a part."""
    target, index, value = call.args
    state, written = state_of(target), state_of(value)
    assert state is not None
    if isinstance(state, Unknown):
        return state
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim == target.ndim:
        return state if written is None and state_of(index) == state else call.lost("by a mask")
    part = _item(call, state, tuple(target.shape), target)
    if isinstance(part, Unknown) or written is None:
        return part if isinstance(part, Unknown) else state
    ndim = target[index].ndim
    if isinstance(written, Mark):
        written = written.at(written.dim + ndim - value.ndim)
    return state if part == written else call.lost("of a value with another mark")


def state_after_replacing(call: Call, is_parameter: bool) -> State:
    """The state of a tensor that took the values of another, `x.set_(y)` or `x.data = y`.

    A parameter takes values of its own shape for what it was, unless these say otherwise.
    """
    target = call.args[0]
    old, given = state_of(target), state_of(call.argument(1, "source"))
    if is_parameter and tuple(target.shape) == call.shapes[0]:
        merges = isinstance(old, Mark) and isinstance(given, Mark) and old.merged(given) is not None
        return old if merges or not isinstance(given, Mark) else given
    if old is None or isinstance(given, Mark):
        return given
    return given or call.lost("of another tensor")


def marks_of_each(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[State]:
    """The marks of the results of a pointwise function of lists, in their order.

    Nothing where tensors at one place have different marks or shapes, which `Call` tells.
    """
    if torch.is_grad_enabled() or any(map(tensors_in, kwargs.values())):
        return []
    inner, first = name.removeprefix(EACH), args[0]
    states = [state_of(each) for each in first]
    if not _is_always_pointwise(inner) or any(isinstance(state, Unknown) for state in states):
        return []
    for given in args[1:]:
        if isinstance(given, Tensor) and (given.ndim or state_of(given) is not None):
            return []
        if not isinstance(given, tuple | list):
            continue
        for own, state, each in zip(first, states, given, strict=True):
            if isinstance(each, Tensor) and not _lies_on(each, own, state):
                return []
    return states


def _lies_on(x: Tensor, other: Tensor, mark: State) -> bool:
    """Whether a tensor has the shape of another, and its mark or none."""
    state = state_of(x)
    return x.shape == other.shape and (state is mark or state is None or state == mark)


def calls_of_each(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Call]:
    """What a function of lists does at each place where there is a mark."""
    length = len(args[0])

    def at(value: Any, k: int) -> Any:
        return value[k] if isinstance(value, tuple | list) and len(value) == length else value

    calls = {
        k: Call.of(
            name.removeprefix(EACH),
            tuple(at(value, k) for value in args),
            {key: at(value, k) for key, value in kwargs.items()},
        )
        for k in range(length)
    }
    return {k: call for k, call in calls.items() if any(s is not None for s in call.states)}


def check_target(call: Call) -> None:
    """Raise if a function would write shards into a tensor that does not say what it is then.

    A tensor that has its memory for itself becomes a shard; a view, or one that has views, cannot.
    """
    if not any(map(_is_of_several, call.states)):
        return
    for each in () if fills_by_mask(call) else targets(call):
        if state_of(each) is None and (call.name == "__setitem__" or not is_own(each)):
            raise ValueError(
                f"`{call.name}` writes a shard into a tensor that is not marked as one; mark that "
                f"first: x = tessel.register_parallel_dim(x, dim)"
            )


def fills_by_mask(call: Call) -> bool:
    """Whether `x[mask] = number` writes, by a mask that is a shard, into a plain tensor beside it.

    This is `x.masked_fill_(mask, number)`, and `x` becomes a shard as it does there.
    """
    if call.name != "__setitem__":
        return False
    target, mask, value = call.args
    if not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == target.shape):
        return False
    number = not isinstance(value, Tensor) or (value.ndim == 0 and state_of(value) is None)
    return number and isinstance(state_of(mask), Mark) and is_own(target)


def _is_of_several(state: State) -> bool:
    """Whether a tensor with this state is, or may be, a shard of more than one worker."""
    return state is not None and (state.partition is None or state.partition.size > 1)


def is_own(x: Tensor) -> bool:
    """Whether a tensor is a plain one, of whose memory no other tensor has a part."""
    if type(x) is not Tensor or x.layout is not torch.strided:
        return False
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2  # its own, and this


def is_property(func: Any) -> bool:
    """Whether this is how an attribute of a tensor is read or written."""
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


@lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """The name of a torch function, or of the attribute that it reads."""
    if is_property(func):
        return str(getattr(func.__self__, "__name__", "an attribute"))
    return str(getattr(func, "__name__", func))


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in arguments, also in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        return []
    found: list[Tensor] = []
    for each in value:
        found += tensors_in(each)
    return found


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same arguments with another tensor for each."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped(function, each) for each in value)
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    return value


_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pos": "positive",
    "invert": "bitwise_not",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}


@lru_cache(maxsize=1024)
def plain_name(name: str) -> str:
    """The name of a function without what makes it an operator or one that works in place."""
    if not (name.startswith("__") and name.endswith("__")):
        return name.removesuffix("_")
    inner = name[2:-2]
    for known in (inner, inner[1:] if inner[:1] in "ri" else inner):
        known = _OPERATORS.get(known, known)
        if is_pointwise(known):
            return known
    return "matmul" if inner == "matmul" else name


@lru_cache(maxsize=1024)
def is_pointwise(name: str) -> bool:
    """Whether a torch function of this name treats each element on its own."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = () if packet is None else packet.overloads()
    tagged = any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)
    return name in _ALSO_POINTWISE or tagged


_ALSO_POINTWISE = frozenset(
    (
        *("hardswish", "leaky_relu", "softsign", "tanhshrink", "log_sigmoid", "threshold"),
        *("multiply", "subtract", "divide", "true_divide", "floor_divide", "dropout", "relu6"),
        *("alpha_dropout", "masked_fill", "where", "lerp", "bernoulli", "nan_to_num", "clip"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        *("clone", "contiguous", "detach", "alias", "requires_grad_", "requires_grad", "data"),
        *("to", "type", "type_as", "cpu", "cuda", "pin_memory", "float", "double", "half"),
        *("bfloat16", "int", "long", "short", "char", "byte", "bool", "cfloat", "cdouble"),
        *("real", "imag", "conj", "resolve_conj", "resolve_neg", "fill", "zero", "copy"),
        *("greater", "greater_equal", "less", "less_equal", "not_equal", "_threshold"),
        *("_make_dual", "_unpack_dual", "_fw_primal"),
        *("normal", "uniform", "exponential", "isclose", "celu", "selu", "rrelu"),
    )
)


def _is_other(call: Call) -> bool:
    """Whether `max` and the like reduce one tensor, or `where` gives the places of its values."""
    if call.base == "where":
        return len(call.args) + len(call.kwargs) == 1
    return call.base in _REDUCTIONS and len(call.tensors) == 1


def _pointwise(call: Call, result: Tensor) -> State:
    """Marks count from the last dimension, as broadcasting does."""
    found: Mark | None = None
    for mark, shape in _marks(call):
        dim = mark.dim + result.ndim - len(shape)
        if not 0 <= dim < result.ndim or result.shape[dim] != shape[mark.dim]:
            return call.lost("as it broadcasts the split dimension")
        found = mark.at(dim) if found is None else found.merged(mark.at(dim))
        if found is None:
            return call.lost("of shards along different dimensions, sizes or workers")
    return found


def _marks(call: Call) -> Iterator[tuple[Mark, Shape]]:
    for state, shape in zip(call.states, call.shapes, strict=True):
        if isinstance(state, Mark):
            yield state, shape


def _numbers(dims: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions as the user names them, counted from the front; None for all of them."""
    if dims is None:
        return tuple(range(ndim))
    given = dims if isinstance(dims, Iterable) else (dims,)
    return tuple(int(each) % max(ndim, 1) for each in given)


def _reduction(position: int = 1, default: Any = None) -> Rule:
    """Of a function that makes one number of all along some dimensions."""

    def rule(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
        given = call.argument(position, "dim", "axis", default=default)
        if isinstance(given, bool) or (isinstance(given, tuple | list) and not given):
            given = None  # no dimensions are all of them
        dims = _numbers(given, len(shape))
        if mark.dim in dims:
            return call.lost("over the dimension that is split")
        kept = result.ndim == len(shape)
        return mark if kept else mark.at(mark.dim - sum(dim < mark.dim for dim in set(dims)))

    return rule


def _along(position: int = 1, default: Any = None) -> Rule:
    """Of a function that works along some dimensions, and leaves their number as it is."""

    def rule(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
        given = call.argument(position, "dim", "dims", "axis", default=default)
        if mark.dim in _numbers(given, len(shape)):
            return call.lost("along the dimension that is split")
        return mark

    return rule


def _flip(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    if mark.dim in _numbers(call.rest(1, "dims"), len(shape)):
        return call.lost("along the dimension that is split")
    return mark


def _last(count: int) -> Rule:
    """Of a function that works along the last dimensions, as many as `count`."""

    def rule(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
        if mark.dim >= len(shape) - count:
            return call.lost("along the dimension that is split")
        return mark

    return rule


def _normalized(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    return _last(len(call.argument(1, "normalized_shape")))(call, mark, shape, result)


def _permuted(order: Iterable[int], mark: Mark) -> Mark:
    return mark.at(list(order).index(mark.dim))


def _permute(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    return _permuted(_numbers(call.rest(1, "dims"), len(shape)), mark)


def _transpose(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    first = call.argument(1, "dim0", "axis0")
    second = call.argument(2, "dim1", "axis1")
    return _swapped(mark, len(shape), first, second)


def _swapped(mark: Mark, ndim: int, first: int, second: int) -> Mark:
    order = list(range(ndim))
    order[first], order[second] = order[second], order[first]
    return _permuted(order, mark)


def _t(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    return mark if len(shape) < 2 else mark.at(1 - mark.dim)


def _reversed(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    return mark.at(len(shape) - 1 - mark.dim)


def _matrix_transpose(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    return _swapped(mark, len(shape), -2, -1)


def _movedim(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    source = _numbers(call.argument(1, "source"), len(shape))
    target = _numbers(call.argument(2, "destination"), len(shape))
    places = dict(zip(target, source, strict=True))
    others = iter(dim for dim in range(len(shape)) if dim not in source)
    return _permuted([places[k] if k in places else next(others) for k in range(len(shape))], mark)


def _unsqueeze(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    dim = int(call.argument(1, "dim")) % result.ndim
    return mark.at(mark.dim + (dim <= mark.dim))


def _squeeze(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    given = call.rest(1, "dim") or None
    dims = [dim for dim in _numbers(given, len(shape)) if shape[dim] == 1]
    if mark.dim in dims:
        return call.lost("of the dimension that is split")
    return mark.at(mark.dim - sum(dim < mark.dim for dim in dims))


def _expand(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    dim = mark.dim + result.ndim - len(shape)
    if result.shape[dim] != shape[mark.dim]:
        return call.lost("of the dimension that is split")
    return mark.at(dim)


def _repeat(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    times = call.rest(1, "repeats", "dims")
    dim = mark.dim + result.ndim - len(shape)
    place = dim - result.ndim + len(times)
    if place >= 0 and times[place] != 1:
        return call.lost("of the dimension that is split")
    return mark.at(dim)


def _removed(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    """Of a function that takes something out of one dimension, which is gone then."""
    dim = _numbers(call.argument(1, "dim", default=0), len(shape))[0]
    if dim == mark.dim:
        return call.lost("along the dimension that is split")
    return mark.at(mark.dim - (dim < mark.dim))


def _item(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    """Indexing by numbers, slices, None and `...`, of which the split dimension stays whole."""
    index = call.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if any(
        not (each is None or each is ... or isinstance(each, Integral | slice)) for each in items
    ):
        return call.lost("by an index other than numbers and slices")
    if any(isinstance(each, bool) for each in items):
        return call.lost("by a truth value")
    if not any(each is ... for each in items):
        items.append(...)
    used = sum(each is not None and each is not ... for each in items)
    where = next(k for k, each in enumerate(items) if each is ...)
    items[where : where + 1] = [slice(None)] * (len(shape) - used)
    source = target = 0
    for each in items:
        if source == mark.dim and each is not None:
            whole = isinstance(each, slice) and each in (slice(None), slice(None, None, 1))
            return mark.at(target) if whole else call.lost("of a part of the split dimension")
        source += each is not None
        target += not isinstance(each, Integral)
    return call.lost()


def _reshape(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    """Dimensions beside the split one may change; it may be split and merged as the outer one."""
    if any(isinstance(each, torch.dtype) for each in call.args[1:]) and result.shape != shape:
        return call.lost("to a dtype of another width")
    new = tuple(result.shape)
    regrouped = _regrouped_one if shape[mark.dim] == 1 else _regrouped
    known, sizes = regrouped(call, mark, shape, new), call.rest(1, "shape", "size")
    if isinstance(known, Mark) or -1 not in sizes:
        return known
    return _inferred(call, mark, shape, new, sizes.index(-1))


def _flatten(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    """The split dimension may be the outer one of those that merge."""
    start, stop = (
        int(call.argument(position, name, default=default)) % len(shape)
        for position, name, default in ((1, "start_dim", 0), (2, "end_dim", -1))
    )
    if not start <= mark.dim <= stop:
        return mark.at(mark.dim - (stop - start) * (mark.dim > stop))
    if prod(shape[start : mark.dim]) != 1:
        return call.lost("with dimensions before the one that is split")
    return _resized(mark.at(start), prod(shape[mark.dim + 1 : stop + 1]), 1)


def _regrouped_one(call: Call, mark: Mark, shape: Shape, new: Shape) -> State:
    """A split dimension of length 1 could go anywhere, unless it stays among as many ones."""
    start = mark.dim - _ones_before(shape, mark.dim)
    stop = mark.dim + 1 + _ones_before(shape[::-1], len(shape) - 1 - mark.dim)
    behind = len(shape) - start
    if shape[:stop] == new[:stop] and new[stop : stop + 1] != (1,):
        return mark
    if shape[start:] == new[-behind:] and new[-behind - 1 : -behind] != (1,):
        return mark.at(mark.dim + len(new) - len(shape))
    return call.lost("where the split dimension may be one or another")


def _inferred(call: Call, mark: Mark, shape: Shape, new: Shape, place: int) -> State:
    """The split dimension goes where the length is left open: numbers are the same on all workers.

    So shards that are 1 long, on some workers or on all, go where longer ones go.
    """
    lead = _common(shape[: mark.dim], new[:place])
    before, inner = prod(shape[lead : mark.dim]), prod(shape[mark.dim + 1 :])
    unit = any(new[dim] == 1 and prod(new[lead:dim]) == before for dim in range(lead, place))
    if unit or prod(new[lead:place]) != before:
        return call.lost("where the split dimension may be one or another")
    return _resized(mark.at(place), inner, prod(new[place + 1 :]))


def _regrouped(call: Call, mark: Mark, shape: Shape, new: Shape) -> State:
    """Where all dimensions up to the split one are as before, or all from it on, so is that."""
    after, place = mark.dim + 1, mark.dim + len(new) - len(shape)
    found = set()
    if shape[:after] == new[:after] and prod(shape[after:]) == prod(new[after:]):
        found.add(mark.dim)
    ahead = place >= 0 and prod(shape[: mark.dim]) == prod(new[:place])
    if ahead and shape[mark.dim :] == new[place:]:
        found.add(place)
    if len(found) == 1 and not _may_be_outer(mark, shape, new, max(found)):
        return mark.at(found.pop())
    if found:
        return call.lost("where the split dimension may be one or another")
    lead, trail = _common(shape[: mark.dim], new), _common(shape[: mark.dim : -1], new[::-1])
    old, rest = shape[lead : len(shape) - trail], new[lead : len(new) - trail]
    if 0 in old[: mark.dim - lead] + old[mark.dim - lead + 1 :]:
        return call.lost("of an empty tensor")
    moved = _rescaled(call, mark.at(mark.dim - lead), old, rest)
    return moved.at(moved.dim + lead) if isinstance(moved, Mark) else moved


def _common(some: Shape, others: Shape) -> int:
    """How many of the first lengths are equal."""
    pairs = zip(some, others, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))


def _may_be_outer(mark: Mark, shape: Shape, new: Shape, place: int) -> bool:
    """Whether a new dimension of length 1 may be the outer one of two, split over workers."""
    appeared = _ones_before(new, place) > _ones_before(shape, mark.dim)
    inner = shape[mark.dim]
    if not appeared or mark.size is None or not inner:
        return appeared
    size = mark.size / inner
    return size.is_integer() and _aligned(mark, 1, int(size), inner)


def _ones_before(shape: Shape, place: int) -> int:
    count = 0
    while count < place and shape[place - 1 - count] == 1:
        count += 1
    return count


def _rescaled(call: Call, mark: Mark, shape: Shape, new: Shape) -> State:
    """The split dimension is the outer one of those that merge, and of those into which it goes."""
    before, inner = prod(shape[: mark.dim]), prod(shape[mark.dim + 1 :])
    begin = [dim for dim in range(len(new)) if prod(new[:dim]) == before]
    empty = shape[mark.dim] == 0
    places = [dim for dim in begin if (new[dim] == 0 if empty else new[dim] != 1)]
    unit = not empty and any(new[dim] == 1 for dim in begin)
    if len(places) != 1 or unit:
        return call.lost("where the split dimension may be one or another")
    return _resized(mark.at(places[0]), inner, prod(new[places[0] + 1 :]))


def _resized(mark: Mark, inner: int, new_inner: int) -> Mark:
    """The mark of a dimension that was merged with what it contains, or split from it.

    Where balanced parts of the one are not those of the other, the size is not told.
    """
    if mark.size is None:
        return mark
    size = mark.size * inner / max(new_inner, 1)
    aligned = size.is_integer() and _aligned(mark, inner, int(size), new_inner)
    return Mark(mark.dim, mark.partition, int(size) if aligned else None)


def _aligned(mark: Mark, inner: int, size: int, new_inner: int) -> bool:
    """Whether balanced parts of one length begin where those of the other do."""
    assert mark.size is not None
    parts = mark.partition.size
    old, new = boxes.balanced(mark.size, parts), boxes.balanced(size, parts)
    return [a * inner for a, _ in old] == [a * new_inner for a, _ in new]


def _unflatten(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    dim = int(call.argument(1, "dim")) % len(shape)
    if dim != mark.dim:
        return mark.at(mark.dim + (result.ndim - len(shape)) * (dim < mark.dim))
    inner: int = prod(result.shape[dim + 1 : dim + 1 + result.ndim - len(shape)])
    return _resized(mark, 1, inner)


def _weight_norm(call: Call, result: Tensor) -> State:
    """Rows of a weight, each with a norm of its own, may be split."""
    state, of_norm = call.states[:2]
    dim = int(call.argument(2, "dim", default=0))
    if not isinstance(state, Mark) or of_norm not in (None, state) or state.dim != dim:
        return call.lost("over the dimension that is split")
    return state


def _norm_except(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    dim = int(call.argument(2, "dim", default=0))
    return mark if dim == mark.dim else call.lost("over the dimension that is split")


def _new(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    return mark if tuple(result.shape) == shape else call.lost()


def _channels(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    """Of a function that draws one number for each channel, and so for all that lies behind."""
    if mark.dim >= 2:
        return call.lost("behind the channels")
    return mark


def _pad(call: Call, mark: Mark, shape: Shape, result: Tensor) -> State:
    widths = call.argument(1, "pad")
    first = 2 * (len(shape) - 1 - mark.dim)
    if any(widths[first : first + 2]):
        return call.lost("along the dimension that is split")
    return mark


def _linear(call: Call, result: Tensor) -> State:
    """Either the rows of the input are split, or the outputs of the weight."""
    if call.subject is not None:
        mark, shape = call.subject
        return call.lost("over the dimension that is split") if mark.dim == len(shape) - 1 else mark
    x, weight, bias = (
        state_of(call.argument(k, name)) for k, name in enumerate(("input", "weight", "bias"))
    )
    if x is None and isinstance(weight, Mark) and weight.dim == 0 and bias in (None, weight):
        return weight.at(result.ndim - 1)
    return call.lost()


def _matmul(call: Call, result: Tensor) -> State:
    """Rows of the left, columns of the right, and the batch of both may be split."""
    found: Mark | None = None
    for number, (shape, state) in enumerate(zip(call.shapes, call.states, strict=True)):
        if not isinstance(state, Mark):
            continue
        left = number == 0
        summed = len(shape) - (1 if left or len(shape) == 1 else 2)
        if min(map(len, call.shapes)) < 2 or state.dim == summed or len(call.tensors) != 2:
            return call.lost("over the dimension that is split")
        mark = state.at(state.dim + result.ndim - len(shape))
        if result.shape[mark.dim] != shape[state.dim]:
            return call.lost("as it broadcasts the split dimension")
        found = mark if found is None else found.merged(mark)
        if found is None:
            return call.lost("of shards along different dimensions, sizes or workers")
    return found


def _attention(call: Call, result: Tensor) -> State:
    """All of query, key and value are shards along one dimension of the batch or the heads."""
    states, shapes = call.states[:3], call.shapes[:3]
    found = states[0]
    if any(not isinstance(state, Mark) or state != found for state in states):
        return call.lost("whose query, key and value are not shards along one dimension")
    assert isinstance(found, Mark)
    if any(found.dim >= len(shape) - 2 for shape in shapes):
        return call.lost("over the dimension that is split")
    if any(state is not None for state in call.states[3:]):
        return call.lost("whose mask is a shard")
    return found


def _joined(call: Call, result: Tensor) -> State:
    """Shards, all alike, one after the other along another dimension."""
    found = call.states[0]
    if not isinstance(found, Mark) or any(state != found for state in call.states):
        return call.lost("of tensors that are not shards along one dimension")
    new = call.base == "stack"
    ndim = len(call.shapes[0]) + new
    dim = int(call.argument(1, "dim", default=0)) % ndim
    if new:
        return found.at(found.dim + (dim <= found.dim))
    return call.lost("along the dimension that is split") if dim == found.dim else found


def _loaded(call: Call, result: Tensor) -> State:
    """A parameter is given values of its own shape, and stays what it is."""
    if len(set(call.shapes)) > 1:
        return call.lost()
    old, given = call.states
    if isinstance(old, Mark) and isinstance(given, Mark):
        return old.merged(given) or call.lost("of a value with another mark")
    return old or given


_REDUCTIONS = frozenset(
    (
        *("sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin"),
        *("var", "std", "var_mean", "std_mean", "logsumexp", "median", "nanmedian", "mode"),
        *("nansum", "nanmean", "count_nonzero"),
    )
)
_OF_SEVERAL: dict[str, Callable[[Call, Tensor], State]] = {
    "linear": _linear,
    "matmul": _matmul,
    "bmm": _matmul,
    "mm": _matmul,
    "cat": _joined,
    "concat": _joined,
    "stack": _joined,
    "scaled_dot_product_attention": _attention,
    "_weight_norm": _weight_norm,
    "module_load": _loaded,
}
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCTIONS, _reduction()),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), _reduction(2)),
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), _along()),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), _along()),
    **dict.fromkeys(("narrow", "index_select"), _along()),
    **dict.fromkeys(("sort", "argsort", "glu"), _along(default=-1)),
    **dict.fromkeys(("split", "chunk", "tensor_split"), _along(2, default=0)),
    **dict.fromkeys(("roll", "repeat_interleave"), _along(2)),
    **dict.fromkeys(("topk",), _along(2, default=-1)),
    **dict.fromkeys(("normalize",), _along(2, default=1)),
    **dict.fromkeys(("tril", "triu"), _last(2)),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("mT", "mH", "adjoint"), _matrix_transpose),
    **dict.fromkeys(("T", "H"), _reversed),
    **dict.fromkeys(("movedim", "moveaxis"), _movedim),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(("select", "unbind"), _removed),
    **dict.fromkeys(("kthvalue",), _reduction(2, default=-1)),
    **dict.fromkeys(("reshape", "view", "reshape_as", "view_as"), _reshape),
    **dict.fromkeys(("flatten", "ravel"), _flatten),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _new),
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), _channels),
    "feature_alpha_dropout": _channels,
    "permute": _permute,
    "flip": _flip,
    "t": _t,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "unflatten": _unflatten,
    "__getitem__": _item,
    "pad": _pad,
    "norm_except_dim": _norm_except,
}
