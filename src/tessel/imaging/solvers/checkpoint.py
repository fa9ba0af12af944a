"""Checkpoints: the values of a solver on disk, from which a run that was interrupted resumes.

Each worker writes one tensor file of its own (`state.TensorFile`), of its parts of the image, so
that hosts need not share a folder; a run on another number of workers reads all of them as one.
Nothing in the files is a pickle, and everything has a checksum.

A generation is what all workers write after one iteration. Two of them are kept. Each worker first
writes its file under another name and waits for the disk; once all have, they give the files their
names. So if one file of a generation has its name, all of them are complete.
"""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tessel.core import Shape, boxes, checksum_of, tell
from tessel.encoding import decode, encodable, encode
from tessel.imaging.solvers.method import History, Method, Space, Values, check_count
from tessel.state import TensorFile, TensorFileWriter

NUM_KEPT = 2  # generations
_NAME = re.compile(
    r"iteration-(\d{1,12})/worker-(\d{1,9})-of-(\d{1,9})(\.safetensors(\.unfinished)?)?"
)
_MARK = "tessel.solver"  # the note of such files, with the number of the form that they have
_FORM = "1"
_NOTES = "notes"  # the tensor with the encoded notes; values have names before which is a dot
_UNREADABLE = "cannot be read on worker {worker}: {told}"
_DEPTH = 4  # of objects in a method that its fingerprint looks into
_NO_NUMBERS = (  # modules whose objects it does not look into
    *("tessel.core", "tessel.transport", "tessel.imaging.context"),
    *("torch", "builtins", "functools"),
)


@encodable
class _ShardFile(NamedTuple):
    """What one worker wrote, of so many."""

    iteration: int
    place: int
    size: int

    @property
    def name(self) -> str:
        return f"worker-{self.place}-of-{self.size}.safetensors"


@encodable
class _Seen(NamedTuple):
    """The files that a worker sees: with their names, without, and of versions before."""

    finished: set[_ShardFile]
    unfinished: set[_ShardFile]
    old: set[str]


@encodable
@dataclass(frozen=True)
class Notes:
    """What a worker writes beside its parts of the image.

    Args:
        kind: what must be the same for a run to resume.
        problem: what must be the same if the image lies as it did: operators and their numbers.
        layout: of the image.
        history: of the iterations.
        random: the states of torch's generators.
        parts: for each value that lies as the image does, where its part begins, its dimensions
            beyond those of the image, and its dtype.
        others: numbers, and what does not lie as the image does.
    """

    kind: dict[str, str]
    problem: dict[str, str]
    layout: str
    history: dict[str, list[float]]
    random: dict[str, Tensor]
    parts: dict[str, tuple[tuple[int, ...] | None, Shape, torch.dtype]]
    others: Values

    @classmethod
    def of(
        cls, values: Values, history: History, method: Method, space: Space, problem: dict[str, str]
    ) -> tuple[Notes, dict[str, Tensor]]:
        """Those about the values of a method, and the values that lie as the image does."""
        x, layout, random = values["x"], space.layout, {"cpu": torch.get_rng_state()}
        if x.is_cuda:
            random["cuda"] = torch.cuda.get_rng_state(x.device)
        box, ndim = layout.box(), len(layout.shape)
        start = None if box is None else tuple(first for first, _ in box)
        lying = {
            name: value
            for name, value in values.items()
            if layout.partition.active
            and isinstance(value, Tensor)
            and value.shape[:ndim] == layout.local_shape
        }
        notes = cls(
            _kind(method, space, values),
            dict(problem),
            layout.identity,
            {name: [float(n) for n in numbers] for name, numbers in history.items()},
            random,
            {name: (start, tuple(v.shape[ndim:]), v.dtype) for name, v in lying.items()},
            _copied({n: v for n, v in values.items() if n not in lying}, torch.device("cpu")),
        )
        return notes, lying

    def check(self) -> None:
        """Raise ValueError if these are not what a worker writes."""
        try:
            texts = [*self.kind.items(), *self.problem.items()]
            numbers = [n for each in self.history.values() for n in each]
            places = [n for start, more, _ in self.parts.values() for n in (*(start or ()), *more)]
            is_right = (
                all(isinstance(each, str) for pair in [*texts, (self.layout,)] for each in pair)
                and all(isinstance(each, list) for each in self.history.values())
                and all(isinstance(n, float | int) for n in numbers)
                and all(each.dtype == torch.uint8 for each in self.random.values())
                and self.random["cpu"].shape == torch.get_rng_state().shape
                and all(isinstance(n, int) and 0 <= n < 2**62 for n in places)
                and all(isinstance(dtype, torch.dtype) for _, _, dtype in self.parts.values())
                and isinstance(self.others, dict)
            )
        except (AttributeError, KeyError, TypeError, ValueError):  # what is no table, or another
            is_right = False
        if not is_right:
            raise ValueError("its notes are not those of a solver")


