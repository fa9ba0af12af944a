"""Unfinished tensors: what a model leaves out is left out before anything travels.

A neural operator transforms, takes a few modes R, mixes them, puts them into zeros Rᵀ, and
transforms back. What R leaves out along one dimension has no part in transforms along others:

    R F = (R₁ F₁) (R₂ F₂),    F⁻¹ Rᵀ = (F₁⁻¹ R₁ᵀ) (F₂⁻¹ R₂ᵀ)

so where dimension 1 is split, only R₂ F₂ x has to travel there, and as much back. But torch is
asked for F x first, and for R later. So in a converted model a transform stops before the first
movement that could send less, and zeros that modes are written to stay a list of these. Slices,
shifts and transforms back know both (`early`); anything else asks for the part of such a tensor,
which finishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch._C import DisableTorchFunctionSubclass, _EnableTorchFunction

from tessel.core.boxes import Interval
from tessel.core.context import in_transform
from tessel.core.layout import Layout, Shape
from tessel.tensor.table import Rule, in_backward, in_checkpoint, made, outlining
from tessel.tensor.tensor import Tensor, open_part

Run = tuple[int, int, int]  # start, stop and step

# By the names of torch's functions, what they do with a first operand that is not finished. Such a
# rule gives NotImplemented where the operand has to be: then the one of the table is followed.
EARLY: dict[str, Rule] = {}


def early(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for unfinished first operands of the torch functions of these names."""

    def enter(function: Rule) -> Rule:
        EARLY.update(dict.fromkeys(names, function))
        return function

    return enter


