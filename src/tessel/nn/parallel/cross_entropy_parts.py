"""What one worker knows of a cross entropy from its shard of the classes, and the whole from it.

Of each sample a worker tells its greatest logit, the sum of exponentials below it, and one or two
sums with the target. These few numbers of all workers give the loss, as a sum of exponentials is
merged from parts: log Σ_r s_r·exp(m_r) = M + log Σ_r s_r·exp(m_r − M), where M is the greatest m_r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessel.core.boxes import Interval
from tessel.core.shared import anchored_zeros

NUM_PIECES = 8  # in which a large shard is worked on, so that what is in between stays small
SMALL = 2**16  # logits; below, one piece
LEAST = 4 * 2**20  # bytes of a piece of large ones: allocators keep smaller blocks for themselves


@dataclass(frozen=True)
class ClassShard:
    """Logits of some of the classes, and where these stand.

    Attributes:
        logits: (…, this worker's classes, …).
        dim: the dimension of the classes.
        own: the interval of this worker's classes.
        num_classes: of all workers.
        dtype: in which to compute.
    """

    logits: Tensor
    dim: int
    own: Interval
    num_classes: int
    dtype: torch.dtype

    def peak(self) -> Tensor:
        """The greatest logit of each sample, a finite one where all are −inf; a constant.

        The loss does not depend on it, so that it has no gradient.
        """
        x, lowest = self.logits.detach(), torch.finfo(self.dtype).min
        if not x.shape[self.dim]:
            samples = x.shape[: self.dim] + x.shape[self.dim + 1 :]
            return x.new_full(samples, lowest, dtype=self.dtype)
        return x.amax(self.dim).to(self.dtype).clamp(min=lowest)

    def pieces(self, *others: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
        """The logits, and other tensors that have the classes as the same dimension, in pieces."""
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
    """What to tell of each sample when the target gives classes.

    They are the peak m, Σ exp(x − m), x[target] − m if this worker has it, and, to smooth,
    Σ w·(x − m).

    Args:
        shard: this worker's logits.
        target: the class of each sample, or one that is none.
        weight: of this worker's classes.
        smooths: whether the last of them is needed.
    """
    dim, peak = shard.dim, shard.peak()
    parts: list[list[Tensor]] = []
    start = shard.own[0]
    for x, w in shard.pieces(_along(weight, shard)):
        assert x is not None
        picked = _picked(x, dim, target - start, peak)
        start += x.shape[dim]
        below = x - peak.unsqueeze(dim)
        smooth = [(below if w is None else below * w).sum(dim)] if smooths else []
        parts.append([below.exp_().sum(dim), picked, *smooth])
    return [peak, *(_added(each) for each in zip(*parts, strict=True))]


def facts_of_probabilities(
    shard: ClassShard, target: Tensor, weight: Tensor | None, label_smoothing: float
) -> list[Tensor]:
    """What to tell of each sample when the target gives probabilities.

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
    """What all workers told, put together; the first dimension is that of the workers.

    Attributes:
        shift: each worker's peak, less the greatest of them.
        log_sum: the logarithm of the sum of all exponentials, less the greatest peak.
        rest: what else they told.
    """

    shift: Tensor
    log_sum: Tensor
    rest: tuple[Tensor, ...]

    @classmethod
    def of(cls, facts: Tensor) -> Merged:
        """From a tensor of (worker, fact, sample)."""
        peaks, sums, *rest = facts.unbind(1)
        peaks = peaks.detach()
        shift = peaks - peaks.amax(0)
        return cls(shift, (sums * shift.exp()).sum(0).log(), tuple(rest))

    def surprise(self, owner: Tensor) -> Tensor:
        """−log p of the target of each sample, whose class the worker at place `owner` has."""
        picked = (self.rest[0] + self.shift).gather(0, owner.unsqueeze(0)).squeeze(0)
        return self.log_sum - picked

    def smooth(self, weights: Tensor) -> Tensor:
        """−Σ w·log p of each sample; `weights` are those of each worker's classes, summed."""
        return self.log_sum * weights.sum() - self._shifted(self.rest[1], weights.unsqueeze(1))

    def expected(self) -> Tensor:
        """−Σ t·w·log p of each sample."""
        likely, mass = self.rest
        return self.log_sum * mass.sum(0) - self._shifted(likely, mass)

    def _shifted(self, sums: Tensor, masses: Tensor) -> Tensor:
        """Σ a·(x − M) from each worker's Σ a·(x − m_r) and Σ a."""
        return (sums + masses * self.shift).sum(0)


def _picked(x: Tensor, dim: int, index: Tensor, peak: Tensor) -> Tensor:
    """The logit at `index`, less the peak, or zero where the index is not one of these logits."""
    if not x.shape[dim]:
        return anchored_zeros(tuple(peak.shape), x.to(peak.dtype))
    owned = (index >= 0) & (index < x.shape[dim])
    index = torch.where(owned, index, 0).unsqueeze(dim)
    return torch.where(owned, x.gather(dim, index).squeeze(dim) - peak, 0)


def _along(weight: Tensor | None, shard: ClassShard) -> Tensor | None:
    """A weight of each class, shaped to be multiplied with the logits."""
    if weight is None:
        return None
    x = shard.logits
    shape = [1] * x.ndim
    shape[shard.dim] = x.shape[shard.dim]
    return weight.view(shape)


def _added(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts)).sum(0)
