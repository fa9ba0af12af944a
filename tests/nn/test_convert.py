"""Whole torch models over a partition: the same numbers as in one process, and nothing lost.

Tests `nn/convert.py`, `core/context.py`.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import models
import tessel
from parity import close, values
from tessel import Layout, Partition
from tessel.core import boxes
from tessel.nn import convert
from tessel.testing import count_traffic

Shape = tuple[int, ...]
Run = Callable[..., list[Any]]

TOLERANCE = 1e-12
# After steps of training: batch norms divide by standard deviations of few values again and again,
# which makes the rounding of float64 grow, in torch's own as well.
GROWN = 1e-9  # one unit in the last place of the input grows to 1e-10 in torch itself


def place(grid: Shape) -> Partition:
    row = tessel.world().create_partition_inclusive(range(prod(grid)))
    return row.create_cartesian_topology_partition(grid)


def mine(y: Tensor, layout: Layout) -> Tensor:
    """This worker's part of an output: spread as the input is, or shared but for the batch."""
    if not layout.partition.active:
        return y[:0]
    if y.dim() == len(layout.shape):
        return layout.resized(y.shape).local_part(y)
    rows = boxes.balanced(y.shape[0], layout.partition.shape[0])[layout.partition.index[0]]
    return y[slice(*rows)]


def pair(make: Callable[[], nn.Module], grid: Shape) -> tuple[nn.Module, nn.Module]:
    """A model as it is and converted, in float64; other workers have other random numbers."""
    torch.manual_seed(0)
    alone = make().double()
    torch.manual_seed(tessel.world().rank)
    spread = copy.deepcopy(alone)
    if tessel.world().rank:
        with torch.no_grad():
            for each in spread.parameters():
                each.add_(1.0)
    return alone, tessel.nn.distribute_module(spread, place(grid))


def same_state(a: nn.Module, b: nn.Module, what: str) -> None:
    ours, theirs = b.state_dict(), a.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        close(f"{what}: {name}", ours[name], value, GROWN)


@dataclass(frozen=True)
class Training:
    """A model by its name, its arguments, the grid and the shape of the input."""

    name: str
    args: tuple[Any, ...]
    grid: Shape
    shape: Shape
    steps: int = 3


TRAININGS = {
    1: [
        Training("ResNet18", (2,), (1, 1, 1, 1), (2, 3, 33, 32)),
        Training("ResNet18", (2,), (1, 1, 1, 1), (2, 3, 64, 64)),
        Training("UNet", (2,), (1, 1, 1, 1), (2, 1, 13, 16)),
        Training("UNet", (3,), (1, 1, 1, 1, 1), (1, 1, 8, 8, 9)),
        Training("VGG", (16,), (1, 1, 1, 1), (3, 3, 16, 16)),
    ],
    2: [
        Training("ResNet18", (2,), (1, 1, 2, 1), (2, 3, 64, 64)),
        Training("ResNet18", (2,), (2, 1, 1, 1), (3, 3, 37, 33)),
        Training("UNet", (2,), (1, 1, 1, 2), (1, 1, 16, 16)),
        Training("UNet", (3,), (1, 1, 2, 1, 1), (1, 1, 8, 9, 10)),
        Training("VGG", (17,), (1, 1, 1, 2), (3, 3, 17, 17)),
        Training("VGG", (16,), (1, 2, 1, 1), (3, 3, 16, 16)),
    ],
    4: [
        Training("ResNet18", (2,), (1, 1, 2, 2), (2, 3, 64, 64)),
        Training("ResNet18", (2,), (2, 1, 2, 1), (2, 3, 53, 37)),
        Training("ResNet18", (2,), (1, 2, 1, 2), (2, 3, 35, 32), 2),
        Training("ResNet18", (2,), (1, 1, 3, 1), (2, 3, 33, 35), 2),
        Training("UNet", (2,), (1, 1, 2, 2), (1, 1, 16, 16)),
        Training("UNet", (2,), (1, 1, 4, 1), (2, 1, 19, 23)),
        Training("UNet", (2,), (2, 1, 1, 2), (3, 1, 17, 12)),
        Training("UNet", (1,), (2, 1, 2), (3, 1, 27)),
        Training("UNet", (3,), (1, 1, 2, 1, 2), (1, 1, 9, 8, 11)),
        Training("UNet", (3,), (2, 1, 1, 2, 1), (2, 1, 8, 8, 8)),
        Training("VGG", (16,), (1, 1, 2, 2), (3, 3, 16, 16)),
        Training("VGG", (16,), (2, 2, 1, 1), (3, 3, 16, 16)),
        Training("VGG", (17,), (1, 1, 4, 1), (3, 3, 17, 17)),
        Training("VGG", (17,), (4, 1, 1, 1), (5, 3, 17, 17)),
    ],
}


