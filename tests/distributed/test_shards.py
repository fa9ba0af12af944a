"""Shardings of shards: torch's functions keep them where they are known, and lose them loudly.

Tests `distributed/shards.py`, `distributed/shardings.py`, `distributed/sharing.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types as of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as of_utilities
from torch.utils.checkpoint import checkpoint

import tessel.distributed
from covering import repeats
from models import Doubled
from parity import close, values
from tessel import Partition
from tessel.distributed import gather, get_parallel_dim, register_parallel_dim, scatter
from tessel.distributed.shards import Shard, Sharding, as_plain, as_shard, sharding_of, state_of
from tessel.nn.functional import parallel_cross_entropy, parallel_embedding, parallel_linear
from tessel.nn.parallel import ParallelDropout, ParallelLinear, RegisterParallelDim
from windowed_cases import raised

Run = Callable[..., list[Any]]
Function = Callable[[Tensor], Any]


class Both(NamedTuple):
    first: Tensor
    second: Tensor


class Row(tuple[Tensor, ...]):
    """A tuple of somebody's own."""

    __slots__ = ()


# What keeps the sharding of a tensor (4, 6, 10) that is a shard along dim 1: the shards of the
# result are the result of the whole.
KEPT: dict[str, Function] = {
    "add": lambda x: 1 + x + x * 2 - x / 3,
    "operators": lambda x: -((2 - x) ** 2) / (3 + x.abs()) % 2,
    "comparison": lambda x: (x > 0) & ~(x < -1),
    "broadcast": lambda x: x + torch.arange(10.0).double() + torch.ones(2, 4, 1, 1).double(),
    "relu": lambda x: F.gelu(torch.relu(x)) + F.silu(x) + F.leaky_relu(x) + F.softplus(x),
    "activations": lambda x: F.elu(x) + F.hardswish(x) + F.logsigmoid(x) + torch.tanh(x),
    "where": lambda x: torch.where(x > 0, x, torch.tensor(0.5).double()) + x.clamp(min=0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.5),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "likes": lambda x: torch.zeros_like(x) + x.new_ones(x.shape) + torch.full_like(x, 3),
    "clone": lambda x: x.clone().contiguous().detach().requires_grad_().detach(),
    "to": lambda x: x.float().to(torch.float64).type(torch.float32).double().to("cpu"),
    "in place": lambda x: x.clone().mul_(2).add_(x).relu_(),
    "augmented": lambda x: _augmented(x),
    "set item": lambda x: _set_item(x),
    "transpose": lambda x: x.transpose(0, 1).swapaxes(1, 2),
    "permute": lambda x: torch.permute(x, (2, 0, 1)).permute(2, 0, 1),
    "movedim": lambda x: torch.movedim(x, 1, -1) + x.movedim((1, 0), (2, 0)),
    "mT": lambda x: x.mT + x.adjoint(),
    "T": lambda x: x[0].T,
    "t": lambda x: x[:, :, 2].t(),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1).unsqueeze(0),
    "squeeze": lambda x: x.unsqueeze(0).unsqueeze(-1).squeeze(0).squeeze(-1),
    "view of others": lambda x: x.view(2, 2, *x.shape[1:]).view(4, *x.shape[1:]),
    "view behind": lambda x: x.reshape(4, x.shape[1], 5, 2),
    "flatten behind": lambda x: x.flatten(1),
    "merged": lambda x: x.reshape(4, -1),
    "merged and split": lambda x: x.reshape(4, -1).view(4, -1, 10),
    "heads": lambda x: x.repeat(1, 1, 2).flatten(1).view(4, -1, 5, 4).transpose(1, 2).contiguous(),
    "without rows": lambda x: x[:0].view(0, x.shape[1], 5, 2).flatten(1).view(0, x.shape[1] * 2, 5),
    "unflatten": lambda x: x.unflatten(2, (2, 5)),
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1, -1) + x.expand_as(x[None]),
    "expand a plain one": lambda x: torch.ones(1, 1, 10).double().expand_as(x),
    "repeat": lambda x: x.repeat(2, 1, 3) + torch.tile(x, (2, 1, 3)),
    "index": lambda x: x[..., 2:5][1:3, :, None, 1],
    "index behind": lambda x: x[0, :, -1],
    "select": lambda x: x.select(2, 3) + x.narrow(2, 1, 1).squeeze(2),
    "index_select": lambda x: x.index_select(2, torch.tensor([3, 1, 1])),
    "unbind": lambda x: x.unbind(2)[1] + torch.unbind(x, dim=2)[0],
    "chunks": lambda x: x.chunk(2, dim=2)[1] + x.split(5, 2)[0],
    "cat": lambda x: torch.cat([x, 2 * x], dim=2),
    "cat of a named tuple": lambda x: torch.cat(Both(x, 2 * x), 2) + torch.cat(Row([x, x]), -1),
    "stack": lambda x: torch.stack([x, 2 * x]) + torch.stack((x, x), dim=0),
    "sum": lambda x: x.sum(0) + x.mean(dim=0) + x.amax(0) + x.prod(0),
    "sum behind": lambda x: torch.sum(x, dim=(0, 2)) + x.logsumexp((0, 2)),
    "sum and keep": lambda x: x.sum(2, keepdim=True) + x.std(2, keepdim=True) + x.norm(2, 2, True),
    "max": lambda x: x.max(dim=2).values + x.min(2)[0] + x.median(2).values,
    "kthvalue": lambda x: x.kthvalue(2, 0, True).values + x.kthvalue(2).values.unsqueeze(2),
    "argmax": lambda x: x.argmax(-1).double() + (x > 0).any(2) + (x > 0).all(dim=2),
    "maximum": lambda x: torch.max(x, x.neg()) + torch.minimum(x, x * 2),
    "softmax": lambda x: x.softmax(-1) + F.log_softmax(x, dim=2) + torch.softmax(x, 0),
    "cumsum": lambda x: x.cumsum(2) + x.flip(0) + x.roll(1, 2),
    "sort": lambda x: x.sort(2).values + torch.sort(x, dim=0)[0],
    "topk": lambda x: x.topk(2, dim=2).values,
    "layer_norm": lambda x: F.layer_norm(x, (10,)) + F.rms_norm(x, (10,)),
    "normalize": lambda x: F.normalize(x, dim=2) + F.glu(torch.cat([x, x], 2)),
    "pad": lambda x: F.pad(x, (1, 2)),
    "linear": lambda x: F.linear(x, torch.ones(3, 10).double(), torch.ones(3).double()),
    "linear outputs": lambda x: F.linear(torch.ones(2, 10).double(), x[0], x[0, :, 0]),
    "matmul rows": lambda x: x @ torch.ones(10, 3).double(),
    "matmul columns": lambda x: torch.ones(3, 10).double() @ x.mT,
    "matmul batch": lambda x: torch.matmul(x.transpose(0, 1), x.transpose(0, 1).mT),
    "bmm": lambda x: torch.bmm(x.transpose(0, 1), x.permute(1, 2, 0)),
    "attention": lambda x: F.scaled_dot_product_attention(x.unsqueeze(2), *[x.unsqueeze(2)] * 2),
    "registered": lambda x: register_parallel_dim(x.sin(), 1) if isinstance(x, Shard) else x.sin(),
    "einsum": lambda x: torch.einsum("abc->cab", x),
    "einsum with dots": lambda x: torch.einsum("a...c->c...", x),
    "einsum with a weight": lambda x: torch.einsum("abc,cd->dab", x, values((10, 3), 3)),
    "einsum of two": lambda x: torch.einsum("abc,abd->bcd", x, x.square()),
    "einsum in a list": lambda x: torch.einsum("abc,abc->ba", [x, x]),
    "looked up": lambda x: values((5, 3), 3)[(x > 0).long()],
}


