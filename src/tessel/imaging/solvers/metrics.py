"""Metrics: numbers that tell how good an image is, over all of its parts."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tessel.core import Layout
from tessel.imaging.solvers.method import check_positive
from tessel.imaging.solvers.space import Space


class PSNR:
    """The peak signal-to-noise ratio in decibels.

    PSNR(x) = 10 log10(peak² n / ‖x - truth‖²), for n numbers in all.

    Args:
        truth: what the image should be: a signal, or a tensor in its layout.
        layout: of a tensor, where there are several workers.
        peak: the largest value of an image.

    >>> import torch
    >>> from tessel.imaging.solvers import PSNR
    >>> round(PSNR(torch.ones(4))(torch.full((4,), 0.9)), 3)
    20.0
    """

    def __init__(self, truth: Any, layout: Layout | None = None, peak: float = 1.0) -> None:
        check_positive(self, peak=peak)
        self.space = Space.of(truth, layout)
        self.truth = truth if isinstance(truth, Tensor) else truth.data
        self.peak = peak

    def __call__(self, x: Tensor) -> float:
        if x.shape != self.truth.shape:
            raise ValueError(
                f"PSNR: the image has the shape {tuple(x.shape)} on this worker and the truth "
                f"{tuple(self.truth.shape)}; both lie in one layout"
            )
        difference = x - self.truth
        squares = self.space.numbers((difference, difference))[0]
        mean = float(squares) / math.prod(self.space.layout.shape)
        return 10 * math.log10(self.peak**2 / mean) if mean else math.inf
