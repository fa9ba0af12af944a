"""The resident memory of a process, as the system counts it."""

from __future__ import annotations

from pathlib import Path

_SELF = Path("/proc/self")


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return _status("VmRSS")


def peak() -> int:
    """Bytes of this process that were in memory at most, since it forgot the peak."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Let the peak be what is resident now."""
    (_SELF / "clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")
