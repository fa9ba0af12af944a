"""Errors of one worker, raised on all workers together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import TracebackException

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
    """Raise on all workers if a block raises on one, or if their facts differ.

    It takes one small exchange after the block; texts are sent only if all raise. The block gets a
    list for the facts that must be equal on all workers; those of a worker with an error are
    ignored.

    Args:
        call: the call, in the words of its user.
        workers: the workers that raise; None for all of the job.
        saying: how the error begins, which then is a ValueError for an error of any kind; by
            default with the call. It may differ between workers.
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
        # an error of the kind that is raised is described by its text alone
        is_known = type(error) is (ValueError if saying else KINDS[number])
        text = "" if error is None else "" if is_known else f"{type(error).__name__}: "
        if error is not None:  # the `__str__` of its class may raise itself
            text += str(TracebackException(type(error), error, None))
        number, text = tell(everyone, (number, text))[failed[0]]
        kind = ValueError if saying else KINDS[number]
        # What a generator raises from a StopIteration is taken for the end of the block.
        cause = None if isinstance(error, StopIteration) else error
        raise kind(f"{saying or call}: on worker {failed[0]}, {text}") from cause
    if len({code for _, code in said.values()}) > 1:
        same(tell(everyone, " ".join(facts)), "data", call)


def kind_of(device: torch.device | str | None) -> str:
    """The type of a device, on which workers agree; each may have its own number."""
    return "cpu" if device is None else torch.device(device).type
