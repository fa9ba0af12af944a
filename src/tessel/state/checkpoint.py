"""Sharded checkpoints: each worker writes its shards, and any number of workers reads them.

`torch.distributed.checkpoint` stores whole tensors in pieces with the box of each piece. A `Part`
provides the box of a worker's shard, by the same three methods as torch's own `DTensor`: any split,
balanced or not, can be written, and read in another one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.distributed.wrapping import is_redundant
from tessel.state.places import Places, without_wrapper
from tessel.transport import this_worker

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader


class Part(Tensor):
    """A tensor of the whole shape, of which only this worker's part is stored.

    It is for checkpoints and does not compute: `torch.distributed.checkpoint` writes and reads the
    part.

    Args:
        part: this worker's tensor.
        shape: the shape of the whole.
        offsets: where the part begins in it, along each dimension; None if this worker has none.

    >>> import tessel, torch
    >>> layout = tessel.Layout.balanced(tessel.world(), (4,))
    >>> tessel.interop.Part.of(torch.ones(4), layout).shape
    torch.Size([4])
    """

    _part: Tensor
    _offsets: tuple[int, ...] | None

    @staticmethod
    def __new__(cls, part: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...] | None) -> Part:
        # no memory for the whole, of which only shape and dtype are used
        whole: Part = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device
        )
        whole._part, whole._offsets = part, offsets
        return whole

    @classmethod
    def of(cls, part: Tensor, layout: Layout, worker: int | None = None) -> Part:
        """A worker's part, by default this one's, of a tensor in a layout."""
        box = layout.box(worker)
        return cls(part, layout.shape, None if box is None else tuple(start for start, _ in box))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            # the destination of copies of torch.distributed.checkpoint.async_save
            whole, device = args[0], (kwargs or {}).get("device")
            room = whole._part.new_empty(whole._part.shape, device=device)
            return cls(room, tuple(whole.shape), whole._offsets)
        raise NotImplementedError(f"{func}: a part of a tensor is for checkpoints only")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Part({self._part!r} at {self._offsets} of {tuple(self.shape)})"

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        # Imported here, since it takes half a second, which only writing checkpoints should cost.
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._part),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self._offsets is None or (self.numel() and not self._part.numel()):
            return []  # other workers have it all
        return [ChunkStorageMetadata(torch.Size(self._offsets), self._part.size())]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self._part  # the memory of the model itself, which `load` reads into


class ModelState:
    """The state of a model, for `torch.distributed.checkpoint.save` and `load`.

    Each worker writes its shards and reads the pieces of its shards, also from the files of another
    number of workers or for another `dim`. A value that several workers have is written by one of
    them. Names and shapes are those of the model of plain torch, which can also read the files.

    Torch pickles the `.metadata` of these files and unpickles it when it reads them, which can
    execute code: Tessel warns of that, once. `checkpoint_reader` executes nothing.

    Args:
        module: the model, possibly in `DistributedDataParallel`.
        partition: the workers that hold one copy of it; None for those of its shards.

    >>> import tempfile, tessel, torch
    >>> import torch.distributed.checkpoint as dcp
    >>> model = tessel.nn.ParallelLinear(3, 2, dim=-1)
    >>> folder = tempfile.mkdtemp()
    >>> _ = dcp.save({"model": tessel.interop.ModelState(model)}, checkpoint_id=folder)
    >>> reader = tessel.interop.checkpoint_reader(folder)
    >>> dcp.load({"model": tessel.interop.ModelState(model)}, storage_reader=reader)
    """

    def __init__(self, module: Module, partition: Partition | None = None) -> None:
        self.module = without_wrapper(module)
        self.partition = partition

    def state_dict(self) -> dict[str, Any]:
        """The state with shards as parts of whole tensors; they share memory with the model."""
        _note_reader(False)
        places = Places.of(self.module, self.partition, "ModelState")
        state = self.module.state_dict()
        problems = places.problems(state, _misfit)
        places.agree("ModelState.state_dict", state, problems)
        return {name: _part(value, places, name) for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that was read into the model."""
        _warn_of_pickles()
        # Parts were read into the memory of the model; other values are separate tensors.
        self.module.load_state_dict({name: _own(value) for name, value in state.items()})


