"""Pools over partitioned tensors give what torch's own give in one process.

Tests `nn/pooling.py`, `tensor/rules/pools.py`.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from parity import Case, check_case, check_cases, close, values
from tessel import Layout
from tessel.testing import count_traffic
from windowed_cases import (
    BIG_PEER,
    PEERS,
    WIDE_PEER,
    WIDE_POOL,
    Sent,
    check_against_file,
    compute_to_file,
    expected_traffic,
    is_accepted,
    measure,
    raised,
    random_cases,
    random_pool,
    row,
)

Run = Callable[..., list[Any]]
KINDS = [f"{kind}Pool{D}d" for kind in ("Avg", "Max") for D in (1, 2, 3)]


def test_commonly_compared_cases_are_exact(run: Run) -> None:
    """Output, gradient and second order of both pools, wherever torch allows the settings."""
    cases = [case for peer in PEERS for case in peer.pools()]
    assert len(cases) >= 11
    run(check_cases, cases, nprocs=4)


@pytest.mark.parametrize("nprocs", [18])
def test_a_grid_of_eighteen_workers_is_exact(run: Run, nprocs: int, tmp_path: Path) -> None:
    cases = [*WIDE_PEER.pools(), *WIDE_POOL.pools()]
    assert len(cases) == 3
    for case in cases:
        run(check_against_file, case, compute_to_file(case, tmp_path), nprocs=nprocs, timeout=110)


@pytest.mark.slow
def test_a_tensor_of_many_channels_is_exact(run: Run, tmp_path: Path) -> None:
    for case in BIG_PEER.pools():
        run(check_against_file, case, compute_to_file(case, tmp_path), nprocs=4, timeout=100)


NO_OUTPUT = [
    row("MaxPool1d", (2, 2, 2, 2), 5, stride=4),
    row("AvgPool1d", (2, 2, 2, 2), 5, stride=4),
    row("MaxPool1d", (1, 1, 1, 1), 4),
    row("MaxPool1d", (0, 0, 0, 6), 3, stride=2, ceil_mode=True),
    row("AvgPool1d", (6, 0, 0, 0), 3, stride=1, padding=1),
    row("AvgPool1d", (6, 2, 2), 3, stride=1, padding=1),
    row("MaxPool1d", (2, 2, 6), 3, stride=1, padding=1),
    row("MaxPool1d", (3, 3, 3, 3), 7, stride=1, padding=3),
    row("AvgPool1d", (3, 3, 3, 3), 7, stride=1, padding=3, count_include_pad=False),
]


def test_workers_without_output_or_input_take_part(run: Run) -> None:
    """Eight values over four workers and a window of five leave three workers without output."""
    assert all(is_accepted(case) for case in NO_OUTPUT)
    run(check_cases, NO_OUTPUT, nprocs=4)


@pytest.mark.parametrize("seed", range(2))
def test_random_pools_are_exact(run: Run, seed: int) -> None:
    run(check_cases, random_cases(random_pool, 150, 4, seed), nprocs=4, timeout=100)


@pytest.mark.parametrize("nprocs", [8, 12])
def test_random_pools_on_larger_grids_are_exact(run: Run, nprocs: int) -> None:
    run(check_cases, random_cases(random_pool, 30, nprocs, nprocs), nprocs=nprocs, timeout=100)


def check_indices(cases: list[Case], special: float | None) -> None:
    """Places of the largest values are those in the whole tensor, also with ties."""
    for case in cases:
        layout = case.layout()
        x = values(case.shape, case.seed).mul(2).round()  # ties: the first of them is meant
        if special is not None:
            x = x.masked_fill(x >= 0, special)
        expected, places = case.torch_layer()(x)
        result = case.layer()(layout.local_part(x))
        if not layout.partition.active:
            continue
        got, found = result
        out = layout.resized(expected.shape)
        assert torch.equal(got.nan_to_num(), out.local_part(expected).nan_to_num()), f"{case}"
        assert found.dtype == torch.int64
        assert found.shape == got.shape
        wanted = out.local_part(places)
        assert torch.equal(found, wanted), f"{case}: {found} are not {wanted}"


def random_max_pool(rng: Any, workers: int) -> Case:
    case = random_pool(rng, workers)
    while "Max" not in case.name:
        case = random_pool(rng, workers)
    settings = (*case.settings, ("return_indices", True))
    return Case(case.name, case.args, case.grid, case.shape, settings, case.lengths, case.seed)


@pytest.mark.parametrize("special", [None, -math.inf, math.nan])
def test_indices_are_those_in_the_whole_tensor(run: Run, special: float | None) -> None:
    """With padding, dilation, ceil_mode and uneven parts; infinite values and NaN as torch does."""
    run(check_indices, random_cases(random_max_pool, 100, 4, 21), special, nprocs=4)


def check_gradients_with_indices(cases: list[Case]) -> None:
    for case in cases:
        check_case(case)


def test_pools_that_return_indices_have_gradients(run: Run) -> None:
    run(check_gradients_with_indices, random_cases(random_max_pool, 30, 4, 22), nprocs=4)


def unpool(shape: tuple[int, ...]) -> None:
    """Indices of gathered outputs go into torch's own unpooling."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    layout = Layout.balanced(P, shape)
    x = values(shape, 0)
    expected = torch.nn.MaxUnpool2d(2)(*torch.nn.MaxPool2d(2, return_indices=True)(x))
    y, places = tessel.nn.DistributedMaxPool2d(P, 2, return_indices=True)(layout.local_part(x))
    whole = [tessel.all_gather(each, P) for each in (y, places)]
    assert torch.equal(torch.nn.MaxUnpool2d(2)(*whole), expected)


