"""Entries of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from entries import ZooEntry, floats


def model(name: str, **settings: object) -> Callable[[], nn.Module]:
    """A model by its name; no weights are loaded."""

    def make() -> nn.Module:
        from torchvision.models import get_model

        return get_model(name, weights=None, **settings)

    return make


entry = partial(ZooEntry, "torchvision")
CLASSES = 5

ENTRIES = [
    entry("resnet18", model("resnet18", num_classes=CLASSES), floats(4, 3, 64, 64)),
    entry("mobilenet_v2", model("mobilenet_v2", num_classes=CLASSES), floats(4, 3, 64, 64)),
]
