"""Operators on tensors that are spread over workers equal those of one process, and send little.

Tests `operators/distributed.py`, `operators/execution.py`, `operators/layouts.py`,
`operators/storage.py`, `operators/reduce.py`, `operators/input_shape.py`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import tessel
from operator_cases import (
    DTYPES,
    H,
    Shape,
    Spec,
    Spread,
    add,
    build,
    check_spreads,
    complex_of,
    compose,
    dct,
    dft,
    diagonal,
    draw,
    dst,
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
    restriction,
    scale,
    subtract,
    text_of,
    values,
)
from parity import close
from tessel import (
    Layout,
    ParDFT,
    ParDiagonal,
    ParIdentity,
    ParMatrix,
    ParMultilinear,
    ParReduce,
    ParRepartition,
    ParRestriction,
    Partition,
    distribute,
    init,
    vec,
)
from tessel.core.layout import Cut
from tessel.core.partition import HypotheticalPartition
from tessel.operators import Parameters, ParOperator, gradient
from tessel.operators.layouts import split_along
from tessel.operators.planning import make_plan
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
F32, F64, C64, C128 = DTYPES
WORKERS = pytest.mark.parametrize("nprocs", [1, 3, 4])
SECONDS = 20  # for calls that would wait for ever if something were wrong


# -- every operator on every partition ------------------------------------------------------------


def half(n: int, T: torch.dtype) -> int:
    return n if T.is_complex else n // 2 + 1


def one_dim(T: torch.dtype) -> list[Spec]:
    C = complex_of(T)
    return [
        identity(7, T),
        matrix(5, 7, T),
        H(matrix(7, 2, T)),
        inv(matrix(3, 3, T)),
        diagonal(7, T),
        H(inv(diagonal(2, T))),
        dft(7, T),
        H(dft(8, T)),
        inv(dft(6, T)),
        H(inv(dft(5, T))),
        dft(1, T),
        dft(5, T, 1.5),
        H(dft(6, T, 1.5)),
        inv(dft(4, T, 1.5)),
        dct(7, T),
        H(dct(6, T, 1)),
        inv(dct(5, T, 3)),
        dst(6, T, 4, "ortho"),
        H(inv(dst(7, T, 1, "forward"))),
        restriction(7, (0, 2), (3, 4), (6, 7), T=T),
        H(restriction(7, (2, 4), T=T)),
        restriction(3, (2, 3), T=T),
        compose(inv(dft(7, T)), diagonal(half(7, T), C), dft(7, T)),
        add(matrix(7, 7, T, 1), scale(-2, diagonal(7, T, 2))),
    ]


def two_dims(T: torch.dtype) -> list[Spec]:
    C = complex_of(T)
    F = kron(dft(6, T), dft(5, C))
    return [
        F,
        H(F),
        inv(F),
        kron(dft(3, C), dft(2, T)),
        kron(dft(4, C, 1.5), dft(3, T, 1.5)),
        inv(kron(dft(4, C, 1.5), dft(3, T, 1.5))),
        kron(dct(6, T), dst(5, T, 3)),
        H(kron(dft(5, T), dst(3, C, 1))),
        kron(matrix(2, 3, T, 1), matrix(7, 5, T, 2)),
        kron(identity(3, T), matrix(3, 5, T)),
        multilinear(2, 3, 7, T=T),
        inv(multilinear(2, 2, 5, T=T)),
        kron(restriction(7, (1, 2), (5, 7), T=T), diagonal(3, T)),
        H(kron(restriction(7, (1, 2), (5, 7), T=T), restriction(3, (0, 1), T=T))),
        compose(kron(restriction(half(6, T), (0, 2), T=C), identity(5, C)), F),
        add(kron(matrix(3, 3, T, 1), identity(5, T)), kron(identity(3, T), matrix(5, 5, T, 2))),
        kron(add(matrix(2, 3, T, 1), matrix(2, 3, T, 2)), dft(5, T)),
    ]


def three_dims(T: torch.dtype) -> list[Spec]:
    C = complex_of(T)
    F = kron(dft(5, T), dft(3, C), dft(4, C))
    weights = multilinear(2, 3, half(5, T), 3, T=C)
    return [
        F,
        inv(F),
        kron(dct(5, T, 1), dft(4, T), dst(3, C, 2, "ortho")),
        H(kron(dft(2, C, 1.5), dft(3, C, 1.5), dft(4, T, 1.5))),
        compose(inv(F), kron(*(diagonal(n, C, n) for n in (half(5, T), 3, 4))), F),
        kron(identity(5, T), identity(2, T), matrix(3, 4, T)),
        compose(weights, kron(identity(3, C), dft(5, T), dft(3, C))),
        subtract(
            kron(matrix(2, 2, T, 1), diagonal(3, T, 2), dft(4, T)),
            scale(2, kron(diagonal(2, T, 3), identity(3, T), dft(4, T))),
        ),
    ]


def everything(nprocs: int, T: torch.dtype) -> list[Spread]:
    """Each operator on each grid; parameters whole and in parts by turns."""
    found = []
    for dims, specs in enumerate((one_dim(T), two_dims(T), three_dims(T)), start=1):
        for number, spec in enumerate(specs):
            # three workers have all rows, four only where there is nothing else
            places = [grid for grid in grids(nprocs, dims) if dims == 1 or 4 not in grid]
            for place, grid in enumerate(places):
                whole, out = (number + place) % 3 == 0, ("anywhere", None)[number % 3 == 0]
                found.append(Spread(spec, grid, out, whole=whole, second=True))
    return found


# all types on three workers but one, which is on four
@pytest.mark.parametrize(
    ("T", "nprocs"),
    [
        pytest.param(T, nprocs, id=f"{T}-{nprocs}")
        for T in DTYPES
        for nprocs in (1, 4 if T in (torch.complex128,) else 3)
    ],
)
def test_every_operator_on_every_partition(run: Run, nprocs: int, T: torch.dtype) -> None:
    cases = everything(nprocs, T)
    assert run(check_spreads, cases, nprocs=nprocs) == [len(cases)] * nprocs


def other_partitions() -> list[Spread]:
    F = kron(dft(5, F64), dft(4), dft(3))
    M = kron(matrix(6, 5, F64, 1), matrix(2, 4, F64, 2), diagonal(3))
    found = []
    for spec in (F, M, compose(inv(F), kron(diagonal(3, C128), identity(4), diagonal(3)), F)):
        for grid in ((4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2), (2, 1, 2)):
            for out in ((4, 1, 1), (2, 2, 1), (1, 1, 4), (1, 2, 2)):
                found.append(Spread(spec, grid, out, second=False))
    return found


@pytest.mark.slow
def test_partitions_of_the_result_of_one_s_own(run: Run) -> None:
    cases = other_partitions()
    assert run(check_spreads, cases, nprocs=4) == [len(cases)] * 4


def batches() -> list[Spread]:
    spec = kron(dft(5, F64), matrix(2, 3, C128))
    mode = multilinear(2, 3, 4)
    found = [Spread(spec, grid, batch=(3,)) for grid in grids(4, 2)]
    found += [Spread(spec, grid, "anywhere", batch=(2,), vector=True) for grid in grids(4, 2)]
    for columns in ((1, 2), (0, 3), (2, 0), (0, 0)):
        for grid in ((2, 1, 2), (1, 2, 2)):
            found.append(Spread(spec, grid, batch=columns))
            found.append(Spread(mode, grid, batch=columns, whole=True))
    found.append(Spread(spec, (1, 1, 4), batch=(1, 2, 0, 3)))
    found.append(Spread(mode, (1, 1, 4), batch=(1, 2, 0, 3), vector=True))
    found.append(Spread(spec, (1, 1, 2, 2), batch=(2, 1, 0, 3)))
    found.append(Spread(spec, (2, 1, 2), (1, 2, 2), batch=(2, 1)))
    return found


def test_batches_and_their_partitions(run: Run) -> None:
    cases = batches()
    assert run(check_spreads, cases, nprocs=4) == [len(cases)] * 4


def some_workers() -> list[Spread]:
    spec = kron(dft(5, F64), matrix(2, 3, C128))
    found = []
    for ranks in ((0,), (2,), (3, 1), (2, 0), (3, 0, 2), (3, 2, 1, 0)):
        for grid in grids(len(ranks), 2):
            found.append(Spread(spec, grid, ranks=ranks))
            found.append(Spread(H(spec), grid, "anywhere", ranks=ranks, batch=(2,), whole=True))
    return found


def test_partitions_of_some_workers_in_any_order(run: Run) -> None:
    cases = some_workers()
    assert run(check_spreads, cases, nprocs=4) == [len(cases)] * 4


def parts_of_any_lengths() -> None:
    """Layouts instead of grids: uneven and empty parts, and other axes."""
    P = tessel.world().create_cartesian_topology_partition([2, 1])
    whole = Cut((), ((0, 4),))
    F = tessel.kron(ParDFT(C128, 5), ParDFT(C128, 4))
    x = values((5, 4), C128, 1)
    layouts = [Layout.from_lengths(P, [parts, [4]]) for parts in ([4, 1], [5, 0], [0, 5], [3, 2])]
    layouts.append(Layout(P, (5, 4), (Cut((), ((0, 5),)), Cut((0,), ((0, 3), (3, 4))))))
    for source in layouts:
        for target in (None, "anywhere", *layouts):
            S = distribute(F, source, target)
            found = cast(Any, S).layout_out
            if target != "anywhere":
                expected = source if target is None else target
                assert found.local_shape == expected.local_shape
                assert found.local_part(x).equal(expected.local_part(x))
            close("there", S * source.local_part(x), found.local_part(torch.fft.fft2(x)))
            close("adjoint", S.H * found.local_part(x), source.local_part(F.H * x))
    R = tessel.kron(ParRestriction(C128, 5, [range(1, 3)]), ParIdentity(C128, 4))
    for source in layouts:
        S = distribute(R, source)
        target = source.resized((2, 4))
        close("restricted", S * source.local_part(x), target.local_part(x[1:3]))
    D = distribute(ParDiagonal(F64, 5), Layout.from_lengths(tessel.world(), [[4, 1]]))
    assert [tuple(each.shape) for each in init(D).values()] == [((4,), (1,))[P.rank or 0]]
    for wrong in (
        Layout(P, (5, 4), (Cut((0,), ((0, 2), (3, 5))), whole)),
        Layout(P, (5, 4), (Cut((0,), ((3, 5), (0, 3))), whole)),
        Layout(P, (5, 4), (Cut((0,), ((0, 3), (2, 5))), whole)),
        Layout.whole(P, (5, 4)),
        Layout.whole(P, (5, 4), shared=True),
        Layout.balanced(P, (4, 5)),
    ):
        with pytest.raises(
            ValueError, match=r"a layout of shape \(5, 4\) that stores each value once"
        ):
            distribute(F, wrong)


def test_layouts_give_parts_of_any_lengths(run: Run) -> None:
    run(parts_of_any_lengths, nprocs=2)


def several_batch_dims() -> None:
    """Trailing batches of several dimensions keep their shape."""
    A = tessel.kron(ParDFT(F64, 5), ParIdentity(F64, 3))
    S = distribute(A, [1, 2])
    layout = cast(Any, S).layout_in
    x = values((5, 3, 2, 3, 2), F64, 1)
    start, stop = layout.box()[1]
    y = S * x[:, start:stop]
    assert y.shape == (3, stop - start, 2, 3, 2)
    close("batch", y, torch.fft.rfft(x, dim=0)[:, start:stop])
    y = S * x[:, start:stop].permute(0, 1, 4, 3, 2)
    close("strided batch", y, torch.fft.rfft(x, dim=0)[:, start:stop].permute(0, 1, 4, 3, 2))
    conjugate = distribute(tessel.kron(ParDFT(C128, 4), ParDFT(C128, 3)), [2, 1])
    z = values((4, 3), C128, 2)
    part = slice(*cast(Any, conjugate).layout_in.box()[0])
    expected = torch.fft.fft2(z.conj())
    close("conjugate view", conjugate * z[part].conj(), expected[part])
    same = values((1, 3), C128, 3).expand(4, 3)
    close("expanded", conjugate * same[part], torch.fft.fft2(same)[part])


def test_any_batch_and_strides(run: Run) -> None:
    run(several_batch_dims, nprocs=2)


# -- products, adjoints and inverses of distributed operators -------------------------------------


def local(layout: Layout, whole: Tensor) -> Tensor:
    return layout.local_part(whole)


def algebra_of_distributed(grid: Shape) -> None:
    known: Any = {}
    Fs = kron(dft(6, F64), dft(5))
    Ds = kron(diagonal(4, C128), diagonal(5, C128))
    F, D = build(Fs, known), build(Ds, known)
    theta = parameters(draw(Ds), known)
    S = distribute(F, grid)
    T = distribute(D, grid)
    x, y = values((6, 5), F64, 1), values((4, 5), C128, 2)
    source, target = cast(Any, S).layout_in, cast(Any, S).layout_out
    mine, other = local(source, x), local(target, y)
    close("F", S * mine, local(target, F * x))
    close("F.H", S.H * other, local(source, F.H * y))
    close("F.inv", S.inv * other, local(source, F.inv * y))
    close("F.inv.H", S.inv.H * mine, local(target, F.inv.H * x))
    close("F.inv F", (S.inv @ S) * mine, mine)
    close("F.H F", (S.H @ S) * mine, local(source, F.H * (F * x)))
    chain = S.inv @ T(theta) @ S
    close("chain", chain * mine, local(source, (F.inv @ D(theta) @ F) * x))
    close("chain.H", chain.H * mine, local(source, (F.inv @ D(theta) @ F).H * x))
    close("sum", (S + 2 * S) * mine, local(target, 3 * (F * x)))
    close("difference", (S - S) * mine, local(target, 0 * (F * x)))
    close("complex multiple", ((1 - 2j) * S) * mine, local(target, (1 - 2j) * (F * x)))
    close("its adjoint", ((1 - 2j) * S).H * other, local(source, F.H * ((1 + 2j) * y)))
    close("bound first", distribute(D(theta), grid) * other, local(target, D(theta) * y))
    twice = distribute(D, grid)
    close("D D.H", (twice @ T.H)(theta) * other, local(target, (D @ D.H)(theta) * y))


@WORKERS
def test_the_algebra_of_distributed_operators(run: Run, nprocs: int) -> None:
    for grid in grids(nprocs, 2):
        run(algebra_of_distributed, grid, nprocs=nprocs)


def combine_grids() -> None:
    """Operators on grids of the same workers, one finer than the other."""
    x = values((8, 4), F64, 1)
    rows, blocks = [4, 1], [2, 2]
    A = tessel.kron(ParDFT(F64, 8), ParIdentity(C128, 4))
    F = distribute(A, rows)
    R = ParRepartition(C128, (5, 4), rows, blocks)
    chain = R @ F
    expected = torch.fft.rfft(x, dim=0)
    P = tessel.world().create_cartesian_topology_partition(rows)
    mine = Layout.balanced(P, (8, 4)).local_part(x)
    Q = tessel.world().create_cartesian_topology_partition(blocks)
    target = Layout.balanced(Q, (5, 4))
    close("finer grid behind", chain * mine, target.local_part(expected))
    back = (R @ F).inv * target.local_part(expected)
    close("back", back, mine)
    with pytest.raises(ValueError, match="cannot add operators with different layouts"):
        distribute(A, rows) + distribute(A, blocks)
    with pytest.raises(ValueError, match="different workers"):
        distribute(A, Partition((3, 2, 1, 0), (4, 1))).H @ F
    with pytest.raises(ValueError, match="not distributed"):
        A.H @ F
    with pytest.raises(ValueError, match="distribute the product"):
        tessel.kron(F, distribute(ParDiagonal(C128, 3), [4]))
    with pytest.raises(ValueError, match="already distributed"):
        distribute(F, rows)


def test_grids_are_refined_in_products(run: Run) -> None:
    run(combine_grids, nprocs=4)


# -- how often tensors travel ---------------------------------------------------------------------


def count_transfers() -> dict[str, int]:
    def F(*lengths: int) -> ParOperator:
        return tessel.kron(*(ParDFT(C128, n) for n in lengths))

    cube = F(8, 8, 8)
    D = tessel.kron(*(ParDiagonal(C128, 8) for _ in range(3)))
    slab, pencil = [4, 1, 1], [2, 2, 1]
    real = tessel.kron(ParDFT(F64, 8), ParDFT(C128, 8), ParDFT(C128, 8))
    found: dict[str, ParOperator] = {
        "slab, anywhere": distribute(cube, slab, "anywhere"),
        "last slab, anywhere": distribute(cube, [1, 1, 4], "anywhere"),
        "pencil, anywhere": distribute(cube, pencil, "anywhere"),
        "other pencil, anywhere": distribute(cube, [1, 2, 2], "anywhere"),
        "real last slab, anywhere": distribute(real, [1, 1, 4], "anywhere"),
        "slab, back": distribute(cube, slab),
        "pencil, back": distribute(cube, pencil),
        "real last slab, back": distribute(real, [1, 1, 4]),
        "slab, there, diagonal and back": distribute(cube.inv @ D @ cube, slab),
        "pencil, there, diagonal and back": distribute(cube.inv @ D @ cube, pencil),
        "real, there and back": distribute(real.inv @ real, [1, 1, 4]),
        "only the diagonal": distribute(D, pencil),
        "mixing channels": distribute(
            tessel.kron(ParIdentity(F64, 8), ParIdentity(F64, 8), ParMatrix(F64, 8, 8)), pencil
        ),
        "a restriction": distribute(
            tessel.kron(ParRestriction(F64, 8, [range(3)]), ParIdentity(F64, 8)), [4, 1], "anywhere"
        ),
    }
    S = distribute(cube, slab, "anywhere")
    found["picked up by the inverse"] = S.inv
    found["a product of distributed ones"] = S.inv @ S
    found["with work in between"] = S.inv @ distribute(D, slab) @ S
    R = ParRepartition(F64, (8, 8, 8), slab, [1, 1, 4])
    found["a repartition"] = R
    found["there and back again"] = R.H @ R
    found["undone"] = R.inv @ R
    found["and again"] = R @ R.H @ R
    return {name: num_transfers(each) for name, each in found.items()}


def test_tensors_travel_as_rarely_as_possible(run: Run) -> None:
    counted = run(count_transfers, nprocs=4)
    assert counted == [counted[0]] * 4
    assert counted[0] == {
        "slab, anywhere": 1,
        "last slab, anywhere": 1,
        "pencil, anywhere": 1,
        "other pencil, anywhere": 1,
        "real last slab, anywhere": 1,
        "slab, back": 2,
        "pencil, back": 2,
        "real last slab, back": 2,
        "slab, there, diagonal and back": 2,
        "pencil, there, diagonal and back": 2,
        "real, there and back": 2,
        "only the diagonal": 0,
        "mixing channels": 0,
        "a restriction": 0,
        "picked up by the inverse": 1,
        "a product of distributed ones": 2,
        "with work in between": 2,
        "a repartition": 1,
        "there and back again": 0,
        "undone": 0,
        "and again": 1,
    }


def count_a_slab() -> tuple[Any, Any, Any]:
    """What one worker sends for a transform of a slab: all but what it keeps, once."""
    F = tessel.kron(*(ParDFT(C128, 8) for _ in range(3)))
    S = distribute(F, [4, 1, 1], "anywhere")
    x = values((2, 8, 8), C128, cast(int, tessel.world().rank)).requires_grad_()
    S * x
    with count_traffic() as there:
        y = S * x
    with count_traffic() as gradients:
        y.abs().sum().backward()
    R = ParRepartition(C128, (8, 8, 8), [4, 1, 1], [1, 4, 1])
    with count_traffic() as nothing:
        (R.inv @ R) * x
    return there, gradients, nothing


def test_a_slab_sends_what_must_change_its_worker(run: Run) -> None:
    numbers = 2 * 8 * 8
    for there, gradients, nothing in run(count_a_slab, nprocs=4):
        assert there.bytes_sent == numbers * 3 // 4 * 16 == gradients.bytes_sent
        assert nothing.bytes_sent == 0 and nothing.messages == 0


def mix_channels() -> tuple[int, int, int, int]:
    """The distributed convolution of the examples: only the gradient of θ is sent."""
    S = distribute(
        tessel.kron(ParIdentity(F32, 10), ParIdentity(F32, 30), ParMatrix(F32, 50, 50)), [2, 2, 1]
    )
    theta = init(S)
    x = torch.ones(5, 15, 50, requires_grad=True)
    with count_traffic() as forward:
        y = S(theta) * x
    with count_traffic() as backward:
        y.sum().backward()
    with count_traffic() as of_data:
        torch.autograd.grad((S(init(S, requires_grad=False)) * x).sum(), x)
    return forward.messages, forward.bytes_sent, backward.bytes_sent, of_data.bytes_sent


def test_mixing_channels_sends_no_data(run: Run) -> None:
    for messages, forward, backward, of_data in run(mix_channels, nprocs=4):
        assert (messages, forward, of_data) == (0, 0, 0)
        assert 0 < backward <= 2 * 4 * 50 * 50, "an all-reduce of θ, no more"


# -- shared results and repartitions --------------------------------------------------------------


def reduce_everything() -> None:
    n, rank = tessel.world().size, cast(int, tessel.world().rank)
    for T in DTYPES:
        R = ParReduce(T)
        x = values((100,), T, rank)
        expected = sum(values((100,), T, k) for k in range(n))
        close("sum", R * x, expected, 1e-5)
        close("called", R(x), expected, 1e-5)
        real = gradient(lambda each, R=R: (R * each).sum().real, x)
        assert torch.equal(real, torch.ones(100, dtype=T)), "not n, not 1/n"
        squares = gradient(lambda each, R=R: (R * each).abs().square().sum(), x)
        close("gradient of squares", squares, 2 * cast(Tensor, expected), 1e-5)
        close("adjoint", R.H * x, x)
        with count_traffic() as back:
            gradient(lambda each, R=R: (R.H * each).real.sum(), x)
        assert (back.bytes_sent > 0) == (n > 1), "the adjoint of a use is a sum"
    R = ParReduce(F64)
    matrix_ = R * torch.full((3, 4), 1.0, dtype=F64)
    assert torch.equal(matrix_, torch.full((3, 4), float(n), dtype=F64))
    x = torch.ones(3, dtype=F64, requires_grad=True)
    (first,) = torch.autograd.grad(((R * x) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    close("first", first, torch.full((3,), 3.0 * n**2, dtype=F64))
    close("second", second, torch.full((3,), 6.0 * n * n, dtype=F64))


@WORKERS
def test_a_reduction_is_one_shared_value(run: Run, nprocs: int) -> None:
    run(reduce_everything, nprocs=nprocs)


def reduce_on_some() -> tuple[Tensor, Tensor]:
    P = tessel.world().create_partition_inclusive([0, 2])
    R = ParReduce(F64, partition=P)
    x = torch.full((2,), 1.0 + cast(int, tessel.world().rank), dtype=F64, requires_grad=True)
    y = R * x
    y.sum().backward()
    return y.detach(), cast(Tensor, x.grad)


def test_a_reduction_over_some_workers(run: Run) -> None:
    found = run(reduce_on_some, nprocs=3)
    assert [y.tolist() for y, _ in found] == [[4.0, 4.0], [2.0, 2.0], [4.0, 4.0]]
    assert [grad.tolist() for _, grad in found] == [[1.0, 1.0]] * 3


def repartition(shape: Shape, before: Shape, after: Shape) -> None:
    R = ParRepartition(C128, shape, before, after)
    x = values(shape, C128, 1)
    everyone = tessel.world()
    source = Layout.balanced(everyone.create_cartesian_topology_partition(before), shape)
    target = Layout.balanced(everyone.create_cartesian_topology_partition(after), shape)
    mine, other = source.local_part(x), target.local_part(x)
    for name, got, expected in (
        ("there", R * mine, other),
        ("adjoint", R.H * other, mine),
        ("inverse", R.inv * other, mine),
        ("vec", R * vec(mine), vec(other)),
        ("there and back", (R.H @ R) * mine, mine),
    ):
        assert got.shape == expected.shape and torch.equal(got, expected), name
    point = mine.clone().requires_grad_()
    loss_of(R * point, other).backward()
    close("gradient", point.grad, mine * 2)


@pytest.mark.parametrize(
    ("nprocs", "shape", "before", "after"),
    [
        (1, (3, 4), (1, 1), (1, 1)),
        (2, (3, 4), (2, 1), (1, 2)),
        (3, (7, 2), (3, 1), (1, 3)),
        (4, (7, 5), (4, 1), (2, 2)),
        (4, (1, 5, 3), (2, 2, 1), (1, 2, 2)),
        (4, (11,), (4,), (4,)),
    ],
)
def test_repartitions(run: Run, nprocs: int, shape: Shape, before: Shape, after: Shape) -> None:
    run(repartition, shape, before, after, nprocs=nprocs)


# -- the examples ---------------------------------------------------------------------------------


def balanced(shape: Sequence[int], partition: Sequence[int]) -> Layout:
    P = tessel.world().create_cartesian_topology_partition(partition)
    return Layout.balanced(P, shape)


def fourier_example() -> None:
    T, C = F32, C64
    gx, gy, gz = 10, 20, 30
    partition = [1, 1, tessel.world().size]
    F = distribute(tessel.kron(ParDFT(T, gx), ParDFT(C, gy), ParDFT(C, gz)), partition)
    whole = values((gx, gy, gz), T, 1)
    x = balanced((gx, gy, gz), partition).local_part(whole)
    if partition[2] == 2:
        assert x.shape == (10, 20, 15)
    y = F * vec(x)
    expected = torch.fft.rfftn(whole, dim=(2, 1, 0))
    mine = balanced((6, 20, 30), partition).local_part(expected)
    close("transform", y, vec(mine), 1e-5)
    close("inverse", F.inv * y, vec(x), 1e-5)


def convolution_example() -> None:
    T = F64
    n = tessel.world().size
    partition = {1: [1, 1, 1], 2: [2, 1, 1], 4: [2, 2, 1]}[n]
    gx, gy, gc = 10, 30, 50
    S0 = tessel.kron(ParIdentity(T, gx), ParIdentity(T, gy), ParMatrix(T, gc, gc))
    S = distribute(S0, partition)
    theta = init(S)
    (value,) = (each.detach() for each in theta.values())
    assert value.shape == (50, 50)
    whole = values((gx, gy, gc), T, 1)
    layout = balanced((gx, gy, gc), partition)
    x = layout.local_part(whole)
    close("convolution", S(theta) * vec(x), vec(layout.local_part(whole @ value.mT)))
    (slope,) = gradient(lambda each: (S(each) * vec(x)).sum(), theta).values()
    close("gradient", slope, whole.sum((0, 1)).expand(gc, gc))


def sharing_example() -> None:
    n = tessel.world().size
    A = distribute(ParMatrix(F64, 20, 20))
    theta = init(A)
    (value,) = (each.detach() for each in theta.values())
    whole = values((20, 100), F64, 1)
    x = balanced((20, 100), [1, n]).local_part(whole)
    assert x.shape == (20, 100 // n)
    close("product", A(theta) * x, value @ x)
    (slope,) = gradient(lambda each: (A(each) * x).sum(), theta).values()
    close("the sum over workers", slope, whole.sum(1).expand(20, 20))
    rank = cast(int, tessel.world().rank)
    columns = values((20, 3 * rank), F64, 2)  # as many as it likes, the first one none
    close("other numbers of columns", A(theta) * columns, value @ columns)
    one = values((20,), F64, 3)
    close("one column", A(theta) * one, value @ one)


def fourier_in_the_order_of_julia() -> None:
    """The lines of an ancestor's document as they stand, its factors in its own order."""
    T, C = F64, C128
    gx, gy, gz = 10, 20, 30
    Fx, Fy, Fz = ParDFT(T, gx), ParDFT(C, gy), ParDFT(C, gz)
    F = tessel.kron(Fz, Fy, Fx, order="julia")
    partition = [1, 1, tessel.world().size]
    F = distribute(F, partition)
    whole = values((gx, gy, gz), T, 1)
    x = balanced((gx, gy, gz), partition).local_part(whole).clone().requires_grad_()
    y = F * vec(x)
    weights = values((6, gy, gz), C, 2)
    target = balanced((6, gy, gz), partition)
    single = whole.clone().requires_grad_()
    expected = torch.fft.rfftn(single, dim=(2, 1, 0))
    close("transform", y, vec(target.local_part(expected.detach())))
    loss_of(y, vec(target.local_part(weights))).backward()
    loss_of(expected, weights).backward()
    assert single.grad is not None
    close("gradient", x.grad, balanced((gx, gy, gz), partition).local_part(single.grad))


