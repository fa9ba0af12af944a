"""Agreement of a group on one call, and on what its workers bring to it."""

from __future__ import annotations

from torch import Tensor

from tessel.agreement import Claim, Meeting, Terms, reach_together
from tessel.layout import Shape
from tessel.partition import Partition
from tessel.transport import code_of, kept_in_job

Held = tuple[dict[int, Shape], Terms]  # the shapes by worker, and what all tensors have in common


def agree(partition: Partition, call: str, *tensors: Tensor) -> list[Held]:
    """The shapes of everybody's tensors, in one small exchange; all workers raise, or none.

    They raise if their calls differ, or the dtype, the device or the number of dimensions of a
    tensor. What else must be equal, or is wrong on one worker only, belongs into the text of the
    call: workers that say different things all raise, and the error quotes both.

    Args:
        partition: the workers, of which this must be one.
        call: what is called, in the words of its user.
        tensors: what each worker brings, as many on each.
    """
    found = reach_together(_meetings(partition, call, len(tensors)), list(map(Claim.of, tensors)))
    partition.group.number_call()
    return found


def agree_on_call(partition: Partition, call: str) -> None:
    """Raise on every worker of the partition unless all of them make the same call."""
    group = partition.group
    if partition.active and group.size > 1:
        group.check_same_call(group.share_words([code_of(call)]), call)


@kept_in_job
def _meetings(partition: Partition, call: str, count: int) -> list[Meeting[Held]]:
    return [Meeting(partition.group, call, partition.ranks, _held) for _ in range(count)]


def _held(shapes: dict[int, Shape], terms: Terms) -> Held:
    return shapes, terms
