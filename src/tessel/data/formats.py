"""Formats: how tensors of which each worker has a box are kept in a folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tessel.core.layout import Layout, Shape
from tessel.tensor import Tensor

Keys = tuple[str, ...]  # of a tensor in dicts of dicts; () for one that is alone
State = Mapping[Keys, Tensor]


class Stored(NamedTuple):
    """What a folder says of one of its tensors."""

    shape: Shape
    dtype: torch.dtype
    requires_grad: bool


class Format(ABC):
    """A format of folders. Only `write` communicates."""

    @abstractmethod
    def check(self, state: State) -> None:
        """Raise if there is something that it cannot keep, or no package for it."""

    @abstractmethod
    def prepare(self, folder: Path, state: State) -> None:
        """Make the folder, on the first worker."""

    @abstractmethod
    def write(self, folder: Path, state: State) -> Exception | None:
        """Write this worker's boxes, on all workers at once; what went wrong here."""

    @abstractmethod
    def stored(self, folder: Path) -> dict[Keys, Stored]:
        """What a folder has."""

    @abstractmethod
    def read(self, folder: Path, layouts: Mapping[Keys, Layout]) -> dict[Keys, torch.Tensor]:
        """This worker's boxes of tensors in these layouts."""


def part_in(layout: Layout, x: Tensor) -> torch.Tensor:
    """This worker's part of a tensor that moves to a layout; all workers call this."""
    with torch.no_grad():
        detached: Any = x.detach()
        part: torch.Tensor = detached.move_to(layout).local
    return part


def is_writer(layout: Layout, worker: int) -> bool:
    """Whether a worker is the first of those who have its part, where copies are shared."""
    index = layout.partition.coordinates(worker)
    return index is not None and not any(index[axis] for axis in layout.shared)
