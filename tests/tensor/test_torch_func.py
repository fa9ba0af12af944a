"""Transforms of `torch.func` of spread tensors: one process's values, by the rules of the table.

Tests `tensor/aten.py`, `tensor/call.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessel
from parity import close, values
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]
Function = Callable[[Tensor], Tensor]
MATRIX, IMAGES = (6, 4), (4, 3, 6, 6)
TARGETS = torch.tensor([0, 2, 1, 3, 2, 1])


def w(*shape: int, seed: int = 9) -> Tensor:
    return values(shape, seed)


# functions whose gradients gather nothing, and lie as their tensor does
KEPT: dict[str, tuple[tuple[int, ...], Function]] = {
    "sums and products": (MATRIX, lambda x: ((x + x * 3) * x.sin()).sum()),
    "relu": (MATRIX, lambda x: F.relu(x).pow(2).mean()),
    "softmax of rows": (MATRIX, lambda x: (F.softmax(x, 1) * w(6, 4)).sum()),
    "softmax of columns": (MATRIX, lambda x: (F.softmax(x, 0) * w(6, 4)).sum()),
    "mean of squares": (MATRIX, lambda x: (x.square().mean(1) ** 3).sum()),
    "cat": (MATRIX, lambda x: torch.cat([x, x * 2]).pow(3).sum()),
    "stack": (MATRIX, lambda x: torch.stack([x, x * 2], 1).pow(3).sum()),
    "slices": (MATRIX, lambda x: x[1:5, ::2].pow(2).sum() + x[2].pow(3).sum() + (x * x).sum()),
    "transposed": (MATRIX, lambda x: x.T.pow(3).sum()),
    "cross entropy": (MATRIX, lambda x: F.cross_entropy(x, TARGETS)),
    "summed cross entropy": (
        MATRIX,
        lambda x: F.cross_entropy(x, TARGETS, reduction="sum", ignore_index=2),
    ),
    "weighted nll": (MATRIX, lambda x: F.nll_loss(F.log_softmax(x, 1), TARGETS, w(4).abs())),
    "mse": (MATRIX, lambda x: F.mse_loss(x, w(6, 4))),
    "huber": (MATRIX, lambda x: F.huber_loss(x, w(6, 4))),
    "layer norm": (MATRIX, lambda x: (F.layer_norm(x, (4,), w(4), w(4, seed=2)) ** 3).sum()),
    "cumsum": (MATRIX, lambda x: (x.cumsum(0) * x).sum()),
    "logsumexp": (MATRIX, lambda x: x.logsumexp(0).pow(2).sum()),
    "where": (MATRIX, lambda x: torch.where(x > 0, x * x, x).sum()),
    "conv": (IMAGES, lambda x: F.conv2d(x, w(5, 3, 3, 3), padding=1).pow(2).sum()),
    "strided conv": (IMAGES, lambda x: F.conv2d(x, w(5, 3, 3, 3), w(5), stride=2).pow(2).sum()),
    "max pool": (IMAGES, lambda x: F.max_pool2d(x, 2).pow(2).sum()),
    "average pool": (IMAGES, lambda x: F.avg_pool2d(x, 3, 2, 1).pow(2).sum()),
}
# functions that gather nothing, either; their gradients lie otherwise, or whole on every worker
OTHERWISE: dict[str, tuple[tuple[int, ...], Function]] = {
    "sum": (MATRIX, lambda x: x.sum()),
    "mean": (MATRIX, lambda x: x.mean() ** 2),
    "product with a constant": (MATRIX, lambda x: (x * w(6, 4)).sum()),
    "matrix product": (MATRIX, lambda x: (x @ w(4, 5)).pow(2).sum()),
    "linear": (MATRIX, lambda x: F.gelu(F.linear(x, w(5, 4), w(5))).pow(2).sum()),
    "reshape": (MATRIX, lambda x: x.reshape(4, 6).pow(3).sum()),
    "index tensor": (MATRIX, lambda x: x[torch.tensor([0, 0, 3])].pow(2).sum()),
    "gather": (MATRIX, lambda x: x.gather(1, TARGETS[:, None]).pow(2).sum()),
    "embedding": (MATRIX, lambda x: F.embedding(TARGETS, x).pow(2).sum()),
    "no indices": (MATRIX, lambda x: x[3:3].sum() + x.pow(2)[1:].sum()),
    "adaptive pool": (IMAGES, lambda x: F.adaptive_avg_pool2d(x, (2, 2)).pow(2).sum()),
}


def splits(shape: tuple[int, ...], seed: int = 1) -> list[Any]:
    """A tensor, split along each of its dimensions."""
    world = tessel.world()
    found = []
    for dim in range(len(shape)):
        grid = [world.size if each == dim else 1 for each in range(len(shape))]
        P = world.create_cartesian_topology_partition(grid)
        found.append(tessel.spread(values(shape, seed), P))
    return found


def whole(y: Any) -> Tensor:
    return y.full() if isinstance(y, tessel.Tensor) else y


def check_gradients(kept: bool) -> None:
    for name, (shape, function) in (KEPT if kept else OTHERWISE).items():
        x = values(shape, 1)
        expected = torch.func.grad(function)(x)
        tangent = torch.func.jvp(function, (x,), (x.cos(),))[1]
        for split in splits(shape):
            with tessel.fallback("raise"):
                y: Any = torch.func.grad(function)(split)
            close(name, whole(y), expected)
            if kept:
                assert y.layout.box() == split.layout.box(), (name, y.layout, split.layout)
            close(f"{name}, step", whole(split - 0.1 * y), x - 0.1 * expected)
            assert (split - 0.1 * y).layout.box() == split.layout.box(), name
            y, pull = torch.func.vjp(function, split)
            close(f"{name}, vjp", whole(pull(y)[0]), expected * whole(y))
            y = torch.func.jvp(function, (split,), (split.cos(),))[1]
            close(f"{name}, jvp", whole(y), tangent)


def check_orders() -> None:
    """Gradients of gradients, and Jacobians."""
    for name in ("sums and products", "softmax of columns", "slices", "strided conv", "cat"):
        shape, function = KEPT[name]

        def twice(x: Tensor, function: Function = function) -> Tensor:
            return torch.func.grad(lambda x: torch.func.grad(function)(x).pow(2).sum())(x)

        for split in splits(shape):
            with tessel.fallback("raise"):
                y: Any = twice(split)
            close(name, whole(y), twice(values(shape, 1)), 1e-11)  # of numbers up to 1e4
            assert y.layout.box() == split.layout.box(), name

    def rows(x: Tensor) -> Tensor:
        return (x.sin() @ w(4, 3)).sum(0)

    for split in splits(MATRIX):
        with tessel.fallback("raise"):
            y = torch.func.jacrev(rows)(split)
        close("jacrev", whole(y), torch.func.jacrev(rows)(values(MATRIX, 1)))


def check_complex() -> None:
    """Conjugates, which transforms leave to be made, are made."""

    def function(x: Tensor) -> Tensor:
        z = torch.complex(x, 2 * x)
        return (z.conj() * torch.complex(3 * x, x) * z).real.sum()

    expected = torch.func.grad(function)(values(MATRIX, 1))
    for split in splits(MATRIX):
        with tessel.fallback("raise"):
            close("complex", whole(torch.func.grad(function)(split)), expected)


def check_models() -> None:
    """Gradients of parameters, plain ones, of a model of a spread input."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(2), nn.LayerNorm(36), nn.Linear(36, 2)
    ).double()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    targets = torch.arange(8).reshape(4, 2) % 4

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), targets)

    expected = torch.func.grad(loss)(parameters, values(IMAGES, 1))
    of_input = torch.func.grad(loss, 1)(parameters, values(IMAGES, 1))
    plain = model
    for split in splits(IMAGES):
        for is_converted in (False, True):
            model = copy.deepcopy(plain)
            if is_converted:
                model = tessel.nn.distribute_module(model, split.layout.partition, "raise")
            with tessel.fallback("raise"):
                found = torch.func.grad(loss)(parameters, split)
                y: Any = torch.func.grad(loss, 1)(parameters, split)
            for name, each in expected.items():
                close(name, whole(found[name]), each)
            close("input", whole(y), of_input)
            assert y.layout.box() == split.layout.box()
    # a layer that computes with parts does not see that of a tensor that was passed through
    region = tessel.nn.HaloRegion(
        tessel.nn.DistributedConv2d(split.layout.partition, 3, 2, 3, padding=1).double()
    )
    with pytest.raises(NotImplementedError, match="hides its part"):
        torch.func.grad(lambda x: region(x).sum())(split)


