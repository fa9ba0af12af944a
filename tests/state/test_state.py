"""States of models in shards: whole as plain torch has them, and back, on any number of workers.

Tests `state/state_dicts.py`, `state/checkpoint.py`, `state/parts.py`, `state/places.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import Linear, Module
from torch.nn.parallel import DistributedDataParallel

import tessel
from parity import group, values
from tessel import Partition
from tessel.distributed import get_parallel_dim
from tessel.distributed.shards import register_parallel_dim, sharding_of, shared_by
from tessel.interop import ModelState, OptimizerState, checkpoint_reader
from tessel.nn.parallel import ParallelEmbedding, ParallelLinear
from tessel.state.checkpoint import Part
from tessel.state.state_dicts import (
    collect_optimizer_state_dict,
    collect_state_dict,
    relocate_optimizer_state_dict,
    relocate_state_dict,
)
from tessel.testing import count_traffic
from windowed_cases import raised

Run = Callable[..., list[Any]]
Dims = tuple[int | None, int | None, int | None]
Sizes = tuple[int, int, int]
GROUPS = [(1, 1), (3, 3), (4, 4), (4, 2)]  # workers, and those of a group
alone_is_meant = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
everywhere = pytest.mark.parametrize(("nprocs", "size"), GROUPS)
DIMS: list[Dims] = [(0, -1, 0), (1, 0, -1), (-1, 1, 0), (0, None, -1), (None, -1, None)]
UNEVEN: Sizes = (7, 5, 9)  # ids, features, hidden features
FEW: Sizes = (3, 2, 3)  # fewer than workers


class Net(Module):
    """Layers of all kinds, in shards, with one that is whole, and a buffer."""

    def __init__(self, dims: Dims, sizes: Sizes, P: Partition, tied: bool = False) -> None:
        super().__init__()
        ids, width, hidden = sizes
        self.table = ParallelEmbedding(ids, width, dim=dims[0], partition=P)
        self.up = ParallelLinear(width, hidden, dim=dims[1], partition=P)
        self.down = ParallelLinear(hidden, width, dim=dims[2], partition=P)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = Linear(width, ids, bias=False)
        if tied:
            self.head = ParallelLinear(width, ids, bias=False, dim=-1, partition=P)
            self.head.weight = self.table.weight
        self.double()


class Plain(Module):
    """The same of plain torch, with values that depend on names and shapes only."""

    def __init__(self, sizes: Sizes, tied: bool = False) -> None:
        super().__init__()
        ids, width, hidden = sizes
        self.table = torch.nn.Embedding(ids, width)
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = Linear(width, ids, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.double()
        with torch.no_grad():
            for seed, value in enumerate(self.parameters()):
                value.copy_(values(value.shape, seed))


def part(whole: Tensor, like: Tensor) -> Tensor:
    """What a worker has of a whole value, by the sharding of a parameter."""
    sharding = sharding_of(like)
    if sharding is None or sharding.interval is None:
        return whole
    return whole.narrow(
        sharding.dim, sharding.interval[0], sharding.interval[1] - sharding.interval[0]
    )


def same(got: Any, expected: Any, where: str = "") -> None:
    """Raise AssertionError unless two states are equal to the last bit, in the same order."""
    if isinstance(expected, Tensor):
        assert type(got) is Tensor and got.dtype == expected.dtype, where
        assert torch.equal(got, expected), f"{where}: {got} is not {expected}"
    elif isinstance(expected, dict):
        assert list(got) == list(expected), f"{where}: {list(got)} is not {list(expected)}"
        for key, value in expected.items():
            same(got[key], value, f"{where}.{key}")
    else:
        assert got == expected, f"{where}: {got} is not {expected}"


def check_own(net: Module, plain: Module) -> None:
    """Raise unless the model has its parts of the values of the plain one, registered as shards."""
    wholes = plain.state_dict()
    for name, value in net.state_dict(keep_vars=True).items():
        assert torch.equal(value, part(wholes[name], value)), name


def loaded(dims: Dims, sizes: Sizes, P: Partition, plain: Module, tied: bool = False) -> Net:
    net = Net(dims, sizes, P, tied)
    assert not net.load_state_dict(relocate_state_dict(net, plain.state_dict())).missing_keys
    check_own(net, plain)
    return net


# the state of a model


def check_round_trips(size: int) -> None:
    P = group(size)
    for sizes in (UNEVEN, FEW):
        plain = Plain(sizes)
        for dims in DIMS:
            net = loaded(dims, sizes, P, plain)
            whole = collect_state_dict(net)
            same(whole, plain.state_dict())
            assert whole._metadata == net.state_dict()._metadata
            for other in DIMS:
                again = Net(other, sizes, P)
                again.load_state_dict(relocate_state_dict(again, whole))
                check_own(again, plain)


@pytest.mark.slow
@everywhere
def test_states_are_those_of_plain_torch_for_every_dim(run: Run, nprocs: int, size: int) -> None:
    run(check_round_trips, size, nprocs=nprocs)


def check_files(folder: str, size: int) -> None:
    P, plain = group(size), Plain(UNEVEN)
    path = Path(folder) / f"{tessel.world().rank}.pt"
    torch.save(plain.state_dict(), path)
    net = Net(DIMS[0], UNEVEN, P)
    state = torch.load(path, weights_only=True)
    net.load_state_dict(relocate_state_dict(net, state))
    check_own(net, plain)
    torch.save(collect_state_dict(net), path)
    same(dict(torch.load(path, weights_only=True)), dict(plain.state_dict()))


@everywhere
def test_files_of_plain_torch_load_and_are_written(
    run: Run, nprocs: int, size: int, tmp_path: Path
) -> None:
    run(check_files, str(tmp_path), size, nprocs=nprocs)


def check_first(size: int) -> tuple[int, int]:
    P, plain = group(size), Plain(UNEVEN)
    net = loaded(DIMS[0], UNEVEN, P, plain)
    with count_traffic() as traffic:
        whole = collect_state_dict(net, rank0_only=True, cpu_offload=True)
    if P.rank == 0:
        same(whole, plain.state_dict())
        assert all(value.device.type == "cpu" for value in whole.values())
    else:
        assert whole == {}
    shards = [v for v in net.parameters() if sharding_of(v) is not None and v.numel()]
    sent = 0 if P.rank == 0 else sum(value.nbytes for value in shards)
    assert traffic.bytes_sent == sent, (traffic, sent)
    assert traffic.messages == (0 if P.rank == 0 else len(shards)), traffic
    with count_traffic() as traffic:
        relocate_state_dict(net, plain.state_dict())
    assert traffic.messages == 0
    return sent, traffic.agreements


@everywhere
def test_the_first_worker_may_collect_alone_and_each_shard_travels_once(
    run: Run, nprocs: int, size: int
) -> None:
    sent = run(check_first, size, nprocs=nprocs)
    assert size == 1 or any(bytes_sent for bytes_sent, _ in sent)


def check_sent(size: int) -> None:
    P, plain = group(size), Plain(UNEVEN)
    alone = trained(plain, OPTIMIZERS["adam"])
    for dims in DIMS:
        net = Net(dims, UNEVEN, P)
        optimizer = OPTIMIZERS["adam"](groups_of(net))
        whole, kept = plain.state_dict(keep_vars=True), pickle.dumps(alone.state_dict())
        first = P.rank == 0
        with count_traffic() as traffic:
            own = relocate_state_dict(net, whole if first else None, rank0_only=True)
        net.load_state_dict(own)
        check_own(net, plain)
        everyones = sum(value.nbytes for value in own.values() if value.dim())
        received = 0 if first else everyones
        assert traffic.bytes_received == received and traffic.bytes_sent <= size * everyones
        given = pickle.loads(kept) if first else None
        optimizer.load_state_dict(
            relocate_optimizer_state_dict(net, optimizer, given, rank0_only=True)
        )
        same(collect_optimizer_state_dict(net, optimizer), alone.state_dict())
        settings = [{**each, "lr": torch.full((2,), 0.5)} for each in optimizer.param_groups]
        settings = [{**each, "params": [0] * len(each["params"])} for each in settings]
        tensors = {"state": {}, "param_groups": settings} if first else None
        found = relocate_optimizer_state_dict(net, optimizer, tensors, rank0_only=True)
        assert found["param_groups"][1]["lr"].tolist() == [0.5, 0.5]
        extended = {**whole, "note": "text"} if first else {"what": "ever"}
        found = relocate_state_dict(net, extended, rank0_only=True)
        assert found["note"] == "text" and list(found) == [*whole, "note"]


@everywhere
def test_the_first_worker_may_have_the_state_alone(run: Run, nprocs: int, size: int) -> None:
    run(check_sent, size, nprocs=nprocs)


def check_given() -> None:
    """A state that is not the module's own: an average of weights, in shards."""
    P, plain = group(tessel.world().size), Plain(UNEVEN)
    net = loaded(DIMS[0], UNEVEN, P, plain)
    average = {name: value / 2 for name, value in net.state_dict().items()}
    same(collect_state_dict(net, average), {k: v / 2 for k, v in plain.state_dict().items()})
    some = {"down.weight": average["down.weight"], "note": "text"}
    found = collect_state_dict(net, some)
    same(found, {"down.weight": plain.down.weight.detach() / 2, "note": "text"})
    relocated = relocate_state_dict(net, found)
    assert torch.equal(relocated["down.weight"], some["down.weight"])
    assert net.load_state_dict(relocated, strict=False).unexpected_keys == ["note"]


