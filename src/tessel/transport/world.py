"""The world: this process among the workers of its job, by `torch.distributed`."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tessel.joining import join_process_group
from tessel.limits import time_limit
from tessel.settings import warn_of_unknown, whole_number
from tessel.transport.launchers import check_world_of_one, find_job, meet, own_interface

CAN_BE_DISTRIBUTED = dist.is_available()  # torch may be built without it


def is_distributed() -> bool:
    """Whether this process belongs to a `torch.distributed` job."""
    return CAN_BE_DISTRIBUTED and dist.group.WORLD is not None


def this_worker() -> int:
    """The rank of this process among all workers of the job."""
    if torch.compiler.is_compiling():  # Dynamo does not see that there is no group
        return dist.get_rank() if CAN_BE_DISTRIBUTED and dist.is_initialized() else 0
    # Every call needs it several times: so from the group, as `dist.get_rank()` looks it up four
    # times.
    job = dist.group.WORLD if CAN_BE_DISTRIBUTED else None
    return 0 if job is None else job.rank()


def num_workers() -> int:
    """The number of workers of the job."""
    return dist.get_world_size() if is_distributed() else 1


def _has_place() -> bool:
    """Whether RANK and WORLD_SIZE give this process its place among the workers.

    Raises:
        ValueError: if they are left over from another program.
    """
    has_both = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if has_both:
        check_world_of_one(os.environ)
    return has_both


def launched_as() -> str | None:
    """The place of this process by the launcher's variables, in words; None for a world of one.

    Raises:
        ValueError: as `join` does.
    """
    if _has_place():
        rank, workers = os.environ["RANK"], os.environ["WORLD_SIZE"]
        return f"RANK and WORLD_SIZE: worker {rank} of {workers}"
    job = find_job(os.environ)
    return None if job is None else str(job)


def launched_task() -> tuple[int, int]:
    """The rank of this process and the number of workers, by its launcher before they meet."""
    if is_distributed():
        return this_worker(), num_workers()
    if _has_place():
        return whole_number("RANK", 0), whole_number("WORLD_SIZE", 1)
    job = find_job(os.environ)
    return (0, 1) if job is None else (job.rank, job.workers)


def join(backend: str | None = None) -> bool:
    """Join the job that the launcher's environment describes; return whether there was one.

    Args:
        backend: "gloo" or "nccl"; None for the one that fits the devices.

    Raises:
        ValueError: if the variables of srun or mpirun show that there are several tasks, but not
            how they meet.
        RuntimeError: if they do not meet.
    """
    if is_distributed():
        return False
    if not _has_place():
        job = find_job(os.environ)
        if job is not None:  # meet the other tasks that srun or mpirun has started
            store = meet(job, time_limit())
            # After they have met, set torchrun's variables: a second attempt must read the
            # launcher's.
            for name, value in job.variables.items():
                os.environ.setdefault(name, value)
            interface = own_interface(job)
            if interface is not None:  # Gloo and NCCL would use the address of the host's name
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            _places.clear()
            _places[_key()] = _LauncherStore(
                store, job.rank, job.workers, binds_gpus=job.binds_gpus
            )
    warn_of_unknown()
    if not _has_place():
        return False
    if backend is None:
        backend = "nccl" if _has_own_gpu() else "gloo"
    if backend == "nccl":
        device = whole_number("LOCAL_RANK", 0)
        torch.cuda.set_device(device % torch.cuda.device_count() if _binds_gpus() else device)
        backend = "cpu:gloo,cuda:nccl"  # workers also agree, by small tensors of the CPU
    key, limit = _key(), time_limit()
    if key not in _places:
        _places.clear()
        settings: dict[str, Any] = {} if limit is None else {"timeout": limit}
        _places[key] = _LauncherStore(*next(dist.rendezvous("env://", **settings)))
    place = _places[key]
    place.jobs += 1
    # The store of the launcher outlives a job: a worker that joins the next job early must find
    # neither the server of the last one as it ends, nor the addresses that it left there.
    store = dist.PrefixStore(f"tessel/{place.jobs}", place.store)
    join_process_group(backend, store, place.rank, place.workers)
    return True


@dataclass
class _LauncherStore:
    """The store in which workers of a launcher meet. A job may be joined and left several times."""

    store: Any
    rank: int
    workers: int
    jobs: int = 0
    binds_gpus: bool = False  # each worker sees only its own GPUs


_places: dict[tuple[str | None, ...], _LauncherStore] = {}  # by variables of the environment


def _key() -> tuple[str | None, ...]:
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    return tuple(os.environ.get(name) for name in names)


def _has_own_gpu() -> bool:
    """Whether each worker of this host can have its own GPU, which NCCL requires."""
    workers = whole_number("LOCAL_WORLD_SIZE", 1)
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if gpus and _binds_gpus():
        return True
    if 0 < gpus < workers:
        warnings.warn(
            f"{workers} workers on a host with {gpus} GPUs: their tensors are sent through memory "
            f"that workers share, not by NCCL; `tessel doctor` measures what this costs",
            stacklevel=5,
        )
    return gpus >= workers


def _binds_gpus() -> bool:
    """Whether the launcher shows each worker only GPUs that no other worker has."""
    place = _places.get(_key())
    return place is not None and place.binds_gpus
