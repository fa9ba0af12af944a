"""DistributedContext: the workers of an inverse problem, and who does what."""

from __future__ import annotations

import atexit
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from tessel import transport
from tessel.imaging import sharding as shardings
from tessel.imaging.random import drawing
from tessel.layout import Layout
from tessel.limits import time_limit
from tessel.partition import Partition, world
from tessel.transport import code_of

DEVICE_MODES = (None, "cpu", "gpu")
BACKENDS = (None, "gloo", "nccl")


class DistributedContext:
    """The workers of this job, this worker's device, and which items each worker has.

    Under `torchrun` or `tessel run` entering the first context joins the job, which a process
    leaves when it ends: contexts may follow each other. In a plain `python script.py` there is one
    worker. A worker that raises inside waits for nobody on its way out: its own traceback ends the
    job.

    Args:
        backend: "gloo" or "nccl"; None for what fits the devices.
        sharding: how items are given to workers, "round_robin" or "block".
        seed: of torch's random numbers, the same on all workers. What is drawn for item i, in a
            factory or for the noise of measurement i, depends on the seed and on i alone, so that
            results do not depend on the number of workers.
        device_mode: "cpu", "gpu", or None for a GPU where each worker of the host can have one.
        debug: compare, at each update of a signal and each input of an operator, what the workers
            hold of one shared value, and raise where they drifted apart. None: what the
            environment variable TESSEL_DEBUG says, 1 or 0.

    >>> from tessel.imaging import DistributedContext
    >>> with DistributedContext(seed=42) as ctx:
    ...     ctx.rank, ctx.world_size, ctx.is_dist, ctx.local_indices(3)
    (0, 1, False, [0, 1, 2])
    """

    def __init__(
        self,
        backend: str | None = None,
        sharding: str = "round_robin",
        seed: int | None = None,
        device_mode: str | None = None,
        debug: bool | None = None,
    ) -> None:
        _check_choice("backend", backend, BACKENDS)
        _check_choice("device_mode", device_mode, DEVICE_MODES)
        shardings.check_sharding(sharding)
        self.backend = backend
        self.sharding = sharding
        self.seed = seed
        self.device_mode = device_mode
        self.debug = os.environ.get("TESSEL_DEBUG", "0") == "1" if debug is None else debug
        self._partition: Partition | None = None
        self._device: torch.device | None = None

    def __enter__(self) -> Self:
        self._join()
        self._partition = world()
        self._device = self._chosen_device()
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for nobody: neither at a normal end nor on the way of an error."""

    @property
    def partition(self) -> Partition:
        """All workers, in a row."""
        if self._partition is None:
            raise RuntimeError(
                "the workers are known inside of the context: "
                "write `with DistributedContext() as ctx:` around this"
            )
        return self._partition

    @property
    def device(self) -> torch.device:
        """Where this worker computes."""
        self.partition  # noqa: B018  (raises outside of the context)
        assert self._device is not None
        return self._device

    @property
    def rank(self) -> int:
        """The number of this worker."""
        rank = self.partition.rank
        assert rank is not None
        return rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.partition.size

    @property
    def is_dist(self) -> bool:
        """Whether there are several workers."""
        return self.world_size > 1

    def local_indices(self, num_items: int) -> list[int]:
        """The items of this worker, of so many."""
        return shardings.local_indices(num_items, self.rank, self.world_size, self.sharding)

    def owner(self, item: int, num_items: int) -> int:
        """The worker that has an item."""
        return shardings.owner(item, num_items, self.world_size, self.sharding)

    def owners(self, num_items: int) -> list[int]:
        """The workers that have at least one item, in ascending order."""
        return sorted({self.owner(item, num_items) for item in range(num_items)})

    @contextmanager
    def drawing(self, item: int, call: int = 0) -> Iterator[None]:
        """Random numbers that depend on the seed and an item; without a seed, torch's own.

        Args:
            item: for which numbers are drawn.
            call: how often they were drawn for it before.
        """
        if self.seed is None:
            yield
            return
        with drawing(self.seed, item, call, self.device):
            yield

    def check_same(self, tensor: Tensor, layout: Layout, what: str) -> None:
        """Raise on every worker if those that share a value hold different numbers of it."""
        partition = layout.partition
        if not partition.active or partition.size == 1:
            return
        call = f"the comparison of {what}"
        group = partition.group
        everyones = group.share_words([code_of(call), _checksum(tensor)])
        group.check_same_call(everyones, call)
        words = memoryview(everyones).cast("q")[1 :: transport.NUM_WORDS].tolist()
        sums = dict(zip(group.workers, words, strict=True))
        for worker in group.workers:
            coordinates = partition.coordinates(worker)
            assert coordinates is not None
            first = min(layout.holders(coordinates))
            if sums[worker] != sums[first]:
                raise ValueError(
                    f"{what}: workers drifted apart: worker {worker} holds other numbers than "
                    f"worker {first}, where one shared value is needed; compute it in the same "
                    f"way on all workers, or take that of one: update_(data, source=0)"
                )

    def _join(self) -> None:
        if self.backend is None or transport.is_distributed():
            transport.start()
        elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if self.backend == "nccl":
                torch.cuda.set_device(_local_rank())
            dist.init_process_group(_joint(self.backend), timeout=time_limit())
            atexit.register(transport.leave)  # a process that ends with open groups aborts
        if self.backend is not None and transport.is_distributed():
            running = str(dist.get_backend_config())
            if self.backend not in running:
                raise ValueError(
                    f"backend {self.backend!r} was asked for, and the job runs on {running!r}; "
                    f"pass backend=None to take what runs"
                )

    def _chosen_device(self) -> torch.device:
        if self.device_mode == "cpu":
            return torch.device("cpu")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device_mode == "gpu" and not gpus:
            raise ValueError("device_mode 'gpu' was asked for, and this host has 0 GPUs")
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size)))
        if self.device_mode is None and gpus < here:
            return torch.device("cpu")
        return torch.device("cuda", _local_rank() % gpus)

    def __repr__(self) -> str:
        where = "outside" if self._partition is None else f"worker {self.rank} of {self.world_size}"
        return f"DistributedContext({where}, sharding={self.sharding!r}, seed={self.seed})"


def _joint(backend: str) -> str:
    """NCCL moves tensors of GPUs only, and workers also agree by small ones of the CPU."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _check_choice(what: str, value: str | None, choices: Sequence[str | None]) -> None:
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
