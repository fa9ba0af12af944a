"""Weights in files of safetensors: whole for other programs, of which workers read their parts."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor
from torch.nn import Module

from tessel.core.partition import Partition
from tessel.state.parts import collector, kinds, local_problem
from tessel.state.places import Places, without_wrapper
from tessel.state.raising import together
from tessel.state.tensor_file import TensorFile, TensorFileWriter


def save_weights(
    module: Module, path: str | os.PathLike[str], *, partition: Partition | None = None
) -> None:
    """Write parameters and buffers to a file of safetensors, which contains only tensors.

    All workers call this. The file has the names and whole tensors of the model of plain torch, and
    checksums, which other programs ignore. The first worker writes it tensor by tensor: no worker
    needs memory for more than one whole tensor. The file gets its name once it is on the disk.

    Args:
        module: the model, possibly in `DistributedDataParallel`.
        path: the path of the file, such as "model.safetensors".
        partition: the workers that hold one copy of it; None for those of its shards.

    >>> import tempfile, tessel
    >>> model = tessel.nn.ParallelLinear(3, 2, dim=-1)
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> tessel.nn.save_weights(model, path)
    >>> tessel.nn.load_weights(model, path)
    """
    module = without_wrapper(module)
    places = Places.of(module, partition, "save_weights")
    if not places.row.active:
        return
    state = module.state_dict(keep_vars=True)
    problems = places.problems(state, local_problem)
    problems += [
        f"the value {name} is a {type(value).__name__}, but a file of weights contains only tensors"
        for name, value in state.items()
        if not isinstance(value, Tensor)
    ]
    places.agree("save_weights", kinds(state), problems)
    known: dict[str, Any] = {**state, **places.layouts}  # which have the shapes of whole values
    whole = {name: (value.dtype, known[name].shape) for name, value in state.items()}
    tensors = (  # one at a time, on the first worker
        (name, collector(places, True, True)(value, places.layouts.get(name)))
        for name, value in state.items()
    )
    with together("save_weights", places.row, f"save_weights: {path} cannot be written"):
        try:
            if places.first.active:
                with TensorFileWriter(path, whole) as writer:
                    for name, tensor in tensors:
                        writer.put(name, tensor)
        except (OSError, TypeError):
            for _ in tensors:  # all workers go through all, also when the first cannot write
                pass
            raise
        for _ in tensors:
            pass


def load_weights(
    module: Module, path: str | os.PathLike[str], *, partition: Partition | None = None
) -> None:
    """Read parameters and buffers from a file of safetensors, on each worker those that it holds.

    All workers call this, and must be able to read the file. It may be one of `save_weights`, for
    any `dim` and any number of workers, or of another program, with the names of the model of plain
    torch. As in `load_state_dict`, numbers are converted to the dtypes of the model. If a tensor is
    split along its first dimension, a worker reads only its rows. Checksums are verified if the
    file has them. If a worker cannot read its values, all of them raise, and the model does not
    change.

    Args:
        module: the model, possibly in `DistributedDataParallel`.
        path: of the file.
        partition: the workers that hold one copy of it; None for those of its shards.

    >>> import tempfile, tessel
    >>> model = tessel.nn.ParallelLinear(3, 2, dim=-1)
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> tessel.nn.save_weights(model, path)
    >>> tessel.nn.load_weights(model, path)
    """
    module = without_wrapper(module)
    places = Places.of(module, partition, "load_weights")
    if not places.row.active:
        return
    state = module.state_dict(keep_vars=True)
    found = dict[str, Any]()
    with together("load_weights", places.row, "load_weights"):
        file = TensorFile(path)
        for name in sorted({*state} ^ {*file.entries}):
            who = "the model" if name in state else "the file"
            raise ValueError(f"{path} belongs to another model: only {who} has {name}")
        for name, value in state.items():
            layout, box = places.layouts.get(name), None
            shape, there = tuple((layout or value).shape), file.entries[name].shape
            if there != shape:
                raise ValueError(
                    f"{path} belongs to another model: {name} has shape {there} in the file and "
                    f"{shape} in the model"
                )
            if layout is not None and places.is_apart(layout):  # of others all workers read all
                box = layout.box() or [(0, 0)] * len(layout.shape)
            found[name] = file.read(name, box)
    module.load_state_dict(found)
