"""A picture that was blurred in three ways and is noisy is reconstructed by plug-and-play.

The picture is made here. Three blurs, their measurements and the patches of the denoiser are spread
over all workers; with --parts, the picture itself is, too, and workers exchange halos. The PSNR of
each iteration is the same on any number of workers. It needs `pip install tessel[imaging]`.

    python examples/deblur.py
    tessel run -n 4 examples/deblur.py --size 512 --parts 2 2
    torchrun --nproc-per-node 2 examples/deblur.py --output result.png
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from deepinv.models import MedianFilter
from deepinv.optim import L2, PnP
from deepinv.physics import Blur, GaussianNoise
from deepinv.physics.functional.blur import gaussian_blur
from rich.console import Console
from torch import Tensor

from tessel import viz
from tessel.imaging import DistributedContext, FactoryConfig, TilingConfig, make_distrib_bundle
from tessel.imaging.solvers import PSNR


@dataclass(frozen=True)
class Settings:
    """What is reconstructed, and how."""

    size: int = 128
    iterations: int = 10
    lr: float = 1.0
    denoiser_sigma: float = 0.05
    noise: float = 0.03
    seed: int = 42
    patch: int = 64
    parts: tuple[int, int] | None = None  # the grid on which the picture lies; None for whole
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Result:
    """How it went: the PSNR of each iteration, and pictures."""

    rank: int
    workers: int
    psnr: list[float]
    measured: Tensor | None  # the first measurement, on a worker that has it
    reconstruction: Tensor
    clean: Tensor
    seconds: float


def picture(size: int, dtype: torch.dtype) -> Tensor:
    """Coloured rings behind tiles, of shape (1, 3, size, size), from 0 to 1."""
    line = torch.linspace(-1, 1, size, dtype=dtype)
    y, x = line[:, None], line[None, :]
    rings = 0.5 + 0.5 * torch.cos(14 * (x**2 + y**2))
    tiles = ((torch.floor(4 * x) + torch.floor(4 * y)) % 2).expand(size, size)
    shade = (0.5 + 0.5 * x).expand(size, size)
    disc = ((x - 0.3) ** 2 + (y + 0.2) ** 2 < 0.2).to(dtype)
    colours = (rings * (1 - disc) + 0.9 * disc, 0.7 * shade + 0.3 * rings, 0.2 + 0.6 * tiles)
    return torch.stack(colours)[None]


def reconstruct(settings: Settings, is_shown: bool = False) -> Result:
    """Reconstruct the picture on all workers of the job."""
    begin = time.perf_counter()
    with DistributedContext(seed=settings.seed, device_mode="cpu") as ctx:
        clean = picture(settings.size, settings.dtype).to(ctx.device)
        kernels = [
            gaussian_blur(sigma=(1.0, 1.0)),
            gaussian_blur(sigma=(2.0, 2.0)),
            gaussian_blur(sigma=(1.5, 3.0), angle=30),
        ]

        def physics(i: int, device: torch.device, shared: object) -> Blur:
            kernel = kernels[i].to(device, settings.dtype)
            blur = Blur(filter=kernel, padding="circular", device=device)
            blur.noise_model = GaussianNoise(sigma=settings.noise)
            return blur

        measured: dict[int, Tensor] = {}  # those of this worker

        def measurement(i: int, device: torch.device, shared: object) -> Tensor:
            measured[i] = physics(i, device, shared)(clean)
            return measured[i]

        denoiser = MedianFilter(kernel_size=3)  # DRUNet(pretrained="download") is better
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(
                physics=physics,
                measurements=measurement,
                data_fidelity=L2(),
                num_operators=len(kernels),
            ),
            signal_shape=clean.shape,
            dtype=settings.dtype,
            prior=PnP(denoiser=denoiser),
            tiling=TilingConfig(patch_size=settings.patch, receptive_field_size=1),
            partition=settings.parts,
        )
        signal = bundle.signal
        measure = PSNR(signal.layout.local_part(clean), signal.layout)
        signal.update_(torch.zeros_like(signal.data))
        psnr = []
        with torch.no_grad():
            for it in range(settings.iterations):
                grad = bundle.data_fidelity.grad(signal)
                signal.update_(signal.data - settings.lr * grad)
                denoised = bundle.prior.prox(signal, sigma_denoiser=settings.denoiser_sigma)
                signal.update_(denoised)
                psnr.append(measure(signal.data))
                if is_shown and ctx.rank == 0:
                    show(it, psnr)
        whole, seconds = signal.whole(), time.perf_counter() - begin
        return Result(ctx.rank, ctx.world_size, psnr, measured.get(0), whole, clean, seconds)


# -- the script -----------------------------------------------------------------------------------

console = Console(highlight=False)


def show(it: int, psnr: Sequence[float]) -> None:
    bar = "━" * round(1.5 * psnr[-1])
    console.print(f"iteration {it + 1:2d}  PSNR {psnr[-1]:6.3f} dB  {bar}")


def draw(result: Result, path: Path) -> None:
    """Save what was measured, the reconstruction and the truth side by side."""
    pictures = {
        "measured": result.measured,
        f"reconstructed, {result.psnr[-1]:.1f} dB": result.reconstruction,
        "truth": result.clean,
    }
    known = {title: each for title, each in pictures.items() if each is not None}
    figure = viz.new_figure(4.0 * len(known), 4.2)
    for axes, (title, each) in zip(figure.subplots(1, len(known)), known.items(), strict=True):
        axes.imshow(each[0].movedim(0, -1).clamp(0, 1).float().numpy())
        axes.set_title(title)
        axes.set_axis_off()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description="Reconstruct a blurred, noisy picture.")
    parser.add_argument("--size", type=int, default=Settings.size, help="of the picture's sides")
    parser.add_argument("--iterations", type=int, default=Settings.iterations)
    parser.add_argument("--lr", type=float, default=Settings.lr)
    parser.add_argument("--denoiser-sigma", type=float, default=Settings.denoiser_sigma)
    parser.add_argument("--noise", type=float, default=Settings.noise)
    parser.add_argument("--patch", type=int, default=Settings.patch, help="size of a patch")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument(
        "--parts", type=int, nargs=2, metavar="N", help="rows and columns of parts of the picture"
    )
    parser.add_argument("--output", type=Path, help="where to save a PNG")
    return parser.parse_args()


def main() -> None:
    asked = vars(arguments())
    output, parts = asked.pop("output"), asked.pop("parts")
    result = reconstruct(Settings(**asked, parts=parts and tuple(parts)), is_shown=True)
    if result.rank == 0:
        workers = f"{result.workers} worker{'s' if result.workers > 1 else ''}"
        console.print(f"{workers}, {result.seconds:.1f} s")
        if output is not None:
            draw(result, output)


if __name__ == "__main__":
    main()
