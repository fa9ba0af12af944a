"""What users do with a model before and after its conversion: the numbers of one process remain.

Compilers, graphs, parametrizations, layers that come later, averages of models, other containers
for inputs, and whole training loops. Output, all gradients and buffers are compared, in two calls:
gradients travel in buckets from the second on.

Tests `nn/convert.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tessel
from parity import close, values
from tessel import Layout, Partition

Run = Callable[..., list[Any]]
SHAPE = (2, 3, 9, 8)  # nine rows are uneven on two and four workers
TOLERANCE = 1e-12
GROWN = 1e-10  # after steps of training, of batch norms of few values


def place() -> Partition:
    return tessel.world().create_cartesian_topology_partition([1, 1, tessel.world().size, 1])


def own(x: Tensor) -> Tensor:
    """This worker's part of what has the dimensions of the input; else all of it."""
    return Layout.balanced(place(), x.shape).local_part(x) if x.dim() == 4 else x


def converted(model: nn.Module, fallback: str = "raise") -> nn.Module:
    return tessel.nn.distribute_module(model, place(), fallback)


@contextmanager
def own_seed() -> Iterator[None]:
    """Random numbers that are others on each worker."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(100 + tessel.world().rank)
        yield


class Net(nn.Module):
    """Layers and functions; a mean and a batch norm, which see the whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())
        self.head = nn.Linear(4, 5)
        self.double()

    def features(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.stem(x)))
        return y + self.block(y)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def first(result: Any) -> Tensor:
    if isinstance(result, dict):
        return first(next(iter(result.values())))
    return result if isinstance(result, Tensor) else first(result[0])