def train(case: Training) -> None:
    """Outputs and gradients of every step, and the state after the last, equal those of torch."""
    alone, spread = pair(lambda: getattr(models, case.name)(*case.args), case.grid)
    layout = Layout.balanced(place(case.grid), case.shape)
    x = values(case.shape, 1)
    optimizers = [torch.optim.SGD(m.parameters(), 0.02, momentum=0.9) for m in (alone, spread)]
    many = prod(case.grid) > 1
    for step in range(case.steps):
        y = alone(x)
        with count_traffic() as forward:
            z = spread(layout.local_part(x))
        if not layout.partition.active:
            assert z.numel() == 0
            continue
        # on the input; and, before gradients are summed, on the parameters that were used
        assert forward.agreements == 2 * many, forward
        tolerance = GROWN if step else TOLERANCE
        close(f"{case}: output {step}", z, mine(y, layout), tolerance)
        weights = values(y.shape, 5)
        for each in optimizers:
            each.zero_grad()
        (y * weights).sum().backward()
        with count_traffic() as backward:
            (z * mine(weights, layout)).sum().backward()
        assert backward.agreements == 0
        for (name, p), q in zip(alone.named_parameters(), spread.parameters(), strict=True):
            close(f"{case}: gradient {step} of {name}", q.grad, p.grad, tolerance)
        for each in optimizers:
            each.step()
    if layout.partition.active:
        same_state(alone, spread, f"{case}: state")


@pytest.mark.parametrize("nprocs", [1, 2, 4])
@pytest.mark.parametrize("name", ["ResNet18", "UNet", "VGG"])
def test_training_is_that_of_one_process(run: Run, nprocs: int, name: str) -> None:
    for case in TRAININGS[nprocs]:
        if case.name == name:
            run(train, case, nprocs=nprocs, timeout=60)


SPLIT = (1, 1, 2, 2)


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 2, 3, stride=2), nn.GroupNorm(1, 2)),
    )


def agree_with(
    alone: nn.Module, spread: nn.Module, grid: Shape, shape: Shape, seed: int = 0
) -> None:
    """One pass forward and backward is the same for both."""
    layout = Layout.balanced(place(grid), shape)
    x = values(shape, seed)
    whole, part = x.clone().requires_grad_(), layout.local_part(x).clone().requires_grad_()
    for each in (alone, spread):
        each.zero_grad()
    y, z = alone(whole), spread(part)
    if not layout.partition.active:
        return
    close("output", z, mine(y, layout), TOLERANCE)
    weights = values(y.shape, 7)
    (y * weights).sum().backward()
    (z * mine(weights, layout)).sum().backward()
    close("gradient of the input", part.grad, layout.local_part(whole.grad), TOLERANCE)
    for (name, p), q in zip(alone.named_parameters(), spread.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name}: only one has a gradient"
        if p.grad is not None:
            close(f"gradient of {name}", q.grad, p.grad, TOLERANCE)


def check_state() -> None:
    """Keys and shapes of a checkpoint are torch's, and it goes both ways."""
    alone, spread = pair(small, SPLIT)
    same_state(alone, spread, "state")
    torch.manual_seed(5)
    other = small().double()
    spread.load_state_dict(other.state_dict())
    agree_with(other, spread, SPLIT, (2, 3, 9, 8))
    back = small().double()
    back.load_state_dict(spread.state_dict())
    same_state(other, back, "there and back")


