"""Backoff: how a worker waits for something that another writes to memory."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence

from tessel.transport.copy_program import YIELD_NS, engine, waiting_words
from tessel.transport.wakeup import Wakeup

# A worker that has a core looks again at once: waking it would take longer than most waits. If it
# shares its core, others run in between, since what it waits for may be theirs to do. A nap also
# bounds how late a worker is found to have died, since a dead worker notifies no other.
SPINS = 2000  # looks at once, if each worker has a core
SPINS_FOR_HOSTS = 40  # the same, where a worker may wait for what another host has yet to send
YIELDS = 100  # looks after each of which another process may run
NAP = 0.05  # seconds of sleep, unless another worker notifies this one
SHORT_NAP = 5e-4  # the same, for one that also looks after messages between hosts
# nanoseconds for which the engine looks in the place of so many looks: to be woken takes some 50 µs
SPIN_NS_OF = {SPINS: 1_000_000, SPINS_FOR_HOSTS: 200_000, 0: YIELD_NS}


class Backoff:
    """Look again at once, then let others run in between, then sleep.

    Args:
        wakeup: of this worker, which others notify when they did something.
        spins: for how many looks this worker keeps its core.
    """

    __slots__ = ("_pauses", "_since", "_spins", "_wakeup")

    def __init__(self, wakeup: Wakeup, spins: int) -> None:
        self._wakeup, self._spins = wakeup, spins
        self._pauses = 0
        self._since = 0.0

    def pause(self, is_busy: bool = False) -> bool:
        """Pause between two looks in vain; whether this was a whole nap without a notification.

        Args:
            is_busy: whether this worker also looks after something that wakes nobody up.
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
        """Let the engine look in Python's place; whether none was raised for as long as a nap.

        Args:
            semaphores: addresses of those that this worker has just seen at 0.
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
        """Something happened: the next pause is a short one."""
        if self._pauses > self._spins + YIELDS:
            self._wakeup.set_asleep(False)
        self._pauses = 0

    @property
    def seconds(self) -> float:
        """How long nothing happened."""
        return time.monotonic() - self._since if self._pauses > self._spins else 0.0
