"""Train a segmentation model on one volume that no worker stores whole.

A SwinUNETR of MONAI, written without workers in mind, learns to segment a volume in a file. Each
worker reads only its box of the file (`tessel.data`), and trains on it:
`distribute_module(model, grid)`, then a plain training loop. Windows of attention, convolutions and
norms reach across the boxes, so the losses are those of one process, which trains as well for
comparison, unless `--parts-only` is given because the volume is too large for it.

The volume is generated, or read from two files of numpy: the values, and a class for each of them.

    pip install monai
    python examples/segment.py
    tessel run -n 4 examples/segment.py --size 96 64 64 --steps 30 --output segmented.png
    tessel run -n 4 examples/segment.py --volume values.npy labels.npy --parts-only
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tessel
from tessel import data, viz
from tessel.testing import count_memory, count_traffic

CLASSES = 3


@dataclass(frozen=True)
class Settings:
    """The settings of the training and its data.

    Attributes:
        size: height, width and depth of a generated volume: multiples of 32, one 64 or more.
        steps: the number of training steps, all on the same volume.
        width: the number of features of a voxel.
        rate: the learning rate.
        dtype: the dtype of all values. In single precision, rounding makes losses differ after some
            steps.
    """

    size: tuple[int, int, int] = (64, 32, 32)
    steps: int = 3
    width: int = 12
    rate: float = 3e-3
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Trained:
    """The result of training.

    Attributes:
        losses: the loss before each step.
        peak: the peak memory of tensors that a step creates, on each worker, in bytes.
        sent: the bytes that each worker sends in a step.
        slices: slices through the middle of the volume, its labels and its segmentation.
    """

    losses: list[float]
    peak: list[int]
    sent: list[int]
    slices: list[Tensor]


def layer(size: tuple[int, int, int], number: int) -> tuple[Any, Any]:
    """One layer of a volume: two bodies, one inside the other, with noise; and their labels."""
    rows, y, z = (np.linspace(-1, 1, length) for length in size)
    x, y = rows[number], y[:, None]
    outer = x**2 / 0.7 + y**2 / 0.5 + z**2 / 0.6 < 1
    inner = (x - 0.2) ** 2 + (y + 0.1 + 0.3 * np.sin(3 * x)) ** 2 + z**2 < 0.15
    labels = np.where(inner, 2, np.where(outer, 1, 0))
    noise = np.random.default_rng(number).normal(size=labels.shape)
    return labels + 0.7 * noise, labels


def write_volume(folder: Path, size: tuple[int, int, int]) -> None:
    """Write a volume layer by layer, so that it may be larger than memory."""
    open_memmap = np.lib.format.open_memmap
    values = open_memmap(folder / "values.npy", "w+", np.float32, size)
    labels = open_memmap(folder / "labels.npy", "w+", np.int64, size)
    for number in range(size[0]):
        values[number], labels[number] = layer(size, number)
    values.flush()
    labels.flush()


@contextmanager
def volume(settings: Settings) -> Iterator[tuple[Path, Path]]:
    """The files of a volume that the first worker generates, and removes at the end."""
    P = tessel.world()
    with tempfile.TemporaryDirectory() as own:
        if P.rank == 0:
            write_volume(Path(own), settings.size)
        folder = Path(P.group.share_objects(own)[0])
        yield folder / "values.npy", folder / "labels.npy"
        P.group.share_objects(None)  # the files stay until all workers have finished


def read_parts(files: tuple[Path, Path], grid: tessel.Partition) -> list[Tensor]:
    """Read this worker's box of values and labels: (1, 1, height, width, depth)."""
    sources = tuple(data.FromArrays([path]) for path in files)
    ((*volumes,),) = data.PartLoader(data.PartDataset(sources, grid))
    return [each[:, None] for each in volumes]


def segmenter(settings: Settings) -> Any:
    """A SwinUNETR of MONAI with random weights."""
    from monai.networks.nets import SwinUNETR

    torch.manual_seed(0)  # the same model on all workers
    made = SwinUNETR(
        in_channels=1,
        out_channels=CLASSES,
        feature_size=settings.width,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 4),
        window_size=4,
    )
    return made.to(settings.dtype)