def convolution_in_the_order_of_julia() -> None:
    T = F64
    gx, gy, gc = 10, 30, 50
    partition = {1: [1, 1, 1], 2: [2, 1, 1], 4: [2, 2, 1]}[tessel.world().size]
    Sx, Sy, Sc = ParIdentity(T, gx), ParIdentity(T, gy), ParMatrix(T, gc, gc)
    S = tessel.kron(Sc, Sy, Sx, order="julia")
    S = distribute(S, partition)
    theta = init(S)
    whole, layout = values((gx, gy, gc), T, 1), balanced((gx, gy, gc), partition)
    x = layout.local_part(whole)
    matrix = theta[S].detach()
    assert theta[S] is theta[Sc]
    expected = torch.einsum("oc,xyc->xyo", matrix, whole)
    close("convolution", S(theta) * vec(x), vec(layout.local_part(expected)))
    slope = tessel.gradient(lambda theta: (S(theta) * vec(x)).sum(), theta)
    close("gradient", slope[S], whole.sum((0, 1)).expand(gc, gc))
    point = x.clone().requires_grad_()
    (S(theta) * vec(point)).sum().backward()
    close("gradient of x", point.grad, matrix.sum(0).expand(point.shape))


EXAMPLES = [
    fourier_example,
    convolution_example,
    sharing_example,
    fourier_in_the_order_of_julia,
    convolution_in_the_order_of_julia,
]


