"""The command line: every way in which a run can end, the doctor's findings.

Tests `cli/run.py`, `cli/worker.py`, `cli/rendezvous.py`, `cli/stragglers.py`, `cli/doctor.py`,
`cli/checks.py`, `cli/facts.py`, `cli/measure.py`, `version.py`, `machine.py`.
"""

import dataclasses
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

from scripts import python
from tessel.cli import build_parser, checks, doctor, main
from tessel.cli.checks import CHECKS, check_rates, examine
from tessel.cli.facts import Facts
from tessel.cli.measure import Rate
from tessel.cli.run import WorkerFailure, first_failure
from tessel.cli.worker import is_consequence
from tessel.errors import WorkerLost
from tessel.version import __version__

Run = Callable[..., list[Any]]

LIMIT = 90

JOIN = "import os, signal, sys, time, torch, tessel\nP = tessel.world()\n"
WAIT = "tessel.nn.AllSumReduce(P, [0])(torch.ones(3))\n"


def tessel(
    *args: object, cwd: Path, starts_workers: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the command; its workers are forks, unless how they start is what a test is about."""
    env = environment(**env)
    command = "-m", "tessel", *args
    return python(*command, cwd=cwd, env=env, timeout=LIMIT, starts_workers=starts_workers)


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "tessel", *map(str, args)]


def environment(**env: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "LOGLEVEL")}
    return {**kept, **env}


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(JOIN + text)
    return path


# --- run


@pytest.mark.slow
def test_run_is_python_on_every_worker(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    path = script(
        tmp_path,
        "import beside\n"
        "assert __name__ == '__main__' and __file__ == os.path.abspath('script.py')\n"
        "y = tessel.nn.AllSumReduce(P, [0])(torch.ones(1))\n"
        "threads = os.environ['OMP_NUM_THREADS']\n"
        "print(P.rank, P.size, int(y), beside.value, threads, *sys.argv[1:])\n",
    )
    words = ("--threads", 3, path.name, "-n", "a b", "--help")
    done = tessel("run", "-n", 2, *words, cwd=tmp_path, starts_workers=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 2 2 7 3 -n a b --help",
        "1 2 2 7 3 -n a b --help",
    ]
    assert done.stderr == ""


@pytest.mark.slow
def test_run_module_and_default_threads(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text(
        "import os, sys\nprint(os.environ['OMP_NUM_THREADS'], *sys.argv[1:])\nsys.exit(0)\n"
    )
    done = tessel("run", "-n", 2, "-m", "package.job", "x", cwd=tmp_path)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{threads} x"] * 2


@pytest.mark.slow
def test_run_shows_the_first_failure_last(tmp_path: Path) -> None:
    path = script(tmp_path, "if P.rank == 1:\n    raise ValueError('no data')\n" + WAIT)
    done = tessel("run", "-n", 2, path, cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "ValueError: no data"
    assert lines[-4] == "Traceback (most recent call last):"
    assert f'File "{path}", line 4, in <module>' in lines[-3]
    assert lines[-5] == "worker 1 of 2 failed first: ValueError: no data"
    assert done.stderr.count("Traceback") == 1
    assert "ChildFailedError" not in done.stderr and "elastic" not in done.stderr


@pytest.mark.slow
def test_run_shows_a_killed_worker(tmp_path: Path) -> None:
    path = script(tmp_path, "if P.rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n" + WAIT)
    done = tessel("run", "-n", 2, path, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"worker 1 of 2 was killed by SIGKILL \(pid \d+\)", last), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "shown"),
    [
        ("sys.exit(3)", 3, "worker 0 of 1 failed first: SystemExit: 3\n"),
        ("sys.exit('no input')", 1, "worker 0 of 1 failed first: SystemExit: no input\n"),
        ("os._exit(5)", 5, "worker 0 of 1 ended with exit code 5 (pid "),
    ],
)
def test_run_keeps_the_users_threads_and_returns_the_exit_code(
    tmp_path: Path, end: str, code: int, shown: str
) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"import os, sys\nprint(os.environ['OMP_NUM_THREADS'], flush=True)\n{end}\n")
    done = tessel("run", "-n", 1, path, cwd=tmp_path, OMP_NUM_THREADS="5")
    assert (done.returncode, done.stdout) == (code, "5\n")
    assert shown in done.stderr


@pytest.mark.slow
def test_run_ends_with_the_interrupt(tmp_path: Path) -> None:
    path = script(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(600)\n")
    start = subprocess.Popen(
        command("run", "-n", 2, path),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert start.stdout is not None
    workers = [int(start.stdout.readline()) for _ in range(2)]
    start.send_signal(signal.SIGINT)
    _, stderr = start.communicate(timeout=30)
    assert start.returncode == 128 + signal.SIGINT
    assert stderr == "tessel run: stopped by SIGINT\n"
    assert not any(map(is_running, workers))


@pytest.fixture
def beside() -> Iterator[Executor]:
    """For commands that run beside each other, and beside the test."""
    with ThreadPoolExecutor() as threads:
        yield threads


SAY = (  # a file in the folder of the script that has the launcher's number, for each worker
    "import os, sys, time\n"
    "said = os.path.join(os.path.dirname(__file__), f'worker-{os.getpid()}')\n"
    "open(said + '.new', 'w').write(str(os.getppid()))\n"
    "os.rename(said + '.new', said)\n"
    "while os.path.exists(said):\n"
    "    time.sleep(0.05)\n"
)


def await_workers(folder: Path, count: int) -> dict[int, int]:
    """The workers that run `SAY`, with their launchers."""
    deadline = time.monotonic() + LIMIT
    while len(found := [*folder.glob("worker-*[0-9]")]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {int(path.name.removeprefix("worker-")): int(path.read_text()) for path in found}


@pytest.mark.slow
def test_workers_end_with_a_killed_launcher(tmp_path: Path, beside: Executor) -> None:
    (tmp_path / "script.py").write_text(SAY)
    run = beside.submit(tessel, "run", "-n", 2, "script.py", cwd=tmp_path)
    workers = await_workers(tmp_path, 2)
    (launcher,) = {*workers.values()}
    os.kill(launcher, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        run.result()
    deadline = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.slow
def test_run_on_two_hosts(tmp_path: Path, beside: Executor) -> None:
    path = script(tmp_path, WAIT + "print(P.rank, P.size)\n")
    with socket.create_server(("localhost", 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
    given = ("run", "-n", 1, "--nnodes", 2, "--rdzv-endpoint", endpoint, path)
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    runs = [beside.submit(tessel, *given, cwd=tmp_path, **home) for _ in range(2)]
    ended = [(run.result().returncode, run.result().stdout, run.result().stderr) for run in runs]
    assert sorted(ended) == [(0, "0 2\n", ""), (0, "1 2\n", "")]
    assert (tmp_path / "tessel" / "token").stat().st_mode & 0o777 == 0o600  # which both have


LISTENERS = """
import glob, ipaddress, socket, struct
def parent(pid):
    with open(f"/proc/{pid}/stat") as status:
        return int(status.read().rpartition(")")[2].split()[1])
def listeners():
    launcher = os.getppid()
    pids, owners, found = [launcher], {}, []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            pids += [int(name)] * (parent(name) == launcher)
        except OSError:
            pass
    for pid in pids:
        for file in glob.glob(f"/proc/{pid}/fd/*"):
            try:
                owners[os.readlink(file)] = pid
            except OSError:
                pass
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for row in map(str.split, lines):
                if row[3] == "0A" and f"socket:[{row[9]}]" in owners:
                    number, port = row[1].split(":")
                    words = [int(number[k : k + 8], 16) for k in range(0, len(number), 8)]
                    address = ipaddress.ip_address(b"".join(struct.pack("=I", w) for w in words))
                    found.append((owners[f"socket:[{row[9]}]"] == launcher, address, int(port, 16)))
    return found
"""


@pytest.mark.slow
def test_a_job_of_one_host_listens_on_loopback_and_unpickles_nothing(tmp_path: Path) -> None:
    """What anybody who reaches a port could do before: have the launcher unpickle his bytes."""
    path = script(
        tmp_path,
        WAIT
        + LISTENERS
        + """
import base64, datetime, pathlib, pickle
import torch.distributed as dist

class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)

