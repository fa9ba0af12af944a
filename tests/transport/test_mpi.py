"""MPI between hosts: the same numbers, and an end in a sentence when it cannot be had or fails.

Workers of mpirun pretend to be on two hosts (TESSEL_TEST_HOSTS), so that messages go by MPI between
them. tests/transport/test_hosts.py has two real ones.

Tests `transport/mpi.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stress
import tessel
from hosts import why_no_mpi
from tessel.transport import mpi
from tessel.transport.mpi import MpiState, problem_of, why_not
from tessel.transport.wire import AGREEMENT, tag_of

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n")
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "7"}
needs_mpi = pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())


def start(folder: Path, script: str, workers: int = 4, **more: str) -> subprocess.Popen[str]:
    """Let mpirun start a script, whose workers pretend to be on two hosts."""
    paths = [str(Path(__file__).parent), *sys.path]
    (folder / "script.py").write_text(script)
    env = {"OMP_NUM_THREADS": "1", "TESSEL_TIMEOUT": "60", "TESSEL_TEST_HOSTS": "a,a,b,b"}
    return subprocess.Popen(
        [*MPIRUN, str(workers), sys.executable, "script.py"],
        cwd=folder,
        env=os.environ | env | {"PYTHONPATH": os.pathsep.join(paths)} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said_by(folder: Path, script: str, **more: str) -> list[str]:
    """What workers write to files of their numbers, after all have ended well."""
    process = start(folder, script, **more)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    return [file.read_text() for file in sorted(folder.glob("said*"))]


HEAD = """
import os, sys, time, torch, tessel
from tessel import Layout, Move, transport
torch.set_num_threads(1)
def say(*words):
    name = f"said{transport.this_worker()}"
    open(name + ".part", "w").write(" ".join(map(str, words)))
    os.rename(name + ".part", name)
"""
MOVES = (
    HEAD
    + """
import stress
from tessel.testing import count_traffic
from tessel.transport import mpi
world = tessel.world()
world.prepare()
assert transport.between_hosts().startswith("MPI (Open MPI"), transport.between_hosts()
wrong = stress.movements(120, 5)
mpi.CHUNK = 1000  # bytes: messages longer than MPI can count go in several
wrong += stress.movements(60, 6)
for dtype in (torch.bool, torch.complex128, torch.bfloat16, torch.float16, torch.int16):
    for length in (0, 1, 4099):
        x = torch.arange(length).to(dtype)
        root = Layout.whole(world.create_partition_inclusive([3]), (length,))
        y = Move(root, Layout.whole(world, (length,), shared=True)).apply(
            x if world.rank == 3 else x[:0]
        )
        if not torch.equal(y, x):
            wrong.append(f"{dtype} {length}")
reduce = tessel.nn.AllSumReduce(world, [0])
torch.manual_seed(world.rank)
values = torch.randn(300_000)
results = [reduce(values) for _ in range(3)]
same = all(torch.equal(each, results[0]) for each in results)
with count_traffic() as traffic:
    reduce(values)
odd = world.create_partition_inclusive([1, 3]).create_cartesian_topology_partition([2])
if odd.active:
    wrong += [] if tessel.nn.AllSumReduce(odd, [0])(torch.ones(3)).sum() == 6 else ["odd"]
say(wrong, same, traffic.bytes_between_hosts, float(results[0].double().sum()))
"""
)


@needs_mpi
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("more", [{}, {"TESSEL_ENGINE": "python"}], ids=["compiled", "python"])
def test_movements_by_mpi_are_right(tmp_path: Path, more: dict[str, str]) -> None:
    said = [text.split() for text in said_by(tmp_path, MOVES, **more)]
    assert [each[:3] for each in said] == [["[]", "True", "600000"]] * 4, said
    assert len({each[3] for each in said}) == 1


FIRST = (
    """
import mpi4py
mpi4py.rc.thread_level = 'LEVEL'
from mpi4py import MPI
"""
    + HEAD
    + """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    total = tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(3))
