"""Requests: messages from one worker of a host to another, and the places that wait for them.

Both ends cut a tensor into the same pieces, each of which fits into a slot of a channel. The sender
copies each piece into a slot, and the receiver copies it from the slot to its place.
"""

from __future__ import annotations

from array import array
from functools import lru_cache

import torch
from torch import Tensor

from tessel.core import boxes
from tessel.core.boxes import Region
from tessel.transport.buffers import write
from tessel.transport.constants import FAILED, OFFSET, PART, RENDEZVOUS, SLOTS
from tessel.transport.reading import Reader, Runs, can_be_read
from tessel.transport.segment import Segment

WORDS = 64  # most words of a rendezvous: tensors have fewer than 30 dimensions
AGREED = 64  # words of an agreement: the code of a call, and the signatures of four tensors
LONGEST = 256  # words of the text of an error for the receiver
VIEWS = 512  # tensors that the slots of a channel cache
Key = tuple[int, int]  # the group and the call: messages match requests with the same key


class OutOfStep(RuntimeError):  # noqa: N818
    """Another worker sent something else than this one requested, so their calls differ.

    Args:
        asked: the key that was requested.
        came: the key of the message that came.
        text: a more precise explanation, if there is one.

    Attributes:
        worker: the sender, if known.
    """

    worker: int | None = None

    def __init__(self, asked: Key, came: Key, text: str = "") -> None:
        self.asked, self.came, self.text = asked, came, text
        super().__init__(text or f"asked for {asked}, and {came} came")


class NotSent(RuntimeError):  # noqa: N818
    """A worker could not send its message, and sent the reason in its place."""


