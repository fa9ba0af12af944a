"""Workers: local processes that run a function together, each as one worker of a world.

A *template* process imports torch once and forks workers in milliseconds. This process talks to
each worker over a socket of its own, and the template reports how a worker ended. Nothing of it
outlives this process: when it goes away the template ends the workers, whatever they are doing.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import faulthandler
import functools
import gc
import importlib.machinery
import math
import operator
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import Any, NamedTuple, NoReturn, SupportsIndex, TypeVar

import torch
import torch.distributed as dist

from tessel.errors import WorkerLost

T = TypeVar("T")

# Seconds that other workers have to finish after the first failure, and that all have to close.
GRACE = 1.0
# What pickle raises, itself or through a type's own `__reduce__`, when it cannot pickle a value.
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, RuntimeError, ValueError)
OUTPUTS = [1, 2]  # stdout and stderr
DUMP_STACKS = signal.SIGUSR2


def launch(
    fn: Callable[..., T],
    nprocs: int,
    *args: Any,
    timeout: float | None = None,
    threads: int | None = None,
    backend: str = "gloo",
) -> list[T]:
    """Run `fn(*args)` on `nprocs` local workers and return their results, in the order of ranks.

    Each worker is a process of its own in a `torch.distributed` world that is initialised already,
    with the environment variables that torchrun sets. A single worker is a plain process: it needs
    no process group and gets none.

    The first failure of a worker is raised here, as the exception that it was, with the worker's
    traceback as a note. A worker that dies raises `tessel.WorkerLost`.

    The workers import `fn` from its module or script, so a script calls `launch` under
    `if __name__ == "__main__":`. Lambdas, closures and functions typed into a notebook have nothing
    to be imported from: for them this process is forked.

    Args:
        fn: what every worker runs. Arguments and results are copied: they must be picklable.
        nprocs: the number of workers.
        args: the arguments of `fn`, the same for every worker.
        timeout: seconds after which `TimeoutError` shows where each worker was; none by default.
        threads: torch threads of each worker; by default the cores are shared out evenly.
        backend: of the process group, as for `torch.distributed.init_process_group`.

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
    with contextlib.ExitStack() as stack:
        workers = Workers(nprocs, threads=threads, backend=backend)
        payload = _pickle_call(fn, args)
        if payload is None:
            template = _fork_template(functools.partial(fn, *args))
            stack.callback(template.close)
            workers._template = template
        stack.callback(workers.close)
        return workers._run(payload or b"", _name(fn), workers.nprocs, timeout)


