"""Method: what a solver does in one iteration, and the numbers that a user gives to it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from tessel.imaging.solvers.space import Space

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


Values = dict[str, Any]  # tensors by name, or lists of them; "x" is the image


class Method(ABC):
    """An iterative method: how its values begin, and how they change.

    All that it keeps between iterations is in its values, so that these can be written to a
    checkpoint. Tensors that begin with the shape of the image lie where it lies, numbers are the
    same on all workers. A method of one's own gives `iterate`, and `begin` if it keeps more than
    the image.

    >>> import torch
    >>> from tessel.imaging import solvers
    >>> class Half(solvers.Method):
    ...     def iterate(self, values, iteration, space):
    ...         return {"x": values["x"] / 2}
    >>> solvers.solve(Half(), torch.ones(2), max_iterations=2).x
    tensor([0.2500, 0.2500])
    """

    reports: ClassVar[tuple[str, ...]] = ()  # the names of values that go into the history

    def begin(self, x: Tensor, space: Space) -> Values:
        """The values before the first iteration."""
        return {"x": x}

    @abstractmethod
    def iterate(self, values: Values, iteration: int, space: Space) -> Values:
        """The values after an iteration; those before stay as they are."""

    def complete(self, values: Values, space: Space) -> Values:
        """All values from those of a checkpoint that lie as the image does, and numbers.

        For a run that goes on with the image in other parts; a method that keeps more, as
        measurements, computes it anew.
        """
        return values

    @property
    def name(self) -> str:
        """What a progress bar says."""
        return type(self).__name__
