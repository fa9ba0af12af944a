"""What happened to one worker, told to all."""

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
def together(call: str, workers: Partition | None = None) -> Iterator[list[str]]:
    """Raise on all workers what a block raises on one, or if their facts differ.

    One small exchange after the block; texts travel only if all raise. The block gets a list for
    the facts that must be equal on all workers; those of one that had an error do not count.

    Args:
        call: what is called, in the words of its user.
        workers: who is told; None for all of the job.
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
        # an error that is one of KINDS is told by its text alone
        is_known = number >= 0 and type(error) is KINDS[number]
        text = "" if error is None else f"{'' if is_known else type(error).__name__ + ': '}{error}"
        number, text = tell(everyone, (number, text))[failed[0]]
        raise KINDS[number](f"{call}: on worker {failed[0]}, {text}") from error
    if len({code for _, code in said.values()}) > 1:
        same(tell(everyone, " ".join(facts)), "data", call)


def kind_of(device: torch.device | str | None) -> str:
    """What workers agree on of their devices, each of which may have a number of its own."""
    return "cpu" if device is None else torch.device(device).type
