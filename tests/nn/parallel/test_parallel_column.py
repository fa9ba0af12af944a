"""The gradient of a column layer's input travels while that of its weight is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tessel
from tessel import Move
from tessel.nn.parallel import column


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
    multiply = column.multiply_overlapping

    def noted(*args: Any) -> Tensor:
        used.append(True)
        return multiply(*args)

    module = __import__("tessel.nn.parallel.linear", fromlist=["linear"])
    module.multiply_overlapping = noted
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
        module.multiply_overlapping = multiply


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
    """What the loss says of logits whose mark was lost, behind a layer that overlaps or not."""
    torch.manual_seed(0)
    layer = tessel.nn.ParallelLinear(4, 6, dim=-1)
    h = layer(torch.ones(3, 4).requires_grad_(needs_grad)).as_subclass(Tensor)
    texts = []
    for logits in (h, h * 2):
        with pytest.raises(ValueError, match="mark was lost") as error:
            tessel.nn.ParallelCrossEntropyLoss()(logits, torch.tensor([0, 1, 2]))
        texts.append(str(error.value))
    return texts


@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_comes_of_a_column_layer_is_known_without_a_mark(run: Any, needs_grad: bool) -> None:
    """Each worker would take the loss of its own classes for that of all."""
    first, second = run(lost_marks, needs_grad, nprocs=2)
    assert first == second
