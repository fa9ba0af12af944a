"""An exchange: the messages of one movement, each by the shortest way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from tessel.transport import wire
from tessel.transport.host import Awaited, Host
from tessel.transport.letter import Key
from tessel.transport.parcel import Arrival, Parcel


class Ways:
    """How a worker reaches the others of a group.

    Args:
        worker: this one.
        workers: of the group.
        host: those with whom this worker shares memory, if any.
        handle: of the group in `torch.distributed`.
    """

    def __init__(
        self, worker: int, workers: tuple[int, ...], host: Host | None, handle: Any
    ) -> None:
        self.worker, self.workers, self.host, self.handle = worker, workers, host, handle
        self.others = tuple(each for each in workers if each != worker)
        self.near = frozenset(host.workers if host else ()).intersection(self.others)

    @cached_property
    def all_near(self) -> bool:
        """Whether memory reaches all of the group."""
        return len(self.near) == len(self.others)


class Exchange:
    """Messages that were started one by one; called, it waits for them.

    Memory carries those of workers of this host, `torch.distributed` the others. What a worker
    sends to itself is copied. Where values are added, they are so in the order of the arrivals.
    """

    def __init__(
        self, ways: Ways, key: Key, sends: Sequence[Parcel], arrivals: Sequence[Arrival]
    ) -> None:
        self._ways = ways
        self._own = [parcel.tensor for parcel in sends if parcel.worker == ways.worker]
        self._arrivals = arrivals
        self._ordered = any(arrival.adds for arrival in arrivals)
        self._expect(key)
        self._send(key, sends)
        if not self._ordered:  # while the rest is on its way
            for arrival in arrivals:
                if arrival.worker == ways.worker:
                    arrival.land(self._own[0])

    def _expect(self, key: Key) -> None:
        ways = self._ways
        near = [arrival for arrival in self._arrivals if arrival.worker in ways.near]
        self._awaited: list[Awaited] = []
        if near:
            assert ways.host is not None
            self._awaited = ways.host.expect(key, near, self._ordered)
        self._landings = {
            arrival.worker: wire.receive(arrival, ways.handle, key[1])
            for arrival in self._arrivals
            if arrival.worker not in ways.near and arrival.worker != ways.worker
        }

    def _send(self, key: Key, sends: Sequence[Parcel]) -> None:
        ways = self._ways
        near = [parcel for parcel in sends if parcel.worker in ways.near]
        self._letters = ways.host.send(key, near) if ways.host is not None and near else []
        self._dispatches = [
            wire.send(parcel, ways.handle, key[1])
            for parcel in sends
            if parcel.worker not in ways.near and parcel.worker != ways.worker
        ]

    def __call__(self) -> None:
        """Wait until all has come and is in its place, and all was sent."""
        if self._ordered:
            self._land_in_order()
        elif self._awaited or self._letters:
            self._wait_near(self._awaited)
        for landing in self._landings.values():
            landing()
        for dispatch in self._dispatches:
            dispatch.work.wait()

    def _land_in_order(self) -> None:
        receipts = dict(self._awaited)
        for arrival in self._arrivals:
            if arrival.worker == self._ways.worker:
                arrival.land(self._own[0])
            elif arrival.worker in receipts:
                receipt = receipts[arrival.worker]
                receipt.is_open = True
                self._wait_near([(arrival.worker, receipt)], ())
            else:
                self._landings.pop(arrival.worker)()
        if self._letters:
            self._wait_near([])

    def _wait_near(self, awaited: Sequence[Awaited], letters: Sequence[Any] | None = None) -> None:
        host = self._ways.host
        assert host is not None
        host.wait(awaited, self._letters if letters is None else letters, self._ways.others)


class Swap:
    """Messages that travelled in one collective; called, it puts them into their places."""

    def __init__(
        self,
        ways: Ways,
        sends: Sequence[Parcel],
        arrivals: Sequence[Arrival],
        device: torch.device,
    ) -> None:
        own = [parcel.tensor for parcel in sends if parcel.worker == ways.worker]
        others = [parcel for parcel in sends if parcel.worker != ways.worker]
        come = [arrival for arrival in arrivals if arrival.worker != ways.worker]
        parts = iter(wire.swap(ways.workers, others, come, device, ways.handle))
        self._values = [own[0] if a.worker == ways.worker else next(parts) for a in arrivals]
        self._arrivals = arrivals

    def __call__(self) -> None:
        for arrival, values in zip(self._arrivals, self._values, strict=True):
            arrival.land(values)


Wait = Callable[[], None]
