"""Class-parallel cross entropy: the loss of logits whose classes are split over workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import _reduction

from tessel import transport
from tessel.core.agreement import TensorMeta, as_agreed
from tessel.core.graph import eagerly
from tessel.core.partition import Partition
from tessel.core.shared import grad_alike
from tessel.distributed.agreeing import agree_on_call
from tessel.distributed.group import row_of
from tessel.distributed.marks import (
    State,
    Unknown,
    check_known,
    mark_of,
    state_of,
    traced_state,
    unmarked,
)
from tessel.distributed.movements import gathering, scattering, shard_layout
from tessel.nn.parallel.cross_entropy_agreement import ClassLoss, Logits, WeightKind, agree
from tessel.nn.parallel.cross_entropy_parts import (
    ClassShard,
    Merged,
    facts_of_classes,
    facts_of_probabilities,
)
from tessel.transport import kept_in_job


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
            is marked as the input is.
        weight: of each class, all of it on every worker.
        size_average, reduce: torch's old names of reductions.
        ignore_index: a class that does not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: the share of the uniform distribution in the target.
        partition: the workers of the shards; None for those that the input is marked with.

    >>> import torch
    >>> from tessel.nn.parallel.cross_entropy import parallel_cross_entropy
    >>> parallel_cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]))
    tensor(0.6931)
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    for value in (input, target, weight):
        _check_known(state_of(value))
    mark = mark_of(input)
    if mark is None:
        _check_whole(input, target, weight)
        return F.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if not mark.partition.active:
        raise ValueError(
            f"parallel_cross_entropy: the input is a shard over {mark.partition}, to which worker "
            f"{transport.this_worker()} does not belong"
        )
    weight_mark = mark_of(weight)  # type: ignore[arg-type]
    loss = ClassLoss(
        row_of(mark.partition),
        None if partition is None else row_of(partition).ranks,
        mark,
        mark_of(target),
        None if weight is None or weight_mark is not None else WeightKind.of(weight),
        weight_mark,
        reduction,
        ignore_index,
        label_smoothing,
        torch.is_autocast_enabled(input.device.type),
    )
    return _of_shard(loss, *map(unmarked, (input, target, weight)))  # type: ignore[arg-type]


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
        partition: the workers of the shards; None for those that the input is marked with.

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
def _of_shard(loss: ClassLoss, x: Tensor, target: Any, weight: Any) -> Tensor:
    kinds, known = tuple(map(_kind, (x, target, weight))), _known_alone(loss)
    if kinds in known:  # torch itself looks at the values
        return loss.measure(x, target, weight)
    logits = agree(loss, x, target, weight)
    if loss.partition.size == 1:
        known.add(kinds)
    x = _admitted(x, logits.input_terms)
    target = _admitted(target, logits.target_terms)
    if loss.partition.size == 1 or logits.num_classes == 0:
        return loss.measure(x, target, weight)
    measure = _of_probabilities if logits.has_probabilities else _of_classes
    return measure(loss, logits, x, target, weight).to(logits.dtype)


def _of_classes(
    loss: ClassLoss, logits: Logits, x: Tensor, target: Tensor, weight: Tensor | None
) -> Tensor:
    target = target.long().reshape(logits.shape[: logits.dim] + logits.shape[logits.dim + 1 :])
    ignored = target == loss.ignore_index
    shard, smooths = _shard(loss, logits, x), loss.label_smoothing > 0
    own = None if weight is None else weight[slice(*shard.own)]
    facts = facts_of_classes(shard, target.masked_fill(ignored, logits.num_classes), own, smooths)
    merged = _merged(loss, logits, facts)
    target, ignored = target.reshape(-1), ignored.reshape(-1)
    counted = target.masked_fill(ignored, 0)
    each = merged.surprise(_owner(logits, counted))
    weights = torch.ones_like(each) if weight is None else weight[counted].to(each.dtype)
    each = each if weight is None else each * weights
    divisor = weights.masked_fill(ignored, 0).sum()
    found = _reduced(each.masked_fill(ignored, 0), divisor, loss, logits)
    if not smooths:
        return found
    smooth = merged.smooth(_weights_of_workers(logits, weight, each)).masked_fill(ignored, 0)
    share = loss.label_smoothing
    smooth = _reduced(smooth, divisor, loss, logits)
    return smooth * (share / logits.num_classes) + found * (1 - share)


def _of_probabilities(
    loss: ClassLoss, logits: Logits, x: Tensor, target: Tensor, weight: Tensor | None
) -> Tensor:
    shard = _shard(loss, logits, x)
    if loss.target is None:
        target = _part(loss, shard.own, target, logits.dim)
    own = None if weight is None else _part(loss, shard.own, weight, 0)
    facts = facts_of_probabilities(shard, target, own, loss.label_smoothing)
    each = _merged(loss, logits, facts).expected()
    return _reduced(each, each.new_tensor(each.numel()), loss, logits)


def _reduced(each: Tensor, divisor: Tensor, loss: ClassLoss, logits: Logits) -> Tensor:
    if loss.reduction == "none":
        return each.reshape(logits.sample_shape)
    return each.sum() / divisor if loss.reduction == "mean" else each.sum()


def _shard(loss: ClassLoss, logits: Logits, x: Tensor) -> ClassShard:
    place = loss.partition.rank
    assert place is not None
    dtype = torch.promote_types(torch.promote_types(x.dtype, logits.dtype), torch.float32)
    return ClassShard(x, logits.dim, logits.classes[place], logits.num_classes, dtype)


def _merged(loss: ClassLoss, logits: Logits, facts: list[Tensor]) -> Merged:
    """Let all workers know what each has to tell: the one exchange, whose adjoint is a slice."""
    mine = torch.stack([each.reshape(-1) for each in facts]).unsqueeze(0)
    rows = shard_layout(loss.partition, (loss.partition.size, *mine.shape[1:]), 0)
    everyones = gathering(rows).apply(mine, logits.input_terms)
    return Merged.of(everyones[: min(loss.partition.size, logits.num_classes)])


def _owner(logits: Logits, target: Tensor) -> Tensor:
    """The place of the worker that has the class of each sample."""
    stops = torch.tensor([stop for _, stop in logits.classes], device=target.device)
    return torch.bucketize(target, stops, right=True)


def _weights_of_workers(logits: Logits, weight: Tensor | None, like: Tensor) -> Tensor:
    """The sum of weights of each worker's classes, for those that have classes."""
    parts = [(start, stop) for start, stop in logits.classes if start < stop]
    if weight is None:
        return like.new_tensor([stop - start for start, stop in parts])
    return torch.stack([weight[start:stop].sum(dtype=like.dtype) for start, stop in parts])


