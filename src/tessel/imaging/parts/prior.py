"""Priors patch by patch: each worker reads its patches of the image, and answers for their cores.

Patches are those of the whole image, so that results do not depend on the number of workers. Three
tilings say who has which patches, what each worker reads for them, and where the results go:

- `LocalWindows`, of an image in parts: a worker has the windows whose cores lie in its part.
- `GatheredCores`, of a whole image on every worker: cores alone are sent around.
- `AnyPatches`, of any strategy and layout: whole images are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Protocol

from torch import Tensor

from tessel.core import boxes
from tessel.core.boxes import Box, Interval, Region
from tessel.core.layout import Cut, Layout
from tessel.core.linop import LinearOperator
from tessel.core.move import Move
from tessel.core.shared import anchored_zeros, grad_alike
from tessel.distributed.agreeing import agree
from tessel.distributed.movements import copying
from tessel.imaging.distribution_strategies.strategies import (
    BasicStrategy,
    Pairs,
    SmartTilingStrategy,
)
from tessel.imaging.parameters import (
    Copies,
    computing_with,
    depending_on,
    described,
    learned,
    learned_arguments,
    needs_grad,
)
from tessel.imaging.sharding import local_indices
from tessel.imaging.tiling import PriorWindow, crossed

Tile = tuple[Interval, Interval]  # a core and what is read for it, along one dimension


class Tiling(Protocol):
    """Which patches each worker has, what it reads for them, and what it answers for."""

    @property
    def in_turn(self) -> bool:
        """Whether some patches may be put into their places at a time."""

    @property
    def count(self) -> int:
        """The number of patches of all workers."""

    @property
    def read(self) -> Layout:
        """What each worker reads."""

    @property
    def written(self) -> Layout:
        """What each worker answers for."""

    def indices(self) -> list[int]:
        """The numbers of this worker's patches, those of one shape one after the other."""

    def patches(self, read: Tensor, indices: list[int]) -> Pairs:
        """The patches of these numbers, from what this worker reads."""

    def put(self, out: Tensor, pairs: Pairs) -> None:
        """Put what the prior made of patches into its place."""

    def finish(self, written: Tensor) -> Tensor:
        """This worker's part of the image, from what all workers answer for."""


