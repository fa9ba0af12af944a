"""The halo: what a worker reads of others, without the part that it has itself.

A move to wider boxes copies each worker's own part into them. Where that part can be used where it
is, only what lies around it need travel, and it may travel while the worker computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from torch import Tensor

from tessel import transport
from tessel.core import boxes
from tessel.core.agreement import in_transform
from tessel.core.boxes import Box, Region
from tessel.core.context import is_compiling
from tessel.core.layout import Layout, Shape
from tessel.core.linop import LinearOperator, record, record_several
from tessel.core.move import Apart
from tessel.core.plan import Plan, plan

ArrivedParts = dict[int, Tensor]  # by worker


@dataclass(frozen=True)
class HaloBox:
    """A box of values of others, with room for zeros around it.

    Attributes:
        origin: the global index of its first element, which may lie outside of the tensor.
        shape: of the strip.
        box: where it has values, in global indices.
    """

    origin: tuple[int, ...]
    shape: Shape
    box: Box

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def region(self, part: Box) -> Region:
        """Where a global box lies in the strip."""
        return tuple(
            slice(start - first, stop - first)
            for (start, stop), first in zip(part, self.origin, strict=True)
        )


class Halo(LinearOperator):
    """Bring every worker the strips around its part, one after the other in a flat tensor.

    Forward:  y_s[i] = x_owner(i)[i] for i in the strips of s.    Adjoint:  x_r[i] = Σ_s y_s[i].

    Args:
        source: where the tensor lies.
        read: what each worker reads, its own part and what lies around it.
        strips: for each worker, in the order of the partition, disjoint strips of what it reads
            and does not have.
    """

    def __init__(
        self, source: Layout, read: Layout, strips: tuple[tuple[HaloBox, ...], ...]
    ) -> None:
        self.domain, self.read, self.strips = source, read, strips
        partition = source.partition
        lengths = [(sum(strip.numel for strip in each),) for each in strips]
        self.codomain = Layout.blocks_along(partition, tuple(range(partition.dim)), lengths)
        self.prepare()

    @cached_property
    def own_strips(self) -> tuple[HaloBox, ...]:
        """The strips of this worker."""
        place = self.domain.partition.rank
        return () if place is None else self.strips[place]

    def split(self, flat: Tensor) -> list[Tensor]:
        """The strips that lie one after the other in a flat tensor."""
        parts = flat.split([strip.numel for strip in self.own_strips]) if self.own_strips else ()
        return [part.view(s.shape) for part, s in zip(parts, self.own_strips, strict=True)]

    def _apply(self, x: Tensor) -> Tensor:
        return self.finish(self.start(x)(), x)

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        return self.finish_adjoint(self.start_adjoint(y)(), y)

    def start(self, x: Tensor) -> Callable[[], ArrivedParts]:
        """Send what others read of this part; the result waits for what comes."""
        return _by_peer(self._there, x)

    def finish(self, arrived: ArrivedParts, like: Tensor) -> Tensor:
        """Put what came into the strips."""
        flat = like.new_zeros(self.codomain.local_shape)  # as is what lies outside of the tensor
        views = self.split(flat)
        for peer, strip, there, here in self._copies:
            views[strip][there].copy_(arrived[peer][here])
        return flat

    def start_adjoint(self, y: Tensor) -> Callable[[], ArrivedParts]:
        """Send what the strips hold back to where it came from."""
        # Zeros: of what a peer sends, forward, the strips may leave something out.
        arrives = self._plan.arrives
        flat = y.new_zeros(sum(piece.numel for piece in arrives))
        parts = flat.split([piece.numel for piece in arrives]) if arrives else ()
        sends = {piece.peer: p.view(piece.shape) for piece, p in zip(arrives, parts, strict=True)}
        views = self.split(y.contiguous())
        for peer, strip, there, here in self._copies:
            sends[peer][here].copy_(views[strip][there])
        return _by_peer(self._back, flat)

    def finish_adjoint(self, arrived: ArrivedParts, like: Tensor) -> Tensor:
        """What came, where it belongs, and zeros elsewhere."""
        return self.add_arrived(arrived, like.new_zeros(self.domain.local_shape))

    def add_arrived(self, arrived: ArrivedParts, x: Tensor) -> Tensor:
        """Add what came to where it belongs, in place."""
        # Added, not copied: the strips of two workers may hold the same index. And in the order of
        # the plan, whoever answers first, so that sums are the same in every run.
        for piece in self._plan.gives:
            x[piece.region].add_(arrived[piece.peer])
        return x

    @cached_property
    def _plan(self) -> Plan:
        return plan(self.domain, self.read, transport.this_worker(), transport.hosts())

    @cached_property
    def _copies(self) -> list[tuple[int, int, Region, Region]]:
        """(peer, number of the strip, where in the strip, where in what the peer sends)."""
        box = self.read.box()
        if box is None:
            return []
        found = []
        for piece in self._plan.arrives:
            start = [part.start + first for part, (first, _) in zip(piece.region, box, strict=True)]
            sent: Box = tuple((a, a + n) for a, n in zip(start, piece.shape, strict=True))
            for number, strip in enumerate(self.own_strips):
                part = boxes.intersection(sent, strip.box)
                if part is not None:
                    found.append((piece.peer, number, strip.region(part), boxes.within(part, sent)))
        return found

    @cached_property
    def _there(self) -> Apart:
        """The messages, forward: from the part."""
        return Apart(self.group, self._plan.gives, self._plan.arrives, False)

    @cached_property
    def _back(self) -> Apart:
        """Those of the adjoint: from a flat tensor that has what goes to each peer, in order."""
        arrives = self._plan.arrives
        ends = accumulate((piece.numel for piece in arrives), initial=0)
        gives = [
            replace(piece, region=(slice(*span),))
            for piece, span in zip(arrives, pairwise(ends), strict=True)
        ]
        return Apart(self.group, gives, self._plan.gives, False)


def _by_peer(exchange: Apart, x: Tensor) -> Callable[[], ArrivedParts]:
    wait = exchange.start(x)
    return lambda: dict(zip(exchange.peers, wait(), strict=True))


class AsyncHalo:
    """One application of a halo in two steps, so that a worker can compute while data travels.

    `start(x)` sends; `wait(token)` gives the strips. In the backward pass the adjoint starts where
    the strips were waited for and is waited for where the input was sent: what was computed between
    the two is derived between them.
    """

    def __init__(self, halo: Halo) -> None:
        there: _InTransit = deque()
        back: _InTransit = deque()
        self._send, self._wait = (_HaloStep(halo, there, back, waits) for waits in (False, True))

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Send; x, for one use meanwhile, and a token for what is on its way.

        What comes back in a backward pass is added to the gradient of this use where it lies. So
        the gradient must be made for it, as that of a convolution is.
        """
        if in_transform() or is_compiling():
            return x, record(self._send, x)
        own, token = record_several(_HaloStepInPlace(self._send, x.new_empty(0)), (x,))
        assert own is not None and token is not None
        return own, token

    def wait(self, token: Tensor) -> Tensor:
        """The strips, one after the other in a flat tensor, when they have come."""
        return record(self._wait, token)


