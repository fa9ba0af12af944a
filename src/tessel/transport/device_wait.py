"""Waits of a GPU for other GPUs, which the host does not wait for itself.

An exchange over NCCL is put into a stream, and the host goes on. When it can never be complete, the
host notices nothing until it needs a value, and then hangs. Such an exchange can be ended, but what
it leaves in its tensors is nothing that anybody sent: first the threads that could read it get an
exception.
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

# Torch ends the process when NCCL takes longer than its time limit: it is asked to do so only
# after the watch has told the program, which can then catch the error.
_MERCY = datetime.timedelta(seconds=60)


class DeviceWait(Wait):
    """An exchange that a GPU waits for, and that was put into its current stream last.

    Args:
        key, needs, interrupt: of the wait.
        place_in_order: among the exchanges of its group that hold no thread, from 1.
        gone: those of the others whose processes have ended.
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
        # To record a torch.cuda.Event, torch would make a torch.cuda.Stream in Python.
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
        """Why it will never be complete, if this worker knows."""
        here, limit = f"worker {this_worker()} waits in {self.place[0]}", time_limit()
        if gone := self.gone():
            return f"{here} for worker {gone[0]}, whose process has ended"
        if limit is not None and self.seconds > limit.total_seconds():
            return f"{here} for {list(self.needs)} longer than {limit.total_seconds():g} s"
        return ""

    def tell(self, threads: Iterable[threading.Thread], text: str) -> None:
        """Raise WorkerLost in threads as soon as they are back in Python: in a wait for the GPU,
        before they see what it has."""

        def say(self: WorkerLost) -> None:
            RuntimeError.__init__(self, text)

        # A class, as Python makes the instance when it raises it; users know it as WorkerLost.
        names = {
            "__init__": say,
            "__module__": WorkerLost.__module__,
            "__reduce__": lambda self: (WorkerLost, (text,)),  # for another process
        }
        error = ctypes.py_object(type(WorkerLost.__name__, (WorkerLost,), names))
        for thread in threads:
            identity = ctypes.c_ulong(thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, error)


def be_patient(handle: Any) -> None:
    """Let torch end the process later than the time limit, of which the watch tells the program."""
    limit = time_limit()
    if limit is not None:
        with contextlib.suppress(AttributeError, RuntimeError):  # private: a later torch may differ
            handle._get_backend(torch.device("cuda"))._set_default_timeout(limit + _MERCY)


def abort(handle: Any) -> None:
    """End all exchanges of a group's GPUs."""
    with contextlib.suppress(AttributeError, RuntimeError):
        handle._get_backend(torch.device("cuda")).abort()
