"""Priors on an image in parts: each worker reads the windows whose cores lie in its part.

The windows are those of the whole image, so that results do not depend on the number of workers. A
worker fetches what its windows read, applies the prior to them, and what they answer for goes
where it belongs: to its own part, but for cores that lie across the border of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from tessel import boxes
from tessel.boxes import Box, Interval, Region
from tessel.distributed.agreeing import agree
from tessel.distributed.movements import copying
from tessel.imaging.sharding import local_indices
from tessel.imaging.tiling import Window, crossed
from tessel.imaging.uses import hang, replaced, slots_of, tensors_in
from tessel.layout import Cut, Layout
from tessel.move import Move
from tessel.shared import even, nothing

Tile = tuple[Interval, Interval]  # a core and what is read for it, along one dimension
Pair = tuple[int, Tensor]  # the number of a window, and a patch
Pairs = list[Pair]


class PartitionedPrior:
    """A prior on the parts of an image.

    Forward:  x ↦ Σ_k R_kᵀ prox(R_k x), where R_k cuts out window k.

    Args:
        layout: of the image. Axes along which it is shared divide the windows further.
        strategy: how the image is cut: one with `windows` along the dimensions `dims`, as
            "smart_tiling" and "basic" are; without a patch size, each part is one window. Any
            other strategy sees the whole image on every worker, which is gathered and summed
            back to the parts.
    """

    def __init__(self, layout: Layout, strategy: Any) -> None:
        if tuple(strategy.signal_shape) != layout.shape:
            raise ValueError(
                f"the strategy {strategy!r} is for an image of {tuple(strategy.signal_shape)}, "
                f"and the parts are of {layout.shape}"
            )
        self.layout, self.strategy = layout, strategy
        self.pieces: Windows | Everything = (
            Windows(layout, strategy, tuple(_windows(layout, strategy)))
            if hasattr(strategy, "windows")
            else Everything(layout, strategy)
        )
        self._read = Move(layout, self.pieces.read)
        self._write = Move(self.pieces.written, layout)

    @property
    def num_patches(self) -> int:
        """How many windows all workers have together."""
        return self.pieces.count

    @cached_property
    def local_indices(self) -> list[int]:
        """The numbers of this worker's windows."""
        return self.pieces.indices() if self.layout.partition.active else []

    def apply(
        self,
        call: str,
        function: Callable[..., Tensor],
        x: Tensor,
        shared: Any = (),
        args: tuple[Any, ...] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """This worker's part of what the prior makes of the image.

        Args:
            call: what is called, in the words of its user.
            function: `function(patches, *args, **settings)`, the prior on a batch of patches.
            x: this worker's part of the image.
            shared: the objects whose parameters `function` uses, the same on all workers.
            args, settings: of the call; tensors in them are the same on all workers.
        """
        if not self.layout.partition.active:
            return x
        slots = slots_of(shared)
        given = tensors_in((args, dict(settings or {})))
        values = {id(each): each for each in (*given, *(slot.tensor for slot in slots))}
        shapes = [tuple(each.shape) for each in values.values()]
        text = f"{call}, gradients of tensors of shapes {shapes}" if shapes else call
        problem = self._problem(x)
        ((_, terms),) = agree(self.layout.partition, f"{text}{problem}", x)
        if problem:
            raise ValueError(f"{text}{problem}")
        partition = self.layout.partition
        used = {
            key: copying(partition, tuple(each.shape)).apply(each) for key, each in values.items()
        }
        read = self._read.apply(even(x, terms))
        anchor = nothing((), *used.values()) if used else None
        own: tuple[Any, dict[str, Any]] = tree_map(
            lambda each: used.get(id(each), each), (args, dict(settings or {}))
        )
        with replaced(slots, used):
            written = self._put_together(function, read, *own)
        return self._write.apply(hang(written, anchor))

    def _put_together(
        self,
        function: Callable[..., Tensor],
        read: Tensor,
        args: tuple[Any, ...],
        settings: Mapping[str, Any],
    ) -> Tensor:
        """What this worker's windows answer for."""
        out = read.new_zeros(self.pieces.written.local_shape) + nothing((), read)
        pairs = self.pieces.patches(read, self.local_indices)
        numbers = iter(pairs)
        kept: Pairs = []
        for batch in self.strategy.apply_batching([patch for _, patch in pairs]):
            result = function(batch, *args, **settings)
            if result.shape != batch.shape:
                raise ValueError(
                    f"a prior gives a tensor of the shape that it got, {tuple(batch.shape)}, "
                    f"got {tuple(result.shape)}"
                )
            kept += taken_apart(result, numbers)
            if self.pieces.in_turn:
                self.pieces.put(out, kept)
                kept = []
        if next(numbers, None) is not None:
            raise ValueError(f"{self.strategy!r}: apply_batching gave fewer patches than it got")
        if not self.pieces.in_turn:
            self.pieces.put(out, kept)
        return out

    def _problem(self, x: Tensor) -> str:
        """What is wrong with this worker's tensor, as the end of a sentence."""
        if tuple(x.shape) == self.layout.local_shape:
            return ""
        return f": a part of shape {self.layout.local_shape} is needed, got {tuple(x.shape)}"


@dataclass(frozen=True)
class Windows:
    """The windows of an image, each on the worker in whose part the middle of its core lies.

    Dimensions that are not cut are whole in each window, but for the batch, whose parts stay apart.

    Args:
        layout: of the image.
        strategy: what says which dimensions are cut, and how windows are blended.
        windows: in the order of their numbers.
    """

    layout: Layout
    strategy: Any
    windows: tuple[Window, ...]
    in_turn = True  # whether some windows may be put into their places at a time

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

    def patches(self, read: Tensor, indices: Iterable[int]) -> Pairs:
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

    @cached_property
    def _tiles(self) -> dict[int, list[list[Tile]]]:
        """For each dimension that is cut, the tiles of each place along its axes."""
        found = {}
        for position, dim in enumerate(self.strategy.dims):
            tiles = list(dict.fromkeys((w.core[position], w.read[position]) for w in self.windows))
            places = [
                [tile for tile in tiles if _has(part, sum(tile[0]) // 2)]
                for part in self.layout.cuts[dim].intervals
            ]
            found[dim] = (
                places if position else [some for place in places for some in self._divided(place)]
            )
        return found

    def _divided(self, tiles: list[Tile]) -> Iterator[list[Tile]]:
        """Tiles of the first dimension, given to the copies of a part."""
        sizes = [self.layout.partition.shape[axis] for axis in self.layout.shared]
        count = 1
        for size in sizes:
            count *= size
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
            else:  # all of it, on the workers at the first place
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
class Everything:
    """Patches of any strategy, for which every worker has the whole image."""

    layout: Layout
    strategy: Any
    in_turn = False

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
        return local_indices(self.count, partition.rank, partition.size, "round_robin")

    def patches(self, read: Tensor, indices: Iterable[int]) -> Pairs:
        found: Pairs = self.strategy.get_local_patches(read, list(indices))
        return found

    def put(self, out: Tensor, pairs: Pairs) -> None:
        self.strategy.reduce_patches(out, pairs)


def _windows(layout: Layout, strategy: Any) -> Sequence[Window]:
    """Those of the strategy; without a patch size, one for each part."""
    if getattr(strategy, "patch_size", 0) is not None or strategy.overlap:
        return list(strategy.windows)
    return windows_of_parts(layout, strategy.dims, strategy.margin)


def windows_of_parts(layout: Layout, dims: Sequence[int], margin: Sequence[int]) -> list[Window]:
    """One window for each part of an image: the part and a margin that ends at the border.

    For a prior that is a convolutional network this is the halo exchange of its receptive field.

    >>> import tessel
    >>> layout = tessel.Layout.balanced(tessel.world(), (6,))
    >>> windows_of_parts(layout, [0], [1])
    [Window(core=((0, 6),), read=((0, 6),))]
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


def _has(part: Interval, index: int) -> bool:
    return part[0] <= index < part[1]


def taken_apart(batch: Tensor, pairs: Iterable[Pair]) -> Pairs:
    """The patches of a batch, as long as they were along the first dimension."""
    found: Pairs = []
    start = 0
    for i, patch in pairs:
        found.append((i, batch[start : start + len(patch)]))
        start += len(patch)
        if start >= len(batch):
            break
    if start != len(batch):
        raise ValueError(
            f"a batch of apply_batching has whole patches, one after the other along the first "
            f"dimension: got a batch of length {len(batch)} for patches of {start} in all"
        )
    return found
