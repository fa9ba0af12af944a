"""Movements inside of `torch.compile(fullgraph=True)`, never called before they are compiled.

Tests `core/graph.py`, `core/handles.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from compilers import SECONDS, needs_compiler
from movements import MODULES, Case, Loss, assert_close, case, me, mine
from tessel import nn

Run = Callable[..., list[Any]]

DTYPES = [torch.float64, torch.complex128]
OPERATORS = ("Move", "Move.H")


def around(movement: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The movement with something to do before and after it."""
    return lambda x: movement(x * x).sin()


def reference(movement: Case) -> Case:
    """What `around` does, in one process."""
    return Case(
        around(movement.layer),
        movement.shapes,
        lambda xs: [y.sin() for y in movement.reference([x * x for x in xs])],
    )


def loss(worker: int, y: Tensor) -> Tensor:
    return ((y * y.conj()).real * (worker + 1)).sum() + y.real.sum()


def check(
    layer: Callable[[Tensor], Tensor], expected: Case, dtype: torch.dtype, loss: Loss = loss
) -> None:
    """Output and gradient of a compiled layer are those of one process."""
    everyones = expected.leaves(dtype)
    x = mine(everyones).requires_grad_()
    y = layer(x)
    assert_close(y.detach(), mine(expected.reference(everyones)))
    loss(me(), y).backward()
    assert_close(x.grad, mine(expected.gradients(everyones, loss)))


def compile_movement(name: str) -> None:
    torch._dynamo.reset()
    for dtype in DTYPES:
        expected = reference(case(name))
        check(torch.compile(expected.layer, fullgraph=True, backend="aot_eager"), expected, dtype)
        check(expected.layer, expected, dtype)  # and what is not compiled stays right


@pytest.mark.parametrize("name", MODULES + OPERATORS)
def test_movements(run: Run, name: str) -> None:
    run(compile_movement, name, nprocs=2, timeout=SECONDS)


def compile_module(backend: str) -> None:
    """Training of a small network whose rows lie on the workers, compiled and not."""
    torch._dynamo.reset()
    P = tessel.world().create_cartesian_topology_partition([2, 1])
    compiled, plain = (_trained(P, backend if k else None) for k in (True, False))
    for a, b in zip(compiled, plain, strict=True):
        assert_close(a, b)


def _trained(P: tessel.Partition, backend: str | None) -> list[Tensor]:
    torch.manual_seed(me())
    flat = tessel.world().create_cartesian_topology_partition([1, 2])
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6, dtype=torch.float64),
        nn.HaloExchange(P, [(1, 1), (0, 0)]),
        torch.nn.Tanh(),
        nn.Repartition(P, flat),
        torch.nn.Linear(3, 3, dtype=torch.float64),
        nn.AllSumReduce(tessel.world(), [0]),
    )
    apply = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(5 - me(), 4, dtype=torch.float64)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = apply(x).square().mean()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def test_module(run: Run) -> None:
    run(compile_module, "aot_eager", nprocs=2, timeout=SECONDS)


@pytest.mark.slow
@needs_compiler
def test_module_with_inductor(run: Run) -> None:  # a repartition in it is a Move by itself
    run(compile_module, "inductor", nprocs=2, timeout=SECONDS)


def compile_for_sizes(name: str) -> None:
    """Calls of one compiled function for sizes that change the shapes of all workers."""
    torch._dynamo.reset()
    layer = case(name).layer
    compiled = torch.compile(around(layer), fullgraph=True, backend="aot_eager")
    for size in (4, 4, 6, 8, 6, 4):
        check(compiled, reference(case(name, size)), torch.float64)


@pytest.mark.parametrize("name", ["AllGather", "HaloExchange", "AllSumReduce"])
def test_all_local_shapes_change(run: Run, name: str) -> None:
    run(compile_for_sizes, name, nprocs=2, timeout=SECONDS)


def compile_for_unequal_changes(name: str) -> list[str]:
    """What a worker sees when only some local shapes change: an error, or nothing."""
    torch._dynamo.reset()
    layer = case(name).layer
    compiled = torch.compile(around(layer), fullgraph=True, backend="aot_eager")
    outcomes = []
    for size in (5, 6, 5):
        expected = reference(case(name, size))
        try:
            check(compiled, expected, torch.float64)
            outcomes.append("")
        except (ValueError, RuntimeError) as error:
            outcomes.append(str(error))
        check(reference(case(name, size)).layer, expected, torch.float64)  # the world still works
    return outcomes


@pytest.mark.parametrize("name", ["AllGather", "HaloExchange"])
def test_only_some_local_shapes_change(run: Run, name: str) -> None:
    """5 → 6 over 2 workers: the right answer, or an error on every worker; never a hang."""
    by_worker = run(compile_for_unequal_changes, name, nprocs=2, timeout=SECONDS)
    for outcomes in zip(*by_worker, strict=True):
        assert all(outcomes) or not any(outcomes), outcomes


def compile_with_gradients_on(workers: list[int]) -> str:
    """Only some inputs need a gradient, known when the call is compiled."""
    torch._dynamo.reset()
    movement = case("AllSumReduce")
    compiled = torch.compile(movement.layer, fullgraph=True, backend="aot_eager")
    try:
        y = compiled(mine(movement.leaves()).requires_grad_(me() in workers))
    except (ValueError, RuntimeError) as error:
        return str(error)
    assert not y.requires_grad
    return ""


def test_nobody_needs_a_gradient(run: Run) -> None:
    assert run(compile_with_gradients_on, [], nprocs=2, timeout=SECONDS) == ["", ""]


