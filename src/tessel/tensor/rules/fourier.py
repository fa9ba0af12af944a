"""Fourier transforms: each along one dimension, or along all that are whole at once.

Transforms along different dimensions commute, but for the one that is real on one side: it is the
first of a transform of real tensors, and the last of one to them. Dimensions that are whole are
transformed where they are; one that is split goes to its hosts, and comes back.

In a converted model a spectrum of several dimensions does not come back: it stays split along its
other dimensions, in which models take few modes and combine them one by one, and from which the
inverse transform brings the result home. So what travels there and back is one tensor each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tessel.core.layout import Layout
from tessel.tensor.rules.hosting import along, hosted
from tessel.tensor.rules.reductions import argument, dims_of
from tessel.tensor.table import (
    Arguments,
    Settings,
    in_backward,
    in_checkpoint,
    outlines,
    rule,
    running,
)
from tessel.tensor.tensor import Tensor
from tessel.tensor.windowed import outline

# along several dimensions: what is done with most of them, what with the last, and is that first?
_SEVERAL = {
    "fft": ("fft", "fft", False),
    "ifft": ("ifft", "ifft", False),
    "rfft": ("fft", "rfft", True),
    "irfft": ("ifft", "irfft", False),
    "hfft": ("fft", "hfft", False),
    "ihfft": ("ifft", "ihfft", True),
}


@rule(*(f"fft_{kind}" for kind in _SEVERAL))
def transform(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Along one dimension."""
    x = args[0]
    outlines(func, args, kwargs)  # torch's own errors
    (dim,) = dims_of(argument(args, kwargs, 2, "dim", -1), x._layout)
    n, norm = argument(args, kwargs, 1, "n"), argument(args, kwargs, 3, "norm")
    return _along_one(name.removeprefix("fft_"), x, dim, n, norm)


@rule(*(f"fft_{kind}{count}" for kind in _SEVERAL for count in ("2", "n")))
def transform_several(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Along several dimensions, two by default or all."""
    x, layout = args[0], args[0]._layout
    outlines(func, args, kwargs)
    lengths = argument(args, kwargs, 1, "s")
    given = argument(args, kwargs, 2, "dim", (-2, -1) if name.endswith("2") else None)
    norm = argument(args, kwargs, 3, "norm")
    ndim = len(layout.shape)
    if given is None:  # the last ones, as many as there are lengths
        given = range(ndim - (ndim if lengths is None else len(lengths)), ndim)
    # in the order in which they are named: the last of them may be the real one
    dims = [dim % ndim for dim in ((given,) if isinstance(given, int) else given)]
    if not dims:  # torch gives what it got, in the type of a transform
        return x if x.is_complex() else x + 0j
    sizes = [None] * len(dims) if lengths is None else [None if n == -1 else n for n in lengths]
    kind = name.removeprefix("fft_")[:-1]
    most, last, is_first = _SEVERAL[kind]
    steps = list(zip(dims, sizes, strict=True))
    # What a checkpoint computes again, it may compute outside of the model.
    model = None if in_checkpoint() or in_backward() else running.get()
    if model is not None and model == layout.partition and model.dim == ndim and len(dims) > 1:
        return _through_hosts(kind, x, steps, norm)
    if is_first:
        x = _along_one(last, x, *steps[-1], norm)
    # The others commute: whole dimensions at once, then split ones, one after the other.
    whole = [(dim, n) for dim, n in steps[:-1] if not x._layout.is_split(dim)]
    if whole:
        function = getattr(torch.fft, f"{most}n")
        at = [dim for dim, _ in whole]
        sizes = [x.shape[dim] if n is None else n for dim, n in whole]
        x = along(x, at, partial(_of_part, function, s=sizes, dim=at, norm=norm))
    for dim, n in steps[:-1]:
        if x._layout.is_split(dim):
            x = _along_one(most, x, dim, n, norm)
    return x if is_first else _along_one(last, x, *steps[-1], norm)


def _through_hosts(
    kind: str, x: Tensor, steps: list[tuple[int, int | None]], norm: str | None
) -> Tensor:
    """Along several dimensions in a model, one after the other, from host to host.

    What is transformed hosts what will be: at the end, the last one is hosted by the others. The
    result of a transform back lies as the model's tensors do, where axis d splits dimension d.
    """
    most, last, is_first = _SEVERAL[kind]
    dims = {dim for dim, _ in steps}
    # the whole ones first, since they can be hosts; but the real one is the first, or the last
    rest = sorted(steps[:-1], key=lambda step: x._layout.is_split(step[0]))
    order = [(steps[-1], last), *((step, most) for step in rest)]
    order = order if is_first else [*order[1:], order[0]]
    for (dim, n), function in order:
        x = x.move_to(hosted(x._layout, (dim,), tuple(sorted(dims - {dim}))))
        x = _along_one(function, x, dim, n, norm)
    if kind in ("fft", "rfft", "ihfft"):
        return x
    return x.move_to(Layout.balanced(x._layout.partition, x.shape))


def _along_one(kind: str, x: Tensor, dim: int, n: int | None, norm: str | None) -> Tensor:
    function = getattr(torch.fft, kind)
    found: Tensor = along(x, (dim,), partial(_of_part, function, n=n, dim=dim, norm=norm))
    return found


def _of_part(function: Any, part: torch.Tensor, **settings: Any) -> torch.Tensor:
    """The transform of a part; libraries refuse those without values."""
    if part.numel():
        found: torch.Tensor = function(part, **settings)
        return found
    like = function(outline(tuple(part.shape), part.dtype), **settings)
    return torch.zeros(like.shape, dtype=like.dtype, device=part.device)


@rule("fft_fftshift", "fft_ifftshift")
def shift(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Half of each dimension around."""
    x = args[0]
    outlines(func, args, kwargs)  # torch's own errors
    dims = dims_of(argument(args, kwargs, 1, "dim"), x._layout)
    back = name == "fft_ifftshift"  # which differs for odd lengths
    return x.roll([(x.shape[dim] + back) // 2 for dim in dims], list(dims))
