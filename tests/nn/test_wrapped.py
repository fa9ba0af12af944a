"""Converted models in torch's wrappers: the gradients and steps of one process, or an error.

Tests `nn/wrapped.py`, `nn/parallel/replicas.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tessel
from garbage import collected_as_usual
from tessel import Layout, Partition
from tessel.nn import distribute_module

Run = Callable[..., list[Any]]

TOLERANCE = 1e-12
NUM_STEPS = 3  # the first learns how gradients are sent together


class Net(nn.Module):
    """Convolutions of split images, a head of whole features, and what is not always used."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda n: nn.GroupNorm(2, n)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        layers = nn.Conv2d(4, 8, 3, padding=1), norm(8), nn.ReLU(inplace=True)
        self.block = nn.Sequential(*layers, nn.Conv2d(8, 4, 3, padding=1))
        self.head = nn.Linear(4, 5)
        self.extra = nn.Linear(5, 5)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        y = self.head((x + self.block(x)).mean((2, 3)))
        return self.extra(y) if extra else y


def made(**kwargs: Any) -> Net:
    torch.manual_seed(0)
    return Net(**kwargs).double()


def batch(samples: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, 12, 10, generator=draw, dtype=torch.float64)
    return x, torch.randint(5, (samples,), generator=draw)


class Grid:
    """Four workers: two replicas of a model, whose images are split in two."""

    def __init__(self) -> None:
        world = tessel.world()
        self.whole = world.create_cartesian_topology_partition([2, 2])
        self.mesh = self.whole.to_mesh(names=("data", "space"))
        self.replica = world.rank // 2
        rows = [Partition(ranks, (1, 1, 2, 1)) for ranks in ((0, 1), (2, 3))]
        self.P_x = rows[self.replica]

    def part(self, x: Tensor) -> Tensor:
        """Of the images of this replica."""
        own = x.chunk(2)[self.replica]
        return Layout.balanced(self.P_x, own.shape).local_part(own)

    def spread(self, x: Tensor) -> tessel.Tensor:
        """The same as a spread tensor."""
        shape = x.chunk(2)[self.replica].shape
        # not by `from_local`, in which all workers of the job agree on one tensor
        return tessel.Tensor(self.part(x), Layout.balanced(self.P_x, shape))

    def labels(self, labels: Tensor) -> Tensor:
        return labels.chunk(2)[self.replica]

    def group(self, name: str) -> Any:
        return None if name == "all" else self.mesh.get_group(name)


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_gradients(model: nn.Module, one: nn.Module) -> None:
    expected = dict(one.named_parameters())
    for name, value in model.named_parameters():
        name = name.removeprefix("module.").removeprefix("_orig_mod.").removeprefix("module.")
        theirs = expected.pop(name)
        assert (value.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            difference = (whole(value.grad) - theirs.grad).abs().max()
            assert difference < TOLERANCE * theirs.grad.abs().max().clamp(min=1), (name, difference)
    assert not expected


def in_ddp(grid: Grid, model: nn.Module, order: str, **settings: Any) -> nn.Module:
    """A model that is converted before it is wrapped, or after it, from outside or inside."""
    if order == "before":
        return DistributedDataParallel(distribute_module(model, grid.P_x), **settings)
    wrapped = DistributedDataParallel(model, **settings)
    if order == "after":
        return distribute_module(wrapped, grid.P_x)
    distribute_module(wrapped.module, grid.P_x)
    return wrapped


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}


def check_ddp(order: str, group: str) -> None:
    """Steps of DDP, with plain parts and with spread tensors, with each of its settings."""
    grid, (x, labels) = Grid(), batch()
    one = made()
    F.cross_entropy(one(x), labels).backward()
    for name, settings in SETTINGS.items():
        model = in_ddp(grid, made(), order, process_group=grid.group(group), **settings)
        for step in range(NUM_STEPS):
            model.zero_grad()
            given: Any = grid.part(x)
            if step == NUM_STEPS - 1 and name != "unused" and name != "static":
                given = grid.spread(x)
            F.cross_entropy(model(given), grid.labels(labels)).backward()
            assert_gradients(model, one)


@pytest.mark.parametrize("group", ["data", "all"])
@pytest.mark.parametrize("order", ["before", "after", "inside"])
def test_ddp_takes_the_mean_over_replicas(run: Run, order: str, group: str) -> None:
    run(check_ddp, order, group, nprocs=4)


