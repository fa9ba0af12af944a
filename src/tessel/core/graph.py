"""Compiled code: operators as opaque nodes of a compiler's graph, and how layers are traced.

A layer or a converted model is traced once, by all workers together, on tensors without values:
what it computes with parts is in the graph then, and its movements are nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import compress
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._guards import detect_fake_mode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.traceback import get_current_meta
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy

from tessel import transport
from tessel.core.context import current_trace, is_compiling, setting
from tessel.core.handles import constant_in_graphs, object_of
from tessel.core.memory_format import is_channels_last

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Keep compilers out of a function, and of everything that it calls.

    A compiler that meets something it cannot trace calls it, and would go on with compiling the
    functions that are called inside. A call of the function itself is as fast as before.
    """
    skip = eval_frame._FrameAction.SKIP
    # of the function, of the functions that it calls
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _applied(x: Tensor, handle: str) -> Tensor:
    name, _, number = handle.partition("#")
    if not number:
        y = object_of(name)._apply(x)
    else:
        with transport.Tagged(int(number)):
            y = object_of(name)._apply(x)
    # compilers rely on strides, which they know from `_without_values`
    return y.contiguous() if is_channels_last(y) else y


def _without_values(x: Tensor, handle: str) -> Tensor:
    return x.new_empty(object_of(handle.partition("#")[0]).codomain.local_shape)


# Agreements and messages must be made in each run, not replayed on a GPU.
_TAGS = tuple(tag for name, tag in torch.Tag.__members__.items() if name == "cudagraph_unsafe")


@torch.library.custom_op("tessel::apply", mutates_args=(), tags=_TAGS)
def node(x: Tensor, handle: str) -> Tensor:
    """Apply the operator of this handle; the number behind the handle is that of its messages."""
    return _applied(x, handle)


# The same after the node that returned the token: graphs contain this one. It is registered without
# `custom_op`, which adds a dozen functions of Python to each run of a node.
_library = torch.library.Library("tessel", "FRAGMENT")
_library.define(
    "apply_after(Tensor x, str handle, Tensor? token) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, *_TAGS),
)


@torch.library.impl(_library, "apply_after", "CompositeExplicitAutograd")
@untraced
def _apply_after(x: Tensor, handle: str, token: Tensor | None) -> tuple[Tensor, Tensor]:
    return _applied(x, handle), x.new_empty(1)


node.register_fake(_without_values)
torch.library.register_fake(
    "tessel::apply_after",
    lambda x, handle, _: (_without_values(x, handle), x.new_empty(1)),
    lib=_library,
)


