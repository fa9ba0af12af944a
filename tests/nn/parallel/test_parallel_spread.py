"""Parallel layers and their shards together with spread tensors: one kind of layout, one table.

Tests `nn/parallel/sharded.py`, `distributed/spreading.py`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from parity import close, values
from tessel import Layout
from tessel.distributed import gather, get_parallel_dim, register_parallel_dim
from tessel.nn import (
    ParallelCrossEntropyLoss,
    ParallelDropout,
    ParallelEmbedding,
    ParallelLinear,
)
from tessel.nn.functional import parallel_cross_entropy, parallel_embedding, parallel_linear
from windowed_cases import raised

Run = Callable[..., list[Any]]


def layouts(shape: tuple[int, ...]) -> list[Layout]:
    """A tensor whole, split along each dimension, and on a grid with two axes."""
    P = tessel.world()
    found = [Layout.whole(P, shape, shared=True)]
    for dim in range(len(shape)):
        found.append(Layout.split(P, shape, [0 if d == dim else None for d in range(len(shape))]))
    if P.size == 4 and len(shape) > 1:
        grid = P.create_cartesian_topology_partition([2, 2])
        axes = [0, 1, *[None] * (len(shape) - 2)]
        found += [Layout.split(grid, shape, axes)]
        found += [Layout.split(grid, shape, axes[1::-1] + axes[2:])]
    return found


def whole_gradient(parameter: Tensor) -> Tensor:
    dim = tessel.distributed.shards.sharding_of(parameter)
    return parameter.grad if dim is None else gather(parameter.grad, dim.dim)


def train_linear() -> None:
    """Outputs and all gradients of a column and a row layer are those of torch."""
    for into, hidden, out in ((6, 8, 4), (5, 7, 3), (3, 2, 1)):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            ParallelLinear(into, hidden, dim=-1),
            torch.nn.Tanh(),
            ParallelLinear(hidden, out, dim=0),
        ).double()
        torch.manual_seed(1)
        plain = torch.nn.Sequential(
            torch.nn.Linear(into, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, out)
        ).double()
        for rows in ((5,), (2, 3)):
            x = values((*rows, into), 0).requires_grad_()
            expected = plain(x)
            expected.square().sum().backward()
            for layout in layouts((*rows, into)):
                again = x.detach().clone().requires_grad_()
                y = model(tessel.spread(again, layout))
                assert isinstance(y, tessel.Tensor)
                close("output", y.full(), expected)
                y.square().sum().backward()
                close("input", again.grad, x.grad)
                pairs = zip(model.parameters(), plain.parameters(), strict=True)
                for own, whole in pairs:
                    close(f"parameter in {layout}", whole_gradient(own), whole.grad)
                model.zero_grad()
            plain.zero_grad()


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_linear_layers_take_spread_tensors(run: Run, nprocs: int) -> None:
    run(train_linear, nprocs=nprocs)


def look_up(dim: int, padding: int | None) -> None:
    """Rows, and the gradient of the table, of ids that are whole or split."""
    for rows in (9, 3, 1):
        torch.manual_seed(2)
        table = ParallelEmbedding(rows, 5, padding_idx=padding, dim=dim).double()
        torch.manual_seed(2)
        plain = torch.nn.Embedding(rows, 5, padding_idx=padding).double()
        ids = torch.tensor([[0, rows - 1, 0, rows // 2], [rows - 1, 0, rows // 3, 0]])
        weights = values((2, 4, 5), 1)
        expected = plain(ids)
        (expected * weights).sum().backward()
        for layout in layouts((2, 4)):
            spread = tessel.spread(ids, layout)
            for y in (
                table(spread),
                F.embedding(spread, table.weight, padding),
                parallel_embedding(spread, table.weight, padding, dim=dim),
            ):
                close("rows", y.full(), expected)
                (y * weights).sum().backward()
                close("table", whole_gradient(table.weight), plain.weight.grad)
                table.zero_grad()
        assert raised(lambda: table(tessel.spread(ids + rows, layouts((2, 4))[0])))[0] is IndexError  # noqa: B023


@pytest.mark.parametrize("padding", [None, 0, -1])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_embeddings_take_spread_tensors(
    run: Run, nprocs: int, dim: int, padding: int | None
) -> None:
    run(look_up, dim, padding, nprocs=nprocs)


def take_loss() -> None:
    """A head of many classes on spread rows, with its loss."""
    torch.manual_seed(3)
    head = ParallelLinear(6, 11, dim=-1).double()
    torch.manual_seed(3)
    plain = torch.nn.Linear(6, 11).double()
    target = torch.tensor([0, 10, 3, 3, 7])
    x = values((5, 6), 0).requires_grad_()
    expected = F.cross_entropy(plain(x), target)
    expected.backward()
    for layout in layouts((5, 6)):
        for loss in (ParallelCrossEntropyLoss(), torch.nn.CrossEntropyLoss()):
            again = x.detach().clone().requires_grad_()
            got = loss(head(tessel.spread(again, layout)), target)
            close("loss", got.full(), expected)
            got.backward()
            close("input", again.grad, x.grad)
            close("weight", whole_gradient(head.weight), plain.weight.grad)
            head.zero_grad()


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_heads_and_losses_take_spread_tensors(run: Run, nprocs: int) -> None:
    run(take_loss, nprocs=nprocs)


def mix() -> Any:
    """Shards as operands of torch's functions beside spread tensors, and made such."""
    P = tessel.world()
    torch.manual_seed(4)
    head = ParallelLinear(6, 7, dim=-1).double()
    whole = gather(head.weight.detach())
    bias = gather(head.bias.detach())
    x = values((5, 6), 0)
    spread = tessel.spread(x, Layout.split(P, (5, 6), (0, None)))
    close("linear", F.linear(spread, head.weight, head.bias).full(), F.linear(x, whole, bias))
    close("matmul", (spread @ head.weight.T).full(), x @ whole.T)
    close("pointwise", (tessel.spread(whole, layouts((7, 6))[0]) * head.weight).full(), whole**2)
    close(
        "by name",
        parallel_linear(spread, head.weight, head.bias, -1).full(),
        head_of(x, whole, bias),
    )
    view = tessel.from_local(head(x))
    assert (
        view.shape == (5, 7) and get_parallel_dim(view) == get_parallel_dim(head(x)) == 1
    ) or P.size == 1
    close("from_local", view.full(), head_of(x, whole, bias))
    close("softmax", view.softmax(1).full(), head_of(x, whole, bias).softmax(1))
    own = register_parallel_dim(values((2, P.rank + 1), P.rank), 1)  # of unknown length, uneven
    made = tessel.from_local(own)
    assert made.shape == (2, P.size * (P.size + 1) // 2)
    close("uneven", made.full(), gather(own))
    with tessel.fallback("raise"):
        head(spread)
    drop = ParallelDropout(0.5)
    ones = tessel.ones(4, 6, where=Layout.split(P, (4, 6), (0, None)))
    assert sorted(set(drop(ones).full().flatten().tolist())) == [0.0, 2.0]
    lost = head(x).sum(1)
    return [
        raised(lambda: spread + own),
        raised(lambda: spread.sum(1) + lost) if P.size > 1 else None,
        raised(lambda: head.weight.detach().add_(tessel.spread(whole, layouts((7, 6))[0]))),
        raised(lambda: tessel.from_local(lost)) if P.size > 1 else None,
        raised(lambda: tessel.from_local(x)),
    ]


def head_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("nprocs", [1, 3, 4])
def test_shards_meet_spread_tensors(run: Run, nprocs: int) -> None:
    first, *others = run(mix, nprocs=nprocs)
    assert all(other == first for other in others)
    unknown, lost, written, of_lost, plain = first
    assert unknown[0] is ValueError and "tessel.spread(x, where)" in unknown[1]
    assert written[0] is TypeError and "would write a spread tensor into a Shard" in written[1]
    assert plain[0] is TypeError and "pass where" in plain[1]
    if nprocs > 1:
        assert lost[0] is ValueError and "lost in `sum`" in lost[1]
        assert of_lost[0] is ValueError and "lost in `sum`" in of_lost[1]


def convert_with_head(out: int) -> None:
    """A model of which the activations are split in space, and the head is in shards."""
    P = tessel.world()
    grid = P.create_cartesian_topology_partition([1, 1, P.size, 1])
    torch.manual_seed(0)
    body = [torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    head = ParallelLinear(4, out, dim=-1)
    plain = torch.nn.Sequential(*copy.deepcopy(body), torch.nn.Linear(4, out)).double()
    model = torch.nn.Sequential(*body, head).double()
    with torch.no_grad():
        plain[-1].weight.copy_(gather(head.weight.detach()))
        plain[-1].bias.copy_(gather(head.bias.detach()))
    model = tessel.nn.distribute_module(model, grid)
    x, target = values((2, 3, 9, 8), 1), torch.tensor([1, 0])
    expected = F.cross_entropy(plain(x), target)
    expected.backward()
    for part in (tessel.spread(x, grid), tessel.spread(x, grid).local):
        y = model(part)
        assert y.shape == (2, out)
        loss = F.cross_entropy(y, target)
        close("loss", loss.full() if isinstance(loss, tessel.Tensor) else loss, expected)
        loss.backward()
        for own, whole in zip(model.parameters(), plain.parameters(), strict=True):
            close("gradient", whole_gradient(own), whole.grad)
        model.zero_grad()
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("out", [8, 7])
@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_converted_model_may_have_a_head_in_shards(run: Run, nprocs: int, out: int) -> None:
    """Its shards are left as they are; they were overwritten by those of one worker, or refused."""
    run(convert_with_head, out, nprocs=nprocs)


def other_workers() -> Any:
    """A group of some workers meets a tensor that is spread over others."""
    P = tessel.world()
    pair = P.create_partition_inclusive([0, 1])
    head = ParallelLinear(6, 7, dim=-1, partition=pair).double()
    x = tessel.spread(values((4, 6), 0), Layout.split(P, (4, 6), (0, None)))
    return raised(lambda: F.linear(x, head.weight))


def test_a_shard_of_other_workers_is_refused(run: Run) -> None:
    found = run(other_workers, nprocs=3)
    assert all(kind is ValueError and "over the same workers" in text for kind, text in found)


def kinds() -> dict[str, Callable[[Tensor], Tensor]]:
    """What workers may make of one whole tensor (6, 6), in ways that do not fit together."""
    P = tessel.world()
    return {
        "plain": lambda x: x,
        "spread": lambda x: tessel.spread(x, layouts((6, 6))[0]),
        "shard": lambda x: tessel.distributed.scatter(x, 1),
        "registered": lambda x: register_parallel_dim(x.clone(), 0, P),
        "lost": lambda x: tessel.distributed.scatter(x, 1).flatten(0),
    }


def calls_of_kinds() -> dict[str, Callable[[Tensor], Any]]:
    """What all workers call together with a tensor of one kind; each has made it before."""
    column, row = ParallelLinear(6, 6, dim=-1).double(), ParallelLinear(6, 6, dim=0).double()
    lookup, drop = ParallelEmbedding(6, 6, dim=0), ParallelDropout()
    where = Layout.split(tessel.world(), (6, 6), (0, None))
    return {
        "column": column,
        "row": row,
        "by name": lambda x: parallel_linear(x, column.weight, column.bias, -1),
        "embedding": lambda x: lookup(x.long()),
        "lookup by name": lambda x: parallel_embedding(x.long(), lookup.weight, dim=0),
        "loss": lambda x: parallel_cross_entropy(x, torch.arange(6)),
        "dropout": drop,
        "spread": lambda x: tessel.spread(x, where),
        "from_local": lambda x: tessel.from_local(x, where),
        "from_local alone": lambda x: tessel.from_local(x),
        "full": lambda x: x.full(),
    }


CALLS = (
    *("column", "row", "by name", "embedding", "lookup by name", "loss", "dropout", "spread"),
    *("from_local", "from_local alone", "full"),
)


def bring_other_kinds(name: str, grads: bool) -> list[Any]:
    """The first worker brings another kind than the others: what is raised, for each two kinds."""
    P, makers, call = tessel.world(), kinds(), calls_of_kinds()[name]
    found = []
    with torch.set_grad_enabled(grads):
        made = {kind: make(values((6, 6), 0).abs().ceil()) for kind, make in makers.items()}
        for mine, others in itertools.permutations(made, 2):
            if name == "full" and {"plain", "spread"} & {mine, others}:
                continue  # the one has no such method, and of the other all know the layout
            if name == "loss" and "plain" in (mine, others):
                continue  # which a worker may compute alone
            x = made[mine if P.rank == 0 else others]
            found.append((mine, others, raised(lambda x=x: call(x))))
            assert tessel.distributed.reduce(torch.ones(2)).tolist() == [P.size] * 2
    return found


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("nprocs", [2, 3])
def test_workers_that_bring_other_kinds_all_raise(
    run: Run, nprocs: int, name: str, grads: bool
) -> None:
    first, *rest = run(bring_other_kinds, name, grads, nprocs=nprocs, timeout=30)
    for k, (mine, others, error) in enumerate(first):
        assert all(each[k] == (mine, others, error) for each in rest), (mine, others)
        assert error is not None, (mine, others)


def tables_in_parts(workers: int) -> None:
    """`F.embedding` of a spread table with all options, the norms and gradients of one process."""
    ids = torch.tensor([[0, 6, 2, 2], [5, 6, 0, 2]])
    grids = [[workers, 1], [1, workers]] + ([[2, 2]] if workers == 4 else [])
    options: list[dict[str, Any]] = [
        {},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True, "padding_idx": 2},
        *({"max_norm": 0.7, "norm_type": p} for p in (2.0, 1.0, 0.5, 0.0, float("inf"))),
    ]
    for grid in grids:
        P = tessel.world().create_cartesian_topology_partition(grid)
        for more in options:
            whole = values((7, 5), 3).requires_grad_()
            table = tessel.spread(whole.detach().clone(), P).requires_grad_()
            expected, got = F.embedding(ids, whole, **more), F.embedding(ids, table, **more)
            close(f"rows of {more} on {grid}", got.full(), expected)
            close(f"the table of {more} on {grid}", table.full(), whole)
            seed = values(expected.shape, 4)
            (expected * seed).sum().backward()
            (got * seed).sum().backward()
            assert whole.grad is not None and table.grad is not None
            close(f"gradient of {more} on {grid}", table.grad.full(), whole.grad)
        with pytest.raises(NotImplementedError, match="do not support sparse gradients"):
            F.embedding(ids, table, sparse=True)
        rows = F.embedding(ids, table.detach(), sparse=True).full()
        close("rows with no gradient", rows, F.embedding(ids, whole))


@pytest.mark.parametrize("nprocs", [3, 4])
def test_tables_in_parts(run: Run, nprocs: int) -> None:
    run(tables_in_parts, nprocs, nprocs=nprocs)
