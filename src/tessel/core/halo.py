"""The halo: the values that a worker reads from others, without its own part.

A move to wider boxes copies each worker's own part into them. Where that part can be used in
place, only its surroundings need to travel, and they may travel while the worker computes.
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
from tessel.core.boxes import Box, Region
from tessel.core.context import in_transform, is_compiling
from tessel.core.layout import Layout, Shape
from tessel.core.linop import LinearOperator, record, record_several
from tessel.core.move import Apart
from tessel.core.plan import Plan, plan

ArrivedParts = dict[int, Tensor]  # by worker


@dataclass(frozen=True)
class HaloBox:
    """A box of values of other workers, with room for zeros around it.

    Attributes:
        origin: the global index of its first element, which may lie outside of the tensor.
        shape: the shape of the strip.
        box: the part of it that has values, in global indices.
    """

    origin: tuple[int, ...]
    shape: Shape
    box: Box

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def region(self, part: Box) -> Region:
        """The position of a global box in the strip."""
        return tuple(
            slice(start - first, stop - first)
            for (start, stop), first in zip(part, self.origin, strict=True)
        )


class Halo(LinearOperator):
    """Bring every worker the strips around its part, one after the other in a flat tensor.

    Forward:  y_s[i] = x_owner(i)[i] for i in the strips of s.    Adjoint:  x_r[i] = Σ_s y_s[i].

    Args:
        source: the layout of the tensor.
        read: the layout that each worker reads, its own part and the surroundings.
        strips: for each worker, in the order of the partition, disjoint strips of `read`
            outside of its own part.
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
        """The strips of a flat tensor in which they are stored one after the other."""
        parts = flat.split([strip.numel for strip in self.own_strips]) if self.own_strips else ()
        return [part.view(s.shape) for part, s in zip(parts, self.own_strips, strict=True)]

    def _apply(self, x: Tensor) -> Tensor:
        return self.finish(self.start(x)(), x)

    def _apply_adjoint(self, y: Tensor) -> Tensor:
        return self.finish_adjoint(self.start_adjoint(y)(), y)

    def start(self, x: Tensor) -> Callable[[], ArrivedParts]:
        """Send the values of this part that others read; the result waits for the strips."""
        return _by_peer(self._there, x)

    def finish(self, arrived: ArrivedParts, like: Tensor) -> Tensor:
        """Copy the received values into the strips."""
        # zero where the strip is outside of the tensor
        flat = like.new_zeros(self.codomain.local_shape)
        views = self.split(flat)
        for peer, strip, there, here in self._copies:
            views[strip][there].copy_(arrived[peer][here])
        return flat

    def start_adjoint(self, y: Tensor) -> Callable[[], ArrivedParts]:
        """Send the values of the strips back to the workers that they came from."""
        # Zeros, since the strips may lack some of the values that a peer sends in the forward pass.
        arrives = self._plan.arrives
        flat = y.new_zeros(sum(piece.numel for piece in arrives))
        parts = flat.split([piece.numel for piece in arrives]) if arrives else ()
        sends = {piece.peer: p.view(piece.shape) for piece, p in zip(arrives, parts, strict=True)}
        views = self.split(y.contiguous())
        for peer, strip, there, here in self._copies:
            sends[peer][here].copy_(views[strip][there])
        return _by_peer(self._back, flat)

    def finish_adjoint(self, arrived: ArrivedParts, like: Tensor) -> Tensor:
        """The received values in their places, and zeros elsewhere."""
        return self.add_arrived(arrived, like.new_zeros(self.domain.local_shape))

    def add_arrived(self, arrived: ArrivedParts, x: Tensor) -> Tensor:
        """Add the received values in their places."""
        # Added, not copied: the strips of two workers may contain the same index. The order is that
        # of the plan, not of arrival, so that sums are the same in every run.
        for piece in self._plan.gives:
            x[piece.region].add_(arrived[piece.peer])
        return x

    @cached_property
    def _plan(self) -> Plan:
        return plan(self.domain, self.read, transport.this_worker(), transport.hosts())

    @cached_property
    def _copies(self) -> list[tuple[int, int, Region, Region]]:
        """(peer, number of the strip, region of the strip, region of the peer's message)."""
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
        """The messages of the adjoint, from a flat tensor with the values for each peer."""
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

    `start(x)` sends; `wait(token)` returns the strips. In the backward pass the adjoint starts
    where the strips were waited for and is waited for where the input was sent: operations between
    the two are differentiated in the meantime.
    """

    def __init__(self, halo: Halo) -> None:
        there: _InTransit = deque()
        back: _InTransit = deque()
        self._send, self._wait = (_HaloStep(halo, there, back, waits) for waits in (False, True))

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Send x; return x, for one use in the meantime, and a token for the messages in transit.

        In a backward pass the received values are added to the gradient of this use in place. So
        this gradient must be a tensor of its own, as that of a convolution is.
        """
        if in_transform() or is_compiling():
            return x, record(self._send, x)
        own, token = record_several(_HaloStepInPlace(self._send, x.new_empty(0)), (x,))
        assert own is not None and token is not None
        return own, token

    def wait(self, token: Tensor) -> Tensor:
        """The strips, one after the other in a flat tensor, when they have arrived."""
        return record(self._wait, token)


# messages in transit: several, since in forward mode those of a tangent follow
_InTransit = deque[Callable[[], ArrivedParts]]


class _HaloStep(LinearOperator):
    """A step of a halo exchange: send and return a token, or wait and fill the strips.

    The adjoint of sending is waiting in the adjoint exchange, and vice versa.

    Args:
        halo: the operator.
        there: the messages of this exchange that were sent and not waited for.
        back: those of its adjoint.
        waits: whether this is the second step.
        adjoint: whether it is a step of the adjoint exchange.
    """

    def __init__(
        self, halo: Halo, there: _InTransit, back: _InTransit, waits: bool, adjoint: bool = False
    ) -> None:
        self.halo, self.there, self.back = halo, there, back
        self.waits, self.adjoint = waits, adjoint
        # The token has the size of the strips, as tensors must fit the layouts of an operator; what
        # is in it does not matter.
        token = halo.codomain
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
    """A step for a tensor that is also used in place: from x to x and a token.

    Its adjoint maps x and a token to x plus the received values, as `Halo.add_arrived` does,
    without a tensor of zeros for these values, and without a sum of two whole tensors.
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
        # in a second derivative x may be kept elsewhere; otherwise it was made for this alone
        total = x.clone() if x.requires_grad else x
        return (self.step.halo.add_arrived(self.step.there.popleft()(), total),)
