"""`tessel.trace`: a block that is recorded on all workers, and written by the first."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import secrets
import signal
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessel import transport
from tessel.core.agreement import agree, tell
from tessel.core.layout import Layout
from tessel.core.move import Move
from tessel.core.partition import Partition, world
from tessel.errors import WorkerLost
from tessel.settings import text, whole_number
from tessel.tracing import clocks, recorder
from tessel.tracing.merged import WorkerNotes, merge, part_of
from tessel.transport.process import this_host

VARIABLE = "TESSEL_TRACE"


@contextmanager
def trace(path: str | os.PathLike[str], *, limit: int = recorder.LIMIT) -> Iterator[None]:
    """Record the activities of all workers in the `with` block, and write one trace.

    The file is in Chrome's format, for ui.perfetto.dev or chrome://tracing: a process for each
    worker, with rows for computing, packing, moving, waiting and agreeing. `tessel trace FILE`
    shows which worker waited for which. torch.profiler and, on GPUs, Nsight get the same ranges.

    All workers enter and leave together, with the same path; the first one writes the file. If an
    exception leaves the block, or a worker is lost, each worker writes its own part next to it, and
    the last one merges the existing parts. Blocks may be nested: each writes its own file. Outside
    of blocks there is no overhead.

    Args:
        path: the path of the file, on the host of the first worker.
        limit: the largest number of events of a worker; with more, there is a warning.

    >>> import tempfile, tessel, torch
    >>> file = tempfile.NamedTemporaryFile(suffix=".json")
    >>> with tessel.trace(file.name):
    ...     y = torch.nn.Conv1d(1, 1, 3)(torch.ones(1, 1, 8))
    """
    block = TracedBlock(path, limit)
    block.meet()
    block.begin()
    try:
        yield
    except BaseException:
        block.end_alone()
        raise
    block.end_together()


class TracedBlock:
    """One trace, on one worker.

    Args:
        path: of the file.
        limit: of events.
    """

    _open: list[TracedBlock] = []  # noqa: RUF012  # those that record now, in this process
    _recorder: recorder.Recorder | None = None

    def __init__(self, path: str | os.PathLike[str], limit: int) -> None:
        self.path = Path(os.fspath(path)).absolute()  # whoever changes directory finds it there
        self.limit = index(limit)
        self.token, self.process = "", os.getpid()
        self.worker, self.num_workers, self.host = 0, 1, this_host()
        self.clock: list[list[int]] = []

    def meet(self) -> None:
        """Agree with the other workers on the trace, or raise on all of them."""
        partition = world()
        self.worker, self.num_workers = transport.this_worker(), transport.num_workers()
        wrong = f"limit must be 1 or more, got {self.limit}" if self.limit < 1 else ""
        if not wrong and self.worker == 0:
            wrong = why_not(self.path)
        mine = str(self.path), wrong, secrets.token_hex(8)
        agree(partition, "tessel.trace")
        said = tell(partition, mine)
        for worker, (_, failure, _) in said.items():
            if failure:
                raise ValueError(f"tessel.trace: {failure} (worker {worker})")
        paths = {other: worker for worker, (other, _, _) in said.items()}
        if len(paths) > 1:
            (one, first), (other, second), *_ = paths.items()
            raise ValueError(
                f"tessel.trace: all workers need the same path, got {one} on worker {first} and "
                f"{other} on worker {second}"
            )
        self.token = said[0][2]
        self._compare_clocks()

    def _compare_clocks(self) -> None:
        if self.num_workers > 1:
            found = clocks.compared(transport.group_of(range(self.num_workers)))
            self.clock += [] if found is None else [found]

    def begin(self) -> None:
        """Record from here on."""
        if TracedBlock._recorder is None:
            TracedBlock._recorder = recorder.switch_on(self.limit)
        TracedBlock._open.append(self)
        self._recorder = TracedBlock._recorder
        self._recorder.limit = max(self._recorder.limit, self.limit)
        self.began = time.monotonic_ns()

    def _part(self) -> WorkerNotes:
        """Stop recording, and return the record."""
        ended = time.monotonic_ns()
        assert self._recorder is not None
        TracedBlock._open.remove(self)
        if not TracedBlock._open:
            recorder.switch_off(self._recorder)
            TracedBlock._recorder = None
        part = part_of(self._recorder, self.worker, self.host, self.began, ended)
        if part["left_out"]:
            warnings.warn(
                f"tessel.trace: worker {self.worker} kept {self._recorder.num_kept} events and "
                f"left out {part['left_out']} that came later; trace fewer steps, or pass a larger "
                f"limit",
                stacklevel=4,
            )
        return {**part, "token": self.token}

    def end_together(self) -> None:
        """Make the first worker write the records of all."""
        part = self._part()
        if transport.num_workers() != self.num_workers:  # the job was left inside the block
            self._write_part(part)
            return
        try:
            agree(world(), "the end of tessel.trace")
            self._compare_clocks()
            part["clock"] = self.clock
            said = zlib.compress(json.dumps(part, separators=(",", ":")).encode(), 1)
            everyone, first = world(), Partition((0,), (1,))
            lengths = [length for _, length in sorted(tell(everyone, len(said)).items())]
            everywhere = Layout.blocks_along(everyone, (0,), [(length,) for length in lengths])
            own = torch.from_numpy(np.frombuffer(said, np.uint8).copy())
            with torch.no_grad():
                flat = Move(everywhere, Layout.whole(first, (sum(lengths),)))(own)
        except WorkerLost:
            # This worker has completed its work: the next call of the job raises the same error.
            self._write_part(part)
            return
        except ValueError:  # others make another call, and raise as well
            self._write_part(part)
            raise
        if self.worker == 0:
            pieces = flat.split(lengths)
            parts = [json.loads(zlib.decompress(piece.numpy().tobytes())) for piece in pieces]
            write(self.path, merge(parts, self.num_workers))

    def end_alone(self) -> None:
        """Write the record of this worker only, since the others may be anywhere."""
        part = self._part()
        part["clock"] = self.clock
        self._write_part(part)

    def _write_part(self, part: WorkerNotes) -> None:
        """Write this worker's part, and the trace of all parts that are there."""
        if self.num_workers == 1:
            write(self.path, merge([part], 1))
            return
        files = [
            self.path.with_name(f"{self.path.name}.worker{worker}")
            for worker in range(self.num_workers)
        ]
        # the exception that ends the block matters more than a full disk
        with _written_first(), suppress(OSError):
            write(files[self.worker], part)
            with locked(self.path.parent.resolve()):  # one at a time: the last one sees all parts
                found = []
                for file in files:
                    with suppress(OSError, ValueError):
                        found.append(json.loads(file.read_bytes()))
                parts = [each for each in found if each["token"] == self.token]
                if parts:  # otherwise another worker has merged all, including this part
                    write(self.path, merge(parts, self.num_workers))
                if len(parts) == self.num_workers:
                    for file in files:
                        file.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, waits: bool = True) -> Iterator[None]:
    """Lock a folder, without a file; the system releases the lock if the process is killed.

    It raises OSError if it is no folder, or if another process has the lock and `waits` is false.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def why_not(path: Path) -> str:
    """Why a trace cannot be written there."""
    if path.is_dir():
        return f"{path} is a folder; name a file in it"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path} cannot be written"
    return ""


def write(path: Path, content: Any) -> None:
    """Write a file, which is the old one or the new one at every moment."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(json.dumps(content, separators=(",", ":")))
    os.replace(half, path)


