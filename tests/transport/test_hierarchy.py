"""Hierarchy: several hosts give the numbers of one, and each value crosses between them once.

Tests `core/hierarchy.py`.
"""

from __future__ import annotations

import itertools
import random
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

import stress
import tessel
from tessel.core import hierarchy
from tessel.core.boxes import Box
from tessel.core.hierarchy import Hosts, route
from tessel.core.layout import Coordinates, Layout
from tessel.core.partition import Partition
from tessel.core.plan import LARGE, Plan
from tessel.core.plan import route as direct_route
from tessel.core.shared import Sum
from tessel.testing import count_traffic

Values = dict[int, np.ndarray]
HOSTS: list[Hosts] = [(0, 0, 1, 1), (0, 1, 0, 0), (0, 1, 2, 2), (0, 0, 0, 1, 1, 2, 2, 2)]


class Planned(Partition):
    """Workers in any order on a grid, who need not exist."""

    def __post_init__(self) -> None:
        self._find_places()


@pytest.fixture(params=[0, 10**6], ids=["in slices", "by one worker"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is carried by one worker of a group: nothing, or everything."""
    monkeypatch.setattr(hierarchy, "SMALL", request.param)
    monkeypatch.setattr(hierarchy, "CARRIED_BY_ONE", request.param)
    _forget_routes()
    request.addfinalizer(_forget_routes)


def _forget_routes() -> None:
    for remembering in (route, hierarchy.local_groups, hierarchy._uses):
        remembering.cache_clear()


def follow(plans: dict[int, Plan], values: Values) -> Values:
    """One exchange of all workers."""
    found = {}
    for worker, plan in plans.items():
        y = np.zeros(plan.target_shape)
        for order, piece in enumerate(plan.takes):
            giver = plans[piece.peer]
            sent = [each for each in giver.outgoing if each.peer == worker]
            assert len(sent) == 1, "one message for each pair"
            came = values[piece.peer].reshape(giver.source_shape)[sent[0].region]
            if plan.adds(order):
                y[piece.region] += came
            else:
                y[piece.region] = came
        found[worker] = y
        gone = [piece.peer for piece in plan.gives]
        assert len({*gone}) == len(gone)
        for peer in gone:
            assert any(piece.peer == worker for piece in plans[peer].arrives)
    return found


def apply(source: Layout, target: Layout, hosts: Hosts, values: Values) -> tuple[Values, int, int]:
    """What a movement gives, and the values and messages that go to other hosts."""
    workers, crossed, messages = range(len(hosts)), 0, 0
    routes = {worker: route(source, target, worker, hosts) for worker in workers}
    assert len({len(each) for each in routes.values()}) == 1
    for stage in range(len(routes[0])):
        plans = {worker: routes[worker][stage] for worker in workers}
        values = follow(plans, values)
        for worker, plan in plans.items():
            away = [piece for piece in plan.gives if hosts[piece.peer] != hosts[worker]]
            crossed += sum(piece.numel for piece in away)
            messages += len(away)
    return values, crossed, messages


def direct(source: Layout, target: Layout, workers: range, values: Values) -> Values:
    routes = {worker: direct_route(source, target, worker) for worker in workers}
    for stage in range(len(routes[0])):
        values = follow({worker: routes[worker][stage] for worker in workers}, values)
    return values


def draw(layout: Layout, workers: range, rng: np.random.Generator) -> Values:
    """Other values for each place; the same for holders of a shared value."""
    values: Values = {}
    for worker in workers:
        box = layout.box(worker)
        shape = (0,) if box is None else tuple(stop - start for start, stop in box)
        values[worker] = rng.integers(0, 100, shape).astype(float)
    for worker in workers:
        at = layout.partition.coordinates(worker)
        if at is not None:
            place = tuple(0 if axis in layout.shared else n for axis, n in enumerate(at))
            for holder in layout.holders(place):
                values[holder] = values[layout.holders(place)[0]]
    return values


@pytest.mark.parametrize("hosts", HOSTS)
def test_movements_over_hosts_are_those_of_one(
    small: None, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = range(len(hosts))
    rng, numbers, ways = random.Random(1), np.random.default_rng(1), set()

    def draw_grid(rng: random.Random, dims: int) -> Partition:
        size = rng.randint(1, len(workers))
        shape = [1] * dims
        for factor in stress._factors(size):
            shape[rng.randrange(dims)] *= factor
        return Planned(tuple(rng.sample(workers, size)), tuple(shape))

    monkeypatch.setattr(stress, "draw_grid", draw_grid)
    for _ in range(250):
        shape = stress.draw_shape(rng, 60)
        source, target = stress.draw_layout(rng, shape), stress.draw_layout(rng, shape)
        if rng.random() < 0.3:
            target = source
        values = draw(source, workers, numbers)
        got, crossed, _ = apply(source, target, hosts, values)
        expected = direct(source, target, workers, values)
        for worker in workers:
            np.testing.assert_array_equal(got[worker].ravel(), expected[worker].ravel())
        ways.add(len(route(source, target, 0, hosts)))
        assert hierarchy.SMALL or crossed <= sum(
            piece.numel
            for worker in workers
            for plan in direct_route(source, target, worker)
            for piece in plan.gives
            if hosts[piece.peer] != hosts[worker]
        )
    assert {1, 2, 3} <= ways


@pytest.mark.parametrize("hosts", HOSTS)
def test_each_value_crosses_once(small: None, hosts: Hosts) -> None:
    n, num_hosts, size = 4800, len({*hosts}), len(hosts)
    world = Planned(tuple(range(size)), (size,))
    first = Layout.whole(Planned((0,), (1,)), (n,))
    whole, split = Layout.whole(world, (n,)), Layout.balanced(world, (n,))
    there = n - sum(n // size for host in hosts if host == hosts[0])  # parts of other hosts
    outside = sum(n - n // size * hosts.count(host) for host in {*hosts})
    least = {
        (first, whole): n * (num_hosts - 1),
        (whole, first): n * (num_hosts - 1),
        (split, whole): outside,
        (whole, split): outside,
        (split, first): there,
    }
    for (source, target), crossing in least.items():
        assert (
            apply(source, target, hosts, draw(source, range(size), np.random.default_rng(0)))[1]
            == crossing
        ), (source, target)
    # All hosts get the sum: that of all but themselves, by all, or each adds a part and gives it.
    _, crossing, messages = apply(
        whole, whole, hosts, draw(whole, range(size), np.random.default_rng(0))
    )
    by_parts = hierarchy.SMALL == 0 and num_hosts > 2
    assert crossing == (2 * n if by_parts else n * num_hosts) * (num_hosts - 1)
    if hierarchy.SMALL:
        assert messages == num_hosts * (num_hosts - 1)  # one from each host to each other


def least_crossing(source: Layout, target: Layout, hosts: Hosts) -> int:
    """Values that other hosts must give, where each gets all of a box that it stores at once.

    For each element it has to come from as few hosts as hold, together, the terms that its own does
    not hold (a copy is a sum of one term).
    """
    terms: dict[Coordinates, tuple[Box, set[int]]] = {}
    for worker in source.partition.ranks:
        at, box = source.partition.coordinates(worker), source.box(worker)
        assert at is not None and box is not None
        place = tuple(0 if axis in source.shared else n for axis, n in enumerate(at))
        terms.setdefault(place, (box, set()))[1].add(hosts[worker])
    found = 0
    wanted = {(hosts[worker], target.box(worker)) for worker in target.partition.ranks}
    for host, box in wanted:
        assert box is not None
        for index in itertools.product(*(range(*part) for part in box)):
            there = [
                held
                for part, held in terms.values()
                if host not in held
                and all(a <= i < b for i, (a, b) in zip(index, part, strict=True))
            ]
            found += next(
                count
                for count in itertools.count()
                for chosen in itertools.combinations({*hosts}, count)
                if all(held & {*chosen} for held in there)
            )
    return found


@pytest.mark.parametrize("hosts", [*HOSTS, (0, 1, 1, 0), (0, 0, 0, 0, 1, 1, 1, 1)])
def test_nothing_crosses_that_a_host_has_or_gets_already(small: None, hosts: Hosts) -> None:
    workers, rng, numbers = range(len(hosts)), random.Random(2), np.random.default_rng(2)
    num_hosts, tried, more = len({*hosts}), {"sums": 0, "copies": 0}, 0
    for _ in range(250):
        shape = tuple(rng.choice([4, 5, 8]) for _ in range(rng.randint(1, 2)))
        is_shuffled = rng.random() < 0.5
        layouts = []
        for num_axes in (len(shape) + 1, rng.randint(1, len(shape) + 1)):
            sizes = [1] * num_axes
            for factor in stress._factors(rng.choice([len(hosts), *workers[2:]])):
                sizes[rng.randrange(num_axes)] *= factor
            P = Planned(tuple(rng.sample(workers, prod(sizes))), tuple(sizes))
            if not is_shuffled:
                P = Planned(tuple(sorted(P.ranks)), P.shape)
            axes: list[int | None] = [*range(num_axes)]
            rng.shuffle(axes)
            by = [axis if rng.random() < 0.3 else None for axis in axes[: len(shape)]]
            by += [None] * (len(shape) - len(by))
            others = [axis for axis in range(num_axes) if axis not in by]
            shared = [axis for axis in others if rng.random() < 0.5]
            layouts.append(Layout.split(P, shape, by, shared))
        source, target = layouts
        if rng.random() < 0.4:
            target = source.summed
        for one, other in ((source, target), (target, source)):  # each and its adjoint
            values = {w: np.sin(10.0 * each) for w, each in draw(one, workers, numbers).items()}
            got, crossed, _ = apply(one, other, hosts, values)
            expected = direct(one, other, workers, values)
            seen: dict[Any, np.ndarray] = {}
            for worker in workers:
                mine = got[worker].ravel()
                np.testing.assert_allclose(mine, expected[worker].ravel(), rtol=0, atol=1e-13)
                # copies are equal to the last bit, on whichever host terms have been added
                np.testing.assert_array_equal(seen.setdefault(other.box(worker), mine), mine)
            if any(one.partition.shape[axis] > 1 for axis in one.shared):
                tried["copies" if one.owns_once else "sums"] += 1
            least = least_crossing(one, other, hosts)
            assert crossed <= least or (is_shuffled and num_hosts > 2), (one, other)
            more += crossed > least
    assert min(tried.values()) > 10
    assert more <= 1  # with three hosts, where neighbours are apart, owners are not always the best


def test_one_host_and_one_worker_on_each_go_directly() -> None:
    world = Planned((0, 1, 2, 3), (4,))
    whole = Layout.whole(world, (1000,))
    for hosts in ((), (0, 1, 2, 3)):
        assert route(whole, whole, 1, hosts) == direct_route(whole, whole, 1)
    inside = Layout.whole(Planned((0, 1), (2,)), (1000,))  # within one of two hosts
    assert route(inside, inside, 0, (0, 0, 1, 1)) == direct_route(inside, inside, 0)


def test_a_value_of_no_dimension_goes_by_teams_too() -> None:
    hosts = (0, 0, 1, 1)
    whole = Layout.whole(Planned((0, 1, 2, 3), (4,)), ())
    values = {worker: np.array(10.0**worker) for worker in range(4)}
    got, crossed, _ = apply(whole, whole, hosts, values)
    assert [float(each.item()) for each in got.values()] == [1111.0] * 4 and crossed == 2
    first = Layout.whole(Planned((0,), (1,)), ())
    got, crossed, _ = apply(
        first, whole, hosts, {0: np.array(7.0)} | dict.fromkeys((1, 2, 3), np.zeros(0))
    )
    assert [float(each.item()) for each in got.values()] == [7.0] * 4 and crossed == 1


# --- workers that pretend to be on several hosts


def sums_over(names: tuple[str, ...], length: int, way: str) -> tuple[list[float], list[int], bool]:
    """Sums and agreements of workers: their numbers, what crossed, and whether copies are equal."""
    with stress.afresh(TESSEL_TRANSPORT=way), stress.on_hosts(*names):
        world, worker = tessel.world(), tessel.transport.this_worker()
        group = world.prepare()
        words = memoryview(group.share_words([worker])).cast("q")[:: tessel.transport.NUM_WORDS]
        assert words.tolist() == list(range(len(names)))
        some = world.create_partition_inclusive([len(names) - 1, 0])
        generator = torch.Generator().manual_seed(worker)
        x = torch.randn(length, generator=generator, dtype=torch.float32)
        reduce = tessel.nn.AllSumReduce(world, [0])
        y = reduce(x.requires_grad_())
        with count_traffic() as traffic:
            again = reduce(x)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, float(len(names))))
        _, pull = torch.func.vjp(reduce, x.detach())  # the agreement is inside of the transform
        assert torch.equal(pull(torch.ones_like(x))[0], x.grad)
        copies = group.share_objects(y.detach())
        alike = torch.equal(again, y) and all(torch.equal(copy, y.detach()) for copy in copies)
        few = group.sum(torch.tensor([1.0, worker]))
        if some.active:
            few = few + tessel.nn.AllSumReduce(some, [0])(torch.ones(2)) - 2.0
        crossed = [traffic.messages_between_hosts, traffic.bytes_between_hosts]
        return few.tolist(), crossed, alike


@pytest.mark.parametrize("way", ["shared", "gloo"])
@pytest.mark.parametrize("length", [100, 1_000_000])
def test_sums_over_hosts_are_equal_on_all_workers(run: Any, length: int, way: str) -> None:
    results = run(sums_over, ("a", "b", "b", "a"), length, way)
    assert [(few, alike) for few, _, alike in results] == [([4.0, 6.0], True)] * 4
    crossed = [each for _, each, _ in results]
    if length == 100:  # the first worker of each host carries all
        assert crossed == [[1, 400], [1, 400], [0, 0], [0, 0]]
    else:
        assert crossed == [[1, 2_000_000]] * 4


def bucket_sums(way: str) -> int:
    """Sums of gradients, in two steps, to the last bit; the most stages that one takes."""
    with stress.afresh(TESSEL_TRANSPORT=way), stress.on_hosts("a", "a", "b", "b"):
        world, stages = tessel.world(), 1
        grid = world.create_cartesian_topology_partition([2, 2])
        for P, axes in ((world, (0,)), (grid, (0,)), (grid, (1,)), (grid, (0, 1))):
            copies = [P.shape[axis] for axis in axes]
            for length in (1, 1001, LARGE + 3):
                given = [torch.sin(torch.arange(length) + 10.0 * k) for k in range(prod(copies))]
                place = P.index
                assert place is not None
                own = sum(place[axis] * prod(copies[k + 1 :]) for k, axis in enumerate(axes))
                found = Sum(P, axes, length)
                expected = given[0] + given[1]
                for each in given[2:]:
                    expected += each
                assert torch.equal(found.start(given[own])(), expected), (axes, length)
                moves = (each for each in (found._scatter, found._collect) if each is not None)
                stages = max(stages, *(len(each.stages) for each in moves))
        return stages


@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_sums_of_gradients_between_hosts(run: Any, way: str) -> None:
    assert min(run(bucket_sums, way, nprocs=4)) > 1  # some go from stage to stage


def out_of_step() -> str:
    with stress.on_hosts("a", "b", "b", "a"):
        group = tessel.world().prepare()
        group.share_words([0])
        group.num_exchanges += tessel.transport.this_worker() in (1, 2)  # of the second host
        with pytest.raises(tessel.WorkerLost) as caught:
            group.share_words([0])
        return str(caught.value)


def sums_of_shared_terms(names: tuple[str, ...]) -> tuple[int, int, bool]:
    """Bytes and messages of `x.sum(0)` between hosts, and of its gradient; whether all is right."""
    with stress.on_hosts(*names):
        P = tessel.world().create_cartesian_topology_partition([2, 2])
        whole = torch.sin(torch.arange(4 * 1000, dtype=torch.float64)).view(4, 1000)
        layout = tessel.Layout.split(P, whole.shape, (0, None), shared=[1])
        x = tessel.spread(whole, layout).requires_grad_()
        plain = whole.clone().requires_grad_()
        x.sum(0)
        with count_traffic() as traffic:
            total = x.sum(0)
        derivatives = []
        for each in (x, plain):
            (first,) = torch.autograd.grad(each.sum(0).pow(3).sum(), each, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), each)
            derivatives.append((first, second))
        same = [torch.allclose(total.full(), whole.sum(0), rtol=0, atol=1e-12)]
        for mine, other in zip(*derivatives, strict=True):
            same.append(torch.allclose(mine.full(), other, rtol=1e-12))
        return traffic.messages_between_hosts, traffic.bytes_between_hosts, all(same)


@pytest.mark.parametrize("names", ["aabb", "abab", "abba", "abbb"])
def test_sums_of_shared_terms_cross_once(run: Any, names: str) -> None:
    results = run(sums_of_shared_terms, tuple(names), nprocs=4)
    messages, crossed, right = zip(*results, strict=True)
    # the rows lie on one host each; on both; on both; all on b, whose first row a has, too
    assert all(right) and sum(crossed) == {"aabb": 2, "abbb": 1}.get(names, 0) * 8000
    assert sum(messages) == sum(crossed) // 8000


@pytest.mark.ends_workers
def test_hosts_that_are_out_of_step_raise_at_once(in_new_job: Any) -> None:
    said = in_new_job(out_of_step, nprocs=4, timeout=60)
    firsts = [text for text in said if "the exchanges before this one were" in text]
    assert firsts and all("1 on worker 0, 2 on worker 1" in text for text in firsts), said


def dense_where_one_is_alone() -> list[bool]:
    """Everybody has something for everybody: all of them send it in the same way, or they hang."""
    with stress.on_hosts("a", "b", "b"):
        P = tessel.world()
        rows, columns = (
            Layout.balanced(P.create_cartesian_topology_partition(grid), (6, 9))
            for grid in ([P.size, 1], [1, P.size])
        )
        x = torch.arange(54.0).view(6, 9)
        move = tessel.Move(rows, columns)
        y = move.apply(rows.local_part(x).clone())
        return [move.route[0].dense, torch.equal(y, columns.local_part(x))]


def test_a_worker_that_is_alone_on_its_host_sends_as_the_others_do(run: Any) -> None:
    assert run(dense_where_one_is_alone, nprocs=3) == [[True, True]] * 3
