"""Torch functions of spread tensors: values and gradients of one process, however they lie.

Tests `tensor/call.py`, `tensor/create.py`, `tensor/table.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tessel
from parity import values
from spread_losses import CLASS_LOSSES
from tessel import Layout, Partition
from tessel.tensor import gathering
from tessel.tensor.gathering import GatherWarning
from tessel.tensor.rules import losses
from tessel.transport import kept_in_job

Run = Callable[..., list[Any]]
Shape = tuple[int, ...]
Done = Callable[[str, Sequence[Layout | None]], bool]

# every file spread_*.py beside this one has families of functions
FAMILIES: dict[str, dict[str, Any]] = {}
for path in sorted(Path(__file__).parent.glob("spread_*.py")):
    FAMILIES |= import_module(path.stem).FAMILIES
CASES = {name: case for family in FAMILIES.values() for name, case in family.items()}
assert len(CASES) == sum(map(len, FAMILIES.values())), "two cases have one name"

TOLERANCE = 1e-11  # of float64 in sums of up to a few hundred terms, in another order


def partition(grid: Sequence[int]) -> Partition:
    return Partition(tuple(range(prod(grid))), tuple(grid))


@kept_in_job
def ways(shape: Shape, workers: int) -> list[Layout]:
    """How a tensor may lie on so many workers: each dimension split, two, uneven, whole."""
    return [*_ways(shape, workers)]


def _ways(shape: Shape, workers: int) -> Iterator[Layout]:
    row = Partition(tuple(range(workers)), (workers,))
    D = len(shape)
    for dim in range(D):
        yield Layout.split(row, shape, [0 if d == dim else None for d in range(D)])
    yield Layout.whole(row, shape, shared=True)
    if D and shape[-1] > 1:  # all but one value on one worker, none on the last
        lengths = [shape[-1] - 1, 1, *[0] * (workers - 2)][:workers]
        lengths = lengths if workers > 1 else [shape[-1]]
        grid = partition([1] * (D - 1) + [workers])
        yield Layout.from_lengths(grid, [[n] for n in shape[:-1]] + [lengths])


def grids(shape: Shape, workers: int) -> Iterator[Layout]:
    """Two dimensions split at once."""
    if workers == 4 and len(shape) > 1:
        grid = partition([2, 2])
        for a in range(len(shape)):
            for b in range(a + 1, len(shape)):
                axes = [0 if d == a else 1 if d == b else None for d in range(len(shape))]
                yield Layout.split(grid, shape, axes)


@dataclass
class Verdict:
    """What is wrong; all workers go on, so that all make the same exchanges."""

    wrong: list[str] = field(default_factory=list)
    gathers: dict[str, str] = field(default_factory=dict)  # with what it said
    raises: dict[str, str] = field(default_factory=dict)  # with what it said
    count: int = 0

    def compare(self, what: str, got: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
        if isinstance(got, tessel.Tensor):
            got = got.full()
        if not isinstance(expected, Tensor):
            if got != expected:
                self.wrong.append(f"{what}: {got} is not {expected}")
            return
        if got.shape != expected.shape or got.dtype != expected.dtype:
            self.wrong.append(
                f"{what}: {got.dtype} {tuple(got.shape)} is not "
                f"{expected.dtype} {tuple(expected.shape)}"
            )
        elif not torch.equal(got, expected) and not torch.allclose(
            got.detach(), expected.detach(), tolerance, tolerance, equal_nan=True
        ):
            off = (got.detach() - expected.detach()).abs().max() if got.dtype != torch.bool else got
            self.wrong.append(f"{what}: off by {off}")


def flat(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [each for member in result for each in flat(member)]
    return [result]


def derived(outputs: list[Any], inputs: list[Tensor], order: int) -> list[Tensor]:
    """Gradients of a weighted sum of the outputs; of second order, of their squares' sum."""
    total: Any = 0
    for k, each in enumerate(outputs):
        if isinstance(each, Tensor) and each.requires_grad:
            weights = values(tuple(each.shape), 50 + k)
            total = total + (each.abs() if each.is_complex() else each).mul(weights).sum()
    if not isinstance(total, Tensor):
        return []
    grads = torch.autograd.grad(
        total, inputs, create_graph=order > 1, allow_unused=True, materialize_grads=True
    )
    if order == 1:
        return list(grads)
    again = sum((each.square().sum() for each in grads), torch.zeros((), dtype=torch.float64))
    if not again.requires_grad:  # a linear function: there is nothing more to derive
        return [*grads, *map(torch.zeros_like, inputs)]
    second = torch.autograd.grad(again, inputs, allow_unused=True, materialize_grads=True)
    return [*grads, *second]


@lru_cache(maxsize=2)  # the layouts of a case follow each other, with and without a second order
def alone(case: Any) -> tuple[list[Any], list[Tensor]]:
    """What one process finds: the outputs, and the derivatives by all operands that have some."""
    operands = [case.operand(k) for k in range(len(case.shapes))]
    leaves = [each.requires_grad_(each.is_floating_point()) for each in map(torch.clone, operands)]
    outputs = flat(case.does(*leaves))
    wanted = [each for each in leaves if each.requires_grad]
    return outputs, derived(outputs, wanted, case.order) if wanted and case.derives else []