def check_kept() -> None:
    """Flags, dtype and types of what is not replaced stay."""
    torch.manual_seed(0)
    model = small().to(torch.float32)
    model[3].eval()
    model[0].weight.requires_grad_(False)
    before = {name: (id(p), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    converted = tessel.nn.distribute_module(model, place(SPLIT))
    assert converted is model
    assert before == {n: (id(p), p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    assert [each.training for each in model] == [True, True, True, False]
    assert not model[3][0].training
    assert isinstance(model[0], nn.Conv2d) and isinstance(model[1], nn.BatchNorm2d)
    assert {each.device.type for each in model.buffers()} == {"cpu"}
    part = Layout.balanced(place(SPLIT), (2, 3, 8, 8)).local_part(values((2, 3, 8, 8), 1)).float()
    assert model(part).dtype == torch.float32


def check_frozen() -> None:
    """A frozen layer gets no gradient, and none travels for it."""

    def frozen() -> nn.Module:
        model = small()
        for each in (model[0], model[1]):
            each.requires_grad_(False)
        return model

    alone, spread = pair(frozen, SPLIT)
    agree_with(alone, spread, SPLIT, (2, 3, 8, 8))
    traffic = []
    layout = Layout.balanced(place(SPLIT), (2, 3, 8, 8))
    for model in (spread, tessel.nn.distribute_module(small().double(), place(SPLIT))):
        y = model(layout.local_part(values(layout.shape, 1)))
        with count_traffic() as backward:
            y.sum().backward()
        traffic.append(backward.bytes_sent)
    assert traffic[0] < traffic[1]
    spread.requires_grad_(False)
    assert not spread(layout.local_part(values(layout.shape, 1))).requires_grad


class Tied(nn.Module):
    """A module that is used twice, and two layers with the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.block = nn.ModuleDict({"inner": nn.ModuleList([self.first, nn.ReLU()])})
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(self.second(self.first(x)))
        for each in self.block["inner"]:
            y = each(y)
        return self.scale * y + self.shift


def check_tied() -> None:
    alone, spread = pair(Tied, SPLIT)
    assert spread.second.weight is spread.first.weight
    assert spread.again is spread.first is spread.block["inner"][0]
    agree_with(alone, spread, SPLIT, (2, 3, 7, 8))


def check_one_layer() -> None:
    """A model of one layer, over all grids; also converted twice."""
    for grid in (SPLIT, (2, 1, 2, 1), (1, 4, 1, 1)):
        alone, spread = pair(lambda: nn.Conv2d(3, 5, 3, padding=1), grid)
        assert type(spread) is nn.Conv2d
        agree_with(alone, spread, grid, (2, 3, 7, 9))
    alone, spread = pair(small, SPLIT)
    agree_with(alone, tessel.nn.distribute_module(spread, place(SPLIT)), SPLIT, (2, 3, 8, 8))
    assert nn.ReLU is type(tessel.nn.distribute_module(nn.ReLU(), place(SPLIT)))


def check_parts() -> None:
    """Parts of a converted model are put into another model that is converted then."""
    alone, spread = pair(small, SPLIT)
    outer = tessel.nn.distribute_module(nn.Sequential(spread, nn.AvgPool2d(2)), place(SPLIT))
    agree_with(nn.Sequential(alone, nn.AvgPool2d(2)), outer, SPLIT, (2, 3, 9, 9))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
}


def check_copies() -> None:
    """Copies are models of their own, before and after a first call."""
    for name, copied in COPIES.items():
        for used in (False, True):
            for make in (small, lambda: models.VGG(16), Tied):
                alone, spread = pair(make, SPLIT)
                if used:
                    agree_with(alone, spread, SPLIT, (2, 3, 16, 16))
                twin = copied(spread)
                assert twin is not spread, name
                theirs = {id(each) for each in spread.parameters()}
                assert not theirs & {id(each) for each in twin.parameters()}
                with torch.no_grad():
                    for each in spread.parameters():
                        each.zero_()
                agree_with(alone, twin, SPLIT, (2, 3, 16, 16))


def check_output_travels() -> None:
    """An output is a plain tensor: it can be copied, pickled and saved."""
    _, spread = pair(small, SPLIT)
    y = spread(Layout.balanced(place(SPLIT), (2, 3, 8, 8)).local_part(values((2, 3, 8, 8), 1)))
    file = io.BytesIO()
    torch.save(y.detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), y)
    assert torch.equal(pickle.loads(pickle.dumps(y.detach())), copy.deepcopy(y.detach()))
    assert not vars(y)


def check_evaluation() -> None:
    for grid in (SPLIT, (2, 1, 1, 2)):
        alone, spread = pair(small, grid)
        agree_with(alone, spread, grid, (2, 3, 8, 8))
        alone.eval(), spread.eval()
        agree_with(alone, spread, grid, (2, 3, 9, 9))
        same_state(alone, spread, "evaluation")
        layout = Layout.balanced(place(grid), (2, 3, 8, 8))
        x = values(layout.shape, 2)
        with torch.no_grad():
            y = spread(layout.local_part(x))
        assert not y.requires_grad
        close("no_grad", y, mine(alone(x), layout), TOLERANCE)
        with torch.inference_mode():
            close("inference", spread(layout.local_part(x)), mine(alone(x), layout), TOLERANCE)


def check_autocast() -> None:
    """Lower precision, as torch has it: products of bfloat16 are rounded, in another order."""
    torch.manual_seed(0)
    alone = small()
    spread = tessel.nn.distribute_module(copy.deepcopy(alone), place(SPLIT))
    layout = Layout.balanced(place(SPLIT), (2, 3, 8, 8))
    x = values(layout.shape, 1).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, z = alone(x), spread(layout.local_part(x))
    assert y.dtype == z.dtype
    close("output", z.double(), mine(y, layout).double(), 0.05)
    y.float().square().sum().backward(), z.float().square().sum().backward()
    for (name, p), q in zip(alone.named_parameters(), spread.parameters(), strict=True):
        assert p.grad.dtype == q.grad.dtype
        close(name, q.grad.double(), p.grad.double(), 0.1)


class Hooked(nn.Module):
    """Modules of all kinds for hooks: a layer, a container, a layer after `flatten`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.conv(x)) + 1
        return self.head(torch.flatten(y, 1)) * 2


HOOKS = {
    "forward": ("register_forward_hook", lambda log: lambda m, x, y: log.append("f") or 2 * y),
    "before": (
        "register_forward_pre_hook",
        lambda log: lambda m, x: log.append("b") or (3 * x[0],),
    ),
    "full backward": (
        "register_full_backward_hook",
        lambda log: lambda m, gi, go: log.append("g") or tuple(2 * each for each in gi),
    ),
    "before backward": (
        "register_full_backward_pre_hook",
        lambda log: lambda m, go: log.append("p") or tuple(3 * each for each in go),
    ),
}


def check_hooks() -> None:
    """Hooks are kept, are called, and may change what they get."""
    for grid in (SPLIT, (2, 1, 2, 1)):
        for name, (register, hook) in HOOKS.items():
            for late in (False, True):
                log: list[str] = []

                def hooked(
                    model: nn.Module, register: str = register, hook: Any = hook
                ) -> nn.Module:
                    for each in (model.conv, model.block, model.block[0], model.head):
                        getattr(each, register)(hook(log))  # noqa: B023
                    return model

                torch.manual_seed(0)
                alone = Hooked().double()
                spread = copy.deepcopy(alone)
                hooked(alone)
                if not late:
                    hooked(spread)
                spread = tessel.nn.distribute_module(spread, place(grid))
                if late:
                    hooked(spread)
                agree_with(alone, spread, grid, (2, 3, 8, 8))
                assert len(log) == 8, (name, late, log)


def check_odd_models() -> None:
    """Subclasses, parametrized layers, and layers without a rule for parts of space."""

    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(F.pad(x, (1, 1, 1, 1)), 2 * self.weight, self.bias)

    class Rows(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(2).transpose(1, 2)
            y = self.layer(rows)
            return (y[0] if isinstance(y, tuple) else y).transpose(1, 2).reshape(x.shape)

    makers = (
        lambda: Own(3, 3, 3),
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3)),
        lambda: Rows(nn.GRU(3, 3, batch_first=True)),
        lambda: Rows(nn.TransformerEncoderLayer(3, 1, 5, dropout=0.0, batch_first=True)),
    )
    for make in makers:
        alone, spread = pair(lambda make=make: nn.Sequential(nn.ReLU(), make()), SPLIT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agree_with(alone, spread, SPLIT, (2, 3, 8, 8))
    with pytest.raises(ValueError, match="fallback must be one of gather, raise, got 'no'"):
        tessel.nn.distribute_module(nn.ReLU(), place(SPLIT), "no")


def check_different_models() -> None:
    """Models that differ between workers raise on all of them."""
    rank = tessel.world().rank
    conv = nn.Conv2d(3, 5 if rank == 2 else 4, 3)
    frozen = nn.Conv2d(3, 4, 3).requires_grad_(rank != 1)
    longer = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(1 + (rank == 3))))
    strided = nn.Conv2d(3, 4, 3, stride=1 + (rank == 1))
    other = nn.Sequential(nn.Tanh() if rank == 2 else nn.ReLU())
    for model in (conv, frozen, longer, strided, other):
        with pytest.raises(ValueError, match="the same model on all workers"):
            tessel.nn.distribute_module(model, place(SPLIT))


def check_wrong_input() -> None:
    """One worker's wrong input raises on all, and the model is good afterwards."""
    alone, spread = pair(small, SPLIT)
    rank = tessel.world().rank
    for wrong in ((2, 3, 4, 5 if rank == 1 else 4), (2, 3, 4, 4)[: 3 + (rank > 0)]):
        with pytest.raises(ValueError):
            spread(torch.ones(wrong, dtype=torch.float64))
    with pytest.raises(ValueError, match="dtype"):
        spread(torch.ones(2, 3, 4, 4, dtype=torch.float32 if rank == 3 else torch.float64))
    with pytest.raises(ValueError, match="as many axes"):
        spread(torch.ones(3, 4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="no tensor"):
        spread(None)
    agree_with(alone, spread, SPLIT, (2, 3, 8, 8))


def check_shared_loss() -> None:
    """Torch's own loss on the shared output of a classifier."""
    for grid in (SPLIT, (1, 2, 2, 1)):
        alone, spread = pair(lambda: models.VGG(16), grid)
        layout = Layout.balanced(place(grid), (3, 3, 16, 16))
        x, labels = values(layout.shape, 1), torch.tensor([0, 3, 4])
        y, z = alone(x), spread(layout.local_part(x))
        close("output", z, y, TOLERANCE)
        F.cross_entropy(y, labels).backward()
        with count_traffic() as backward:
            F.cross_entropy(z, labels).backward()
        assert backward.agreements == 0
        for (name, p), q in zip(alone.named_parameters(), spread.parameters(), strict=True):
            close(f"gradient of {name}", q.grad, p.grad, TOLERANCE)


def check_shared_loss_of_split_batch() -> None:
    """With the batch split, each worker sums the loss of its own rows."""
    grid = (2, 1, 2, 1)
    for make, size in ((lambda: models.VGG(16), 16), (lambda: models.ResNet18(2), 33)):
        alone, spread = pair(make, grid)
        layout = Layout.balanced(place(grid), (3, 3, size, size))
        x, labels = values(layout.shape, 1), torch.tensor([0, 3, 4])
        y, z = alone(x), spread(layout.local_part(x))
        (F.cross_entropy(y, labels, reduction="sum") / 3).backward()
        (F.cross_entropy(z, mine(labels, layout), reduction="sum") / 3).backward()
        for (name, p), q in zip(alone.named_parameters(), spread.parameters(), strict=True):
            close(f"gradient of {name}", q.grad, p.grad, TOLERANCE)


def everyones(value: Tensor) -> list[Tensor]:
    return tessel.world().create_cartesian_topology_partition([4]).group.share_objects(value)


def check_dropout_of_shared() -> None:
    """Copies of a shared value get the same mask, call by call another one."""
    _, spread = pair(lambda: models.VGG(16, dropout=0.5), SPLIT)
    layout = Layout.balanced(place(SPLIT), (3, 3, 16, 16))
    part = layout.local_part(values(layout.shape, 1))
    optimizer = torch.optim.SGD(spread.parameters(), 0.1)
    outputs = []
    for _ in range(4):
        y = spread(part)
        assert all(torch.equal(y, other) for other in everyones(y.detach()))
        outputs.append(y.detach())
        optimizer.zero_grad()
        y.square().sum().backward()
        optimizer.step()
    assert not torch.equal(outputs[0], outputs[1])
    for each in spread.parameters():
        assert all(torch.equal(each, other) for other in everyones(each.detach()))


class Random(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does
        self.layer = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x)


def gathered(model: nn.Module, grid: Shape, shape: Shape) -> Tensor:
    """The whole output for an input of ones."""
    layout = Layout.balanced(place(grid), shape)
    y = model(torch.ones(layout.local_shape, dtype=torch.float64)).detach()
    whole = torch.empty(shape, dtype=torch.float64)
    for worker, part in enumerate(everyones(y)):
        box = layout.box(worker)
        whole[tuple(slice(*each) for each in box)] = part
    return whole


def check_dropout_of_parts() -> None:
    """Different parts get different masks; whole channels fall together."""
    shape = (4, 8, 8, 8)
    for grid in (SPLIT, (2, 2, 1, 1)):
        for layer in (nn.Dropout(0.5), nn.AlphaDropout(0.5)):
            model = tessel.nn.distribute_module(nn.Sequential(layer), place(grid))
            layout = Layout.balanced(place(grid), shape)
            y = model(torch.ones(layout.local_shape, dtype=torch.float64))
            masks = everyones(y > 1)
            assert not any(torch.equal(masks[0], other) for other in masks[1:])
        model = tessel.nn.distribute_module(nn.Sequential(nn.Dropout2d(0.5)), place(grid))
        y = gathered(model, grid, shape)
        channels = y.flatten(2)
        assert bool((channels == channels[..., :1]).all())
        assert set(channels[..., 0].unique().tolist()) == {0.0, 2.0}
        first, second = channels[..., 0].split(2)
        assert not torch.equal(first, second)
        assert not torch.equal(y, gathered(model, grid, shape))
        model.eval()
        assert torch.equal(gathered(model, grid, shape), torch.ones(shape, dtype=torch.float64))


def check_random_values() -> None:
    """Noise: each part has its own, copies of what is shared have the same, also in evaluation."""
    makers = {
        "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
        "randn_like": lambda x: x + torch.randn_like(x),
        "dropout": lambda x: F.dropout(x, 0.5, True),
    }
    for name, does in makers.items():
        for training in (True, False):
            model = tessel.nn.distribute_module(Random(does), place(SPLIT)).train(training)
            y = gathered(model, SPLIT, (4, 4, 8, 8))
            assert not torch.equal(y[..., :4, :4], y[..., 4:, 4:]), name
            model = tessel.nn.distribute_module(
                Random(lambda x, does=does: does(x.mean((2, 3)))), place(SPLIT)
            ).train(training)
            y = model(torch.ones(4, 4, 4, 4, dtype=torch.float64))
            assert all(torch.equal(y, other) for other in everyones(y)), (name, training)


class Checkpointed(nn.Module):
    """The same model, whose parts are computed again in the backward pass."""

    def __init__(self, saves: bool, dropout: float) -> None:
        super().__init__()
        self.saves = saves
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(dropout), nn.GroupNorm(2, 4), nn.GELU()
        )
        self.turned = nn.Sequential(nn.Conv2d(4, 4, (3, 1), padding=(1, 0)), nn.Tanh())
        self.single = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(4 * 64, 6),
            nn.Dropout(dropout),
            nn.LayerNorm(6),
            nn.Linear(6, 3),
        )

    def call(self, module: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False) if self.saves else module(x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.call(self.body, self.stem(x)) + 1
        y = self.call(self.turned, y.transpose(2, 3)).transpose(2, 3)
        y = self.call(self.single, y)
        return self.call(self.head, y.mean(1, keepdim=True) + y)


def check_checkpoint() -> None:
    """Checkpoints change no gradient, also with dropout, and add no agreement."""
    for grid in (SPLIT, (2, 1, 2, 1), (1, 2, 1, 2)):
        for dropout in (0.0, 0.5):
            layout = Layout.balanced(place(grid), (2, 3, 8, 8))
            part = layout.local_part(values(layout.shape, 1))
            results = []
            for saves in (False, True):
                torch.manual_seed(0)
                alone = Checkpointed(saves, dropout).double()
                torch.manual_seed(1)
                spread = tessel.nn.distribute_module(copy.deepcopy(alone), place(grid))
                y = spread(part)
                with count_traffic() as backward:
                    y.square().sum().backward()
                assert backward.agreements == 0, (saves, backward)
                results.append([y.detach(), *(each.grad for each in spread.parameters())])
            for without, given in zip(*results, strict=True):
                close(f"{grid} {dropout}", given, without, 1e-12)
            if not dropout:
                agree_with(alone, spread, grid, (2, 3, 8, 8))


def again(x: Tensor) -> Tensor:
    return (x - x.mean()).square()


def check_checkpoints_of_functions() -> None:
    """Functions and modules, also in torch's older way, which derives on its own."""
    layout = Layout.balanced(place(SPLIT), (2, 3, 8, 8))
    x = values(layout.shape, 1)
    cases = [(how, does) for how in (False, True) for does in (again, nn.Sequential(nn.Tanh()))]
    for reentrant, does in cases:
        model = Random(lambda x, does=does, how=reentrant: checkpoint(does, x, use_reentrant=how))
        model = tessel.nn.distribute_module(model, place(SPLIT))
        whole, part = x.clone().requires_grad_(), layout.local_part(x).clone().requires_grad_()
        does(whole).square().sum().backward()
        model(part).square().sum().backward()
        close(f"gradient {reentrant}", part.grad, layout.local_part(whole.grad), TOLERANCE)


class Leaf(nn.Module):
    """A module without layers, whose code needs the layouts."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()).square() * x.shape[2]


class WithLeaf(nn.Module):
    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.saves, self.leaf = saves, Leaf()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return checkpoint(self.leaf, y, use_reentrant=False) if self.saves else self.leaf(y)


def check_checkpoint_of_a_leaf() -> None:
    alone, _ = pair(lambda: WithLeaf(False), SPLIT)
    _, spread = pair(lambda: WithLeaf(True), SPLIT)
    agree_with(alone, spread, SPLIT, (2, 3, 7, 8))


class Table(nn.Module):
    """A table with the dimensions of a picture, which a block calls with a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, places: Tensor) -> Tensor:
        return places.cos() * self.scale


