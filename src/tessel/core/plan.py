"""Plans: what one worker gives and takes when a tensor goes from one layout to another.

A plan is a pure function of two layouts and a worker. Between two workers travels at most one
piece, the overlap of the giver's box and the taker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from operator import attrgetter

from tessel.core import boxes
from tessel.core.boxes import Box, Region
from tessel.core.layout import Coordinates, Cut, Layout, Shape

# Elements; more than that two workers sum by halves: a second message costs less then than adding
# everything on both.
LARGE = 2**18
# A sum of so many copies or more that one worker gets is made in parts by all who have a copy, if
# it has more than so many elements: else that worker would read and add all copies alone.
MANY, MORE = 4, 2**14
# What one worker gives to so many goes by parts, if it has more than MORE elements: of 1 MiB, whose
# pages all would read at once, 16 workers get their copies in 0.5 ms so, and in 1.2 ms from one of
# them. Eight workers take longer by parts, as there are twice as many messages.
WIDE = 16
Hosts = tuple[int, ...]  # for each worker of the job the number of its host


@dataclass(frozen=True)
class Piece:
    """A part of the local tensor that comes from `peer` or goes to it."""

    peer: int
    region: Region
    shape: Shape
    numel: int

    @classmethod
    def of(cls, peer: int, part: Box, box: Box) -> Piece:
        return cls(peer, boxes.within(part, box), boxes.extent(part), boxes.volume(part))


@dataclass(frozen=True)
class Plan:
    """One worker's side of an exchange.

    Attributes:
        gives: what goes to others, by worker.
        arrives: what comes from others, by worker.
        takes: all that makes up the output, in the order of the sum, the same on all workers.
        kept: what this worker takes from itself.
        source_shape, target_shape: the local tensors, as boxes.
        once: whether each index arrives at most once, so that it is copied rather than added.
        fills: whether what arrives first, or all that arrives once, covers the output.
        silent: whether nobody sends anything to anybody.
        dense: whether everybody, more than two, sends something to everybody.
    """

    gives: tuple[Piece, ...]
    arrives: tuple[Piece, ...]
    takes: tuple[Piece, ...]
    kept: Piece | None
    source_shape: Shape
    target_shape: Shape
    once: bool
    fills: bool
    silent: bool
    dense: bool

    def adds(self, order: int) -> bool:
        """Whether what comes at this place in the order is added to what is there."""
        return not (self.once or (self.fills and order == 0))

    @cached_property
    def outgoing(self) -> tuple[Piece, ...]:
        """What goes to others, and what this worker keeps."""
        return self.gives if self.kept is None else (*self.gives, self.kept)

    @cached_property
    def incoming(self) -> tuple[tuple[Piece, bool], ...]:
        """What makes up the output, and whether it is added."""
        return tuple((piece, self.adds(order)) for order, piece in enumerate(self.takes))

    @cached_property
    def stays(self) -> bool:
        """Whether the whole tensor stays where it is, and nothing else happens anywhere."""
        return self.silent and self.once and self.fills and self.source_shape == self.target_shape


@lru_cache(maxsize=4096)
def route(source: Layout, target: Layout, worker: int, hosts: Hosts = ()) -> tuple[Plan, ...]:
    """The exchanges that take a tensor from `source` to `target`, as `worker` sees them.

    One exchange, but for a sum of copies whose result all of them need: there each first sums one
    part of it and then gives it to the others, which sends the least. Two workers swap their copies
    unless these are large: it sends as much, in one message less, but both add up everything. A
    large sum of many copies that one worker gets is made in the same way, and so is its adjoint: of
    what one worker gives to many each first gets a part, and then those of the others.
    """
    # whose copies share the work: those that are added, or those that are made
    copied, numel, copies = source, *_copies(source)
    if sums_in_place(source, target):
        by_parts = copies != 2 or numel > LARGE
    elif source.owns_once:
        copied, numel, copies = target, *_copies(target)
        by_parts = copies >= WIDE and numel > MORE and gives_copies(source, target)
    else:
        by_parts = copies >= MANY and numel > MORE and sums_elsewhere(source, target)
    if not by_parts:
        return (plan(source, target, worker, hosts),)
    # The boxes may be too thin to be split along a dimension, so their elements are put in a row:
    # halves of any size can be cut then, and a contiguous tensor is not copied for it.
    flat = flattened(copied)
    # Each block is split evenly among the workers that hold a separate copy of it.
    (cut,) = flat.cuts
    intervals = tuple(
        boxes.shift(part, start)
        for start, stop in cut.intervals
        for part in boxes.balanced(stop - start, copies)
    )
    fine = Cut(cut.axes + flat.separate, intervals)
    scattered = Layout(flat.partition, flat.shape, (fine,), flat.shared)
    return (
        plan(flattened(source), scattered, worker, hosts),
        plan(scattered, flattened(target), worker, hosts),
    )


def _copies(layout: Layout) -> tuple[int, int]:
    """How many elements a worker has, on average, and how many separate copies there are."""
    copies = prod(layout.partition.shape[axis] for axis in layout.separate)
    return prod(layout.shape) * copies // max(1, layout.partition.size), copies


def sums_in_place(source: Layout, target: Layout) -> bool:
    """Whether copies are added whose sum all of them get: an all-reduce."""
    return (
        not source.owns_once
        and source.partition == target.partition
        and source.cuts == target.cuts
        and all(boxes.disjoint(cut.intervals) for cut in source.cuts)
    )


@lru_cache(maxsize=1024)
def sums_elsewhere(source: Layout, target: Layout) -> bool:
    """Whether copies are added whose sum one worker gets, of the same boxes in the same order."""
    return (
        not source.owns_once
        and target.owns_once
        and all(boxes.disjoint(cut.intervals) for cut in (*source.cuts, *target.cuts))
        and [*map(source.box, _firsts(source))] == [*map(target.box, _firsts(target))]
    )


def gives_copies(source: Layout, target: Layout) -> bool:
    """Whether one worker has what many get copies of: the adjoint of such a sum."""
    is_alone = all(source.partition.shape[axis] == 1 for axis in source.shared)
    return is_alone and sums_elsewhere(target, source)


def _firsts(layout: Layout) -> Iterator[int]:
    """The first worker of each box, in the order in which `flattened` puts them in a row."""
    axes = sorted(axis for cut in layout.cuts for axis in cut.axes)
    sizes = [layout.partition.shape[axis] for axis in axes]
    for place in range(prod(sizes)):
        coordinates = [0] * layout.partition.dim
        for axis, coordinate in zip(axes, boxes.unravel(place, sizes), strict=True):
            coordinates[axis] = coordinate
        yield layout.partition.worker_at(coordinates)


def flattened(layout: Layout) -> Layout:
    """The same local tensors, each as a block of a one-dimensional index space."""
    axes = tuple(sorted(axis for cut in layout.cuts for axis in cut.axes))
    shapes = [layout.shape_on(worker) for worker in _firsts(layout)]
    flat = Layout.blocks_along(layout.partition, axes, shapes)
    return replace(flat, shared=layout.shared)


@lru_cache(maxsize=4096)
def plan(source: Layout, target: Layout, worker: int, hosts: Hosts = ()) -> Plan:
    """One exchange from `source` to `target`, as `worker` sees it.

    Args:
        source, target: the layouts.
        worker: whose plan this is.
        hosts: of all workers of the job; empty if there is one host.
    """
    # For each separate value of an index, one piece, whoever holds it; in the order of the source's
    # grid: so all workers that get a copy of a sum add in one order.
    wanted, target_shape = target.box(worker), box_shape(target, worker)
    takes: tuple[Piece, ...] = ()
    if wanted is not None:
        takes = tuple(
            Piece.of(giver_of(source, place, target, worker, hosts), part, wanted)
            for place, part in source.agreement(wanted)
        )
    if target.owns_once and all(target.partition.shape[axis] == 1 for axis in target.shared):
        # Nobody else has the sum, so that it may begin with the worker's own: where that covers
        # the output, as in the adjoint of a halo, nothing has to be cleared before.
        takes = tuple(sorted(takes, key=lambda p: p.peer != worker or p.shape != target_shape))
    # Whether every worker takes only from itself: of all workers, not of this one, since a group
    # that has nothing to send makes no exchange at all, and everybody must know that.
    is_silent = all(
        giver_of(source, place, target, each, hosts) == each
        for each in target.partition.ranks
        if (box := target.box(each)) is not None
        for place, _ in source.agreement(box)
    )
    # Whether everybody, more than two, takes from everybody: then one all-to-all is quickest.
    workers, cuts = set(source.partition.ranks), zip(source.cuts, target.cuts, strict=True)
    is_dense = (
        len(workers) > 2
        and workers == set(target.partition.ranks)
        and not source.shared
        and all(boxes.all_overlap(give.intervals, take.intervals) for give, take in cuts)
    )
    gives = _gives(source, target, worker, hosts)
    shapes = box_shape(source, worker), target_shape
    return assembled(worker, gives, takes, shapes, source.owns_once, is_silent, is_dense)


def assembled(
    worker: int,
    gives: Iterable[Piece],
    takes: Iterable[Piece],
    shapes: tuple[Shape, Shape],
    once: bool,
    silent: bool = False,
    dense: bool = False,
) -> Plan:
    """The plan of a worker that gives and takes these pieces of tensors of these shapes."""
    given = sorted((piece for piece in gives if piece.numel), key=attrgetter("peer"))
    taken = tuple(piece for piece in takes if piece.numel)
    # What is copied covers the output together; of what is added, the first alone has to, since
    # the others are added to what it wrote. Else the output is cleared before.
    first = taken if once else taken[:1]
    others = (piece for piece in taken if piece.peer != worker)
    return Plan(
        gives=tuple(piece for piece in given if piece.peer != worker),
        arrives=tuple(sorted(others, key=attrgetter("peer"))),
        takes=taken,
        kept=next((piece for piece in given if piece.peer == worker), None),
        source_shape=shapes[0],
        target_shape=shapes[1],
        once=once,
        fills=sum(piece.numel for piece in first) == prod(shapes[1]),
        silent=silent,
        dense=dense,
    )


def _gives(source: Layout, target: Layout, worker: int, hosts: Hosts) -> Iterator[Piece]:
    """The pieces of this worker's box for all takers who turn to it."""
    own, box = source.partition.coordinates(worker), source.box(worker)
    if own is None or box is None:
        return
    place = tuple(0 if axis in source.shared else at for axis, at in enumerate(own))
    for there, part in target.agreement(box):
        for taker in target.holders(there):
            if giver_of(source, place, target, taker, hosts) == worker:
                yield Piece.of(taker, part, box)


def giver_of(
    source: Layout, place: Coordinates, target: Layout, taker: int, hosts: Hosts = ()
) -> int:
    """Which holder of a value gives it to `taker`: the one beside it, itself if it can be.

    Holders differ along the shared axes. A taker that is one of the source's workers turns to the
    holder at its own coordinates along these; others take turns. Holders on the taker's own host
    come first.
    """
    holders = source.holders(place)
    if hosts:
        holders = [each for each in holders if hosts[each] == hosts[taker]] or holders
    own = source.partition.coordinates(taker)
    if own is not None:
        at = [own[a] if a in source.shared else n for a, n in enumerate(place)]
        beside = source.partition.worker_at(at)
        if beside in holders:
            return beside
    turn = target.partition.place(taker)  # so that no holder has to answer all of them
    assert turn is not None
    return holders[turn % len(holders)]


def box_shape(layout: Layout, worker: int) -> Shape:
    return shape_of(layout.box(worker))


def shape_of(box: Box | None) -> Shape:
    """The shape of a tensor that stores a box; of nothing, that of an empty one."""
    return (0,) if box is None else boxes.extent(box)
