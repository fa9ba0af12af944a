"""Drawing: the first values of parameters that are sharded over several workers.

Every worker draws each whole tensor as torch does in one process; then all keep their part of the
values of the first worker of the group. So equal seeds give the values of one process, for any
split and number of workers, and with unequal seeds the shards are still those of one tensor, and
shared values are equal. The generator of each worker advances as in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tessel.core.agreement import agree
from tessel.core.layout import Layout
from tessel.core.shared import keep_part
from tessel.distributed.shards import as_plain, sharding_of, shared_by
from tessel.primitives.shard_layouts import layout_of_parts, shard_layout

DrawPart = Callable[[Tensor], Any]


def draw_(tensor: Tensor, layout: Layout, draw: DrawPart) -> Tensor:
    """Fill this worker's part of a tensor in place, as `draw` fills the whole tensor.

    Besides `tensor` this needs the memory of one whole tensor.

    Args:
        tensor: this worker's part; workers outside of the layout pass an empty one.
        layout: the layout of the parts, from `shard_layout` or `Layout.whole(…, shared=True)`.
        draw: a function that fills a tensor in place, such as those of `torch.nn.init`.

    >>> import tessel, torch
    >>> layout = tessel.Layout.whole(tessel.world(), (2,), shared=True)
    >>> draw_(torch.empty(2), layout, torch.nn.init.ones_)
    tensor([1., 1.])
    """
    if not layout.partition.active:
        return tensor
    part = as_plain(tensor.detach())
    with torch.no_grad():
        alike = tuple(part.shape) == layout.shape
        # where every worker has all of it, no second tensor is needed
        whole = part if alike else part.new_empty(layout.shape)
        draw(whole)  # also on workers whose values are not used: their generators advance equally
        keep_part(part, layout, whole)
    return tensor


def layout_of(parameter: Tensor) -> Layout | None:
    """The layout of a parameter of a parallel layer, by its sharding; None if it has none.

    `tessel.interop.layout_of(mesh, placements, shape)` is another function: the layout of a
    DTensor.
    """
    sharding, sharing = sharding_of(parameter), shared_by(parameter)
    shape = tuple(parameter.shape)
    if sharding is None:
        return None if sharing is None else Layout.whole(sharing, shape, shared=True)
    if sharding.size is None:  # the user registered shards, which may have any lengths
        label = f"the initialization of {sharding}"
        [(shapes, _)], _ = agree(sharding.partition, label, parameter)
        return layout_of_parts(sharding.partition, shapes, sharding.dim, None, label)
    whole = (*shape[: sharding.dim], sharding.size, *shape[sharding.dim + 1 :])
    return shard_layout(sharding.partition, whole, sharding.dim)
