"""Marks on tensors: shards carry them through torch's functions, or say that they were lost."""

from __future__ import annotations

from copy import deepcopy
from operator import index as as_int
from typing import Any

import torch
from torch import Tensor

from tessel.distributed import keeping
from tessel.distributed.group import row_of
from tessel.distributed.mark import ATTRIBUTE, Mark, State, Unknown, check_known, describe, state_of
from tessel.distributed.sharing import check_classes, check_uses, settled, traced_state
from tessel.graph import eagerly
from tessel.partition import Partition

__all__ = [
    "Mark",
    "Shard",
    "State",
    "Unknown",
    "check_known",
    "describe",
    "get_parallel_dim",
    "mark_of",
    "marked",
    "note",
    "register_parallel_dim",
    "share",
    "shared_by",
    "state_of",
    "traced_state",
    "unmarked",
]


_SHARED = "_tessel_shared_by"


class Shard(Tensor):
    """A tensor with a mark, or with the note that its mark was lost.

    It computes as a plain tensor does; what torch's functions give of it has the mark that
    follows, as `tessel.distributed.keeping` says.
    """

    _tessel_mark: Mark | Unknown

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not all(issubclass(cls, each) for each in types):
            return NotImplemented
        return _computed(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        if id(self) in memo:
            found: Shard = memo[id(self)]
            return found
        with torch._C.DisableTorchFunctionSubclass():
            if not self.is_leaf:
                raise RuntimeError(
                    "only a tensor that the user made can be copied by deepcopy; detach it first"
                )
            inner = deepcopy(self.detach().as_subclass(Tensor), memo)
            copied = _become(inner.requires_grad_(self.requires_grad), self._tessel_mark)
            if self.grad is not None:
                copied.grad = deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied


@eagerly
def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a torch function gives of shards, with the mark that it has."""
    name = keeping.name_of(func)
    if name in ("backward", "grad"):
        return _derive(name, func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if name in keeping.QUESTIONS:
            return func(*args, **kwargs)
        call = keeping.Call.of(name, args, kwargs)
        keeping.check_target(call)
        check_uses(call)
        check_classes(call)
        result = func(*args, **kwargs)
        if name == "__setitem__" and isinstance(args[0], Shard):
            args[0]._tessel_mark = keeping.state_after_writing(call)
        return _noted(result, call)


@eagerly
def marked(x: Tensor, mark: Mark | Unknown) -> Shard:
    """The same tensor, marked; gradients pass. `x` itself stays as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return _become(x.as_subclass(Tensor), mark)


@eagerly
def unmarked(x: Tensor) -> Tensor:
    """The same values as a plain tensor; gradients pass."""
    if not isinstance(x, Shard):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def mark_of(x: Tensor) -> Mark | None:
    """The mark of a tensor, or None if it has none; ValueError if it was lost."""
    state = state_of(x)
    check_known(state, "this tensor")
    assert not isinstance(state, Unknown)
    return state


@eagerly
def get_parallel_dim(x: Tensor) -> int | None:
    """The dimension along which a tensor is a shard, or None if it is not marked as one.

    Raises ValueError where the mark was lost on the way.

    >>> import tessel, torch
    >>> x = tessel.distributed.register_parallel_dim(torch.ones(2, 3), -1)
    >>> tessel.distributed.get_parallel_dim(x), tessel.distributed.get_parallel_dim(x.T * 2)
    (1, 0)
    """
    mark = mark_of(x)
    return None if mark is None else mark.dim


@eagerly
def register_parallel_dim(x: Tensor, dim: int | None, partition: Partition | None = None) -> Tensor:
    """Say that a tensor is this worker's shard along a dimension; None says that it is whole.

    The result has the mark, and `x` stays as it was; a `torch.nn.Parameter` is marked itself.

    Args:
        x: the tensor.
        dim: the dimension that is split over the workers.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> x = tessel.distributed.register_parallel_dim(torch.ones(3), 0)
    >>> tessel.distributed.get_parallel_dim(x)
    0
    >>> type(tessel.distributed.register_parallel_dim(x, None))
    <class 'torch.Tensor'>
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"register_parallel_dim: a tensor is needed, got {x!r}")
    if dim is None:
        return note(x, None)
    place, ndim = as_int(dim), x.ndim
    if not -ndim <= place < ndim:
        raise ValueError(
            f"register_parallel_dim: dim {place} is out of range for a tensor of shape "
            f"{tuple(x.shape)}"
        )
    return note(x, Mark(place % ndim, row_of(partition)))


def note(x: Tensor, mark: Mark | None) -> Tensor:
    """The tensor with a mark, or without one: a parameter itself, else another tensor."""
    if isinstance(x, torch.nn.Parameter) and not isinstance(x, Shard):
        if mark is None:
            x.__dict__.pop(ATTRIBUTE, None)
        else:
            setattr(x, ATTRIBUTE, mark)
        return x
    return settled(unmarked(x)) if mark is None else marked(x, mark)


def share(parameter: Tensor, partition: Partition) -> Tensor:
    """Note of a parameter that it is whole on all workers of a group, as one value."""
    setattr(parameter, _SHARED, partition)
    return parameter


def shared_by(parameter: Tensor) -> Partition | None:
    """The group that shares a parameter as one value, if that was noted."""
    found: Partition | None = getattr(parameter, _SHARED, None)
    return found


def _become(fresh: Tensor, mark: Mark | Unknown) -> Shard:
    """Turn a plain tensor that nobody else has into a shard."""
    fresh.__class__ = Shard
    assert isinstance(fresh, Shard)
    fresh._tessel_mark = mark
    return fresh


def _noted(result: Any, call: keeping.Call) -> Any:
    """The result of a function with the mark that it has."""
    if isinstance(result, Tensor):
        return _note_one(result, call)
    if isinstance(result, tuple | list) and any(isinstance(each, Tensor) for each in result):
        parts = [_noted(each, call) for each in result]
        plain = type(result) in (tuple, list)
        return type(result)(parts) if plain else _rebuilt(result, parts)
    return result


def _rebuilt(result: Any, parts: list[Any]) -> Any:
    """A named tuple of torch or of Python, with other parts."""
    return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)


def _note_one(result: Tensor, call: keeping.Call) -> Tensor:
    state = keeping.state_after(call, result)
    if state is None or state_of(result) == state:
        return result
    if any(result is each for each in keeping.targets(call)):
        result._tessel_mark = state  # type: ignore[attr-defined]
        return result
    if any(result is each for each in call.tensors):  # one that was there before keeps its mark
        return marked(result, state)
    return _become(result, state)


def _derive(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward pass, in which torch's functions on shards keep marks as always."""
    if keeping.is_property(func):
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            return found if found is None else marked(found, args[0]._tessel_mark)
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
    if name == "grad" and any(isinstance(each, Shard) for each in keeping.tensors_in(inputs)):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    outputs = {key: keeping.mapped(unmarked, kwargs[key]) for key in kwargs if key == "outputs"}
    return func(*keeping.mapped(unmarked, args[:1]), *args[1:], **{**kwargs, **outputs})
