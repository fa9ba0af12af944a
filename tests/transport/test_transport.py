"""The ways of messages: shared memory, Gloo, and both at once; what goes wrong on them.

Tests `transport/group.py`, `transport/host.py`, `transport/channel.py`, `transport/exchange.py`,
`transport/request.py`, `transport/reading.py`, `transport/buffers.py`, `transport/wakeup.py`,
`transport/backoff.py`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stress
import tessel
from tessel import Layout, Move, transport
from tessel.testing import count_memory
from tessel.transport import ReceiveBuffer, SendBuffer, channel
from tessel.transport.constants import SLOTS
from tessel.transport.group import NUM_WORDS, Membership
from tessel.transport.host import Host
from tessel.transport.process import PeerProcess
from tessel.transport.reading import Reader, staging_room
from tessel.transport.request import UnexpectedMessage
from tessel.transport.segment import Segment

MIB = 2**20
STEPS = 1000  # of threads that exchange at once


def whole_sum(shape: tuple[int, ...]) -> tuple[Move, torch.Tensor]:
    layout = Layout.whole(tessel.world(), shape)
    return Move(layout, layout), torch.full(shape, transport.this_worker() + 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [2, 4, 8])
def test_random_movements_are_the_same_both_ways(run: Any, nprocs: int) -> None:
    assert run(stress.movements, 400, nprocs, nprocs=nprocs) == [[]] * nprocs


def begun_in_inference_mode(name: str, value: str) -> list[bool]:
    """What comes is written to tensors of the mode in which the movements began."""
    found = []
    with stress.afresh(**{name: value}):
        for length in (3, 300_000):
            move, x = whole_sum((length,))
            with torch.inference_mode():
                wait = move.start(x)
            move.group.share_objects(None)  # here some of it may come
            found.append(torch.equal(wait(), torch.full((length,), 6.0)))
    return found


@pytest.mark.parametrize(
    "setting", ["TESSEL_TRANSPORT=gloo", "TESSEL_ENGINE=python", "TESSEL_ENGINE=compiled"]
)
def test_movements_outlive_the_mode_in_which_they_begin(run: Any, setting: str) -> None:
    assert run(begun_in_inference_mode, *setting.split("="), nprocs=3) == [[True] * 2] * 3


def which_way() -> tuple[bool, bool, bool]:
    default = transport.shares_memory()
    whole_sum((1,))[0]
    with stress.afresh(TESSEL_TRANSPORT="gloo"):
        move, x = whole_sum((3,))
        y, chosen = move(x), transport.shares_memory()
    move, x = whole_sum((3,))
    return default, chosen, torch.equal(move(x), y) and transport.shares_memory()


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="the transport is chosen outside")
def test_memory_is_shared_unless_the_user_says_otherwise(run: Any) -> None:
    for default, chosen, right in run(which_way):
        assert not chosen and right
        assert default in (True, False)


def with_unknown_transport() -> str:
    with stress.afresh(TESSEL_TRANSPORT="pigeon"), pytest.raises(ValueError) as caught:
        whole_sum((1,))
    return str(caught.value)


def test_an_unknown_transport_is_refused(run: Any) -> None:
    assert set(run(with_unknown_transport)) == {
        "TESSEL_TRANSPORT must be one of auto, shared, gloo, mpi, got 'pigeon'"
    }


def over_hosts(names: tuple[str, ...]) -> tuple[list[str], list[int]]:
    with stress.on_hosts(*names):
        wrong = stress.movements(150, 5)
        group = tessel.world().group
        words = group.share_words([transport.this_worker()])
        assert [words[k * 8 * transport.NUM_WORDS] for k in range(4)] == [0, 1, 2, 3]
        return wrong, sorted(group._ways.near)


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="the transport is chosen outside")
def test_a_partition_over_hosts_uses_both_ways(run: Any) -> None:
    results = run(over_hosts, ("a", "b", "a", "a"))
    assert results == [([], [2, 3]), ([], []), ([], [0, 3]), ([], [0, 2])]


def overlapping(seed: int) -> int:
    """Exchanges of any size that are under way at once, ended in another order on each worker."""
    group = tessel.world().group
    rng, own = random.Random(seed), random.Random(seed + 1000 * transport.this_worker())
    worker, size = transport.this_worker(), transport.num_workers()
    checked = 0
    for _ in range(5):
        lengths = [rng.choice([1, 1000, 3 * MIB, 12 * MIB]) for _ in range(4)]
        under_way = []
        for number, length in enumerate(lengths):
            sends = [
                SendBuffer(other, torch.full((length,), (number + worker) % 250, dtype=torch.uint8))
                for other in range(size)
            ]
            places = [torch.zeros(length, dtype=torch.uint8) for _ in range(size)]
            receives = [ReceiveBuffer(other, place) for other, place in enumerate(places)]
            with transport.Tagged(number):
                wait = group.exchange(sends, receives, torch.device("cpu"))
            under_way.append((wait, number, places))
        own.shuffle(under_way)
        for wait, number, places in under_way:
            wait()
            for other, place in enumerate(places):
                assert (place == (number + other) % 250).all(), (number, other)
                checked += 1
    return checked


@pytest.mark.parametrize("nprocs", [2, 4])
def test_exchanges_overlap_and_end_in_any_order(run: Any, nprocs: int) -> None:
    assert run(overlapping, 3, nprocs=nprocs) == [5 * 4 * nprocs] * nprocs


def brought() -> tuple[list[int], int]:
    """What others send and what this worker keeps, and how often the latter was written to."""
    group, worker = tessel.world().group, transport.this_worker()
    own = torch.full((2,), worker)
    sends = [SendBuffer(other, own) for other in group.workers]
    places = [own if other == worker else torch.empty_like(own) for other in group.workers]
    takes = [ReceiveBuffer(other, place) for other, place in enumerate(places)]
    came = group.bring(sends, takes, own.device)
    return torch.stack(came).flatten().tolist(), own._version


def test_what_a_worker_keeps_is_not_written_to(run: Any) -> None:
    """A layer may have saved it for its gradient."""
    assert run(brought, nprocs=3) == [([0, 0, 1, 1, 2, 2], 0)] * 3


def unexpected_messages() -> list[float]:
    """Messages that come before they are asked for are kept for whoever asks later."""
    group, worker = tessel.world().group, transport.this_worker()
    device = torch.device("cpu")
    waits = []
    places = {tag: torch.zeros(3 * MIB // 4) for tag in (7, 8)}
    order = (7, 8) if worker == 0 else (8, 7)
    for tag in order:
        values = torch.full((3 * MIB // 4,), tag + 10.0 * worker)
        with transport.Tagged(tag):
            sends = [SendBuffer(1 - worker, values)]
            waits.append(group.exchange(sends, [ReceiveBuffer(1 - worker, places[tag])], device))
            if worker == 0:
                waits.pop()()
    for wait in waits:
        wait()
    assert all((place == place[0]).all() for place in places.values())
    return [float(places[tag][0]) for tag in (7, 8)]


def test_messages_of_another_call_wait_their_turn(run: Any) -> None:
    assert run(unexpected_messages, nprocs=2) == [[17.0, 18.0], [7.0, 8.0]]


def words_that_find_no_room() -> list[int]:
    """An agreement behind a full channel, after which the sender waits where nothing is pushed."""
    group, worker = tessel.world().group, transport.this_worker()
    device, host = torch.device("cpu"), group._ways.host
    assert host is not None
    if worker == 1:
        for number in range(SLOTS):
            group.exchange_at_once([SendBuffer(0, torch.tensor([number]))], [], device)
        channel, attempts = host._outgoing[0], iter((False, True))
        push = channel.push

        def slow_push() -> bool:
            moved = push()
            if next(attempts, False):  # the second, in the wait: the other takes all, and speaks
                time.sleep(0.3)
            return moved

        channel.push = slow_push  # type: ignore[method-assign]
    else:
        time.sleep(0.1)
        places = torch.full((SLOTS, 1), -1)
        for place in places:
            group.exchange_at_once([], [ReceiveBuffer(1, place)], device)
        assert places[:, 0].tolist() == list(range(SLOTS))
    try:
        heard = memoryview(group.share_words([10 + worker])).cast("q")[::NUM_WORDS].tolist()
    finally:
        if worker == 1:
            del channel.push
    dist.barrier()
    return heard


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="the transport is chosen outside")
def test_words_are_on_their_way_when_an_agreement_ends(run: Any) -> None:
    assert run(words_that_find_no_room, nprocs=2, timeout=30) == [[10, 11]] * 2


def sums_under_way() -> list[float]:
    """Sums that departed let later movements pass, small and large, though they add in order."""
    W, found = tessel.world(), []
    first = Layout.whole(W.create_partition_inclusive([0]), (2,))
    for length in (3, 2 * MIB):
        move, x = whole_sum((length,))
        with torch.no_grad():
            waits = [move.start(number * x) for number in (1, 10)]
            given = Move(first, Layout.whole(W, (2,), shared=True)).apply(
                torch.full(first.local_shape, 7.0)
            )
            found += [float(given[0]), float(move.apply(100 * x)[0])]
            found += [float(waits.pop()()[0]) for _ in range(2)]
    return found


@pytest.mark.parametrize("nprocs", [2, 4])
def test_sums_under_way_let_others_pass(run: Any, nprocs: int) -> None:
    total = sum(range(nprocs + 1))
    expected = [7.0, 100.0 * total, 10.0 * total, 1.0 * total] * 2
    assert run(sums_under_way, nprocs=nprocs) == [expected] * nprocs


def test_each_thread_tags_its_own_messages() -> None:
    tag, begun, ended = Membership().own, threading.Event(), threading.Event()

    def work() -> None:
        assert tag.tag == 0
        tag.tag = 7
        begun.set()
        assert ended.wait(10)

    thread = threading.Thread(target=work)
    tag.tag = 5
    thread.start()
    assert begun.wait(10)
    assert tag.tag == 5
    ended.set()
    thread.join(10)
    assert not thread.is_alive() and tag.tag == 5


def test_a_stray_outlives_the_mode_in_which_it_begins() -> None:
    segment_map = channel.SegmentMap(2)
    segment, _ = Segment.make(segment_map.size)
    slot = channel.Slot(segment, segment_map.slots(0), segment_map.slot_size)
    slot.header = memoryview(array("q", [0] * channel.HEADER))
    slot.num_bytes = 4
    with torch.inference_mode():
        unexpected = UnexpectedMessage((1, 1), 8)
        unexpected.read(slot)
    slot.tensor(torch.uint8, (4,)).fill_(3)
    unexpected.read(slot)
    assert unexpected.is_done and unexpected.values.tolist() == [0] * 4 + [3] * 4


class Broken(torch.Tensor):
    """A tensor whose values cannot be copied, from some time on."""

    left = 0  # copies that still go well

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "copy_":
            if not cls.left:
                raise KeyError("timeout: my own mistake")
            cls.left -= 1
        return super().__torch_function__(func, types, args, kwargs or {})


def send_what_breaks(shape: tuple[int, ...], left: int, at_once: bool, adds: bool) -> Any:
    """The second worker fails while it sends; all others hear why, and the next sum is right."""
    group, worker = tessel.world().group, transport.this_worker()
    values = torch.full(shape, 1.0 + worker).mT
    Broken.left = left
    broken = values.as_subclass(Broken) if worker == 1 else values

    def swap(values: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(values.shape)
        copies = [total if adds else torch.zeros_like(total) for _ in group.workers]
        sends = [SendBuffer(other, values) for other in group.workers if other != worker]
        takes = [
            ReceiveBuffer(other, copies[other], adds) for other in group.workers if other != worker
        ]
        if at_once:
            group.exchange_at_once(sends, takes, total.device)
        else:
            group.exchange(sends, takes, total.device)()
        return total if adds else torch.stack(copies).sum(0)

    said = []
    for _ in range(2 * SLOTS + 1):
        try:
            swap(broken)
        except (RuntimeError, KeyError) as error:
            said.append(f"{type(error).__name__} {error}")
        heard = memoryview(group.share_words([worker])).cast("q")[::NUM_WORDS].tolist()
        assert heard == list(group.workers)
        expected = sum(1.0 + other for other in group.workers if other != worker)
        assert torch.equal(swap(values), torch.full_like(values, expected))
    if group._ways.host is not None:
        assert all(each.is_quiet for each in group._ways.host._incoming.values())
        assert not any(each.is_busy for each in group._ways.host._outgoing.values())
    return said


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="Gloo waits until its time limit")
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("shape", "left", "at_once"),
    [((2, 3), 0, True), ((2, 3), 0, False), ((512, 1500), 0, False), ((512, 1500), 2, False)],
)
@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_message_that_cannot_be_written_is_given_up(
    run: Any, nprocs: int, shape: tuple[int, ...], left: int, at_once: bool, adds: bool
) -> None:
    found = run(send_what_breaks, shape, left, at_once, adds, nprocs=nprocs, timeout=30)
    for worker, said in enumerate(found):
        assert len(said) == 2 * SLOTS + 1
        for text in said:
            assert "KeyError" in text and "my own mistake" in text
            assert worker == 1 or text.startswith("RuntimeError worker 1 could not send")


def test_an_offer_of_a_process_that_ends_is_a_lost_worker() -> None:
    hosts = [Host((0, 1), worker) for worker in (0, 1)]
    addresses = {worker: host.address for worker, host in enumerate(hosts)}
    for host in hosts:
        host.connect(addresses, {worker: PeerProcess.this() for worker in (0, 1)})
    if not all([host.can_read(addresses) for host in hosts]):
        pytest.skip("this system does not let processes read each other")
    hosts[1].read_directly()
    for slot in hosts[0]._incoming[1].slots:
        slot.reader = Reader(2**22 + 1, staging_room(8))  # no process has this number
    hosts[1].send((1, 1), [SendBuffer(0, torch.zeros(MIB))])
    with pytest.raises(tessel.WorkerLost, match="lost contact with worker 1"):
        hosts[0].take((2, 2), [ReceiveBuffer(1, torch.zeros(2))], None, (1,))


def in_threads() -> list[float]:
    """Two threads of each worker exchange at once, in groups of their own."""
    P = tessel.world()
    halves = [P.create_partition_inclusive([0, 1]), P.create_partition_inclusive([1, 0])]
    results: list[float] = [0.0, 0.0]

    def work(number: int) -> None:
        group, worker = halves[number].group, transport.this_worker()
        place = torch.zeros(5)
        for step in range(STEPS):
            sends = [SendBuffer(1 - worker, torch.full((5,), float(step)))]
            with torch.no_grad():
                group.exchange(
                    sends, [ReceiveBuffer(1 - worker, place, True)], torch.device("cpu")
                )()
        results[number] = float(place[0])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_threads_may_exchange_at_once(run: Any) -> None:
    total = sum(range(STEPS))
    assert all(sum(result) == 2 * total for result in run(in_threads, nprocs=2))


def wait_long(seconds: float) -> bool:
    """A worker that comes late finds what was sent to it; others sleep meanwhile."""
    group = tessel.world().group
    if transport.this_worker() == 1:
        time.sleep(seconds)
    begin = time.process_time()
    group.share_words([1])
    return time.process_time() - begin < seconds / 2


def test_a_worker_that_waits_long_sleeps(run: Any) -> None:
    assert run(wait_long, 1.0, nprocs=2) == [True, True]


def memory_of_a_movement() -> tuple[int, int, int]:
    """Bytes of tensors made at once, of a large repartition and of a large sum."""
    P = tessel.world()
    rows = Layout.balanced(P.create_cartesian_topology_partition([P.size, 1]), (2048, 1024))
    columns = Layout.balanced(P.create_cartesian_topology_partition([1, P.size]), (2048, 1024))
    move, x = Move(rows, columns), torch.ones(rows.local_shape)
    total, z = whole_sum((3 * MIB,))
    peaks = []
    for operator, value in ((move, x), (total, z)):
        operator.apply(value)
        with count_memory() as memory:
            y = operator.apply(value)
        peaks.append(memory.peak - y.nbytes)
    return (*peaks, y.nbytes)


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="the transport is chosen outside")
@pytest.mark.parametrize("nprocs", [2, 4])
def test_a_movement_allocates_nothing_but_its_result(run: Any, nprocs: int) -> None:
    for repartition, total, size in run(memory_of_a_movement, nprocs=nprocs):
        assert repartition == 0
        part = 0 if nprocs == 2 else size // nprocs  # each sums one part, then all gather
        assert total <= part + 64


def without_memory(where: str) -> tuple[bool, list[str], float]:
    """One worker cannot make, or open, a segment: all go over Gloo, and one says why."""
    real = {name: getattr(Segment, name) for name in ("make", "open")}

    def fail(*args: Any) -> Any:
        raise OSError("no memory here")

    if transport.this_worker() == 1:
        setattr(Segment, where, fail)
    try:
        with warnings.catch_warnings(record=True) as caught, stress.afresh():
            warnings.simplefilter("always")
            move, x = whole_sum((2,))
            y = move(x)
            return transport.shares_memory(), [str(each.message) for each in caught], float(y[0])
    finally:
        for name, function in real.items():
            setattr(Segment, name, function)


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="the transport is chosen outside")
@pytest.mark.parametrize("where", ["make", "open"])
def test_where_memory_cannot_be_shared_gloo_is_used_with_a_warning(run: Any, where: str) -> None:
    results = run(without_memory, where, nprocs=2)
    assert [(shares, value) for shares, _, value in results] == [(False, 3.0)] * 2
    (warning,) = results[0][1]
    assert "[0, 1]" in warning and "no memory here" in warning and "TESSEL_TRANSPORT" in warning
    assert results[1][1] == []


def die_at_random(folder: str, seed: int) -> None:
    """Move data until one worker is killed at a random moment; the others note how they end."""
    rng = random.Random(seed)
    victim, delay = rng.randrange(transport.num_workers()), rng.uniform(0.0, 0.4)
    tessel.world().group.share_words([0])
    if transport.this_worker() == victim:
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    begin = time.monotonic()
    try:
        stress.movements(100_000, seed, compare=False)
    except RuntimeError as error:
        seconds = time.monotonic() - begin - delay
        text = f"{type(error).__name__}\n{seconds}\n{error}"
        Path(folder, str(transport.this_worker())).write_text(text)
        os._exit(3)


@pytest.mark.ends_workers
@pytest.mark.parametrize("seed", range(6))
def test_a_worker_killed_at_a_random_moment_is_noticed(run: Any, tmp_path: Path, seed: int) -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(tessel.WorkerLost):
        run(die_at_random, str(tmp_path), seed, nprocs=4, timeout=40)
    for note in tmp_path.iterdir():
        kind, seconds, text = note.read_text().split("\n", 2)
        assert kind == "WorkerLost", text
        assert float(seconds) < 10.0
        assert "lost contact with" in text
    assert {name for name in os.listdir("/dev/shm") if "tessel" in name} <= before


def in_a_fork() -> str:
    """A process that was forked from a worker is no worker."""
    move, x = whole_sum((2,))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            move.apply(x)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(read, 1000).decode()
    move(x)  # the worker itself goes on
    return text


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="the transport is chosen outside")
def test_a_forked_process_is_no_worker(run: Any) -> None:
    for worker, text in enumerate(run(in_a_fork, nprocs=2)):
        assert f"forked from worker {worker}" in text


def leave_early(folder: str) -> None:
    """A worker that leaves while others wait for it."""
    move, x = whole_sum((2,))
    move(x)
    if transport.this_worker() == 1:
        transport.leave()
        return
    try:
        move(x)
    except tessel.WorkerLost as error:
        Path(folder, "note").write_text(str(error))
        raise


@pytest.mark.skipif("TESSEL_TRANSPORT" in os.environ, reason="Gloo waits until its time limit")
def test_a_worker_that_has_left_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(tessel.WorkerLost):
        tessel.launch(leave_early, 2, str(tmp_path), timeout=30)
    assert "worker 0 lost contact with worker 1" in (tmp_path / "note").read_text()


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8, 64, 1000])
def test_the_memory_of_a_host_is_bounded(num_workers: int) -> None:
    segment_map = channel.SegmentMap(num_workers)
    smallest = num_workers * channel.SLOTS * channel.SMALLEST
    slots = num_workers * channel.SLOTS * segment_map.slot_size
    assert slots <= max(2 * channel.BUDGET, smallest)
    assert segment_map.slots(0) >= segment_map.control(num_workers)
    assert segment_map.size == segment_map.slots(num_workers)