@dataclass(frozen=True)
class Checkpoint:
    """Where a solver keeps what it needs to resume, and how often it writes it.

    A run that finds the files of an earlier one resumes where that was interrupted, and ends at the
    same image, bit by bit. The state of torch's random numbers is kept, too. A run on another
    number of workers, or with the image in other parts, resumes from the same image: each worker
    reads its part of it, and ends at the same image but for rounding; random numbers go on as those
    of the first worker. A metric that is new in a run that resumes begins there, in a shorter list.

    The last two checkpoints are kept, each complete on the disk before it counts. If a file of the
    last one is missing or damaged, the run warns, names it, and resumes from the one before; if
    that cannot be read either all workers raise. A folder of another problem, of which the image,
    the method, the operators or their numbers differ, is refused.

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
    # of the method that is solved now, as it was in the beginning
    _problem: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count(self, 1, every=self.every)

    def write(
        self, values: Values, iteration: int, history: History, method: Method, space: Space
    ) -> None:
        """Write this worker's parts, and remove what is older than the generation before.

        Args:
            values: of the method.
            iteration: after how many.
            history: of these.
            method: which would resume.
            space: where the image lies.
        """
        own, problem = _ShardFile(iteration, _place(space), space.workers.size), ""
        with ExitStack() as stack:  # what not all have written is dropped, also after Ctrl-C
            try:
                notes, lying = Notes.of(values, history, method, space, self._problem)
                encoded = torch.frombuffer(bytearray(encode(notes)), dtype=torch.uint8)
                tensors = {_NOTES: encoded, **{f".{name}": value for name, value in lying.items()}}
                kinds = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
                writer = TensorFileWriter(self._path(own), kinds, {_MARK: _FORM})
                stack.enter_context(writer)
                for name, tensor in tensors.items():
                    writer.put(name, tensor)
                writer.finish(rename=False)
            except (OSError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            # All have written, or all raise. Only now may files get their names.
            self._tell(problem, "cannot be written on worker {worker} ({told})", space)
            stack.pop_all()  # complete: a run that resumes gives it its name, if this one cannot
        try:
            writer.rename()
            self._remove_older(own)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
        # A disk may fail here, too: nobody goes on with a generation that another could not name.
        self._tell(problem, "cannot be completed on worker {worker} ({told})", space)

    def _remove_older(self, own: _ShardFile) -> None:
        """Remove this worker's files but for the newest, and those of runs on more or fewer."""
        seen = self._seen()
        mine = sorted({e.iteration for e in seen.finished if e[1:] == own[1:]} - {own.iteration})
        # What comes after this iteration is of a run that was not resumed.
        older = [iteration for iteration in mine if iteration < own.iteration]
        kept = {own.iteration, *older[len(older) - NUM_KEPT + 1 :]}
        for shard in (*seen.finished, *seen.unfinished):
            is_mine = shard[1:] == own[1:] and shard.iteration not in kept
            # of other runs, once there are as many newer generations of this one as are kept
            is_superseded = len(kept) >= NUM_KEPT or shard.iteration > max(kept)
            if is_mine or (shard.size != own.size and is_superseded):
                path = self._path(shard)
                path.unlink(missing_ok=True)
                path.with_name(path.name + ".unfinished").unlink(missing_ok=True)
                with suppress(OSError):  # another worker's files are still there
                    path.parent.rmdir()

    def read(self, method: Method, start: Values, space: Space) -> tuple[Values, int, History]:
        """What all workers wrote last: values, iteration and history; else those of a start.

        Args:
            method: which resumes.
            start: its first values, which say what lies where now.
            space: where the image lies now, which may be in other parts than it was.
        """
        self._problem.clear()
        self._problem.update(_problem(method))
        first_problem = ""
        for iteration, size, problem in self._generations(space) if self.resume else ():
            files = _Files(self, iteration, size, space)
            problem = problem or _first_told(files.open(), _UNREADABLE, space)
            if not problem:
                files.check_kind(_kind(method, space, start), self._problem)
                values, problem = files.values(method, start)
                if not problem:
                    if first_problem and space.workers.rank == 0:
                        said = f"{first_problem}; this run resumes from iteration {iteration}"
                        warnings.warn(f"the checkpoint in {self.folder} {said}", stacklevel=4)
                    return values, iteration, files.resumed(start)
            first_problem = first_problem or problem
        if first_problem:
            raise ValueError(
                f"the checkpoint in {self.folder} {first_problem}; bring the file back, pass "
                f"resume=False, or take another folder"
            )
        return start, 0, History()

    def _generations(self, space: Space) -> Iterable[tuple[int, int, str]]:
        """Iterations, newest first, how many workers wrote each, and what is wrong with it."""
        seen: dict[int, _Seen] = tell(space.workers, self._finished(space))
        old = sorted(set[str]().union(*(each.old for each in seen.values())))
        finished = set[_ShardFile]().union(*(each.finished for each in seen.values()))
        found = sorted({(s.iteration, s.size == len(seen), s.size) for s in finished})
        if old and not found:
            yield 0, 0, f"is of an earlier version of Tessel, whose {old[0]} this one cannot read"
        for iteration, is_own, size in reversed(found):
            # A worker reads its own file if there are as many workers as there were, else all.
            shards = [_ShardFile(iteration, place, size) for place in range(size)]
            some = "" if is_own else f" of {size} workers, and this run has {len(seen)}"
            missing = (
                f"lacks iteration-{iteration:08d}/{shard.name}{some}: worker {worker} does not "
                f"see it"
                for place, (worker, theirs) in enumerate(seen.items())
                for shard in ([shards[place]] if is_own else shards)
                if shard not in theirs.finished
            )
            yield iteration, size, next(missing, "")

    def _finished(self, space: Space) -> _Seen:
        """What this worker sees, after files have got names that they should have had."""
        seen = self._seen()
        named = set[tuple[int, int]]().union(
            *tell(space.workers, {(s.iteration, s.size) for s in seen.finished}).values()
        )
        # The run was ended while files got their names: all of this generation are complete.
        for shard in seen.unfinished - seen.finished:
            is_mine = shard.place % space.workers.size == _place(space)
            if is_mine and (shard.iteration, shard.size) in named:
                path = self._path(shard)
                with suppress(OSError):  # which is then missing, and named
                    path.with_name(path.name + ".unfinished").rename(path)
        space.agree([True])  # now all see them
        return self._seen()

    def _seen(self) -> _Seen:
        """All files that this worker sees."""
        seen = _Seen(set(), set(), set())
        for folder in Path(self.folder).glob("iteration-*"):
            with suppress(OSError):  # another worker has just removed it
                for name in os.listdir(folder):
                    match = _NAME.fullmatch(f"{folder.name}/{name}")
                    if match is None:
                        continue
                    shard = _ShardFile(*map(int, match.groups()[:3]))
                    if match[4] is None:
                        seen.old.add(match[0])
                    elif shard.place < shard.size:
                        (seen.unfinished if match[5] else seen.finished).add(shard)
        return seen

    def _tell(self, told: str, text: str, space: Space) -> None:
        """Raise ValueError on all workers if one of them has something to tell."""
        said = _first_told(told, text, space)
        if said:
            raise ValueError(f"the checkpoint in {self.folder} {said}")

    def _path(self, shard: _ShardFile) -> Path:
        return Path(self.folder) / f"iteration-{shard.iteration:08d}" / shard.name


