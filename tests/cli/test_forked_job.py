"""Jobs on one host: forked workers are as interpreters that were started, and end as these do.

Tests `cli/forked_job.py`, `launch/fork.py`.
"""

from __future__ import annotations

import os
import py_compile
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tessel.cli import forked_job

LIMIT = 90
pytestmark = pytest.mark.slow


def start(
    folder: Path,
    text: str,
    n: int = 2,
    *options: str,
    ignored: Sequence[signal.Signals] = (),
    **env: str,
) -> subprocess.Popen[str]:
    """Begin `tessel run` in a process of its own: what it forks inherits nothing of a test."""

    def ignore() -> None:
        for number in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    (folder / "script.py").write_text("import os, sys, time\n" + text)
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, "-m", "tessel", "run", "-n", str(n), *options, "script.py"],
        cwd=folder,
        env={**kept, **env},
        preexec_fn=ignore,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    output, errors = process.communicate(timeout=LIMIT)
    return process.returncode, sorted(output.splitlines()), errors


def test_workers_are_forks_of_the_launcher(tmp_path: Path) -> None:
    """It has imported torch for them; threads, random numbers and variables are their own."""
    code, lines, errors = ended(
        start(
            tmp_path,
            "import random, threading, numpy, torch\n"
            "names = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK'\n"
            "print(*(os.environ[name] for name in names), os.environ['OMP_NUM_THREADS'],\n"
            "    torch.get_num_threads(), os.environ.get('TESSEL_TOKEN'),\n"
            "    sys.path[0] == os.getcwd(), *(open(f'/proc/{pid}/cmdline').read().count('run')\n"
            "    for pid in (os.getpid(), os.getppid())))\n"
            "print('drawn', random.random(), numpy.random.rand(), torch.rand(1).item())\n",
            2,
            *("--threads", "3"),
            TESSEL_TOKEN="one token of a job",
        )
    )
    assert (code, errors) == (0, "")
    assert lines[:2] == [f"{rank} {rank} 2 2 0 3 3 None True 1 1" for rank in range(2)]
    drawn = [line.split()[1:] for line in lines[2:]]
    assert not {*drawn[0]} & {*drawn[1]}


def test_numpy_has_as_many_threads_as_torch(tmp_path: Path) -> None:
    code, lines, errors = ended(
        start(
            tmp_path,
            "import numpy\n"
            "x = numpy.ones((400, 400))\n"
            "x @ x\n"
            "print(len(os.listdir('/proc/self/task')))\n",
            1,
            *("--threads", "1"),
        )
    )
    assert (code, lines, errors) == (0, ["1"], "")  # and none that waits for work


@pytest.mark.parametrize("threads", ["2,1", "", "many"])
def test_what_a_user_may_have_set_as_number_of_threads(tmp_path: Path, threads: str) -> None:
    """Libraries read a list as its first number, and what is no number as none."""
    text = "import torch\nprint(torch.get_num_threads())\n"
    code, lines, _ = ended(start(tmp_path, text, 1, OMP_NUM_THREADS=threads))
    command = [sys.executable, "script.py"]
    env = {**os.environ, "OMP_NUM_THREADS": threads}
    plain = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (code, lines) == (0, plain.stdout.split())


def test_a_script_is_compiled_as_by_python(tmp_path: Path) -> None:
    """Without the __future__ of a module of Tessel; it may also be compiled already."""
    text = "def f(x: int) -> None: ...\nprint(f.__annotations__['x'])\n"
    assert ended(start(tmp_path, text, 1)) == (0, ["<class 'int'>"], "")
    compiled = tmp_path / "script.pyc"
    py_compile.compile(str(tmp_path / "script.py"), str(compiled))
    compiled.replace(tmp_path / "compiled")
    command = [sys.executable, "-m", "tessel", "run", "-n", "1", "compiled"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "<class 'int'>\n", "")


