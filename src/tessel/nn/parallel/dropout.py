"""Random numbers of a group of workers: the same on whole tensors, independent on shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessel import boxes
from tessel.agreement import Claim, Meeting, Terms, reach_together, same
from tessel.distributed.group import row_of
from tessel.distributed.marks import Mark, State, check_known, describe, traced_state
from tessel.graph import eagerly
from tessel.layout import Shape
from tessel.nn.parallel.words import Words, WordsMeeting
from tessel.partition import Partition
from tessel.tensor import Tensor as SpreadTensor
from tessel.transport import kept_in_job

SEEDS = 2**63 - 1
STEP = -7046029254386353131  # 2⁶⁴ over the golden ratio, as a signed number
ROUNDS = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))  # of splitmix64


class ParallelDropout(torch.nn.Dropout):
    """Set some elements to zero at random: `torch.nn.Dropout` on whole tensors and on shards.

    Forward:  y[i] = x[i] · m[i] / (1 − p), where m[i] is 0 with probability p and else 1.

    m is one mask of the whole tensor: all workers have the same on a tensor that is whole on each,
    and on a shard each has its part of it. It depends on the seed of the first worker and on the
    global index only, and so the result is the same for any number of workers, and that on shards
    is the shard of that on the whole tensor. Each call takes one number of torch's generator on
    each worker, so that equal generators stay equal; checkpoints compute the same again.

    Args:
        p: the probability of zero.
        inplace: whether to change the input.
        partition: the workers that share whole tensors; None for the default group.

    >>> import tessel, torch
    >>> layer = tessel.nn.ParallelDropout(0.5)
    >>> sorted(layer(torch.ones(100)).unique().tolist())
    [0.0, 2.0]
    """

    def __init__(
        self, p: float = 0.5, inplace: bool = False, *, partition: Partition | None = None
    ) -> None:
        super().__init__(p, inplace)
        self.partition = row_of(partition)

    @eagerly
    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or isinstance(input, SpreadTensor):
            return super().forward(input)
        state = traced_state(input)
        row = state.partition if isinstance(state, Mark) else self.partition
        if not row.active:
            return input.clone()
        whole, seed = _agree(_Call(row, f"ParallelDropout({self.extra_repr()})", state), input)
        mask = _mask(seed, whole, whole.starts[row.rank or 0], input, self.p)
        return input.mul_(mask) if self.inplace else input * mask


@contextmanager
def random_stream(split: bool, partition: Partition | None = None) -> Iterator[None]:
    """Let torch draw inside of the `with` block from a stream of the whole group.

    For random functions of torch on shards (`split=True`: the streams of the workers are
    independent) and on whole tensors (`split=False`: all workers draw the same). Both depend on
    the seed of the first worker. Afterwards the generators are where they were, but for one
    number that entering takes on each worker.

    Args:
        split: whether each worker has a stream of its own.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> with tessel.nn.random_stream(split=True):
    ...     y = torch.nn.functional.dropout(torch.ones(3), 0.5)
    """
    row = row_of(partition)
    if not row.active:
        yield
        return
    name = f"random_stream(split={split!r})"
    _, seed = _agree(_Call(row, name, None), torch.empty(0))
    if split:
        seed = _scrambled(seed, 1 + (row.rank or 0))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(list(devices)):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class _Call:
    """What workers must have in common when they draw."""

    partition: Partition
    name: str
    state: State

    @property
    def label(self) -> str:
        return f"{self.name} over {self.partition}, where the input is {describe(self.state)}"

    def conclude(self, shapes: dict[int, Shape], terms: Terms) -> _Whole:
        check_known(self.state, self.label)
        ranks = self.partition.ranks
        if not isinstance(self.state, Mark):
            shape: Shape = same(shapes, "shape", self.label)
            return _Whole(shape, 0, (0,) * len(ranks))
        dim, size = self.state.dim, self.state.size
        others = {worker: shape[:dim] + shape[dim + 1 :] for worker, shape in shapes.items()}
        same(others, f"shape (but for dim {dim})", self.label)
        intervals = boxes.consecutive(shapes[worker][dim] for worker in ranks)
        if size is not None and intervals != boxes.balanced(size, len(ranks)):
            lengths = [stop - start for start, stop in intervals]
            raise ValueError(
                f"{self.label}: shards of balanced lengths were expected, of {size} in all, got "
                f"lengths {lengths} on workers {list(ranks)}"
            )
        first = shapes[ranks[0]]
        whole = (*first[:dim], intervals[-1][1], *first[dim + 1 :])
        return _Whole(whole, dim, tuple(start for start, _ in intervals))


@dataclass(frozen=True)
class _Whole:
    """The whole shape, and where each worker's part begins along one dimension."""

    shape: Shape
    dim: int
    starts: tuple[int, ...]


def _agree(call: _Call, x: Tensor) -> tuple[_Whole, int]:
    """What the tensor is as a whole, and a seed: that of the first worker, others drew theirs."""
    drawn = int(torch.randint(SEEDS, (), dtype=torch.int64, device="cpu"))
    group = call.partition.group
    whole, words = reach_together(_meetings(call), (Claim.of(x), Words.saying(drawn)))
    group.number_call()
    return whole, int(words[group.workers.index(call.partition.ranks[0]), 0])


@kept_in_job
def _meetings(call: _Call) -> tuple[Meeting[Any], ...]:
    group = call.partition.group
    meeting = Meeting(group, call.label, call.partition.ranks, call.conclude)
    return meeting, WordsMeeting.of(group, call.label)


def _mask(seed: int, whole: _Whole, start: int, x: Tensor, p: float) -> Tensor:
    """1 / (1 − p) where an element stays, else 0; of the kind of `x`, which begins at `start`."""
    if p == 1:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    stays = _numbers(seed, whole, start, tuple(x.shape), x.device) >= int(p * 2.0**63)
    return stays.to(x.dtype).mul_(1 / (1 - p))


def _numbers(seed: int, whole: _Whole, start: int, shape: Shape, device: torch.device) -> Tensor:
    """A random number below 2⁶³ for each element, by the seed and its global index alone."""
    index = torch.ones((1,) * len(shape), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        first = start if dim == whole.dim else 0
        along = torch.arange(first, first + shape[dim], device=device) * stride
        index = index + along.view(-1, *(1 for _ in shape[dim + 1 :]))
        stride *= whole.shape[dim]
    mixed = (index * STEP).add_(seed)
    for shift, factor in ROUNDS:
        mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        mixed *= factor
    return mixed.bitwise_and_(SEEDS)


def _scrambled(seed: int, number: int) -> int:
    """Another seed for each number."""
    return int(_numbers(seed, _Whole((1,), 0, (0,)), number, (1,), torch.device("cpu")))
