"""Train a U-Net with Hugging Face's Accelerate, on images of which each worker has some rows.

The workers are a grid: `--replicas` copies of the model, each on workers that split the images of
their own batch. The model is converted for the workers of its copy, and Accelerate wraps it like
every model, by `DistributedDataParallel` over all workers: their mean of the gradients is the mean
over the copies. Accelerate only has to be told which batches a worker takes: those of its copy. The
losses are those of one process.

    pip install accelerate
    python examples/accelerate_unet.py
    tessel run -n 4 examples/accelerate_unet.py --replicas 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tessel
from tessel import Layout, Partition


class UNet(nn.Module):
    """Down and up again, in plain torch."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            layers = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU()
            return nn.Sequential(*layers)

        self.down, self.middle = block(1, width), block(width, 2 * width)
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up, self.head = block(2 * width, width), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        y = self.grow(self.middle(nn.functional.max_pool2d(x, 2)))
        return self.head(self.up(torch.cat([x, y], 1)))


def images(samples: int = 8, size: int = 32) -> TensorDataset:
    """Two discs, one inside the other, with noise; and a class for each pixel."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(*2 * [torch.linspace(-1, 1, size)], indexing="ij")
    centers = torch.rand(2, samples, 1, 1, generator=draw) - 0.5
    distance = (rows - centers[0]) ** 2 + (columns - centers[1]) ** 2
    labels = (distance < 0.4).long() + (distance < 0.1).long()
    noise = torch.randn(samples, 1, size, size, generator=draw)
    return TensorDataset((labels[:, None] + 0.5 * noise).double(), labels)


def replicas(number: int) -> list[Partition]:
    """The workers of each copy of the model, which split the rows of images among them."""
    ranks = tessel.world().ranks
    size, rest = divmod(len(ranks), number)
    if rest:
        raise SystemExit(f"{len(ranks)} workers cannot hold {number} copies of equal size")
    # all workers make all partitions, in one order
    return [Partition(ranks[k * size : (k + 1) * size], (1, 1, size, 1)) for k in range(number)]


def own_part(x: Tensor, labels: Tensor, P_x: Partition) -> tuple[Tensor, Tensor]:
    """This worker's rows of the images and of the labels, which have no channels."""
    part = Layout.balanced(P_x, x.shape).local_part(x)
    return part, Layout.balanced(P_x, labels[:, None].shape).local_part(labels[:, None])[:, 0]


def train(number: int, batch: int, epochs: int) -> list[float]:
    """Train, and return the losses of all steps, each of which takes `batch` images in all."""
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader

    P = tessel.world()  # first, since Accelerate uses an existing process group
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    rows = replicas(number)
    place = next(k for k, each in enumerate(rows) if each.active)
    model: Any = tessel.nn.distribute_module(UNet().double(), rows[place])
    criterion = tessel.nn.DistributedCrossEntropyLoss(rows[place])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(images(), batch // number)
    # workers of one copy take the same batches, each a part of them
    loader = prepare_data_loader(loader, num_processes=number, process_index=place)
    losses = []
    for _ in range(epochs):
        for x, labels in loader:
            part, target = own_part(x, labels, rows[place])
            loss = criterion(model(part), target)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    if P.rank == 0:
        print(f"{P.size} worker{'s' if P.size > 1 else ''}, copies of the model: {number}")
    return losses


def main(train: Callable[[int, int, int], list[float]] = train) -> None:
    parser = argparse.ArgumentParser(description="Train a U-Net on images in parts.")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model")
    parser.add_argument("--batch", type=int, default=4, help="images in a step, of all copies")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    losses = train(given.replicas, given.batch, given.epochs)
    if tessel.world().rank == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
