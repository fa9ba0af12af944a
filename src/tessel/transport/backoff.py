"""Backoff: waiting for something that another worker writes to memory."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence

from tessel.transport.copy_program import YIELD_NS, engine, waiting_words
from tessel.transport.wakeup import Wakeup

# A worker with a core of its own spins: waking it would take longer than most waits. If it shares
# its core, it yields, since it may wait for the very workers that need the core. A nap also bounds
# the time until the death of a worker is noticed, since a dead worker notifies no other.
SPINS = 2000  # looks without a pause, if each worker has a core
SPINS_FOR_HOSTS = 40  # the same, if a worker may wait for messages from another host
YIELDS = 100  # looks after each of which another process may run
NAP = 0.05  # seconds of sleep, unless another worker notifies this one
SHORT_NAP = 5e-4  # the same, for a worker that also tests messages between hosts
# nanoseconds for which the engine spins instead of so many looks: being woken takes some 50 µs
SPIN_NS_OF = {SPINS: 1_000_000, SPINS_FOR_HOSTS: 200_000, 0: YIELD_NS}


class Backoff:
    """Spin, then yield, then sleep.

    Args:
        wakeup: the wakeup of this worker, by which others notify it of what they did.
        spins: the number of looks for which this worker keeps its core.
    """

    __slots__ = ("_pauses", "_since", "_spins", "_wakeup")

    def __init__(self, wakeup: Wakeup, spins: int) -> None:
        self._wakeup, self._spins = wakeup, spins
        self._pauses = 0
        self._since = 0.0

    def pause(self, is_busy: bool = False) -> bool:
        """Pause between two looks in vain; return whether it was a whole nap, unnotified.

        Args:
            is_busy: whether this worker also tests messages that wake nobody up.
        """
        self._pauses += 1
        beyond = self._pauses - self._spins
        if beyond <= 0:
            return False
        if beyond == 1:
            self._since = time.monotonic()
        if beyond <= YIELDS:
            os.sched_yield()
        elif not self._wakeup.is_asleep:  # not yet, or another thread of this worker has woken up
            self._wakeup.set_asleep(True)  # and look once more before sleeping
        else:
            return not self._wakeup.wait(SHORT_NAP if is_busy else NAP)
        return False

    def await_any(self, semaphores: Sequence[int]) -> bool:
        """Let the engine look in Python's place; return whether none was raised during a nap.

        Args:
            semaphores: the addresses of semaphores that were 0 when this worker just looked.
        """
        if not self._pauses:
            self._since = time.monotonic()
        spin = 0 if self._pauses else SPIN_NS_OF[self._spins]
        self._pauses = self._spins + 1
        nap, yields = round(1e9 * NAP), not self._spins
        head = waiting_words(0, 0, len(semaphores), spin, yields, nap, self._wakeup.addresses)
        words = array("q", [*head, *semaphores])
        return not engine.await_any(words.buffer_info()[0])

    def end(self) -> None:
        """Note that something happened, so that the next pause is a short one."""
        if self._pauses > self._spins + YIELDS:
            self._wakeup.set_asleep(False)
        self._pauses = 0

    @property
    def seconds(self) -> float:
        """The seconds for which nothing has happened."""
        return time.monotonic() - self._since if self._pauses > self._spins else 0.0
