"""DistributedSignal: the image to reconstruct, whole on every worker or in parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index as as_int

import torch
from torch import Tensor

from tessel.core import (
    Cut,
    Layout,
    Move,
    Partition,
    Shape,
    TensorMeta,
    agree,
    checksum_of,
    shared_whole,
)
from tessel.imaging.context import DistributedContext, drifted

Grid = Partition | Layout | Sequence[int]


class DistributedSignal:
    """A tensor that all workers reconstruct together.

    Without a partition every worker holds all of it: one shared value. With one, each worker holds
    its part. Either way `data` is this worker's tensor and `layout` its position in the whole.
    Workers that hold the same part hold the same numbers: `update_` ensures it.

    Args:
        ctx: the workers.
        shape: the global shape, as (batch, channels, height, width).
        dtype: the dtype of its values.
        partition: None for the whole signal on every worker. A partition whose axes split the last
            dimensions (one with two axes splits height and width), the shape of such a grid, or
            any layout of this shape.
        init: the first values, zeros if None. A tensor of the global shape; all workers get that of
            worker 0, and the others may pass None.

    >>> import torch
    >>> from tessel.imaging import DistributedContext, DistributedSignal
    >>> with DistributedContext() as ctx:
    ...     signal = DistributedSignal(ctx, (1, 1, 2, 2))
    ...     signal.update_(torch.ones(1, 1, 2, 2))
    ...     signal.norm(signal.data)
    tensor(2.)
    """

    def __init__(
        self,
        ctx: DistributedContext,
        shape: Iterable[int],
        dtype: torch.dtype = torch.float32,
        partition: Grid | None = None,
        init: Tensor | None = None,
    ) -> None:
        self.ctx = ctx
        self._shape: Shape = tuple(as_int(length) for length in shape)
        if not self._shape or min(self._shape) < 1:
            raise ValueError(
                "a signal needs at least one dimension, each of length at least 1, got "
                f"{self._shape}"
            )
        self.dtype = dtype
        self.layout = layout_of(ctx, self._shape, partition)
        self._data = torch.zeros(self.layout.local_shape, dtype=dtype, device=ctx.device)
        # the number of workers that hold each part
        self._copies = math.prod(self.layout.partition.shape[axis] for axis in self.layout.shared)
        self._update = f"DistributedSignal.update_ in {self.layout}"
        self._identity = f"{self._update} {self.layout.identity}"
        call = f"DistributedSignal(shape={self._shape}, dtype={self.dtype}) in {self.layout}"
        # Each worker may or may not have values: all learn which, before one sends.
        _, told = agree(ctx.partition, call, numbers=[int(init is not None)])
        given = [worker for worker, (is_given,) in told.items() if is_given]
        if given and 0 not in given:
            raise ValueError(
                f"{call}: init was given on workers {given} but not on worker 0, whose values are "
                "sent to all workers"
            )
        if given:
            self._receive(init, 0)

    @property
    def data(self) -> Tensor:
        """This worker's tensor. `signal.data = x` is `signal.update_(x)`."""
        return self._data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.update_(value)

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return torch.Size(self._shape)

    @property
    def device(self) -> torch.device:
        """The device of this worker's tensor."""
        return self.ctx.device

    @property
    def is_whole(self) -> bool:
        """Whether every worker holds all of it."""
        return self.layout.is_shared

    def update_(self, data: Tensor | None, source: int | None = None) -> None:
        """Store a copy of new values, the same on all workers that hold the same part.

        Workers exchange shapes and a checksum of the values, in one small message. If checksums
        differ, all get the values of the first worker that holds the part; with
        `DistributedContext(debug=True)` all raise instead. Values that all workers compute in the
        same way are equal, and nothing more is sent.

        The copy keeps its autograd history, on each worker its own. Values that differ and need a
        gradient raise ValueError on all workers: otherwise the last bit would decide whether the
        others' tensors get a gradient. Choose a worker with `source`: then its tensor gets the
        whole gradient. If no gradients are needed, iterate under `torch.no_grad()`: otherwise all
        steps are kept.

        Args:
            data: a tensor of the global shape, or this worker's part of it.
            source: the worker whose tensor of the global shape all workers get; others may pass
                None.
        """
        if source is not None:
            self._receive(data, source)
            return
        if not self.layout.partition.active:
            return
        part = None  # None if the shape does not fit: then all raise, after they have agreed
        if isinstance(data, Tensor) and data.layout is torch.strided:
            if tuple(data.shape) == self.layout.local_shape:
                part = data.to(self.device)
            elif data.shape == self.shape:
                part = self.layout.local_part(data).to(self.device)
        # The checksum is part of the agreement on shapes, in the one message that is sent anyway.
        number = 0 if part is None or self._copies == 1 else checksum_of([part])
        [(shapes, meta)], told = agree(
            self.layout.partition,
            self._update,
            data,
            names=["the tensor"],
            numbers=[number],
            identity=self._identity,
        )
        self._check(shapes, meta.dtype)
        assert part is not None
        found = drifted(self.layout, {worker: numbers[0] for worker, numbers in told.items()})
        if found is not None:
            part = self._of_first(part, meta, *found)
        self._data = part.to(self.device, copy=True)

    def _of_first(self, part: Tensor, meta: TensorMeta, worker: int, first: int) -> Tensor:
        """The part of the first worker that holds it, on all that hold it; or all raise.

        Args:
            part: this worker's part.
            meta: the agreed dtype, device and required derivatives.
            worker: a worker with other values than the first one.
            first: the first worker.
        """
        what = (
            f"DistributedSignal.update_: worker {worker} has other values than worker {first}, "
            f"where one shared value is expected"
        )
        way_out = (
            "compute it in the same way on all workers, or use the value of one worker: "
            f"update_(data, source={first})"
        )
        if self.ctx.debug:
            raise ValueError(f"{what}: workers have diverged; {way_out}")
        if meta.needs_grad or meta.has_tangent:
            raise ValueError(f"{what}, and a gradient flows through it; {way_out}")
        # Along the shared axes the first dimension is cut into all and nothing, so that the workers
        # need no other group than that of the layout.
        cut, *others = self.layout.cuts
        intervals = tuple(
            interval
            for start, stop in cut.intervals
            for interval in ((start, stop), *((stop, stop),) * (self._copies - 1))
        )
        alone = Cut((*cut.axes, *self.layout.shared), intervals)
        firsts = replace(self.layout, cuts=(alone, *others), shared=())
        # All workers of a layout take part in its moves: those that are not the first own nothing.
        owned = part if firsts.local_shape == self.layout.local_shape else part[:0]
        return Move(firsts, self.layout).apply(owned)

    def whole(self) -> Tensor:
        """The whole tensor, on every worker."""
        everywhere = shared_whole(self.ctx.partition, self._shape)
        if self.layout == everywhere:
            return self.data
        return Move(self.layout, everywhere).apply(self.data)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """The inner product ⟨a, b⟩ of two tensors in this layout; no gradient goes through it."""
        return self.layout.inner(a, b)

    def norm(self, a: Tensor) -> Tensor:
        """The norm √⟨a, a⟩ of a tensor in this layout."""
        return self.inner(a, a).real.sqrt()

    def _receive(self, data: Tensor | None, source: int) -> None:
        """Send every worker its part of the tensor of one of them."""
        if not 0 <= source < self.ctx.world_size:
            raise ValueError(
                f"source: expected a worker from 0 to {self.ctx.world_size - 1}, got {source}"
            )
        owner = Partition((source,), (1,))
        move = Move(Layout.whole(owner, self._shape), self.layout)
        if owner.active and isinstance(data, Tensor):
            data = data.to(self.device)
        elif not owner.active:
            data = torch.empty(0, dtype=self.dtype, device=self.device)
        received = move(data)  # type: ignore[arg-type]
        self._check({}, received.dtype)
        if self.layout.partition.active:
            stays = isinstance(data, Tensor) and received.data_ptr() == data.data_ptr()
            self._data = received.clone() if stays else received

    def _check(self, shapes: dict[int, Shape], dtype: torch.dtype) -> None:
        """Raise ValueError if a worker passed no part of this signal, or another dtype."""
        for worker, shape in shapes.items():
            part = self.layout.shape_on(worker)
            if shape not in (part, self._shape):
                wanted = f"{self._shape}" if part == self._shape else f"{part}, its part, or "
                whole = "" if part == self._shape else f"{self._shape}, the whole"
                raise ValueError(
                    f"DistributedSignal.update_: worker {worker} expected a tensor of shape "
                    f"{wanted}{whole}, got {shape}"
                )
        if dtype != self.dtype:
            raise ValueError(
                f"DistributedSignal: expected a tensor of {self.dtype}, got {dtype}; "
                f"convert it with .to({self.dtype})"
            )

    def __repr__(self) -> str:
        return f"DistributedSignal({self.dtype}, {self.layout})"


