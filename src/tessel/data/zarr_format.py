"""zarr: arrays in chunks, which other programs read; no chunk is written by two workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tessel.core import boxes
from tessel.core.layout import Cut, Layout, Shape
from tessel.data.formats import Format, Keys, NamedTensors, Stored, part_in, said_of
from tessel.data.sources import as_tensor, needed, torch_dtype

LIMIT = 8 << 20  # default bytes of a chunk
NOTES = "tessel"  # the attribute for what zarr cannot describe
BITS = {torch.bfloat16: torch.uint16}  # dtypes that zarr lacks, and those in which they are stored


class ZarrFormat(Format):
    """The format of zarr, version 3, with chunks that follow the layouts of tensors.

    Args:
        chunks: the lengths of chunks, or dicts of those; None for chunks that fit the layout.
    """

    marks = ("zarr.json", ".zarray", ".zgroup")

    def __init__(self, chunks: Sequence[int] | Mapping[str, Any] | None = None) -> None:
        self._chunks = chunks

    def check(self, state: NamedTensors) -> None:
        needed("zarr", "a folder .zarr")
        for keys, x in state.items():
            for key in keys:
                if not key or "/" in key or key.startswith((".", "__")) or key == "zarr.json":
                    raise ValueError(
                        f"{key!r} cannot be a name in zarr, which uses names as names of folders"
                    )
            _numpy_dtype(x.dtype)
            self._aligned(keys, x)

    def prepare(self, folder: Path, state: NamedTensors) -> None:
        zarr: Any = needed("zarr", folder)
        if () not in state:
            zarr.create_group(folder)
        for keys, x in state.items():
            notes: dict[str, Any] = {"requires_grad": True} if x.requires_grad else {}
            if x.dtype in BITS:
                notes["dtype"] = str(x.dtype)
            for depth in range(1, len(keys)):
                zarr.open_group(folder, path="/".join(keys[:depth]), mode="a")
            zarr.create_array(
                folder,
                name="/".join(keys) or None,
                shape=tuple(x.shape),
                chunks=self._lengths(keys, x),
                dtype=_numpy_dtype(x.dtype),
                attributes={NOTES: notes} if notes else None,
                # also chunks of -0.0, which are equal to those of 0.0 that would be skipped
                config={"write_empty_chunks": True},
            )

    def write(self, folder: Path, state: NamedTensors) -> None:
        zarr: Any = needed("zarr", folder)
        problem: Exception | None = None
        for keys, x in state.items():
            layout = self._aligned(keys, x)
            # Whole chunks: of two workers that write one chunk, each would overwrite the other's
            # values.
            part = part_in(layout, x)  # even after an error, since others wait for it
            if not layout.counts or not part.numel() or problem is not None:
                continue
            try:
                config = {"write_empty_chunks": True}
                array = zarr.open_array(folder, path="/".join(keys), mode="r+", config=config)
                plain = part.cpu().resolve_conj().resolve_neg().contiguous()
                kept = plain.view(BITS.get(part.dtype, part.dtype))
                array[layout.local_slice() or ...] = kept.numpy()
            except Exception as error:  # any exception of the storage is reported to all workers
                problem = error
        if problem is not None:
            raise problem

    def stored(self, folder: Path) -> dict[Keys, Stored]:
        zarr: Any = needed("zarr", folder)
        root = zarr.open(folder, mode="r")
        if isinstance(root, zarr.Array):
            return {(): _stored(root)}
        members = sorted(root.members(max_depth=None))
        return {
            tuple(name.split("/")): _stored(each)
            for name, each in members
            if isinstance(each, zarr.Array)
        }

    def read(self, folder: Path, layouts: Mapping[Keys, Layout]) -> dict[Keys, torch.Tensor]:
        zarr: Any = needed("zarr", folder)
        found = {}
        for keys, layout in layouts.items():
            array = zarr.open_array(folder, path="/".join(keys), mode="r")
            dtype = _stored(array).dtype
            if math.prod(layout.local_shape):
                part = as_tensor(array[layout.local_slice() or ...])
            else:
                part = torch.empty(layout.local_shape, dtype=BITS.get(dtype, dtype))
            found[keys] = part.view(dtype) if dtype in BITS else part
        return found

    def _lengths(self, keys: Keys, x: Any) -> Shape:
        """The lengths of the chunks of a tensor."""
        given, shape = said_of(keys, self._chunks), tuple(x.shape)
        if given is not None:
            lengths = tuple(int(each) for each in given)
            if len(lengths) != len(shape) or min(lengths, default=1) < 1:
                raise ValueError(
                    f"expected one length of at least 1 for each dimension of shape {shape}, got "
                    f"chunks {lengths}{' of ' + '/'.join(keys) if keys else ''}"
                )
            return lengths
        parts = [len(cut.intervals) for cut in x.layout.cuts]
        found = [max(1, -(-n // p)) for n, p in zip(shape, parts, strict=True)]
        # A reader of a few values loads whole chunks: halves of the longest side until they fit.
        while math.prod(found) * x.dtype.itemsize > LIMIT:
            longest = found.index(max(found))
            found[longest] = -(-found[longest] // 2)
        return tuple(found)

    def _aligned(self, keys: Keys, x: Any) -> Layout:
        """The layout of a tensor with borders between chunks: balanced numbers of chunks."""
        layout: Layout = x.layout
        cuts = []
        for cut, n, chunk in zip(layout.cuts, x.shape, self._lengths(keys, x), strict=True):
            counts = boxes.balanced(-(-n // chunk), len(cut.intervals))
            borders = [(min(n, start * chunk), min(n, stop * chunk)) for start, stop in counts]
            cuts.append(Cut(cut.axes, tuple(borders)))
        return replace(layout, cuts=tuple(cuts)).summed


def _numpy_dtype(dtype: torch.dtype) -> Any:
    try:
        return torch.empty(0, dtype=BITS.get(dtype, dtype)).numpy().dtype
    except TypeError as error:
        raise NotImplementedError(
            f"zarr has no dtype for {dtype}: convert it, or write a checkpoint, to a path without "
            f".zarr"
        ) from error


def _stored(array: Any) -> Stored:
    notes = array.attrs.get(NOTES, {})
    names = {str(each): each for each in BITS}
    dtype = names.get(notes.get("dtype", "")) or torch_dtype(array.dtype)
    return Stored(tuple(map(int, array.shape)), dtype, bool(notes.get("requires_grad")))
