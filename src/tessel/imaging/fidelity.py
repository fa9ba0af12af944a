"""DistributedDataFidelity: how far an image is from all measurements, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tessel.agreement import Claim, Meeting, Terms, same
from tessel.imaging.context import DistributedContext
from tessel.imaging.measurements import DistributedMeasurements, anchor_of, check_counts
from tessel.imaging.parts.fidelity import gradient
from tessel.imaging.parts.operators import vjp
from tessel.imaging.physics import WAY_OUT, DistributedPhysics, image_of, square, sum_of
from tessel.imaging.signal import DistributedSignal, checked_data, local_data
from tessel.imaging.uses import (
    Leaves,
    Use,
    check_common,
    hang,
    in_common,
    tensors_of,
    totalled,
    using,
)
from tessel.layout import Shape

REDUCTIONS = ("sum", "mean")


class L2:
    """Half the squared distance ½‖A(x) − y‖² of each image of a batch, for Gaussian noise.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> identity = SimpleNamespace(A=lambda x: x)
    >>> L2()(torch.ones(2, 3), torch.zeros(2, 3), identity)
    tensor([1.5000, 1.5000])
    """

    def __call__(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        difference = _difference(physics.A(x), y)
        return 0.5 * torch.stack([square(each) for each in difference.unbind()])

    def grad(self, x: Tensor, y: Tensor, physics: Any) -> Tensor:
        """The gradient J(x)ᵀ (A(x) − y)."""
        return vjp(physics, x, _difference(physics.A(x), y))


def _difference(measured: Tensor, y: Tensor) -> Tensor:
    """The difference of tensors of one shape: what torch would broadcast is a mistake here."""
    if measured.shape != y.shape:
        raise ValueError(
            f"a measurement has the shape {tuple(y.shape)}, and the operator gives "
            f"{tuple(measured.shape)}"
        )
    return measured - y


class DistributedDataFidelity:
    """The data fidelity of all operators: f(x) = Σ_i f_i(x), where f_i(x) = d(A_i(x), y_i).

    Forward:  f(x) = c·Σ_i f_i(x), ∇f(x) = c·Σ_i ∇f_i(x), the same on all workers; c is 1 for the
    reduction "sum", and 1/N for "mean", with which a step length that suits each of N operators
    suits them all together. This class sums by default, as the formula of the document says;
    `make_distrib_bundle` takes the mean by default, since a step of 1 diverges with a sum.

    A data fidelity is any object with `grad(x, y, physics)` that can be called with these, as those
    of deepinv, or a function of them. The loss has the shape that they give: (batch,), a number for
    each image, for those of deepinv and for ½‖·‖²; write `loss.sum()` to derive it.

    Args:
        ctx: the workers.
        physics: the operators.
        measurements: as many as there are operators.
        data_fidelity_factory: `data_fidelity_factory(i, device, shared)` makes f_i; None for ½‖·‖².
        reduction: "sum" or "mean" over the operators; the bundle's default is "mean".
        shared: what all of them may use, by name; parameters in it get gradients on all workers.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from tessel.imaging import (
    ...     DistributedContext, DistributedDataFidelity, DistributedMeasurements, DistributedPhysics
    ... )
    >>> with DistributedContext() as ctx:
    ...     physics = DistributedPhysics(ctx, 2, lambda *_: SimpleNamespace(A=lambda x: 2 * x))
    ...     measurements = DistributedMeasurements(ctx, 2, lambda *_: torch.ones(1))
    ...     fidelity = DistributedDataFidelity(ctx, physics, measurements)
    ...     fidelity(torch.ones(1)), fidelity.grad(torch.ones(1))
    (tensor([1.]), tensor([4.]))
    """

    def __init__(
        self,
        ctx: DistributedContext,
        physics: DistributedPhysics,
        measurements: DistributedMeasurements,
        data_fidelity_factory: Callable[[int, torch.device, Mapping[str, Any]], Any] | None = None,
        reduction: str = "sum",
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        check_reduction(reduction)
        check_counts(physics.num_ops, measurements.num_items)
        self.ctx = ctx
        self.physics = physics
        self.measurements = measurements
        self.reduction = reduction
        self.shared = dict(shared or {})
        make = data_fidelity_factory or (lambda *_: L2())
        held = tensors_of(make)
        self.local_fidelities = [make(i, ctx.device, self.shared) for i in physics.local_indices]
        parts = physics.parts
        place = f"worker {ctx.rank}" if parts is None else parts.place
        self._common = in_common(ctx, held, {place: self.local_fidelities})
        self._leaves = Leaves(ctx)

    def __call__(
        self, x: DistributedSignal | Tensor, *args: Any, gather: bool = True, **settings: Any
    ) -> Tensor:
        """The loss f(x) of each image, a shared value: every worker may derive its sum.

        Args:
            x: the image.
            args, settings: of the data fidelities.
            gather: False: the share of this worker's operators, whose sum over workers is the loss.
        """
        if self.physics.parts is not None:
            self._check_gather(gather)
            loss = self._in_parts(self.physics.parts.loss, x, args, settings)
            return self.physics.everywhere(loss)
        with self._using("__call__", x, args, settings) as use:
            losses = [
                f(use.x, y, operator, *use.args, **use.settings) for f, y, operator in self._terms
            ]
        self._check_leaves("__call__", losses)
        kind = use.x.real.dtype
        shape = self._shape_of(losses)
        zero = use.x.new_zeros(shape, dtype=kind)
        return self._reduced(sum_of(losses, zero).to(kind), use, gather)

    def _shape_of(self, losses: Sequence[Tensor]) -> Shape:
        """The shape of all losses on all workers, some of which may have none."""
        shapes = {tuple(each.shape) for each in losses}
        call = f"{self!r}"
        if len(shapes) > 1:
            call += f": data fidelities of worker {self.ctx.rank} give losses of shapes {shapes}"
        if self.ctx.world_size > 1:
            owners = self.ctx.owners(self.physics.num_ops)
            group = self.ctx.partition.group
            meeting = Meeting(group, f"the loss of {call}", owners, _same_shape)
            return meeting.reach(Claim(next(iter(shapes), ()), torch.float32, "cpu"))
        if len(shapes) > 1:
            raise ValueError(call)
        return next(iter(shapes))

    def grad(
        self, x: DistributedSignal | Tensor, *args: Any, gather: bool = True, **settings: Any
    ) -> Tensor:
        """The gradient ∇f(x); with `gather=False` the share of this worker's operators."""
        if self.physics.parts is not None:
            self._check_gather(gather)
            return self._in_parts(self.physics.parts.grad, x, args, settings)
        with self._using("grad", x, args, settings) as use:
            gradients = [
                gradient(f, use.x, y, operator, *use.args, **use.settings)
                for f, y, operator in self._terms
            ]
        self._check_leaves("grad", gradients)
        return self._reduced(image_of(gradients, use.x, f"{self!r}.grad"), use, gather)

    def _check_gather(self, gather: bool) -> None:
        if not gather:
            raise NotImplementedError(
                f"{self!r}: gather=False is for a whole image on every worker; of one in parts "
                f"each worker gets its part"
            )

    def _in_parts(
        self, method: Callable[..., Tensor], x: DistributedSignal | Tensor, args: Any, settings: Any
    ) -> Tensor:
        self.physics.check_parameters(())
        if args or settings:
            raise NotImplementedError(
                f"{self!r}: fidelities of an image in parts take no arguments, got {args} and "
                f"{settings}"
            )
        check_common(f"{self!r}", self._common, self.shared, WAY_OUT)
        assert self.physics.parts is not None
        data = checked_data(self.ctx, x, self.physics.parts.layout, f"{self!r}")
        ys = self.measurements.local
        found = method(data, ys, self.local_fidelities, self.shared)
        return found if self.reduction == "sum" else found / self.physics.num_ops

    @property
    def _terms(self) -> list[tuple[Any, Tensor, Any]]:
        """Of each of this worker's operators the fidelity, the measurement and the operator."""
        operators = self.physics.local_operators
        return list(zip(self.local_fidelities, self.measurements.local, operators, strict=True))

    def _using(self, method: str, x: DistributedSignal | Tensor, args: Any, settings: Any) -> Any:
        shared = [self.physics.shared, self.shared]
        self.physics.check_parameters(shared)
        check_common(f"{self!r}", self._common, shared, WAY_OUT)
        users = [self.physics.local_operators, self.local_fidelities]
        call = f"{self!r}.{method}"
        return using(self.ctx, call, local_data(x), shared, args, settings, users)

    def _check_leaves(self, method: str, results: Sequence[Tensor]) -> None:
        users = [self.physics.local_operators, self.local_fidelities]
        shared = [self.physics.shared, self.shared]
        given = self.measurements.local
        self._leaves.check(f"{self!r}.{method}", results, users, shared, given)

    def _reduced(self, share: Tensor, use: Use, gather: bool) -> Tensor:
        hung = use.hang(hang(share, anchor_of(self.measurements.local)))
        whole = totalled(hung, self.ctx) if gather else hung
        return whole if self.reduction == "sum" else whole / self.physics.num_ops

    def __repr__(self) -> str:
        return f"DistributedDataFidelity({self.reduction!r} over {self.physics!r})"


def _same_shape(shapes: dict[int, Shape], terms: Terms) -> Shape:
    found: Shape = same(shapes, "shape of the loss", "DistributedDataFidelity")
    return found


def check_reduction(reduction: str) -> None:
    """Raise ValueError unless there is a reduction of this name."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
