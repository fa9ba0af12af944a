"""Movement: what all data movements have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tessel import transport
from tessel.agreement import Claim, Meeting, Terms, admit
from tessel.compiled import Compiled
from tessel.layout import Shape
from tessel.linop import LinearOperator
from tessel.numbered import Numbered, constant_in_graphs, object_of
from tessel.partition import Partition


class Movement(Numbered, torch.nn.Module):
    """A movement of tensors from the workers of `P_x` to those of `P_y`.

    The global shape is not known beforehand: at each call the workers tell each other, in one
    small exchange, what they hold. Then all raise the same error, or all apply the same operator.
    A worker outside of both partitions gets a clone of what it passed.

    A subclass gives `operator(shapes)`.
    """

    def __init__(self, P_x: Partition, P_y: Partition) -> None:
        super().__init__()
        self.P_x = P_x
        self.P_y = P_y
        self._takes_part  # noqa: B018  (the groups are made by all workers, here or when unpickled)

    def operator(self, shapes: Mapping[int, Shape]) -> LinearOperator:
        """The operator for local tensors of these shapes, by worker of `P_x`.

        It must be the same on all workers, or raise ValueError on all of them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not give its operator")

    def forward(self, x: Tensor) -> Tensor:
        if not self._takes_part:
            return x.clone()
        if torch.compiler.is_compiling():
            lengths = [len(range(length)) for length in x.shape]  # so that a compiler fixes them
            grad = x.requires_grad and torch.is_grad_enabled(), not torch.is_grad_enabled()
            kind = lengths, x.dtype, x.device.type, *grad
            operator, terms = getattr(self, _settled_while_compiling(self.number, *kind))
        else:
            operator, terms = self._meeting.reach(Claim.of(x))
        return operator.apply(admit(x, terms, self.P_x.active), terms)

    @cached_property
    def _takes_part(self) -> bool:
        """Whether this worker gives or gets something."""
        return transport.this_worker() in self._group.workers

    @cached_property
    def _group(self) -> transport.Group:
        return transport.group_of({*self.P_x.ranks, *self.P_y.ranks})

    @cached_property
    def _meeting(self) -> Meeting[tuple[LinearOperator, Terms]]:
        return Meeting(self._group, repr(self), self.P_x.ranks, self._conclude)

    def _conclude(self, shapes: dict[int, Shape], terms: Terms) -> tuple[LinearOperator, Terms]:
        operator = self.operator(shapes)
        operator.check_dtype(terms.dtype, repr(self))
        return operator, terms

    def extra_repr(self) -> str:
        return f"{self.P_x} → {self.P_y}"

    def _is_derived(self, name: str) -> bool:
        return name in (
            "number",
            "_group",
            "_takes_part",
            "_meeting",
            "_slices",
        ) or name.startswith("_settled")


@constant_in_graphs
def _settled_while_compiling(number: str, lengths: list[int], *kind: Any) -> str:
    """Agree once, while all workers compile the call; the name of the conclusion's attribute."""
    movement: Movement = object_of(number)
    claim = Claim(tuple(lengths), *kind)
    operator, terms = movement._meeting.reach(replace(claim, compiles=True))
    name = f"_settled_{abs(hash(claim))}"
    movement.__dict__[name] = Compiled(operator, movement._meeting, claim), terms
    return name
