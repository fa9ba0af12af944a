"""Checkpoints: the values of a solver on disk, from which an interrupted run resumes.

All workers write a generation after the same iteration, as one checkpoint of
`torch.distributed.checkpoint` (`state.write_parts`): each value with the layout of the image is a
whole tensor in pieces, which any grid can read, and each worker has notes with everything else. Its
folder gets its name once all have written it. Two generations are kept.
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessel.core import Layout, Shape, checksum_of, tell
from tessel.encoding import decode, encodable, encode
from tessel.imaging.solvers.method import History, Iterates, Method, Space, check_count
from tessel.state import Part, read_parts, remove, stored_in, together, whole_folder, write_parts
from tessel.transport import this_worker

_CALL = "solvers.Checkpoint"
_NAME = re.compile(r"iteration-(\d{8,12})")
_DEPTH = 4  # of nested objects in a method that its fingerprint includes
_NO_NUMBERS = (  # modules whose objects it does not include
    *("tessel.core", "tessel.transport", "tessel.imaging.context"),
    *("torch", "builtins", "functools"),
)


@encodable
class Notes(NamedTuple):
    """The data that a worker writes besides its parts of the image.

    Args:
        size: the number of workers that wrote.
        layout: the layout of the image.
        kind: properties that must be the same for a run to resume; with an unchanged layout also
            operators and their numbers.
        history: the history of the iterations.
        random: the states of torch's generators.
        others: numbers, and values without the layout of the image; all values of a worker without
            a part.
    """

    size: int
    layout: str
    kind: dict[str, str]
    history: dict[str, list[float]]
    random: dict[str, Tensor]
    others: Iterates


@dataclass(frozen=True)
class Checkpoint:
    """Where a solver stores the values from which it can resume, and how often.

    A run that finds the files of an earlier one resumes where that was interrupted, and ends at the
    same image, bit by bit. The state of torch's random numbers is also kept. A run on another
    number of workers, or with the image in other parts, resumes from the same image: each worker
    reads its part, and the result is the same up to rounding; random numbers continue as those of
    the first worker. A metric that is new in a resumed run begins there, in a shorter list.

    The last two checkpoints are kept, each complete on the disk before it counts. If a file of the
    last one is missing or damaged, the run warns, names it, and resumes from the one before; if
    that cannot be read either, all workers raise. A folder of another problem, with another image,
    method, operators or numbers, raises; operators and numbers are compared only if the layout of
    the image is unchanged, since they differ in other parts.

    Args:
        folder: the folder of the files; workers on several hosts need not share it, unless a run
            resumes in other parts.
        every: the number of iterations between two checkpoints; the last is always written.
        resume: whether to resume from existing files.

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
    # the problem of the current method, as it was in the beginning
    _problem: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count(self, 1, every=self.every)

    def write(
        self, values: Iterates, iteration: int, history: History, method: Method, space: Space
    ) -> None:
        """Write this worker's parts, and remove everything older than the generation before.

        Args:
            values: the values of the method.
            iteration: the number of iterations.
            history: the history of these.
            method: the method that would resume.
            space: the space of the image.
        """
        layout, workers = space.layout, space.workers
        folder, ndim = self._generation(iteration), len(layout.shape)
        own, random = f"{workers.rank}", {"cpu": torch.get_rng_state()}
        if values["x"].is_cuda:
            random["cuda"] = torch.cuda.get_rng_state(values["x"].device)
        saying = f"the checkpoint in {self.folder} cannot be written"
        with together(_CALL, workers, saying):  # notes may contain values that cannot be encoded
            parts, others = dict[tuple[str, ...], Part](), Iterates()
            for name, value in values.items():
                is_tensor = isinstance(value, Tensor) and layout.partition.active
                if is_tensor and value.shape[:ndim] == layout.local_shape:
                    shape = *layout.shape, *value.shape[ndim:]
                    parts["values", name] = _part(value.detach(), shape, layout)
                else:
                    others[name] = _copied(value, torch.device("cpu"))
            kind = {**_kind(method, space, values), **self._problem}
            notes = Notes(workers.size, layout.identity, kind, dict(history), random, others)
            encoded = torch.frombuffer(bytearray(encode(notes)), dtype=torch.uint8)
            parts["notes", own] = Part(encoded, tuple(encoded.shape), (0,))
        made = whole_folder(_CALL, folder, workers, is_shared=False, saying=saying)
        with made as (unfinished, seen):
            write_parts(unfinished, parts, workers, seen)
        with together(_CALL, workers, saying):
            if seen[0] == this_worker():
                # Generations after this iteration belong to a run that was not resumed.
                known = self._seen()
                kept = {iteration, max((k for k in known if k < iteration), default=iteration)}
                interrupted = folder.parent.glob(".iteration-*.*")
                for path in (*map(self._generation, known - kept), *interrupted):
                    remove(path)

    def read(self, method: Method, start: Iterates, space: Space) -> tuple[Iterates, int, History]:
        """The values, iteration and history that all workers wrote last, or those of a start.

        Args:
            method: the method that resumes.
            start: its first values, which define the layout of each value.
            space: the space of the image, possibly in other parts than before.
        """
        self._problem.clear()
        self._problem.update(_problem(method))
        with together(_CALL, space.workers, f"the checkpoint in {self.folder} cannot be read"):
            own = self._seen() if self.resume else set[int]()
        seen = tell(space.workers, own).values() if self.resume else ()
        problem = ""  # with the newest generation
        for iteration in sorted(set[int]().union(*seen), reverse=True):
            try:
                told, values, notes = self._read(iteration, method, start, space)
            except ValueError as error:
                problem = problem or str(error)
                continue
            if told:
                raise ValueError(
                    f"the checkpoint in {self.folder} belongs to another problem: {told}; use "
                    "another folder, or resume=False"
                )
            if problem and space.workers.rank == 0:
                warnings.warn(
                    f"{problem}; this run resumes from iteration {iteration}", stacklevel=4
                )
            if set(start) - set(values):
                values = method.complete(values, space)
            if set(values) != set(start):
                raise ValueError(
                    f"the checkpoint in {self.folder} was written for other parts of the image, to "
                    f"which {method.name} cannot convert {sorted(set(start) - set(values))}; run "
                    "on the same number of workers with the same partition, implement `complete` "
                    "in the method, or use another folder"
                )
            torch.set_rng_state(notes.random["cpu"])  # random numbers continue as they would have
            if start["x"].is_cuda and "cuda" in notes.random:
                torch.cuda.set_rng_state(notes.random["cuda"], start["x"].device)
            return values, iteration, History(notes.history)
        if problem:
            raise ValueError(
                f"{problem}; restore the file, pass resume=False, or use another folder"
            )
        return start, 0, History()

    def _read(
        self, iteration: int, method: Method, start: Iterates, space: Space
    ) -> tuple[str, Iterates, Notes]:
        """How the problem of a generation differs, its values on this worker, and its notes.

        ValueError on all workers if one cannot read what it needs.
        """
        folder, workers, layout = self._generation(iteration), space.workers, space.layout
        saying = f"the checkpoint in {self.folder} cannot be read"
        with together(_CALL, workers, saying):
            entries, keys = stored_in(folder)
            own = _notes(folder, entries, f"notes.{workers.rank}")
        is_other = own is None or (own.size, own.layout) != (workers.size, layout.identity)
        stays = not any(space.agree([is_other]))
        saying += "" if stays else " (the image lay in other parts: every worker reads all files)"
        with together(_CALL, workers, saying):
            # After a run in other parts, the notes of the first worker that held one.
            places = sorted(int(path[1]) for path in keys.values() if path[0] == "notes")
            found = (_notes(folder, entries, f"notes.{place}") for place in places)
            notes = own if stays else next((n for n in found if n and "x" not in n.others), None)
            if notes is None:
                raise ValueError(f"{folder} has no notes of a worker that held a part of the image")
            kind, was = _kind(method, space, start) | (self._problem if stays else {}), notes.kind
            differ = [name for name in kind if was.get(name) != kind[name]]
            told = [f"{name} was {was.get(name)} and is {kind[name]}" for name in differ]
        for worker, text in tell(workers, "; ".join(told)).items():
            if text:
                return f"on worker {worker}, {text}", {}, notes
        with together(_CALL, workers, saying):
            lying = {path[1]: name for name, path in keys.items() if path[0] == "values"}
            rooms, parts = dict[str, Tensor](), dict[str, Part]()
            for name, full in lying.items() if layout.partition.active else ():
                shape = tuple(entries[full].size)
                local = *layout.local_shape, *shape[len(layout.shape) :]
                rooms[name] = torch.empty(local, dtype=entries[full].properties.dtype)
                parts[full] = _part(rooms[name], shape, layout)
            read_parts(folder, parts)
            others = notes.others
            if not stays:
                # Of the other values only numbers, and on a worker without a part its start.
                # Everything else has the layout of the old workers: `Method.complete` computes it.
                others = {name: start[name] for name in lying if name in {*start} - {*rooms}}
                for name, each in notes.others.items():
                    if each.dim() == 0 if isinstance(each, Tensor) else not isinstance(each, list):
                        others[name] = each
            return "", _copied({**others, **rooms}, start["x"].device), notes

    def _seen(self) -> set[int]:
        """The iterations whose generations this worker finds."""
        paths = {_NAME.fullmatch(each.name): each for each in Path(self.folder).glob("iteration-*")}
        return {int(match[1]) for match, path in paths.items() if match and path.is_dir()}

    def _generation(self, iteration: int) -> Path:
        return Path(self.folder) / f"iteration-{iteration:08d}"


