"""Checkpoints of `torch.distributed.checkpoint`: whole tensors in pieces, with their boxes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tessel.core.layout import Layout
from tessel.data.formats import Format, Keys, State, Stored, owned_once
from tessel.state.checkpoint import Part, checkpoint_reader

ALONE = "tensor"  # the name of a tensor that is in no dict


class CheckpointFormat(Format):
    """A checkpoint with the names that torch gives to values in dicts of dicts."""

    def check(self, state: State) -> None:
        if [*state] == [(ALONE,)]:
            raise ValueError(
                f"a dict that has {ALONE!r} alone reads as one tensor from a checkpoint; use "
                f"another name"
            )

    def prepare(self, folder: Path, state: State) -> None:
        folder.mkdir()

    def write(self, folder: Path, state: State) -> Exception | None:
        # imported here, since it takes half a second
        from torch.distributed.checkpoint import FileSystemWriter, save

        nested: dict[str, Any] = {}
        for keys, x in state.items():
            part, writes = owned_once(x, layout := _once(x.layout))
            *outer, last = keys or (ALONE,)
            holder = nested
            for key in outer:
                holder = holder.setdefault(key, {})
            piece = Part.of(part.requires_grad_(x.requires_grad), layout)
            holder[last] = piece if writes else Part(part, layout.shape, None)
        try:
            with _silence():
                save(nested, storage_writer=FileSystemWriter(folder))
        except Exception as error:  # whatever torch raises is told to all workers
            return error
        return None

    def stored(self, folder: Path) -> dict[Keys, Stored]:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        found = {}
        for keys, (name, entry) in _entries(folder).items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(
                    f"{name!r} of {folder} is no tensor; torch.distributed.checkpoint.load reads "
                    f"such checkpoints"
                )
            kind = entry.properties
            found[keys] = Stored(tuple(entry.size), kind.dtype, bool(kind.requires_grad))
        return found

    def read(self, folder: Path, layouts: Mapping[Keys, Layout]) -> dict[Keys, torch.Tensor]:
        from torch.distributed.checkpoint import load

        entries = _entries(folder)
        kinds = {keys: entries[keys][1].properties.dtype for keys in layouts}
        found = {
            keys: torch.empty(layout.local_shape, dtype=kinds[keys])
            for keys, layout in layouts.items()
        }
        parts = {entries[keys][0]: Part.of(found[keys], layouts[keys]) for keys in layouts}
        with _silence():  # each worker for itself: its metadata say where everything is
            load(parts, storage_reader=checkpoint_reader(folder), no_dist=True)
        return found


def _once(layout: Layout) -> Layout:
    """The layout in which a tensor is written: its own, if it has each value once."""
    shared = tuple(sorted({*layout.shared, *layout.separate}))
    return replace(layout if layout.owns_once else layout.resized(layout.shape), shared=shared)


def _entries(folder: Path) -> dict[Keys, tuple[str, Any]]:
    """What a checkpoint has, with its name there, by where it was in dicts of dicts."""
    metadata = checkpoint_reader(folder).read_metadata()
    paths = metadata.planner_data or {}
    found = {}
    for name, entry in metadata.state_dict_metadata.items():
        keys = tuple(paths.get(name, (name,)))
        if not all(isinstance(key, str) for key in keys):
            raise ValueError(f"{name!r} of {folder} is in a list, and tessel.load reads dicts")
        found[() if keys == (ALONE,) and len(metadata.state_dict_metadata) == 1 else keys] = (
            name,
            entry,
        )
    return found


@contextmanager
def _silence() -> Iterator[None]:
    """Without torch's warning that there is one process, or that others are not asked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
