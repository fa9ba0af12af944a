"""MPI: CPU tensors between hosts, by mpi4py, over the network as the site has tuned its library.

Workers of one host share memory as ever. No call of MPI waits: messages are started, and tested for
until they are complete, so that a worker can look at the alarm and at the clock meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tessel.encoding import encodable
from tessel.errors import WorkerLost
from tessel.limits import seconds_to_wait
from tessel.machine import usable_cores
from tessel.transport.backoff import SPINS_FOR_HOSTS, YIELDS
from tessel.transport.buffers import ReceiveBuffer, SendBuffer
from tessel.transport.host import Host
from tessel.transport.launchers import find_launcher, task_of
from tessel.transport.process import check_not_forked
from tessel.transport.request import Key, OutOfStep
from tessel.transport.watch import Watch
from tessel.transport.wire import AGREEMENT, as_bytes, packed, staged_for

CHUNK = 2**30  # bytes of a message at most: MPI counts them in 32 bits
SHORTEST_NAP, LONGEST_NAP, NAPS_NOTED = 2e-5, 2e-4, 100  # seconds; after how many the watch hears
WAY_OUT = "TESSEL_TRANSPORT=shared sends by Gloo between hosts"


@encodable
@dataclass(frozen=True)
class MpiState:
    """What MPI is on one worker.

    Attributes:
        problem: why it cannot be used there; empty if it can.
        rank, size: of the worker among all processes of MPI.
        library: its name and version, and that of mpi4py.
    """

    problem: str = ""
    rank: int = 0
    size: int = 1
    library: str = ""


def why_not(environ: Mapping[str, str], rank: int, workers: int, is_asked_for: bool) -> str:
    """Why MPI cannot be used here, as far as is known before it is started; empty if it can.

    Args:
        environ: the variables of this process.
        rank: of this worker.
        workers: how many there are.
        is_asked_for: whether the user has chosen it; else only mpirun's own processes use it.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py, built with the site's MPI library)"
    if _is_running():
        return ""
    try:
        launcher = find_launcher(environ)
    except ValueError as error:  # which torchrun's variables make nobody look at
        return str(error)
    if launcher is None or not (launcher.is_mpirun or is_asked_for):
        return "this process was not started by mpirun"
    if not any(environ.get(name) for name in launcher.server):
        return f"the variables of {launcher.command} are set, but it has not started this process"
    if task_of(environ, launcher) != (rank, workers):
        return f"worker {rank} of {workers} is another task of {launcher.command}"
    return ""


