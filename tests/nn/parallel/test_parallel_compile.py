"""Parallel layers inside of `torch.compile(fullgraph=True)`.

Tests `nn/parallel/sharded.py`, `core/graph.py`, `distributed/shards.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tessel
from compilers import SECONDS, needs_compiler
from tessel.distributed import get_parallel_dim
from tessel.nn import (
    ParallelCrossEntropyLoss,
    ParallelDropout,
    ParallelEmbedding,
    ParallelLinear,
    RegisterParallelDim,
)

Run = Callable[..., list[Any]]


class Words(nn.Module):
    """Ids to rows of a table, two layers in between, and the loss of classes in shards."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.table = ParallelEmbedding(7, 4, padding_idx=2, dim=dim)
        self.column = ParallelLinear(4, hidden, dim=-1)
        self.drop = ParallelDropout(0.0)
        self.row = ParallelLinear(hidden, 3, dim=0)
        self.head = ParallelLinear(3, 5, bias=False, dim=-1)
        self.loss = ParallelCrossEntropyLoss(torch.arange(1.0, 6.0), ignore_index=1)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        hidden = self.drop(2 * torch.tanh(self.column(self.table(ids))))
        assert hidden.size(0) == hidden.shape[0] == len(ids)
        return self.loss(self.head(self.row(hidden + hidden.sin()).relu()), target)


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.arange(rows) * 3 % 7, torch.arange(rows) * 2 % 5


def compare(fast: Any, model: nn.Module, plain: nn.Module, given: tuple[Tensor, Tensor]) -> None:
    for each, call in ((model, fast), (plain, plain)):
        each.zero_grad()
        each.found = call(*given)
        each.found.backward()
    torch.testing.assert_close(model.found, plain.found, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert type(p.grad) is Tensor, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-12)
    del model.found, plain.found


