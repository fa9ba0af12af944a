"""Entries of the zoo: models of other packages, and the ways in which each is split.

A file `<package>_entries.py` has the entries of a package in a list `ENTRIES`. It imports the
package only inside of functions: the list can be read where the package is not installed.
`examine` runs one entry on one grid, on every worker; `test_zoo.py` calls it, and `zoo_page.py`
makes a page of what was found.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import tessel
from tessel.testing import check_model

FILES = {  # of the entries of each package, by the name by which it is imported
    "torch": "torch_entries",
    "torchvision": "torchvision_entries",
    "timm": "timm_entries",
    "segmentation_models_pytorch": "smp_entries",
    "monai": "monai_entries",
    "deepinv": "deepinv_entries",
    "diffusers": "diffusers_entries",
    "transformers": "transformers_entries",
    "neuralop": "neuralop_entries",
    "torch_geometric": "geometric_entries",
}
MOST_USED = (  # which must not gather anything
    *(("torchvision", name) for name in ("resnet18", "ResNet, bottlenecks", "EfficientNet")),
    *(("torchvision", name) for name in ("ConvNeXt", "DeepLabV3")),
    *(("timm", name) for name in ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224")),
    ("segmentation_models_pytorch", "Unet, resnet18"),
    *(("monai", name) for name in ("UNet", "SegResNet", "SwinUNETR")),
    *(("diffusers", name) for name in ("UNet2DConditionModel", "AutoencoderKL")),
    *(("diffusers", name) for name in ("SD3Transformer2DModel", "FluxTransformer2DModel")),
    *(("transformers", name) for name in ("BERT", "GPT2", "Llama", "CLIP")),
    ("neuralop", "FNO"),
)
# whose modules compute in single precision here and there, whatever dtype a model has
WIDENED = ("diffusers.", "transformers.", "neuralop.layers.spectral_convolution")
SINGLE = torch.Tensor.float
# of a block that is computed again: torch alone cannot do it, either
CHANGES_LISTS = "a block changes a list that it is given, so torch alone cannot compute it again"
RESULTS = Path(__file__).parents[2] / "build" / "zoo"
TOLERANCE = 1e-9  # relative to the largest value of a tensor, as `check_model` has it
LIMIT = 120.0  # seconds for one entry on one grid; most take a few on a quiet machine

Grid = tuple[int, ...]
ROWS, COLUMNS, QUARTERS = (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2)  # of pictures
THIRDS, SAMPLES = (1, 1, 3, 1), (2, 1, 1, 1)
SLABS, BEAMS = (1, 1, 2, 1, 1), (1, 1, 1, 2, 2)  # of volumes and films
TOKENS = (1, 2, 1)  # of sequences with features


@dataclass(frozen=True)
class ZooEntry:
    """A model of a package, what it is called with, and the grids over which it is split.

    Args:
        package: by which it is imported.
        name: of the entry; no other one of the package has it.
        make: makes the model, with random weights and without a network.
        inputs: makes what it is called with: a tuple of arguments, or a dict of them by name.
            Tensors with as many dimensions as a grid has axes are spread, others stay whole.
        train: the grids on which it is run in training mode.
        eval: the same in evaluation mode.
        method: what is called, if not the model itself.
        loss: of the output, as for `check_model`; by default a weighted sum.
        spread: spreads the inputs otherwise: it gets them and the partition, and returns them.
        gathers: functions that gather their operands, since they have no rule; others must not.
        raises: part of the error, for a model that cannot be split; empty for one that can.
        because: why it raises or gathers, for the page.
        tolerance: a larger one, for what a model computes in single precision, whatever its dtype.
        unsupported: uses of `test_uses_of_models.py` that fail: the error, a colon, and why.
        uses_in_training: whether these are of a model in training mode.
        draws: whether it draws random numbers in them.
        limit: seconds for one grid.
    """

    package: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    train: tuple[Grid, ...] = (ROWS,)
    eval: tuple[Grid, ...] = (QUARTERS,)
    method: str = "forward"
    loss: Callable[[Any], Tensor] | None = None
    spread: Callable[[Any, tessel.Partition], Any] | None = None
    gathers: frozenset[str] = frozenset()
    raises: str = ""
    because: str = ""
    tolerance: float = TOLERANCE
    unsupported: dict[str, str] = field(default_factory=dict)
    uses_in_training: bool = False
    draws: bool = False
    limit: float = LIMIT

    def splits(self) -> Iterator[tuple[Grid, bool]]:
        """Each grid, and whether the model is in training mode."""
        yield from ((grid, True) for grid in self.train)
        yield from ((grid, False) for grid in self.eval)


@dataclass
class ZooResult:
    """What was found about an entry on one grid.

    Attributes:
        verdict: `exact`, `wrong`, `raises` or `late`.
        error: the largest, relative to the largest value of its tensor.
        sent: bytes that a worker sends in a step, forward and backward.
        share: of the memory that one process takes for the tensors of a step.
        gathered: functions that gathered their operands.
        said: the error of a model that is not exact.
    """

    package: str
    name: str
    split: str
    verdict: str
    error: float = math.nan
    sent: int = 0
    share: float = math.nan
    gathered: list[str] = field(default_factory=list)
    said: str = ""
    because: str = ""
    seconds: float = 0.0

    def save(self) -> None:
        """Keep it in a file, of which the page is made."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        name = f"{self.package} {self.name} {self.split}".replace(os.sep, "_")
        (RESULTS / f"{name}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load_all(cls) -> list[ZooResult]:
        return [cls(**json.loads(each.read_text())) for each in sorted(RESULTS.glob("*.json"))]


@dataclass
class UsesResult:
    """What came of the uses of an entry, split over a grid.

    Attributes:
        failed: the errors, by use.
        unsupported: why, of those that are known to fail.
        times: processor time of the first worker, by use; `seconds` of all of them.
    """

    package: str
    name: str
    split: str
    failed: dict[str, str] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def save(self) -> None:
        """Keep it in a file, of which the page is made."""
        folder = RESULTS / "uses"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.package} {self.name}".replace(os.sep, "_")
        (folder / f"{name}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load_all(cls) -> list[UsesResult]:
        files = sorted((RESULTS / "uses").glob("*.json"))
        return [cls(**json.loads(each.read_text())) for each in files]


class MethodModel(nn.Module):
    """A method of a model as a model of its own."""

    def __init__(self, inner: nn.Module, method: str) -> None:
        super().__init__()
        self.inner, self.method = inner, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, self.method)(*args, **kwargs)


