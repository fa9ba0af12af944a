"""One small case of every movement, of any global size, on all workers of the world.

Each has a reference in plain torch, from the list of everybody's inputs to everybody's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import tessel
from tessel.core.layout import Layout
from tessel.core.partition import Partition

MODULES = (
    "Broadcast",
    "SumReduce",
    "AllSumReduce",
    "AllGather",
    "ReduceScatter",
    "Repartition",
    "HaloExchange",
)
MOVEMENTS = (*MODULES, "scatter", "gather", "all_gather", "Move", "Move.H")
FROM_ONE = ("Broadcast", "scatter")  # only worker 0 gives something
SUMS = ("SumReduce", "AllSumReduce", "ReduceScatter", "Move.H")

COLUMNS = 3
LEFT, RIGHT = 1, 2  # the halo, along rows

Values = list[Tensor]  # by worker
Loss = Callable[[int, Tensor], Tensor]


@dataclass
class Case:
    """A movement, and the shapes and a reference for all workers; `(0,)` where nothing is given."""

    layer: Callable[[Tensor], Tensor]
    shapes: list[tuple[int, ...]]
    reference: Callable[[Values], Values]

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Values:
        """Everybody's input, the same on every worker."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, dtype=dtype, generator=generator) for shape in self.shapes]

    def leaves(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Values:
        return [x.requires_grad_() for x in self.inputs(dtype, seed)]

    def gradients(self, inputs: Values, loss: Loss) -> Values:
        """Those of the sum of everybody's `loss(worker, output)`, differentiable."""
        total = sum(loss(worker, y) for worker, y in enumerate(self.reference(inputs)))
        return list(torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True))


def me() -> int:
    """The number of this worker."""
    rank = tessel.world().rank
    assert rank is not None
    return rank


def mine(values: Values) -> Tensor:
    """This worker's value, without history."""
    return values[me()].detach().clone()


