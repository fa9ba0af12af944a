"""Shared values: one logical value that several workers store, and how they use it.

Parameters are shared by all workers of a layer. A worker that uses one for its own part of the
work uses a separate copy: nothing moves, and the adjoint sums the gradients of the copies. A
bucket does so for several values at once, and sums in one exchange. A loss is the opposite:
separate shares are summed to one shared value, and the adjoint moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod
from typing import Any, Protocol, Self, overload

import torch
from torch import Tensor

from tessel import transport
from tessel.core import boxes
from tessel.core.agreement import TensorMeta
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.linop import LinearOperator, record_several
from tessel.core.memory_format import from_a_row, in_a_row
from tessel.core.move import Move
from tessel.core.numbers import constant
from tessel.core.partition import Partition
from tessel.core.plan import LARGE
from tessel.transport import kept_in_job


class Buckets(Protocol):
    """The interface that knows which values are used together."""

    def alias(self, value: Tensor, use: Replicate) -> Tensor | None:
        """A value of a bucket for this use of it; None if it is in no bucket."""
        ...


# those of the call that is running
current_buckets: ContextVar[Buckets | None] = ContextVar("current_buckets", default=None)


class Replicate(LinearOperator):
    """Let every worker use a shared value as a separate copy.

    Forward:  y_k = x for all k, where nothing moves or is copied.    Adjoint:  x = Σ_k y_k.

    Args:
        domain: the layout of the shared value.
        codomain: the same boxes, with separate copies along some axes.
    """

    def __init__(self, domain: Layout, codomain: Layout) -> None:
        self.domain, self.codomain = domain, codomain
        self._move = Move(domain, codomain)
        self.prepare()

    def apply(self, x: Tensor, meta: TensorMeta | None = None) -> Tensor:
        found = self.from_bucket(x) if meta is None else None
        return super().apply(x, meta) if found is None else found

    def from_bucket(self, x: Tensor) -> Tensor | None:
        """The value for this use if it is in a bucket, whose gradients travel together."""
        current = current_buckets.get()
        return None if current is None else current.alias(x, self)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes along which the uses are separate."""
        ours, theirs = self.domain, self.codomain
        sizes = ours.partition.shape
        return tuple(a for a in ours.shared if a not in theirs.shared and sizes[a] > 1)

    @cached_property
    def is_whole(self) -> bool:
        """Whether every worker has all of the value."""
        shared = len(self.domain.shared) == self.domain.partition.dim
        return shared and all(len(cut.intervals) == 1 for cut in self.domain.cuts)

    def _apply(self, x: Tensor) -> Tensor:
        return x.detach()  # the same memory, but not the argument itself, which would be cloned

    @property
    def H(self) -> LinearOperator:
        return self._move.H


def replicate(value: Tensor, layout: Layout, separate: Iterable[int]) -> Tensor:
    """Use a shared value in separate computations along the axes `separate`."""
    use = replication(layout, tuple(separate))
    return value if use is None else use.apply(value)


@kept_in_job
def replication(layout: Layout, separate: tuple[int, ...]) -> Replicate | None:
    """The use of a shared value along the axes `separate`; None if no other worker uses it."""
    sizes = layout.partition.shape
    if not any(sizes[axis] > 1 and axis in layout.shared for axis in separate):
        return None
    shared = tuple(axis for axis in layout.shared if axis not in separate or sizes[axis] == 1)
    return Replicate(layout, replace(layout, shared=shared))


@overload
def used(parameter: Tensor, layout: Layout, shared: tuple[int, ...] = ()) -> Tensor: ...
@overload
def used(
    parameter: Tensor | None, layout: Layout, shared: tuple[int, ...] = ()
) -> Tensor | None: ...
def used(parameter: Tensor | None, layout: Layout, shared: tuple[int, ...] = ()) -> Tensor | None:
    """A parameter that all workers of `layout` share, for use on each worker's part.

    Along the axes that split the tensor its uses are separate, and their gradients are summed;
    along those where the tensor is shared, or that are named in `shared`, each worker does the
    same work.
    """
    if parameter is None:
        return None
    use = _use(layout, parameter.shape, shared)
    return parameter if use is None else use.apply(parameter)


def used_together(
    parameters: Sequence[Tensor], layout: Layout, shared: tuple[int, ...] = ()
) -> list[Tensor]:
    """The same parameters as `used` for several of one shape, whose gradients travel together."""
    use = _use(layout, parameters[0].shape, shared)
    if use is None:
        return list(parameters)
    found = [use.from_bucket(each) for each in parameters]
    if all(each is None for each in found):
        # without a gradient nothing will ever travel, and forward nothing does
        if not (torch.is_grad_enabled() and any(each.requires_grad for each in parameters)):
            return list(parameters)
        return list(used(torch.stack(list(parameters)), layout, shared).unbind())
    pairs = zip(parameters, found, strict=True)
    return [use.apply(p) if each is None else each for p, each in pairs]


