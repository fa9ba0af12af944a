"""Images in parts: which workers hold one together, and what each reads to filter it.

An image in parts is split along some axes of a grid of workers. Along the others, the shared axes
of its layout, there are copies of it: each copy serves some of the operators. The workers of one
copy are a row.

A filter reads a halo around each part. At the border of the image the padding determines what it
reads: values from the other end (`periodic_halo`, which moves them), or values that the worker
already has (`LocalPadding`, which repeats them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tessel import transport
from tessel.core import (
    Cut,
    Interval,
    Layout,
    LinearOperator,
    Mirrored,
    Move,
    Partition,
    ReceptiveField,
    Replicate,
    Window,
    reads,
)
from tessel.errors import check_choice
from tessel.tensor import periodic_halo
from tessel.transport import kept_in_job

RunOfPlaces = tuple[int, int]  # where consecutive values begin, and their number


def operator_grid(partition: Partition, shape: Iterable[int]) -> Layout:
    """The layout of an image on a grid whose first axis is for operators and whose others split it.

    A partition of 2×1×4 workers has two copies of the image for two groups of operators, each with
    its last dimension in four parts and the one before it whole.

    Args:
        partition: the grid.
        shape: the shape of the image; the axes after the first split as many of its last
            dimensions.

    >>> import tessel
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.imaging.parts.operator_grid(P, (1, 3, 8, 8)).shared
    (0,)
    """
    lengths = tuple(shape)
    split = partition.dim - 1
    if split > len(lengths):
        raise ValueError(
            f"expected a grid of operators and at most {len(lengths)} dimensions for an image of "
            f"{lengths}, got {partition}"
        )
    axes = [None] * (len(lengths) - split) + list(range(1, partition.dim))
    return Layout.split(partition, lengths, axes, shared=[0])


def check_parts(layout: Layout, what: str, shared: bool = False) -> None:
    """Raise ValueError unless each index of an image is on one worker, in order.

    Args:
        layout: the layout of the image.
        what: the caller that needs this, in words.
        shared: whether several workers may share one part.
    """
    pairs = zip(layout.cuts, layout.shape, strict=True)
    ordered = all(cut.is_consecutive(length) for cut, length in pairs)
    if not ordered or not layout.owns_once or (layout.shared and not shared):
        where = "" if shared else ", each on one worker"
        raise ValueError(f"{what} needs an image in consecutive parts{where}, got {layout}")


@kept_in_job
def bringing(source: Layout, target: Layout) -> LinearOperator:
    """The operator from one layout to what each worker reads, in another, with separate copies."""
    # If each worker already has what it reads, nothing is sent or copied.
    if replace(source, shared=()) == target:
        return Replicate(source, target)
    return Move(source, target)


@kept_in_job
def gathering(layout: Layout, owner: int) -> Move:
    """The operator that gathers a tensor on one worker; the adjoint scatters."""
    return Move(layout, Layout.whole(Partition((owner,), (1,)), layout.shape))


PADDINGS = ("valid", "circular", "reflect", "replicate", "constant")


@dataclass(frozen=True)
class FilterWindow:
    """A window that slides over the last dimensions of an image.

    Output i reads s·i − before + t for t < size; the padding defines the values beyond the image.
    With "valid" no window reaches beyond it, and there are fewer outputs.

    Args:
        sizes: the sizes of the window, one for each of the last dimensions.
        padding: "valid", "circular", "reflect", "replicate" or "constant" (zeros).
        stride: the distance between windows.

    >>> FilterWindow((3, 4), "circular").widths, FilterWindow((3,), "valid", stride=2).lengths((9,))
    (((1, 1), (1, 2)), (4,))
    """

    sizes: tuple[int, ...]
    padding: str
    stride: int = 1

    def __post_init__(self) -> None:
        check_choice("padding", self.padding, PADDINGS)
        if self.stride < 1 or any(size < 1 for size in self.sizes):
            raise ValueError(
                f"a kernel needs sizes and a stride of at least 1, got {self.sizes} and "
                f"{self.stride}"
            )

    @cached_property
    def widths(self) -> tuple[Interval, ...]:
        """How far the windows extend beyond the image, before and after it."""
        if self.padding == "valid":
            return ((0, 0),) * len(self.sizes)
        return tuple(((size - 1) // 2, size // 2) for size in self.sizes)

    def lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The number of outputs along dimensions of these lengths."""
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

    def field(self, dim: int, length: int) -> ReceptiveField:
        """The receptive field along a dimension of the image with this length."""
        window = Window(self.sizes[dim], self.stride)
        if self.padding not in ("reflect", "replicate"):
            return window  # values beyond the image are moved or filled in before
        return Mirrored(replace(window, before=self.widths[dim][0]), length, self.padding)

    def centre(self, dim: int) -> int:
        """The position of the center of the first window."""
        return (self.sizes[dim] - 1) // 2 - self.widths[dim][0]


