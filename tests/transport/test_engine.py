"""The compiled engine: the same values as Python's way, and Python finishes what it begins.

Tests `transport/copy_program.py`, `transport/constants.py`, `transport/host.py`.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import stress
import tessel
from tessel import Layout, Move, transport
from tessel.launch import Workers
from tessel.testing import count_traffic
from tessel.transport import copy_program, host
from tessel.transport.constants import NOTHING, UNREAD
from tessel.transport.copy_program import Place
from tessel.transport.host import Host

Run = Callable[..., list[Any]]
needs_engine = pytest.mark.skipif(
    not (copy_program.has_engine() and transport.can_share_memory()),
    reason="the engine was not built",
)
needs_memory = pytest.mark.skipif(
    os.environ.get("TESSEL_TRANSPORT") == "gloo", reason="Gloo has no use for the engine"
)
pytestmark = [needs_engine, needs_memory]


def counted(
    work: Callable[[], Any], said: Path | None = None, when: Callable[[int], bool] = lambda _: True
) -> tuple[Any, list[int]]:
    """What the work gives, and how far the engine came in each of its exchanges.

    The file `said` is made as soon as an exchange came as far as `when` asks for.
    """
    found: list[int] = []
    follow = Host.follow

    def noted(self: Host, *args: Any) -> int:
        found.append(follow(self, *args))
        if said is not None and when(found[-1]):
            said.touch()
        return found[-1]

    Host.follow = noted  # type: ignore[method-assign]
    try:
        return work(), found
    finally:
        Host.follow = follow  # type: ignore[method-assign]


def await_file(said: Path) -> None:
    """Wait until another worker says so: how long it takes to come there does not matter."""
    while not said.exists():
        time.sleep(0.01)


# --- both ways


def with_python() -> list[str]:
    with stress.afresh(TESSEL_ENGINE="python"):
        wrong, runs = counted(lambda: stress.movements(150, 11))
        assert not runs
    return wrong


def with_one_engine() -> list[str]:
    """Worker 0 has no engine, the others have one."""
    choice = copy_program.ENGINES[transport.this_worker() == 0]
    with stress.afresh(TESSEL_ENGINE=choice):
        return stress.movements(150, 12)


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("work", [with_python, with_one_engine])
def test_with_and_without_the_engine_movements_are_the_same(
    run: Run, work: Callable[[], list[str]], nprocs: int
) -> None:
    assert run(work, nprocs=nprocs) == [[]] * nprocs


def whole_and_parts(n: int) -> tuple[Layout, Layout]:
    P = tessel.world()
    return Layout.whole(P, (n,)), Layout.balanced(P, (n,))


DTYPES = (
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)


def sums_of_each_kind() -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for n in (5, 300_000, 700_001):
            whole, _ = whole_and_parts(n)
            x = torch.arange(n).remainder(97).add(transport.this_worker()).to(dtype)
            move = Move(whole, whole)
            y, runs = counted(lambda move=move, x=x: move.apply(x))
            terms = [
                torch.arange(n).remainder(97).add(k).to(dtype) for k in range(whole.partition.size)
            ]
            if not torch.equal(y, sum(terms[1:], terms[0])) or not runs:
                wrong.append(f"{dtype} {n} {runs}")
    return wrong


@pytest.mark.parametrize("nprocs", [2, 4])
def test_sums_of_each_kind(run: Run, nprocs: int) -> None:
    assert run(sums_of_each_kind, nprocs=nprocs) == [[]] * nprocs


def bits_of_sums() -> list[bytes]:
    """Sums of numbers of many sizes, whose bits depend on the order: each way, whoever is late."""
    P = tessel.world()
    generator = torch.Generator().manual_seed(transport.this_worker())
    found = []
    for n in (100, 40_000, 300_000):
        whole, parts = whole_and_parts(n)
        owned = Layout.whole(P.create_partition_inclusive([0]), (n,))
        wide = Layout.balanced(P, (n,)).grow([(7, 7)])
        for source, target in ((whole, whole), (whole, owned), (whole, parts), (wide, parts)):
            x = torch.randn(source.local_shape, generator=generator)
            x *= torch.randn(x.shape, generator=generator).mul(10).exp()
            time.sleep(random.random() / 100)  # not the same in each run
            found.append(Move(source, target).apply(x).numpy().tobytes())
    return found


def bits_of_each_engine() -> list[list[bytes]]:
    found = []
    for engine in copy_program.ENGINES:
        with stress.afresh(TESSEL_ENGINE=engine):
            found += [bits_of_sums() for _ in range(3)]
    return found


@pytest.mark.parametrize("nprocs", [2, 5])
def test_sums_have_the_same_bits_in_every_run(run: Run, nprocs: int) -> None:
    for first, *others in run(bits_of_each_engine, nprocs=nprocs):
        assert all(each == first for each in others)


def back_from_halos(columns: int) -> tuple[bool, list[int]]:
    """Strips are added to where they came from, each at its own place."""
    P = tessel.world().create_cartesian_topology_partition([tessel.world().size, 1])
    rows = Layout.balanced(P, (3 * P.size, columns))
    wide = rows.grow([(1, 1), (0, 0)])
    x = torch.arange(3.0 * P.size * columns).view(-1, columns).remainder(101)
    y, runs = counted(lambda: Move(wide, rows).apply(wide.local_part(x).clone()))
    copies = torch.ones(3 * P.size, 1)
    copies[[k for k in range(1, 3 * P.size - 1) if k % 3 != 1]] = 2
    return torch.equal(y, rows.local_part(copies * x)), runs


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("columns", [5, 100_000])
def test_strips_are_added_where_they_belong(run: Run, columns: int, nprocs: int) -> None:
    for is_right, runs in run(back_from_halos, columns, nprocs=nprocs):
        assert is_right and runs


def rows_and_columns(shape: tuple[int, int]) -> tuple[Layout, Layout]:
    P = tessel.world()
    grids = ([P.size, 1], [1, P.size])
    rows, columns = (P.create_cartesian_topology_partition(grid) for grid in grids)
    return Layout.balanced(rows, shape), Layout.balanced(columns, shape)


def short_runs() -> list[str]:
    """From rows to columns and back: what others read is packed, what comes has short runs."""
    wrong = []
    # even runs of whole lines of the cache, many and few of them; uneven ones; nothing for some
    for shape in ((3072, 1536), (600, 1536), (2311, 1003), (300_000, 2)):
        rows, columns = rows_and_columns(shape)
        x = torch.arange(shape[0] * shape[1]).remainder(10_007).view(shape)
        for dtype in (torch.float32, torch.complex128, torch.int8):
            values = x.to(dtype)
            for source, target in ((rows, columns), (columns, rows)):
                mine, move = source.local_part(values), Move(source, target)
                wide = torch.empty(*mine.shape, 2, dtype=dtype)  # nothing lies together
                wide[..., 1] = mine
                for each in (mine.contiguous(), wide[..., 1]):
                    y, runs = counted(lambda each=each, move=move: move.apply(each))
                    if not runs or not torch.equal(y, target.local_part(values)):
                        wrong.append(f"{shape} {dtype} {source} {each.stride()} {runs}")
        # the same value everywhere, in one place
        move, one = Move(rows, columns), torch.ones(1).expand(rows.local_shape)
        y, runs = counted(lambda move=move, one=one: move.apply(one))
        if not runs or not torch.equal(y, torch.ones(columns.local_shape)):
            wrong.append(f"{shape} expanded {runs}")
    return wrong


@pytest.mark.parametrize("nprocs", [2, 3])
def test_short_runs_are_packed(run: Run, nprocs: int) -> None:
    assert run(short_runs, nprocs=nprocs) == [[]] * nprocs


def short_runs_of_late_workers() -> list[bool]:
    """Large pieces of close runs: found in a staging buffer, or read in place if one is late."""
    found, wait = [], random.Random(transport.this_worker())  # another one on each worker
    # runs of 516 and 1,032 bytes, which blocks and lines of the cache cut, and of whole lines
    for length, width, dtype in (
        *((20_001, 258, torch.float32), (8195, 258, torch.float64)),
        (20_000, 256, torch.float32),
    ):
        rows, columns = rows_and_columns((length, width))
        x = torch.arange(length * width).remainder(10_007).view(length, width).to(dtype)
        for source, target in ((rows, columns), (columns, rows)):
            mine, move = source.local_part(x).clone(), Move(source, target)
            for _ in range(8):
                time.sleep(wait.choice((0, 0, 0.0005, 0.002, 0.01)))
                y, runs = counted(lambda mine=mine, move=move: move.apply(mine))
                found.append(bool(runs) and torch.equal(y, target.local_part(x)))
                y.zero_()  # the next one may get its memory
    return found


def test_short_runs_are_the_same_whoever_is_late(run: Run) -> None:
    assert all(map(all, run(short_runs_of_late_workers, nprocs=2)))


def more_than_is_packed() -> tuple[bool, list[int]]:
    rows, columns = rows_and_columns((9000, 1000))
    x = torch.arange(9e6).view(9000, 1000)
    limit, host.MOST_PACKED = host.MOST_PACKED, 2**23
    try:
        y, runs = counted(lambda: Move(rows, columns).apply(rows.local_part(x)))
    finally:
        host.MOST_PACKED = limit
    return torch.equal(y, columns.local_part(x)), runs


def test_what_is_too_large_to_be_packed_goes_through_slots(run: Run) -> None:
    assert run(more_than_is_packed, nprocs=2) == [(True, [])] * 2


def unusual_tensors() -> bool:
    """What does not lie as its values say goes Python's way; what lies apart does not."""
    whole, parts = whole_and_parts(12)
    move = Move(whole, parts)
    z = torch.arange(12.0).mul(1 + 2j)
    strided, expanded = torch.arange(24.0)[::2], torch.ones(1).expand(12)
    half = torch.arange(12.0).to(torch.bfloat16)
    found = [
        (x, *counted(lambda x=x: move.apply(x)))
        for x in (z.conj(), z.conj().imag, half, strided, expanded)
    ]
    size = whole.partition.size
    return all(
        torch.equal(y, parts.local_part(size * x.resolve_conj().resolve_neg()))
        and bool(runs) == (x is strided or x is expanded)
        for x, y, runs in found
    )


