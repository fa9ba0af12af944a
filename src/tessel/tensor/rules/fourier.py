"""Fourier transforms: each along one dimension, or along all that are whole at once.

Transforms along different dimensions commute, except for the one that is real on one side: it is
the first of a transform of real tensors, and the last of one to real tensors. Dimensions that are
whole are transformed directly; a split one goes to its hosts, and comes back.

In a converted model a spectrum does not come back: it stays split along other dimensions, in which
models select few modes and combine them one by one, and from which the inverse transform returns
the result home, to the layout of the tensor that was transformed before. It is left unfinished
(`tensor/unfinished.py`) until modes are selected: only these are sent there, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, cast

import torch

from tessel.core.layout import Layout
from tessel.tensor.rules.hosting import along
from tessel.tensor.rules.reductions import argument, dims_of
from tessel.tensor.rules.transform_step import Frequencies, TransformStep, of_part
from tessel.tensor.table import (
    Arguments,
    Settings,
    in_backward,
    in_checkpoint,
    outlines,
    rule,
    running,
)
from tessel.tensor.tensor import Tensor, layout_on, open_part
from tessel.tensor.unfinished import (
    Run,
    Unfinished,
    Zeros,
    early,
    left_unfinished,
    may_wait,
    unfinished_of,
)

# along several dimensions: the kinds for most of them and for the last one; whether that is first
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
    """Transform one dimension."""
    x, kind = args[0], name.removeprefix("fft_")
    outlines(func, args, kwargs)  # torch's own errors
    (dim,) = dims_of(argument(args, kwargs, 2, "dim", -1), x._layout)
    n, norm = argument(args, kwargs, 1, "n"), argument(args, kwargs, 3, "norm")
    return _transformed(kind, x, [TransformStep(kind, dim, n, norm)])


@rule(*(f"fft_{kind}{count}" for kind in _SEVERAL for count in ("2", "n")))
def transform_several(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Transform several dimensions, by default two or all."""
    x, layout = args[0], args[0]._layout
    outlines(func, args, kwargs)
    lengths = argument(args, kwargs, 1, "s")
    given = argument(args, kwargs, 2, "dim", (-2, -1) if name.endswith("2") else None)
    norm = argument(args, kwargs, 3, "norm")
    ndim = len(layout.shape)
    if given is None:  # the last ones, as many as there are lengths
        given = range(ndim - (ndim if lengths is None else len(lengths)), ndim)
    # in the given order: the last of them may be the real one
    dims = [dim % ndim for dim in ((given,) if isinstance(given, int) else given)]
    if not dims:  # torch returns its input in the dtype of a transform
        return x if x.is_complex() else x + 0j
    sizes = [None] * len(dims) if lengths is None else [None if n == -1 else n for n in lengths]
    kind = name.removeprefix("fft_")[:-1]
    most, last, _ = _SEVERAL[kind]
    steps = [
        TransformStep(most, dim, n, norm, tuple(sorted({*dims} - {dim})))
        for dim, n in zip(dims, sizes, strict=True)
    ]
    steps[-1] = replace(steps[-1], kind=last)
    return _transformed(kind, x, steps)


def _transformed(kind: str, x: Tensor, steps: list[TransformStep]) -> Tensor:
    """Apply the steps of a transform, of which only the last one may be real."""
    dims = tuple(sorted(step.dim for step in steps))
    home = _home(x._layout, dims)
    # a single dimension that is whole, here and at home, is transformed where it is
    if home is not None and (len(dims) > 1 or any(e.is_split(dims[0]) for e in (x._layout, home))):
        if len(steps) == 1:  # the batch hosts best: models mix channels next, and need all of them
            steps = [replace(steps[0], hosts=(0,))]
        if kind in _BACK:
            return _back(kind, x, _ordered(kind, home, steps), home)
        if (known := homes.get()) is not None:
            known[dims] = x._layout
        return _there(x, _ordered(kind, x._layout, steps))
    most, _, is_first = _SEVERAL[kind]
    if is_first:
        x = steps[-1](x)
    # The others commute: all whole dimensions at once, then split ones, one after the other.
    whole = [step for step in steps[:-1] if not x._layout.is_split(step.dim)]
    if whole:
        function = getattr(torch.fft, f"{most}n")
        at = [step.dim for step in whole]
        lengths = [x.shape[step.dim] if step.n is None else step.n for step in whole]
        x = along(x, at, partial(of_part, function, s=lengths, dim=at, norm=steps[-1].norm))
    for step in steps[:-1]:
        if x._layout.is_split(step.dim):
            x = step(x)
    return x if is_first else steps[-1](x)