def test_another_state_of_the_same_model(run: Run) -> None:
    run(check_given, nprocs=3)


def check_tied() -> None:
    P, plain = group(tessel.world().size), Plain(UNEVEN, tied=True)
    net = loaded((0, -1, 0), UNEVEN, P, plain, tied=True)
    whole = collect_state_dict(net)
    same(whole, plain.state_dict())
    assert whole["table.weight"] is whole["head.weight"]
    file = io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    own = relocate_state_dict(net, torch.load(file))
    assert own["table.weight"].data_ptr() == own["head.weight"].data_ptr()
    assert own["table.weight"].untyped_storage().nbytes() == own["table.weight"].nbytes
    net.load_state_dict(own)
    assert net.table.weight is net.head.weight


def test_tied_weights_stay_one(run: Run) -> None:
    run(check_tied, nprocs=3)


def check_shardings_stay(size: int) -> None:
    P, plain = group(size), Plain(UNEVEN)
    net = loaded(DIMS[0], UNEVEN, P, plain)
    assigned = Net(DIMS[0], UNEVEN, P)
    assigned.load_state_dict(relocate_state_dict(assigned, plain.state_dict()), assign=True)
    meta = Net(DIMS[0], UNEVEN, P).to("meta")
    meta.load_state_dict(relocate_state_dict(meta, plain.state_dict()), assign=True)
    own = Net(DIMS[0], UNEVEN, P)
    own.load_state_dict(net.state_dict(), assign=True)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    others = {
        "assign": assigned,
        "meta": meta,
        "own": own,
        "deepcopy": copy.deepcopy(net),
        "pickle": pickle.loads(pickle.dumps(net)),
        "save": torch.load(file, weights_only=False),
        "to": copy.deepcopy(net).float().double(),
    }
    for how, other in others.items():
        for (name, value), kept in zip(net.named_parameters(), other.parameters(), strict=True):
            assert isinstance(kept, torch.nn.Parameter), (how, name)
            assert sharding_of(kept) == sharding_of(value), (how, name)
            assert get_parallel_dim(kept) == get_parallel_dim(value), (how, name)
            assert shared_by(kept) == shared_by(value), (how, name)
        if how != "to":
            check_own(other, plain)
            same(collect_state_dict(other), plain.state_dict(), how)


