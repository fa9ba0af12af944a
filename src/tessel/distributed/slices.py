"""Slices of a tensor: the balanced parts that the workers of a group store."""

from __future__ import annotations

from operator import index as as_int

from torch import Tensor


def slices(
    tensor: Tensor, num_partitions: int, dim: int | None = None, contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Cut a tensor into balanced parts along a dimension, as the workers of a group store them.

    The parts have length n // p, and the first n % p of them one more. This is `tessel.slice`.

    Args:
        tensor: the whole tensor.
        num_partitions: the number of parts, p; some are empty if the dimension is shorter.
        dim: the dimension; None for the last.
        contiguous: whether to copy parts that are not contiguous; else all are views.

    >>> import tessel, torch
    >>> [tuple(part.shape) for part in tessel.slice(torch.empty(3, 10), 3, dim=-1)]
    [(3, 4), (3, 3), (3, 3)]
    """
    if not isinstance(tensor, Tensor) or tensor.ndim == 0:
        raise ValueError(f"slice: expected a tensor of at least one dimension, got {tensor!r}")
    place, parts = -1 if dim is None else as_int(dim), as_int(num_partitions)
    if not -tensor.ndim <= place < tensor.ndim:
        raise ValueError(f"slice: dim {place} is out of range for shape {tuple(tensor.shape)}")
    if parts < 1:
        raise ValueError(f"slice: expected at least one part, got num_partitions={parts}")
    cut = tensor.tensor_split(parts, place)
    return tuple(part.contiguous() for part in cut) if contiguous else cut
