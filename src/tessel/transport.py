"""What travels between processes, and how: the only module that calls `torch.distributed`.

A `Group` is a set of workers that can talk to each other. Groups are made by all workers of the
job in one agreed order and kept, so that asking for the same workers again costs nothing.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tessel.errors import WorkerLost
from tessel.limits import time_limit

NUM_WORDS = 64
F = TypeVar("F", bound=Callable[..., Any])
Parcel = tuple[int, Tensor]  # (the worker at the other end, a contiguous tensor)


@dataclass
class Traffic:
    """What this worker sent and received, payload only; `agreements` are counted apart."""

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    agreements: int = 0


def is_distributed() -> bool:
    """Whether this process belongs to a `torch.distributed` job."""
    return dist.is_available() and dist.is_initialized()


def this_worker() -> int:
    """The number of this process among all workers of the job."""
    return dist.get_rank() if is_distributed() else 0


def num_workers() -> int:
    """The number of workers of the job."""
    return dist.get_world_size() if is_distributed() else 1


def start() -> None:
    """Join the job that the launcher's environment describes, unless that has happened."""
    if is_distributed() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    backend = "gloo"
    if _has_own_gpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=time_limit())
    atexit.register(leave)  # a process that ends with open groups aborts


def _has_own_gpu() -> bool:
    """Whether each worker of this host can have a GPU, which NCCL does not let two share."""
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if 0 < gpus < workers:
        warnings.warn(
            f"{workers} workers on a host with {gpus} GPUs: tensors move over Gloo, not NCCL",
            stacklevel=4,
        )
    return gpus >= workers


def leave() -> None:
    """Leave the job: destroy its groups, and forget them, so that their threads can end."""
    global _current
    if _current is not None:
        for group in _current.groups.values():
            group.handle = None
        _current = None
    if is_distributed():
        dist.destroy_process_group()
    gc.collect()


def traffic() -> Traffic:
    """The running totals of this worker."""
    return _job().traffic


def current_call() -> int:
    """The number of the call that the workers last agreed on."""
    return _job().call


def is_tagged() -> bool:
    """Whether messages carry the number of a call now."""
    return _job().tag != 0


@contextmanager
def tagged(call: int) -> Iterator[None]:
    """Let messages carry the number of a call: they wait for those of the same call only."""
    job = _job()
    before, job.tag = job.tag, call
    try:
        yield
    finally:
        job.tag = before


def kept_in_job(function: F) -> F:
    """Remember the results of a function until this process starts or leaves a job.

    For what depends on the number of this worker, or holds groups: both end with the job.
    """
    remembering = lru_cache(maxsize=4096)(function)
    _memories.append(remembering.cache_clear)
    return cast(F, remembering)


_memories: list[Callable[[], None]] = []


def code_of(call: str) -> int:
    """A number for a call, by which workers see whether they make the same."""
    return zlib.crc32(call.encode())


def group_of(workers: Iterable[int]) -> Group:
    """The group of these workers; made by all workers of the job together the first time."""
    return _job().group(tuple(sorted(workers)))


class Group:
    """Workers that can talk to each other, in ascending order of their numbers."""

    def __init__(self, workers: tuple[int, ...], handle: Any, totals: Traffic) -> None:
        self.workers = workers
        self.handle = handle  # None when there is nobody to talk to
        self.totals = totals
        self.num_calls = 0

    @property
    def size(self) -> int:
        return len(self.workers)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Callable[[], None]:
        """Start point-to-point messages; the result waits for them. At most one a pair."""
        tag = _job().tag
        pending = [
            self._call(dist.irecv, _wire(buffer), src=peer, group=self.handle, tag=tag)
            for peer, buffer in receives
        ]
        pending += [
            self._call(dist.isend, _wire(buffer), dst=peer, group=self.handle, tag=tag)
            for peer, buffer in sends
        ]
        self._count(len(sends), map(_second, sends), map(_second, receives))
        return lambda: self._wait(pending)

    def all_to_all(self, send: Tensor, gives: Sequence[int], takes: Sequence[int]) -> Tensor:
        """Send `gives[k]` elements of a flat tensor to the k-th worker, get `takes[k]` from it."""
        receive = send.new_empty(sum(takes))
        width = send.element_size()
        self._call(
            dist.all_to_all_single,
            _bytes(receive),
            _bytes(send),
            [width * count for count in takes],
            [width * count for count in gives],
            group=self.handle,
        )
        self._count(sum(count > 0 for count in gives), [send], [receive])
        return receive

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a small tensor over the group, on every worker of it."""
        if self.handle is None:
            return value.clone()
        copies = self.all_to_all(
            value.reshape(-1).repeat(self.size), *([[value.numel()] * self.size] * 2)
        )
        return copies.view(self.size, *value.shape).sum(0)

    def share_words(self, words: Sequence[int]) -> bytes:
        """Every worker's words, at most `NUM_WORDS`, as the bytes of an int64 array in group order.

        This is how workers agree before data moves: one small all-to-all, which takes a fifth of
        the time of Gloo's all-gather. All such messages have one length, so that workers that mean
        different things by theirs can find out.
        """
        words = [*words, *[0] * (NUM_WORDS - len(words))]
        if self.handle is None:
            return np.array(words, dtype=np.int64).tobytes()
        self.totals.agreements += 1
        with torch._C._DisableFuncTorch():  # these tensors belong to no transform of torch.func
            device = self._control_device
            mine = torch.tensor(words * self.size, dtype=torch.int64, device=device)
            everyones = torch.empty_like(mine)
            self._call(dist.all_to_all_single, everyones, mine, group=self.handle)
            return everyones.cpu().numpy().tobytes()

    def check_same_call(self, everyones: bytes, call: str) -> None:
        """Raise ValueError on every worker if the first of their words, the codes, differ."""
        codes = np.frombuffer(everyones, dtype=np.int64)[::NUM_WORDS]
        if (codes == codes[0]).all():
            return
        calls = self.share_objects(call)
        other = next(k for k, code in enumerate(codes) if code != codes[0])
        raise ValueError(
            f"all workers must make the same calls in the same order: worker {self.workers[0]} "
            f"calls {calls[0]}, worker {self.workers[other]} calls {calls[other]}"
        )

    def number_call(self) -> None:
        """Count a call that all workers agreed on; they all have the same count."""
        self.num_calls += 1
        _job().call = self.num_calls

    def share_objects(self, item: Any) -> list[Any]:
        """Every worker's item in group order; slow, for set-up and for the text of errors."""
        if self.handle is None:
            return [item]
        items = [None] * self.size
        self._call(dist.all_gather_object, items, item, group=self.handle)
        return items

    @cached_property
    def _control_device(self) -> torch.device:
        """Where small control messages live: the CPU if the group can move CPU tensors."""
        backends = dist.get_backend_config(self.handle)
        return torch.device("cpu" if "gloo" in str(backends) or "mpi" in str(backends) else "cuda")

    def _count(self, messages: int, sent: Any, received: Any) -> None:
        self.totals.messages += messages
        self.totals.bytes_sent += sum(buffer.nbytes for buffer in sent)
        self.totals.bytes_received += sum(buffer.nbytes for buffer in received)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, pending: list[Any]) -> None:
        try:
            for work in pending:
                work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> RuntimeError:
        """Say which worker is gone when a message could not be delivered."""
        reason = str(error).strip().partition("\n")[0].partition(". ")[0] or repr(error)
        if not any(sign in reason.lower() for sign in _SIGNS_OF_LOSS):
            return error
        gone = _job().gone(self.workers, seconds=0.5)
        who = f"worker {', '.join(map(str, gone))}" if gone else f"one of {_listing(self.workers)}"
        return WorkerLost(
            f"worker {this_worker()} lost contact with {who} during a movement: {reason}"
        )