@pytest.mark.parametrize("nprocs", [1, 2, 4])
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples(run: Run, nprocs: int, example: Callable[[], None]) -> None:
    run(example, nprocs=nprocs)


# -- parameters -----------------------------------------------------------------------------------


def drawn_parts(grid: Shape) -> list[tuple[Any, Tensor]]:
    """What this worker draws, with random numbers of its own, and where it belongs."""
    torch.manual_seed(7 + 100 * cast(int, tessel.world().rank))
    weights = ParMultilinear(C128, 2, 3, [5, 4])
    S = distribute(weights, (1, *grid))
    theta = init(S)
    (box,) = cast(Any, S).part_boxes.values()
    (value,) = theta.values()
    assert value.requires_grad and value.is_leaf
    return [(box, value.detach())]


@WORKERS
def test_parameters_do_not_depend_on_the_workers(run: Run, nprocs: int) -> None:
    torch.manual_seed(7)
    (expected,) = init(ParMultilinear(C128, 2, 3, [5, 4]), requires_grad=False).values()
    for grid in grids(nprocs, 2):
        whole = torch.full_like(expected, torch.nan)
        held = 0
        for ((box, value),) in run(drawn_parts, grid, nprocs=nprocs):
            whole[tuple(slice(*each) for each in box)] = value
            held += value.numel()
        assert torch.equal(whole, expected)
        assert held == expected.numel(), "each number on one worker"


