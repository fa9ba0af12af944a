"""The movements under test, each with a reference that knows nothing of layouts and plans.

A maker gets the number of workers and yields cases. A case is a movement between given workers, the
shapes of its inputs, and a function, in plain torch and for one process, from everybody's inputs to
everybody's outputs; torch's own autograd of that function says what the gradients are. Workers
build the movement, the process that runs the tests asks the reference. Every case gets every law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tessel
from tessel.core.layout import Cut, Layout

WORLDS = (1, 2, 3, 4, 6, 8, 12)

GRIDS = {  # of all workers, in two and in three dimensions
    1: ((1, 1), (1, 1, 1)),
    2: ((2, 1), (1, 2, 1)),
    3: ((1, 3), (3, 1, 1)),
    4: ((2, 2), (2, 1, 2)),
    6: ((2, 3), (1, 2, 3)),
    8: ((4, 2), (2, 2, 2)),
    12: ((3, 4), (2, 2, 3)),
}

Shape = tuple[int, ...]
Lengths = Sequence[Sequence[int]]  # of the parts of each dimension
Halo = Sequence[tuple[int, int]]
Values = dict[int, Tensor]  # by worker
Box = tuple[slice, ...]
Boxes = dict[int, Box]  # by worker
Reference = Callable[[Values], Values]


class Grid(NamedTuple):
    """Workers on a grid, row by row: a partition in numbers only."""

    ranks: Sequence[int]
    shape: Shape

    def partition(self) -> tessel.Partition:
        return tessel.Partition(tuple(self.ranks), self.shape)

    def places(self) -> dict[int, Shape]:
        """Each worker's coordinates."""
        return dict(zip(self.ranks, product(*map(range, self.shape)), strict=True))

    def row_of(self, rank: int, axes: Iterable[int]) -> list[int]:
        """The workers whose coordinates equal those of `rank` but for `axes`, in their order."""
        fixed = set(range(len(self.shape))) - {axis % len(self.shape) for axis in axes}
        at = self.places()
        return [q for q in self.ranks if all(at[q][axis] == at[rank][axis] for axis in fixed)]


