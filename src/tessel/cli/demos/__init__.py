"""The demos of `tessel demo`: each shows that several workers compute the same as one process.

Models, data and problems are those of `examples/`; this package runs them on all workers and in one
process, and compares. A demo is a module with `STEPS` (counted by the progress bar) and `run(size,
note)`, which runs on every worker and returns reports on the first. This package may import
everything but the commands in `cli`.
"""

from importlib import import_module
from types import ModuleType

NAMES = ("movements", "unet", "fourier", "classes", "deblur")


def demos() -> tuple[ModuleType, ...]:
    """The demos, in order; imported when they run, since a copy of `src` lacks `examples/`."""
    return tuple(import_module(f"{__name__}.{name}") for name in NAMES)
