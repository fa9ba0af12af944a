"""The context: who has which item, what is refused, and how a job ends.

Tests `imaging/context.py`, `imaging/measurements.py`.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tessel
from scripts import python
from tessel import transport
from tessel.imaging import DistributedContext, DistributedSignal
from tessel.imaging.context import local_indices, owner, seed_of

Run = Callable[..., list[Any]]
GPUS = [
    (0, 0, 2, "cpu"),
    (1, 0, 1, "cuda:0"),
    (1, 1, 2, "cuda:0"),
    (2, 0, 4, "cuda:0"),
    (2, 3, 4, "cuda:1"),
    (4, 1, 2, "cuda:1"),
]


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
    with pytest.raises(ValueError, match="expected a worker from 0 to 1, got 2"):
        local_indices(3, 2, 2, "block")
    with pytest.raises(ValueError, match="expected an item from 0 to 2, got 3"):
        owner(3, 3, 2, "block")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="'gpu' was requested, but this host has 0 GPUs"):
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
        assert "'nccl' was requested, but the job runs on" in text


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


def own_numbers(settings: dict[str, Any]) -> list[list[float]]:
    """What a worker draws by itself, twice, and with the others in between."""
    with DistributedContext(**settings) as ctx:
        first = torch.rand(2).tolist()
        state = torch.get_rng_state()
        with ctx.shared_random():
            together = torch.rand(2).tolist()
            torch.rand(ctx.rank)  # one that draws more does not bring the next block out of step
        assert torch.equal(torch.get_rng_state(), state), "each goes on with its own numbers"
        with ctx.shared_random():
            again = torch.rand(2).tolist()
        return [first, together, again]


def test_seeds_are_of_workers_and_numbers_are_shared_where_asked_for(run: Run) -> None:
    """Worker k draws from seed + k; what all draw together does not depend on their number."""
    torch.manual_seed(7)
    alone = torch.rand(2).tolist()
    together = []
    for nprocs in (1, 2, 4):
        found = run(own_numbers, {"seed": 7}, nprocs=nprocs)
        assert found[0][0] == alone, "worker 0 draws what one process draws"
        assert len({tuple(each[0]) for each in found}) == nprocs
        together += [each[1:] for each in found]
    assert all(each == together[0] for each in together)
    assert together[0][0] != together[0][1]
    for found in run(own_numbers, {"seed": 8}, nprocs=2):
        assert found[1] != together[0][0]


def test_one_seed_for_all_workers(run: Run) -> None:
    found = run(own_numbers, {"seed": 7, "seed_offset": False}, nprocs=2)
    assert found[0] == found[1]


def unseeded(seeds: list[int]) -> list[list[float]]:
    torch.manual_seed(seeds[transport.this_worker()])
    return own_numbers({})


def test_shared_numbers_without_a_seed(run: Run) -> None:
    """They follow the generator of worker 0."""
    first, second = run(unseeded, [3, 4], nprocs=2)
    assert first[0] != second[0] and first[1:] == second[1:]
    assert run(unseeded, [3, 5], nprocs=2)[1][1:] == first[1:]
    assert run(unseeded, [4, 4], nprocs=2)[0][1:] != first[1:]


def differing(what: str) -> str:
    """One worker enters with another argument, or draws alone."""
    one = transport.this_worker() == 1
    settings: dict[str, dict[str, Any]] = {
        "seed": {"seed": 4 + one},
        "sharding": {"sharding": "block" if one else "round_robin"},
        "debug": {"debug": one},
        "random": {"seed": 4},
    }
    try:
        with DistributedContext(**settings[what]) as ctx:
            if one:
                with ctx.shared_random():
                    pass
            DistributedSignal(ctx, (2, 2))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["seed", "sharding", "debug", "random"])
def test_all_workers_enter_alike(run: Run, what: str) -> None:
    texts = run(differing, what, nprocs=3)
    assert len(set(texts)) == 1 and "all workers must make the same calls" in texts[0]
    assert what in texts[0]


def test_cudnn_is_as_before_after_the_context() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    with DistributedContext(deterministic=True):
        assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
    assert (cudnn.benchmark, cudnn.deterministic) == before


@pytest.mark.parametrize(("gpus", "place", "here", "expected"), GPUS)
def test_workers_share_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, place: int, here: int, expected: str
) -> None:
    """As local_rank % gpus, and the first worker of a host says so, once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    monkeypatch.setenv("TESSEL_LAUNCHER", "none")  # the variables name no job
    monkeypatch.setenv("LOCAL_RANK", str(place))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    warns = 0 < gpus < here and place == 0
    for mode in (None, "gpu") if gpus else (None,):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with DistributedContext(device_mode=mode) as ctx:
                assert str(ctx.device) == expected
        texts = [str(each.message) for each in caught if "share" in str(each.message)]
        assert len(texts) == int(warns)
        assert all(f"{here} workers of this host share {gpus} GPUs" in text for text in texts)
    with DistributedContext(device_mode="cpu") as ctx:
        assert str(ctx.device) == "cpu"


