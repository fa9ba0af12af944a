"""Layouts: which box of a global index space each worker of a partition stores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from operator import index as as_int
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from tessel import transport
from tessel.core import boxes
from tessel.core.boxes import Balanced, Box, Interval, Shape
from tessel.core.partition import Partition

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """How one dimension is split over the grid: `intervals[k]` at the k-th place along `axes`.

    A dimension that no axis splits has `axes == ()` and one interval. Intervals may be of any
    length, empty, and may overlap, as those of a halo do.
    """

    axes: tuple[int, ...]
    intervals: Sequence[Interval]

    @classmethod
    def whole(cls, length: int) -> Cut:
        """The cut of a dimension that no axis splits."""
        return cls((), ((0, length),))

    def __hash__(self) -> int:
        # This distinguishes most cuts, and costs as little for many intervals as for two.
        return hash((self.axes, len(self.intervals), self.intervals[0]))

    @cached_property
    def span(self) -> Interval | None:
        """The interval from the first to the last index, or None if one stops before it starts."""
        if isinstance(self.intervals, Balanced):
            return 0, self.intervals.length
        if any(start > stop for start, stop in self.intervals):
            return None
        starts, stops = ([part[side] for part in self.intervals] for side in (0, 1))
        return min(starts), max(stops)

    def is_consecutive(self, length: int) -> bool:
        """Whether the intervals are consecutive, with each index of a dimension in one of them.

        >>> Cut((0,), ((0, 2), (2, 2), (2, 5))).is_consecutive(5)
        True
        """
        stops = [0, *(stop for _, stop in self.intervals)]
        return stops == [*(start for start, _ in self.intervals), length]


@dataclass(frozen=True)
class Layout:
    """The box of a global tensor that each worker stores, and the meaning of copies.

    Along an axis of the grid that splits no dimension, workers hold copies. They are *separate*
    (independent values, all counted by the inner product) unless the axis is named in `shared`
    (one value that is stored several times, counted once).

    Args:
        partition: the workers on their grid.
        shape: the global shape.
        cuts: one `Cut` for each dimension.
        shared: the axes along which copies are one shared value.
        blocks: for layouts of `Layout.blocks_along` only, the local shapes.

    >>> import tessel
    >>> layout = tessel.Layout.balanced(tessel.world(), (6,))
    >>> layout.box(), layout.local_shape
    (((0, 6),), (6,))
    """

    partition: Partition
    shape: Shape
    cuts: tuple[Cut, ...]
    shared: tuple[int, ...] = ()
    blocks: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        if len(self.cuts) != len(self.shape):
            raise ValueError(
                f"a layout needs one cut for each dimension: shape {self.shape} has "
                f"{len(self.shape)}, got {len(self.cuts)} cuts"
            )
        used = [axis for cut in self.cuts for axis in cut.axes]
        for axis in (*used, *self.shared):
            if not 0 <= axis < self.partition.dim:
                raise ValueError(f"axis {axis} is out of range for {self.partition}")
        for dim, (cut, length) in enumerate(zip(self.cuts, self.shape, strict=True)):
            parts = math.prod(self.partition.shape[axis] for axis in cut.axes)
            if len(cut.intervals) != parts:
                raise ValueError(
                    f"dimension {dim} is split by axes {cut.axes} of {self.partition} into {parts} "
                    f"parts, got {len(cut.intervals)} intervals"
                )
            # Plans make many layouts of the same cuts, whose intervals are checked once.
            if cut.span is not None and cut.span[0] >= 0 and cut.span[1] <= length:
                continue
            for start, stop in cut.intervals:
                if not 0 <= start <= stop <= length:
                    raise ValueError(
                        f"interval {(start, stop)} is out of bounds for dimension {dim} of length "
                        f"{length}"
                    )
        if len(set(used) | set(self.shared)) < len(used) + len(self.shared):
            raise ValueError(
                f"an axis can split only one dimension, or hold copies: axes {used} split "
                f"dimensions, axes {list(self.shared)} are shared"
            )

    @classmethod
    def balanced(cls, partition: Partition, shape: Iterable[int]) -> Layout:
        """Axis d of the partition splits dimension d into parts that differ by at most one."""
        lengths = tuple(as_int(length) for length in shape)
        _check_dims(partition, len(lengths))
        return cls.split(partition, lengths, range(partition.dim))

    @classmethod
    def split(
        cls,
        partition: Partition,
        shape: Iterable[int],
        axes: Sequence[int | None],
        shared: Iterable[int] = (),
    ) -> Layout:
        """Axis `axes[d]` splits dimension d evenly, None leaves it whole; copies along the others.

        >>> import tessel
        >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
        >>> tessel.Layout.split(P, (4, 6), (1, None), shared=[0]).local_shape
        (4, 6)
        """
        lengths = tuple(as_int(length) for length in shape)
        if len(axes) != len(lengths):
            raise ValueError(f"expected one axis or None for each of {lengths}, got {axes}")
        by = tuple(None if axis is None else as_int(axis) for axis in axes)
        transport.look_for_job()  # in another job this worker may have another part
        found = _split(partition, lengths, by, tuple(as_int(axis) for axis in shared))
        # an equal one may have no group yet, or that of another job
        return found if found.partition is partition else replace(found, partition=partition)

    @classmethod
    def from_lengths(cls, partition: Partition, lengths: Sequence[Sequence[int]]) -> Layout:
        """Axis d of the partition splits dimension d into parts of the lengths `lengths[d]`."""
        _check_dims(partition, len(lengths))
        cuts = tuple(Cut((axis,), boxes.consecutive(parts)) for axis, parts in enumerate(lengths))
        return cls(partition, tuple(map(sum, lengths)), cuts)

    @classmethod
    def from_local_shapes(cls, partition: Partition, shapes: Mapping[int, Shape]) -> Layout:
        """The layout of a tensor whose worker w stores a part of shape `shapes[w]`."""
        _check_dims(partition, len(shapes[partition.ranks[0]]))
        lengths = []
        for dim, parts in enumerate(partition.shape):
            # the workers along this axis, at the first place of all others
            places = [
                [k if axis == dim else 0 for axis in range(partition.dim)] for k in range(parts)
            ]
            lengths.append([shapes[partition.worker_at(place)][dim] for place in places])
        layout = cls.from_lengths(partition, lengths)
        for worker in partition.ranks:
            if layout.shape_on(worker) != shapes[worker]:
                raise ValueError(
                    f"the local shapes do not fit together on {partition}: worker {worker} has "
                    f"{shapes[worker]}, but its neighbours on the grid imply "
                    f"{layout.shape_on(worker)}"
                )
        return layout

    @classmethod
    def whole(cls, partition: Partition, shape: Iterable[int], *, shared: bool = False) -> Layout:
        """The whole tensor on every worker, as separate copies or as one shared value."""
        lengths = tuple(shape)
        everywhere = range(partition.dim) if shared else ()
        return cls.split(partition, lengths, [None] * len(lengths), everywhere)

    @classmethod
    @transport.kept_in_job
    def of_cuts(cls, partition: Partition, shape: Shape, cuts: tuple[Cut, ...]) -> Layout:
        """The layout with these cuts; along axes that split nothing, workers share one value.

        >>> import tessel
        >>> tessel.Layout.of_cuts(tessel.world(), (6,), (Cut.whole(6),)).shared
        (0,)
        """
        taken = {axis for cut in cuts for axis in cut.axes}
        shared = tuple(axis for axis in range(partition.dim) if axis not in taken)
        return cls(partition, shape, cuts, shared)

    @classmethod
    def blocks_along(
        cls, partition: Partition, axes: tuple[int, ...], local_shapes: Sequence[Shape]
    ) -> Layout:
        """A tensor of any shape for each place along `axes`, separate copies along the others.

        The index space is these tensors, flattened, one after the other.
        """
        intervals = boxes.consecutive(map(math.prod, local_shapes))
        total = intervals[-1][1]
        return cls(partition, (total,), (Cut(axes, intervals),), (), tuple(local_shapes))

    def grow(self, halo: Sequence[tuple[int, int]]) -> Layout:
        """The layout with boxes widened by `halo[d] = (left, right)`, up to the global border."""
        if len(halo) != len(self.shape):
            raise ValueError(f"expected one pair for each of {self.shape}, got {halo}")
        cuts = tuple(
            Cut(cut.axes, tuple(boxes.grow(part, left, right, length) for part in cut.intervals))
            for cut, (left, right), length in zip(self.cuts, halo, self.shape, strict=True)
        )
        return replace(self, cuts=cuts)

    def resized(self, shape: Iterable[int]) -> Layout:
        """The layout of a tensor of another shape on the same axes of the grid, in balanced parts.

        >>> import tessel
        >>> tessel.Layout.from_lengths(tessel.world(), [[6]]).resized((3,)).local_shape
        (3,)
        """
        lengths = tuple(shape)
        if lengths not in self._resized:
            cuts = tuple(
                Cut(cut.axes, boxes.balanced_as(cut.intervals, as_int(length)))
                for cut, length in zip(self.cuts, lengths, strict=True)
            )
            found = replace(self, shape=lengths, cuts=cuts)
            self._resized[lengths] = None if found == self else found
        return self._resized[lengths] or self

    @cached_property
    def _resized(self) -> dict[Shape, Layout | None]:
        return {}  # those that were asked for; None for itself, which would be a cycle

    @cached_property
    def _hash(self) -> int:
        return hash((self.partition, self.shape, self.cuts, self.shared, self.blocks))

    def __hash__(self) -> int:
        return self._hash  # computed once: layouts are keys in every call

    def gathered(self, dims: Iterable[int]) -> Layout:
        """The layout with some dimensions whole, shared along the axes that split them.

        >>> import tessel
        >>> layout = tessel.Layout.balanced(tessel.world(), (6,))
        >>> layout.gathered([0]).shared
        (0,)
        """
        whole = tuple(dims)
        if whole not in self._gathered:
            cuts = list(self.cuts)
            for dim in whole:
                cuts[dim] = Cut.whole(self.shape[dim])
            axes = {axis for dim in whole for axis in self.cuts[dim].axes}
            shared = tuple(sorted({*self.shared, *axes}))
            found = replace(self, cuts=tuple(cuts), shared=shared)
            self._gathered[whole] = None if found == self else found
        return self._gathered[whole] or self

    @cached_property
    def _gathered(self) -> dict[tuple[int, ...], Layout | None]:
        return {}  # as above: rules ask for the same again and again

    @transport.kept_in_job
    def split_like(self, shape: Shape) -> Layout:
        """The layout for another shape: the same cuts, balanced ones where the length differs."""
        even = self.resized(shape)
        cuts = tuple(
            old if n == m else new
            for old, new, n, m in zip(self.cuts, even.cuts, self.shape, shape, strict=True)
        )
        return replace(even, cuts=cuts)

    @transport.kept_in_job
    def recut(self, dim: int, cut: Cut, length: int | None = None) -> Layout:
        """The layout with another cut of one dimension, and another length if one is given."""
        shape = list(self.shape)
        shape[dim] = shape[dim] if length is None else length
        cuts = (*self.cuts[:dim], cut, *self.cuts[dim + 1 :])
        return replace(self, shape=tuple(shape), cuts=cuts)

    @transport.kept_in_job
    def reshaped_along(self, shape: Shape, dims: tuple[int, ...]) -> Layout:
        """The layout with other lengths of dimensions that are whole."""
        cuts = tuple(
            Cut(cut.axes, ((0, shape[dim]),)) if dim in dims else cut
            for dim, cut in enumerate(self.cuts)
        )
        return replace(self, shape=shape, cuts=cuts)

    @transport.kept_in_job
    def with_whole(self, dim: int, length: int) -> Layout:
        """The layout with one more dimension, which is whole."""
        shape = (*self.shape[:dim], length, *self.shape[dim:])
        cuts = (*self.cuts[:dim], Cut.whole(length), *self.cuts[dim:])
        return Layout(self.partition, shape, cuts, self.shared)

    @transport.kept_in_job
    def of_dim(self, dim: int) -> Layout:
        """The layout of a vector that has a value for each index of a dimension."""
        return Layout(self.partition, (self.shape[dim],), (self.cuts[dim],), self.shared)

    @transport.kept_in_job
    def hosted(self, dims: tuple[int, ...], first: tuple[int, ...] = ()) -> Layout:
        """The layout with some dimensions whole, on as many workers as possible.

        The axes that split them go over to the longest other dimensions, their hosts, of those in
        `first` if one is long enough. Along an axis without a host workers share one value.

        >>> import tessel
        >>> layout = tessel.Layout.balanced(tessel.world(), (6,))
        >>> layout.hosted((0,)) is layout
        True
        """
        if not any(map(self.is_split, dims)):
            return self
        sizes = self.partition.shape
        cuts = list(self.cuts)
        for dim in dims:
            cuts[dim] = Cut.whole(self.shape[dim])
        shared = list(self.shared)
        for axis in (axis for dim in dims for axis in self.cuts[dim].axes):
            hosts = [
                dim
                for dim, cut in enumerate(cuts)
                if dim not in dims and self.shape[dim] >= len(cut.intervals) * sizes[axis]
            ]
            if not hosts or sizes[axis] == 1:
                shared.append(axis)
                continue
            # the longest parts, so that what remains of them is even
            hosts = [dim for dim in hosts if dim in first] or hosts
            host = max(hosts, key=lambda dim: self.shape[dim] / len(cuts[dim].intervals))
            axes = (*cuts[host].axes, axis)
            count = len(cuts[host].intervals) * sizes[axis]
            cuts[host] = Cut(axes, boxes.balanced(self.shape[host], count))
        return replace(self, cuts=tuple(cuts), shared=tuple(sorted(shared)))

    def embedded(self, before: Sequence[int], after: Sequence[int]) -> Layout:
        """The layout of a longer tensor with the same parts: nobody stores the additional indices.

        A `Move` from it gives zeros there: this is how a tensor is padded.
        """
        cuts = tuple(
            Cut(cut.axes, tuple(boxes.shift(part, offset) for part in cut.intervals))
            for cut, offset in zip(self.cuts, before, strict=True)
        )
        shape = tuple(a + n + b for a, n, b in zip(before, self.shape, after, strict=True))
        return replace(self, shape=shape, cuts=cuts)

    @cached_property
    def separate(self) -> tuple[int, ...]:
        """The axes along which copies are separate values."""
        taken = {axis for cut in self.cuts for axis in cut.axes} | set(self.shared)
        return tuple(axis for axis in range(self.partition.dim) if axis not in taken)

    @cached_property
    def is_whole(self) -> bool:
        """Whether every worker has the whole tensor, as one shared value; one worker always has."""
        sizes = self.partition.shape
        split = any(len(cut.intervals) > 1 for cut in self.cuts)
        return not split and all(sizes[axis] == 1 for axis in self.separate)

    @property
    def is_shared(self) -> bool:
        """Whether all axes hold copies of one value, also those of size one.

        Stricter than `is_whole`: a layout in parts stays one on a grid of a single worker.
        """
        return len(self.shared) == self.partition.dim

    @cached_property
    def summed(self) -> Layout:
        """The same boxes where separate copies are one shared value, their sum."""
        sizes = self.partition.shape
        if all(sizes[axis] == 1 for axis in self.separate):
            return self
        return replace(self, shared=tuple(sorted({*self.shared, *self.separate})))

    @cached_property
    def owns_once(self) -> bool:
        """Whether no index is stored as two separate values."""
        sizes = self.partition.shape
        return all(sizes[axis] == 1 for axis in self.separate) and all(
            boxes.disjoint(cut.intervals) for cut in self.cuts
        )

    def is_split(self, dim: int) -> bool:
        """Whether a dimension lies in several parts.

        >>> import tessel
        >>> tessel.Layout.balanced(tessel.world(), (6,)).is_split(0)
        False
        """
        return len(self.cuts[dim].intervals) > 1

    def places(self, coordinates: Coordinates) -> tuple[int, ...]:
        """For each dimension, which of its intervals the worker at these coordinates stores."""
        sizes = self.partition.shape
        return tuple(
            boxes.ravel([coordinates[a] for a in cut.axes], [sizes[a] for a in cut.axes])
            for cut in self.cuts
        )

    def box(self, worker: int | None = None) -> Box | None:
        """The box of a worker (this one by default), or None when it stores nothing."""
        number = transport.this_worker() if worker is None else worker
        if number not in self._boxes:
            coordinates = self.partition.coordinates(number)
            if coordinates is None:
                return None
            parts = zip(self.cuts, self.places(coordinates), strict=True)
            self._boxes[number] = tuple(cut.intervals[k] for cut, k in parts)
        return self._boxes[number]

    @cached_property
    def _boxes(self) -> dict[int, Box]:
        return {}  # those that were asked for

    def local_slice(self, worker: int | None = None) -> tuple[slice, ...]:
        """The indices of a worker's part (this one's by default) in the global tensor.

        They select a part of anything that is indexed as the tensor is: a grid of coordinates,
        wave numbers, an array in a file. A worker that stores nothing gets empty slices.

        >>> import tessel
        >>> tessel.Layout.balanced(tessel.world(), (6,)).local_slice()
        (slice(0, 6, None),)
        """
        box = self.box(worker)
        return tuple(slice(*part) for part in box or ((0, 0),) * len(self.shape))

    @cached_property
    def is_outside(self) -> bool:
        """Whether this worker is not in the partition."""
        return not self.partition.active

    @cached_property
    def counts(self) -> bool:
        """Whether inner products count this worker's part: that of the first of shared copies."""
        coordinates = self.partition.index
        return coordinates is not None and not any(coordinates[axis] for axis in self.shared)

    @cached_property
    def local_shape(self) -> Shape:
        """The shape of this worker's tensor; `(0,)` on workers outside of the partition."""
        return self.shape_on(None)

    def shape_on(self, worker: int | None) -> Shape:
        """The shape of a worker's tensor."""
        P = self.partition
        coordinates = P.index if worker is None else P.coordinates(worker)
        if coordinates is None:
            return (0,)
        if self.blocks:
            return self.blocks[self.places(coordinates)[0]]
        box = self.box(worker)
        assert box is not None
        return boxes.extent(box)

    def overlaps(self, box: Box) -> Iterator[tuple[Coordinates, Box]]:
        """The places on the grid (0 along shared axes) whose boxes meet `box`, and the overlaps."""
        hits = []  # for each dimension, the coordinates of intervals that meet `box`
        for cut, want in zip(self.cuts, box, strict=True):
            sizes = [self.partition.shape[axis] for axis in cut.axes]
            hits.append(
                [
                    (tuple(zip(cut.axes, boxes.unravel(k, sizes), strict=True)), part)
                    for k, own in enumerate(cut.intervals)
                    if (part := boxes.overlap(own, want))
                ]
            )
        # Separate copies of an index are terms of a sum, so each place that has one is listed. Of
        # shared copies any holder can give the value: the first place stands for all.
        copies = [range(self.partition.shape[axis]) for axis in self.separate]
        for chosen in product(*hits):
            met = tuple(part for _, part in chosen)
            coordinates = [0] * self.partition.dim
            for places, _ in chosen:
                for axis, coordinate in places:
                    coordinates[axis] = coordinate
            for copy in product(*copies):
                for axis, coordinate in zip(self.separate, copy, strict=True):
                    coordinates[axis] = coordinate
                yield tuple(coordinates), met

    def holders(self, coordinates: Coordinates) -> list[int]:
        """The workers that store the same value as the one here: all along the shared axes."""
        choices = [
            range(size) if axis in self.shared else (coordinates[axis],)
            for axis, size in enumerate(self.partition.shape)
        ]
        return [self.partition.worker_at(place) for place in product(*choices)]

    def local_part(self, tensor: Tensor) -> Tensor:
        """This worker's part of a global tensor that it has whole (a view).

        >>> import tessel, torch
        >>> tessel.Layout.balanced(tessel.world(), (3,)).local_part(torch.arange(3))
        tensor([0, 1, 2])
        """
        box = self.box()
        if box is None:
            return tensor.new_empty(0)
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"expected a tensor of shape {self.shape}, got {tuple(tensor.shape)}")
        return tensor[boxes.within(box, tuple((0, n) for n in self.shape))]

    def local_inner(self, x: Tensor, y: Tensor) -> Tensor:
        """This worker's share of `inner`: shared values count on one worker only."""
        # zero where nothing counts: every worker takes part in the sum of all shares
        return torch.vdot(x.reshape(-1), y.reshape(-1)) if self.counts else x.new_zeros(())

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """The inner product ⟨x, y⟩ of two tensors in this layout, on every worker of it.

        It is a number without a gradient.
        """
        mine = self.local_inner(x.detach(), y.detach())
        return self.partition.prepare().sum(mine) if self.partition.active else mine

    @property
    def identity(self) -> str:
        """A complete description in words, the same on every worker."""
        values = (getattr(self, each.name) for each in fields(self) if each.name != "partition")
        return repr((self.partition.ranks, self.partition.shape, *values))

    @property
    def brief(self) -> str:
        """Each dimension's length and its number of parts, for tables.

        >>> import tessel
        >>> tessel.Layout.balanced(tessel.world(), (6,)).brief
        '[6]'
        """
        counts = [len(cut.intervals) for cut in self.cuts]
        parts = (f"{n}/{k}" if k > 1 else str(n) for n, k in zip(self.shape, counts, strict=True))
        return f"[{' × '.join(parts)}]"

    def __getstate__(self) -> dict[str, Any]:
        # without what was worked out for this worker, as its own shape
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __repr__(self) -> str:
        grid = "×".join(map(str, self.partition.shape)) or "1"
        copies = f", shared along {self.shared}" if self.shared else ""
        lengths = [tuple(stop - start for start, stop in cut.intervals) for cut in self.cuts]
        parts = " × ".join(str(n[0]) if len(n) == 1 else str(n) for n in lengths)
        along = [axis for cut in self.cuts for axis in cut.axes]
        if along != sorted(along):
            parts += f" along axes {tuple(along)}"
        workers = self.partition.listing
        return f"Layout({self.shape}, {grid} on workers {workers}, parts {parts}{copies})"


