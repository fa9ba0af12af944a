"""Pools in interior and border: only outputs near a border read values of other workers.

Most outputs of a worker read its own part alone, which need not be copied for them, nor kept twice
for the backward pass. The others are pooled from a few rows of the part and those of a neighbour,
and the results are concatenated.
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

LEAST_VALUES = 1 << 18  # in a worker's part; a smaller one is copied faster
# The border takes a dozen launches more than a copy; in this time a GPU copies as many values.
LEAST_VALUES_ON_GPU = 1 << 25
PoolInterval = Callable[
    [Tensor, Interval], Tensor
]  # pools the inputs of an interval of outputs along the split dimension


@dataclass(frozen=True)
class InteriorBorderPool:
    """A pool in interior and border, along the one dimension that is split.

    Attributes:
        plan: the layouts of the input, of the output, and of the inputs that it reads.
        dim: the dimension.
        window: the window along it.
        halo: the operator that fetches rows of others.
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
        # The result always depends on the halo, since others may read this worker's part.
        empty = list(self.plan.target.local_shape)
        empty[dim] = 0
        return torch.cat([*pieces, anchored_zeros(tuple(empty), flat)], dim)


@kept_in_job
def in_interior_and_border(
    plan: Windowed, windows: tuple[Window, ...], least: int
) -> InteriorBorderPool | None:
    """The pool in interior and border; None if any worker cannot compute it, or if it is slower."""
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
    """The outputs that read only the own part; None if there are none, or if one reads both sides.

    A strip is concatenated before or after a few rows of the part: no output may need both.
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
