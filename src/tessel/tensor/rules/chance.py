"""Random functions: copies of one value must be treated alike, different parts differently.

While a converted model runs, the random numbers of all workers come from one stream: a random
function draws one number of it, the same on all workers, and from this and the place of a part
follow the numbers for that part. Elsewhere the number is that of the first worker.
"""

from __future__ import annotations

from typing import Any

import torch

from tessel import boxes
from tessel.layout import Layout
from tessel.tensor.rules.pointwise import changed, check_change, is_in_place
from tessel.tensor.stream import common_number
from tessel.tensor.table import Arguments, Settings, made, opened, rule, tensors, unsupported


@rule(
    *("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "rrelu", "rrelu_"),
    *("bernoulli", "bernoulli_", "rand_like", "randn_like", "native_dropout"),
    *("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    "randint_like",
)
def for_each_element(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Numbers of its own for each part."""
    return _with_own_numbers(name, func, args, kwargs, len(args[0]._layout.shape))


@rule(
    *("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout"),
    *("feature_dropout_", "feature_alpha_dropout_"),
)
def for_each_channel(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The parts of one channel are treated alike."""
    return _with_own_numbers(name, func, args, kwargs, min(2, len(args[0]._layout.shape)))


def _with_own_numbers(
    name: str, func: Any, args: Arguments, kwargs: Settings, num_dims: int
) -> Any:
    """Call a random function with numbers that depend on which part this is of the first dims."""
    target = args[0]
    x, layout = opened(target)
    if next(tensors(args[1:], kwargs), None) is not None:
        raise unsupported(name, "probabilities must be numbers", layout)
    if kwargs.get("generator") is not None:
        raise unsupported(name, "a generator of one worker cannot draw for all", layout)
    in_place = is_in_place(name) or bool(kwargs.get("inplace"))
    if in_place:
        check_change(name, target, [layout])
    if layout.partition.size == 1:
        result = func(x, *args[1:], **kwargs)
    else:
        devices = [x.device] if x.is_cuda else []
        seed = common_number(layout.partition) + _place(layout, num_dims)
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            result = func(x, *args[1:], **kwargs)
    if in_place:
        return changed(target)
    if isinstance(result, tuple):
        return tuple(made(each, layout) for each in result)
    return made(result, layout)


def _place(layout: Layout, num_dims: int) -> int:
    """Which part of the first dimensions this worker has."""
    index = layout.partition.index
    assert index is not None
    axes = [axis for cut in layout.cuts[:num_dims] for axis in cut.axes]
    return boxes.ravel([index[a] for a in axes], [layout.partition.shape[a] for a in axes])
