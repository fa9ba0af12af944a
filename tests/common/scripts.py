"""Scripts as main programs, in processes that have imported torch already.

To start an interpreter costs seconds, most of which is the import of torch. A test that is about
what a program computes and prints, and not about how an interpreter starts, runs it here: on the
workers of the pool, or in a process of its own that is forked and not started.
"""

import contextlib
import faulthandler
import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import tessel
from tessel.launch.fork import fork


def main_program(folder: str, *arguments: str) -> str:
    """What a script prints on this worker, in a folder; the first argument is its name."""
    before = os.getcwd(), sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = list(arguments), [folder]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        os.chdir(before[0])
        sys.argv, sys.path[:] = before[1:]
        if tessel.distributed.is_initialized():  # which would end with a process of its own
            tessel.distributed.destroy_process_group()
        if (state := sys.modules.get("accelerate.state")) is not None:  # the same, of Accelerate
            state.AcceleratorState._reset_state(reset_partial_state=True)
    return output.getvalue()


def python(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 90.0,
    starts_workers: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *arguments])` gives, captured, but for its start.

    It runs `script.py …` and `-m module …`. Workers of `tessel run` and of torchrun are forks, too,
    unless it `starts_workers`; all other processes that the program starts are new ones.
    """
    given = [str(each) for each in arguments]
    ended = tessel.launch(
        *(_be_python, 1, given, str(cwd or "."), dict(env or os.environ), starts_workers),
        timeout=timeout,
    )
    return subprocess.CompletedProcess([sys.executable, *given], *ended[0])


def _be_python(
    arguments: list[str], folder: str, env: dict[str, str], starts_workers: bool
) -> tuple[int, str, str]:
    """The exit code of a program, its output and its errors; this process is of no more use."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if not starts_workers:
        # here, as workers of the pool need none of it
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = ForkedWorker  # type: ignore[misc, attr-defined]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        code = _exit_code(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        return code, *(os.pread(file.fileno(), 2**24, 0).decode() for file in (output, errors))


def _exit_code(arguments: list[str]) -> int:
    """Run a script or a module, and end as an interpreter does."""
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.realpath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class ForkedWorker(subprocess.Popen[bytes]):
    """A worker of torch's launcher, forked from it: it has imported torch already."""

    def _execute_child(
        self,
        args: Sequence[str],
        executable: object,
        preexec_fn: object,
        close_fds: object,
        pass_fds: object,
        cwd: object,
        env: Mapping[str, str],
        *others: Any,
    ) -> None:
        reading, writing = os.pipe()
        program = [each for each in args[1:] if each != "-u"]  # torchrun asks for that
        self.pid = fork(lambda: sys.exit(_be_worker(program, env)))
        self._child_created = True
        os.close(writing)
        os.read(reading, 1)  # until it has a session of its own, by which the launcher ends it
        os.close(reading)


def _be_worker(arguments: list[str], env: Mapping[str, str]) -> int:
    """Leave all that is the launcher's, and run a program; its exit code."""
    os.setsid()
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()  # it would write into a file of the launcher
    gc.freeze()  # nor may what is left of its objects close files of the same numbers
    os.closerange(3, 2**12)
    os.environ.clear()
    os.environ.update(env)
    if threads := env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    return _exit_code(arguments)
