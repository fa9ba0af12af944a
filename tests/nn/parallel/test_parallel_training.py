"""What training needs around parallel layers: clipping, data parallelism, dropout, tied weights.

Tests `nn/parallel/replicas.py`, `nn/parallel/dropout.py`, `state/clip.py`, `state/scaler.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tessel
from parity import close, group, values
from tessel import Layout, Partition
from tessel.distributed import gather, get_parallel_dim, register_parallel_dim, scatter
from tessel.models import FNO
from tessel.nn.parallel.cross_entropy import parallel_cross_entropy
from tessel.nn.parallel.drawing import layout_of
from tessel.nn.parallel.dropout import ParallelDropout, random_stream
from tessel.nn.parallel.embedding import ParallelEmbedding
from tessel.nn.parallel.linear import ParallelLinear
from tessel.nn.parallel.replicas import (
    data_parallel,
    gather_batch,
    get_data_parallel_group,
    register_ddp_parameters_to_ignore,
)
from tessel.state.clip import clip_grad_norm_
from tessel.state.scaler import ParallelGradScaler
from tessel.testing import count_traffic
from windowed_cases import raised

Run = Callable[..., list[Any]]
GROUPS = [(1, 1), (3, 3), (4, 4), (4, 2)]  # workers, and those of a group
everywhere = pytest.mark.parametrize(("nprocs", "size"), GROUPS)
INF = float("inf")
WORDS, WIDTH, HIDDEN = 11, 6, 9


class Model(torch.nn.Module):
    """Embedding, two linear layers, a norm, and a head that has the table of the embedding."""

    def __init__(self, dropout: torch.nn.Module | None = None, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH, padding_idx=3, sparse=sparse)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        if not sparse:
            self.head.weight = self.embedding.weight
        self.dropout = dropout or torch.nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.down(self.dropout(F.gelu(self.up(x))))
        return self.head(self.norm(x))


def plain_model(**settings: Any) -> Model:
    torch.manual_seed(1)
    return Model(**settings).double()


def split_model(plain: Model, P: Partition) -> Model:
    """The same with all but the norm in shards, and tied as before."""
    model = copy.deepcopy(plain)
    is_tied = plain.head.weight is plain.embedding.weight
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    embed, linear = (
        ParallelEmbedding.convert_parallel_embedding,
        ParallelLinear.convert_parallel_linear,
    )
    model.embedding = embed(model.embedding, 0, P)  # type: ignore[assignment]
    model.up = linear(model.up, -1, P)  # type: ignore[assignment]
    model.down = linear(model.down, 0, P)  # type: ignore[assignment]
    model.head = linear(model.head, -1, P)  # type: ignore[assignment]
    if is_tied:
        model.head.weight = model.embedding.weight
    return model


def batch(step: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    """Ids and the next ones, the same on all workers."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (samples, 6), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: torch.nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    logits = model(ids)
    if get_parallel_dim(logits) is None:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return parallel_cross_entropy(logits.flatten(0, 1), target.flatten())


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """What a worker has of a whole value, by the sharding of its parameter."""
    layout = layout_of(parameter)
    return whole if layout is None else layout.local_part(whole)


def dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def check_parameters(model: torch.nn.Module, plain: torch.nn.Module, grads: bool) -> None:
    whole = dict(plain.named_parameters())
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(whole)
    for name, parameter in model.named_parameters():
        expected = whole[name].grad if grads else whole[name].detach()
        got = parameter.grad if grads else parameter.detach()
        assert (got is None) == (expected is None), name
        if got is not None and expected is not None:
            close(name, dense(got), part_of(dense(expected), parameter))


def train_tied(size: int, norm_type: float) -> None:
    P = group(size)
    plain = plain_model()
    model = split_model(plain, P)
    assert len(list(model.parameters())) == len(list(plain.parameters())) == 7
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (plain, model)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss_of(each, *batch(step)) for each in (plain, model)]
        close("loss", losses[1], losses[0])
        for each in losses:
            each.backward()
        check_parameters(model, plain, grads=True)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3, norm_type)
        got = clip_grad_norm_(model.parameters(), 0.3, norm_type)
        close("norm", got, expected)
        check_parameters(model, plain, grads=True)
        for optimizer in optimizers:
            optimizer.step()
        check_parameters(model, plain, grads=False)


@everywhere
def test_a_tied_model_trains_as_in_one_process(run: Run, nprocs: int, size: int) -> None:
    """Five steps of Adam with clipped gradients: the shard of the table is one parameter."""
    run(train_tied, size, 2.0, nprocs=nprocs)