@everywhere
def test_shardings_survive_what_is_done_with_models(run: Run, nprocs: int, size: int) -> None:
    run(check_shardings_stay, size, nprocs=nprocs)


class OnSome(Module):
    """A layer over all workers, and one over the last two of them."""

    def __init__(self) -> None:
        super().__init__()
        everyone = tessel.world()
        last = everyone.create_partition_inclusive([everyone.size - 2, everyone.size - 1])
        self.all = ParallelLinear(3, 5, dim=-1, partition=everyone)
        self.some = ParallelLinear(5, 3, dim=0, partition=last)


def check_some_workers() -> None:
    net, plain = OnSome(), Module()
    plain.all, plain.some = Linear(3, 5), Linear(5, 3)
    wholes = {name: values(each.shape, 1).float() for name, each in plain.state_dict().items()}
    plain.load_state_dict(wholes)
    net.load_state_dict(relocate_state_dict(net, plain.state_dict()))
    same(collect_state_dict(net), plain.state_dict())
    first = collect_state_dict(net, rank0_only=True)
    same(first, plain.state_dict() if tessel.world().rank == 0 else {})
    assert net.some.bias.shape == (3,) or not net.some.partition.active
    narrow = net.some.partition
    text = raised(lambda: collect_state_dict(net, partition=narrow))
    assert text and "pass `partition`, with all workers that hold the model" in text[1], text


