"""Move: the one operator that communicates, and the exchanges that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from tessel import transport
from tessel.core.agreement import Signature, TensorMeta, remember
from tessel.core.boxes import Region
from tessel.core.context import in_transform, is_compiling
from tessel.core.graph import placed
from tessel.core.hierarchy import route
from tessel.core.layout import Layout, Shape
from tessel.core.linop import LinearOperator
from tessel.core.memory_format import is_channels_last, memory_format, room_like
from tessel.core.numbers import constant
from tessel.core.plan import Piece, Plan
from tessel.transport import (
    NOTHING,
    UNREAD,
    Again,
    CopyProgram,
    Place,
    ReceiveBuffer,
    SendBuffer,
    is_pinned,
    is_plain,
    keep_unchanged,
)

# dtypes that torch does not add, or not as numbers
UNSUMMABLE = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
# Bytes: slices that would be a multiple of STEP apart get GAP between them, for transforms that
# visit them one by one: along the first dimension of 256×128×256 complex64 16 ms, not 39.
STEP, GAP = 2048, 128
MOST_REPEATED = 64  # how many combinations of strides a stage repeats
# a combination: dtype, strides of input and output, whether the own part is in place already; and
# whether the exchange is started before it is waited for
Lies = tuple[torch.dtype, Shape, Shape, bool, bool]


@dataclass(frozen=True, repr=False)
class Move(LinearOperator):
    """Give every copy of an index in `codomain` the sum of its copies in `domain`.

    Forward:  y_s[i] = Σ_c x_c[i], where c runs over the separate copies of i in the domain.
    Adjoint:  x_c[i] = Σ_s y_s[i], which is `Move(codomain, domain)`.

    Where the domain stores each index once, this copies. Every movement is a choice of boxes:
    scatter, gather, broadcast, repartition and halo exchange copy; their adjoints, which swap the
    two layouts, sum. With copies on both sides it is the all-reduce.

    Args:
        domain: the layout of the input.
        codomain: the layout of the output, of the same global shape, over any workers.
        spaced: a dimension whose slices lie a little apart in the memory of the output, for a
            transform along it: slices at large powers of two share a few sets of a processor's
            cache.

    >>> import tessel, torch
    >>> layout = tessel.Layout.balanced(tessel.world(), (3,))
    >>> tessel.Move(layout, layout)(torch.ones(3))
    tensor([1., 1., 1.])
    """

    domain: Layout
    codomain: Layout
    spaced: int | None = None

    def __post_init__(self) -> None:
        if self.domain.shape != self.codomain.shape:
            raise ValueError(
                f"a move needs two layouts with the same global shape: from {self.domain} to "
                f"{self.codomain}"
            )
        self.prepare()

    @cached_property
    def H(self) -> Move:
        adjoint = Move(self.codomain, self.domain)
        adjoint.__dict__["H"] = self  # not by an attribute, which is frozen; A.H.H is A itself
        return adjoint

    @cached_property
    def route(self) -> tuple[Plan, ...]:
        """The plans of this worker, one for each exchange."""
        return route(self.domain, self.codomain, transport.this_worker(), transport.hosts())

    def check_dtype(self, dtype: torch.dtype, label: str) -> None:
        if dtype in UNSUMMABLE and not self.domain.owns_once:
            raise ValueError(
                f"{label}: {dtype} cannot be summed; convert it, for example to torch.int64"
            )

    def plan_ahead(self) -> None:
        super().plan_ahead()
        _ = self.route, self.H.route

    def apply(
        self, x: Tensor, meta: TensorMeta | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Apply the move without an agreement.

        Args:
            x: a tensor as `domain` describes it; all inputs require a gradient, or none.
            meta: the result of the agreement, if there was one.
            out: a tensor for the output, as in a call.
        """
        if out is not None:
            if is_compiling():
                raise NotImplementedError("a movement with `out` cannot be compiled; omit `out`")
            if meta is None and (lies := self._lies(x, out)) in self._into:
                return self._apply_into(x, out, self._into[lies])
            self.prepare()
            if not self.takes_part:
                return out
            worker, given = transport.this_worker(), Signature.of(x)
            if given.dtype is None or given.shape != self.domain.local_shape:
                raise ValueError(
                    f"{self._label}: worker {worker} expected a tensor of shape "
                    f"{self.domain.local_shape}, got {given.shape}"
                )
            if meta is None:
                meta = TensorMeta(given.dtype, given.device, given.needs_grad, given.has_tangent)
            self._check_outputs({}, meta, {worker: Signature.of_output(out)})
            return self._apply_into(x, out)
        again = None if is_compiling() else self._again
        if again is not None and (meta is None or not (meta.needs_grad or meta.has_tangent)):
            # without a derivative no Python code runs on the way to the engine
            y = again(x)
            if y is not None:
                return y if type(y) is Tensor else self.stages[-1].finish_again(x, *y)
        return super().apply(x, meta)

    def _apply_into(self, x: Tensor, out: Tensor, is_there: bool | None = None) -> Tensor:
        """Nothing is allocated, and what is in its place already is not copied.

        That is so for the root's tensor in a broadcast, if it is passed as `out`, too, and for the
        interior of the output of a halo exchange. `is_there` says whether x is in its place, if a
        call before has found out.
        """
        *first, last = self.stages
        if is_there is not None and last._follow(x, last._room(x, out), is_there):
            torch.autograd.graph.increment_version(out)
            return out
        with torch.no_grad():
            if not self.codomain.partition.active:  # nothing comes
                self._apply(x)
                return out
            if (
                not x.is_cpu
                or self.spaced is not None
                or out.is_conj()  # of which the memory is not the values
                or out.is_neg()
                or not (out.is_contiguous() or out.shape == last.plan.target_shape)
            ):
                return out.copy_(self._apply(x))
            room = out.view(last.plan.target_shape)
            meets = _meet(x, out)
            if not meets:
                self._through_stages(x, room)
            elif not first and last.has_there(x, room):
                last.complete(last._room(x, room), x)
            else:  # others read x while this worker would write to it
                return out.copy_(self._apply(x))
            if self._is_one_exchange and (lies := self._lies(x, out)) is not None:
                remember(self._into, lies, meets)
        torch.autograd.graph.increment_version(out)  # as torch does when it writes in place
        return out

    @cached_property
    def _into(self) -> dict[Any, bool]:
        """How tensors lay for which the move wrote into one; whether the input was in its place."""
        return {}

    def _lies(self, x: Tensor, out: Tensor) -> Any:
        """How an input and a tensor for the output lie, and where to each other if they meet.

        None if they might be more than their values, as they are for autograd and in transforms.
        """
        kinds = type(x), type(out)
        if kinds != (Tensor, Tensor) or x.requires_grad or out.requires_grad or in_transform():
            return None
        if not (is_plain(x) and is_plain(out)):
            return None
        apart = out.data_ptr() - x.data_ptr() if _meet(x, out) else None
        return x.dtype, x.shape, x.stride(), out.dtype, out.shape, out.stride(), apart

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The exchanges of this worker, with the group that makes them."""
        *before, last = self.route
        return (*(Stage(plan, self.group) for plan in before), Stage(last, self.group, self.spaced))

    @cached_property
    def _is_one_exchange(self) -> bool:
        """Whether the output is made of the input by one exchange, without other steps."""
        plan, *more = self.route
        shapes = self.domain.local_shape, self.codomain.local_shape
        return not more and (plan.source_shape, plan.target_shape) == shapes

    def _apply(self, x: Tensor) -> Tensor:
        if is_compiling():
            return placed(x, self)
        if x.is_cuda and self.sums_all and self.group.adds_on_devices(x):
            y = x.clone(memory_format=torch.contiguous_format)
            self.group.all_reduce(y)()
            return self._as_output(y)
        y = self._through_stages(x)
        if self._is_one_exchange:
            self.__dict__["_again"] = self.stages[-1].again
        return self._as_output(y)

    def _through_stages(self, x: Tensor, room: Tensor | None = None) -> Tensor:
        """The result of all exchanges, in the memory that is given for it."""
        *first, last = self.stages
        # the last copy can be written to its place in the output, if this worker gets it
        into_output = None
        if first and last.plan.once and self.spaced is None:
            kept = last.plan.kept
            if kept is not None and kept.shape == first[-1].plan.target_shape:
                into_output = first.pop()
        for stage in first:
            x = stage(x)
        return last(x, room) if into_output is None else into_output.before(last, x, room)

    @cached_property
    def sums_all(self) -> bool:
        """Whether each worker has a separate copy of the whole tensor, and all get their sum."""
        source, target = self.domain, self.codomain
        copies = prod(source.partition.shape[axis] for axis in source.separate)
        return (
            copies == source.partition.size > 1
            and source.partition == target.partition
            and source.cuts == target.cuts
        )

    def _as_output(self, y: Tensor) -> Tensor:
        """The received values in the shape of the part; no view, as nobody has the base of it.

        Torch would not let a view that comes out of an autograd function be changed in place.
        """
        shape = self.codomain.local_shape
        if y.shape != shape:
            y = y.reshape(shape)
        return y.detach() if y._is_view() else y

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Send the values that others need first; the result waits for the output.

        The output is allocated when the sent values may have been freed. Other movements may run in
        the meantime; all workers wait in the same order.
        """
        first, *rest = self.stages
        receives = [first.begin(x)]

        def wait() -> Tensor:
            y = receives.pop()()  # sent values are not kept until the last stage is complete
            for stage in rest:
                y = stage.begin(y)()
            return self._as_output(y)

        return wait

    def start_apart(self, x: Tensor) -> Callable[[], list[Tensor]]:
        """Send as `start` does, in one stage; the output is not put together.

        The result returns its pieces, in the order of the sum. This worker's own is not copied.
        """
        (stage,) = self.stages
        return stage.begin_apart(x)

    def complete(self, y: Tensor) -> Tensor:
        """Send values that are in their places in the output already; others fill the rest."""
        (stage,) = self.stages
        stage.complete(y)
        return y

    def start_adding(self, x: Tensor, total: Tensor) -> Callable[[], None]:
        """Send as `start` does, and add the output to a contiguous tensor that nobody else changes.

        The output itself is not allocated, unless it comes in several stages or in another dtype.
        """
        (first, *rest), shape = self.stages, self.codomain.local_shape
        assert total.shape == shape and total.is_contiguous()
        if not rest and not first.plan.silent and x.dtype == total.dtype:
            return first.begin_adding(x, total.view(first.plan.target_shape))
        wait = self.start(x)

        def add() -> None:
            total.add_(wait())

        return add


