"""Uses of shared values by every worker's own code: an image, and parameters of modules.

Each worker computes its own part of the work from values that all of them share. Their uses are
separate, so that gradients are summed over the workers; the code of the user knows nothing of it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from tessel.agreement import Terms, same
from tessel.distributed.agreeing import agree, agree_on_call
from tessel.distributed.movements import copying, reducing
from tessel.imaging.context import DistributedContext
from tessel.layout import Layout, Shape
from tessel.linop import LinearOperator
from tessel.partition import world
from tessel.shared import even, nothing


@dataclass(frozen=True)
class Slot:
    """A place where an object keeps a tensor: under a key of a dictionary or list, or in a cell."""

    place: Any
    key: Any
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        """Keep another tensor here, where that can be done."""
        if isinstance(self.place, types.CellType):
            self.place.cell_contents = tensor
        elif isinstance(self.place, MutableMapping | MutableSequence):
            self.place[self.key] = tensor


@dataclass(frozen=True)
class Use:
    """Shared values as this worker may use them.

    Args:
        x: the image.
        args, settings: further arguments of the call.
        anchor: a zero that hangs on all values that need a gradient; None if none does.
    """

    x: Tensor
    args: tuple[Any, ...]
    settings: dict[str, Any]
    anchor: Tensor | None

    def hang(self, result: Tensor) -> Tensor:
        """The result, which hangs on all shared values, so that graphs of workers are alike."""
        return hang(result, self.anchor)


def hang(result: Tensor, anchor: Tensor | None) -> Tensor:
    """The same numbers, which also depend on `anchor`, a zero."""
    if anchor is None:
        return result
    zero = anchor if result.is_complex() or not anchor.is_complex() else anchor.real
    return result + zero.to(device=result.device, dtype=result.dtype)


@contextmanager
def using(
    ctx: DistributedContext,
    call: str,
    x: Tensor,
    shared: Any = (),
    args: tuple[Any, ...] = (),
    settings: Mapping[str, Any] | None = None,
    users: Any = (),
) -> Iterator[Use]:
    """Let all workers use an image, parameters and arguments that they share.

    They agree on the shape and kind of the image and on what needs a gradient, and all raise or
    none. Inside of the block the objects hold the parameters as this worker uses them.

    Args:
        ctx: the workers.
        call: what is called, in the words of its user.
        x: the image, whole.
        shared: whose parameters are shared: modules, functions, other objects, lists of them.
        args: of the call.
        settings: of the call, by name.
        users: objects of this worker alone, which may hold some of these parameters, too.
    """
    slots = slots_of(shared)
    given = tensors_in((args, settings))
    terms = _agree(ctx, f"{call}{_needs(slots, given)}", x)
    if ctx.debug:
        ctx.check_same(x, Layout.whole(ctx.partition, x.shape, shared=True), f"the input of {call}")
    x = even(x, terms)
    used: dict[int, Tensor] = {}
    for each in (x, *given, *(slot.tensor for slot in slots)):
        if id(each) not in used:
            used[id(each)] = copying(ctx.partition, tuple(each.shape)).apply(each)
    swap = partial(tree_map, lambda each: used.get(id(each), each))
    anchor = _anchor(used.values())
    with replaced((*slots, *slots_of(users)), used):
        yield Use(used[id(x)], swap(args), dict(swap(dict(settings or {}))), anchor)


@contextmanager
def using_parameters(
    ctx: DistributedContext, shared: Any, users: Any = ()
) -> Iterator[Tensor | None]:
    """Let all workers use parameters that they share; an anchor that hangs on them.

    Nothing is agreed on here: what `described` says belongs into the next agreement.
    """
    slots = slots_of(shared)
    used = {
        id(slot.tensor): copying(ctx.partition, tuple(slot.tensor.shape)).apply(slot.tensor)
        for slot in slots
    }
    with replaced((*slots, *slots_of(users)), used):
        yield _anchor(used.values())


def described(objects: Any) -> str:
    """Which parameters need a gradient now, in words that must be the same on all workers."""
    return _needs(slots_of(objects), [])


def totalled(share: Tensor, ctx: DistributedContext, terms: Terms | None = None) -> Tensor:
    """The sum of all workers' shares, of one shape, as one shared value."""
    return reducing(ctx.partition, tuple(share.shape)).apply(share, terms)


@contextmanager
def replaced(slots: Iterable[Slot], tensors: Mapping[int, Tensor]) -> Iterator[None]:
    """Put other tensors into slots, by the identity of those there, until the block ends."""
    changed = [slot for slot in slots if id(slot.tensor) in tensors]
    try:
        for slot in changed:
            slot.put(tensors[id(slot.tensor)])
        yield
    finally:
        for slot in changed:
            slot.put(slot.tensor)


def slots_of(objects: Any) -> list[Slot]:
    """Where objects keep tensors that need a gradient now, in an order that all workers have."""
    if not torch.is_grad_enabled():
        return []
    return [slot for slot in _all_slots(objects) if slot.tensor.requires_grad]


