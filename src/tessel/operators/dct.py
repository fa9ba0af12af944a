"""Discrete cosine and sine transforms."""

from __future__ import annotations

from dataclasses import replace
from math import log2, prod, sqrt
from operator import index as as_int
from typing import Any

from torch import Tensor

from tessel.core.linop import record_local
from tessel.operators.cosine import TrigonometricKernel
from tessel.operators.leaf import Leaf
from tessel.operators.memory import MemoryOrder, inverse_of, order_of
from tessel.operators.space import Shape, TensorSpace, checked_dtype, checked_length

NORMS = ("backward", "ortho", "forward")


class Trigonometric(Leaf):
    """A cosine or sine transform, of real numbers or of real and imaginary parts alike."""

    is_sine: bool
    is_invertible = True

    def __init__(self, T: Any, n: int, type: int = 2, norm: str | None = None) -> None:
        name = self.__class__.__name__
        dtype = checked_dtype(name, T)
        length = checked_length(name, "n", n)
        try:
            self.type = as_int(type)
        except TypeError:
            self.type = 0
        if self.type not in (1, 2, 3, 4) or isinstance(type, bool):
            raise ValueError(f"{name}: type must be 1, 2, 3 or 4, got {type!r}")
        self.norm = "backward" if norm is None else norm
        if self.norm not in NORMS:
            raise ValueError(f"{name}: norm must be one of {', '.join(NORMS)}, got {norm!r}")
        if self.type == 1 and length == 1 and not self.is_sine:
            raise ValueError(f"{name}: type 1 needs a length n of at least 2, got 1")
        self.source = self.target = TensorSpace((length,), dtype)

    @property
    def kernel(self) -> TrigonometricKernel:
        """The kernel that computes it along its dimension."""
        kernel = TrigonometricKernel(self.is_sine, self.type, self.source.numel)
        if self.norm == "forward":
            kernel = replace(kernel, scale=1 / kernel.period)
        elif self.norm == "ortho":  # at the ends, these weights give rows and columns length one
            root = sqrt(1 / kernel.period)
            kernel = replace(kernel, scale=root, left=sqrt(0.5), right=sqrt(2))
        kernel = kernel.H if self.is_adjoint else kernel
        return kernel.inv if self.is_inverse else kernel

    def act(self, x: Tensor, first: int, value: Tensor | None) -> Tensor:
        order = self.order_after(order_of(x), [first])
        y = record_local(self.kernel, x.permute(order))
        return y.permute(inverse_of(order))

    def order_after(self, order: MemoryOrder, dims: list[int]) -> MemoryOrder:
        """The order with the transformed dimension last."""
        return (*(d for d in order if d not in dims), *dims)

    def flops(self, shape: Shape, dims: tuple[int, ...]) -> float:
        """The operations of the real Fourier transform, and of the factors after it."""
        n = self.source.numel
        length = self.kernel.period if self.type == 1 else n
        columns = prod(shape) / max(1, shape[dims[0]])
        each = 2.5 * length * log2(max(2, length)) + 3.0 * n
        return each * columns * (2 if self.source.is_complex else 1)

    def __repr__(self) -> str:
        name = self.__class__.__name__
        return f"{name}({self.source}, type={self.type}, norm={self.norm!r}){self.mode}"


class ParDCT(Trigonometric):
    """A discrete cosine transform, scaled as `scipy.fft.dct` does.

    Type 2, the usual one, is y[k] = 2 Σ x[j] cos(π k (2j + 1) / 2n). For complex numbers it
    transforms the real and the imaginary parts. `inv` is the inverse (`scipy.fft.idct`), `H` the
    exact adjoint: the two are equal with the norm "ortho" only.

    Args:
        T: a dtype of torch.
        n: the length; from 2 on for type 1.
        type: 1, 2, 3 or 4.
        norm: as `torch.fft` names them: "backward" (the default, as None is) has no factor here and
            1/M in the inverse, "forward" the reverse of that, and "ortho" makes an orthogonal
            matrix, with other weights at the ends. M is 2(n - 1) for type 1, else 2n.

    >>> import tessel, torch
    >>> C = tessel.ParDCT(torch.float64, 4, norm="ortho")
    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    >>> torch.allclose(C.H * (C * x), x)
    True
    """

    is_sine = False


class ParDST(Trigonometric):
    """A discrete sine transform, scaled as `scipy.fft.dst` does.

    Type 2, the usual one, is y[k] = 2 Σ x[j] sin(π (k + 1) (2j + 1) / 2n). For complex numbers it
    transforms the real and the imaginary parts. `inv` is the inverse (`scipy.fft.idst`), `H` the
    exact adjoint: the two are equal with the norm "ortho" only.

    Args:
        T: a dtype of torch.
        n: the length.
        type: 1, 2, 3 or 4.
        norm: as `torch.fft` names them: "backward" (the default, as None is) has no factor here and
            1/M in the inverse, "forward" the reverse of that, and "ortho" makes an orthogonal
            matrix, with other weights at the ends. M is 2(n + 1) for type 1, else 2n.

    >>> import tessel, torch
    >>> S = tessel.ParDST(torch.float64, 3, type=1)
    >>> x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    >>> torch.allclose(S.inv * (S * x), x), torch.allclose(S.H * x, 8 * (S.inv * x))
    (True, True)
    """

    is_sine = True
