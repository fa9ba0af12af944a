"""TESSEL_CHECK and `check_calls`: workers that do different things learn so, on all of them.

Tests `tensor/comparing.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessel
from programs import run_programs
from tessel import Layout, WorkerLost
from tessel.tensor import call
from tessel.tensor.comparing import compared
from tessel.testing import check_calls, count_traffic

Run = Callable[..., list[Any]]
SAME = "all workers must make the same calls in the same order: "


def rows(dtype: torch.dtype = torch.float64) -> Any:
    """A spread tensor whose rows are split."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([P.size, 1])
    return tessel.spread(torch.arange(12, dtype=dtype).reshape(6, 2), grid)


def mine(*choices: Any) -> Any:
    """What this worker does: one thing on the last, another one on all others."""
    P = tessel.world()
    return choices[P.rank == P.size - 1]


def other_function() -> Any:
    x = rows()
    return mine(x.relu, x.exp)()


def other_dim() -> Any:
    return rows().sum(mine(0, 1))


def other_scalar() -> Any:
    return rows() * mine(2.0, 3.0)


def other_keyword() -> Any:
    return rows().sum(0, keepdim=mine(True, False))


def other_slice() -> Any:
    return rows()[mine(slice(0, 2), slice(0, 3))]


def other_plain_shape() -> Any:
    return rows() + torch.ones(mine(2, 1))


def other_plain_values() -> Any:
    return rows() + torch.full((2,), mine(1.0, 1.5), dtype=torch.float64)


def other_member() -> Any:
    return torch.cat([rows(), torch.full((6, 1), mine(1.0, -1.0), dtype=torch.float64)], 1)


def other_keyword_values() -> Any:
    weight, bias = torch.ones(3, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    return nn.functional.linear(rows(), weight, bias=bias + mine(0.0, 1.0))


def other_dtype() -> Any:
    x = rows()
    return mine(x.half, x.float)()


def other_tensor() -> Any:
    x = rows()
    y = x.move_to(Layout.whole(x.layout.partition, x.shape, shared=True))
    return mine(x, y).tanh()


def other_grad() -> Any:
    return rows() * torch.ones(2, dtype=torch.float64, requires_grad=mine(True, False))


def other_mode() -> Any:
    x = rows()
    with torch.set_grad_enabled(mine(True, False)):
        return x.exp()


def one_gathers() -> Any:
    x = rows()
    return mine(x.full, x.relu)()


def one_spreads() -> Any:
    x = rows()
    return mine(lambda: tessel.spread(torch.ones(3), tessel.world()), x.relu)()


def one_derives() -> Any:
    """Of a plain loss, whose backward pass nobody announces: its movement is compared."""
    x = rows().requires_grad_()
    loss = (x.full() ** 2).sum()
    return mine(loss.backward, x.relu)()


def one_leaves_out() -> Any:
    """Worker 1 has a loss that does not need one of two movements."""
    x, y = rows().requires_grad_(), rows().requires_grad_()
    a, b = x.full(), y.full()
    (a.sum() + (b.sum() if mine(True, False) else 0)).backward()
    return (x * 1).sum()


def fewer_calls() -> Any:
    x = rows()
    if mine(True, False):
        x.relu()
    return x


def other_movement_into() -> Any:
    P = tessel.world()
    x, layout = rows(), Layout.balanced(P.create_cartesian_topology_partition([P.size]), (6,))
    move = tessel.Move(layout, layout.grow([(1, 1)]))
    out = torch.empty(move.codomain.local_shape)
    part = torch.ones(layout.local_shape)
    return mine(lambda: move.apply(part, out=out), x.exp)()


DIFFERENT: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "function": (other_function, ("calls `relu`(", "calls `exp`(")),
    "dim": (other_dim, ("float64, 0)", "float64, 1)")),
    "scalar": (other_scalar, ("float64, 2.0)", "float64, 3.0)")),
    "keyword": (other_keyword, ("keepdim=True)", "keepdim=False)")),
    "slice": (other_slice, ("slice(0, 2, None)", "slice(0, 3, None)")),
    "plain": (other_plain_shape, ("plain tensor (2,)", "plain tensor (1,)")),
    "dtype": (other_dtype, ("`half`", "`float`")),
    "tensor": (other_tensor, ("`tanh`", "shared along (0, 1)")),
    "grad": (other_grad, ("that needs a gradient", "plain tensor (2,) of torch.float64 (check")),
    "plain values": (other_plain_values, ("`add`(", "plain tensor (2,)", "(checksum ")),
    "member": (other_member, ("`cat`(", "(checksum ")),
    "keyword values": (other_keyword_values, ("bias=plain tensor (3,)", "(checksum ")),
    "mode": (other_mode, ("float64; under torch.no_grad())",)),
    "gathers": (one_gathers, ("a movement from Layout((6, 2)", "`relu`")),
    "spreads": (one_spreads, ("tessel.spread over", "`relu`")),
    "derives": (one_derives, ("a movement of a backward pass", "`relu`")),
    "leaves out": (one_leaves_out, ("a movement of a backward pass", "`mul`")),
    "into": (other_movement_into, ("a movement from", "`exp`")),
    "fewer": (fewer_calls, ("`relu`", "nothing more in tessel.testing.check_calls()")),
}


