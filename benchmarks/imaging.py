"""Plug-and-play reconstruction against deepinv.distributed and against deepinv in one process.

A picture of 1024 × 1024 in three colours, three blurs and a small DnCNN as denoiser. An iteration
is a step down the mean of the data fidelities, and the denoiser in patches. Tessel has the picture
in parts, deepinv.distributed all of it on every worker. All have the same blurs, measurements and
weights, and each is compared with deepinv in one process first; the denoiser of deepinv.distributed
is another one near the border, where it pads patches.

Bytes are those that a worker receives in an iteration, at most. Tessel's are counted; for the
others they are what the best algorithm for the collective receives: 2 (P - 1) / P of a tensor for
an all-reduce, the tensor for a broadcast.

Memory is the peak of a process's resident memory in two iterations beyond what it had before its
problem was made, in fresh processes that have solved a tiny problem before; the allocator gives
back what is larger than 4 MiB.

    python benchmarks/imaging.py [--rounds 4] [--all] [--quick] [--only TEXT]

With --all there are also a picture of 2048 × 2048, memory on 2 workers, and Tessel with the whole
picture on every worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import resident
import torch
import torch.distributed as dist
from harness.claim import Case, Claim, Settings, Turn, is_timed
from harness.command import parser, run
from harness.contenders import Counted, InOneProcess, OnWorkers
from torch import Tensor
from values import check_close

import tessel
from tessel.imaging import DistributedContext, FactoryConfig, TilingConfig, make_distrib_bundle
from tessel.testing import count_traffic

WHOLE, DEEPINV, ALONE = "Tessel, whole", "deepinv.distributed", "deepinv, 1 process"
GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}
DEPTH, WIDTH, SIGMA = 5, 16, 0.05


@dataclass(frozen=True)
class Problem:
    """The side of the picture and of a patch."""

    size: int
    patch: int


TINY = Problem(64, 32)


# --- the problem


def operators() -> list[Any]:
    import deepinv

    blur = deepinv.physics.functional.blur.gaussian_blur
    kernels = [blur(sigma=(1.0, 1.0)), blur(sigma=(2.0, 2.0)), blur(sigma=(1.5, 3.0), angle=30)]
    return [deepinv.physics.Blur(filter=each, padding="circular") for each in kernels]


def denoiser() -> Any:
    """A small network with weights that make it no more than a little different from x."""
    import deepinv

    torch.manual_seed(0)
    made = deepinv.models.DnCNN(3, 3, depth=DEPTH, nf=WIDTH, pretrained=None)
    with torch.no_grad():
        for each in made.parameters():
            each.mul_(0.5)
    return made.eval()


def picture(problem: Problem) -> Tensor:
    line = torch.linspace(-1, 1, problem.size)
    rings = 0.5 + 0.5 * torch.cos(20 * (line[:, None] ** 2 + line[None, :] ** 2))
    return torch.stack([rings, rings.roll(problem.size // 3, 0), 1 - rings])[None]


def measured(problem: Problem, blurs: Sequence[Any], i: int) -> Tensor:
    draw = torch.Generator().manual_seed(i)
    truth = picture(problem)
    return blurs[i].A(truth) + 0.03 * torch.randn(truth.shape, generator=draw)


# --- the peers


@dataclass
class Peer:
    """An image, and what an iteration makes of it."""

    x: Tensor
    step: Callable[[Tensor], Tensor]
    whole: Callable[[Tensor], Tensor] = lambda x: x

    @torch.no_grad()
    def iterate(self) -> None:
        self.x = self.step(self.x)


def by_tessel(problem: Problem, partition: tuple[int, int] | None) -> Peer:
    import deepinv

    blurs = operators()
    ctx = DistributedContext(device_mode="cpu").__enter__()  # left with the process
    bundle = make_distrib_bundle(
        ctx,
        factory_config=FactoryConfig(
            physics=lambda i, device, shared: blurs[i],
            measurements=lambda i, device, shared: measured(problem, blurs, i),
            data_fidelity=deepinv.optim.L2(),
            num_operators=len(blurs),
        ),
        signal_shape=(1, 3, problem.size, problem.size),
        prior=deepinv.optim.PnP(denoiser=denoiser()),
        tiling=TilingConfig(patch_size=problem.patch, receptive_field_size=DEPTH),
        partition=partition,
    )
    fidelity, prior, signal = bundle.data_fidelity, bundle.prior, bundle.signal
    assert prior is not None

    def step(x: Tensor) -> Tensor:
        return prior.prox(x - fidelity.grad(x), sigma_denoiser=SIGMA)

    def whole(x: Tensor) -> Tensor:
        signal.update_(x)
        return signal.whole()

    return Peer(signal.data, step, whole)


def by_parts(problem: Problem) -> Peer:
    return by_tessel(problem, GRIDS[tessel.world().size])


def by_whole(problem: Problem) -> Peer:
    return by_tessel(problem, None)


def by_deepinv(problem: Problem) -> Peer:
    import deepinv
    from deepinv.distributed import DistributedContext as TheirContext
    from deepinv.distributed import distribute

    warnings.filterwarnings("ignore", message="Rank .* has no work items")  # 3 blurs, 4 workers
    blurs = operators()
    ctx = TheirContext(device_mode="cpu", cleanup=False).__enter__()
    physics = distribute(blurs, ctx, type_object="linear_physics")
    fidelity = distribute(deepinv.optim.L2(), ctx, num_operators=len(blurs))
    network = distribute(
        denoiser(),
        ctx,
        type_object="denoiser",
        tiling_dims=(-2, -1),
        patch_size=problem.patch,
        overlap=DEPTH,
    )
    mine = ctx.local_indices(len(blurs))
    ys = [measured(problem, blurs, i) if i in mine else torch.empty(0) for i in range(len(blurs))]

    def step(x: Tensor) -> Tensor:
        return network(x - fidelity.grad(x, ys, physics) / len(blurs), SIGMA)

    return Peer(torch.zeros_like(picture(problem)), step)


def by_one(problem: Problem) -> Peer:
    blurs, network = operators(), denoiser()
    ys = [measured(problem, blurs, i) for i in range(len(blurs))]

    def step(x: Tensor) -> Tensor:
        slope = sum(b.A_adjoint(b.A(x) - y) for b, y in zip(blurs, ys, strict=True))
        return network(x - slope / len(blurs), SIGMA)

    return Peer(torch.zeros_like(picture(problem)), step)


# --- time and bytes


def checked(peer: Peer, problem: Problem, border: int = 0) -> Peer:
    """It makes the same of a zero image as one process does, but for the border."""
    with torch.no_grad():
        found = peer.whole(peer.step(torch.zeros_like(peer.x)))
        if dist.get_rank() == 0:
            alone = by_one(problem)
            inner = slice(border, problem.size - border)
            expected = alone.step(torch.zeros_like(alone.x))[..., inner, inner]
            check_close("an iteration", found[..., inner, inner], expected, 1e-4)
    return peer


def parts(settings: Settings) -> Callable[[], None]:
    problem = Problem(**settings)
    return checked(by_parts(problem), problem).iterate


def whole(settings: Settings) -> Callable[[], None]:
    problem = Problem(**settings)
    return checked(by_whole(problem), problem).iterate


def deepinv_distributed(settings: Settings) -> Callable[[], None]:
    problem = Problem(**settings)
    return checked(by_deepinv(problem), problem, border=2 * DEPTH).iterate


def one_process(settings: Settings) -> Callable[[], None]:
    return by_one(Problem(**settings)).iterate


@dataclass
class Receiving(OnWorkers):
    """Workers that also say how many bytes they receive in an iteration, where this is asked."""

    def turn(self, case: Case, repeats: int) -> Turn:
        if case.unit == "s":
            return super().turn(case, repeats)
        return Turn([max(self._run(case, received, self.name, case.settings))])


def received(name: str, settings: Settings) -> int:
    """The bytes that this worker receives in an iteration."""
    make = {"Tessel": by_parts, WHOLE: by_whole, DEEPINV: by_deepinv}[name]
    peer = make(Problem(**settings))
    with count_traffic() as traffic, count_collectives() as counted:
        peer.iterate()
    return sum(counted) if name == DEEPINV else traffic.bytes_received


@contextmanager
def count_collectives() -> Iterator[list[int]]:
    """The bytes that the calls of torch.distributed make a worker receive, at least."""
    counted: list[int] = []
    workers = dist.get_world_size()
    shares = {
        "all_reduce": lambda x: 2 * (workers - 1) * x.nbytes // workers,
        "broadcast": lambda x: x.nbytes,
    }
    kept = {name: getattr(dist, name) for name in shares}

    def counting(name: str) -> Callable[..., Any]:
        def call(x: Tensor, *args: Any, **settings: Any) -> Any:
            counted.append(shares[name](x))
            return kept[name](x, *args, **settings)

        return call

    for name in shares:
        setattr(dist, name, counting(name))
    try:
        yield counted
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


# --- memory


def peak(make: Callable[[Problem], Peer], settings: Settings) -> int:
    """The peak of this process's resident memory in two iterations, beyond that before."""
    problem = Problem(**settings)
    make(replace(TINY, patch=min(TINY.patch, problem.patch))).iterate()
    before = resident.resident()
    peer = make(problem)
    resident.forget_peak()
    for _ in range(2):
        peer.iterate()
    return resident.peak() - before


