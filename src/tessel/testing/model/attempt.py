"""Attempts: what may raise on one worker, after which all of them raise the same."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tessel import transport
from tessel.core.context import setting
from tessel.core.partition import Partition
from tessel.errors import WorkerLost
from tessel.tensor.call_site import is_library
from tessel.tensor.comparing import compare, comparing


@dataclass
class Attempt:
    """What something gave, or the exception that it raised."""

    result: Any = None
    error: BaseException | None = None

    @property
    def text(self) -> str:
        """The exception in a line, with the place in the user's code; empty if there is none."""
        if self.error is None:
            return ""
        place = ""
        for frame, line in traceback.walk_tb(self.error.__traceback__):
            if not is_library(frame):
                place = f" at {frame.f_code.co_filename}:{line}"
        return f"{type(self.error).__name__}: {self.error}{place}"

    def raise_together(self, everyone: transport.Group, what: str) -> None:
        """Raise the same AssertionError on all workers if the attempt failed on one."""
        said = dict(zip(everyone.workers, everyone.share_objects(self.text), strict=True))
        failed = {worker: text for worker, text in said.items() if text}
        # a worker that only heard of it has nothing new to say
        own = {w: text for w, text in failed.items() if transport.DIFFERENT not in text} or failed
        if own:
            listed = "; ".join(
                f"on workers {[w for w, each in own.items() if each == text]} {text}"
                for text in dict.fromkeys(own.values())
            )
            raise AssertionError(f"check_model: {what}, {listed}") from self.error


def attempt(act: Callable[[], Any]) -> Attempt:
    """Do something that moves nothing, and keep what it raises."""
    try:
        return Attempt(act())
    except Exception as error:  # of whatever kind the model's are
        return Attempt(error=error)


def attempt_together(
    act: Callable[[], Any], partition: Partition, everyone: transport.Group
) -> Attempt:
    """Do something that workers of a partition do together, and none of them alone.

    Meanwhile they compare their calls. A worker that raises says so in the place of its next one,
    and all others raise there, whatever they are about to do.
    """
    result = None
    groups = [partition.prepare(), everyone] if partition.active else [everyone]
    groups = list(dict.fromkeys(groups))  # which are one, if all workers take part
    try:
        with comparing(), setting(transport.tells_errors, True):
            if partition.active:
                result = act()
            for group in groups:
                compare(group, "the end of check_model")
    except WorkerLost as error:  # there is nobody to tell
        return Attempt(error=error)
    except Exception as error:  # of whatever kind the model's are
        failed = Attempt(error=error)
        for group in groups:
            if group.workers != getattr(error, "workers", None):  # who know of it
                with suppress(ValueError):  # it is what the others raise
                    compare(group, f"nothing more: it raised {failed.text}")
        return failed
    return Attempt(result)
