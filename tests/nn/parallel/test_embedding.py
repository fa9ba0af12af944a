"""Embeddings whose table is split over workers give what torch's own give in one process.

Tests `nn/parallel/embedding.py`, `tensor/rules/split_tables.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tessel
from covering import pairs
from parity import close, group, values
from tessel import Layout, Partition
from tessel.distributed import get_parallel_dim, register_parallel_dim
from tessel.distributed.shards import Shard
from tessel.nn.parallel.embedding import ParallelEmbedding, parallel_embedding
from tessel.testing import count_traffic
from windowed_cases import raised

Run = Callable[..., list[Any]]
GROUPS = [(1, 1), (3, 3), (4, 4), (4, 2)]  # workers, and those of a group
everywhere = pytest.mark.parametrize(("nprocs", "size"), GROUPS)
INF = float("inf")


def table_layout(P: Partition, shape: Sequence[int], dim: int) -> Layout:
    return Layout.split(P, shape, (0, None) if dim == 0 else (None, 0))


def ids_of(shape: Sequence[int], rows: int, seed: int = 0) -> Tensor:
    """The same ids on every worker."""
    return torch.randint(rows, tuple(shape), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A table, the shape of the ids, how it is split, and torch's settings."""

    table: tuple[int, int]
    ids: tuple[int, ...]
    dim: int
    settings: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float64
    kind: torch.dtype = torch.int64  # of the ids

    @property
    def sparse(self) -> bool:
        return bool(dict(self.settings).get("sparse"))

    @property
    def tolerance(self) -> float:
        return 1e-12 if self.dtype == torch.float64 else 1e-6


def dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def vjps(y: Tensor, weight: Tensor, second: bool) -> list[Tensor]:
    """The gradient of Σ c·(y + y²) of the weight, and of Σ g² for this gradient g."""
    loss = (values(y.shape, 5).to(y) * (y + y.square())).sum()
    (first,) = torch.autograd.grad(loss, weight, create_graph=second)
    return [first, *torch.autograd.grad(first.square().sum(), weight)] if second else [first]


def check_case(case: Case, P: Partition) -> None:
    table = 2 * values(case.table, 1).to(case.dtype)
    settings = dict(case.settings)
    layout = table_layout(P, case.table, case.dim)
    alone = torch.nn.Embedding(*case.table, _weight=table.clone(), **settings)
    split = ParallelEmbedding(
        *case.table, _weight=table.clone(), dim=case.dim, partition=P, **settings
    )
    ids = ids_of(case.ids, case.table[0]).to(case.kind)
    expected, got = alone(ids), split(ids)
    assert got.dtype == case.dtype and got.shape == expected.shape
    assert get_parallel_dim(got) is None
    close("output", got, expected, case.tolerance)
    close("weight", split.weight, layout.local_part(alone.weight), case.tolerance)
    second = not case.sparse and ids.numel() > 0  # torch has none else
    wanted = vjps(expected, alone.weight, second)
    found = vjps(got, split.weight, second)
    for order, (a, b) in enumerate(zip(found, wanted, strict=True), 1):
        assert a.layout == b.layout
        close(f"gradient of order {order}", dense(a), layout.local_part(dense(b)), case.tolerance)
    if case.sparse and 0 not in layout.local_shape:
        check_same_rows(found[0], wanted[0], layout, case)


def check_same_rows(found: Tensor, wanted: Tensor, layout: Layout, case: Case) -> None:
    """The sparse gradient names those rows that torch's names, and no other, in its order."""
    box = layout.box()
    assert box is not None
    rows = wanted._indices()[0]
    start, stop = box[0]
    mine = (rows >= start) & (rows < stop)
    assert torch.equal(found._indices()[0], rows[mine] - start)
    columns = slice(*box[1])
    close("sparse values", found._values(), wanted._values()[mine][:, columns], case.tolerance)


def check_cases(cases: Sequence[Case], size: int) -> int:
    P = group(size)
    for case in cases:
        try:
            check_case(case, P)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    return len(cases)


