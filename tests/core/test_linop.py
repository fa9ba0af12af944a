"""Movements under torch's own machinery: torch.func, forward mode, autocast, checkpoint, pickle.

Tests `core/linop.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tessel
from movements import MODULES, MOVEMENTS, Case, Values, assert_close, case, me, mine
from tessel import nn
from tessel.testing import count_traffic

Run = Callable[..., list[Any]]

SECONDS = 20
DTYPES = [torch.float64, torch.complex128]
SUBSETS = [s for count in range(1, 4) for s in combinations(range(3), count)]


def around(movement: Case) -> Case:
    """A movement with something nonlinear before and after it."""
    return Case(
        lambda x: movement.layer(x.sin()).sin(),
        movement.shapes,
        lambda xs: [y.sin() for y in movement.reference([x.sin() for x in xs])],
    )


def energy(worker: int, y: Tensor) -> Tensor:
    return ((y * y.conj()).real * (worker + 1)).sum() + y.real.sum()


def tangents(movement: Case, inputs: Values, directions: Values) -> Values:
    """The derivative of the reference along the directions."""
    _, out = torch.func.jvp(
        lambda *xs: tuple(movement.reference(list(xs))), tuple(inputs), tuple(directions)
    )
    return list(out)


def transform(name: str, dtype: torch.dtype) -> None:
    """vjp, jvp and grad of a function with a movement in it."""
    movement = around(case(name))
    inputs, directions = movement.inputs(dtype), movement.inputs(dtype, seed=1)
    x, t = mine(inputs), mine(directions)
    gradient = mine(movement.gradients(movement.leaves(dtype), energy))

    y, pull = torch.func.vjp(movement.layer, x)
    outputs = movement.reference(inputs)
    assert_close(y, mine(outputs))
    weight = torch.ones_like(y)
    ones = movement.gradients(movement.leaves(dtype), lambda w, y: y.real.sum())
    assert_close(pull(weight)[0], mine(ones))
    assert_close(torch.func.grad(lambda v: energy(me(), movement.layer(v)))(x), gradient)

    y, tangent = torch.func.jvp(movement.layer, (x,), (t,))
    assert_close(y, mine(outputs))
    assert_close(tangent, mine(tangents(movement, inputs, directions)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MOVEMENTS)
def test_func(run: Run, name: str, dtype: torch.dtype) -> None:
    run(transform, name, dtype, nprocs=3, timeout=SECONDS)


def hessian_times_vector(name: str) -> None:
    """Forward over reverse, reverse over reverse, and reverse over forward."""
    movement = around(case(name))
    inputs, directions = movement.inputs(), movement.inputs(seed=1)
    x, t = mine(inputs), mine(directions)

    def total(*xs: Tensor) -> Tensor:
        return sum(energy(w, y) for w, y in enumerate(movement.reference(list(xs))))  # type: ignore

    places = tuple(range(len(inputs)))
    everyones = torch.func.jvp(torch.func.grad(total, places), tuple(inputs), tuple(directions))[1]
    expected = mine(list(everyones))

    def mine_only(v: Tensor) -> Tensor:
        return energy(me(), movement.layer(v))

    assert_close(torch.func.jvp(torch.func.grad(mine_only), (x,), (t,))[1], expected)
    _, pull = torch.func.vjp(torch.func.grad(mine_only), x)
    assert_close(pull(t)[0], expected)
    slope = torch.func.grad(lambda v: torch.func.jvp(mine_only, (v,), (t,))[1])
    assert_close(slope(x), expected)


@pytest.mark.parametrize(
    "name", ["AllSumReduce", "Repartition", "HaloExchange", "Broadcast", "Move"]
)
def test_func_of_func(run: Run, name: str) -> None:
    run(hessian_times_vector, name, nprocs=3, timeout=SECONDS)


def vectorize(transform: str) -> str:
    """A transform that needs a batch rule: right, or an error that names it on every worker."""
    layer = nn.AllSumReduce(tessel.world(), [0])
    x = torch.arange(3.0)
    text = ""
    try:
        if transform == "vmap":
            y = torch.func.vmap(layer)(x.expand(4, 3))
            assert torch.equal(y, 2 * x.expand(4, 3))
        elif transform == "hessian":
            second = torch.func.hessian(lambda v: (layer(v) ** 2).sum())(x)
            assert torch.equal(second, 8 * torch.eye(3))
        else:
            jacobian = getattr(torch.func, transform)(layer)(x)
            assert torch.equal(jacobian, 2 * torch.eye(3))
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
    assert torch.equal(layer(x), 2 * x)
    return text


@pytest.mark.parametrize("transform", ["vmap", "jacrev", "jacfwd", "hessian"])
def test_transforms_that_need_a_batch_rule(run: Run, transform: str) -> None:
    texts = run(vectorize, transform, nprocs=2, timeout=SECONDS)
    assert len(set(texts)) == 1
    assert not texts[0] or "vmap" in texts[0], texts[0]


def call_functionally() -> None:
    """Other parameters in a module that holds a movement."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), nn.AllSumReduce(tessel.world(), [0]))
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, zeros, (torch.ones(2, 3),))
    assert torch.equal(y, torch.zeros(2, 3))