def assert_close(got: Tensor | None, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert got is not None
    torch.testing.assert_close(got, expected.detach(), rtol=tolerance, atol=tolerance)


def case(name: str, size: int = 5) -> Case:
    """The movement of this name, of a tensor with `size` rows; all workers call this."""
    return _MAKERS[name](tessel.world(), size)


def rows(x: Tensor, n: int) -> Values:
    """A balanced part of the rows for each of n workers."""
    return list(x.tensor_split(n))


def grown_rows(x: Tensor, n: int) -> Values:
    """The same with a halo; an empty part stays empty."""
    stops = torch.tensor([len(part) for part in rows(x, n)]).cumsum(0).tolist()
    return [
        x[max(0, start - LEFT) : stop + RIGHT] if start < stop else x[start:stop]
        for start, stop in zip([0, *stops], stops, strict=False)
    ]


def added(parts: Values, size: int, cut: Callable[[Tensor, int], Values]) -> Tensor:
    """The sum of parts that `cut` takes out of a tensor, each where it was taken from."""
    n = len(parts)
    places = cut(torch.arange(size), n)
    whole = parts[0].new_zeros(size, COLUMNS)
    for part, place in zip(parts, places, strict=True):
        whole = whole.index_add(0, place, part)
    return whole


def _shapes(parts: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(part.shape) for part in parts]


def _first_only(x: Tensor, n: int) -> Values:
    return [x, *[x.new_empty(0)] * (n - 1)]


def _tall(world: Partition) -> Partition:
    return world.create_cartesian_topology_partition([world.size, 1])


def _broadcast(world: Partition, size: int) -> Case:
    n = world.size
    layer = tessel.nn.Broadcast(world.create_partition_inclusive([0]), world)
    shapes = _shapes(_first_only(torch.empty(size, COLUMNS), n))
    return Case(layer, shapes, lambda x: [x[0].clone() for _ in range(n)])


def _sum_reduce(world: Partition, size: int) -> Case:
    n = world.size
    layer = tessel.nn.SumReduce(world, world.create_partition_inclusive([0]))
    return Case(layer, [(size, COLUMNS)] * n, lambda x: _first_only(torch.stack(x).sum(0), n))


def _all_sum_reduce(world: Partition, size: int) -> Case:
    layer = tessel.nn.AllSumReduce(world, [0])
    return Case(layer, [(size, COLUMNS)] * world.size, lambda x: [torch.stack(x).sum(0)] * len(x))


def _all_gather(world: Partition, size: int) -> Case:
    shapes = _shapes(rows(torch.empty(size, COLUMNS), world.size))
    return Case(tessel.nn.AllGather(world, 0, 0), shapes, lambda x: [torch.cat(x)] * len(x))


def _reduce_scatter(world: Partition, size: int) -> Case:
    layer = tessel.nn.ReduceScatter(world, 0, 0)
    shapes = [(size, COLUMNS)] * world.size
    return Case(layer, shapes, lambda x: rows(torch.stack(x).sum(0), len(x)))


def _repartition(world: Partition, size: int) -> Case:
    n = world.size
    layer = tessel.nn.Repartition(_tall(world), world.create_cartesian_topology_partition([1, n]))
    shapes = _shapes(rows(torch.empty(size, COLUMNS), n))
    return Case(layer, shapes, lambda x: list(torch.cat(x).tensor_split(n, dim=1)))


def _halo_exchange(world: Partition, size: int) -> Case:
    n = world.size
    layer = tessel.nn.HaloExchange(_tall(world), [(LEFT, RIGHT), (0, 0)])
    shapes = _shapes(rows(torch.empty(size, COLUMNS), n))
    return Case(layer, shapes, lambda x: grown_rows(torch.cat(x), n))


def _scatter(world: Partition, size: int) -> Case:
    n = world.size
    shapes = _shapes(_first_only(torch.empty(size, COLUMNS), n))
    return Case(partial(tessel.scatter, P=_tall(world)), shapes, lambda x: rows(x[0], n))


def _gather(world: Partition, size: int) -> Case:
    n = world.size
    shapes = _shapes(rows(torch.empty(size, COLUMNS), n))
    layer = partial(tessel.gather, P=_tall(world))
    return Case(layer, shapes, lambda x: _first_only(torch.cat(x), n))


def _gather_on_all(world: Partition, size: int) -> Case:
    shapes = _shapes(rows(torch.empty(size, COLUMNS), world.size))
    layer = partial(tessel.all_gather, P=_tall(world))
    return Case(layer, shapes, lambda x: [torch.cat(x)] * len(x))


def _moves(world: Partition, size: int) -> tessel.Move:
    """From balanced rows to rows with a halo, on the workers in the other order."""
    P = _tall(world)
    other = Partition(P.ranks[::-1], P.shape)
    shape = (size, COLUMNS)
    wide = Layout.balanced(other, shape).grow([(LEFT, RIGHT), (0, 0)])
    return tessel.Move(Layout.balanced(P, shape), wide)


def _move(world: Partition, size: int) -> Case:
    n = world.size
    shapes = _shapes(rows(torch.empty(size, COLUMNS), n))
    return Case(_moves(world, size), shapes, lambda x: grown_rows(torch.cat(x), n)[::-1])


def _move_adjoint(world: Partition, size: int) -> Case:
    n = world.size
    shapes = _shapes(grown_rows(torch.empty(size, COLUMNS), n)[::-1])
    return Case(_moves(world, size).H, shapes, lambda x: rows(added(x[::-1], size, grown_rows), n))


_MAKERS: dict[str, Callable[[Partition, int], Case]] = {
    "Broadcast": _broadcast,
    "SumReduce": _sum_reduce,
    "AllSumReduce": _all_sum_reduce,
    "AllGather": _all_gather,
    "ReduceScatter": _reduce_scatter,
    "Repartition": _repartition,
    "HaloExchange": _halo_exchange,
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _gather_on_all,
    "Move": _move,
    "Move.H": _move_adjoint,
}