class OptimizerState:
    """The state of an optimizer, for `torch.distributed.checkpoint.save` and `load`.

    The elementwise state of a parameter has its sharding, and is written and read like the
    parameter. Values have the names of the parameters, as in
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`. Torch unpickles the
    `.metadata` of these files, `checkpoint_reader` does not.

    With a `ZeroRedundancyOptimizer` each worker writes and reads the state that it keeps, and
    nothing is consolidated. The files are those of the optimizer that it wraps.

    Args:
        module: the model, possibly in `DistributedDataParallel`.
        optimizer: the optimizer of its parameters; before its first step its state is created, by a
            step of torch with gradients and rates of zero.
        partition: the workers that hold one copy of the model; None for those of its shards.

    >>> import tempfile, tessel, torch
    >>> import torch.distributed.checkpoint as dcp
    >>> model = tessel.nn.ParallelLinear(3, 2, dim=-1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> state = {"optimizer": tessel.interop.OptimizerState(model, optimizer)}
    >>> folder = tempfile.mkdtemp()
    >>> _ = dcp.save(state, checkpoint_id=folder)
    >>> dcp.load(state, storage_reader=tessel.interop.checkpoint_reader(folder))
    """

    def __init__(
        self, module: Module, optimizer: Optimizer, partition: Partition | None = None
    ) -> None:
        self.module, self.optimizer = without_wrapper(module), optimizer
        self.partition = partition

    def state_dict(self) -> dict[str, Any]:
        """The state by the names of parameters, with parts of whole tensors."""
        _note_reader(False)
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        places = Places.of(self.module, self.partition, "OptimizerState")
        # Gradients are put aside, with which torch would not make a state before the first step.
        parameters = [each for group in self._own.param_groups for each in group["params"]]
        grads = [] if self._own.state else [(each, each.grad) for each in parameters]
        try:
            for each, _ in grads:
                each.grad = None
            state: dict[str, Any] = get_optimizer_state_dict(self.module, self._own)
        finally:
            for each, grad in grads:
                each.grad = grad
        kept = state["state"]
        if self._is_redundant:  # all workers write the groups with all parameters
            pairs = zip(self._own.param_groups, self.optimizer.param_groups, strict=True)
            state["param_groups"] = [
                {**own, **group, "params": [places.names[id(each)] for each in group["params"]]}
                for own, group in pairs
            ]
        problems = [
            text
            for name, values in kept.items()
            if (layout := places.layouts.get(name)) is not None and places.is_apart(layout)
            for what, value in values.items()
            if _is_tensor(value)
            if (text := _misfit(f"the value {what!r} of an optimizer for {name}", value, layout))
        ]
        listing = [f"{what!r} for {name}" for name, values in kept.items() for what in values]
        if self._is_redundant:  # of which each worker has some
            listing = [f"{group['params']}" for group in state["param_groups"]]
        places.agree("OptimizerState.state_dict", listing, problems, NotImplementedError)
        parts = {
            name: {
                what: _part(value, places, name) if _is_tensor(value) else value
                for what, value in values.items()
            }
            for name, values in kept.items()
        }
        return {**state, "state": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that was read into the optimizer."""
        _warn_of_pickles()
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        own: dict[str, Any] = {
            name: {what: _own(value) for what, value in values.items()}
            for name, values in state["state"].items()
        }
        groups = state["param_groups"]
        if self._is_redundant:
            for ours, theirs in zip(self.optimizer.param_groups, groups, strict=True):
                ours.update({key: value for key, value in theirs.items() if key != "params"})
            groups = [
                {**group, "params": [name for name in group["params"] if name in own]}
                for group in groups
            ]
        given: Any = {**state, "state": own, "param_groups": groups}
        set_optimizer_state_dict(self.module, self._own, given)

    @property
    def _is_redundant(self) -> bool:
        """Whether each worker keeps only the state of some parameters."""
        return is_redundant(self.optimizer)

    @property
    def _own(self) -> Optimizer:
        """The optimizer that keeps the state of this worker."""
        return self.optimizer.optim if self._is_redundant else self.optimizer  # type: ignore[attr-defined]


def checkpoint_reader(folder: str | os.PathLike[str]) -> FileSystemReader:
    """A reader for `torch.distributed.checkpoint.load` that executes nothing in the files.

    Pass it instead of `checkpoint_id`. Torch unpickles the `.metadata` of a checkpoint, and its
    values that are no tensors, and so executes code of their author. This reader allows only the
    classes of which checkpoints of tensors consist; for everything else all workers raise.

    Args:
        folder: the folder of the checkpoint.

    >>> import tempfile, tessel, torch
    >>> import torch.distributed.checkpoint as dcp
    >>> model, folder = tessel.nn.ParallelLinear(3, 2, dim=-1), tempfile.mkdtemp()
    >>> state = {"model": tessel.interop.ModelState(model)}
    >>> _ = dcp.save(state, checkpoint_id=folder)
    >>> dcp.load(state, storage_reader=tessel.interop.checkpoint_reader(folder))
    """
    from tessel.state.checkpoint_reader import CheckpointReader

    return CheckpointReader(folder, partial(_note_reader, True))


# Torch calls `state_dict` first, then reads, then calls `load_state_dict`.
_is_read_here = False  # whether our reader has read the next state
_has_warned = False


def _note_reader(is_ours: bool) -> None:
    """Record whether the next state was read without unpickling."""
    global _is_read_here
    _is_read_here = is_ours


def _warn_of_pickles() -> None:
    """Warn once, on the first worker, that torch has executed the pickles of the files."""
    global _has_warned
    if not _is_read_here and not _has_warned:
        _has_warned = True
        if this_worker() == 0:
            warnings.warn(
                "torch.distributed.checkpoint unpickles the files that it reads, so untrusted "
                "files can run code here; pass "
                "storage_reader=tessel.interop.checkpoint_reader(folder), which refuses such "
                "files, to dcp.load instead of checkpoint_id",
                stacklevel=4,
            )


def _is_tensor(value: Any) -> bool:
    """Whether it is more than a single number."""
    return isinstance(value, Tensor) and value.dim() > 0


def _misfit(name: str, value: Tensor, layout: Layout) -> str:
    """What is wrong with the shape of a part, or an empty text."""
    if tuple(value.shape) == layout.local_shape:
        return ""
    shapes = f"{tuple(value.shape)}, where its part of {layout} has {layout.local_shape}"
    return f"{name} has the shape {shapes}"


def _part(value: Any, places: Places, name: str) -> Any:
    """A value, or a part of it if no worker has the whole."""
    layout = places.layouts.get(name)
    if layout is None or not places.is_apart(layout):
        return value
    return Part.of(value.detach(), layout)


def _own(value: Any) -> Any:
    # torch.distributed.checkpoint has read into the memory of the part
    return value._part if isinstance(value, Part) else value
