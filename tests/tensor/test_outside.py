"""Workers outside of the partition of a spread tensor: they call the same code, and have no part.

What is computed on some workers and moved to all is what one process computes, and so is its
gradient, though one worker takes no part in between.

Tests `tensor/outside.py`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel
from parity import close, values
from tessel import Layout, Partition
from test_spread import CASES, FAMILIES, derived, flat

Run = Callable[..., list[Any]]


def some(absent: int, ndim: int, split: int) -> Partition:
    """All workers but one, along one dimension."""
    world = tessel.world()
    row = world.create_partition_inclusive(k for k in range(world.size) if k != absent)
    shape = [row.size if dim == split else 1 for dim in range(ndim)]
    return row.create_cartesian_topology_partition(shape) if ndim else row


def on_all(x: Any) -> Tensor:
    """The whole tensor, on all workers of the job."""
    everywhere = Layout.whole(tessel.world(), x.shape, shared=True)
    found: Tensor = x.move_to(everywhere).local
    return found


def check_functions(names: list[str]) -> dict[str, tuple[int, str]]:
    """Each function on some workers, between movements from and to all; who raised, and why.

    The worker outside is the last or, as it may have a part of its own to play, the first.
    """
    said: dict[str, tuple[int, str]] = {}
    world = tessel.world()
    for number, name in enumerate(names):
        case = CASES[name]
        shape = case.shapes[0]
        plain = [case.operand(k) for k in range(len(case.shapes))]
        leaf, root = (plain[0].clone().requires_grad_(plain[0].is_floating_point()) for _ in "ab")
        D = len(shape)
        absent = (world.size - 1, 0)[number // max(D, 1) % 2]
        here = some(absent, D, number % max(D, 1))
        layout = Layout.balanced(here, shape) if D else Layout.whole(here, shape, shared=True)
        x = tessel.spread(root, Layout.whole(world, shape, shared=True)).move_to(layout)
        torch.default_generator.manual_seed(0)
        error, lies = "", None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = flat(case.does(leaf, *plain[1:]))
            try:
                got = flat(case.does(x, *plain[1:]))
                lies = [
                    (each.layout.identity, str(each.dtype), each.requires_grad)
                    for each in got
                    if isinstance(each, tessel.Tensor)
                ]
            except (ValueError, NotImplementedError) as problem:
                error = f"{type(problem).__name__}: {problem}"
        everyones = world.group.share_objects((error, lies))
        if any(error for error, _ in everyones):
            texts = [f"worker {k}: {error}" for k, (error, _) in enumerate(everyones) if error]
            said[name] = absent, "; ".join(texts)
            continue
        assert all(each == everyones[0] for each in everyones), f"{name}: {everyones}"
        if not all(isinstance(each, tessel.Tensor) for each in got):
            continue
        outputs = [on_all(each) for each in got]
        for k, (a, b) in enumerate(zip(outputs, expected, strict=True)):
            assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: output {k}"
            bound = max(1e-11, case.tolerance)
            assert torch.allclose(a, b, bound, bound, equal_nan=True), f"{name}: output {k}"
        if leaf.requires_grad and case.derives:
            for a, b in zip(derived(outputs, [root], 1), derived(expected, [leaf], 1), strict=True):
                assert torch.allclose(a, b, 1e-10, 1e-10, equal_nan=True), f"{name}: gradient"
    return said


# what is decided by values, which the worker outside has not: it raises there, and says so
BY_VALUES = {"index without dimensions", "ctc gathers", "one_hot"}
BY_VALUES |= {f"{n} (5,) {r}" for n in ("nll", "cross_entropy") for r in ("none", "mean", "sum")}
BY_VALUES |= {"GRU of packed sequences", "repeat_interleave by numbers", "masked_scatter"}
BY_VALUES |= {"istft", "istft of both sides"}  # where windows leave gaps, they raise
BY_VALUES |= {f"ctc {n}" for n in ("mean", "none", "sum", "of one sample", "of targets in a row")}
BY_VALUES |= {
    "narrow from a tensor",
    "bincount",
    "bincount with weights",
    "cov",
    "unique",
    "quantile",
    "nanquantile",
    "checks of distributions",
    "arrays of indices",  # one of them is a mask
    "gradient with a tensor as spacing",
    "truth values that are written to",
    "a number that is written to where it is large",
}


# a plain tensor is on all workers, and one outside has no values for it: all of them raise
INTO_PLAIN = {"written into a plain tensor", "spectral convolution"}


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"refused"}))
def test_functions_between_movements(run: Run, family: str) -> None:
    names = [name for name in FAMILIES[family] if name not in INTO_PLAIN]
    said = run(check_functions, names, nprocs=3, timeout=100)[0]
    for absent, text in said.values():
        asked = (f"worker {absent}: ValueError: torch's `", f"worker {absent}: ValueError: bool ")
        assert text.startswith(asked), text
        assert f"worker {absent} is outside of Partition(" in text and "x.move_to(" in text, text
        assert text.count("worker ") < 5, text  # on no other worker
    if "masks" not in family:
        assert {*said} <= BY_VALUES, {*said} - BY_VALUES


def check_a_model() -> None:
    """A model on some workers, in a program that all run: its loss and gradients are there."""
    world = tessel.world()
    here = some(world.size - 1, 2, 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0), nn.Tanh(), nn.Linear(6, 3)).double()
    alone = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    alone.load_state_dict({k.replace("3.", "2."): v for k, v in model.state_dict().items()})
    labels = torch.tensor([1, 0, 2, 2, 1])
    expected = F.cross_entropy(alone(values((5, 4), 1)), labels)
    expected.backward()
    loss = F.cross_entropy(model(tessel.spread(values((5, 4), 1), here)), labels)
    assert loss.shape == () and loss.requires_grad
    loss.backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        close("gradient", mine.grad, theirs.grad if here.active else torch.zeros_like(mine))
    close("loss", on_all(loss.detach()), expected.detach())


def check_values() -> None:
    """What needs values raises where there are none, and says what to do; nothing else does."""
    world = tessel.world()
    here = some(world.size - 1, 1, 0)
    x = tessel.spread(values((6,), 1), here)
    y = tessel.from_local(x.local if here.active else torch.zeros(9), here)
    made = [tessel.zeros(6, where=here), tessel.arange(6, where=here), tessel.randn(6, where=here)]
    for each in (x, y, *made, x.sum(), x[1], x.detach(), x.to(torch.float32), copy.deepcopy(x)):
        assert isinstance(each, tessel.Tensor) and each.layout.partition == here
        assert here.active or (each.local.shape == (0,) and "holds nothing" in repr(each))
    for read in (
        lambda: x.full(),
        lambda: x.sum().item(),
        lambda: float(x.sum()),
        lambda: bool(x.sum() > 0),
        lambda: torch.equal(x.sum(), x.sum()),
        lambda: x[x > 0],
    ):
        if here.active:
            read()
            continue
        with pytest.raises(ValueError, match="is outside of Partition"):
            read()
    x[1:3] = 5.0
    x.add_(1).mul_(torch.full((6,), 2.0, dtype=torch.float64))
    expected = values((6,), 1)
    expected[1:3] = 5.0
    close("changed", on_all(x), 2 * (expected + 1))
    assert x.new_zeros(3, 2).shape == (3, 2) and type(x.new_zeros(3, 2)) is Tensor
    kind = tessel.Tensor if here.size > 1 else Tensor  # in parts, as x is
    assert x.new_ones(4).shape == (4,) and type(x.new_ones(4)) is kind
    close("new", on_all(x.new_full((4,), 3.0) + x[:4]), 3 + 2 * (expected + 1)[:4])
    made = x.new_zeros(x.shape)
    made[1:] = x[:-1]
    close("put into new zeros", on_all(made)[1:], 2 * (expected + 1)[:-1])


def check_gradients() -> None:
    """Leaves on some workers, on all, and functions in place between them."""
    world = tessel.world()
    here = some(0, 1, 0)
    leaf = tessel.spread(values((6,), 1), here).detach().requires_grad_()
    y = leaf * 3
    y[1:4] = leaf[:3] ** 2
    loss = y.move_to(world).cumsum(0).square().sum()
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
    first.square().sum().backward()
    alone = values((6,), 1).requires_grad_()
    z = alone * 3
    z[1:4] = alone[:3] ** 2
    (expected,) = torch.autograd.grad(z.cumsum(0).square().sum(), alone, create_graph=True)
    expected.square().sum().backward()
    close("first", on_all(first.detach()), expected.detach())
    close("second", on_all(leaf.grad), alone.grad)
    root = tessel.spread(values((6,), 1).requires_grad_(), world)
    if not here.active:
        with pytest.raises(ValueError, match="would get no gradient here"):
            leaf * root.full()
    else:
        root.full()


@pytest.mark.parametrize("check", [check_a_model, check_values, check_gradients])
@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_outside(run: Run, check: Callable[[], None], nprocs: int) -> None:
    run(check, nprocs=nprocs)
