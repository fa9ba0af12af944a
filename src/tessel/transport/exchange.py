"""An exchange: the messages of one movement, each by the shortest way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tessel.transport import wire
from tessel.transport.host import Awaited, Host
from tessel.transport.letter import Key, Letter, Offer
from tessel.transport.parcel import Arrival, Parcel


class Ways:
    """How a worker reaches the others of a group.

    Args:
        worker: this one.
        workers: of the group.
        host: those with whom this worker shares memory, if any.
        handle: of the group in `torch.distributed`.

    Attributes:
        others: of the group.
        near: those of them whom memory reaches, and `all_near` whether that is all.
    """

    def __init__(
        self, worker: int, workers: tuple[int, ...], host: Host | None, handle: Any
    ) -> None:
        self.worker, self.workers, self.host, self.handle = worker, workers, host, handle
        self.others = tuple(each for each in workers if each != worker)
        self.near = frozenset(host.workers if host else ()).intersection(self.others)
        self.all_near = len(self.near) == len(self.others)


class Exchange:
    """Messages that were started one by one; called, it waits for them.

    Memory carries those of workers of this host, `torch.distributed` the others. What a worker
    sends to itself is copied. Where values are added, they are so in the order of the arrivals.
    """

    def __init__(
        self, ways: Ways, key: Key, sends: Sequence[Parcel], arrivals: Sequence[Arrival]
    ) -> None:
        self._ways = ways
        self._arrivals = arrivals
        self._ordered = any(arrival.adds for arrival in arrivals)
        self._own = [parcel.tensor for parcel in sends if parcel.worker == ways.worker]
        self._awaited: list[Awaited] = []
        self._letters: list[Letter | Offer] = []
        self._landings: dict[int, wire.Landing] = {}
        self._dispatches: list[wire.Dispatch] = []
        if ways.near:
            self._start_near(key, sends)
        if not ways.all_near:
            self._start_far(key, sends)
        if self._own and not self._ordered:  # while the rest is on its way
            self._land_own()

    def _start_near(self, key: Key, sends: Sequence[Parcel]) -> None:
        near, host = self._ways.near, self._ways.host
        assert host is not None
        come = [arrival for arrival in self._arrivals if arrival.worker in near]
        go = [parcel for parcel in sends if parcel.worker in near]
        if come:
            self._awaited = host.expect(key, come, self._ordered)
        if go:
            self._letters = host.send(key, go)

    def _start_far(self, key: Key, sends: Sequence[Parcel]) -> None:
        ways, tag = self._ways, key[1]
        far = set(ways.others) - ways.near
        for arrival in self._arrivals:
            if arrival.worker in far:
                self._landings[arrival.worker] = wire.receive(arrival, ways.handle, tag)
        for parcel in sends:
            if parcel.worker in far:
                self._dispatches.append(wire.send(parcel, ways.handle, tag))

    def _land_own(self) -> None:
        for arrival in self._arrivals:
            if arrival.worker == self._ways.worker:
                arrival.land(self._own[0])

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