def found(case: str) -> str:
    """What a case raises, and whether calls are compared after it."""
    function, _ = DIFFERENT[case]
    try:
        with check_calls():
            function()
    except ValueError as error:
        assert tessel.Tensor.above is not compared
        return str(error)
    return ""


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("nprocs", [2, 3])
def test_workers_that_differ_all_say_so(run: Run, case: str, nprocs: int) -> None:
    texts = run(found, case, nprocs=nprocs, timeout=30)
    assert len(set(texts)) == 1 and texts[0].startswith(SAME)
    for part in DIFFERENT[case][1]:
        assert part in texts[0]
    if case not in ("spreads", "fewer"):
        assert texts[0].count("test_comparing.py:") == 2
    if nprocs == 3:
        assert "(so do workers [1])" in texts[0] and "worker 2 calls " in texts[0]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return self.inner(x).mean(mine((2, 3), (1, 2, 3)))


def branch_in_a_model() -> tuple[str, str]:
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])
    model = tessel.nn.distribute_module(nn.Sequential(Branch()), P)
    with check_calls(), pytest.raises(ValueError) as caught:
        model(torch.ones(1, 1, 3, 4))
    again = torch.relu(rows()).full().sum()  # nothing is left over
    return str(caught.value), float(again)


def test_the_place_in_a_model(run: Run) -> None:
    texts = run(branch_in_a_model, nprocs=2)
    assert texts[0] == texts[1] and texts[0][1] == 66.0
    assert texts[0][0].count("in `0` (Branch) of Sequential") == 2
    assert texts[0][0].count("test_comparing.py:") == 2


