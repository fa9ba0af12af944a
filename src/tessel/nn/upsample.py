"""Upsampling over partitioned tensors."""

from __future__ import annotations

import torch

from tessel.nn.layer import Layer


class DistributedUpsample(Layer, torch.nn.Upsample):
    """A tensor that is spread over `P_x` at another resolution: `torch.nn.Upsample`.

    Forward:  y[i] = Σ_t w_t(i) · x[index_t(i)] along each dimension after the first two.

    Each worker fetches the inputs that its outputs read and no others. The output lies on a
    partition of the same shape, in balanced parts.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        size: the lengths of the output.
        scale_factor: or how much longer it is than the input.
        mode: nearest, nearest-exact, linear, bilinear, bicubic, trilinear or area.
        align_corners: whether the first and last values of input and output lie at the same
            positions.
        recompute_scale_factor: whether to take the scale from the lengths, not as it was given.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedUpsample(P, scale_factor=2)(torch.tensor([[[1.0, 2.0]]]))
    tensor([[[1., 1., 2., 2.]]])
    """


class DistributedUpsamplingNearest2d(DistributedUpsample, torch.nn.UpsamplingNearest2d):
    """Each value again and again, on a tensor over `P_x`: `torch.nn.UpsamplingNearest2d`.

    Forward:  y[i] = x[⌊i·n/m⌋] along each of the last 2 dimensions.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        size: the lengths m of the output.
        scale_factor: or how much longer it is than the input.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedUpsamplingNearest2d(P, scale_factor=2)(torch.ones(1, 1, 3, 4)).shape
    torch.Size([1, 1, 6, 8])
    """


class DistributedUpsamplingBilinear2d(DistributedUpsample, torch.nn.UpsamplingBilinear2d):
    """Values between those of a tensor over `P_x`: `torch.nn.UpsamplingBilinear2d`.

    Forward:  y[i] = (1 − λ)·x[j] + λ·x[j + 1], where j + λ = i·(n − 1)/(m − 1), along each of the
    last 2 dimensions.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        size: the lengths m of the output.
        scale_factor: or how much longer it is than the input.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedUpsamplingBilinear2d(P, scale_factor=2)(torch.ones(1, 1, 3, 4)).shape
    torch.Size([1, 1, 6, 8])
    """
