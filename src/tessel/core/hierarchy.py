"""Hierarchy: exchanges of several hosts, in which each value crosses between two hosts once.

Workers of one host that store the same box are a *local group*. The messages that they would each
send to another host, or each get from it, are combined: terms of a sum are added within the group
first, and copies are made within the group last. If several hosts store a value, each takes its own
copy. Between hosts each worker of a group carries a slice of the box, or one worker carries
all of it if it is small. So a movement has up to three exchanges:

    within groups: each adds up its slice  →  between hosts  →  within groups: all get all slices

All of this is a pure function of two layouts and the hosts of the workers, as plans are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from tessel.core import boxes
from tessel.core.boxes import Box
from tessel.core.layout import Coordinates, Layout
from tessel.core.plan import (
    Hosts,
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

# Elements. Up to the first limit one worker of a group carries everything, in one message: the
# cost of a message, a millisecond where the threads of Gloo outnumber the cores, is more than
# several workers save by carrying a slice each. Up to the second limit each host gets the terms of
# all others: that is one step, and a sum by parts has two.
CARRIED_BY_ONE = 2**18
SMALL = 2**14


@dataclass(frozen=True)
class LocalGroup:
    """The workers of one host that store one box; in sums, those whose terms are added first.

    Attributes:
        host: its number.
        workers: in ascending order.
        box: the box that all of them store.
        slices: the part of it that each of them carries between hosts, or None.
        terms: in sums, the workers of the group that hold each of the terms that it adds; empty
            if the host lacks one of the terms that are added together.
    """

    host: int
    workers: tuple[int, ...]
    box: Box
    slices: tuple[Box | None, ...]
    terms: tuple[tuple[int, ...], ...]

    def carried_by(self, worker: int) -> Box | None:
        return self.slices[self.workers.index(worker)]

    def givers(self, taker: int) -> list[int]:
        """The worker that gives each term to `taker`: itself if it can; else holders take turns."""
        return [
            taker if taker in holders else holders[taker % len(holders)] for holders in self.terms
        ]


class LocalGroups:
    """The groups of a layout.

    Several hosts may hold a shared term of a sum, but all workers must add in one order, so that
    copies of sums are equal to the last bit. So each term has one host as its owner, chosen so that
    there are few owners, and terms of one owner are added together: by the owner, and by each host
    that holds all of them.

    Args:
        layout: the layout of the tensor.
        hosts: the hosts of all workers.
        sums: whether its separate values are added.

    Attributes:
        all: in the order of hosts.
        of: the group of each worker that stores a part.
        sums: for the terms of each owner, the groups that add them, by host; in the order of sums.
        adding: the index in `sums` of the term at a place on the grid.
    """

    def __init__(self, layout: Layout, hosts: Hosts, sums: bool = False) -> None:
        holders: dict[Box, dict[Coordinates, list[int]]] = {}  # holders of each term, by its box
        for worker in sorted(layout.partition.ranks):
            box, at = layout.box(worker), layout.partition.coordinates(worker)
            if box is not None and at is not None and boxes.volume(box):
                place = tuple(0 if axis in layout.shared else n for axis, n in enumerate(at))
                holders.setdefault(box, {}).setdefault(place, []).append(worker)
        found: dict[tuple[int, Box, int | None], dict[Coordinates, list[int]]] = {}
        for box, terms in holders.items():
            owners = _owners({place: {hosts[w] for w in terms[place]} for place in terms})
            for place in sorted(terms):
                for worker in terms[place]:
                    key = hosts[worker], box, owners[place] if sums else None
                    found.setdefault(key, {}).setdefault(place, []).append(worker)
        found = {
            (host, box, owner): terms
            for (host, box, owner), terms in sorted(
                found.items(), key=lambda each: (each[0][0], min(map(min, each[1].values())))
            )
        }
        # A host that lacks one of an owner's terms cannot add them in the owner's order: it gets
        # their sum from a host that can.
        complete = {
            (host, box, owner)
            for (host, box, owner), terms in found.items()
            if owner is None or [*terms] == [*found[owner, box, owner]]
        }
        # Groups of one box have equally many carriers, so those of two hosts have the same slices.
        fewest: dict[Box, int] = {}
        for key in complete:
            count = sum(map(len, found[key].values()))
            fewest[key[1]] = min(count, fewest.get(key[1], count))
        made: dict[tuple[int, Box, int | None], LocalGroup] = {}
        for (host, box, owner), terms in found.items():
            workers = tuple(sorted(worker for each in terms.values() for worker in each))
            is_complete = (host, box, owner) in complete
            slices = _slices(box, fewest[box], len(workers)) if is_complete else None
            made[host, box, owner] = LocalGroup(
                host,
                workers,
                box,
                slices or (None,) * len(workers),
                tuple(map(tuple, terms.values())) if sums and is_complete else (),
            )
        self.all = tuple(made.values())
        self.of = {worker: group for group in self.all for worker in group.workers}
        owned = [key for key in made if key[0] == key[2]]  # the owners' groups
        self.sums = [
            {each[0]: made[each] for each in made if each in complete and each[1:] == key[1:]}
            for key in owned
        ]
        self.adding = {place: n for n, key in enumerate(owned) for place in found[key]}

    def adder(self, number: int, host: int) -> LocalGroup:
        """The group that gives a host the terms at an index of `sums`: its own or another."""
        by_host = self.sums[number]
        return by_host[host] if host in by_host else [*by_host.values()][host % len(by_host)]


def _owners(hosts_of: dict[Coordinates, set[int]]) -> dict[Coordinates, int]:
    """The owner of each term: one of the hosts that hold it."""
    left, owners = dict(hosts_of), {}
    while left:
        # Who holds most comes first, so that there are few owners; of several the one with the
        # lowest number, since all workers must choose alike.
        counts = Counter(host for there in left.values() for host in there)
        owner = min(counts, key=lambda host: (-counts[host], host))
        for place in [place for place, there in left.items() if owner in there]:
            owners[place] = owner
            del left[place]
    return owners


def _slices(box: Box, carriers: int, workers: int) -> tuple[Box | None, ...]:
    lengths = boxes.extent(box)
    if prod(lengths) <= CARRIED_BY_ONE or carriers == 1:
        return (box, *[None] * (workers - 1))
    # Along the first dimension that is long enough, as such slices are contiguous in memory.
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
        worker: the worker of these plans.
        hosts: the hosts of all workers of the job; empty if there is one host.
    """
    ranks = (*source.partition.ranks, *target.partition.ranks)
    if hosts and (min(ranks) < 0 or max(ranks) >= len(hosts)):  # placeholders are on no host
        hosts = ()
    direct = direct_route(source, target, worker, hosts)
    if not hosts or all(plan.silent for plan in direct):
        return direct
    is_in_place = sums_in_place(source, target)
    if is_in_place:  # as one row of elements, which can be cut anywhere
        source, target = flattened(source), flattened(target)
    adds, copies = _uses(source, target, hosts)
    if not (adds or copies):
        return direct
    ways = _LocalGroupPlans(source, target, hosts, adds, copies)
    by_parts = copies and is_in_place and ways.is_even and ways.is_long
    return (
        *([ways.add_within(worker)] if adds else []),
        *(ways.sum_by_parts(worker) if by_parts else [ways.between(worker)]),
        *([ways.copy_within(worker)] if copies else []),
    )