TABLES = [(12, 8), (9, 5), (3, 2), (1, 1)]  # even, uneven, fewer rows and columns than workers
IDS = [(), (7,), (3, 4), (2, 1, 3), (0,), (2, 0)]
SPARSE_PADDED = {"sparse": True, "padding_idx": -1}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 0},
    {"padding_idx": -1},
    {"scale_grad_by_freq": True},
    {"scale_grad_by_freq": True, "padding_idx": 0},
    {"sparse": True},
    SPARSE_PADDED,
    {"max_norm": 1.0},
    {"max_norm": 2.0, "norm_type": 1.0, "padding_idx": 0},
    {"max_norm": 0.7, "norm_type": INF, "sparse": True},
]


def grid(choose: Callable[..., Iterable[Any]] = product) -> list[Case]:
    """All options with each other, or by `pairs`."""
    return [
        Case(table, ids, dim, tuple(settings.items()))
        for table, ids, dim, settings in choose(TABLES, IDS, (0, -1), SETTINGS)
        if ids or settings != SPARSE_PADDED  # whose gradient torch itself cannot compute
    ]


@pytest.mark.slow
@everywhere
def test_output_and_gradients_are_those_of_torch(run: Run, nprocs: int, size: int) -> None:
    """Also of second order, and the weight that `max_norm` leaves."""
    cases = grid(product if nprocs == 3 else pairs)
    assert run(check_cases, cases, size, nprocs=nprocs)[0] == len(cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_other_dtypes(run: Run, dtype: torch.dtype, kind: torch.dtype) -> None:
    """Rows are copied and added to zeros, which is exact in every dtype."""
    cases = [replace(case, dtype=dtype, kind=kind) for case in grid() if case.ids == (3, 4)]
    if dtype == torch.bfloat16:  # a norm over parts is rounded once, as that of whole rows
        cases = [case for case in cases if "max_norm" not in dict(case.settings)]
    run(check_cases, cases, 3, nprocs=3)


@pytest.mark.parametrize("norm_type", [0.0, 0.5, 1.0, 2.0, 3.0, INF, -1.0, -INF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_are_renormalised_by_the_norm_of_all_columns(
    run: Run, norm_type: float, dtype: torch.dtype
) -> None:
    """Two columns over three workers: the third has none, and none count for its norm."""
    settings = (("max_norm", 0.8), ("norm_type", norm_type))
    cases = [
        Case(table, (5, 5), dim, settings, dtype)
        for table in ((9, 7), (9, 3), (9, 2))
        for dim in (0, 1)
    ]
    run(check_cases, cases, 3, nprocs=3)


def renormalised_halves(dtype: torch.dtype) -> None:
    P = tessel.world()
    table = 2 * values((9, 7), 1).to(dtype)
    alone = torch.nn.Embedding(9, 7, max_norm=1.0, _weight=table.clone())
    split = ParallelEmbedding(9, 7, max_norm=1.0, _weight=table.clone(), dim=1)
    ids = ids_of((5,), 9)
    alone(ids), split(ids)
    # the norm of a row is rounded to the dtype: one unit in the last place of it
    tolerance = torch.finfo(dtype).eps * 2
    close("weight", split.weight, table_layout(P, (9, 7), 1).local_part(alone.weight), tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_renormalised(run: Run, dtype: torch.dtype) -> None:
    run(renormalised_halves, dtype, nprocs=3)


def check_function(size: int) -> None:
    """The functional form, with the shard as any tensor, registered or not, and negative pads."""
    P = group(size)
    for dim, shardings, negative in product((0, 1, -1), (False, True), (-3, 7)):
        table = values((10, 6), 1)
        layout = table_layout(P, (10, 6), dim)
        whole = table.clone().requires_grad_()
        part = layout.local_part(table).clone().requires_grad_()
        weight = register_parallel_dim(part, dim, P) if shardings else part
        ids = ids_of((3, 4), 10)
        expected = F.embedding(ids, whole, padding_idx=negative)
        rows = None if shardings else 10
        given = None if shardings else dim
        where = None if shardings else P
        got = parallel_embedding(
            ids, weight, negative, num_embeddings=rows, dim=given, partition=where
        )
        close("output", got, expected)
        expected.square().sum().backward()
        got.square().sum().backward()
        close("gradient", part.grad, layout.local_part(whole.grad))


@everywhere
def test_the_function_takes_shards(run: Run, nprocs: int, size: int) -> None:
    run(check_function, size, nprocs=nprocs)


def test_without_a_dim_the_function_is_torchs() -> None:
    table, ids = values((10, 6), 1), ids_of((3, 4), 10)
    assert torch.equal(parallel_embedding(ids, table), F.embedding(ids, table))
    with pytest.raises(ValueError, match="11 rows, got 10"):
        parallel_embedding(ids, table, num_embeddings=11)


def train(size: int, dim: int, name: str, settings: dict[str, Any]) -> None:
    P = group(size)
    table = values((11, 5), 1)
    layout = table_layout(P, (11, 5), dim)
    alone = torch.nn.Embedding(11, 5, _weight=table.clone(), **settings)
    split = ParallelEmbedding(11, 5, _weight=table.clone(), dim=dim, partition=P, **settings)
    makers = {
        "SGD": (torch.optim.SGD, {"momentum": 0.9}),
        "SparseAdam": (torch.optim.SparseAdam, {}),
    }
    make, more = makers.get(name, (getattr(torch.optim, name), {}))
    optimizers = [make(each.parameters(), lr=0.1, **more) for each in (alone, split)]
    for step in range(5):
        ids = ids_of((3, 4), 11, step)
        losses = []
        for layer, optimizer in zip((alone, split), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (layer(ids) - values((3, 4, 5), step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        close("loss", losses[1], losses[0])
        close("weight", split.weight, layout.local_part(alone.weight))


@everywhere
@pytest.mark.parametrize("dim", [0, 1])
def test_five_steps_of_an_optimizer(run: Run, nprocs: int, size: int, dim: int) -> None:
    for name in ("SGD", "Adam"):
        run(train, size, dim, name, {"padding_idx": 2}, nprocs=nprocs)
    run(train, size, dim, "SGD", {"max_norm": 1.0}, nprocs=nprocs)
    run(train, size, dim, "SparseAdam", {"sparse": True, "padding_idx": 2}, nprocs=nprocs)


def draw(size: int, equal: bool) -> None:
    P = group(size)
    for dim, padding in product((None, 0, 1, -1), (None, 0, -1)):
        torch.manual_seed(3 if equal else tessel.world().rank)
        alone = torch.nn.Embedding(9, 5, padding_idx=padding)
        after = torch.get_rng_state()
        torch.manual_seed(3 if equal else tessel.world().rank)
        split = ParallelEmbedding(9, 5, padding_idx=padding, dim=dim, partition=P)
        assert torch.equal(torch.get_rng_state(), after)
        layout = table_layout(P, (9, 5), dim) if dim is not None else Layout.whole(P, (9, 5))
        assert split.weight.shape == layout.local_shape
        if equal:
            assert torch.equal(split.weight, layout.local_part(alone.weight))
        y = split(torch.arange(9))
        everyones = P.group.share_objects(y.detach())
        if dim is not None:
            assert all(torch.equal(each, everyones[0]) for each in everyones)
            if padding is not None:
                assert not y[padding].any()


@everywhere
@pytest.mark.parametrize("equal", [True, False])
def test_values_are_torchs_for_equal_seeds(run: Run, nprocs: int, size: int, equal: bool) -> None:
    """For every dim and any number of workers; with unequal seeds the output is still shared."""
    run(draw, size, equal, nprocs=nprocs)


def count(dim: int, max_norm: float | None) -> tuple[int, int, int, int]:
    P = tessel.world()
    layer = ParallelEmbedding(40, 8, max_norm=max_norm, dim=dim, dtype=torch.float64)
    ids = ids_of((12,), 40)
    layer(ids)
    with count_traffic() as forward:
        y = layer(ids)
    with count_traffic() as backward:
        y.square().sum().backward()
    assert backward.messages == backward.agreements == 0
    assert P.size == 4
    return forward.bytes_sent, forward.bytes_received, forward.agreements, layer.weight.numel()


def test_rows_cost_one_all_reduce_of_the_output(run: Run) -> None:
    """And nothing in the backward pass; `max_norm` is a matter of each row."""
    output = 12 * 8 * 8
    for max_norm in (None, 1.0):
        assert run(count, 0, max_norm, nprocs=4) == [(2 * 3 * output // 4,) * 2 + (1, 80)] * 4


def test_columns_cost_one_all_gather_of_the_output(run: Run) -> None:
    """And nothing in the backward pass; with `max_norm`, also one number for each id."""
    part = 12 * 2 * 8
    assert run(count, 1, None, nprocs=4) == [(3 * part, 3 * part, 1, 80)] * 4
    assert run(count, 1, 1.0, nprocs=4) == [(3 * (part + 12 * 8),) * 2 + (1, 80)] * 4


def attempt(kind: str, dim: int) -> tuple[type[BaseException], str] | None:
    P = tessel.world()
    odd = P.rank == 1
    layer = ParallelEmbedding(10, 6, dim=dim)
    ids = ids_of((3, 4), 10)
    if kind == "too great":
        ids[1, 1] = 10
    elif kind == "negative":
        ids[1, 1] = -1
    elif kind == "too great on one":
        ids[1, 1] = 10 if odd else 9
    elif kind == "others on one":
        ids = ids.flip(0) if odd else ids
    elif kind == "shape":
        ids = ids[:2] if odd else ids
    elif kind == "dtype":
        ids = ids.int() if odd else ids
    elif kind == "floats":
        ids = ids.float()
    elif kind == "no tensor":
        ids = [1, 2]  # type: ignore[assignment]
    elif kind == "as_shard":
        ids = register_parallel_dim(ids, 0)
    elif kind == "lost":
        ids = register_parallel_dim(ids, 0).sort(0).values
    elif kind == "shard":
        layer.weight = torch.nn.Parameter(layer.weight.detach()[:, :1])
    elif kind == "whole weight":
        layer.weight = torch.nn.Parameter(torch.zeros(10, 6))
    elif kind == "frozen" and odd:
        layer.weight.requires_grad_(False)
    elif kind == "padding" and odd:
        layer.padding_idx = 3
    elif kind == "weight dtype" and odd:
        layer.double()
    elif kind == "other dim":
        return raised(lambda: parallel_embedding(ids, layer.weight, dim=1 - dim))
    elif kind == "padding out of range":
        return raised(lambda: parallel_embedding(ids, layer.weight, 10, dim=dim))
    elif kind == "max_norm":
        layer.max_norm = "1"  # type: ignore[assignment]
        layer.norm_type = "two"  # type: ignore[assignment]
    elif kind == "rows":
        weight = layer.weight.detach()
        return raised(lambda: parallel_embedding(ids, weight, num_embeddings=12, dim=dim))
    with count_traffic() as traffic:
        if kind == "no grad" and odd:
            with torch.no_grad():
                result = raised(lambda: layer(ids))
        else:
            result = raised(lambda: layer(ids))
    assert traffic.messages == 0
    again = layer(ids_of((2,), 10)) if kind in ("too great", "others on one") else None
    assert again is None or again.shape == (2, 6)
    return result


FAULTS = {
    "too great": (
        IndexError,
        "id 10 is out of bounds on worker 0: the rows of the table are 0 to 9",
    ),
    "negative": (IndexError, "id -1 is out of bounds"),
    "too great on one": (IndexError, "id 10 is out of bounds on worker 1"),
    "others on one": (ValueError, "the same ids, but the values differ between workers 0 and 1"),
    "shape": (ValueError, "shape of the ids"),
    "dtype": (ValueError, "dtype"),
    "floats": (ValueError, "int64 or int32"),
    "no tensor": (ValueError, "passed no tensor"),
    "as_shard": (ValueError, "whole on every worker"),
    "lost": (ValueError, "whole on every worker"),
    "shard": (ValueError, "worker 0 expected a part of shape"),
    "whole weight": (ValueError, "expected a part of shape"),
    "frozen": (ValueError, "without a gradient of the weight"),
    "padding": (ValueError, "padding_idx=3"),
    "weight dtype": (ValueError, "dtype"),
    "no grad": (ValueError, "same"),
    "other dim": (ValueError, "the weight must be a shard along dim"),
    "padding out of range": (ValueError, "padding_idx must be a row"),
    "rows": (ValueError, "expected a part of shape"),
    "max_norm": (ValueError, "could not convert string to float"),
}


@pytest.mark.parametrize("nprocs", [3])
@pytest.mark.parametrize("kind", FAULTS)
def test_what_does_not_fit_raises_the_same_on_every_worker(
    run: Run, kind: str, nprocs: int
) -> None:
    """Before anything is sent; and the workers go on afterwards."""
    for dim in (0, 1):
        results = run(attempt, kind, dim, nprocs=nprocs)
        assert len(set(results)) == 1, results
        assert results[0] is not None, kind
        error, text = results[0]
        assert error is FAULTS[kind][0] and FAULTS[kind][1] in text, (error, text)


def construct(kind: str) -> tuple[type[BaseException], str] | None:
    odd = tessel.world().rank == 1
    if kind == "dim":
        return raised(lambda: ParallelEmbedding(10, 6, dim=2 if odd else 1))
    if kind == "rows":
        return raised(lambda: ParallelEmbedding(9 if odd else 10, 6, dim=0))
    if kind == "padding":
        return raised(lambda: ParallelEmbedding(10, 6, padding_idx=99 if odd else 9, dim=0))
    if kind == "table":
        table = values((9 if odd else 10, 6), 0)
        return raised(lambda: ParallelEmbedding(10, 6, _weight=table, dim=0))
    if kind == "function":
        ids, table = ids_of((3, 4), 10), values((4, 6), 0)
        return raised(lambda: parallel_embedding(ids, table, dim="rows" if odd else 0))  # type: ignore[arg-type]
    layer = torch.nn.Embedding(9 if odd else 10, 6)
    return raised(lambda: ParallelEmbedding.convert_parallel_embedding(layer, 0))


@pytest.mark.parametrize("kind", ["dim", "rows", "padding", "table", "function", "conversion"])
def test_layers_that_differ_are_refused_everywhere(run: Run, kind: str) -> None:
    results = run(construct, kind, nprocs=3)
    assert len(set(results)) == 1 and results[0] is not None
    assert results[0][0] is ValueError and "all workers must make the same calls" in results[0][1]


@pytest.mark.parametrize("dim", [2, -2, True, "0", 0.5, 1.0])
def test_a_wrong_dim_is_refused_in_the_constructor(dim: Any) -> None:
    with pytest.raises(ValueError, match="dim must be None, 0, 1 or -1"):
        ParallelEmbedding(4, 3, dim=dim)
    with pytest.raises(ValueError, match="dim must be None, 0, 1 or -1"):
        ParallelEmbedding.convert_parallel_embedding(torch.nn.Embedding(4, 3), dim)
    with pytest.raises(ValueError, match="dim must be None, 0, 1 or -1"):
        parallel_embedding(torch.tensor(1), torch.zeros(4, 3), dim=dim)


def scaled_and_sparse(dim: int) -> tuple[type[BaseException], str] | None:
    """Torch refuses this in the backward pass."""
    layer = ParallelEmbedding(4, 3, scale_grad_by_freq=True, sparse=True, dim=dim)
    return raised(lambda: layer(torch.tensor([1, 1])).sum().backward())


def test_what_torch_refuses_is_refused(run: Run) -> None:
    for dim in (0, 1):
        results = run(scaled_and_sparse, dim, nprocs=3)
        assert len(set(results)) == 1 and results[0] is not None
        assert "scale_grad_by_freq not supported with sparse" in results[0][1]


class Twice(torch.nn.Module):
    """A model that uses one embedding at two places, and two embeddings with one table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Embedding(10, 6, padding_idx=2)
        self.inner = torch.nn.Sequential(self.first, torch.nn.Linear(6, 6))
        self.other = torch.nn.Embedding(10, 6, scale_grad_by_freq=True).double()
        self.tied = torch.nn.Embedding(10, 6)
        self.tied.weight = self.first.weight
        self.frozen = torch.nn.Embedding.from_pretrained(values((10, 6), 3).float())

    def forward(self, ids: Tensor) -> Tensor:
        rest = self.other(ids).float() + self.tied(ids) + self.frozen(ids)
        return self.inner(ids) + self.first(ids) + rest


def converted(size: int, dim: int | None) -> None:
    P = group(size)
    torch.manual_seed(1)
    alone = Twice().eval()
    calls: list[str] = []
    model = copy.deepcopy(alone)
    model.first.register_forward_hook(lambda *_: calls.append("hook"))
    result = ParallelEmbedding.convert_parallel_embedding(model, dim, P)
    assert result is model and isinstance(model.first, ParallelEmbedding)
    assert model.inner[0] is model.first and model.tied.weight is model.first.weight
    assert not model.first.training and not model.frozen.weight.requires_grad
    assert model.first.weight.requires_grad and model.other.weight.dtype == torch.float64
    assert model.first.padding_idx == 2 and model.other.scale_grad_by_freq
    assert type(model.inner[1]) is torch.nn.Linear
    ids = ids_of((3, 4), 10)
    expected, got = alone(ids), model(ids)
    assert calls == ["hook"] * 2
    close("output", got, expected, 1e-6)
    expected.square().sum().backward()
    got.square().sum().backward()
    whole = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        grad = whole[name].grad
        if grad is None:
            assert parameter.grad is None
            continue
        if dim is not None and name in ("first.weight", "other.weight"):
            grad = table_layout(P, (10, 6), dim).local_part(grad)
            assert get_parallel_dim(parameter) == dim
        close(name, parameter.grad, grad, 1e-6)


@everywhere
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_a_model_is_converted(run: Run, nprocs: int, size: int, dim: int | None) -> None:
    run(converted, size, dim, nprocs=nprocs)


class Own(torch.nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_what_cannot_be_converted_is_refused() -> None:
    convert = ParallelEmbedding.convert_parallel_embedding
    model = torch.nn.ModuleDict({"a": torch.nn.Embedding(4, 3), "b": Own(4, 3)})
    with pytest.raises(NotImplementedError, match=r"b \(Own\) is a subclass"):
        convert(model, 0)
    assert type(model["a"]) is torch.nn.Embedding  # nothing was changed
    head = torch.nn.ModuleDict({"a": torch.nn.Embedding(4, 3), "b": torch.nn.Linear(3, 4)})
    head["b"].weight = head["a"].weight
    with pytest.raises(NotImplementedError, match=r"a\.weight, b\.weight are one parameter"):
        convert(head, 0)
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Embedding(4, 3))
    with pytest.raises(NotImplementedError, match="Embedding"):
        convert(normed, 0)


def test_converting_again_changes_nothing_or_raises() -> None:
    convert = ParallelEmbedding.convert_parallel_embedding
    layer = torch.nn.Embedding(4, 3)
    new = convert(layer, 0)
    assert type(layer) is torch.nn.Embedding and torch.equal(new.weight, layer.weight)
    assert convert(new, 0) is new
    with pytest.raises(NotImplementedError, match=r"ParallelEmbedding.* is already split"):
        convert(new, 1)


def convert_unsplit() -> None:
    """A layer that is not split yet, also one that several modules have."""
    convert = ParallelEmbedding.convert_parallel_embedding
    torch.manual_seed(0)
    whole = ParallelEmbedding(7, 3, padding_idx=2, dim=None)
    model = torch.nn.ModuleList([whole, torch.nn.ReLU(), whole])
    ids = ids_of((3, 4), 7)
    expected = whole(ids)
    assert convert(model, 0) is model and model[0] is model[2]
    assert get_parallel_dim(model[0].weight) == 0 and model[0].padding_idx == 2
    close("output", model[0](ids), expected, 1e-6)
    assert convert(whole, None) is whole


@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_layer_that_is_not_split_is_converted(run: Run, nprocs: int) -> None:
    run(convert_unsplit, nprocs=nprocs)


def check_pretrained(dim: int | None) -> None:
    P = tessel.world()
    table = values((10, 6), 1)
    layer = ParallelEmbedding.from_pretrained(table, padding_idx=-1, max_norm=1.5, dim=dim)
    alone = torch.nn.Embedding.from_pretrained(table.clone(), padding_idx=-1, max_norm=1.5)
    ids = ids_of((3, 4), 10)
    assert not layer.weight.requires_grad and layer.padding_idx == 9
    close("output", layer(ids), alone(ids))
    assert dim is None or torch.equal(table, values((10, 6), 1))  # a shard is a copy
    learns = ParallelEmbedding.from_pretrained(table, freeze=False, dim=dim, partition=P)
    assert learns.weight.requires_grad


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_a_pretrained_table(run: Run, dim: int | None) -> None:
    run(check_pretrained, dim, nprocs=3)
    with pytest.raises(ValueError, match="two dimensions"):
        ParallelEmbedding.from_pretrained(torch.zeros(3), dim=dim)


def unequal_tables(dim: int) -> None:
    """The table of the first worker is that of all."""
    P = tessel.world()
    mine, first = values((10, 6), P.rank), values((10, 6), 0)
    layers = [
        ParallelEmbedding.from_pretrained(mine, dim=dim),
        ParallelEmbedding.convert_parallel_embedding(
            torch.nn.Embedding(10, 6, _weight=mine.clone()), dim
        ),
    ]
    for layer in layers:
        assert torch.equal(layer.weight, table_layout(P, (10, 6), dim).local_part(first))


@pytest.mark.parametrize("dim", [0, 1])
def test_unequal_tables_become_that_of_the_first_worker(run: Run, dim: int) -> None:
    run(unequal_tables, dim, nprocs=3)


def copies(dim: int) -> None:
    P = tessel.world()
    layer = ParallelEmbedding(10, 6, padding_idx=3, dim=dim)
    ids = ids_of((3, 4), 10)
    expected = layer(ids)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    assigned = ParallelEmbedding(10, 6, padding_idx=3, dim=dim)
    assigned.load_state_dict(torch.load(saved), assign=True)
    others = [
        copy.deepcopy(layer),
        copy.copy(layer),
        pickle.loads(pickle.dumps(layer)),
        assigned,
        copy.deepcopy(layer).to(torch.float64).to(torch.float32),
    ]
    for other in others:
        assert repr(other) == repr(layer) and other.partition == P
        assert (
            get_parallel_dim(other.weight) == get_parallel_dim(copy.deepcopy(other.weight)) == dim
        )
        assert isinstance(other.weight, torch.nn.Parameter) and isinstance(other.weight, Shard)
        assert torch.equal(other(ids), expected)
    frozen = copy.deepcopy(layer).requires_grad_(False)
    assert not frozen(ids).requires_grad
    with torch.no_grad():
        assert torch.equal(layer(ids), expected)


@pytest.mark.parametrize("dim", [0, -1])
def test_a_layer_can_be_copied_saved_and_frozen(run: Run, dim: int) -> None:
    run(copies, dim, nprocs=3)


def made_on_meta(dim: int) -> None:
    torch.manual_seed(2)
    alone = torch.nn.Embedding(9, 5, padding_idx=1)
    layer = ParallelEmbedding(9, 5, padding_idx=1, dim=dim, device="meta")
    assert layer.weight.is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(2)
    layer.reset_parameters()
    assert get_parallel_dim(layer.weight) == dim
    close("output", layer(torch.arange(9)), alone(torch.arange(9)), 1e-6)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_layer_made_without_memory(run: Run, dim: int) -> None:
    run(made_on_meta, dim, nprocs=3)


def outside() -> None:
    """Workers that are not in the partition hold nothing and go on."""
    P = tessel.world().create_partition_inclusive([2, 0])
    for dim in (0, 1):
        table = values((5, 3), 1)
        layer = ParallelEmbedding(5, 3, dim=dim, partition=P, _weight=table)
        y = layer(torch.arange(5))
        if P.active:
            close("output", y, table)
            close("weight", layer.weight, table_layout(P, (5, 3), dim).local_part(table))
        else:
            assert y.numel() == layer.weight.numel() == 0


def test_any_workers_in_any_order(run: Run) -> None:
    run(outside, nprocs=4)


def default_group() -> None:
    tessel.distributed.init_process_group(2)
    try:
        layer = ParallelEmbedding(10, 6, dim=0)
        assert layer.partition == tessel.distributed.get_group()
        assert layer.weight.shape == (5, 6)
        # each group looks up ids of its own
        first = tessel.distributed.get_group().ranks[0]
        assert layer(ids_of((first + 1,), 10, first)).shape == (first + 1, 6)
    finally:
        tessel.distributed.destroy_process_group()


def test_the_default_group_is_used(run: Run) -> None:
    run(default_group, nprocs=4)


def checkpointed(dim: int) -> None:
    table, ids = values((10, 6), 1), ids_of((3, 4), 10)
    grads = []
    for recompute in (False, True):
        layer = ParallelEmbedding(10, 6, dim=dim, _weight=table)

        def block(ids: Tensor, layer: ParallelEmbedding = layer) -> Tensor:
            return layer(ids).sin()

        y = checkpoint(block, ids, use_reentrant=False) if recompute else block(ids)
        y.square().sum().backward()
        grads.append(layer.weight.grad)
    close("gradient", *grads)


@pytest.mark.parametrize("dim", [0, 1])
def test_checkpoints_compute_again(run: Run, dim: int) -> None:
    run(checkpointed, dim, nprocs=3)


def forward_mode(dim: int) -> None:
    """A derivative along a direction, and a gradient, as functions."""
    P = tessel.world()
    table, ids = values((10, 6), 1), ids_of((3, 4), 10)
    layout = table_layout(P, (10, 6), dim)
    layer = ParallelEmbedding(10, 6, dim=dim, _weight=table)
    direction = values((10, 6), 2)
    part = layout.local_part(direction).clone()
    _, tangent = torch.func.jvp(
        lambda w: torch.func.functional_call(layer, {"weight": w}, (ids,)),
        (layer.weight.detach(),),
        (part,),
    )
    close("tangent", tangent, F.embedding(ids, direction))
    (grad,) = torch.func.grad(
        lambda w: torch.func.functional_call(layer, w, (ids,)).square().sum()
    )({"weight": layer.weight.detach()}).values()
    whole = table.clone().requires_grad_()
    F.embedding(ids, whole).square().sum().backward()
    assert whole.grad is not None
    close("gradient", grad, layout.local_part(whole.grad))


@pytest.mark.parametrize("dim", [0, 1])
def test_transforms_of_torch_func(run: Run, dim: int) -> None:
    run(forward_mode, dim, nprocs=3)


def compiled(dim: int) -> None:
    torch._dynamo.reset()
    layer = ParallelEmbedding(10, 6, dim=dim)
    ids = ids_of((3, 4), 10)
    function = torch.compile(lambda ids: layer(ids).sin() * 2, backend="aot_eager")
    expected = layer(ids).sin() * 2
    close("output", function(ids), expected)
    expected.square().sum().backward()
    grad, layer.weight.grad = layer.weight.grad, None
    function(ids).square().sum().backward()
    close("gradient", layer.weight.grad, grad)


@pytest.mark.parametrize("dim", [0, 1])
def test_compiled_code_calls_it_as_it_is(run: Run, dim: int) -> None:
    run(compiled, dim, nprocs=2)