def theta_of_the_whole() -> None:
    """θ of a distributed expression, drawn before or after, bound to its distributed parts."""
    n = tessel.world().size
    M, D = ParMatrix(F64, 3, 5), ParDiagonal(F64, 6)
    S = distribute(tessel.kron(M, D), [1, n])
    torch.manual_seed(cast(int, tessel.world().rank))
    theta = init(S)
    A, E = distribute(M), distribute(D, [n])
    columns = values((5, 2), F64, 1)
    matrix = theta[A].detach()
    assert theta[A] is theta[M] and theta[E] is theta[D]
    close("shared", A(theta) * columns, matrix @ columns)
    close("not distributed", M(theta) * columns, matrix @ columns)
    layout = balanced((6,), [n])
    part = layout.local_part(values((6,), F64, 2))
    close("in parts", E(theta) * part, theta[D].detach() * part)
    slope = tessel.gradient(lambda each: (A(each) * columns).sum(), theta)
    close("gradient", slope[A], n * columns.sum(1).expand(3, 5))
    assert slope[E].count_nonzero() == 0 and slope[E].shape == theta[E].shape
    torch.manual_seed(4)
    early = init(tessel.kron(M, D))  # the same everywhere, whole
    close("drawn before", E(early) * part, layout.local_part(early[E].detach()) * part)
    other = distribute(ParMatrix(F64, 3, 5))
    text = text_of(lambda: other(theta) * columns)
    assert "θ belongs to another operator" in text, text


