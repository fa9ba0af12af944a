"""Layers over partitions in the places of torch's, for chains that fetch their halos at once."""

from __future__ import annotations

import torch

from tessel.core.partition import Partition
from tessel.nn import adaptive, conv_transpose, convolution, linear, norm, pooling, upsample
from tessel.nn.layer import Layer
from tessel.nn.region import HaloRegion

nn = torch.nn

# Layers have the names of torch's, with a word before them.
REPLACEMENTS: dict[type[nn.Module], type[Layer]] = {nn.SyncBatchNorm: norm.DistributedBatchNorm}
for _module in (adaptive, conv_transpose, convolution, linear, norm, pooling, upsample):
    for _name, _kind in vars(_module).items():
        _theirs = getattr(nn, _name.removeprefix("Distributed"), None)
        if _name.startswith("Distributed") and _theirs is not None:
            REPLACEMENTS[_theirs] = _kind


def place_regions(model: nn.Module, P_x: Partition) -> None:
    """Place the halo regions of a model on their workers.

    A region computes the boxes that all of its layers read, so it needs layers over a partition,
    which share parameters, buffers and hooks with torch's.
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
