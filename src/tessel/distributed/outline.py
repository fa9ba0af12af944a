"""Outlines: what the table of rules says of a call on shards, without values and messages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel import tensor, transport
from tessel.core import boxes
from tessel.core.layout import Cut, Layout
from tessel.core.partition import Partition
from tessel.distributed.shardings import Sharding, silent_row
from tessel.distributed.torch_call import Shape, TorchCall, mapped, tensors_in
from tessel.tensor.call import by_rule
from tessel.tensor.gathering import fallback, is_random
from tessel.transport import kept_in_job

Answer = tuple[Layout, ...] | str
_ATTENTION = "scaled_dot_product_attention"
_IGNORED = ("out", "dropout_p")  # what says nothing of the result's layout
_BATCHED = frozenset(("matmul", "bmm"))  # a plain operand may have its part of the batch


def layouts_after(call: TorchCall) -> Answer:
    """How the results of a call on the whole tensors lie if nothing moves; else, why not."""
    shardings = [state for state in call.states if isinstance(state, Sharding)]
    if any(sharding.partition.ranks != shardings[0].partition.ranks for sharding in shardings):
        return "of shards over different workers"
    if not shardings[0].partition.active:
        return "on a worker that has no shard"
    if is_random(call.base) and call.base != _ATTENTION:
        return "of which each worker draws numbers of its own"
    if call.base == "__getitem__" and None in call.states[1:]:
        return "at places of which each worker may have its own"  # as numbers that it drew
    given = {name: value for name, value in call.kwargs.items() if name not in _IGNORED}
    layouts = {id(each): _layout(call, k) for k, each in enumerate(call.tensors)}
    memory, key = _memory(), (call.function, _key(call.args, layouts), _key(given, layouts))
    try:
        if key in memory:
            return memory[key]
    except TypeError:  # an argument that cannot be remembered
        return _asked(call, given, layouts)
    if len(memory) > 4096:
        memory.clear()
    memory[key] = found = _asked(call, given, layouts)
    return found


@kept_in_job
def _memory() -> dict[Any, Answer]:
    """What the table said before."""
    return {}


def _key(value: Any, layouts: dict[int, Layout | None]) -> Any:
    """What a rule sees of arguments; numbers of different types are equal, and mean other things.

    (Slices are not hashable before Python 3.12.)
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, layouts.get(id(value))
    if type(value) in (list, tuple):
        return type(value), *(_key(each, layouts) for each in value)
    if type(value) is dict:
        return tuple((name, _key(each, layouts)) for name, each in value.items())
    return type(value), repr(value) if type(value) is slice else value


def _asked(call: TorchCall, given: dict[str, Any], layouts: dict[int, Layout | None]) -> Answer:
    """Follow the rule with outlines of the whole tensors in the places of tensors."""

    def outline(each: Tensor) -> Tensor:
        part = torch.empty(tuple(each.shape), dtype=each.dtype, device="meta")
        layout = layouts.get(id(each))
        return part if layout is None else tensor.Tensor(part, layout)

    try:
        with torch._C._EnableTorchFunction(), fallback("raise"), torch.no_grad():
            result = by_rule(call.function, mapped(outline, call.args), mapped(outline, given))
    except Exception:  # the rule would send, or finds that a length is that of a part
        return "over the dimension that is split"
    found = tensors_in(result)
    if not all(isinstance(each, tensor.Tensor) for each in found):
        return ""
    return tuple(each._layout for each in found)  # type: ignore[attr-defined]


def _layout(call: TorchCall, number: int) -> Layout | None:
    """How the whole of a tensor of the call lies, over supposed workers; None for a plain one."""
    state, shape = call.states[number], call.shapes[number]
    if isinstance(state, Sharding):
        return layout_of(state, shape)
    if call.base in _BATCHED:
        sharding, other = next(
            (sharding, shape)
            for sharding, shape in zip(call.states, call.shapes, strict=True)
            if isinstance(sharding, Sharding)
        )
        place = sharding.dim - len(other)
        if -len(shape) <= place < -2 and shape[place] == other[place]:
            return layout_of(sharding.at(place % len(shape)), shape)
    return None


def layout_of(sharding: Sharding, shape: Shape) -> Layout:
    """How a tensor lies of which this worker has a shard of this shape, over supposed workers.

    Where the length of the whole is not known, all shards are supposed to be as long as this one.
    """
    length = shape[sharding.dim]
    interval = sharding.interval
    size = sharding.size if interval is not None and interval[1] - interval[0] == length else None
    return _layout_of(_supposed(sharding.partition), sharding.dim, shape, size)


@kept_in_job
def _layout_of(partition: Partition, dim: int, shape: Shape, size: int | None) -> Layout:
    parts = (
        boxes.consecutive([shape[dim]] * partition.size)
        if size in (None, shape[dim])  # or of one worker alone, of which there are two supposed
        else boxes.balanced(size, partition.size)
    )
    cuts = tuple(
        Cut((0,), parts) if each == dim else Cut((), ((0, n),)) for each, n in enumerate(shape)
    )
    return Layout(partition, (*shape[:dim], parts[-1][1], *shape[dim + 1 :]), cuts)


@kept_in_job
def _supposed(partition: Partition) -> Partition:
    """Workers in a row with whom nobody can talk, this one in its place among them.

    There are two at least: of one alone a rule would not say what it needs of others.
    """
    ranks = [-1 - k for k in range(max(2, partition.size))]
    ranks[partition.rank or 0] = transport.this_worker()
    return silent_row(ranks)
