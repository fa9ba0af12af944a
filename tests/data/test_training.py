"""A U-Net trains on samples of which no worker could hold half of one.

Tests `data/loader.py`, `data/dataset.py`.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch.nn.functional import avg_pool3d, interpolate, max_pool3d, mse_loss

import tessel
from tessel.data import FromArray, PartDataset, PartLoader
from tessel.testing import WorkerPool

VOLUMES = (2, 1, 640, 128, 256)  # two samples, of 168 MB each
WORKERS = 10  # parts of 17 MB
# bytes, besides what a worker has before it trains: three parts, of which one is read ahead, and
# what is freed between them and too short to be used again
MAY_HOLD = 78 << 20


class UNet(torch.nn.Module):
    """Of an eighth of the resolution, and half of that."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.AvgPool3d(8), torch.nn.Conv3d(1, 2, 3, padding=1))
        self.inner = torch.nn.Conv3d(2, 2, 3, padding=1)
        self.merge = torch.nn.Conv3d(4, 2, 3, padding=1)
        self.norm = torch.nn.BatchNorm3d(2)
        self.head = torch.nn.Conv3d(2, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = torch.relu(self.norm(self.stem(x)))
        coarse = torch.relu(self.inner(max_pool3d(fine, 2)))
        return self.head(self.merge(torch.cat([fine, interpolate(coarse, scale_factor=2)], 1)))


def train(model: Any, batches: Any, epochs: int = 2) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(epochs):
        for x in batches:
            loss = mse_loss(model(x), avg_pool3d(x, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def made() -> UNet:
    torch.manual_seed(0)
    return UNet().double()


def own_memory() -> int:
    status = Path("/proc/self/status").read_text()
    (found,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmData"))
    return 1024 * int(found)


@contextmanager
def limited(extra: int) -> Iterator[None]:
    """Give this process so much more memory of its own than it uses, and no more."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (own_memory(), before[1]))
    filled = []
    try:
        with suppress(MemoryError):  # what was freed and kept could be used besides
            while True:
                filled.append(bytearray(1 << 20))
        resource.setrlimit(resource.RLIMIT_DATA, (own_memory() + extra, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def train_in_parts(path: str, size: int) -> list[float]:
    # of the address space that is limited, threads take their whole stacks, 8 MiB each
    threading.stack_size(1 << 20)
    zarr.config.set({"threading.max_workers": 1})
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1, 1])

    def loader() -> PartLoader:
        return PartLoader(PartDataset(FromArray(path), grid))

    # threads, groups and buffers come with the first step, of which nothing is kept
    model = tessel.nn.distribute_module(made(), grid)
    train(model, [next(iter(loader()))], 1)
    model.load_state_dict(made().state_dict())
    with limited(MAY_HOLD):
        with pytest.raises((MemoryError, RuntimeError)):
            _ = torch.ones(size, dtype=torch.uint8)  # half as large as a sample
        return train(model, loader())


@pytest.mark.slow
def test_a_sample_larger_than_a_worker_may_hold(tmp_path: Path) -> None:
    path = str(tmp_path / "volume.zarr")
    array = zarr.create_array(path, shape=VOLUMES, chunks=(1, 1, 32, 128, 128), dtype="f8")
    generator = np.random.default_rng(0)
    for sample in range(VOLUMES[0]):
        for begin in range(0, VOLUMES[2], 32):
            array[sample, 0, begin : begin + 32] = generator.normal(size=(32, *VOLUMES[3:]))
    sample_bytes = array.nbytes // VOLUMES[0]
    assert sample_bytes > 2 * MAY_HOLD
    samples = (torch.from_numpy(array[k : k + 1]) for k in (0, 1, 0, 1))
    expected = train(made(), samples, 1)
    with WorkerPool(timeout=100.0, threads=1) as pool:
        for losses in pool.run(train_in_parts, path, sample_bytes // 2, nprocs=WORKERS):
            assert losses == pytest.approx(expected, rel=1e-12) and len(losses) == 4
