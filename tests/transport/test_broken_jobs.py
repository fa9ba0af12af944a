"""A job in which an exchange was not completed is broken: later calls raise, and none is wrong.

Tests `transport/watch.py`, `transport/group.py`, `transport/job.py`, `joining.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import jobs
import tessel
from tessel import Layout, Move, nn, transport
from tessel.transport import SendBuffer, job
from tessel.transport.board import MemoryBoard
from tessel.transport.host import Host

Run = Callable[..., list[Any]]
SECONDS = 40
WAYS = [("shared", "compiled"), ("shared", "python"), ("gloo", "compiled")]


def summed(x: torch.Tensor) -> torch.Tensor:
    return nn.AllSumReduce(tessel.world(), [0])(x)


def numbers(begin: int = 0) -> list[float | str]:
    """A few sums that would show a shift by one call, or the errors in their places."""
    found: list[float | str] = []
    for step in range(begin, 3):
        try:
            found.append(float(summed(torch.tensor(10.0**step * (1 + tessel.world().rank)))))
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def leave_and_find_port() -> None:
    """Leave the job of the pool, for another one at a port that is free now."""
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.barrier()  # else one that leaves early would cut others off
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port[0])


def come_late() -> tuple[list[float | str], list[float | str]]:
    """Worker 1 comes to a call after the time limit, and both catch what they hear."""
    leave_and_find_port()
    with pytest.MonkeyPatch.context() as patch:
        # joining has this limit, too: a busy machine needs several seconds
        patch.setenv("TESSEL_TIMEOUT", "6")
        summed(torch.ones(2))
    if tessel.world().rank == 1:
        time.sleep(9.0)
    found = numbers()
    with torch.no_grad():
        later = numbers(2)
    dist.destroy_process_group()
    return found, later


@pytest.mark.parametrize(("way", "engine"), WAYS)
def test_no_call_answers_another_after_a_time_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch, way: str, engine: str
) -> None:
    monkeypatch.setenv("TESSEL_TRANSPORT", way)
    monkeypatch.setenv("TESSEL_ENGINE", engine)
    found = run(come_late, nprocs=2, timeout=SECONDS)
    for early, later in found:
        assert all(str(each).startswith("WorkerLost") for each in (*early, *later)), found
        assert all("this job is broken since" in str(each) for each in (*early[1:], *later)), found
    assert "worker 0 lost contact with" in str(found[1][0][0]), found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def interrupt_the_wait() -> None:
    """Let this worker get Ctrl-C when it waits, which those of a pool leave to its parent."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = job._job().membership.watch

    def interrupt() -> None:
        while not watch._waits:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def await_file(said: Path) -> None:
    while not said.exists():
        time.sleep(0.01)


def interrupt_a_wait(moment: str, done: Path) -> tuple[str, list[float | str]]:
    """Worker 0 gets Ctrl-C while it waits for worker 1, and goes on."""
    P = tessel.world()
    summed(torch.ones(2))
    said, x = "", torch.ones(2, requires_grad=True)
    y = summed(x).sum() if moment == "backward" else None
    if P.rank == 0:
        interrupt_the_wait()
    else:
        await_file(done)
    try:
        if y is None:
            summed(torch.ones(2))
        else:
            y.backward()
    except KeyboardInterrupt:
        said = "interrupted"
        done.touch()
    except RuntimeError as error:
        said = str(error)
    return said, numbers()


@pytest.mark.parametrize("moment", ["forward", "backward"])
@pytest.mark.parametrize("engine", ["compiled", "python"])
def test_no_call_answers_another_after_an_interrupt(
    run: Run, in_new_job: Run, tmp_path: Path, engine: str, moment: str
) -> None:
    settings = {"transport": "shared", "engine": engine}
    done = tmp_path / "done"
    found = in_new_job(interrupt_a_wait, moment, done, nprocs=2, timeout=SECONDS, **settings)
    (first, mine), (second, others) = found
    assert first == "interrupted" and "KeyboardInterrupt on worker 0" in second
    assert all("this job is broken" in str(each) for each in (*mine, *others)), (mine, others)
    assert run(numbers, nprocs=2) == [[3.0, 30.0, 300.0]] * 2  # the pool has a new job


def break_a_smaller_group(done: Path) -> list[float | str]:
    """What breaks between two workers breaks the job of the third."""
    W = tessel.world()
    P = W.create_partition_inclusive([0, 1])
    pair = nn.AllSumReduce(P, [0])
    if P.active:
        pair(torch.ones(1))
    if W.rank == 0:
        interrupt_the_wait()
        with contextlib.suppress(KeyboardInterrupt):
            pair(torch.ones(1))
        done.touch()
    else:
        await_file(done)
    return numbers()


