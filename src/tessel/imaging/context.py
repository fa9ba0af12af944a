"""DistributedContext: the workers of an inverse problem, their devices, seeds and work."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.backends import cudnn

from tessel import transport
from tessel.core import Layout, Partition, agree, boxes, checksum_of, shared_whole, world
from tessel.errors import WorkerLost, check_choice
from tessel.settings import chosen, whole_number
from tessel.tensor import seeded

SHARDINGS = ("round_robin", "block")
DEVICE_MODES = (None, "cpu", "gpu")
BACKENDS = (None, "gloo", "nccl")
SHARED = -1  # in place of an item: for numbers that all workers draw together
OUTSIDE = (
    "the workers can be used only inside the context: write `with DistributedContext() as ctx:` "
    "around this"
)


class DistributedContext:
    """The workers of this job, this worker's device, and which items each worker has.

    Under `torchrun` or `tessel run` entering a context joins the job, and leaving it leaves the
    job: contexts may follow each other. A job that was already started, by `tessel.world()`, an
    outer context or `torch.distributed.init_process_group`, continues after the context. In a plain
    `python script.py` there is one worker. All workers enter and leave a context together, but one
    that raises inside does not wait for the others: its own traceback ends the job.

    Args:
        backend: "gloo" or "nccl"; None for the one that fits the devices.
        sharding: how items are assigned to workers, "round_robin" or "block".
        seed: the seed of torch's random numbers, the same on all workers: worker k draws from
            `seed + k`, so that workers draw different numbers. Draw numbers that must be equal in
            `shared_random()`. The numbers of item i, in a factory or for the noise of measurement
            i, depend only on the seed and on i, so that results do not depend on the number of
            workers; without a seed, on a number that worker 0 draws, and on i.
        device_mode: "cpu", "gpu", or None for a GPU if there is one; workers of a host with
            fewer GPUs share them, and a warning says so.
        debug: compare the workers' copies of shared values at each update of a signal and each
            input of an operator, and raise if they diverged. None: the environment variable
            TESSEL_DEBUG, 1 or 0.
        cleanup: leave the job on exit if this context joined it.
        seed_offset: False: all workers draw from `seed`, the same numbers.
        deterministic: let cuDNN compute in the same way each time, until the context is left.

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
        *,
        cleanup: bool = True,
        seed_offset: bool = True,
        deterministic: bool = False,
    ) -> None:
        for name, value, choices in (
            ("backend", backend, BACKENDS),
            ("device_mode", device_mode, DEVICE_MODES),
        ):
            if value not in choices:
                known = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        check_choice("sharding", sharding, SHARDINGS)
        self.backend = backend
        self.sharding = sharding
        self.seed = seed
        self.device_mode = device_mode
        self.debug = chosen("TESSEL_DEBUG", ("0", "1")) == "1" if debug is None else debug
        self.cleanup = cleanup
        self.seed_offset = seed_offset
        self.deterministic = deterministic
        self._exits: list[ExitStack] = []  # one for each time that it was entered
        self._partition: Partition | None = None
        self._known: tuple[int, int, bool, torch.device] | None = None
        self._shared_seed = 0
        self._num_shared = 0  # the number of `shared_random` blocks so far

    def __enter__(self) -> Self:
        with ExitStack() as exits:  # an error below also leaves the job
            # Only the context that joined the job leaves it: contexts may be nested, or in a
            # running job.
            joins = transport.start(self.backend)
            if joins and self.cleanup:
                exits.push(self._leave)
            if self.backend is not None and transport.is_distributed():
                running = str(dist.get_backend_config())
                if self.backend not in running:
                    raise ValueError(
                        f"backend {self.backend!r} was requested, but the job runs on {running!r}; "
                        f"pass backend=None to use it"
                    )
            self._partition = partition = world()
            device, problem = self._chosen_device()
            call = (
                f"DistributedContext(sharding={self.sharding!r}, seed={self.seed}, "
                f"seed_offset={self.seed_offset}, debug={self.debug}, "
                f"cleanup={self.cleanup}){problem}"
            )
            # Agreements exchange signed numbers of 64 bits; a seed is unsigned.
            _, told = agree(partition, call, numbers=[torch.initial_seed() % 2**63])
            if problem:
                raise ValueError(f"DistributedContext{problem}")
            self._shared_seed = told[0][0] if self.seed is None else self.seed
            self._num_shared = 0
            rank = partition.rank
            assert rank is not None
            self._known = rank, partition.size, transport.is_distributed(), device
            if self.seed is not None:
                torch.manual_seed(self.seed + (rank if self.seed_offset else 0))
            if self.deterministic:
                for name, value in (("benchmark", False), ("deterministic", True)):
                    exits.callback(setattr, cudnn, name, getattr(cudnn, name))
                    setattr(cudnn, name, value)
            self._exits.append(exits.pop_all())
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """Leave the job if this context joined it; after an error, without waiting for others."""
        self._exits.pop().__exit__(kind, *error)

    def _leave(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None:  # others may still wait for messages of this worker
                agree(self.partition, "the end of a DistributedContext")
        except WorkerLost:
            pass  # another worker failed, and reports it itself: there is nobody to wait for
        finally:
            self._partition = None
            transport.leave()

    @property
    def partition(self) -> Partition:
        """All workers, in a row."""
        if self._partition is None:
            raise RuntimeError(OUTSIDE)
        return self._partition

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self._entered[3]

    @property
    def rank(self) -> int:
        """The number of this worker, also after the context."""
        return self._entered[0]

    @property
    def world_size(self) -> int:
        """The number of workers, also after the context."""
        return self._entered[1]

    @property
    def is_dist(self) -> bool:
        """Whether this process belongs to a job of `torch.distributed`, even of one worker."""
        return self._entered[2]

    @property
    def _entered(self) -> tuple[int, int, bool, torch.device]:
        if self._known is None:
            raise RuntimeError(OUTSIDE)
        return self._known

    def local_indices(self, num_items: int) -> list[int]:
        """The items of this worker, out of `num_items`."""
        return local_indices(num_items, self.rank, self.world_size, self.sharding)

    def owner(self, item: int, num_items: int) -> int:
        """The worker that has an item."""
        return owner(item, num_items, self.world_size, self.sharding)

    def owners(self, num_items: int) -> list[int]:
        """The workers that have at least one item, in ascending order."""
        return sorted({self.owner(item, num_items) for item in range(num_items)})

    def seed_for(self, call: str) -> int:
        """The seed of the random numbers of items in a call, which all workers make together.

        It is the seed of the context. Without one it is a number that worker 0 draws from torch's
        generator: workers with equal seeds would draw the same numbers for different items.

        Args:
            call: a description, the same on all workers.
        """
        own = 0 if self.seed is not None else int(torch.randint(2**62, (), device="cpu"))
        _, told = agree(self.partition, call, numbers=[own])
        return self.seed if self.seed is not None else told[self.partition.ranks[0]][0]

    def drawing(
        self, item: int, call: int = 0, seed: int | None = None
    ) -> AbstractContextManager[None]:
        """Random numbers that depend on a seed and an item; without a seed, torch's own.

        Args:
            item: the item for which numbers are drawn.
            call: how often numbers were drawn for it before.
            seed: the result of `seed_for`; None for the seed of the context.
        """
        own = self.seed if seed is None else seed
        return nullcontext() if own is None else seeded(seed_of(own, item, call), self.device)

    @contextmanager
    def shared_random(self) -> Iterator[None]:
        """Let torch draw the same random numbers on all workers, which enter this together.

        The numbers depend on the seed and on how many such blocks came before, not on the number of
        workers. After the block each worker continues with its own numbers. Without a seed, that of
        worker 0's generator is used.

        >>> import torch
        >>> from tessel.imaging import DistributedContext
        >>> with DistributedContext(seed=42) as ctx, ctx.shared_random():
        ...     start = torch.rand(1, 3, 8, 8)
        """
        number, self._num_shared = self._num_shared, self._num_shared + 1
        agree(self.partition, f"shared_random, {number} times before")
        with seeded(seed_of(self._shared_seed, SHARED, number), self.device):
            yield

    def check_same(self, tensor: Tensor, layout: Layout, what: str) -> None:
        """Raise on every worker if workers that share a value hold different numbers."""
        if layout.partition.active and layout.partition.size > 1:
            found = _compared(layout, what, [tensor])
            if found is not None:
                worker, first = found
                raise ValueError(
                    f"{what}: workers have diverged: worker {worker} has other values than worker "
                    f"{first}, where one shared value is expected; compute it in the same way on "
                    f"all workers, or use the value of one worker: update_(data, source={first})"
                )

    def check_same_state(self, tensors: Sequence[Tensor], what: str) -> None:
        """Raise on every worker if their copies of shared tensors differ.

        Args:
            tensors: parameters and buffers, in the same order on all workers.
            what: the owner of the tensors, for errors.
        """
        if self.world_size == 1:
            return
        kinds = [(tuple(each.shape), each.dtype) for each in tensors]
        found = _compared(shared_whole(self.partition, ()), f"{what} with {kinds}", tensors)
        if found is not None:
            raise ValueError(
                f"{what} has different parameters on worker {found[0]} and on worker {found[1]}, "
                "but all workers must hold the same: load one state on all of them, or create it "
                "inside `with ctx.shared_random():`, where all draw the same numbers"
            )

    def _chosen_device(self) -> tuple[torch.device, str]:
        """The device of this worker, and what is wrong with it."""
        if self.device_mode == "cpu":
            return torch.device("cpu"), ""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            asks = self.device_mode == "gpu"
            problem = ": device_mode 'gpu' was requested, but this host has 0 GPUs"
            return torch.device("cpu"), problem if asks else ""
        if (own := transport.own_gpu()) is not None:
            return torch.device("cuda", own), ""
        here, place = whole_number("LOCAL_WORLD_SIZE", 1), whole_number("LOCAL_RANK", 0)
        if gpus < here and place == 0:
            warnings.warn(
                f"DistributedContext: {here} workers of this host share {gpus} GPUs, each uses GPU "
                f"local_rank % {gpus}; pass device_mode='cpu' to use none, or start as many "
                "workers as there are GPUs",
                stacklevel=3,
            )
        return torch.device("cuda", place % gpus), ""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the context itself: a copy, such as one of a module, stays among its workers."""
        return self

    def __repr__(self) -> str:
        where = "outside" if self._partition is None else f"worker {self.rank} of {self.world_size}"
        return f"DistributedContext({where}, sharding={self.sharding!r}, seed={self.seed})"


def _compared(layout: Layout, what: str, tensors: Iterable[Tensor]) -> tuple[int, int] | None:
    """The result of `drifted` for the checksums of tensors that workers of a layout share."""
    call = f"the comparison of {what}"
    _, told = agree(layout.partition, call, numbers=[checksum_of(tensors)])
    return drifted(layout, {worker: numbers[0] for worker, numbers in told.items()})


def drifted(layout: Layout, sums: Mapping[int, int]) -> tuple[int, int] | None:
    """The first worker whose checksum differs from that of the first holder of its part.

    Args:
        layout: the layout of the tensors.
        sums: the checksum of each worker.

    Returns:
        The worker and the first holder; None if there is no such worker.
    """
    if len(set(sums.values())) == 1:
        return None
    for worker, own in sums.items():
        coordinates = layout.partition.coordinates(worker)
        if coordinates is not None:
            first = layout.holders(coordinates)[0]
            if own != sums[first]:
                return worker, first
    return None


def local_indices(num_items: int, worker: int, workers: int, sharding: str) -> list[int]:
    """The items of one worker, in ascending order.

    round_robin:  {i : i mod P = k}.    block:  the k-th of P runs, of lengths that differ by ≤ 1.

    Args:
        num_items: the number of items, 0 or more.
        worker: the rank k of the worker.
        workers: the number P of workers.
        sharding: "round_robin" or "block".

    >>> local_indices(5, 0, 2, "round_robin"), local_indices(5, 0, 2, "block")
    ([0, 2, 4], [0, 1, 2])
    """
    check_choice("sharding", sharding, SHARDINGS)
    if num_items < 0:
        raise ValueError(f"the number of items must be 0 or more, got {num_items}")
    if not 0 <= worker < workers:
        raise ValueError(f"expected a worker from 0 to {workers - 1}, got {worker}")
    if sharding == "round_robin":
        return list(range(worker, num_items, workers))
    return list(range(*boxes.balanced_part(num_items, workers, worker)))


def owner(item: int, num_items: int, workers: int, sharding: str) -> int:
    """The rank of the worker that has an item, the inverse of `local_indices`.

    >>> owner(2, 5, 2, "round_robin"), owner(3, 5, 2, "block")
    (0, 1)
    """
    check_choice("sharding", sharding, SHARDINGS)
    if not 0 <= item < num_items:
        raise ValueError(f"expected an item from 0 to {num_items - 1}, got {item}")
    if sharding == "round_robin":
        return item % workers
    return boxes.balanced_place(num_items, workers, item)


def seed_of(seed: int, item: int, call: int = 0) -> int:
    """One seed for an item, and for each time that numbers are drawn for it.

    >>> seed_of(42, 0) == seed_of(42, 0), seed_of(42, 0) == seed_of(42, 1)
    (True, False)
    """
    # Two checksums of 32 bits, since seeds of torch have 64. A sum of the numbers would give
    # adjacent seeds and items the same generator.
    words = repr((seed, item, call)).encode()
    return zlib.crc32(words) << 32 | zlib.adler32(words)
