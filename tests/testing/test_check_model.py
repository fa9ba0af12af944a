"""`check_model` passes right models, and names what is wrong with others, on all workers alike.

Tests `testing/model/check.py`, `testing/model/arguments.py`, `testing/model/runs.py`,
`testing/model/report.py`, `testing/drawing.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessel
from models import ResNet18, UNet
from tessel import Layout
from tessel.tensor import call
from tessel.tensor.table import FOUND, RULES
from tessel.testing import ModelReport, check_model

Run = Callable[..., list[Any]]
WORKERS = pytest.mark.parametrize("nprocs", [1, 3])


def grid(*axes: int) -> tessel.Partition:
    """All workers along the axis that has a 0."""
    P = tessel.world()
    return P.create_cartesian_topology_partition([axis or P.size for axis in axes])


def values(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make().double()


# -- right models ---------------------------------------------------------------------------------


class Words(nn.Module):
    """Whole numbers in, and time steps and labels that stay whole; its loss comes out as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.clock = nn.Linear(1, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: Tensor, time: Tensor, *, labels: Tensor | None = None) -> Any:
        hidden = self.table(tokens) + self.clock(time[:, None])[:, None]
        scores = self.head(hidden.mean(1))
        found = {"scores": scores, "best": scores.argmax(1), "hidden": (hidden, None, "text", 3)}
        found["known"] = tokens > 3
        if labels is not None:
            found["loss"] = F.cross_entropy(scores, labels)
        return found


class Noisy(nn.Module):
    """Random functions of all kinds: of spread tensors, of plain ones, in place, in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.drop = nn.Dropout(0.4, inplace=True)
        self.memory = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.3)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.memory(x)[0]
        x = self.drop(x * 2) + torch.rand_like(x) + 0.1 * torch.rand_like(time).sum()
        x = F.dropout(x, 0.2) * torch.empty(x.shape[0], 1, 1, dtype=x.dtype).bernoulli_(0.7)
        x = x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.7) + x.new_empty(x.shape).normal_()
        x = x + F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)
        moved = torch.zeros(x.shape, dtype=x.dtype)  # spread from the write of parts on
        moved[:, 1:] = x[:, :-1]
        x = x + F.dropout(moved, 0.2)
        return x * random.random() * np.random.rand()


class NoisyAgain(nn.Module):
    """The same in checkpoints of both kinds; and a gradient that is taken in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Noisy(), Noisy(), Noisy()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = checkpoint(self.first, x, time, use_reentrant=False)
        x = checkpoint(self.second, x, time, use_reentrant=True)
        energy = checkpoint(lambda v: self.third(v, time).square(), x, use_reentrant=False)
        (force,) = torch.autograd.grad(energy, x, torch.ones_like(energy), create_graph=True)
        return x + F.dropout(force, 0.3)


