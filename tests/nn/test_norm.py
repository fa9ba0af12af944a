"""Norms over a partition: parity with torch's own in one process.

Tests `nn/norm.py`, `tensor/rules/norms.py`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
import tessel
from covering import repeats
from parity import Case, close, values
from tessel import Layout
from tessel.nn import norm
from tessel.testing import count_traffic

GRIDS = {
    2: [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (3, 1), (1, 3)],
    3: [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1), (1, 4, 1), (1, 3, 1)],
    4: [(1, 1, 2, 2), (2, 1, 2, 1), (1, 2, 1, 2), (2, 2, 1, 1), (1, 1, 3, 1), (1, 4, 1, 1)],
    5: [(1, 1, 2, 1, 2), (2, 1, 1, 2, 1), (1, 2, 2, 1, 1)],
}


def layer_of(case: Case) -> torch.nn.Module:
    make = getattr(norm, f"Distributed{case.name}")
    return make(case.partition(), *case.args, **dict(case.settings)).double()


def pair(case: Case) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Torch's own layer and ours with the same random parameters and running statistics."""
    alone, spread = case.torch_layer(), layer_of(case)
    with torch.no_grad():
        for number, parameter in enumerate(alone.parameters()):
            parameter.copy_(values(parameter.shape, case.seed + number + 1))
    spread.load_state_dict(alone.state_dict())
    return alone, spread


def check_norm(case: Case, evaluate: bool = False) -> None:
    try:
        alone, spread = pair(case)
        if evaluate:
            alone.train(False), spread.train(False)
        check_layers(alone, spread, values(case.shape, case.seed), case.layout(), case.second)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


def check_layers(
    alone: torch.nn.Module,
    spread: torch.nn.Module,
    x: Tensor,
    layout: Layout,
    second: bool = True,
) -> None:
    """Outputs and gradients, and the running statistics after one pass."""
    parity.check_layers(alone, spread, x, layout, second)
    if layout.partition.active:
        check_buffers(alone, spread)


def check_buffers(alone: torch.nn.Module, spread: torch.nn.Module) -> None:
    for (name, a), (_, b) in zip(spread.named_buffers(), alone.named_buffers(), strict=True):
        close(name, a, b)


def check_norms(cases: list[Case], evaluate: bool = False) -> int:
    for case in cases:
        check_norm(case, evaluate)
    return len(cases)


