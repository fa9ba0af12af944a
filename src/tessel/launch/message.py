"""Messages between a worker and the process that calls it.

A message is a mark, two lengths, a pickled head and a body of bytes. File descriptors are sent with
the lengths. Messages go through a pair of sockets that only a process and its own child have, never
through a network.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from tessel.launch.environment import Environment

_PACKAGE = os.path.dirname(__file__)
_MARK = b"tessel1\n"
_LENGTHS = struct.Struct(f"<{len(_MARK)}sQQ")
_LONGEST = 2**46  # bytes: no process can have sent more
# The errors of pickle, or of a type's own `__reduce__`, for a value that cannot be pickled.
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, RuntimeError, ValueError)
# The signal on which a worker writes its stacks to a file.
DUMP_STACKS = signal.SIGUSR2


class NoMessageError(RuntimeError):
    """The other process sent something that is not a message of this module."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"what came from another process of this job is not a message of Tessel ({problem}); "
            f"does the program write to file descriptors that it has not opened?"
        )


class Call(NamedTuple):
    """A request to a worker; the pickled function follows it."""

    rank: int
    nprocs: int
    port: int
    fresh: bool  # whether a process group must be made first
    backend: str
    environment: Environment
    main: tuple[str, str | None] | None  # file and package of the script that it needs
    number: int  # the number of the call, the same for all workers

    def variables(self) -> dict[str, str]:
        """The environment variables by which torchrun tells a worker its place."""
        if self.nprocs == 1:
            return {}
        rank, size = str(self.rank), str(self.nprocs)
        return {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }


class Failure(NamedTuple):
    """An exception on a worker, in a form that can be sent."""

    time: float
    pickled: bytes
    summary: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception, with its traceback outside of this package."""
        when = time.monotonic()
        summary = "".join(traceback.format_exception_only(error)).strip()
        trace = error.__traceback__
        while trace and os.path.dirname(trace.tb_frame.f_code.co_filename) == _PACKAGE:
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
        try:
            pickled = pickle.dumps(error)
            if type(pickle.loads(pickled)) is not type(error):  # on the other side, too
                pickled = b""
        except Exception:  # the code of an exception's class may raise anything here
            pickled = b""
        return cls(when, pickled, summary, "".join(lines))

    def exception(self) -> BaseException:
        """The exception itself, or one with the same text if it cannot be unpickled here."""
        with contextlib.suppress(EOFError, ImportError, *UNPICKLABLE):
            return pickle.loads(self.pickled)
        return RuntimeError(self.summary)


class Reply(NamedTuple):
    """The answer of a worker; the pickled result follows it."""

    failure: Failure | None = None
    in_world: bool = False  # whether the process group exists and can be used by the next call


def send(channel: socket.socket, head: object, body: bytes, fds: Sequence[int] = ()) -> None:
    """Send a message."""
    pickled = pickle.dumps(head)
    socket.send_fds(channel, [_LENGTHS.pack(_MARK, len(pickled), len(body))], list(fds))
    channel.sendall(pickled)
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[Any, memoryview, list[int]] | None:
    """Receive the next message and its file descriptors; None if the other side has hung up."""
    chunk, fds = receive_fds(channel, _LENGTHS.size)
    data = bytearray(chunk)
    while chunk:
        if message := parse(data):
            return *message, fds
        chunk = channel.recv(1 << 20)
        data += chunk
    return None


def receive_fds(channel: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive a fixed number of bytes and up to three file descriptors, not inheritable."""
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, fds, _, _ = socket.recv_fds(channel, size, 3, flags)
    return data, fds


def parse(data: bytearray) -> tuple[Any, memoryview] | None:
    """Return head and body of a message, or None while a part of it is missing.

    Raises:
        NoMessageError: if it cannot become one, regardless of what follows.
    """
    if data[: len(_MARK)] != _MARK[: len(data)]:
        raise NoMessageError(f"it begins with {bytes(data[: len(_MARK)])!r}")
    if len(data) < _LENGTHS.size:
        return None
    _, head, body = _LENGTHS.unpack_from(data)
    if head + body > _LONGEST:
        raise NoMessageError(f"it would have {head + body} bytes")
    if len(data) < _LENGTHS.size + head + body:
        return None
    view = memoryview(data)[_LENGTHS.size :]
    try:
        return pickle.loads(view[:head]), view[head:]
    except Exception as error:  # bytes that are no pickle may raise anything
        raise NoMessageError(
            f"its header cannot be read, {type(error).__name__}: {error}"
        ) from error
