"""Exchanges between GPUs without NCCL, such as between workers that share a GPU.

A message to a worker of the same host is left in a mailbox, from which the GPU of the receiver
copies it. If that is not possible, or for another host, it is staged in pinned memory and sent like
a tensor of the CPU; for this, the worker waits for its GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tessel.transport.buffers import ReceiveBuffer, SendBuffer
from tessel.transport.exchange import Exchange, Ways
from tessel.transport.mailbox import POSTED, REFUSED, STAGED, WORDS, Mailboxes, Note
from tessel.transport.request import Key


class DeviceExchange:
    """Started messages between GPUs; calling it waits for them.

    There are three steps, and both workers of a pair know what comes in each: notes about the
    messages (other hosts get the messages at once), answers to notes of mailboxes, and the staged
    messages.

    Args:
        ways: the ways to the workers of the group.
        key: the key of the messages.
        sends, receives: at most one for each pair of workers.
        device: the device of the tensors.
        mailboxes: the mailboxes of this worker.
    """

    def __init__(
        self,
        ways: Ways,
        key: Key,
        sends: Sequence[SendBuffer],
        receives: Sequence[ReceiveBuffer],
        device: torch.device,
        mailboxes: Mailboxes,
    ) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "only exchanges by NCCL can be captured in a CUDA graph, for which each worker "
                "needs a GPU of its own"
            )
        self._ways, self._key, self._device, self._mailboxes = ways, key, device, mailboxes
        self._receives = receives
        self._own = next((each.tensor for each in sends if each.worker == ways.worker), None)
        self._go = {each.worker: each.tensor for each in sends if each.worker != ways.worker}
        near = [worker for worker in self._go if worker in ways.near]
        posts = {worker: mailboxes.post(worker, self._go[worker]) for worker in near}
        self._posted = {worker: box for worker, box in posts.items() if box is not None}
        self._staged = self._to_host({w: x for w, x in self._go.items() if w not in self._posted})
        notes = {w: box.note if box else Note(STAGED).tensor() for w, box in posts.items()}
        self._places = {each.worker: each.place for each in receives if each.worker != ways.worker}
        self._come = {
            worker: _note_room() if worker in ways.near else self._room(place)
            for worker, place in self._places.items()
        }
        self._notes = self._exchange({**self._staged, **notes}, self._come)

    def __call__(self) -> None:
        """Wait for others, and let the GPU copy their messages to their places."""
        self._notes()
        near = self._ways.near
        notes = {worker: Note.of(come) for worker, come in self._come.items() if worker in near}
        posted = [worker for worker, note in notes.items() if note.kind == POSTED]
        found = {w: self._mailboxes.mapped(w, notes[w], self._device) for w in posted}
        boxes = {worker: box for worker, box in found.items() if box is not None}
        values = {w: box.message(self._places[w]) for w, box in boxes.items()}
        late = [worker for worker in notes if worker not in boxes]
        if late:  # others wait for an answer before they send the missing messages
            values = {worker: value.clone() for worker, value in values.items()}
        else:
            self._put(values)
        for box in boxes.values():
            box.taken.record()
        # exchange answers to posted messages; those that were refused are staged
        no, heard = Note(REFUSED).tensor(), {worker: _note_room() for worker in self._posted}
        self._exchange({w: boxes[w].answer if w in boxes else no for w in posted}, heard)()
        refused = {}
        for worker, own in self._posted.items():
            if own.is_taken(heard[worker]):
                self._mailboxes.release(worker, own)
            else:
                self._mailboxes.refuse(worker, own.device)
                refused[worker] = own.message(self._go[worker])
        self._staged.update(self._to_host(refused))
        rooms = {worker: self._room(self._places[worker]) for worker in late}
        self._exchange({w: x for w, x in self._staged.items() if w in near}, rooms)()
        if late:
            self._put({**values, **{w: room.to(self._device) for w, room in rooms.items()}})

    def _put(self, values: Mapping[int, Tensor]) -> None:
        """Put received tensors into their places, in the order of the receives, as sums need it."""
        for buffer in self._receives:
            if buffer.worker == self._ways.worker:
                assert self._own is not None
                buffer.put(self._own)
            elif buffer.worker in values:
                buffer.put(values[buffer.worker])
            else:  # from another host
                buffer.put(self._come[buffer.worker].to(self._device))

    def _exchange(self, gives: Mapping[int, Tensor], takes: Mapping[int, Tensor]) -> Exchange:
        sends = [SendBuffer(worker, tensor) for worker, tensor in gives.items()]
        receives = [ReceiveBuffer(worker, room) for worker, room in takes.items()]
        return Exchange(self._ways, self._key, sends, receives)

    def _to_host(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copies of tensors in memory of the CPU, once the GPU has written them."""
        # the GPU conjugates and negates: torch would do so on the host, before the copy arrives
        copies = {
            worker: self._room(x).copy_(x.resolve_conj().resolve_neg(), non_blocking=True)
            for worker, x in tensors.items()
        }
        if copies and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copies

    def _room(self, like: Tensor) -> Tensor:
        """Memory of the CPU that a GPU can write and read."""
        is_pinned = self._device.type == "cuda"
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=is_pinned)


def _note_room() -> Tensor:
    return torch.empty(WORDS, dtype=torch.int64, device="cpu")
