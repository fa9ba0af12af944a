"""Random programs of views and changes in place: values and derivatives of torch, or an error.

A silent wrong number would be one that torch changes by way of a view, and that is a copy here.

Tests `tensor/aliases.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tessel
from covering import repeats
from view_programs import run_programs

Run = Callable[..., list[Any]]
COUNT = 60  # programs; `run_programs(first, count)` tries others


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_random_programs_of_views(run: Run, nprocs: int) -> None:
    """All workers raise alike, and a step that raised has changed nothing."""
    results = run(run_programs, 1000 * nprocs, repeats(COUNT), nprocs=nprocs, timeout=100)
    for program in zip(*results, strict=True):
        assert not any(wrong for wrong, _ in program), program[0][0]
        # torch says in errors which shapes parts have
        raised = {tuple(each[:70] for each in errors) for _, errors in program}
        assert len(raised) == 1, raised


def rows(*lengths: int) -> Any:
    """A tensor of three rows and four columns, split along the rows."""
    values = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).sin()
    P = tessel.world().create_cartesian_topology_partition([tessel.world().size, 1])
    return tessel.spread(values, tessel.Layout.from_lengths(P, [list(lengths), [4]]))


def give_itself() -> None:
    """What torch gives itself where nothing is to be done, it is here, too."""
    x = rows(3, 0, 0) * 1
    for name in ("double", "cpu", "conj", "resolve_conj", "positive"):
        assert getattr(x, name)() is x, name
    assert x.real is x and x.flatten(1) is x and F.dropout(x, training=False) is x
    taken = x[1:]
    x.to(torch.float64).add_(1)
    with pytest.raises(ValueError, match="take the view after the change"):
        taken.sum()
    z: Any = torch.complex(x, x)
    z.real.mul_(2)
    assert torch.equal(z.full().real, 2 * x.full())


def note_copies_of_copies() -> None:
    """Copies of what is gone are outdated with what they are of."""
    x = rows(1, 1, 1) * 1
    two = x[1:][:, 1:]
    x.add_(1)
    with pytest.raises(ValueError, match="take the view after the change"):
        two.sum()
    # of a worker with one row, strides do not say whether torch copies
    y = x.t().contiguous()
    y.mul_(2)
    with pytest.raises(ValueError, match="take the view after the change"):
        x.sum()


def leave_data_alone() -> None:
    """What is changed by way of `data` autograd does not hear of."""
    x = rows(1, 0, 2).requires_grad_()
    y = (x * 1).relu()
    z = y.sum()
    y.data.sub_(0.1)  # torch has the values of now in the derivative
    z.backward()
    assert torch.equal(x.grad.full(), (y.full() > 0).double())
    kept = (x * 1).detach()
    of_kept = kept.data
    kept.mul_(x)
    assert kept.requires_grad and not of_kept.requires_grad


def write_what_overlaps() -> None:
    """Workers with values and those without do alike."""
    x, alone = rows(3, 0, 0) * 1, rows(3, 0, 0).full().clone()
    x[:] = x[:, 1:2]
    alone[:] = alone[:, 1:2].clone()
    assert torch.equal(x.full(), alone)
    x.add_(x[:, :1])
    alone.add_(alone[:, :1].clone())
    assert torch.equal(x.full(), alone)


def derive_twice() -> None:
    """Where a worker has nothing of what is changed, derivatives of second order are the same."""
    for split in (False, True):
        x = (rows(1, 1, 1) if split else rows(1, 1, 1).full()).requires_grad_()
        y = x * x * 0.5
        y[2:, 1:2] *= 3.0
        view = y.view(3, 2, 2)
        view.mul_(0.5)
        (first,) = torch.autograd.grad(y.sum() + view.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * 2).sum(), x)
        if not split:
            expected = second
    assert torch.allclose(second.full(), expected)


def change_shapes_in_place() -> None:
    """A worker with nothing of a tensor knows that it has another shape, and views of its own."""
    for lengths in ((1, 1, 1), (2, 1, 0), (0, 0, 3)):
        x, alone = rows(*lengths).requires_grad_(), rows(3, 0, 0).full().requires_grad_()
        found = []
        for each in (x, alone):
            y = each * each
            view = y.view(3, 4, 1)
            y.unsqueeze_(0)
            view.mul_(2)
            y.mul_(3)
            loss = (y**2).sum() + view.sin().sum()
            (first,) = torch.autograd.grad(loss, each, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), each)
            found.append((y, view, first, second))
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine.full(), theirs, rtol=1e-12, atol=1e-12)


def write_unrecorded() -> None:
    """What `copy_` writes without a graph leaves a view in the one that it was in."""
    for lengths in ((1, 1, 1), (2, 1, 0), (0, 0, 3)):
        x, alone = rows(*lengths).requires_grad_(), rows(3, 0, 0).full().requires_grad_()
        found = []
        for each in (x, alone):
            y = each * each
            view = y[1:]
            with torch.no_grad():
                view.copy_(each[:2])
            assert view.requires_grad
            found.append((view, y, *torch.autograd.grad((view**2).sum() + y.sin().sum(), each)))
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(mine.full(), theirs)


def need_gradients_alike() -> None:
    """Views that are taken without a graph, also of nothing."""
    x = rows(2, 1, 0).requires_grad_() * 1
    with torch.no_grad():
        assert x.view(12).requires_grad and x[:, :2].requires_grad
        assert torch.einsum("ij->ji", x).requires_grad


def write_itself() -> None:
    """A tensor into all of itself, which torch refuses where strides differ, of values alone."""
    P = tessel.world().create_cartesian_topology_partition([1, 3])
    values = torch.arange(5.0).view(5, 1)
    x = tessel.spread(values, tessel.Layout.from_lengths(P, [[5], [1, 0, 0]])).transpose(0, 1)
    x[:] = x
    assert torch.equal(x.full(), values.t())
    x[[0]] = x
    x[:, torch.tensor([True] * 5)] = x
    assert torch.equal(x.full(), values.t())


def index_by_tensors_of_one_number() -> None:
    """Torch takes them for numbers, of which it has views."""
    values, one = torch.arange(12.0).view(3, 4), torch.tensor(1)
    P = tessel.world().create_cartesian_topology_partition([3, 1])
    keys = (one, (one, one), (slice(1, 3), one - 3), np.array(1), (one.to(torch.int8), None))
    for key in (*keys, tessel.spread(one, tessel.Layout.whole(P, (), shared=True))):
        plain = key.full() if isinstance(key, tessel.Tensor) else key
        x, alone = tessel.spread(values, P), values.clone()
        x[key].copy_(torch.full_like(alone[plain], 7.0))
        alone[plain].copy_(torch.full_like(alone[plain], 7.0))
        x[one] += 0.5
        alone[one] += 0.5
        assert torch.equal(x.full(), alone), plain
        taken = x[plain] if isinstance(plain, torch.Tensor) else x[one]
        x.add_(1)
        with pytest.raises(ValueError, match="take the view after the change"):
            taken.sum()


OF_THEIR_OWN: tuple[Callable[[Any], Any], ...] = (
    *(partial(F.pixel_shuffle, upscale_factor=k) for k in (1, 2)),
    *(partial(F.pixel_unshuffle, downscale_factor=k) for k in (1, 3)),
    *(lambda x, k=k: F.channel_shuffle(x, k) for k in (1, 2, 4)),
    lambda x: F.interpolate(x, size=(3, 3)),
    lambda x: F.interpolate(x, scale_factor=(1, 2), mode="bilinear"),
    lambda x: torch.linalg.matrix_power(x, 1),
    lambda x: x.take(torch.tensor(5)),
)


def give_tensors_of_their_own() -> None:
    """What torch copies also where all values stay: a change of it leaves the operand alone."""
    values = torch.arange(36.0, dtype=torch.float64).view(1, 4, 3, 3)
    P = tessel.world()
    for k, function in enumerate(OF_THEIR_OWN):
        expected = function(values).mul_(2)
        for dim in range(4):
            axes = [0 if d == dim else None for d in range(4)]
            x = tessel.spread(values, tessel.Layout.split(P, (1, 4, 3, 3), axes)).requires_grad_()
            y = function(x * 1)
            z = y.detach().clone()
            y.mul_(2)
            assert torch.equal(y.full(), expected) and torch.equal(y.full(), 2 * z.full()), (k, dim)
            y.sum().backward()
            with torch.no_grad():
                function(x).mul_(2)
            assert torch.equal(x.full(), values), (k, dim)
    x = tessel.spread(torch.ones(()), tessel.Layout.whole(P, (), shared=True))
    x.sum_to_size(()).mul_(2)
    assert float(x) == 1


CHECKS = (
    *(index_by_tensors_of_one_number, give_tensors_of_their_own),
    *(give_itself, note_copies_of_copies, leave_data_alone, write_what_overlaps, derive_twice),
    *(change_shapes_in_place, write_unrecorded, need_gradients_alike, write_itself),
)


@pytest.mark.parametrize("check", CHECKS)
def test_views(run: Run, check: Callable[[], None]) -> None:
    run(check, nprocs=3, timeout=60)
