"""What workers agree on before a class-parallel loss: that their logits and targets fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.agreement import TensorMeta, agree, same
from tessel.core.checksum import checksum, is_dense, range_of
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.distributed.group import row_of
from tessel.distributed.shard_layouts import layout_of_shards
from tessel.distributed.shards import Sharding, sharding_of
from tessel.nn.loss_agreement import CLASSES, class_dim, samples_of
from tessel.nn.parallel.agreed import Frozen, check_copies, check_sharding, frozen
from tessel.tensor.rules.losses import Kind, loss_dtype
from tessel.tensor.rules.split_classes import CrossEntropy
from tessel.transport import kept_in_job, this_worker

# the layout of the whole logits, and the kinds of the logits and of the target
Agreed = tuple[Layout, TensorMeta, TensorMeta]


@dataclass(frozen=True)
class ShardedLoss:
    """A cross entropy of classes in shards: all that its workers must have in common.

    Attributes:
        partition: the workers, in a row.
        wanted: the workers that the caller names, None for those of the sharding.
        input: the sharding of the logits.
        target: that of the target, None for a whole one.
        weight: the kind of the weight, None for no weight; the name of its type if it has no kind.
        weight_sharding: that of the weight, which must have none.
        measure: what else torch's loss takes.
        autocast: whether torch chooses the dtype of the loss.
    """

    partition: Partition
    wanted: tuple[int, ...] | None
    input: Sharding
    target: Sharding | None
    weight: Kind | str | None
    weight_sharding: Sharding | None
    measure: CrossEntropy
    autocast: bool

    @classmethod
    def of(
        cls,
        sharding: Sharding,
        target: Any,
        weight: Any,
        partition: Partition | None,
        measure: CrossEntropy,
        autocast: bool,
    ) -> ShardedLoss:
        """The loss of logits with this sharding, in which this worker must take part."""
        if not sharding.partition.active:
            raise ValueError(
                f"parallel_cross_entropy: the input is a shard over {sharding.partition}, to which "
                f"worker {this_worker()} does not belong"
            )
        weight_sharding = sharding_of(weight)
        kind: Kind | str | None = None
        if weight is not None and weight_sharding is None:
            kind = type(weight).__name__
            if is_dense(weight):
                needs_grad = weight.requires_grad and torch.is_grad_enabled()
                kind = Kind(tuple(weight.shape), weight.dtype, str(weight.device), needs_grad)
        return cls(
            row_of(sharding.partition),
            None if partition is None else row_of(partition).ranks,
            sharding,
            sharding_of(target),
            kind,
            weight_sharding,
            measure,
            autocast,
        )

    @cached_property
    def label(self) -> str:
        weight = f"weight of shape {self.weight.shape}, " if isinstance(self.weight, Kind) else ""
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self.measure).items())
        return f"parallel_cross_entropy({weight}{settings}) over {self.partition}"

    @kept_in_job  # not of this object alone: each call makes one that is equal
    def words(self) -> tuple[str, str]:
        """What the loss is called, and all that is known of it."""
        return self.label, repr(self)

    @kept_in_job  # once for the same shapes: a training step asks for the same each time
    def conclude(self, inputs: Frozen, targets: Frozen) -> Agreed:
        """What follows from the shapes and kinds of all workers, the same on each of them.

        Raises for shardings that do not fit the classes, and for targets that do not fit the input.
        """
        (input_shapes, input_meta), (target_shapes, target_meta) = inputs, targets
        of_input, of_target = dict(input_shapes), dict(target_shapes)
        workers = self.input.partition.ranks
        if self.wanted not in (None, workers):
            raise ValueError(
                f"{self.label}: partition= names workers {self.wanted}, and the input is a shard "
                f"over workers {workers}; leave out partition="
            )
        ndim = len(input_shapes[0][1])
        expected = Sharding(class_dim(ndim), self.input.partition)
        check_sharding(self.input, expected, f"the input, of {ndim} dimensions,", self.label)
        check_sharding(self.weight_sharding, None, "the weight", self.label)
        check_sharding(self.target, expected, "the target", self.label)
        layout = self._whole("the input", self.input, of_input)
        if self.target is not None:
            target_shape = self._whole("the target", self.target, of_target).shape
        # most likely a shard of probabilities that nobody registered as one
        elif of_input == of_target and target_shapes[0][1] != layout.shape:
            raise ValueError(
                f"{self.label}: the target has the shape of a shard of the input and no sharding; "
                f"if it is a shard of probabilities, write "
                f"tessel.register_parallel_dim(target, {self.input.dim})"
            )
        else:
            target_shape = same(of_target, "shape of the target", self.label)
        self._check_target(layout.shape, target_shape)
        kinds = {
            "input": Kind(layout.shape, input_meta.dtype, input_meta.device, False),
            "target": Kind(target_shape, target_meta.dtype, target_meta.device, False),
            "weight": self.weight,
            **vars(self.measure),
        }
        # torch's loss of such tensors raises for what torch does not take, on all workers
        loss_dtype(F.cross_entropy, tuple(kinds.items()), self.autocast)
        return layout, input_meta, target_meta

    def _whole(self, name: str, sharding: Sharding, shapes: dict[int, Shape]) -> Layout:
        """The layout of the whole of which workers have balanced parts."""
        first = shapes[self.partition.ranks[0]]
        if len(first) <= sharding.dim:
            raise ValueError(
                f"{self.label}: {name} has no dim {sharding.dim}, its shape is {first}"
            )
        return layout_of_shards(
            self.partition, shapes, sharding.dim, sharding.size, self.label, name, "classes"
        )

    def _check_target(self, shape: Shape, target: Shape) -> None:
        """Raise, of the kind that torch raises, for a target of another shape than expected."""
        samples = samples_of(shape)
        if self.target is not None and target != shape:
            raise ValueError(
                f"{self.label}: a target that is a shard must be one of probabilities, of the "
                f"shape {shape} of the input, got a shard of {target}; classes must be whole on "
                f"every worker"
            )
        # torch takes a target of one element for logits of a single sample, too
        if target in (shape, samples) or (len(shape) == 1 and target == (1,)):
            return
        # as torch: ValueError for another batch, RuntimeError for other dimensions behind it
        is_batch = len(shape) == 1 or target[:1] != shape[:1]
        raise (ValueError if is_batch else RuntimeError)(
            f"{self.label}: a target of shape {samples}, or of shape {shape} for probabilities, "
            f"was expected for an input of shape {shape}, got {target}"
        )


def agreed_logits(loss: ShardedLoss, x: Tensor, target: Any, weight: Any) -> Agreed:
    """Let all workers of the call raise, or know that their tensors fit; one small exchange.

    Beside shapes they tell which classes are in the target, and checksums of target and weight:
    copies that differ would give each worker a loss of its own.
    """
    # The least and the greatest class, which no worker could check for the classes of others, and
    # checksums. All of it is part of the exchange that there is anyway.
    numbers = *range_of(target, CLASSES, loss.measure.ignore_index), checksum(weight)
    label, identity = loss.words()
    held, values = agree(
        loss.partition,
        label,
        *(x, target),
        names=("the input", "the target"),
        numbers=numbers,
        identity=identity,
    )
    agreed = loss.conclude(*map(frozen, held))
    num_classes = agreed[0].shape[loss.input.dim]
    check_copies(values, ("target", "weight"), num_classes, ("target", "classes"), label)
    return agreed