total = MPI.COMM_WORLD.allreduce(float(total[0]))  # which other code may go on using
notes = [str(each.message) for each in caught if "Gloo" in str(each.message)]
say(total, transport.between_hosts().partition(" (")[0], *notes)
"""
)


@needs_mpi
@pytest.mark.slow
@pytest.mark.alone
def test_mpi_that_the_user_has_started_is_used(tmp_path: Path) -> None:
    assert said_by(tmp_path, FIRST.replace("LEVEL", "serialized")) == ["16.0 MPI"] * 4


@needs_mpi
@pytest.mark.slow
@pytest.mark.alone
def test_mpi_for_one_thread_leaves_it_to_gloo(tmp_path: Path) -> None:
    first, *others = said_by(tmp_path, FIRST.replace("LEVEL", "funneled"))
    assert all(each.startswith("16.0 Gloo: worker 0: MPI was started for one") for each in others)
    assert "tensors are sent over Gloo between hosts, not MPI: worker 0: MPI was" in first


BROKEN = (
    HEAD
    + """
import warnings
if os.environ["OMPI_COMM_WORLD_RANK"] == "3":
    sys.modules["mpi4py.MPI"] = None  # import raises
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    total = tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(3))
say(float(total[0]), transport.between_hosts())
"""
)


@needs_mpi
@pytest.mark.slow
@pytest.mark.alone
def test_a_worker_that_cannot_load_mpi_leaves_all_to_gloo(tmp_path: Path) -> None:
    """None waits in the start of MPI for a worker that never comes there."""
    said = said_by(tmp_path, BROKEN)
    assert all(each.startswith("4.0 Gloo: worker 3: MPI cannot be loaded") for each in said), said


WAITS = (
    HEAD
    + """
world = tessel.world()
reduce = tessel.nn.AllSumReduce(world, [0])
reduce(torch.ones(3))
if world.rank == WHO:
    open("ready", "w").write(str(os.getpid()))
    DOES
try:
    for _ in range(1000):
        reduce(torch.ones(3))
        time.sleep(0.01)
except tessel.WorkerLost as error:
    say(error)
    raise
