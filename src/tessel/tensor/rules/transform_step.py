"""A step of a Fourier transform: along one dimension, which may be split.

A fast transform needs all points of a line on one worker: a split dimension goes to its hosts
(`hosting.py`). For few modes, adding the terms of all workers sends less, and so does, for the
inverse, giving all workers these modes (`tensor/truncated_transform.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from tessel.core import boxes
from tessel.core.layout import Cut, Layout, Shape
from tessel.tensor.rules.hosting import along
from tessel.tensor.table import computed, made, moved
from tessel.tensor.tensor import Tensor, move, open_part
from tessel.tensor.truncated_transform import DTYPES, MOST_MODES, REAL, Waves
from tessel.tensor.unfinished import Zeros
from tessel.tensor.windowed import outline

Frequencies = tuple[int, ...]  # frequencies


@dataclass(frozen=True)
class TransformStep:
    """A transform along one dimension.

    Args:
        kind: the name of torch's function; "half" and "doubled" for the functions below.
        dim: the dimension.
        n: its length for the transform; None for its own.
        norm: the norm of the transform.
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
        compute = partial(of_part, function, n=self.n, dim=self.dim, norm=self.norm)
        return cast(Tensor, along(x, (self.dim,), compute))

    def at_hosts(self, x: Tensor) -> Tensor:
        """The transform, which stays with the hosts."""
        return self(x.move_to(x._layout.hosted((self.dim,), self.hosts)))

    def layout(self, layout: Layout) -> Layout:
        """The layout of the result of a transform, not an inverse one, at the hosts."""
        there, shape = layout.hosted((self.dim,), self.hosts), list(layout.shape)
        n = shape[self.dim] if self.n is None else self.n
        shape[self.dim] = n // 2 + 1 if self.kind in ("half", "rfft", "ihfft") else n
        return there.split_like(tuple(shape))

    def sums_less(self, x: Tensor, num_modes: int) -> bool:
        """Whether the terms of this number of modes are smaller than all points sent to hosts."""
        cut, length, dtype = x._layout.cuts[self.dim], x._layout.shape[self.dim], x.dtype
        if dtype not in DTYPES or num_modes > MOST_MODES or not cut.is_consecutive(length):
            return False
        size = dtype.to_complex().itemsize
        return num_modes * len(cut.intervals) * size < length * dtype.itemsize

    def truncated(self, x: Tensor, modes: Frequencies) -> Tensor:
        """Some modes, each the sum of the terms of all workers.

        They are split like the dimension; if there are fewer than workers, hosts are split.
        """
        layout, dim, count = x._layout, self.dim, len(modes)
        cut, box = layout.cuts[dim], layout.box()
        assert box is not None
        n = layout.shape[dim] if self.n is None else self.n
        waves = Waves(self.kind, n, self.norm, modes, box[dim])
        part = computed(partial(waves.analyzed, dim=dim), open_part(x))
        even = Cut(cut.axes, boxes.balanced(count, len(cut.intervals)))
        target = layout.recut(dim, even, count)
        if count < len(cut.intervals):
            target = target.hosted((dim,), self.hosts)
        terms = layout.recut(dim, Cut.whole(count), count)  # separate along these axes
        return made(move(terms, target).apply(part), target)

    def gathers_less(self, zeros: Zeros, length: int, home: Layout) -> bool:
        """Whether modes for all workers are smaller than points sent from hosts to their places.

        Args:
            zeros: the modes, without zeros along this dimension.
            length: the number of modes, with zeros.
            home: the layout of the result.
        """
        dtype, num_modes = zeros.like.dtype, zeros.layout.shape[self.dim]
        if dtype not in DTYPES or not dtype.is_complex or num_modes > MOST_MODES:
            return False
        parts = len(home.cuts[self.dim].intervals)
        size = (dtype.to_real() if self.kind in REAL else dtype).itemsize
        return num_modes * parts * dtype.itemsize < self._num_points(length) * size

    def from_modes(self, zeros: Zeros, modes: Frequencies, length: int, home: Layout) -> Tensor:
        """Each worker's own points from modes, which are sent to all workers.

        Args:
            zeros: the modes; all other transformed dimensions are whole at home.
            modes: their frequencies.
            length: the number of modes, with zeros.
            home: the layout of the result, except lengths.
        """
        dim, shape = self.dim, list(zeros.layout.shape)
        parts = [moved(piece, self._copied(home, piece._layout.shape)) for _, piece in zeros.pieces]
        part = parts[0]
        if len(parts) > 1:
            read = self._copied(home, zeros.layout.shape)
            part = part.new_zeros(read.local_shape)
            for (runs, _), each in zip(zeros.pieces, parts, strict=True):
                slices = [slice(*run) for run in runs]
                at = [slice(None) if read.is_split(d) else s for d, s in enumerate(slices)]
                part[tuple(at)] = each
        shape[dim] = self._num_points(length)
        points = home.split_like(tuple(shape))
        box = points.box()
        assert box is not None
        waves = Waves(self.kind, shape[dim], self.norm, modes, box[dim])
        return made(computed(partial(waves.synthesized, dim=dim), part), points)

    def _copied(self, home: Layout, shape: Shape) -> Layout:
        """The layout at home, but with separate copies of this dimension on all workers."""
        return home.split_like(shape).recut(self.dim, Cut.whole(shape[self.dim]))

    def _num_points(self, length: int) -> int:
        """The number of points of an inverse transform."""
        if self.n is not None:
            return self.n
        return length if self.kind == "ifft" else 2 * (length - 1)


def _half(x: torch.Tensor, n: int | None, dim: int, norm: str | None) -> torch.Tensor:
    """The half of a transform that `rfft` keeps, for complex values."""
    found = torch.fft.fft(x, n, dim, norm)
    return found.narrow(dim, 0, found.shape[dim] // 2 + 1)


def _doubled(x: torch.Tensor, n: int | None, dim: int, norm: str | None) -> torch.Tensor:
    """A transform whose real part is that of `irfft`, also after transforms of other dimensions.

    The sum of a mode and its conjugate, as in `irfft`, is twice the real part of the mode.
    """
    n = 2 * (x.shape[dim] - 1) if n is None else n
    x = x.narrow(dim, 0, min(x.shape[dim], n // 2 + 1))
    factors = torch.full((x.shape[dim],), 2.0, dtype=x.dtype.to_real(), device=x.device)
    factors[0] = 1
    factors[n - n // 2 :] = 1  # for an even length the last mode has no conjugate one
    shape = [-1 if each == dim else 1 for each in range(x.dim())]
    return torch.fft.ifft(x * factors.reshape(shape), n, dim, norm)


_PARTLY = {"half": _half, "doubled": _doubled}


def of_part(function: Any, part: torch.Tensor, **settings: Any) -> torch.Tensor:
    """The transform of a part; libraries reject empty tensors."""
    if part.numel():
        found: torch.Tensor = function(part, **settings)
        return found
    like = function(outline(tuple(part.shape), part.dtype), **settings)
    return torch.zeros(like.shape, dtype=like.dtype, device=part.device)
