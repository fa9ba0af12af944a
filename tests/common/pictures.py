"""A picture, and a denoiser without weights: what the documents' scripts leave to the user."""

from __future__ import annotations

import deepinv
import torch
from torch import Tensor


def picture(height: int, width: int) -> Tensor:
    """Disks and bars on a slope, in three colours."""
    down = torch.linspace(-1, 1, height)[:, None]
    along = torch.linspace(-1, 1, width)[None, :]
    disks = sum(
        0.3 * (((down - a) ** 2 + (along - b) ** 2) < 0.08).float()
        for a, b in ((-0.5, -0.5), (0.4, 0.1), (-0.1, 0.6))
    )
    bars = 0.2 * ((8 * along).sin() > 0.4).float() * (down > 0.5)
    base = 0.3 + 0.2 * down + disks + bars
    return torch.stack([base, 0.8 * base + 0.1 * along, 0.6 * base])[None].clamp(0, 1)


class Median(torch.nn.Module):
    """A denoiser without weights that is called as one with them."""

    def __init__(self, pretrained: str | None = None) -> None:
        super().__init__()
        self.filter = deepinv.models.MedianFilter(kernel_size=3)

    def forward(self, x: Tensor, sigma: float) -> Tensor:
        return self.filter(x)