@WORKERS
def test_parameters_of_an_expression_bind_its_parts(run: Run, nprocs: int) -> None:
    run(theta_of_the_whole, nprocs=nprocs)


def drawn_in_chunks() -> tuple[Any, Tensor]:
    """More numbers than are drawn at once."""
    torch.manual_seed(3 + cast(int, tessel.world().rank))
    S = distribute(ParDiagonal(F32, 150_001), [tessel.world().size])
    (value,) = init(S, requires_grad=False).values()
    ((box,),) = cast(Any, S).part_boxes.values()
    return box, value


def test_parameters_in_chunks_do_not_depend_on_the_workers(run: Run) -> None:
    torch.manual_seed(3)
    (expected,) = init(ParDiagonal(F32, 150_001), requires_grad=False).values()
    for (start, stop), value in run(drawn_in_chunks, nprocs=3):
        assert torch.equal(value, expected[start:stop])


def copies() -> None:
    """A copy of a module is one of its own."""
    S = distribute(tessel.kron(ParMatrix(F64, 3, 5), ParDiagonal(F64, 4)), [1, 2])
    module = S.module()
    other = copy.deepcopy(module)
    x = cast(Any, S).layout_in.local_part(values((5, 4), F64, 1))
    before = module(x)
    close("copy", other(x), before)
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(2)
    close("copy", other(x), 4 * before)
    close("untouched", module(x), before)


