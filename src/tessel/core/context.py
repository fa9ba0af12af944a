"""Context: values that hold while a block of code runs, in this thread or task alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Let a variable have a value inside of the `with` block.

    >>> from contextvars import ContextVar
    >>> depth = ContextVar("depth", default=0)
    >>> with setting(depth, 1):
    ...     depth.get()
    1
    >>> depth.get()
    0
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
