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

    A class with a method for graphs (`in_graphs`) defines `can_be_traced`, which says whether a
    call can be in one, and may define how parameters enter and of which classes results are.

    No other process has the same handle, since compilers cache their results on disk under the
    text of a graph. It is a string, since compilers assume that integers may change.
    """

    handle: str
    # attributes of this process or job, which a copy computes anew, perhaps on another worker
    _derived: ClassVar[frozenset[str]] = frozenset({"handle"})

    gives_kinds: ClassVar[bool] = False  # whether results have the class that they had in the trace

    def plain_parameters(self) -> dict[str, Any] | None:
        """The parameters as compiled code takes them; None for the module's own."""
        return None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__new__(cls)
        instance.__dict__["handle"] = handle = uuid4().hex
        _objects[handle] = instance
        return instance

    def __getstate__(self) -> dict[str, Any]:
        # A copy computes agreements and cached properties anew, like everything that is derived.
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