def zero_volume_tensor(
    b: int | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """An empty tensor, what a worker passes to a movement when it has no part of the input.

    Args:
        b: the batch size, for code on this worker that asks `x.shape[0]`: the shape is then
            (b, 0), and (0,) without. Movements and layers take either.
        dtype, requires_grad, device: as for `torch.empty`.

    >>> import tessel
    >>> tessel.zero_volume_tensor().shape, tessel.zero_volume_tensor(16).shape
    (torch.Size([0]), torch.Size([16, 0]))
    """
    if b is not None and (not isinstance(b, SupportsIndex) or as_int(b) < 0):
        kind = f"; for its kind write zero_volume_tensor(dtype={b})"
        raise ValueError(
            "zero_volume_tensor takes the batch size b first, an integer of at least 0, got "
            f"{b!r}{kind if isinstance(b, torch.dtype) else ''}"
        )
    shape = (0,) if b is None else (as_int(b), 0)
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)


@transport.kept_in_job  # rules ask for the same again and again, with its box and local shape
def _split(
    partition: Partition, lengths: Shape, axes: tuple[int | None, ...], shared: tuple[int, ...]
) -> Layout:
    partition.axes(axis for axis in axes if axis is not None)
    cuts = tuple(
        Cut.whole(length)
        if axis is None
        else Cut((axis % partition.dim,), boxes.balanced(length, partition.shape[axis]))
        for length, axis in zip(lengths, axes, strict=True)
    )
    return Layout(partition, lengths, cuts, partition.axes(shared))


def _check_dims(partition: Partition, dims: int) -> None:
    if partition.dim != dims:
        raise ValueError(
            f"expected a partition with as many axes as the tensor has dimensions, got {partition} "
            f"for {dims} dimensions"
        )
