"""Checkpoints: the values of a solver on the disk, from which a run that was ended goes on.

Each worker writes what it has to a file of its own, under the number of the iteration, and older
ones are removed when all workers have written theirs: wherever a run ends, there is one iteration
of which all files are complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessel.imaging.solvers.history import History
from tessel.imaging.solvers.method import Method, Values
from tessel.imaging.solvers.numbers import check_count
from tessel.imaging.solvers.space import Space

_FOLDER = re.compile(r"iteration-(\d+)")
_FILE = re.compile(r"worker-(\d+)-of-(\d+)\.pt")


@dataclass(frozen=True)
class Progressed:
    """How far a solver got: its values after so many iterations, and their history."""

    values: Values
    iteration: int = 0
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Checkpoint:
    """Where a solver keeps what it needs to go on, and how often it writes it.

    A run that finds files of an earlier one goes on where that was ended, and ends at the same
    image, bit by bit. The state of torch's random numbers is kept, too.

    Args:
        folder: where the files go; workers on several hosts need not share it.
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
        state = {
            "is": _kind(method, space, reached.values),
            "values": _detached(reached.values),
            "history": dict(reached.history.columns),
            "random": _random_states(reached.values["x"]),
        }
        path = self._path(reached.iteration, space)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, path)
        space.agree([True])  # all have written
        for iteration in self._own(space):
            if iteration != reached.iteration:
                self._remove(self._path(iteration, space))

    def read(self, method: Method, start: Values, space: Space) -> Progressed | None:
        """What all workers wrote last, if there is something."""
        if not self.resume:
            return None
        own, others = list(self._own(space)), self._sizes()
        shared = space.workers.group.share_objects((own, others))
        sizes = set().union(*(found for _, found in shared))
        common = set(own).intersection(*(iterations for iterations, _ in shared))
        if not common and sizes - {space.workers.size}:
            raise ValueError(
                f"the checkpoints in {self.folder} are those of {sorted(sizes)} workers, and this "
                f"run has {space.workers.size}; run on as many, or take another folder"
            )
        if not common:
            return None
        device = start["x"].device
        state = torch.load(self._path(max(common), space), device, weights_only=True)
        self._check(state, _kind(method, space, start), space)
        _set_random_states(state["random"], start["x"])
        return Progressed(state["values"], max(common), History(state["history"]))

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

    def _path(self, iteration: int, space: Space) -> Path:
        place, size = space.workers.rank, space.workers.size
        return Path(self.folder) / f"iteration-{iteration:08d}" / f"worker-{place}-of-{size}.pt"

    def _own(self, space: Space) -> Iterator[int]:
        """The iterations of which this worker has a file."""
        for folder in sorted(Path(self.folder).glob("iteration-*")):
            found = _FOLDER.fullmatch(folder.name)
            if found and self._path(int(found[1]), space).exists():
                yield int(found[1])

    def _sizes(self) -> set[int]:
        """The numbers of workers that wrote files here."""
        names = (_FILE.fullmatch(path.name) for path in Path(self.folder).glob("iteration-*/*"))
        return {int(name[2]) for name in names if name}

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.with_suffix(".unfinished").unlink(missing_ok=True)
        with suppress(OSError):  # another worker's file is still there
            path.parent.rmdir()


def _kind(method: Method, space: Space, values: Values) -> dict[str, str]:
    """What must be the same for a run to go on."""
    return {
        "the method": type(method).__name__,
        "the layout": space.layout.identity,
        "the dtype": str(values["x"].dtype),
        "what is kept": ", ".join(sorted(values)),
    }


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()  # not all of a storage of which it is a part
    if isinstance(value, dict):
        return {name: _detached(each) for name, each in value.items()}
    return [_detached(each) for each in value] if isinstance(value, (list, tuple)) else value


def _random_states(x: Tensor) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if x.is_cuda:
        states["cuda"] = torch.cuda.get_rng_state(x.device)
    return states


def _set_random_states(states: dict[str, Tensor], x: Tensor) -> None:
    torch.set_rng_state(states["cpu"].cpu())
    if x.is_cuda and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), x.device)