class _Files:
    """The files of one generation that a worker reads: its own, or those of all."""

    def __init__(self, checkpoint: Checkpoint, iteration: int, size: int, space: Space) -> None:
        self._checkpoint, self._space = checkpoint, space
        self._iteration, self._size = iteration, size
        self._files: list[TensorFile] = []
        self._notes: list[Notes] = []
        self._stays = False

    def open(self) -> str:
        """Read the notes; what is wrong with a file, empty if nothing is.

        All workers come here, and exchange how the image lay and lies.
        """
        space, is_own = self._space, self._size == self._space.workers.size
        problem = self._opened([_place(space)] if is_own else range(self._size))
        is_same = is_own and not problem and self._notes[0].layout == space.layout.identity
        self._stays = not any(space.agree([not is_same]))
        if problem or self._stays or not is_own:
            return problem
        problem = self._opened(range(self._size))
        others = " (the image lay in other parts: every worker reads all files)"
        return problem and problem + others

    def _opened(self, places: Iterable[int]) -> str:
        self._files, self._notes = [], []
        for place in places:
            path = self._checkpoint._path(_ShardFile(self._iteration, place, self._size))
            try:
                file = TensorFile(path)
                if not file.is_checked or file.notes.get(_MARK) != _FORM:
                    text = "is not a checkpoint of a solver, or one of another version"
                    raise ValueError(f"{path} {text}")
                encoded = file.read(_NOTES)
                if encoded.dtype != torch.uint8 or encoded.dim() != 1:
                    raise ValueError("its notes are no bytes")
                notes = decode(encoded.numpy().tobytes())
                if not isinstance(notes, Notes):
                    raise ValueError(f"{path} has no notes of a solver")
                notes.check()
                for name, (_, _, dtype) in notes.parts.items():
                    if f".{name}" not in file.entries or file.entries[f".{name}"].dtype != dtype:
                        raise ValueError(f"{path} lacks the values of {name!r}")
            except OSError as error:
                return f"{path}: {error.strerror or error}"
            except ValueError as error:
                return str(error) if str(path) in str(error) else f"{path}: {error}"
            self._files.append(file)
            self._notes.append(notes)
        return ""

    @property
    def _first(self) -> Notes:
        """Those of the first worker that held a part."""
        return next((each for each in self._notes if each.parts), self._notes[0])

    def check_kind(self, kind: dict[str, str], problem: dict[str, str]) -> None:
        """Raise ValueError on all workers if the files are of another problem."""
        notes, space = self._first, self._space
        was = dict(notes.kind)
        if self._stays:
            kind, was = {**kind, **problem}, {**was, **notes.problem}
        differ = [name for name in kind if was.get(name) != kind[name]]
        told = "; ".join(f"{name} was {was.get(name)} and is {kind[name]}" for name in differ)
        self._checkpoint._tell(
            told,
            "is of another problem: on worker {worker}, {told}; take another folder, or "
            "resume=False",
            space,
        )

    def values(self, method: Method, start: Values) -> tuple[Values, str]:
        """The values on this worker, and what is wrong with a file, the same text on all."""
        notes, space, problem = self._first, self._space, ""
        layout, room = space.layout, dict[str, Tensor]()
        try:
            for name, (_, more, dtype) in notes.parts.items():
                if layout.partition.active:
                    room[name] = self._part(name, more, dtype)
        except (ValueError, OSError) as error:
            problem = str(error)
        problem = _first_told(problem, _UNREADABLE, space)
        if problem:
            return {}, problem
        others = notes.others
        if not self._stays:
            # Of the other values those that are numbers, and on a worker without a part, its start.
            # What is no number lies as it did on a worker of before: `Method.complete` makes it.
            others = {name: start[name] for name in notes.parts if name in {*start} - {*room}}
            for name, each in notes.others.items():
                if each.dim() == 0 if isinstance(each, Tensor) else not isinstance(each, list):
                    others[name] = each
        values = _copied({**others, **room}, start["x"].device)
        if set(start) - set(values):
            values = method.complete(values, space)
        if set(values) != set(start):
            raise ValueError(
                f"the checkpoint in {self._checkpoint.folder} is of other parts of the image, to "
                f"which {sorted(set(start) - set(values))} of {method.name} cannot be converted; "
                f"run on as many workers with the same partition, implement `complete` in the "
                f"method, or use another folder"
            )
        return values, ""

    def resumed(self, start: Values) -> History:
        """The history; torch's random numbers go on as they would have."""
        notes = self._first
        torch.set_rng_state(notes.random["cpu"])
        if start["x"].is_cuda and "cuda" in notes.random:
            torch.cuda.set_rng_state(notes.random["cuda"], start["x"].device)
        return History(notes.history)

    def _part(self, name: str, more: Shape, dtype: torch.dtype) -> Tensor:
        """This worker's part of a value, from the files that have something of it."""
        layout = self._space.layout
        whole = *layout.local_shape, *more
        if self._stays:
            tensor = self._files[0].read(f".{name}")
            if tuple(tensor.shape) != whole:
                raise ValueError(f"{self._files[0].path}: {name!r} has the shape {tensor.shape}")
            return tensor
        box = layout.box() or ()
        room = torch.empty(whole, dtype=dtype)
        covered = torch.zeros(layout.local_shape, dtype=torch.bool)
        for file, notes in zip(self._files, self._notes, strict=True):
            start = notes.parts[name][0] if name in notes.parts else None
            if start is None or covered.all():
                continue
            shape = file.entries[f".{name}"].shape
            if len(start) != len(box) or len(shape) != len(whole) or shape[len(box) :] != more:
                raise ValueError(f"{file.path}: {name!r} has the shape {shape}")
            lying = [(s, s + n) for s, n in zip(start, shape[: len(box)], strict=True)]
            there = [boxes.overlap(*each) for each in zip(box, lying, strict=True)]
            common = tuple(each for each in there if each is not None)
            if len(common) < len(box):
                continue
            mine = boxes.within(common, box)
            theirs = [boxes.shift(each, -s) for each, s in zip(common, start, strict=True)]
            room[mine] = file.read(f".{name}", [*theirs, *((0, n) for n in more)])
            covered[mine] = True
        if not covered.all():
            folder = self._files[0].path.parent
            raise ValueError(f"the files in {folder} do not have all of {name!r}")
        return room