def _augmented(x: Tensor) -> Tensor:
    y = x * 1
    y += x
    y *= 2
    y /= 3
    return y


def _set_item(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 0
    y[1] = y[2] * 2
    y[..., 1:3] = y[:, :, :2] + 1
    y[y > 1] = 1
    y[2] = torch.ones(10)
    return y


def check_kept(names: list[str], size: int) -> None:
    """The function of the shards, gathered by its sharding, is the function of the whole."""
    for name in names:
        function = KEPT[name]
        whole = values((4, size, 10), 1).requires_grad_()
        again = whole.detach().clone().requires_grad_()
        expected, shard = function(whole), function(scatter(again, 1))
        assert isinstance(shard, Shard), name
        sharding = sharding_of(shard)
        assert sharding is not None, name
        got = gather(shard)
        assert type(got) is Tensor and get_parallel_dim(got) is None
        close(name, got.double(), expected.double())
        if expected.requires_grad:
            weights = values(expected.shape, 2)
            (expected * weights).sum().backward()
            (got * weights).sum().backward()
            close(f"gradient of {name}", again.grad, whole.grad)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_shardings_are_kept_where_they_are_known(run: Run, nprocs: int) -> None:
    """All of 6 lines are split over 1, 2 and 3 workers, and so are 7, in shards of two lengths."""
    run(check_kept, list(KEPT), 6, nprocs=nprocs)
    run(check_kept, list(KEPT), 7, nprocs=nprocs)


# What loses the sharding, and the name of the function that the error gives.
LOST: dict[str, tuple[str, Function]] = {
    "sum of all": ("sum", lambda x: x.sum()),
    "mean": ("mean", lambda x: x.mean(1)),
    "keyword": ("sum", lambda x: torch.sum(x, dim=(0, 1))),
    "softmax": ("softmax", lambda x: x.softmax(1)),
    "sort": ("sort", lambda x: x.sort(1).values * 2),
    "index": ("__getitem__", lambda x: x[:, 0]),
    "slice": ("__getitem__", lambda x: x[:, 1:]),
    "mask": ("__getitem__", lambda x: x[x > 0]),
    "broadcast of one": ("add", lambda x: _stretched()),
    "other shardings": ("mul", lambda x: x[:, :, : x.shape[1]].mT * x[:, :, : x.shape[1]]),
    "merged as the inner one": ("flatten", lambda x: x.flatten(0, 1)),
    "may be outer": ("view", lambda x: x.sum(2).view(4, 1, -1)),
    "squeezed": ("squeeze", lambda x: scatter(values((4, _workers()), 0), 1).squeeze()),
    "linear": ("linear", lambda x: F.linear(x.mT, torch.ones(3, x.shape[1]).double())),
    "matmul": ("matmul", lambda x: x.mT @ x),
    "einsum over it": ("einsum", lambda x: torch.einsum("abc,abd->acd", x, x)),
    "einsum with its part": ("einsum", lambda x: torch.einsum("abc,b->ac", x, x[0, :, 0] * 1)),
    "einsum of two": ("einsum", lambda x: torch.einsum("abc,adc->abd", x, x)),
    "einsum with a plain part": (
        "einsum",
        lambda x: torch.einsum("abc,bd->acd", x, torch.ones(x.shape[1], 2).double()),
    ),
    "einsum that broadcasts": ("einsum", lambda x: _einsum_of_one()),
    "cumsum": ("cumsum", lambda x: x.cumsum(1)),
    "flip": ("flip", lambda x: x.flip(0, 1)),
    "cat": ("cat", lambda x: torch.cat([x, x], 1)),
    "cat with another": ("cat", lambda x: torch.cat([x, torch.ones_like(as_plain(x))])),
    "expand": ("expand", lambda x: scatter(values((4, _workers(), 1), 0), 1).expand(4, 5, 3)),
    "repeat": ("repeat", lambda x: x.repeat(1, 2, 1)),
    "layer_norm": ("layer_norm", lambda x: F.layer_norm(x.mT, (x.shape[1],))),
    "conv": ("conv1d", lambda x: F.conv1d(x, torch.ones(2, x.shape[1], 3).double())),
    "unbind": ("unbind", lambda x: x.unbind(1)[0]),
    "chunk": ("chunk", lambda x: x.chunk(2, 1)[0]),
    "gather": ("gather", lambda x: x.gather(1, torch.zeros(4, 1, 10, dtype=torch.int64))),
    "new": ("new_zeros", lambda x: x.new_zeros(4, 10)),
    "set a part": ("__setitem__", lambda x: _set(x.clone(), (slice(None), 0), 1.0)),
    "set another": ("__setitem__", lambda x: _set(x[:, :, : x.shape[1]].clone(), 0, _turned(x))),
    "rows": ("__getitem__", lambda x: x[torch.tensor([0, 1])]),
    "places": ("where", lambda x: torch.where(x[0, :, 0] < 99)[0].double()),
    "iteration": ("unbind", lambda x: next(iter(x.transpose(0, 1)))),
    "in place": ("add_", lambda x: _in_place_twice(x)),
    "later": ("cumsum", lambda x: (x.cumsum(1).relu() + 1).mT.contiguous()),
}


def check_reshapes(seed: int, count: int) -> int:
    """Random merges and splits of neighbouring dimensions: known shardings are right.

    A dimension of length 1 before the split one stays what it is, and could as well be read as the
    outer part of a split; here there is none. Returns how many were known.
    """
    rng, kept, P = Random(seed), 0, tessel.world()
    for number in range(count):
        shape = [rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(1, 4))]
        dim = rng.randrange(len(shape))
        shape[:dim] = [rng.choice((2, 3, 4)) for _ in range(dim)]
        shape[dim] = rng.randint(1, 12)
        x = values(shape, number)
        shard = scatter(x, dim)
        # the new lengths, of the whole and here, and which of them is split; None for none
        whole, here, place = list(shape), list(shard.shape), dim
        for _ in range(rng.randint(1, 3)):
            whole, here, place = _regroup(rng, whole, here, place, P)
        y = shard.reshape(here)
        # a shape that stays is no change; where workers disagree, the next call raises on all
        known = isinstance(state_of(y), Sharding) and here != list(shard.shape)
        states = P.group.share_objects(str(state_of(y)) if known else None)
        if known and all(state == states[0] for state in states):
            kept += 1
            assert torch.equal(gather(y), x.reshape(whole)), (shape, dim, whole, state_of(y))
    return kept


