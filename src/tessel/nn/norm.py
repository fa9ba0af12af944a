"""Layers of norms: torch's own, over partitioned tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tessel.nn.layer import Layer


def _check_any_dims(layer: Any, input: Tensor) -> None:
    """Raise unless there are batch and channels; unlike in torch, any dimensions may follow."""
    if input.dim() < 2:
        raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class DistributedBatchNorm(Layer, _BatchNorm):
    """Batch norm of a tensor of two or more dimensions that is spread over `P_x`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    the whole tensor.

    Parameters and running statistics are whole and equal on all workers, as in one process. In
    evaluation mode only gradients of the parameters are sent. `torch.nn.SyncBatchNorm` is converted
    to this.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as in
            `torch.nn.BatchNorm1d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> norm = tessel.nn.DistributedBatchNorm(P, 3)
    >>> norm(torch.ones(2, 3, 4)).abs().max().item()
    0.0
    """

    _check_input_dim = _check_any_dims


class DistributedBatchNorm1d(Layer, torch.nn.BatchNorm1d):
    """Batch norm of a tensor (N, C) or (N, C, L) over `P_x`: `torch.nn.BatchNorm1d`.

    As `DistributedBatchNorm`, along one dimension of space, or none.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedBatchNorm1d(P, 3)(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """


class DistributedBatchNorm2d(Layer, torch.nn.BatchNorm2d):
    """Batch norm of a tensor (N, C, H, W) over `P_x`: `torch.nn.BatchNorm2d`.

    As `DistributedBatchNorm`, along two dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedBatchNorm2d(P, 3)(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """


class DistributedBatchNorm3d(Layer, torch.nn.BatchNorm3d):
    """Batch norm of a tensor (N, C, D, H, W) over `P_x`: `torch.nn.BatchNorm3d`.

    As `DistributedBatchNorm`, along three dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedBatchNorm3d(P, 3)(torch.ones(2, 3, 4, 4, 4)).shape
    torch.Size([2, 3, 4, 4, 4])
    """


class DistributedInstanceNorm(Layer, _InstanceNorm):
    """Instance norm of a tensor (N, C, …) of any number of dimensions that is spread over `P_x`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a channel of
    one instance of the whole tensor.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        num_features: the number of channels of the whole tensor.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as
            `torch.nn.InstanceNorm1d`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedInstanceNorm(P, 3)(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    _check_input_dim = _check_any_dims

    def torch_forward(self, x: Tensor, *args: Any, **settings: Any) -> Any:
        # as torch's, except for inputs without a batch, which the number of dimensions does not
        # show here
        self._check_input_dim(x)
        if x.size(1) != self.num_features and self.affine:
            raise ValueError(
                f"expected input's size at dim=1 to match num_features ({self.num_features}), "
                f"but got: {x.size(1)}."
            )
        return self._apply_instance_norm(x)


class DistributedInstanceNorm1d(Layer, torch.nn.InstanceNorm1d):
    """Instance norm of a tensor (C, L) or (N, C, L) over `P_x`: `torch.nn.InstanceNorm1d`.

    As `DistributedInstanceNorm`, along one dimension of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedInstanceNorm1d(P, 3)(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """


class DistributedInstanceNorm2d(Layer, torch.nn.InstanceNorm2d):
    """Instance norm of a tensor (C, H, W) or (N, C, H, W) over `P_x`: `torch.nn.InstanceNorm2d`.

    As `DistributedInstanceNorm`, along two dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> tessel.nn.DistributedInstanceNorm2d(P, 3)(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """


class DistributedInstanceNorm3d(Layer, torch.nn.InstanceNorm3d):
    """Instance norm of a tensor (C, D, H, W) or (N, C, D, H, W): `torch.nn.InstanceNorm3d`.

    As `DistributedInstanceNorm`, along three dimensions of space.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1, 1])
    >>> tessel.nn.DistributedInstanceNorm3d(P, 3)(torch.ones(2, 3, 4, 4, 4)).shape
    torch.Size([2, 3, 4, 4, 4])
    """


class DistributedGroupNorm(Layer, torch.nn.GroupNorm):
    """Group norm of a tensor (N, C, …) that is spread over `P_x`: `torch.nn.GroupNorm`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance of a group of
    channels of one instance of the whole tensor.

    The channels may be split anywhere, even inside a group.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d.
        num_groups: the number of groups of the whole tensor.
        num_channels: the number of channels of the whole tensor.
        eps, affine, device, dtype, bias: as in `torch.nn.GroupNorm`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    >>> tessel.nn.DistributedGroupNorm(P, 2, 4)(torch.ones(2, 4, 3)).shape
    torch.Size([2, 4, 3])
    """


class DistributedLayerNorm(Layer, torch.nn.LayerNorm):
    """Layer norm of a tensor that is spread over `P_x`: `torch.nn.LayerNorm`.

    Forward:  y = w (x − m) / √(v + ε) + b, where m and v are the mean and variance over the last
    dimensions of the whole tensor.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d, even one that is normalised.
        normalized_shape: the lengths of the last dimensions of the whole tensor.
        eps, elementwise_affine, bias, device, dtype: as in `torch.nn.LayerNorm`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedLayerNorm(P, 4)(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """


class DistributedRMSNorm(Layer, torch.nn.RMSNorm):  # type: ignore[misc]  # names its input x
    """Root-mean-square norm of a tensor that is spread over `P_x`: `torch.nn.RMSNorm`.

    Forward:  y = w x / √(q + ε), where q is the mean of x² over the last dimensions of the whole
    tensor.

    Args:
        P_x: the partition of the tensor; axis d splits dimension d, even one that is normalised.
        normalized_shape: the lengths of the last dimensions of the whole tensor.
        eps, elementwise_affine, device, dtype: as in `torch.nn.RMSNorm`.

    >>> import tessel, torch
    >>> P = tessel.world().create_cartesian_topology_partition([1, 1])
    >>> tessel.nn.DistributedRMSNorm(P, 4, eps=0.0)(torch.ones(1, 4))
    tensor([[1., 1., 1., 1.]], grad_fn=<MulBackward0>)
    """