_InTransit = deque[
    Callable[[], ArrivedParts]
]  # what is on its way: in forward mode a tangent follows


class _HaloStep(LinearOperator):
    """A step of a halo exchange: send and give a token, or wait and put what came into its place.

    The adjoint of sending is to wait in the adjoint exchange, and the other way round.

    Args:
        halo: what is exchanged.
        there: what this exchange has sent and not waited for.
        back: the same of its adjoint.
        waits: whether this is the second step.
        adjoint: whether it is one of the adjoint exchange.
    """

    def __init__(
        self, halo: Halo, there: _InTransit, back: _InTransit, waits: bool, adjoint: bool = False
    ) -> None:
        self.halo, self.there, self.back = halo, there, back
        self.waits, self.adjoint = waits, adjoint
        token = halo.codomain  # whose values nobody reads
        end = halo.codomain if waits != adjoint else halo.domain
        self.domain, self.codomain = (token, end) if waits else (end, token)
        self._group = halo.group

    def _apply(self, x: Tensor) -> Tensor:
        halo = self.halo
        if not self.waits:
            self.there.append(halo.start_adjoint(x) if self.adjoint else halo.start(x))
            return x.new_empty(self.codomain.local_shape)
        arrived = self.there.popleft()()
        return halo.finish_adjoint(arrived, x) if self.adjoint else halo.finish(arrived, x)

    @cached_property
    def H(self) -> _HaloStep:
        return _HaloStep(self.halo, self.back, self.there, not self.waits, not self.adjoint)


@dataclass(frozen=True)
class _HaloStepInPlace:
    """A step for a tensor that is also used where it is: x to x and a token.

    Its adjoint takes x and a token to x plus what came, as `Halo.add_arrived` does: it needs
    neither a tensor of zeros with what came in it nor a sum of two whole tensors.
    """

    step: _HaloStep
    like: Tensor

    @property
    def group(self) -> transport.Group:
        return self.step.group

    @property
    def H(self) -> _HaloStepInPlace:
        return _HaloStepInPlace(self.step.H, self.like)

    def _apply(self, *xs: Tensor | None) -> tuple[Tensor | None, ...]:
        if not self.step.waits:
            (x,) = xs
            assert x is not None
            return x.detach(), self.step._apply(x)
        x, token = xs
        assert token is not None
        if x is None:
            return (self.step._apply(token),)
        # derived again, x may be kept elsewhere; else it was made for this alone
        total = x.clone() if x.requires_grad else x
        return (self.step.halo.add_arrived(self.step.there.popleft()(), total),)
