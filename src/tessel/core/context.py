"""Context: what holds while a block of code runs.

Values that are set for this thread or task alone, and whether torch traces, derives or transforms
what runs now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
import torch.compiler as _compiler
from torch.compiler import is_dynamo_compiling

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


# The movements of a call that a compiler traces on tensors without values, in their order, and of
# its backward pass.
current_trace: ContextVar[list[Any] | None] = ContextVar("current_trace", default=None)


def is_compiling() -> bool:
    """Whether a compiler traces this call.

    Before 2.13, torch says so only while Dynamo reads code, not while tensors without values are
    traced.
    """
    # Every movement asks this several times, so it is `torch.compiler.is_compiling()` without its
    # check for scripted code. Dynamo supports the first function, but cannot read the flag.
    return is_dynamo_compiling() or _compiler._is_compiling_flag or current_trace.get() is not None


def in_forward_mode() -> bool:
    """Whether this worker computes forward-mode derivatives."""
    return forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether torch derives in forward mode now, or transforms a function (`torch.func`)."""
    return in_forward_mode() or torch._C._are_functorch_transforms_active()
