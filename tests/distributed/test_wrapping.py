"""DDP and FSDP around models with shards: right without a further call, or an error everywhere.

Tests `distributed/wrapping.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tessel
from parity import close, values
from scripts import python
from tessel.distributed import gather, get_group, register_parallel_dim
from tessel.distributed.shardings import state_of
from tessel.distributed.wrapping import IGNORED
from tessel.nn import (
    ParallelEmbedding,
    ParallelLinear,
    collect_state_dict,
    data_parallel,
    register_ddp_parameters_to_ignore,
    relocate_state_dict,
)
from tessel.nn.parallel.drawing import layout_of
from tessel.nn.parallel.replicas import get_data_parallel_group
from windowed_cases import raised

Run = Callable[..., list[Any]]
several = pytest.mark.parametrize("nprocs", [3, 4])
WIDTH, HIDDEN, WORDS = 5, 7, 11


class Model(torch.nn.Module):
    """Whole layers around a split pair, a head that has the embedding's table, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.pair = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, WIDTH)
        )
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.spare = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embedding(ids))
        return self.head(self.norm(x + self.pair(x)))


def plain_model(tied: bool = True) -> Model:
    torch.manual_seed(3)
    model = Model().double()
    if tied:
        model.head.weight = model.embedding.weight
    model.spare.requires_grad_(False)
    return model


def split_model(plain: Model, tied: bool = True) -> Model:
    """The same with a table, a pair of layers and a head in shards, one of them frozen."""
    model = copy.deepcopy(plain)
    convert = ParallelLinear.convert_parallel_linear
    if tied:
        model.head.weight = torch.nn.Parameter(plain.head.weight.detach().clone())
    model.embedding = ParallelEmbedding.convert_parallel_embedding(model.embedding, 0)  # type: ignore[assignment]
    model.pair[0] = convert(model.pair[0], -1)
    model.pair[2] = convert(model.pair[2], 0)
    model.head = convert(model.head, -1)  # type: ignore[assignment]
    model.spare = convert(model.spare, -1)  # type: ignore[assignment]
    if tied:
        model.head.weight = model.embedding.weight
    return model


def batch(step: int = 0, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(WORDS, (2, samples), generator=generator))  # type: ignore[return-value]


