"""Agreement: before data moves, workers learn what the others hold, and raise together if it
does not fit.

Every worker describes its tensor in a few words (shape, dtype, device, whether it needs a
gradient), all get all descriptions, and each draws the same conclusion from them. There are four
ways to do so:

- `Agreement` is for a call that is repeated: the caller keeps it, and pays for one exchange and
  one dictionary lookup, as operators and layers do;
- `agree` is for all other calls: with several tensors or none, and with numbers that change;
- `agree_on_call` is for a step within another call, and for groups that are no partition;
- `tell` is for objects, at set-up and for the text of errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from tessel.core.context import in_forward_mode, in_transform
from tessel.core.layout import Shape
from tessel.core.partition import Partition
from tessel.transport import NUM_WORDS, Group, code_of, packed_words

# All messages of agreements have one length, and so have all signatures: with room for this many
# dimensions, four of them fit into a message.
MAX_DIM = 10
MEMORY = 256  # conclusions, and signatures, that an agreement remembers
# words of a signature: dtype, device, flags, number of dimensions, lengths
NUM_SIGNED = 4 + MAX_DIM
# in one message, after the code of the call: whole signatures
MAX_SAID = (NUM_WORDS - 1) // NUM_SIGNED * NUM_SIGNED

_MOST_DIMS = 2**16  # more than a tensor can have

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
    """What one worker brings to a movement; without a dtype if it is nothing that can be moved."""

    shape: Shape
    dtype: torch.dtype | None
    device: str
    needs_grad: bool = False
    forbids_grad: bool = False  # it runs under torch.no_grad()
    has_tangent: bool = False
    compiles: bool = False
    overlaps: bool = False  # its own elements share memory; asked of outputs only

    @classmethod
    def of(cls, x: Any) -> Signature:
        """Return the signature of a tensor; for any other object one without a dtype.

        A signature is returned as it is.
        """
        if isinstance(x, Signature):
            return x
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
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

    @classmethod
    def of_output(cls, out: Any) -> Signature:
        """The signature of an output; it has a tangent if torch differentiates the values."""
        plain = getattr(type(out), "__torch_dispatch__", None) is Tensor.__torch_dispatch__
        # what has no memory of its own cannot be written to
        found = cls.of(out if plain and _can_change(out) else None)
        overlaps = found.dtype is not None and _overlaps(out)
        return replace(found, has_tangent=in_transform(), overlaps=overlaps)

    def words(self) -> list[int]:
        """The signature as a fixed number of integers."""
        movable = self.dtype in _DTYPE_CODES and self.device in _DEVICE_CODES
        dtype, device = (self.dtype, self.device) if movable else (None, "cpu")
        said = (
            self.needs_grad, self.forbids_grad, self.has_tangent, self.compiles, self.overlaps
        )  # fmt: skip
        flags = sum(flag << bit for bit, flag in enumerate(said))
        lengths = self.shape[:MAX_DIM]
        padding = [0] * (MAX_DIM - len(lengths))
        codes = _DTYPE_CODES[dtype], _DEVICE_CODES[device]
        return [*codes, flags, len(self.shape), *lengths, *padding]

    @classmethod
    def from_words(cls, words: list[int]) -> Signature:
        dtype, device, flags, ndim, *lengths = words
        is_right = 0 <= dtype < len(_DTYPES) and 0 <= device < len(_DEVICES)
        if not is_right or not 0 <= ndim <= _MOST_DIMS or min(lengths) < 0:
            raise ValueError(
                f"a worker described its tensor with {words}, which this version of Tessel cannot "
                "read; all workers must run the same version"
            )
        return cls(
            tuple(lengths[: min(ndim, MAX_DIM)]) + (0,) * (ndim - MAX_DIM),
            _DTYPES[dtype],
            _DEVICES[device],
            *(bool(flags >> bit & 1) for bit in range(5)),
        )


@dataclass(frozen=True)
class TensorMeta:
    """The result of an agreement: the kind of tensor, and whether derivatives are needed."""

    dtype: torch.dtype
    device: str
    needs_grad: bool
    has_tangent: bool


T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
Conclusion = Callable[[dict[int, Shape], TensorMeta], T]
SignaturesOfOutputs = dict[int, Signature]  # by worker
# the shapes by worker, and what all tensors have in common
ShapesAndMeta = tuple[dict[int, Shape], TensorMeta]
NumbersByWorker = dict[int, tuple[int, ...]]  # the words of each worker


@dataclass
class Agreement(Generic[T]):
    """The agreement of a call that is repeated, with one tensor from each worker.

    Args:
        group: who must agree.
        label: the movement, in the words of its user.
        givers: the workers whose tensors move; other workers pass a placeholder.
        conclude: a function of the shapes by worker and the meta, which may raise ValueError;
            it must depend on nothing else, so that all workers come to the same conclusion.
        identity: everything that identifies the movement, where the label does not say all.
        check_outputs: raises ValueError if outputs that workers passed cannot be written to; it
            gets the shapes by worker, the meta and the outputs. None if they cannot pass any.
    """

    group: Group
    label: str
    givers: Collection[int]
    conclude: Conclusion[T]
    identity: str = ""
    check_outputs: Callable[[dict[int, Shape], TensorMeta, SignaturesOfOutputs], None] | None = None
    compiled: dict[Any, T] = field(default_factory=dict)  # of calls in compiled code
    _known: dict[bytes, T] = field(default_factory=dict)
    _said: dict[Any, bytes] = field(default_factory=dict)  # the words of this worker, by its tensor

    def agree_on(self, x: Tensor | Signature, out: Any = None) -> T:
        """Agree by one small exchange; the conclusion is computed once for the same signatures.

        Args:
            x: this worker's tensor.
            out: a tensor for the result, on all workers or on none.
        """
        if isinstance(x, Tensor) and not x.is_nested:  # of which torch knows no shape
            enabled = torch.is_grad_enabled()
            kind: Any = x.shape, x.dtype, x.device, x.layout, x.requires_grad, enabled
        else:
            kind = x = Signature.of(x)
        has_strides = isinstance(out, Tensor) and not out.is_nested
        if has_strides:
            lies = out.shape, out.stride() if out.layout is torch.strided else out.layout
            flags = out.requires_grad, _can_change(out)
            kind = kind, type(out), *lies, out.dtype, out.device, *flags
        keeps = not in_transform() and (out is None or has_strides)
        said = self._said.get(kind) if keeps else None  # tangents are not in the key
        if said is None:
            signature = Signature.of(x)
            words = [code_of(self.identity or self.label), *signature.words()]
            if out is not None:
                words += [1, *Signature.of_output(out).words()]
            said = packed_words(words)
            if keeps and not signature.has_tangent:
                remember(self._said, kind, said)
        everyones = self.group.share(said)
        try:
            conclusion = self._known[everyones]
        except KeyError:
            rows = _rows(everyones)
            self.group.check_same_call(rows[:, 0], self.label)
            told = rows[:, 1 : 1 + NUM_SIGNED].tobytes()
            held = _held(self.label, self.group.workers, tuple(self.givers), told)
            conclusion = self.conclude(*held)
            outputs = _outputs(self.label, self.group.workers, rows[:, 1 + NUM_SIGNED :])
            if outputs:
                assert self.check_outputs is not None
                self.check_outputs(*held, outputs)
            remember(self._known, everyones, conclusion)
        self.group.number_call()  # what follows counts as one call, on all workers alike
        return conclusion


class Heard(NamedTuple):
    """The descriptions that all workers passed to an agreement.

    Attributes:
        tensors: for each tensor, the shapes by worker and what all of them have in common.
        numbers: those of each worker.
    """

    tensors: list[ShapesAndMeta]
    numbers: NumbersByWorker


def agree(
    partition: Partition,
    call: str,
    *tensors: Any,
    names: Sequence[str] = (),
    numbers: Sequence[int] = (),
    identity: str = "",
    givers: Collection[int] | None = None,
) -> Heard:
    """Let the workers of a partition make the same call, or raise ValueError on all of them.

    It takes one small exchange, or several if the tensors do not fit into one. Workers raise if
    their calls differ, or the dtype, the device or the number of dimensions of a tensor. Anything
    else that must be equal, or that is wrong on one worker only, belongs into the text of the
    call: if the texts differ, all workers raise, and the error quotes both. A worker outside of
    the partition does nothing and gets nothing.

    Args:
        partition: the workers.
        call: the call, in the words of its user.
        tensors: the tensors of this worker, as many on each worker; a signature stands for a
            tensor.
        names: names of the tensors, for errors.
        numbers: other integers of this worker, of 64 bits each: a seed, or a checksum of values.
        identity: whatever must be equal on all workers and is not in the text of the call.
        givers: the workers whose tensors count; None for all of them.
    """
    group, ranks = partition.prepare(), partition.ranks
    if not partition.active:
        return Heard([], {})
    if group.size == 1 and not tensors:
        return Heard([], {ranks[0]: tuple(numbers)})
    labels = [f"{name} of {call}" for name in names] or [call] * len(tensors)
    words = [word for x in tensors for word in Signature.of(x).words()]
    code, words = code_of(identity or call), [*words, *numbers]
    label = labels[0] if labels else call
    told = [
        agree_on_call(group, label, code, words[start : start + MAX_SAID])[:, :MAX_SAID]
        for start in range(0, max(len(words), 1), MAX_SAID)
    ]
    rows, signed = np.concatenate(told, 1), NUM_SIGNED * len(tensors)
    counted = tuple(ranks if givers is None else givers)
    found = [
        _held(label, group.workers, counted, rows[:, start : start + NUM_SIGNED].tobytes())
        for label, start in zip(labels, range(0, signed, NUM_SIGNED), strict=True)
    ]
    group.number_call()
    said = map(tuple, rows[:, signed : len(words)].tolist())
    return Heard(found, dict(zip(group.workers, said, strict=True)))


def agree_on_call(
    group: Group,
    call: str | Callable[[], str],
    code: int | None = None,
    words: Sequence[int] = (),
    alike: int = 0,
) -> Any:
    """Raise ValueError on all workers of a group if they make different calls; one small exchange.

    It does not count as a call.

    Args:
        group: the workers that must make the same call; this worker is one of them.
        call: the text of the call; a function that makes it for an error, if this takes long.
        code: a number of everything that must be equal; by default that of the text.
        words: other words of this worker.
        alike: how many of the first words must be equal on all workers that pass one other than 0.

    Returns:
        The words of all workers, a row for each, with zeros behind them.
    """
    if code is None:
        assert isinstance(call, str)
        code = code_of(call)
    rows = _rows(group.share_words([code, *words]))
    group.check_same_call(rows[:, 0], call)
    for said in rows.T[1 : 1 + alike]:
        group.check_same_call(np.where(said == 0, said.max(), said), call)
    return rows[:, 1:]


def tell(partition: Partition, value: Any) -> dict[int, Any]:
    """Exchange Python values: the value of each worker, by worker. `encoding` must support them."""
    group = partition.prepare()
    return dict(zip(group.workers, group.share_objects(value), strict=True))


def remember(memory: dict[K, V], key: K, value: V) -> None:
    """Store a value, and drop the oldest one if there are many."""
    # Workers may drop values at different times: each computes a dropped value again by itself.
    if len(memory) >= MEMORY:
        memory.pop(next(iter(memory)), None)
    memory[key] = value


def _rows(everyones: bytes) -> Any:
    """The words of all workers, a row for each."""
    return np.frombuffer(everyones, dtype=np.int64).reshape(-1, NUM_WORDS)


def _outputs(label: str, workers: tuple[int, ...], rows: Any) -> SignaturesOfOutputs:
    """The outputs that workers passed, none or all of them."""
    passed = [worker for worker, is_there in zip(workers, rows[:, 0], strict=True) if is_there]
    if passed and len(passed) < len(workers):
        others = [worker for worker in workers if worker not in passed]
        raise ValueError(
            f"{label}: workers {passed} passed `out` and workers {others} did not; pass it on all "
            "workers, as torch.empty(0) where nothing is received"
        )
    signed = rows[:, 1 : 1 + NUM_SIGNED].tolist()
    return dict(zip(passed, map(Signature.from_words, signed), strict=False))


def check_outputs(
    label: str, expected: Mapping[int, Shape | None], meta: TensorMeta, outputs: SignaturesOfOutputs
) -> None:
    """Raise ValueError in the name of `label` if some output cannot be written to.

    Args:
        label: of the call, in the words of its user.
        expected: the shape of the output, by worker; None where nothing comes.
        meta: of what is written.
        outputs: by worker.
    """
    if meta.needs_grad or any(out.has_tangent for out in outputs.values()):
        raise ValueError(
            f"{label}: a call with `out` does not support automatic differentiation; omit `out`, "
            "or call it under torch.no_grad()"
        )
    for worker, out in outputs.items():
        shape, got = expected[worker], f"worker {worker} passed an `out`"
        if shape is None:  # what is there stays
            if prod(out.shape):
                raise ValueError(
                    f"{label}: {got} of shape {out.shape}, but receives nothing: pass "
                    "torch.empty(0)"
                )
        elif out.dtype is None:
            raise ValueError(
                f"{label}: {got} that is not a tensor, or cannot be written to, such as a tensor "
                "created under torch.inference_mode() outside of it"
            )
        elif (out.shape, out.dtype, out.device) != (shape, meta.dtype, meta.device):
            raise ValueError(
                f"{label}: {got} of shape {out.shape}, {out.dtype} on {out.device}; "
                f"expected {shape}, {meta.dtype} on {meta.device}"
            )
        elif out.needs_grad:
            raise ValueError(f"{label}: {got} that requires a gradient: pass out.detach()")
        elif out.overlaps:
            raise ValueError(
                f"{label}: {got} some of whose elements share memory: pass a tensor that owns "
                "its memory"
            )


def _can_change(x: Tensor) -> bool:
    """Whether torch lets a tensor be changed: one of inference mode only there."""
    return not x.is_inference() or torch.is_inference_mode_enabled()


def _overlaps(x: Tensor) -> bool:
    """Whether elements of a tensor share memory, or may: no order nests its dimensions."""
    end = 0  # how far the dimensions reach that lie inside
    for step, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length > 1:
            if step <= end:
                return x.numel() > 0
            end += step * (length - 1)
    return False


@lru_cache(maxsize=1024)
def _held(
    label: str, workers: tuple[int, ...], givers: tuple[int, ...], told: bytes
) -> ShapesAndMeta:
    """The shapes by signatures and the meta, or ValueError in the name of `label`."""
    rows = np.frombuffer(told, dtype=np.int64).reshape(-1, NUM_SIGNED).tolist()
    said = dict(zip(workers, map(Signature.from_words, rows), strict=True))
    _check_modes(label, said)
    given = {worker: each for worker, each in said.items() if worker in givers}
    for worker, signature in given.items():
        if signature.dtype is None:
            raise ValueError(
                f"{label}: worker {worker} passed no tensor, or one whose dtype, device or layout "
                "is not supported; only dense tensors of the usual dtypes can be moved"
            )
    shapes = {worker: each.shape for worker, each in given.items()}
    ndim = same({w: len(shape) for w, shape in shapes.items()}, "number of dimensions", label)
    if ndim > MAX_DIM:
        raise ValueError(
            f"{label}: tensors of at most {MAX_DIM} dimensions can be moved, got {ndim}"
        )
    return shapes, TensorMeta(
        same({w: each.dtype for w, each in given.items()}, "dtype", label),
        same({w: each.device for w, each in given.items()}, "device", label),
        any(each.needs_grad for each in said.values()),
        any(each.has_tangent for each in said.values()),
    )


def _check_modes(label: str, said: dict[int, Signature]) -> None:
    needs = [worker for worker, signature in said.items() if signature.needs_grad]
    forbids = [worker for worker, signature in said.items() if signature.forbids_grad]
    compiling = [worker for worker, signature in said.items() if signature.compiles]
    # A compiled call has fixed shapes: workers compile it together or not at all.
    if compiling and len(compiling) < len(said):
        raise ValueError(
            f"{label}: workers {compiling} recompile this call and the others do not, since only "
            "their tensors changed shape; change the shapes on all workers, or do not compile the "
            "call"
        )
    if compiling and needs and len(needs) < len(said):
        raise ValueError(
            f"{label}: only the inputs of workers {needs} need a gradient, and a compiled call has "
            "no backward pass on the others; make the inputs of all workers require one, "
            "including empty inputs"
        )
    # A worker under no_grad() would not take part in the backward exchange of the others.
    if needs and forbids:
        raise ValueError(
            f"{label}: workers {needs} need a gradient, but workers {forbids} run under "
            "torch.no_grad(), so there would be no backward pass; do the same on all workers"
        )


def has_tangent(x: Tensor) -> bool:
    """Whether a tensor carries a forward-mode derivative."""
    return in_forward_mode() and forward_ad.unpack_dual(x).tangent is not None


def as_agreed(x: Tensor, meta: TensorMeta, gives: bool) -> Tensor:
    """The tensor that enters a movement: the tensor itself, or an empty one of the agreed kind."""
    if not gives:
        empty = torch.empty(0, dtype=meta.dtype, device=meta.device)
        dense = isinstance(x, Tensor) and x.layout is torch.strided
        x = x.reshape(-1)[:0].to(empty) if dense else empty
    if meta.has_tangent and in_forward_mode() and not has_tangent(x):
        x = forward_ad.make_dual(x, torch.zeros_like(x))
    return x


def grad_alike(x: Tensor, meta: TensorMeta) -> Tensor:
    """A tensor that requires a gradient if it does on any worker, so that all graphs are alike."""
    if not meta.needs_grad or x.requires_grad:
        return x
    found = x.detach().requires_grad_()
    if has_tangent(x):  # `detach` drops the tangent
        found = forward_ad.make_dual(found, forward_ad.unpack_dual(x).tangent)
    return found


def entered(x: Tensor, meta: TensorMeta, gives: bool = True) -> Tensor:
    """The tensor that enters a call: with a gradient, or a tangent, if any worker's has one."""
    return grad_alike(as_agreed(x, meta, gives), meta)


def same(values: dict[int, Any], what: str, label: str) -> Any:
    """The value that all workers have; ValueError if the values differ."""
    first, expected = next(iter(values.items()))
    for worker, value in values.items():
        if value != expected:
            raise ValueError(
                f"{label}: the {what} differs between workers: {expected} on worker {first}, "
                f"{value} on worker {worker}"
            )
    return expected
