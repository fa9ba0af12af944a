"""Spread tensors in files: each worker writes its box, and reads that of any other layout.

A folder gets its name when all workers have written all of it, so that there is never half of one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tessel.core.agreement import tell
from tessel.core.layout import Layout
from tessel.core.partition import Partition, world
from tessel.data.checkpoint_format import CheckpointFormat
from tessel.data.formats import Format, Keys, Stored
from tessel.data.together import kind_of, raise_together
from tessel.data.zarr_format import ZarrFormat
from tessel.state.tensor_file import commit
from tessel.tensor.tensor import Tensor, converters, layout_on

Where = Partition | Layout | Mapping[str, Any] | None
ZARR = ("zarr.json", ".zarray", ".zgroup")  # files by which folders are known
CHECKPOINT = ".metadata"
OTHERS = (".pt", ".pth", ".ckpt", ".npy", ".npz", ".h5", ".hdf5", ".safetensors", ".zip")


def save(
    x: Any,
    path: str | os.PathLike[str],
    *,
    chunks: Sequence[int] | Mapping[str, Any] | None = None,
) -> None:
    """Write a spread tensor, or dicts of them, into a folder, each worker its box.

    `tessel.load` reads it in any layout on any number of workers. A path that ends in `.zarr` gets
    the format of zarr (version 3): an array, or groups for dicts. Workers write whole chunks, for
    which boxes move to the borders of chunks first. Any other folder gets a checkpoint of
    `torch.distributed.checkpoint`, in which a tensor that is alone has the name "tensor".

    All workers of the job call this, and share the file system. What the folder held before, zarr
    or a checkpoint, is replaced when all of the new one is written. If a worker cannot write its
    box all of them raise, and the folder stays as it was.

    Args:
        x: a spread tensor; a plain one, which all workers have alike; or dicts of them, in dicts.
        path: of the folder.
        chunks: of zarr: the lengths of chunks along each dimension, or dicts of those in the form
            of x; None to let them follow the layout.

    >>> import tempfile, tessel
    >>> x = tessel.arange(6, where=tessel.world())
    >>> path = tempfile.mkdtemp() + "/x.zarr"
    >>> tessel.save({"x": x}, path)
    >>> int(tessel.load(path, tessel.world())["x"].sum())
    15
    """
    call, everyone = "tessel.save", world()
    folder = Path(os.path.realpath(path))
    form: Format = CheckpointFormat()
    state: dict[Keys, Tensor] = {}

    def look() -> None:
        nonlocal form
        if folder.suffix in OTHERS:
            raise ValueError(
                f"{path}: a folder of zarr (.zarr) or of a checkpoint (without an ending) is "
                f"written, and no file {folder.suffix}"
            )
        if folder.suffix == ".zarr":
            form = ZarrFormat(chunks)
        elif chunks is not None:
            raise ValueError(f"{path}: checkpoints have no chunks; a path for zarr ends in .zarr")
        state.update({keys: _spread(keys, value) for keys, value in _items(x)})
        if isinstance(chunks, Mapping):
            _check_names("chunks", chunks, state)
        form.check(state)
        if folder.exists() and not _is_ours(folder):
            raise FileExistsError(
                f"{path} is there, and neither zarr nor a checkpoint: it is not overwritten"
            )

    error = _attempt(look)
    listing = {keys: (each.dtype, each.layout.identity) for keys, each in state.items()}
    raise_together(call, f"{type(form).__name__} {chunks} {listing}", error)
    # in the folder of the first worker, as others may have another working directory
    names = tell(everyone, str(folder.with_name(f".{folder.name}.{os.urandom(6).hex()}")))
    unfinished = Path(names[everyone.ranks[0]])

    def make() -> None:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        form.prepare(unfinished, state)

    try:
        first = everyone.rank == 0
        error = _attempt(make) if first else None
        raise_together(call, "", error)
        if not unfinished.is_dir():
            error = FileNotFoundError(
                f"there is no {unfinished}, which worker 0 has made: all workers need to share "
                f"the file system"
            )
        raise_together(call, "", error)
        raise_together(call, "", form.write(unfinished, state))
        error = _attempt(lambda: _rename(unfinished, folder)) if first else None
        raise_together(call, "", error)
    finally:
        if everyone.rank == 0:  # unless it has got its name
            shutil.rmtree(unfinished, ignore_errors=True)


def load(
    path: str | os.PathLike[str],
    where: Where = None,
    *,
    device: torch.device | str | None = None,
) -> Any:
    """Read what `tessel.save`, or another program, has written, each worker its box.

    All workers of the job call this. If one cannot read its box all of them raise. Tensors need
    gradients if they did so when they were written, and have no history.

    Args:
        path: of a folder of zarr, or of a checkpoint of `torch.distributed.checkpoint`; nothing
            that is in its files is executed.
        where: a layout; a partition, whose axis d splits dimension d; or dicts of those, in the
            form of what was written. What has none is plain, and whole on every worker. In dicts, a
            partition is for tensors with as many dimensions as it has axes.
        device: where to bring parts; None to leave them in memory.

    >>> import tempfile, tessel, torch
    >>> path = tempfile.mkdtemp() + "/checkpoint"
    >>> tessel.save(torch.ones(2, 3), path)
    >>> tessel.load(path)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    call, folder, everyone = "tessel.load", Path(path), world()
    form: Format = CheckpointFormat()
    stored: dict[Keys, Stored] = {}
    targets: dict[Keys, Layout | None] = {}

    def look() -> None:
        nonlocal form
        if any((folder / name).exists() for name in ZARR):
            form = ZarrFormat()
        elif not (folder / CHECKPOINT).exists():
            missing = ValueError if folder.exists() else FileNotFoundError
            raise missing(f"{path} is no folder of zarr, and none of a checkpoint")
        stored.update(form.stored(folder))
        if isinstance(where, Mapping):
            _check_names("where", where, stored)
        targets.update({keys: _target(where, keys, each) for keys, each in stored.items()})

    error = _attempt(look)
    listing = {keys: getattr(each, "identity", None) for keys, each in targets.items()}
    raise_together(call, f"{stored} {listing} {kind_of(device)}", error)
    layouts = {
        keys: Layout.whole(everyone, stored[keys].shape, shared=True) if each is None else each
        for keys, each in targets.items()
    }
    parts: dict[Keys, torch.Tensor] = {}
    error = _attempt(lambda: parts.update(form.read(folder, layouts)))
    raise_together(call, "", error)
    found: dict[Keys, Any] = {}
    for keys, part in parts.items():
        own = part.to(device).requires_grad_(stored[keys].requires_grad)
        target = targets[keys]
        found[keys] = own if target is None else Tensor(own, target)
    return _nested(found)