def _regroup(
    rng: Random, whole: list[int], here: list[int], place: int | None, P: Partition
) -> tuple[list[int], list[int], int | None]:
    """Merge two neighbours, or split a dimension in two, if all workers can."""
    k = rng.randrange(len(whole))
    if rng.random() < 0.5 and k + 1 < len(whole):
        inside = place == k + 1 and whole[k] != 1
        after = place if place is None or place <= k else place - 1
        merged = [*whole[:k], whole[k] * whole[k + 1], *whole[k + 2 :]]
        local = [*here[:k], here[k] * here[k + 1], *here[k + 2 :]]
        return merged, local, None if inside or place is None else after
    inner = rng.choice((1, 2, 3))
    everyones = [whole[k]] if place != k else P.group.share_objects(here[k])
    if place is None or any(length % inner for length in everyones):
        return whole, here, place
    split = [*whole[:k], whole[k] // inner, inner, *whole[k + 1 :]]
    local = [*here[:k], here[k] // inner, inner, *here[k + 1 :]]
    return split, local, place + (k < place)


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 3])
def test_shardings_of_random_shapes_are_right(run: Run, nprocs: int) -> None:
    for kept in run(check_reshapes, 5, repeats(400), nprocs=nprocs):
        assert kept > repeats(120)


def _workers() -> int:
    return tessel.distributed.get_group_size()


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


def _turned(x: Tensor) -> Tensor:
    return x[0, :, : x.shape[1]].T


def _stretched() -> Tensor:
    return scatter(values((4, _workers(), 10), 0), 1) + torch.ones(4, 5, 10).double()


def _einsum_of_one() -> Tensor:
    """A part that is 1 long meets what may be the whole."""
    x = scatter(values((4, _workers(), 10), 0), 1)
    return torch.einsum("abc,b->abc", x, torch.ones(5).double())


def _in_place_twice(x: Tensor) -> Tensor:
    y = x[:, :, : x.shape[1]].clone()
    z = y.clone().transpose_(1, 2)
    assert get_parallel_dim(z) == 2
    return z.add_(y)


def check_lost(names: list[str]) -> list[Any]:
    layer = ParallelLinear(10, 4, dim=0).double()
    found = []
    for name in names:
        y = LOST[name][1](scatter(values((4, 6, 10), 1), 1))
        assert isinstance(y, Shard), name
        error = raised(lambda y=y: layer(y))
        assert error is not None, name
        found.append((name, *error))
        for ask in (get_parallel_dim, gather, tessel.distributed.copy, tessel.distributed.reduce):
            assert raised(lambda ask=ask, y=y: ask(y))[0] is ValueError
        whole = gather(register_parallel_dim(y.reshape(-1), 0))
        assert get_parallel_dim(whole) is None
    return found


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_lost_sharding_raises_the_same_on_every_worker(run: Run, nprocs: int) -> None:
    """The next parallel layer names the function that lost it, and what to write."""
    first, *others = run(check_lost, list(LOST), nprocs=nprocs)
    assert all(other == first for other in others)
    for name, kind, text in first:
        assert kind is ValueError, name
        function = LOST[name][0]
        assert f"lost in `{function}`" in text and "register_parallel_dim(x, dim)" in text, text


def take_torchs_loss() -> list[Any]:
    """The loss of torch itself, of logits whose classes are split, and of those whose rows are."""
    logits, target = scatter(values((3, 4), 0), 1), torch.tensor([0, 1, 0])
    rows = F.cross_entropy(scatter(values((4, 3), 0), 0), target[:2], reduction="none")
    assert raised(lambda: get_parallel_dim(rows))
    return [
        raised(lambda: F.cross_entropy(logits, target)),
        raised(lambda: torch.nn.CrossEntropyLoss()(logits[0], target[0])),
        raised(lambda: F.cross_entropy(input=logits, target=target)),
        raised(lambda: F.nll_loss(logits, target)),
        raised(lambda: F.nll_loss(logits.log_softmax(1), target)),
        raised(lambda: torch.nn.NLLLoss()(F.log_softmax(logits, dim=-1), target)),
        raised(lambda: F.cross_entropy(logits.flip(1), target)),
    ]


def test_torchs_loss_of_split_classes_is_refused(run: Run) -> None:
    """It would take the classes of one worker for all."""
    first, second = run(take_torchs_loss, nprocs=2)
    assert first == second
    for kind, text in first:
        assert kind is ValueError and "tessel.nn.ParallelCrossEntropyLoss()" in text


def writes(kind: str) -> Any:
    x = scatter(torch.ones(2, 4), 1)
    plain = torch.zeros(2, x.shape[1])
    views = torch.zeros(3, 2, x.shape[1])
    if kind == "add_":
        return raised(lambda: views[0].add_(x)), raised(lambda: plain.data.add_(x))
    if kind == "__setitem__":
        return raised(lambda: plain.__setitem__(0, x[0])), raised(lambda: views.__setitem__(0, x))
    if kind == "add":
        return raised(lambda: torch.add(x, 1, out=views[0])), raised(lambda: views[1].copy_(x))
    target = register_parallel_dim(plain, 1)
    assert get_parallel_dim(torch.mul(x, 2, out=target)) == 1
    assert torch.equal(as_plain(target), torch.full_like(plain, 2))
    assert torch.equal(plain, torch.full_like(plain, 2))
    return None


@pytest.mark.parametrize("kind", ["add_", "__setitem__", "add", "as_shard"])
def test_a_shard_is_not_written_into_a_view(run: Run, kind: str) -> None:
    """Nothing would tell of the tensor whose view it is that a part of it is a shard now."""
    first, second = run(writes, kind, nprocs=2)
    assert first == second
    if kind != "as_shard":
        for error in first:
            assert error[0] is ValueError and "writes a shard into a tensor" in error[1]


def write_into_own_memory() -> None:
    """Averages of parameters, and sums of what they give, as training loops keep them."""
    layer = ParallelLinear(5, 7, dim=-1)
    average = {name: value.clone() for name, value in layer.state_dict().items()}
    assert all(type(value) is Tensor for value in average.values())
    for name, value in layer.named_parameters():
        average[name].mul_(0.9).add_(value.detach(), alpha=0.1)
        assert get_parallel_dim(average[name]) == 0
        close(name, as_plain(average[name]), as_plain(value.detach()), 1e-6)
    x = scatter(values((4, 6), 0), 1)
    plain = as_plain(x).clone()
    plain[x > 0] = 2.0
    close("by a mask", gather(plain), values((4, 6), 0).where(values((4, 6), 0) <= 0, 2.0))
    penalty = torch.zeros(())
    penalty += layer.weight.square().sum()
    assert raised(lambda: get_parallel_dim(penalty))[0] is ValueError
    penalty.backward()
    close("gradient", as_plain(layer.weight.grad), 2 * as_plain(layer.weight.detach()), 1e-6)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_tensor_with_memory_of_its_own_becomes_a_shard(run: Run, nprocs: int) -> None:
    run(write_into_own_memory, nprocs=nprocs)