@dataclass
class Case:
    """One movement between given workers, of tensors of given shapes.

    Attributes:
        name: what a failure is called.
        build: makes the layer, on all workers.
        shapes: of the inputs, by worker; other workers pass a placeholder.
        takers: the workers that get an output.
        reference: from all inputs to all outputs, in one process.
        operator: the linear operator that the layer applies, from the layer.
        one_in: for workers that hold a shared value of the input, who stands for it.
        one_out: the same for the output.
        between: workers that take part but neither give nor take.
    """

    name: str
    build: Callable[[], Any]
    shapes: Mapping[int, Shape]
    takers: Sequence[int]
    reference: Reference
    operator: Callable[[Any], tessel.LinearOperator]
    one_in: Mapping[int, int] = field(default_factory=dict)
    one_out: Mapping[int, int] = field(default_factory=dict)
    between: set[int] = field(default_factory=set)

    def input_of(self, worker: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        """A worker's input, the same where a value is shared; a placeholder where it has none."""
        if worker not in self.shapes:
            return tessel.zero_volume_tensor()
        return random(self.shapes[worker], dtype, 100 * seed + self.one_in.get(worker, worker))

    @property
    def members(self) -> set[int]:
        """The workers that take part."""
        return {*self.shapes, *self.takers, *self.between}

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Values:
        """Everybody's input."""
        return {worker: self.input_of(worker, dtype, seed) for worker in self.shapes}

    def outputs(self, inputs: Values) -> Values:
        """Everybody's output, by the reference."""
        return self.reference({w: x for w, x in inputs.items() if self.counts_in(w)})

    def counts_in(self, worker: int) -> bool:
        return worker in self.shapes and self.one_in.get(worker, worker) == worker

    def counts_out(self, worker: int) -> bool:
        return self.one_out.get(worker, worker) == worker

    def gradients(self, inputs: Values, loss: Callable[[int, Tensor], Tensor]) -> Values:
        """The gradients of the sum of `loss(worker, output)` for all inputs, differentiable."""
        own = {w: x for w, x in inputs.items() if self.counts_in(w)}
        outputs = self.reference(own)
        total = sum(loss(w, y) for w, y in outputs.items() if self.counts_out(w))
        return self.to_all(derivatives(total, own))

    def to_all(self, values: Values) -> Values:
        """What belongs to shared inputs, on all workers that hold them."""
        return {worker: values[self.one_in.get(worker, worker)] for worker in self.shapes}


def derivatives(total: Any, leaves: Values) -> Values:
    """The gradient of a number for each leaf, differentiable; zero where it depends on none."""
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if isinstance(total, Tensor) and total.requires_grad:
        found = torch.autograd.grad(total, [*leaves.values()], create_graph=True, allow_unused=True)
    return {
        worker: torch.zeros_like(x) if grad is None else grad
        for (worker, x), grad in zip(leaves.items(), found, strict=True)
    }


def random(shape: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Random values of any dtype from a generator of its own; small integers for the exact ones."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(tuple(shape), dtype=wide, generator=generator).to(dtype)
    high = 2 if dtype is torch.bool else 7
    return torch.randint(0, high, tuple(shape), generator=generator).to(dtype)


# The reference, in plain torch.


def parts(length: int, count: int) -> list[int]:
    """The lengths of a balanced split."""
    return [len(part) for part in torch.arange(length).tensor_split(count)]


def even(shape: Sequence[int], grid: Sequence[int]) -> list[list[int]]:
    """The lengths of a balanced split of every dimension."""
    return [parts(n, p) for n, p in zip(shape, grid, strict=True)]


def uneven(shape: Sequence[int], grid: Sequence[int]) -> list[list[int]]:
    """All of the remainder on the first part, and one index of the second part too, if any."""

    def lengths(n: int, p: int) -> list[int]:
        first, *rest = [n // p + n % p] + [n // p] * (p - 1)
        return [first + 1, rest[0] - 1, *rest[1:]] if rest and rest[0] else [first, *rest]

    return [lengths(n, p) for n, p in zip(shape, grid, strict=True)]


def boxes_of(grid: Grid, lengths: Lengths) -> Boxes:
    """Everybody's box when axis d of the grid cuts dimension d into parts of these lengths."""
    cuts = [list(zip([0, *accumulate(row)], accumulate(row), strict=False)) for row in lengths]
    return {
        rank: tuple(slice(*cut[k]) for cut, k in zip(cuts, place, strict=True))
        for rank, place in grid.places().items()
    }


def grown(boxes: Boxes, halo: Halo, shape: Sequence[int]) -> Boxes:
    """Each box with a halo, up to the border; an empty one stays empty."""

    def widen(part: slice, pair: tuple[int, int], length: int) -> slice:
        if part.start == part.stop:
            return part
        return slice(max(0, part.start - pair[0]), min(length, part.stop + pair[1]))

    return {rank: tuple(map(widen, box, halo, shape)) for rank, box in boxes.items()}


def whole(ranks: Iterable[int], shape: Sequence[int]) -> Boxes:
    return {rank: tuple(slice(0, n) for n in shape) for rank in ranks}


def shapes_of(boxes: Boxes) -> dict[int, Shape]:
    return {rank: tuple(part.stop - part.start for part in box) for rank, box in boxes.items()}


def by_boxes(shape: Sequence[int], source: Boxes, target: Boxes) -> Reference:
    """Put everybody's box into one global tensor, adding up; cut the new boxes out of it."""

    def reference(x: Values) -> Values:
        tensor = torch.zeros(tuple(shape), dtype=next(iter(x.values())).dtype)
        for rank, part in x.items():
            tensor[source[rank]] += part
        return {rank: tensor[box].clone() for rank, box in target.items()}

    return reference


def givers(X: Grid, Y: Grid) -> dict[int, int]:
    """Who gives to each worker of `Y` in a broadcast from `X`."""
    by_place = {place: rank for rank, place in X.places().items()}
    found = {}
    for rank, place in Y.places().items():
        tail = place[len(place) - len(X.shape) :]
        found[rank] = by_place[
            tuple(0 if n == 1 else k for k, n in zip(tail, X.shape, strict=True))
        ]
    return found


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[1:], start=tensors[0].clone())


# A case for each movement.


def _module(
    name: str, build: Any, shapes: Mapping[int, Shape], Y: Grid, reference: Reference
) -> Case:
    return Case(name, build, shapes, Y.ranks, reference, lambda m: m.operator(dict(shapes)))


def same_shape(grid: Grid, shape: Shape) -> dict[int, Shape]:
    return {rank: shape for rank in grid.ranks}


def broadcast_case(name: str, X: Grid, Y: Grid, shapes: Mapping[int, Shape]) -> Case:
    return _module(
        f"Broadcast {name}",
        lambda: tessel.nn.Broadcast(X.partition(), Y.partition()),
        shapes,
        Y,
        lambda x: {rank: x[giver].clone() for rank, giver in givers(X, Y).items()},
    )


def sum_reduce_case(name: str, X: Grid, Y: Grid, shapes: Mapping[int, Shape]) -> Case:
    """`shapes` are those of the sums, by worker of `Y`."""
    to = givers(Y, X)
    return _module(
        f"SumReduce {name}",
        lambda: tessel.nn.SumReduce(X.partition(), Y.partition()),
        {rank: shapes[to[rank]] for rank in X.ranks},
        Y,
        lambda x: {y: add_up([x[rank] for rank in X.ranks if to[rank] == y]) for y in Y.ranks},
    )


def all_sum_reduce_case(
    name: str, X: Grid, axes: Sequence[int], shapes: Mapping[int, Shape]
) -> Case:
    return _module(
        f"AllSumReduce {name}",
        lambda: tessel.nn.AllSumReduce(X.partition(), axes),
        shapes,
        X,
        lambda x: {rank: add_up([x[q] for q in X.row_of(rank, axes)]) for rank in X.ranks},
    )


def all_gather_case(name: str, X: Grid, axis: int, dim: int, shapes: Mapping[int, Shape]) -> Case:
    return _module(
        f"AllGather {name}",
        lambda: tessel.nn.AllGather(X.partition(), axis, dim),
        shapes,
        X,
        lambda x: {r: torch.cat([x[q] for q in X.row_of(r, [axis])], dim) for r in X.ranks},
    )


def reduce_scatter_case(
    name: str, X: Grid, axis: int, dim: int, shapes: Mapping[int, Shape]
) -> Case:
    def reference(x: Values) -> Values:
        out = {}
        for rank in X.ranks:
            row = X.row_of(rank, [axis])
            total = add_up([x[q] for q in row])
            out[rank] = total.tensor_split(len(row), dim)[row.index(rank)].clone()
        return out

    build = lambda: tessel.nn.ReduceScatter(X.partition(), axis, dim)  # noqa: E731
    return _module(f"ReduceScatter {name}", build, shapes, X, reference)


def repartition_case(name: str, X: Grid, Y: Grid, lengths: Lengths, call: Any = None) -> Case:
    """From parts of these lengths to balanced ones, by `Repartition` or by `call(x, P)`."""
    shape = tuple(map(sum, lengths))
    source, target = boxes_of(X, lengths), boxes_of(Y, even(shape, Y.shape))

    def build() -> Any:
        layer = tessel.nn.Repartition(X.partition(), Y.partition())
        return layer if call is None else partial(call, P=max(X, Y, key=_size).partition())

    return Case(
        f"{'Repartition' if call is None else call.__name__} {name}",
        build,
        shapes_of(source),
        Y.ranks,
        by_boxes(shape, source, target),
        lambda layer: tessel.Move(
            Layout.from_lengths(X.partition(), lengths), Layout.balanced(Y.partition(), shape)
        ),
    )


def _size(grid: Grid) -> int:
    return len(grid.ranks)


def scatter_case(name: str, P: Grid, shape: Shape) -> Case:
    first = Grid(P.ranks[:1], (1,) * len(shape))
    return repartition_case(name, first, P, [[n] for n in shape], tessel.scatter)


def gather_case(name: str, P: Grid, lengths: Lengths) -> Case:
    first = Grid(P.ranks[:1], (1,) * len(lengths))
    return repartition_case(name, P, first, lengths, tessel.gather)


def all_gather_all_case(name: str, P: Grid, lengths: Lengths) -> Case:
    shape = tuple(map(sum, lengths))
    source = boxes_of(P, lengths)
    return Case(
        f"all_gather {name}",
        lambda: partial(tessel.all_gather, P=P.partition()),
        shapes_of(source),
        P.ranks,
        by_boxes(shape, source, whole(P.ranks, shape)),
        lambda layer: tessel.Move(
            Layout.from_lengths(P.partition(), lengths), Layout.whole(P.partition(), shape)
        ),
    )


def halo_case(name: str, X: Grid, halo: Halo, lengths: Lengths) -> Case:
    shape = tuple(map(sum, lengths))
    source = boxes_of(X, lengths)
    return _module(
        f"HaloExchange {name}",
        lambda: tessel.nn.HaloExchange(X.partition(), halo),
        shapes_of(source),
        X,
        by_boxes(shape, source, grown(source, halo, shape)),
    )


# Layouts of all kinds, for raw moves.

KINDS = (
    "balanced",
    "uneven",
    "grown",
    "separate copies",
    "shared copies",
    "rows with shared copies",
    "columns with separate copies",
    "rows over both axes",
)
_HALO = ((1, 2), (2, 0))


class Side(NamedTuple):
    """A layout of a matrix on a grid of two axes, and what it means."""

    kind: str
    grid: Grid
    shape: tuple[int, int]

    def lengths(self) -> list[list[int]]:
        """The lengths of the parts of each dimension, for those kinds that cut both."""
        cut = uneven if self.kind == "uneven" else even
        return cut(self.shape, self.grid.shape)

    def layout(self) -> Layout:
        P, (n, m), (p, q) = self.grid.partition(), self.shape, self.grid.shape
        if self.kind in ("balanced", "uneven", "grown"):
            layout = Layout.from_lengths(P, self.lengths())
            return layout.grow(_HALO) if self.kind == "grown" else layout
        if self.kind == "rows with shared copies":
            cuts = (Cut((0,), _intervals(parts(n, p))), Cut((), ((0, m),)))
            return Layout(P, self.shape, cuts, (1,))
        if self.kind == "columns with separate copies":
            cuts = (Cut((), ((0, n),)), Cut((0,), _intervals(parts(m, p))))
            return Layout(P, self.shape, cuts)
        if self.kind == "rows over both axes":
            cuts = (Cut((1, 0), _intervals(parts(n, p * q))), Cut((), ((0, m),)))
            return Layout(P, self.shape, cuts)
        return Layout.whole(P, self.shape, shared=self.kind == "shared copies")

    def boxes(self) -> Boxes:
        (n, m), (p, q), at = self.shape, self.grid.shape, self.grid.places()
        if self.kind in ("balanced", "uneven", "grown"):
            boxes = boxes_of(self.grid, self.lengths())
            return grown(boxes, _HALO, self.shape) if self.kind == "grown" else boxes
        if self.kind == "rows with shared copies":
            rows = _intervals(parts(n, p))
            return {rank: (slice(*rows[i]), slice(0, m)) for rank, (i, _) in at.items()}
        if self.kind == "columns with separate copies":
            columns = _intervals(parts(m, p))
            return {rank: (slice(0, n), slice(*columns[i])) for rank, (i, _) in at.items()}
        if self.kind == "rows over both axes":
            rows = _intervals(parts(n, p * q))
            return {rank: (slice(*rows[j * p + i]), slice(0, m)) for rank, (i, j) in at.items()}
        return whole(self.grid.ranks, self.shape)

    def one(self) -> dict[int, int]:
        """For each worker, the first of those that share its value."""
        if self.kind == "shared copies":
            return {rank: self.grid.ranks[0] for rank in self.grid.ranks}
        if self.kind == "rows with shared copies":
            return {rank: self.grid.row_of(rank, [1])[0] for rank in self.grid.ranks}
        return {rank: rank for rank in self.grid.ranks}


def _intervals(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    stops = list(accumulate(lengths))
    return tuple((stop - length, stop) for stop, length in zip(stops, lengths, strict=True))


def move_case(name: str, source: Side, target: Side) -> Case:
    return Case(
        f"Move {source.kind} → {target.kind}{name}",
        lambda: tessel.Move(source.layout(), target.layout()),
        shapes_of(source.boxes()),
        target.grid.ranks,
        by_boxes(source.shape, source.boxes(), target.boxes()),
        lambda move: move,
        source.one(),
        target.one(),
    )


def product_case(name: str, *steps: Case) -> Case:
    """The steps one after the other, the first one first, as one operator."""

    def build() -> tessel.LinearOperator:
        first, *others = [step.operator(step.build()) for step in steps]
        for other in others:
            first = other @ first
        return first

    def reference(x: Values) -> Values:
        for step in steps:
            x = step.outputs(x)
        return x

    return Case(
        f"Product {name}",
        build,
        steps[0].shapes,
        steps[-1].takers,
        reference,
        lambda operator: operator,
        steps[0].one_in,
        steps[-1].one_out,
        {worker for step in steps for worker in step.members},
    )


# The makers.

Maker = Callable[[int], Iterator[Case]]
MAKERS: dict[str, Maker] = {}


def maker(make: Maker) -> Maker:
    """Add a maker to the registry."""
    MAKERS[make.__name__] = make
    return make


def row(ranks: Sequence[int]) -> Grid:
    return Grid(tuple(ranks), (len(ranks),))


def flat(n: int) -> Grid:
    return Grid(range(n), GRIDS[n][0])


def shuffled(ranks: Iterable[int], seed: int = 3) -> list[int]:
    """The same workers in another, fixed order."""
    ranks = list(ranks)
    order = torch.randperm(len(ranks), generator=torch.Generator().manual_seed(seed))
    return [ranks[k] for k in order]


def near_square(count: int) -> tuple[int, int]:
    rows = next(k for k in range(int(count**0.5), 0, -1) if count % k == 0)
    return rows, count // rows


def rank_sets(n: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Pairs of sets of workers: the same, permuted, and where there are enough, others."""
    everyone = list(range(n))
    yield "same", everyone, everyone
    yield "permuted", shuffled(everyone), everyone[::-1]
    if n > 1:
        yield "disjoint", everyone[: n // 2], everyone[n // 2 :]
    if n > 2:
        yield "overlapping", shuffled(everyone[: n - 1]), everyone[1:]


@maker
def broadcast(n: int) -> Iterator[Case]:
    yield from _broadcasts(n, broadcast_case)


@maker
def sum_reduce(n: int) -> Iterator[Case]:
    yield from _broadcasts(n, lambda name, X, Y, shapes: sum_reduce_case(name, Y, X, shapes))


def _broadcasts(n: int, case: Callable[..., Case]) -> Iterator[Case]:
    P, everyone, last = flat(n), row(range(n)), row([n - 1])
    p, q = P.shape
    yield case("one, all", last, everyone, {n - 1: (2, 3)})
    yield case("one, all, 0-dim", last, everyone, {n - 1: ()})
    yield case("one, all, empty", last, everyone, {n - 1: (0, 2)})
    yield case("same grid", P, P, {r: (1 + r % 2, 3) for r in P.ranks})
    around = Grid(shuffled(range(n)), P.shape)
    yield case("same workers, other places", around, P, {r: (1 + r % 3,) for r in P.ranks})
    column = Grid(range(n - p, n), (p, 1))
    yield case("column, grid", column, P, {r: (2, 1 + r % 2) for r in column.ranks})
    line = row(shuffled(range(q)))
    yield case("row filled up from the left, grid", line, P, {r: (r % 2, 2) for r in line.ranks})
    deep = GRIDS[n][1]
    middle = Grid(range(deep[1]), (1, deep[1], 1))
    yield case("middle axis, 3-D", middle, Grid(around.ranks, deep), same_shape(middle, (3,)))
    if n > 1:
        takers = shuffled(range(n // 2, n))
        yield case("disjoint", Grid([0], (1, 1)), Grid(takers, (len(takers), 1)), {0: (3, 2)})


@maker
def all_sum_reduce(n: int) -> Iterator[Case]:
    P = Grid(range(n), GRIDS[n][1])
    for axes in (axes for count in range(4) for axes in combinations(range(3), count)):
        yield all_sum_reduce_case(f"3-D over {axes}", P, axes, same_shape(P, (7, 5)))
    Q = Grid(shuffled(range(n)), GRIDS[n][0])
    rows = {rank: (1 + at[0], 2) for rank, at in Q.places().items()}
    yield all_sum_reduce_case("permuted, a shape for each row", Q, (1,), rows)
    yield all_sum_reduce_case("axis from the end", Q, (-2,), same_shape(Q, (2,)))
    everyone = row(range(n))
    yield all_sum_reduce_case("0-dim", everyone, (0,), same_shape(everyone, ()))
    yield all_sum_reduce_case("one element", everyone, (0,), same_shape(everyone, (1,)))
    yield all_sum_reduce_case("empty", everyone, (0,), same_shape(everyone, (3, 0)))
    if n > 2:
        some = row(range(n - 1, 0, -1))
        yield all_sum_reduce_case("some workers", some, (0,), same_shape(some, (4,)))


@maker
def all_gather(n: int) -> Iterator[Case]:
    P, Q = flat(n), row(shuffled(range(n)))
    yield all_gather_case("2-D", P, 1, 0, same_shape(P, (2, 3)))
    lengths = {rank: (3, 1 + at[0]) for rank, at in P.places().items()}
    yield all_gather_case("2-D, last dim", P, 0, -1, lengths)
    yield all_gather_case("permuted, uneven", Q, 0, 1, {r: (2, (5 * r) % 3) for r in Q.ranks})
    yield all_gather_case("empty", Q, -1, 0, same_shape(Q, (0, 2)))
    if n > 2:
        some = row(range(1, n))
        yield all_gather_case("some workers", some, 0, 0, {r: (r % 2 + 1,) for r in some.ranks})


@maker
def reduce_scatter(n: int) -> Iterator[Case]:
    P, Q = flat(n), row(shuffled(range(n)))
    yield reduce_scatter_case("2-D", P, 1, 0, same_shape(P, (13, 2)))
    yield reduce_scatter_case("2-D, last dim", P, 0, -1, same_shape(P, (2, 2, 5)))
    rows = {rank: (1 + at[1], 6) for rank, at in P.places().items()}
    yield reduce_scatter_case("a shape for each row", P, 0, 1, rows)
    fewer = same_shape(Q, (2, max(1, n - 1)))
    yield reduce_scatter_case("permuted, fewer than workers", Q, 0, 1, fewer)
    yield reduce_scatter_case("empty", Q, -1, 0, same_shape(Q, (0, 2)))
    if n > 2:
        some = row(range(1, n))
        yield reduce_scatter_case("some workers", some, 0, 0, same_shape(some, (2 * n + 1,)))


@maker
def repartition(n: int) -> Iterator[Case]:
    shape = (11, 7)
    for name, left, right in rank_sets(n):
        X, Y = Grid(left, near_square(len(left))), Grid(right, (1, len(right)))
        yield repartition_case(f"{name}, balanced", X, Y, even(shape, X.shape))
        yield repartition_case(f"{name}, uneven", X, Y, uneven(shape, X.shape))
    P, tall, wide = flat(n), Grid(range(n), (n, 1)), Grid(range(n), (1, n))
    yield repartition_case("identity", P, P, even(shape, P.shape))
    yield repartition_case("fewer rows than workers", wide, tall, even((2, 5), wide.shape))
    yield repartition_case("empty", tall, wide, even((0, 3), tall.shape))
    yield repartition_case("all on one part", tall, P, [[0] * (n - 1) + [9], [4]])
    one, Q = Grid([n - 1], (1, 1, 1)), Grid(shuffled(range(n)), GRIDS[n][1])
    yield repartition_case("one, 3-D", one, Q, [[5], [4], [3]])
    yield repartition_case("3-D, one", Q, one, even((5, 4, 3), Q.shape))
    yield repartition_case("0-dim", Grid([0], ()), Grid([n - 1], ()), [])


@maker
def halo_exchange(n: int) -> Iterator[Case]:
    everyone, order = row(range(n)), row(shuffled(range(n)))
    yield halo_case("1-D", everyone, [(1, 1)], [parts(3 * n + 1, n)])
    yield halo_case("asymmetric", everyone, [(0, 2)], [parts(3 * n, n)])
    yield halo_case("wider than the neighbour", everyone, [(4, 3)], [parts(2 * n, n)])
    yield halo_case("none", everyone, [(0, 0)], [parts(n + 1, n)])
    yield halo_case("empty workers", order, [(2, 1)], [[3 * (k % 2) for k in range(n)]])
    yield halo_case("fewer than workers", order, [(1, 2)], [parts(n // 2, n)])
    P, Q = flat(n), Grid(shuffled(range(n)), GRIDS[n][1])
    yield halo_case("2-D corners", P, [(1, 2), (2, 1)], uneven([3 * p for p in P.shape], P.shape))
    deep = even([p + 2 for p in Q.shape], Q.shape)
    yield halo_case("3-D corners", Q, [(1, 1), (0, 1), (2, 3)], deep)
    if n > 2:
        some = Grid(range(n - 1, 0, -1), (n - 1, 1))
        yield halo_case("some workers", some, [(1, 1), (1, 1)], [parts(2 * n, n - 1), [3]])


@maker
def scatter_and_gather(n: int) -> Iterator[Case]:
    subsets = [shuffled(range(n)), list(range(n - 1, 0, -1))] if n > 2 else [list(range(n))]
    for ranks in subsets:
        P, name = Grid(ranks, (len(ranks), 1)), f"on {ranks}"
        balanced, skewed = even((n + 3, 2), P.shape), uneven((2 * n + 1, 3), P.shape)
        yield scatter_case(name, P, (n + 3, 2))
        yield gather_case(name, P, balanced)
        yield gather_case(f"uneven {name}", P, skewed)
        yield all_gather_all_case(name, P, balanced)
        yield all_gather_all_case(f"uneven {name}", P, skewed)


@maker
def move(n: int) -> Iterator[Case]:
    """Between every two kinds of layout on the same workers; on many workers, some of these."""
    sides = [Side(kind, flat(n), (5, 4)) for kind in KINDS]
    for (k, source), (j, target) in product(enumerate(sides), repeat=2):
        if n < 8 or (j - k) % 3 == n % 3:
            yield move_case("", source, target)


@maker
def move_elsewhere(n: int) -> Iterator[Case]:
    """From every kind of layout and to it, on other workers or in another order."""
    shape = (4, 5)
    for name, left, right in rank_sets(n):
        X, Y = Grid(left, near_square(len(left))), Grid(right, (len(right), 1))
        for k, kind in enumerate(KINDS):
            here = Side(kind, X, shape)
            there = Side(KINDS[(k + len(name)) % len(KINDS)], Y, shape)
            if n < 8 or k % 2:
                yield move_case(f", {name}", here, there)
            if n < 8 or not k % 2:
                yield move_case(f", {name}, back", there, here)


@maker
def products(n: int) -> Iterator[Case]:
    """Several moves in a row, over workers of which some have no part in some of them."""
    shape, few = (4, 5), max(1, n - 1)
    everyone, some, one = flat(n), Grid(range(n - few, n), near_square(few)), Grid([0], (1, 1))
    balanced, separate = Side("balanced", everyone, shape), Side("separate copies", some, shape)
    there, root = Side("balanced", some, shape), Side("balanced", one, shape)
    shared, grown = Side("shared copies", some, shape), Side("grown", some, shape)
    spread, collect = move_case("", balanced, separate), move_case("", separate, there)
    yield product_case("there and back", spread, move_case("", separate, balanced))
    yield product_case("within some workers", spread, collect, move_case("", there, grown))
    yield product_case("all-reduce", move_case("", separate, shared), move_case("", shared, root))
    steps = [(root, there), (there, grown), (grown, there), (there, root)]
    yield product_case("from one to one", *(move_case("", a, b) for a, b in steps))
