"""Joining: the process group in which the workers of a job meet."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tessel.limits import time_limit


def join_process_group(backend: str, store: Any, rank: int, num_workers: int) -> None:
    """Make torch's process group of all workers; after an error the next attempt can succeed.

    Args:
        backend: "gloo", "nccl", or both with their devices.
        store: the store in which the workers find each other.
        rank: the rank of this worker.
        num_workers: how many workers there are.
    """
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=num_workers, timeout=time_limit()
        )
    except BaseException:
        # Torch numbers the groups of a process, and also counts one that was not made. If others
        # had made theirs, which then left it, the next one had different numbers on the workers,
        # each of which waited for the other ones under its own.
        if not dist.is_initialized():
            dist.distributed_c10d._world.group_count = 0
        raise
