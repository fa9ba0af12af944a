"""The repartition of a tensor, as an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessel.operators.algebra import ParOperator, kron
from tessel.operators.distributed import distribute
from tessel.operators.identity import ParIdentity
from tessel.partition import Partition


def ParRepartition(
    T: Any,
    shape: Sequence[int],
    partition_in: Sequence[int] | Partition,
    partition_out: Sequence[int] | Partition,
) -> ParOperator:
    """The identity, from a tensor on one grid of workers to the same on another.

    >>> import tessel, torch
    >>> R = tessel.ParRepartition(torch.float32, (4, 6), [1, 1], [1, 1])
    >>> (R * torch.ones(4, 6)).shape
    torch.Size([4, 6])
    """
    identities = [ParIdentity(T, length) for length in shape]
    if not identities:
        raise ValueError("ParRepartition: a shape of at least one dimension is needed")
    return distribute(kron(*identities), partition_in, partition_out)
