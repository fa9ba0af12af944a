"""Folders that are written completely or not at all, and sharded checkpoints in them.

Each worker writes its parts to one file of `torch.distributed.checkpoint`, and tells the others
where they are, so that no pickle is sent. Workers that see the same folder write one checkpoint; on
hosts without a shared folder, each folder has the parts of its own workers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import torch

from tessel.core.agreement import tell
from tessel.core.layout import Shape
from tessel.core.partition import Partition
from tessel.state.checkpoint import Part, checkpoint_reader
from tessel.state.raising import together
from tessel.state.tensor_file import commit
from tessel.transport import this_worker

Keys = tuple[str, ...]  # of a value in dicts of dicts; () for a single value


def remove(path: Path) -> None:
    """Remove a folder, or anything else with its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def whole_folder(
    call: str,
    folder: Path,
    workers: Partition,
    prepare: Callable[[Path], None] = lambda folder: None,
    is_shared: bool = True,
    saying: str = "",
) -> Iterator[tuple[Path, list[int]]]:
    """Make a folder under another name, and rename it when all workers have left the block.

    Only then anything with its name is removed. All workers raise if one fails. The block gets the
    folder, and the workers that see it, of which the first makes and renames it.

    Args:
        call: the call, in the words of its user.
        folder: its name on this worker.
        workers: the workers that write it.
        prepare: a function that the first worker calls before the block.
        is_shared: whether all workers must see the same folder.
        saying: how errors begin, as in `together`.
    """
    number = tell(workers, os.urandom(6).hex())[workers.ranks[0]]
    unfinished = folder.with_name(f".{folder.name}.{number}")
    me, seen = this_worker(), [this_worker()]
    marks = {worker: unfinished / f".{worker}" for worker in workers.ranks}
    try:
        with together(call, workers, saying):
            unfinished.mkdir(parents=True, exist_ok=True)
            marks[me].touch()
        with together(call, workers, saying):
            found = [worker for worker, mark in marks.items() if mark.exists()]
            if is_shared and len(found) < len(marks):
                raise FileNotFoundError(
                    f"in {unfinished}, this worker sees only the files of workers {found} of "
                    f"{workers.size} workers: all workers must share the file system"
                )
            if me == found[0]:
                prepare(unfinished)
        seen = found
        with together(call, workers, saying):
            yield unfinished, seen
        with together(call, workers, saying):
            if me == seen[0]:
                for worker in seen:
                    marks[worker].unlink()
                old = unfinished.with_name(f"{unfinished.name}.old")
                if folder.exists():
                    os.rename(folder, old)
                try:
                    commit(unfinished, folder)
                except OSError:  # the old folder is better than nothing
                    if old.exists():
                        os.rename(old, folder)
                    raise
                if old.exists():
                    with suppress(OSError):  # the old folder only takes space
                        remove(old)
    finally:
        # Unless it was renamed. Only on its first worker: while that one renames it, another may
        # have been interrupted, and would remove files of a complete folder.
        if me == seen[0]:
            shutil.rmtree(unfinished, ignore_errors=True)


