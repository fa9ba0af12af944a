"""Sharding: which worker has which of the items 0, 1, …, n − 1. Pure integers."""

from __future__ import annotations

from tessel.core import boxes

SHARDINGS = ("round_robin", "block")


def local_indices(num_items: int, worker: int, workers: int, sharding: str) -> list[int]:
    """The items of one worker, in ascending order.

    round_robin:  {i : i mod P = k}.    block:  the k-th of P runs, of lengths that differ by ≤ 1.

    Args:
        num_items: how many items there are, 0 or more.
        worker: the place k of the worker.
        workers: their number P.
        sharding: "round_robin" or "block".

    >>> local_indices(5, 0, 2, "round_robin"), local_indices(5, 0, 2, "block")
    ([0, 2, 4], [0, 1, 2])
    """
    check_sharding(sharding)
    if num_items < 0:
        raise ValueError(f"the number of items must be 0 or more, got {num_items}")
    if not 0 <= worker < workers:
        raise ValueError(f"a worker from 0 to {workers - 1} is needed, got {worker}")
    if sharding == "round_robin":
        return list(range(worker, num_items, workers))
    return list(range(*boxes.balanced_part(num_items, workers, worker)))


def owner(item: int, num_items: int, workers: int, sharding: str) -> int:
    """The place of the worker that has an item, the inverse of `local_indices`.

    >>> owner(2, 5, 2, "round_robin"), owner(3, 5, 2, "block")
    (0, 1)
    """
    check_sharding(sharding)
    if not 0 <= item < num_items:
        raise ValueError(f"an item from 0 to {num_items - 1} is needed, got {item}")
    if sharding == "round_robin":
        return item % workers
    return boxes.balanced_place(num_items, workers, item)


def check_sharding(sharding: str) -> None:
    """Raise ValueError unless there is a sharding of this name."""
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding must be one of {', '.join(SHARDINGS)}, got {sharding!r}")
