"""Tensor files: named tensors in one file, in the format of safetensors, with checksums.

    8 bytes       the length of the header
    header        JSON: for each tensor its dtype, its shape and where its bytes are; and notes
    bytes         of one tensor after the other

Nothing in it is executed, and everything is checked before it is used: lengths against the size of
the file, the header against its own checksum, bytes against a checksum for each block of them.
Files of other programs are read without checksums. The notes in our files are text, under names
that begin with "tessel."; other programs ignore them.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tessel.core.boxes import Interval
from tessel.encoding import tensor_bytes, tensor_of

FORMAT = "1"  # of our notes
_BLOCK = 1 << 20  # bytes that have one checksum
_LONGEST_HEADER = 100 << 20  # as safetensors has it
_NO_CHECKSUM = "0" * 64
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",  # which safetensors does not have
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its dtype and shape, and where its bytes begin after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class TensorFileWriter:
    """Writes a tensor file, tensor by tensor, so that only one has to be in memory.

    The file gets its name once all of it is on the disk; an interrupted one is never found.

    Args:
        path: of the file.
        kinds: dtype and shape of each tensor, in the order in which they come.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    ) -> None:
        self.path = Path(path)
        self.unfinished = self.path.with_name(self.path.name + ".unfinished")
        self._entries: dict[str, TensorEntry] = {}
        place = 0
        for name, (dtype, shape) in kinds.items():
            if dtype not in _NAMES:
                raise TypeError(f"{name} has the dtype {dtype}, which tensor files do not support")
            self._entries[name] = entry = TensorEntry(dtype, tuple(shape), place)
            place += entry.num_bytes
        self._sums = {name: "0" * 8 * _num_blocks(e) for name, e in self._entries.items()}
        self._waiting = list(self._entries)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.unfinished, "wb")  # noqa: SIM115  # closed by `finish` or `drop`
        self._file.write(self._header())

    def put(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor."""
        entry = self._entries[name]
        assert self._waiting.pop(0) == name and tuple(tensor.shape) == entry.shape
        assert tensor.dtype == entry.dtype
        data, sums = tensor_bytes(tensor), []
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            sums.append(f"{zlib.crc32(block):08x}")
            self._file.write(block)
        self._sums[name] = "".join(sums)

    def finish(self) -> None:
        """Wait until all of the file is on the disk, and rename it."""
        assert not self._waiting
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        commit(self.unfinished, self.path)

    def drop(self) -> None:
        """Remove the file, if it was not renamed yet."""
        with suppress(OSError):  # of a disk that is full
            self._file.close()
        self.unfinished.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and not self._file.closed:
                self.finish()
        finally:
            self.drop()  # unless it has its name

    def _header(self) -> bytes:
        """Length and header; it is as long with all checksums as without."""
        entries: dict[str, Any] = {
            name: {
                "dtype": _NAMES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": [entry.start, entry.start + entry.num_bytes],
            }
            for name, entry in self._entries.items()
        }
        own = {
            "tessel.checksum": _NO_CHECKSUM,
            "tessel.format": FORMAT,
            "tessel.blocks": json.dumps(self._sums),
        }
        text = json.dumps({"__metadata__": own, **entries}).encode()
        text += b" " * (-len(text) % 8)
        checksum = hashlib.sha256(text).hexdigest()
        text = text.replace(_NO_CHECKSUM.encode(), checksum.encode(), 1)
        return len(text).to_bytes(8, "little") + text


def commit(unfinished: Path, path: Path) -> None:
    """Give a file or folder its name, so that neither a crash nor a loss of power can undo it."""
    if unfinished.is_dir():
        _sync(unfinished)
    os.replace(unfinished, path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class TensorFile:
    """An open tensor file: its notes, and its tensors, which are read on access.

    Args:
        path: of the file.

    Raises:
        ValueError: if it is no tensor file, or damaged; the text names it.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            self._check(
                size >= 8 and 2 <= length <= min(size - 8, _LONGEST_HEADER),
                f"it has {size} bytes, and the header of a tensor file would need {length}",
            )
            text = file.read(length)
        self._begin = 8 + length
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._error(f"its header is not JSON: {error}") from error
        self._check(isinstance(header, dict), "its header is not a JSON object")
        self.notes = self._notes(header.pop("__metadata__", {}), text)
        self.entries: dict[str, TensorEntry] = {}
        for name, value in header.items():
            try:
                dtype = _DTYPES[value["dtype"]]
                shape, (start, stop) = tuple(value["shape"]), value["data_offsets"]
                is_right = all(type(n) is int and 0 <= n < 2**62 for n in (*shape, start, stop))
                entry = self.entries[name] = TensorEntry(dtype, shape, start)
                is_right = is_right and entry.num_bytes == stop - start
            except (KeyError, TypeError, ValueError):
                is_right = False
            self._check(is_right, f"its entry for {name!r} does not describe a tensor")
        # Tensors are contiguous, without gaps, to the end of the file.
        place, end = 0, size - self._begin
        for entry in sorted(self.entries.values(), key=lambda each: (each.start, each.num_bytes)):
            self._check(entry.start == place, "its tensors overlap, or have gaps between them")
            place += entry.num_bytes
        self._check(place == end, f"it has {end} bytes of tensors, but its header lists {place}")
        # Files of other programs have no checksums.
        self._blocks: dict[str, str] | None = None
        if "tessel.checksum" in self.notes:
            try:
                sums = json.loads(self.notes.get("tessel.blocks", ""))
                is_right = sums.keys() == self.entries.keys() and all(
                    len(sums[name]) == 8 * _num_blocks(each) for name, each in self.entries.items()
                )
            except (ValueError, AttributeError, TypeError, RecursionError):
                is_right = False
            self._check(is_right, "it lacks checksums")
            self._blocks = {name: str(each) for name, each in sums.items()}

    def read(self, name: str, box: Sequence[Interval] | None = None) -> Tensor:
        """A tensor, or a box of it: only the blocks from its first to its last number are read."""
        if name not in self.entries:
            raise self._error(f"it has no {name!r}, but {', '.join(sorted(self.entries)[:8])}")
        entry = self.entries[name]
        box = [(0, n) for n in entry.shape] if box is None else list(box)
        shape = tuple(max(0, stop - start) for start, stop in box)
        if not prod(shape):
            return torch.empty(shape, dtype=entry.dtype)
        # Along the first dimension the box is one run of bytes; of others all is read, and cut.
        (first, last), *others = box or [(0, 1)]
        row = prod(entry.shape[1:]) * entry.dtype.itemsize
        # Whole blocks, whose checksums are compared, and of these the requested bytes.
        start, stop = first * row, last * row
        begin, end = start - start % _BLOCK, min(entry.num_bytes, stop + -stop % _BLOCK)
        with open(self.path, "rb") as file:
            file.seek(self._begin + entry.start + begin)
            data = memoryview(file.read(end - begin))
        self._check(len(data) == end - begin, f"it ends within {name!r}")
        sums = "" if self._blocks is None else self._blocks[name]
        for place in range(0, len(data), _BLOCK) if sums else ():
            at = 8 * ((begin + place) // _BLOCK)
            written = sums[at : at + 8]
            found = f"{zlib.crc32(data[place : place + _BLOCK]):08x}"
            self._check(
                found == written,
                f"the bytes of {name!r} are not those that were written: they have the "
                f"checksum {found}, not {written}",
            )
        data = data[start - begin : stop - begin]
        rows = tensor_of(data, entry.dtype, (last - first, *entry.shape[1:]) if box else ())
        part = rows[(slice(None), *(slice(*each) for each in others))] if box else rows
        return part.contiguous()

    def _notes(self, notes: Any, text: bytes) -> dict[str, str]:
        is_text = isinstance(notes, dict) and all(isinstance(v, str) for v in notes.values())
        self._check(is_text, "its notes are not text")
        if (checksum := notes.get("tessel.checksum")) is not None:
            blank = text.replace(checksum.encode("utf-8", "replace"), _NO_CHECKSUM.encode(), 1)
            is_right = len(checksum) == len(_NO_CHECKSUM)
            is_right = is_right and hashlib.sha256(blank).hexdigest() == checksum
            self._check(is_right, "its header is not the one that was written")
            self._check(
                notes.get("tessel.format") == FORMAT,
                f"it has the format {notes.get('tessel.format')}, and this version of Tessel "
                f"reads {FORMAT}",
            )
        return dict(notes)

    def _check(self, is_right: bool, problem: str) -> None:
        if not is_right:
            raise self._error(problem)

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{self.path} is damaged, or is not a tensor file: {problem}")


def _num_blocks(entry: TensorEntry) -> int:
    return int(np.ceil(entry.num_bytes / _BLOCK))
