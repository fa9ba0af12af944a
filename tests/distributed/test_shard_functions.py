"""Functions of shards: a sharding that is kept is right, for every function of the table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import tessel
from parity import close, values
from tessel.distributed import gather, get_parallel_dim, scatter
from tessel.distributed.shards import Shard, Sharding, state_of

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
@pytest.mark.parametrize("nprocs", [1, 2, 3])
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
    assert tessel.distributed.reduce(torch.ones(2)).tolist() == [tessel.world().size] * 2
    head = tessel.nn.ParallelLinear(5, 1, dim=-1).double()(x)
    assert head.T.full().shape == (1, 3)


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_gradients_may_be_shards(run: Run, nprocs: int) -> None:
    run(gradients_that_are_shards, nprocs=nprocs)
