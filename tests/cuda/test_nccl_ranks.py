"""Several NCCL workers on one GPU, or on several.

NCCL refuses two workers of the same host on the same GPU. Where there are fewer GPUs than workers,
each of them says that it is a host of its own, and they talk over sockets of the loopback
interface: real NCCL with real streams, in which a wrong order of calls hangs. Times mean nothing.

Tests `transport/group.py`, `transport/device_wait.py`, `transport/wire.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tessel
from cuda_checks import check_everything, mixed_devices
from tessel import nn

SECONDS = 200.0  # NCCL connects each pair of workers when they first talk
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.limit(SECONDS + 20.0),
]
SOON = 20.0  # seconds in which all learn of a fault
BOTH = "cpu:gloo,cuda:nccl"


def as_hosts(function: Callable[..., Any], *args: Any) -> Any:
    """Run on a worker that counts as a host of its own, on its GPU."""
    os.environ.update(
        NCCL_HOSTID=f"worker-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1"
    )
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    return function(*args)


def over_nccl(
    function: Callable[..., Any], nprocs: int, *args: Any, timeout: float = SECONDS
) -> list[Any]:
    return tessel.launch(as_hosts, nprocs, function, *args, timeout=timeout, backend=BOTH)


def summed(x: torch.Tensor) -> torch.Tensor:
    return nn.AllSumReduce(tessel.world(), [0])(x)


def attempt(function: Callable[[], Any]) -> tuple[str, float]:
    """What a call gives or says, and after how many seconds."""
    begin = time.monotonic()
    try:
        said = str(function())
    except (RuntimeError, KeyError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - begin


def numbers() -> list[str]:
    """Sums that would show a shift by one call, or what they say."""
    x = torch.ones((), device="cuda") * (1 + tessel.world().rank)
    return [attempt(lambda k=k: float(summed(x * 10.0**k)))[0] for k in range(3)]


def assert_broken(found: list[list[str]]) -> None:
    for each in (text for worker in found for text in worker):
        assert each.startswith("WorkerLost") and "this job is broken" in each, found


@pytest.mark.parametrize("nprocs", [2, 4])
def test_everything(nprocs: int) -> None:
    over_nccl(check_everything, nprocs)


def test_mixed_devices() -> None:
    first, second = over_nccl(mixed_devices, 2)
    assert first == second and "cuda on worker 0, cpu on worker 1" in first


def come_late() -> list[str]:
    summed(torch.ones(2, device="cuda"))
    if tessel.world().rank == 1:
        time.sleep(8.0)
    return numbers()


def test_no_call_answers_another_after_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSEL_TIMEOUT", "3")
    found = over_nccl(come_late, 2)
    assert all(each.startswith("WorkerLost") for worker in found for each in worker), found
    assert_broken([worker[1:] for worker in found])


def model_with(hook: Callable[..., None]) -> torch.nn.Module:
    """Two convolutions over the workers, after the first of which one of them does something."""
    layer = torch.nn.Conv2d(2, 2, 3, padding=1)
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])
    model = nn.distribute_module(torch.nn.Sequential(layer, torch.nn.ReLU(), layer), P).cuda()
    assert float(model(images()).sum()) != 0.0

    def only_on_one(*args: Any) -> None:
        if tessel.world().rank == 1:
            hook()

    model[1].register_forward_hook(only_on_one)
    return model


def images() -> torch.Tensor:
    return torch.ones(1, 2, 4, 8, device="cuda")


def fail() -> None:
    raise KeyError("my own mistake")


def fall_asleep() -> None:
    time.sleep(9.0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def use_a_model(hook: Callable[..., None], asks: bool) -> tuple[str, float, list[str]]:
    """One worker does not come to an exchange in a model that both are in.

    The other one has put the exchange into its stream, and goes on until it asks for a value.
    """
    model = model_with(hook)
    with torch.no_grad():
        said, seconds = attempt(lambda: float(model(images()).sum()) if asks else model(images()))
    return said, seconds, numbers()


@pytest.mark.parametrize(("nprocs", "asks"), [(2, True), (2, False), (4, True)])
def test_a_worker_that_raises(nprocs: int, asks: bool) -> None:
    found = over_nccl(use_a_model, nprocs, fail, asks)
    second, _, later = found.pop(1)
    assert "KeyError" in second and "my own mistake" in second
    for first, seconds, then in found:
        assert seconds < SOON
        if not asks:  # the result is there, and never complete: the next call says so
            first, then = then[0], then[1:]
        assert first.startswith("WorkerLost") and "my own mistake" in first, first
        assert_broken([then, later[1:]])


def test_a_worker_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSEL_TIMEOUT", "4")
    (first, seconds, then), (_, _, later) = over_nccl(use_a_model, 2, fall_asleep, True)
    assert first.startswith("WorkerLost") and "longer than 4 s" in first and seconds < SOON, first
    assert_broken([then, later])


def test_a_worker_killed_in_a_model() -> None:
    begin = time.monotonic()
    with pytest.raises(tessel.WorkerLost, match="worker 1"):
        over_nccl(use_a_model, 2, die, True)
    assert time.monotonic() - begin < 60.0


def join_again(port: int) -> list[str]:
    """Go on in a new job after one that broke."""
    use_a_model(fail, True)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    settings = {"rank": int(os.environ["RANK"]), "world_size": 2}
    dist.init_process_group(BOTH, init_method=f"tcp://127.0.0.1:{port}", **settings)
    return numbers()


def test_the_next_job_is_whole() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    assert over_nccl(join_again, 2, port) == [["3.0", "30.0", "300.0"]] * 2


def other_order() -> tuple[str, float, list[str]]:
    x = torch.ones(4, device="cuda")
    summed(x)
    calls = [lambda: summed(x), lambda: nn.AllGather(tessel.world(), 0, 0)(x)]
    if tessel.world().rank == 1:
        calls.reverse()
    said, seconds = attempt(lambda: [float(call().sum()) for call in calls])
    return said, seconds, numbers()


@pytest.mark.parametrize("nprocs", [2, 4])
def test_calls_in_another_order(nprocs: int) -> None:
    found = over_nccl(other_order, nprocs)
    for said, seconds, _ in found:
        assert "Error" in said or said.startswith("WorkerLost"), found
        assert seconds < SOON, found
    (_, _, first), *others = found
    alike = all(other == first for _, _, other in others)
    assert alike or {each[:10] for _, _, other in found for each in other} == {"WorkerLost"}, found


def skip_a_backward() -> tuple[str, float, list[str]]:
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = summed(x).sum()
    if tessel.world().rank == 0:
        said, seconds = attempt(lambda: (y.backward(), float(x.grad.sum())))
        return said, seconds, numbers()
    said, seconds = attempt(lambda: float(summed(x).sum()))
    return said, seconds, numbers()


def test_a_skipped_backward() -> None:
    found = over_nccl(skip_a_backward, 2)
    for said, seconds, _ in found:
        assert said.startswith("WorkerLost") and "backward" in said and seconds < SOON, found
    assert_broken([later for _, _, later in found])


def die_alone() -> tuple[str, float, list[str]]:
    x = torch.ones(4, device="cuda")
    summed(x)
    if tessel.world().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said, seconds = attempt(lambda: float(summed(x).sum()))
    raise AssertionError(f"after {seconds:.1f} s: {said}")


def test_a_killed_worker() -> None:
    begin = time.monotonic()
    with pytest.raises(tessel.WorkerLost, match="worker 1"):
        over_nccl(die_alone, 2)
    assert time.monotonic() - begin < 60.0


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def train_in_all() -> list[list[float]]:
    return [train_in(dtype) for dtype in DTYPES]


def train_in(dtype: torch.dtype) -> list[float]:
    """The losses of a converted model under autocast, with a scaler for fp16."""
    torch.manual_seed(0)
    P = tessel.world().create_cartesian_topology_partition([1, 1, dist.get_world_size(), 1])
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 2, 3, padding=1),
    ).cuda()
    model = nn.distribute_module(model, P)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    whole = torch.linspace(-1, 1, 2 * 16 * 16, device="cuda").reshape(1, 2, 16, 16)
    x = tessel.spread(whole, P)
    losses = []
    for _ in range(5):
        with torch.autocast("cuda", dtype=dtype):
            loss = torch.nn.functional.mse_loss(model(x).float(), x)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("nprocs", [2, 4])
def test_training_in_halves(nprocs: int) -> None:
    found = over_nccl(train_in_all, nprocs)
    assert all(each == found[0] for each in found)
    exact, *_ = found[0]
    for losses in found[0]:
        assert losses[-1] < losses[0]
        assert losses == pytest.approx(exact, rel=0.02)