def idle(shape: Shape, given: Iterable[Tensor], *objects: Any) -> Tensor:
    """What a worker makes of nothing, in a call for which another one uses these objects.

    It hangs on the parameters of the objects, so that both workers take part in a backward pass.

    Args:
        shape: of the result.
        given: tensors on which it hangs, and which say of what kind it is.
        objects: of which parameters may need a gradient.
    """
    learned = [slot.tensor for slot in slots_of(objects)]
    return hang(nothing(shape, *given), nothing((), *learned) if learned else None)


def tensors_of(objects: Any) -> list[Tensor]:
    """The tensors that objects keep, each once, whether they need a gradient or not."""
    return list({id(slot.tensor): slot.tensor for slot in _all_slots(objects)}.values())


def state_of(objects: Any) -> list[Tensor]:
    """The parameters and buffers of modules, and what needs a gradient, in one order everywhere.

    What else objects keep may be of one worker alone, as what it measured.
    """
    modules: list[torch.nn.Module] = []
    tensors = [slot.tensor for slot in _all_slots(objects, modules)]
    of_modules = {id(t) for each in modules for t in (*each.parameters(), *each.buffers())}
    kept = [each for each in tensors if each.requires_grad or id(each) in of_modules]
    return [each for each in {id(each): each for each in kept}.values() if not is_lazy(each)]


@dataclass(frozen=True)
class Common:
    """A tensor that was there before objects were made, and that those of several workers use.

    Args:
        tensor: which a factory closes over.
        places: where it is used, in words.
    """

    tensor: Tensor
    places: tuple[str, ...]


def in_common(
    ctx: DistributedContext, held: list[Tensor], users: Mapping[str, Any]
) -> list[Common]:
    """Which tensors objects in several places use; all workers of the context call this.

    Args:
        ctx: the workers.
        held: tensors in an order that all workers have, as those that a factory closes over.
        users: for each place, in words, the objects of this worker that are used there.
    """
    if ctx.world_size == 1:
        return []
    used = {place: {id(each) for each in tensors_of(objects)} for place, objects in users.items()}
    mine = [
        (number, tuple(each.shape), place)
        for place, inside in used.items()
        for number, each in enumerate(held)
        if id(each) in inside
    ]
    places: dict[Any, set[str]] = {}
    for theirs in ctx.partition.group.share_objects(mine):
        for number, shape, place in theirs:
            places.setdefault((number, shape), set()).add(place)
    return [
        Common(each, tuple(sorted(where)))
        for number, each in enumerate(held)
        if len(where := places.get((number, tuple(each.shape)), set())) > 1
    ]


def check_common(what: str, common: Iterable[Common], shared: Any, way_out: str) -> None:
    """Raise ValueError if a tensor that is used in several places would get parts of a gradient.

    Args:
        what: the caller, in words.
        common: such tensors.
        shared: objects whose tensors are known to be shared, of which nothing is said.
        way_out: what the user can do.
    """
    asked = [each for each in common if _needs_grad(each.tensor)]
    known = {id(slot.tensor) for slot in slots_of(shared)} if asked else set()
    for each in asked:
        if id(each.tensor) not in known:
            raise ValueError(
                f"{what}: a tensor of shape {tuple(each.tensor.shape)} that needs a gradient is "
                f"used by {' and '.join(each.places)}, each of which would give it a part of the "
                f"gradient; {way_out}"
            )


def unshared_leaf(
    result: Tensor, own: Iterable[Tensor] = (), given: Iterable[Tensor] = ()
) -> Tensor | None:
    """A tensor that gets the gradient of a result without a movement between workers, or None.

    Args:
        result: what was computed.
        own: tensors of this worker alone, of which nothing is said.
        given: tensors of which, and of what they depend on, nothing is said.
    """
    if not _needs_grad(result) or torch.compiler.is_compiling():
        return None
    given = list(given)
    known = {id(each) for each in (*own, *given)}
    if result.grad_fn is None:
        return None if id(result) in known else result
    seen: set[Any] = {each.grad_fn for each in given if each.grad_fn is not None}
    nodes: list[Any] = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in seen or isinstance(getattr(node, "operator", None), LinearOperator):
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return leaf
        nodes += [source for source, _ in node.next_functions if source is not None]
    return None


@dataclass(frozen=True)
class Leaves:
    """Finds parameters that operators use and that nobody knows of, as a global one of a script.

    Each worker would get the gradient of its own operators only, a silent wrong number.

    Args:
        ctx: the workers.
        calls: those that all workers have agreed on.
    """

    ctx: DistributedContext
    calls: set[str] = field(default_factory=set)

    def check(
        self, call: str, results: Iterable[Tensor], users: Any, shared: Any, given: Any = ()
    ) -> None:
        """Raise ValueError if a gradient of the results goes to such a tensor.

        At the first call all workers raise or none does, later the worker that finds one.

        Args:
            call: what was called, the same on all workers.
            results: what this worker's objects gave.
            users: these objects, whose own parameters get all of their gradient.
            shared: objects whose tensors are used by all workers, as copies.
            given: tensors that came with the call.
        """
        if self.ctx.world_size == 1 or not torch.is_grad_enabled():
            return
        problem = unknown_leaf(results, users, shared, given)
        if call not in self.calls:
            self.calls.add(call)
            agree_on_call(self.ctx.partition, f"{call}{problem}")
        if problem:
            raise ValueError(f"{call}{problem}")


