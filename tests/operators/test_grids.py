"""Operators between any two grids of the same workers, with a common refinement or without.

Tests `operators/layouts.py`, `operators/planning.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise, product
from math import prod
from random import Random
from typing import Any, cast

import pytest
import torch

import tessel
from covering import repeats
from operator_cases import (
    H,
    Shape,
    Spec,
    Spread,
    add,
    build,
    check_spreads,
    compose,
    dft,
    diagonal,
    draw,
    grids,
    identity,
    inv,
    kron,
    loss_of,
    matrix,
    multilinear,
    num_transfers,
    parameters,
    plan_of,
    random_spread,
    restriction,
    text_of,
    values,
)
from parity import close
from tessel import (
    Layout,
    Move,
    ParDFT,
    ParDiagonal,
    ParIdentity,
    ParRepartition,
    best_partition,
    distribute,
    init,
    vec,
)
from tessel.core.partition import HypotheticalPartition
from tessel.operators.choose import plan_on
from tessel.operators.explanation import explain, explain_plan
from tessel.operators.layouts import (
    alike,
    numel_sent,
    on_grid,
    refined,
    refinement,
    split_along,
)
from tessel.operators.storage import parameters_sent, storage_of
from tessel.testing import check_adjoint, check_gradient, count_traffic

Run = Callable[..., list[Any]]
F64, C128 = torch.float64, torch.complex128
APART = [((2, 3), (3, 2)), ((3, 2), (2, 3))]


# -- values, adjoints, gradients of first and second order ----------------------------------------


def two_dims() -> list[Spec]:
    F = kron(dft(7, F64), dft(6))
    return [
        kron(identity(7), identity(5)),
        F,
        inv(F),
        H(F),
        kron(matrix(4, 7, F64, 1), diagonal(6, F64, 2)),
        kron(diagonal(7, F64, 1), diagonal(6, F64, 2)),
        compose(inv(F), kron(diagonal(4, C128, 1), diagonal(6, C128, 2)), F),
        multilinear(3, 2, 7),
        compose(kron(restriction(4, (0, 2), T=C128), identity(6, C128)), F),
        H(kron(restriction(7, (1, 2), (5, 7)), restriction(8, (0, 5)))),
        add(kron(matrix(5, 5, F64, 1), identity(7)), kron(identity(5), matrix(7, 7, F64, 2))),
        kron(dft(2), dft(1)),  # shorter than the workers are many
    ]


def three_dims() -> list[Spread]:
    F = kron(dft(5, F64), dft(4), dft(7))
    D = kron(diagonal(3, C128, 1), identity(4, C128), diagonal(7, C128, 2))
    specs = [F, compose(inv(F), D, F), kron(matrix(6, 5, F64, 1), diagonal(4), dft(6))]
    ways = [((2, 3, 1), (3, 2, 1)), ((2, 3, 1), (1, 3, 2)), ((1, 3, 2), (2, 1, 3))]
    return [
        Spread(spec, *way, whole=number % 2 == 0, second=number == 0)
        for number, (spec, way) in enumerate(product(specs, ways))
    ]


def apart() -> list[Spread]:
    found = [
        Spread(spec, grid, out, whole=number % 2 == 0)
        for number, spec in enumerate(two_dims())
        for grid, out in APART
    ]
    spec = kron(dft(5, F64), matrix(4, 6, C128))
    found += [Spread(spec, *way, batch=(3,), vector=True) for way in APART]
    ranks = (5, 1, 0, 3, 2, 4)
    found += [Spread(spec, *way, ranks=ranks, fixed=True) for way in APART]
    return found + three_dims()


@pytest.mark.parametrize("part", range(3))
def test_any_two_grids_of_six_workers(run: Run, part: int) -> None:
    cases = apart()[part::3]
    for case in cases:
        assert case.out is not None and refinement(case.grid, case.out) is None
    assert run(check_spreads, cases, nprocs=6) == [len(cases)] * 6


def random_apart(rng: Random) -> Spread:
    """A random tree between grids of six workers without a common refinement."""
    while True:
        case = random_spread(rng, 6)
        ndim = len(build(case.spec, {}).domain.shape)
        pairs = [
            (grid, out) for grid, out in product(grids(6, ndim), repeat=2) if is_apart(grid, out)
        ]
        if pairs:
            grid, out = rng.choice(pairs)
            ranks = tuple(rng.sample(range(6), 6))
            batch = None if case.batch is None else case.batch[:1]
            vector = case.vector and batch != (1,)
            return replace(case, grid=grid, out=out, batch=batch, ranks=ranks, vector=vector)


def is_apart(some: Shape, other: Shape) -> bool:
    """Whether no grid is finer than both: some products of last sizes do not divide each other."""
    marks = sorted({prod(g[k:]) for g in (some, other) for k in range(len(g) + 1)})
    return any(b % a for a, b in pairwise(marks))


@pytest.mark.slow
def test_random_trees_between_grids_apart(run: Run) -> None:
    rng = Random(6)
    cases = [random_apart(rng) for _ in range(repeats(24))]
    for start in range(0, len(cases), 8):
        some = cases[start : start + 8]
        assert run(check_spreads, some, nprocs=6) == [len(some)] * 6


def test_six_of_seven_workers(run: Run) -> None:
    spec = kron(dft(5, F64), matrix(4, 6, C128))
    cases = [Spread(spec, *way, ranks=(6, 1, 0, 3, 2, 4)) for way in APART]
    assert run(check_spreads, cases, nprocs=7) == [2] * 7


def copies() -> None:
    """Of an operator between two grids, with its parameters."""
    S = distribute(tessel.kron(ParDiagonal(F64, 7), ParDiagonal(F64, 6)), [2, 3], [3, 2])
    theta = init(S)
    x = cast(Any, S).layout_in.local_part(values((7, 6), F64, 1))
    expected = S(theta) * x
    for other, same in (copy.deepcopy((S, theta)), pickle.loads(pickle.dumps((S, theta)))):
        kept = {each.name for each in fields(Layout)}
        assert vars(plan_of(other).target).keys() == kept, "no hash of another process"
        close("copy", other(same) * x, expected)
        assert plan_of(other).source == plan_of(S).source and same[other.leaves[0]].requires_grad


def test_copies_of_operators_between_two_grids(run: Run) -> None:
    run(copies, nprocs=6)


def another_order() -> str:
    A = tessel.kron(ParDFT(C128, 6), ParDFT(C128, 7))
    P, Q = (tessel.Partition(ranks, (2, 1)) for ranks in ((0, 1), (1, 0)))
    return text_of(lambda: distribute(A, P, Q))


def test_another_order_of_workers_is_refused(run: Run) -> None:
    found = run(another_order, nprocs=2)
    assert found == [found[0]] * 2 and "the same workers in the same order" in found[0]


def different_calls() -> list[str]:
    """One worker calls the operator that ends on another grid, or another in another way."""
    A = tessel.kron(ParDFT(C128, 6), ParDFT(C128, 6))
    S, T = distribute(A, [2, 3], [3, 2]), distribute(A, [2, 3])
    x = cast(Any, S).layout_in.local_part(values((6, 6), C128, 1))
    odd = tessel.world().rank == 4
    short = x[:1] if odd else x
    texts = [text_of(lambda: (S if odd else T) * x), text_of(lambda: S * short)]
    expected = cast(Any, S).layout_out.local_part(torch.fft.fft2(values((6, 6), C128, 1)))
    close("the next call", S * x, expected)
    return texts


def test_what_does_not_fit_raises_on_all(run: Run) -> None:
    found = run(different_calls, nprocs=6)
    assert found == [found[0]] * 6
    assert "all workers must make the same calls in the same order" in found[0][0]
    assert "worker 4: expected a tensor of shape (3, 2)" in found[0][1]


def with_columns() -> None:
    """A batch in parts stays in these, whatever grid the rest lies on."""
    A = tessel.kron(ParDFT(C128, 6), ParDFT(C128, 7))
    everyone = tessel.world()
    S = distribute(A, [1, 3, 2], [3, 1, 2])
    assert refinement((3, 2, 2), (2, 3, 2)) is None
    x = values((6, 7, 5), C128, 1)
    rank = cast(int, everyone.rank)
    columns = slice(0, 3) if rank % 2 == 0 else slice(3, 5)
    here, there = cast(Any, S).layout_in, cast(Any, S).layout_out
    rows = slice(*here.box()[1])
    y = S * x[:, rows, columns]
    expected = torch.fft.fft2(x, dim=(0, 1))[slice(*there.box()[0])][..., columns]
    close("columns", y, expected)
    text = text_of(lambda: distribute(A, [2, 3, 1], [2, 1, 3]))
    assert "the batch must be split in the same way" in text


def test_columns_of_a_batch_stay_where_they_are(run: Run) -> None:
    run(with_columns, nprocs=6)


def columns_on_twelve() -> None:
    A = tessel.kron(ParDFT(C128, 6), ParDFT(C128, 7))
    S = distribute(A, [2, 3, 2], [3, 2, 2])
    rank = cast(int, tessel.world().rank)
    columns = slice(0, 3) if rank % 2 == 0 else slice(3, 5)
    x = values((6, 7, 5), C128, 1)
    here, there = cast(Any, S).layout_in, cast(Any, S).layout_out
    point = x[(*(slice(*each) for each in here.box()), columns)].clone().requires_grad_()
    y = S * point
    whole = torch.fft.fft2(x, dim=(0, 1))
    mine = whole[(*(slice(*each) for each in there.box()), columns)]
    close("columns", y, mine)
    (slope,) = torch.autograd.grad(loss_of(y, torch.zeros_like(y)), point)
    close("gradient", slope, 42 * point.detach())
    text = text_of(lambda: S * (point if rank else point[..., :1]))
    assert "workers 0 and 2 have parts of the same columns, but have 1 and 3 columns" in text


def test_columns_on_grids_without_a_common_one(run: Run) -> None:
    run(columns_on_twelve, nprocs=12)


# -- products, sums, parameters -------------------------------------------------------------------


def products() -> None:
    P, Q = ([2, 3], [3, 2])
    known: Any = {}
    Fs, Ds = kron(dft(6, F64), dft(5)), kron(diagonal(4, C128, 1), diagonal(5, C128, 2))
    F, D = build(Fs, known), build(Ds, known)
    theta = parameters(draw(Ds), known)
    S, T = distribute(F, P, Q), distribute(D, Q)
    x, y = values((6, 5), F64, 1), values((4, 5), C128, 2)
    source, target = cast(Any, S).layout_in, cast(Any, S).layout_out
    assert source.partition.shape == (2, 3) and target.partition.shape == (3, 2)
    mine, other = source.local_part(x), target.local_part(y)
    close("F", S * mine, target.local_part(F * x))
    close("F.H", S.H * other, source.local_part(F.H * y))
    close("F.inv", S.inv * other, source.local_part(F.inv * y))
    close("vec", S * vec(mine), vec(target.local_part(F * x)))
    close("there and back", (S.inv @ S) * mine, mine)
    chain = S.inv @ T(theta) @ S
    close("chain", chain * mine, source.local_part((F.inv @ D(theta) @ F) * x))
    close("chain.H", chain.H * mine, source.local_part((F.inv @ D(theta) @ F).H * x))
    both = T @ S
    close("D F", both(theta) * mine, target.local_part((D @ F)(theta) * x))
    close("(D F).H", both(theta).H * other, source.local_part((D @ F)(theta).H * y))
    close("sum", (S + 2 * S) * mine, target.local_part(3 * (F * x)))
    close("multiple", ((1 - 2j) * S).H * other, source.local_part(F.H * ((1 + 2j) * y)))
    here, there = distribute(F, P), distribute(F, Q)
    across = ParRepartition(C128, (4, 5), P, Q)
    back = ParRepartition(F64, (6, 5), P, Q)
    close("moved behind", (across @ here) * mine, target.local_part(F * x))
    close("the same", (across @ here - there @ back) * mine, 0 * other)
    assert num_transfers(back.H @ back) == 0
    assert "cannot add operators with different layouts" in text_of(lambda: here + there)


def test_products_and_sums_on_any_two_grids(run: Run) -> None:
    run(products, nprocs=6)


def parts_of_parameters() -> None:
    """Parameters in parts are the same numbers on every grid, and are saved whole."""
    A = tessel.kron(ParDiagonal(F64, 7), ParDiagonal(F64, 6))
    S, T = distribute(A, [2, 3], [3, 2]), distribute(A, [3, 2], [2, 3])
    whole = values((7, 6), F64, 1)
    results = []
    for each in (S, T):
        torch.manual_seed(3)
        theta = init(each, requires_grad=False)
        x = cast(Any, each).layout_in.local_part(whole)
        results.append(theta)
        first, second = (Move(*layouts).apply(value) for layouts, value in stored(each, theta))
        expected = torch.einsum("i,j,ij->ij", first, second, whole)
        close("applied", each(theta) * x, cast(Any, each).layout_out.local_part(expected))
    here, _ = results
    text = text_of(lambda: T(here) * cast(Any, T).layout_in.local_part(whole))
    assert "θ was drawn for another distribution" in text
    assert [tuple(each.shape) for each in S.module().state_dict().values()] == [(7,), (6,)]


def stored(S: Any, theta: Any) -> list[Any]:
    """How each parameter lies, and the whole of it on all workers; its value."""
    layouts = [S.parameter_layout(leaf) for leaf in theta]
    return [
        ((each, Layout.whole(each.partition, each.shape)), value)
        for each, value in zip(layouts, theta.values(), strict=True)
    ]


def test_parameters_on_any_two_grids(run: Run) -> None:
    run(parts_of_parameters, nprocs=6)


# -- what is sent ---------------------------------------------------------------------------------


def sent_by(function: Callable[[], Any]) -> tuple[int, int]:
    with count_traffic() as traffic:
        function()
    return traffic.bytes_sent, traffic.messages


def repartition_and_move(before: Shape, after: Shape, shape: Shape) -> None:
    """A repartition sends what the one direct move sends, which nothing can go below."""
    P, Q = (tessel.world().create_cartesian_topology_partition(each) for each in (before, after))
    source, target = Layout.balanced(P, shape), Layout.balanced(Q, shape)
    whole = values(shape, F64, 1)
    mine, other = source.local_part(whole).clone(), target.local_part(whole).clone()
    R, move = ParRepartition(F64, shape, before, after), Move(source, target)
    assert torch.equal(R * mine, other) and torch.equal(R.H * other, mine)
    assert num_transfers(R) == 1
    assert sent_by(lambda: R * mine) == sent_by(lambda: move.apply(mine))
    assert sent_by(lambda: R.H * other) == sent_by(lambda: move.H.apply(other))
    own, new = source.box(), target.box()
    assert own is not None and new is not None
    kept = 1
    for (a, b), (c, d) in zip(own, new, strict=True):
        kept *= max(0, min(b, d) - max(a, c))
    bytes_sent, _ = sent_by(lambda: R * mine)
    assert bytes_sent == 8 * (mine.numel() - kept)
    check_adjoint(move)
    check_gradient(move)


@pytest.mark.parametrize("shape", [(12, 12), (7, 5), (1, 9)])
def test_a_repartition_sends_the_least(run: Run, shape: Shape) -> None:
    for before, after in APART:
        run(repartition_and_move, before, after, shape, nprocs=6)


def predicted(spec: Spec, before: Shape, after: Shape) -> None:
    known: Any = {}
    S = distribute(build(spec, known), before, after)
    theta = init(S, requires_grad=False)
    for each in (S, S.H, S.H @ S):
        x = torch.ones(cast(Any, each).layout_in.local_shape, dtype=each.domain.dtype)
        found = sent_by(lambda each=each, x=x: each.apply(x, theta))  # type: ignore[misc]
        total = explain(cast(Any, each)).totals[cast(int, tessel.world().rank)]
        assert (total.bytes_sent, total.num_messages) == found, (spec, before, after)


@pytest.mark.parametrize("number", range(len(two_dims())))
def test_predicted_bytes_are_the_counted_ones(run: Run, number: int) -> None:
    for before, after in APART:
        run(predicted, two_dims()[number], before, after, nprocs=6)


def count_transfers() -> dict[str, int]:
    cube = tessel.kron(*(ParDFT(C128, 12) for _ in range(3)))
    plane = tessel.kron(*(ParDFT(C128, 12) for _ in range(2)))
    rows = tessel.kron(ParDFT(C128, 12), ParIdentity(C128, 12))
    return {
        "cube": num_transfers(distribute(cube, [2, 3, 1], [3, 2, 1])),
        "one way": num_transfers(distribute(cube, [2, 3, 1], [1, 3, 2])),
        "plane": num_transfers(distribute(plane, [2, 3], [3, 2])),
        "rows": num_transfers(distribute(rows, [2, 3], [3, 2])),
        "diagonal": num_transfers(
            distribute(tessel.kron(ParDiagonal(F64, 12), ParDiagonal(F64, 12)), [2, 3], [3, 2])
        ),
    }


def test_tensors_travel_as_seldom_as_they_can(run: Run) -> None:
    found = run(count_transfers, nprocs=6)
    assert found == [{"cube": 2, "one way": 2, "plane": 3, "rows": 2, "diagonal": 1}] * 6


# -- plans without workers ------------------------------------------------------------------------


def workers_on(*grid: int) -> HypotheticalPartition:
    return HypotheticalPartition(grid)


def test_layouts_are_alike_if_all_workers_have_the_same() -> None:
    for some, other in product(grids(12, 3), repeat=2):
        a, b = (on_grid(workers_on(*grid), (7, 8, 9)) for grid in (some, other))
        same = all(a.box(place) == b.box(place) for place in range(12))
        assert alike(a, b) == same
        if some == other:
            assert a == b and hash(a) == hash(b)
    whole = [split_along(workers_on(*grid), (6,), [()]) for grid in ((2, 3), (3,))]
    assert not alike(*whole)


def test_balanced_parts_are_equal_to_listed_ones() -> None:
    """Whoever made them: a layout of a plan is one of the user's."""
    P, lengths = workers_on(3, 2), (7, 3)
    listed = Layout.split(P, lengths, (0, 1))
    lazy = split_along(P, lengths, [(0,), (1,)])
    assert listed == lazy and lazy == listed and hash(listed) == hash(lazy)
    assert listed.identity == lazy.identity and repr(listed) == repr(lazy)
    assert listed != split_along(P, lengths, [(1,), (0,)]) != lazy
    parts = lazy.cuts[0].intervals
    assert parts == ((0, 3), (3, 5), (5, 7)) and parts == ((0, 3), (3, 5), (5, 7))
    assert parts[-1] == (5, 7) and parts[1:] == ((3, 5), (5, 7)) and next(iter(parts)) == (0, 3)
    assert hash(parts) == hash(tuple(parts)) and (0, 3) in parts
    with pytest.raises(IndexError, match="there are 3 parts"):
        parts[3]
    assert pickle.loads(pickle.dumps(lazy)) == copy.deepcopy(lazy) == listed