def test_functional_call(run: Run) -> None:
    run(call_functionally, nprocs=2)


def forward_mode(name: str, subset: Sequence[int], everywhere: bool) -> None:
    """Tangents on the workers of a subset, the others without one or outside of forward mode."""
    movement = around(case(name))
    inputs = movement.inputs()
    directions = [
        t if worker in subset else torch.zeros_like(t)
        for worker, t in enumerate(movement.inputs(seed=1))
    ]
    expected = mine(tangents(movement, inputs, directions))
    with forward_ad.dual_level() if everywhere or me() in subset else nullcontext():
        x = mine(inputs)
        if me() in subset:
            x = forward_ad.make_dual(x, mine(directions))
        y = movement.layer(x)
        if everywhere or me() in subset:
            primal, tangent = forward_ad.unpack_dual(y)
            assert_close(tangent, expected)
            y = primal
        assert_close(y, mine(movement.reference(inputs)))


@pytest.mark.parametrize("name", MOVEMENTS)
def test_forward_mode_with_tangents_on_some_workers(run: Run, name: str) -> None:
    for subset in SUBSETS:
        run(forward_mode, name, subset, True, nprocs=3, timeout=SECONDS)


@pytest.mark.parametrize("name", ["AllSumReduce", "Broadcast", "Move"])
def test_forward_mode_on_some_workers_only(run: Run, name: str) -> None:
    """The others compute nothing of the kind, and must still take part."""
    for subset in [(0,), (1, 2)]:
        run(forward_mode, name, subset, False, nprocs=3, timeout=SECONDS)


def reverse_over_forward(name: str, linear: Sequence[int]) -> None:
    """The gradient of a tangent; on some workers the tangent does not depend on the input."""
    movement = case(name)
    inputs, directions = movement.leaves(), movement.inputs(seed=1)

    def before(worker: int, v: Tensor) -> Tensor:
        return 3 * v if worker in linear else v**3

    shaped = Case(
        lambda v: movement.layer(before(me(), v)),
        movement.shapes,
        lambda xs: movement.reference([before(w, x) for w, x in enumerate(xs)]),
    )
    total = torch.stack([(t * t).sum() for t in tangents(shaped, inputs, directions)]).sum()
    expected = torch.autograd.grad(total, inputs, materialize_grads=True)
    x = mine(inputs).requires_grad_()
    with forward_ad.dual_level():
        y = shaped.layer(forward_ad.make_dual(x, mine(directions)))
        tangent = forward_ad.unpack_dual(y).tangent
        assert tangent is not None
        if tangent.requires_grad:
            (tangent * tangent).sum().backward()
    assert_close(torch.zeros_like(x) if x.grad is None else x.grad + 0, mine(list(expected)))


@pytest.mark.parametrize("linear", [(), (1,), (0, 2)])
@pytest.mark.parametrize("name", ["AllSumReduce", "Repartition", "Move"])
def test_reverse_over_forward(run: Run, name: str, linear: Sequence[int]) -> None:
    run(reverse_over_forward, name, linear, nprocs=3, timeout=SECONDS)


def autocast() -> None:
    """A matrix product in bfloat16, its sum over workers, and the gradient in float32."""
    weight = torch.full((3, 3), 0.5, requires_grad=True)
    x = torch.ones(2, 3, requires_grad=True)
    layer = nn.AllSumReduce(tessel.world(), [0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = x @ weight
        y = layer(product)
        assert product.dtype == y.dtype == torch.bfloat16
        assert layer(x).dtype == torch.float32
        assert (layer(product) @ weight).dtype == torch.bfloat16
    y.float().sum().backward()
    assert torch.equal(y.detach(), torch.full((2, 3), 3.0, dtype=torch.bfloat16))
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.full((3, 3), 4.0))


def test_autocast(run: Run) -> None:
    run(autocast, nprocs=2, timeout=SECONDS)


def autocast_on_one_worker() -> str:
    layer = nn.AllSumReduce(tessel.world(), [0])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=me() == 1):
        y = torch.ones(2, 3) @ torch.ones(3, 3)
        with pytest.raises(ValueError) as caught:
            layer(y)
    return str(caught.value)


def test_autocast_on_one_worker_raises_on_all(run: Run) -> None:
    first, second = run(autocast_on_one_worker, nprocs=2, timeout=SECONDS)
    assert first == second
    assert "torch.bfloat16" in first and "torch.float32" in first


