"""Convolution by strips, and the halo that brings them.

Tests `tensor/overlapped_convolution.py`, `core/halo.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from covering import repeats
from parity import Case, check_case, close, values
from tessel import Layout
from tessel.core.halo import AsyncHalo, Halo
from tessel.core.windows import Window
from tessel.tensor import overlapped_convolution
from tessel.testing import check_adjoint, check_gradient, count_traffic

Run = Callable[..., list[Any]]
ALWAYS = (0, 100.0)  # however small the parts and however large the share of the strips


def halo_of(grid: tuple[int, ...], shape: tuple[int, ...], *windows: Window) -> Halo:
    P = tessel.world().create_cartesian_topology_partition(grid)
    source = Layout.balanced(P, shape)
    plan = overlapped_convolution.stripped(source, source, windows, *ALWAYS)
    assert plan is not None
    return plan.halo


def check_laws(grid: tuple[int, ...], shape: tuple[int, ...], *windows: Window) -> None:
    halo = halo_of(grid, shape, *windows)
    for dtype in (torch.float64, torch.complex128):
        check_adjoint(halo, dtype)
        check_gradient(halo, dtype)


@pytest.mark.parametrize("nprocs", [2, 4])
def test_a_halo_keeps_the_laws(run: Run, nprocs: int) -> None:
    wide, narrow = Window(5, before=2), Window(3, before=1)
    run(check_laws, (1, 1, nprocs), (2, 3, 5 * nprocs), wide, nprocs=nprocs)
    run(check_laws, (1, 1, nprocs // 2, 2), (1, 2, 9, 7), narrow, wide, nprocs=nprocs)
    run(check_laws, (1, 1, nprocs, 1), (1, 2, nprocs, 7), wide, narrow, nprocs=nprocs)


def travel_in_two_steps() -> None:
    halo = halo_of((1, 1, 2, 2), (1, 2, 8, 9), Window(3, before=1), Window(5, before=2))
    x = values(halo.domain.local_shape, 7 + (tessel.world().rank or 0)).requires_grad_()
    at_once = halo(x)
    halo = AsyncHalo(halo)
    own, token = halo.start(x)
    between = own * 2  # what is computed meanwhile
    landed = halo.wait(token)
    close("strips", landed, at_once)
    loss = landed.pow(3).sum()
    (first,) = torch.autograd.grad(loss + between.sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(at_once.pow(3).sum() + 2 * x.sum(), x, create_graph=True)
    close("gradient", first, expected)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x)
    (other,) = torch.autograd.grad(expected.pow(2).sum(), x)
    close("gradient of second order", second, other)


def test_an_async_halo_is_a_halo_in_two_steps(run: Run) -> None:
    run(travel_in_two_steps, nprocs=4)


def random_cases(count: int, seed: int) -> list[Case]:
    """Convolutions whose outputs often lie as their inputs do."""
    chance = random.Random(seed)
    cases = []
    while len(cases) < count:
        D = chance.choice([1, 1, 2, 2, 3])
        grid = [1, 1, *{1: (4,), 2: chance.choice([(2, 2), (4, 1), (1, 3)]), 3: (2, 1, 2)}[D]]
        groups = chance.choice([1, 1, 2])
        kernel = [chance.choice([1, 2, 3, 3, 5]) for _ in range(D)]
        stride = [chance.choice([1, 1, 1, 2, 3]) for _ in range(D)]
        dilation = [chance.choice([1, 1, 2]) for _ in range(D)]
        padding = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
        sizes = [chance.randint(4, 33 if D == 1 else 13) for _ in range(D)]
        settings = {
            "stride": tuple(stride),
            "padding": tuple(padding),
            "dilation": tuple(dilation),
            "groups": groups,
            "bias": chance.random() < 0.7,
        }
        channels = (groups * chance.randint(1, 2), groups * chance.randint(1, 2))
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        if any(n + 2 * p < s for n, p, s in zip(sizes, padding, spans, strict=True)):
            continue
        cases.append(
            Case(
                f"Conv{D}d",
                (*channels, tuple(kernel)),
                tuple(grid),
                (chance.randint(1, 2), channels[0], *sizes),
                tuple(settings.items()),
                seed=chance.randint(0, 999),
            )
        )
    return cases


def check_by_strips(cases: list[Case]) -> int:
    """All cases, by strips wherever that is possible; how many were."""
    count = 0
    apply = overlapped_convolution.Stripped.apply

    def counted(self: overlapped_convolution.Stripped, *args: Any) -> Any:
        nonlocal count
        count += 1
        return apply(self, *args)

    before = overlapped_convolution.LEAST_VALUES, overlapped_convolution.LARGEST_SHARE
    overlapped_convolution.LEAST_VALUES, overlapped_convolution.LARGEST_SHARE = ALWAYS
    overlapped_convolution.Stripped.apply = counted  # type: ignore[method-assign]
    try:
        for case in cases:
            check_case(case)
    finally:
        overlapped_convolution.LEAST_VALUES, overlapped_convolution.LARGEST_SHARE = before
        overlapped_convolution.Stripped.apply = apply  # type: ignore[method-assign]
    return count


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(repeats(4)))
def test_strips_give_what_torch_gives(run: Run, seed: int) -> None:
    counts = run(check_by_strips, random_cases(80, seed), nprocs=4, timeout=100)
    assert counts[0] >= 20  # cases by strips, not only those that cannot be


def traffic_of(shape: tuple[int, ...], grid: tuple[int, ...], by_strips: bool) -> tuple[int, ...]:
    P = tessel.world().create_cartesian_topology_partition(grid)
    layer = tessel.nn.DistributedConv2d(P, shape[1], 2, 3, padding=1)
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    before = overlapped_convolution.LEAST_VALUES
    overlapped_convolution.LEAST_VALUES = 0 if by_strips else 1 << 40
    x = torch.ones(Layout.balanced(P, shape).local_shape, requires_grad=True)
    try:
        with count_traffic() as forward:
            y = layer(x)
        with count_traffic() as backward:
            y.sum().backward()
    finally:
        overlapped_convolution.LEAST_VALUES = before
    return forward.messages, forward.bytes_sent, backward.messages, backward.bytes_sent


@pytest.mark.parametrize("grid", [(1, 1, 4, 1), (1, 1, 2, 2)])
def test_strips_send_what_a_move_sends_in_one_exchange(run: Run, grid: tuple[int, ...]) -> None:
    """One message to each neighbour, with the rows and columns that it lacks and no more."""
    shape = (1, 3, 64, 64)
    strip = run(traffic_of, shape, grid, True, nprocs=4)
    move = run(traffic_of, shape, grid, False, nprocs=4)
    assert strip == move
    row = 3 * 64 * 4
    if grid == (1, 1, 4, 1):
        assert [each[:2] for each in strip] == [(1, row), (2, 2 * row), (2, 2 * row), (1, row)]
    else:
        assert {each[:2] for each in strip} == {(3, 3 * (32 + 32 + 1) * 4)}


def keeps_no_padded_copy() -> tuple[int, int]:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 1])
    layer = tessel.nn.DistributedConv2d(P, 4, 4, 3, padding=1)
    x = torch.ones(1, 4, 128, 128, requires_grad=True)
    with tessel.testing.count_memory() as memory:
        y = layer(x)
    return memory.peak, y.nbytes


def test_a_part_is_not_copied(run: Run) -> None:
    for peak, output in run(keeps_no_padded_copy, nprocs=2):
        assert peak < 1.2 * output


def derive_forwards() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4, 1])
    layer = tessel.nn.DistributedConv2d(P, 2, 2, 3, padding=1).double()
    shape = (1, 2, 160, 160)
    layout = Layout.balanced(P, shape)
    x, direction = (layout.local_part(values(shape, seed)).clone() for seed in (1, 2))
    assert (
        overlapped_convolution.stripped(layout, layout, (Window(3, before=1),) * 2, 1 << 10, 0.25)
        is not None
    )
    y, slope = torch.func.jvp(layer, (x,), (direction,))
    whole = torch.nn.functional.conv2d(values(shape, 2), layer.weight, padding=1)
    close("slope", slope, layout.local_part(whole.detach()))
    close("value", y, layer(x))


def test_strips_have_forward_derivatives(run: Run) -> None:
    run(derive_forwards, nprocs=4)


def test_strips_only_where_they_are_worth_it() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    whole = Layout.balanced(P, (1, 4, 64))
    assert (
        overlapped_convolution.stripped(whole, whole, (Window(3, before=1),), *ALWAYS) is None
    )  # nobody to ask
