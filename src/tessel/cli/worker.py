"""One worker of `tessel run`, which is started with `[-m] TARGET ARGS…`.

Runs a script or a module as Python would, destroys the process group at a normal end, and writes a
report of a failure for the launcher, which shows the first one.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import io
import marshal
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import types
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import errors

from tessel import endings, transport
from tessel.errors import WorkerLost
from tessel.launch.environment import keep_lines_whole
from tessel.launch.fork import die_with, exit_code
from tessel.machine import keep_freed_memory
from tessel.tracing import block

# Errors of Gloo, NCCL and the store that mean that another worker was lost.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket closed"
    r"|timed out (after )?waiting|failed to recv|no error in sendbytes",
    re.IGNORECASE,
)
_LOST_TYPES = (WorkerLost, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_FRAMES_BEFORE_THE_SCRIPT = (__file__, runpy.__file__, "<frozen runpy>")
_SECONDS_TO_END = 10.0
# Seconds for a worker that lost another: Gloo may wait for that one when groups are destroyed.
_SECONDS_TO_FOLLOW = 2.0


class Reporter(errors.ErrorHandler):
    """Writes the exception that ended this worker, and its time, for the launcher."""

    def record_exception(self, e: BaseException) -> None:
        """Write `e` to the error file, or print it if there is none, or no space for it."""
        trace = e.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in _FRAMES_BEFORE_THE_SCRIPT:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(e.with_traceback(trace)))
        now = time.time()  # elastic's time has whole seconds, too coarse to tell who was first
        info = {
            "py_callstack": text,
            "timestamp": str(int(now)),
            "time": now,
            "consequence": is_consequence(e),
            "exitcode": exit_code(e),
        }
        message = f"{type(e).__name__}: {e}".removesuffix(": ")
        path = self._get_error_file_path()
        with contextlib.suppress(OSError):  # as on a full disk
            if path:
                block.write(Path(path), {"message": {"message": message, "extraInfo": info}})
                return
        sys.stderr.write(text)


def is_consequence(error: BaseException | None) -> bool:
    """Return whether an exception, or a cause of it, means that another worker was lost."""
    while error is not None:
        if isinstance(error, _LOST_TYPES):
            return True
        if isinstance(error, RuntimeError | OSError) and _LOST.search(str(error)):
            return True
        # Code that catches it and raises something else has still lost a worker.
        error = error.__cause__ or error.__context__
    return False


def _run(argv: list[str]) -> None:
    """Run `[-m] TARGET ARGS…` as Python does."""
    # A new module, which stays: classes of the program are pickled by the names that they have in
    # it, also by its exit hooks, and multiprocessing looks them up in the second one.
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if argv[0] == "-m":
        sys.argv = argv[1:]
        _look_in(os.getcwd())
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        return
    path = os.path.abspath(argv[0])
    sys.argv = [path, *argv[1:]]
    _look_in(os.path.dirname(os.path.realpath(path)))
    if not os.path.isfile(path) or zipfile.is_zipfile(path):  # with a program in it
        runpy.run_path(path, run_name="__main__")
        return
    vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        text = file.read()
    if text.startswith(MAGIC_NUMBER):  # a file that Python has compiled: 16 bytes, and the code
        code = marshal.loads(text[16:])
    else:  # not with the __future__ of this module, as `compile` does
        code = compile(text, path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _look_in(folder: str) -> None:
    """Let Python look for modules in a folder first, as it does for any script."""
    if os.environ.get("PYTHONSAFEPATH"):
        return
    if sys.flags.safe_path:  # an option of the launcher, which is not for workers
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


def main(argv: list[str]) -> int:
    """Run `[-m] TARGET ARGS…` and return this worker's exit code."""
    die_with(os.getppid())  # even if the launcher ends by SIGKILL
    keep_lines_whole()
    keep_freed_memory()
    # Objects from torch's import are no garbage. Scanning them takes Python some 150 ms, on each
    # worker at a different moment, in which all others wait.
    gc.freeze()
    gc.enable()  # disabled by the launcher's command
    reporter = Reporter()
    reporter.initialize()
    block.begin_program()  # begins a trace, if one is requested
    try:
        _run(argv)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as end:
        if exit_code(end):
            reporter.record_exception(end)
            block.end_program(end)
            endings.end_program(end)
            return _end_soon(exit_code(end))
    except BaseException as error:
        reporter.record_exception(error)
        block.end_program(error)
        endings.end_program(error)
        return _end_soon(exit_code(error), is_consequence(error))
    block.end_program()
    transport.leave()  # a running thread of a group would abort the process when Python ends
    return 0


def _end_soon(code: int, follows: bool = False) -> int:
    """Return `code`, and end the process with it even if a thread of the script keeps running.

    `follows`: whether this worker ends because another one did.
    """
    sys.stdout.flush()
    # A thread that is not a daemon would keep the process alive, and all others waiting.
    seconds = _SECONDS_TO_FOLLOW if follows else _SECONDS_TO_END
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return code
