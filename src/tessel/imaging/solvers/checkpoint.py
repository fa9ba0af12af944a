"""Checkpoints: the values of a solver on disk, from which a run that was interrupted resumes.

`torch.distributed.checkpoint` writes and reads the files. Each worker writes a checkpoint of its
own, of its shards of the image, so that hosts need not share a folder; a run on another number of
workers reads all of them as one.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessel.core import Layout, Shape, tell
from tessel.imaging.solvers.method import History, Method, Space, Values, check_count
from tessel.interop import Part

_NAME = re.compile(r"iteration-(\d+)/worker-(\d+)-of-(\d+)")
# What torch raises for files that are cut short, or not its own.
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError)


class _Shard(NamedTuple):
    """What one worker wrote, of so many."""

    iteration: int
    place: int
    size: int


@dataclass(frozen=True)
class _Notes:
    """What a worker writes beside its shards of the image.

    A class, since torch takes dictionaries apart and would ask for each entry again.
    """

    kind: dict[str, str]
    layout: str
    history: dict[str, list[float]]
    random: dict[str, Tensor]
    shards: dict[str, tuple[Shape, torch.dtype]]  # dimensions beyond those of the image, and dtype
    others: Values  # numbers, and what does not lie as the image does


@dataclass(frozen=True)
class Checkpoint:
    """Where a solver keeps what it needs to resume, and how often it writes it.

    A run that finds the files of an earlier one resumes where that was interrupted, and ends at the
    same image, bit by bit. The state of torch's random numbers is kept, too. A run on another
    number of workers, or with the image in other parts, resumes from the same image: each worker
    reads its part of it, and ends at the same image but for rounding; random numbers go on as those
    of the first worker. A metric that is new in a run that resumes begins there, in a shorter list.

    Args:
        folder: where the files go; workers on several hosts need not share it, unless a run
            resumes in other parts.
        every: the number of iterations between two checkpoints; the last is always written.
        resume: whether to resume from what is there.

    >>> import tempfile, torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import solvers
    >>> method = solvers.GradientDescent(SimpleNamespace(grad=lambda x: x / 2), step=1.0)
    >>> keep = solvers.Checkpoint(tempfile.mkdtemp(), every=2)
    >>> first = solvers.solve(method, torch.ones(1), max_iterations=2, checkpoint=keep)
    >>> then = solvers.solve(method, torch.ones(1), max_iterations=3, checkpoint=keep)
    >>> then.x.item(), then.history["change"]
    (0.125, [1.0, 1.0, 1.0])
    """

    folder: str | os.PathLike[str]
    every: int = 10
    resume: bool = True

    def __post_init__(self) -> None:
        check_count(self, 1, every=self.every)

    def write(
        self, values: Values, iteration: int, history: History, method: Method, space: Space
    ) -> None:
        """Write this worker's shards, and remove older ones once all workers have done so.

        Args:
            values: of the method.
            iteration: after how many.
            history: of these.
            method: which would resume.
            space: where the image lies.
        """
        from torch.distributed.checkpoint import FileSystemWriter, save

        x, layout, random = values["x"], space.layout, {"cpu": torch.get_rng_state()}
        if x.is_cuda:
            random["cuda"] = torch.cuda.get_rng_state(x.device)
        lying = {
            name: value
            for name, value in values.items()
            if layout.partition.active
            and isinstance(value, Tensor)
            and value.shape[: len(layout.shape)] == layout.local_shape
        }
        shards = {n: (tuple(v.shape[len(layout.shape) :]), v.dtype) for n, v in lying.items()}
        others = {name: v for name, v in values.items() if name not in lying}
        notes = _Notes(
            _kind(method, space, values),
            layout.identity,
            dict(history),
            random,
            shards,
            _copied(others, torch.device("cpu")),
        )
        state = {"notes": notes, **_parts(layout, lying)}
        own = self._own(iteration, space)
        folder = self._path(own)
        # A folder gets its name when all of it is written: whoever finds one finds it complete.
        unfinished = folder.with_suffix(".unfinished")
        # What the system has taken a killed run does not lose: no need to wait for the disk.
        with _alone():
            save(state, storage_writer=FileSystemWriter(unfinished, sync_files=False), no_dist=True)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        space.agree([True])  # all have written: only now may what came before be removed
        for other in self._shards():
            is_older = other[1:] == own[1:] and other.iteration != own.iteration
            if is_older or other.size != own.size:  # or of a run on more or fewer workers
                shutil.rmtree(self._path(other), ignore_errors=True)
                with suppress(OSError):  # another worker's shards are still there
                    self._path(other).parent.rmdir()

    def read(self, method: Method, start: Values, space: Space) -> tuple[Values, int, History]:
        """What all workers wrote last: values, iteration and history; else those of a start.

        Args:
            method: which resumes.
            start: its first values, which say what lies where now.
            space: where the image lies now, which may be in other parts than it was.
        """
        newest = self._newest(space) if self.resume else None
        if newest is None:
            return start, 0, History()
        iteration, size = newest
        notes, folders, stays = self._notes(iteration, size, space)
        kind = _kind(method, space, start)
        differ = [name for name in kind if notes.kind.get(name) != kind[name]]
        told = "; ".join(
            f"{name} was {notes.kind.get(name)} and is {kind[name]}" for name in differ
        )
        self._tell(
            told,
            "is of another problem: on worker {worker}, {told}; take another folder, or "
            "resume=False",
            space,
        )
        room = {
            name: torch.empty((*space.layout.local_shape, *more), dtype=dtype)
            for name, (more, dtype) in notes.shards.items()
            if space.layout.partition.active
        }
        self._loaded(folders, _parts(space.layout, room), space)
        others = notes.others if stays else _numbers(notes, start, room)
        values = _copied({**others, **room}, start["x"].device)
        if set(start) - set(values):
            values = method.complete(values, space)
        if set(values) != set(start):
            raise ValueError(
                f"the checkpoint in {self.folder} is of other parts of the image, to which "
                f"{sorted(set(start) - set(values))} of {method.name} cannot be converted; run on "
                f"as many workers with the same partition, implement `complete` in the method, or "
                f"use another folder"
            )
        torch.set_rng_state(notes.random["cpu"])
        if start["x"].is_cuda and "cuda" in notes.random:
            torch.cuda.set_rng_state(notes.random["cuda"], start["x"].device)
        return values, iteration, History(notes.history)

    def _notes(self, iteration: int, size: int, space: Space) -> tuple[_Notes, list[Path], bool]:
        """Notes, the folders to read from, and whether the image lies as it did on all workers."""
        folders = [self._path(self._own(iteration, space))]
        notes = self._loaded(folders, None, space) if size == space.workers.size else None
        layouts = tell(space.workers, notes and notes.layout).values()
        if notes is not None and set(layouts) == {space.layout.identity}:
            return notes, folders, True
        # Each worker reads the boxes that it needs from the shards of all.
        folders = [self._path(_Shard(iteration, place, size)) for place in range(size)]
        self._tell(
            [folder.name for folder in folders if not folder.exists()],
            "is of other parts of the image, for which every worker reads all files, and "
            "worker {worker} does not see {told}",
            space,
        )
        written = (self._loaded([folder], None, space) for folder in folders)
        return next(each for each in written if each.shards), folders, False  # one held a part

    def _newest(self, space: Space) -> tuple[int, int] | None:
        """The newest iteration that is complete, and how many workers wrote it."""
        shards = self._shards()
        own = {each.iteration for each in shards if each == self._own(each.iteration, space)}
        counts = Counter((each.iteration, each.size) for each in shards)
        whole = {(iteration, size) for (iteration, size), n in counts.items() if n == size}
        # Workers may see different files: what counts is complete as all of them see it.
        told = tell(space.workers, (own, whole, {each.size for each in shards})).values()
        common = own.intersection(*(theirs for theirs, _, _ in told))
        seen = whole.intersection(*(theirs for _, theirs, _ in told))
        found = {(iteration, space.workers.size) for iteration in common} | seen
        sizes = set().union(*(theirs for _, _, theirs in told))
        if not found and sizes - {space.workers.size}:
            raise ValueError(
                f"the checkpoints in {self.folder} are those of {sorted(sizes)} workers, not all "
                f"workers see all files of them, and this run has {space.workers.size}; bring the "
                f"files together, run on as many, or take another folder"
            )
        return max(found, key=lambda each: (each[0], each[1] == space.workers.size), default=None)

    def _loaded(self, folders: list[Path], parts: dict[str, Any] | None, space: Space) -> Any:
        """Fill parts of tensors from these folders, or give the notes; all raise, or none."""
        from torch.distributed.checkpoint import CheckpointException, load

        state: dict[str, Any] = {"notes": None} if parts is None else parts
        problem = ""
        try:
            with _alone():
                load(state, storage_reader=_together(folders), no_dist=True)
        except (CheckpointException, *_UNREADABLE) as error:
            problem = f"{type(error).__name__}: {error}"
        way_out = f"remove {folders[0].parent.name}, or pass resume=False"
        self._tell(problem, f"cannot be read on worker {{worker}} ({{told}}); {way_out}", space)
        return state.get("notes")

    def _tell(self, told: Any, text: str, space: Space) -> None:
        """Raise ValueError on all workers if one of them has something to tell."""
        for worker, theirs in tell(space.workers, told).items():
            if theirs:
                said = text.format(worker=worker, told=theirs)
                raise ValueError(f"the checkpoint in {self.folder} {said}")

    def _own(self, iteration: int, space: Space) -> _Shard:
        """The shard of this worker."""
        assert space.workers.rank is not None
        return _Shard(iteration, space.workers.rank, space.workers.size)

    def _path(self, shard: _Shard) -> Path:
        folder = Path(self.folder) / f"iteration-{shard.iteration:08d}"
        return folder / f"worker-{shard.place}-of-{shard.size}"

    def _shards(self) -> list[_Shard]:
        """All that are there and complete."""
        found = []
        for folder in Path(self.folder).glob("iteration-*"):
            with suppress(OSError):  # another worker has just removed it
                names = [f"{folder.name}/{name}" for name in os.listdir(folder)]
                matches = filter(None, map(_NAME.fullmatch, names))
                found += [_Shard(*map(int, match.groups())) for match in matches]
        return found


@contextmanager
def _alone() -> Iterator[None]:
    """Each worker reads and writes by itself, which torch warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _together(folders: Sequence[Path]) -> Any:
    """A reader of checkpoints that several workers wrote, each of its own shards, as of one."""
    from torch.distributed.checkpoint import FileSystemReader, Metadata
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    class Together(FileSystemReader):
        def read_metadata(self, *args: Any, **settings: Any) -> Metadata:
            found = Metadata({}, storage_data={})
            # What several hold, as copies of a part, is read from the first.
            for folder in folders:
                one = FileSystemReader(folder).read_metadata()
                for name, entry in one.state_dict_metadata.items():
                    known = found.state_dict_metadata.setdefault(name, entry)
                    if known is not entry and isinstance(known, TensorStorageMetadata):
                        known.chunks += entry.chunks  # type: ignore[union-attr]
                for index, info in one.storage_data.items():
                    path = f"{folder.name}/{info.relative_path}"
                    found.storage_data.setdefault(index, replace(info, relative_path=path))
            return found

    return Together(folders[0].parent)


