"""Kernels: which part of an image each worker reads for its part of a filtered image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from tessel import transport
from tessel.core import boxes
from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.linop import LinearOperator
from tessel.core.move import Move
from tessel.core.windows import Mirrored, ReceptiveField, Window, reads
from tessel.imaging.parts.padding import IndexedPadding, LocalPadding, PeriodicHalo, PeriodicPadding
from tessel.transport import kept_in_job

PADDINGS = ("valid", "circular", "reflect", "replicate", "constant")


@dataclass(frozen=True)
class FilterWindow:
    """A window that slides over the last dimensions of an image.

    Output i reads s·i − before + t for t < size; what lies beyond the image is what the padding
    says. With "valid" nothing does, and there are fewer outputs.

    Args:
        sizes: of the window, one for each of the last dimensions.
        padding: "valid", "circular", "reflect", "replicate" or "constant" (zeros).
        stride: how far apart windows are.

    >>> FilterWindow((3, 4), "circular").widths, FilterWindow((3,), "valid", stride=2).lengths((9,))
    (((1, 1), (1, 2)), (4,))
    """

    sizes: tuple[int, ...]
    padding: str
    stride: int = 1

    def __post_init__(self) -> None:
        if self.padding not in PADDINGS:
            raise ValueError(f"padding must be one of {', '.join(PADDINGS)}, got {self.padding!r}")
        if self.stride < 1 or any(size < 1 for size in self.sizes):
            raise ValueError(
                f"a kernel needs sizes and a stride of at least 1, got {self.sizes} and "
                f"{self.stride}"
            )

    @cached_property
    def widths(self) -> tuple[Interval, ...]:
        """How far the windows stick out of the image, before and behind it."""
        if self.padding == "valid":
            return ((0, 0),) * len(self.sizes)
        return tuple(((size - 1) // 2, size // 2) for size in self.sizes)

    def lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """How many outputs there are along dimensions of these lengths."""
        found = tuple(
            (length + before + after - size) // self.stride + 1
            for length, size, (before, after) in zip(lengths, self.sizes, self.widths, strict=True)
        )
        widest = {"circular": 0, "reflect": 1}.get(self.padding)
        for length, size, pair, count in zip(lengths, self.sizes, self.widths, found, strict=True):
            too_wide = widest is not None and max(pair) + widest > length
            if count < 1 or length < 1 or too_wide:
                raise ValueError(
                    f"a kernel of {self.sizes} with padding {self.padding!r} does not fit an "
                    f"image of {tuple(lengths)}: {size} values are too many along {length}"
                )
        return found

    def centre(self, dim: int) -> int:
        """Where the middle of the first window lies."""
        return (self.sizes[dim] - 1) // 2 - self.widths[dim][0]


@dataclass(frozen=True)
class Fetch:
    """How a worker comes to what its windows read.

    Attributes:
        steps: what moves and repeats values, one after the other, from the layout of the image.
        target: where the outputs lie.
    """

    steps: tuple[LinearOperator, ...]
    target: Layout

    @property
    def shape(self) -> Shape:
        """Of what this worker reads, with what is repeated."""
        return self.steps[-1].codomain.local_shape

    def apply(self, x: Tensor) -> Tensor:
        """What this worker reads."""
        for step in self.steps:
            x = step.apply(x)
        return x


@kept_in_job
def fetch(source: Layout, kernel: FilterWindow) -> Fetch:
    """The movement for a kernel over an image in the layout `source`.

    Each worker computes the outputs whose windows have their middle in its part, so that what it
    reads of others is the halo, and no more. Dimensions that are whole on each worker are padded
    there, after the exchange.
    """
    first = len(source.shape) - len(kernel.sizes)
    # Outputs lie where the middle of their windows does, so that what is read of others is a halo
    # on both sides, and no worker has to send its whole part.
    target = filtered(source, kernel)
    factors: list[LinearOperator] = []
    here = source
    fields: list[ReceptiveField | None] = [None] * first
    rings: list[PeriodicPadding] = []
    mirrors: dict[int, Mirrored] = {}
    for d, ((before, after), size) in enumerate(zip(kernel.widths, kernel.sizes, strict=True)):
        dim, split = first + d, source.is_split(first + d)
        plain = Window(size, kernel.stride)
        window: ReceptiveField | None = plain
        if kernel.padding in ("reflect", "replicate"):
            mirrors[dim] = Mirrored(
                replace(plain, before=before), source.shape[dim], kernel.padding
            )
            window = mirrors[dim]
        elif kernel.padding == "circular" and before + after and not split:
            rings.append(PeriodicPadding(dim, before, after))
            window = None
        elif kernel.padding == "circular" and before + after:
            factors.append(PeriodicHalo(here, dim, before, after))
            here = factors[-1].codomain
        fields.append(window)
    if kernel.padding == "constant":
        # Zeros are not sent: the image is seen as part of a larger one, of which nobody holds the
        # rim, and a movement fills with zeros what nobody holds.
        none = [(0, 0)] * first
        here = here.embedded(*zip(*none, *kernel.widths, strict=True))
    read = _read(here, target, fields)
    repeats = bool(rings or mirrors)
    # A movement that changes nothing is left out, but for the only step: there must be one that
    # says which shape is read.
    if here != read or not (factors or repeats):
        factors.append(Move(here, read))
    if repeats:
        factors.append(_padding(read, target, mirrors, tuple(rings)))
    return Fetch(tuple(factors), target)


def filtered(source: Layout, kernel: FilterWindow) -> Layout:
    """Where the outputs of a kernel lie: each where the middle of its window does."""
    first = len(source.shape) - len(kernel.sizes)
    lengths = kernel.lengths(source.shape[first:])
    cuts = list(source.cuts)
    for d, length in enumerate(lengths):
        cut = source.cuts[first + d]
        ends = [
            min(max(-((kernel.centre(d) - stop) // kernel.stride), 0), length)
            for _, stop in cut.intervals[:-1]
        ]
        cuts[first + d] = Cut(cut.axes, tuple(zip([0, *ends], [*ends, length], strict=True)))
    return replace(source, shape=(*source.shape[:first], *lengths), cuts=tuple(cuts))


def _read(source: Layout, target: Layout, fields: Sequence[ReceptiveField | None]) -> Layout:
    """What each worker reads of `source` for its part of `target`."""
    cuts = []
    for cut, wanted, field, length in zip(
        source.cuts, target.cuts, fields, source.shape, strict=True
    ):
        if field is None:
            cuts.append(cut)
        else:
            parts = tuple(reads(field, part, length) for part in wanted.intervals)
            cuts.append(Cut(cut.axes, parts))
    return replace(source, cuts=tuple(cuts))


def _padding(
    read: Layout, target: Layout, mirrors: dict[int, Mirrored], rings: tuple[PeriodicPadding, ...]
) -> LocalPadding:
    """What is done on each worker to come from what it reads to what it filters."""
    shapes, steps = [], list[IndexedPadding]()
    # A layout needs the shapes of all workers, though each computes its own part only.
    for worker in read.partition.ranks:
        shape, held, box = list(read.shape_on(worker)), read.box(worker), target.box(worker)
        assert held is not None and box is not None
        for dim, mirror in mirrors.items():
            (start, stop), (first, last) = held[dim], box[dim]
            indices = mirror.places(box[dim]) if first < last else ()
            places = tuple(index - start for index in indices)
            shape[dim] = len(places)
            is_needed = places and places != tuple(range(stop - start))
            if worker == transport.this_worker() and is_needed:
                steps.append(IndexedPadding(dim, places))
        for ring in rings:
            shape[ring.dim] += ring.before + ring.after
        shapes.append(tuple(shape))
    return LocalPadding(read, (*steps, *rings), shapes)


def is_whole(layout: Layout) -> bool:
    """Whether every worker holds the whole tensor, as one shared value."""
    return len(layout.shared) == layout.partition.dim


def check_parts(layout: Layout, what: str) -> None:
    """Raise ValueError unless each index of an image lies on one worker, in order."""
    ordered = all(
        cut.intervals == boxes.consecutive(stop - start for start, stop in cut.intervals)
        and cut.intervals[-1][1] == length
        for cut, length in zip(layout.cuts, layout.shape, strict=True)
    )
    if not ordered or not layout.owns_once or layout.shared:
        raise ValueError(
            f"{what} needs an image in parts that lie one after the other, each on one worker: "
            f"got {layout}"
        )
