"""Parameters in users' operators and priors: found, shared by workers, and their gradients summed.

Operators, data fidelities and denoisers keep their parameters anywhere. A parameter that several
workers use is one shared value: each worker computes with a copy of it, and the adjoint of copying
sums the gradients of all copies. User objects are only read here: parameters are looked for in
modules and attributes. While objects compute, torch uses the copies in place of the parameters
(`computing_with`). A parameter that is used and was not found raises (`unshared_leaf`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tessel.core import (
    LinearOperator,
    Partition,
    Shape,
    anchored_zeros,
    copying,
    is_compiling,
    operator_of,
    setting,
    tell,
)
from tessel.imaging.context import DistributedContext

# Types that hold no other tensors: the search ends there, and does not enter Python's modules.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, Tensor),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, types.BuiltinFunctionType),
)
_FUNCTION = types.FunctionType
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


WAY_OUT = (
    "pass it in shared={...}, which sums the gradients of all workers, or let the factory create "
    "a separate one for each"
)
Common = tuple[Tensor, list[str]]  # a tensor, and the places, in words, whose objects use it


def _reached(
    objects: Any, contents: Callable[[Any], Iterable[Any]] | None = None
) -> tuple[list[Tensor], list[torch.nn.Module]]:
    """The tensors and modules in user objects, in the same order on all workers.

    They are looked for in modules, attributes, lists and dictionaries, but not in closures.
    """
    tensors, modules = list[Tensor](), list[torch.nn.Module]()
    seen = set[int]()  # by identity: objects of users may not be hashable
    inside = contents or _contents

    def visit(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            tensors.append(thing)
        if isinstance(thing, torch.nn.Module):
            modules.append(thing)
        if not isinstance(thing, _PLAIN):
            for each in inside(thing):
                visit(each)

    visit(objects)
    return tensors, modules


def _contents(thing: Any) -> Iterable[Any]:
    """The contents of an object."""
    match thing:
        case torch.nn.Module():
            return [thing._parameters, thing._buffers, *_beside_parameters(thing)]
        case dict():
            return thing.values()
        case list() | tuple():
            return thing
        case types.MethodType():
            return [thing.__self__]
        case partial():
            return [thing.func, thing.args, thing.keywords]
    of_class = [each for each in vars(type(thing)).values() if isinstance(each, torch.nn.Module)]
    return [*getattr(thing, "__dict__", {}).values(), *of_class]


def _beside_parameters(thing: Any) -> Iterable[Any]:
    """The contents of an object, without the parameters and buffers of a module."""
    if not isinstance(thing, torch.nn.Module):
        return _contents(thing)
    own = [each for name, each in vars(thing).items() if name not in _OF_EVERY_MODULE]
    return [thing._modules, *own]


def tensors_held_by(factory: Any) -> list[Tensor]:
    """The tensors that a factory could pass to objects, in the same order on all workers.

    They are needed in order to raise (`check_common`): objects of several workers would hold the
    same one as if it were their own, and each would give it a part of its gradient.
    """

    def read_by(value: Any) -> Iterable[Any]:
        if not isinstance(value, _FUNCTION):
            return _contents(value)
        # what a function closes over, its defaults, and globals that are named in its code
        found: list[Any] = [value.__defaults__]
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # a name that is not bound yet, as in recursion
                found.append(cell.cell_contents)
        codes, names = [value.__code__], list[str]()
        for code in codes:  # grows: functions that it defines have their own code
            names += code.co_names
            codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in names:
            each = value.__globals__.get(name)
            # Only names of the script itself: those of libraries would lead into all of them.
            is_near = isinstance(each, _FUNCTION) and each.__globals__ is value.__globals__
            if is_near or isinstance(each, Tensor | torch.nn.Module | list | tuple | dict):
                found.append(each)
        return found

    return _reached(factory, read_by)[0]


def tensors_of(objects: Any) -> list[Tensor]:
    """The tensors in objects, each once, whether they need a gradient or not."""
    return _reached(objects)[0]


def learned(objects: Any, arguments: Any = ()) -> list[Tensor]:
    """The tensors among nested arguments and in objects that currently need a gradient."""
    if not torch.is_grad_enabled():
        return []
    given = [each for each in tree_leaves(arguments) if needs_grad(each)]
    return given + [each for each in tensors_of(objects) if each.requires_grad]


def state_of(objects: Any) -> list[Tensor]:
    """Parameters and buffers of modules, and tensors that need a gradient, in one order everywhere.

    Other tensors may belong to one worker alone, such as its measurements.
    """
    tensors, modules = _reached(objects)
    state = {id(t) for each in modules for t in (*each.parameters(), *each.buffers())}
    kept = [each for each in tensors if each.requires_grad or id(each) in state]
    return [each for each in kept if not is_lazy(each)]


def needs_grad(value: Any) -> bool:
    """Whether this value currently needs a gradient."""
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def gradients_of(tensors: Iterable[Tensor]) -> str:
    """The required gradients as text, which must be the same on all workers."""
    shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
    return f", gradients of tensors of shapes [{shapes}]" if shapes else ""


class Copies(dict[int, Tensor]):
    """For each shared tensor, by its identity, the copy that this worker computes with."""

    def add(self, tensors: Iterable[Tensor], partition: Partition) -> None:
        """Copy tensors that the workers of a partition share; their gradients are summed."""
        for each in tensors:
            if id(each) not in self:
                self[id(each)] = copying(partition, tuple(each.shape)).apply(each)

    def instead(self, values: Any) -> Any:
        """Nested arguments with copies in place of tensors."""
        return values if not self else tree_map(lambda each: self.get(id(each), each), values)


class _Instead(TorchFunctionMode):
    """Make torch functions compute with copies wherever they get the tensors themselves."""

    def __init__(self, copies: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.copies = copies

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {name: self._instead(each) for name, each in (kwargs or {}).items()}
        return function(*map(self._instead, args), **kwargs)

    def _instead(self, value: Any) -> Any:
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(map(self._instead, value))
        return self.copies.get(id(value), value)


# the copies with which user objects currently compute
current: ContextVar[Mapping[int, Tensor]] = ContextVar(
    "current", default=types.MappingProxyType({})
)


@contextmanager
def computing_with(copies: Copies, objects: Any) -> Iterator[Tensor | None]:
    """Let user objects compute with copies of their tensors, until the block ends.

    The block gets a zero that depends on all copies, or None if there are none. Modules are called
    with other parameters as `torch.func.functional_call` calls them, which also reaches custom
    autograd functions and compiled code. Tensors elsewhere, in attributes of plain objects, lists
    or objects that are shared by name, stay where they are: torch functions use the copies instead.
    """
    if not copies:
        yield None
        return
    modules = _reached(objects)[1]
    everything, names = torch.nn.Module(), dict[str, Tensor]()
    for number, module in enumerate(modules):
        everything.add_module(str(number), module)
        for name, each in (*module._parameters.items(), *module._buffers.items()):
            if id(each) in copies:
                names[f"{number}.{name}"] = copies[id(each)]
    # A parameter of a module may also be elsewhere, where `functional_call` does not replace it.
    bare = {id(each) for each in _reached(objects, _beside_parameters)[0]}
    with ExitStack() as stack:
        stack.enter_context(setting(current, copies))
        if names:
            stack.enter_context(_reparametrize_module(everything, names))
        # The mode costs a little at each torch function, so it is not used for modules alone.
        if bare & copies.keys():
            stack.enter_context(_Instead(copies))
        yield anchored_zeros((), *copies.values())


def depending_on(result: Tensor, anchor: Tensor | None) -> Tensor:
    """The same values, which also depend on `anchor`, a zero.

    Every worker must reach each sum of gradients in a backward pass, even if its own result does
    not depend on the parameter: otherwise the others wait for it.
    """
    if anchor is None:
        return result
    return result + as_dtype(anchor, result.dtype).to(result.device)


def idle(shape: Shape, users: Any, *given: Tensor) -> Tensor:
    """Zeros that depend on the parameters of `users`, for a worker that has nothing to compute.

    With them it takes part in the sums of their gradients.
    """
    parameters = learned(users)
    anchor = anchored_zeros((), *parameters) if parameters else None
    return depending_on(anchored_zeros(shape, *given), anchor)


def anchor_of(items: Any) -> Tensor | None:
    """The anchor of `LocalTensors`, on which a worker without items depends; None for others."""
    anchor: Tensor | None = getattr(items, "anchor", None)
    return anchor


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """An anchor that depends on two."""
    return second if first is None else depending_on(first, second)


def in_common(ctx: DistributedContext, held: list[Tensor], place: str, users: Any) -> list[Common]:
    """The existing tensors that objects in several places use.

    All workers of the context call this.

    Args:
        ctx: the workers.
        held: tensors in the same order on all workers, see `tensors_held_by`.
        place: the place of this worker, in words.
        users: the objects of this worker.
    """
    if ctx.world_size == 1:
        return []
    inside = {id(each) for each in tensors_of(users)}
    # Identities differ between workers: the position in `held` identifies a tensor.
    mine = [(k, tuple(each.shape)) for k, each in enumerate(held) if id(each) in inside]
    places: dict[Any, set[str]] = {}
    for where, theirs in tell(ctx.partition, (place, mine)).values():
        for number_and_shape in theirs:
            places.setdefault(number_and_shape, set()).add(where)
    return [
        (each, sorted(where))
        for k, each in enumerate(held)
        if len(where := places.get((k, tuple(each.shape)), set())) > 1
    ]


def check_common(what: str, common: Iterable[Common], shared: Any, way_out: str) -> None:
    """Raise ValueError if a tensor that is used in several places would get a partial gradient.

    Args:
        what: the caller, in words.
        common: such tensors.
        shared: objects whose tensors are known to be shared, so that their gradients are summed.
        way_out: what the user can do instead.
    """
    asked = [(tensor, places) for tensor, places in common if needs_grad(tensor)]
    known = {id(each) for each in tensors_of(shared)} if asked else set()
    for tensor, places in asked:
        if id(tensor) not in known:
            raise ValueError(
                f"{what}: a tensor of shape {tuple(tensor.shape)} that needs a gradient is used "
                f"by {' and '.join(places)}, each of which would compute only a part of the "
                f"gradient; {way_out}"
            )


@cache
def _of_graphs_alone() -> int:
    """Python's reference count of a leaf that only a graph holds.

    Such a leaf was made in the call, for example by an object that differentiates its own values,
    and is gone: its gradient is not used. A parameter, wherever it is hidden, is held by its user.
    """
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True, device="cpu").neg().grad_fn
    leaf = node.next_functions[0][0].variable
    return sys.getrefcount(leaf)


def unshared_leaf(
    result: Tensor, own: Iterable[Tensor] = (), given: Iterable[Tensor] = ()
) -> Tensor | None:
    """A tensor that receives the gradient of a result without a sum over workers, or None.

    Args:
        result: what was computed.
        own: tensors of this worker alone, which may receive it.
        given: arguments of the call; they, and the tensors that they depend on, may receive it.
    """
    if not needs_grad(result) or is_compiling():
        return None
    given = list(given)
    known = {id(each) for each in (*own, *given)}
    if result.grad_fn is None:
        return None if id(result) in known else result
    seen: set[Any] = {each.grad_fn for each in given if each.grad_fn is not None}
    nodes: list[Any] = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        # The input of an operator of Tessel is a shared value: its adjoint sums gradients.
        if node in seen or isinstance(operator_of(node), LinearOperator):
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        is_held = leaf is not None and sys.getrefcount(leaf) > _of_graphs_alone()
        if is_held and id(leaf) not in known:
            return leaf
        nodes += [source for source, _ in node.next_functions if source is not None]
    return None


def leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that receive the gradients of `tensors` without a sum over workers, each once."""
    found: dict[int, Tensor] = {}
    for each in filter(needs_grad, tensors):
        leaf = unshared_leaf(each, found.values())
        while leaf is not None:
            found[id(leaf)] = leaf
            leaf = unshared_leaf(each, found.values())
    return list(found.values())


def unshared_problem(
    results: Iterable[Tensor], users: Any, shared: Any = (), given: Any = ()
) -> str:
    """The end of a sentence about a parameter that objects use but that is not found in them.

    Args:
        results: the results of this worker's objects.
        users: these objects, whose own parameters get their whole gradient.
        shared: objects whose tensors are used by all workers, as copies.
        given: tensors that were passed to the call.
    """
    needing = [each for each in results if needs_grad(each)]
    if not needing:
        return ""
    everyones = {id(each) for each in tensors_of(shared)}
    own = [each for each in tensors_of(users) if id(each) not in everyones]
    for each in needing:
        leaf = unshared_leaf(each, own, given)
        if leaf is not None:
            return (
                f": an operator or data fidelity uses a tensor of shape {tuple(leaf.shape)} that "
                "needs a gradient and was not found in it, so each worker would get only a part "
                "of the gradient (modules and attributes are searched, closures are not); pass it "
                "in shared={...} and store it, unchanged, in an attribute of the object that "
                "uses it, or detach it"
            )
    return ""


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype; the real part if the tensor is complex and the dtype is not."""
    return (x if dtype.is_complex or not x.is_complex() else x.real).to(dtype)
