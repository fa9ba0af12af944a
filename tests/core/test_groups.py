"""Process groups are made by constructors and by `prepare`, never by reading a property."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tessel
from tessel import Layout, LinearOperator, Move
from tessel.testing import check_adjoint

Run = Callable[..., list[Any]]
SOURCE = Path(tessel.__file__).parent


def test_no_statement_only_reads_an_attribute() -> None:
    """Which would be for what reading it does besides."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            reads = isinstance(node, ast.Expr) and isinstance(node.value, ast.Attribute)
            assert not reads, f"{path}:{getattr(node, 'lineno', 0)}"


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
            with pytest.raises(RuntimeError, match="call prepare"):
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