def random_lengths(source: random.Random, grid: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Parts of any length, some of them empty."""
    lengths = []
    for parts, length in zip(grid, shape, strict=True):
        cuts = sorted(source.randint(0, length) for _ in range(parts - 1))
        lengths.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)))
    return tuple(lengths)


def random_place(source: random.Random, ndim: int, shape: tuple[int, ...]) -> dict[str, Any]:
    grid = source.choice(GRIDS[ndim])
    uneven = source.random() < 0.5
    return {
        "grid": grid,
        "shape": shape,
        "lengths": random_lengths(source, grid, shape) if uneven else None,
        "seed": source.randrange(1000),
    }


def random_shape(source: random.Random, ndim: int, channels: int) -> tuple[int, ...]:
    longest = 9 if ndim < 4 else 5
    return (source.randint(2, 5), channels, *(source.randint(2, longest) for _ in range(ndim - 2)))


def batch_case(source: random.Random) -> Case:
    dims = source.choice([1, 1, 2, 3])
    ndim = source.choice([2, 3]) if dims == 1 else dims + 2
    channels = source.randint(1, 6)
    settings = (
        ("eps", source.choice([1e-5, 0.1])),
        ("momentum", source.choice([0.1, None, 0.7])),
        ("affine", source.random() < 0.8),
        ("track_running_stats", source.random() < 0.8),
    )
    place = random_place(source, ndim, random_shape(source, ndim, channels))
    return Case(f"BatchNorm{dims}d", (channels,), settings=settings, **place)


def instance_case(source: random.Random) -> Case:
    dims = source.choice([1, 1, 2, 3])
    batched = source.random() < 0.8
    channels = source.randint(1, 6)
    shape = random_shape(source, dims + 2, channels)
    shape = shape if batched else shape[1:]
    settings = (
        ("eps", source.choice([1e-5, 0.1])),
        ("momentum", source.choice([0.1, 0.7])),
        ("affine", source.random() < 0.7),
        ("track_running_stats", source.random() < 0.5),
    )
    place = random_place(source, len(shape), shape)
    return Case(f"InstanceNorm{dims}d", (channels,), settings=settings, **place)


def group_case(source: random.Random) -> Case:
    ndim = source.choice([2, 3, 3, 4, 5])
    groups, size = source.choice([(1, 4), (2, 3), (3, 2), (4, 2), (5, 1), (2, 5)])
    if ndim == 2:
        size += 1  # one value alone has no variance
    shape = random_shape(source, ndim, groups * size)
    settings = (("eps", source.choice([1e-5, 0.1])), ("affine", source.random() < 0.7))
    place = random_place(source, ndim, shape)
    return Case("GroupNorm", (groups, groups * size), settings=settings, **place)


def row_case(source: random.Random) -> Case:
    ndim = source.choice([2, 3, 3, 4, 5])
    shape = random_shape(source, ndim, source.randint(2, 6))
    normalized = shape[-source.randint(1, ndim) :]
    affine = (("elementwise_affine", source.random() < 0.7),)
    place = random_place(source, ndim, shape)
    if source.random() < 0.3:
        eps = (("eps", source.choice([None, 0.1])),)
        return Case("RMSNorm", (normalized,), settings=affine + eps, **place)
    more = (("bias", source.random() < 0.7), ("eps", source.choice([1e-5, 0.1])))
    return Case("LayerNorm", (normalized,), settings=affine + more, **place)


MAKERS = {"batch": batch_case, "instance": instance_case, "group": group_case, "row": row_case}


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize("family", MAKERS)
def test_random_cases(run, nprocs, family):
    source = random.Random(f"norm {family}")
    cases = [MAKERS[family](source) for _ in range(repeats(60))]
    assert run(check_norms, cases, nprocs=nprocs, timeout=100) == [len(cases)] * nprocs


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize("family", ["batch", "instance"])
def test_random_cases_in_evaluation(run, nprocs, family):
    source = random.Random(f"evaluated norm {family}")
    cases = [MAKERS[family](source) for _ in range(repeats(20))]
    assert run(check_norms, cases, True, nprocs=nprocs, timeout=100) == [len(cases)] * nprocs


def train_and_evaluate(case: Case, any_dims: bool) -> None:
    """Three training steps on other data each, then evaluation."""
    alone, spread = pair(case)
    if any_dims:
        spread = norm.DistributedBatchNorm(
            case.partition(), *case.args, **dict(case.settings)
        ).double()
        spread.load_state_dict(alone.state_dict())
    layout = case.layout()
    for step in range(3):
        x = values(case.shape, step) * (step + 1) + step
        check_layers(alone, spread, x, layout)
    alone.eval(), spread.eval()
    with count_traffic() as traffic, torch.no_grad():
        x = values(case.shape, 7)
        out = layout.resized(x.shape)
        close("output", spread(layout.local_part(x)), out.local_part(alone(x)))
    has_running = alone.running_mean is not None
    assert traffic.messages == 0 or not has_running or out != layout
    check_layers(alone, spread, values(case.shape, 8), layout)


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
@pytest.mark.parametrize(
    "grid, shape",
    [((2, 1, 2), (4, 3, 10)), ((1, 4, 1), (4, 4, 10)), ((1, 2, 2), (7, 13, 11))],
)
def test_running_statistics_of_a_batch_norm(run, nprocs, grid, shape, momentum):
    case = Case("BatchNorm1d", (shape[1],), grid, shape, (("momentum", momentum),))
    run(train_and_evaluate, case, momentum == 0.1, nprocs=nprocs)


UNEVEN = [
    ("BatchNorm1d", (2, 2), (4, 3), ((4, 0), (1, 2))),
    ("BatchNorm1d", (1, 2, 2), (3, 3, 8), ((3,), (0, 3), (0, 8))),
    ("BatchNorm1d", (1, 4, 1), (3, 3, 8), ((3,), (1, 0, 2, 0), (8,))),
    ("BatchNorm2d", (2, 1, 1, 2), (3, 2, 4, 5), ((1, 2), (2,), (4,), (5, 0))),
    ("BatchNorm3d", (1, 1, 2, 2, 1), (2, 2, 3, 4, 3), ((2,), (2,), (0, 3), (1, 3), (3,))),
]


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize("name, grid, shape, lengths", UNEVEN)
def test_running_statistics_with_empty_parts(run, nprocs, name, grid, shape, lengths):
    case = Case(name, (shape[1],), grid, shape, (), lengths)
    run(train_and_evaluate, case, True, nprocs=nprocs)


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize("settings", [{"affine": False}, {"track_running_stats": False}])
def test_batch_norm_without(run, nprocs, settings):
    case = Case("BatchNorm2d", (3,), (1, 2, 1, 2), (2, 3, 4, 5), tuple(settings.items()))
    run(train_and_evaluate, case, False, nprocs=nprocs)


def train_instance_norm(case: Case) -> None:
    alone, spread = pair(case)
    for step in range(3):
        check_layers(alone, spread, values(case.shape, step) * (step + 1) + step, case.layout())
    alone.eval(), spread.eval()
    check_layers(alone, spread, values(case.shape, 8), case.layout())


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "grid, shape, lengths",
    [
        ((2, 1, 2), (3, 2, 6), ((1, 2), (2,), (6, 0))),
        ((4, 1, 1), (3, 2, 6), None),
        ((1, 2, 2), (3, 3, 7), None),
        ((2, 2), (3, 7), None),
    ],
)
def test_running_statistics_of_an_instance_norm(run, nprocs, momentum, grid, shape, lengths):
    settings = (("affine", True), ("track_running_stats", True), ("momentum", momentum))
    run(
        train_instance_norm,
        Case("InstanceNorm1d", (shape[-2],), grid, shape, settings, lengths),
        nprocs=nprocs,
    )


def check_any_instance_norm() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 2, 1, 2])
    alone = torch.nn.InstanceNorm2d(3, affine=True, track_running_stats=True).double()
    spread = norm.DistributedInstanceNorm(P, 3, affine=True, track_running_stats=True).double()
    x = values((2, 3, 4, 5), 0)
    check_layers(alone, spread, x, Layout.balanced(P, x.shape))
    six = tessel.world().create_cartesian_topology_partition([1, 1, 1, 2, 1, 2])
    x = values((2, 3, 2, 3, 2, 4), 0)
    folded = torch.nn.Sequential(
        torch.nn.Flatten(2), torch.nn.InstanceNorm1d(3), torch.nn.Unflatten(2, (2, 3, 2, 4))
    )
    check_layers(folded, norm.DistributedInstanceNorm(six, 3), x, Layout.balanced(six, x.shape))


@pytest.mark.parametrize("nprocs", [4])
def test_instance_norm_of_any_number_of_dimensions(run, nprocs):
    run(check_any_instance_norm, nprocs=nprocs)


def check_shared(name: str, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
    """Axis 1 holds copies of one value, axis 0 splits each of the dimensions in turn."""
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    x = values((4, 6, 5), 0)
    for dim in range(3):
        axes = [0 if each == dim else None for each in range(3)]
        layout = Layout.split(P, x.shape, axes, shared=[1])
        alone = getattr(torch.nn, name)(*args, **settings).double()
        spread = getattr(norm, f"Distributed{name}").from_torch(
            getattr(torch.nn, name)(*args, **settings).double(), P
        )

        def computed(part: Tensor, spread: Any = spread, layout: Layout = layout) -> Tensor:
            y, out = spread.compute(part, layout)
            assert out == layout
            return y

        computed.named_buffers, computed.parameters = spread.named_buffers, spread.parameters
        check_layers(alone, computed, x, layout)


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize(
    "name, args, settings",
    [
        ("BatchNorm1d", (6,), {}),
        ("InstanceNorm1d", (6,), {"affine": True, "track_running_stats": True}),
        ("GroupNorm", (2, 6), {}),
        ("GroupNorm", (3, 6), {}),
        ("LayerNorm", ((6, 5),), {}),
        ("RMSNorm", (5,), {}),
    ],
)
def test_tensors_that_are_shared_along_an_axis(run, nprocs, name, args, settings):
    run(check_shared, name, args, settings, nprocs=nprocs)


def separate_copies() -> str:
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    layer = norm.DistributedBatchNorm1d(P, 3)
    with pytest.raises(NotImplementedError) as caught:
        layer.compute(torch.ones(2, 3), Layout.split(P, (4, 3), [0, None]))
    return str(caught.value)


@pytest.mark.parametrize("nprocs", [4])
def test_separate_copies_are_refused(run, nprocs):
    assert len(set(run(separate_copies, nprocs=nprocs))) == 1


BAD = [
    ("BatchNorm1d", (4,), {}, (4, 3, 8), (1, 2, 2), RuntimeError, "should contain 3 elements"),
    ("BatchNorm1d", (3,), {}, (1, 3, 1), (1, 2, 2), ValueError, "more than 1 value per channel"),
    ("BatchNorm1d", (3,), {}, (1, 3, 2, 2), (1, 1, 2, 2), ValueError, "expected 2D or 3D input"),
    ("BatchNorm2d", (3,), {}, (2, 3, 8), (2, 1, 2), ValueError, "expected 4D input"),
    ("InstanceNorm1d", (3,), {}, (4, 3, 1), (2, 1, 2), ValueError, "more than 1 spatial element"),
    ("InstanceNorm1d", (3,), {"affine": True}, (4, 5, 8), (2, 1, 2), ValueError, "num_features"),
    ("GroupNorm", (2, 4), {}, (2, 6, 8), (1, 2, 2), RuntimeError, "weight"),
    ("GroupNorm", (2, 4), {}, (2, 5, 8), (1, 2, 2), RuntimeError, "divisible by num_groups"),
    ("GroupNorm", (4, 4), {}, (1, 4, 1), (1, 2, 2), ValueError, "more than 1 value per channel"),
    ("LayerNorm", (7,), {}, (2, 5, 8), (1, 2, 2), RuntimeError, "normalized_shape"),
    ("RMSNorm", (7,), {}, (2, 5, 8), (1, 2, 2), RuntimeError, "normalized_shape"),
]


def failure(
    name: str, args: Any, settings: Any, shape: Any, grid: Any, dtype: torch.dtype, training: bool
) -> tuple[type[Exception], str, dict[str, Any]]:
    P = tessel.world().create_cartesian_topology_partition(grid)
    layer = getattr(norm, f"Distributed{name}")(P, *args, **settings).train(training)
    x = Layout.balanced(P, shape).local_part(torch.ones(shape, dtype=dtype))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        layer(x)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize("name, args, settings, shape, grid, error, text", BAD)
def test_bad_input_raises_on_every_worker(
    run, nprocs, name, args, settings, shape, grid, error, text
):
    failures = run(failure, name, args, settings, shape, grid, torch.float32, True, nprocs=nprocs)
    assert len(set(failures)) == 1
    kind, message = failures[0]
    assert issubclass(kind, error) and text in message
    with pytest.raises(kind) as own:  # what torch says in one process
        getattr(torch.nn, name)(*args, **settings)(torch.ones(shape))
    assert str(own.value)[:40] == message[:40]  # shapes are written in two ways


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float64])
@pytest.mark.parametrize(
    "name, args", [("BatchNorm1d", (3,)), ("GroupNorm", (1, 3)), ("LayerNorm", (8,))]
)
def test_wrong_dtypes_raise_on_every_worker(run, nprocs, name, args, dtype, training):
    failures = run(failure, name, args, {}, (4, 3, 8), (2, 1, 2), dtype, training, nprocs=nprocs)
    assert len(set(failures)) == 1


def parameters_and_state(seed: int) -> Any:
    torch.manual_seed(seed + tessel.world().rank)
    P = tessel.world().create_cartesian_topology_partition([2, 1, 2])
    found = []
    for name, args, settings in STATES:
        layer = getattr(norm, f"Distributed{name}")(P, *args, **settings)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_()
        layer.equalize_parameters()
        state = layer.state_dict()
        own = getattr(torch.nn, name)(*args, **settings)
        expected = own.state_dict()
        assert [*state] == [*expected]
        assert all(state[key].shape == expected[key].shape for key in state)
        assert own.extra_repr() in layer.extra_repr()
        found.append([parameter.tolist() for parameter in layer.parameters()])
    return found


STATES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("BatchNorm1d", (3,), {}),
    ("BatchNorm2d", (3,), {"affine": False}),
    ("BatchNorm3d", (3,), {"track_running_stats": False}),
    ("InstanceNorm1d", (3,), {}),
    ("InstanceNorm2d", (3,), {"affine": True}),
    ("InstanceNorm3d", (3,), {"track_running_stats": True}),
    ("GroupNorm", (2, 4), {}),
    ("LayerNorm", ((4, 5),), {"bias": False}),
    ("LayerNorm", (4,), {"elementwise_affine": False}),
    ("RMSNorm", (4,), {}),
]


@pytest.mark.parametrize("nprocs", [4])
def test_parameters_are_equal_and_states_are_torchs(run, nprocs):
    found = run(parameters_and_state, 3, nprocs=nprocs)
    assert all(each == found[0] for each in found)


def convert_sync_batch_norm() -> None:
    P = tessel.world().create_cartesian_topology_partition([2, 1, 2])
    spread = norm.DistributedBatchNorm.from_torch(torch.nn.SyncBatchNorm(3).double(), P)
    alone = torch.nn.BatchNorm1d(3).double()
    x = values((4, 3, 5), 0)
    check_layers(alone, spread, x, Layout.balanced(P, x.shape))
    check_buffers(alone, spread)


@pytest.mark.parametrize("nprocs", [4])
def test_torchs_synchronised_batch_norm_is_converted(run, nprocs):
    run(convert_sync_batch_norm, nprocs=nprocs)


def traffic_of(case: Case) -> tuple[Any, ...]:
    """Messages and bytes of a forward and of a backward pass."""
    layer = layer_of(case).float()
    layout = case.layout()
    x = layout.local_part(values(case.shape, 0)).float().requires_grad_()
    layer(x)
    with count_traffic() as forward:
        y = layer(x)
    with count_traffic() as backward:
        y.sum().backward()
    return forward.messages, forward.bytes_sent, backward.messages, backward.bytes_sent


@pytest.mark.parametrize("nprocs", [2])
def test_a_batch_norm_in_training_is_one_exchange_each_way(run, nprocs):
    """Mean and variance of 8 channels go out, the gradients of weight and bias back."""
    case = Case("BatchNorm2d", (8,), (1, 1, 2, 1), (2, 8, 6, 6))
    assert run(traffic_of, case, nprocs=nprocs) == [(1, 64, 1, 64)] * 2


@pytest.mark.parametrize("nprocs", [2])
def test_a_batch_norm_with_split_channels_moves_running_statistics_only(run, nprocs):
    """Two running statistics of 4 channels go out, the gradients of all parameters back."""
    case = Case("BatchNorm2d", (8,), (1, 2, 1, 1), (2, 8, 6, 6))
    assert run(traffic_of, case, nprocs=nprocs) == [(1, 32, 1, 64)] * 2


@pytest.mark.parametrize("nprocs", [2])
@pytest.mark.parametrize(
    "name, args, grid, expected",
    [
        ("GroupNorm", (2, 4), (1, 2, 1), (0, 0, 1, 32)),
        ("GroupNorm", (4, 4), (1, 1, 2), (1, 96, 2, 128)),
        ("LayerNorm", (6,), (1, 2, 1), (0, 0, 1, 48)),
        ("LayerNorm", (6,), (1, 1, 2), (1, 96, 2, 144)),
        ("RMSNorm", (6,), (1, 1, 2), (1, 48, 2, 72)),
        ("InstanceNorm1d", (4,), (1, 2, 1), (0, 0, 0, 0)),
        ("InstanceNorm1d", (4,), (1, 1, 2), (1, 96, 1, 96)),
    ],
)
def test_only_moments_move(run, nprocs, name, args, grid, expected):
    assert run(traffic_of, Case(name, args, grid, (3, 4, 6)), nprocs=nprocs) == [expected] * 2


def statistics_of_shifted(dtype: torch.dtype, offset: float) -> float:
    """How far the running variance of values with a large mean is off."""
    P = tessel.world().create_cartesian_topology_partition([2, 1, 2])
    layer = norm.DistributedBatchNorm1d(P, 2, momentum=1.0)
    x = (values((8, 2, 64), 0) + offset).to(dtype)
    y = layer(Layout.balanced(P, x.shape).local_part(x))
    assert y.dtype == dtype
    exact = x.double().var((0, 2))
    return float(((layer.running_var - exact) / exact).abs().max())


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize(
    "dtype, offset", [(torch.float32, 1e3), (torch.bfloat16, 3.0), (torch.float16, 3.0)]
)
def test_statistics_do_not_cancel(run, nprocs, dtype, offset):
    """A sum of squares would be wrong by 6 % at the large mean, in float32."""
    assert max(run(statistics_of_shifted, dtype, offset, nprocs=nprocs)) < 1e-5


def check_half(name: str, args: tuple[Any, ...], dtype: torch.dtype, narrow: bool) -> None:
    """A part of the tensor in few bits is as near to the exact result as torch's own."""
    P = tessel.world().create_cartesian_topology_partition([1, 2, 2])
    own = getattr(torch.nn, name)(*args)
    own = own.to(dtype) if narrow else own
    spread = getattr(norm, f"Distributed{name}").from_torch(own, P)
    x = values((4, 6, 8), 0).to(dtype)
    layout = Layout.balanced(P, x.shape)
    part = layout.local_part(x).clone().requires_grad_()
    y = spread(part)
    y.float().square().sum().backward()
    exact = getattr(torch.nn, name)(*args)(x.float())
    assert y.dtype == part.grad.dtype == dtype
    close("output", y.float(), layout.local_part(exact), 1e-2)


@pytest.mark.parametrize("nprocs", [4])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name, args",
    [("BatchNorm1d", (6,)), ("GroupNorm", (2, 6)), ("LayerNorm", ((6, 8),)), ("RMSNorm", (8,))],
)
def test_few_bits(run, nprocs, name, args, dtype, narrow):
    run(check_half, name, args, dtype, narrow, nprocs=nprocs)


