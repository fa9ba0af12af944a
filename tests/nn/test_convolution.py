"""Convolutions over partitioned tensors give what torch's own give in one process.

Tests `nn/convolution.py`, `nn/blocks.py`, `nn/layer.py`, `tensor/rules/convolution.py`,
`tensor/windowed.py`.
"""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from parity import Case, check_case, check_cases, check_layers, close, values
from tessel import Layout
from tessel.tensor.rules.convolution import convolved, planned, settings_of
from tessel.testing import count_traffic
from windowed_cases import (
    BIG_PEER,
    PEERS,
    WIDE_PEER,
    WIDTH,
    GridCase,
    Place,
    Sent,
    check_against_file,
    check_grid_cases,
    check_state,
    compute_to_file,
    expected_traffic,
    measure,
    raised,
    random_cases,
    random_convolution,
    random_grid_cases,
    row,
)

Run = Callable[..., list[Any]]


def test_commonly_compared_cases_are_exact(run: Run) -> None:
    """Output, the gradients of input, weight and bias, and second order."""
    run(check_cases, [peer.convolution(4) for peer in PEERS], nprocs=4)


@pytest.mark.parametrize("nprocs", [18])
def test_a_grid_of_eighteen_workers_is_exact(run: Run, nprocs: int, tmp_path: Path) -> None:
    case = WIDE_PEER.convolution(2)
    run(check_against_file, case, compute_to_file(case, tmp_path), nprocs=nprocs, timeout=110)


@pytest.mark.slow
def test_a_tensor_of_many_channels_is_exact(run: Run, tmp_path: Path) -> None:
    case = BIG_PEER.convolution(1)
    run(check_against_file, case, compute_to_file(case, tmp_path), nprocs=4, timeout=100)


def crop() -> Any:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    layer = tessel.nn.DistributedConv1d(P, 2, 3, 3, padding=-1, padding_mode="circular")
    return raised(lambda: layer(torch.zeros(1, 2, 4)))


def test_negative_padding_that_crops_is_not_supported(run: Run) -> None:
    results = run(crop, nprocs=4)
    assert len(set(results)) == 1
    assert results[0][0] is NotImplementedError


SHORT = [
    row("Conv1d", (1, 1, 1), 2, 3, 5, padding=2),
    row("Conv1d", (3, 3, 3, 3), 2, 3, 9, padding=4),
    row("Conv1d", (2, 1, 1), 2, 3, 1, padding=1),
    row("Conv1d", (6, 2, 2), 2, 3, 3, padding=1),
    row("Conv1d", (2, 2, 6), 2, 3, 3, padding=1),
    row("Conv1d", (0, 5, 0, 5), 2, 3, 3, padding=1),
    row("Conv1d", (0, 0, 0, 1), 2, 3, 7, padding=3),
    row("Conv1d", (1, 1, 1), 2, 3, 5, padding=2, padding_mode="replicate"),
    row("Conv1d", (1, 1, 1), 2, 3, 5, padding=2, padding_mode="reflect"),
    row("Conv1d", (1, 1, 1), 2, 3, 5, padding=2, padding_mode="circular"),
    row("Conv1d", (1, 0, 1, 1), 2, 3, 7, padding=3, padding_mode="circular"),
    row("Conv1d", (4, 4, 4, 4), 2, 3, 4, padding="same"),
    row("Conv1d", (4, 4, 4, 4), 2, 3, 4, padding="same", padding_mode="circular"),
]


def test_halos_wider_than_a_neighbour_are_exact(run: Run) -> None:
    """Parts shorter than the halo, uneven and empty ones, padding wider than the window."""
    run(check_cases, SHORT, nprocs=4)


def atrous(sizes: tuple[int, ...], images: tuple[int, ...], **settings: Any) -> Case:
    """Quarters of images that are small beside what a kernel spans."""
    return Case("Conv2d", sizes, (1, 1, 2, 2), images, tuple(settings.items()))


ATROUS = [
    *(atrous((2, 3, 3), (1, 2, 2, 2), padding=n, dilation=n) for n in (1, 2, 12, 36)),
    *(atrous((2, 3, 3), (2, 2, 5, 9), padding=n, dilation=n) for n in (3, 4, 6, 12)),
    atrous((2, 4, (3, 5)), (1, 2, 7, 4), padding=(6, 20), dilation=(6, 10), stride=2, groups=2),
    atrous((2, 3, 4), (1, 2, 3, 6), padding="same", dilation=5),
    # some outputs read nothing, others see the image between two values of the kernel
    atrous((2, 3, 2), (1, 2, 2, 3), padding=9, dilation=7),
    atrous((2, 3, 2), (1, 2, 4, 4), padding=20, dilation=5, bias=False),
    Case("Conv3d", (2, 2, 3), (1, 1, 2, 1, 2), (1, 2, 2, 3, 5), (("padding", 4), ("dilation", 4))),
    row("Conv1d", (1, 1, 1, 1), 2, 3, 5, padding=12, dilation=6),
    row("Conv1d", (3, 0, 2, 1), 2, 3, 3, padding=12, dilation=12),
]


