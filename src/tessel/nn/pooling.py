"""Pools over partitioned tensors: the largest value or the mean of each window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessel.nn.layer import Layer
from tessel.nn.mixins import PoolingMixin


class DistributedPoolingBase(PoolingMixin, Layer):
    """A pool over a partitioned tensor: each worker fetches what its windows read, then pools.

    A subclass derives from this and from torch's own pool, whose arguments and defaults it has, and
    defines the number of dimensions of its window. The output is on the same partition, in balanced
    parts.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.

    >>> import tessel
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> isinstance(tessel.nn.DistributedMaxPool1d(P, 2), tessel.nn.DistributedPoolingBase)
    True
    """

    num_dims: int  # of the window


class MayGiveIndices(Layer):
    """A pool that can also return the indices of the largest values."""

    return_indices: bool

    def placeholder(self, x: Tensor) -> Any:
        return (x.clone(), x.new_empty(0, dtype=torch.int64)) if self.return_indices else x.clone()


class DistributedAvgPool1d(DistributedPoolingBase, torch.nn.AvgPool1d):
    """The mean of each window of a tensor that is spread over `P_x`: `torch.nn.AvgPool1d`.

    Forward:  y[i] = (Σ_t x[s·i − p + t]) / n along the last dimension.
    n is the size of the window, or without padding the number of its values that exist.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        kernel_size: the size of the window.
        stride: the distance between windows; by default the size of the window.
        padding: the width of the padding on both sides.
        ceil_mode: whether the last window may extend beyond the tensor.
        count_include_pad: whether padding counts as values of zero.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedAvgPool1d(P, 2)(torch.ones(1, 1, 4)).shape
    torch.Size([1, 1, 2])
    """

    num_dims = 1


class DistributedAvgPool2d(DistributedPoolingBase, torch.nn.AvgPool2d):
    """The mean of each window of a tensor that is spread over `P_x`: `torch.nn.AvgPool2d`.

    Like `DistributedAvgPool1d`, along two dimensions of space.

    Args:
        divisor_override: the divisor, if not the number of values; the others are those
            of `DistributedAvgPool1d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedAvgPool2d(P, 2)(torch.ones(1, 1, 4, 4)).shape
    torch.Size([1, 1, 2, 2])
    """

    num_dims = 2


class DistributedAvgPool3d(DistributedPoolingBase, torch.nn.AvgPool3d):
    """The mean of each window of a tensor that is spread over `P_x`: `torch.nn.AvgPool3d`.

    Like `DistributedAvgPool1d`, along three dimensions of space.

    Args:
        divisor_override: the divisor, if not the number of values; the others are those
            of `DistributedAvgPool1d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedAvgPool3d(P, 2)(torch.ones(1, 1, 4, 4, 4)).shape
    torch.Size([1, 1, 2, 2, 2])
    """

    num_dims = 3


class DistributedMaxPool1d(MayGiveIndices, DistributedPoolingBase, torch.nn.MaxPool1d):
    """The largest value of each window of a tensor that is spread over `P_x`: `torch.nn.MaxPool1d`.

    Forward:  y[i] = max_t x[s·i − p + d·t] along the last dimension.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        kernel_size: the size of the window.
        stride: the distance between windows; by default the size of the window.
        padding: the width of the padding on both sides.
        dilation: the distance between the values of a window.
        return_indices: whether to also return the indices of the largest values in the whole
            tensor.
        ceil_mode: whether the last window may extend beyond the tensor.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedMaxPool1d(P, 2)(torch.ones(1, 1, 4)).shape
    torch.Size([1, 1, 2])
    """

    num_dims = 1


class DistributedMaxPool2d(MayGiveIndices, DistributedPoolingBase, torch.nn.MaxPool2d):
    """The largest value of each window of a tensor that is spread over `P_x`: `torch.nn.MaxPool2d`.

    As `DistributedMaxPool1d`, along two dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedMaxPool2d(P, 2)(torch.ones(1, 1, 4, 4)).shape
    torch.Size([1, 1, 2, 2])
    """

    num_dims = 2


class DistributedMaxPool3d(MayGiveIndices, DistributedPoolingBase, torch.nn.MaxPool3d):
    """The largest value of each window of a tensor that is spread over `P_x`: `torch.nn.MaxPool3d`.

    As `DistributedMaxPool1d`, along three dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedMaxPool3d(P, 2)(torch.ones(1, 1, 4, 4, 4)).shape
    torch.Size([1, 1, 2, 2, 2])
    """

    num_dims = 3