def survive() -> None:
    """Copies, files, other dtypes; of tensors and of the parameters of layers."""
    x = scatter(values((4, 7), 0), 1)
    sharding = Sharding(1, tessel.world(), 7)
    leaf = x.detach().requires_grad_()
    (leaf * 2).sum().backward()
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    for other in (
        copy.copy(x),
        copy.deepcopy(x),
        copy.deepcopy({"a": [x, x]})["a"][1],
        copy.deepcopy(leaf),
        pickle.loads(pickle.dumps(x)),
        torch.load(buffer, weights_only=False),
        x.to(torch.float64),
    ):
        assert isinstance(other, Shard) and state_of(other) == sharding
        assert torch.equal(as_plain(other.detach()), as_plain(x))
    assert copy.deepcopy(leaf).requires_grad
    assert torch.equal(copy.deepcopy(leaf).grad, leaf.grad)
    assert get_parallel_dim(leaf.grad) == 1
    check_parameters()


def check_parameters() -> None:
    column, row = ParallelLinear(5, 7, dim=-1), ParallelLinear(7, 5, dim=0)
    model = torch.nn.Sequential(column, torch.nn.ReLU(), row)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    other = copy.deepcopy(model)
    other.load_state_dict(torch.load(saved), assign=True)
    for each in (
        model,
        other,
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model).double(),
        copy.deepcopy(model).to(torch.bfloat16),
        copy.deepcopy(model).to("meta").to_empty(device="cpu"),
    ):
        shardings = [sharding_of(parameter) for parameter in each.parameters()]
        P = tessel.world()
        assert shardings == [Sharding(0, P, 7), Sharding(0, P, 7), Sharding(1, P, 7), None], (
            shardings
        )
        assert all(isinstance(each, torch.nn.Parameter) for each in each.parameters())
        assert get_parallel_dim(each[0](torch.ones(2, 5, dtype=each[0].weight.dtype))) == 1
    for layer, dim in ((column, 0), (row, 1)):
        for name, function in OF_PARAMETERS.items():
            result = function(layer.weight)
            assert state_of(result) == Sharding(dim, tessel.world(), 7), (name, state_of(result))
            assert torch.equal(as_plain(result.detach()).float(), as_plain(layer.weight.detach()))
            assert isinstance(result, torch.nn.Parameter) == (name in ARE_PARAMETERS), name
        assert copy.deepcopy(layer.weight).requires_grad
        assert not pickle.loads(pickle.dumps(layer.weight.requires_grad_(False))).requires_grad
        layer.weight.requires_grad_()


def _through_a_file(x: Tensor) -> Any:
    """As torch loads it by default, without code from the file."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


OF_PARAMETERS: dict[str, Function] = {
    "clone": lambda w: w.clone(),
    "arithmetic": lambda w: w * 4 / 4,
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "deepcopy": copy.deepcopy,
    "deepcopy twice": lambda w: copy.deepcopy([w, w])[1],
    "copy": copy.copy,
    "dtype": lambda w: w.to(torch.float64),
    "half and back": lambda w: w.double().float(),
    "device": lambda w: w.to("cpu", copy=True),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "file": _through_a_file,
    "views": lambda w: w.T[None].transpose(-1, -2)[0],
    "parameter": lambda w: torch.nn.Parameter(w),
    "parameter of data": lambda w: torch.nn.Parameter(w.data),
    "like": lambda w: torch.zeros_like(w).copy_(w.detach()),
}
ARE_PARAMETERS = (
    *("deepcopy", "deepcopy twice", "copy", "pickle", "file", "parameter", "parameter of data"),
)


@pytest.mark.parametrize("nprocs", [1, 3])
def test_shardings_survive_copies_and_files(run: Run, nprocs: int) -> None:
    run(survive, nprocs=nprocs)


class Keeping(torch.autograd.Function):
    """A function of a user's, who keeps an operator by the name that Tessel's own nodes have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        layout = tessel.Layout.balanced(tessel.world(), (4,))
        ctx.operator = tessel.Move(layout, layout)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, w: x * w[0, 0],
    "add": lambda x, w: x + w[:, :1].sigmoid(),
    "sub": lambda x, w: x - Keeping.apply(w)[0, 0],
    "linear": lambda x, w: F.linear(x.mT, w, None).mT,
    "matmul": lambda x, w: w @ x,
    "layer_norm": lambda x, w: F.layer_norm(x.mT, (4,), w[0]).mT,
}