def clip(size: int, norm_type: float, max_norm: float, dtype: torch.dtype, form: str) -> None:
    P = group(size)
    plain = plain_model().to(dtype)
    model = split_model(plain, P)
    for each in (plain, model):
        loss_of(each, *batch(0)).backward()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5  # of sums in another order
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    given: Any = model if form == "module" else model.parameters()
    where = P if form == "partition" else None
    got = clip_grad_norm_(given, max_norm, norm_type, foreach=form == "module", partition=where)
    assert got.dtype == expected.dtype
    close("norm", got, expected, tolerance)
    whole = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and whole[name].grad is not None
        close(name, parameter.grad, part_of(whole[name].grad, parameter), tolerance)


@everywhere
@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2, 3.0, INF, -1.0, -INF])
def test_norms_are_those_of_the_whole_model(
    run: Run, nprocs: int, size: int, norm_type: float
) -> None:
    for max_norm in (0.01, 100.0):
        run(clip, size, norm_type, max_norm, torch.float64, "parameters", nprocs=nprocs)


@pytest.mark.parametrize("form", ["module", "partition"])
def test_norms_of_a_module_and_of_a_partition(run: Run, form: str) -> None:
    for dtype in (torch.float64, torch.float32):
        run(clip, 4, 2.0, 0.01, dtype, form, nprocs=4)


def clip_sparse(size: int) -> None:
    """Torch does not take the norm of sparse gradients: it is that of the dense ones."""
    P = group(size)
    plain = plain_model(sparse=True)
    model = split_model(plain, P)
    for each in (plain, model):
        loss_of(each, *batch(0)).backward()
    assert model.embedding.weight.grad is not None and plain.embedding.weight.grad is not None
    plain.embedding.weight.grad = plain.embedding.weight.grad.to_dense()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    close("norm", clip_grad_norm_(model.parameters(), 0.01), expected)
    assert model.embedding.weight.grad.is_sparse
    check_parameters(model, plain, grads=True)


@everywhere
def test_sparse_gradients_are_clipped(run: Run, nprocs: int, size: int) -> None:
    run(clip_sparse, size, nprocs=nprocs)


def clip_blocks(grid: tuple[int, ...] | None) -> None:
    """Blocks of weights, which only their layer knows of, with layers that are whole."""
    P = tessel.world().create_cartesian_topology_partition([2, 2])
    P_w = grid and tessel.world().create_cartesian_topology_partition(grid)
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 7)).double()
    model = torch.nn.Sequential(
        tessel.nn.DistributedLinear(P, P, P_w, 6, 5), tessel.nn.DistributedLinear(P, P, P_w, 5, 7)
    ).double()
    model.load_state_dict(plain.state_dict())
    layout = Layout.balanced(P, (4, 6))
    x = values((4, 6), 1)
    plain(x).square().sum().backward()
    model(layout.local_part(x)).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    if grid is not None:
        text = raised(lambda: clip_grad_norm_(list(model.parameters()), 0.5, partition=P))
        assert text is not None and "is treated as shared by all workers" in text[1]
    close("norm", clip_grad_norm_(model, 0.5), expected)
    blocks = [model[0]._block_layouts(), model[1]._block_layouts()]
    for name, parameter in model.named_parameters():
        number, _, key = name.partition(".")
        whole = plain.get_parameter(name).grad
        assert parameter.grad is not None and whole is not None
        close(name, parameter.grad, blocks[int(number)][key].local_part(whole))


@pytest.mark.parametrize("grid", [None, (2, 2), (1, 4), (2, 1, 2)])
def test_blocks_of_other_layers_are_clipped(run: Run, grid: tuple[int, ...] | None) -> None:
    run(clip_blocks, grid, nprocs=4)


def clip_spectral(grid: tuple[int, ...]) -> None:
    """Weights of modes, of which each worker has some."""
    P = tessel.world().create_cartesian_topology_partition(grid)
    model = FNO(P, 1, 1, width=4, modes=3, blocks=2, dtype=torch.float64)
    x = Layout.balanced(P, (2, 1, 8, 8)).local_part(values((2, 1, 8, 8), 1))
    model(x).square().sum().backward()
    other = copy.deepcopy(model)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        b.grad = None if a.grad is None else a.grad.clone()
    expected = other.clip_grad_norm_(0.5)
    close("norm", clip_grad_norm_(model, 0.5), expected)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        close("gradient", a.grad, b.grad)


@pytest.mark.parametrize("grid", [(1, 1, 2, 2), (2, 1, 1, 2)])
def test_spectral_weights_are_clipped(run: Run, grid: tuple[int, ...]) -> None:
    run(clip_spectral, grid, nprocs=4)