Image = DistributedSignal | Tensor  # an image, as an argument of methods


def local_data(value: Image) -> Tensor:
    """This worker's tensor of a signal, or the tensor itself."""
    return value.data if isinstance(value, DistributedSignal) else value


def layout_of(ctx: DistributedContext, shape: Shape, partition: Grid | None) -> Layout:
    """The layout of a signal: whole and shared, or split by a partition, grid or layout."""
    if partition is None:
        return shared_whole(ctx.partition, shape)
    if isinstance(partition, Layout):
        if partition.shape != shape:
            raise ValueError(
                f"partition: expected a layout of the signal's shape {shape}, got {partition}"
            )
        return partition
    if not isinstance(partition, Partition):
        grid = tuple(as_int(size) for size in partition)
        if not grid or min(grid) < 1 or math.prod(grid) > ctx.world_size:
            raise ValueError(
                f"partition: expected a grid of 1 to {ctx.world_size} workers, got {grid}"
            )
        workers = ctx.partition.create_partition_inclusive(range(math.prod(grid)))
        partition = workers.create_cartesian_topology_partition(grid)
    if partition.dim > len(shape):
        raise ValueError(
            f"partition: expected at most one axis for each of the {len(shape)} dimensions of "
            f"{shape}, got {partition}"
        )
    # The grid splits the last dimensions, height and width: batch and channels come before them.
    whole = len(shape) - partition.dim
    return Layout.split(partition, shape, [*[None] * whole, *range(partition.dim)])
