"""Shared values: parameters that all workers use, and sums that all workers get.

Tests `core/shared.py`, `core/numbers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tessel
from parity import close, values
from tessel import Layout
from tessel.core.layout import Cut
from tessel.core.move import Move
from tessel.core.plan import LARGE
from tessel.core.shared import Replicate, Sum, equalize, replicate, total
from tessel.testing import check_adjoint, check_gradient, count_traffic

Run = Callable[..., list[Any]]


def check_spread() -> None:
    P = tessel.world().create_cartesian_topology_partition([tessel.world().size // 2, 2])
    value = Layout.whole(P, (3, 2), shared=True)
    for shared in ((), (0,), (1,)):
        operator = Replicate(value, replace(value, shared=shared))
        for dtype in (torch.float64, torch.complex128):
            check_adjoint(operator, dtype)
            check_gradient(operator, dtype)


@pytest.mark.parametrize("nprocs", [2, 4, 6])
def test_the_use_of_a_shared_value_keeps_the_laws(run: Run, nprocs: int) -> None:
    run(check_spread, nprocs=nprocs)


def use_a_parameter() -> tuple[bool, Any, Any]:
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    w = values((3,), 1).requires_grad_()
    _, column = P.index or (0, 0)
    with count_traffic() as forward:
        used = replicate(w, Layout.whole(P, (3,), shared=True), [1])
    with count_traffic() as backward:
        (used * (1 + column)).sum().backward()  # the same work along axis 0
    assert w.grad is not None
    close("gradient", w.grad, torch.full((3,), 3.0, dtype=torch.float64))
    return used.data_ptr() == w.data_ptr(), forward, backward


def test_a_parameter_is_used_without_a_copy_and_summed_once(run: Run) -> None:
    for same_memory, forward, backward in run(use_a_parameter, nprocs=4):
        assert same_memory
        assert forward.messages == 0 and backward.messages == 1


def sum_shares(shared: tuple[int, ...]) -> tuple[float, float, int]:
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    row, column = P.index or (0, 0)
    x = torch.tensor(1.0 + column + (0 if shared else 2 * row), dtype=torch.float64)
    x.requires_grad_()
    value = total(x, P, shared)
    with count_traffic() as backward:
        (value * value).backward()
    assert x.grad is not None
    return float(value.detach()), float(x.grad), backward.messages


def test_a_total_is_one_value_and_every_worker_derives_it(run: Run) -> None:
    assert run(sum_shares, (), nprocs=4) == [(10.0, 20.0, 0)] * 4
    assert run(sum_shares, (0,), nprocs=4) == [(3.0, 6.0, 0)] * 4


def make_equal() -> torch.Tensor:
    mine = torch.full((2, 3), float(tessel.world().rank or 0))
    row = tessel.world().create_partition_inclusive([1, 2])
    equalize([mine], row)
    return mine


def test_workers_get_what_the_first_of_a_partition_has(run: Run) -> None:
    assert [float(each.mean()) for each in run(make_equal, nprocs=3)] == [0.0, 1.0, 1.0]


def use_after_a_call_of_some(ranks: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Gradients of a value that all use, after an agreement in which only some took part."""
    world = tessel.world()
    some = world.create_partition_inclusive(ranks)
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = tessel.nn.AllSumReduce(some, [0])(x if some.active else tessel.zero_volume_tensor())
    P = world.create_cartesian_topology_partition([2, 2])
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    used = replicate(w, Layout.whole(P, (3,), shared=True), [1])
    used.sum().backward()
    if some.active:
        y.sum().backward()
    assert w.grad is not None
    return w.grad.tolist(), [] if x.grad is None else x.grad.tolist()


@pytest.mark.parametrize("ranks", [(1,), (0, 3), (1, 2, 3)])
def test_workers_that_agreed_with_others_before_are_waited_for(
    run: Run, ranks: tuple[int, ...]
) -> None:
    found = run(use_after_a_call_of_some, ranks, nprocs=4, timeout=30)
    for worker, (of_w, of_x) in enumerate(found):
        assert of_w == [2.0] * 3
        assert of_x == ([float(len(ranks))] * 2 if worker in ranks else [])