@kept_in_job
def shared_whole(partition: Partition, shape: Shape) -> Layout:
    """The layout of one value that all workers have whole."""
    return Layout.whole(partition, shape, shared=True)


@kept_in_job
def copying(partition: Partition, shape: Shape) -> Replicate:
    """The operator from a shared value to a copy for each worker; it also marks their graphs."""
    shared = shared_whole(partition, shape)
    return Replicate(shared, replace(shared, shared=()))


@kept_in_job
def _use(layout: Layout, shape: Shape, shared: tuple[int, ...]) -> Replicate | None:
    """The use of a value of this shape; None if all workers that have it do the same with it."""
    sizes, alike = layout.partition.shape, {*layout.shared, *shared}
    separate = tuple(axis for axis, n in enumerate(sizes) if n > 1 and axis not in alike)
    return replication(shared_whole(layout.partition, shape), separate)


class Sum:
    """The sum of flat tensors over workers, in two steps: other messages may travel in between.

    Copies travel, and each worker adds those of its part, in the order of the workers. (Values for
    a move that adds have to wait for their turn, and block others.) They are added in the memory of
    one of them, so that besides a tensor and the received copies there is never a third.

    Args:
        partition: the workers.
        axes: the axes along which tensors are separate; along others workers have the same.
        length: the length of the tensors.
    """

    def __init__(self, partition: Partition, axes: tuple[int, ...], length: int) -> None:
        copies = prod(partition.shape[axis] for axis in axes)
        others = tuple(axis for axis in range(partition.dim) if axis not in axes)
        row, rows = Cut(axes, tuple((k, k + 1) for k in range(copies))), Cut.whole(copies)
        whole, part = Cut.whole(length), Cut(axes, boxes.balanced(length, copies))

        def layout(*cuts: Cut) -> Layout:
            shape = (copies, length)[-len(cuts) :]
            return Layout(partition, shape, cuts, others)

        swaps = copies == 2 and length < LARGE  # whole tensors, as moves do
        self._scatter = Move(layout(row, whole), layout(rows, whole if swaps else part))
        self._collect = None if swaps else Move(layout(part), layout(whole))
        # the workers that sum by one all-reduce between GPUs: all, each with a separate copy
        self._sums_all = copies == partition.size

    def start(self, x: Tensor, may_change: bool = False) -> Callable[[], Tensor]:
        """Send; the result waits, once, and returns the sum, which may be in the memory of x.

        The sent values are freed before other memory for the sum is allocated.
        """
        group = self._scatter.group
        if self._sums_all and group.adds_on_devices(x):
            total = x if may_change else x.clone()
            summed = group.all_reduce(total)

            def arrived() -> Tensor:
                summed()
                return total

            return arrived
        if len(self._scatter.stages) > 1 or (self._collect and len(self._collect.stages) > 1):
            # Values cross once between hosts: whole outputs go from stage to stage.
            arrive_whole = self._scatter.start(x.unsqueeze(0))

            def collect() -> Tensor:
                # alone in its memory: the rows are not kept
                found = _add([*arrive_whole().unbind()], 0).clone()
                return found if self._collect is None else self._collect.start(found)()

            return collect
        pending = [self._scatter.start_apart(x.unsqueeze(0))]
        kept, like = [x] * may_change, x.new_empty(0)

        def wait() -> Tensor:
            rows = [each.squeeze(0) for each in pending.pop()()]
            # The received rows belong to this worker; so does the own row if it may change.
            own = self._own_row
            place = own if kept and self._collect is not None else int(own == 0)
            # with fewer values than workers some workers add none
            found = _add(rows, place) if rows else like
            rows.clear()
            if self._collect is None:
                return found
            if kept:  # it is added in place
                return self._collect.complete(kept.pop())
            y = like.new_empty(self._collect.codomain.local_shape)
            self._collect.stages[0].own(y).copy_(found)
            del found
            return self._collect.complete(y)

        return wait

    @cached_property
    def _own_row(self) -> int:
        """The index of this worker's own row among the rows that are added."""
        (stage,) = self._scatter.stages
        peers = [piece.peer for piece in stage.plan.takes]
        worker = transport.this_worker()
        return peers.index(worker) if worker in peers else 0


def _add(rows: Sequence[Tensor], place: int) -> Tensor:
    """The sum of rows, one after the other, in the memory of one of them.

    The rows before this one may be changed.
    """
    total = rows[0]
    for number, each in enumerate(rows[1:], 1):
        total = torch.add(total, each, out=rows[place] if number >= place else total)
    return total


