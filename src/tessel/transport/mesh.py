"""Meshes: workers on a grid as `torch.distributed` knows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tessel.transport.group import NUM_WORDS, code_of
from tessel.transport.job import group_of, kept_in_job
from tessel.transport.world import is_distributed, num_workers


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


def rows_of_meshes(mesh: Any) -> list[tuple[int, ...]]:
    """The workers of the meshes that all workers of the job have: of one, or of its rows.

    Raises:
        TypeError: on all workers, if one of them has no mesh.
    """
    everyone, call = group_of(range(num_workers())), "Partition.from_mesh"
    words = np.frombuffer(everyone.share_words([code_of(call)]), np.int64)
    everyone.check_same_call(words[::NUM_WORDS], call)
    numbers = getattr(mesh, "mesh", None)
    own = tuple(numbers.flatten().tolist()) if isinstance(numbers, torch.Tensor) else repr(mesh)
    said = everyone.share_objects(own)
    for worker, each in zip(everyone.workers, said, strict=True):
        if not isinstance(each, tuple):
            raise TypeError(
                f"from_mesh: expected a torch.distributed.DeviceMesh, got {each} on worker {worker}"
            )
    return sorted({*said})