# The engine repeats a move by itself only while nobody, as a trace, has put another method here.
keep_unchanged(Move, "_apply")


def _meet(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors may share memory: each lies somewhere between two addresses."""
    (first, end), (start, last) = (
        (
            each.data_ptr(),
            each.data_ptr()
            + each.itemsize
            * (1 + sum(step * (n - 1) for n, step in zip(each.shape, each.stride(), strict=True))),
        )
        for each in (x, y)
    )
    return 0 not in (x.numel(), y.numel()) and first < last and start < end


class Stage:
    """One exchange, as one worker sees it: a call returns the output.

    Args:
        plan: the pieces to send and to receive.
        group: the workers that take part.
        spaced: a dimension whose slices are a little apart in the memory of the output.
    """

    def __init__(self, plan: Plan, group: transport.Group, spaced: int | None = None) -> None:
        self.plan, self.group, self.spaced = plan, group, spaced
        self._programs: dict[Lies, CopyProgram | None] = {}
        # makes the exchange again for tensors with strides that it knows
        self.again: Again | None = None
        self._repeated: set[tuple[torch.dtype, Shape, Shape]] = set()  # those strides

    def __call__(self, x: Tensor, room: Tensor | None = None) -> Tensor:
        """The output, in `room` if it is given."""
        plan = self.plan
        if self.again is not None and room is None:
            y = self.again(x)
            if y is not None:
                return y if type(y) is Tensor else self.finish_again(x, *y)
        if plan.stays and room is None:
            # a copy, as with every other move
            return x.clone(memory_format=memory_format(x))
        if x.shape != plan.source_shape:
            x = x.reshape(plan.source_shape)
        if x.is_cuda and room is None and self._row is not None and not plan.silent:
            return self._joined(x, *self._row)
        y = self._room(x, room)
        if self._follow(x, y, False):
            kind = x.dtype, x.shape, x.stride()
            if room is None and not self._gaps and kind not in self._repeated:
                if len(self._repeated) >= MOST_REPEATED:
                    self._repeated.clear()
                    self.again = None
                self._repeated.add(kind)
                program = self._programs[x.dtype, x.stride(), y.stride(), False, False]
                assert program is not None
                self.again = self.group.repeating(program, x, y, self.again) or self.again
        else:
            sends, receives = self._sends(x), self._receives(y)
            if plan.silent:
                for buffer in receives:
                    buffer.put(sends[0].tensor)
            else:
                self.group.exchange_at_once(sends, receives, x.device, plan.dense)
        return y

    @cached_property
    def _row(self) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """The dimension along which all received pieces are adjacent, and the row of pieces.

        Each entry is (number of the piece, -1) or (-1, number of zeros). None if pieces are added,
        if there are none, or if other dimensions have gaps.
        """
        plan, shape = self.plan, self.plan.target_shape
        pieces = [piece for piece, _ in self._incoming(False)]
        if not plan.once or self.spaced is not None or not pieces or 0 in shape:
            return None
        # along which some piece is shorter than the output
        open_dims = {d for piece in pieces for d, n in enumerate(shape) if piece.shape[d] != n}
        if len(open_dims) != 1 or any(0 in piece.shape for piece in pieces):
            return None
        (dim,) = open_dims
        if prod(shape[:dim]) == 1:
            return None  # pieces are contiguous in the output: they are received in place
        row, at = [], 0
        order = sorted(range(len(pieces)), key=lambda number: pieces[number].region[dim].start)
        for number in order:
            start = pieces[number].region[dim].start
            row += [(-1, start - at)] * (start > at) + [(number, -1)]
            at = pieces[number].region[dim].stop
        return dim, (*row, *[(-1, shape[dim] - at)] * (shape[dim] > at))

    def _joined(self, x: Tensor, dim: int, row: Sequence[tuple[int, int]]) -> Tensor:
        """The output on a GPU, where each copy is a launch: all pieces are joined by one kernel."""
        sends, shape, worker = self._sends(x), self.plan.target_shape, transport.this_worker()
        there = {each.worker: each.tensor for each in sends if each.worker == worker}
        places = [
            ReceiveBuffer(p.peer, there[p.peer] if p.peer in there else x.new_empty(p.shape))
            for p, _ in self._incoming(False)
        ]
        came = self.group.bring(sends, places, x.device)
        is_last = is_channels_last(x)
        if is_last:  # joined in their memory format; the pieces of others are as small as a halo
            came = [each.movedim(1, -1) for each in came]
            shape = (shape[0], *shape[2:], shape[1])
            dim = {0: 0, 1: len(shape) - 1}.get(dim, dim - 1)
        before, after = prod(shape[:dim]), prod(shape[dim + 1 :])
        # Torch joins tensors of more than four dimensions one by one.
        parts = [
            came[number].reshape(before, -1, after)
            if number >= 0
            else constant((0.0,), x.dtype, x.device).expand(before, zeros, after)
            for number, zeros in row
        ]
        y = torch.cat(parts, 1).view(shape)
        return y.movedim(-1, 1) if is_last else y

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """Send the values that others need; the result copies what arrives into place."""
        if self.plan.silent:
            done = self(x)
            return lambda: done
        x = shaped(x, self.plan.source_shape)
        y = self._room(x)
        program = self._program(x, y, False, early=True) if self.plan.once else None
        prepared = None if program is None else (program, y, x)
        sends, receives = self._sends(x), self._receives(y)
        wait = self.group.exchange(sends, receives, x.device, self.plan.dense, prepared)

        def arrive() -> Tensor:
            wait()
            return y

        return arrive

    def begin_apart(self, x: Tensor) -> Callable[[], list[Tensor]]:
        """Send the values that others need; the result gives all pieces, the own one as a view."""
        kept, worker = self.plan.kept, transport.this_worker()
        wait = self._apart.start(x)

        def arrive() -> list[Tensor]:
            others = iter(wait())
            return [
                _part(x, kept) if kept is not None and piece.peer == worker else next(others)
                for piece in self.plan.takes
            ]

        return arrive

    @cached_property
    def _apart(self) -> Apart:
        own = None if self.plan.kept is None else transport.this_worker()
        others = [piece for piece in self.plan.takes if piece.peer != own]
        return Apart(self.group, self.plan.gives, others, self.plan.dense)

    def complete(self, y: Tensor, own: Tensor | None = None) -> None:
        """Send this worker's part of the output; the parts of others are received beside it."""
        own = self.own(y) if own is None else own
        if not self._follow(own, y, is_there=True):
            sends = [SendBuffer(piece.peer, _part(own, piece)) for piece in self.plan.gives]
            receives = self._receives(y, is_there=True)
            self.group.exchange_at_once(sends, receives, y.device, self.plan.dense)

    def own(self, y: Tensor) -> Tensor:
        """The region of the output that comes from this worker itself."""
        worker = transport.this_worker()
        pieces = (piece for piece in self.plan.takes if piece.peer == worker)
        return next((_part(y, piece) for piece in pieces), y.new_empty(0))

    def has_there(self, x: Tensor, y: Tensor) -> bool:
        """Whether x is in its place in the output: the parts of others are received beside it."""
        plan, own = self.plan, self.own(y)
        return (
            plan.once
            and not plan.silent
            and plan.kept is not None
            and all(self._gaps)  # () is the whole output
            and not (x.is_conj() or x.is_neg())  # whose values are not those in its memory
            and (own.data_ptr(), own.shape, own.stride()) == (x.data_ptr(), x.shape, x.stride())
        )

    def begin_adding(self, x: Tensor, y: Tensor) -> Callable[[], None]:
        """Send the values that others need; the result adds what arrives to the values in place."""
        x = shaped(x, self.plan.source_shape)
        receives = [buffer._replace(adds=True) for buffer in self._receives(y)]
        return self.group.exchange(self._sends(x), receives, x.device, self.plan.dense)

    def before(self, second: Stage, x: Tensor, room: Tensor | None = None) -> Tensor:
        """Two exchanges; what the second copies from this worker itself is in its place at once."""
        y = x.new_empty(second.plan.target_shape) if room is None else room
        own = second.own(y)
        self(x, own)
        if not second.plan.silent:
            second.complete(y, own)
        return y

    def _room(self, like: Tensor, given: Tensor | None = None) -> Tensor:
        """Memory for the output, if none is given; with zeros where nothing arrives."""
        plan = self.plan
        shape, dim = plan.target_shape, self.spaced
        step = None if dim is None else prod(shape[dim + 1 :]) * like.itemsize
        if given is not None:
            y = given
        elif dim is not None and step and step % STEP == 0:
            # slices along the dimension would be large powers of two apart: a gap prevents this
            y = like.new_empty_strided(shape, _strides(shape, dim, GAP // like.itemsize))
        else:
            y = like.new_empty(shape) if like.is_contiguous() else room_like(like, shape)
        for gap in self._gaps:
            y[gap].zero_()
        return y

    @cached_property
    def _gaps(self) -> Sequence[Region]:
        """The regions of the output in which nothing arrives.

        Padding of a split dimension comes as rows beyond the border. To clear all of the output for
        them would take as long as to copy it.
        """
        plan, shape = self.plan, self.plan.target_shape
        if plan.fills:
            return ()
        regions = [piece.region for piece in plan.takes]
        hull = [
            (min(part.start for part in parts), max(part.stop for part in parts))
            for parts in zip(*regions, strict=True)
        ]
        length = prod(stop - start for start, stop in hull)
        if not plan.once or not hull or sum(piece.numel for piece in plan.takes) != length:
            return [()]
        found: list[Region] = []
        for dim, ((start, stop), end) in enumerate(zip(hull, shape, strict=True)):
            inner = tuple(slice(*part) for part in hull[:dim])
            found += [(*inner, slice(0, start))] * (start > 0)
            found += [(*inner, slice(stop, end))] * (stop < end)
        return found

    def _sends(self, x: Tensor) -> list[SendBuffer]:
        """The pieces of the input that are sent."""
        return [SendBuffer(piece.peer, _part(x, piece)) for piece in self.plan.outgoing]

    def _receives(self, y: Tensor, is_there: bool = False) -> list[ReceiveBuffer]:
        """The places of the received pieces in the output; the own part may be there already."""
        return [ReceiveBuffer(p.peer, _part(y, p), adds) for p, adds in self._incoming(is_there)]

    def _incoming(self, is_there: bool) -> Sequence[tuple[Piece, bool]]:
        """The received pieces in order; if none is added, first those that need no message."""
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
        program = self._program(x, y, is_there)
        if program is None:
            return False
        room = self.group.take_room(program) if program.room else None
        num_received = self.group.follow(program, y, x, room)
        if num_received not in (program.length, NOTHING):
            self._finish(program, x, y, is_there, num_received, room)
        return num_received != NOTHING

    def _finish(
        self,
        program: CopyProgram,
        x: Tensor,
        y: Tensor,
        is_there: bool,
        num_received: int,
        room: Tensor | None,
    ) -> None:
        """Do what the engine has left of an exchange."""
        kept = self.plan.kept
        own = None if kept is None else _part(x, kept)
        rest = [] if num_received == UNREAD else self._receives(y, is_there)[num_received:]
        self.group.finish(program, x, rest, own, room)

    def finish_again(self, x: Tensor, program: CopyProgram, y: Tensor, num_received: int) -> Tensor:
        """Do what is left of an exchange that was made again, and give its output."""
        self._finish(program, x, y, False, num_received, None)
        return y

    def _program(
        self, x: Tensor, y: Tensor, is_there: bool, early: bool = False
    ) -> CopyProgram | None:
        """The program of the exchange from x to y, if there is one and the tensors are plain."""
        if not is_plain(x):
            return None
        key = x.dtype, x.stride(), y.stride(), is_there, early
        program = self._programs.get(key)
        if program is None and key not in self._programs:
            if not self.plan.silent:
                leaves = self.plan.gives if is_there else self.plan.outgoing
                gives = [(piece.peer, Place(piece.region, x.stride())) for piece in leaves]
                takes = [
                    (piece.peer, Place(piece.region, y.stride()), adds)
                    for piece, adds in self._incoming(is_there)
                ]
                program = self.group.program(x.dtype, gives, takes, early)
            remember(self._programs, key, program)
        return program if program is not None and _can_follow(program, x, y) else None


class Apart:
    """An exchange in which what comes is not put together: its pieces lie in one flat tensor.

    Args:
        group: who takes part.
        gives: parts of the tensor that others get; their shapes are those that the others expect.
        takes: the shapes of what comes, and from whom.
        dense: whether everybody has something for everybody.
    """

    def __init__(
        self, group: transport.Group, gives: Sequence[Piece], takes: Sequence[Piece], dense: bool
    ) -> None:
        self._group, self._gives, self._takes, self._dense = group, gives, takes, dense
        self._lengths = [piece.numel for piece in takes]
        self.peers = [piece.peer for piece in takes]  # from whom something comes
        self._programs: dict[tuple[torch.dtype, Shape], CopyProgram | None] = {}

    def start(self, x: Tensor) -> Callable[[], list[Tensor]]:
        """Send; the result waits for what comes, and gives it in the order of `takes`."""
        flat = x.new_empty(sum(self._lengths))
        parts = flat.split(self._lengths) if self._lengths else ()
        pieces = [part.view(each.shape) for part, each in zip(parts, self._takes, strict=True)]
        sends = [SendBuffer(each.peer, shaped(x[each.region], each.shape)) for each in self._gives]
        receives = [
            ReceiveBuffer(p.peer, room) for p, room in zip(self._takes, pieces, strict=True)
        ]
        program = self._program(x)
        prepared = (program, flat, x) if program and _can_follow(program, x, flat) else None
        wait = self._group.exchange(sends, receives, x.device, self._dense, prepared)

        def arrive() -> list[Tensor]:
            wait()
            return pieces

        return arrive

    def _program(self, x: Tensor) -> CopyProgram | None:
        if not is_plain(x):
            return None
        key = x.dtype, x.stride()
        if key not in self._programs:
            ends = [*accumulate(self._lengths, initial=0)]
            gives = [(piece.peer, Place(piece.region, x.stride())) for piece in self._gives]
            takes = [
                (piece.peer, Place((slice(*span),), (1,)), False)
                for piece, span in zip(self._takes, pairwise(ends), strict=True)
            ]
            program = self._group.program(x.dtype, gives, takes, early=True)
            remember(self._programs, key, program)
        return self._programs[key]


def _can_follow(program: CopyProgram, x: Tensor, y: Tensor) -> bool:
    """Whether the engine may write to y, and others may read x."""
    # A peer reads large tensors straight from this process's memory, which the kernel refuses
    # for pinned pages.
    return type(y) is Tensor and not (program.readers and is_pinned(x))


def _strides(shape: Shape, dim: int, gap: int) -> Shape:
    """Those of a tensor whose slices along a dimension lie `gap` elements apart."""
    steps = (prod(shape[d + 1 :]) for d in range(len(shape)))
    ahead = (prod(shape[d + 1 : dim + 1]) for d in range(len(shape)))
    return tuple(
        step + gap * n * (d <= dim) for d, (step, n) in enumerate(zip(steps, ahead, strict=True))
    )


def _part(x: Tensor, piece: Piece) -> Tensor:
    return x if x.shape == piece.shape else x[piece.region]


def shaped(x: Tensor, shape: Shape) -> Tensor:
    """The same tensor as another box."""
    return x if x.shape == shape else x.reshape(shape)
