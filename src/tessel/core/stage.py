"""Stages: the exchanges that a move consists of, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from tessel import transport
from tessel.core.layout import Shape
from tessel.core.plan import Piece, Plan
from tessel.transport import (
    NOTHING,
    UNREAD,
    CopyProgram,
    Place,
    ReceiveBuffer,
    SendBuffer,
    is_pinned,
    is_plain,
)

# bytes: slices that would lie a multiple of STEP apart get GAP between them, for transforms that
# go through them one by one
STEP, GAP = 2048, 128
MOST_PROGRAMS = 64  # that a stage remembers
# how tensors lie: dtype, strides of input and output, and whether the own part is there already
Lies = tuple[torch.dtype, Shape, Shape, bool]


class Stage:
    """One exchange, as one worker sees it: called, it gives the output.

    Args:
        plan: what leaves and what comes.
        group: who takes part.
        spaced: a dimension whose slices lie a little apart in the memory of the output.
    """

    def __init__(self, plan: Plan, group: transport.Group, spaced: int | None = None) -> None:
        self.plan, self.group, self.spaced = plan, group, spaced
        self._programs: dict[Lies, CopyProgram | None] = {}

    def __call__(self, x: Tensor, room: Tensor | None = None) -> Tensor:
        """The output, in the room that is given for it."""
        plan = self.plan
        if plan.stays and room is None:
            # a copy, as every other move gives
            return x.clone(memory_format=torch.contiguous_format)
        if x.shape != plan.source_shape:
            x = x.reshape(plan.source_shape)
        y = self._room(x) if room is None else self._cleared(room)
        if not self._follow(x, y, False):
            sends, receives = self._sends(x), self._receives(y)
            if plan.silent:
                for buffer in receives:
                    buffer.put(sends[0].tensor)
            else:
                self.group.exchange_at_once(sends, receives, x.device, plan.dense)
        return y

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """Send what others need; the result puts what arrives into its place."""
        if self.plan.silent:
            done = self(x)
            return lambda: done
        x = shaped(x, self.plan.source_shape)
        y = self._room(x)
        wait = self.group.exchange(self._sends(x), self._receives(y), x.device, self.plan.dense)

        def arrive() -> Tensor:
            wait()
            return y

        return arrive

    def before(self, second: Stage, x: Tensor) -> Tensor:
        """A sum in two exchanges; the part that this worker sums up lies in the output at once."""
        y = x.new_empty(second.plan.target_shape)
        worker = transport.this_worker()
        own = next((_part(y, piece) for piece in second.plan.takes if piece.peer == worker), y[:0])
        self(x, own)
        plan = second.plan
        if not plan.silent and not second._follow(own, y, is_there=True):
            sends = [SendBuffer(piece.peer, _part(own, piece)) for piece in plan.gives]
            receives = second._receives(y, is_there=True)
            second.group.exchange_at_once(sends, receives, y.device, plan.dense)
        return y

    def _room(self, like: Tensor) -> Tensor:
        """Room for the output."""
        plan = self.plan
        if self.spaced is not None:
            y = _spaced(like, plan.target_shape, self.spaced)
        elif plan.target_shape == plan.source_shape:
            y = torch.empty_like(like, memory_format=torch.contiguous_format)
        else:
            y = like.new_empty(plan.target_shape)
        return self._cleared(y)

    def _cleared(self, y: Tensor) -> Tensor:
        """Zeros where nothing comes."""
        return y if self.plan.fills else y.zero_()

    def _sends(self, x: Tensor) -> list[SendBuffer]:
        """What leaves the input."""
        return [SendBuffer(piece.peer, _part(x, piece)) for piece in self.plan.outgoing]

    def _receives(self, y: Tensor, is_there: bool = False) -> list[ReceiveBuffer]:
        """Where in the output belongs what comes; the own part may be there already."""
        return [ReceiveBuffer(p.peer, _part(y, p), adds) for p, adds in self._incoming(is_there)]

    def _incoming(self, is_there: bool) -> Sequence[tuple[Piece, bool]]:
        """What comes, in order: where nothing is added, first what waits for nobody."""
        if is_there:
            return [(piece, False) for piece in self.plan.arrives]
        if not self.plan.once:
            return self.plan.incoming
        # Sums are added in one order on all workers, so that copies are equal to the last bit;
        # copies may be made in any, and the own one needs no message.
        own = transport.this_worker()
        return sorted(self.plan.incoming, key=lambda each: each[0].peer != own)

    def _follow(self, x: Tensor, y: Tensor, is_there: bool) -> bool:
        """Make the exchange along its program, if it has one and the tensors are plain."""
        if not is_plain(x):
            return False
        key = x.dtype, x.stride(), y.stride(), is_there
        program = self._programs.get(key)
        if program is None:
            program = None if key in self._programs else self._remembered(key)
            if program is None:
                return False
        # A peer reads large tensors straight from this process's memory, which the kernel refuses
        # for pinned pages.
        if type(y) is not Tensor or (program.readers and is_pinned(x)):
            return False
        landed = self.group.follow(program, y, x)
        return landed == program.length or self._finish(program, landed, x, y, is_there)

    def _finish(
        self, program: CopyProgram, landed: int, x: Tensor, y: Tensor, is_there: bool
    ) -> bool:
        """Let Python do what the engine has left, if it has begun."""
        if landed == NOTHING:
            return False
        kept = self.plan.kept
        own = None if kept is None else _part(x, kept)
        rest = [] if landed == UNREAD else self._receives(y, is_there)[landed:]
        self.group.finish(program, x, rest, own)
        return True

    def _remembered(self, key: Lies) -> CopyProgram | None:
        """Make the program for tensors that lie like this, or learn that there is none."""
        if len(self._programs) >= MOST_PROGRAMS:
            self._programs.clear()
        program = None
        if not self.plan.silent:
            dtype, x_steps, y_steps, is_there = key
            leaves = self.plan.gives if is_there else self.plan.outgoing
            incoming = self._incoming(is_there)
            gives = [(piece.peer, Place(piece.region, x_steps)) for piece in leaves]
            takes = [(piece.peer, Place(piece.region, y_steps), adds) for piece, adds in incoming]
            program = self.group.program(dtype, gives, takes)
        self._programs[key] = program
        return program


def _spaced(like: Tensor, shape: Shape, dim: int) -> Tensor:
    """An empty tensor, its slices along a dimension not at large powers of two."""
    inner = prod(shape[dim + 1 :])
    if not prod(shape) or inner * like.element_size() % STEP:
        return like.new_empty(shape)
    length = inner + GAP // like.element_size()
    flat = like.new_empty((prod(shape[: dim + 1]), length))
    return flat[:, :inner].view(shape)


def _part(x: Tensor, piece: Piece) -> Tensor:
    return x if x.shape == piece.shape else x[piece.region]


def shaped(x: Tensor, shape: Shape) -> Tensor:
    """The same tensor as another box."""
    return x if x.shape == shape else x.reshape(shape)
