"""The use of shared values: what every worker has whole, for the work on its own part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.core.shared import from_bucket, replicate
from tessel.transport import kept_in_job


@overload
def used(parameter: Tensor, layout: Layout, shared: tuple[int, ...] = ()) -> Tensor: ...
@overload
def used(
    parameter: Tensor | None, layout: Layout, shared: tuple[int, ...] = ()
) -> Tensor | None: ...
def used(parameter: Tensor | None, layout: Layout, shared: tuple[int, ...] = ()) -> Tensor | None:
    """A parameter that all workers of `layout` share, for use on each worker's part.

    Along the axes that split the tensor its uses are separate, and their gradients are summed;
    along those where the tensor is shared, or that are named in `shared`, each worker does the
    same work.
    """
    if parameter is None:
        return None
    whole = shared_whole(layout.partition, parameter.shape)
    return replicate(parameter, whole, _separate(layout, shared))


def used_together(
    parameters: Sequence[Tensor], layout: Layout, shared: tuple[int, ...] = ()
) -> list[Tensor]:
    """The same for several parameters of one shape, whose gradients travel in one message."""
    whole = shared_whole(layout.partition, parameters[0].shape)
    separate = _separate(layout, shared)
    found = [from_bucket(each, whole, separate) for each in parameters]
    if all(each is None for each in found):
        # without a gradient nothing will ever travel, and forward nothing does
        if not (torch.is_grad_enabled() and any(each.requires_grad for each in parameters)):
            return list(parameters)
        stack = torch.stack(list(parameters))
        several = shared_whole(layout.partition, stack.shape)
        return list(replicate(stack, several, separate).unbind())
    pairs = zip(parameters, found, strict=True)
    return [replicate(p, whole, separate) if each is None else each for p, each in pairs]


def _separate(layout: Layout, shared: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which workers use a parameter for different parts."""
    same = {*layout.shared, *shared}
    return tuple(axis for axis in range(layout.partition.dim) if axis not in same)


def shared_whole(partition: Partition, shape: Sequence[int]) -> Layout:
    """The layout of one value that all workers have whole."""
    return _shared_whole(partition, tuple(shape))


@kept_in_job
def _shared_whole(partition: Partition, shape: Shape) -> Layout:
    return Layout.whole(partition, shape, shared=True)
