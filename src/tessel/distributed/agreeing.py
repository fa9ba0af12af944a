"""Agreement of a group on one call, and on what its workers bring to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tessel.core.agreement import NUM_SIGNED, Agreement, Signature, TensorMeta, agree_on_all
from tessel.core.layout import Shape
from tessel.core.partition import Partition
from tessel.transport import NUM_WORDS, code_of, kept_in_job

Held = tuple[
    dict[int, Shape], TensorMeta
]  # the shapes by worker, and what all tensors have in common
Numbers = dict[int, tuple[int, ...]]  # what each worker said


def agree(partition: Partition, call: str, *tensors: Tensor) -> list[Held]:
    """The shapes of everybody's tensors, in one small exchange; all workers raise, or none.

    They raise if their calls differ, or the dtype, the device or the number of dimensions of a
    tensor. What else must be equal, or is wrong on one worker only, belongs into the text of the
    call: workers that say different things all raise, and the error quotes both.

    Args:
        partition: the workers, of which this must be one.
        call: what is called, in the words of its user.
        tensors: what each worker brings, as many on each.
    """
    agreements = _agreements(partition, call, ("",) * len(tensors), call)
    return agree_on_all(agreements, list(map(Signature.of, tensors)))


def agree_and_tell(
    partition: Partition,
    call: str,
    tensors: Sequence[tuple[str, Any]],
    numbers: Sequence[int],
    identity: str = "",
) -> tuple[list[Held], Numbers]:
    """The same with a few numbers of 64 bits, and those of all workers; still one exchange.

    The numbers are of this call alone, as a seed or a checksum of values. What follows from shapes
    can be remembered from call to call.

    Args:
        partition: the workers, of which this must be one.
        call: what is called, in the words of its user.
        tensors: what each worker brings, each with what it is, for the text of errors.
        numbers: what this worker says.
        identity: what must be equal on all workers, where the text of the call does not say all.
    """
    names = tuple(f"{name} of " for name, _ in tensors)
    agreements = [
        *_agreements(partition, call, names, identity or call),
        _listening(partition, call, identity or call),
    ]
    signatures = [
        *(Signature.of(tensor) for _, tensor in tensors),
        _Spoken((), None, "cpu", said=numbers),
    ]
    *found, heard = agree_on_all(agreements, signatures)
    return found, {worker: words[: len(numbers)] for worker, words in heard.items()}


def agree_on_call(partition: Partition, call: str) -> None:
    """Raise on every worker of the partition unless all of them make the same call."""
    group = partition.group
    if partition.active and group.size > 1:
        group.check_same_call(group.share_words([code_of(call)]), call)


@dataclass(frozen=True)
class _Spoken(Signature):
    """Some numbers, in the place of what a worker says of a tensor."""

    said: Sequence[int] = ()

    def words(self) -> list[int]:
        return [*self.said, *[0] * (NUM_SIGNED - len(self.said))]


class _Listening(Agreement[Numbers]):
    """Where workers hear each other's numbers; these change with each call, and none is kept."""

    def conclusion_of(self, everyones: bytes) -> Numbers:
        rows = np.frombuffer(everyones, dtype=np.int64).reshape(-1, NUM_WORDS)
        said = map(tuple, rows[:, 1 : 1 + NUM_SIGNED].tolist())
        return dict(zip(self.group.workers, said, strict=True))


@kept_in_job
def _agreements(
    partition: Partition, call: str, names: tuple[str, ...], identity: str
) -> list[Agreement[Any]]:
    return [
        Agreement(partition.group, f"{name}{call}", partition.ranks, _held, identity)
        for name in names
    ]


@kept_in_job
def _listening(partition: Partition, call: str, identity: str) -> Agreement[Any]:
    return _Listening(partition.group, call, partition.ranks, _held, identity)


def _held(shapes: dict[int, Shape], meta: TensorMeta) -> Any:
    return shapes, meta
