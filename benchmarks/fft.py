"""Fourier transforms of three dimensions on workers against mpi4py-fft and torch.

A cube of real or complex numbers, in single or double precision, in slabs or pencils, is
transformed forward. All keep their input; the results of Tessel and mpi4py-fft stay where the last
step leaves them. mpi4py-fft plans with FFTW_MEASURE, takes that order of axes that is the fastest
on its processes, and writes into a buffer that it keeps; all others give a new tensor. Before it is
timed every transform is checked with a wave, which has one coefficient. With pyfftw installed
beside Tessel (the extra `fft`), its workers choose FFTW where it is faster; how long they take with
torch's transforms alone is measured as well.

Two workers have no grid of pencils that is not one of slabs. FFTW's plans are kept in build/mpi,
so that the first run takes longer; to plan anew, remove the files `*_wisdom_*` there.

    benchmarks/setup_peers.sh    # once
    python benchmarks/fft.py [--rounds 6] [--all] [--quick] [--only TEXT] [--without-peers]

Without --all each length, dtype and grid is there, but not each with each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness.claim import Case, Claim, Settings
from harness.command import parser, run
from harness.contenders import InOneProcess, OnWorkers, UnderMpi
from torch import Tensor

import tessel

OWN = "Tessel, torch's transforms"
MPI, THREADS, ALONE = "mpi4py-fft", "torch, P threads", "torch, 1 thread"
LENGTHS = (64, 128, 256)
AIMS = {64: 1.0, 128: 0.8, 256: 0.65}  # of mpi4py-fft's time, in slabs
DTYPES = {
    "float32": torch.complex64,
    "float64": torch.complex128,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
GRIDS = {"slab 2×1×1": (2, 1, 1), "slab 4×1×1": (4, 1, 1), "pencil 2×2×1": (2, 2, 1)}
WAVE = (1, 2, 3)  # its frequencies
# calls after which small parts have their library, in which slower ones take their turns, too; and
# the most values of a small part, or a little less: all workers make as many calls
CHOOSING, LARGEST = 50, 2**22
TOLERANCES = {torch.complex64: 1e-5, torch.complex128: 1e-12}  # of the largest coefficient


def transform(settings: Settings) -> Any:
    """The operator over the workers."""
    n, dtype = settings["length"], getattr(torch, settings["dtype"])
    along = [tessel.ParDFT(DTYPES[settings["dtype"]], n) for _ in range(2)]
    factors = tessel.kron(*along, tessel.ParDFT(dtype, n))
    return tessel.distribute(factors, settings["grid"], "anywhere")


def wave(settings: Settings, box: Any) -> Tensor:
    """The part of a wave that lies in a box; real numbers have its real part."""
    turn = 2j * torch.pi / settings["length"]
    i, j, k = (
        (turn * frequency * torch.arange(*interval, dtype=torch.float64)).exp()
        for frequency, interval in zip(WAVE, box, strict=True)
    )
    found = (i[:, None, None] * j[:, None]) * k
    dtype = getattr(torch, settings["dtype"])
    return (found if dtype.is_complex else found.real).to(dtype)


def check(settings: Settings, y: Tensor, box: Any) -> None:
    """The box holds the transform of the wave: zeros, and one coefficient if it lies here."""
    largest = settings["length"] ** 3
    where = [at - start for at, (start, _) in zip(WAVE, box, strict=True)]
    if all(start <= at < stop for at, (start, stop) in zip(WAVE, box, strict=True)):
        y[tuple(where)] -= largest if settings["dtype"].startswith("complex") else largest / 2
    error = float(y.abs().max()) / largest if y.numel() else 0.0
    assert error < TOLERANCES[y.dtype], f"a wave is transformed with an error of {error:.1e}"


def by_tessel(settings: Settings) -> Callable[[], object]:
    F = transform(settings)
    with torch.no_grad():
        check(settings, F * wave(settings, F.layout_in.box()), F.layout_out.box())
    x = torch.randn(F.layout_in.local_shape, dtype=getattr(torch, settings["dtype"]))

    @torch.no_grad()
    def step() -> Tensor:
        return F * x

    for _ in range(CHOOSING * (settings["length"] ** 3 <= LARGEST * tessel.world().size)):
        step()
    return step


def by_torch(settings: Settings) -> Callable[[], object]:
    n, dtype = settings["length"], getattr(torch, settings["dtype"])
    function = torch.fft.fftn if dtype.is_complex else torch.fft.rfftn
    whole = [(0, n)] * 3
    check(settings, function(wave(settings, whole)), whole)
    x = torch.randn((n,) * 3, dtype=dtype)
    return lambda: function(x)


def case(length: int, dtype: str, form: str) -> Case:
    grid = GRIDS[form]
    workers = grid[0] * grid[1] * grid[2]
    return Case(
        f"{length}³ {dtype}, {form}",
        workers,
        {"length": length, "dtype": dtype, "grid": list(grid)},
        aims={MPI: AIMS[length] if form.startswith("slab") else None, THREADS: 1.2},
    )


def cases(every: bool) -> list[Case]:
    """All of them, or every length, dtype and grid, but not each with each."""
    slab, four, pencil = GRIDS
    chosen = {
        *((length, "complex64", form) for length in LENGTHS for form in GRIDS),
        *((256, dtype, slab) for dtype in DTYPES),
        (128, "float32", slab),
        (128, "float64", four),
        (256, "float32", pencil),
    }
    combinations = [(n, d, form) for form in GRIDS for n in LENGTHS for d in DTYPES]
    return [case(*each) for each in combinations if every or each in chosen]


def claim(every: bool) -> Claim:
    return Claim(
        "fft",
        "3-D Fourier transforms against mpi4py-fft and torch with as many threads",
        cases(every),
        [
            OnWorkers("Tessel", by_tessel, split=True),
            OnWorkers(OWN, by_tessel, environment={"TESSEL_FFT": "torch"}),
            UnderMpi(MPI, "fft_mpi.py"),
            InOneProcess(THREADS, by_torch),
            InOneProcess(ALONE, by_torch, threads=1),
        ],
        note="""Forward. torch has no more threads than there are cores. "compute" is local
        transforms and Python around them.""",
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--all", action="store_true", help="every length, dtype and grid")
    chosen = options.parse_args()
    raise SystemExit(run(claim(chosen.all), chosen))


if __name__ == "__main__":
    main()
