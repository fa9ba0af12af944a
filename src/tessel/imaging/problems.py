"""Problems: what one worker finds in code of users, while others wait for its results.

A worker that raised alone would leave the others waiting. So it notes the problem and goes on, and
all workers raise in the agreement at the end of the call; where none is ahead, they agree at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from tessel import transport
from tessel.core import agree
from tessel.imaging.context import DistributedContext
from tessel.imaging.parameters import unshared_problem

T = TypeVar("T")

Problem = tuple[str, Exception | None]  # the end of a sentence, and the exception of user code
# those of the current call; None if problems are not collected: the worker raises at once
noticed: ContextVar[list[Problem] | None] = ContextVar("noticed", default=None)


def notice(problem: str, cause: Exception | None = None) -> None:
    """Record a problem, or raise ValueError if problems are not collected."""
    problems = noticed.get()
    if problems is None:
        raise ValueError(f"an image in parts{problem}")
    problems.append((problem, cause))


def known(result: Tensor, users: Any, given: Iterable[Tensor] = ()) -> Tensor:
    """The result; a gradient that goes to a parameter that is not found in `users` is a problem."""
    if torch.is_grad_enabled() and transport.num_workers() > 1:
        problem = unshared_problem([result], users, (), given)
        if problem:
            notice(problem)
    return result


def attempted(function: Callable[[], Tensor]) -> Tensor | None:
    """The result of user code; None if it raises, and then all workers raise after the call."""
    if noticed.get() is None or transport.num_workers() == 1:
        return function()
    try:
        return function()
    except Exception as error:  # any exception: others wait for the results of this worker
        notice(f", which raised {raised(error)}", error)
        return None


def raised(error: Exception) -> str:
    """The text of an exception for other workers."""
    return f"{type(error).__name__}: {error}"


def made_by_all(ctx: DistributedContext, call: str, make: Callable[[], T]) -> T:
    """The result of a user's function on each worker; if it raises on one of them, all raise.

    Args:
        ctx: the workers.
        call: the call, in words.
        make: the function on this worker.
    """
    try:
        found = make()
    except Exception as error:  # any exception: others would wait for this worker
        agree(ctx.partition, f"{call}, which raised {raised(error)}")
        raise
    agree(ctx.partition, call)
    return found
