"""The clock: where the time of a Tessel worker goes.

pack     copies into messages
move     copies out of messages into their places, from the memory of others too, and the
         bookkeeping of messages; all of what torch.distributed does, where it carries them
wait     waiting for others
agree    agreeing on shapes before
compute  all the rest: the work itself, and Python around it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tessel.transport import Group, ReceiveBuffer
from tessel.transport.channel import Incoming, Outgoing
from tessel.transport.copy_program import engine
from tessel.transport.host import Host
from tessel.transport.request import ReceiveRequest, Rendezvous, SendRequest, UnexpectedMessage

PARTS = ("compute", "pack", "move", "wait", "agree")
_TARGETS: tuple[tuple[Any, str, str], ...] = (
    (Group, "share", "agree"),
    (Group, "exchange", "move"),
    (Group, "exchange_at_once", "move"),
    (Host, "wait", "wait"),
    (Host, "_take", "wait"),
    (Outgoing, "post", "pack"),
    (Incoming, "_put", "move"),
    (SendRequest, "write", "pack"),
    (Rendezvous, "write", "pack"),
    (ReceiveRequest, "read", "move"),
    (ReceiveRequest, "read_all", "move"),
    (UnexpectedMessage, "read", "move"),
    (ReceiveBuffer, "put", "move"),
)


class Clock:
    """Seconds that a worker spends in each part of its work.

    Time in a part that is called within another counts for the inner one only.
    """

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._within: list[float] = []  # what parts within those that run now took

    def timing(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts for a part; so does that of a function it returns."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._enter()
            try:
                result = function(*args, **kwargs)
            finally:
                self._leave(part, begin)
            return self.timing(part, result) if callable(result) else result

        return timed

    def timing_engine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs the engine, whose own clock says which part took how long."""

        def timed(*args: Any) -> Any:
            engine.clock(True)
            begin = self._enter()
            result = function(*args)
            self._leave("move", begin)
            pack, _, wait = engine.clock(False)
            self.spent["move"] -= pack + wait
            self.spent["pack"] += pack
            self.spent["wait"] += wait
            return result

        return timed

    def _enter(self) -> float:
        self._within.append(0.0)
        return time.perf_counter()

    def _leave(self, part: str, begin: float) -> None:
        took = time.perf_counter() - begin
        self.spent[part] += took - self._within.pop()
        if self._within:
            self._within[-1] += took


@contextmanager
def clocked() -> Iterator[Clock]:
    """Time the parts of all that happens here, by functions of the transport that all data passes.

    Every timed function takes a microsecond more: where the whole takes a few, read the parts as
    shares of it. Backward is seen, too: on the CPU torch runs it in the thread that calls it.
    """
    clock = Clock()
    before = [owner.__dict__[name] for owner, name, _ in _TARGETS]
    for (owner, name, part), function in zip(_TARGETS, before, strict=True):
        setattr(owner, name, clock.timing(part, function))
    by_engine = {name: getattr(Host, name) for name in ("follow", "start", "finish")}
    for name, function in by_engine.items():
        setattr(Host, name, clock.timing_engine(function))
    begin = clock._enter()
    try:
        yield clock
    finally:
        clock._leave("compute", begin)
        for name, function in by_engine.items():
            setattr(Host, name, function)
        for (owner, name, _), function in zip(_TARGETS, before, strict=True):
            setattr(owner, name, function)