class Placed(nn.Module):
    """A block that calls a module without a part."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = Table(), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[2], dtype=x.dtype).reshape(1, 1, -1, 1)
        return self.table(places) * self.conv(x)


class WithTable(nn.Module):
    """A checkpoint of such a block, or of a function that begins with its table."""

    def __init__(self, saves: bool, of_function: bool) -> None:
        super().__init__()
        self.saves, self.of_function, self.block = saves, of_function, Placed()

    def begun(self, x: Tensor) -> Tensor:
        return self.block.table(torch.ones(1, 1, 1, 8, dtype=x.dtype)) * self.block(x)

    def forward(self, x: Tensor) -> Tensor:
        does = (lambda x: self.begun(x)) if self.of_function else self.block
        return checkpoint(does, x, use_reentrant=False) if self.saves else does(x)


def check_checkpoint_with_plain_tensors() -> None:
    for of_function in (False, True):
        alone, _ = pair(lambda of=of_function: WithTable(False, of), SPLIT)
        _, spread = pair(lambda of=of_function: WithTable(True, of), SPLIT)
        agree_with(alone, spread, SPLIT, (2, 3, 7, 8))


def check_memory() -> None:
    """Nothing of a pass without gradients stays, and nothing of one with, once it is over."""
    kept: list[Any] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            z = y[:, :, 1:].flatten(1)
            kept.extend(map(weakref.ref, (x, y, z)))
            return torch.relu(z).sum(1)

    model = tessel.nn.distribute_module(Watched().double(), place(SPLIT))
    part = Layout.balanced(place(SPLIT), (2, 3, 8, 8)).local_part(values((2, 3, 8, 8), 1))
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            model(part)
        assert [each() for each in kept] == [None] * 3
        kept.clear()
        model(part).sum().backward()
        assert [each() for each in kept] == [None] * 3
    finally:
        gc.enable()


def check_inactive() -> None:
    """Workers beyond the partition take no part and do not wait."""
    alone, spread = pair(small, (1, 1, 2, 1))
    agree_with(alone, spread, (1, 1, 2, 1), (2, 3, 8, 8))
    active = place((1, 1, 2, 1)).active
    with count_traffic() as traffic:
        y = spread(torch.ones(2, 3, 4, 8, dtype=torch.float64))
    assert active or (y.shape == (0,) and y.dtype == torch.float64 and not traffic.bytes_sent)


class Several(nn.Module):
    """Several inputs, options and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, others: dict[str, Tensor], *, scale: float, shift: Tensor) -> Any:
        y = self.conv(x) * scale + others["y"] + shift.view(-1, 1, 1)
        return {"sum": y, "more": [y.mean((2, 3)), None, y.shape]}


