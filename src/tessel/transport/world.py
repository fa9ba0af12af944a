"""The job of this process, as `torch.distributed` knows it."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist

from tessel.limits import time_limit


def is_distributed() -> bool:
    """Whether this process belongs to a `torch.distributed` job."""
    return dist.is_available() and dist.is_initialized()


def this_worker() -> int:
    """The number of this process among all workers of the job."""
    return dist.get_rank() if is_distributed() else 0


def num_workers() -> int:
    """The number of workers of the job."""
    return dist.get_world_size() if is_distributed() else 1


def join() -> bool:
    """Join the job that the launcher's environment describes; whether there was one to join."""
    if is_distributed() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    backend = "gloo"
    if _has_own_gpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=time_limit())
    return True


def _has_own_gpu() -> bool:
    """Whether each worker of this host can have a GPU, which NCCL does not let two share."""
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if 0 < gpus < workers:
        warnings.warn(
            f"{workers} workers on a host with {gpus} GPUs: tensors move over Gloo, not NCCL",
            stacklevel=5,
        )
    return gpus >= workers
