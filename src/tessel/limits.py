"""Limits: the time for which a worker waits for others."""

from tessel.settings import time_limit

__all__ = ["seconds_to_wait", "time_limit"]
_USUAL = 1800.0  # seconds, torch's default


def seconds_to_wait() -> float:
    """The time limit in seconds; torch's default if none is set."""
    limit = time_limit()
    return _USUAL if limit is None else limit.total_seconds()
