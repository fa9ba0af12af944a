"""The job of this process: its groups, made in one agreed order and kept."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch.distributed as dist

from tessel import endings
from tessel.limits import seconds_to_wait, time_limit
from tessel.machine import keep_freed_memory
from tessel.settings import chosen, text
from tessel.transport import mpi, semaphore, wire, world
from tessel.transport.board import StoreBoard
from tessel.transport.group import NUM_WORDS, Group, Membership, code_of, listing
from tessel.transport.host import Host
from tessel.transport.links import MOST_HOSTS, Links
from tessel.transport.process import PeerProcess
from tessel.transport.traffic import Traffic
from tessel.transport.world import CAN_BE_DISTRIBUTED, is_distributed, num_workers, this_worker

F = TypeVar("F", bound=Callable[..., Any])
TRANSPORTS = ("auto", "shared", "gloo", "mpi")
TRANSPORT = "TESSEL_TRANSPORT"
CHECK = "TESSEL_CHECK"


def start(backend: str | None = None) -> bool:
    """Join the job that the launcher's environment describes, unless already joined.

    Args:
        backend: "gloo" or "nccl" if it is joined now; None for the one that fits the devices.

    Returns:
        Whether it was joined by this call.
    """
    keep_memory()
    joins = world.join(backend)
    if joins:
        atexit.unregister(_leave_at_exit)  # once, however often jobs are joined
        atexit.register(_leave_at_exit)  # a process that ends with open groups aborts
    return joins


# Once in a process, so that settings that its user makes afterwards stay.
keep_memory = functools.cache(keep_freed_memory)


def _leave_at_exit() -> None:
    error = getattr(sys, "last_value", None)  # the exception that ended the program, if any
    if _current is not None and _current.membership.mpi is not None:
        watch = _current.membership.watch
        if watch.alarm[0]:
            # MPI waits for all processes before the first may end: forever, if one is stopped.
            limit = seconds_to_wait()
            _end_program(error)
            if not watch.have_all_ended(limit):
                mpi.abort()
    leave(error)


def leave(error: BaseException | None = None) -> None:
    """Leave the job: destroy its groups, and forget them, so that their threads can end.

    Others that wait for this worker are told of the error that makes it leave.
    """
    global _current
    if _current is not None:
        _end_program(error)
        _current.end()
        _current = None
    if is_distributed():
        dist.destroy_process_group()
    gc.collect()


def total_traffic() -> Traffic:
    """The running totals of this worker until now."""
    return _job().membership.total_traffic


def look_for_job() -> None:
    """Notice a new job: whatever was kept in the last one is dropped."""
    _job()


def hosts() -> tuple[int, ...]:
    """The number of its host for each worker of the job; empty if all run on one."""
    return _job().membership.hosts


def shares_memory() -> bool:
    """Whether this worker exchanges tensors with another of its host through shared memory."""
    return _job().membership.host is not None


class Tagged:  # a generator would take 2 µs more in each backward pass
    """Let messages carry the number of a call: they match only messages of the same call."""

    __slots__ = ("_before", "_call", "_own")

    def __init__(self, call: int) -> None:
        self._own, self._call = _job().membership.own, call

    def __enter__(self) -> None:
        self._before, self._own.tag = self._own.tag, self._call

    def __exit__(self, *_: object) -> None:
        self._own.tag = self._before


def kept_in_job(function: F) -> F:
    """Cache the results of a function until this process starts or leaves a job.

    For results that depend on the rank of this worker or hold groups: both end with the job.
    """
    remembering = functools.lru_cache(maxsize=4096)(function)
    _memories.append(remembering.cache_clear)
    return cast(F, remembering)


_memories: list[Callable[[], None]] = []


def when_joined(listener: Callable[[], None]) -> None:
    """Call a function whenever this process joins a job, on all workers before data is sent."""
    _listeners.append(listener)


_listeners: list[Callable[[], None]] = []


def group_of(workers: Iterable[int]) -> Group:
    """The group of these workers; made by all workers of the job together the first time."""
    ranks = tuple(sorted(workers))
    if ranks[0] < 0:
        why = f"workers {ranks} are placeholders and cannot communicate"
        return cast(Group, Unreachable(why, ranks))
    return _job().group(ranks)


def chosen_transport() -> str:
    """How workers exchange CPU tensors, by TESSEL_TRANSPORT.

    Within a host by shared memory, unless it is "gloo". Between hosts by MPI if it is "mpi", by
    Gloo if it is "shared"; "auto" uses MPI if mpirun has started all workers and mpi4py is
    installed.
    """
    return chosen(TRANSPORT, TRANSPORTS)


def between_hosts() -> str:
    """How CPU tensors are sent to other hosts, or would be before groups are made, and why."""
    job = _job()
    if job.membership.mpi is not None:
        return f"MPI ({job.membership.mpi.library})"
    if job.membership.processes:  # all workers have decided
        return f"Gloo: {job.why_gloo}" if job.why_gloo else "Gloo"
    choice = chosen_transport()
    if choice in ("shared", "gloo"):
        return f"Gloo, as {TRANSPORT} says"
    problem = mpi.why_not(os.environ, *world.launched_task(), choice == "mpi")
    return f"Gloo: {problem}" if problem else "MPI, if all workers have the same"


def between_gpus() -> str:
    """How tensors of GPUs are sent between workers of this host, judging by those sent so far."""
    membership = _job().membership
    if world.is_distributed() and wire.moves_on_device(_job().default):
        return "NCCL"
    return "CUDA IPC" if membership.mailboxes.are_used else "pinned memory"


def checks_calls() -> bool:
    """Whether workers compare their calls at each torch function, by TESSEL_CHECK."""
    return chosen(CHECK, ("0", "1")) == "1"


def can_share_memory() -> bool:
    """Whether this system supports shared memory; else tensors are sent over Gloo."""
    return semaphore.are_available() and hasattr(os, "memfd_create")


LEFT = (
    "they belong to a job that this process has left, as at the end of the DistributedContext that "
    "joined it; use what was created in a job before the job ends"
)


def _cut_off(group: Group) -> None:
    """Remove the transports of a group, so that threads of the process group can end."""
    group.handle = None
    group.__dict__["_ways"] = Unreachable()


@dataclass(frozen=True)
class Unreachable:
    """Replaces a group or its transports: every use raises and says why nobody is reached.

    Movements can still be planned for placeholder workers, which have negative ranks.
    """

    why: str = f"these workers cannot be reached: {LEFT}"
    workers: tuple[int, ...] = ()
    num_calls: ClassVar[int] = 0

    @property
    def size(self) -> int:
        return len(self.workers)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self.why)


@dataclass
class _Job:
    """One group for each set of workers."""

    default: Any
    membership: Membership = field(default_factory=Membership)
    groups: dict[tuple[int, ...], Group] = field(default_factory=dict)
    why_gloo: str = ""  # why Gloo is used between hosts, and not MPI

    def group(self, workers: tuple[int, ...]) -> Group:
        if workers not in self.groups:
            made = Group(workers, self._handle(workers), self.membership)
            for other in self.groups.values():
                if {*workers} < {*other.workers}:
                    other.within.append(made)
                elif {*other.workers} < {*workers}:
                    made.within.append(other)
            self.groups[workers] = made
        return self.groups[workers]

    def end(self) -> None:
        self.membership.mailboxes.wait_until_read()
        self.membership.watch.end()
        if isinstance(self.membership.mpi, mpi.Mpi):
            self.membership.mpi.leave()
        if self.membership.links is not None:
            self.membership.links.close()
        if self.membership.host is not None:
            self.membership.host.leave()
            self.membership.host = cast(Host, Unreachable())
        for group in self.groups.values():
            _cut_off(group)

    def _handle(self, workers: tuple[int, ...]) -> Any:
        if len(workers) == 1:
            return None
        everyone = tuple(range(num_workers()))
        if max(workers) >= len(everyone):
            raise RuntimeError(f"workers {listing(workers)}: {LEFT}")
        if workers == everyone:
            self._introduce()
            return self.default
        # All workers of the job make a group together: if they made different ones, each would wait
        # for messages that nobody sends.
        job_group = self.group(everyone)
        call = f"for a partition of workers {listing(workers)}"
        said = np.frombuffer(job_group.share_words([code_of(call)]), np.int64)
        job_group.check_same_call(said[::NUM_WORDS], call)
        handle = job_group.attempt_by_wire(
            lambda: dist.new_group(list(workers), timeout=time_limit())
        )
        return handle if this_worker() in workers else None

    def _introduce(self) -> None:
        """Get to know the process of every worker, and open the memory of those on this host."""
        everyone = tuple(range(num_workers()))
        job_group = Group(everyone, self.default, self.membership)
        watch = self.membership.watch
        watch.attach(this_worker(), everyone, StoreBoard(this_worker(), _store()))
        choice = chosen_transport()
        task = this_worker(), num_workers()
        problem = mpi.why_not(os.environ, *task, choice == "mpi") if choice != "gloo" else ""
        said = job_group.share_objects(
            (PeerProcess.this(), text(CHECK) or "0", choice, problem, secrets.randbits(62))
        )
        for number, (_, check, theirs, _, _) in enumerate(said):
            for name, first, value in ((CHECK, said[0][1], check), (TRANSPORT, said[0][2], theirs)):
                # some may be set to use no shared memory: then nobody does
                if value != first and (name == CHECK or "mpi" in (first, value)):
                    raise ValueError(
                        f"{name} must be the same on all workers: it is {first!r} on worker 0 "
                        f"and {value!r} on worker {number}"
                    )
        checks_calls()  # raises, on all workers, if the value is invalid
        self.membership.processes = [process for process, *_ in said]
        names = [process.host for process, *_ in said]
        first = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self.membership.hosts = tuple(first[name] for name in names) if len(first) > 1 else ()
        if all(each[2] != "gloo" for each in said):
            self.membership.host = host = _connected(job_group, self.membership.processes)
            if host is not None:
                host.watch = watch
                if self.membership.hosts:
                    host.spin_less()
                if host.workers == everyone:  # a board in memory needs no store
                    watch.attach(this_worker(), everyone, host.board, host.board.alarm)
        problem = next((f"worker {w}: {each[3]}" for w, each in enumerate(said) if each[3]), "")
        if choice == "mpi" and problem:
            raise RuntimeError(f"{TRANSPORT} is mpi, but {problem}; {mpi.WAY_OUT}")
        self.why_gloo = problem
        if self.membership.hosts and {each[2] for each in said} in ({"auto"}, {"mpi"}):
            if not problem:
                self._use_mpi(job_group, said[0][4], is_asked_for=choice == "mpi")
        elif {each[2] for each in said} != {"auto"}:
            self.why_gloo = f"as {TRANSPORT} says"
        if self.membership.hosts and self.membership.mpi is None:
            self._link(job_group)
        _cut_off(job_group)  # it refers to itself, and would keep the process group alive for long
        for each in _listeners:
            each()

    def _link(self, job_group: Group) -> None:
        """Link the first workers of all hosts, for agreements, if all can be reached."""
        hosts, worker = self.membership.hosts, this_worker()
        firsts = [hosts.index(number) for number in sorted({*hosts})]
        if len(firsts) > MOST_HOSTS or wire.control_device(self.default).type != "cpu":
            return  # the same on all workers
        links = None
        with contextlib.suppress(OSError):
            links = Links(worker) if worker in firsts else None
        addresses = job_group.share_objects(None if links is None else links.address)
        are_there, is_linked = all(addresses[first] is not None for first in firsts), True
        if are_there and links is not None:
            try:
                links.connect({w: tuple(addresses[w]) for w in firsts if w != worker})
            except OSError:
                is_linked = False
        if are_there and all(job_group.share_objects(is_linked)):
            self.membership.linked, self.membership.links = frozenset(firsts), links
        elif links is not None:
            links.close()

    def _use_mpi(self, job_group: Group, salt: int, is_asked_for: bool) -> None:
        """Use MPI between hosts, if all workers can."""
        membership, states = self.membership, [mpi.MpiState()]
        problems = job_group.share_objects(mpi.load())
        problem = next((f"worker {w}: {each}" for w, each in enumerate(problems) if each), "")
        if not problem:
            states = job_group.share_objects(mpi.start())
            problem = mpi.problem_of(states)
        if not problem:
            ranks = [state.rank for state in states]
            given = ranks, salt, membership.watch, membership.host, states[0].library
            membership.mpi = carrier = job_group.attempt(lambda: mpi.Mpi(*given))
            if membership.host is not None:
                membership.host.far = carrier
        elif is_asked_for:
            raise RuntimeError(f"{TRANSPORT} is mpi, but {problem}; {mpi.WAY_OUT}")
        elif this_worker() == 0:
            warnings.warn(
                f"tensors are sent over Gloo between hosts, not MPI: {problem}; "
                f"{TRANSPORT}=shared selects it",
                stacklevel=2,
            )
        self.why_gloo = problem


def _connected(job_group: Group, processes: list[PeerProcess]) -> Host | None:
    """Connect the workers of this host, if all of them can share memory; else return None."""
    worker = this_worker()
    here = [w for w, process in enumerate(processes) if process.host == processes[worker].host]
    host, failure = None, ""
    try:
        if not can_share_memory():
            raise OSError("this system has no memory files or no semaphores in shared memory")
        host = Host(here, worker)
    except OSError as error:
        failure = str(error)
    addresses = job_group.share_objects(None if host is None else host.address)
    try:
        if host is not None and all(addresses[w] is not None for w in here):
            host.connect({w: addresses[w] for w in here}, {w: processes[w] for w in here})
    except OSError as error:
        failure = str(error)
    reads = host is not None and not failure and host.can_read({w: addresses[w] for w in here})
    said = job_group.share_objects((failure, reads))
    failures = [each for each, _ in said]
    if host is not None:
        host.hide()
        if all(said[w][1] for w in here):
            host.read_directly()
    failure = next((failures[w] for w in here if failures[w]), "")
    if failure and len(here) > 1 and worker == here[0]:
        warnings.warn(
            f"workers {listing(here)} of one host cannot share memory ({failure}): their tensors "
            f"are sent over Gloo, which is slower; TESSEL_TRANSPORT=gloo selects it",
            stacklevel=2,
        )
    return None if failure or len(here) == 1 else host


def _store() -> Any:
    """The store in which the workers of the job met."""
    return dist.distributed_c10d._get_default_store()


def _begin_program() -> None:
    """Take part again, after the previous program has ended."""
    if _current is not None and _current.default is not None:
        _current.membership.watch.begin_program()
        if _current.membership.host is not None:
            _current.membership.host.leave(after=0)


def _end_program(error: BaseException | None) -> bool:
    """Tell the others that this worker's program has ended; return whether the job can go on."""
    if not is_distributed() or num_workers() == 1:
        return True
    job = _job()
    watch, host = job.membership.watch, job.membership.host
    job.membership.mailboxes.wait_until_read()
    if not watch.is_attached:  # others may wait for this worker at their first call
        everyone = range(num_workers())
        watch.attach(this_worker(), everyone, StoreBoard(this_worker(), _store()))
    watch.end_program(error)
    if host is not None:
        host.leave(after=endings.program)
    return not watch.alarm[0]


endings.listen(endings.Listener(_begin_program, _end_program))


_current: _Job | None = None


def _job() -> _Job:
    """The job of this process; a new one if `torch.distributed` was initialized again."""
    global _current
    default = dist.group.WORLD if CAN_BE_DISTRIBUTED else None
    if _current is None or _current.default is not default:
        if _current is not None:
            _current.end()  # else reference cycles keep its groups and their threads alive
        keep_memory()  # even if the program initialized torch.distributed by itself
        _current = _Job(default)
        for forget in _memories:
            forget()
    return _current
