"""Errors of one worker, raised on all workers together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tessel.core.agreement import agree, same, tell
from tessel.core.partition import Partition, world
from tessel.transport import code_of

# as which an error is raised on all workers: the first that it is an instance of
KINDS: tuple[type[Exception], ...] = (
    *(FileNotFoundError, FileExistsError, PermissionError, OSError),
    *(ImportError, IndexError, MemoryError, NotImplementedError, TypeError, ValueError),
    RuntimeError,
)


@contextmanager
def together(call: str, workers: Partition | None = None, saying: str = "") -> Iterator[list[str]]:
    """Raise on all workers what a block raises on one, or if their facts differ.

    One small exchange after the block; texts travel only if all raise. The block gets a list for
    the facts that must be equal on all workers; those of one that had an error do not count.

    Args:
        call: what is called, in the words of its user.
        workers: who is told; None for all of the job.
        saying: how the error begins, which then is a ValueError of whatever kind it was; by default
            with the call. It may say something else on each worker.
    """
    facts: list[str] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as raised:  # of a storage or a source, which may raise anything
        error = raised
    everyone = workers or world()
    _, said = agree(everyone, call, numbers=(error is not None, code_of(" ".join(facts))))
    failed = [worker for worker, (has_failed, _) in said.items() if has_failed]
    if failed:
        number = next((k for k, kind in enumerate(KINDS) if isinstance(error, kind)), -1)
        # an error of the kind that is raised is told by its text alone
        is_known = type(error) is (ValueError if saying else KINDS[number])
        text = "" if error is None else f"{'' if is_known else type(error).__name__ + ': '}{error}"
        number, text = tell(everyone, (number, text))[failed[0]]
        kind = ValueError if saying else KINDS[number]
        # What a generator raises from a StopIteration is taken for the end of the block.
        cause = None if isinstance(error, StopIteration) else error
        raise kind(f"{saying or call}: on worker {failed[0]}, {text}") from cause
    if len({code for _, code in said.values()}) > 1:
        same(tell(everyone, " ".join(facts)), "data", call)


def kind_of(device: torch.device | str | None) -> str:
    """What workers agree on of their devices, each of which may have a number of its own."""
    return "cpu" if device is None else torch.device(device).type
