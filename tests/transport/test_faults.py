"""Workers that die, stop or fail: the others end in bounded time and say who it was.

Tests `transport/host.py`, `transport/process.py`, `errors.py`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import tessel
from movements import case, me, mine
from scripts import python
from tessel import nn, transport

Run = Callable[..., list[Any]]

LOST = 1  # the worker that dies
SECONDS = 20  # of a call to the pool, which takes less than two
SOON = 5.0  # within which a survivor must have noticed

pytestmark = pytest.mark.ends_workers


def die(*args: object, **kwargs: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def meet_death(folder: str, name: str, moment: str) -> None:
    """Move data until a worker has died; every survivor notes how it ended, and after how long."""
    movement = case(name)
    x = mine(movement.inputs()).requires_grad_()
    movement.layer(x)  # all is well so far
    if me() == LOST:
        _plan_death(moment)
    elif moment == "before":
        time.sleep(0.5)  # it is gone when the others come
    begin = time.monotonic()
    try:
        for _ in range(100):  # one that needs nothing of the lost worker may still end well
            y = movement.layer(x)
            if me() == LOST and moment == "backward":
                _plan_death("in the exchange")
            (y * y).sum().backward()
    except RuntimeError as error:
        seconds = time.monotonic() - begin
        Path(folder, str(me())).write_text(f"{type(error).__name__}\n{seconds}\n{error}")
        os._exit(3)  # as the worker of a job does: whoever waits for it in turn notices


def _plan_death(moment: str) -> None:
    if moment == "before":
        die()
    elif moment == "in the agreement":
        transport.Group.share = die  # type: ignore[method-assign]
    elif moment == "in the exchange":
        transport.Group.exchange = die  # type: ignore[method-assign]
        transport.Group.exchange_at_once = die  # type: ignore[method-assign]
        transport.Group.follow = die  # type: ignore[method-assign]
    elif moment == "while others wait":
        time.sleep(0.5)
        die()


MOMENTS = ("before", "in the agreement", "in the exchange", "while others wait", "backward")
DEATHS = [(name, moment) for name in ("AllSumReduce", "Broadcast") for moment in MOMENTS]
DEATHS += [(name, "in the exchange") for name in ("Repartition", "HaloExchange", "Move.H")]


@pytest.mark.parametrize(("name", "moment"), DEATHS)
def test_a_killed_worker_is_named_by_all_others(
    run: Run, tmp_path: Path, name: str, moment: str
) -> None:
    with pytest.raises(tessel.WorkerLost) as caught:
        run(meet_death, str(tmp_path), name, moment, nprocs=3, timeout=SECONDS)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(rf"worker {LOST}\b.* was killed by SIGKILL", told), told
    for survivor in {0, 1, 2} - {LOST}:
        kind, seconds, text = (tmp_path / str(survivor)).read_text().split("\n", 2)
        assert kind == "WorkerLost", text
        assert float(seconds) < SOON
        assert re.search(rf"lost contact with worker [02, ]*{LOST}\b", text), text
    assert run(total, nprocs=3) == [3.0] * 3  # the pool is as good as new


def total() -> float:
    return float(nn.AllSumReduce(tessel.world(), [0])(torch.tensor(float(me()))))


def die_in_a_smaller_group(folder: str) -> None:
    """Workers 0 and 1 move data between them; worker 2 is not part of it."""
    P = tessel.world().create_partition_inclusive([0, LOST])
    layer = nn.AllSumReduce(P, [0])
    layer(torch.ones(3))
    if me() == LOST:
        _plan_death("in the exchange")
    try:
        layer(torch.ones(3))
    except tessel.WorkerLost as error:
        Path(folder, str(me())).write_text(str(error))


def test_a_killed_worker_of_a_smaller_group(run: Run, tmp_path: Path) -> None:
    with pytest.raises(tessel.WorkerLost, match=f"worker {LOST} of 3"):
        run(die_in_a_smaller_group, str(tmp_path), nprocs=3, timeout=SECONDS)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert f"lost contact with worker {LOST} " in (tmp_path / "0").read_text()


def die_while_partitions_are_made(folder: str) -> None:
    world = tessel.world()
    if me() == LOST:
        die()
    try:
        world.create_partition_inclusive([0, 2])
        total()
    except tessel.WorkerLost as error:
        Path(folder, str(me())).write_text(str(error))


def test_a_worker_killed_while_partitions_are_made(run: Run, tmp_path: Path) -> None:
    run(total, nprocs=2)  # so that the next world knows no partitions
    with pytest.raises(tessel.WorkerLost, match=f"worker {LOST} of 3"):
        run(die_while_partitions_are_made, str(tmp_path), nprocs=3, timeout=SECONDS)
    for survivor in (0, 2):
        assert f"lost contact with worker {LOST} " in (tmp_path / str(survivor)).read_text()


def fail_before_a_movement(in_backward: bool) -> None:
    layer = nn.AllSumReduce(tessel.world(), [0])
    y = layer(torch.ones(3, requires_grad=True))
    if me() == LOST:
        raise KeyError("my own mistake")
    if in_backward:
        y.sum().backward()
    else:
        layer(torch.ones(3))


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_ordinary_exception_ends_the_call_and_is_shown(run: Run, in_backward: bool) -> None:
    begin = time.monotonic()
    with pytest.raises(KeyError, match="my own mistake") as caught:
        run(fail_before_a_movement, in_backward, nprocs=3, timeout=SECONDS)
    assert time.monotonic() - begin < SOON
    assert any("fail_before_a_movement" in note for note in caught.value.__notes__)
    assert run(total, nprocs=3) == [3.0] * 3


def tessel_run(
    folder: Path, body: str, starts_workers: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on three workers; it may take a minute at most."""
    script = folder / "script.py"
    script.write_text("import os, signal, time, torch, tessel\nP = tessel.world()\n" + body)
    command = "-m", "tessel", "run", "-n", "3", script.name
    return python(*command, cwd=folder, env={**os.environ, **env}, starts_workers=starts_workers)


