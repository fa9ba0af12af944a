"""Transposed convolutions over partitioned tensors give what torch's own give in one process.

Tests `nn/conv_transpose.py`, `tensor/rules/transposed.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from parity import Case, check_case, check_cases, check_layers, close, values
from tessel import Layout
from tessel.testing import count_traffic
from windowed_cases import (
    PEERS,
    GridCase,
    Place,
    check_grid_cases,
    check_state,
    raised,
    random_cases,
    random_grid_cases,
    random_transposed,
    row,
)

Run = Callable[..., list[Any]]
FOUR = (0, 1, 2, 3)


def transposed(case: Case) -> Case:
    """The transposed convolution with the settings of a convolution."""
    return Case(f"ConvTranspose{case.name[-2:]}", case.args, case.grid, case.shape, case.settings)


def test_commonly_compared_cases_are_exact(run: Run) -> None:
    run(check_cases, [transposed(peer.convolution(4)) for peer in PEERS], nprocs=4)


SHORT = [
    row("ConvTranspose1d", (1, 1, 1), 2, 3, 5, padding=2),
    row("ConvTranspose1d", (3, 3, 3, 3), 2, 3, 9, padding=4),
    row("ConvTranspose1d", (3, 3, 3, 3), 2, 3, 1, padding=1),
    row("ConvTranspose1d", (6, 2, 2), 2, 3, 3, padding=1),
    row("ConvTranspose1d", (2, 2, 6), 2, 3, 3, padding=1),
    row("ConvTranspose1d", (0, 5, 0, 5), 2, 3, 3, stride=2, output_padding=1),
    row("ConvTranspose1d", (0, 0, 0, 1), 2, 3, 7),
    row("ConvTranspose1d", (1, 0, 0, 0), 2, 3, 1),
    row("ConvTranspose1d", (1, 1, 1, 1), 2, 3, 1, stride=4),  # outputs that read no input
    row("ConvTranspose1d", (1, 1, 1, 1), 2, 3, 2, stride=4, output_padding=3),
    row("ConvTranspose1d", (2, 2, 2, 2), 2, 3, 2, stride=3, dilation=4, output_padding=3),
]


def test_short_and_empty_parts_are_exact(run: Run) -> None:
    run(check_cases, SHORT, nprocs=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_transposed_convolutions_are_exact(run: Run, seed: int) -> None:
    """Groups and depthwise, with and without a batch, output padding, any mixture of splits."""
    run(check_cases, random_cases(random_transposed, 130, 4, seed), nprocs=4, timeout=100)


@pytest.mark.parametrize("nprocs", [8, 12])
def test_random_transposed_convolutions_on_larger_grids_are_exact(run: Run, nprocs: int) -> None:
    cases = random_cases(random_transposed, 25, nprocs, nprocs)
    run(check_cases, cases, nprocs=nprocs, timeout=100)


class Sized(torch.nn.Module):
    """A layer whose output shall have a certain size."""

    def __init__(self, layer: torch.nn.Module, size: list[int]) -> None:
        super().__init__()
        self.layer, self.size = layer, size

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.size)


def check_sizes(cases: list[Case]) -> int:
    """Every size that torch accepts gives torch's result."""
    checked = 0
    for case in cases:
        D = int(case.name[-2])
        alone, spread = case.torch_layer(), case.layer()
        spread.load_state_dict(alone.state_dict())
        x = values(case.shape, case.seed)
        least = list(alone(x, None).shape[-D:])
        for more in range(3):
            sizes = [length + more for length in least]
            if raised(lambda sizes=sizes, alone=alone, x=x: alone(x, sizes)):
                continue
            layers = Sized(alone, sizes), Sized(spread, sizes)
            check_layers(*layers, x, case.layout(), second=False)
            checked += 1
    return checked


def random_without_output_padding(rng: Random, workers: int) -> Case:
    case = random_transposed(rng, workers)
    settings = tuple(each for each in case.settings if each[0] != "output_padding")
    return Case(case.name, case.args, case.grid, case.shape, settings, case.lengths, case.seed)