def test_copies_have_parameters_of_their_own(run: Run) -> None:
    run(copies, nprocs=2)


def clipped(num_rows: int) -> float:
    """The norm of all gradients of an operator, one of whose parameters lies in parts."""
    S = distribute(tessel.kron(ParMatrix(F64, 3, 4), ParDiagonal(F64, 5)), [1, num_rows])
    module = S.module()
    with torch.no_grad():
        for each in module.parameters():
            each.fill_(0.5)
    x = cast(Any, S).layout_in.local_part(values((4, 5), F64, 1))
    module(x).square().sum().backward()
    norm = tessel.nn.clip_grad_norm_(module, 1.0)
    close("clipped", tessel.nn.clip_grad_norm_(module, 1.0), torch.tensor(1.0, dtype=F64), 1e-6)
    return float(norm)


def test_gradients_of_parts_of_parameters_are_clipped(run: Run) -> None:
    """The norm is that of the whole parameters, as in one process."""
    (expected,) = run(clipped, 1, nprocs=1)
    for norm in run(clipped, 2, nprocs=2):
        assert abs(norm - expected) < 1e-12 * expected


def equal_on_all() -> list[Tensor]:
    torch.manual_seed(cast(int, tessel.world().rank))
    S = distribute(ParMatrix(F64, 3, 4))
    return [*init(S, requires_grad=False).values(), *(p.detach() for p in S.parameters())]


def test_shared_parameters_are_equal_on_all_workers(run: Run) -> None:
    first, *others = run(equal_on_all, nprocs=3)
    assert not torch.equal(*first), "drawn anew"
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def train() -> list[float]:
    """The losses of an operator that is trained on parts of the same data."""
    grid = [1, tessel.world().size]
    S = distribute(tessel.kron(ParMatrix(F64, 3, 4), ParDiagonal(F64, 5)), grid)
    torch.manual_seed(cast(int, tessel.world().rank))
    module = S.module()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    x, y = values((4, 5), F64, 1), values((3, 5), F64, 2)
    x, y = balanced((4, 5), grid).local_part(x), balanced((3, 5), grid).local_part(y)
    total = ParReduce(F64)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = total * (module(x) - y).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    state = module.state_dict()
    assert len(state) == 2 and module.load_state_dict(state)
    return losses


