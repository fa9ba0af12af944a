"""DistributedPrior: a prior of a large image, applied patch by patch by all workers.

Patches are those of the whole image, so that results do not depend on the number of workers. Three
tilings say who has which patches, what each worker reads for them, and where the results go:

- `Tiling`, of any strategy and layout: each worker has the whole image, and images are summed.
- `GatheredCores`, of a whole image on every worker: the cores of patches alone are sent around.
- `LocalWindows`, of an image in parts: a worker has the windows whose cores lie in its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from tessel.core import boxes
from tessel.core.agreement import agree
from tessel.core.boxes import Box, Interval
from tessel.core.layout import Cut, Layout
from tessel.core.linop import LinearOperator
from tessel.core.move import Move
from tessel.core.shared import anchored_zeros, grad_alike
from tessel.distributed.movements import copying
from tessel.imaging.context import DistributedContext
from tessel.imaging.distribution_strategies.strategies import (
    BasicStrategy,
    DistributedSignalStrategy,
    Pairs,
    SmartTilingStrategy,
    WindowStrategy,
    create_strategy,
)
from tessel.imaging.parameters import (
    Copies,
    computing_with,
    depending_on,
    gradients_of,
    learned,
    needs_grad,
    state_of,
    stray_leaf,
)
from tessel.imaging.parts.kernel import is_whole
from tessel.imaging.sharding import local_indices
from tessel.imaging.signal import DistributedSignal, local_data
from tessel.imaging.tiling import PriorWindow, crossed

Strategy = str | DistributedSignalStrategy | Callable[..., DistributedSignalStrategy]
Tile = tuple[Interval, Interval]  # a core and what is read for it, along one dimension


class DistributedPrior:
    """A prior whose patches all workers share out among them.

    Forward:  x ↦ Σ_k R_kᵀ prox(R_k x), where R_k cuts out patch k; each worker has some of them.

    A prior is any object with `prox(x, …)` or `grad(x, …)`, as those of deepinv, or a denoiser: a
    function whose result stands for the prox. All workers hold the same one: if parameters or
    buffers of a module differ, as those of networks that each worker initialised for itself, all
    workers raise. Its parameters get the gradient of all patches, on every worker.

    Args:
        ctx: the workers.
        prior: the prior or denoiser.
        strategy: how the image is cut: "smart_tiling", "basic", a class or a strategy.
        signal_shape: of the image.
        strategy_kwargs: settings of the strategy, as patch_size and receptive_field_size.
        layout: of an image in parts; None for the whole image on every worker.

    >>> import torch
    >>> from tessel.imaging import DistributedContext, DistributedPrior
    >>> with DistributedContext() as ctx:
    ...     prior = DistributedPrior(
    ...         ctx, lambda x: 2 * x, "smart_tiling", (1, 1, 8, 8), {"patch_size": 4}
    ...     )
    ...     prior.num_patches, prior.prox(torch.ones(1, 1, 8, 8)).sum()
    (4, tensor(128.))
    """

    def __init__(
        self,
        ctx: DistributedContext,
        prior: Any,
        strategy: Strategy = "smart_tiling",
        signal_shape: Sequence[int] | None = None,
        strategy_kwargs: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> None:
        if signal_shape is None:
            if not isinstance(strategy, DistributedSignalStrategy):
                raise ValueError(
                    f"DistributedPrior: signal_shape is needed for strategy={strategy!r}, got None"
                )
            signal_shape = strategy.signal_shape
        if not (callable(prior) or hasattr(prior, "prox") or hasattr(prior, "grad")):
            raise ValueError(
                f"DistributedPrior: a prior with prox or grad, or a denoiser, is needed, "
                f"got {prior!r}"
            )
        ctx.check_same_state(state_of(prior), f"DistributedPrior: the prior {type(prior).__name__}")
        self.ctx = ctx
        self.prior = prior
        self.apply_to: Callable[..., Tensor] | None = None  # in the place of the prior itself
        self.strategy = create_strategy(strategy, signal_shape, **dict(strategy_kwargs or {}))
        shape = tuple(self.strategy.signal_shape)
        self.layout = layout or Layout.whole(ctx.partition, shape, shared=True)
        if self.layout.shape != shape:
            raise ValueError(
                f"the strategy {self.strategy!r} is for an image of {shape}, and the parts are of "
                f"{self.layout.shape}"
            )
        self._in_place = Tiling(self.layout, self.strategy, ctx.sharding)  # of gather=False
        self.tiling = tiling_of(self.layout, self.strategy, ctx.sharding)
        self.num_patches = self.tiling.count
        self.local_indices = self.tiling.indices() if self.layout.partition.active else []
        self._label = f"DistributedPrior({self.num_patches} patches over {ctx.world_size} workers)"
        self._read: LinearOperator = (
            copying(self.layout.partition, shape)  # nothing moves, and nothing is copied
            if is_whole(self.layout)
            else Move(self.layout, self.tiling.read)
        )

    def prox(
        self, x: DistributedSignal | Tensor, *args: Any, gather: bool = True, **settings: Any
    ) -> Tensor:
        """The proximal operator or denoiser of each patch, which gets the further arguments.

        With `gather=False` this worker's patches in their places, and zeros elsewhere.
        """
        own = self.apply_to or (self.prior.prox if hasattr(self.prior, "prox") else self.prior)
        return self._apply("prox", own, x, args, settings, gather)

    def grad(
        self, x: DistributedSignal | Tensor, *args: Any, gather: bool = True, **settings: Any
    ) -> Tensor:
        """The gradient of each patch; the prior gets the further arguments."""
        if not hasattr(self.prior, "grad"):
            raise NotImplementedError(f"{self!r}: the prior {self.prior!r} has no method grad")
        return self._apply("grad", self.prior.grad, x, args, settings, gather)

    def _apply(
        self,
        name: str,
        function: Callable[..., Tensor],
        signal: DistributedSignal | Tensor,
        args: tuple[Any, ...],
        settings: Mapping[str, Any],
        gather: bool,
    ) -> Tensor:
        """This worker's part of what a function of patches makes of the image."""
        call, x, layout = f"{self._label}.{name}", local_data(signal), self.layout
        if not (gather or is_whole(layout)):
            raise NotImplementedError(
                f"{call}: gather=False is for a whole image on every worker; of one in parts "
                f"each worker gets its part"
            )
        partition = layout.partition
        fits = isinstance(x, Tensor) and tuple(x.shape) == layout.local_shape
        if self.ctx.debug and layout.shared and fits:  # else all raise, as their calls differ
            self.ctx.check_same(x, layout, f"the input of {call}")
        if not partition.active:
            return x
        tensors = learned(self.prior, (args, settings))
        call = f"{call}{gradients_of(tensors)}"
        if not fits:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            call = f"{call}: a part of shape {layout.local_shape} is needed, got {got}"
        # What is wrong here may be right elsewhere: the text of the call tells all workers of it.
        if partition.size > 1 or not fits:
            ((_, terms),) = agree(partition, call, x)
            if not fits:
                raise ValueError(call)
            x = grad_alike(x, terms)
        # Each worker sees some of the patches: gradients of what all of them use are summed.
        copies = Copies()
        copies.add(tensors, partition)
        read = self._read.apply(x)
        tiling = self.tiling if gather else self._in_place
        with computing_with(copies, self.prior) as parameters:
            own_args, own_settings = copies.instead((args, settings))
            written = self._put_together(
                tiling, lambda batch: function(batch, *own_args, **own_settings), read
            )
        if needs_grad(read):  # a worker without patches takes part in the backward pass, too
            written = depending_on(written, anchored_zeros((), read))
        written = depending_on(written, parameters)
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
            self._check_result(result, batch)
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

    def _check_result(self, result: Any, batch: Tensor) -> None:
        """Raise ValueError for what is no batch of patches, or would learn on one worker alone."""
        if not isinstance(result, Tensor) or result.shape != batch.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"a prior gives a tensor of the shape that it got, {tuple(batch.shape)}, got {got}"
            )
        # A gradient that went to a tensor which was not seen to be shared would be that of this
        # worker's patches only, a silent wrong number.
        leaf = stray_leaf(result)
        if leaf is not None:
            raise ValueError(
                f"{type(self.prior).__name__} uses a tensor of shape {tuple(leaf.shape)} that "
                f"needs a gradient and is no parameter of it that could be found: each worker "
                f"would get a part of the gradient; make it a parameter or attribute of the "
                f"prior, pass it as an argument, or let it need none"
            )

    def __repr__(self) -> str:
        return self._label