def test_kernels_that_reach_across_an_image_are_exact(run: Run) -> None:
    run(check_cases, ATROUS, nprocs=4)


def atrous_memory(dilation: int) -> int:
    """The most bytes of tensors at once, with the weight's gradient on its way."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    layer = torch.nn.Conv2d(4, 4, 3, padding=dilation, dilation=dilation).double()
    model = tessel.nn.distribute_module(layer, P)
    x = values((1, 4, 1, 1), 1)
    with tessel.testing.count_memory() as memory:
        model(x).sum().backward()
    return memory.peak


def test_padding_that_reaches_across_an_image_is_not_made(run: Run) -> None:
    """Of four pixels, one on each worker, only one value of a kernel meets each."""
    small = max(run(atrous_memory, 2, nprocs=4))
    for peak in run(atrous_memory, 36, nprocs=4):
        assert peak <= small  # 73² zeros of four channels would be 170 kB


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_convolutions_are_exact(run: Run, seed: int) -> None:
    """All padding modes, groups and depthwise, with and without a batch, any mixture of splits."""
    run(check_cases, random_cases(random_convolution, 150, 4, seed), nprocs=4, timeout=100)


@pytest.mark.parametrize("nprocs", [8, 12])
def test_random_convolutions_on_larger_grids_are_exact(run: Run, nprocs: int) -> None:
    cases = random_cases(random_convolution, 30, nprocs, nprocs)
    run(check_cases, cases, nprocs=nprocs, timeout=100)


BATCHLESS = [
    Case("Conv2d", (2, 3, 3), (1, 1, 2, 2), (0, 2, 6, 6), (("padding", 1),)),
    Case("Conv2d", (2, 3, 3), (4, 1, 1, 1), (0, 2, 6, 6), (("padding", 1),)),
    Case("Conv2d", (2, 3, 3), (4, 1, 1, 1), (2, 2, 6, 6), (("padding", 1),)),
    Case("Conv1d", (2, 3, 3), (1, 1, 4), (0, 2, 6), (("padding", 1),)),
]


def test_a_batch_of_nothing_is_exact(run: Run) -> None:
    run(check_cases, BATCHLESS, nprocs=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_weights_in_blocks_are_exact(run: Run, seed: int) -> None:
    """Input, output and weight on grids of their own, over equal, other and overlapping workers.

    The gradient of a block is the block of the gradient, and the state is whole on all workers.
    """
    run(check_grid_cases, random_grid_cases("Conv", 110, seed), nprocs=4, timeout=100)


FOUR = (0, 1, 2, 3)
BLOCKS = [
    # fewer channels than workers, of outputs and of inputs
    GridCase("Conv1d", (1, 5, 3), (2, 1, 9), Place(FOUR, (1, 1, 4)), None, Place(FOUR, (2, 2, 1))),
    GridCase("Conv1d", (5, 1, 3), (2, 5, 9), Place(FOUR, (1, 1, 4)), None, Place(FOUR, (4, 1, 1))),
    GridCase("Conv1d", (3, 3, 3), (2, 3, 9), Place(FOUR, (1, 1, 4)), None, Place(FOUR, (1, 4, 1))),
    # with an axis for the batch
    GridCase(
        "Conv1d", (3, 5, 3), (3, 3, 9), Place(FOUR, (2, 1, 2)), None, Place(FOUR, (2, 1, 2, 1))
    ),
    # everything split at once
    GridCase(
        "Conv2d",
        (5, 7, 3),
        (1, 5, 7, 8),
        Place(FOUR, (1, 2, 2, 1)),
        Place((3, 2, 1, 0), (1, 1, 2, 2)),
        Place(FOUR, (2, 1, 1, 2)),
        (("padding", 1),),
    ),
    GridCase(
        "Conv3d",
        (2, 3, 2),
        (1, 2, 4, 4, 4),
        Place(FOUR, (1, 1, 2, 1, 2)),
        Place((2,), (1, 1, 1, 1, 1)),
        Place((3, 0), (1, 2, 1, 1, 1)),
    ),
]


def test_chosen_grids_of_weights_are_exact(run: Run) -> None:
    run(check_grid_cases, BLOCKS, nprocs=4)


BIGGER = [
    GridCase(
        "Conv2d",
        (5, 7, 3),
        (2, 5, 7, 8),
        Place(tuple(range(8)), (1, 2, 2, 2)),
        None,
        Place(tuple(range(8)), (2, 2, 2, 1)),
        (("padding", 1),),
    ),
    GridCase(
        "Conv2d",
        (5, 7, 3),
        (2, 5, 7, 8),
        Place((0, 1), (1, 1, 2, 1)),
        Place((4, 5, 6), (3, 1, 1, 1)),
        Place(tuple(range(8)), (2, 2, 2, 1, 1)),
        (("stride", 2),),
    ),
]


@pytest.mark.parametrize("nprocs", [8])
def test_grids_of_eight_blocks_are_exact(run: Run, nprocs: int) -> None:
    run(check_grid_cases, BIGGER, nprocs=nprocs)


WHOLE_GROUPS = [
    GridCase(
        "Conv1d",
        (6, 6, 3),
        (2, 6, 9),
        Place(FOUR, (1, 2, 2)),
        None,
        Place((0, 1, 2), (3, 1, 1)),
        (("groups", 3), ("padding", 1)),
    ),
    GridCase(
        "Conv2d",
        (4, 8, 3),
        (1, 4, 6, 6),
        Place(FOUR, (1, 1, 2, 2)),
        Place((1, 3), (1, 2, 1, 1)),
        Place(FOUR, (2, 1, 2, 1)),
        (("groups", 4),),
    ),
]


def test_blocks_of_whole_groups_are_exact(run: Run) -> None:
    run(check_grid_cases, WHOLE_GROUPS, nprocs=4)


def make_grouped(grid: tuple[int, ...]) -> Any:
    P_x = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    P_w = tessel.world().create_cartesian_topology_partition(grid)
    return raised(lambda: tessel.nn.DistributedConv1d(P_x, 6, 6, 3, groups=3, P_w=P_w))


@pytest.mark.parametrize("grid", [(2, 2, 1), (1, 4, 1), (4, 1, 1)])
def test_blocks_of_parts_of_groups_are_rejected(run: Run, grid: tuple[int, ...]) -> None:
    results = run(make_grouped, grid, nprocs=4)
    assert len(set(results)) == 1
    assert results[0][0] is NotImplementedError


def make_on(grid: tuple[int, ...]) -> Any:
    P_x = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    P_w = tessel.world().create_cartesian_topology_partition(grid)
    return raised(lambda: tessel.nn.DistributedConv1d(P_x, 6, 6, 3, P_w=P_w))


@pytest.mark.parametrize("grid", [(2, 2), (2, 2, 1, 1, 1)])
def test_a_weight_grid_of_another_number_of_axes_is_rejected(
    run: Run, grid: tuple[int, ...]
) -> None:
    results = run(make_on, grid, nprocs=4)
    assert len(set(results)) == 1
    assert results[0][0] is ValueError


def convert_states() -> None:
    """States go from one worker to a grid and back, by way of a file."""
    P_x = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    P_w = tessel.world().create_cartesian_topology_partition([2, 2, 1, 1])
    torch.manual_seed(7)
    alone = torch.nn.Conv2d(3, 5, 3)
    for grid in (None, P_w):
        torch.manual_seed(50 + P_x.rank)
        layer = tessel.nn.DistributedConv2d(P_x, 3, 5, 3, P_w=grid)
        assert {name: value.shape for name, value in layer.state_dict().items()} == {
            name: value.shape for name, value in alone.state_dict().items()
        }
        file = io.BytesIO()
        torch.save(alone.state_dict(), file)
        file.seek(0)
        layer.load_state_dict(torch.load(file))
        check_state(layer, alone)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other = torch.nn.Conv2d(3, 5, 3)
        other.load_state_dict(torch.load(file))
        assert torch.equal(other.weight, alone.weight)


def test_states_are_those_of_torch(run: Run) -> None:
    run(convert_states, nprocs=4)


def load_by_assignment() -> None:
    """A block that torch assigns has memory of its own, and does not keep the whole weight."""
    P, P_w = (tessel.world().create_cartesian_topology_partition(g) for g in ([1, 1, 2], [2, 1, 1]))
    layer = tessel.nn.DistributedConv1d(P, 2, 4, 3, P_w=P_w)
    state = layer.state_dict()
    layer.load_state_dict(state, assign=True)
    assert layer.weight.untyped_storage().nbytes() == layer.weight.nbytes
    close("state", layer.state_dict()["weight"], state["weight"])


def test_a_block_that_is_assigned_does_not_keep_the_whole(run: Run) -> None:
    run(load_by_assignment, nprocs=2)


def load_wrong_state() -> Any:
    P_x = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    P_w = tessel.world().create_cartesian_topology_partition([2, 2, 1])
    layer = tessel.nn.DistributedConv1d(P_x, 3, 5, 3, P_w=P_w)
    state = torch.nn.Conv1d(3, 4, 3).state_dict()
    return raised(lambda: layer.load_state_dict(state))


def test_a_state_of_another_shape_is_rejected_on_every_worker(run: Run) -> None:
    assert [error[0] for error in run(load_wrong_state, nprocs=4)] == [RuntimeError] * 4


def train(P_w_grid: tuple[int, ...] | None, steps: int) -> list[Tensor]:
    """Parameters after some steps, begun from another seed on each worker."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    P_w = P_w_grid and tessel.world().create_cartesian_topology_partition(P_w_grid)
    torch.manual_seed(P.rank)
    layer = tessel.nn.DistributedConv2d(P, 3, 4, 3, padding=1, P_w=P_w).double()
    result = list(layer.state_dict().values())
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    layout = Layout.balanced(P, (2, 3, 7, 9))
    for step in range(steps):
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
    first, *others = run(train, grid, 3, nprocs=4)
    assert len(first) >= 4
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def train_like_torch() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    torch.manual_seed(0)
    alone = torch.nn.Conv2d(3, 4, 3, padding=1).double()
    layer = tessel.nn.DistributedConv2d(P, 3, 4, 3, padding=1).double()
    layer.load_state_dict(alone.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, momentum=0.9) for each in (alone, layer)]
    layout = Layout.balanced(P, (2, 3, 7, 9))
    for step in range(5):
        x = values(layout.shape, step)
        alone(x).square().sum().backward()
        layer(layout.local_part(x)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(layer.parameters(), alone.parameters(), strict=True):
        close("parameter", a, b)


def test_training_goes_as_in_one_process(run: Run) -> None:
    run(train_like_torch, nprocs=4)


def freeze(names: list[str], input_grad: bool) -> None:
    """Parameters that need no gradient get none, and the others are right."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    torch.manual_seed(0)
    alone = torch.nn.Conv1d(2, 3, 3, padding=1).double()
    layer = tessel.nn.DistributedConv1d(P, 2, 3, 3, padding=1).double()
    layer.load_state_dict(alone.state_dict())
    for each in (alone, layer):
        for name in names:
            getattr(each, name).requires_grad_(False)
    layout = Layout.balanced(P, (2, 2, 13))
    x = values(layout.shape, 0)
    whole = x.clone().requires_grad_(input_grad)
    part = layout.local_part(x).clone().requires_grad_(input_grad)
    y, z = alone(whole), layer(part)
    assert y.requires_grad == z.requires_grad
    if not y.requires_grad:
        return
    y.square().sum().backward()
    z.square().sum().backward()
    for a, b in zip(layer.parameters(), alone.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            close("gradient of a parameter", a.grad, b.grad)
    if input_grad:
        close("gradient of the input", part.grad, layout.local_part(whole.grad))


@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("names", [[], ["weight"], ["bias"], ["weight", "bias"]])
def test_frozen_parameters_get_no_gradient(run: Run, names: list[str], input_grad: bool) -> None:
    run(freeze, names, input_grad, nprocs=4)


def some_need_grad(needs: list[bool]) -> None:
    """Each worker has the gradients that it asked for, and all have those of the parameters."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    torch.manual_seed(0)
    alone = torch.nn.Conv1d(2, 3, 5, padding=2).double()
    layer = tessel.nn.DistributedConv1d(P, 2, 3, 5, padding=2).double()
    layer.load_state_dict(alone.state_dict())
    layout = Layout.balanced(P, (1, 2, 9))
    x = values(layout.shape, 0).requires_grad_()
    part = layout.local_part(x).detach().clone().requires_grad_(needs[P.rank])
    alone(x).square().sum().backward()
    layer(part).square().sum().backward()
    assert (part.grad is not None) == needs[P.rank]
    if part.grad is not None:
        close("gradient of the input", part.grad, layout.local_part(x.grad))
    for a, b in zip(layer.parameters(), alone.parameters(), strict=True):
        close("gradient of a parameter", a.grad, b.grad)


@pytest.mark.parametrize("needs", [[True, False, False, False], [False, True, True, False]])
def test_some_workers_may_need_no_gradient_of_their_input(run: Run, needs: list[bool]) -> None:
    run(some_need_grad, needs, nprocs=4)


PRECISIONS = {
    torch.float32: 1e-4,  # sums over up to 300 products, in another order
    torch.bfloat16: 0.1,
    torch.complex64: 1e-4,
    torch.complex128: 1e-12,
}


def convolve_in(dtype: torch.dtype, mode: str) -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    torch.manual_seed(0)
    settings = {"padding": 1, "padding_mode": mode, "dtype": dtype}
    alone = torch.nn.Conv2d(3, 4, 3, **settings)
    layer = tessel.nn.DistributedConv2d(P, 3, 4, 3, **settings)
    layer.load_state_dict(alone.state_dict())
    layout = Layout.balanced(P, (2, 3, 7, 9))
    x = values(layout.shape, 0).to(dtype)
    if dtype.is_complex:
        x = x + 1j * values(layout.shape, 1).to(dtype)
    whole = x.clone().requires_grad_()
    part = layout.local_part(x).clone().requires_grad_()
    y, z = alone(whole), layer(part)
    assert z.dtype == dtype
    out = layout.resized(y.shape)
    close("output", wide(z), wide(out.local_part(y)), PRECISIONS[dtype])
    y.abs().square().sum().backward()
    z.abs().square().sum().backward()
    close("input", wide(part.grad), wide(layout.local_part(whole.grad)), PRECISIONS[dtype])
    for a, b in zip(layer.parameters(), alone.parameters(), strict=True):
        close("parameter", wide(a.grad), wide(b.grad), PRECISIONS[dtype])


def wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_other_dtypes_are_convolved(run: Run, dtype: torch.dtype, mode: str) -> None:
    """To the rounding of the dtype, since sums over workers go in another order."""
    if dtype is torch.bfloat16 and mode != "zeros":
        pytest.skip("one mode is enough for a precision this low")
    run(convolve_in, dtype, mode, nprocs=4)


def attempt(
    args: tuple[Any, ...], settings: dict[str, Any], grid: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Any, Any, str]:
    """What torch's own layer and the layer over a grid raise on the same tensor."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    D = len(grid) - 2
    x = torch.zeros(shape)

    def over_grid() -> None:
        layer = getattr(tessel.nn, f"DistributedConv{D}d")(P, *args, **settings)
        layer(Layout.balanced(P, shape).local_part(x))

    alone = raised(lambda: getattr(torch.nn, f"Conv{D}d")(*args, **settings)(x))
    spread = raised(over_grid)
    return alone and alone[0], spread and spread[0], spread[1] if spread else ""


REJECTED = {
    "a window larger than the tensor": ((2, 3, 9), {}, (1, 2, 8)),
    "a window larger than the padded tensor": ((2, 3, 9), {"padding": 1}, (1, 2, 6)),
    "other channels": ((2, 3, 3), {}, (1, 3, 8)),
    "other channels of groups": ((4, 4, 3), {"groups": 2}, (1, 2, 8)),
    "mirrored padding as wide as the tensor": (
        (2, 3, 3),
        {"padding": 8, "padding_mode": "reflect"},
        (1, 2, 8),
    ),
    "circular padding wider than the tensor": (
        (2, 3, 3),
        {"padding": 9, "padding_mode": "circular"},
        (1, 2, 8),
    ),
    "groups that do not divide the channels": ((3, 4, 3), {"groups": 2}, (1, 3, 8)),
    "the same size with a stride": ((2, 3, 3), {"padding": "same", "stride": 2}, (1, 2, 8)),
    "a padding mode that does not exist": ((2, 3, 3), {"padding_mode": "none"}, (1, 2, 8)),
    "a negative padding": ((2, 3, 3), {"padding": -1}, (1, 2, 8)),
    "a stride of nothing": ((2, 3, 3), {"stride": 0}, (1, 2, 8)),
    "a dilation of nothing": ((2, 3, 3), {"dilation": 0}, (1, 2, 8)),
    "a window of nothing": ((2, 3, 0), {}, (1, 2, 8)),
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_torch_rejects_is_rejected_on_every_worker(run: Run, what: str) -> None:
    args, settings, shape = REJECTED[what]
    results = run(attempt, args, settings, (1, 1, 4), shape, nprocs=4)
    assert len(set(results)) == 1, results
    assert results[0][1] is not None and results[0][1] == results[0][0], results[0]


def wrong_parts(kind: str) -> Any:
    """Workers that bring what does not fit together, or are not in the same state."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    layer = tessel.nn.DistributedConv2d(P, 2, 3, 3, 1, 1)
    x = torch.zeros(1, 2, 4, 4)
    if kind == "axes":
        x = torch.zeros(2, 4, 4)
    elif P.rank == 3:
        if kind == "mode":
            layer.eval()
        elif kind == "frozen":
            layer.weight.requires_grad_(False)
        elif kind == "no_grad":
            with torch.no_grad():
                return raised(lambda: layer(x))
        else:
            x = {
                "lengths": torch.zeros(1, 2, 5, 4),
                "channels": torch.zeros(1, 3, 4, 4),
                "dtypes": x.double(),
                "dimensions": x[0],
            }[kind]
    else:
        x.requires_grad_(kind == "no_grad")
    return raised(lambda: layer(x))


KINDS = ["axes", "lengths", "channels", "dtypes", "dimensions", "mode", "frozen", "no_grad"]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_do_not_fit_raise_the_same_on_every_worker(run: Run, kind: str) -> None:
    """Parts that do not fit together, and layers that are not in the same state."""
    results = run(wrong_parts, kind, nprocs=4)
    assert len(set(results)) == 1, results
    assert results[0] is not None and results[0][0] is ValueError


def other_dtype_than_weight() -> Any:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 4])
    layer = tessel.nn.DistributedConv1d(P, 2, 3, 7)  # 2 outputs
    return raised(lambda: layer(torch.zeros(1, 2, 2, dtype=torch.float64)))


