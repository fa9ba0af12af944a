"""DTensors: conversion of spread tensors to torch's and back, without a copy.

A mesh is a partition, and a placement describes one axis of a layout:

    Shard(d)       the axis splits dimension d, as `torch.chunk` does
    Replicate()    shared copies
    Partial()      separate copies, which represent their sum

Gradients also correspond: that of a replicated value is whole on each worker, and so is that of
each summand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tessel.core import boxes
from tessel.core.boxes import Interval
from tessel.core.layout import Cut, Layout
from tessel.core.partition import Partition
from tessel.tensor import Tensor, from_local
from tessel.transport import kept_in_job


def from_dtensor(x: Any) -> Tensor:
    """Convert a `torch.distributed.tensor.DTensor` to a spread tensor, without a copy.

    Nothing is sent, the parts share memory, and gradients pass both ways. All workers of the job
    call this.

    Args:
        x: the DTensor.

    Raises:
        NotImplementedError: for placements that no layout describes: sums are `Partial("sum")`.

    >>> import tessel, torch
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> def rows():
    ...     mesh = tessel.world().to_mesh()
    ...     x = tessel.from_dtensor(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    ...     return tuple(x.shape), tuple(x.local.shape)
    >>> tessel.launch(rows, 2)
    [((4, 3), (2, 3)), ((4, 3), (2, 3))]
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(x, DTensor):
        raise TypeError(f"from_dtensor: expected a DTensor, got {type(x).__name__}")
    layout = layout_of(x.device_mesh, x.placements, x.shape)
    _meshes()[_key(layout.partition, x.device_mesh.device_type)] = x.device_mesh
    # The gradient of a summand is that of the sum, which each worker has.
    gradients = [Replicate() if each.is_partial() else each for each in x.placements]
    return from_local(x.to_local(grad_placements=gradients), layout)


def layout_of(mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Layout:
    """The layout of a DTensor of this shape; `x.move_to(layout)` moves a spread tensor there.

    All workers of the job call this. `tessel.nn.init.layout_of(parameter)` is another function: the
    layout of a parameter of a parallel layer.

    Args:
        mesh: a `DeviceMesh`.
        placements: one for each dimension of the mesh.
        shape: the shape of the whole tensor.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    partition = Partition.from_mesh(mesh)
    partition.check_as_mesh()
    lengths = tuple(int(length) for length in shape)
    if len(placements) != partition.dim:
        raise ValueError(
            f"expected one placement for each of the {partition.dim} dimensions of {mesh}, got "
            f"{tuple(placements)}"
        )
    axes: dict[int, list[int]] = {dim: [] for dim in range(len(lengths))}
    shared = []
    for axis, placement in enumerate(placements):
        if type(placement) is Shard and -len(lengths) <= placement.dim < len(lengths):
            axes[placement.dim % len(lengths)].append(axis)
        elif isinstance(placement, Replicate):
            shared.append(axis)
        elif not (type(placement) is Partial and placement.reduce_op == "sum"):
            raise NotImplementedError(
                f"{placement!r} along dimension {axis} of {mesh} of a tensor of shape {lengths}: "
                "a layout supports Shard, Replicate and Partial('sum'); call "
                "x.redistribute(placements=…) first"
            )
    cuts = []
    for dim, length in enumerate(lengths):
        parts: list[Interval] = [(0, length)]
        for axis in axes[dim]:  # each cuts the parts of those before it
            parts = [
                boxes.shift(piece, start)
                for start, stop in parts
                for piece in boxes.chunked(stop - start, partition.shape[axis])
            ]
        cuts.append(Cut(tuple(axes[dim]), tuple(parts)))
    return Layout(partition, lengths, tuple(cuts), tuple(shared))


# The mesh of the last DTensor from the workers of a grid: DTensors of meshes with other names
# cannot be combined. All workers make the same calls, so that either all or none have it.
_meshes: Callable[[], dict[tuple[Any, ...], Any]] = kept_in_job(dict)


def _key(partition: Partition, device_type: str) -> tuple[Any, ...]:
    return partition.ranks, partition.shape, device_type


def to_dtensor(x: Tensor, mesh: Any) -> Any:
    """A spread tensor as a DTensor: see `Tensor.to_dtensor`."""
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    layout = x.layout
    partition = layout.partition
    placements: list[Placement] = [Partial()] * partition.dim
    for axis in layout.shared:
        placements[axis] = Replicate()
    for dim, cut in enumerate(layout.cuts):
        for axis in cut.axes:
            placements[axis] = Shard(dim)
    if mesh is None:
        mesh = _meshes().get(_key(partition, x.device.type)) or partition.to_mesh(x.device.type)
    grid = getattr(mesh, "mesh", None)
    expected = torch.tensor(partition.ranks).reshape(partition.shape)
    if not (isinstance(grid, torch.Tensor) and torch.equal(grid.cpu().long(), expected)):
        raise ValueError(
            f"to_dtensor: expected a DeviceMesh of {partition}, got {mesh!r}; "
            "x.move_to(tessel.interop.layout_of(mesh, placements, x.shape)) moves the tensor there"
        )
    target = layout_of(mesh, placements, layout.shape)
    # The same parts on all workers, for any order of axes.
    differ = any(layout.box(worker) != target.box(worker) for worker in partition.ranks)
    if layout.blocks or differ:
        raise ValueError(
            f"to_dtensor: DTensor cannot represent {layout}, only parts as torch.chunk cuts them; "
            f"call x.move_to(tessel.interop.layout_of(mesh, {tuple(placements)}, x.shape)) first"
        )
    part, shape = x.local, layout.shape
    # The strides of the whole in the memory order of the part; workers outside have no part.
    like = part if part.ndim == len(shape) else torch.empty(shape, device="meta")
    step, strides = 1, [0] * len(shape)
    # a dimension of length 1 may have any stride, and keeps its place
    for dim in sorted(range(len(shape)), key=lambda d: (like.stride()[d], like.shape[d] == 1, -d)):
        strides[dim] = step
        step *= max(1, shape[dim])
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


Tensor.as_dtensor = staticmethod(to_dtensor)
