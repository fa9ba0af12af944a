"""Shards: tensors that keep their sharding in torch's functions, or know that it was lost."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from copy import deepcopy
from operator import index as as_int
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from tessel.core.agreement import agree
from tessel.core.context import is_compiling
from tessel.core.graph import UNKNOWN, eagerly, graph_kinds
from tessel.core.handles import constant_in_graphs
from tessel.core.linop import is_traced
from tessel.core.partition import Partition, world
from tessel.distributed import propagation, spreading
from tessel.distributed import torch_call as calls
from tessel.distributed.group import row_of
from tessel.distributed.shardings import (
    ATTRIBUTE,
    Sharding,
    ShardingValues,
    State,
    UnknownSharding,
    check_known,
    describe,
    in_values,
    of_values,
    state_of,
)
from tessel.distributed.sharing import (
    check_classes,
    check_factor,
    check_uses,
    conclusion_of,
    known_plain,
    traced_state,
)
from tessel.distributed.wrapping import adapt_torch, check_gradient_reader, check_optimizer
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.create import Where, owners
from tessel.tensor.tensor import converters

# names that are also imported from here, for all users of shards
__all__ = ["Sharding", "State", "UnknownSharding", "check_known", "describe", "state_of"]
__all__ += ["traced_state"]

_SHARED = "_tessel_shared_by"
_CALLED = "_tessel_called"  # the `dim` that a parameter has in its layer, which may count otherwise


class Shard(Tensor):
    """This worker's part of a tensor that is split along one dimension over a row of workers.

    It has the shape of the part and computes with the part alone, as a plain tensor does. Results
    of torch's functions are shards where the functions' rules for spread tensors allow it;
    elsewhere the sharding is lost, and layers that need it report where. Parallel layers return
    shards, and have shards as parameters; `tessel.register_parallel_dim` makes a tensor a shard.

    >>> import tessel, torch
    >>> isinstance(tessel.nn.ParallelLinear(4, 6, dim=-1)(torch.ones(4)), tessel.distributed.Shard)
    True
    """

    _tessel_sharding: Sharding | UnknownSharding
    _is_param: bool = False
    graph_key: str = UNKNOWN

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for each in types:
            if not issubclass(cls, each) and not issubclass(each, Shard):
                return NotImplemented  # a spread tensor, which converts the shard
        if torch.compiler.is_dynamo_compiling():
            return _in_graph(func, args, kwargs or {})
        if isinstance(func, OpOverload) and func.namespace == "tessel":  # a node of a graph
            return func(*calls.mapped(as_plain, args))
        if is_compiling():
            return _computed(func, args, kwargs or {})
        name = calls.name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("is_leaf", "grad") and args and _is_parameter(args[0]):
                _meet(sys._getframe(1), args[0])
            if name in calls.QUESTIONS:
                return func(*args, **(kwargs or {}))
            if name == "grad" and len(args) == 1 and not kwargs:
                return _gradient(func(*args), args[0])
            sharding = propagation.common_sharding(name, args, kwargs)
            if sharding is not None:
                result = func(*args, **(kwargs or {}))
                for each in result if isinstance(result, tuple) else (result,):
                    if type(each) is Tensor:
                        _become(each, sharding)
                return result
        return _computed(func, args, kwargs or {})

    @eagerly
    def spread(self) -> SpreadTensor:
        """Return the spread tensor of which this is the part, with the shape of the whole.

        Both share memory, and gradients flow both ways. Nothing is sent if the length of the whole
        is known, as for parameters and results of parallel layers; whether the shard needs a
        gradient must then be the same on all workers. Else they exchange their lengths, which may
        be any.

        >>> import tessel, torch
        >>> h = tessel.nn.ParallelLinear(4, 6, dim=-1)(torch.ones(3, 4))
        >>> h.spread().softmax(1).shard().shape
        torch.Size([3, 6])
        """
        sharding = _agreed_sharding(self, "x.spread()")
        if sharding.size is None:
            return spreading.agreed_part(as_plain(self), sharding, "x.spread()")
        return SpreadTensor(as_plain(self), sharding.layout(tuple(self.shape)))

    @eagerly
    def full(self) -> Tensor:
        """Return the whole plain tensor on every worker that has a shard, as one shared value.

        Forward:  an all-gather.    Adjoint:  this worker's part, nothing moves.

        >>> import tessel, torch
        >>> tessel.nn.ParallelLinear(4, 6, dim=-1)(torch.ones(3, 4)).full().shape
        torch.Size([3, 6])
        """
        sharding = _agreed_sharding(self, "x.full()")
        if not sharding.partition.active:
            return self.spread().full()
        return spreading.agreed_part(as_plain(self), sharding, "x.full()").full()

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        if id(self) in memo:
            return memo[id(self)]
        with torch._C.DisableTorchFunctionSubclass():
            if not self.is_leaf:
                raise RuntimeError(
                    "only a tensor that the user made can be copied by deepcopy; detach it first"
                )
            plain = self.detach().as_subclass(Tensor)
            inner = plain.clone() if self._is_param else deepcopy(plain, memo)
            copied = _become(inner.requires_grad_(self.requires_grad), self._tessel_sharding)
            if self._is_param:  # like torch's parameters, copied without the gradient
                _as_parameter(copied, getattr(self, _CALLED, None))
            elif self.grad is not None:
                copied.grad = deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take the memory of another tensor; torch does not report this call to subclasses."""
        with torch._C.DisableTorchFunctionSubclass():
            result = _replace(calls.TorchCall.of("set_", (self, *args), kwargs), Tensor.set_)
            assert isinstance(result, Tensor)
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.detach().as_subclass(Tensor)
            values = in_values(self._tessel_sharding)
            called = getattr(self, _CALLED, None)
            return restored, (plain, self.requires_grad, self._is_param, values, called)


