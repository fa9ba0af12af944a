"""Support: whether torch can do what an operator does, in its numbers and on a device.

Torch has every function for 32 and 64 bits. Of 16 bits it has some, on some devices, for some
lengths: no list says which, so small tensors are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tessel.operators.space import real_of
from tessel.operators.tasks import Summands


def check_numbers(operator: Any, device: torch.device | str) -> None:
    """ValueError if torch lacks something that an operator or its gradient needs on a device.

    Without it a worker would fail between two messages.
    """
    if real_of(operator.domain.dtype).itemsize > 2:
        return
    kind = torch.device(device).type
    if kind in operator.supported_on:
        return
    for actor in _actors(operator):
        trial = getattr(actor, "try_on", None)
        if trial is not None:
            _attempt(actor, trial, kind)
    operator.supported_on.add(kind)


def _actors(operator: Any) -> Iterator[Any]:
    """What acts in an operator, in the terms of sums too."""
    for task in operator.expand(0):
        if isinstance(task.actor, Summands):
            for term in task.actor.operators:
                yield from _actors(term)
        else:
            yield task.actor


def _attempt(actor: Any, trial: Any, device: str) -> None:
    try:
        trial(device)
    except RuntimeError as error:  # NotImplementedError is one
        dtype = str(actor.domain.dtype).removeprefix("torch.")
        raise ValueError(
            f"{actor}: torch cannot do this in {dtype} on {device} ({error}); use float32 or "
            f"complex64 there"
        ) from None
