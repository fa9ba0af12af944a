"""Channels: one-way connections between two workers through the memory of their host.

A channel is a ring of headers and as many slots in the segment of its sender. The sender fills a
slot, writes its number to the next header and posts one semaphore; the receiver empties the slot
and posts another: on every processor, whoever sees a post sees all writes before it. A sender never
waits here: messages without a free slot stay in a queue. The slot that was emptied last is used
first, since it may still be in the cache; only large messages that the engine writes are spread
over several places.

The state of each end is kept in words, which the engine (engine.c) reads and writes as well.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from torch import Tensor

from tessel.transport.board import END
from tessel.transport.buffers import write
from tessel.transport.constants import (
    CALL,
    FAILED,
    FAR,
    FREE,
    GROUP,
    HEADER,
    IS_ACTIVE,
    IS_BUSY,
    IS_OFFERED,
    LAST_DIRECT,
    NUM_EMPTIED,
    NUM_FILLED,
    NUM_FREE,
    NUM_TAKEN,
    OFFSET,
    PART,
    POSTED,
    SIZE,
    SLOT,
    SLOTS,
    USED,
    WHOLE,
)  # fmt: skip
from tessel.transport.copy_program import StartedExchange
from tessel.transport.request import (
    Key,
    OutOfStep,
    ReceiveRequest,
    ReceiveWords,
    Rendezvous,
    SendRequest,
    SendWords,
    Slot,
    UnexpectedMessage,
    failed_message,
    told,
)
from tessel.transport.segment import Segment
from tessel.transport.semaphore import Semaphore
from tessel.transport.wakeup import Wakeup

BUDGET = 32 * 2**20  # bytes for all slots of a worker
LARGEST, SMALLEST = 2**20, 2**14  # bytes of a slot
PAGE = 4096
Outbound = SendRequest | SendWords | Rendezvous


@dataclass(frozen=True)
class SegmentMap:
    """The positions of all channels in a segment, the same for all workers of a host.

    Args:
        num_workers: the number of workers of the host.
    """

    num_workers: int

    @cached_property
    def slot_size(self) -> int:
        share = BUDGET // (SLOTS * max(1, self.num_workers - 1))
        return max(SMALLEST, min(LARGEST, share // PAGE * PAGE))

    def control(self, place: int) -> int:
        """The position of the semaphores and headers of the channel to a worker."""
        return END + place * (2 * SIZE + 8 * HEADER * SLOTS)

    @property
    def around(self) -> int:
        """The bytes over which the engine spreads messages in one channel."""
        return FAR // max(1, self.num_workers - 1) // PAGE * PAGE

    def slots(self, place: int) -> int:
        """The position of the slots of the channel to a worker; its staging buffer follows them."""
        pages = -(-self.control(self.num_workers) // PAGE)
        return pages * PAGE + place * (SLOTS * self.slot_size + self.around)

    @property
    def size(self) -> int:
        return self.slots(self.num_workers)


class Channel:
    """The common part of both ends of a channel.

    Args:
        segment: the segment of the sender.
        segment_map: the map of the host's segments.
        place: the place of the receiver among the workers of the host.
    """

    other: Wakeup  # of the worker at the other end, once it is known
    state: array[int]

    def __init__(self, segment: Segment, segment_map: SegmentMap, place: int) -> None:
        control, slots = segment_map.control(place), segment_map.slots(place)
        size = segment_map.slot_size
        self._places = segment.start + control, segment.start + slots, size
        self.filled = Semaphore(segment.start + control)
        self.emptied = Semaphore(segment.start + control + SIZE)
        first = (control + 2 * SIZE) // 8
        self._headers = [
            segment.words[first + HEADER * number : first + HEADER * (number + 1)]
            for number in range(SLOTS)
        ]
        self.slots = [Slot(segment, slots + size * number, size) for number in range(SLOTS)]

    @property
    def words(self) -> tuple[int, ...]:
        """The words of this end for the engine: addresses, and the size of a slot."""
        return *self._places, *self.other.addresses, self.state.buffer_info()[0]


class Outgoing(Channel):
    """The sender's end."""

    def __init__(self, segment: Segment, segment_map: SegmentMap, place: int) -> None:
        super().__init__(segment, segment_map, place)
        self.filled.initialise()
        self.emptied.initialise()
        self.queue: deque[Outbound] = deque()
        self._unread: deque[tuple[int, Rendezvous]] = deque()  # with the number of their slot
        rest = [0, 0, segment_map.around, 0]
        self.state = array("q", [0, 0, 0, SLOTS, *reversed(range(SLOTS)), *[0] * SLOTS, *rest])

    def send(self, message: Outbound) -> None:
        """Send a message, as far as there is room."""
        self.queue.append(message)
        self.state[IS_BUSY] = True  # the engine must not overtake it
        self.push()

    @property
    def has_room(self) -> bool:
        """Whether a piece could be sent at once."""
        return not self.queue and bool(self.state[NUM_FREE] or self._look_for_free())

    def post(self, key: Key, tensor: Tensor, num_bytes: int) -> None:
        """Send a tensor that fits into a slot; there must be room for it."""
        slot = self._next_slot()
        try:
            slot.tensor(tensor.dtype, tensor.shape).copy_(tensor)
            slot.num_bytes = num_bytes
        except BaseException as error:
            failed_message(key, 0, num_bytes, error).write(slot)
            raise
        finally:  # the receiver waits for it, even if it is a failure
            slot.header[GROUP], slot.header[CALL] = key
            slot.header[WHOLE] = num_bytes
            self._publish()

    def push(self) -> bool:
        """Send queued pieces while there are free slots; return whether any was sent.

        A message that cannot be written is given up, and its receiver is told why.
        """
        moved = self._look_for_free() > 0 if self.state[NUM_FREE] < SLOTS else False
        try:
            while self.queue and (self.state[NUM_FREE] or self._look_for_free()):
                self._write_next()
                moved = True
        finally:
            self.state[IS_BUSY] = self.is_busy
        return moved

    def _write_next(self) -> None:
        """Write the next piece of the first message to a slot."""
        message, slot = self.queue[0], self._next_slot()
        try:
            message.write(slot)
        except BaseException as error:
            # The receiver may have pieces already, and would take the next message for the rest.
            failed_message(message.key, message.worker, message.num_bytes, error).write(slot)
            message.is_gone = True
            raise
        finally:
            slot.header[GROUP], slot.header[CALL] = message.key
            slot.header[WHOLE] = message.num_bytes
            if isinstance(message, Rendezvous) and not message.is_gone:
                self._unread.append((self.state[NUM_FILLED], message))
                self.queue.popleft()
            elif message.is_gone:
                self.queue.popleft()
            self._publish()

    def await_readers(self, message: Rendezvous, filled: int = 0) -> bool:
        """Keep tensors that others read until they have; return whether they still read.

        Args:
            message: the tensors that they read.
            filled: the number of slots filled including it; 0 for the last one sent so.
        """
        self._look_for_free()
        number = (filled or self.state[LAST_DIRECT]) - 1
        if number < self.state[NUM_EMPTIED]:
            return False
        self._unread = deque(sorted([*self._unread, (number, message)], key=lambda each: each[0]))
        self.state[IS_BUSY] = True
        return True

    def was_read(self, filled: int) -> bool:
        """Whether the receiver has emptied this number of slots."""
        self._look_for_free()
        return self.state[NUM_EMPTIED] >= filled

    @property
    def is_busy(self) -> bool:
        """Whether a message waits for room, or to be read."""
        return bool(self.queue or self._unread)

    def _next_slot(self) -> Slot:
        """Take a free slot, and write its number to the next header."""
        state = self.state
        state[NUM_FREE] -= 1
        number, place = state[FREE + state[NUM_FREE]], state[NUM_FILLED] % SLOTS
        state[USED + place] = number
        slot = self.slots[number]
        slot.header = self._headers[place]
        slot.header[SLOT] = number
        slot.header[OFFSET] = slot.header[IS_OFFERED] = 0
        return slot

    def _publish(self) -> None:
        """Publish the slot that was filled to the receiver."""
        self.state[NUM_FILLED] += 1
        self.filled.post()
        self.other.notify()

    def _look_for_free(self) -> int:
        """Collect emptied slots and return their number; tensors named in them have been read."""
        state = self.state
        before = state[NUM_EMPTIED]
        while self.emptied.try_wait():
            state[FREE + state[NUM_FREE]] = state[USED + state[NUM_EMPTIED] % SLOTS]
            state[NUM_FREE] += 1
            state[NUM_EMPTIED] += 1
        while self._unread and self._unread[0][0] < state[NUM_EMPTIED]:
            self._unread.popleft()[1].is_gone = True
        return state[NUM_EMPTIED] - before


