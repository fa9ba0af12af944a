"""Gradients of shared parameters in few messages: the same values, and nothing else changes.

Tests `nn/buckets.py`, `core/shared.py`.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import models
import tessel
from parity import check_layers, close, values, vjps
from tessel import Layout, Move, Partition
from tessel.core import boxes, shared
from tessel.core.shared import GradientBucket
from tessel.models import FNO
from tessel.nn import buckets
from tessel.nn.buckets import LIMIT, BucketSchedule, Use
from tessel.testing import count_traffic

Shape = tuple[int, ...]
Run = Callable[..., list[Any]]

TOLERANCE = 1e-12
# Batch norms divide by standard deviations of few values, which makes the rounding of float64 grow
# from layer to layer, in torch's own as well.
GROWN = 1e-10


def place(grid: Shape) -> Partition:
    row = tessel.world().create_partition_inclusive(range(prod(grid)))
    return row.create_cartesian_topology_partition(grid)


def column() -> Partition:
    """All workers along the height of an image."""
    return place((1, 1, tessel.world().size, 1))


def images(partition: Partition, shape: Shape = (2, 3, 8, 8)) -> Tensor:
    """This worker's part."""
    return Layout.balanced(partition, shape).local_part(values(shape, 1))


def pair(make: Callable[[], nn.Module], partition: Partition) -> tuple[nn.Module, nn.Module]:
    """A model as it is and converted, in float64."""
    torch.manual_seed(0)
    alone = make().double()
    return alone, tessel.nn.distribute_module(copy.deepcopy(alone), partition)


def learned(model: nn.Module, x: Tensor) -> nn.Module:
    """A model after a first call."""
    model(x)
    return model


def plain(width: int = 3, depth: int = 3) -> nn.Sequential:
    """Layers that send nothing but the gradients of their parameters."""
    layers = [nn.Conv2d(3 if k == 0 else width, width, 1) for k in range(depth)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))


