"""How long a worker waits for the others."""

from __future__ import annotations

import datetime
import os


def time_limit() -> datetime.timedelta | None:
    """The limit that the user set with TESSEL_TIMEOUT, in seconds; None for torch's own."""
    seconds = os.environ.get("TESSEL_TIMEOUT")
    return datetime.timedelta(seconds=float(seconds)) if seconds else None