def test_tensors_that_are_not_plain_go_another_way(run: Run) -> None:
    assert run(unusual_tensors, nprocs=2) == [True] * 2


def few_numbers(k: float) -> list[torch.Tensor]:
    """Numbers that grow with k: plain and small ones, one that has a flag, none, and too many."""
    plain = [torch.arange(3, dtype=torch.float64), torch.tensor(2.5), torch.arange(3).bfloat16()]
    return [
        *(k * each for each in plain),
        (k * torch.arange(8.0))[::2],
        torch.arange(3.0).mul(k * (1 + 2j)).conj(),
        torch.ones(0),
        torch.full((500_000,), k),
    ]


def sums_of_a_few_numbers() -> list[bool]:
    """The engine brings what is plain and small; the rest goes message by message."""
    group, found = tessel.world().group, []
    expected = few_numbers(group.size * (group.size + 1) / 2)
    for number, x in enumerate(few_numbers(transport.this_worker() + 1.0)):
        with count_traffic() as sent:
            y, runs = counted(lambda x=x: group.sum(x))
        others = group.size - 1
        counts = sent.messages == others and sent.bytes_sent == others * x.nbytes
        found.append(torch.equal(y, expected[number]) and bool(runs) == (number < 4) and counts)
    return found


@pytest.mark.parametrize("nprocs", [2, 3])
def test_sums_of_a_few_numbers(run: Run, nprocs: int) -> None:
    assert run(sums_of_a_few_numbers, nprocs=nprocs) == [[True] * 7] * nprocs