def test_a_broken_group_breaks_the_job(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TESSEL_TRANSPORT", "shared")  # Python hears of Ctrl-C after waits of Gloo
    run(jobs.leave_job, nprocs=3)
    found = run(break_a_smaller_group, tmp_path / "done", nprocs=3, timeout=SECONDS)
    assert all("this job is broken" in str(each) for said in found for each in said), found


def give_one_the_alarm(said: Path, passed: Path) -> tuple[int, list[float | str]]:
    """Worker 0 would die after it has given the alarm to worker 1, and before worker 2 has it."""
    summed(torch.ones(2))
    dist.barrier()  # all have its result
    rank, watch = tessel.world().rank, job._job().membership.watch
    board = watch._board
    assert isinstance(board, MemoryBoard)
    if rank == 0:
        board._segments = {worker: board._segments[worker] for worker in (0, 1)}
        watch.break_job("a test says so")
        said.touch()
    elif rank == 1:
        await_file(said)
    else:
        await_file(passed)
    alarm, found = watch.alarm[0], numbers()
    if rank == 1:
        passed.touch()
    return alarm, found


def test_the_alarm_is_passed_on(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESSEL_TRANSPORT", "shared")
    run(jobs.leave_job, nprocs=3)
    found = run(give_one_the_alarm, tmp_path / "said", tmp_path / "passed", nprocs=3)
    for alarm, said in found:
        assert alarm == 1 and all("a test says so" in str(each) for each in said), found


def overwrite_what_is_read(done: Path) -> float | str:
    """Worker 0 is interrupted and uses its tensor again, which worker 1 reads where it lies."""
    P = tessel.world()
    parts, whole = Layout.balanced(P, (1_000_000,)), Layout.whole(P, (1_000_000,))
    move, mine = Move(parts, whole), torch.ones(500_000, dtype=torch.float64)
    assert float(move.apply(mine).sum()) == 1_000_000
    dist.barrier()  # nobody is in that exchange any more when the next one is given up
    if P.rank == 0:
        interrupt_the_wait()
        with contextlib.suppress(KeyboardInterrupt):
            move.apply(mine)
        mine.fill_(-1)
        done.touch()
        return "interrupted"

    def held(function: Callable[..., Any]) -> Callable[..., Any]:
        def hold(*args: Any) -> Any:  # it has looked for an alarm before
            await_file(done)
            return function(*args)

        return hold

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Host, "follow", held(Host.follow))
        patch.setattr(Host, "wait", held(Host.wait))
        try:
            return float(move.apply(mine).sum())
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("engine", ["compiled", "python"])
def test_memory_of_an_interrupted_worker_is_not_taken_for_its_message(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str
) -> None:
    monkeypatch.setenv("TESSEL_TRANSPORT", "shared")
    monkeypatch.setenv("TESSEL_ENGINE", engine)
    run(jobs.leave_job, nprocs=2)
    found = run(overwrite_what_is_read, tmp_path / "done", nprocs=2, timeout=SECONDS)
    assert found[0] == "interrupted" and "this job is broken" in str(found[1]), found


def start_without_waiting() -> list[float | str]:
    """A move that is started and never waited for: nothing that follows takes its messages."""
    W = tessel.world()
    rows = Layout.balanced(W.create_cartesian_topology_partition([W.size, 1]), (4, 4))
    columns = Layout.balanced(W.create_cartesian_topology_partition([1, W.size]), (4, 4))
    move, x = Move(rows, columns), torch.full((2, 4), 1.0 + W.rank)
    move.apply(x)
    with torch.no_grad():
        started = move.start(100 * x)
        if W.rank == 0:
            started()
        y = move.apply(x)
    return [*numbers(), float(y.sum())]


def test_an_exchange_that_is_never_waited_for(run: Run) -> None:
    assert run(start_without_waiting, nprocs=2, timeout=SECONDS) == [[3.0, 30.0, 300.0, 12.0]] * 2


def make_one_exchange_more() -> list[float | str]:
    """Worker 0 sends once more than worker 1 expects, which the next agreement finds out."""
    group, worker = tessel.world().group, transport.this_worker()
    found: list[float | str] = []
    device = torch.device("cpu")
    place = torch.zeros(2)
    try:
        for step in range(3):
            if worker == 0:
                group.exchange([SendBuffer(1, torch.full((2,), float(step)))], [], device)()
                if step == 0:  # once too often
                    group.exchange([SendBuffer(1, torch.full((2,), -1.0))], [], device)()
            else:
                group.exchange([], [transport.ReceiveBuffer(0, place)], device)()
                found.append(float(place[0]))
        group.share_words([1])
    except RuntimeError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("engine", ["compiled", "python"])
def test_the_numbers_of_exchanges_are_compared(in_new_job: Run, engine: str) -> None:
    for found in in_new_job(make_one_exchange_more, nprocs=2, timeout=SECONDS, engine=engine):
        assert "WorkerLost" in str(found[-1]), found
        assert "the same calls in the same order" in str(found[-1]), found


def begin_anew() -> list[float | str]:
    """Break a job, and join another one in the same processes."""
    summed(torch.ones(2))
    dist.barrier()  # all have its result
    job._job().membership.watch.break_job("a test says so")
    dist.barrier()
    broken = numbers()
    assert all("a test says so" in str(each) for each in broken), broken
    leave_and_find_port()
    return numbers()


@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_the_next_job_of_a_process_is_whole(in_new_job: Run, way: str) -> None:
    found = in_new_job(begin_anew, nprocs=2, timeout=SECONDS, transport=way)
    assert found == [[3.0, 30.0, 300.0]] * 2


def join_in_vain() -> tuple[str, list[float | str]]:
    """Worker 1 fails to join a job that worker 0 has joined, and both join the next one."""
    leave_and_find_port()
    real, rank, said = dist.distributed_c10d.ProcessGroupGloo, int(os.environ["RANK"]), ""

    def made_in_vain(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise RuntimeError("a test says so")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dist.distributed_c10d, "ProcessGroupGloo", made_in_vain)
        try:
            transport.start()
        except RuntimeError as error:
            said = str(error)
    if rank == 0:
        dist.destroy_process_group()
    return said, numbers()


def test_a_worker_that_could_not_join_joins_the_next_job(run: Run) -> None:
    """Torch numbers groups, and counts those that were not made."""
    found = run(join_in_vain, nprocs=2, timeout=SECONDS)
    assert found == [("", [3.0, 30.0, 300.0]), ("a test says so", [3.0, 30.0, 300.0])]
