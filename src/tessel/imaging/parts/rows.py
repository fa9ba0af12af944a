"""Rows: the workers that hold one copy of an image together, whole or in parts.

What a call on an image does depends on its rows alone. A whole image on every worker is a layout
that is shared along all axes of the grid: each worker is a row by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from tessel import transport
from tessel.core import (
    Cut,
    Layout,
    Move,
    Partition,
    Shape,
    TensorMeta,
    boxes,
    replicate,
    shared_whole,
)
from tessel.imaging.parts.layouts import check_parts
from tessel.transport import kept_in_job

CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # positional, and by name
NO_ARGUMENTS: CallArguments = (), {}


@dataclass(frozen=True)
class Rows:
    """The rows of workers that hold an image together, one for each group of operators.

    Args:
        layout: of the image; shared along the axes of operators.
    """

    layout: Layout

    def of(self, shape: Iterable[int]) -> Rows:
        """Those of images that have this shape on this worker."""
        return self

    def name_of(self, worker: int) -> str:
        """What a worker has, in words."""
        return f"copy {self.place_of(worker)} of the image"

    @cached_property
    def known_shape(self) -> Shape | None:
        """The shape of an image on this worker, if all know it before there is one."""
        return self.layout.local_shape

    def check_call(
        self, call: str, arguments: CallArguments = NO_ARGUMENTS, gather: bool = True
    ) -> None:
        """Raise NotImplementedError for what only calls on whole images take."""
        if not gather:
            raise NotImplementedError(
                f"{call}: gather=False requires the whole image on every worker; with an image in "
                "parts, each worker gets its part"
            )
        args, settings = arguments
        if args or settings:
            raise NotImplementedError(
                f"{call}: operators and data fidelities on an image in parts take no arguments, "
                f"got {args} and {dict(settings)}"
            )

    @cached_property
    def count(self) -> int:
        """How many copies of the image there are."""
        return prod(self.layout.partition.shape[axis] for axis in self.layout.shared)

    def place_of(self, worker: int) -> int:
        """Which of the copies a worker has a part of."""
        coordinates = self.layout.partition.coordinates(worker)
        assert coordinates is not None
        sizes = [self.layout.partition.shape[axis] for axis in self.layout.shared]
        return boxes.ravel([coordinates[axis] for axis in self.layout.shared], sizes)

    @cached_property
    def own(self) -> Layout:
        """The image in the parts of this worker's row alone."""
        whole = self.layout.partition
        along = [axis for axis in range(whole.dim) if axis not in self.layout.shared]
        here = transport.this_worker()
        workers = next(row for row in whole.rows(along) if here in row)
        row = Partition(workers, tuple(whole.shape[axis] for axis in along))
        cuts = tuple(
            Cut(tuple(along.index(axis) for axis in cut.axes), cut.intervals)
            for cut in self.layout.cuts
        )
        return Layout(row, self.layout.shape, cuts)

    @cached_property
    def size(self) -> int:
        """How many workers a row has."""
        return self.layout.partition.size // self.count

    def use(self, x: Tensor) -> Tensor:
        """The shared parts as this row's own; the adjoint sums over the rows."""
        return x if self.count == 1 else replicate(x, self.layout, self.layout.shared)

    def total(self, share: Tensor, meta: TensorMeta | None = None) -> Tensor:
        """The sum over the rows, as shared parts; the adjoint moves nothing."""
        return share if self._sum is None else self._sum.apply(share, meta)

    @cached_property
    def _sum(self) -> Move | None:
        moves = self.count > 1  # one row has nothing to sum
        return Move(replace(self.layout, shared=()), self.layout) if moves else None


class WholeRows(Rows):
    """The rows of an image that is whole on every worker: each worker is one by itself.

    Whole images come in any shape: a layout without dimensions stands for all of theirs. What an
    operator is given, and what it learns, is this worker's affair.
    """

    def of(self, shape: Iterable[int]) -> Rows:
        return whole_rows(self.layout.partition, tuple(shape))

    def name_of(self, worker: int) -> str:
        return f"worker {worker}"

    @cached_property
    def known_shape(self) -> Shape | None:
        return None

    def check_call(
        self, call: str, arguments: CallArguments = NO_ARGUMENTS, gather: bool = True
    ) -> None:
        pass

    @cached_property
    def _sum(self) -> Move:
        # Also of one row: a share may be a tensor of the user, which a movement does not return.
        return Move(replace(self.layout, shared=()), self.layout)


@kept_in_job
def rows_of(layout: Layout) -> Rows:
    """The rows of a layout; all workers of the job make them together."""
    if layout.is_shared:  # the only place where calls on whole images and on parts are told apart
        return WholeRows(layout)
    rows = Rows(layout)
    # Groups of workers are made by all workers of the job in one order, those of other rows
    # included: a worker that made only its own would wait for the others.
    alone = [axis for axis in range(layout.partition.dim) if axis not in layout.shared]
    layout.partition.slices(alone)
    if layout.partition.active:
        check_parts(rows.own, "an imaging problem")
    return rows


@kept_in_job
def whole_rows(partition: Partition, shape: Shape) -> Rows:
    """The rows of an image that is whole on every worker, by its shape: a solver asks often."""
    return rows_of(shared_whole(partition, shape))


def rows_of_operators(layout: Layout | None, everyone: Partition) -> Rows:
    """The rows that share out operators of an image; None or whole: all workers, for any shape."""
    if layout is None or layout.is_shared:
        return whole_rows(everyone, ())
    return rows_of(layout)