def clip_faults(kind: str) -> tuple[type[BaseException], str] | None:
    P = tessel.world()
    model = split_model(plain_model(), P)
    loss_of(model, *batch(0)).backward()
    parameters = list(model.parameters())
    max_norm, norm_type, strict, where = 1.0, 2.0, False, None
    odd = P.rank == 1
    assert model.norm.weight.grad is not None
    if kind == "fewer" and odd:
        parameters = parameters[1:]
    elif kind == "max_norm" and odd:
        max_norm = 2.0
    elif kind == "norm_type" and odd:
        norm_type = "two"  # type: ignore[assignment]
    elif kind == "no gradient" and odd:
        model.norm.weight.grad = None
    elif kind == "no gradient of a shard" and odd:
        model.up.weight.grad = None
    elif kind == "other gradient" and odd:
        model.norm.weight.grad *= 2
    elif kind == "not a number":
        strict = True
        if odd:
            assert model.up.weight.grad is not None
            model.up.weight.grad[0, 0] = float("nan")
    elif kind == "partition":
        where = Partition(P.ranks[:2], (2,))
    return raised(lambda: clip_grad_norm_(parameters, max_norm, norm_type, strict, partition=where))


CLIP_FAULTS = {
    "fewer": (ValueError, "of 6 parameters"),
    "max_norm": (ValueError, "max_norm=2.0"),
    "norm_type": (ValueError, "norm_type='two'"),
    "no gradient": (ValueError, "workers [1] have no gradient"),
    "no gradient of a shard": (ValueError, "workers [1] have no gradient"),
    "other gradient": (ValueError, "tessel.register_parallel_dim"),
    "not a number": (RuntimeError, "non-finite"),
}


@pytest.mark.parametrize("kind", CLIP_FAULTS)
def test_what_cannot_be_clipped_raises_the_same_everywhere(run: Run, kind: str) -> None:
    results = run(clip_faults, kind, nprocs=3)
    assert len(set(results)) == 1 and results[0] is not None, results
    error, text = results[0]
    assert error is CLIP_FAULTS[kind][0] and CLIP_FAULTS[kind][1] in text


def test_a_partition_that_leaves_out_shards_raises(run: Run) -> None:
    for result in run(clip_faults, "partition", nprocs=3):
        assert result is not None and "pass `partition`" in result[1]


def clip_outside() -> None:
    """Workers that have nothing of the model go on; one that has gradients of its own raises."""
    P = tessel.world().create_partition_inclusive([2, 0])
    layer = ParallelLinear(3, 4, dim=-1, partition=P)
    parameters = list(layer.parameters())
    if P.active:
        layer(torch.ones(2, 3)).sum().backward()
    norm = clip_grad_norm_(parameters, 1.0)
    close("norm", norm, torch.tensor(8.0 if P.active else 0.0), 1e-6)
    if not P.active:
        other = torch.nn.Parameter(torch.ones(2))
        other.grad = torch.ones(2)
        found = raised(lambda: clip_grad_norm_([*parameters, other], 1.0))
        assert found is not None and "is not one of these, but has gradients" in found[1]


def test_workers_outside_of_the_group_go_on(run: Run) -> None:
    run(clip_outside, nprocs=4)


def clip_nothing() -> None:
    model = split_model(plain_model(), tessel.world())
    assert clip_grad_norm_(model.parameters(), 1.0) == 0
    assert clip_grad_norm_([], 1.0) == 0
    loss_of(model, *batch(0)).backward()
    with count_traffic() as traffic:
        clip_grad_norm_(model.parameters(), 1.0)
    assert traffic.bytes_sent == 7 * 8 * (tessel.world().size - 1) and traffic.agreements == 1


def test_clipping_sends_one_number_for_each_parameter(run: Run) -> None:
    run(clip_nothing, nprocs=3)


def replicas() -> None:
    """2 × 2 workers: two groups that hold one model each, and half of the batch each."""
    tessel.distributed.init_process_group(2)
    try:
        P, R = tessel.distributed.get_group(), get_data_parallel_group()
        rank = tessel.world().rank
        assert rank is not None and R.ranks == ((0, 2) if rank in (0, 2) else (1, 3))
        plain = plain_model()
        model = data_parallel(split_model(plain, P))
        assert isinstance(model, DistributedDataParallel)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (plain, model)]
        half = slice(0, 2) if R.rank == 0 else slice(2, 4)
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            ids, target = batch(step)
            loss_of(plain, ids, target).backward()
            loss_of(model, ids[half], target[half]).backward()
            check_parameters(model.module, plain, grads=True)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            close("norm", clip_grad_norm_(model.parameters(), 0.3), expected)
            for optimizer in optimizers:
                optimizer.step()
            check_parameters(model.module, plain, grads=False)
    finally:
        tessel.distributed.destroy_process_group()


