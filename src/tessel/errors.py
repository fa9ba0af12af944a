"""Tessel's own exceptions, and checks of arguments."""

from collections.abc import Sequence


class WorkerLost(RuntimeError):  # noqa: N818
    """A worker of this job died or stopped answering."""


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
