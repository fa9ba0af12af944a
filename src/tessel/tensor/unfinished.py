"""Unfinished tensors: what a model leaves out is left out before anything travels.

A neural operator transforms, takes a few modes R, mixes them, puts them into zeros Rᵀ, and
transforms back. What R leaves out along one dimension has no part in transforms along others:

    R F = (R₁ F₁) (R₂ F₂),    F⁻¹ Rᵀ = (F₁⁻¹ R₁ᵀ) (F₂⁻¹ R₂ᵀ)

so where dimension 1 is split, only R₂ F₂ x has to travel there, and as much back. But torch is
asked for F x first, and for R later. So in a converted model a transform stops before the first
movement that could send less, and zeros that modes are written to stay a list of these. Slices,
shifts and transforms back know both; anything else asks for the part of such a tensor, which
finishes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch._C import DisableTorchFunctionSubclass, _EnableTorchFunction

from tessel.core.agreement import in_forward_mode
from tessel.core.layout import Layout, Shape
from tessel.tensor.table import in_backward, in_checkpoint, made, outlining
from tessel.tensor.tensor import Tensor, open_part

Run = tuple[int, int, int]  # start, stop and step


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
        """Some slices of it, or None if it has to be finished first."""
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

    def fills(self, dims: set[int]) -> bool:
        """Whether there are pieces, which are all of the tensor but for some dimensions."""
        others = {*range(len(self.shifts))} - dims
        return bool(self.pieces) and all(
            runs[dim] == (0, self.layout.shape[dim], 1) and not self.shifts[dim]
            for runs, _ in self.pieces
            for dim in others
        )

    def boxed(self) -> tuple[Tensor, list[tuple[int, int]]]:
        """What is in the least box around all pieces, and the bounds of that."""
        box = [
            (min(start for start, _, _ in runs), max(stop for _, stop, _ in runs))
            for runs in zip(*(runs for runs, _ in self.pieces), strict=True)
        ]
        first = self.pieces[0][1]
        if len(self.pieces) == 1:
            return first, box
        layout = first._layout.resized([stop - start for start, stop in box])
        moved = tuple(
            (tuple((a - s, b - s, 1) for (a, b, _), (s, _) in zip(runs, box, strict=True)), piece)
            for runs, piece in self.pieces
        )
        return Zeros((0,) * len(box), self.like, layout, moved).whole(), box

    def widened(self, x: Tensor, dim: int, bounds: tuple[int, int]) -> Tensor:
        """A whole dimension of what is in the box, with the zeros around it."""
        behind = self.layout.shape[dim] - bounds[1]
        if bounds[0] or behind:
            x = cast(Tensor, F.pad(x, (*[0, 0] * (x.dim() - 1 - dim), bounds[0], behind)))
        return self.rolled(x, [dim])


def may_wait() -> bool:
    """Whether a tensor may be left unfinished.

    Transforms of torch.func see each function by itself, and what a checkpoint computes again, it
    may ask for in another order.
    """
    active = torch._C._are_functorch_transforms_active() or in_forward_mode()
    return not (active or outlining.get() or in_checkpoint() or in_backward())


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


def note_piece(x: Tensor, runs: Sequence[Any], value: Any) -> bool:
    """Whether a tensor is a piece of zeros now, and need not be written into them."""
    zeros = unfinished_of(x)
    if not isinstance(zeros, Zeros) or not isinstance(value, Tensor) or any(zeros.shifts):
        return False
    if not all(isinstance(run, tuple) and run[2] == 1 for run in runs):
        return False
    shape = tuple(stop - start for start, stop, _ in runs)
    if value._layout.shape != shape or value._layout.partition != zeros.layout.partition:
        return False
    if value.device != zeros.like.device:  # torch's own error
        return False
    for others, _ in zeros.pieces:
        if all(a < d and c < b for (a, b, _), (c, d, _) in zip(runs, others, strict=True)):
            return False
    if 0 not in shape:
        piece: Any = value.to(zeros.like.dtype, copy=True)
        x.__dict__["_unfinished"] = replace(zeros, pieces=(*zeros.pieces, (tuple(runs), piece)))
        if piece.requires_grad:
            with DisableTorchFunctionSubclass():
                x.requires_grad_()
    return True
