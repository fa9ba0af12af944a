"""Group and instance norm by torch's kernels: what one process gives, however it is asked.

Tests `tensor/group_norm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from tessel.tensor.group_norm import GroupNorm
from test_batch_norm import values

Run = Callable[..., list[Any]]
# grids, shapes, numbers of groups (None for instance norm), and whether the kernels take it: even,
# uneven and empty parts, groups beside space, groups that are split, one value a channel
CASES = [
    ((1, 1, 2, 1), (2, 4, 4, 5), 2, True),
    ((1, 1, 2, 1), (2, 4, 5, 3), None, True),
    ((2, 1, 2, 1), (3, 6, 5, 2), 3, True),
    ((1, 1, 4), (2, 3, 3), 1, True),
    ((1, 1, 4), (1, 3, 2), None, True),
    ((1, 2, 2, 1), (2, 4, 5, 3), 2, True),
    ((1, 2, 2, 1), (1, 3, 5, 3), None, True),
    ((1, 2, 2, 1), (2, 6, 5, 3), 3, False),
    ((1, 1, 2, 1, 2), (1, 4, 3, 2, 5), 4, True),
    ((1, 4, 1), (2, 4, 3), 2, False),
    ((1, 1, 4), (2, 4, 1), 2, True),
]
FORMATS = (torch.contiguous_format, torch.channels_last)


def normalized(
    x: Any, groups: int | None, given: list[Tensor | None], running: list[Tensor]
) -> Any:
    if groups is not None:
        return F.group_norm(x, groups, *given)
    return F.instance_norm(x, *(running or (None, None)), *given, momentum=0.3)


def derived(
    x: Any, groups: int | None, given: list[Tensor | None], running: list[Tensor], wants_x: bool
) -> Any:
    """The norm, changed in place, its first gradients, and those of their squares."""
    wanted = [each for each in (x if wants_x else None, *given) if each is not None]
    y = normalized(x, groups, given, running).relu_()
    weights: Any = values(*y.shape, seed=7)
    if isinstance(y, tessel.Tensor):
        weights = tessel.spread(weights, y.layout)
    if not wanted:
        return [y], [], [], []
    # without a graph: this gradient is the one that is written out
    plain = torch.autograd.grad((y * weights).sum(), wanted, retain_graph=True)
    first = torch.autograd.grad((y * weights).sum(), wanted, create_graph=True)
    again: Any = sum((each**2).sum() for each in first)
    second = torch.autograd.grad(again, wanted) if again.requires_grad else ()
    return [y], plain, first, second


def compare(grid: tuple[int, ...], shape: tuple[int, ...], groups: int | None) -> int:
    """All ways to call it, beside torch; how often the kernels were used."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    count, apply = 0, GroupNorm._apply

    def counted(self: GroupNorm, *xs: Tensor | None) -> Any:
        nonlocal count
        count += 1
        return apply(self, *xs)

    GroupNorm._apply = counted  # type: ignore[method-assign]
    try:
        for affine in (True, False):
            for tracks in (True, False) if groups is None else (False,):
                for wants_x in (True, False):
                    _compare(P, shape, groups, affine, tracks, wants_x)
    finally:
        GroupNorm._apply = apply  # type: ignore[method-assign]
    return count


def _compare(
    P: tessel.Partition,
    shape: tuple[int, ...],
    groups: int | None,
    affine: bool,
    tracks: bool,
    wants_x: bool,
) -> None:
    channels, found = shape[1], []
    for spreads in (False, True):
        x: Any = values(*shape, seed=0)
        x = tessel.spread(x, P) if spreads else x
        x.requires_grad_(wants_x)
        given: list[Tensor | None] = [None, None]
        if affine:
            given = [values(channels, seed=seed).requires_grad_() for seed in (1, 2)]
        running = [values(channels, seed=seed).abs() for seed in (3, 4)] if tracks else []
        found.append((*derived(x, groups, given, running, wants_x), running))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            one = one.full() if isinstance(one, tessel.Tensor) else one
            # second derivatives of few values are large: torch's own are no closer
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("grid", "shape", "groups", "kernels"), CASES)
def test_kernels_give_what_torch_gives(
    run: Run, grid: Any, shape: Any, groups: int | None, kernels: bool
) -> None:
    expected = (8 if groups is None else 4) * kernels
    counts = run(compare, grid, shape, groups, nprocs=prod(grid), timeout=60)
    assert counts == [expected] * prod(grid)


def other_kinds() -> list[str]:
    """Short numbers, autocast, channels last, evaluation and no gradient, beside torch."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 1])
    said = []
    weight = values(4, seed=1).float()
    for dtype, wide, memory_format in (
        (torch.bfloat16, torch.bfloat16, FORMATS[0]),
        (torch.float32, torch.float32, FORMATS[1]),
        (torch.float32, torch.float32, FORMATS[0]),
    ):
        whole = values(2, 4, 5, 3, seed=0).to(dtype).contiguous(memory_format=memory_format)
        for no_grad in (True, False):
            for autocast in (True, False):
                found = []
                for x in (tessel.spread(whole, P), whole.clone()):
                    scale = weight.to(wide).requires_grad_()
                    x.requires_grad_()
                    with (
                        torch.set_grad_enabled(not no_grad),
                        torch.autocast("cpu", enabled=autocast),
                    ):
                        y: Any = F.group_norm(x, 2, scale)
                    if not no_grad:
                        y.float().square().sum().backward()
                    full = [y, x.grad, scale.grad]
                    found.append([e.full() if isinstance(e, tessel.Tensor) else e for e in full])
                tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
                for one, other in zip(*found, strict=True):
                    assert (one is None) == (other is None)
                    if one is not None:
                        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
                said.append(str(y.dtype))
    return said


def test_other_kinds(run: Run) -> None:
    kinds = ["torch.bfloat16"] * 4 + ["torch.float32"] * 8
    assert run(other_kinds, nprocs=2) == [kinds] * 2
