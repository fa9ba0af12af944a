"""Checkpoints of `torch.distributed.checkpoint`: whole tensors in pieces, with their boxes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tessel.core.layout import Layout
from tessel.core.partition import world
from tessel.data.formats import Format, Keys, NamedTensors, Stored, part_in
from tessel.state.checkpoint import Part
from tessel.state.folders import read_parts, stored_in, write_parts

ALONE = "tensor"  # the name of a tensor that is in no dict


class CheckpointFormat(Format):
    """Checkpoints with torch's names of values in dicts of dicts."""

    marks = (".metadata",)

    def check(self, state: NamedTensors) -> None:
        if [*state] == [(ALONE,)]:
            raise ValueError(
                f"a dict whose only key is {ALONE!r} would be read as a single tensor from a "
                "checkpoint; use another name"
            )
        names: dict[str, Keys] = {}
        for keys in state:
            if names.setdefault(".".join(keys), keys) != keys:
                raise ValueError(
                    f"{keys} and {names['.'.join(keys)]} have the same name in a checkpoint"
                )

    def write(self, folder: Path, state: NamedTensors) -> None:
        parts = {}
        for keys, x in state.items():
            # in its own layout, if that has each value once
            own = x.layout
            layout = own if own.owns_once else own.resized(own.shape).summed
            part = part_in(layout, x).requires_grad_(x.requires_grad)
            parts[keys or (ALONE,)] = Part.of(part, layout)
        write_parts(folder, parts, world(), world().ranks)

    def stored(self, folder: Path) -> dict[Keys, Stored]:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        found = {}
        for keys, (name, entry) in _entries(folder).items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(
                    f"{name!r} of {folder} is not a tensor; torch.distributed.checkpoint.load "
                    f"reads such checkpoints"
                )
            kind = entry.properties
            found[keys] = Stored(tuple(entry.size), kind.dtype, bool(kind.requires_grad))
        return found

    def read(self, folder: Path, layouts: Mapping[Keys, Layout]) -> dict[Keys, torch.Tensor]:
        entries = _entries(folder)
        kinds = {keys: entries[keys][1].properties.dtype for keys in layouts}
        found = {
            keys: torch.empty(layout.local_shape, dtype=kinds[keys])
            for keys, layout in layouts.items()
        }
        parts = {entries[keys][0]: Part.of(found[keys], layouts[keys]) for keys in layouts}
        read_parts(folder, parts)
        return found


def _entries(folder: Path) -> dict[Keys, tuple[str, Any]]:
    """The entries of a checkpoint with their names, by their keys in dicts of dicts."""
    entries, paths = stored_in(folder)
    found = {}
    for name, entry in entries.items():
        keys = paths[name]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError(f"{name!r} of {folder} is inside a list; tessel.load reads only dicts")
        found[() if keys == (ALONE,) and len(entries) == 1 else keys] = name, entry
    return found
