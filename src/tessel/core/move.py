"""Move: the one operator that communicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tessel import transport
from tessel.core.graph import node
from tessel.core.layout import Layout
from tessel.core.linop import LinearOperator
from tessel.core.plan import Plan, route
from tessel.core.stage import Stage, shaped

# what torch does not add, or not as numbers
UNSUMMABLE = (torch.bool, torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, repr=False)
class Move(LinearOperator):
    """Give every copy of an index in `codomain` the sum of its copies in `domain`.

    Forward:  y_s[i] = Σ_c x_c[i], where c runs over the separate copies of i in the domain.
    Adjoint:  x_c[i] = Σ_s y_s[i], which is `Move(codomain, domain)`.

    Where the domain stores each index once, this copies. Every movement is a choice of boxes:
    scatter, gather, broadcast, repartition and halo exchange copy; their adjoints, which swap the
    two layouts, sum. With copies on both sides it is the all-reduce.

    Args:
        domain: the layout of the input.
        codomain: the layout of the output, of the same global shape, over any workers.
        spaced: a dimension whose slices lie a little apart in the memory of the output, for a
            transform along it: slices at large powers of two fall into the same few places of
            a processor's cache.

    >>> import tessel, torch
    >>> layout = tessel.Layout.balanced(tessel.world(), (3,))
    >>> tessel.Move(layout, layout)(torch.ones(3))
    tensor([1., 1., 1.])
    """

    domain: Layout
    codomain: Layout
    spaced: int | None = None

    def __post_init__(self) -> None:
        if self.domain.shape != self.codomain.shape:
            raise ValueError(
                f"a move needs two layouts of one global shape: from {self.domain} "
                f"to {self.codomain}"
            )
        self.prepare()

    @cached_property
    def H(self) -> Move:
        adjoint = Move(self.codomain, self.domain)
        adjoint.__dict__["H"] = self  # not by an attribute, which is frozen; A.H.H is A itself
        return adjoint

    @cached_property
    def route(self) -> tuple[Plan, ...]:
        """The exchanges of this worker."""
        return route(self.domain, self.codomain, transport.this_worker())

    def check_dtype(self, dtype: torch.dtype, label: str) -> None:
        if dtype in UNSUMMABLE and not self.domain.owns_once:
            raise ValueError(f"{label}: {dtype} cannot be summed; convert it, say to torch.int64")

    def plan_ahead(self) -> None:
        super().plan_ahead()
        _ = self.route, self.H.route

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The same, with the group that makes them."""
        return tuple(Stage(plan, self.group, self.spaced) for plan in self.route)

    def _apply(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return node(x, self.handle)
        stages = self.stages
        y = stages[0](x) if len(stages) == 1 else stages[0].before(stages[1], x)
        return shaped(y, self.codomain.local_shape)

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Send what others need first; the result waits for what comes and gives the output.

        Room for the output is made when what was sent may be gone. Other movements may pass
        meanwhile; all workers wait in the same order.
        """
        first, *rest = self.stages
        receives = [first.begin(x)]

        def wait() -> Tensor:
            y = receives.pop()()  # what was sent is not kept until the last stage has landed
            for stage in rest:
                y = stage.begin(y)()
            return shaped(y, self.codomain.local_shape)

        return wait

    def _is_derived(self, name: str) -> bool:
        return name == "stages" or super()._is_derived(name)
