"""Data parallelism around model parallelism, with torch's `DistributedDataParallel`.

Two arrangements are common, and both give the gradients of one process.

*Replicas of a model that is split.* Every model-parallel group holds one copy of the model and
works on its own part of the batch. `data_parallel(model)` averages all gradients, including those
of shards, over the workers that hold the same shards.

*One split head after a backbone that is whole on all workers.* Each worker of a group passes its
own samples to the backbone; `gather_batch` concatenates the features of the group, and the head and
the loss work on all of them. `DistributedDataParallel` takes the mean of the backbone's gradients
over the workers, although they are the terms of a sum: `gather_batch` compensates for that. With
several groups the two are combined: `DistributedDataParallel(backbone)` over all workers, and
`data_parallel(head)`.

*Replicas of a converted model*, each on its own partition: `data_parallel(model)` averages
over the workers at the same place of all replicas.

Shards are averaged only over workers that hold the same ones. `DistributedDataParallel` detects
which of the two its process group is, see `tessel.distributed.wrapping`, and raises if it is
neither.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tessel.core.agreement import agree, tell
from tessel.core.graph import eagerly
from tessel.core.partition import Partition, world
from tessel.distributed.group import get_group, row_of
from tessel.distributed.movements import gather
from tessel.distributed.shards import sharding_of
from tessel.distributed.wrapping import IGNORED, REGISTERED
from tessel.nn.wrapped import callers, partitions_of


def get_data_parallel_group() -> Partition:
    """The workers at the same place in their model-parallel groups: they hold the same shards.

    With 4 workers in groups of 2 these are workers 0 and 2, and workers 1 and 3. All workers call
    this together the first time.

    >>> import tessel
    >>> tessel.nn.parallel.get_data_parallel_group()
    Partition(1 on workers 0)
    """
    everyone, size = world(), get_group().size
    groups = [  # all workers make all groups, in one order
        Partition(everyone.ranks[place::size], (everyone.size // size,)) for place in range(size)
    ]
    return next(group for group in groups if group.active)


def data_parallel(module: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """Wrap a module in `DistributedDataParallel` over the workers that hold the same shards.

    Forward:  that of `module`.    Backward:  every gradient, also of a shard, is the mean over the
    workers at the same place in the partitions of its layers, the model-parallel groups if they
    have the default one; for a converted model, in the partitions for which workers have converted
    it. Each partition holds one copy. All workers call this together.

    Each model-parallel group uses its own part of the batch, all of one size, and the mean loss of
    it; the gradients are those of the mean loss of the whole batch in one process. With one group
    only there is nothing to average, and the module itself is returned.

    Args:
        module: the model, of which each model-parallel group, or each partition, holds one copy.
        settings: other arguments of `DistributedDataParallel`.

    >>> import tessel, torch
    >>> tessel.nn.data_parallel(tessel.nn.ParallelLinear(3, 2, dim=-1))
    ParallelLinear(in_features=3, out_features=2, bias=True, dim=-1)
    """
    if "process_group" in settings:
        raise ValueError(
            "data_parallel chooses the process group itself (the workers that hold the same "
            "shards); for a different one call torch.nn.parallel.DistributedDataParallel"
        )
    # not the default group without looking: layers may have been made for other partitions
    held = [sharding_of(each) for each in module.parameters()]
    own = [each.partition for each in held if each is not None]
    partitions = partitions_of(module) or list(dict.fromkeys(own)) or [get_group()]
    replicas = _same_place(partitions)
    if replicas is None or replicas.size == 1:
        return module
    return DistributedDataParallel(module, process_group=replicas.prepare().handle, **settings)


def _same_place(partitions: list[Partition]) -> Partition | None:
    """The workers at this worker's place in all partitions of a model; None if it has only one."""
    everyone = world()
    told = tell(everyone, [each.ranks for each in partitions])
    rows = sorted({tuple(ranks) for each in told.values() for ranks in each})
    if len(rows) == 1:
        return None
    if len({len(each) for each in rows}) > 1 or sorted(sum(rows, ())) != sorted(everyone.ranks):
        raise ValueError(
            "data_parallel: each worker must belong to one partition of the model, and all "
            f"partitions must have the same size, got {[list(each) for each in rows]}"
        )
    # all workers make all groups, in one order
    groups = [Partition(ranks, (len(rows),)) for ranks in zip(*rows, strict=True)]
    return next(group for group in groups if group.active)


def register_ddp_parameters_to_ignore(module: torch.nn.Module) -> list[str]:
    """Add the parameters of a module that are shards to its list of those that DDP ignores.

    This call is not necessary: `DistributedDataParallel` itself ignores shards that differ between
    its workers. It does no harm either: if workers hold the same shards, as under `data_parallel`,
    these are averaged although they are on the list.

    Returns:
        The names of these parameters.

    >>> import tessel, torch
    >>> head = tessel.nn.ParallelLinear(3, 2, dim=-1)
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), head)
    >>> tessel.nn.register_ddp_parameters_to_ignore(model)
    ['1.weight', '1.bias']
    """
    shards = [
        name
        for name, value in module.named_parameters(remove_duplicate=False)
        if sharding_of(value) is not None
    ]
    # the user's entries stay; those of earlier calls are found again
    known = getattr(module, IGNORED, [])
    asked = [name for name in known if name not in getattr(module, REGISTERED, ())]
    new = [name for name in shards if name not in asked]
    setattr(module, IGNORED, [*asked, *new])
    setattr(module, REGISTERED, new)
    return shards


@eagerly
def gather_batch(x: Tensor, partition: Partition | None = None) -> Tensor:
    """Concatenate the samples of all workers, so that a mean of gradients becomes their sum.

    Forward:  y = (x_0, x_1, …) along dim 0, an all-gather.    Backward:  x_k gets P times its part
    of the gradient, where P is the number of workers, and nothing is sent.

    The loss of all samples has a gradient at each worker's samples; the gradient of a backbone is
    the sum of their contributions. `DistributedDataParallel` takes their mean, P times smaller. It
    must do so over all of these workers: under a wrapper that excludes some of them, such as
    `data_parallel` around backbone and head, all raise ValueError.

    Args:
        x: the features of this worker's samples, or its targets; any number.
        partition: the workers; None for the default group.

    >>> import tessel, torch
    >>> tessel.nn.gather_batch(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    row = row_of(partition)
    learns = x.requires_grad and torch.is_grad_enabled()
    problem = ""
    if learns:
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None:
            # Before torch 2.13 a wrapper inside another one resets the active module when it ends:
            # so search for the innermost one whose `forward` has called this.
            around = (each for each in callers() if isinstance(each, DistributedDataParallel))
            wrapper = next(around, None)
        group = None if wrapper is None else wrapper.process_group
        if group is not None and not {*row.ranks} <= {*dist.get_process_group_ranks(group)}:
            problem = (
                " inside a DistributedDataParallel that averages over other workers: each worker "
                "of the group would keep the gradient of its own samples; wrap the modules before "
                "gather_batch with DistributedDataParallel over all workers, and those after it "
                "with tessel.nn.data_parallel"
            )
    # other workers may find another wrapper, or none: all are told, and all raise
    agree(row, f"gather_batch over {row}{problem}")
    if problem:
        raise ValueError(f"gather_batch over {row}{problem}")
    if learns:
        x = x.view_as(x)  # another use of `x` gets its own gradient
        x.register_hook(lambda grad: grad * row.size)
    return gather(x, 0, row)