def test_replicas_of_a_split_model_average_their_gradients(run: Run) -> None:
    """Gradients, shards too, are exactly those of one process, also after steps."""
    run(replicas, nprocs=4)


def replicas_on_partitions() -> None:
    """The same where the layers name their partitions, and all workers are the default group."""
    everyone, halves = tessel.world(), ([0, 3], [2, 1])
    groups = [everyone.create_partition_inclusive(ranks) for ranks in halves]
    plain = plain_model()
    models = [split_model(plain, P) for P in groups]  # groups are made by all workers
    place = next(place for place, P in enumerate(groups) if P.active)
    assert data_parallel(models[0]) is models[0]  # which the first half has alone
    model = data_parallel(models[place])
    ids, target = batch(0)
    loss_of(plain, ids, target).backward()
    half = slice(2 * place, 2 * place + 2)
    loss_of(model, ids[half], target[half]).backward()
    check_parameters(models[place], plain, grads=True)


def test_replicas_are_on_the_partitions_of_their_layers(run: Run) -> None:
    run(replicas_on_partitions, nprocs=4)


def replicas_of_one() -> None:
    """Groups of one worker: all workers are replicas, as in plain data parallelism."""
    tessel.distributed.init_process_group(1)
    try:
        plain = plain_model()
        model = data_parallel(split_model(plain, tessel.distributed.get_group()))
        rank = tessel.world().rank
        ids, target = batch(0)
        loss_of(plain, ids, target).backward()
        loss_of(model, ids[rank : rank + 1], target[rank : rank + 1]).backward()
        check_parameters(model.module, plain, grads=True)
    finally:
        tessel.distributed.destroy_process_group()


def test_replicas_of_a_model_on_one_worker_each(run: Run) -> None:
    run(replicas_of_one, nprocs=4)


class Classifier(torch.nn.Module):
    """A backbone for this worker's samples, and a head for those of the whole group."""

    forgets = False

    def __init__(self, backbone: torch.nn.Module, head: torch.nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x)
        if self.forgets:  # as a wrapper inside of another one makes torch do before 2.13
            DistributedDataParallel._active_ddp_module = None
        return self.head(gather_batch(features))


def classify(size: int, together: bool) -> None:
    """Each worker has two samples of its own; a group's head sees all samples of the group."""
    tessel.distributed.init_process_group(size)
    try:
        everyone, P = tessel.world(), tessel.distributed.get_group()
        torch.manual_seed(0)
        backbone = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh()).double()
        head = torch.nn.Linear(6, 7).double()
        plain = torch.nn.Sequential(backbone, head)
        model = copy.deepcopy(plain)
        split = ParallelLinear.convert_parallel_linear(model[1], -1)
        samples = 2 * everyone.size
        x, target = values((samples, 5), 1), torch.arange(samples) * 3 % 7
        F.cross_entropy(plain(x), target).backward()
        rank = everyone.rank
        assert rank is not None
        own = slice(2 * rank, 2 * rank + 2)
        if together:
            whole = Classifier(model[0], split)
            names = register_ddp_parameters_to_ignore(whole)
            assert names == ["head.weight", "head.bias"]
            wrapped = [DistributedDataParallel(whole)]
            logits = wrapped[0](x[own])
        else:
            wrapped = [DistributedDataParallel(model[0]), data_parallel(split)]
            logits = wrapped[1](gather_batch(wrapped[0](x[own])))
        parallel_cross_entropy(logits, gather_batch(target[own])).backward()
        for got, expected in zip(model[0].parameters(), backbone.parameters(), strict=True):
            assert got.grad is not None and expected.grad is not None
            close("gradient of the backbone", got.grad, expected.grad)
        for got, expected in zip(split.parameters(), head.parameters(), strict=True):
            assert got.grad is not None and expected.grad is not None
            close("gradient of the head", got.grad, part_of(expected.grad, got))
        assert P.size == size
    finally:
        tessel.distributed.destroy_process_group()


@pytest.mark.parametrize(("size", "together"), [(4, True), (4, False), (2, False)])
def test_the_gradient_of_a_backbone_is_the_sum_over_workers(
    run: Run, size: int, together: bool
) -> None:
    """Not the mean, which would be P times smaller."""
    run(classify, size, together, nprocs=4)