def _items(x: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """All values in dicts of dicts, and where they are."""
    if not isinstance(x, Mapping):
        yield keys, x
        return
    for key, value in x.items():
        if not isinstance(key, str):
            raise TypeError(f"names of tensors are text, got {key!r}")
        yield from _items(value, (*keys, key))


def _nested(found: Mapping[Keys, Any]) -> Any:
    if () in found:
        return found[()]
    nested: dict[str, Any] = {}
    for keys, value in found.items():
        holder = nested
        for key in keys[:-1]:
            holder = holder.setdefault(key, {})
        holder[keys[-1]] = value
    return nested


def _spread(keys: Keys, value: Any) -> Tensor:
    """A tensor as one that knows its layout; a plain one is whole on all workers."""
    if type(value) in converters:
        value = converters[type(value)](value, None)
    if not isinstance(value, Tensor):
        name = f"{'/'.join(keys)!r}: " if keys else ""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"{name}dense tensors, and dicts of them, are needed, got {kind}")
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name}a tessel.Tensor or a plain tensor is needed, got {type(value).__name__}; "
                f"of a DTensor, tessel.from_dtensor makes one"
            )
        value = Tensor(value, Layout.whole(world(), value.shape, shared=True))
    if value.layout.blocks:
        raise NotImplementedError(f"{value.layout} has blocks, which are no boxes of one tensor")
    return value


def _target(where: Where, keys: Keys, stored: Stored) -> Layout | None:
    """Where a tensor is to lie; None for a plain one."""
    for key in keys:
        where = where.get(key) if isinstance(where, Mapping) else where
    if where is None or (keys and isinstance(where, Partition) and where.dim != len(stored.shape)):
        return None
    if isinstance(where, Mapping):
        raise ValueError(f"{'/'.join(keys) or 'this'} is a tensor, got a dict as where=")
    return layout_on(where, stored.shape)


def _check_names(what: str, given: Mapping[str, Any], known: Mapping[Keys, Any]) -> None:
    """Raise if something is said of tensors that are not there."""
    for keys, _ in _items(given):
        if not any(keys == each[: len(keys)] for each in known):
            raise ValueError(
                f"{what}: there is no {'/'.join(keys)!r}, but {', '.join(map('/'.join, known))}"
            )


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and (
        any((folder / name).exists() for name in (*ZARR, CHECKPOINT)) or not any(folder.iterdir())
    )


def _rename(unfinished: Path, folder: Path) -> None:
    """Give a folder its name; what had it is removed then, and not before."""
    old = unfinished.with_name(f"{unfinished.name}.old")
    if folder.exists():
        os.rename(folder, old)
    try:
        commit(unfinished, folder)
    except OSError:
        if old.exists():
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _attempt(step: Callable[[], Any]) -> Exception | None:
    """What a step raises, to be told to all workers."""
    try:
        step()
    except Exception as error:  # of a storage, which may raise anything
        return error
    return None
