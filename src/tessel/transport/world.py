"""The world: this process among the workers of its job, by `torch.distributed`."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tessel.joining import join_process_group
from tessel.limits import time_limit
from tessel.settings import warn_of_unknown, whole_number
from tessel.transport.launchers import (
    check_world_of_one,
    find_job,
    find_launcher,
    meet,
    other_place,
    own_interface,
)

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

    Without a MASTER_ADDR they do so only where no launcher is known, by which tasks can meet. An
    empty variable counts as none: scripts set `RANK=$OMPI_COMM_WORLD_RANK` under any mpirun.

    Raises:
        ValueError: if they are left over from another program.
    """
    if not (os.environ.get("RANK") and os.environ.get("WORLD_SIZE")):
        return False
    check_world_of_one(os.environ)
    return bool(os.environ.get("MASTER_ADDR")) or find_launcher(os.environ) is None


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
                os.environ[name] = os.environ.get(name) or value
            interface = own_interface(job)
            if interface is not None:  # Gloo and NCCL would use the address of the host's name
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            _places.clear()
            _places[_key()] = _LauncherStore(store, job.rank, job.workers)
    warn_of_unknown()
    if not _has_place():
        return False
    key, limit = _key(), time_limit()
    if key not in _places:
        _places.clear()
        settings: dict[str, Any] = {} if limit is None else {"timeout": limit}
        try:
            _places[key] = _LauncherStore(*next(dist.rendezvous("env://", **settings)))
        except dist.DistError as error:
            if problem := other_place(os.environ):
                raise RuntimeError(f"{str(error).strip().rstrip('.')}. {problem}") from error
            raise
    place = _places[key]
    place.jobs += 1
    # The store of the launcher outlives a job: a worker that joins the next job early must find
    # neither the server of the last one as it ends, nor the addresses that it left there.
    store = dist.PrefixStore(f"tessel/{place.jobs}", place.store)
    global _gpu
    _gpu = _own_gpu(store, place) if backend in (None, "nccl") else None
    if backend is None:
        backend = "gloo" if _gpu is None else "nccl"
    if backend == "nccl":
        torch.cuda.set_device(whole_number("LOCAL_RANK", 0) if _gpu is None else _gpu)
        backend = "cpu:gloo,cuda:nccl"  # workers also agree, by small tensors of the CPU
    join_process_group(backend, store, place.rank, place.workers)
    return True


@dataclass
class _LauncherStore:
    """The store in which workers of a launcher meet. A job may be joined and left several times."""

    store: Any
    rank: int
    workers: int
    jobs: int = 0


_places: dict[tuple[str | None, ...], _LauncherStore] = {}  # by variables of the environment


def _key() -> tuple[str | None, ...]:
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    return tuple(os.environ.get(name) for name in names)


_gpu: int | None = None  # what `_own_gpu` gave when the job was joined


def own_gpu() -> int | None:
    """The number of the GPU of this worker alone; None if the job was joined without one each."""
    return _gpu if is_distributed() else None


def _own_gpu(store: Any, place: _LauncherStore) -> int | None:
    """The number of a GPU that no other worker of the job takes; None unless each worker has one.

    NCCL requires one for each worker. All workers get the same answer, by what worker 0 concludes
    from the GPUs that each of them sees.
    """
    local_rank, seen = whole_number("LOCAL_RANK", 0), _gpus_seen()
    store.set(f"gpus/{place.rank}", json.dumps([local_rank, *seen]))
    if place.rank == 0:
        told = store.multi_get([f"gpus/{rank}" for rank in range(place.workers)])
        everyones = [(number, tuple(gpus)) for number, *gpus in map(json.loads, told)]
        store.set("gpu of each", json.dumps(shared_out(everyones)))
    numbers, problem = json.loads(store.get("gpu of each"))
    if problem and seen:
        warnings.warn(
            f"{problem}: tensors of workers are sent through memory that they share, or by way of "
            f"the CPU, not by NCCL; `tessel doctor` measures what this costs",
            stacklevel=5,
        )
    return numbers[place.rank] if numbers else None


def _gpus_seen() -> tuple[str, ...]:
    """The GPUs that this process sees, in the order of their numbers, by what identifies them."""
    if not dist.is_nccl_available():
        return ()
    numbers = range(torch.cuda.device_count())
    return tuple(str(torch.cuda.get_device_properties(number).uuid) for number in numbers)


def shared_out(workers: Sequence[tuple[int, tuple[str, ...]]]) -> tuple[list[int], str]:
    """The GPU that each worker takes, by its number among those that the worker sees.

    Of the workers that see the same GPUs, the first takes the first of them, and so on. Launchers,
    and scripts that set CUDA_VISIBLE_DEVICES, may show each worker another one as its number 0.

    Args:
        workers: the local rank of each worker, and the GPUs that it sees.

    Returns:
        The numbers, and nothing; or no numbers, and why not each worker can have its own.

    >>> from tessel.transport.world import shared_out
    >>> shared_out([(0, ("a", "b")), (1, ("a", "b"))])
    ([0, 1], '')
    >>> shared_out([(0, ("a",)), (1, ("b",))])
    ([0, 0], '')
    >>> shared_out([(0, ("a",)), (1, ("a",))])
    ([], '2 workers see the same 1 GPU')
    """
    numbers, alike = [0] * len(workers), Counter(gpus for _, gpus in workers)
    next_number: Counter[tuple[str, ...]] = Counter()
    for worker in sorted(range(len(workers)), key=lambda worker: (workers[worker][0], worker)):
        _, gpus = workers[worker]
        numbers[worker] = next_number[gpus]
        next_number[gpus] += 1
    for gpus, count in alike.items():
        if not gpus:
            return [], "" if len(alike) == 1 else f"{count} of {len(workers)} workers see no GPU"
        if count > len(gpus):
            plural = "s" * (len(gpus) > 1)
            return [], f"{count} workers see the same {len(gpus)} GPU{plural}"
    taken = Counter(gpus[k] for k, (_, gpus) in zip(numbers, workers, strict=True))
    twice = [str(k) for k, (_, gpus) in enumerate(workers) if taken[gpus[numbers[k]]] > 1]
    if twice:
        return [], f"workers {', '.join(twice)} see other GPUs each, but not one for each of them"
    return numbers, ""
