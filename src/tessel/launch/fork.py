"""Fork: a copy of this process that runs one function and ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

import torch

from tessel.launch.environment import flush_outputs


def fork(body: Callable[[], object]) -> int:
    """Run `body` in a fork of this process, and return the process id of the fork."""
    with warnings.catch_warnings():
        # Python warns about threads, which a fork does not have: see `worker.work`.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    except SystemExit as leaving:
        code = exit_code(leaving)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            flush_outputs()
        os._exit(code)  # a fork must neither return to its parent's code nor run its exit hooks


def unshare_randomness() -> None:
    """Give a fork random numbers of its own, as a process has that was not forked."""
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:  # Python does so itself for `random`
        sys.modules["numpy.random"].seed()


def exit_code(error: BaseException) -> int:
    """The exit code of a Python program that ends with this exception."""
    if not isinstance(error, SystemExit):
        return 1
    if not isinstance(error.code, int):
        return int(error.code is not None)
    return error.code & 0xFF  # the system keeps one byte: -1 is 255


def poll_fork(pid: int) -> int | None:
    """How a fork of this process ended; None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if ended else None


def die_with(parent: int) -> None:
    """Let the system end this process when its parent ends, where it supports that."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
