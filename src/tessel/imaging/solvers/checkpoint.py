"""Checkpoints: the values of a solver on the disk, from which a run that was ended goes on.

Each worker writes what it has to a file of its own, under the number of the iteration, and older
ones are removed when all workers have written theirs: wherever a run ends, there is one iteration
of which all files are complete. Files say which box of the image they hold, so that other workers
can read what they need.

Why not `torch.distributed.checkpoint`: there one worker writes what all the files hold, so that a
folder that hosts do not share cannot be read again; a folder that is written when a run ends is
lost as a whole; and the random numbers of each worker, which a run needs to go on bit by bit, have
no place in a state that any number of workers reads.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessel.core import boxes
from tessel.core.boxes import Box
from tessel.core.layout import Layout
from tessel.imaging.solvers.history import History
from tessel.imaging.solvers.method import Method, Values, check_count
from tessel.imaging.solvers.space import Space

_NAME = re.compile(r"iteration-(\d+)/worker-(\d+)-of-(\d+)\.pt")


@dataclass(frozen=True)
class Progressed:
    """How far a solver got: its values after so many iterations, and their history."""

    values: Values
    iteration: int = 0
    history: History = field(default_factory=History)


class _File(NamedTuple):
    """What one worker wrote, of so many."""

    iteration: int
    place: int
    size: int


@dataclass(frozen=True)
class Checkpoint:
    """Where a solver keeps what it needs to go on, and how often it writes it.

    A run that finds files of an earlier one goes on where that was ended, and ends at the same
    image, bit by bit. The state of torch's random numbers is kept, too. A run on another number of
    workers, or with the image in other parts, goes on from the same image: each worker reads its
    part of it, and ends at the same image but for rounding; random numbers go on as those of the
    first worker.

    Args:
        folder: where the files go; workers on several hosts need not share it, unless a run goes
            on in other parts.
        every: the number of iterations between two writings; the last is always written.
        resume: whether to go on from what is there.

    >>> import tempfile, torch
    >>> from tessel.imaging import solvers
    >>> class Half:
    ...     def grad(self, x):
    ...         return x / 2
    >>> method, folder = solvers.GradientDescent(Half(), step=1.0), tempfile.mkdtemp()
    >>> keep = solvers.Checkpoint(folder, every=2)
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

    def write(self, reached: Progressed, method: Method, space: Space) -> None:
        """Write this worker's file, and remove older ones once all workers have done so."""
        x, random = reached.values["x"], {"cpu": torch.get_rng_state()}
        if x.is_cuda:
            random["cuda"] = torch.cuda.get_rng_state(x.device)
        state = {
            "is": _kind(method, space, reached.values),
            "layout": space.layout.identity,
            "active": space.layout.partition.active,
            "boxes": {name: _box(each, space.layout) for name, each in reached.values.items()},
            "values": _copied(reached.values),
            "history": dict(reached.history.columns),
            "random": random,
        }
        own = self._own(reached.iteration, space)
        path = self._path(own)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever finds a file under its name finds all of it: a name is given in one step.
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, path)
        space.agree([True])  # all have written: only now may what came before be removed
        for other in self._files():
            is_older = other[1:] == own[1:] and other.iteration != own.iteration
            if is_older or other.size != own.size:  # or of a run on more or fewer workers
                self._remove(self._path(other))

    def read(self, method: Method, start: Values, space: Space) -> Progressed | None:
        """What all workers wrote last, if there is something.

        Args:
            method: which goes on.
            start: its first values, which say what lies where now.
            space: where the image lies now, which may be in other parts than it was.
        """
        if not self.resume:
            return None
        found = self._newest(space)
        if found is None:
            return None
        iteration, size = found
        kind = _kind(method, space, start)
        name = self._own(iteration, space)
        own = self._loaded(self._path(name)) if size == space.workers.size else None
        layouts = space.workers.group.share_objects(own and own["layout"])
        if own is not None and set(layouts) == {space.layout.identity}:
            self._check(own, kind, space)
            _set_random_states(own["random"], start["x"])
            values = _copied(own["values"], start["x"].device)
            return Progressed(values, iteration, History(own["history"]))
        return self._moved(iteration, size, kind, method, start, space)

    def _newest(self, space: Space) -> tuple[int, int] | None:
        """The newest iteration that is complete, and how many workers wrote it."""
        files = self._files()
        own = {each.iteration for each in files if each == self._own(each.iteration, space)}
        counts = Counter((each.iteration, each.size) for each in files)
        whole = {(iteration, size) for (iteration, size), n in counts.items() if n == size}
        shared = space.workers.group.share_objects((own, whole, {each.size for each in files}))
        common = set(own).intersection(*(theirs for theirs, _, _ in shared))
        seen = whole.intersection(*(theirs for _, theirs, _ in shared))
        found = {(iteration, space.workers.size) for iteration in common} | seen
        sizes = set().union(*(theirs for _, _, theirs in shared))
        if not found and sizes - {space.workers.size}:
            raise ValueError(
                f"the checkpoints in {self.folder} are those of {sorted(sizes)} workers, not all "
                f"workers see all files of them, and this run has {space.workers.size}; bring the "
                f"files together, run on as many, or take another folder"
            )
        return max(found, key=lambda each: (each[0], each[1] == space.workers.size), default=None)

    def _moved(
        self,
        iteration: int,
        size: int,
        kind: dict[str, str],
        method: Method,
        start: Values,
        space: Space,
    ) -> Progressed:
        """What other workers wrote, or these in other parts, in the parts of now."""
        paths = [self._path(_File(iteration, place, size)) for place in range(size)]
        missing = [path.name for path in paths if not path.exists()]
        absent = space.workers.group.share_objects(missing)
        for worker, theirs in zip(space.workers.group.workers, absent, strict=True):
            if theirs:
                raise ValueError(
                    f"the checkpoint in {self.folder} is of other parts of the image, for which "
                    f"every worker reads all files, and worker {worker} does not see {theirs}"
                )
        states = [state for state in map(self._loaded, paths) if state["active"]]
        self._check(states[0], kind, space)
        values = {name: _gathered(name, start[name], states, space.layout) for name in start}
        lost = {name for name, value in values.items() if value is None}
        lost = lost.union(*space.workers.group.share_objects(lost))
        kept = {name: value for name, value in values.items() if name not in lost}
        complete = method.complete(kept, space) if lost else kept
        if set(complete) != set(start):
            raise ValueError(
                f"the checkpoint in {self.folder} is of other parts of the image, in which "
                f"{sorted(set(start) - set(complete))} of {method.name} cannot be brought; run on "
                f"as many workers with the same partition, give the method `complete`, or take "
                f"another folder"
            )
        _set_random_states(states[0]["random"], start["x"])
        return Progressed(complete, iteration, History(states[0]["history"]))

    def _check(self, state: dict[str, Any], kind: dict[str, str], space: Space) -> None:
        """Raise on all workers if the files of one are of another problem."""
        differ = [
            f"{name} was {state['is'].get(name)} and is {value}"
            for name, value in kind.items()
            if state["is"].get(name) != value
        ]
        for worker, found in zip(
            space.workers.group.workers, space.workers.group.share_objects(differ), strict=True
        ):
            if found:
                raise ValueError(
                    f"the checkpoint in {self.folder} is of another problem: on worker {worker}, "
                    f"{'; '.join(found)}; take another folder, or resume=False"
                )

    def _loaded(self, path: Path) -> dict[str, Any]:
        """A file, of which only what is used is read."""
        state: dict[str, Any] = torch.load(path, "cpu", weights_only=True, mmap=True)
        return state

    def _own(self, iteration: int, space: Space) -> _File:
        """The file of this worker."""
        assert space.workers.rank is not None
        return _File(iteration, space.workers.rank, space.workers.size)

    def _path(self, file: _File) -> Path:
        folder = Path(self.folder) / f"iteration-{file.iteration:08d}"
        return folder / f"worker-{file.place}-of-{file.size}.pt"

    def _files(self) -> list[_File]:
        """All files that are there."""
        found = []
        for folder in sorted(Path(self.folder).glob("iteration-*")):
            names: list[str] = []
            with suppress(OSError):  # another worker has just removed it
                names = sorted(os.listdir(folder))
            for name in names:
                match = _NAME.fullmatch(f"{folder.name}/{name}")
                if match:
                    found.append(_File(*map(int, match.groups())))
        return found

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.with_suffix(".unfinished").unlink(missing_ok=True)
        with suppress(OSError):  # another worker's file is still there
            path.parent.rmdir()


