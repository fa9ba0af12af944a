"""A shard and a spread tensor are two views of one part: `x.spread()`, `x.shard()`, `x.full()`.

Tests `distributed/spreading.py`, `primitives/shard_layouts.py`.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from parity import close, values
from tessel import Layout, Partition
from tessel.distributed import gather, get_parallel_dim, register_parallel_dim, scatter
from tessel.distributed.shards import Shard
from tessel.nn import ParallelCrossEntropyLoss, ParallelLinear
from tessel.testing import count_traffic
from windowed_cases import raised

Run = Callable[..., list[Any]]


def lies(shape: tuple[int, ...], dim: int | None) -> Layout:
    axes = [0 if d == dim else None for d in range(len(shape))]
    P = tessel.world()
    return Layout.split(P, shape, axes, () if dim is not None else (0,))


def there_and_back(size: int) -> None:
    """A shard as a spread tensor, and that as a shard, share memory and gradients."""
    whole = values((4, size), 0)
    for dim in (0, 1):
        x = scatter(whole, dim).detach().requires_grad_()
        with count_traffic() as traffic:
            spread = x.spread()
            again = spread.shard()
        assert (traffic.messages, traffic.agreements) == (0, 0)
        assert spread.layout == lies((4, size), dim) and spread.shape == whole.shape
        assert type(again) is Shard and get_parallel_dim(again) == dim
        assert again._tessel_sharding == x._tessel_sharding
        assert again.data_ptr() == x.data_ptr() == spread.local.data_ptr()
        close("full", x.full(), whole)
        assert type(x.full()) is Tensor and get_parallel_dim(x.full()) is None
        seed = values((4, size), 1)
        (spread.softmax(1) * seed).sum().backward()
        one = whole.clone().requires_grad_()
        (one.softmax(1) * seed).sum().backward()
        close("gradient", x.grad.full(), one.grad)
        x.grad = None
        (x.full() * seed).square().sum().backward()  # one shared number: nobody counts twice
        close("of full", x.grad.full(), (2 * whole * seed**2))
        leaf = tessel.spread(whole, lies((4, size), dim)).requires_grad_()
        (slope,) = torch.autograd.grad(leaf.shard().pow(3).spread().sum(), leaf, create_graph=True)
        slope.square().sum().backward()
        close("second order", leaf.grad.full(), 36 * whole**3)
        with torch.no_grad():
            spread.shard().mul_(2)
        close("written", x.detach().full(), 2 * whole)


@pytest.mark.parametrize("size", [8, 7, 3, 1])
@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_shards_and_spread_tensors_are_two_views(run: Run, nprocs: int, size: int) -> None:
    run(there_and_back, size, nprocs=nprocs)


def between_layers() -> None:
    """Spread functions between parallel layers, whose parameters are shards as well."""
    torch.manual_seed(0)
    column, row = ParallelLinear(6, 7, dim=-1).double(), ParallelLinear(7, 5, dim=0).double()
    torch.manual_seed(0)
    first, second = torch.nn.Linear(6, 7).double(), torch.nn.Linear(7, 5).double()
    x = values((4, 6), 0)
    y = row(column(x).spread().softmax(1).shard())
    expected = second(first(x).softmax(1))
    close("output", y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for own, whole in ((column, first), (row, second)):
        close("weight", own.weight.full(), whole.weight)
        slope = register_parallel_dim(own.weight.grad, 0 if own is column else 1)
        close("its gradient", slope.full(), whole.weight.grad)
    (penalty,) = torch.autograd.grad(column.weight.full().square().sum(), column.weight)
    close("penalty", penalty, 2 * column.weight.detach().as_subclass(Tensor))
    (penalty,) = torch.autograd.grad(column.weight.spread().square().sum(), column.weight)
    close("penalty of the spread", penalty, 2 * column.weight.detach().as_subclass(Tensor))
    logits = tessel.spread(values((4, 7), 1), lies((4, 7), 1))
    target = torch.tensor([0, 6, 3, 3])
    loss = ParallelCrossEntropyLoss()(logits.shard(), target)
    close("loss", loss, F.cross_entropy(values((4, 7), 1), target))


@pytest.mark.parametrize("nprocs", [1, 3])
def test_spread_functions_between_parallel_layers(run: Run, nprocs: int) -> None:
    run(between_layers, nprocs=nprocs)


def of_unknown_length() -> Any:
    """Registered shards may have any lengths, which the workers tell each other."""
    P = tessel.world()
    own = register_parallel_dim(values((2, (P.rank or 0) + 1), P.rank or 0), 1)
    own.requires_grad_((P.rank or 0) == 0)  # of one worker alone
    with count_traffic() as traffic:
        spread = own.spread()
    assert traffic.agreements == (1 if P.size > 1 else 0) and traffic.messages == 0
    close("uneven", spread.full(), gather(own.detach()))
    close("full", own.full(), gather(own.detach()))
    spread.square().sum().backward()
    if P.rank == 0:
        close("gradient", own.grad.as_subclass(Tensor), 2 * own.detach().as_subclass(Tensor))
    uneven = raised(lambda: spread.shard())
    balanced = spread.detach().move_to(lies(tuple(spread.shape), 1)).shard()
    close("balanced", balanced.full(), spread.full())
    return uneven


@pytest.mark.parametrize("nprocs", [1, 3])
def test_shards_of_unknown_length(run: Run, nprocs: int) -> None:
    first, *others = run(of_unknown_length, nprocs=nprocs)
    assert all(other == first for other in others)
    if nprocs > 1:
        assert first[0] is ValueError and "x.move_to(" in first[1]


def no_shards() -> list[Any]:
    """What is not a shard, by its layout."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([2, 2])
    whole = values((4, 6), 0)

    def on(grid: Partition, axes: Any, shared: Any = ()) -> tessel.Tensor:
        return tessel.spread(whole, Layout.split(grid, (4, 6), axes, shared))

    flat = tessel.spread(whole, P.create_cartesian_topology_partition([1, 4])).shard()
    assert get_parallel_dim(flat) == 1
    close("on a grid with one long axis", flat.full(), whole)
    plain = on(grid, (None, None), (0, 1)).shard()
    assert type(plain) is Tensor
    close("whole", plain, whole)
    h = scatter(whole, 1)
    return [
        raised(lambda: on(grid, (0, 1)).shard()),
        raised(lambda: on(grid, (0, None), (1,)).shard()),
        raised(lambda: h.sum(1).spread()),
        raised(lambda: h.sum(1).full()),
        raised(lambda: tessel.spread(h.sum(1), P)),
        raised(lambda: tessel.from_local(h, P.create_cartesian_topology_partition([4, 1]))),
        raised(lambda: tessel.from_local(h, lies((16, 2), 0))),
        raised(lambda: tessel.spread(whole, lies((4, 6), 0)).move_to(h)),  # type: ignore[arg-type]
        raised(lambda: tessel.spread(h if P.rank else whole, lies((4, 6), 0))),
    ]


