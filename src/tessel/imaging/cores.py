"""Cores: what windows answer for, sent around without what they read beside it.

The cores of a tiling cover the image once. Each worker puts those of its windows one after the
other in a row; all workers get all rows, and put them where they belong: half of what a sum over
whole images would send.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from tessel.boxes import Interval, Region, consecutive
from tessel.imaging.distribution_strategies.strategies import Pairs, WindowStrategy
from tessel.layout import Layout
from tessel.move import Move
from tessel.partition import Partition


class Cores:
    """The cores of an image's windows, of which each worker has some.

    Args:
        partition: the workers.
        strategy: with windows whose cores cover the image once.
        owned: for each worker the numbers of its windows.
        place: of this worker.
    """

    def __init__(
        self,
        partition: Partition,
        strategy: WindowStrategy,
        owned: Sequence[Sequence[int]],
        place: int,
    ) -> None:
        self.strategy, self.owned, self.place = strategy, owned, place
        lengths = [sum(self._volume(i) for i in numbers) for numbers in owned]
        rows = Layout.from_lengths(partition, [lengths])
        self._gather = Move(rows, Layout.whole(partition, rows.shape, shared=True))
        self.length = lengths[place]

    def reduce_patches(self, out: Tensor, pairs: Pairs) -> None:
        """Put the cores of patches into their places in this worker's row."""
        for i, patch in pairs:
            inside = patch[self.strategy.region(self.strategy.windows[i].inside)]
            out[slice(*self._places[i])] = inside.reshape(-1)

    def put_together(self, row: Tensor) -> Tensor:
        """The image from the rows of all workers, as one shared value."""
        rows = self._gather.apply(row)
        image = rows.new_zeros(self.strategy.signal_shape)
        start = 0
        for numbers in self.owned:
            for i in numbers:
                stop = start + self._volume(i)
                region = self._region(i)
                image[region] = rows[start:stop].reshape(image[region].shape)
                start = stop
        return image

    @cached_property
    def _places(self) -> dict[int, Interval]:
        """Where the cores of this worker lie in its row."""
        own = self.owned[self.place]
        return dict(zip(own, consecutive(self._volume(i) for i in own), strict=True))

    def _region(self, i: int) -> Region:
        core = self.strategy.windows[i].core
        return self.strategy.region(tuple(slice(*interval) for interval in core))

    def _volume(self, i: int) -> int:
        """The number of values of a core, with all of the dimensions that are not cut."""
        core = dict(zip(self.strategy.dims, self.strategy.windows[i].core, strict=True))
        count = 1
        for dim, length in enumerate(self.strategy.signal_shape):
            start, stop = core.get(dim, (0, length))
            count *= stop - start
        return count