def check_several() -> None:
    alone, spread = pair(Several, SPLIT)
    layout = Layout.balanced(place(SPLIT), (2, 3, 7, 8))
    x, y, shift = values(layout.shape, 1), values(layout.shape, 2), values((3,), 3)
    part = layout.local_part
    a = alone(x, {"y": y}, scale=2.0, shift=shift)
    b = spread(part(x), {"y": part(y)}, scale=2.0, shift=shift)
    close("first", b["sum"], part(a["sum"]), TOLERANCE)
    close("second", b["more"][0], a["more"][0], TOLERANCE)
    assert b["more"][1:] == [None, (2, 3, 7, 8)]


class Remembers(nn.Module):
    """A state from call to call, and statistics by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.register_buffer("mean", torch.zeros(3))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.mean.mul_(0.9).add_(y.detach().mean((0, 2, 3)), alpha=0.1)
        y = y - self.mean.view(1, -1, 1, 1)
        if self.last is not None:
            y = y + self.last
        self.last = y.detach()
        return y


def check_memory_of_a_model() -> None:
    for grid in (SPLIT, (2, 1, 2, 1)):
        alone, spread = pair(Remembers, grid)
        for seed in range(3):
            agree_with(alone, spread, grid, (2, 3, 7, 8), seed)
        same_state(alone, spread, "statistics")


class Autoencoder(nn.Module):
    """From a picture to features, and back to a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        self.code = nn.Linear(2 * 8 * 8, 2 * 4 * 4)
        self.up = nn.ConvTranspose2d(2, 3, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        code = self.code(self.conv(x).flatten(1))
        return self.up(code.unflatten(1, (2, 4, 4)))


def check_output_lies_as_the_input() -> None:
    """A whole that becomes an image again is split when it leaves, and so are its gradients."""
    for grid in (SPLIT, (1, 2, 2, 1), (2, 1, 1, 2)):
        alone, spread = pair(Autoencoder, grid)
        layout = Layout.balanced(place(grid), (2, 3, 8, 8))
        x, target = values(layout.shape, 1), values(layout.shape, 2)
        y = spread(layout.local_part(x))
        close("output", y, layout.local_part(alone(x)), TOLERANCE)
        loss = tessel.nn.DistributedMSELoss(place(grid))(y, layout.local_part(target))
        loss.backward()
        F.mse_loss(alone(x), target).backward()
        for a, b in zip(alone.parameters(), spread.parameters(), strict=True):
            close("gradient", b.grad, a.grad, TOLERANCE)
    uneven = Layout.from_lengths(place(SPLIT), [(2,), (3,), (6, 2), (1, 7)])
    _, spread = pair(lambda: nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU()), SPLIT)
    assert spread(uneven.local_part(x)).shape == (2, 3, 4, 4)


