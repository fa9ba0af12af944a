"""Fast cosine and sine transforms, each computed by one Fourier transform of torch.

The matrices are those of the definitions, without a factor; n is the length:

    DCT-1   x[0] + (-1)^k x[n-1] + 2 Σ x[j] cos(π k j / (n - 1)), 0 < j < n - 1
    DCT-2   2 Σ x[j] cos(π k (2j + 1) / 2n)
    DCT-3   x[0] + 2 Σ x[j] cos(π (2k + 1) j / 2n), j > 0
    DCT-4   2 Σ x[j] cos(π (2k + 1) (2j + 1) / 4n)

    DST-1   2 Σ x[j] sin(π (k + 1) (j + 1) / (n + 1))
    DST-2   2 Σ x[j] sin(π (k + 1) (2j + 1) / 2n)
    DST-3   (-1)^k x[n-1] + 2 Σ x[j] sin(π (2k + 1) (j + 1) / 2n), j < n - 1
    DST-4   2 Σ x[j] sin(π (2k + 1) (2j + 1) / 4n)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import pi

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tessel.core.context import is_compiling
from tessel.operators.space import complex_of

TRANSPOSED = {1: 1, 2: 3, 3: 2, 4: 4}


@dataclass(frozen=True)
class TrigonometricKernel:
    """A transform along the last dimension: scale · L K R, where K is the matrix of a definition.

    K is not symmetric: in DCT-1 and in the third types, input at the *ends* counts half. L and R
    are diagonal matrices that weight results and input there, and are one elsewhere. The ends are
    the first and the last index for DCT-1, the first result of DCT-2 and the first input of DCT-3,
    the last of DST-2 and DST-3; the other transforms have none. With E for the weight two at the
    ends and M for the length of the Fourier transform that K is a part of,

        K₁ᵀ = E⁻¹ K₁ E,   K₂ᵀ = K₃ E,   K₃ᵀ = E⁻¹ K₂,   K₄ᵀ = K₄,
        K₁⁻¹ = K₁ / M,    K₂⁻¹ = K₃ / M,   K₃⁻¹ = K₂ / M,   K₄⁻¹ = K₄ / M,

    so that adjoint and inverse are of the same form.

    Args:
        is_sine: DST, else DCT.
        type: 1 to 4.
        n: the length.
        scale: a factor.
        left, right: the weights of results and of input at the ends.
    """

    is_sine: bool
    type: int
    n: int
    scale: float = 1.0
    left: float = 1.0
    right: float = 1.0

    @property
    def period(self) -> int:
        """The length M of the Fourier transform that K is a part of."""
        if self.type != 1:
            return 2 * self.n
        return 2 * (self.n + 1) if self.is_sine else 2 * (self.n - 1)

    @property
    def H(self) -> TrigonometricKernel:
        left, right = self.right / 2, self.left * 2
        return replace(self, type=TRANSPOSED[self.type], left=left, right=right)

    @property
    def inv(self) -> TrigonometricKernel:
        return replace(
            self,
            type=TRANSPOSED[self.type],
            scale=1 / (self.scale * self.period),
            left=1 / self.right,
            right=1 / self.left,
        )

    def _apply(self, x: Tensor) -> Tensor:
        if x.is_complex():
            return torch.complex(self._apply(x.real), self._apply(x.imag))
        if self.type == 1:
            return self.dst_1(x) if self.is_sine else self.dct_1(x)
        if self.type == 4:
            return self.type_4_odd(x) if self.n % 2 else self.type_4_even(x)
        return self.type_2(x) if self.type == 2 else self.type_3(x)

    def _tables(self, x: Tensor) -> tuple[Tensor, ...]:
        """Indices and factors; kept, unless a tracer would find them among its own tensors."""
        is_traced = is_compiling() or _get_current_dispatch_mode() is not None
        return (_make_tables if is_traced else _kept_tables)(self, x.dtype, x.device)

    def type_2(self, x: Tensor) -> Tensor:
        """Type 2 of n numbers by a real transform of the same length.

        With v = (x[0], x[2], …, x[3], x[1]) and V its transform, y[k] = 2 Re(e^{-iπk/2n} V[k]) and
        y[n - k] = -2 Im(e^{-iπk/2n} V[k]). Read backwards, v has the conjugates of V, and the sign
        of the second disappears. Sines are the cosines of x[j] (-1)^j, in reverse order.
        """
        indices, factors, places = self._tables(x)
        v = _picked(x, indices)
        if self.is_sine:
            v[..., 1 : self.n // 2 + 1].neg_()  # the odd ones
        return _picked(_split(torch.fft.rfft(v).mul_(factors)), places)

    def type_3(self, x: Tensor) -> Tensor:
        """Type 3, the inverse of type 2: all of its steps in reverse."""
        indices, factors, places = self._tables(x)
        pairs = _picked(x, indices)
        pairs[..., 1] = 0.0  # x[n], an imaginary part that some devices do not ignore
        spectrum = _joined(pairs).mul_(factors)
        v = torch.fft.irfft(spectrum, n=self.n, norm="forward")
        if self.is_sine:
            v[..., 1 : self.n // 2 + 1].neg_()
        return _picked(v, places)

    def type_4_even(self, x: Tensor) -> Tensor:
        """Type 4 of an even length by a complex transform of half that length.

        With z[j] = x[2j] + i x[n-1-2j] and c[k] = 2 Σ z[j] e^{-iπ(4k+1)(4j+1)/4n}, y[2k] is the
        real part of c[k] and y[n-1-2k] minus the imaginary part, or plus it for conjugates.
        Sines are the cosines of x in reverse, times (-1)^k, which removes the sign as well.
        """
        indices, before, behind, places = self._tables(x)
        z = _joined(_picked(x, indices)).mul_(before)
        c = torch.fft.fft(z) if self.is_sine else torch.fft.ifft(z, norm="forward")
        return _picked(_split(c.mul_(behind)), places)

    def type_4_odd(self, x: Tensor) -> Tensor:
        """Type 4 of an odd length by a real transform of the same length: see `tables_4_odd`."""
        indices, signs, factor, places, signs_behind = self._tables(x)
        spectrum = torch.fft.rfft(_picked(x, indices).mul_(signs)).mul_(factor)
        return _picked(_split(spectrum), places).mul_(signs_behind)

    def dct_1(self, x: Tensor) -> Tensor:
        """DCT-1 by the real transform of x and its mirror image.

        There are methods with half of the length, but their errors grow with the root of n.
        """
        indices, weights = self._tables(x)
        v = _picked(x, indices)
        if self.right != 1:
            v[..., 0].mul_(self.right)
            v[..., self.n - 1].mul_(self.right)
        return torch.fft.rfft(v).real * weights

    def dst_1(self, x: Tensor) -> Tensor:
        """DST-1 by the real transform of 0, x, 0 and minus its mirror image."""
        zero = torch.zeros_like(x[..., :1])
        v = torch.cat([zero, x, zero, -x.flip(-1)], -1)
        return torch.fft.rfft(v).imag[..., 1 : self.n + 1] * -self.scale


def _picked(x: Tensor, indices: Tensor) -> Tensor:
    """The numbers at these indices of the last dimension, contiguous in memory."""
    if x.dtype == torch.float64 and x.device.type == "cpu":  # index_select is 3 times slower there
        return x.gather(-1, indices.expand(*x.shape[:-1], -1))
    return x.index_select(-1, indices)


def _split(z: Tensor) -> Tensor:
    """Real and imaginary parts, interleaved."""
    return torch.view_as_real(z).flatten(-2)


def _joined(pairs: Tensor) -> Tensor:
    """Complex numbers from interleaved real and imaginary parts."""
    return torch.view_as_complex(pairs.unflatten(-1, (-1, 2)))


def _make_tables(
    kernel: TrigonometricKernel, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """The tables of a kernel, computed in double precision."""
    makers = {1: tables_1, 2: tables_2, 3: tables_3, 4: tables_4_even}
    make = tables_4_odd if kernel.type == 4 and kernel.n % 2 else makers[kernel.type]
    found = []
    with torch.inference_mode(False), torch.no_grad():  # others will use them, too
        for table in make(kernel):
            if table.is_complex():
                table = table.to(complex_of(dtype))
            elif table.is_floating_point():
                table = table.to(dtype)
            found.append(table.to(device))
    return tuple(found)


_kept_tables = lru_cache(maxsize=64)(_make_tables)


def _count(n: int) -> Tensor:
    return torch.arange(n, device="cpu")


def _phases(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles)


def tables_1(kernel: TrigonometricKernel) -> tuple[Tensor, ...]:
    """DCT-1: the order of x and its mirror image, and the weights of results. DST-1: none."""
    n = kernel.n
    if kernel.is_sine:
        return ()
    weights = torch.full((n,), kernel.scale, dtype=torch.float64, device="cpu")
    weights[[0, -1]] *= kernel.left
    return torch.cat([_count(n), _count(n)[1:-1].flip(0)]), weights


def _evens_and_odds(n: int) -> Tensor:
    """0, then the odd numbers upwards, then the even ones downwards."""
    return torch.cat([_count(n)[::2], _count(n)[1::2].flip(0)]).flip(0).roll(1)


def tables_2(kernel: TrigonometricKernel) -> tuple[Tensor, ...]:
    """Type 2: the order of v, the factors of V, and the position of each result in it."""
    n, half = kernel.n, kernel.n // 2 + 1
    factors = 2 * kernel.scale * _phases(_count(half).double() * (pi / (2 * n)))
    factors[0] *= kernel.left
    k = _count(n)
    places = torch.where(k < half, 2 * k, 2 * (n - k) + 1)
    return _evens_and_odds(n), factors, places.flip(0) if kernel.is_sine else places


def tables_3(kernel: TrigonometricKernel) -> tuple[Tensor, ...]:
    """Type 3: the two numbers of each complex one, its factor, and the order of results."""
    n, half = kernel.n, kernel.n // 2 + 1
    k = _count(half)
    pairs = torch.stack([k, (n - k) % n], -1).flatten()
    factors = kernel.scale * _phases(k.double() * (-pi / (2 * n)))
    factors[0] *= kernel.right
    return n - 1 - pairs if kernel.is_sine else pairs, factors, _evens_and_odds(n).argsort()


def tables_4_even(kernel: TrigonometricKernel) -> tuple[Tensor, ...]:
    """Type 4 of an even length: the pairs of z, the factors before and after, and the order."""
    n = kernel.n
    j = _count(n // 2)
    pairs = torch.stack([n - 1 - 2 * j, 2 * j], -1).flatten()
    phases = _phases((j.double() + 0.125) * (pi / n))
    if kernel.is_sine:
        before, behind = phases.conj().resolve_conj(), phases.conj().resolve_conj()
    else:
        before, behind = -1j * phases, phases
    k = _count(n)
    return pairs, before, 2 * kernel.scale * behind, torch.where(k % 2 == 0, k, n - k)


def tables_4_odd(kernel: TrigonometricKernel) -> tuple[Tensor, ...]:
    """DCT-4 of an odd length n as a real Fourier transform of length n.

    It is y(b) = 2 Σ x(a) cos(2π ab / 8n) of odd numbers a = 2j + 1 and b = 2k + 1. For odd b the
    cosine is the same at -a, and minus that at 4n - a and 4n + a. As n is odd, one of these four
    numbers is 1 modulo 8: all a, and all b, can be replaced by such numbers if x and y get signs.
    With u n + 8 w = 1 modulo 8n, then ab / 8n = u / 8 + w ab / n up to whole numbers. So

        y(b) = 2 Re(e^{-iπu/4} V[w b mod n]),

    where V is the transform of x in the order of a mod n.
    """
    n = kernel.n
    a = 2 * _count(n) + 1
    ways = torch.stack([a, -a, 4 * n - a, 4 * n + a])
    way = (ways % 8 == 1).int().argmax(0, keepdim=True)  # the one of the four that is 1 modulo 8
    residues, signs = ways.gather(0, way)[0] % n, torch.where(way[0] < 2, 1, -1)
    indices = residues.argsort()
    signs_before = signs[indices]
    u = n % 8  # n n is 1 modulo 8, as the square of any odd number
    w = (1 - u * n) // 8 % n
    at = residues * w % n
    places = torch.where(at <= n // 2, 2 * at, 2 * (n - at) + 1)
    # Of a conjugate, Re(e^{-iπu/4} conj V) = Re(e^{iπu/2} e^{-iπu/4} V), and e^{iπu/2} is i or -i.
    signs = torch.where(at <= n // 2, signs, signs * (-1 if u % 4 == 1 else 1))
    if kernel.is_sine:  # cosines of x backwards, times (-1)^k
        indices, signs = n - 1 - indices, signs * (1 - 2 * (_count(n) % 2))
    factor = 2 * kernel.scale * _phases(torch.tensor(-pi * u / 4, dtype=torch.float64))
    return indices, signs_before.double(), factor, places, signs.double()
