"""Spectra: the coefficients of n modes among those of more points."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """The lowest modes of a Fourier transform of more points, along the last dimension.

    For an even number n of modes, one coefficient stands for both frequencies n/2 and -n/2, which
    n points cannot tell apart. So a spectrum is *cut* by adding what more points have at the two,
    as the transform of n points does, and *filled up* with half of the coefficient at each: then a
    real coefficient gives a real field, and what was filled up is cut to what it was. Of a real
    transform there is only n/2; at -n/2 it would have the conjugate. With equal weights, cutting
    and filling up are each other's adjoints.

    Args:
        modes: n.
        points: m, more than n.
        is_real: of real fields.
        is_halved: whether the frequencies n/2 and -n/2 count half, as in filling up. If not, they
            count fully, as in cutting.
    """

    modes: int
    points: int
    is_real: bool
    is_halved: bool

    @property
    def weight(self) -> float:
        """Of the frequencies n/2 and -n/2; that of a real transform stands for both."""
        if self.is_halved:
            return 0.5
        return 2.0 if self.is_real else 1.0

    @property
    def num_positive(self) -> int:
        """How many modes there are from zero up, without n/2."""
        return (self.modes + 1) // 2

    @property
    def num_negative(self) -> int:
        """How many there are below zero, without -n/2."""
        return 0 if self.is_real else (self.modes - 1) // 2

    def cut(self, y: Tensor) -> Tensor:
        """The coefficients of the modes, of those of all points."""
        parts = [y[..., : self.num_positive]]
        if self.modes % 2 == 0:
            top = y[..., self.modes // 2, None]
            low = top.conj() if self.is_real else y[..., self.points - self.modes // 2, None]
            weight = self.weight / 2 if self.is_real else self.weight
            parts.append(weight * (top + low))
        parts.append(y[..., y.shape[-1] - self.num_negative :])
        return torch.cat(parts, -1)

    def filled_up(self, y: Tensor) -> Tensor:
        """The coefficients of all points: those of the modes, and zeros."""
        before = [y[..., : self.num_positive]]
        behind = [y[..., y.shape[-1] - self.num_negative :]]
        if self.modes % 2 == 0:
            top = self.weight * y[..., self.modes // 2, None]
            before.append((top + top.conj()) / 2 if self.is_real else top)
            behind = behind if self.is_real else [top, *behind]
        length = self.points // 2 + 1 if self.is_real else self.points
        count = length - sum(each.shape[-1] for each in (*before, *behind))
        return torch.cat([*before, y.new_zeros(*y.shape[:-1], count), *behind], -1)