class Choice(nn.Module):
    """Two layers alike, of which a worker takes one; and a plain input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(1, 1, 3, padding=1) for _ in range(2))
        self.which = 0

    def forward(self, x: Any, shift: Any) -> Any:
        return self.layers[self.which](x) + shift


def differ_in_a_model(what: str, checks: bool) -> tuple[str, float]:
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])
    torch.manual_seed(0)
    model = tessel.nn.distribute_module(Choice(), P)
    model.which = mine(0, 1) if what == "branch" else 0
    shift = torch.tensor(mine(0.5, 0.75) if what == "input" else 0.5)
    said = ""
    try:
        with torch.no_grad(), check_calls() if checks else nullcontext():
            model(torch.ones(1, 1, 3, 4), shift)
    except ValueError as error:
        said = str(error)
    return said, float(tessel.nn.AllSumReduce(tessel.world(), [0])(torch.ones(1)))


@pytest.mark.parametrize("what", ["branch", "input", "nothing"])
@pytest.mark.parametrize("checks", [False, True])
def test_branches_and_inputs_of_a_model_without_gradients(
    run: Run, what: str, checks: bool
) -> None:
    """Without the check nobody notices, as docs/reliability.md says."""
    first, second = run(differ_in_a_model, what, checks, nprocs=2)
    assert first == second and first[1] == 2.0
    assert bool(first[0]) == (checks and what != "nothing"), first
    if first[0]:
        assert "conv2d" in first[0] if what == "branch" else "`add`" in first[0]
        assert first[0].count("(checksum ") >= 2


def buffers_that_are_written() -> float:
    """What is written may hold anything before."""
    x, found = rows(), torch.full((2,), mine(1.0, 2.0), dtype=torch.float64)
    with check_calls():
        y = x.clone()
        y[0] = torch.zeros(2, dtype=torch.float64)
        found.copy_(y.sum(0))
    return float(found.sum())


def test_plain_tensors_that_are_right_raise_nothing(run: Run) -> None:
    assert run(buffers_that_are_written, nprocs=2) == [65.0, 65.0]


def three_different() -> str:
    x = rows()
    with check_calls(), pytest.raises(ValueError) as caught:
        (x.exp, x.relu, x.tanh)[tessel.world().rank]()
    return str(caught.value)


def test_each_worker_is_named(run: Run) -> None:
    for text in run(three_different, nprocs=3):
        for worker, name in enumerate(("exp", "relu", "tanh")):
            assert f"worker {worker} calls `{name}`(" in text


def programs_checked(first: int, count: int) -> list[str]:
    with check_calls():
        return run_programs(first, count)


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_right_programs_raise_nothing(run: Run, nprocs: int) -> None:
    for wrong in run(programs_checked, 1000 * nprocs, 25, nprocs=nprocs, timeout=100):
        assert not wrong, "\n".join(wrong)


def train_checked() -> list[float]:
    """A model with everything that moves, twice: the second time gradients travel in bundles."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1])
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.MaxPool2d(3, 2, 1),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 3),
    ).double()
    model = tessel.nn.distribute_module(model, grid)
    images = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    torch.manual_seed(0)
    images.copy_(torch.randn(images.shape, dtype=torch.float64))
    losses = []
    for _ in range(3):
        y = checkpoint(model, tessel.spread(images, grid), use_reentrant=False)
        loss = nn.functional.cross_entropy(y, torch.tensor([0, 2]))
        if P.rank == 0:
            losses.append(loss.item())  # one worker may read what it has
            assert repr(y)
        loss.backward()
    return [float(p.grad.sum()) for p in model.parameters()]


def train_both_ways() -> tuple[Any, ...]:
    plain = train_checked()
    with check_calls():
        checked = train_checked()
    return plain, checked


@pytest.mark.parametrize("nprocs", [1, 3])
def test_training_is_what_it_is_without(run: Run, nprocs: int) -> None:
    for plain, checked in run(train_both_ways, nprocs=nprocs):
        assert plain == checked


def some_of_the_workers() -> float:
    """Worker 0 is outside: it may compute or not, and others compare among themselves."""
    world = tessel.world()
    inner = world.create_partition_inclusive([1, 2])
    x = tessel.spread(torch.ones(4, 4), inner.create_cartesian_topology_partition([2, 1]))
    with check_calls():
        if inner.active:
            total = float((x.exp().sum(1) * 2).sum())
        y = x.move_to(Layout.whole(world, (4, 4), shared=True))
        if inner.active:
            with pytest.raises(ValueError, match="same calls"):
                (x.exp if world.rank == 1 else x.relu)()
        z = float(y.sum())
    return total if inner.active else z


