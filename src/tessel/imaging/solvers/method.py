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
    _check(who, numbers, lambda n: callable(n) or (_is_number(n) and n > 0), "number above 0")


def check_not_negative(who: object, **numbers: Any) -> None:
    """Raise ValueError for a number that is not finite, or below zero; functions pass."""
    _check(who, numbers, lambda n: callable(n) or (_is_number(n) and n >= 0), "number 0 or above")


def check_count(who: object, least: int, **numbers: Any) -> None:
    """Raise ValueError for what is not a whole number of at least this."""
    is_count = lambda n: isinstance(n, int) and _is_number(n) and n >= least  # noqa: E731
    _check(who, numbers, is_count, f"whole number of {least} or more")


def at(schedule: Schedule, iteration: int, who: object, name: str) -> float:
    """The number of an iteration, which must be finite and above zero."""
    if not callable(schedule):
        return schedule
    value = schedule(iteration)
    check_positive(who, **{f"{name} of iteration {iteration}": value})
    return value


def arguments_at(arguments: Arguments, iteration: int) -> Mapping[str, Any]:
    """The keyword arguments of an iteration."""
    return arguments(iteration) if callable(arguments) else arguments


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(
    who: object, numbers: Mapping[str, Any], is_right: Callable[[Any], bool], expected: str
) -> None:
    for name, value in numbers.items():
        if not is_right(value):
            caller = who if isinstance(who, str) else type(who).__name__
            raise ValueError(f"{caller}: {name} must be a {expected}, got {value!r}")


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