def checkpointed(name: str, reentrant: bool, subset: Sequence[int]) -> None:
    """The movement runs again in the backward pass, on all workers or on none."""
    movement = around(around(case(name)))
    everyones = movement.leaves()
    x = mine(everyones).requires_grad_(me() in subset)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    y = checkpoint(movement.layer, x * scale if reentrant else x, use_reentrant=reentrant)
    energy(me(), y).backward()
    if me() in subset:
        assert_close(x.grad, mine(movement.gradients(everyones, energy)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "name", ["AllSumReduce", "Repartition", "HaloExchange", "Broadcast", "Move"]
)
def test_checkpoint(run: Run, name: str, reentrant: bool) -> None:
    for subset in [(0, 1, 2), (1,)]:
        run(checkpointed, name, reentrant, subset, nprocs=3, timeout=SECONDS)


def copied(how: str) -> None:
    """Every movement, copied before and after its first use, is the movement it was."""
    for name in MODULES:
        movement = case(name)
        x = mine(movement.inputs())
        for _ in range(2):
            assert isinstance(movement.layer, torch.nn.Module)
            copy_of = COPIES[how](torch.nn.Sequential(movement.layer))
            assert repr(copy_of[0]) == repr(movement.layer)
            check_layer(movement, copy_of)
            movement.layer(x)


def check_layer(movement: Case, layer: Callable[[Tensor], Tensor]) -> None:
    everyones = movement.leaves()
    x = mine(everyones).requires_grad_()
    y = layer(x)
    assert_close(y.detach(), mine(movement.reference(everyones)))
    energy(me(), y).backward()
    assert_close(x.grad, mine(movement.gradients(everyones, energy)))


def _through_a_file(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _through_a_file,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_modules(run: Run, how: str) -> None:
    run(copied, how, nprocs=3, timeout=SECONDS)


def copied_values() -> None:
    world = tessel.world()
    P = world.create_cartesian_topology_partition([3, 1])
    layout = tessel.Layout.balanced(P, (5, 2)).grow([(1, 1), (0, 0)])
    move = tessel.Move(tessel.Layout.balanced(P, (5, 2)), layout)
    move(mine([torch.ones(2, 2), torch.ones(2, 2), torch.ones(1, 2)]))
    for value in (world, P, layout, move, move.H, move.H @ move):
        for make in (copy.copy, copy.deepcopy, COPIES["pickle"]):
            again = make(value)
            assert again == value and hash(again) == hash(value)
    check_layer(case("Move"), copy.deepcopy(case("Move").layer))
    check_layer(case("Move.H"), pickle.loads(pickle.dumps(case("Move.H").layer)))


def test_copies_of_partitions_layouts_and_operators(run: Run) -> None:
    run(copied_values, nprocs=3, timeout=SECONDS)


def grid_of_four() -> tessel.Partition:
    return tessel.Partition((3, 1, 2, 0), (2, 2))


def pickle_on_some() -> bytes:
    """Layers on four workers; the fifth is outside of their partitions."""
    P = grid_of_four()
    layers = [nn.AllSumReduce(P, [0]), nn.AllGather(P, 1, 0), nn.ReduceScatter(P, 0, 0)]
    move = tessel.Move(tessel.Layout.balanced(P, (4, 4)), tessel.Layout.whole(P, (4, 4)))
    return pickle.dumps((layers, move))


def use_in_a_new_world(data: bytes) -> None:
    """Groups are made anew, by all workers together, wherever they are needed first."""
    (total, gather, scatter), move = pickle.loads(data)
    P = total.P_x
    assert grid_of_four() == P
    x = torch.full((2, 2), float(me()))
    column = {3: 5.0, 2: 5.0, 1: 1.0, 0: 1.0, 4: 4.0}  # the rows of the grid are 3 1 and 2 0
    assert torch.equal(total(x), torch.full((2, 2), column[me()]))
    row = {3: (3.0, 1.0), 1: (3.0, 1.0), 2: (2.0, 0.0), 0: (2.0, 0.0), 4: (4.0,)}
    expected = torch.cat([torch.full((2, 2), value) for value in row[me()]])
    assert torch.equal(gather(x), expected)
    assert torch.equal(scatter(x), torch.full((2 if me() == 4 else 1, 2), column[me()]))
    y = move(x if P.active else tessel.zero_volume_tensor())
    assert y.shape == ((4, 4) if P.active else (0,))


def test_pickles_travel_to_another_world(run: Run) -> None:
    data = run(pickle_on_some, nprocs=5, timeout=SECONDS)[0]
    run(me, nprocs=2)  # so that the next world knows no groups
    run(use_in_a_new_world, data, nprocs=5, timeout=SECONDS)


def module_habits() -> None:
    """What every torch module can do."""
    calls = []
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), nn.AllSumReduce(tessel.world(), [0]), torch.nn.ReLU()
    )
    movement = model[1]
    assert not list(movement.parameters()) and not movement.state_dict()
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    model.load_state_dict(model.state_dict())
    movement.register_forward_pre_hook(lambda *_: calls.append("before"))
    movement.register_forward_hook(lambda *_: calls.append("after"))
    movement.register_full_backward_hook(lambda *_: calls.append("backward"))
    model = model.to(torch.float64).eval().train().requires_grad_(True)
    y = model(torch.ones(2, 3, dtype=torch.float64))
    assert y.dtype == torch.float64
    y.sum().backward()
    assert calls == ["before", "after", "backward"]
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    assert model.apply(lambda module: None) is model
    assert "AllSumReduce(" in repr(model)


