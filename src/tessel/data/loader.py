"""Loaders: batches of spread tensors, of which each worker has read its box ahead of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import repeat, tee
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from tessel.data.dataset import PartDataset
from tessel.data.sampler import PartSampler, mixed
from tessel.state.raising import kind_of, together
from tessel.tensor import Tensor

SampleParts = list[torch.Tensor]
Outcome = Callable[[], SampleParts | None]


class Request(NamedTuple):
    """The samples of a batch that a worker reads, and the seeds of their transforms."""

    indices: list[int]
    seeds: list[int]


class PartLoader:
    """Batches of a `PartDataset` as spread tensors, in the structure of its sources.

    A batch is that of one process: `batch_size` counts the samples of all workers. Along the first
    axis of the grid each worker reads its share of the samples, along the others its box of each.
    `x.local` is this worker's part, for layers that take parts.

    All workers make a loader, and iterate over it, together. If one cannot read its part, or finds
    another shape or dtype in its file, all of them raise.

    Args:
        dataset: a `PartDataset`.
        batch_size, shuffle, sampler, seed, drop_last: see `PartSampler`.
        num_workers: the number of processes that read for this worker, by torch's `DataLoader`; 0
            for a thread.
        prefetch_factor: the number of batches that are read ahead, by each process if there are
            any; with a thread, 0 for none. Each takes the memory of this worker's part.
        pin_memory: whether to read into pinned memory, from which copies to a GPU are asynchronous.
        device: the device of the parts; None for the CPU.
        multiprocessing_context: how processes are started, as in torch's `DataLoader`.

    >>> import numpy, tessel
    >>> source = tessel.data.FromArray(numpy.arange(10.0).reshape(5, 2))
    >>> grid = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> loader = tessel.data.PartLoader(tessel.data.PartDataset(source, grid), batch_size=2)
    >>> [float(x.sum()) for x in loader]
    [6.0, 22.0, 17.0]
    """

    def __init__(
        self,
        dataset: PartDataset,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch_factor: int = 1,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        with together("PartLoader") as facts:
            length, axis = len(dataset), dataset.batch_axis
            shapes = [each.identity for each in dataset.layouts(0)] if length else []
            facts.append(f"{length} samples of {dataset.dtypes} in {shapes} on {kind_of(device)}")
            if num_workers < 0 or prefetch_factor < (num_workers > 0):
                raise ValueError(
                    "num_workers and prefetch_factor must be at least 0, and processes must read "
                    f"at least one batch ahead, got {num_workers} and {prefetch_factor}"
                )
            if multiprocessing_context is not None and not num_workers:
                raise ValueError("multiprocessing_context requires num_workers of at least 1")
            if pin_memory and not torch.accelerator.is_available():
                raise ValueError("pin_memory=True requires a GPU, and this worker has none")
        self.dataset = dataset
        self.sampler = PartSampler(
            length,
            dataset.partition,
            batch_size,
            shuffle=shuffle,
            sampler=sampler,
            seed=seed,
            drop_last=drop_last,
            batch_axis=axis,
        )
        self._processes, self._ahead, self._pins = num_workers, prefetch_factor, pin_memory
        self._device, self._context = device, multiprocessing_context
        self._reader = _RequestReader(dataset)
        self._index = torch.accelerator.current_device_index() if pin_memory else 0

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch; each iteration is the next one by itself."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, after the last batch; the same on all workers."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration resume there, also on another number of workers."""
        self.sampler.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        # Requests are ahead of the batches by the number of prefetched ones.
        batches, copies = tee(self.sampler.batches())
        seed, epoch = self.sampler.seed, self.sampler.epoch
        requests = (
            Request(own, [mixed(seed, epoch, index) for index in own])
            for own in map(self.sampler.local, copies)
        )
        with closing(self._outcomes(requests)) as outcomes:
            # batches first: the outcomes of processes do not end
            for batch, outcome in zip(batches, outcomes, strict=False):
                with together(f"tessel.data: samples {batch} of epoch {self.epoch}") as facts:
                    layouts = self.dataset.batch_layouts(batch)
                    facts.append(repr([each.shape for each in layouts]))
                    kinds = zip(layouts, self.dataset.dtypes, strict=True)
                    parts = outcome() or [torch.empty(a.local_shape, dtype=b) for a, b in kinds]
                    if self._device is not None:  # there may be too little memory
                        parts = [each.to(self._device, non_blocking=True) for each in parts]
                found = [Tensor(*each) for each in zip(parts, layouts, strict=True)]
                self.sampler.advance(batch)
                yield self.dataset._formed(found)
        self.sampler.finish()

    def _outcomes(self, requests: Iterator[Request]) -> Generator[Outcome, None, None]:
        """For each batch a function for its parts, by processes, a thread, or directly."""

        def by_processes() -> Iterator[SampleParts | None]:
            yield from DataLoader(
                self._reader,
                batch_size=None,
                sampler=requests,
                num_workers=self._processes,
                prefetch_factor=self._ahead,
                pin_memory=self._pins,
                multiprocessing_context=self._context,
                generator=torch.Generator(),  # and not a number of the user's
            )

        if self._processes:
            # They start with the first batch, where an error is reported to all.
            yield from repeat(partial(next, by_processes()))
        if not self._ahead:
            yield from (partial(self._read, request) for request in requests)
            return
        # a thread has its own current device, the first one, on which pinning would start CUDA
        use = partial(torch.accelerator.set_device_index, self._index)
        executor = ThreadPoolExecutor(1, "tessel.data", use if self._pins else None)
        ahead: deque[Future[SampleParts | None]] = deque()
        try:
            for request in requests:
                ahead.append(executor.submit(self._read, request))
                if len(ahead) > self._ahead:
                    yield ahead.popleft().result
            while ahead:
                yield ahead.popleft().result
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def _read(self, request: Request) -> SampleParts | None:
        parts = self._reader[request]
        return [each.pin_memory() for each in parts] if parts and self._pins else parts


class _RequestReader(Dataset[Any]):
    """Reads this worker's part of a batch; None if it has none of the samples."""

    def __init__(self, dataset: PartDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, request: Request) -> SampleParts | None:
        if not request.indices:
            return None
        samples = [self._dataset.read(*each) for each in zip(*request, strict=True)]
        return self._dataset.collected(samples)