# --- exchanges that are started before they are waited for


def noting(name: str) -> tuple[list[Any], Callable[[], None]]:
    """What a method of the host gives from now on, and what ends that."""
    found: list[Any] = []
    own = getattr(Host, name)

    def noted(self: Host, *args: Any) -> Any:
        found.append(own(self, *args))
        return found[-1]

    setattr(Host, name, noted)
    return found, lambda: setattr(Host, name, own)


def in_another_order(n: int) -> list[Any]:
    """Three that are waited for from the last to the first, with others and agreements between."""
    whole, parts = whole_and_parts(n)
    back, there = Move(parts, whole), Move(whole, whole)
    x = torch.arange(n, dtype=torch.float64)
    begun, end = noting("start")
    waits = [back.start(parts.local_part(k * x).clone()) for k in (1, 2, 3)]
    summed = there(x)
    right = [torch.equal(summed, whole.partition.size * x)]
    right += [
        torch.equal(wait(), k * x) for wait, k in zip(reversed(waits), (3, 2, 1), strict=True)
    ]
    end()
    host = tessel.world().group._membership.host
    return [all(right), [each is not None for each in begun], host._started]


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("n", [100, 600_000])
def test_exchanges_that_were_started_end_in_any_order(run: Run, n: int, nprocs: int) -> None:
    assert run(in_another_order, n, nprocs=nprocs) == [[True, [True] * 3, []]] * nprocs


