"""Convolutions over partitioned tensors."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tessel.core.layout import Layout, Shape
from tessel.nn.blocks import Weighted, WeightGrid
from tessel.nn.layer import Result
from tessel.tensor import Tensor as SpreadTensor
from tessel.tensor.rules import convolution
from tessel.tensor.table import opened
from tessel.tensor.windowed import Numbers


class ConvolutionLayer(Weighted):
    """A convolution of any number of dimensions."""

    num_dims: int
    kernel_size: Numbers
    stride: Numbers
    padding: Any
    padding_mode: Any
    dilation: Numbers
    groups: int
    _conv_forward: Any  # torch's own
    in_channels: int
    out_channels: int

    @cached_property
    def settings(self) -> Any:
        """The settings of the convolution as a value, from torch's attributes."""
        inputs = self.in_channels // self.groups
        shape = (self.out_channels, inputs, *self.kernel_size)
        sizes = self.stride, self.padding, self.dilation
        return convolution.settings_of(shape, *sizes, self.groups, self.padding_mode)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch's layers read their attributes in each call: one that changes counts from then on
        self.__dict__.pop("settings", None)
        super().__setattr__(name, value)

    def weight_shape(self) -> Shape:
        shape: Shape = self.settings.weight
        return shape

    def multiply(self, x: Tensor, layout: Layout, weight: Tensor, bias: Tensor | None) -> Result:
        if type(self)._conv_forward.__module__ != "torch.nn.modules.conv":  # a user's: call it
            if self.P_w is not None:
                raise NotImplementedError(
                    f"{type(self).__name__} has its own _conv_forward, which would get a block of "
                    f"the weight; leave P_w out, got {self.P_w}"
                )
            return opened(self.torch_forward(SpreadTensor(x, layout)))
        settings, plan = self.settings, None
        if self.P_w is not None:
            plan = self.on_grid(layout.shape, convolution.convolved(layout.shape, settings))
        return convolution.convolve_parts(x, layout, weight, bias, settings, plan)

    def check_grid(self, grid: WeightGrid) -> None:
        """Blocks of the weight must hold whole groups of outputs, and all of their inputs."""
        if self.groups == 1:
            return
        # torch's function needs whole groups of outputs, each with all of its inputs
        size = self.out_channels // self.groups
        parts = grid.weight((self.out_channels,), (grid.out,)).cuts[0].intervals
        split = grid.partition.shape[grid.into] > 1
        if split or any(start % size or stop % size for start, stop in parts):
            raise NotImplementedError(
                f"a grouped convolution on {grid.partition} needs whole groups in each block of "
                f"its weight: {self.groups} groups of {size} outputs lie in parts {parts}, and "
                f"inputs on {grid.partition.shape[grid.into]} workers; leave P_w out"
            )


class DistributedConv1d(ConvolutionLayer, torch.nn.Conv1d):
    """The convolution of a tensor that is spread over `P_x`: `torch.nn.Conv1d`.

    Forward:  y[o, i] = b[o] + Σ_c Σ_t w[o, c, t] x[c, s·i − p + d·t].

    Batch, channels and space may be split, in any combination. Each worker fetches what its outputs
    read and computes them; parameters are whole on all workers. With `P_w`, a grid of (outputs,
    inputs, *space) or (batch, outputs, inputs, *space), each of its workers stores one block of the
    weight, and results are summed over the inputs.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        in_channels: the number of channels of the whole input.
        out_channels: the number of channels of the whole output.
        kernel_size: the size of the window.
        stride: the distance between windows.
        padding: the width of the padding on both sides; or "same" or "valid".
        dilation: the distance between the values of a window.
        groups: the number of groups of channels that are convolved independently.
        bias: whether to add a bias.
        padding_mode: "zeros", "reflect", "replicate" or "circular", around the whole tensor.
        device: the device of the parameters.
        dtype: the dtype of the parameters.
        P_y: the partition of the result, by default `P_x`.
        P_w: the partition of the blocks of the weight, if it is not whole on all workers.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> layer = tessel.nn.DistributedConv1d(P, 3, 2, kernel_size=3, padding=1)
    >>> layer(torch.ones(1, 3, 4)).shape
    torch.Size([1, 2, 4])
    """

    num_dims = 1


class DistributedConv2d(ConvolutionLayer, torch.nn.Conv2d):
    """The convolution of a tensor that is spread over `P_x`: `torch.nn.Conv2d`.

    As `DistributedConv1d`, along two dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> layer = tessel.nn.DistributedConv2d(P, 3, 2, kernel_size=3, padding=1)
    >>> layer(torch.ones(1, 3, 4, 4)).shape
    torch.Size([1, 2, 4, 4])
    """

    num_dims = 2


class DistributedConv3d(ConvolutionLayer, torch.nn.Conv3d):
    """The convolution of a tensor that is spread over `P_x`: `torch.nn.Conv3d`.

    As `DistributedConv1d`, along three dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> layer = tessel.nn.DistributedConv3d(P, 3, 2, kernel_size=3, padding=1)
    >>> layer(torch.ones(1, 3, 4, 4, 4)).shape
    torch.Size([1, 2, 4, 4, 4])
    """

    num_dims = 3