if P.rank == 0:
    found = listeners()
    assert [is_launcher for is_launcher, _, _ in found].count(True) >= 1, found
    print(*(address for _, address, _ in found if not address.is_loopback), "elsewhere")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as away:
        try:
            away.connect(("192.0.2.254", 9))  # sends nothing, and says which address would
            mine = away.getsockname()[0]
        except OSError:
            mine = "127.0.0.2"
    for is_launcher, address, port in found:
        try:
            socket.create_connection((mine, port), timeout=1).close()
            print("reached", port)
        except OSError:
            pass
        if is_launcher:
            limit = datetime.timedelta(seconds=5)
            store = dist.TCPStore("127.0.0.1", port, timeout=limit, wait_for_workers=False)
            key = "torch.rendezvous." + os.environ["TORCHELASTIC_RUN_ID"]
            store.set("/" + key, base64.b64encode(pickle.dumps(Evil())))
            store.set(key, base64.b64encode(pickle.dumps(Evil())))
    time.sleep(2)
    print("executed" if pathlib.Path("executed").exists() else "harmless")
"""
        + WAIT,
    )
    done = tessel("run", "-n", 2, path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["elsewhere", "harmless"]


def await_listener(port: int) -> None:
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return socket.create_connection(("localhost", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
def test_a_host_with_another_token_is_told_so(tmp_path: Path, beside: Executor) -> None:
    """It does not wait, nor does it take a place in the job."""
    path = script(tmp_path, "print(P.rank, P.size)\n" + WAIT)
    with socket.create_server(("localhost", 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
    given = ("run", "-n", 1, "--nnodes", 2, "--rdzv-endpoint", endpoint, path)
    first = beside.submit(tessel, *given, cwd=tmp_path, TESSEL_TOKEN="one token of a job")
    await_listener(int(endpoint.rpartition(":")[2]))
    stranger = tessel(*given, cwd=tmp_path, TESSEL_TOKEN="another token of a job")
    assert (stranger.returncode, stranger.stdout) == (1, "")
    assert "has a different token or --rdzv-id" in stranger.stderr
    assert len(stranger.stderr.splitlines()) == 1
    friend = tessel(*given, cwd=tmp_path, TESSEL_TOKEN="one token of a job")
    assert (friend.returncode, friend.stdout) == (0, "1 2\n")
    assert first.result().stdout == "0 2\n"


@pytest.mark.slow
def test_folders_of_killed_launchers_are_removed(tmp_path: Path, beside: Executor) -> None:
    """And those of launchers that run are not."""
    (tmp_path / "script.py").write_text(SAY)
    given, env = ("run", "-n", 1, "script.py"), {"TMPDIR": str(tmp_path)}
    runs = [beside.submit(tessel, *given, cwd=tmp_path, **env) for _ in range(2)]
    launchers = await_workers(tmp_path, 2)
    left = {*tmp_path.glob("tessel-run-*")}
    assert len(left) == 2
    killed, launcher = launchers.values()
    os.kill(killed, signal.SIGKILL)
    assert isinstance(next(as_completed(runs)).exception(), WorkerLost)
    for folder in left:  # as if all that was a while ago
        os.utime(folder, (0, 0))
    (tmp_path / "other.py").write_text("")
    assert tessel("run", "-n", 1, "other.py", cwd=tmp_path, **env).returncode == 0
    assert len({*tmp_path.glob("tessel-run-*")} & left) == 1
    os.kill(launcher, signal.SIGTERM)
    (stopped,) = (run for run in runs if run.exception() is None)
    assert stopped.result().stderr == "tessel run: stopped by SIGTERM\n"
    assert not {*tmp_path.glob("tessel-run-*")}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["absent.py"], "no such script: 'absent.py'"),
        (["-m", "absent.module"], "no module named 'absent.module'"),
        ([], "nothing to run"),
        (["-n", "0", "absent.py"], "expected 1 or more, got 0"),
        (["--nnodes", "2", __file__], "--nnodes 2 needs --rdzv-endpoint"),
    ],
)
def test_run_refuses_before_any_worker_starts(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", *args])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_first_failure_is_a_cause() -> None:
    lost = WorkerFailure(0, 1, 100, time=1.0, error="WorkerLost: worker 1", consequence=True)
    late = WorkerFailure(1, 1, 101, time=3.0, error="ValueError: late")
    early = WorkerFailure(2, 1, 102, time=2.0, error="ValueError: early")
    stopped = WorkerFailure(3, -signal.SIGTERM, 103, time=0.0, consequence=True)
    assert first_failure([lost, late, early, stopped]) is early
    assert first_failure([lost, stopped]) is lost  # which says what happened
    assert first_failure([stopped]) is stopped


def test_consequences_are_told_from_causes() -> None:
    assert is_consequence(WorkerLost("worker 1"))
    assert is_consequence(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1"))
    wrapped = ValueError("step failed")
    wrapped.__cause__ = WorkerLost("worker 1")
    assert is_consequence(wrapped)
    assert not is_consequence(ValueError("connection closed"))
    assert not is_consequence(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


# --- doctor

HEALTHY = Facts(
    tessel="0.1.0",
    torch="2.13.0+cpu",
    python="3.11.7",
    system="Linux",
    hostname="host",
    backends=("gloo",),
    devices=(),
    cores=8,
    usable_cores=8,
    memory=2**34,
    memory_available=2**33,
    shared_memory=2**33,
    omp_num_threads=None,
    torch_threads=8,
    open_files=65536,
    host_address="10.0.0.1",
    loopback=True,
    interfaces=("lo", "eth0"),
    gloo_interface=None,
    transport="shared memory",
    between_hosts="Gloo",
    nvidia_driver=False,
    job_variables=(),
    launched=None,
    launch_problem=None,
    matplotlib="3.10",
)


def test_the_doctor_finds_nothing_on_a_healthy_machine() -> None:
    assert examine(HEALTHY) == []
    assert check_rates([Rate("broadcast", 3e-4, 1e9, 2**22)]) is None


@pytest.mark.parametrize(
    ("facts", "broken", "what", "mend"),
    [
        ({"torch": "2.10.1"}, True, "2.10.1", "pip install 'torch>=2.11,<3'"),
        ({"torch": "3.0.0"}, True, "3.0.0", "pip install 'torch>=2.11,<3'"),
        ({"backends": ()}, True, "no Gloo", "USE_GLOO"),
        ({"devices": ("GPU, 80 GiB",)}, True, "no NCCL", "CUDA"),
        ({"nvidia_driver": True}, False, "sees no GPU", "CUDA package"),
        ({"loopback": False}, True, "localhost", "ip link set lo up"),
        ({"host_address": None}, False, "host, does not resolve", "/etc/hosts"),
        ({"gloo_interface": "eth7"}, True, "eth7", "lo, eth0"),
        ({"job_variables": ("RANK", "WORLD_SIZE")}, False, "RANK", "unset RANK"),
        ({"launch_problem": "no address; set MASTER_ADDR"}, False, "no address", "set MASTER_ADDR"),
        ({"omp_num_threads": "8"}, False, "16 threads on 8 cores", "4 or less"),
        ({"usable_cores": 2}, False, "2 of the 8 cores", "OMP_NUM_THREADS=2"),
        ({"shared_memory": 2**26}, False, "64 MiB", "--shm-size"),
        ({"open_files": 256}, False, "256 files", "ulimit -n"),
        ({"memory_available": 2**28}, False, "256 MiB", "fewer workers"),
        ({"matplotlib": None}, False, "matplotlib", "tessel[viz]"),
    ],
)
def test_the_doctor_says_what_is_wrong_and_how_to_mend_it(
    facts: dict[str, object], broken: bool, what: str, mend: str
) -> None:
    (finding,) = examine(dataclasses.replace(HEALTHY, **facts))
    assert finding.broken is broken
    assert what in finding.what
    assert mend in finding.mend


def test_every_finding_has_a_case() -> None:
    cases = test_the_doctor_says_what_is_wrong_and_how_to_mend_it.pytestmark[0].args[1]
    found = {
        where
        for facts, *_ in cases
        for check in CHECKS
        for where in yielded_at(check, dataclasses.replace(HEALTHY, **facts))
    }
    assert len(found) == inspect.getsource(checks).count("yield Finding(")


def yielded_at(check: Callable[..., Any], facts: Facts) -> Iterator[tuple[str, int]]:
    """The lines of a check at which it finds something."""
    findings = check(facts)
    for _ in findings:
        yield check.__name__, findings.gi_frame.f_lineno


def test_the_doctor_names_broken_things_first() -> None:
    both = dataclasses.replace(HEALTHY, shared_memory=0, loopback=False)
    assert [finding.broken for finding in examine(both)] == [True, False]


def test_slow_messages_are_advice() -> None:
    finding = check_rates([Rate("broadcast", 0.5, 1e9, 2**22)])
    assert finding is not None and not finding.broken and "500 ms" in finding.what


@pytest.mark.parametrize(
    ("gpus", "asked"),
    [
        (0, []),
        (1, [("cuda", "gloo")]),
        (3, [("cuda", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")]),
    ],
)
def test_the_doctor_measures_gpus(
    gpus: int,
    asked: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a machine with GPUs: movements of their tensors, without NCCL and with it."""
    calls: list[tuple[str, str]] = []

    def rates(device: str = "cpu", backend: str = "gloo") -> tuple[list[Rate], str]:
        calls.append((device, backend))
        carrier = {"cpu": "", "cuda": "pinned memory"}[device] if backend == "gloo" else "NCCL"
        return [Rate("broadcast", 1e-6 * len(calls), 1e9 * len(calls), 2**24)], carrier

    monkeypatch.setattr(doctor, "measure_rates", rates)
    found = dataclasses.replace(
        HEALTHY, devices=("H200",) * gpus, nvidia_driver=gpus > 0, backends=("gloo", "nccl")
    )
    monkeypatch.setattr(doctor, "Facts", lambda: found)
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert calls == [("cpu", "gloo"), *asked]
    ways = ["tensors on GPUs, by pinned memory", "tensors on GPUs, by NCCL"][: len(asked)]
    assert [*told["movements_on_gpus"]] == ways
    latencies = [each[0]["latency"] for each in told["movements_on_gpus"].values()]
    assert latencies == pytest.approx([2e-6, 3e-6][: len(asked)])
    assert main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(way in said for way in ways) and ("on GPUs" in said) == bool(gpus)

    def without_a_driver(device: str = "cpu", backend: str = "gloo") -> tuple[list[Rate], str]:
        if device == "cuda":
            raise RuntimeError("no CUDA-capable device is detected\nand more")
        return rates()

    monkeypatch.setattr(doctor, "measure_rates", without_a_driver)
    assert main(["doctor"]) == bool(gpus)
    said = " ".join(capsys.readouterr().out.split())
    text = "could not exchange data: no CUDA-capable device is detected"
    assert (text in said) == bool(gpus) and "and more" not in said


