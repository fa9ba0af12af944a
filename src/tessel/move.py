"""Move: the one operator that communicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from tessel import transport
from tessel.graph import node
from tessel.layout import Layout, Shape
from tessel.linop import LinearOperator
from tessel.plan import Piece, Plan, route
from tessel.transport import Arrival, Parcel

# what torch does not add, or not as numbers
UNSUMMABLE = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
STEP, GAP = 2048, 128  # bytes


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
            transform along it: slices at large powers of two fall into the same few places of
            a processor's cache.

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
                f"a move needs two layouts of one global shape: from {self.domain} "
                f"to {self.codomain}"
            )
        self.takes_part  # noqa: B018  (all workers make the group, here or in the first call of a copy)

    @cached_property
    def H(self) -> Move:
        adjoint = Move(self.codomain, self.domain)
        adjoint.__dict__["H"] = self
        return adjoint

    @cached_property
    def route(self) -> tuple[Plan, ...]:
        """The exchanges of this worker."""
        return route(self.domain, self.codomain, transport.this_worker())

    def check_dtype(self, dtype: torch.dtype, label: str) -> None:
        if dtype in UNSUMMABLE and not self.domain.owns_once:
            raise ValueError(f"{label}: {dtype} cannot be summed; convert it, say to torch.int64")

    def prepare(self) -> None:
        super().prepare()
        for move in (self, self.H):
            move.route  # noqa: B018

    def _apply(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return node(x, self.number)
        first, *rest = self.route
        if rest:
            y = _sum_by_parts(first, rest[0], self.group, x)
        else:
            y = _exchanged(first, self.group, x, self.spaced)
        return _shaped(y, self.codomain.local_shape)

    def depart(self, x: Tensor) -> Callable[[], Tensor]:
        """Send what others need first; the result waits for what comes and gives the output.

        Room for the output is made when what was sent may be gone. Other movements may pass
        meanwhile; all workers land in the same order.
        """
        first, *rest = self.route
        arrivals = [_begin(first, self.group, x, self.spaced)]

        def land() -> Tensor:
            y = arrivals.pop()()  # what was sent is not kept until the last stage has landed
            for plan in rest:
                y = _begin(plan, self.group, y, self.spaced)()
            return _shaped(y, self.codomain.local_shape)

        return land


def _sum_by_parts(first: Plan, second: Plan, group: transport.Group, x: Tensor) -> Tensor:
    """A sum in two exchanges; the part that this worker sums up lies in the output at once."""
    y = x.new_empty(second.target_shape)
    worker = transport.this_worker()
    own = next((_part(y, piece) for piece in second.takes if piece.peer == worker), y[:0])
    _exchanged(first, group, x, None, own)
    if not second.silent:
        sends = [Parcel(piece.peer, _part(own, piece)) for piece in second.gives]
        arrivals = [Arrival(piece.peer, _part(y, piece)) for piece in second.arrives]
        group.exchange_at_once(sends, arrivals, x.device, second.dense)
    return y


def _exchanged(
    plan: Plan,
    group: transport.Group,
    x: Tensor,
    spaced: int | None,
    room: Tensor | None = None,
) -> Tensor:
    """The output of one exchange."""
    if plan.stays:
        return x.clone(memory_format=torch.contiguous_format)
    y, sends, arrivals = _packed(plan, x, spaced, room)
    if plan.silent:
        _land(sends, arrivals)
    else:
        group.exchange_at_once(sends, arrivals, x.device, plan.dense)
    return y


def _begin(
    plan: Plan, group: transport.Group, x: Tensor, spaced: int | None
) -> Callable[[], Tensor]:
    """One exchange: send what others need; the result puts what arrives into its place."""
    if plan.stays or plan.silent:
        done = _exchanged(plan, group, x, spaced)
        return lambda: done
    y, sends, arrivals = _packed(plan, x, spaced)
    wait = group.exchange(sends, arrivals, x.device, plan.dense)

    def arrive() -> Tensor:
        wait()
        return y

    return arrive


def _packed(
    plan: Plan, x: Tensor, spaced: int | None, room: Tensor | None = None
) -> tuple[Tensor, list[Parcel], list[Arrival]]:
    """Room for the output, what leaves the input, and where in the room belongs what comes."""
    x = _shaped(x, plan.source_shape)
    y = _room(x, plan.target_shape, spaced) if room is None else room
    if not plan.fills:
        y.zero_()
    sends = [Parcel(piece.peer, _part(x, piece), not plan.once) for piece in plan.leaves]
    arrivals = [Arrival(piece.peer, _part(y, piece), adds) for piece, adds in plan.lands]
    return y, sends, arrivals


def _land(sends: list[Parcel], arrivals: list[Arrival]) -> None:
    """Put what stays on this worker into its place."""
    for arrival in arrivals:
        arrival.land(sends[0].tensor)


def _room(like: Tensor, shape: Shape, spaced: int | None) -> Tensor:
    """An empty tensor, its slices along the dimension `spaced` not at large powers of two."""
    if spaced is None or not prod(shape):
        return like.new_empty(shape)
    inner = prod(shape[spaced + 1 :])
    if inner * like.element_size() % STEP:
        return like.new_empty(shape)
    length = inner + GAP // like.element_size()
    outer = shape[: spaced + 1]
    flat = like.new_empty((prod(outer), length))
    return flat[:, :inner].view(shape)


def _part(x: Tensor, piece: Piece) -> Tensor:
    return x if x.shape == piece.shape else x[piece.region]


def _shaped(x: Tensor, shape: Shape) -> Tensor:
    return x if x.shape == shape else x.reshape(shape)