@pytest.mark.slow
def test_run_shows_a_worker_that_was_killed_inside_a_movement(tmp_path: Path) -> None:
    done = tessel_run(
        tmp_path,
        "layer = tessel.nn.AllSumReduce(P, [0])\n"
        "def die(*args):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if P.rank == 1:\n"
        "    Group = tessel.transport.Group\n"
        "    Group.exchange = Group.exchange_at_once = Group.follow = die\n"
        "try:\n"
        "    layer(torch.ones(6))\n"
        "except tessel.WorkerLost as error:\n"
        "    print('noticed:', error, flush=True)\n"
        "    raise\n",
        starts_workers=True,  # forks end at once, and the last one may name two that are gone
    )
    assert done.returncode != 0
    assert "worker 1" in done.stderr and "SIGKILL" in done.stderr, done.stderr
    # the launcher may end the others before they notice; what they say names the worker
    noticed = done.stdout
    assert not noticed or "lost contact with worker 1" in noticed, noticed + done.stderr


def wait_for_a_stopped_worker(folder: str, port: int, workers: list[int]) -> None:
    """Join a world with a time limit, as a worker of torchrun does; one worker stops in it."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    layer = nn.AllSumReduce(tessel.world().create_partition_inclusive(workers), [0])
    layer(torch.ones(6))
    if me() == LOST:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    try:
        layer(torch.ones(6))
    except tessel.WorkerLost as error:
        Path(folder, str(me())).write_text(f"{time.monotonic() - begin}\n{error}")
        raise


@pytest.mark.parametrize("workers", [[0, 1, 2], [0, 1]])
def test_a_stopped_worker_is_named_after_the_time_limit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: list[int]
) -> None:
    """A worker that hangs is no dead one: only a time limit tells. Smaller groups have it too."""
    monkeypatch.setenv("TESSEL_TIMEOUT", "2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(tessel.WorkerLost):
        run(wait_for_a_stopped_worker, str(tmp_path), port, workers, nprocs=3, timeout=SECONDS)
    for survivor in set(workers) - {LOST}:
        seconds, text = (tmp_path / str(survivor)).read_text().split("\n", 1)
        assert 1 < float(seconds) < 10
        assert f"worker {LOST}" in text, text


@pytest.mark.slow
def test_run_shows_a_worker_that_was_stopped(tmp_path: Path) -> None:
    """The launcher asks it to end, which a stopped process does not hear."""
    done = tessel_run(
        tmp_path,
        "layer = tessel.nn.AllSumReduce(P, [0])\n"
        "layer(torch.ones(6))\n"
        "if P.rank == 1:\n"
        "    open('begin', 'w').write(str(time.time()))\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "layer(torch.ones(6))\n",
        TESSEL_TIMEOUT="8",
    )
    seconds = time.time() - float((tmp_path / "begin").read_text())
    assert done.returncode != 0
    silence = "(stopped for 8 s|Timed out waiting 8000ms)"  # the latter if Gloo is chosen outside
    assert re.search(f"lost contact with worker 1 .*{silence}", done.stderr), done.stderr
    assert "killed by" not in done.stderr, done.stderr
    assert seconds < 8 + 15, seconds  # elastic waits 30 s for it


@pytest.mark.slow
def test_a_job_may_end_without_a_word(tmp_path: Path) -> None:
    """Workers leave at different times, without closing anything: no crash, no complaint."""
    done = tessel_run(
        tmp_path,
        "y = tessel.nn.AllSumReduce(P, [0])(torch.ones(6, requires_grad=True))\n"
        "y.sum().backward()\n"
        "time.sleep(0.3 * P.rank)\n",
        starts_workers=True,  # forks of tests do not end as interpreters do
    )
    assert done.returncode == 0, done.stderr
    assert not re.search("error|abort|terminate", done.stderr, re.IGNORECASE), done.stderr
