"""Mailboxes: memory of a GPU in which a worker leaves messages for another one of its host.

The receiver maps the memory once, by CUDA's inter-process handles, and copies messages out of it.
GPUs wait for each other by events that both processes know; the hosts only notify each other that
an event was recorded, and never wait for a GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessel.settings import chosen

IPC = "TESSEL_CUDA_IPC"
SMALLEST = 2**21  # bytes of a mailbox: CUDA itself allocates memory in such pieces
HANDLE = 64  # bytes of a CUDA handle
WORDS = 3 + 2 * HANDLE // 8  # words of a note
POSTED, STAGED, TAKEN, REFUSED = range(4)  # kinds of notes


class Note(NamedTuple):
    """A note about a message, from one worker to another.

    Attributes:
        kind: POSTED in a mailbox, or STAGED: it follows as a tensor of the CPU; the receiver
            answers POSTED with TAKEN, or with REFUSED if it cannot map the mailbox.
        number: the number of the mailbox among those of the sender.
        capacity: the capacity of the mailbox, in bytes.
        memory: the handle of its memory.
        event: the handle of the event that is recorded when a message was written, or was read.
    """

    kind: int
    number: int = 0
    capacity: int = 0
    memory: bytes = bytes(HANDLE)
    event: bytes = bytes(HANDLE)

    def tensor(self) -> Tensor:
        words = array("q", [self.kind, self.number, self.capacity])
        words.frombytes(self.memory + self.event)
        # belongs to no transform, and outlives any mode
        with torch.inference_mode(False), torch._C._DisableFuncTorch():
            return torch.tensor(words.tolist(), device="cpu")

    @classmethod
    def of(cls, tensor: Tensor) -> Note:
        kind, number, capacity, *handles = tensor.tolist()
        memory = array("q", handles).tobytes()
        return cls(kind, number, capacity, memory[:HANDLE], memory[HANDLE:])


class CudaSharing:
    """Shares memory and events of a GPU between processes; RuntimeError where that is impossible.

    It uses CUDA's driver: torch's own way waits for the GPU when memory is freed.
    """

    def allocate(self, capacity: int, device: torch.device) -> tuple[Tensor, bytes]:
        """Memory of a GPU, and the handle by which another process maps it."""
        address, handle = ctypes.c_uint64(), _Handle()
        with torch.cuda.device(device):
            driver = _driver()
            _check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(capacity)))
            _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), address))
            return _bytes_at(address.value, capacity), bytes(handle)

    def map(self, memory: bytes, capacity: int, device: torch.device) -> Tensor:
        address = ctypes.c_uint64()
        with torch.cuda.device(device):
            opening = _driver().cuIpcOpenMemHandle_v2
            opening.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
            # 1: also memory of another GPU, if this one can read it
            _check(opening(ctypes.byref(address), _Handle.from_buffer_copy(memory), 1))
            return _bytes_at(address.value, capacity)

    def event(self, device: torch.device) -> tuple[torch.cuda.Event, bytes]:
        """A new event, and the handle by which another process maps it."""
        with torch.cuda.device(device):
            event = torch.cuda.Event(interprocess=True)
            event.record()  # until then it belongs to no device
            return event, event.ipc_handle()

    def map_event(self, event: bytes, device: torch.device) -> torch.cuda.Event:
        mapped: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(device, event)
        return mapped


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE),)


def _driver() -> Any:
    """The library of the driver, in a thread that has torch's context."""
    torch.cuda.current_stream().query()
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(str(error)) from None


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver says {code}")


def _bytes_at(address: int, capacity: int) -> Tensor:
    """Memory of a GPU as a tensor, by the interface for memory of other libraries."""
    given = {"shape": (capacity,), "typestr": "|u1", "data": (address, False), "version": 3}
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        return torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": given})())