def test_what_is_no_shard_raises_on_all_workers(run: Run) -> None:
    first, *others = run(no_shards, nprocs=4)
    assert [[kind for kind, _ in other] for other in others] == [[kind for kind, _ in first]] * 3
    texts = [text for _, text in first]
    assert all([text for _, text in other][:7] == texts[:7] for other in others)
    several, copies, *lost, along, layout, where, mixed = first
    assert several[0] is copies[0] is ValueError
    assert "x.move_to(" in several[1] and "x.move_to(" in copies[1]
    assert all(kind is ValueError and "lost in `sum`" in text for kind, text in lost)
    for kind, text in (along, layout):
        assert kind is ValueError and "contradicts the sharding" in text
    assert where[0] is TypeError and "a tessel.Partition or a tessel.Layout" in where[1]
    assert mixed[0] is ValueError and "same calls" in mixed[1]


def mixed_calls() -> None:
    """A shard beside a spread tensor is the spread tensor that it is the part of."""
    P = tessel.world()
    a, b = values((4, 6), 0), values((4, 6), 1)
    for layout in (lies((4, 6), None), lies((4, 6), 0), lies((4, 6), 1)):
        for dim in (0, 1):
            x, h = tessel.spread(a, layout), scatter(b, dim)
            cases: dict[str, tuple[Any, Tensor]] = {
                "sum": (x + h, a + b),
                "turned round": (h - x, b - a),
                "product": (x @ h.T, a @ b.T),
                "linear": (F.linear(x, h), F.linear(a, b)),
                "linear of a shard": (F.linear(h, x), F.linear(b, a)),
                "cat": (torch.cat([x, h]), torch.cat([a, b])),
                "where": (torch.where(x > h, x, h), torch.where(a > b, a, b)),
                "einsum": (torch.einsum("ij,kj->ik", x, h), a @ b.T),
                "loss": (F.mse_loss(x, h), F.mse_loss(a, b)),
                "moved": (tessel.spread(h, layout), b),
                "from_local": (tessel.from_local(h), b),
            }
            for name, (got, expected) in cases.items():
                assert isinstance(got, tessel.Tensor), name
                close(name, got.full(), expected)
            assert tessel.spread(h, layout).layout == layout
            own, other = h.detach().requires_grad_(), x.detach().requires_grad_()
            of_h, of_x = torch.autograd.grad((own * other).pow(2).sum(), [own, other])
            close("gradient of the shard", gather(of_h, dim), 2 * b * a**2)
            close("gradient of the other", of_x.full(), 2 * a * b**2)
    head = ParallelLinear(6, 8, dim=-1).double()
    loss = head(tessel.spread(a, lies((4, 6), 0))).square().sum()
    vjps = torch.autograd.grad(loss, list(head.parameters()), retain_graph=True)
    loss.backward(inputs=list(head.parameters()))
    for slope, parameter in zip(vjps, head.parameters(), strict=True):
        close("gradients of parameters", slope, parameter.grad)
    assert P.active


@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_shard_beside_a_spread_tensor(run: Run, nprocs: int) -> None:
    run(mixed_calls, nprocs=nprocs)


def copies() -> None:
    h = tessel.spread(values((4, 6), 0), lies((4, 6), 1)).shard()
    file = io.BytesIO()
    torch.save(h, file)
    file.seek(0)
    for each in (copy.deepcopy(h), torch.load(file), h.clone()):
        assert get_parallel_dim(each) == 1
        close("copy", each.full(), values((4, 6), 0))


def test_copies_of_a_view_are_shards(run: Run) -> None:
    run(copies, nprocs=2)


def groups_of_two() -> None:
    """Shards over some of the workers, of whom only these take part."""
    P = tessel.world()
    pairs = [P.create_partition_inclusive(ranks) for ranks in ([0, 1], [2, 3])]
    pair = pairs[(P.rank or 0) // 2]
    h = scatter(values((4, 5), (P.rank or 0) // 2), 1, pair)
    close("full", h.full(), values((4, 5), (P.rank or 0) // 2))
    own = register_parallel_dim(h.as_subclass(Tensor), 1, pair)
    close("of unknown length", own.full(), values((4, 5), (P.rank or 0) // 2))
    assert h.spread().layout.partition == pair


def test_groups_of_workers(run: Run) -> None:
    run(groups_of_two, nprocs=4)
