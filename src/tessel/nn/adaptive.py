"""Adaptive pools over partitioned tensors: windows of unequal size, as many as wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.core.partition import Partition
from tessel.nn.layer import Layer
from tessel.tensor.rules.adaptive import Sizes


class _MaximumBase(Layer):
    return_indices: bool

    def placeholder(self, x: Tensor) -> Any:
        return (x.clone(), x.new_empty(0, dtype=torch.int64)) if self.return_indices else x.clone()


class DistributedAdaptiveAvgPool1d(Layer, torch.nn.AdaptiveAvgPool1d):
    """The means of windows of a tensor that is spread over `P_x`: `torch.nn.AdaptiveAvgPool1d`.

    Forward:  y[i] = mean_t x[t] for ⌊i·n/m⌋ ≤ t < ⌈(i+1)·n/m⌉ along the last dimension.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        output_size: the length m of the output.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveAvgPool1d(P, 2)(torch.ones(1, 1, 5)).shape
    torch.Size([1, 1, 2])
    """

    def __init__(self, P_x: Partition, output_size: Sizes) -> None:
        torch.nn.AdaptiveAvgPool1d.__init__(self, output_size)
        self.place_on(P_x)


class DistributedAdaptiveAvgPool2d(Layer, torch.nn.AdaptiveAvgPool2d):
    """The means of windows of a tensor that is spread over `P_x`: `torch.nn.AdaptiveAvgPool2d`.

    As `DistributedAdaptiveAvgPool1d`, along two dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveAvgPool2d(P, 2)(torch.ones(1, 1, 5, 5)).shape
    torch.Size([1, 1, 2, 2])
    """

    def __init__(self, P_x: Partition, output_size: Sizes) -> None:
        torch.nn.AdaptiveAvgPool2d.__init__(self, output_size)
        self.place_on(P_x)


class DistributedAdaptiveAvgPool3d(Layer, torch.nn.AdaptiveAvgPool3d):
    """The means of windows of a tensor that is spread over `P_x`: `torch.nn.AdaptiveAvgPool3d`.

    As `DistributedAdaptiveAvgPool1d`, along three dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveAvgPool3d(P, 2)(torch.ones(1, 1, 5, 5, 5)).shape
    torch.Size([1, 1, 2, 2, 2])
    """

    def __init__(self, P_x: Partition, output_size: Sizes) -> None:
        torch.nn.AdaptiveAvgPool3d.__init__(self, output_size)
        self.place_on(P_x)


class DistributedAdaptiveMaxPool1d(_MaximumBase, torch.nn.AdaptiveMaxPool1d):
    """The largest values of windows of a tensor on `P_x`: `torch.nn.AdaptiveMaxPool1d`.

    Forward:  y[i] = max_t x[t] for ⌊i·n/m⌋ ≤ t < ⌈(i+1)·n/m⌉ along the last dimension.

    Args:
        P_x: where the tensor lies; axis d splits dimension d.
        output_size: the length m of the output.
        return_indices: whether to give the places of the largest values too, in the whole tensor.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveMaxPool1d(P, 2)(torch.ones(1, 1, 5)).shape
    torch.Size([1, 1, 2])
    """

    def __init__(self, P_x: Partition, output_size: Sizes, return_indices: bool = False) -> None:
        torch.nn.AdaptiveMaxPool1d.__init__(self, output_size, return_indices)
        self.place_on(P_x)


class DistributedAdaptiveMaxPool2d(_MaximumBase, torch.nn.AdaptiveMaxPool2d):
    """The largest values of windows of a tensor on `P_x`: `torch.nn.AdaptiveMaxPool2d`.

    As `DistributedAdaptiveMaxPool1d`, along two dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveMaxPool2d(P, 2)(torch.ones(1, 1, 5, 5)).shape
    torch.Size([1, 1, 2, 2])
    """

    def __init__(self, P_x: Partition, output_size: Sizes, return_indices: bool = False) -> None:
        torch.nn.AdaptiveMaxPool2d.__init__(self, output_size, return_indices)
        self.place_on(P_x)


class DistributedAdaptiveMaxPool3d(_MaximumBase, torch.nn.AdaptiveMaxPool3d):
    """The largest values of windows of a tensor on `P_x`: `torch.nn.AdaptiveMaxPool3d`.

    As `DistributedAdaptiveMaxPool1d`, along three dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedAdaptiveMaxPool3d(P, 2)(torch.ones(1, 1, 5, 5, 5)).shape
    torch.Size([1, 1, 2, 2, 2])
    """

    def __init__(self, P_x: Partition, output_size: Sizes, return_indices: bool = False) -> None:
        torch.nn.AdaptiveMaxPool3d.__init__(self, output_size, return_indices)
        self.place_on(P_x)