def _part(loss: ClassLoss, own: tuple[int, int], whole: Tensor, dim: int) -> Tensor:
    """This worker's part of a shared value; all workers get its gradient, if it has one."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return whole.narrow(dim, own[0], own[1] - own[0])
    return scattering(loss.partition, tuple(whole.shape), dim).apply(whole)


@kept_in_job
def _known_alone(loss: ClassLoss) -> set[Any]:
    """The kinds of tensors that were found to fit a call of one worker."""
    return set()


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else type(value)


def _admitted(value: Tensor, meta: TensorMeta) -> Tensor:
    """A tensor that needs a gradient, or carries a tangent, here if it does so anywhere."""
    return grad_alike(as_agreed(value, meta, True), meta)


def _check_known(state: State) -> None:
    """Raise ValueError for a lost mark, and on all workers, of which others may still have it."""
    if isinstance(state, Unknown):
        if state.partition is not None:
            _agree_that_lost(state, state.partition)
        check_known(state, "parallel_cross_entropy of a tensor")


@eagerly
def _agree_that_lost(state: Unknown, partition: Partition) -> None:
    agree_on_call(row_of(partition), f"parallel_cross_entropy of a tensor {state}")


def _check_whole(input: Any, target: Any, weight: Any) -> None:
    if not torch.compiler.is_compiling():
        _check_known(traced_state(input))
    for name, value in (("target", target), ("weight", weight)):
        if mark_of(value) is not None:
            raise ValueError(
                f"parallel_cross_entropy: the input has no mark of a shard and the {name} has one; "
                f"gather the {name}, or write tessel.register_parallel_dim(input, dim)"
            )
