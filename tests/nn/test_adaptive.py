"""Adaptive pools over a partition against torch's own in one process.

Tests `nn/adaptive.py`, `tensor/rules/adaptive.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tessel
from covering import repeats
from parity import Case, check_cases, values
from tessel import Layout
from tessel.core.windows import AdaptiveWindow
from tessel.tensor.rules import adaptive
from tessel.testing import count_traffic

GRIDS = {
    1: [(1, 1, 4), (1, 1, 3), (1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 1), (1, 4, 1)],
    2: [(1, 1, 2, 2), (1, 1, 4, 1), (1, 1, 1, 3), (2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 1, 4)],
    3: [(1, 1, 2, 2, 1), (1, 1, 1, 2, 2), (1, 1, 4, 1, 1), (1, 1, 1, 1, 3), (2, 1, 1, 1, 2)],
}
LONGEST = {1: 40, 2: 12, 3: 6}


def case(name: str, size: Any, grid: tuple[int, ...], lengths: Any) -> Case:
    return Case(name, (size,), grid, tuple(map(sum, lengths)), (), lengths)


def uneven(rng: random.Random, length: int, parts: int) -> tuple[int, ...]:
    """Parts of any length, some empty."""
    ends = sorted(rng.randint(0, length) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, length], strict=True))


def random_case(rng: random.Random, num_dims: int, kind: str) -> Case:
    grid = rng.choice(GRIDS[num_dims])
    spatial = [rng.randint(1, LONGEST[num_dims]) for _ in range(num_dims)]
    shape = (rng.randint(1, 2), rng.randint(1, 3), *spatial)
    most = rng.choice([1, 2, 3, LONGEST[num_dims]])
    size: Any = tuple(rng.randint(1, most) for _ in spatial)
    if num_dims > 1 and rng.random() < 0.3:
        size = rng.choice([(None, *size[1:]), (*size[:-1], None), size[0]])
    elif num_dims == 1:
        (size,) = size
    lengths = tuple(uneven(rng, n, parts) for n, parts in zip(shape, grid, strict=True))
    settings = (("return_indices", rng.random() < 0.5),) if kind == "Max" else ()
    return Case(
        f"Adaptive{kind}Pool{num_dims}d",
        (size,),
        grid,
        shape,
        settings,
        lengths if rng.random() < 0.6 else None,
    )


def random_cases(num_dims: int, count: int) -> Iterator[Case]:
    rng = random.Random(num_dims)
    for number in range(count):
        yield random_case(rng, num_dims, ("Avg", "Max")[number % 2])


FIXED = [
    case("AdaptiveAvgPool1d", 1, (1, 1, 4), ((1,), (2,), (6, 2, 0, 1))),
    case("AdaptiveMaxPool1d", 1, (1, 1, 4), ((1,), (2,), (6, 2, 0, 1))),
    case("AdaptiveAvgPool1d", 5, (1, 1, 4), ((1,), (2,), (0, 0, 13, 0))),
    case("AdaptiveMaxPool1d", 5, (1, 1, 4), ((1,), (2,), (0, 0, 13, 0))),
    case("AdaptiveAvgPool1d", 9, (1, 1, 4), ((1,), (2,), (1, 0, 1, 0))),
    case("AdaptiveMaxPool1d", 9, (1, 1, 4), ((1,), (2,), (1, 0, 1, 0))),
    case("AdaptiveAvgPool2d", 1, (1, 1, 2, 2), ((2,), (3,), (6, 2), (1, 6))),
    case("AdaptiveMaxPool2d", 1, (1, 1, 2, 2), ((2,), (3,), (6, 2), (1, 6))),
    case("AdaptiveAvgPool2d", (None, 1), (2, 1, 1, 2), ((0, 2), (3,), (5,), (1, 6))),
    case("AdaptiveMaxPool2d", (None, 1), (2, 1, 1, 2), ((0, 2), (3,), (5,), (1, 6))),
    case("AdaptiveMaxPool2d", 3, (1, 4, 1, 1), ((2,), (1, 1, 0, 0), (7,), (5,))),
    case("AdaptiveAvgPool2d", 3, (1, 4, 1, 1), ((2,), (1, 1, 0, 0), (7,), (5,))),
    case("AdaptiveAvgPool3d", (1, 2, 3), (1, 1, 1, 2, 2), ((1,), (2,), (4,), (5, 2), (3, 3))),
    case("AdaptiveMaxPool3d", (1, 2, 3), (1, 1, 1, 2, 2), ((1,), (2,), (4,), (5, 2), (3, 3))),
    case("AdaptiveAvgPool1d", 3, (2, 2), ((1, 2), (6, 2))),
    case("AdaptiveMaxPool1d", 3, (2, 2), ((1, 2), (6, 2))),
]


@pytest.mark.slow
def test_pools_are_those_of_one_process(run: Any) -> None:
    assert run(check_cases, FIXED) == [len(FIXED)] * 4


@pytest.mark.parametrize(("num_dims", "count"), [(1, 120), (2, 120), (3, 60)])
def test_random_pools_are_those_of_one_process(run: Any, num_dims: int, count: int) -> None:
    cases = list(random_cases(num_dims, repeats(count)))
    assert run(check_cases, cases, timeout=100) == [len(cases)] * 4


def check_with_tables(cases: list[Case], tied: list[Case]) -> tuple[int, list[str]]:
    """The same where windows of unequal sizes are made equal, as is done when they are many."""
    few, adaptive._FEW = adaptive._FEW, 0
    adaptive.best_way.cache_clear()
    try:
        return check_cases(cases), differences(tied)
    finally:
        adaptive._FEW = few
        adaptive.best_way.cache_clear()


@pytest.mark.slow
def test_many_unequal_windows(run: Any) -> None:
    rng = random.Random(5)
    cases = [
        random_case(rng, num_dims, kind)
        for num_dims in (1, 2, 3)
        for kind in ("Avg", "Max")
        for _ in range(repeats(25))
    ]
    tied = [each for each in cases if each.workers == 4 and "Max" in each.name]
    assert run(check_with_tables, cases, tied, timeout=100) == [(len(cases), [])] * 4


def differences(cases: list[Case]) -> list[str]:
    """Where values, places or gradients differ from torch's, on few values, many of them equal.

    Some are infinite and some are not a number.
    """
    wrong = []
    for number, each in enumerate(cases):
        layout, (size,) = each.layout(), each.args
        few = torch.tensor([0.0, 0.0, 1.0, 1.0, -1.0, float("-inf"), float("nan")])
        top = (2, 4, 7)[number % 3]
        generator = torch.Generator().manual_seed(number)
        x = few[torch.randint(0, top, each.shape, generator=generator)]
        whole, part = x.clone().requires_grad_(), layout.local_part(x).clone().requires_grad_()
        alone = getattr(torch.nn, each.name)(size, return_indices=True)(whole)
        make = getattr(tessel.nn, f"Distributed{each.name}")
        spread = make(each.partition(), size, return_indices=True)(part)
        weights = values(alone[0].shape, 1).float()
        out = layout.resized(alone[0].shape)
        expected = (*alone, torch.autograd.grad(alone[0], whole, weights)[0])
        local = out.local_part(weights).reshape(spread[0].shape)
        got = (*spread, torch.autograd.grad(spread[0], part, local)[0])
        for what, a, b, where in zip(
            ("values", "places", "gradient"), got, expected, (out, out, layout), strict=True
        ):
            b = where.local_part(b)
            if a.numel() + b.numel() and not torch.allclose(a, b, atol=1e-5, equal_nan=True):
                wrong.append(f"{what} of {each}")
    return wrong


def test_of_equal_values_torchs_own_is_taken(run: Any) -> None:
    rng = random.Random(7)
    drawn = [
        random_case(rng, num_dims, "Max") for num_dims in (1, 2, 3) for _ in range(repeats(40))
    ]
    cases = [each for each in drawn if each.workers == 4]
    assert len(cases) > repeats(50)
    assert run(differences, cases, timeout=100) == [[]] * 4


def infinities() -> bool:
    """Whether an infinite value gives an infinite mean, in windows of unequal sizes too."""
    P = tessel.world().create_cartesian_topology_partition((1, 1, 4))
    x = torch.zeros(1, 1, 13)
    x[..., 6] = float("inf")
    part = Layout.balanced(P, x.shape).local_part(x)
    for size in (1, 2, 3, 5, 20):
        alone = torch.nn.AdaptiveAvgPool1d(size)(x)
        y = tessel.nn.DistributedAdaptiveAvgPool1d(P, size)(part)
        if not torch.equal(y, Layout.balanced(P, alone.shape).local_part(alone)):
            return False
    return True


def test_an_infinite_value_stays_infinite(run: Any) -> None:
    assert all(run(infinities))


def low_precision(dtype: torch.dtype) -> float:
    """The largest difference to torch's own, in units of the last place of the largest value."""
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 2))
    x = values((1, 3, 11, 9), 0).to(dtype)
    worst = 0.0
    for name in ("AdaptiveAvgPool2d", "AdaptiveMaxPool2d"):
        for size in (1, (3, 2), (11, 4), (20, 1)):
            alone = getattr(torch.nn, name)(size)(x)
            layer = getattr(tessel.nn, f"Distributed{name}")(P, size)
            y = layer(Layout.balanced(P, x.shape).local_part(x))
            assert y.dtype == dtype
            expected = Layout.balanced(P, alone.shape).local_part(alone)
            if y.numel():
                error = (y.double() - expected.double()).abs().max().item()
                worst = max(worst, error / torch.finfo(dtype).eps / alone.abs().max().item())
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_precisions(run: Any, dtype: torch.dtype) -> None:
    assert max(run(low_precision, dtype)) < 4


