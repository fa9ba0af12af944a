"""Hosts: the workers of one host, which exchange CPU tensors through shared memory."""

from __future__ import annotations

import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessel import endings
from tessel.errors import WorkerLost
from tessel.limits import seconds_to_wait
from tessel.machine import usable_cores
from tessel.transport.backoff import SPINS, SPINS_FOR_HOSTS, YIELDS, Backoff
from tessel.transport.board import MemoryBoard
from tessel.transport.buffers import ReceiveBuffer, SendBuffer
from tessel.transport.channel import Incoming, Outbound, Outgoing, SegmentMap
from tessel.transport.constants import IN_PLACE, PACKED, SHORTEST
from tessel.transport.copy_program import (
    KINDS,
    MOST_LOOPS,
    CopyProgram,
    CopyStep,
    Place,
    StartedExchange,
    aligned,
    engine,
    has_engine,
)
from tessel.transport.process import PeerProcess, check_not_forked
from tessel.transport.reading import Reader, allow_siblings, can_be_read, is_pinned, staging_room
from tessel.transport.request import (
    Key,
    NotSent,
    OutOfStep,
    ReceiveRequest,
    ReceiveWords,
    Rendezvous,
    SendRequest,
    SendWords,
    failed_message,
)
from tessel.transport.segment import Address, Segment
from tessel.transport.wakeup import FOR_GOOD, Wakeup
from tessel.transport.watch import Wait, Watch

Awaited = tuple[int, ReceiveRequest | ReceiveWords]
# Bytes from which on receivers read a tensor in place, if they can: it is copied once instead of
# twice, and no slot is written whose cache lines another core holds, which can cost five times as
# much as a copy. The engine prepares such a read faster than Python, so it pays off earlier.
LARGE, LARGE_FOR_ENGINE = 2**19, 2**17
# Up to so many bytes of an exchange, the engine writes to slots nevertheless: it spreads them over
# places that no core holds, which makes writes and reads four times as fast.
MOST_WRITTEN = 2**20
MOST_PACKED = 2**25  # bytes that a worker packs, and keeps room for; more goes through slots
ABANDONED = 16  # number of started exchanges from which on complete ones are looked for
Give = tuple[int, Place]  # the receiver, and the source
Take = tuple[int, Place, bool]  # the sender, the target, and whether to add
# repeats an exchange: its output, None, or the rest of it (`engine.repeat`)
Again = Callable[[Tensor], Any]


