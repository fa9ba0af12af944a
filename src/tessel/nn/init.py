"""The initialization of parameters that lie in shards on several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tessel.nn.parallel.drawing import draw_, layout_of


def shard_init_helper_(init_method: Callable[..., Any], tensor: Tensor, **kwargs: Any) -> Tensor:
    """Fill this worker's shard of a tensor as `init_method` fills the whole, in place.

    The method sees the whole tensor, so that its fan-in and fan-out are those of the whole, and
    draws as it does in one process: with equal seeds the values are those of one process, and with
    others all workers keep parts of what the first one drew. A parameter that is whole on all
    workers of a group, as the bias of a row-parallel layer, gets equal values on all of them; a
    tensor without a mark gets values on each worker by itself.

    Args:
        init_method: fills a tensor in place, as the functions of `torch.nn.init` do.
        tensor: a parameter of a parallel layer, or a tensor that is marked as a shard.
        kwargs: further arguments of the method.

    >>> import tessel, torch
    >>> layer = tessel.nn.ParallelLinear(20, 30, dim=-1)
    >>> bias = tessel.nn.init.shard_init_helper_(torch.nn.init.constant_, layer.bias, val=0.5)
    >>> bool((layer.bias == 0.5).all())
    True
    """
    layout = layout_of(tensor)
    if layout is None:
        init_method(tensor, **kwargs)
        return tensor
    return draw_(tensor, layout, lambda whole: init_method(whole, **kwargs))
