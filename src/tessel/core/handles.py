"""Handles: how a compiled graph, which holds only numbers and tensors, refers to an object."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, TypeVar
from uuid import uuid4
from weakref import WeakValueDictionary

F = TypeVar("F")

_objects: WeakValueDictionary[str, Any] = WeakValueDictionary()


class HasHandle:
    """An object with a `handle` of its own; a copy of it gets another.

    If a method of it is to be in graphs (`in_graphs`), it has `can_be_traced`, which says of a call
    whether it can be, and may define how parameters enter and of which classes results are.

    No other process has the same handle, since compilers keep their results on the disk by what a
    graph says. It is text, since they take whole numbers for something that may change.
    """

    handle: str
    # attributes of this process or job, which a copy has to find anew, perhaps on another worker
    _derived: ClassVar[frozenset[str]] = frozenset({"handle"})

    gives_kinds: ClassVar[bool] = False  # whether a result is of the class that it had in the trace

    def plain_parameters(self) -> dict[str, Any] | None:
        """The parameters as compiled code takes them; None for those of the module as they are."""
        return None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__new__(cls)
        instance.__dict__["handle"] = handle = uuid4().hex
        _objects[handle] = instance
        return instance

    def __getstate__(self) -> dict[str, Any]:
        # What was agreed on, and cached properties, a copy finds anew like all that is derived.
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in self._derived
            and not name.startswith("_agreed_")
            and not isinstance(getattr(type(self), name, None), cached_property)
        }


def object_of(handle: str) -> Any:
    """The object of this handle."""
    return _objects[handle]


def constant_in_graphs(function: F) -> F:
    """Let a compiler call `function` while it compiles and keep the result.

    This is `torch.compiler.assume_constant_result` without the import of the compiler, which takes
    as long as that of torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