def test_layers_over_some_of_the_workers(run: Run) -> None:
    run(check_some_workers, nprocs=4)


def check_by_hand() -> None:
    """Parameters of the user's own, which are registered as shards of any lengths."""
    P, net = tessel.world(), Module()
    whole = values((6, 2), 3)
    lengths = [1, 3, 2]
    mine = whole.split(lengths)[P.rank]
    net.weight = register_parallel_dim(torch.nn.Parameter(mine.clone()), 0, P)
    same(collect_state_dict(net), {"weight": whole})
    again = relocate_state_dict(net, {"weight": whole * 2})
    assert torch.equal(again["weight"], mine * 2)


def test_parameters_that_are_registered_by_hand(run: Run) -> None:
    run(check_by_hand, nprocs=3)


def test_parametrized_shards_are_refused() -> None:
    layer = ParallelLinear(3, 2, dim=-1, partition=tessel.world())
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(NotImplementedError, match="the weight of the module"):
        collect_state_dict(layer)


def check_bad_states() -> list[Any]:
    P = tessel.world()
    net = Net(DIMS[0], UNEVEN, P)
    whole = Plain(UNEVEN).state_dict()
    second = P.rank == 1
    cases = [
        lambda: relocate_state_dict(net, {**whole, "up.weight": torch.ones(9, 4)}),
        lambda: relocate_state_dict(net, {**whole, "up.weight": 3}),
        lambda: relocate_state_dict(net, net.state_dict()),
        lambda: relocate_state_dict(
            net, {k: v for k, v in whole.items() if not second or k != "up.weight"}
        ),
        lambda: relocate_state_dict(
            net, {k: v.float() if second else v for k, v in whole.items() if k == "up.weight"}
        ),
        lambda: relocate_state_dict(
            net, {**whole, "up.bias": torch.ones(8 if second else 9, dtype=torch.float64)}
        ),
        lambda: relocate_state_dict(net, None if second else whole),
        lambda: relocate_state_dict(net, whole if second else None, rank0_only=True),
        lambda: relocate_state_dict(net, {"up.bias": torch.ones(2)}, rank0_only=True),
        lambda: relocate_state_dict(net, [whole] if second else whole, "up."),  # type: ignore[arg-type]
        lambda: collect_state_dict(net, [whole] if second else None),  # type: ignore[arg-type]
        lambda: collect_state_dict(net, whole),
        lambda: collect_state_dict(net, rank0_only=second),
        lambda: collect_state_dict(
            net, {**net.state_dict(), **({"up.bias": torch.ones(7)} if second else {})}
        ),
        lambda: net.load_state_dict(
            relocate_state_dict(net, {k: v for k, v in whole.items() if k != "norm.weight"})
        ),
        lambda: net.load_state_dict(relocate_state_dict(net, {**whole, "other": torch.ones(2)})),
        lambda: net.load_state_dict(
            relocate_state_dict(net, {**whole, "norm.weight": torch.ones(6)})
        ),
    ]
    return [raised(case) for case in cases]


