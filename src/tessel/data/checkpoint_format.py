"""Checkpoints of `torch.distributed.checkpoint`: whole tensors in pieces, with their boxes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tessel.core.agreement import tell
from tessel.core.layout import Layout
from tessel.core.partition import world
from tessel.data.formats import Format, Keys, State, Stored, is_writer, part_in
from tessel.state.checkpoint import Part, checkpoint_reader
from tessel.tensor import Tensor

ALONE = "tensor"  # the name of a tensor that is in no dict


class CheckpointFormat(Format):
    """A checkpoint with the names that torch gives to values in dicts of dicts.

    All workers know all layouts, so that each plans alone what everybody writes. Torch's own `save`
    would exchange plans as pickles.
    """

    marks = (".metadata",)

    def check(self, state: State) -> None:
        if [*state] == [(ALONE,)]:
            raise ValueError(
                f"a dict that has {ALONE!r} alone reads as one tensor from a checkpoint; use "
                f"another name"
            )
        names: dict[str, Keys] = {}
        for keys in state:
            if names.setdefault(".".join(keys), keys) != keys:
                raise ValueError(f"{keys} and {names['.'.join(keys)]} have one name in checkpoints")

    def prepare(self, folder: Path, state: State) -> None:
        folder.mkdir()

    def write(self, folder: Path, state: State) -> None:
        # imported here, since it takes half a second
        from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.storage import WriteResult

        everyone = world()
        by_name = {".".join(keys) or ALONE: x for keys, x in state.items()}
        # in its own layout, if that has each value once
        layouts = {
            name: own if (own := x.layout).owns_once else own.resized(own.shape).summed
            for name, x in by_name.items()
        }
        plans, metadata = _plans(by_name, layouts)
        metadata.planner_data = {".".join(keys) or ALONE: keys or (ALONE,) for keys in state}
        parts = {
            name: Part.of(part_in(layout, by_name[name]), layout)
            for name, layout in layouts.items()
        }
        writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
        planner.set_up_planner(parts, None, everyone.rank == 0)
        problem: Exception | None = None
        found: list[Any] = []
        try:
            writer.set_up_storage_writer(everyone.rank == 0)
            plan = writer.prepare_global_plan(plans)[everyone.rank or 0]
            # what a worker tells of each piece: its name, its place, and where its file has it
            for each in writer.write_data(plan, planner).value():
                index, at = each.index, each.storage_data
                where = at.relative_path, at.offset, at.length
                found.append((index.fqn, tuple(index.offset or ()), each.size_in_bytes, where))
        except Exception as error:  # whatever the storage raises is told to all workers
            problem = error
        told = tell(everyone, found).values()
        if problem is not None:
            raise problem
        if everyone.rank == 0:
            results = [
                [
                    WriteResult(MetadataIndex(name, torch.Size(at)), size, _StorageInfo(*where))
                    for name, at, size, where in some
                ]
                for some in told
            ]
            writer.finish(metadata, results)

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
        from torch.distributed.checkpoint import load

        entries = _entries(folder)
        kinds = {keys: entries[keys][1].properties.dtype for keys in layouts}
        found = {
            keys: torch.empty(layout.local_shape, dtype=kinds[keys])
            for keys, layout in layouts.items()
        }
        parts = {entries[keys][0]: Part.of(found[keys], layouts[keys]) for keys in layouts}
        with warnings.catch_warnings():
            # Each worker for itself: its metadata say where everything is. Torch would warn that
            # there is one process, or that others are not asked.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(parts, storage_reader=checkpoint_reader(folder), no_dist=True)
        return found


def _plans(state: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> tuple[list[Any], Any]:
    """What each worker writes of tensors in their layouts, and the metadata of all of it."""
    from torch.distributed.checkpoint import SavePlan
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

    plans = []
    for worker in world().ranks:
        items: list[Any] = []
        for name, x in state.items():
            layout = layouts[name]
            kind: Any = {"dtype": x.dtype, "requires_grad": x.requires_grad, "device": "meta"}
            # all parts of an empty tensor are the same piece
            is_piece = 0 not in layout.shape or worker == layout.partition.ranks[0]
            if is_piece and is_writer(layout, worker):
                outline = Part.of(torch.empty(layout.shape_on(worker), **kind), layout, worker)
                items += outline.__create_write_items__(name, None)
        plans.append(SavePlan(items))
    return create_default_global_save_plan(plans)


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
