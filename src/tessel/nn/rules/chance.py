"""Random functions: copies of one value must be treated alike, different parts differently.

While a converted model runs in training, the random numbers of all workers come from one stream: a
random function draws one number of it, the same on all workers, and from this and the place of a
part follow the numbers for that part.
"""

from __future__ import annotations

from typing import Any

import torch

from tessel import boxes
from tessel.layout import Layout
from tessel.nn.ledger import tensors
from tessel.nn.rules.book import Arguments, Settings, noted, rule, unsupported, whole


@rule(
    *("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "rrelu", "rrelu_"),
    *("bernoulli", "bernoulli_", "rand_like", "randn_like", "native_dropout"),
)
def for_each_element(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    layout = whole(args[0])
    return _with_own_numbers(func, args, kwargs, layout, range(len(layout.shape)))


@rule(
    *("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout"),
    *("feature_dropout_", "feature_alpha_dropout_"),
)
def for_each_channel(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The parts of one channel are treated alike."""
    layout = whole(args[0])
    return _with_own_numbers(func, args, kwargs, layout, range(min(2, len(layout.shape))))


def _with_own_numbers(
    func: Any, args: Arguments, kwargs: Settings, layout: Layout, dims: range
) -> Any:
    """Call a random function with numbers that depend on which part this is of `dims`."""
    if next(tensors(args[1:], kwargs), None) is not None:
        raise unsupported(func.__name__, "probabilities must be numbers", layout)
    if layout.partition.size == 1:
        return noted(func(*args, **kwargs), layout)
    axes = [axis for dim in dims for axis in layout.cuts[dim].axes]
    index = layout.partition.index
    assert index is not None
    place = boxes.ravel([index[a] for a in axes], [layout.partition.shape[a] for a in axes])
    seed = int(torch.randint(2**62, ())) + place
    devices = [args[0].device] if args[0].is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return noted(func(*args, **kwargs), layout)
