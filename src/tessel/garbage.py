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
    the time of torch's and Tessel's imports. After the block they count as old, so that the next
    collection does not look at them either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else it would release what the program keeps out
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
