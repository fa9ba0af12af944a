"""Random work and random misfortune, for as long as it is asked for: `make soak`.

Each case is drawn from a seed of its own, on 2 to 8 workers: movements, models, operators, bad
calls; workers that are killed, stopped or raise at a random time; solvers and trainings that are
killed and resumed; disks that are full; hosts whose link is cut. A case is *right* if numbers are
those of one process, or if what had to fail did so on all workers, in time. At the end there is a
table, and for each case that was not right its name and seed, which repeat it:

    python tools/soak.py --minutes 60
    python tools/soak.py --case kill --seed 1234

Full disks need a small tmpfs and cut links two network namespaces, which only root can make; they
are left out with a reason elsewhere.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import tessel
from tessel import Layout
from tessel.errors import WorkerLost
from tessel.imaging import solvers
from tessel.testing.pool import WorkerPool

HERE = Path(__file__).resolve()
for folder in (HERE.parent, HERE.parents[1] / "tests/transport"):
    sys.path.insert(0, str(folder))  # workers import this file, and the movements of the tests

TIMEOUT = 20  # seconds, TESSEL_TIMEOUT of the workers: after it a silent worker counts as lost
SLOW = 45.0  # seconds to the end of a misfortune, of which a stopped worker takes the timeout
MOST_TEXT = 600  # letters of what went wrong
LIMIT = 150.0  # seconds after which a case counts as hung
Verdict = str  # "right", or what is not
Case = Callable[["Soak", random.Random], Verdict]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", " ")] = function
    return function


@dataclass
class Soak:
    """The workers, and where files go."""

    pool: WorkerPool
    folder: Path
    most: int = 8  # workers
    ended: list[float] = field(default_factory=list)  # seconds to the end, after misfortunes

    def size(self, rng: random.Random) -> int:
        return rng.randint(2, self.most)

    def run(self, function: Callable[..., Any], *args: Any, nprocs: int) -> list[Any]:
        return self.pool.run(function, *args, nprocs=nprocs, timeout=LIMIT)

    def fails(self, function: Callable[..., Any], *args: Any, nprocs: int) -> Verdict:
        """Run what has to fail: in time, by an error that says what happened."""
        begin = time.monotonic()
        try:
            self.run(function, *args, nprocs=nprocs)
        except TimeoutError:
            return "hung"
        except (Exception, CheckpointException):  # torch's is no Exception
            pass
        else:
            return "wrong: it did not fail"
        seconds = time.monotonic() - begin
        self.ended.append(seconds)
        return "right" if seconds < SLOW else f"slow to end: {seconds:.0f} s"


# --- numbers


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def draw_partition(rng: random.Random, dims: int, axes: range) -> tessel.Partition:
    """All workers on a grid, split along one or two of the axes."""
    size, grid = tessel.world().size, [1] * dims
    first = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    grid[rng.choice(axes)] *= first
    grid[rng.choice(axes)] *= size // first
    return tessel.world().create_cartesian_topology_partition(grid)


def move_at_random(seed: int, count: int) -> list[str]:
    import stress

    return stress.movements(count, seed)


@case
def movements(soak: Soak, rng: random.Random) -> Verdict:
    wrong = soak.run(move_at_random, rng.randrange(2**31), 25, nprocs=soak.size(rng))
    return f"wrong: {wrong[0][0]}" if any(wrong) else "right"


class Block(nn.Module):
    """Layers with a branch around them."""

    def __init__(self, channels: int, kernel: int, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.conv(x)))


def draw_model(rng: random.Random) -> nn.Module:
    channels = rng.choice([2, 4])
    layers: list[nn.Module] = [nn.Conv2d(2, channels, 3, padding=1)]
    for _ in range(rng.randint(1, 3)):
        norm = rng.choice(
            [
                nn.BatchNorm2d(channels),
                nn.GroupNorm(2, channels),
                nn.InstanceNorm2d(channels),
                nn.Identity(),
            ]
        )
        layers += [
            Block(channels, rng.choice([1, 3, 5]), norm),
            rng.choice(
                [nn.AvgPool2d(2), nn.MaxPool2d(3, 1, 1), nn.Upsample(scale_factor=2), nn.GELU()]
            ),
        ]
    if rng.random() < 0.5:
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 3)]
    return nn.Sequential(*layers).double()


def train_model(seed: int) -> str:
    """Outputs and gradients of a random model, for three calls."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    alone = draw_model(rng)
    P = draw_partition(rng, 4, range(2, 4))
    model = tessel.nn.distribute_module(copy.deepcopy(alone), P)
    shape = (rng.randint(1, 2), 2, rng.choice([16, 17, 24]), rng.choice([16, 19]))
    for step in range(3):
        x = values(shape, seed + step)
        for each in (alone, model):
            each.zero_grad()
        expected, found = alone(x), model(tessel.spread(x, P))
        if not torch.allclose(found.full(), expected, rtol=1e-8, atol=1e-9):
            return f"outputs differ in call {step}"
        expected.square().mean().backward()
        found.square().mean().backward()
        for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
            if not torch.allclose(p.grad, q.grad, rtol=1e-7, atol=1e-9):
                return f"gradients of {name} differ in call {step}"
    return ""