@kept_in_job
def fetch(source: Layout, kernel: FilterWindow) -> tuple[tuple[LinearOperator, ...], Layout]:
    """The steps that bring each worker what its windows read, and the layout of the outputs.

    Each worker computes the outputs whose windows are centered in its part, so that it reads a halo
    on both sides from others, and no worker has to send its whole part. Dimensions that are whole
    on each worker are padded there, after the exchange.
    """
    first = len(source.shape) - len(kernel.sizes)
    target = filtered(source, kernel)
    steps: list[LinearOperator] = []
    here = source
    fields: list[ReceptiveField | None] = [None] * first
    rings: dict[int, Interval] = {}
    for dim, width in enumerate(kernel.widths, first):
        is_ring = kernel.padding == "circular" and width != (0, 0)
        if is_ring and source.is_split(dim):
            steps.append(periodic_halo(here, dim, *width))
            here = steps[-1].codomain
        elif is_ring:  # padded after the exchange, which then sends less
            rings[dim] = width
        fields.append(None if dim in rings else kernel.field(dim - first, source.shape[dim]))
    mirrors = {dim: each for dim, each in enumerate(fields) if isinstance(each, Mirrored)}
    if kernel.padding == "constant":
        # Zeros are not sent: the image becomes part of a larger one whose rim no worker holds, and
        # a move fills indices that no worker holds with zeros.
        here = here.embedded(*zip(*[(0, 0)] * first, *kernel.widths, strict=True))
    cuts = tuple(
        cut
        if field is None
        else Cut(cut.axes, tuple(reads(field, part, length) for part in wanted.intervals))
        for cut, wanted, field, length in zip(
            here.cuts, target.cuts, fields, here.shape, strict=True
        )
    )
    read = replace(here, cuts=cuts)
    # A move that changes nothing is omitted, unless it is the only step: one is needed to define
    # the shape that is read.
    if here != read or not (steps or rings or mirrors):
        steps.append(Move(here, read))
    for dim, (before, after) in rings.items():
        steps.append(periodic_halo(read, dim, before, after))
        read = steps[-1].codomain
    if mirrors:
        steps.append(LocalPadding(read, target, mirrors))
    for step in steps:
        step.prepare()  # all workers make the groups here, not in a first call
    return tuple(steps), target


def filtered(source: Layout, kernel: FilterWindow) -> Layout:
    """The layout of the outputs of a kernel: each is where the center of its window is."""
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


class LocalPadding(LinearOperator):
    """Repeat values of the part that a worker reads where its windows extend beyond the image.

    Forward:  y[i] = x[places[i]] along each dimension; nothing is sent. The adjoint adds up the
    gradients of repeated values.

    Args:
        read: the layout that the workers read.
        target: the layout with the repeated values.
        mirrors: for each padded dimension, the indices that the windows of outputs read.
    """

    def __init__(self, read: Layout, target: Layout, mirrors: Mapping[int, Mirrored]) -> None:
        self.domain, partition = read, read.partition
        self.runs: dict[int, list[RunOfPlaces]] = {}  # for each dimension that this worker pads
        shapes = []
        # A layout needs the shapes of all workers, though each computes only its own part.
        for worker in partition.ranks:
            shape, held, box = list(read.shape_on(worker)), read.box(worker), target.box(worker)
            assert held is not None and box is not None
            for dim, mirror in mirrors.items():
                start, (first, last) = held[dim][0], box[dim]
                indices = mirror.places(box[dim]) if first < last else ()
                places = [index - start for index in indices]
                is_padded = places and places != list(range(shape[dim]))
                if is_padded and worker == transport.this_worker():
                    self.runs[dim] = _runs(places)
                shape[dim] = len(places)
            shapes.append(tuple(shape))
        self.codomain = Layout.blocks_along(partition, tuple(range(partition.dim)), tuple(shapes))

    def _apply(self, x: Tensor) -> Tensor:
        x = x.detach()
        for dim, runs in self.runs.items():
            x = torch.cat([x.narrow(dim, start, length) for start, length in runs], dim)
        return x

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        y = y.detach()
        for dim, runs in reversed(self.runs.items()):
            x = y.new_zeros((*y.shape[:dim], self.domain.local_shape[dim], *y.shape[dim + 1 :]))
            place = 0
            # One after another, since runs overlap: in a short image even those of both ends.
            for start, length in runs:
                x.narrow(dim, start, length).add_(y.narrow(dim, place, length))
                place += length
            y = x
        return y


def _runs(places: Sequence[int]) -> list[RunOfPlaces]:
    """Group places into runs of consecutive ones, so that slices are copied and not single rows.

    >>> _runs([1, 0, 1, 2, 3, 2])
    [(1, 1), (0, 4), (2, 1)]
    """
    found: list[RunOfPlaces] = []
    for place in places:
        if found and place == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return found
