"""Truncated transforms: few modes of a split dimension, by a sum of small products.

A mode is a sum over all points, and a point of the inverse transform is a sum over all modes:

    X[k] = Σ_j w[j, k] x[j],    y[j] = Σ_k w[j, k] X[k],    w[j, k] = c exp(∓2πi j k / n)

So a worker multiplies its points by these waves, and the terms of the modes are added: only modes
are sent, where a fast transform needs all points on one worker. For the inverse all workers get the
modes, and each computes its own points. The waves at points j = j₀ + p q + r, after p blocks of q
points, are products w[j₀ + p q, k] w[r, k]: so only few numbers are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import pi

import torch
import torch.nn.functional as F  # noqa: N812

from tessel.core.context import is_compiling
from tessel.core.numbers import to_keep

# For more modes a product takes several times as long as a fast transform.
MOST_MODES = 64
DTYPES = frozenset((torch.float32, torch.float64, torch.complex64, torch.complex128))
_BLOCK = 1024  # the points of a block, at most

INVERSE = frozenset(("ifft", "irfft", "doubled", "ihfft"))
OF_HALVES = frozenset(("irfft", "doubled", "hfft"))  # whose modes also represent conjugate ones
REAL = frozenset(("irfft", "hfft"))  # with real results


@dataclass(frozen=True)
class Waves:
    """Waves of some frequencies over the points of one worker.

    Args:
        kind: the name of torch's function; "half" and "doubled" as in `fourier.py`.
        n: the number of points of the transform on all workers.
        norm: the norm of the transform.
        modes: the frequencies.
        points: the interval of this worker's points.
    """

    kind: str
    n: int
    norm: str | None
    modes: tuple[int, ...]
    points: tuple[int, int]

    def analyzed(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The terms of this worker's points in the modes, along the same dimension."""
        kept = min(self.points[1], self.n) - self.points[0]  # the transform leaves others out
        count, block = self._blocks
        # In double precision, where no setting makes products less exact than a fast transform.
        x = part.movedim(dim, -1)[..., : max(0, kept)]
        x = x.to(torch.complex128 if x.is_complex() else torch.float64)
        x = F.pad(x, (0, count * block - x.shape[-1])).unflatten(-1, (count, block))
        steps, waves = self._table(part.device)
        if x.is_complex():
            terms = x @ waves
        else:
            terms = torch.view_as_complex(
                (x @ torch.view_as_real(waves).flatten(1)).unflatten(-1, (-1, 2))
            )
        found = (terms * steps).sum(-2).to(part.dtype.to_complex())
        return found.movedim(-1, dim)

    def synthesized(self, modes: torch.Tensor, dim: int) -> torch.Tensor:
        """This worker's points from all modes, along the same dimension."""
        start, stop = self.points
        steps, waves = self._table(modes.device)
        terms = modes.movedim(dim, -1).to(torch.complex128).unsqueeze(-2) * steps
        dtype = modes.dtype
        if self.kind in REAL:  # Re(u v) = Re u Re v - Im u Im v
            terms = torch.view_as_real(terms.resolve_conj()).flatten(-2)
            found = terms @ torch.view_as_real(waves.conj().resolve_conj()).flatten(1).mT
            dtype = dtype.to_real()
        else:
            found = terms @ waves.mT
        return found.flatten(-2)[..., : stop - start].movedim(-1, dim).to(dtype)

    @property
    def _blocks(self) -> tuple[int, int]:
        """The number of blocks, at least one, and the number of points of each."""
        length = max(1, self.points[1] - self.points[0])
        count = -(-length // _BLOCK)
        return count, -(-length // count)

    def _table(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The waves at the first point of each block, and those of the points of a block."""
        if is_compiling():  # a compiled graph has its own
            return self._waves(device)
        return _kept_waves(self, device)

    def _waves(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        count, block = self._blocks
        inverse = self.kind in INVERSE
        scale = {"ortho": self.n**-0.5, "forward": 1.0 if inverse else 1 / self.n}.get(
            self.norm or "backward", 1 / self.n if inverse else 1.0
        )
        modes = torch.tensor(self.modes, dtype=torch.int64, device=device)
        weights = torch.full((len(self.modes),), scale, dtype=torch.float64, device=device)
        if self.kind in OF_HALVES:
            # the first mode, and the last one of an even length, have no conjugate ones
            weights = torch.where((modes == 0) | (2 * modes == self.n), weights, 2 * weights)
            weights = torch.where(2 * modes > self.n, 0.0, weights)
        weights = torch.where(modes < self.n, weights, 0.0)  # a shorter transform has no others

        def at(points: torch.Tensor) -> torch.Tensor:
            # by integers, so that angles of far points are as exact as those of the first
            turns = (points[:, None] * modes) % self.n
            angles = turns.double() * ((2 if inverse else -2) * pi / self.n)
            return torch.polar(torch.ones_like(angles), angles)

        first = self.points[0] + block * torch.arange(count, device=device)
        return weights * at(first), at(torch.arange(block, device=device))


@lru_cache(maxsize=64)
def _kept_waves(waves: Waves, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    with to_keep():
        return waves._waves(device)
