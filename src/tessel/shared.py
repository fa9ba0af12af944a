"""Shared values: one logical value that several workers store, and how they use it.

Parameters are shared by all workers of a layer. A worker that uses one for its own part of the
work uses a separate copy: nothing moves, and the adjoint sums what the copies are asked for. A
loss goes the other way: separate shares are summed to one shared value, and its adjoint moves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from tessel.agreement import Terms
from tessel.layout import Layout, Shape
from tessel.linop import LinearOperator
from tessel.move import Move
from tessel.partition import Partition
from tessel.transport import kept_in_job


class Spread(LinearOperator):
    """Let every worker use a shared value as a copy of its own.

    Forward:  y_k = x for all k, where nothing moves or is copied.    Adjoint:  x = Σ_k y_k.

    Args:
        domain: the layout of the shared value.
        codomain: the same boxes, with separate copies along some axes.
    """

    def __init__(self, domain: Layout, codomain: Layout) -> None:
        self.domain, self.codomain = domain, codomain
        self._move = Move(domain, codomain)
        self.takes_part  # noqa: B018  (all workers make the groups)

    def _apply(self, x: Tensor) -> Tensor:
        return x.detach()

    @property
    def H(self) -> LinearOperator:
        return self._move.H


@kept_in_job
def _spread(domain: Layout, separate: tuple[int, ...]) -> Spread:
    shared = tuple(axis for axis in domain.shared if axis not in separate)
    return Spread(domain, replace(domain, shared=shared))


def spread(value: Tensor, layout: Layout, separate: Iterable[int]) -> Tensor:
    """Use a shared value in a computation of its own along the axes `separate`."""
    sizes = layout.partition.shape
    axes = tuple(axis for axis in separate if sizes[axis] > 1 and axis in layout.shared)
    return _spread(layout, axes).apply(value) if axes else value


def total(share: Tensor, partition: Partition, shared: Iterable[int] = ()) -> Tensor:
    """The sum of all workers' shares as one shared value: every worker may derive it.

    Args:
        share: of the same shape on all workers.
        partition: the workers.
        shared: axes along which workers hold copies of one share, which counts once.
    """
    return _total(partition, tuple(share.shape), tuple(shared)).apply(share)


@kept_in_job
def _total(partition: Partition, shape: Shape, shared: tuple[int, ...]) -> Move:
    whole = [None] * len(shape)
    source = Layout.split(partition, shape, whole, shared)
    return Move(source, Layout.whole(partition, shape, shared=True))


def equalize(values: Iterable[Tensor], partition: Partition) -> None:
    """Give all workers what the first one of the partition has, in place."""
    first = Partition(partition.ranks[:1], (1,) * partition.dim)
    with torch.no_grad():
        for value in values:
            move = Move(Layout.whole(first, value.shape), Layout.whole(partition, value.shape))
            if partition.active:
                owns = move.domain.partition.active
                value.copy_(move.apply(value.detach() if owns else value.new_empty(0)))


def even(x: Tensor, terms: Terms) -> Tensor:
    """A tensor that needs a gradient here if it does so anywhere: graphs are alike then."""
    if terms.needs_grad and not x.requires_grad:
        return x.detach().requires_grad_()
    return x


def nothing(shape: Shape, *inputs: Tensor | None) -> Tensor:
    """Zeros that hang on their inputs, so that the graphs of all workers are alike."""
    anchor = sum(each.reshape(-1)[:0].sum(dtype=each.dtype) for each in inputs if each is not None)
    assert isinstance(anchor, Tensor)
    return anchor.expand(shape)