def mean_over_others(one_alone: bool, forgets: bool) -> tuple[str, bool]:
    """The error of a wrapper around backbone and head in groups of two, and what works after it."""
    tessel.distributed.init_process_group(2)
    try:
        everyone = tessel.world()
        rank = everyone.rank
        assert rank is not None
        torch.manual_seed(0)
        model = Classifier(
            torch.nn.Linear(5, 6).double(), ParallelLinear(6, 7, dim=-1, dtype=torch.float64)
        )
        model.forgets = forgets
        wrapped = data_parallel(model)  # all workers make it together
        wrapped = model if one_alone and rank % 2 else wrapped
        x = values((2, 5), rank)
        with pytest.raises(ValueError) as caught:
            wrapped(x)
        with torch.no_grad():  # nothing is averaged
            kept = tessel.distributed.gather(x, 0)
            # products with two and with four rows need not be equal to the last bit
            whole = model.head(model.backbone(kept))
            same = torch.allclose(wrapped(x), whole, rtol=0.0, atol=1e-12)
        return str(caught.value), same
    finally:
        tessel.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("one_alone", "forgets"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_a_mean_over_other_workers_than_the_group_raises(
    run: Run, one_alone: bool, forgets: bool
) -> None:
    """Each worker of a group would keep the gradient of its own samples, and drift apart."""
    results = run(mean_over_others, one_alone, forgets, nprocs=4)
    assert results[0] == results[1] and results[2] == results[3]
    assert all("averages over other workers" in text and same for text, same in results)


def test_a_truth_value_is_no_group_size() -> None:
    with pytest.raises(TypeError, match="expected a number of workers, got True"):
        tessel.distributed.init_process_group(True)
    assert not tessel.distributed.is_initialized()


def test_one_process_needs_no_wrapper() -> None:
    layer = ParallelLinear(3, 2, dim=-1)
    assert data_parallel(layer) is layer
    with pytest.raises(ValueError, match="process group"):
        data_parallel(layer, process_group=None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), layer)
    model._ddp_params_and_buffers_to_ignore = ["0.bias"]  # type: ignore[assignment]
    register_ddp_parameters_to_ignore(model)
    assert model._ddp_params_and_buffers_to_ignore == ["0.bias", "1.weight", "1.bias"]


def alone(x: Tensor, p: float, seed: int) -> Tensor:
    """The whole mask, drawn without others."""
    one = Partition((tessel.world().ranks[tessel.world().rank or 0],), (1,))
    torch.manual_seed(seed)
    return ParallelDropout(p, partition=one)(x)


def drop(size: int, equal: bool) -> None:
    worlds = [Partition((rank,), (1,)) for rank in tessel.world().ranks]  # made by all
    assert worlds
    P = group(size)
    first = P.ranks[0]
    seed = 7 if equal else tessel.world().rank
    x = values((5, 6, 7), 0).requires_grad_()
    expected = alone(x.detach(), 0.4, 7 if equal else first)
    layer = ParallelDropout(0.4, partition=P)
    states = []
    for dim in (None, 0, 1, -1):
        torch.manual_seed(seed)
        part = x if dim is None else scatter(x, dim, P)
        y = layer(part)
        states.append(torch.get_rng_state())
        assert get_parallel_dim(y) == (None if dim is None else dim % 3)
        y = y if dim is None else gather(y)
        assert torch.equal(y, expected)
        (grad,) = torch.autograd.grad(y.sum(), x)
        close("gradient", grad * x, expected)
        again = layer(part)
        assert not torch.equal(again if dim is None else gather(again), expected)
    assert all(torch.equal(a, b) for a, b in pairwise(states))
    if equal:
        everyones = P.group.share_objects(states[0])
        assert all(torch.equal(state, everyones[0]) for state in everyones)


@everywhere
@pytest.mark.parametrize("equal", [True, False])
def test_a_shard_is_dropped_as_the_whole(run: Run, nprocs: int, size: int, equal: bool) -> None:
    """The same mask for every split and any number of workers, also with unequal seeds."""
    run(drop, size, equal, nprocs=nprocs)


def masks() -> Tensor:
    """Of equal shards of ones, each worker's own mask."""
    torch.manual_seed(3)
    x = register_parallel_dim(torch.ones(10_000), 0)
    y: Tensor = ParallelDropout(0.3)(x)
    return tessel.distributed.register_parallel_dim(y, None)


