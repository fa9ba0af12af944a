"""Copy programs: exchanges between workers of one host whose copies are known in advance.

A program says, in 64-bit words, which bytes of one tensor go into the slots of which channels, and
where in another tensor belongs what comes. The engine, which is compiled, runs along it; without
the engine there are no programs, and exchanges are made message by message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from tessel.core.boxes import Region, Shape
from tessel.settings import chosen
from tessel.transport.buffers import ReceiveBuffer
from tessel.transport.constants import (
    COPIES,
    DIMS,
    ENTRIES,
    FLOAT32,
    FLOAT64,
    HAS_COME,
    INT8,
    INT16,
    INT32,
    INT64,
    MOST_DIMS,
    MOST_TERMS,
    PACKED,
    RECEIVE,
)  # fmt: skip
from tessel.transport.request import Key, ReceiveRequest

try:
    import tessel.transport.engine as engine
except ImportError:  # it was installed where no compiler was found
    engine = None  # type: ignore[assignment]
else:
    engine.ask(
        getattr(Tensor, "__dlpack_c_exchange_api__", None),
        *(Tensor, Tensor.is_neg, Tensor.is_conj, torch._C._are_functorch_transforms_active),
        *(torch.is_grad_enabled, vars(forward_ad)),
    )

ENGINES = ("compiled", "python")
MOST_LOOPS = MOST_DIMS  # of one step
# nanoseconds for which the engine looks again at once, or lets others run in between, and sleeps,
# before Python waits
SPIN_NS, YIELD_NS, NAP_NS = 200_000, 50_000, 2_000_000
KINDS = {
    torch.float32: FLOAT32,
    torch.complex64: FLOAT32,
    torch.float64: FLOAT64,
    torch.complex128: FLOAT64,
    torch.int8: INT8,
    torch.uint8: INT8,
    torch.int16: INT16,
    torch.int32: INT32,
    torch.int64: INT64,
}
LINE = 64  # bytes that a cache keeps together
_NOWHERE = (0,) * 6  # the channel of what stays on this worker


def has_engine() -> bool:
    """Whether the engine was compiled, and TESSEL_ENGINE does not switch it off."""
    return chosen("TESSEL_ENGINE", ENGINES) == "compiled" and engine is not None


def keep_unchanged(owner: type, name: str) -> None:
    """Repeat no exchange while a method is another one: who looks at what moves replaces it."""
    if engine is not None:
        engine.keep_unchanged(owner, name)


class Place(NamedTuple):
    """A part of a tensor whose neighbours along each dimension lie so many elements apart."""

    region: Region
    steps: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return tuple(part.stop - part.start for part in self.region)

    @property
    def start(self) -> int:
        """Where it begins, in elements."""
        return sum(part.start * step for part, step in zip(self.region, self.steps, strict=True))

    @property
    def alone(self) -> Place:
        """The same elements as a tensor of their own: so they lie in a slot."""
        shape = self.shape
        steps = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return Place(tuple(slice(0, length) for length in shape), steps)

    @property
    def run(self) -> int:
        """How many of its elements lie together; 0 if some lie in several places of it."""
        run, loops = _runs(self.shape, self.steps, self.alone.steps)
        return run if all(step for _, step, _ in loops) else 0


class CopyStep(NamedTuple):
    """What goes from one place to another, through a channel or on this worker.

    Attributes:
        channel: the words of its end; None for what stays here.
        target, source: the places; of what passes a channel one of them is a slot.
        adds: whether it is added to what is there.
        direct: of what goes, whether the receiver reads it `IN_PLACE`, or where it is `PACKED`; of
            what comes, the process whose memory is read for it; 0 for what passes through a slot.
        offset: of what is packed, where in the room for it, in bytes.
    """

    channel: tuple[int, ...] | None
    target: Place
    source: Place
    adds: bool = False
    direct: int = 0
    offset: int = 0

    @property
    def num_loops(self) -> int:
        """The dimensions along which runs lie apart at one end."""
        return len(_runs(self.target.shape, self.target.steps, self.source.steps)[1])

    def words(self, dtype: torch.dtype) -> list[int]:
        """What the engine reads."""
        width = dtype.itemsize
        run, dims = _runs(self.target.shape, self.target.steps, self.source.steps)
        scaled = [word for n, *steps in dims for word in (n, *(width * step for step in steps))]
        num_bytes = width * prod(self.target.shape)
        starts = width * self.source.start, width * self.target.start + self.offset
        kind = KINDS[dtype] if self.adds else COPIES
        channel = (*(self.channel or _NOWHERE), self.direct)
        rest = [*channel, num_bytes, *starts, kind, width * run, len(dims)]
        assert 1 + len(rest) == DIMS
        return [1 + len(rest) + len(scaled), *rest, *scaled]


def _runs(
    shape: Shape, to_steps: Sequence[int], from_steps: Sequence[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """The elements of a run that is contiguous in both tensors, and the loops around it."""
    if 0 in shape:
        return 0, []
    loops: list[tuple[int, int, int]] = []
    for each in zip(shape, to_steps, from_steps, strict=True):
        n, to, other = each
        if loops and loops[-1][1:] == (n * to, n * other):
            loops[-1] = loops[-1][0] * n, to, other
        elif n > 1:
            loops.append(each)
    run = loops.pop()[0] if loops and loops[-1][1:] == (1, 1) else 1
    return run, loops


class CopyProgram:
    """One exchange, as one worker sees it, between tensors of one dtype that lie in certain ways.

    Args:
        code: of the group.
        dtype: of the tensors.
        gives: into slots.
        takes: out of slots, or from the one tensor to the other, in the order of their places.
        yields: whether the engine lets others run while it looks again.
        wakeup: the addresses of this worker's own.
        readers: the workers that read something where it is.

    Attributes:
        room: bytes that the engine needs to pack what others read in short runs.
    """

    def __init__(
        self,
        code: int,
        dtype: torch.dtype,
        gives: Sequence[CopyStep],
        takes: Sequence[CopyStep],
        yields: bool,
        wakeup: tuple[int, int],
        readers: Sequence[int] = (),
    ) -> None:
        self.readers = tuple(readers)
        is_large = any(each.direct for each in (*gives, *takes))
        # Terms of one sum that all lie together are added block by block, while a block of the
        # result is in the cache.
        ends = {(each.target.start, each.target.shape) for each in takes}
        together = len(ends) == 1 and not any(each.num_loops for each in takes)
        is_blocked = together and 1 < len(takes) <= MOST_TERMS
        spin = YIELD_NS if yields else SPIN_NS
        counts = len(gives), len(takes)
        head = waiting_words(code, *counts, spin, yields, NAP_NS, wakeup, is_large, is_blocked)
        entries = (word for each in (*gives, *takes) for word in each.words(dtype))
        self._words = array("q", [*head, *entries])
        self.address = self._words.buffer_info()[0]
        self.length = len(takes)
        self.num_gives = len(gives)
        packed = (each for each in gives if each.direct == PACKED)
        self.room = max((each.offset + _num_bytes([each], dtype) for each in packed), default=0)
        self.bytes_sent = _num_bytes(gives, dtype)
        self.bytes_received = _num_bytes((each for each in takes if each.channel), dtype)


class StartedExchange:
    """An exchange that the engine has begun, with all that must live until it is complete.

    Args:
        program: of the exchange; nothing in it is added.
        key: of its messages.
        x: what others may read where it is.
        receives: the places of what comes, in the order of the program.

    Attributes:
        requests: what Python waits for, by the number of the receive.
    """

    def __init__(
        self, program: CopyProgram, key: Key, x: Tensor, receives: Sequence[ReceiveBuffer]
    ) -> None:
        self.program, self.key, self.x, self.receives = program, key, x, receives
        self.requests: dict[int, ReceiveRequest] = {}
        self._words = array("q", bytes(8 * (program.num_gives + RECEIVE * program.length)))
        self.address = self._words.buffer_info()[0]

    def has_come(self, number: int) -> bool:
        """Whether the engine has put the message of a receive into its place."""
        return bool(self._words[self.program.num_gives + RECEIVE * number + HAS_COME])

    def request(self, number: int, slot_size: int) -> ReceiveRequest:
        """A receive as one that Python makes."""
        place = self.receives[number].place
        request = ReceiveRequest(self.key, place, False, slot_size, is_open=True)
        self.requests[number] = request
        return request

    @property
    def readers(self) -> list[tuple[int, int]]:
        """Who reads something where it is, with how many slots were filled when it was named."""
        filled = (each for each in self._words[: self.program.num_gives] if each)
        return list(zip(self.program.readers, filled, strict=True))


def waiting_words(
    code: int,
    num_gives: int,
    num_takes: int,
    spin: int,
    yields: bool,
    nap: int,
    wakeup: tuple[int, int],
    is_large: bool = False,
    is_blocked: bool = False,
) -> list[int]:
    """The head of a program, which says how long it waits: nanoseconds, and whom others wake."""
    head = [code, num_gives, num_takes, spin, yields, nap, *wakeup, is_large, is_blocked]
    assert len(head) == ENTRIES
    return head


def aligned(num_bytes: int) -> int:
    """At least as many bytes, in whole lines of the cache."""
    return -(-num_bytes // LINE) * LINE


def _num_bytes(steps: Iterable[CopyStep], dtype: torch.dtype) -> int:
    return sum(dtype.itemsize * prod(each.target.shape) for each in steps)
