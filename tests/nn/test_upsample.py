"""Upsampling over a partition against torch's own in one process.

Tests `nn/upsample.py`, `tensor/rules/interpolation.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tessel
from covering import repeats
from parity import Case, check_cases, values
from tessel import Layout
from tessel.core.windows import Cubic, Interpolation, Linear, Nearest
from tessel.nn import DistributedUpsample
from tessel.tensor.rules import interpolation
from tessel.testing import count_traffic

SCALES = (2.0, 3.0, 1.5, 0.5, 2.7, 1.0, 1.3, 0.4)
GRIDS = {
    1: [(1, 1, 4), (1, 1, 3), (1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 1), (1, 4, 1)],
    2: [(1, 1, 2, 2), (1, 1, 4, 1), (1, 1, 1, 3), (2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 1, 4)],
    3: [(1, 1, 2, 2, 1), (1, 1, 1, 2, 2), (1, 1, 4, 1, 1), (1, 1, 1, 1, 3), (2, 1, 1, 1, 2)],
}
MODES = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear", "area"),
}
LONGEST = {1: 40, 2: 12, 3: 6}
INTERPOLATING = ("linear", "bilinear", "bicubic", "trilinear")


def case(grid: tuple[int, ...], lengths: Any = None, shape: Any = None, **settings: Any) -> Case:
    shape = tuple(map(sum, lengths)) if shape is None else shape
    return Case("Upsample", (), grid, shape, tuple(settings.items()), lengths)


def uneven(rng: random.Random, length: int, parts: int) -> tuple[int, ...]:
    """Parts of any length, some empty."""
    ends = sorted(rng.randint(0, length) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, length], strict=True))


def random_case(rng: random.Random, num_dims: int, mode: str) -> Case:
    grid = rng.choice(GRIDS[num_dims])
    spatial = [rng.randint(1, LONGEST[num_dims]) for _ in range(num_dims)]
    shape = (rng.randint(1, 2), rng.randint(1, 2), *spatial)
    settings: dict[str, Any] = {"mode": mode}
    if rng.random() < 0.4:
        settings["size"] = tuple(rng.randint(1, LONGEST[num_dims]) for _ in spatial)
    else:
        settings["scale_factor"] = tuple(
            rng.choice([scale for scale in SCALES if n * scale >= 1]) for n in spatial
        )
        settings["recompute_scale_factor"] = rng.choice([None, False, True])
    if mode in INTERPOLATING:
        settings["align_corners"] = rng.choice([None, False, True])
    lengths = [uneven(rng, n, parts) for n, parts in zip(shape, grid, strict=True)]
    return case(grid, tuple(lengths) if rng.random() < 0.6 else None, shape, **settings)


def is_own_adjoint(case: Case) -> bool:
    """Whether torch's gradient is that of what torch computed: ⟨A x, w⟩ = ⟨x, Aᵀ w⟩.

    It is not for some lengths: kernels of the nearest values round otherwise backward than forward
    in double precision, and that of the cubic rule forgets the scale where lengths are equal. There
    the gradient of the layer, which is the adjoint, cannot equal torch's.
    """
    x = values(case.shape, 0).requires_grad_()
    y = case.torch_layer()(x)
    weights = values(y.shape, 1)
    (gradient,) = torch.autograd.grad(y, x, weights)
    return torch.allclose((y * weights).sum(), (x * gradient).sum(), rtol=1e-9, atol=1e-9)


def random_cases(num_dims: int, count: int, seed: int) -> Iterator[Case]:
    rng = random.Random(seed)
    modes = MODES[num_dims]
    while count:
        drawn = random_case(rng, num_dims, modes[count % len(modes)])
        if is_own_adjoint(drawn):
            count -= 1
            yield replace(drawn, seed=count)


FIXED = [
    case((1, 1, 2), ((1,), (2,), (6, 2)), scale_factor=2.0),
    case((1, 1, 2), ((1,), (2,), (6, 2)), scale_factor=2.0, mode="linear"),
    case((1, 1, 2), ((1,), (2,), (6, 2)), scale_factor=2.0, mode="linear", align_corners=True),
    case((1, 1, 4), ((1,), (2,), (0, 5, 0, 2)), scale_factor=3.0, mode="linear"),
    case((1, 1, 4), shape=(1, 1, 9), size=2, mode="linear"),
    case((1, 1, 4), shape=(1, 1, 2), size=9, mode="nearest-exact"),
    case((1, 1, 4), shape=(1, 1, 1), size=1, mode="linear"),
    case((1, 1, 2, 2), ((1,), (2,), (6, 2), (3, 5)), scale_factor=2.0, mode="bilinear"),
    case((1, 1, 2, 2), ((1,), (2,), (6, 2), (3, 5)), scale_factor=2.0, mode="bicubic"),
    case((1, 1, 2, 2), ((1,), (2,), (6, 2), (3, 5)), scale_factor=(3.0, 1.0), mode="bicubic"),
    case((1, 1, 2, 2), shape=(1, 1, 9, 8), scale_factor=1.0, mode="bicubic"),
    case((1, 1, 2, 1), shape=(1, 1, 9, 8), scale_factor=(2.0, 1.01), mode="bicubic"),
    case((1, 1, 2, 1), shape=(1, 1, 9, 8), scale_factor=(1.0, 1.7), mode="bilinear"),
    case((1, 1, 2, 1), shape=(1, 1, 9, 8), scale_factor=(1.7, 1.01), mode="bilinear"),
    case((1, 1, 2, 1), shape=(1, 1, 9, 8), scale_factor=(2.0, 1.3), mode="bicubic"),
    case((2, 2, 1, 1), ((1, 3), (4, 1), (3,), (5,)), scale_factor=2.0, mode="bilinear"),
    case((2, 2, 1, 1), ((1, 0), (1, 0), (3,), (5,)), scale_factor=2.5, mode="bicubic"),
    case((1, 1, 2, 2), shape=(1, 1, 70, 10), size=(70, 90)),
    case((1, 1, 2, 2), ((0,), (2,), (6, 2), (3, 5)), scale_factor=2.0, mode="bilinear"),
    Case("UpsamplingNearest2d", (), (1, 1, 2, 2), (1, 2, 5, 7), (("scale_factor", 2),)),
    Case("UpsamplingNearest2d", ((9, 4),), (1, 1, 2, 2), (1, 2, 5, 7)),
    Case("UpsamplingBilinear2d", (), (1, 1, 2, 2), (1, 2, 5, 7), (("scale_factor", 2),)),
    Case("UpsamplingBilinear2d", ((9, 4),), (1, 1, 4, 1), (1, 2, 5, 7)),
]  # fmt: skip


def test_upsampling_is_that_of_one_process(run: Any) -> None:
    assert run(check_cases, FIXED) == [len(FIXED)] * 4


@pytest.mark.parametrize(("num_dims", "count"), [(1, 120), (2, 100), (3, 60)])
def test_random_upsampling_is_that_of_one_process(run: Any, num_dims: int, count: int) -> None:
    cases = list(random_cases(num_dims, repeats(count), seed=num_dims))
    assert run(check_cases, cases, timeout=100) == [len(cases)] * 4


SHAPES = [(1, 1, 31), (1, 1, 57), (1, 1, 273), (1, 1, 20, 31), (2, 4, 70, 69), (1, 3, 9, 31, 4)]


def nearest_outputs(dtype: torch.dtype) -> list[str]:
    """Where the outputs of the layer differ from torch's, for lengths at which roundings count."""
    wrong = []
    for shape in SHAPES:
        grid = (1, 1, *(1 for _ in shape[3:]), 4)
        P = tessel.world().create_cartesian_topology_partition(grid)
        x = torch.arange(np.prod(shape)).to(dtype).view(shape)
        for mode in ("nearest", "nearest-exact"):
            for factor in (*SCALES, 1.01, 5.3, 1 / 3, 7.0, 41.0):
                factors = (*(1.0 for _ in shape[3:]), factor)
                alone = torch.nn.Upsample(scale_factor=factors, mode=mode)(x)
                layer = DistributedUpsample(P, scale_factor=factors, mode=mode)
                y = layer(Layout.balanced(P, shape).local_part(x))
                if not torch.equal(y, Layout.balanced(P, alone.shape).local_part(alone)):
                    wrong.append(f"{shape} {mode} {factor} {dtype}")
    return wrong


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_nearest_input_is_never_another_one(run: Any, dtype: torch.dtype) -> None:
    assert run(nearest_outputs, dtype) == [[]] * 4


