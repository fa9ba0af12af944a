"""Workers that do not do the same: nothing hangs for good, and no number is silently wrong.

Tests `transport/group.py`, `core/agreement.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tessel
from tessel import Layout, LinearOperator, Move, WorkerLost, nn

Run = Callable[..., list[Any]]
SECONDS = 30


def leave_out_one_output() -> Tensor | None:
    """The loss of worker 1 leaves out the output of the second movement."""
    P = tessel.world()
    first, second = nn.AllSumReduce(P, [0]), nn.AllSumReduce(P, [0])
    x, z = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    y, unused = first(x), second(z)
    loss = (10 * y).sum() + (1000 * unused.sum() if P.rank != 1 else 0)
    loss.backward()
    return x.grad


def test_a_backward_pass_is_not_answered_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSEL_TIMEOUT", "3")
    with pytest.raises(WorkerLost):
        tessel.launch(leave_out_one_output, 3, timeout=SECONDS)


def checkpoint_with_one_gradient() -> Tensor | None:
    P = tessel.world()
    layer = nn.AllSumReduce(P, [0])
    weight = torch.ones(3, requires_grad=P.rank == 0)
    y = checkpoint(lambda x, w: layer(x * w), torch.ones(3), weight, use_reentrant=False)
    y.sum().backward()
    return weight.grad


def test_checkpoint_when_one_worker_needs_a_gradient(run: Run) -> None:
    first, second = run(checkpoint_with_one_gradient, nprocs=2, timeout=SECONDS)
    assert first.tolist() == [2.0, 2.0, 2.0] and second is None


def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def compile_a_copy() -> Tensor:
    return compiled(copy.deepcopy(nn.AllSumReduce(tessel.world(), [0])))(torch.ones(2))


def test_a_copy_can_be_compiled(run: Run) -> None:
    assert [y.tolist() for y in run(compile_a_copy, nprocs=2, timeout=SECONDS)] == [[2.0, 2.0]] * 2


def compile_other_dtypes() -> str:
    P = tessel.world()
    whole = Layout.whole(P, (4,))
    move = Move(whole, whole)
    try:
        compiled(lambda x: move(x) * 2)(torch.ones(4, dtype=[torch.float32, torch.int32][P.rank]))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_compiled_move_agrees(run: Run) -> None:
    texts = run(compile_other_dtypes, nprocs=2, timeout=SECONDS)
    assert all("the dtype differs between workers" in text for text in texts), texts


class Triple(LinearOperator):
    def __init__(self, layout: Layout) -> None:
        self.domain = self.codomain = layout

    def _apply(self, x: Tensor) -> Tensor:
        return 3 * x

    _apply_adjoint = _apply


def compile_own_operator() -> None:
    whole = Layout.whole(tessel.world(), (4,))
    product = Move(whole, whole) @ Triple(whole)
    gradients = []
    for function in (lambda x: product(x).sin(), compiled(lambda x: product(x).sin())):
        x = torch.arange(4.0, requires_grad=True)
        function(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_own_operators_compile(run: Run) -> None:
    run(compile_own_operator, nprocs=2, timeout=SECONDS)


def exchange_layouts_of_other_axes() -> str:
    P = tessel.world().create_cartesian_topology_partition([2, 1])
    axes = (0, 1) if P.rank == 0 else (1, 0)
    layout = Layout.split(P, (4, 4), axes)
    try:
        Move(layout, layout)(torch.ones(layout.local_shape))
    except ValueError as error:
        return str(error)
    return ""


def test_layouts_that_differ_in_their_axes_are_told_apart(run: Run) -> None:
    first, second = run(exchange_layouts_of_other_axes, nprocs=2, timeout=SECONDS)
    assert first == second and "the same calls" in first and "along axes (1, 0)" in first
