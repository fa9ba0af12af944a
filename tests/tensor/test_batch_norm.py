"""Batch norm by torch's kernels: the same as one process gives, however it is asked.

Tests `tensor/batch_norm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import tessel
from tessel.tensor import batch_norm

Run = Callable[..., list[Any]]
# grids and shapes: even, uneven and empty parts, channels split beside space, three dimensions
CASES = [
    ((1, 1, 2, 1), (2, 3, 4, 5)),
    ((2, 1, 2, 1), (3, 2, 5, 2)),
    ((1, 1, 4), (2, 3, 3)),
    ((1, 2, 2, 1), (2, 4, 5, 3)),
    ((1, 1, 2, 1, 2), (1, 2, 3, 2, 5)),
    ((4, 1), (3, 2)),
]


def values(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5


def derived(x: Any, given: list[Tensor | None], running: list[Tensor] | None, wants_x: bool) -> Any:
    """The norm, changed in place, its first gradients, and those of their squares."""
    mean, variance = running or (None, None)
    wanted = [each for each in (x if wants_x else None, *given) if each is not None]
    y = F.batch_norm(x, mean, variance, *given, training=True, momentum=0.3)
    y = y.relu_()  # what the norm keeps must not be its result
    weights = values(*y.shape, seed=7)
    if isinstance(y, tessel.Tensor):
        weights = tessel.spread(weights, y.layout)
    loss = (y * weights).sum()
    if not wanted:
        return [y], [], [], []
    # without a graph: this gradient is the one that is written out
    plain = torch.autograd.grad(loss, wanted, retain_graph=True)
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    again = sum((each**2).sum() for each in first)
    second = torch.autograd.grad(again, wanted) if again.requires_grad else ()
    return [y], plain, first, second


def compare(grid: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """All ways to call it, beside torch; how often the kernels were used."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    count = 0
    apply = batch_norm.BatchNorm._apply

    def counted(self: batch_norm.BatchNorm, *xs: Tensor | None) -> Any:
        nonlocal count
        count += 1
        return apply(self, *xs)

    batch_norm.BatchNorm._apply = counted  # type: ignore[method-assign]
    try:
        for affine in (True, False):
            for tracks in (True, False):
                for wants_x in (True, False):
                    _compare(P, shape, affine, tracks, wants_x)
    finally:
        batch_norm.BatchNorm._apply = apply  # type: ignore[method-assign]
    return count


def _compare(
    P: tessel.Partition, shape: tuple[int, ...], affine: bool, tracks: bool, wants_x: bool
) -> None:
    channels = shape[1]
    found = []
    for spreads in (False, True):
        x: Any = values(*shape, seed=0)
        x = tessel.spread(x, P) if spreads else x
        x.requires_grad_(wants_x)
        given: list[Tensor | None] = [None, None]
        if affine:
            given = [values(channels, seed=seed).requires_grad_() for seed in (1, 2)]
        running = [values(channels, seed=seed).abs() for seed in (3, 4)] if tracks else None
        found.append((*derived(x, given, running, wants_x), running or []))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            one = one.full() if isinstance(one, tessel.Tensor) else one
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("grid", "shape"), CASES)
def test_kernels_give_what_torch_gives(run: Run, grid: Any, shape: Any) -> None:
    nprocs = 1
    for n in grid:
        nprocs *= n
    assert all(count == 8 for count in run(compare, grid, shape, nprocs=nprocs, timeout=60))


