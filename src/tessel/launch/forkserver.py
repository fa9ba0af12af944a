"""ForkServer: a process that has imported torch and forks workers in milliseconds."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from tessel.launch.environment import flush_outputs
from tessel.launch.fork import die_with, fork, poll_fork
from tessel.launch.message import receive_fds
from tessel.launch.worker import work

# Seconds in which processes may end by themselves.
GRACE = 1.0
# From the forkserver: the id of a started process, then its exit code.
STATUS = struct.Struct("<i")
# To the forkserver: the id of a process, 0 for a new one, and the signal to send to it.
_ORDER = struct.Struct("<ii")
_BOOT = (
    "import gc, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); gc.disable(); "
    "fd, preload, *sys.path = sys.argv[1:]; "
    "from tessel.launch.forkserver import run_forkserver; run_forkserver(int(fd), preload.split())"
)


class ForkServer:
    """The handle of a forkserver in the process that it serves."""

    def __init__(self, control: socket.socket, pid: int, poll: Callable[[], object]) -> None:
        self._control = control
        self._pid = pid
        self._poll = poll  # returns None while the process runs

    def is_running(self) -> bool:
        return self._poll() is None

    def start(self, channel: int, report: int, stacks: int) -> None:
        """Fork a worker that has these files: its channel, status pipe and file for stacks."""
        socket.send_fds(self._control, [_ORDER.pack(0, 0)], [channel, report, stacks])

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a worker, if it has not ended."""
        with contextlib.suppress(BrokenPipeError):
            self._control.send(_ORDER.pack(pid, number))

    def close(self) -> None:
        """End the forkserver and with it its workers."""
        self._control.close()
        deadline = time.monotonic() + GRACE
        while self.is_running():
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(1e-3)


def shared_forkserver(preload: tuple[str, ...] = ()) -> ForkServer:
    """The forkserver of this process that has also imported these modules.

    It starts when first used, and lives as long as the process.
    """
    forkserver = _spawn_forkserver(os.getpid(), preload)
    if not forkserver.is_running():
        _spawn_forkserver.cache_clear()
        forkserver = _spawn_forkserver(os.getpid(), preload)
    return forkserver


@functools.cache
def _spawn_forkserver(pid: int, preload: tuple[str, ...]) -> ForkServer:
    """Start a forkserver in a new interpreter; a fork, which has another `pid`, gets its own."""
    mine, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-c", _BOOT, str(fd), " ".join(preload), *map(str, sys.path)]
        # OpenBLAS then has no threads in workers before these set their number, which they can on
        # Linux: see `use_threads_in_numpy`.
        alone = {"OPENBLAS_NUM_THREADS": "1"} if sys.platform == "linux" else {}
        process = subprocess.Popen(
            command, env={**os.environ, **alone}, pass_fds=[fd], stdin=subprocess.DEVNULL
        )
    forkserver = ForkServer(mine, process.pid, process.poll)
    atexit.register(forkserver.close)
    return forkserver


def run_forkserver(fd: int, preload: Sequence[str]) -> None:
    """Run as the forkserver at the other end of a socket, in a new interpreter."""
    for name in preload:
        with contextlib.suppress(ImportError):  # the function that needs it will raise
            importlib.import_module(name)
    gc.freeze()  # the workers' garbage collection then does not copy shared memory
    gc.enable()  # disabled until now, since imports create no garbage
    _Server(socket.socket(fileno=fd), None).run()


def fork_forkserver(inherited: Callable[[], object]) -> ForkServer:
    """Fork a forkserver from this process, whose workers inherit a function that cannot be sent."""
    if dist.is_initialized() or torch.cuda.is_initialized():
        raise RuntimeError(
            "this function or one of its arguments cannot be imported by the workers, and this "
            "process cannot be forked instead, since it already uses torch.distributed or CUDA: "
            "define the function at the top level of a module"
        )
    mine, theirs = socket.socketpair()

    def serve() -> None:
        mine.close()
        _Server(theirs, inherited).run()

    flush_outputs()
    pid = fork(serve)
    theirs.close()
    return ForkServer(mine, pid, functools.partial(poll_fork, pid))


class _Server:
    """A forkserver in its own process: it forks and signals workers on request."""

    def __init__(self, control: socket.socket, inherited: Callable[[], object] | None) -> None:
        self._control = control
        self._inherited = inherited
        self._wakeup, self._wakeup_writer = socket.socketpair()  # written to by signals
        self._reports: dict[int, int] = {}  # where to report the end of each worker, by process id

    def run(self) -> None:
        """Follow orders while the process that this one serves exists, then end the workers."""
        self._wakeup_writer.setblocking(False)
        signal.signal(signal.SIGINT, _ignore)  # Ctrl-C is for the parent, which ends the workers
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(self._wakeup_writer.fileno())
        parent = os.getppid()
        with self._control, self._wakeup, self._wakeup_writer:
            order = b"something"  # empty when the process that this one serves has hung up
            while os.getppid() == parent and order:
                ready = wait([self._control, self._wakeup], timeout=1.0)
                if self._wakeup in ready:
                    self._wakeup.recv(4096)
                for pid in list(self._reports):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        report = self._reports.pop(pid)
                        _write_status(report, os.waitstatus_to_exitcode(status))
                        os.close(report)
                if self._control in ready:
                    order, fds = receive_fds(self._control, _ORDER.size)
                    pid, number = _ORDER.unpack(order) if order else (-1, 0)
                    if pid in self._reports:  # else it has ended, and its id may be reused
                        os.kill(pid, number)
                    elif pid == 0:
                        self._start(*fds)
            for pid in self._reports:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _start(self, fd: int, report: int, stacks: int) -> None:
        """Fork a worker, which closes the files of the forkserver."""
        forkserver = os.getpid()

        def become_worker() -> None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for owned in (self._control, self._wakeup, self._wakeup_writer):
                owned.close()
            # An open end of another worker's pipe here would hide the end of that worker.
            for other in (report, *self._reports.values()):
                os.close(other)
            die_with(forkserver)
            work(channel, stacks, self._inherited)

        with socket.socket(fileno=fd) as channel:  # in the fork it stays open until the very end
            pid = fork(become_worker)
        os.close(stacks)
        self._reports[pid] = report
        _write_status(report, pid)


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Ignore a signal; unlike SIG_IGN, programs that a worker starts do not inherit this."""


def _write_status(report: int, status: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(report, STATUS.pack(status))
