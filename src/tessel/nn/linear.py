"""Linear layers over partitioned tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.layout import Cut, Layout, Shape
from tessel.core.partition import Partition
from tessel.core.windows import Groups
from tessel.nn.blocks import Weighted
from tessel.nn.layer import Result
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.rules.products import Contraction, linear_terms
from tessel.tensor.table import check_dtypes
from tessel.tensor.windowed import Windowed, shape_of
from tessel.transport import kept_in_job


class DistributedLinear(Weighted, torch.nn.Linear):
    """A linear map of the last dimension of a tensor over `P_x`: `torch.nn.Linear`.

    Forward:  y[…, o] = b[o] + Σ_i w[o, i] x[…, i].

    With `P_w`, a grid of (outputs, inputs), each of its workers stores one block of the weight; it
    gets the inputs of its block, and results are summed over the inputs. The grid may have axes for
    the leading dimensions of the tensor before these two; without them its workers see all rows.
    Without `P_w` the parameters are whole on all workers of `P_x`.

    Args:
        P_x: the partition of the tensor; its last axis splits the features.
        P_y: the partition of the result; None for `P_x`.
        P_w: the partition of the blocks of the weight, or None.
        in_features: the length of the last dimension, of the whole input.
        out_features: the same for the output.
        bias: whether to add a bias.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedLinear(P, P, P, 3, 2)(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None,
        P_w: Partition | None,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Parameters are placed once all partitions are known: torch's `__init__` is called
        # directly.
        self.P_y, self.P_w = P_y, P_w
        with self.refused_together(P_x):
            torch.nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self.place_with(P_x, P_y, P_w)

    def weight_shape(self) -> Shape:
        return self.out_features, self.in_features

    def multiply(self, x: Tensor, layout: Layout, weight: Tensor, bias: Tensor | None) -> Result:
        check_dtypes(x, weight, bias)
        shape = shape_of(F.linear, layout.shape, self.weight_shape())
        in_rows = self.P_w is None
        plan = _in_rows(layout, shape) if in_rows else self.on_grid(layout.shape, shape)
        return linear_terms(SpreadTensor(x, layout), weight, bias, plan), plan.terms


@kept_in_job
def _in_rows(source: Layout, shape: Shape) -> Contraction:
    """Every worker reads all features of its rows, and computes the outputs of its place."""
    target = source.resized(shape)
    features = Groups(1, source.shape[-1], shape[-1])  # a worker without outputs reads no features
    reads = Windowed(source, target, (*[None] * (len(shape) - 1), features)).read
    # A worker needs the rows of the weight for its outputs, and all of their columns.
    every = Cut.whole(source.shape[-1])
    rows = (shape[-1], source.shape[-1])
    weight = Layout(source.partition, rows, (target.cuts[-1], every), source.shared)
    return Contraction((reads, weight), target, target.summed)
