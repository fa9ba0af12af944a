"""Checkpoints of `torch.distributed.checkpoint`: whole tensors in pieces, with their boxes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
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

    def write(self, folder: Path, state: State) -> Exception | None:
        # imported here, since it takes half a second
        from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
        from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

        everyone = world()
        keys_of = {".".join(keys) or ALONE: keys for keys in state}
        layouts = {name: _once(state[keys].layout) for name, keys in keys_of.items()}
        parts = {
            name: Part.of(part_in(layout, state[keys_of[name]]), layout)
            for name, layout in layouts.items()
        }
        items = [
            [
                item
                for name, layout in layouts.items()
                if is_writer(layout, worker)
                # all parts of an empty tensor are the same piece
                and (0 not in layout.shape or worker == layout.partition.ranks[0])
                for item in _outline(state[keys_of[name]], layout, worker).__create_write_items__(
                    name, None
                )
            ]
            for worker in everyone.ranks
        ]
        plans, metadata = create_default_global_save_plan([SavePlan(each) for each in items])
        metadata.planner_data = {name: keys or (ALONE,) for name, keys in keys_of.items()}
        writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
        planner.set_up_planner(parts, None, everyone.rank == 0)
        problem: Exception | None = None
        found: list[Any] = []
        try:
            writer.set_up_storage_writer(everyone.rank == 0)
            own = writer.prepare_global_plan(plans)[everyone.rank or 0]
            found = [
                (each.index.fqn, tuple(each.index.offset or ()), each.size_in_bytes, *_info(each))
                for each in writer.write_data(own, planner).value()
            ]
        except Exception as error:  # whatever the storage raises is told to all workers
            problem = error
        told = tell(everyone, found).values()
        if problem is None and everyone.rank == 0:
            try:
                writer.finish(metadata, [[_result(*each) for each in some] for some in told])
            except Exception as error:  # as above
                problem = error
        return problem

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


def _outline(x: Tensor, layout: Layout, worker: int) -> Part:
    """The part of any worker, without values."""
    box = layout.box(worker)
    assert box is not None
    shape = layout.shape_on(worker)
    kind: Any = {"dtype": x.dtype, "requires_grad": x.requires_grad, "device": "meta"}
    return Part(torch.empty(shape, **kind), layout.shape, tuple(start for start, _ in box))


def _info(result: Any) -> tuple[str, int, int]:
    """In which file something was written, and where."""
    place = result.storage_data
    return place.relative_path, place.offset, place.length


def _result(
    name: str, offset: tuple[int, ...], size: int, path: str, start: int, length: int
) -> Any:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    index = MetadataIndex(name, torch.Size(offset))
    return WriteResult(index, size, _StorageInfo(path, start, length))


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
