"""Class-parallel cross entropy: the loss of logits whose classes are split over workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import _reduction

from tessel.core.agreement import as_agreed
from tessel.core.context import is_compiling, setting
from tessel.core.graph import eagerly
from tessel.core.partition import Partition
from tessel.core.shared import grad_alike
from tessel.distributed.shards import (
    State,
    UnknownSharding,
    as_plain,
    refuse_lost,
    sharding_of,
    state_of,
    traced_state,
)
from tessel.nn.parallel.agreed import agree_on_spread, in_mode_of, spread_part
from tessel.nn.parallel.cross_entropy_agreement import ShardedLoss, agreed_logits
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.rules.losses import checked
from tessel.tensor.rules.split_classes import CrossEntropy
from tessel.tensor.table import opened


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

    Of a whole input this is `torch.nn.functional.cross_entropy`. Of a shard, as
    `ParallelLinear(dim=-1)` gives it, no worker sees the logits of the others: the workers
    exchange three or four numbers for each sample, once, and nothing in the backward pass. The
    loss is shared: every worker calls `backward()`, and the gradient of its shard is that of one
    process. The numbers are computed in float32 at least.

    Args:
        input: logits of shape (C), (N, C) or (N, C, d1, …); a shard is split along the classes.
        target: the classes, of the shape of the input without C, or probabilities, of the shape
            of the whole input; the same on every worker. Probabilities may also be a shard that
            is sharded as the input is.
        weight: of each class, all of it on every worker.
        size_average, reduce: torch's old names of reductions.
        ignore_index: a class that does not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: the share of the uniform distribution in the target.
        partition: the workers of the shards; None for those that the input is sharded over.

    >>> import torch
    >>> from tessel.nn.parallel.cross_entropy import parallel_cross_entropy
    >>> parallel_cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]))
    tensor(0.6931)
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
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
        for name, value in (("target", target), ("weight", weight)):
            if sharding_of(value) is not None:  # type: ignore[arg-type]
                raise ValueError(
                    f"parallel_cross_entropy: the input has no sharding and the {name} has one; "
                    f"gather the {name}, or write tessel.register_parallel_dim(input, dim)"
                )
        return F.cross_entropy(
            input, target, weight, None, ignore_index, None, reduction, label_smoothing
        )
    measure = CrossEntropy(ignore_index, label_smoothing, reduction)
    autocast = torch.is_autocast_enabled(input.device.type)
    loss = ShardedLoss.of(sharding, target, weight, partition, measure, autocast)
    return _of_shard(loss, *map(as_plain, (input, target, weight)))  # type: ignore[arg-type]


class ParallelCrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """The cross entropy of logits that are whole, or a shard of the classes.

    Forward:  L = Σ_n w[y_n]·(log Σ_c exp x[n, c] − x[n, y_n]) / Σ_n w[y_n], on every worker.

    This is `torch.nn.CrossEntropyLoss`, which also takes what `ParallelLinear(dim=-1)` gives:
    see `parallel_cross_entropy`.

    Args:
        weight: of each class, all of it on every worker.
        size_average, reduce: torch's old names of reductions.
        ignore_index: a class that does not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: the share of the uniform distribution in the target.
        partition: the workers of the shards; None for those that the input is sharded over.

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
    known = loss.known_alone()
    kinds = tuple(
        (each.shape, each.dtype, each.device) if isinstance(each, Tensor) else type(each)
        for each in (x, target, weight)
    )
    # a worker alone has nobody to agree with, and torch itself looks at the values
    if kinds in known:
        return loss.measure.by_torch(x, target, weight)
    layout, meta, target_meta = agreed_logits(loss, x, target, weight)
    if loss.partition.size == 1:
        known.add(kinds)
    # A target that needs a gradient on some workers only would leave these alone in the backward
    # pass: here it needs one on all of them, or on none.
    target = grad_alike(as_agreed(target, target_meta, True), target_meta)
    # of no classes there is nothing to exchange: torch answers the same on every worker
    if loss.partition.size == 1 or not layout.shape[loss.input.dim]:
        x = grad_alike(as_agreed(x, meta, True), meta)
        return loss.measure.by_torch(x, target, weight)
    # classes are whole on every worker; probabilities may be split as the logits are
    goal = target if loss.target is None else SpreadTensor(target, layout)
    # the workers told each other that every target is a class
    with in_mode_of(meta), setting(checked, True):
        return opened(loss.measure.by_torch(spread_part(x, layout, meta), goal, weight))[0]


def _check_known(state: State) -> None:
    if isinstance(state, UnknownSharding):
        refuse_lost(state, "parallel_cross_entropy of a tensor")
