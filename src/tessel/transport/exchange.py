"""Exchanges: the messages of one movement, each by the fastest way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessel.transport import wire
from tessel.transport.buffers import ReceiveBuffer, SendBuffer
from tessel.transport.host import Awaited, Host
from tessel.transport.mpi import Mpi
from tessel.transport.request import Key, Rendezvous, SendRequest


class Ways:
    """The ways by which a worker reaches the others of a group.

    Args:
        worker: this worker.
        workers: the workers of the group.
        host: the workers with which this one shares memory, if any.
        handle: the process group in `torch.distributed`.
        mpi: carries messages to other hosts; None if `torch.distributed` does.
        hosts: the number of its host for each worker of the job; empty if all run on one.

    Attributes:
        others: the other workers of the group.
        near: those of them that share memory with this one; `all_near`: whether all do.
        are_all_by_gloo: whether all workers of the group reach all others by `torch.distributed`;
            it is the same on all of them, which then make one collective.
    """

    def __init__(
        self,
        worker: int,
        workers: tuple[int, ...],
        host: Host | None,
        handle: Any,
        mpi: Mpi | None = None,
        hosts: Sequence[int] = (),
    ) -> None:
        self.worker, self.workers, self.host, self.handle = worker, workers, host, handle
        self.mpi = mpi
        self.others = tuple(each for each in workers if each != worker)
        self.near = frozenset(host.workers if host else ()).intersection(self.others)
        self.all_near = len(self.near) == len(self.others)
        # A worker alone on its host has none near, while other workers of the group may have some.
        are_alone = (
            len({hosts[each] for each in workers}) == len(workers) if hosts else not self.near
        )
        self.are_all_by_gloo = are_alone and bool(self.others) and mpi is None


class Exchange:
    """Messages that were started one by one; calling it waits for them.

    Messages between workers of this host go through memory, others by MPI or `torch.distributed`.
    A message of a worker to itself is copied. Sums are added in the order of the receives.

    Args:
        ways: the ways to the workers of the group.
        key: the key of the messages.
        sends, receives: at most one for each pair of workers.
        tag: the tag of messages between hosts; None for that of the key.
    """

    def __init__(
        self,
        ways: Ways,
        key: Key,
        sends: Sequence[SendBuffer],
        receives: Sequence[ReceiveBuffer],
        tag: int | None = None,
    ) -> None:
        self._ways = ways
        self._receives = receives
        self._ordered = any(buffer.adds for buffer in receives)
        self._own = [buffer.tensor for buffer in sends if buffer.worker == ways.worker]
        self._awaited: list[Awaited] = []
        self._messages: list[SendRequest | Rendezvous] = []
        self._pending_receives: dict[int, Callable[[], None]] = {}
        self._pending_sends: list[Callable[[], None]] = []
        if ways.near:
            assert ways.host is not None
            come = [buffer for buffer in receives if buffer.worker in ways.near]
            go = [buffer for buffer in sends if buffer.worker in ways.near]
            # Places are requested before anything is sent: messages then find them when they
            # arrive, and are copied once.
            if come:
                self._awaited = ways.host.expect(key, come, self._ordered)
            if go:
                try:
                    self._messages = ways.host.send(key, go)
                except BaseException:
                    self._open_all()
                    raise
        if not ways.all_near:
            far = set(ways.others) - ways.near
            tag = wire.tag_of(key[1]) if tag is None else tag
            for buffer in receives:
                if buffer.worker in far:
                    self._pending_receives[buffer.worker] = (
                        wire.receive(buffer, ways.handle, tag)
                        if ways.mpi is None
                        else ways.mpi.receive(buffer, key, tag)
                    )
            for sent in sends:
                if sent.worker in far:
                    self._pending_sends.append(
                        wire.send(sent, ways.handle, tag)
                        if ways.mpi is None
                        else ways.mpi.send(sent, key, tag)
                    )
        if self._own and not self._ordered:  # while the others are in transit
            for buffer in receives:
                if buffer.worker == ways.worker:
                    buffer.put(self._own[0])

    def __call__(self) -> None:
        """Wait until all messages were received in their places, and all were sent."""
        try:
            if self._ordered:  # so that a sum is the same each time, bit by bit
                requests = dict(self._awaited)
                for buffer in self._receives:
                    if buffer.worker == self._ways.worker:
                        buffer.put(self._own[0])
                    elif buffer.worker in requests:
                        request = requests[buffer.worker]
                        request.is_open = True
                        self._wait_near([(buffer.worker, request)], ())
                    else:
                        self._pending_receives.pop(buffer.worker)()
                if self._messages:
                    self._wait_near([])
            elif self._awaited or self._messages:
                self._wait_near(self._awaited)
            for receive in self._pending_receives.values():
                receive()
            for send in self._pending_sends:
                send()
        except BaseException:
            self._open_all()
            raise

    def _open_all(self) -> None:
        """Let messages that still arrive find their places, and not those of a later exchange."""
        for _, request in self._awaited:
            request.is_open = True

    def _wait_near(self, awaited: Sequence[Awaited], messages: Sequence[Any] | None = None) -> None:
        host = self._ways.host
        assert host is not None
        host.wait(awaited, self._messages if messages is None else messages, self._ways.others)
