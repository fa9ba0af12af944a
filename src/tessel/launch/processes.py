"""Processes: the workers that make a call together, in the order of ranks."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait

from tessel.errors import WorkerLost
from tessel.launch.forkserver import GRACE
from tessel.launch.message import DUMP_STACKS
from tessel.launch.process import WorkerProcess


def await_starts(processes: Iterable[WorkerProcess]) -> None:
    """Wait until all have started, or ended at once."""
    for process in processes:
        while not process.has_started() and not process.has_ended():
            wait([process.status])


def await_ends(processes: Sequence[WorkerProcess], seconds: float) -> None:
    """Wait until all have ended, but not forever."""
    deadline = time.monotonic() + seconds
    while waiting := [process.status for process in processes if not process.has_ended()]:
        if not wait(waiting, max(0.0, deadline - time.monotonic())):
            return


def kill(processes: Iterable[WorkerProcess]) -> None:
    """End processes at once."""
    running = [process for process in processes if not process.has_ended()]
    for process in running:
        process.signal(signal.SIGKILL)
    await_ends(running, 5 * GRACE)


def collect(processes: Sequence[WorkerProcess], deadline: float) -> None:
    """Take in replies until all are there, the deadline, or the grace after a first failure."""
    failed = False
    while waiting := [p for p in processes if p.reply is None and p.end is None]:
        if not failed and any(process.has_failed() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return
        sources = {source: process for process in waiting for source in process.sources()}
        for source in wait(list(sources), None if seconds == math.inf else seconds):
            sources[source].read()


def raise_failure(processes: Sequence[WorkerProcess], name: str) -> None:
    """Raise the first failure; a lost worker counts first, for it makes the others fail."""
    lost = {rank: process for rank, process in enumerate(processes) if process.is_lost()}
    failures = {
        rank: p.reply.failure for rank, p in enumerate(processes) if p.reply and p.reply.failure
    }
    error: BaseException
    if lost:
        first = min(lost)
        error = WorkerLost(
            f"worker {first} of {len(processes)} {lost[first].end} while it ran {name}"
        )
        if stacks := lost[first].stacks():
            error.add_note(f"Stack of worker {first}:\n\n{stacks}")
    elif failures:
        first = min(failures, key=lambda rank: failures[rank].time)
        error = failures[first].exception()
        error.add_note(f"Worker {first} of {len(processes)}:\n\n{failures[first].traceback}")
    else:
        return
    also = {rank: f"worker {rank} {process.end}" for rank, process in lost.items()}
    also |= {rank: f"worker {rank} failed with {f.summary}" for rank, f in failures.items()}
    del also[first]
    if also:
        error.add_note("\n".join(["Also:", *(also[rank] for rank in sorted(also))]))
    raise error


def raise_timeout(processes: Sequence[WorkerProcess], name: str, timeout: float | None) -> None:
    """Raise if a worker has not replied, and show where each of these is."""
    stuck = {rank: process for rank, process in enumerate(processes) if process.reply is None}
    if not stuck:
        return
    for process in stuck.values():
        process.signal(DUMP_STACKS)
    # The stacks are there when all have written something, and nothing was added since.
    before: list[str] = []
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        time.sleep(0.05)
        found = [process.stacks() for process in stuck.values()]
        if all(found) and found == before:
            break
        before = found
    ranks = ", ".join(map(str, stuck))
    stacks = [f"Worker {rank}:\n{p.stacks() or 'no answer'}" for rank, p in stuck.items()]
    raise TimeoutError(
        f"{name} exceeded its time limit of {timeout} s on worker(s) {ranks} of "
        f"{len(processes)}, which were ended; their stacks were\n\n" + "\n".join(stacks)
    )