def normalize_twice(norm: Callable[..., Any]) -> None:
    """Gradients that are differentiated again, with hooks, where an input depends on another."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 1])
    found = []
    for spreads in (False, True):
        x: Any = values(2, 4, 5, 3, seed=0)
        x = (tessel.spread(x, P) if spreads else x).requires_grad_()
        weight, bias = (values(4, seed=seed).requires_grad_() for seed in (1, 2))
        for each in (x, weight, bias):
            each.register_hook(lambda grad: 3 * grad)
        y = norm(norm(x, weight, bias) + x, weight, bias)
        with torch.no_grad():
            bias.add_(1)  # no gradient depends on its values
        xs = (x, weight, bias)
        first = torch.autograd.grad((y.sin() * y).sum(), xs, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum((g**2).sum() for g in first), xs)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        ours = ours.full() if isinstance(ours, tessel.Tensor) else ours
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def by_batch(x: Any, weight: Tensor, bias: Tensor) -> Any:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def by_groups(x: Any, weight: Tensor, bias: Tensor) -> Any:
    return F.group_norm(x, 2, weight, bias)


@pytest.mark.parametrize("norm", [by_batch, by_groups])
def test_one_weight_twice(run: Run, norm: Any) -> None:
    run(normalize_twice, norm, nprocs=2, timeout=60)


def mixed() -> list[str]:
    """Numbers that the processor's kernels do not take: torch's functions do."""
    P = tessel.world().create_cartesian_topology_partition([1, 1, 2, 1])
    said = []
    for dtype, kind in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        x = values(2, 3, 4, 5, seed=0).to(dtype)
        weight = values(3, seed=1).to(kind)
        y: Any = F.batch_norm(tessel.spread(x, P), None, None, weight, None, True)
        z = F.batch_norm(x, None, None, weight, None, True)
        torch.testing.assert_close(y.full(), z, rtol=2e-2, atol=2e-2)
        said.append(str(y.dtype))
    return said


def test_short_numbers(run: Run) -> None:
    assert run(mixed, nprocs=2) == [["torch.bfloat16", "torch.float32"]] * 2


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(3),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True),
    "instance norm that tracks": lambda: nn.InstanceNorm2d(
        3, affine=True, track_running_stats=True
    ),
    "group norm": lambda: nn.GroupNorm(3, 3),
}


def compare_tokens() -> None:
    """A part has one sample, or rows of one place, and its gradient has channels last in memory."""
    P = tessel.world().create_cartesian_topology_partition([tessel.world().size, 1, 1, 1])
    for (name, make), training in product(LAYERS.items(), (True, False)):
        for shape, is_last in product(((3, 3, 5, 4), (3, 3, 1, 4), (6, 3, 4, 1)), (True, False)):
            found = []
            for spreads in (False, True):
                torch.manual_seed(0)
                layer = make().double().train(training)
                layer.weight.data.normal_()  # type: ignore[union-attr,operator]
                given = values(*shape, seed=0)
                if is_last:
                    given = given.contiguous(memory_format=torch.channels_last)
                given.requires_grad_()
                x: Any = tessel.spread(given, P) if spreads else given
                y = layer(x)
                tokens = y.flatten(2).transpose(1, 2).mean(1)  # expanded in the backward pass
                pixels = (y.movedim(1, -1) @ values(3, 2, seed=1)).square().mean((1, 2))
                torch.cat([tokens, pixels], 1).square().sum().backward()
                found.append([given.grad, *(p.grad for p in layer.parameters())])
            for ours, theirs in zip(*found, strict=True):
                torch.testing.assert_close(
                    ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda said, at=name: f"{at}: {said}"
                )


def test_gradients_with_channels_last_in_memory(run: Run) -> None:
    """Torch's kernel misreads some of a single sample, which one process does not have here."""
    run(compare_tokens, nprocs=3, timeout=60)


MEAN, VARIANCE = values(3, seed=4), values(3, seed=5).exp()
NORMS: dict[str, Callable[[Any], Any]] = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "evaluation": lambda x: F.batch_norm(x, MEAN, VARIANCE),
    "instance": F.instance_norm,
    "group": lambda x: F.group_norm(x, 3),
}


def in_memory(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values in memory in another order, with strides of their own for single indices."""
    kept = [dim for dim in order if x.shape[dim] != 1]
    y = x.squeeze().permute([sorted(kept).index(dim) for dim in kept]).contiguous()
    y = y.permute([kept.index(dim) for dim in sorted(kept)])
    for dim in sorted(set(order) - set(kept)):
        y = y.unsqueeze(dim)
    return y


def compare_strides(dim: int, shape: tuple[int, ...]) -> list[str]:
    """The norms whose gradients are wrong, for operands and gradients with all orders in memory."""
    grid = [1] * len(shape)
    grid[dim] = tessel.world().size
    P = tessel.world().create_cartesian_topology_partition(grid)
    layout = tessel.Layout.balanced(P, shape)
    x, weights = values(*shape, seed=0), values(*shape, seed=1)
    wrong = []
    for name, norm in NORMS.items():
        alone = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad((norm(alone) * weights).sum(), alone)
        orders = list(permutations(range(len(shape))))
        for of_x, of_grad in zip(orders * 2, orders + orders[::-1], strict=True):
            part = in_memory(layout.local_part(x).contiguous(), of_x)
            spread = tessel.from_local(part, layout).requires_grad_()
            y = norm(spread)
            grad = in_memory(layout.local_part(weights).contiguous(), of_grad)
            (found,) = torch.autograd.grad(y, spread, tessel.from_local(grad, layout))
            if not torch.allclose(found.full(), wanted, rtol=1e-9, atol=1e-10):
                wrong.append(f"{name} {of_x} {of_grad}")
    return wrong


@pytest.mark.parametrize("nprocs", [1, 3])
@pytest.mark.parametrize("case", [(2, (1, 3, 2, 2)), (0, (2, 3, 1, 2)), (3, (2, 3, 3, 2))])
def test_strides_of_single_indices_mean_nothing(run: Run, nprocs: int, case: Any) -> None:
    """Torch's kernels conclude from them how values lie in memory, and then mix them up."""
    assert run(compare_strides, *case, nprocs=nprocs) == [[]] * nprocs