def check_data_parallel() -> None:
    """Which chooses the group itself."""
    grid, (x, labels) = Grid(), batch()
    one = made()
    F.cross_entropy(one(x), labels).backward()
    model = tessel.nn.data_parallel(distribute_module(made(), grid.P_x))
    assert model.process_group.size() == 2
    for _ in range(NUM_STEPS):
        model.zero_grad()
        F.cross_entropy(model(grid.part(x)), grid.labels(labels)).backward()
        assert_gradients(model, one)
    alone = distribute_module(
        made(), tessel.world().create_cartesian_topology_partition([1] * 3 + [4])
    )
    assert tessel.nn.data_parallel(alone) is alone  # one replica
    rows = Partition((0, 1, 2), (1, 1, 3, 1)), Partition((3,), (1, 1, 1, 1))
    with pytest.raises(ValueError, match="partitions must have the same size"):
        tessel.nn.data_parallel(distribute_module(made(), rows[tessel.world().rank == 3]))


def test_data_parallel(run: Run) -> None:
    run(check_data_parallel, nprocs=4)


def check_spread_searched() -> None:
    """With these DDP looks at the graph of its output, of which a spread tensor has none."""
    grid, (x, _) = Grid(), batch()
    for name in ("unused", "static"):
        group = grid.group("data")
        model = in_ddp(grid, made(), "before", process_group=group, **SETTINGS[name])
        with pytest.raises(NotImplementedError, match="searches the graph of its output"):
            model(grid.spread(x))


def test_spread_tensors_and_a_search_for_unused_parameters(run: Run) -> None:
    run(check_spread_searched, nprocs=4)


def check_unused() -> None:
    """A branch that is taken in some steps: parameters without gradients have none."""
    grid, (x, labels) = Grid(), batch()
    model = in_ddp(
        grid, made(), "before", process_group=grid.group("data"), find_unused_parameters=True
    )
    for extra in (True, True, False, False, True):
        one = made()
        F.cross_entropy(one(x, extra=extra), labels).backward()
        model.zero_grad()
        F.cross_entropy(model(grid.part(x), extra=extra), grid.labels(labels)).backward()
        assert_gradients(model, one)


def test_unused_parameters_have_no_gradients(run: Run) -> None:
    run(check_unused, nprocs=4)


