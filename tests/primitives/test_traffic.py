"""What travels: no movement sends a byte or a message more than it must.

Tests `core/plan.py`, `core/move.py`, `testing/traffic.py`, `transport/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import pytest
import torch

import tessel
from registry import (
    GRIDS,
    MAKERS,
    Boxes,
    Case,
    Grid,
    Halo,
    Lengths,
    Shape,
    Side,
    all_gather_all_case,
    all_gather_case,
    all_sum_reduce_case,
    boxes_of,
    broadcast_case,
    even,
    flat,
    gather_case,
    givers,
    grown,
    halo_case,
    move_case,
    near_square,
    parts,
    rank_sets,
    reduce_scatter_case,
    repartition_case,
    row,
    same_shape,
    scatter_case,
    shuffled,
    sum_reduce_case,
    uneven,
    whole,
)
from tessel.core import hierarchy
from tessel.core import plan as plans
from tessel.core.partition import HypotheticalPartition
from tessel.core.plan import LARGE, MANY, MORE, WIDE, plan, route
from tessel.testing import count_traffic

WIDTH = 8  # bytes of a float64

Wire = dict[tuple[int, int], int]  # how many elements go from one worker to another at once


class Freight(NamedTuple):
    """A case, what is sent in each round of it, the least number of elements in all, the way back.

    The way back is the same with givers and takers swapped, but where copies are shared.
    """

    case: Case
    rounds: list[Wire]
    least: int
    back: list[Wire] | None = None

    @classmethod
    def copying(cls, case: Case, shape: Shape, source: Boxes, target: Boxes) -> Freight:
        """Every index goes from its owner to all others whose new box holds it."""
        wire = {}
        for giver, taker in ((a, b) for a in source for b in target):
            common = torch.zeros(shape, dtype=torch.int8)
            common[source[giver]] += 1
            common[target[taker]] += 1
            wire[giver, taker] = int((common == 2).sum())
        owner = torch.full(shape, -1)
        for rank, box in source.items():
            owner[box] = rank
        least = sum(int((owner[box] != taker).sum()) for taker, box in target.items())
        return cls(case, [wire], least)


def freight(n: int) -> Iterator[Freight]:
    yield from broadcasts(n)
    yield from reductions(n)
    yield from repartitions(n)
    yield from halos(n)
    yield from gathers(n)
    yield from moves(n)


def broadcasts(n: int) -> Iterator[Freight]:
    """As many tensors as there are receivers who do not have them already."""
    P, column = flat(n), Grid(range(n - GRIDS[n][0][0], n), (GRIDS[n][0][0], 1))
    around, some = Grid(shuffled(range(n)), P.shape), row(range(1, n))
    for name, X, Y in (
        ("one, all", row([n - 1]), row(range(n))),
        ("column, grid", column, P),
        ("identity", P, P),
        ("other places", around, P),
        ("disjoint", row([0]), some),
    ):
        shapes = {rank: (2, 1 + rank % 3) for rank in X.ranks}
        wire = {(giver, taker): prod(shapes[giver]) for taker, giver in givers(X, Y).items()}
        least = sum(size for (giver, taker), size in wire.items() if giver != taker)
        yield Freight(broadcast_case(name, X, Y, shapes), [wire], least)
        back = {(taker, giver): size for (giver, taker), size in wire.items()}
        yield Freight(sum_reduce_case(name, Y, X, shapes), [back], least)


def reductions(n: int) -> Iterator[Freight]:
    """Of P workers and n elements: 2 (P - 1) n for an all-reduce, (P - 1) n for half of it."""
    P, Q = Grid(range(n), GRIDS[n][1]), row(shuffled(range(n)))
    for axes in ((), (0,), (1,), (0, 2), (0, 1, 2)):
        rows = {tuple(P.row_of(rank, axes)) for rank in P.ranks}
        rounds, least = [Wire(), Wire()], 0
        for members in rows:
            least += 2 * (len(members) - 1) * 35
            _add_all_reduce(rounds, members, 35)
        case = all_sum_reduce_case(f"{axes}", P, axes, same_shape(P, (7, 5)))
        yield Freight(case, rounds, least)
    few: list[Wire] = [{}, {}]
    _add_all_reduce(few, tuple(Q.ranks), n - 1)
    case = all_sum_reduce_case("fewer than workers", Q, (0,), same_shape(Q, (n - 1,)))
    yield Freight(case, few, 2 * (n - 1) * (n - 1))
    pair, much = row(range(min(n, 2))), LARGE + 1
    large: list[Wire] = [{}, {}]
    _add_all_reduce(large, tuple(pair.ranks), much)
    case = all_sum_reduce_case("large", pair, (0,), same_shape(pair, (much,)))
    yield Freight(case, large, 2 * (len(pair.ranks) - 1) * much)

    lengths = {rank: 1 + rank % 3 for rank in Q.ranks}
    wire = {(a, b): 2 * lengths[a] for a in Q.ranks for b in Q.ranks}
    shapes = {rank: (2, length) for rank, length in lengths.items()}
    least = (n - 1) * 2 * sum(lengths.values())
    yield Freight(all_gather_case("uneven", Q, 0, 1, shapes), [wire], least)
    balanced = dict(zip(Q.ranks, parts(2 * n + 1, n), strict=True))
    wire = {(a, b): 3 * balanced[b] for a in Q.ranks for b in Q.ranks}
    case = reduce_scatter_case("", Q, 0, 0, same_shape(Q, (2 * n + 1, 3)))
    yield Freight(case, [wire], (n - 1) * 3 * (2 * n + 1))


def _add_all_reduce(rounds: list[Wire], members: tuple[int, ...], numel: int) -> None:
    """Two workers swap what is small; else all sum up a part each and give it to the others."""
    if len(members) < 2 or (len(members) == 2 and numel <= LARGE):
        rounds[0] |= {(a, b): numel for a in members for b in members}
        return
    own = dict(zip(members, parts(numel, len(members)), strict=True))
    rounds[0] |= {(a, b): own[b] for a in members for b in members}
    rounds[1] |= {(a, b): own[a] for a in members for b in members}


def repartitions(n: int) -> Iterator[Freight]:
    """The elements that leave their worker."""
    shape = (11, 7)
    for name, left, right in rank_sets(n):
        X, Y = Grid(left, near_square(len(left))), Grid(right, (1, len(right)))
        for cut in (even, uneven):
            yield _repartition(f"{name} {cut.__name__}", X, Y, cut(shape, X.shape))
    P, tall = flat(n), Grid(range(n), (n, 1))
    identity = _repartition("identity", P, P, even(shape, P.shape))
    assert identity.least == 0
    yield identity
    yield _repartition("fewer rows than workers", tall, P, even((2, 5), tall.shape))


def _repartition(name: str, X: Grid, Y: Grid, lengths: Lengths) -> Freight:
    shape = tuple(map(sum, lengths))
    target = boxes_of(Y, even(shape, Y.shape))
    case = repartition_case(name, X, Y, lengths)
    return Freight.copying(case, shape, boxes_of(X, lengths), target)


def halos(n: int) -> Iterator[Freight]:
    """The elements of the halos, wherever they come from."""
    everyone, P = row(range(n)), flat(n)
    yield _halo("1-D", everyone, [(1, 1)], [parts(3 * n, n)])
    yield _halo("wide", everyone, [(3, 4)], [parts(2 * n, n)])
    yield _halo("none", everyone, [(0, 0)], [parts(2 * n, n)])
    yield _halo("empty workers", everyone, [(2, 1)], [[3 * (k % 2) for k in range(n)]])
    yield _halo("2-D", P, [(1, 1), (0, 2)], even([3 * p for p in P.shape], P.shape))


def _halo(name: str, X: Grid, halo: Halo, lengths: Lengths) -> Freight:
    shape, source = tuple(map(sum, lengths)), boxes_of(X, lengths)
    target = grown(source, halo, shape)
    found = Freight.copying(halo_case(name, X, halo, lengths), shape, source, target)
    assert found.least == _volume(target) - _volume(source)
    return found


def _volume(boxes: Boxes) -> int:
    return sum(prod(part.stop - part.start for part in box) for box in boxes.values())


def gathers(n: int) -> Iterator[Freight]:
    P = Grid(shuffled(range(n)), (n, 1))
    shape, lengths = (n + 2, 2), even((n + 2, 2), (n, 1))
    boxes = boxes_of(P, lengths)
    first, everywhere = whole(P.ranks[:1], shape), whole(P.ranks, shape)
    yield Freight.copying(scatter_case("", P, shape), shape, first, boxes)
    yield Freight.copying(gather_case("", P, lengths), shape, boxes, first)
    yield Freight.copying(all_gather_all_case("", P, lengths), shape, boxes, everywhere)


def moves(n: int) -> Iterator[Freight]:
    """Shared copies need not be fetched by who holds one; their sum is asked for once."""
    shape, P = (5, 4), flat(n)
    separate, shared, balanced = (
        Side(kind, P, shape) for kind in ("separate copies", "shared copies", "balanced")
    )
    summed: list[Wire] = [{}, {}]
    _add_all_reduce(summed, tuple(P.ranks), 20)
    least = 2 * (n - 1) * 20
    yield Freight(move_case("", shared, shared), [], 0)
    yield Freight(move_case("", shared, separate), [], 0, back=summed)
    yield Freight(move_case("", separate, shared), summed, least, back=[])
    yield Freight(move_case("", separate, separate), summed, least)

    spread = Freight.copying(
        move_case("", balanced, shared), shape, balanced.boxes(), whole(P.ranks, shape)
    )
    yield spread._replace(back=[])
    yield Freight(move_case("", shared, balanced), [], 0, back=spread.rounds)
    around = Side("balanced", Grid(shuffled(P.ranks), P.shape), shape)
    spread = Freight.copying(
        move_case("", around, shared), shape, around.boxes(), whole(P.ranks, shape)
    )
    yield Freight(move_case(" in another order", shared, around), [], 0, back=spread.rounds)


# On the workers.

Counts = dict[str, tuple[int, int, int, int]]  # messages, bytes sent and received, agreements


def count_all() -> list[Counts]:
    return [count_one(item.case) for item in freight(tessel.world().size)]


def count_one(case: Case) -> Counts:
    me, layer = tessel.world().rank, case.build()
    x, counts = case.input_of(me), {}
    with count_traffic() as traffic:
        y = layer(x)
    counts["forward"] = _numbers(traffic)
    with count_traffic() as traffic:
        y = layer(x.requires_grad_())
    counts["forward, recorded"] = _numbers(traffic)
    with count_traffic() as traffic:
        y.sum().backward()
    counts["backward"] = _numbers(traffic)
    return counts


def _numbers(traffic: Any) -> tuple[int, int, int, int]:
    return traffic.messages, traffic.bytes_sent, traffic.bytes_received, traffic.agreements


def expected_counts(rounds: list[Wire], worker: int) -> tuple[int, int, int]:
    wires = [
        (a, b, size) for wire in rounds for (a, b), size in wire.items() if a != b and size > 0
    ]
    sent = [size for a, _, size in wires if a == worker]
    received = [size for _, b, size in wires if b == worker]
    return len(sent), WIDTH * sum(sent), WIDTH * sum(received)


def swapped(rounds: list[Wire]) -> list[Wire]:
    return [{(b, a): size for (a, b), size in wire.items()} for wire in rounds]


@pytest.mark.parametrize("nprocs", [2, 3, 4, 6, 12])
def test_bytes_and_messages_are_the_least(run: Any, nprocs: int) -> None:
    everyones = run(count_all, nprocs=nprocs)
    for item, *counts in zip(freight(nprocs), *everyones, strict=True):
        name, rounds = item.case.name, item.rounds
        way_back = swapped(rounds) if item.back is None else item.back
        total = sum(own["forward"][1] for own in counts)
        assert total == WIDTH * item.least, f"{name}: {total} bytes, the least is {item.least} × 8"
        for worker, own in enumerate(counts):
            label = f"{name} on worker {worker}"
            there, back = (expected_counts(way, worker) for way in (rounds, way_back))
            assert own["forward"][:3] == there, label
            assert own["forward, recorded"][:3] == there, label
            assert own["backward"][:3] == back, f"backward of {label}"
            assert own["backward"][3] == 0, f"{label} agrees again in the backward pass"
            assert own["forward"][3] <= 1, f"{label} agrees more than once"


def count_alone() -> list[Counts]:
    return [count_one(case) for make in MAKERS.values() for case in make(1)]


def test_one_worker_sends_nothing(run: Any) -> None:
    (counts,) = run(count_alone, nprocs=1)
    assert {numbers for own in counts for numbers in own.values()} == {(0, 0, 0, 0)}


def count_gifts(givers: int) -> int:
    """How many messages this worker sends when the others need a value that several share."""
    n = tessel.world().size
    X, Y = Grid(range(givers), (givers, 1)), Grid(range(givers, n), (1, n - givers))
    move = tessel.Move(
        Side("shared copies", X, (2, 2)).layout(), Side("separate copies", Y, (2, 2)).layout()
    )
    x = torch.ones(move.domain.local_shape)
    with count_traffic() as traffic:
        move(x)
    return traffic.messages


@pytest.mark.parametrize("givers", [1, 2, 3, 5])
def test_holders_of_a_shared_value_take_turns(run: Any, givers: int) -> None:
    messages = run(count_gifts, givers, nprocs=6)
    assert sum(messages) == 6 - givers
    assert max(messages[:givers]) - min(messages[:givers]) <= 1


# What need not happen.


def count_unneeded_backward() -> list[Any]:
    """Input data asks for no gradient: that of a weight behind the movement is had without it."""
    results = []
    for case in (item.case for item in freight(tessel.world().size)):
        layer, x = case.build(), case.input_of(tessel.world().rank)
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        y = layer(x)
        with count_traffic() as traffic:
            (y * weight).sum().backward()
        right = weight.grad.item() == y.sum().item()
        with torch.no_grad(), count_traffic() as silent:
            quiet = layer(x.requires_grad_())
        results.append(
            (case.name, _numbers(traffic), right, quiet.requires_grad, silent.agreements)
        )
    return results


def test_no_exchange_that_nobody_needs(run: Any) -> None:
    for results in run(count_unneeded_backward, nprocs=4):
        for name, numbers, right, recorded, agreements in results:
            assert numbers == (0, 0, 0, 0), name
            assert right and not recorded and agreements <= 1, name


def apply_again() -> tuple[Mapping[str, int], ...]:
    """The numbers of plans made in a first round, and in two more with layers built anew."""
    cases = [item.case for item in freight(tessel.world().size)]
    numbers = []
    for again in range(3):
        for case in cases:
            layer = case.build()
            for _ in range(1 + again):
                x = case.input_of(tessel.world().rank, seed=again).requires_grad_()
                layer(x).sum().backward()
        numbers.append({"plans": plan.cache_info().misses, "routes": route.cache_info().misses})
    return tuple(numbers)


def test_repeated_application_makes_no_new_plan(run: Any) -> None:
    for first, second, third in run(apply_again, nprocs=4):
        assert first["plans"] > 0
        assert first == second == third


def count_by_dtype(dtype: torch.dtype) -> int:
    world = tessel.world()
    layer = tessel.nn.HaloExchange(world, [(1, 0)])
    with count_traffic() as traffic:
        layer(torch.ones(4, dtype=dtype))
    return traffic.bytes_received


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bool, 1), (torch.bfloat16, 2), (torch.complex128, 16)], ids=str
)
def test_bytes_of_other_dtypes(run: Any, dtype: torch.dtype, width: int) -> None:
    assert run(count_by_dtype, dtype, nprocs=3) == [0, width, width]


def busiest(
    source: tessel.Layout, target: tessel.Layout, workers: Sequence[int]
) -> tuple[int, int, int]:
    """The exchanges, and the most messages and elements that a worker sends or receives in all."""
    routes = [route(source, target, worker) for worker in workers]
    ends = [
        [piece.numel for plan in plans for piece in getattr(plan, name)]
        for plans in routes
        for name in ("gives", "arrives")
    ]
    return len(routes[0]), max(map(len, ends)), max(map(sum, ends))


@pytest.mark.parametrize("num_workers", [4, 8, 16])
def test_a_large_sum_for_one_worker_takes_no_longer_with_more_workers(num_workers: int) -> None:
    P, root = HypotheticalPartition((num_workers,)), HypotheticalPartition((1,))
    for n, by_parts in ((MORE, False), (MORE + num_workers, True), (2**20, True)):
        source = tessel.Layout.whole(P, (n,))
        found = busiest(source, tessel.Layout.whole(root, (n,)), P.ranks)
        part = (num_workers - 1) * (n // num_workers)
        # the one who gets the sum adds a part, as all do, and then gets the others
        least = (2, 2 * (num_workers - 1), 2 * part)
        assert found == (least if by_parts else (1, num_workers - 1, (num_workers - 1) * n))
    few = tessel.Layout.whole(HypotheticalPartition((3,)), (2**20,))
    assert busiest(few, tessel.Layout.whole(root, (2**20,)), range(3))[0] == 1


def sums_of_blocks() -> list[bool]:
    """Copies of blocks along a grid, whose sums the first row of it gets; and of all on one."""
    world, found = tessel.world(), []
    size = world.size
    for grid, shape in (([size, 1], (3, 7000)), ([size // 2, 2], (40, 2001))):
        P = world.create_cartesian_topology_partition(grid)
        first = world.create_partition_inclusive(range(grid[1]))
        Q = first.create_cartesian_topology_partition([1, grid[1]])
        source, target = (tessel.Layout.split(each, shape, (None, 1)) for each in (P, Q))
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)
        move = tessel.Move(source, target)
        sums = [move.apply((world.rank + 1) * source.local_part(whole)) for _ in range(2)]
        sums.append(move((world.rank + 1) * source.local_part(whole)))
        at = P.coordinates(world.rank)[1]
        total = sum(w + 1 for w in P.ranks if P.coordinates(w)[1] == at)
        expected = total * target.local_part(whole) if Q.active else torch.empty(0)
        found += [torch.equal(each, expected) for each in sums]
        found.append(len(move.stages) == (2 if grid[0] >= MANY else 1))
    return found


@pytest.mark.parametrize("nprocs", [4, 8])
def test_sums_of_blocks_are_made_by_all(run: Any, nprocs: int) -> None:
    assert all(map(all, run(sums_of_blocks, nprocs=nprocs)))


@pytest.mark.parametrize("num_workers", [WIDE // 2, WIDE, 2 * WIDE])
def test_what_one_worker_gives_to_many_goes_by_parts(num_workers: int) -> None:
    P, root = HypotheticalPartition((num_workers,)), HypotheticalPartition((1,))
    for n in (MORE, MORE + num_workers, 2**20):
        found = busiest(tessel.Layout.whole(root, (n,)), tessel.Layout.whole(P, (n,)), P.ranks)
        part = (num_workers - 1) * (n // num_workers)
        by_parts = num_workers >= WIDE and n > MORE
        # the giver gives each a part, and then its own part to all, as all do
        least = (2, 2 * (num_workers - 1), 2 * part)
        assert found == (least if by_parts else (1, num_workers - 1, (num_workers - 1) * n))
    # what all have is not moved
    have = tessel.Layout.whole(P, (2**20,), shared=True)
    assert [each.silent for each in route(have, tessel.Layout.whole(P, (2**20,)), 0)] == [True]


def copies_of_blocks() -> list[bool]:
    """Blocks of a first row of workers, which those below get; all that one has; by parts."""
    world, found = tessel.world(), []
    size, kept = world.size, plans.WIDE
    plans.WIDE = 2
    plans.route.cache_clear()
    hierarchy.route.cache_clear()
    try:
        for grid, shape in (([size, 1], (3, 7000)), ([size // 2, 2], (40, 2001))):
            P = world.create_cartesian_topology_partition(grid)
            first = world.create_partition_inclusive(range(grid[1]))
            Q = first.create_cartesian_topology_partition([1, grid[1]])
            source, target = (tessel.Layout.split(each, shape, (None, 1)) for each in (Q, P))
            for kind in (torch.float64, torch.bool):
                whole = torch.arange(shape[0] * shape[1]).view(shape).to(kind)
                x = source.local_part(whole) if Q.active else torch.empty(0, dtype=kind)
                move = tessel.Move(source, target)
                got = [move.apply(x), move.apply(x), move(x)]
                room = torch.empty(target.local_shape, dtype=kind)
                got.append(move(x, out=room))
                found += [torch.equal(each, target.local_part(whole)) for each in got]
                found.append(len(move.stages) == 2)
            found.append(len(move.H.stages) == (2 if grid[0] >= MANY else 1))
    finally:
        plans.WIDE = kept
        plans.route.cache_clear()
        hierarchy.route.cache_clear()
    return found


@pytest.mark.parametrize("nprocs", [4])
def test_copies_of_blocks_are_given_by_all(run: Any, nprocs: int) -> None:
    assert all(map(all, run(copies_of_blocks, nprocs=nprocs)))
