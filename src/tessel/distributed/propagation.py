"""Propagation: the sharding of results that torch computes from shards, by the table of rules.

A shard computes as any tensor does, with the part of one worker. Whether the result is this
worker's part of the function of the whole tensors is decided by the table of `tessel.tensor`: its
rule is tried on random numbers in their place (`tessel.distributed.trial`). If the rule does the
same to a part as the function, the result is a shard, and the layout tells along which dimension;
if the rule would send something, or does something else, the sharding is lost.

The table is not used for three things, which mean something else for a shard than for a spread
tensor: the lengths given to a shard are those of this worker (`tessel.distributed.regrouping`),
plain tensors combined with it may be parts as well, and random numbers are each worker's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tessel.distributed.regrouping import flattened, reshaped, unflattened
from tessel.distributed.shardings import Sharding, State, UnknownSharding, state_of
from tessel.distributed.torch_call import (
    EACH,
    Shape,
    TorchCall,
    is_pointwise,
    plain_name,
    targets,
    tensors_in,
)
from tessel.distributed.trial import layouts_after

EXTREMA = ("max", "min")  # pointwise for two tensors, reductions for one

# The state of one result: for calls on one shard, and for calls on several tensors.
_RULES: dict[str, Callable[[TorchCall, Sharding, Shape, Tensor], State]] = {}
_OF_SEVERAL: dict[str, Callable[[TorchCall, Tensor], State]] = {}


def _rule(rules: dict[str, Any], *names: str) -> Callable[[Callable[..., State]], Any]:
    """Register a function as the rule of these torch functions."""
    return lambda function: rules.update(dict.fromkeys(names, function)) or function


def common_sharding(name: str, args: tuple[Any, ...], kwargs: Any) -> Sharding | None:
    """The sharding of the result of the most frequent calls; None for others, see `TorchCall`.

    These are pointwise functions of shards with one sharding and one shape, and of plain values
    that need no gradient.
    """
    if not is_always_pointwise(name) or type(state_of(args[0] if args else None)) is not Sharding:
        return None
    sharding, shape, derives = state_of(args[0]), args[0].shape, torch.is_grad_enabled()
    for each in args[1:]:
        if isinstance(each, Tensor):
            state = state_of(each)
            if each.shape != shape and (each.ndim or state is not None):
                return None  # it broadcasts, and may be split somewhere else
            if state is None:
                if derives and each.requires_grad:
                    return None
            elif state is not sharding and state != sharding:
                return None
        elif isinstance(each, tuple | list):
            return None
    if kwargs and any(isinstance(each, Tensor | tuple | list) for each in kwargs.values()):
        return None
    assert isinstance(sharding, Sharding)
    return sharding


@lru_cache(maxsize=1024)
def is_always_pointwise(name: str) -> bool:
    """Whether a function of this name is pointwise for all arguments."""
    base = plain_name(name)
    return is_pointwise(base) and base not in (*EXTREMA, "where", "data")


def states_after(call: TorchCall, result: Any) -> list[State]:
    """The states of all tensors in the result of a call."""
    found = tensors_in(result)
    if not found:
        return []
    known = [state for state in call.states if state is not None]
    lost = next((state for state in known if isinstance(state, UnknownSharding)), None)
    if lost is not None or not known:
        return [lost] * len(found)
    if call.base in _OF_SEVERAL:
        return [_OF_SEVERAL[call.base](call, each) for each in found]
    alone = call.base in EXTREMA and len(call.tensors) == 1
    alone |= call.base == "where" and len(call.args) + len(call.kwargs) == 1
    if is_pointwise(call.base) and not alone:  # `where` of one tensor returns indices
        return [_pointwise(call, each) for each in found]
    if call.base in _RULES:
        subject = call.subject
        return [
            call.lost() if subject is None else _RULES[call.base](call, *subject, each)
            for each in found
        ]
    return _by_table(call, found)


def _by_table(call: TorchCall, found: list[Tensor]) -> list[State]:
    """The states that follow from the layouts of the results for the whole tensors."""
    sharding, _ = call.first_shard
    assert sharding is not None
    layouts = layouts_after(call)
    if isinstance(layouts, str) or len(layouts) != len(found):
        return [call.lost(layouts if isinstance(layouts, str) else "")] * len(found)
    return [
        (layout.local_shape == tuple(each.shape) and sharding.after(layout)) or call.lost()
        for layout, each in zip(layouts, found, strict=True)
    ]


def state_after_writing(call: TorchCall) -> Sharding | UnknownSharding:
    """The state of a tensor after `x[index] = value`."""
    target, index, value = call.args
    state, written = state_of(target), state_of(value)
    assert state is not None
    if isinstance(state, UnknownSharding):
        return state
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim == target.ndim:
        return state if written is None and state_of(index) == state else call.lost("by a mask")
    selected = Tensor.__getitem__(target, index)
    (part,) = _by_table(TorchCall.of("__getitem__", (target, index), {}), [selected])
    if isinstance(part, UnknownSharding) or written is None:
        return (
            call.lost("of a part of the split dimension")
            if isinstance(part, UnknownSharding)
            else state
        )
    ndim = selected.ndim
    if isinstance(written, Sharding):
        written = written.at(written.dim + ndim - value.ndim)
    return state if part == written else call.lost("of a value with another sharding")


def state_after_replacing(call: TorchCall, is_parameter: bool) -> State:
    """The state of a tensor after it took the values of another: `x.set_(y)` or `x.data = y`.

    A parameter that takes values of its own shape keeps its sharding, unless theirs contradicts it.
    """
    target = call.args[0]
    old, given = state_of(target), state_of(call.argument(1, "source"))
    if is_parameter and tuple(target.shape) == call.shapes[0]:
        merges = (
            isinstance(old, Sharding)
            and isinstance(given, Sharding)
            and old.merged(given) is not None
        )
        return old if merges or not isinstance(given, Sharding) else given
    if old is None or isinstance(given, Sharding):
        return given
    return given or call.lost("of another tensor")


def shardings_of_each(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[State]:
    """The shardings of the results of a pointwise function of lists, in order.

    Empty if tensors at one place have different shardings or shapes; see `calls_of_each` for these.
    """
    if torch.is_grad_enabled() or any(map(tensors_in, kwargs.values())):
        return []
    inner, first = name.removeprefix(EACH), args[0]
    states = [state_of(each) for each in first]
    if not is_always_pointwise(inner) or any(
        isinstance(state, UnknownSharding) for state in states
    ):
        return []
    for given in args[1:]:
        if isinstance(given, Tensor) and (given.ndim or state_of(given) is not None):
            return []
        if not isinstance(given, tuple | list):
            continue
        for own, state, each in zip(first, states, given, strict=True):
            if not isinstance(each, Tensor):
                continue
            other = state_of(each)
            if each.shape != own.shape or not (other is state or other in (None, state)):
                return []
    return states


def calls_of_each(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, TorchCall]:
    """The calls that a function of lists makes at the places where a tensor has a sharding."""
    length = len(args[0])

    def at(value: Any, k: int) -> Any:
        return value[k] if isinstance(value, tuple | list) and len(value) == length else value

    calls = {
        k: TorchCall.of(
            name.removeprefix(EACH),
            tuple(at(value, k) for value in args),
            {key: at(value, k) for key, value in kwargs.items()},
        )
        for k in range(length)
    }
    return {k: call for k, call in calls.items() if any(s is not None for s in call.states)}


def check_target(call: TorchCall) -> None:
    """Raise if a function would write shards into a tensor that cannot become a shard.

    A tensor that alone uses its memory becomes a shard; a view, or a tensor with views, cannot.
    """
    # shards over a single worker are whole, so nothing is misunderstood
    if not any(
        s is not None and (s.partition is None or s.partition.size > 1) for s in call.states
    ):
        return
    for each in () if fills_by_mask(call) else targets(call):
        if state_of(each) is None and (call.name == "__setitem__" or not is_own(each)):
            raise ValueError(
                f"`{call.name}` writes a shard into a tensor that is not registered as one; "
                f"register that first: x = tessel.register_parallel_dim(x, dim)"
            )


def fills_by_mask(call: TorchCall) -> bool:
    """Whether this is `x[mask] = number` for a mask that is a shard and a plain tensor `x`.

    It equals `x.masked_fill_(mask, number)`, and `x` becomes a shard as it does there.
    """
    if call.name != "__setitem__":
        return False
    target, mask, value = call.args
    if not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == target.shape):
        return False
    number = not isinstance(value, Tensor) or (value.ndim == 0 and state_of(value) is None)
    return number and isinstance(state_of(mask), Sharding) and is_own(target)


def is_own(x: Tensor) -> bool:
    """Whether a tensor is plain and shares its memory with no other tensor."""
    if type(x) is not Tensor or x.layout is not torch.strided:
        return False
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2  # its own and this


@_rule(_OF_SEVERAL, "expand_as")  # like a product of a plain tensor and ones like the other
def _pointwise(call: TorchCall, result: Tensor) -> State:
    """Shardings are aligned at the last dimension, as in broadcasting."""
    found: Sharding | None = None
    for sharding, shape in zip(call.states, call.shapes, strict=True):
        if not isinstance(sharding, Sharding):
            continue
        dim = sharding.dim + result.ndim - len(shape)
        if not 0 <= dim < result.ndim or result.shape[dim] != shape[sharding.dim]:
            return call.lost("as it broadcasts the split dimension")
        found = sharding.at(dim) if found is None else found.merged(sharding.at(dim))
        if found is None:
            return call.lost("of shards along different dimensions, sizes or workers")
    return found


@_rule(_OF_SEVERAL, "_weight_norm")
def _normed_rows(call: TorchCall, result: Tensor) -> State:
    """The rows of a weight, each with its own norm, may be split."""
    state, of_norm = call.states[:2]
    dim = int(call.argument(2, "dim", default=0))
    if not isinstance(state, Sharding) or of_norm not in (None, state) or state.dim != dim:
        return call.lost("over the dimension that is split")
    return state


@_rule(_RULES, "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
def _channels(call: TorchCall, sharding: Sharding, shape: Shape, result: Tensor) -> State:
    """The rule of functions that draw one number for each channel and all dimensions after it."""
    if sharding.dim >= 2:
        return call.lost("behind the channels")
    return sharding


@_rule(_OF_SEVERAL, "module_load")
def _loaded(call: TorchCall, result: Tensor) -> State:
    """A parameter that is loaded with values of its own shape keeps its sharding."""
    if len(set(call.shapes)) > 1:
        return call.lost()
    old, given = call.states
    if isinstance(old, Sharding) and isinstance(given, Sharding):
        return old.merged(given) or call.lost("of a value with another sharding")
    return old or given


@_rule(_RULES, "expand", "broadcast_to")
def _expand(call: TorchCall, sharding: Sharding, shape: Shape, result: Tensor) -> State:
    """The lengths in the arguments are those of this worker's part."""
    dim = sharding.dim + result.ndim - len(shape)
    if result.shape[dim] != shape[sharding.dim]:
        return call.lost("of the dimension that is split")
    return sharding.at(dim)


@_rule(_RULES, "new_zeros", "new_ones", "new_full", "new_empty")
def _new(call: TorchCall, sharding: Sharding, shape: Shape, result: Tensor) -> State:
    return sharding if result.shape == shape else call.lost()


@_rule(_RULES, "norm_except_dim")
def _norm(call: TorchCall, sharding: Sharding, shape: Shape, result: Tensor) -> State:
    is_along = int(call.argument(2, "dim", default=0)) == sharding.dim
    return sharding if is_along else call.lost("over the dimension that is split")


_rule(_RULES, "reshape", "view", "reshape_as", "view_as")(reshaped)
_rule(_RULES, "flatten", "ravel")(flattened)
_rule(_RULES, "unflatten")(unflattened)