class Slot:
    """Memory for one piece of a message."""

    __slots__ = ("_bytes", "_views", "_words", "header", "reader")

    header: memoryview  # the header that currently names the slot

    def __init__(self, segment: Segment, start: int, size: int) -> None:
        self._words = segment.words[start // 8 : (start + size) // 8]
        with torch.inference_mode(False):
            self._bytes = segment.bytes[start : start + size]
        self.reader: Reader | None = None
        self._views: dict[tuple[torch.dtype, tuple[int, ...], int], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """The number of bytes in the slot."""
        return self.header[PART]

    @num_bytes.setter
    def num_bytes(self, count: int) -> None:
        self.header[PART] = count

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The content of the slot as a contiguous tensor."""
        # Cached, since a slice and two views take microseconds, as long as a small message.
        begin = self.header[OFFSET]
        if (view := self._views.get((dtype, shape, begin))) is not None:
            return view
        if len(self._views) >= VIEWS // SLOTS:
            self._views.clear()
        with torch.inference_mode(False), torch._C._DisableFuncTorch():
            size = torch.Size(shape).numel() * dtype.itemsize
            view = self._bytes[begin : begin + size].view(dtype).view(shape)
        self._views[dtype, shape, begin] = view
        return view

    def read_words(self, count: int) -> bytes:
        return self._words[:count].tobytes()

    def write_words(self, words: memoryview) -> None:
        self._words[: len(words)] = words


Pieces = tuple[tuple[Region, tuple[int, ...]], ...]


@lru_cache(maxsize=4096)
def cut(shape: tuple[int, ...], limit: int) -> Pieces:
    """The pieces of a tensor, of at most `limit` elements: their regions and shapes."""
    whole = tuple((0, length) for length in shape)
    return tuple(
        (boxes.within(part, whole), boxes.extent(part)) for part in boxes.runs(shape, limit)
    )


class SendRequest:
    """A tensor that is being sent, piece by piece."""

    __slots__ = ("_next", "_pieces", "_tensor", "is_gone", "key", "num_bytes", "worker")

    def __init__(self, key: Key, worker: int, tensor: Tensor, slot_size: int) -> None:
        self.key, self.worker = key, worker
        self.num_bytes = tensor.nbytes
        self._tensor = tensor
        self._pieces = cut(tuple(tensor.shape), slot_size // tensor.element_size())
        self._next = 0
        self.is_gone = False

    def write(self, slot: Slot) -> None:
        """Write the next piece to a slot."""
        region, shape = self._pieces[self._next]
        source = self._tensor if len(self._pieces) == 1 else self._tensor[region]
        room = slot.tensor(source.dtype, shape)
        room.copy_(source)
        slot.num_bytes = room.nbytes
        self._next += 1
        self.is_gone = self._next == len(self._pieces)


class Rendezvous:
    """A tensor that the receiver reads directly; `beside` are other tensors that are kept alive."""

    __slots__ = ("_beside", "_tensor", "is_gone", "key", "num_bytes", "worker")

    def __init__(self, key: Key, worker: int, tensor: Tensor, *beside: Tensor) -> None:
        self.key, self.worker = key, worker
        self.num_bytes = tensor.nbytes
        self._tensor, self._beside = tensor, beside  # kept alive until it was read
        self.is_gone = False

    def write(self, slot: Slot) -> None:
        """Write the address of the tensor to a slot."""
        runs = Runs.of(self._tensor)
        words = (runs.start, runs.length, len(runs.counts), *runs.counts, *runs.strides)
        slot.write_words(memoryview(array("q", words)))
        slot.num_bytes = RENDEZVOUS


def runs_of(slot: Slot) -> Runs:
    """The memory of the tensor that a slot names."""
    start, length, ndim, *rest = memoryview(slot.read_words(WORDS)).cast("q").tolist()
    return Runs(start, length, tuple(rest[:ndim]), tuple(rest[ndim : 2 * ndim]))


class SendWords:
    """A few 64-bit words that are being sent.

    Args:
        key, worker: the key and the receiver of the message.
        words: the words.
        num_bytes: the bytes of the message that they replace; by default their own.
        part: the value for the bytes in the slot, which may be FAILED; by default `num_bytes`.
    """

    __slots__ = ("_part", "_words", "is_gone", "key", "num_bytes", "worker")

    def __init__(
        self,
        key: Key,
        worker: int,
        words: memoryview,
        num_bytes: int | None = None,
        part: int | None = None,
    ) -> None:
        self.key, self.worker, self._words = key, worker, words
        self.num_bytes = words.nbytes if num_bytes is None else num_bytes
        self._part = self.num_bytes if part is None else part
        self.is_gone = False

    def write(self, slot: Slot) -> None:
        slot.write_words(self._words)
        slot.num_bytes = self._part
        self.is_gone = True


def failed_message(key: Key, worker: int, num_bytes: int, error: BaseException) -> SendWords:
    """The words that replace a message, or the rest of it, that could not be written."""
    text = f"{type(error).__name__}: {error}".encode()[: 8 * LONGEST]
    words = array("q", [len(text)])
    words.frombytes(text.ljust(8 * LONGEST, b"\0"))
    return SendWords(key, worker, memoryview(words), num_bytes, FAILED)


def told(slot: Slot) -> str:
    """The reason in a slot why a message does not come."""
    said = slot.read_words(1 + LONGEST)
    (length,) = memoryview(said[:8]).cast("q")
    return said[8 : 8 + length].decode(errors="replace")


class ReceiveRequest:
    """A place that waits for a message.

    Args:
        key: the key of the message.
        place: the tensor for its values, with any strides.
        adds: whether values are added to the place.
        slot_size: the size of the slots of the channel, in bytes.
        is_open: whether it may be filled now; the terms of a sum are opened one after the other.
    """

    __slots__ = (
        *("_next", "_pieces", "_place", "adds", "failure", "is_done", "is_open", "key"),
        "num_bytes",
    )

    def __init__(self, key: Key, place: Tensor, adds: bool, slot_size: int, is_open: bool) -> None:
        self.key = key
        self.num_bytes = place.nbytes
        self._place = place
        self._pieces = cut(tuple(place.shape), slot_size // place.element_size())
        self._next = 0
        self.adds, self.is_open = adds, is_open
        self.is_done, self.failure = False, ""

    def read(self, slot: Slot) -> None:
        """Copy the next piece from a slot, or the whole tensor if it is read directly."""
        place = self._place
        if slot.num_bytes != RENDEZVOUS:
            region, shape = self._pieces[self._next]
            part = place if len(self._pieces) == 1 else place[region]
            values = slot.tensor(place.dtype, shape)
            write(part, values, self.adds)
            self._next += 1
            self.is_done = self._next == len(self._pieces)
            return
        source, reader = runs_of(slot), slot.reader
        assert reader is not None
        if not self.adds and can_be_read(place):
            reader.read(source, place)
        else:  # piece by piece: values are staged before they are added or scattered
            begin = 0
            for region, shape in self._pieces:
                part = place[region]
                values = reader.stage(source, begin, part.nbytes).view(place.dtype).view(shape)
                write(part, values, self.adds)
                begin += part.nbytes
        self.is_done = True

    def read_all(self, values: Tensor) -> None:
        """Copy the whole message from the bytes of an unexpected one."""
        values = values.view(self._place.dtype).view(self._place.shape)
        write(self._place, values, self.adds)
        self.is_done = True


class ReceiveWords:
    """A request for the words of another worker."""

    __slots__ = ("failure", "is_done", "is_open", "key", "num_bytes", "words")

    def __init__(self, key: Key) -> None:
        self.key, self.num_bytes = key, 8 * AGREED
        self.words = b""
        self.is_open, self.is_done, self.failure = True, False, ""

    def read(self, slot: Slot) -> None:
        self.words = slot.read_words(self.num_bytes // 8)
        self.is_done = True

    def read_all(self, values: Tensor) -> None:
        self.words = values.numpy().tobytes()
        self.is_done = True


class UnexpectedMessage:
    """A message that arrived before it was requested, kept until then."""

    __slots__ = ("_next", "failure", "is_done", "key", "values")

    def __init__(self, key: Key, num_bytes: int) -> None:
        self.key = key
        # belongs to no transform of torch.func, and outlives the mode in which it begins
        with torch.inference_mode(False), torch._C._DisableFuncTorch():
            self.values = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self._next = 0
        self.is_done, self.failure = False, ""

    def read(self, slot: Slot) -> None:
        """Keep the next piece, or the whole tensor if it is read directly."""
        if slot.num_bytes == RENDEZVOUS:
            assert slot.reader is not None
            slot.reader.read(runs_of(slot), self.values)
            self.is_done = True
            return
        with torch._C._DisableFuncTorch():
            piece = slot.tensor(torch.uint8, (slot.num_bytes,))
            self.values[self._next : self._next + slot.num_bytes].copy_(piece)
        self._next += slot.num_bytes
        self.is_done = self._next == len(self.values)