class Sum(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        return sum(parts)


def check_one_agreement_for_several_inputs() -> None:
    model = tessel.nn.distribute_module(Sum(), place(SPLIT))
    part = Layout.balanced(place(SPLIT), (2, 3, 8, 8)).local_part(values((2, 3, 8, 8), 1))
    with count_traffic() as traffic:
        y = model(part, part, part)
    assert traffic.agreements == 1
    close("sum", y, 3 * part)
    with count_traffic() as traffic:
        model(*[part] * 5)  # more than one message holds
    assert traffic.agreements == 2
    late = part if tessel.world().rank else part[:1]
    with pytest.raises(ValueError, match="do not fit together"):
        model(part, late, part)


def check_own_forward() -> None:
    """A forward that somebody put into a module is not lost."""
    alone, _ = pair(lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1)), SPLIT)
    for each in (alone, spread := copy.deepcopy(alone)):
        each[0].forward = lambda x: x - x.mean()
    agree_with(alone, tessel.nn.distribute_module(spread, place(SPLIT)), SPLIT, (2, 3, 8, 8))
    with pytest.raises(TypeError):
        tessel.nn.DistributedMaxPool2d(place(SPLIT), 2)(torch.ones(1, 1, 4, 4), 7)


def check_short_means() -> None:
    """A mean of many values of a short type does not run over."""
    model = tessel.nn.distribute_module(Mean(), place(SPLIT))
    y = model(torch.full((1, 1, 64, 64), 20.0, dtype=torch.float16))
    assert y.dtype == torch.float16 and float(y) == 20.0


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def check_placeholders() -> None:
    """Workers outside of a partition get as many tensors as the others."""
    P = tessel.world().create_partition_inclusive([0, 1])
    P = P.create_cartesian_topology_partition([1, 1, 2])
    x = torch.ones(1, 1, 4) if P.active else tessel.zero_volume_tensor()
    for pool in (
        tessel.nn.DistributedMaxPool1d(P, 2, return_indices=True),
        tessel.nn.DistributedAdaptiveMaxPool1d(P, 2, return_indices=True),
    ):
        _, places = pool(x)
        assert places.dtype == torch.int64