def same(alone: nn.Module, spread: nn.Module, calls: int = 2, tolerance: float = TOLERANCE) -> None:
    """Outputs, all gradients and the state afterwards are those of one process."""
    x = values(SHAPE, 1)
    for number in range(calls):
        whole, part = x.clone().requires_grad_(), own(x).clone().requires_grad_()
        alone.zero_grad(), spread.zero_grad()
        y, z = first(alone(whole)), first(spread(part))
        close(f"output {number}", z, own(y), tolerance)
        weights = values(y.shape, 7)
        (y * weights).sum().backward()
        (z * own(weights)).sum().backward()
        close(f"gradient of the input {number}", part.grad, own(whole.grad), tolerance)
        for (name, p), q in zip(alone.named_parameters(), spread.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                close(f"gradient {number} of {name}", q.grad, p.grad, tolerance)
    same_state(alone, spread)


def same_state(alone: nn.Module, spread: nn.Module) -> None:
    mine, theirs = spread.state_dict(), alone.state_dict()
    for (name, value), (_, expected) in zip(mine.items(), theirs.items(), strict=True):
        assert type(value) is torch.Tensor, (name, type(value))
        close(name, value.double(), expected.double(), GROWN)


# -- compilers ------------------------------------------------------------------------------------


def check_compiled() -> None:
    """Before conversion, behind it, and of a module inside: what is spread is not compiled."""
    same(Net(), converted(torch.compile(Net(), backend="eager")))
    same(Net(), torch.compile(converted(Net()), backend="eager"))
    for late in (False, True):
        model = converted(Net()) if late else Net()
        model.block = torch.compile(model.block, backend="eager")
        model.head.compile(backend="eager")  # in place
        same(Net(), model if late else converted(model))


@torch.compile(backend="eager")
def scaled(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x) + x.mean()


class Decorated(Net):
    """A function of the model, and one of its methods, that are compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(scaled(x))

    features = torch.compile(Net.features, backend="eager")


def check_compiled_inside() -> None:
    same(Decorated(), converted(Decorated()))


# -- graphs ---------------------------------------------------------------------------------------


def check_traced() -> None:
    same(Net(), converted(torch.fx.symbolic_trace(Net())))
    # torch makes copies of a graph anew, of its code: these are converted, too
    row = nn.Sequential(LeavesOnly().conv, nn.Softmax(2))  # torch cannot pickle annotated arguments
    again = copy.deepcopy(converted(torch.fx.symbolic_trace(copy.deepcopy(row))))
    for each in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        same(copy.deepcopy(row), each)


class LeavesOnly(nn.Module):
    """Of this torch.fx calls no layer while it traces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y - y.mean()


def check_traced_after_conversion() -> None:
    """A graph of a converted model is not converted: it raises, on all workers alike."""
    if tessel.world().size == 1:  # a part is the whole
        return
    part = own(values(SHAPE, 1))
    for make in (Net, LeavesOnly):
        with pytest.raises(NotImplementedError, match="Trace first"):
            torch.fx.symbolic_trace(converted(make()))(part)
    with pytest.raises(NotImplementedError, match="Trace first"):
        torch.jit.trace(converted(Net()), part, check_trace=False)
    with pytest.raises(AttributeError, match="before distribute_module"):
        torch.export.export(converted(Net()), (part,))


def check_features() -> None:
    """Torchvision's extractors, of a graph and of a row of layers."""
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    getter = pytest.importorskip("torchvision.models._utils").IntermediateLayerGetter
    wanted = {"block": "features", "head": "output"}
    models = [extraction.create_feature_extractor(Net(), wanted) for _ in range(2)]
    same(models[0], converted(models[1]))
    rows = [getter(nn.Sequential(OrderedDict(Net().named_children())), {"norm": "y"}) for _ in "ab"]
    same(rows[0], converted(rows[1]))


class Wide(nn.Module):
    """What graphs of `torch.export` call by other names than Python does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm, self.other = nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(8, 3, 3, padding="same")
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.down(x)))
        z = F.max_pool2d(y, 2, ceil_mode=True) + F.avg_pool2d(y, 2, ceil_mode=True)
        z = F.interpolate(z, scale_factor=2, mode="bilinear", align_corners=False)
        z = z + F.interpolate(z, scale_factor=1.0) + self.other(z)
        z = F.pad(z, (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 1:-1]
        z = torch.cat([z, y.mean((2, 3), keepdim=True).expand(z.shape)], 1)[:, 4:12].clone()
        z += 1
        z = self.up(z) * torch.softmax(self.up(z), 1)
        return self.out(F.interpolate(z, size=x.shape[2:], mode="bicubic"))


class Tokens(nn.Module):
    """Patches, positions from a table, an encoder, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.table = nn.Conv2d(3, 4, 2, 2), nn.Embedding(16, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.last = nn.LSTM(4, 3, batch_first=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = self.layer(y + self.table(torch.arange(y.shape[1])))
        return self.last(y)[0].mean(1)


def check_exported() -> None:
    """Graphs of `torch.export`, whose operators follow the rules of functions: none gathers."""
    x = values(SHAPE, 1)
    for make in (Net, Wide, Tokens):
        graph = torch.export.export(make().train(), (x,))
        same(make().train(), converted(graph.module()))
        graph = torch.export.export(make().eval(), (x,))
        same(make().eval(), converted(graph.module()))
        # in the operators that compilers get
        same(make().eval(), converted(graph.run_decompositions().module()))
    rows = torch.export.Dim("rows", min=4, max=100)
    graph = torch.export.export(Net(), (values((2, 3, 12, 8), 1),), dynamic_shapes=({2: rows},))
    same(Net(), converted(graph.module()))


def check_scripted() -> None:
    """Nobody can look into these: they gather, and are right."""
    for make in (torch.jit.script, lambda model: torch.jit.trace(model, values(SHAPE, 1))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(LeavesOnly(), converted(make(LeavesOnly()), "gather"), 1)


# -- parametrizations, and what is put in later ---------------------------------------------------

PARAMETRIZATIONS: tuple[Callable[[nn.Module], Any], ...] = (
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    nn.utils.weight_norm,  # as it was before
    nn.utils.spectral_norm,
)


def check_parametrized() -> None:
    """Before conversion and after it, where buffers are drawn anew: those of the first count."""
    for parametrize in PARAMETRIZATIONS:
        for late in (False, True):
            models = Net(), Net()
            if late:
                converted(models[1])
            for each, seed in zip(models, (100, 100 + tessel.world().rank), strict=True):
                with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
                    warnings.simplefilter("ignore")  # those of before are deprecated
                    torch.manual_seed(seed if late else 100)
                    parametrize(each.block[0])
                    parametrize(each.head)
            if not late:
                converted(models[1])
            same(*models)
            for each in models:
                each.eval()
            same(*models)
            if tessel.world().rank == 0:  # to read a weight is no call of the model
                close("weight", *(each.block[0].weight for each in reversed(models)))


def check_put_in_later() -> None:
    """Layers that come after conversion, drawn by each worker for itself: those of the first."""
    for is_spread in (False, True):
        alone, model = Net(), converted(Net())
        same(alone, model)
        with own_seed():
            new = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.SyncBatchNorm(4)).double()
            model.stem, model.head = new, nn.Linear(4, 7).double()
        part = own(values(SHAPE, 1))
        model(tessel.spread(values(SHAPE, 1), place()) if is_spread else part)
        assert model.head.weight is list(model.parameters())[-2]
        alone.stem = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4)).double()
        alone.head = nn.Linear(4, 7).double()
        alone.load_state_dict(model.state_dict())
        same(alone, model)
        everyone = place().prepare().share_objects(model.head.weight.detach())
        assert all(torch.equal(each, everyone[0]) for each in everyone)
        # a layer that was there before, in another module, and one that has no parameters
        for each in (alone, model):
            each.block = nn.Sequential(each.block[0], nn.ReLU(), each.block[0])
        same(alone, model)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(converted(Net()))
    same(Net(), model)


class Doubling(nn.SyncBatchNorm):
    """The code of a user around torch's, which exchanges statistics itself."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Squashing(nn.SyncBatchNorm):
    def squash(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Squashed(Net):
    def features(self, x: Tensor) -> Tensor:
        y = self.norm(self.stem(x))
        return self.norm.squash(y) if isinstance(self.norm, Squashing) else torch.tanh(y)


def check_subclasses_of_synchronized_norms() -> None:
    """Their own methods are called; without a `forward` of their own they see the whole."""
    model = Squashed()
    model.norm = Squashing(4).double()
    same(Squashed(), converted(model))
    model = Net()
    model.norm = Doubling(4).double()
    if place().size > 1:
        with pytest.raises(NotImplementedError, match="SyncBatchNorm"):
            converted(model)(own(values(SHAPE, 1)))


class Called(nn.Module):
    """A model in the way of other libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def __call__(self, x: Tensor) -> Tensor:
        return self.conv(x).mean()


def test_a_model_without_forward_raises() -> None:
    grid = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    with pytest.raises(NotImplementedError, match="Called defines __call__ in place of forward"):
        tessel.nn.distribute_module(nn.Sequential(Called()), grid)


def check_put_in_by_some() -> None:
    """What only one worker puts in raises on all of them, before anything is computed."""
    if tessel.world().size == 1:
        return
    model = converted(Net())
    part = own(values(SHAPE, 1))
    before = model.head
    if tessel.world().rank == 1:
        model.head = nn.Linear(4, 5).double()
    with pytest.raises(
        ValueError, match=r"put in since the last call: \(\('head.weight', \(5, 4\)"
    ):
        model(part)
    model.head = before
    same(Net(), model)


def check_lazy() -> None:
    """Layers that learn their sizes in the first call draw alike on all workers."""
    with own_seed():
        model = nn.Sequential(nn.LazyConv2d(4, 3, padding=1), nn.LazyBatchNorm2d()).double()
        model = converted(model)
        model(own(values(SHAPE, 1)))
    alone = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).double()
    alone.load_state_dict(model.state_dict())
    same(alone, model)


