"""Wakeups: semaphores in the segments of workers, by which others wake them."""

from __future__ import annotations

from tessel.transport.constants import SIZE
from tessel.transport.segment import Segment
from tessel.transport.semaphore import Semaphore

START = 64  # bytes from the start of a segment
_ASLEEP = (START + SIZE) // 8  # words
_LEFT = _ASLEEP + 1
FOR_GOOD = 2**62  # in place of a program's number, for a worker that leaves its job
END = START + 2 * SIZE


class Wakeup:
    """Wakes a sleeping worker, and tells whether it has left its job.

    Args:
        segment: the segment of the worker.
    """

    __slots__ = ("_segment", "_semaphore", "_words")

    def __init__(self, segment: Segment) -> None:
        self._segment = segment  # kept alive, since it contains the semaphore
        self._words = segment.words
        self._semaphore = Semaphore(segment.start + START)

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the semaphore and of the flag of sleep in the memory of this process."""
        start = self._segment.start
        return start + START, start + 8 * _ASLEEP

    def initialise(self) -> None:
        """Initialise the semaphore; once, by its owner."""
        self._semaphore.initialise()

    def notify(self) -> None:
        """Wake the worker if it sleeps."""
        if self._words[_ASLEEP]:
            self._semaphore.post()

    def set_asleep(self, asleep: bool) -> None:
        """Announce that this worker is about to sleep, or is awake.

        The atomic operations after it make the flag visible to others before this worker looks
        again. On processors with weaker guarantees a notification may be missed, which costs one
        nap.
        """
        self._words[_ASLEEP] = asleep
        if asleep:
            self._semaphore.post()
            self._semaphore.try_wait()

    @property
    def is_asleep(self) -> bool:
        """Whether others must notify this worker."""
        return bool(self._words[_ASLEEP])

    def wait(self, seconds: float) -> bool:
        """Sleep; return whether another worker notified this one."""
        return self._semaphore.wait(seconds)

    def leave(self, after: int) -> None:
        """Announce after which program this worker has left its job; 0 if it is back."""
        self._words[_LEFT] = after

    @property
    def left_after(self) -> int:
        """The number of the program after which the worker has left its job; 0 if it has not."""
        return int(self._words[_LEFT])
