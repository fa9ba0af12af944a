"""The demos of `tessel demo`: each shows that several workers compute what one process computes.

Models, data and problems are those of `examples/`; this package runs them on all workers and in one
process, and compares. A demo is a module with `STEPS` (what the progress bar counts) and
`run(size, note)`, which runs on every worker and returns reports on the first. It may import
everything but the commands in `cli`.
"""

from importlib import import_module
from types import ModuleType

NAMES = ("movements", "unet", "fourier", "classes", "deblur")


def demos() -> tuple[ModuleType, ...]:
    """The demos, in order; imported when they run, since a copy of `src` lacks `examples/`."""
    return tuple(import_module(f"{__name__}.{name}") for name in NAMES)
