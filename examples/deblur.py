"""Reconstruct a picture from three noisy, blurred measurements by plug-and-play.

The picture is generated here. Three blurs, their measurements and the patches of the denoiser are
distributed over all workers; with --parts, so is the picture itself, and workers exchange halos.
The PSNR of each iteration is the same on any number of workers.

Blurs and denoiser are a few lines of torch; with --deepinv they are those of deepinv, which
`pip install 'tessel[imaging]'` installs. Any object with `A` and `A_adjoint` will do.

    python examples/deblur.py
    tessel run -n 4 examples/deblur.py --size 512 --parts 2 2
    torchrun --nproc-per-node 2 examples/deblur.py --deepinv --output result.png
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from torch import Tensor

import tessel
from tessel import viz
from tessel.imaging import (
    DistributedContext,
    FactoryConfig,
    TilingConfig,
    make_distrib_bundle,
    solvers,
)

WIDTHS = ((1.0, 1.0, 0.0), (2.0, 2.0, 0.0), (1.2, 2.4, 0.6))  # standard deviations and an angle
RADIUS = 4  # of the filters


@dataclass(frozen=True)
class Settings:
    """The settings of the picture and its reconstruction."""

    size: int = 128
    iterations: int = 10
    lr: float = 1.0
    noise: float = 0.03
    seed: int = 42
    patch: int = 64
    parts: tuple[int, int] | None = None  # the grid that splits the picture; None for none
    dtype: torch.dtype = torch.float32
    deepinv: bool = False


@dataclass(frozen=True)
class Result:
    """The result: the PSNR of the first measurement and of each iteration, and pictures."""

    rank: int
    workers: int
    psnr: list[float]
    measured: Tensor
    reconstruction: Tensor
    clean: Tensor
    seconds: float


# -- the problem: plain torch, which knows nothing of workers -------------------------------------


class Blur:
    """A blur of a periodic picture."""

    padding = "circular"

    def __init__(self, filter: Tensor) -> None:
        self.filter = filter

    def A(self, x: Tensor) -> Tensor:
        """Blur a picture."""
        return self.filtered(x, self.filter.flip(-2, -1))

    def A_adjoint(self, y: Tensor) -> Tensor:
        """Apply the adjoint to a blurred picture."""
        return self.filtered(y, self.filter)

    def filtered(self, x: Tensor, kernel: Tensor) -> Tensor:
        channels = x.shape[1]
        wide = F.pad(x, (RADIUS,) * 4, mode="circular")
        return F.conv2d(wide, kernel.expand(channels, 1, -1, -1), groups=channels)


class Median:
    """The median of each pixel and its eight neighbours, as a denoiser."""

    def prox(self, x: Tensor) -> Tensor:
        """Denoise a picture."""
        wide = F.pad(x, (1, 1, 1, 1), mode="replicate")
        near = wide.unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2)
        return near.median(dim=-1).values


def gaussian(first: float, second: float, angle: float) -> Tensor:
    """A Gaussian filter with these standard deviations along two axes."""
    line = torch.arange(-RADIUS, RADIUS + 1, dtype=torch.float64)
    turn = torch.tensor(angle, dtype=torch.float64)
    y, x = line[:, None], line[None, :]
    along, across = turn.cos() * x + turn.sin() * y, turn.cos() * y - turn.sin() * x
    values = torch.exp(-0.5 * ((along / first) ** 2 + (across / second) ** 2))
    return (values / values.sum())[None, None]


def picture(settings: Settings) -> Tensor:
    """Coloured rings, a disc and tiles, of shape (1, 3, size, size), from 0 to 1."""
    line = torch.linspace(-1, 1, settings.size, dtype=settings.dtype)
    y, x = line[:, None], line[None, :]
    rings = 0.5 + 0.5 * torch.cos(14 * (x**2 + y**2))
    disc = ((x - 0.3) ** 2 + (y + 0.2) ** 2 < 0.2).to(settings.dtype)
    tiles = (torch.floor(4 * x) + torch.floor(4 * y)).remainder(2)
    shade = (0.5 + 0.5 * x).expand_as(rings)
    red = rings * (1 - disc) + 0.9 * disc
    return torch.stack([red, 0.7 * shade + 0.3 * rings, 0.2 + 0.6 * tiles])[None]


def physics(settings: Settings, number: int) -> Any:
    """One of the blurs."""
    kernel = gaussian(*WIDTHS[number]).to(settings.dtype)
    if not settings.deepinv:
        return Blur(kernel)
    from deepinv import physics

    return physics.Blur(filter=kernel, padding="circular")


def measurement(settings: Settings, number: int) -> Tensor:
    """A measurement, whose noise depends only on the seed and its number."""
    clean = picture(settings)
    draw = torch.Generator().manual_seed(settings.seed + number)
    noise = torch.randn(clean.shape, dtype=torch.float64, generator=draw).to(settings.dtype)
    blurred: Tensor = physics(settings, number).A(clean)
    return blurred + settings.noise * noise


def problem(settings: Settings) -> tuple[list[Any], list[Tensor]]:
    """All blurs, and the measurement of each."""
    numbers = range(len(WIDTHS))
    blurs = [physics(settings, number) for number in numbers]
    return blurs, [measurement(settings, number) for number in numbers]


def denoiser(settings: Settings) -> tuple[Any, dict[str, float]]:
    """The prior, and the arguments of its prox besides the picture."""
    if not settings.deepinv:
        return Median(), {}
    from deepinv.models import MedianFilter  # DRUNet(pretrained="download") is better
    from deepinv.optim import PnP

    return PnP(denoiser=MedianFilter(kernel_size=3)), {"sigma_denoiser": 0.05}


def in_plain_torch(settings: Settings) -> Tensor:
    """The reconstruction in one process, which any number of workers must reproduce."""
    blurs, measured = problem(settings)
    x = torch.zeros_like(measured[0])
    for _ in range(settings.iterations):
        x = iterate_in_plain_torch(x, blurs, measured, settings)
    return x


def iterate_in_plain_torch(
    x: Tensor, blurs: Sequence[Any], measured: Sequence[Tensor], settings: Settings
) -> Tensor:
    """One iteration: a step against the mean of the gradients, and the denoiser."""
    gradients = [b.A_adjoint(b.A(x) - y) for b, y in zip(blurs, measured, strict=True)]
    prior, told = denoiser(settings)
    denoised: Tensor = prior.prox(x - settings.lr * sum(gradients) / len(blurs), **told)
    return denoised


# -- the same on workers --------------------------------------------------------------------------


def make_bundle(ctx: DistributedContext, settings: Settings) -> Any:
    """The blurs, measurements and patches of this worker, and the picture."""
    prior, _ = denoiser(settings)
    return make_distrib_bundle(
        ctx,
        factory_config=FactoryConfig(  # called for the operators of this worker
            physics=lambda number, device, shared: physics(settings, number),
            measurements=lambda number, device, shared: measurement(settings, number),
            num_operators=len(WIDTHS),
        ),
        signal_shape=(1, 3, settings.size, settings.size),
        dtype=settings.dtype,
        prior=prior,
        tiling=TilingConfig(patch_size=settings.patch, receptive_field_size=1),
        partition=settings.parts,
    )


def reconstruct(
    ctx: DistributedContext,
    bundle: Any,
    settings: Settings,
    each: Callable[[int, float], None] | None = None,
) -> Result:
    """Reconstruct the picture on all workers; `each` is called with the PSNR of each iteration."""
    clean, measured = picture(settings), measurement(settings, 0)
    signal = bundle.signal
    measure = solvers.PSNR(signal.layout.local_part(clean), signal.layout)
    psnr = [measure(signal.layout.local_part(measured))]

    def tell(iteration: int, x: Tensor) -> None:
        psnr.append(measure(x))
        if each is not None:
            each(iteration, psnr[-1])

    _, told = denoiser(settings)
    method = solvers.PGD(bundle.data_fidelity, bundle.prior, step=settings.lr, prior_arguments=told)
    begin = time.perf_counter()
    solvers.solve(method, signal, max_iterations=settings.iterations, each=tell)
    seconds = time.perf_counter() - begin
    return Result(ctx.rank, ctx.world_size, psnr, measured, signal.whole(), clean, seconds)


def run(settings: Settings, each: Callable[[int, float], None] | None = None) -> Result:
    """Run everything, on all workers of the job."""
    with DistributedContext(seed=settings.seed, device_mode="cpu") as ctx:
        return reconstruct(ctx, make_bundle(ctx, settings), settings, each)


# -- the script -----------------------------------------------------------------------------------

console = Console(highlight=False)


def show(iteration: int, psnr: float) -> None:
    bar = "━" * round(1.5 * psnr)
    console.print(f"iteration {iteration:2d}  PSNR {psnr:6.3f} dB  {bar}")


def draw(result: Result, path: Path, dpi: int = 55) -> None:
    """Save the measurement, the reconstruction and the truth side by side."""
    pictures = {
        f"measured, {result.psnr[0]:.1f} dB": result.measured,
        f"reconstructed, {result.psnr[-1]:.1f} dB": result.reconstruction,
        "the truth": result.clean,
    }
    figure = viz.new_figure(12.0, 4.4)
    for ax, (title, each) in zip(figure.subplots(1, 3), pictures.items(), strict=True):
        ax.imshow(each[0].movedim(0, -1).clamp(0, 1).float().numpy())
        ax.set_title(title)
        ax.set_axis_off()
    figure.savefig(path, dpi=dpi, bbox_inches="tight", pad_inches=0.2)


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description="Reconstruct a blurred, noisy picture.")
    parser.add_argument("--size", type=int, default=Settings.size, help="of the picture's sides")
    parser.add_argument("--iterations", type=int, default=Settings.iterations)
    parser.add_argument("--lr", type=float, default=Settings.lr, help="length of a step")
    parser.add_argument("--noise", type=float, default=Settings.noise)
    parser.add_argument("--patch", type=int, default=Settings.patch, help="size of a patch")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument(
        "--parts", type=int, nargs=2, metavar="N", help="rows and columns of parts of the picture"
    )
    parser.add_argument("--deepinv", action="store_true", help="blurs and denoiser of deepinv")
    parser.add_argument("--output", type=Path, help="where to save a PNG")
    return parser.parse_args()


def main() -> None:
    asked = vars(arguments())
    output, parts = asked.pop("output"), asked.pop("parts")
    settings = Settings(**asked, parts=parts and tuple(parts))
    is_first = tessel.world().rank == 0
    result = run(settings, show if is_first else None)
    if is_first:
        workers = f"{result.workers} worker{'s' if result.workers > 1 else ''}"
        console.print(f"{workers}, {result.seconds:.1f} s")
        if output is not None:
            draw(result, output)


if __name__ == "__main__":
    main()