@case
def models(soak: Soak, rng: random.Random) -> Verdict:
    wrong = soak.run(train_model, rng.randrange(2**31), nprocs=soak.size(rng))
    return f"wrong: {wrong[0]}" if any(wrong) else "right"


# --- calls that are wrong on one worker


def call_badly(seed: int) -> list[str]:
    """What workers say to bad calls, and whether they go on afterwards."""
    rng, rank = random.Random(seed), tessel.world().rank
    size = tessel.world().size
    odd = rng.randrange(size)  # the worker who is unlike the others
    P = tessel.world().create_cartesian_topology_partition([1, 1, size])
    x = torch.ones(1, 2, 4)
    bad = {
        "dtype": lambda: tessel.nn.HaloExchange(P, [0, 0, 1])(x.double() if rank == odd else x),
        "dims": lambda: tessel.nn.AllSumReduce(P, [2])(x[0] if rank == odd else x),
        "layer": lambda: tessel.nn.DistributedConv1d(P, 2, 3 if rank == odd else 2, 3),
        "model": lambda: tessel.nn.distribute_module(nn.Conv1d(2, 2, 3 if rank == odd else 1), P),
        "shape": lambda: tessel.nn.distribute_module(nn.Conv1d(2, 2, 1), P)(
            x[:, :1] if rank == odd else x
        ),
        "grad": lambda: tessel.nn.distribute_module(
            nn.Conv1d(2, 2, 1).requires_grad_(rank != odd), P
        ),
    }
    said = []
    for name in rng.sample(sorted(bad), 3):
        try:
            bad[name]()
            said.append(f"{name}: nothing")
        except (ValueError, RuntimeError, NotImplementedError) as error:
            said.append(f"{name}: {type(error).__name__}: {error}")
    total = tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(1))
    return [*said, f"afterwards {total.tolist()}"]


@case
def bad_calls(soak: Soak, rng: random.Random) -> Verdict:
    size = soak.size(rng)
    first, *others = soak.run(call_badly, rng.randrange(2**31), nprocs=size)
    if any("nothing" in text for text in first):
        return f"wrong: {first}"
    if any(said != first for said in others):
        return f"unlike errors: {first} and {next(s for s in others if s != first)}"
    return "right" if first[-1] == f"afterwards [{size}.0]" else f"wrong: {first[-1]}"


# --- misfortunes


def work_until(seed: int, victim: int, what: str, seconds: float) -> None:
    """Work of all kinds, without an end, until something happens to one worker."""
    rng, rank = random.Random(seed), tessel.world().rank
    P = draw_partition(rng, 4, range(2, 4))
    torch.manual_seed(seed)
    model = tessel.nn.distribute_module(draw_model(rng), P)
    shape = (2, 2, 16, 16)
    if rank == victim and what in ("SIGKILL", "SIGSTOP"):
        # from outside of Python, at any instruction
        command = f"sleep {seconds}; kill -{what[3:]} {os.getpid()}"
        subprocess.Popen(["sh", "-c", command])
    until = time.monotonic() + seconds
    reduce = tessel.nn.AllSumReduce(tessel.world(), [0])
    while True:
        if rank == victim and what == "raise" and time.monotonic() > until:
            raise ValueError("the worker raises, as it was told to")
        x = Layout.balanced(P, shape).local_part(values(shape, seed))
        model(x).square().mean().backward()
        reduce(torch.ones(rng.choice([1, 1000, 400_000])))