class Twice(nn.Module):
    """One layer that is called twice, changes its input in place, and computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x)
        y = self.layer(checkpoint(self.layer, x, use_reentrant=False))
        y[:, :, 1:] += x[:, :, :-1]  # three calls, between which the part of y is withheld
        return y


@dataclass
class Answer:
    """An output that torch does not know."""

    scores: Tensor
    count: int


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.layer(x), 7)


def residual() -> ModelReport:
    torchvision = pytest.importorskip("torchvision")
    model = seeded(lambda: torchvision.models.resnet18(num_classes=4))
    return check_model(model, values(2, 3, 40, 33), where=grid(1, 1, 0, 1), calls=1)


def unet() -> ModelReport:
    return check_model(seeded(lambda: UNet(2)), values(1, 1, 13, 17), where=grid(1, 1, 0, 1))


def encoder() -> ModelReport:
    layer = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True))
    return check_model(layer, values(4, 5, 8), where=grid(0, 1, 1))


def encoder_of_a_split_sequence() -> ModelReport:
    layer = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    return check_model(layer, values(2, 7, 8), where=grid(1, 0, 1))


def words() -> ModelReport:
    tokens = torch.arange(12).reshape(4, 3) % 11
    kwargs = {"labels": torch.tensor([1, 0, 4, 2])}
    inputs = tokens, values(4)
    return check_model(seeded(Words), *inputs, where=grid(0, 1), kwargs=kwargs)


def words_with_a_loss() -> ModelReport:
    tokens = torch.arange(12).reshape(4, 3) % 11
    loss = lambda found: found["scores"].square().mean() + found["hidden"][0].sum()  # noqa: E731
    return check_model(seeded(Words), tokens, values(4), where=grid(1, 0), loss=loss)


def noise() -> ModelReport:
    return check_model(seeded(Noisy), values(3, 5, 8), values(3), where=grid(0, 1, 1))


def noise_again_with_a_loss() -> ModelReport:
    loss = lambda y: F.dropout(y, 0.5).square().mean()  # noqa: E731
    return check_model(
        seeded(NoisyAgain), values(3, 5, 8), values(3), where=grid(1, 0, 1), loss=loss
    )


def twice() -> ModelReport:
    return check_model(seeded(Twice), values(2, 2, 6, 5), where=grid(1, 1, 0, 1))


def frozen() -> ModelReport:
    model = seeded(Twice)
    model.layer.bias.requires_grad_(False)
    return check_model(model, values(2, 2, 6, 5), where=grid(1, 1, 1, 0))


def answer() -> ModelReport:
    return check_model(seeded(Answering), values(5, 4), where=grid(0, 1))


def without_gradients() -> ModelReport:
    with torch.no_grad():
        return check_model(seeded(Answering).eval(), values(5, 4), where=grid(0, 1))


def uneven() -> ModelReport:
    P = grid(1, 1, 0, 1)
    lengths = [7 - (P.size - 1), *[1] * (P.size - 1)]
    layout = Layout.from_lengths(P, [[2], [2], lengths, [5]])
    return check_model(seeded(Twice), values(2, 2, 7, 5), where=layout)


def spread_input() -> ModelReport:
    P = grid(1, 1, 0, 1)
    x = tessel.spread(values(2, 2, 6, 5), Layout.whole(P, (2, 2, 6, 5), shared=True))
    return check_model(seeded(Twice), x, where=P)


def single() -> ModelReport:
    model = seeded(Twice).float()
    return check_model(model, values(2, 2, 6, 5).float(), where=grid(1, 1, 0, 1))


def short_cut() -> ModelReport:
    """Torch calls no modules of an encoder in evaluation, in one process alone."""
    layer = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    with torch.no_grad():
        return check_model(layer, values(2, 6, 8), where=grid(1, 0, 1))


def region() -> ModelReport:
    """The layers of a region have no hooks: they compute more than their parts."""
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1)]
    model = seeded(lambda: nn.Sequential(tessel.nn.HaloRegion(*layers), nn.ReLU()))
    report = check_model(model, values(1, 2, 9, 5), where=grid(1, 1, 0, 1))
    assert [each.name for each in report.modules] == ["0", "1", ""]
    return report


class Constant(nn.Module):
    """Outputs that are nothing but rounding, numbers, arrays, and what nobody can compare."""

    def forward(self, x: Tensor) -> Any:
        mean = x.mean()
        zero = (x - x.detach()).sum() + (mean - x.sum() / x.numel())
        return zero, float(mean), np.float64(mean.item()), mean.detach().numpy(), object(), x


def constant() -> ModelReport:
    report = check_model(Constant(), values(6, 5), where=grid(0, 1))
    names = [each.name for each in report.values]
    assert names[4] == "output[4], a object, is not compared" and "not compared" in str(report)
    return report


RIGHT: dict[str, Callable[[], ModelReport]] = {
    "residual": residual,
    "unet": unet,
    "encoder": encoder,
    "encoder_of_a_split_sequence": encoder_of_a_split_sequence,
    "words": words,
    "words_with_a_loss": words_with_a_loss,
    "noise": noise,
    "noise_again_with_a_loss": noise_again_with_a_loss,
    "twice": twice,
    "frozen": frozen,
    "answer": answer,
    "without_gradients": without_gradients,
    "uneven": uneven,
    "spread_input": spread_input,
    "single": single,
    "short_cut": short_cut,
    "region": region,
    "constant": constant,
}


def checked(name: str) -> tuple[str, list[tuple[str, float, str]]]:
    report = RIGHT[name]()
    assert report.passed and not report.differing
    return str(report), [(each.name, each.error, each.dtype) for each in report.values]


@pytest.mark.parametrize("name", RIGHT)
@WORKERS
def test_right_models_pass(run: Run, name: str, nprocs: int) -> None:
    (text, figures), *others = run(checked, name, nprocs=nprocs, timeout=100)
    assert "does what it does in one process" in text and all(text == each for each, _ in others)
    for _, error, dtype in figures:
        assert not error > (1e-4 if dtype == "torch.float32" else 1e-9)


def named() -> tuple[list[str], ...]:
    report = words()
    return [each.name for each in report.values], [each.name for each in report.modules]


def test_everything_is_compared(run: Run) -> None:
    for names, modules in run(named, nprocs=2):
        assert names == [
            "output['scores']",
            "output['best']",
            "output['hidden'][0]",
            "output['hidden'][1]",
            "output['hidden'][2]",
            "output['hidden'][3]",
            "output['known']",
            "output['loss']",
            "gradient of table.weight",
            "gradient of clock.weight",
            "gradient of clock.bias",
            "gradient of head.weight",
            "gradient of head.bias",
            "gradient of input[1]",
        ]
        assert modules == ["table", "clock", "head", ""]


# -- wrong ones -----------------------------------------------------------------------------------


class OfTheParts(torch.autograd.Function):
    """The difference of neighbours, which forgets that some of them are on another worker."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        if not isinstance(x, tessel.Tensor):
            return x - x.roll(1, 2)
        return tessel.from_local(x.local - x.local.roll(1, 2), x.layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad - grad.roll(-1, 2)


class Neighbours(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OfTheParts.apply(x)


class Careless(nn.Module):
    """Three blocks, the second of which is wrong."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), middle)
        self.third = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


def failure(check: Callable[[], Any]) -> tuple[str, list[str]]:
    """The text of a check that fails, and the modules that differ in its report."""
    with pytest.raises(AssertionError) as caught:
        check()
    report = getattr(caught.value, "report", None)
    assert report is None or str(report) == str(caught.value)
    return str(caught.value), [] if report is None else [each.name for each in report.differing]


def wrong_function() -> tuple[str, list[str]]:
    model = seeded(lambda: Careless(Neighbours()))
    return failure(lambda: check_model(model, values(1, 2, 6, 5), where=grid(1, 1, 0, 1)))


@contextmanager
def rule_instead(name: str, rule: Any) -> Iterator[None]:
    """Another rule for a torch function, meanwhile."""
    before = RULES[name]
    RULES[name] = rule
    FOUND.clear()
    try:
        yield
    finally:
        RULES[name] = before
        FOUND.clear()


def wrong_rule() -> tuple[str, list[str]]:
    own = RULES["group_norm"]

    def doubled(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        return own(name, func, args, kwargs) * 1.001

    model = seeded(lambda: Careless(nn.GroupNorm(1, 3)))
    with rule_instead("group_norm", doubled):
        return failure(lambda: check_model(model, values(1, 2, 6, 5), where=grid(1, 1, 0, 1)))


@pytest.mark.parametrize("wrong", [wrong_function, wrong_rule])
@pytest.mark.parametrize("nprocs", [2, 3])
def test_the_first_module_that_differs(run: Run, wrong: Any, nprocs: int) -> None:
    found = run(wrong, nprocs=nprocs)
    assert all(each == found[0] for each in found)
    text, modules = found[0]
    assert modules == ["second.1", "second", "third", ""]
    lines = text.splitlines()
    at = lines.index("The first modules whose outputs differ, in the order of execution:")
    assert lines[at + 2].split()[0] == "second.1"
    assert "values and the outputs of 4 of 8 modules differ from one process" in lines[0]
    assert lines[at + 8].split()[0] == "output"  # what differs comes first


class WrongBackward(torch.autograd.Function):
    """A derivative of the part, divided by the number of its values."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * (2 if isinstance(grad, tessel.Tensor) else 1)


class Backwards(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return WrongBackward.apply(x)


def wrong_gradient() -> tuple[str, list[str]]:
    model = seeded(lambda: Careless(Backwards()))
    return failure(lambda: check_model(model, values(1, 2, 6, 5), where=grid(1, 1, 0, 1)))


def test_gradients_that_differ(run: Run) -> None:
    found = run(wrong_gradient, nprocs=2)
    assert found[0] == found[1] and found[0][1] == []
    text = found[0][0]
    assert "The outputs of all modules are correct" in text
    wrong = [line.split()[2] for line in text.splitlines() if line.endswith("←")]
    assert wrong == [
        "first.0.weight",
        "first.0.bias",
        "second.0.weight",
        "second.0.bias",
        "input[0]",
    ]


class OwnStatistics(nn.Module):
    """A buffer that gets what each worker sees of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        part = x.local if isinstance(x, tessel.Tensor) else x
        self.mean.copy_(part.detach().mean())
        return x * 1


def wrong_buffer() -> tuple[str, list[str]]:
    model = seeded(OwnStatistics)
    return failure(lambda: check_model(model, values(4, 3), where=grid(0, 1)))


def test_buffers_that_differ(run: Run) -> None:
    found = run(wrong_buffer, nprocs=2)
    assert found[0] == found[1]
    wrong = [line for line in found[0][0].splitlines() if line.endswith("←")]
    assert len(wrong) == 1 and wrong[0].split()[:2] == ["buffer", "mean"]


class OtherKind(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x.float(), 1) if isinstance(x, tessel.Tensor) else (x, 2)


def other_kinds() -> tuple[str, list[str]]:
    return failure(lambda: check_model(OtherKind(), values(4, 3), where=grid(0, 1)))


def test_outputs_of_another_kind(run: Run) -> None:
    text, _ = run(other_kinds, nprocs=2)[0]
    assert "float32 (4, 3) is not float64 (4, 3)" in text and "1 is not 2" in text


def rounding() -> tuple[str, str]:
    """An error of 0.1 %: too much, unless it is allowed."""
    own = RULES["group_norm"]

    def almost(name: str, func: Any, args: Any, kwargs: Any) -> Any:
        return own(name, func, args, kwargs) * 1.001

    model, x, P = seeded(lambda: Careless(nn.GroupNorm(1, 3))), values(1, 2, 6, 5), grid(1, 1, 0, 1)
    with rule_instead("group_norm", almost):
        assert check_model(model, x, where=P, rtol=1e-2).passed
        assert check_model(model, x, where=P, atol=10.0).passed
        single, _ = failure(lambda: check_model(model.float(), x.float(), where=P))
        double, _ = failure(lambda: check_model(model, x, where=P, dtype=torch.float64))
    return single, double


def test_tolerances(run: Run) -> None:
    for single, double in run(rounding, nprocs=2):
        assert "check with dtype=torch.float64" in single
        assert "dtype=torch.float64" not in double


# -- models that raise ----------------------------------------------------------------------------


class Raising(nn.Module):
    """It raises on one worker: in one process, converted, or in the backward pass."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.before = nn.Conv2d(2, 2, 3, padding=1)
        self.after = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Any) -> Any:
        spread = isinstance(x, tessel.Tensor)
        here = tessel.world().rank == tessel.world().size - 1
        y = self.before(x)
        if self.when == "everywhere" and spread:
            raise KeyError("on all workers")
        if here and (self.when == "one process" or (self.when == "converted" and spread)):
            raise KeyError("on one worker")
        if self.when == "last" and here and spread:
            self.after(y)
            raise KeyError("on one worker")
        if self.when == "branch" and here and spread:
            return self.after(y.relu())
        if self.when == "backward" and here and spread:
            y.register_hook(lambda grad: {}["on one worker"])
        return self.after(y)


WHENS = ("one process", "converted", "everywhere", "last", "branch", "backward")


def raises(when: str) -> tuple[str, float]:
    model = seeded(lambda: Raising(when))
    x, P = values(1, 2, 6, 5), grid(1, 1, 0, 1)
    text, _ = failure(lambda: check_model(model, x, where=P))
    after = check_model(seeded(Twice), x, where=P)  # workers are in step
    return text, after.passed


class DrawingAndRaising(nn.Module):
    """It draws random numbers, and raises on the last worker in one process."""

    def forward(self, x: Any) -> Any:
        last = tessel.world().rank == tessel.world().size - 1
        if last and not isinstance(x, tessel.Tensor):
            raise KeyError("on one worker")
        return F.dropout(x, 0.5, True)


def draws_and_raises() -> tuple[str, bool]:
    P = grid(1, 1, 0, 1)
    x = tessel.spread(values(1, 2, 6, 5), P)
    text, _ = failure(lambda: check_model(DrawingAndRaising(), x, where=P))
    after = check_model(seeded(Twice), values(1, 2, 6, 5), where=P)  # workers are in step
    return text, after.passed


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_model_that_draws_and_raises_on_one_worker_leaves_nobody_waiting(
    run: Run, nprocs: int
) -> None:
    found = run(draws_and_raises, nprocs=nprocs, timeout=60)
    assert all(each == found[0] for each in found)
    text, passed = found[0]
    assert passed and f"on workers [{nprocs - 1}] KeyError: 'on one worker'" in text
    assert "raises in one process" in text


@pytest.mark.parametrize("when", WHENS)
@WORKERS
def test_a_model_that_raises_makes_all_raise(run: Run, when: str, nprocs: int) -> None:
    if when == "branch" and nprocs == 1:
        return  # on one worker, it is a model that differs
    found = run(raises, when, nprocs=nprocs, timeout=60)
    assert all(each == found[0] for each in found)
    text, passed = found[0]
    assert passed and text.startswith("check_model: Raising")
    last, everyone = nprocs - 1, list(range(nprocs))
    if when == "everywhere":
        assert f"converted, raises, on workers {everyone} KeyError: 'on all workers'" in text
    elif when == "branch":
        assert (
            "all workers must make the same calls" in text and f"worker {last} calls `relu`" in text
        )
        assert "`after` (Conv2d) of Raising" in text
    else:
        assert f"on workers [{last}] KeyError: 'on one worker'" in text
        assert ("raises in one process" in text) == (when == "one process")


class Attending(nn.Module):
    """One head of a split sequence, in a block that the backward pass computes again."""

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

        return checkpoint(block, x + block(x), use_reentrant=False)


def attended() -> tuple[tuple[str, ...], str]:
    report = check_model(Attending(), values(1, 1, 9, 4), where=grid(1, 1, 0, 1))
    return report.attention, str(report)


def test_ways_of_attention_are_told(run: Run) -> None:
    for ways, text in run(attended, nprocs=2):
        assert ways == ("gather", "gather")
        assert "Ways of attention, and in how many calls: gather (2)." in text
    assert run(attended, nprocs=1)[0][0] == ("local", "local")


def strict() -> str:
    class Volume(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cond(x)

    eye = (2 * torch.eye(4, dtype=torch.float64)).expand(2, 4, 4)
    report = check_model(Volume(), eye, where=grid(1, 0, 1))
    assert [each.name for each in report.gathers] == ["linalg_cond"]
    assert report.gathers[0].num_bytes == 256 and report.gathers[0].place.module == "Volume"
    assert "`linalg_cond`  256 B" in str(report) and "test_check_model.py:" in str(report)
    return failure(lambda: check_model(Volume(), eye, where=grid(1, 0, 1), fallback="raise"))[0]


def test_what_gathers_is_told(run: Run) -> None:
    texts = run(strict, nprocs=2)
    assert (
        texts[0] == texts[1]
        and "on workers [0, 1] UnsupportedError: torch's `linalg_cond`" in texts[0]
    )


# -- what cannot be checked -----------------------------------------------------------------------


def refused(case: str) -> str:
    P, x = grid(1, 1, 0, 1), values(1, 2, 6, 5)
    rank = tessel.world().rank
    model: Any = seeded(Twice)
    settings: dict[str, Any] = {}
    if case == "converted":
        model = tessel.nn.distribute_module(model, P)
    elif case == "layer":
        model.layer = tessel.nn.DistributedConv2d(P, 2, 2, 3)
    elif case == "input":
        x = x + rank
    elif case == "model":
        model = seeded(Twice if rank else lambda: ResNet18(2))
    elif case == "mode":
        model.train(rank == 0)
    elif case == "settings":
        settings = {"seed": rank}
    elif case == "dims":
        x = x[0]
    elif case == "layout":
        settings = {"where": Layout.balanced(P, (1, 2, 6, 6))}
    elif case == "calls":
        settings = {"calls": 0}
    with pytest.raises(ValueError) as caught:
        check_model(model, x, **({"where": P} | settings))
    return str(caught.value)


REFUSED = {
    "converted": "it converts itself: Twice is already distributed",
    "layer": "DistributedConv2d 'layer' is already distributed",
    "input": "input[0] differs between worker 0 and worker 1",
    "model": "the model differs between worker 0 and worker 1",
    "mode": "the model differs between worker 0 and worker 1",
    "settings": "the settings differs between worker 0 and worker 1",
    "dims": "an input with 4 dimensions, as many as the grid has axes",
    "layout": "no input has the shape of Layout((1, 2, 6, 6)",
    "calls": "calls must be at least 1, got 0",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_checked(run: Run, case: str) -> None:
    texts = run(refused, case, nprocs=2)
    assert texts[0] == texts[1] and REFUSED[case] in texts[0]


def test_where_is_a_partition() -> None:
    with pytest.raises(TypeError, match=r"where must be a tessel.Partition or a tessel.Layout"):
        check_model(nn.ReLU(), torch.ones(2), where=[1])  # type: ignore[arg-type]


# -- nothing is left behind -----------------------------------------------------------------------


def untouched() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Dropout()))
    model[1].eval()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("called"))
    x = values(2, 2, 6, 6).requires_grad_()
    model(x).sum().backward()
    calls.clear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()] + [x.grad.clone()]
    forwards = [each.__dict__.get("forward") for each in model.modules()]
    torch.manual_seed(tessel.world().rank)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    modes = [each.training for each in model.modules()]
    check_model(model, x, where=grid(1, 1, 0, 1))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]
    assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())
    after = [*(p.grad for p in model.parameters()), x.grad]
    assert all(torch.equal(a, b) for a, b in zip(grads, after, strict=True))
    assert [each.training for each in model.modules()] == modes
    assert [each.__dict__.get("forward") for each in model.modules()] == forwards
    assert len(model[0]._forward_hooks) == 1 and not model[1]._forward_hooks
    assert tessel.Tensor.above is call.above


