"""A job on one host: its workers are forked from the launcher, which has imported torch.

Several interpreters that each import torch share the cores, and what they import has no memory in
common. Forks start in milliseconds. They are made before the launcher has threads, which would be
missing in them, and before it uses a GPU, which forks cannot. A worker ends as an interpreter does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tessel.cli import worker
from tessel.launch.environment import flush_outputs, use_threads, use_threads_in_numpy
from tessel.launch.fork import die_with, fork, unshare_randomness

_LOOPBACK = "127.0.0.1"
_TICK = 0.02  # seconds between two looks at the workers
_SECONDS_TO_SAY = 0.1  # in which workers that have failed, too, may report it
_SECONDS_TO_END = 5.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def can_fork() -> bool:
    """Whether this process can fork workers."""
    is_used = dist.is_initialized() or torch.cuda.is_initialized() or threading.active_count() > 1
    return sys.platform == "linux" and not is_used


def stops() -> list[signal.Signals]:
    """The signals that stop a launcher: those that it does not ignore, as it does under `nohup`."""
    return [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]


def count_gpus() -> int:
    """The number of GPUs, counted in a fork: forks of a process that looks at them may not."""
    if not torch.backends.cuda.is_built():
        return 0
    _, status = os.waitpid(fork(lambda: sys.exit(torch.cuda.device_count())), 0)
    return max(0, os.waitstatus_to_exitcode(status))


@dataclass
class ForkedJob:
    """Workers that run a script or a module, each as one worker of a world.

    Args:
        target: the script or `-m` and the module, and its arguments.
        size: how many workers.
        threads: how many threads each has; None for as many as this process.
        reports: the folder for their reports of failures.
        name: the name of the job.

    Attributes:
        killed: the processes that did not end when they were asked to.
    """

    target: Sequence[str]
    size: int
    threads: int | None
    reports: Path
    name: str
    killed: set[int] = field(default_factory=set)
    _running: dict[int, int] = field(default_factory=dict)  # ranks, by process id
    _failed: dict[int, ProcessFailure] = field(default_factory=dict)

    def run(self) -> dict[int, ProcessFailure]:
        """Run until all have ended, and return the failures by rank.

        When one has failed, the others are ended. A signal that stops the launcher ends all, and
        raises `SignalException`.
        """
        with socket.create_server((_LOOPBACK, 0), backlog=128) as listener:
            flush_outputs()
            gc.freeze()  # garbage collection in workers then does not copy shared memory
            if self.threads is not None:
                use_threads_in_numpy(self.threads)
            with _Stops() as asked:
                be_worker = partial(self._be_worker, listener, os.getpid(), asked)
                for rank in range(self.size):
                    self._running[fork(partial(be_worker, rank))] = rank
                # the store of the rendezvous, in which workers are clients
                store = dist.TCPStore(
                    *(_LOOPBACK, listener.getsockname()[1]),
                    is_master=True,
                    master_listen_fd=listener.detach(),
                    wait_for_workers=False,
                )
                while self._running and not (self._failed or asked.signals):
                    time.sleep(_TICK)
                    self._look()
                if self._running and not asked.signals:
                    time.sleep(_SECONDS_TO_SAY)
                    self._look()
                self._end(asked)
                del store  # until now, since workers are its clients
        if asked.signals:
            first = asked.signals[0]
            raise SignalException(f"stopped by {first.name}", first)
        return self._failed

    def _look(self) -> None:
        """Note which workers have ended since the last look."""
        for pid, rank in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._running[pid]
            if code := os.waitstatus_to_exitcode(status):
                try:
                    self._failed[rank] = ProcessFailure(rank, pid, code, str(self._report(rank)))
                except (ValueError, KeyError, TypeError):  # it ended while it wrote its report
                    self._failed[rank] = ProcessFailure(rank, pid, code, "")

    def _end(self, asked: _Stops) -> None:
        """End the workers that run, at first by a signal that they may handle."""
        deadline = time.monotonic() + _SECONDS_TO_END
        self._signal(asked.signals[0] if asked.signals else signal.SIGTERM)
        self._signal(signal.SIGCONT)  # one that was stopped sees the other signal then
        while self._running:
            if time.monotonic() > deadline or len(asked.signals) > 1:  # such as Ctrl-C twice
                self.killed |= self._running.keys()
                self._signal(signal.SIGKILL)
            time.sleep(_TICK)
            self._look()

    def _signal(self, number: int) -> None:
        """Send a signal to the workers, and to the processes that they have started."""
        for pid in self._running:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it has no group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _report(self, rank: int) -> Path:
        return self.reports / f"{rank}.json"

    def _be_worker(self, listener: socket.socket, launcher: int, asked: _Stops, rank: int) -> None:
        """Run the program, and end as an interpreter does."""
        os.setsid()  # Ctrl-C is for the launcher, which ends the workers
        die_with(launcher)
        asked.restore()
        if asked.signals:  # until now
            os._exit(128 + asked.signals[0])
        os.environ |= self._variables(rank, listener.getsockname()[1])
        listener.close()
        if self.threads is not None:
            use_threads(self.threads)
        unshare_randomness()
        code = worker.main(list(self.target))
        # With the frames of the launcher on the stack, only C can end the interpreter: it waits for
        # threads, calls the exit hooks, and closes files.
        ctypes.pythonapi.Py_Exit(code)

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        """The variables that torchrun sets."""
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
        return {
            **ranks,
            **dict.fromkeys(names, str(self.size)),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.name,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(self._report(rank)),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }


class _Stops(contextlib.AbstractContextManager["_Stops"]):
    """Notes the signals that would stop this process, instead of stopping it, in a `with` block.

    They interrupt nothing, so that it is always known which workers run.

    Attributes:
        signals: those that came.
    """

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in stops()}
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Let signals have their effect again; a fork in the block does so, too."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self.signals.append(signal.Signals(number))