def test_workers_end_as_interpreters_do(tmp_path: Path) -> None:
    """Exit hooks are called, files are closed, and threads are waited for."""
    code, lines, errors = ended(
        start(
            tmp_path,
            "import atexit, threading\n"
            "rank = os.environ['RANK']\n"
            "left_open = open(f'file-{rank}', 'w')\n"
            "left_open.write('all of it')\n"
            "def cycle():\n"
            "    return left_open\n"
            "atexit.register(print, 'exit hook', rank)\n"
            "def later():\n"
            "    time.sleep(0.5)\n"
            "    print('thread', rank)\n"
            "threading.Thread(target=later).start()\n"
            "print('script', rank)\n",
        )
    )
    assert (code, errors) == (0, "")
    assert lines == [
        f"{what} {rank}" for what in ("exit hook", "script", "thread") for rank in "01"
    ]
    assert [(tmp_path / f"file-{rank}").read_text() for rank in "01"] == ["all of it"] * 2


def test_workers_start_processes_of_their_own(tmp_path: Path) -> None:
    code, lines, errors = ended(
        start(
            tmp_path,
            "import torch\n"
            "from torch.utils.data import DataLoader\n"
            "if __name__ == '__main__':\n"
            "    for context in ('fork', 'spawn'):\n"
            "        loader = DataLoader(torch.arange(4.0), 2, num_workers=1,\n"
            "            multiprocessing_context=context)\n"
            "        print(context, os.environ['RANK'], [each.sum().item() for each in loader])\n",
        )
    )
    assert (code, errors) == (0, "")
    assert lines == [f"{c} {rank} [1.0, 5.0]" for c in ("fork", "spawn") for rank in "01"]


def test_the_script_is_the_main_module_until_the_end(tmp_path: Path) -> None:
    """Its classes are pickled by their names in it: to its processes and by its exit hooks."""
    text = (
        "import atexit, multiprocessing, pickle\n"
        "class Here:\n"
        "    value = 7\n"
        "def make(number):\n"
        "    return Here()\n"
        "def hook():\n"
        "    print('hook', pickle.loads(pickle.dumps(Here())).value)\n"
        "if __name__ == '__main__':\n"
        "    atexit.register(hook)\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print('pool', [each.value for each in pool.map(make, range(2))])\n"
    )
    assert ended(start(tmp_path, text)) == (0, ["hook 7"] * 2 + ["pool [7, 7]"] * 2, "")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "beside.py").write_text("value = 3\n")
    (tmp_path / "package" / "job.py").write_text(
        "import sys\n"
        + text
        + "    from .beside import value\n    print(value, __spec__.name, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "tessel", "run", "-n", "1", "-m", "package.job", "a"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    lines = sorted(done.stdout.splitlines())
    assert (done.returncode, done.stderr) == (0, "")
    assert lines == ["3 package.job ['a']", "hook 7", "pool [7, 7]"]


def test_a_program_with_a_main_file_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "script.py").mkdir()
    (tmp_path / "script.py" / "__main__.py").write_text(
        "import beside\nprint(__name__, beside.x)\n"
    )
    (tmp_path / "script.py" / "beside.py").write_text("x = 5\n")
    command = [sys.executable, "-m", "tessel", "run", "-n", "1", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "__main__ 5\n", "")