def sum_in_two_steps() -> None:
    """Two workers swap few values and sum many by halves; of one value some add nothing."""
    world = tessel.world()
    size, rank = world.size, world.rank or 0
    grids = [((size,), (0,)), ((1, size), (1,)), *[((2, 2), (0,)), ((2, 2), (0, 1))] * (size == 4)]
    for grid, axes in grids:
        P = world.create_cartesian_topology_partition(list(grid))
        place = P.index
        assert place is not None
        # along axes that are not summed workers have the same values
        own = [place[axis] if axis in axes else 0 for axis in range(len(grid))]
        for length in (0, 1, 2, 1001, LARGE + 3):
            given = [
                torch.sin(torch.arange(length, dtype=torch.float64) + 10.0 * sum(each))
                for each in product(*(range(n) if a in axes else [0] for a, n in enumerate(grid)))
            ]
            x = torch.sin(torch.arange(length, dtype=torch.float64) + 10.0 * sum(own))
            kept = x.clone()
            wait = Sum(P, axes, length).start(x)
            expected = given[0] + given[1]
            for each in given[2:]:
                expected += each
            assert torch.equal(wait(), expected), (grid, axes, length, rank)  # to the last bit
            assert torch.equal(x, kept)  # a gradient that others may read
            assert torch.equal(Sum(P, axes, length).start(x, True)(), expected)


@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_a_sum_in_two_steps_adds_in_the_order_of_the_workers(run: Run, nprocs: int) -> None:
    run(sum_in_two_steps, nprocs=nprocs)


def order_of_pieces() -> list[tuple[bool, list[int]]]:
    """For halos of one and two of three rows: whether the output is filled, and by whom."""
    P = tessel.world()
    source = Layout.balanced(P, (3 * P.size,))
    (cut,), found = source.cuts, []
    for width in (1, 2):
        reads = tuple((max(0, a - width), min(b + width, 3 * P.size)) for a, b in cut.intervals)
        wide = replace(source, cuts=(Cut(cut.axes, reads),))
        move = Move(wide, source)
        (plan,) = move.route
        found.append((plan.fills, [piece.peer for piece in plan.takes]))
        y = move.apply(torch.ones(wide.local_shape))
        own = range(*cut.intervals[P.rank or 0])
        assert y.tolist() == [sum(a <= i < b for a, b in reads) for i in own]
    return found


def test_the_own_part_comes_first_and_nothing_is_cleared(run: Run) -> None:
    """Of two rows, the middle one of the second worker is in the strips of both others."""
    for each in zip(*run(order_of_pieces, nprocs=3), strict=True):
        assert each == ((True, [0, 1]), (True, [1, 0, 2]), (True, [2, 1]))


def tangents_of(mixed: bool) -> list[Tensor]:
    """Of what layers and spread tensors make of an input that requires a gradient on one worker."""
    P = tessel.world().create_cartesian_topology_partition([2, 1])
    torch.manual_seed(0)
    layer = tessel.nn.DistributedLinear(P, None, None, 3, 2, dtype=torch.float64)
    head = tessel.nn.ParallelLinear(3, 2, dim=0, dtype=torch.float64)
    x = values((4, 3), 1).requires_grad_(mixed and P.rank == 0)
    found = []
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, values((4, 3), 2))
        for y in (layer(dual), head(dual), tessel.from_local(dual, P).sum().full()):
            tangent = forward_ad.unpack_dual(y).tangent
            assert tangent is not None
            found.append(tangent.detach())
    return found


def test_tangents_stay_where_gradients_are_required_elsewhere(run: Run) -> None:
    """Was: lost on the worker that required none, or zero, and the others waited for it."""
    for found, expected in zip(
        run(tangents_of, True, nprocs=2), run(tangents_of, False, nprocs=2), strict=True
    ):
        for name, a, b in zip(("layer", "head", "sum"), found, expected, strict=True):
            assert b.any()
            close(name, a, b)
