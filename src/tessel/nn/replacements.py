"""Layers over partitions in the places of torch's, for chains that fetch their halos at once."""

from __future__ import annotations

import torch

from tessel.core.partition import Partition
from tessel.nn.adaptive import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
)
from tessel.nn.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from tessel.nn.convolution import DistributedConv1d, DistributedConv2d, DistributedConv3d
from tessel.nn.layer import Layer
from tessel.nn.linear import DistributedLinear
from tessel.nn.norm import (
    DistributedBatchNorm,
    DistributedBatchNorm1d,
    DistributedBatchNorm2d,
    DistributedBatchNorm3d,
    DistributedGroupNorm,
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from tessel.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from tessel.nn.region import HaloRegion
from tessel.nn.upsample import DistributedUpsample

nn = torch.nn

REPLACEMENTS: dict[type[nn.Module], type[Layer]] = {
    nn.Conv1d: DistributedConv1d,
    nn.Conv2d: DistributedConv2d,
    nn.Conv3d: DistributedConv3d,
    nn.ConvTranspose1d: DistributedConvTranspose1d,
    nn.ConvTranspose2d: DistributedConvTranspose2d,
    nn.ConvTranspose3d: DistributedConvTranspose3d,
    nn.AvgPool1d: DistributedAvgPool1d,
    nn.AvgPool2d: DistributedAvgPool2d,
    nn.AvgPool3d: DistributedAvgPool3d,
    nn.MaxPool1d: DistributedMaxPool1d,
    nn.MaxPool2d: DistributedMaxPool2d,
    nn.MaxPool3d: DistributedMaxPool3d,
    nn.AdaptiveAvgPool1d: DistributedAdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: DistributedAdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d: DistributedAdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d: DistributedAdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d: DistributedAdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d: DistributedAdaptiveMaxPool3d,
    nn.BatchNorm1d: DistributedBatchNorm1d,
    nn.BatchNorm2d: DistributedBatchNorm2d,
    nn.BatchNorm3d: DistributedBatchNorm3d,
    nn.SyncBatchNorm: DistributedBatchNorm,
    nn.InstanceNorm1d: DistributedInstanceNorm1d,
    nn.InstanceNorm2d: DistributedInstanceNorm2d,
    nn.InstanceNorm3d: DistributedInstanceNorm3d,
    nn.GroupNorm: DistributedGroupNorm,
    nn.LayerNorm: DistributedLayerNorm,
    nn.RMSNorm: DistributedRMSNorm,
    nn.Linear: DistributedLinear,
    nn.Upsample: DistributedUpsample,
    # whose modes are attributes, which `from_torch` takes over
    nn.UpsamplingNearest2d: DistributedUpsample,
    nn.UpsamplingBilinear2d: DistributedUpsample,
}


def place_regions(model: nn.Module, P_x: Partition) -> None:
    """Let the halo regions of a model know their workers.

    A region computes for all of its layers which box they read, so it needs to know them as layers
    over a partition, which share parameters, buffers and hooks with torch's.
    """
    for module in list(model.modules()):
        if isinstance(module, HaloRegion):
            _replace(module, P_x, {})


def _replace(module: nn.Module, P_x: Partition, done: dict[int, nn.Module]) -> None:
    for name, child in module._modules.items():
        if child is None:
            continue
        if id(child) not in done:  # one that occurs twice stays one
            kind = REPLACEMENTS.get(type(child))
            done[id(child)] = child if kind is None else kind.from_torch(child, P_x)  # type: ignore[assignment]
            _replace(child, P_x, done)
        module._modules[name] = done[id(child)]