def check_empty() -> None:
    """A tensor without values, which torch takes."""
    P = tessel.world().create_cartesian_topology_partition([2, 2, 1])
    for name, args, settings in [*STATES[:1], *STATES[3:4], ("GroupNorm", (1, 3), {})]:
        alone, spread = (
            getattr(torch.nn, name)(*args, **settings),
            getattr(norm, f"Distributed{name}")(P, *args, **settings),
        )
        x = torch.empty(0, 3, 8)
        layout = Layout.balanced(P, x.shape)
        part = layout.local_part(x).requires_grad_()
        y = spread(part)
        y.sum().backward()
        alone(x)
        assert y.shape == layout.local_shape
        assert all(not parameter.grad.any() for parameter in spread.parameters())
        check_buffers(alone, spread)


@pytest.mark.parametrize("nprocs", [4])
def test_tensors_without_values(run, nprocs):
    run(check_empty, nprocs=nprocs)


def check_frozen_and_partial() -> None:
    """Parameters without gradient, an input that only one worker derives, channels last."""
    P = tessel.world().create_cartesian_topology_partition([2, 1, 2, 1])
    layer = norm.DistributedBatchNorm2d(P, 3).double()
    alone = torch.nn.BatchNorm2d(3).double()
    for each in (layer, alone):
        each.bias.requires_grad_(False)
    x = values((4, 3, 4, 5), 0)
    layout = Layout.balanced(P, x.shape)
    part = layout.local_part(x).contiguous(memory_format=torch.channels_last)
    part.requires_grad_(tessel.world().rank == 0)
    y = layer(part)
    assert y.is_contiguous(memory_format=torch.channels_last)
    whole = x.requires_grad_()
    weights = values(x.shape, 1)
    expected = alone(whole)
    (expected * weights).sum().backward()
    (y * layout.local_part(weights)).sum().backward()
    close("output", y, layout.local_part(expected))
    close("weight", layer.weight.grad, alone.weight.grad)
    assert layer.bias.grad is None
    if part.requires_grad:
        close("input", part.grad, layout.local_part(whole.grad))


@pytest.mark.parametrize("nprocs", [4])
def test_some_gradients_only(run, nprocs):
    run(check_frozen_and_partial, nprocs=nprocs)


def test_one_worker_runs_torchs_own():
    P = tessel.world().create_cartesian_topology_partition([1, 1, 1])
    for name, args, settings in [("BatchNorm1d", (4,), {}), *STATES[6:7], *STATES[9:]]:
        layer = getattr(norm, f"Distributed{name}")(P, *args, **settings)
        own = getattr(torch.nn, name)(*args, **settings)
        x = torch.randn(3, 4, 4)
        assert torch.equal(layer(x), own(x))
