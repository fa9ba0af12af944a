"""Random numbers of a group of workers: the same on whole tensors, independent on shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tessel.core.agreement import TensorMeta, agree, grad_alike, same
from tessel.core.graph import NO_DRAWING_IN_GRAPHS, eagerly
from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.distributed.group import row_of
from tessel.distributed.shards import Sharding, State, check_known, describe, traced_state
from tessel.primitives.shard_layouts import layout_of_parts
from tessel.tensor.counter_random import bits, places
from tessel.tensor.shared_random import seeded
from tessel.tensor.tensor import is_spread

SEEDS = 2**63 - 1  # the greatest int64, up to which torch draws whole numbers


class ParallelDropout(torch.nn.Dropout):
    """Set some elements to zero at random: `torch.nn.Dropout` on whole tensors and on shards.

    Forward:  y[i] = x[i] · m[i] / (1 − p), where m[i] is 0 with probability p and otherwise 1.

    m is one mask of the whole tensor: all workers have the same for a tensor that is whole on each,
    and for a shard each has its part of it. It depends only on the seed of the first worker and on
    the global index. So the result is the same for any number of workers, and that for shards is
    the shard of that for the whole tensor. Each call draws one number from torch's generator on
    each worker, so that equal generators stay equal; checkpoints recompute the same.

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

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or is_spread(input):
            return super().forward(input)
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=f"ParallelDropout: {NO_DRAWING_IN_GRAPHS}")
        return self._dropped(input)

    @eagerly
    def _dropped(self, input: Tensor) -> Tensor:
        state = traced_state(input)
        row = state.partition if isinstance(state, Sharding) else self.partition
        if not row.active:
            return input.clone()
        name = f"ParallelDropout({self.extra_repr()})"
        if self.inplace and input.is_leaf and input.requires_grad and torch.is_grad_enabled():
            name += " of a leaf that needs a gradient"  # which torch refuses, where it is one
        layout, seed, meta = _agree(row, name, state, input)
        # of 63 random bits each: the bound for p = 1, 2**63, is no int64 any more
        kept = bits(seed, places(layout, input.device), 0) >= min(int(self.p * 2.0**63), SEEDS)
        mask = kept.to(input.dtype).mul_(1 / (1 - self.p) if self.p < 1 else 0.0)
        return grad_alike(input.mul_(mask) if self.inplace else input * mask, meta)


@contextmanager
def random_stream(split: bool, partition: Partition | None = None) -> Iterator[None]:
    """Make torch draw random numbers in the `with` block from a stream of the whole group.

    Use it for random functions of torch on shards (`split=True`: the streams of the workers are
    independent) and on whole tensors (`split=False`: all workers draw the same). Both depend on the
    seed of the first worker. Afterwards the generators are restored, except for one number that is
    drawn on entry on each worker.

    Args:
        split: whether each worker has its own stream.
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
    _, seed, _ = _agree(row, f"random_stream(split={split!r})", None, torch.empty(0))
    if split:
        seed = int(bits(seed, torch.tensor(row.rank or 0), 0))  # another one for each worker
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with seeded(seed, *(torch.device("cuda", k) for k in range(count))):
        yield


def _agree(row: Partition, name: str, state: State, x: Tensor) -> tuple[Layout, int, TensorMeta]:
    """The layout of the whole tensor, a seed, and the metadata of the tensor.

    The seed is that of the first worker; the others' are not used.
    """
    # All draw, though only the first one's number is used: equal generators stay equal.
    drawn = int(torch.randint(SEEDS, (), dtype=torch.int64, device="cpu"))
    label = f"{name} over {row}, where the input is {describe(state)}"
    [(shapes, meta)], seeds = agree(row, label, x, names=["the input"], numbers=[drawn])
    check_known(state, label)
    (seed,) = seeds[row.ranks[0]]
    if isinstance(state, Sharding):
        return layout_of_parts(row, shapes, state.dim, state.size, label), seed, meta
    return Layout.whole(row, same(shapes, "shape", label), shared=True), seed, meta