def check_tangents_of_others() -> None:
    """In forward mode, of spread tensors that have their tangents from plain ones."""
    functions: dict[str, Function] = {
        "group norm": lambda x: F.group_norm(x, 1, w(3), w(3, seed=2)),
        "instance norm": lambda x: F.instance_norm(x, weight=w(3)),
        "batch norm": lambda x: F.batch_norm(x, None, None, w(3), training=True),
        "layer norm": lambda x: F.layer_norm(x, (6, 6), w(6, 6)),
        "rms norm": lambda x: F.rms_norm(x, (3, 6, 6)),
        "amin of ties": lambda x: (x - x.detach()).amin((1, 3)),
        "transform": lambda x: torch.fft.rfft(x, dim=1).abs(),
        "transforms": lambda x: torch.fft.fft2(x, dim=(0, 2)).abs(),
    }

    def tangent(function: Function, x: Tensor) -> Tensor:
        factor, along = w(3, 1, 1, seed=4), w(3, 1, 1, seed=5)
        return torch.func.jvp(lambda factor: function(x * factor), (factor,), (along,))[1]

    for name, function in functions.items():
        expected = tangent(function, values(IMAGES, 1))
        for split in splits(IMAGES):
            close(name, whole(tangent(function, split)), expected)


def check_traffic() -> None:
    """What every worker computes by itself sends nothing; a sum over workers sends numbers."""
    x = splits(MATRIX)[0]
    # the backward formula of a loss computes the loss once more
    for name, most in (("relu", 8), ("softmax of rows", 8), ("mse", 16)):
        function = KEPT[name][1]
        torch.func.grad(function)(x)  # workers get to know each other
        with count_traffic() as traffic:
            torch.func.grad(function)(x)
        # the value of the function, a number, which workers tell each other
        others = tessel.world().size - 1
        assert bool(others) <= traffic.bytes_sent <= most * others, (name, traffic)


