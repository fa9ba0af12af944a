"""Random trees of operators of random shapes: what they do equals what their matrices do.

Cases are drawn here, many at a time, from seeded generators, and sent to the workers; the draws are
the same in every run. A failure prints its case.

Tests `operators/algebra.py`, `operators/tasks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from covering import repeats
from operator_cases import (
    Node,
    Spec,
    build,
    check_local,
    check_spreads,
    leaves,
    plan_of,
    random_spec,
    random_spread,
)

Run = Callable[..., list[Any]]
LOCAL = 150  # trees in one process
SPREAD = {1: 30, 2: 70, 3: 80, 4: 120}  # trees on so many workers
BATCH = 50  # in one call to the workers


@cache
def local_trees() -> list[Spec]:
    rng = Random(0)
    return [random_spec(rng, torch.float64, rng.randint(1, 3), 3) for _ in range(LOCAL)]


@pytest.mark.slow
def test_random_trees_are_their_matrices() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number, spec in enumerate(local_trees()[: repeats(LOCAL)]):
        try:
            check_local(spec, number)
        except AssertionError as error:
            raise AssertionError(f"{spec}: {error}") from None
    torch.set_num_threads(threads)


def kinds(spec: Spec) -> set[str]:
    """All that a tree is made of."""
    if not isinstance(spec, Node):
        return {spec.name}
    return {spec.kind}.union(*(kinds(child) for child in spec.children))


def test_random_trees_are_of_every_kind() -> None:
    """The draws reach what they shall reach."""
    trees = local_trees()
    found = set[str]().union(*(kinds(spec) for spec in trees))
    assert found == {
        *("Identity", "Matrix", "Diagonal", "DFT", "DCT", "DST", "Restriction", "Multilinear"),
        *("kron", "compose", "add", "subtract", "scale", "H", "inv"),
    }
    spaces = {
        (build(spec, {}).domain.is_complex, build(spec, {}).codomain.is_complex) for spec in trees
    }
    assert len(spaces) == 4, "real and complex on both sides"
    assert any(len(leaves(spec)) > 6 for spec in trees)


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", SPREAD)
def test_random_trees_on_random_partitions(run: Run, nprocs: int) -> None:
    rng = Random(nprocs)
    cases = [random_spread(rng, nprocs) for _ in range(repeats(SPREAD[nprocs]))]
    for start in range(0, len(cases), BATCH):
        some = cases[start : start + BATCH]
        assert run(check_spreads, some, nprocs=nprocs) == [len(some)] * nprocs


def count_plans(cases: list[Any]) -> tuple[int, int]:
    """How many of them move something, and how many end elsewhere than they began."""
    plans = [plan_of(case.distribute(build(case.spec, {}))) for case in cases]
    moving = sum(plan.num_transfers > 0 for plan in plans)
    elsewhere = sum(plan.source.cuts != plan.target.cuts for plan in plans)
    return moving, elsewhere


def test_random_partitions_make_tensors_move(run: Run) -> None:
    rng = Random(4)
    cases = [random_spread(rng, 4) for _ in range(40)]
    ((moving, elsewhere), *_) = run(count_plans, cases, nprocs=4)
    assert moving >= 10 and elsewhere >= 6
