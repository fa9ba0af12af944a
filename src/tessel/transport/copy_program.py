"""Copy programs: exchanges between workers of one host, as lists of copies known in advance.

A program lists, in 64-bit words, which bytes of one tensor are written to the slots of which
channels, and where in another tensor received bytes belong. The compiled engine runs it; without
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
except ImportError:  # installed without a compiler
    engine = None  # type: ignore[assignment]
else:
    engine.ask(
        getattr(Tensor, "__dlpack_c_exchange_api__", None),
        *(Tensor, Tensor.is_neg, Tensor.is_conj, torch._C._are_functorch_transforms_active),
        *(torch.is_grad_enabled, vars(forward_ad)),
    )

ENGINES = ("compiled", "python")
MOST_LOOPS = MOST_DIMS  # loops of one step
# nanoseconds for which the engine spins, or yields, and sleeps, before Python waits
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
LINE = 64  # bytes of a cache line
_NOWHERE = (0,) * 6  # the channel of values that stay on this worker


def has_engine() -> bool:
    """Whether the engine was compiled, and TESSEL_ENGINE does not switch it off."""
    return chosen("TESSEL_ENGINE", ENGINES) == "compiled" and engine is not None


def keep_unchanged(owner: type, name: str) -> None:
    """Repeat no exchange while a method is replaced, as it is by code that observes movements."""
    if engine is not None:
        engine.keep_unchanged(owner, name)


class Place(NamedTuple):
    """A part of a tensor, with the steps between neighbours along each dimension, in elements."""

    region: Region
    steps: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return tuple(part.stop - part.start for part in self.region)

    @property
    def start(self) -> int:
        """The offset of its first element, in elements."""
        return sum(part.start * step for part, step in zip(self.region, self.steps, strict=True))

    @property
    def alone(self) -> Place:
        """The same elements as a contiguous tensor, which is how a slot contains them."""
        shape = self.shape
        steps = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return Place(tuple(slice(0, length) for length in shape), steps)

    @property
    def run(self) -> int:
        """The length of its contiguous runs, in elements; 0 if a step is 0."""
        run, loops = _runs(self.shape, self.steps, self.alone.steps)
        return run if all(step for _, step, _ in loops) else 0


class CopyStep(NamedTuple):
    """A copy from one place to another, through a channel or on this worker.

    Attributes:
        channel: the words of this end of the channel; None for a copy on this worker.
        target, source: the places; one of them is a slot if there is a channel.
        adds: whether values are added to the target.
        direct: for a send, whether the receiver reads it `IN_PLACE`, or where it is `PACKED`; for a
            receive, the process whose memory is read; 0 for a copy through a slot.
        offset: the offset in the room for packed values, in bytes.
    """

    channel: tuple[int, ...] | None
    target: Place
    source: Place
    adds: bool = False
    direct: int = 0
    offset: int = 0

    @property
    def num_loops(self) -> int:
        """The number of loops around its contiguous runs."""
        return len(_runs(self.target.shape, self.target.steps, self.source.steps)[1])

    def words(self, dtype: torch.dtype) -> list[int]:
        """The words that the engine reads."""
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
    """The length of runs that are contiguous in both tensors, and the loops around them."""
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
    """One worker's part of an exchange, between tensors of one dtype with known strides.

    Args:
        code: the code of the group.
        dtype: the dtype of the tensors.
        gives: the copies into slots.
        takes: the copies out of slots, or from one tensor to the other, in the order of the places.
        yields: whether the engine yields between looks.
        wakeup: the addresses of this worker's wakeup.
        readers: the workers that read this worker's memory directly.

    Attributes:
        room: the bytes that the engine needs to pack short runs for readers.
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
        # Contiguous terms of one sum are added block by block, while a block of the result is in
        # the cache.
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
    """An exchange that the engine has begun, with everything that must live until it is complete.

    Args:
        program: the program of the exchange; it adds nothing.
        key: the key of its messages.
        x: the tensor that others may read in place.
        receives: the places of received tensors, in the order of the program.

    Attributes:
        requests: the requests that Python waits for, by the number of the receive.
    """

    def __init__(
        self, program: CopyProgram, key: Key, x: Tensor, receives: Sequence[ReceiveBuffer]
    ) -> None:
        self.program, self.key, self.x, self.receives = program, key, x, receives
        self.requests: dict[int, ReceiveRequest] = {}
        self._words = array("q", bytes(8 * (program.num_gives + RECEIVE * program.length)))
        self.address = self._words.buffer_info()[0]

    def has_come(self, number: int) -> bool:
        """Whether the engine has copied the message of a receive to its place."""
        return bool(self._words[self.program.num_gives + RECEIVE * number + HAS_COME])

    def request(self, number: int, slot_size: int) -> ReceiveRequest:
        """Turn a receive into a request of Python."""
        place = self.receives[number].place
        request = ReceiveRequest(self.key, place, False, slot_size, is_open=True)
        self.requests[number] = request
        return request

    @property
    def readers(self) -> list[tuple[int, int]]:
        """The workers that read in place, with the number of slots filled when they were told."""
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
    """The head of a program: how long it waits, in nanoseconds, and which wakeup others notify."""
    head = [code, num_gives, num_takes, spin, yields, nap, *wakeup, is_large, is_blocked]
    assert len(head) == ENTRIES
    return head


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to whole cache lines."""
    return -(-num_bytes // LINE) * LINE


def _num_bytes(steps: Iterable[CopyStep], dtype: torch.dtype) -> int:
    return sum(dtype.itemsize * prod(each.target.shape) for each in steps)
