"""Patience: how a worker waits for something that another writes to memory."""

from __future__ import annotations

import os
import time

from tessel.transport.bell import Bell

SPINS = 2000  # looks at once, if each worker has a core
YIELDS = 100  # looks after each of which another process may run
NAP = 0.05  # seconds of sleep, unless the bell rings


class Patience:
    """Look again at once, then let others run in between, then sleep.

    Args:
        bell: of this worker, which others ring when they did something.
        spins: for how many looks this worker keeps its core.
    """

    __slots__ = ("_bell", "_pauses", "_since", "_spins")

    def __init__(self, bell: Bell, spins: int) -> None:
        self._bell, self._spins = bell, spins
        self._pauses = 0
        self._since = 0.0

    def pause(self) -> bool:
        """Pause between two looks in vain; whether this was a whole nap and nobody rang."""
        self._pauses += 1
        beyond = self._pauses - self._spins
        if beyond <= 0:
            return False
        if beyond == 1:
            self._since = time.monotonic()
        if beyond <= YIELDS:
            os.sched_yield()
        elif not self._bell.is_asleep:  # not yet, or another thread of this worker has woken up
            self._bell.set_asleep(True)  # and look once more before sleeping
        else:
            return not self._bell.wait(NAP)
        return False

    def end(self) -> None:
        """Something happened: the next pause is a short one."""
        if self._pauses > self._spins + YIELDS:
            self._bell.set_asleep(False)
        self._pauses = 0

    @property
    def seconds(self) -> float:
        """How long nothing happened."""
        return time.monotonic() - self._since if self._pauses > self._spins else 0.0
