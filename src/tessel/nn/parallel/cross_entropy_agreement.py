"""What workers agree on before a class-parallel loss: that their logits and targets fit."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel import boxes
from tessel.agreement import CLAIM, Claim, Meeting, Terms, reach_together, same
from tessel.boxes import Interval
from tessel.distributed.marks import Mark
from tessel.layout import Shape
from tessel.partition import Partition
from tessel.transport import NUM_WORDS, kept_in_job

CLASSES = (torch.int64, torch.uint8)  # dtypes in which torch takes the numbers of classes
WAY_OUT = "tessel.distributed.gather(x) makes a tensor whole again"


@dataclass(frozen=True)
class Kind:
    """What is known of a tensor beside its values."""

    shape: Shape
    dtype: torch.dtype | None  # None for what is no tensor
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, value: Any) -> Kind:
        if not _is_dense(value):
            return cls((), None, type(value).__name__, False)
        needs_grad = value.requires_grad and torch.is_grad_enabled()
        return cls(tuple(value.shape), value.dtype, str(value.device), needs_grad)

    def zeros(self, shape: Shape) -> Any:
        """A tensor of this kind; text where the kind is none of a tensor, which torch refuses."""
        if self.dtype is None:
            return self.device
        zeros = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return zeros.requires_grad_() if self.requires_grad else zeros


@dataclass(frozen=True)
class Place:
    """Where the mark of a tensor says that it is split: its dimension, its length, the workers."""

    dim: int
    size: int | None
    workers: tuple[int, ...]

    @classmethod
    def of(cls, mark: Mark) -> Place:
        return cls(mark.dim, mark.size, mark.partition.ranks)


@dataclass(frozen=True)
class Call:
    """All that the workers must have in common when they call the loss.

    Attributes:
        partition: the workers, in a row.
        wanted: the workers that the caller names, None for those of the mark.
        input: where the mark says that the logits are split.
        target: the same of the target, None for a whole one.
        weight: the kind of the weight, None for no weight.
        weight_place: where the mark of the weight says that it is split.
        reduction: "mean", "sum" or "none".
        ignore_index: a class that does not count.
        label_smoothing: the share of the uniform distribution in the target.
        autocast: whether torch chooses the dtype of the loss.
    """

    partition: Partition
    wanted: tuple[int, ...] | None
    input: Place
    target: Place | None
    weight: Kind | None
    weight_place: Place | None
    reduction: str
    ignore_index: int
    label_smoothing: float
    autocast: bool

    @property
    def label(self) -> str:
        weight = "" if self.weight is None else f"weight of shape {self.weight.shape}, "
        return (
            f"parallel_cross_entropy({weight}ignore_index={self.ignore_index!r}, "
            f"reduction={self.reduction!r}, label_smoothing={self.label_smoothing!r}) "
            f"over {self.partition}"
        )

    def measure(self, x: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Torch's own loss with these options."""
        return F.cross_entropy(
            x,
            target,
            weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


@dataclass(frozen=True)
class Agreed:
    """What all workers know once they agreed.

    Attributes:
        shape: of the whole logits.
        dim: that of the classes.
        classes: the interval of classes of each worker, in the order of the partition.
        has_probabilities: whether the target gives probabilities rather than classes.
        input_terms: the kind of the logits.
        target_terms: the kind of the target.
        dtype: of the loss.
        sample_shape: of the loss of each sample.
    """

    shape: Shape
    dim: int
    classes: tuple[Interval, ...]
    has_probabilities: bool
    input_terms: Terms
    target_terms: Terms
    dtype: torch.dtype
    sample_shape: Shape

    @property
    def num_classes(self) -> int:
        return self.shape[self.dim]


@dataclass(frozen=True)
class Contents(Claim):
    """What is in target and weight: the least and the greatest class, and checksums."""

    values: tuple[int, int, int, int] = (0, -1, 0, 0)

    @classmethod
    def of_values(cls, target: Any, weight: Any, ignore_index: int) -> Contents:
        values = *_range(target, ignore_index), _checksum(weight)
        return cls((), None, "cpu", values=values)

    def words(self) -> list[int]:
        return [*self.values, *[0] * (CLAIM - len(self.values))]


class ContentsMeeting(Meeting[Any]):
    """Where workers tell what is in their tensors, which is another thing in each call."""

    def settle(self, everyones: bytes) -> Any:
        rows = np.frombuffer(everyones, dtype=np.int64).reshape(-1, NUM_WORDS)
        return dict(zip(self.group.workers, rows[:, 1:5].tolist(), strict=True))


Parts = tuple[tuple[tuple[int, Shape], ...], Terms]  # shapes by worker, and the kind


def agree(call: Call, x: Tensor, target: Any, weight: Any) -> Agreed:
    """Let all workers of the call raise, or know that their tensors fit; one small exchange."""
    contents = Contents.of_values(target, weight, call.ignore_index)
    claims = (Claim.of(x), Claim.of(target), contents)
    inputs, targets, values = reach_together(_meetings(call), claims)
    call.partition.group.number_call()
    agreed = _settled(call, inputs, targets)
    _check_values(call, agreed, values)
    return agreed


@kept_in_job
def _meetings(call: Call) -> tuple[Meeting[Any], ...]:
    group, ranks, identity = call.partition.group, call.partition.ranks, repr(call)
    return (
        Meeting(group, f"the input of {call.label}", ranks, _parts, identity),
        Meeting(group, f"the target of {call.label}", ranks, _parts, identity),
        ContentsMeeting(group, call.label, ranks, _parts, identity),
    )


def _parts(shapes: dict[int, Shape], terms: Terms) -> Parts:
    return tuple(shapes.items()), terms


@kept_in_job
def _settled(call: Call, inputs: Parts, targets: Parts) -> Agreed:
    """What follows from the shapes and kinds of all workers, the same on each of them."""
    (input_shapes, input_terms), (target_shapes, target_terms) = inputs, targets
    by_worker, of_target = dict(input_shapes), dict(target_shapes)
    _check_places(call, len(input_shapes[0][1]))
    dim = call.input.dim
    shape, classes = _whole(call, "input", call.input, by_worker)
    if call.target is None:
        if by_worker == of_target and target_shapes[0][1] != shape:
            raise ValueError(
                f"{call.label}: the target has the shape of a shard of the input and no mark; if "
                f"it is a shard of probabilities, write tessel.register_parallel_dim(target, {dim})"
            )
        target_shape = same(of_target, "shape of the target", call.label)
    else:
        target_shape, _ = _whole(call, "target", call.target, of_target)
    has_probabilities = target_shape == shape
    _check_target(call, shape, dim, target_shape)
    sample = _sample(call, shape, dim, has_probabilities, target_shape, inputs, targets)
    return Agreed(
        shape,
        dim,
        classes,
        has_probabilities,
        input_terms,
        target_terms,
        sample.dtype,
        tuple(sample.shape) if len(shape) == 1 else shape[:dim] + shape[dim + 1 :],
    )


def _check_places(call: Call, ndim: int) -> None:
    """Raise ValueError if marks do not fit the classes of the input."""
    dim = min(1, ndim - 1)
    if call.wanted not in (None, call.input.workers):
        raise ValueError(
            f"{call.label}: partition= names workers {call.wanted}, and the input is a shard over "
            f"workers {call.input.workers}; leave out partition="
        )
    if call.input.dim != dim:
        raise ValueError(
            f"{call.label}: the classes of an input of {ndim} dimensions stand along dim {dim}, "
            f"and it is a shard along dim {call.input.dim}; transpose it, or {WAY_OUT}"
        )
    if call.weight_place is not None:
        raise ValueError(
            f"{call.label}: the whole weight is needed on every worker, got a shard; {WAY_OUT}"
        )
    place = call.target
    if place is not None and (place.dim, place.workers) != (dim, call.input.workers):
        raise ValueError(
            f"{call.label}: a target that is a shard must be split as the input is, along dim "
            f"{dim} over workers {call.input.workers}, got dim {place.dim} over workers "
            f"{place.workers}; {WAY_OUT}"
        )


def _whole(
    call: Call, name: str, place: Place, shapes: Mapping[int, Shape]
) -> tuple[Shape, tuple[Interval, ...]]:
    """The shape of the whole of which workers have balanced parts, and these."""
    dim, ranks = place.dim, call.partition.ranks
    first = shapes[ranks[0]]
    if len(first) <= dim:
        raise ValueError(f"{call.label}: the {name} has no dim {dim}, its shape is {first}")
    rest = {worker: shape[:dim] + shape[dim + 1 :] for worker, shape in shapes.items()}
    same(rest, f"shape of the {name} (but for dim {dim})", call.label)
    lengths = [shapes[worker][dim] for worker in ranks]
    size = sum(lengths) if place.size is None else place.size
    parts = boxes.balanced(size, len(ranks))
    if lengths != [stop - start for start, stop in parts]:
        raise ValueError(
            f"{call.label}: the shards of the {name} must be balanced parts of its {size} classes, "
            f"{[stop - start for start, stop in parts]} on workers {list(ranks)}, got {lengths}"
        )
    return (*first[:dim], size, *first[dim + 1 :]), parts


def _check_target(call: Call, shape: Shape, dim: int, target: Shape) -> None:
    """Raise, of the kind that torch raises, for a target of another shape than the input asks."""
    samples = shape[:dim] + shape[dim + 1 :]
    if call.target is not None and target != shape:
        raise ValueError(
            f"{call.label}: a target that is a shard must be one of probabilities, of the shape "
            f"{shape} of the input, got a shard of {target}; classes must be whole on every worker"
        )
    if target in (shape, samples) or (len(shape) == 1 and target == (1,)):
        return
    is_batch = len(shape) == 1 or target[:1] != shape[:1]
    raise (ValueError if is_batch else RuntimeError)(
        f"{call.label}: a target of shape {samples}, or of shape {shape} for probabilities, was "
        f"expected for an input of shape {shape}, got {target}"
    )


def _sample(
    call: Call,
    shape: Shape,
    dim: int,
    has_probabilities: bool,
    target_shape: Shape,
    inputs: Parts,
    targets: Parts,
) -> Tensor:
    """Torch's loss of one sample of this kind: it raises for what torch does not take."""
    one = tuple(length if d == dim else 1 for d, length in enumerate(shape))
    goal = one if has_probabilities else (1,) * len(target_shape)
    x, target = (_zeros(terms, size) for (_, terms), size in ((inputs, one), (targets, goal)))
    if not one[dim] and target.dtype == torch.int64:  # no class at all
        target.fill_(call.ignore_index)
    weight = None if call.weight is None else call.weight.zeros(call.weight.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call.measure(x, target, weight).detach()


def _zeros(terms: Terms, shape: Shape) -> Tensor:
    return torch.zeros(shape, dtype=terms.dtype, device=terms.device)


def _check_values(call: Call, agreed: Agreed, values: Mapping[int, list[int]]) -> None:
    """Raise IndexError for a target that is no class, ValueError for copies that differ."""
    first = call.partition.ranks[0]
    for worker, (low, high, _, _) in values.items():
        if low <= high and not 0 <= low <= high < agreed.num_classes:
            raise IndexError(
                f"{call.label}: target {low if low < 0 else high} is out of bounds on worker "
                f"{worker}: the classes are 0 to {agreed.num_classes - 1}"
            )
    for worker, words in values.items():
        for name, its, others in zip(
            ("target", "weight"), words[2:], values[first][2:], strict=True
        ):
            if its != others:
                raise ValueError(
                    f"{call.label}: all workers must have the same {name}, and that of worker "
                    f"{worker} has other values than that of worker {first}"
                )


def _range(target: Any, ignore_index: int) -> tuple[int, int, int]:
    """The least and the greatest class that counts, and a checksum; (0, -1, 0) for no classes."""
    if not _is_dense(target) or target.dtype not in CLASSES:
        return 0, -1, 0
    with torch._C._DisableFuncTorch():  # what is only looked at belongs to no transform
        values = target.detach().to("cpu", torch.int64).contiguous().numpy()
    checksum = zlib.crc32(values.data) if values.size else 0
    counted = values[values != ignore_index]
    return (int(counted.min()), int(counted.max()), checksum) if counted.size else (0, -1, checksum)


def _checksum(weight: Any) -> int:
    """A number that tells weights apart."""
    if not _is_dense(weight) or not weight.is_floating_point() or not weight.numel():
        return 0
    with torch._C._DisableFuncTorch():
        flat = weight.detach().resolve_neg().reshape(-1).contiguous()
        return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)


def _is_dense(value: Any) -> bool:
    """Whether values can be looked at; what the workers agree on says what else is wrong."""
    return (
        isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta"
    )