def test_a_dtype_that_is_not_the_weights_is_rejected_on_every_worker(run: Run) -> None:
    """Also on workers that have no output to compute."""
    errors = run(other_dtype_than_weight, nprocs=4)
    assert [error and error[0] for error in errors] == [RuntimeError] * 4


HALOS = [
    Case("Conv1d", (2, 3, 3), (1, 1, 4), (1, 2, 16), (("padding", 1),)),
    Case("Conv1d", (2, 3, 9), (1, 1, 4), (2, 2, 12), (("padding", 4),)),
    Case("Conv1d", (2, 3, 3), (1, 1, 4), (1, 2, 12), (("padding", 1),), ((1,), (2,), (6, 0, 4, 2))),
    Case("Conv2d", (2, 3, 3), (1, 1, 2, 2), (1, 2, 9, 11), (("padding", 1),)),
    Case("Conv2d", (2, 3, 5), (1, 1, 2, 2), (1, 2, 9, 11), (("padding", 2), ("stride", 2))),
    Case("Conv2d", (2, 3, 3), (1, 1, 4, 1), (2, 2, 13, 5), (("stride", 2),)),
    Case("Conv2d", (3, 4, 3), (1, 2, 2, 1), (1, 3, 7, 5), (("padding", 1),)),
    Case("Conv3d", (2, 3, 3), (1, 1, 2, 1, 2), (1, 2, 5, 5, 6), (("padding", 1),)),
]