def with_a_late_worker(seconds: float) -> tuple[bool, int, bool]:
    """Nobody looks in a loop of Python until a worker comes."""
    P = tessel.world()
    rows = Layout.balanced(P, (4 * P.size,))
    halo = Move(rows, rows.grow([(1, 1)]))
    x = torch.arange(4.0 * P.size)
    halo.start(rows.local_part(x).clone())()
    looks, end = noting("_progresses")
    wait = halo.start(rows.local_part(x).clone()) if P.rank else None
    if not P.rank:
        time.sleep(seconds)
        wait = halo.start(rows.local_part(x).clone())
    y = wait()
    end()
    return torch.equal(y, halo.codomain.local_part(x)), len(looks), P.rank == 1


def test_who_waits_for_a_late_worker_does_not_look_in_a_loop_of_python(run: Run) -> None:
    for is_right, looks, is_neighbour in run(with_a_late_worker, 0.2, nprocs=4):
        # every 50 ms a worker looks whether those whom it needs still live: twice
        assert is_right and (0 < looks <= 16 if is_neighbour else looks <= 16)


def left_by_an_exception() -> list[Any]:
    """What was started and is never waited for comes to its own place, and to no other."""
    whole, parts = whole_and_parts(60)
    move, x = Move(parts, whole), torch.arange(60.0)
    right = []
    for step in range(40):
        move.start(parts.local_part(-x).clone())  # whose result nobody holds
        right.append(torch.equal(move.start(parts.local_part(step * x).clone())(), step * x))
        right.append(torch.equal(move.apply(parts.local_part(x).clone()), x))
    return [all(right), len(tessel.world().group._membership.host._started) < 20]


@pytest.mark.parametrize("nprocs", [2, 3])
def test_exchanges_that_nobody_waits_for_are_let_go(run: Run, nprocs: int) -> None:
    assert run(left_by_an_exception, nprocs=nprocs) == [[True, True]] * nprocs


def started_on_one_side(n: int) -> list[bool]:
    """Worker 0 has no engine: what it sends may come in pieces, or as an address."""
    choice = copy_program.ENGINES[transport.this_worker() == 0]
    with stress.afresh(TESSEL_ENGINE=choice):
        whole, parts = whole_and_parts(n)
        move, x = Move(parts, whole), torch.arange(n, dtype=torch.float64)
        begun, end = noting("start")
        waits = [move.start(parts.local_part(k * x).clone()) for k in (1, 2)]
        right = [torch.equal(wait(), k * x) for wait, k in zip(waits, (1, 2), strict=True)]
        end()
        return [*right, any(each is not None for each in begun) == (transport.this_worker() > 0)]


