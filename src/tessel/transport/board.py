"""The board: the status of each worker, for others that have waited long for it.

It is neither written nor read while messages arrive. There are two kinds: the memory of a host, if
it has all workers of the job, and else the store of `torch.distributed`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tessel.transport.segment import Segment
from tessel.transport.wakeup import END as AFTER_WAKEUP
from tessel.transport.wakeup import Wakeup

START = AFTER_WAKEUP  # bytes from the start of a segment
LENGTH = 4096  # bytes for the status of a worker, and as many for the reason why the job broke
_ALARM, _VERSION, _ALARM_LENGTH = (START // 8 + word for word in range(3))
_TEXT = START + 64
_ALARM_TEXT = _TEXT + LENGTH
END = _ALARM_TEXT + LENGTH

SILENCE = 5.0  # seconds after which a store that does not answer is considered lost
BUSY, WAITS, FINISHED, FAILED = "busy", "waits", "finished", "failed"


class Status(NamedTuple):
    """The status of a worker.

    Attributes:
        state: BUSY, WAITS, FINISHED or FAILED.
        text: where it waits, or how it failed.
        needs: the workers without which it cannot go on.
        keys: the keys of the messages that it waits for.
        beats: the number of looks in vain since the wait began.
        wait: the number of its wait.
        program: the number of the program that it runs, or that has ended.
        given_up: after an exception has left a call: for each group the code, the number of the
            first exchange that this worker may still make, and the exception.
        begun: for each group the code, and the number of exchanges between GPUs begun.
    """

    state: str = BUSY
    text: str = ""
    needs: tuple[int, ...] = ()
    keys: tuple[tuple[int, int], ...] = ()
    beats: int = 0
    wait: int = 0
    program: int = 0
    given_up: tuple[tuple[int, int, str], ...] = ()
    begun: tuple[tuple[int, int], ...] = ()

    def packed(self) -> bytes:
        """The status as JSON, with long texts and lists cut to fit the board."""
        for length in (1000, 100, 0):
            short = self._replace(
                text=self.text[:length],
                keys=self.keys[:8],
                given_up=tuple((*each[:2], each[2][:length]) for each in self.given_up[-4:]),
                begun=self.begun[-16:],
            )
            if len(said := json.dumps(short).encode()) <= LENGTH:
                return said
        return json.dumps(Status(self.state, program=self.program)).encode()

    @classmethod
    def unpacked(cls, said: bytes) -> Status:
        state, text, needs, keys, beats, wait, program, given_up, begun = json.loads(said)
        pairs = tuple((int(group), int(call)) for group, call in keys)
        notes = tuple((int(code), int(number), str(why)) for code, number, why in given_up)
        numbers = int(beats), int(wait), int(program)
        counts = tuple((int(code), int(count)) for code, count in begun)
        return cls(state, text, tuple(map(int, needs)), pairs, *numbers, notes, counts)


class MemoryBoard:
    """A board in the segments of the workers of one host.

    A status is written between two changes of a version, so that nobody reads half of it. The alarm
    is a word in the segment of each worker, which that worker checks before each exchange: 0, or
    one more than the rank of the worker whose segment contains the reason why the job is broken.

    Args:
        worker: this worker.
        segments: the segments of all workers of the job.
        wakeups: the wakeups of the others.
    """

    def __init__(
        self, worker: int, segments: dict[int, Segment], wakeups: dict[int, Wakeup]
    ) -> None:
        self._worker, self._segments, self._wakeups = worker, segments, wakeups
        own = segments[worker]
        self.alarm = own.words[_ALARM : _ALARM + 1]

    def post(self, status: Status) -> None:
        """Publish the status of this worker."""
        words, said = self._segments[self._worker].words, status.packed()
        words[_VERSION] += 1  # odd: it is being written
        self._write(_TEXT, said.ljust(LENGTH))
        words[_VERSION] += 1

    def read(self, worker: int) -> Status:
        """The status of another worker; BUSY if it has posted none."""
        words = self._segments[worker].words
        for _ in range(100):  # writing takes microseconds
            version = words[_VERSION]
            said = words[_TEXT // 8 : _ALARM_TEXT // 8].tobytes()
            if version % 2 == 0 and version == words[_VERSION]:
                return Status.unpacked(said) if version else Status()
        return Status()

    def break_job(self, why: str) -> None:
        """Write why the job is broken, unless another worker has; `pass_on` tells all workers."""
        words, said = self._segments[self._worker].words, why.encode()[:LENGTH]
        if not words[_ALARM]:
            self._write(_ALARM_TEXT, said.ljust(LENGTH))
            words[_ALARM_LENGTH] = len(said)
            words[_ALARM] = self._worker + 1

    def pass_on(self) -> None:
        """Tell all workers that the job is broken, in case the one that noticed could not."""
        alarm = self.alarm[0]
        for worker, segment in self._segments.items():
            if not segment.words[_ALARM]:
                segment.words[_ALARM] = alarm
            if worker in self._wakeups:
                self._wakeups[worker].notify()

    def why_broken(self) -> str:
        """Why the job is broken; an empty string if it is not."""
        if not self.alarm[0]:
            return ""
        words = self._segments[self.alarm[0] - 1].words
        said = words[_ALARM_TEXT // 8 : END // 8].tobytes()
        return said[: words[_ALARM_LENGTH]].decode(errors="replace")

    def _write(self, start: int, said: bytes) -> None:
        words = self._segments[self._worker].words
        words[start // 8 : (start + LENGTH) // 8] = memoryview(said).cast("q")


class StoreBoard:
    """A board in the store of `torch.distributed`.

    The store may be behind a broken link: then it does not answer for minutes, and torch has no
    time limit for that. So it is asked in a separate thread, over a separate connection, and never
    again after it has been silent once.

    Args:
        worker: this worker.
        store: the store of the job.
    """

    def __init__(self, worker: int, store: Any) -> None:
        self._worker, self._store = worker, store
        self._is_own, self._is_silent = False, False
        self._lock = threading.Lock()

    def post(self, status: Status) -> None:
        said = status.packed()
        self._ask(lambda store: store.set(f"tessel/status/{self._worker}", said), None)

    def read(self, worker: int) -> Status:
        key = f"tessel/status/{worker}"
        said = self._ask(lambda store: store.get(key) if store.check([key]) else b"", b"")
        return Status.unpacked(said) if said else Status()

    def break_job(self, why: str) -> None:
        self._ask(lambda store: store.compare_set("tessel/broken", "", why), None)

    def pass_on(self) -> None:
        """Do nothing: all workers read the same store."""

    def why_broken(self) -> str:
        key = "tessel/broken"
        said: bytes = self._ask(lambda store: store.get(key) if store.check([key]) else b"", b"")
        return said.decode(errors="replace")

    def _ask(self, question: Callable[[Any], Any], otherwise: Any) -> Any:
        """The answer of the store, or `otherwise` if it does not answer."""
        if self._is_silent:
            return otherwise
        answers: list[Any] = []
        errors: list[RuntimeError] = []

        def ask() -> None:
            try:
                with self._lock:
                    if not self._is_own:  # torch's own connection must not wait for this one
                        self._store, self._is_own = self._store.clone(), True
                    answers.append(question(self._store))
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=ask, name="tessel store", daemon=True)
        thread.start()
        thread.join(SILENCE)
        if thread.is_alive():
            self._is_silent = True
            return otherwise
        if errors:
            raise errors[0]
        return answers[0]


Board = MemoryBoard | StoreBoard
