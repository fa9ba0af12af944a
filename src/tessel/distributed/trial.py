"""Trials: the answer of the table of rules about a call on shards, without sending anything.

A rule that sends nothing may still treat a part differently from the function itself: it may
depend on the place of the part, as `tril` must, or leave out what only other workers need. So the
rule is tried on random numbers in the places of several workers, and the sharding is kept if the
function of the part returns the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tessel import tensor, transport
from tessel.core.context import setting
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.distributed.shardings import Sharding, silent_row
from tessel.distributed.torch_call import Shape, TorchCall, mapped, tensors_in
from tessel.primitives.shard_layouts import shard_layout
from tessel.tensor.call import by_rule
from tessel.tensor.gathering import fallback, is_random
from tessel.tensor.table import outlining
from tessel.transport import kept_in_job

Answer = tuple[Layout, ...] | str
_ATTENTION = "scaled_dot_product_attention"
_IGNORED = ("out", "dropout_p")  # arguments on which the layout of the result does not depend
_BATCHED = frozenset(("matmul", "bmm"))  # a plain operand may be this worker's part of the batch
# the errors with which placeholder workers, rules and torch refuse arguments; any other is a
# mistake in a rule, which must not be taken for a lost sharding
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


def layouts_after(call: TorchCall) -> Answer:
    """The layouts of the results of a call on the whole tensors if nothing moves; else, why not."""
    shardings = [state for state in call.states if isinstance(state, Sharding)]
    if any(sharding.partition.ranks != shardings[0].partition.ranks for sharding in shardings):
        return "of shards over different workers"
    if not shardings[0].partition.active:
        return "on a worker that has no shard"
    if is_random(call.base) and call.base != _ATTENTION:
        return "of which each worker draws numbers of its own"
    if call.base == "__getitem__" and None in call.states[1:]:
        return "at places of which each worker may have its own"  # such as numbers that it drew
    if call.function is None:
        return "of which there is no form that leaves its operand as it is"
    given = {name: value for name, value in call.kwargs.items() if name not in _IGNORED}
    layouts = {id(each): _layout(call, k) for k, each in enumerate(call.tensors)}
    memory, key = _answers(), (call.function, _key(call.args, layouts), _key(given, layouts))
    try:
        if key in memory:
            return memory[key]
    except TypeError:  # an argument that cannot be hashed
        return _tried(call, given, layouts)
    if len(memory) > 4096:  # arguments that change in each step, as in `x[k]`, would fill it
        memory.clear()
    memory[key] = found = _tried(call, given, layouts)
    return found


# previous answers of the table, kept in the job: they depend on the places of its workers
_answers: Callable[[], dict[Any, Answer]] = kept_in_job(dict)


def _key(value: Any, layouts: dict[int, Layout | None]) -> Any:
    """A key for arguments, with types: equal numbers of different types mean different things.

    (Slices are not hashable before Python 3.12.)
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, layouts.get(id(value))
    if type(value) in (list, tuple):
        return type(value), *(_key(each, layouts) for each in value)
    if type(value) is dict:
        return tuple((name, _key(each, layouts)) for name, each in value.items())
    return type(value), repr(value) if type(value) is slice else value


