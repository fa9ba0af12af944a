"""Rows: the workers that together hold one copy of an image, whole or in parts.

Calls on an image depend only on its rows. A whole image on every worker is a layout that is shared
along all axes of the grid: each worker is a row by itself.
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

CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # positional and keyword arguments
NO_ARGUMENTS: CallArguments = (), {}


@dataclass(frozen=True)
class Rows:
    """The rows of workers that hold an image, one for each group of operators.

    Args:
        layout: the layout of the image; shared along the axes of operators.
    """

    layout: Layout

    def of(self, shape: Iterable[int]) -> Rows:
        """The rows of images that have this shape on this worker."""
        return self

    def name_of(self, worker: int) -> str:
        """The copy that a worker has, in words."""
        return f"copy {self.place_of(worker)} of the image"

    @cached_property
    def known_shape(self) -> Shape | None:
        """The shape of an image on this worker, if all workers know it in advance."""
        return self.layout.local_shape

    def check_call(
        self, call: str, arguments: CallArguments = NO_ARGUMENTS, gather: bool = True
    ) -> None:
        """Raise NotImplementedError for arguments that only calls on whole images support."""
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
        """The number of copies of the image."""
        return prod(self.layout.partition.shape[axis] for axis in self.layout.shared)

    def place_of(self, worker: int) -> int:
        """The number of the copy of which a worker has a part."""
        coordinates = self.layout.partition.coordinates(worker)
        assert coordinates is not None
        sizes = [self.layout.partition.shape[axis] for axis in self.layout.shared]
        return boxes.ravel([coordinates[axis] for axis in self.layout.shared], sizes)

    @cached_property
    def own(self) -> Layout:
        """The layout of the image on this worker's row alone."""
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
        """The number of workers in a row."""
        return self.layout.partition.size // self.count

    def use(self, x: Tensor) -> Tensor:
        """The shared parts as separate copies of the rows; the adjoint sums over the rows."""
        return x if self.count == 1 else replicate(x, self.layout, self.layout.shared)

    def total(self, share: Tensor, meta: TensorMeta | None = None) -> Tensor:
        """The sum over the rows, as shared parts; the adjoint sends nothing."""
        return share if self._sum is None else self._sum.apply(share, meta)

    @cached_property
    def _sum(self) -> Move | None:
        moves = self.count > 1  # one row has nothing to sum
        return Move(replace(self.layout, shared=()), self.layout) if moves else None


class WholeRows(Rows):
    """The rows of an image that is whole on every worker: each worker is a row by itself.

    Whole images may have any shape: a layout without dimensions represents all of them. The input
    and the gradients of an operator concern this worker alone.
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
        # Even with one row: a share may be a tensor of the user, which a move does not return.
        return Move(replace(self.layout, shared=()), self.layout)


@kept_in_job
def rows_of(layout: Layout) -> Rows:
    """The rows of a layout; all workers of the job make them together."""
    if layout.is_shared:  # the only place that distinguishes calls on whole images and on parts
        return WholeRows(layout)
    rows = Rows(layout)
    # All workers of the job make groups in one order, including those of other rows: a worker that
    # made only its own would wait for the others.
    alone = [axis for axis in range(layout.partition.dim) if axis not in layout.shared]
    layout.partition.slices(alone)
    if layout.partition.active:
        check_parts(rows.own, "an imaging problem")
    return rows


@kept_in_job
def whole_rows(partition: Partition, shape: Shape) -> Rows:
    """The rows of an image that is whole on every worker, cached by its shape."""
    return rows_of(shared_whole(partition, shape))


def rows_of_operators(layout: Layout | None, everyone: Partition) -> Rows:
    """The rows among which operators are divided; with None or a whole layout, all workers."""
    if layout is None or layout.is_shared:
        return whole_rows(everyone, ())
    return rows_of(layout)