def all_entries() -> list[ZooEntry]:
    """The entries of all packages, whether these are installed or not."""
    return [each for package in FILES for each in entries_of(package)]


def entries_of(package: str) -> list[ZooEntry]:
    """The entries of a package."""
    return list(importlib.import_module(FILES[package]).ENTRIES)


def made_by(module: str, name: str, /, *args: Any, **settings: Any) -> Callable[[], nn.Module]:
    """Makes a model by the name of its class or function; its module is imported only then."""
    return lambda: getattr(importlib.import_module(module), name)(*args, **settings)


def floats(*shape: int, seed: int = 1) -> Callable[[], tuple[Tensor, ...]]:
    """An input of random numbers, such as a batch of pictures."""
    return lambda: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)),)


def split_name(grid: Grid, training: bool) -> str:
    """A grid and a mode in words: `1×1×2×1, train`."""
    return f"{'×'.join(map(str, grid))}, {'train' if training else 'eval'}"


def examine(package: str, name: str, grid: Grid, training: bool, device: str = "cpu") -> ZooResult:
    """Compare an entry, split over a grid, with one process; on all workers of the grid."""
    (entry,) = (each for each in entries_of(package) if each.name == name)
    result = ZooResult(package, name, split_name(grid, training), "exact", because=entry.because)
    begin = time.monotonic()
    model = made_in_double(entry).train(training).to(device)
    with floating(torch.float64), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package, and of gathers, which are in the report
        if entry.method != "forward":
            model = MethodModel(model, entry.method).train(training)
        inputs = tree_map_only(Tensor, lambda each: each.to(device), entry.inputs())
        P = tessel.world().create_cartesian_topology_partition(grid)
        if entry.spread is not None:
            inputs = entry.spread(inputs, P)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        try:
            report = check_model(
                model, *args, where=P, kwargs=kwargs, loss=entry.loss, rtol=entry.tolerance
            )
        except AssertionError as error:
            report = getattr(error, "report", None)
            result.verdict, result.said = "raises" if report is None else "wrong", str(error)
    if report is not None:
        share = entry.tolerance
        relative = [share * each.error / each.allowed for each in report.values if each.allowed]
        result.error = max(relative, default=0.0)
        result.sent = report.bytes_forward + report.bytes_backward
        result.share = report.peak / max(1, report.peak_alone)
        result.gathered = sorted({each.name for each in report.gathers})
    result.seconds = time.monotonic() - begin
    return result


class TorchInDouble:
    """What models take for torch: where they ask for single precision, they get double.

    Some do so for norms, positions, softmax or losses, whatever dtype they have themselves.
    """

    float32 = float = torch.float64
    complex64 = cfloat = torch.complex128

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def floating(dtype: torch.dtype) -> Iterator[None]:
    """Models make tensors of their own in this dtype, and those of `WIDENED` compute in no other.

    That is what is compared: rounding to single precision would make 1e-7 of a difference in the
    last place of a double. Modules that are imported later are left alone.
    """
    before, single = torch.get_default_dtype(), torch.Tensor.float
    changed = []
    torch.set_default_dtype(dtype)
    torch.Tensor.float = SINGLE  # type: ignore[method-assign]
    if dtype == torch.float64:
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        own = vars(module).get("torch")
        is_changed = isinstance(own, TorchInDouble)
        if name.startswith(WIDENED) and is_changed != (dtype == torch.float64) and own:
            changed.append((module, own))
            vars(module)["torch"] = torch if is_changed else TorchInDouble()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.Tensor.float = single  # type: ignore[method-assign]
        for module, own in changed:
            vars(module)["torch"] = own


def made_in_double(entry: ZooEntry) -> nn.Module:
    """The model of an entry; this imports what `floating` is to change afterwards."""
    with floating(torch.float64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return unsettled(entry.make()).double()


def unsettled(model: nn.Module) -> nn.Module:
    """Add a little to all parameters: those that begin with zero or one would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter += 0.02 * torch.randn_like(parameter)
    return model