@pytest.mark.slow
def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "gloo", "/dev/shm", "latency", "halo exchange", "GiB/s", "findings"):
        assert word in text


def test_the_doctor_does_not_call_a_task_that_cannot_join_a_world_of_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    assert main(["doctor", "--no-measure"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a script cannot join its job, see the findings" in said
    assert "scripts cannot join their job" in said and "a world of one" not in said


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-measure"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["torch"] == Facts().torch
    assert told["movements"] == []


# --- help


@pytest.mark.parametrize("name", [None, "run", "doctor", "plan", "demo"])
def test_help_reads_well(name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args([name, "--help"] if name else ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "tessel" in text


SOURCE_TREE = """
import importlib.metadata, runpy, sys

assert importlib.metadata.version("torch")
try:
    raise AssertionError(f"tessel {importlib.metadata.version('tessel')} is installed")
except importlib.metadata.PackageNotFoundError:
    pass
for words in (["--version"], ["doctor", "--no-measure", "--json"]):
    sys.argv = ["tessel", *words]
    try:
        runpy.run_module("tessel", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("ended by", end.code)
"""


@pytest.mark.slow
def test_a_source_tree_is_enough(tmp_path: Path) -> None:
    """`python -m tessel`, and all that says the version, where nothing of Tessel is installed."""
    # all that is installed, but for Tessel: what it imports knows where it lies
    for each in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not each.name.startswith(("tessel", "__editable__")) and each.suffix != ".pth":
            (tmp_path / each.name).symlink_to(each)
    (tmp_path / "tessel").symlink_to(Path(inspect.getfile(build_parser)).parents[1])
    # a new interpreter, in which Tessel was not imported before; -S: without what is installed
    done = subprocess.run(
        [sys.executable, "-S", "-c", SOURCE_TREE],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, ended, *rest = done.stdout.splitlines()
    assert (first, ended) == (f"tessel {__version__}", "ended by 0"), done.stdout + done.stderr
    assert rest[-1].startswith("ended by"), done.stdout + done.stderr
    assert __version__ in "".join(rest), done.stdout + done.stderr