def use(name: str) -> Any:
    """A whole parameter together with a shard: an error, or a copy with the right gradient."""
    function = USES[name]
    x, weight = values((4, 6), 0), values((4, 4), 1).requires_grad_()
    again = weight.detach().clone().requires_grad_()
    shard = scatter(x, 1)
    error = raised(lambda: function(shard, again))
    with torch.no_grad():
        function(shard, again)
    function(shard, again.detach())
    expected = function(x, weight)
    got = gather(function(shard, tessel.distributed.copy(again)))
    close("value", got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    close("gradient", again.grad, weight.grad)
    return error


@pytest.mark.parametrize("name", USES)
def test_a_whole_parameter_with_a_shard_is_copied_first(run: Run, name: str) -> None:
    """Else each worker would have a part of its gradient only, and nothing would tell."""
    first, second = run(use, name, nprocs=2)
    assert first == second and first[0] is ValueError
    assert f"`{name}`" in first[1] and "tessel.distributed.copy(tensor)" in first[1]


def use_own_parts() -> None:
    """What has the split dimension too is a part of its own, and so is what comes of shards."""
    layer = ParallelLinear(6, 4, dim=1).double()
    x = scatter(values((3, 4), 0), 1)
    part = values((x.shape[1],), 0).requires_grad_()
    scale = layer(values((3, 6), 0)).square()
    for other in (part, layer.bias, as_plain(scale).mean(1, keepdim=True), layer.weight[:, 0]):
        assert get_parallel_dim(x * other) == 1


def test_own_parts_need_no_copy(run: Run) -> None:
    run(use_own_parts, nprocs=2)


def use_single() -> Any:
    """A whole number together with shards of which one is 1 long on some worker."""
    layer = ParallelLinear(6, 3, dim=1).double()
    row = ParallelLinear(3, 2, dim=0).double()
    x, gain = values((4, 6), 0), torch.ones(1).double().requires_grad_()
    error = raised(lambda: layer(x) * gain)
    row(layer(x) * tessel.distributed.copy(gain)).square().sum().backward()
    part = register_parallel_dim(torch.ones(layer(x).shape[1]).double().requires_grad_(), 0)
    assert get_parallel_dim(layer(x) * part) == 1
    return error, gain.grad


@pytest.mark.parametrize("nprocs", [2, 3])
def test_shards_of_length_one_do_not_hide_a_whole_parameter(run: Run, nprocs: int) -> None:
    (error, grad), *others = run(use_single, nprocs=nprocs)
    assert error[0] is ValueError and "copy(tensor)" in error[1]
    for other, its in others:
        assert other == error
        close("gradient", its, grad)


def of_transforms() -> list[Any]:
    """What the transforms of torch.func compute from shards, and say nothing of."""
    head = ParallelLinear(6, 6, dim=-1).double()
    row, drop = ParallelLinear(6, 4, dim=0).double(), ParallelDropout()
    x, target = values((3, 6), 0), torch.tensor([0, 1, 0])
    logits = torch.func.vmap(torch.clone)(F.linear(x, head.weight))
    assert state_of(logits) is None
    uses: list[Callable[[Tensor], Any]] = [
        row,
        ParallelLinear(logits.shape[1], 4, dim=-1).double(),
        drop,
        lambda y: scatter(y, 0),
        lambda y: parallel_cross_entropy(y, target),
        lambda y: parallel_linear(x[:, : y.shape[1]], y),
        lambda y: parallel_embedding(target, y),
    ]
    lost = (
        *(logits.tanh() * 2, torch.func.vmap(torch.tanh)(head(x))),
        torch.func.vmap(torch.tanh)(head.weight),
    )
    errors = [raised(lambda use=use, y=y: use(y)) for y in lost for use in uses]
    errors.append(raised(lambda: parallel_linear(x, head.weight)))
    for way_out in (register_parallel_dim(logits, None).tanh(), Doubled.apply(logits) + 1):
        for use in uses[1:]:
            use(way_out)
    loss = parallel_cross_entropy(register_parallel_dim(logits, -1), target)
    whole = F.cross_entropy(gather(register_parallel_dim(logits, -1)), target)
    close("loss", loss, whole)
    assert parallel_cross_entropy(row(head(x)) + row.bias, target).requires_grad
    return errors


def test_what_comes_of_a_transform_is_not_taken_for_whole(run: Run) -> None:
    first, second = run(of_transforms, nprocs=2)
    assert first == second
    for kind, text in first:
        assert kind is ValueError
        assert "lost in `torch` functions of a parameter" in text or "pass dim=-1" in text


def derive_by_transforms() -> None:
    """Transforms of layers, and by shards, give the derivatives of one process."""
    torch.manual_seed(0)
    head, row = ParallelLinear(6, 6, dim=-1).double(), ParallelLinear(6, 4, dim=0).double()
    torch.manual_seed(0)
    plain, back = torch.nn.Linear(6, 6).double(), torch.nn.Linear(6, 4).double()
    x, target = values((3, 6), 0), torch.tensor([0, 1, 5])
    h, whole = head(x).detach(), plain(x).detach()

    def part(y: Tensor) -> Tensor:
        return as_plain(scatter(y, 1))

    _, pull = torch.func.vjp(head, x)
    _, expected = torch.func.vjp(plain, x)
    seed = values((3, 6), 1)
    close("vjp of a column layer", pull(part(seed))[0], expected(seed)[0])
    got = torch.func.grad(lambda h: parallel_cross_entropy(h, target))(h)
    close("loss", got, part(torch.func.grad(lambda h: F.cross_entropy(h, target))(whole)))
    got = torch.func.grad(lambda h: row(h).square().sum())(h)
    close("row layer", got, part(torch.func.grad(lambda h: back(h).square().sum())(whole)))
    got = torch.func.grad(lambda h: row(register_parallel_dim(h.tanh(), 1)).sum())(h)
    close("computed", got, part(torch.func.grad(lambda h: back(h.tanh()).sum())(whole)))
    got = torch.func.grad(lambda x: parallel_cross_entropy(head(x), target))(x)
    close("head", got, torch.func.grad(lambda x: F.cross_entropy(plain(x), target))(x))
    got = torch.func.jvp(
        lambda h: parallel_cross_entropy(h, target), (h,), (torch.ones_like(h) * h,)
    )
    expected = torch.func.jvp(lambda h: F.cross_entropy(h, target), (whole,), (whole,))
    close("tangent", got[1], expected[1])
    got = torch.autograd.functional.jacobian(lambda x: row(head(x)), x)
    close("jacobian", got, torch.autograd.functional.jacobian(lambda x: back(plain(x)), x))


@pytest.mark.parametrize("nprocs", [1, 3])
def test_transforms_derive_by_shards(run: Run, nprocs: int) -> None:
    run(derive_by_transforms, nprocs=nprocs)


def transform_in_batches() -> list[Any]:
    """What a batch of calls would have to send, and what would be one worker's number."""
    head, row = ParallelLinear(6, 6, dim=-1).double(), ParallelLinear(6, 4, dim=0).double()
    x, target = values((3, 6), 0), torch.tensor([0, 1, 5])
    h, vmap = head(x), torch.func.vmap
    uses: list[Callable[[], Any]] = [
        lambda: vmap(head)(x),
        lambda: vmap(row)(h),
        lambda: vmap(lambda h: row(h.tanh()))(h),
        lambda: vmap(parallel_cross_entropy)(h, target),
        lambda: vmap(parallel_cross_entropy)(h.detach(), target),
        lambda: torch.func.grad(lambda h, q: row(h * q).sum(), argnums=1)(h.detach(), x.sum()),
        lambda: vmap(lambda h: parallel_cross_entropy(h.tanh(), target))(h),
        lambda: vmap(parallel_cross_entropy, in_dims=(1, None))(h, target[0]),
        lambda: torch.func.grad(lambda h: parallel_cross_entropy(h.tanh(), target))(h.detach()),
        lambda: torch.func.jacrev(head)(x),
        lambda: torch.func.jacfwd(lambda x: row(head(x)))(x),
        lambda: torch.autograd.functional.jacobian(lambda x: row(head(x)), x, vectorize=True),
    ]
    errors = []
    for use in uses:
        errors.append(raised(use))
        assert tessel.distributed.reduce(torch.ones(2)).tolist() == [_workers()] * 2
    return errors


def test_transforms_in_batches_raise(run: Run) -> None:
    first, second = run(transform_in_batches, nprocs=2)
    assert first == second and None not in first


def use_parameters() -> Any:
    """Layers of the user's own, of the parameters of ours: torch's functions know the shardings."""
    torch.manual_seed(0)
    head, row = ParallelLinear(6, 7, dim=-1).double(), ParallelLinear(7, 4, dim=0).double()
    torch.manual_seed(0)
    plain, back = torch.nn.Linear(6, 7).double(), torch.nn.Linear(7, 4).double()
    x, again = (values((3, 6), 0).requires_grad_() for _ in range(2))
    error = raised(lambda: F.linear(x, head.weight, head.bias))
    hidden = F.linear(tessel.distributed.copy(x), head.weight * 2, head.bias)
    assert sharding_of(hidden) == Sharding(1, tessel.world(), 7)
    y, expected = row(hidden), back(F.linear(again, plain.weight * 2, plain.bias))
    close("output", y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    close("gradient of x", x.grad, again.grad)
    for own, whole in zip(head.parameters(), plain.parameters(), strict=True):
        assert type(own.grad) is Tensor and own.grad is own.grad
        close("gradient", gather(own.grad, 0), whole.grad)
    assert torch.equal(gather(head.weight.detach()), plain.weight)
    return error


@pytest.mark.parametrize("nprocs", [1, 3])
def test_torchs_functions_know_what_parameters_are(run: Run, nprocs: int) -> None:
    first, *others = run(use_parameters, nprocs=nprocs)
    assert all(other == first for other in others)
    if nprocs > 1:
        assert first[0] is ValueError and "tessel.distributed.copy(tensor)" in first[1]


def replace_values() -> None:
    """A tensor that takes the values of another is what that is."""
    x = scatter(values((4, 6), 0), 1)
    plain = torch.ones(4, x.shape[1]).double()
    for replace in (lambda y, z: setattr(y, "data", z), lambda y, z: y.set_(z)):
        y = x.clone()
        replace(y, x.T)
        assert sharding_of(y) == Sharding(0, tessel.world(), 6)
        replace(y, plain)
        assert "another tensor" in raised(lambda y=y: get_parallel_dim(y))[1]
        replace(y, x)
        assert sharding_of(y) == sharding_of(x)
        weight = torch.nn.Parameter(x.clone())
        replace(weight.detach(), plain)
        with torch.no_grad():
            replace(weight, plain.clone())  # values of the same shape are those of the parameter
        assert sharding_of(weight) == sharding_of(x) and isinstance(weight, torch.nn.Parameter)
        with torch.no_grad():
            replace(weight, torch.ones(1, 1).double())
        assert raised(lambda weight=weight: get_parallel_dim(weight))[0] is ValueError
    y = x.clone()
    y.set_()
    assert raised(lambda: get_parallel_dim(y))[0] is ValueError


def swap_values() -> None:
    """Torch may exchange parameters for those that are loaded, instead of writing into them."""
    torch.manual_seed(0)
    layer = ParallelLinear(6, 7, dim=-1)
    weight, state = layer.weight, {name: 2 * each for name, each in layer.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double()
        for assign in (False, True):
            layer.load_state_dict({name: each.double() for name, each in state.items()}, assign)
            assert layer.weight is weight and isinstance(weight, torch.nn.Parameter)
            assert sharding_of(weight) == sharding_of(layer.bias) == Sharding(0, tessel.world(), 7)
            close("weight", gather(weight.detach()), gather(state["weight"].double(), 0))
        assert layer(values((3, 6), 0)).shape[0] == 3
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_parameters_are_exchanged_with_their_shardings(run: Run, nprocs: int) -> None:
    run(swap_values, nprocs=nprocs)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_values_are_replaced_with_their_shardings(run: Run, nprocs: int) -> None:
    run(replace_values, nprocs=nprocs)


def reshape_short() -> None:
    """Shards of which some, or all, are 1 long; an open length holds the split dimension."""
    for size in (_workers(), _workers() + 1, 2 * _workers() - 1):
        x = values((4, size, 10), 1)
        shard = scatter(x, 1)
        for function in (
            lambda x: x.reshape(4, -1),
            lambda x: x.view(2, 2, -1),
            lambda x: x.reshape(4, -1, 2, 5),
            lambda x: x.reshape(4, -1).view(4, -1, 10),
            lambda x: x[:1].reshape(1, -1),
            lambda x: x[None].reshape(1, 4, -1, 5),
            lambda x: x.view(-1, x.shape[1], 5, 2),
        ):
            close("view", gather(function(shard)), function(x))
        assert raised(lambda shard=shard: gather(shard.reshape(-1, 10)))[0] is ValueError
        if size > _workers():
            assert raised(lambda shard=shard: gather(shard.reshape(4, 1, -1)))[0] is ValueError


@pytest.mark.parametrize("nprocs", [2, 3])
def test_short_shards_are_viewed_as_long_ones(run: Run, nprocs: int) -> None:
    run(reshape_short, nprocs=nprocs)


def derive_by_parameters() -> None:
    """`torch.autograd.grad` of parameters, also where a part of the model is computed again."""
    torch.manual_seed(0)
    column, row = ParallelLinear(6, 7, dim=-1).double(), ParallelLinear(7, 4, dim=0).double()
    unused = ParallelLinear(6, 7, dim=-1).double()

    def block(x: Tensor) -> Tensor:
        return row(torch.tanh(column(x)) * column.bias)

    x = values((3, 6), 0).requires_grad_()
    parameters = [*column.parameters(), *row.parameters()]
    block(x).square().sum().backward()
    for output in (block(x), checkpoint(block, x, use_reentrant=False)):
        loss = output.square().sum()
        found = torch.autograd.grad(
            loss, [*parameters, *unused.parameters(), x], allow_unused=True, retain_graph=True
        )
        for grad, value in zip(found, [*parameters, None, None, x], strict=True):
            assert (grad is None) == (value is None)
            if value is not None and grad is not None:
                close("gradient", as_plain(grad), as_plain(value.grad))
        filled = torch.autograd.grad(loss, [*unused.parameters()], materialize_grads=True)
        assert [tuple(each.shape) for each in filled] == [
            tuple(u.shape) for u in unused.parameters()
        ]
    assert raised(lambda: torch.autograd.grad(row(column(x)).sum(), column.weight.detach()))


@pytest.mark.parametrize("nprocs", [1, 2])
def test_gradients_by_parameters(run: Run, nprocs: int) -> None:
    run(derive_by_parameters, nprocs=nprocs)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **s: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, **s),
    "adam": lambda p, **s: torch.optim.Adam(p, 0.1, amsgrad=True, **s),
    "adamw": lambda p, **s: torch.optim.AdamW(p, 0.1, **s),
    "adagrad": lambda p, **s: torch.optim.Adagrad(p, 0.1, **s),
    "rprop": lambda p, **s: torch.optim.Rprop(p, 0.1, **s),
}
WAYS: list[dict[str, bool]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]
NOT_FUSED = ("rprop",)


def step(name: str, way: dict[str, bool]) -> None:
    """Five steps are those of torch in one process, and leave shardings and files as they are."""
    torch.manual_seed(0)
    norm, again = torch.nn.LayerNorm(6).double(), torch.nn.LayerNorm(6).double()
    model = torch.nn.Sequential(norm, ParallelLinear(6, 7, dim=-1), ParallelLinear(7, 6, dim=0))
    torch.manual_seed(0)
    plain = torch.nn.Sequential(again, torch.nn.Linear(6, 7), torch.nn.Linear(7, 6))
    x = values((3, 6), 0)
    both = [(each.double(), OPTIMIZERS[name](each.parameters(), **way)) for each in (model, plain)]
    for _ in range(5):
        for module, optimizer in both:
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    for (key, own), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        value = own.detach() if get_parallel_dim(own) is None else gather(own.detach())
        close(key, value, whole)
    assert [get_parallel_dim(p) for p in model.parameters()] == [None, None, -1, -1, 0, None]
    kept = [each for some in both[0][1].state.values() for each in some.values()]
    assert kept and all(type(each) is Tensor for each in kept)
    saved = _through_a_file(both[0][1].state_dict())
    both[0][1].load_state_dict(saved)
    copy.deepcopy(both[0][1]).step()


@pytest.mark.parametrize(
    ("name", "way"),
    [(n, way) for n in OPTIMIZERS for way in WAYS if not ("fused" in way and n in NOT_FUSED)],
    ids=str,
)
def test_optimizers_step_shards(run: Run, name: str, way: dict[str, bool]) -> None:
    run(step, name, way, nprocs=2)


def step_along_one_direction() -> list[Any]:
    """What takes the gradients of one worker's shards for those of the whole, and raises."""
    torch.manual_seed(0)
    layer = ParallelLinear(6, 7, dim=-1).double()
    before, x = layer.weight.detach().clone(), values((3, 6), 0)
    gather(layer(x)).square().sum().backward()
    optimizers = [
        kind([layer.weight])
        for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SGD)
    ]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    errors = [raised(lambda each=each: each.step(lambda: 0.0)) for each in optimizers[:-1]]
    errors.append(raised(lambda: scaler.step(optimizers[-1])))
    errors.append(raised(lambda: torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)))
    torch.nn.utils.clip_grad_value_(layer.parameters(), 1.0)  # of each number by itself
    assert torch.equal(as_plain(layer.weight.detach()), as_plain(before))
    return errors