@dataclass(frozen=True)
class Tiling:
    """Which patches each worker has, what it reads for them, and what it answers for.

    This one is for any strategy: every worker has the whole image and puts its patches into zeros.

    Args:
        layout: of the image.
        strategy: how the image is cut.
        sharding: how patches are given to workers.
    """

    layout: Layout
    strategy: Any
    sharding: str

    @property
    def in_turn(self) -> bool:
        """Whether some patches may be put into their places at a time."""
        return getattr(self.strategy, "reduces_in_turn", False)

    @property
    def count(self) -> int:
        """The number of patches of all workers."""
        return int(self.strategy.get_num_patches())

    @cached_property
    def read(self) -> Layout:
        """What each worker reads."""
        return Layout.whole(self.layout.partition, self.layout.shape)

    @cached_property
    def written(self) -> Layout:
        """What each worker answers for."""
        return self.read

    def indices(self) -> list[int]:
        """The numbers of this worker's patches, those of one shape one after the other."""
        partition = self.layout.partition
        assert partition.rank is not None
        return local_indices(self.count, partition.rank, partition.size, self.sharding)

    def patches(self, read: Tensor, indices: list[int]) -> Pairs:
        """The patches of these numbers, from what this worker reads."""
        found: Pairs = self.strategy.get_local_patches(read, list(indices))
        return found

    def put(self, out: Tensor, pairs: Pairs) -> None:
        """Put what the prior made of patches into its place."""
        self.strategy.reduce_patches(out, pairs)

    def finish(self, written: Tensor) -> Tensor:
        """This worker's part of the image: the sum of what all workers put into zeros."""
        return self._write.apply(written)

    @cached_property
    def _write(self) -> Move:
        return Move(self.written, self.layout)