def memory_of_parts(settings: Settings) -> int:
    return peak(by_parts, settings)


def memory_of_whole(settings: Settings) -> int:
    return peak(by_whole, settings)


def memory_of_deepinv(settings: Settings) -> int:
    return peak(by_deepinv, settings)


def memory_of_one(settings: Settings) -> int:
    return peak(by_one, settings)


# --- all of them


def is_memory(case: Case) -> bool:
    return case.name.startswith("memory")


def is_other(case: Case) -> bool:
    return not is_memory(case)


def counted(what: str, size: int, workers: int, aims: dict[str, float]) -> Case:
    settings = {"size": size, "patch": 256}
    name = f"{what}: {size} × {size} RGB, {workers} workers"
    return Case.counted(name, workers, settings, aims)


def timed(size: int, workers: int) -> Case:
    settings = {"size": size, "patch": 256}
    name = f"an iteration: {size} × {size} RGB, {workers} workers"
    return Case(name, workers, settings, {DEEPINV: 0.7})


def cases(every: bool) -> list[Case]:
    sizes, counts = ((1024, 2048) if every else (1024,)), (2, 4)
    found = []
    for workers in counts:
        for size in sizes:
            found += [timed(size, workers), counted("received", size, workers, {DEEPINV: 0.1})]
    return found + [counted("memory", 1024, n, {}) for n in (counts if every else (4,))]


