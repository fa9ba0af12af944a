"""Discrete Fourier transforms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf, log2, prod
from typing import Any

import torch
from torch import Tensor

from tessel.core.linop import record_local
from tessel.operators.leaf import Leaf
from tessel.operators.local_transform import LocalTransform
from tessel.operators.memory import MemoryOrder, inverse_of, order_of
from tessel.operators.space import Shape, TensorSpace, checked_dtype, checked_length, complex_of


class ParDFT(Leaf):
    """The discrete Fourier transform, scaled as `torch.fft` does.

    With a real dtype it is the real transform, from `n` real numbers to the `n // 2 + 1` complex
    ones that are not redundant. `H` is the exact adjoint, which is not the inverse: for the complex
    transform it is `n` times the inverse. The inverse of the real transform is exact on the
    spectra of real numbers.

    With `padding`, the transform maps m = ⌊padding · n⌋ points to the coefficients of the n
    lowest modes, which are those of n points of a field without other modes. Its inverse
    fills up with zeros and gives the field at m points: F @ F.inv does not change the coefficients
    of a field, F.inv @ F keeps its lowest modes. By the 3/2 rule, the product of two fields at
    m = ⌊3n/2⌋ points has coefficients without aliasing errors.

    Args:
        T: a dtype of torch.
        n: the length.
        padding: the number of points for each mode, at least 1.

    >>> import tessel, torch
    >>> F = tessel.ParDFT(torch.float32, 5)
    >>> F.codomain, (F.inv @ F) * torch.ones(5)
    (complex64 3, tensor([1., 1., 1., 1., 1.]))
    >>> tessel.ParDFT(torch.float32, 5, padding=1.5).domain
    float32 7
    """

    def __init__(self, T: Any, n: int, padding: float = 1) -> None:
        dtype = checked_dtype("ParDFT", T)
        if dtype is torch.bfloat16:
            raise ValueError("ParDFT: torch has no complex numbers of bfloat16; use float32")
        self.modes = checked_length("ParDFT", "n", n)
        is_number = isinstance(padding, int | float) and not isinstance(padding, bool)
        if not is_number or not 1 <= padding < inf:
            raise ValueError(
                f"ParDFT: padding must be a number of at least 1 (1.5 for the 3/2 rule), got "
                f"{padding!r}"
            )
        # 1.15 · 100 is 114.99999999999999 in floating point: where padding · n is an integer,
        # rounding must not lose a point.
        points = floor(padding * self.modes + 1e-9)
        self.source = TensorSpace((points,), dtype)
        half = self.modes if self.source.is_complex else self.modes // 2 + 1
        self.target = TensorSpace((half,), complex_of(dtype))
        self.is_real = not self.source.is_complex
        self.is_padded = self.source.numel > self.modes  # more points than modes

    is_invertible = True

    @property
    def is_weighted(self) -> bool:
        """Whether it weights the numbers that stand for two of the whole transform."""
        return self.is_real and self.is_adjoint

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        if not self.is_padded:
            return JointTransform([(self, first)])(x)
        # Modes are cut, or filled up, where they are contiguous.
        order = self.order_after(order_of(x), [first])
        rows, last = x.permute(order), x.dim() - 1
        spectrum = Spectrum(self.modes, self.source.numel, self.is_real, self.is_inverse)
        transform = JointTransform([(self, last)])
        if self.is_swapped:
            y = transform(spectrum.filled_up(rows))
        else:
            y = spectrum.cut(transform(rows))
        # Coefficients of n points are n/m times those of m points; the inverse undoes that.
        ratio = self.modes / self.source.numel
        return (y * (1 / ratio if self.is_inverse else ratio)).permute(inverse_of(order))

    def joins(self, others: Sequence[Any]) -> bool:
        """Whether one call can compute this transform together with others."""
        if not all(isinstance(each, ParDFT) and not each.is_padded for each in (self, *others)):
            return False
        same = all(
            (each.is_adjoint, each.is_inverse) == (self.is_adjoint, self.is_inverse)
            for each in others
        )
        # `rfftn` makes the numbers complex along its last dimension, before all others; `irfftn`
        # makes them real last: a real transform can only begin or end the call.
        return (
            same
            and not any(each.is_real for each in others if each.is_swapped)
            and (not self.is_real or self.is_swapped)
        )

    @staticmethod
    def act_together(transforms: Sequence[tuple[ParDFT, int]], x: Tensor) -> Tensor:
        """Transforms of one kind along several dimensions in one call."""
        return JointTransform(transforms)(x)

    def order_after(self, order: MemoryOrder, dims: list[int]) -> MemoryOrder:
        """The order that torch's transforms leave: the transformed dimensions last."""
        return (*(d for d in order if d not in dims), *(d for d in order if d in dims))

    def __repr__(self) -> str:
        name = super().__repr__()
        return name.replace("(", f"({self.modes} modes, ", 1) if self.is_padded else name

    def flops(self, shape: Shape, dims: tuple[int, ...]) -> float:
        n = self.source.numel  # the number of points
        columns = prod(shape) / max(1, shape[dims[0]])
        return 5.0 * n * log2(max(2, n)) * columns * (0.5 if self.is_real else 1.0)


