"""Strategies: how an image is cut into patches for a prior, and reassembled.

A window has a core, which it writes, and a box that it reads: the core and a halo around it, which
covers the receptive field of the prior. At the border of the image, windows are shifted inwards and
never padded, so that the prior sees the true border, as in the whole image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from operator import attrgetter
from operator import index as as_int
from typing import Any

import torch
from torch import Tensor

from tessel.core import Box, Interval, Region, boxes

CoreAndRead = tuple[Interval, Interval]  # a core and its read interval along one dimension
Pairs = list[tuple[int, Tensor]]


class DistributedSignalStrategy(ABC):
    """How an image is cut into patches, passed to the prior in batches, and reassembled.

    A subclass implements the four methods. Each worker calls them with the numbers of its own
    patches; the tensors that `reduce_patches` fills are summed over all workers.

    Args:
        signal_shape: the shape of the image, as (batch, channels, height, width).

    >>> import torch
    >>> from tessel.imaging.distribution_strategies.strategies import DistributedSignalStrategy
    >>> class OneForEachChannel(DistributedSignalStrategy):
    ...     def get_num_patches(self):
    ...         return self.signal_shape[1]
    ...     def get_local_patches(self, X, local_indices):
    ...         return [(i, X[:, i : i + 1]) for i in local_indices]
    ...     def apply_batching(self, patches):
    ...         return patches
    ...     def reduce_patches(self, out_tensor, local_pairs):
    ...         for i, patch in local_pairs:
    ...             out_tensor[:, i : i + 1] = patch
    >>> OneForEachChannel((1, 3, 8, 8)).get_num_patches()
    3
    """

    reduces_in_turn = False  # whether `reduce_patches` may be called with some patches at a time

    def __init__(self, signal_shape: Sequence[int]) -> None:
        self.signal_shape = torch.Size(signal_shape)  # patches are those of the whole image

    @abstractmethod
    def get_local_patches(self, X: Tensor, local_indices: list[int]) -> Pairs:
        """The patches of the whole image `X` with these numbers, each with its number."""

    @abstractmethod
    def apply_batching(self, patches: list[Tensor]) -> Iterable[Tensor]:
        """Batches of patches, in their order, concatenated along the first dimension."""

    @abstractmethod
    def reduce_patches(self, out_tensor: Tensor, local_pairs: Pairs) -> None:
        """Write the prior's results for patches to their places in `out_tensor`, which is zero."""

    @abstractmethod
    def get_num_patches(self) -> int:
        """The number of patches on all workers together."""


