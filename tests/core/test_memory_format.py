"""Tensors whose channels lie last in memory: movements and models keep that, and the values.

Tests `core/memory_format.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import tessel
from parity import close, values
from tessel import Layout, Move
from tessel.core.memory_format import memory_format, room_like

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
SHAPES = (2, 3, 7, 5), (2, 3, 4, 6, 5)


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=LAST[x.dim()])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_format_of_slices_is_that_of_the_whole(shape):
    x = torch.ones(shape)
    for y in (x, x[:, :, 1:], x[:, 1:], x.flatten(), x.transpose(0, 2), x[:1].expand(shape)):
        assert memory_format(y) == torch.contiguous_format
    for y in (last(x), last(x)[:, :, 1:], last(x)[1:], last(x)[..., ::2]):
        assert memory_format(y) == LAST[x.dim()]
    assert memory_format(last(x)[:, 1:]) == LAST[x.dim()]  # some channels of each place
    assert memory_format(last(x[:, :1])) == torch.contiguous_format  # lies in both ways
    assert room_like(last(x), (1, *shape[1:])).is_contiguous(memory_format=LAST[x.dim()])
    assert room_like(last(x), (4, 4)).is_contiguous()


def check_moves(shape: tuple[int, ...]) -> None:
    """Halos, repartitions, sums and copies; each worker's own choice, as strides are."""
    workers = tessel.world().size
    rows = tessel.world().create_cartesian_topology_partition(
        [1, 1, workers, *[1] * len(shape[3:])]
    )
    source = Layout.balanced(rows, shape)
    targets = [
        source,
        source.grow([(0, 0), (0, 0), (2, 1), *[(0, 0)] * len(shape[3:])]),
        Layout.split(rows, shape, [None, None, None, 2, *[None] * len(shape[4:])]),
        Layout.split(rows, shape, [None, 2, *[None] * len(shape[2:])]),
        Layout.whole(rows, shape),
    ]
    x = values(shape, 1)
    is_last = tessel.world().rank != 1  # not on all workers
    for target in targets:
        move = Move(source, target)
        part = source.local_part(x).contiguous().requires_grad_()
        other = last(part.detach()) if is_last else part.detach().clone()
        other.requires_grad_()
        for _ in range(3):  # the engine repeats what it knows
            usual, kept = move(part), move(other)
            assert torch.equal(kept, usual)
            if memory_format(other) != torch.contiguous_format:
                fits = kept.is_contiguous(memory_format=LAST[x.dim()])
                assert fits, (target, kept.shape, kept.stride())
            weights = values(tuple(usual.shape), 2)
            wanted = torch.autograd.grad((usual * weights).sum(), part)[0]
            found = torch.autograd.grad((kept * last(weights)).sum(), other)[0]
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nprocs", [1, 3])
def test_movements_keep_the_format(run, nprocs, shape):
    run(check_moves, shape, nprocs=nprocs)


def check_model(name: str, arguments: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Outputs and gradients of a model with channels last; gradients lie as parameters do."""
    torch.manual_seed(0)
    alone = getattr(models, name)(*arguments).double()
    P = tessel.world().create_cartesian_topology_partition(
        [1, 1, tessel.world().size, *[1] * len(shape[3:])]
    )
    spread = tessel.nn.distribute_module(copy.deepcopy(alone).to(memory_format=LAST[len(shape)]), P)
    x, layout = values(shape, 1), Layout.balanced(P, shape)
    part = last(layout.local_part(x))
    for _ in range(3):  # gradients travel in buckets from the second call on
        for model in (alone, spread):
            model.zero_grad()
        expected, found = alone(x), spread(part)
        expected.square().sum().backward()
        if expected.dim() == len(shape):
            where = layout.resized(expected.shape)
            found.square().sum().backward()
            close("output", found, where.local_part(expected), 1e-10)
        else:
            found.square().sum().backward()
            close("output", found, expected, 1e-10)
        of_spread = dict(spread.named_parameters())
        for key, parameter in alone.named_parameters():
            close(key, of_spread[key].grad, parameter.grad, 1e-9)  # they grow from norm to norm
    strides: Any = [(p.grad.stride(), p.stride()) for p in spread.parameters() if 1 not in p.shape]
    assert all(grad == own for grad, own in strides), strides


@pytest.mark.parametrize("nprocs", [1, 2])
@pytest.mark.parametrize(
    "case", [("ResNet18", (4, 10), (2, 3, 64, 64)), ("UNet", (3, 4), (1, 1, 32, 16, 16))]
)
def test_models_with_channels_last(run, nprocs, case):
    run(check_model, *case, nprocs=nprocs)


def differing_formats() -> str:
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])
    model = tessel.nn.distribute_module(nn.Conv2d(3, 4, 3, padding=1), P)
    if tessel.world().rank:
        model.to(memory_format=torch.channels_last)
    x = Layout.balanced(P, (2, 3, 8, 8)).local_part(values((2, 3, 8, 8), 1)).float()
    model(x).sum().backward()
    with pytest.raises(ValueError, match="channels last in memory") as caught:
        model(x)  # the first call learns which gradients travel together
    return str(caught.value)


def test_workers_whose_parameters_lie_differently_raise(run):
    assert len(set(run(differing_formats, nprocs=2))) == 1
