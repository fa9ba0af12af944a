"""Processes of workers: where they run, and whether they still do."""

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
    """A process on a host; its time of birth tells it from a later one of the same number."""

    host: str
    pid: int
    born: str = ""

    @classmethod
    def this(cls) -> PeerProcess:
        """The process that asks."""
        return cls(this_host(), os.getpid(), _status(os.getpid())[1])

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host."""
        return self.host == this_host()

    @property
    def has_ended(self) -> bool:
        """Whether it ran on this host and has ended, reaped or not."""
        if not self.is_here:
            return False
        state, born = _status(self.pid)
        return state in ("gone", "Z", "X") or born != self.born

    @property
    def is_stopped(self) -> bool:
        """Whether it runs on this host and was stopped by a signal."""
        return self.is_here and _status(self.pid)[0] in ("T", "t")


def check_not_forked(owner: int, worker: int) -> None:
    """Raise in a fork of the process that is a worker: it cannot send in the worker's name."""
    if os.getpid() != owner:
        raise RuntimeError(
            f"process {os.getpid()} was forked from worker {worker} and cannot take part in its "
            f"exchanges"
        )


def this_host() -> str:
    """The name of this host, with the number of its start: others may have the same name.

    Tests let it pretend to be several: TESSEL_TEST_HOSTS=a,a,b has workers 0 and 1 on one host, and
    worker 2 on another.
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
    """The state of a process of this host, and when it was born, in the words of the system."""
    with suppress(OSError):  # the system keeps no such files, or the process has ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone", ""
    except OSError:  # of another user
        pass
    return "running", ""
