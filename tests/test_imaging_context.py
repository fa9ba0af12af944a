"""The context: who has which item, what is refused, and how a job ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tessel.imaging import DistributedContext
from tessel.imaging.random import seed_of
from tessel.imaging.sharding import local_indices, owner

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_items_are_shared_out(count: int, workers: int) -> None:
    for sharding in ("round_robin", "block"):
        parts = [local_indices(count, worker, workers, sharding) for worker in range(workers)]
        assert sorted(sum(parts, [])) == list(range(count))  # noqa: RUF017
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        for worker, part in enumerate(parts):
            assert all(owner(i, count, workers, sharding) == worker for i in part)
            if sharding == "round_robin":
                assert all(i % workers == worker for i in part)
            else:
                assert part == list(range(part[0], part[0] + len(part))) if part else True


def indices(sharding: str) -> list[Any]:
    with DistributedContext(sharding=sharding) as ctx:
        return [ctx.rank, ctx.world_size, ctx.is_dist, ctx.device.type, ctx.local_indices(10)]


def test_workers_know_their_items(run: Run) -> None:
    found = run(indices, "block", nprocs=4)
    runs = [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert found == [[rank, 4, True, "cpu", runs[rank]] for rank in range(4)]
    assert [each[-1] for each in run(indices, "round_robin", nprocs=2)] == [
        [0, 2, 4, 6, 8],
        [1, 3, 5, 7, 9],
    ]


def test_one_process() -> None:
    with DistributedContext(seed=1) as ctx:
        first = torch.rand(3)
        assert (ctx.rank, ctx.world_size, ctx.is_dist, ctx.owners(3)) == (0, 1, False, [0])
    with DistributedContext(seed=1):
        assert torch.equal(torch.rand(3), first)


BAD = [
    ({"sharding": "random"}, "one of round_robin, block, got 'random'"),
    ({"device_mode": "tpu"}, "one of None, 'cpu', 'gpu', got 'tpu'"),
    ({"backend": "mpi"}, "one of None, 'gloo', 'nccl', got 'mpi'"),
]


@pytest.mark.parametrize(("settings", "text"), BAD)
def test_bad_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DistributedContext(**settings)


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="must be 0 or more, got -1"):
        local_indices(-1, 0, 2, "block")
    with pytest.raises(ValueError, match="from 0 to 1 is needed, got 2"):
        local_indices(3, 2, 2, "block")
    with pytest.raises(ValueError, match="from 0 to 2 is needed, got 3"):
        owner(3, 3, 2, "block")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="'gpu' was asked for, and this host has 0 GPUs"):
        DistributedContext(device_mode="gpu").__enter__()


def test_outside_of_the_context() -> None:
    ctx = DistributedContext()
    with pytest.raises(RuntimeError, match="with DistributedContext"):
        ctx.rank  # noqa: B018


def other_backend() -> str:
    try:
        with DistributedContext(backend="nccl"):
            return ""
    except ValueError as error:
        return str(error)


def test_a_job_that_runs_on_another_backend(run: Run) -> None:
    for text in run(other_backend, nprocs=2):
        assert "'nccl' was asked for, and the job runs on" in text


def draw() -> list[float]:
    with DistributedContext(seed=5) as ctx:
        before = torch.get_rng_state()
        with ctx.drawing(7):
            first = torch.rand(()).item()
        assert torch.equal(before, torch.get_rng_state())
        with ctx.drawing(7, call=1):
            return [first, torch.rand(()).item(), torch.rand(()).item()]


def test_random_numbers_of_an_item(run: Run) -> None:
    """They are the same on every worker, and leave the others' as they were."""
    first, second = run(draw, nprocs=2)
    assert first == second and first[0] != first[1]
    assert seed_of(1, 2) != seed_of(2, 1) != seed_of(1, 2, 1)


SCRIPT = """
import sys, torch
from tessel.imaging import DistributedContext, DistributedSignal
for time in range(2):
    with DistributedContext(seed=1, backend={backend!r}) as ctx:
        signal = DistributedSignal(ctx, (2, 2), init=torch.full((2, 2), 3.0 + ctx.rank))
        print("time", time, "worker", ctx.rank, "of", ctx.world_size, signal.data.sum().item())
        if {fails} and ctx.rank == 1:
            raise KeyError("worker 1 gives up")
        if {fails}:
            signal.update_(signal.data)
"""


def launched(folder: Path, workers: int, **settings: Any) -> tuple[str, int, float]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(**settings))
    command = [sys.executable, "-m", "tessel", "run", "-n", str(workers), str(script)]
    begin = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.stdout + done.stderr, done.returncode, time.monotonic() - begin


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_contexts_follow_each_other(tmp_path: Path, backend: str | None) -> None:
    text, code, _ = launched(tmp_path, 2, backend=backend, fails=False)
    assert code == 0, text
    for number in range(2):
        for worker in range(2):
            assert f"time {number} worker {worker} of 2 12.0" in text


def test_a_worker_that_raises_ends_the_job(tmp_path: Path) -> None:
    """With its own traceback, while the others wait for it in a movement."""
    text, code, seconds = launched(tmp_path, 3, backend=None, fails=True)
    assert code != 0
    assert "KeyError" in text and "worker 1 gives up" in text and "script.py" in text
    assert seconds < 60  # most of which is the start