def loss_of(model: torch.nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    logits = model(ids)
    if state_of(logits) is None:
        return F.cross_entropy(logits, target)
    return tessel.nn.functional.parallel_cross_entropy(logits, target)


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    layout = layout_of(parameter)
    return whole if layout is None else layout.local_part(whole)


def check(model: torch.nn.Module, plain: torch.nn.Module, grads: bool = True) -> None:
    """Values, and gradients, are those of one process."""
    whole = dict(plain.named_parameters())
    assert {name for name, _ in model.named_parameters()} == set(whole)
    for name, parameter in model.named_parameters():
        close(name, parameter.detach(), part_of(whole[name].detach(), parameter))
        if grads:
            expected = whole[name].grad
            assert (parameter.grad is None) == (expected is None), name
            if parameter.grad is not None and expected is not None:
                close(name, parameter.grad, part_of(expected, parameter))


class Subclass(DistributedDataParallel):
    """A wrapper of a user's own, with other arguments."""

    def __init__(self, unused: int, model: torch.nn.Module) -> None:
        super().__init__(module=model)
        self.unused = unused


def wrap(model: torch.nn.Module, how: str) -> DistributedDataParallel:
    if how == "subclass":
        return Subclass(1, model)
    if how == "mesh":
        mesh = init_device_mesh("cpu", (tessel.world().size,))
        return DistributedDataParallel(model, device_mesh=mesh)
    if how == "group":
        return DistributedDataParallel(model, process_group=dist.group.WORLD)
    if how == "registered":
        names = register_ddp_parameters_to_ignore(model)
        assert register_ddp_parameters_to_ignore(model) == names
    settings: dict[str, Any] = (
        {how: True} if how in ("find_unused_parameters", "static_graph") else {}
    )
    return DistributedDataParallel(model, **settings)


def train(how: str, tied: bool) -> None:
    plain = plain_model(tied)
    model = split_model(plain, tied)
    wrapped = wrap(model, how)
    check(model, plain, grads=False)
    assert how == "registered" or not hasattr(model, IGNORED)
    optimizers = [
        torch.optim.SGD(each.parameters(), 0.5, momentum=0.9) for each in (plain, wrapped)
    ]
    for step in range(3):
        for each in (plain, wrapped):
            each.zero_grad()
            if how == "no_sync":
                with wrapped.no_sync():
                    loss_of(each, *batch(step + 10)).backward()
            loss_of(each, *batch(step)).backward()
        check(model, plain)
        for optimizer in optimizers:
            optimizer.step()
        check(model, plain)
    close("running mean", model.norm.running_mean, plain.norm.running_mean)


WAYS = ["plain", "subclass", "mesh", "group", "registered", "find_unused_parameters"]


@several
@pytest.mark.parametrize("how", [*WAYS, "static_graph", "no_sync"])
def test_a_model_with_shards_trains_under_ddp_as_in_one_process(
    run: Run, nprocs: int, how: str
) -> None:
    """Without a further call, on even and uneven shards: each worker keeps its own."""
    for tied in (True, False):
        run(train, how, tied, nprocs=nprocs)


def train_copy(how: str) -> None:
    plain = plain_model()
    model = split_model(plain)
    if how == "deepcopy":
        model = copy.deepcopy(model)
    elif how == "pickle":
        model = pickle.loads(pickle.dumps(model))
    elif how == "file":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        model = torch.load(file, weights_only=False)
    elif how == "relocate":
        whole = collect_state_dict(model)
        model = split_model(plain_model())
        model.load_state_dict(relocate_state_dict(model, whole))
    elif how == "assign":
        whole = collect_state_dict(model)
        model = split_model(plain_model())
        model.load_state_dict(relocate_state_dict(model, whole), assign=True)
        model.head.weight = model.embedding.weight
    elif how == "add_module":
        outer = torch.nn.Module()
        outer.add_module("inner", model)
        outer.forward = model.forward  # type: ignore[method-assign]
        wrapped = DistributedDataParallel(outer)
    if how != "add_module":
        wrapped = DistributedDataParallel(model)
    for each in (plain, wrapped):
        loss_of(each, *batch()).backward()
    check(model, plain)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "file", "relocate", "assign", "add_module"])
def test_copies_of_a_model_with_shards_are_wrapped_right(run: Run, how: str) -> None:
    run(train_copy, how, nprocs=3)


class Own(torch.nn.Module):
    """A layer of a user's own: a shard, a whole parameter and a shard as a buffer, all direct."""

    def __init__(self) -> None:
        super().__init__()
        P = tessel.world()
        whole = values((6, 4), 1)
        self.shard = torch.nn.Parameter(tessel.distributed.scatter(whole, 0).detach())
        register_parallel_dim(self.shard, 0)
        self.scale = torch.nn.Parameter(values((4,), 2))
        self.register_buffer("mask", tessel.distributed.scatter(values((6,), 5), 0))
        self.partition = P

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(tessel.distributed.copy(x * self.scale), self.shard) * self.mask
        return gather(h)


def train_own() -> None:
    model = Own()
    before = model.mask.clone()
    wrapped = DistributedDataParallel(model)
    x = values((3, 4), 7)
    wrapped(x).square().sum().backward()
    assert torch.equal(model.mask, before)
    whole, scale = values((6, 4), 1).requires_grad_(), values((4,), 2).requires_grad_()
    (F.linear(x * scale, whole) * values((6,), 5)).square().sum().backward()
    assert whole.grad is not None and scale.grad is not None
    close("scale", model.scale.grad, scale.grad)
    close("shard", model.shard.grad, part_of(whole.grad, model.shard))


