"""The gradient of the input of a linear map travels while that of its weight is computed.

Tests `tensor/overlapped_linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tessel
from tessel import Move
from tessel.tensor import overlapped_linear
from tessel.tensor.rules import products


class Log(TorchDispatchMode):
    """Writes down products of matrices."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            self.events.append("product")
        return func(*args, **(kwargs or {}))


def events_of_backward(freezes: bool) -> list[str]:
    """What happens in the backward pass of a column layer, in order."""
    torch.manual_seed(0)
    layer = tessel.nn.ParallelLinear(6, 8, dim=-1).double()
    layer.weight.requires_grad_(not freezes)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    y = tessel.distributed.gather(layer(x))
    events: list[str] = []
    start = Move.start

    def logged(self: Move, tensor: Tensor) -> Callable[[], Tensor]:
        wait = start(self, tensor)
        if tensor.shape != (3, 6):  # of the gathering
            return wait
        events.append("starts")

        def landing() -> Tensor:
            events.append("waits")
            return wait()

        return landing

    Move.start = logged  # type: ignore[method-assign]
    try:
        with Log(events):
            y.square().sum().backward()
    finally:
        Move.start = start  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("freezes", [False, True])
def test_the_sum_travels_while_the_weight_is_derived(run: Any, nprocs: int, freezes: bool) -> None:
    middle = [] if freezes else ["product"]
    expected = ["product", "starts", *middle, "waits"]
    assert run(events_of_backward, freezes, nprocs=nprocs) == [expected] * nprocs


def ways(mode: str) -> tuple[bool, Tensor, Tensor]:
    """Whether a layer overlaps in some mode, and its gradients, which are the same in all."""
    torch.manual_seed(0)
    layer = tessel.nn.ParallelLinear(6, 8, dim=-1).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    used: list[bool] = []
    multiply = products.multiply_part

    def noted(*args: Any) -> Tensor:
        used.append(True)
        return multiply(*args)

    products.multiply_part = noted
    try:
        if mode == "forward mode":
            _, y = torch.func.jvp(lambda x: tessel.distributed.gather(layer(x)), (x,), (x,))
            return bool(used), y.detach(), y.detach()
        if mode == "recorded":
            x.requires_grad_()
            y = tessel.distributed.gather(layer(x))
            (slope,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
            second = torch.autograd.grad(slope.square().sum(), (x, layer.weight))
            return bool(used), second[0], second[1]
        with torch.no_grad():
            y = tessel.distributed.gather(layer(x))
        return bool(used), y, y
    finally:
        products.multiply_part = multiply


def alone() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 8).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    second = torch.autograd.grad(slope.square().sum(), (x, layer.weight))
    return layer(x).detach(), layer.bias.detach(), second[0], second[1]


@pytest.mark.parametrize(
    ("mode", "overlaps"), [("recorded", True), ("no gradient", False), ("forward mode", False)]
)
def test_other_modes_give_the_same(run: Any, mode: str, overlaps: bool) -> None:
    value, bias, of_x, of_weight = alone()
    for worker, (used, first, second) in enumerate(run(ways, mode, nprocs=2)):
        assert used is overlaps
        if mode == "recorded":
            torch.testing.assert_close(first, of_x, rtol=1e-11, atol=1e-11)
            mine = of_weight.chunk(2)[worker]
            torch.testing.assert_close(second, mine, rtol=1e-11, atol=1e-11)
        elif mode == "no gradient":
            torch.testing.assert_close(first, value, rtol=1e-12, atol=1e-12)
        else:
            torch.testing.assert_close(first, value - bias, rtol=1e-12, atol=1e-12)


def lost_marks(needs_grad: bool) -> list[str]:
    """What the loss says of logits whose sharding was lost, behind a layer that overlaps or not."""
    torch.manual_seed(0)
    layer = tessel.nn.ParallelLinear(4, 6, dim=-1)
    h = layer(torch.ones(3, 4).requires_grad_(needs_grad)).as_subclass(Tensor)
    texts = []
    for logits in (h, h * 2):
        with pytest.raises(ValueError, match="sharding was lost") as error:
            tessel.nn.ParallelCrossEntropyLoss()(logits, torch.tensor([0, 1, 2]))
        texts.append(str(error.value))
    return texts


@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_comes_of_a_column_layer_is_known_without_a_mark(run: Any, needs_grad: bool) -> None:
    """Each worker would take the loss of its own classes for that of all."""
    first, second = run(lost_marks, needs_grad, nprocs=2)
    assert first == second


