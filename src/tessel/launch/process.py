"""Process: the handle of a worker in the process that calls it."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tessel.launch.forkserver import STATUS, ForkServer
from tessel.launch.message import UNPICKLABLE, Call, Reply, parse, send


class WorkerProcess:
    """A worker as its caller sees it: a channel for calls, and a report of how it ended."""

    def __init__(self, forkserver: ForkServer) -> None:
        self.end: str | None = None  # how it ended
        self.reply: Reply | None = None  # to the last call
        self._pid = 0  # until it has started
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
        """Whether an idle worker can take a call: its end closes the channel before all else."""
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
        """What to wait on for news of its start and end."""
        return self._status.fileno()

    def sources(self) -> list[Any]:
        """What to wait on for all news of this worker."""
        return [self.status] + ([self._channel] if self._channel.fileno() >= 0 else [])

    def send(self, call: Call | None, body: bytes, fds: Sequence[int], deadline: float) -> None:
        """Send a call; a worker that cannot take it is found out by the lack of a reply."""
        self.reply = None
        seconds = deadline - time.monotonic()
        self._channel.settimeout(None if seconds == math.inf else max(seconds, 1e-3))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            send(self._channel, call, body, fds)
        self._channel.settimeout(None)  # with a timeout, even MSG_DONTWAIT would wait for it

    def read(self) -> None:
        """Take in what has come: a part of the reply, or news of the end."""
        self._read_status()  # before the channel: what it sent before its end is then all there
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
        """The result that came with the reply, which is then let go."""
        body, self._body = self._body, memoryview(b"")
        try:
            return pickle.loads(body)
        except (ImportError, *UNPICKLABLE) as error:
            raise RuntimeError(f"the result of worker {rank} cannot be unpickled here") from error

    def signal(self, number: int) -> None:
        if self._pid and self.end is None:
            self._forkserver.signal(self._pid, number)

    def stacks(self) -> str:
        """The Python stacks that it dumped on a signal, or on a crash."""
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