def test_gathered_indices_can_be_unpooled(run: Run) -> None:
    run(unpool, (2, 3, 8, 12), nprocs=4)


def attempt(
    name: str, args: tuple[Any, ...], settings: dict[str, Any], grid: tuple[int, ...], x: Tensor
) -> tuple[Any, Any, str]:
    """What torch's own layer and the layer over a grid raise on the same tensor."""
    P = tessel.world().create_cartesian_topology_partition(grid)

    def over_grid() -> None:
        layer = getattr(tessel.nn, f"Distributed{name}")(P, *args, **settings)
        layer(Layout.balanced(P, x.shape).local_part(x))

    alone = raised(lambda: getattr(torch.nn, name)(*args, **settings)(x))
    spread = raised(over_grid)
    return alone and alone[0], spread and spread[0], spread[1] if spread else ""


REJECTED = {
    "padding beyond half of the window": ("MaxPool1d", (3,), {"padding": 2}, (1, 3, 12)),
    "padding beyond half of an average": ("AvgPool1d", (3,), {"padding": 2}, (1, 3, 12)),
    "a window larger than the tensor": ("MaxPool1d", (9,), {}, (1, 3, 8)),
    "an average larger than the tensor": ("AvgPool1d", (9,), {"padding": 0}, (1, 3, 8)),
    "a dilated window larger than the tensor": ("MaxPool1d", (5,), {"dilation": 3}, (1, 3, 12)),
    "a negative padding": ("MaxPool1d", (3,), {"padding": -1}, (1, 3, 12)),
    "a window of nothing": ("MaxPool1d", (0,), {"stride": 1}, (1, 3, 12)),
    "a tensor without values along a dimension": ("MaxPool1d", (1,), {}, (1, 0, 12)),
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_torch_rejects_is_rejected_on_every_worker(run: Run, what: str) -> None:
    name, args, settings, shape = REJECTED[what]
    results = run(attempt, name, args, settings, (1, 1, 4), torch.zeros(shape), nprocs=4)
    expected = results[0][0]
    assert len(set(results)) == 1, results
    assert results[0][1] == expected, results[0]


DTYPES = [
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.complex64,
]  # fmt: skip


def pool_dtypes(name: str, dtypes: list[torch.dtype]) -> None:
    """Each dtype is pooled exactly, or rejected as torch does it, also without output."""
    D = int(name[-2])
    P = tessel.world().create_cartesian_topology_partition([1, 1, *[1] * (D - 1), 4])
    for dtype, length, kernel in ((d, n, k) for d in dtypes for n, k in ((13, 3), (4, 4))):
        x = values((1, 2, *[length] * D), 1).mul(9).round().to(dtype)
        alone = raised(lambda x=x, k=kernel: getattr(torch.nn, name)(k)(x))
        layer = getattr(tessel.nn, f"Distributed{name}")(P, kernel)
        part = Layout.balanced(P, x.shape).local_part(x)
        spread = raised(lambda layer=layer, part=part: layer(part))
        what = f"{name} of {dtype}, {length}"
        assert (alone and alone[0]) == (spread and spread[0]), f"{what}: {alone}, {spread}"
        if alone is None:
            expected = getattr(torch.nn, name)(kernel)(x)
            wanted = Layout.balanced(P, expected.shape).local_part(expected)
            got = layer(part)
            assert got.dtype == wanted.dtype, what
            tolerance = 0.02 if dtype in (torch.float16, torch.bfloat16) else 1e-6
            close(what, got.double(), wanted.double(), tolerance)


@pytest.mark.parametrize("name", KINDS)
def test_dtypes_are_taken_or_rejected_as_torch_does(run: Run, name: str) -> None:
    """Integers exactly; half precision to its own rounding, since sums go another way."""
    run(pool_dtypes, name, DTYPES, nprocs=4)


def wrong_parts(kind: str) -> tuple[Any, ...] | None:
    """Workers that bring what does not fit together."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    layer = tessel.nn.DistributedMaxPool2d(P, 3, 1, 1)
    x = torch.zeros(1, 2, 4, 4)
    if kind == "axes":
        x = torch.zeros(2, 4, 4)
    elif P.rank == 3:
        x = {
            "lengths": torch.zeros(1, 2, 5, 4),
            "channels": torch.zeros(1, 3, 4, 4),
            "dtypes": x.double(),
            "dimensions": x[0],
        }[kind]
    return raised(lambda: layer(x))


@pytest.mark.parametrize("kind", ["axes", "lengths", "channels", "dtypes", "dimensions"])
def test_parts_that_do_not_fit_raise_the_same_on_every_worker(run: Run, kind: str) -> None:
    results = run(wrong_parts, kind, nprocs=4)
    assert len(set(results)) == 1
    assert results[0] is not None and results[0][0] is ValueError


ALIGNED = [
    Case("MaxPool1d", (2,), (1, 1, 4), (1, 2, 16), (("stride", 2),)),
    Case("AvgPool2d", (2,), (1, 1, 2, 2), (1, 2, 8, 8), (("stride", 2),)),
    Case("AvgPool2d", (3,), (2, 2, 1, 1), (2, 2, 9, 9), (("stride", 1), ("padding", 1))),
    Case("MaxPool3d", (2,), (1, 1, 2, 1, 2), (1, 2, 4, 4, 4), (("stride", 2),)),
]
HALOS = [
    Case("MaxPool1d", (3,), (1, 1, 4), (1, 2, 16), (("stride", 1), ("padding", 1))),
    Case("AvgPool1d", (7,), (1, 1, 4), (2, 1, 9), (("stride", 1), ("padding", 3))),
    Case("MaxPool1d", (5,), (1, 1, 4), (1, 3, 8), (("stride", 4),)),
    Case("AvgPool2d", (3,), (1, 1, 2, 2), (1, 2, 9, 11), (("stride", 2), ("padding", 1))),
    Case("MaxPool2d", (5,), (1, 1, 2, 2), (1, 2, 7, 7), (("stride", 2), ("padding", 2))),
    Case("MaxPool2d", (3,), (1, 1, 4, 1), (2, 2, 13, 5), (("stride", 2),)),
    Case("AvgPool3d", (3,), (1, 1, 2, 1, 2), (1, 2, 5, 5, 6), (("stride", 1), ("padding", 1))),
    Case("MaxPool1d", (3,), (1, 1, 4), (1, 2, 12), (("stride", 1),), ((1,), (2,), (6, 0, 4, 2))),
    Case("AvgPool1d", (3,), (1, 2, 2), (1, 3, 12), (("stride", 3),), ((1,), (1, 2), (7, 5))),
]


def measure_all(cases: list[Case]) -> list[Sent]:
    return [measure(case) for case in cases]


def test_a_halo_is_the_least_that_can_be_sent(run: Run) -> None:
    """Each worker sends what others lack, in one message to each; gradients go the way back."""
    results = run(measure_all, HALOS, nprocs=4)
    for k, case in enumerate(HALOS):
        assert [result[k] for result in results] == expected_traffic(case), case


def test_aligned_windows_send_nothing(run: Run) -> None:
    for result in run(measure_all, ALIGNED, nprocs=4):
        assert result == [Sent((0, 0), (0, 0))] * len(ALIGNED)


def count_backward(needs_grad: list[bool]) -> tuple[int, bool, int]:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    layer = tessel.nn.DistributedAvgPool1d(P, 3, 1, 1)
    x = values((1, 2, 4), P.rank).requires_grad_(needs_grad[P.rank])
    y = layer(x)
    with count_traffic() as traffic:
        if y.requires_grad:
            y.sum().backward()
    return traffic.messages, y.requires_grad, 0 if x.grad is None else x.grad.numel()


def test_nothing_travels_back_when_nobody_needs_a_gradient(run: Run) -> None:
    assert run(count_backward, [False] * 4, nprocs=4) == [(0, False, 0)] * 4


def test_a_gradient_that_one_worker_needs_reaches_it(run: Run) -> None:
    """All workers take part in the backward pass, and only that one has a gradient then."""
    results = run(count_backward, [False, True, False, False], nprocs=4)
    assert [needs for _, needs, _ in results] == [True] * 4
    assert [size for _, _, size in results] == [0, 8, 0, 0]


def copied() -> None:
    """Copies of a layer, also those that went through a file, pool as it does."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    layer = tessel.nn.DistributedMaxPool1d(P, 3, 2, 1, return_indices=True)
    x = Layout.balanced(P, (1, 2, 13)).local_part(values((1, 2, 13), 0))
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for a, b in zip(other(x), expected, strict=True):
            assert torch.equal(a, b)
        assert repr(other) == repr(layer)


def test_a_layer_can_be_copied_and_pickled(run: Run) -> None:
    run(copied, nprocs=4)


def not_changed() -> None:
    """The input stays as it was, and views of any strides and stride 0 are taken."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    layer = tessel.nn.DistributedMaxPool2d(P, 3, 1, 1)
    x = values((4, 2, 4, 2), P.rank).permute(3, 1, 0, 2)
    before = x.clone()
    assert torch.equal(layer(x), layer(before.contiguous()))
    assert torch.equal(x, before)
    flat = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(2, 2, 4, 4).requires_grad_()
    y = layer(flat)
    (grad,) = torch.autograd.grad(y.sum(), flat)
    assert torch.equal(y, torch.ones_like(y)) and grad.shape == flat.shape


def test_views_are_taken_and_inputs_are_left_alone(run: Run) -> None:
    run(not_changed, nprocs=4)


def by_itself() -> None:
    """On one worker all is torch's own, also for other strides of the grid."""
    for name in KINDS:
        D = int(name[-2])
        check_case(Case(name, (3,), (1,) * (D + 2), (2, 3, *[7] * D), (("padding", 1),)))


def test_one_worker_pools_alone() -> None:
    by_itself()


def test_arguments_are_torchs() -> None:
    """Positions, names and defaults."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    layer = tessel.nn.DistributedAvgPool2d(P, 3, 2, 1, True, False, 4)
    alone = torch.nn.AvgPool2d(3, 2, 1, True, False, 4)
    for name in ("kernel_size", "stride", "padding", "ceil_mode", "divisor_override"):
        assert getattr(layer, name) == getattr(alone, name)
    assert not list(layer.state_dict())
    with pytest.raises(TypeError):
        tessel.nn.DistributedAvgPool2d(P, 3, dilation=2)
