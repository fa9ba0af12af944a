"""HaloExchange: each part, extended by a halo of adjacent values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index as as_int

from tessel.core.layout import Layout, Shape
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.primitives.movement import Movement


class HaloExchange(Movement):
    """Extend every worker's part of the tensor by a halo of its neighbours' values.

    A halo that is wider than the neighbour's part continues in parts beyond it. There is no halo
    beyond the border of the global tensor. A worker with an empty part gets no halo.

    Forward:  y_s[i] = x_owner(i)[i] for i in the extended box of s.
    Adjoint:  x_r[i] = Σ_s y_s[i], the halos added to the parts that they came from.

    Args:
        P_x: the workers; axis d splits dimension d into parts of any lengths.
        halo: for each dimension the widths to the left and to the right.

    >>> import tessel, torch
    >>> tessel.nn.HaloExchange(tessel.world(), [(1, 1)])(torch.ones(2))
    tensor([1., 1.])
    """

    def __init__(self, P_x: Partition, halo: Iterable[Sequence[int]]) -> None:
        # A number in place of a pair is kept, so that the error below can show it.
        pairs = [
            tuple(as_int(width) for width in (pair if isinstance(pair, Iterable) else (pair,)))
            for pair in halo
        ]
        if len(pairs) != P_x.dim or any(len(pair) != 2 for pair in pairs):
            raise ValueError(
                f"a halo needs one pair (left, right) for each of the {P_x.dim} axes of {P_x}, "
                f"got {pairs}"
            )
        self.halo = tuple((left, right) for left, right in pairs)
        if any(width < 0 for pair in self.halo for width in pair):
            raise ValueError(f"the widths of a halo cannot be negative, got {self.halo}")
        super().__init__(P_x, P_x)

    def operator(self, shapes: Mapping[int, Shape]) -> Move:
        source = Layout.from_local_shapes(self.P_x, shapes)
        # The extended boxes include the workers' own parts, which are copied, too.
        return Move(source, source.grow(self.halo))

    def extra_repr(self) -> str:
        return f"{self.P_x}, halo {self.halo}"
