"""The use of shared values: what every worker has whole, for the work on its own part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.core.shared import Replicate
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
    use = _use(layout, parameter.shape, shared)
    return parameter if use is None else use.apply(parameter)


def used_together(
    parameters: Sequence[Tensor], layout: Layout, shared: tuple[int, ...] = ()
) -> list[Tensor]:
    """The same for several parameters of one shape, whose gradients travel in one message."""
    use = _use(layout, parameters[0].shape, shared)
    if use is None:
        return list(parameters)
    found = [use.from_bucket(each) for each in parameters]
    if all(each is None for each in found):
        # without a gradient nothing will ever travel, and forward nothing does
        if not (torch.is_grad_enabled() and any(each.requires_grad for each in parameters)):
            return list(parameters)
        return list(used(torch.stack(list(parameters)), layout, shared).unbind())
    pairs = zip(parameters, found, strict=True)
    return [use.apply(p) if each is None else each for p, each in pairs]


@kept_in_job
def shared_whole(partition: Partition, shape: Shape) -> Layout:
    """The layout of one value that all workers have whole."""
    return Layout.whole(partition, shape, shared=True)


@kept_in_job
def _use(layout: Layout, shape: Shape, shared: tuple[int, ...]) -> Replicate | None:
    """How workers use a value of this shape; None if all that have several do the same with it."""
    sizes = layout.partition.shape
    same = tuple(
        axis
        for axis, size in enumerate(sizes)
        if size == 1 or axis in layout.shared or axis in shared
    )
    whole = shared_whole(layout.partition, shape)
    return None if len(same) == len(sizes) else Replicate(whole, replace(whole, shared=same))
