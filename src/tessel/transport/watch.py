"""The watch: finds workers that wait for messages that will never come, and tells all workers.

A job in which an exchange was not completed is broken: its messages can no longer be matched. The
worker that notices raises the alarm, and every later call on every worker raises.

A thread looks twice a second at waits that have lasted some seconds. It posts on the board what
this worker waits for, and reads there what the others do. A wait is in vain if a needed worker has
ended its program or given up the call, or if all needed workers (by this worker and by each other)
wait, but not all for the same exchange. All other waits go on: slow is not wrong.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from tessel import endings
from tessel.errors import WorkerLost
from tessel.settings import chosen
from tessel.transport.board import BUSY, FAILED, FINISHED, WAITS, Board, Status
from tessel.transport.request import Key

SECONDS_BEFORE_ASKING = 2.0  # seconds of a wait after which the board is read
TICK = 0.5  # seconds between two looks
# Looks in vain, by all that wait, between two reads of the board by this worker. Gloo may hold back
# messages in transit for a short time.
BEATS, BEATS_OF_WIRE = 2, 6
MANY = 8  # workers whose status is read in each tick
LEVELS = ("warning", "info")
_HERE = str(Path(__file__).parents[1]) + os.sep
_BETWEEN = (threading.__file__, contextlib.__file__)  # modules of Python that call those of others
_log = logging.getLogger("tessel")


def number_of(call: int) -> int | None:
    """The number of an exchange; None in a backward pass, where it is that of the call."""
    return ~call >> 1 if call < 0 else None


class Wait:
    """A thread that waits for others. (No dataclass: each exchange between GPUs makes two.)

    Args:
        key: the key of the messages.
        needs: the workers without which it cannot go on.
        number: the number of the wait.
        interrupt: ends a wait in which this worker cannot look at the alarm itself.

    Attributes:
        beats: the number of looks in vain.
        outer: the wait of the same thread during which this one began.
        place_in_order: its number among the exchanges of its group that hold no thread, from 1.
        holds_thread: whether its thread does nothing else.
    """

    beats = 0
    outer: Wait | None = None
    place_in_order: int | None = None
    holds_thread: ClassVar[bool] = True

    def __init__(
        self,
        key: Key,
        needs: tuple[int, ...],
        number: int = 0,
        interrupt: Callable[[], object] | None = None,
    ) -> None:
        self.key, self.needs, self.number, self.interrupt = key, needs, number, interrupt
        self.thread, self.since = threading.current_thread(), time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether it is over without a call of `finish`."""
        return False

    def fault(self) -> str:
        """Why it will never be over, as far as the wait itself can know."""
        return ""

    def tell(self, threads: Iterable[threading.Thread], text: str) -> None:
        """Make threads raise that go on meanwhile, before it is interrupted."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    @property
    def is_asleep(self) -> bool:
        """Whether its thread sleeps, as far as known; else its messages may have come."""
        try:
            path = Path(f"/proc/self/task/{self.thread.native_id}/stat")
            return path.read_text().rpartition(")")[2].split()[0] == "S"
        except OSError:
            return True

    @property
    def place(self) -> tuple[str, str]:
        """The call in which it waits, and the line of the user's code."""
        what, operator, line = "", "", ""
        frame = sys._current_frames().get(self.thread.ident or 0)
        while frame is not None:
            path, values = frame.f_code.co_filename, frame.f_locals
            what = what or _call_in(frame.f_code.co_name, values)
            if not operator and hasattr(values.get("self"), "codomain"):
                operator = repr(values["self"])
            is_library = path.startswith(("<", _HERE)) or f"{os.sep}torch{os.sep}" in path
            if not line and not is_library and path not in _BETWEEN:
                line = f"{os.path.basename(path)}:{frame.f_lineno}"
            frame = frame.f_back
        return what or operator or "an exchange", line