@lru_cache(maxsize=1024)
def _uses(source: Layout, target: Layout, hosts: Hosts) -> tuple[bool, bool]:
    """Whether groups add terms for other hosts; whether they copy values from other hosts."""
    sums = not source.owns_once
    gives, takes = local_groups(source, hosts, sums), local_groups(target, hosts)
    adds = copies = False
    for group in takes.all:
        for taker in group.workers:
            for place, _ in source.overlaps(group.box):
                from_group = (
                    gives.adder(gives.adding[place], group.host)
                    if sums
                    else gives.of[giver_of(source, place, target, taker, hosts)]
                )
                if from_group.host != group.host:
                    adds = adds or len(from_group.terms) > 1
                    copies = copies or len(group.workers) > 1
        if copies and (adds or not sums):
            break
    return adds, copies


@dataclass(frozen=True)
class _LocalGroupPlans:
    """The plans of a movement by groups.

    Args:
        source, target: the layouts.
        hosts: the hosts of all workers.
        adds: whether groups add up terms before they are sent to other hosts.
        copies: whether groups copy values that came from other hosts.
    """

    source: Layout
    target: Layout
    hosts: Hosts
    adds: bool
    copies: bool

    @property
    def gives(self) -> LocalGroups:
        return local_groups(self.source, self.hosts, not self.source.owns_once)

    @property
    def takes(self) -> LocalGroups:
        return local_groups(self.target, self.hosts)

    def has(self, worker: int) -> Box | None:
        """The box that a worker has for others, after the sums within its group."""
        return _share(self.gives, worker, self.adds)

    def wants(self, worker: int) -> Box | None:
        """The box that a worker gets, before copies are made within its group."""
        return _share(self.takes, worker, self.copies)

    def add_within(self, worker: int) -> Plan:
        """Each worker of a group adds up the terms of its slice."""
        group, gives, takes = self.gives.of.get(worker), [], []
        if group is not None:
            mine = group.carried_by(worker)
            for taker, part in zip(group.workers, group.slices, strict=True):
                if part is not None and worker in group.givers(taker):
                    gives.append(Piece.of(taker, part, group.box))
            if mine is not None:
                takes = [Piece.of(giver, mine, mine) for giver in group.givers(worker)]
        shapes = box_shape(self.source, worker), shape_of(self.has(worker))
        return assembled(worker, gives, takes, shapes, once=False)

    def between(self, worker: int) -> Plan:
        """Each worker sends its values to all who need them."""
        own, want = self.has(worker), self.wants(worker)
        gives, takes = [], []
        if own is not None:
            gives = [
                Piece.of(taker, part, own)
                for there, _ in self.target.overlaps(own)
                for taker in self.target.holders(there)
                if (part := boxes.intersection(own, self.wants(taker))) is not None
                and any(giver == worker for giver, _ in self._givers(taker, part))
            ]
        if want is not None:
            takes = [Piece.of(giver, part, want) for giver, part in self._givers(worker, want)]
        if len(takes) == 2 and takes[0].region == takes[1].region:
            # a + b is b + a: the term of the other host is written, and the own one added
            takes.sort(key=lambda piece: piece.peer == worker)
        shapes = shape_of(own), shape_of(want)
        return assembled(worker, gives, takes, shapes, self.source.owns_once)

    def _givers(self, taker: int, want: Box) -> list[tuple[int, Box]]:
        """The workers that give parts of a box, in the order of the sum."""
        if self.source.owns_once:
            return [
                (giver_of(self.source, place, self.target, taker, self.hosts), part)
                for place, part in self.source.overlaps(want)
            ]
        met = {self.gives.adding[place] for place, _ in self.source.overlaps(want)}
        adders = [self.gives.adder(number, self.hosts[taker]) for number in sorted(met)]
        return [
            (giver, part)
            for group in adders
            for giver in (group.workers if self.adds else group.givers(taker))
            if (part := boxes.intersection(want, self.has(giver))) is not None
        ]

    @property
    def is_even(self) -> bool:
        """Whether each host adds all terms that it holds, and no other host holds any of them."""
        found = {(group.host, group.box) for group in self.gives.all if group.terms}
        return len(found) == len(self.gives.all) == len(self.gives.sums)

    @property
    def is_long(self) -> bool:
        """Whether a sum over more than two hosts is so large that each should add a part of it.

        Otherwise each host gets the terms of all others, which sends more, in fewer steps.
        """
        blocks: dict[Box, int] = {}
        for group in self.gives.all:
            blocks[group.box] = blocks.get(group.box, 0) + 1
        return any((count - 2) * boxes.volume(box) > SMALL for box, count in blocks.items())

    def sum_by_parts(self, worker: int) -> tuple[Plan, Plan]:
        """The sum over hosts, if all of them need it: each host adds one part of a slice."""
        group, own = self.gives.of.get(worker), self.has(worker)
        mine = None if group is None else group.carried_by(worker)
        if group is None or own is None or mine is None:
            # It makes both exchanges with nothing in them: the workers of a group count exchanges,
            # and messages carry the count.
            empty = assembled(worker, [], [], (shape_of(own), (0,)), once=False)
            return empty, assembled(worker, [], [], ((0,), (0,)), once=False)
        others = [each for each in self.gives.all if each.box == group.box]
        number = group.workers.index(worker)
        peers = [each.workers[number] for each in others]  # which carry the same slice
        ((start, stop),) = mine
        cuts = boxes.balanced(stop - start, len(others))
        parts: list[Box] = [(boxes.shift(part, start),) for part in cuts]
        part = parts[others.index(group)]
        give = [Piece.of(peer, each, own) for peer, each in zip(peers, parts, strict=True)]
        take = [Piece.of(peer, each, mine) for peer, each in zip(peers, parts, strict=True)]
        kept = [Piece.of(peer, part, part) for peer in peers]
        less = boxes.extent(part)
        add = assembled(worker, give, kept, (boxes.extent(own), less), once=False)
        copy = assembled(worker, kept, take, (less, boxes.extent(mine)), once=True)
        return add, copy

    def copy_within(self, worker: int) -> Plan:
        """Each worker of a group gives its slice to all others of the group."""
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