# In the running model, the layout of the last tensor that was transformed, by its dimensions.
homes: ContextVar[dict[tuple[int, ...], Layout] | None] = ContextVar("homes", default=None)


def _home(layout: Layout, dims: tuple[int, ...]) -> Layout | None:
    """The layout of the result of an inverse transform, except lengths; None if spectra come back.

    It is that of the last tensor that was transformed; if there is none, axis d splits dimension d.
    """
    # A checkpoint may recompute outside of the model.
    model = None if in_checkpoint() or in_backward() else running.get()
    if model is None or model != layout.partition or model.dim != len(layout.shape):
        return None
    return (homes.get() or {}).get(dims) or layout_on(model, layout.shape)


@dataclass(frozen=True, eq=False)
class HalfTransform(Unfinished):
    """A transform whose steps along split dimensions are left to be done.

    Args:
        half: the tensor after the other steps.
        steps: the steps that are left.

    Attributes:
        waiting: slices that were read, before the last step.
        hosted: the same slices after it, with its whole dimension.
        taken: the same slices after it, with some of its modes.
    """

    half: Tensor
    steps: tuple[TransformStep, ...]
    waiting: dict[Any, Tensor] = field(default_factory=dict, init=False)
    hosted: dict[Any, Tensor] = field(default_factory=dict, init=False)
    taken: dict[tuple[Any, Frequencies], Tensor] = field(default_factory=dict, init=False)

    @property
    def layout(self) -> Layout:
        """The layout of the whole transform."""
        return reduce(lambda layout, step: step.layout(layout), self.steps, self.half._layout)

    def whole(self) -> Tensor:
        return self.picked([(0, n, 1) for n in self.layout.shape])

    def picked(self, runs: Sequence[Run]) -> Tensor:
        step = self.steps[-1]
        left = {each.dim for each in self.steps}
        last = {dim for dim in range(len(runs)) if self.half._layout.is_split(dim)} - left
        # Models read several slices that differ in one dimension: what they share is sent once.
        # Slices that were read without a graph have none for calls that need it.
        modes_of_autograd = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = (modes_of_autograd, *(run for dim, run in enumerate(runs) if dim != step.dim))
        if key not in self.waiting:
            x = self._cut(self.half, {*range(len(runs))} - last - left, runs)
            for each in self.steps[:-1]:
                x = self._cut(each.at_hosts(x), {each.dim}, runs)
            self.waiting[key] = x
        x, n = self.waiting[key], self.layout.shape[step.dim]
        modes = tuple((k - self.shifts[step.dim]) % n for k in range(*runs[step.dim]))
        if key not in self.hosted and (key, modes) not in self.taken:
            if step.sums_less(x, self._num_modes(key, modes)):
                self.taken[key, modes] = step.truncated(x, modes)
            else:
                self.hosted[key] = step.at_hosts(x)
        if (key, modes) in self.taken:
            return self._cut(self.taken[key, modes], last, runs)
        return self._cut(self.hosted[key], {*last, step.dim}, runs)

    def _num_modes(self, key: Any, modes: Frequencies) -> int:
        """The expected number of modes that are read together with these.

        For frequencies of both signs, models read as many from the end as from the start.
        """
        num_before = sum(len(known) for same, known in self.taken if same == key)
        is_first = num_before == 0 and modes[:1] == (0,) and self.steps[-1].kind == "fft"
        return num_before + len(modes) * (2 if is_first else 1)

    def _cut(self, x: Tensor, dims: set[int], runs: Sequence[Run]) -> Tensor:
        x = self.rolled(x, sorted(dims))
        if all(runs[dim] == (0, x.shape[dim], 1) for dim in dims):
            return x
        key = [slice(*run) if dim in dims else slice(None) for dim, run in enumerate(runs)]
        return cast(Tensor, x[tuple(key)])


