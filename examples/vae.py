"""Decode a picture or a film that does not fit on one worker, without tiles or seams.

An autoencoder of diffusers, written without workers in mind, decodes a latent of which each worker
has some rows: `distribute_module(vae, grid)`, then `vae.decode(z)`. For comparison one process
decodes the whole, and also tiles that it blends, as diffusers offers for scarce memory
(`enable_tiling`). The parts agree with the whole picture, the tiles do not.

Weights are random, or read from a folder that `save_pretrained` wrote.

    pip install diffusers
    python examples/vae.py
    tessel run -n 4 examples/vae.py --size 48 --output decoded.png
    tessel run -n 2 examples/vae.py --film
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tessel
from tessel import viz
from tessel.testing import count_memory, count_traffic


@dataclass(frozen=True)
class Decoded:
    """A picture (1, channels, [frames,] height, width), and the memory and bytes that it took.

    Attributes:
        picture: the whole picture.
        peak: the peak memory of tensors on each worker, in bytes.
        sent: the bytes that each worker sent.
    """

    picture: Tensor
    peak: list[int]
    sent: list[int]


def autoencoder(film: bool, folder: Path | None = None) -> Any:
    """An autoencoder of diffusers in float64, with weights from a folder, or random ones."""
    from diffusers import AutoencoderKL, AutoencoderKLWan

    kind = AutoencoderKLWan if film else AutoencoderKL
    if folder is not None:
        return kind.from_pretrained(folder, torch_dtype=torch.float64).eval()
    torch.manual_seed(0)  # the same model on all workers
    made: Any
    if film:
        made = AutoencoderKLWan(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
            scale_factor_temporal=2,
            scale_factor_spatial=4,
        )
    else:
        made = AutoencoderKL(
            block_out_channels=(16, 32, 32),
            layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            norm_num_groups=8,
            sample_size=32,
        )
    return made.double().eval()


def latent(vae: Any, size: int, film: bool) -> Tensor:
    """Smooth rings in every channel, and some noise: (1, channels, [frames,] size, size)."""
    across = torch.linspace(-1, 1, size, dtype=torch.float64)
    radius = (across[:, None] ** 2 + across[None, :] ** 2).sqrt()
    channels = vae.config.z_dim if film else vae.config.latent_channels
    rings = torch.stack([torch.cos((3 + 2 * k) * radius) for k in range(channels)])
    draw = torch.Generator().manual_seed(1)
    noise = torch.randn(rings.shape, dtype=rings.dtype, generator=draw)
    z = (rings + 0.3 * noise)[None]
    return torch.stack([z, 0.8 * z, 0.5 * z], 2) if film else z


def decode_whole(vae: Any, z: Tensor) -> Decoded:
    """Decode in one process."""
    with torch.no_grad(), count_memory() as memory:
        picture = vae.decode(z).sample
    return Decoded(picture, [memory.peak], [0])


def decode_in_tiles(vae: Any, z: Tensor) -> Decoded:
    """Decode tiles, half as large as the picture, in one process, and blend them."""
    tiled = copy.deepcopy(vae)
    tiled.enable_tiling()
    # diffusers specifies the sizes of tiles in two ways: in latents, or in pixels with a stride
    if hasattr(tiled, "tile_latent_min_size"):
        scale = tiled.tile_sample_min_size // tiled.tile_latent_min_size
        tiled.tile_latent_min_size = z.shape[-1] // 2
        tiled.tile_sample_min_size = scale * tiled.tile_latent_min_size
    else:
        scale = tiled.spatial_compression_ratio
        side = scale * (z.shape[-1] // 2)
        tiled.tile_sample_min_height = tiled.tile_sample_min_width = side
        tiled.tile_sample_stride_height = tiled.tile_sample_stride_width = 3 * side // 4
    return decode_whole(tiled, z)


def decode_in_parts(vae: Any, z: Tensor) -> Decoded:
    """Decode on all workers, each of which has some rows of the latent and of the picture."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1] * (z.dim() - 2) + [P.size, 1])
    spread: Any = tessel.nn.distribute_module(copy.deepcopy(vae), grid)
    part = tessel.spread(z, grid)
    with torch.no_grad(), count_traffic() as traffic, count_memory() as memory:
        picture = spread.decode(part).sample
    told = P.group.share_objects((memory.peak, traffic.bytes_sent))
    peak, sent = ([pair[k] for pair in told] for k in range(2))
    return Decoded(picture.full(), peak, sent)


def decibels(picture: Tensor, whole: Tensor) -> float:
    """The accuracy of a picture compared with the whole one, relative to its range."""
    error = (picture - whole).square().mean().sqrt()
    return float(20 * torch.log10((whole.max() - whole.min()) / error))


def draw(ways: dict[str, Decoded], path: Path) -> None:
    """Save the pictures, and their differences from the whole one."""
    figure = viz.new_figure(3.2 * len(ways), 6.2)
    axes = figure.subplots(2, len(ways), squeeze=False)
    whole = ways["whole"].picture
    low, high = (float(whole.flatten().quantile(q)) for q in (0.01, 0.99))
    for column, (name, each) in enumerate(ways.items()):
        shown = {name: each.picture, f"{name} − whole": each.picture - whole}
        for row, (title, values) in enumerate(shown.items()):
            image = values[0].mean(0)  # over colours
            image = image[-1] if image.dim() == 3 else image  # the last frame of a film
            ax = axes[row][column]
            limits = (low, high) if row == 0 else (0.3 * (low - high), 0.3 * (high - low))
            ax.imshow(image, cmap="gray" if row == 0 else "RdBu", vmin=limits[0], vmax=limits[1])
            ax.set_title(title)
            ax.set_axis_off()
    figure.savefig(path, dpi=72, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=24, help="height and width of the latent")
    parser.add_argument("--film", action="store_true", help="a video autoencoder, and three frames")
    parser.add_argument("--weights", type=Path, help="a folder that `save_pretrained` wrote")
    parser.add_argument("--output", type=Path, help="where to save a picture")
    options = parser.parse_args()

    P = tessel.world()
    vae = autoencoder(options.film, options.weights)
    z = latent(vae, options.size, options.film)
    ways = {"parts": decode_in_parts(vae, z)}
    if P.rank != 0:
        return
    ways = {"whole": decode_whole(vae, z), "tiles": decode_in_tiles(vae, z), **ways}
    whole, parts = ways["whole"], ways["parts"]
    print(f"{P.size} worker{'s' if P.size > 1 else ''} decode {tuple(whole.picture.shape)}")
    for name, each in ways.items():
        said = f"{name}: at most {max(each.peak) / whole.peak[0]:.0%} of the memory of the whole"
        if name != "whole":
            largest = (each.picture - whole.picture).abs().max() / whole.picture.abs().max()
            said += f", largest error {float(largest):.1e} of the largest value"
        if name == "tiles":
            said += f" ({decibels(each.picture, whole.picture):.0f} dB)"
        print(said)
    print(f"sent by each worker: {', '.join(map(viz.num_bytes, parts.sent))}")
    if options.output is not None:
        draw(ways, options.output)


if __name__ == "__main__":
    main()
