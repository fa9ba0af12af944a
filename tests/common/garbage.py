"""Python looks for cycles seldom, in whatever process imports this.

With its own thresholds it goes through all that torch's compiler and the caches of plans keep,
again and again: a sixth of the processor time of tests of compiled code, little of others.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OWN = gc.get_threshold()
gc.set_threshold(100_000, 50, 100)


@contextmanager
def collected_as_usual() -> Iterator[None]:
    """With the thresholds of Python, for tests of memory: cycles of torch's keep tensors."""
    seldom = gc.get_threshold()
    gc.set_threshold(*_OWN)
    try:
        yield
    finally:
        gc.set_threshold(*seldom)