def _tried(call: TorchCall, given: dict[str, Any], layouts: dict[int, Layout | None]) -> Answer:
    """Follow the rule in the places of several workers, the same ones on all of them.

    Of at most eight workers, these are all; of more, the first, the middle and the last one of
    those with parts of equal shapes.
    """
    known = [layout for layout in layouts.values() if layout is not None]
    supposed = known[0].partition
    shapes = [tuple(each.shape_on(worker) for each in known) for worker in supposed.ranks]
    alike = [
        [k for k, each in enumerate(shapes) if each == shape] for shape in dict.fromkeys(shapes)
    ]
    # A rule knows the layout and the place of this worker in it, and may treat the ends unlike the
    # middle. Following it costs as much as a call, so not all of many workers are tried.
    few = supposed.size <= 8
    places = [
        k for some in alike for k in (some if few else {some[0], some[len(some) // 2], some[-1]})
    ]
    here = supposed.rank or 0
    found = None
    for place in places:
        try:
            at_place = _tried_at(place, call, given, layouts)
        except _REFUSALS:  # the rule would send, or a length in the arguments is that of a part
            if len(known) < len(layouts) and shapes[place] != shapes[here]:
                continue  # plain tensors may be this worker's parts, and fit no other place
            at_place = None
        if at_place is None:
            return "over the dimension that is split"
        found = at_place
    if found is None:
        return "over the dimension that is split"
    return tuple(replace(each, partition=_supposed(each.partition.size, here)) for each in found)


def _tried_at(
    place: int, call: TorchCall, given: dict[str, Any], layouts: dict[int, Layout | None]
) -> tuple[Layout, ...] | None:
    """The layouts of the results by the rule, as followed by the worker at this place.

    None if the function of its part differs from its part of the result.
    """
    # Seeded by the place: all workers draw the same numbers, and come to the same answer. On the
    # CPU, even if the user's default device is another: only Tessel sees these values.
    draws = torch.Generator().manual_seed(place)

    def stand_in(each: Tensor) -> tuple[Tensor, Tensor]:
        layout = layouts.get(id(each))
        if layout is not None:
            layout = replace(layout, partition=_supposed(layout.partition.size, place))
        shape = tuple(each.shape) if layout is None else layout.local_shape
        if each.dtype.is_floating_point or each.dtype.is_complex:
            kind = torch.complex128 if each.dtype.is_complex else torch.float64
            part = torch.rand(shape, generator=draws, dtype=kind, device="cpu").to(each.dtype)
        elif shape == tuple(each.shape):
            part = each.detach().as_subclass(Tensor).cpu()  # indices and masks as they are
        else:
            part = torch.zeros(shape, dtype=each.dtype, device="cpu")
        return part, part if layout is None else tensor.Tensor(part.clone(), layout)

    drawn = {id(each): stand_in(each) for each in tensors_in((call.args, given))}
    args, settings = (mapped(lambda each: drawn[id(each)][1], x) for x in (call.args, given))
    with torch._C._EnableTorchFunction(), fallback("raise"), torch.no_grad():
        with setting(outlining, True):  # the rule asks for no values of other workers
            found = tensors_in(by_rule(call.function, args, settings))
        args, settings = (mapped(lambda each: drawn[id(each)][0], x) for x in (call.args, given))
        expected = tensors_in(call.function(*args, **settings))
    if not all(isinstance(each, tensor.Tensor) for each in found):
        return None
    parts = [each._part for each in found]  # type: ignore[attr-defined]
    if len(parts) != len(expected) or not all(map(_alike, parts, expected)):
        return None
    return tuple(each._layout for each in found)  # type: ignore[attr-defined]


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return torch.equal(a, b)
    scale = float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()) if b.numel() else 0.0
    # the rule may add in another order than the function; a wrong part differs by far more
    bound = 64 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=bound, atol=bound * scale, equal_nan=True)


def _layout(call: TorchCall, number: int) -> Layout | None:
    """The layout of a whole tensor of the call, over placeholder workers; None for a plain one."""
    state, shape = call.states[number], call.shapes[number]
    if isinstance(state, Sharding):
        return layout_of(state, shape)
    if call.base in _BATCHED:
        sharding, other = call.first_shard
        assert sharding is not None
        place = sharding.dim - len(other)
        if -len(shape) <= place < -2 and shape[place] == other[place]:
            return layout_of(sharding.at(place % len(shape)), shape)
    return None


def layout_of(sharding: Sharding, shape: Shape) -> Layout:
    """The layout, over placeholder workers, of the tensor of a shard of this shape.

    If the length of the whole is unknown, all shards are taken to be as long as this one.
    """
    dim, row, interval = sharding.dim, sharding.partition, sharding.interval
    # at least two workers: for a single one, a rule would not show what it needs from others
    workers = _supposed(max(2, row.size), row.rank or 0)
    size = shape[dim] * workers.size
    if sharding.size is not None and interval is not None and row.size > 1:
        size = sharding.size if interval[1] - interval[0] == shape[dim] else size
    return shard_layout(workers, (*shape[:dim], size, *shape[dim + 1 :]), dim)


@kept_in_job
def _supposed(num: int, place: int) -> Partition:
    """A row of placeholder workers, with this worker at one place among them."""
    # ranks that no worker has: sending to one of them fails
    ranks = [-1 - k for k in range(num)]
    ranks[place] = transport.this_worker()
    return silent_row(ranks)
