"""What users do with a model of another package around its conversion: its numbers remain.

Models are in evaluation mode, in which nothing is drawn, and have gradients all the same.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

import tessel
from entries import ZooEntry, entries_of, float64, unsettled

Run = Callable[..., list[Any]]
ENTRIES = [
    ("torch", "TransformerEncoder"),
    ("torchvision", "ResNet, bottlenecks"),
    ("timm", "swin_tiny_patch4_window7_224"),
    ("timm", "vit_tiny_patch16_224"),
    ("segmentation_models_pytorch", "Unet, resnet18"),
    ("monai", "SegResNet"),
    ("monai", "UNETR"),
    ("diffusers", "AutoencoderKL"),
    ("diffusers", "UNet2DConditionModel"),
    ("transformers", "Llama"),
    ("transformers", "BERT"),
    ("neuralop", "FNO"),
]
pytestmark = pytest.mark.zoo


class Used:
    """A model alone and a converted one, and what each is called with."""

    def __init__(self, entry: ZooEntry) -> None:
        self.entry, self.tolerance = entry, max(entry.tolerance, 1e-9)
        self.grid = tessel.world().create_cartesian_topology_partition(entry.train[0])
        self.inputs = entry.inputs()
        spread = entry.spread or (lambda inputs, P: tree_map(self.part, inputs))
        self.parts = spread(self.inputs, self.grid)
        torch.manual_seed(0)
        self.model = unsettled(entry.make()).double().eval()
        self.expected = [each.detach() for each in self.called(self.made(), self.inputs)]

    def part(self, value: Any) -> Any:
        is_split = isinstance(value, Tensor) and value.dim() == self.grid.dim
        return tessel.spread(value, self.grid) if is_split else value

    def made(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def converted(self, model: nn.Module | None = None) -> Any:
        return tessel.nn.distribute_module(self.made() if model is None else model, self.grid)

    def called(self, model: Any, inputs: Any) -> list[Tensor]:
        """All numbers that a model gives."""
        method = model if self.entry.method == "forward" else getattr(model, self.entry.method)
        found = method(**inputs) if isinstance(inputs, dict) else method(*inputs)
        if not isinstance(found, (Tensor, tuple, list)):
            found = dict(found) if hasattr(found, "keys") else vars(found)
        leaves = tree_flatten(found)[0]
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    def slopes(self, model: Any, inputs: Any, times: int = 1) -> dict[str, Tensor]:
        """The gradients of the squares of what a model gives."""
        for _ in range(times):
            sum(x.square().sum() for x in self.called(model, inputs)).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def assert_same(self, spread: Any, limit: float | None = None) -> None:
        """Outputs are those of one process."""
        got = self.called(spread, self.parts)
        assert len(got) > 0
        for one, other in zip(self.expected, got, strict=True):
            self.close(one, other, limit)

    def close(
        self, one: Tensor, other: Any, limit: float | None = None, scale: float | None = None
    ) -> None:
        """Equal, relative to the largest value if no scale is given."""
        whole = other.full() if isinstance(other, tessel.Tensor) else other
        scale = scale or max(float(one.detach().abs().max()), 1e-12)
        error = float((one.detach() - whole.detach()).abs().max()) / scale
        assert error <= (self.tolerance if limit is None else limit), error


def state(used: Used) -> None:
    spread, file = used.converted(), io.BytesIO()
    assert [*spread.state_dict()] == [*used.made().state_dict()]
    torch.save(spread.state_dict(), file)
    file.seek(0)
    plain = used.made()
    with torch.no_grad():
        for each in plain.parameters():
            each.zero_()
    plain.load_state_dict(torch.load(file, weights_only=False))  # neuralop's has functions in it
    used.assert_same(used.converted(plain))


def copied(used: Used) -> None:
    spread = used.converted()
    used.assert_same(copy.deepcopy(spread))
    used.assert_same(pickle.loads(pickle.dumps(spread)))


def hooked(used: Used) -> None:
    counts = []
    for model, inputs in ((used.made(), used.inputs), (used.converted(), used.parts)):
        seen: list[str] = []
        for name, module in model.named_modules():
            note = partial(seen.append, name)
            module.register_forward_hook(lambda *args, note=note: note())
        used.called(model, inputs)
        counts.append(seen)
    assert counts[0] == counts[1] and len(counts[0]) > 3


def averaged(used: Used) -> None:
    spread = used.converted()
    average = AveragedModel(spread)
    average.update_parameters(spread)
    used.assert_same(average.module)


def compiled_inside(used: Used) -> None:
    spread = used.converted()
    blocks = [each for each in spread.modules() if isinstance(each, (nn.Linear, nn.Conv2d))]
    for block in blocks[:2]:
        block.compile(backend="eager")
    used.assert_same(spread)


def recomputed(used: Used) -> None:
    expected = used.slopes(used.made(), used.inputs)
    spread = used.converted()
    sum(
        x.square().sum()
        for x in checkpoint(partial(used.called, spread), used.parts, use_reentrant=False)
    ).backward()
    got = {n: p.grad for n, p in spread.named_parameters() if p.grad is not None}
    assert expected.keys() == got.keys()
    # some have gradients of zero, but for rounding, as biases of keys
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, each in expected.items():
        used.close(each / largest, got[name] / largest, scale=1.0)


def in_halves(used: Used) -> None:
    """Autocast gives the same dtypes, and values that differ by its own rounding."""
    if any(each.is_complex() for each in used.model.parameters()):
        return  # `float()` leaves them in double precision, with which torch's own model raises
    found = []
    for model, inputs in ((used.made(), used.inputs), (used.converted(), used.parts)):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(used.called(model.float(), tree_map(single, inputs)))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        used.close(one.float(), other.float(), 0.2)


def single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def trained(used: Used) -> None:
    """Gradients of two passes are added up and clipped, and a scheduler sets the step."""
    results = []
    for model, inputs in ((used.made(), used.inputs), (used.converted(), used.parts)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        norms = []
        for _ in range(2):
            optimizer.zero_grad()
            used.slopes(model, inputs, times=2)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            scheduler.step()
        results.append([*norms, *model.parameters()])
    for one, other in zip(*results, strict=True):
        used.close(one, other, 1e2 * used.tolerance)  # clipping divides by a norm of large numbers


USES = (state, copied, hooked, averaged, compiled_inside, recomputed, in_halves, trained)


def check_uses(package: str, name: str) -> None:
    (entry,) = (each for each in entries_of(package) if each.name == name)
    failed = []
    with float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        used = Used(entry)
        for use in USES:
            try:
                use(used)
            except (AssertionError, RuntimeError, TypeError, ValueError, AttributeError) as error:
                failed.append(f"{use.__name__}: {type(error).__name__}: {error}")
    torch.compiler.reset()
    assert not failed, failed


def cases() -> Iterator[Any]:
    for package, name in ENTRIES:
        yield pytest.param(package, name, id=f"{package}: {name}")


@pytest.mark.limit(150)
@pytest.mark.parametrize(("package", "name"), list(cases()))
def test_uses_of_a_model(run: Run, package: str, name: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make zoo")
    run(check_uses, package, name, nprocs=2, timeout=120)
