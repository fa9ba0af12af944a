"""Groups: workers that can communicate, and the state of this process in its job."""

from __future__ import annotations

import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tessel.errors import WorkerLost
from tessel.transport import device_wait, wire
from tessel.transport.buffers import ReceiveBuffer, SendBuffer
from tessel.transport.constants import NOTHING
from tessel.transport.copy_program import CopyProgram, Place, keep_unchanged
from tessel.transport.device_exchange import DeviceExchange
from tessel.transport.device_wait import DeviceWait
from tessel.transport.exchange import Exchange, Ways
from tessel.transport.host import Again, Give, Host, Take
from tessel.transport.links import Links
from tessel.transport.mailbox import Mailboxes
from tessel.transport.mpi import Mpi
from tessel.transport.process import PeerProcess
from tessel.transport.request import AGREED, Key, NotSent, OutOfStep
from tessel.transport.traffic import Traffic
from tessel.transport.watch import Watch
from tessel.transport.world import this_worker

T = TypeVar("T")
Prepared = tuple[CopyProgram, Tensor, Tensor]  # the program of an exchange, target and source
NUM_WORDS = AGREED
DIFFERENT = "all workers must make the same calls in the same order"
MOST_PROGRAMS = 64  # programs of sums that a group caches
_PLAIN = (Tensor, torch.nn.Parameter)  # other classes may hold their values elsewhere
_LEAP = 2**20  # a given-up call advances counters to the next multiple; no call has so many
# Whether a worker that raises tells the others itself, in place of its next exchange.
tells_errors: ContextVar[bool] = ContextVar("tells_errors", default=False)
_SIGNS_OF_LOSS = ("connection", "peer", "timed out", "timeout", "socket", "aborted", "broken pipe")


def code_of(call: str) -> int:
    """A number for a call, by which workers compare their calls."""
    return zlib.crc32(call.encode())


def packed_words(words: Sequence[int]) -> bytes:
    """A few words, padded with zeros to the length of agreements."""
    return array("q", [*words, *[0] * (NUM_WORDS - len(words))]).tobytes()


class Own(threading.local):
    """The state of each thread: backward passes of two threads may run at once.

    Args:
        begins: called in each thread that communicates.
    """

    tag = 0

    def __init__(self, begins: Callable[[], None]) -> None:
        begins()


@dataclass
class Membership:
    """The workers of a job, and the state of their communication.

    Attributes:
        tag: the number that messages of this thread carry now, to tell them from others.
        traffic: the running totals of this worker, without those in `counted`.
        counted: the totals of the engine: messages, bytes sent and received.
        processes: the processes of all workers, in their order.
        hosts: the number of its host for each worker; empty if all run on one.
        host: the workers with which this one shares memory, if any.
        mpi: carries CPU tensors to other hosts; None if `torch.distributed` does.
        linked: the first workers of all hosts, if agreements go over connections between them.
        links: the connections of this worker, if it is one of them.
        mailboxes: let GPUs of this host exchange tensors without NCCL.
        watch: watches over waits, and knows whether the job is broken.
    """

    traffic: Traffic = field(default_factory=Traffic)
    counted: array[int] = field(default_factory=lambda: array("q", [0] * 3))
    processes: list[PeerProcess] = field(default_factory=list)
    hosts: tuple[int, ...] = ()
    host: Host | None = None
    mpi: Mpi | None = None
    linked: frozenset[int] = frozenset()
    links: Links | None = None
    mailboxes: Mailboxes = field(default_factory=Mailboxes)
    watch: Watch = field(default_factory=Watch)

    @cached_property
    def own(self) -> Own:
        def note_thread() -> None:
            self.watch.note_thread()
            if self.watch.has_threads and self.host is not None:
                self.host.mix_threads()

        return Own(note_thread)

    @property
    def tag(self) -> int:
        return self.own.tag

    @property
    def total_traffic(self) -> Traffic:
        """The running totals until now, including those of the engine."""
        found = replace(self.traffic)
        found.messages += self.counted[0]
        found.bytes_sent += self.counted[1]
        found.bytes_received += self.counted[2]
        return found

    def gone(self, workers: Iterable[int], seconds: float) -> list[int]:
        """Those of `workers` on this host whose process has ended or stopped, within `seconds`."""
        known = {w: self.processes[w] for w in workers if w < len(self.processes)}
        deadline = time.monotonic() + seconds
        while True:
            found = [w for w, each in known.items() if each.has_ended or each.is_stopped]
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def ended(self, workers: Iterable[int]) -> list[int]:
        """Those of `workers` on this host whose process has ended."""
        known = len(self.processes)
        return [w for w in workers if w < known and self.processes[w].has_ended]


