"""Pools in interior and border: only outputs near a border read what lies around the part.

Most outputs of a worker read its own part alone, which need not be copied for them, nor kept twice
for the backward pass. Those near its borders are pooled from a few rows of the part and the rows of
the neighbour, and all are put together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from tessel.core.boxes import Interval, overlap
from tessel.core.halo import Halo, HaloBox
from tessel.core.shared import anchored_zeros
from tessel.core.windows import Window
from tessel.tensor.windowed import Windowed
from tessel.transport import kept_in_job

LEAST_VALUES = 1 << 18  # of a worker's part, below which a copy of it is cheaper
# The border takes a dozen launches more than a copy, in which time a GPU copies as much as this.
LEAST_VALUES_ON_GPU = 1 << 25
PoolInterval = Callable[
    [Tensor, Interval], Tensor
]  # of what outputs along the split dimension read


@dataclass(frozen=True)
class InteriorBorderPool:
    """A pool in interior and border, along the one dimension that is split.

    Attributes:
        plan: what the outputs read.
        dim: the dimension.
        window: along it.
        halo: what brings the rows of others.
    """

    plan: Windowed
    dim: int
    window: Window
    halo: Halo

    def apply(self, x: Tensor, pool: PoolInterval) -> Tensor:
        """This worker's outputs."""
        flat = self.halo.apply(x)
        dim, length = self.dim, self.plan.source.shape[self.dim]
        own, wanted = self.plan.source.box(), self.plan.target.box()
        assert own is not None and wanted is not None
        (a, b), outputs = own[dim], wanted[dim]
        inner = _inner(self.window, (a, b), outputs, length)
        assert inner is not None
        strips = iter(self.halo.split(flat))
        pieces = []
        for part in ((outputs[0], inner[0]), inner, (inner[1], outputs[1])):
            if part[0] >= part[1]:
                continue
            start, stop = overlap(self.window.hull(part), (0, length)) or (0, 0)
            rows = x.narrow(dim, max(start, a) - a, min(stop, b) - max(start, a))
            if start < a:
                rows = torch.cat([next(strips), rows], dim)
            if stop > b:
                rows = torch.cat([rows, next(strips)], dim)
            pieces.append(pool(rows, part))
        # A worker that reads nothing of others hangs on the halo, too: they may read of its part.
        empty = list(self.plan.target.local_shape)
        empty[dim] = 0
        return torch.cat([*pieces, anchored_zeros(tuple(empty), flat)], dim)


@kept_in_job
def in_interior_and_border(
    plan: Windowed, windows: tuple[Window, ...], least: int
) -> InteriorBorderPool | None:
    """How to pool so, or None if that is not possible on all workers, or not worth it."""
    source, target = plan.source, plan.target
    lead = len(source.shape) - len(windows)
    split = [dim for dim, cut in enumerate(source.cuts) if len(cut.intervals) > 1]
    if len(split) != 1 or split[0] < lead or plan.source == plan.read:
        return None
    (dim,) = split
    window, length = windows[dim - lead], source.shape[dim]
    places = zip(source.cuts[dim].intervals, target.cuts[dim].intervals, strict=True)
    if prod(source.shape) < least * source.partition.size:
        return None
    if any(_inner(window, own, outputs, length) is None for own, outputs in places):
        return None
    strips = []
    for worker in source.partition.ranks:
        own, wanted = source.box(worker), plan.read.box(worker)
        assert own is not None and wanted is not None
        found = []
        for part in ((wanted[dim][0], own[dim][0]), (own[dim][1], wanted[dim][1])):
            if part[0] < part[1]:
                box = (*own[:dim], part, *own[dim + 1 :])
                shape = tuple(stop - start for start, stop in box)
                found.append(HaloBox(tuple(start for start, _ in box), shape, box))
        strips.append(tuple(found))
    return InteriorBorderPool(plan, dim, window, Halo(source, plan.read, tuple(strips)))


def _inner(window: Window, own: Interval, outputs: Interval, length: int) -> Interval | None:
    """The outputs that read nothing of others; None if there are none, or others read both sides.

    Strips are put before or behind a few rows of the part: no output may need both.
    """
    (a, b), (i, j) = own, outputs
    first = i if a == 0 else max(i, ceil((a - window.first(0)) / window.stride))
    stop = j if b == length else min(j, (b - 1 - window.last(0)) // window.stride + 1)
    if a == b or first >= stop:
        return None
    if (i < first and window.hull((i, first))[1] > b) or (
        stop < j and window.hull((stop, j))[0] < a
    ):
        return None
    return first, stop
