"""Random numbers of a group of workers: the same on whole tensors, independent on shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from tessel.core.agreement import agree_and_tell, same
from tessel.core.graph import eagerly
from tessel.core.layout import Shape
from tessel.core.partition import Partition
from tessel.distributed.group import row_of
from tessel.distributed.movements import layout_of_parts
from tessel.distributed.shards import Sharding, State, check_known, describe, traced_state
from tessel.tensor import Tensor as SpreadTensor

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
        row = state.partition if isinstance(state, Sharding) else self.partition
        if not row.active:
            return input.clone()
        whole, seed = _agree(row, f"ParallelDropout({self.extra_repr()})", state, input)
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
    _, seed = _agree(row, f"random_stream(split={split!r})", None, torch.empty(0))
    if split:
        # another seed for each worker: the number that belongs to it by the first one
        number, one = 1 + (row.rank or 0), _Whole((1,), 0, (0,))
        seed = int(_numbers(seed, one, number, (1,), torch.device("cpu")))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(list(devices)):
        torch.manual_seed(seed)
        yield


class _Whole(NamedTuple):
    """The whole shape, and where each worker's part begins along one dimension."""

    shape: Shape
    dim: int
    starts: tuple[int, ...]


def _agree(row: Partition, name: str, state: State, x: Tensor) -> tuple[_Whole, int]:
    """What the tensor is as a whole, and a seed: that of the first worker, others drew theirs."""
    drawn = int(torch.randint(SEEDS, (), dtype=torch.int64, device="cpu"))
    label = f"{name} over {row}, where the input is {describe(state)}"
    [(shapes, _)], seeds = agree_and_tell(row, label, [("the input", x)], [drawn])
    check_known(state, label)
    (seed,) = seeds[row.ranks[0]]
    if not isinstance(state, Sharding):
        shape: Shape = same(shapes, "shape", label)
        return _Whole(shape, 0, (0,) * row.size), seed
    layout = layout_of_parts(row, shapes, state.dim, state.size, label)
    starts = tuple(start for start, _ in layout.cuts[state.dim].intervals)
    return _Whole(layout.shape, state.dim, starts), seed


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
