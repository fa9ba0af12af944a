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
from tessel.operators.memory import MemoryOrder, inverse_of, order_of
from tessel.operators.space import TensorSpace, checked_dtype, checked_length


class ParRestriction(Leaf):
    """The values at some indices; the adjoint puts them back among zeros.

    Args:
        T: a dtype of torch.
        n: the length.
        ranges: the indices to keep: ranges or pairs (start, stop), ascending and disjoint.

    >>> import tessel, torch
    >>> R = tessel.ParRestriction(torch.float32, 6, [range(0, 2), range(5, 6)])
    >>> R * torch.arange(6.0)
    tensor([0., 1., 5.])
    """

    def __init__(self, T: Any, n: int, ranges: Sequence[range | Interval]) -> None:
        dtype = checked_dtype("ParRestriction", T)
        length = checked_length("ParRestriction", "n", n)
        try:
            pairs = [
                (each.start, each.stop) if isinstance(each, range) else each for each in ranges
            ]
            self.ranges = tuple((as_int(start), as_int(stop)) for start, stop in pairs)
        except (TypeError, ValueError):
            raise ValueError(
                f"ParRestriction: ranges must be a list of ranges or pairs (start, stop), got "
                f"{ranges!r}"
            ) from None
        for each in ranges:
            if isinstance(each, range) and each.step != 1:
                raise ValueError(f"ParRestriction: ranges must have steps of one, got {each}")
        for start, stop in self.ranges:
            if not 0 <= start < stop <= length:
                raise ValueError(
                    f"ParRestriction: {range(start, stop)} is not a range of indices below {length}"
                )
        if any(start < stop for (_, stop), (start, _) in pairwise(self.ranges)):
            raise ValueError(
                f"ParRestriction: ranges must be ascending and disjoint, got {self.ranges}"
            )
        if not self.ranges:
            raise ValueError("ParRestriction: expected at least one range")
        kept = sum(stop - start for start, stop in self.ranges)
        self.source, self.target = TensorSpace((length,), dtype), TensorSpace((kept,), dtype)

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
        """The parts of a result for these parts of the input, without moving anything."""
        # Part k begins at the first kept index that is not before the part: so parts of the
        # result are consecutive, and each worker has its own already.
        starts = [start for start, _ in intervals]
        if self.is_swapped:
            ends = *self.kept, self.source.numel
            bounds = [ends[min(start, len(self.kept))] for start in starts]
        else:
            bounds = [bisect_left(self.kept, start) for start in starts]
        return tuple(pairwise([0, *bounds[1:], self.codomain.numel]))

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        return self.act_on_part(x, first, (0, self.source.numel))

    def act_on_part(self, x: Tensor, first: int, part: Interval) -> Tensor:
        """`act` where a worker has, or gets, only the part `part` of the `n` indices."""
        order = self.order_after(order_of(x), [first])
        x, at, (start, stop) = x.permute(order), order.index(first), part
        common = [overlap(each, part) for each in self.ranges]
        pieces = [(a - start, b - a) for a, b in (each for each in common if each)]
        if not self.is_swapped:
            parts = [x.narrow(at, begin, length) for begin, length in pieces]
            return torch.cat(parts or [x.narrow(at, 0, 0)], at).permute(inverse_of(order))
        # One `cat`, whose derivative consists of views, not of writes into zeros.
        parts, end, kept = [], 0, 0
        for begin, length in pieces:
            parts += [_zeros(x, at, begin - end), x.narrow(at, kept, length)]
            end, kept = begin + length, kept + length
        parts.append(_zeros(x, at, stop - start - end))
        return torch.cat(parts, at).permute(inverse_of(order))

    def order_after(self, order: MemoryOrder, dims: list[int]) -> MemoryOrder:
        """The order with this dimension last, as it is usually transformed next."""
        if not self.is_swapped:
            return order
        return (*(dim for dim in order if dim not in dims), *dims)

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