TEXTS = [
    ("up.weight must be whole, of shape (9, 5), got shape (9, 4)",),
    ("up.weight must be whole, of shape (9, 5), got 3",),
    ("table.weight must be whole, of shape (7, 5), got shape (3, 5)", "collect_state_dict"),
    ("worker 0 has 'up.weight' of torch.float64 and shape (9, 5), and worker 1 does not",),
    ("worker 0 has 'up.weight' of torch.float64 and shape (9, 5), and worker 1 does not",),
    ("worker 1 calls", "up.bias must be whole, of shape (9,), got shape (8,)"),
    ("worker 1 calls", "expected the whole state, got None"),
    ("worker 0 calls", "expected the whole state, got None"),
    ("up.bias must be whole, of shape (9,), got shape (2,)",),
    ("worker 1 calls", "expected the whole state, got list"),
    ("worker 1 calls", "expected a state of the module, got list"),
    ("of shape (3, 5), got shape (7, 5)", "worker 1 calls"),
    ("rank0_only=False", "rank0_only=True"),
    ("worker 1 calls", "of shape (3,), got shape (7,)"),
    ("Missing key(s)", "norm.weight"),
    ("Unexpected key(s)", "other"),
    ("norm.weight", "torch.Size([6])", "torch.Size([5])"),
]


def test_bad_states_raise_the_same_on_all_workers(run: Run) -> None:
    everyones = run(check_bad_states, nprocs=3)
    assert len(TEXTS) == len(everyones[0])
    for case, texts in zip(zip(*everyones, strict=True), TEXTS, strict=True):
        assert len(set(case)) == 1 and case[0], case
        for text in texts:
            assert text in case[0][1], (text, case[0])


# the state of an optimizer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def step(model: Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step with gradients that every layout sees as parts of the same."""
    for number, value in enumerate(model.parameters()):
        sharding = sharding_of(value)
        shape = list(value.shape)
        if sharding is not None:
            assert sharding.size is not None
            shape[sharding.dim] = sharding.size
        value.grad = part(values(shape, 100 * seed + number), value).clone()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def groups_of(model: Module) -> list[dict[str, Any]]:
    """The parameters in two groups, with settings of their own."""
    parameters = list(model.parameters())
    return [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.01}]


def check_optimizers(size: int, name: str) -> None:
    P, make = group(size), OPTIMIZERS[name]
    for sizes in (UNEVEN, FEW):
        plain = Plain(sizes)
        start = copy.deepcopy(plain.state_dict())
        alone = make(groups_of(plain))
        for seed in range(2):
            step(plain, alone, seed)
        nets = []
        for dims in DIMS[:3]:
            net = Net(dims, sizes, P)
            net.load_state_dict(relocate_state_dict(net, start))
            optimizer = make(groups_of(net))
            for seed in range(2):
                step(net, optimizer, seed)
            same(collect_optimizer_state_dict(net, optimizer), alone.state_dict(), name)
            first = collect_optimizer_state_dict(net, optimizer, rank0_only=True, cpu_offload=True)
            same(first, alone.state_dict() if P.rank == 0 else {}, name)
            nets.append((dims, net, optimizer))
        file = pickle.dumps(alone.state_dict())
        weights = copy.deepcopy(plain.state_dict())
        step(plain, alone, 5)
        for dims, _, _ in nets:
            net = Net(dims, sizes, P)
            net.load_state_dict(relocate_state_dict(net, weights))
            optimizer = make(groups_of(net))
            saved = relocate_optimizer_state_dict(net, optimizer, pickle.loads(file))
            optimizer.load_state_dict(saved)
            step(net, optimizer, 5)
            check_own(net, plain)
            same(collect_optimizer_state_dict(net, optimizer), alone.state_dict(), name)


