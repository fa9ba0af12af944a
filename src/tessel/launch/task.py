"""Task: a pickled function with its arguments; workers import the names in it."""

from __future__ import annotations

import contextvars
import functools
import importlib.machinery
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from tessel.launch.message import UNPICKLABLE

_importing_main: contextvars.ContextVar[str] = contextvars.ContextVar("importing_main")


class Task(NamedTuple):
    """A function and its arguments, pickled."""

    name: str
    pickled: bytes  # empty if workers could not import its names
    main: tuple[str, str | None] | None = None  # file and package of the script that it needs

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...]) -> Task:
        """The task to call `fn(*args)`."""
        name = f"{fn.__module__}.{fn.__qualname__}" if hasattr(fn, "__qualname__") else repr(fn)
        try:
            pickled = pickle.dumps((fn, args))
        except UNPICKLABLE:
            return cls(name, b"")
        # On a worker the main module has the second name: see `_import_main`.
        if b"__main__" not in pickled and b"__mp_main__" not in pickled:
            return cls(name, pickled)
        main = sys.modules["__main__"]
        path = getattr(main, "__file__", None)
        if not (path and os.path.isfile(path)):
            return cls(name, b"")
        return cls(name, pickled, (path, getattr(main, "__package__", None)))


def load_task(
    pickled: bytes | memoryview, main: tuple[str, str | None] | None
) -> Callable[[], object]:
    """Load the function with its arguments, on a worker."""
    try:
        if main:
            _import_main(*main)
        fn, args = pickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        error.add_note("The worker cannot import the function that it should run.")
        raise
    return functools.partial(fn, *args)


def forbid_while_importing_main() -> None:
    """Raise if a worker would start workers only because it imports the caller's script."""
    if path := _importing_main.get(None):
        raise RuntimeError(
            f"a worker imports {path} to find the function that it runs, which starts "
            f"workers again; start them only when the file is run as a script:\n\n"
            f'    if __name__ == "__main__":\n'
            f"        tessel.launch(...)\n"
        )


def _import_main(path: str, package: str | None) -> None:
    """Make the caller's script this process's main module, as `multiprocessing` does.

    It runs under the name `__mp_main__`, so that code guarded by `__main__` is not run.
    """
    previous = sys.modules["__main__"]
    if getattr(previous, "__file__", None) == path:
        return
    module = types.ModuleType("__mp_main__")
    module.__file__, module.__package__ = path, package
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    token = _importing_main.set(path)
    try:
        importlib.machinery.SourceFileLoader("__mp_main__", path).exec_module(module)
    except BaseException:
        sys.modules["__main__"] = previous
        raise
    finally:
        _importing_main.reset(token)
