"""Torch functions without a rule: their operands are gathered, with a warning; or they raise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tessel.core.context import setting
from tessel.encoding import encodable
from tessel.errors import check_choice
from tessel.tensor.call_site import CallSite, current_place
from tessel.tensor.rules.pointwise import is_in_place
from tessel.tensor.table import (
    Arguments,
    Settings,
    UnsupportedError,
    as_spread,
    check_not_nested,
    mapped,
    spread_among,
)
from tessel.tensor.tensor import Tensor
from tessel.transport import num_workers

FALLBACKS = ("gather", "raise")
_choice: ContextVar[str] = ContextVar("fallback", default="gather")
_said: set[tuple[str, CallSite]] = set()
# Functions that wrote gathered values into plain tensors during a call of a model; None outside.
written_whole: ContextVar[list[str] | None] = ContextVar("written_whole", default=None)


class GatherWarning(UserWarning):
    """A function gathered its operands, since it has no rule for their layouts."""


@contextmanager
def fallback(choice: str) -> Iterator[None]:
    """Choose what torch functions without a rule do with spread tensors.

    Args:
        choice: "gather" lets every worker compute with the whole operands, with a warning that
            says how many bytes this moves; "raise" raises NotImplementedError.

    >>> import tessel
    >>> with tessel.fallback("raise"):
    ...     pass
    """
    check_choice("fallback", choice, FALLBACKS)
    with setting(_choice, choice):
        yield


def may_gather() -> bool:
    """Whether functions may gather their operands."""
    return _choice.get() == "gather"


@lru_cache(maxsize=1024)
def is_random(name: str) -> bool:
    """Whether a function of this name draws random numbers, by torch's schemas."""
    own = name.rpartition("::")[2].partition(".")[0]  # also of "operator aten::normal.Tensor_float"
    packet = getattr(torch.ops.aten, own.rstrip("_"), None)
    if packet is None:
        return False
    overloads = [getattr(packet, each) for each in packet.overloads()]
    return any(
        torch.Tag.nondeterministic_seeded in each.tags  # not all with a generator have it
        or any(argument.name == "generator" for argument in each._schema.arguments)
        for each in overloads
    )


def without_rule(
    name: str, func: Any, args: Arguments, kwargs: Settings, why: UnsupportedError
) -> Any:
    """Gather the operands and let every worker compute the same, or raise."""
    if not may_gather():
        raise why
    spread = list(spread_among(args, kwargs))
    if is_in_place(name) or kwargs.get("inplace") or kwargs.get("out") is not None:
        # only a plain tensor can be written to, which every worker has, by whole values
        target = args[0] if args else None
        is_plain = isinstance(target, torch.Tensor) and not isinstance(target, Tensor)
        # Workers outside of the partition also have the plain tensor, but no values for it.
        everywhere = all(each._layout.partition.size == num_workers() for each in spread)
        if not is_plain or not everywhere or not is_in_place(name) or "out" in kwargs:
            raise why
        say(name, spread)
        if (written := written_whole.get()) is not None:
            written.append(name)
        return func(target, *gathered(args[1:]), **gathered(kwargs))
    if is_random(name):  # each worker would draw numbers of its own
        raise why
    # Forward mode has levels of its own, from which gradients do not return to the parts.
    needs_grad = any(each._part.requires_grad for each in spread)
    if name == "_make_dual" and needs_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "forward mode (torch.func.jvp, forward_ad.make_dual) of a spread tensor that needs a "
            "gradient: the gradient would be lost; use x.detach(), torch.no_grad(), or derivatives "
            "in backward mode, as torch.func.vjp or torch.autograd.grad"
        )
    return of_whole(name, func, args, kwargs)


def of_whole(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The result that every worker computes from the whole operands, after a warning."""
    spread = list(spread_among(args, kwargs))
    say(name, spread)
    result = func(*gathered(args), **gathered(kwargs))
    check_not_nested(name, result)
    return shared(result, spread[0]._layout.partition)


def gathered(value: Any) -> Any:
    """The arguments with spread tensors gathered."""
    return mapped(lambda each: each.full() if isinstance(each, Tensor) else each, value)


def shared(result: Any, partition: Any) -> Any:
    """The equal results of all workers as spread tensors that all of them have whole."""
    return mapped(
        lambda each: as_spread(each, partition) if isinstance(each, torch.Tensor) else each, result
    )


@encodable
@dataclass(frozen=True)
class Gather:
    """A function gathered its operands: its name, its call site, and the number of bytes."""

    name: str
    place: CallSite
    num_bytes: int


_notes: ContextVar[list[Gather] | None] = ContextVar("notes", default=None)


@contextmanager
def noted_gathers() -> Iterator[list[Gather]]:
    """Record all gathers in the `with` block, including repeated ones, without warnings."""
    notes: list[Gather] = []
    with setting(_notes, notes):
        yield notes


def say(name: str, spread: list[Tensor]) -> None:
    """Warn once for each line of the user's code and each module that runs it."""
    split = [each for each in spread if not each._layout.is_whole]
    if not split:
        return
    place = current_place()
    moved = sum(each.numel() * each.element_size() for each in split)
    notes = _notes.get()
    if notes is not None:
        notes.append(Gather(name, place, moved))
        return
    if (name, place) in _said:
        return
    _said.add((name, place))
    where = f" in {place.module}" if place.module else ""
    warnings.warn_explicit(
        f"torch's `{name}`{where} has no rule for {', '.join(str(e._layout) for e in split)}: "
        f"every worker gathers its operands, {moved} bytes, and computes all of it; "
        f'tessel.fallback("raise") raises here instead',
        GatherWarning,
        place.file,
        place.line,
    )
