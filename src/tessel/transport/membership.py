"""Membership: what this process knows of its job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tessel.transport.host import Host
from tessel.transport.process import PeerProcess
from tessel.transport.traffic import Traffic


class Own(threading.local):
    """What each thread has for itself: the backward passes of two may run at once."""

    tag = 0


@dataclass
class Membership:
    """Who the workers are, and what passed between them.

    Attributes:
        tag: what messages of this thread carry now, so that they cannot be taken for others.
        traffic: the running totals of this worker.
        processes: of all workers, in their order.
        host: those with whom this worker shares memory, if any.
    """

    traffic: Traffic = field(default_factory=Traffic)
    processes: list[PeerProcess] = field(default_factory=list)
    host: Host | None = None
    own: Own = field(default_factory=Own)

    @property
    def tag(self) -> int:
        return self.own.tag

    @tag.setter
    def tag(self, call: int) -> None:
        self.own.tag = call

    def gone(self, workers: Iterable[int], seconds: float) -> list[int]:
        """Those of `workers` on this host whose process ended or stopped, or does in `seconds`."""
        known = {w: self.processes[w] for w in workers if w < len(self.processes)}
        deadline = time.monotonic() + seconds
        while True:
            found = [w for w, each in known.items() if each.has_ended or each.is_stopped]
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)
