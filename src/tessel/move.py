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

# what torch does not add, or not as numbers
UNSUMMABLE = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
Arrived = dict[int, Tensor | None]  # by worker; None for what is in its place already
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
        for plan in self.route:
            x = _carry_out(plan, self.group, x, self.spaced)
        return _shaped(x, self.codomain.local_shape)


def _carry_out(plan: Plan, group: transport.Group, x: Tensor, spaced: int | None = None) -> Tensor:
    """One exchange: pack what others need, let it travel, put together what arrived."""
    if plan.stays:
        return x.clone(memory_format=torch.contiguous_format)
    x = _shaped(x, plan.source_shape)
    y = _room(x, plan.target_shape, spaced)
    if not plan.fills:
        y.zero_()
    arrive = _depart(plan, group, x, y)
    own = [piece for piece in plan.takes if plan.once and piece.peer not in plan.peers]
    for piece in own:  # while the rest is on its way
        y[piece.region].copy_(x[plan.kept])
    arrived = arrive()
    for order, piece in enumerate(plan.takes):
        part = arrived[piece.peer] if piece.peer in arrived else x[plan.kept]
        if part is not None and piece not in own:
            copies = plan.once or (plan.fills and order == 0)
            (torch.Tensor.copy_ if copies else torch.Tensor.add_)(y[piece.region], part)
    return y


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


def _depart(plan: Plan, group: transport.Group, x: Tensor, y: Tensor) -> Callable[[], Arrived]:
    """Send what others need; the result waits for what they send."""
    if plan.silent:
        return dict
    if x.is_cuda or (plan.dense and not transport.is_tagged()):  # a collective has no tag
        arrived = _all_to_all(plan, group, x)
        return lambda: arrived
    return _point_to_point(plan, group, x, y)


def _all_to_all(plan: Plan, group: transport.Group, x: Tensor) -> Arrived:
    """One collective, for when everybody has something for everybody."""
    send = x.new_empty(sum(piece.numel for piece in plan.gives))
    for piece, part in zip(plan.gives, _parts(send, plan.gives), strict=True):
        part.copy_(x[piece.region])
    gives = {piece.peer: piece.numel for piece in plan.gives}
    takes = {piece.peer: piece.numel for piece in plan.arrives}
    received = group.all_to_all(
        send,
        [gives.get(worker, 0) for worker in group.workers],
        [takes.get(worker, 0) for worker in group.workers],
    )
    parts = _parts(received, plan.arrives)
    return {piece.peer: part for piece, part in zip(plan.arrives, parts, strict=True)}


def _parts(flat: Tensor, pieces: tuple[Piece, ...]) -> list[Tensor]:
    """The pieces that lie one after the other in a flat tensor."""
    lengths = [piece.numel for piece in pieces]
    parts = flat.split(lengths) if pieces else ()
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


def _point_to_point(
    plan: Plan, group: transport.Group, x: Tensor, y: Tensor
) -> Callable[[], Arrived]:
    """Messages between those who have something for each other, received in place if possible."""
    solid = plan.once and y.is_contiguous()
    in_place = {piece.peer for piece in plan.arrives if solid and piece.solid}
    buffers = {
        piece.peer: y[piece.region] if piece.peer in in_place else x.new_empty(piece.shape)
        for piece in plan.arrives
    }
    sends = [(piece.peer, _packed(x, piece)) for piece in plan.gives]
    wait = group.exchange(sends, list(buffers.items()))

    def arrive() -> Arrived:
        wait()
        sends.clear()  # kept until here: the messages are read from them
        return {peer: None if peer in in_place else buffer for peer, buffer in buffers.items()}

    return arrive


def _packed(x: Tensor, piece: Piece) -> Tensor:
    part = x[piece.region]
    if part.is_conj() or part.is_neg():
        part = part.resolve_conj().resolve_neg()
    return part.contiguous()


def _shaped(x: Tensor, shape: Shape) -> Tensor:
    return x if x.shape == shape else x.reshape(shape)