class Host:
    """This worker's connections to the others of its host.

    Between `__init__` and `connect` the workers exchange their addresses.

    Args:
        workers: the workers of this host, ascending.
        worker: this worker.
    """

    def __init__(self, workers: Sequence[int], worker: int) -> None:
        self.workers = tuple(workers)
        self.worker = worker
        self._map = SegmentMap(len(self.workers))
        # invalid settings raise before there is memory, whose descriptor would stay open
        self._has_engine = has_engine()
        self._limit = seconds_to_wait()
        allow_siblings()
        self._segment, self.address = Segment.make(self._map.size)
        self._outgoing = {
            other: Outgoing(self._segment, self._map, place)
            for place, other in enumerate(self.workers)
            if other != worker
        }
        self._incoming: dict[int, Incoming] = {}
        self._held: set[int] = set()  # workers for which messages wait for room
        self._started: list[StartedExchange] = []  # by the engine, and not finished yet
        self._wakeups: dict[int, Wakeup] = {}
        self._segments = {worker: self._segment}
        self.watch = Watch()
        # carries messages to other hosts by MPI, if any: `Mpi`, which imports this class
        self.far: Any = None
        self._processes: dict[int, PeerProcess] = {}
        self._wakeup = Wakeup(self._segment)
        self._wakeup.initialise()
        self._direct = False
        self._room: Tensor | None = None
        self._lock = threading.RLock()  # methods that hold it call each other
        self._owner = os.getpid()
        self._repeats = array("q", [self._owner])  # the process that repeats exchanges, or 0
        self._spins = SPINS if len(self.workers) <= usable_cores() else 0
        self._looks = self._spins or YIELDS
        slot_size = self._map.slot_size
        self._small = min(LARGE - 1, slot_size)  # bytes of a message that is sent in one slot
        self._small_for_engine = min(LARGE_FOR_ENGINE - 1, slot_size)

    def connect(self, addresses: dict[int, Address], processes: dict[int, PeerProcess]) -> None:
        """Open the segments of the others; OSError if one cannot be reached."""
        place = self.workers.index(self.worker)
        for other, outgoing in self._outgoing.items():
            segment = self._segments[other] = Segment.open(addresses[other])
            self._incoming[other] = Incoming(segment, self._map, place)
            self._wakeups[other] = Wakeup(segment)
            outgoing.other = self._incoming[other].other = self._wakeups[other]
        self._processes = processes
        rows = [(8, *incoming.words, 0) for incoming in self._incoming.values()]
        self._channels = array("q", [word for row in rows for word in row])

    @property
    def board(self) -> MemoryBoard:
        """The board of the workers of this host."""
        return MemoryBoard(self.worker, self._segments, self._wakeups)

    def spin_less(self) -> None:
        """Spin for a short time only, since others of this host may wait for another host."""
        self._spins = min(self._spins, SPINS_FOR_HOSTS)
        self._looks = self._spins or YIELDS

    def mix_threads(self) -> None:
        """Assume nothing about the order of messages, which several threads of each worker send."""
        for incoming in self._incoming.values():
            incoming.is_ordered = False

    def can_read(self, addresses: dict[int, Address]) -> bool:
        """Whether the system lets this worker read the memory of all others."""
        staging = staging_room(self._map.slot_size)
        for other, incoming in self._incoming.items():
            reader = Reader(addresses[other].pid, staging)
            if not reader.probe(addresses[other].start, addresses[other].token):
                return False
            for slot in incoming.slots:
                slot.reader = reader
        return True

    def read_directly(self) -> None:
        """Let receivers copy large tensors from the sender's memory, since all can."""
        self._direct = True

    def hide(self) -> None:
        """Hide this worker's segment, after all have opened it."""
        self._segment.hide()

    def leave(self, after: int = FOR_GOOD) -> None:
        """Tell the others that this worker sends and receives nothing more, or is back again.

        Args:
            after: the number of the program that has ended; 0 for a worker that is back.
        """
        if os.getpid() != self._owner:
            return  # the end of a fork is not the end of the worker
        self.hide()
        if after == FOR_GOOD:  # the memory of the others goes with this object, not with its moves
            self._repeats[0] = 0
        self._wakeup.leave(after)
        for wakeup in self._wakeups.values():
            wakeup.notify()

    def send(self, key: Key, sends: Iterable[SendBuffer]) -> list[SendRequest | Rendezvous]:
        """Send messages as far as there is room; the rest is sent while this worker waits."""
        self._check_owner()
        messages: list[SendRequest | Rendezvous] = []
        waiting = deque(sends)
        with self._lock:
            try:
                while waiting:
                    worker, tensor = waiting.popleft()
                    message: SendRequest | Rendezvous
                    is_large = tensor.nbytes > self._small
                    if self._direct and is_large and can_be_read(tensor):
                        message = Rendezvous(key, worker, tensor)
                    else:
                        message = SendRequest(key, worker, tensor, self._map.slot_size)
                    self._send(message)
                    messages.append(message)
            except BaseException as error:  # tell all receivers that wait for one of them
                for worker, tensor in waiting:
                    self._send(failed_message(key, worker, tensor.nbytes, error))
                raise
        return messages

    def program(
        self,
        code: int,
        dtype: torch.dtype,
        gives: Sequence[Give],
        takes: Sequence[Take],
        early: bool = False,
    ) -> CopyProgram | None:
        """Prepare an exchange for the engine, if there is one and it can make it.

        Args:
            code: the code of the group.
            dtype: the dtype of the tensors.
            gives: the sends to workers of this host, including this one, at most one for each.
            takes: the receives, in the order in which they are written.
            early: whether it is started before it is waited for. Messages that fit into a slot then
                use it, since the sender would have to wait until the receiver reads its memory.
        """
        adds = any(is_added for *_, is_added in takes)
        if not self._has_engine or (adds and dtype not in KINDS):
            return None
        own = next((place for worker, place in gives if worker == self.worker), None)
        sends, receives, readers, room = [], [], [], 0
        others = sum(worker != self.worker for worker, _ in gives)
        written = min(MOST_WRITTEN // max(1, others), self._map.slot_size)
        limit = max(written, self._small if early else self._small_for_engine)
        for worker, place in gives:
            if worker != self.worker:
                num_bytes = prod(place.shape) * dtype.itemsize
                step = CopyStep(self._outgoing[worker].words, place.alone, place)
                if num_bytes > limit:
                    # Others can read it in place if it consists of long runs; else it is packed.
                    is_long = place.run * dtype.itemsize >= SHORTEST
                    end = room if is_long else room + aligned(num_bytes)
                    if not self._direct or (early and not is_long) or end > MOST_PACKED:
                        return None
                    step = step._replace(direct=IN_PLACE if is_long else PACKED, offset=room)
                    room = end
                    readers.append(worker)
                sends.append(step)
        for worker, place, is_added in takes:
            if worker != self.worker:
                step = CopyStep(self._incoming[worker].words, place, place.alone, is_added)
                num_bytes = prod(place.shape) * dtype.itemsize
                if num_bytes > self._small_for_engine:
                    if not self._direct or (is_added and step.num_loops):
                        return None
                    step = step._replace(direct=self._processes[worker].pid)
                receives.append(step)
            else:
                assert own is not None
                receives.append(CopyStep(None, place, own, is_added))
        if any(each.num_loops > MOST_LOOPS for each in (*sends, *receives)):
            return None
        return CopyProgram(
            code, dtype, sends, receives, not self._spins, self._wakeup.addresses, readers
        )

    def take_room(self, num_bytes: int) -> Tensor:
        """Memory in which to pack what others read; that of the last exchange, if given back."""
        with self._lock:
            room, self._room = self._room, None
        if room is None or room.numel() < num_bytes:
            with torch.inference_mode(False):
                room = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return room

    def give_back(self, room: Tensor) -> None:
        """Keep memory that nobody reads any more for the next exchange."""
        self._room = room

    def follow(self, program: CopyProgram, y: int, x: int, call: int, room: int = 0) -> int:
        """Let the engine make an exchange; return the completed receives, NOTHING or UNREAD."""
        if os.getpid() != self._owner:  # saves a call in the most frequent case
            self._check_owner()
        with self._lock:
            return engine.run(program.address, y, x, call, room)

    def repeating(
        self,
        program: CopyProgram,
        x: Tensor,
        y: Tensor,
        group: Any,
        own: Any,
        counted: array[int],
        watch: Watch,
        earlier: Again | None,
    ) -> Again | None:
        """Return a function by which the engine repeats an exchange; None if it cannot.

        Args:
            program, x, y: the exchange, which is repeated for tensors with the strides of x.
            group: the group that counts its exchanges.
            own: the state of each thread, which has the tag of its messages.
            counted: the words that count messages and their bytes.
            watch: the watch, which has the alarm.
            earlier: the same for tensors with other strides.
        """
        if program.room:
            return None
        lies = y.shape, y.stride()
        make = partial(torch.empty_strided, *lies, dtype=y.dtype, device="cpu")
        # A single number expanded to the shape of the output: only its strides are used, and
        # another output would take memory where it may be scarce.
        with torch.inference_mode(False):
            if y.numel() > 1:
                like = torch.empty((), dtype=y.dtype, device="cpu").expand(y.shape)
            else:  # expanding would change nothing
                like = torch.empty_like(y)
        if torch.empty_like(like, device="meta").stride() == y.stride():
            make = partial(torch.empty_like, like)  # takes half of the time
        words = watch.alarm, counted, self._repeats
        alarm_at, counted_at, process_at = (
            int(np.frombuffer(each, np.int64).ctypes.data) for each in words
        )
        return engine.repeat(
            *(x, make, program.address, program),
            (alarm_at, counted_at, program.bytes_sent, program.bytes_received, process_at),
            (group, own, self._lock.acquire, self._lock.release, watch.raise_broken),
            is_pinned if program.readers else None,
            *(*words, earlier),
        )

    def start(
        self,
        program: CopyProgram,
        key: Key,
        y: Tensor,
        x: Tensor,
        receives: Sequence[ReceiveBuffer],
    ) -> StartedExchange | None:
        """Let the engine send from x, and receive in y whenever it looks; None if it cannot.

        Args:
            program: the program of the exchange, which adds nothing.
            key: the key of the messages.
            y, x: plain tensors.
            receives: the places in y, in the order of the program.
        """
        self._check_owner()
        started = StartedExchange(program, key, x, receives)
        addresses = y.data_ptr(), x.data_ptr()
        with self._lock:
            if not engine.start(program.address, *addresses, key[1], started.address):
                return None
            for number, buffer in enumerate(receives):
                if buffer.worker != self.worker:
                    self._incoming[buffer.worker].posted.append((started, number))
            if len(self._started) >= ABANDONED:  # calls may have been left by exceptions
                for each in filter(self._is_complete, [*self._started]):
                    self._forget(each)
            self._started.append(started)
        return started

    def finish(self, started: StartedExchange, group: Sequence[int]) -> None:
        """Wait until all messages of an exchange have come, and others have read theirs."""
        awaited: list[Awaited] = []
        unread: list[Rendezvous] = []
        program, channels = started.program, self._channels.buffer_info()[0]
        with self._lock:
            is_done = not started.requests and engine.finish(
                program.address, started.address, channels, len(self._incoming)
            )
            if not is_done:  # message by message, from here on
                for number, buffer in enumerate(started.receives):
                    if buffer.worker != self.worker:
                        self._incoming[buffer.worker].adopt()
                        if number in started.requests:
                            awaited.append((buffer.worker, started.requests[number]))
                unread = self.await_readers(started.key, started.readers, started.x)
        if not is_done:
            self.wait(awaited, unread, group)
        with self._lock:
            self._forget(started)

    def _forget(self, started: StartedExchange) -> None:
        """Forget an exchange that is complete."""
        for number, buffer in enumerate(started.receives):
            if buffer.worker != self.worker:
                posted = self._incoming[buffer.worker].posted
                if (started, number) in posted:
                    posted.remove((started, number))
        if started in self._started:
            self._started.remove(started)

    def _is_complete(self, started: StartedExchange) -> bool:
        """Whether an exchange is complete, without waiting for it."""
        requests = started.requests
        return all(
            requests[number].is_done if number in requests else started.has_come(number)
            for number in range(len(started.receives))
        ) and all(self._outgoing[worker].was_read(filled) for worker, filled in started.readers)

    def share(self, program: CopyProgram, said: bytes, size: int, call: int) -> tuple[int, bytes]:
        """Let the engine exchange bytes; `size` times as many come back."""
        if os.getpid() != self._owner:
            self._check_owner()
        with self._lock:
            return engine.share(program.address, said, size, call)

    def await_readers(
        self, key: Key, readers: Iterable[tuple[int, int]], *read: Tensor
    ) -> list[Rendezvous]:
        """Return messages for tensors that others still have to read, which keep them alive.

        Args:
            key: the key of the messages.
            readers: the readers, and the number of slots filled including theirs; 0 for the last.
            read: the tensors that they read.
        """
        unread = []
        with self._lock:
            for worker, filled in readers:
                message = Rendezvous(key, worker, *read)
                if self._outgoing[worker].await_readers(message, filled):
                    unread.append(message)
                    self._held.add(worker)
        return unread

    def begin_swap(
        self, key: Key, sends: Sequence[SendBuffer], receives: Sequence[ReceiveBuffer]
    ) -> bool:
        """Send messages that fit into slots, before `take` receives; False if there is no room.

        Nobody waits for a worker that waits in `take`, since it has sent everything before.

        Args:
            key: the key of the messages.
            sends: the sends to workers of this host, including this one.
            receives: the receives from the same.
        """
        self._check_owner()
        messages = []
        if any(buffer.place.nbytes > self._small for buffer in receives):
            return False
        with self._lock:
            # Messages must not overtake those that wait for room, nor be received before earlier
            # ones.
            if self._held or not all(each.is_quiet for each in self._incoming.values()):
                return False
            for worker, tensor in sends:
                if worker == self.worker:
                    continue
                channel, num_bytes = self._outgoing[worker], tensor.nbytes
                if num_bytes > self._small or not channel.has_room:
                    return False
                messages.append((channel, tensor, num_bytes))
            try:
                while messages:
                    channel, tensor, num_bytes = messages.pop(0)
                    channel.post(key, tensor, num_bytes)
            except BaseException as error:
                for channel, _, num_bytes in messages:
                    channel.send(failed_message(key, 0, num_bytes, error))
                self.expect(key, receives, False)
                raise
        return True

    def take(
        self, key: Key, receives: Sequence[ReceiveBuffer], own: Tensor | None, group: Sequence[int]
    ) -> None:
        """Receive messages in order; `own` is this worker's message to itself."""
        waiting = deque(receives)
        try:
            while waiting:
                buffer = waiting.popleft()
                if buffer.worker != self.worker:
                    self._take(key, buffer, group)
                elif own is not None:
                    buffer.put(own)
        except BaseException:  # late messages must not be taken for those of the next call
            self.expect(key, waiting, False)
            raise

    def _take(self, key: Key, buffer: ReceiveBuffer, group: Sequence[int]) -> None:
        """Wait for a message that most likely fits into a slot, and copy it to its place."""
        # A separate function, since benchmarks count its time as waiting.
        worker, place, adds = buffer
        channel, num_bytes = self._incoming[worker], place.nbytes
        for _ in range(1 if self._has_engine else self._looks):  # the engine looks again, below
            with self._lock:
                taken = channel.take(key, place, adds, num_bytes)
            if taken:
                return
            if taken is None:  # another message came first
                break
            if not self._spins:
                os.sched_yield()
        self.wait(self.expect(key, [buffer], False), (), group)

    def expect(self, key: Key, receives: Iterable[ReceiveBuffer], ordered: bool) -> list[Awaited]:
        """Request messages, with all places open at once, or closed until opened."""
        awaited: list[Awaited] = []
        with self._lock:
            for worker, place, adds in receives:
                if worker != self.worker:
                    slot_size = self._map.slot_size
                    request = ReceiveRequest(key, place, adds, slot_size, is_open=not ordered)
                    self._incoming[worker].expect(request)
                    awaited.append((worker, request))
        return awaited

    def say_words(self, key: Key, words: bytes, others: Sequence[int]) -> list[SendWords]:
        """Send a few words to others, as far as there is room; `hear_words` sends the rest."""
        self._check_owner()
        said = [SendWords(key, other, memoryview(words).cast("q")) for other in others]
        with self._lock:
            for message in said:
                self._send(message)
        return said

    def hear_words(
        self, key: Key, others: Sequence[int], said: Sequence[SendWords], group: Sequence[int]
    ) -> list[bytes]:
        """Receive the words of others, in order, and finish sending those of this worker."""
        requests = [ReceiveWords(key) for _ in others]
        with self._lock:
            for other, request in zip(others, requests, strict=True):
                self._incoming[other].expect(request)
        # wait for the sends, too: a worker that next waits elsewhere, such as in a collective of
        # torch, would keep its words from workers that still wait here
        self.wait(list(zip(others, requests, strict=True)), said, group)
        return [request.words for request in requests]

    def wait(
        self,
        awaited: Sequence[Awaited],
        messages: Sequence[SendRequest | SendWords | Rendezvous],
        group: Sequence[int],
    ) -> None:
        """Wait until all awaited messages have come and this worker's have been sent.

        Args:
            awaited: the awaited messages.
            messages: the messages of this worker.
            group: the workers that take part; the death of one ends the wait.
        """
        backoff = Backoff(self._wakeup, self._spins)
        wait: Wait | None = None
        try:
            while True:  # another thread may make the progress
                for worker, request in awaited:
                    if request.failure:
                        raise NotSent(
                            f"worker {worker} could not send what worker {self.worker} waits "
                            f"for:\n{request.failure}"
                        )
                awaited = [each for each in awaited if not each[1].is_done]
                messages = [message for message in messages if not message.is_gone]
                if not awaited and not messages:
                    break
                if self._progresses(awaited):
                    backoff.end()
                    if wait is not None:  # the next one counts as a new wait
                        self.watch.finish(wait)
                        wait = None
                elif self._rests(backoff, awaited) and not self._progresses(awaited):
                    needed = [*(who for who, _ in awaited), *(each.worker for each in messages)]
                    self.check_alive(needed, group, backoff.seconds)
                    if wait is None:  # it has lasted a nap: tell the watch
                        key = awaited[0][1].key if awaited else messages[0].key
                        wait = self.watch.begin(key, needed)
                    wait.beats += 1
            backoff.end()
        finally:
            if wait is not None:
                self.watch.finish(wait)

    def check_alive(self, needed: Sequence[int], group: Sequence[int], seconds: float) -> None:
        """Raise WorkerLost if an awaited message will not come."""
        self.watch.check()
        for worker in needed:
            # A worker that ended the previous program may not have noticed the present one yet.
            has_left = self._wakeups[worker].left_after >= endings.program
            if has_left and not self._incoming[worker].has_something:
                raise self._lost([worker], self.watch.how_it_ended(worker))
        near = sorted({*needed, *group}.intersection(self._wakeups))
        ended = [worker for worker in near if self._processes[worker].has_ended]
        died = [worker for worker in ended if not self._wakeups[worker].left_after]
        if died or set(ended).intersection(needed):
            raise self._lost(died or ended, "the process has ended")
        if seconds > self._limit:
            stopped = [worker for worker in needed if self._processes[worker].is_stopped]
            state = "stopped" if stopped else "silent"
            raise self._lost(stopped or needed, f"timed out, {state} for {seconds:.0f} s")

    def _progresses(self, awaited: Sequence[Awaited]) -> bool:
        """Send waiting messages and receive those that came; return whether there were any."""
        moved = self.far is not None and self.far.progress()
        with self._lock:
            moved = self.push_held() or moved
            for worker, _ in awaited:
                moved = self._pull(worker) or moved
            # Others may wait until this worker has read their memory.
            if not moved and self._direct:
                for worker, incoming in self._incoming.items():
                    if incoming.is_asked:
                        moved = self._pull(worker) or moved
        return moved

    def _rests(self, backoff: Backoff, awaited: Sequence[Awaited]) -> bool:
        """Pause between two looks in vain; return whether nothing came during a whole nap."""
        is_busy = self.far is not None and self.far.is_busy
        if is_busy or not self._has_engine:
            return backoff.pause(is_busy)
        with self._lock:  # everything that `_progresses` looked at
            come = {worker for worker, _ in awaited}
            if self._direct:
                come |= {w for w, incoming in self._incoming.items() if incoming.is_asked}
            ends = [self._incoming[worker].filled.address for worker in come]
            ends += [self._outgoing[worker].emptied.address for worker in self._held]
        return backoff.await_any(ends)

    def push_held(self) -> bool:
        """Send messages that wait for room; return whether any was sent."""
        if not self._held:
            return False
        moved = False
        with self._lock:
            for worker in list(self._held):
                channel = self._outgoing[worker]
                moved = channel.push() or moved
                if not channel.is_busy:
                    self._held.discard(worker)
        return moved

    def _pull(self, worker: int) -> bool:
        try:
            return self._incoming[worker].pull()
        except OutOfStep as error:
            error.worker = worker
            raise
        except OSError as error:  # the memory of a process that has ended cannot be read
            raise self._lost([worker], str(error)) from error

    def _send(self, message: Outbound) -> None:
        channel = self._outgoing[message.worker]
        try:
            channel.send(message)
        finally:
            if channel.is_busy:
                self._held.add(message.worker)

    def _lost(self, workers: Iterable[int], reason: str) -> WorkerLost:
        names = ", ".join(map(str, sorted(set(workers))))
        return WorkerLost(
            f"worker {self.worker} lost contact with worker {names} during a movement: {reason}"
        )

    def _check_owner(self) -> None:
        check_not_forked(self._owner, self.worker)
