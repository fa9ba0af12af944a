"""The initialization of parameters that are sharded over several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tessel.core.agreement import agree
from tessel.core.layout import Layout
from tessel.distributed.group import get_group
from tessel.errors import WorkerLost
from tessel.nn.parallel.drawing import draw_, layout_of


def shard_init_helper_(init_method: Callable[..., Any], tensor: Tensor, **kwargs: Any) -> Tensor:
    """Fill this worker's shard of a tensor as `init_method` fills the whole, in place.

    The method sees the whole tensor, so that its fan-in and fan-out are those of the whole, and
    draws as in one process: with equal seeds the values are those of one process, and otherwise all
    workers get parts of the first one's values. A tensor that is whole on all workers of a group,
    such as the bias of a row-parallel layer, gets equal values on all of them.

    All workers must call this: those of the shard, or of the layer that has the parameter, or else
    of the default group. To fill a tensor on a single worker, call `init_method`.

    Args:
        init_method: a function that fills a tensor in place, such as those of `torch.nn.init`.
        tensor: a parameter of a parallel layer, a tensor that is registered as a shard, or any
            other tensor, which all workers of the default group then share.
        kwargs: further arguments of the method.

    >>> import tessel, torch
    >>> layer = tessel.nn.ParallelLinear(20, 30, dim=-1)
    >>> bias = tessel.nn.init.shard_init_helper_(torch.nn.init.constant_, layer.bias, val=0.5)
    >>> bool((layer.bias == 0.5).all())
    True
    """
    group = get_group()
    try:
        layout = layout_of(tensor)
        if layout is None:
            kind = f"shape {tuple(tensor.shape)} and {tensor.dtype}"
            agree(group, f"shard_init_helper_ of a tensor of {kind} over {group}")
            layout = Layout.whole(group, tuple(tensor.shape), shared=True)
        return draw_(tensor, layout, lambda whole: init_method(whole, **kwargs))
    except WorkerLost as error:
        error.add_note(
            "shard_init_helper_ is a call of all workers; to fill a tensor on one worker alone, "
            "call the method of torch.nn.init itself"
        )
        raise
