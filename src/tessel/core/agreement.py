"""Agreement: before data moves, workers learn what the others hold, and raise together if it
does not fit.

Every worker describes its tensor in a few words (shape, dtype, device, whether it needs a
gradient), all get all descriptions, and each draws the same conclusion from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from tessel.core.layout import Shape
from tessel.core.partition import Partition
from tessel.transport import NUM_WORDS, Group, code_of, kept_in_job, packed_words

MAX_DIM = 10
MEMORY = 256  # conclusions, and signatures, that an agreement remembers
# words of a signature: dtype, device, flags, number of dimensions, lengths
NUM_SIGNED = 4 + MAX_DIM
# in one exchange, after the label; the last word is free
MAX_SIGNATURES = (NUM_WORDS - 2) // NUM_SIGNED

_DTYPES: tuple[torch.dtype | None, ...] = (
    None, torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.complex64, torch.complex128, torch.complex32,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_DEVICE_CODES = {device: code for code, device in enumerate(_DEVICES)}


@dataclass(frozen=True)
class Signature:
    """What one worker brings to a movement; no dtype if it is nothing that can be moved."""

    shape: Shape
    dtype: torch.dtype | None
    device: str
    needs_grad: bool = False
    forbids_grad: bool = False  # it runs under torch.no_grad()
    has_tangent: bool = False
    compiles: bool = False

    @classmethod
    def of(cls, x: Tensor) -> Signature:
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return cls((), None, "cpu", forbids_grad=not torch.is_grad_enabled())
        grad_enabled = torch.is_grad_enabled()
        return cls(
            tuple(x.shape),
            x.dtype,
            x.device.type,
            needs_grad=x.requires_grad and grad_enabled,
            forbids_grad=not grad_enabled,
            has_tangent=has_tangent(x),
        )

    def words(self) -> list[int]:
        """The signature as a fixed number of integers."""
        movable = self.dtype in _DTYPE_CODES and self.device in _DEVICE_CODES
        dtype, device = (self.dtype, self.device) if movable else (None, "cpu")
        said = (self.needs_grad, self.forbids_grad, self.has_tangent, self.compiles)
        flags = sum(flag << bit for bit, flag in enumerate(said))
        lengths = self.shape[:MAX_DIM]
        padding = [0] * (MAX_DIM - len(lengths))
        codes = _DTYPE_CODES[dtype], _DEVICE_CODES[device]
        return [*codes, flags, len(self.shape), *lengths, *padding]

    @classmethod
    def from_words(cls, words: list[int]) -> Signature:
        dtype, device, flags, ndim, *lengths = words
        return cls(
            tuple(lengths[: min(ndim, MAX_DIM)]) + (0,) * (ndim - MAX_DIM),
            _DTYPES[dtype],
            _DEVICES[device],
            *(bool(flags >> bit & 1) for bit in range(4)),
        )


@dataclass(frozen=True)
class TensorMeta:
    """What all workers know after they agreed: the kind of tensor, and whether derivatives pass."""

    dtype: torch.dtype
    device: str
    needs_grad: bool
    has_tangent: bool


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
V = TypeVar("V")
Conclusion = Callable[[dict[int, Shape], TensorMeta], T]


@dataclass
class Agreement(Generic[T]):
    """Where workers agree, call by call.

    Args:
        group: who must agree.
        label: which movement this is, in the words of its user.
        givers: the workers whose tensors move; what others pass is a placeholder.
        conclude: makes something from the shapes by worker and the meta, or raises ValueError;
            it must depend on nothing else, so that all workers come to the same.
        identity: what the movement is to the last detail, where the label does not say all.
    """

    group: Group
    label: str
    givers: Collection[int]
    conclude: Conclusion[T]
    identity: str = ""
    _known: dict[bytes, T] = field(default_factory=dict)
    _said: dict[tuple[Any, ...], bytes] = field(default_factory=dict)

    def agree(self, signature: Signature) -> T:
        """One small exchange; its conclusion is drawn once for the same signatures."""
        return self._concluded(self.group.share(self._packed(signature)))

    def agree_on(self, x: Tensor) -> T:
        """Agree by the signature of a tensor, which is made once for tensors alike."""
        if not isinstance(x, Tensor) or in_forward_mode():  # what the key below does not tell
            return self.agree(Signature.of(x))
        kind = x.shape, x.dtype, x.device, x.layout, x.requires_grad, torch.is_grad_enabled()
        said = self._said.get(kind)
        if said is None:
            said = self._packed(Signature.of(x))
            remember(self._said, kind, said)
        return self._concluded(self.group.share(said))

    def agree_with_number(self, signature: Signature, number: int) -> tuple[T, dict[int, int]]:
        """Agree, and learn a number about values from each worker, which is in no signature.

        Numbers may change with every call, and conclusions are still drawn once.
        """
        said = packed_words([self._code, *signature.words(), number])
        rows = np.frombuffer(self.group.share(said), dtype=np.int64).reshape(-1, NUM_WORDS).copy()
        numbers = rows[:, 1 + NUM_SIGNED].tolist()
        rows[:, 1 + NUM_SIGNED] = 0  # so that the key of the conclusion does not depend on them
        return self._concluded(rows.tobytes()), dict(zip(self.group.workers, numbers, strict=True))

    def _concluded(self, everyones: bytes) -> T:
        """The conclusion; the call that follows from it is counted on all workers alike."""
        found = self.conclusion_of(everyones)
        self.group.number_call()
        return found

    def _packed(self, signature: Signature) -> bytes:
        return packed_words([self._code, *signature.words()])

    def conclusion_of(self, everyones: bytes) -> T:
        """The conclusion from what all workers said."""
        try:
            return self._known[everyones]
        except KeyError:
            conclusion = self._conclude(everyones)
        remember(self._known, everyones, conclusion)
        return conclusion

    @cached_property
    def _code(self) -> int:
        return code_of(self.identity or self.label)

    def _conclude(self, everyones: bytes) -> T:
        self.group.check_same_call(everyones, self.label)
        rows = np.frombuffer(everyones, dtype=np.int64).reshape(-1, NUM_WORDS).tolist()
        signatures = [Signature.from_words(row[1 : 1 + NUM_SIGNED]) for row in rows]
        given = {
            w: c for w, c in zip(self.group.workers, signatures, strict=True) if w in self.givers
        }
        self._check_modes(signatures)
        for worker, signature in given.items():
            if signature.dtype is None:
                raise ValueError(
                    f"{self.label}: worker {worker} passed no tensor, or one of a dtype, device or "
                    f"layout that cannot be moved; dense tensors of the usual dtypes can"
                )
        ndim = self._same("number of dimensions", {w: len(c.shape) for w, c in given.items()})
        if ndim > MAX_DIM:
            raise ValueError(f"{self.label}: at most {MAX_DIM} dimensions can be moved, got {ndim}")
        meta = TensorMeta(
            self._same("dtype", {w: c.dtype for w, c in given.items()}),
            self._same("device", {w: c.device for w, c in given.items()}),
            any(signature.needs_grad for signature in signatures),
            any(signature.has_tangent for signature in signatures),
        )
        return self.conclude({worker: signature.shape for worker, signature in given.items()}, meta)

    def _same(self, what: str, values: dict[int, Any]) -> Any:
        return same(values, what, self.label)

    def _check_modes(self, signatures: list[Signature]) -> None:
        said = [*zip(self.group.workers, signatures, strict=True)]
        needs = [worker for worker, signature in said if signature.needs_grad]
        forbids = [worker for worker, signature in said if signature.forbids_grad]
        compiling = [worker for worker, signature in said if signature.compiles]
        # A compiled call has fixed shapes: workers compile it together or not at all.
        if compiling and len(compiling) < len(signatures):
            raise ValueError(
                f"{self.label}: workers {compiling} compile this call anew and the others do not, "
                f"since only their tensors changed shape; change all, or do not compile the call"
            )
        if compiling and needs and len(needs) < len(signatures):
            raise ValueError(
                f"{self.label}: only workers {needs} need a gradient, and a compiled call has no "
                f"backward pass on the others; let all inputs need one, also empty ones"
            )
        # A worker under no_grad() would not take part in the backward exchange of the others.
        if needs and forbids:
            raise ValueError(
                f"{self.label}: workers {needs} need a gradient and workers {forbids} run under "
                f"torch.no_grad(), so that there would be no backward pass; do the same on all"
            )


def remember(memory: dict[K, V], key: K, value: V) -> None:
    """Keep something, and forget what was kept first if there is much."""
    # Workers may forget at different times: what is forgotten is worked out again, alone.
    if len(memory) >= MEMORY:
        memory.pop(next(iter(memory)), None)
    memory[key] = value


def agree_on_all(agreements: Sequence[Agreement[T]], signatures: Sequence[Signature]) -> list[T]:
    """The conclusions of several agreements of one group, of which few take one exchange."""
    found: list[T] = []
    for start in range(0, len(agreements), MAX_SIGNATURES):
        some = agreements[start : start + MAX_SIGNATURES]
        said = [
            word
            for signature in signatures[start : start + MAX_SIGNATURES]
            for word in signature.words()
        ]
        everyones = some[0].group.share_words([some[0]._code, *said])
        rows = np.frombuffer(everyones, dtype=np.int64).reshape(-1, NUM_WORDS)
        for number, agreement in enumerate(some):
            # the words as if this agreement had been made alone, which is how it remembers them
            own = np.zeros_like(rows)
            own[:, 0] = rows[:, 0]
            own[:, 1 : 1 + NUM_SIGNED] = rows[
                :, 1 + number * NUM_SIGNED : 1 + (number + 1) * NUM_SIGNED
            ]
            found.append(agreement.conclusion_of(own.tobytes()))
    if agreements:
        agreements[0].group.number_call()
    return found


def has_tangent(x: Tensor) -> bool:
    """Whether a tensor carries a forward-mode derivative."""
    return in_forward_mode() and forward_ad.unpack_dual(x).tangent is not None


def as_agreed(x: Tensor, meta: TensorMeta, gives: bool) -> Tensor:
    """What enters a movement: the tensor itself, or an empty one of the agreed kind."""
    if not gives:
        empty = torch.empty(0, dtype=meta.dtype, device=meta.device)
        dense = isinstance(x, Tensor) and x.layout is torch.strided
        x = x.reshape(-1)[:0].to(empty) if dense else empty
    if meta.has_tangent and in_forward_mode() and not has_tangent(x):
        x = forward_ad.make_dual(x, torch.zeros_like(x))
    return x


def in_forward_mode() -> bool:
    """Whether this worker computes forward-mode derivatives now."""
    return forward_ad._current_level >= 0


def same(values: dict[int, Any], what: str, label: str) -> Any:
    """The one value that all workers of `values` have; ValueError if they differ."""
    first, expected = next(iter(values.items()))
    for worker, value in values.items():
        if value != expected:
            raise ValueError(
                f"{label}: the {what} differs between workers: {expected} on worker {first}, "
                f"{value} on worker {worker}"
            )
    return expected


# --- of the workers of a partition, by the text of a call

# the shapes by worker, and what all tensors have in common
Held = tuple[dict[int, Shape], TensorMeta]
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
        # Where no tensor is brought, this is the only one that sees what everybody calls.
        self.group.check_same_call(everyones, self.label)
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
