"""Reading the memory of another process of this host, where the system allows it.

A large tensor is then copied once, from the sender's memory to its place at the receiver, instead
of into a slot and out of it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessel.transport.constants import MOST_BYTES, SHORTEST

MOST = 1024  # runs that one system call takes: Linux's limit
_ALLOW_READER = 0x59616D61  # PR_SET_PTRACER of prctl: which processes may read this one

_C = ctypes.CDLL(None, use_errno=True)


_read: ctypes._NamedFuncPointer | None = getattr(_C, "process_vm_readv", None)
if _read is not None:
    _read.restype = ctypes.c_ssize_t
    _read.argtypes = (
        ctypes.c_int,  # the other process
        *(ctypes.c_void_p, ctypes.c_ulong),  # pieces of memory of this one
        *(ctypes.c_void_p, ctypes.c_ulong),  # and of the other
        ctypes.c_ulong,  # flags, of which none are defined
    )


class Runs(NamedTuple):
    """The memory of a tensor as contiguous runs of equal length, in row-major order."""

    start: int
    length: int
    counts: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> Runs:
        width = tensor.element_size()
        length, counts, strides = _runs(tuple(tensor.shape), tensor.stride())
        scaled = tuple(width * stride for stride in strides)
        return cls(tensor.data_ptr(), width * length, counts, scaled)

    def segments(self, begin: int, end: int) -> NDArray[np.uint64]:
        """(address, length) of the pieces of memory that hold these bytes of the tensor."""
        first, last = begin // self.length, -(-end // self.length)
        found = np.empty((last - first, 2), np.uint64)
        found[:, 0] = self.start + _offsets(self.counts, self.strides)[first:last]
        found[:, 1] = self.length
        skipped = begin - first * self.length
        found[0] += np.array([skipped, -skipped], np.int64).astype(np.uint64)
        found[-1, 1] -= np.uint64(last * self.length - end)
        return found


@lru_cache(maxsize=1024)
def _runs(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The length of runs, and their counts and strides, in elements."""
    dims = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    length = 1
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    return length, tuple(n for n, _ in dims), tuple(s for _, s in dims)


@lru_cache(maxsize=256)
def _offsets(counts: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.uint64]:
    """The offsets of the runs of a tensor from its start."""
    offsets = np.zeros(1, np.int64)
    for count, stride in zip(counts, strides, strict=True):
        offsets = (offsets[:, None] + stride * np.arange(count)).reshape(-1)
    return offsets.astype(np.uint64)


def is_pinned(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is pinned, so that other processes cannot read it."""
    return torch.cuda.is_initialized() and tensor.is_pinned()


def can_be_read(tensor: Tensor) -> bool:
    """Whether others may copy a tensor from its memory: unchanged, and in long runs."""
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or is_pinned(tensor):
        return False
    length, _, strides = _runs(tuple(tensor.shape), tensor.stride())
    return length * tensor.element_size() >= SHORTEST and all(stride > 0 for stride in strides)


def allow_siblings() -> None:
    """Let processes of the same launcher read this one, where the system requires permission."""
    if os.getppid() > 1 and hasattr(_C, "prctl"):
        _C.prctl(_ALLOW_READER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def staging_room(num_bytes: int) -> Callable[[], Tensor]:
    """Return a function that allocates memory when first called, and returns it."""

    @cache
    def room() -> Tensor:
        with torch.inference_mode(False), torch._C._DisableFuncTorch():
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    return room


class Reader:
    """Reads the memory of one other process.

    Args:
        pid: the id of the process.
        staging: room for values that cannot be read into their place directly.
    """

    def __init__(self, pid: int, staging: Callable[[], Tensor]) -> None:
        self._pid, self._staging = pid, staging

    def probe(self, address: int, expected: bytes) -> bool:
        """Whether the system lets this process read the other one."""
        if _read is None:
            return False
        into = torch.zeros(len(expected), dtype=torch.uint8, device="cpu")
        try:
            self._copy(Runs(address, len(expected)), Runs.of(into), 0, len(expected))
        except OSError:
            return False
        return into.numpy().tobytes() == expected

    def read(self, source: Runs, place: Tensor, begin: int = 0) -> None:
        """Copy bytes of the other process's tensor, from `begin` on, to a place."""
        target = Runs.of(place)
        size = place.nbytes
        step = (MOST - 2) * min(source.length, target.length)  # and a part at each end
        step = min(step, MOST_BYTES)
        for first in range(0, size, step):
            self._copy(source, target, first, min(first + step, size), begin)

    def stage(self, source: Runs, begin: int, num_bytes: int) -> Tensor:
        """Copy bytes of the other process's tensor to local memory, valid until the next call."""
        into = self._staging()[:num_bytes]
        self.read(source, into, begin)
        return into

    def _copy(self, source: Runs, target: Runs, begin: int, end: int, ahead: int = 0) -> None:
        theirs = source.segments(begin + ahead, end + ahead)
        mine = target.segments(begin, end)
        assert _read is not None
        done = _read(self._pid, mine.ctypes.data, len(mine), theirs.ctypes.data, len(theirs), 0)
        if done != end - begin:
            raise OSError(ctypes.get_errno(), f"process {self._pid} cannot be read")