def measure_all(cases: list[Case]) -> list[Sent]:
    return [measure(case) for case in cases]


def test_a_halo_is_the_least_that_can_be_sent(run: Run) -> None:
    """Each worker sends what others lack, in one message to each; gradients go the way back."""
    results = run(measure_all, HALOS, nprocs=4)
    for k, case in enumerate(HALOS):
        assert [result[k] for result in results] == expected_traffic(case), case


def measure_silent(cases: list[Case]) -> list[Sent]:
    return [measure(case, needs_grad=False) for case in cases]


def test_nothing_travels_back_when_nothing_needs_a_gradient(run: Run) -> None:
    for result in run(measure_silent, HALOS, nprocs=4):
        assert [each.backward for each in result] == [(0, 0)] * len(HALOS)


ALONE = [
    Case("Conv2d", (2, 3, 3), (4, 1, 1, 1), (4, 2, 9, 11), (("padding", 1),)),
    Case("Conv1d", (2, 3, 1), (1, 1, 4), (4, 2, 16)),
    Case("Conv1d", (2, 3, 2), (1, 1, 4), (4, 2, 16), (("stride", 2),)),
    Case("Conv1d", (4, 4, 1), (1, 4, 1), (4, 4, 5), (("groups", 4),)),
]


def test_windows_that_read_no_others_send_nothing(run: Run) -> None:
    for result in run(measure_all, ALONE, nprocs=4):
        assert result == [Sent((0, 0), (0, 0))] * len(ALONE)


