"""Padding that wraps around: a tensor that goes on at its other end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout
from tessel.core.move import Move
from tessel.transport import kept_in_job


@dataclass(frozen=True)
class Wrapped:
    """A tensor continued periodically along one dimension: the ends go to the outermost workers.

    Forward:  y[i] = x[(i − before) mod n] for i < before + n + after.

    Args:
        source: where the tensor lies.
        dim: the dimension.
        before, after: how many values are put before and behind it, at most n each.
    """

    source: Layout
    dim: int
    before: int
    after: int

    @cached_property
    def target(self) -> Layout:
        """The parts as they were, those at the ends longer."""
        widths = [0] * len(self.source.shape), [0] * len(self.source.shape)
        widths[0][self.dim], widths[1][self.dim] = self.before, self.after
        longer = self.source.embedded(*widths)
        parts = list(longer.cuts[self.dim].intervals)
        parts[0] = (0, parts[0][1])
        parts[-1] = (parts[-1][0], longer.shape[self.dim])
        return _with_parts(longer, self.dim, tuple(parts))

    @cached_property
    def ends(self) -> tuple[Move, Move]:
        """What brings the last values to the first place, and the first to the last."""
        length = self.source.shape[self.dim]
        others = [(0, 0)] * (len(self.source.cuts[self.dim].intervals) - 1)
        first = ((length - self.before, length), *others)
        last = (*others, (0, self.after))
        return (
            Move(self.source, _with_parts(self.source, self.dim, first)),
            Move(self.source, _with_parts(self.source, self.dim, last)),
        )

    def apply(self, x: Tensor) -> Tensor:
        """This worker's part, continued; a worker without one gives what it got."""
        if not self.source.partition.active:
            return x
        if len(self.source.cuts[self.dim].intervals) == 1:
            length = x.shape[self.dim]
            before = x.narrow(self.dim, length - self.before, self.before)
            return torch.cat([before, x, x.narrow(self.dim, 0, self.after)], self.dim)
        before, after = (move.apply(x) for move in self.ends)
        return torch.cat([before, x, after], self.dim)


def _with_parts(layout: Layout, dim: int, parts: tuple[Interval, ...]) -> Layout:
    cuts = list(layout.cuts)
    cuts[dim] = Cut(cuts[dim].axes, parts)
    return replace(layout, cuts=tuple(cuts))


@kept_in_job
def wrapped(source: Layout, dim: int, before: int, after: int) -> Wrapped:
    """A tensor in the layout `source` continued periodically."""
    return Wrapped(source, dim, before, after)