class Workers:
    """Local processes that live until closed and run functions together, one call after the other.

    The workers start when first needed, and a call replaces those that died. The process group is
    kept between calls with the same `nprocs`, and made anew after a failure.

    Args:
        nprocs: the number of workers of a call that does not say otherwise.
        threads: torch threads of each worker; by default the cores are shared out evenly.
        backend: of the process group, as for `torch.distributed.init_process_group`.

    Example:
        >>> import torch.distributed as dist
        >>> from tessel.launch import Workers
        >>> with Workers(2) as workers:
        ...     ranks = workers.run(dist.get_rank)
        ...     sizes = workers.run(dist.get_world_size, nprocs=3)
        >>> ranks, sizes
        ([0, 1], [3, 3, 3])
    """

    def __init__(self, nprocs: int, *, threads: int | None = None, backend: str = "gloo") -> None:
        self.nprocs = _count("nprocs", nprocs)
        self.threads = None if threads is None else _count("threads", threads)
        self.backend = backend
        self._processes: list[_Process] = []
        self._world: _World | None = None
        self._template: _Template | None = None  # the shared one, unless a call brings its own
        self._lock = threading.Lock()

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        nprocs: int | None = None,
        timeout: float | None = None,
    ) -> list[T]:
        """Run `fn(*args)` on the first `nprocs` workers, as `launch` does, and keep the workers.

        A call sees this process's environment variables, `sys.path`, working directory and standard
        output as they are now. The timeout does not count the start of new workers.
        """
        nprocs = self.nprocs if nprocs is None else _count("nprocs", nprocs)
        payload = _pickle_call(fn, args)
        if payload is None:
            raise TypeError(
                f"workers that run already must be able to import what they are sent; "
                f"{_name(fn)} or one of its arguments cannot be imported: define it at the top "
                f"level of a module, or use tessel.launch(fn, nprocs, ...), which can fork"
            )
        return self._run(payload, _name(fn), nprocs, timeout)

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            for process in self._processes:
                process.hang_up()
            _await_ends(self._processes, GRACE)
            _kill(self._processes)
            for process in self._processes:
                process.release()
            self._processes, self._world = [], None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, payload: bytes, name: str, nprocs: int, timeout: float | None) -> list[Any]:
        _forbid_while_importing_main()
        with self._lock:
            if not (self._world and self._world.is_usable(nprocs)):
                self._disband()
            team = self._start(nprocs)
            deadline = time.monotonic() + (math.inf if timeout is None else timeout)
            try:
                self._send(team, payload, deadline)
                _collect(team, deadline)
                _raise_failure(team, name)
                _raise_timeout(team, name, timeout)
            except BaseException:
                _kill(process for process in team if process.reply is None)
                raise
            return [process.take_result(rank) for rank, process in enumerate(team)]

    def _start(self, nprocs: int) -> list[_Process]:
        """The first `nprocs` workers, started where they are missing or have ended."""
        template = self._template or _shared_template()
        for number in range(nprocs):
            if number == len(self._processes):
                self._processes.append(_Process(template))
            elif not self._processes[number].is_reachable():
                _kill([self._processes[number]])
                self._processes[number].release()
                self._processes[number] = _Process(template)
        team = self._processes[:nprocs]
        for process in team:
            process.await_start()
        return team

    def _send(self, team: list[_Process], payload: bytes, deadline: float) -> None:
        """Send a call to the team, with a meeting point if they have no world yet."""
        with contextlib.ExitStack() as stack:
            listener: list[int] = []
            fresh = self._world is None
            world = self._world = self._world or _World(team)
            if fresh and len(team) > 1:
                # Worker 0 serves the rendezvous on this very socket: nobody can take its port.
                server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                world.port = server.getsockname()[1]
                listener = [server.fileno()]
            scene = _Scene.present(self.threads or max(1, _num_cores() // len(team)))
            _flush_outputs()
            for rank, process in enumerate(team):
                call = _Call(rank, len(team), world.port, fresh, self.backend, scene)
                process.send(call, payload, OUTPUTS + (listener if rank == 0 else []), deadline)

    def _disband(self) -> None:
        """Destroy the process group of the present world; end a worker that cannot in time."""
        world, self._world = self._world, None
        members = [process for process in world.members if process.is_reachable()] if world else []
        deadline = time.monotonic() + GRACE
        try:
            for process in members:
                process.send(None, b"", [], deadline)
            _collect(members, deadline)
        finally:
            _kill(process for process in members if process.reply is None)


class _World:
    """The workers that share a process group, in the order of ranks."""

    def __init__(self, members: list[_Process]) -> None:
        self.members = members
        self.port = 0

    def is_usable(self, nprocs: int) -> bool:
        return len(self.members) == nprocs and all(p.is_in_world() for p in self.members)


class _Scene(NamedTuple):
    """What a call sees of the process that makes it."""

    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    directory: str
    main: tuple[str | None, str | None]  # file and package of the main module
    threads: int

    @classmethod
    def present(cls, threads: int) -> _Scene:
        main = sys.modules["__main__"]
        return cls(
            environ={**_loopback(), **os.environ, "OMP_NUM_THREADS": str(threads)},
            path=[str(entry) for entry in sys.path],
            argv=list(sys.argv),
            directory=os.getcwd(),
            main=(getattr(main, "__file__", None), getattr(main, "__package__", None)),
            threads=threads,
        )

    def enter(self, known: dict[str, str], variables: dict[str, str]) -> None:
        """Take on this scene; `known` are the environment variables that an earlier one set."""
        environ = {k: v for k, v in self.environ.items() if not _is_torchrun_variable(k)}
        _follow(known, {**environ, **variables})
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.chdir(self.directory)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


class _Call(NamedTuple):
    """A request to a worker; the pickled function follows it."""

    rank: int
    nprocs: int
    port: int
    fresh: bool  # whether the world has to be made first
    backend: str
    scene: _Scene

    def variables(self) -> dict[str, str]:
        """The environment variables by which torchrun tells a worker who it is."""
        if self.nprocs == 1:
            return {}
        rank, size = str(self.rank), str(self.nprocs)
        return {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }


class _Failure(NamedTuple):
    """An exception on a worker, as it travels."""

    time: float
    pickled: bytes
    summary: str
    traceback: str

    def exception(self) -> BaseException:
        """The exception itself, or one that says the same if it cannot be had here."""
        with contextlib.suppress(EOFError, ImportError, *UNPICKLABLE):
            return pickle.loads(self.pickled)
        return RuntimeError(self.summary)


class _Reply(NamedTuple):
    """The answer of a worker; the pickled result follows it."""

    failure: _Failure | None = None
    in_world: bool = False


class _Process:
    """This process's handle of one worker."""

    def __init__(self, template: _Template) -> None:
        self.pid = 0  # until it has started
        self.end: str | None = None  # how it ended
        self.reply: _Reply | None = None
        self._body = memoryview(b"")  # the result that came with the reply
        self._inbox = bytearray()
        self._template = template
        self._channel, channel = socket.socketpair()
        status, report = os.pipe()
        os.set_blocking(status, False)
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            template.start([channel.fileno(), report, self._stacks.fileno()])
        finally:
            channel.close()
            os.close(report)

    def await_start(self) -> None:
        while not self.has_ended() and not self.pid:
            wait([self._status.fileno()])

    def has_ended(self) -> bool:
        self._read_status()
        return self.end is not None

    def is_reachable(self) -> bool:
        """Whether an idle worker can take a call: its end closes the channel before all else."""
        if self.has_ended() or self._channel.fileno() < 0:
            return False
        try:
            return self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    def is_in_world(self) -> bool:
        """Whether its last call succeeded and left the process group in place."""
        return self.is_reachable() and self.reply is not None and self.reply.in_world

    def has_failed(self) -> bool:
        return self.is_lost() or (self.reply is not None and self.reply.failure is not None)

    def is_lost(self) -> bool:
        return self.end is not None and self.reply is None

    def sources(self) -> list[Any]:
        """What to wait on for news of this worker."""
        return [self._status] + ([self._channel] if self._channel.fileno() >= 0 else [])

    def send(self, call: _Call | None, payload: bytes, fds: list[int], deadline: float) -> None:
        """Send a call; a worker that cannot take it is found out by the lack of a reply."""
        self.reply = None
        seconds = deadline - time.monotonic()
        self._channel.settimeout(None if seconds == math.inf else max(seconds, 1e-3))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            _send(self._channel, call, payload, fds)
        self._channel.settimeout(None)  # with a timeout, even MSG_DONTWAIT would wait for it

    def read(self) -> None:
        """Take in what has come: a part of the reply, or news of the end."""
        self._read_status()  # before the channel: what it sent before its end is then all there
        while self.reply is None and self._channel.fileno() >= 0:
            try:
                chunk = self._channel.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                chunk = b""
            if not chunk:  # it is about to end, or can no longer be reached
                self.hang_up()
                self.signal(signal.SIGKILL)
            self._inbox += chunk
            self._read_inbox()

    def take_result(self, rank: int) -> Any:
        body, self._body = self._body, memoryview(b"")
        try:
            return pickle.loads(body)
        except (ImportError, *UNPICKLABLE) as error:
            raise RuntimeError(f"the result of worker {rank} cannot be unpickled here") from error

    def signal(self, number: int) -> None:
        if self.pid and self.end is None:
            self._template.signal(self.pid, number)

    def stacks(self) -> str:
        """The Python stacks that it dumped on a signal, or on a crash."""
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace")

    def hang_up(self) -> None:
        """Close the channel: an idle worker then ends by itself."""
        self._channel.close()

    def release(self) -> None:
        self._channel.close()
        self._status.close()
        self._stacks.close()

    def _read_status(self) -> None:
        while self.end is None and (record := self._status.read(_STATUS.size)) is not None:
            if not record:
                self.end = "went away together with the process that starts workers"
            elif not self.pid:
                (self.pid,) = _STATUS.unpack(record)
            else:
                self.end = _describe_end(*_STATUS.unpack(record))

    def _read_inbox(self) -> None:
        if len(self._inbox) < _FRAME.size:
            return
        head, body = _FRAME.unpack_from(self._inbox)
        if len(self._inbox) == _FRAME.size + head + body:
            view = memoryview(self._inbox)[_FRAME.size :]
            self.reply, self._body = pickle.loads(view[:head]), view[head:]
            self._inbox = bytearray()


def _collect(team: Sequence[_Process], deadline: float) -> None:
    """Take in replies until all are there, the deadline, or the grace after a first failure."""
    failed = False
    while waiting := [p for p in team if p.reply is None and p.end is None]:
        if not failed and any(process.has_failed() for process in team):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return
        sources = {source: process for process in waiting for source in process.sources()}
        for source in wait(list(sources), None if seconds == math.inf else seconds):
            sources[source].read()


def _kill(processes: Iterable[_Process]) -> None:
    processes = [process for process in processes if not process.has_ended()]
    for process in processes:
        process.signal(signal.SIGKILL)
    _await_ends(processes, 5 * GRACE)


def _await_ends(processes: Sequence[_Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while waiting := [process for process in processes if not process.has_ended()]:
        statuses = [process._status.fileno() for process in waiting]
        if not wait(statuses, max(0.0, deadline - time.monotonic())):
            return


def _raise_failure(team: Sequence[_Process], name: str) -> None:
    """Raise the first failure; a lost worker counts first, for it makes the others fail."""
    lost = {rank: process for rank, process in enumerate(team) if process.is_lost()}
    failures = {rank: p.reply.failure for rank, p in enumerate(team) if p.reply and p.reply.failure}
    error: BaseException
    if lost:
        first = min(lost)
        error = WorkerLost(f"worker {first} of {len(team)} {lost[first].end} while it ran {name}")
        if stacks := lost[first].stacks():
            error.add_note(f"Stack of worker {first}:\n\n{stacks}")
    elif failures:
        first = min(failures, key=lambda rank: failures[rank].time)
        error = failures[first].exception()
        error.add_note(f"Worker {first} of {len(team)}:\n\n{failures[first].traceback}")
    else:
        return
    others = {rank: f"{process.end}" for rank, process in lost.items()}
    others |= {rank: f"failed with {failure.summary}" for rank, failure in failures.items()}
    del others[first]
    if others:
        lines = [f"worker {rank} {what}" for rank, what in sorted(others.items())]
        error.add_note("Also:\n" + "\n".join(lines))
    raise error


def _raise_timeout(team: Sequence[_Process], name: str, timeout: float | None) -> None:
    """Raise if a worker has not replied, and show where each of these is."""
    stuck = {rank: process for rank, process in enumerate(team) if process.reply is None}
    if not stuck:
        return
    _dump_stacks(list(stuck.values()))
    ranks = ", ".join(map(str, stuck))
    stacks = [f"Worker {rank}:\n{p.stacks() or 'no answer'}" for rank, p in stuck.items()]
    raise TimeoutError(
        f"{name} ran longer than its limit of {timeout} s on worker(s) {ranks} of "
        f"{len(team)}, which were ended; this is where they were\n\n" + "\n".join(stacks)
    )


def _dump_stacks(processes: Sequence[_Process]) -> None:
    """Let workers write their stacks, and wait until these are there and grow no more."""
    for process in processes:
        process.signal(DUMP_STACKS)
    before: list[str] = []
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        time.sleep(0.05)
        stacks = [process.stacks() for process in processes]
        if all(stacks) and stacks == before:
            return
        before = stacks


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes | None:
    """Function and arguments as bytes; None if a worker could not import what they name."""
    try:
        payload = pickle.dumps((fn, args))
    except UNPICKLABLE:
        return None
    main = getattr(sys.modules["__main__"], "__file__", None)
    return None if _names_main(payload) and not (main and os.path.isfile(main)) else payload


def _names_main(payload: bytes | bytearray) -> bool:
    """Whether a pickle may refer to the main module, here or (see `_import_main`) on a worker."""
    return b"__main__" in payload or b"__mp_main__" in payload


def _name(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{fn.__qualname__}" if hasattr(fn, "__qualname__") else repr(fn)


def _count(name: str, value: int) -> int:
    if not isinstance(value, SupportsIndex) or operator.index(value) < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return operator.index(value)


def _num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _loopback() -> dict[str, str]:
    """The variable that keeps Gloo to this machine, whatever its name resolves to."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _is_torchrun_variable(name: str) -> bool:
    return name.startswith("TORCHELASTIC_") or name in (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
    )


def _flush_outputs() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _describe_end(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    hint = " (as the system does when memory runs out)" if exitcode == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exitcode).name}{hint}"


# Messages: two lengths, a pickled head, and a body of bytes. File descriptors go with the lengths.
_FRAME = struct.Struct("<QQ")
# From the template: the number of a started process, then its exit code.
_STATUS = struct.Struct("<i")
# To the template: the number of a process, 0 for a new one, and the signal to send to it.
_ORDER = struct.Struct("<ii")


def _send(channel: socket.socket, head: object, body: bytes, fds: Sequence[int] = ()) -> None:
    pickled = pickle.dumps(head)
    socket.send_fds(channel, [_FRAME.pack(len(pickled), len(body))], list(fds))
    channel.sendall(pickled)
    channel.sendall(body)


def _receive(channel: socket.socket) -> tuple[Any, bytearray, list[int]] | None:
    """The next message and its file descriptors; None if the other side has gone."""
    prefix, fds = _receive_fds(channel, _FRAME.size)
    if len(prefix) < _FRAME.size:
        return None
    head, body = (_receive_bytes(channel, size) for size in _FRAME.unpack(prefix))
    return pickle.loads(head), body, fds


def _receive_fds(channel: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """A fixed number of bytes and up to three file descriptors, not to be inherited."""
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, fds, _, _ = socket.recv_fds(channel, size, 3, flags)
    return data, fds


def _receive_bytes(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise SystemExit(0)  # the other side has gone
        view = view[count:]
    return data


class _Template:
    """This process's handle of a process that forks workers."""

    def __init__(self, control: socket.socket, pid: int, poll: Callable[[], object]) -> None:
        self._control = control
        self._pid = pid
        self._poll = poll  # returns None as long as the process runs

    def is_running(self) -> bool:
        return self._poll() is None

    def start(self, fds: list[int]) -> None:
        """Fork a worker with the other ends of its channel, status pipe and file for stacks."""
        socket.send_fds(self._control, [_ORDER.pack(0, 0)], fds)

    def signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._control.send(_ORDER.pack(pid, number))

    def close(self) -> None:
        """End the template and with it its workers."""
        self._control.close()
        deadline = time.monotonic() + GRACE
        while self.is_running():
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(1e-3)


_BOOT = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "fd, *sys.path = sys.argv[1:]; from tessel.launch import _run_template; _run_template(int(fd))"
)


def _shared_template() -> _Template:
    """The template of this process, started by its first use, as long as the process lives."""
    template = _spawn_template(os.getpid())
    if not template.is_running():
        _spawn_template.cache_clear()
        template = _spawn_template(os.getpid())
    return template


@functools.lru_cache(maxsize=1)
def _spawn_template(pid: int) -> _Template:
    """A template in a new interpreter; a fork of this process has another `pid`, so its own."""
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), *map(str, sys.path)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    template = _Template(mine, process.pid, process.poll)
    atexit.register(template.close)
    return template


def _run_template(fd: int) -> None:
    gc.freeze()  # memory that the workers share is then not copied by their garbage collection
    _serve(socket.socket(fileno=fd))


def _fork_template(call: Callable[[], object]) -> _Template:
    """A template forked from this process, whose workers know `call` by heritage."""
    if dist.is_initialized() or torch.cuda.is_initialized():
        raise RuntimeError(
            "this function or one of its arguments cannot be imported by the workers, and this "
            "process cannot be forked instead, as it uses torch.distributed or CUDA already: "
            "define the function at the top level of a module"
        )
    mine, theirs = socket.socketpair()
    _flush_outputs()
    pid = _fork()
    if pid == 0:
        mine.close()
        _exit_after(functools.partial(_serve, theirs, call))
    theirs.close()
    return _Template(mine, pid, functools.partial(_poll_child, pid))


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of the threads that the child will lack: see `_work`.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _poll_child(pid: int) -> int | None:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if ended else None


def _exit_after(body: Callable[[], object]) -> NoReturn:
    """Run the rest of a forked process, which must not return to the code of its parent."""
    code = 1
    try:
        body()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            _flush_outputs()
        os._exit(code)


def _serve(control: socket.socket, call: Callable[[], object] | None = None) -> None:
    """Run a template: fork and signal workers as told, report their ends, end them at the end."""
    children: dict[int, int] = {}  # pid: where to report its end
    parent = os.getppid()
    bell, ringer = socket.socketpair()
    ringer.setblocking(False)
    signal.signal(signal.SIGINT, _ignore)  # Ctrl-C is for the parent, which then ends the workers
    signal.signal(signal.SIGCHLD, _ignore)
    signal.set_wakeup_fd(ringer.fileno())
    with control, bell, ringer:
        while os.getppid() == parent:
            ready = wait([control, bell], timeout=1.0)
            if bell in ready:
                bell.recv(4096)
            _report_ends(children)
            if control in ready:
                order, fds = _receive_fds(control, _ORDER.size)
                if not order:
                    break
                pid, number = _ORDER.unpack(order)
                if pid in children:
                    os.kill(pid, number)
                elif pid == 0:
                    _fork_worker(fds, children, [control, bell, ringer], call)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """A signal handler that, unlike SIG_IGN, is not passed on to programs that a worker starts."""


def _report_ends(children: dict[int, int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            report = children.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(report, _STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(report)


def _fork_worker(
    fds: Sequence[int],
    children: dict[int, int],
    sockets: Sequence[socket.socket],
    call: Callable[[], object] | None,
) -> None:
    channel, report, stacks = fds
    template = os.getpid()
    pid = _fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for owned in sockets:
            owned.close()
        for other in (report, *children.values()):
            os.close(other)
        _die_with(template)
        _exit_after(functools.partial(_work, socket.socket(fileno=channel), stacks, call))
    os.close(channel)
    os.close(stacks)
    children[pid] = report
    with contextlib.suppress(BrokenPipeError):
        os.write(report, _STATUS.pack(pid))


def _die_with(parent: int) -> None:
    """Have the system end this process when its parent ends, where it can."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _work(channel: socket.socket, stacks: int, call: Callable[[], object] | None) -> None:
    """Run a worker: answer calls until the other side hangs up."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_STACKS, stacks)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)  # lines stay whole
    if call is None:
        _reseed_numpy()
        _answer_calls(channel, None)
    else:
        # OpenMP's threads did not survive the fork, and the thread that forked would wait for
        # them forever. A new thread gets new ones.
        ThreadPoolExecutor(1).submit(_answer_calls, channel, call).result()


def _reseed_numpy() -> None:
    """Give each worker its own random state, as processes have that do not come from a fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _answer_calls(channel: socket.socket, inherited: Callable[[], object] | None) -> None:
    known = dict(os.environ)
    while message := _receive(channel):
        reply, body = _answer(*message, known, inherited)
        _flush_outputs()
        with contextlib.suppress(BrokenPipeError):
            _send(channel, reply, body)


def _answer(
    call: _Call | None,
    payload: bytearray,
    fds: list[int],
    known: dict[str, str],
    inherited: Callable[[], object] | None,
) -> tuple[_Reply, bytes]:
    """Make a call, or leave the world if there is none."""
    try:
        if call is None:
            if dist.is_initialized():
                dist.destroy_process_group()
            return _Reply(), b""
        _redirect_outputs(fds)
        call.scene.enter(known, call.variables())
        if call.fresh and call.nprocs > 1:
            _join_world(call, fds[len(OUTPUTS) :])
        result = (inherited or _unpickle_call(payload, call.scene))()
        body = _pickle_result(call.rank, result)
        return _Reply(in_world=dist.is_initialized() == (call.nprocs > 1)), body
    except SystemExit:
        raise
    except BaseException as error:
        return _Reply(_describe_failure(error)), b""


def _redirect_outputs(fds: Sequence[int]) -> None:
    for output, fd in zip(OUTPUTS, fds, strict=False):
        os.dup2(fd, output)
        os.close(fd)


def _follow(known: dict[str, str], environ: dict[str, str]) -> None:
    """Make the changes from `known` to `environ`, and leave what the worker has set itself."""
    for name in known.keys() - environ.keys():
        os.environ.pop(name, None)
    for name, value in environ.items():
        if known.get(name) != value:
            os.environ[name] = value
    known.clear()
    known.update(environ)


def _join_world(call: _Call, listener: Sequence[int]) -> None:
    serve: dict[str, Any] = {"is_master": True, "master_listen_fd": listener[0]} if listener else {}
    store = dist.TCPStore("127.0.0.1", call.port, call.nprocs, wait_for_workers=False, **serve)
    dist.init_process_group(call.backend, store=store, rank=call.rank, world_size=call.nprocs)


def _unpickle_call(payload: bytearray, scene: _Scene) -> Callable[[], object]:
    try:
        if _names_main(payload):
            _import_main(*scene.main)
        fn, args = pickle.loads(payload)
    except (ImportError, AttributeError) as error:
        error.add_note("The worker cannot import the function it was told to run.")
        raise
    return functools.partial(fn, *args)


_importing_main: contextvars.ContextVar[str] = contextvars.ContextVar("importing_main")


def _import_main(path: str | None, package: str | None) -> None:
    """Make the caller's script this process's main module, as `multiprocessing` does.

    It runs under the name `__mp_main__`, so that what it guards by its name is left out.
    """
    previous = sys.modules["__main__"]
    if path is None or getattr(previous, "__file__", None) == path:
        return
    module = types.ModuleType("__mp_main__")
    module.__file__, module.__package__ = path, package
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    token = _importing_main.set(path)
    try:
        importlib.machinery.SourceFileLoader("__mp_main__", path).exec_module(module)
    except BaseException:
        sys.modules["__main__"] = previous
        raise
    finally:
        _importing_main.reset(token)


def _forbid_while_importing_main() -> None:
    if path := _importing_main.get(None):
        raise RuntimeError(
            f"a worker imports {path} to find the function that it shall run, and that starts "
            f"workers again; start them only where the file is run as a script:\n\n"
            f'    if __name__ == "__main__":\n'
            f"        tessel.launch(...)\n"
        )


def _pickle_result(rank: int, result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except UNPICKLABLE as error:
        raise TypeError(
            f"the result of worker {rank}, of type {type(result).__name__}, cannot be pickled: "
            f"{error}; return tensors, numbers, or containers of these"
        ) from error


def _describe_failure(error: BaseException) -> _Failure:
    when = time.monotonic()
    summary = "".join(traceback.format_exception_only(error)).strip()
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    return _Failure(when, _pickle_exception(error), summary, "".join(lines))


def _pickle_exception(error: BaseException) -> bytes:
    """The exception as bytes, empty if it would not be the same on the other side."""
    try:
        pickled = pickle.dumps(error)
        return pickled if type(pickle.loads(pickled)) is type(error) else b""
    except Exception:  # an exception's own code may raise anything here
        return b""
