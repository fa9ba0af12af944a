"""Linear layers over partitioned tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.core.shared import anchored_zeros
from tessel.core.windows import Groups
from tessel.nn.blocks import Weighted
from tessel.nn.layer import Result
from tessel.tensor.windowed import Windowed, outline
from tessel.transport import kept_in_job


class DistributedLinear(Weighted, torch.nn.Linear):
    """The linear map of the last dimension of a tensor over `P_x`: `torch.nn.Linear`.

    Forward:  y[…, o] = b[o] + Σ_i w[o, i] x[…, i].

    With `P_w`, a grid of (outputs, inputs), each of its workers stores one block of the weight; it
    gets the inputs of its block, and results are summed over the inputs. The grid may have axes for
    the leading dimensions of the tensor before these two; without them its workers see all rows.
    Without `P_w` the parameters are whole on all workers of `P_x`.

    Args:
        P_x: where the tensor lies; its last axis splits the features.
        P_y: where the result shall lie; None for `P_x`.
        P_w: where the blocks of the weight lie, or None.
        in_features: the length of the last dimension, of the whole input.
        out_features: the same of the output.
        bias: whether to add one.
        device: of the parameters.
        dtype: of the parameters.

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
        torch.nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self.place_with(P_x, P_y, P_w)

    def whole_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {"weight": (self.out_features, self.in_features)}
        return shapes if self.bias is None else {**shapes, "bias": (self.out_features,)}

    def compute(self, x: Tensor, layout: Layout) -> Result:
        self.check_dtype(x)
        shape = _shape(layout.shape, self.whole_shapes()["weight"])
        grid = self.weight_grid(len(shape))
        weight, bias = self.use_parameters(layout)
        if grid is None:
            target = layout.resized(shape)
            plan = _gathering(layout, target)
        else:
            target = grid.split(shape, grid.out)
            plan = _reading(layout, grid.split(layout.shape, grid.into))
        y = plan.fetch(x)
        if target.partition.active:
            y = self._multiply(y, weight, bias, target)
        else:
            y = anchored_zeros((0,), y, weight, bias)
        return self.onto_P_y(y, target)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Layout) -> Tensor:
        box = target.box()
        assert box is not None
        rows = slice(*box[-1])
        if self.P_w is None and target.local_shape[-1] < self.out_features:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        if 0 in x.shape or 0 in weight.shape:
            y = anchored_zeros(target.local_shape, x, weight, bias)
            return y if bias is None else y + bias
        return F.linear(x, weight, bias)


@lru_cache(maxsize=1024)
def _shape(shape: Shape, weight: Shape) -> Shape:
    return tuple(F.linear(outline(shape), outline(weight)).shape)


@kept_in_job
def _reading(source: Layout, target: Layout) -> Windowed:
    return Windowed(source, target, (None,) * len(source.shape))


@kept_in_job
def _gathering(source: Layout, target: Layout) -> Windowed:
    """Every worker reads all features of its rows."""
    return Windowed(
        source,
        target,
        (*[None] * (len(source.shape) - 1), Groups(1, source.shape[-1], target.shape[-1])),
    )