def _kind(method: Method, space: Space, values: Values) -> dict[str, str]:
    """What must be the same for a run to go on."""
    return {
        "the method": type(method).__name__,
        "the shape": str(tuple(space.layout.shape)),
        "the dtype": str(values["x"].dtype),
        "what is kept": ", ".join(sorted(values)),
    }


def _box(value: Any, layout: Layout) -> Box | None:
    """Where a tensor lies whose first dimensions are those of the image; others are whole."""
    box, dims = layout.box(), len(layout.shape)
    if box is None or not isinstance(value, Tensor):
        return None
    if tuple(value.shape[:dims]) != layout.local_shape:
        return None
    return (*box, *((0, length) for length in value.shape[dims:]))


def _gathered(name: str, like: Any, states: list[dict[str, Any]], layout: Layout) -> Any:
    """A value in the parts of now, from all files; None if it does not lie as the image does."""
    kept = [state["values"][name] for state in states]
    if isinstance(like, list | tuple):
        return None
    if not isinstance(like, Tensor):
        return kept[0]
    if like.dim() == 0:
        return _copied(kept[0], like.device)
    if not layout.partition.active:
        return like  # which is empty
    box = _box(like, layout)
    if box is None or any(state["boxes"].get(name) is None for state in states):
        return None
    result = torch.empty_like(like)
    for state, part in zip(states, kept, strict=True):
        theirs = tuple(map(tuple, state["boxes"][name]))
        common = _common(box, theirs)
        if common is not None:
            result[boxes.within(common, box)] = part[boxes.within(common, theirs)].to(like.device)
    return result


def _common(box: Box, other: Box) -> Box | None:
    """The indices that two boxes share."""
    shared = [boxes.overlap(*pair) for pair in zip(box, other, strict=True)]
    return None if None in shared else tuple(filter(None, shared))


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """A copy of tensors, not of all of a storage of which one is a part; lists are plain lists."""
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {name: _copied(each, device) for name, each in value.items()}
    return [_copied(each, device) for each in value] if isinstance(value, list | tuple) else value


def _set_random_states(states: dict[str, Tensor], x: Tensor) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if x.is_cuda and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), x.device)