def _first_told(told: str, text: str, space: Space) -> str:
    """What the first worker says that has something to tell, in a text: the same on all workers."""
    if not any(space.agree([bool(told)])):  # texts travel only then
        return ""
    everyones = tell(space.workers, told).items()
    worker, first = next((worker, theirs) for worker, theirs in everyones if theirs)
    return text.format(worker=worker, told=first)


def _place(space: Space) -> int:
    """The number of this worker among those that solve."""
    assert space.workers.rank is not None
    return space.workers.rank


def _kind(method: Method, space: Space, values: Values) -> dict[str, str]:
    """What must be the same for a run to resume."""
    return {
        "the method": type(method).__name__,
        "the shape": str(tuple(space.layout.shape)),
        "the dtype": str(values["x"].dtype),
        "what is kept": ", ".join(sorted(values)),
    }


def _problem(method: Method) -> dict[str, str]:
    """The kinds of a method's operators, and a checksum of their numbers, as measurements.

    What a user may well change for the rest of a run is no part of it: steps, and functions.
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
            # No function holds numbers of the problem, nor what says where things lie.
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
    """What an object holds, but for what it has worked out for itself."""
    return {name: each for name, each in vars(value).items() if not name.startswith("_")}


def _copied(value: Any, device: torch.device) -> Any:
    """A copy of tensors, not of all of a storage of which one is a part; lists are plain lists."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {name: _copied(each, device) for name, each in value.items()}
    return [_copied(each, device) for each in value] if isinstance(value, list | tuple) else value