def count_parameters_traffic(bias: bool) -> tuple[int, int, int]:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    layer = tessel.nn.DistributedConv2d(P, 4, 8, 3, padding=1, bias=bias).double()
    y = layer(values((1, 4, 6, 6), P.rank))
    with count_traffic() as traffic:
        y.sum().backward()
    return traffic.messages, traffic.bytes_sent, traffic.agreements


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_parameters_are_summed_by_the_least_traffic(run: Run, bias: bool) -> None:
    """Each parameter takes one reduce-scatter and one all-gather, and data needs no gradient.

    Of P workers each sends 2·(P − 1)/P times the parameter, in 2·(P − 1) messages.
    """
    sizes = [8 * 4 * 9, 8] if bias else [8 * 4 * 9]
    messages, sent = 2 * 3 * len(sizes), sum(2 * 3 * size // 4 * WIDTH for size in sizes)
    assert run(count_parameters_traffic, bias, nprocs=4) == [(messages, sent, 0)] * 4


def copied() -> None:
    """Copies of a layer, also those that went through a file, compute as it does."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    P_w = tessel.world().create_cartesian_topology_partition([2, 1, 2, 1])
    x = values((1, 2, 4, 4), P.rank)
    for grid in (None, P_w):
        layer = tessel.nn.DistributedConv2d(P, 2, 3, 3, padding=1, P_w=grid).double()
        expected = layer(x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(x), expected)
            assert repr(other) == repr(layer)
            other(x).sum().backward()
            assert layer.weight.grad is None and other.weight.grad is not None
            check_state(other, layer)


def test_a_layer_can_be_copied_and_pickled(run: Run) -> None:
    run(copied, nprocs=4)


def change_attributes() -> None:
    """Torch reads attributes in each call: what is written between two calls counts."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2])
    layout = Layout.balanced(P, (1, 2, 12))
    for ours, theirs in (
        (tessel.nn.DistributedConv1d(P, 2, 3, 3, padding=1), torch.nn.Conv1d(2, 3, 3, padding=1)),
        (tessel.nn.DistributedConvTranspose1d(P, 2, 3, 3), torch.nn.ConvTranspose1d(2, 3, 3)),
    ):
        theirs.load_state_dict(ours.state_dict())
        for name, value in (("stride", (2,)), ("dilation", (2,)), ("padding", (2,))):
            check_layers(theirs.double(), ours.double(), values(layout.shape, 0), layout)
            setattr(ours, name, value)
            setattr(theirs, name, value)
        check_layers(theirs, ours, values(layout.shape, 0), layout)


def test_attributes_that_change_count_from_then_on(run: Run) -> None:
    run(change_attributes, nprocs=2)


def move_a_copy_elsewhere() -> None:
    """A copy has groups of its own workers, also where some take no part."""
    P_x, P_y, P_w = (Place(*each).partition() for each in PLACES)
    layer = tessel.nn.DistributedConv1d(P_x, 2, 3, 3, P_y=P_y, P_w=P_w).double()
    x = values((1, 2, 9), 0) if P_x.active else tessel.zero_volume_tensor(dtype=torch.float64)
    y = pickle.loads(pickle.dumps(layer))(x)
    assert tuple(y.shape) == ((1, 3, 7) if P_y.active else tuple(y.shape))


def give_a_large_result_away() -> None:
    """A part that is large enough for strips, and a worker that only gets a result."""
    world = tessel.world()
    P_x, P_y = (
        world.create_partition_inclusive(ranks).create_cartesian_topology_partition([1, 1, 2, 1])
        for ranks in ([0, 1], [1, 2])
    )
    torch.manual_seed(0)
    alone = torch.nn.Conv2d(4, 4, 3, padding=1).double()
    layer = tessel.nn.DistributedConv2d(P_x, 4, 4, 3, padding=1, P_y=P_y).double()
    layer.load_state_dict(alone.state_dict())
    x = values((1, 4, 256, 160), 0)
    source, target = Layout.balanced(P_x, x.shape), Layout.balanced(P_y, x.shape)
    part = source.local_part(x) if P_x.active else tessel.zero_volume_tensor(dtype=torch.float64)
    y = layer(part)
    expected = alone(x)
    if P_y.active:
        close("output", y, target.local_part(expected))
    y.square().sum().backward()
    expected.square().sum().backward()
    if P_x.active:
        close("weight", layer.weight.grad, alone.weight.grad, 1e-10)  # sums of 40960 products


def test_a_large_result_may_lie_elsewhere(run: Run) -> None:
    run(give_a_large_result_away, nprocs=3, timeout=30)


PLACES = [((1,), (1, 1, 1)), ((2,), (1, 1, 1)), ((1, 3), (2, 1, 1))]


def test_workers_outside_of_all_partitions_are_passed_by(run: Run) -> None:
    run(move_a_copy_elsewhere, nprocs=4)


def by_strides() -> None:
    """Views of any strides are taken, and the input stays as it was."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    layer = tessel.nn.DistributedConv2d(P, 2, 3, 3, padding=1).double()
    x = values((4, 2, 4, 2), P.rank).permute(3, 1, 0, 2)
    before = x.clone()
    close("output", layer(x), layer(before.contiguous()))
    assert torch.equal(x, before)
    flat = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(2, 2, 4, 4).requires_grad_()
    close("output", layer(flat), layer(flat.contiguous()))


def test_views_are_taken_and_inputs_are_left_alone(run: Run) -> None:
    run(by_strides, nprocs=4)


def in_a_row() -> None:
    """Two layers and an activation, as in one process."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 2])
    torch.manual_seed(1)
    alone = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1),
        torch.nn.Tanh(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(3, 2, 3, stride=2),
    ).double()
    spread = torch.nn.Sequential(
        tessel.nn.DistributedConv2d(P, 2, 3, 3, padding=1),
        torch.nn.Tanh(),
        tessel.nn.DistributedMaxPool2d(P, 2),
        tessel.nn.DistributedConv2d(P, 3, 2, 3, stride=2),
    ).double()
    spread.load_state_dict(alone.state_dict())
    layout = Layout.balanced(P, (2, 2, 11, 13))
    check_layers(alone, spread, values(layout.shape, 0), layout)