_SIGNS_OF_LOSS = ("connection", "peer", "timed out", "timeout", "socket", "aborted", "broken pipe")


@dataclass
class _Job:
    """What this process knows of its job: one group for each set of workers, and who runs where."""

    default: Any
    call: int = 0  # the number of the last call that was agreed on, in its group
    tag: int = 0  # what messages carry now, so that they cannot be taken for others
    traffic: Traffic = field(default_factory=Traffic)
    groups: dict[tuple[int, ...], Group] = field(default_factory=dict)
    processes: list[tuple[str, int]] = field(default_factory=list)

    def group(self, workers: tuple[int, ...]) -> Group:
        if workers not in self.groups:
            self.groups[workers] = Group(workers, self._handle(workers), self.traffic)
        return self.groups[workers]

    def _handle(self, workers: tuple[int, ...]) -> Any:
        if len(workers) == 1:
            return None
        everyone = tuple(range(num_workers()))
        if workers == everyone:
            self._introduce()
            return self.default
        self._agree_to_make(workers, everyone)
        handle = dist.new_group(list(workers), timeout=time_limit())
        return handle if this_worker() in workers else None

    def _introduce(self) -> None:
        """Learn the host and process of every worker, to name the one that died."""
        meeting = Group(tuple(range(num_workers())), self.default, self.traffic)
        self.processes = meeting.share_objects((socket.gethostname(), os.getpid()))

    def _agree_to_make(self, workers: tuple[int, ...], everyone: tuple[int, ...]) -> None:
        """Raise on every worker when they are about to make different groups."""
        meeting = self.group(everyone)
        call = f"for a partition of workers {_listing(workers)}"
        meeting.check_same_call(meeting.share_words([code_of(call)]), call)

    def gone(self, workers: tuple[int, ...], seconds: float) -> list[int]:
        """Those of `workers` on this host whose process ended or stopped, or does in `seconds`."""
        here = socket.gethostname()
        pids = {w: pid for w, (host, pid) in enumerate(self.processes) if host == here}
        deadline = time.monotonic() + seconds
        while True:
            ended = [w for w in workers if w in pids and not _is_alive(pids[w])]
            if ended or time.monotonic() > deadline:
                return ended
            time.sleep(0.02)


_current: _Job | None = None


def _job() -> _Job:
    """The job of this process; a new one when `torch.distributed` was started anew."""
    global _current
    default = dist.group.WORLD if is_distributed() else None
    if _current is None or _current.default is not default:
        _current = _Job(default)
        for forget in _memories:
            forget()
    return _current


def _is_alive(pid: int) -> bool:
    """Whether a process runs: it has not ended, reaped or not, and is not stopped."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] not in "ZXTt"
    except ProcessLookupError:
        return False
    except OSError:
        return True


# what Gloo and NCCL both move as it is; anything else travels as bytes
_NATIVE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64)


def _wire(buffer: Tensor) -> Tensor:
    """A contiguous tensor as a backend can move it; torch itself refuses others here."""
    return buffer if buffer.dtype in _NATIVE else _bytes(buffer)


def _bytes(buffer: Tensor) -> Tensor:
    # one element may have any stride and still be contiguous, but not be viewed as bytes
    return buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8)


def _second(parcel: Parcel) -> Tensor:
    return parcel[1]


def _listing(workers: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, workers)) + "]"
