"""The memory of tensors that `count_memory` counts, and what models need on each worker.

Tests `testing/memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import models
import tessel
from tessel.testing import count_memory


def test_what_is_alive_at_once_counts() -> None:
    with count_memory() as memory:
        x = torch.ones(100)
        y = x.view(10, 10)[2:] + 1
        assert memory.current == 400 + 320
        del x, y
        assert memory.current == 0
    assert memory.peak == 720


def test_what_was_there_before_does_not_count() -> None:
    x = torch.ones(100, requires_grad=True)
    with count_memory() as memory:
        x.view(10, 10)
        assert memory.current == 0
        x.square().sum().backward()
    assert memory.current == 400  # the gradient


def test_what_is_freed_while_it_stays_does_not_count() -> None:
    """As `fully_shard` frees the parameters that a layer has gathered."""
    before = torch.ones(100)
    before.untyped_storage().resize_(0)
    with count_memory() as memory:
        x = torch.ones(100)
        storage = x.untyped_storage()
        storage.resize_(0)
        assert memory.current == 0
        storage.resize_(800)
        before.untyped_storage().resize_(400)
        assert memory.current == 1200
        del x, storage, before
        assert memory.current == 0
    assert memory.peak == 1200
    assert "resize_" not in vars(torch.UntypedStorage)  # but that which it inherits


def peak_of_a_step(name: str, args: tuple[int, ...], shape: tuple[int, ...]) -> int:
    P = tessel.world().create_cartesian_topology_partition(
        [1, 1, tessel.world().size, *[1] * (len(shape) - 3)]
    )
    model = tessel.nn.distribute_module(getattr(models, name)(*args), P)
    x = torch.ones(tessel.Layout.balanced(P, shape).local_shape)
    with count_memory() as memory:
        model(x).square().mean().backward()
    return memory.peak


@pytest.mark.limit(300)
def test_four_workers_need_a_third_of_one_process(run: Callable[..., list[int]]) -> None:
    """At a size where activations dominate, which parameters, whole on all workers, do not."""
    case = ("UNet", (3, 8), (1, 1, 48, 32, 32))
    (alone,) = run(peak_of_a_step, *case, nprocs=1, timeout=100)
    spread = run(peak_of_a_step, *case, nprocs=4, timeout=100)
    assert max(spread) <= 0.35 * alone