def check_accumulated() -> None:
    """`no_sync`, clipping, and steps of Adam."""
    grid, (x, labels) = Grid(), batch()
    one, model = made(), in_ddp(grid, made(), "before", process_group=grid.group("data"))
    optimizers = [torch.optim.Adam(each.parameters(), 0.05) for each in (one, model)]
    halves = x.chunk(2)[grid.replica].chunk(2), grid.labels(labels).chunk(2)
    for _ in range(NUM_STEPS):
        F.cross_entropy(one(x), labels).backward()
        for number, (images, own) in enumerate(zip(*halves, strict=True)):
            part = Layout.balanced(grid.P_x, images.shape).local_part(images)
            with model.no_sync() if number == 0 else nullcontext():
                (F.cross_entropy(model(part), own) / 2).backward()
        assert_gradients(model, one)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (one, model)]
        assert abs(norms[0] - norms[1]) < TOLERANCE
        for each in optimizers:
            each.step()
            each.zero_grad()
    for (name, ours), theirs in zip(model.module.named_parameters(), one.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-9, name  # Adam divides by small numbers
    assert [*model.module.state_dict()] == [*one.state_dict()]


def test_accumulation_clipping_and_steps(run: Run) -> None:
    run(check_accumulated, nprocs=4)


def check_statistics() -> None:
    """Batch norm has the statistics of the replica's own batch, as under DDP in torch."""
    grid, (x, labels) = Grid(), batch()
    model = in_ddp(grid, made(norm=nn.BatchNorm2d), "before", process_group=grid.group("data"))
    ones = [made(norm=nn.BatchNorm2d) for _ in range(2)]
    for _ in range(NUM_STEPS):
        ones[1].load_state_dict(ones[0].state_dict())  # DDP sends buffers of the first
        for one, images, own in zip(ones, x.chunk(2), labels.chunk(2), strict=True):
            one.zero_grad()
            F.cross_entropy(one(images), own).backward()
        mean = copy.deepcopy(ones[0])
        for each, *terms in zip(mean.parameters(), *(m.parameters() for m in ones), strict=True):
            each.grad = (terms[0].grad + terms[1].grad) / 2
        model.zero_grad()
        F.cross_entropy(model(grid.part(x)), grid.labels(labels)).backward()
        assert_gradients(model, mean)
        pairs = zip(model.module.named_buffers(), ones[grid.replica].buffers(), strict=True)
        for (name, ours), theirs in pairs:
            assert (ours - theirs).abs().max() < TOLERANCE, name


def test_batch_norm_has_the_statistics_of_the_replica(run: Run) -> None:
    run(check_statistics, nprocs=4)


def check_sixteen_bits() -> None:
    """Autocast and a GradScaler that meets an infinite gradient in one replica."""
    grid, (x, labels) = Grid(), batch()
    model = in_ddp(grid, made().float(), "before", process_group=grid.group("data"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(NUM_STEPS):
        images = x.float()
        if step == 1:
            images[0, 0, 0, 0] = torch.inf
        before = [each.detach().clone() for each in model.parameters()]
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(grid.part(images)), grid.labels(labels))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any((a != b).any() for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (step != 1)
        assert scaler.get_scale() == (4.0 if step == 0 else 2.0)
        numbers = [float(each.detach().sum()) for each in model.parameters()]
        assert all(each == numbers for each in tessel.world().group.share_objects(numbers))


def test_autocast_and_a_scaler(run: Run) -> None:
    run(check_sixteen_bits, nprocs=4)


def check_join() -> None:
    """A replica that has fewer batches than the other joins in with nothing."""
    grid, (x, labels) = Grid(), batch()
    model = in_ddp(grid, made(), "before", process_group=grid.group("data"))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 - grid.replica):
            model.zero_grad()
            F.cross_entropy(model(grid.part(x)), grid.labels(labels)).backward()
    one = made()
    F.cross_entropy(one(x.chunk(2)[0]), labels.chunk(2)[0]).backward()
    if grid.replica == 0:
        assert_gradients(model, one)


def test_join(run: Run) -> None:
    run(check_join, nprocs=4)


def check_compiled() -> None:
    """Compiled around the wrapper, and inside of it."""
    grid, (x, labels) = Grid(), batch()
    one = made()
    F.cross_entropy(one(x), labels).backward()
    for outside in (True, False):
        model: Any = distribute_module(made(), grid.P_x)
        if not outside:
            model = torch.compile(model, backend="eager")
        model = DistributedDataParallel(model, process_group=grid.group("data"))
        if outside:
            model = torch.compile(model, backend="eager")
        for _ in range(2):
            model.zero_grad()
            F.cross_entropy(model(grid.part(x)), grid.labels(labels)).backward()
            assert_gradients(model, one)


@pytest.mark.slow
def test_compiled(run: Run) -> None:
    run(check_compiled, nprocs=4)


def check_grid_of_all() -> None:
    """A grid that splits the batch has averaged already: a mean of equal values is one of them."""
    x, labels = batch()
    grid = tessel.world().create_cartesian_topology_partition([2, 1, 2, 1])
    layout = Layout.balanced(grid, x.shape)
    one = made()
    F.cross_entropy(one(x), labels).backward()
    model = DistributedDataParallel(distribute_module(made(), grid))
    own = labels[slice(*layout.box()[0])]
    for _ in range(NUM_STEPS):
        model.zero_grad()
        y = model(layout.local_part(x))
        (F.cross_entropy(y, own, reduction="sum") / len(x)).backward()
        assert_gradients(model, one)


def test_a_grid_of_all_workers(run: Run) -> None:
    run(check_grid_of_all, nprocs=4)


def refused(kind: str) -> str:
    """What all workers say of a wrapper that cannot be right."""
    grid, (x, _) = Grid(), batch()
    rank = tessel.world().rank
    three, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 2])
    model: Any = distribute_module(made(), grid.P_x)
    if kind == "more of one replica" and rank < 3:
        model = DistributedDataParallel(model, process_group=three)
    elif kind == "some are not wrapped" and rank in (0, 2):
        model = DistributedDataParallel(model, process_group=pair)
    elif kind == "some do not synchronize":
        model = DistributedDataParallel(model, process_group=grid.group("data"))
        model.require_backward_grad_sync = rank in (0, 2)
    elif kind == "not in the partition":
        model = DistributedDataParallel(distribute_module(made(), Partition((0, 1), (1, 1, 2, 1))))
    try:
        model(grid.part(x))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("more of one replica", "it has 2 workers of the replica on workers [0, 1] and 1 of that"),
        ("some are not wrapped", "DistributedDataParallel around the converted Net"),
        ("some do not synchronize", "no_sync()"),
        ("not in the partition", "not in the partition of the model"),
    ],
)
def test_what_cannot_be_right_raises_everywhere(run: Run, kind: str, text: str) -> None:
    found = run(refused, kind, nprocs=4)
    assert all(text in each for each in found), found