@pytest.mark.slow
def test_the_size_of_the_output_may_be_given(run: Run) -> None:
    cases = random_cases(random_without_output_padding, 50, 4, 31)
    assert min(run(check_sizes, cases, nprocs=4)) > len(cases)  # of some more than one


def give_wrong_size() -> tuple[Any, Any]:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    layer = tessel.nn.DistributedConvTranspose1d(P, 2, 3, 3, stride=2)
    alone = torch.nn.ConvTranspose1d(2, 3, 3, stride=2)
    expected = raised(lambda: alone(torch.zeros(1, 2, 8), [30]))
    return expected, raised(lambda: layer(torch.zeros(1, 2, 2), [30]))


def test_a_size_that_torch_rejects_is_rejected_on_every_worker(run: Run) -> None:
    for expected, got in run(give_wrong_size, nprocs=4):
        assert got is not None and got == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_weights_in_blocks_are_exact(run: Run, seed: int) -> None:
    """The gradient of a block is the block of the gradient; the state is whole on all workers."""
    run(check_grid_cases, random_grid_cases("ConvTranspose", 90, seed), nprocs=4, timeout=100)


BLOCKS = [
    GridCase(
        "ConvTranspose1d",
        (1, 5, 3),
        (2, 1, 9),
        Place(FOUR, (1, 1, 4)),
        None,
        Place(FOUR, (2, 2, 1)),
    ),
    GridCase(
        "ConvTranspose1d",
        (5, 1, 3),
        (2, 5, 9),
        Place(FOUR, (1, 1, 4)),
        None,
        Place(FOUR, (4, 1, 1)),
    ),
    GridCase(
        "ConvTranspose2d",
        (5, 7, 3),
        (3, 5, 4, 5),
        Place(FOUR, (1, 2, 2, 1)),
        Place((3, 2, 1, 0), (1, 1, 2, 2)),
        Place(FOUR, (2, 1, 2, 1, 1)),
        (("stride", 2), ("padding", 1), ("output_padding", 1)),
    ),
]


def test_chosen_grids_of_weights_are_exact(run: Run) -> None:
    """Fewer channels than workers, and an axis for the batch."""
    run(check_grid_cases, BLOCKS, nprocs=4)


def make_grouped() -> Any:
    P_x = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    P_w = tessel.world().create_cartesian_topology_partition([2, 2, 1])
    return raised(lambda: tessel.nn.DistributedConvTranspose1d(P_x, 4, 4, 3, groups=2, P_w=P_w))


def test_groups_on_a_grid_of_weights_are_rejected_on_every_worker(run: Run) -> None:
    results = run(make_grouped, nprocs=4)
    assert len(set(results)) == 1
    assert results[0][0] is NotImplementedError


def attempt(
    args: tuple[Any, ...], settings: dict[str, Any], shape: tuple[int, ...]
) -> tuple[Any, Any, str]:
    """What torch's own layer and the layer over a grid raise on the same tensor."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    x = torch.zeros(shape)

    def over_grid() -> None:
        layer = tessel.nn.DistributedConvTranspose1d(P, *args, **settings)
        layer(Layout.balanced(P, shape).local_part(x))

    alone = raised(lambda: torch.nn.ConvTranspose1d(*args, **settings)(x))
    spread = raised(over_grid)
    return alone and alone[0], spread and spread[0], spread[1] if spread else ""


REJECTED = {
    "other channels": ((2, 3, 3), {}, (1, 3, 8)),
    "padding wider than the result": ((2, 3, 3), {"padding": 9}, (1, 2, 8)),
    "output padding as wide as the stride": ((2, 3, 3), {"output_padding": 1}, (1, 2, 8)),
    "groups that do not divide the channels": ((3, 4, 3), {"groups": 2}, (1, 3, 8)),
    "another padding mode": ((2, 3, 3), {"padding_mode": "reflect"}, (1, 2, 8)),
    "a negative padding": ((2, 3, 3), {"padding": -1}, (1, 2, 8)),
    "a negative output padding": ((2, 3, 3), {"output_padding": -1}, (1, 2, 8)),
    "a stride of nothing": ((2, 3, 3), {"stride": 0}, (1, 2, 8)),
    "a dilation of nothing": ((2, 3, 3), {"dilation": 0}, (1, 2, 8)),
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_torch_rejects_is_rejected_on_every_worker(run: Run, what: str) -> None:
    args, settings, shape = REJECTED[what]
    results = run(attempt, args, settings, shape, nprocs=4)
    assert len(set(results)) == 1, results
    assert results[0][1] is not None and results[0][1] == results[0][0], results[0]


def wrong_parts(kind: str) -> Any:
    """Workers that bring what does not fit together, or are not in the same state."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    layer = tessel.nn.DistributedConvTranspose2d(P, 2, 3, 3)
    x = torch.zeros(1, 2, 4, 4)
    if kind == "axes":
        x = torch.zeros(2, 4, 4)
    elif P.rank == 3:
        if kind == "frozen":
            layer.bias.requires_grad_(False)
        else:
            x = {
                "lengths": torch.zeros(1, 2, 5, 4),
                "dtypes": x.double(),
                "dimensions": x[0],
            }[kind]
    return raised(lambda: layer(x))


