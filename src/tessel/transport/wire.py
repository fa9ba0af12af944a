"""Messages through `torch.distributed`, between hosts and GPUs."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch import Tensor

from tessel.encoding import decode, encode
from tessel.transport.buffers import ReceiveBuffer, SendBuffer
from tessel.transport.request import OutOfStep

AGREEMENT = 2**30 + 2  # the tag of agreements between hosts, which `tag_of` never returns
_LONGEST = 2**36  # bytes of an encoded item: a larger number is a misread length
# dtypes that NCCL adds; complex numbers are pairs of these
_ADDED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
# dtypes that both Gloo and NCCL move directly; others are sent as bytes
_NATIVE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64)


def tag_of(call: int) -> int:
    """The tag for the number of a call or of an exchange, as Gloo's messages carry it."""
    return (2 * ~call + 1 if call < 0 else 2 * call) % 2**30


def receive(buffer: ReceiveBuffer, handle: Any, tag: int) -> Callable[[], None]:
    """Request a message, in its place if possible; return a function that waits for it."""
    staged = staged_for(buffer)
    work: Any = dist.irecv(wired(staged), src=buffer.worker, group=handle, tag=tag)

    def wait() -> None:
        work.wait()
        if staged is not buffer.place:
            buffer.put(staged)

    return wait


def staged_for(buffer: ReceiveBuffer) -> Tensor:
    """A contiguous tensor for a message: its place itself, if it can be written directly."""
    place = buffer.place
    if not buffer.adds and place.is_contiguous() and not place.is_conj():
        return place
    return torch.empty_like(place, memory_format=torch.contiguous_format)


def send(buffer: SendBuffer, handle: Any, tag: int) -> Callable[[], None]:
    """Start a message; return a function that waits until it has been sent."""
    tensor = packed(buffer.tensor)
    work: Any = dist.isend(wired(tensor), dst=buffer.worker, group=handle, tag=tag)

    def wait(kept: Tensor = tensor) -> None:
        # `kept` is the tensor itself: nobody else may hold it, and it must live until it was sent.
        work.wait()

    return wait


def swap(
    workers: Sequence[int],
    sends: Sequence[SendBuffer],
    receives: Sequence[ReceiveBuffer],
    device: torch.device,
    handle: Any,
    number: int | None = None,
) -> tuple[list[Tensor], Callable[[], None]]:
    """Start one collective for all messages of a group; return the values and a wait function.

    Messages carry a number, if given, which must be the same on all workers. Without one, as on a
    GPU, where each copy is a launch, a single message is sent from its tensor and received in its
    place directly; a GPU goes on computing meanwhile.
    """
    given = {buffer.worker: as_bytes(packed(buffer.tensor)) for buffer in sends}
    asked = {buffer.worker: buffer.place.nbytes for buffer in receives}
    takes = [asked.get(worker, 0) for worker in workers]
    if number is not None:
        # as long as the longest number, so that the bytes after it can be viewed as any dtype
        mine = torch.tensor([number, 0], device="cpu").view(torch.uint8)
        given = {w: torch.cat([mine, given[w]]) if w in given else mine for w in workers}
        takes = [mine.numel() + size for size in takes]
    gives = [given[worker].numel() if worker in given else 0 for worker in workers]
    full = [given[worker] for worker, size in zip(workers, gives, strict=True) if size]
    if len(full) == 1:
        sent = full[0]
    else:
        sent = torch.cat(full) if full else torch.empty(0, dtype=torch.uint8, device=device)
    place = _only_place(receives) if number is None else None
    into = sent.new_empty(sum(takes)) if place is None else as_bytes(place)
    work: Any = dist.all_to_all_single(
        into, sent, takes, gives, group=handle, async_op=number is None
    )

    def wait(kept: Tensor = sent) -> None:  # `kept` lives until it was sent
        if work is not None:
            work.wait()

    if place is not None:
        return [buffer.place for buffer in receives], wait
    came: Sequence[Tensor] = into.split(takes)
    if number is not None:
        if any(not torch.equal(part[: mine.numel()], mine) for part in came):
            raise OutOfStep((0, number), (0, 0))
        came = [part[mine.numel() :] for part in came]
    found = dict(zip(workers, came, strict=True))
    views = [found[worker].view(place.dtype).view(place.shape) for worker, place, _ in receives]
    return views, wait


def _only_place(receives: Sequence[ReceiveBuffer]) -> Tensor | None:
    """The single place into which messages can be received directly, or None."""
    full = [buffer for buffer in receives if buffer.place.numel()]
    if len(full) != 1 or full[0].adds:
        return None
    place = full[0].place
    return place if place.is_contiguous() and not place.is_conj() and not place.is_neg() else None


def all_reduce(totals: Sequence[Tensor], handle: Any) -> Callable[[], None]:
    """Start the sums of contiguous tensors over a group, in place; return a wait function."""
    numbers = [torch.view_as_real(each) if each.is_complex() else each for each in totals]
    if len(numbers) == 1:
        alone: Any = dist.all_reduce(numbers[0], group=handle, async_op=True)
        return lambda: alone.wait()  # (its result is meaningless)
    # in one launch, while the host goes on, as torch's coalescing manager does
    options = distributed_c10d.AllreduceCoalescedOptions()
    options.asyncOp = True
    work: Any = handle.allreduce_coalesced(numbers, options)
    return lambda: work.wait()