def _notes(folder: Path, entries: Mapping[str, Any], name: str) -> Notes | None:
    """The notes of a worker, if they are there."""
    if name not in entries:
        return None
    room = torch.empty(tuple(entries[name].size), dtype=torch.uint8)
    read_parts(folder, {name: Part(room, tuple(room.shape), (0,))})
    notes = decode(room.numpy().tobytes())
    if not isinstance(notes, Notes):
        raise ValueError(f"{folder} has no notes of a solver")
    torch.Generator().set_state(notes.random["cpu"])  # raises if it is no state
    return notes


def _part(value: Tensor, shape: Shape, layout: Layout) -> Part:
    """A worker's part of a value with the layout of the image, and possibly more dimensions."""
    begin = [start for start, _ in layout.box() or ()]
    return Part(value, shape, (*begin, *[0] * (len(shape) - len(begin))))


def _kind(method: Method, space: Space, values: Iterates) -> dict[str, str]:
    """The properties that must be the same for a run to resume."""
    return {
        "the method": type(method).__name__,
        "the shape": str(tuple(space.layout.shape)),
        "the dtype": str(values["x"].dtype),
        "what is kept": ", ".join(sorted(values)),
    }


def _problem(method: Method) -> dict[str, str]:
    """The kinds of a method's operators, and a checksum of their numbers, such as measurements.

    Steps and functions, which a user may change for the rest of a run, are not included.
    """
    kinds: list[str] = []
    sums: list[int] = []
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            if type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
                sums.append(zlib.crc32(f"{tuple(value.shape)} {value.dtype}".encode()))
                sums.append(checksum_of([value]))
        elif isinstance(value, list | tuple):
            for each in value:
                look(each, depth)
        elif id(value) not in seen and depth < _DEPTH:
            # Functions do not hold numbers of the problem, and neither do layouts.
            is_module, where = isinstance(value, torch.nn.Module), type(value).__module__
            if is_module or (hasattr(value, "__dict__") and not where.startswith(_NO_NUMBERS)):
                seen.add(id(value))
                kinds.append(type(value).__name__)
                inside = value.state_dict(keep_vars=True) if is_module else _public(value)
                for name in inside if is_module else sorted(inside):
                    look(inside[name], depth if is_module else depth + 1)

    for each in _public(method).values():
        look(each, 1)
    numbers = zlib.crc32(encode(sums))
    return {
        "the list of operators": ", ".join(kinds) or "empty",
        "the checksum of measurements and operators": f"{numbers:08x}",
    }


def _public(value: Any) -> dict[str, Any]:
    """The attributes of an object, except those that it computed itself."""
    return {name: each for name, each in vars(value).items() if not name.startswith("_")}


def _copied(value: Any, device: torch.device) -> Any:
    """A copy of tensors, without the rest of their storages; lists become plain lists."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {name: _copied(each, device) for name, each in value.items()}
    return [_copied(each, device) for each in value] if isinstance(value, list | tuple) else value
