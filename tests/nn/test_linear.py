"""Linear layers over partitioned tensors give what torch's own give in one process.

Tests `nn/linear.py`, `nn/blocks.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from covering import repeats
from parity import check_layers, close, values
from tessel import Layout
from tessel.testing import count_traffic
from windowed_cases import (
    WIDTH,
    GridCase,
    Place,
    check_grid_cases,
    check_state,
    raised,
    random_grid,
    random_grid_cases,
    random_lengths,
)

Run = Callable[..., list[Any]]
FOUR = (0, 1, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_layers_are_exact(run: Run, seed: int) -> None:
    """Weights in blocks or whole, over equal, other and overlapping workers.

    The gradient of a block is the block of the gradient, and the state is whole on all workers.
    """
    run(check_grid_cases, random_grid_cases("Linear", 150, seed), nprocs=4, timeout=100)


BLOCKS = [
    # fewer features than workers
    GridCase("Linear", (1, 9), (5, 1), Place(FOUR, (4, 1)), None, Place(FOUR, (2, 2))),
    GridCase("Linear", (9, 1), (5, 9), Place(FOUR, (1, 4)), None, Place(FOUR, (4, 1))),
    GridCase("Linear", (3, 3), (5, 3), Place(FOUR, (1, 4)), None, Place(FOUR, (1, 4))),
    # an axis for the rows
    GridCase("Linear", (7, 5), (3, 7), Place(FOUR, (2, 2)), None, Place(FOUR, (2, 1, 2))),
    GridCase("Linear", (7, 5), (2, 3, 7), Place(FOUR, (1, 2, 2)), None, Place(FOUR, (2, 1, 1, 2))),
    # no worker has two of input, output and weight
    GridCase(
        "Linear", (7, 5), (3, 7), Place((0,), (1, 1)), Place((1,), (1, 1)), Place((2, 3), (1, 2))
    ),
    # no rows at all
    GridCase("Linear", (7, 5), (0, 7), Place(FOUR, (2, 2)), None, Place(FOUR, (2, 2))),
    GridCase("Linear", (7, 5), (0, 7), Place(FOUR, (2, 2)), None, None),
]


def test_chosen_grids_are_exact(run: Run) -> None:
    run(check_grid_cases, BLOCKS, nprocs=4)


BIGGER = [
    GridCase(
        "Linear",
        (11, 13),
        (5, 11),
        Place(tuple(range(8)), (4, 2)),
        Place(tuple(range(7, -1, -1)), (2, 4)),
        Place(tuple(range(8)), (2, 2, 2)),
    ),
    GridCase(
        "Linear", (11, 13), (5, 11), Place((0, 1), (1, 2)), None, Place(tuple(range(8)), (4, 2))
    ),
]


@pytest.mark.parametrize("nprocs", [8])
def test_grids_of_eight_blocks_are_exact(run: Run, nprocs: int) -> None:
    run(check_grid_cases, BIGGER, nprocs=nprocs)


def check_uneven(seed: int, count: int) -> None:
    """Whole weights and parts of any lengths, also of second order."""
    rng = Random(seed)
    for _ in range(count):
        inputs, outputs = rng.randint(1, 9), rng.randint(1, 9)
        shape = (*(rng.randint(1, 6) for _ in range(rng.randint(0, 3))), inputs)
        grid = random_grid(rng, len(shape), 4)
        place = Place(FOUR[: prod(grid)], grid)
        layout = Layout.from_lengths(place.partition(), random_lengths(rng, shape, grid))
        torch.manual_seed(seed)
        bias = rng.random() < 0.7
        alone = torch.nn.Linear(inputs, outputs, bias).double()
        P = place.partition()
        layer = tessel.nn.DistributedLinear(P, None, None, inputs, outputs, bias).double()
        layer.load_state_dict(alone.state_dict())
        check_layers(alone, layer, values(shape, rng.randrange(99)), layout)


@pytest.mark.slow
def test_uneven_and_empty_parts_are_exact(run: Run) -> None:
    run(check_uneven, 3, repeats(100), nprocs=4)


def check_uneven_with_blocks(seed: int, count: int) -> None:
    """Weights in blocks, and inputs in parts of any lengths."""
    rng = Random(seed)
    for _ in range(count):
        inputs, outputs = rng.randint(1, 9), rng.randint(1, 9)
        shape = (rng.randint(1, 6), inputs)
        grid = random_grid(rng, 2, 4)
        P = Place(FOUR[: prod(grid)], grid).partition()
        P_w = Place(FOUR, rng.choice([(2, 2), (4, 1), (1, 4), (2, 1, 2)])).partition()
        layout = Layout.from_lengths(P, random_lengths(rng, shape, grid))
        x = values(shape, seed)
        torch.manual_seed(seed)
        alone = torch.nn.Linear(inputs, outputs).double()
        layer = tessel.nn.DistributedLinear(P, None, P_w, inputs, outputs).double()
        layer.load_state_dict(alone.state_dict())
        got, expected = layer(layout.local_part(x)), alone(x)
        if P.active:
            close("output", got, Layout.balanced(P, expected.shape).local_part(expected))


@pytest.mark.slow
def test_uneven_parts_meet_blocks(run: Run) -> None:
    run(check_uneven_with_blocks, 5, repeats(50), nprocs=4)


def train(w_grid: tuple[int, ...] | None) -> list[Tensor]:
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    P_w = w_grid and tessel.world().create_cartesian_topology_partition(w_grid)
    torch.manual_seed(P.rank)
    layer = tessel.nn.DistributedLinear(P, P, P_w, 5, 7).double()
    result = list(layer.state_dict().values())
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    layout = Layout.balanced(P, (6, 5))
    for step in range(3):
        optimizer.zero_grad()
        layer(layout.local_part(values(layout.shape, step))).square().sum().backward()
        if P_w is None:
            result += [each.grad.clone() for each in layer.parameters()]
        optimizer.step()
    return [*result, *layer.state_dict().values()]


@pytest.mark.parametrize("grid", [None, (2, 2), (2, 1, 2)])
def test_parameters_and_gradients_are_equal_on_all_workers(
    run: Run, grid: tuple[int, ...] | None
) -> None:
    """To the last bit, whatever each worker's seed is, and after steps of an optimizer."""
    first, *others = run(train, grid, nprocs=4)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def train_like_torch() -> None:
    """Two layers whose weights are in blocks, trained as in one process."""
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    torch.manual_seed(0)
    alone = torch.nn.Sequential(
        torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)
    ).double()
    spread = torch.nn.Sequential(
        tessel.nn.DistributedLinear(P, P, P, 5, 9),
        torch.nn.Tanh(),
        tessel.nn.DistributedLinear(P, P, P, 9, 3),
    ).double()
    spread.load_state_dict(alone.state_dict())
    optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in (alone, spread)]
    layout = Layout.balanced(P, (6, 5))
    for step in range(5):
        x = values(layout.shape, step)
        alone(x).square().sum().backward()
        spread(layout.local_part(x)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in spread.state_dict().items():
        close(name, value, alone.state_dict()[name], 1e-9)  # Adam divides by small numbers


def test_training_goes_as_in_one_process(run: Run) -> None:
    run(train_like_torch, nprocs=4)


def attempt(kind: str) -> Any:
    """What a layer raises when workers bring something wrong."""
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    layer = tessel.nn.DistributedLinear(P, P, P, 6, 4)
    x = torch.zeros(3, 3)
    if kind == "features":
        x = torch.zeros(3, 2)
    elif kind == "axes":
        x = torch.zeros(3, 2, 2)
    elif kind == "weight":
        x = x.double()
    elif kind == "grid":
        row = tessel.world()
        return raised(lambda: tessel.nn.DistributedLinear(P, P, row, 6, 4))
    elif P.rank == 3:
        if kind == "frozen":
            layer.weight.requires_grad_(False)
        else:
            x = {"lengths": torch.zeros(4, 3), "dtypes": x.double(), "dimensions": x[0]}[kind]
    return raised(lambda: layer(x))


ERRORS = {
    "features": RuntimeError,
    "weight": RuntimeError,
    "axes": ValueError,
    "grid": ValueError,
    "frozen": ValueError,
    "lengths": ValueError,
    "dtypes": ValueError,
    "dimensions": ValueError,
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_does_not_fit_raises_the_same_on_every_worker(run: Run, kind: str) -> None:
    """Other features and another dtype than the weight's as torch does, the rest as ValueError."""
    results = run(attempt, kind, nprocs=4)
    assert len(set(results)) == 1, results
    assert results[0] is not None and results[0][0] is ERRORS[kind]


def in_dtype(dtype: torch.dtype, blocks: bool) -> None:
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    torch.manual_seed(0)
    alone = torch.nn.Linear(6, 5, dtype=dtype)
    layer = tessel.nn.DistributedLinear(P, P, P if blocks else None, 6, 5, dtype=dtype)
    layer.load_state_dict(alone.state_dict())
    layout = Layout.balanced(P, (3, 6))
    x = values(layout.shape, 0).to(dtype)
    if dtype.is_complex:
        x = x + 1j * values(layout.shape, 1).to(dtype)
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).clone().requires_grad_()
    y, z = alone(whole), layer(part)
    assert z.dtype == dtype
    tolerance = {torch.complex128: 1e-12, torch.bfloat16: 0.05}.get(dtype, 1e-5)
    close("output", z, layout.resized(y.shape).local_part(y), tolerance)
    y.abs().square().sum().backward()
    z.abs().square().sum().backward()
    close("gradient of the input", part.grad, layout.local_part(whole.grad), tolerance)
    if not blocks:
        for a, b in zip(layer.parameters(), alone.parameters(), strict=True):
            close("gradient of a parameter", a.grad, b.grad, tolerance)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128]
)
def test_other_dtypes_are_multiplied(run: Run, dtype: torch.dtype, blocks: bool) -> None:
    """To the rounding of the dtype, since sums over workers go in another order."""
    run(in_dtype, dtype, blocks, nprocs=4)