@WORKERS
def test_the_model_stays_as_it_is(run: Run, nprocs: int) -> None:
    run(untouched, nprocs=nprocs)


def parameters_of_the_first() -> bool:
    torch.manual_seed(tessel.world().rank)
    return check_model(Answering(), values(5, 4).float(), where=grid(0, 1)).passed


def test_workers_may_have_drawn_other_parameters(run: Run) -> None:
    assert run(parameters_of_the_first, nprocs=2) == [True, True]


def some_workers() -> str:
    P = tessel.world().create_partition_inclusive([1, 2])
    where = P.create_cartesian_topology_partition([1, 1, 2, 1])
    text = str(check_model(seeded(Twice), values(2, 2, 6, 5), where=where))
    # which agrees with all workers of the job, of which one is not there
    wrong, _ = failure(
        lambda: check_model(seeded(lambda: Careless(Neighbours())), values(1, 2, 6, 5), where=where)
    )
    assert "worker 1 calls tessel.from_local" in wrong
    raised, _ = failure(
        lambda: check_model(Raising("converted"), values(1, 2, 6, 5).float(), where=where)
    )
    return text + wrong + raised


def test_workers_outside_of_the_partition(run: Run) -> None:
    texts = run(some_workers, nprocs=3)
    assert len(set(texts)) == 1 and "on workers [2] KeyError: 'on one worker'" in texts[0]