def spread_products(shape: list[int], x_axes: Any, weight_axes: Any) -> tuple[bool, Tensor]:
    """Whether `F.linear` of spread tensors overlaps; its values and gradients are torch's."""
    grid = tessel.world().create_cartesian_topology_partition(shape)
    used: list[bool] = []
    multiply = products.multiply_part

    def noted(*args: Any) -> Tensor:
        used.append(True)
        return multiply(*args)

    torch.manual_seed(0)
    x, weight, bias = (torch.randn(n, dtype=torch.float64) for n in ((5, 2, 6), (7, 6), (7,)))
    whole = [each.requires_grad_() for each in (x, weight, bias)]
    expected = torch.nn.functional.linear(*whole)
    expected.pow(3).sum().backward()
    for with_bias in (True, False):
        axes = (x_axes, weight_axes, weight_axes[:1])
        spread = [
            tessel.spread(
                each.detach(),
                tessel.Layout.split(grid, each.shape, at, {0, 1} - {*at}),
            ).requires_grad_()
            for each, at in zip(whole, axes, strict=True)
        ]
        products.multiply_part = noted
        try:
            y = torch.nn.functional.linear(*spread[: 2 + with_bias])
        finally:
            products.multiply_part = multiply
        y = y if with_bias else y + spread[2]
        torch.testing.assert_close(y.full(), expected, rtol=1e-12, atol=1e-12)
        (slope,) = torch.autograd.grad(y.square().sum(), spread[0], create_graph=True)
        assert slope.layout == spread[0].layout
        y.pow(3).sum().backward()
        for each, other in zip(spread, whole, strict=True):
            assert each.grad is not None and other.grad is not None
            torch.testing.assert_close(each.grad.full(), other.grad, rtol=1e-11, atol=1e-11)
    return len(used) == 2, expected


@pytest.mark.parametrize(
    ("nprocs", "shape", "x_axes", "weight_axes", "overlaps"),
    [
        (3, [3, 1], (None, None, None), (0, None), True),
        (4, [2, 2], (0, None, None), (1, None), True),  # a batch in parts beside a weight in parts
        (4, [2, 2], (None, None, 0), (1, 0), False),  # a sum: it moves forward
        (2, [2, 1], (0, None, None), (0, None), False),  # both want the same axis
    ],
)
def test_spread_tensors_overlap_too(
    run: Any, nprocs: int, shape: list[int], x_axes: Any, weight_axes: Any, overlaps: bool
) -> None:
    for used, _ in run(spread_products, shape, x_axes, weight_axes, nprocs=nprocs):
        assert used is overlaps


def dtype_under_autocast() -> torch.dtype:
    P = tessel.world()
    x = tessel.spread(torch.ones(3, 6), tessel.Layout.split(P, (3, 6), (None, 0)))
    weight = tessel.spread(torch.ones(5, 6), tessel.Layout.split(P, (5, 6), (None, 0)))
    with torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.linear(x, weight, torch.ones(5)).dtype


def test_a_bias_keeps_the_dtype_of_an_autocast_region(run: Any) -> None:
    """What is added to a sum of terms made it float32 again."""
    assert run(dtype_under_autocast, nprocs=2) == [torch.bfloat16] * 2


def tangent_on_one(dim: int) -> tuple[Tensor, Tensor | None]:
    """Only the first worker computes a derivative forward; the others have no tangents."""
    torch.manual_seed(0)
    layer = tessel.nn.ParallelLinear(6, 4, dim=dim).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    if tessel.world().rank:
        return tessel.distributed.gather(layer(x), 1).detach() if dim else layer(x).detach(), None
    with torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(x, x))
        y = tessel.distributed.gather(y, 1) if dim else y
        value, tangent = torch.autograd.forward_ad.unpack_dual(y)
        assert tangent is not None
        return value.detach(), tangent.detach()


@pytest.mark.parametrize("dim", [0, 1])
def test_one_worker_may_derive_forward(run: Any, dim: int) -> None:
    (value, tangent), *others = run(tangent_on_one, dim, nprocs=3)
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 4).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(value, layer(x), rtol=1e-12, atol=1e-12)
    expected = x @ layer.weight.T
    # the tangents of the others are zeros: of a sum the first worker has one term, of the outputs
    # its own
    mine = expected * torch.tensor([1, 1, 0, 0]) if dim else x[:, :2] @ layer.weight[:, :2].T
    torch.testing.assert_close(tangent, mine, rtol=1e-12, atol=1e-12)
    for other, none in others:
        assert none is None
        torch.testing.assert_close(other, value, rtol=0, atol=0)