def test_masks_of_shards_are_independent(run: Run) -> None:
    """Each has its share of zeros, and so has each pair, within five standard deviations."""
    found = torch.stack(run(masks, nprocs=4)) == 0
    count = found.shape[1]
    for mask in found:
        assert abs(mask.double().mean().item() - 0.3) < 5 * (0.21 / count) ** 0.5
    for one in range(4):
        for other in range(one):
            both = (found[one] & found[other]).double().mean().item()
            assert abs(both - 0.09) < 5 * (0.09 * 0.91 / count) ** 0.5
    assert torch.equal(torch.stack(run(masks, nprocs=4)) == 0, found)  # of the same seed


def test_numbers_are_uniform_in_place_and_along_dimensions() -> None:
    """Neighbours along each dimension are independent, too."""
    torch.manual_seed(0)
    zeros = (ParallelDropout(0.5)(torch.ones(64, 64, 64)) == 0).double() - 0.5
    bound = 5 * 0.25 / zeros.numel() ** 0.5
    assert abs(zeros.mean().item()) < 2 * bound
    for dim in range(3):
        for distance in (1, 2, 7):
            product = zeros * zeros.roll(distance, dim)
            assert abs(product.mean().item()) < bound


def dropout_settings() -> None:
    x = values((4, 5), 0)
    layer = ParallelDropout(0.5).eval()
    with count_traffic() as traffic:
        assert torch.equal(layer(x), x) and torch.equal(ParallelDropout(0.0)(x), x)
    assert traffic.agreements == 0
    assert not ParallelDropout(1.0)(x).any()
    torch.manual_seed(0)
    expected = ParallelDropout(0.5)(x)
    torch.manual_seed(0)
    same = ParallelDropout(0.5, inplace=True)(x)
    assert same is x and torch.equal(x, expected)
    kept = expected != 0
    close("kept", expected[kept], 2 * values((4, 5), 0)[kept])
    assert ParallelDropout(0.5)(torch.ones(0, 3)).shape == (0, 3)
    assert ParallelDropout(0.5)(torch.ones(())).shape == ()
    half = ParallelDropout(0.25)(torch.ones(50, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16 and set(half.tolist()) == {0.0, 1.3359375}


def test_settings_of_dropout(run: Run) -> None:
    run(dropout_settings, nprocs=2)


def dropout_in_checkpoint() -> None:
    P = tessel.world()
    x = values((4, 6), 0).requires_grad_()
    layer = ParallelDropout(0.5)

    def block(x: Tensor) -> Tensor:
        return gather(layer(scatter(x, 1, P)).sin()) + layer(x).cos()

    grads = []
    for recompute in (False, True):
        torch.manual_seed(5)
        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        grads.append(torch.autograd.grad(y.square().sum(), x)[0])
    close("gradient", *grads)


def test_a_checkpoint_drops_the_same_again(run: Run) -> None:
    run(dropout_in_checkpoint, nprocs=3)


def drop_what_one_worker_derives(inplace: bool) -> list[Any]:
    """Only the first worker's input needs a gradient: all results do, and all can go on."""
    P, layer = tessel.world(), ParallelDropout(0.5, inplace=inplace)
    row = ParallelLinear(6, 2, dim=0).double()
    for make in (lambda x: x, lambda x: scatter(x, 1)):
        x = values((4, 6), 0).requires_grad_(P.rank == 0)
        x = make(x * 1) if P.rank == 0 else make(x)
        y = layer(x)
        assert y.requires_grad and get_parallel_dim(y) == get_parallel_dim(x)
        row(y).sum().backward()
        with torch.no_grad():
            assert not layer(make(values((4, 6), 0))).requires_grad
    leaf = values((4, 6), 0).requires_grad_(P.rank == 0)
    error = raised(lambda: layer(leaf))
    assert tessel.distributed.reduce(torch.ones(2)).tolist() == [P.size] * 2
    return [error]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("nprocs", [1, 3])
def test_dropout_of_what_one_worker_derives(run: Run, nprocs: int, inplace: bool) -> None:
    (error,), *others = run(drop_what_one_worker_derives, inplace, nprocs=nprocs)
    assert all(other == [error] for other in others)
    assert (error is not None) == inplace  # torch writes into no leaf that needs a gradient


class Net(torch.nn.Module):
    """A column layer, and a row layer of what it gives."""

    def __init__(self, linear: Callable[..., torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.down = linear(6, 7, -1), linear(7, 4, 0)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return y


def parallel_and_alone() -> tuple[Net, Net]:
    return (
        Net(lambda *sizes: ParallelLinear(*sizes[:2], dim=sizes[2])),
        Net(lambda *sizes: torch.nn.Linear(*sizes[:2])),
    )


def compare_gradients(net: Net, alone: Net, run_net: Callable[[Net, Tensor], Tensor]) -> None:
    """The loss and all gradients are those of one process."""
    x, again = (values((3, 6), 0).requires_grad_() for _ in range(2))
    y, expected = run_net(net, x), run_net(alone, again)
    close("output", gather(y) if get_parallel_dim(y) is not None else y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert x.grad is not None and again.grad is not None
    close("input", x.grad, again.grad)
    for own, whole in zip(net.parameters(), alone.parameters(), strict=True):
        assert type(own.grad) is Tensor and whole.grad is not None
        layout = layout_of(own)
        assert layout is not None
        close("parameter", own.grad, layout.local_part(whole.grad))
    net.zero_grad()
    alone.zero_grad()


def as_part(x: Tensor, net: Net) -> Tensor:
    """Twice a tensor; a shard along the last dimension beside parallel layers."""
    if not isinstance(net.up, ParallelLinear):
        return 2 * x
    dim = x.ndim - 1
    return register_parallel_dim(2 * x, dim)


def hook_modules(net: Net) -> list[Any]:
    """Hooks that change what passes, and say what it is."""
    return [
        net.up.register_forward_hook(lambda layer, given, y: 2 * y),
        net.down.register_forward_pre_hook(lambda layer, given: (as_part(given[0], net),)),
        net.up.register_full_backward_pre_hook(
            lambda layer, grads: tuple(as_part(grad, net) for grad in grads)
        ),
        net.down.register_full_backward_hook(
            lambda layer, grads, _: tuple(as_part(grad, net) for grad in grads)
        ),
        net.up.weight.register_hook(lambda grad: grad * torch.ones_like(net.up.weight)),
    ]


def hook_tensors(net: Net, x: Tensor) -> Tensor:
    """Hooks of tensors that return shards, in front of the movements of a backward pass."""
    h = net.up(x)
    h.register_hook(lambda grad: as_part(grad, net))
    h = h.tanh()
    h.register_hook(lambda grad: as_part(grad, net))
    y: Tensor = net.down(h)
    y.register_hook(lambda grad: as_part(grad, net))
    return y


def run_with_hooks() -> None:
    net, alone = parallel_and_alone()
    compare_gradients(net, alone, hook_tensors)
    for each in (net, alone):
        hook_modules(each)
    for _ in range(2):
        compare_gradients(net, alone, lambda net, x: net(x))
    assert tessel.distributed.reduce(torch.ones(2)).tolist() == [tessel.world().size] * 2


@pytest.mark.parametrize("nprocs", [1, 3])
def test_hooks_may_return_shards(run: Run, nprocs: int) -> None:
    run(run_with_hooks, nprocs=nprocs)


CHECKPOINTED: dict[str, Callable[[Net, Tensor, bool], Tensor]] = {
    "all": lambda net, x, again: checkpoint(net, x, use_reentrant=again),
    "column": lambda net, x, again: net.down(checkpoint(net.up, x, use_reentrant=again)),
    "row": lambda net, x, again: checkpoint(net.down, net.up(x), use_reentrant=again),
    "each": lambda net, x, again: checkpoint(
        net.down, checkpoint(net.up, x, use_reentrant=again).tanh(), use_reentrant=again
    ),
    "inside": lambda net, x, again: net.down(
        checkpoint(torch.tanh, net.up(x), use_reentrant=again) * 2
    ),
}


def run_checkpointed(reentrant: bool) -> None:
    net, alone = parallel_and_alone()
    for function in CHECKPOINTED.values():
        compare_gradients(net, alone, lambda net, x, f=function: f(net, x, reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nprocs", [1, 3])
def test_both_kinds_of_checkpoints_compute_again(run: Run, nprocs: int, reentrant: bool) -> None:
    run(run_checkpointed, reentrant, nprocs=nprocs)


def train_with_dropout(size: int) -> None:
    """A model with dropout on shards gives the gradients of one that is not split."""
    worlds = [Partition((rank,), (1,)) for rank in tessel.world().ranks]
    plain = plain_model(dropout=ParallelDropout(0.3, partition=worlds[tessel.world().rank or 0]))
    model = split_model(plain, group(size))
    for each in (plain, model):
        torch.manual_seed(2)
        loss_of(each, *batch(0)).backward()
    check_parameters(model, plain, grads=True)


@everywhere
def test_a_model_with_dropout_is_the_same_on_any_number(run: Run, nprocs: int, size: int) -> None:
    run(train_with_dropout, size, nprocs=nprocs)


def dropout_faults(kind: str) -> tuple[type[BaseException], str] | None:
    P = tessel.world()
    odd = P.rank == 1
    layer = ParallelDropout(0.5)
    x = torch.ones(4, 6)
    if kind == "shape" and odd:
        x = x[:2]
    elif kind == "sharding" and odd:
        x = register_parallel_dim(x, 0)
    elif kind == "p" and odd:
        layer.p = 0.25
    elif kind == "lost":
        x = register_parallel_dim(x, 0).sort(0).values
    elif kind == "shards":
        x = scatter(x, 0, P)
        x = x[:0] if odd else x
        x = tessel.distributed.shards.as_shard(x, tessel.distributed.shards.Sharding(0, P, 4))
    return raised(lambda: layer(x))


@pytest.mark.parametrize("kind", ["shape", "sharding", "p", "lost", "shards"])
def test_unequal_dropout_raises_the_same_everywhere(run: Run, kind: str) -> None:
    results = run(dropout_faults, kind, nprocs=3)
    assert len(set(results)) == 1 and results[0] is not None, results
    assert results[0][0] is ValueError and "ParallelDropout" in results[0][1]


def draw_in_streams(equal: bool) -> tuple[list[float], list[float], Tensor]:
    torch.manual_seed(4 if equal else tessel.world().rank)
    with random_stream(split=True):
        own = torch.rand(5)
    with random_stream(split=False):
        common = torch.rand(5)
    state = torch.get_rng_state()
    torch.manual_seed(4 if equal else tessel.world().rank)
    with random_stream(split=True):
        assert torch.equal(torch.rand(5), own)
    return own.tolist(), common.tolist(), state


@pytest.mark.parametrize("equal", [True, False])
def test_streams_of_a_group(run: Run, equal: bool) -> None:
    results = run(draw_in_streams, equal, nprocs=3)
    assert len({tuple(own) for own, _, _ in results}) == 3
    assert len({tuple(common) for _, common, _ in results}) == 1
    if equal:
        assert all(torch.equal(state, results[0][2]) for _, _, state in results)


def streams_differ() -> tuple[type[BaseException], str] | None:
    def enter() -> None:
        with random_stream(split=tessel.world().rank == 0):
            pass

    return raised(enter)


def test_streams_that_differ_raise(run: Run) -> None:
    results = run(streams_differ, nprocs=2)
    assert len(set(results)) == 1 and results[0] is not None and results[0][0] is ValueError


def scale_losses(size: int, fused: bool, unscaled: bool) -> list[tuple[float, bool]]:
    """Steps with an infinite gradient on one worker, and without: scales, and whether it moved."""
    P, found = group(size), []
    torch.manual_seed(0)
    layer = ParallelLinear(4, 9, dim=-1, partition=P)
    optimizer = torch.optim.Adam(layer.parameters(), 0.1, fused=fused)
    scaler = ParallelGradScaler("cpu", init_scale=8.0, partition=P)
    for worker in (0, size - 1, None):
        optimizer.zero_grad()
        loss = gather(layer(torch.ones(3, 4)), partition=P).square().sum()
        scaler.scale(loss).backward()
        assert layer.weight.grad is not None
        if P.rank == worker:
            layer.weight.grad.view(-1)[0] = INF
        before = layer.weight.detach().clone()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), not torch.equal(before, layer.weight)))
    return found


@everywhere
@pytest.mark.parametrize(("fused", "unscaled"), [(False, False), (False, True), (True, False)])
def test_a_step_is_left_out_by_all_or_by_none(
    run: Run, nprocs: int, size: int, fused: bool, unscaled: bool
) -> None:
    for found in run(scale_losses, size, fused, unscaled, nprocs=nprocs):
        assert found == [(4.0, False), (2.0, False), (2.0, True)]


def scale_on_some(fused: bool) -> tuple[Any, ...]:
    """A worker whose optimizer has no gradient, where others have some, and where none has."""
    rank = tessel.world().rank
    layer = ParallelLinear(4, 9, dim=-1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, fused=fused)
    scaler = ParallelGradScaler("cpu", init_scale=8.0, growth_interval=1)
    found: list[Any] = []
    for value in (1.0, INF):
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))  # from which the scaler knows its device
        if rank == 0:
            layer.weight.grad = torch.full_like(layer.weight, value)
        before = layer.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        found += [
            scaler.get_scale(),
            torch.equal(before, layer.weight) == (rank != 0 or value == INF),
        ]
    optimizer.zero_grad()
    error = raised(lambda: scaler.step(optimizer))
    return *found, None if error is None else error[0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_worker_without_gradients_scales_with_the_others(run: Run, fused: bool) -> None:
    for found in run(scale_on_some, fused, nprocs=2):
        # torch refuses a step without any gradient, but not one that is fused
        assert found == (16.0, True, 8.0, True, None if fused else AssertionError)