def all_gather(parts: Sequence[Tensor], handle: Any) -> tuple[list[Tensor], Callable[[], None]]:
    """Start to gather contiguous tensors as rows; return these and a wait function."""
    size = handle.size()
    found = [each.new_empty((size, *each.shape)) for each in parts]
    options = distributed_c10d.AllgatherOptions()
    options.asyncOp = True
    # (the first name exists since torch 2.13)
    name = "all_gather_single_coalesced"
    start = getattr(handle, name, None) or handle.allgather_into_tensor_coalesced
    # in one launch; Gloo, with which tests run this, needs concatenated rows
    work: Any = start([rows.flatten(0, 1) for rows in found], list(parts), options)
    return found, lambda: work.wait()


def share_over(handle: Any, item: Any) -> list[Any]:
    """Gather every worker's item, in the order of a process group, which may be any; slow.

    If one worker's item cannot be encoded, all of them raise TypeError.
    """
    return told(share_bytes(said(item), control_device(handle), handle))


def said(item: Any) -> bytes:
    """Encode an item for others, or the reason why it cannot be, since they wait for a message.

    It is encoded, not pickled: nothing but values can come from the network.
    """
    try:
        return encode((item, ""))
    except TypeError as error:
        return encode((None, str(error)))


def told(everyones: Sequence[bytes]) -> list[Any]:
    """Decode the items of all workers of a group."""
    items = []
    for place, heard in enumerate(everyones):
        try:
            item, problem = decode(heard)
        except (ValueError, TypeError) as error:
            raise RuntimeError(
                f"what worker {place} of the group sent is not a message of Tessel ({error}); all "
                f"workers must run the same version of it"
            ) from error
        if problem:
            raise TypeError(f"worker {place} of the group cannot send what it has: {problem}")
        items.append(item)
    return items


def share_bytes(said: bytes, device: torch.device, handle: Any) -> list[bytes]:
    """Gather the bytes of each worker, in group order: lengths first, then padded bytes."""
    size = dist.get_world_size(handle)
    with torch._C._DisableFuncTorch():  # these tensors belong to no transform of torch.func
        mine = torch.tensor([len(said)], dtype=torch.int64, device=device)
        told = list(torch.empty(size, dtype=torch.int64, device=device).split(1))
        dist.all_gather(told, mine, group=handle)
        lengths = [int(each) for each in torch.cat(told).tolist()]
        longest = max(lengths)
        if min(lengths) < 1 or longest > _LONGEST:
            raise RuntimeError(
                f"workers announced messages of {lengths} bytes, which none of Tessel has; all "
                f"workers must make the same calls in the same order"
            )
        padded = np.zeros(longest, np.uint8)
        padded[: len(said)] = np.frombuffer(said, np.uint8)
        room = torch.empty(size * longest, dtype=torch.uint8, device=device)
        dist.all_gather(
            list(room.split(longest)), torch.from_numpy(padded).to(device), group=handle
        )
        heard = room.cpu().numpy().reshape(size, longest)
    return [row[:length].tobytes() for row, length in zip(heard, lengths, strict=True)]


def share_words(words: Sequence[int], size: int, device: torch.device, handle: Any) -> bytes:
    """Gather every worker's words, in group order.

    By one small all-to-all, which takes a fifth of the time of Gloo's all-gather.
    """
    with torch._C._DisableFuncTorch():  # these tensors belong to no transform of torch.func
        mine = torch.tensor([*words] * size, dtype=torch.int64, device=device)
        everyones = torch.empty_like(mine)
        dist.all_to_all_single(everyones, mine, group=handle)
        return everyones.cpu().numpy().tobytes()


def close(handle: Any, other: int) -> None:
    """Close the connections of a group of Gloo, so that every wait for its messages raises.

    Gloo does so by itself when a message does not come in time: so one is requested that is never
    sent. Other backends are left alone.
    """
    if control_device(handle).type == "cpu":
        with contextlib.suppress(RuntimeError):
            work: Any = dist.irecv(
                torch.empty(1, device="cpu"), src=other, group=handle, tag=2**30 + 1
            )
            work.wait(datetime.timedelta(milliseconds=1))


def control_device(handle: Any) -> torch.device:
    """The device of small control messages: the CPU if the group can send CPU tensors."""
    backends = str(dist.get_backend_config(handle))
    return torch.device("cpu" if "gloo" in backends or "mpi" in backends else "cuda")


def moves_on_device(handle: Any) -> bool:
    """Whether tensors of a GPU are sent by NCCL, while the host goes on."""
    return "nccl" in str(dist.get_backend_config(handle))


def can_add(dtype: torch.dtype) -> bool:
    """Whether NCCL adds numbers of this type."""
    return dtype in _ADDED or dtype in (torch.complex64, torch.complex128)


def packed(tensor: Tensor) -> Tensor:
    """The values of a tensor in one contiguous run."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def wired(buffer: Tensor) -> Tensor:
    """View a contiguous tensor in a dtype that backends can send; torch raises for others."""
    return buffer if buffer.dtype in _NATIVE else as_bytes(buffer)


def as_bytes(buffer: Tensor) -> Tensor:
    # one element may have any stride and still be contiguous, but not be viewed as bytes
    return buffer.as_strided((buffer.numel(),), (1,)).view(torch.uint8)