def same_grads(spread: nn.Module, alone: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Every parameter has the gradient of one process, and has none where that has none."""
    pairs = zip(spread.named_parameters(), alone.parameters(), strict=True)
    for (name, p), q in pairs:
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            close(name, p.grad, q.grad, tolerance)


def derive(model: nn.Module, x: Tensor, **how: Any) -> None:
    model.zero_grad()
    model(x).square().sum().backward(**how)


# ---------------------------------------------------------------- operators


def check_bundle(grid: Shape, axes: tuple[int, ...]) -> None:
    """⟨A x, y⟩ = ⟨x, A.H y⟩ in the inner products of the layouts; nothing moves forwards."""
    P = place(grid)
    if not P.active:
        return
    shapes = [(3, 2), (), (1, 5), (0, 2)]
    for dtype in (torch.float64, torch.complex128):
        bundle = GradientBucket(P, axes, shapes, torch.empty(0, dtype=dtype))
        xs = [values(shape, k).to(dtype).requires_grad_() for k, shape in enumerate(shapes)]
        with count_traffic() as forward:
            ys = bundle.use(bundle.prepare(xs))
        assert forward.messages == 0
        assert [y.data_ptr() for y in ys] == [x.data_ptr() for x in xs]
        part = sum((P.index or (0,))[axis] * 10**axis for axis in axes)
        weights = [(1 + part) * values(shape, 9).to(dtype) for shape in shapes]
        loss = sum((w.conj() * y).sum() for w, y in zip(weights, ys, strict=True))
        grads = torch.autograd.grad(loss.real, xs, retain_graph=True)
        parts = [0]
        for axis in axes:
            parts = [p + 10**axis * k for p in parts for k in range(grid[axis])]
        for shape, grad in zip(shapes, grads, strict=True):
            factor = sum(1 + p for p in parts)
            close(f"{shape}", grad, factor * values(shape, 9).to(dtype))
        again = torch.autograd.grad(loss.real, xs)
        assert all(map(torch.equal, grads, again))


@pytest.mark.parametrize(
    "nprocs, grid, axes",
    [
        (2, (2,), (0,)),
        (3, (3,), (0,)),
        (4, (2, 2), (0,)),
        (4, (2, 2), (1,)),
        (4, (2, 2), (0, 1)),
        (4, (1, 3), (1,)),
        (4, (4,), (0,)),
    ],
)
def test_a_bundle_is_used_as_it_is_and_summed(
    run: Run, nprocs: int, grid: Shape, axes: tuple[int, ...]
) -> None:
    run(check_bundle, grid, axes, nprocs=nprocs)


def check_orders(linear: bool) -> None:
    """Gradients of three orders; of two, where the loss of one worker is linear."""
    P = place((tessel.world().size,))
    bundle = GradientBucket(P, (0,), [(2,), (2,)], torch.empty(0, dtype=torch.float64))
    a, b = (values((2,), seed).requires_grad_() for seed in (1, 2))
    c, d = (each.detach().clone().requires_grad_() for each in (a, b))
    x, y = bundle.use(bundle.prepare([a, b]))
    first = linear and P.rank == 0
    share = (x.sum() + y.sum()) if first else (x.pow(4) * y.pow(3)).sum()
    many = P.size - linear
    loss = (c.sum() + d.sum()) * (P.size - many) + many * (c.pow(4) * d.pow(3)).sum()
    for order in range(2 if linear else 3):
        got = torch.autograd.grad(share, [a, b], create_graph=True)
        expected = torch.autograd.grad(loss, [c, d], create_graph=True)
        for mine, theirs in zip(got, expected, strict=True):
            close(f"order {order + 1}", mine, theirs)
        share, loss = got[0].square().sum(), expected[0].square().sum()  # of shared values


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("nprocs", [2, 3])
def test_gradients_of_higher_order(run: Run, nprocs: int, linear: bool) -> None:
    run(check_orders, linear, nprocs=nprocs)


# ---------------------------------------------------------------- models


TRAININGS = {
    1: [("ResNet18", (2,), (1, 1, 1, 1), (2, 3, 33, 32))],
    2: [
        ("ResNet18", (2,), (2, 1, 1, 1), (3, 3, 37, 33)),
        ("UNet", (3,), (1, 1, 2, 1, 1), (1, 1, 8, 9, 10)),
    ],
    3: [
        ("ResNet18", (2,), (1, 1, 3, 1), (2, 3, 37, 33)),
        ("UNet", (2,), (1, 1, 3, 1), (2, 1, 19, 13)),
    ],
    4: [
        ("ResNet18", (2,), (1, 1, 2, 2), (2, 3, 64, 64)),
        ("ResNet18", (2,), (2, 1, 2, 1), (2, 3, 53, 37)),
        ("UNet", (3,), (1, 1, 2, 1, 2), (1, 1, 9, 8, 11)),
    ],
}
LIMITS = (0, 3000, 2**22)


def mine(y: Tensor, layout: Layout) -> Tensor:
    if y.dim() == len(layout.shape):
        return layout.resized(y.shape).local_part(y)
    rows = boxes.balanced(y.shape[0], layout.partition.shape[0])[layout.partition.index[0]]
    return y[slice(*rows)]


def train(name: str, args: tuple[int, ...], grid: Shape, shape: Shape) -> list[list[int]]:
    """Gradients of the steps of a training; the messages of each backward pass, by limit."""
    P = place(grid)
    layout, x = Layout.balanced(P, shape), values(shape, 1)
    make = lambda: getattr(models, name)(*args)  # noqa: E731
    alone, _ = pair(make, P)
    optimizer = torch.optim.SGD(alone.parameters(), 0.02)
    expected = []  # the output and the gradients of each step: the same for all limits
    for _ in range(3):
        optimizer.zero_grad()
        y = alone(x)
        (y * values(y.shape, 5)).sum().backward()
        expected.append((y.detach(), [p.grad for p in alone.parameters()]))
        optimizer.step()
    counts = []
    for limit in LIMITS:
        _, spread = pair(make, P)
        assert tessel.nn.fuse_gradients(spread, limit) is spread
        optimizer = torch.optim.SGD(spread.parameters(), 0.02)
        counts.append([])
        for step, (y, gradients) in enumerate(expected):
            z = spread(layout.local_part(x))
            close(f"output {step}", z, mine(y, layout), GROWN)
            optimizer.zero_grad()
            with count_traffic() as backward:
                (z * mine(values(y.shape, 5), layout)).sum().backward()
            for p, gradient in zip(alone.parameters(), gradients, strict=True):
                p.grad = gradient
            same_grads(spread, alone, GROWN if step else TOLERANCE)
            counts[-1].append(backward.messages)
            optimizer.step()
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", TRAININGS)
def test_models_have_the_gradients_of_one_process(run: Run, nprocs: int) -> None:
    for case in TRAININGS[nprocs]:
        for alone, some, few in run(train, *case, nprocs=nprocs, timeout=100):
            assert alone[0] == alone[1] == alone[2] == some[0] == few[0]
            if nprocs > 1:
                assert alone[1] > some[1] > few[1] == few[2]


def check_second_order(grid: Shape) -> None:
    """Of a model with convolutions, norms that are from_bucket, and a head that is shared."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.GELU(),
            nn.GroupNorm(2, 4),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.Sigmoid(),
            nn.Conv2d(4, 2, 1),
        )

    P = place(grid)
    alone, spread = pair(make, P)
    layout = Layout.balanced(P, (2, 3, 8, 9))
    for trains in (True, False):
        alone.train(trains), spread.train(trains)
        for _ in range(2):
            check_layers(alone, spread, values(layout.shape, 1), layout)


@pytest.mark.parametrize(
    "nprocs, grid",
    [(1, (1, 1, 1, 1)), (2, (1, 1, 2, 1)), (3, (3, 1, 1, 1)), (4, (1, 1, 2, 2)), (4, (2, 2, 1, 1))],
)
def test_second_order(run: Run, nprocs: int, grid: Shape) -> None:
    run(check_second_order, grid, nprocs=nprocs)


# ---------------------------------------------------------------- messages


