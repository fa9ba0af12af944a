"""Models on several NCCL workers as people use them: compiled, traced, replicated, sharded.

Tests `nn/convert.py`, `nn/wrapped.py`.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import models
import tessel
from test_nccl_ranks import SECONDS, over_nccl

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.limit(SECONDS + 20.0),
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


class Residual(nn.Module):
    """A step down and one up, with norms, a part that goes around them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4))
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.norm = nn.GroupNorm(2, 2)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.up(self.down(x).relu())).square().mean((2, 3)))


def grid(size: int) -> tessel.Partition:
    return tessel.world().create_cartesian_topology_partition([1, 1, size, 1])


def converted(P: tessel.Partition, rows: int = 12) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    with torch.device("cpu"):  # where random numbers are those of one process
        model = Residual().double()
    model = tessel.nn.distribute_module(model.cuda(), P)
    whole = torch.arange(2 * 2 * rows * 6.0).reshape(2, 2, rows, 6).mul(0.7).sin().double()
    return model, tessel.Layout.balanced(P, whole.shape).local_part(whole).cuda()


def trained(model: Any, x: Tensor, steps: int = 3) -> list[Tensor]:
    """The parameters after some steps, on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [each.detach().cpu() for each in whole]


def alone() -> list[Tensor]:
    """The same in one process, on the CPU."""
    torch.manual_seed(0)
    whole = torch.arange(2 * 2 * 12 * 6.0).reshape(2, 2, 12, 6).mul(0.7).sin().double()
    return trained(Residual().double(), whole)


def assert_alike(found: list[list[Tensor]]) -> None:
    expected = alone()
    for worker in found:
        for one, other in zip(worker, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def compiled(backend: str) -> list[Tensor]:
    model, x = converted(grid(tessel.world().size))
    return trained(torch.compile(model, fullgraph=True, backend=backend), x)


@needs_compiler
@pytest.mark.parametrize(
    ("nprocs", "backend"), [(2, "aot_eager"), (2, "inductor"), (4, "aot_eager")]
)
def test_compiled_models(nprocs: int, backend: str) -> None:
    assert_alike(over_nccl(compiled, nprocs, backend))


def traced(path: str) -> list[Tensor]:
    model, x = converted(grid(2))
    with tessel.trace(path):
        return trained(model, x)


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert_alike(over_nccl(traced, 2, str(path)))
    events = json.loads(path.read_text())["traceEvents"]
    assert {each["pid"] for each in events if each.get("ph") == "X"} == {0, 1}
    moved = [each for each in events if each.get("cat") == "moving"]
    assert any(each["name"] == "down.0: halo exchange" for each in moved)


def replicated(kind: str) -> list[Tensor]:
    """Two replicas of two workers each, which are given the same samples."""
    world = tessel.world()
    mesh = world.create_cartesian_topology_partition([2, 2]).to_mesh(names=("data", "space"))
    rows = [tessel.Partition(ranks, (1, 1, 2, 1)) for ranks in ((0, 1), (2, 3))]
    model, x = converted(rows[(world.rank or 0) // 2])
    if kind == "DDP":
        return trained(DistributedDataParallel(model, process_group=mesh.get_group("data")), x)
    return trained(fully_shard(model, mesh=mesh["data"]), x)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_replicas(kind: str) -> None:
    assert_alike(over_nccl(replicated, 4, kind))


def with_default_device() -> list[Tensor]:
    torch.set_default_device("cuda")
    try:
        model, x = converted(grid(2))
        return trained(copy.deepcopy(model), x)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("backend", ["nccl", "shared"])
def test_a_gpu_is_the_default_device(backend: str) -> None:
    if backend == "nccl":
        assert_alike(over_nccl(with_default_device, 2))
    else:
        assert_alike(tessel.launch(with_default_device, 2, timeout=SECONDS, backend="gloo"))


def trained_model(kind: str, arguments: tuple[int, ...], shape: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, *[1] * (len(shape) - 3)])
    model = tessel.nn.distribute_module(getattr(models, kind)(*arguments).double().cuda(), P)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    return trained(model, tessel.Layout.balanced(P, shape).local_part(whole).cuda(), steps=2)


@pytest.mark.parametrize(
    ("kind", "arguments", "shape"),
    [("ResNet18", (8, 10), (2, 3, 64, 64)), ("UNet", (3, 4), (1, 1, 16, 16, 16))],
)
def test_workers_that_share_a_gpu_train_models(
    kind: str, arguments: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    shared = tessel.launch(
        trained_model, 2, kind, arguments, shape, timeout=SECONDS, backend="gloo"
    )
    by_nccl = over_nccl(trained_model, 2, kind, arguments, shape)
    for one, other in zip(shared, by_nccl, strict=True):
        for found, expected in zip(one, other, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
