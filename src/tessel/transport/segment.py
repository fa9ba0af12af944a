"""Segments: memory that one worker owns and all workers of its host can access.

A segment is a file without a name: nothing is left behind when its processes end, in whatever way.
It is not part of /dev/shm, which is small in containers. Pages are allocated when first used.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tessel.encoding import encodable

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
TOKEN = 16  # bytes at the start by which others recognize the right segment


@encodable
@dataclass(frozen=True)
class Address:
    """The address by which other processes find a segment."""

    pid: int
    file: int
    size: int
    token: bytes
    start: int  # in the memory of that process


class Segment:
    """Memory that processes share, as bytes, as 64-bit words and as a tensor."""

    def __init__(self, file: int, size: int) -> None:
        # Python's own `mmap` keeps a copy of the descriptor while it is mapped (until 3.13),
        # by which every process of the user could open the segment.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        start = _LIBRARY.mmap(None, size, access, mmap.MAP_SHARED, file, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, f"{size} bytes cannot be mapped: {os.strerror(number)}")
        # It stays mapped when the file is closed, and is unmapped when nothing uses it.
        memory = (ctypes.c_char * size).from_address(start)
        # Not at the end of the process: threads may still wait in it, and the system unmaps it.
        weakref.finalize(memory, _LIBRARY.munmap, start, size).atexit = False
        self._memory = memoryview(memory).cast("B")
        self.words = self._memory.cast("q")
        with torch.inference_mode(False):
            self.bytes: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.start = self.bytes.data_ptr()
        self.file: int | None = None  # kept by the owner, so that others can open it

    @classmethod
    def make(cls, size: int) -> tuple[Segment, Address]:
        """Make a segment of this process, full of zeros; OSError if that is impossible."""
        file = os.memfd_create("tessel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, size)
            # Nobody can shrink it: a process that accessed the missing part would get a SIGBUS.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            segment = cls(file, size)
        except OSError:
            os.close(file)
            raise
        segment.file = file
        token = secrets.token_bytes(TOKEN)
        segment._memory[:TOKEN] = token
        return segment, Address(os.getpid(), file, size, token, segment.start)

    @classmethod
    def open(cls, address: Address) -> Segment:
        """Open the segment of another process of this host; OSError if it cannot be reached."""
        file = os.open(Path(f"/proc/{address.pid}/fd/{address.file}"), os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = cls(file, address.size)
        finally:
            os.close(file)
        if segment._memory[:TOKEN] != address.token:
            raise OSError(f"process {address.pid} does not share the memory that was expected")
        return segment

    def hide(self) -> None:
        """Close the last descriptor, so that no new process can open it.

        The memory is freed when nothing uses it any more.
        """
        if self.file is not None:
            os.close(self.file)
            self.file = None


_LIBRARY = ctypes.CDLL(None, use_errno=True)
_LIBRARY.mmap.restype = ctypes.c_void_p
_LIBRARY.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
_LIBRARY.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
