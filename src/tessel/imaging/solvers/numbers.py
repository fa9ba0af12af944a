"""Numbers that a user gives to a solver: fixed, or a function of the iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Schedule = float | Callable[[int], float]
Arguments = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]


def check_positive(who: object, **numbers: Any) -> None:
    """Raise ValueError for a number that is not finite and above zero; functions pass."""
    for name, value in numbers.items():
        if not callable(value):
            _check(who, name, value, value > 0 if _is_number(value) else False, "above 0")


def check_not_negative(who: object, **numbers: Any) -> None:
    """Raise ValueError for a number that is not finite, or below zero; functions pass."""
    for name, value in numbers.items():
        if not callable(value):
            _check(who, name, value, value >= 0 if _is_number(value) else False, "0 or above")


def check_count(who: object, least: int, **numbers: Any) -> None:
    """Raise ValueError for what is not a whole number of at least this."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"{_name(who)}: {name} must be a whole number of {least} or more, got {value!r}"
            )


def at(schedule: Schedule, iteration: int, who: object, name: str) -> float:
    """The number of an iteration, which must be finite and above zero."""
    if not callable(schedule):
        return schedule
    value = schedule(iteration)
    right = _is_number(value) and value > 0
    _check(who, f"{name} of iteration {iteration}", value, right, "above 0")
    return value


def arguments_at(arguments: Arguments, iteration: int) -> Mapping[str, Any]:
    """The keyword arguments of an iteration."""
    return arguments(iteration) if callable(arguments) else arguments


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(who: object, name: str, value: Any, right: bool, expected: str) -> None:
    if not right:
        raise ValueError(f"{_name(who)}: {name} must be a number {expected}, got {value!r}")


def _name(who: object) -> str:
    return who if isinstance(who, str) else type(who).__name__