def misfortune(what: str) -> Case:
    def run(soak: Soak, rng: random.Random) -> Verdict:
        size, seconds = soak.size(rng), 3.0 * rng.random()
        arguments = rng.randrange(2**31), rng.randrange(size), what, seconds
        verdict = soak.fails(work_until, *arguments, nprocs=size)
        if verdict == "right":  # and the next call of the same pool is as good as the first
            wrong = soak.run(move_at_random, rng.randrange(2**31), 2, nprocs=size)
            verdict = f"wrong: {wrong[0][0]}" if any(wrong) else "right"
        return verdict

    return run


CASES |= {
    "kill": misfortune("SIGKILL"),
    "stop": misfortune("SIGSTOP"),
    "raise": misfortune("raise"),
}


# --- resumes


def solve(seed: int, folder: str | None, kill_at: int, victim: int) -> bytes:
    """A solver over an image in parts; with a folder it is killed on the way, or resumed."""
    size = tessel.world().size
    P = tessel.world().create_cartesian_topology_partition([size, 1])
    layout = Layout.balanced(P, (4 * size + 3, 5))
    start, target = (layout.local_part(values(layout.shape, seed + k)) for k in range(2))
    weight = 1 + layout.local_part(values(layout.shape, seed + 2)).square()
    distance = SimpleNamespace(grad=lambda x: weight * (x - target))
    method = solvers.GradientDescent(distance, step=0.05)

    def each(number: int, x: Tensor) -> None:
        if number == kill_at and tessel.world().rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    keep = None if folder is None else solvers.Checkpoint(folder, every=2)
    found = solvers.solve(
        method, start, layout=layout, max_iterations=20, each=each, checkpoint=keep
    )
    return bytes(found.x.numpy().tobytes())


@case
def resumed_solver(soak: Soak, rng: random.Random) -> Verdict:
    size, seed = soak.size(rng), rng.randrange(2**31)
    expected = soak.run(solve, seed, None, -1, 0, nprocs=size)
    with tempfile.TemporaryDirectory(dir=soak.folder) as folder:
        for kill_at in sorted(rng.sample(range(1, 20), rng.randint(1, 3))):
            try:
                soak.run(solve, seed, folder, kill_at, rng.randrange(size), nprocs=size)
            except WorkerLost:
                continue
        found = soak.run(solve, seed, folder, -1, 0, nprocs=size)
    return "right" if found == expected else "wrong: a resumed solver ends elsewhere"


def train(seed: int, file: str | None, kill_at: int, victim: int) -> list[bytes]:
    """A training that writes its state after each step, and goes on from what it finds."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    P = draw_partition(rng, 4, range(2, 4))
    model = tessel.nn.distribute_module(draw_model(rng), P)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    begin = 0
    if file is not None and Path(file).exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    for step in range(begin, 6):
        x = values((2, 2, 16, 16), seed + step)
        optimizer.zero_grad()
        model(tessel.spread(x, P)).square().mean().backward()
        if step == kill_at and tessel.world().rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if file is not None and tessel.world().rank == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(state, f"{file}.new")
            os.replace(f"{file}.new", file)
    return [value.numpy().tobytes() for value in model.state_dict().values()]


@case
def resumed_training(soak: Soak, rng: random.Random) -> Verdict:
    size, seed = soak.size(rng), rng.randrange(2**31)
    expected = soak.run(train, seed, None, -1, 0, nprocs=size)
    with tempfile.TemporaryDirectory(dir=soak.folder) as folder:
        file = str(Path(folder, "state"))
        with suppress(WorkerLost):
            soak.run(train, seed, file, rng.randint(0, 5), rng.randrange(size), nprocs=size)
        found = soak.run(train, seed, file, -1, 0, nprocs=size)
    return "right" if found == expected else "wrong: a resumed training ends elsewhere"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system with little room."""
    place = Path(tempfile.mkdtemp(dir=folder))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        place.rmdir()


