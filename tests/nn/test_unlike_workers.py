"""Workers that make different layers, or take different branches of a model: all of them raise.

Tests `nn/layer.py`, `nn/buckets.py`, `nn/convert.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tessel
from parity import values
from tessel import Layout, Partition

Run = Callable[..., list[Any]]


def in_space() -> Partition:
    return tessel.world().create_cartesian_topology_partition([1, 1, 2])


def message(function: Callable[[], Any]) -> str:
    """What is raised; nothing else may be, and afterwards workers go on as before."""
    try:
        function()
    except ValueError as error:
        found = str(error)
    else:
        found = ""
    total = tessel.nn.AllSumReduce(tessel.world(), [0])(torch.tensor([1.0 + tessel.world().rank]))
    assert total.tolist() == [3.0]
    return found


D = tessel.nn
# each makes a layer that depends on the number of the worker
LAYERS: dict[str, Callable[[int], Any]] = {
    "channels": lambda r: D.DistributedConv1d(in_space(), 1, 3 + r, 3),
    "kernel": lambda r: D.DistributedConv1d(in_space(), 1, 2, 3 + r),
    "padding": lambda r: D.DistributedConv1d(in_space(), 1, 2, 3, padding=r),
    "bias": lambda r: D.DistributedConv1d(in_space(), 1, 2, 3, bias=bool(r)),
    "dtype": lambda r: D.DistributedConv1d(
        in_space(), 1, 2, 3, dtype=(torch.float32, torch.float64)[r]
    ),
    "kind": lambda r: (D.DistributedConv1d, D.DistributedConvTranspose1d)[r](in_space(), 2, 2, 3),
    "transposed": lambda r: D.DistributedConvTranspose1d(in_space(), 1, 3 + r, 3),
    "linear": lambda r: D.DistributedLinear(in_space(), None, None, 4, 3 + r),
    "blocks": lambda r: D.DistributedLinear(
        *[tessel.world().create_cartesian_topology_partition([1, 2])] * 3, 4, 4 + 2 * r
    ),
    "batch norm": lambda r: D.DistributedBatchNorm(in_space(), 3 + r),
    "eps": lambda r: D.DistributedBatchNorm(in_space(), 3, eps=1e-5 * (1 + r)),
    "layer norm": lambda r: D.DistributedLayerNorm(in_space(), 3 + r),
    "group norm": lambda r: D.DistributedGroupNorm(in_space(), 1, 3 + r),
    "pool": lambda r: D.DistributedMaxPool1d(in_space(), 2 + r),
    "upsample": lambda r: D.DistributedUpsample(in_space(), scale_factor=2 + r),
    "loss": lambda r: D.DistributedCrossEntropyLoss(in_space(), label_smoothing=0.1 * r),
    # arguments that torch's layer refuses, on one of the workers
    "no kernel": lambda r: D.DistributedConv1d(in_space(), 1, 2, (3, "three")[r]),
    "no padding": lambda r: D.DistributedConvTranspose1d(
        in_space(), 1, 2, 3, padding_mode=("zeros", 3)[r]
    ),
    "no features": lambda r: D.DistributedLinear(in_space(), None, None, 4, (3, "three")[r]),
    "no groups": lambda r: D.DistributedGroupNorm(in_space(), 1 + r, 3),
    "no reduction": lambda r: D.DistributedCrossEntropyLoss(in_space(), weight=(None, "all")[r]),
    "no device": lambda r: D.DistributedBatchNorm(in_space(), 3, device=(None, "nowhere")[r]),
    "no parallel device": lambda r: D.ParallelLinear(4, 4, dim=-1, device=(None, "nowhere")[r]),
    "no dtype": lambda r: D.ParallelEmbedding(4, 4, dim=0, dtype=(None, "double")[r]),
    "no width": lambda r: tessel.models.FNO(in_space(), 1, 1, width=2 - 2 * r, modes=2),
    "no axes": lambda r: tessel.models.FNO(
        tessel.world().create_cartesian_topology_partition([1, 1 + r, 2 - r]), 1, 1, 2, modes=2
    ),
    "parallel linear": lambda r: D.ParallelLinear(4, 4 + 2 * r, dim=-1),
    "parallel inputs": lambda r: D.ParallelLinear(4 + 2 * r, 4, dim=0),
    "parallel bias": lambda r: D.ParallelLinear(4, 4, dim=-1, bias=bool(r)),
    "parallel table": lambda r: D.ParallelEmbedding(4 + 2 * r, 4, dim=0),
    "width": lambda r: tessel.models.FNO(in_space(), 1, 1, width=2 + r, modes=2),
    "number of blocks": lambda r: tessel.models.FNO(in_space(), 1, 1, 2, modes=2, blocks=1 + r),
    "modes": lambda r: tessel.models.FNO(in_space(), 1, 1, 2, modes=2 + r, blocks=1),
    "model": lambda r: D.distribute_module(nn.Conv1d(1, 2 + r, 3), in_space()),
}


def make_unlike_layers() -> dict[str, str]:
    rank = tessel.world().rank
    return {name: message(lambda make=make: make(rank)) for name, make in LAYERS.items()}


def test_layers_that_differ_raise_when_they_are_made(run: Run) -> None:
    first, second = run(make_unlike_layers, nprocs=2, timeout=60)
    assert first == second
    assert [name for name, text in first.items() if not text] == []


def swap_equal_layers() -> list[str]:
    """Two layers that look alike: each worker calls another one."""
    P, rank = in_space(), tessel.world().rank
    layers = [D.DistributedConv1d(P, 1, 1, 3, padding=1) for _ in range(2)]
    x = torch.ones(1, 1, 4)
    found = [message(lambda: layers[rank](x).sum().backward())]
    copies = [D.DistributedConv1d(P, 1, 1, 3, padding=1) for _ in range(2)]
    assert message(lambda: [each(x).sum().backward() for each in copies]) == ""
    return found


@pytest.mark.slow
def test_equal_layers_are_told_apart(run: Run) -> None:
    first, second = run(swap_equal_layers, nprocs=2, timeout=60)
    assert first == second
    assert "number" in first[0]


def made_twice(kind: str) -> list[nn.Module]:
    if kind == "fno":
        return [tessel.models.FNO(in_space(), 1, 1, 2, modes=2, blocks=1) for _ in range(2)]
    if kind == "region":
        layers = [D.DistributedConv1d(in_space(), 1, 1, 3, padding=1) for _ in range(2)]
        return [D.HaloRegion(each, nn.ReLU()) for each in layers]
    if kind == "inside":  # two equal modules of one model, called from outside
        blocks = [nn.Conv1d(1, 1, 3, padding=1) for _ in range(2)]
        return [*D.distribute_module(nn.Sequential(*blocks), in_space())]
    return [D.distribute_module(nn.Conv1d(1, 1, 3, padding=1), in_space()) for _ in range(2)]


def swap_equal_models(kind: str) -> list[str]:
    """Two models that look alike: each worker calls another one, with parts or a spread tensor."""
    P, rank = in_space(), tessel.world().rank
    x, found = torch.ones(1, 1, 4), []
    for given in (x, tessel.spread(torch.ones(1, 1, 8), P)):
        models = made_twice(kind)
        if kind in ("fno", "region") and given is not x:  # nothing is agreed on, as with layers
            break
        found.append(message(lambda m=models, x=given: m[rank](x).sum().backward()))
        others = made_twice(kind)
        assert message(lambda m=others, x=given: [each(x).sum().backward() for each in m]) == ""
    with torch.no_grad():
        found.append(message(lambda: made_twice(kind)[rank](x)))
    return found


@pytest.mark.parametrize("kind", ["converted", "inside", "fno", "region"])
def test_equal_models_are_told_apart(run: Run, kind: str) -> None:
    first, second = run(swap_equal_models, kind, nprocs=2, timeout=60)
    assert first == second
    assert all("number " in text for text in first), first


class Branches(nn.Module):
    """A worker takes the branch that `which` says."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(1, 1, 3, padding=1)
        self.b = nn.Conv1d(1, 1, 3, padding=1)
        self.c = nn.Parameter(torch.ones(1, 1, 1))
        self.which = 0