def test_layers_in_a_row_are_exact(run: Run) -> None:
    run(in_a_row, nprocs=4)


def test_one_worker_convolves_alone() -> None:
    for D, mode in ((1, "zeros"), (2, "circular"), (3, "replicate")):
        settings = (("padding", 1), ("padding_mode", mode))
        check_case(Case(f"Conv{D}d", (2, 3, 3), (1,) * (D + 2), (2, 2, *[5] * D), settings))


def test_states_have_the_keys_and_shapes_of_torch() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    for settings in ({}, {"bias": False}, {"groups": 2}, {"dtype": torch.float64}):
        layer = tessel.nn.DistributedConv2d(P, 4, 6, (3, 2), **settings)
        alone = torch.nn.Conv2d(4, 6, (3, 2), **settings)
        got, expected = (
            [(name, value.shape, value.dtype) for name, value in each.state_dict().items()]
            for each in (layer, alone)
        )
        assert got == expected


def convolve_a_sum() -> list[list[float]]:
    """What layers make of separate copies: they are one sum, to which the bias is added once."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2])
    x = tessel.from_local(torch.ones(1, 1, 4), Layout.whole(P, (1, 1, 4)))
    layer = tessel.nn.DistributedConv1d(P, 1, 1, 1)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.fill_(10)
    return [f(x).full().flatten().tolist() for f in (layer, tessel.nn.HaloRegion(layer))]


def test_separate_copies_are_summed_before(run: Run) -> None:
    assert run(convolve_a_sum, nprocs=2) == [[[12.0] * 4] * 2] * 2


def clear_beside(grid: tuple[int, ...], padding: tuple[int, int]) -> None:
    """What a worker reads, put into a room of NaNs: zeros beyond the border, and values inside."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    shape = (2, 1, 7, 5)
    whole = torch.arange(1.0, 71.0).view(shape)
    layout = Layout.balanced(P, shape)
    settings = settings_of((1, 1, 3, 3), padding=padding)
    target = layout.resized(convolved(shape, settings))
    windowed = planned(layout, target, settings.channels, settings).windowed
    (stage,), read = windowed.move.stages, windowed.read
    y = stage(layout.local_part(whole), torch.full(read.local_shape, math.nan))
    first = [windowed.source.cuts[dim].intervals[0][0] for dim in range(4)]
    wide = torch.nn.functional.pad(whole, [8] * 4)
    box = read.box()
    assert box is not None
    at = [(a - f + p, b - f + p) for (a, b), f, p in zip(box, first, (0, 0, 8, 8), strict=True)]
    assert torch.equal(y, wide[tuple(slice(*each) for each in at)])