@case
def full_disk(soak: Soak, rng: random.Random) -> Verdict:
    """A disk that is full when a solver writes, with room again when it is resumed."""
    size, seed = soak.size(rng), rng.randrange(2**31)
    expected = soak.run(solve, seed, None, -1, 0, nprocs=size)
    with small_disk(soak.folder, "1m") as disk:
        kept = disk / "checkpoint"
        if rng.random() < 0.5:  # something is there to go on from
            with suppress(WorkerLost):
                soak.run(solve, seed, str(kept), rng.randint(3, 9), 0, nprocs=size)
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb", 0) as file:
            while True:
                file.write(b"0" * 4096)
        verdict = soak.fails(solve, seed, str(kept), -1, 0, nprocs=size)
        filler.unlink()
        if verdict != "right":
            return verdict
        found = soak.run(solve, seed, str(kept), -1, 0, nprocs=size)
    return "right" if found == expected else "wrong: resumed after a full disk it ends elsewhere"


# --- two hosts

SCRIPT = """
import sys, time, torch, tessel
world = tessel.world()
reduce = tessel.nn.AllSumReduce(world, [0])
open(sys.argv[1] + str(world.rank), "w").close()
for call in range(100000):
    assert reduce(torch.ones(1000)).sum() == 1000 * world.size
    time.sleep(0.01)
"""


@contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces with a cable: the commands that run something in each."""
    name = f"soak{os.getpid()}"
    names = [f"{name}a", f"{name}b"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for each in names:
            ip("netns", "add", each)
        ip("link", "add", "va", "netns", names[0], "type", "veth", "peer", "vb", "netns", names[1])
        for number, (each, device) in enumerate(zip(names, ("va", "vb"), strict=True)):
            ip("-n", each, "addr", "add", f"10.77.0.{number + 1}/24", "dev", device)
            ip("-n", each, "link", "set", device, "up")
            ip("-n", each, "link", "set", "lo", "up")
        # host names and process numbers of their own, so that memory is not shared
        apart = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
        a, b = (
            ["ip", "netns", "exec", each, *apart, "sh", "-c", f'hostname {each}; exec "$@"', "-"]
            for each in names
        )
        yield a, b
    finally:
        for each in names:
            subprocess.run(["ip", "netns", "del", each], check=False, capture_output=True)


@case
def cut_link(soak: Soak, rng: random.Random) -> Verdict:
    """Two hosts, whose link is cut while they work: all processes end."""
    with two_hosts() as hosts, tempfile.TemporaryDirectory(dir=soak.folder) as folder:
        script, mark = Path(folder, "script.py"), str(Path(folder, "began"))
        script.write_text(SCRIPT)
        started = []
        for number, (host, device) in enumerate(zip(hosts, ("va", "vb"), strict=True)):
            launcher = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *(f"--node_rank={number}", "--nproc_per_node=1", "--master_addr=10.77.0.1"),
                *("--master_port=29511", str(script), mark),
            ]
            env = os.environ | {"GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
            with Path(folder, f"output{number}").open("wb") as output:
                started.append(
                    subprocess.Popen([*host, *launcher], env=env, stdout=output, stderr=output)
                )
        try:
            begin = time.monotonic()
            while not all(Path(f"{mark}{rank}").exists() for rank in range(2)):
                if time.monotonic() - begin > LIMIT or any(each.poll() for each in started):
                    text = Path(folder, "output0").read_text()[-300:]
                    return f"wrong: two hosts did not begin: {text}"
                time.sleep(0.1)
            time.sleep(2.0 * rng.random())
            name = f"soak{os.getpid()}a"
            subprocess.run(["ip", "-n", name, "link", "set", "va", "down"], check=True)
            begin = time.monotonic()
            for each in started:
                try:
                    if each.wait(max(1.0, LIMIT - (time.monotonic() - begin))) == 0:
                        return "wrong: it did not fail"
                except subprocess.TimeoutExpired:
                    return "hung"
            seconds = time.monotonic() - begin
            soak.ended.append(seconds)
            return "right" if seconds < 2 * SLOW else f"slow to end: {seconds:.0f} s"
        finally:
            for each in started:
                each.kill()
                each.wait()


def left_out(folder: Path) -> dict[str, str]:
    """Cases that cannot be tried here, and why."""
    reasons: dict[str, str] = {}
    if os.geteuid():
        reasons["full disk"] = reasons["cut link"] = "only root can mount and make namespaces"
        return reasons
    try:
        with small_disk(folder, "64k"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        reasons["full disk"] = f"no small disk can be mounted: {error}"
    if not (shutil.which("ip") and shutil.which("unshare")):
        reasons["cut link"] = "iproute2 and unshare are needed"
        return reasons
    try:
        with two_hosts():
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        reasons["cut link"] = f"no network namespaces can be made: {error}"
    return reasons


# --- the run

KINDS = ("right", "wrong", "hung", "slow to end", "unlike errors")


def kind_of(verdict: Verdict) -> str:
    return next((kind for kind in KINDS if verdict.startswith(kind)), "wrong")


def try_case(soak: Soak, name: str, seed: int) -> Verdict:
    try:
        return CASES[name](soak, random.Random(f"{name} {seed}"))
    except TimeoutError as error:
        return f"hung: {error}"
    except (Exception, CheckpointException) as error:  # the others go on, and it is in the table
        return f"wrong: {type(error).__name__}: {error}"


def run(
    minutes: float, seed: int, names: list[str], most: int, console: Console
) -> dict[str, Counter[str]]:
    """Cases in turn until the time is over, each at least once; how many ended how."""
    os.environ["TESSEL_TIMEOUT"] = str(TIMEOUT)
    # workers import this file by its name
    paths = [str(HERE.parent), str(HERE.parents[1] / "tests/transport"), *sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(each for each in paths if each))
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    until = time.monotonic() + 60 * minutes
    with (
        tempfile.TemporaryDirectory(prefix="tessel-soak-") as folder,
        WorkerPool(threads=1, timeout=LIMIT) as pool,
    ):
        soak = Soak(pool, Path(folder), most)
        for name, reason in left_out(soak.folder).items():
            if counts.pop(name, None) is not None:
                console.print(f"{name}: left out: {reason}")
        number = 0
        while time.monotonic() < until or number < len(counts):
            name = list(counts)[number % len(counts)]
            begin = time.monotonic()
            verdict = try_case(soak, name, seed + number)
            counts[name][kind_of(verdict)] += 1
            if verdict != "right":
                seconds = time.monotonic() - begin
                console.print(
                    f"{name}, after {seconds:.0f} s: {verdict[:MOST_TEXT]}\n"
                    f"  repeat: python tools/soak.py --case '{name}' --seed {seed + number}",
                    markup=False,
                )
            number += 1
        table = Table("case", "cases", *KINDS, title=f"seed {seed}, {minutes:g} minutes")
        for name, found in counts.items():
            table.add_row(name, str(found.total()), *(str(found[kind]) for kind in KINDS))
        total = sum(counts.values(), Counter())
        table.add_row("all", str(total.total()), *(str(total[kind]) for kind in KINDS))
        console.print(table)
        if soak.ended:
            ended = sorted(soak.ended)
            console.print(
                f"{len(ended)} misfortunes were over after {ended[len(ended) // 2]:.1f} s (median) "
                f"and {ended[-1]:.1f} s (longest), with up to 3 s before them"
            )
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first case")
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="only these")
    parser.add_argument("--workers", type=int, default=8, help="at most so many")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    # one case with a seed is a repetition
    minutes = 0.0 if arguments.case and arguments.seed is not None else arguments.minutes
    names = arguments.case or list(CASES)
    # whoever ends this: disks are unmounted, namespaces deleted, workers ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import soak  # by its name: workers cannot import what __main__ is

    counts = soak.run(minutes, seed, names, arguments.workers, Console())
    return int(any(found.total() != found["right"] for found in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