# --- fully_shard


def meshes(grid: Grid) -> Iterator[tuple[str, Any]]:
    yield "data", grid.mesh["data"]
    yield "data x space", grid.mesh  # replicated along the first, split along the second
    yield "all", tessel.world().to_mesh(names=("all",))


def fully_sharded(model: nn.Module, mesh: Any, nested: bool, **settings: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    if nested:
        for each in (model.stem, *model.block, model.head):
            if any(True for _ in each.parameters()):
                fully_shard(each, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def check_fully_sharded(nested: bool, first: bool) -> None:
    """Steps of Adam, clipping, and two batches before a step."""
    grid, (x, labels) = Grid(), batch()
    for name, mesh in meshes(grid):
        for settings in ({}, {"reshard_after_forward": False})[: 1 + (first != nested)]:
            one, model = made(), made()
            if first:
                model = distribute_module(model, grid.P_x)
            model = fully_sharded(model, mesh, nested, **settings)
            if not first:
                model = distribute_module(model, grid.P_x)
            optimizers = [torch.optim.Adam(each.parameters(), 0.05) for each in (one, model)]
            for step in range(NUM_STEPS):
                F.cross_entropy(one(x), labels).backward()
                given: Any = grid.part(x)
                if step == 1:
                    given = grid.spread(x)
                if step == 2:  # twice: kept on each worker, and then averaged
                    F.cross_entropy(one(x), labels).backward()
                    model.set_requires_gradient_sync(False)
                    F.cross_entropy(model(given), grid.labels(labels)).backward()
                    model.set_requires_gradient_sync(True)
                F.cross_entropy(model(given), grid.labels(labels)).backward()
                assert_gradients(model, one)
                norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (one, model)]
                assert abs(whole(norms[0]) - whole(norms[1])) < TOLERANCE
                for each in optimizers:
                    each.step()
                    each.zero_grad()
            for (key, ours), theirs in zip(model.named_parameters(), one.parameters(), strict=True):
                assert (whole(ours) - theirs).abs().max() < 1e-9, (name, key)
                assert ours.to_local().numel() < theirs.numel() or theirs.numel() < 8


@pytest.mark.parametrize("first", [True, False], ids=["converted first", "converted then"])
@pytest.mark.parametrize("nested", [False, True], ids=["whole", "by layers"])
@pytest.mark.filterwarnings("ignore")
def test_fully_shard_takes_the_mean_over_replicas(run: Run, nested: bool, first: bool) -> None:
    run(check_fully_sharded, nested, first, nprocs=4)


def unlike() -> str:
    """Workers of one replica that have split other values."""
    grid = Grid()
    torch.manual_seed(tessel.world().rank)
    model = fully_sharded(Net().double(), grid.mesh["data"], True)
    try:
        distribute_module(model, grid.P_x)
    except ValueError as error:
        return str(error)
    return ""


def unlike_later() -> str:
    """The same, if they get these after the conversion."""
    grid, (x, _) = Grid(), batch()
    model = fully_sharded(distribute_module(made(), grid.P_x), grid.mesh["data"], False)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(tessel.world().rank)
    try:
        model(grid.part(x))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("function", [unlike, unlike_later])
def test_values_that_are_split_must_be_alike(run: Run, function: Callable[[], str]) -> None:
    found = run(function, nprocs=4)
    assert all("under fully_shard has different values on workers" in each for each in found), found


def unfit_mesh() -> str:
    """Of three workers two hold one replica."""
    from torch.distributed.device_mesh import DeviceMesh

    grid, (x, _) = Grid(), batch()
    model = distribute_module(made(), grid.P_x)
    mesh = DeviceMesh("cpu", [0, 1, 2])
    if tessel.world().rank < 3:
        fully_sharded(model, mesh, False)
    try:
        model(grid.part(x))
    except ValueError as error:
        return str(error)
    return ""


def test_fully_shard_over_more_workers_of_one_replica_raises(run: Run) -> None:
    found = run(unfit_mesh, nprocs=4)
    assert all("it has 2 workers of the replica" in each for each in found), found


def flattened(first: bool) -> str:
    """The FSDP before `fully_shard`."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    grid, (x, _) = Grid(), batch()
    model: nn.Module = made()
    try:
        if first:
            model = distribute_module(model, grid.P_x)
        model = FullyShardedDataParallel(
            model, process_group=grid.group("data"), device_id=torch.device("cpu")
        )
        if not first:
            distribute_module(model, grid.P_x)
        model(grid.part(x))
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_the_older_fsdp_raises(run: Run, first: bool) -> None:
    found = run(flattened, first, nprocs=4)
    assert all("use torch.distributed.fsdp.fully_shard" in each for each in found), found


def branches() -> str:
    """Workers that use other parameters, which `fully_shard` has put into their places."""
    grid, (x, _) = Grid(), batch()

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv2d(3, 3, 1).double() for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[tessel.world().rank % 2](x)

    from torch.distributed.fsdp import fully_shard

    model = distribute_module(Either(), grid.P_x)
    for layer in model.layers:
        fully_shard(layer, mesh=grid.mesh["data"])
    fully_shard(model, mesh=grid.mesh["data"])
    try:
        model(grid.part(x))
    except ValueError as error:
        return str(error)
    return ""


def test_other_branches_raise_under_fully_shard(run: Run) -> None:
    found = run(branches, nprocs=4)
    assert all("workers take different branches" in each for each in found), found


def check_checkpointed() -> None:
    """Blocks that are computed again, from parameters that are gathered again."""
    from torch.utils.checkpoint import checkpoint as again

    grid, (x, labels) = Grid(), batch()
    one = made()
    F.cross_entropy(one(x), labels).backward()
    model = distribute_module(made(), grid.P_x)
    inner = model.block.forward
    model.block.forward = lambda y: again(inner, y, use_reentrant=False)
    model = fully_sharded(model, grid.mesh["data"], True)
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(grid.part(x)), grid.labels(labels)).backward()
        assert_gradients(model, one)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_under_fully_shard(run: Run) -> None:
    run(check_checkpointed, nprocs=4)


# --- optimizers whose state is split


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
}


def split_optimizer(model: nn.Module, name: str, **settings: Any) -> Any:
    """One whose state is split, with two groups of parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind, options = OPTIMIZERS[name]
    zero = ZeroRedundancyOptimizer(
        list(model.stem.parameters()), optimizer_class=kind, **options, **settings
    )
    rest = [each for part in (model.block, model.head, model.extra) for each in part.parameters()]
    zero.add_param_group({"params": rest, "lr": 0.02})
    return zero


def whole_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    rest = [each for part in (model.block, model.head, model.extra) for each in part.parameters()]
    groups = [{"params": list(model.stem.parameters())}, {"params": rest, "lr": 0.02}]
    return kind(groups, **options)


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        each
        for values in optimizer.state.values()
        for each in values.values()
        if isinstance(each, Tensor) and each.dim()
    ]


