"""Discrete Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod
from typing import Any

import torch
from torch import Tensor

from tessel.operators.leaf import Leaf
from tessel.operators.memory import Order
from tessel.operators.space import Shape, Space, checked_dtype, checked_length, complex_of


class ParDFT(Leaf):
    """The discrete Fourier transform, scaled as `torch.fft` does.

    Of a real dtype it is the real transform, from `n` real numbers to the `n // 2 + 1` complex
    ones that are not repeated. `H` is the exact adjoint, which is not the inverse: of the complex
    transform it is `n` times that. The inverse of the real transform undoes it on what real
    numbers give.

    >>> import tessel, torch
    >>> F = tessel.ParDFT(torch.float32, 5)
    >>> F.codomain, (F.inv @ F) * torch.ones(5)
    (complex64 3, tensor([1., 1., 1., 1., 1.]))
    """

    def __init__(self, T: Any, n: int) -> None:
        dtype = checked_dtype("ParDFT", T)
        if dtype is torch.bfloat16:
            raise ValueError("ParDFT: torch has no complex numbers of bfloat16; use float32")
        length = checked_length("ParDFT", "n", n)
        self.source = Space((length,), dtype)
        half = length if self.source.is_complex else length // 2 + 1
        self.target = Space((half,), complex_of(dtype))

    is_invertible = True

    @property
    def is_real(self) -> bool:
        return not self.source.is_complex

    @property
    def is_weighted(self) -> bool:
        """Whether it weights the numbers that stand for two of the whole transform."""
        return self.is_real and self.is_adjoint

    @property
    def _norm(self) -> str:
        """Torch's word for the factor: none on the way there and for its adjoint, else 1/n."""
        there = not self.is_swapped
        return "backward" if there != self.is_inverse else "forward"

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        return self.act_together([(self, first)], x)

    def joins(self, others: Sequence[Any]) -> bool:
        """Whether one call can do this transform together with others, before or behind them."""
        if not all(isinstance(each, ParDFT) for each in others):
            return False
        same = all(
            (each.is_adjoint, each.is_inverse) == (self.is_adjoint, self.is_inverse)
            for each in others
        )
        return (
            same
            and not any(each.is_real for each in others if each.is_swapped)
            and (not self.is_real or self.is_swapped)
        )

    @staticmethod
    def act_together(transforms: Sequence[tuple[ParDFT, int]], x: Tensor) -> Tensor:
        """Transforms of one kind along several dimensions in one call."""
        one = transforms[0][0]
        real = [(each, dim) for each, dim in transforms if each.is_real]
        dims = [dim for each, dim in transforms if not each.is_real]
        there, norm = not one.is_swapped, one._norm
        if not real:
            return (torch.fft.fftn if there else torch.fft.ifftn)(x, dim=dims, norm=norm)
        ((transform, dim),) = real
        n = transform.source.numel
        if there:
            y = torch.fft.rfftn(x, dim=[*dims, dim], norm=norm)
            return _weighted(y, dim, n, 2.0) if transform.is_weighted else y
        if transform.is_weighted:
            x = _weighted(x, dim, n, 0.5)
        lengths = [x.shape[each] for each in dims]
        return torch.fft.irfftn(x, s=[*lengths, n], dim=[*dims, dim], norm=norm)

    def order_after(self, order: Order, dims: list[int]) -> Order:
        """Torch leaves the dimensions last that it transformed."""
        return (*(d for d in order if d not in dims), *(d for d in order if d in dims))

    def flops(self, shape: Shape, dims: tuple[int, ...]) -> float:
        n = self.source.numel
        columns = prod(shape) / max(1, shape[dims[0]])
        return 5.0 * n * log2(max(2, n)) * columns * (0.5 if self.is_real else 1.0)


def _weighted(y: Tensor, dim: int, n: int, weight: float) -> Tensor:
    """With those numbers weighted that stand for two of the whole transform."""
    weights = torch.full((n // 2 + 1,), weight, dtype=y.real.dtype, device=y.device)
    weights[0] = 1.0
    if n % 2 == 0:
        weights[-1] = 1.0
    return y * weights.reshape(-1, *[1] * (y.dim() - dim - 1))