_program: TracedBlock | None = None
_num_writing = 0  # how many blocks are being written, one in the other
_is_asked_to_end = False  # whether SIGTERM came meanwhile


def begin_program() -> None:
    """Trace this program if TESSEL_TRACE names a file, from now until it ends."""
    global _program
    path = text(VARIABLE)
    if path is None or _program is not None:
        return
    _program = TracedBlock(path, recorder.LIMIT)
    _program.begin()
    atexit.register(end_program)
    # When a worker fails, launchers end the others with this signal, before they can write their
    # records. A program with its own handler writes its trace when it ends.
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_by_signal)
        os.register_at_fork(after_in_child=_end_as_usual)


def _end_by_signal(number: int = signal.SIGTERM, frame: Any = None) -> None:
    """Write the trace of this program, and end as the signal would have ended it."""
    global _is_asked_to_end
    _is_asked_to_end = _num_writing > 0
    if _is_asked_to_end:  # by the interrupted code, which returns here
        return
    try:
        end_program(SystemExit(128 + number))
    finally:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _end_as_usual() -> None:
    """Make SIGTERM end this process at once, unless the program has its own handler."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is _end_by_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _written_first() -> Iterator[None]:
    """Let SIGTERM end the process when all is written."""
    global _num_writing
    _num_writing += 1
    try:
        yield
    finally:
        _num_writing -= 1
        if _is_asked_to_end:
            _end_by_signal()


def end_program(error: BaseException | None = None) -> None:
    """Write the trace of this program, if there is one; only the first call does."""
    global _program
    with _written_first():
        block, _program = _program, None
        if block is not None and block.process == os.getpid():  # a fork ends before the worker does
            _write_program(block, error)
            _end_as_usual()


def _write_program(block: TracedBlock, error: BaseException | None) -> None:
    """Write the trace of a program that ends, with an exception or without."""
    atexit.unregister(end_program)
    # A program may leave its job before it ends: the launcher's variables are still valid.
    joined = transport.is_distributed()
    block.worker = transport.this_worker() if joined else whole_number("RANK", 0)
    block.num_workers = transport.num_workers() if joined else whole_number("WORLD_SIZE", 1)
    # parts of one run are in one folder: they have the same job, or the same parent
    block.token = text("TORCHELASTIC_RUN_ID") or text("SLURM_JOB_ID") or str(os.getppid())
    try:
        if error is None and joined:
            block.end_together()
        else:
            block.end_alone()
    except (OSError, ValueError) as failure:  # the program itself has done its work
        print(f"tessel: the trace {block.path} cannot be written: {failure}", file=sys.stderr)


transport.when_joined(begin_program)
