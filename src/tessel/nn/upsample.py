"""Upsampling over partitioned tensors."""

from __future__ import annotations

import torch

from tessel.nn.layer import Layer


class DistributedUpsample(Layer, torch.nn.Upsample):
    """Resample a tensor that is spread over `P_x`: `torch.nn.Upsample`.

    Forward:  y[i] = Σ_t w_t(i) · x[index_t(i)] along each dimension after the first two.

    Each worker fetches only the inputs that its outputs read. The output is on the same partition,
    in balanced parts.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        size: the lengths of the output.
        scale_factor: or the ratio of the lengths of output and input.
        mode: nearest, nearest-exact, linear, bilinear, bicubic, trilinear or area.
        align_corners: whether the first and last values of input and output are at the same
            positions.
        recompute_scale_factor: whether to compute the scale from the lengths instead of using
            `scale_factor`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedUpsample(P, scale_factor=2)(torch.tensor([[[1.0, 2.0]]]))
    tensor([[[1., 1., 2., 2.]]])
    """


class DistributedUpsamplingNearest2d(DistributedUpsample, torch.nn.UpsamplingNearest2d):
    """Nearest-neighbour upsampling of a tensor over `P_x`: `torch.nn.UpsamplingNearest2d`.

    Forward:  y[i] = x[⌊i·n/m⌋] along each of the last 2 dimensions.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        size: the lengths m of the output.
        scale_factor: or the ratio of the lengths of output and input.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedUpsamplingNearest2d(P, scale_factor=2)(torch.ones(1, 1, 3, 4)).shape
    torch.Size([1, 1, 6, 8])
    """


class DistributedUpsamplingBilinear2d(DistributedUpsample, torch.nn.UpsamplingBilinear2d):
    """Bilinear upsampling of a tensor over `P_x`: `torch.nn.UpsamplingBilinear2d`.

    Forward:  y[i] = (1 − λ)·x[j] + λ·x[j + 1], where j + λ = i·(n − 1)/(m − 1), along each of the
    last 2 dimensions.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        size: the lengths m of the output.
        scale_factor: or the ratio of the lengths of output and input.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedUpsamplingBilinear2d(P, scale_factor=2)(torch.ones(1, 1, 3, 4)).shape
    torch.Size([1, 1, 6, 8])
    """