def test_a_worker_stays_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the one that it took when it joined the job, whatever its local rank is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    monkeypatch.setattr(tessel.transport, "own_gpu", lambda: 1)
    monkeypatch.setenv("TESSEL_LAUNCHER", "none")  # the variables name no job
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with DistributedContext() as ctx:
            assert str(ctx.device) == "cuda:1"


def stays(nested: bool) -> float:
    """A context in a job that runs already leaves it as it is."""
    before = tessel.world()
    move = tessel.nn.AllSumReduce(before, [0])
    with DistributedContext() as ctx:
        signal = DistributedSignal(ctx, (2, 2), init=torch.ones(2, 2))
        if nested:
            with DistributedContext() as inner:
                assert inner.rank == ctx.rank
            with ctx:
                pass
        signal.update_(signal.data + 1)
    signal.update_(signal.data + 1)
    assert ctx.partition.size == ctx.world_size == before.size
    return float(move(signal.data).sum())


def test_a_job_of_somebody_else_goes_on(run: Run) -> None:
    for nested in (False, True):
        assert run(stays, nested, nprocs=3) == [36.0] * 3


SCRIPT = """
import gc, os, sys, torch, torch.distributed as dist
import tessel
from tessel.imaging import DistributedContext, DistributedSignal
gc.freeze()  # who leaves a job collects garbage, of which there is none in what was imported

def use(backend=None, debug=False, fails=False, caught=False, outer=None):
    try:
        with DistributedContext(seed=1, backend=backend, debug=debug) as ctx:
            assert ctx.is_dist and dist.is_initialized()
            signal = DistributedSignal(ctx, (2, 2), init=torch.full((2, 2), 3.0 + ctx.rank))
            total = tessel.nn.AllSumReduce(ctx.partition, [0])(torch.ones(1)).item()
            assert total == ctx.world_size
            line = f"time {time} worker {ctx.rank} of {ctx.world_size}"
            sys.stdout.write(f"{line} {signal.data.sum().item()}\\n")
            if fails and ctx.rank == 1:
                raise KeyError("worker 1 gives up")
            if fails:
                signal.update_(signal.data)
            if caught:
                signal.update_(signal.data.double())
    except ValueError as error:
        assert caught and "expected a tensor of torch.float32" in str(error), error
    assert dist.is_initialized() == (outer is not None), "it leaves what it joined, and only that"
    assert ctx.rank == int(os.environ["RANK"])
    if outer is not None:
        assert outer(torch.ones(1)).item() == ctx.world_size
        signal.update_(signal.data)
    elif ctx.world_size > 1:
        for use in (lambda: signal.update_(signal.data), lambda: ctx.partition):
            try:
                use()
                raise AssertionError("a job that was left is of no use")
            except RuntimeError as error:
                assert "has left" in str(error) or "inside the context" in str(error), error

time = 0
for settings in SETTINGS:
    outer = tessel.nn.AllSumReduce(tessel.world(), [0]) if settings.pop("outer", False) else None
    for _ in range(3):
        use(**settings, outer=outer)
        time += 1
"""

TESSEL_RUN = "-m", "tessel", "run", "-n", 3
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2


def launched(
    folder: Path, launcher: tuple[object, ...], settings: list[dict[str, Any]], **more: str
) -> tuple[str, int]:
    """What a job says whose contexts follow each other, of each of the settings three."""
    script = folder / "script.py"
    script.write_text(f"SETTINGS = {settings}\n{SCRIPT}")
    env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    done = python(*launcher, script, env=env, timeout=100)
    return done.stdout + done.stderr, done.returncode


def assert_said(text: str, workers: int, times: int) -> None:
    for number in range(times):
        for worker in range(workers):
            assert f"time {number} worker {worker} of {workers} 12.0" in text, text


@pytest.mark.slow
def test_contexts_follow_each_other(tmp_path: Path) -> None:
    """Each joins the job and leaves it, also on the way of an error that all workers raise."""
    text, code = launched(tmp_path, TORCHRUN, [{"debug": True}, {"caught": True}])
    assert code == 0, text
    assert_said(text, 2, 6)


def test_contexts_of_one_worker_follow_each_other(tmp_path: Path) -> None:
    """With the environment that torchrun gives it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    more = dict(zip(names, ("0", "0", "1", "1", "127.0.0.1", port), strict=True))
    text, code = launched(tmp_path, (), [{}], **more)
    assert code == 0, text
    assert_said(text, 1, 3)


@pytest.mark.slow
def test_a_worker_that_raises_ends_the_job(tmp_path: Path) -> None:
    """With its own traceback, while the others wait for it in a movement."""
    right: list[dict[str, Any]] = [{}, {"backend": "gloo"}, {"caught": True}, {"outer": True}]
    begin = time.monotonic()
    text, code = launched(tmp_path, TESSEL_RUN, [*right, {"fails": True}])
    assert_said(text, 3, 3 * len(right))
    assert code != 0
    assert "KeyError" in text and "worker 1 gives up" in text and "script.py" in text
    assert time.monotonic() - begin < 90  # most of which is the start
