"""Stragglers: workers that do not end when the launcher asks them to.

When a worker has failed, elastic sends SIGTERM to the others and gives each half a minute. A worker
that is stopped, by a signal or a debugger, does not see the signal; neither does one whose signals
are blocked, or that is stuck in a system call. In these cases waiting is useless.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

TICK = 0.2  # seconds between two checks
SECONDS_TO_NOTICE = 5.0  # seconds that a worker has to see the signal


class Stragglers(threading.Thread):
    """Watches the children of this process while a `with` block runs.

    Attributes:
        killed: the processes that were ended here.
    """

    def __init__(self) -> None:
        super().__init__(name="tessel stragglers", daemon=True)
        self.killed: set[int] = set()
        self._since: dict[int, float] = {}  # when a pending signal was first seen
        self._over = threading.Event()

    def __enter__(self) -> Stragglers:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(TICK):
            children = list[str]()
            for path in Path("/proc/self/task").glob("*/children"):
                with contextlib.suppress(OSError):  # the thread has ended
                    children += path.read_text().split()
            for pid in map(int, children):
                with contextlib.suppress(OSError, ValueError, KeyError):  # it may have ended
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
                    if not pending >> (signal.SIGTERM - 1) & 1:
                        self._since.pop(pid, None)
                        continue
                    since = self._since.setdefault(pid, time.monotonic())
                    if status["State"][0] in "Tt":
                        os.kill(pid, signal.SIGCONT)  # it then sees the other signal
                    if time.monotonic() - since > SECONDS_TO_NOTICE:
                        self.killed.add(pid)
                        os.kill(pid, signal.SIGKILL)
