"""MPI: CPU tensors between hosts, by mpi4py and the MPI library that the site has tuned.

Workers of one host share memory as usual. No call of MPI waits: messages are started, and tested
until they are complete, so that a worker can check the alarm and the clock meanwhile.
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

CHUNK = 2**30  # largest message in bytes: MPI counts them in 32 bits
SHORTEST_NAP, LONGEST_NAP, NAPS_NOTED = 2e-5, 2e-4, 100  # seconds; naps between checks
BUILT_WITH_ANOTHER = (
    "build mpi4py with the MPI library of mpirun: pip install --force-reinstall --no-binary mpi4py "
    "mpi4py; or let its wheel take that library: MPI4PY_MPIABI=openmpi or mpich"
)
WAY_OUT = "TESSEL_TRANSPORT=shared sends by Gloo between hosts"


@encodable
@dataclass(frozen=True)
class MpiState:
    """The state of MPI on one worker.

    Attributes:
        problem: why it cannot be used there; empty if it can.
        rank, size: the rank of the worker among all processes of MPI, and their number.
        library: its name and version, and the version of mpi4py.
    """

    problem: str = ""
    rank: int = 0
    size: int = 1
    library: str = ""


def why_not(environ: Mapping[str, str], rank: int, workers: int, is_asked_for: bool) -> str:
    """Why MPI cannot be used here, as far as known before it is started; empty if it can.

    Args:
        environ: the variables of this process.
        rank: the rank of this worker.
        workers: the number of workers.
        is_asked_for: whether the user has chosen MPI; else only mpirun's own processes use it.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py, built with the site's MPI library)"
    if _is_running():
        return ""
    try:
        launcher = find_launcher(environ)
    except ValueError as error:  # not raised before if torchrun's variables are set
        return str(error)
    if launcher is None or not (launcher.is_mpirun or is_asked_for):
        return "this process was not started by mpirun"
    if not any(environ.get(name) for name in launcher.server):
        return f"the variables of {launcher.command} are set, but it has not started this process"
    if task_of(environ, launcher) != (rank, workers):
        return f"worker {rank} of {workers} is another task of {launcher.command}"
    return ""


def _is_running() -> bool:
    """Whether this process has started MPI, such as by importing mpi4py.MPI."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def load() -> str:
    """Load the MPI library without starting it; return why that cannot be done, if so.

    MPI waits for all of its processes while it starts, also for those that cannot load it.
    """
    rc = importlib.import_module("mpi4py").rc
    before = rc.initialize, rc.finalize
    try:
        rc.initialize, rc.finalize = False, True if rc.finalize is None else rc.finalize
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # mpi4py is built with another library
        return f"MPI cannot be loaded: {error} ({BUILT_WITH_ANOTHER})"
    finally:
        rc.initialize, rc.finalize = before
    return ""


def start() -> MpiState:
    """Start MPI, unless this process already has; all workers do so together."""
    MPI, rc = _mpi(), sys.modules["mpi4py"].rc
    try:
        if MPI.Is_finalized():
            return MpiState("MPI has been finalized")
        if not MPI.Is_initialized():
            level = rc.thread_level.upper() if rc.threads else "SINGLE"
            MPI.Init_thread(getattr(MPI, f"THREAD_{level}"))
    except RuntimeError as error:
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
    """Why workers cannot use MPI together; empty if they can. All workers get the same answer."""
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
        tensor: the tensor that is sent or filled, kept alive until the message is complete.
        requests: the requests of MPI, one for each chunk.
        sizes: the sizes of chunks to be received, in bytes.
    """

    key: Key
    worker: int
    tensor: Tensor
    requests: list[Any]
    sizes: tuple[int, ...] = ()
    is_done: bool = False
    num_done: int = field(default=0)

    def test(self, statuses: Callable[[], Any]) -> bool:
        """Return whether the message is complete, or a chunk was completed by this call."""
        moved = False
        while self.num_done < len(self.requests):
            status = statuses()
            if not self.requests[self.num_done].Test(status):
                return moved
            # for a longer one MPI raises
            if self.sizes and status.Get_elements(_mpi().BYTE) != self.sizes[self.num_done]:
                raise OutOfStep(self.key, self.key, "a message does not have the expected length")
            self.num_done += 1
            moved = True
        self.is_done = True
        return True


def _mpi() -> Any:
    return sys.modules["mpi4py.MPI"]


_communicator: Any = None  # Tessel's own, which no other code that uses MPI shares
_abandoned: list[_Message] = []  # messages of jobs that were left: MPI may still write to them


class Mpi:
    """The messages of this worker to workers of other hosts.

    Args:
        ranks: the ranks of all workers among the processes of MPI.
        salt: a number that is unique to this job, so that messages of others are not mistaken.
        watch: watches over waits.
        host: the workers with which this one shares memory, if any.
        library: the name and version of the MPI library.
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
        if _communicator is None:  # all workers make it together
            own, request = MPI.COMM_WORLD.Idup()
            message = _Message((0, 0), 0, torch.empty(0, device="cpu"), [request])
            self._pending.append(message)
            self.wait(message, (0, 0), ())
            _communicator = own

    @property
    def is_busy(self) -> bool:
        """Whether messages are in transit, which progress only when this worker tests them."""
        return bool(self._pending)

    def send(self, buffer: SendBuffer, key: Key, tag: int) -> Callable[[], None]:
        """Start a message; return a function that waits until it has been sent."""
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
        """Request a message, in its place if possible; return a function that waits for it."""
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
        """The tag of a message: its number, with an offset for the job and the group.

        So tags within a group differ until MPI runs out of tags, and those of different groups most
        likely do.
        """
        is_agreement = tag == AGREEMENT
        begin = zlib.crc32(f"{self._salt} {key[0]} {is_agreement}".encode())
        return (begin + tag * (not is_agreement)) % (self._most_tags + 1)

    def progress(self) -> bool:
        """Test all messages in transit; return whether there was progress."""
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
        """Wait until a message is complete; others progress meanwhile, also those in memory."""
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
                if needs:  # tell the watch
                    wait = wait or self._watch.begin(key, needs)
                    wait.beats += 1
        finally:
            if wait is not None:
                self._watch.finish(wait)

    def leave(self) -> None:
        """Give up messages in transit. Their memory is kept: MPI may still write to it."""
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
    """End all processes of MPI: one that waited for the others to finalize would wait forever."""
    if _is_running() and _communicator is not None:
        _communicator.Abort(1)
