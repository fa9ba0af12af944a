"""Circular padding: a tensor continued with values of its other end."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from tessel.core.layout import Cut, Layout
from tessel.core.linop import LinearOperator
from tessel.core.move import Move
from tessel.transport import kept_in_job


class PeriodicHalo(LinearOperator):
    """A tensor continued periodically along one dimension.

    Forward:  y[i] = x[(i − before) mod n] for i < before + n + after.

    The worker with the first part also stores the last values of the tensor, the one with the last
    part the first values: both ends are sent in one exchange. If the dimension is whole on each
    worker, nothing is sent.

    Args:
        source: the layout of the tensor.
        dim: the dimension.
        before, after: the numbers of values before and after it, at most n each.
    """

    def __init__(self, source: Layout, dim: int, before: int, after: int) -> None:
        self.domain, self.dim, self.before, self.after = source, dim, before, after
        widths = [0] * len(source.shape), [0] * len(source.shape)
        widths[0][dim], widths[1][dim] = before, after
        longer = source.embedded(*widths)
        axes, parts = longer.cuts[dim].axes, list(longer.cuts[dim].intervals)
        # The values before it belong to the first part, those after it to the last.
        parts[0] = (0, parts[0][1])
        parts[-1] = (parts[-1][0], longer.shape[dim])
        self.codomain = longer.recut(dim, Cut(axes, tuple(parts)))

    def _apply(self, x: Tensor) -> Tensor:
        dim, ends = self.dim, self._ends
        if ends is None:
            length = x.shape[dim]
            before = x.narrow(dim, length - self.before, self.before)
            return torch.cat([before, x, x.narrow(dim, 0, self.after)], dim)
        found = ends._apply(x)
        if found.shape[dim] == 0:
            return x.detach()
        return torch.cat([found, x] if self._is_first else [x, found], dim)

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        dim, ends, own = self.dim, self._ends, self.domain.local_shape[self.dim]
        if ends is None:
            x = y.narrow(dim, self.before, own).clone()
            x.narrow(dim, own - self.before, self.before).add_(y.narrow(dim, 0, self.before))
            x.narrow(dim, 0, self.after).add_(y.narrow(dim, self.before + own, self.after))
            return x
        width, is_first = ends.codomain.local_shape[dim], self._is_first
        # The adjoint movement returns a new tensor, so the rest can be added in place.
        back = ends.H._apply(y.narrow(dim, 0 if is_first else own, width))
        return back.add_(y.narrow(dim, width if is_first else 0, own))

    @cached_property
    def _ends(self) -> Move | None:
        """The movement of the last values to the first place, and of the first to the last."""
        length, cut = self.domain.shape[self.dim], self.domain.cuts[self.dim]
        between = len(cut.intervals) - 2
        if between < 0:
            return None
        ends = ((length - self.before, length), *[(0, 0)] * between, (0, self.after))
        return Move(self.domain, self.domain.recut(self.dim, Cut(cut.axes, ends)))

    @cached_property
    def _is_first(self) -> bool:
        here = self.domain.partition.index
        return here is not None and self.domain.places(here)[self.dim] == 0


@kept_in_job
def periodic_halo(source: Layout, dim: int, before: int, after: int) -> PeriodicHalo:
    """The operator that continues a tensor in the layout `source` periodically."""
    return PeriodicHalo(source, dim, before, after)
