"""How long a worker waits for the others."""

from tessel.settings import time_limit

__all__ = ["time_limit"]
