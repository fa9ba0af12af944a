"""Workers: local processes that run a function together, each as one worker of a world."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Self, SupportsIndex, TypeVar

from tessel.launch.environment import OUTPUTS, Environment, flush_outputs
from tessel.launch.forkserver import GRACE, ForkServer, fork_forkserver, shared_forkserver
from tessel.launch.message import Call
from tessel.launch.process import (
    WorkerProcess,
    await_ends,
    await_starts,
    collect,
    kill,
    raise_failure,
    raise_timeout,
)
from tessel.launch.task import Task, forbid_while_importing_main
from tessel.machine import usable_cores

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    nprocs: int,
    *args: Any,
    timeout: float | None = None,
    threads: int | None = None,
    backend: str = "gloo",
) -> list[T]:
    """Run `fn(*args)` on `nprocs` local workers and return their results in the order of ranks.

    Each worker is a separate process in a `torch.distributed` world that is already initialised,
    with the environment variables that torchrun sets. A single worker is a plain process without a
    process group, since it needs none.

    `tessel.launch` is this function. It has the same name as its package, so `tessel.launch.x` is
    an attribute of the function: import names of the package by
    `from tessel.launch import Workers`.

    The first failure of a worker is raised here as the original exception, with the worker's
    traceback as a note. If a worker dies, this raises `tessel.WorkerLost`.

    The workers import `fn` from its module or script, so a script calls `launch` under
    `if __name__ == "__main__":`. Lambdas, closures and functions typed into a notebook cannot be
    imported: for them this process is forked.

    Args:
        fn: the function that every worker runs. Arguments and results are copied, and must be
            picklable.
        nprocs: the number of workers.
        args: the arguments of `fn`, the same for every worker.
        timeout: seconds after which `TimeoutError` shows where each worker was; none by default.
        threads: torch threads of each worker; by default the cores are divided evenly.
        backend: the backend of the process group, as for `torch.distributed.init_process_group`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from tessel.launch import launch
        >>> def total(value):
        ...     x = torch.tensor(value + dist.get_rank())
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> launch(total, 3, 10)
        [33, 33, 33]
    """
    workers = Workers(nprocs, threads=threads, backend=backend)
    task = Task.of(fn, args)
    with contextlib.ExitStack() as stack:
        forkserver = None  # the shared one
        if not task.pickled:
            forkserver = fork_forkserver(functools.partial(fn, *args))
            stack.callback(forkserver.close)
        stack.callback(workers.close)
        return workers._run(task, workers.nprocs, timeout, forkserver)


class Workers:
    """Local processes that live until closed, and run functions together, one call at a time.

    The workers start when first needed, and a call replaces those that died. The process group is
    kept between calls with the same `nprocs`, and made again after a failure.

    Args:
        nprocs: the default number of workers of a call.
        timeout: the default time limit of a call in seconds; None for no limit.
        threads: torch threads of each worker; by default the cores are divided evenly.
        backend: the backend of the process group, as for `torch.distributed.init_process_group`.
        preload: names of modules that are imported once for all workers, before these are forked.

    Example:
        >>> import torch.distributed as dist
        >>> from tessel.launch import Workers
        >>> with Workers(2) as workers:
        ...     ranks = workers.run(dist.get_rank)
        ...     sizes = workers.run(dist.get_world_size, nprocs=3)
        >>> ranks, sizes
        ([0, 1], [3, 3, 3])
    """

    def __init__(
        self,
        nprocs: int,
        *,
        timeout: float | None = None,
        threads: int | None = None,
        backend: str = "gloo",
        preload: Iterable[str] = (),
    ) -> None:
        self.nprocs, self.timeout = _count("nprocs", nprocs), timeout
        self.threads = None if threads is None else _count("threads", threads)
        self.backend = backend
        # A single string would be taken for one name per letter.
        self.preload = (preload,) if isinstance(preload, str) else tuple(preload)
        for name in self.preload:
            if not isinstance(name, str) or not all(map(str.isidentifier, name.split("."))):
                raise ValueError(
                    f"preload must contain names of modules, such as 'torch.func', got {name!r}"
                )
        self._processes: list[WorkerProcess] = []
        self._world: list[WorkerProcess] = []  # share a process group, in the order of ranks
        self._port = 0  # the port of their rendezvous
        self._num_calls = 0
        self._lock = threading.Lock()

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        nprocs: int | None = None,
        timeout: float | None = None,
    ) -> list[T]:
        """Run `fn(*args)` on the first `nprocs` workers as `launch` does, and keep the workers.

        A call sees the current environment variables, `sys.path`, working directory and standard
        output of this process. The timeout does not include the start of new workers.
        """
        nprocs = self.nprocs if nprocs is None else _count("nprocs", nprocs)
        task = Task.of(fn, args)
        if not task.pickled:
            raise TypeError(
                f"workers that are running must be able to import what they are sent; "
                f"{task.name} or one of its arguments cannot be imported: define it at the top "
                f"level of a module, or use tessel.launch(fn, nprocs, ...), which can fork"
            )
        return self._run(task, nprocs, self.timeout if timeout is None else timeout)

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            for process in self._processes:
                process.hang_up()
            await_ends(self._processes, GRACE)
            self._remove(self._processes)
            self._world = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(
        self, task: Task, nprocs: int, timeout: float | None, forkserver: ForkServer | None = None
    ) -> list[Any]:
        forbid_while_importing_main()
        with self._lock:
            processes = self._gather(nprocs, forkserver)
            deadline = time.monotonic() + (math.inf if timeout is None else timeout)
            try:
                self._send(processes, task, deadline)
                collect(processes, deadline)
                raise_failure(processes, task.name)
                raise_timeout(processes, task.name, timeout)
            except BaseException:
                kill(process for process in processes if process.reply is None)
                raise
            return [process.take_result(rank) for rank, process in enumerate(processes)]

    def _gather(self, nprocs: int, forkserver: ForkServer | None) -> list[WorkerProcess]:
        """The first `nprocs` workers, with their process group or ready to make one."""
        if len(self._world) == nprocs and all(process.is_in_world() for process in self._world):
            return self._world
        # Leave the process group of the present world; workers that cannot do so in time are ended.
        world, self._world = self._world, []
        members = [process for process in world if process.is_reachable()]
        deadline = time.monotonic() + GRACE
        try:
            for process in members:
                process.send(None, b"", [], deadline)
            collect(members, deadline)
        finally:
            kill(process for process in members if process.reply is None)
        self._remove([process for process in self._processes if not process.is_reachable()])
        while len(self._processes) < nprocs:
            self._processes.append(WorkerProcess(forkserver or shared_forkserver(self.preload)))
        processes = self._processes[:nprocs]
        await_starts(processes)
        return processes

    def _remove(self, processes: list[WorkerProcess]) -> None:
        kill(processes)
        self._processes = [process for process in self._processes if process not in processes]
        for process in processes:
            process.release()

    def _send(self, processes: list[WorkerProcess], task: Task, deadline: float) -> None:
        """Send a task to the processes, with a rendezvous if they have no world yet."""
        with contextlib.ExitStack() as stack:
            listener = []
            if not self._world:
                self._world, self._port = processes, 0
                if len(processes) > 1:
                    # Worker 0 serves the rendezvous on this socket, so nobody can take its port.
                    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                    self._port = server.getsockname()[1]
                    listener = [server.fileno()]
            fresh = bool(listener)
            self._num_calls += 1
            environment = Environment.present(
                self.threads or max(1, usable_cores() // len(processes))
            )
            flush_outputs()
            for rank, process in enumerate(processes):
                call = Call(
                    *(rank, len(processes), self._port, fresh, self.backend, environment),
                    *(task.main, self._num_calls),
                )
                fds = OUTPUTS + listener if rank == 0 else OUTPUTS
                process.send(call, task.pickled, fds, deadline)


def _count(name: str, value: int) -> int:
    if not isinstance(value, SupportsIndex) or operator.index(value) < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return operator.index(value)