class WindowStrategy(DistributedSignalStrategy):
    """Patches that are windows of the image, of which the cores are written, or all is blended.

    Args:
        signal_shape: the shape of the image.
        dims: the dimensions that are cut; None for all but the first two, batch and channels.
        overlap: False: each index is taken from the window whose core contains it. True: it is the
            weighted sum of all windows that read it, Σ_k w_k y_k with Σ_k w_k = 1.
        max_batch_size: the largest number of patches that go to the prior at once; None for no
            limit.
    """

    reduces_in_turn = True
    windows: list[PriorWindow]
    halo: tuple[int, ...]  # the width that is read on each side of a core

    def __init__(
        self,
        signal_shape: Sequence[int],
        dims: int | Sequence[int] | None = None,
        overlap: bool = False,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__(signal_shape)
        ndim = len(self.signal_shape)
        if dims is None and ndim < 3:
            raise ValueError(
                f"a signal with {ndim} dimensions has none besides batch and channels; pass the "
                "dimensions to cut"
            )
        given = range(2, ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
        if any(not -ndim <= dim < ndim for dim in given):
            raise ValueError(
                f"dimensions from {-ndim} to {ndim - 1} can be cut, got {tuple(given)}"
            )
        self.dims = tuple(dim % ndim for dim in given)
        if not self.dims or len(set(self.dims)) < len(self.dims):
            raise ValueError(f"expected at least one dimension, each only once, got {tuple(given)}")
        self.lengths = tuple(self.signal_shape[dim] for dim in self.dims)  # of cut dimensions
        self.whole: Box = tuple((0, length) for length in self.lengths)
        self._regions: dict[tuple[Box, Box], Region] = {}
        self.overlap = overlap
        self.max_batch_size = max_batch_size
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be 1 or more, or None, got {max_batch_size}")

    def get_num_patches(self) -> int:
        return len(self.windows)

    def get_local_patches(self, X: Tensor, local_indices: list[int]) -> Pairs:
        in_order = sorted(local_indices, key=self._order.__getitem__)
        return [(i, X[self.region(self.windows[i].read, self.whole)]) for i in in_order]

    def apply_batching(self, patches: list[Tensor]) -> Iterator[Tensor]:
        for _, alike in groupby(patches, key=attrgetter("shape")):
            some = list(alike)
            step = self.max_batch_size or len(some)
            for start in range(0, len(some), step):
                yield torch.cat(some[start : start + step])

    def reduce_patches(self, out_tensor: Tensor, local_pairs: Pairs) -> None:
        for i, patch in local_pairs:
            self.put_back(out_tensor, patch, self.windows[i], self.whole)

    def put_back(self, out: Tensor, patch: Tensor, window: PriorWindow, box: Box) -> None:
        """Write the prior's result for a window to a tensor that holds a box: its core, or all.

        In the second case it is weighted, and blended with the results of other windows.
        """
        if not self.overlap:
            inside = patch[self.region(window.core, window.read)]
            out[self.region(window.core, box)] = inside
            return
        # The weight of a window is the product of those along dimensions.
        weights = torch.ones((), dtype=patch.real.dtype, device=patch.device)
        for place, dim in enumerate(self.dims):
            ramp = weights.new_tensor(self._ramps[place][window.read[place]])
            shape = [1] * len(self.signal_shape)
            shape[dim] = -1
            weights = weights * ramp.reshape(shape)
        out[self.region(window.read, box)] += weights * patch

    def region(self, inner: Box, outer: Box) -> Region:
        """The region of a box in a tensor that holds another one, both of the cut dimensions."""
        found = self._regions.get((inner, outer))
        if found is None:  # cached, since a solver needs the same ones in each iteration
            along = dict(zip(self.dims, boxes.within(inner, outer), strict=True))
            dims = range(len(self.signal_shape))
            found = tuple(along.get(dim, slice(None)) for dim in dims)
            self._regions[inner, outer] = found
        return found

    @cached_property
    def _order(self) -> dict[int, int]:
        """The place of each window: those of one shape are consecutive, to form one batch."""
        numbers = range(len(self.windows))
        in_order = sorted(numbers, key=lambda i: (self.windows[i].shape, i))
        return {i: place for place, i in enumerate(in_order)}

    @cached_property
    def _ramps(self) -> list[dict[Interval, list[float]]]:
        """Along each dimension that is cut, the weights of each interval that is read.

        Windows that read the same interval are one here and share its weight.
        """
        found = []
        for place, length in enumerate(self.lengths):
            cores = dict.fromkeys((w.core[place], w.read[place]) for w in self.windows)
            reads = [read for _, read in cores]
            found.append(dict(zip(reads, ramps(reads, length), strict=True)))
        return found

    def __repr__(self) -> str:
        name, shape = type(self).__name__, tuple(self.signal_shape)
        return f"{name}({self.get_num_patches()} patches of {shape})"


class SmartTilingStrategy(WindowStrategy):
    """Windows of one size, each a patch and the receptive field around it.

    At the border of the image windows are shifted inwards, so that the result is that of the prior
    on the whole image once the receptive field is covered.

    Args:
        signal_shape: the shape of the image.
        patch_size, receptive_field_size, stride: those of `TilingConfig`, each a number or one for
            each dimension that is cut; a patch is the core of a window.
        tiling_dims, overlap, max_batch_size: `dims` and others of `WindowStrategy`.

    >>> from tessel.imaging.distribution_strategies import SmartTilingStrategy
    >>> SmartTilingStrategy((1, 3, 100, 40), patch_size=32, receptive_field_size=8)
    SmartTilingStrategy(8 patches of (1, 3, 100, 40))
    """

    def __init__(
        self,
        signal_shape: Sequence[int],
        patch_size: int | Sequence[int] | None = 256,
        receptive_field_size: int | Sequence[int] = 32,
        stride: int | Sequence[int] = 1,
        tiling_dims: int | Sequence[int] | None = None,
        overlap: bool = False,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__(signal_shape, tiling_dims, overlap, max_batch_size)
        count = len(self.dims)
        patch = checked_sizes(
            "patch_size", self.lengths if patch_size is None else patch_size, count, 1
        )
        self.patch_size = patch_size
        self.halo = checked_sizes("receptive_field_size", receptive_field_size, count, 0)
        steps = checked_sizes("stride", stride, count, 1)
        self.windows = tiles(self.lengths, patch, self.halo, steps)


class BasicStrategy(WindowStrategy):
    """Balanced parts of some dimensions, each read with a halo.

    Args:
        signal_shape: the shape of the image.
        split_dims, overlap, max_batch_size: `dims` and others of `WindowStrategy`.
        num_splits: the number of parts, one number or one for each dimension; None for as many as
            parts of at most `patch_size` need, or two if that is None as well.
        patch_size: the largest part, if `num_splits` is None.
        receptive_field_size: the width that is read on each side of a part.

    >>> from tessel.imaging.distribution_strategies import BasicStrategy
    >>> BasicStrategy((1, 3, 100, 40), split_dims=-2, num_splits=3)
    BasicStrategy(3 patches of (1, 3, 100, 40))
    """

    def __init__(
        self,
        signal_shape: Sequence[int],
        split_dims: int | Sequence[int] | None = None,
        num_splits: int | Sequence[int] | None = None,
        patch_size: int | Sequence[int] | None = None,
        receptive_field_size: int | Sequence[int] = 0,
        overlap: bool = False,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__(signal_shape, split_dims, overlap, max_batch_size)
        if num_splits is not None and patch_size is not None:
            raise ValueError(
                f"num_splits and patch_size both determine the number of parts, got {num_splits} "
                f"and {patch_size}; pass only one of them"
            )
        count = len(self.dims)
        self.halo = checked_sizes("receptive_field_size", receptive_field_size, count, 0)
        if patch_size is None:
            wanted = checked_sizes("num_splits", 2 if num_splits is None else num_splits, count, 1)
        else:
            sizes = checked_sizes("patch_size", patch_size, count, 1)
            wanted = tuple(-(-n // size) for n, size in zip(self.lengths, sizes, strict=True))
        cores = [boxes.balanced(n, min(n, k)) for n, k in zip(self.lengths, wanted, strict=True)]
        self.windows = parts(cores, self.lengths, self.halo)


STRATEGIES: dict[str, Callable[..., DistributedSignalStrategy]] = {
    "smart_tiling": SmartTilingStrategy,
    "basic": BasicStrategy,
}


def create_strategy(
    strategy: str | DistributedSignalStrategy | Callable[..., DistributedSignalStrategy],
    signal_shape: Sequence[int],
    **settings: Any,
) -> DistributedSignalStrategy:
    """Return a strategy from its name, its class, or a strategy.

    Args:
        strategy: "smart_tiling" or "basic", a function of the shape and settings, or a strategy.
        signal_shape: the shape of the image.
        settings: settings of the strategy, by name.

    >>> create_strategy("basic", (1, 1, 8, 8), num_splits=2).get_num_patches()
    4
    """
    if isinstance(strategy, DistributedSignalStrategy):
        if settings or tuple(strategy.signal_shape) != tuple(signal_shape):
            raise ValueError(
                f"the strategy {strategy!r} was created for {tuple(strategy.signal_shape)}: it "
                f"takes no settings {settings} and no shape other than {tuple(signal_shape)}"
            )
        return strategy
    return maker_of(strategy)(signal_shape, **settings)


def maker_of(strategy: Any) -> Callable[..., DistributedSignalStrategy]:
    """The function that makes a strategy from a shape and settings; ValueError if there is none.

    >>> maker_of("basic").__name__
    'BasicStrategy'
    """
    make = STRATEGIES.get(strategy) if isinstance(strategy, str) else strategy
    if not callable(make):
        raise ValueError(
            f"strategy must be one of {', '.join(STRATEGIES)}, a class or a strategy, "
            f"got {strategy!r}"
        )
    return make


def check_its_own(
    strategy: DistributedSignalStrategy, given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raise ValueError for settings beside a strategy, which has been made with settings."""
    for name, value in given.items():
        if value != defaults[name]:
            raise ValueError(
                f"{name}={value!r} cannot be used with the strategy {strategy!r}, which has "
                "settings of its own"
            )


def checked_sizes(
    what: str, value: int | Iterable[int], count: int | None, least: int
) -> tuple[int, ...]:
    """One number for each dimension that is cut, from one or several; `count` None allows any."""
    try:
        each = value if isinstance(value, Iterable) else (value,) * (count or 1)
        numbers = tuple(map(as_int, each))
    except TypeError:
        raise ValueError(f"{what} must be whole numbers, got {value!r}") from None
    if count is not None and len(numbers) != count:
        raise ValueError(
            f"{what}: expected one number, or {count}, one for each dimension that is cut, got "
            f"{numbers}"
        )
    if any(number < least for number in numbers):
        raise ValueError(f"{what} must be {least} or more, got {value}")
    return numbers


@dataclass(frozen=True)
class PriorWindow:
    """The box that one call of a prior writes, and the box that it reads.

    Args:
        core: the box of the image that the window writes; cores cover the image once.
        read: the box that it reads, which contains the core.
    """

    core: Box
    read: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box that it reads."""
        return boxes.extent(self.read)


def tiles(
    shape: Sequence[int], patch: Sequence[int], halo: Sequence[int], stride: Sequence[int]
) -> list[PriorWindow]:
    """Windows with cores of the size `patch`, row by row; those at the end may be smaller.

    All windows of a dimension read equally many indices, `patch + 2·halo` or all, unless its length
    is no multiple of the stride: then those at the end read a few more or less.

    Args:
        shape: the shape of the image.
        patch: the length of a core in each dimension.
        halo: the width that is read on each side of it.
        stride: windows start at multiples of this, and end there or with the image.

    >>> [window.read for window in tiles((10,), (4,), (1,), (1,))]
    [((0, 6),), ((3, 9),), ((4, 10),)]
    """
    along = [tiles_along(*numbers) for numbers in zip(shape, patch, halo, stride, strict=True)]
    return crossed(along)


def parts(
    cores: Sequence[Sequence[Interval]], shape: Sequence[int], halo: Sequence[int]
) -> list[PriorWindow]:
    """Windows with these cores along each dimension, with a halo that ends at the border.

    >>> [window.read for window in parts([[(0, 5), (5, 10)]], (10,), (1,))]
    [((0, 6),), ((4, 10),)]
    """
    along = [
        [(core, boxes.grow(core, edge, edge, length)) for core in some]
        for some, length, edge in zip(cores, shape, halo, strict=True)
    ]
    return crossed(along)


def tiles_along(length: int, patch: int, halo: int, stride: int) -> list[CoreAndRead]:
    """The cores along one dimension, each with the interval that is read for it."""
    slack = 0 if patch % stride == halo % stride == 0 else stride - 1  # lost by aligned starts
    width = -(-(patch + 2 * halo + slack) // stride) * stride  # rounded up to a multiple
    found = []
    for start in range(0, length, patch):
        core = start, min(start + patch, length)
        begin = _down(max(start - halo, 0), stride)
        # At the border the window is shifted inwards, not made smaller: all windows have one shape
        # and form one batch, and the prior sees the border as in the whole image.
        if begin + width >= length:
            read = _down(max(length - width, 0), stride), length
        else:
            read = begin, begin + width
        found.append((core, read))
    return found


def crossed(along: Sequence[Sequence[CoreAndRead]]) -> list[PriorWindow]:
    """The windows in all dimensions, from those along each."""
    return [
        PriorWindow(tuple(core for core, _ in chosen), tuple(read for _, read in chosen))
        for chosen in product(*along)
    ]


def ramps(reads: Sequence[Interval], length: int) -> list[list[float]]:
    """Weights of windows along one dimension, which sum to one at each index.

    The weight of a window falls towards its ends inside the image, in proportion to the distance:
    w_k(i) = d_k(i) / Σ_j d_j(i).

    >>> ramps([(0, 3), (1, 4)], 4)
    [[1.0, 0.6666666666666666, 0.3333333333333333], [0.3333333333333333, 0.6666666666666666, 1.0]]
    """
    sums = [0] * length
    for read in reads:
        for i, distance in enumerate(_distances(read, length), read[0]):
            sums[i] += distance
    return [
        [distance / sums[i] for i, distance in enumerate(_distances(read, length), read[0])]
        for read in reads
    ]


def _distances(read: Interval, length: int) -> list[int]:
    start, stop = read
    # At the border of the image a weight does not fall: no other window continues there.
    before = [length if start == 0 else i - start + 1 for i in range(start, stop)]
    after = [length if stop == length else stop - i for i in range(start, stop)]
    return [min(pair) for pair in zip(before, after, strict=True)]


def _down(index: int, stride: int) -> int:
    return index // stride * stride
