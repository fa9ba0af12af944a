"""Hierarchy: exchanges of several hosts, in which each value crosses between two hosts once.

Workers of one host that store the same box are a *local group*. What they would each send to
another host, or each get from it, is one thing: terms of a sum are added within the group first,
and copies are made within the group last. Between hosts a group is one: each of its workers carries
a slice of the box, or one of them all of it if that is little. So a movement has up to three
exchanges:

    within groups: each adds up its slice  →  between hosts  →  within groups: all get all slices

All of it is a pure function of two layouts and of who runs on which host, as plans are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from tessel.core import boxes
from tessel.core.boxes import Box
from tessel.core.layout import Coordinates, Layout
from tessel.core.plan import (
    Piece,
    Plan,
    assembled,
    box_shape,
    flattened,
    giver_of,
    shape_of,
    sums_in_place,
)
from tessel.core.plan import route as direct_route

# Elements. Up to the first one worker of a group carries all, in one message: what a message costs
# beside its bytes, a millisecond where the threads of Gloo outnumber the cores, is more than what
# several workers save by carrying a slice each. Up to the second each host gets the terms of all
# others: that is one step, and a sum by parts has two.
CARRIED_BY_ONE = 2**18
SMALL = 2**14
Hosts = tuple[int, ...]  # for each worker the number of its host


@dataclass(frozen=True)
class LocalGroup:
    """The workers of one host that store one box.

    Attributes:
        host: its number.
        workers: in ascending order.
        box: that all of them store.
        slices: which part of it each of them carries between hosts; None for nothing.
        terms: of a sum, those that this group adds: their places on the grid, and who holds each.
    """

    host: int
    workers: tuple[int, ...]
    box: Box
    slices: tuple[Box | None, ...]
    terms: tuple[tuple[Coordinates, int], ...]

    def carried_by(self, worker: int) -> Box | None:
        return self.slices[self.workers.index(worker)]


class LocalGroups:
    """The local groups of a layout.

    Attributes:
        all: in the order of hosts, which is that of sums.
        of: the group of each worker that stores something.
        adding: the group that adds the term at a place on the grid.
    """

    def __init__(self, layout: Layout, hosts: Hosts) -> None:
        found: dict[tuple[int, Box], list[int]] = {}
        holders: dict[Coordinates, int] = {}
        for worker in sorted(layout.partition.ranks):
            box, at = layout.box(worker), layout.partition.coordinates(worker)
            if box is not None and at is not None and boxes.volume(box):
                found.setdefault((hosts[worker], box), []).append(worker)
                place = tuple(0 if axis in layout.shared else n for axis, n in enumerate(at))
                holders.setdefault(place, worker)
        key_of = {worker: key for key, workers in found.items() for worker in workers}
        terms: dict[tuple[int, Box], list[tuple[Coordinates, int]]] = {}
        for place in sorted(holders):
            terms.setdefault(key_of[holders[place]], []).append((place, holders[place]))
        # Groups of one box have as many carriers: those of two hosts have the same slices then.
        fewest: dict[Box, int] = {}
        for (_, box), workers in found.items():
            fewest[box] = min(len(workers), fewest.get(box, len(workers)))
        self.all = tuple(
            LocalGroup(host, tuple(workers), box, _slices(box, fewest[box], len(workers)), given)
            for (host, box), workers in sorted(
                found.items(), key=lambda each: (each[0][0], each[1])
            )
            for given in [tuple(terms.get((host, box), ()))]
        )
        self.of = {worker: group for group in self.all for worker in group.workers}
        self.adding = {place: group for group in self.all for place, _ in group.terms}


def _slices(box: Box, carriers: int, workers: int) -> tuple[Box | None, ...]:
    lengths = boxes.extent(box)
    if prod(lengths) <= CARRIED_BY_ONE or carriers == 1:
        return (box, *[None] * (workers - 1))
    # Along the first dimension that is long enough, whose slices lie together in memory.
    dim = next((d for d, n in enumerate(lengths) if n >= carriers), lengths.index(max(lengths)))
    parts = [
        (*box[:dim], boxes.shift(part, box[dim][0]), *box[dim + 1 :]) if part[0] < part[1] else None
        for part in boxes.balanced(lengths[dim], carriers)
    ]
    return (*parts, *[None] * (workers - carriers))


local_groups = lru_cache(maxsize=1024)(LocalGroups)


@lru_cache(maxsize=4096)
def route(source: Layout, target: Layout, worker: int, hosts: Hosts) -> tuple[Plan, ...]:
    """The exchanges from `source` to `target`, as `worker` sees them.

    Args:
        source, target: the layouts.
        worker: whose plans these are.
        hosts: of all workers of the job; empty if there is one host.
    """
    direct = direct_route(source, target, worker)
    if not hosts or all(plan.silent for plan in direct):
        return direct
    ranks = (*source.partition.ranks, *target.partition.ranks)
    if min(ranks) < 0 or max(ranks) >= len(hosts):  # placeholders run nowhere
        return direct
    is_in_place = sums_in_place(source, target)
    if is_in_place:  # as one row of elements, which can be cut anywhere
        source, target = flattened(source), flattened(target)
    adds, copies = _uses(source, target, hosts)
    if not (adds or copies):
        return direct
    ways = _LocalGroupPlans(source, target, hosts, adds, copies)
    by_parts = adds and copies and is_in_place and ways.is_long
    return (
        *([ways.add_within(worker)] if adds else []),
        *(ways.sum_by_parts(worker) if by_parts else [ways.between(worker)]),
        *([ways.copy_within(worker)] if copies else []),
    )


@lru_cache(maxsize=1024)
def _uses(source: Layout, target: Layout, hosts: Hosts) -> tuple[bool, bool]:
    """Whether groups add terms that go to other hosts; whether they copy what comes from others."""
    gives, takes = local_groups(source, hosts), local_groups(target, hosts)
    sums, sizes = not source.owns_once, source.partition.shape
    adds = copies = False
    if sums and any(sizes[axis] > 1 for axis in source.shared):
        return False, False  # each host may have terms at hand that others have, too
    for group in takes.all:
        for taker in group.workers:
            for place, _ in source.agreement(group.box):
                from_group = (
                    gives.adding[place]
                    if sums
                    else gives.of[giver_of(source, place, target, taker)]
                )
                if from_group.host != group.host:
                    adds = adds or (sums and len(from_group.terms) > 1)
                    copies = copies or len(group.workers) > 1
        if copies and (adds or not sums):
            break
    return adds, copies


@dataclass(frozen=True)
class _LocalGroupPlans:
    """The plans of a movement by local groups.

    Args:
        source, target: the layouts.
        hosts: of all workers.
        adds: whether groups add up terms before these go to other hosts.
        copies: whether groups copy what has come from other hosts.
    """

    source: Layout
    target: Layout
    hosts: Hosts
    adds: bool
    copies: bool

    @property
    def gives(self) -> LocalGroups:
        return local_groups(self.source, self.hosts)

    @property
    def takes(self) -> LocalGroups:
        return local_groups(self.target, self.hosts)

    def has(self, worker: int) -> Box | None:
        """What a worker has for others, after what is added within its group."""
        return _share(self.gives, worker, self.adds)

    def wants(self, worker: int) -> Box | None:
        """What a worker gets, before what is copied within its group."""
        return _share(self.takes, worker, self.copies)

    def add_within(self, worker: int) -> Plan:
        """Each worker of a group adds up the terms of its slice."""
        group, gives, takes = self.gives.of.get(worker), [], []
        if group is not None:
            mine = group.carried_by(worker)
            for taker, part in zip(group.workers, group.slices, strict=True):
                if part is not None:
                    gives.append(Piece.of(taker, part, group.box))
            if mine is not None:
                takes = [Piece.of(giver, mine, mine) for _, giver in group.terms]
        shapes = box_shape(self.source, worker), shape_of(self.has(worker))
        return assembled(worker, gives, takes, shapes, once=False)

    def between(self, worker: int) -> Plan:
        """What each worker has goes to all who want it."""
        own, want = self.has(worker), self.wants(worker)
        gives, takes = [], []
        if own is not None:
            gives = [
                Piece.of(taker, part, own)
                for there, _ in self.target.agreement(own)
                for taker in self.target.holders(there)
                if (part := boxes.intersection(own, self.wants(taker))) is not None
                and any(giver == worker for giver, _ in self._givers(taker, part))
            ]
        if want is not None:
            takes = [Piece.of(giver, part, want) for giver, part in self._givers(worker, want)]
        if len(takes) == 2 and takes[0].region == takes[1].region:
            # a + b is b + a: what comes from the other host is written, and the own term added
            takes.sort(key=lambda piece: piece.peer == worker)
        shapes = shape_of(own), shape_of(want)
        return assembled(worker, gives, takes, shapes, self.source.owns_once)

    def _givers(self, taker: int, want: Box) -> list[tuple[int, Box]]:
        """Who gives what of a box, in the order of the sum."""
        if self.source.owns_once:
            return [
                (giver_of(self.source, place, self.target, taker), part)
                for place, part in self.source.agreement(want)
            ]
        met = {id(self.gives.adding[place]) for place, _ in self.source.agreement(want)}
        return [
            (giver, part)
            for group in self.gives.all
            if id(group) in met
            for giver in (group.workers if self.adds else (holder for _, holder in group.terms))
            if (part := boxes.intersection(want, self.has(giver))) is not None
        ]

    @property
    def is_long(self) -> bool:
        """Whether so much is added over more than two hosts that each is to add a part of it.

        Else each gets the terms of all others, which sends more, in fewer steps.
        """
        blocks: dict[Box, int] = {}
        for group in self.gives.all:
            blocks[group.box] = blocks.get(group.box, 0) + 1
        return any((count - 2) * boxes.volume(box) > SMALL for box, count in blocks.items())

    def sum_by_parts(self, worker: int) -> tuple[Plan, Plan]:
        """The sum over hosts of what all of them want: each host adds one part of a slice."""
        mine = self.has(worker)
        if mine is None:
            empty = assembled(worker, [], [], ((0,), (0,)), once=False)
            return empty, empty
        group = self.gives.of[worker]
        others = [each for each in self.gives.all if each.box == group.box]
        number = group.workers.index(worker)
        peers = [each.workers[number] for each in others]  # who carry the same slice
        ((start, stop),) = mine
        parts = [(boxes.shift(part, start),) for part in boxes.balanced(stop - start, len(others))]
        part = parts[others.index(group)]
        slices = [Piece.of(peer, each, mine) for peer, each in zip(peers, parts, strict=True)]
        own = [Piece.of(peer, part, part) for peer in peers]
        whole, less = boxes.extent(mine), boxes.extent(part)
        add = assembled(worker, slices, own, (whole, less), once=False)
        copy = assembled(worker, own, slices, (less, whole), once=True)
        return add, copy

    def copy_within(self, worker: int) -> Plan:
        """Each worker of a group gives all others of it its slice."""
        group, mine, gives, takes = self.takes.of.get(worker), self.wants(worker), [], []
        if group is not None:
            if mine is not None:
                gives = [Piece.of(taker, mine, mine) for taker in group.workers]
            takes = [
                Piece.of(giver, part, group.box)
                for giver, part in zip(group.workers, group.slices, strict=True)
                if part is not None
            ]
        shapes = shape_of(mine), box_shape(self.target, worker)
        return assembled(worker, gives, takes, shapes, once=True)


def _share(groups: LocalGroups, worker: int, is_sliced: bool) -> Box | None:
    group = groups.of.get(worker)
    if group is None:
        return None
    return group.carried_by(worker) if is_sliced else group.box
