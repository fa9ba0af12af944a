"""What workers agree on before a class-parallel loss: that their logits and targets fit."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core import boxes
from tessel.core.agreement import TensorMeta, same
from tessel.core.boxes import Interval
from tessel.core.layout import Shape
from tessel.core.partition import Partition
from tessel.distributed.agreeing import Numbers, agree_and_tell
from tessel.distributed.marks import Mark
from tessel.transport import kept_in_job

CLASSES = (torch.int64, torch.uint8)  # dtypes in which torch takes the numbers of classes
WAY_OUT = "tessel.distributed.gather(x) makes a tensor whole again"


@dataclass(frozen=True)
class WeightKind:
    """What is known of the weight of classes beside its values."""

    shape: Shape
    dtype: torch.dtype | None  # None for what is no tensor
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, value: Any) -> WeightKind:
        if not _is_dense(value):
            return cls((), None, type(value).__name__, False)
        needs_grad = value.requires_grad and torch.is_grad_enabled()
        return cls(tuple(value.shape), value.dtype, str(value.device), needs_grad)

    def zeros(self) -> Any:
        """A tensor of this kind; text where the kind is none of a tensor, which torch refuses."""
        if self.dtype is None:
            return self.device
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return zeros.requires_grad_() if self.requires_grad else zeros


@dataclass(frozen=True)
class ClassLoss:
    """A cross entropy of classes in shards: all that its workers must have in common.

    Attributes:
        partition: the workers, in a row.
        wanted: the workers that the caller names, None for those of the mark.
        input: the mark of the logits.
        target: that of the target, None for a whole one.
        weight: the kind of the weight, None for no weight.
        weight_mark: that of the weight, which must have none.
        reduction: "mean", "sum" or "none".
        ignore_index: a class that does not count.
        label_smoothing: the share of the uniform distribution in the target.
        autocast: whether torch chooses the dtype of the loss.
    """

    partition: Partition
    wanted: tuple[int, ...] | None
    input: Mark
    target: Mark | None
    weight: WeightKind | None
    weight_mark: Mark | None
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
class Logits:
    """What all workers know of the logits, and of the loss of them, once they agreed.

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
    input_terms: TensorMeta
    target_terms: TensorMeta
    dtype: torch.dtype
    sample_shape: Shape

    @property
    def num_classes(self) -> int:
        return self.shape[self.dim]


Parts = tuple[tuple[tuple[int, Shape], ...], TensorMeta]  # shapes by worker, and the kind


def agree(loss: ClassLoss, x: Tensor, target: Any, weight: Any) -> Logits:
    """Let all workers of the call raise, or know that their tensors fit; one small exchange.

    Beside shapes they tell which classes are in the target, and checksums of target and weight:
    copies that differ would give each worker a loss of its own.
    """
    numbers = *_range(target, loss.ignore_index), _checksum(weight)
    tensors = ("the input", x), ("the target", target)
    held, values = agree_and_tell(loss.partition, loss.label, tensors, numbers, repr(loss))
    inputs, targets = ((tuple(shapes.items()), meta) for shapes, meta in held)
    logits = _concluded(loss, inputs, targets)
    _check_values(loss, logits.num_classes, values)
    return logits


@kept_in_job
def _concluded(loss: ClassLoss, inputs: Parts, targets: Parts) -> Logits:
    """What follows from the shapes and kinds of all workers, the same on each of them."""
    (input_shapes, input_terms), (target_shapes, target_terms) = inputs, targets
    of_input, of_target = dict(input_shapes), dict(target_shapes)
    _check_marks(loss, len(input_shapes[0][1]))
    dim = loss.input.dim
    shape, classes = _whole(loss, "input", loss.input, of_input)
    if loss.target is None:
        if of_input == of_target and target_shapes[0][1] != shape:
            raise ValueError(
                f"{loss.label}: the target has the shape of a shard of the input and no mark; if "
                f"it is a shard of probabilities, write tessel.register_parallel_dim(target, {dim})"
            )
        target_shape = same(of_target, "shape of the target", loss.label)
    else:
        target_shape, _ = _whole(loss, "target", loss.target, of_target)
    _check_target(loss, shape, dim, target_shape)
    # Torch's loss of one sample of this kind raises for what torch does not take, on all workers
    one = tuple(length if d == dim else 1 for d, length in enumerate(shape))
    has_probabilities = target_shape == shape
    x = torch.zeros(one, dtype=input_terms.dtype, device=input_terms.device)
    goal = one if has_probabilities else (1,) * len(target_shape)
    target = torch.zeros(goal, dtype=target_terms.dtype, device=target_terms.device)
    if not one[dim] and target.dtype == torch.int64:  # no class at all
        target.fill_(loss.ignore_index)
    weight = None if loss.weight is None else loss.weight.zeros()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample = loss.measure(x, target, weight).detach()
    return Logits(
        shape,
        dim,
        classes,
        has_probabilities,
        input_terms,
        target_terms,
        sample.dtype,
        tuple(sample.shape) if len(shape) == 1 else shape[:dim] + shape[dim + 1 :],
    )


