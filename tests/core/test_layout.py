"""Layouts: boxes, shapes and inner products against the reference.

Tests `core/layout.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from registry import KINDS, Grid, Side, even, flat, random, shapes_of, shuffled, uneven
from tessel import Layout, Partition
from tessel.core.layout import Cut
from tessel.core.partition import HypotheticalPartition

# Where everything lies.


def sides(n: int) -> list[Side]:
    grids = (
        flat(n),
        Grid(shuffled(range(n)), (n, 1)),
        Grid(range(n - 1, n // 2 - 1, -1), (1, -(-n // 2))),
    )
    return [
        Side(kind, grid, shape) for grid in grids for kind in KINDS for shape in ((5, 4), (2, 0))
    ]


def local_facts() -> list[Any]:
    found = []
    for side in sides(tessel.world().size):
        layout = side.layout()
        whole = random(side.shape)
        part = layout.local_part(whole)
        found.append((layout.box(), layout.local_shape, part.clone(), layout.shape))
    return found


@pytest.mark.parametrize("nprocs", [1, 4, 6])
def test_boxes_and_local_parts(run: Any, nprocs: int) -> None:
    everyones = run(local_facts, nprocs=nprocs)
    for side, *facts in zip(sides(nprocs), *everyones, strict=True):
        boxes, shapes, whole = side.boxes(), shapes_of(side.boxes()), random(side.shape)
        for worker, (box, shape, part, global_shape) in enumerate(facts):
            label = f"{side} on worker {worker}"
            assert global_shape == side.shape
            assert shape == shapes.get(worker, (0,)), label
            if worker in boxes:
                assert box == tuple((part.start, part.stop) for part in boxes[worker]), label
                assert torch.equal(part, whole[boxes[worker]]), label
            else:
                assert box is None and part.shape == (0,), label


def inner_products(dtype: torch.dtype) -> list[Any]:
    found = []
    for side in sides(tessel.world().size):
        layout, one, me = side.layout(), side.one(), tessel.world().rank
        x, y = (random(layout.local_shape, dtype, seed + one.get(me, me)) for seed in (0, 50))
        found.append(complex(layout.inner(x, y).item()))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("nprocs", [1, 4])
def test_inner_products(run: Any, nprocs: int, dtype: torch.dtype) -> None:
    """Separate copies all count, a shared value counts once; outside of the layout it is zero."""
    everyones = run(inner_products, dtype, nprocs=nprocs)
    for side, *products in zip(sides(nprocs), *everyones, strict=True):
        shapes, expected = shapes_of(side.boxes()), 0j
        for worker in {*side.one().values()}:
            x, y = (random(shapes[worker], dtype, seed + worker) for seed in (0, 50))
            expected += complex((x.conj() * y).sum().item())
        for worker, found in enumerate(products):
            here = expected if worker in shapes else 0j
            assert abs(found - here) <= 1e-12 * max(1.0, abs(here)), f"{side} on worker {worker}"


def layout_facts() -> list[bool]:
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    balanced, whole = Layout.balanced(P, (5, 4)), Layout.whole(P, (5, 4))
    shared = Layout.whole(P, [5, 4], shared=True)
    rows = Layout(P, (5, 4), (balanced.cuts[0], Cut((), ((0, 4),))), (1,))
    wide = balanced.grow([(1, 0), (0, 0)])
    return [
        balanced == Layout.from_lengths(P, [[3, 2], [2, 2]]),
        hash(balanced) == hash(Layout.from_lengths(P, [[3, 2], [2, 2]])),
        balanced != whole and whole != shared,
        len({balanced, whole, shared, rows, Layout.balanced(P, (5, 4))}) == 4,
        balanced.separate == () and whole.separate == (0, 1) and shared.separate == (),
        rows.separate == () and Layout(P, (5, 4), rows.cuts).separate == (1,),
        balanced.owns_once and shared.owns_once and rows.owns_once,
        not whole.owns_once and not wide.owns_once,
        balanced.grow([(0, 0), (0, 0)]) == balanced,
        balanced.grow([(9, 9), (9, 9)]).shape_on(3) == (5, 4),
        Layout.balanced(P, (torch.tensor(5), 4)) == balanced,
        "(5, 4)" in repr(balanced) and "2×2" in repr(balanced) and "shared" in repr(shared),
    ]


def test_layouts_as_values(run: Any) -> None:
    for found in run(layout_facts, nprocs=4):
        assert all(found), found


def whole_on_one_worker() -> list[bool]:
    world = tessel.world()
    only = Layout.whole(world.create_partition_inclusive([0]), (3,))
    return [only.owns_once, only == Layout.whole(world.create_partition_inclusive([0]), [3])]


def test_one_copy_is_owned_once(run: Any) -> None:
    assert all(all(found) for found in run(whole_on_one_worker, nprocs=2))


# From what the workers hold.


def from_shapes(shapes: dict[int, tuple[int, ...]], grid: list[int]) -> Any:
    P = tessel.world().create_cartesian_topology_partition(grid)
    try:
        layout = Layout.from_local_shapes(P, shapes)
    except ValueError as error:
        return str(error)
    return layout.shape, [layout.box(worker) for worker in P.ranks]


def test_layout_of_local_shapes(run: Any) -> None:
    lengths = uneven((5, 4), (2, 2))
    side = Side("uneven", Grid(range(4), (2, 2)), (5, 4))
    for shape, boxes in run(from_shapes, shapes_of(side.boxes()), [2, 2], nprocs=4):
        assert shape == (5, 4)
        assert boxes[3] == ((lengths[0][0], 5), (lengths[1][0], 4))


def test_local_shapes_that_do_not_fit(run: Any) -> None:
    """The text names the worker, what it has and what its neighbours ask for."""
    shapes = {0: (2, 3), 1: (2, 1), 2: (4, 3), 3: (4, 2)}
    texts = run(from_shapes, shapes, [2, 2], nprocs=4)
    assert len(set(texts)) == 1
    assert "worker 3 has (4, 2)" in texts[0] and "(4, 1)" in texts[0]


# Mistakes.


def _halves(shape: tuple[int, ...] = (4,)) -> Cut:
    return Cut((0,), ((0, 2), (2, 4)))


MISTAKES: dict[str, tuple[Callable[[tessel.Partition], Any], str]] = {
    "a cut missing": (lambda P: Layout(P, (4, 4), (_halves(),)), "one cut for each dimension"),
    "a part missing": (lambda P: Layout(P, (4,), (Cut((0,), ((0, 4),)),)), "2 parts, got 1"),
    "beyond the end": (lambda P: Layout(P, (3,), (_halves(),)), "is out of bounds for dimension 0"),
    "backwards": (lambda P: Layout(P, (4,), (Cut((0,), ((0, 2), (4, 2))),)), "is out of bounds"),
    "axis used twice": (lambda P: Layout(P, (4, 4), (_halves(), _halves())), "only one dimension"),
    "split and shared": (lambda P: Layout(P, (4,), (_halves(),), (0,)), "only one dimension"),
    "axis too large": (
        lambda P: Layout(P, (4,), (Cut((1,), ((0, 2), (2, 4))),)),
        "axis 1 is out of range",
    ),
    "axis below zero": (
        lambda P: Layout(P, (4,), (Cut((-1,), ((0, 2), (2, 4))),)),
        "axis -1 is out of range",
    ),
    "shared axis": (
        lambda P: Layout(P, (4,), Layout.whole(P, (4,)).cuts, (3,)),
        "axis 3 is out of range",
    ),
    "dimensions": (lambda P: Layout.balanced(P, (4, 4)), "as many axes"),
    "lengths": (lambda P: Layout.from_lengths(P, [[1], [2]]), "as many axes"),
    "other shapes": (
        lambda P: tessel.Move(Layout.balanced(P, (4,)), Layout.balanced(P, (5,))),
        "the same global shape",
    ),
    "local part": (
        lambda P: Layout.balanced(P, (4,)).local_part(torch.ones(5)),
        "expected a tensor",
    ),
    "product": (
        lambda P: tessel.Move(Layout.whole(P, (4,)), Layout.balanced(P, (4,)))
        @ tessel.Move(Layout.whole(P, (4,)), Layout.balanced(P, (4,))),
        "cannot compose",
    ),
    "halo of another dimension": (lambda P: Layout.balanced(P, (4,)).grow([(1, 1)] * 2), ""),
}


def make_mistakes() -> dict[str, str | None]:
    world, texts = tessel.world(), {}
    for name, (mistake, _) in MISTAKES.items():
        try:
            mistake(world)
            texts[name] = None
        except ValueError as error:
            texts[name] = str(error)
    return texts


def test_mistakes_raise_everywhere(run: Any) -> None:
    first, second = run(make_mistakes, nprocs=2)
    assert first == second
    for name, (_, words) in MISTAKES.items():
        text = first[name]
        assert text is not None and words in text, f"{name}: {text}"


def test_even_and_uneven_cover_the_same() -> None:
    assert even((10, 5), (4, 2)) == [[3, 3, 2, 2], [3, 2]]
    assert uneven((10, 5), (4, 2)) == [[5, 1, 2, 2], [4, 1]]


def test_a_layout_that_was_made_before_is_given_again_with_its_own_partition() -> None:
    """Not that of an equal partition, which may have no group, or one of another job."""
    P, Q = (Partition((0,), (1, 1)) for _ in range(2))
    first, again, other = (Layout.split(R, (4, 6), (0, None), shared=[1]) for R in (P, P, Q))
    assert again is first and first.partition is P
    assert other == first and other.partition is Q
    assert Layout.split(P, (4, 6), (-2, None), shared=[-1]) == first
    with pytest.raises(TypeError):
        Layout.split(P, (4, 6), (0.0, None), shared=[1])  # type: ignore[list-item]


def layouts_of_one_shared_value() -> list[Layout]:
    world = tessel.world()
    first = world.create_partition_inclusive([0])
    alone = first.create_cartesian_topology_partition((1, 1))
    row = world.create_cartesian_topology_partition((world.size, 1))
    kept = Layout.split(row, (4, 6), (None, 1), shared=(0,))
    return [Layout.balanced(alone, (4, 6)), kept, Layout.balanced(row, (4, 6))]


def test_one_worker_has_all_of_what_lies_in_parts(run: Any) -> None:
    """`is_whole` says where values lie, `is_shared` how the layout was made."""
    alone, kept, split = run(layouts_of_one_shared_value, nprocs=2)[0]
    assert (alone.is_whole, alone.is_shared) == (True, False)
    assert (kept.is_whole, kept.is_shared) == (True, False)
    assert (split.is_whole, split.is_shared) == (False, False)
    assert kept.gathered([1]).is_shared


def test_other_dimensions_host_what_becomes_whole() -> None:
    P = HypotheticalPartition((2, 3))
    layout = Layout.balanced(P, (4, 12))
    there = layout.hosted((1,))
    assert [cut.axes for cut in there.cuts] == [(0,), ()]  # 4 are too few for 6 workers
    assert there.shared == (1,)
    long = Layout.balanced(P, (12, 12))
    assert [cut.axes for cut in long.hosted((1,)).cuts] == [(0, 1), ()]
    assert long.hosted((1,)).recut(0, long.cuts[0]).separate == (1,)
    both = long.with_whole(0, 12)
    assert [cut.axes for cut in both.hosted((2,), first=(0,)).cuts] == [(1,), (0,), ()]
    assert long.split_like((12, 6)).cuts == (long.cuts[0], Cut((1,), ((0, 2), (2, 4), (4, 6))))
    assert long.hosted((1,)).reshaped_along((12, 5), (1,)).cuts[1] == Cut.whole(5)
    assert long.of_dim(1) == Layout(P, (12,), (long.cuts[1],))