# -- what models read, and what they keep ---------------------------------------------------------


class Reads(Net):
    """Numbers of the whole inside of a model, and branches by them."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        largest, mean = y.abs().max().item(), float(y.mean())
        if y.sum().item() > 1e9 or bool((y > 1e3).any()):
            y = y * 2
        count = int((y > 0).sum())
        channels = y.mean((0, 2, 3)).tolist()
        return self.norm(y) / largest + mean + count * 1e-3 + channels[1]


def check_items() -> None:
    same(Reads(), converted(Reads()))


class Codebook(nn.Module):
    """Vectors from a table that averages learn, which is put into buffers and parameters anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 3)
        self.weight = nn.Parameter(torch.randn(7, 3))
        self.register_buffer("counts", torch.zeros(7))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = x.permute(0, 2, 3, 1).contiguous()
        rows, table = y.view(-1, 3), self.table.weight
        distances = (rows**2).sum(1, keepdim=True) + (table**2).sum(1) - 2 * rows @ table.t()
        nearest = distances.argmin(1).unsqueeze(1)
        chosen = torch.zeros(len(nearest), 7, dtype=x.dtype).scatter_(1, nearest, 1)
        found = (chosen @ table).view(y.shape)
        if self.training:
            counts = self.counts * 0.9 + 0.1 * chosen.sum(0)
            self.counts = (counts + 1e-5) / (counts.sum() + 7e-5) * counts.sum()
            self.weight = nn.Parameter(self.weight * 0.9 + 0.1 * chosen.t() @ rows)
            self.table.weight = nn.Parameter(self.weight / self.counts.unsqueeze(1))
        return (y + (found - y).detach()).permute(0, 3, 1, 2).contiguous()