@node.register_torch_dispatch(FunctionalTensorMode)
def _(mode: FunctionalTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Put a node after the last one of the graph, forward or backward.

    A compiler may change the order of nodes that do not depend on each other, and workers whose
    parts differ would not get the same one. Each would then wait for a message that another sends
    later, or NCCL, which pairs calls by their order, would give it the message of another call.
    (Inductor does not keep the order of torch's effectful operators, in 2.13.)

    Nor is a movement computed twice, where `torch.utils.checkpoint` would have it: a worker with an
    empty part needs nothing of it in its backward pass, and would not repeat what others repeat.
    """
    is_backward = torch._C._current_graph_task_id() != -1
    was_backward, token = _tokens.get(mode, (is_backward, None))
    # a new backward graph: the forward nodes come before all of it
    if is_backward and not was_backward:
        token = None
    meta = get_current_meta()
    policy = meta.get("recompute")
    if policy is not None:
        meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        with torch._C._AutoDispatchBelowAutograd(), mode:
            result, token = torch.ops.tessel.apply_after(*args, token, **kwargs)
    finally:
        if policy is not None:
            meta["recompute"] = policy
    _tokens[mode] = is_backward, token
    return result


# the last node of the graph that is being made: whether it is in the backward pass, and its token
_tokens: WeakKeyDictionary[FunctionalTensorMode, tuple[bool, Tensor]] = WeakKeyDictionary()


def placed(x: Tensor, operator: Any) -> Tensor:
    """The result of an operator as a node of the graph that is being made."""
    if torch.compiler.is_dynamo_compiling():  # a movement by itself; Dynamo cannot read contexts
        _be_ready()
        return node(x, operator.handle)
    trace = current_trace.get()
    if trace is None:
        return node(x, operator.handle)
    trace.append(operator)
    return node(x, f"{operator.handle}#{len(trace)}")  # a number, which its messages carry


@contextmanager
def outside_of_graphs() -> Iterator[None]:
    """Run the block outside of the graph that is being traced: tensors have values."""
    with _disable_current_modes():
        yield


class NoDrawing(TorchDispatchMode):
    """A mode that raises for random numbers: in compiled code each worker would draw its own."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = {each.name: each.default_value for each in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            # a dropout with p = 0, also in attention, draws nothing
            if given.get("dropout_p", given.get("p")) != 0.0:
                raise NotImplementedError(f"{func}: {NO_DRAWING_IN_GRAPHS}")
        return func(*args, **kwargs)


NO_DRAWING_IN_GRAPHS = (
    "a layer or a converted model that draws random numbers cannot be compiled: its seeds come "
    "from the host in each call. Compile it in eval mode, or do not compile it"
)


NOT_IN_GRAPHS = (
    "this call cannot be part of a graph and runs outside of it: it takes a spread tensor, or a "
    "shard that no layer of the compiled code returned, or reads values, or belongs to a model "
    "with an LSTM, GRU or RNN, at which torch.compile breaks graphs. Omit fullgraph=True, or "
    "exclude the call from the compiled code"
)


def settings_in(module: torch.nn.Module) -> list[Any]:
    """The plain attributes and the hooks of a module and its submodules, invisible to a graph."""
    found: list[Any] = []
    for each in module.modules():
        # This runs in every run of a graph, so most attributes are sorted out without Python code.
        attributes = each.__dict__
        kinds = [*map(type, attributes.values())]
        found += compress(attributes.items(), map(_PLAIN.__contains__, kinds))
        for name, value in compress(attributes.items(), map(_OF_SEVERAL.__contains__, kinds)):
            if not value:
                continue
            if name.endswith("_hooks") or (
                type(value) is tuple and _PLAIN.issuperset(map(type, value))
            ):
                found.append((name, tuple(value)))
        for name, view in each.__dict__.get("_plain", {}).items():
            with torch._C.DisableTorchFunctionSubclass():
                is_own = getattr(each, name).data_ptr() == view.data_ptr()
            found.append((f"the memory of {name}", "its own" if is_own else "that of another"))
    return found


_PLAIN = frozenset((bool, int, float, str, type(None)))
_OF_SEVERAL = frozenset((tuple, dict, OrderedDict))


def fix_lengths(x: Tensor) -> bool:
    """Let a compiler treat the lengths of a tensor as constants; True."""
    _ = [len(range(length)) for length in x.shape]
    return True


def in_graphs(holder: str = "") -> Callable[[F], F]:
    """Let compilers trace how a method computes with parts.

    Dynamo puts a call of the method into its graph without tracing it; the tracing of autograd's
    graph then runs it, on tensors without values. Parameters and buffers become arguments. The
    class derives from `HasHandle`, which lists the attributes that it may define for this.

    Args:
        holder: the attribute with the module whose parameters the method uses; by default the
            object itself, which has none if it is no module.
    """

    def decorate(method: F) -> F:
        name = method.__name__

        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return method(self, *args, **kwargs)
            given = [type(each) for each in (*args, *kwargs.values())]
            kinds = [getattr(each, "graph_key", "") for each in given]
            if UNKNOWN in kinds or not self.can_be_traced(*args, **kwargs):
                torch._dynamo.graph_break(msg=f"{type(self).__name__}: {NOT_IN_GRAPHS}")
                return torch.compiler.disable(method)(self, *args, **kwargs)
            module = getattr(self, holder) if holder else self
            _be_ready()
            modes = ""
            names: list[str] = []
            values: list[Tensor] = []
            if isinstance(module, torch.nn.Module):
                # a graph belongs to a mode: it is made anew when one of these changes
                modes = "".join(["t" if each.training else "e" for each in module.modules()])
                own = self.plain_parameters()
                for key, value in module.named_parameters() if own is None else own.items():
                    names.append(key)
                    values.append(value)
                for key, buffer in module.named_buffers():
                    names.append(key)
                    values.append(buffer)
            # Dynamo traces torch's pytree functions for each argument: so there is one text
            count = str(len(args))
            texts = _BETWEEN.join([self.handle, name, holder, modes, count, *kinds, *names])
            result = _called[0](texts, *args, *values, **kwargs)
            kind = _kind_given(self.handle) if self.gives_kinds else None
            return result if kind is None else result.as_subclass(kind)

        return cast(F, call)

    return decorate


# Compiled code knows tensors by their classes, not by their attributes. A class describes a tensor
# by its `graph_attribute`, a name and a value; a `graph_key` distinguishes such classes.
graph_kinds: dict[str, type] = {}
UNKNOWN = "?"  # the key of a class without one


@constant_in_graphs
def _kind_given(handle: str) -> type | None:
    """The class of the result of a method when it was last traced, if the class describes it."""
    return graph_kinds.get(object_of(handle).__dict__.get("_given_kind", ""))


# the function that runs a method in a graph, once a compiler is loaded
_called: list[Callable[..., Any]] = []


@constant_in_graphs
def _be_ready() -> bool:
    # not before: the compiler takes as long to import as torch
    if not _called:
        # Untraceable code is called as it is, and nothing that it calls is compiled.
        _called.append(torch._dynamo.nonstrict_trace(untraced(_run)))
        # Others wait for a worker even if it needs none of the values, for example with an empty
        # part.
        torch.fx.node.has_side_effect(torch.ops.tessel.apply.default)
        torch.fx.node.has_side_effect(torch.ops.tessel.apply_after.default)
        SAC_IGNORED_OPS.add(torch.ops.tessel.apply.default)  # else torch warns that it is repeated
    return True


_BETWEEN = "\0"  # joins the texts that are passed as one


def _run(texts: str, /, *given: Any, **kwargs: Any) -> Any:
    """Call a method with these tensors in the places of the module's own.

    Args:
        texts: the handle of the object, the name of its method, the attribute with the module, the
            modes of this, the number of the arguments, the key of the class of each argument, and
            the name of each tensor.
        given: the arguments of the method, followed by the parameters and buffers of the module.
        kwargs: keyword arguments of the method.
    """
    from torch.nn.utils.stateless import _reparametrize_module

    handle, name, holder, _, count, *rest = texts.split(_BETWEEN)
    args, values = given[: int(count)], given[int(count) :]
    kinds, names = rest[: len(args) + len(kwargs)], rest[len(args) + len(kwargs) :]
    caller = object_of(handle)
    module = getattr(caller, holder) if holder else caller
    own = dict(zip(names, values, strict=True))
    with _reparametrize_module(module, own, tie_weights=True) if own else nullcontext():
        # Decided by the arguments, as torch before 2.13 does not say that it traces. Tensors with
        # values come from a backend that runs Dynamo's graph as it is.
        if detect_fake_mode((values, args, kwargs)) is None:
            _say(kinds, (*args, *kwargs.values()))
            return getattr(caller, name)(*args, **kwargs)
        # These tensors still have symbols for lengths that are fixed now, and symbols are no cache
        # keys.
        args, kwargs = tree_map_only(Tensor, _with_numbers, (args, kwargs))
        _say(kinds, (*args, *kwargs.values()))
        trace: list[Any] = []  # its operators live as long as the graph that names them
        caller.__dict__.setdefault("_traces", []).append(trace)
        alone = transport.num_workers() == 1
        with (
            setting(current_trace, trace),
            nullcontext() if alone else NoDrawing(),
            _keeping_nothing(module),
        ):
            result = getattr(caller, name)(*args, **kwargs)
        caller.__dict__["_given_kind"] = getattr(result, "graph_key", "")
        return result


@contextmanager
def _keeping_nothing(module: Any) -> Iterator[None]:
    """Let modules drop the tensors that they keep for the next call, such as a grid of positions.

    Those have no values here: each graph computes its own. Notes about them are dropped, too.
    """
    held = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    before = [dict(vars(each)) for each in held]
    yield
    for each, known in zip(held, before, strict=True):
        now = vars(each)
        new = {key: value for key, value in now.items() if value is not known.get(key, now)}
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(new)):
            for key in new:
                del now[key]
            now.update({key: known[key] for key in new if key in known})


def _with_numbers(x: Tensor) -> Tensor:
    is_symbolic = any(isinstance(length, torch.SymInt) for length in x.shape)
    return x.view([*map(int, x.shape)]) if is_symbolic else x


def _say(kinds: list[str], given: tuple[Any, ...]) -> None:
    """Set the attributes of tensors that their classes in compiled code stand for."""
    for key, x in zip(kinds, given, strict=True):
        if key:
            setattr(x, *graph_kinds[key].graph_attribute)  # type: ignore[attr-defined]


def eagerly(function: F) -> F:
    """Let compiled code call a function as it is, outside of its graph.

    Its movements depend on an agreement of all workers in each call.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)