"""
)


def lost(folder: Path, who: int, does: str, **more: str) -> tuple[list[str], float]:
    """What the others say, and the seconds until mpirun has ended."""
    script = WAITS.replace("WHO", str(who)).replace("DOES", does)
    process = start(folder, script, **more)
    while process.poll() is None and not (folder / "ready").exists():
        time.sleep(0.05)
    begin = time.monotonic()
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0, output
    return [file.read_text() for file in sorted(folder.glob("said?"))], time.monotonic() - begin


@needs_mpi
@pytest.mark.slow
@pytest.mark.alone
def test_a_worker_that_raises_ends_the_others_with_a_sentence(tmp_path: Path) -> None:
    said, seconds = lost(tmp_path, 3, "raise KeyError('lost')")
    assert len(said) == 3 and all("its program ended by KeyError" in each for each in said), said
    assert seconds < 40


@needs_mpi
@pytest.mark.slow
@pytest.mark.alone
def test_a_stopped_worker_ends_the_job_at_the_time_limit(tmp_path: Path) -> None:
    does = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
    said, seconds = lost(tmp_path, 2, does, TESSEL_TIMEOUT="4")
    assert said, "nobody said why"
    assert all("timed out" in each or "broken" in each for each in said), said
    assert seconds < 60


@needs_mpi
@pytest.mark.slow
@pytest.mark.alone
def test_mpirun_ends_the_job_of_a_killed_worker(tmp_path: Path) -> None:
    _, seconds = lost(tmp_path, 2, "import signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert seconds < 40


# --- where it cannot be had


def refused() -> str:
    with stress.afresh(TESSEL_TRANSPORT="mpi"), pytest.raises(RuntimeError) as caught:
        tessel.world().prepare()
    return str(caught.value)


def test_mpi_outside_of_mpirun_is_refused_on_all_workers(run: Any) -> None:
    said = run(refused, nprocs=2)
    assert len({*said}) == 1
    assert said[0].startswith("TESSEL_TRANSPORT is mpi, but worker 0: ")
    assert said[0].endswith("; TESSEL_TRANSPORT=shared sends by Gloo between hosts")


def with_different_ones() -> str:
    way = "mpi" if tessel.transport.this_worker() else "auto"
    with stress.afresh(TESSEL_TRANSPORT=way), pytest.raises(ValueError) as caught:
        tessel.world().prepare()
    return str(caught.value)


def test_mpi_on_some_workers_is_refused_on_all(run: Any) -> None:
    assert {*run(with_different_ones, nprocs=2)} == {
        "TESSEL_TRANSPORT must be the same on all workers: it is 'auto' on worker 0 and 'mpi' on "
        "worker 1"
    }


@pytest.mark.parametrize(
    ("environ", "is_asked_for", "expected"),
    [
        (OPEN_MPI, False, ""),
        ({}, False, "this process was not started by mpirun"),
        ({"TESSEL_LAUNCHER": "pigeon"}, False, "TESSEL_LAUNCHER must be one of"),
        (OPEN_MPI | {"PMIX_NAMESPACE": ""}, False, "but it has not started this process"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, False, "worker 1 of 4 is another task of"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "PMI_JOBID": "1"},
            True,
            "",
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, False, "by mpirun"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "PMI_FD": "3"}, False, "by mpirun"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "PMI_FD": "3"}, True, ""),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"}, False, "has not started"),
        ({"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4", "PMI_FD": "3"}, False, "another"),
    ],
)
def test_what_keeps_from_mpi_is_known_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], is_asked_for: bool, expected: str
) -> None:
    monkeypatch.setattr(mpi, "_is_running", lambda: False)
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: name)
    said = why_not(environ, 1, 4, is_asked_for)
    assert expected in said and bool(said) is bool(expected)


def test_without_mpi4py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: None)
    assert why_not(OPEN_MPI, 1, 4, False).startswith("mpi4py is not installed (pip install mpi4py")


def test_mpi4py_for_another_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise ImportError("libmpi.so.12: cannot open shared object file")

    pytest.importorskip("mpi4py")
    loads = mpi.importlib.import_module
    monkeypatch.setattr(
        mpi.importlib, "import_module", lambda name: (load if "." in name else loads)(name)
    )
    problem = mpi.load()
    assert problem.startswith(
        "MPI cannot be loaded: libmpi.so.12: cannot open shared object file ("
    )
    assert "--no-binary mpi4py" in problem and "MPI4PY_MPIABI" in problem


def test_all_workers_come_to_one_conclusion() -> None:
    states = [MpiState(rank=rank, size=3, library="Open MPI 4") for rank in (2, 0, 1)]
    assert problem_of(states) == ""
    assert problem_of([*states[:2], MpiState("it is gone")]) == "worker 2: it is gone"
    other = MpiState(rank=1, size=3, library="MPICH 4")
    assert problem_of([*states[:2], other]) == "worker 0 has Open MPI 4, worker 2 has MPICH 4"
    alone = [MpiState(library="Open MPI 4")] * 3
    assert problem_of(alone) == "the job has 3 workers, and MPI has [1] processes"


@pytest.mark.parametrize("most", [2**15 - 1, 2**22, 2**31 - 1])
def test_messages_of_other_numbers_groups_and_jobs_have_other_tags(most: int) -> None:
    carrier = object.__new__(mpi.Mpi)
    carrier._salt, carrier._most_tags = 7, most
    tags = [carrier._tag((5, -1), tag_of(call)) for call in range(-5000, 5000)]
    assert len({*tags}) == 10_000 and min(tags) >= 0 and max(tags) <= most
    others = {carrier._tag((group, -1), AGREEMENT) for group in range(5)}
    carrier._salt = 8
    assert len(others | {carrier._tag((group, -1), AGREEMENT) for group in range(5)}) == 10


def test_a_message_of_another_length_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_mpi", lambda: SimpleNamespace(BYTE=None))

    class Status:
        def Get_elements(self, kind: object) -> int:
            return 3

    class Request:
        def Test(self, status: object) -> bool:
            return True

    message = mpi._Message((1, 2), 0, torch.empty(1), [Request()], sizes=(4,))
    with pytest.raises(RuntimeError, match="the expected length"):
        message.test(Status)