@pytest.mark.parametrize("n", [60, 300_000, 3_000_000])
def test_what_was_started_comes_from_a_worker_without_an_engine(run: Run, n: int) -> None:
    assert run(started_on_one_side, n, nprocs=2) == [[True] * 3] * 2


# --- what the engine leaves to Python


def late_sum(left: Path) -> tuple[float, list[int]]:
    """Worker 1 comes when the engine of worker 0 has left the exchange to Python."""
    group = tessel.world().group
    group.sum(torch.ones(2))
    if transport.this_worker() == 1:
        await_file(left)
    is_first = transport.this_worker() == 0
    y, runs = counted(lambda: group.sum(torch.ones(2)), left if is_first else None)
    return y.sum().item(), runs


def test_python_finishes_a_sum_of_a_few_numbers(run: Run, tmp_path: Path) -> None:
    (first, early), (second, late) = run(late_sum, tmp_path / "left", nprocs=2)
    assert first == second == 4
    assert early == [1] and late == [2]


def late(n: int, movement: str, left: Path) -> tuple[bool, list[int]]:
    """Worker 1 comes when the engine of worker 0 has left the exchange to Python."""
    whole, parts = whole_and_parts(n)
    x = torch.arange(n, dtype=torch.float64)
    if movement == "columns":  # short runs, which are packed where there are many
        x = x.view(math.isqrt(n), -1)
        rows, columns = rows_and_columns(tuple(x.shape))
        move, mine, expected = Move(rows, columns), rows.local_part(x), columns.local_part(x)
    elif movement == "sum":
        move, mine, expected = Move(whole, whole), x, whole.partition.size * x
    else:
        move, mine, expected = Move(parts, whole), parts.local_part(x), x
    mine = mine.clone()
    move.apply(mine)
    if transport.this_worker() == 1:
        await_file(left)
    is_first = transport.this_worker() == 0
    y, runs = counted(lambda: move.apply(mine.clone()), left if is_first else None)
    mine.zero_()  # nobody reads it any more
    again = move.apply(mine)
    return torch.equal(y, expected) and not again.any(), runs


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("movement", ["sum", "gather", "columns"])
@pytest.mark.parametrize("n", [100, 1_000_000])
def test_python_finishes_what_the_engine_began(
    run: Run, n: int, movement: str, nprocs: int, tmp_path: Path
) -> None:
    results = run(late, n, movement, tmp_path / "left", nprocs=nprocs)
    assert all(is_right for is_right, _ in results)
    if nprocs == 2:
        # Worker 1 finds there what it asks for. Of a large part it may be left to Python to wait
        # until worker 0 has read what worker 1 keeps for it.
        ends = (2, UNREAD) if n > 100 else (2,)
        assert results[0][1][0] < 2 and results[1][1][0] in ends


def without_waiting(full: Path) -> bool:
    """One end only sends, more than there are slots: the engine has no room, and Python waits."""
    P = tessel.world()
    first = Layout.whole(P.create_partition_inclusive([0]), (50,))
    move = Move(first, Layout.whole(P, (50,)))
    is_root = transport.this_worker() == 0
    if not is_root:
        await_file(full)
    right, runs = counted(
        lambda: all(
            (move.apply(torch.full((50,), float(k)) if is_root else torch.empty(0)) == k).all()
            for k in range(30)
        ),
        full if is_root else None,
        lambda end: end == NOTHING,
    )
    return bool(right) and (NOTHING in runs) == is_root


def test_a_sender_without_room_waits(run: Run, tmp_path: Path) -> None:
    assert run(without_waiting, tmp_path / "full", nprocs=2) == [True] * 2


