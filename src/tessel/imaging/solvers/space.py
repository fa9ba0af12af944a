"""Space: where the tensors of a solver lie, and their inner product over all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tessel.core import Layout, Partition, replicate, total, world
from tessel.imaging.signal import DistributedSignal

Pair = tuple[Tensor, Tensor]
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # in which sums are taken


@dataclass(frozen=True)
class Space:
    """The space of an image that is whole on every worker or in parts on them.

    ⟨a, b⟩ = Σ over all indices of Re(conj(a) b), where copies of one value count once.

    Args:
        layout: where the image lies.
        workers: those that solve together, and get all inner products.
        differentiable: whether gradients go through inner products.

    >>> import tessel, torch
    >>> from tessel.imaging.solvers import Space
    >>> space = Space.of(torch.ones(3))
    >>> space.norm(torch.tensor([2.0, 1.0, 2.0])).item()
    3.0
    """

    layout: Layout
    workers: Partition
    differentiable: bool = False

    @classmethod
    def of(cls, start: Any, layout: Layout | None = None, differentiable: bool = False) -> Space:
        """The space of a signal, or of a tensor in this layout."""
        if isinstance(start, DistributedSignal):
            return cls(start.layout, start.ctx.partition, differentiable)._checked()
        if not isinstance(start, Tensor):
            raise TypeError(f"a tensor or a DistributedSignal is needed, got {start!r}")
        if layout is None and world().size > 1:
            raise ValueError(
                f"a tensor does not say how it lies on {world().size} workers; pass "
                f"layout=, or a DistributedSignal"
            )
        layout = layout or Layout.whole(world(), start.shape, shared=True)
        return cls(layout, layout.partition, differentiable)._checked()

    def _checked(self) -> Space:
        if not self.layout.owns_once:
            raise ValueError(
                f"a solver needs an image of which every index is one value, got {self.layout}; "
                f"copies that are equal are declared with shared=True"
            )
        if self.differentiable and self.workers.size != self.layout.partition.size:
            raise NotImplementedError(
                f"gradients through a solver need the image on all workers that solve: it lies "
                f"on {self.layout.partition}, these are {self.workers}"
            )
        return self

    def inners(self, *pairs: Pair) -> Tensor:
        """Several inner products in one exchange, as one tensor."""
        if self.differentiable:
            shares = torch.stack([_real_inner(a, b) for a, b in pairs])
            return self._own(total(shares, self.layout.partition, self.layout.shared))
        return self.numbers(*pairs)

    def numbers(self, *pairs: Pair) -> Tensor:
        """Inner products as numbers that are the same, bit by bit, on all workers."""
        # Copies of one value are on several workers: one of them brings it to the sum.
        if self._counts:
            shares = torch.stack([_real_inner(a.detach(), b.detach()) for a, b in pairs])
        else:
            dtype = pairs[0][0].real.dtype
            shares = pairs[0][0].new_zeros(len(pairs), dtype=_WIDE.get(dtype, dtype))
        return self.sum(shares)

    def sum(self, shares: Tensor) -> Tensor:
        """The sum of all workers' shares, without a gradient."""
        shares = shares.detach()
        return shares if self._is_alone else self.workers.group.sum(shares)

    def total(self, share: Tensor) -> Tensor:
        """The sum of all workers' shares of a number, on every worker."""
        if self.differentiable:
            return self._own(total(share, self.layout.partition))
        return self.sum(share)

    def apart(self, number: Tensor) -> Tensor:
        """A number of these as this worker uses it for what it alone has, as measurements."""
        if not self.differentiable:
            return number
        partition, shared = self.layout.partition, self.layout.shared
        each = tuple(partition.shape[axis] for axis in self._others)  # one number for each part
        layout = Layout.split(partition, each, self._others, shared)
        return replicate(number.reshape([1] * len(each)), layout, shared).reshape(())

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """The inner product of two images, on every worker."""
        return self.inners((a, b))[0]

    def norm(self, a: Tensor) -> Tensor:
        """The Euclidean norm of an image, on every worker."""
        return self.inner(a, a).sqrt()

    def agree(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag whether any worker raised it: the same answer on all."""
        if not flags or self._is_alone:
            return list(flags)
        # A sum, not an exchange of objects: the transport has this in one message.
        said = self.sum(torch.tensor([float(flag) for flag in flags]))
        return [count > 0 for count in said.tolist()]

    def _own(self, number: Tensor) -> Tensor:
        """A shared number as this worker uses it for its part of the image."""
        whole = Layout.whole(self.layout.partition, number.shape, shared=True)
        return replicate(number, whole, self._others)

    @cached_property
    def _others(self) -> list[int]:
        """The axes of the grid along which workers hold different parts."""
        return [a for a in range(self.layout.partition.dim) if a not in self.layout.shared]

    @cached_property
    def _is_alone(self) -> bool:
        return self.workers.size == 1

    @cached_property
    def _counts(self) -> bool:
        """Whether this worker's copy is the one, of several, that counts."""
        index = self.layout.partition.index
        return index is not None and not any(index[axis] for axis in self.layout.shared)


def _real_inner(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in _WIDE:  # which torch has no inner product of
        a, b = a.float(), b.float()
    return torch.vdot(a.reshape(-1), b.reshape(-1)).real
