"""The model-parallel group: the workers over which layers split their weights by default."""

from __future__ import annotations

from collections.abc import Callable
from operator import index as as_int

from tessel import transport
from tessel.core.agreement import agree
from tessel.core.partition import Partition, world
from tessel.transport import kept_in_job


def init_process_group(group_size: int | None = None) -> None:
    """Fix the default model-parallel groups: this many consecutive workers each, or all in one.

    The name is that of torchshard; unlike the function of the same name in `torch.distributed`,
    this takes no backend and no address. All workers call this together, once. With 8 workers and
    a group size of 2, workers 0 and 1 are the first group, and 6 and 7 the last. Under `torchrun`
    or `tessel run` this joins the job.

    Args:
        group_size: the number of workers of each group, a divisor of the number of all workers.

    >>> import tessel
    >>> tessel.distributed.init_process_group(group_size=1)
    >>> tessel.distributed.get_group_size()
    1
    >>> tessel.distributed.destroy_process_group()
    """
    everyone = world()
    if chosen := _chosen():
        raise RuntimeError(
            f"the model-parallel group is already fixed to {chosen[0].size} of {everyone.size} "
            "workers; call tessel.distributed.destroy_process_group() before fixing it to "
            f"{everyone.size if group_size is None else group_size}"
        )
    agree(everyone, f"tessel.distributed.init_process_group(group_size={group_size!r})")
    if isinstance(group_size, bool | str):
        raise TypeError(
            f"init_process_group: expected a number of workers, got {group_size!r}; backends are "
            f"chosen by torch.distributed.init_process_group or tessel run"
        )
    size = everyone.size if group_size is None else as_int(group_size)
    if size < 1 or everyone.size % size:
        raise ValueError(
            f"init_process_group: the group size must divide the number of workers, got a group "
            f"size of {size} for {everyone.size} workers"
        )
    groups = [  # all workers make all groups, in one order
        Partition(everyone.ranks[start : start + size], (size,))
        for start in range(0, everyone.size, size)
    ]
    _chosen().extend(group for group in groups if group.active)


def is_initialized() -> bool:
    """Whether `init_process_group` has fixed the default group.

    >>> import tessel
    >>> tessel.distributed.is_initialized()
    False
    """
    return bool(_chosen())


def destroy_process_group() -> None:
    """Forget the default group; the process groups of `torch.distributed` stay.

    >>> import tessel
    >>> tessel.distributed.init_process_group()
    >>> tessel.distributed.destroy_process_group()
    >>> tessel.distributed.is_initialized()
    False
    """
    if not is_initialized():
        raise RuntimeError(
            "there is no model-parallel group to destroy; "
            "tessel.distributed.init_process_group(group_size) fixes one"
        )
    _chosen().clear()


def get_rank() -> int:
    """The place of this worker in its model-parallel group, from 0 to `get_group_size() - 1`.

    Its rank in the job is `tessel.world().rank`.

    >>> import tessel
    >>> tessel.distributed.get_rank()
    0
    """
    rank = get_group().rank
    assert rank is not None  # every worker is in a group
    return rank


def get_world_size() -> int:
    """The number of workers of the job.

    >>> import tessel
    >>> tessel.distributed.get_world_size()
    1
    """
    return world().size


def get_group_size() -> int:
    """The number of workers of this worker's model-parallel group.

    >>> import tessel
    >>> tessel.distributed.get_group_size()
    1
    """
    return get_group().size


def get_group() -> Partition:
    """The model-parallel group of this worker: all workers, unless `init_process_group` was called.

    >>> import tessel
    >>> tessel.distributed.get_group()
    Partition(1 on workers 0)
    """
    everyone = world()
    return next(iter(_chosen()), everyone)


def row_of(partition: Partition | None) -> Partition:
    """The workers of a partition in one row, in their order; None for the default group."""
    if partition is None:
        return get_group()
    if not isinstance(partition, Partition):
        raise TypeError(f"partition: expected a tessel.Partition or None, got {partition!r}")
    return partition if partition.dim == 1 else Partition(partition.ranks, (partition.size,))


def _chosen() -> list[Partition]:
    """A list of the group that `init_process_group` fixed in this job for this worker, if any."""
    transport.look_for_job()  # a new job may have begun, in which nothing is fixed yet
    return _kept()


_kept: Callable[[], list[Partition]] = kept_in_job(list)