class Other(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return (self.a, self.b)[self.which](x)


class Order(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(x)) if self.which else self.b(self.a(x))


class OneMore(Branches):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y * self.c if self.which else y


class Again(Branches):
    def forward(self, x: Tensor) -> Tensor:
        y = x * self.c
        return y * self.c if self.which else y


class Pointwise(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a.bias if self.which else self.b.bias)


MODELS = (Other, Order, OneMore, Again, Pointwise)


def part_ways(same_calls: int, is_spread: bool) -> dict[str, str]:
    """Workers take the same branch so many times, and then different ones."""
    P, found = in_space(), {}
    x = values((2, 1, 9), 1)
    for kind in MODELS:
        model = D.distribute_module(kind().double(), P)

        def step(model: nn.Module = model) -> None:
            given = tessel.spread(x, P) if is_spread else Layout.balanced(P, x.shape).local_part(x)
            model(given).sum().backward()

        for _ in range(same_calls):
            step()
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.which = tessel.world().rank
        found[kind.__name__] = message(step)
        for before, p in zip(grads, model.parameters(), strict=True):  # nothing was added to it
            assert (p.grad is None) if before is None else torch.equal(before, p.grad)
    return found


@pytest.mark.parametrize("is_spread", [False, True], ids=["parts", "spread"])
@pytest.mark.parametrize("same_calls", [0, 2])
def test_different_branches_raise_before_gradients_are_summed(
    run: Run, same_calls: int, is_spread: bool
) -> None:
    first, second = run(part_ways, same_calls, is_spread, nprocs=2, timeout=60)
    assert first == second
    for name, text in first.items():
        assert "different branches" in text, name
    assert "a.weight on worker 0" in first["Other"] and "b.weight on worker 1" in first["Other"]


def let_modes_differ(is_spread: bool) -> str:
    P, x = in_space(), values((2, 1, 9), 1)
    layers = nn.Conv1d(1, 4, 3, padding=1), nn.Dropout(), nn.Conv1d(4, 1, 3, padding=1)
    model = D.distribute_module(nn.Sequential(*layers).double(), P)
    model.train(tessel.world().rank == 0)
    given = tessel.spread(x, P) if is_spread else Layout.balanced(P, x.shape).local_part(x)
    return message(lambda: model(given).sum().backward())


@pytest.mark.parametrize("is_spread", [False, True], ids=["parts", "spread"])
def test_a_worker_in_evaluation_mode_raises(run: Run, is_spread: bool) -> None:
    first, second = run(let_modes_differ, is_spread, nprocs=2, timeout=60)
    assert first == second and "training" in first and "evaluation" in first


def drift_apart(leaves_out: str) -> tuple[str, str, str]:
    """One worker catches an exception after the backward pass, and all go on; and then again.

    In the end all load the same state.
    """
    torch.manual_seed(0)
    P, x = in_space(), tessel.spread(values((2, 1, 9), 1), in_space())
    model = D.distribute_module(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1)).double(), P)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()

    step()
    if leaves_out == "step" and tessel.world().rank == 0:
        optimizer.step()
    if leaves_out == "nothing" and tessel.world().rank == 0:  # as often as a worker likes
        model.load_state_dict(before)
    found = message(step), message(step)
    if tessel.world().rank == 0:
        model.load_state_dict(before)
    return *found, message(step)