def claim(every: bool) -> Claim:
    contenders = [
        Receiving("Tessel", parts, split=True, covers=is_other),
        Receiving(DEEPINV, deepinv_distributed, covers=is_other),
        InOneProcess(ALONE, one_process, threads=1, covers=is_timed),
        Counted("Tessel", "imaging", "memory_of_parts", covers=is_memory),
        Counted(DEEPINV, "imaging", "memory_of_deepinv", covers=is_memory),
        Counted(ALONE, "imaging", "memory_of_one", workers=1, covers=is_memory),
    ]
    if every:
        contenders += [
            Receiving(WHOLE, whole, covers=is_other),
            Counted(WHOLE, "imaging", "memory_of_whole", covers=is_memory),
        ]
    return Claim(
        "imaging",
        "a plug-and-play iteration against deepinv.distributed",
        cases(every),
        contenders,
        rounds=4,
        note="""Three blurs, a DnCNN in patches of 256 with a receptive field of 5. "received" is
        what the worker that receives most receives in an iteration. deepinv.distributed gives each
        blur to one worker: of four, one has none.""",
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--all", action="store_true", help="a larger picture, memory of 2 workers")
    chosen = options.parse_args()
    raise SystemExit(run(claim(chosen.all), chosen))


if __name__ == "__main__":
    main()
