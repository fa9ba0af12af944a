"""Transposed convolutions over partitioned tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.core.layout import Layout, Shape
from tessel.nn.blocks import Weighted, WeightGrid
from tessel.nn.layer import Result
from tessel.tensor.rules.transposed import (
    TransposedSettings,
    convolve_parts,
    convolved,
    settings_of,
)
from tessel.tensor.windowed import outline, tuple_of

Numbers = tuple[int, ...]


class _ConvTranspose(Weighted):
    num_dims: int
    outputs_first = False
    kernel_size: Any
    stride: Any
    padding: Any
    output_padding: Any
    dilation: Any
    groups: int
    in_channels: int
    out_channels: int
    _output_padding: Any  # torch's own

    def whole_shapes(self) -> dict[str, Shape]:
        shapes = {"weight": self.settings().weight}
        return shapes if self.bias is None else {**shapes, "bias": (self.out_channels,)}

    def settings(self, output_padding: Numbers | None = None) -> TransposedSettings:
        """What this is, as a value."""
        kernel = tuple_of(self.kernel_size, self.num_dims)
        shape = (self.in_channels, self.out_channels // self.groups, *kernel)
        behind = self.output_padding if output_padding is None else output_padding
        return settings_of(shape, self.stride, self.padding, behind, self.groups, self.dilation)

    def multiply(
        self,
        x: Tensor,
        layout: Layout,
        weight: Tensor,
        bias: Tensor | None,
        output_size: Any = None,
    ) -> Result:
        """The result; `output_size` is that of the whole tensor, as torch takes it."""
        settings = self.settings(self._widths(layout, output_size))
        plan = None
        if self.P_w is not None:
            plan = self.on_grid(self.P_w, layout.shape, convolved(layout.shape, settings))
        return convolve_parts(x, layout, weight, bias, settings, plan)

    def _widths(self, layout: Layout, output_size: Any = None) -> Numbers:
        """How much longer than least the output is, which torch computes from `output_size`."""
        D = self.num_dims
        sizes = None if output_size is None else list(output_size)
        settings = (list(tuple_of(v, D)) for v in (self.stride, self.padding, self.kernel_size))
        dilation = list(tuple_of(self.dilation, D))
        # of an outline of the whole: sizes that torch rejects raise its error on every worker
        return tuple(self._output_padding(outline(layout.shape), sizes, *settings, D, dilation))

    def check_grid(self, grid: WeightGrid) -> None:
        if self.groups > 1:
            raise NotImplementedError(
                f"a transposed convolution with {self.groups} groups has no weight grid; "
                f"leave P_w out, got {grid.partition}"
            )


class DistributedConvTranspose1d(_ConvTranspose, torch.nn.ConvTranspose1d):
    """The transposed convolution of a tensor over `P_x`: `torch.nn.ConvTranspose1d`.

    Forward:  y[o, j] = b[o] + Σ w[c, o, t] x[c, i] over all c, i, t with s·i − p + d·t = j.

    Batch, channels and space may be split, in any mixture. `P_w` is a grid of workers that store
    blocks of the weight, as for a convolution: (outputs, inputs, *space), or batch before them.
    The layer may be called with an `output_size`, as torch's, which is that of the whole tensor.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        in_channels: of the whole input.
        out_channels: of the whole output.
        kernel_size: the size of the window.
        stride: how far apart windows are.
        padding: how much is cut off on both sides.
        output_padding: how much longer the output is behind.
        groups: how many groups of channels are convolved on their own.
        bias: whether to add one.
        dilation: the distance of the values of a window.
        padding_mode: "zeros".
        device: of the parameters.
        dtype: of the parameters.
        P_y: where the result shall lie, by default on `P_x`.
        P_w: where the blocks of the weight lie, if it is not whole on all workers.

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