_kept_sum = kept_in_job(Sum)
TensorsOrNone = tuple[Tensor | None, ...]
# in a row; whether it is the bucket's own; whether all exist
PackedGradients = tuple[Tensor, bool, bool]


class GradientBucket:
    """Let every worker use several shared values as separate copies.

    Forward:  y_ik = x_i for all i and k, where nothing moves.    Adjoint:  x_i = Σ_k y_ik, for all
    i in one exchange, which begins when there is a gradient of every y_i that a loss depends on.
    Computations between `prepare` and `use` are differentiated while it travels.

    The workers tell each other which gradients they have: a value that no loss depends on gets
    none, rather than zeros.

    Args:
        partition: the workers, all of whom have all values.
        axes: along which uses are separate.
        shapes: the shapes of the values.
        like: a tensor with their dtype and device.
        lasts: whether the memory format of each value is channels-last, the same on all workers:
            gradients of such a value have it, too, and are sent in this order. By default none has
            it.
    """

    def __init__(
        self,
        partition: Partition,
        axes: tuple[int, ...],
        shapes: Sequence[Shape],
        like: Tensor,
        lasts: Sequence[bool] = (),
    ) -> None:
        self.shapes = tuple(shapes)
        self._lasts = tuple(lasts) or (False,) * len(self.shapes)
        self.like = like.detach()
        self._lengths = [prod(shape) for shape in self.shapes]
        flags = len(self.shapes) if len(self.shapes) > 1 else 0
        self._sum = _kept_sum(partition, axes, sum(self._lengths) + flags)
        self.group = partition.prepare()

    def prepare(self, values: Sequence[Tensor]) -> Tensor:
        """The token that `use` takes. In a backward pass the sums are waited for here."""
        (token,) = record_several(_BucketStep(self, "enter"), values)
        assert token is not None
        return token

    def use(self, token: Tensor) -> tuple[Tensor, ...]:
        """The values, for use on each worker. In a backward pass the sums begin here."""
        (token_for_use,) = record_several(_BucketStep(self, "pass"), (token,))
        assert token_for_use is not None
        found = record_several(_BucketStep(self, "leave"), (token_for_use,))
        return tuple(each for each in found if each is not None)

    def pack(self, grads: TensorsOrNone) -> PackedGradients:
        """Gradients in a row, with flags of those that exist."""
        is_all = all(grad is not None for grad in grads)
        flat = [
            self.like.new_zeros(length) if grad is None else in_a_row(grad, last)
            for grad, length, last in zip(grads, self._lengths, self._lasts, strict=True)
        ]
        is_ours = len(flat) > 1
        if is_ours:  # a single gradient travels as it is, without a copy and a flag
            # as numbers of the same dtype, so that they travel with the gradients
            flags = tuple(float(grad is not None) for grad in grads)
            flat = [torch.cat([*flat, constant(flags, self.like.dtype, self.like.device)])]
        return flat[0], is_ours, is_all

    def start(self, packed: PackedGradients) -> Callable[[], TensorsOrNone]:
        """Send gradients; the result waits for the sums."""
        row, is_ours, is_all = packed
        wait = self._sum.start(row, is_ours)

        def arrive() -> TensorsOrNone:
            summed = wait()
            *parts, said = summed.split([*self._lengths, summed.numel() - sum(self._lengths)])
            found = [*map(from_a_row, parts, self.shapes, self._lasts)]
            if is_all or not said.numel():  # no need to read them
                return tuple(found)
            there = said.ne(0).tolist()
            return tuple(part if flag else None for part, flag in zip(found, there, strict=True))

        return arrive


@dataclass(frozen=True)
class _BucketStep:
    """A step of a bucket, which is the adjoint of another.

    - "enter": values to a token. Nothing moves.
    - "pass": a token to another. Nothing moves.
    - "leave": a token to the values. Nothing moves.
    - "pack": gradients to a token, in a row.
    - "start": a token to another, while the row travels.
    - "wait": a token to the sums, when they have arrived.

    The data of a step belongs to the token that stands for it in the graph. A row is packed in a
    separate step: autograd keeps gradients to the end of a step, and memory for the received values
    is allocated in the next one, when the gradients are freed.
    """

    bucket: GradientBucket
    name: str

    @property
    def group(self) -> transport.Group:
        return self.bucket.group

    @property
    def H(self) -> _BucketStep:
        return _BucketStep(self.bucket, _ADJOINTS[self.name])

    @property
    def like(self) -> Tensor:
        return self.bucket.like

    def _apply(self, *xs: Tensor | None) -> TensorsOrNone:
        if self.name in ("enter", "pack"):
            return self._token(_detached(xs) if self.name == "enter" else self.bucket.pack(xs))
        (token,) = xs
        if token is None:  # no loss depends on the values
            return (None,) * (1 if self.name in ("pass", "start") else len(self.bucket.shapes))
        carried: Any = token.carried  # type: ignore[attr-defined]
        if self.name in ("pass", "start"):
            return self._token(carried if self.name == "pass" else self.bucket.start(carried))
        return _detached(carried) if self.name == "leave" else carried()

    def _token(self, carried: Any) -> TensorsOrNone:
        token: Any = self.like.new_empty(0)
        token.carried = carried
        return (token,)


