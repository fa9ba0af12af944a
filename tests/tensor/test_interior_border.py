"""Max pools in pieces, which copy no part.

Tests `tensor/interior_border.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from covering import repeats
from parity import Case, check_case
from tessel import Layout
from tessel.tensor import interior_border
from tessel.testing import count_memory, count_traffic

Run = Callable[..., list[Any]]


def random_cases(count: int, seed: int) -> list[Case]:
    """Max pools of all settings over slabs."""
    chance = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        D = chance.choice([1, 2, 2, 3])
        grid = [1] * (2 + D)
        grid[chance.randrange(2, 2 + D)] = chance.choice([2, 3, 4])
        kernel = [chance.randint(1, 4) for _ in range(D)]
        dilation = [chance.randint(1, 2) for _ in range(D)]
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        settings = {
            "stride": tuple(chance.randint(1, 3) for _ in range(D)),
            "padding": tuple(chance.randint(0, span // 2) for span in spans),
            "dilation": tuple(dilation),
            "ceil_mode": chance.random() < 0.5,
        }
        shape = (2, 2, *(chance.randint(8, 40 if D == 1 else 14) for _ in range(D)))
        try:
            getattr(torch.nn, f"MaxPool{D}d")(tuple(kernel), **settings)(torch.zeros(shape))
        except RuntimeError:
            continue
        seed = chance.randint(0, 999)
        given = tuple(settings.items())
        cases.append(Case(f"MaxPool{D}d", (tuple(kernel),), tuple(grid), shape, given, seed=seed))
    return cases


def check_interior_and_border(cases: list[Case]) -> int:
    """All cases, in pieces wherever that is possible; how many were."""
    count = 0
    apply, before = interior_border.InteriorBorderPool.apply, interior_border.LEAST_VALUES

    def counted(self: interior_border.InteriorBorderPool, *args: Any) -> Any:
        nonlocal count
        count += 1
        return apply(self, *args)

    interior_border.LEAST_VALUES = 0
    interior_border.InteriorBorderPool.apply = counted  # type: ignore[method-assign]
    try:
        for case in cases:
            check_case(case)
    finally:
        interior_border.LEAST_VALUES = before
        interior_border.InteriorBorderPool.apply = apply  # type: ignore[method-assign]
    return count


@pytest.mark.parametrize("seed", range(repeats(3)))
def test_pieces_give_what_torch_gives(run: Run, seed: int) -> None:
    counts = run(check_interior_and_border, random_cases(80, seed), nprocs=4, timeout=100)
    assert counts[0] >= 20


def pool_a_large_part() -> tuple[int, int, int, int]:
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])
    shape = (1, 16, 512, 256)
    x = torch.ones(Layout.balanced(P, shape).local_shape, requires_grad=True)
    layer = tessel.nn.DistributedMaxPool2d(P, 3, 2, 1)
    with count_memory() as memory, count_traffic() as traffic:
        y = layer(x)
    assert y.requires_grad
    return memory.current, x.nbytes, traffic.messages, traffic.bytes_sent


def test_a_part_is_not_kept_twice_and_one_row_travels(run: Run) -> None:
    first, last = run(pool_a_large_part, nprocs=2)
    for kept, part, _, _ in (first, last):
        assert kept < part  # the output, a quarter, its places, twice that, and a row
    assert first[2:] == (1, 16 * 256 * 4) and last[2:] == (0, 0)
