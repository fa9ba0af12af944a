"""Cross entropy of logits whose classes are split: no worker gets the logits of others.

For each sample a worker sends its greatest logit, the sum of exponentials relative to it, and one
or two sums with the target. These few numbers of all workers give the loss, since a sum of
exponentials is merged from parts: log Σ_r s_r·exp(m_r) = M + log Σ_r s_r·exp(m_r − M), where M is
the greatest m_r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout
from tessel.core.numbers import constant
from tessel.core.shared import anchored_zeros, total
from tessel.tensor.rules.reductions import without
from tessel.tensor.table import shared_whole
from tessel.tensor.tensor import move
from tessel.transport import kept_in_job

NUM_PIECES = 8  # of a large shard, one after the other, so that intermediate tensors stay small
SMALL = 2**16  # logits up to which a shard is one piece
LEAST = 4 * 2**20  # bytes of a piece of large ones: allocators do not return smaller blocks


@dataclass(frozen=True)
class CrossEntropy:
    """The arguments of torch's cross entropy other than tensors.

    Args:
        ignore_index: a class that does not count.
        label_smoothing: the share of the uniform distribution in the target.
        reduction: "mean", "sum" or "none".
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"

    def by_torch(self, x: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Torch's own loss of whole logits, or of spread ones by its rule."""
        return F.cross_entropy(x, target, weight, **vars(self))

    def __call__(
        self,
        logits: Tensor,
        layout: Layout,
        target: Tensor,
        weight: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Layout]:
        """The loss and its layout: one number that all workers share, or one for each sample.

        The workers exchange three or four numbers for each sample, once, and nothing in the
        backward pass, unless a weight requires a gradient.

        Args:
            logits: this worker's part.
            layout: the layout of the whole logits.
            target: the classes of this worker's samples, or its part of probabilities, in the
                layout of the logits.
            weight: the weights of all classes.
            dtype: the dtype of the loss, which is computed in float32 at least.
        """
        dim = min(1, logits.ndim - 1)
        box = layout.box()
        assert box is not None
        wide = torch.promote_types(torch.promote_types(logits.dtype, dtype), torch.float32)
        shard = ClassShard(logits, dim, box[dim], layout.shape[dim], wide)
        _, samples = without(layout, (dim,), False)
        if target.shape == logits.shape and target.is_floating_point():
            own, lies = None, layout.of_dim(dim)
            if weight is not None and weight.requires_grad and torch.is_grad_enabled():
                # all workers get its gradient, not only those with the class
                own = move(shared_whole(layout.partition, weight.shape), lies).apply(weight)
            elif weight is not None:
                own = lies.local_part(weight)
            facts = facts_of_probabilities(shard, target, own, self.label_smoothing)
            each = _merged(facts, layout, dim).expected()
            found = self._reduced(each, each.new_tensor(each.numel()), samples)
        else:
            found = self._of_classes(shard, layout, samples, target.long(), weight)
        there = samples if self.reduction == "none" else shared_whole(layout.partition, ())
        return found.to(dtype), there

    def _of_classes(
        self,
        shard: ClassShard,
        layout: Layout,
        samples: Layout,
        target: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        dim, smooths = shard.dim, self.label_smoothing > 0
        ignored = target == self.ignore_index
        own = None if weight is None else weight[slice(*shard.own)]
        # replaced by a class that no worker has, so that none looks up its logit
        none = target.masked_fill(ignored, shard.num_classes)
        merged = _merged(facts_of_classes(shard, none, own, smooths), layout, dim)
        counted = target.masked_fill(ignored, 0)
        parts = [each for each in layout.cuts[dim].intervals if each[0] < each[1]]
        stops = constant(tuple(stop for _, stop in parts), torch.int64, target.device)
        # bucketize returns the place of the worker that has the class of a sample
        each = merged.surprise(torch.bucketize(counted, stops, right=True))
        weights = torch.ones_like(each) if weight is None else weight[counted].to(each.dtype)
        each = each if weight is None else each * weights
        divisor = weights.masked_fill(ignored, 0).sum()
        found = self._reduced(each.masked_fill(ignored, 0), divisor, samples)
        if not smooths:
            return found
        if weight is None:
            sums = constant(tuple(stop - start for start, stop in parts), each.dtype, each.device)
        else:
            sums = torch.stack([weight[a:b].sum(dtype=each.dtype) for a, b in parts])
        smooth = self._reduced(merged.smooth(sums).masked_fill(ignored, 0), divisor, samples)
        share = self.label_smoothing
        return smooth * (share / shard.num_classes) + found * (1 - share)

    def _reduced(self, each: Tensor, divisor: Tensor, samples: Layout) -> Tensor:
        if self.reduction == "none":
            return each
        found = each.sum()
        # if samples are split, too, both sums are sent in one message; else nothing is
        if not samples.is_whole:
            both = torch.stack([found, divisor.to(found.dtype)])
            found, divisor = total(both, samples.partition, samples.shared).unbind()
        return found / divisor if self.reduction == "mean" else found


def _merged(facts: list[Tensor], layout: Layout, dim: int) -> Merged:
    """Exchange the facts of workers with the same samples.

    This is the single exchange; its adjoint is a slice.
    """
    rows, filled = _rows(layout, dim, len(facts))
    everyones = move(rows, rows.gathered((0,))).apply(torch.stack(facts).unsqueeze(0))
    return Merged.of(everyones if filled is None else everyones[filled])


@kept_in_job
def _rows(layout: Layout, dim: int, num_facts: int) -> tuple[Layout, list[int] | slice | None]:
    """The layout of facts (worker, fact, *sample), and the workers with classes, if not all."""
    _, samples = without(layout, (dim,), False)
    classes = layout.cuts[dim]
    count = len(classes.intervals)
    cuts = (
        Cut(classes.axes, tuple((k, k + 1) for k in range(count))),
        Cut((), ((0, num_facts),)),
        *samples.cuts,
    )
    rows = Layout(layout.partition, (count, num_facts, *samples.shape), cuts, layout.shared)
    # a worker without classes sends a peak of −3e38, with which 0 · (peak − M) would be NaN
    filled = [k for k, (start, stop) in enumerate(classes.intervals) if start < stop]
    if len(filled) == count:
        return rows, None
    return rows, slice(len(filled)) if filled == list(range(len(filled))) else filled


@dataclass(frozen=True)
class ClassShard:
    """Logits of some of the classes, and the interval of these.

    Attributes:
        logits: (…, this worker's classes, …).
        dim: the dimension of the classes.
        own: the interval of this worker's classes.
        num_classes: the number of classes on all workers.
        dtype: the dtype for the computation.
    """

    logits: Tensor
    dim: int
    own: Interval
    num_classes: int
    dtype: torch.dtype

    def peak(self) -> Tensor:
        """The greatest logit of each sample, or a finite number if all are −inf; a constant.

        The loss does not depend on it, so it needs no gradient.
        """
        x, lowest = self.logits.detach(), torch.finfo(self.dtype).min
        if not x.shape[self.dim]:
            samples = x.shape[: self.dim] + x.shape[self.dim + 1 :]
            return x.new_full(samples, lowest, dtype=self.dtype)
        return x.amax(self.dim).to(self.dtype).clamp(min=lowest)

    def pieces(self, *others: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
        """The logits, and other tensors with classes along the same dimension, in pieces."""
        count = NUM_PIECES if self.logits.numel() > SMALL else 1
        if self.logits.nbytes > LEAST:
            count = min(count, self.logits.nbytes // LEAST)
        tensors = (self.logits, *others)
        if count == 1:
            yield tensors
            return
        yield from zip(
            *([None] * count if each is None else each.chunk(count, self.dim) for each in tensors),
            strict=False,
        )


def facts_of_classes(
    shard: ClassShard, target: Tensor, weight: Tensor | None, smooths: bool
) -> list[Tensor]:
    """The facts of each sample if the target has classes.

    They are the peak m, Σ exp(x − m), x[target] − m if this worker has it, and, for smoothing,
    Σ w·(x − m).

    Args:
        shard: this worker's logits.
        target: the class of each sample, or a number that is no class.
        weight: the weights of this worker's classes.
        smooths: whether the last fact is needed.
    """
    dim, peak = shard.dim, shard.peak()
    parts: list[list[Tensor]] = []
    start = shard.own[0]
    for x, w in shard.pieces(_along(weight, shard)):
        assert x is not None
        # the logit of the target minus the peak, or zero if it is not one of these logits
        index, length = target - start, x.shape[dim]
        if length:
            owned = (index >= 0) & (index < length)
            place = torch.where(owned, index, 0).unsqueeze(dim)
            picked = torch.where(owned, x.gather(dim, place).squeeze(dim) - peak, 0)
        else:
            picked = anchored_zeros(tuple(peak.shape), x.to(peak.dtype))
        start += length
        below = x - peak.unsqueeze(dim)
        smooth = [(below if w is None else below * w).sum(dim)] if smooths else []
        # in place: a second tensor of the size of the logits would determine peak memory
        parts.append([below.exp_().sum(dim), picked, *smooth])
    return [peak, *(_added(each) for each in zip(*parts, strict=True))]


def facts_of_probabilities(
    shard: ClassShard, target: Tensor, weight: Tensor | None, label_smoothing: float
) -> list[Tensor]:
    """The facts of each sample if the target has probabilities.

    They are the peak m, Σ exp(x − m), Σ t·w·(x − m) and Σ t·w.
    """
    dim, peak = shard.dim, shard.peak()
    keeps = any(each is not None and each.requires_grad for each in (target, weight))
    parts: list[list[Tensor]] = []
    for x, t, w in shard.pieces(target, _along(weight, shard)):
        assert x is not None and t is not None
        if label_smoothing > 0:
            t = t.to(shard.dtype) * (1 - label_smoothing) + label_smoothing / shard.num_classes
        below = x - peak.unsqueeze(dim)
        likely, mass = below * t, t
        if w is not None:
            likely, mass = likely * w, mass * w
        likely, mass = likely.sum(dim), mass.sum(dim, dtype=shard.dtype)
        parts.append([(below.exp() if keeps else below.exp_()).sum(dim), likely, mass])
    return [peak, *(_added(each) for each in zip(*parts, strict=True))]


@dataclass(frozen=True)
class Merged:
    """The facts of all workers combined; the first dimension is that of the workers.

    Attributes:
        shift: each worker's peak minus the greatest of them.
        log_sum: the logarithm of the sum of all exponentials minus the greatest peak.
        rest: the other facts.
    """

    shift: Tensor
    log_sum: Tensor
    rest: tuple[Tensor, ...]

    @classmethod
    def of(cls, facts: Tensor) -> Merged:
        """Combine a tensor of (worker, fact, *sample)."""
        peaks, sums, *rest = facts.unbind(1)
        peaks = peaks.detach()
        shift = peaks - peaks.amax(0)
        return cls(shift, (sums * shift.exp()).sum(0).log(), tuple(rest))

    def surprise(self, owner: Tensor) -> Tensor:
        """−log p of the target of each sample, whose class is on the worker at place `owner`."""
        picked = (self.rest[0] + self.shift).gather(0, owner.unsqueeze(0)).squeeze(0)
        return self.log_sum - picked

    def smooth(self, weights: Tensor) -> Tensor:
        """−Σ w·log p of each sample; `weights` are the sums over each worker's classes."""
        each = weights.view(-1, *[1] * self.log_sum.ndim)
        return self.log_sum * weights.sum() - self._shifted(self.rest[1], each)

    def expected(self) -> Tensor:
        """−Σ t·w·log p of each sample."""
        likely, mass = self.rest
        return self.log_sum * mass.sum(0) - self._shifted(likely, mass)

    def _shifted(self, sums: Tensor, masses: Tensor) -> Tensor:
        """Σ a·(x − M) from each worker's Σ a·(x − m_r) and Σ a."""
        return (sums + masses * self.shift).sum(0)


def _along(weight: Tensor | None, shard: ClassShard) -> Tensor | None:
    """A weight of each class, in a shape to be multiplied with the logits."""
    if weight is None:
        return None
    x = shard.logits
    shape = [1] * x.ndim
    shape[shard.dim] = x.shape[shard.dim]
    return weight.view(shape)


def _added(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts)).sum(0)