def check_kept() -> None:
    """What a model puts into its parameters and buffers is plain again after the call."""
    alone, model = Codebook(), converted(Codebook())
    same(alone, model, 3)
    assert type(model.weight) is nn.Parameter and type(model.counts) is Tensor
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(copy.deepcopy(alone), each)
    alone.eval(), model.eval()
    same(alone, model)


@dataclass(frozen=True)
class Batch:
    images: Tensor
    scale: float
    more: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass
class Found:
    images: Tensor
    means: list[Tensor]


@dataclass
class Both(OrderedDict):  # type: ignore[type-arg]  # as outputs of diffusers
    sample: Tensor

    def __post_init__(self) -> None:
        self["sample"] = self.sample


Pair = namedtuple("Pair", "images others")


class Row(tuple):  # type: ignore[type-arg]
    """A tuple of somebody's own, made of anything."""

    def __new__(cls, *given: Any) -> Row:
        return super().__new__(cls, given)


class Options(dict):  # type: ignore[type-arg]
    """A dictionary of somebody's own."""


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1).double()

    def forward(self, given: Any) -> Any:
        if isinstance(given, Batch):
            y = self.conv(given.images) * given.scale + given.more["k"][0].mean()
            return Found(y, [y.mean((2, 3))])
        if isinstance(given, Row):
            return Row(self.conv(given[0]) + given[1].mean(), given[1].amax((2, 3)))
        if isinstance(given, Pair):
            return Pair(self.conv(given.images) + given.others.mean(), given.others.amax((2, 3)))
        found = self.conv(given["images"])
        return Both(found) if isinstance(given, UserDict) else Options(y=found - found.mean())


def check_containers() -> None:
    """Parts are found, and results are parts, in all that holds tensors."""
    alone, model = Takes(), converted(Takes())
    x = values(SHAPE, 1)
    for make in (
        lambda x: Batch(x, 2.0, {"k": [x + 1]}),
        lambda x: Pair(x, x * x),
        lambda x: Row(x, x * x),
        lambda x: UserDict(images=x),
        lambda x: Options(images=x),
        lambda x: {"images": x},
    ):
        whole, part = make(x), make(own(x))
        y, z = alone(whole), model(part)
        assert type(y) is type(z)
        tensors = [(y, z)]
        if isinstance(y, Found):
            tensors = [(y.images, z.images), (y.means[0], z.means[0])]
        elif isinstance(y, Pair | Row):
            tensors = list(zip(y, z, strict=True))
        elif isinstance(y, dict):
            tensors = [(y[key], z[key]) for key in y]
            assert not isinstance(y, Both) or z.sample is z["sample"]
        for expected, got in tensors:
            assert type(got) is Tensor
            close("output", got, own(expected), TOLERANCE)
        alone.zero_grad(), model.zero_grad()
        first(tensors[0][0].square().sum()).backward()
        tensors[0][1].square().sum().backward()
        close("gradient", model.conv.weight.grad, alone.conv.weight.grad, TOLERANCE)
        assert isinstance(whole, Batch) is isinstance(part, Batch)
        place = 0 if isinstance(part, Row) else "images"
        held = part.images if isinstance(part, Batch | Pair) else part[place]
        assert type(held) is Tensor  # what was given stays as it was


