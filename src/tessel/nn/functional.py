"""Parallel layers as functions, which get the shards of the parameters from their caller."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.context import is_compiling
from tessel.core.partition import Partition
from tessel.distributed.group import row_of
from tessel.distributed.shards import Sharding, check_known, state_of, traced_state
from tessel.nn.layer import refuse_wrapped
from tessel.nn.parallel.agreed import agree_on_spread
from tessel.nn.parallel.cross_entropy import parallel_cross_entropy
from tessel.nn.parallel.embedding import parallel_embedding
from tessel.nn.parallel.linear import multiply_shards, name_of_product
from tessel.tensor import Tensor as SpreadTensor

__all__ = [
    "cross_entropy_loss",
    "parallel_cross_entropy",
    "parallel_cross_entropy_loss",
    "parallel_embedding",
    "parallel_linear",
    "parallellinear",
]


def parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dim: int | None = None,
    partition: Partition | None = None,
) -> Tensor:
    """Apply a linear map to the last dimension, with a weight whose shards the workers pass.

    Forward:  y[…, o] = b[o] + Σ_i w[o, i] x[…, i].

    Args:
        input: the input, whole on all workers; for `dim=0` possibly a shard along the last
            dimension.
        weight: this worker's shard of the weight (outputs, inputs): balanced parts of the outputs
            for `dim=1` and `-1`, of the inputs for `dim=0`; the whole weight for `dim=None`.
        bias: the bias of this worker's outputs; for `dim=0` the whole bias, the same on all.
        dim: the dimension that is split, as in `tessel.nn.ParallelLinear`; None for torch's own
            function.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> tessel.nn.functional.parallel_linear(torch.ones(2, 3), torch.ones(4, 3), dim=0)
    tensor([[3., 3., 3., 3.],
            [3., 3., 3., 3.]])
    """
    refuse_wrapped(input, "parallel_linear")
    if isinstance(input, SpreadTensor):  # F.linear has a rule for it, which supports shards
        if dim is not None:
            agree_on_spread(row_of(partition), name_of_product(bias, dim))
        return F.linear(input, weight, bias)
    if dim is not None:
        return multiply_shards(input, weight, bias, dim, partition)
    # also by autograd's graph, except in a compiler, which cannot access it
    state = state_of(weight) if is_compiling() else traced_state(weight)
    check_known(state, "the weight of parallel_linear(dim=None)")
    # for a shard torch's own function would compute something else
    if isinstance(state, Sharding) and state.partition.size > 1:
        raise ValueError(
            f"parallel_linear(dim=None) needs the whole weight, but this is {state}; pass "
            f"dim={0 if state.dim else -1}, which says how it is split"
        )
    return F.linear(input, weight, bias)


# other names of the same functions, for programs that were written for torchshard
parallellinear = parallel_linear
cross_entropy_loss = parallel_cross_entropy_loss = parallel_cross_entropy
