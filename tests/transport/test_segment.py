"""Segments: memory that the workers of a host share, and nobody else can open or cut short.

Tests `transport/segment.py`, `transport/process.py`.
"""

import contextlib
import fcntl
import gc
import os

import pytest
import torch

import stress
import tessel
from tessel.transport.segment import TOKEN, Segment


def memory_files() -> list[str]:
    """The descriptors of this process for segments."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [each for each in found if "memfd:tessel" in each]


def maps() -> int:
    with open("/proc/self/maps") as lines:
        return sum("memfd:tessel" in line for line in lines)


def test_a_segment_has_no_descriptor_once_it_is_hidden() -> None:
    before, mapped = len(memory_files()), maps()
    segment, address = Segment.make(1 << 16)
    other = Segment.open(address)
    assert len(memory_files()) == before + 1  # by which others open it
    segment.hide()
    assert len(memory_files()) == before and maps() == mapped + 2
    with pytest.raises(OSError):
        Segment.open(address)
    segment.words[100] = 7  # which both still see
    assert other.words[100] == 7 and other.bytes[800] == 7
    assert bytes(other.bytes[:TOKEN].tolist()) == address.token
    view = other.bytes[:8]
    del segment, other
    gc.collect()
    assert maps() == mapped + 1 and int(view.sum()) >= 0  # a view keeps the memory
    del view
    gc.collect()
    assert maps() == mapped


def test_a_segment_keeps_its_size() -> None:
    segment, address = Segment.make(1 << 16)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(address.file, size)
    with pytest.raises(PermissionError):  # nor can the seals be changed
        fcntl.fcntl(address.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    segment.hide()


def test_another_token_is_refused() -> None:
    segment, address = Segment.make(1 << 16)
    segment.bytes[0] ^= 1
    with pytest.raises(OSError, match="does not share the memory that was expected"):
        Segment.open(address)
    segment.hide()


def left_open() -> list[str]:
    tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(3))
    return memory_files()


def test_workers_keep_no_descriptor(run) -> None:  # type: ignore[no-untyped-def]
    """Whoever may look into /proc/PID/fd finds none by which to open the memory of a job."""
    assert run(left_open, nprocs=2) == [[], []]


def left_open_by_a_refusal() -> list[str]:
    gc.disable()  # which would close it
    try:
        chosen = stress.afresh(TESSEL_TRANSPORT="shared", TESSEL_ENGINE="steam")
        with chosen, pytest.raises(ValueError):
            tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(3))
        return memory_files()
    finally:
        gc.enable()


def test_a_refused_setting_leaves_no_descriptor(run) -> None:  # type: ignore[no-untyped-def]
    assert run(left_open_by_a_refusal, nprocs=2) == [[], []]