# -- training loops -------------------------------------------------------------------------------


def steps(model: nn.Module, x: Tensor) -> list[float]:
    """Accumulated gradients, clipped; a schedule, an average of the model; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    losses = []
    for step in range(4):
        for part in (x, 0.5 * x):
            loss = F.cross_entropy(model(part), torch.tensor([1, step % 5])) / 2
            loss.backward()
            losses.append(float(loss.detach()))
        losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        average.update_parameters(model)
        if step == 1:  # as after a break: all of it is read back
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
            file.seek(0)
            states = torch.load(file)
            for each, state in zip((model, optimizer, schedule), states, strict=True):
                each.load_state_dict(state)
    average.eval()
    losses.append(float(average(x).detach().square().sum()))
    losses += [float(value.double().sum()) for value in average.state_dict().values()]
    update_bn([x, 2 * x], average)
    losses.append(float(average(x).detach().square().sum()))
    return losses


def check_training() -> None:
    x = values(SHAPE, 1)
    expected, found = steps(Net(), x), steps(converted(Net()), own(x))
    close("losses", torch.tensor(found), torch.tensor(expected), 1e-8)
    # an average that is made first, and converted
    same(AveragedModel(Net()), converted(AveragedModel(Net())))


class Checkpointed(Net):
    """Lambdas, functions and rows of layers that are computed again."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda v: F.silu(self.norm(self.stem(v))), x, use_reentrant=False)
        y = y + checkpoint_sequential(self.block, 2, y, use_reentrant=False)
        return checkpoint(lambda v, dims: self.head(v.mean(dims)), y, (2, 3), use_reentrant=False)


