"""Functions of shards: a sharding that is kept is right, for every function of the table.

Tests `distributed/propagation.py`, `distributed/trial.py`, `distributed/torch_call.py`,
`distributed/regrouping.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from models import Doubled
from parity import close, values
from tessel.distributed import gather, get_parallel_dim, register_parallel_dim, scatter
from tessel.distributed.shards import Shard, Sharding, as_plain, state_of
from tessel.tensor.table import RULES
from windowed_cases import raised

Run = Callable[..., list[Any]]
X = (4, 6, 10)

# functions that know where a value lies, or leave out values: of a part they are not the part
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "diagonal": lambda x: x.diagonal(),
    "diagonal of others": lambda x: x.diagonal(0, 0, 2),
    "group_norm": lambda x: F.group_norm(x, 2),
    "group_norm of channels": lambda x: F.group_norm(x, 6),
    "instance_norm": lambda x: F.instance_norm(x),
    "every third": lambda x: x[:, ::3],
    "every third of the last": lambda x: x[..., ::3],
    "all but the last": lambda x: x[:, :-1],
    "all but the first": lambda x: x[1:],
    "negative": lambda x: x[-3:],
    "pad": lambda x: F.pad(x, (0, 0, 1, 0)),
    "pad of the last": lambda x: F.pad(x, (1, 2)),
    "pad of less": lambda x: F.pad(x, (0, 0, 0, -1)),
    "max_pool1d with places": lambda x: F.max_pool1d(x, 1, 2, return_indices=True),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 1, 3),
    "conv1d": lambda x: F.conv1d(x, values((3, 6, 1), 1), stride=3),
    "conv1d over the batch": lambda x: F.conv1d(x.transpose(0, 1), values((3, 4, 1), 1)),
    "unfold": lambda x: x.unfold(1, 2, 3),
    "interpolate": lambda x: F.interpolate(x, scale_factor=0.5),
    "interpolate by more": lambda x: F.interpolate(x, scale_factor=2.0),
    "select_scatter": lambda x: x.select_scatter(torch.zeros_like(x[:, 0]), 1, 0),
    "slice_scatter": lambda x: x.slice_scatter(torch.zeros_like(x[:, :1]), 1, 0, 1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum of others": lambda x: x.cumsum(2),
    "sort": lambda x: x.sort(1),
    "sort of others": lambda x: x.sort(0),
    "argmax": lambda x: x.argmax(1),
    "argmax of others": lambda x: x.argmax(2),
    "softmax": lambda x: x.softmax(1),
    "mean": lambda x: x.mean(1),
    "mean of others": lambda x: x.mean((0, 2)),
    "layer_norm": lambda x: F.layer_norm(x, (10,)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "einsum": lambda x: torch.einsum("abc,abd->bcd", x, x),
    "matmul": lambda x: x @ values((10, 3), 1),
    "movedim": lambda x: x.movedim(1, 0),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "narrow": lambda x: x.narrow(2, 1, 3),
    "kthvalue": lambda x: x.kthvalue(2, 2),
    "trace": lambda x: x[0].trace(),
}


def check_kept(shape: tuple[int, ...], names: list[str]) -> dict[str, list[str]]:
    """Which shardings are kept along each dimension; those that are, are right."""
    kept: dict[str, list[str]] = {}
    for name in names:
        kept[name] = []
        for dim in range(len(shape)):
            whole = values(shape, 3)
            x = scatter(whole, dim)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    expected = FUNCTIONS[name](whole)
                    found = FUNCTIONS[name](x)
            except (RuntimeError, ValueError, IndexError):  # torch's, of what is too short here
                kept[name].append("raised")
                tessel.world().group.share_objects(None)
                continue
            states = [state_of(each) for each in _each(found)]
            everyones = tessel.world().group.share_objects(
                [type(state).__name__ + str(state) for state in states]
            )
            mine = {tuple(each) for each in everyones if each is not None}
            assert len(mine) == 1, f"{name} along {dim}: workers differ, {everyones}"
            if None in everyones:  # raised elsewhere: nobody can gather
                continue
            for a, b in zip(_each(found), _each(expected), strict=True):
                if isinstance(a, Shard) and isinstance(state_of(a), Sharding):
                    kept[name].append(f"{dim}->{get_parallel_dim(a)}")
                    got = gather(a)
                    assert got.shape == b.shape, f"{name} along {dim}: {got.shape}, {b.shape}"
                    if b.is_floating_point():
                        close(f"{name} along {dim}", got, b)
                    else:
                        assert torch.equal(got, b), f"{name} along {dim}"
    return kept


def _each(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]


@pytest.mark.parametrize("shape", [X, (5, 7, 7), (3, 1, 2)])
@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_sharding_that_is_kept_is_right(run: Run, nprocs: int, shape: tuple[int, ...]) -> None:
    names = [name for name in FUNCTIONS if shape == X or "conv1d" not in name]
    found = run(check_kept, shape, names, nprocs=nprocs)
    if shape == X:  # most functions keep the shardings of other dimensions
        assert sum(map(len, found[0].values())) > 60
        assert found[0]["mean of others"] == ["1->0"] or nprocs == 1
        assert not any("1->" in each for each in found[0]["tril"]) or nprocs == 1


def shared_weights() -> list[str]:
    """The gradients of weights that are as long as a shard by chance."""
    said = []
    w = values((2, 3, 3), 1).requires_grad_()
    h = scatter(values((4, 3, 5), 0), 0)
    for function in (
        lambda: F.conv1d(h, w),
        lambda: torch.einsum("bnc,bcd->bnd", h.mT[:, :3], w),
        lambda: torch.tensordot(h.mT, w, 1),
        lambda: h * w[0, 0, :1].expand_as(h),
    ):
        try:
            function()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_weight_is_no_part_though_it_is_as_long(run: Run) -> None:
    for conv, _, *others in run(shared_weights, nprocs=2):
        assert all("tessel.distributed.copy" in said for said in (conv, *others))


# what is as long as a part of (3, 10), and was computed from a whole value of that shape
AS_LONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expanded": lambda w, n: w[:, :1].expand(3, n).clone(),
    "expanded number": lambda w, n: w.sum().expand(3, n).exp(),
    "broadcast": lambda w, n: w[0, :1] * torch.ones(3, n, dtype=w.dtype),
    "gate": lambda w, n: F.linear(w, torch.ones(n, 10, dtype=w.dtype)).sigmoid(),
    "cat": lambda w, n: torch.cat([w[:, :2], w[:, 2:n]], 1),
    "repeat": lambda w, n: w[:, :1].repeat(1, n),
    "index": lambda w, n: w[:, torch.arange(n)] + 1,
    "slice": lambda w, n: w[:, :n].relu().double(),
    "own function": lambda w, n: Doubled.apply(w[:, :n]),
    "maximum": lambda w, n: w.view(3, 2, 5).max(1).values[:, :n],
}


def use_as_long(name: str) -> list[Any]:
    """Such a value beside a shard: what is raised, and what that says to do is right."""
    function, whole = AS_LONG[name], values((3, 10), 0)
    w, expected, again = (values((3, 10), 1).requires_grad_() for _ in range(3))
    h = scatter(whole, 1)
    n = h.shape[1]
    errors = [raised(lambda: h * function(w, n)), raised(lambda: torch.add(function(w, n), h))]
    with torch.no_grad():
        assert get_parallel_dim(h * function(w, n)) == 1
    assert get_parallel_dim(h * function(w.detach(), n)) == 1
    (h * register_parallel_dim(function(tessel.distributed.copy(again), n), 1)).sum().backward()
    for part in whole.split(n, 1):
        (part * function(expected, n)).sum().backward()
    assert again.grad is not None and expected.grad is not None
    close("gradient", again.grad, expected.grad)
    return errors


@pytest.mark.parametrize("name", AS_LONG)
def test_a_value_is_no_part_though_it_was_made_as_long(run: Run, name: str) -> None:
    """Each worker would have a gradient of one part, and nothing would tell."""
    first, second = run(use_as_long, name, nprocs=2)
    assert first == second
    for error in first:
        assert error[0] is ValueError and "tessel.distributed.copy(tensor)" in error[1]


def use_sum() -> Any:
    h = scatter(values((3, 10), 0), 1)
    own = values((3, h.shape[1]), 1).requires_grad_()
    error = raised(lambda: h * tessel.distributed.reduce(own).relu())
    total = tessel.distributed.reduce(own)
    (h * tessel.distributed.copy(total)).sum().backward()
    assert own.grad is not None
    close("gradient", own.grad, tessel.distributed.reduce(as_plain(h)))
    return error


def test_a_sum_over_workers_is_no_part_though_it_is_as_long(run: Run) -> None:
    first, second = run(use_sum, nprocs=2)
    assert first == second and "tessel.distributed.copy(tensor)" in first[1]


# what keeps each number of a part in its place
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda own: own,
    "activations": lambda own: F.leaky_relu(own.relu().clone()) + own.log1p() * F.gelu(own),
    "dtypes": lambda own: own.float().to(torch.float64).type(torch.float32).double(),
    "choices": lambda own: torch.where(own > 0.5, own, 0.5).masked_fill(own > 2, 1).clamp(max=1),
    "dropout": lambda own: F.dropout(own) / own.sqrt() + torch.zeros_like(own).copy_(own),
    "expanded": lambda own: torch.maximum(own, own**2) * own.expand(3, -1),
    "complex": lambda own: torch.complex(own, own).abs(),
}


def use_own_in_place() -> None:
    for name, function in IN_PLACE.items():
        h = scatter(values((3, 10), 0), 1)
        own = values((h.shape[1],), 1).abs().add(0.1).requires_grad_()
        y = h * function(own)
        assert get_parallel_dim(y) == 1, name
        y.sum().backward()
        assert own.grad is not None and own.grad.abs().sum() > 0, name


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_part_stays_one_where_its_numbers_stay_in_their_places(run: Run, nprocs: int) -> None:
    run(use_own_in_place, nprocs=nprocs)


def gradients_that_are_shards() -> None:
    """A gradient that is given as a shard, and what the group does afterwards."""
    x = values((3, 5), 0).requires_grad_()
    torch.manual_seed(0)
    layer = tessel.nn.ParallelLinear(5, 7, dim=-1).double()
    torch.manual_seed(0)
    alone = torch.nn.Linear(5, 7).double()
    h = layer(x)
    h.backward(torch.ones_like(h))
    expected = torch.autograd.grad(alone(x).sum(), x)[0]
    assert x.grad is not None
    close("gradient", x.grad, expected)
    h = layer(x)
    (again,) = torch.autograd.grad(h, x, torch.ones_like(h))
    close("gradient", again, expected)
    for of in (as_plain, lambda h: h.sum(0), lambda h: h.sum(1), lambda h: h.T, torch.clone):
        y = of(layer(x))
        (again,) = torch.autograd.grad(y, x, torch.ones_like(y if of is not as_plain else h))
        close("gradient", again, expected)
        y = of(layer(x))
        x.grad = None
        torch.autograd.backward([y], [torch.ones_like(y if of is not as_plain else h)])
        close("gradient", x.grad, expected)
    assert tessel.distributed.reduce(torch.ones(2)).tolist() == [tessel.world().size] * 2
    head = tessel.nn.ParallelLinear(5, 1, dim=-1).double()(x)
    assert head.T.full().shape == (1, 3)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_gradients_may_be_shards(run: Run, nprocs: int) -> None:
    run(gradients_that_are_shards, nprocs=nprocs)


def broken_rule(*_: Any) -> Any:
    raise KeyError("a mistake in the rule")


def test_a_mistake_in_a_rule_is_no_lost_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    x = register_parallel_dim(torch.ones(3, 17), 1)
    monkeypatch.setitem(RULES, "cumsum", broken_rule)
    with pytest.raises(KeyError, match="a mistake in the rule"):
        x.cumsum(0)
