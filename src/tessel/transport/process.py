"""Processes of workers: where they run, and whether they are still alive."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tessel.encoding import encodable
from tessel.settings import text
from tessel.transport.world import this_worker


@encodable
@dataclass(frozen=True)
class PeerProcess:
    """A process on a host; its start time tells it from a later process with the same id."""

    host: str
    pid: int
    born: str = ""

    @classmethod
    def this(cls) -> PeerProcess:
        """The current process."""
        return cls(this_host(), os.getpid(), _status(os.getpid())[1])

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host."""
        return self.host == this_host()

    @property
    def has_ended(self) -> bool:
        """Whether it ran on this host and has ended, even if it was not reaped yet."""
        if not self.is_here:
            return False
        state, born = _status(self.pid)
        return state in ("gone", "Z", "X") or born != self.born

    @property
    def is_stopped(self) -> bool:
        """Whether it runs on this host and is stopped by a signal."""
        return self.is_here and _status(self.pid)[0] in ("T", "t")


def check_not_forked(owner: int, worker: int) -> None:
    """Raise in a fork of a worker's process, which cannot send in the worker's name."""
    if os.getpid() != owner:
        raise RuntimeError(
            f"process {os.getpid()} was forked from worker {worker} and cannot take part in its "
            f"exchanges"
        )


def this_host() -> str:
    """The name of this host, with its boot id, since other hosts may have the same name.

    Tests let it pretend to be several: with TESSEL_TEST_HOSTS=a,a,b workers 0 and 1 are on one
    host, and worker 2 is on another.
    """
    pretended = (text("TESSEL_TEST_HOSTS") or "").split(",")
    return f"{_real_host()} {pretended[this_worker() % len(pretended)]}".strip()


@lru_cache(maxsize=1)
def _real_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _status(pid: int) -> tuple[str, str]:
    """The state and the start time of a process of this host, as the system reports them."""
    with suppress(OSError):  # the system has no such files, or the process has ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone", ""
    except OSError:  # a process of another user
        pass
    return "running", ""
