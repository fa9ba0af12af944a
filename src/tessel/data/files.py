"""Spread tensors in files: each worker writes its box, and reads that of any other layout.

A folder gets its name when all workers have written all of it, so that it is never incomplete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tessel.core.agreement import agree, tell
from tessel.core.checksum import checksum
from tessel.core.layout import Layout
from tessel.core.partition import Partition, world
from tessel.core.shared import shared_whole
from tessel.data.checkpoint_format import CheckpointFormat
from tessel.data.formats import Format, Keys, flattened, nested, said_of
from tessel.data.zarr_format import ZarrFormat
from tessel.state.raising import kind_of, together
from tessel.tensor.tensor import Tensor, converters, layout_on
from tessel.transport import code_of

Destination = Partition | Layout | Mapping[str, Any] | None
FORMATS: tuple[type[Format], ...] = (ZarrFormat, CheckpointFormat)
PLAIN = (torch.Tensor, torch.nn.Parameter)
OTHERS = (".pt", ".pth", ".ckpt", ".npy", ".npz", ".h5", ".hdf5", ".safetensors", ".zip")


def save(
    x: Any, path: str | os.PathLike[str], *, chunks: Sequence[int] | Mapping[str, Any] | None = None
) -> None:
    """Write a spread tensor, or dicts of them, to a folder, on each worker its box.

    `tessel.load` reads it in any layout on any number of workers. A path that ends in `.zarr` gets
    the format of zarr (version 3): an array, or groups for dicts. Workers write whole chunks, so
    boxes are first moved to the borders of chunks. Any other folder gets a checkpoint of
    `torch.distributed.checkpoint`, in which a single tensor has the name "tensor".

    All workers of the job call this, and share the file system. What the folder held before, zarr
    or a checkpoint, is replaced when all of the new one is written. If a worker cannot write its
    box, or has another plain tensor than the others, all of them raise, and the folder stays as it
    was.

    Args:
        x: a spread tensor; a plain one, which all workers have alike; or dicts of them, in dicts.
        path: the path of the folder.
        chunks: for zarr, the lengths of chunks along each dimension, or dicts of those in the
            structure of x; None for chunks that follow the layout.

    >>> import tempfile, tessel
    >>> x = tessel.arange(6, where=tessel.world())
    >>> path = tempfile.mkdtemp() + "/x.zarr"
    >>> tessel.save({"x": x}, path)
    >>> int(tessel.load(path, tessel.world())["x"].sum())
    15
    """
    call = "tessel.save"
    with together(call) as facts:
        folder = Path(os.path.realpath(path))
        if folder.suffix in OTHERS:
            raise ValueError(
                f"{path}: tessel.save writes a zarr folder (.zarr) or a checkpoint (without a "
                f"suffix), not a {folder.suffix} file"
            )
        if folder.suffix != ".zarr" and chunks is not None:
            raise ValueError(f"{path}: checkpoints have no chunks; use a path that ends in .zarr")
        form = ZarrFormat(chunks) if folder.suffix == ".zarr" else CheckpointFormat()
        state = {keys: _spread(keys, value) for keys, value in flattened(x)}
        if isinstance(chunks, Mapping):
            _check_names("chunks", chunks, state)
        form.check(state)
        is_empty = folder.is_dir() and not any(folder.iterdir())
        if folder.exists() and not is_empty and not any(each.is_in(folder) for each in FORMATS):
            raise FileExistsError(
                f"{path} exists and is neither zarr nor a checkpoint, so it is not overwritten"
            )
        kinds = {keys: (each.dtype, each.layout.identity) for keys, each in state.items()}
        plain = {keys: each for keys, each in flattened(x) if type(each) in PLAIN}
        facts.append(f"{type(form).__name__} {chunks} {kinds} {[*plain]}")
    if plain:
        _check_alike(call, plain)
    form.save(call, folder, state)


def load(
    path: str | os.PathLike[str],
    where: Destination = None,
    *,
    device: torch.device | str | None = None,
) -> Any:
    """Read a folder of `tessel.save`, or of another program, on each worker its box.

    All workers of the job call this. If one cannot read its box, all of them raise. Tensors require
    gradients if they did when they were written, and have no history.

    Args:
        path: the path of a folder of zarr, or of a checkpoint of `torch.distributed.checkpoint`;
            nothing in its files is executed.
        where: a layout; a partition, whose axis d splits dimension d; or dicts of those, in the
            structure of the folder. Tensors without one are plain, and whole on every worker. In
            dicts, a partition applies to tensors with as many dimensions as it has axes.
        device: the device of the parts; None for the CPU.

    >>> import tempfile, tessel, torch
    >>> path = tempfile.mkdtemp() + "/checkpoint"
    >>> tessel.save(torch.ones(2, 3), path)
    >>> tessel.load(path)
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    call = "tessel.load"
    with together(call) as facts:
        folder = Path(path)
        form = next((each() for each in FORMATS if each.is_in(folder)), None)
        if form is None:
            missing = ValueError if folder.exists() else FileNotFoundError
            raise missing(f"{path} is neither a zarr folder nor a checkpoint")
        stored = form.stored(folder)
        if isinstance(where, Mapping):
            _check_names("where", where, stored)
        targets: dict[Keys, Layout | None] = {}  # None for plain tensors
        for keys, each in stored.items():
            place = said_of(keys, where)
            if isinstance(place, Mapping):
                raise ValueError(f"{'/'.join(keys) or 'this'} is a tensor, got a dict as where=")
            # In dicts, a partition applies to the tensors that have a dimension for each of its
            # axes.
            is_other = isinstance(place, Partition) and place.dim != len(each.shape)
            is_plain = place is None or (keys and is_other)
            targets[keys] = None if is_plain else layout_on(place, each.shape)
        listing = {keys: getattr(each, "identity", None) for keys, each in targets.items()}
        facts.append(f"{stored} {listing} {kind_of(device)}")
    # Only now all workers have verified that their calls agree: each reads its box without the
    # others.
    with together(call):
        whole = {keys: shared_whole(world(), each.shape) for keys, each in stored.items()}
        parts = form.read(folder, {keys: targets[keys] or whole[keys] for keys in stored})
        parts = {keys: part.to(device) for keys, part in parts.items()}
    found: dict[Keys, Any] = {}
    for keys, part in parts.items():
        own, target = part.requires_grad_(stored[keys].requires_grad), targets[keys]
        found[keys] = own if target is None else Tensor(own, target)
    return nested(found)