def _is_running() -> bool:
    """Whether this process has started MPI, say by importing mpi4py.MPI."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def start() -> MpiState:
    """Start MPI, unless this process has; all workers do so together."""
    try:
        MPI: Any = importlib.import_module("mpi4py.MPI")
        if MPI.Is_finalized():
            return MpiState("MPI has been finalized")
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    except (ImportError, RuntimeError) as error:  # another library, or a broken installation
        return MpiState(f"MPI does not start: {error}")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        return MpiState(
            "MPI was started for one thread, and Tessel sends from several, one at a time: set "
            'mpi4py.rc.thread_level = "serialized" or "multiple" before mpi4py.MPI is imported'
        )
    library = " ".join(MPI.Get_library_version().replace("\0", "").split()[:3]).rstrip(",")
    version = importlib.import_module("mpi4py").__version__
    world = MPI.COMM_WORLD
    return MpiState("", world.Get_rank(), world.Get_size(), f"{library}, mpi4py {version}")


def problem_of(states: Sequence[MpiState]) -> str:
    """Why workers cannot use MPI together; empty if they can. The same for all of them."""
    for worker, state in enumerate(states):
        if state.problem:
            return f"worker {worker}: {state.problem}"
        if state.library != states[0].library:
            return f"worker 0 has {states[0].library}, worker {worker} has {state.library}"
    if sorted(state.rank for state in states) != list(range(states[0].size)):
        sizes = sorted({state.size for state in states})
        return f"the job has {len(states)} workers, and MPI has {sizes} processes"
    return ""


@dataclass(eq=False)
class _Message:
    """A message, in chunks.

    Attributes:
        tensor: that is sent, or filled: alive until the message is complete.
        requests: of MPI, one for each chunk.
        sizes: of chunks that are to come, in bytes.
    """

    key: Key
    worker: int
    tensor: Tensor
    requests: list[Any]
    sizes: tuple[int, ...] = ()
    is_done: bool = False
    num_done: int = field(default=0)

    def test(self, statuses: Callable[[], Any]) -> bool:
        """Whether it is complete, or a chunk of it was completed now."""
        moved = False
        while self.num_done < len(self.requests):
            status = statuses()
            if not self.requests[self.num_done].Test(status):
                return moved
            # one that is longer is an error of MPI's
            if self.sizes and status.Get_elements(_mpi().BYTE) != self.sizes[self.num_done]:
                raise OutOfStep(self.key, self.key, "a message has another length than expected")
            self.num_done += 1
            moved = True
        self.is_done = True
        return True


def _mpi() -> Any:
    return sys.modules["mpi4py.MPI"]


_communicator: Any = None  # of this process, which other code that uses MPI does not send by
_abandoned: list[_Message] = []  # of jobs that were left: MPI may still write to their memory


class Mpi:
    """The messages of this worker to others, between hosts.

    Args:
        ranks: of all workers among the processes of MPI.
        salt: a number that only this job has, so that no message of another is taken for its own.
        watch: over waits.
        host: those with whom this worker shares memory, if any.
        library: its name and version.
    """

    def __init__(
        self, ranks: Sequence[int], salt: int, watch: Watch, host: Host | None, library: str
    ) -> None:
        MPI = _mpi()
        self.library = library
        self._ranks, self._salt, self._watch, self._host = tuple(ranks), salt, watch, host
        self._lock = threading.Lock()
        self._pending: list[_Message] = []
        self._owner = os.getpid()
        workers = 1 if host is None else len(host.workers)
        self._spins = SPINS_FOR_HOSTS if workers <= usable_cores() else 0
        self._limit = seconds_to_wait()
        self._most_tags = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
        global _communicator
        if _communicator is None:  # all workers make one of our own
            own, request = MPI.COMM_WORLD.Idup()
            message = _Message((0, 0), 0, torch.empty(0, device="cpu"), [request])
            self._pending.append(message)
            self.wait(message, (0, 0), ())
            _communicator = own

    @property
    def is_busy(self) -> bool:
        """Whether messages are under way, which make progress only when this worker looks."""
        return bool(self._pending)

    def send(self, buffer: SendBuffer, key: Key, tag: int) -> Callable[[], None]:
        """Start a message; what waits until it has left."""
        self._check_owner()
        tensor, peer = packed(buffer.tensor), self._ranks[buffer.worker]
        values, tag = as_bytes(tensor).numpy(), self._tag(key, tag)
        with self._lock:
            requests = [
                _communicator.Isend([values[start : start + CHUNK], _mpi().BYTE], peer, tag)
                for start in range(0, max(1, len(values)), CHUNK)
            ]
            message = _Message(key, buffer.worker, tensor, requests)
            self._pending.append(message)
        return lambda: self.wait(message, key, (buffer.worker,))

    def receive(self, buffer: ReceiveBuffer, key: Key, tag: int) -> Callable[[], None]:
        """Ask for a message, in its place if that is possible; what waits until it is there."""
        self._check_owner()
        staged, peer = staged_for(buffer), self._ranks[buffer.worker]
        values, tag = as_bytes(staged).numpy(), self._tag(key, tag)
        starts = range(0, max(1, len(values)), CHUNK)
        with self._lock:
            requests = [
                _communicator.Irecv([values[start : start + CHUNK], _mpi().BYTE], peer, tag)
                for start in starts
            ]
            sizes = tuple(min(CHUNK, len(values) - start) for start in starts)
            message = _Message(key, buffer.worker, staged, requests, sizes)
            self._pending.append(message)

        def wait() -> None:
            self.wait(message, key, (buffer.worker,))
            if staged is not buffer.place:
                buffer.put(staged)

        return wait

    def _tag(self, key: Key, tag: int) -> int:
        """What a message carries: its number, from where the tags of the job and group begin.

        So those of a group differ for as long as MPI has tags, and those of others most likely.
        """
        is_agreement = tag == AGREEMENT
        begin = zlib.crc32(f"{self._salt} {key[0]} {is_agreement}".encode())
        return (begin + tag * (not is_agreement)) % (self._most_tags + 1)

    def progress(self) -> bool:
        """Test all messages that are under way; whether there was progress."""
        if not self._pending:
            return False
        moved = False
        with self._lock:
            try:
                for message in list(self._pending):
                    moved = message.test(_mpi().Status) or moved
                    if message.is_done:
                        self._pending.remove(message)
            except _mpi().Exception as error:
                raise RuntimeError(f"MPI has lost a connection: {error}") from error
        return moved

    def wait(self, message: _Message, key: Key, needs: tuple[int, ...]) -> None:
        """Until a message is complete; others go on meanwhile, and those in memory, too."""
        looks, nap, naps, since, wait = 0, SHORTEST_NAP, 0, 0.0, None
        try:
            while not message.is_done:
                if self.progress() or (self._host is not None and self._host.push_held()):
                    looks, nap, since = 0, SHORTEST_NAP, 0.0
                    continue
                looks += 1
                if looks <= self._spins:
                    continue
                since = since or time.monotonic()
                if looks <= self._spins + YIELDS:
                    os.sched_yield()
                    continue
                time.sleep(nap)
                nap, naps = min(2 * nap, LONGEST_NAP), naps + 1
                if naps % NAPS_NOTED:
                    continue
                self._watch.check()
                if self._host is not None:
                    self._host.check_alive((), self._host.workers, 0.0)
                if (seconds := time.monotonic() - since) > self._limit:
                    names = ", ".join(map(str, needs)) or "others"
                    raise WorkerLost(
                        f"worker {self._watch.worker} lost contact with worker {names} during a "
                        f"movement: timed out, silent for {seconds:.0f} s"
                    )
                if needs:  # the watch is to know of it
                    wait = wait or self._watch.begin(key, needs)
                    wait.beats += 1
        finally:
            if wait is not None:
                self._watch.finish(wait)

    def leave(self) -> None:
        """Give up what is under way. Its memory is kept: MPI may still write to it."""
        with self._lock:
            for message in self._pending:
                with contextlib.suppress(RuntimeError):
                    for request in message.requests[message.num_done :]:
                        if message.sizes:
                            request.Cancel()
                _abandoned.append(message)
            self._pending.clear()

    def _check_owner(self) -> None:
        check_not_forked(self._owner, self._watch.worker)


def abort() -> None:
    """End all processes of MPI: one that waits for them to finalize would wait for ever."""
    if _is_running() and _communicator is not None:
        _communicator.Abort(1)
