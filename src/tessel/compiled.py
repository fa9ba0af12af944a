"""How a compiler sees a movement: as one opaque node of its graph.

Shapes are fixed when a call is compiled, by an agreement of all workers. Each run of the compiled
call agrees again, so that a tensor that changed on some workers only raises on all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessel.agreement import Claim, Meeting, Terms
from tessel.linop import LinearOperator
from tessel.numbered import object_of


@torch.library.custom_op("tessel::apply", mutates_args=())
def node(x: Tensor, number: str) -> Tensor:
    """Apply the operator of this number."""
    return object_of(number)._apply(x)


@node.register_fake
def _(x: Tensor, number: str) -> Tensor:
    return x.new_empty(object_of(number).codomain.local_shape)


class Compiled(LinearOperator):
    """An operator whose every run is preceded by the agreement that it was compiled for."""

    def __init__(
        self,
        operator: LinearOperator,
        meeting: Meeting[tuple[LinearOperator, Terms]],
        claim: Claim,
    ) -> None:
        self.operator, self.meeting, self.claim = operator, meeting, claim
        self.domain, self.codomain = operator.domain, operator.codomain
        operator.prepare()
        self.prepare()

    @property
    def H(self) -> LinearOperator:
        return self.operator.H

    def _apply(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return node(x, self.number)
        operator, _ = self.meeting.reach(self.claim)
        if operator != self.operator:
            raise ValueError(
                f"{self.meeting.label}: this call was compiled for other shapes than "
                f"{operator.domain}; compiled calls have fixed shapes on all workers"
            )
        return operator._apply(x)