def test_an_explanation_names_the_other_grid() -> None:
    A = tessel.kron(ParDFT(C128, 12), ParIdentity(C128, 12))
    plan = plan_on(A, (2, 3), (3, 2))
    explanation = explain_plan(plan, C128, storage_of(plan))
    titles = [line.title for line in explanation.lines]
    assert titles == ["transfer", "ParDFT along 0", "transfer to the grid 3×2"] or titles == [
        "transfer to the grid 3×2",
        "ParDFT along 0",
        "transfer",
    ]
    assert "transfer to the grid 3×2" in str(explanation)
    assert [line.title for line in explained_on_one_grid(A)] == [
        "transfer",
        "ParDFT along 0",
        "transfer",
    ]


def explained_on_one_grid(A: Any) -> Any:
    plan = plan_on(A, (2, 3))
    return explain_plan(plan, C128, storage_of(plan)).lines


def test_the_way_of_fewest_bytes_is_taken() -> None:
    """Of all layouts on either grid with a whole first dimension, none sends less."""
    A = tessel.kron(ParDFT(C128, 12), ParIdentity(C128, 18))
    plan = plan_on(A, (2, 3), (3, 2))
    explanation = explain_plan(plan, C128, storage_of(plan))
    total = sum(cost.bytes_sent for cost in explanation.totals)
    ways = []
    for grid in ((2, 3), (3, 2)):
        for axes in ((0, 1), (1, 0)):
            middle = split_along(workers_on(*grid), (12, 18), [(), axes])
            ways.append(sent(plan.source, middle) + sent(middle, plan.target))
    assert total == 16 * min(ways)


