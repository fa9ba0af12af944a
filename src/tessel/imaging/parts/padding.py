"""Borders: what a window reads beyond the image, brought to the workers that hold its edges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tessel.core.layout import Cut, Layout, Shape
from tessel.core.linop import LinearOperator
from tessel.core.move import Move
from tessel.tensor.padding import wrapped


class PeriodicHalo(LinearOperator):
    """Continue an image periodically along a dimension that is split.

    Forward:  y[i] = x[(i − before) mod n] for i < before + n + after.

    The worker with the first part also stores the last values of the image, the one with the last
    part the first values; both ends travel in one exchange.

    Args:
        source: where the image lies.
        dim: the dimension, in at least two parts.
        before, after: how many values are put before and behind it, at most n each.
    """

    def __init__(self, source: Layout, dim: int, before: int, after: int) -> None:
        self.domain, self.dim = source, dim
        self.codomain = wrapped(source, dim, before, after).target
        length, parts = source.shape[dim], len(source.cuts[dim].intervals)
        # Only the two workers at the ends read something: the first the last values of the image,
        # the last the first ones. One movement brings both.
        ends = ((length - before, length), *[(0, 0)] * (parts - 2), (0, after))
        cuts = list(source.cuts)
        cuts[dim] = Cut(cuts[dim].axes, ends)
        self._ends = Move(source, replace(source, cuts=tuple(cuts)))
        here = source.partition.index
        self._is_first = here is not None and source.places(here)[dim] == 0
        self.prepare()  # all workers make the group, here and not in a first call

    def _apply(self, x: Tensor) -> Tensor:
        ends = self._ends._apply(x)
        if ends.shape[self.dim] == 0:
            return x.detach()
        return torch.cat([ends, x] if self._is_first else [x, ends], self.dim)

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        own, width = self.domain.local_shape[self.dim], self._ends.codomain.local_shape[self.dim]
        first = self._is_first
        ends = y.narrow(self.dim, 0 if first else own, width)
        # What the movement gives back is a tensor of its own, so that the rest is added in place.
        back = self._ends.H._apply(ends)
        return back.add_(y.narrow(self.dim, width if first else 0, own))


@dataclass(frozen=True)
class IndexedPadding:
    """How one dimension of a worker's tensor is put in another order, which may repeat values.

    Attributes:
        dim: the dimension.
        places: for each new place the old one.
    """

    dim: int
    places: tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor:
        """y[i] = x[places[i]]."""
        return x.index_select(self.dim, torch.tensor(self.places, device=x.device))

    def apply_adjoint(self, y: Tensor, length: int) -> Tensor:
        """x[p] = Σ y[i] over the i with places[i] = p."""
        shape = (*y.shape[: self.dim], length, *y.shape[self.dim + 1 :])
        return y.new_zeros(shape).index_add_(
            self.dim, torch.tensor(self.places, device=y.device), y
        )


@dataclass(frozen=True)
class PeriodicPadding:
    """How one dimension of a worker's tensor, which is whole, is continued periodically."""

    dim: int
    before: int
    after: int

    def apply(self, x: Tensor) -> Tensor:
        length = x.shape[self.dim]
        head = x.narrow(self.dim, 0, self.after)
        return torch.cat([x.narrow(self.dim, length - self.before, self.before), x, head], self.dim)

    def apply_adjoint(self, y: Tensor, length: int) -> Tensor:
        x = y.narrow(self.dim, self.before, length).clone()
        # The two ends are added one after the other, since they overlap in a short image.
        x.narrow(self.dim, length - self.before, self.before).add_(
            y.narrow(self.dim, 0, self.before)
        )
        x.narrow(self.dim, 0, self.after).add_(y.narrow(self.dim, self.before + length, self.after))
        return x


class LocalPadding(LinearOperator):
    """Repeat values of what a worker reads where its windows stick out of the image.

    Nothing moves. The adjoint adds what the repeated values are asked for.

    Args:
        read: what the workers read.
        steps: how this worker arranges it, one dimension after the other.
        shapes: of the results of all workers, in the order of the partition.
    """

    def __init__(
        self,
        read: Layout,
        steps: tuple[IndexedPadding | PeriodicPadding, ...],
        shapes: Iterable[Shape],
    ) -> None:
        self.domain, self.steps = read, steps
        partition = read.partition
        self.codomain = Layout.blocks_along(partition, tuple(range(partition.dim)), tuple(shapes))
        self.prepare()  # all workers make the group, here and not in a first call

    def _apply(self, x: Tensor) -> Tensor:
        x = x.detach()
        for step in self.steps:
            x = step.apply(x)
        return x

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        y = y.detach()
        for step in reversed(self.steps):
            y = step.apply_adjoint(y, self.domain.local_shape[step.dim])
        return y