def count_forward(blocks: bool) -> tuple[int, int]:
    """What a worker sends for a matrix of inputs that lies on the grid of the weight."""
    P = tessel.world().create_cartesian_topology_partition([1, 4])
    P_w = tessel.world().create_cartesian_topology_partition([1, 4])
    layer = tessel.nn.DistributedLinear(P, P, P_w if blocks else None, 8, 12).double()
    layer.requires_grad_(False)
    x = values((3, 2), P.rank)
    layer(x)
    with count_traffic() as traffic:
        layer(x)
    return traffic.messages, traffic.bytes_sent


def test_blocks_of_inputs_send_results_only(run: Run) -> None:
    """Each of 4 workers has its inputs, and gives 3 others their 3 of 12 outputs of 3 rows."""
    assert run(count_forward, True, nprocs=4) == [(3, 3 * 3 * 3 * WIDTH)] * 4


def test_a_whole_weight_sends_inputs_only(run: Run) -> None:
    """Each of 4 workers gives its 2 of 8 inputs of 3 rows to 3 others."""
    assert run(count_forward, False, nprocs=4) == [(3, 3 * 3 * 2 * WIDTH)] * 4


def count_rows() -> tuple[int, int]:
    P = tessel.world().create_cartesian_topology_partition([4, 1])
    layer = tessel.nn.DistributedLinear(P, None, None, 8, 12).double()
    with count_traffic() as traffic:
        y = layer(values((3, 8), P.rank))
    assert traffic.messages == 0
    with count_traffic() as traffic:
        y.sum().backward()
    return traffic.messages, traffic.bytes_sent