@several
def test_parameters_and_buffers_of_the_wrapped_module_itself(run: Run, nprocs: int) -> None:
    """DDP calls a parameter of the module itself by two names."""
    run(train_own, nprocs=nprocs)


def in_groups(function: Callable[[], Any]) -> Any:
    tessel.distributed.init_process_group(2)
    try:
        return function()
    finally:
        tessel.distributed.destroy_process_group()


def train_replicas(how: str) -> None:
    plain = plain_model()
    model = split_model(plain)
    for each in (plain, model):
        each.norm.eval()  # of the statistics of the whole batch
    replicas = get_data_parallel_group()
    if how == "registered":
        register_ddp_parameters_to_ignore(model)
    if how == "handle":
        wrapped: Any = DistributedDataParallel(model, process_group=replicas.group.handle)
    elif how == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        wrapped = DistributedDataParallel(model, device_mesh=mesh["data"])
    else:
        wrapped = data_parallel(model)
    ids, target = batch()
    own = slice(0, 4) if replicas.rank == 0 else slice(4, 8)
    loss_of(plain, ids, target).backward()
    loss_of(wrapped, ids[own], target[own]).backward()
    check(model, plain)


@pytest.mark.parametrize("how", ["data_parallel", "registered", "handle", "mesh"])
def test_replicas_average_their_shards(run: Run, how: str) -> None:
    """Also if somebody has put the shards on the list of what DDP ignores."""
    run(in_groups_of_two, train_replicas, how, nprocs=4)


def in_groups_of_two(function: Callable[..., Any], *args: Any) -> Any:
    return in_groups(lambda: function(*args))


def wrap_within_group() -> None:
    """Two of four workers, which hold different shards, and wrap by themselves."""
    plain = plain_model()
    model = split_model(plain)
    wrapped = DistributedDataParallel(model, process_group=get_group().group.handle)
    for each in (plain, wrapped):
        loss_of(each, *batch()).backward()
    check(model, plain)


def test_a_group_of_its_own_shards_within_the_job(run: Run) -> None:
    run(in_groups_of_two, wrap_within_group, nprocs=4)


def refused(kind: str) -> tuple[type[BaseException], str] | None:
    """What wrapping raises; the model is as before, and can be wrapped rightly."""
    plain = plain_model()
    model = split_model(plain)
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])] if kind == "crossed" else []
    replicas = get_data_parallel_group().group.handle
    settings: dict[str, Any] = {}
    if kind == "crossed":
        settings["process_group"] = crossed[0 if tessel.world().rank in (0, 3) else 1]
    elif kind == "ignored":
        settings["process_group"] = replicas
        setattr(model, IGNORED, ["pair.0.weight"])
    elif kind == "ignored under a second name":
        settings["process_group"] = replicas
        setattr(model, IGNORED, ["head.weight"])
    elif kind == "one has none":
        settings["process_group"] = replicas
        if tessel.world().rank == 3:
            model.spare = torch.nn.Linear(3, 2)
    found = raised(lambda: DistributedDataParallel(model, **settings))
    if kind == "one has none":
        return found
    check(model, plain, grads=False)
    if hasattr(model, IGNORED):
        delattr(model, IGNORED)
    wrapped = data_parallel(model)
    for each in (plain, wrapped):
        each.eval()
        loss_of(each, *batch()).backward()
    check(model, plain)
    return found