def test_what_mixes_the_gradients_of_shards_is_refused(run: Run) -> None:
    first, second = run(step_along_one_direction, nprocs=2)
    assert first == second and all(kind is ValueError for kind, _ in first)
    names = "LBFGS", "Adafactor", "Muon", "GradScaler", "torch.nn.utils.clip_grad_norm_"
    for name, (_, text) in zip(names, first, strict=True):
        assert text.startswith(f"{name} of a parameter that is a shard along dim 0")


def test_lists_of_shards_are_taken_by_default() -> None:
    """On devices where torch's optimizers take lists of tensors, they do so of shards."""
    layer = ParallelLinear(3, 2, dim=-1)
    assert of_optimizers.count(type(layer.weight)) == of_utilities.count(type(layer.weight)) == 1
    weights = [layer.weight.detach(), torch.ones(2, 3)]
    first, second = torch._foreach_mul(weights, 2.0)
    assert get_parallel_dim(first) == 0 and type(second) is Tensor
    first, second = torch._foreach_norm(weights)
    assert raised(lambda: get_parallel_dim(first))[0] is ValueError and type(second) is Tensor
    torch._foreach_copy_(weights[1:], weights[:1])
    assert get_parallel_dim(weights[1]) == 0
    turned = [weights[0].clone(), weights[0][:, :2].clone()]
    torch._foreach_add_(turned[1:], [turned[1].T.clone()])
    assert raised(lambda: get_parallel_dim(turned[1]))[0] is ValueError