def into_overlapping() -> list[float]:
    """A halo exchange into a tensor that holds the input, but on one worker not in its place."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([P.size])
    layout = Layout.balanced(grid, (2 * P.size,))
    out, x = torch.empty(3), torch.arange(2.0) + 2 * (P.rank or 0)
    if P.rank == 0:
        x = out[1:].copy_(x)
    with check_calls():
        found = tessel.Move(layout, layout.grow([(1, 1)]))(x, out=out)
    assert found is out
    return out.tolist()


def test_movements_into_tensors_are_compared_once(run: Run) -> None:
    assert run(into_overlapping, nprocs=2) == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]


def test_workers_outside_of_the_partition(run: Run) -> None:
    outside, *inside = run(some_of_the_workers, nprocs=3)
    assert outside == 16.0
    assert inside[0] == inside[1] == pytest.approx(32 * torch.ones(1).exp().item())


def traffic_of(function: Callable[[Any], Any], x: Any) -> tuple[int, int, int]:
    with count_traffic() as traffic:
        function(x)
    return traffic.messages, traffic.bytes_sent, traffic.agreements


def compare_traffic() -> list[tuple[int, int, int]]:
    x = rows()
    plain = traffic_of(torch.exp, x)
    with check_calls():
        checked = traffic_of(torch.exp, x), traffic_of(lambda x: (x.shape, x.dtype, repr(x)), x)
        inside = tessel.Tensor.above is compared
        with check_calls():  # nested: once is enough
            nested = traffic_of(torch.exp, x)
        assert tessel.Tensor.above is compared
    assert inside and tessel.Tensor.above is call.above
    return [plain, *checked, nested]


def test_it_costs_one_small_exchange_and_nothing_when_off(run: Run) -> None:
    for found_ in run(compare_traffic, nprocs=2):
        assert found_ == [(0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 1)]


# -- the variable ---------------------------------------------------------------------------------


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("TESSEL_CHECK", "1")
    return monkeypatch


def right() -> float:
    total = float((2 * rows()).sum())
    assert (tessel.Tensor.above is compared) == (os.environ["TESSEL_CHECK"] == "1")
    return total


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_the_variable(checking: pytest.MonkeyPatch) -> None:
    assert tessel.launch(right, 2, timeout=60) == [132.0, 132.0]
    texts = tessel.launch(raised, 2, other_function, timeout=60)
    assert texts[0] == texts[1] and "calls `relu`" in texts[0] and "test_comparing.py:" in texts[0]
    checking.setenv("TESSEL_CHECK", "0")
    assert tessel.launch(right, 2, timeout=60) == [132.0, 132.0]
    assert tessel.launch(raised, 2, other_function, timeout=60) == ["", ""]


def fewer_and_go_on() -> Any:
    return (fewer_calls() * 2).sum()


def test_a_worker_that_makes_fewer_calls(checking: pytest.MonkeyPatch) -> None:
    """It comes to its next function, and is found out there."""
    texts = tessel.launch(raised, 2, fewer_and_go_on, timeout=60)
    assert texts[0] == texts[1] and "calls `relu`" in texts[0] and "calls `mul`" in texts[0]


def sleep_instead() -> None:
    x = rows()
    x.relu() if tessel.world().rank == 0 else time.sleep(60)


def end_instead() -> None:
    x = rows()
    x.relu() if tessel.world().rank == 0 else os._exit(3)


@pytest.mark.slow
def test_a_worker_that_does_not_come(checking: pytest.MonkeyPatch) -> None:
    """Others wait as long as they always do, and say for what."""
    checking.setenv("TESSEL_TIMEOUT", "3")
    begin = time.monotonic()
    with pytest.raises(WorkerLost) as caught:
        tessel.launch(sleep_instead, 2, timeout=100)
    assert time.monotonic() - begin < 55
    assert "it waited for the others to confirm that they call `relu`(" in str(caught.value)
    assert "test_comparing.py:" in str(caught.value)
    with pytest.raises(WorkerLost):
        tessel.launch(end_instead, 2, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2])
def test_what_the_variable_cannot_be(checking: pytest.MonkeyPatch, nprocs: int) -> None:
    checking.setenv("TESSEL_CHECK", "yes")
    texts = tessel.launch(raised, nprocs, other_function, timeout=60)
    assert texts == ["TESSEL_CHECK must be one of 0, 1, got 'yes'"] * nprocs


def differently_set() -> str:
    os.environ["TESSEL_CHECK"] = os.environ["RANK"]
    return raised(tessel.world)


def test_the_variable_is_the_same_on_all_workers() -> None:
    texts = tessel.launch(differently_set, 2, timeout=60)
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "TESSEL_CHECK must be the same on all workers: it is '0' on worker 0"
    )
