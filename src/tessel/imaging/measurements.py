"""DistributedMeasurements: measurements, each stored on the worker that has its operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index as as_int
from typing import Any

import torch
from torch import Tensor

from tessel import transport
from tessel.core import anchored_zeros
from tessel.imaging.context import DistributedContext
from tessel.imaging.parameters import (
    WAY_OUT,
    Copies,
    anchor_of,
    both,
    check_common,
    computing_with,
    in_common,
    learned,
    leaves_of,
    tensors_held_by,
    unshared_leaf,
)
from tessel.imaging.problems import made_by_all

_WAY_OUT = (
    f"{WAY_OUT}; values computed from a shared tensor beforehand, such as views, must be computed "
    "in the factory"
)


class LocalTensors(list[Tensor]):
    """One tensor for each item of this worker, in the order of its local indices.

    Sums, differences and multiples are taken item by item. A worker without items has none;
    `anchor` keeps the tensors that they would depend on, so that it still takes part in a backward
    pass. With several workers, combining all items with one tensor that needs a gradient raises,
    since each worker would get a part of it; the gradient of `tessel.distributed.copy(tensor)` is
    summed over them.

    >>> import torch
    >>> LocalTensors([torch.ones(2)]) - LocalTensors([torch.ones(2)]) * 3
    [tensor([-2., -2.])]
    """

    def __init__(self, items: Iterable[Tensor] = (), anchor: Tensor | None = None) -> None:
        super().__init__(items)
        self.anchor = anchor_of(items) if anchor is None else anchor

    def map(self, function: Callable[[Tensor], Tensor]) -> LocalTensors:
        """Apply a function to each item."""
        return LocalTensors(map(function, self), self.anchor)

    def __add__(self, other: Any) -> LocalTensors:  # type: ignore[override]
        return self._with(other, torch.add)

    def __sub__(self, other: Any) -> LocalTensors:
        return self._with(other, torch.sub)

    def __mul__(self, other: Any) -> LocalTensors:
        return self._with(other, torch.mul)

    __rmul__ = __mul__  # a number times measurements does not repeat the list

    def __truediv__(self, other: Any) -> LocalTensors:
        return self._with(other, torch.div)

    def __neg__(self) -> LocalTensors:
        return self.map(torch.neg)

    def _with(self, other: Any, function: Callable[..., Tensor]) -> LocalTensors:
        if isinstance(other, Sequence):
            if len(other) != len(self):
                raise ValueError(f"expected {len(self)} tensors, got {len(other)}")
            # A worker without items has no results either, but keeps the anchor for gradients.
            pairs = zip(self, other, strict=True)
            anchor = both(self.anchor, anchor_of(other))
            return LocalTensors((function(a, b) for a, b in pairs), anchor)
        anchor = self.anchor
        if isinstance(other, Tensor) and other.requires_grad and torch.is_grad_enabled():
            # A gradient would go to a tensor that other workers also use.
            leaf = unshared_leaf(other) if transport.num_workers() > 1 else None
            if leaf is not None:
                raise ValueError(
                    "the measurements of one worker are combined with a tensor whose gradient "
                    f"flows to a tensor of shape {tuple(leaf.shape)}: each worker would compute "
                    "only a part of the gradient; pass tessel.distributed.copy(tensor), which "
                    "sums it over all workers, or a list with one tensor for each measurement"
                )
            anchor = both(anchor, anchored_zeros((), other))
        return LocalTensors((function(each, other) for each in self), anchor)


class DistributedMeasurements:
    """Measurements y_0, …, y_{N−1}, each on the worker that has the operator of the same number.

    Args:
        ctx: the workers.
        num_items: the number N of measurements.
        factory: `factory(i, device, shared)` returns measurement i; called on its worker only. Its
            random numbers depend on the seed of the context and on i; without a seed, on a number
            that worker 0 draws, and on i.
        shared: objects that all of them may use, by name. Tensors and modules in it that need
            gradients get that of all measurements, on every worker. If measurements of several
            workers depend on another tensor that needs one, ValueError is raised.
        physics: the operators, if the image is in parts: all workers that have a part of an
            operator have a part of its measurement.

    >>> import torch
    >>> from tessel.imaging import DistributedContext, DistributedMeasurements
    >>> with DistributedContext() as ctx:
    ...     DistributedMeasurements(ctx, 2, lambda i, device, shared: torch.full((1,), i)).local
    [tensor([0]), tensor([1])]
    """

    def __init__(
        self,
        ctx: DistributedContext,
        num_items: int | None = None,
        factory: Callable[[int, torch.device, Mapping[str, Any]], Tensor] | None = None,
        shared: Mapping[str, Any] | None = None,
        physics: Any = None,
    ) -> None:
        name = type(self).__name__
        self.ctx = ctx
        self.num_items = checked_count(name, "num_items", num_items, factory)
        seed = ctx.seed_for(f"{name}(num_items={self.num_items})")
        self.shared = dict(shared or {})
        if physics is not None:
            check_counts(physics.num_ops, self.num_items)
        self.local_indices = (
            ctx.local_indices(self.num_items) if physics is None else physics.local_indices
        )
        held, copies = leaves_of(tensors_held_by((factory, self.shared))), Copies()
        # Copies of shared tensors, whose gradients are summed over all workers.
        copies.add(learned(self.shared), ctx.partition)

        def part(position: int, i: int) -> Tensor:
            with ctx.drawing(i, seed=seed):  # the same noise on any number of workers
                made: Any = factory(i, ctx.device, self.shared)  # type: ignore[misc]
            if not isinstance(made, Tensor):
                raise ValueError(f"{name}: factory({i}, …) must return a tensor, got {made!r}")
            made = made.to(ctx.device)
            return made if physics is None else physics.part_of(position, made)

        with computing_with(copies, (self.shared, held)) as anchor:
            made = made_by_all(
                ctx,
                f"the measurements of {name}(num_items={self.num_items})",
                lambda: [part(*each) for each in enumerate(self.local_indices)],
            )
        self.local = LocalTensors(made, anchor)
        # Workers that hold a part of a measurement each get a part of its gradient. Leaves behind
        # copies are not found here; others count even if they are in `shared`.
        common = in_common(ctx, held, f"worker {ctx.rank}", leaves_of(self.local))
        check_common(name, common, (), _WAY_OUT)

    def __len__(self) -> int:
        return self.num_items

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """The measurements of this worker, each with its number."""
        return iter(zip(self.local_indices, self.local, strict=True))

    def __getitem__(self, item: int) -> Tensor:
        """Measurement `item`, which must be on this worker."""
        if item not in self.local_indices:
            raise IndexError(
                f"{self!r}: worker {self.ctx.rank} has the measurements {self.local_indices}, "
                f"not {item}"
            )
        return self.local[self.local_indices.index(item)]

    def __repr__(self) -> str:
        workers = self.ctx.world_size
        return f"{type(self).__name__}({self.num_items} measurements over {workers} workers)"


def checked_count(name: str, what: str, count: int | None, factory: Any) -> int:
    """The number of items that a factory makes; ValueError for a factory without a count."""
    if not callable(factory):
        raise ValueError(
            f"{name}: factory must be a function of (i, device, shared), got {factory!r}"
        )
    if count is None:
        raise ValueError(
            f"{name}: pass {what}, the number of objects that factory={factory!r} creates; got "
            f"{what}={count}"
        )
    if as_int(count) < 1:
        raise ValueError(f"{name}: {what} must be 1 or more, got {count}")
    return as_int(count)


def check_counts(operators: int, measurements: int) -> None:
    """Raise ValueError unless there are as many measurements as operators."""
    if operators != measurements:
        raise ValueError(
            f"each operator needs its measurement: got {operators} physics operators and "
            f"{measurements} measurements"
        )
