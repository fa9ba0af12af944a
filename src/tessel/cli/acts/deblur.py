"""The fifth act: a picture that was blurred in three ways and is noisy is reconstructed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from tessel import viz
from tessel.cli.acts.movements import grid
from tessel.imaging import (
    DistributedContext,
    FactoryConfig,
    TilingConfig,
    make_distrib_bundle,
    solvers,
)
from tessel.layout import Layout
from tessel.testing import count_memory, count_traffic

TITLE = "a reconstruction"
LIMIT = 1e-10  # of the error: sums in another order, iterated
ITERATIONS = 15
NOISE = 0.03
RADIUS = 4  # of the blurs
WIDTHS = ((1.0, 1.0, 0.0), (2.0, 2.0, 0.0), (1.2, 2.4, 0.6))  # standard deviations, and an angle

Note = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What came of it, as the first worker knows it.

    Args:
        error: the largest difference of the picture from that of one process.
        psnr: that of the first measurement, and after each iteration.
        alone: the peak of the tensors' bytes in one process.
        peaks: the same on each worker.
        sent: the bytes that each worker sent in an iteration.
        seconds: how long one process took for all iterations, and the workers.
        layout: where the picture lay.
        pictures: the first measurement, the reconstruction and the truth.
    """

    error: float
    psnr: tuple[float, ...]
    alone: int
    peaks: tuple[int, ...]
    sent: tuple[int, ...]
    seconds: tuple[float, float]
    layout: Layout
    pictures: tuple[Tensor, Tensor, Tensor]

    @property
    def worst(self) -> float:
        """The error."""
        return self.error

    @property
    def wrong(self) -> list[str]:
        """The title, if the picture is another one, or no better than the measurement."""
        right = self.error <= LIMIT and self.psnr[-1] > self.psnr[0]
        return [] if right else [TITLE]


class Blur:
    """A blur of a periodic picture: nothing in it knows of workers."""

    padding = "circular"

    def __init__(self, filter: Tensor) -> None:
        self.filter = filter

    def A(self, x: Tensor) -> Tensor:
        """The blurred picture."""
        return self._filtered(x, self.filter.flip(-2, -1))

    def A_adjoint(self, y: Tensor) -> Tensor:
        """What the adjoint makes of a blurred picture."""
        return self._filtered(y, self.filter)

    def _filtered(self, x: Tensor, kernel: Tensor) -> Tensor:
        channels = x.shape[1]
        wide = F.pad(x, (RADIUS,) * 4, mode="circular")
        return F.conv2d(wide, kernel.expand(channels, 1, -1, -1), groups=channels)


class Median:
    """The median of each pixel and its eight neighbours, as a denoiser."""

    def prox(self, x: Tensor) -> Tensor:
        """The picture with less noise."""
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


def side(size: int) -> int:
    """The length of the picture's sides: large enough for something to be seen."""
    return max(64, size)


def picture(length: int) -> Tensor:
    """Rings, a disc and tiles in colours, from 0 to 1."""
    line = torch.linspace(-1, 1, length, dtype=torch.float64)
    y, x = line[:, None], line[None, :]
    rings = 0.5 + 0.5 * torch.cos(14 * (x**2 + y**2))
    disc = ((x - 0.3) ** 2 + (y + 0.2) ** 2 < 0.2).double()
    tiles = (torch.floor(4 * x) + torch.floor(4 * y)).remainder(2)
    shade = (0.5 + 0.5 * x).expand_as(rings)
    red = rings * (1 - disc) + 0.9 * disc
    return torch.stack([red, 0.7 * shade + 0.3 * rings, 0.2 + 0.6 * tiles])[None]


def measurements(truth: Tensor, blurs: list[Blur]) -> list[Tensor]:
    """What is measured: the noise depends on the number of the measurement alone."""
    found = []
    for number, blur in enumerate(blurs):
        draw = torch.Generator().manual_seed(number)
        noise = torch.randn(truth.shape, dtype=truth.dtype, generator=draw)
        found.append(blur.A(truth) + NOISE * noise)
    return found


