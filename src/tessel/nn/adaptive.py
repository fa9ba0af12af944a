"""Adaptive pools over partitioned tensors: a chosen number of windows of unequal size."""

from __future__ import annotations

import torch

from tessel.nn.layer import Layer
from tessel.nn.pooling import MayGiveIndices


class DistributedAdaptiveAvgPool1d(Layer, torch.nn.AdaptiveAvgPool1d):
    """The means of windows of a tensor that is spread over `P_x`: `torch.nn.AdaptiveAvgPool1d`.

    Forward:  y[i] = mean_t x[t] for ⌊i·n/m⌋ ≤ t < ⌈(i+1)·n/m⌉ along the last dimension.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        output_size: the length m of the output.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveAvgPool1d(P, 2)(torch.ones(1, 1, 5)).shape
    torch.Size([1, 1, 2])
    """


class DistributedAdaptiveAvgPool2d(Layer, torch.nn.AdaptiveAvgPool2d):
    """The means of windows of a tensor that is spread over `P_x`: `torch.nn.AdaptiveAvgPool2d`.

    As `DistributedAdaptiveAvgPool1d`, along two dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveAvgPool2d(P, 2)(torch.ones(1, 1, 5, 5)).shape
    torch.Size([1, 1, 2, 2])
    """


class DistributedAdaptiveAvgPool3d(Layer, torch.nn.AdaptiveAvgPool3d):
    """The means of windows of a tensor that is spread over `P_x`: `torch.nn.AdaptiveAvgPool3d`.

    As `DistributedAdaptiveAvgPool1d`, along three dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveAvgPool3d(P, 2)(torch.ones(1, 1, 5, 5, 5)).shape
    torch.Size([1, 1, 2, 2, 2])
    """


class DistributedAdaptiveMaxPool1d(MayGiveIndices, torch.nn.AdaptiveMaxPool1d):
    """The largest values of windows of a tensor on `P_x`: `torch.nn.AdaptiveMaxPool1d`.

    Forward:  y[i] = max_t x[t] for ⌊i·n/m⌋ ≤ t < ⌈(i+1)·n/m⌉ along the last dimension.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        output_size: the length m of the output.
        return_indices: whether to also return the indices of the largest values in the whole
            tensor.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveMaxPool1d(P, 2)(torch.ones(1, 1, 5)).shape
    torch.Size([1, 1, 2])
    """


class DistributedAdaptiveMaxPool2d(MayGiveIndices, torch.nn.AdaptiveMaxPool2d):
    """The largest values of windows of a tensor on `P_x`: `torch.nn.AdaptiveMaxPool2d`.

    As `DistributedAdaptiveMaxPool1d`, along two dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveMaxPool2d(P, 2)(torch.ones(1, 1, 5, 5)).shape
    torch.Size([1, 1, 2, 2])
    """


class DistributedAdaptiveMaxPool3d(MayGiveIndices, torch.nn.AdaptiveMaxPool3d):
    """The largest values of windows of a tensor on `P_x`: `torch.nn.AdaptiveMaxPool3d`.

    As `DistributedAdaptiveMaxPool1d`, along three dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveMaxPool3d(P, 2)(torch.ones(1, 1, 5, 5, 5)).shape
    torch.Size([1, 1, 2, 2, 2])
    """