@everywhere
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optimizers_are_those_of_one_process(
    run: Run, nprocs: int, size: int, name: str
) -> None:
    run(check_optimizers, size, name, nprocs=nprocs)


def check_bad_optimizers() -> list[Any]:
    P = tessel.world()
    net, plain = Net(DIMS[0], UNEVEN, P), Plain(UNEVEN)
    optimizer, alone = (torch.optim.Adam(each.parameters()) for each in (net, plain))
    for each, model in ((optimizer, net), (alone, plain)):
        step(model, each, 0)
    whole = alone.state_dict()
    wrong = copy.deepcopy(whole)
    wrong["state"][1]["exp_avg"] = torch.ones(9, 4)
    fewer = torch.optim.Adam([*plain.parameters()][1:]).state_dict()
    several = torch.optim.LBFGS(net.parameters())
    several.state[next(net.parameters())] = {"old_dirs": [torch.ones(3)]}
    factored = torch.optim.SGD(net.parameters())  # an optimizer that keeps rows and columns apart
    factored.state[next(net.parameters())] = {"row_var": torch.ones(3, 1)}
    cases = [
        lambda: relocate_optimizer_state_dict(net, optimizer, wrong),
        lambda: relocate_optimizer_state_dict(net, optimizer, fewer),
        lambda: collect_optimizer_state_dict(net, several),
        lambda: collect_optimizer_state_dict(net, factored),
        lambda: OptimizerState(net, factored).state_dict(),
        lambda: relocate_optimizer_state_dict(net, optimizer, {} if P.rank == 1 else whole),
    ]
    return [raised(case) for case in cases]


OPTIMIZER_TEXTS = [
    ("'exp_avg' of an optimizer for up.weight", "(9, 5)", "(9, 4)"),
    ("[8] parameters", "[7]"),
    ("'old_dirs'", "several tensors"),
    ("'row_var' of an optimizer for", "got shape"),
    ("'row_var' of an optimizer for", "has the shape"),
    ("worker 1 calls", "the state has no 'state'; the state has no 'param_groups'"),
]


def test_bad_states_of_optimizers_raise_the_same_on_all_workers(run: Run) -> None:
    everyones = run(check_bad_optimizers, nprocs=3)
    for case, texts in zip(zip(*everyones, strict=True), OPTIMIZER_TEXTS, strict=True):
        assert len(set(case)) == 1 and case[0], case
        for text in texts:
            assert text in case[0][1], (text, case[0])


# sharded checkpoints