def check(name: str, case: Any, layouts: Sequence[Layout | None], verdict: Verdict) -> None:
    """One function of operands that lie so; None is a plain tensor."""
    what = f"{name} of {[each and [c.axes for c in each.cuts] for each in layouts]}"
    plain = [case.operand(k) for k in range(len(case.shapes))]
    roots = [each.clone().requires_grad_(each.is_floating_point()) for each in plain]
    spread = [
        root if layout is None else tessel.spread(root, layout)
        for root, layout in zip(roots, layouts, strict=True)
    ]
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes long: it sees to all devices
    expected, theirs = alone(case)
    verdict.count += 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gathering._said.clear()
        try:
            got = flat(case.does(*spread))
        except NotImplementedError as error:
            verdict.raises[name] = str(error)
            if not case.may_raise:
                verdict.wrong.append(f"{what}: raised {error}")
            return
        for each in said:
            if issubclass(each.category, GatherWarning):
                verdict.gathers[name] = str(each.message)
                if not case.may_gather:
                    verdict.wrong.append(f"{what}: gathered, {each.message}")
    for k, (a, b) in enumerate(zip(got, expected, strict=True)):
        verdict.compare(f"{what}: output {k}", a, b, case.tolerance)
    wanted = [each for each in roots if each.requires_grad]
    if not wanted or not case.derives:
        return
    ours = derived(got, wanted, case.order)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        verdict.compare(f"{what}: gradient {k}", a, b, case.tolerance)


def check_all(names: Sequence[str], is_done: Done = lambda name, layouts: False) -> int:
    """All cases of these names, on all ways of their first operand, and others beside it.

    But for those that are done elsewhere; how many there are with them.
    """
    workers = tessel.world().size
    verdict, num_done = Verdict(), 0
    for name in names:
        case, once = CASES[name], replace(CASES[name], order=1)
        firsts = [*ways(case.shapes[0], workers), *grids(case.shapes[0], workers)]
        if workers == 4:  # three have the rest; of what has no grid, one way
            firsts = [*grids(case.shapes[0], workers)] or firsts[:1]
        if workers == 1:  # which has all of it, along one axis or several
            firsts = [firsts[0], firsts[-1]]
        for number, first in enumerate(firsts):
            others: list[Layout | None] = []
            for k, shape in enumerate(case.shapes[1:]):
                beside = [
                    None,
                    *(each for each in ways(shape, workers) if each.partition == first.partition),
                ]
                others.append(None if case.plain_others else beside[(number + k) % len(beside)])
            # three workers have all kinds of parts: the second derivatives of a dimension that is
            # split and of uneven and empty parts say it for others
            twice = workers == 3 and number in (0, len(firsts) - 1)
            if not twice and is_done(name, [first, *others]):
                num_done += 1
                continue
            try:
                check(name, case if twice else once, [first, *others], verdict)
            except Exception as error:
                if workers > 1:  # others may wait for this worker: end here, and say it
                    raise AssertionError(f"{name} of {first} and {others}: {error!r}") from error
                verdict.wrong.append(f"{name} of {first}: {error!r}")
    assert not verdict.wrong, f"{len(verdict.wrong)} wrong:\n" + "\n".join(verdict.wrong[:40])
    return verdict.count + num_done


def is_in_matrix(name: str, layouts: Sequence[Layout | None]) -> bool:
    """Whether `test_support.py` checks this very case, on as many workers."""
    import support  # which imports this file

    return tessel.world().size in support.WORKERS and support.looks_at(name, layouts)


@pytest.mark.parametrize("nprocs", [1, 3, 4])  # two have no part that is empty and no grid
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_functions(run: Run, nprocs: int, family: str) -> None:
    names = list(FAMILIES[family])
    assert run(check_all, names, is_in_matrix, nprocs=nprocs, timeout=100)[0] >= len(names)


def squares(does: Callable[..., Any], *operands: Tensor) -> list[Tensor]:
    """Of what a function gives: the second derivative of a linear one is none of its own."""
    return [each.square() for each in flat(does(*operands)) if each.is_floating_point()]


def test_second_derivatives_are_left_out_only_where_torch_has_none() -> None:
    for name, case in CASES.items():
        if case.order == 1 and case.derives:
            with pytest.raises((RuntimeError, TypeError)):
                alone(replace(case, does=partial(squares, case.does), order=2))
                raise AssertionError(f"torch derives {name} twice")


def check_classes_that_stay() -> int:
    """The losses of classes where these are not gathered, however few there are."""
    before, losses.GATHERED = losses.GATHERED, 0
    try:
        return check_all(list(CLASS_LOSSES))
    finally:
        losses.GATHERED = before


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [3, 4])
def test_classes_that_stay_where_they_are(run: Run, nprocs: int) -> None:
    assert run(check_classes_that_stay, nprocs=nprocs, timeout=100)[0] >= len(CLASS_LOSSES)
