"""Plans: what one worker sends and receives to get a tensor from one layout to another.

A plan is a pure function of two layouts and a worker. At most one piece travels between two
workers, the overlap of the giver's box and the taker's.
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

# Elements: with more, two workers sum by halves. A second message then costs less than adding
# everything on both.
LARGE = 2**18
# A sum of at least this many copies for one worker is made in parts by all workers that have a
# copy, if it has more elements than MORE: otherwise that worker would read and add all copies
# alone.
MANY, MORE = 4, 2**14
# Values that one worker gives to this many go by parts, if there are more than MORE elements: with
# 1 MiB, whose pages all would read at once, 16 workers get their copies in 0.5 ms, instead of 1.2
# ms from one of them. Eight workers take longer by parts, as there are twice as many messages.
WIDE = 16
Hosts = tuple[int, ...]  # the number of the host of each worker of the job


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
        gives: the pieces for others, by worker.
        arrives: the pieces from others, by worker.
        takes: all pieces of the output, in the order of the sum, the same on all workers.
        kept: the pieces that this worker takes from itself.
        source_shape, target_shape: the local tensors, as boxes.
        once: whether each index arrives at most once, so that it is copied rather than added.
        fills: whether the first piece, or all pieces that arrive once, cover the output.
        silent: whether no worker sends anything.
        dense: whether each of more than two workers sends something to each other.
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
        """Whether the piece at this place in the order is added to the values before it."""
        return not (self.once or (self.fills and order == 0))

    @cached_property
    def outgoing(self) -> tuple[Piece, ...]:
        """The pieces for others, and those that this worker keeps."""
        return self.gives if self.kept is None else (*self.gives, self.kept)

    @cached_property
    def incoming(self) -> tuple[tuple[Piece, bool], ...]:
        """The pieces of the output, each with whether it is added."""
        return tuple((piece, self.adds(order)) for order, piece in enumerate(self.takes))

    @cached_property
    def stays(self) -> bool:
        """Whether the whole tensor stays where it is, and nothing else happens anywhere."""
        return self.silent and self.once and self.fills and self.source_shape == self.target_shape


@lru_cache(maxsize=4096)
def route(source: Layout, target: Layout, worker: int, hosts: Hosts = ()) -> tuple[Plan, ...]:
    """The exchanges that take a tensor from `source` to `target`, as `worker` sees them.

    One exchange, except for a sum of copies that all of them need: there each worker first sums one
    part and then sends it to the others, which sends the least. Two workers swap their copies
    unless these are large: this sends as much, in one message less, but both add up everything. A
    large sum of many copies for one worker is made in the same way, and so is its adjoint: of
    the values that one worker gives to many, each first gets a part, and then the parts of the
    others.
    """
    # the workers whose copies share the work: those of the sum, or those that are made
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
    # The boxes may be too thin to be split along a dimension, so their elements are put into a row:
    # it can be cut into halves of any size, and a contiguous tensor is not copied for this.
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
    """The average number of elements of a worker, and the number of separate copies."""
    copies = prod(layout.partition.shape[axis] for axis in layout.separate)
    return prod(layout.shape) * copies // max(1, layout.partition.size), copies


def sums_in_place(source: Layout, target: Layout) -> bool:
    """Whether copies are added and all of them get the sum: an all-reduce."""
    return (
        not source.owns_once
        and source.partition == target.partition
        and source.cuts == target.cuts
        and all(boxes.disjoint(cut.intervals) for cut in source.cuts)
    )


@lru_cache(maxsize=1024)
def sums_elsewhere(source: Layout, target: Layout) -> bool:
    """Whether copies are added and one worker gets the sum, of the same boxes in the same order."""
    return (
        not source.owns_once
        and target.owns_once
        and all(boxes.disjoint(cut.intervals) for cut in (*source.cuts, *target.cuts))
        and [*map(source.box, _firsts(source))] == [*map(target.box, _firsts(target))]
    )


def gives_copies(source: Layout, target: Layout) -> bool:
    """Whether one worker has the values that many get copies of: the adjoint of such a sum."""
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
    # One piece for each separate value of an index, whoever holds it, in the order of the source's
    # grid: so all workers that get a copy of a sum add in one order.
    wanted, target_shape = target.box(worker), box_shape(target, worker)
    takes: tuple[Piece, ...] = ()
    if wanted is not None:
        takes = tuple(
            Piece.of(giver_of(source, place, target, worker, hosts), part, wanted)
            for place, part in source.overlaps(wanted)
        )
    if target.owns_once and all(target.partition.shape[axis] == 1 for axis in target.shared):
        # Nobody else has the sum, so it may begin with the worker's own term: if that covers
        # the output, as in the adjoint of a halo, the output need not be cleared.
        takes = tuple(sorted(takes, key=lambda p: p.peer != worker or p.shape != target_shape))
    # Whether every worker takes only from itself. This is about all workers, not this one: a group
    # with nothing to send makes no exchange at all, and everybody must know that.
    is_silent = all(
        giver_of(source, place, target, each, hosts) == each
        for each in target.partition.ranks
        if (box := target.box(each)) is not None
        for place, _ in source.overlaps(box)
    )
    # If each of more than two workers takes from each other, one all-to-all is quickest.
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
    """The plan of a worker that sends and receives these pieces of tensors of these shapes."""
    given = sorted((piece for piece in gives if piece.numel), key=attrgetter("peer"))
    taken = tuple(piece for piece in takes if piece.numel)
    # Pieces that are copied cover the output together; of pieces that are added, the first one must
    # cover it, as the others are added to it. Otherwise the output is cleared first.
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
    """The pieces of this worker's box for all takers that ask it."""
    own, box = source.partition.coordinates(worker), source.box(worker)
    if own is None or box is None:
        return
    place = tuple(0 if axis in source.shared else at for axis, at in enumerate(own))
    for there, part in target.overlaps(box):
        for taker in target.holders(there):
            if giver_of(source, place, target, taker, hosts) == worker:
                yield Piece.of(taker, part, box)


def giver_of(
    source: Layout, place: Coordinates, target: Layout, taker: int, hosts: Hosts = ()
) -> int:
    """The holder of a value that gives it to `taker`: the nearest one, itself if possible.

    Holders differ along the shared axes. A taker that is a worker of the source asks the
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
    """The shape of a tensor that stores a box; that of an empty one for None."""
    return (0,) if box is None else boxes.extent(box)
