"""Process groups are made by constructors and by `prepare`, never by reading a property.

Tests `core/partition.py`, `core/linop.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from tessel import Layout, LinearOperator, Move, Partition, transport
from tessel.core.agreement import agree, tell
from tessel.testing import check_adjoint

Run = Callable[..., list[Any]]


class Twice(LinearOperator):
    """A user's operator that is made of another, and says nothing of groups."""

    def __init__(self, move: Move) -> None:
        self.domain, self.codomain, self.move = move.domain, move.codomain, move

    def _apply(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.move._apply(x)

    def _apply_adjoint(self, y: torch.Tensor) -> torch.Tensor:
        return 2 * self.move.H._apply(y)


def copies(alone: bool) -> list[float]:
    """A copy that one worker asks for its group, and that all call."""
    P = tessel.world()
    rows = Layout.balanced(P, (6,))
    move = Move(rows, Layout.whole(P, (6,)))
    found = []
    for operator in (move, Twice(move), move @ Move(rows, rows)):
        again = copy.deepcopy(operator)
        if not alone or P.rank == 0:
            with pytest.raises(RuntimeError, match="call `prepare"):
                again.group  # noqa: B018
        found.append(float(again(rows.local_part(torch.arange(6.0))).sum()))
        assert again.group.workers == P.ranks
        check_adjoint(again)
        assert copy.deepcopy(again).prepare() is again.group
    return found


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_copy_makes_its_group_in_its_first_call(run: Run, nprocs: int, alone: bool) -> None:
    assert run(copies, alone, nprocs=nprocs, timeout=40) == [[15.0, 30.0, 15.0]] * nprocs


def pickled_partition() -> bytes:
    return pickle.dumps(tessel.world().create_partition_inclusive([2, 0]))


def loaded(payload: bytes) -> list[Any]:
    """A loaded partition has no group that reading could make, and what it is used for makes it."""
    found = []
    for use in (tell, lambda P, x: agree(P, "a call", numbers=[x]).numbers):
        P = pickle.loads(payload)
        with pytest.raises(RuntimeError, match="call `prepare"):
            P.group  # noqa: B018
        told = use(P, P.rank) if P.active else P.prepare()
        found.append(told if P.active else None)
        assert P.group.workers == (0, 2) and copy.deepcopy(P).group is P.group
    return found


def test_a_loaded_partition_makes_its_group_when_it_is_used(run: Run) -> None:
    payload = run(pickled_partition, nprocs=3)[0]
    run(copies, False, nprocs=2)  # so that the job of three below is another
    first, none, last = run(loaded, payload, nprocs=3)
    assert first == last == [{0: 1, 2: 0}, {0: (1,), 2: (0,)}] and none == [None, None]


def kept_over_jobs() -> list[bool]:
    """A partition that was made before this process left its job, and what it is after that."""
    P = Partition((0,), (1,))
    before = P.group
    transport.leave()
    return [P.group is before, P.prepare() is before, P.group is P.prepare()]


@pytest.mark.slow
def test_a_partition_gets_another_group_in_another_job(run: Run) -> None:
    assert run(kept_over_jobs, nprocs=1) == [[True, False, True]]
