"""The resources of the machine: cores, memory, shared memory, network interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import math
import os
import socket
import struct
from pathlib import Path

from tessel.settings import chosen

ALLOCATORS = ("keep", "system")
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # a variable of torch
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt
_LARGEST = 2**31 - 1
_CGROUP = Path("/sys/fs/cgroup")
_SIOCGIFADDR = 0x8915


def usable_cores() -> int:
    """The number of cores that this process may use: its affinity and its CPU quota."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_quota() -> float | None:
    """The number of cores that the control group grants, or None if there is no quota."""
    values = _words(_CGROUP / "cpu.max") or [
        *_words(_CGROUP / "cpu/cpu.cfs_quota_us"),
        *_words(_CGROUP / "cpu/cpu.cfs_period_us"),
    ]
    if len(values) < 2 or not values[0].isdigit():
        return None
    return int(values[0]) / int(values[1])


def memory_limit() -> int:
    """The bytes of memory that this process may use: the machine's or its control group's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    values = _words(_CGROUP / "memory.max") or _words(_CGROUP / "memory/memory.limit_in_bytes")
    return min(total, int(values[0])) if values and values[0].isdigit() else total


def memory_available() -> int | None:
    """The bytes of memory that are available, or None if Linux does not report it."""
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def shared_memory() -> tuple[int, int] | None:
    """The size and the free bytes of /dev/shm, or None if there is none."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail


def interface_of(address: str) -> str | None:
    """The name of this host's network interface with an address, if known."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            if int(number, 16) == int(wanted):
                return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, request)[20:24]
                if found == wanted.packed:
                    return name
    return loopback() if wanted.is_loopback else None  # it has all of 127.0.0.0/8


def loopback() -> str | None:
    """The name of the loopback interface, if this host has one."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def keep_freed_memory() -> bool:
    """Let the allocator of this process keep the memory of freed tensors; return whether it does.

    By default glibc returns blocks of 32 MiB and more to the system, which clears each page again
    when it is reused: that takes several times as long as a copy. The price is that a process keeps
    its peak memory. Torch is also asked to use huge pages (2 MiB instead of 4 KiB) for large
    tensors, as numpy does by itself; this has an effect if torch has created no tensor yet. Nothing
    changes if the user has configured the allocator (MALLOC_…) or set TESSEL_ALLOCATOR=system, or
    if the C library has no such function.
    """
    choice = chosen("TESSEL_ALLOCATOR", ALLOCATORS)
    library = ctypes.CDLL(None)
    is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if choice == "system" or is_set or not hasattr(library, "mallopt"):
        return False
    os.environ.setdefault(HUGE_PAGES, "1")
    settings = (_TRIM_THRESHOLD, _MMAP_THRESHOLD)
    return all(library.mallopt(setting, _LARGEST) == 1 for setting in settings)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]
