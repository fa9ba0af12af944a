"""Movement: the base of all data movements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from tessel import transport
from tessel.core.agreement import Agreement, SignaturesOfOutputs, TensorMeta, check_outputs
from tessel.core.handles import HasHandle
from tessel.core.layout import Shape
from tessel.core.linop import AgreedOperator, LinearOperator, apply_agreed
from tessel.core.partition import Partition


class Movement(HasHandle, torch.nn.Module):
    """A movement of tensors from the workers of `P_x` to those of `P_y`.

    The global shape is not known beforehand: in each call the workers exchange the signatures of
    their tensors. Then all raise the same error, or all apply the same operator. A worker outside
    of both partitions gets a clone of its input.

    With `out` nothing is allocated: all workers pass tensors for their outputs, `torch.empty(0)` if
    they have none, and get these back. Like torch's functions with `out`, it has no derivative.

    A subclass implements `operator(shapes)`.
    """

    _group: transport.Group | None = None
    _derived = HasHandle._derived | {"_group", "_slices"}

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__()
        self.P_x = P_x
        self.P_y = P_y
        self.prepare()  # all workers make it, including those that will never call it

    def operator(self, shapes: Mapping[int, Shape]) -> LinearOperator:
        """Return the operator for local tensors of these shapes, by worker of `P_x`.

        It must be the same on all workers, or raise ValueError on all of them.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `operator`")

    def operators(self, shapes: Mapping[int, Shape]) -> Sequence[LinearOperator]:
        """The different operators of all workers."""
        return [self.operator(shapes)]

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return apply_agreed(self, x, self.P_x.active, out)

    @cached_property
    def takes_part(self) -> bool:
        """Whether this worker sends or receives something."""
        return transport.this_worker() in (*self.P_x.ranks, *self.P_y.ranks)

    def prepare(self) -> transport.Group:
        """Make the group, all workers together, here or in the first call of a copy; return it."""
        if self._group is None:
            self._group = transport.group_of({*self.P_x.ranks, *self.P_y.ranks})
        return self._group

    @cached_property
    def _agreement(self) -> Agreement[AgreedOperator]:
        assert self._group is not None, "`prepare` is called before"
        ranks = self.P_x.ranks
        return Agreement(
            self._group, repr(self), ranks, self._conclude, check_outputs=self._check_outputs
        )

    def _conclude(self, shapes: dict[int, Shape], meta: TensorMeta) -> AgreedOperator:
        operator = self.operator(shapes)
        operator.check_dtype(meta.dtype, repr(self))
        return operator, meta

    def _check_outputs(
        self, shapes: dict[int, Shape], meta: TensorMeta, outputs: SignaturesOfOutputs
    ) -> None:
        expected = dict[int, Shape | None].fromkeys(outputs)
        for operator in self.operators(shapes):
            layout = operator.codomain
            expected.update((worker, layout.shape_on(worker)) for worker in layout.partition.ranks)
        check_outputs(repr(self), expected, meta, outputs)

    def extra_repr(self) -> str:
        return f"{self.P_x} → {self.P_y}"
