"""Transposed convolutions over partitioned tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tessel.core.layout import Layout
from tessel.nn.blocks import WeightGrid
from tessel.nn.convolution import ConvolutionLayer
from tessel.nn.layer import Result
from tessel.tensor.rules import transposed
from tessel.tensor.rules.transposed import TransposedSettings
from tessel.tensor.windowed import outline, tuple_of


class _ConvTranspose(ConvolutionLayer):
    outputs_first = False
    output_padding: Any
    _output_padding: Any  # torch's own

    @cached_property
    def settings(self) -> TransposedSettings:
        kernel = tuple_of(self.kernel_size, self.num_dims)
        shape = (self.in_channels, self.out_channels // self.groups, *kernel)
        sizes = self.stride, self.padding, self.output_padding
        return transposed.settings_of(shape, *sizes, self.groups, self.dilation)

    def multiply(
        self,
        x: Tensor,
        layout: Layout,
        weight: Tensor,
        bias: Tensor | None,
        output_size: Any = None,
    ) -> Result:
        """The result; `output_size` is that of the whole tensor, in torch's form."""
        settings = self.settings
        if output_size is not None:
            D = self.num_dims
            lists = map(list, (settings.stride, settings.padding, settings.weight[2:]))
            sizes = list(output_size), *lists, D, list(settings.dilation)
            # how much longer than least the output is, which torch computes of an outline of the
            # whole: sizes that it rejects raise its error on every worker
            behind = self._output_padding(outline(layout.shape), *sizes)
            settings = replace(settings, output_padding=tuple(behind))
        plan = None
        if self.P_w is not None:
            plan = self.on_grid(layout.shape, transposed.convolved(layout.shape, settings))
        return transposed.convolve_parts(x, layout, weight, bias, settings, plan)

    def check_grid(self, grid: WeightGrid) -> None:
        if self.groups > 1:
            raise NotImplementedError(
                f"a transposed convolution with {self.groups} groups does not support a weight "
                f"grid; leave out P_w, got {grid.partition}"
            )


class DistributedConvTranspose1d(_ConvTranspose, torch.nn.ConvTranspose1d):
    """The transposed convolution of a tensor over `P_x`: `torch.nn.ConvTranspose1d`.

    Forward:  y[o, j] = b[o] + Σ w[c, o, t] x[c, i] over all c, i, t with s·i − p + d·t = j.

    Batch, channels and space may be split, in any combination. `P_w` is a grid of workers that
    store blocks of the weight, as for a convolution: (outputs, inputs, *space), or with batch
    before them. Like torch's layer, it may be called with an `output_size`, that of the whole
    tensor.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        in_channels, out_channels, kernel_size, stride, groups, bias, dilation, device, dtype: see
            `DistributedConv1d`.
        padding: the number of outputs that are cut off on both sides.
        output_padding: the number of outputs that are added at the end.
        padding_mode: "zeros".
        P_y, P_w: the partitions of the result and of blocks of the weight, see `DistributedConv1d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> layer = tessel.nn.DistributedConvTranspose1d(P, 3, 2, kernel_size=2, stride=2)
    >>> layer(torch.ones(1, 3, 4)).shape
    torch.Size([1, 2, 8])
    """

    num_dims = 1


class DistributedConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d):
    """The transposed convolution of a tensor over `P_x`: `torch.nn.ConvTranspose2d`.

    As `DistributedConvTranspose1d`, along two dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> layer = tessel.nn.DistributedConvTranspose2d(P, 3, 2, kernel_size=2, stride=2)
    >>> layer(torch.ones(1, 3, 4, 4)).shape
    torch.Size([1, 2, 8, 8])
    """

    num_dims = 2


class DistributedConvTranspose3d(_ConvTranspose, torch.nn.ConvTranspose3d):
    """The transposed convolution of a tensor over `P_x`: `torch.nn.ConvTranspose3d`.

    As `DistributedConvTranspose1d`, along three dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> layer = tessel.nn.DistributedConvTranspose3d(P, 3, 2, kernel_size=2, stride=2)
    >>> layer(torch.ones(1, 3, 4, 4, 4)).shape
    torch.Size([1, 2, 8, 8, 8])
    """

    num_dims = 3