def test_rows_send_the_gradients_of_the_parameters_only(run: Run) -> None:
    """One reduce-scatter and one all-gather for each of the two."""
    sent = 2 * 3 * (8 * 12 + 12) // 4 * WIDTH
    assert run(count_rows, nprocs=4) == [(12, sent)] * 4


def copied() -> None:
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    x = values((3, 3), P.rank)
    for grid in (None, P):
        layer = tessel.nn.DistributedLinear(P, P, grid, 6, 5).double()
        expected = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(x), expected)
            assert repr(other) == repr(layer)
            check_state(other, layer)


def test_a_layer_can_be_copied_and_pickled(run: Run) -> None:
    run(copied, nprocs=4)


def with_an_infinite_bias() -> list[float]:
    """The outputs of a layer whose inputs lie in two blocks: the bias counts once."""
    P_x = tessel.world().create_cartesian_topology_partition([1, 2])
    layer = tessel.nn.DistributedLinear(P_x, P_x, P_x, 4, 2)
    assert layer.bias is not None
    with torch.no_grad():
        layer.bias.fill_(float("inf"))
    return layer(torch.ones(3, 2)).flatten().tolist()


def test_an_infinite_bias_is_added_once(run: Run) -> None:
    assert run(with_an_infinite_bias, nprocs=2) == [[float("inf")] * 3] * 2


def test_one_worker_multiplies_alone() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1])
    for P_w in (None, P):
        layer = tessel.nn.DistributedLinear(P, P, P_w, 3, 2)
        alone = torch.nn.Linear(3, 2)
        alone.load_state_dict(layer.state_dict())
        x = torch.randn(4, 3)
        assert torch.equal(layer(x), alone(x))
        assert [(k, v.shape) for k, v in layer.state_dict().items()] == [
            (k, v.shape) for k, v in alone.state_dict().items()
        ]


def save_on_other_workers() -> tuple[int, dict[str, Any]]:
    P_x = tessel.world().create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1])
    P_y = tessel.world().create_partition_inclusive([1]).create_cartesian_topology_partition([1, 1])
    torch.manual_seed(tessel.world().rank or 0)
    layer = tessel.nn.DistributedLinear(P_x, P_y, None, 3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    x = torch.ones(4, 3) if P_x.active else tessel.zero_volume_tensor()
    layer(x).sum().backward()
    optimizer.step()
    state = layer.state_dict()
    layer.load_state_dict(state)
    return layer.weight.numel(), {name: value.tolist() for name, value in state.items()}


def test_workers_that_only_get_the_result_store_no_parameters(run: Run) -> None:
    (first, trained), (second, collected) = run(save_on_other_workers, nprocs=2)
    assert (first, second) == (6, 0)
    assert trained == collected