def low_precision(dtype: torch.dtype) -> float:
    """The largest difference to torch's own, in units of the last place of the largest value."""
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 2))
    x = values((1, 3, 11, 9), 0).to(dtype)
    worst = 0.0
    for mode, corners in (("bilinear", True), ("bilinear", False), ("bicubic", True)):
        alone = F.interpolate(x, scale_factor=1.7, mode=mode, align_corners=corners)
        layer = DistributedUpsample(P, scale_factor=1.7, mode=mode, align_corners=corners)
        y = layer(Layout.balanced(P, x.shape).local_part(x))
        assert y.dtype == dtype
        expected = Layout.balanced(P, alone.shape).local_part(alone)
        error = (y.double() - expected.double()).abs().max().item()
        worst = max(worst, error / torch.finfo(dtype).eps / alone.abs().max().item())
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_precisions(run: Any, dtype: torch.dtype) -> None:
    assert max(run(low_precision, dtype)) < 16


ODD = [
    case((1, 1, 4), shape=(1, 1, 31), scale_factor=2.7),
    case((1, 1, 2, 2), shape=(1, 1, 70, 70), scale_factor=1.01),
    case((1, 1, 2, 2), shape=(1, 1, 9, 8), scale_factor=1.01, mode="bicubic"),
]


def adjoint_where_torch_has_none(odd: list[Case]) -> list[float]:
    """How far outputs are from torch's, and gradients from the adjoint of what was computed."""
    errors = []
    for each in odd:
        layout, x = each.layout(), values(each.shape, 0)
        alone = each.torch_layer()(x)
        part = layout.local_part(x).clone().requires_grad_()
        y = each.layer()(part)
        out = layout.resized(alone.shape)
        weights = out.local_part(values(alone.shape, 1))
        (gradient,) = torch.autograd.grad(y, part, weights)
        errors.append((y - out.local_part(alone)).abs().max().item())
        errors.append((out.inner(y, weights) - layout.inner(part, gradient)).abs().item())
    return errors


