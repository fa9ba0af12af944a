"""Grids of operators and space: which workers hold the parts of one image together.

An image in parts lies on some axes of a grid of workers. Along the others, which the layout calls
shared, there are more copies of it: each copy serves some of the operators. The workers of one
copy are a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from torch import Tensor

from tessel.core.agreement import TensorMeta
from tessel.core.boxes import ravel
from tessel.core.layout import Cut, Layout
from tessel.core.move import Move
from tessel.core.partition import Partition
from tessel.core.shared import replicate
from tessel.imaging.parts.kernel import check_parts, is_whole
from tessel.transport import kept_in_job


def operator_grid(partition: Partition, shape: Iterable[int]) -> Layout:
    """An image on a grid whose first axis is for operators, and whose others split space.

    A partition of 2×1×4 workers has two copies of the image for two groups of operators, each with
    its last dimension in four parts and the one before whole.

    Args:
        partition: the grid.
        shape: of the image; the axes behind the first split as many of its last dimensions.

    >>> import tessel
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.imaging.parts.operator_grid(P, (1, 3, 8, 8)).shared
    (0,)
    """
    lengths = tuple(shape)
    split = partition.dim - 1
    if split > len(lengths):
        raise ValueError(
            f"a grid of operators and at most {len(lengths)} dimensions is needed for an image of "
            f"{lengths}, got {partition}"
        )
    axes = [None] * (len(lengths) - split) + list(range(1, partition.dim))
    return Layout.split(partition, lengths, axes, shared=[0])


@dataclass(frozen=True)
class Rows:
    """The rows of workers that hold an image together, one for each group of operators.

    Args:
        layout: of the image; shared along the axes of operators.
    """

    layout: Layout

    @cached_property
    def count(self) -> int:
        """How many copies of the image there are."""
        return prod(self.layout.partition.shape[axis] for axis in self.layout.shared)

    @property
    def place(self) -> int:
        """Which of the copies this worker has a part of."""
        coordinates = self.layout.partition.index
        assert coordinates is not None
        sizes = [self.layout.partition.shape[axis] for axis in self.layout.shared]
        return ravel([coordinates[axis] for axis in self.layout.shared], sizes)

    @cached_property
    def own(self) -> Layout:
        """The image in the parts of this worker's row alone."""
        whole = self.layout.partition
        along = [axis for axis in range(whole.dim) if axis not in self.layout.shared]
        rows = whole.slices(along)
        row = next(each for each in rows if each.active)
        cuts = tuple(
            Cut(tuple(along.index(axis) for axis in cut.axes), cut.intervals)
            for cut in self.layout.cuts
        )
        return Layout(row, self.layout.shape, cuts)

    def use(self, x: Tensor) -> Tensor:
        """The shared parts as this row's own; the adjoint sums over the rows."""
        return replicate(x, self.layout, self.layout.shared) if self.count > 1 else x

    def total(self, share: Tensor, meta: TensorMeta | None = None) -> Tensor:
        """The sum over the rows, as shared parts; the adjoint moves nothing."""
        # Of whole images a share may be a tensor of the user, which the movement does not return.
        return self._sum.apply(share, meta) if self.count > 1 or is_whole(self.layout) else share

    @cached_property
    def _sum(self) -> Move:
        return Move(replace(self.layout, shared=()), self.layout)


@kept_in_job
def rows_of(layout: Layout) -> Rows:
    """The rows of a layout; all workers of the job make them together."""
    rows = Rows(layout)
    if is_whole(layout):
        return rows
    # Groups of workers are made by all workers of the job in one order, those of other rows
    # included: a worker that made only its own would wait for the others.
    alone = [axis for axis in range(layout.partition.dim) if axis not in layout.shared]
    layout.partition.slices(alone)
    if layout.partition.active:
        check_parts(rows.own, "an imaging problem")
    return rows