@pytest.mark.parametrize("kind", ["axes", "lengths", "dtypes", "dimensions", "frozen"])
def test_workers_that_do_not_fit_raise_the_same_on_every_worker(run: Run, kind: str) -> None:
    results = run(wrong_parts, kind, nprocs=4)
    assert len(set(results)) == 1, results
    assert results[0] is not None and results[0][0] is ValueError


def other_dtype_than_weight() -> Any:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    layer = tessel.nn.DistributedConvTranspose1d(P, 2, 3, 3, padding=3)
    part = Layout.balanced(P, (1, 2, 6)).local_part(torch.zeros(1, 2, 6, dtype=torch.float64))
    return raised(lambda: layer(part))


def test_a_dtype_that_is_not_the_weights_is_rejected_on_every_worker(run: Run) -> None:
    """Also on workers that have no output to compute."""
    errors = run(other_dtype_than_weight, nprocs=4)
    assert [error and error[0] for error in errors] == [RuntimeError] * 4


def transposed_in(dtype: torch.dtype) -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    torch.manual_seed(0)
    alone = torch.nn.ConvTranspose2d(3, 4, 3, stride=2, dtype=dtype)
    layer = tessel.nn.DistributedConvTranspose2d(P, 3, 4, 3, stride=2, dtype=dtype)
    layer.load_state_dict(alone.state_dict())
    layout = Layout.balanced(P, (2, 3, 5, 4))
    x = values(layout.shape, 0).to(dtype)
    if dtype.is_complex:
        x = x + 1j * values(layout.shape, 1).to(dtype)
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).clone().requires_grad_()
    y, z = alone(whole), layer(part)
    assert z.dtype == dtype
    tolerance = 1e-12 if dtype is torch.complex128 else 1e-4  # sums go in another order
    close("output", z, layout.resized(y.shape).local_part(y), tolerance)
    y.abs().square().sum().backward()
    z.abs().square().sum().backward()
    close("input", part.grad, layout.local_part(whole.grad), tolerance)
    for a, b in zip(layer.parameters(), alone.parameters(), strict=True):
        close("parameter", a.grad, b.grad, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
def test_other_dtypes_are_convolved(run: Run, dtype: torch.dtype) -> None:
    run(transposed_in, dtype, nprocs=4)


def train(P_w_grid: tuple[int, ...] | None) -> list[Tensor]:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    P_w = P_w_grid and tessel.world().create_cartesian_topology_partition(P_w_grid)
    torch.manual_seed(P.rank)
    layer = tessel.nn.DistributedConvTranspose2d(P, 3, 4, 3, P_w=P_w).double()
    result = list(layer.state_dict().values())
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    layout = Layout.balanced(P, (2, 3, 5, 7))
    for step in range(3):
        optimizer.zero_grad()
        layer(layout.local_part(values(layout.shape, step))).square().sum().backward()
        if P_w is None:
            result += [each.grad.clone() for each in layer.parameters()]
        optimizer.step()
    return [*result, *layer.state_dict().values()]


@pytest.mark.parametrize("grid", [None, (2, 2, 1, 1)])
def test_parameters_and_gradients_are_equal_on_all_workers(
    run: Run, grid: tuple[int, ...] | None
) -> None:
    """To the last bit, whatever each worker's seed is, and after steps of an optimizer."""
    first, *others = run(train, grid, nprocs=4)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def count_halo(stride: int) -> tuple[int, int]:
    """Messages and bytes that a worker sends forward."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    layer = tessel.nn.DistributedConvTranspose1d(P, 2, 3, 2, stride=stride).double()
    layer.requires_grad_(False)
    x = values((1, 2, 4), P.rank)
    with count_traffic() as traffic:
        y = layer(x)
    assert not y.requires_grad
    return traffic.messages, traffic.bytes_sent


def test_upsampling_without_overlap_sends_nothing(run: Run) -> None:
    """A kernel as wide as the stride writes each output once, on the worker that has the input."""
    assert run(count_halo, 2, nprocs=4) == [(0, 0)] * 4


def test_an_overlap_is_one_message_to_a_neighbour(run: Run) -> None:
    """Of 16 inputs come 17 outputs in parts of 5, 4, 4, 4, and output i reads inputs i − 1 and i.

    So each worker but the last reads its own part and the first value of the next one.
    """
    nothing, both_channels = (0, 0), (1, 2 * 8)
    assert run(count_halo, 1, nprocs=4) == [nothing, *[both_channels] * 3]


def copied() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    P_w = tessel.world().create_cartesian_topology_partition([2, 1, 2, 1])
    x = values((1, 2, 4, 4), P.rank)
    for grid in (None, P_w):
        layer = tessel.nn.DistributedConvTranspose2d(P, 2, 3, 3, P_w=grid).double()
        expected = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(x), expected)
            assert torch.equal(other(x, list(expected_size(expected))), expected)
            check_state(other, layer)


def expected_size(y: Tensor) -> tuple[int, int]:
    """The size of the whole, of which each of 2×2 workers has an even part."""
    return 2 * y.shape[-2], 2 * y.shape[-1]


def test_a_layer_can_be_copied_and_pickled(run: Run) -> None:
    run(copied, nprocs=4)


def adjoint_of_convolution() -> None:
    """⟨A x, y⟩ = ⟨x, Aᵀ y⟩ for a convolution A and the transposed one with its weight."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    settings = {"stride": 2, "padding": 1, "bias": False}
    forward = tessel.nn.DistributedConv2d(P, 3, 4, 3, **settings).double()
    back = tessel.nn.DistributedConvTranspose2d(P, 4, 3, 3, **settings).double()
    back.load_state_dict(forward.state_dict())
    inputs = Layout.balanced(P, (1, 3, 9, 7))
    outputs = Layout.balanced(P, (1, 4, 5, 4))
    x = inputs.local_part(values(inputs.shape, 0))
    y = outputs.local_part(values(outputs.shape, 1))
    left, right = outputs.inner(forward(x), y), inputs.inner(x, back(y))
    close("inner product", left, right)


def test_it_is_the_adjoint_of_the_convolution(run: Run) -> None:
    run(adjoint_of_convolution, nprocs=4)


def test_one_worker_convolves_alone() -> None:
    for D in (1, 2, 3):
        settings = (("padding", 1), ("stride", 2), ("output_padding", 1))
        check_case(
            Case(f"ConvTranspose{D}d", (2, 3, 3), (1,) * (D + 2), (2, 2, *[5] * D), settings)
        )


def test_states_have_the_keys_and_shapes_of_torch() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    for settings in ({}, {"bias": False}, {"groups": 2}, {"dtype": torch.float64}):
        layer = tessel.nn.DistributedConvTranspose2d(P, 4, 6, (3, 2), **settings)
        alone = torch.nn.ConvTranspose2d(4, 6, (3, 2), **settings)
        got, expected = (
            [(name, value.shape, value.dtype) for name, value in each.state_dict().items()]
            for each in (layer, alone)
        )
        assert got == expected