@pytest.mark.parametrize("grid", [(1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2), (1, 1, 4, 1)])
@pytest.mark.parametrize("padding", [(1, 1), (2, 0)])
def test_what_lies_beyond_the_border_is_zero(run: Run, grid: Any, padding: Any) -> None:
    run(clear_beside, grid, padding, nprocs=math.prod(grid))


class Standardized(torch.nn.Conv2d):
    """A convolution with a function of its weight, in the method that torch's own calls."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, (weight - weight.mean()) / weight.std(), bias)


class SpreadStandardized(tessel.nn.DistributedConv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, (weight - weight.mean()) / weight.std(), bias)


def check_standardized(grid: Any, padding_mode: str) -> None:
    P, x = tessel.world().create_cartesian_topology_partition(grid), values((3, 2, 9, 8), 1)
    settings: dict[str, Any] = {"padding": 1, "padding_mode": padding_mode}
    torch.manual_seed(0)
    alone = Standardized(2, 4, 3, **settings).double()
    spread = SpreadStandardized(P, 2, 4, 3, **settings).double()
    spread.load_state_dict(alone.state_dict())
    check_layers(alone, spread, x, Layout.balanced(P, x.shape))
    blocks = SpreadStandardized(
        P, 2, 4, 3, P_w=tessel.world().create_cartesian_topology_partition([2, 1, 1, 1]), **settings
    )
    with pytest.raises(NotImplementedError, match="leave P_w out"):
        blocks(torch.ones(3, 2, 9, 8))


@pytest.mark.parametrize("grid", [(1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)])
@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_products_of_subclasses_are_called(run: Run, grid: Any, padding_mode: str) -> None:
    run(check_standardized, grid, padding_mode, nprocs=2)


def test_subclasses_take_arguments_of_their_own() -> None:
    class Square(tessel.nn.DistributedConv2d):
        def __init__(self, P_x: tessel.Partition, channels: int, size: int = 3) -> None:
            super().__init__(P_x, channels, channels, size, padding=size // 2)

    class Named(tessel.nn.DistributedConv2d):
        pass

    assert [*inspect.signature(Square).parameters] == ["P_x", "channels", "size"]
    assert inspect.signature(Named) == inspect.signature(tessel.nn.DistributedConv2d)
    P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    layer = torch.nn.utils.parametrizations.weight_norm(Square(P, 2))
    x = torch.ones(1, 2, 5, 5)
    found = copy.deepcopy(layer)
    assert torch.equal(found(x), layer(x)) and found.handle != layer.handle


def derive_twice(padding_mode: str) -> None:
    """Second derivatives where the only sample is on the first worker."""
    P = tessel.world().create_cartesian_topology_partition([tessel.world().size, 1, 1])
    layout = Layout.balanced(P, (1, 4, 6))
    X = values((1, 4, 6), 1).requires_grad_()
    settings: Any = {"padding": 1, "padding_mode": padding_mode, "dtype": torch.float64}
    conv = tessel.nn.DistributedConv1d(P, 4, 2, 3, **settings)
    one = torch.nn.Conv1d(4, 2, 3, **settings)
    one.load_state_dict(conv.state_dict())
    x = layout.local_part(X.detach()).clone().requires_grad_()
    found = []
    for module, start in ((conv, x), (one, X)):
        (first,) = torch.autograd.grad(module(start).pow(3).sum(), start, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [start, module.weight]))
    (got, of_weight), (expected, of_whole) = found
    close("of the input", got, layout.local_part(expected), 1e-12)
    close("of the weight", of_weight, of_whole, 1e-12)


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_workers_without_samples_derive_twice(run: Run, padding_mode: str) -> None:
    run(derive_twice, padding_mode, nprocs=2)
