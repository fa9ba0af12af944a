"""Samplers: the samples of each batch, the same on all workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from operator import index as as_int
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler

from tessel.core import boxes
from tessel.core.agreement import tell
from tessel.core.partition import Partition, world
from tessel.state.raising import together
from tessel.tensor.shared_random import common_number


class PartSampler(Sampler[list[int]]):
    """The samples of which this worker reads its box, batch by batch: a batch sampler.

    All workers iterate over the same batches in the same order, for any state of their random
    generators. Workers along `batch_axis` of the grid take their balanced shares of each batch, and
    all others the same. All workers of the job make a sampler, and iterate over it, together.

    Each iteration is an epoch, and shuffles again. `state_dict` has the position in the epoch, in
    samples: it is the same on all workers, and the epoch can continue on another number of them.

    Args:
        length: the number of samples.
        partition: the grid.
        batch_size: the number of samples in a batch, over all workers.
        shuffle: whether each epoch has a new random order.
        sampler: a sampler of torch that returns the order of an epoch; that of the first worker is
            used.
        seed: the seed of random orders, the same on all workers; None for a number that the first
            draws.
        drop_last: whether to drop a last batch with fewer samples.
        batch_axis: the axis that splits batches; None if all workers have a part of each sample.

    >>> import tessel
    >>> sampler = tessel.data.PartSampler(5, tessel.world(), batch_size=2)
    >>> list(sampler), len(sampler)
    ([[0, 1], [2, 3], [4]], 3)
    """

    def __init__(
        self,
        length: int,
        partition: Partition,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        batch_axis: int | None = 0,
    ) -> None:
        with together("PartSampler") as facts:
            # also of numpy or torch: an order follows from how these numbers are written
            seed = None if seed is None else as_int(seed)
            given = (length, partition, batch_size, shuffle, sampler is None, seed, drop_last)
            facts.append(repr((*given, batch_axis)))
            if shuffle and sampler is not None:
                raise ValueError("shuffle=True cannot be combined with a sampler")
            if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
                raise ValueError(
                    f"a DistributedSampler gives each of {sampler.num_replicas} processes its "
                    "share of the samples, but here all workers read all samples, each its part "
                    "of each batch; pass shuffle=True and seed= instead of the sampler"
                )
            are_numbers = isinstance(batch_size, int) and isinstance(length, int)
            if not are_numbers or batch_size < 1 or length < 0:
                raise ValueError(
                    "expected an integer batch_size of at least 1 and a length of at least 0, "
                    f"got {batch_size} and {length}"
                )
        self.length, self.partition, self.batch_size = length, partition, batch_size
        self.shuffle, self.sampler, self.drop_last = shuffle, sampler, drop_last
        self.batch_axis = batch_axis
        self.seed = common_number(world()) if seed is None else seed
        self.epoch = 0
        # In samples, not in batches: a resumed epoch may have another batch size, or other workers.
        self._taken = 0
        self._resumes = False
        self._order: list[int] | None = None  # of this epoch, from the sampler

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        length = self.length
        if self.sampler is not None:
            length = len(self.sampler)  # type: ignore[arg-type]
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning."""
        self.epoch, self._taken, self._resumes = as_int(epoch), 0, False
        self._order = None

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, after the last batch."""
        state = {"seed": self.seed, "epoch": self.epoch, "taken": self._taken}
        form = {"length": self.length, "shuffle": self.shuffle}
        return {**state, **form, "order": None if self._order is None else list(self._order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration resume where `state_dict` was called; all workers must do so."""
        with together("PartSampler.load_state_dict"):  # others would wait for the first batch
            self._check_state(state)
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._taken, self._order, self._resumes = state["taken"], state["order"], True

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raise unless this sampler can continue from a state."""
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ValueError(
                f"PartSampler: expected what state_dict() returns, but there is no {missing[0]!r}"
            )
        for name in ("length", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"PartSampler: the state was saved with {name} {state[name]}, but this "
                    f"sampler has {getattr(self, name)}"
                )
        has_order, has_sampler = state["order"] is not None, self.sampler is not None
        if has_order > has_sampler or (has_sampler > has_order and state["taken"]):
            saved, here = ("with", "without") if has_order else ("without", "with")
            raise ValueError(
                f"PartSampler: the state was saved in an epoch {saved} sampler=, but this sampler "
                f"was created {here} it, and would continue in a different order"
            )

    def batches(self) -> Iterator[list[int]]:
        """The rest of this epoch, or the next one, as whole batches, the same on all workers."""
        if not self._resumes and self._taken:  # the last iteration was not completed
            self.set_epoch(self.epoch + 1)
        self._resumes = False
        with together("the beginning of an epoch of tessel.data") as facts:
            facts.append(f"seed {self.seed}, epoch {self.epoch} from sample {self._taken} on")
        if self.sampler is not None:
            if self._order is None:  # not in a resumed epoch
                everyone = world()
                with together("the sampler of tessel.data"):  # others would wait for the order
                    own = [*map(as_int, self.sampler)] if everyone.rank == 0 else []
                    outside = [index for index in own if not 0 <= index < self.length]
                    if outside:
                        raise IndexError(f"there are {self.length} samples, got {outside[0]}")
                self._order = tell(everyone, own)[0]
            order = torch.tensor(self._order, dtype=torch.int64, device="cpu")
        elif self.shuffle:
            # By the seed and the epoch: no order has to be sent, or to be remembered.
            generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
            order = torch.randperm(self.length, generator=generator, device="cpu")
        else:
            order = torch.arange(self.length, device="cpu")
        last = len(order) - self.batch_size if self.drop_last else len(order) - 1
        return (
            order[start : start + self.batch_size].tolist()
            for start in range(self._taken, last + 1, self.batch_size)
        )

    def local(self, batch: list[int]) -> list[int]:
        """The samples of a batch of which this worker has a part."""
        index = self.partition.index
        if index is None:
            return []
        if self.batch_axis is None:
            return batch
        parts, place = self.partition.shape[self.batch_axis], index[self.batch_axis]
        return batch[slice(*boxes.balanced_part(len(batch), parts, place))]

    def advance(self, batch: list[int]) -> None:
        """Record that a batch was returned."""
        self._taken += len(batch)

    def finish(self) -> None:
        """Note that the epoch is over."""
        self.set_epoch(self.epoch + 1)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches():
            self.advance(batch)
            yield self.local(batch)
        self.finish()


def mixed(*numbers: int) -> int:
    """A seed from several numbers, very different for other numbers."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "big")