def count_plain(limit: int, width: int = 3, depth: int = 3) -> list[tuple[int, int, int]]:
    """Messages, bytes and agreements of three backward passes."""
    P = column()
    model = tessel.nn.distribute_module(plain(width, depth).double(), P)
    tessel.nn.fuse_gradients(model, limit)
    found = []
    for _ in range(3):
        y = model(images(P))
        with count_traffic() as backward:
            y.sum().backward()
        found.append((backward.messages, backward.bytes_sent, backward.agreements))
    return found


WEIGHT, BIAS, FLAG = 9 * 8, 3 * 8, 8  # bytes of a layer of `plain`, and of a flag in a message


def test_two_workers_swap_the_gradients_of_a_model_in_one_message(run: Run) -> None:
    """Beside the gradients travels a flag for each: that it is there."""
    size = 3 * (WEIGHT + BIAS)
    for counts in run(count_plain, 2**22, nprocs=2):
        assert counts == [(6, size, 0), (1, size + 6 * FLAG, 0), (1, size + 6 * FLAG, 0)]


def test_a_message_has_at_most_so_many_bytes(run: Run) -> None:
    """A weight that is larger travels alone, and the biases around it together."""
    size = 3 * (WEIGHT + BIAS)
    expected = {
        0: (6, size),
        BIAS: (6, size),
        2 * BIAS: (5, size + 2 * FLAG),
        WEIGHT - 1: (5, size + 2 * FLAG),
        WEIGHT + BIAS: (3, size + 6 * FLAG),
        2 * (WEIGHT + BIAS): (2, size + 6 * FLAG),
    }
    for limit, (messages, sent) in expected.items():
        for counts in run(count_plain, limit, nprocs=2):
            assert counts == [(6, size, 0), (messages, sent, 0), (messages, sent, 0)], limit