def _parts(layout: Layout, values: Values) -> dict[str, Part]:
    """Tensors that lie as the image does, as shards; those without numbers are of other workers."""
    box = layout.box() or ()
    return {
        name: Part(
            value,
            (*layout.shape, *value.shape[len(box) :]),
            (*(start for start, _ in box), *(0,) * (value.dim() - len(box))),
        )
        for name, value in values.items()
        if value.numel()
    }


def _numbers(notes: _Notes, start: Values, room: Values) -> Values:
    """Of the other values those that are numbers, and on a worker without a part, its start.

    What is no number lies as it did on a worker of before: `Method.complete` makes it.
    """
    found = {name: start[name] for name in notes.shards if name not in room}
    for name, each in notes.others.items():
        is_number = each.dim() == 0 if isinstance(each, Tensor) else not isinstance(each, list)
        if is_number:
            found[name] = each
    return found


def _kind(method: Method, space: Space, values: Values) -> dict[str, str]:
    """What must be the same for a run to resume."""
    return {
        "the method": type(method).__name__,
        "the shape": str(tuple(space.layout.shape)),
        "the dtype": str(values["x"].dtype),
        "what is kept": ", ".join(sorted(values)),
    }


def _copied(value: Any, device: torch.device) -> Any:
    """A copy of tensors, not of all of a storage of which one is a part; lists are plain lists."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {name: _copied(each, device) for name, each in value.items()}
    return [_copied(each, device) for each in value] if isinstance(value, list | tuple) else value
