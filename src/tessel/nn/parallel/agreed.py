"""Checks of parallel layers on the tensors that all workers hold, after an agreement.

All of these depend only on values that every worker knows: so they raise on all of them, with the
same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.forward_ad import dual_level

from tessel.core.agreement import NumbersByWorker, ShapesAndMeta, TensorMeta, agree
from tessel.core.checksum import is_within
from tessel.core.context import in_forward_mode
from tessel.core.graph import eagerly
from tessel.core.layout import Layout, Shape
from tessel.core.partition import Partition
from tessel.distributed.shardings import Sharding, State, UnknownSharding

WAY_OUT = "tessel.distributed.gather(x) makes a tensor whole again"

Frozen = tuple[tuple[tuple[int, Shape], ...], TensorMeta]


def frozen(held: ShapesAndMeta) -> Frozen:
    """The shapes by worker and the metadata of a tensor, as a cache key."""
    shapes, meta = held
    return tuple(shapes.items()), meta


def in_mode_of(meta: TensorMeta) -> AbstractContextManager[Any]:
    """Forward mode if any worker computes in it: tangents of all workers are sent together."""
    return dual_level() if meta.has_tangent and not in_forward_mode() else nullcontext()


@eagerly
def agree_on_spread(partition: Partition, name: str) -> None:
    """Raise on all workers unless all of them pass a spread tensor to a call.

    A spread tensor needs no agreement: all workers know its layout. But workers with another kind
    of tensor would wait for one forever.
    """
    agree(partition, f"{name} over {partition}, where the input is a spread tensor")


def misfit(state: State, expected: Sharding | None, name: str) -> str:
    """Why a tensor does not fit a layer, by its sharding; an empty text if it may fit.

    Args:
        state: the known sharding of the tensor; a plain tensor may also be a shard.
        expected: the sharding that the layer needs; None for whole.
        name: the name of the tensor.
    """
    if state is None:
        return ""
    if isinstance(state, UnknownSharding):
        return f"{name}: {state.remedy}"
    # not equality: a sharding of unknown size fits one of any size
    if expected is not None and state.merged(expected) is not None:
        return ""
    wanted = "whole on every worker" if expected is None else expected
    return f"{name} must be {wanted}, got {state}; {WAY_OUT}"


def check_sharding(state: State, expected: Sharding | None, name: str, label: str) -> None:
    """Raise ValueError, with `label`, for a tensor that does not fit a layer."""
    if problem := misfit(state, expected, name):
        raise ValueError(f"{label}: {problem}")


def check_parts(
    shapes: Mapping[int, Shape], layout: Layout, name: str, label: str, hint: str = ""
) -> None:
    """Raise ValueError for a worker whose part has another shape than in a layout."""
    # in the order of the partition: all workers name the same one
    for worker in layout.partition.ranks:
        if shapes[worker] != layout.shape_on(worker):
            raise ValueError(
                f"{label}: worker {worker} expected a part of shape {layout.shape_on(worker)} of "
                f"{name} of shape {layout.shape}, got {shapes[worker]}{hint}"
            )


def check_copies(
    values: NumbersByWorker, names: Sequence[str], count: int, what: tuple[str, str], label: str
) -> None:
    """Raise IndexError for a number that is out of range, and ValueError for copies that differ.

    Args:
        values: for each worker, the smallest and the largest number of its first tensor, and
            checksums of all tensors.
        names: the names of the tensors.
        count: the upper bound of numbers, exclusive.
        what: the names of a number, and of the numbered objects.
        label: the text of the call, for errors.
    """
    for worker, (low, high, *_) in values.items():
        if not is_within(low, high, count):
            raise IndexError(
                f"{label}: {what[0]} {low if low < 0 else high} is out of bounds on worker "
                f"{worker}: the {what[1]} are 0 to {count - 1}"
            )
    # every worker is compared with the first: so all find the same pair, and raise the same text
    first, (_, _, *expected) = next(iter(values.items()))
    for worker, (_, _, *said) in values.items():
        for name, mine, others in zip(names, said, expected, strict=True):
            if mine != others:
                raise ValueError(
                    f"{label}: all workers must have the same {name}, but the values differ "
                    f"between workers {first} and {worker}; pass the same batch on all workers, "
                    "for example with the same seed for the data loader, or first gather the "
                    "values that differ"
                )