class Holding(nn.Module):
    """A model that holds another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.act = inner, nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.inner(x))
        return y


def check_parts_of_a_model_of_one_worker() -> None:
    """What is spread over all workers stays so in a model that each worker has for itself."""
    rank = tessel.world().rank
    own = Partition((rank,), (1, 1, 1, 1))
    layout, whole = Layout.balanced(place(SPLIT), (2, 3, 8, 8)), values((2, 3, 8, 8), 1)
    for make in (lambda: nn.Conv2d(3, 3, 3), lambda: nn.Sequential(nn.Conv2d(3, 3, 3))):
        alone, spread = pair(make, SPLIT)
        y = tessel.nn.distribute_module(Holding(spread), own)(layout.local_part(whole))
        close("output", y, mine(alone(whole).tanh(), layout), TOLERANCE)


class Spreading(nn.Module):
    """Makes spread tensors, in the middle, of what its layers get."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        own = Partition((tessel.world().rank,), (1, 1, 1, 1))
        y = tessel.Tensor(self.first(x), Layout.balanced(own, (2, 3, 6, 6)))
        z: Tensor = self.last(input=y) + self.last(y)
        return z.full() if isinstance(z, tessel.Tensor) else z


def check_spread_inside_of_a_model_of_one_worker() -> None:
    """Layers in a world of one take spread tensors that the model has made, too."""
    alone = Spreading().double()
    own = Partition((tessel.world().rank,), (1, 1, 1, 1))
    spread = tessel.nn.distribute_module(copy.deepcopy(alone), own)
    whole = values((2, 3, 8, 8), 1)
    expected = 2 * alone.last(alone.first(whole))
    close("output", spread(whole), expected, TOLERANCE)