def penalty(way: str) -> Tensor:
    """The gradient, by the input, of a penalty on the gradient of the weight."""
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    if way == "shards":
        layer = tessel.nn.ParallelLinear(6, 8, dim=-1).double()
        y = tessel.distributed.gather(layer(x))
        (slope,) = torch.autograd.grad(y.pow(3).sum(), layer.weight, create_graph=True)
        loss = tessel.distributed.reduce(slope.square().sum())
    else:
        layer = torch.nn.Linear(6, 8).double()
        P = tessel.world()
        weight = tessel.spread(layer.weight, tessel.Layout.split(P, (8, 6), (0, None)))
        whole = tessel.spread(x, tessel.Layout.whole(P, (3, 6), shared=True))
        y = torch.nn.functional.linear(whole, weight, layer.bias)
        (slope,) = torch.autograd.grad(y.pow(3).sum(), weight, create_graph=True)
        loss = slope.square().sum()
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("way", ["shards", "spread"])
@pytest.mark.parametrize("nprocs", [1, 3])
def test_gradients_of_the_weight_can_be_derived(run: Any, nprocs: int, way: str) -> None:
    """What they are derived by the input was not summed over the workers."""
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    layer = torch.nn.Linear(6, 8).double()
    (slope,) = torch.autograd.grad(layer(x).pow(3).sum(), layer.weight, create_graph=True)
    slope.square().sum().backward()
    for got in run(penalty, way, nprocs=nprocs):
        torch.testing.assert_close(got, x.grad, rtol=1e-11, atol=1e-11)


def in_steps(bias: bool) -> tuple[int, list[Tensor], list[Tensor]]:
    """How many products took steps, and values and derivatives of a pair of layers and of torch."""
    torch.manual_seed(0)
    P = tessel.world()
    pair = torch.nn.Sequential(
        torch.nn.Linear(6, 4300, bias), torch.nn.Tanh(), torch.nn.Linear(4300, 2100, bias)
    ).double()
    column = tessel.nn.ParallelLinear(6, 4300, bias, dim=-1).double()
    row = tessel.nn.ParallelLinear(4300, 2100, bias, dim=0).double()
    at = lambda x, dim: x.tensor_split(P.size, dim)[P.rank or 0]  # noqa: E731
    with torch.no_grad():
        for layer, plain, dim in ((column, pair[0], 0), (row, pair[2], 1)):
            layer.weight.copy_(at(plain.weight, dim))
            if bias:
                layer.bias.copy_(at(plain.bias, 0) if dim == 0 else plain.bias)
    found, steps, times = [], [0], overlapped_linear.times

    def counted(*args: Any) -> Tensor:
        y = times(*args)
        few = torch.is_grad_enabled() or args[1].shape[1] < 2048
        steps[0] += not few
        return y

    overlapped_linear.times = counted
    try:
        for model in (lambda x: row(torch.tanh(column(x))), pair):
            x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 1, 6).requires_grad_()
            y = model(x)
            (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            (first.square().sum() + y.sum()).backward()
            found.append([y, first, x.grad])
    finally:
        overlapped_linear.times = times
    found[0] += [column.weight.grad.as_subclass(Tensor), row.weight.grad.as_subclass(Tensor)]
    found[1] += [at(pair[0].weight.grad, 0), at(pair[2].weight.grad, 1)]
    return steps[0], *([each.detach() for each in which] for which in found)


@pytest.mark.parametrize("bias", [True, False])
def test_large_products_with_few_rows_take_steps(run: Any, bias: bool) -> None:
    """Forward 2150 columns and 2100, backward the 2150 of the hidden features."""
    for steps, found, expected in run(in_steps, bias, nprocs=2):
        assert steps >= 3
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(3, 64), (64,), (1, 2, 64), (129, 64), (0, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_steps_give_what_torch_gives(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x, columns = torch.randn(shape), torch.randn(64, 2 * 1024 * torch.get_num_threads() + 7)
    added = torch.randn(columns.shape[1]) if bias else None
    with torch.no_grad():
        found = overlapped_linear.times(x, columns, added)
        turned = overlapped_linear.times(x, columns.t().contiguous().t(), added)
    expected = torch.nn.functional.linear(x, columns.t(), added)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(turned, expected)
