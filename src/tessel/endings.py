"""Notifications that a worker's program begins or ends, from launchers to the transport.

A worker that is idle at the end of its program, or whose program failed, will never come to where
others wait for it. Launchers know when that happens, and those who talk to the others tell them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Listener(NamedTuple):
    """What is called when the program of this worker begins and ends.

    Attributes:
        begun: before it runs.
        ended: after it; with the exception that ended it, if any. Whether the next program may use
            the same process groups.
    """

    begun: Callable[[], None]
    ended: Callable[[BaseException | None], bool]


_listeners: list[Listener] = []
program = 1  # the number of the program that runs now, the same on all workers


def listen(listener: Listener) -> None:
    """Let a listener know of all programs from now on."""
    _listeners.append(listener)


def begin_program(number: int) -> None:
    """Say that a program begins, which has this number on all workers.

    Some begin it before others have heard of it: that these have ended the one before says nothing.
    """
    global program
    program = number
    for each in _listeners:
        each.begun()


def end_program(error: BaseException | None = None) -> bool:
    """Say that a program has ended; whether the next one may use the same process groups."""
    return all([each.ended(error) for each in _listeners])
