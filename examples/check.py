"""The first thing to do with a model of your own: check that it works on several workers.

A small U-Net, written without workers in mind, cleans noisy pictures. One line checks it: outputs,
gradients and buffers of the converted model are compared with one process, module by module. Then
it trains for a few steps on pictures of which each worker has some rows. The loss is the same on
any number of workers.

    python examples/check.py
    tessel run -n 4 examples/check.py --size 64 --steps 60 --output cleaned.png
    tessel run -n 2 examples/check.py --wrong
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel
from tessel import viz


class UNet(nn.Module):
    """Down and up again, with one skip connection: plain torch, which knows nothing of workers."""

    def __init__(self, width: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.down = self.twice(1, width)
        self.bottom = nn.Sequential(self.twice(width, 2 * width), nn.Dropout(dropout))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge = self.twice(2 * width, width)
        self.last = nn.Conv2d(width, 1, 1)

    @staticmethod
    def twice(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        across = self.down(x)
        up = self.up(self.bottom(F.max_pool2d(across, 2)))
        correction: Tensor = self.last(self.merge(torch.cat([across, up], dim=1)))
        return x + correction


class Careless(nn.Module):
    """A block that mistakes its part for the whole: it reads only neighbours of one worker."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, tessel.Tensor):
            return tessel.from_local(x.local - x.local.roll(1, 2), x.layout)
        return x - x.roll(1, 2)


def pictures(count: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy rings on a slope, and the same without noise: (count, 1, size, size) each."""
    across = torch.linspace(-1, 1, size, dtype=torch.float64)
    radius = (across[:, None] ** 2 + across[None, :] ** 2).sqrt()
    rings = [torch.cos((9 - 2 * k) * torch.pi * radius**1.5) + across for k in range(count)]
    clean = torch.stack(rings)[:, None]
    draw = torch.Generator().manual_seed(seed)  # all workers make the same pictures
    return clean + 0.4 * torch.randn(clean.shape, dtype=clean.dtype, generator=draw), clean


def step(model: nn.Module, noisy: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
    """Clean noisy pictures and compute gradients; return the output and the loss."""
    cleaned = model(noisy)
    loss = F.mse_loss(cleaned, clean)
    loss.backward()
    return cleaned, loss


def draw(noisy: Tensor, cleaned: tessel.Tensor, clean: Tensor, path: Path) -> None:
    """Save the first picture before and after cleaning and without noise, with workers' parts."""
    whole = cleaned.full().detach()  # all workers take part
    if tessel.world().rank != 0:
        return
    figure = viz.new_figure(14, 3.8)
    axes = figure.subplots(1, 4)
    shown = {"noisy": noisy, "who has which part": noisy, "cleaned": whole, "truth": clean}
    for ax, (title, images) in zip(axes, shown.items(), strict=True):
        ax.imshow(images[0, 0], cmap="gray", vmin=-2, vmax=2)
        ax.set_title(title)
        ax.set_axis_off()
    viz.mark_parts(axes[1], cleaned.layout, (2, 3))
    figure.savefig(path, dpi=100, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=24, help="height and width of the pictures")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--wrong", action="store_true", help="put in a module that is wrong")
    parser.add_argument("--output", type=Path, help="where to save a picture")
    options = parser.parse_args()

    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1])  # rows are split
    torch.manual_seed(0)
    model = UNet().double()
    noisy, clean = pictures(2, options.size)
    if options.wrong:
        model.bottom.append(Careless())

    try:
        report = tessel.testing.check_model(model, noisy, where=grid)
    except AssertionError as error:
        if P.rank == 0:
            print(error)
        return
    if P.rank == 0:
        print(report)
        print(f"\n{P.size} worker{'s' if P.size > 1 else ''}")

    model.bottom[-1].eval()  # dropout draws from a seed of the conversion; this compares runs
    tessel.nn.distribute_module(model, grid)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = tessel.spread(noisy, grid)
    for number in range(options.steps):
        optimizer.zero_grad()
        cleaned, loss = step(model, x, clean)
        optimizer.step()
        if P.rank == 0:
            print(f"step {number}: loss {loss.item():.4f}")
    if options.output is not None:
        assert isinstance(cleaned, tessel.Tensor)
        draw(noisy, cleaned, clean, options.output)


if __name__ == "__main__":
    main()