def unknown_leaf(results: Iterable[Tensor], users: Any, shared: Any = (), given: Any = ()) -> str:
    """A parameter that objects use and that is not found in them, as the end of a sentence."""
    needing = [each for each in results if _needs_grad(each)]
    if not needing:
        return ""
    everyones = {id(each) for each in tensors_of(shared)}
    own = [each for each in tensors_of(users) if id(each) not in everyones]
    for each in needing:
        leaf = unshared_leaf(each, own, given)
        if leaf is not None:
            return (
                f": an operator or data fidelity uses a tensor of shape {tuple(leaf.shape)} that "
                f"needs a gradient and is not found in it, so that each worker would get a part of "
                f"the gradient; pass it in shared={{...}} and keep it, as it is, in an attribute "
                f"of the object that uses it, or let it need none"
            )
    return ""


def known(result: Tensor, users: Any, given: Iterable[Tensor] = ()) -> Tensor:
    """The result, or ValueError if a gradient goes to a parameter that is not found in `users`."""
    problem = unknown_leaf([result], users, (), given) if world().size > 1 else ""
    if problem:
        raise ValueError(f"an image in parts{problem}")
    return result


def _all_slots(objects: Any, modules: list[torch.nn.Module] | None = None) -> list[Slot]:
    """Where objects keep tensors; the modules that are met are added to `modules`."""
    found: list[Slot] = []
    _walk(objects, found, set(), [] if modules is None else modules)
    return found


def _walk(thing: Any, found: list[Slot], seen: set[int], modules: list[torch.nn.Module]) -> None:
    """Look into modules, lists, dictionaries, functions and what they close over."""
    if id(thing) in seen or isinstance(thing, _PLAIN):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.nn.Module):
        modules.append(thing)
    for place, key, value in _contents(thing):
        if isinstance(value, Tensor):
            found.append(Slot(place, key, value))
        else:
            _walk(value, found, seen, modules)


_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, Tensor),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, types.BuiltinFunctionType),
)
_OF_MODULES = frozenset(vars(torch.nn.Module()))
Content = tuple[Any, Any, Any]  # where it is, under which key, and what it is


def _contents(thing: Any) -> list[Content]:
    """What an object holds."""
    if isinstance(thing, torch.nn.Module):
        own = [each for each in _items(vars(thing)) if each[1] not in _OF_MODULES]
        return [*_items(thing._parameters), *_items(thing._buffers), *_items(thing._modules), *own]
    if isinstance(thing, dict):
        return _items(thing)
    if isinstance(thing, list | tuple):
        return [(thing, number, each) for number, each in enumerate(thing)]
    if isinstance(thing, types.CellType):
        return [(thing, None, thing.cell_contents)] if _is_filled(thing) else []
    if isinstance(thing, types.MethodType):
        return [(None, None, thing.__self__), (None, None, thing.__func__)]
    if isinstance(thing, partial):
        return [(None, None, each) for each in (thing.func, thing.args, thing.keywords)]
    if isinstance(thing, types.FunctionType):
        return _contents_of_function(thing)
    attributes = getattr(thing, "__dict__", None)
    own = _items(attributes) if isinstance(attributes, dict) else []
    of_class = vars(type(thing)).values()
    return [*own, *((None, None, each) for each in of_class if isinstance(each, torch.nn.Module))]


def _items(place: dict[Any, Any]) -> list[Content]:
    return [(place, key, value) for key, value in place.items()]


def _contents_of_function(function: types.FunctionType) -> list[Content]:
    """What a function closes over, and the modules that it names."""
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    modules = [each for each in named if isinstance(each, torch.nn.Module)]
    inside = (*(function.__closure__ or ()), *modules, function.__defaults__)
    return [(None, None, each) for each in inside]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among nested arguments that need a gradient now."""
    return [each for each in tree_leaves(values) if _needs_grad(each)]


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def _needs(slots: Iterable[Slot], given: Iterable[Tensor]) -> str:
    shapes = [tuple(each.shape) for each in (*given, *(slot.tensor for slot in slots))]
    mode = "" if torch.is_grad_enabled() else ", under torch.no_grad()"
    return f"{mode}, gradients of tensors of shapes {shapes}" if shapes else mode


def _agree(ctx: DistributedContext, call: str, x: Tensor) -> Terms:
    if ctx.world_size == 1 and isinstance(x, Tensor):
        needs = x.requires_grad and torch.is_grad_enabled()
        return Terms(x.dtype, x.device.type, needs, False)
    ((shapes, terms),) = agree(ctx.partition, call, x)
    same(shapes, "shape", call)
    return terms


def _anchor(used: Iterable[Tensor]) -> Tensor | None:
    needed = [each for each in used if each.requires_grad]
    return nothing((), *needed) if needed and torch.is_grad_enabled() else None
