"""Fourier transforms for `test_spread.py`, along whole and split dimensions.

Tests `tensor/rules/fourier.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spread_cases import Case

FOURIER: dict[str, Case] = {}
# before 2.13 torch's own irfftn of dimensions in another order reads beyond its memory
_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
for _kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    for _dim in (0, 1, -1):
        for _n, _norm in ((None, None), (3, "ortho"), (8, "forward")):
            FOURIER[f"{_kind} along {_dim} of {_n} {_norm}"] = Case(
                lambda x, kind=_kind, dim=_dim, n=_n, norm=_norm: getattr(torch.fft, kind)(
                    x, n, dim, norm
                ),
                ((4, 5, 6),),
            )
    for _ending, _settings in (
        ("2", {}),
        ("2", {"s": (3, 8), "norm": "ortho", "dim": (0, 2)}),
        ("n", {}),
        ("n", {"dim": (1, 0)}),
        ("n", {"s": (7, 4)}),
        ("n", {"s": (-1, 4, 5), "dim": (0, 1, 2), "norm": "forward"}),
        ("n", {"dim": (1,)}),
    ):
        if _settings == {"dim": (1, 0)} and _kind in ("irfft", "hfft") and _OLD:
            continue
        FOURIER[f"{_kind}{_ending} {_settings}"] = Case(
            lambda x, name=_kind + _ending, settings=_settings: getattr(torch.fft, name)(
                x, **settings
            ),
            ((4, 5, 6),),
        )


def spectral_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Kept modes in the middle of a shifted spectrum, put into zeros made inside."""
    modes = torch.fft.fftshift(torch.fft.rfftn(x, dim=(-2, -1)), dim=-2)
    out = torch.zeros(2, 3, 5, 4, dtype=torch.complex128)
    kept = slice(None), slice(None), slice(1, 4), slice(3)
    out[kept] = torch.einsum("bixy,ioxy->boxy", modes[kept], weight + 0j)
    return torch.fft.irfftn(torch.fft.ifftshift(out, dim=-2), s=(5, 6), dim=(-2, -1))


FOURIER |= {
    "complex input": Case(
        lambda x, y: (
            torch.fft.fft(x + 1j * y, dim=0),
            torch.fft.irfft2(x + 1j * y),
            torch.fft.ifftn(x + 1j * y, norm="ortho"),
            torch.fft.hfftn(x + 1j * y, dim=(0, 2)),
        ),
        ((4, 5, 6), (4, 5, 6)),
    ),
    "there and back": Case(lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:])),
    "a filter": Case(
        lambda x, w: torch.fft.irfftn(torch.fft.rfftn(x) * w, s=x.shape), ((4, 5, 6), (5, 4))
    ),
    "of one dimension": Case(
        lambda x: (torch.fft.rfft(x, n=5), torch.fft.fftn(x), torch.fft.ihfft(x)), ((7,),)
    ),
    "fftshift": Case(lambda x: torch.fft.fftshift(x)),
    "ifftshift": Case(lambda x: torch.fft.ifftshift(x, dim=(0, 2)) + torch.fft.fftshift(x, 1)),
    # the zeros are plain outside of a model; test_adoption.py has it in one, which gathers nothing
    "spectral convolution": Case(
        spectral_convolution, ((2, 4, 5, 6), (4, 3, 3, 3)), may_gather=True
    ),
    "fftfreq": Case(lambda x: x * torch.fft.fftfreq(6, dtype=x.dtype)),
}

FAMILIES: dict[str, dict[str, Case]] = {"fourier": FOURIER}
