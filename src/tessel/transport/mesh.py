"""Meshes: workers on a grid as `torch.distributed` knows them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tessel.transport.job import kept_in_job
from tessel.transport.world import is_distributed


@kept_in_job
def mesh_of(
    workers: tuple[int, ...],
    shape: tuple[int, ...],
    device_type: str | None,
    names: tuple[str, ...] | None,
) -> Any:
    """The `DeviceMesh` of these workers; made by all workers of the job together the first time."""
    if not is_distributed():
        raise RuntimeError(
            "a DeviceMesh needs a process group, and this world of one has none; start the script "
            "with `tessel run -n 1`, or call torch.distributed.init_process_group first"
        )
    from torch.distributed.device_mesh import DeviceMesh

    if device_type is None:
        device_type = "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"
    grid = torch.tensor(workers, dtype=torch.int, device="cpu").reshape(shape)
    return DeviceMesh(device_type, grid, mesh_dim_names=names)