def test_movements_are_modules(run: Run) -> None:
    run(module_habits, nprocs=2, timeout=SECONDS)


def repeated_backward(name: str) -> None:
    """The graph kept for a second pass; gradients of two calls add up; the input stays."""
    movement = case(name)
    everyones = movement.leaves()
    expected = mine(movement.gradients(everyones, energy))
    x = mine(everyones).requires_grad_()
    before = x.detach().clone()
    value = energy(me(), movement.layer(x))
    value.backward(retain_graph=True)
    value.backward()
    assert_close(x.grad, 2 * expected)
    (energy(me(), movement.layer(x)) + energy(me(), movement.layer(x))).backward()
    assert_close(x.grad, 4 * expected)
    assert torch.equal(x.detach(), before)
    with pytest.raises(RuntimeError):
        value.backward()


@pytest.mark.parametrize("name", MOVEMENTS)
def test_gradients_accumulate(run: Run, name: str) -> None:
    run(repeated_backward, name, nprocs=3, timeout=SECONDS)


def hooked(name: str) -> None:
    """Tensor hooks see the gradient and may change it; leaves keep theirs."""
    movement = case(name)
    everyones = movement.leaves()
    x = mine(everyones).requires_grad_()
    inner = x * 1
    inner.retain_grad()
    inner.register_hook(lambda grad: 2 * grad)
    energy(me(), movement.layer(inner)).backward()
    expected = 2 * mine(movement.gradients(everyones, energy))
    assert_close(x.grad, expected)
    assert_close(inner.grad, expected)


def test_tensor_hooks(run: Run) -> None:
    for name in ("AllSumReduce", "Move"):
        run(hooked, name, nprocs=2, timeout=SECONDS)


def without_gradients(name: str) -> None:
    """Inference mode and no_grad, on all workers: the values and nothing else."""
    movement = case(name)
    inputs = movement.inputs()
    expected = mine(movement.reference(inputs))
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            x = mine(inputs)
            y = movement.layer(x.requires_grad_())
            assert not y.requires_grad
            assert_close(y, expected)
    with torch.inference_mode():
        x = mine(inputs)
    assert_close(movement.layer(x), expected)  # a tensor of inference mode, outside of it


@pytest.mark.parametrize("name", MOVEMENTS)
def test_inference(run: Run, name: str) -> None:
    run(without_gradients, name, nprocs=3, timeout=SECONDS)


def quiet_second_half() -> tuple[int, int]:
    """Of two movements only the one that a gradient passes through is run backward."""
    layer = nn.AllSumReduce(tessel.world(), [0])
    data = layer(torch.ones(4))
    weight = torch.ones(4, requires_grad=True)
    y = layer(data * weight)
    with count_traffic() as traffic:
        y.sum().backward()
    assert_close(weight.grad, torch.full((4,), 4.0))
    return traffic.messages, traffic.agreements


def test_backward_asks_nobody(run: Run) -> None:
    """The way back needs no agreement: it was reached on the way there."""
    assert run(quiet_second_half, nprocs=2, timeout=SECONDS) == [(1, 0), (1, 0)]


def deep_chain() -> None:
    """Movements one after the other and side by side go back in one order on all workers."""
    movements = [case(name) for name in ("Repartition", "AllSumReduce", "HaloExchange", "Move")]
    total = torch.zeros((), dtype=torch.float64)
    leaves = []
    for movement in movements * 2:
        everyones = movement.leaves()
        x = mine(everyones).requires_grad_()
        leaves.append((movement, everyones, x))
        y = movement.layer(x) if me() else movement.layer(x * 1) * 1  # graphs may differ otherwise
        total = total + energy(me(), y)
    total.backward()
    for movement, everyones, x in leaves:
        assert_close(x.grad, mine(movement.gradients(everyones, energy)))


def test_movements_side_by_side(run: Run) -> None:
    run(deep_chain, nprocs=3, timeout=SECONDS)
