"""Garbage: what Python looks for now and then, among all objects.

It imports nothing of the package, so that it can be imported before everything else.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Collect no garbage in the `with` block.

    Imports make hundreds of thousands of objects and no garbage: looking for it takes a sixth of
    the time of torch's and Tessel's imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
