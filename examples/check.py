"""The first thing to do with a model of your own: prove that it works over workers.

A small U-Net, in which nobody has thought of workers, is checked in one line: outputs, gradients
and buffers of the converted model against one process, module by module. Then it trains for a few
steps on images of which each worker has some rows. The loss is the same on any number of workers.

    python examples/check.py
    tessel run -n 4 examples/check.py
    tessel run -n 2 examples/check.py --wrong
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel


class UNet(nn.Module):
    """Down and up again, with one way across, and dropout in the middle."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.down = self.twice(1, width)
        self.bottom = nn.Sequential(self.twice(width, 2 * width), nn.Dropout(0.1))
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
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        across = self.down(x)
        y = self.up(self.bottom(F.max_pool2d(across, 2)))
        return self.last(self.merge(torch.cat([across, y], dim=1)))


class Careless(nn.Module):
    """A block that takes its part for the whole: its neighbours are those of one worker."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, tessel.Tensor):
            return tessel.from_local(x.local - x.local.roll(1, 2), x.layout)
        return x - x.roll(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=24, help="height and width of the images")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--wrong", action="store_true", help="put in a module that is wrong")
    options = parser.parse_args()

    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1])  # rows are split
    torch.manual_seed(0)  # all workers make the same images
    model = UNet().double()
    images = torch.randn(2, 1, options.size, options.size, dtype=torch.float64)
    clean = F.avg_pool2d(images, 3, stride=1, padding=1)
    if options.wrong:
        model.bottom.append(Careless())

    try:
        report = tessel.testing.check_model(model, images, where=grid)
    except AssertionError as error:
        if P.rank == 0:
            print(error)
        return
    if P.rank == 0:
        print(report)
        print(f"\n{P.size} worker{'s' if P.size > 1 else ''}")

    model.eval()  # dropout draws from a seed of the conversion; this compares runs
    tessel.nn.distribute_module(model, grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = tessel.spread(images, grid)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), clean)
        loss.backward()
        optimizer.step()
        if P.rank == 0:
            print(f"step {step}: loss {loss.detach().item():.4f}")


if __name__ == "__main__":
    main()