def steps(model: nn.Module, optimizer: Any, x: Tensor, labels: Tensor, num: int) -> None:
    for _ in range(num):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()


def assert_same(model: nn.Module, one: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), one.parameters(), strict=True):
        assert (whole(ours) - theirs).abs().max() < 1e-9, name  # Adam divides by small numbers


def check_split_state(name: str) -> list[int]:
    """Steps are those of the whole optimizer, and each worker keeps some of its state."""
    world, (x, labels) = tessel.world(), batch()
    P_x = world.create_cartesian_topology_partition([1, 1, world.size, 1])
    part = Layout.balanced(P_x, x.shape).local_part(x)
    one, model = made(), distribute_module(made(), P_x)
    plain, zero = whole_optimizer(one, name), split_optimizer(model, name)
    steps(one, plain, x, labels, 3)
    steps(model, zero, part, labels, 3)
    assert_same(model, one)
    kept = [sum(each.numel() for each in states(o)) for o in (zero.optim, plain)]
    zero.consolidate_state_dict(to=0)
    if world.rank == 0:  # the whole state, which plain torch goes on with
        plain.load_state_dict(zero.state_dict())
    world.group.share_objects(None)
    return kept


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_a_split_state(run: Run, name: str, nprocs: int) -> None:
    found = run(check_split_state, name, nprocs=nprocs)
    assert sum(own for own, _ in found) == found[0][1]
    assert max(own for own, _ in found) < found[0][1]


