"""Tilings: the patches that each worker computes, what it reads for them, and where it writes.

Patches are those of the whole image, so that results do not depend on the number of workers.

- `Tiling`, for any strategy and layout: each worker has the whole image, and images are summed.
- `GatheredCores`, for a whole image on every worker: only the cores of patches are sent.
- `LocalWindows`, for an image in parts: a worker has the windows whose cores are in its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

from torch import Tensor

from tessel.core import Box, Cut, Interval, Layout, Move, boxes, shared_whole
from tessel.imaging.context import local_indices
from tessel.imaging.distribution_strategies.strategies import (
    BasicStrategy,
    CoreAndRead,
    Pairs,
    PriorWindow,
    SmartTilingStrategy,
    WindowStrategy,
    crossed,
    parts,
)


@dataclass(frozen=True)
class Tiling:
    """The patches of each worker, what it reads for them, and what it writes.

    This one is for any strategy: every worker has the whole image and puts its patches into zeros.

    Args:
        layout: the layout of the image.
        strategy: how the image is cut.
        sharding: how patches are assigned to workers.
    """

    layout: Layout
    strategy: Any
    sharding: str

    @property
    def count(self) -> int:
        """The number of patches of all workers."""
        return int(self.strategy.get_num_patches())

    @cached_property
    def read(self) -> Layout:
        """The layout that each worker reads."""
        return Layout.whole(self.layout.partition, self.layout.shape)

    @cached_property
    def written(self) -> Layout:
        """The layout that each worker writes."""
        return self.read

    def indices(self) -> list[int]:
        """The numbers of this worker's patches, those of one shape consecutively."""
        partition = self.layout.partition
        assert partition.rank is not None
        return local_indices(self.count, partition.rank, partition.size, self.sharding)

    def patches(self, read: Tensor, indices: list[int]) -> Pairs:
        """The patches with these numbers, from the box that this worker reads."""
        found: Pairs = self.strategy.get_local_patches(read, list(indices))
        return found

    def put(self, out: Tensor, pairs: Pairs) -> None:
        """Write the prior's results for patches to their places."""
        self.strategy.reduce_patches(out, pairs)

    def put_together(
        self,
        function: Callable[[Tensor], Tensor],
        read: Tensor,
        indices: list[int],
        one_by_one: bool = False,
    ) -> Tensor:
        """The box that this worker writes, computed batch by batch, or patch by patch."""
        out = read.new_zeros(self.written.local_shape)
        pairs = self.patches(read, indices)
        place, kept = 0, Pairs()
        in_turn = getattr(self.strategy, "reduces_in_turn", False)
        patches = [patch for _, patch in pairs]
        together = [[each] for each in patches] if one_by_one else [patches]
        for batch in chain.from_iterable(map(self.strategy.apply_batching, together)):
            result, start = function(batch), 0
            while start < len(result) and place < len(pairs):
                number, patch = pairs[place]
                kept.append((number, result[start : start + len(patch)]))
                start, place = start + len(patch), place + 1
            if start != len(result):
                raise ValueError(
                    "apply_batching must return batches of whole patches, concatenated along the "
                    f"first dimension: got a batch of length {len(result)} for patches of total "
                    f"length {start}"
                )
            if in_turn:  # so that only the results of one batch are kept
                self.put(out, kept)
                kept = []
        if place < len(pairs):
            raise ValueError(
                f"{self.strategy!r}: apply_batching returned fewer patches than it was given"
            )
        # A user's strategy may need all patches at once, and is also called without any.
        if not in_turn:
            self.put(out, kept)
        return out

    def finish(self, written: Tensor) -> Tensor:
        """This worker's part of the image: the sum of all workers' results."""
        return self._write.apply(written)

    @cached_property
    def _write(self) -> Move:
        return Move(self.written, self.layout)


@dataclass(frozen=True)
class GatheredCores(Tiling):
    """A tiling of an image that is whole on every worker, with cores that cover it once.

    Each worker writes the cores of its windows consecutively to a row; all workers get all rows,
    and copy them to their places: this sends half as much as a sum over whole images.
    """

    @cached_property
    def written(self) -> Layout:
        """The layout of the rows of all workers."""
        lengths = [sum(map(self._size, own)) for own in self._numbers]
        return Layout.from_lengths(self.layout.partition, [lengths])

    def put(self, out: Tensor, pairs: Pairs) -> None:
        """Write the cores of patches to their places in this worker's row."""
        for i, patch in pairs:
            window = self.strategy.windows[i]
            inside = patch[self.strategy.region(window.core, window.read)]
            out[self._places[i]] = inside.reshape(-1)

    def finish(self, written: Tensor) -> Tensor:
        rows = self._write.apply(written)
        # Rows are in the order of the workers, and the cores in each in that of their numbers.
        image, start = rows.new_zeros(self.layout.shape), 0
        for i in chain.from_iterable(self._numbers):
            core = self.strategy.windows[i].core
            part = image[self.strategy.region(core, self.strategy.whole)]
            stop = start + part.numel()
            part.copy_(rows[start:stop].reshape(part.shape))
            start = stop
        return image

    @cached_property
    def _write(self) -> Move:
        partition = self.layout.partition
        return Move(self.written, shared_whole(partition, self.written.shape))

    @cached_property
    def _numbers(self) -> list[list[int]]:
        """The numbers of each worker's windows."""
        workers = self.layout.partition.size
        return [local_indices(self.count, k, workers, self.sharding) for k in range(workers)]

    def _size(self, i: int) -> int:
        """The number of values of the core of a window, including dimensions that are not cut."""
        uncut = prod(self.layout.shape) // prod(self.strategy.lengths)
        return uncut * boxes.volume(self.strategy.windows[i].core)

    @cached_property
    def _places(self) -> dict[int, slice]:
        """The places of this worker's cores in its row."""
        rank = self.layout.partition.rank
        assert rank is not None
        own = self._numbers[rank]
        row = boxes.consecutive(map(self._size, own))
        return {i: slice(*at) for i, at in zip(own, row, strict=True)}