@dataclass(frozen=True, eq=False)
class Unfinished:
    """What is known of a tensor whose part is computed when it is asked for.

    Args:
        shifts: how far each dimension is rolled at the end.
    """

    shifts: Shape

    def finished(self, layout: Layout) -> torch.Tensor:
        """The part, in the layout that its tensor has."""
        # Who asks may compute without gradients, or without torch's functions. What was made
        # without gradients has none by itself.
        with torch.inference_mode(False), torch.enable_grad(), _EnableTorchFunction():
            return open_part(self.whole().move_to(layout))

    def whole(self) -> Tensor:
        """All of it."""
        raise NotImplementedError(f"{type(self).__name__} must implement `whole`")

    def picked(self, runs: Sequence[Run]) -> Tensor | None:
        """Some slices of it, in steps of one; None if it has to be finished first."""
        return None

    def filled(self, runs: Sequence[Run], value: Tensor) -> Self | None:
        """The same with other values in some slices; None if it has to be finished first."""
        return None

    def shifted(self, shifts: Mapping[int, int]) -> Self:
        """The same, with some dimensions rolled further."""
        new = [shift + shifts.get(dim, 0) for dim, shift in enumerate(self.shifts)]
        return replace(self, shifts=tuple(new))

    def rolled(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """These dimensions of a tensor as they are at the end."""
        dims = [dim for dim in dims if self.shifts[dim]]
        if dims:
            x = cast(Tensor, x.roll([self.shifts[dim] for dim in dims], dims))
        return x


@dataclass(frozen=True, eq=False)
class Zeros(Unfinished):
    """Zeros, but for pieces that were written into them and do not overlap.

    Args:
        like: a plain tensor with the dtype and the device.
        layout: of the whole.
        pieces: spread tensors, with the slices that they fill.
    """

    like: torch.Tensor
    layout: Layout
    pieces: tuple[tuple[tuple[Run, ...], Tensor], ...] = ()

    def whole(self) -> Tensor:
        x = made(self.like.new_zeros(self.layout.local_shape), self.layout)
        for runs, piece in self.pieces:
            x[tuple(slice(*run) for run in runs)] = piece
        return self.rolled(x, range(len(self.shifts)))

    def picked(self, runs: Sequence[Run]) -> Tensor | None:
        """Zeros again, with what there is of the pieces."""
        if any(self.shifts):
            return None
        pieces = []
        for held, piece in self.pieces:
            met = [(max(a, c), min(b, d)) for (a, b, _), (c, d, _) in zip(held, runs, strict=True)]
            if all(a < b for a, b in met):
                inside = [slice(a - s, b - s) for (a, b), (s, _, _) in zip(met, held, strict=True)]
                place = [(a - s, b - s, 1) for (a, b), (s, _, _) in zip(met, runs, strict=True)]
                pieces.append((tuple(place), cast(Tensor, piece[tuple(inside)])))
        layout = self.layout.resized([stop - start for start, stop, _ in runs])
        zeros = replace(self, layout=layout, pieces=tuple(pieces))
        return left_unfinished(zeros.like_pieces(), layout, zeros)

    def filled(self, runs: Sequence[Run], value: Tensor) -> Zeros | None:
        shape = tuple(stop - start for start, stop, _ in runs)
        if any(self.shifts) or value._layout.shape != shape:
            return None
        if value._layout.partition != self.layout.partition:
            return None
        if value.device != self.like.device:  # torch's own error
            return None
        for others, _ in self.pieces:
            if all(a < d and c < b for (a, b, _), (c, d, _) in zip(runs, others, strict=True)):
                return None
        if 0 in shape:
            return self
        piece = cast(Tensor, value.to(self.like.dtype, copy=True))
        return replace(self, pieces=(*self.pieces, (tuple(runs), piece)))

    def like_pieces(self) -> torch.Tensor:
        """A tensor with the dtype and the device, which needs a gradient if a piece does."""
        needs = any(piece.requires_grad for _, piece in self.pieces)
        with torch.inference_mode(False):
            return torch.empty_like(self.like, requires_grad=needs)

    def fills(self, dims: set[int]) -> bool:
        """Whether there are pieces, which are all of the tensor but for some dimensions."""
        others = {*range(len(self.shifts))} - dims
        return bool(self.pieces) and all(
            runs[dim] == (0, self.layout.shape[dim], 1) and not self.shifts[dim]
            for runs, _ in self.pieces
            for dim in others
        )

    def held(self, dim: int) -> tuple[Interval, ...]:
        """The indices of a dimension that pieces have, in as many intervals as there are gaps."""
        found: list[Interval] = []
        for start, stop in sorted({runs[dim][:2] for runs, _ in self.pieces}):
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(stop, found[-1][1])
            else:
                found.append((start, stop))
        return tuple(found)

    def indices(self, dim: int) -> tuple[int, ...]:
        """Where what pieces have of a dimension is at the end."""
        length, shift = self.layout.shape[dim], self.shifts[dim]
        return tuple((k + shift) % length for held in self.held(dim) for k in range(*held))

    def squeezed(self) -> Zeros:
        """What the pieces are, without all indices that none of them has."""
        held = [self.held(dim) for dim in range(len(self.shifts))]

        def squeeze(runs: Sequence[Run]) -> tuple[Run, ...]:
            gaps = [_gap_before(run[0], each) for run, each in zip(runs, held, strict=True)]
            return tuple((a - g, b - g, 1) for (a, b, _), g in zip(runs, gaps, strict=True))

        pieces = tuple((squeeze(runs), piece) for runs, piece in self.pieces)
        shape = [sum(stop - start for start, stop in each) for each in held]
        layout = self.pieces[0][1]._layout.resized(shape)
        return Zeros((0,) * len(held), self.like, layout, pieces)

    def widened(self, x: Tensor, dim: int) -> Tensor:
        """A whole dimension of what was squeezed, with the zeros around it and in its gaps."""
        held, length = self.held(dim), self.layout.shape[dim]
        if held == ((0, length),):
            return self.rolled(x, [dim])
        ends = [stop for _, stop in held[:-1]]
        starts = [0, *ends]  # each run comes with the zeros before it, and the last one with all
        found, at = [], 0
        for (start, stop), begin in zip(held, starts, strict=True):
            behind = length - stop if stop == held[-1][1] else 0
            run = cast(Tensor, x.narrow(dim, at, stop - start)) if len(held) > 1 else x
            around = (*[0, 0] * (x.dim() - 1 - dim), start - begin, behind)
            found.append(F.pad(run, around) if any(around) else run)
            at += stop - start
        wide: Any = found[0] if len(found) == 1 else torch.cat(found, dim)
        return self.rolled(wide, [dim])


def _gap_before(index: int, held: Sequence[Interval]) -> int:
    """How many indices before this one no piece has."""
    stops = [0, *(stop for _, stop in held)]
    return sum(
        start - stop for stop, (start, _) in zip(stops, held, strict=False) if start <= index
    )


def may_wait() -> bool:
    """Whether a tensor may be left unfinished.

    Transforms of torch.func see each function by itself, and what a checkpoint computes again, it
    may ask for in another order.
    """
    return not (in_transform() or outlining.get() or in_checkpoint() or in_backward())


def left_unfinished(like: torch.Tensor, layout: Layout, unfinished: Unfinished) -> Tensor:
    """A tensor whose part is computed when it is asked for.

    Args:
        like: a tensor with its dtype and device, which needs a gradient if it does.
        layout: of the tensor.
        unfinished: what is known of it.
    """
    with DisableTorchFunctionSubclass():  # `like` may be unfinished itself
        new = Tensor(like, layout)
    del new.__dict__["_part"]
    new.__dict__["_unfinished"] = unfinished
    return new


def unfinished_of(x: Any) -> Unfinished | None:
    """What is known of a tensor that is not finished."""
    found: Unfinished | None = x.__dict__.get("_unfinished") if isinstance(x, Tensor) else None
    return found
