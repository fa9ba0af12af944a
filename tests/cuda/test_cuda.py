"""CUDA tensors in one process, and in several that share a GPU without NCCL.

Tests `transport/device_exchange.py`, `transport/mailbox.py`, `transport/wire.py`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import tessel
from cuda_checks import (
    check_everything,
    check_nccl_transport,
    check_nccl_world_of_one,
    mixed_devices,
)
from tessel import nn, transport
from tessel.transport import mailbox

SECONDS = 120.0  # the first use of a GPU by a process takes seconds
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.limit(SECONDS + 20.0),
]


def test_without_a_process_group() -> None:
    tessel.launch(check_everything, 1, timeout=SECONDS)


def test_nccl_world_of_one(tmp_path: Path) -> None:
    tessel.launch(check_nccl_world_of_one, 1, str(tmp_path), timeout=SECONDS)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_transport_on_nccl(tmp_path: Path, backend: str) -> None:
    tessel.launch(check_nccl_transport, 1, str(tmp_path), backend, timeout=SECONDS)


@pytest.mark.parametrize(("nprocs", "ipc"), [(2, "1"), (3, "1"), (2, "0")])
def test_workers_that_share_a_gpu(nprocs: int, ipc: str) -> None:
    """They read each other's memory, or stage tensors in that of the host."""
    ways = tessel.launch(everything_shared, nprocs, ipc, timeout=SECONDS, backend="gloo")
    assert ways == ["CUDA IPC" if ipc == "1" else "pinned memory"] * nprocs


def everything_shared(ipc: str) -> str:
    os.environ[mailbox.IPC] = ipc
    check_everything()
    return transport.between_gpus()


def without_waiting() -> list[bool]:
    """Sums of large tensors by GPUs that are behind, of which hosts need not know."""
    layer, rank = nn.AllSumReduce(tessel.world(), [0]), tessel.world().rank
    x = torch.full((2**22,), rank + 1.0, device="cuda")
    layer(x)
    totals = []
    torch.cuda.set_sync_debug_mode("error")
    for k in range(20):
        if rank == k % 2:
            torch.cuda._sleep(20_000_000)  # about 10 ms
        totals.append(layer(x * (k + 1)))
    torch.cuda.set_sync_debug_mode("default")
    return [bool((y == 3.0 * (k + 1)).all()) for k, y in enumerate(totals)]


def test_hosts_do_not_wait_for_gpus() -> None:
    assert tessel.launch(without_waiting, 2, timeout=SECONDS, backend="gloo") == [[True] * 20] * 2


def sends_and_ends() -> float:
    """The first worker is done while the other's GPU has yet to read what it sent."""
    P = tessel.world()
    layer = nn.Broadcast(P.create_partition_inclusive([0]), P)
    x = torch.full((2**24,), 3.0, device="cuda") if P.rank == 0 else tessel.zero_volume_tensor()
    layer(x)
    if P.rank == 1:
        torch.cuda._sleep(2_000_000_000)  # about a second
    y = layer(x * 2)
    return 0.0 if P.rank == 0 else float(y.sum()) / 2**24


def test_a_worker_that_ends_first_waits_for_readers() -> None:
    assert tessel.launch(sends_and_ends, 2, timeout=SECONDS, backend="gloo") == [0.0, 6.0]


def goes_away(how: str) -> tuple[str, float]:
    """What the others hear of a worker that raises, or is killed, in the middle."""
    layer = nn.AllSumReduce(tessel.world(), [0])
    x = torch.ones(2**20, device="cuda")
    layer(x)
    begin = time.monotonic()
    if tessel.world().rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("gone")
    try:
        layer(x)
    except tessel.WorkerLost as error:
        return str(error), time.monotonic() - begin
    return "nothing", 0.0


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_a_worker_that_goes_away_is_missed(how: str) -> None:
    with pytest.raises(Exception, match="gone" if how == "raises" else "signal|killed|SIGKILL"):
        tessel.launch(goes_away, 2, how, timeout=SECONDS, backend="gloo")


def captured() -> str:
    layer, x = nn.AllSumReduce(tessel.world(), [0]), torch.ones(4, device="cuda")
    layer(x)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(x)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_graph_cannot_be_captured() -> None:
    for said in tessel.launch(captured, 2, timeout=SECONDS, backend="gloo"):
        assert "only exchanges by NCCL can be captured" in said


def test_mixed_devices_raise_on_all() -> None:
    first, second = tessel.launch(mixed_devices, 2, timeout=SECONDS)
    assert first == second
    assert "cuda on worker 0, cpu on worker 1" in first
