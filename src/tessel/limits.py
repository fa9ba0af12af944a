"""How long a worker waits for the others."""

from tessel.settings import time_limit

__all__ = ["seconds_to_wait", "time_limit"]
_USUAL = 1800.0  # seconds, torch's own


def seconds_to_wait() -> float:
    """The time limit in seconds, as torch has it if none is set."""
    limit = time_limit()
    return _USUAL if limit is None else limit.total_seconds()