class PartitionedPrior:
    """A prior on an image in a layout.

    Forward:  x ↦ Σ_k R_kᵀ prox(R_k x), where R_k cuts out patch k.

    Args:
        layout: of the image. Axes along which it is shared divide the patches further.
        strategy: how the image is cut: one with `windows` along the dimensions `dims`, as
            "smart_tiling" and "basic" are; without a patch size, each part is one window. Any
            other strategy sees the whole image on every worker, which is gathered and summed
            back to the parts.
        sharding: how patches of any other strategy, or of an image that is whole on every worker,
            are given to workers.
    """

    def __init__(self, layout: Layout, strategy: Any, sharding: str = "round_robin") -> None:
        if tuple(strategy.signal_shape) != layout.shape:
            raise ValueError(
                f"the strategy {strategy!r} is for an image of {tuple(strategy.signal_shape)}, "
                f"and the parts are of {layout.shape}"
            )
        self.layout, self.strategy = layout, strategy
        self.is_whole = len(layout.shared) == layout.partition.dim
        anything = AnyPatches(layout, strategy, sharding)
        self._in_place: Tiling = anything  # leaves patches in their places in a whole image
        self.tiling: Tiling = anything
        if not self.is_whole and hasattr(strategy, "windows"):
            self.tiling = LocalWindows(layout, strategy, tuple(_windows(layout, strategy)))
        elif self.is_whole and layout.partition.size > 1 and _covers_once(strategy):
            self.tiling = GatheredCores(layout, strategy, sharding)
        self._read: LinearOperator = (
            copying(layout.partition, layout.shape)  # nothing moves, and nothing is copied
            if self.is_whole
            else Move(layout, self.tiling.read)
        )

    @property
    def num_patches(self) -> int:
        """How many patches all workers have together."""
        return self.tiling.count

    @cached_property
    def local_indices(self) -> list[int]:
        """The numbers of this worker's patches."""
        return self.tiling.indices() if self.layout.partition.active else []

    def apply(
        self,
        call: str,
        function: Callable[..., Tensor],
        x: Tensor,
        shared: Any = (),
        args: tuple[Any, ...] = (),
        settings: Mapping[str, Any] | None = None,
        gather: bool = True,
    ) -> Tensor:
        """This worker's part of what the prior makes of the image.

        Args:
            call: what is called, in the words of its user.
            function: `function(patches, *args, **settings)`, the prior on a batch of patches.
            x: this worker's part of the image.
            shared: the objects whose parameters `function` uses, the same on all workers.
            args, settings: of the call; tensors in them are the same on all workers.
            gather: False, of whole images: this worker's patches, and zeros elsewhere.
        """
        partition = self.layout.partition
        if not partition.active:
            return x
        arguments = args, dict(settings or {})
        tensors = [*learned_arguments(arguments), *learned(shared)]
        said = f"{call}{described(tensors)}"
        if not isinstance(x, Tensor) or tuple(x.shape) != self.layout.local_shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            problem = f": a part of shape {self.layout.local_shape} is needed, got {got}"
            agree(partition, f"{said}{problem}", x)
            raise ValueError(f"{said}{problem}")
        if partition.size > 1:
            ((_, terms),) = agree(partition, said, x)
            x = grad_alike(x, terms)
        copies = Copies()
        copies.add(tensors, partition)
        read = self._read.apply(x)
        tiling = self.tiling if gather else self._in_place
        with computing_with(copies, shared):
            own_args, own_settings = copies.instead(arguments)
            written = self._put_together(
                tiling, lambda batch: function(batch, *own_args, **own_settings), read
            )
        if needs_grad(read):  # a worker without patches takes part in the backward pass, too
            written = depending_on(written, anchored_zeros((), read))
        written = depending_on(written, copies.anchor)
        return tiling.finish(written) if gather else written

    def _put_together(
        self, tiling: Tiling, function: Callable[[Tensor], Tensor], read: Tensor
    ) -> Tensor:
        """What this worker's patches answer for."""
        out = read.new_zeros(tiling.written.local_shape)
        pairs = tiling.patches(read, self.local_indices)
        place, kept = 0, Pairs()
        for batch in self.strategy.apply_batching([patch for _, patch in pairs]):
            result = function(batch)
            if not isinstance(result, Tensor) or result.shape != batch.shape:
                got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise ValueError(
                    f"a prior gives a tensor of the shape that it got, {tuple(batch.shape)}, got "
                    f"{got}"
                )
            start = 0
            while start < len(result) and place < len(pairs):
                number, patch = pairs[place]
                kept.append((number, result[start : start + len(patch)]))
                start, place = start + len(patch), place + 1
            if start != len(result):
                raise ValueError(
                    f"a batch of apply_batching has whole patches, one after the other along the "
                    f"first dimension: got a batch of length {len(result)} for patches of {start} "
                    f"in all"
                )
            if tiling.in_turn:  # so that the results of one batch are kept at a time
                tiling.put(out, kept)
                kept = []
        if place < len(pairs):
            raise ValueError(f"{self.strategy!r}: apply_batching gave fewer patches than it got")
        if not tiling.in_turn:
            tiling.put(out, kept)
        return out