class Incoming(Channel):
    """The receiver's end."""

    def __init__(self, segment: Segment, segment_map: SegmentMap, place: int) -> None:
        super().__init__(segment, segment_map, place)
        self.expected: list[ReceiveRequest | ReceiveWords] = []
        self.is_ordered = True  # unless several threads of a worker send at once
        self._unexpected_messages: list[UnexpectedMessage] = []
        self._current: ReceiveRequest | ReceiveWords | UnexpectedMessage | None = None
        # messages that the engine takes when they arrive: exchanges, and the number of the receive
        self.posted: list[tuple[StartedExchange, int]] = []
        self.state = array("q", [0, 0, 0])

    def expect(self, request: ReceiveRequest | ReceiveWords) -> None:
        """Let a request wait for its message."""
        self.adopt()
        self.expected.append(request)
        self.state[IS_ACTIVE] = True

    def adopt(self) -> None:
        """Turn the receives of the engine into requests of Python, in the same order."""
        if self.state[POSTED]:
            for started, number in self.posted:
                if not started.has_come(number):
                    request = started.request(number, self._places[2])
                    self.expected.append(request)
            self.posted.clear()
            self.state[POSTED], self.state[IS_ACTIVE] = 0, True

    @property
    def is_asked(self) -> bool:
        """Whether any request waits for a message and is open."""
        return bool(self.state[POSTED]) or any(request.is_open for request in self.expected)

    def pull(self) -> bool:
        """Take what has arrived, up to the end of one message; return whether anything had."""
        moved = False
        if self.state[POSTED] and self.has_something:
            self.adopt()
        while self.filled.try_wait():
            moved, slot = True, self._next_slot()
            try:
                current = self._current or self._asked_for(slot)
                if slot.num_bytes == FAILED:  # the waiting thread raises
                    current.failure, current.is_done = told(slot), True
                else:
                    current.read(slot)
            finally:  # the slot is free again, even if its content did not fit
                self.emptied.post()
                self.other.notify()
            self._current = None if current.is_done else current
            if current.is_done:
                break
        waiting: dict[Key, int] = {}  # the number of messages of each key that still wait
        for unexpected in list(self._unexpected_messages):  # some may have been requested meanwhile
            request = self._request(unexpected.key, waiting.get(unexpected.key, 0))
            if unexpected.is_done and request is not None and request.is_open:
                self._check(request, unexpected.values.nbytes)
                if unexpected.failure:
                    request.failure, request.is_done = unexpected.failure, True
                else:
                    request.read_all(unexpected.values)
                self.expected.remove(request)
                self._unexpected_messages.remove(unexpected)
                moved = True
            else:
                waiting[unexpected.key] = waiting.get(unexpected.key, 0) + 1
        self.state[IS_ACTIVE] = self._is_active
        return moved

    def take(self, key: Key, place: Tensor, adds: bool, num_bytes: int) -> bool | None:
        """Take a tensor that fits into a slot; False if nothing has come, None if something else.

        After None, the tensor must be requested by `expect`.
        """
        self.adopt()
        if self.state[IS_ACTIVE]:
            return None
        if not self.filled.try_wait():
            return False
        header = self._headers[self.state[NUM_TAKEN] % SLOTS]
        if (
            header[GROUP] != key[0]
            or header[CALL] != key[1]
            or not header[WHOLE] == header[PART] == num_bytes
        ):
            self.filled.post()  # it stays where it is
            return None
        self._put(self._next_slot(), place, adds)
        self.emptied.post()  # only now, since the sender writes the next message there
        self.other.notify()
        return True

    def _put(self, slot: Slot, place: Tensor, adds: bool) -> None:
        """Copy a message to its place; separate, since benchmarks count its time as moving."""
        write(place, slot.tensor(place.dtype, place.shape), adds)

    @property
    def is_quiet(self) -> bool:
        """Whether there are neither pending requests nor unexpected messages."""
        return not (self._is_active or self.state[POSTED])

    @property
    def _is_active(self) -> bool:
        """Whether Python has pending requests or unexpected messages."""
        return bool(self.expected or self._unexpected_messages or self._current)

    def _next_slot(self) -> Slot:
        """The next slot that was filled."""
        header = self._headers[self.state[NUM_TAKEN] % SLOTS]
        self.state[NUM_TAKEN] += 1
        slot = self.slots[header[SLOT]]
        slot.header = header
        return slot

    @property
    def has_something(self) -> bool:
        """Whether something has arrived that was not taken yet."""
        return self.filled.count > 0

    def _asked_for(self, slot: Slot) -> ReceiveRequest | ReceiveWords | UnexpectedMessage:
        """The request for the message that begins in a slot, or a new unexpected message."""
        key: Key = (slot.header[GROUP], slot.header[CALL])
        # Unexpected messages of the same key came earlier, so they answer earlier requests.
        earlier = sum(unexpected.key == key for unexpected in self._unexpected_messages)
        request = self._request(key, earlier)
        if request is None and key[1] < 0 and self.is_ordered:
            # Exchanges outside of backward passes are numbered in each group, and the messages of
            # a worker arrive in the order in which it sends them: another message than the
            # requested one will never be requested, or the requested one was never sent.
            came = {each.key for each in self._unexpected_messages}  # for closed requests
            for each in self.expected:
                if each.key[0] == key[0] and each.key[1] < 0 and each.key not in came:
                    raise OutOfStep(each.key, key)
        if request is None or not request.is_open:
            unexpected = UnexpectedMessage(key, slot.header[WHOLE])
            self._unexpected_messages.append(unexpected)
            return unexpected
        self._check(request, slot.header[WHOLE])
        self.expected.remove(request)
        return request

    def _request(self, key: Key, place: int) -> ReceiveRequest | ReceiveWords | None:
        """The request at this place among those with a key; messages arrive in their order."""
        same = (request for request in self.expected if request.key == key)
        return next(islice(same, place, None), None)

    def _check(self, request: ReceiveRequest | ReceiveWords, num_bytes: int) -> None:
        if request.num_bytes != num_bytes:
            raise OutOfStep(
                request.key,
                request.key,
                f"received a message of {num_bytes} bytes where {request.num_bytes} were "
                f"expected: workers do not make the same calls",
            )
        # A worker that sent messages of a backward pass before this one made that pass first.
        if request.key[1] < 0 and self.is_ordered:
            for unexpected in self._unexpected_messages:
                if unexpected.key[1] > 0 and self._request(unexpected.key, 0) is None:
                    raise OutOfStep(request.key, unexpected.key)