def through_threads(steps: int) -> list[str]:
    """Two threads of each worker exchange at once, in two groups."""
    P = tessel.world()
    wrong: list[str] = []

    def exchange(Q: tessel.Partition, seed: int) -> None:
        rng = random.Random(seed)
        for step in range(steps):
            n = rng.choice((50, 50_000, 300_000))
            whole, parts = Layout.whole(Q, (n,)), Layout.balanced(Q, (n,))
            source, target = rng.choice(((whole, whole), (parts, whole), (whole, parts)))
            values = torch.arange(n, dtype=torch.float64).remainder(1000).add(step)
            x = source.local_part(values).clone()
            y = Move(source, target).apply(x)
            x.fill_(-1)  # nobody reads it any more
            if not torch.equal(y, target.local_part(values) * (1 if source.owns_once else Q.size)):
                wrong.append(f"{seed} {step} {n}")

    groups = [P, P.create_partition_inclusive([0, 1])]
    mine = [(Q, seed) for seed, Q in enumerate(groups) if transport.this_worker() in Q.ranks]
    threads = [threading.Thread(target=exchange, args=each) for each in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.slow
def test_threads_may_use_the_engine_at_once(run: Run) -> None:
    assert run(through_threads, 150, nprocs=3, timeout=100) == [[]] * 3


def many_terms() -> bool:
    P = tessel.world()
    n = 40_000 * P.size
    whole = Layout.whole(P, (n,))
    y = Move(whole, whole).apply(torch.full((n,), transport.this_worker() + 1.0))
    return bool((y == P.size * (P.size + 1) / 2).all())


@pytest.mark.slow
def test_a_sum_may_have_many_terms(run: Run) -> None:
    nprocs = copy_program.MOST_TERMS + 1
    assert run(many_terms, nprocs=nprocs, timeout=100) == [True] * nprocs


def terms_with_gaps() -> list[bool]:
    """What is summed lies together at one end only."""
    P = tessel.world()
    mine = transport.this_worker() + 1.0
    whole = Layout.whole(P, (64, 1024))
    strided = Move(whole, whole).apply(torch.full((64, 2048), mine)[:, :1024])
    wide, columns = Layout.whole(P, (256, 4096)), Layout.split(P, (256, 4096), (None, 0))
    scattered = Move(wide, columns).apply(torch.full((256, 4096), mine))
    return [bool((y == 3).all()) for y in (strided, scattered)]


def test_terms_may_have_gaps(run: Run) -> None:
    assert run(terms_with_gaps, nprocs=2) == [[True, True]] * 2


def without_memory() -> tuple[bool, bool]:
    whole, parts = whole_and_parts(12)
    zeros = Move(whole, parts).apply(torch._efficientzerotensor((12,)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = Move(whole, whole).apply(torch.ones(12))
    return not zeros.any(), isinstance(fake, FakeTensor)


def test_tensors_without_memory_go_another_way(run: Run) -> None:
    assert run(without_memory, nprocs=2) == [(True, True)] * 2


def unknown_engine() -> str:
    whole, _ = whole_and_parts(3)
    with stress.afresh(TESSEL_ENGINE="steam"), pytest.raises(ValueError) as caught:
        Move(whole, whole).apply(torch.ones(3))
    return str(caught.value)


def test_an_unknown_engine_is_refused(run: Run) -> None:
    for said in run(unknown_engine, nprocs=2):
        assert "TESSEL_ENGINE must be one of compiled, python, got 'steam'" in said


# --- programs


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_runs_and_loops_reach_the_elements_of_a_place(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    whole = whole.permute(data.draw(st.permutations(range(len(shape)))))
    bounds = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in whole.shape
    ]
    place = Place(tuple(slice(a, b) for a, b in bounds), whole.stride())
    run, loops = copy_program._runs(place.shape, place.steps, place.alone.steps)
    reached, packed = [place.start], [0]
    for n, to, other in loops:
        reached = [at + to * k for at in reached for k in range(n)]
        packed = [at + other * k for at in packed for k in range(n)]
    elements = whole[place.region].flatten().tolist()
    assert [at + k for at in reached for k in range(run)] == elements
    assert [at + k for at in packed for k in range(run)] == list(range(len(elements)))


def same_number(count: int) -> list[bool]:
    """Exchanges of one number, as in a backward pass: some that start early, one in between."""
    P = tessel.world()
    rows, columns = (P.create_cartesian_topology_partition(g) for g in ((P.size, 1), (1, P.size)))
    shape = 4 * P.size, 4 * P.size
    source, target = (tessel.Layout.balanced(each, shape) for each in (rows, columns))
    move = tessel.Move(source, target)
    wholes = [
        torch.arange(256.0)[: shape[0] * shape[1]].reshape(shape) + 1000 * k for k in range(4)
    ]
    right = []
    for number in range(count):
        with transport.Tagged(1 + number):
            parts = [source.local_part(each).clone() for each in wholes]
            early = [move.start(part) for part in parts[:3]]
            found = [move._apply(parts[3])]
            found += [wait() for wait in early]
        expected = [target.local_part(each) for each in (wholes[3], *wholes[:3])]
        right.append(all(map(torch.equal, found, expected)))
    return right


@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_exchanges_of_one_number_are_told_apart(run: Any, nprocs: int) -> None:
    assert run(same_number, 100, nprocs=nprocs) == [[True] * 100] * nprocs


# --- exchanges that are made again

repeats_exchanges = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="torch does not show the engine where a tensor lies",
)


def with_tensors_of_each_kind() -> list[str]:
    """What lies in memory as it is, and moves without a derivative, is repeated; nothing else."""
    P, n = tessel.world(), 16
    whole = Layout.whole(P, (n,))
    move, x = Move(whole, whole), torch.arange(16.0)
    z = torch.complex(x, x + 1)
    for known in (x, z):
        move.apply(known)
    again = move._again
    assert again is not None

    def repeats(given: Any) -> bool:
        made = again(given)
        if isinstance(made, tuple):  # a worker that came late
            made = move.stages[-1].finish_again(given, *made)
        assert made is None or torch.equal(made, P.size * given)
        return made is not None

    others = {
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "strided": torch.arange(32.0)[::2],
        "expanded": torch.ones(1).expand(n),
        "shorter": torch.ones(3),
        "of two dimensions": torch.ones(4, 4),
        "of another dtype": x.double(),
        "of a subclass": torch.nn.Parameter(x),
        "that needs a gradient": x.clone().requires_grad_(),
        "without values": x.to("meta"),
        "that is zero": torch._efficientzerotensor(n),
        "sparse": x.to_sparse(),
        "not a tensor": [1.0],
    }
    wrong = [f"repeats what is {name}" for name, each in others.items() if repeats(each)]
    with torch.no_grad():
        wrong += ["not without gradients"] * (not repeats(x.clone().requires_grad_()))
    with torch.device("meta"):
        wrong += ["not with another default device"] * (not repeats(x))
    with FakeTensorMode(allow_non_fake_inputs=True):
        wrong += ["repeats in a mode"] * repeats(x)
    with torch.autograd.forward_ad.dual_level():
        wrong += ["repeats in forward mode"] * repeats(x)
    torch.func.vjp(lambda value: wrong.extend(["repeats in vjp"] * repeats(value)) or value, x)
    _, runs = counted(lambda: move.apply(x))
    wrong += ["is not seen"] * (len(runs) != 1)
    with count_traffic() as traffic:
        for _ in range(3):
            move.apply(x)
    sent = (P.size - 1) * 3
    if (traffic.messages, traffic.bytes_sent, traffic.bytes_received) != (sent, *[64 * sent] * 2):
        wrong.append(str(traffic))
    for step in range(1, 100):  # more than are remembered
        y = torch.arange(float(n * step))[::step]
        wrong += [f"step {step}"] * (not torch.equal(move.apply(y), P.size * y))
    return wrong


@repeats_exchanges
def test_what_is_repeated(run: Run) -> None:
    assert run(with_tensors_of_each_kind, nprocs=2) == [[]] * 2


def with_slices_apart() -> list[bool]:
    """Slices that lie apart for a transform do so in repeated exchanges, with the same values."""
    P, found = tessel.world(), []
    shape, part = (8, 8, 512), 8 // tessel.world().size
    rows, columns = (
        Layout.balanced(P.create_cartesian_topology_partition(grid), shape)
        for grid in ((P.size, 1, 1), (1, P.size, 1))
    )
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    x, expected = rows.local_part(whole), columns.local_part(whole)
    for dim, strides in ((0, (part * 512 + 32, 512, 1)), (1, (part * 544, 544, 1))):
        move = Move(rows, columns, dim)
        made = [move.apply(x + n) for n in range(3)]
        found.append(move._again is not None)
        found += [torch.equal(y, expected + n) for n, y in enumerate(made)]
        found += [y.stride() == strides and not y._is_view() for y in made]
        found.append(torch.equal(made[-1].mul_(2), 2 * (expected + 2)))
    return found


@repeats_exchanges
def test_repeated_exchanges_leave_slices_apart(run: Run) -> None:
    assert run(with_slices_apart, nprocs=2) == [[True] * 16] * 2


def freed_and_forked() -> list[bool]:
    """A move is freed with what it repeats; a fork cannot take part, and its worker goes on."""
    whole = Layout.whole(tessel.world(), (8,))
    move, x = Move(whole, whole), torch.ones(8)
    for _ in range(2):
        move.apply(x)
    found = [move._again is not None, copy.deepcopy(move)._again is None]
    pid = os.fork()
    if not pid:
        try:
            move.apply(x)
        except RuntimeError as error:
            os._exit("forked" in str(error))
        os._exit(2)
    found += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1]
    found += [bool((move.apply(x) == tessel.world().size).all())]
    stage = weakref.ref(move.stages[-1])
    del move
    gc.collect()
    return [*found, stage() is None]


@repeats_exchanges
def test_what_repeats_is_freed_and_belongs_to_its_process(run: Run) -> None:
    assert run(freed_and_forked, nprocs=2) == [[True] * 5] * 2


kept: list[tuple[Move, torch.Tensor]] = []  # of the first job of this process


def of_the_first_job(into: bool = False) -> str:
    """A move without an agreement, which nothing but the engine looks at; or its error."""
    tessel.world()
    if not kept:
        kept.append(whole_sum_of(5))
    move, x = kept[0]
    out = torch.zeros_like(x) if into else None
    try:
        for _ in range(3):
            assert torch.equal(move.apply(x, out=out), x * transport.num_workers())
    except RuntimeError as error:
        return str(error)
    assert move._into if into else move._again is not None
    return ""


def whole_sum_of(length: int) -> tuple[Move, torch.Tensor]:
    layout = Layout.whole(tessel.world(), (length,))
    return Move(layout, layout), torch.arange(float(length))


def in_another_job() -> bool:
    move, x = whole_sum_of(3)
    return torch.equal(move.apply(x), x * transport.num_workers())


@repeats_exchanges
@pytest.mark.parametrize("into", [False, True])
def test_what_outlives_its_job_writes_to_nobody(into: bool) -> None:
    """The memory of the others is gone: to repeat an exchange there would end the process."""
    with Workers(2) as workers:
        assert workers.run(of_the_first_job, into) == ["", ""]
        assert workers.run(in_another_job, nprocs=3) == [True] * 3
        for said in workers.run(of_the_first_job, into):
            assert "they belong to a job that this process has left" in said
        assert workers.run(in_another_job) == [True] * 2


def run_ahead() -> list[int]:
    """The root of broadcasts waits in the engine for room, when it is ahead of the others."""
    P = tessel.world()
    move = Move(Layout.whole(P.create_partition_inclusive([0]), (8,)), Layout.whole(P, (8,)))
    values = []
    for number in range(60):
        if number % 20 == 10 and P.rank:
            time.sleep(0.01)  # longer than the engine waits: Python finishes it
        x = torch.full((8,), float(number)) if P.rank == 0 else tessel.zero_volume_tensor()
        values.append(int(move.apply(x)[-1]))
    return values


def test_a_root_that_runs_ahead(run: Run) -> None:
    assert run(run_ahead, nprocs=2) == [list(range(60))] * 2
