"""What workers hear of each other, and that all of them raise or none does.

Tests `core/agreement.py`, `core/checksum.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from tessel.core.agreement import Agreement, Signature, TensorMeta, agree
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]


def rank() -> int:
    found = tessel.world().rank
    assert found is not None
    return found


def heard(num_tensors: int, numbers: int) -> tuple[Any, ...]:
    P, mine = tessel.world(), rank()
    tensors = [torch.empty(mine + 1, k) for k in range(num_tensors)]
    with count_traffic() as traffic:
        found = agree(P, "a call", *tensors, numbers=[10 * mine + k for k in range(numbers)])
    kinds = {(meta.dtype, meta.device, meta.needs_grad) for _, meta in found.tensors}
    assert kinds <= {(torch.float32, "cpu", False)}
    return [shapes for shapes, _ in found.tensors], found.numbers, traffic.agreements


@pytest.mark.parametrize(
    ("num_tensors", "numbers", "exchanges"),
    [(0, 0, 1), (0, 2, 1), (1, 0, 1), (3, 14, 1), (4, 0, 1), (4, 1, 2), (5, 3, 2), (9, 60, 4)],
)
def test_all_hear_all(run: Run, num_tensors: int, numbers: int, exchanges: int) -> None:
    shapes = [{0: (1, k), 1: (2, k), 2: (3, k)} for k in range(num_tensors)]
    said = {w: tuple(10 * w + k for k in range(numbers)) for w in range(3)}
    assert run(heard, num_tensors, numbers, nprocs=3) == [(shapes, said, exchanges)] * 3
    alone = [{0: (1, k)} for k in range(num_tensors)]
    assert run(heard, num_tensors, numbers, nprocs=1) == [(alone, {0: said[0]}, 0)]


def of_some() -> tuple[Any, ...]:
    """Of a worker that gives nothing a signature stands for a tensor, and does not count."""
    mine = Signature.of(torch.ones(2)) if rank() < 2 else Signature((), None, "cpu")
    [(shapes, meta)], _ = agree(tessel.world(), "a call", mine, givers=[0, 1])
    Q = tessel.world().create_partition_inclusive([2, 0])
    outside, numbers = agree(Q, "another", numbers=[rank()])
    return shapes, meta.dtype, outside, numbers


def test_who_counts_and_who_is_outside(run: Run) -> None:
    first, second, third = run(of_some, nprocs=3)
    shapes = {0: (2,), 1: (2,)}
    assert first == third == (shapes, torch.float32, [], {0: (0,), 2: (2,)})
    assert second == (shapes, torch.float32, [], {})


def refused(case: str) -> str:
    """What one of three workers does otherwise."""
    x: Any = torch.ones(2, 3)
    call, identity, odd = "a call", "", rank() == 1
    if case == "another call" and odd:
        call = "another call"
    elif case == "identity" and odd:
        identity = "a call of another kind"
    elif case == "dtype" and odd:
        x = x.double()
    elif case == "dimensions" and odd:
        x = x[0]
    elif case == "no tensor" and odd:
        x = None
    elif case == "many dimensions":
        x = torch.ones([1] * 11)
    elif case == "gradient" and odd:
        x.requires_grad_()
    with torch.set_grad_enabled(case != "gradient" or odd), pytest.raises(ValueError) as error:
        agree(tessel.world(), call, x, names=["the input"], identity=identity)
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("another call", "worker 1 calls the input of another call"),
        ("identity", "all workers must make the same calls"),
        ("dtype", "the input of a call: the dtype differs between workers: torch.float32 on wor"),
        ("dimensions", "the input of a call: the number of dimensions differs between workers"),
        ("no tensor", "the input of a call: worker 1 passed no tensor"),
        (
            "many dimensions",
            "the input of a call: tensors of at most 10 dimensions can be moved, got 11",
        ),
        ("gradient", "workers [1] need a gradient, but workers [0, 2] run under torch.no_grad()"),
    ],
)
def test_all_raise_the_same(run: Run, case: str, text: str) -> None:
    (found,) = {*run(refused, case, nprocs=3)}
    assert text in found


def concluded() -> tuple[list[Any], int]:
    """A conclusion is drawn once for the same signatures, and anew for others."""
    drawn = []

    def conclude(shapes: dict[int, Any], meta: TensorMeta) -> Any:
        drawn.append(shapes)
        return sum(shape[0] for shape in shapes.values()), meta.needs_grad

    agreement = Agreement(tessel.world().group, "a call", [0, 1], conclude)
    tensors = [torch.ones(2), torch.zeros(2), torch.ones(rank()), torch.ones(2)]
    needs = torch.ones(2, requires_grad=True)
    found = [agreement.agree_on(each) for each in (*tensors, Signature.of(tensors[0]), needs)]
    return found, len(drawn)


def test_conclusions_are_drawn_once(run: Run) -> None:
    numbers = [(4, False), (4, False), (1, False), (4, False), (4, False), (4, True)]
    assert run(concluded, nprocs=3) == [(numbers, 3)] * 3
