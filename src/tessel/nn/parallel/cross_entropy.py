"""Class-parallel cross entropy: the loss of logits whose classes are split over workers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import _reduction

from tessel.core.agreement import TensorMeta, agree, entered, same
from tessel.core.checksum import NO_VALUES, checksum, is_dense, range_of
from tessel.core.context import is_compiling, setting
from tessel.core.graph import eagerly, in_graphs
from tessel.core.handles import HasHandle
from tessel.core.layout import Layout, Shape
from tessel.core.linop import Entering, enter_by_values, is_traced
from tessel.core.partition import Partition
from tessel.core.shared import shared_whole
from tessel.distributed.group import row_of
from tessel.distributed.shards import (
    Shard,
    Sharding,
    State,
    UnknownSharding,
    as_plain,
    refuse_lost,
    sharding_of,
    state_of,
    traced_state,
)
from tessel.nn.layer import Layer
from tessel.nn.loss_agreement import CLASSES, class_dim, samples_of
from tessel.nn.parallel.agreed import (
    Frozen,
    agree_on_spread,
    check_copies,
    check_sharding,
    frozen,
    in_mode_of,
)
from tessel.primitives.shard_layouts import layout_of_shards
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.rules.losses import Kind, checked, loss_dtype
from tessel.tensor.rules.split_classes import CrossEntropy
from tessel.tensor.table import opened
from tessel.transport import kept_in_job, this_worker

# the layout of the whole logits, and the kinds of the logits and of the target
AgreedLogits = tuple[Layout, TensorMeta, TensorMeta]
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class ShardedLoss:
    """A cross entropy of sharded classes: everything that must be equal on its workers.

    Attributes:
        partition: the workers, in a row.
        wanted: the workers that the caller names, None for those of the sharding.
        input: the sharding of the logits.
        target: the sharding of the target, None for a whole one.
        weight: the metadata of the weight, None without a weight; the name of its type if it has
            none.
        weight_sharding: the sharding of the weight, which must be None.
        measure: the other arguments of torch's loss.
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

    @kept_in_job  # not cached on the object: each call makes an equal one
    def words(self) -> tuple[str, str]:
        """The label of the loss, and its full description."""
        return self.label, repr(self)

    @kept_in_job  # once for the same shapes, which are those of each training step
    def conclude(self, inputs: Frozen, targets: Frozen) -> AgreedLogits:
        """Conclude from the shapes and metadata of all workers, with the same result on each.

        It raises for shardings that do not fit the classes, and for targets that do not fit the
        input.
        """
        (input_shapes, input_meta), (target_shapes, target_meta) = inputs, targets
        of_input, of_target = dict(input_shapes), dict(target_shapes)
        workers = self.input.partition.ranks
        if self.wanted not in (None, workers):
            raise ValueError(
                f"{self.label}: partition= names workers {self.wanted}, but the input is a shard "
                f"over workers {workers}; omit partition="
            )
        ndim = len(input_shapes[0][1])
        expected = Sharding(class_dim(ndim), self.input.partition)
        check_sharding(self.input, expected, f"the input, of {ndim} dimensions,", self.label)
        check_sharding(self.weight_sharding, None, "the weight", self.label)
        check_sharding(self.target, expected, "the target", self.label)
        layout = self._whole("the input", self.input, of_input)
        if self.target is not None:
            target_shape = self._whole("the target", self.target, of_target).shape
        # most likely a shard of probabilities that is not registered as one
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
        # torch's loss of such tensors raises for unsupported ones, on all workers
        loss_dtype(F.cross_entropy, tuple(kinds.items()), self.autocast)
        return layout, input_meta, target_meta

    def _whole(self, name: str, sharding: Sharding, shapes: dict[int, Shape]) -> Layout:
        """The layout of the whole of which workers have balanced parts."""
        first = shapes[self.partition.ranks[0]]
        if len(first) <= sharding.dim:
            raise ValueError(
                f"{self.label}: {name} has no dimension {sharding.dim}: its shape is {first}"
            )
        return layout_of_shards(
            self.partition, shapes, sharding.dim, sharding.size, self.label, name, "classes"
        )

    def _check_target(self, shape: Shape, target: Shape) -> None:
        """Raise, of the kind that torch raises, for a target of another shape than expected."""
        samples = samples_of(shape)
        if self.target is not None and target != shape:
            raise ValueError(
                f"{self.label}: a target that is a shard must contain probabilities, and have the "
                f"shape {shape} of the input, got a shard of {target}; class indices must be whole "
                "on every worker"
            )
        # torch also supports a target of one element for logits of a single sample
        if target in (shape, samples) or (len(shape) == 1 and target == (1,)):
            return
        # as in torch: ValueError for another batch, RuntimeError for other dimensions after it
        is_batch = len(shape) == 1 or target[:1] != shape[:1]
        raise (ValueError if is_batch else RuntimeError)(
            f"{self.label}: expected a target of shape {samples}, or of shape {shape} with "
            f"probabilities, for an input of shape {shape}, got {target}"
        )