def test_gradients_are_adjoints_also_where_torchs_are_not(run: Any) -> None:
    assert max(map(max, run(adjoint_where_torch_has_none, ODD))) < 1e-11


def bytes_of_integers() -> tuple[bool, str]:
    """The nearest of uint8, which is exact; what is said of other modes, which are not."""
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 2))
    x = torch.arange(60, dtype=torch.uint8).view(1, 1, 6, 10)
    part = Layout.balanced(P, x.shape).local_part(x)
    alone = F.interpolate(x, size=(9, 7))
    y = DistributedUpsample(P, size=(9, 7))(part)
    try:
        DistributedUpsample(P, scale_factor=2, mode="bilinear")(part)
    except NotImplementedError as error:
        return torch.equal(y, Layout.balanced(P, alone.shape).local_part(alone)), str(error)
    return False, ""


def test_uint8(run: Any) -> None:
    (same, text), *others = run(bytes_of_integers)
    assert same and "torch.float32" in text
    assert others == [(same, text)] * 3


def sent(shape: tuple[int, ...], grid: tuple[int, ...], settings: dict[str, Any]) -> int:
    """How many bytes this worker sends, second call: nothing is agreed on anew."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    layer = DistributedUpsample(P, **settings)
    x = torch.zeros(Layout.balanced(P, shape).local_shape)
    plain = torch.nn.Identity()
    layer(x), plain(x)
    with count_traffic() as traffic:
        layer(x)
    return traffic.bytes_sent


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"scale_factor": 2.0}, [0, 0, 0, 0]),
        ({"scale_factor": 2.0, "mode": "bilinear"}, [1, 2, 2, 1]),
        ({"scale_factor": 2.0, "mode": "bicubic"}, [2, 4, 4, 2]),
        ({"scale_factor": 0.5, "mode": "bilinear"}, [0, 0, 0, 0]),
    ],
)
def test_only_what_is_read_travels(run: Any, settings: Any, rows: list[int]) -> None:
    shape = (1, 3, 16, 5)
    assert run(sent, shape, (1, 1, 4, 1), settings) == [each * 3 * 5 * 4 for each in rows]


def error_of(shape: tuple[int, ...], dtype: torch.dtype, settings: dict[str, Any]) -> Any:
    P = tessel.world().create_cartesian_topology_partition((1, 1, *(1 for _ in shape[3:]), 4))
    x = Layout.balanced(P, shape).local_part(torch.zeros(shape, dtype=dtype))
    try:
        DistributedUpsample(P, **settings)(x)
    except Exception as error:  # its kind is the result
        return type(error), str(error)
    return None


BAD = [
    ((1, 1, 8), torch.float32, {}),
    ((1, 1, 8), torch.float32, {"size": 4, "scale_factor": 2.0}),
    ((1, 1, 8), torch.float32, {"size": (4, 4)}),
    ((1, 1, 8), torch.float32, {"scale_factor": (2.0, 2.0)}),
    ((1, 1, 8), torch.float32, {"size": 4, "mode": "bilinear"}),
    ((1, 1, 8), torch.float32, {"size": 4, "mode": "quintic"}),
    ((1, 1, 8), torch.float32, {"size": 4, "align_corners": True}),
    ((1, 1, 8), torch.float32, {"size": 0}),
    ((1, 1, 0), torch.float32, {"size": 3}),
    ((1, 1, 8), torch.float32, {"scale_factor": 0.1}),
    ((1, 1, 8, 8), torch.float32, {"size": 4, "mode": "linear"}),
    ((1, 1, 8), torch.int64, {"size": 4}),
    ((1, 1, 8), torch.complex64, {"size": 4, "mode": "linear"}),
]


@pytest.mark.parametrize(("shape", "dtype", "settings"), BAD)
def test_bad_input_raises_what_torch_raises(
    run: Any, shape: Any, dtype: torch.dtype, settings: Any
) -> None:
    with pytest.raises(Exception) as caught:  # of whatever kind torch has
        torch.nn.Upsample(**settings)(torch.zeros(shape, dtype=dtype))
    results = run(error_of, shape, dtype, settings)
    assert {kind for kind, _ in results} == {caught.type}
    assert len(set(results)) == 1


def dense(field: Interpolation) -> torch.Tensor:
    """The matrix of an interpolation, (output, input)."""
    matrix = torch.zeros(field.outputs, field.inputs, dtype=torch.float64)
    rows = torch.arange(field.outputs)
    for index, weight in zip(*field.table, strict=True):
        matrix.index_put_(
            (rows, torch.tensor(index)), torch.tensor(weight, dtype=torch.float64), accumulate=True
        )
    return matrix


def not_finite() -> list[str]:
    """Cases in which values that are not finite come to other outputs than in one process."""
    P = tessel.world().create_cartesian_topology_partition((1, 1, 2, 2))
    rng = random.Random(0)
    wrong = []
    for number in range(repeats(60)):
        x = values((1, 2, rng.randint(4, 12), rng.randint(4, 12)), number)
        x.view(-1)[rng.randrange(x.numel())] = rng.choice([float("inf"), float("nan")])
        factor = (rng.choice(SCALES), rng.choice(SCALES))
        mode = rng.choice(MODES[2])
        corners = rng.choice([True, False]) if mode in INTERPOLATING else None
        alone = F.interpolate(x, scale_factor=factor, mode=mode, align_corners=corners)
        layer = DistributedUpsample(P, None, factor, mode, corners)
        y = layer(Layout.balanced(P, x.shape).local_part(x))
        expected = Layout.balanced(P, alone.shape).local_part(alone)
        if not torch.equal(y.isfinite(), expected.isfinite()):
            wrong.append(f"{tuple(x.shape)} {factor} {mode} {corners}")
    return wrong


@pytest.mark.slow
def test_values_that_are_not_finite_stay_where_torch_has_them(run: Any) -> None:
    assert run(not_finite) == [[]] * 4


def test_positions_on_accelerators_are_in_single_precision() -> None:
    for mode in ("nearest", "nearest-exact"):
        settings = interpolation.InterpolationSettings(None, 2.7, mode, None, None)
        (field,) = interpolation.interpolations(
            (1, 1, 9), (1, 1, 24), torch.float64, settings, False
        )
        exact = mode == "nearest-exact"
        assert field == Nearest(9, 24, 2.7, double=False, exact=exact, shortcut=exact)


RULES = [
    (Nearest, {"mode": "nearest"}),
    (partial(Nearest, exact=True), {"mode": "nearest-exact"}),
    (Linear, {"mode": "linear"}),
    (partial(Linear, align_corners=True), {"mode": "linear", "align_corners": True}),
    (Cubic, {"mode": "bicubic"}),
    (partial(Cubic, align_corners=True), {"mode": "bicubic", "align_corners": True}),
]


@pytest.mark.parametrize(("rule", "settings"), RULES)
def test_tables_are_torchs_matrices(rule: Any, settings: dict[str, Any]) -> None:
    for inputs in (1, 2, 3, 7, 30):
        for outputs in (1, 2, 3, 5, 14, 33, 60):
            field = rule(inputs, outputs)
            basis = torch.eye(inputs, dtype=torch.float64)[None]
            if settings["mode"] == "bicubic":
                expected = F.interpolate(basis[:, :, None], size=(1, outputs), **settings)[0, :, 0]
            else:
                expected = F.interpolate(basis, size=outputs, **settings)[0]
            torch.testing.assert_close(dense(field), expected.T, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("rule", "settings"), RULES)
def test_a_hull_holds_all_that_is_read_and_no_more(rule: Any, settings: Any) -> None:
    field = rule(17, 29)
    for start in range(29):
        for stop in range(start + 1, 30):
            taps = {int(i) for i in field.table[0][:, start:stop].flatten()}
            assert field.hull((start, stop)) == (min(taps), max(taps) + 1)