def test_four_workers_sum_parts_and_collect_them(run: Run) -> None:
    """Of P workers each sends 2·(P − 1)/P times the gradients, in 2·(P − 1) messages."""
    length = 3 * 4 + 4 + 3 * (4 * 4 + 4) + 8  # with the flags; a multiple of four
    for counts in run(count_plain, 2**22, 4, 4, nprocs=4):
        assert counts[0] == (8 * 2 * 3, 2 * 3 * (length - 8) // 4 * 8, 0)
        assert counts[1] == counts[2] == (2 * 3, 2 * 3 * length // 4 * 8, 0)


def count_norm() -> tuple[int, int]:
    P = column()
    model = tessel.nn.distribute_module(nn.Sequential(nn.BatchNorm2d(3)).double(), P)
    x = images(P).requires_grad_()
    learned(model, x)
    with count_traffic() as forward:
        y = model(x)
    with count_traffic() as backward:
        y.square().sum().backward()
    return forward.messages, backward.messages


def test_statistics_and_parameters_of_a_batch_norm_are_one_message_each_way(run: Run) -> None:
    assert run(count_norm, nprocs=2) == [(1, 1)] * 2


def count_peers() -> tuple[int, int]:
    """The messages of a move, and the workers to whom something goes."""
    P, n = tessel.world(), tessel.world().size
    source = Layout.balanced(place((n, 1, 1)), (5, 7, 6))
    target = Layout.balanced(place((1, 2, n // 2)), (5, 7, 6))
    move = Move(source, target)
    x = source.local_part(values((5, 7, 6), 1))
    with count_traffic() as traffic:
        close("moved", move(x), target.local_part(values((5, 7, 6), 1)))
    return traffic.messages, P.size - 1


def test_all_that_a_move_brings_to_a_worker_is_one_message(run: Run) -> None:
    for messages, peers in run(count_peers, nprocs=4):
        assert messages == peers


def watch_order() -> list[str]:
    """When the sums of three layers begin and are waited for."""
    P = column()
    model = tessel.nn.distribute_module(plain(depth=3).double().requires_grad_(False), P)
    for layer in (model[0], model[2], model[4]):
        layer.weight.requires_grad_()
    learned(tessel.nn.fuse_gradients(model, 0), images(P))
    y = model(images(P))
    seen: list[str] = []
    start = shared.Sum.start

    def watched(self: Any, *given: Any) -> Callable[[], Tensor]:
        number = sum(each.startswith("sends") for each in seen)
        seen.append(f"sends {number}")
        wait = start(self, *given)

        def landing() -> Tensor:
            seen.append(f"waits {number}")
            return wait()

        return landing

    shared.Sum.start = watched
    try:
        y.sum().backward()
    finally:
        shared.Sum.start = start
    return seen


def test_sums_travel_while_the_next_gradients_are_computed(run: Run) -> None:
    for seen in run(watch_order, nprocs=2):
        assert seen == ["sends 0", "sends 1", "waits 0", "sends 2", "waits 1", "waits 2"]


# ---------------------------------------------------------------- memory


def memory_of_a_step(width: int, depth: int, accumulates: bool, splits: bool) -> int:
    """The most bytes of tensors at once in a step whose gradients are nearly all of it."""
    model: nn.Module = nn.Sequential(
        *(nn.Conv2d(width, width, 1, bias=False) for _ in range(depth))
    ).double()
    x = values((1, width, 4, 1), 1)
    if splits:
        P = column()
        model, x = tessel.nn.distribute_module(model, P), Layout.balanced(P, x.shape).local_part(x)
    for _ in range(3):
        model.zero_grad(not accumulates)
        with tessel.testing.count_memory() as memory:
            model(x).sum().backward()
    return memory.peak


def memory_of_steps(width: int, depth: int, accumulates: bool) -> tuple[int, int]:
    """Of a worker, and of one process."""
    sizes = [memory_of_a_step(width, depth, accumulates, splits) for splits in (True, False)]
    return sizes[0], sizes[1]


LARGE_WIDTH = 740  # a weight has more than the 4 MiB of a bucket


@pytest.mark.parametrize("nprocs", [2, 3, 4])
@pytest.mark.parametrize("accumulates", [False, True])
def test_large_gradients_take_the_memory_of_one_more(
    run: Run, nprocs: int, accumulates: bool
) -> None:
    """While one travels the next is made, beside it what comes from others.

    Of P workers that is (P - 1)/P of it. Where gradients are there already, those that are added to
    them are one more than in one process, which adds each at once.
    """
    unit, small = LARGE_WIDTH**2 * 8, 200_000
    assert unit > LIMIT
    for ours, alone in run(memory_of_steps, LARGE_WIDTH, 4, accumulates, nprocs=nprocs):
        assert abs(alone - (1 if accumulates else 4) * unit) < small
        more = (nprocs - 1) / nprocs + accumulates
        assert abs(ours - alone - more * unit) < small, (ours - alone) / unit


@pytest.mark.parametrize("nprocs", [2, 3, 4])
@pytest.mark.parametrize("width", [100, 300])
def test_a_bucket_takes_its_memory_twice(run: Run, nprocs: int, width: int) -> None:
    """A row beside the gradients, and then in their place what comes from others."""
    unit, small = width**2 * 8, 100_000
    for ours, alone in run(memory_of_steps, width, 4, False, nprocs=nprocs):
        assert abs(alone - 4 * unit) < small
        assert abs(ours - 8 * unit) < small, ours / unit


@contextmanager
def noted_uses(found: list[Tensor]) -> Iterator[None]:
    """What buckets give to be used inside of the `with` block."""
    use = GradientBucket.use

    def noted(self: GradientBucket, token: Tensor) -> tuple[Tensor, ...]:
        given = use(self, token)
        found.extend(given)
        return given

    GradientBucket.use = noted
    try:
        yield
    finally:
        GradientBucket.use = use


def check_kept_gradient() -> None:
    """A large gradient travels without a copy; one that a hook keeps is not summed into."""
    P = column()
    model = tessel.nn.distribute_module(plain(LARGE_WIDTH, 2).double(), P)
    weight, found = model[2].weight, list[Tensor]()
    with noted_uses(found):
        y = learned(model, images(P))(images(P))
    (used,) = (each for each in found if each.shape == weight.shape)
    seen: list[Tensor] = []
    used.register_hook(lambda grad: seen.extend((grad, grad.clone())))
    y.square().sum().backward()
    assert weight.nbytes > LIMIT and weight.grad is not None
    assert torch.equal(*seen) and not torch.equal(weight.grad, seen[0])


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_gradient_that_others_have_stays(run: Run, nprocs: int) -> None:
    run(check_kept_gradient, nprocs=nprocs)


# ---------------------------------------------------------------- what users do with a model


class Tied(nn.Module):
    """A layer that is used twice, and a weight that two layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, padding=1)
        self.third = nn.Conv2d(3, 3, 1)
        self.third.weight = self.first.weight
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        x = self.first(x) + self.head(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))  # split before, whole here


def check_tied() -> None:
    P = column()
    alone, spread = pair(Tied, P)
    for _ in range(3):
        derive(alone, values((2, 3, 8, 8), 1)), derive(spread, images(P))
        same_grads(spread, alone)


class Branching(nn.Module):
    """A model that uses other parameters in other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Conv2d(3, 3, 1)
        self.sometimes = nn.Conv2d(3, 3, 1)
        self.never = nn.Conv2d(3, 3, 1)
        self.last = nn.Conv2d(3, 3, 1)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.always(x))
        x = torch.tanh(self.sometimes(x)) if self.on else x
        return self.last(x)


def check_unused() -> list[int]:
    """A parameter that is not used gets no gradient, whatever was foreseen."""
    P = column()
    alone, spread = pair(Branching, P)
    messages = []
    for on in (True, True, False, False, True, True):
        alone.on = spread.on = on
        derive(alone, values((2, 3, 8, 8), 1))
        spread.zero_grad()
        loss = spread(images(P)).square().sum()
        with count_traffic() as backward:
            loss.backward()
        same_grads(spread, alone)
        messages.append(backward.messages)
    return messages


def check_results_without_a_loss() -> None:
    """Parameters of results that the loss does not depend on get none, in the same bundle."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.tanh(self.body(x))
            return self.left(x), self.right(x)

    P = column()
    alone, spread = pair(Two, P)
    x, part = values((2, 3, 8, 8), 1), images(P)
    for side in (0, 1, 0):
        alone.zero_grad(), spread.zero_grad()
        alone(x)[side].square().sum().backward()
        spread(part)[side].square().sum().backward()
        same_grads(spread, alone)
    left, right = spread(part)
    asked = [spread.left.weight, spread.right.weight]
    found = torch.autograd.grad(left.square().sum(), asked, retain_graph=True, allow_unused=True)
    assert found[0] is not None and found[1] is None
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(left.square().sum(), asked, retain_graph=True)
    spread.zero_grad(), alone.zero_grad()
    right.square().sum().backward(), alone(x)[1].square().sum().backward()
    same_grads(spread, alone)


def check_some() -> None:
    """Gradients of some parameters alone, of the input alone, of intermediate results."""
    P = column()
    alone, spread = pair(plain, P)
    x = values((2, 3, 8, 8), 1).requires_grad_()
    part = images(P).requires_grad_()
    learned(spread, part)
    y, z = alone(x).square().sum(), spread(part).square().sum()
    ours, theirs = list(spread.parameters()), list(alone.parameters())
    for numbers in ([3], [0, 5], [2, 1, 4]):
        got = torch.autograd.grad(z, [ours[k] for k in numbers], retain_graph=True)
        expected = torch.autograd.grad(y, [theirs[k] for k in numbers], retain_graph=True)
        for k, a, b in zip(numbers, got, expected, strict=True):
            close(f"parameter {k}", a, b)
    z.backward(inputs=[ours[1]], retain_graph=True)
    y.backward(inputs=[theirs[1]], retain_graph=True)
    same_grads(spread, alone)
    with count_traffic() as backward:
        (got,) = torch.autograd.grad(z, [part], retain_graph=True)
    assert backward.messages == 0
    layout = Layout.balanced(P, x.shape)
    close("input", got, layout.local_part(*torch.autograd.grad(y, [x], retain_graph=True)))


def check_frozen() -> None:
    """Parameters that are frozen and trained again, from call to call."""
    P = column()
    alone, spread = pair(plain, P)
    for frozen in ((), (0,), (0, 3, 5), range(6), (), (1,), ()):
        for model in (alone, spread):
            model.zero_grad()
            for k, each in enumerate(model.parameters()):
                each.requires_grad_(k not in frozen)
        x, part = values((2, 3, 8, 8), 1), images(P)
        y, z = alone(x).square().sum(), spread(part).square().sum()
        assert y.requires_grad == z.requires_grad
        if y.requires_grad:
            y.backward(), z.backward()
        same_grads(spread, alone)


def check_several_passes() -> None:
    """Several backward passes through one call, and several calls before one pass."""
    P = column()
    alone, spread = pair(plain, P)
    x, part = values((2, 3, 8, 8), 1), images(P)
    learned(spread, part)
    y, z = alone(x), spread(part)
    for factor in (1.0, 2.0):
        (factor * y.square().sum()).backward(retain_graph=True)
        (factor * z.square().sum()).backward(retain_graph=True)
        same_grads(spread, alone)
    y, z = alone(x) * alone(2 * x), spread(part) * spread(2 * part)
    y.sum().backward(), z.sum().backward()
    same_grads(spread, alone)
    z = spread(part).sum()
    z.backward()
    with pytest.raises(RuntimeError, match="second time"):
        z.backward()


def tripled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3.0)


def check_hooks() -> None:
    """Hooks on parameters see the summed gradients, once, and change them."""
    P = column()
    alone, spread = pair(plain, P)
    seen: dict[str, list[Tensor]] = {"alone": [], "spread": []}
    for name, model in (("alone", alone), ("spread", spread)):
        for each in model.parameters():
            each.register_hook(lambda g, name=name: seen[name].append(g.clone()) or 2 * g)
            each.register_post_accumulate_grad_hook(tripled)
    if tessel.world().rank == 0:  # a hook that watches, on one worker
        spread[0].weight.register_hook(lambda g: None)
    for _ in range(2):
        derive(alone, values((2, 3, 8, 8), 1)), derive(spread, images(P))
        same_grads(spread, alone)
    assert len(seen["alone"]) == len(seen["spread"]) == 12


def check_without_gradients() -> None:
    """Calls that record nothing change nothing of what was learned."""
    P = column()
    alone, spread = pair(plain, P)
    learned(spread, images(P))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not spread(images(P)).requires_grad
        with count_traffic() as backward:
            derive(spread, images(P))
        assert backward.messages == 1 if P.size == 2 else 4
        derive(alone, values((2, 3, 8, 8), 1))
        same_grads(spread, alone)


class Partly(nn.Module):
    """A part of the model is computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.second(self.first(x))
        return self.second(torch.tanh(self.first(x)))


def check_partly() -> None:
    P = column()
    alone, spread = pair(Partly, P)
    for _ in range(3):
        derive(alone, values((2, 3, 8, 8), 1)), derive(spread, images(P))
        same_grads(spread, alone)


class Saving(nn.Module):
    """A model whose middle is computed again in the backward pass."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.saves = saves
        self.first, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.middle = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), self.first)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        middle = self.middle
        x = checkpoint(middle, x, use_reentrant=False) if self.saves else middle(x)
        return self.last(x)


def check_checkpoints() -> None:
    P = column()
    alone, _ = pair(lambda: Saving(False), P)
    _, spread = pair(lambda: Saving(True), P)
    x, part = values((2, 3, 8, 8), 1), images(P)
    for _ in range(3):
        derive(alone, x), derive(spread, part)
        same_grads(spread, alone)
    _, spread = pair(lambda: Saving(False), P)
    for _ in range(3):
        spread.zero_grad()
        y = checkpoint(spread, part, use_reentrant=False)
        spread(part)  # another call in between
        y.square().sum().backward()
        same_grads(spread, alone)


def check_copies() -> None:
    P = column()
    alone, spread = pair(plain, P)
    for _ in range(2):
        derive(alone, values((2, 3, 8, 8), 1)), derive(spread, images(P))
    tessel.nn.fuse_gradients(spread, 100)
    for twin in (copy.deepcopy(spread), pickle.loads(pickle.dumps(spread))):
        assert twin.forward.schedule.limit == 100 and not twin.forward.schedule.uses
        for _ in range(2):
            derive(twin, images(P))
            same_grads(twin, alone)


def check_functional() -> None:
    """Parameters that are given, and themselves computed from others."""
    P = column()
    alone, spread = pair(plain, P)
    learned(spread, images(P))
    found = []
    for model, x in ((alone, values((2, 3, 8, 8), 1)), (spread, images(P))):
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        given = {name: (scale * p).detach() + 0 * p for name, p in model.named_parameters()}
        given = {name: (p * scale).exp() for name, p in given.items()}  # which autograd keeps
        *_, last = given
        given[last] = scale.expand(given[last].shape)  # one number in several places
        y = torch.func.functional_call(model, given, (x,))
        found.append(torch.autograd.grad(y.square().sum(), [scale, *model.parameters()][:-1]))
    for a, b in zip(*found, strict=True):
        close("functional_call", b, a)


def check_derivatives_along() -> None:
    """In forward mode and in transforms of torch.func nothing is from_bucket."""
    P = column()
    alone, spread = pair(plain, P)
    x, part = values((2, 3, 8, 8), 1), images(P)
    learned(spread, part)
    layout = Layout.balanced(P, x.shape)
    others = {name: 2 * p.detach() for name, p in alone.named_parameters()}
    for given in ({}, others):  # the second ones belong to nobody inside of the transform
        calls = [partial(torch.func.functional_call, each, given) for each in (alone, spread)]
        y, along = torch.func.jvp(calls[0], (x,), (x.cos(),))
        z, across = torch.func.jvp(calls[1], (part,), (part.cos(),))
        close("value", z, layout.local_part(y))
        close("derivative", across, layout.local_part(along))
    weights = dict(spread.named_parameters())
    grads = torch.func.grad(
        lambda w: torch.func.functional_call(spread, w, (part,)).square().sum()
    )({name: each.detach() for name, each in weights.items()})
    derive(alone, x)
    for (name, p), grad in zip(alone.named_parameters(), grads.values(), strict=True):
        close(name, grad, p.grad)


def check_empty_parts() -> None:
    """Workers that have nothing to compute sum with the others."""
    P = column()
    alone, spread = pair(plain, P)
    layout = Layout.from_lengths(P, [(2,), (3,), (*[0] * (P.size - 1), 4), (8,)])
    x = values((2, 3, 4, 8), 1)
    for _ in range(3):
        derive(alone, x), derive(spread, layout.local_part(x))
        same_grads(spread, alone)


def check_kinds() -> None:
    """Parameters of several dtypes, and a model whose dtype changes between calls."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.to(self.first.weight.dtype))
            return self.second(torch.tanh(x).to(self.second.weight.dtype))

    P = column()
    alone, spread = pair(Mixed, P)
    x, part = values((2, 3, 8, 8), 1), images(P)
    for first, second in ((torch.float64,) * 2, (torch.float32, torch.float64)) * 2:
        for model in (alone, spread):
            model.first.to(first), model.second.to(second)
        derive(alone, x), derive(spread, part)
        same_grads(spread, alone, 1e-12 if first == second == torch.float64 else 1e-6)


def check_memory() -> None:
    """Nothing of a call stays when its results are gone."""
    P = column()
    model = tessel.nn.distribute_module(plain().double(), P)
    derive(model, images(P))
    kept: list[Any] = []
    for each in model[::2]:
        each.register_forward_hook(lambda m, x, y: kept.append(weakref.ref(y)))
    use = GradientBucket.use

    def watched(self: GradientBucket, token: Tensor) -> tuple[Tensor, ...]:
        found = use(self, token)
        kept.extend(map(weakref.ref, (token, self, *found)))
        return found

    GradientBucket.use = watched
    gc.collect()
    gc.disable()
    try:
        derive(model, images(P))
        assert len(kept) == 3 + 8 and [each() for each in kept] == [None] * 11
    finally:
        gc.enable()
        GradientBucket.use = use


def check_different_habits() -> None:
    """A worker that would send other messages than the others makes all of them raise."""
    P = column()
    model = tessel.nn.distribute_module(plain().double(), P)
    derive(model, images(P))
    if P.rank == 0:
        model.forward.schedule.uses.popitem()
    with pytest.raises(ValueError, match=r"same calls .*gradients of 5 parameters in 1 messages"):
        model(images(P))
    if P.rank == 0:
        model.forward.schedule.uses = {}
    with pytest.raises(ValueError, match=r"same calls .*gradients alone"):
        model(images(P))


CHECKS = [
    *(check_tied, check_results_without_a_loss, check_some, check_frozen, check_several_passes),
    *(check_hooks, check_without_gradients, check_partly, check_checkpoints, check_copies),
    *(check_functional, check_derivatives_along, check_empty_parts, check_kinds, check_memory),
    *(check_different_habits,),
]


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_users_do(run: Run, check: Callable[[], None], nprocs: int) -> None:
    run(check, nprocs=nprocs)


def test_a_parameter_that_was_foreseen_in_vain_is_not_foreseen_again(run: Run) -> None:
    """Six parameters, then all together; then two of them are not used, and later travel alone."""
    assert run(check_unused, nprocs=2) == [[6, 1, 1, 1, 3, 3]] * 2


# ---------------------------------------------------------------- models written by hand


class ByHand(nn.Module):
    """Layers over a partition in a module of torch."""

    def __init__(self, P: Partition) -> None:
        super().__init__()
        self.first = tessel.nn.DistributedConv2d(P, 3, 4, 3, padding=1)
        self.norm = tessel.nn.DistributedLayerNorm(P, 8)
        self.last = tessel.nn.DistributedConv2d(P, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def alone_like(model: ByHand) -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.LayerNorm(8), nn.Tanh(), nn.Conv2d(4, 2, 1))
    alone = nn.Sequential(*layers).double()
    pairs = zip(alone.state_dict().values(), model.state_dict().values(), strict=True)
    for mine, theirs in pairs:
        mine.copy_(theirs)
    return alone


def train_by_hand(grid: Shape) -> list[int]:
    P = place(grid)
    model = ByHand(P).double()
    alone = alone_like(model)
    layout = Layout.balanced(P, (2, 3, 8, 8))
    x = values(layout.shape, 1)
    assert tessel.nn.fuse_gradients(model) is model is tessel.nn.fuse_gradients(model)
    messages = []
    for _ in range(3):
        check_layers(alone, model, x, layout)
        derive(alone, x)
        model.zero_grad()
        y = model(layout.local_part(x)).square().sum()
        with count_traffic() as backward:
            y.backward()
        same_grads(model, alone)
        messages.append(backward.messages)
    twin = copy.deepcopy(model)
    derive(twin, layout.local_part(x))
    same_grads(twin, alone)
    assert twin.forward.module is twin
    return messages


@pytest.mark.slow
def test_a_model_that_was_written_by_hand(run: Run) -> None:
    run(train_by_hand, (1, 1, 1, 1), nprocs=1)
    run(train_by_hand, (1, 1, 2, 2), nprocs=4)
    for messages in run(train_by_hand, (2, 1, 1, 1), nprocs=2):
        assert messages == [1, 1, 1]  # after the first call of `check_layers`


class Narrowing(nn.Module):
    """Layers over all workers, then layers over the first two."""

    def __init__(self) -> None:
        super().__init__()
        wide, narrow = place((1, 1, tessel.world().size, 1)), place((1, 1, 2, 1))
        conv = tessel.nn.DistributedConv2d
        self.wide = nn.Sequential(*(conv(wide, 3, 3, 3, padding=1) for _ in range(2)))
        self.move = tessel.nn.Repartition(wide, narrow)
        self.narrow = nn.Sequential(*(conv(narrow, 3, 3, 3, padding=1) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.move(self.wide(x)))
        return y


def train_narrowing() -> list[int]:
    """Messages of the backward passes, whose gradients are those of one process."""
    torch.manual_seed(0)
    model = tessel.nn.fuse_gradients(Narrowing().double())
    alone = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))).double()
    alone.load_state_dict(dict(zip(alone.state_dict(), model.state_dict().values(), strict=True)))
    x = images(column())
    alone(values((2, 3, 8, 8), 1)).sum().backward()
    is_narrow, messages = tessel.world().rank < 2, []
    for _ in range(3):
        y = model(x)
        model.zero_grad()
        with count_traffic() as traffic:
            y.sum().backward()
        messages.append(traffic.messages)
        pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
        for p, q in pairs if is_narrow else pairs[:4]:
            close("gradient", p.grad, q.grad, TOLERANCE)
    return messages


def test_layers_over_different_workers(run: Run) -> None:
    for first, second, third in run(train_narrowing, nprocs=4):
        assert first > second == third


def check_refusals() -> None:
    P = column()
    with pytest.raises(ValueError, match="zero or more"):
        tessel.nn.fuse_gradients(ByHand(P), -1)
    with pytest.raises(ValueError, match="holds no layer"):
        tessel.nn.fuse_gradients(nn.Conv2d(1, 1, 1))
    model = ByHand(P)
    model.forward = lambda x: x
    with pytest.raises(NotImplementedError, match="forward attribute of its own"):
        tessel.nn.fuse_gradients(model)
    model = tessel.nn.fuse_gradients(ByHand(P).double())
    derive(model, images(P))
    if P.rank == 0:
        model.forward.schedule.uses.popitem()
    with pytest.raises(ValueError, match="same calls"):
        model(images(P))


def test_what_cannot_be_fused_raises_on_all_workers(run: Run) -> None:
    run(check_refusals, nprocs=2)


def train_operator(grid: Shape) -> list[int]:
    """A Fourier neural operator: weights and biases of its mixings are shared."""
    P = place(grid)
    torch.manual_seed(0)
    model = FNO(P, 2, 1, width=4, modes=3, blocks=3, dtype=torch.float64)
    state = model.state_dict()
    shape = (4, 2, *(16 for _ in grid[2:]))
    layout = Layout.balanced(P, shape)
    row = P.create_partition_inclusive([P.ranks[0]])
    whole = row.create_cartesian_topology_partition((1,) * len(grid))
    alone = FNO(whole, 2, 1, width=4, modes=3, blocks=3, dtype=torch.float64)
    alone.load_state_dict(state)
    x = values(shape, 1)
    messages = []
    for _ in range(3):
        model.zero_grad()
        y = model(layout.local_part(x)).square().sum()
        with count_traffic() as backward:
            y.backward()
        messages.append(backward.messages)
        if whole.active:
            derive(alone, x)
            pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
            for (name, p), q in pairs:
                if p.shape == q.shape:  # those of the spectrum are split
                    close(name, p.grad, q.grad)
    return messages


def test_a_fourier_neural_operator(run: Run) -> None:
    """Six mixings with a weight and a bias; the spectral weights travel by themselves."""
    for messages in run(train_operator, (1, 1, 2, 1), nprocs=2):
        assert messages[1] == messages[2] == messages[0] - 11, messages
    for messages in run(train_operator, (2, 1, 2), nprocs=4):
        assert messages[1] == messages[2] < messages[0], messages


# ---------------------------------------------------------------- plans


def test_a_plan_keeps_the_order_of_use_and_the_kinds_apart() -> None:
    P = tessel.world().create_cartesian_topology_partition([1, 1])
    schedule = BucketSchedule(limit=40)
    one, other = Use(P, (0,)), Use(P, (1,))
    sizes = [4, 4, 20, 4, 2, 4, 1]
    parameters = [torch.zeros(n, dtype=torch.float32, requires_grad=True) for n in sizes]
    parameters[4] = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    parameters[5].requires_grad_(False)
    uses = {0: one, 2: one, 1: one, 3: other, 4: one, 5: one, 6: one}
    schedule.learn((), uses)
    groups = [group.numbers for group in schedule.plan(parameters)]
    assert groups == [(0, 1, 6), (2,), (3,), (4,)]
    with torch.no_grad():
        assert schedule.plan(parameters) == ()
    schedule.learn(schedule.plan(parameters), {0: one, 2: one})
    assert schedule.unsteady == {1, 3, 4, 6}
    schedule.learn((), uses)
    assert [group.numbers for group in schedule.plan(parameters)] == [(0,), (2,)]


def test_gradients_are_those_of_torch_in_one_process() -> None:
    """A world of one has no bundles, and loses nothing."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    alone, spread = pair(plain, P)
    x = values((2, 3, 8, 8), 1)
    for _ in range(2):
        weights = values((2, 3, 8, 8), 2)
        got = vjps(spread(x), weights, list(spread.parameters()), 1)
        expected = vjps(alone(x), weights, list(alone.parameters()), 1)
        assert all(map(torch.equal, got, expected))
    assert not spread.forward.schedule.uses


def test_what_a_model_says_of_itself_is_made_once(run: Run) -> None:
    run(check_said, nprocs=2)


def check_said() -> None:
    """All but the parameters that a call used, which two models with one name have alike."""
    P = tessel.world().create_cartesian_topology_partition([2, 1])
    model = tessel.nn.distribute_module(nn.Linear(3, 3), P)
    beginning = buckets._beginning
    for _ in range(3):
        model(tessel.spread(torch.ones(4, 3), P)).sum().backward()
    before = beginning.cache_info()  # type: ignore[attr-defined]
    model(tessel.spread(torch.ones(4, 3), P)).sum().backward()
    after = beginning.cache_info()  # type: ignore[attr-defined]
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)
