"""Agreement of a group on one call, and on what its workers bring to it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tessel.core.agreement import NUM_SIGNED, Agreement, Signature, TensorMeta, agree_on_all
from tessel.core.layout import Shape
from tessel.core.partition import Partition
from tessel.transport import NUM_WORDS, code_of, kept_in_job

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
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


class Topic(Protocol[T_co]):
    """What workers agree on, call after call, with one tensor each: a value, that can be a key."""

    @property
    def partition(self) -> Partition: ...

    @property
    def label(self) -> str:
        """The call in the words of its user."""
        ...

    @property
    def identity(self) -> str:
        """The label and all that it does not say, which must be equal on all workers."""
        ...

    def conclude(self, shapes: dict[int, Shape], meta: TensorMeta) -> T_co:
        """What follows from the shapes by worker and the kind of the tensors, or ValueError."""
        ...


def conclude(topic: Topic[T], x: Tensor) -> T:
    """What all workers conclude from each other's tensors, in one exchange.

    It is drawn once for the same topic and the same shapes: this is what a small layer can afford.
    """
    return _agreement_on(topic).agree_on(x)


@kept_in_job
def _agreement_on(topic: Topic[T]) -> Agreement[T]:
    P = topic.partition
    return Agreement(P.group, topic.label, P.ranks, topic.conclude, topic.identity)


def range_of(
    values: Any, dtypes: Sequence[torch.dtype], ignored: int | None = None
) -> tuple[int, int, int]:
    """The least and the greatest of some integers, and a checksum; (0, -1, …) if there are none.

    Copies that must be equal are compared by it, and ids that must be in range.

    Args:
        values: a tensor of one of the dtypes; anything else counts as none.
        dtypes: those that are looked at.
        ignored: a value that counts in the checksum alone.
    """
    if not is_dense(values) or values.dtype not in dtypes:
        return 0, -1, 0
    with torch._C._DisableFuncTorch():  # what is only looked at belongs to no transform
        found = values.detach().to("cpu", torch.int64).contiguous().numpy()
    said = zlib.crc32(found.data) if found.size else 0
    counted = found if ignored is None else found[found != ignored]
    return (int(counted.min()), int(counted.max()), said) if counted.size else (0, -1, said)


def checksum(value: Any) -> int:
    """A number that tells tensors apart by their values; 0 for what has none."""
    if not is_dense(value) or not value.numel():
        return 0
    with torch._C._DisableFuncTorch():  # a checksum belongs to no transform of torch.func
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)


def is_dense(value: Any) -> bool:
    """Whether values can be looked at; what the workers agree on says what else is wrong."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def agree_on_call(partition: Partition, call: str) -> None:
    """Raise on every worker of the partition unless all of them make the same call."""
    group = partition.group
    if partition.active and group.size > 1:
        group.check_same_call(group.share_words([code_of(call)]), call)


def agree_on_items(partition: Partition, call: str, items: Sequence[str]) -> None:
    """Raise ValueError on all workers, with the first difference, unless all list the same.

    Two exchanges at most: the items themselves travel only if their checksums differ.
    """
    group = partition.group
    if group.size == 1 or not partition.active:
        return
    told = group.share_words([code_of("\n".join(items))])
    if told == told[: len(told) // group.size] * group.size:
        return
    (first, expected), *others = tell(partition, list(items)).items()
    worker, got = next((worker, items) for worker, items in others if items != expected)
    missing = [(first, item, worker) for item in expected if item not in got]
    missing += [(worker, item, first) for item in got if item not in expected]
    difference = f"workers {first} and {worker} have the same values in another order"
    if missing:
        difference = "worker {} has {}, and worker {} does not".format(*missing[0])
    raise ValueError(f"{call}: {difference}; pass the same on all workers")


def tell(partition: Partition, value: Any) -> dict[int, Any]:
    """What each worker of a partition has to say, by worker: any object that can be pickled."""
    group = partition.group
    return dict(zip(group.workers, group.share_objects(value), strict=True))


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