def kind_of(sharding: Sharding) -> type[Shard]:
    """The class of shards with this sharding, since tensors in compiled code have no attributes."""
    key = f"{in_values(sharding)} of {id(sharding.partition.prepare())}"
    if key not in graph_kinds:
        said = {"graph_key": key, "graph_attribute": (ATTRIBUTE, sharding), ATTRIBUTE: sharding}
        graph_kinds[key] = type("Shard", (Shard,), {**said, "__module__": __name__})
    return graph_kinds[key]


def _in_graph(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace `_computed` under Dynamo, where only pointwise functions keep a sharding."""
    first: Any = None
    for each in args:
        first = each if first is None and isinstance(each, Tensor) else first
    key = getattr(type(first), "graph_key", "")
    is_read, keeps_shardings = _known_of(func.__name__)
    fits = is_read or (key not in ("", UNKNOWN) and keeps_shardings)
    with torch._C.DisableTorchFunctionSubclass():
        for each in args:
            if isinstance(each, Tensor):
                is_shard = isinstance(each, Shard)
                learns = torch.is_grad_enabled() and each.requires_grad
                same = getattr(type(each), "graph_key", "") == key if is_shard else not learns
                alike = each.shape == first.shape or (each.ndim == 0 and not is_shard)
                fits = fits and (is_read or (same and alike))
            elif isinstance(each, tuple | list):
                fits = False
        for each in kwargs.values():
            if isinstance(each, Tensor | tuple | list):
                fits = False
        if fits:
            result: Any = func(*args, **kwargs)
            if is_read and not isinstance(result, Tensor):
                return result  # a shape, or another property
            if not is_read and isinstance(result, Tensor):
                return result.as_subclass(_graph_kind(key))
    torch._dynamo.graph_break(
        msg="a shard goes through a graph from one parallel layer to the next in functions of each "
        "element alone, beside numbers and shards of the same sharding: this function is called "
        "outside of it. Leave out fullgraph=True, or gather before"
    )
    return _computed(func, args, kwargs)


@constant_in_graphs
def _known_of(name: str) -> tuple[bool, bool]:
    """Whether a function only queries a property, and whether it keeps shardings."""
    return name == "__get__" or name in calls.QUESTIONS, propagation.is_always_pointwise(name)


@constant_in_graphs
def _graph_kind(key: str) -> type:
    return graph_kinds[key]


def restored(
    plain: Tensor,
    requires_grad: bool,
    is_parameter: bool,
    values: ShardingValues,
    called: int | None = None,
) -> Shard:
    """Restore a shard that was written to a file."""
    shard = _become(plain.detach().requires_grad_(requires_grad), of_values(values))
    return _as_parameter(shard, called) if is_parameter else shard


torch.serialization.add_safe_globals([restored])  # the functions that torch.load lets files call


def _meet(frame: FrameType, parameter: Shard) -> None:
    """Check the code that reads a gradient; an optimizer gets hooks that check it before steps.

    An optimizer asks parameters whether they are leaves when it is created, and for their gradients
    in each step: so it is recognized here, and gets hooks of its own, which also keep its state
    plain. (Torch also has hooks for the steps of all optimizers of a process, but those without
    shards are not Tessel's concern.)
    """
    asking = frame.f_locals.get("self")
    if not isinstance(asking, Optimizer):
        check_gradient_reader(frame, parameter._tessel_sharding)
        return
    if _make_plain not in asking._optimizer_step_post_hooks.values():
        asking.register_step_pre_hook(check_optimizer)
        asking.register_step_post_hook(_make_plain)
        check_optimizer(asking)  # an optimizer that was copied or unpickled is already in its step


def _make_plain(stepped: Optimizer, *_: Any) -> None:
    """Make the state that an optimizer keeps for parameters plain tensors, as in files."""
    for group in stepped.param_groups:
        for parameter in group["params"]:
            if type(parameter) is Shard and parameter in stepped.state:
                for each in calls.tensors_in(stepped.state[parameter]):
                    if type(each) is Shard and not each._is_param:
                        _become_plain(each)


@eagerly
def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a torch function on shards, with its sharding."""
    name = calls.name_of(func)
    if name in ("backward", "grad"):
        return _derive(name, func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if name in calls.QUESTIONS:
            return func(*args, **kwargs)
        if name.startswith(calls.OF_LISTS):
            return _of_lists(name, func, args, kwargs)
        call = calls.TorchCall.of(name, args, kwargs, func)
        if name == "data" and len(args) > 1:
            return _replace(call, func)
        _check(call)
        result = func(*args, **kwargs)
        if name == "__setitem__" and isinstance(args[0], Shard) and not args[0]._is_param:
            args[0]._tessel_sharding = propagation.state_after_writing(call)
        elif propagation.fills_by_mask(call):
            _become(args[0], args[1]._tessel_sharding)
        return _noted(result, call)


def _check(call: calls.TorchCall) -> None:
    """Raise ValueError if the result of a call would not be what it seems."""
    propagation.check_target(call)
    check_uses(call)
    check_classes(call)
    check_factor(call)


@eagerly
def as_shard(x: Tensor, sharding: Sharding | UnknownSharding) -> Shard:
    """The same tensor as a shard; gradients pass. `x` itself does not change."""
    if is_traced():  # it gets its class when it leaves the trace
        assert isinstance(sharding, Sharding)
        setattr(x, ATTRIBUTE, sharding)
        x.graph_key = kind_of(sharding).graph_key  # type: ignore[attr-defined]
        return cast(Shard, x)
    adapt_torch(Shard)  # it may become a buffer
    with torch._C.DisableTorchFunctionSubclass():
        return _become(x.as_subclass(Tensor), sharding)


@eagerly
def as_plain(x: Tensor) -> Tensor:
    """The same values as a plain tensor; gradients pass."""
    if not isinstance(x, Shard):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def drop_shardings(state: dict[str, Any], prefix: str, names: Iterable[str]) -> None:
    """Make some values of a state dict plain tensors, which files contain as for any layer."""
    for name in names:
        if isinstance(state.get(prefix + name), Tensor):
            state[prefix + name] = as_plain(state[prefix + name])


def sharding_of(x: Tensor) -> Sharding | None:
    """The sharding of a tensor, or None; ValueError if it was lost."""
    state = state_of(x)
    check_known(state, "this tensor")
    assert not isinstance(state, UnknownSharding)
    return state


@eagerly
def get_parallel_dim(x: Tensor) -> int | None:
    """The dimension along which a tensor is a shard, or is split; None if it is neither.

    For a parameter of a parallel layer, this is the `dim` of its layer. A linear layer counts its
    inputs as 0 and its outputs as 1 or -1, in the order of its arguments, where the weight is
    (outputs, inputs); for a tensor computed from the weight, it is the dimension of that tensor.

    Raises ValueError if the sharding was lost on the way.

    >>> import tessel, torch
    >>> x = tessel.distributed.register_parallel_dim(torch.ones(2, 3), -1)
    >>> tessel.distributed.get_parallel_dim(x), tessel.distributed.get_parallel_dim(x.T * 2)
    (1, 0)
    >>> weight = tessel.nn.ParallelLinear(3, 2, dim=-1).weight
    >>> tessel.distributed.get_parallel_dim(weight), tessel.distributed.get_parallel_dim(weight * 2)
    (-1, 0)
    """
    if isinstance(x, SpreadTensor):
        dims = [dim for dim in range(x.dim()) if x._layout.is_split(dim)]
        if len(dims) > 1:
            raise ValueError(f"this tensor is split along several dimensions, {dims}: {x._layout}")
        return dims[0] if dims else None
    sharding = sharding_of(x)
    if sharding is None:
        return None
    called: int | None = getattr(x, _CALLED, None)
    return sharding.dim if called is None else called


@eagerly
def register_parallel_dim(x: Tensor, dim: int | None, partition: Partition | None = None) -> Tensor:
    """Register a tensor as this worker's shard along a dimension, or as whole if `dim` is None.

    The tensor itself is registered, and returned. Its values do not change.

    Args:
        x: the tensor.
        dim: the dimension that is split over the workers; None for a tensor that is whole.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> x = tessel.distributed.register_parallel_dim(torch.ones(3), 0)
    >>> tessel.distributed.get_parallel_dim(x)
    0
    >>> type(tessel.distributed.register_parallel_dim(x, None))
    <class 'torch.Tensor'>
    """
    sharding = _sharding_along(x, dim, partition, "register_parallel_dim")
    if isinstance(x, torch.nn.Parameter) or not (type(x) is Tensor or isinstance(x, Shard)):
        return note(x, sharding)
    if sharding is not None:
        adapt_torch(Shard)
        return _become(x, sharding)
    if isinstance(x, Shard):
        _become_plain(x)
    return conclusion_of(x)


def _sharding_along(
    x: Tensor, dim: int | None, partition: Partition | None, name: str
) -> Sharding | None:
    """The sharding of a shard along a dimension, where the length of the whole is unknown."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {x!r}")
    if dim is None:
        return None
    place, ndim = as_int(dim), x.ndim
    if not -ndim <= place < ndim:
        raise ValueError(
            f"{name}: dim {place} is out of range for a tensor of shape {tuple(x.shape)}"
        )
    return Sharding(place % ndim, row_of(partition))


def registered(x: Tensor, dim: int | None, partition: Partition | None, name: str) -> Tensor:
    """Like `register_parallel_dim`, but return a new tensor unless it is a parameter."""
    return note(x, _sharding_along(x, dim, partition, name))


@eagerly
def register_parallel_attribute(
    x: Tensor, dim: int | None, order_type: int = 0, partition: Partition | None = None
) -> Tensor:
    """Register how a weight or a bias of a user's own layer is split, as the layer counts.

    Args:
        x: this worker's shard of a weight, or of a bias.
        dim: the dimension as a linear layer counts: 0 if its inputs are split, 1 or -1 if its
            outputs are; None if neither is.
        order_type: 0 for a weight (outputs, inputs), as in torch's linear layers, and for their
            biases; 1 for a table whose dimensions count as they are.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> weight = torch.nn.Parameter(torch.ones(3, 2))
    >>> tessel.distributed.gather(tessel.register_parallel_attribute(weight, -1)).shape
    torch.Size([3, 2])
    >>> tessel.get_parallel_dim(weight)
    -1
    """
    name = f"register_parallel_attribute(x, {dim!r}, {order_type!r})"
    if order_type not in (0, 1) or isinstance(order_type, bool):
        raise ValueError(f"{name}: order_type must be 0 or 1")
    if dim not in (None, 0, 1, -1) or isinstance(dim, bool):
        raise ValueError(f"{name}: dim must be None, 0, 1 or -1")
    if not isinstance(x, Tensor) or x.ndim not in (1, 2):
        raise ValueError(f"{name}: a weight of two dimensions or a bias of one is needed")
    place = dim
    if dim is not None and order_type == 0:
        # outputs are the first dimension of a weight, and the only one of a bias, which is whole if
        # they are
        place = 0 if dim else None if x.ndim == 1 else 1
    x = register_parallel_dim(x, place, partition)
    if place is not None:
        call(x, dim)
    return x


def note(x: Tensor, sharding: Sharding | None) -> Tensor:
    """Set the sharding of a tensor, or remove it: a parameter changes itself, else a new tensor."""
    if isinstance(x, torch.nn.Parameter):
        return _note_parameter(x, sharding)
    return known_plain(as_plain(x)) if sharding is None else as_shard(x, sharding)


def call(shard: Tensor, dim: int | None) -> None:
    """Note the number by which the layer of a parameter counts the split dimension."""
    setattr(shard, _CALLED, dim)


def _note_parameter(x: Tensor, sharding: Sharding | UnknownSharding | None) -> Tensor:
    """Change the parameter itself, so that optimizers and other layers that have it see it too."""
    x.__dict__.pop(_CALLED, None)
    if sharding is None:
        if isinstance(x, Shard):
            x.__class__ = torch.nn.Parameter  # type: ignore[assignment]
        for name in (ATTRIBUTE, "_is_param"):
            x.__dict__.pop(name, None)
    elif type(x) in (torch.nn.Parameter, Shard):
        _as_parameter(_become(x, sharding))
    else:  # a class of parameters from another library
        adapt_torch(Shard)
        setattr(x, ATTRIBUTE, sharding)
    return x


def _as_parameter(shard: Shard, called: int | None = None) -> Shard:
    """The same shard, as a parameter; from the first one on, module wrappers check for shards."""
    adapt_torch(Shard)
    shard._is_param = True
    if called is not None:
        call(shard, called)
    return shard


def share(parameter: Tensor, partition: Partition) -> Tensor:
    """Note that a parameter is whole on all workers of a group, as one value."""
    setattr(parameter, _SHARED, partition)
    return parameter


def shared_by(parameter: Tensor) -> Partition | None:
    """The group that shares a parameter as one value, if that was noted."""
    return getattr(parameter, _SHARED, None)


def _become(fresh: Tensor, sharding: Sharding | UnknownSharding) -> Shard:
    """Turn a plain tensor itself into a shard: a new one, or one that the user registers."""
    # not as_subclass, which returns another tensor: the user's own is registered, and a new result
    # needs no view of itself in autograd's graph
    fresh.__class__ = Shard
    assert isinstance(fresh, Shard)
    fresh._tessel_sharding = sharding
    return fresh


def _become_plain(shard: Shard) -> None:
    """Turn a shard that is no parameter into a plain tensor."""
    for name in (ATTRIBUTE, _CALLED):
        shard.__dict__.pop(name, None)
    shard.__class__ = Tensor  # type: ignore[assignment]


def _noted(result: Any, call: calls.TorchCall) -> Any:
    """The result of a function, with the shardings of its tensors."""
    states = propagation.states_after(call, result)
    if not states:
        return result
    if isinstance(result, Tensor):
        return _note_one(result, states[0], call)
    following = iter(states)
    return calls.mapped(lambda each: _note_one(each, next(following), call), result)


def _note_one(result: Tensor, state: State, call: calls.TorchCall) -> Tensor:
    if state is None or state_of(result) == state:
        return result
    if any(result is each for each in calls.targets(call)):
        pairs = zip(call.tensors, call.shapes, strict=True)
        before = next(shape for each, shape in pairs if each is result)
        # a parameter keeps the sharding from its model, regardless of the values written into it
        stays = isinstance(result, torch.nn.Parameter) and tuple(result.shape) == before
        return result if stays else _become(result, state)
    if any(result is each for each in call.tensors):  # an operand that is returned keeps its own
        return result if _is_parameter(result) else as_shard(result, state)
    return _become(result, state)


def _is_parameter(x: Any) -> bool:
    return isinstance(x, Shard) and x._is_param


def _replace(call: calls.TorchCall, func: Any) -> Any:
    """Make a tensor take the values of another, and with them its sharding."""
    target = call.args[0]
    result = func(*call.args, **call.kwargs)
    state = propagation.state_after_replacing(call, _is_parameter(target))
    if state is None or state_of(target) == state:
        return result
    if isinstance(target, torch.nn.Parameter):
        _note_parameter(target, state)
    else:
        _become(target, state)
    return result


def _of_lists(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of lists that treats the tensors at each place separately."""
    if not name.startswith(calls.EACH):
        return func(*args, **kwargs)  # steps of optimizers, in place
    shardings = propagation.shardings_of_each(name, args, kwargs)
    places = {} if shardings else propagation.calls_of_each(name, args, kwargs)
    for call in places.values():
        _check(call)
    result = func(*args, **kwargs)
    found = args[0] if result is None else result
    if shardings:
        pairs = () if name.endswith("_") else zip(found, shardings, strict=True)
        for each, sharding in pairs:
            if sharding is not None:
                _become(each, sharding)
        return result
    noted = [_noted(each, places[k]) if k in places else each for k, each in enumerate(found)]
    return result if result is None else type(result)(noted)


def _derive(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward pass, in which torch's functions on shards keep shardings as usual."""
    if calls.is_property(func):
        with torch._C.DisableTorchFunctionSubclass():
            return _gradient(func(*args, **kwargs), args[0])
    if name == "grad":
        return _gradients(func, *args, **kwargs)
    # outputs and their gradients are plain: gradients inside the pass are no shards
    with torch.enable_grad():  # in a backward pass, as of a checkpoint, views have no history
        args = (*(calls.mapped(as_plain, each) for each in args[:2]), *args[2:])
        kwargs = {k: v if k == "inputs" else calls.mapped(as_plain, v) for k, v in kwargs.items()}
    inputs = calls.tensors_in(kwargs.get("inputs"))
    if any(isinstance(each, Shard) and not each.is_leaf for each in inputs):
        with torch._C.DisableTorchFunctionSubclass():  # by edges they would get no gradient
            return func(*args, **kwargs)
    if inputs:
        kwargs["inputs"] = tuple(map(_edge, inputs))
    return func(*args, **kwargs)


def _gradient(found: Tensor | None, x: Tensor) -> Tensor | None:
    """The gradient of a tensor, which is a shard if the tensor is one.

    The gradient of a parameter stays plain, as the state of optimizers, which combine the two.
    """
    if type(found) is Tensor and isinstance(x, Shard) and not x._is_param:
        return _become(found, x._tessel_sharding)
    return found


def _gradients(
    func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *rest: Any, **kwargs: Any
) -> Any:
    """Gradients with respect to shards, which are passed to torch as edges of its graph.

    Shards among the outputs are passed likewise: a view of a shard that `torch.func` made has no
    history outside.
    """
    derived = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    several = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    fills = kwargs.pop("materialize_grads", False)
    if fills:
        kwargs["allow_unused"] = True
    edges = tuple(map(_edge, derived)), tuple(map(_edge, several))
    found = func(*edges, calls.mapped(as_plain, grad_outputs), *rest, **kwargs)
    if not fills:
        return found
    return tuple(
        torch.zeros_like(as_plain(x)) if grad is None else grad
        for grad, x in zip(found, several, strict=True)
    )


def _edge(x: Any) -> Any:
    if not isinstance(x, Shard):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(x) if x.requires_grad else x.as_subclass(Tensor)


@eagerly
def refuse_lost(state: UnknownSharding, label: str) -> None:
    """Raise ValueError for a lost sharding, on all workers: others may know theirs, and agree."""
    if state.partition is not None:
        agree(row_of(state.partition), f"{label} {state}")
    check_known(state, label)


def _agreed_sharding(shard: Shard, call: str) -> Sharding:
    """The sharding, for a call that agrees; ValueError on all workers if it was lost."""
    state = shard._tessel_sharding
    if isinstance(state, UnknownSharding):
        refuse_lost(state, call)
    assert isinstance(state, Sharding)
    return state


def _met(shard: Shard, partition: Partition | None) -> SpreadTensor:
    """The spread tensor of a shard, for a call with others over `partition` or `tessel.spread`."""
    if partition is None:  # other workers may have something else, so all compare
        sharding = _agreed_sharding(shard, "tessel.spread")
        return spreading.agreed_part(as_plain(shard), sharding, "tessel.spread")
    state = shard._tessel_sharding
    check_known(state, "a shard that meets a spread tensor")
    assert isinstance(state, Sharding)
    return SpreadTensor(as_plain(shard), state.layout(tuple(shard.shape), partition))


def _owned(shard: Shard, where: Where | None) -> tuple[Tensor, Where]:
    """The part of a shard and its layout or grid, for `tessel.from_local`."""
    state = shard._tessel_sharding
    problem = spreading.contradiction(state, where)
    if problem:  # all workers of the job agree in `from_local`, and so get the error
        agree(world(), problem)
        raise ValueError(problem)
    assert isinstance(state, Sharding)
    return as_plain(shard), spreading.grid_of(shard, state) if where is None else where


def _shard_of(x: SpreadTensor) -> Tensor:
    """The part of a spread tensor as a shard, or as a plain tensor if it is whole everywhere."""
    if x._layout.is_outside:
        return x.local
    return note(x.local, spreading.sharding_within(x._layout))


converters[Shard] = _met
owners[Shard] = _owned
SpreadTensor.as_shard = staticmethod(_shard_of)