def check_autocast() -> None:
    """Batch norms of what autocast leaves in float32, and workers with nothing to convolve."""
    torch.manual_seed(0)
    layers = [nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()]
    layers += [nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(4, 4, 3, 4, 1), nn.BatchNorm2d(4)]
    one = nn.Sequential(*layers)
    model = converted(copy.deepcopy(one))
    x = values((2, 3, 4, 8), 1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = one(x), model(tessel.spread(x, place()))
    assert found.dtype == found.local.dtype == expected.dtype
    close("output", found.full().float(), expected.float(), 0.1)  # of bfloat16, after norms
    for name, buffer in model.named_buffers():
        close(name, buffer.double(), one.get_buffer(name).double(), 1e-2)


def check_checkpoints() -> None:
    alone = Net()
    alone.norm.momentum = 1 - (1 - 0.1) ** 2  # a batch norm that runs twice counts twice
    model = converted(Checkpointed())
    x = values(SHAPE, 1)
    for _ in range(2):
        part = own(x).clone().requires_grad_()
        whole = x.clone().requires_grad_()
        alone.zero_grad(), model.zero_grad()
        alone(whole).square().sum().backward()
        model(part).square().sum().backward()
        close("gradient of the input", part.grad, own(whole.grad), TOLERANCE)
        for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
            close(name, q.grad, p.grad, TOLERANCE)


def check_functional() -> None:
    """Other parameters for one call, and a model as a function of them."""
    alone, model = Net(), converted(Net())
    x, others = values(SHAPE, 1), {name: 2 * p for name, p in Net().named_parameters()}
    calls = (alone, x), (model, own(x))
    y, z = (torch.func.functional_call(each, others, part) for each, part in calls)
    close("output", z, y, TOLERANCE)
    same(alone, model)  # its own parameters are in their places


CHECKS = (
    *(check_compiled, check_compiled_inside, check_traced, check_traced_after_conversion),
    *(check_features, check_exported, check_scripted, check_parametrized, check_put_in_later),
    *(check_put_in_by_some, check_lazy, check_items, check_kept, check_containers),
    *(check_training, check_autocast, check_checkpoints, check_functional),
    check_subclasses_of_synchronized_norms,
)


@pytest.mark.parametrize(
    ("check", "nprocs"),
    [
        pytest.param(
            *(each, nprocs),
            id=f"{each.__name__[6:]}-{nprocs}",
            marks=[pytest.mark.slow] * (each is check_exported),
        )
        for each in CHECKS
        for nprocs in ((2,) if each is check_exported else (1, 4))  # each worker exports all
    ],
)
def test_uses(run: Run, check: Callable[[], None], nprocs: int) -> None:
    run(check, nprocs=nprocs, timeout=60)


def train_with_lightning() -> list[float]:
    """A Trainer of each worker for itself: what it calls sends, and it knows of no others."""
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    x, labels = values(SHAPE, 1), torch.tensor([1, 2])
    results = []
    for net, part in ((Net(), x), (converted(Net()), own(x))):
        trainer = lightning.Trainer(
            max_steps=3,
            accelerator="cpu",
            devices=1,
            plugins=[LightningEnvironment()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
        )
        data = torch.utils.data.DataLoader([(part, labels)] * 6, batch_size=None)
        trainer.fit(Module(net), data)
        results.append(net.state_dict())
    alone, spread = results
    return [float((alone[name] - spread[name]).abs().max()) for name in alone]


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [2])
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_trainer(run: Run, nprocs: int) -> None:
    pytest.importorskip("lightning")
    found = run(train_with_lightning, nprocs=nprocs, timeout=100)
    assert max(map(max, found)) < 1e-9


class Doubled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Borrower(nn.Module):
    """Calls a method of a module that it may not contain."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.forward = module.forward


def copy_attributes(model: Any) -> Any:
    """A copy without `__deepcopy__`, with a first weight of its own, as replicas have."""
    other = model._replicate_for_data_parallel()
    other._parameters = dict(model._parameters)
    other._modules = {name: copy_attributes(each) for name, each in model._modules.items()}
    return other


def use_copies() -> list[float]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1)
    alone = nn.Sequential(*layers).double()
    spread = converted(copy.deepcopy(alone))
    assert isinstance(alone, nn.Sequential) and isinstance(spread, nn.Sequential)
    x, results = values(SHAPE, 1), []
    for model, part in ((alone, x), (spread, own(x))):
        y: list[Tensor] = []
        shallow = copy.copy(model[0])
        shallow._parameters = {
            n: nn.Parameter(2 * p.detach()) for n, p in shallow._parameters.items()
        }
        whole = copy_attributes(model)
        whole[0]._parameters["weight"] = nn.Parameter(3 * model[0].weight.detach())
        inner = copy.copy(model[2])
        inner.bias = inner.bias
        hooked = copy.copy(shallow)
        hooked._forward_hooks = OrderedDict()
        hooked.register_forward_hook(lambda module, args, result: 5 * result)
        for called in (shallow, whole, hooked, Borrower(model), nn.Sequential(model[0], inner)):
            for _ in range(2):
                y.append(called(part))
                (y[-1] ** 2).sum().backward()
        held = [*model.parameters(), *shallow.parameters(), whole[0].weight]
        results.append((y, [p.grad for p in held]))
    (expected, grads), (found, others) = results
    differing = Doubled(3, 4, 3, padding=1)
    differing.__dict__.update(spread[0].__dict__)
    with pytest.raises(
        NotImplementedError, match="Doubled has all attributes of a converted Conv2d"
    ):
        differing(own(x))
    errors = [
        float((own(a) - b).abs().max()) if b.numel() else 0.0
        for a, b in zip(expected, found, strict=True)
    ]
    return errors + [float((a - b).abs().max()) for a, b in zip(grads, others, strict=True)]


@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_copy_of_all_attributes_computes_with_its_own_parameters(run: Run, nprocs: int) -> None:
    assert max(map(max, run(use_copies, nprocs=nprocs))) < GROWN  # of gradients of hundreds