def check_unknown() -> None:
    """What has no rule gathers, or raises; what works in place raises."""
    for split in splits(MATRIX):
        x = values(MATRIX, 1)
        close("gathered", whole(torch.func.grad(unknown)(split)), torch.func.grad(unknown)(x))
        if tessel.world().size > 1:
            with tessel.fallback("raise"), pytest.raises(NotImplementedError, match="no rule"):
                torch.func.grad(unknown)(split)
        with pytest.raises(NotImplementedError, match="bypasses torch's functions"):
            torch.func.grad(lambda x: x.norm())(split)


def check_forward_mode_of_what_needs_gradients() -> None:
    """The gradient of a tangent would be lost, so it raises."""
    P = tessel.world().create_cartesian_topology_partition([tessel.world().size, 1])
    split = tessel.spread(w(*MATRIX), P).requires_grad_()
    if tessel.world().size == 1:
        return  # one worker computes with torch's own tensors
    with pytest.raises(NotImplementedError, match="the gradient would be lost"):
        torch.func.jvp(lambda x: x.pow(3).cumsum(0), (split,), (torch.ones_like(split),))
    with torch.no_grad():
        torch.func.jvp(lambda x: x.pow(3).cumsum(0), (split,), (torch.ones_like(split),))


def unknown(x: Tensor) -> Tensor:
    return F.logsigmoid(x).sum()


def check_tangents_of_attention() -> None:
    """Torch's fastest kernel has none: it raises in one process, unless told to take another."""
    for settings in ({}, {"is_causal": True}):

        def attention(x: Tensor, settings: dict[str, Any] = settings) -> Tensor:
            return F.scaled_dot_product_attention(x, x * 2, x.sin(), **settings)

        x = values((2, 3, 6, 4), 1)
        with sdpa_kernel(SDPBackend.MATH):
            expected = torch.func.jvp(attention, (x,), (x.cos(),))
        for split in splits(x.shape):
            y: Any = torch.func.jvp(attention, (split,), (split.cos(),))
            for name, mine, theirs in zip(("value", "tangent"), y, expected, strict=True):
                close(f"{name} of {settings}", whole(mine), theirs)


CHECKS = (
    check_tangents_of_attention,
    *(check_orders, check_complex, check_models, check_traffic, check_unknown),
    *(check_forward_mode_of_what_needs_gradients, check_tangents_of_others),
)


@pytest.mark.parametrize("nprocs", [1, 3])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "otherwise"])
def test_gradients(run: Run, kept: bool, nprocs: int) -> None:
    run(check_gradients, kept, nprocs=nprocs, timeout=100)


@pytest.mark.parametrize("nprocs", [1, 3])
@pytest.mark.parametrize("check", CHECKS, ids=[each.__name__[6:] for each in CHECKS])
def test_torch_func(run: Run, check: Callable[[], None], nprocs: int) -> None:
    run(check, nprocs=nprocs, timeout=60)
