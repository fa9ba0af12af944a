"""The wakeup of a worker lies in its segment of memory, and others use it to wake the worker."""

from __future__ import annotations

from tessel.transport.constants import SIZE
from tessel.transport.segment import Segment
from tessel.transport.semaphore import Semaphore

START = 64  # bytes from the start of a segment
_ASLEEP = (START + SIZE) // 8  # words
_LEFT = _ASLEEP + 1
END = START + 2 * SIZE


class Wakeup:
    """Wakes a worker that sleeps, and says whether it is still there.

    Args:
        segment: of the worker.
    """

    __slots__ = ("_segment", "_semaphore", "_words")

    def __init__(self, segment: Segment) -> None:
        self._segment = segment  # kept: the semaphore lies in it
        self._words = segment.words
        self._semaphore = Semaphore(segment.start + START)

    @property
    def addresses(self) -> tuple[int, int]:
        """Where in the memory of this process the semaphore lies, and the sign of sleep."""
        start = self._segment.start
        return start + START, start + 8 * _ASLEEP

    def initialise(self) -> None:
        """Once, by its owner."""
        self._semaphore.initialise()

    def notify(self) -> None:
        """Wake the worker if it sleeps."""
        if self._words[_ASLEEP]:
            self._semaphore.post()

    def set_asleep(self, asleep: bool) -> None:
        """Say that this worker is about to sleep, or awake.

        The atomic operations after it let others see the flag before this worker looks again. On
        processors that promise less a notification may be missed: that costs one nap.
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
        """Sleep; whether another worker notified this one."""
        return self._semaphore.wait(seconds)

    def leave(self, has_left: bool = True) -> None:
        """Say that this worker has left its job, or is back."""
        self._words[_LEFT] = has_left

    @property
    def has_left(self) -> bool:
        """Whether the worker has left its job."""
        return bool(self._words[_LEFT])