def _seen_as(memory: Tensor, like: Tensor) -> Tensor:
    """The first bytes of memory as a contiguous tensor of this shape and dtype."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


class Mailbox:
    """Memory for messages to one worker, one at a time.

    Args:
        sharing: shares memory between processes.
        number: the number by which the receiver recognizes it.
        capacity: the capacity in bytes.
        device: the device of the memory.

    Attributes:
        note: the note for the receiver.
    """

    def __init__(
        self, sharing: CudaSharing, number: int, capacity: int, device: torch.device
    ) -> None:
        self._sharing, self.device, self.capacity = sharing, device, capacity
        self._ready, event = sharing.event(device)
        self._memory, memory = sharing.allocate(capacity, device)
        self.note = Note(POSTED, number, capacity, memory, event).tensor()
        self._taken: torch.cuda.Event | None = None

    def put(self, tensor: Tensor) -> None:
        """Let the GPU write a message, after the previous one was read."""
        if self._taken is not None:
            self._taken.wait()
        self.message(tensor).copy_(tensor)
        self._ready.record()

    def message(self, like: Tensor) -> Tensor:
        """The message in the mailbox, with the shape and dtype of `like`."""
        return _seen_as(self._memory, like)

    def is_taken(self, answer: Tensor) -> bool:
        """Whether the receiver answers that its GPU reads the message, or has read it."""
        note = Note.of(answer)
        if note.kind == TAKEN and self._taken is None:
            self._taken = self._sharing.map_event(note.event, self.device)
        return note.kind == TAKEN

    def wait_until_read(self) -> None:
        """Wait until the last message has been read."""
        if self._taken is not None:
            self._taken.synchronize()


class MappedMailbox:
    """A mailbox of another worker, as its receiver sees it.

    Attributes:
        taken: the event that is recorded when a message was read.
        answer: the note for the sender then.
    """

    def __init__(self, sharing: CudaSharing, note: Note, device: torch.device) -> None:
        self._memory = sharing.map(note.memory, note.capacity, device)
        self._ready = sharing.map_event(note.event, device)
        self.taken, event = sharing.event(device)
        self.answer = Note(TAKEN, event=event).tensor()

    def message(self, like: Tensor) -> Tensor:
        """The message in the mailbox; the GPU waits until it is written."""
        self._ready.wait()
        return _seen_as(self._memory, like)


class Mailboxes:
    """The mailboxes to and from the other workers of the host.

    Args:
        sharing: shares memory between processes.
    """

    def __init__(self, sharing: CudaSharing | None = None) -> None:
        self._sharing = CudaSharing() if sharing is None else sharing
        self._lock = threading.Lock()  # backward passes of two threads may run at once
        self._all: list[Mailbox] = []
        self._idle: dict[tuple[int, torch.device], list[Mailbox]] = {}
        self._refused: set[tuple[int, torch.device]] = set()
        self._mapped: dict[tuple[int, int, torch.device], MappedMailbox] = {}

    @property
    def are_used(self) -> bool:
        return bool(self._all) and not self._refused

    def post(self, worker: int, tensor: Tensor) -> Mailbox | None:
        """Leave a message for a worker; None if it has to be staged."""
        pair = worker, tensor.device
        with self._lock:
            if pair in self._refused or chosen(IPC, ("1", "0")) == "0":
                return None
            idle = self._idle.setdefault(pair, [])
            fitting = [each for each in idle if each.capacity >= tensor.nbytes]
            if fitting:
                mailbox = min(fitting, key=lambda each: each.capacity)
                idle.remove(mailbox)
            else:  # powers of two, so that growing messages do not need new memory each time
                capacity = max(SMALLEST, 1 << (tensor.nbytes - 1).bit_length())
                try:
                    mailbox = Mailbox(self._sharing, len(self._all), capacity, tensor.device)
                except RuntimeError:
                    self._refused.add(pair)
                    return None
                if not self._all:
                    atexit.register(self._wait_at_exit, os.getpid())
                self._all.append(mailbox)
        mailbox.put(tensor)
        return mailbox

    def release(self, worker: int, mailbox: Mailbox) -> None:
        """Make a mailbox whose message was taken available again."""
        with self._lock:
            self._idle[worker, mailbox.device].append(mailbox)

    def refuse(self, worker: int, device: torch.device) -> None:
        """Leave no more messages for a worker, which cannot map memory of this device."""
        with self._lock:
            self._refused.add((worker, device))

    def mapped(self, worker: int, note: Note, device: torch.device) -> MappedMailbox | None:
        """The mailbox of a worker; None if it cannot be mapped."""
        key = worker, note.number, device
        with self._lock:
            if key not in self._mapped:
                try:
                    self._mapped[key] = MappedMailbox(self._sharing, note, device)
                except RuntimeError:
                    return None
            return self._mapped[key]

    def wait_until_read(self) -> None:
        """Wait until others have read all messages, since the memory ends with this process."""
        with self._lock:
            for each in self._all:
                each.wait_until_read()

    def _wait_at_exit(self, process: int) -> None:
        if os.getpid() == process:  # the end of a fork is not the end of the worker
            self.wait_until_read()
