"""Restrictions to some indices of a dimension."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from operator import index as as_int
from typing import Any

import torch
from torch import Tensor

from tessel.core.boxes import Interval, overlap
from tessel.operators.leaf import Leaf
from tessel.operators.memory import Order, inverse_of, order_of
from tessel.operators.space import TensorSpace, checked_dtype, checked_length


class ParRestriction(Leaf):
    """The values at some indices; the adjoint puts them back among zeros.

    Args:
        T: a dtype of torch.
        n: the length.
        ranges: which indices to keep: ranges or pairs (start, stop), ascending and disjoint.

    >>> import tessel, torch
    >>> R = tessel.ParRestriction(torch.float32, 6, [range(0, 2), range(5, 6)])
    >>> R * torch.arange(6.0)
    tensor([0., 1., 5.])
    """

    def __init__(self, T: Any, n: int, ranges: Sequence[range | Interval]) -> None:
        dtype = checked_dtype("ParRestriction", T)
        length = checked_length("ParRestriction", "n", n)
        self.ranges = _intervals(ranges)
        self._check(length)
        kept = sum(stop - start for start, stop in self.ranges)
        self.source, self.target = TensorSpace((length,), dtype), TensorSpace((kept,), dtype)

    def _check(self, length: int) -> None:
        for start, stop in self.ranges:
            if not 0 <= start < stop <= length:
                raise ValueError(
                    f"ParRestriction: {range(start, stop)} is no range of indices below {length}"
                )
        for (_, stop), (start, _) in pairwise(self.ranges):
            if start < stop:
                raise ValueError(
                    f"ParRestriction: ranges must be ascending and disjoint, got {self.ranges}"
                )
        if not self.ranges:
            raise ValueError("ParRestriction: at least one range is needed")

    @property
    def is_invertible(self) -> bool:
        return self.source == self.target

    @property
    def is_nothing(self) -> bool:
        return self.is_invertible

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The indices that are kept."""
        return tuple(i for start, stop in self.ranges for i in range(start, stop))

    def split(self, intervals: Sequence[Interval]) -> tuple[Interval, ...]:
        """The parts of a result whose input lies in these parts, nothing of which moves."""
        # Part k begins where the first kept index does that is not before the part: so parts of the
        # result are consecutive, and each worker has its own already.
        bounds = [self._bound(start) for start, _ in intervals] + [self.codomain.numel]
        bounds[0] = 0
        return tuple(pairwise(bounds))

    def _bound(self, start: int) -> int:
        """Where a part begins that begins at `start` before."""
        if not self.is_swapped:
            return bisect_left(self.kept, start)
        return self.kept[start] if start < len(self.kept) else self.source.numel

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        return self.act_on_part(x, first, (0, self.source.numel))

    def act_on_part(self, x: Tensor, first: int, part: Interval) -> Tensor:
        """The same where a worker has, or gets, only the part `part` of the `n` indices."""
        order = self.order_after(order_of(x), [first])
        y = self._put_together(x.permute(order), order.index(first), part)
        return y.permute(inverse_of(order))

    def order_after(self, order: Order, dims: list[int]) -> Order:
        """What is put back among zeros is mostly transformed next: that dimension lies last."""
        if not self.is_swapped:
            return order
        return (*(dim for dim in order if dim not in dims), *dims)

    def _put_together(self, x: Tensor, first: int, part: Interval) -> Tensor:
        start, stop = part
        common = [overlap(each, part) for each in self.ranges]
        pieces = [(a - start, b - a) for a, b in (each for each in common if each)]
        if not self.is_swapped:
            parts = [x.narrow(first, at, length) for at, length in pieces]
            return torch.cat(parts or [x.narrow(first, 0, 0)], first)
        # One `cat`, whose derivative is views, not writes into zeros, each of them recorded.
        parts, end, kept = [], 0, 0
        for at, length in pieces:
            parts += [_zeros(x, first, at - end), x.narrow(first, kept, length)]
            end, kept = at + length, kept + length
        parts.append(_zeros(x, first, stop - start - end))
        return torch.cat(parts, first)

    def __repr__(self) -> str:
        name, _, rest = super().__repr__().partition("(")
        ranges = ", ".join(f"{start}:{stop}" for start, stop in self.ranges)
        return f"{name}([{ranges}] of {rest}"

    def miniature(self) -> Leaf:
        return self._shrunk(ParRestriction(self.source.dtype, 2, [(0, 1)]))

    def flops(self, shape: tuple[int, ...], dims: tuple[int, ...]) -> float:
        return 0.0


def _zeros(like: Tensor, dim: int, length: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = length
    return like.new_zeros(shape)


def _intervals(given: Any) -> tuple[Interval, ...]:
    try:
        pairs = [(each.start, each.stop) if isinstance(each, range) else each for each in given]
        found = tuple((as_int(start), as_int(stop)) for start, stop in pairs)
    except (TypeError, ValueError):
        raise ValueError(
            f"ParRestriction: ranges are a list of ranges or pairs (start, stop), got {given!r}"
        ) from None
    for each in given:
        if isinstance(each, range) and each.step != 1:
            raise ValueError(f"ParRestriction: ranges have steps of one, got {each}")
    return found