def train(model: Any, values: Tensor, labels: Tensor, settings: Settings) -> Trained:
    """Train in plain torch and MONAI, with plain or spread tensors."""
    from monai.losses import DiceCELoss

    values = values.to(settings.dtype)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate)
    losses = []
    for _ in range(settings.steps):
        with count_traffic() as traffic, count_memory() as memory:
            loss = criterion(model(values), labels)
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found = model.eval()(values).argmax(1, keepdim=True)
    middle = values.shape[-1] // 2
    slices: list[Any] = [each[0, 0, :, :, middle] for each in (values, labels, found)]
    whole = [each.full() if isinstance(each, tessel.Tensor) else each for each in slices]
    return Trained(losses, [memory.peak], [traffic.bytes_sent], whole)


def train_whole(files: tuple[Path, Path], settings: Settings) -> Trained:
    """Train in one process."""
    values, labels = (torch.from_numpy(np.load(path))[None, None] for path in files)
    return train(segmenter(settings), values, labels, settings)


def train_in_parts(files: tuple[Path, Path], settings: Settings) -> Trained:
    """Train on all workers, each of which has some layers of the volume."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1, 1])
    model = tessel.nn.distribute_module(segmenter(settings), grid)
    values, labels = read_parts(files, grid)
    mine = train(model, values, labels, settings)
    # each worker counts only its own; all are printed
    told = P.group.share_objects((mine.peak[0], mine.sent[0]))
    peak, sent = ([pair[k] for pair in told] for k in range(2))
    return Trained(mine.losses, peak, sent, mine.slices)


def draw(parts: Trained, path: Path) -> None:
    """Save a picture of a slice, with the rows of each worker, and its segmentation."""
    figure = viz.new_figure(10, 3.6)
    axes = figure.subplots(1, 3)
    titles = "a slice, and who has it", "its labels", "the segmentation"
    for ax, title, image in zip(axes, titles, parts.slices, strict=True):
        ax.imshow(image, cmap="gray" if ax is axes[0] else "viridis")
        ax.set_title(title)
        ax.set_axis_off()
    rows, workers = len(parts.slices[0]), len(parts.peak)
    for worker in range(1, workers):
        axes[0].axhline(worker * rows / workers - 0.5, color=viz.colour(1), lw=1.5)
    figure.savefig(path, dpi=72, bbox_inches="tight")


def report(parts: Trained, whole: Trained | None) -> None:
    """Print the losses, memory and bytes sent."""
    for step, loss in enumerate(parts.losses):
        beside = "" if whole is None else f", in one process {whole.losses[step]:.4f}"
        print(f"step {step}: loss {loss:.4f}{beside}")
    right = (parts.slices[1] == parts.slices[2]).double().mean()
    print(f"labels that are right in the middle: {float(right):.0%}")
    if whole is not None:
        share = max(parts.peak) / whole.peak[0]
        print(f"memory: at most {share:.0%} of that of one process")
    print(f"memory of each worker: {', '.join(map(viz.num_bytes, parts.peak))}")
    print(f"sent by each worker in a step: {', '.join(map(viz.num_bytes, parts.sent))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--size", type=int, nargs=3, default=Settings.size, help="multiples of 32, one 64 or more"
    )
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--width", type=int, default=Settings.width, help="features of a voxel")
    parser.add_argument("--rate", type=float, default=Settings.rate, help="of learning")
    parser.add_argument(
        "--volume", type=Path, nargs=2, help="values and labels, instead of a volume that is made"
    )
    parser.add_argument("--single", action="store_true", help="in single precision")
    parser.add_argument("--parts-only", action="store_true", help="nothing in one process")
    parser.add_argument("--output", type=Path, help="where to save a picture")
    options = parser.parse_args()
    dtype = torch.float32 if options.single else torch.float64
    settings = Settings(tuple(options.size), options.steps, options.width, options.rate, dtype)

    P = tessel.world()
    with nullcontext(options.volume) if options.volume else volume(settings) as files:
        parts = train_in_parts(files, settings)
        if P.rank == 0:
            print(f"{P.size} worker{'s' if P.size > 1 else ''} train on {files[0].name}")
            report(parts, None if options.parts_only else train_whole(files, settings))
            if options.output is not None:
                draw(parts, options.output)


if __name__ == "__main__":
    main()
