"""Formats: how tensors of which each worker has a box are stored in a folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from tessel.core.agreement import tell
from tessel.core.layout import Layout, Shape
from tessel.core.partition import world
from tessel.state.folders import Keys, whole_folder
from tessel.tensor import Tensor

NamedTensors = Mapping[Keys, Tensor]


def flattened(x: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """All values in dicts of dicts, and where they are."""
    if not isinstance(x, Mapping):
        yield keys, x
        return
    for key, value in x.items():
        if not isinstance(key, str):
            raise TypeError(f"names of tensors must be strings, got {key!r}")
        yield from flattened(value, (*keys, key))


def nested(found: Mapping[Keys, Any]) -> Any:
    """Values in dicts of dicts, by where they are: the inverse of `flattened`."""
    if () in found:
        return found[()]
    outer: dict[str, Any] = {}
    for keys, value in found.items():
        holder = outer
        for key in keys[:-1]:
            holder = holder.setdefault(key, {})
        holder[keys[-1]] = value
    return outer


def said_of(keys: Keys, given: Any) -> Any:
    """The argument for one tensor, from dicts of the same structure or for all; None if none."""
    for key in keys:
        given = given.get(key) if isinstance(given, Mapping) else given
    return given


class Stored(NamedTuple):
    """The description of a tensor in a folder."""

    shape: Shape
    dtype: torch.dtype
    requires_grad: bool


class Format(ABC):
    """A format of folders. Only `write` communicates."""

    marks: ClassVar[tuple[str, ...]]  # files by which its folders are recognised

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether a folder is one of this format."""
        return any((folder / name).exists() for name in cls.marks)

    def save(self, call: str, folder: Path, state: NamedTensors) -> None:
        """Write a folder under another name, and rename it when all workers have written it.

        Only then anything with its name is removed. All workers raise if one fails.
        """
        # the folder of the first worker, since others may have another working directory
        first = Path(next(iter(tell(world(), str(folder)).values())))
        prepare = partial(self.prepare, state=state)
        with whole_folder(call, first, world(), prepare) as (unfinished, _):
            self.write(unfinished, state)

    @abstractmethod
    def check(self, state: NamedTensors) -> None:
        """Raise if it cannot store something, or if its package is missing."""

    def prepare(self, folder: Path, state: NamedTensors) -> None:  # noqa: B027  # there may be nothing
        """Create the contents of the folder before workers write, on the first worker."""

    @abstractmethod
    def write(self, folder: Path, state: NamedTensors) -> None:
        """Write this worker's boxes, on all workers together.

        Errors are raised at the end, since others wait for this worker's parts before.
        """

    @abstractmethod
    def stored(self, folder: Path) -> dict[Keys, Stored]:
        """The descriptions of the tensors in a folder."""

    @abstractmethod
    def read(self, folder: Path, layouts: Mapping[Keys, Layout]) -> dict[Keys, torch.Tensor]:
        """This worker's boxes of tensors in these layouts."""


def part_in(layout: Layout, x: Tensor) -> torch.Tensor:
    """This worker's part of a tensor that moves to a layout; all workers call this."""
    with torch.no_grad():
        detached: Any = x.detach()
        part: torch.Tensor = detached.move_to(layout).local
    return part
