"""CUDA tensors in one process, and in several that share a GPU through Gloo."""

from __future__ import annotations

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


@pytest.mark.parametrize("nprocs", [2, 3])
def test_workers_that_share_a_gpu(nprocs: int) -> None:
    """Gloo carries CUDA tensors too, through the host."""
    tessel.launch(check_everything, nprocs, timeout=SECONDS)


def test_mixed_devices_raise_on_all() -> None:
    first, second = tessel.launch(mixed_devices, 2, timeout=SECONDS)
    assert first == second
    assert "cuda on worker 0, cpu on worker 1" in first
