"""Notifications that a worker's program begins or ends, from launchers to the transport.

A worker that is idle at the end of its program, or whose program failed, will never join the
exchanges in which others wait for it. Launchers know when that happens, and the transport tells the
others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Listener(NamedTuple):
    """The functions that are called when the program of this worker begins and ends.

    Attributes:
        begun: called before it runs.
        ended: called after it, with the exception that ended it, if any; returns whether the next
            program may use the same process groups.
    """

    begun: Callable[[], None]
    ended: Callable[[BaseException | None], bool]


_listeners: list[Listener] = []
program = 1  # the number of the current program, the same on all workers


def listen(listener: Listener) -> None:
    """Notify a listener of all programs from now on."""
    _listeners.append(listener)


def begin_program(number: int) -> None:
    """Announce the begin of a program, which has this number on all workers.

    Some workers begin it before others: if these have only ended the previous one, that means
    nothing.
    """
    global program
    program = number
    for each in _listeners:
        each.begun()


def end_program(error: BaseException | None = None) -> bool:
    """Announce the end of a program; return whether the next may use the same process groups."""
    return all([each.ended(error) for each in _listeners])
