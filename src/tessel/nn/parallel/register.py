"""A module that registers tensors as shards."""

from __future__ import annotations

import torch
from torch import Tensor

from tessel.core.context import is_compiling
from tessel.core.graph import in_graphs
from tessel.core.handles import HasHandle
from tessel.core.partition import Partition
from tessel.distributed.group import row_of
from tessel.distributed.shards import Sharding, as_shard, registered, sharding_of
from tessel.nn.layer import Layer


class RegisterParallelDim(HasHandle, torch.nn.Module):
    """Declare that tensors are shards along a dimension, or that they are whole.

    Forward:  y = x, with another sharding; `x` itself keeps its own.

    Args:
        dim: the dimension that is split over the workers; None if tensors are whole.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> x = torch.ones(3)
    >>> tessel.distributed.get_parallel_dim(x)
    >>> x = tessel.nn.RegisterParallelDim(dim=0)(x)
    >>> tessel.distributed.get_parallel_dim(x)
    0
    """

    def __init__(self, dim: int | None = None, *, partition: Partition | None = None) -> None:
        super().__init__()
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise ValueError(f"RegisterParallelDim: dim must be None or an integer, got {dim!r}")
        self.dim = dim
        self.partition = row_of(partition)

    _derived = HasHandle._derived | {"_traces", "_given_kind", "_last"}
    # of the last call: its dim, the number of dimensions of its tensor, and the resulting sharding
    _last: tuple[int | None, int, Sharding] | None = None
    gives_kinds = True
    can_be_traced = Layer.can_be_traced

    @in_graphs()
    def forward(self, input: Tensor) -> Tensor:
        is_plain = type(input) is Tensor and not is_compiling()
        if is_plain and self._last is not None:
            dim, ndim, sharding = self._last
            if (dim, ndim) == (self.dim, input.ndim) and sharding.partition is self.partition:
                return as_shard(input, sharding)
        found = registered(input, self.dim, self.partition, "RegisterParallelDim")
        if is_plain and (known := sharding_of(found)):
            self._last = self.dim, input.ndim, known
        return found

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