def bound_norm(exponent: int) -> Any:
    """Weights of norm one, by the norm of one worker's shard, and by that of all."""
    layer = ParallelLinear(6, 7, dim=-1).double()
    whole = gather(layer.weight.detach())
    with torch.no_grad():
        error = raised(lambda: layer.weight.mul_(1 / layer.weight.norm()))
        if error is None:
            return None
        assert torch.equal(gather(layer.weight), whole)
        square = tessel.register_parallel_dim(layer.weight.square().sum(), None)
        layer.weight.mul_(tessel.distributed.reduce(square) ** exponent)
    close("weight", gather(layer.weight.detach()), whole * whole.square().sum() ** exponent)
    return error


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_weight_is_not_scaled_by_a_number_of_one_worker(run: Run, nprocs: int) -> None:
    first, *others = run(bound_norm, -1, nprocs=nprocs)
    assert all(other == first for other in others)
    if nprocs == 1:
        assert first is None
    else:
        assert (
            first[0] is ValueError
            and "by a number of a sharding that was lost in `norm`" in first[1]
        )


def parametrize() -> Any:
    """Torch's parametrizations of a weight in shards: right, or an error."""
    torch.manual_seed(0)
    layer, row = ParallelLinear(6, 7, dim=-1).double(), ParallelLinear(7, 4, dim=0).double()
    torch.manual_seed(0)
    plain, back = torch.nn.Linear(6, 7).double(), torch.nn.Linear(7, 4).double()
    x = values((3, 6), 0)
    for each in (layer, plain):
        torch.nn.utils.parametrizations.weight_norm(each, dim=0)
    assert sharding_of(layer.weight) == Sharding(0, tessel.world(), 7)
    close("weight norm", gather(layer(x)), plain(x))
    named = dict(row.named_parameters())
    doubled = {name: value * 2 for name, value in named.items()}
    expected = torch.func.functional_call(
        back, {name: value * 2 for name, value in back.named_parameters()}, (values((3, 7), 0),)
    )
    close("call", torch.func.functional_call(row, doubled, (values((3, 7), 0),)), expected)
    torch.nn.utils.parametrizations.weight_norm(row, dim=0)
    error = raised(lambda: row(values((3, 7), 0)))
    other = ParallelLinear(6, 7, dim=-1).double()
    torch.nn.utils.parametrizations.spectral_norm(other)
    square = ParallelLinear(_workers(), _workers(), bias=False, dim=-1).double()
    turned = {"weight": register_parallel_dim(values((1, _workers()), 0), 1)}
    if _workers() > 1:
        turn = raised(lambda: torch.func.functional_call(square, turned, (values((3, 2), 0),)))
        assert (
            "the weight must be a shard along dim 0" in turn[1]
            and "got a shard along dim 1" in turn[1]
        )
    return error, raised(lambda: other(x))


@pytest.mark.parametrize("nprocs", [1, 2])
def test_parametrizations_are_right_or_raise(run: Run, nprocs: int) -> None:
    first, *others = run(parametrize, nprocs=nprocs)
    assert all(other == first for other in others)
    for error in first:
        assert (error is None) == (nprocs == 1)
        if error:
            assert error[0] is ValueError and "the weight: its sharding was lost" in error[1]