def _spread(keys: Keys, value: Any) -> Tensor:
    """A tensor as a spread tensor; a plain one is whole on all workers."""
    if type(value) in converters:
        value = converters[type(value)](value, None)
    if not isinstance(value, Tensor):
        name = f"{'/'.join(keys)!r}: " if keys else ""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"{name}expected dense tensors, or dicts of dense tensors, got {kind}")
        if type(value) not in PLAIN:
            raise TypeError(
                f"{name}expected a tessel.Tensor or a plain tensor, got {type(value).__name__}; "
                "tessel.from_dtensor converts a DTensor"
            )
        value = Tensor(value, shared_whole(world(), tuple(value.shape)))
    if value.layout.blocks:
        raise NotImplementedError(f"{value.layout} has blocks, which are not boxes of one tensor")
    return value


def _check_alike(call: str, plain: Mapping[Keys, torch.Tensor]) -> None:
    """Raise on all workers if a plain tensor has other values on one: they would be lost."""
    sums = {keys: checksum(each) for keys, each in plain.items()}
    _, said = agree(world(), call, numbers=(code_of(f"{sums}"),))
    if len({*said.values()}) == 1:  # or else it is told which one differs
        return
    told = tell(world(), sums)
    first, expected = next(iter(told.items()))
    for worker, found in told.items():
        for keys, number in found.items():
            if number != expected[keys]:
                name = repr("/".join(keys)) if keys else "the tensor"
                raise ValueError(
                    f"{call}: {name} is a plain tensor whose values differ between workers {first} "
                    f"and {worker}, and only one copy would be written; pass a spread tensor, "
                    "which tessel.from_local creates from parts, or "
                    "tessel.nn.collect_state_dict(model) for a model whose layers have shards"
                )


def _check_names(what: str, given: Mapping[str, Any], known: Mapping[Keys, Any]) -> None:
    """Raise if an argument names tensors that do not exist."""
    for keys, _ in flattened(given):
        if not any(keys == each[: len(keys)] for each in known):
            raise ValueError(
                f"{what}: there is no {'/'.join(keys)!r}, but {', '.join(map('/'.join, known))}"
            )