class Classes(nn.Module):
    """Without layers in between: for each function inductor runs a C++ compiler, for a second.

    With shards of one length both workers use the same programs.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.table = ParallelEmbedding(7, hidden, padding_idx=2, dim=dim)
        self.head = ParallelLinear(hidden, 6, bias=False, dim=-1)
        self.loss = ParallelCrossEntropyLoss(torch.arange(1.0, 7.0), ignore_index=1)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.table(ids))), target)


def train(
    dim: int,
    hidden: int,
    backend: str,
    is_brief: bool = False,
    make: Callable[[int, int], nn.Module] = Words,
) -> None:
    """Several steps, of which compiled code makes the same as the code that is not compiled."""
    torch._dynamo.reset()
    model: Any = make(dim, hidden).double()
    plain = copy.deepcopy(model)
    fast = torch.compile(model, fullgraph=True, backend=backend)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for rows in (4, 4) if is_brief else (4, 4, 6):
        compare(fast, model, plain, batch(rows))
        for each in optimizers:
            each.step()
    if is_brief:
        return
    model.row.weight.requires_grad_(False)
    plain.row.weight.requires_grad_(False)
    for each in (model, plain):
        each.zero_grad()
        each.eval()
    losses = [fast(*batch()), plain(*batch())]
    for each in losses:
        each.backward()
    assert model.row.weight.grad is None
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.table.weight.grad, plain.table.weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(fast(*batch()), plain(*batch()), rtol=1e-12, atol=1e-12)


# 5 classes and 4 columns on three workers are uneven; of 2 hidden values one worker has none; with
# other rows, without some gradients and without all it is the same code, which two workers have
@pytest.mark.slow
@pytest.mark.parametrize(("dim", "hidden", "nprocs"), [(0, 6, 1), (0, 2, 3), (1, 6, 2)])
def test_training(run: Run, dim: int, hidden: int, nprocs: int) -> None:
    run(train, dim, hidden, "aot_eager", nprocs != 2, nprocs=nprocs, timeout=SECONDS)


@pytest.mark.slow
@needs_compiler
def test_with_inductor(run: Run) -> None:
    run(train, 0, 6, "inductor", True, Classes, nprocs=2, timeout=SECONDS)


def with_older_torch() -> None:
    """Before 2.13 `torch.compiler.is_compiling()` is False while tensors without values travel."""
    kept = getattr(torch.compiler, "_compile_session_context", None)
    if kept is not None:
        torch.compiler._compile_session_context = nullcontext  # type: ignore[assignment]
    try:
        train(0, 6, "aot_eager", True)
    finally:
        if kept is not None:
            torch.compiler._compile_session_context = kept


@pytest.mark.slow
def test_with_older_torch(run: Run) -> None:
    run(with_older_torch, nprocs=2, timeout=SECONDS)


def said(call: Callable[[], Any]) -> str:
    """What a call raises, with what that was raised for: compilers put errors into their own."""
    found: list[str] = []
    each: BaseException | None = None
    try:
        call()
    except Exception as error:
        each = error
    while each is not None:
        found.append(f"{type(each).__name__}: {each}")
        each = each.__cause__ or each.__context__
    return " | ".join(found) or "nothing"


def shards() -> None:
    """A shard leaves compiled code as one, enters it again, and is one where no layer gave it."""
    torch._dynamo.reset()
    size = tessel.world().size
    column, row = ParallelLinear(4, 6, dim=-1).double(), ParallelLinear(6, 4, dim=0).double()
    x = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).sin()
    first = torch.compile(lambda x: torch.tanh(column(x)), fullgraph=True, backend="aot_eager")
    last = torch.compile(row, fullgraph=True, backend="aot_eager")
    h = first(x)
    assert get_parallel_dim(h) == 1 and isinstance(h, tessel.distributed.Shard)
    torch.testing.assert_close(h.full(), torch.tanh(column(x)).full())
    expected = row(torch.tanh(column(x)))
    torch.testing.assert_close(last(h), expected, rtol=1e-12, atol=1e-12)
    assert get_parallel_dim(h * 2 + column(x)) == 1  # beside one of code that is not compiled

    named = nn.Sequential(RegisterParallelDim(-1), row)
    part = x[:, : 6 // size].contiguous()
    fast = torch.compile(named, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(part), named(part), rtol=1e-12, atol=1e-12)


def test_shards_leave_and_enter(run: Run) -> None:
    run(shards, nprocs=2, timeout=SECONDS)


def mistakes() -> dict[str, str]:
    """Each of them raises on all workers, and what comes after it is right."""
    torch._dynamo.reset()
    model = Words(0, 6).double()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids, target = batch()
    found, rank = {"first": said(lambda: fast(ids, target))}, tessel.world().rank
    found["ids"] = said(lambda: fast(ids + 5 if rank else ids, target))
    found["target"] = said(lambda: fast(ids, target + 3 if rank else target))
    found["differs"] = said(lambda: fast(ids, target.flip(0) if rank else target))
    found["shape"] = said(lambda: fast(*batch(5 if rank else 4)))
    found["again"] = said(lambda: fast(ids, target))
    own, model.row.weight.data = model.row.weight.data, model.row.weight.data.clone()
    found["memory"] = said(lambda: fast(ids, target))
    model.row.weight.data = own
    found["last"] = said(lambda: fast(ids, target))
    model.drop.p = 0.5
    torch._dynamo.reset()
    found["drawing"] = said(lambda: fast(ids, target))
    return found


EXPECTED = {
    **dict.fromkeys(("first", "again", "last"), "nothing"),
    "ids": "is out of bounds on worker 1: the rows of the table",
    "target": "is out of bounds on worker 1: the classes",
    "differs": "all workers must have the same target",
    "shape": "recompile this call",
    "memory": "the memory of weight is that of another",
    "drawing": "draws random numbers cannot be compiled",
}


@pytest.mark.slow
def test_mistakes_raise_on_all_workers(run: Run) -> None:
    for found in run(mistakes, nprocs=2, timeout=SECONDS):
        for name, text in EXPECTED.items():
            assert text in found[name], (name, found[name])
