"""Exchanges of GPUs without NCCL, with files in the place of GPU memory.

Tests `transport/device_exchange.py`, `transport/mailbox.py`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stress
import tessel
from tessel.transport import ReceiveBuffer, SendBuffer, mailbox
from tessel.transport.device_exchange import DeviceExchange
from tessel.transport.mailbox import POSTED, STAGED, Mailboxes, Note

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.complex128, torch.uint8, torch.bfloat16)


class NoEvent:
    """The CPU has done what it was told when the call is over."""

    def record(self) -> None: ...

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...


class FileSharing:
    """Memory of files; refuses what is asked for.

    Args:
        folder: of the files.
        refuses: whether nothing can be allocated, or mapped.
    """

    def __init__(self, folder: str, refuses: str = "") -> None:
        self.folder, self.refuses = folder, refuses
        self.num_made = self.num_mapped = 0

    def allocate(self, capacity: int, device: torch.device) -> tuple[Tensor, bytes]:
        if self.refuses == "allocate":
            raise RuntimeError("no memory")
        self.num_made += 1
        name = f"{os.getpid()}-{self.num_made}".encode().ljust(64)
        return self._memory(name, capacity), name

    def map(self, memory: bytes, capacity: int, device: torch.device) -> Tensor:
        if self.refuses == "map":
            raise RuntimeError("another device")
        self.num_mapped += 1
        return self._memory(memory, capacity)

    def _memory(self, name: bytes, capacity: int) -> Tensor:
        path = Path(self.folder, name.decode().strip())
        return torch.from_file(str(path), shared=True, size=capacity, dtype=torch.uint8)

    def event(self, device: torch.device) -> tuple[NoEvent, bytes]:
        return NoEvent(), bytes(64)

    def map_event(self, event: bytes, device: torch.device) -> NoEvent:
        return NoEvent()


def value(number: int, giver: int, taker: int, length: int, dtype: torch.dtype) -> Tensor:
    """What a worker sends to another in an exchange, with odd strides."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * giver + taker)
    values = torch.randint(0, 50, (2, length), generator=generator).to(dtype)
    return values.T if number % 2 else values


def random_exchanges(folder: str, count: int, refusing: dict[int, str]) -> tuple[int, int, int]:
    """Exchanges of random pairs, two of which are under way at a time, against what was sent."""
    group, me, size = tessel.world().group, tessel.world().rank, tessel.world().size
    sharing = FileSharing(folder, refusing.get(me, ""))
    boxes, draw, waiting, wrong = Mailboxes(sharing), random.Random(7), [], 0
    for number in range(count):
        pairs = [(g, t) for g in range(size) for t in range(size) if draw.random() < 0.6]
        length, dtype = draw.choice((0, 1, 300)), draw.choice(DTYPES)
        adds, group.num_exchanges = draw.random() < 0.4, group.num_exchanges + 1

        def like(g: int, t: int) -> Tensor:
            return value(number, g, t, length, dtype)  # noqa: B023

        sends = [SendBuffer(t, like(g, t)) for g, t in pairs if g == me]
        givers = draw.sample([g for g in range(size)], size)
        total = torch.ones_like(like(0, 0))
        places = {g: total if adds else torch.zeros_like(total) for g in givers if (g, me) in pairs}
        takes = [ReceiveBuffer(g, place, adds) for g, place in places.items()]
        wait = DeviceExchange(group._ways, group._key(), sends, takes, CPU, boxes)
        expected = {g: like(g, me) for g in places}
        if adds:
            whole = torch.ones_like(total)
            for g in places:
                whole += expected[g]
            expected = dict.fromkeys(places, whole)
        waiting.append((wait, places, expected))
        if len(waiting) == 2 or number == count - 1:
            while waiting:
                wait, places, expected = waiting.pop(0)
                wait()
                wrong += sum(not torch.equal(places[g], expected[g]) for g in places)
    boxes.wait_until_read()
    return wrong, sharing.num_made, sharing.num_mapped


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="needs shared memory")
@pytest.mark.parametrize(
    "refusing",
    [{}, {1: "map"}, {0: "allocate", 2: "map"}, dict.fromkeys(range(4), "map")],
    ids=["mailboxes", "one maps nothing", "mixed", "staged"],
)
def test_random_exchanges(run: Any, tmp_path: Path, refusing: dict[int, str]) -> None:
    found = run(random_exchanges, str(tmp_path), 60, refusing, nprocs=3)
    assert [wrong for wrong, *_ in found] == [0] * 3
    for worker, (_, made, mapped) in enumerate(found):
        # two exchanges are under way at a time: two mailboxes for each of the two others, used
        # again and again; one is made for a worker that maps none before that is known
        assert made <= 4 and (made > 0) == (refusing.get(worker) != "allocate")
        assert (mapped > 0) == (refusing.get(worker) != "map")


def over_gloo(folder: str) -> tuple[int, int, int]:
    with stress.afresh(TESSEL_TRANSPORT="gloo"):
        return random_exchanges(folder, 30, {})


def test_all_is_staged_where_no_memory_is_shared(run: Any, tmp_path: Path) -> None:
    assert run(over_gloo, str(tmp_path), nprocs=3) == [(0, 0, 0)] * 3


def over_hosts(folder: str) -> tuple[int, int, int]:
    with stress.on_hosts("a", "b", "a"):
        return random_exchanges(folder, 30, {})


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="the transport is chosen outside")
def test_other_hosts_get_what_is_staged(run: Any, tmp_path: Path) -> None:
    first, second, third = run(over_hosts, str(tmp_path), nprocs=3)
    assert second == (0, 0, 0)
    for wrong, made, mapped in (first, third):
        assert wrong == 0 and 0 < made <= 2 and mapped > 0


def test_notes_say_what_was_written() -> None:
    note = Note(POSTED, 3, 2**40, bytes(range(64)), bytes(range(64, 128)))
    assert Note.of(note.tensor()) == note
    assert Note.of(Note(STAGED).tensor()).kind == STAGED


def test_mailboxes_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = Mailboxes(FileSharing(str(tmp_path)))
    assert boxes.post(1, torch.ones(2)) is not None
    monkeypatch.setenv(mailbox.IPC, "0")
    assert boxes.post(1, torch.ones(2)) is None
    monkeypatch.setenv(mailbox.IPC, "no")
    with pytest.raises(ValueError, match="TESSEL_CUDA_IPC must be one of 1, 0, got 'no'"):
        boxes.post(1, torch.ones(2))
