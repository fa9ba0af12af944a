"""Partitions: some workers of the job, arranged on a Cartesian grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import index as as_int
from typing import Any, Self

from tessel import transport
from tessel.core import boxes


@dataclass(frozen=True)
class Partition:
    """Workers on a grid: the worker `ranks[k]` is at the k-th place of `shape`, row by row.

    All workers of the job make a partition together, also those outside of it: they hold an
    inactive partition, which knows its `shape` and can be passed around. Two partitions are equal
    if they have the same workers in the same order on the same grid.

    Args:
        ranks: the numbers of the workers in the job, any subset in any order.
        shape: the shape of the grid.

    >>> import tessel
    >>> P = tessel.world()
    >>> P.size, P.shape, P.index
    (1, (1,), (0,))
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    _places: dict[int, int] = field(init=False, repr=False, compare=False)
    _group: transport.Group | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # attributes cannot be set: partitions are frozen
        object.__setattr__(self, "ranks", tuple(as_int(rank) for rank in self.ranks))
        object.__setattr__(self, "shape", tuple(as_int(size) for size in self.shape))
        self._find_places()
        ranks, shape, workers = self.ranks, self.shape, transport.num_workers()
        if not ranks:
            raise ValueError("a partition needs at least one worker, got none")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"a worker can appear only once in a partition, got {ranks}")
        if min(ranks) < 0 or max(ranks) >= workers:
            raise ValueError(
                f"there are {workers} workers, numbered 0 to {workers - 1}, got ranks {ranks}; "
                f"start more with `tessel run -n {max(ranks) + 1}`"
            )
        if any(size < 1 for size in shape):
            raise ValueError(f"every axis of a partition needs at least one worker, got {shape}")
        if math.prod(shape) != len(ranks):
            raise ValueError(
                f"a partition of shape {shape} needs {math.prod(shape)} workers, got {len(ranks)}"
            )
        self.prepare()  # all workers of the job get here, also those outside of the partition

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.ranks)

    @property
    def dim(self) -> int:
        """The number of axes of the grid."""
        return len(self.shape)

    @property
    def active(self) -> bool:
        """Whether this worker belongs to the partition."""
        # not once and for all: in another job this worker may have another number
        return transport.this_worker() in self._places

    @property
    def rank(self) -> int | None:
        """The place of this worker among `ranks`, or None when it is not active."""
        return self.place(transport.this_worker())

    @property
    def index(self) -> tuple[int, ...] | None:
        """The coordinates of this worker on the grid, or None when it is not active."""
        return self.coordinates(transport.this_worker())

    def place(self, worker: int) -> int | None:
        """The place of a worker of the job among `ranks`, or None when it is not there."""
        return self._places.get(worker)

    def coordinates(self, worker: int) -> tuple[int, ...] | None:
        """The coordinates of a worker of the job, or None if it is not in the partition."""
        place = self.place(worker)
        return None if place is None else boxes.unravel(place, self.shape)

    def worker_at(self, coordinates: Sequence[int]) -> int:
        """The worker at these coordinates, by its number in the job."""
        return self.ranks[boxes.ravel(coordinates, self.shape)]

    def axes(self, given: Iterable[int] | int) -> tuple[int, ...]:
        """Axis numbers as 0 ≤ axis < dim, in ascending order; negative ones count from the end."""
        axes = [as_int(axis) for axis in (given if isinstance(given, Iterable) else (given,))]
        for axis in axes:
            if not -self.dim <= axis < self.dim:
                raise ValueError(
                    f"axis {axis} is out of range for a partition of shape {self.shape}: "
                    f"it has axes 0 to {self.dim - 1}"
                )
        found = sorted({axis % self.dim for axis in axes})
        if len(found) < len(axes):
            raise ValueError(f"an axis is named twice in {tuple(axes)}")
        return tuple(found)

    def create_partition_inclusive(self, ranks: Iterable[int]) -> Partition:
        """The partition of some of these workers, named by their places here, in this order.

        >>> import tessel
        >>> tessel.world().create_partition_inclusive([0]).ranks
        (0,)
        """
        places = [as_int(rank) for rank in ranks]
        for place in places:
            if not 0 <= place < self.size:
                raise ValueError(
                    f"rank {place} is out of range: this partition has {self.size} workers, "
                    f"ranks 0 to {self.size - 1}"
                )
        return Partition(tuple(self.ranks[place] for place in places), (len(places),))

    def create_partition_union(self, other: Partition) -> Partition:
        """The workers of both partitions, this one's first, in one row."""
        ranks = tuple(dict.fromkeys(self.ranks + other.ranks))
        return Partition(ranks, (len(ranks),))

    def create_cartesian_topology_partition(self, shape: Iterable[int]) -> Partition:
        """The same workers on a grid of this shape.

        >>> import tessel
        >>> tessel.world().create_cartesian_topology_partition([1, 1]).index
        (0, 0)
        """
        return Partition(self.ranks, tuple(shape))

    @classmethod
    def from_mesh(cls, mesh: Any) -> Partition:
        """The workers of a `DeviceMesh` on its grid: axis k is the mesh's dimension k.

        All workers of the job call this. A part of a mesh (`mesh["space"]`) has other workers on
        each of its rows: all workers make the partitions of all rows, and each gets its own.

        Args:
            mesh: a `torch.distributed.DeviceMesh`.

        Raises:
            ValueError: if rows of different workers overlap.
        """
        # In each call: workers may remember different rows, and must give the same answer.
        rows = transport.rows_of_meshes(mesh)
        ranks, shape = tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)
        if len({worker for row in rows for worker in row}) < sum(map(len, rows)):
            raise ValueError(
                "from_mesh: expected the same mesh on all workers, or rows of one mesh that do "
                f"not overlap, got rows of workers {', '.join(map(str, rows))}"
            )
        for row in rows:
            cls(row, (len(row),))  # for its group, which all workers make together
        return cls(ranks, shape)

    def to_mesh(self, device_type: str | None = None, names: Sequence[str] | None = None) -> Any:
        """These workers on their grid as a `torch.distributed.DeviceMesh`; kept for the job.

        All workers of the job call this, since torch makes groups for the mesh. Workers along each
        axis must be in ascending order, since torch sorts them.

        Args:
            device_type: "cpu" or "cuda"; None for "cuda" in a job with NCCL, else "cpu".
            names: names of its dimensions, one for each axis.
        """
        if names is not None and len(names) != self.dim:
            raise ValueError(f"to_mesh: expected {self.dim} names for {self}, got {names!r}")
        self.check_as_mesh()
        given = None if names is None else tuple(names)
        return transport.mesh_of(self.ranks, self.shape, device_type, given)

    def check_as_mesh(self) -> None:
        """Raise if torch would put the workers of a mesh with this grid into another order.

        Its groups sort their workers, and DTensor takes the position in a group for that on the
        grid.
        """
        for axis in range(self.dim):
            for row in self.rows([axis]):
                if row != tuple(sorted(row)):
                    raise ValueError(
                        f"workers {row} along axis {axis} of {self} are not in ascending order, "
                        f"and torch's DTensor would mix up their parts; use a partition with "
                        f"ascending workers along each axis"
                    )

    def rows(self, axes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The workers in rows: the workers of one row differ only along `axes`."""
        along = self.axes(axes)
        # one row for each place along the other axes
        starts = [(0,) if axis in along else range(n) for axis, n in enumerate(self.shape)]
        return tuple(
            tuple(
                self.worker_at(at)
                for at in product(
                    *(range(n) if a in along else (start[a],) for a, n in enumerate(self.shape))
                )
            )
            for start in product(*starts)
        )

    def slices(self, axes: Iterable[int]) -> tuple[Partition, ...]:
        """The rows of workers that differ only along `axes`, each a partition of its own."""
        sizes = tuple(self.shape[axis] for axis in self.axes(axes))
        return tuple(Partition(row, sizes) for row in self.rows(axes))

    @property
    def group(self) -> transport.Group:
        """The workers as a group that communicates; `prepare` makes it."""
        if self._group is None:
            raise RuntimeError(
                f"{self} has no process group yet; call `prepare()` on all workers first"
            )
        return self._group

    def prepare(self) -> transport.Group:
        """Make the group in the current job, on all of its workers together, and return it.

        Constructors do so. A partition that was loaded has no group before; one that is used in
        another job than it was made in has another group there.
        """
        group = transport.group_of(self.ranks)
        object.__setattr__(self, "_group", group)
        return group

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # it is immutable, and keeps its group

    def _find_places(self) -> None:
        places = {worker: place for place, worker in enumerate(self.ranks)}
        object.__setattr__(self, "_places", places)

    def __setstate__(self, state: dict[str, tuple[int, ...]]) -> None:
        self.__dict__.update(state)
        self._find_places()

    def __getstate__(self) -> dict[str, tuple[int, ...]]:
        return {"ranks": self.ranks, "shape": self.shape}

    def __repr__(self) -> str:
        grid = "×".join(map(str, self.shape)) or "1"
        return f"Partition({grid} on workers {self.listing})"

    @property
    def is_supposed(self) -> bool:
        """Whether some of these workers are placeholders, marked by negative numbers.

        Rules are followed on such partitions to see what they would do; nothing can be sent.
        """
        return min(self.ranks) < 0

    @property
    def listing(self) -> str:
        """The workers in words."""
        first, last = self.ranks[0], self.ranks[-1]
        if self.size > 2 and self.ranks == tuple(range(first, last + 1)):
            return f"{first}..{last}"
        return ", ".join(map(str, self.ranks))


class Outline(Partition):
    """A partition as seen by a worker outside of it: from the first place, without values."""

    @property
    def active(self) -> bool:
        return True

    def place(self, worker: int) -> int | None:
        return 0 if worker == transport.this_worker() else super().place(worker)


class HypotheticalPartition(Partition):
    """Workers 0, 1, … on a grid that need not exist: plans are made for them, and nothing is sent.

    >>> HypotheticalPartition((100, 1000)).coordinates(2001)
    (2, 1)
    """

    def __init__(self, shape: Iterable[int]) -> None:
        # A range, and no list of places, so that any number of workers costs nothing.
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "ranks", range(math.prod(self.shape)))

    @property
    def active(self) -> bool:
        return False

    def place(self, worker: int) -> int | None:
        return worker if worker in self.ranks else None

    def create_cartesian_topology_partition(self, shape: Iterable[int]) -> Partition:
        return HypotheticalPartition(shape)

    def _find_places(self) -> None:
        """There are no places to find."""


def world() -> Partition:
    """The partition of all workers of the job, in a row.

    Under `torchrun`, `tessel run`, `srun` or `mpirun` this joins the job; in a plain
    `python script.py` it is a world of one worker, on which everything works and nothing is sent.

    >>> import tessel
    >>> tessel.world().ranks
    (0,)
    """
    transport.start()
    workers = transport.num_workers()
    return Partition(tuple(range(workers)), (workers,))