@pytest.mark.parametrize("workers", [[0], [1]])
def test_only_some_inputs_need_a_gradient(run: Run, workers: list[int]) -> None:
    """A compiled call has no backward pass where nothing needs one: all raise, none waits."""
    texts = run(compile_with_gradients_on, workers, nprocs=2, timeout=SECONDS)
    expected = f"only the inputs of workers {workers} need a gradient"
    assert all(expected in text for text in texts), texts


def compile_on_some_workers() -> None:
    """A worker outside of the partitions compiles the call too, and gets a clone."""
    torch._dynamo.reset()
    P = tessel.world().create_partition_inclusive([2, 0])
    x = torch.full((4,), float(me()), requires_grad=True)
    layer = torch.compile(nn.AllSumReduce(P, [0]), fullgraph=True, backend="aot_eager")
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y.detach(), torch.full((4,), 2.0 if P.active else 1.0))
    assert_close(x.grad, torch.full((4,), 2.0 if P.active else 1.0))


def test_workers_outside_of_the_partition(run: Run) -> None:
    run(compile_on_some_workers, nprocs=3, timeout=SECONDS)


def compile_bad_input() -> str:
    torch._dynamo.reset()
    layer = torch.compile(nn.AllSumReduce(tessel.world(), [0]), fullgraph=True, backend="aot_eager")
    text = ""
    try:
        layer(torch.ones(3 + me()))
    except (ValueError, RuntimeError) as error:
        text = str(error)
    assert torch.equal(layer(torch.ones(5)), torch.full((5,), 2.0))
    return text


def test_bad_input_raises_on_all_workers_while_they_compile(run: Run) -> None:
    for text in run(compile_bad_input, nprocs=2, timeout=SECONDS):
        assert "(3,) on worker 0, (4,) on worker 1" in text


def compile_layers() -> None:
    """Layers, losses and converted models run as they are, between the graphs of the rest."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size])
    torch.manual_seed(0)
    layer = tessel.nn.DistributedConv1d(P, 2, 3, 3, padding=1).double()
    loss = tessel.nn.DistributedMSELoss(P)
    model = tessel.nn.distribute_module(
        torch.nn.Sequential(torch.nn.Conv1d(3, 3, 3), torch.nn.ReLU()).double(), P
    )
    x = torch.randn(1, 2, 5, dtype=torch.float64)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(layer(2 * x) + 1)
        return loss(y, torch.zeros_like(y))

    expected = step(x)
    compiled = torch.compile(step, backend="eager")(x)
    assert torch.equal(expected, compiled)
    expected.backward()
    first = layer.weight.grad
    layer.weight.grad = None
    compiled.backward()
    assert torch.allclose(first, layer.weight.grad, rtol=1e-12)


def test_layers_in_compiled_code(run: Run) -> None:
    run(compile_layers, nprocs=2, timeout=100)


def compile_around_spread_tensors(backend: str) -> None:
    """Compiled modules and functions of spread tensors give the numbers of one process."""
    P = tessel.world().create_cartesian_topology_partition([tessel.world().size, 1])
    whole = torch.arange(20, dtype=torch.float64).reshape(5, 4).sin()
    targets = torch.arange(15, dtype=torch.float64).reshape(5, 3).cos()

    def make(convert: bool) -> torch.nn.Module:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
        model = torch.nn.Sequential(*layers).double()
        return tessel.nn.distribute_module(model, P) if convert else model

    def loss(model: Callable[..., Tensor], x: Any) -> Any:
        y = model(x) - x.mean() * x.shape[0]
        return torch.nn.functional.mse_loss(y, targets)

    def by_module(model: torch.nn.Module, x: Any) -> Any:
        return loss(torch.compile(model, backend=backend), x)

    def by_method(model: torch.nn.Module, x: Any) -> Any:
        model.compile(backend=backend)
        return loss(model, x)

    def by_inner_method(model: torch.nn.Module, x: Any) -> Any:
        model[0].compile(backend=backend)
        return loss(model, x)

    def by_function(model: torch.nn.Module, x: Any) -> Any:
        return torch.compile(lambda x: loss(model, x), backend=backend)(x)

    def by_function_that_spreads(model: torch.nn.Module, x: Any) -> Any:
        return torch.compile(lambda x: loss(model, tessel.spread(2 * x, P)), backend=backend)(
            whole / 2
        )

    alone = make(False)
    expected = loss(alone, whole)
    expected.backward()
    for way in (by_module, by_method, by_inner_method, by_function, by_function_that_spreads):
        for convert in (False, True):
            torch._dynamo.reset()
            model = make(convert)
            for _ in range(2):  # compiled, and used again
                model.zero_grad()
                found = way(model, tessel.spread(whole, P))
                found.backward()
                assert_close(found.full().detach(), expected.detach())
                for a, b in zip(model.parameters(), alone.parameters(), strict=True):
                    assert_close(a.grad, b.grad)


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 3])
def test_spread_tensors(run: Run, nprocs: int) -> None:
    run(compile_around_spread_tensors, "eager", nprocs=nprocs, timeout=100)


def compile_whole_graphs() -> None:
    """A graph without breaks cannot have spread tensors in it, and says so."""
    torch._dynamo.reset()
    x = tessel.spread(torch.ones(4), tessel.world())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: x.tanh() - x.mean(), fullgraph=True, backend="eager")(x)
    assert_close((x * 2).full(), torch.full((4,), 2.0))


def test_spread_tensors_in_whole_graphs(run: Run) -> None:
    run(compile_whole_graphs, nprocs=2, timeout=100)
