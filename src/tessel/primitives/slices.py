"""SliceMovement: a movement within the slices of one partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tessel import transport
from tessel.core.layout import Shape
from tessel.core.linop import LinearOperator
from tessel.core.partition import Partition
from tessel.primitives.movement import Movement


class SliceMovement(Movement):
    """A movement among workers of `P_x` that differ only along `axes`, in each slice separately.

    A subclass implements `slice_operator(row, shapes)`.
    """

    def __init__(self, P_x: Partition, axes: Iterable[int]) -> None:
        self._axes = P_x.axes(axes)  # first: the constructor makes the groups along them
        super().__init__(P_x, P_x)

    def slice_operator(self, row: Partition, shapes: Mapping[int, Shape]) -> LinearOperator:
        """Return the operator on one slice; ValueError if the shapes in it do not fit."""
        raise NotImplementedError(f"{type(self).__name__} must implement `slice_operator`")

    def operators(self, shapes: Mapping[int, Shape]) -> Sequence[LinearOperator]:
        return [self.slice_operator(row, shapes) for row in self._slices]

    def operator(self, shapes: Mapping[int, Shape]) -> LinearOperator:
        # For all slices, though this worker is in one: an error in one slice raises in all.
        operators, worker = self.operators(shapes), transport.this_worker()
        return next(each for each in operators if worker in each.domain.partition.ranks)

    def prepare(self) -> transport.Group:
        if self._group is None:
            self._slices = self.P_x.slices(self._axes)  # makes their groups, too
        return super().prepare()

    def extra_repr(self) -> str:
        return f"{self.P_x}, axes {self._axes}"