def is_plain(x: Tensor) -> bool:
    """Whether the values of a tensor are the bytes at its address, as its strides say."""
    return (
        type(x) in _PLAIN
        and x.is_cpu
        and not (x.is_conj() or x.is_neg() or x._is_zerotensor())
        and not torch._C._are_functorch_transforms_active()
    )


class Group:
    """Workers that can communicate, in ascending order of their ranks.

    Args:
        workers: their ranks in the job.
        handle: the group of `torch.distributed`; None for a single worker.
        membership: the membership of this process in the job.
    """

    def __init__(self, workers: tuple[int, ...], handle: Any, membership: Membership) -> None:
        self.workers, self.size = workers, len(workers)
        self.handle = handle
        self.num_calls = 0  # calls agreed on here, or in a group that has all these workers
        self.num_exchanges = 0  # exchanges outside of backward passes, and agreements
        self.num_of_devices = 0  # exchanges that only GPUs wait for
        self.within = [self]  # the groups of the job without other workers
        self._membership = membership
        self._code = code_of(repr(workers))
        self._watch = membership.watch
        self._watch.groups[self._code] = self
        self._spreads: dict[tuple[torch.dtype, int], CopyProgram | None] = {}

    def exchange(
        self,
        sends: Sequence[SendBuffer],
        receives: Sequence[ReceiveBuffer],
        device: torch.device,
        dense: bool = False,
        prepared: Prepared | None = None,
    ) -> Callable[[], None]:
        """Start messages, at most one for each pair; return a function that waits for them.

        A message of a worker to itself is copied. Sums are added in the order of the receives.

        Args:
            sends: the tensors for others.
            receives: the places of tensors from others.
            device: the device of the tensors, even if there are none.
            dense: whether every worker has something for every other.
            prepared: the same exchange for the engine, without sums: its program, and the tensors
                to which and from which it copies.
        """
        self._count(sends, receives)
        ways, key = self._ways, self._next_key()
        # One collective is fastest if all messages would go by Gloo, one by one; but it has no tag.
        by_nccl = device.type == "cuda" and self._uses_nccl
        is_tagged = key[1] >= 0
        if by_nccl or (device.type == "cpu" and dense and not is_tagged and ways.are_all_by_gloo):
            come = self._swap(key, sends, receives, device)

            def put() -> None:
                for buffer, value in zip(receives, come(), strict=True):
                    if value is not buffer.place:  # it was not received there
                        buffer.put(value)

            return put
        if prepared is not None and (host := ways.host) is not None:
            program, y, x = prepared
            self._watch.check()
            started = host.start(program, key, y, x, receives)
            if started is not None:
                return lambda: self.attempt(lambda: host.finish(started, ways.others))
        wait: Callable[[], None]
        if device.type == "cuda":
            given = ways, key, sends, receives, device, self._membership.mailboxes
            wait = self.attempt(lambda: DeviceExchange(*given), starts=True)
        else:
            wait = self.attempt(lambda: Exchange(ways, key, sends, receives), starts=True)
        if ways.all_near:
            return lambda: self.attempt(wait)
        return lambda: self._attempt_far(wait, key)

    def _swap(
        self,
        key: Key,
        sends: Sequence[SendBuffer],
        receives: Sequence[ReceiveBuffer],
        device: torch.device,
    ) -> Callable[[], list[Tensor]]:
        """Start one collective for all messages; return a function that waits for the values.

        Values are received in place if there is only one place, and it is contiguous.
        """
        ways = self._ways
        own = [each.tensor for each in sends if each.worker == ways.worker]
        go = [each for each in sends if each.worker != ways.worker]
        come = [each for each in receives if each.worker != ways.worker]
        # On a GPU the host would have to wait for the number: there the next agreement compares it.
        number = key[1] if device.type == "cpu" else None
        given = ways.workers, go, come, device, ways.handle, number
        parts, wait = self.attempt_by_wire(lambda: wire.swap(*given), key)

        def arrive() -> list[Tensor]:
            wait()
            if device.type == "cuda":  # the stream waits, not the host
                self._watch_device(key)
            came = iter(parts)
            return [own[0] if each.worker == ways.worker else next(came) for each in receives]

        return arrive

    def bring(
        self, sends: Sequence[SendBuffer], receives: Sequence[ReceiveBuffer], device: torch.device
    ) -> list[Tensor]:
        """Exchange tensors of a GPU and return those received; places give shape and dtype only.

        The place of a tensor that this worker keeps may be the tensor itself: it is not written.
        """
        if not self._uses_nccl:
            given = {id(buffer.tensor) for buffer in sends}
            takes = [each for each in receives if id(each.place) not in given]
            kept = {each.worker for each in receives} - {each.worker for each in takes}
            self.exchange([each for each in sends if each.worker not in kept], takes, device)()
            return [buffer.place for buffer in receives]
        self._count(sends, receives)
        return self._swap(self._next_key(), sends, receives, device)()

    def adds_on_devices(self, x: Tensor) -> bool:
        """Whether a tensor is on a GPU and NCCL can sum it."""
        return x.is_cuda and self._uses_nccl and wire.can_add(x.dtype)

    def all_reduce(self, *totals: Tensor) -> Callable[[], None]:
        """Start the sums of contiguous tensors of a GPU over all workers, in place.

        All workers get the same bits, since NCCL adds each value on one of them. Returns a function
        that waits.
        """
        # as sent and received by a ring
        length = 2 * sum(each.nbytes for each in totals) * (self.size - 1) // self.size
        return self._on_devices("all-reduce", length, lambda: wire.all_reduce(totals, self.handle))

    def _on_devices(
        self, name: str, length: int, start: Callable[[], Callable[[], None]]
    ) -> Callable[[], None]:
        """Start a collective of NCCL; return a function that lets the GPU wait for it.

        Args:
            name: the name of the collective, for traces.
            length: the number of bytes that it sends, and receives.
            start: starts it, and returns a function that waits.
        """
        traffic, key = self._membership.traffic, self._next_key()
        traffic.messages += 1
        traffic.bytes_sent += length
        traffic.bytes_received += length
        wait = self.attempt_by_wire(start, key)

        def arrive() -> None:
            wait()
            self._watch_device(key)

        return arrive

    def all_gather(self, *parts: Tensor) -> list[Tensor]:
        """Gather contiguous tensors of GPUs, of equal form on all workers, as rows by worker."""
        length = sum(each.nbytes for each in parts) * (self.size - 1)
        found: list[Tensor] = []

        def start() -> Callable[[], None]:
            rows, wait = wire.all_gather(parts, self.handle)
            found.extend(rows)
            return wait

        self._on_devices("all-gather", length, start)()
        return found

    def exchange_at_once(
        self,
        sends: Sequence[SendBuffer],
        receives: Sequence[ReceiveBuffer],
        device: torch.device,
        dense: bool = False,
    ) -> None:
        """Exchange and wait; small messages between workers of one host take a shortcut."""
        ways, host = self._ways, self._ways.host
        if ways.all_near and host is not None and device.type == "cpu":
            key = self._key()
            self._watch.check()
            try:
                has_begun = host.begin_swap(key, sends, receives)
            except BaseException:  # others are told why, and go on to the next number
                self._next_key()
                raise
            if has_begun:
                self._next_key()
                self._count(sends, receives)
                own = next((each.tensor for each in sends if each.worker == ways.worker), None)
                self.attempt(lambda: host.take(key, receives, own, ways.others))
                return
        self.exchange(sends, receives, device, dense)()

    def program(
        self, dtype: torch.dtype, gives: Sequence[Give], takes: Sequence[Take], early: bool = False
    ) -> CopyProgram | None:
        """Prepare an exchange among workers of this host, if that is possible.

        Args:
            dtype, gives, takes: as those of `Host.program`.
            early: whether it is started before it is waited for.
        """
        ways = self._ways
        near = {ways.worker, *ways.near}
        if ways.host is None or not all(each[0] in near for each in (*gives, *takes)):
            return None
        return ways.host.program(self._code, dtype, gives, takes, early)

    def take_room(self, program: CopyProgram) -> Tensor:
        """Memory in which the engine packs what others read."""
        assert self._ways.host is not None
        return self._ways.host.take_room(program.room)

    def follow(self, program: CopyProgram, y: Tensor, x: Tensor, room: Tensor | None = None) -> int:
        """Run a prepared exchange from x to y, plain tensors, as far as it goes without waiting.

        Returns the number of completed receives, NOTHING or UNREAD; the rest is left to `finish`.
        `room` is from `take_room`.
        """
        membership, host = self._membership, self._membership.host
        assert host is not None
        if self._watch.alarm[0]:
            self._watch.raise_broken()
        tag = membership.own.tag
        call = tag or ~(self.num_exchanges << 1)
        try:
            packed = 0 if room is None else room.data_ptr()
            num_received = host.follow(program, y.data_ptr(), x.data_ptr(), call, packed)
        except KeyboardInterrupt as error:
            self._break(error)
            raise
        if self._watch.alarm[0]:  # a worker that was read may have gone on after raising the alarm
            self._watch.raise_broken()
        if num_received != NOTHING:
            if not tag:
                self.num_exchanges += 1
            traffic = membership.traffic
            traffic.messages += program.num_gives
            traffic.bytes_sent += program.bytes_sent
            traffic.bytes_received += program.bytes_received
        if room is not None and num_received in (program.length, NOTHING):  # nobody reads there
            host.give_back(room)
        return num_received

    def repeating(
        self, program: CopyProgram, x: Tensor, y: Tensor, earlier: Again | None
    ) -> Again | None:
        """Return a function that repeats a prepared exchange, from tensors like x to new ones.

        The function does the same as `follow`, and checks whether it may; the rest is left to
        `finish`. None if it cannot be made. `earlier` is the same for tensors of other strides.
        """
        membership, host = self._membership, self._membership.host
        assert host is not None
        job = self, membership.own, membership.counted, self._watch
        return host.repeating(program, x, y, *job, earlier)

    def finish(
        self,
        program: CopyProgram,
        x: Tensor,
        receives: Sequence[ReceiveBuffer],
        own: Tensor | None,
        room: Tensor | None = None,
    ) -> None:
        """Complete the receives of an exchange of x, and wait until others have read x.

        They may also read `room`, in which parts of x are packed.
        """
        ways, key, host = self._ways, self._key(begun=1), self._ways.host
        assert host is not None

        def take() -> None:
            read = (x,) if room is None else (x, room)
            unread = host.await_readers(key, ((each, 0) for each in program.readers), *read)
            host.take(key, receives, own, ways.others)
            if unread:
                host.wait((), unread, ways.others)

        self.attempt(take)
        if room is not None:  # nobody reads it any more
            host.give_back(room)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a small tensor over the group, on every worker."""
        if self.size == 1:
            return value
        value = value.contiguous()
        # Each worker adds all copies in the same order: the sum is the same on all, bit by bit.
        copies = value.new_empty((self.size, *value.shape))
        program, num_received = None, NOTHING
        if is_plain(value) and value.numel():
            program = self._spreading(value.dtype, value.numel())
        if program is not None:
            num_received = self.follow(program, copies, value)
            if num_received == self.size:
                return copies.sum(0)
        if self._by_host:
            return self._sum_by_hosts(value)
        receives = [ReceiveBuffer(w, copy) for w, copy in zip(self.workers, copies, strict=True)]
        if program is not None and num_received != NOTHING:  # the engine has begun
            self.finish(program, value, receives[num_received:], value)
        else:
            sends = [SendBuffer(worker, value) for worker in self.workers]
            self.exchange_at_once(sends, receives, value.device, dense=True)
        return copies.sum(0)

    def _sum_by_hosts(self, value: Tensor) -> Tensor:
        """Sum within each host first, then over hosts, in the same order on all workers."""
        worker, device = self._ways.worker, value.device
        here = next(each for each in self._by_host if worker in each)
        firsts = [each[0] for each in self._by_host]
        for givers in (here, firsts):
            copies, is_first = value.new_empty((len(givers), *value.shape)), worker == here[0]
            receives = [ReceiveBuffer(w, c) for w, c in zip(givers, copies, strict=True)] * is_first
            takers = givers if givers is firsts else here[:1]
            sends = [SendBuffer(taker, value) for taker in takers if worker in givers]
            self.exchange_at_once(sends, receives, device)
            value = copies.sum(0) if is_first else value
        total = torch.empty_like(value)
        sends = [SendBuffer(taker, value) for taker in here] * is_first
        self.exchange_at_once(sends, [ReceiveBuffer(here[0], total)], device)
        return total

    def share_words(self, words: Sequence[int]) -> bytes:
        """Gather every worker's words, at most `NUM_WORDS`, as the bytes of an int64 array.

        This is how workers agree before data moves. All such messages have the same length, so that
        workers that make different calls can find out. The array is in group order.
        """
        return self.share(packed_words(words))

    def share(self, said: bytes) -> bytes:
        """The same for words that are already packed."""
        if self.size == 1:
            return said
        if self._watch.alarm[0]:
            self._watch.raise_broken()
        self._membership.traffic.agreements += 1
        number, ways = self.num_exchanges, self._ways
        self.num_exchanges += 1
        call = ~(number << 1 | 1)  # negative, unlike those of backward passes
        key = self._code, call
        if self._by_host:
            attempt = self.attempt if self._is_linked else partial(self._attempt_far, key=key)
            return attempt(lambda: self._share_by_hosts(said, number, key))
        if not ways.all_near:
            return self.attempt_by_wire(lambda: self._share_by_wire(said, number), key)
        # Through memory: by the engine, and the rest message by message.
        host, num_received, heard = ways.host, NOTHING, b""
        assert host is not None
        if self._agreement is not None:
            try:
                num_received, heard = host.share(self._agreement, said, self.size, call)
            except KeyboardInterrupt as error:
                self._break(error)
                raise
            if num_received == self.size:
                return heard
        return self.attempt(lambda: self._share_rest(host, key, said, num_received, heard))

    def _share_rest(
        self, host: Host, key: Key, said: bytes, num_received: int, heard: bytes
    ) -> bytes:
        """Exchange the words that the engine has not received."""
        ways, length = self._ways, len(said)
        sent = host.say_words(key, said, ways.others) if num_received < 0 else []
        parts = [heard[at : at + length] for at in range(0, max(num_received, 0) * length, length)]
        missing = self.workers[len(parts) :]
        others = [each for each in missing if each != ways.worker]
        came = dict(zip(others, host.hear_words(key, others, sent, ways.others), strict=True))
        return b"".join([*parts, *(came.get(worker, said) for worker in missing)])

    def _share_by_wire(self, said: bytes, number: int) -> bytes:
        """Share words through `torch.distributed`, with the number of the exchange."""
        words = array("q", [number, *array("q", said)])
        everyones = wire.share_words(words, self.size, self._control_device, self.handle)
        rows = np.frombuffer(everyones, np.int64).reshape(self.size, -1)
        self._compare_numbers(number, dict(zip(self.workers, rows[:, 0].tolist(), strict=True)))
        return rows[:, 1:].tobytes()

    def _compare_numbers(self, number: int, numbers: dict[int, int]) -> None:
        """Raise if the number of exchanges before this one differs between workers."""
        if any(each != number for each in numbers.values()):
            done = ", ".join(f"{count} on worker {worker}" for worker, count in numbers.items())
            text = f"{DIFFERENT}: the exchanges before this one were {done}"
            raise OutOfStep((self._code, -1), (self._code, -1), text)

    def _share_by_hosts(self, said: bytes, number: int, key: Key) -> bytes:
        """Share words with one message from host to host, by the first worker of each host.

        Between hosts the number of the exchange is sent along, so that a difference shows at once.
        """
        ways, length = self._ways, len(said) // 8
        here = next(each for each in self._by_host if ways.worker in each)
        others = [each for each in self._by_host if each is not here]
        row_of = {worker: row for row, worker in enumerate(self.workers)}
        with torch.inference_mode(False), torch._C._DisableFuncTorch():
            all_words = torch.empty((self.size, length), dtype=torch.int64, device="cpu")
            words = all_words.numpy()
            mine = row_of[ways.worker]
            words[mine] = np.frombuffer(said, np.int64)
            if ways.worker != here[0]:
                sends = [SendBuffer(here[0], all_words[mine])]
                Exchange(ways, key, sends, [ReceiveBuffer(here[0], all_words)])()
                return words.tobytes()
            rows = [ReceiveBuffer(worker, all_words[row_of[worker]]) for worker in here[1:]]
            Exchange(ways, key, [], rows)()
            ours = torch.empty(len(here) * length + 1, dtype=torch.int64, device="cpu")
            ours.numpy()[:] = [*words[[row_of[worker] for worker in here]].flat, number]
            said_by = self._swap_words(
                ours, [(each[0], len(each) * length + 1) for each in others], key
            )
            for each in others:
                rows_there = said_by[each[0]][:-1].reshape(len(each), length)
                words[[row_of[worker] for worker in each]] = rows_there
            numbers = {first: int(values[-1]) for first, values in said_by.items()}
            self._compare_numbers(number, dict(sorted({ways.worker: number, **numbers}.items())))
            Exchange(ways, key, [SendBuffer(worker, all_words) for worker in here[1:]], [])()
            return words.tobytes()

    def _swap_words(
        self, ours: Tensor, others: Sequence[tuple[int, int]], key: Key
    ) -> dict[int, np.ndarray]:
        """Exchange words with the first workers of other hosts; return theirs by worker.

        Args:
            ours: the words of this worker.
            others: the other workers, and how many words come from each.
            key: the key of the messages.
        """
        firsts = [first for first, _ in others]
        if self._is_linked:
            links, membership = self._membership.links, self._membership
            assert links is not None
            links.say(self._code, ours.numpy().tobytes(), firsts)
            come = links.hear(key, firsts, membership.watch, membership.host)
            return {w: np.frombuffer(each, np.int64) for w, each in zip(firsts, come, strict=True)}
        theirs = {first: ours.new_empty(length) for first, length in others}
        receives = [ReceiveBuffer(*each) for each in theirs.items()]
        sends = [SendBuffer(first, ours) for first in firsts]
        Exchange(self._ways, key, sends, receives, tag=wire.AGREEMENT)()
        return {first: values.numpy() for first, values in theirs.items()}

    @cached_property
    def _is_linked(self) -> bool:
        """Whether the first workers of the hosts of this group are linked."""
        return all(each[0] in self._membership.linked for each in self._by_host)

    @cached_property
    def _by_host(self) -> tuple[tuple[int, ...], ...]:
        """The workers of this group by host; empty if that makes no difference."""
        hosts, found = self._membership.hosts, dict[int, list[int]]()
        if not hosts or self.handle is None or self._control_device.type != "cpu":
            return ()
        for worker in self.workers:
            found.setdefault(hosts[worker], []).append(worker)
        # workers that are each alone on their host use a collective of Gloo instead
        least = self.size if self._membership.mpi is None else self.size + 1
        return tuple(map(tuple, found.values())) if 1 < len(found) < least else ()

    @cached_property
    def _agreement(self) -> CopyProgram | None:
        """The program that exchanges the words of all workers."""
        return self._spreading(torch.int64, NUM_WORDS)

    def _spreading(self, dtype: torch.dtype, length: int) -> CopyProgram | None:
        """The program by which all workers get so many values of each, in order."""
        key = dtype, length
        if key not in self._spreads:
            if len(self._spreads) >= MOST_PROGRAMS:
                self._spreads.clear()
            said = Place((slice(0, length),), (1,))
            heard = (Place((slice(length * k, length * (k + 1)),), (1,)) for k in range(self.size))
            gives = [(worker, said) for worker in self.workers]
            takes = [(w, place, False) for w, place in zip(self.workers, heard, strict=True)]
            program = self.program(dtype, gives, takes)
            # Values so large that others would read them from this worker's memory go another way.
            self._spreads[key] = None if program is not None and program.readers else program
        return self._spreads[key]

    def check_same_call(self, codes: np.ndarray, call: str | Callable[[], str]) -> None:
        """Raise ValueError on every worker if the codes of their calls differ."""
        if (codes == codes[0]).all():
            return
        calls = self.share_objects(call if isinstance(call, str) else call())
        same: dict[int, list[int]] = {}  # places of the workers that make the same call
        for place, code in enumerate(codes.tolist()):
            same.setdefault(code, []).append(place)
        said = []
        for places in same.values():
            first, *others = (self.workers[place] for place in places)
            also = f" (so do workers {listing(others)})" if others else ""
            said.append(f"worker {first} calls {calls[places[0]]}{also}")
        error = ValueError(f"{DIFFERENT}: {', '.join(said)}")
        error.workers = self.workers  # type: ignore[attr-defined]  # all of which raise it
        error.calls = calls  # type: ignore[attr-defined]
        raise error

    def number_call(self) -> None:
        """Count a call that all workers agreed on; all workers of a group have the same count.

        Groups within this one count it, too. Groups that contain it do not, since only some of
        their workers made the call.
        """
        for group in self.within:
            group.num_calls += 1

    def give_up(self, error: BaseException) -> None:
        """Note that an exception has left a call that the workers had agreed on.

        If it has on all of them, they stay in step: counters advance to the next multiple, which is
        the same wherever in the call each worker was. Else the counters of this worker differ from
        those of the others, which then report the exception instead of mistaking the messages of
        another call for those of this one.
        """
        if type(error).__name__ == "_StopRecomputationError":
            return  # torch ends the recomputation of a checkpoint by it, after the exchange
        for group in self.within:
            group.num_calls = (group.num_calls // _LEAP + 1) * _LEAP
        if tells_errors.get():
            return  # the others hear of it in place of the next exchange, which has its number
        for group in self.within:
            group.num_exchanges = (group.num_exchanges // _LEAP + 1) * _LEAP
        self._watch.give_up([(each._code, each.num_exchanges) for each in self.within], error)

    def share_objects(self, item: Any) -> list[Any]:
        """Gather every worker's item in group order; slow, for set-up and texts of errors."""
        if self.handle is None:
            return [item]
        device = wire.control_device(self.handle)
        said = wire.said(item)
        # errors in an item are raised after the exchange, so that it is complete
        return wire.told(self.attempt_by_wire(lambda: wire.share_bytes(said, device, self.handle)))

    @cached_property
    def _ways(self) -> Ways:
        membership = self._membership
        ways = membership.host, self.handle, membership.mpi, membership.hosts
        return Ways(this_worker(), self.workers, *ways)

    @cached_property
    def _control_device(self) -> torch.device:
        return wire.control_device(self.handle)

    def _count(self, sends: Iterable[SendBuffer], receives: Iterable[ReceiveBuffer]) -> None:
        """Add messages to the totals, except those that stay on this worker."""
        totals, worker, hosts = self._membership.traffic, self._ways.worker, self._membership.hosts
        for sent in sends:
            if sent.worker != worker:
                totals.messages += 1
                totals.bytes_sent += sent.tensor.nbytes
                if hosts and hosts[sent.worker] != hosts[worker]:
                    totals.messages_between_hosts += 1
                    totals.bytes_between_hosts += sent.tensor.nbytes
        for received in receives:
            if received.worker != worker:
                totals.bytes_received += received.place.nbytes

    def attempt(self, communicate: Callable[[], T], starts: bool = False) -> T:
        """Communicate with others; name the worker that is gone if that fails.

        After a failure the job is broken, unless all that wait for this worker know of it already.

        Args:
            communicate: the function that communicates.
            starts: whether messages are only started: if one cannot be written, its receiver is
                told.
        """
        watch = self._watch
        if watch.alarm[0]:
            watch.raise_broken()
        try:
            result = communicate()
            if watch.alarm[0]:  # a worker that was read may have gone on after the alarm
                watch.raise_broken()
            return result
        except NotSent as error:
            raise RuntimeError(str(error)) from None
        except WorkerLost as error:
            self._break(error)
            raise
        except OutOfStep as error:
            lost = self._out_of_step(error)
            self._break(lost)
            raise lost from error
        except RuntimeError as error:
            line = str(error).strip().partition("\n")[0] or repr(error)
            if watch.is_broken():  # so another worker has closed the connection
                raise WorkerLost(watch.why()) from error
            if not any(sign in line.lower() for sign in _SIGNS_OF_LOSS):
                if not starts:
                    self._break(error)
                raise
            # A process that ends closes its connections before the system reports its end.
            gone = self._membership.gone(self.workers, seconds=0.5)
            who = (
                f"worker {', '.join(map(str, gone))}" if gone else f"one of {listing(self.workers)}"
            )
            lost = WorkerLost(
                f"worker {this_worker()} lost contact with {who} during a movement: "
                f"{line.partition('. ')[0]}"
            )
            self._break(lost)
            raise lost from error
        except BaseException as error:
            if not starts:
                self._break(error)
            raise

    def attempt_by_wire(self, communicate: Callable[[], T], key: Key | None = None) -> T:
        """Like `attempt`, through `torch.distributed`, while the watch checks on this worker.

        The worker itself cannot look while torch waits.
        """
        others = self._ways.others

        def interrupt() -> None:  # the job is broken: end waits for messages of this group
            wire.close(self.handle, others[0])

        wait = self._watch.begin(key or self._key(), others, interrupt)
        try:
            return self.attempt(communicate)
        finally:
            self._watch.finish(wait)

    def _attempt_far(self, communicate: Callable[[], T], key: Key) -> T:
        """Like `attempt`, with other hosts: by MPI, where this worker looks itself, or by Gloo."""
        if self._ways.mpi is not None:
            return self.attempt(communicate)
        return self.attempt_by_wire(communicate, key)

    def _key(self, begun: int = 0) -> Key:
        """The key of messages now: the group, and the number of the call or of the exchange."""
        return self._code, self._membership.own.tag or ~(self.num_exchanges - begun << 1)

    def _next_key(self) -> Key:
        """The key of a new exchange, which is counted unless it is part of a backward pass."""
        key = self._key()
        if key[1] < 0:  # exchanges of a backward pass have the number of their call
            self.num_exchanges += 1
        return key

    def _break(self, error: BaseException) -> None:
        """Note that an exchange was not completed."""
        text = str(error) if isinstance(error, WorkerLost) else ""
        if not text:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = f"{what} on worker {this_worker()} while it waited for others"
        self._watch.note_raised()
        self._watch.break_job(text)

    def _out_of_step(self, error: OutOfStep) -> WorkerLost:
        """The error that explains why a worker sent something else."""
        other = "another worker" if error.worker is None else f"worker {error.worker}"
        here = f"worker {this_worker()} in {self._watch.describe_this_thread(error.asked)}"
        if error.text:
            text = f"{error.text}: {here}"
        elif error.came[1] > 0:
            text = (
                f"{other} has made the backward pass of call {error.came[1]}, and {here} has not; "
                f"call backward on all workers, also on those where the result is empty"
            )
        else:
            text = f"{DIFFERENT}: {here} got a message of another call from {other}"
        return WorkerLost(f"{text}{self._watch.notes()}")

    def _watch_device(self, key: Key) -> None:
        """Watch an exchange that the GPU of this worker waits for from now on."""
        if not self._uses_nccl:
            return  # Gloo waits for it on the host
        if torch.cuda.is_current_stream_capturing():  # earlier ones are over, this one never runs
            self._watch.forget_devices()
            return
        self.num_of_devices += 1
        # Methods, which look up the handle when they are called: a reference to it would keep the
        # threads of a job alive that has ended.
        given = self._ways.others, self._abort, self.num_of_devices, self._ended
        self._watch.note_device(DeviceWait(key, *given))

    def _abort(self) -> None:
        """Abort exchanges that only GPUs wait for."""
        device_wait.abort(self.handle)

    def _ended(self) -> list[int]:
        """The workers of this group on this host whose processes have ended."""
        return self._membership.ended(self.workers)

    @cached_property
    def _uses_nccl(self) -> bool:
        uses = wire.moves_on_device(self.handle)
        if uses:
            device_wait.be_patient(self.handle)
        return uses


keep_unchanged(Group, "follow")
keep_unchanged(Host, "follow")


def listing(workers: Sequence[int]) -> str:
    """A list of workers for the text of an error."""
    return "[" + ", ".join(map(str, workers)) + "]"