@dataclass(frozen=True)
class GatheredCores(Tiling):
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


@dataclass(frozen=True)
class LocalWindows(Tiling):
    """The windows of an image, each on the worker in whose part the middle of its core lies.

    Dimensions that are not cut are whole in each window, but for the batch, whose parts stay apart.

    Args:
        windows: in the order of their numbers.
    """

    windows: tuple[PriorWindow, ...] = ()
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
        box = self._along(self.read)
        return [(i, self.strategy.cut_out(read, self.windows[i], box)) for i in indices]

    def put(self, out: Tensor, pairs: Pairs) -> None:
        """Put what the prior made of windows into its place."""
        box = self._along(self.written)
        for i, patch in pairs:
            self.strategy.put_back(out, patch, self.windows[i], box)

    @cached_property
    def _tiles(self) -> dict[int, list[list[Tile]]]:
        """For each dimension that is cut, the tiles of each place along its axes."""
        found = {}
        copies = prod(self.layout.partition.shape[axis] for axis in self.layout.shared)
        for position, dim in enumerate(self.strategy.dims):
            tiles = list(dict.fromkeys((w.core[position], w.read[position]) for w in self.windows))
            places = [
                [tile for tile in tiles if start <= sum(tile[0]) // 2 < stop]
                for start, stop in self.layout.cuts[dim].intervals
            ]
            # Copies of a part, along shared axes of the grid, divide the windows of its first
            # dimension, so that none is computed twice.
            if position == 0:
                places = [
                    place[slice(*some)]
                    for place in places
                    for some in boxes.balanced(len(place), copies)
                ]
            found[dim] = places
        return found

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

    def _along(self, layout: Layout) -> Box:
        """This worker's box, along the dimensions that are cut."""
        box = layout.box()
        assert box is not None
        return tuple(box[dim] for dim in self.strategy.dims)


def tiling_of(layout: Layout, strategy: Any, sharding: str) -> Tiling:
    """The tiling of an image in this layout that sends least."""
    if not is_whole(layout) and isinstance(strategy, WindowStrategy):
        windows = list(strategy.windows)
        if getattr(strategy, "patch_size", 0) is None and not strategy.overlap:
            windows = windows_of_parts(layout, strategy.dims, strategy.halo)  # one for each part
        return LocalWindows(layout, strategy, sharding, tuple(windows))
    # Cores cover the image once, as far as the library knows: what a user's strategy puts together
    # may overlap.
    is_ours = type(strategy) in (SmartTilingStrategy, BasicStrategy)
    if is_whole(layout) and layout.partition.size > 1 and is_ours and not strategy.overlap:
        return GatheredCores(layout, strategy, sharding)
    return Tiling(layout, strategy, sharding)


def windows_of_parts(layout: Layout, dims: Sequence[int], halo: Sequence[int]) -> list[PriorWindow]:
    """One window for each part of an image: the part and a halo that ends at the border.

    For a prior that is a convolutional network this is the halo exchange of its receptive field.

    >>> import tessel
    >>> layout = tessel.Layout.balanced(tessel.world(), (6,))
    >>> windows_of_parts(layout, [0], [1])
    [PriorWindow(core=((0, 6),), read=((0, 6),))]
    """
    along = []
    for dim, width in zip(dims, halo, strict=True):
        filled = [part for part in layout.cuts[dim].intervals if part[0] < part[1]]
        length = layout.shape[dim]
        along.append([(part, boxes.grow(part, width, width, length)) for part in filled])
    return crossed(along)


def _hull(intervals: Sequence[Interval]) -> Interval:
    if not intervals:
        return 0, 0
    return min(start for start, _ in intervals), max(stop for _, stop in intervals)