@pytest.mark.parametrize(("option", "variable", "finds"), [("-P", "", True), ("-s", "1", False)])
def test_where_a_script_looks_for_modules(
    tmp_path: Path, option: str, variable: str, finds: bool
) -> None:
    """Its own folder is first, unless a variable forbids it; the launcher's option does not."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "script.py").write_text("import beside\n")
    command = [sys.executable, option, "-m", "tessel", "run", "-n", "1", "script.py"]
    env = {**os.environ, "PYTHONSAFEPATH": variable}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.returncode == 0) == finds, done.stderr
    assert finds or "No module named 'beside'" in done.stderr


def test_a_program_that_calls_the_command_keeps_its_exit_hooks(tmp_path: Path) -> None:
    """Its workers are new interpreters: forks would call the hooks, too."""
    (tmp_path / "job.py").write_text("import os\nprint('worker', os.environ['RANK'], flush=True)\n")
    (tmp_path / "caller.py").write_text(
        "import atexit\n"
        "from tessel.cli import main\n"
        "atexit.register(print, 'hook')\n"
        "print('code', main(['run', '-n', '2', 'job.py']), flush=True)\n"
    )
    command = [sys.executable, "caller.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["code 0", "hook", "worker 0", "worker 1"]


def test_all_end_when_one_fails(tmp_path: Path) -> None:
    """Those that sleep, with the processes that they have started, and deaf ones."""
    begin = time.monotonic()
    job = start(
        tmp_path,
        "import signal, subprocess\n"
        "rank = int(os.environ['RANK'])\n"
        "if rank == 0:\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    open('child', 'w').write(str(child.pid))\n"
        "if rank == 1:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'ready-{rank}', 'w').close()\n"
        "while rank == 2 and not all(os.path.exists(f'ready-{each}') for each in range(2)):\n"
        "    time.sleep(0.05)\n"
        "if rank == 2:\n"
        "    raise ValueError('no data')\n"
        "time.sleep(600)\n",
        3,
    )
    code, _, errors = ended(job)
    assert code == 1 and errors.startswith("worker 2 of 3 failed first: ValueError: no data\n")
    assert "SIGKILL" not in errors
    assert time.monotonic() - begin < 60
    status = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_the_workers(tmp_path: Path, number: signal.Signals) -> None:
    job = start(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(600)\n")
    assert job.stdout is not None
    workers = [int(job.stdout.readline()) for _ in range(2)]
    job.send_signal(number)
    assert ended(job) == (128 + number, [], f"tessel run: stopped by {number.name}\n")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_signals_that_the_launcher_ignores(tmp_path: Path) -> None:
    """As by `nohup`: it goes on. The ends of its workers are noted, whatever its parent ignored."""
    text = (
        "print(os.getpid(), flush=True)\n"
        "while not os.path.exists('go'):\n"
        "    time.sleep(0.05)\n"
        "sys.exit(-1)\n"
    )
    job = start(tmp_path, text, 1, ignored=(signal.SIGCHLD, signal.SIGHUP))
    assert job.stdout is not None
    job.stdout.readline()
    job.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    (tmp_path / "go").touch()
    code, _, errors = ended(job)
    assert code == 255 and errors.startswith("worker 0 of 1 failed first: SystemExit: -1\n")


def test_a_second_signal_ends_workers_that_are_deaf_to_the_first(tmp_path: Path) -> None:
    text = (
        "import signal, subprocess\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    job = start(tmp_path, text)
    assert job.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in job.stdout.readline().split()]
    job.send_signal(signal.SIGINT)
    time.sleep(0.5)
    begin = time.monotonic()
    job.send_signal(signal.SIGINT)
    assert ended(job) == (130, [], "tessel run: stopped by SIGINT\n")
    assert time.monotonic() - begin < 3
    for pid in pids:
        status = Path(f"/proc/{pid}/stat")
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        (
            "from torch.distributed.elastic.multiprocessing.errors import record\n"
            "@record\n"
            "def main():\n"
            "    raise ValueError('no data')\n"
            "try:\n"
            "    main()\n"
            "except ValueError:\n"
            "    os._exit(3)\n",
            3,
            "worker 0 of 1 failed first: ValueError: no data\n",
        ),
        (
            "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as report:\n"
            "    report.write('half of a rep')\n"
            "os._exit(4)\n",
            4,
            "worker 0 of 1 ended with exit code 4 ",
        ),
    ],
)
def test_reports_that_are_not_of_tessel(tmp_path: Path, text: str, code: int, shown: str) -> None:
    """Those of elastic's `record` have no exit code; one that was not finished is none."""
    ended_with, _, errors = ended(start(tmp_path, text, 1))
    assert ended_with == code and shown in errors


def test_a_failure_that_cannot_be_reported_is_printed(tmp_path: Path) -> None:
    text = (
        "import shutil\n"
        "shutil.rmtree(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))\n"
        "raise ValueError('no data')\n"
    )
    code, _, errors = ended(start(tmp_path, text, 1))
    first, *_, error, last = errors.splitlines()
    assert (code, first, error) == (1, "Traceback (most recent call last):", "ValueError: no data")
    assert last.startswith("worker 0 of 1 ended with exit code 1 ")


def test_what_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_job.threading, "active_count", lambda: 1)
    assert forked_job.can_fork()
    monkeypatch.setattr(forked_job.torch.cuda, "is_initialized", lambda: True)
    assert not forked_job.can_fork()
    monkeypatch.undo()
    monkeypatch.setattr(forked_job.threading, "active_count", lambda: 2)
    assert not forked_job.can_fork()