def perform(size: int, note: Note | None = None) -> Report | None:
    """Run on every worker; the report on the first."""
    truth = picture(side(size))
    blurs = [Blur(gaussian(*widths)) for widths in WIDTHS]
    measured = measurements(truth, blurs)
    with DistributedContext(device_mode="cpu") as ctx:
        bundle = make_distrib_bundle(
            ctx,
            factory_config=FactoryConfig(physics=blurs, measurements=measured),
            signal_shape=truth.shape,
            dtype=truth.dtype,
            prior=Median(),
            tiling=TilingConfig(patch_size=side(size) // 8, receptive_field_size=1),
            partition=grid(ctx.world_size),
        )
        signal = bundle.signal
        psnr = solvers.PSNR(signal.layout.local_part(truth), signal.layout)
        first = psnr(signal.layout.local_part(measured[0]))
        fidelity, prior = bundle.data_fidelity, bundle.prior
        assert prior is not None
        method = solvers.PGD(fidelity, prior)
        curve = [first]

        def each(iteration: int, x: Tensor) -> None:
            curve.append(psnr(x))
            if note is not None:
                note(f"{TITLE}: PSNR {curve[-1]:.2f} dB")

        begin = time.perf_counter()
        solvers.solve(method, signal, max_iterations=ITERATIONS, each=each)
        seconds = time.perf_counter() - begin
        result = signal.whole()
        with count_traffic() as traffic, count_memory() as memory, torch.no_grad():
            x = signal.data
            prior.prox(x - fidelity.grad(x))
        parts = ctx.partition.group.share_objects((memory.peak, traffic.bytes_sent))
        if ctx.rank != 0:
            return None
        peaks, sent = zip(*parts, strict=True)
        expected, alone, before = _alone(blurs, measured)
        return Report(
            error=float((result - expected).abs().max()),
            psnr=tuple(curve),
            alone=alone,
            peaks=peaks,
            sent=sent,
            seconds=(before, seconds),
            layout=signal.layout,
            pictures=(measured[0][0], result[0], truth[0]),
        )


def _alone(blurs: list[Blur], measured: list[Tensor]) -> tuple[Tensor, int, float]:
    """The same in one process, with plain torch: the picture, the memory and the time."""

    def iterate(x: Tensor) -> Tensor:
        slopes = [b.A_adjoint(b.A(x) - y) for b, y in zip(blurs, measured, strict=True)]
        return Median().prox(x - sum(slopes) / len(blurs))

    x = torch.zeros_like(measured[0])
    begin = time.perf_counter()
    for _ in range(ITERATIONS):
        x = iterate(x)
    seconds = time.perf_counter() - begin
    with count_memory() as memory:
        iterate(x)
    return x, memory.peak, seconds


# --- what is shown


def tables(report: Report) -> list[Table]:
    """One process and every worker, a line each."""
    height, width = report.layout.shape[2:]
    title = f"{TITLE} of a picture of {height} × {width} from {len(WIDTHS)} blurs"
    found = Table(title=title, box=SIMPLE_HEAD, title_style="bold", pad_edge=False)
    found.add_column("who", no_wrap=True)
    for name in ("part", "in an iteration", "share", "sent", "time"):
        found.add_column(name, justify="right", no_wrap=True)
    before, after = (f"{seconds:.2f} s" for seconds in report.seconds)
    found.add_row(
        "one process", f"{height} × {width}", viz.num_bytes(report.alone), "100%", "", before
    )
    for place, (peak, sent) in enumerate(zip(report.peaks, report.sent, strict=True)):
        rows, columns = report.layout.shape_on(report.layout.partition.ranks[place])[2:]
        found.add_row(
            f"worker {place}",
            f"{rows} × {columns}",
            viz.num_bytes(peak),
            f"{peak / report.alone:.0%}",
            viz.num_bytes(sent),
            "" if place else after,
        )
    return [found]


def legends(report: Report) -> list[str]:
    """What came of it, and what the table says of exactness."""
    error = "0" if report.error == 0 else f"{report.error:.0e}"
    return [
        "in an iteration: bytes of tensors that it makes, at most at once; time of all iterations\n"
        f"PSNR {report.psnr[0]:.1f} dB of the first measurement, {report.psnr[-1]:.1f} dB after "
        f"{len(report.psnr) - 1} iterations; largest difference from one process: {error}"
    ]


def draw(report: Report, path: Path) -> None:
    """The measurement, the reconstruction and the truth, side by side."""
    figure = viz.new_figure(12.0, 4.4)
    titles = (
        f"measured, {report.psnr[0]:.1f} dB",
        f"reconstructed, {report.psnr[-1]:.1f} dB",
        "the truth",
    )
    for ax, image, title in zip(figure.subplots(1, 3), report.pictures, titles, strict=True):
        ax.imshow(image.movedim(0, -1).clamp(0, 1).numpy())
        ax.set_title(title)
        ax.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.2)