def test_a_step_that_a_worker_leaves_out_raises(run: Run) -> None:
    first, second = run(drift_apart, "step", nprocs=2, timeout=60)
    assert first == second
    again, once_more, loaded = first
    assert again == once_more and not loaded
    assert "2 of 2 parameters, the first of them 0.weight, have different values on worker" in again


def test_changes_on_a_worker_that_change_no_value(run: Run) -> None:
    assert run(drift_apart, "nothing", nprocs=2, timeout=60) == [("", "", "")] * 2


def count_comparisons() -> int:
    """One worker changes its parameters more often in each step, as in ZeRO, and no value."""
    P, x = in_space(), tessel.spread(values((2, 1, 9), 1), in_space())
    model = D.distribute_module(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1)).double(), P)
    conversion = model.forward.conversion
    compare, count = conversion.compare, 0

    def counted(module: nn.Module) -> None:
        nonlocal count
        count += 1
        compare(module)

    conversion.compare = counted
    for _ in range(6):
        model(x).sum().backward()
        if tessel.world().rank:
            model[0].bias.data.add_(0)  # torch does not count this one
            with torch.no_grad():
                model[0].weight.add_(0)
    return count


def test_parameters_are_not_compared_in_each_step(run: Run) -> None:
    assert run(count_comparisons, nprocs=2, timeout=60) == [3, 3]