def trained(model: Module, make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = make(groups_of(model))
    for seed in range(2):
        step(model, optimizer, seed)
    return optimizer


def write(folder: str, size: int, dims: Dims, sizes: Sizes, name: str, later: bool = False) -> None:
    P, plain = group(size), Plain(sizes)
    net = loaded(dims, sizes, P, plain)
    optimizer = trained(net, OPTIMIZERS[name])
    state = {"model": ModelState(net), "optimizer": OptimizerState(net, optimizer)}
    if not later:
        dcp.save(state, checkpoint_id=folder)
        return
    pending = dcp.async_save(state, checkpoint_id=folder)
    with torch.no_grad():
        for value in net.parameters():
            value.zero_()
    pending.result()


def read(folder: str, size: int, dims: Dims, sizes: Sizes, name: str) -> None:
    """Read, compare with one process, and go on."""
    P, plain = group(size), Plain(sizes)
    alone = trained(plain, OPTIMIZERS[name])
    net = Net(dims, sizes, P)
    optimizer = OPTIMIZERS[name](groups_of(net))
    state = {"model": ModelState(net), "optimizer": OptimizerState(net, optimizer)}
    for value in net.parameters():
        value.grad = torch.ones_like(value)  # of no matter, and kept
    dcp.load(state, storage_reader=checkpoint_reader(folder))
    assert all(bool((value.grad == 1).all()) for value in net.parameters())
    check_own(net, plain)
    assert all(sharding_of(a) == sharding_of(b) for a, b in zip(
        net.parameters(), Net(dims, sizes, P).parameters(), strict=True
    ))  # fmt: skip
    step(net, optimizer, 5)
    step(plain, alone, 5)
    check_own(net, plain)
    same_values(collect_optimizer_state_dict(net, optimizer), alone.state_dict())


def same_values(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """As `same`; what is None or missing in a group of settings may be either."""
    same(got["state"], expected["state"])
    for some, others in zip(got["param_groups"], expected["param_groups"], strict=True):
        for key, value in others.items():
            assert some.get(key) == value, key


CHECKPOINTS = [
    ((4, 4), (0, -1, 0), UNEVEN, "adam"),
    ((4, 4), (1, 0, -1), FEW, "sgd"),
    ((3, 3), (0, -1, 0), UNEVEN, "sgd"),
    ((1, 1), (0, -1, 0), UNEVEN, "adam"),
    ((4, 2), (-1, -1, 0), UNEVEN, "adam"),
]


@pytest.mark.parametrize("case", range(len(CHECKPOINTS)))
def test_checkpoints_load_on_other_numbers_of_workers(run: Run, case: int, tmp_path: Path) -> None:
    (nprocs, size), dims, sizes, name = CHECKPOINTS[case]
    run(write, str(tmp_path), size, dims, sizes, name, nprocs=nprocs)
    for workers, others in ((4, 4), (3, 3), (1, 1), (4, 2)):
        for wanted in (dims, DIMS[1]):
            run(read, str(tmp_path), others, wanted, sizes, name, nprocs=workers)


def test_checkpoints_that_are_written_later_hold_what_was(run: Run, tmp_path: Path) -> None:
    run(write, str(tmp_path), 3, DIMS[0], UNEVEN, "adam", True, nprocs=3)
    run(read, str(tmp_path), 2, DIMS[0], UNEVEN, "adam", nprocs=2)


def writers(folder: Path, name: str) -> dict[tuple[int, ...], str]:
    """Which file has which piece of a value, by where the piece begins."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {
        tuple(index.offset): info.relative_path
        for index, info in metadata.storage_data.items()
        if index.fqn == name
    }


@pytest.mark.parametrize("size", [2, 4])
def test_each_worker_writes_its_shards_and_one_what_is_shared(
    run: Run, size: int, tmp_path: Path
) -> None:
    run(write, str(tmp_path), size, (0, -1, 0), UNEVEN, "adam", nprocs=4)
    expected = {2: {(0, 0), (5, 0)}, 4: {(0, 0), (3, 0), (5, 0), (7, 0)}}[size]
    for name in ("model.up.weight", "optimizer.state.up.weight.exp_avg"):
        found = writers(tmp_path, name)
        assert {*found} == expected, found
        if size == 4:  # no other worker has it
            assert [found[at] for at in sorted(found)] == [f"__{k}_0.distcp" for k in range(4)]
        else:  # one of the two that have it
            assert found[0, 0][2] in "02" and found[5, 0][2] in "13"
    for name in ("model.down.bias", "model.norm.weight", "optimizer.state.down.bias.exp_avg"):
        assert len(writers(tmp_path, name)) == 1
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    for name, kept in metadata.state_dict_metadata.items():
        if isinstance(kept, TensorStorageMetadata):  # every number is written once
            assert sum(prod(piece.sizes) for piece in kept.chunks) == prod(kept.size), name
            assert len(writers(tmp_path, name)) == len(kept.chunks), name


@alone_is_meant
def test_plain_torch_reads_the_files(run: Run, tmp_path: Path) -> None:
    run(write, str(tmp_path / "parts"), 4, DIMS[0], UNEVEN, "adam", nprocs=4)
    plain = Plain(UNEVEN)
    alone = trained(plain, OPTIMIZERS["adam"])
    dcp_to_torch_save(tmp_path / "parts", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    same(dict(sorted(whole["model"].items())), dict(sorted(plain.state_dict().items())))
    kept = get_optimizer_state_dict(plain, alone)["state"]
    assert {*whole["optimizer"]["state"]} == {*kept}
    for name, values_of in kept.items():
        for what, value in values_of.items():
            assert torch.equal(whole["optimizer"]["state"][name][what], value), (name, what)
    fresh = Plain(UNEVEN)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "parts", no_dist=True)
    check_own(fresh, plain)


def read_plain(folder: str) -> None:
    net = Net(DIMS[0], UNEVEN, tessel.world())
    dcp.load({"model": ModelState(net)}, checkpoint_id=folder)
    check_own(net, Plain(UNEVEN))


@alone_is_meant
def test_files_of_plain_torch_are_read(run: Run, tmp_path: Path) -> None:
    dcp.save({"model": Plain(UNEVEN).state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    run(read_plain, str(tmp_path), nprocs=3)


def check_replicas(folder: str) -> None:
    """Two copies of a model under DistributedDataParallel: names without its prefix."""
    P, plain = group(2), Plain(UNEVEN)
    net = loaded(DIMS[0], UNEVEN, P, plain)
    places = range(P.rank or 0, 4, 2)
    groups = [tessel.world().create_partition_inclusive(range(k, 4, 2)) for k in range(2)]
    handle = groups[places.start].group.handle
    wrapped = DistributedDataParallel(net, process_group=handle)
    optimizer = torch.optim.Adam(wrapped.parameters())
    step(net, optimizer, 0)
    state = {"model": ModelState(wrapped), "optimizer": OptimizerState(wrapped, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    kept = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        for value in net.parameters():
            value.zero_()
    dcp.load(state, checkpoint_id=folder)
    same(dict(net.state_dict()), dict(kept))
    prefixed = {f"module.{name}": value for name, value in collect_state_dict(net).items()}
    same(dict(collect_state_dict(wrapped)), prefixed)


def test_replicas_write_one_copy(run: Run, tmp_path: Path) -> None:
    run(check_replicas, str(tmp_path), nprocs=4)
    assert len(writers(tmp_path, "model.up.weight")) == 2


def refused(state: dict[str, Any], folder: str) -> str:
    """What torch says when it cannot load."""
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException as error:
        return str(error)
    return ""


def load_wrong(folder: str) -> list[str]:
    net = Net(DIMS[0], (7, 5, 10), tessel.world())
    other = Net(DIMS[0], UNEVEN, tessel.world())
    state = {"model": ModelState(other), "more": torch.ones(2)}
    return [refused({"model": ModelState(net)}, folder), refused(state, folder)]


def test_checkpoints_that_do_not_fit_raise_on_all_workers(run: Run, tmp_path: Path) -> None:
    run(write, str(tmp_path), 4, DIMS[0], UNEVEN, "sgd", nprocs=4)
    for size, missing in run(load_wrong, str(tmp_path), nprocs=3):
        assert "torch.Size([9, 5])" in size and "torch.Size([10, 5])" in size, size
        assert "Missing key" in missing and "more" in missing, missing


def test_parts_do_not_compute() -> None:
    whole = Part(torch.ones(2, 3), (4, 3), (0, 0))
    assert whole.shape == (4, 3) and "of (4, 3)" in repr(whole)
    with pytest.raises(NotImplementedError, match="for checkpoints only"):
        whole + 1