class JointTransform:
    """Transforms of one kind along several dimensions, by one call of a library.

    Args:
        transforms: each with its dimension; at most one is real.
    """

    def __init__(self, transforms: Iterable[tuple[ParDFT, int]]) -> None:
        # those from or to real numbers last, as libraries do
        self.transforms = sorted(transforms, key=lambda pair: pair[0].is_real)
        one = self.transforms[-1][0]
        there = not one.is_swapped
        kinds = ("rfftn", "irfftn") if one.is_real else ("fftn", "ifftn")
        self.call = LocalTransform(  # the call of the library
            kinds[one.is_swapped],
            tuple(dim for _, dim in self.transforms),
            tuple(each.source.numel for each, _ in self.transforms),
            # Torch's name for the factor: none for the transform and its adjoint, else 1/n.
            "backward" if there != one.is_inverse else "forward",
        )

    @property
    def H(self) -> JointTransform:
        return JointTransform((each.H, dim) for each, dim in self.transforms)

    def __call__(self, x: Tensor) -> Tensor:
        library = self.call.library(x)
        # Torch differentiates its own transforms; for others the gradient is the adjoint.
        return self._by(library, x) if library == "torch" else record_local(self, x)

    def _apply(self, x: Tensor) -> Tensor:
        return self._by(self.call.library(x), x)

    def _by(self, library: str, x: Tensor) -> Tensor:
        transform, dim = self.transforms[-1]
        if not transform.is_weighted:
            return self.call(x, library)
        n = transform.source.numel
        if transform.is_swapped:
            return self.call(_weighted(x, dim, n, 0.5), library)
        return _weighted(self.call(x, library), dim, n, 2.0)


def _weighted(y: Tensor, dim: int, n: int, weight: float) -> Tensor:
    """The tensor with weights for numbers that stand for two of the whole transform."""
    # Coefficient 0, and n/2 of an even n, are their own conjugates: they stand for one.
    weights = torch.full((n // 2 + 1,), weight, dtype=y.real.dtype, device=y.device)
    weights[0] = 1.0
    if n % 2 == 0:
        weights[-1] = 1.0
    return y * weights.reshape(-1, *[1] * (y.dim() - dim - 1))


@dataclass(frozen=True)
class Spectrum:
    """The lowest modes of a Fourier transform with more points, along the last dimension.

    For an even number n of modes, one coefficient stands for both frequencies n/2 and -n/2, which
    n points cannot distinguish. So a spectrum is *cut* by adding the coefficients of both,
    as the transform of n points does, and *filled up* with half of the coefficient at each: then a
    real coefficient gives a real field, and cutting undoes filling up. A real
    transform has n/2 only; at -n/2 it would have the conjugate. With equal weights, cutting
    and filling up are adjoints of each other.

    Args:
        modes: n.
        points: m, more than n.
        is_real: whether fields are real.
        is_halved: whether the frequencies n/2 and -n/2 count half, as in filling up. If not, they
            count fully, as in cutting.
    """

    modes: int
    points: int
    is_real: bool
    is_halved: bool

    @property
    def weight(self) -> float:
        """The weight of the frequencies n/2 and -n/2; in a real transform one number has both."""
        if self.is_halved:
            return 0.5
        return 2.0 if self.is_real else 1.0

    @property
    def num_positive(self) -> int:
        """The number of modes from zero up, without n/2."""
        return (self.modes + 1) // 2

    @property
    def num_negative(self) -> int:
        """The number of modes below zero, without -n/2."""
        return 0 if self.is_real else (self.modes - 1) // 2

    def cut(self, y: Tensor) -> Tensor:
        """The coefficients of the modes, from those of all points."""
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