REFUSALS = {
    "all": "tessel.nn.data_parallel(model)",
    "crossed": "tessel.nn.data_parallel(model)",
    "ignored": "pair.0.weight is a shard along dim 0",
    "ignored under a second name": "would diverge",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_right_raises_everywhere(run: Run, kind: str) -> None:
    results = run(in_groups_of_two, refused, kind, nprocs=4)
    for result in results:
        assert result is not None and result[0] is ValueError and REFUSALS[kind] in result[1]
    assert results[0] == results[3 if kind == "crossed" else 2]
    assert results[1] == results[2 if kind == "crossed" else 3]
    if kind == "all":
        assert len(set(results)) == 1


def test_models_that_differ_raise(run: Run) -> None:
    results = run(in_groups_of_two, refused, "one has none", nprocs=4)
    assert results[0] is None and results[2] is None
    assert results[1] == results[3] and results[1] is not None
    assert "the shards of the model differ between workers" in results[1][1]


def only_shards() -> tuple[type[BaseException], str] | None:
    model = ParallelLinear(4, 6, bias=False, dim=0)
    return raised(lambda: DistributedDataParallel(model))


def test_a_module_of_shards_alone_has_nothing_to_average(run: Run) -> None:
    results = run(only_shards, nprocs=2)
    assert len(set(results)) == 1 and results[0] is not None and results[0][0] is ValueError
    assert "use the model without the wrapper" in results[0][1]


def converted_late(one_alone: bool) -> tuple[type[BaseException], str] | None:
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    wrapped = DistributedDataParallel(plain)
    model = plain if one_alone and tessel.world().rank else torch.nn.Sequential(wrapped)
    found = raised(lambda: ParallelLinear.convert_parallel_linear(model, -1))
    assert type(plain[0]) is torch.nn.Linear and type(plain[2]) is torch.nn.Linear
    ParallelLinear.convert_parallel_linear(wrapped, None)  # parameters stay
    wrapped(torch.ones(2, 4)).sum().backward()
    return found


@pytest.mark.parametrize("one_alone", [False, True])
def test_a_model_is_converted_before_it_is_wrapped(run: Run, one_alone: bool) -> None:
    results = run(converted_late, one_alone, nprocs=2)
    assert len(set(results)) == 1 and results[0] is not None and results[0][0] is ValueError
    assert one_alone or "convert the model first" in results[0][1]


def lost_sharding() -> tuple[type[BaseException], str] | None:
    model = split_model(plain_model())
    model.pair[0].weight.data = torch.ones(3)
    return raised(lambda: DistributedDataParallel(model))


def test_a_lost_sharding_is_named(run: Run) -> None:
    results = run(lost_sharding, nprocs=2)
    assert len(set(results)) == 1 and results[0] is not None and results[0][0] is ValueError
    assert "pair.0.weight: its sharding was lost in `data`" in results[0][1]


def delayed() -> tuple[type[BaseException], str] | None:
    model = split_model(plain_model())
    delays = [("pair.0.weight", model.pair[0].weight)]
    return raised(
        lambda: DistributedDataParallel(
            model,
            delay_all_reduce_named_params=delays,
            param_to_hook_all_reduce=model.first.weight,
        )
    )


def test_a_delayed_reduction_of_a_shard_raises(run: Run) -> None:
    results = run(delayed, nprocs=2)
    assert len(set(results)) == 1 and results[0] is not None
    assert "delay_all_reduce_named_params" in results[0][1]


def bad_arguments() -> None:
    ParallelLinear(2, 2, dim=-1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        DistributedDataParallel(torch.nn.Linear(2, 2), nothing=1)
    with pytest.raises(TypeError, match="module"):
        DistributedDataParallel()
    plain = DistributedDataParallel(torch.nn.Linear(2, 2))
    assert plain.parameters_to_ignore == set()


def test_other_calls_of_ddp_are_those_of_torch(run: Run) -> None:
    run(bad_arguments, nprocs=2)


def fully_sharded(kind: int, left_out: bool) -> tuple[type[BaseException], str] | None:
    """A step under FSDP, or what it raises."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    plain = plain_model(tied=False)
    model = split_model(plain, tied=False)
    shards = [p for p in model.parameters() if state_of(p) is not None]
    wrapped: list[Any] = []

    def wrap() -> None:
        if kind == 1:
            wrapped.append(
                FullyShardedDataParallel(
                    model,
                    device_id=torch.device("cpu"),
                    use_orig_params=True,
                    ignored_states=iter(shards) if left_out else None,
                )
            )
        else:
            mesh = init_device_mesh("cpu", (tessel.world().size,))
            ignored = set(shards) if left_out else None
            wrapped.append(fully_shard(model, mesh=mesh, ignored_params=ignored))

    found = raised(wrap)
    if found is not None:
        return found
    before = {name: p for name, p in plain.named_parameters()}
    for each in (plain, wrapped[0]):
        loss_of(each, *batch()).backward()
    for name, parameter in model.named_parameters():
        if state_of(parameter) is not None and parameter.grad is not None:
            grad = before[name.replace("_fsdp_wrapped_module.", "")].grad
            assert grad is not None
            close(name, parameter.grad, part_of(grad, parameter))
    return None


@pytest.mark.parametrize("kind", [1, 2])
def test_fsdp_refuses_shards_and_may_leave_them_out(run: Run, kind: int) -> None:
    results = run(fully_sharded, kind, False, nprocs=3)
    assert len(set(results)) == 1 and results[0] is not None and results[0][0] is ValueError
    assert "embedding.weight is a shard along dim 0" in results[0][1]
    assert "ignored_" in results[0][1]
    assert run(fully_sharded, kind, True, nprocs=3) == [None] * 3
    for result in run(in_groups_of_two, fully_sharded, kind, True, nprocs=4):
        assert result is not None and "would diverge" in result[1]


def redundant() -> tuple[type[BaseException], str] | None:
    """A step by an optimizer that keeps its state on one worker for each parameter."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = split_model(plain_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    loss_of(model, *batch()).backward()
    before = model.pair[0].weight.detach().clone()
    found = raised(optimizer.step)
    assert torch.equal(model.pair[0].weight, before)
    replicas = get_data_parallel_group()
    if replicas.size > 1:
        ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=replicas.group.handle, lr=0.1
        ).step()
    return found


def test_an_optimizer_that_sends_shards_around_raises(run: Run) -> None:
    results = run(redundant, nprocs=2)
    assert len(set(results)) == 1 and results[0] is not None and results[0][0] is ValueError
    assert "ZeroRedundancyOptimizer over workers [0, 1]" in results[0][1]
    run(in_groups_of_two, redundant, nprocs=4)


LAZY = """
import torch, tessel
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import FullyShardedDataParallel

def is_guarded(wrapper): return hasattr(wrapper.__init__, "__wrapped__")

assert not is_guarded(DistributedDataParallel) and not is_guarded(FullyShardedDataParallel)
tessel.nn.ParallelLinear(3, 4)
assert not is_guarded(DistributedDataParallel)
weight = tessel.nn.ParallelLinear(3, 4, dim=-1).weight
init = DistributedDataParallel.__init__
assert is_guarded(DistributedDataParallel) and is_guarded(FullyShardedDataParallel)
tessel.nn.ParallelLinear(3, 4, dim=-1)
assert DistributedDataParallel.__init__ is init
"""
LATER = """
import pickle, sys
import torch, tessel
from torch.nn.parallel import DistributedDataParallel

shard = pickle.loads({pickled!r})
assert hasattr(DistributedDataParallel.__init__, "__wrapped__")
assert "torch.distributed.fsdp" not in sys.modules
from torch.distributed.fsdp import FullyShardedDataParallel
assert hasattr(FullyShardedDataParallel.__init__, "__wrapped__")
assert not [each for each in sys.meta_path if type(each).__module__.startswith("tessel")]
"""


@pytest.mark.slow
def test_torch_is_as_it_was_until_there_is_a_shard(tmp_path: Path) -> None:
    pickled = pickle.dumps(ParallelLinear(3, 4, dim=-1).weight)
    for code in (LAZY, LATER.format(pickled=pickled)):
        (tmp_path / "script.py").write_text(code)
        done = python(tmp_path / "script.py")
        assert done.returncode == 0, done.stderr