def _check_marks(loss: ClassLoss, ndim: int) -> None:
    """Raise ValueError if marks do not fit the classes of the input."""
    dim = min(1, ndim - 1)
    workers = loss.input.partition.ranks
    if loss.wanted not in (None, workers):
        raise ValueError(
            f"{loss.label}: partition= names workers {loss.wanted}, and the input is a shard over "
            f"workers {workers}; leave out partition="
        )
    if loss.input.dim != dim:
        raise ValueError(
            f"{loss.label}: the classes of an input of {ndim} dimensions stand along dim {dim}, "
            f"and it is a shard along dim {loss.input.dim}; transpose it, or {WAY_OUT}"
        )
    if loss.weight_mark is not None:
        raise ValueError(
            f"{loss.label}: the whole weight is needed on every worker, got a shard; {WAY_OUT}"
        )
    mark = loss.target
    if mark is not None and (mark.dim, mark.partition.ranks) != (dim, workers):
        raise ValueError(
            f"{loss.label}: a target that is a shard must be split as the input is, along dim "
            f"{dim} over workers {workers}, got dim {mark.dim} over workers "
            f"{mark.partition.ranks}; {WAY_OUT}"
        )


def _whole(
    loss: ClassLoss, name: str, mark: Mark, shapes: Mapping[int, Shape]
) -> tuple[Shape, tuple[Interval, ...]]:
    """The shape of the whole of which workers have balanced parts, and these."""
    dim, ranks = mark.dim, loss.partition.ranks
    first = shapes[ranks[0]]
    if len(first) <= dim:
        raise ValueError(f"{loss.label}: the {name} has no dim {dim}, its shape is {first}")
    rest = {worker: shape[:dim] + shape[dim + 1 :] for worker, shape in shapes.items()}
    same(rest, f"shape of the {name} (but for dim {dim})", loss.label)
    lengths = [shapes[worker][dim] for worker in ranks]
    size = sum(lengths) if mark.size is None else mark.size
    parts = boxes.balanced(size, len(ranks))
    if lengths != [stop - start for start, stop in parts]:
        raise ValueError(
            f"{loss.label}: the shards of the {name} must be balanced parts of its {size} classes, "
            f"{[stop - start for start, stop in parts]} on workers {list(ranks)}, got {lengths}"
        )
    return (*first[:dim], size, *first[dim + 1 :]), parts


def _check_target(loss: ClassLoss, shape: Shape, dim: int, target: Shape) -> None:
    """Raise, of the kind that torch raises, for a target of another shape than the input asks."""
    samples = shape[:dim] + shape[dim + 1 :]
    if loss.target is not None and target != shape:
        raise ValueError(
            f"{loss.label}: a target that is a shard must be one of probabilities, of the shape "
            f"{shape} of the input, got a shard of {target}; classes must be whole on every worker"
        )
    if target in (shape, samples) or (len(shape) == 1 and target == (1,)):
        return
    is_batch = len(shape) == 1 or target[:1] != shape[:1]
    raise (ValueError if is_batch else RuntimeError)(
        f"{loss.label}: a target of shape {samples}, or of shape {shape} for probabilities, was "
        f"expected for an input of shape {shape}, got {target}"
    )


def _check_values(loss: ClassLoss, num_classes: int, values: Numbers) -> None:
    """Raise IndexError for a target that is no class, ValueError for copies that differ."""
    first = loss.partition.ranks[0]
    for worker, (low, high, _, _) in values.items():
        if low <= high and not 0 <= low <= high < num_classes:
            raise IndexError(
                f"{loss.label}: target {low if low < 0 else high} is out of bounds on worker "
                f"{worker}: the classes are 0 to {num_classes - 1}"
            )
    for worker, words in values.items():
        for name, its, others in zip(
            ("target", "weight"), words[2:], values[first][2:], strict=True
        ):
            if its != others:
                raise ValueError(
                    f"{loss.label}: all workers must have the same {name}, and that of worker "
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