def figures() -> ModelReport:
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, bias=False), nn.ReLU()).double()
    return check_model(model, values(1, 1, 8, 4), where=grid(1, 1, 0, 1))


def test_figures(run: Run) -> None:
    """A row of four numbers goes each way, and the middle one of three workers sends two."""
    (alone,) = run(figures, nprocs=1)
    assert alone.bytes_forward == alone.bytes_backward == 0
    for nprocs, rows in ((2, 1), (3, 2)):
        for report in run(figures, nprocs=nprocs):
            assert report.bytes_forward == report.modules[0].bytes_sent == rows * 4 * 8
            assert report.modules[1].bytes_sent == 0
            assert [each.bytes_stored for each in report.modules] == [72, 0, 72]
            assert report.modules[1].bytes_kept == -(-8 // nprocs) * 4 * 8
            assert report.peak > 0 and report.peak_alone > 0


WIDE = 100  # channels: of a weight 80 kB


def memory_of_weights() -> ModelReport:
    """Small pictures, and weights whose gradients are nearly all of a step."""
    layers = [nn.Conv2d(WIDE, WIDE, 1, bias=False) for _ in range(3)]
    inputs = values(1, WIDE, 4, 1)
    return check_model(nn.Sequential(*layers).double(), inputs, where=grid(1, 1, 0, 1))


def memory_of_pictures() -> ModelReport:
    """A large picture, and a weight that is nothing beside it."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.Sigmoid()).double()
    return check_model(model, values(1, 1, 400, 10), where=grid(1, 1, 0, 1))


def test_memory_is_that_of_a_step_after_zero_grad(run: Run) -> None:
    """Gradients count, in one process as well, and nothing that only the check has whole."""
    unit, small = WIDE * WIDE * 8, 40_000
    (alone,) = run(memory_of_weights, nprocs=1)
    assert 3 * unit <= alone.peak_alone <= 3 * unit + small
    split, _ = run(memory_of_weights, nprocs=2)
    assert split.peak_alone == alone.peak_alone
    picture = 400 * 10 * 8
    for nprocs in (1, 2, 4):
        for report in run(memory_of_pictures, nprocs=nprocs):
            # what is called with, what two layers give, and the gradients of one and of its input
            assert picture * 4 <= report.peak_alone <= picture * 4 + 100
            assert report.peak <= report.peak_alone / nprocs + 500
