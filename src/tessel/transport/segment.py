"""A segment: memory that one worker owns and all workers of its host can see.

It is a file without a name: nothing is left behind when its processes end, however they end. It is
not part of /dev/shm, which containers keep small. Pages come into being when they are first used.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tessel.encoding import encodable

TOKEN = 16  # bytes at the start by which others know that they found the right segment


@encodable
@dataclass(frozen=True)
class Address:
    """Where other processes find a segment."""

    pid: int
    file: int
    size: int
    token: bytes
    start: int  # in the memory of that process


class Segment:
    """Memory that processes share, as bytes, as 64-bit words and as a tensor."""

    def __init__(self, file: int, size: int) -> None:
        self._memory = mmap.mmap(file, size)
        self.words = memoryview(self._memory).cast("q")
        with torch.inference_mode(False):
            self.bytes: Tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.start = self.bytes.data_ptr()
        self.file: int | None = None  # kept by the owner, so that others can open it

    @classmethod
    def make(cls, size: int) -> tuple[Segment, Address]:
        """A new segment of this process, full of zeros; OSError where there can be none."""
        file = os.memfd_create("tessel", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
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
        """The segment of another process of this host; OSError if it cannot be reached."""
        file = os.open(Path(f"/proc/{address.pid}/fd/{address.file}"), os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = cls(file, address.size)
        finally:
            os.close(file)
        if segment._memory[:TOKEN] != address.token:
            raise OSError(f"process {address.pid} does not share the memory that was expected")
        return segment

    def hide(self) -> None:
        """Let no new process open it; the memory goes when nothing uses it any more."""
        if self.file is not None:
            os.close(self.file)
            self.file = None