_ADJOINTS = {"enter": "wait", "pass": "start", "leave": "pack"}
_ADJOINTS |= {adjoint: name for name, adjoint in _ADJOINTS.items()}


@dataclass(frozen=True)
class BucketInGraph:
    """The bucket of a graph, in which a movement is one node: all sums are made at once.

    Forward:  y_ik = x_i for all i and k, where nothing moves.    Adjoint:  x_i = Σ_k y_ik, for all
    i in one movement of all of them in a row.

    Args:
        row: how workers use the row.
        shapes: the shapes of the values.
        like: a tensor with their dtype and device.
        sums: whether this is the adjoint.
    """

    row: Replicate
    shapes: tuple[Shape, ...]
    like: Tensor
    sums: bool = False

    @classmethod
    def of(cls, partition: Partition, axes: tuple[int, ...], values: Sequence[Tensor]) -> Self:
        length = sum(each.numel() for each in values)
        row = replication(shared_whole(partition, (length,)), axes)
        assert row is not None
        return cls(row, tuple(tuple(each.shape) for each in values), values[0])

    def use(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The values, for use on each worker."""
        return tuple(each for each in record_several(self, values) if each is not None)

    @property
    def group(self) -> transport.Group:
        return self.row.group

    @property
    def H(self) -> BucketInGraph:
        return replace(self, sums=not self.sums)

    def _apply(self, *xs: Tensor | None) -> TensorsOrNone:
        if not self.sums:
            return _detached(xs)
        lengths = [prod(shape) for shape in self.shapes]
        # all of them on all workers: a worker without a gradient of a value sends zeros
        flat = [
            self.like.new_zeros(length) if x is None else x.reshape(-1)
            for x, length in zip(xs, lengths, strict=True)
        ]
        sums = self.row.H._apply(torch.cat(flat) if len(flat) > 1 else flat[0]).split(lengths)
        found = zip(xs, sums, self.shapes, strict=True)
        return tuple(None if x is None else each.view(shape) for x, each, shape in found)


def _detached(xs: TensorsOrNone) -> TensorsOrNone:
    """The same values as detached tensors."""
    return tuple(None if x is None else x.detach() for x in xs)


def total(share: Tensor, partition: Partition, shared: Iterable[int] = ()) -> Tensor:
    """The sum of all workers' shares as one shared value, which every worker may differentiate.

    Args:
        share: a tensor of the same shape on all workers.
        partition: the workers.
        shared: axes along which workers hold copies of one share, which counts once.
    """
    return _total(partition, tuple(share.shape), tuple(shared)).apply(share)


@kept_in_job
def _total(partition: Partition, shape: Shape, shared: tuple[int, ...]) -> Move:
    whole = [None] * len(shape)
    source = Layout.split(partition, shape, whole, shared)
    return Move(source, Layout.whole(partition, shape, shared=True))


def equalize(values: Iterable[Tensor | None], partition: Partition) -> None:
    """Copy the tensors of the first worker of the partition to all others, in place."""
    for value in values:
        if value is not None:
            layout = Layout.whole(partition, value.shape, shared=True)
            keep_part(value.detach(), layout, value.detach())


def keep_part(part: Tensor, layout: Layout, whole: Tensor) -> None:
    """Fill this worker's part of a tensor, in place, from the whole tensor of the first worker.

    Args:
        part: a plain tensor with the local shape of the layout.
        layout: the layout of the parts.
        whole: the whole tensor; only the first worker's counts.
    """
    partition = layout.partition
    if not partition.active or part.is_meta:
        return
    with torch.no_grad():
        if partition.size > 1:
            first = Partition(partition.ranks[:1], (1,) * partition.dim)
            move = Move(Layout.whole(first, layout.shape), layout)
            whole = move(whole if first.active else whole.new_empty(0))
        part.copy_(whole)


def anchored_zeros(shape: Shape, *inputs: Tensor | None) -> Tensor:
    """Zeros that depend on their inputs, so that the graphs of all workers are alike."""
    zeros = [each.reshape(-1)[:0].sum(dtype=each.dtype) for each in inputs if each is not None]
    # without a first number, which would turn booleans into integers
    return reduce(torch.add, zeros).expand(shape)