def train_alone() -> list[float]:
    """The same with torch's matrices only."""
    torch.manual_seed(0)
    a, d = init(tessel.kron(ParMatrix(F64, 3, 4), ParDiagonal(F64, 5))).values()
    optimizer = torch.optim.Adam([a, d], lr=0.1)
    x, y = values((4, 5), F64, 1), values((3, 5), F64, 2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (a @ x * d - y).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@WORKERS
def test_training_is_the_same_on_any_number_of_workers(run: Run, nprocs: int) -> None:
    alone = train_alone()
    assert alone[-1] < alone[0]
    for losses in run(train, nprocs=nprocs):
        assert losses == pytest.approx(alone, rel=1e-12)


def one_operator_twice() -> None:
    """θ once in space and once more on the way back, stored once."""
    D = ParDiagonal(F64, 6)
    S = distribute(D.H @ D @ D, [tessel.world().size])
    theta = init(S)
    assert len(theta) == 1
    layout = cast(Any, S).layout_in
    x = layout.local_part(values((6,), F64, 1))
    ((box,),) = cast(Any, S).part_boxes.values()
    (d,) = theta.values()
    assert d.shape == (box[1] - box[0],)
    close("cubes", S(theta) * x, d**3 * x)
    (slope,) = gradient(lambda each: (S(each) * x).sum(), theta).values()
    close("gradient", slope, 3 * d**2 * x)


def test_one_operator_used_twice_has_one_parameter(run: Run) -> None:
    run(one_operator_twice, nprocs=2)


# -- what does not fit ----------------------------------------------------------------------------


def wrong_on_worker_1() -> dict[str, str]:
    """Worker 1 does something else than the others, which all learn."""
    odd = tessel.world().rank == 1
    A = tessel.kron(ParMatrix(F64, 3, 3), ParDiagonal(F64, 6))
    S = distribute(A, [1, tessel.world().size])
    theta = init(S)
    x = torch.ones(S.layout_in.local_shape, dtype=F64)  # type: ignore[attr-defined]
    plain = Parameters({leaf: value.detach() for leaf, value in theta.items()})
    whole = Parameters({leaf: torch.ones(leaf.parameter_shape, dtype=F64) for leaf in theta})
    narrow = Parameters({leaf: value[:1].detach() for leaf, value in theta.items()})
    single = Parameters({leaf: value.detach().float() for leaf, value in theta.items()})
    foreign = init(ParMatrix(F64, 3, 3))
    R = ParReduce(F64)

    def without_grad() -> Tensor:
        with torch.set_grad_enabled(not odd):
            return S(theta) * x

    return {
        "shape": text_of(lambda: S(theta) * (x[:2] if odd else x)),
        "dimensions": text_of(lambda: S(theta) * (x[0] if odd else x)),
        "dtype": text_of(lambda: S(theta) * (x.float() if odd else x)),
        "batch": text_of(lambda: S(theta) * (x[..., None] if odd else x)),
        "columns": text_of(lambda: S(theta) * x[..., None].expand(*x.shape, 3 if odd else 2)),
        "vec": text_of(lambda: S(theta) * (vec(x)[:, None] if odd else x)),
        "sparse": text_of(lambda: S(theta) * (x.to_sparse() if odd else x)),
        "θ": text_of(lambda: (S if odd else S(theta)) * x),
        "whole θ": text_of(lambda: S(whole if odd else plain) * x),
        "gradient of θ": text_of(lambda: S(plain if odd else theta) * x),
        "no_grad": text_of(without_grad),
        "shape of θ": text_of(lambda: S(narrow if odd else plain) * x),
        "dtype of θ": text_of(lambda: S(single if odd else plain) * x),
        "foreign θ": text_of(lambda: S(foreign if odd else theta) * x),
        "adjoint": text_of(lambda: (S.H if odd else S)(theta) * x),
        "reduced shape": text_of(lambda: R * torch.ones(3 if odd else 2, dtype=F64)),
        "reduced dtype": text_of(lambda: R * torch.ones(3, dtype=F32 if odd else F64)),
    }


@pytest.mark.parametrize("nprocs", [2, 3])
def test_what_is_wrong_on_one_worker_raises_on_all(run: Run, nprocs: int) -> None:
    found = run(wrong_on_worker_1, nprocs=nprocs, timeout=SECONDS)
    assert found == [found[0]] * nprocs, "the same text everywhere"
    part = 6 // nprocs
    expected = {
        "shape": f"worker 1: expected a tensor of shape (3, {part}), or its vec of length",
        "dimensions": "the number of dimensions differs between workers",
        "dtype": "the dtype differs between workers: torch.float64 on worker 0, torch.float32",
        "batch": "the number of dimensions differs between workers",
        "columns": "workers 0 and 1 have parts of the same columns, but have 2 and 3 columns",
        "vec": "some workers pass a vec and others a tensor with its dimensions",
        "sparse": "worker 1 passed no tensor, or one whose dtype, device or layout",
        "θ": "with no θ for ParMatrix",
        "whole θ": "all of ParDiagonal",
        "gradient of θ": "which needs a gradient",
        "no_grad": "which needs a gradient",
        "shape of θ": "with a wrong θ: θ does not fit ParMatrix",
        "dtype of θ": "got torch.float32 of shape",
        "foreign θ": "with a wrong θ: θ belongs to another operator",
        "adjoint": "all workers must make the same calls in the same order",
        "reduced shape": "the shape differs between workers: (2,) on worker 0, (3,) on worker 1",
        "reduced dtype": "the dtype differs between workers",
    }
    for name, text in expected.items():
        assert text in found[0][name], f"{name}: {found[0][name]}"


def wrong_on_all() -> dict[str, str]:
    n = tessel.world().size
    A = tessel.kron(ParMatrix(F64, 3, 3), ParDiagonal(F64, 6))
    S = distribute(A, [1, n])
    theta = init(S)
    x = torch.ones(S.layout_in.local_shape, dtype=F64)  # type: ignore[attr-defined]
    return {
        "no θ": text_of(lambda: S * x),
        "foreign θ": text_of(lambda: S(init(distribute(ParMatrix(F64, 3, 3)))) * x),
        "dtype": text_of(lambda: S(theta) * x.float()),
        "shape": text_of(lambda: S(theta) * torch.ones(5, 5, dtype=F64)),
        "short partition": text_of(lambda: distribute(A, [n])),
        "too many workers": text_of(lambda: distribute(A, [n, 2])),
        "no workers": text_of(lambda: distribute(A, [n, 0])),
        "half a worker": text_of(lambda: distribute(A, [n, 1.0])),  # type: ignore[list-item]
        "no partition": text_of(lambda: distribute(A, n)),  # type: ignore[arg-type]
        "wrong word": text_of(lambda: distribute(A, [1, n], "somewhere")),
        "short result": text_of(lambda: distribute(A, [1, n], [n])),
        "wrong result": text_of(lambda: distribute(A, [1, n], [n, 2])),
        "no operator": text_of(lambda: distribute(x, [1, n])),  # type: ignore[arg-type]
        "other workers": text_of(
            lambda: distribute(A, Partition((0,), (1, 1)), Partition((1,), (1, 1)))
        ),
        "batch elsewhere": text_of(lambda: distribute(A, [1, 1, n], [1, n, 1])),
        "repartition of nothing": text_of(lambda: ParRepartition(F64, (), [n], [n])),
        "reduction of integers": text_of(lambda: ParReduce(torch.int64)),
    }


def test_what_is_wrong_on_all_workers_is_told_clearly(run: Run) -> None:
    found = run(wrong_on_all, nprocs=2, timeout=SECONDS)
    assert found == [found[0]] * 2
    expected = {
        "no θ": "has parameters: apply the operator S as S(θ) * x",
        "foreign θ": "θ belongs to another operator",
        "dtype": "expected a tensor of torch.float64, got torch.float32",
        "shape": "expected a tensor of shape (3, 3)",
        "short partition": "has 1 numbers",
        "too many workers": "the partition [2, 2] needs 4 workers, there are 2",
        "no workers": "the partition [2, 0]",
        "half a worker": "partition",
        "no partition": "partition",
        "wrong word": "'somewhere'",
        "short result": "has 1 numbers",
        "wrong result": "needs 4 workers, there are 2",
        "no operator": "operator",
        "other workers": "the same workers",
        "batch elsewhere": "the batch must be split in the same way",
        "repartition of nothing": "at least one dimension",
        "reduction of integers": "T must be one of",
    }
    for name, text in expected.items():
        assert text in found[0][name], f"{name}: {found[0][name]}"


def one_needs_a_gradient() -> tuple[Tensor, Tensor | None]:
    """Only worker 0 asks for a gradient of its part; the others take part in what it needs."""
    n, rank = tessel.world().size, tessel.world().rank
    F = distribute(tessel.kron(ParDFT(C128, 4), ParDFT(C128, 6)), [1, n])
    x = balanced((4, 6), [1, n]).local_part(values((4, 6), C128, 1)).clone()
    x.requires_grad_(rank == 0)
    y = F * x
    loss_of(y, torch.zeros_like(y)).backward()
    return x.detach(), x.grad


def test_one_worker_may_need_a_gradient(run: Run) -> None:
    (x, grad), *others = run(one_needs_a_gradient, nprocs=2, timeout=SECONDS)
    close("gradient", grad, 24 * x)  # F.H F = 24
    assert all(each is None for _, each in others)


def after_an_error() -> None:
    """An error leaves nothing behind: the next call is right."""
    S = distribute(tessel.kron(ParDFT(C128, 4), ParDFT(C128, 6)), [2, 1])
    x = values((4, 6), C128, 1)
    mine = balanced((4, 6), [2, 1]).local_part(x)
    for wrong in (mine[:1], mine.real, mine[..., 0]):
        with pytest.raises(ValueError):
            S * (wrong if tessel.world().rank == 0 else mine)
        close("next", S * mine, balanced((4, 6), [2, 1]).local_part(torch.fft.fft2(x)))


def test_an_error_leaves_nothing_behind(run: Run) -> None:
    run(after_an_error, nprocs=2, timeout=SECONDS)


def test_a_single_worker_is_checked_in_every_call() -> None:
    """What follows from a shape is remembered: other shapes, dtypes and derivatives are not it."""
    S = distribute(tessel.kron(ParMatrix(F64, 3, 4), ParIdentity(F64, 2)), [1, 1])
    theta = tessel.init(S)
    (weight,), x = theta.values(), values((4, 2), F64, 1)
    batch, vector = values((4, 2, 5), F64, 2), x.reshape(-1)
    for _ in range(2):
        close("product", S(theta) * x, weight @ x)
        close("batch", S(theta) * batch, torch.einsum("ij,jbk->ibk", weight, batch))
        close("vec", S(theta) * vector, (weight @ x).reshape(-1))
        for wrong, text in (
            (x.float(), "expected a tensor of torch.float64, got torch.float32"),
            (x[:3], "expected a tensor of shape (4, 2)"),
            (x.to("meta"), "is on cpu, x on meta"),
        ):
            with pytest.raises(ValueError, match=re.escape(text)):
                S(theta) * wrong
    learned = x.clone().requires_grad_()
    (S(theta) * learned).sum().backward()
    close("gradient", learned.grad, weight.sum(0)[:, None].expand(4, 2))
    _, tangent = torch.func.jvp(lambda x: S(theta) * x, (x,), (x,))
    close("tangent", tangent, weight @ x)


def test_an_identity_of_one_worker_gives_a_tensor_of_its_own() -> None:
    x = values((3, 2), F64, 1).requires_grad_()
    y = distribute(tessel.kron(ParIdentity(F64, 3), ParIdentity(F64, 2)), [1, 1]) * x
    assert y is not x and not y.is_leaf and torch.equal(y, x)


def plans_are_the_same() -> str:
    S = distribute(tessel.kron(*(ParDFT(C128, n) for n in (3, 7, 2))), [2, 2, 1])
    steps = [(type(step).__name__, step.before, step.after) for step in plan_of(S).every_step()]
    return repr(steps)


def test_all_workers_make_one_plan(run: Run) -> None:
    assert len(set(run(plans_are_the_same, nprocs=4))) == 1


def sizes_of_parts() -> list[tuple[int, ...]]:
    """Parts of parameters are as small as those of the tensor."""
    weights = ParMultilinear(C128, 2, 2, [6, 4])
    S = distribute(weights, [1, 2, 2])
    return [tuple(value.shape) for value in init(S).values()]


def test_weights_are_split_with_their_modes(run: Run) -> None:
    assert run(sizes_of_parts, nprocs=4) == [[(2, 2, 3, 2)]] * 4
    assert prod((2, 2, 3, 2)) * 4 == 2 * 2 * 6 * 4


def test_zeros_that_others_wait_for_are_not_postponed_for_ever() -> None:
    """A plan that does not pad before data travels has to pad when only the padding is left."""
    real, pair = torch.float64, torch.complex128
    first = tessel.kron(tessel.ParIdentity(pair, 6), ParDFT(pair, 5))
    padding = tessel.kron(ParDFT(real, 11).inv, ParRestriction(pair, 6, [(0, 5)]).H)
    last = tessel.kron(tessel.ParIdentity(real, 11), ParDFT(real, 6).inv.H)
    chain = last @ padding @ first
    for axes in (((0,), ()), ((), (0,))):
        source, target = (
            split_along(HypotheticalPartition((2,)), space.shape, axes)
            for space in (chain.domain, chain.codomain)
        )
        assert make_plan(chain, source, target).num_transfers <= 4


def load_outside(spec: Callable[[], Any]) -> tuple[list[Shape], list[Shape]]:
    """A whole state is loaded on all workers, of which two have the operator."""
    P = (
        tessel.world()
        .create_partition_inclusive([0, 2])
        .create_cartesian_topology_partition([2, 1])
    )
    module = distribute(spec(), P).module()
    whole = {
        name: torch.arange(24, dtype=F64).reshape(6, 4)
        if value.dim() == 2
        else torch.ones(6).double()
        for name, value in module.state_dict().items()
    }
    module.load_state_dict(dict(whole))
    saved = module.state_dict()
    if P.active:
        assert all(torch.equal(saved[name], value) for name, value in whole.items())
    shapes = [tuple(each.shape) for each in module.parameters()]
    return shapes, [tuple(value.shape) for value in saved.values()]


def whole_matrix() -> Any:
    return tessel.kron(ParMatrix(F64, 6, 4), ParIdentity(F64, 3))


def split_diagonal() -> Any:
    return tessel.kron(ParDiagonal(F64, 6), ParIdentity(F64, 3))


@pytest.mark.parametrize(
    ("spec", "shapes"), [(whole_matrix, [(6, 4)] * 2), (split_diagonal, [(3,)] * 2)]
)
def test_a_state_is_loaded_on_workers_without_a_part(
    run: Run, spec: Callable[[], Any], shapes: list[Shape]
) -> None:
    results = run(load_outside, spec)
    assert [results[worker][0] for worker in (0, 2)] == [[shape] for shape in shapes]
    for worker in (1, 3):
        assert all(0 in shape for shape in results[worker][0] + results[worker][1])
