"""Fourier transforms: each along one dimension, or along all that are whole at once.

Transforms along different dimensions commute, but for the one that is real on one side: it is the
first of a transform of real tensors, and the last of one to them. Dimensions that are whole are
transformed where they are; one that is split goes to its hosts, and comes back.

In a converted model a spectrum of several dimensions does not come back: it stays split along its
other dimensions, in which models take few modes and combine them one by one, and from which the
inverse transform brings the result home. It is left unfinished (`tensor/unfinished.py`) until modes
are taken: these travel there, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, cast

import torch

from tessel.core.layout import Layout
from tessel.tensor.rules.hosting import along, hosted, split_like
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
from tessel.tensor.tensor import Tensor, open_part
from tessel.tensor.unfinished import (
    Run,
    Unfinished,
    Zeros,
    left_unfinished,
    may_wait,
    unfinished_of,
)
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
    return TransformStep(name.removeprefix("fft_"), dim, n, norm)(x)


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
    steps = [
        TransformStep(most, dim, n, norm, tuple(sorted({*dims} - {dim})))
        for dim, n in zip(dims, sizes, strict=True)
    ]
    steps[-1] = replace(steps[-1], kind=last)
    # What a checkpoint computes again, it may compute outside of the model.
    model = None if in_checkpoint() or in_backward() else running.get()
    if model is not None and model == layout.partition and model.dim == ndim and len(dims) > 1:
        return _through_hosts(kind, x, steps)
    if is_first:
        x = steps[-1](x)
    # The others commute: whole dimensions at once, then split ones, one after the other.
    whole = [step for step in steps[:-1] if not x._layout.is_split(step.dim)]
    if whole:
        function = getattr(torch.fft, f"{most}n")
        at = [step.dim for step in whole]
        lengths = [x.shape[step.dim] if step.n is None else step.n for step in whole]
        x = along(x, at, partial(_of_part, function, s=lengths, dim=at, norm=norm))
    for step in steps[:-1]:
        if x._layout.is_split(step.dim):
            x = step(x)
    return x if is_first else steps[-1](x)


@dataclass(frozen=True)
class TransformStep:
    """A transform along one dimension.

    Args:
        kind: the name of torch's function; "half" and "early" for those below.
        dim: what is transformed.
        n: its length for the transform; None for the one that it has.
        norm: of the transform.
        hosts: the dimensions that are split instead, if they are long enough.
    """

    kind: str
    dim: int
    n: int | None
    norm: str | None
    hosts: tuple[int, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """The transform; a split dimension goes to its hosts, and comes back."""
        function = _PARTLY.get(self.kind) or getattr(torch.fft, self.kind)
        of_part = partial(_of_part, function, n=self.n, dim=self.dim, norm=self.norm)
        return cast(Tensor, along(x, (self.dim,), of_part))

    def at_hosts(self, x: Tensor) -> Tensor:
        """The transform, which stays with the hosts."""
        return self(x.move_to(hosted(x._layout, (self.dim,), self.hosts)))

    def layout(self, layout: Layout) -> Layout:
        """How a transform of complex numbers lies at the hosts."""
        there, shape = hosted(layout, (self.dim,), self.hosts), list(layout.shape)
        n = shape[self.dim] if self.n is None else self.n
        shape[self.dim] = n // 2 + 1 if self.kind == "half" else n
        return split_like(there, tuple(shape))


@dataclass(frozen=True, eq=False)
class HalfTransform(Unfinished):
    """A transform of which steps along split dimensions are left.

    Args:
        half: what was transformed along the others.
        steps: those that are left.

    Attributes:
        taken: slices that were asked for, with all of the last step's dimension.
    """

    half: Tensor
    steps: tuple[TransformStep, ...]
    taken: dict[Any, Tensor] = field(default_factory=dict, init=False)

    @property
    def layout(self) -> Layout:
        """Of the whole transform."""
        return reduce(lambda layout, step: step.layout(layout), self.steps, self.half._layout)

    def whole(self) -> Tensor:
        return self.picked([(0, n, 1) for n in self.layout.shape])

    def picked(self, runs: Sequence[Run]) -> Tensor:
        left, last = [step.dim for step in self.steps], self.steps[-1].dim
        # Models take several slices that differ in one dimension: what they share travels once.
        key = tuple(run for dim, run in enumerate(runs) if dim != last)
        split = [dim for dim in range(len(runs)) if self.half._layout.is_split(dim)]
        x = self.taken.get(key)
        if x is None:
            x = self._cut(self.half, {*range(len(runs))} - {*split, *left}, runs)
            for step in self.steps:
                x = step.at_hosts(x)
                x = self._cut(x, {step.dim} - {last}, runs)
            self.taken[key] = x
        return self._cut(x, {*split, last} - {*left[:-1]}, runs)

    def _cut(self, x: Tensor, dims: set[int], runs: Sequence[Run]) -> Tensor:
        x = self.rolled(x, sorted(dims))
        if all(runs[dim] == (0, x.shape[dim], 1) for dim in dims):
            return x
        key = [slice(*run) if dim in dims else slice(None) for dim, run in enumerate(runs)]
        return cast(Tensor, x[tuple(key)])


def _through_hosts(kind: str, x: Tensor, steps: list[TransformStep]) -> Tensor:
    """Along several dimensions in a model, one after the other, from host to host.

    What is transformed hosts what will be: at the end, the last one is hosted by the others. The
    result of a transform back lies as the model's tensors do, where axis d splits dimension d.
    """
    found, box = unfinished_of(x), None
    zeros = found if isinstance(found, Zeros) else None
    if zeros is not None and zeros.fills({step.dim for step in steps}):
        x, box = zeros.boxed()
    order = _ordered(kind, x._layout, steps)
    if kind in ("fft", "rfft", "ihfft"):
        x = order[0].at_hosts(x)
        while (order := order[1:]) and not x._layout.is_split(order[0].dim):
            x = order[0](x)
        if not order:
            return x
        todo = HalfTransform((0,) * x.dim(), x, tuple(order))
        return left_unfinished(open_part(x), todo.layout, todo) if may_wait() else todo.whole()
    for step in order:
        x = x.move_to(hosted(x._layout, (step.dim,), step.hosts))
        if zeros is not None and box is not None:
            x = zeros.widened(x, step.dim, box[step.dim])
        x = step(x)
    if steps[-1].kind == "irfft" and x.is_complex():
        x = cast(Tensor, x.real)
    return x.move_to(Layout.balanced(x._layout.partition, x.shape))


def _ordered(kind: str, layout: Layout, steps: list[TransformStep]) -> list[TransformStep]:
    """In which order dimensions are transformed.

    There, the whole ones first: they are hosts of the others then. Back, those that are split at
    home first: the others are transformed there, where nothing travels any more. The real one would
    be the first there, and the last back. Otherwise it takes a complex transform: there, of which
    half is kept; back, of which the real part is taken at the end.
    """
    *rest, real = steps
    is_back = kind in ("ifft", "irfft", "hfft")
    split = {s.dim for s in steps if layout.is_split(s.dim)}
    if is_back:
        split = {s.dim for s in steps if layout.partition.shape[s.dim] > 1}
    order = sorted(rest, key=lambda step: (step.dim in split) != is_back)
    if real.dim not in split or len(split) == len(steps) or kind in ("hfft", "ihfft"):
        return [*order, real] if is_back else [real, *order]
    place = sum((step.dim in split) == is_back for step in order)
    real = replace(real, kind={"rfft": "half", "irfft": "early"}.get(kind, real.kind))
    return [*order[:place], real, *order[place:]]


def _half(x: torch.Tensor, n: int | None, dim: int, norm: str | None) -> torch.Tensor:
    """What `rfft` keeps of a transform, also of what is complex along other dimensions."""
    found = torch.fft.fft(x, n, dim, norm)
    return found.narrow(dim, 0, found.shape[dim] // 2 + 1)


def _early(x: torch.Tensor, n: int | None, dim: int, norm: str | None) -> torch.Tensor:
    """What has the result of `irfft` as its real part, also after transforms of other dimensions.

    A mode and the conjugate one, which `irfft` adds, have twice the real part of the first.
    """
    n = 2 * (x.shape[dim] - 1) if n is None else n
    x = x.narrow(dim, 0, min(x.shape[dim], n // 2 + 1))
    factors = torch.full((x.shape[dim],), 2.0, dtype=x.dtype.to_real(), device=x.device)
    factors[0] = 1
    factors[n - n // 2 :] = 1  # of an even length the last mode has no other beside it
    shape = [-1 if each == dim else 1 for each in range(x.dim())]
    return torch.fft.ifft(x * factors.reshape(shape), n, dim, norm)


_PARTLY = {"half": _half, "early": _early}


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
    shifts = {dim: (x.shape[dim] + back) // 2 for dim in dims}
    unfinished = unfinished_of(x)
    if unfinished is None:
        return x.roll(list(shifts.values()), list(shifts))
    return left_unfinished(x, x._layout, unfinished.shifted(shifts))
