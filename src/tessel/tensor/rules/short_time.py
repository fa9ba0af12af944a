"""Short-time Fourier transforms: of windows along a signal; their adjoint adds windows up again."""

from __future__ import annotations

import warnings
from functools import reduce
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tessel.tensor.rules.batched import holds_anywhere
from tessel.tensor.table import Arguments, Settings, named, outlines, rule, unsupported

_GIVEN: Settings = dict(n_fft=0, hop_length=None, win_length=None, window=None, center=True)


@rule("stft")
def stft(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The transforms of overlapping windows of a signal, one in each column."""
    rest = {"pad_mode": "reflect", "normalized": False, "onesided": None, "return_complex": None}
    x = args[0]
    if not isinstance(func, FunctionType):
        why = "only torch.stft is supported, and torch's operator has other arguments"
        raise unsupported(name, why, x._layout)
    given = named(args, kwargs, **_GIVEN, **rest, align_to_window=None)
    n, window = given["n_fft"], _padded(given, x)
    if given["align_to_window"] is not None:
        raise unsupported(name, "align_to_window is not supported", x._layout)
    outlines(func, args, kwargs)  # torch's own error
    if given["center"]:
        row = x.reshape([1] * (3 - x.dim()) + list(x.shape))
        x = F.pad(row, [n // 2, n // 2], given["pad_mode"]).reshape(*x.shape[:-1], -1)
    frames = x.unfold(-1, n, given["hop_length"] or n // 4)
    frames = frames if window is None else frames * window
    norm = "ortho" if given["normalized"] else "backward"
    onesided = given["onesided"]
    if onesided or (onesided is None and not frames.is_complex()):
        found = torch.fft.rfft(frames, norm=norm)
    else:
        found = torch.fft.fft(frames, norm=norm)
    found = found.mT
    # without a choice, torch has refused real values
    is_complex = given["return_complex"] in (None, True)
    return found if is_complex else torch.view_as_real(found)


@rule("istft")
def istft(name: str, func: Any, args: Arguments, kwargs: Settings) -> Any:
    """The signal whose transforms these are: the sum of all windows over that of squared ones."""
    rest = {"normalized": False, "onesided": None, "length": None, "return_complex": False}
    given = named(args, kwargs, **_GIVEN, **rest)
    x, n, hop = args[0], given["n_fft"], given["hop_length"] or given["n_fft"] // 4
    _check(func, x, given, hop)
    x = x.move_to(x._layout.hosted((x.dim() - 2,)))  # windows are split instead of frequencies
    window = _padded(given, x)
    norm = "ortho" if given["normalized"] else "backward"
    if given["return_complex"]:
        frames = torch.fft.ifft(x.mT, norm=norm)
    else:
        frames = torch.fft.irfft(x.mT.narrow(-1, 0, n // 2 + 1), n, norm=norm)
    if window is None:
        window = torch.ones(n, dtype=frames.dtype, device=frames.device)
    y = _added(frames * window, hop)
    # of all samples alike, and with the layout of one, since these are zeros plus windows
    weight = _added(torch.zeros_like(frames.reshape(-1, *frames.shape[-2:])[:1]) + window**2, hop)
    total, length = y.shape[-1], given["length"]
    start = n // 2 if given["center"] else 0
    stop = start + length if length is not None else total - start
    here = slice(start, min(stop, total))
    y, weight = y[..., here], weight[0, here]
    if not weight.numel():
        raise RuntimeError(f"istft: a signal of length {length} has no values")
    if holds_anywhere(weight.abs() < 1e-11):
        raise RuntimeError(f"istft({list(x.shape)}) window overlap add min: 1")
    y = y / weight
    if stop > total:
        warnings.warn(
            "The length of signal is shorter than the length parameter. Result is being padded "
            "with zeros in the tail. Please check your center and hop_length settings.",
            stacklevel=2,
        )
        y = F.pad(y, (0, stop - total))
    return y


def _check(func: Any, x: Tensor, given: Settings, hop: int) -> None:
    """Raise for arguments that torch rejects, which cannot tell them from shapes alone."""
    n, window, length = given["n_fft"], given["window"], _length(given)
    if x.dim() not in (2, 3) or not x.numel():
        raise RuntimeError(
            f"istft: expected a tensor of shape (channels, frequencies, windows) or (frequencies, "
            f"windows) with values, got {tuple(x.shape)}"
        )
    # of one window without gaps, by torch
    some = {key: given[key] for key in ("normalized", "onesided", "return_complex")}
    func(torch.zeros(x.shape[-2], 1, dtype=x.dtype), n, window=torch.ones(n), center=False, **some)
    if not 0 < hop <= length <= n:
        raise RuntimeError(
            f"istft: expected 0 < hop_length <= win_length <= n_fft, got {hop}, {length} and {n}"
        )
    if window is not None and tuple(window.shape) != (length,):
        raise RuntimeError(
            f"istft: expected a window of {length} values, got one of shape {tuple(window.shape)}"
        )


def _length(given: Settings) -> int:
    """The length of a window."""
    length: int | None = given["win_length"]
    return given["n_fft"] if length is None else length


def _padded(given: Settings, x: Tensor) -> Tensor | None:
    """The window, with zeros around it if it is shorter than a transform; None for ones."""
    n, window, length = given["n_fft"], given["window"], _length(given)
    if length == n:
        return window
    if window is None:
        window = torch.ones(length, dtype=x.real.dtype, device=x.device)
    before = (n - length) // 2
    return F.pad(window, (before, n - length - before))


def _added(frames: Tensor, hop: int) -> Tensor:
    """The adjoint of `unfold`: windows (..., number, values) are added where they overlap.

    In blocks of `hop` values, window t begins at block t, and its block j is added to block t + j.
    """
    num, n = frames.shape[-2:]
    k = -(-n // hop)
    blocks = F.pad(frames, (0, k * hop - n)).unflatten(-1, (k, hop))
    places = (F.pad(blocks.select(-2, j), (0, 0, j, k - 1 - j)) for j in range(k))
    return reduce(torch.add, places).flatten(-2).narrow(-1, 0, n + hop * (num - 1))
