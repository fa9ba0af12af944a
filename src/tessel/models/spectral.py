"""Spectral convolutions: a matrix for each low mode, as one distributed operator.

The Fourier transform, the restriction to the low modes, the weights and the inverse are planned as
a whole. So modes are dropped before the tensor is moved, and padded afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessel.core.layout import Layout
from tessel.core.partition import Partition
from tessel.operators import (
    Distributed,
    ParDFT,
    ParDiagonal,
    ParIdentity,
    ParMultilinear,
    ParOperator,
    ParRestriction,
    kron,
)
from tessel.operators.layouts import split_along
from tessel.operators.leaf import Leaf
from tessel.operators.space import Shape, checked_length, complex_of
from tessel.transport import kept_in_job


@dataclass(frozen=True)
class Modes:
    """The kept modes: the `counts[d]` lowest along dimension d, of both signs.

    Along the last dimension a real tensor's modes of negative sign follow from the others.

    >>> Modes.of(4, 2).lengths
    (8, 4)
    """

    counts: Shape

    @classmethod
    def of(cls, modes: int | Sequence[int], num_dims: int) -> Modes:
        """One number for all dimensions, or one for each."""
        given: Any = modes if isinstance(modes, Sequence) else [modes] * num_dims
        counts = tuple(checked_length("FNO", "each of modes", each) for each in given)
        if len(counts) != num_dims:
            raise ValueError(
                f"expected one number of modes, or one for each of {num_dims} dimensions of "
                f"space, got {modes}"
            )
        return cls(counts)

    @property
    def lengths(self) -> Shape:
        """The number of modes along each dimension."""
        return *(2 * count for count in self.counts[:-1]), self.counts[-1]

    def check(self, space: Shape) -> None:
        """Raise ValueError if a tensor has fewer."""
        for dim, (count, length) in enumerate(zip(self.counts, space, strict=True)):
            if 2 * count > length:
                raise ValueError(
                    f"{count} modes need a length of at least {2 * count}, but dimension {dim} "
                    f"of space has {length}; space is {'×'.join(map(str, space))}"
                )

    def restrictions(self, dtype: torch.dtype, lengths: Shape) -> list[ParRestriction]:
        """The restrictions to the kept modes of a spectrum of these lengths."""
        *signed, last = self.counts
        found = [
            ParRestriction(dtype, n, [range(k), range(n - k, n)])
            for k, n in zip(signed, lengths[:-1], strict=True)
        ]
        return [*found, ParRestriction(dtype, lengths[-1], [range(last)])]


# an operator, and its leaves that take values: the matrix for each mode, and with complex
# transforms the weights by which a mode also counts for its negative
Expression = tuple[ParOperator, ParMultilinear, ParDiagonal | None]


class SpectralConvolution:
    """The convolution y = F⁻¹ Rᴴ W R F x, where W has a matrix over channels for each kept mode.

    Args:
        expression: the operator.
        P_x: the partition of its tensors.
        stored: the layout of the weights, if they are not stored where they are needed.
    """

    def __init__(self, expression: Expression, P_x: Partition, stored: Layout | None) -> None:
        whole, self.weights, self.doubling = expression
        storage = None if stored is None else {self.weights: stored}
        self.operator = spread(whole, P_x, storage)

    def __call__(self, x: Tensor, weights: Tensor, columns: Shape) -> Tensor:
        """Apply it to a part (channels, *space, batch), with this worker's part of the weights."""
        values: dict[Leaf, Tensor] = {self.weights: weights}
        if self.doubling is None:
            return self.operator.run(x, values, columns, batch_first(x))
        # One for the mode zero, two for modes that represent a pair.
        kind = self.doubling.source
        numbers = torch.full(kind.shape, 2, dtype=kind.dtype, device=x.device)
        numbers[0] = 1
        values[self.doubling] = numbers
        # Negative modes of the last dimension are left out: they would cancel the imaginary part.
        return self.operator.run(x.to(weights.dtype), values, columns, batch_first(x)).real


def batch_first(x: Tensor) -> Shape:
    """The memory order of dimensions: the last one, the batch, before the others."""
    return x.dim() - 1, *range(x.dim() - 1)


@kept_in_job
def spectral_convolution(
    P_x: Partition, width: int, modes: Modes, space: Shape, dtype: torch.dtype
) -> SpectralConvolution:
    """The convolution on a grid of points, with the fewest moves of the tensor.

    A real transform along the last dimension has to come first. If that dimension is split and
    others are whole, the tensor would have to be moved before modes are dropped: then all
    transforms are complex, and the result is the real part. It is the same map with the same
    weights.

    The storage of these does not depend on the number of points.
    """
    stored = None
    if space != _usual(P_x, modes):  # weights are stored as the usual number of points needs them
        usual = usual_convolution(P_x, width, modes, dtype)
        stored = usual.operator.storage[usual.weights]
    expressions = (make(width, modes, space, dtype) for make in (by_real, by_complex))
    ways = [SpectralConvolution(each, P_x, stored) for each in expressions]
    return min(ways, key=lambda each: each.operator.plan.num_transfers)  # the first if equal


def usual_convolution(
    P_x: Partition, width: int, modes: Modes, dtype: torch.dtype
) -> SpectralConvolution:
    """The convolution that defines how weights are stored."""
    return spectral_convolution(P_x, width, modes, _usual(P_x, modes), dtype)


def _usual(P_x: Partition, modes: Modes) -> Shape:
    """A number of points of which each worker has some."""
    return tuple(4 * count * P_x.size for count in modes.counts)


def by_real(width: int, modes: Modes, space: Shape, dtype: torch.dtype) -> Expression:
    """The operator with a real transform along the last dimension, which halves other work."""
    kind = complex_of(dtype)
    spectrum = (*space[:-1], space[-1] // 2 + 1)
    transforms = [*(ParDFT(kind, n) for n in space[:-1]), ParDFT(dtype, space[-1])]
    F = kron(ParIdentity(dtype, width), *transforms)
    R = kron(ParIdentity(kind, width), *modes.restrictions(kind, spectrum))
    W = ParMultilinear(kind, width, width, modes.lengths)
    return F.inv @ R.H @ W @ R @ F, W, None


def by_complex(width: int, modes: Modes, space: Shape, dtype: torch.dtype) -> Expression:
    """The operator with complex transforms only, in any order."""
    kind = complex_of(dtype)
    channels = ParIdentity(kind, width)
    F = kron(channels, *(ParDFT(kind, n) for n in space))
    R = kron(channels, *modes.restrictions(kind, space))
    W = ParMultilinear(kind, width, width, modes.lengths)
    *others, last = modes.lengths
    D = ParDiagonal(kind, last)
    doubling = kron(channels, *(ParIdentity(kind, n) for n in others), D)
    return F.inv @ R.H @ doubling @ W @ R @ F, W, D


def spread(
    expression: ParOperator, P_x: Partition, storage: Mapping[Any, Any] | None = None
) -> Distributed:
    """Distribute an operator on (channels, *space) with the batch last, split by the first axis."""
    split = [(axis,) if size > 1 else () for axis, size in enumerate(P_x.shape)]
    source = split_along(P_x, expression.domain.shape, split[1:])
    target = split_along(P_x, expression.codomain.shape, split[1:])
    return Distributed(expression, source, target, storage)