def test_shardings_are_registered_by_hand() -> None:
    x = torch.ones(3)
    assert get_parallel_dim(x) is None
    y = RegisterParallelDim(dim=0)(x)
    assert get_parallel_dim(y) == 0 and get_parallel_dim(x) is None
    assert get_parallel_dim(RegisterParallelDim(-1)(torch.ones(3, 4))) == 1
    assert type(RegisterParallelDim(None)(y)) is Tensor
    assert RegisterParallelDim(-1).extra_repr() == "dim=-1"
    parameter = torch.nn.Parameter(x)
    assert register_parallel_dim(parameter, 0) is parameter
    assert get_parallel_dim(parameter) == 0
    assert get_parallel_dim(register_parallel_dim(parameter, None)) is None
    assert tessel.distributed.get_group() == state_of(y).partition


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_out_of_range_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=rf"dim {dim} is out of range .*\(2, 3\)"):
        register_parallel_dim(torch.ones(2, 3), dim)


@pytest.mark.parametrize("dim", ["0", 1.0, True])
def test_a_dim_that_is_no_number_is_refused(dim: Any) -> None:
    with pytest.raises(ValueError, match="dim must be None or an integer"):
        RegisterParallelDim(dim)


def test_gradients_pass_shardings() -> None:
    """Also those of second order, and those with respect to a shard."""
    x = values((3, 4), 0).requires_grad_()
    y = register_parallel_dim(x, 1)
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    close("gradient", first, 3 * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    close("second gradient", second, 6 * x)
    z = y * 2
    (of_shard,) = torch.autograd.grad((z**2).sum(), z)
    close("gradient of a shard", of_shard, 4 * x)
    (z.square().sum()).backward()
    close("backward", x.grad, 8 * x)


def test_sizes_follow_heads() -> None:
    """Features become heads and back, as attention does it."""
    P = tessel.world()
    x = as_shard(torch.ones(2, 3, 8), Sharding(2, P, 8))
    heads = x.view(2, 3, 4, 2).transpose(1, 2)
    assert sharding_of(heads) == Sharding(1, P, 4)
    weights = (heads @ heads.mT).softmax(-1)
    back = (weights @ heads).transpose(1, 2).reshape(2, 3, -1)
    assert sharding_of(back) == Sharding(2, P, 8)
    assert sharding_of(x.unflatten(-1, (1, 8))) == Sharding(2, P, 1)
    assert sharding_of(x.unflatten(-1, (8, 1)).flatten(2)) == Sharding(2, P, 8)


def test_gradients_by_keyword() -> None:
    x = values((3,), 0).requires_grad_()
    y = RegisterParallelDim(0)(x)
    (grad,) = torch.autograd.grad(outputs=(y * y).sum(), inputs=x)
    close("gradient", grad, 2 * x)
    torch.autograd.backward([(y * y).sum()], inputs=[x])
    close("gradient", x.grad, 2 * x)
    for shard in (register_parallel_dim(values((3,), 0).requires_grad_(), 0), y.clone()):
        other = values((3,), 1).requires_grad_()
        (shard * shard * other).sum().backward(inputs=[shard])
        assert other.grad is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of reading the gradient of what is no leaf
            close("gradient", shard.grad, 2 * x * other)
    layer = ParallelLinear(3, 2, dim=-1)
    layer(torch.ones(1, 3)).sum().backward(inputs=layer.weight)
    assert layer.bias.grad is None and torch.equal(layer.weight.grad, torch.ones(2, 3))
    with torch.inference_mode():
        assert get_parallel_dim(register_parallel_dim(torch.ones(2), 0) + 1) == 0


def test_checkpoints_compute_shardings_again() -> None:
    layer, x = ParallelLinear(4, 6, dim=1).double(), values((3, 4), 0).requires_grad_()
    back = ParallelLinear(6, 4, dim=0).double()

    def block(x: Tensor) -> Tensor:
        y = layer(x)
        assert get_parallel_dim(y) == 1
        y = y.tanh()
        assert get_parallel_dim(y) == 1, "a backward pass computes as the forward pass did"
        return back(y)

    once = block(x).square().sum()
    again = register_parallel_dim(checkpoint(block, x, use_reentrant=False), 0).square().sum()
    for loss, inputs in ((once, x), (again, x)):
        loss.backward()
        close("gradient", x.grad, torch.autograd.grad(block(x).square().sum(), inputs)[0])
        x.grad = None


def test_modules_and_optimizers_take_shards() -> None:
    shard = register_parallel_dim(torch.ones(2, 3), 1)
    parameter = torch.nn.Parameter(shard.clone())
    optimizer = torch.optim.Adam([parameter], 0.1)
    (parameter * 2).sum().backward()
    optimizer.step()
    assert not torch.equal(as_plain(parameter.detach()), torch.ones(2, 3))
    dropped = torch.nn.Dropout(0.5)(shard)
    assert get_parallel_dim(dropped) == 1
    rows = as_shard(torch.ones(3, 4), state_of(shard).at(0))
    assert get_parallel_dim(torch.nn.LayerNorm(4)(rows)) == 0
    assert "Shard" in repr(shard) and len(shard) == 2 and shard.tolist() == [[1.0] * 3] * 2


def compiled(fullgraph: bool) -> Any:
    torch._dynamo.reset()
    column, row = ParallelLinear(4, 6, dim=1), ParallelLinear(6, 4, dim=0)
    model = torch.nn.Sequential(column, torch.nn.Tanh(), row)
    x = torch.ones(3, 4, requires_grad=True)
    again = torch.ones(3, 4, requires_grad=True)
    fast = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    if fullgraph:
        last = torch.compile(lambda x: column(x).softmax(1), backend="aot_eager", fullgraph=True)
        return raised(lambda: last(again))
    expected, got = model(x), fast(again)
    close("output", got, expected, 1e-6)
    expected.square().sum().backward()
    got.square().sum().backward()
    close("gradient", again.grad, x.grad, 1e-6)
    half = torch.compile(lambda x: torch.tanh(column(x)) * 2, backend="aot_eager")
    y = half(x)
    assert get_parallel_dim(y) == 1, type(y)
    own = torch.compile(lambda w: torch.tanh(w) * 2, backend="aot_eager")
    z = own(column.weight)
    assert get_parallel_dim(z) == 0, type(z)
    close("parameter", as_plain(z), as_plain(torch.tanh(column.weight) * 2), 1e-6)
    close("shard", as_plain(y), as_plain(torch.tanh(column(x)) * 2), 1e-6)
    return None


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.parametrize("nprocs", [1, 2])
def test_compiled_code_keeps_shardings(run: Run, nprocs: int) -> None:
    run(compiled, False, nprocs=nprocs, timeout=150)


@pytest.mark.limit(180)
def test_a_function_that_mixes_elements_breaks_a_graph(run: Run) -> None:
    for error in run(compiled, True, nprocs=2, timeout=150):
        assert "only through pointwise functions" in str(error)


def test_the_names_are_public() -> None:
    for name in ("get_parallel_dim", "register_parallel_dim", "copy", "reduce", "gather"):
        assert getattr(tessel.distributed, name).__doc__