# --- checkpoints that other grids read


def checkpointed(name: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """A model, its optimizer, and the batch of this worker."""
    world, (x, labels) = tessel.world(), batch()
    if world.size == 4 and name != "zero":
        grid = Grid()
        model = distribute_module(made(), grid.P_x)
        mesh = dict(meshes(grid))["all" if name == "all" else "data"]
        model = fully_sharded(model, mesh, True)
        return model, whole_optimizer(model, "Adam"), grid.part(x), grid.labels(labels)
    P_x = world.create_cartesian_topology_partition([1, 1, world.size, 1])
    model = distribute_module(made(), P_x)
    part = Layout.balanced(P_x, x.shape).local_part(x)
    if name == "plain":
        return model, whole_optimizer(model, "Adam"), part, labels
    if name == "zero":
        return model, split_optimizer(model, "Adam"), part, labels
    model = fully_sharded(model, world.to_mesh(names=("all",)), True)
    return model, whole_optimizer(model, "Adam"), part, labels


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    interop = tessel.interop
    return {
        "model": interop.ModelState(model),
        "optimizer": interop.OptimizerState(model, optimizer),
    }


def save(name: str, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer, x, labels = checkpointed(name)
    steps(model, optimizer, x, labels, 2)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)


def load(name: str, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer, x, labels = checkpointed(name)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(7.0)
    reader = tessel.interop.checkpoint_reader(folder)
    dcp.load(state_of(model, optimizer), storage_reader=reader)
    steps(model, optimizer, x, labels, 2)
    one = made()
    steps(one, whole_optimizer(one, "Adam"), *batch(), 4)
    assert_same(model, one)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("all", "zero"), ("data", "plain"), ("zero", "data"), ("zero", "zero"), ("plain", "all")],
)
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_load_on_other_grids(run: Run, saved: str, loaded: str, tmp_path: Any) -> None:
    run(save, saved, str(tmp_path), nprocs=4 if saved != "plain" else 2)
    run(load, loaded, str(tmp_path), nprocs=2 if loaded != "all" else 4)


# --- memory


def peak(how: str) -> int:
    """The largest memory of tensors in two steps of Adam, with the model."""
    from tessel.testing import count_memory

    world = tessel.world()
    P_x = world.create_cartesian_topology_partition([1, 1, world.size, 1])
    x = torch.ones(1, 3, 4 * world.size, 4)
    with collected_as_usual(), count_memory() as memory:
        layers = [nn.Conv2d(3, 64, 3, padding=1)]
        layers += [nn.Conv2d(64, 64, 3, padding=1) for _ in range(8)]
        model = distribute_module(nn.Sequential(*layers), P_x)
        if how == "split parameters":
            from torch.distributed.fsdp import fully_shard

            mesh = world.to_mesh(names=("all",))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if how == "split state":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer: Any = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3
            )
        else:
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(2):
            model(Layout.balanced(P_x, x.shape).local_part(x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak


@pytest.mark.filterwarnings("ignore")
def test_split_parameters_take_less_memory(run: Run) -> None:
    """In units of the parameters: their gradients, two averages, and what a step needs."""
    unit = sum(each.numel() for each in nn.Conv2d(64, 64, 3).parameters()) * 4 * 8
    plain, state, split = (
        max(run(peak, how, nprocs=4)) / unit for how in ("plain", "split state", "split parameters")
    )
    assert 4 < plain < 7, (plain, state, split)
    assert state < plain - 1, (plain, state, split)
    assert split < 2, (plain, state, split)