def sent(before: Layout, after: Layout) -> int:
    return sum(numel_sent(before, after, worker) for worker in before.partition.ranks)


def test_the_best_partition_for_a_result_on_a_grid() -> None:
    A = tessel.kron(ParDFT(C128, 12), ParDFT(C128, 12))
    choice = best_partition(A, 6, partition_out=[3, 2])
    assert {each.partition for each in choice.candidates} == set(grids(6, 2))
    for each in choice.candidates:
        expected = on_grid(workers_on(3, 2), (12, 12))
        assert alike(each.plan.target, expected)
    assert choice.bytes == max(total.bytes_sent for total in choice.explanation.totals)
    for wrong in ([3, 3], [6], [6.0, 1], [-3, -2], "somewhere", 6):
        with pytest.raises(ValueError, match="partition_out must be None, 'anywhere', or numbers"):
            best_partition(A, 6, partition_out=wrong)  # type: ignore[arg-type]


def test_parameters_are_counted_alike_on_one_grid_and_on_two() -> None:
    """Worker by worker, and dimension by dimension where that is possible."""
    for stored, used in product(grids(6, 2), repeat=2):
        fine = refinement(stored, used)
        a, b = (on_grid(workers_on(*grid), (7, 5)) for grid in (stored, used))
        for place in range(6):
            apart = parameters_sent(a, b, place)
            assert apart[0] >= 0 and apart[1] >= 0
            if fine is not None:
                assert parameters_sent(refined(a, fine), refined(b, fine), place) == apart


def test_plans_on_two_grids_are_the_same_everywhere(run: Run) -> None:
    assert len(set(run(steps_in_words, nprocs=6))) == 1


def steps_in_words() -> str:
    S = distribute(tessel.kron(*(ParDFT(C128, n) for n in (5, 7, 6))), [2, 3, 1], [3, 1, 2])
    return repr([(type(s).__name__, s.before, s.after) for s in plan_of(S).every_step()])
