"""Unfinished tensors: values that a model leaves out are left out before anything is sent.

A neural operator transforms, selects a few modes R, mixes them, puts them into zeros Rᵀ, and
transforms back. The selection along one dimension commutes with transforms along others:

    R F = (R₁ F₁) (R₂ F₂),    F⁻¹ Rᵀ = (F₁⁻¹ R₁ᵀ) (F₂⁻¹ R₂ᵀ)

so if dimension 1 is split, only R₂ F₂ x has to be sent there, and as many values back. But torch
computes F x first, and R later. So in a converted model a transform stops before the first movement
that could send less, and zeros with modes written into them stay a list of these. Rules for slices,
shifts and inverse transforms support both (`early`); anything else reads the part of such a tensor,
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

# Rules for unfinished first operands, by the names of torch's functions. Such a rule returns
# NotImplemented if the operand must be finished: then the rule of the table is followed.
EARLY: dict[str, Rule] = {}


def early(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for unfinished first operands of the torch functions of these names."""

    def enter(function: Rule) -> Rule:
        EARLY.update(dict.fromkeys(names, function))
        return function

    return enter


@dataclass(frozen=True, eq=False)
class Unfinished:
    """The description of a tensor whose part is computed when it is read.

    Args:
        shifts: how far each dimension is rolled at the end.
    """

    shifts: Shape

    def finished(self, layout: Layout) -> torch.Tensor:
        """The part, in the layout of its tensor."""
        # The caller may have switched off gradients or torch's functions. Pieces that were made
        # without gradients have none anyway.
        with torch.inference_mode(False), torch.enable_grad(), _EnableTorchFunction():
            return open_part(self.whole().move_to(layout))

    def whole(self) -> Tensor:
        """The whole tensor."""
        raise NotImplementedError(f"{type(self).__name__} must implement `whole`")

    def picked(self, runs: Sequence[Run]) -> Tensor | None:
        """Slices of it, in steps of one; None if it must be finished first."""
        return None

    def filled(self, runs: Sequence[Run], value: Tensor) -> Self | None:
        """The same with other values in slices; None if it must be finished first."""
        return None

    def shifted(self, shifts: Mapping[int, int]) -> Self:
        """The same with some dimensions rolled further."""
        new = [shift + shifts.get(dim, 0) for dim, shift in enumerate(self.shifts)]
        return replace(self, shifts=tuple(new))

    def rolled(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """A tensor with the final shifts of these dimensions."""
        dims = [dim for dim in dims if self.shifts[dim]]
        if dims:
            x = cast(Tensor, x.roll([self.shifts[dim] for dim in dims], dims))
        return x


@dataclass(frozen=True, eq=False)
class Zeros(Unfinished):
    """Zeros, except for pieces that were written into them and do not overlap.

    Args:
        like: a plain tensor with the dtype and the device.
        layout: the layout of the whole.
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
        """Zeros with the overlaps of the pieces with these slices."""
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
        if value.device != self.like.device:  # to raise torch's own error
            return None
        for others, _ in self.pieces:
            if all(a < d and c < b for (a, b, _), (c, d, _) in zip(runs, others, strict=True)):
                return None
        if 0 in shape:
            return self
        piece = cast(Tensor, value.to(self.like.dtype, copy=True))
        return replace(self, pieces=(*self.pieces, (tuple(runs), piece)))

    def like_pieces(self) -> torch.Tensor:
        """A tensor with the dtype and the device, which requires a gradient if a piece does."""
        needs = any(piece.requires_grad for _, piece in self.pieces)
        with torch.inference_mode(False):
            return torch.empty_like(self.like, requires_grad=needs)

    def fills(self, dims: set[int]) -> bool:
        """Whether there are pieces, and all are complete along all dimensions except some."""
        others = {*range(len(self.shifts))} - dims
        return bool(self.pieces) and all(
            runs[dim] == (0, self.layout.shape[dim], 1) and not self.shifts[dim]
            for runs, _ in self.pieces
            for dim in others
        )

    def held(self, dim: int) -> tuple[Interval, ...]:
        """The indices along a dimension that pieces have, as disjoint intervals."""
        found: list[Interval] = []
        for start, stop in sorted({runs[dim][:2] for runs, _ in self.pieces}):
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(stop, found[-1][1])
            else:
                found.append((start, stop))
        return tuple(found)

    def indices(self, dim: int) -> tuple[int, ...]:
        """The final positions of the indices along a dimension that pieces have."""
        length, shift = self.layout.shape[dim], self.shifts[dim]
        return tuple((k + shift) % length for held in self.held(dim) for k in range(*held))

    def squeezed(self) -> Zeros:
        """The pieces alone, without the indices that none of them has."""
        held = [self.held(dim) for dim in range(len(self.shifts))]

        def squeeze(runs: Sequence[Run]) -> tuple[Run, ...]:
            gaps = [_gap_before(run[0], each) for run, each in zip(runs, held, strict=True)]
            return tuple((a - g, b - g, 1) for (a, b, _), g in zip(runs, gaps, strict=True))

        pieces = tuple((squeeze(runs), piece) for runs, piece in self.pieces)
        shape = [sum(stop - start for start, stop in each) for each in held]
        layout = self.pieces[0][1]._layout.resized(shape)
        return Zeros((0,) * len(held), self.like, layout, pieces)

    def widened(self, x: Tensor, dim: int) -> Tensor:
        """A squeezed tensor with a whole dimension again, with zeros around pieces and in gaps."""
        held, length = self.held(dim), self.layout.shape[dim]
        if held == ((0, length),):
            return self.rolled(x, [dim])
        ends = [stop for _, stop in held[:-1]]
        starts = [0, *ends]  # each run is padded with the zeros before it, the last also after it
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
    """The number of indices before this one that no piece has."""
    stops = [0, *(stop for _, stop in held)]
    return sum(
        start - stop for stop, (start, _) in zip(stops, held, strict=False) if start <= index
    )


def may_wait() -> bool:
    """Whether a tensor may be left unfinished.

    Transforms of torch.func handle each function by itself, and when a checkpoint recomputes, it
    may read tensors in another order.
    """
    return not (in_transform() or outlining.get() or in_checkpoint() or in_backward())


def left_unfinished(like: torch.Tensor, layout: Layout, unfinished: Unfinished) -> Tensor:
    """A tensor whose part is computed when it is read.

    Args:
        like: a tensor with its dtype and device, which requires a gradient if it does.
        layout: the layout of the tensor.
        unfinished: the description of it.
    """
    with DisableTorchFunctionSubclass():  # `like` may be unfinished itself
        new = Tensor(like, layout)
    del new.__dict__["_part"]
    new.__dict__["_unfinished"] = unfinished
    return new


def unfinished_of(x: Any) -> Unfinished | None:
    """The description of an unfinished tensor; None for any other."""
    found: Unfinished | None = x.__dict__.get("_unfinished") if isinstance(x, Tensor) else None
    return found
