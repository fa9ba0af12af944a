"""Waits of a GPU for other GPUs, in which the host does not take part.

An exchange over NCCL is put into a stream, and the host goes on. If it can never complete, the host
notices nothing until it needs a value, and then hangs. Such an exchange can be aborted, but this
leaves undefined values in its tensors: so the threads that could read them first get an exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tessel.errors import WorkerLost
from tessel.settings import time_limit
from tessel.transport.watch import Key, Wait
from tessel.transport.world import this_worker

# Torch ends the process when NCCL exceeds the time limit of its backend, which is set so late that
# the watch raises an error before, which the program can catch.
_MERCY = datetime.timedelta(seconds=60)


class DeviceWait(Wait):
    """An exchange that a GPU waits for, the last one put into its current stream.

    Args:
        key, needs, interrupt: the same as those of `Wait`.
        place_in_order: its number among the exchanges of its group that hold no thread, from 1.
        gone: returns the other workers whose processes have ended.
    """

    holds_thread = False

    def __init__(
        self,
        key: Key,
        needs: tuple[int, ...],
        interrupt: Callable[[], object],
        place_in_order: int,
        gone: Callable[[], list[int]],
    ) -> None:
        super().__init__(key, needs, interrupt=interrupt)
        self.place_in_order, self.gone = place_in_order, gone
        # To record a torch.cuda.Event, torch would create a torch.cuda.Stream in Python.
        self.event = torch.Event("cuda")
        self.event.record()

    @property
    def is_over(self) -> bool:
        return bool(self.event.query())

    @property
    def is_asleep(self) -> bool:
        return True

    @property
    def place(self) -> tuple[str, str]:
        where = " in a backward pass" if self.key[1] >= 0 else ""
        return f"an exchange between GPUs{where}", ""

    def fault(self) -> str:
        """Why it will never complete, if this worker knows."""
        here, limit = f"worker {this_worker()} waits in {self.place[0]}", time_limit()
        if gone := self.gone():
            return f"{here} for worker {gone[0]}, whose process has ended"
        if limit is not None and self.seconds > limit.total_seconds():
            return f"{here} for {list(self.needs)} longer than {limit.total_seconds():g} s"
        return ""

    def tell(self, threads: Iterable[threading.Thread], text: str) -> None:
        """Raise WorkerLost in threads as soon as they return to Python.

        A thread that waits for the GPU gets it before it sees the GPU's values.
        """

        def say(self: WorkerLost) -> None:
            RuntimeError.__init__(self, text)

        # A class, since Python creates the instance when it raises; users see it as WorkerLost.
        names = {
            "__init__": say,
            "__module__": WorkerLost.__module__,
            "__reduce__": lambda self: (WorkerLost, (text,)),  # for pickling
        }
        error = ctypes.py_object(type(WorkerLost.__name__, (WorkerLost,), names))
        for thread in threads:
            identity = ctypes.c_ulong(thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, error)


def be_patient(handle: Any) -> None:
    """Make torch end the process only after the time limit, at which the watch raises an error."""
    limit = time_limit()
    if limit is not None:
        with contextlib.suppress(AttributeError, RuntimeError):  # private, and may change in torch
            handle._get_backend(torch.device("cuda"))._set_default_timeout(limit + _MERCY)


def abort(handle: Any) -> None:
    """Abort all exchanges of a group's GPUs."""
    with contextlib.suppress(AttributeError, RuntimeError):
        handle._get_backend(torch.device("cuda")).abort()