def check_looks_in_a_world_of_one() -> None:
    """The outermost call looks at all modules, once; those in it are called at once."""
    rank = tessel.world().rank
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()), nn.Conv2d(3, 2, 3))
    tessel.nn.distribute_module(model, Partition((rank,), (1, 1, 1, 1)))
    looks = []
    inner, own = convert.Contents.__init__, convert.Contents
    own.__init__ = lambda self, of: (looks.append(of), inner(self, of))[1]  # type: ignore
    try:
        model(torch.ones(1, 3, 8, 8))
        model[0](torch.ones(1, 3, 8, 8))  # from outside again, as when a call has failed
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 1, 8, 8))
        model[0](torch.ones(1, 3, 8, 8))
    finally:
        own.__init__ = inner  # type: ignore[method-assign]
    assert [each is model for each in looks] == [True, False, True, False]


CHECKS: Sequence[Callable[[], None]] = (
    *(check_state, check_kept, check_frozen, check_tied, check_one_layer, check_parts),
    *(check_copies, check_output_travels, check_evaluation, check_autocast, check_hooks),
    *(check_odd_models, check_different_models, check_wrong_input, check_shared_loss),
    *(check_shared_loss_of_split_batch, check_dropout_of_shared, check_dropout_of_parts),
    *(
        check_random_values,
        check_checkpoint,
        check_checkpoints_of_functions,
        check_memory,
        check_inactive,
        check_several,
    ),
    *(check_memory_of_a_model, check_checkpoint_of_a_leaf, check_output_lies_as_the_input),
    check_checkpoint_with_plain_tensors,
    *(check_one_agreement_for_several_inputs, check_own_forward, check_short_means),
    *(check_placeholders, check_parts_of_a_model_of_one_worker),
    *(check_spread_inside_of_a_model_of_one_worker, check_looks_in_a_world_of_one),
)


@pytest.mark.parametrize("check", CHECKS, ids=[each.__name__[6:] for each in CHECKS])
def test_conversion(run: Run, check: Callable[[], None]) -> None:
    run(check, nprocs=4, timeout=60)


def traffic_of_a_step(name: str, arguments: tuple[int, ...], shape: Shape) -> tuple[int, int]:
    """Messages and bytes that this worker sends in a step, once its gradient buckets are known."""
    world = tessel.world()
    P = place((1, 1, world.size, *(1 for _ in shape[3:])))
    model = tessel.nn.distribute_module(getattr(models, name)(*arguments), P)
    x = torch.ones(Layout.balanced(P, shape).local_shape)
    for _ in range(2):
        with count_traffic() as step:
            model(x).square().mean().backward()
    return step.messages, step.bytes_sent


# what conversion sent when it replaced layers, before models ran on spread tensors
SENT = {
    ("ResNet18", (16, 10), (2, 3, 33, 40)): {
        2: [(75, 2868112), (74, 2868048)],
        4: [(221, 4293592), (244, 4328728), (231, 4305944), (205, 4268696)],
    },
    ("UNet", (2, 8), (2, 1, 25, 24)): {
        2: [(42, 153932), (42, 153932)],
        4: [(119, 218900), (142, 257492), (142, 257492), (119, 218892)],
    },
}


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("case", SENT, ids=lambda case: case[0])
def test_a_step_sends_no_more_than_layers_would(run: Run, nprocs: int, case: Any) -> None:
    assert run(traffic_of_a_step, *case, nprocs=nprocs) == SENT[case][nprocs]


class WrittenWhole(torch.nn.Module):
    """Writes parts into a view of zeros, which stays plain, and returns that or what follows."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(x.numel(), dtype=x.dtype).view(x.shape)
        y[..., 1:] = x[..., :-1] * 3
        return {"itself": y, "twice": y * 2, "sum": x + y}[self.last]


def parts_written_whole(last: str) -> tuple[str, float]:
    """What a caller with parts hears, and how wrong the result for spread tensors is."""
    P = tessel.world().create_cartesian_topology_partition([1, tessel.world().size])
    model = tessel.nn.distribute_module(WrittenWhole(last), P)
    x = torch.arange(10.0).reshape(2, 5)
    layout = tessel.Layout.balanced(P, x.shape)
    expected = WrittenWhole(last)(x)
    found: Any = model(tessel.spread(x, P))
    error = float(
        ((found.full() if isinstance(found, tessel.Tensor) else found) - expected).abs().max()
    )
    try:
        part = model(layout.local_part(x))
    except NotImplementedError as refused:
        return str(refused), error
    assert torch.equal(part, layout.local_part(expected))
    return "", error


@pytest.mark.parametrize("last", ["itself", "twice", "sum"])
def test_what_was_written_whole_does_not_leave_as_a_part(run: Run, last: str) -> None:
    for said, error in run(parts_written_whole, last, nprocs=2):
        assert error == 0.0
        assert ("where a part is expected" in said) == (last != "sum"), said


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.where(mask > 0, 0.0)


def pass_a_whole_mask() -> None:
    P = place((1, 2))
    x, model = values((3, 4), 1), tessel.nn.distribute_module(Masked(), P)
    with pytest.raises(RuntimeError, match="broadcast") as caught:
        model(tessel.spread(x, P), x)
    (note,) = caught.value.__notes__
    assert "plain ones of shape (3, 4)" in note and "pass tessel.spread" in note
    close("spread", model(tessel.spread(x, P), tessel.spread(x, P)).full(), x.where(x > 0, 0.0))


def test_plain_tensors_beside_spread_ones_are_named_in_errors(run: Run) -> None:
    run(pass_a_whole_mask, nprocs=2)