def _there(x: Tensor, order: list[TransformStep]) -> Tensor:
    """The steps of a transform, one after the other; unfinished before the first movement.

    Transformed dimensions host the next ones: at the end, the last one is hosted by the others.
    """
    if len(order) > 1 or not x._layout.is_split(order[0].dim):
        x = order[0].at_hosts(x)
        while (order := order[1:]) and not x._layout.is_split(order[0].dim):
            x = order[0](x)
        if not order:
            return x
    else:
        x = cast(Tensor, x.clone())  # the operand may be changed in place before it is transformed
    todo = HalfTransform((0,) * x.dim(), x, tuple(order))
    if not may_wait():
        return todo.whole()
    part = open_part(x)
    is_exact = not (part.is_floating_point() or part.is_complex())
    dtype = (torch.get_default_dtype() if is_exact else part.dtype).to_complex()
    like = torch.empty((), dtype=dtype, device=part.device, requires_grad=part.requires_grad)
    return left_unfinished(like, todo.layout, todo)


def _back(kind: str, x: Tensor, order: list[TransformStep], home: Layout) -> Tensor:
    """The steps of an inverse transform, one after the other, from host to host.

    Zeros around modes are added when their dimension is transformed.
    """
    zeros = unfinished_of(x)
    if not isinstance(zeros, Zeros) or not zeros.fills({step.dim for step in order}):
        runs = tuple((0, n, 1) for n in x._layout.shape)  # all of it is a piece
        zeros = Zeros((0,) * len(runs), open_part(x).new_empty(()), x._layout, ((runs, x),))
    modes, first = zeros.squeezed(), order[0]
    length = zeros.layout.shape[first.dim]
    away = [step.dim for step in order if home.is_split(step.dim)]
    if away == [first.dim] and first.gathers_less(modes, length, home):
        y = first.from_modes(modes, zeros.indices(first.dim), length, home)
        order = order[1:]
    else:
        y = modes.whole() if len(modes.pieces) > 1 else modes.pieces[0][1]
    for step in order:
        y = y.move_to(y._layout.hosted((step.dim,), step.hosts))
        y = step(zeros.widened(y, step.dim))
    if kind == "irfft" and y.is_complex():
        y = cast(Tensor, y.real)
    return y.move_to(home.split_like(y._layout.shape))


_BACK = frozenset(("ifft", "irfft", "hfft"))


def _ordered(kind: str, layout: Layout, steps: list[TransformStep]) -> list[TransformStep]:
    """Order the steps of a transform for a tensor in a layout, or of an inverse one to it.

    A transform begins with whole dimensions, which then host the others. An inverse transform
    begins with the dimensions that are split at home: the others are transformed there, where
    nothing more is sent. The real one would be the first of a transform, and the last of an inverse
    one. If it cannot be, a complex transform replaces it: of a transform, half is kept; of an
    inverse one, the real part is taken at the end.
    """
    *rest, real = steps
    is_back = kind in _BACK
    split = {s.dim for s in steps if layout.is_split(s.dim)}
    order = sorted(rest, key=lambda step: (step.dim in split) != is_back)
    if real.dim not in split or len(split) == len(steps) or kind in ("hfft", "ihfft"):
        return [*order, real] if is_back else [real, *order]
    place = sum((step.dim in split) == is_back for step in order)
    real = replace(real, kind={"rfft": "half", "irfft": "doubled"}.get(kind, real.kind))
    return [*order[:place], real, *order[place:]]


@rule("fft_fftshift", "fft_ifftshift")
def shift(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """Roll each dimension by half of its length."""
    shifts = _shifts(name, func, args, kwargs)
    return args[0].roll(list(shifts.values()), list(shifts))


@early("fft_fftshift", "fft_ifftshift")
def shift_early(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The same for an unfinished tensor: the shift is recorded."""
    x, unfinished = args[0], unfinished_of(args[0])
    assert unfinished is not None
    return left_unfinished(x, x._layout, unfinished.shifted(_shifts(name, func, args, kwargs)))


def _shifts(name: str, func: Any, args: Arguments, kwargs: Settings) -> dict[int, int]:
    """The shift of each dimension."""
    x = args[0]
    outlines(func, args, kwargs)  # torch's own errors
    dims = dims_of(argument(args, kwargs, 1, "dim"), x._layout)
    back = name == "fft_ifftshift"  # which differs for odd lengths
    return {dim: (x.shape[dim] + back) // 2 for dim in dims}
