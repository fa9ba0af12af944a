"""A reader of checkpoints of `torch.distributed.checkpoint` that executes nothing in them.

Torch unpickles their `.metadata`, and values that are no tensors: a pickle may call any function of
Python. Here a pickle may only use the classes of metadata. The module is imported when it is used,
since `torch.distributed.checkpoint` takes half a second.

Checkpoints that Tessel writes have checksums. They follow the pickle in `.metadata`, which marks
its own end: other readers ignore them.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
    filesystem,
    metadata,
)
from torch.futures import Future

INSTEAD = "it was not read, since it could run code"
_SIGNED = b"\ntessel-checksums "


class CheckpointReader(FileSystemReader):
    """Reads the files of a checkpoint, and raises for anything but tensors and plain values.

    Args:
        folder: the folder of the checkpoint.
        when_read: a function that is called after the metadata were read.
    """

    def __init__(self, folder: str | os.PathLike[str], when_read: Callable[[], None]) -> None:
        super().__init__(folder)
        self._when_read = when_read
        self._refusal: ValueError | None = None
        self._sums: dict[str, int] | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        if rank is not None and self._refusal is not None:
            # Torch treats rejected metadata as missing, and asks for those of this worker. Before
            # torch 2.13 its own error has no reason: the next step has.
            return Metadata({})
        path = Path(self.path) / (".metadata" if rank is None else f"__{rank}.metadata")
        try:
            data = path.read_bytes()
            self._sums = signed(data, path)
            found = _Unpickler(io.BytesIO(data), path).metadata()
        except ValueError as error:
            self._refusal = error
            raise
        self._refusal = None
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        self._when_read()
        return found

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        if self._refusal is not None:
            raise self._refusal
        super().set_up_storage_reader(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        infos = [self.storage_data[item.storage_index] for item in plan.items]
        pieces = {(info.relative_path, info.offset, info.length) for info in infos}
        for name, offset, length in pieces if self._sums is not None else ():
            path = Path(self.path) / name
            if checksum_at(path, offset, length) != self._sums.get(f"{name} {offset}"):  # type: ignore[union-attr]
                raise ValueError(
                    f"{path} is damaged: the {length} bytes from {offset} on are not those that "
                    f"were written"
                )
        checked: Any = _CheckedPlanner(planner, Path(self.path))
        return super().read_data(plan, checked)


def checksum_at(path: Path, offset: int, length: int) -> int:
    """The checksum of some bytes of a file, which are not copied; -1 if it is too short."""
    with open(path, "rb") as file:
        if not offset < offset + length <= os.fstat(file.fileno()).st_size:
            return -1
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
            view[offset : offset + length] as some,
        ):
            return zlib.crc32(some)


def sign(path: Path, sums: Mapping[tuple[str, int], int]) -> None:
    """Append checksums of pieces, by file and place, and one of all of it, to metadata."""
    with open(path, "rb+") as file:
        data = file.read() + _SIGNED
        data += json.dumps({f"{name} {at}": n for (name, at), n in sums.items()}).encode()
        file.seek(0)
        file.write(data + b"\n" + hashlib.sha256(data).hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())


def signed(data: bytes, path: Path) -> dict[str, int] | None:
    """The checksums in metadata; None if others wrote them."""
    before, mark, after = data.rpartition(_SIGNED)
    if not mark:
        return None
    sums, _, checksum = after.rpartition(b"\n")
    if hashlib.sha256(before + mark + sums).hexdigest().encode() != checksum:
        raise ValueError(f"{path} is damaged: it is not what was written")
    return json.loads(sums)


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds only the classes of metadata.

    Args:
        file: the open file.
        path: the path of the file.
    """

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def metadata(self) -> Metadata:
        """The metadata in the file; raises if it is not in torch's form."""
        # A pickle can set attributes of everything that it can name: restore the classes.
        before = [(kind, dict(vars(kind))) for kind in _CLASSES]
        try:
            found = self.load()
            is_right = isinstance(found, Metadata) and isinstance(found.state_dict_metadata, dict)
            files = [info.relative_path for info in found.storage_data.values()] if is_right else []
            is_right = is_right and all(Path(name).name == name for name in files)
            is_right = is_right and isinstance(found.storage_meta, metadata.StorageMeta | None)
            problem = "they describe no files beside it"
        except Exception as error:  # a damaged pickle may raise anything
            if isinstance(error, ValueError) and INSTEAD in str(error):
                raise
            is_right, problem = False, f"{type(error).__name__}: {error}"
        finally:
            for kind, attributes in before:
                for name in [name for name in vars(kind) if name not in attributes]:
                    delattr(kind, name)
                for name, value in attributes.items():
                    if vars(kind)[name] is not value:
                        setattr(kind, name, value)
        if not is_right:
            raise ValueError(
                f"{self._path} is damaged, or holds no metadata of a checkpoint: {problem}"
            )
        return found

    def find_class(self, module: str, name: str) -> Any:
        if (known := _KNOWN.get((module, name))) is not None:
            return known
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise ValueError(
            f"{self._path} names {module}.{name}, which no checkpoint needs: {INSTEAD}. Files of "
            f"`nn.save_weights` and `nn.load_weights` hold nothing but tensors"
        )


_CLASSES = [
    kind
    for home in (metadata, filesystem)
    for kind in vars(home).values()
    if isinstance(kind, type) and kind.__module__ == home.__name__
    if home is metadata or kind.__name__ in ("_StorageInfo", "_StoragePrefix")
]
_LAYOUTS = {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)}
# A pickle can call these functions, but nothing else.
_KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: _LAYOUTS[name],
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): lambda *parts: os.path.join("", *parts)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class _CheckedPlanner:
    """A planner that gets only values of plain types, which torch itself would unpickle.

    Args:
        planner: the planner of the load.
        path: the path of the checkpoint.
    """

    def __init__(self, planner: LoadPlanner, path: Path) -> None:
        self._planner, self._path = planner, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.storage_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(
                f"the value {name!r} of the checkpoint in {self._path} is more than numbers, text, "
                f"tensors and containers of them: {INSTEAD} ({str(error).partition(chr(10))[0]})"
            ) from error
        again = io.BytesIO()  # the planner unpickles only these bytes
        torch.save(found, again)
        again.seek(0)
        self._planner.load_bytes(read_item, again)
