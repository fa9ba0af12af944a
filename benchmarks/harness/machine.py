"""The machine: what it is, and what others do on it meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tessel.machine import memory_limit, usable_cores
from tessel.transport import chosen_transport, has_engine

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # columns of /proc/stat: idle, iowait
_GUEST = (8, 9)  # counted in others already


def description() -> dict[str, str]:
    """What a reader has to know of the machine and of the programs on it."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": _processor(),
        "cores": str(usable_cores()),
        "memory": f"{memory_limit() / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "MPI": _first_line("mpirun", "--version") or "none",
        "transport": chosen_transport(),
        "engine": "compiled" if has_engine() else "none",
        "allocator": " ".join(f"{k}={v}" for k, v in os.environ.items() if _is_of_allocator(k)),
    }


def _is_of_allocator(variable: str) -> bool:
    return variable.startswith(("MALLOC_", "THP_"))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    found = _first_line("git", "rev-parse", "--short", "HEAD")
    changed = _first_line("git", "status", "--porcelain", "--untracked-files=no", "--", "src")
    return (found or "unknown") + (" with changes" if changed else "")


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent.parent
        )
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


@dataclass(frozen=True)
class Usage:
    """Seconds of all processors until now.

    Args:
        clock: the time at which they were counted.
        busy: in which they did anything.
        own: in which they worked for this process and its descendants.
    """

    clock: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> Usage:
        columns = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
        busy = sum(int(n) for k, n in enumerate(columns) if k not in (*_IDLE, *_GUEST))
        return cls(time.monotonic(), busy / _TICKS, _own_ticks() / _TICKS)

    def others_since(self, before: Usage) -> float:
        """The share of the machine's processors that all other processes used in between."""
        seconds = (self.clock - before.clock) * (os.cpu_count() or 1)
        if seconds <= 0:
            return 0.0
        return max(0.0, (self.busy - before.busy) - (self.own - before.own)) / seconds


def _own_ticks() -> int:
    """Ticks of this process and its descendants, those that have ended included."""
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(entry)] = int(fields[1])
        spent[int(entry)] = sum(map(int, fields[11:15]))  # its own and its ended children's
    me = os.getpid()
    return sum(ticks for pid, ticks in spent.items() if _descends(pid, me, parents))


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid == ancestor:
            return True
        pid = parents[pid]
    return False