def write_parts(
    folder: Path,
    state: Mapping[Keys, Part],
    workers: Partition,
    seen: Sequence[int],
) -> None:
    """Write this worker's parts, on all workers together, with a checksum of each.

    Errors are raised at the end, since others wait for this worker.

    Args:
        folder: the folder of a `whole_folder`.
        state: parts by their keys in dicts of dicts.
        workers: the workers that write.
        seen: those of them that see this folder; a value that several have is written by the first.
    """
    # imported here, since it takes half a second
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan

    from tessel.state.checkpoint_reader import checksum_at, sign

    me, place = this_worker(), workers.rank or 0
    keys = {".".join(each): each for each in state}  # the names of torch's own checkpoints
    parts = dict(zip(keys, state.values(), strict=True))
    pieces = {
        # all parts of an empty tensor are the same piece
        (name, tuple(item.index.offset or ()) if part.numel() else ()): item
        for name, part in parts.items()
        for item in part.__create_write_items__(name, None)
    }
    held = tell(workers, list(pieces))
    before = {piece for worker in seen[: seen.index(me)] for piece in held[worker]}
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    problem: Exception | None = None
    found: list[WrittenPiece] = []
    try:
        writer.set_up_storage_writer(me == seen[0])
        plan = SavePlan([item for piece, item in pieces.items() if piece not in before])
        planner.set_up_planner(parts, None, me == seen[0])
        plan = writer.prepare_global_plan([SavePlan([])] * place + [plan])[place]
        for each in writer.write_data(plan, planner).value():
            name, at, offset = each.index.fqn, each.storage_data, tuple(each.index.offset or ())
            part = parts[name]
            kind = tuple(part.shape), part.dtype, part._part.requires_grad
            where = at.relative_path, at.offset, at.length
            checksum = checksum_at(folder / at.relative_path, at.offset, at.length)
            found.append((keys[name], kind, offset, tuple(part._part.shape), where, checksum))
    except Exception as error:  # any exception of the storage is reported to all workers
        # torch's own error reports a file that is too short, not a full disk
        problem = error.__context__ if isinstance(error.__context__, OSError) else error
    told = tell(workers, found)
    if problem is not None:
        raise problem
    if me == seen[0]:
        there = [piece for worker in seen for piece in told[worker]]
        writer.finish(*_metadata(there))
        sign(folder / ".metadata", {where[:2]: checksum for *_, where, checksum in there})


# The description of a piece: keys; shape, dtype and gradient of the whole; where the piece begins
# in it, and its shape; its file, offset and length there; a checksum.
WrittenPiece = tuple[Keys, tuple[Any, ...], Shape, Shape, tuple[str, int, int], int]


def _metadata(pieces: Sequence[WrittenPiece]) -> tuple[Any, list[list[Any]]]:
    """The metadata of these pieces, and torch's record of each that was written."""
    from torch.distributed.checkpoint import Metadata, filesystem, metadata
    from torch.distributed.checkpoint.storage import WriteResult

    entries: dict[str, Any] = {}
    keys, results = dict[str, Any](), []
    for path, (shape, dtype, requires_grad), offset, lengths, where, _ in pieces:
        name, at = ".".join(path), torch.Size(offset)
        keys[name] = path
        properties = metadata.TensorProperties(dtype=dtype, requires_grad=requires_grad)
        new = metadata.TensorStorageMetadata(properties, torch.Size(shape), [])
        chunk = metadata.ChunkStorageMetadata(at, torch.Size(lengths))
        entries.setdefault(name, new).chunks.append(chunk)
        index = metadata.MetadataIndex(name, at)
        results.append(WriteResult(index, where[2], filesystem._StorageInfo(*where)))
    return Metadata(entries, planner_data=keys), [results]


def stored_in(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Torch's entry for each value of a checkpoint, and its keys in dicts of dicts, by name."""
    metadata = checkpoint_reader(folder).read_metadata()
    paths = metadata.planner_data or {}
    return metadata.state_dict_metadata, {
        name: tuple(paths.get(name, (name,))) for name in metadata.state_dict_metadata
    }


def read_parts(folder: Path, parts: Mapping[str, Part]) -> None:
    """Read into the memory of parts, on each worker independently, by the metadata.

    It raises ValueError if something is damaged or missing.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner

    reader, planner = checkpoint_reader(folder), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(parts), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.create_local_plan()
    for name, part in parts.items():
        # torch would not write indices that no piece has
        lengths = [item.lengths for item in plan.items if item.dest_index.fqn == name]
        if sum(map(prod, lengths)) < part._part.numel():
            raise ValueError(f"{folder} lacks pieces of {name!r}, which other workers wrote")
    reader.read_data(reader.prepare_local_plan(plan), planner).value()