class Watch:
    """The state of the job, as far as this worker knows.

    Attributes:
        worker: this worker.
        alarm: one word, nonzero if the job is broken.
        groups: the groups of the job, by code.
    """

    def __init__(self) -> None:
        self.worker = 0
        self.workers: tuple[int, ...] = (0,)
        self.alarm: Any = array("q", [0])
        self.groups: dict[int, Any] = {}  # `Group`, which imports this class
        self._board: Board | None = None
        self._why = ""
        self._has_passed_on = False
        self._waits: dict[int, Wait] = {}  # by thread
        self._of_devices: deque[Wait] = deque()  # waits that hold no thread, the oldest first
        self._has_raised = False  # whether the program got an error of the broken job
        self._threads: set[threading.Thread] = set()  # threads that have communicated
        self._num_waits = 0
        self._given_up: dict[int, tuple[int, int, str]] = {}
        self._owner = os.getpid()
        self._lock = threading.Lock()
        # the current status of each other worker when first seen, and that of this worker then
        self._seen: dict[int, tuple[Status, Status]] = {}
        self._next_scan = 0.0  # when the statuses of others may be read again
        self._told: float = 0.0  # seconds of the wait that was logged last
        self._ended = threading.Event()
        self._posted: Status | None = None
        if chosen("TESSEL_LOG", LEVELS) == "info" and not _log.isEnabledFor(logging.INFO):
            _log.setLevel(logging.INFO)
            if not _log.hasHandlers():
                _log.addHandler(logging.StreamHandler())
        self._thread: threading.Thread | None = None  # None until a thread waits

    def attach(self, worker: int, workers: Iterable[int], board: Board, alarm: Any = None) -> None:
        """Join the workers of a job.

        Args:
            worker: this worker.
            workers: the workers of the job.
            board: the board on which they post their status.
            alarm: the word by which others tell this worker that the job is broken, if they can.
        """
        self.worker, self.workers, self._board = worker, tuple(workers), board
        self.alarm = self.alarm if alarm is None else alarm

    @property
    def is_attached(self) -> bool:
        return self._board is not None

    def check(self) -> None:
        """Raise WorkerLost if the job is broken."""
        if self.alarm[0]:
            self.raise_broken()

    def is_broken(self) -> bool:
        """Whether the job is broken, also by the board."""
        if not self.alarm[0] and self._board is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self.alarm[0] = bool(self._board.why_broken())
        return bool(self.alarm[0])

    def raise_broken(self) -> NoReturn:
        """Raise WorkerLost, which says why and when the job broke."""
        self._pass_on()
        raise WorkerLost(self.why())

    def why(self) -> str:
        """Why and when the job broke, for an error that the caller raises."""
        self.note_raised()
        if not self._why and self._board is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self._why = self._board.why_broken()
        return self._why or "this job is broken"

    def break_job(self, why: str) -> None:
        """Make every later call on every worker raise, unless the job is broken already."""
        if self.alarm[0] or os.getpid() != self._owner:  # not from a fork
            return
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        self._why = (
            f"this job is broken since {at}: {why}; an exchange was not completed, so that later "
            f"ones would mix up messages. Destroy the process group and join a new job"
        )
        if self._board is not None:
            with contextlib.suppress(RuntimeError):
                self._board.break_job(self._why)
        self.alarm[0] = self.alarm[0] or self.worker + 1
        # Before others are told: one that then destroys its process group cuts connections of NCCL,
        # and torch ends a process that has an exchange over these.
        self._end_device_waits()
        self._pass_on()

    def note_raised(self) -> None:
        """Note that the program got an error of the broken job."""
        self._has_raised = True

    def _pass_on(self) -> None:
        """Pass the alarm on, once: the worker that raised it may have died before it told all."""
        if not self._has_passed_on and self._board is not None and os.getpid() == self._owner:
            self._has_passed_on = True
            self._board.pass_on()

    def give_up(self, groups: Iterable[tuple[int, int]], error: BaseException) -> None:
        """Post that this worker makes no more exchanges before these, since a call was left."""
        text = f"{type(error).__name__}: {error}"
        for code, number in groups:
            self._given_up.pop(code, None)
            self._given_up[code] = code, number, text
        self._post(Status())

    def notes(self) -> str:
        """The calls that some workers gave up and others did not, for the text of an error."""
        said: dict[tuple[int, int], dict[int, str]] = {}
        for worker in self.workers if self._board is not None else ():
            for code, number, why in self._board_of().read(worker).given_up:
                said.setdefault((code, number), {})[worker] = why
        found: dict[str, int] = {}
        for (code, _), whys in said.items():
            if code not in self.groups or len(whys) < len(self.groups[code].workers):
                found |= {
                    f"; worker {worker} left a call by {why}": 0 for worker, why in whys.items()
                }
        return "".join(found)

    def begin_program(self) -> None:
        """Tell the others that this worker takes part again."""
        if self._posted is not None and self._posted.state in (FINISHED, FAILED):
            self._post(Status())

    def end_program(self, error: BaseException | None) -> None:
        """Tell the others that this worker takes part in no further exchange."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self._post(Status(FINISHED if error is None else FAILED, text))

    def have_all_ended(self, seconds: float) -> bool:
        """Whether the programs of all workers have ended, waiting at most these seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                states = [self._board_of().read(worker).state for worker in self.workers]
            except RuntimeError:  # the store ended with worker 0, which has waited for all
                return True
            if all(state in (FINISHED, FAILED) for state in states):
                return True
            time.sleep(TICK)
        return False

    def how_it_ended(self, worker: int) -> str:
        """How the program of a worker ended that no longer takes part."""
        status = Status() if self._board is None else self._board.read(worker)
        return _ending(status) or "it has left the job"

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def begin(
        self, key: Key, needs: Sequence[int], interrupt: Callable[[], object] | None = None
    ) -> Wait:
        """Note that this thread waits."""
        self._num_waits += 1
        wait = Wait(key, tuple(needs), self._num_waits, interrupt)
        thread = wait.thread.ident or 0
        wait.outer = self._waits.get(thread)
        self._waits[thread] = wait
        if self._thread is None:
            self._start()
        return wait

    def note_device(self, wait: Wait) -> None:
        """Watch a wait that holds no thread, until it is over."""
        waits = self._of_devices
        while waits and waits[0].is_over:
            waits.popleft()
        waits.append(wait)
        if self._thread is None:
            self._start()

    def forget_devices(self) -> None:
        """Stop watching waits that hold no thread, since they are over."""
        self._of_devices.clear()

    def _start(self) -> None:
        if self._board is not None:
            self._thread = threading.Thread(target=self._run, name="tessel watch", daemon=True)
            self._thread.start()

    def finish(self, wait: Wait) -> None:
        """Note that a wait is over."""
        thread = wait.thread.ident or 0
        self._waits.pop(thread, None)
        if wait.outer is not None:  # it goes on, for example for messages of another host
            self._waits[thread] = wait.outer

    def describe(self, wait: Wait) -> str:
        """Where a thread waits, in the words of the user."""
        (what, line), (code, call) = wait.place, wait.key
        if call < 0:  # in a backward pass it is the number of the call that is differentiated
            call = self.groups[code].num_calls + 1 if code in self.groups else 0
        return f"{what} (call {call}{', ' if line else ''}{line})"

    def describe_this_thread(self, key: Key) -> str:
        """Where the calling thread is, in the words of the user."""
        return self.describe(Wait(key, ()))

    def note_thread(self) -> None:
        """Note that this thread communicates: while it runs, others may wait for it."""
        self._threads.add(threading.current_thread())

    @property
    def has_threads(self) -> bool:
        """Whether several threads communicate, so that the order of messages is not fixed."""
        return len(self._threads) > 1

    def _run(self) -> None:
        while not self._ended.wait(TICK):
            # The store or the process group may be gone: threads that wait notice that themselves.
            with contextlib.suppress(RuntimeError, ValueError, OSError):
                self.look()

    def look(self) -> None:
        """Check waits that last long."""
        waits = [
            each
            for each in [*self._waits.values(), *self._of_devices]
            if each.seconds > SECONDS_BEFORE_ASKING and not each.is_over
        ]
        if self._of_devices and self.is_broken():  # however short they have lasted
            self._end_device_waits()
        if not waits:
            self._seen.clear()
            self._told = 0.0
            if self._posted is not None and self._posted.needs:
                self._post(Status())
            return
        if not self.is_broken() and (text := self._find_fault(waits)):
            self.break_job(text)
        if not self.alarm[0]:
            return
        self._end_device_waits()
        for each in waits:
            if each.holds_thread and each.interrupt is not None:
                each.interrupt()

    def _end_device_waits(self) -> None:
        """End waits that hold no thread, after telling the program, which goes on meanwhile."""
        all_waits, self._of_devices = self._of_devices, deque()
        waits = [each for each in all_waits if not each.is_over]
        if not waits:
            return
        if not self._has_raised and not self._waits:  # a thread that waits raises by itself
            threads = [each for each in self._threads if each.is_alive() and not _is_foreign(each)]
            waits[0].tell(threads or [threading.main_thread()], self.why())
        for interrupt in {each.interrupt for each in waits}:
            if interrupt is not None:
                interrupt()

    def _find_fault(self, waits: list[Wait]) -> str:
        """Why a wait is in vain; an empty string if none is."""
        for each in waits:
            if each.interrupt is not None and each.is_asleep:
                each.beats += 1
        mine = self._own_status(waits)
        self._post(mine)
        if time.monotonic() < self._next_scan:
            return ""
        # All that wait read the status of all others: the more there are the more rarely, to spare
        # the store.
        self._next_scan = time.monotonic() + TICK * len(self.workers) / MANY
        statuses, new = {self.worker: mine}, list(mine.needs)
        while new:
            worker = new.pop()
            if worker not in statuses:
                statuses[worker] = self._board_of().read(worker)
                new += statuses[worker].needs
        beats = BEATS if all(each.interrupt is None for each in waits) else BEATS_OF_WIRE
        unchanged = {w for w, each in statuses.items() if self._is_unchanged(w, each, mine, beats)}
        for each in waits:
            if fault := each.fault():
                return fault
            for worker in unchanged.intersection(each.needs):
                if fault := self._never_comes(worker, each, statuses[worker]):
                    return fault
        busy = [w for w, each in statuses.items() if each.state == BUSY and w != self.worker]
        if busy:
            self._log(waits, sorted(busy))
        if len(unchanged) < len(statuses) or any(w.state != WAITS for w in statuses.values()):
            return ""
        # Workers that all wait for the same exchange have sent their messages: they are in transit.
        if len({key for each in statuses.values() for key in each.keys}) == 1:
            return ""
        said = [f"worker {worker} waits in {statuses[worker].text}" for worker in sorted(statuses)]
        both = f"all workers must make the same calls in the same order, but {', '.join(said)}"
        return both + self.notes()

    def _is_unchanged(self, worker: int, status: Status, mine: Status, beats: int) -> bool:
        """Whether a worker's status is the same after both have looked in vain several times.

        All messages sent before the first look have then reached both workers.
        """
        seen, own = self._seen.get(worker, (None, mine))
        same = seen is not None and seen._replace(beats=status.beats, text=status.text) == status
        if seen is None or own.wait != mine.wait or not same:
            self._seen[worker] = status, mine
            return False
        has_looked = status.state != WAITS or status.beats - seen.beats >= beats
        return has_looked and mine.beats - own.beats >= beats

    def _never_comes(self, worker: int, wait: Wait, status: Status) -> str:
        """Why a worker will never take part in the exchange of a wait; empty if it may."""
        here = f"worker {self.worker} waits in {self.describe(wait)} for worker {worker}"
        # The end of an earlier program means nothing for this one.
        if (ending := _ending(status)) and status.program >= endings.program:
            return f"{here}: {ending}"
        number = number_of(wait.key[1])
        for code, first, text in status.given_up:
            if number is not None and code == wait.key[0] and number < first:
                return f"{here}, which left the call by {text}"
        place = wait.place_in_order or 0
        # A worker that waits elsewhere before this exchange will not begin it: others wait, too.
        if status.state == WAITS and dict(status.begun).get(wait.key[0], place) < place:
            same = "all workers must make the same calls in the same order"
            return f"{same}, but {here}, which waits in {status.text}{self.notes()}"
        return ""

    def _own_status(self, waits: list[Wait]) -> Status:
        """The status of this worker, which waits if all threads that communicate do."""
        waiting = {each.thread for each in waits if each.holds_thread}
        # A thread of autograd computes gradients for a thread of Python, which waits for it, as
        # does a thread that joins another.
        free = {
            each
            for each in self._threads - waiting
            if each.is_alive() and not _joins(each, waiting)
        }
        is_waiting = bool(waiting) and (
            any(map(_is_foreign, waiting)) or all(map(_is_foreign, free))
        )
        return Status(
            WAITS if is_waiting else BUSY,
            " and in ".join(self.describe(each) for each in waits),
            tuple(sorted({worker for each in waits for worker in each.needs})),
            tuple(each.key for each in waits if each.holds_thread),
            min(each.beats for each in waits),
            max(each.number for each in waits),
        )

    def _board_of(self) -> Board:
        assert self._board is not None
        return self._board

    def _post(self, status: Status) -> None:
        """Post the status of this worker, with the calls that it has given up."""
        with self._lock:  # two threads post: the watch, and one that gives up a call
            self._posted = status._replace(
                program=endings.program,
                given_up=tuple(self._given_up.values()),
                begun=tuple((code, each.num_of_devices) for code, each in self.groups.items()),
            )
            if self._board is not None and os.getpid() == self._owner:
                with contextlib.suppress(RuntimeError):
                    self._board.post(self._posted)

    def _log(self, waits: list[Wait], busy: list[int]) -> None:
        seconds = max(each.seconds for each in waits)
        if seconds < 2 * self._told:  # log less and less often
            return
        self._told = seconds
        names = " and ".join(f"worker {each}" for each in busy)
        for each in waits:
            text = "worker %d has waited for %.0f s in %s: %s still computing"
            be = "is" if len(busy) == 1 else "are"
            _log.info(text, self.worker, each.seconds, self.describe(each), f"{names} {be}")


def _is_foreign(thread: threading.Thread) -> bool:
    return isinstance(thread, threading._DummyThread)


def _joins(thread: threading.Thread, others: set[threading.Thread]) -> bool:
    """Whether a thread waits for the end of one of the others."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        if frame.f_code.co_name == "join" and frame.f_locals.get("self") in others:
            return True
        frame = frame.f_back
    return False


def _ending(status: Status) -> str:
    if status.state == FAILED:
        return f"its program ended by {status.text}"
    return "its program has ended" if status.state == FINISHED else ""


def _call_in(function: str, values: Mapping[str, Any]) -> str:
    """The call that a function belongs to, if its variables tell."""
    owner = values.get("self")
    if function == "backward" and hasattr(ctx := values.get("ctx"), "call"):
        return f"the backward of {getattr(ctx, 'operator', None) or getattr(ctx, 'product', '')}"
    if function == "agree_on":
        return str(getattr(owner, "label", ""))
    if function == "agree":
        return str(values.get("call", ""))
    return type(owner).__name__ if isinstance(owner, torch.nn.Module) else ""