def no_outputs() -> list[tuple[int, ...]]:
    """The local shapes of outputs of length zero; torch has no gradient of them."""
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 2))
    return [
        tuple(getattr(tessel.nn, f"DistributedAdaptive{kind}Pool2d")(P, (0, 3))(x).shape)
        for kind in ("Avg", "Max")
        for x in [torch.ones(1, 2, 3, 4)]
    ]


def test_outputs_of_length_zero(run: Any) -> None:
    assert run(no_outputs) == [[(1, 2, 0, columns)] * 2 for columns in (2, 1, 2, 1)]


def sent(name: str, size: Any, shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int]:
    """How many bytes this worker sends in a forward and in a backward pass."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    layer = getattr(tessel.nn, f"Distributed{name}")(P, size)
    x = torch.zeros(Layout.balanced(P, shape).local_shape, requires_grad=True)
    layer(x)
    with count_traffic() as forward:
        y = layer(x)
    with count_traffic() as backward:
        y.sum().backward()
    return forward.bytes_sent, backward.bytes_sent


GLOBAL = [
    ("AdaptiveAvgPool2d", (1, 1, 2, 2), 1, [(0, 3), (1, 0), (1, 0), (1, 0)], 4),
    ("AdaptiveAvgPool2d", (1, 1, 4, 1), 1, [(0, 3), (1, 0), (1, 0), (1, 0)], 4),
    ("AdaptiveAvgPool2d", (2, 1, 2, 1), 1, [(0, 0.5), (0.5, 0), (0, 0.5), (0.5, 0)], 4),
    ("AdaptiveAvgPool2d", (1, 4, 1, 1), 1, [(0, 0)] * 4, 4),
    ("AdaptiveAvgPool2d", (1, 1, 2, 2), 2, [(0, 0)] * 4, 4),
    ("AdaptiveMaxPool2d", (1, 1, 2, 2), 2, [(0, 0)] * 4, 4),
]


@pytest.mark.parametrize(("name", "grid", "size", "values_sent", "width"), GLOBAL)
def test_a_global_pool_sends_one_value_for_each_part(
    run: Any, name: str, grid: tuple[int, ...], size: int, values_sent: Any, width: int
) -> None:
    shape = (2, 32, 16, 16)
    expected = [tuple(int(64 * width * n) for n in each) for each in values_sent]
    assert run(sent, name, size, shape, grid) == expected


def test_a_global_maximum_sends_a_value_and_its_place(run: Any) -> None:
    got = run(sent, "AdaptiveMaxPool2d", 1, (2, 32, 16, 16), (1, 1, 2, 2))
    assert got == [(0, 3 * 64 * 4), *[(64 * (4 + 8), 0)] * 3]


def plans(drawn: list[Case]) -> list[str]:
    """Cases in which the traffic of the best way is not what its movements send in all."""
    from tessel.core.plan import route

    wrong = []
    for each in drawn:
        layout = each.layout()
        alone = each.torch_layer()(torch.zeros(each.shape).double())
        shape = tuple((alone[0] if isinstance(alone, tuple) else alone).shape)
        for widths in ((8, 0), (8, 8)):
            way = adaptive.best_way(layout, shape, len(shape) - 2, widths)
            moves = [(way.source, way.fetch.read, 8)]
            if any(way.partial) and widths[1]:
                moves.append((way.stack.source, way.stack.target, 16))
            elif any(way.partial):
                moves.append((way.pooled, way.target, 8))
            total = sum(
                width * piece.numel
                for source, target, width in moves
                for worker in each.partition().ranks
                for plan in route(source, target, worker)
                for piece in plan.arrives
            )
            if total != way.num_bytes(*widths):
                wrong.append(f"{each}: {total} bytes")
    return wrong


def test_what_a_way_costs_is_what_travels(run: Any) -> None:
    rng = random.Random(3)
    drawn = [
        random_case(rng, num_dims, "Avg") for num_dims in (1, 2, 3) for _ in range(repeats(30))
    ]
    assert run(plans, drawn) == [[]] * 4


def error_of(name: str, size: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    P = tessel.world().create_cartesian_topology_partition((*(1 for _ in shape[1:]), 4))
    x = Layout.balanced(P, shape).local_part(torch.zeros(shape, dtype=dtype))
    try:
        getattr(tessel.nn, f"Distributed{name}")(P, size)(x)
    except Exception as error:  # its kind is the result
        return type(error), str(error)
    return None


BAD = [
    ("AvgPool1d", -1, (1, 1, 8), torch.float32),
    ("AvgPool2d", (1, 2, 3), (1, 1, 8, 8), torch.float32),
    ("AvgPool2d", 2, (1, 1, 8), torch.int64),
    ("AvgPool2d", 2, (8, 8), torch.float32),
    ("AvgPool1d", 2, (1, 1, 0), torch.float32),
    ("MaxPool1d", 2, (1, 1, 0), torch.float32),
    ("MaxPool2d", 2, (8, 8), torch.float32),
    ("MaxPool2d", (1, 2, 3), (1, 1, 8, 8), torch.float32),
    ("MaxPool3d", 2, (1, 2, 8, 8, 8), torch.complex64),
    ("MaxPool1d", 2, (1, 1, 8), torch.int64),
]


@pytest.mark.parametrize(("name", "size", "shape", "dtype"), BAD)
def test_bad_input_raises_what_torch_raises(
    run: Any, name: str, size: Any, shape: Any, dtype: torch.dtype
) -> None:
    name = f"Adaptive{name}"
    with pytest.raises(Exception) as caught:  # of whatever kind torch has
        getattr(torch.nn, name)(size)(torch.zeros(shape, dtype=dtype))
    results = run(error_of, name, size, shape, dtype)
    assert {each and each[0] for each in results} == {caught.type}
    assert len(set(results)) == 1


def test_outputs_touch_what_they_read() -> None:
    for inputs in range(1, 12):
        for outputs in range(1, 12):
            window = AdaptiveWindow(inputs, outputs)
            touched = AdaptiveWindow(inputs=outputs, outputs=inputs)
            hulls = [window.hull((i, i + 1)) for i in range(outputs)]
            for t in range(inputs):
                readers = [i for i, (start, stop) in enumerate(hulls) if start <= t < stop]
                assert touched.hull((t, t + 1)) == (readers[0], readers[-1] + 1)
