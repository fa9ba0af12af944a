"""What does not fit raises on every worker, and never gives other numbers.

Tests `operators/algebra.py`, `operators/parameters.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tessel
from operator_cases import text_of
from tessel import (
    ParDFT,
    ParDiagonal,
    ParIdentity,
    ParMatrix,
    ParMultilinear,
    ParReduce,
    ParRestriction,
    Partition,
    distribute,
    init,
    kron,
)
from tessel.models import FNO
from tessel.operators.tasks import count_flops

Run = Callable[..., list[Any]]
T, C = torch.float64, torch.complex128


def me() -> int:
    return tessel.world().rank or 0


def shapes_differ() -> str:
    return text_of(lambda: ParReduce(T, (3,)) * torch.ones(3 + me(), dtype=T))


def shapes_differ_in_a_product() -> str:
    A = ParMatrix(T, 2, 3)
    theta = init(A)
    return text_of(lambda: (ParReduce(T) @ A)(theta) * torch.ones(3 + me(), dtype=T))


def batches_differ() -> str:
    return text_of(lambda: ParReduce(T, (3,)) * torch.ones(3, 2 * (1 - me()), dtype=T))


def own_of_another_order() -> str:
    D = ParDiagonal(T, 7)
    list(distribute(D, Partition((0, 1), (2,))).parameters())
    other = distribute(D, Partition((1, 0), (2,)))
    x = torch.ones(other.layout_in.local_shape, dtype=T)
    return text_of(lambda: other * x)


def theta_of_another_order() -> str:
    D = ParDiagonal(T, 6)
    theta = init(distribute(D, Partition((0, 1), (2,))))
    other = distribute(D, Partition((1, 0), (2,)))
    return text_of(lambda: other(theta) * torch.ones(3, dtype=T))


def theta_elsewhere() -> str:
    S = distribute(ParDiagonal(T, 6), [2])
    theta = init(S).to("meta")
    return text_of(lambda: S(theta) * torch.ones(3, dtype=T))


def other_ranges() -> str:
    S = distribute(ParRestriction(T, 6, [(me(), 3 + me())]), [2])
    return text_of(lambda: S * torch.ones(3, dtype=T))


def no_tensor_on_one() -> str:
    F: Any = distribute(ParDFT(C, 6), [2])  # workers also agree on its library
    return text_of(lambda: F.apply(torch.ones(3, dtype=C) if me() else None))


def no_grad_on_one() -> str:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2])
    model = FNO(P, 1, 1, width=2, modes=2, blocks=1, dtype=T)
    with torch.set_grad_enabled(me() == 0):
        return text_of(lambda: model(torch.ones(1, 1, 8, dtype=T)))


def no_grad_on_one_layer() -> str:
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2])
    layer = tessel.nn.DistributedConv1d(P, 1, 1, 3).double()
    with torch.set_grad_enabled(me() == 0):
        return text_of(lambda: layer(torch.ones(1, 1, 8, dtype=T)))


@pytest.mark.parametrize(
    "attempt",
    [
        shapes_differ,
        shapes_differ_in_a_product,
        batches_differ,
        own_of_another_order,
        theta_of_another_order,
        theta_elsewhere,
        other_ranges,
        no_tensor_on_one,
        no_grad_on_one,
        no_grad_on_one_layer,
    ],
    ids=lambda f: f.__name__,
)
def test_raises_on_all(run: Run, attempt: Callable[[], str]) -> None:
    found = run(attempt, nprocs=2, timeout=30)
    assert "no error" not in found


def singular_on_one() -> list[bool]:
    W = ParMultilinear(C, 2, 2, [4])
    S = distribute(W.inv, [1, 2])
    theta = init(S, requires_grad=False)
    if me() == 1:
        theta[W].zero_()
    y = S(theta) * torch.ones(2, 2, dtype=C)
    y = distribute(kron(ParIdentity(C, 2), ParDFT(C, 4)), [1, 2]) * y
    return [bool(y.isfinite().all())]


def test_a_singular_matrix_on_one_worker_ends_no_other(run: Run) -> None:
    assert run(singular_on_one, nprocs=2, timeout=30) == [[False], [False]]


def drawn_before() -> list[float]:
    torch.manual_seed(me())
    A = ParMatrix(T, 1, 1)
    list(A.parameters())
    S = distribute(A)
    list(S.parameters())
    return (S * torch.ones(1, dtype=T)).detach().tolist()


def test_own_parameters_become_those_of_all(run: Run) -> None:
    first, second = run(drawn_before, nprocs=2)
    assert first == second


def test_bound_parameters_are_the_operators() -> None:
    A, B = ParMatrix(T, 2, 3), ParMatrix(T, 4, 2)
    theta = init(A)
    assert list(A(theta).parameters()) == list(theta.values())
    with pytest.raises(ValueError, match="bound"):
        A(theta).module()
    rest, y = init(B), torch.ones(4, dtype=T)
    partly = (B @ A(theta)).H
    assert torch.allclose(partly(rest) * y, A.H(theta) * (B.H(rest) * y))
    with pytest.raises(ValueError, match="takes a tensor"):
        (B @ A(theta))(None)


def test_a_sum_does_not_hide_a_reduction() -> None:
    S = ParReduce(T, (4,)) + ParIdentity(T, 4)
    with pytest.raises(ValueError, match="sums over workers"):
        distribute(S, [1])
    with pytest.raises(ValueError, match="sums over workers"):
        tessel.best_partition(S, 2)


def test_the_least_is_computed() -> None:
    """Of two matrices the one that shrinks the tensor more for each operation comes first."""
    for sizes in (((50, 100), (3, 4)), ((3, 4), (50, 100)), ((9, 3), (2, 8))):
        A = kron(*(ParMatrix(T, m, n) for m, n in sizes))
        tasks = [task for group in A.order for task in group]
        counts = [count_flops(each, A.domain.shape) for each in (tasks, tasks[::-1])]
        assert counts[0] == min(counts)


def test_operators_can_be_summed() -> None:
    A, B = ParRestriction(T, 3, [(0, 2)]), ParRestriction(T, 3, [(1, 3)])
    assert (sum([A, B]) * torch.tensor([1.0, 2.0, 4.0], dtype=T)).tolist() == [3.0, 6.0]


def test_an_assigned_state_is_the_operators() -> None:
    A = ParMatrix(T, 2, 3)
    module = A.module()
    state = {name: value + 1 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    x = torch.ones(3, dtype=T)
    assert torch.equal(module(x), A * x)
