"""Blocks: layers whose weight may itself be stored in blocks on a grid of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from tessel import transport
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.core.shared import equalize
from tessel.nn.layer import ComputingLayer, Layer, Result
from tessel.operators.parameters import StoredInParts
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.rules.products import Contraction
from tessel.tensor.tensor import layout_on, move
from tessel.transport import kept_in_job


@dataclass(frozen=True)
class WeightGrid:
    """The role of each axis of a grid of workers in a product of weights and inputs.

    Attributes:
        partition: the workers; each holds one block of the weight.
        lead: the axes that split the dimensions before the channels, or None for all of them.
        out: the axis that splits the outputs.
        into: the axis that splits the inputs, over which results are summed.
        space: the axes that split the dimensions after the channels.
    """

    partition: Partition
    lead: tuple[int | None, ...]
    out: int
    into: int
    space: tuple[int, ...]

    @classmethod
    def of(cls, partition: Partition, ndim: int, num_dims: int) -> WeightGrid:
        """The grid for tensors of `ndim` dimensions, of which the last `num_dims` are space."""
        lead = ndim - num_dims - 1
        extra = partition.dim - num_dims - 2
        if extra not in (0, lead):
            raise ValueError(
                f"expected a weight grid with axes for outputs, inputs and {num_dims} dimensions "
                f"of space, and before them {lead} axes or none for the leading dimensions of the "
                f"tensor, got {partition}"
            )
        leading = tuple(range(extra)) if extra else (None,) * lead
        space = tuple(range(extra + 2, partition.dim))
        return cls(partition, leading, extra, extra + 1, space)

    def weight(self, shape: Shape, axes: Sequence[int]) -> Layout:
        """The layout of a parameter whose first dimensions `axes` split; others share it."""
        shared = tuple(axis for axis in range(self.partition.dim) if axis not in axes)
        return _split(self.partition, shape, (*axes, *[None] * (len(shape) - len(axes))), shared)

    def product(self, x: Shape, weight: Layout, y: Shape) -> Contraction:
        """The layouts in which inputs are multiplied with the blocks of a weight.

        Args:
            x: the shape of the inputs, but in space that of the outputs.
            weight: the layout of the blocks.
            y: the shape of the outputs.
        """
        # No axis is shared: workers along `out` use the same inputs for other outputs, whose
        # gradients are summed; those along `into` have terms of the same outputs.
        inputs, terms = (
            _split(self.partition, shape, (*self.lead, axis, *self.space))
            for shape, axis in ((x, self.into), (y, self.out))
        )
        blocks = replace(weight, shared=())  # each worker uses its copy for its own outputs
        return Contraction((inputs, blocks), terms, terms.summed)


@kept_in_job
def _split(
    partition: Partition,
    shape: Shape,
    axes: tuple[int | None, ...],
    shared: tuple[int, ...] = (),
) -> Layout:
    return Layout.split(partition, shape, axes, shared)


class Weighted(StoredInParts, ComputingLayer):
    """A layer with a weight and a bias, whole on all workers or in blocks on a grid of them.

    Without `P_w` both are shared by all workers of `P_x`, and others store nothing. With it each
    worker of `P_w` stores the block of the weight for its outputs and inputs, and the bias of its
    outputs; `state_dict` collects and `load_state_dict` relocates them, in the whole form that
    torch's layer has.
    """

    P_y: Partition | None = None
    P_w: Partition | None = None
    weight: Tensor
    bias: Any  # a tensor or None; the types of torch.nn differ from layer to layer
    num_dims: int = 0
    groups: int = 1
    outputs_first = True  # whether the weight's first dimension is that of the outputs

    def __init__(
        self,
        P_x: Partition,
        *args: Any,
        P_y: Partition | None = None,
        P_w: Partition | None = None,
        **settings: Any,
    ) -> None:
        # not that of Layer, which would place the parameters before all partitions are known
        self.P_y, self.P_w = P_y, P_w
        with self.refused_together(P_x):
            super(Layer, self).__init__(*args, **settings)
        self.place_with(P_x, P_y, P_w)

    def check_grid(self, grid: WeightGrid) -> None:
        """Raise if the layer cannot work on a grid."""

    def weight_shape(self) -> Shape:
        """The shape of the weight as torch's own layer has it."""
        raise NotImplementedError(f"{type(self).__name__} must implement `weight_shape`")

    def whole_shapes(self) -> dict[str, Shape]:
        """The shapes of the parameters as torch's own layer has them."""
        weight = self.weight_shape()
        if self.bias is None:
            return {"weight": weight}
        return {
            "weight": weight,
            "bias": (weight[0] if self.outputs_first else weight[1] * self.groups,),
        }

    def place_with(self, P_x: Partition, P_y: Partition | None, P_w: Partition | None) -> None:
        """Place a layer, as torch made it, on its partitions."""
        self.P_y, self.P_w = P_y, P_w
        self.place_on(P_x)
        assert isinstance(self, torch.nn.Module)
        self.agree_on_form()
        if P_w is not None:
            self.check_grid(self._grid(P_x.dim))
        # Torch made all of them on each worker, from its own random numbers: the first one's count.
        equalize(self.parameters(recurse=False), P_w or P_x)
        # P_y may have workers that P_x has not: they store nothing
        if P_w is None and self.prepare().size == P_x.size:
            return  # all of them store the whole
        for name, layout in self._block_layouts().items():
            whole = getattr(self, name)
            block = layout.local_part(whole.detach()).clone()
            setattr(self, name, torch.nn.Parameter(block, requires_grad=whole.requires_grad))

    def _grid(self, ndim: int) -> WeightGrid:
        assert self.P_w is not None
        return WeightGrid.of(self.P_w, ndim, self.num_dims)

    def _block_layouts(self) -> dict[str, Layout]:
        """The layouts of the parameters."""
        if self.P_w is None:
            shapes = self.whole_shapes().items()
            return {name: Layout.whole(self.P_x, shape, shared=True) for name, shape in shapes}
        grid = self._grid(self.P_x.dim)
        both = (grid.out, grid.into) if self.outputs_first else (grid.into, grid.out)
        return {
            name: grid.weight(shape, both if name == "weight" else (grid.out,))
            for name, shape in self.whole_shapes().items()
        }

    def compute(self, x: Tensor, layout: Layout, *args: Any, **settings: Any) -> Result:
        """Compute where the parameters are stored, with the result on `P_y` or `P_x`."""
        weight, bias = self.weight, self.bias
        if self.P_w is not None:
            layouts = self._block_layouts()
            weight = SpreadTensor(weight, layouts["weight"])
            bias = None if bias is None else SpreadTensor(bias, layouts["bias"])
        y, lies = self.multiply(x, layout, weight, bias, *args, **settings)
        if self.P_w is None and self.P_y in (None, lies.partition):
            return y, lies
        target = layout_on(self.P_y or self.P_x, lies.shape)
        return move(lies, target).apply(y), target  # of terms of a sum this is the sum, too

    def multiply(
        self,
        x: Tensor,
        layout: Layout,
        weight: Tensor,
        bias: Tensor | None,
        *args: Any,
        **settings: Any,
    ) -> Result:
        """The result of the function that the layer's rule calls, possibly terms of a sum.

        Args:
            x: this worker's part of the input.
            layout: the layout of the input.
            weight: the weight, spread if it is stored in blocks, else whole on all workers.
            bias: the bias, likewise.
            args, settings: the other arguments of the call.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `multiply`")

    def on_grid(self, x: Shape, y: Shape) -> Contraction:
        """The layouts of input and output for products with the blocks of the weight on `P_w`."""
        # Windows are computed where their outputs are: space is that of the result.
        channel = len(y) - self.num_dims - 1
        inputs = (*y[:channel], x[channel], *y[channel + 1 :])
        return self._grid(len(y)).product(inputs, self._block_layouts()["weight"], y)

    def prepare(self) -> transport.Group:
        if self._group is None:
            # A move runs in the union of two partitions: all workers make these groups, too, first.
            for some, others in combinations(self.partitions(), 2):
                transport.group_of({*some.ranks, *others.ranks})
        return super().prepare()

    def partitions(self) -> Iterable[Partition]:
        return tuple(each for each in (self.P_x, self.P_y, self.P_w) if each is not None)

    def stored_parameters(self) -> Iterator[tuple[str, Layout]]:
        yield from self._block_layouts().items()

    def collected_on(self, layout: Layout) -> Partition:
        # All workers get all of it, so that any of them can write a file that torch's layer reads.
        return Partition(self.prepare().workers, (self.prepare().size,))
