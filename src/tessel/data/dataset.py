"""Datasets in parts: a worker reads its box of each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_structure, tree_unflatten
from torch.utils.data import Dataset

from tessel import transport
from tessel.core import boxes
from tessel.core.boxes import Box
from tessel.core.layout import Cut, Layout, Shape
from tessel.core.partition import Partition
from tessel.data.sources import Source
from tessel.tensor.create import Where


@dataclass(frozen=True)
class SamplePart:
    """The part and the sample that a transform gets.

    Attributes:
        index: the index of the sample.
        boxes: the boxes of the parts in the sample, with their halos; in the structure of the
            sample.
        generator: a generator that is the same for all parts of a sample, and differs between
            epochs.
    """

    index: int
    boxes: Any
    generator: torch.Generator


class PartDataset(Dataset[Any]):
    """A dataset that returns this worker's box of each sample.

    `dataset[index]` is this worker's part of each array of a sample, in the structure of `sources`:
    a tensor, a tuple, a dict. It reads and never communicates, so that threads and the processes of
    a `torch.utils.data.DataLoader` can use it. `PartLoader` makes batches of spread tensors from
    it.

    The last axes of a grid split the last dimensions of a sample, as broadcasting would match them:
    on a grid [2, 1, 4, 1], images (C, H, W) and labels (H, W) are split alike, and a single number
    is on every worker. The first axis splits batches, unless it splits a dimension of a sample.

    Args:
        sources: a `Source`, or tuples and dicts of them, of one length.
        where: a grid; or the layout of a sample; or one of these for each source. Along axes of a
            layout that split no dimension, and not the batch, there are copies.
        transform: `transform(sample, place)` returns a sample with the same shapes and dtypes, from
            this worker's parts and a `SamplePart`. Draw random numbers from `place.generator`.
        halo: the halo that a worker reads for the transform, `(before, after)` for each dimension
            of a sample; or that for each source, or None. The transform's result there is dropped.

    >>> import numpy, tessel
    >>> images, labels = numpy.ones((5, 3, 8, 8)), numpy.arange(5)
    >>> sources = {"image": tessel.data.FromArray(images), "label": tessel.data.FromArray(labels)}
    >>> grid = tessel.world().create_cartesian_topology_partition([1, 1, 1, 1])
    >>> dataset = tessel.data.PartDataset(sources, grid)
    >>> len(dataset), dataset[2]["image"].shape, dataset[2]["label"]
    (5, torch.Size([3, 8, 8]), tensor(2))
    """

    def __init__(
        self,
        sources: Any,
        where: Any,
        *,
        transform: Callable[[Any, SamplePart], Any] | None = None,
        halo: Any = None,
    ) -> None:
        self._sources: list[Source]
        self._sources, form = tree_flatten(sources)
        # The position of each source, in their structure: samples, parts and layouts in this
        # structure are converted to lists with it, and back.
        self._form = tree_unflatten([*range(len(self._sources))], form)
        if not self._sources or not all(isinstance(each, Source) for each in self._sources):
            raise TypeError(
                f"expected tessel.data sources such as FromArray(array), alone or in tuples and "
                f"dicts, got {sources!r}"
            )
        self._where = (
            self._for_each(where)
            if not isinstance(where, Where)
            else ([where] * len(self._sources))
        )
        for each in self._where:
            if not isinstance(each, Where):
                raise TypeError(f"where: expected a Partition or a Layout, got {each!r}")
        grids = [each.partition if isinstance(each, Layout) else each for each in self._where]
        self.partition: Partition = grids[0]
        if any(grid != self.partition for grid in grids):
            raise ValueError(f"all arrays of a sample must be on one grid, got {grids}")
        self._halo = [None] * len(self._sources) if halo is None else self._for_each(halo)
        self._transform = transform
        # Processes that read for this worker are not workers: it is remembered which box is meant.
        self._worker = transport.this_worker()
        self._layouts: dict[tuple[int, Shape], Layout] = {}

    def _for_each(self, given: Any) -> list[Any]:
        """The items of an argument in the structure of the sources, as a list."""
        try:
            return tree_structure(self._form).flatten_up_to(given)
        except ValueError as error:
            raise ValueError(
                f"expected one for each source, in the same structure: {error}"
            ) from error

    def __len__(self) -> int:
        lengths = {len(each) for each in self._sources}
        if len(lengths) > 1:
            raise ValueError(
                f"expected sources of one length, got {[len(each) for each in self._sources]}"
            )
        return lengths.pop()

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the arrays of a sample."""
        return [each.dtype for each in self._sources]

    def layouts(self, index: int) -> list[Layout]:
        """The layouts of the arrays of a sample, with shared copies along all other axes."""
        found = []
        for number, (source, where) in enumerate(zip(self._sources, self._where, strict=True)):
            shape = tuple(source.shape_of(index))
            if (number, shape) not in self._layouts:
                if isinstance(where, Layout):
                    if where.shape != shape:
                        raise ValueError(f"a sample has shape {shape}, but its layout is {where}")
                    layout = where
                else:
                    if len(shape) > where.dim:
                        raise ValueError(
                            f"the last axes of {where} split the last dimensions of a sample, got "
                            f"one of shape {shape}; pass a tessel.Layout of it as where="
                        )
                    layout = Layout.split(where, shape, range(where.dim - len(shape), where.dim))
                shared = tuple(sorted({*layout.shared, *layout.separate}))
                self._layouts[number, shape] = replace(layout, shared=shared)
            found.append(self._layouts[number, shape])
        return found

    @property
    def batch_axis(self) -> int | None:
        """The axis of the grid that splits batches."""
        if not len(self):
            return 0
        used = {axis for each in self.layouts(0) for cut in each.cuts for axis in cut.axes}
        return None if 0 in used or not self.partition.dim else 0

    def batch_layouts(self, indices: Sequence[int]) -> list[Layout]:
        """The layouts of the arrays of a batch of these samples: (batch, …)."""
        first, *others = indices
        layouts = self.layouts(first)
        for index in others:
            for one, other in zip(layouts, self.layouts(index), strict=True):
                if one.shape != other.shape:
                    raise ValueError(
                        f"samples of a batch must have the same shape, got {one.shape} for sample "
                        f"{first} and {other.shape} for sample {index}; use batch_size=1, or a "
                        "transform"
                    )
        axis, count = self.batch_axis, len(indices)
        # The last batch of an epoch may be short: balanced shares, of which some may be empty.
        cut = Cut.whole(count)
        if axis is not None:
            cut = Cut((axis,), boxes.balanced(count, self.partition.shape[axis]))
        return [
            replace(
                each,
                shape=(count, *each.shape),
                cuts=(cut, *each.cuts),
                shared=tuple(one for one in each.shared if one not in cut.axes),
            )
            for each in layouts
        ]

    def __getitem__(self, index: int) -> Any:
        return self.read(index, seed=index)

    def read(self, index: int, seed: int) -> Any:
        """This worker's part of a sample.

        Args:
            index: the index of the sample.
            seed: of the generator of its transform.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there are samples 0 to {len(self) - 1}, got {index}")
        if self.partition.place(self._worker) is None:
            return self._formed([torch.empty(0, dtype=each) for each in self.dtypes])
        own: list[Box] = []
        read: list[Box] = []
        parts: list[torch.Tensor] = []
        for source, layout, halo in zip(
            self._sources, self.layouts(index), self._halo, strict=True
        ):
            grown = layout if halo is None else layout.grow(halo)
            for found, each in ((own, layout), (read, grown)):
                box = each.box(self._worker)
                assert box is not None
                found.append(box)
            parts.append(source.read(index, read[-1]))
        # Without any values there is nothing to transform, and many functions would raise.
        if self._transform is not None and any(part.numel() for part in parts):
            place = SamplePart(index, self._formed(read), torch.Generator().manual_seed(seed))
            made = self._for_each(self._transform(self._formed(parts), place))
            for part, new in zip(parts, made, strict=True):
                kinds = [
                    (tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else each
                    for each in (part, new)
                ]
                if kinds[0] != kinds[1]:
                    raise ValueError(
                        f"a transform must keep shapes and dtypes: expected {kinds[0]}, got "
                        f"{kinds[1]}; sources take dtype=, and shapes can be changed in batches: "
                        "x[:, None]"
                    )
            parts = [each.detach() for each in made]
        # The halo was for the transform: this worker keeps only its own part of the result.
        cropped = (
            part[boxes.within(box, around)].contiguous()
            for part, box, around in zip(parts, own, read, strict=True)
        )
        return self._formed([*cropped])

    def _formed(self, values: Sequence[Any]) -> Any:
        return tree_map(lambda place: values[place], self._form)

    def collected(self, samples: Sequence[Any]) -> list[torch.Tensor]:
        """The arrays of a batch of samples that were read."""
        arrays = zip(*(self._for_each(each) for each in samples), strict=True)
        return [each[0][None] if len(each) == 1 else torch.stack(each) for each in arrays]