@dataclass(frozen=True)
class LocalWindows:
    """The windows of an image, each on the worker in whose part the middle of its core lies.

    Dimensions that are not cut are whole in each window, but for the batch, whose parts stay apart.

    Args:
        layout: of the image.
        strategy: what says which dimensions are cut, and how windows are blended.
        windows: in the order of their numbers.
    """

    layout: Layout
    strategy: Any
    windows: tuple[PriorWindow, ...]
    in_turn = True

    @property
    def count(self) -> int:
        return len(self.windows)

    @cached_property
    def read(self) -> Layout:
        """What each worker reads: from the first to the last index of its windows."""
        return self._layout(lambda tiles: _hull([read for _, read in tiles]))

    @cached_property
    def written(self) -> Layout:
        """What each worker answers for."""
        if self.strategy.overlap:
            return self.read
        return self._layout(lambda tiles: _hull([core for core, _ in tiles]))

    def indices(self) -> list[int]:
        """The numbers of this worker's windows, those of one shape one after the other."""
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
        """The windows of these numbers, from what this worker reads."""
        return [(i, read[self._region(self.windows[i].read, self.read.box())]) for i in indices]

    def put(self, out: Tensor, pairs: Pairs) -> None:
        """Put what the prior made of windows into its place."""
        box = self.written.box()
        for i, patch in pairs:
            window = self.windows[i]
            if self.strategy.overlap:
                weighted = self.strategy._weights(i, patch) * patch
                out[self._region(window.read, box)] += weighted
            else:
                inside = patch[self._along(window.inside)]
                out[self._region(window.core, box)] = inside

    def finish(self, written: Tensor) -> Tensor:
        """What windows of other workers answer for goes to the part in which it lies."""
        return self._write.apply(written)

    @cached_property
    def _write(self) -> Move:
        return Move(self.written, self.layout)

    @cached_property
    def _tiles(self) -> dict[int, list[list[Tile]]]:
        """For each dimension that is cut, the tiles of each place along its axes."""
        found = {}
        for position, dim in enumerate(self.strategy.dims):
            tiles = list(dict.fromkeys((w.core[position], w.read[position]) for w in self.windows))
            places = [
                [tile for tile in tiles if start <= sum(tile[0]) // 2 < stop]
                for start, stop in self.layout.cuts[dim].intervals
            ]
            # Copies of a part, along shared axes of the grid, divide the windows of its first
            # dimension, so that none is computed twice.
            found[dim] = (
                places if position else [some for place in places for some in self._divided(place)]
            )
        return found

    def _divided(self, tiles: list[Tile]) -> Iterator[list[Tile]]:
        """Tiles of the first dimension, given to the copies of a part."""
        count = prod(self.layout.partition.shape[axis] for axis in self.layout.shared)
        for start, stop in boxes.balanced(len(tiles), count):
            yield tiles[start:stop]

    def _layout(self, interval: Callable[[list[Tile]], Interval]) -> Layout:
        cuts = []
        first = self.strategy.dims[0]
        for dim, (cut, length) in enumerate(zip(self.layout.cuts, self.layout.shape, strict=True)):
            if dim in self._tiles:
                axes = (*cut.axes, *self.layout.shared) if dim == first else cut.axes
                cuts.append(Cut(axes, tuple(interval(tiles) for tiles in self._tiles[dim])))
            elif dim == 0 or len(cut.intervals) == 1:
                cuts.append(cut)
            # A dimension that is split and not cut is read whole, by the workers at the first place
            # of its axis: a prior sees all channels. The others have no windows.
            else:
                cuts.append(Cut(cut.axes, ((0, length), *[(0, 0)] * (len(cut.intervals) - 1))))
        return replace(self.layout, cuts=tuple(cuts), shared=())

    def _region(self, along: Box, box: Box | None) -> Region:
        """Where a box along the dimensions that are cut lies in a worker's tensor."""
        assert box is not None
        own = tuple(box[dim] for dim in self.strategy.dims)
        return self._along(boxes.within(along, own))

    def _along(self, region: Region) -> Region:
        chosen = dict(zip(self.strategy.dims, region, strict=True))
        return tuple(chosen.get(dim, slice(None)) for dim in range(len(self.layout.shape)))


@dataclass(frozen=True)
class AnyPatches:
    """Patches of any strategy, for which every worker has the whole image."""

    layout: Layout
    strategy: Any
    sharding: str

    @property
    def in_turn(self) -> bool:
        return getattr(self.strategy, "reduces_in_turn", False)

    @property
    def count(self) -> int:
        return int(self.strategy.get_num_patches())

    @cached_property
    def read(self) -> Layout:
        return Layout.whole(self.layout.partition, self.layout.shape)

    @property
    def written(self) -> Layout:
        return self.read

    def indices(self) -> list[int]:
        partition = self.layout.partition
        assert partition.rank is not None
        return local_indices(self.count, partition.rank, partition.size, self.sharding)

    def patches(self, read: Tensor, indices: list[int]) -> Pairs:
        found: Pairs = self.strategy.get_local_patches(read, list(indices))
        return found

    def put(self, out: Tensor, pairs: Pairs) -> None:
        self.strategy.reduce_patches(out, pairs)

    def finish(self, written: Tensor) -> Tensor:
        """The sum of what all workers put into zeros."""
        return self._write.apply(written)

    @cached_property
    def _write(self) -> Move:
        return Move(self.written, self.layout)


@dataclass(frozen=True)
class GatheredCores(AnyPatches):
    """Windows of a whole image on every worker, whose cores cover it once.

    Each worker puts the cores of its windows one after the other in a row; all workers get all
    rows, and put them where they belong: half of what a sum over whole images would send.
    """

    in_turn = True

    @cached_property
    def written(self) -> Layout:
        """The rows of all workers, one after the other."""
        lengths = [sum(map(self._volume, own)) for own in self._owned]
        return Layout.from_lengths(self.layout.partition, [lengths])

    def put(self, out: Tensor, pairs: Pairs) -> None:
        """Put the cores of patches into their places in this worker's row."""
        for i, patch in pairs:
            inside = patch[self.strategy.region(self.strategy.windows[i].inside)]
            out[slice(*self._places[i])] = inside.reshape(-1)

    def finish(self, written: Tensor) -> Tensor:
        rows = self._write.apply(written)
        image = rows.new_zeros(self.layout.shape)
        start = 0
        for i in (i for own in self._owned for i in own):
            core = self.strategy.windows[i].core
            region = self.strategy.region(tuple(slice(*interval) for interval in core))
            stop = start + self._volume(i)
            image[region] = rows[start:stop].reshape(image[region].shape)
            start = stop
        return image

    @cached_property
    def _write(self) -> Move:
        everywhere = Layout.whole(self.layout.partition, self.written.shape, shared=True)
        return Move(self.written, everywhere)

    @cached_property
    def _owned(self) -> list[list[int]]:
        """For each worker the numbers of its windows."""
        workers = self.layout.partition.size
        return [local_indices(self.count, k, workers, self.sharding) for k in range(workers)]

    @cached_property
    def _places(self) -> dict[int, Interval]:
        """Where the cores of this worker lie in its row."""
        own = self.indices()
        return dict(zip(own, boxes.consecutive(map(self._volume, own)), strict=True))

    def _volume(self, i: int) -> int:
        """The number of values of a core, with all of the dimensions that are not cut."""
        core = dict(zip(self.strategy.dims, self.strategy.windows[i].core, strict=True))
        whole = enumerate(self.layout.shape)
        return boxes.volume(tuple(core.get(dim, (0, length)) for dim, length in whole))


def _covers_once(strategy: Any) -> bool:
    """Whether the cores of windows cover the image once, as far as the library knows."""
    ours = (SmartTilingStrategy, BasicStrategy)  # what one of a user puts together may overlap
    return type(strategy) in ours and not strategy.overlap


def _windows(layout: Layout, strategy: Any) -> Sequence[PriorWindow]:
    """Those of the strategy; without a patch size, one for each part."""
    if getattr(strategy, "patch_size", 0) is not None or strategy.overlap:
        return list(strategy.windows)
    return windows_of_parts(layout, strategy.dims, strategy.margin)


def windows_of_parts(
    layout: Layout, dims: Sequence[int], margin: Sequence[int]
) -> list[PriorWindow]:
    """One window for each part of an image: the part and a margin that ends at the border.

    For a prior that is a convolutional network this is the halo exchange of its receptive field.

    >>> import tessel
    >>> layout = tessel.Layout.balanced(tessel.world(), (6,))
    >>> windows_of_parts(layout, [0], [1])
    [PriorWindow(core=((0, 6),), read=((0, 6),))]
    """
    along = []
    for dim, width in zip(dims, margin, strict=True):
        filled = [part for part in layout.cuts[dim].intervals if part[0] < part[1]]
        length = layout.shape[dim]
        along.append([(part, boxes.grow(part, width, width, length)) for part in filled])
    return crossed(along)


def _hull(intervals: Sequence[Interval]) -> Interval:
    if not intervals:
        return 0, 0
    return min(start for start, _ in intervals), max(stop for _, stop in intervals)