@dataclass(frozen=True)
class LocalWindows(Tiling):
    """A tiling with each window on the worker whose part contains the center of its core.

    Dimensions that are not cut are whole in each window, except the batch, which stays split.

    Args:
        windows: the windows, in the order of their numbers.
    """

    windows: tuple[PriorWindow, ...] = ()

    @property
    def count(self) -> int:
        return len(self.windows)

    @cached_property
    def read(self) -> Layout:
        """The layout that each worker reads: from the first to the last index of its windows."""
        return self._layout(lambda tiles: [read for _, read in tiles])

    @cached_property
    def written(self) -> Layout:
        """The layout that each worker writes."""
        if self.strategy.overlap:
            return self.read
        return self._layout(lambda tiles: [core for core, _ in tiles])

    def indices(self) -> list[int]:
        """The numbers of this worker's windows, those of one shape consecutively."""
        box = self.read.box()
        if box is None or boxes.volume(box) == 0:
            return []
        coordinates = self.layout.partition.index
        assert coordinates is not None
        places = self.read.places(coordinates)
        own = crossed([self._tiles[dim][places[dim]] for dim in self.strategy.dims])
        numbers = {window: i for i, window in enumerate(self.windows)}
        return sorted((numbers[window] for window in own), key=lambda i: self.windows[i].shape)

    def patches(self, read: Tensor, indices: list[int]) -> Pairs:
        """The windows with these numbers, from the box that this worker reads."""
        box, _ = self._boxes
        return [(i, read[self.strategy.region(self.windows[i].read, box)]) for i in indices]

    def put(self, out: Tensor, pairs: Pairs) -> None:
        """Write the prior's results for windows to their places."""
        _, box = self._boxes
        for i, patch in pairs:
            self.strategy.put_back(out, patch, self.windows[i], box)

    @cached_property
    def _tiles(self) -> dict[int, list[list[CoreAndRead]]]:
        """For each dimension that is cut, the tiles of each place along its axes."""
        found = {}
        copies = prod(self.layout.partition.shape[axis] for axis in self.layout.shared)
        for position, dim in enumerate(self.strategy.dims):
            tiles = list(dict.fromkeys((w.core[position], w.read[position]) for w in self.windows))
            places = [
                [tile for tile in tiles if start <= sum(tile[0]) // 2 < stop]
                for start, stop in self.layout.cuts[dim].intervals
            ]
            # Copies of a part, along shared axes of the grid, divide the windows along the first
            # cut dimension, so that none is computed twice.
            if position == 0:
                places = [
                    place[slice(*some)]
                    for place in places
                    for some in boxes.balanced(len(place), copies)
                ]
            found[dim] = places
        return found

    def _layout(self, intervals: Callable[[list[CoreAndRead]], list[Interval]]) -> Layout:
        """The layout of each worker's hull of these intervals of its windows."""
        cuts = []
        first = self.strategy.dims[0]
        for dim, (cut, length) in enumerate(zip(self.layout.cuts, self.layout.shape, strict=True)):
            if dim in self._tiles:
                axes = (*cut.axes, *self.layout.shared) if dim == first else cut.axes
                some = (list(zip(*intervals(tiles), strict=True)) for tiles in self._tiles[dim])
                hulls = tuple((min(each[0]), max(each[1])) if each else (0, 0) for each in some)
                cuts.append(Cut(axes, hulls))
            elif dim == 0 or len(cut.intervals) == 1:
                cuts.append(cut)
            # A dimension that is split and not cut is read whole, by the workers at the first place
            # of its axis: a prior needs all channels. The others have no windows.
            else:
                cuts.append(Cut(cut.axes, ((0, length), *[(0, 0)] * (len(cut.intervals) - 1))))
        return replace(self.layout, cuts=tuple(cuts), shared=())

    @cached_property
    def _boxes(self) -> tuple[Box, Box]:
        """The boxes that this worker reads and writes, along the dimensions that are cut."""
        read, written = self.read.box(), self.written.box()
        assert read is not None and written is not None
        dims = self.strategy.dims
        return tuple(read[dim] for dim in dims), tuple(written[dim] for dim in dims)


def tiling_of(layout: Layout, strategy: Any, sharding: str) -> Tiling:
    """The tiling of an image in this layout that sends the least."""
    # With a whole image each worker reads any window without a message: they are divided evenly.
    if layout.is_shared:
        # Only of these strategies it is known that cores cover the image once: others may overlap.
        is_ours = type(strategy) in (SmartTilingStrategy, BasicStrategy)
        if layout.partition.size > 1 and is_ours and not strategy.overlap:
            return GatheredCores(layout, strategy, sharding)
    elif isinstance(strategy, WindowStrategy):
        windows = list(strategy.windows)
        if getattr(strategy, "patch_size", 0) is None and not strategy.overlap:
            # One window for each part and its halo: for a convolutional network as prior, this is
            # the halo exchange of its receptive field.
            cuts = [layout.cuts[dim].intervals for dim in strategy.dims]
            filled = [[part for part in cut if part[0] < part[1]] for cut in cuts]
            windows = parts(filled, strategy.lengths, strategy.halo)
        return LocalWindows(layout, strategy, sharding, tuple(windows))
    return Tiling(layout, strategy, sharding)
