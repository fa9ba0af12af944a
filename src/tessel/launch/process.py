"""Process: the handle of a worker in its caller, and functions of several workers."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from typing import Any

from tessel.errors import WorkerLost
from tessel.launch.forkserver import GRACE, STATUS, ForkServer
from tessel.launch.message import DUMP_STACKS, UNPICKLABLE, Call, Reply, parse, send


class WorkerProcess:
    """A worker as seen by its caller: a channel for calls, and a report of how it ended."""

    def __init__(self, forkserver: ForkServer) -> None:
        self.end: str | None = None  # how it ended
        self.reply: Reply | None = None  # the reply to the last call
        self._pid = 0  # 0 until it has started
        self._body = memoryview(b"")  # the result that came with the reply
        self._inbox = bytearray()
        self._forkserver = forkserver
        self._channel, channel = socket.socketpair()
        status, report = os.pipe()
        os.set_blocking(status, False)
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            forkserver.start(channel.fileno(), report, self._stacks.fileno())
        finally:
            channel.close()
            os.close(report)

    def has_started(self) -> bool:
        self._read_status()
        return self._pid != 0

    def has_ended(self) -> bool:
        self._read_status()
        return self.end is not None

    def is_reachable(self) -> bool:
        """Whether an idle worker can take a call; a worker that ends closes its channel first."""
        if self.has_ended() or self._channel.fileno() < 0:
            return False
        try:
            return self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    def is_in_world(self) -> bool:
        """Whether its last call succeeded and left the process group in place."""
        return self.is_reachable() and self.reply is not None and self.reply.in_world

    def is_lost(self) -> bool:
        """Whether it ended without a reply."""
        return self.end is not None and self.reply is None

    def has_failed(self) -> bool:
        return self.is_lost() or (self.reply is not None and self.reply.failure is not None)

    @property
    def status(self) -> int:
        """The file descriptor to wait on for news of its start and end."""
        return self._status.fileno()

    def sources(self) -> list[Any]:
        """The sources to wait on for all news of this worker."""
        return [self.status] + ([self._channel] if self._channel.fileno() >= 0 else [])

    def send(self, call: Call | None, body: bytes, fds: Sequence[int], deadline: float) -> None:
        """Send a call; a worker that cannot take it is noticed by the missing reply."""
        self.reply = None
        seconds = deadline - time.monotonic()
        self._channel.settimeout(None if seconds == math.inf else max(seconds, 1e-3))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            send(self._channel, call, body, fds)
        self._channel.settimeout(None)  # with a timeout, even MSG_DONTWAIT would wait

    def read(self) -> None:
        """Read what has arrived: a part of the reply, or news of the end."""
        self._read_status()  # before the channel, which then has everything sent before the end
        while self.reply is None and self._channel.fileno() >= 0:
            try:
                chunk = self._channel.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                chunk = b""
            if not chunk:  # it is about to end, or can no longer be reached
                self.hang_up()
                self.signal(signal.SIGKILL)
            self._inbox += chunk
            if message := parse(self._inbox):
                self.reply, self._body = message
                self._inbox = bytearray()

    def take_result(self, rank: int) -> Any:
        """Return the result that came with the reply, and drop it."""
        body, self._body = self._body, memoryview(b"")
        try:
            return pickle.loads(body)
        except (ImportError, *UNPICKLABLE) as error:
            raise RuntimeError(f"the result of worker {rank} cannot be unpickled here") from error

    def signal(self, number: int) -> None:
        if self._pid and self.end is None:
            self._forkserver.signal(self._pid, number)

    def stacks(self) -> str:
        """The Python stacks that the worker dumped on a signal or a crash."""
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace")

    def hang_up(self) -> None:
        """Close the channel: an idle worker then ends by itself."""
        self._channel.close()

    def release(self) -> None:
        """Close all files of this handle."""
        self._channel.close()
        self._status.close()
        self._stacks.close()

    def _read_status(self) -> None:
        while self.end is None and (record := self._status.read(STATUS.size)) is not None:
            if not record:
                self.end = "ended together with the process that starts workers"
            elif not self._pid:
                (self._pid,) = STATUS.unpack(record)
            else:
                (exitcode,) = STATUS.unpack(record)
                self.end = f"ended with exit code {exitcode}"
                if exitcode < 0:
                    is_kill = exitcode == -signal.SIGKILL
                    hint = " (as the system does when memory runs out)" if is_kill else ""
                    self.end = f"was killed by {signal.Signals(-exitcode).name}{hint}"


def await_starts(processes: Iterable[WorkerProcess]) -> None:
    """Wait until all have started, or ended at once."""
    for process in processes:
        while not process.has_started() and not process.has_ended():
            wait([process.status])


def await_ends(processes: Sequence[WorkerProcess], seconds: float) -> None:
    """Wait until all have ended, at most some seconds."""
    deadline = time.monotonic() + seconds
    while waiting := [process.status for process in processes if not process.has_ended()]:
        if not wait(waiting, max(0.0, deadline - time.monotonic())):
            return


def kill(processes: Iterable[WorkerProcess]) -> None:
    """End processes at once."""
    running = [process for process in processes if not process.has_ended()]
    for process in running:
        process.signal(signal.SIGKILL)
    await_ends(running, 5 * GRACE)


def collect(processes: Sequence[WorkerProcess], deadline: float) -> None:
    """Read replies until all have arrived, the deadline, or a grace period after a failure."""
    failed = False
    while waiting := [p for p in processes if p.reply is None and p.end is None]:
        if not failed and any(process.has_failed() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return
        sources = {source: process for process in waiting for source in process.sources()}
        for source in wait(list(sources), None if seconds == math.inf else seconds):
            sources[source].read()


def raise_failure(processes: Sequence[WorkerProcess], name: str) -> None:
    """Raise the first failure; a lost worker takes precedence, since it makes the others fail."""
    lost = {rank: process for rank, process in enumerate(processes) if process.is_lost()}
    failures = {
        rank: p.reply.failure for rank, p in enumerate(processes) if p.reply and p.reply.failure
    }
    error: BaseException
    if lost:
        first = min(lost)
        error = WorkerLost(
            f"worker {first} of {len(processes)} {lost[first].end} while it ran {name}"
        )
        if stacks := lost[first].stacks():
            error.add_note(f"Stack of worker {first}:\n\n{stacks}")
    elif failures:
        first = min(failures, key=lambda rank: failures[rank].time)
        error = failures[first].exception()
        error.add_note(f"Worker {first} of {len(processes)}:\n\n{failures[first].traceback}")
    else:
        return
    also = {rank: f"worker {rank} {process.end}" for rank, process in lost.items()}
    also |= {rank: f"worker {rank} failed with {f.summary}" for rank, f in failures.items()}
    del also[first]
    if also:
        error.add_note("\n".join(["Also:", *(also[rank] for rank in sorted(also))]))
    raise error


def raise_timeout(processes: Sequence[WorkerProcess], name: str, timeout: float | None) -> None:
    """Raise if workers have not replied, and show where each of these is."""
    stuck = {rank: process for rank, process in enumerate(processes) if process.reply is None}
    if not stuck:
        return
    for process in stuck.values():
        process.signal(DUMP_STACKS)
    # The stacks are complete when all have written something, and nothing was added since.
    before: list[str] = []
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        time.sleep(0.05)
        found = [process.stacks() for process in stuck.values()]
        if all(found) and found == before:
            break
        before = found
    ranks = ", ".join(map(str, stuck))
    stacks = [f"Worker {rank}:\n{p.stacks() or 'no answer'}" for rank, p in stuck.items()]
    raise TimeoutError(
        f"{name} exceeded its time limit of {timeout} s on worker(s) {ranks} of "
        f"{len(processes)}, which were ended; their stacks were\n\n" + "\n".join(stacks)
    )