LossTensors = tuple[Tensor, Any, Any]  # the logits, the target and the weight


def agreed_logits(loss: ShardedLoss, *given: Any) -> tuple[AgreedLogits, LossTensors]:
    """Verify that the tensors of all workers fit, or raise on all; one small exchange.

    Besides shapes they exchange the range of classes in the target, and checksums of target and
    weight: copies that differ would give each worker a different loss. Returns the conclusion and
    the tensors, on which compiled code agrees in each run.
    """
    x, target, weight = given
    label, identity = loss.words()
    in_graph = is_traced()
    sums = 0 if in_graph else checksum(weight)

    def told(target: Any, x: Any, classes: Any = NO_VALUES) -> AgreedLogits:
        held, values = agree(
            loss.partition,
            label,
            *(x, target),
            names=("the input", "the target"),
            numbers=(*classes, sums),
            identity=identity,
        )
        agreed = loss.conclude(*map(frozen, held))
        num_classes = agreed[0].shape[loss.input.dim]
        check_copies(values, ("target", "weight"), num_classes, ("target", "classes"), label)
        return agreed

    def whole(value: Tensor) -> Layout:
        return shared_whole(loss.partition, value.shape)

    def of_weight(value: Tensor) -> Layout:
        _, values = agree(loss.partition, f"{label}: its weight", numbers=(0, -1, checksum(value)))
        check_copies(values, ("weight",), 0, ("", ""), label)
        return whole(value)

    group = loss.partition.prepare()
    agreed, target = enter_by_values(
        told,
        (target, x),
        # The smallest and the largest class, which a worker cannot check for the classes of others,
        # and checksums. All of it is part of an exchange that is needed anyway.
        lambda target: range_of(target, CLASSES, loss.measure.ignore_index),
        lambda agreed: whole(target) if loss.target is None else agreed[0],
        label,
        group,
    )
    if in_graph and weight is not None:
        weight = Entering(whole(weight), label, group, of_weight).apply(weight)
    return agreed, (x, target, weight)


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    partition: Partition | None = None,
) -> Tensor:
    """The cross entropy of logits that are whole, or a shard of the classes.

    Forward:  L = Σ_n w[y_n]·(log Σ_c exp x[n, c] − x[n, y_n]) / Σ_n w[y_n], on every worker.

    For a whole input this is `torch.nn.functional.cross_entropy`. For a shard, such as the output
    of `ParallelLinear(dim=-1)`, no worker gets the logits of the others: the workers exchange three
    or four numbers for each sample, once, and nothing in the backward pass. The loss is shared:
    every worker calls `backward()`, and the gradient of its shard is that of one process. The
    numbers are computed in float32 at least.

    Args:
        input: logits of shape (C), (N, C) or (N, C, d1, …); a shard is split along the classes.
        target: the classes, of the shape of the input without C, or probabilities, of the shape of
            the whole input; the same on every worker. Probabilities may also be a shard with the
            sharding of the input.
        weight, size_average, ignore_index, reduce, reduction, label_smoothing, partition: see
            `ParallelCrossEntropyLoss`.

    >>> import torch
    >>> from tessel.nn.parallel.cross_entropy import parallel_cross_entropy
    >>> parallel_cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]))
    tensor(0.6931)
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    settings = ignore_index, label_smoothing, reduction
    key = None
    if _is_alone(input, target, weight):
        # A single worker needs no agreement, and torch itself checks the values: shapes that fitted
        # once fit again. Nothing else is done, as Python is slow when large tensors fill the
        # caches.
        with torch._C.DisableTorchFunctionSubclass():  # shards would look up a rule
            kinds = input.shape, input.dtype, input.device, target.shape, target.dtype
            kind = None if weight is None else (weight.shape, weight.dtype, weight.device)
            state = input._tessel_sharding  # type: ignore[attr-defined]
            key = *kinds, target.device, kind, state, partition, *settings
            if key in _known_alone():
                return F.cross_entropy(
                    input, target, weight, None, ignore_index, None, reduction, label_smoothing
                )
    measure = CrossEntropy(*settings)
    # first of all: this raises on all workers, and none of them may wait for another yet
    for value in (input, target, weight):
        _check_known(state_of(value))
    sharding = sharding_of(input)
    if sharding is None:
        if isinstance(input, SpreadTensor):
            agree_on_spread(partition or input.layout.partition, "parallel_cross_entropy")
        # a plain tensor may be computed from a shard; compilers cannot follow the search for it
        if not is_compiling():
            _check_known(traced_state(input))
        for name, given in (("target", target), ("weight", weight)):
            if given is not None and sharding_of(given) is not None:
                raise ValueError(
                    f"parallel_cross_entropy: the input has no sharding, but the {name} has one; "
                    f"gather the {name}, or write tessel.register_parallel_dim(input, dim)"
                )
        return measure.by_torch(input, target, weight)
    autocast = torch.is_autocast_enabled(input.device.type)
    loss = ShardedLoss.of(sharding, target, weight, partition, measure, autocast)
    found = _of_shard(loss, *map(as_plain, (input, target, weight)))  # type: ignore[arg-type]
    if key is not None:
        _known_alone().add(key)
    return found


@kept_in_job
def _known_alone() -> set[Any]:
    """The kinds of calls that were found to be right in a group of one worker."""
    return set()


def _is_alone(input: Any, target: Any, weight: Any) -> bool:
    """Whether these are a shard of a single worker, and plain tensors."""
    return (
        type(input) is Shard
        and type(input._tessel_sharding) is Sharding
        and input._tessel_sharding.partition.size == 1
        and type(target) in _PLAIN
        and (weight is None or type(weight) in _PLAIN)
        and not torch._C._are_functorch_transforms_active()
        and not is_compiling()
    )


class ParallelCrossEntropyLoss(HasHandle, torch.nn.CrossEntropyLoss):
    """The cross entropy of logits that are whole, or a shard of the classes.

    Forward:  L = Σ_n w[y_n]·(log Σ_c exp x[n, c] − x[n, y_n]) / Σ_n w[y_n], on every worker.

    This is `torch.nn.CrossEntropyLoss`, which also supports outputs of `ParallelLinear(dim=-1)`:
    see `parallel_cross_entropy`.

    Args:
        weight: the weight of each class, whole on every worker.
        size_average, reduce: torch's deprecated arguments for reductions.
        ignore_index: a class that is ignored.
        reduction: "mean", "sum" or "none".
        label_smoothing: the share of the uniform distribution in the target.
        partition: the workers of the shards; None for those of the input's sharding.

    >>> import torch
    >>> from tessel.nn.parallel.cross_entropy import ParallelCrossEntropyLoss
    >>> ParallelCrossEntropyLoss(reduction="sum")(torch.zeros(2, 2), torch.tensor([0, 1]))
    tensor(1.3863)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        partition: Partition | None = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.partition = partition

    _derived = HasHandle._derived | {"_traces", "_given_kind"}
    can_be_traced = Layer.can_be_traced

    @in_graphs()
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return parallel_cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            partition=self.partition,
        )


@eagerly
def _of_shard(loss: ShardedLoss, x: Tensor, target: Any, weight: Any) -> Tensor:
    (layout, meta, target_meta), (x, target, weight) = agreed_logits(loss, x, target, weight)
    # If a target needed a gradient on some workers only, these would be alone in the backward pass:
    # make it need one on all workers or none.
    target = entered(target, target_meta)
    # without classes there is nothing to exchange: torch returns the same on every worker
    if loss.partition.size == 1 or not layout.shape[loss.input.dim]:
        x = entered(x, meta)
        return loss.measure.by_torch(x, target, weight)
    # classes are whole on every worker; probabilities may be split as the logits are
    goal = target if loss.target is None else SpreadTensor(target, layout)
    # the workers agreed that every target is a class
    with in_mode_of(meta), setting(checked, True):
        x = SpreadTensor(entered(x, meta), layout)
        return opened(loss.measure.by_torch(x, goal, weight))[0]


def _check_known(state: State) -> None:
    if isinstance(state, UnknownSharding):
        refuse_lost(state, "parallel_cross_entropy of a tensor")
