"""Contenders: workers of Tessel's launcher, one process, processes under MPI, counted things."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from allocator import GIVE_BACK, KEEP

import tessel
from harness.claim import Case, Settings, Turn
from harness.clock import PARTS, clocked
from tessel.machine import usable_cores
from tessel.testing import WorkerPool

BENCHMARKS = Path(__file__).resolve().parent.parent
BUILD = BENCHMARKS.parent / "build"
LIMIT = 120.0  # seconds for one turn
Step = Callable[[], object]
Covers = Callable[[Case], bool]


def always(case: Case) -> bool:
    return True


# --- workers of Tessel's launcher


_PREPARED: list[tuple[Any, Step]] = []  # what this worker does in the present case, by contender


def _step(setup: Callable[[Settings], Step], settings: Settings) -> Step:
    group = dist.group.WORLD if dist.is_initialized() else None
    key = (setup.__module__, setup.__qualname__, settings, group)
    if _PREPARED and _PREPARED[0][0][2:] != key[2:]:
        _forget()
    for known, step in _PREPARED:
        if known == key:
            return step
    _PREPARED.append((key, setup(settings)))
    return _PREPARED[-1][1]


def _forget() -> None:
    _PREPARED.clear()


def _samples(
    setup: Callable[[Settings], Step], settings: Settings, repeats: int, calls: int, split: bool
) -> tuple[list[float], dict[str, float]]:
    """This worker's seconds of a call, and of the parts of calls that were made for them."""
    step, meet = _step(setup, settings), tessel.world().group.share_words
    found = []
    for _ in range(repeats):
        meet([0])  # begin together
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        found.append((time.perf_counter() - begin) / calls)
    if not split:
        return found, {}
    again = max(1, repeats // 4)
    parts = dict.fromkeys(PARTS, 0.0)
    for _ in range(again):
        meet([0])
        with clocked() as clock:
            for _ in range(calls):
                step()
        parts = {part: parts[part] + clock.spent[part] / (again * calls) for part in PARTS}
    return found, parts


@dataclass
class OnWorkers:
    """Workers of one thread that a `WorkerPool` starts.

    Args:
        name: "Tessel", or that of a peer which torch.distributed carries.
        setup: makes of the settings of a case what each worker does in it; at the top level of the
            script. It runs once a case and checks that the values are right.
        split: whether to say where the time goes; only what passes Tessel's transport is seen.
        covers: in which cases it takes part.
        environment: variables that only these workers see, as `TESSEL_TRANSPORT`.
        beside: another contender, in whose processes this one works: both find the same memory.
    """

    name: str
    setup: Callable[[Settings], Step]
    split: bool = False
    covers: Covers = always
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: OnWorkers | None = None

    def __post_init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._size = (0, 0)

    def missing(self) -> str | None:
        return None

    def size(self, case: Case) -> tuple[int, int]:
        """The number of workers, and of threads of each."""
        return case.workers, 1

    def turn(self, case: Case, repeats: int) -> Turn:
        every = self._run(
            case, _samples, self.setup, case.settings, repeats, case.calls, self.split
        )
        slowest = [max(each) for each in zip(*(times for times, _ in every), strict=True)]
        parts = {part: sum(spent[part] for _, spent in every) / len(every) for part in every[0][1]}
        return Turn(slowest, parts)

    def leave(self, case: Case) -> None:
        self._run(case, _forget)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _run(self, case: Case, function: Callable[..., Any], *args: Any) -> list[Any]:
        if self.beside is not None:
            return self.beside._run(case, function, *args)
        size = self.size(case)
        if size != self._size:
            self.close()
        if self._pool is None:
            self._pool, self._size = WorkerPool(size[0], threads=size[1], timeout=LIMIT), size
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            return self._pool.run(function, *args)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@dataclass
class InOneProcess(OnWorkers):
    """One process, with one thread or with as many as there are workers and cores for them.

    Args:
        threads: 1; None for as many as the case has workers.
    """

    threads: int | None = None

    def size(self, case: Case) -> tuple[int, int]:
        return 1, min(case.workers, usable_cores()) if self.threads is None else self.threads


# --- processes under MPI


@dataclass
class UnderMpi:
    """Processes of one thread under mpirun, asleep while others have their turn.

    Args:
        name: of the peer.
        script: in benchmarks/, which calls `harness.serve.serve`.
        venv: in build/, with what it imports.
        covers: in which cases it takes part.
        arguments: of the script, after the folder of pipes.
    """

    name: str
    script: str
    venv: str = "mpi"
    covers: Covers = always
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._workers = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._inbox = bytearray()  # what was printed and not read as a line yet
        self._pipes: list[int] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def python(self) -> Path:
        return BUILD / self.venv / "bin" / "python"

    def missing(self) -> str | None:
        if self.python.exists():
            return None
        return f"{self.name} needs build/{self.venv}: run benchmarks/setup_peers.sh once"

    def turn(self, case: Case, repeats: int) -> Turn:
        if case.workers != self._workers or self._process is None:
            self.close()
            self._start(case.workers)
        asked = {"settings": case.settings, "repeats": repeats, "calls": case.calls}
        line = f"{json.dumps(asked)}\n".encode()
        for pipe in self._pipes:
            os.write(pipe, line)
        answer = json.loads(self._answer(case))
        return Turn(answer["samples"], answer["parts"])

    def leave(self, case: Case) -> None:
        pass  # it lets go of the case when the next begins

    def close(self) -> None:
        if self._process is None:
            return
        for pipe in self._pipes:
            os.write(pipe, b"\n")  # nothing more comes
            os.close(pipe)
        for end in (self._process.terminate, self._process.kill):  # mpirun ends what it started
            try:
                self._process.wait(10)
                break
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()
        assert self._process.stdout is not None and self._folder is not None
        self._process.stdout.close()
        self._folder.cleanup()
        self._process, self._pipes, self._inbox = None, [], bytearray()

    def _start(self, workers: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tessel-bench-")
        folder = Path(self._folder.name)
        for rank in range(workers):
            os.mkfifo(folder / str(rank))
            self._pipes.append(os.open(folder / str(rank), os.O_RDWR | os.O_CLOEXEC))
        program = (str(BENCHMARKS / self.script), str(folder))
        with (folder / "errors").open("w") as errors:
            self._process = subprocess.Popen(
                [*self.launcher(workers), *program, *self.arguments],
                env={**os.environ, **self.environment, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=self.python.parents[1],
            )
        self._workers = workers

    def launcher(self, workers: int) -> list[str]:
        """The command that runs a script in so many processes."""
        return [*mpirun(workers), str(self.python)]

    @property
    def environment(self) -> dict[str, str]:
        return mpi_environment()

    def _answer(self, case: Case) -> str:
        """The next line that begins as an answer does; what libraries print is passed over."""
        until = time.monotonic() + LIMIT
        while (line := self._line(until)) is not None:
            if line.startswith('{"samples"'):
                return line
        assert self._folder is not None
        errors = (Path(self._folder.name) / "errors").read_text()
        self.close()
        raise RuntimeError(f"{self.name} gave no answer in {case.name!r}:\n{errors[-4000:]}")

    def _line(self, until: float) -> str | None:
        """The next line that the processes print; None if they end or the time is over."""
        assert self._process is not None and self._process.stdout is not None
        output = self._process.stdout
        while b"\n" not in self._inbox:
            seconds = until - time.monotonic()
            if seconds <= 0 or not select.select([output], [], [], seconds)[0]:
                return None
            came = output.read(65536)
            if not came:
                return None
            self._inbox += came
        line, _, rest = self._inbox.partition(b"\n")
        self._inbox = bytearray(rest)
        return line.decode(errors="replace")


def mpirun(workers: int) -> list[str]:
    """The command that starts so many processes, bound to no core, which yield if they must."""
    idle = ["--mca", "mpi_yield_when_idle", "1"] if workers > usable_cores() else []
    return ["mpirun", "--oversubscribe", "--bind-to", "none", *idle, "-n", str(workers)]


def mpi_environment() -> dict[str, str]:
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return dict.fromkeys(names, "1")


# --- processes of another state of the library


@dataclass
class OfSource(UnderMpi):
    """Processes of one thread under torchrun, with the library as it is in another folder.

    Args:
        source: the folder `src` of a checkout; None for the library that is imported here.
    """

    source: Path | None = None

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def launcher(self, workers: int) -> list[str]:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
        return [str(self.python), *launcher, str(workers)]

    @property
    def environment(self) -> dict[str, str]:
        source = Path(tessel.__file__).parents[1] if self.source is None else self.source
        return {"PYTHONPATH": str(source.resolve())}


# --- what is counted, not timed


@dataclass
class Counted:
    """A number, as bytes of memory, that fresh workers find; of each case the largest worker's.

    Args:
        name: "Tessel", or that of a peer.
        module: of the script, without ".py".
        function: of it, which takes the settings and returns a number on each worker.
        environment: of the fresh processes; by default the allocator gives back what is freed.
        workers: that take part; None for those of the case.
        covers: in which cases it takes part.
    """

    name: str
    module: str
    function: str
    environment: Mapping[str, str] = field(default_factory=lambda: GIVE_BACK)
    workers: int | None = None
    covers: Covers = always

    def missing(self) -> str | None:
        return None

    def turn(self, case: Case, repeats: int) -> Turn:
        return Turn([self._count(case) for _ in range(repeats)])

    def leave(self, case: Case) -> None:
        pass

    def close(self) -> None:
        pass

    def _count(self, case: Case) -> float:
        workers = case.workers if self.workers is None else self.workers
        asked = [self.module, self.function, json.dumps(case.settings), str(workers)]
        plain = {name: value for name, value in os.environ.items() if name not in KEEP}
        done = subprocess.run(
            [sys.executable, "-m", "harness.count", *asked],
            cwd=BENCHMARKS,
            env={**plain, **self.environment},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            timeout=2 * LIMIT,
        )
        return float(max(json.loads(done.stdout.splitlines()[-1])))
